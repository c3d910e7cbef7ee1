"""Blocks of the compressed pools: who holds which. Pure Python; owns no memory."""

from __future__ import annotations

from paceline.types import BlockId

__all__ = ["BLOCK_TOKENS", "BlockAllocator"]

BLOCK_TOKENS = 128
"""Tokens a block stands for: 32 rows of a ratio-4 pool, one row of a ratio-128 pool."""


class BlockAllocator:
    """Hands out blocks 1 .. num_blocks; block 0 takes the writes of padded rows and is never given.

    Invariant: a block's count is the number of its holders; idle means every block is free.

    Args:
        num_blocks: blocks to hand out, at least 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; allowed is at least 1")
        self.num_blocks = num_blocks
        self._free = [BlockId(b) for b in range(num_blocks, 0, -1)]
        self._holders = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def all_home(self) -> bool:
        """Whether every block is free and no count is left over."""
        return self.num_free == self.num_blocks and not any(self._holders)

    def allocate(self, count: int) -> list[BlockId] | None:
        """Take `count` blocks, or None and nothing taken where so many are not free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, block: BlockId) -> None:
        """Add a holder to a held block."""
        assert self._holders[block] > 0, f"block {block} is not held"
        self._holders[block] += 1

    def release(self, blocks: list[BlockId]) -> None:
        """Drop one holder of each; a block without holders is free again."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is not held"
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)

    def holders(self, block: BlockId) -> int:
        """How many hold this block."""
        return self._holders[block]
