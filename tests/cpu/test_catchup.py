"""A drafter that was not asked for a while is told of what it missed, before it is asked again."""

from __future__ import annotations

import inspect
import json.decoder
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support import Rig, make_rig
from toy import VOCAB, Checked, continuation, oracle, run, toy_config, toy_engine

import paceline
from paceline.draft import ContextProposer, DeepseekV4MtpHead
from paceline.draft.length import SequenceView, StepRecord
from paceline.engine import Engine
from paceline.models.deepseek_v4.build import Backend
from paceline.models.deepseek_v4.checkpoint import load_weights
from paceline.ops import numba_cpu
from paceline.text.tokenizer import Tokenizer
from paceline.types import Draft, DraftRequest, SamplingParams

NO_EOS = toy_config(eos_token_ids=())
AUTO = SamplingParams(max_tokens=500, num_drafts="auto", ignore_eos=True)


class Ordered:
    """A length policy that does as a rule of (request, decode step of the request) says."""

    def __init__(self, rule: Callable[[int, int], int]) -> None:
        self.rule = rule
        self.steps: dict[int, int] = {}

    def choose(
        self, sequences: Sequence[SequenceView], *, max_drafts: int | None = None
    ) -> list[int]:
        chosen = []
        for view in sequences:
            step = self.steps[view.id] = self.steps.get(view.id, -1) + 1
            chosen.append(min(view.limit, self.rule(view.id, step)))
        return chosen

    def observe(self, record: StepRecord) -> None:
        pass


def paused(before: int, pause: int, num_drafts: int = 3) -> Callable[[int, int], int]:
    """Drafts for `before` steps, none for `pause`, then drafts again."""
    return lambda number, step: 0 if before <= step < before + pause else num_drafts


class Telling(ContextProposer):
    """Drafts what depends on every pair in its window, and keeps its drafts by position."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB)
        self.drafts: dict[int, list[int]] = {}
        self.num_caught = 0

    def propose(self, request: DraftRequest, state: Any) -> Draft:
        draft = super().propose(request, state)
        self.drafts[request.position] = draft.tokens
        return draft

    def catchup_drafter(self, *args: Any) -> int:
        self.num_caught += 1
        return super().catchup_drafter(*args)


@pytest.mark.parametrize("pause", [1, 2, 5, 126, 127, 128, 129, 300])
@pytest.mark.parametrize("length", [1, 20, 200])
def test_drafts_after_a_pause_are_those_of_a_cold_start(length: int, pause: int) -> None:
    prompt = [3 + n % 50 for n in range(length)]
    proposer = Telling()
    engine = toy_engine(
        config=NO_EOS,
        proposer=proposer,
        num_drafts="auto",
        lengths=Ordered(paused(4, pause)),
        max_seq_len=1024,
    )
    engine.add(prompt, AUTO)
    for _ in range(1 + 4 + pause):
        engine.step()
    known = list(engine._requests[0].sequence.tokens)
    proposer.drafts.clear()
    assert proposer.num_caught == 0
    for _ in range(6):
        engine.step()
    assert proposer.num_caught == 1
    assert engine.num_proposer_failures == 0

    cold = Telling()
    twin = toy_engine(
        config=NO_EOS, proposer=cold, num_drafts=3, max_seq_len=1024, max_num_batched_tokens=600
    )
    # What was sampled last is sampled again.
    twin.add(known[:-1], SamplingParams(max_tokens=100))
    for _ in range(7):
        twin.step()
    assert proposer.drafts == cold.drafts
    assert min(proposer.drafts) == len(known) - 1


def test_each_of_a_batch_pauses_as_it_likes() -> None:
    prompts = [[7 + n] * (30 + n) for n in range(4)]
    proposer = Checked(oracle, batch=3)
    policy = Ordered(lambda number, step: (number + step // (number + 2)) % 4)
    engine = toy_engine(
        config=NO_EOS, proposer=proposer, num_drafts="auto", lengths=policy, max_num_seqs=4
    )
    params = SamplingParams(max_tokens=90, num_drafts="auto")
    for prompt in prompts:
        engine.add(prompt, params)
    for number, emissions in run(engine).items():
        tokens = [t for e in emissions for t in e.token_ids]
        assert tokens == continuation(prompts[number], 90)
    # `Checked` refuses a pair that does not follow the one before, and streams of another position.
    assert engine.num_proposer_failures == 0
    assert proposer.calls["catchup_drafter"] > 10


def test_pairs_of_accepted_drafts_that_were_declined_are_part_of_the_pause() -> None:
    """A drafter that does not take accepted drafts gets them with the rest, streams and all."""
    prompt = [5, 6, 7]

    class Declining(Telling):
        caught: tuple[int, list[int]] = (0, [])

        def propose(self, request: DraftRequest, state: Any) -> Draft:
            super().propose(request, state)
            tokens = continuation(list(request.history), request.num_drafts)
            state.num_drafted = len(tokens)
            return Draft(tokens=tokens)

        def catchup_batch(self, *args: Any) -> int:
            return 0

        def catchup_drafter(
            self, tokens: Any, hiddens: Any, row_base: int, pos_base: int, state: Any
        ) -> int:
            assert [int(s[0, 0]) for s in hiddens] == [pos_base - 1 + n for n in range(len(tokens))]
            self.caught = pos_base, list(tokens)
            return ContextProposer.catchup_batch(self, [tokens], [hiddens], [pos_base], [state])

    proposer = Declining()
    engine = toy_engine(
        config=NO_EOS, proposer=proposer, num_drafts="auto", lengths=Ordered(paused(1, 4))
    )
    engine.add(prompt, AUTO)
    for _ in range(1 + 1 + 4 + 1):
        engine.step()
    assert engine.num_proposer_failures == 0
    said = [*prompt, *continuation(prompt, 40)]
    # The first propose, at position 3, wrote key 2; then three drafts and five more tokens came.
    assert proposer.caught == (4, said[4:11])


def test_a_pause_that_lasts_to_the_end_is_never_told_of() -> None:
    proposer = Telling()
    engine = toy_engine(
        config=NO_EOS, proposer=proposer, num_drafts="auto", lengths=Ordered(paused(4, 1000))
    )
    engine.add([5, 6, 7], SamplingParams(max_tokens=60, num_drafts="auto"))
    run(engine)
    assert proposer.num_caught == 0
    assert len(proposer.drafts) == 4


# On the model that ships


@pytest.fixture(scope="module")
def rig() -> Rig:
    try:
        path = paceline.bundled_model_path()
    except paceline.CheckpointError as error:
        pytest.skip(str(error))
    weights = load_weights(path)
    backend: Backend = "fused" if numba_cpu.available() else "torch"
    return make_rig(weights, weights.config, backend=backend, num_slots=1)


def head_of(rig: Rig) -> DeepseekV4MtpHead:
    built = rig.built
    assert built.mtp is not None
    return DeepseekV4MtpHead.new(
        built.mtp, built.embed_tokens, built.lm_head, rig.config, 0, 1024, num_slots=1
    )


def test_rows_and_acceptance_are_back_at_once_after_300_steps(rig: Rig) -> None:
    head = head_of(rig)
    engine = Engine(
        rig.built.model,
        rig.config,
        proposer=head,
        num_drafts="auto",
        lengths=Ordered(paused(10, 300)),
        max_seq_len=1024,
        max_num_seqs=1,
    )
    assert engine.drafting is not None
    path = paceline.bundled_model_path()
    tokenizer = Tokenizer(
        path, vocab_size=rig.config.vocab_size, bos_token_id=rig.config.bos_token_id
    )
    prompt = tokenizer.encode(inspect.getsource(json.decoder))[:90]
    number = engine.add(prompt, AUTO)
    for _ in range(1 + 10 + 300):
        engine.step()
    assert engine.drafting.num_catchup_rows == 0
    known = list(engine._requests[number].sequence.tokens)
    assert len(known) > 400

    (emission,) = engine.step()
    warm = [emission.token_ids]
    first, rows = head.held_rows(engine.drafting._states[number])
    tokens = list(engine._requests[number].sequence.tokens)
    for _ in range(24):
        (emission,) = engine.step()
        warm.append(emission.token_ids)
    engine.abort(number)

    # Each step gives what it would to somebody who comes with the whole text.
    engine.lengths = engine._scheduler.lengths = Ordered(lambda number, step: 3)
    number = engine.add(known[:-1], AUTO)
    cold: list[list[int]] = []
    while len(cold) < 26:
        cold += [e.token_ids for e in engine.step()]
    engine.abort(number)
    engine.check_idle()
    assert cold[0] == [known[-1]]
    assert warm == cold[1:]
    assert sum(map(len, warm)) > 30

    # The rows are those of a fresh prefill of all of the text.
    _, streams = rig.run((0, 0, tokens))
    fresh = head_of(rig)
    state = fresh.alloc_state_for(1024)
    fresh.prefill_drafter(tokens, streams, state)
    lowest, truth = fresh.held_rows(state)
    start, end = max(first, lowest), first + len(rows)
    assert end >= len(tokens) - 2
    assert end - start >= 120
    close = 0.0 if numba_cpu.available() else 1e-4
    torch.testing.assert_close(
        rows[start - first :], truth[start - lowest : end - lowest], rtol=close, atol=close
    )
