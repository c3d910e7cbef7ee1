"""What one request holds to be sampled: its knobs, its history and its seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from paceline.sampling import noise
from paceline.sampling.processors import (
    Knobs,
    Law,
    Mask,
    TokenHistory,
    allowed_by,
    compile_knobs,
    law_of,
    process,
)
from paceline.sampling.rules import draw, race
from paceline.types import SamplingParams

__all__ = ["FAILURES", "NON_FINITE", "NOTHING_ALLOWED", "Sampler", "host_row"]

NON_FINITE: Final = -1
NOTHING_ALLOWED: Final = -2
FAILURES: Final = {
    NON_FINITE: "non-finite logits",
    NOTHING_ALLOWED: "no token is allowed here",
}
"""What a negative pick means."""


def host_row(logits: torch.Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A row, or rows, of logits as an array of the host; waits for a device."""
    return logits.detach().cpu().numpy() if isinstance(logits, torch.Tensor) else logits


class Sampler:
    """Picks the tokens of one request, for its target and for its drafter alike.

    Looking changes nothing: only `commit` moves the request on. Every method that looks takes the
    drafts before its row, so that a row is processed as if they had been emitted.

    Args:
        params: of the request.
        vocab_size: ids there are.
        prompt_ids: ids of the prompt; read here only.
        stop_ids: every id that ends the request, the end-of-sequence ids included.
        bad_word_ids: `params.bad_words` as ids, every spelling of each.
        sample: which of the request's `n` answers this is, from 0.

    Attributes:
        knobs: the parameters as the processors read them.
        history: what was committed.
        seed: of the noise: the request's, derived for a later sample, or fresh where none is given.

    Raises:
        RequestError: an id lies outside the vocabulary, or no id could ever be emitted.
    """

    __slots__ = ("history", "knobs", "seed")

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        prompt_ids: Iterable[int],
        stop_ids: Iterable[int] = (),
        bad_word_ids: Iterable[Sequence[int]] = (),
        sample: int = 0,
    ) -> None:
        self.knobs: Knobs = compile_knobs(
            params, vocab_size=vocab_size, stop_ids=stop_ids, bad_word_ids=bad_word_ids
        )
        self.history = TokenHistory(prompt_ids, counting=self.knobs.penalizes, tail=self.knobs.tail)
        seed = noise.fresh_seed() if params.seed is None else params.seed
        self.seed = noise.derive_seed(seed, sample)

    @property
    def keeps_logits(self) -> bool:
        """Whether the next row's processed logits are the model's own, masks aside."""
        knobs = self.knobs
        return knobs.keeps_logits and (
            self.history.num_output >= knobs.min_tokens or not len(knobs.stop_ids)
        )

    @property
    def is_argmax(self) -> bool:
        """Whether the next pick, and every later one, is the model's largest logit."""
        return self.knobs.temperature == 0 and self.keeps_logits

    @property
    def is_tempered(self) -> bool:
        """Whether picks race over the model's logits at a temperature, with no other knob."""
        knobs = self.knobs
        return (
            knobs.temperature > 0
            and not knobs.top_k
            and knobs.top_p == 1
            and not knobs.min_p
            and self.keeps_logits
        )

    def key(self, drafted: int = 0) -> int:
        """Key of the noise that the token behind `drafted` drafts is picked with."""
        return noise.row_key(self.seed, self.history.length + drafted)

    def law(
        self,
        logits: torch.Tensor | npt.NDArray[Any],
        *,
        drafted: Sequence[int] = (),
        mask: Mask | None = None,
    ) -> Law | int:
        """The law of the token behind `drafted`.

        Args:
            logits: [vocab] fp32, the target's or the drafter's; not changed.
            drafted: the drafts before it.
            mask: what the grammar allows after them, or None.

        Returns:
            The law, or a key of `FAILURES` where the row gives none.
        """
        raw = host_row(logits)
        # A NaN is the largest of its row, so the largest value tells of all of them.
        if not np.isfinite(raw.max()):
            return NON_FINITE
        row = process(raw, self.knobs, self.history, drafted=drafted, mask=mask)
        masked = mask is not None or self.knobs.allowed is not None
        law = law_of(row, self.knobs, masked=masked)
        return NOTHING_ALLOWED if law is None else law

    def pick(
        self,
        logits: torch.Tensor | npt.NDArray[Any],
        *,
        drafted: Sequence[int] = (),
        mask: Mask | None = None,
    ) -> int:
        """The token behind `drafted` under the shared noise; at temperature 0 the largest.

        A drafter that picks its drafts with this, from its own logits, is accepted where the target
        agrees, and never drafts what the target's knobs forbid.

        Returns:
            An id, or a key of `FAILURES`; arguments are those of `law`.
        """
        if self.is_argmax:
            raw = host_row(logits)
            best = int(raw.argmax())
            if not np.isfinite(raw[best]):
                return NON_FINITE
            if mask is None:
                return best
            ids = np.flatnonzero(allowed_by(mask, len(raw)))
            some = raw[ids]
            if not len(ids) or some.max() == -np.inf:
                return NOTHING_ALLOWED
            return int(ids[some.argmax()])
        law = self.law(logits, drafted=drafted, mask=mask)
        return law if isinstance(law, int) else race(law, self.key(len(drafted)))

    def draw(
        self,
        logits: torch.Tensor | npt.NDArray[Any],
        *,
        drafted: Sequence[int] = (),
        mask: Mask | None = None,
    ) -> tuple[int, npt.NDArray[np.float64] | None]:
        """A draft for the rejection rules, and the law it was drawn from, to be kept until verdict.

        Returns:
            An id and [vocab] fp64 that sum to 1; a key of `FAILURES` and None where the row gives
            no law. Arguments are those of `law`.
        """
        law = self.law(logits, drafted=drafted, mask=mask)
        if isinstance(law, int):
            return law, None
        j = len(drafted)
        dense = law.probabilities()
        start = self.history.length
        return draw(dense, noise.uniforms(self.seed, start, noise.Purpose.DRAFT, j + 1)[j]), dense

    def commit(self, ids: Sequence[int]) -> None:
        """Append what was emitted, after the answer is cut."""
        self.history.commit(ids)
