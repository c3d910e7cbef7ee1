"""How a step becomes tensors: owns the cache pools and the input buffers, calls the target.

Nothing here knows why these rows were chosen, nor which of them are drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from itertools import accumulate

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

_NUM_FIELDS = 11

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


@dataclass(slots=True)
class StepLists:
    """The fields of `StepInputs` as lists, in their order; grown sequence by sequence."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    close4_slots: list[int] = field(default_factory=list)
    close4_windows: list[int] = field(default_factory=list)
    close4_dest: list[int] = field(default_factory=list)
    close128_slots: list[int] = field(default_factory=list)
    close128_windows: list[int] = field(default_factory=list)
    close128_dest: list[int] = field(default_factory=list)
    logits_rows: list[int] = field(default_factory=list)
    hidden_rows: list[int] = field(default_factory=list)

    def joined(self) -> list[int]:
        """All of them, one after another."""
        return [
            *self.ids,
            *self.positions,
            *self.slots,
            *self.close4_slots,
            *self.close4_windows,
            *self.close4_dest,
            *self.close128_slots,
            *self.close128_windows,
            *self.close128_dest,
            *self.logits_rows,
            *self.hidden_rows,
        ]


class StepBuffers:
    """Fixed memory for the inputs of a step, written from the host in one go.

    The fields of `StepInputs` stand one after another, each as long as this step needs it. On the
    CPU the model reads what the host writes; on another device it is copied over in one transfer.
    The views of a shape are made once: a step of a shape seen before allocates no tensor.

    Args:
        max_rows: most rows of a step; also enough for either list of closing windows.
        device: where the model reads them.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        size = _NUM_FIELDS * max_rows
        on_host = device.type == "cpu"
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = self._host if on_host else self._host.to(device)
        self._on_host = on_host
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._values: npt.NDArray[np.int64] = self._host.numpy()
        self._shapes: dict[tuple[int, ...], StepInputs] = {}

    def write(self, fields: StepLists, context_cap: int) -> StepInputs:
        """Take the fields over; valid until the next step is written."""
        values = fields.joined()
        size = len(values)
        if self._copied is not None:
            # The transfer of the step before may still read; a prompt's step waits for nothing.
            self._copied.synchronize()
        self._values[:size] = values
        if not self._on_host:
            self._device[:size].copy_(self._host[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        shape = (
            len(fields.ids),
            len(fields.close4_slots),
            len(fields.close128_slots),
            len(fields.logits_rows),
            len(fields.hidden_rows),
            context_cap,
        )
        known = self._shapes.get(shape)
        if known is None:
            if len(self._shapes) >= _MAX_CACHED_SHAPES:
                self._shapes.clear()
            known = self._shapes[shape] = self._views(*shape)
        return known

    def _views(
        self, rows: int, close4: int, close128: int, logits: int, hiddens: int, context_cap: int
    ) -> StepInputs:
        sizes = [rows] * 3 + [close4] * 3 + [close128] * 3 + [logits, hiddens]
        ends = accumulate(sizes)
        parts = (self._device[end - size : end] for size, end in zip(sizes, ends, strict=True))
        return StepInputs(
            ids=next(parts),
            positions=next(parts),
            slots=next(parts),
            close4_slots=next(parts),
            close4_windows=next(parts),
            close4_dest=next(parts),
            close128_slots=next(parts),
            close128_windows=next(parts),
            close128_dest=next(parts),
            logits_rows=next(parts),
            hidden_rows=next(parts),
            context_cap=context_cap,
        )


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
        lists, inert, longest = StepLists(), self.pools.inert_slot, 0
        for given in rows:
            cache, width = given.cache, len(given.ids)
            first, slot = cache.length, cache.slot
            last = first + width
            if not cache.reserve(width):
                raise RuntimeError(f"no block is free for position {last - 1} of slot {slot}")
            blocks = cache.blocks
            self._note_blocks(cache)
            lists.ids += given.ids
            lists.positions += range(first, last)
            lists.slots += [slot] * width

            windows = range(first // 4, last // 4)
            unused = (width + 3) // 4 - len(windows)
            if windows:
                lists.close4_slots += [slot] * len(windows)
                lists.close4_windows += windows
                lists.close4_dest += [
                    blocks[window // _ROWS4] * _ROWS4 + window % _ROWS4 for window in windows
                ]
            if unused:
                lists.close4_slots += [inert] * unused
                lists.close4_windows += [0] * unused
                lists.close4_dest += [0] * unused

            windows = range(first // 128, last // 128)
            unused = (width + 127) // 128 - len(windows)
            if windows:
                lists.close128_slots += [slot] * len(windows)
                lists.close128_windows += windows
                lists.close128_dest += [blocks[window] for window in windows]
            if unused:
                lists.close128_slots += [inert] * unused
                lists.close128_windows += [0] * unused
                lists.close128_dest += [0] * unused

            end = len(lists.ids)
            lists.logits_rows += range(end - given.num_logits, end)
            lists.hidden_rows += range(end - given.num_hiddens, end)
            longest = max(longest, last)
        assert len(lists.ids) <= self._max_rows, f"{len(lists.ids)} rows; room is {self._max_rows}"
        return self._buffers.write(lists, -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS)

    def _note_blocks(self, cache: SequenceCache) -> None:
        """Write the blocks taken since the last step into the sequence's table."""
        slot, held = cache.slot, len(cache.blocks)
        if cache.length == 0:
            self._written[slot] = 0
        written = self._written[slot]
        if written == held:
            return
        table = self._tables[slot]
        table[written:held] = cache.blocks[written:]
        if written == 0:
            table[held:] = 0
        if not self._on_host:
            self.pools.block_tables[slot].copy_(torch.from_numpy(table))
        self._written[slot] = held
