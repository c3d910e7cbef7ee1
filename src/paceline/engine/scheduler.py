"""Who runs next and how wide. Counts only: no tensor, no token is looked at.

A sequence is admitted once the blocks of all it will read first are free, and takes further ones as
it grows. Where a running sequence lacks one, these give way in turn: drafts, cached prefixes, the
sequence admitted last, which waits at the head of the queue and later reads its tokens anew. The
oldest never gives way and every sequence fits the pool alone, so the oldest always ends: no
deadlock, no starvation.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from paceline.cache.blocks import BLOCK_TOKENS, BlockAllocator
from paceline.cache.state import SequenceCache
from paceline.draft.length import LengthPolicy, SequenceView
from paceline.engine.sequence import Admission, Batch, BatchRow, PrefixHit, Sequence
from paceline.types import ConfigError, RequestError

__all__ = ["PrefixSource", "Scheduler"]

_PROMPT_SHARE = 4
"""While a prompt is being read, drafts leave one part in so many of the budget to it."""


class PrefixSource(Protocol):
    """Keeps the beginnings of sequences, in blocks that it holds beside those who use them."""

    def match(self, sequence: Sequence) -> PrefixHit | None:
        """Find the longest beginning of a sequence's tokens that can be restored.

        May be asked several times before a sequence is admitted.

        Args:
            sequence: who waits, with all the tokens it will read.

        Returns:
            What is kept of it, at least one token short of the whole, or None. Its blocks are held
            once more, for the caller to release.
        """
        ...

    def evict(self, count: int) -> int:
        """Give up blocks that nobody else holds.

        Args:
            count: how many are lacking.

        Returns:
            How many became free: at least `count`, or all there were.
        """
        ...


class Scheduler:
    """Continuous batching with chunked prompts over `max_num_seqs` slots and a pool of blocks.

    Args:
        max_num_seqs: sequences that run at once; each has a slot.
        max_num_batched_tokens: most rows of one step, at least `max_num_seqs`.
        max_seq_len: most tokens of one sequence, prompt included.
        num_blocks: blocks of `BLOCK_TOKENS` tokens to share.

    Attributes:
        allocator: the blocks.
        prefix: where a sequence's beginning may be found, and who gives up blocks first; or None.
        lengths: who chooses the drafts of sequences that leave them open; None: the most they may.

    Raises:
        ConfigError: a count is out of range.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_seq_len: int,
        num_blocks: int,
    ) -> None:
        for name, value, low in (
            ("max_num_seqs", max_num_seqs, 1),
            ("max_seq_len", max_seq_len, 2),
            ("num_blocks", num_blocks, 1),
            ("max_num_batched_tokens", max_num_batched_tokens, max(1, max_num_seqs)),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name} is {value!r}; allowed is an integer of at least {low}")
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_seq_len = max_seq_len
        self.allocator = BlockAllocator(num_blocks)
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.prefix: PrefixSource | None = None
        self.lengths: LengthPolicy | None = None
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._preempted: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences not admitted yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self._running or self._waiting)

    @property
    def all_home(self) -> bool:
        """Whether every block and slot is free."""
        return self.allocator.all_home and self.all_slots_home

    @property
    def all_slots_home(self) -> bool:
        """Whether every slot is free, and free once."""
        return sorted(self._free_slots) == list(range(self.max_num_seqs))

    def check(self, sequence: Sequence) -> None:
        """Refuse a sequence that could never be admitted.

        Raises:
            RequestError: it could never be admitted.
        """
        if sequence.budget_tokens > self.max_seq_len:
            raise RequestError(
                f"the request may reach {sequence.budget_tokens} tokens; allowed are "
                f"{self.max_seq_len}"
            )
        need = _blocks_needed(sequence)
        if need > self.allocator.num_blocks:
            raise RequestError(
                f"the request may reach {sequence.budget_tokens} tokens, {need} cache blocks of "
                f"{BLOCK_TOKENS}; the pool has {self.allocator.num_blocks}: ask for fewer "
                "max_tokens, or give the engine more blocks"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            RequestError: it could never be admitted.
        """
        self.check(sequence)
        self._waiting.append(sequence)

    def schedule(self) -> Batch:
        """Choose the rows of the next step: decoding sequences, then drafts, then prompt pieces.

        Every decoding sequence gets its row in every step, unless it is pre-empted. Empty only when
        there is no work.

        Raises:
            RuntimeError: nothing runs and yet the pool lacks blocks, because what holds them does
                not give them up.
        """
        before = len(self._preempted)
        claimed = self._claim()
        # What was just taken back would be given out again, to be taken back at the next step.
        admitted = [] if len(self._preempted) > before else self._admit(claimed)
        preempted, self._preempted = self._preempted, []
        budget = self.max_num_batched_tokens
        decoding: list[BatchRow] = []
        reading: list[Sequence] = []
        for sequence in self._running:
            if _decodes(sequence):
                known = len(sequence.tokens)
                decoding.append(BatchRow(sequence, known - 1, 1, known, reads=False))
            else:
                reading.append(sequence)
        budget -= len(decoding)
        kept_for_prompts = max(1, self.max_num_batched_tokens // _PROMPT_SHARE) if reading else 0
        adapts, wanted = self._lengths(decoding, max(0, budget - kept_for_prompts))
        for row, most in zip(decoding, wanted, strict=True):
            if most:
                room = min(most, max(0, budget - kept_for_prompts))
                row.max_drafts, claimed = self._draft_blocks(row.sequence.handle, room, claimed)
                budget -= row.max_drafts
        rows = decoding
        for sequence in reading:
            first, known = sequence.handle.length, len(sequence.tokens)
            width = min(known - first, budget)
            if width < 1:
                break
            rows.append(BatchRow(sequence, first, width, known, reads=True))
            budget -= width
        return Batch(rows, admitted, preempted, adapts)

    def _lengths(self, decoding: list[BatchRow], budget: int) -> tuple[bool, list[int]]:
        """Drafts wanted for each row, and whether the policy was asked."""
        rooms = [_draft_room(row.sequence) for row in decoding]
        if self.lengths is None:
            return False, rooms
        for row in decoding:
            if row.sequence.adapts:
                break
        else:
            return False, rooms
        views = [
            SequenceView(
                id=row.sequence.id,
                limit=room,
                fixed=None if row.sequence.adapts else row.sequence.max_drafts,
            )
            for row, room in zip(decoding, rooms, strict=True)
        ]
        chosen = self.lengths.choose(views, max_drafts=budget)
        # A policy that is not ours may forget either bound; a request's own number stands.
        for index, (view, count) in enumerate(zip(views, chosen, strict=True)):
            if view.fixed is None and count < view.limit:
                rooms[index] = count if count > 0 else 0
        return True, rooms

    def preempt_last(self) -> Sequence | None:
        """Take back slot and blocks of the sequence admitted last, which then heads the queue.

        The next batch tells of it. What `schedule` does where a block is lacking; may be called
        between two steps.

        Returns:
            The sequence, or None where nothing runs.
        """
        if not self._running:
            return None
        sequence = self._running.pop()
        self._take_back(sequence)
        self._waiting.appendleft(sequence)
        self._preempted.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, queued or running; its slot and blocks are free afterwards."""
        if sequence.cache is None:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
        self._take_back(sequence)

    def _take_back(self, sequence: Sequence) -> None:
        self._free_slots.append(sequence.handle.slot)
        sequence.handle.free()
        sequence.cache = None

    def _claim(self) -> int:
        """Find a block for each decoding sequence that needs one, oldest first.

        Returns:
            Blocks that these sequences' rows will take.
        """
        claimed = 0
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            wanted = sequence.handle.blocks_wanted(1) if _decodes(sequence) else 0
            while wanted and not self._has_free(claimed + wanted):
                if self.preempt_last() is sequence:
                    return claimed
            claimed += wanted
            index += 1
        return claimed

    def _has_free(self, count: int) -> bool:
        """Whether so many blocks are free, cached ones given up where they are not."""
        lacking = count - self.allocator.num_free
        if lacking > 0 and self.prefix is not None:
            self.prefix.evict(lacking)
        return count <= self.allocator.num_free

    def _admit(self, claimed: int) -> list[Admission]:
        admitted: list[Admission] = []
        while self._waiting and self._free_slots:
            sequence = self._waiting[0]
            hit = None if self.prefix is None else self.prefix.match(sequence)
            blocks = [] if hit is None else hit.blocks
            # Its tokens and one row more, lest it be pre-empted before it says anything.
            first = min(len(sequence.tokens) + 1, sequence.budget_tokens - 1)
            need = max(1, -(-first // BLOCK_TOKENS)) - len(blocks)
            # One more block for each that still grows, lest the newcomer soon have to give way.
            spare = sum(_grows(one) for one in self._running)
            if not self._has_free(claimed + need + spare):
                self.allocator.release(blocks)
                if not self._running:
                    raise RuntimeError(
                        f"{need} cache blocks are wanted and {self.allocator.num_free} free, but "
                        "nothing runs that could give any back"
                    )
                return admitted
            self._waiting.popleft()
            sequence.cache = SequenceCache(
                self.allocator,
                slot=self._free_slots.pop(),
                max_width=self.max_num_batched_tokens,
                max_seq_len=self.max_seq_len,
                length=0 if hit is None else hit.length,
                blocks=blocks,
            )
            sequence.cache.hold(first)
            self._running.append(sequence)
            admitted.append(Admission(sequence, hit))
        return admitted

    def _draft_blocks(self, cache: SequenceCache, room: int, claimed: int) -> tuple[int, int]:
        """Cut a row's drafts to the blocks there are.

        Returns:
            (drafts, blocks claimed with theirs).
        """
        one = cache.blocks_wanted(1)
        wanted = cache.blocks_wanted(1 + room) - one
        if not wanted:
            return room, claimed
        if self._has_free(claimed + wanted):
            return room, claimed + wanted
        held = (len(cache.blocks) + one) * BLOCK_TOKENS
        return held - cache.length - 1, claimed


def _decodes(sequence: Sequence) -> bool:
    """Whether all but the token emitted last was run."""
    known = len(sequence.tokens)
    return known > sequence.prompt_len and sequence.handle.length == known - 1


def _grows(sequence: Sequence) -> bool:
    """Whether it may need a block beyond that of its next row."""
    handle = sequence.handle
    return len(handle.blocks) + handle.blocks_wanted(1) < _blocks_needed(sequence)


def _blocks_needed(sequence: Sequence) -> int:
    # The token emitted last is never run, so the caches hold one fewer than the sequence.
    return max(1, -(-(sequence.budget_tokens - 1) // BLOCK_TOKENS))


def _draft_room(sequence: Sequence) -> int:
    if not sequence.max_drafts:
        return 0
    # A step emits its accepted drafts and one token more; drafts beyond that could only be cut.
    room = sequence.max_emitted - sequence.num_emitted - 1
    return max(0, min(sequence.max_drafts, room))
