"""The draft head: exact rows after any history, reference semantics, and what NaN may cost.

The trunk is played by fixed tables: a token and the streams of every position. What a sequence
holds must then equal, row for row, what a fresh head makes of the same committed tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import random
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from head_rig import (
    MAX_SEQ_LEN,
    TOLERANCE,
    Run,
    Tiny,
    ToyBlock,
    ToyTable,
    assert_exact,
    fresh_draft,
    make_tiny,
    toy_config,
    toy_head,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import make_rig, mtp_inputs
from tokenizers import Tokenizer

import paceline
from paceline.cache.drafter import DrafterRing
from paceline.config import ModelConfig
from paceline.draft import DeepseekV4MtpHead, DeepseekV4MtpState
from paceline.models.deepseek_v4.checkpoint import load_weights
from paceline.models.step import MtpInputs, MtpOutput
from paceline.ops.dense import DenseWeight
from paceline.types import ConfigError, Draft, GenerationError


@pytest.fixture(scope="module", params=["torch", "fused"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", request.param)


STEPS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=60)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


# Exact rows


@pytest.mark.parametrize("fold_catchup", [True, False])
@pytest.mark.parametrize("window", [4, 128])
@QUICK
@given(prompt=st.integers(1, 300), chunk=st.integers(1, 200), steps=STEPS, seed=st.integers(0, 99))
def test_rows_are_exact_after_any_history(
    window: int,
    fold_catchup: bool,
    prompt: int,
    chunk: int,
    steps: list[tuple[int, int]],
    seed: int,
) -> None:
    config = toy_config(window)
    head = toy_head(config, num_slots=2, fold_catchup=fold_catchup)
    fresh = toy_head(config, num_slots=1)
    sequence = Run(head, config, seed)
    sequence.prefill(prompt, [chunk] * (prompt // chunk))
    for num_drafts, accept in steps:
        if not num_drafts:
            sequence.undrafted(1 + accept)
            sequence.catch_up_stretch()
            continue
        expected = fresh_draft(sequence, fresh, num_drafts)
        assert sequence.step(num_drafts, accept) == expected
        assert_exact(sequence, fresh)
    head.free_state(sequence.state)
    assert head.num_free_slots == head.num_slots


@QUICK
@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=40),
    seed=st.integers(0, 99),
)
def test_a_gap_hides_what_lies_below_it(steps: list[tuple[int, int]], seed: int) -> None:
    """Without catch-up pairs go missing; what is still held is nevertheless true."""
    config = toy_config(16)
    head, fresh = toy_head(config), toy_head(config)
    sequence = Run(head, config, seed)
    sequence.prefill(30)
    missing = False
    for num_drafts, accept in steps:
        if num_drafts:
            sequence.step(num_drafts, accept, catch_up=False)
            if missing:
                assert head.drafter_rows(sequence.state) == 1
            missing = accept > 0
        else:
            sequence.undrafted(1 + accept)
            missing = True
        assert_exact(sequence, fresh, gapless=False)


def test_rows_of_drafts_without_a_verdict_are_never_built_upon() -> None:
    config = toy_config()
    head, fresh = toy_head(config), toy_head(config)
    sequence = Run(head, config, 8)
    sequence.prefill(30)
    head.propose(sequence.request(3), sequence.state)
    # Three drafted rows, then three other tokens: the next key is adjacent all the same.
    sequence.undrafted(3)
    head.propose(sequence.request(1), sequence.state)
    assert head.drafter_rows(sequence.state) == 1
    assert_exact(sequence, fresh, gapless=False)


def test_a_long_stretch_without_drafts_is_caught_up_to_the_window() -> None:
    config = toy_config()
    head, fresh = toy_head(config), toy_head(config)
    sequence = Run(head, config, 3)
    sequence.prefill(50)
    sequence.step(3, 1)
    sequence.undrafted(300)
    assert sequence.catch_up_stretch() == config.sliding_window - 1
    assert_exact(sequence, fresh)
    assert sequence.step(3, 3) == fresh_draft_before(sequence, fresh)


def fresh_draft_before(sequence: Run, fresh: DeepseekV4MtpHead) -> Draft:
    """What a fresh head drafts for the step that was just taken with three drafts accepted."""
    earlier = copy.copy(sequence)
    earlier.tokens = sequence.tokens[:-4]
    return fresh_draft(earlier, fresh, 3)


def test_rewriting_from_an_earlier_position_forgets_what_came_after() -> None:
    config = toy_config(16)
    head, fresh = toy_head(config), toy_head(config)
    sequence = Run(head, config, 4)
    sequence.prefill(40)
    for _ in range(5):
        sequence.step(4, 4)
    sequence.tokens = sequence.tokens[:50]
    for _ in range(3):
        assert sequence.step(2, 1) is not None
        assert_exact(sequence, fresh, gapless=False)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    prompt=st.integers(1, 150),
    steps=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=8, max_size=30),
)
def test_rows_of_the_real_block_are_exact_bit_for_bit(
    tiny: Tiny, prompt: int, steps: list[tuple[int, int]]
) -> None:
    head, fresh = tiny.head(num_slots=1), tiny.head(num_slots=1)
    sequence = Run(head, tiny.config, prompt)
    sequence.prefill(prompt, [64, 1])
    for num_drafts, accept in steps:
        expected = fresh_draft(sequence, fresh, num_drafts)
        assert sequence.step(num_drafts, accept) == expected
    assert_exact(sequence, fresh)


def test_a_long_run_of_the_real_block_crosses_every_edge_exactly(tiny: Tiny) -> None:
    head, fresh = tiny.head(num_slots=1), tiny.head(num_slots=1)
    sequence = Run(head, tiny.config, 11)
    sequence.prefill(120, [50])
    rng = random.Random(0)
    ring = head.ring.rows.shape[1]
    while len(sequence.tokens) < 2 * ring + 60:
        sequence.step(rng.randint(1, 8), rng.randint(0, 8))
    assert_exact(sequence, fresh)
    assert sequence.step(4, 0) == fresh_draft_of(sequence, fresh)


def fresh_draft_of(sequence: Run, fresh: DeepseekV4MtpHead) -> Draft:
    """What a fresh head drafts for the step that was just taken with no draft accepted."""
    earlier = copy.copy(sequence)
    earlier.tokens = sequence.tokens[:-1]
    return fresh_draft(earlier, fresh, 4)


# The trim table


@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_a_verdict_leaves_the_one_true_row_and_catch_up_restores_the_accepted(
    num_drafts: int,
) -> None:
    """Drafting at P writes keys P - 1 .. P + D - 2; P - 1 stays, P .. P + na - 1 come back."""
    config = toy_config()
    for accepted in range(num_drafts + 1):
        head = toy_head(config)
        sequence = Run(head, config, 7)
        sequence.prefill(20)
        position, before = len(sequence.tokens) - 1, head.drafter_rows(sequence.state)
        assert (before, head.last_pair_key(sequence.state)) == (19, position - 2)
        draft = head.propose(sequence.request(num_drafts), sequence.state)
        assert head.drafter_rows(sequence.state) == before + num_drafts
        assert head.last_pair_key(sequence.state) == position + num_drafts - 2
        head.after_verify(accepted, sequence.state)
        assert head.drafter_rows(sequence.state) == before + 1
        assert head.last_pair_key(sequence.state) == position - 1
        head.catchup_batch(
            [draft.tokens[:accepted]],
            [sequence.streams[position : position + accepted]],
            [position + 1],
            [sequence.state],
        )
        assert head.drafter_rows(sequence.state) == before + 1 + accepted
        assert head.last_pair_key(sequence.state) == position - 1 + accepted


def test_a_fresh_state_holds_nothing() -> None:
    head = toy_head(toy_config())
    state = head.alloc_state()
    assert (head.drafter_rows(state), head.last_pair_key(state)) == (0, None)


# Context


@pytest.mark.parametrize("length", [1, 2, 5, 127, 128, 129, 300])
def test_a_prompt_in_any_chunks_leaves_the_same_rows(length: int) -> None:
    config = toy_config()
    expected = None
    for chunks in ([], [1], [64, 64], [7] * 20, [length - 1]):
        sequence = Run(toy_head(config), config, 2)
        sequence.prefill(length, chunks)
        first, rows = sequence.head.held_rows(sequence.state)
        assert rows.shape[0] == min(length - 1, config.sliding_window - 1)
        assert first == length - 1 - rows.shape[0]
        if expected is None:
            expected = rows
        assert torch.equal(rows, expected)


def test_only_the_windows_last_rows_of_a_prompt_are_needed() -> None:
    config = toy_config()
    head = toy_head(config)
    rows_wanted = head.prefill_hidden_rows(MAX_SEQ_LEN)
    assert rows_wanted == config.sliding_window
    assert head.prefill_hidden_rows(10) == 10
    whole = Run(head, config, 5)
    whole.prefill(300)
    state = head.alloc_state()
    start = 300 - rows_wanted
    written = head.prefill_drafter(
        whole.tokens[:300], whole.streams[start:300], state, first_position=start
    )
    assert written == config.sliding_window - 1
    assert head.propose(whole.request(5), state) == head.propose(whole.request(5), whole.state)


def test_the_last_prompt_position_waits_for_its_token() -> None:
    config = toy_config()
    head = toy_head(config)
    state = head.alloc_state()
    assert head.prefill_drafter([4], torch.zeros(1, 2, 6, dtype=torch.float64), state) == 0
    assert head.last_pair_key(state) is None


@pytest.mark.parametrize("row_base", [0, 18, 20])
def test_catch_up_elsewhere_than_at_the_append_point_is_refused(row_base: int) -> None:
    config = toy_config()
    sequence = Run(toy_head(config), config, 2)
    sequence.prefill(20)
    with pytest.raises(ValueError, match="the append point is 19"):
        sequence.head.catchup_drafter([1], sequence.streams[19:20], row_base, 20, sequence.state)


@pytest.mark.parametrize(
    "call",
    [
        lambda head, state, rows: head.catchup_batch([[1, 2]], [rows[:1]], [5], [state]),
        lambda head, state, rows: head.catchup_batch([[1]], [rows[:1]], [0], [state]),
        lambda head, state, rows: head.catchup_batch([[1]], [rows[:1, :1]], [5], [state]),
        lambda head, state, rows: head.catchup_drafter([1, 2], rows[:1], 0, 5, state),
        lambda head, state, rows: head.prefill_drafter([1, 2], rows[0], state),
    ],
)
def test_streams_that_do_not_pair_up_are_refused_and_nothing_is_taken(
    call: Callable[[DeepseekV4MtpHead, DeepseekV4MtpState, torch.Tensor], int],
) -> None:
    head = toy_head(toy_config())
    state = head.alloc_state()
    with pytest.raises(ValueError, match=r"allowed is|pairs begin"):
        call(head, state, torch.zeros(3, 2, 6, dtype=torch.float64))
    assert head.last_pair_key(state) is None


def test_a_refused_batch_leaves_every_state_as_it_was() -> None:
    config = toy_config()
    head = toy_head(config)
    good, bad = Run(head, config, 1), Run(head, config, 2)
    for sequence in (good, bad):
        sequence.prefill(10)
    with pytest.raises(ValueError, match="allowed is"):
        head.catchup_batch(
            [[1], [2]],
            [good.streams[9:10], bad.streams[9:11]],
            [10, 10],
            [good.state, bad.state],
        )
    assert [head.last_pair_key(s.state) for s in (good, bad)] == [8, 8]


# Batches and slots


def test_a_batch_drafts_as_each_alone_whatever_its_neighbours_do(tiny: Tiny) -> None:
    rng = random.Random(2)
    plan = [[(rng.randint(0, 6), rng.randint(0, 6)) for _ in range(12)] for _ in range(4)]
    lengths = [3, 40, 127, 200]

    def alone(i: int) -> list[Draft]:
        sequence = Run(tiny.head(num_slots=1), tiny.config, i)
        sequence.prefill(lengths[i])
        return [sequence.step(*step) for step in plan[i]]

    head = tiny.head(num_slots=4)
    together = [Run(head, tiny.config, i) for i in range(4)]
    drafts: list[list[Draft]] = [[], [], [], []]
    for sequence, length in zip(together, lengths, strict=True):
        sequence.prefill(length)
    for turn in range(12):
        requests = [s.request(plan[i][turn][0]) for i, s in enumerate(together)]
        answers = head.propose_batch(requests, [s.state for s in together])
        for i, (sequence, draft) in enumerate(zip(together, answers, strict=True)):
            drafts[i].append(draft)
            sequence.settle(draft, plan[i][turn][1])
    assert drafts == [alone(i) for i in range(4)]


@pytest.mark.parametrize(
    ("fold_catchup", "calls_after_acceptance"),
    [
        (False, [("write", 6), ("forward", 3), ("forward", 3), ("forward", 3), ("forward", 3)]),
        (True, [("forward", 9), ("forward", 3), ("forward", 3), ("forward", 3)]),
    ],
)
def test_one_forward_for_each_draft_position_serves_the_whole_batch(
    fold_catchup: bool, calls_after_acceptance: list[tuple[str, int]]
) -> None:
    config = toy_config()
    calls: list[tuple[str, int]] = []

    class Counting(ToyBlock):
        def forward(self, inputs: MtpInputs, ring: DrafterRing) -> MtpOutput:
            calls.append(("forward", inputs.keys.shape[0]))
            return super().forward(inputs, ring)

        def write_rows(self, inputs: MtpInputs, ring: DrafterRing) -> None:
            calls.append(("write", inputs.keys.shape[0]))
            super().write_rows(inputs, ring)

    head = toy_head(config, fold_catchup=fold_catchup)
    head.module = Counting(config)
    sequences = [Run(head, config, i) for i in range(3)]
    for sequence in sequences:
        sequence.prefill(5)
    for expected in ([("forward", 3)] * 4, calls_after_acceptance):
        calls.clear()
        requests = [sequence.request(4) for sequence in sequences]
        answers = head.propose_batch(requests, [sequence.state for sequence in sequences])
        assert calls == expected
        for sequence, draft in zip(sequences, answers, strict=True):
            sequence.settle(draft, 2)


def test_slots_are_all_home_when_idle_and_never_shared() -> None:
    head = toy_head(toy_config(), num_slots=3)
    states = [head.alloc_state() for _ in range(3)]
    assert len({state.slot for state in states}) == 3
    with pytest.raises(GenerationError, match="3 slots are all taken"):
        head.alloc_state()
    for state in states:
        head.free_state(state)
        head.free_state(state)
    assert head.num_free_slots == head.num_slots == 3


def test_a_freed_state_drafts_no_more() -> None:
    config = toy_config()
    sequence = Run(toy_head(config), config, 1)
    sequence.prefill(5)
    sequence.head.free_state(sequence.state)
    with pytest.raises(ValueError, match="not freed"):
        sequence.head.propose(sequence.request(1), sequence.state)


def test_a_freed_state_takes_no_rows() -> None:
    config = toy_config()
    sequence = Run(toy_head(config), config, 1)
    sequence.prefill(5)
    head, state, streams = sequence.head, sequence.state, sequence.streams
    head.free_state(state)
    before = head._pending.clone(), head.ring.rows.clone()
    for feed in (
        lambda: head.prefill_drafter([1, 2, 3], streams[:3], state),
        lambda: head.catchup_drafter([1], streams[:1], 0, 5, state),
        lambda: head.catchup_batch([[1]], [streams[:1]], [5], [state]),
    ):
        with pytest.raises(ValueError, match="the state was freed"):
            feed()
    assert torch.equal(head._pending, before[0])
    assert torch.equal(head.ring.rows, before[1])


def test_a_batch_of_one_state_twice_is_refused() -> None:
    config = toy_config()
    sequence = Run(toy_head(config), config, 1)
    sequence.prefill(5)
    rows = sequence.streams[4:5]
    with pytest.raises(ValueError, match="one state for each"):
        sequence.head.catchup_batch([[1], [2]], [rows, rows], [5, 6], [sequence.state] * 2)
    assert sequence.head.last_pair_key(sequence.state) == 3


def test_the_head_drafts_by_itself_one_draft_at_a_time_and_at_each_chunk() -> None:
    head = toy_head(toy_config(), num_slots=3)
    assert head.needs_comm is False
    assert head.block_gamma is None
    assert head.prefill_uses_shared_buffers is False
    assert head.propose_batch_max() == 3


def test_what_a_slot_held_before_does_not_matter(tiny: Tiny) -> None:
    head = tiny.head(num_slots=1)
    head.ring.rows.fill_(float("nan"))
    head._pending.fill_(float("nan"))
    head._hiddens.fill_(float("nan"))
    sequence = Run(head, tiny.config, 6)
    clean = Run(tiny.head(num_slots=1), tiny.config, 6)
    for each in (sequence, clean):
        each.prefill(9)
    for num_drafts, accept in ((4, 2), (3, 0), (8, 8), (1, 1)):
        assert sequence.step(num_drafts, accept) == clean.step(num_drafts, accept)
    assert head.num_nonfinite == 0


# Broken numbers


def test_a_broken_sequence_drafts_nothing_and_its_neighbours_as_ever(tiny: Tiny) -> None:
    head = tiny.head(num_slots=3)
    sequences = [Run(head, tiny.config, i) for i in range(3)]
    for sequence in sequences:
        sequence.prefill(30)
    requests = [s.request(4) for s in sequences]
    expected = [head.propose(r, s.state) for r, s in zip(requests, sequences, strict=True)]
    for sequence in sequences:
        head.after_verify(0, sequence.state)
    broken = requests[1].target_hidden.clone()
    broken[2, 5] = float("nan")
    requests[1] = dataclasses.replace(requests[1], target_hidden=broken)
    drafts = head.propose_batch(requests, [s.state for s in sequences])
    assert drafts == [expected[0], Draft(tokens=[]), expected[2]]
    assert head.num_nonfinite == 1


def test_a_broken_row_is_forgotten_and_drafting_goes_on() -> None:
    config = toy_config()
    head = toy_head(config)
    sequence = Run(head, config, 2)
    sequence.prefill(20)
    good = sequence.request(3)
    broken = torch.full_like(good.target_hidden, float("nan"))
    draft = head.propose(dataclasses.replace(good, target_hidden=broken), sequence.state)
    assert (draft.tokens, head.num_nonfinite) == ([], 1)
    assert head.last_pair_key(sequence.state) is None
    sequence.tokens.append(5)
    after = sequence.step(3, 1)
    assert len(after.tokens) == 3
    assert head.num_nonfinite == 1
    assert head.drafter_rows(sequence.state) == 2


def test_a_chain_that_breaks_midway_ends_there() -> None:
    config = toy_config()

    class Breaking(ToyBlock):
        def forward(self, inputs: MtpInputs, ring: DrafterRing) -> MtpOutput:
            out = super().forward(inputs, ring)
            return MtpOutput(normed=out.normed, streams=out.streams * float("nan"))

    head = toy_head(config)
    head.module = Breaking(config)
    sequence = Run(head, config, 2)
    sequence.prefill(20)
    draft = sequence.step(5, 1)
    assert len(draft.tokens) == 1
    assert head.num_nonfinite == 1
    assert_exact(sequence, toy_head(config))


# Options


def test_drafts_come_from_the_first_ids_only_where_asked(tiny: Tiny) -> None:
    options = (tiny.module, tiny.embed, tiny.lm_head, tiny.config)
    few = DeepseekV4MtpHead.new(*options, 40, MAX_SEQ_LEN, num_slots=1)
    all_ids = DeepseekV4MtpHead.new(*options, tiny.config.vocab_size, MAX_SEQ_LEN, num_slots=1)
    expected = Run(tiny.head(num_slots=1), tiny.config, 1)
    some, whole = Run(few, tiny.config, 1), Run(all_ids, tiny.config, 1)
    for sequence in (expected, some, whole):
        sequence.prefill(20)
    drafts = [some.step(4, 0) for _ in range(8)]
    assert {token for draft in drafts for token in draft.tokens} <= set(range(40))
    assert [whole.step(4, 0) for _ in range(8)] == [expected.step(4, 0) for _ in range(8)]


def test_nothing_is_drafted_beyond_the_context() -> None:
    config = toy_config()
    head = toy_head(config)
    sequence = Run(head, config, 1)
    for position, most in ((MAX_SEQ_LEN - 4, 3), (MAX_SEQ_LEN - 2, 1), (MAX_SEQ_LEN - 1, 0)):
        sequence.tokens = [1] * (position + 1)
        draft = head.propose(sequence.request(8), sequence.state)
        assert len(draft.tokens) == most


def test_confidence_is_the_log_probability_of_each_draft(tiny: Tiny) -> None:
    head = tiny.head(num_slots=1, confidence=True)
    sequence = Run(head, tiny.config, 9)
    sequence.prefill(40)
    draft = head.propose(sequence.request(1), sequence.state)
    ring = tiny.ring()
    logits, _ = tiny.forward(sequence.tokens[1:], sequence.streams[:40], 0, ring)
    expected = logits[-1].log_softmax(-1)
    assert draft.confidence is not None
    assert draft.confidence[0] == pytest.approx(expected[draft.tokens[0]].item(), abs=1e-5)
    longer = head.propose(sequence.request(4), sequence.state)
    assert longer.confidence is not None
    assert len(longer.confidence) == 4
    least = torch.tensor(longer.confidence).min().exp().item()
    assert head.last_confidence(sequence.state) == pytest.approx(least)
    plain = Run(tiny.head(num_slots=1), tiny.config, 9)
    plain.prefill(40)
    unmeasured = plain.head.propose(plain.request(4), plain.state)
    assert (unmeasured.tokens, unmeasured.confidence) == (longer.tokens, None)


@pytest.mark.parametrize("allowed", [[3], [500, 501], list(range(0, 512, 2))])
def test_a_grammar_mask_holds_for_the_first_draft(tiny: Tiny, allowed: list[int]) -> None:
    words = torch.zeros(tiny.config.vocab_size // 32, dtype=torch.int64)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    bitmask = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    head = tiny.head(num_slots=1)
    sequence = Run(head, tiny.config, 9)
    sequence.prefill(40)
    request = dataclasses.replace(sequence.request(3), grammar_bitmask=bitmask)
    draft = head.propose(request, sequence.state)
    assert draft.tokens[0] in allowed
    head.after_verify(0, sequence.state)
    nothing = dataclasses.replace(request, grammar_bitmask=torch.zeros_like(bitmask))
    assert head.propose(nothing, sequence.state).tokens == []
    assert head.num_nonfinite == 0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"mtp_vocab_size": -1}, "mtp_vocab_size is -1; allowed is 0 to 64"),
        ({"mtp_vocab_size": 65}, "mtp_vocab_size is 65; allowed is 0 to 64"),
        ({"max_seq_len": 0}, "max_seq_len is 0; allowed is 1 to 4096"),
        ({"max_seq_len": 5000}, "max_seq_len is 5000; allowed is 1 to 4096"),
        ({"num_slots": 0}, "num_slots is 0; allowed is at least 1"),
        ({"max_width": 1}, "max_width is 1; allowed is at least 2"),
    ],
)
def test_numbers_that_make_no_head_are_refused(options: dict[str, int], what: str) -> None:
    config = toy_config()
    dense = ToyTable(torch.zeros(64, 6, dtype=torch.float64), dtype=torch.float64)
    given = {"mtp_vocab_size": 0, "max_seq_len": 100, **options}
    with pytest.raises(ConfigError, match=what):
        DeepseekV4MtpHead.new(ToyBlock(config), dense, dense, config, **given)


# Reference semantics


def test_the_first_draft_without_combiner_and_body_echoes_the_token(tiny: Tiny) -> None:
    """Embedding to head and back: shows that ids, table and head fit together."""

    class Bypass:
        def forward(self, inputs: MtpInputs, ring: DrafterRing) -> MtpOutput:
            unit = inputs.embeds / inputs.embeds.norm(dim=-1, keepdim=True)
            return MtpOutput(normed=unit, streams=inputs.hiddens)

        def write_rows(self, inputs: MtpInputs, ring: DrafterRing) -> None:
            pass

    table = tiny.weights["embed.weight"].float()
    unit = table / table.norm(dim=-1, keepdim=True)
    head = DeepseekV4MtpHead.new(
        Bypass(), tiny.embed, DenseWeight(unit, dtype=torch.float32), tiny.config, 0, MAX_SEQ_LEN
    )
    sequences = [Run(head, tiny.config, i) for i in range(5)]
    for sequence in sequences:
        sequence.prefill(3)
    drafts = head.propose_batch([s.request(3) for s in sequences], [s.state for s in sequences])
    assert [d.tokens for d in drafts] == [[s.tokens[-1]] * 3 for s in sequences]


def recurse_literally(
    tiny: Tiny, tokens: Sequence[int], streams: torch.Tensor, depth: int
) -> tuple[list[int], list[torch.Tensor]]:
    """Drafts by running the whole prefix anew, in a fresh ring, for every draft."""
    ids, rows = list(tokens[1:]), streams[: len(tokens) - 1]
    drafted, logits = [], []
    for _ in range(depth):
        row_logits, fed_back = tiny.forward(ids, rows, 0, tiny.ring())
        logits.append(row_logits[-1])
        drafted.append(int(logits[-1].argmax()))
        ids = [*ids, drafted[-1]]
        rows = torch.cat((rows, fed_back[-1:]))
    return drafted, logits


@pytest.mark.parametrize("length", [1, 2, 60, 140, 290])
def test_recursion_equals_a_loop_that_reruns_the_whole_prefix(tiny: Tiny, length: int) -> None:
    head = tiny.head(num_slots=1, confidence=True)
    sequence = Run(head, tiny.config, length)
    sequence.prefill(length)
    draft = head.propose(sequence.request(4), sequence.state)
    drafted, logits = recurse_literally(tiny, sequence.tokens, sequence.streams, 4)
    assert draft.tokens == drafted
    expected = [row.log_softmax(-1).max().item() for row in logits]
    assert draft.confidence == pytest.approx(expected, abs=TOLERANCE)


def test_collapsed_streams_give_other_logits(tiny: Tiny) -> None:
    sequence = Run(tiny.head(num_slots=1), tiny.config, 3)
    ids, streams = [sequence.draw() for _ in range(40)], sequence.streams[:40]
    true, _ = tiny.forward(ids, streams, 0, tiny.ring())
    mean = streams.mean(1, keepdim=True).expand_as(streams).contiguous()
    collapsed, _ = tiny.forward(ids, mean, 0, tiny.ring())
    assert (true - collapsed).abs().mean() > 100 * TOLERANCE


def test_position_zero_is_like_every_other(tiny: Tiny) -> None:
    """The first pair's embedding is not masked: another first token, another draft row."""
    ring, other = tiny.ring(), tiny.ring()
    streams = Run(tiny.head(num_slots=1), tiny.config, 3).streams[:1]
    tiny.forward([7], streams, 0, ring)
    tiny.forward([8], streams, 0, other)
    assert (ring.rows[0, 0] - other.rows[0, 0]).abs().max() > 1e-3
    later = tiny.ring()
    shifted, _ = tiny.forward([7], streams, 300, later, lowest=300)
    assert torch.allclose(shifted, tiny.forward([7], streams, 0, ring)[0], atol=TOLERANCE)


@pytest.fixture(scope="module")
def oracle(
    tiny: Tiny,
) -> Callable[[Sequence[int], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The block from transformers' own parts: (ids, streams) of a whole prefix to (logits, S')."""
    pytest.importorskip("transformers")
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

    raw = tiny.config.to_dict()
    raw |= {
        "num_hidden_layers": 1,
        "compress_ratios": [0],
        "layer_types": ["sliding_attention"],
        "mlp_layer_types": ["moe"],
        "num_hash_layers": 0,
    }
    config = DeepseekV4Config(**raw)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    layer = hf.DeepseekV4DecoderLayer(config, 0).eval()
    collapse = hf.DeepseekV4HyperHead(config).eval()
    rotary = hf.DeepseekV4RotaryEmbedding(config)
    w = {name[6:]: value for name, value in tiny.weights.items() if name.startswith("mtp.0.")}
    experts = {i: w[f"ffn.experts.w{i}"] for i in (1, 2, 3)}
    named = {
        "self_attn.q_a_proj.weight": w["attn.wq_a.weight"],
        "self_attn.q_a_norm.weight": w["attn.q_norm.weight"],
        "self_attn.q_b_proj.weight": w["attn.wq_b.weight"],
        "self_attn.kv_proj.weight": w["attn.wkv.weight"],
        "self_attn.kv_norm.weight": w["attn.kv_norm.weight"],
        "self_attn.o_a_proj.weight": w["attn.wo_a.weight"],
        "self_attn.o_b_proj.weight": w["attn.wo_b.weight"],
        "self_attn.sinks": w["attn.attn_sink"],
        "mlp.gate.weight": w["ffn.gate.weight"],
        "mlp.gate.e_score_correction_bias": w["ffn.gate.bias"],
        "mlp.experts.gate_up_proj": torch.cat((experts[1], experts[3]), 1),
        "mlp.experts.down_proj": experts[2],
        "mlp.shared_experts.gate_proj.weight": w["ffn.shared_experts.w1.weight"],
        "mlp.shared_experts.down_proj.weight": w["ffn.shared_experts.w2.weight"],
        "mlp.shared_experts.up_proj.weight": w["ffn.shared_experts.w3.weight"],
        "input_layernorm.weight": w["attn_norm.weight"],
        "post_attention_layernorm.weight": w["ffn_norm.weight"],
    }
    for ours, theirs in (("hc_attn", "attn_hc"), ("hc_ffn", "ffn_hc")):
        for part in ("fn", "base", "scale"):
            named[f"{theirs}.{part}"] = w[f"{ours}_{part}"]
    layer.load_state_dict({name: value.float() for name, value in named.items()}, strict=True)
    collapse.load_state_dict({f"hc_{p}": w[f"hc_head_{p}"] for p in ("fn", "base", "scale")})

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        module = hf.DeepseekV4RMSNorm(x.shape[-1], eps=config.rms_norm_eps)
        module.weight.data = w[f"{name}.weight"].float()
        return module(x)

    window = tiny.config.sliding_window

    @torch.no_grad()
    def run(ids: Sequence[int], streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(ids)
        embeds = tiny.weights["embed.weight"].float()[torch.tensor(list(ids))]
        e = norm(embeds, "enorm") @ w["e_proj.weight"].float().T
        s = norm(streams, "hnorm") @ w["h_proj.weight"].float().T
        x = (e[:, None] + s)[None]
        places = torch.arange(count)
        back = places[:, None] - places[None]
        hidden = (back < 0) | (back >= window)
        mask = torch.zeros(count, count).masked_fill(hidden, float("-inf"))[None, None]
        tables = {
            kind: rotary(x, position_ids=places[None], layer_type=kind)
            for kind in ("main", "compress")
        }
        out = layer(
            x,
            position_embeddings=tables,
            position_ids=places[None],
            attention_mask=mask,
            cache=None,
        )
        normed = norm(collapse(out), "norm")
        return (normed @ tiny.weights["head.weight"].float().T)[0], out[0]

    return run


def test_the_block_equals_transformers_parts_in_one_prefill(tiny: Tiny, oracle: Any) -> None:
    sequence = Run(tiny.head(num_slots=1), tiny.config, 21)
    ids, streams = [sequence.draw() for _ in range(300)], sequence.streams[:300]
    logits, fed_back = oracle(ids, streams)
    ours, our_streams = tiny.forward(ids, streams, 0, tiny.ring())
    assert logits.std() > 0.1
    assert (ours - logits).abs().max() < TOLERANCE
    assert (our_streams - fed_back).abs().max() < TOLERANCE


def test_the_block_equals_transformers_parts_step_by_step(tiny: Tiny, oracle: Any) -> None:
    sequence = Run(tiny.head(num_slots=1), tiny.config, 22)
    ids, streams = [sequence.draw() for _ in range(160)], sequence.streams[:160]
    logits, fed_back = oracle(ids, streams)
    ring = tiny.ring()
    for key in range(160):
        row, row_streams = tiny.forward(ids[key : key + 1], streams[key : key + 1], key, ring)
        assert (row[0] - logits[key]).abs().max() < TOLERANCE
        assert (row_streams[0] - fed_back[key]).abs().max() < TOLERANCE


@pytest.mark.parametrize("length", [20, 150])
def test_drafts_equal_a_recursion_of_transformers_parts_to_depth_four(
    tiny: Tiny, oracle: Any, length: int
) -> None:
    head = tiny.head(num_slots=1, confidence=True)
    sequence = Run(head, tiny.config, 23)
    sequence.prefill(length)
    draft = head.propose(sequence.request(4), sequence.state)
    ids, rows, measured = list(sequence.tokens[1:]), sequence.streams[:length], []
    for token in draft.tokens:
        logits, fed_back = oracle(ids, rows)
        assert int(logits[-1].argmax()) == token
        measured.append(logits[-1].log_softmax(-1).max().item())
        ids, rows = [*ids, token], torch.cat((rows, fed_back[-1:]))
    assert draft.confidence == pytest.approx(measured, abs=TOLERANCE)


# The trained model


@pytest.mark.skipif(
    not (Path(paceline.__file__).parent / "bundled" / "config.json").is_file(),
    reason="this checkout carries no trained model",
)
def test_shifting_the_pairing_by_one_lowers_acceptance_of_the_trained_model() -> None:
    """Output cannot show a mislabelled pair, agreement with the target can."""
    path = paceline.bundled_model_path()
    config = ModelConfig.from_path(path)
    weights = dict(load_weights(path, config))
    rig = make_rig(weights, config, backend="auto")
    assert rig.built.mtp is not None
    text = inspect.getsource(textwrap.TextWrapper)
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids[:600]
    logits, streams = rig.run((0, 0, ids))
    wanted = logits.argmax(-1)

    def agreement(shift: int) -> float:
        """Share of rows whose draft is the target's choice, tokens `shift` places off."""
        keys = range(1, len(ids) - 2)
        tokens = [ids[key + 1 + shift] for key in keys]
        ring = DrafterRing.allocate(
            config,
            num_slots=1,
            max_width=len(ids),
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        inputs = mtp_inputs(rig.built, 0, 1, tokens, streams[1 : len(ids) - 2], lowest=1)
        assert rig.built.mtp is not None
        out = rig.built.mtp.forward(inputs, ring)
        drafts = rig.built.lm_head.matmul(out.normed).argmax(-1)
        return (drafts == wanted[2 : len(ids) - 1]).float().mean().item()

    paired = agreement(0)
    assert paired > 0.4
    assert agreement(-1) < paired - 0.1
    assert agreement(1) < paired - 0.1
