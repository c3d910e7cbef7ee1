"""A toy target with logits worth sampling, a drafter that picks alike, and requests for both."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from toy import VOCAB, Carrying, ToyModel, next_token, run, toy_engine

from paceline import SamplingParams
from paceline.cache.pools import CachePools
from paceline.engine import Emission, Engine
from paceline.models.step import StepInputs, TargetOutput
from paceline.types import Draft, DraftRequest, FinishReason

TABLE = (np.random.default_rng(5).standard_normal((VOCAB, VOCAB)) * 2).astype(np.float32)
NOISE = (np.random.default_rng(6).standard_normal((VOCAB, VOCAB))).astype(np.float32)


def logits_of(ids: list[int]) -> npt.NDArray[np.float32]:
    row: npt.NDArray[np.float32] = TABLE[next_token(ids)]
    return row


class SpreadToy(ToyModel):
    """The toy with logits worth sampling: a row of a table for each token it would say.

    Args:
        barren: a token id after which every logit is -inf.
    """

    def __init__(self, *, poison: int | None = None, barren: int | None = None) -> None:
        super().__init__(poison=poison)
        self.barren = barren

    def forward(self, inputs: StepInputs, pools: CachePools) -> TargetOutput:
        output = super().forward(inputs, pools)
        logits = output.logits.numpy()
        last = inputs.ids.numpy()[inputs.logits_rows.numpy()]
        for row, token in enumerate(last):
            if token == self.barren:
                logits[row] = -np.inf
            elif np.isfinite(logits[row]).all():
                logits[row] = TABLE[int(logits[row].argmax())]
        return output


class Picking(Carrying):
    """Drafts what the sampler picks or draws from logits `error` away from the target's.

    Attributes:
        laws_given: laws handed over so far.
    """

    def __init__(self, error: float = 0.0, **named: Any) -> None:
        super().__init__(None, **named)
        self.error = error
        self.laws_given = 0

    def _draft(self, request: DraftRequest, state: Any) -> Draft:
        laws: list[Any] = []
        sampler = request.sampler

        def rule(history: list[int], count: int, step: int) -> list[int]:
            drafted: list[int] = []
            while len(drafted) < count:
                ids = [*history, *drafted]
                row = logits_of(ids) + self.error * NOISE[next_token(ids)]
                if sampler is None:
                    token = int(row.argmax())
                elif request.draws:
                    token, law = sampler.draw(row, drafted=drafted)
                    laws.append(law)
                else:
                    token = sampler.pick(row, drafted=drafted)
                if token < 0:
                    break
                drafted.append(token)
            return drafted

        self.rule = rule
        draft = super()._draft(request, state)
        self.laws_given += len(laws)
        return dataclasses.replace(draft, laws=laws[: len(draft.tokens)]) if laws else draft

    def free_state(self, state: Any) -> None:
        # By identity: states of sequences that stand alike are equal.
        self.live[:] = [one for one in self.live if one is not state]


@dataclass
class Asked:
    """One request of a batch."""

    prompt: list[int]
    knobs: dict[str, Any]
    num_drafts: Any = None

    def add(self, engine: Engine, **changes: Any) -> int:
        knobs = {"seed": 3, "max_tokens": 24, **self.knobs, **changes}
        words = knobs.pop("bad_word_ids", ())
        sample = knobs.pop("sample", 0)
        if engine.drafting is not None and self.num_drafts is not None:
            knobs["num_drafts"] = self.num_drafts
        return engine.add(self.prompt, SamplingParams(**knobs), bad_word_ids=words, sample=sample)


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(f"prompt {length} {seed}")
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def tokens_of(emissions: Iterable[Emission]) -> list[int]:
    return [token for emission in emissions for token in emission.token_ids]


def outcome(emissions: list[Emission]) -> tuple[list[int], FinishReason | None, str | None]:
    return tokens_of(emissions), emissions[-1].finish_reason, emissions[-1].error


def alone(asked: Asked, **options: Any) -> tuple[list[int], FinishReason | None, str | None]:
    engine = toy_engine(model=SpreadToy(), **options)
    number = asked.add(engine)
    return outcome(run(engine)[number])
