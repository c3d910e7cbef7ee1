"""Drafts that stay on the device: the same drafts, no host read, and as safe as read ones."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from head_rig import (
    MAX_SEQ_LEN,
    DeviceRun,
    HostRead,
    Run,
    Tiny,
    ToyBlock,
    assert_exact,
    make_tiny,
    no_host_read,
    toy_config,
    toy_head,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.cache.drafter import DrafterRing
from paceline.models.step import MtpInputs, MtpOutput
from paceline.types import Draft, DraftRequest

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
STEPS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=40)


@pytest.fixture(scope="module", params=["torch", "fused"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", request.param)


# The same drafts


@QUICK
@given(prompt=st.integers(1, 200), steps=STEPS, seed=st.integers(0, 99))
def test_drafts_left_on_the_device_are_those_that_are_read(
    prompt: int, steps: list[tuple[int, int]], seed: int
) -> None:
    config = toy_config(16)
    left = DeviceRun(toy_head(config, num_slots=1), config, seed)
    read = Run(toy_head(config, num_slots=1), config, seed)
    for sequence in (left, read):
        sequence.prefill(prompt)
    for num_drafts, accept in steps:
        if not num_drafts:
            for sequence in (left, read):
                sequence.undrafted(1 + accept)
                sequence.catch_up_stretch()
            continue
        assert left.step(num_drafts, accept) == read.step(num_drafts, accept)
        assert left.tokens == read.tokens
        assert_exact(left, read.head)


def test_the_chain_of_the_real_block_runs_without_a_host_read(tiny: Tiny) -> None:
    left = DeviceRun(tiny.head(num_slots=1), tiny.config, 3, guarded=True)
    read = Run(tiny.head(num_slots=1), tiny.config, 3)
    rng = random.Random(4)
    for sequence in (left, read):
        sequence.prefill(100)
    for _ in range(25):
        num_drafts, accept = rng.randint(1, 8), rng.randint(0, 8)
        assert left.step(num_drafts, accept) == read.step(num_drafts, accept)
    assert_exact(left, tiny.head(num_slots=1))
    assert left.head.num_circuit_runs == left.head.num_circuit_fallbacks == 0


def test_a_batch_with_unequal_counts_runs_without_a_host_read(tiny: Tiny) -> None:
    rng = random.Random(5)
    size = 5
    head, other = tiny.head(num_slots=size), tiny.head(num_slots=size)
    left = [DeviceRun(head, tiny.config, i) for i in range(size)]
    read = [Run(other, tiny.config, i) for i in range(size)]
    for i in range(size):
        for sequence in (left[i], read[i]):
            sequence.prefill(3 + 40 * i)
    for _ in range(8):
        counts = [rng.randint(1, 6) for _ in range(size)]
        accepts = [rng.randint(0, 6) for _ in range(size)]
        asked = [s.deferred(n) for s, n in zip(left, counts, strict=True)]
        with no_host_read():
            drafts = head.propose_batch(asked, [s.state for s in left])
        expected = other.propose_batch(
            [s.request(n) for s, n in zip(read, counts, strict=True)], [s.state for s in read]
        )
        kept = [dataclasses.replace(d, device_tokens=copied(d)) for d in drafts]
        for i in range(size):
            assert left[i].finish(asked[i], kept[i], accepts[i]) == expected[i]
            read[i].settle(expected[i], accepts[i])
    for sequence in left:
        assert_exact(sequence, tiny.head(num_slots=1))


def copied(draft: Draft) -> torch.Tensor:
    assert draft.device_tokens is not None
    return draft.device_tokens.clone()


def test_the_guard_sees_a_chain_that_is_read(tiny: Tiny) -> None:
    sequence = Run(tiny.head(num_slots=1), tiny.config, 3)
    sequence.prefill(10)
    sequence.head.set_circuit_draft(Nothing())
    sequence.head.circuit_draft()
    with no_host_read(), pytest.raises(HostRead):
        sequence.head.propose(sequence.request(2), sequence.state)


class Nothing:
    """A runner that serves no shape, so that the eager program runs."""

    def serves(self, shape: object) -> bool:
        return False

    def run_draft(self, shape: object) -> None:
        raise AssertionError


READS: list[Callable[[torch.Tensor], object]] = [
    lambda t: t.tolist(),
    lambda t: t[0].item(),
    lambda t: int(t[0]),
    lambda t: bool(t[0]),
    lambda t: t.numpy(),
    lambda t: t.nonzero(),
    lambda t: torch.equal(t, t),
]


@pytest.mark.parametrize("read", READS)
def test_the_guard_knows_the_ways_to_read(read: Callable[[torch.Tensor], object]) -> None:
    with no_host_read(), pytest.raises(HostRead):
        read(torch.ones(3, dtype=torch.int64))


# Fetching the first draft


def test_the_first_draft_can_be_fetched_until_the_next_propose() -> None:
    config = toy_config()
    head = toy_head(config)
    sequence = DeviceRun(head, config, 1)
    assert head.read_deferred_draft_token() is None
    sequence.prefill(9)
    draft = sequence.step(4, 2)
    assert head.read_deferred_draft_token() == draft.tokens[0]
    assert head.read_deferred_draft_token() == draft.tokens[0]


def test_a_batch_defers_for_those_that_ask_and_reads_the_others() -> None:
    config = toy_config()
    head, alone = toy_head(config), toy_head(config)
    sequences = [DeviceRun(head, config, i) for i in range(3)]
    expected = []
    for i, sequence in enumerate(sequences):
        sequence.prefill(9 + i)
        other = Run(alone, config, i)
        other.prefill(9 + i)
        expected.append(alone.propose(other.request(3), other.state).tokens)
    requests = [sequences[0].request(3), sequences[1].deferred(3), sequences[2].deferred(3)]
    drafts = head.propose_batch(requests, [s.state for s in sequences])
    assert [d.tokens for d in drafts] == [expected[0], [], []]
    assert drafts[0].device_tokens is None
    assert [copied(d).tolist() for d in drafts[1:]] == expected[1:]
    assert head.read_deferred_draft_token() == expected[1][0]


def test_nothing_wanted_leaves_nothing_on_the_device() -> None:
    config = toy_config()
    head = toy_head(config)
    sequence = DeviceRun(head, config, 1)
    sequence.tokens = [1] * MAX_SEQ_LEN
    request = sequence.deferred(3)
    assert head.propose(request, sequence.state) == Draft(tokens=[])
    target = request.draft_embed_target
    assert target is not None
    assert target.isnan().all()
    assert head.read_deferred_draft_token() is None


def test_confidence_of_drafts_on_the_device_is_read_when_asked_for(tiny: Tiny) -> None:
    options: dict[str, Any] = {"num_slots": 1, "confidence": True}
    left = DeviceRun(tiny.head(**options), tiny.config, 6)
    read = Run(tiny.head(**options), tiny.config, 6)
    for sequence in (left, read):
        sequence.prefill(30)
    draft = left.head.propose(left.deferred(3), left.state)
    read.head.propose(read.request(3), read.state)
    assert draft.confidence is None
    confidence = left.head.last_confidence(left.state)
    assert confidence == read.head.last_confidence(read.state)
    assert confidence is not None
    assert 0 < confidence < 1


def test_confidence_is_gone_once_another_sequence_drafts(tiny: Tiny) -> None:
    head = tiny.head(num_slots=2, confidence=True)
    first, second = DeviceRun(head, tiny.config, 6), DeviceRun(head, tiny.config, 7)
    for sequence in (first, second):
        sequence.prefill(30)
    head.propose(first.deferred(3), first.state)
    head.after_verify(1, first.state)
    kept = head.last_confidence(first.state)
    assert kept is not None
    assert head.last_confidence(first.state) == kept
    head.propose(first.deferred(3), first.state)
    head.propose(second.deferred(3), second.state)
    assert head.last_confidence(first.state) is None
    assert head.last_confidence(second.state) is not None


# A chain that ends early


@pytest.mark.parametrize("least", [0.0, 0.018, 1.0])
def test_an_unlikely_draft_ends_the_chain_where_it_ends_a_read_one(
    tiny: Tiny, least: float
) -> None:
    options: dict[str, Any] = {"num_slots": 1, "min_probability": least}
    left = DeviceRun(tiny.head(**options), tiny.config, 6)
    read = Run(tiny.head(**options), tiny.config, 6)
    for sequence in (left, read):
        sequence.prefill(30)
    lengths = set()
    for accept in (0, 3, 1, 5, 0, 2):
        draft = read.step(5, accept)
        assert left.step(5, accept) == draft
        lengths.add(len(draft.tokens))
    assert_exact(left, tiny.head(num_slots=1))
    assert lengths == ({5} if least == 0 else {0} if least == 1 else lengths)
    assert left.head.num_nonfinite == 0
    if 0 < least < 1:
        assert len(lengths) > 1


def break_streams(request: DraftRequest) -> DraftRequest:
    broken = request.target_hidden.clone()
    broken[1, 3] = float("nan")
    return dataclasses.replace(request, target_hidden=broken)


@QUICK
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 5), st.booleans()), min_size=2, max_size=20
    ),
    seed=st.integers(0, 99),
)
def test_rows_that_are_not_finite_are_never_read_though_the_host_has_not_looked(
    steps: list[tuple[int, int, bool]], seed: int
) -> None:
    """Drafts, counts and, once looked at, rows are those of a head whose drafts are read."""
    config = toy_config(8)
    left = DeviceRun(toy_head(config, num_slots=1), config, seed)
    read = Run(toy_head(config, num_slots=1), config, seed)
    for sequence in (left, read):
        sequence.prefill(12)
    broken = 0
    for num_drafts, accept, breaks in steps:
        broken += breaks
        asked, expected = left.deferred(num_drafts), read.request(num_drafts)
        if breaks:
            asked, expected = break_streams(asked), break_streams(expected)
        draft = left.head.propose(asked, left.state)
        wanted = read.head.propose(expected, read.state)
        assert left.finish(asked, draft, accept) == wanted
        read.settle(wanted, accept)
    assert left.head.num_nonfinite == read.head.num_nonfinite == broken
    ours, theirs = left.head.held_rows(left.state), read.head.held_rows(read.state)
    assert torch.equal(ours[1], theirs[1])
    assert left.head.drafter_rows(left.state) == read.head.drafter_rows(read.state)
    assert not ours[1].isnan().any()


def test_a_chain_that_breaks_midway_ends_there_and_costs_no_rows() -> None:
    config = toy_config()

    class Breaking(ToyBlock):
        def forward(self, inputs: MtpInputs, ring: DrafterRing) -> MtpOutput:
            out = super().forward(inputs, ring)
            return MtpOutput(normed=out.normed, streams=out.streams * float("nan"))

    head = toy_head(config)
    head.module = Breaking(config)
    sequence = DeviceRun(head, config, 2)
    sequence.prefill(20)
    assert len(sequence.step(5, 1).tokens) == 1
    assert head.num_nonfinite == 1
    assert_exact(sequence, toy_head(config))


def test_a_broken_row_is_no_bar_once_its_position_is_drafted_anew() -> None:
    config = toy_config()
    left, fresh = DeviceRun(toy_head(config), config, 3), Run(toy_head(config), config, 3)
    for sequence in (left, fresh):
        sequence.prefill(20)
    request = break_streams(left.deferred(2))
    draft = left.head.propose(request, left.state)
    assert copied(draft).tolist() == [-1, -1]
    left.head.after_verify(0, left.state)
    again = left.head.propose(left.deferred(2), left.state)
    assert copied(again).min() >= 0
    left.head.after_verify(0, left.state)
    assert_exact(left, toy_head(config), gapless=False)
    assert left.head.drafter_rows(left.state) == 1


def test_a_slot_given_back_after_a_broken_row_is_as_good_as_new() -> None:
    config = toy_config()
    head = toy_head(config, num_slots=1)
    first = DeviceRun(head, config, 3)
    first.prefill(200)
    head.propose(break_streams(first.deferred(2)), first.state)
    head.free_state(first.state)
    second, expected = DeviceRun(head, config, 4), Run(toy_head(config), config, 4)
    for sequence in (second, expected):
        sequence.prefill(30)
    assert second.step(3, 1) == expected.step(3, 1)
    assert_exact(second, toy_head(config))


def test_a_mask_holds_on_the_device_and_an_empty_one_is_nothing_broken(tiny: Tiny) -> None:
    words = torch.zeros(tiny.config.vocab_size // 32, dtype=torch.int32)
    words[2] = 0b1010
    sequence = DeviceRun(tiny.head(num_slots=1), tiny.config, 9)
    sequence.prefill(40)
    for bitmask, allowed in ((words, {65, 67}), (torch.zeros_like(words), {-1})):
        request = dataclasses.replace(sequence.deferred(3), grammar_bitmask=bitmask)
        with no_host_read() if allowed != {-1} else contextlib.nullcontext():
            draft = sequence.head.propose(request, sequence.state)
        assert int(copied(draft)[0]) in allowed
        sequence.head.after_verify(0, sequence.state)
    assert sequence.head.num_nonfinite == 0


# All or nothing


@pytest.mark.parametrize("way", ["stepped", "program", "device"])
@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_forward_that_fails_leaves_no_row_that_could_be_wrong(way: str, fails_at: int) -> None:
    config = toy_config()

    class Failing(ToyBlock):
        calls = -1

        def forward(self, inputs: MtpInputs, ring: DrafterRing) -> MtpOutput:
            if self.calls >= 0:
                self.calls += 1
                if self.calls > fails_at:
                    raise RuntimeError("out of memory")
            return super().forward(inputs, ring)

    head, fresh = toy_head(config), toy_head(config)
    block = Failing(config)
    head.module = block
    if way == "program":
        head.set_circuit_draft(Nothing())
    kind = DeviceRun if way == "device" else Run
    sequences = [kind(head, config, i) for i in range(2)]
    for sequence in sequences:
        sequence.prefill(20)
        sequence.step(4, 3)
    requests = [s.deferred(4) if isinstance(s, DeviceRun) else s.request(4) for s in sequences]
    block.calls = 0
    with pytest.raises(RuntimeError, match="out of memory"):
        head.propose_batch(requests, [s.state for s in sequences])
    block.calls = -1
    for sequence in sequences:
        assert head.last_pair_key(sequence.state) is None
        with pytest.raises(ValueError, match="drafted 0"):
            head.after_verify(1, sequence.state)
        for accept in (2, 0, 3):
            sequence.step(4, accept)
            assert_exact(sequence, fresh, gapless=False)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"last_token": 64}, "last_token is 64; allowed is 0 to 63"),
        ({"last_token": -1}, "last_token is -1; allowed is 0 to 63"),
        ({"position": 0}, "position is 0"),
        ({"target_hidden": torch.zeros(2, 5)}, r"target_hidden has shape \[2, 5\]; allowed"),
        ({"draft_embed_target": torch.zeros(5)}, r"draft_embed_target has shape \[5\]; allowed"),
    ],
)
def test_one_bad_request_leaves_every_state_as_it_was(change: dict[str, Any], what: str) -> None:
    config = toy_config()
    head, other = toy_head(config), toy_head(config)
    sequences = [Run(head, config, i) for i in range(3)]
    twins = [Run(other, config, i) for i in range(3)]
    for sequence in (*sequences, *twins):
        sequence.prefill(20)
        sequence.step(4, 2)
    requests = [s.request(3) for s in sequences]
    requests[1] = dataclasses.replace(requests[1], **change)
    before = head.ring.rows.clone()
    with pytest.raises(ValueError, match=what):
        head.propose_batch(requests, [s.state for s in sequences])
    assert torch.equal(head.ring.rows, before)
    for sequence, twin in zip(sequences, twins, strict=True):
        assert sequence.state.pending == twin.state.pending
        assert sequence.step(3, 1) == twin.step(3, 1)
        assert_exact(sequence, other)


def test_two_requests_of_one_state_are_refused() -> None:
    config = toy_config()
    sequence = Run(toy_head(config), config, 1)
    sequence.prefill(5)
    with pytest.raises(ValueError, match="one state for each"):
        sequence.head.propose_batch([sequence.request(1)] * 2, [sequence.state] * 2)


@pytest.mark.parametrize("size", range(1, 9))
def test_a_batch_equals_its_proposals_bit_for_bit(tiny: Tiny, size: int) -> None:
    """Ids and log-probabilities, whether the host steps, the block chains or the program runs."""
    options: dict[str, Any] = {"confidence": True, "min_probability": 0.018}
    rng = random.Random(size)
    counts = [rng.randint(1, 5) for _ in range(size)]
    batched = tiny.head(num_slots=size, **options)
    program = tiny.head(num_slots=size, **options)
    program.set_circuit_draft(Nothing())
    heads = [batched, program, *(tiny.head(num_slots=1, **options) for _ in range(size))]
    for turn in range(3):
        drafts = []
        for head in (batched, program):
            runs = [Run(head, tiny.config, 10 * turn + i) for i in range(size)]
            for i, sequence in enumerate(runs):
                sequence.prefill(20 + 30 * i)
            requests = [s.request(n) for s, n in zip(runs, counts, strict=True)]
            drafts.append(head.propose_batch(requests, [s.state for s in runs]))
            for sequence in runs:
                head.free_state(sequence.state)
        alone = []
        for i in range(size):
            sequence = Run(heads[2 + i], tiny.config, 10 * turn + i)
            sequence.prefill(20 + 30 * i)
            alone.append(sequence.head.propose(sequence.request(counts[i]), sequence.state))
            sequence.head.free_state(sequence.state)
        assert drafts == [alone, alone]
