"""Admission, budgets and blocks; no model."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.cache.blocks import BLOCK_TOKENS
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Batch, PrefixHit, Sequence
from paceline.types import ConfigError, RequestError, SamplingParams


def sequence(number: int, prompt: int, emitted: int, drafts: int = 0) -> Sequence:
    return Sequence(
        id=number,
        tokens=[1] * prompt,
        prompt_len=prompt,
        params=SamplingParams(max_tokens=emitted, num_drafts=drafts),
        max_emitted=emitted,
        max_drafts=drafts,
    )


def scheduler(**changes: int) -> Scheduler:
    values = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_seq_len": 600, "num_blocks": 12}
    return Scheduler(**{**values, **changes})


def play(batch: Batch, accepted: int = 0) -> list[Sequence]:
    """Do to the sequences what an engine would; return those that are done."""
    done = []
    for row in batch.rows:
        handle = row.sequence.handle
        taken = min(accepted, row.max_drafts)
        assert handle.length == row.first
        assert handle.reserve(row.width + row.max_drafts), "a running sequence waits for a block"
        if row.emits:
            handle.commit(row.width + taken)
            row.sequence.tokens += [1] * (taken + 1)
            assert row.sequence.num_emitted <= row.sequence.max_emitted
            if row.sequence.num_emitted == row.sequence.max_emitted:
                done.append(row.sequence)
        else:
            handle.commit(row.width)
    return done


def drain(subject: Scheduler) -> int:
    steps = 0
    while subject.has_work:
        batch = subject.schedule()
        assert batch.rows
        for one in play(batch):
            subject.remove(one)
        steps += 1
        assert steps < 10_000
    return steps


def shapes(batch: Batch) -> list[tuple[int, int, int, int]]:
    return [(row.sequence.id, row.first, row.width, row.max_drafts) for row in batch.rows]


def test_no_torch_is_needed() -> None:
    # The packages themselves import torch; the modules must not.
    code = (
        "import os, sys, types, paceline\n"
        "for name in ('engine', 'draft'):\n"
        "    package = types.ModuleType('paceline.' + name)\n"
        "    package.__path__ = [os.path.join(paceline.__path__[0], name)]\n"
        "    sys.modules['paceline.' + name] = package\n"
        "import paceline.engine.scheduler\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_prompt_is_cut_by_the_budget_and_decoding_comes_first() -> None:
    subject = scheduler()
    subject.add(sequence(0, prompt=3, emitted=5, drafts=2))
    assert shapes(subject.schedule()) == [(0, 0, 3, 0)]
    play(subject.schedule())
    subject.add(sequence(1, prompt=40, emitted=5))
    first = subject.schedule()
    assert shapes(first) == [(0, 3, 1, 2), (1, 0, 13, 0)]
    play(first, accepted=1)
    second = subject.schedule()
    assert shapes(second) == [(0, 5, 1, 1), (1, 13, 14, 0)]
    play(second)
    third = subject.schedule()
    assert shapes(third) == [(0, 6, 1, 0), (1, 27, 13, 0)]
    assert third.rows[1].emits


@pytest.mark.parametrize("budget", [3, 11, 12, 13])
def test_drafts_fit_the_budget(budget: int) -> None:
    subject = scheduler(max_num_batched_tokens=budget)
    for number in range(3):
        subject.add(sequence(number, prompt=1, emitted=50, drafts=3))
    play(subject.schedule())
    batch = subject.schedule()
    assert [row.width for row in batch.rows] == [1, 1, 1]
    assert batch.num_rows == min(budget, 12)


def test_drafts_leave_prompts_a_share() -> None:
    subject = scheduler(max_num_batched_tokens=16)
    for number in range(2):
        subject.add(sequence(number, prompt=1, emitted=50, drafts=8))
    play(subject.schedule())
    subject.add(sequence(2, prompt=100, emitted=5))
    assert shapes(subject.schedule()) == [(0, 1, 1, 8), (1, 1, 1, 2), (2, 0, 4, 0)]


@pytest.mark.parametrize(
    ("emitted", "room"), [(1, None), (2, 0), (3, 1), (4, 2), (9, 7), (10, 8), (30, 8)]
)
def test_drafts_are_never_more_than_can_be_emitted(emitted: int, room: int | None) -> None:
    subject = scheduler()
    subject.add(sequence(0, prompt=2, emitted=emitted, drafts=8))
    done = play(subject.schedule())
    if room is None:
        assert done
    else:
        assert subject.schedule().rows[0].max_drafts == room


def test_what_could_never_run_is_refused_at_the_door() -> None:
    subject = scheduler(num_blocks=2)
    subject.add(sequence(0, prompt=100, emitted=2 * BLOCK_TOKENS + 1 - 100))
    with pytest.raises(RequestError, match="258 tokens, 3 cache blocks of 128; the pool has 2"):
        subject.add(sequence(1, prompt=100, emitted=2 * BLOCK_TOKENS + 2 - 100))
    with pytest.raises(RequestError, match="may reach 601 tokens; allowed are 600"):
        subject.add(sequence(2, prompt=600, emitted=1))
    assert subject.num_waiting == 1


def test_what_is_read_first_must_fit_beside_one_more_block_of_each_that_grows() -> None:
    subject = scheduler(num_blocks=5, max_num_batched_tokens=400)
    long, big = sequence(0, prompt=10, emitted=375), sequence(1, prompt=382, emitted=3)
    late = sequence(2, prompt=4, emitted=3)
    subject.add(long)
    batch = subject.schedule()
    assert [admission.sequence.id for admission in batch.admitted] == [0]
    play(batch)
    for one in (big, late):
        subject.add(one)
    # Three blocks for the second and one more for the first: there are four.
    batch = subject.schedule()
    assert [admission.sequence.id for admission in batch.admitted] == [1]
    play(batch)
    # Each of the three could run to its end in one block less, but the last in line does not pass.
    assert (subject.num_running, subject.num_waiting) == (2, 1)
    drain(subject)
    assert subject.all_home


def test_one_token_more_than_fits_waits() -> None:
    subject = scheduler(num_blocks=5, max_num_batched_tokens=400)
    subject.add(sequence(0, prompt=10, emitted=375))
    subject.add(sequence(1, prompt=384, emitted=3))
    play(subject.schedule())
    play(subject.schedule())
    assert (subject.num_running, subject.num_waiting) == (1, 1)
    drain(subject)


@pytest.mark.parametrize(("emitted", "blocks"), [(1, 1), (2, 2)])
def test_the_row_behind_a_prompt_is_counted_only_where_it_comes(emitted: int, blocks: int) -> None:
    subject = scheduler(num_blocks=2, max_num_batched_tokens=400)
    subject.add(sequence(0, prompt=128, emitted=emitted))
    subject.schedule()
    assert subject.allocator.num_free == 2 - blocks


def running(subject: Scheduler, *sequences: Sequence) -> None:
    """Bring them to where each decodes, in whatever blocks they hold then."""
    wanted = [one.max_emitted for one in sequences]
    for one in sequences:
        # What foresees no growth keeps no room for it.
        one.max_emitted = BLOCK_TOKENS - one.prompt_len % BLOCK_TOKENS
        subject.add(one)
        while not one.num_emitted:
            play(subject.schedule())
    for one, emitted in zip(sequences, wanted, strict=True):
        one.max_emitted = emitted


def test_the_sequence_admitted_last_gives_way_and_comes_back_first() -> None:
    subject = scheduler(num_blocks=4, max_num_batched_tokens=400)
    first, second, third = (sequence(n, prompt=120, emitted=200) for n in range(3))
    later = sequence(3, prompt=1, emitted=1)
    running(subject, first, second, third)
    subject.add(later)
    batch = subject.schedule()
    while not batch.preempted:
        assert not batch.admitted
        play(batch)
        batch = subject.schedule()
    # One block was free and the first took it; now the second takes the third's.
    assert batch.preempted == [third]
    assert third.cache is None
    assert [row.sequence for row in batch.rows] == [first, second]
    assert not batch.admitted
    assert (len(first.handle.blocks), len(second.tokens)) == (2, 129)
    play(batch)
    order = []
    while subject.has_work:
        batch = subject.schedule()
        order += [admission.sequence for admission in batch.admitted]
        for one in play(batch):
            subject.remove(one)
    # The second had to give way too: it comes back first, and the one that never ran last.
    assert order == [second, third, later]
    assert third.num_emitted == 200
    assert subject.all_home


def test_what_was_taken_back_is_not_given_out_in_the_same_step() -> None:
    subject = scheduler(num_blocks=3, max_num_batched_tokens=400)
    first, second = sequence(0, prompt=126, emitted=100), sequence(1, prompt=121, emitted=20)
    running(subject, first, second)
    second.max_drafts = 8
    # Drafts that are refused leave it with a block more than it needs.
    play(subject.schedule())
    assert len(second.handle.blocks) == 2
    while not (batch := subject.schedule()).preempted:
        play(batch)
    assert batch.preempted == [second]
    assert subject.num_waiting == 1
    assert not batch.admitted


def test_a_resumed_sequence_reads_all_it_knows() -> None:
    subject = scheduler(num_blocks=2, max_num_batched_tokens=100)
    first, second = sequence(0, prompt=100, emitted=40), sequence(1, prompt=100, emitted=29)
    running(subject, first, second)
    while not (batch := subject.schedule()).preempted:
        play(batch)
    assert batch.preempted == [second]
    known = len(second.tokens)
    while second.cache is None:
        for one in play(batch):
            subject.remove(one)
        batch = subject.schedule()
    row = batch.rows[-1]
    assert (row.first, row.width, row.known, row.reads) == (0, 100, known, True)
    assert not row.emits
    play(batch)
    row = subject.schedule().rows[-1]
    assert (row.first, row.width, row.reads, row.emits) == (100, known - 100, True, True)


def test_the_one_that_lacks_the_block_may_itself_be_the_last() -> None:
    subject = scheduler(num_blocks=2, max_num_batched_tokens=400)
    old, young = sequence(0, prompt=2, emitted=250), sequence(1, prompt=110, emitted=100)
    running(subject, old, young)
    while not (batch := subject.schedule()).preempted:
        play(batch)
    assert batch.preempted == [young]
    assert [row.sequence for row in batch.rows] == [old]
    drain(subject)


class Cached:
    """A prefix source that holds blocks of its own and counts what is asked."""

    def __init__(self, subject: Scheduler, count: int) -> None:
        self.allocator = subject.allocator
        self.blocks = self.allocator.allocate(count) or []
        assert len(self.blocks) == count
        self.asked: list[int] = []
        self.hit = 0
        self.matched: list[list[int]] = []

    def match(self, sequence: Sequence) -> PrefixHit | None:
        self.matched.append(list(sequence.tokens))
        if not 0 < self.hit < len(sequence.tokens):
            return None
        blocks = self.blocks[: self.hit // BLOCK_TOKENS]
        for block in blocks:
            self.allocator.share(block)
        return PrefixHit(length=self.hit, blocks=blocks, snapshot="state")

    def evict(self, count: int) -> int:
        self.asked.append(count)
        freed = 0
        for block in list(self.blocks):
            if freed < count and self.allocator.holders(block) == 1:
                self.blocks.remove(block)
                self.allocator.release([block])
                freed += 1
        return freed


def test_cached_blocks_go_before_anybody_is_preempted() -> None:
    subject = scheduler(num_blocks=4, max_num_batched_tokens=400)
    first, second = (sequence(n, prompt=126, emitted=100) for n in range(2))
    running(subject, first, second)
    cached = Cached(subject, 2)
    subject.prefix = cached
    for freed in (0, 2):
        batch = subject.schedule()
        assert len(cached.asked) == freed
        assert not batch.preempted
        play(batch)
        play(subject.schedule())
    assert cached.blocks == []


def test_drafts_shrink_before_anybody_is_preempted_and_evict_what_is_cached() -> None:
    subject = scheduler(num_blocks=3, max_num_batched_tokens=400)
    first, second = sequence(0, 122, 100, drafts=8), sequence(1, 122, 100, drafts=8)
    running(subject, first, second)
    # The second has run 122 tokens: its next and five drafts fill its block. One block is free.
    assert [row.max_drafts for row in subject.schedule().rows] == [8, 5]
    subject.prefix = cached = Cached(subject, 1)
    batch = subject.schedule()
    assert [row.max_drafts for row in batch.rows] == [8, 5]
    assert cached.blocks == []
    assert not batch.preempted
    play(batch, accepted=8)


def test_a_hit_shortens_what_is_read_and_its_blocks_are_not_taken_anew() -> None:
    subject = scheduler(num_blocks=4, max_num_batched_tokens=400)
    subject.prefix = cached = Cached(subject, 2)
    cached.hit = 256
    one = sequence(0, prompt=300, emitted=10)
    subject.add(one)
    batch = subject.schedule()
    (admission,) = batch.admitted
    assert admission.sequence is one
    assert admission.hit is not None
    assert admission.hit.snapshot == "state"
    assert shapes(batch) == [(0, 256, 44, 0)]
    assert one.handle.blocks[:2] == cached.blocks
    assert subject.allocator.num_free == 1
    assert one.handle.rewindable == 0
    play(batch)
    subject.remove(one)
    assert [subject.allocator.holders(block) for block in cached.blocks] == [1, 1]
    assert subject.all_slots_home
    assert not subject.all_home


def test_blocks_of_a_hit_are_let_go_where_the_rest_does_not_fit() -> None:
    subject = scheduler(num_blocks=4, max_num_batched_tokens=400)
    running(subject, sequence(0, prompt=130, emitted=10))
    subject.prefix = cached = Cached(subject, 1)
    cached.hit = 128
    waiting = sequence(1, prompt=300, emitted=10)
    subject.add(waiting)
    assert not subject.schedule().admitted
    assert waiting.cache is None
    assert [subject.allocator.holders(block) for block in cached.blocks] == [1]


def test_blocks_that_nobody_gives_back_are_told_of() -> None:
    subject = scheduler(num_blocks=2)
    subject.allocator.allocate(1)
    subject.add(sequence(0, prompt=130, emitted=10))
    with pytest.raises(RuntimeError, match="2 cache blocks are wanted and 1 free"):
        subject.schedule()


def test_removing_a_waiting_one_leaves_the_ledger_alone() -> None:
    subject = scheduler(max_num_seqs=1)
    first, second = sequence(0, prompt=4, emitted=3), sequence(1, prompt=4, emitted=3)
    subject.add(first)
    subject.add(second)
    play(subject.schedule())
    subject.remove(second)
    assert (subject.num_running, subject.num_waiting) == (1, 0)
    drain(subject)
    assert subject.all_home


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_seqs", 0), ("max_seq_len", 1), ("num_blocks", 0), ("max_num_batched_tokens", 2)],
)
def test_counts_out_of_range(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}; allowed is an integer of at least"):
        scheduler(**{name: value})


class Ledger(RuleBasedStateMachine):
    """Any history of arrivals, steps, accept counts and aborts, against counts kept by hand.

    A cache of prefixes that never hits takes free blocks now and then.
    """

    @initialize(
        slots=st.integers(1, 4),
        blocks=st.integers(1, 9),
        budget=st.integers(4, 40),
    )
    def start(self, slots: int, blocks: int, budget: int) -> None:
        self.subject = scheduler(
            max_num_seqs=slots, num_blocks=blocks, max_num_batched_tokens=budget
        )
        self.slots, self.blocks, self.budget = slots, blocks, budget
        self.alive: dict[int, Sequence] = {}
        self.arrived: list[int] = []
        self.number = 0
        self.cached = self.subject.prefix = Cached(self.subject, 0)

    @rule(count=st.integers(1, 9))
    def cache(self, count: int) -> None:
        self.cached.blocks += self.subject.allocator.allocate(count) or []

    @rule(prompt=st.integers(1, 300), emitted=st.integers(1, 300), drafts=st.integers(0, 8))
    def arrive(self, prompt: int, emitted: int, drafts: int) -> None:
        one = sequence(self.number, prompt, emitted, drafts)
        self.number += 1
        if -(-max(1, prompt + emitted - 1) // BLOCK_TOKENS) > self.blocks:
            with pytest.raises(RequestError):
                self.subject.add(one)
            return
        self.subject.add(one)
        self.alive[one.id] = one
        self.arrived.append(one.id)

    @rule(accepted=st.integers(0, 8))
    def step(self, accepted: int) -> None:
        before = [i for i, one in self.alive.items() if one.cache is not None]
        batch = self.subject.schedule()
        assert bool(batch.rows) == bool(self.alive)
        lost = [one.id for one in batch.preempted]
        if lost:
            assert not batch.admitted
            assert not self.cached.blocks
            assert sorted(lost) == sorted(before)[-len(lost) :]
            assert len(lost) < len(before)
        assert batch.num_rows <= self.budget
        running = {i for i, one in self.alive.items() if one.cache is not None}
        decoding = {
            i
            for i in running
            if self.alive[i].num_emitted
            and self.alive[i].handle.length == len(self.alive[i].tokens) - 1
        }
        assert decoding <= {row.sequence.id for row in batch.rows} <= running
        waiting = [i for i in self.arrived if i in self.alive and i not in running]
        assert not running or not waiting or max(running) < min(waiting)
        for one in play(batch, accepted):
            self.subject.remove(one)
            del self.alive[one.id]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.alive)))
        self.subject.remove(self.alive.pop(number))

    @invariant()
    def ledger(self) -> None:
        if not hasattr(self, "subject"):
            return
        held = [one.cache for one in self.alive.values() if one.cache is not None]
        blocks = [block for cache in held for block in cache.blocks] + self.cached.blocks
        assert len(set(blocks)) == len(blocks)
        assert len({cache.slot for cache in held}) == len(held) <= self.slots
        assert self.subject.allocator.num_free == self.blocks - len(blocks)
        for cache in held:
            assert len(cache.blocks) * BLOCK_TOKENS >= cache.length

    def teardown(self) -> None:
        if hasattr(self, "subject"):
            drain(self.subject)
            self.cached.evict(len(self.cached.blocks))
            assert self.subject.all_home


TestLedger = Ledger.TestCase
TestLedger.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
