"""Who runs next and how wide. Counts only: no tensor, no token is looked at.

A sequence is admitted once the pool can hold all it may ever need beside all that the running ones
may still claim. So a running sequence never waits for a block, nothing is ever taken back, and the
one that waits longest is the next to be admitted: no deadlock, no starvation.
"""

from __future__ import annotations

from collections import deque

from paceline.cache.blocks import BLOCK_TOKENS, BlockAllocator
from paceline.cache.state import SequenceCache
from paceline.engine.sequence import Batch, BatchRow, Sequence
from paceline.types import ConfigError, RequestError

__all__ = ["Scheduler"]

_PROMPT_SHARE = 4
"""While a prompt is being read, drafts leave one part in so many of the budget to it."""


class Scheduler:
    """Continuous batching with chunked prompts over `max_num_seqs` slots and a pool of blocks.

    Args:
        max_num_seqs: sequences that run at once; each has a slot.
        max_num_batched_tokens: most rows of one step, at least `max_num_seqs`.
        max_seq_len: most tokens of one sequence, prompt included.
        num_blocks: blocks of `BLOCK_TOKENS` tokens to share.

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
        self._promised = 0
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

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
        """Whether every block and slot is free and nothing is promised."""
        return (
            self.allocator.all_home
            and self._promised == 0
            and sorted(self._free_slots) == list(range(self.max_num_seqs))
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

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
        self._waiting.append(sequence)

    def schedule(self) -> Batch:
        """Choose the rows of the next step: decoding sequences, then drafts, then prompt pieces.

        Every decoding sequence gets its row in every step. Empty only when there is no work.
        """
        self._admit()
        budget = self.max_num_batched_tokens
        decoding: list[BatchRow] = []
        reading: list[Sequence] = []
        for sequence in self._running:
            if sequence.num_emitted and sequence.handle.length == len(sequence.tokens) - 1:
                known = len(sequence.tokens)
                decoding.append(BatchRow(sequence, known - 1, 1, known, reads=False))
            else:
                reading.append(sequence)
        budget -= len(decoding)
        kept_for_prompts = self.max_num_batched_tokens // _PROMPT_SHARE if reading else 0
        for row in decoding:
            room = max(0, budget - kept_for_prompts)
            row.max_drafts = min(_draft_room(row.sequence), room)
            budget -= row.max_drafts
        rows = decoding
        for sequence in reading:
            first, known = sequence.handle.length, len(sequence.tokens)
            width = min(known - first, budget)
            if width < 1:
                break
            rows.append(BatchRow(sequence, first, width, known, reads=True))
            budget -= width
        return Batch(rows)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, queued or running; its slot and blocks are free afterwards."""
        if sequence.cache is None:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
        self._free_slots.append(sequence.cache.slot)
        self._promised -= _blocks_needed(sequence)
        sequence.cache.free()
        sequence.cache = None

    def _admit(self) -> None:
        while self._waiting and self._free_slots:
            sequence = self._waiting[0]
            need = _blocks_needed(sequence)
            if self._promised + need > self.allocator.num_blocks:
                return
            self._waiting.popleft()
            self._promised += need
            sequence.cache = SequenceCache(
                self.allocator,
                slot=self._free_slots.pop(),
                max_width=self.max_num_batched_tokens,
                max_seq_len=self.max_seq_len,
            )
            self._running.append(sequence)


def _blocks_needed(sequence: Sequence) -> int:
    # The token emitted last is never run, so the caches hold one fewer than the sequence.
    return max(1, -(-(sequence.budget_tokens - 1) // BLOCK_TOKENS))


def _draft_room(sequence: Sequence) -> int:
    # A step emits its accepted drafts and one token more; drafts beyond that could only be cut.
    room = sequence.max_emitted - sequence.num_emitted - 1
    return max(0, min(sequence.max_drafts, room))
