"""Rows that outlive their sequence: moved, copied, shared, and always accounted for; budgets."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import pytest
import torch
from head_rig import (
    MAX_SEQ_LEN,
    DeviceRun,
    Run,
    Tiny,
    assert_exact,
    fresh_draft,
    make_tiny,
    toy_config,
    toy_head,
    truth,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.draft import DeepseekV4MtpHead, DraftProposer
from paceline.types import Draft, DrafterKv, DraftRequest

QUICK = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
STEPS = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=20)


@pytest.fixture(scope="module", params=["torch", "fused"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", request.param)


def moved(sequence: Run, head: DeepseekV4MtpHead, kv: DrafterKv) -> Run:
    """The same sequence on another state that takes the rows over."""
    other = copy.copy(sequence)
    other.head, other.tokens, other.rng = head, list(sequence.tokens), copy.copy(sequence.rng)
    other.state = head.alloc_state_for(MAX_SEQ_LEN)
    assert head.install_drafter_kv(kv, other.state)
    return other


# Moving


@pytest.mark.parametrize("window", [8, 128])
@QUICK
@given(prompt=st.integers(2, 200), steps=STEPS, more=STEPS, seed=st.integers(0, 99))
def test_rows_moved_to_another_state_draft_on_as_if_they_had_stayed(
    window: int,
    prompt: int,
    steps: list[tuple[int, int]],
    more: list[tuple[int, int]],
    seed: int,
) -> None:
    config = toy_config(window)
    head, stays = toy_head(config, num_slots=2), toy_head(config, num_slots=1)
    sequence, twin = Run(head, config, seed), Run(stays, config, seed)
    for each in (sequence, twin):
        each.prefill(prompt)
        for step in steps:
            each.step(*step)
    first, rows = head.held_rows(sequence.state)
    kv = head.take_drafter_kv(sequence.state)
    assert kv is not None
    assert (kv.rows, kv.last_pair_key) == (rows.shape[0], first + rows.shape[0] - 1)
    assert kv.num_bytes == rows.nbytes == head.num_carried_bytes
    assert head.drafter_rows(sequence.state) == 0
    assert head.last_pair_key(sequence.state) is None
    assert (head.num_carried, head.num_carried_rows) == (1, kv.rows)
    other = moved(sequence, head, kv)
    assert (head.num_carried, head.num_carried_rows, head.num_carried_bytes) == (0, 0, 0)
    assert head.last_pair_key(other.state) == kv.last_pair_key
    assert head.drafter_rows(other.state) == kv.rows
    kept_first, kept = head.held_rows(other.state)
    assert kept_first == first
    assert torch.equal(kept, rows)
    for step in more:
        assert other.step(*step) == twin.step(*step)
        assert_exact(other, stays)


def test_real_rows_are_moved_bit_for_bit(tiny: Tiny) -> None:
    head, stays = tiny.head(num_slots=2), tiny.head(num_slots=1)
    sequence, twin = Run(head, tiny.config, 3), Run(stays, tiny.config, 3)
    rng = random.Random(5)
    for each in (sequence, twin):
        each.prefill(140)
    for _ in range(30):
        step = (rng.randint(1, 8), rng.randint(0, 8))
        assert sequence.step(*step) == twin.step(*step)
    expected = stays.held_rows(twin.state)
    kv = head.take_drafter_kv(sequence.state)
    assert kv is not None
    other = moved(sequence, head, kv)
    first, rows = head.held_rows(other.state)
    assert first == expected[0]
    assert torch.equal(rows, expected[1])
    for _ in range(10):
        step = (rng.randint(1, 8), rng.randint(0, 8))
        assert other.step(*step) == twin.step(*step)
    assert_exact(other, stays)


def test_a_state_whose_rows_were_taken_is_as_freshly_allocated() -> None:
    config = toy_config()
    head = toy_head(config, num_slots=1)
    sequence = Run(head, config, 1)
    sequence.prefill(30)
    sequence.step(4, 3)
    head.propose(sequence.request(4), sequence.state)
    budget = sequence.state.budget_tokens
    assert head.take_drafter_kv(sequence.state) is not None
    fresh = toy_head(config, num_slots=1).alloc_state_for(budget)
    for name in type(fresh).__slots__:
        assert getattr(sequence.state, name) == getattr(fresh, name), name
    assert head.take_drafter_kv(sequence.state) is None
    with pytest.raises(ValueError, match="the last propose drafted 0"):
        head.after_verify(1, sequence.state)


def test_drafted_rows_without_a_verdict_are_not_carried() -> None:
    config = toy_config()
    head, fresh = toy_head(config), toy_head(config)
    sequence = Run(head, config, 1)
    sequence.prefill(30)
    head.propose(sequence.request(4), sequence.state)
    kv = head.take_drafter_kv(sequence.state)
    assert kv is not None
    assert (kv.rows, kv.last_pair_key) == (30, 29)
    assert_exact(moved(sequence, head, kv), fresh)


def test_a_next_turn_takes_up_the_part_it_shares() -> None:
    """Rows beyond what the new prompt shares are dropped by feeding on from there."""
    config = toy_config(16)
    head, fresh = toy_head(config), toy_head(config)
    sequence = Run(head, config, 1)
    sequence.prefill(40)
    for _ in range(3):
        sequence.step(4, 4)
    kv = head.take_drafter_kv(sequence.state)
    assert kv is not None
    assert kv.last_pair_key is not None
    other = moved(sequence, head, kv)
    shared = kv.last_pair_key - 2
    other.tokens = [*sequence.tokens[:shared], *(other.draw() for _ in range(30))]
    first_key = shared - 1
    written = head.prefill_drafter(
        other.tokens[:-1],
        other.streams[first_key : len(other.tokens) - 1],
        other.state,
        first_position=first_key,
    )
    assert written > 0
    assert_exact(other, fresh)
    assert other.step(3, 1) == fresh_draft(dataclass_at(other, -2), fresh, 3)


def dataclass_at(sequence: Run, end: int) -> Run:
    earlier = copy.copy(sequence)
    earlier.tokens = sequence.tokens[:end]
    return earlier


# Refusals and the ledger


def test_rows_are_refused_where_they_do_not_fit_and_stay_with_the_caller() -> None:
    config = toy_config()
    head, foreign = toy_head(config, num_slots=5), toy_head(config)
    sequence = Run(head, config, 1)
    sequence.prefill(50)
    kv = head.take_drafter_kv(sequence.state)
    assert kv is not None
    busy = Run(head, config, 2)
    busy.prefill(5)
    proposed = Run(head, config, 3)
    proposed.prefill(1)
    head.propose(proposed.request(2), proposed.state)
    freed, short = head.alloc_state(), head.alloc_state_for(48)
    head.free_state(freed)
    for state in (busy.state, proposed.state, freed, short):
        before = [getattr(state, name) for name in type(state).__slots__]
        assert not head.install_drafter_kv(kv, state)
        assert [getattr(state, name) for name in type(state).__slots__] == before
    assert not foreign.install_drafter_kv(kv, foreign.alloc_state())
    assert not head.install_drafter_kv(dataclasses.replace(kv), sequence.state)
    assert (head.num_carried, head.num_carried_rows) == (1, kv.rows)
    assert head.install_drafter_kv(kv, sequence.state)
    assert head.num_carried == 0


def test_installing_or_freeing_twice_is_harmless() -> None:
    config = toy_config()
    head = toy_head(config)
    sequence = Run(head, config, 1)
    sequence.prefill(50)
    kv = head.take_drafter_kv(sequence.state)
    assert kv is not None
    assert head.install_drafter_kv(kv, sequence.state)
    assert not head.install_drafter_kv(kv, head.alloc_state())
    head.free_drafter_kv(kv)
    head.free_drafter_kv(kv)
    assert head.drafter_rows(sequence.state) == 49
    assert head.share_drafter_kv(kv) is None
    again = head.take_drafter_kv(sequence.state)
    assert again is not None
    head.free_drafter_kv(again)
    head.free_drafter_kv(again)
    assert head.num_carried == 0
    assert not head.install_drafter_kv(again, sequence.state)
    empty = DrafterKv(blocks=[], rows=0, last_pair_key=None)
    head.free_drafter_kv(empty)
    assert not head.install_drafter_kv(empty, sequence.state)


def test_nothing_is_carried_out_of_an_empty_or_a_freed_state() -> None:
    head = toy_head(toy_config())
    state = head.alloc_state()
    assert head.take_drafter_kv(state) is None
    assert head.snapshot_drafter_kv(state, 100) is None
    head.free_state(state)
    assert head.take_drafter_kv(state) is None
    assert head.snapshot_drafter_kv(state, 100) is None
    assert head.num_carried == 0


# Copies and shares


@QUICK
@given(prompt=st.integers(2, 60), steps=STEPS, through=st.integers(-2, 200), seed=st.integers(0, 9))
def test_a_snapshot_holds_the_newest_exact_rows_up_to_its_key(
    prompt: int, steps: list[tuple[int, int]], through: int, seed: int
) -> None:
    config = toy_config(8)
    head, fresh = toy_head(config, num_slots=2), toy_head(config)
    sequence, twin = Run(head, config, seed), Run(toy_head(config), config, seed)
    for each in (sequence, twin):
        each.prefill(prompt)
        for step in steps:
            each.step(*step)
    held, _ = copy.copy(twin).head.held_rows(twin.state)
    newest = twin.head.last_pair_key(twin.state)
    assert newest is not None
    kv = head.snapshot_drafter_kv(sequence.state, through)
    last = min(through, newest)
    if last < held:
        assert kv is None
    else:
        assert kv is not None
        assert (kv.last_pair_key, kv.rows) == (last, min(last - held + 1, 7))
        other = moved(sequence, head, kv)
        first, rows = head.held_rows(other.state)
        assert torch.equal(rows, truth(sequence, fresh, first, kv.rows))
        head.free_state(other.state)
    assert head.num_carried == 0
    # The sequence it was taken from has not noticed.
    for _ in range(3):
        assert sequence.step(4, 2) == twin.step(4, 2)
    assert_exact(sequence, fresh)


def test_a_snapshot_is_a_copy_and_enough_for_the_next_propose(tiny: Tiny) -> None:
    head, fresh = tiny.head(num_slots=2), tiny.head(num_slots=1)
    sequence = Run(head, tiny.config, 2)
    sequence.prefill(256)
    through = 254
    kv = head.snapshot_drafter_kv(sequence.state, through)
    assert kv is not None
    assert kv.rows == tiny.config.sliding_window - 1
    at_boundary = copy.copy(sequence)
    at_boundary.tokens = list(sequence.tokens)
    while len(sequence.tokens) < 600:
        sequence.step(4, 4)
    other = moved(at_boundary, head, kv)
    assert other.step(5, 3) == fresh_draft(at_boundary, fresh, 5)
    assert_exact(other, fresh)


def test_shared_rows_serve_many_states_and_are_counted_once() -> None:
    config = toy_config()
    head, fresh = toy_head(config, num_slots=4), toy_head(config)
    sequence = Run(head, config, 1)
    sequence.prefill(60)
    kv = head.snapshot_drafter_kv(sequence.state, 58)
    assert kv is not None
    shares = [head.share_drafter_kv(kv) for _ in range(3)]
    assert (head.num_carried, head.num_carried_rows) == (4, 59)
    assert head.num_carried_bytes == kv.num_bytes
    users = []
    for share in shares:
        assert share is not None
        assert (share.rows, share.last_pair_key) == (kv.rows, kv.last_pair_key)
        users.append(moved(sequence, head, share))
    assert (head.num_carried, head.num_carried_rows) == (1, 59)
    for n, user in enumerate(users):
        user.rng = random.Random(n)
        for _ in range(20):
            user.step(1 + n, n)
        assert_exact(user, fresh)
    last = head.share_drafter_kv(kv)
    head.free_drafter_kv(kv)
    head.free_state(users[0].state)
    assert last is not None
    assert (head.num_carried, head.num_carried_rows) == (1, 59)
    assert_exact(moved(sequence, head, last), fresh)
    assert (head.num_carried, head.num_carried_rows, head.num_carried_bytes) == (0, 0, 0)


class Ledger(RuleBasedStateMachine):
    """Values and states in any order against two dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.config = toy_config(4)
        self.head = toy_head(self.config, num_slots=3)
        self.fresh = toy_head(self.config, num_slots=1)
        self.runs: list[Run] = []
        self.values: list[tuple[DrafterKv, Run]] = []
        self.gone: list[DrafterKv] = []
        self.turn = 0

    def pick(self, data: st.DataObject, among: list[Any]) -> Any:
        return among[data.draw(st.integers(0, len(among) - 1))]

    @precondition(lambda self: len(self.runs) < 3)
    @rule(length=st.integers(2, 20))
    def begin(self, length: int) -> None:
        self.turn += 1
        self.runs.append(Run(self.head, self.config, self.turn))
        self.runs[-1].prefill(length)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), num_drafts=st.integers(1, 6), accept=st.integers(0, 6))
    def step(self, data: st.DataObject, num_drafts: int, accept: int) -> None:
        run = self.pick(data, self.runs)
        expected = fresh_draft(run, self.fresh, num_drafts)
        assert run.step(num_drafts, accept) == expected

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), take=st.booleans())
    def carry_out(self, data: st.DataObject, take: bool) -> None:
        run = self.pick(data, self.runs)
        kept = dataclass_at(run, len(run.tokens))
        if take:
            kv = self.head.take_drafter_kv(run.state)
            self.head.free_state(run.state)
            self.runs.remove(run)
        else:
            newest = self.head.last_pair_key(run.state)
            assert newest is not None
            kv = self.head.snapshot_drafter_kv(run.state, newest)
        assert kv is not None
        self.values.append((kv, kept))

    @precondition(lambda self: self.values)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        kv, run = self.pick(data, self.values)
        other = self.head.share_drafter_kv(kv)
        assert other is not None
        self.values.append((other, run))

    @precondition(lambda self: self.values and len(self.runs) < 3)
    @rule(data=st.data())
    def install(self, data: st.DataObject) -> None:
        kv, run = self.pick(data, self.values)
        self.values.remove((kv, run))
        self.runs.append(moved(run, self.head, kv))
        self.gone.append(kv)

    @precondition(lambda self: self.values)
    @rule(data=st.data())
    def free_value(self, data: st.DataObject) -> None:
        kv, run = self.pick(data, self.values)
        self.values.remove((kv, run))
        self.head.free_drafter_kv(kv)
        self.gone.append(kv)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def use_what_is_gone(self, data: st.DataObject) -> None:
        kv = self.pick(data, self.gone)
        self.head.free_drafter_kv(kv)
        assert self.head.share_drafter_kv(kv) is None
        if len(self.runs) < 3:
            state = self.head.alloc_state()
            assert not self.head.install_drafter_kv(kv, state)
            self.head.free_state(state)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        run = self.pick(data, self.runs)
        self.runs.remove(run)
        self.head.free_state(run.state)

    @invariant()
    def balances(self) -> None:
        assert self.head.num_carried == len(self.values)
        assert self.head.num_free_slots == 3 - len(self.runs)
        if not self.values:
            assert self.head.num_carried_rows == self.head.num_carried_bytes == 0


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


# Rows the host has not looked at


def test_a_broken_row_is_not_carried_though_the_host_has_not_looked() -> None:
    config = toy_config()
    for take in (True, False):
        head, fresh = toy_head(config), toy_head(config)
        sequence = DeviceRun(head, config, 1)
        sequence.prefill(40)
        request = sequence.deferred(3)
        broken = torch.full_like(request.target_hidden, float("nan"))
        request = dataclasses.replace(request, target_hidden=broken)
        draft = head.propose(request, sequence.state)
        sequence.finish(request, draft, 0)
        sequence.step(3, 2)
        sequence.step(3, 2)
        kv = (
            head.take_drafter_kv(sequence.state)
            if take
            else head.snapshot_drafter_kv(sequence.state, 500)
        )
        assert kv is not None
        assert kv.rows < 10
        other = moved(sequence, head, kv)
        assert_exact(other, fresh, gapless=False)
        assert not head.held_rows(other.state)[1].isnan().any()


# Budgets


@pytest.mark.parametrize(
    ("given_budget", "budget", "rows"),
    [
        (1, 1, 1),
        (30, 30, 30),
        (135, 135, 135),
        (136, 136, 136),
        (1024, 1024, 136),
        (10**12, 1024, 136),
    ],
)
def test_a_budget_sizes_the_state_and_an_unknown_one_is_the_context(
    given_budget: int, budget: int, rows: int
) -> None:
    head = toy_head(toy_config())
    state = head.alloc_state_for(given_budget)
    assert (state.budget_tokens, state.ring_rows) == (budget, rows)
    assert head.prefill_hidden_rows(budget) == min(budget, 128)


def test_a_state_without_a_budget_has_the_whole_context() -> None:
    head = toy_head(toy_config())
    assert head.alloc_state().budget_tokens == MAX_SEQ_LEN


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_without_room_is_refused_and_takes_no_slot(budget: int) -> None:
    head = toy_head(toy_config(), num_slots=1)
    with pytest.raises(ValueError, match=f"budget_tokens is {budget}; allowed is at least 1"):
        head.alloc_state_for(budget)
    assert head.num_free_slots == 1


@pytest.mark.parametrize("on_device", [False, True])
@QUICK
@given(prompt=st.integers(1, 20), room=st.integers(1, 30), data=st.data())
def test_nothing_is_drafted_or_written_beyond_the_budget(
    on_device: bool, prompt: int, room: int, data: st.DataObject
) -> None:
    config = toy_config(8)
    head, fresh = toy_head(config, num_slots=1), toy_head(config)
    budget = prompt + room
    sequence = Run(head, config, 1)
    head.free_state(sequence.state)
    sequence.state = head.alloc_state_for(budget)
    head.ring.rows.fill_(float("nan"))
    sequence.prefill(prompt)
    while len(sequence.tokens) < budget:
        left = budget - len(sequence.tokens)
        num_drafts, accept = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 8))
        request = asked(sequence, num_drafts, on_device)
        draft = head.propose(request, sequence.state)
        assert draft.num_tokens == min(num_drafts, left)
        if draft.device_tokens is not None:
            draft = Draft(tokens=draft.device_tokens.tolist())
        # The token the target adds must fit too, so the last draft may not be accepted.
        sequence.settle(draft, min(accept, left - 1))
        assert_exact(sequence, fresh)
    if budget < head.ring.rows.shape[1]:
        assert head.ring.rows[0, budget:].isnan().all()


def asked(sequence: Run, num_drafts: int, on_device: bool) -> DraftRequest:
    request = sequence.request(num_drafts)
    if not on_device:
        return request
    target = torch.zeros(sequence.config.hidden_size, dtype=sequence.head.ring.rows.dtype)
    return dataclasses.replace(request, draft_embed_target=target)


# The contract's defaults


class Bare(DraftProposer[list[int]]):
    def alloc_state(self) -> list[int]:
        return []

    def propose(self, request: DraftRequest, state: list[int]) -> Draft:
        return Draft(tokens=[])

    def after_verify(self, num_accepted: int, state: list[int]) -> None:
        pass

    def free_state(self, state: list[int]) -> None:
        pass


def test_copies_and_shares_are_declined_by_default() -> None:
    kv = DrafterKv(blocks=[0], rows=1, last_pair_key=0)
    assert Bare().snapshot_drafter_kv([], 5) is None
    assert Bare().share_drafter_kv(kv) is None


@pytest.mark.parametrize("given_alone", ["snapshot_drafter_kv", "share_drafter_kv"])
def test_copies_come_with_shares_and_with_what_installs_them(given_alone: str) -> None:
    with pytest.raises(TypeError, match=f"Half defines {given_alone} but not"):
        type("Half", (Bare,), {given_alone: lambda self, *args: None})
