"""What a sequence needs at a block's end and is not in blocks: copied out, and put back later.

At a length L that is a multiple of 128 the next step reads, beside whole blocks,

| pool              | rows                | why                                                    |
|-------------------|---------------------|--------------------------------------------------------|
| window            | L-127 .. L-1        | the query at L sees 127 positions before its own       |
| raw4, index raw   | L-4 .. L-1          | the row of tokens L .. L+3 overlaps the window before  |
| raw128            | none                | the row of tokens L .. L+127 begins at L               |

All of it lies in the sequence's own rings after the step that passed L, since the rings have room
for the widest step beside a whole window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.cache.blocks import BLOCK_TOKENS
from paceline.cache.pools import CachePools

__all__ = ["RingSnapshot", "block_bytes"]

_OVERLAP = 4
"""Rows before a window of four that its compressed row reads."""

_RINGS = ("window", "raw4_kv", "raw4_score", "index_raw_kv", "index_raw_score")


@dataclass(frozen=True, slots=True)
class RingSnapshot:
    """Copies of one sequence's ring rows at a block's end; shared by whoever refers to it.

    Attributes:
        length: tokens before the point it was taken at, a multiple of `BLOCK_TOKENS`.
        rows: per ring, [layers, rows, d] copies of its last rows, oldest first.
    """

    length: int
    rows: tuple[torch.Tensor, ...]

    @classmethod
    def take(cls, pools: CachePools, slot: int, length: int, *, window: int) -> RingSnapshot:
        """Copy the rows that `length` committed tokens of a slot's sequence left behind.

        Args:
            pools: the caches, as the step that passed `length` left them.
            slot: the sequence's.
            length: a multiple of `BLOCK_TOKENS`, at least one.
            window: positions a query sees, its own included.
        """
        assert length > 0, "nothing is left behind by no token"
        assert length % BLOCK_TOKENS == 0, f"{length} is no block's end"
        return cls(
            length,
            tuple(
                _last_rows(ring[:, slot], length, count)
                for ring, count in _rings(pools, window=window)
            ),
        )

    def restore(self, pools: CachePools, slot: int) -> None:
        """Put the rows back, into any slot."""
        for name, rows in zip(_RINGS, self.rows, strict=True):
            ring = getattr(pools, name)[:, slot]
            size, count = ring.shape[1], rows.shape[1]
            start = (self.length - count) % size
            fits = min(count, size - start)
            _copy(ring[:, start : start + fits], rows[:, :fits])
            if fits < count:
                _copy(ring[:, : count - fits], rows[:, fits:])

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(rows.numel() * rows.element_size() for rows in self.rows)


def block_bytes(pools: CachePools) -> int:
    """Bytes of one block's compressed and index rows over all layers."""
    return sum(
        rows.numel() * rows.element_size() // pools.rows128.shape[1]
        for rows in (pools.rows4, pools.index4, pools.rows128)
    )


def _rings(pools: CachePools, *, window: int) -> list[tuple[torch.Tensor, int]]:
    return [(getattr(pools, name), window - 1 if name == "window" else _OVERLAP) for name in _RINGS]


def _last_rows(ring: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """A copy of the rows of positions length - count .. length - 1 of [layers, size, d]."""
    size = ring.shape[1]
    start = (length - count) % size
    fits = min(count, size - start)
    rows = torch.empty((ring.shape[0], count, ring.shape[2]), dtype=ring.dtype, device=ring.device)
    _copy(rows[:, :fits], ring[:, start : start + fits])
    if fits < count:
        _copy(rows[:, fits:], ring[:, : count - fits])
    return rows


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy [layers, n, d], on a CPU layer by layer.

    A larger copy would wake torch's own threads, which then spin beside those of the next steps.
    """
    if target.device.type != "cpu":
        target.copy_(source)
        return
    for into, rows in zip(target, source, strict=True):
        into.copy_(rows)
