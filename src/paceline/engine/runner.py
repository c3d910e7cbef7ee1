"""How a step becomes tensors: owns the cache pools and the input buffers, calls the target.

Nothing here knows why these rows were chosen, nor which of them are drafts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from paceline.cache.blocks import BLOCK_TOKENS
from paceline.cache.pools import CachePools
from paceline.cache.state import SequenceCache
from paceline.config import ModelConfig
from paceline.draft.verify_device import DeviceVerdict, packed_verdicts, unpack
from paceline.engine.graphs import Capture, GraphPlan, GraphShape, TargetGraphs
from paceline.models.step import StepInputs, TargetModel, TargetOutput
from paceline.types import MAX_NUM_DRAFTS

__all__ = ["RowInputs", "Runner", "Step", "StepBuffers"]

_ROWS4 = BLOCK_TOKENS // 4
"""Rows of a ratio-4 pool in one block."""

_NUM_FIELDS = 14

_MAX_CACHED_SHAPES = 4096


@dataclass(slots=True)
class RowInputs:
    """The rows of one sequence in one step.

    Attributes:
        cache: its handle; the rows stand at positions `cache.length` and on.
        ids: the tokens to run that the host knows, at least one.
        num_logits: of how many rows, counted from the last, the logits are wanted.
        num_hiddens: likewise for the streams.
        device_ids: [n] int64, tokens that follow `ids`, on the device; -1 or an id beyond the
            vocabulary is run as another and never accepted. None: there are none.
        device_log_probs: [n] fp32, what `Runner.read_verdicts` is to say of them, or None.
        num_more_logits: of how many rows before those of `num_logits` the logits are wanted too,
            for other purposes than a verdict.
    """

    cache: SequenceCache
    ids: list[int]
    num_logits: int
    num_hiddens: int
    device_ids: torch.Tensor | None = None
    device_log_probs: torch.Tensor | None = None
    num_more_logits: int = 0


class StepLists:
    """The fields of `Step` as lists, in their order; grown sequence by sequence."""

    __slots__ = (
        "close4_dest",
        "close4_slots",
        "close4_windows",
        "close128_dest",
        "close128_slots",
        "close128_windows",
        "counts",
        "firsts",
        "hidden_rows",
        "ids",
        "logits_rows",
        "positions",
        "slots",
        "sources",
    )

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.close4_slots: list[int] = []
        self.close4_windows: list[int] = []
        self.close4_dest: list[int] = []
        self.close128_slots: list[int] = []
        self.close128_windows: list[int] = []
        self.close128_dest: list[int] = []
        self.logits_rows: list[int] = []
        self.hidden_rows: list[int] = []
        self.sources: list[int] = []
        self.firsts: list[int] = []
        self.counts: list[int] = []

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
            *self.sources,
            *self.firsts,
            *self.counts,
        ]

    def pad(self, shape: GraphShape, inert: int) -> None:
        """Fill up with what is run and not read: rows of the inert slot, windows of block 0."""
        rows = shape.num_rows - len(self.ids)
        self.ids += [0] * rows
        self.positions += [0] * rows
        self.slots += [inert] * rows
        self.sources += [-1] * (shape.num_rows - len(self.sources))
        windows = shape.num_close4 - len(self.close4_slots)
        self.close4_slots += [inert] * windows
        self.close4_windows += [0] * windows
        self.close4_dest += [0] * windows
        windows = shape.num_close128 - len(self.close128_slots)
        self.close128_slots += [inert] * windows
        self.close128_windows += [0] * windows
        self.close128_dest += [0] * windows
        self.logits_rows += [0] * (shape.num_rows - len(self.logits_rows))
        self.hidden_rows += [0] * (shape.num_rows - len(self.hidden_rows))
        seqs = shape.num_seqs - len(self.firsts)
        self.firsts += [0] * seqs
        self.counts += [0] * seqs


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step as it lies in the buffers.

    Attributes:
        inputs: what the model is told; of ids that are on the device, what the host wrote there.
        sources: [R] int64, per row where among the ids on the device its id is, -1 where `inputs`
            has it; or empty, every row's id is there.
        firsts: [B] int64, per sequence that emits, its first logits row; empty where the verdict
            is not wanted.
        counts: [B] int64, its drafts.
    """

    inputs: StepInputs
    sources: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor


class StepBuffers:
    """Fixed memory for the inputs of a step, written from the host in one go.

    The fields of `Step` stand one after another, each as long as this step needs it; where a field
    lies depends on these lengths only. On the CPU the model reads what the host writes; on another
    device it is copied over in one transfer. The views of a shape are made once: a step of a shape
    seen before allocates no tensor.

    Args:
        max_rows: most rows of a step; also enough for any other field.
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
        self._shapes: dict[tuple[int, ...], Step] = {}

    def wait(self) -> None:
        """Return once the device has read what was last written to the host's side."""
        if self._copied is not None:
            self._copied.synchronize()

    def write(self, fields: StepLists, context_cap: int) -> Step:
        """Take the fields over; valid until the next step is written."""
        values = fields.joined()
        size = len(values)
        if not self._on_host:
            self.wait()
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
            len(fields.sources),
            len(fields.firsts),
            context_cap,
        )
        known = self._shapes.get(shape)
        if known is None:
            if len(self._shapes) >= _MAX_CACHED_SHAPES:
                self._shapes.clear()
            known = self._shapes[shape] = self._views(*shape)
        return known

    def _views(
        self,
        rows: int,
        close4: int,
        close128: int,
        logits: int,
        hiddens: int,
        sources: int,
        seqs: int,
        context_cap: int,
    ) -> Step:
        sizes = [rows] * 3 + [close4] * 3 + [close128] * 3 + [logits, hiddens]
        sizes += [sources, seqs, seqs]
        ends = accumulate(sizes)
        parts = (self._device[end - size : end] for size, end in zip(sizes, ends, strict=True))
        inputs = StepInputs(
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
        return Step(inputs=inputs, sources=next(parts), firsts=next(parts), counts=next(parts))


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
        dtype: of the pools' keys, and of the streams.
        capture: how steps are captured; None runs every step as it is.
        plan: which steps are captured, each the first time it is wanted or by `capture`; None:
            batches of 1, 2, 4 and 8 and every width of a verified step.

    Attributes:
        pools: the target's caches.
        num_forwards: target forwards so far.
        graphs: the captured steps, or None.
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
        capture: Capture | None = None,
        plan: GraphPlan | None = None,
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
        self._vocab_size = config.vocab_size
        self._max_rows = max_rows
        self.graphs: TargetGraphs | None = None
        if capture is not None:
            plan = plan or GraphPlan.new(max_num_seqs=num_slots, max_seq_len=max_seq_len)
            self.graphs = TargetGraphs(capture, plan)
            streams = (plan.max_rows, config.hc_mult, config.hidden_size)
            self._hiddens = torch.zeros(streams, dtype=dtype, device=device)
            self._logits = torch.zeros(plan.max_rows, config.vocab_size, device=device)
            packed = (plan.batch_sizes[-1], 2 + 2 * MAX_NUM_DRAFTS)
            self._packed = torch.zeros(packed, dtype=torch.int64, device=device)
        most = max(max_rows, 0 if plan is None else plan.max_rows)
        self._buffers = StepBuffers(most, device)
        self._device_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._device_log_probs = torch.full((most,), math.nan, device=device)
        self._unmeasured = torch.full((most,), math.nan, device=device)
        self._on_host = device.type == "cpu"
        tables = self.pools.block_tables
        self._host_tables = tables
        if not self._on_host:
            self._host_tables = torch.zeros(
                tuple(tables.shape), dtype=torch.int64, pin_memory=device.type == "cuda"
            )
        self._tables: npt.NDArray[np.int64] = self._host_tables.numpy()
        self._holders: list[SequenceCache | None] = [None] * num_slots
        self._written = [0] * num_slots
        self._last: _Last | None = None
        self.num_forwards = 0

    @property
    def num_replays(self) -> int:
        """Forwards that were a captured step; the others ran as they were."""
        return 0 if self.graphs is None else self.graphs.num_replays

    def run(self, rows: Rows[RowInputs]) -> TargetOutput:
        """One target forward over all rows.

        Reserves the rows' places; what is kept of them is the caller's to commit. A step that a
        captured shape serves is replayed, any other one run as it is. The host waits for nothing
        the device has to do.

        Returns:
            The logits and streams asked for, in the order of `rows`; dead at the next call.

        Raises:
            RuntimeError: the pool lacks a block, which admission rules out.
        """
        self._last = None
        lists, widest, longest = self._collect(rows)
        self.num_forwards += 1
        graphs = self.graphs
        if graphs is not None:
            shape = graphs.plan.shape_for(
                num_seqs=len(rows), num_rows=len(lists.ids), widest=widest, longest=longest
            )
            if shape is not None:
                if not graphs.has(shape):
                    self._make(graphs, shape)
                num_logits, num_hiddens = len(lists.logits_rows), len(lists.hidden_rows)
                lists.pad(shape, self.pools.inert_slot)
                step = self._buffers.write(lists, shape.context_cap)
                graphs.replay(shape)
                output = TargetOutput(
                    logits=self._logits[:num_logits], hiddens=self._hiddens[:num_hiddens]
                )
                self._last = _Last(step, output, rows, self._packed)
                return output
        step = self._buffers.write(lists, -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS)
        output = self._forward(step)
        self._last = _Last(step, output, rows, None)
        return output

    def read_verdicts(self) -> list[DeviceVerdict | None]:
        """Judge the last run's drafts where its logits are, and read the verdicts: one transfer.

        Returns:
            Per row of the run, in order; None for one without logits. The drafts are the ids of the
            rows that logits were asked of, but for the first.

        Raises:
            RuntimeError: nothing was run.
        """
        last = self._last
        if last is None:
            raise RuntimeError("no step was run whose verdicts could be read")
        counts = [row.num_logits - 1 for row in last.rows if row.num_logits]
        if not counts:
            return [None] * len(last.rows)
        packed = last.packed
        if packed is None:
            packed = self._judge(last.step, last.output.logits)
        verdicts = iter(unpack(self._fetch(packed[: len(counts)]), counts))
        return [next(verdicts) if row.num_logits else None for row in last.rows]

    def capture(
        self,
        batch_sizes: Iterable[int] | None = None,
        widths: Iterable[int] | None = None,
        contexts: Iterable[int] | None = None,
    ) -> float:
        """Capture steps now rather than when they are first wanted.

        Args:
            batch_sizes: numbers of sequences; None: the plan's.
            widths: rows of each sequence; None: all the plan has.
            contexts: tokens of the longest sequence; None: the plan's.

        Returns:
            Seconds it took; 0 without graphs.

        Raises:
            ConfigError: the plan has no shape for one of them.
        """
        if self.graphs is None:
            return 0.0
        graphs, plan, before = self.graphs, self.graphs.plan, self.graphs.seconds
        for shape in plan.shapes(
            plan.batch_sizes if batch_sizes is None else batch_sizes,
            range(1, plan.max_width + 1) if widths is None else widths,
            plan.context_caps if contexts is None else contexts,
        ):
            if not graphs.has(shape):
                self._make(graphs, shape)
        return graphs.seconds - before

    def scrub(self, cache: SequenceCache) -> None:
        """Zero what a failed sequence wrote, before its slot and blocks are given to another.

        A masked read multiplies what it must not see by zero, which hides any finite number but not
        a NaN. Blocks that others hold too are whole and were finite when they came to be shared.
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
        for block in (0, *cache.own_blocks):
            pools.rows4[:, block * _ROWS4 : (block + 1) * _ROWS4].zero_()
            pools.index4[:, block * _ROWS4 : (block + 1) * _ROWS4].zero_()
            pools.rows128[:, block].zero_()

    def _make(self, graphs: TargetGraphs, shape: GraphShape) -> None:
        """Capture a shape over padding only, so that no sequence's rows are touched."""
        lists = StepLists()
        lists.pad(shape, self.pools.inert_slot)
        step = self._buffers.write(lists, shape.context_cap)
        graphs.add(shape, lambda: self._serve(step))

    @torch.inference_mode()
    def _serve(self, step: Step) -> None:
        """Run a padded step and leave what it gives in fixed memory; what is captured."""
        output = self._forward(step)
        self._logits[: output.logits.shape[0]].copy_(output.logits)
        self._hiddens[: output.hiddens.shape[0]].copy_(output.hiddens)
        packed = self._judge(step, output.logits)
        self._packed[: packed.shape[0]].copy_(packed)

    def _forward(self, step: Step) -> TargetOutput:
        inputs = step.inputs
        if step.sources.shape[0]:
            # What is no id must not be looked up; its row is never accepted.
            ids = self._ids(step).clamp(0, self._vocab_size - 1)
            inputs = dataclasses.replace(inputs, ids=ids)
        return self._model.forward(inputs, self.pools)

    def _ids(self, step: Step) -> torch.Tensor:
        """Every row's token as it was given."""
        on_device = self._device_ids[step.sources.clamp(min=0)]
        return torch.where(step.sources >= 0, on_device, step.inputs.ids)

    @torch.inference_mode()
    def _judge(self, step: Step, logits: torch.Tensor) -> torch.Tensor:
        ids, log_probs = step.inputs.ids, None
        if step.sources.shape[0]:
            ids = self._ids(step)
            measured = self._device_log_probs[step.sources.clamp(min=0)]
            log_probs = torch.where(step.sources >= 0, measured, math.nan)
        return packed_verdicts(
            logits,
            ids,
            step.inputs.logits_rows,
            step.firsts,
            step.counts,
            max_drafts=MAX_NUM_DRAFTS,
            log_probs=log_probs,
        )

    def _fetch(self, values: torch.Tensor) -> npt.NDArray[np.int64]:
        """Wait for the device and read from it; the only place that does."""
        fetched: npt.NDArray[np.int64] = values.cpu().numpy()
        return fetched

    def _collect(self, rows: Rows[RowInputs]) -> tuple[StepLists, int, int]:
        """The step's fields, its widest sequence, and one more than its highest position."""
        lists, inert, widest, longest = StepLists(), self.pools.inert_slot, 0, 0
        on_device: list[RowInputs] = []
        num_on_device = 0
        if not self._on_host:
            self._buffers.wait()
        for given in rows:
            cache, width = given.cache, len(given.ids)
            lists.ids += given.ids
            if given.device_ids is not None and (count := given.device_ids.shape[0]):
                width += count
                lists.sources += [-1] * (len(lists.ids) - len(lists.sources))
                lists.sources += range(num_on_device, num_on_device + count)
                lists.ids += [0] * count
                on_device.append(given)
                num_on_device += count
            first, slot = cache.length, cache.slot
            last = first + width
            if not cache.reserve(width):
                raise RuntimeError(f"no block is free for position {last - 1} of slot {slot}")
            blocks = cache.blocks
            if self._holders[slot] is not cache or self._written[slot] != len(blocks):
                self._note_blocks(cache)
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
            if given.num_logits:
                lists.firsts.append(len(lists.logits_rows) + given.num_more_logits)
                lists.counts.append(given.num_logits - 1)
            lists.logits_rows += range(end - given.num_logits - given.num_more_logits, end)
            lists.hidden_rows += range(end - given.num_hiddens, end)
            if width > widest:
                widest = width
            if last > longest:
                longest = last
        assert len(lists.ids) <= self._max_rows, f"{len(lists.ids)} rows; room is {self._max_rows}"
        if on_device:
            lists.sources += [-1] * (len(lists.ids) - len(lists.sources))
            self._take_ids(on_device, num_on_device)
        return lists, widest, longest

    def _take_ids(self, rows: list[RowInputs], count: int) -> None:
        """Bring the ids that never left the device to where a captured step reads them."""
        ids = [row.device_ids for row in rows if row.device_ids is not None]
        torch.cat(ids, out=self._device_ids[:count])
        measured = [
            self._unmeasured[: some.shape[0]]
            if row.device_log_probs is None
            else row.device_log_probs
            for row, some in zip(rows, ids, strict=True)
        ]
        torch.cat(measured, out=self._device_log_probs[:count])

    def _note_blocks(self, cache: SequenceCache) -> None:
        """Write the blocks taken since the last step into the sequence's table."""
        slot, held = cache.slot, len(cache.blocks)
        if self._holders[slot] is not cache or held < self._written[slot]:
            self._holders[slot] = cache
            self._written[slot] = 0
        written = self._written[slot]
        if written == held:
            return
        table = self._tables[slot]
        table[written:held] = cache.blocks[written:]
        if written == 0:
            table[held:] = 0
        if not self._on_host:
            self.pools.block_tables[slot].copy_(self._host_tables[slot], non_blocking=True)
        self._written[slot] = held


@dataclass(slots=True, eq=False)
class _Last:
    """The step run last, and its verdicts where a captured one made them."""

    step: Step
    output: TargetOutput
    rows: Rows[RowInputs]
    packed: torch.Tensor | None
