"""Memory of the target's caches. Every row's place is a function of its absolute position.

A rejected draft is therefore not undone but outlived: its rows lie at positions beyond the
committed length, invisible, until the next write to the same position replaces them.

Legend: A attention layers, S sequence slots (+ 1 inert slot for padded rows), B blocks (+ block 0,
which takes the writes of padded rows), d head_dim, i index_head_dim.

| pool            | shape                     | place of position p           |
|-----------------|---------------------------|-------------------------------|
| window          | [A, S+1, window_ring, d]  | p mod window_ring             |
| raw4 kv, score  | [A4, S+1, ring4, 2d]      | p mod ring4                   |
| index raw       | [A4, S+1, ring4, 2i]      | p mod ring4                   |
| raw128          | [A128, S+1, ring128, d]   | p mod ring128                 |
| rows4, index    | [A4, 32 (B+1), d or i]    | row p // 4 by block table     |
| rows128         | [A128, B+1, d]            | row p // 128 by block table   |

Ring sizes: a step of width w at committed length L writes L .. L+w-1 while its first query reads
back to L-127 (window, ratio 128) or its first closing row to L-7 (ratio 4), so the span
that must not collide is 127 + w and 7 + w. One row fewer in either ring is caught by the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.cache.blocks import BLOCK_TOKENS
from paceline.config import ModelConfig

__all__ = ["CachePools", "cache_bytes_per_sequence", "cache_bytes_per_token"]


@dataclass(slots=True)
class CachePools:
    """The target's cache tensors; owned by the runner, written by the model only.

    Attributes:
        window: [A, S+1, window_ring, d] in `dtype`, keys (= values) after rotation.
        raw4_kv, raw4_score: [A4, S+1, ring4, 2d] fp32, projected rows, score with `ape` added.
        index_raw_kv, index_raw_score: [A4, S+1, ring4, 2i] fp32.
        raw128_kv, raw128_score: [A128, S+1, ring128, d] fp32.
        rows4: [A4, (B+1) * 32, d] in `dtype`; index4: [A4, (B+1) * 32, i] fp32.
        rows128: [A128, B+1, d] in `dtype`.
        block_tables: [S+1, max_blocks] int64, block of tokens 128 n .. 128 n + 127 of each slot.
        kind_index: per trunk layer, its index within its kind's pools.
        max_width: widest step of one sequence the rings allow.
    """

    window: torch.Tensor
    raw4_kv: torch.Tensor
    raw4_score: torch.Tensor
    index_raw_kv: torch.Tensor
    index_raw_score: torch.Tensor
    raw128_kv: torch.Tensor
    raw128_score: torch.Tensor
    rows4: torch.Tensor
    index4: torch.Tensor
    rows128: torch.Tensor
    block_tables: torch.Tensor
    kind_index: tuple[int, ...]
    max_width: int

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        num_slots: int,
        num_blocks: int,
        max_seq_len: int,
        max_width: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> CachePools:
        """Allocate zeroed pools.

        Args:
            config: the model's shapes.
            num_slots: sequences that can be live at once.
            num_blocks: blocks to share among them, block 0 not counted.
            max_seq_len: most tokens of one sequence.
            max_width: most rows of one sequence in one step (prompt chunk or 1 + drafts).
            device: where.
            dtype: of window, compressed rows.
        """
        ratios = config.compress_ratios
        d, i = config.head_dim, config.index_head_dim
        num4, num128 = ratios.count(4), ratios.count(128)
        slots, blocks = num_slots + 1, num_blocks + 1
        window_ring = config.sliding_window - 1 + max_width
        ring4, ring128 = 7 + max_width, 127 + max_width
        counts = {0: 0, 4: 0, 128: 0}
        kind_index = []
        for ratio in ratios:
            kind_index.append(counts[ratio])
            counts[ratio] += 1

        def new(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        return cls(
            window=new(len(ratios), slots, window_ring, d, kind=dtype),
            raw4_kv=new(num4, slots, ring4, 2 * d),
            raw4_score=new(num4, slots, ring4, 2 * d),
            index_raw_kv=new(num4, slots, ring4, 2 * i),
            index_raw_score=new(num4, slots, ring4, 2 * i),
            raw128_kv=new(num128, slots, ring128, d),
            raw128_score=new(num128, slots, ring128, d),
            rows4=new(num4, blocks * (BLOCK_TOKENS // 4), d, kind=dtype),
            index4=new(num4, blocks * (BLOCK_TOKENS // 4), i),
            rows128=new(num128, blocks, d, kind=dtype),
            block_tables=new(slots, max(1, -(-max_seq_len // BLOCK_TOKENS)), kind=torch.int64),
            kind_index=tuple(kind_index),
            max_width=max_width,
        )

    @property
    def inert_slot(self) -> int:
        """The slot padded rows use."""
        return self.window.shape[1] - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools together."""
        return sum(
            t.numel() * t.element_size()
            for t in (
                self.window,
                self.raw4_kv,
                self.raw4_score,
                self.index_raw_kv,
                self.index_raw_score,
                self.raw128_kv,
                self.raw128_score,
                self.rows4,
                self.index4,
                self.rows128,
                self.block_tables,
            )
        )


def cache_bytes_per_token(config: ModelConfig, element_bytes: int) -> float:
    """Bytes a token of context adds to the pools that grow with it (index rows are fp32)."""
    num4, num128 = config.compress_ratios.count(4), config.compress_ratios.count(128)
    return (
        num4 * (config.head_dim * element_bytes + config.index_head_dim * 4) / 4
        + num128 * config.head_dim * element_bytes / 128
    )


def cache_bytes_per_sequence(config: ModelConfig, element_bytes: int, max_width: int) -> int:
    """Bytes of one sequence's rings, whatever its length."""
    num4, num128 = config.compress_ratios.count(4), config.compress_ratios.count(128)
    d, i = config.head_dim, config.index_head_dim
    window = len(config.compress_ratios) * (config.sliding_window - 1 + max_width) * d
    raw4 = num4 * (7 + max_width) * (2 * d + 2 * i) * 2
    raw128 = num128 * (127 + max_width) * d * 2
    return window * element_bytes + (raw4 + raw128) * 4
