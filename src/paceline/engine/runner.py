"""How a step becomes tensors: owns the cache pools and the input buffers, calls the target.

Nothing here knows why these rows were chosen, nor which of them are drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.cache.blocks import BLOCK_TOKENS
from paceline.cache.pools import CachePools
from paceline.cache.state import SequenceCache
from paceline.config import ModelConfig
from paceline.models.step import StepInputs, TargetModel, TargetOutput

__all__ = ["RowInputs", "Runner", "StepBuffers"]

_ROWS4 = BLOCK_TOKENS // 4
"""Rows of a ratio-4 pool in one block."""

_FIELDS = (
    "ids",
    "positions",
    "slots",
    "close4_slots",
    "close4_windows",
    "close4_dest",
    "close128_slots",
    "close128_windows",
    "close128_dest",
    "logits_rows",
    "hidden_rows",
)

_MAX_CACHED_SHAPES = 4096


@dataclass(slots=True)
class RowInputs:
    """The rows of one sequence in one step.

    Attributes:
        cache: its handle; the rows stand at positions `cache.length` and on.
        ids: the tokens to run, at least one.
        num_logits: of how many rows, counted from the last, the logits are wanted.
        num_hiddens: likewise for the streams.
    """

    cache: SequenceCache
    ids: list[int]
    num_logits: int
    num_hiddens: int


class StepBuffers:
    """Fixed memory for the inputs of a step, written from the host.

    One int64 row of `max_rows` per field of `StepInputs`. On the CPU the model reads what the host
    writes; on another device the rows are copied over in one transfer. Views of equal size are
    made once: a step of a shape seen before allocates nothing.

    Args:
        max_rows: most rows of a step; also enough for either list of closing windows.
        device: where the model reads them.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        on_host = device.type == "cpu"
        self._host = torch.zeros(
            (len(_FIELDS), max_rows), dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._device = self._host if on_host else self._host.to(device)
        self._on_host = on_host
        rows: npt.NDArray[np.int64] = self._host.numpy()
        (
            self.ids,
            self.positions,
            self.slots,
            self.close4_slots,
            self.close4_windows,
            self.close4_dest,
            self.close128_slots,
            self.close128_windows,
            self.close128_dest,
            self.logits_rows,
            self.hidden_rows,
        ) = rows
        self._shapes: dict[tuple[int, int, int, int, int, int], StepInputs] = {}

    def inputs(
        self, rows: int, close4: int, close128: int, logits: int, hiddens: int, context_cap: int
    ) -> StepInputs:
        """What was written, as the model takes it; valid until the next step is written."""
        if not self._on_host:
            self._device.copy_(self._host, non_blocking=True)
        shape = (rows, close4, close128, logits, hiddens, context_cap)
        known = self._shapes.get(shape)
        if known is None:
            if len(self._shapes) >= _MAX_CACHED_SHAPES:
                self._shapes.clear()
            sizes = (rows,) * 3 + (close4,) * 3 + (close128,) * 3 + (logits, hiddens)
            views = {
                name: self._device[i, :size]
                for i, (name, size) in enumerate(zip(_FIELDS, sizes, strict=True))
            }
            known = self._shapes[shape] = StepInputs(**views, context_cap=context_cap)
        return known


class Runner:
    """Runs rows through the target and keeps the caches' memory.

    Args:
        model: the target's forward.
        config: its shapes.
        num_slots: sequences that can be live at once.
        num_blocks: blocks they share, block 0 not counted.
        max_seq_len: most tokens of one sequence.
        max_rows: most rows of one step, and the widest step of one sequence.
        device: where pools and inputs live.
        dtype: of the pools' keys.

    Attributes:
        pools: the target's caches.
        num_forwards: target forwards so far.
    """

    def __init__(
        self,
        model: TargetModel,
        config: ModelConfig,
        *,
        num_slots: int,
        num_blocks: int,
        max_seq_len: int,
        max_rows: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._model = model
        self.pools = CachePools.allocate(
            config,
            num_slots=num_slots,
            num_blocks=num_blocks,
            max_seq_len=max_seq_len,
            max_width=max_rows,
            device=device,
            dtype=dtype,
        )
        self._max_rows = max_rows
        self._buffers = StepBuffers(max_rows, device)
        self._counting: npt.NDArray[np.int64] = np.arange(
            max(max_seq_len, max_rows) + 1, dtype=np.int64
        )
        self._on_host = device.type == "cpu"
        tables = self.pools.block_tables
        self._tables: npt.NDArray[np.int64] = (
            tables.numpy() if self._on_host else np.zeros(tuple(tables.shape), dtype=np.int64)
        )
        self._written = [0] * num_slots
        self.num_forwards = 0

    def run(self, rows: Rows[RowInputs]) -> TargetOutput:
        """One target forward over all rows.

        Reserves the rows' places; what is kept of them is the caller's to commit.

        Returns:
            The logits and streams asked for, in the order of `rows`; dead at the next call.

        Raises:
            RuntimeError: the pool lacks a block, which admission rules out.
        """
        inputs = self._write(rows)
        self.num_forwards += 1
        return self._model.forward(inputs, self.pools)

    def scrub(self, cache: SequenceCache) -> None:
        """Zero what a failed sequence wrote, before its slot and blocks are given to another.

        A masked read multiplies what it must not see by zero, which hides any finite number but not
        a NaN.
        """
        pools, slot = self.pools, cache.slot
        for ring in (
            pools.window,
            pools.raw4_kv,
            pools.raw4_score,
            pools.index_raw_kv,
            pools.index_raw_score,
            pools.raw128_kv,
            pools.raw128_score,
        ):
            ring[:, slot].zero_()
        for block in (0, *cache.blocks):
            pools.rows4[:, block * _ROWS4 : (block + 1) * _ROWS4].zero_()
            pools.index4[:, block * _ROWS4 : (block + 1) * _ROWS4].zero_()
            pools.rows128[:, block].zero_()

    def _write(self, rows: Rows[RowInputs]) -> StepInputs:
        buffers, counting, inert = self._buffers, self._counting, self.pools.inert_slot
        row = close4 = close128 = logits = hiddens = longest = 0
        for given in rows:
            cache, width = given.cache, len(given.ids)
            first, slot = cache.length, cache.slot
            last, next_row = first + width, row + width
            assert next_row <= self._max_rows, f"{next_row} rows; room for {self._max_rows}"
            if not cache.reserve(width):
                raise RuntimeError(f"no block is free for position {last - 1} of slot {slot}")
            table = self._block_table(cache)
            buffers.ids[row:next_row] = given.ids
            buffers.positions[row:next_row] = counting[first:last]
            buffers.slots[row:next_row] = slot

            end = close4 + (width + 3) // 4
            done = last // 4 - first // 4
            if done < end - close4:
                buffers.close4_slots[close4:end] = inert
                buffers.close4_windows[close4:end] = 0
                buffers.close4_dest[close4:end] = 0
            if done:
                windows = counting[first // 4 : last // 4]
                buffers.close4_slots[close4 : close4 + done] = slot
                buffers.close4_windows[close4 : close4 + done] = windows
                buffers.close4_dest[close4 : close4 + done] = (
                    table[windows // _ROWS4] * _ROWS4 + windows % _ROWS4
                )
            close4 = end

            end = close128 + (width + 127) // 128
            done = last // 128 - first // 128
            if done < end - close128:
                buffers.close128_slots[close128:end] = inert
                buffers.close128_windows[close128:end] = 0
                buffers.close128_dest[close128:end] = 0
            if done:
                windows = counting[first // 128 : last // 128]
                buffers.close128_slots[close128 : close128 + done] = slot
                buffers.close128_windows[close128 : close128 + done] = windows
                buffers.close128_dest[close128 : close128 + done] = table[windows]
            close128 = end

            if given.num_logits:
                end = logits + given.num_logits
                buffers.logits_rows[logits:end] = counting[next_row - given.num_logits : next_row]
                logits = end
            if given.num_hiddens:
                end = hiddens + given.num_hiddens
                buffers.hidden_rows[hiddens:end] = counting[next_row - given.num_hiddens : next_row]
                hiddens = end
            row = next_row
            longest = max(longest, last)
        cap = -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS
        return buffers.inputs(row, close4, close128, logits, hiddens, cap)

    def _block_table(self, cache: SequenceCache) -> npt.NDArray[np.int64]:
        table: npt.NDArray[np.int64] = self._tables[cache.slot]
        if cache.length == 0:
            self._written[cache.slot] = 0
        written, held = self._written[cache.slot], len(cache.blocks)
        if written < held:
            table[written:held] = cache.blocks[written:]
            if written == 0:
                table[held:] = 0
            if not self._on_host:
                self.pools.block_tables[cache.slot].copy_(torch.from_numpy(table))
            self._written[cache.slot] = held
        return table
