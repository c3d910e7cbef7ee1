"""Attention over a window, and over rows that stand for 4 or for 128 tokens.

Source: DeepSeek-V4 report, hybrid attention section; reference model, Attention / Compressor /
Indexer. Three kinds share everything but the key set:

    ratio 0    window of the last 128 tokens
    ratio 128  window + every complete row of 128 tokens (HCA)
    ratio 4    window + the best `index_topk` complete rows of 4 tokens, chosen by an indexer (CSA)

Row w of ratio r is visible to the query at p iff w < (p + 1) // r. Shapes: R rows, H heads,
d head_dim, N windows completed by the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from paceline.cache.blocks import BLOCK_TOKENS
from paceline.cache.pools import CachePools
from paceline.config import ModelConfig
from paceline.models.step import StepInputs
from paceline.ops.reference import (
    attend,
    inverse_rotate,
    linear,
    rms_norm,
    rotary_frequencies,
    rotate,
    top_rows,
    unit_rms,
)

__all__ = ["Attention", "Compressor", "Indexer"]


class Compressor:
    """Pools the projected rows of a window into one row by a per-channel softmax.

    Ratio 4 overlaps: a row reads the first half of the channels of the window before and the
    second half of its own. Raw rows live in rings by position, never shifted, so an unfinished
    window is only rows that happen to be incomplete.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        prefix: str,
        config: ModelConfig,
        *,
        ratio: int,
        freqs: torch.Tensor,
    ):
        self.ratio = ratio
        self.eps = config.rms_norm_eps
        self.wkv = weights[f"{prefix}.wkv.weight"]
        self.wgate = weights[f"{prefix}.wgate.weight"]
        self.ape = weights[f"{prefix}.ape"]
        self.norm = weights[f"{prefix}.norm.weight"]
        self.freqs = freqs

    def write_raw(
        self,
        x_RD: torch.Tensor,
        inputs: StepInputs,
        kv_ring: torch.Tensor,
        score_ring: torch.Tensor,
    ) -> None:
        """Project the step's rows (fp32) and store them by position."""
        x = x_RD.float()
        place = (inputs.slots, inputs.positions % kv_ring.shape[1])
        kv_ring[place] = linear(x, self.wkv.float())
        ape = self.ape.float()[inputs.positions % self.ratio]
        score_ring[place] = linear(x, self.wgate.float()) + ape

    def close(
        self,
        slots: torch.Tensor,
        windows: torch.Tensor,
        kv_ring: torch.Tensor,
        score_ring: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Rows [N, d] of the windows [N], normed and rotated at each window's first token."""
        r = self.ratio
        overlap = r == 4
        first = -r if overlap else 0
        offsets = torch.arange(first, r, device=windows.device)
        positions = windows[:, None] * r + offsets
        place = (slots[:, None], positions % kv_ring.shape[1])
        kv, score = kv_ring[place], score_ring[place]
        score = score.masked_fill((positions < 0)[..., None], -math.inf)
        if overlap:
            d = kv.shape[-1] // 2
            kv = torch.cat((kv[:, :r, :d], kv[:, r:, d:]), 1)
            score = torch.cat((score[:, :r, :d], score[:, r:, d:]), 1)
        kv = kv.masked_fill((positions < 0)[..., None], 0.0)
        pooled = (score.softmax(1) * kv).sum(1).to(dtype)
        return rotate(rms_norm(pooled, self.norm, self.eps), windows * r, self.freqs)


class Indexer:
    """Scores rows of 4 tokens for each query and takes the best `index_topk`.

    The reference rotates queries and rows by a Hadamard matrix before quantising both to fp4;
    without quantisation the rotation cancels in the product and is left out.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        prefix: str,
        config: ModelConfig,
        *,
        freqs: torch.Tensor,
    ):
        self.config = config
        self.freqs = freqs
        self.wq_b = weights[f"{prefix}.wq_b.weight"]
        self.weights_proj = weights[f"{prefix}.weights_proj.weight"]
        self.compressor = Compressor(weights, f"{prefix}.compressor", config, ratio=4, freqs=freqs)

    def select(
        self,
        x_RD: torch.Tensor,
        qr: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose rows for each query.

        Args:
            x_RD: the layer's input.
            qr: [R, q_lora] normed query latent.
            positions: [R] int64.
            rows: [R, C, index_head_dim] fp32 index rows of each query's sequence, in order.

        Returns:
            (row numbers [R, n], chosen [R, n] bool), rising, ties to the lower row.
        """
        heads, width = self.config.index_n_heads, self.config.index_head_dim
        q = rotate(linear(qr, self.wq_b).view(-1, heads, width), positions, self.freqs)
        gate = linear(x_RD, self.weights_proj).float() * (width**-0.5 * heads**-0.5)
        scores = torch.bmm(q.float(), rows.transpose(1, 2)).relu()
        scores = (scores * gate[..., None]).sum(1)
        return top_rows(scores, (positions + 1) // 4, self.config.index_topk)


class Attention:
    """One layer's attention.

    Args:
        weights: DeepSeek names; prefix: for example `layers.3.attn`.
        ratio: 0, 4 or 128.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], prefix: str, config: ModelConfig, *, ratio: int
    ):
        self.config = config
        self.ratio = ratio
        self.wq_a = weights[f"{prefix}.wq_a.weight"]
        self.q_norm = weights[f"{prefix}.q_norm.weight"]
        self.wq_b = weights[f"{prefix}.wq_b.weight"]
        self.wkv = weights[f"{prefix}.wkv.weight"]
        self.kv_norm = weights[f"{prefix}.kv_norm.weight"]
        self.wo_a = weights[f"{prefix}.wo_a.weight"]
        self.wo_b = weights[f"{prefix}.wo_b.weight"]
        self.sink = weights[f"{prefix}.attn_sink"]
        device = self.wq_a.device
        self.freqs = rotary_frequencies(config, compressed=ratio != 0).to(device)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if ratio:
            self.compressor = Compressor(
                weights, f"{prefix}.compressor", config, ratio=ratio, freqs=self.freqs
            )
        if ratio == 4:
            self.indexer = Indexer(weights, f"{prefix}.indexer", config, freqs=self.freqs)

    def queries(
        self, x_RD: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(latent [R, q_lora], q [R, H, d]): each head divided by its own RMS, then rotated."""
        config = self.config
        qr = rms_norm(linear(x_RD, self.wq_a), self.q_norm, config.rms_norm_eps)
        q = linear(qr, self.wq_b).view(-1, config.num_attention_heads, config.head_dim)
        return qr, rotate(unit_rms(q, config.rms_norm_eps), positions, self.freqs)

    def key_rows(self, x_RD: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[R, d] key that is also the value, normed and rotated."""
        kv = rms_norm(linear(x_RD, self.wkv), self.kv_norm, self.config.rms_norm_eps)
        return rotate(kv, positions, self.freqs)

    def window_keys(
        self,
        positions: torch.Tensor,
        slots: torch.Tensor,
        first: torch.Tensor | int,
        ring: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ring rows of positions p - 127 .. p in order, and which exist (are not below `first`)."""
        offsets = torch.arange(1 - self.config.sliding_window, 1, device=positions.device)
        wanted = positions[:, None] + offsets
        floor = first[:, None] if isinstance(first, torch.Tensor) else first
        return ring[slots[:, None], wanted % ring.shape[1]], wanted >= floor

    def output(self, o_RHd: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Undo the rotation the values carry, then the grouped low-rank output projection."""
        groups = self.config.o_groups
        o = inverse_rotate(o_RHd, positions, self.freqs).flatten(1).chunk(groups, -1)
        wo_a = self.wo_a.chunk(groups, 0)
        low = torch.cat([linear(part, w) for part, w in zip(o, wo_a, strict=True)], -1)
        return linear(low, self.wo_b)

    def window_only(
        self,
        x_RD: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        first: torch.Tensor | int,
        ring: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of ratio 0 over a ring [S + 1, ring, d]; writes the rows' keys, then reads."""
        _, q = self.queries(x_RD, positions)
        ring[slots, positions % ring.shape[1]] = self.key_rows(x_RD, positions).to(ring.dtype)
        keys, visible = self.window_keys(positions, slots, first, ring)
        return self.output(attend(q, keys.to(q.dtype), visible, self.sink), positions)

    def __call__(
        self, x_RD: torch.Tensor, inputs: StepInputs, pools: CachePools, layer: int
    ) -> torch.Tensor:
        """[R, D] normed input to [R, D]; writes this layer's caches.

        All rows are written and all windows closed before any row attends, so a row of the step
        sees what the rows before it completed.
        """
        positions, slots = inputs.positions, inputs.slots
        ring = pools.window[layer]
        if self.ratio == 0:
            return self.window_only(x_RD, positions, slots, 0, ring)
        qr, q = self.queries(x_RD, positions)
        ring[slots, positions % ring.shape[1]] = self.key_rows(x_RD, positions).to(ring.dtype)
        keys, visible = self.window_keys(positions, slots, 0, ring)
        kind = pools.kind_index[layer]
        if self.ratio == 128:
            more, seen = self._dense_rows(x_RD, inputs, pools, kind)
        else:
            more, seen = self._chosen_rows(x_RD, qr, inputs, pools, kind)
        keys = torch.cat((keys, more), 1).to(q.dtype)
        o = attend(q, keys, torch.cat((visible, seen), 1), self.sink)
        return self.output(o, positions)

    def _dense_rows(
        self, x_RD: torch.Tensor, inputs: StepInputs, pools: CachePools, kind: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.compressor is not None
        rings = (pools.raw128_kv[kind], pools.raw128_score[kind])
        self.compressor.write_raw(x_RD, inputs, *rings)
        pool = pools.rows128[kind]
        pool[inputs.close128_dest] = self.compressor.close(
            inputs.close128_slots, inputs.close128_windows, *rings, x_RD.dtype
        ).to(pool.dtype)
        count = inputs.context_cap // 128
        tables = pools.block_tables[inputs.slots, :count]
        places = torch.arange(count, device=x_RD.device)
        return pool[tables], places < ((inputs.positions + 1) // 128)[:, None]

    def _chosen_rows(
        self,
        x_RD: torch.Tensor,
        qr: torch.Tensor,
        inputs: StepInputs,
        pools: CachePools,
        kind: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.compressor is not None
        assert self.indexer is not None
        closing = (inputs.close4_slots, inputs.close4_windows)
        rings = (pools.raw4_kv[kind], pools.raw4_score[kind])
        self.compressor.write_raw(x_RD, inputs, *rings)
        pool = pools.rows4[kind]
        pool[inputs.close4_dest] = self.compressor.close(*closing, *rings, x_RD.dtype).to(
            pool.dtype
        )
        index_rings = (pools.index_raw_kv[kind], pools.index_raw_score[kind])
        self.indexer.compressor.write_raw(x_RD, inputs, *index_rings)
        index_pool = pools.index4[kind]
        index_pool[inputs.close4_dest] = self.indexer.compressor.close(
            *closing, *index_rings, x_RD.dtype
        ).to(index_pool.dtype)

        per_block = BLOCK_TOKENS // 4
        rows = torch.arange(inputs.context_cap // 4, device=x_RD.device)
        tables = pools.block_tables[inputs.slots]
        places = tables[:, rows // per_block] * per_block + rows % per_block
        chosen, real = self.indexer.select(x_RD, qr, inputs.positions, index_pool[places])
        return pool[places.gather(1, chosen)], real
