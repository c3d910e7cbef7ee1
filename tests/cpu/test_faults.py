"""Faults that engines with drafts have had, forced here: one test a kind.

Most kinds are ruled out by tests of the part concerned; these need the whole engine.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import Rig, make_rig, visible_cache
from toy import (
    RULES,
    VOCAB,
    Checked,
    ToyModel,
    anti,
    continuation,
    decode,
    oracle,
    run,
    toy_config,
    toy_engine,
)

from paceline import LLM
from paceline.draft import (
    AntiProposer,
    ContextProposer,
    DeepseekV4MtpHead,
    DraftProposer,
    OracleProposer,
    PoisonProposer,
    ScriptedProposer,
)
from paceline.engine import Engine
from paceline.engine.drafting import Drafting
from paceline.models.deepseek_v4.build import Backend
from paceline.models.deepseek_v4.checkpoint import Weights
from paceline.ops import numba_cpu
from paceline.types import ConfigError, Draft, DraftRequest, SamplingParams

NO_EOS = toy_config(eos_token_ids=())
LIMIT = 384


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(2, 60) for _ in range(length)]


# Over the real model


@pytest.fixture(scope="module")
def rig(tiny_weights: Weights, is_exact: bool) -> Rig:
    backend: Backend = "fused" if is_exact else "torch"
    return make_rig(tiny_weights, tiny_weights.config, backend=backend, num_slots=1)


@pytest.fixture(scope="module")
def is_exact() -> bool:
    """Whether a row is the same bit for bit, whatever runs beside it."""
    return numba_cpu.available()


def real_engine(
    rig: Rig, proposer: DraftProposer[Any] | None, num_drafts: int, **options: Any
) -> Engine:
    options.setdefault("max_num_seqs", 2)
    return Engine(
        rig.built.model,
        rig.config,
        proposer=proposer,
        num_drafts=num_drafts,
        max_seq_len=LIMIT,
        **options,
    )


def head_of(rig: Rig, kind: Any = DeepseekV4MtpHead) -> Any:
    built = rig.built
    assert built.mtp is not None
    return kind.new(built.mtp, built.embed_tokens, built.lm_head, rig.config, 0, LIMIT, num_slots=4)


def prompts_of(rig: Rig, *lengths: int) -> list[list[int]]:
    rng = random.Random(str(lengths))
    return [[rng.randrange(8, rig.config.vocab_size) for _ in range(n)] for n in lengths]


def params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def state_of(engine: Engine, number: int, length: int) -> dict[str, torch.Tensor]:
    """All that a step after `length` tokens reads of a request's caches."""
    handle = engine._requests[number].sequence.handle
    assert handle.length >= length
    handle.rewind(handle.length - length)
    return visible_cache(engine._runner.pools, handle.slot, length, 128)


def until(engine: Engine, number: int, tokens: int) -> list[int]:
    sequence = engine._requests[number].sequence
    while len(sequence.tokens) < tokens:
        engine.step()
    return list(sequence.tokens)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("start", [117, 122])
def test_forced_accept_counts_leave_tokens_and_state_of_plain_decoding(
    rig: Rig, is_exact: bool, start: int, accepted: int
) -> None:
    """Across the window and both compressions, with every row of a block at an edge once."""
    (prompt,) = prompts_of(rig, start)
    plain = real_engine(rig, None, 0)
    number = plain.add(prompt, params(70))
    text = until(plain, number, start + 50)
    length = start + 45
    want = state_of(plain, number, length)

    proposer = ScriptedProposer([text], accept_counts=[accepted], vocab_size=rig.config.vocab_size)
    engine = real_engine(rig, proposer, 5)
    number = engine.add(prompt, params(70))
    tokens = until(engine, number, start + 46)
    assert tokens[: len(text)] == text[: len(tokens)]
    stats = engine.speculation
    assert stats.accepted_at[:accepted] == stats.drafted_at[:accepted]
    got = state_of(engine, number, length)
    for name, tensor in want.items():
        close = 0.0 if is_exact else 1e-4
        torch.testing.assert_close(got[name], tensor, rtol=close, atol=close)


def test_a_drafter_that_is_always_wrong_leaves_the_state_of_plain_decoding(
    rig: Rig, is_exact: bool
) -> None:
    """State restored wrongly has shown from some 250 tokens on."""
    (prompt,) = prompts_of(rig, 9)
    plain = real_engine(rig, None, 0)
    number = plain.add(prompt, params(300))
    text = until(plain, number, 290)
    want = state_of(plain, number, 285)
    engine = real_engine(rig, AntiProposer([text], vocab_size=rig.config.vocab_size), 8)
    number = engine.add(prompt, params(300))
    assert until(engine, number, 286) == text[:286]
    assert engine.speculation.num_accepted == 0
    got = state_of(engine, number, 285)
    for name, tensor in want.items():
        close = 0.0 if is_exact else 1e-4
        torch.testing.assert_close(got[name], tensor, rtol=close, atol=close)


def test_one_that_accepts_all_beside_one_that_refuses_all(rig: Rig) -> None:
    """Each goes on from a place of its own."""
    prompts = prompts_of(rig, 120, 126)
    plain = decode(real_engine(rig, None, 0), prompts, params(40))
    texts = [[*p, *t] for p, (t, _) in zip(prompts, plain, strict=True)]

    class Both(OracleProposer):
        def guess(self, request: DraftRequest, state: Any) -> list[int]:
            right = super().guess(request, state)
            if list(request.history[:120]) == prompts[0]:
                return right
            return [(token + 1) % rig.config.vocab_size for token in right]

    engine = real_engine(rig, Both(texts), 4)
    assert decode(engine, prompts, params(40)) == plain
    assert engine.speculation.num_accepted > 20


class Noted(DeepseekV4MtpHead):
    """Notes its drafts by prompt and position, and may get streams of NaN for one prompt."""

    spoiled: list[int] | None = None

    def _draft(self, requests: Any, states: Any) -> Any:
        given = [
            replace(r, target_hidden=r.target_hidden * float("nan"))
            if self.spoiled is not None and list(r.history[: len(self.spoiled)]) == self.spoiled
            else r
            for r in requests
        ]
        drafts = super()._draft(given, states)
        for request, draft in zip(requests, drafts, strict=True):
            self.notes[request.history[0], request.position] = list(draft.tokens)
        return drafts


def test_nan_in_one_drafters_streams_costs_that_requests_drafts_only(rig: Rig) -> None:
    prompts = prompts_of(rig, 20, 130, 45)
    notes: list[dict[tuple[int, int], list[int]]] = []
    said: list[list[list[int]]] = []
    for spoiled in (None, prompts[2]):
        head = head_of(rig, kind=Noted)
        head.notes, head.spoiled = {}, spoiled
        engine = real_engine(rig, head, 3, max_num_seqs=3)
        said.append([tokens for tokens, _ in decode(engine, prompts, params(24))])
        notes.append(head.notes)
        assert engine.num_proposer_failures == 0
    assert said[0] == said[1]
    clean, broken = notes
    firsts = [prompt[0] for prompt in prompts]
    assert len(set(firsts)) == 3
    for (first, position), drafts in broken.items():
        assert drafts == ([] if first == firsts[2] else clean[first, position])
    assert {first for first, _ in broken} == set(firsts)
    assert any(clean.values())


def test_a_prompt_read_in_small_pieces_leaves_the_drafter_of_one_read_at_once(
    rig: Rig, is_exact: bool
) -> None:
    (prompt,) = prompts_of(rig, 150)
    rows: list[tuple[int, torch.Tensor]] = []
    for budget in (256, 7):
        head = head_of(rig)
        engine = real_engine(rig, head, 3, max_num_batched_tokens=budget)
        number = engine.add(prompt, params(5))
        while not any(e.token_ids for e in engine.step()):
            pass
        assert engine.drafting is not None
        rows.append(head.held_rows(engine.drafting._states[number]))
    (first, whole), (again, pieces) = rows
    assert first == again
    close = 0.0 if is_exact else 1e-4
    torch.testing.assert_close(pieces, whole, rtol=close, atol=close)
    assert first + len(whole) == 149


@pytest.mark.parametrize("cached", [0, 1 << 24])
def test_an_abort_between_drafts_and_verdict_leaves_nothing_for_the_next(
    rig: Rig, is_exact: bool, cached: int
) -> None:
    """The forward fails with drafts in its rows, the request is ended, and comes again."""
    (prompt,) = prompts_of(rig, 126)
    cold = real_engine(rig, head_of(rig), 4, prefix_cache_bytes=cached)
    number = cold.add(prompt, params(30))
    want = until(cold, number, 150)
    state = state_of(cold, number, 148)

    engine = real_engine(rig, head_of(rig), 4, prefix_cache_bytes=cached)
    doomed = engine.add(prompt, params(30))
    until(engine, doomed, 127)
    runner = engine._runner
    whole, runner.run = runner.run, _running_then_failing(runner.run)  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        engine.step()
    runner.run = whole  # type: ignore[method-assign]
    assert engine.abort(doomed)
    engine.check_idle()
    number = engine.add(prompt, params(30))
    assert until(engine, number, 150)[:150] == want[:150]
    assert engine.num_prefix_hits == 0
    got = state_of(engine, number, 148)
    for name, tensor in state.items():
        close = 0.0 if is_exact else 1e-4
        torch.testing.assert_close(got[name], tensor, rtol=close, atol=close)


def _running_then_failing(run_rows: Any) -> Any:
    """The forward writes all its rows, the drafts' too, and then comes to nothing."""

    def broken(rows: Any, *args: Any, **named: Any) -> Any:
        assert any(len(row.ids) > 1 for row in rows)
        run_rows(rows, *args, **named)
        raise MemoryError("no room")

    return broken


# Aborts, joins and leaves


def _aborted(phase: str, engine: Engine, model: ToyModel) -> None:
    """Bring request 1, the one to be aborted, to a phase."""
    if phase == "queued":
        return
    for _ in range({"reading": 1, "first token": 4, "streaming": 8}.get(phase, 8)):
        engine.step()
    if phase == "pre-empted":
        engine._scheduler.preempt_last()
    if phase == "reading again":
        engine._scheduler.preempt_last()
        engine.step()
    if phase == "verifying":
        whole = engine._runner.run

        def broken(rows: Any, *args: Any, **named: Any) -> Any:
            whole(rows, *args, **named)
            raise MemoryError("no room")

        engine._runner.run = broken  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            engine.step()
        engine._runner.run = whole  # type: ignore[method-assign]
    if phase == "proposed":
        whole_forward = model.forward

        def none(*args: Any) -> Any:
            raise MemoryError("no room")

        model.forward = none  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            engine.step()
        model.forward = whole_forward  # type: ignore[method-assign]


@pytest.mark.parametrize("cached", [0, 1 << 24])
@pytest.mark.parametrize(
    "phase",
    [
        "queued",
        "reading",
        "first token",
        "proposed",
        "verifying",
        "streaming",
        "pre-empted",
        "reading again",
    ],
)
def test_an_abort_in_each_phase_returns_all_and_leaves_no_trace(phase: str, cached: int) -> None:
    model = ToyModel()
    proposer = ContextProposer(vocab_size=VOCAB, batch=2)
    engine = toy_engine(
        model=model,
        config=NO_EOS,
        proposer=proposer,
        num_drafts=3,
        max_num_seqs=2,
        max_num_batched_tokens=60,
        prefix_cache_bytes=cached,
    )
    kept, doomed = prompt_of(20), prompt_of(140)
    number = engine.add(kept, SamplingParams(max_tokens=40))
    aborted = engine.add(doomed, SamplingParams(max_tokens=40))
    said: list[int] = []
    step = engine.step

    def hearing() -> Any:
        emissions = step()
        said.extend(t for e in emissions if e.request_id == number for t in e.token_ids)
        return emissions

    engine.step = hearing  # type: ignore[method-assign]
    _aborted(phase, engine, model)
    assert engine.abort(aborted)
    assert not engine.abort(aborted)
    assert aborted not in engine._requests
    said_by = run(engine)
    assert aborted not in said_by
    assert said == continuation(kept, 40)
    engine.clear_prefix_cache()
    assert engine._scheduler.all_home
    assert proposer.num_moved == 0
    # The same prompt is as cold as ever: same tokens, same drafts, same counts.
    engine.step = step  # type: ignore[method-assign]
    again = engine.add(doomed, SamplingParams(max_tokens=40))
    emissions = run(engine)[again]
    assert [t for e in emissions for t in e.token_ids] == continuation(doomed, 40)
    twin = toy_engine(
        config=NO_EOS,
        proposer=ContextProposer(vocab_size=VOCAB, batch=2),
        num_drafts=3,
        max_num_batched_tokens=60,
    )
    twin.add(doomed, SamplingParams(max_tokens=40))
    assert emissions[-1].stats == run(twin)[0][-1].stats


def test_requests_join_and_leave_at_every_step() -> None:
    proposer = Checked(RULES["scattered"], batch=3)
    engine = toy_engine(
        config=NO_EOS, proposer=proposer, num_drafts=3, max_num_seqs=5, max_num_batched_tokens=64
    )
    rng = random.Random(2)
    said: dict[int, list[int]] = {}
    want: dict[int, list[int]] = {}
    for n in range(150):
        prompt, count = prompt_of(rng.randint(1, 40), n), rng.randint(1, 30)
        number = engine.add(prompt, SamplingParams(max_tokens=count))
        said[number], want[number] = [], continuation(prompt, count)
        for emission in engine.step():
            said[emission.request_id] += emission.token_ids
        alive = sorted(engine._requests)
        if n % 3 and len(alive) > 2:
            gone = rng.choice(alive)
            engine.abort(gone)
            want[gone] = want[gone][: len(said[gone])]
    for number, emissions in run(engine).items():
        said[number] += [t for e in emissions for t in e.token_ids]
    assert said == want
    assert engine.num_proposer_failures == 0
    assert not proposer.live


def test_a_hundred_requests_one_after_another_leave_nothing() -> None:
    proposer = Checked(RULES["scattered"], batch=4)
    engine = toy_engine(
        config=NO_EOS, proposer=proposer, num_drafts=3, num_blocks=8, prefix_cache_bytes=1 << 16
    )
    for n in range(100):
        some = [prompt_of(5 + n, seed=k) for k in range(1 + n % 4)]
        got = decode(engine, some, SamplingParams(max_tokens=6))
        assert [tokens for tokens, _ in got] == [continuation(prompt, 6) for prompt in some]
    assert engine.num_proposer_failures == 0


def test_a_long_prompt_in_pieces_while_others_draft() -> None:
    proposer = Checked(RULES["scattered"], batch=4)
    engine = toy_engine(
        config=NO_EOS,
        proposer=proposer,
        num_drafts=3,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        max_seq_len=1024,
    )
    some = [prompt_of(4, seed=n) for n in range(4)]
    numbers = [engine.add(prompt, SamplingParams(max_tokens=120)) for prompt in some]
    for _ in range(4):
        engine.step()
    long = prompt_of(500)
    numbers.append(engine.add(long, SamplingParams(max_tokens=9)))
    emissions = run(engine)
    assert [t for e in emissions[numbers[4]] for t in e.token_ids] == continuation(long, 9)
    # The others drafted all along.
    assert all(emissions[n][-1].stats.num_drafted > 60 for n in numbers[:4])


def test_drafts_evict_what_is_cached_rather_than_stop() -> None:
    """A pool that is full of kept prefixes is room for a request with drafts."""
    engine = toy_engine(
        config=NO_EOS,
        proposer=Checked(oracle),
        num_drafts=3,
        max_num_seqs=2,
        num_blocks=6,
        prefix_cache_bytes=1 << 24,
    )
    for n in range(6):
        decode(engine, [prompt_of(140, seed=n)], SamplingParams(max_tokens=2))
    assert engine.num_free_blocks < 2
    both = [prompt_of(100, seed=7), prompt_of(110, seed=8)]
    got = decode(engine, both, SamplingParams(max_tokens=200))
    assert [tokens for tokens, _ in got] == [continuation(prompt, 200) for prompt in both]
    assert engine.num_preemptions == 0
    assert engine.speculation.acceptance_rate == 1.0


@pytest.mark.parametrize("rule", sorted(RULES))
def test_lengths_that_are_chosen_say_what_fixed_ones_say(rule: str) -> None:
    some = [prompt_of(n) for n in (3, 60, 126)]
    engine = toy_engine(config=NO_EOS, proposer=Checked(RULES[rule], batch=2), num_drafts="auto")
    got = decode(engine, some, SamplingParams(max_tokens=100))
    assert [tokens for tokens, _ in got] == [continuation(prompt, 100) for prompt in some]
    assert engine.num_proposer_failures == 0


def test_a_request_without_drafts_has_none_beside_those_that_have() -> None:
    engine = toy_engine(config=NO_EOS, proposer=Checked(oracle, batch=4), num_drafts=3)
    each = [SamplingParams(max_tokens=30, num_drafts=k) for k in (None, 0, 2)]
    numbers = [engine.add(prompt_of(9, seed=n), one) for n, one in enumerate(each)]
    emissions = run(engine)
    drafted = [emissions[n][-1].stats.num_drafted for n in numbers]
    assert drafted[1] == 0
    assert min(drafted[0], drafted[2]) > 10


@pytest.mark.parametrize("rule", [oracle, anti, RULES["scattered"]])
def test_forwards_per_token_follow_what_was_accepted(rule: Any) -> None:
    """A partial acceptance costs no second forward over the same tokens."""
    model = ToyModel()
    engine = toy_engine(model=model, config=NO_EOS, proposer=Checked(rule), num_drafts=4)
    engine.add(prompt_of(20), SamplingParams(max_tokens=200))
    stats = run(engine)[0][-1].stats
    assert engine.num_forwards == 1 + stats.num_decode_steps
    assert stats.num_emitted == stats.num_decode_steps + stats.num_accepted
    assert sum(model.rows) == 20 + stats.num_decode_steps + stats.num_drafted


def test_a_second_turn_feeds_a_drafter_what_is_new() -> None:
    class Counting(ContextProposer):
        rows = 0

        def _write(self, *args: Any) -> None:
            self.rows += 1
            super()._write(*args)

    proposer = Counting(vocab_size=VOCAB)
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=1, prefix_cache_bytes=1 << 24)
    first = prompt_of(290)
    ((answer, _),) = decode(engine, [first], SamplingParams(max_tokens=20))
    before, proposer.rows = proposer.rows, 0
    assert before >= 290
    second = [*first, *answer, *prompt_of(10)]
    decode(engine, [second], SamplingParams(max_tokens=10))
    # 256 of 320 tokens are kept.
    assert proposer.rows < 64 + 10 + 5


# A proposer that fails


class Broken(ContextProposer):
    """Raises in every propose, and says who holds a state."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB, batch=1)
        self.live = 0
        self.asked = 0

    def alloc_state(self) -> Any:
        self.live += 1
        return super().alloc_state()

    def free_state(self, state: Any) -> None:
        self.live -= 1
        super().free_state(state)

    def propose(self, request: DraftRequest, state: Any) -> Draft:
        self.asked += 1
        raise RuntimeError("broken")


@pytest.mark.parametrize("failures", [1, 2, 7])
def test_a_proposer_that_keeps_failing_is_switched_off(
    failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    proposer = Broken()
    engine = toy_engine(
        config=NO_EOS, proposer=proposer, num_drafts=3, max_proposer_failures=failures
    )
    some = [prompt_of(20, seed=n) for n in range(2)]
    numbers = [engine.add(prompt, SamplingParams(max_tokens=40)) for prompt in some]
    with caplog.at_level(logging.WARNING):
        said: dict[int, list[int]] = {number: [] for number in numbers}
        while engine.has_work:
            was_off = engine.drafting is not None and engine.drafting.is_off
            for emission in engine.step():
                said[emission.request_id] += emission.token_ids
            if was_off:
                # Its states are given back at once, not when their sequences end.
                assert proposer.live == 0
    assert [said[n] for n in numbers] == [continuation(prompt, 40) for prompt in some]
    assert proposer.asked == engine.num_proposer_failures == failures
    levels = [record.levelname for record in caplog.records]
    assert (levels.count("WARNING"), levels.count("ERROR")) == (1, 1)
    assert "switched off" in caplog.text
    # Whoever comes later is not drafted for.
    later = decode(engine, [prompt_of(9)], SamplingParams(max_tokens=9))
    assert later[0][0] == continuation(prompt_of(9), 9)
    assert proposer.asked == failures
    engine.check_idle()


def test_rows_that_are_carried_are_freed_when_their_proposer_is_off() -> None:
    inner = ContextProposer(vocab_size=VOCAB, batch=1)
    proposer = PoisonProposer(inner, "raises", vocab_size=VOCAB, method="propose", nth=4, every=1)
    engine = toy_engine(
        config=NO_EOS, proposer=proposer, num_drafts=3, num_blocks=2, max_proposer_failures=2
    )
    engine.add(prompt_of(20), SamplingParams(max_tokens=30))
    engine.add(prompt_of(21), SamplingParams(max_tokens=30))
    for _ in range(2):
        engine.step()
    engine._scheduler.preempt_last()
    taken = engine._scheduler.allocator.allocate(1) or []
    engine.step()
    assert inner.num_moved == 1
    while not (engine.drafting and engine.drafting.is_off):
        engine.step()
    engine.step()
    assert inner.num_moved == 0
    engine._scheduler.allocator.release(taken)
    run(engine)


@pytest.mark.parametrize("given", [0, -3])
def test_a_number_of_failures_out_of_range(given: int) -> None:
    with pytest.raises(ConfigError, match=f"max_proposer_failures is {given}; allowed is at least"):
        toy_engine(proposer=Checked(oracle), max_proposer_failures=given)


def test_a_draft_id_of_true_is_no_id() -> None:
    class Boolean(OracleProposer):
        def guess(self, request: DraftRequest, state: Any) -> list[int]:
            tokens: Sequence[int] = super().guess(request, state)
            return [token if token != 1 else True for token in tokens]

    def drafted(prompt: list[int]) -> bool:
        said = continuation(prompt, 30)
        return 1 in said and said.index(1) % 4 > 0

    prompt = next(p for p in (prompt_of(5, n) for n in range(99)) if drafted(p))
    text = [*prompt, *continuation(prompt, 60)]
    engine = toy_engine(config=NO_EOS, proposer=Boolean([text]), num_drafts=3)
    ((tokens, _),) = decode(engine, [prompt], SamplingParams(max_tokens=30))
    assert tokens == continuation(prompt, 30)
    assert all(type(token) is int for token in tokens)
    assert engine.num_proposer_failures > 0


# A proposer that changes what it was handed, or what it returned


class Kept:
    """A vandal's state: all it ever saw and returned."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.laws: list[Any] = []
        self.request: DraftRequest | None = None


class Liar(int):
    """An id that is equal to every other."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class Vandal(DraftProposer[Kept]):
    """Drafts a lookup's tokens, then does what `how` says."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.num_done = 0

    def alloc_state(self) -> Kept:
        return Kept()

    def free_state(self, state: Kept) -> None:
        pass

    def propose(self, request: DraftRequest, state: Kept) -> Any:
        history = request.history
        state.request, state.tokens, count = request, [], request.num_drafts
        for at in range(len(history) - 1, 1, -1):
            if history[at - 2 : at] == history[-2:]:
                state.tokens = history[at : at + count]
                break
        state.tokens = state.tokens or [(history[-1] + 1) % 50] * count
        state.laws = [np.full(8192, 1 / 8192) for _ in state.tokens]
        made = getattr(self, self.how, self.nothing)(request, state)
        return Draft(tokens=state.tokens) if made is None else made

    def after_verify(self, num_accepted: int, state: Kept) -> None:
        getattr(self, f"{self.how}_after", self.nothing)(state.request, state)

    def propose_batch(self, requests: Any, states: Any) -> Any:
        return [self.propose(*each) for each in zip(requests, states, strict=True)]

    def propose_batch_max(self) -> int:
        return 4

    def nothing(self, request: Any, state: Kept) -> None:
        pass

    def clears_after(self, request: Any, state: Kept) -> None:
        self.num_done += 1
        state.tokens.clear()

    def overwrites_after(self, request: Any, state: Kept) -> None:
        self.num_done += 1
        state.tokens[:] = [9] * len(state.tokens)

    def returns_history(self, request: Any, state: Kept) -> Any:
        self.num_done += 1
        del request.history[: -request.num_drafts]
        return Draft(tokens=request.history)

    def sets_history(self, request: Any, state: Kept) -> None:
        self.num_done += 1
        request.history[0] = request.history[-1] = 7

    def appends(self, request: Any, state: Kept) -> None:
        self.num_done += 1
        request.history.append(7)

    def pops_after(self, request: Any, state: Kept) -> None:
        self.num_done += 1
        request.history.pop()

    def spoils_streams(self, request: Any, state: Kept) -> None:
        self.num_done += 1
        request.target_hidden.fill_(1e4)

    def lies(self, request: Any, state: Kept) -> Any:
        self.num_done += 1
        return Draft(tokens=[Liar(5)] * request.num_drafts)

    def odd_source(self, request: Any, state: Kept) -> Any:
        self.num_done += 1
        return Draft(tokens=state.tokens, source=[1])  # type: ignore[arg-type]

    def odd_laws(self, request: Any, state: Kept) -> Any:
        self.num_done += 1
        return Draft(tokens=state.tokens, laws=[np.ones(3)] * len(state.tokens))

    def on_device(self, request: Any, state: Kept) -> Any:
        self.num_done += 1
        return Draft(tokens=[], device_tokens=torch.tensor(state.tokens))

    def commits(self, request: Any, state: Kept) -> None:
        if request.sampler is not None:
            self.num_done += 1
            request.sampler.commit([5, 5, 6])

    def reseeds_after(self, request: Any, state: Kept) -> None:
        if request.sampler is not None:
            self.num_done += 1
            request.sampler.seed += 1
            request.sampler.history.num_output = -5
            request.sampler.knobs = None

    def walks_on(self, request: Any, state: Kept) -> None:
        if request.grammar is not None:
            allowed = [i for i in range(8192) if request.grammar.allows(i)]
            self.num_done += request.grammar.advance(allowed[0])

    def walks_back(self, request: Any, state: Kept) -> None:
        if request.grammar is not None and request.grammar.num_tokens:
            self.num_done += 1
            request.grammar.rollback(1)

    def walks_after(self, request: Any, state: Kept) -> None:
        if request.grammar is not None:
            allowed = [i for i in range(8192) if request.grammar.allows(i)]
            self.num_done += 1
            request.grammar.advance(allowed[0])


VANDALS = sorted(
    {
        name.removesuffix("_after")
        for name in vars(Vandal)
        if not name.startswith("_") and name != "nothing" and not hasattr(DraftProposer, name)
    }
)
TEXTS = ["a = 1\nb = 2\nc = 3\n", "def f(x):\n    return x\n", "1, 2, 3, ", "x"]
ASKED = [
    SamplingParams(max_tokens=32, ignore_eos=True),
    SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.8, seed=3, presence_penalty=0.5),
    SamplingParams(max_tokens=32, regex=r"([a-c]{2} |[0-9]+, ){4,9}"),
    SamplingParams(max_tokens=32, regex=r"[a-z ]{5,40}", temperature=1.0, seed=4),
]


@pytest.fixture(scope="module")
def untouched() -> dict[int, list[list[int]]]:
    """Tokens without drafts, alone and together."""
    with LLM(num_drafts=0, max_num_seqs=4) as llm:
        return {size: ids_of(llm, size) for size in (1, 4)}


def ids_of(llm: LLM, size: int) -> list[list[int]]:
    if size == 1:
        return [
            llm.generate(text, asked)[0].token_ids for text, asked in zip(TEXTS, ASKED, strict=True)
        ]
    return [result.token_ids for result in llm.generate(TEXTS, ASKED)]


@pytest.mark.parametrize("how", VANDALS)
def test_whatever_a_proposer_does_the_tokens_are_the_targets(
    how: str, untouched: dict[int, list[list[int]]]
) -> None:
    for size in (1, 4):
        vandal = Vandal(how)
        with LLM(proposer=vandal, num_drafts=4, max_num_seqs=4) as llm:
            assert ids_of(llm, size) == untouched[size]
        assert vandal.num_done, "nothing was done"


@pytest.mark.parametrize(
    "how", ["appends", "pops", "walks_on", "walks_back", "walks_after", "lies"]
)
def test_what_a_proposer_did_wrong_is_counted(how: str) -> None:
    with LLM(proposer=Vandal(how), num_drafts=4) as llm:
        ids_of(llm, 1)
        assert llm.engine.num_proposer_failures


def test_laws_that_are_none_count_as_no_laws() -> None:
    asked = SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.8, seed=3)
    found = []
    for how in ("nothing", "odd_laws"):
        with LLM(proposer=Vandal(how), num_drafts=4, acceptance="rejection") as llm:
            found.append(llm.generate(TEXTS[0], asked)[0].token_ids)
            assert bool(llm.engine.num_proposer_failures) == (how == "odd_laws")
    assert found[0] == found[1]


def test_laws_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    law = np.full(VOCAB, 1 / VOCAB)
    seen: list[Any] = []

    class Drawn(Vandal):
        def propose(self, request: DraftRequest, state: Kept) -> Any:
            return Draft(tokens=[5], laws=[law])

    inner = Drafting.propose

    def propose(drafting: Drafting, rows: Any) -> Any:
        drafts = inner(drafting, rows)
        seen.extend(each.laws[0] for each in drafts if each.laws)
        return drafts

    monkeypatch.setattr(Drafting, "propose", propose)
    engine = toy_engine(proposer=Drawn("nothing"), num_drafts=1, acceptance="rejection")
    engine.add([3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, seed=1))
    run(engine)
    assert seen
    for one in seen:
        assert one is not law
        assert (one == law).all()


def test_what_a_proposer_is_lent_follows_the_sequence() -> None:
    seen: list[tuple[list[int], int, dict[int, int]]] = []

    class Looks(Vandal):
        def propose(self, request: DraftRequest, state: Kept) -> Any:
            assert request.sampler is not None
            history = request.sampler.history
            seen.append((list(request.history), history.length, history.counts))
            return Draft(tokens=[5] * request.num_drafts)

    asked = SamplingParams(
        max_tokens=9, ignore_eos=True, temperature=1.0, seed=1, presence_penalty=0.5
    )
    engine = toy_engine(proposer=Looks("nothing"), num_drafts=2)
    ((said, _),) = decode(engine, [[3, 4, 5]], [asked])
    assert len(seen) > 2
    assert not engine.num_proposer_failures
    for history, length, counts in seen:
        assert history == [3, 4, 5, *said][:length]
        assert len(history) == length
        assert {token: count for token, count in counts.items() if count} == {
            token: history[3:].count(token) for token in set(history[3:])
        }
