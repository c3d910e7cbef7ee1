"""One sequence's handle on the pools: reserve, commit, rewind, free. Integers only."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cache.blocks import BLOCK_TOKENS, BlockAllocator
from paceline.types import BlockId

__all__ = ["SequenceCache"]


class SequenceCache:
    """Length and blocks of one sequence; moves no tensor.

    The rule it keeps: nothing derived from an unverified token is visible after `commit`, since
    what is visible is what lies below `length`, and everything below `length` was written from
    committed tokens.

    Args:
        allocator: the pool's blocks; this handle returns what it takes.
        slot: the sequence's ring slot; the caller owns slots.
        max_width: widest step the rings allow.
        max_seq_len: most tokens.
        length: tokens whose rows are there already, in `blocks` and in the slot's rings.
        blocks: the blocks of those tokens, each held once for this handle, which frees it.

    Attributes:
        length: committed tokens.
        blocks: blocks held, in order of the tokens they stand for.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        slot: int,
        max_width: int,
        max_seq_len: int,
        length: int = 0,
        blocks: Sequence[BlockId] = (),
    ) -> None:
        assert length <= len(blocks) * BLOCK_TOKENS, f"{len(blocks)} blocks for {length} tokens"
        self._allocator = allocator
        self.slot = slot
        self._max_width = max_width
        self._max_seq_len = max_seq_len
        self.length = length
        self._reserved = 0
        self._low = length
        self._high = length
        self.blocks: list[BlockId] = list(blocks)
        self._freed = False

    def blocks_wanted(self, width: int) -> int:
        """Blocks still to be taken before `width` more rows can be written."""
        return max(0, -(-(self.length + width) // BLOCK_TOKENS) - len(self.blocks))

    def hold(self, tokens: int) -> bool:
        """Take the blocks of the first `tokens` tokens ahead of their rows.

        Returns:
            False where the pool lacks them; nothing is taken then.
        """
        lacking = -(-tokens // BLOCK_TOKENS) - len(self.blocks)
        if lacking <= 0:
            return True
        taken = self._allocator.allocate(lacking)
        if taken is None:
            return False
        self.blocks.extend(taken)
        return True

    def reserve(self, width: int) -> bool:
        """Make positions length .. length + width - 1 writable.

        Returns:
            False where the pool lacks the blocks; nothing is taken then.

        Raises:
            ValueError: the width is beyond the rings or the context limit.
        """
        if not 1 <= width <= self._max_width:
            raise ValueError(f"width is {width}; allowed is 1 to {self._max_width}")
        if self.length + width > self._max_seq_len:
            raise ValueError(
                f"position {self.length + width - 1} is beyond the limit of {self._max_seq_len}"
            )
        if not self.hold(self.length + width):
            return False
        self._reserved = width
        self._high = max(self._high, self.length + width)
        return True

    def commit(self, count: int) -> None:
        """Keep the first `count` rows of the reservation; the others were never there.

        Raises:
            ValueError: more than was reserved.
        """
        if not 0 <= count <= self._reserved:
            raise ValueError(f"commit of {count} rows; {self._reserved} are reserved")
        self.length += count
        self._reserved = 0

    @property
    def own_blocks(self) -> list[BlockId]:
        """Blocks that nobody else holds."""
        return [block for block in self.blocks if self._allocator.holders(block) == 1]

    @property
    def rewindable(self) -> int:
        """Committed rows that can still be taken back exactly.

        Rings of 127 + max_width rows hold positions high - (127 + max_width) and on; a step at
        length L reads back to L - 127, so L may fall to high - max_width; and never below the
        length it began with, before which the rings were not filled.
        """
        return max(0, self.length - max(self._low, self._high - self._max_width))

    def rewind(self, count: int) -> None:
        """Take back the last `count` committed rows.

        Raises:
            ValueError: rows older than the rings still hold would be needed.
        """
        if not 0 <= count <= self.rewindable:
            raise ValueError(f"rewind of {count} rows; {self.rewindable} can be taken back")
        self.length -= count
        self._reserved = 0

    def free(self) -> None:
        """Give every block back; a second call does nothing."""
        if not self._freed:
            self._allocator.release(self.blocks)
            self.blocks = []
            self._freed = True
