"""What pre-emption costs: tokens read again, and nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import Rig, make_rig
from toy import (
    RULES,
    Carrying,
    Checked,
    ToyModel,
    continuation,
    oracle,
    run,
    toy_config,
    toy_engine,
)

from paceline.draft import DeepseekV4MtpHead
from paceline.engine import Engine
from paceline.models.deepseek_v4.build import Backend
from paceline.models.deepseek_v4.checkpoint import Weights
from paceline.ops import numba_cpu
from paceline.types import SamplingParams

NO_EOS = toy_config(eos_token_ids=())


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(2, 60) for _ in range(length)]


def preempt(engine: Engine) -> None:
    """As a lack of blocks would, just before the next step."""
    assert engine._scheduler.preempt_last() is not None


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 3, 8])
@pytest.mark.parametrize("kind", [Checked, Carrying])
def test_tokens_do_not_depend_on_where_a_sequence_is_preempted(
    kind: type[Checked], num_drafts: int, deferred: bool
) -> None:
    prompt, count = prompt_of(150), 24
    for at in range(1, 25):
        proposer = kind(RULES["scattered"], deferred=deferred)
        engine = toy_engine(
            config=NO_EOS, proposer=proposer, num_drafts=num_drafts, max_num_batched_tokens=40
        )
        number = engine.add(prompt, SamplingParams(max_tokens=count))
        tokens: list[int] = []
        for _ in range(at):
            tokens += [t for e in engine.step() for t in e.token_ids]
        if not engine.has_work:
            break
        preempt(engine)
        assert engine.num_free_blocks == engine._scheduler.allocator.num_blocks
        tokens += [t for e in run(engine).get(number, []) for t in e.token_ids]
        assert tokens == continuation(prompt, count)
        assert engine.num_preemptions == 1
        assert engine.num_proposer_failures == 0
        assert not proposer.live
    assert at > 6


def test_a_sequence_may_be_preempted_before_every_step_it_gets() -> None:
    prompt = prompt_of(30)
    proposer = Carrying(oracle)
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=2)
    engine.add(prompt, SamplingParams(max_tokens=12))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [t for e in engine.step() for t in e.token_ids]
        if engine.has_work:
            preempt(engine)
    assert tokens == continuation(prompt, 12)
    assert engine.num_preemptions == 11
    assert not proposer.carried


def test_rows_that_are_refused_at_the_return_are_freed_and_read_anew() -> None:
    proposer = Carrying(RULES["scattered"])
    proposer.refuses = True
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=3)
    engine.add(prompt_of(50), SamplingParams(max_tokens=30))
    for _ in range(4):
        engine.step()
    preempt(engine)
    emissions = run(engine)
    assert emissions[0][-1].stats.num_drafted > 0
    assert engine.num_proposer_failures == 0
    assert proposer.num_taken == 1
    assert not proposer.carried


def test_what_came_back_once_and_is_refused_the_next_time_is_read_anew() -> None:
    proposer = Carrying(oracle)
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=3)
    engine.add(prompt_of(50), SamplingParams(max_tokens=40))
    for refuses in (False, True):
        proposer.refuses = refuses
        for _ in range(3):
            engine.step()
        preempt(engine)
        engine.step()
    known = engine._requests[0].sequence.tokens
    (state,) = proposer.live
    # All pairs but that of the token sampled last.
    assert state["pairs"] == {key: known[key + 1] for key in range(len(known) - 2)}
    run(engine)
    assert engine.num_proposer_failures == 0


def test_rows_of_one_that_has_too_little_left_to_draft_for_are_freed_at_its_return() -> None:
    proposer = Carrying(oracle)
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=2)
    engine.add(prompt_of(20), SamplingParams(max_tokens=8))
    for _ in range(3):
        engine.step()
    assert len(engine._requests[0].sequence.tokens) == 20 + 7
    preempt(engine)
    engine._scheduler._free_slots, slots = [], engine._scheduler._free_slots
    assert engine.step() == []
    assert len(proposer.carried) == 1
    engine._scheduler._free_slots = slots
    # One more token is to come, after which nothing could be drafted.
    assert len(run(engine)[0]) == 1
    assert not proposer.carried
    assert len(proposer.live) == 0


def test_what_was_carried_is_not_handed_over_again() -> None:
    """Pairs that came back are not fed a second time; `Checked` would refuse them."""
    proposer = Carrying(oracle)
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=3, max_num_batched_tokens=16)
    engine.add(prompt_of(60), SamplingParams(max_tokens=30))
    for _ in range(8):
        engine.step()
    before = dict(proposer.calls)
    preempt(engine)
    known = engine._requests[0].sequence.tokens.copy()
    while not any(e.token_ids for e in engine.step()):
        pass
    (state,) = proposer.live
    assert proposer.calls["prefill_drafter"] == before["prefill_drafter"]
    assert state["pairs"] == {key: known[key + 1] for key in range(len(known) - 1)}
    run(engine)
    assert engine.num_proposer_failures == 0


@pytest.mark.parametrize("kind", [Checked, Carrying])
@pytest.mark.parametrize("num_blocks", [4, 5, 6])
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_a_pool_that_is_short_preempts_and_everybody_ends(
    num_drafts: int, num_blocks: int, kind: type[Checked]
) -> None:
    proposer = kind(RULES["scattered"], batch=3)
    engine = toy_engine(
        config=NO_EOS,
        proposer=proposer,
        num_drafts=num_drafts,
        num_blocks=num_blocks,
        max_seq_len=400,
    )
    each = [(prompt_of(60 + 9 * n, seed=n), 240 + 11 * (n % 3)) for n in range(6)]
    numbers = [engine.add(p, SamplingParams(max_tokens=count)) for p, count in each]
    emissions = run(engine)
    for number, (prompt, count) in zip(numbers, each, strict=True):
        told = emissions[number]
        assert [t for e in told for t in e.token_ids] == continuation(prompt, count)
        stats = told[-1].stats
        assert stats.num_emitted + 1 - count in range(num_drafts + 1)
    assert engine.num_preemptions > 0
    assert engine.num_proposer_failures == 0
    assert not proposer.live
    assert not getattr(proposer, "carried", None)


def test_room_for_all_means_no_preemption() -> None:
    engine = toy_engine(config=NO_EOS, proposer=Checked(oracle), num_drafts=3)
    for n in range(20):
        engine.add(prompt_of(20 * n + 1), SamplingParams(max_tokens=60))
    run(engine)
    assert engine.num_preemptions == 0


def test_recomputing_is_bounded_where_two_do_not_fit_beside_each_other() -> None:
    """Nothing that was just given up is taken up at once, only to be given up again."""
    model = ToyModel()
    engine = toy_engine(model=model, config=NO_EOS, num_blocks=4, max_seq_len=512)
    each = [(prompt_of(120, seed=n), 380) for n in range(4)]
    for prompt, count in each:
        engine.add(prompt, SamplingParams(max_tokens=count))
    run(engine)
    needed = sum(len(prompt) + count - 1 for prompt, count in each)
    assert engine.num_preemptions <= 2 * len(each)
    assert sum(model.rows) < 1.8 * needed


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("kind", [Checked, Carrying])
def test_an_abort_while_preempted_brings_all_home(kind: type[Checked], heard: bool) -> None:
    """Before and after the drafting has heard of it, which it does at the next step."""
    proposer = kind(RULES["scattered"])
    engine = toy_engine(
        config=NO_EOS, proposer=proposer, num_drafts=3, num_blocks=2, max_num_seqs=2
    )
    old = engine.add(prompt_of(20), SamplingParams(max_tokens=12))
    doomed = engine.add(prompt_of(70), SamplingParams(max_tokens=50))
    for _ in range(3):
        engine.step()
    assert engine._scheduler.num_running == 2
    preempt(engine)
    if heard:
        # The block that it would come back to is somebody else's for a step.
        taken = engine._scheduler.allocator.allocate(1)
        assert taken is not None
        engine.step()
        engine._scheduler.allocator.release(taken)
        assert engine.num_preemptions == 1
        assert len(proposer.live) == 1
        assert len(getattr(proposer, "carried", [0])) == 1
    assert engine.abort(doomed)
    (emissions,) = run(engine).values()
    assert emissions[-1].request_id == old
    assert not proposer.live
    assert not getattr(proposer, "carried", None)
    again = engine.add(prompt_of(70), SamplingParams(max_tokens=50))
    tokens = [t for e in run(engine)[again] for t in e.token_ids]
    assert tokens == continuation(prompt_of(70), 50)
    assert engine.num_proposer_failures == 0


@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_history_with_preemptions_at_will(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([Checked, Carrying]))
    slots = data.draw(st.integers(1, 4))
    proposer = kind(
        RULES[data.draw(st.sampled_from(sorted(RULES)))],
        batch=data.draw(st.integers(1, 4)),
        deferred=data.draw(st.booleans()),
        hidden_rows=data.draw(st.sampled_from([0, 1, 2, 30, 128])),
    )
    engine = toy_engine(
        config=NO_EOS,
        proposer=proposer,
        num_drafts=data.draw(st.integers(0, 8)),
        max_num_seqs=slots,
        max_num_batched_tokens=data.draw(st.integers(slots, 40)),
        num_blocks=data.draw(st.integers(2, 4)),
        max_seq_len=256,
    )
    said: dict[int, list[int]] = {}
    want: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["add", "step", "step", "preempt", "abort"]))
        if what == "add":
            prompt = prompt_of(data.draw(st.integers(1, 150)), seed=len(said))
            count = data.draw(st.integers(1, 70))
            number = engine.add(prompt, SamplingParams(max_tokens=count))
            said[number], want[number] = [], continuation(prompt, count)
        elif what == "abort" and said:
            number = data.draw(st.sampled_from(sorted(said)))
            engine.abort(number)
            want[number] = want[number][: len(said[number])]
        elif what == "preempt":
            engine._scheduler.preempt_last()
        else:
            for emission in engine.step():
                said[emission.request_id] += emission.token_ids
    for number, emissions in run(engine).items():
        said[number] += [t for e in emissions for t in e.token_ids]
    assert said == want
    assert not proposer.live
    assert not getattr(proposer, "carried", None)
    assert engine.num_proposer_failures == 0


# Over the real model: the head's rows


def fresh_rows(rig: Rig, tokens: list[int]) -> dict[int, torch.Tensor]:
    """Rows by key, as a head has them that is given all of `tokens` at once."""
    config, built = rig.config, rig.built
    assert built.mtp is not None
    head = DeepseekV4MtpHead.new(
        built.mtp, built.embed_tokens, built.lm_head, config, 0, 512, num_slots=1
    )
    _, streams = rig.run((0, 0, tokens))
    state = head.alloc_state_for(512)
    head.prefill_drafter(tokens, streams, state)
    first, rows = head.held_rows(state)
    return {first + n: row for n, row in enumerate(rows)}


@pytest.fixture(scope="module")
def rig(tiny_weights: Weights) -> Rig:
    backend: Backend = "fused" if numba_cpu.available() else "torch"
    return make_rig(tiny_weights, tiny_weights.config, backend=backend, max_seq_len=256)


@pytest.mark.parametrize(
    ("length", "before", "chunk"),
    [(7, 3, 256), (150, 2, 48), (150, 9, 48)],
)
def test_the_heads_rows_are_exact_after_a_return(
    rig: Rig, length: int, before: int, chunk: int
) -> None:
    config, built = rig.config, rig.built
    assert built.mtp is not None
    rng = random.Random(length + before)
    prompts = [[rng.randrange(8, config.vocab_size) for _ in range(n)] for n in (20, length)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)

    def make() -> tuple[Engine, DeepseekV4MtpHead]:
        assert built.mtp is not None
        head = DeepseekV4MtpHead.new(
            built.mtp, built.embed_tokens, built.lm_head, config, 0, 512, num_slots=4
        )
        engine = Engine(
            built.model,
            config,
            proposer=head,
            num_drafts=3,
            max_seq_len=512,
            max_num_batched_tokens=chunk,
        )
        for prompt in prompts:
            engine.add(prompt, params)
        return engine, head

    twin, _ = make()
    want = {n: [t for e in es for t in e.token_ids] for n, es in run(twin).items()}
    engine, head = make()
    drafting = engine.drafting
    assert drafting is not None
    said: dict[int, list[int]] = {0: [], 1: []}
    # Only the fused model gives equal bits whatever rows run beside a row.
    close = 0.0 if numba_cpu.available() else 1e-4

    def step() -> None:
        for emission in engine.step():
            said[emission.request_id] += emission.token_ids

    for _ in range(before):
        step()
    assert engine._scheduler.num_running == 2
    preempt(engine)
    back = len(said[1])
    for more in (1, 4):
        while len(said[1]) < back + more:
            step()
        state = drafting._states[1]
        first, rows = head.held_rows(state)
        tokens = engine._requests[1].sequence.tokens
        true = fresh_rows(rig, tokens)
        # All that the next propose reads, and nothing that is not so.
        assert first <= max(0, len(tokens) - 2 - 126)
        assert first + len(rows) >= len(tokens) - 2
        for n, row in enumerate(rows):
            if first + n in true:
                torch.testing.assert_close(row, true[first + n], rtol=close, atol=close)
    for number, emissions in run(engine).items():
        said[number] += [t for e in emissions for t in e.token_ids]
    assert said == want
    assert engine.num_preemptions == 1
    assert engine.num_proposer_failures == 0
    assert head.num_free_slots == head.num_slots
    assert head.num_carried == 0
