"""A chain of drafts as one program over fixed memory: no host read, nothing sized by a value.

The head fills integer columns on the host and uploads them once; the program writes the pairs that
were accepted since, drafts, feeds each draft back with the block's own streams, and leaves ids and
log-probabilities on the device. Run eagerly or replayed from a capture, it gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.cache.drafter import DrafterRing
from paceline.draft.proposer import DraftBinding, DraftShape
from paceline.models.step import MtpBlock, MtpInputs
from paceline.ops.dense import DenseWeight

__all__ = ["Columns", "DraftChain", "DraftScorer"]

_STAGES = 4
"""Uploads that may be on their way at once before the host waits for the oldest."""

_PANEL = 64
"""Columns of a matrix product that are computed alike whatever their number."""


class Columns:
    """Int64 columns written on the host and read on the device.

    On a CPU both are the same memory. On a GPU each upload is one copy from pinned memory that
    nothing waits for; `begin` moves on to memory whose copy has been done.

    Args:
        sizes: entries of each column.
        device: where they are read.

    Attributes:
        on_device: the columns, at addresses that never change.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._sizes = list(sizes)
        total = sum(sizes)
        self._pinned = device.type == "cuda"
        if device.type == "cpu":
            self._device = torch.zeros(total, dtype=torch.int64)
            self._stages = [self._device]
        else:
            self._stages = [
                torch.zeros(total, dtype=torch.int64, pin_memory=self._pinned)
                for _ in range(_STAGES)
            ]
            self._device = torch.zeros(total, dtype=torch.int64, device=device)
        self._host = [
            [part.numpy() for part in stage.split_with_sizes(self._sizes)] for stage in self._stages
        ]
        self._done: list[torch.Event | None] = [None] * len(self._stages)
        self._stage = 0
        self.on_device: tuple[torch.Tensor, ...] = tuple(self._device.split_with_sizes(self._sizes))

    def begin(self) -> list[npt.NDArray[np.int64]]:
        """Return the columns to fill; what they hold is what some earlier call left."""
        self._stage = (self._stage + 1) % len(self._stages)
        done = self._done[self._stage]
        if done is not None and not done.query():
            done.synchronize()
        return self._host[self._stage]

    @property
    def filling(self) -> list[npt.NDArray[np.int64]]:
        """What `begin` returned last."""
        return self._host[self._stage]

    def upload(self) -> None:
        """Send the columns that `begin` returned last."""
        stage = self._stages[self._stage]
        if stage is self._device:
            return
        self._device.copy_(stage, non_blocking=self._pinned)
        if self._pinned:
            done = self._done[self._stage]
            if done is None:
                done = self._done[self._stage] = torch.Event("cuda")
            done.record()


class DraftScorer:
    """The output head as drafts use it: all ids, or the first `num_rows` and a few others.

    Args:
        lm_head: [vocab, hidden].
        num_rows: ids 0 .. num_rows - 1 are scored; 0: all.
        extra_ids: further ids, from `num_rows` on, rising. Their rows are gathered behind a copy
            of the first ones.

    An id's score has the bits the whole head gives it on a CPU, where matrix products go by
    whole panels of columns for this reason.

    Attributes:
        table: what is multiplied with.
        width: rows of it that count, columns of a row of logits.
        column_ids: [width] int64 id of each column on the device, or None where column is id.
    """

    def __init__(self, lm_head: DenseWeight, *, num_rows: int, extra_ids: Sequence[int]) -> None:
        self.table = lm_head
        self.width = num_rows or lm_head.num_rows
        self.column_ids: torch.Tensor | None = None
        self._ids: list[int] | None = None
        if num_rows and extra_ids:
            self._ids = [*range(num_rows), *extra_ids]
            self.width = len(self._ids)
            self.table = lm_head.take_rows([*self._ids, *[0] * (-self.width % _PANEL)])
            self.column_ids = torch.tensor(self._ids, device=lm_head.table.device)
        panels = -(-self.width // _PANEL) * _PANEL
        self._num_rows = min(panels, self.table.num_rows)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[R, hidden] to fp32 [R, width], new memory."""
        return self.table.matmul(normed, num_rows=self._num_rows)[:, : self.width]

    def ids_of(self, columns: torch.Tensor) -> torch.Tensor:
        """Ids of columns [R] int64."""
        return columns if self.column_ids is None else self.column_ids[columns]

    def id_of(self, column: int) -> int:
        """Id of one column."""
        return column if self._ids is None else self._ids[column]

    def spread(
        self, scores: npt.NDArray[np.float32], *, vocab_size: int
    ) -> npt.NDArray[np.float32]:
        """One row's scores [width] by id, [vocab_size]; -inf for ids that are not scored."""
        if self.width == vocab_size:
            return scores
        row = np.full(vocab_size, -np.inf, np.float32)
        row[slice(self.width) if self._ids is None else self._ids] = scores
        return row

    def forbid(self, logits: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Make what a grammar's bitmask does not allow -inf in a row of logits [width]."""
        words = bitmask.to(logits.device, non_blocking=True).flatten()
        bits = ((words[:, None] >> torch.arange(32, device=logits.device)) & 1).flatten().bool()
        allowed = bits[: self.width] if self.column_ids is None else bits[self.column_ids]
        logits.masked_fill_(~allowed, -math.inf)


@dataclass(frozen=True, slots=True, eq=False)
class _Views:
    """The first rows of the buffers, as one shape reads them."""

    ids: torch.Tensor
    keys: torch.Tensor
    slots: torch.Tensor
    first_keys: torch.Tensor
    depths: torch.Tensor
    pair_ids: torch.Tensor
    pair_keys: torch.Tensor
    pair_slots: torch.Tensor
    pair_rows: torch.Tensor
    hiddens: torch.Tensor
    streams: torch.Tensor
    tokens: torch.Tensor
    log_probs: torch.Tensor
    floors: torch.Tensor


class DraftChain:
    """The program, its buffers and its shapes.

    Args:
        module: the block.
        embed_tokens: the trunk's embedding table.
        scorer: the output head.
        ring: the block's rows; the last slot is the inert one.
        pending: [slots, most pairs of a sequence, hc_mult, hidden] streams of pairs to catch up.
        floor: [slots + 1] int64, lowest key a row of a slot may read, whatever the host believes.
        min_log_prob: a draft less likely than this ends its chain.
        measure: compute log-probabilities; without, they stay 0.

    Attributes:
        hiddens: [slots, hc_mult, hidden], to be filled with the target's streams.
        tokens, log_probs, streams, nonfinite: as `DraftBinding.outputs` has them.
    """

    def __init__(
        self,
        module: MtpBlock,
        embed_tokens: DenseWeight,
        scorer: DraftScorer,
        *,
        ring: DrafterRing,
        pending: torch.Tensor,
        floor: torch.Tensor,
        min_log_prob: float,
        measure: bool,
    ) -> None:
        self._module = module
        self._embed_tokens = embed_tokens
        self._scorer = scorer
        self._ring = ring
        self._pending = pending.flatten(0, 1)
        self._floor = floor
        self._min_log_prob = min_log_prob
        self._measure = measure
        slots, most_pairs = pending.shape[:2]
        device = pending.device
        self.num_slots = slots
        self.max_pairs = self.max_depth = most_pairs
        self.hiddens = torch.zeros(
            (slots, *pending.shape[2:]), dtype=embed_tokens.dtype, device=device
        )
        self.streams = torch.zeros_like(self.hiddens)
        self.tokens = torch.full((slots, self.max_depth), -1, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros((slots, self.max_depth), device=device)
        self.nonfinite = torch.zeros(1, dtype=torch.int64, device=device)
        self._floors = torch.zeros(slots, dtype=torch.int64, device=device)
        self._columns = Columns([slots] * 5 + [slots * most_pairs] * 4, device)
        self._widths = [1 << n for n in range(slots.bit_length()) if 1 << n < slots] + [slots]
        self._views: dict[DraftShape, _Views] = {}

    # Shapes

    def shapes(self) -> tuple[DraftShape, ...]:
        """All shapes with padding: widths doubling, the whole catch-up or none, every depth."""
        return tuple(
            DraftShape(width=width, pairs=pairs, depth=depth)
            for width in self._widths
            for pairs in (0, width * self.max_pairs)
            for depth in range(1, self.max_depth + 1)
        )

    def padded(self, *, width: int, pairs: int, depth: int) -> DraftShape:
        """Return the one of `shapes` that serves so many sequences, pairs and drafts."""
        wide = next(each for each in self._widths if each >= width)
        return DraftShape(width=wide, pairs=wide * self.max_pairs if pairs else 0, depth=depth)

    # Inputs

    def begin(self) -> list[npt.NDArray[np.int64]]:
        """Return ids, keys, slots, first_keys, depths, pair_ids, .._keys, .._slots, .._rows."""
        return self._columns.begin()

    def upload(self, shape: DraftShape, *, width: int, pairs: int) -> None:
        """Pad the columns of `begin` behind `width` sequences and `pairs` pairs, and send them."""
        host = self._columns.filling
        for column in host[:5]:
            column[width : shape.width] = 0
        host[2][width : shape.width] = self.num_slots
        for column in host[5:]:
            column[pairs : shape.pairs] = 0
        host[7][pairs : shape.pairs] = self.num_slots
        self._columns.upload()

    def make_inert(self, shape: DraftShape) -> None:
        """Fill the shape's inputs with padding only."""
        self.begin()
        self.upload(shape, width=0, pairs=0)

    # The program

    def binding(self) -> DraftBinding:
        """Describe all this to an executor."""
        names = ["ids", "keys", "slots", "first_keys", "depths"]
        names += ["pair_ids", "pair_keys", "pair_slots", "pair_rows"]
        inputs = dict(zip(names, self._columns.on_device, strict=True))
        return DraftBinding(
            inputs={**inputs, "hiddens": self.hiddens, "pending": self._pending},
            outputs={
                "tokens": self.tokens,
                "log_probs": self.log_probs,
                "streams": self.streams,
                "nonfinite": self.nonfinite,
            },
            shapes=self.shapes(),
            run=self.run,
            make_inert=self.make_inert,
            vocab_rows=self._scorer.width,
            inert_slot=self.num_slots,
        )

    @torch.inference_mode()
    def run(self, shape: DraftShape, masks: Mapping[int, torch.Tensor] | None = None) -> None:
        """Draft for the shape's sequences.

        Args:
            shape: what to read of the buffers; need not be one of `shapes`.
            masks: bitmasks of what may be the first draft, by row; not part of what is captured.
        """
        v, scorer, embed = self._viewed(shape), self._scorer, self._embed_tokens
        if shape.pairs:
            pairs = MtpInputs(
                embeds=embed.gather(v.pair_ids),
                hiddens=self._pending.index_select(0, v.pair_rows),
                keys=v.pair_keys,
                slots=v.pair_slots,
                first_keys=v.pair_keys,
            )
            self._module.write_rows(pairs, self._ring)
        self.nonfinite.zero_()
        first_keys = torch.maximum(v.first_keys, self._floor[v.slots])
        live = v.depths > 0
        ids, hiddens, keys, slots = v.ids, v.hiddens, v.keys, v.slots
        for n in range(shape.depth):
            inputs = MtpInputs(
                embeds=embed.gather(ids),
                hiddens=hiddens,
                keys=keys,
                slots=slots,
                first_keys=first_keys,
            )
            out = self._module.forward(inputs, self._ring)
            logits = scorer.logits(out.normed)
            masked = masks if masks and not n else {}
            for row, mask in masked.items():
                scorer.forbid(logits[row], mask)
            best, columns = logits.max(-1)
            finite = torch.isfinite(best)
            broken = live & ~finite
            for row in masked:
                broken[row] = False
            self.nonfinite += broken.sum()
            if n == 0:
                v.floors.copy_(torch.where(broken, keys + 1, 0))
            goes_on = live & finite
            if self._measure:
                log_probs = scorer.table.log_prob_of_best(logits, best)
                goes_on &= log_probs >= self._min_log_prob
                v.log_probs[:, n] = log_probs
            chosen = scorer.ids_of(columns)
            v.tokens[:, n] = torch.where(goes_on, chosen, -1)
            # The block may use its output's memory again in its next call.
            v.streams.copy_(out.streams)
            if n + 1 < shape.depth:
                live = goes_on & (v.depths > n + 1)
                ids = torch.where(live, chosen, 0)
                slots = torch.where(live, v.slots, self.num_slots)
                keys = keys + 1
                hiddens = v.streams

    def note_broken(self, width: int, total: torch.Tensor) -> None:
        """After a run: hide rows that were not finite from later ones, and count them.

        Args:
            width: sequences of the run.
            total: [1] int64, raised by this run's `nonfinite`.
        """
        slots = self._columns.on_device[2][:width]
        self._floor[slots] = torch.maximum(self._floor[slots], self._floors[:width])
        total += self.nonfinite

    def _viewed(self, shape: DraftShape) -> _Views:
        views = self._views.get(shape)
        if views is None:
            columns = self._columns.on_device
            rows, depth = shape.width, shape.depth
            ids, keys, slots, first_keys, depths = (column[:rows] for column in columns[:5])
            pairs = [column[: shape.pairs] for column in columns[5:]]
            views = self._views[shape] = _Views(
                ids=ids,
                keys=keys,
                slots=slots,
                first_keys=first_keys,
                depths=depths,
                pair_ids=pairs[0],
                pair_keys=pairs[1],
                pair_slots=pairs[2],
                pair_rows=pairs[3],
                hiddens=self.hiddens[:rows],
                streams=self.streams[:rows],
                tokens=self.tokens[:rows, :depth],
                log_probs=self.log_probs[:rows, :depth],
                floors=self._floors[:rows],
            )
        return views
