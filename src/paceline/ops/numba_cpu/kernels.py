"""The step as compiled loops: every thread of a team walks the same phases and shares their tasks.

A phase is a list of independent tasks (panels of 64 outputs, rows, or a row's four heads); it ends
when all its tasks are done. Which thread runs a task changes no result. The number of tasks of a
phase follows from the job alone, so a thread that comes late finds the phases over and catches up.

Every sum over inputs, keys or experts runs in an order that depends on nothing but the row itself,
which makes a row's bits independent of the other rows, of their number and of the threads.

Source of the mathematics: DeepSeek-V4 report; the plain torch model is the definition.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types

from paceline.ops.numba_cpu.layout import Control, Job, Kind, Layer
from paceline.ops.numba_cpu.simd import (
    BF16,
    FP4,
    FP4_BLOCK_BYTES,
    FP32,
    MOST_FP4_ROWS,
    MOST_ROWS,
    atomic_add,
    atomic_cas,
    atomic_get,
    dot_4x4,
    fix_32,
    kernel,
    ld_f32,
    ld_i64,
    ld_u8,
    ld_u16,
    ld_u32,
    pause,
    row_times_small,
    rows_times_panel,
    sinkhorn_4x4,
    st_f32,
    st_i64,
    st_u8,
    st_u16,
    st_u32,
    two_times_small,
    v_add,
    v_div,
    v_exp,
    v_fma,
    v_ld,
    v_ld_bf16,
    v_log,
    v_max,
    v_mul,
    v_relu,
    v_set,
    v_sigmoid,
    v_softplus,
    v_sqrt,
    v_st,
    v_st_quarters,
    v_sub,
    v_swap_pairs,
    v_swiglu,
    v_top,
    v_total,
    weigh_4x16,
    weigh_4x64,
)

__all__ = ["pack_entry", "step_entry"]

_log = logging.getLogger(__name__)

# Python floats would make the arithmetic double.
_ZERO: Any = np.float32(0)
_ONE: Any = np.float32(1)
_TWO: Any = np.float32(2)
_LOWEST: Any = np.float32(-np.inf)
_EAGER_SPINS = 64
_SPINS = 2000
_IDLE_SPINS = 100_000
_OPEN = 256

if sys.platform == "win32":

    @kernel
    def _give_way() -> None:
        pause()

else:
    _external: Any = types.ExternalFunction
    _give_way = _external("sched_yield", types.int32())


# ------------------------------------------------------------------------------------- sharing


@kernel
def _claim(control: int, end: int, threads: int) -> int:
    """A task of the phase that ends at ticket `end`, or -1 where none is left."""
    if threads == 1:
        ticket = ld_i64(control, Control.TICKET)
        if ticket >= end:
            return -1
        st_i64(control, Control.TICKET, ticket + 1)
        return ticket
    place = control + 8 * Control.TICKET
    while True:
        ticket = atomic_get(place)
        if ticket >= end:
            return -1
        if atomic_cas(place, ticket, ticket + 1) == ticket:
            return ticket


@kernel
def _settle(control: int, end: int, done: int, threads: int) -> None:
    """Report `done` tasks and wait until all up to `end` are."""
    if threads == 1:
        return
    place = control + 8 * Control.DONE
    if done:
        atomic_add(place, done)
    spins = 0
    while atomic_get(place) < end:
        spins += 1
        if spins > _SPINS:
            _give_way()
        elif spins > _EAGER_SPINS:
            pause()


# ------------------------------------------------------------------------------- small pieces


@kernel
def _rms_scale(x: int, width: int, eps: float) -> float:
    total = v_set(_ZERO)
    for c in range(0, width, 16):
        v = v_ld(x, c)
        total = v_fma(v, v, total)
    scale: float = _ONE / math.sqrt(v_total(total) / np.float32(width) + eps)
    return scale


@kernel
def _normed(x: int, weight: int, width: int, eps: float, out: int) -> None:
    scale = v_set(_rms_scale(x, width, eps))
    for c in range(0, width, 16):
        v_st(out, c, v_mul(v_mul(v_ld(x, c), scale), v_ld(weight, c)))


@kernel
def _turned(x: int, width: int, rope: int, angles: int) -> None:
    """Rotate the last `rope` channels in place; `angles` holds cosines, then signed sines."""
    last = x + 4 * (width - rope)
    for c in range(0, rope, 16):
        v = v_ld(last, c)
        turned = v_mul(v, v_ld(angles, c))
        v_st(last, c, v_fma(v_swap_pairs(v), v_ld(angles, rope + c), turned))


@kernel
def _copied(x: int, width: int, out: int) -> None:
    for c in range(0, width, 16):
        v_st(out, c, v_ld(x, c))


@kernel
def _summed(x: int, y: int, width: int, out: int) -> None:
    for c in range(0, width, 16):
        v_st(out, c, v_add(v_ld(x, c), v_ld(y, c)))


@kernel
def _angles(job: int, ratio: int, position: int) -> int:
    table = ld_i64(job, Job.ROPE_LONG) if ratio else ld_i64(job, Job.ROPE_PLAIN)
    return table + 8 * ld_i64(job, Job.ROPE) * position


@kernel
def _panel_bytes(form: int, inputs: int) -> int:
    if form == FP4:
        return inputs // 32 * FP4_BLOCK_BYTES
    return 256 * inputs if form == FP32 else 128 * inputs


@kernel
def _block(form: int, left: int) -> int:
    """How many of `left` rows to take together: blocks of nearly equal size."""
    most = MOST_FP4_ROWS if form == FP4 else MOST_ROWS
    blocks = (left + most - 1) // most
    return (left + blocks - 1) // blocks


@kernel
def _product(
    job: int,
    private: int,
    form: int,
    panel: int,
    x: int,
    stride: int,
    rows: int,
    inputs: int,
    out: int,
    out_stride: int,
    vectors: int,
) -> None:
    """One panel for all rows; the first `vectors` sixteens of its 64 outputs are stored."""
    tile = private + ld_i64(job, Job.P_TILE)
    iota = ld_i64(job, Job.IOTA)
    row = 0
    while row < rows:
        count = _block(form, rows - row)
        rows_times_panel(form, count, panel, x, stride, iota + 8 * row, inputs, tile, panel)
        for n in range(count):
            place = out + 4 * out_stride * (row + n)
            for v in range(vectors):
                v_st(place, 16 * v, v_ld(tile, 64 * n + 16 * v))
        row += count


# --------------------------------------------------------------------------- hyper-connections


@kernel
def _mix_segment(job: int, function: int, segment: int, row: int, count: int, parts: int) -> None:
    """Partial mixes of one or two rows from their 4 x 64 new stream values in `parts`."""
    rows = ld_i64(job, Job.ROWS)
    squares = ld_i64(job, Job.SQUARES)
    for n in range(count):
        total = v_set(_ZERO)
        for c in range(0, 256, 16):
            v = v_ld(parts, 256 * n + c)
            total = v_fma(v, v, total)
        st_f32(squares, segment * rows + row + n, v_total(total))
    panel = function + 4 * 256 * 32 * segment
    out = ld_i64(job, Job.MIXES) + 128 * (segment * rows + row)
    if count == 2:
        two_times_small(panel, parts, 256, 256, out)
    else:
        row_times_small(panel, parts, 256, 256, out)


@kernel
def _post_segment(job: int, private: int, function: int, segment: int) -> None:
    """Write 64 channels of all new streams from the layer's output, and their partial mixes."""
    rows = ld_i64(job, Job.ROWS)
    hidden = ld_i64(job, Job.HIDDEN)
    parts = private + ld_i64(job, Job.P_SEGMENT)
    row = 0
    while row < rows:
        count = min(2, rows - row)
        for n in range(count):
            coefs = ld_i64(job, Job.COEFS) + 128 * (row + n)
            o = ld_i64(job, Job.OUT) + 4 * (hidden * (row + n) + 64 * segment)
            x = ld_i64(job, Job.STREAMS) + 4 * (4 * hidden * (row + n) + 64 * segment)
            for c in range(0, 64, 16):
                vo = v_ld(o, c)
                x0, x1 = v_ld(x, c), v_ld(x, hidden + c)
                x2, x3 = v_ld(x, 2 * hidden + c), v_ld(x, 3 * hidden + c)
                for k in range(4):
                    new = v_mul(v_set(ld_f32(coefs, 20 + k)), vo)
                    new = v_fma(v_set(ld_f32(coefs, k)), x0, new)
                    new = v_fma(v_set(ld_f32(coefs, 4 + k)), x1, new)
                    new = v_fma(v_set(ld_f32(coefs, 8 + k)), x2, new)
                    new = v_fma(v_set(ld_f32(coefs, 12 + k)), x3, new)
                    v_st(x, k * hidden + c, new)
                    v_st(parts, 256 * n + 64 * k + c, new)
        _mix_segment(job, function, segment, row, count, parts)
        row += count


@kernel
def _mixed(job: int, affine: int, row: int, whole: bool, coefs: int) -> None:
    """Coefficients of a row from its partial mixes: 16 of comb, 4 of pre, 4 of post."""
    rows = ld_i64(job, Job.ROWS)
    hidden = ld_i64(job, Job.HIDDEN)
    floats = ld_i64(job, Job.FLOATS)
    mixes, squares = ld_i64(job, Job.MIXES), ld_i64(job, Job.SQUARES)
    comb, gates, total = v_set(_ZERO), v_set(_ZERO), _ZERO
    for segment in range(hidden // 64):
        place = 32 * (segment * rows + row)
        comb = v_add(comb, v_ld(mixes, place))
        gates = v_add(gates, v_ld(mixes, place + 16))
        total += ld_f32(squares, segment * rows + row)
    rho = v_set(_ONE / math.sqrt(total / np.float32(4 * hidden) + ld_f32(floats, 0)))
    eps = ld_f32(floats, 1)
    if whole:
        comb = v_fma(v_mul(comb, rho), v_ld(affine, 0), v_ld(affine, 32))
        v_st(coefs, 0, sinkhorn_4x4(comb, ld_i64(job, Job.SINKHORN), eps))
    gates = v_sigmoid(v_fma(v_mul(gates, rho), v_ld(affine, 16), v_ld(affine, 48)))
    v_st(coefs, 16, gates)
    for k in range(4):
        st_f32(coefs, 16 + k, ld_f32(coefs, 16 + k) + eps)
        st_f32(coefs, 20 + k, ld_f32(coefs, 20 + k) * _TWO)


@kernel
def _collapsed(job: int, row: int, coefs: int, weight: int, out: int) -> None:
    """Weighted sum of a row's streams, normed."""
    hidden = ld_i64(job, Job.HIDDEN)
    x = ld_i64(job, Job.STREAMS) + 16 * hidden * row
    p0, p1 = v_set(ld_f32(coefs, 16)), v_set(ld_f32(coefs, 17))
    p2, p3 = v_set(ld_f32(coefs, 18)), v_set(ld_f32(coefs, 19))
    for c in range(0, hidden, 16):
        u = v_mul(p0, v_ld(x, c))
        u = v_fma(p1, v_ld(x, hidden + c), u)
        u = v_fma(p2, v_ld(x, 2 * hidden + c), u)
        u = v_fma(p3, v_ld(x, 3 * hidden + c), u)
        v_st(out, c, u)
    _normed(out, weight, hidden, ld_f32(ld_i64(job, Job.FLOATS), 0), out)


@kernel
def _read_streams(job: int, affine: int, weight: int, row: int) -> int:
    """What a sub-layer reads of a row; returns where it lies."""
    coefs = ld_i64(job, Job.COEFS) + 128 * row
    out = ld_i64(job, Job.NORMED) + 4 * ld_i64(job, Job.HIDDEN) * row
    _mixed(job, affine, row, True, coefs)
    _collapsed(job, row, coefs, weight, out)
    return out


# ----------------------------------------------------------------------------------- attention


@kernel
def _ring_row(job: int, base: int, kind: int, slot: int, ring: int, row: int, width: int) -> int:
    return base + 4 * width * ((kind * ld_i64(job, Job.RING_SLOTS) + slot) * ring + row)


@kernel
def _write_row(job: int, layer: int, row: int, keys_only: bool) -> None:
    """Norm and rotate a row's key, norm its query latent, store its raw compressor rows."""
    eps = ld_f32(ld_i64(job, Job.FLOATS), 0)
    ratio, kind = ld_i64(layer, Layer.RATIO), ld_i64(layer, Layer.KIND_INDEX)
    width, rope = ld_i64(job, Job.HEAD_DIM), ld_i64(job, Job.ROPE)
    position = ld_i64(ld_i64(job, Job.POSITIONS), row)
    slot = ld_i64(ld_i64(job, Job.SLOTS), row)
    y = ld_i64(job, Job.PROJECTED) + 4 * ld_i64(job, Job.IN_STRIDE) * row
    ring = ld_i64(job, Job.RING)
    depth = ld_i64(layer, Layer.WINDOW_INDEX)
    out = _ring_row(job, ld_i64(job, Job.WINDOW_ROWS), depth, slot, ring, position % ring, width)
    _normed(y, ld_i64(layer, Layer.KV_NORM), width, eps, out)
    _turned(out, width, rope, _angles(job, ratio, position))
    if keys_only:
        return
    y += 4 * width
    latent = ld_i64(job, Job.Q_LORA)
    _normed(y, ld_i64(layer, Layer.Q_NORM), latent, eps, y)
    y += 4 * latent
    if ratio == 128:
        ring = ld_i64(job, Job.RING128)
        at = position % ring
        out = _ring_row(job, ld_i64(job, Job.RAW128_KV), kind, slot, ring, at, width)
        _copied(y, width, out)
        out = _ring_row(job, ld_i64(job, Job.RAW128_SCORE), kind, slot, ring, at, width)
        ape = ld_i64(layer, Layer.APE) + 4 * width * (position % 128)
        _summed(y + 4 * width, ape, width, out)
    elif ratio == 4:
        ring = ld_i64(job, Job.RING4)
        at = position % ring
        double = 2 * width
        out = _ring_row(job, ld_i64(job, Job.RAW4_KV), kind, slot, ring, at, double)
        _copied(y, double, out)
        out = _ring_row(job, ld_i64(job, Job.RAW4_SCORE), kind, slot, ring, at, double)
        ape = ld_i64(layer, Layer.APE) + 4 * double * (position % 4)
        _summed(y + 4 * double, ape, double, out)
        y += 8 * double
        double = 2 * ld_i64(job, Job.INDEX_DIM)
        out = _ring_row(job, ld_i64(job, Job.INDEX_RAW_KV), kind, slot, ring, at, double)
        _copied(y, double, out)
        out = _ring_row(job, ld_i64(job, Job.INDEX_RAW_SCORE), kind, slot, ring, at, double)
        ape = ld_i64(layer, Layer.INDEX_APE) + 4 * double * (position % 4)
        _summed(y + 4 * double, ape, double, out)


@kernel
def _pooled(
    kv: int, score: int, width: int, ring: int, first: int, count: int, overlap: bool, out: int
) -> None:
    """Per-channel softmax over `count` positions from `first`; negative positions do not exist.

    With `overlap` rows are twice as wide: the first half of the positions gives its first channels,
    the second half its last ones.
    """
    stride = 2 * width if overlap else width
    for c in range(0, width, 16):
        top = v_set(_LOWEST)
        for n in range(count):
            if first + n >= 0:
                at = stride * ((first + n) % ring) + c
                if overlap and n >= count // 2:
                    at += width
                top = v_max(top, v_ld(score, at))
        total, value = v_set(_ZERO), v_set(_ZERO)
        for n in range(count):
            if first + n >= 0:
                at = stride * ((first + n) % ring) + c
                if overlap and n >= count // 2:
                    at += width
                weight = v_exp(v_sub(v_ld(score, at), top))
                total = v_add(total, weight)
                value = v_fma(weight, v_ld(kv, at), value)
        v_st(out, c, v_div(value, total))


@kernel
def _close4(job: int, layer: int, n: int) -> None:
    """Complete one window of 4 tokens: its row for attention and its row for the indexer."""
    dest = ld_i64(ld_i64(job, Job.CLOSE4_DEST), n)
    if dest < 32:
        return  # A padded entry: block 0 is nobody's.
    slot = ld_i64(ld_i64(job, Job.CLOSE4_SLOTS), n)
    window = ld_i64(ld_i64(job, Job.CLOSE4_WINDOWS), n)
    eps = ld_f32(ld_i64(job, Job.FLOATS), 0)
    kind, rope = ld_i64(layer, Layer.KIND_INDEX), ld_i64(job, Job.ROPE)
    ring = ld_i64(job, Job.RING4)
    angles = _angles(job, 4, 4 * window)
    dest += kind * ld_i64(job, Job.POOL4)
    width = ld_i64(job, Job.HEAD_DIM)
    kv = _ring_row(job, ld_i64(job, Job.RAW4_KV), kind, slot, ring, 0, 2 * width)
    score = _ring_row(job, ld_i64(job, Job.RAW4_SCORE), kind, slot, ring, 0, 2 * width)
    out = ld_i64(job, Job.ROWS4) + 4 * width * dest
    _pooled(kv, score, width, ring, 4 * window - 4, 8, True, out)
    _normed(out, ld_i64(layer, Layer.POOL_NORM), width, eps, out)
    _turned(out, width, rope, angles)
    width = ld_i64(job, Job.INDEX_DIM)
    kv = _ring_row(job, ld_i64(job, Job.INDEX_RAW_KV), kind, slot, ring, 0, 2 * width)
    score = _ring_row(job, ld_i64(job, Job.INDEX_RAW_SCORE), kind, slot, ring, 0, 2 * width)
    out = ld_i64(job, Job.INDEX4) + 4 * width * dest
    _pooled(kv, score, width, ring, 4 * window - 4, 8, True, out)
    _normed(out, ld_i64(layer, Layer.INDEX_NORM), width, eps, out)
    _turned(out, width, rope, angles)


@kernel
def _close128(job: int, layer: int, n: int) -> None:
    """Complete one window of 128 tokens."""
    dest = ld_i64(ld_i64(job, Job.CLOSE128_DEST), n)
    if dest < 1:
        return
    slot = ld_i64(ld_i64(job, Job.CLOSE128_SLOTS), n)
    window = ld_i64(ld_i64(job, Job.CLOSE128_WINDOWS), n)
    kind, width = ld_i64(layer, Layer.KIND_INDEX), ld_i64(job, Job.HEAD_DIM)
    ring = ld_i64(job, Job.RING128)
    kv = _ring_row(job, ld_i64(job, Job.RAW128_KV), kind, slot, ring, 0, width)
    score = _ring_row(job, ld_i64(job, Job.RAW128_SCORE), kind, slot, ring, 0, width)
    out = ld_i64(job, Job.ROWS128) + 4 * width * (kind * ld_i64(job, Job.POOL128) + dest)
    _pooled(kv, score, width, ring, 128 * window, 128, False, out)
    _normed(out, ld_i64(layer, Layer.POOL_NORM), width, ld_f32(ld_i64(job, Job.FLOATS), 0), out)
    _turned(out, width, ld_i64(job, Job.ROPE), _angles(job, 128, 128 * window))


@kernel
def _row4(job: int, table: int, row: int) -> int:
    return 32 * ld_i64(table, row // 32) + row % 32


@kernel
def _ordered(scores: int, row: int) -> int:
    """A float's bits as an unsigned number that rises with it."""
    bits = ld_u32(scores, row)
    return bits ^ 0xFFFFFFFF if bits & 0x80000000 else bits ^ 0x80000000


@kernel
def _take_best(scores: int, count: int, wanted: int, histogram: int, out: int) -> None:
    """The `wanted` best of `count` rows, in rising order; ties go to the lower row."""
    prefix, mask, left = 0, 0, wanted
    for shift in (24, 16, 8, 0):
        for n in range(256):
            st_i64(histogram, n, 0)
        for row in range(count):
            bits = _ordered(scores, row)
            if bits & mask == prefix:
                bucket = (bits >> shift) & 255
                st_i64(histogram, bucket, ld_i64(histogram, bucket) + 1)
        bucket = 255
        while bucket > 0 and ld_i64(histogram, bucket) < left:
            left -= ld_i64(histogram, bucket)
            bucket -= 1
        prefix |= bucket << shift
        mask |= 255 << shift
    taken = 0
    for row in range(count):
        bits = _ordered(scores, row)
        if bits > prefix or (bits == prefix and left > 0):
            if bits == prefix:
                left -= 1
            if taken < wanted:
                st_i64(out, taken, row)
                taken += 1


@kernel
def _select(job: int, private: int, layer: int, row: int) -> None:
    """Score a row's visible compressed rows and note the best, where there are too many."""
    position = ld_i64(ld_i64(job, Job.POSITIONS), row)
    visible, wanted = (position + 1) // 4, ld_i64(job, Job.INDEX_TOPK)
    if visible <= wanted:
        return
    heads, width = ld_i64(job, Job.INDEX_HEADS), ld_i64(job, Job.INDEX_DIM)
    head_dim, latent = ld_i64(job, Job.HEAD_DIM), ld_i64(job, Job.Q_LORA)
    q = ld_i64(job, Job.INDEX_QUERIES) + 4 * heads * width * row
    angles = _angles(job, 4, position)
    for h in range(heads):
        _turned(q + 4 * width * h, width, ld_i64(job, Job.ROPE), angles)
    gates = ld_i64(job, Job.PROJECTED) + 4 * (
        ld_i64(job, Job.IN_STRIDE) * row + 5 * head_dim + latent + 4 * width
    )
    scale = ld_f32(ld_i64(job, Job.FLOATS), 5)
    slot = ld_i64(ld_i64(job, Job.SLOTS), row)
    table = ld_i64(job, Job.TABLES) + 8 * ld_i64(job, Job.TABLE_STRIDE) * slot
    base = ld_i64(job, Job.INDEX4) + 4 * width * (
        ld_i64(layer, Layer.KIND_INDEX) * ld_i64(job, Job.POOL4)
    )
    scores = private + ld_i64(job, Job.P_SCORES)
    tile = private + ld_i64(job, Job.P_TILE)
    last = visible - 1
    for first in range(0, visible, 4):
        k0 = base + 4 * width * _row4(job, table, first)
        k1 = base + 4 * width * _row4(job, table, min(first + 1, last))
        k2 = base + 4 * width * _row4(job, table, min(first + 2, last))
        k3 = base + 4 * width * _row4(job, table, min(first + 3, last))
        total = v_set(_ZERO)
        for h in range(0, heads, 4):
            dots = v_relu(dot_4x4(q + 4 * width * h, width, k0, k1, k2, k3, width))
            for n in range(4):
                gate = ld_f32(gates, h + n) * scale
                for k in range(4):
                    st_f32(tile, 4 * n + k, gate)
            total = v_fma(dots, v_ld(tile, 0), total)
        v_st(tile, 0, total)
        for k in range(4):
            low = ld_f32(tile, k) + ld_f32(tile, 4 + k)
            high = ld_f32(tile, 8 + k) + ld_f32(tile, 12 + k)
            st_f32(scores, first + k, low + high)
    _take_best(
        scores,
        visible,
        wanted,
        private + ld_i64(job, Job.P_HISTOGRAM),
        ld_i64(job, Job.SELECTED) + 8 * wanted * row,
    )


@kernel
def _list_keys(job: int, layer: int, row: int, keys: int) -> int:
    """Addresses of the keys a row sees, oldest window key first; returns how many."""
    ratio, kind = ld_i64(layer, Layer.RATIO), ld_i64(layer, Layer.KIND_INDEX)
    width, ring = ld_i64(job, Job.HEAD_DIM), ld_i64(job, Job.RING)
    position = ld_i64(ld_i64(job, Job.POSITIONS), row)
    slot = ld_i64(ld_i64(job, Job.SLOTS), row)
    first = max(position - ld_i64(job, Job.WINDOW) + 1, 0)
    floors = ld_i64(job, Job.FIRST)
    if floors:
        first = min(max(first, ld_i64(floors, row)), position)
    depth = ld_i64(layer, Layer.WINDOW_INDEX)
    base = _ring_row(job, ld_i64(job, Job.WINDOW_ROWS), depth, slot, ring, 0, width)
    at, count = first % ring, 0
    for _ in range(first, position + 1):
        st_i64(keys, count, base + 4 * width * at)
        count += 1
        at += 1
        if at == ring:
            at = 0
    table = ld_i64(job, Job.TABLES) + 8 * ld_i64(job, Job.TABLE_STRIDE) * slot
    if ratio == 128:
        base = ld_i64(job, Job.ROWS128) + 4 * width * kind * ld_i64(job, Job.POOL128)
        for w in range((position + 1) // 128):
            st_i64(keys, count, base + 4 * width * ld_i64(table, w))
            count += 1
    elif ratio == 4:
        base = ld_i64(job, Job.ROWS4) + 4 * width * kind * ld_i64(job, Job.POOL4)
        visible, wanted = (position + 1) // 4, ld_i64(job, Job.INDEX_TOPK)
        if visible <= wanted:
            for w in range(visible):
                st_i64(keys, count, base + 4 * width * _row4(job, table, w))
                count += 1
        else:
            chosen = ld_i64(job, Job.SELECTED) + 8 * wanted * row
            for n in range(wanted):
                w = ld_i64(chosen, n)
                st_i64(keys, count, base + 4 * width * _row4(job, table, w))
                count += 1
    return count


@kernel
def _attend(job: int, private: int, layer: int, row: int, group: int) -> None:
    """Four heads of a row: norm and rotate queries, attend, undo the rotation."""
    floats = ld_i64(job, Job.FLOATS)
    eps, scale = ld_f32(floats, 0), v_set(ld_f32(floats, 4))
    width, rope = ld_i64(job, Job.HEAD_DIM), ld_i64(job, Job.ROPE)
    place = 4 * width * (ld_i64(job, Job.HEADS) * row + 4 * group)
    q, out = ld_i64(job, Job.QUERIES) + place, ld_i64(job, Job.ATTENDED) + place
    position = ld_i64(ld_i64(job, Job.POSITIONS), row)
    angles = _angles(job, ld_i64(layer, Layer.RATIO), position)
    for h in range(4):
        head = q + 4 * width * h
        unit = v_set(_rms_scale(head, width, eps))
        for c in range(0, width, 16):
            v_st(head, c, v_mul(v_ld(head, c), unit))
        _turned(head, width, rope, angles)

    keys = private + ld_i64(job, Job.P_KEYS)
    logits, stride = private + ld_i64(job, Job.P_LOGITS), ld_i64(job, Job.P_LOGITS_STRIDE)
    count = _list_keys(job, layer, row, keys)
    padded = (count + 15) // 16 * 16
    for n in range(count, padded):
        st_i64(keys, n, ld_i64(keys, count - 1))
    for n in range(0, count, 4):
        k0, k1 = ld_i64(keys, n), ld_i64(keys, n + 1)
        k2, k3 = ld_i64(keys, n + 2), ld_i64(keys, n + 3)
        dots = dot_4x4(q, width, k0, k1, k2, k3, width)
        v_st_quarters(logits, n, stride, v_mul(dots, scale))

    for h in range(4):
        weights = logits + 4 * stride * h
        for n in range(count, padded):
            st_f32(weights, n, _LOWEST)
        sink = ld_f32(ld_i64(layer, Layer.SINK), 4 * group + h)
        best = v_set(sink)
        for n in range(0, padded, 16):
            best = v_max(best, v_ld(weights, n))
        best = v_set(v_top(best))
        total = v_set(_ZERO)
        for n in range(0, padded, 16):
            v = v_exp(v_sub(v_ld(weights, n), best))
            v_st(weights, n, v)
            total = v_add(total, v)
        whole = v_total(total) + v_top(v_exp(v_sub(v_set(sink), best)))
        share = v_set(_ONE / whole)
        for n in range(0, padded, 16):
            v_st(weights, n, v_mul(v_ld(weights, n), share))

    c = 0
    while c + 64 <= width:
        weigh_4x64(keys, count, logits, stride, c, out, width)
        c += 64
    while c < width:
        weigh_4x16(keys, count, logits, stride, c, out, width)
        c += 16
    for h in range(4):
        last = out + 4 * (width * (h + 1) - rope)
        for c in range(0, rope, 16):
            v = v_ld(last, c)
            turned = v_mul(v_swap_pairs(v), v_ld(angles, rope + c))
            v_st(last, c, v_sub(v_mul(v, v_ld(angles, c)), turned))


# ------------------------------------------------------------------------------------- experts


@kernel
def _route(job: int, private: int, layer: int, row: int, x: int) -> None:
    """Choose a row's experts and their shares; a row of NaN takes the first ones."""
    hidden, experts = ld_i64(job, Job.HIDDEN), ld_i64(job, Job.EXPERTS)
    picks = ld_i64(job, Job.PICKS)
    scores = private + ld_i64(job, Job.P_SCORES)
    padded = (experts + 31) // 32 * 32
    gate = ld_i64(layer, Layer.GATE)
    for first in range(0, padded, 32):
        row_times_small(gate + 4 * hidden * first, x, hidden, hidden, scores + 4 * first)
    for e in range(0, padded, 16):
        v_st(scores, e, v_sqrt(v_softplus(v_ld(scores, e))))
    chosen = ld_i64(job, Job.CHOSEN) + 8 * picks * row
    shares = ld_i64(job, Job.SHARES) + 4 * picks * row
    table = ld_i64(layer, Layer.TABLE)
    if table:
        token = ld_i64(ld_i64(job, Job.IDS), row)
        token = min(max(token, 0), ld_i64(job, Job.VOCAB) - 1)
        for n in range(picks):
            st_i64(chosen, n, ld_i64(table, picks * token + n))
    else:
        biased = scores + 4 * padded
        bias = ld_i64(layer, Layer.BIAS)
        for e in range(0, padded, 16):
            v_st(biased, e, v_add(v_ld(scores, e), v_ld(bias, e)))
        for n in range(picks):
            best = -1
            most = _ZERO
            for e in range(experts):
                taken = False
                for m in range(n):
                    taken = taken or ld_i64(chosen, m) == e
                if not taken:
                    value = ld_f32(biased, e)
                    if best < 0 or value > most:
                        best, most = e, value
            st_i64(chosen, n, best)
    total = _ZERO
    for n in range(picks):
        total += ld_f32(scores, ld_i64(chosen, n))
    scale = ld_f32(ld_i64(job, Job.FLOATS), 2)
    for n in range(picks):
        st_f32(shares, n, ld_f32(scores, ld_i64(chosen, n)) / total * scale)


@kernel
def _group(job: int, private: int) -> None:
    """Sort (row, expert) pairs by expert, rows rising; each thread keeps its own list.

    COUNTS becomes [experts + 1] starts, then the list of experts in use, then their number.
    """
    rows, picks = ld_i64(job, Job.ROWS), ld_i64(job, Job.PICKS)
    experts = ld_i64(job, Job.EXPERTS)
    chosen, shares = ld_i64(job, Job.CHOSEN), ld_i64(job, Job.SHARES)
    starts = private + ld_i64(job, Job.P_COUNTS)
    used = starts + 8 * (experts + 1)
    order, weights = private + ld_i64(job, Job.P_ORDER), private + ld_i64(job, Job.P_WEIGHTS)
    for e in range(experts + 1):
        st_i64(starts, e, 0)
    for n in range(rows * picks):
        e = ld_i64(chosen, n) + 1
        st_i64(starts, e, ld_i64(starts, e) + 1)
    active = 0
    for e in range(experts):
        size = ld_i64(starts, e + 1)
        if size:
            st_i64(used, active, e)
            active += 1
        st_i64(starts, e + 1, size + ld_i64(starts, e))
    st_i64(used, experts, active)
    for n in range(rows * picks):
        e = ld_i64(chosen, n)
        at = ld_i64(starts, e)
        st_i64(order, at, n // picks)
        st_f32(weights, at, ld_f32(shares, n))
        st_i64(starts, e, at + 1)
    for e in range(experts, 0, -1):
        st_i64(starts, e, ld_i64(starts, e - 1))
    st_i64(starts, 0, 0)


@kernel
def _up_panel(
    job: int,
    private: int,
    form: int,
    panel: int,
    ahead: int,
    rows: int,
    order: int,
    weights: int,
    fixed: bool,
    out: int,
    stride: int,
) -> None:
    """32 inner channels of one expert for its rows: gate and up products, clamp, SiLU, share."""
    hidden = ld_i64(job, Job.HIDDEN)
    x = ld_i64(job, Job.FIXED) if form == FP4 else ld_i64(job, Job.NORMED)
    limit = ld_f32(ld_i64(job, Job.FLOATS), 3)
    tile = private + ld_i64(job, Job.P_TILE)
    row = 0
    while row < rows:
        count = _block(form, rows - row)
        rows_times_panel(form, count, panel, x, hidden, order + 8 * row, hidden, tile, ahead)
        for n in range(count):
            place = out + 4 * stride * (row + n)
            for c in range(0, 32, 16):
                v = v_swiglu(v_ld(tile, 64 * n + c), v_ld(tile, 64 * n + 32 + c), limit)
                if weights:
                    v = v_mul(v, v_set(ld_f32(weights, row + n)))
                v_st(tile if fixed else place, 64 * n + c if fixed else c, v)
            if fixed:
                fix_32(tile + 256 * n, place)
        row += count


@kernel
def _down_segment(job: int, private: int, layer: int, segment: int, threads: int) -> None:
    """64 channels of all rows' expert output: the shared expert, then the routed by number."""
    rows, hidden = ld_i64(job, Job.ROWS), ld_i64(job, Job.HIDDEN)
    experts, inner = ld_i64(job, Job.EXPERTS), ld_i64(job, Job.INNER)
    shared = ld_i64(job, Job.SHARED_INNER)
    tile = private + ld_i64(job, Job.P_TILE)
    out = ld_i64(job, Job.OUT) + 4 * 64 * segment
    form = ld_i64(layer, Layer.SHARED_DOWN_FORM)
    panel = ld_i64(layer, Layer.SHARED_DOWN) + segment * _panel_bytes(form, shared)
    x = ld_i64(job, Job.SHARED_INNERS)
    _product(job, private, form, panel, x, shared, rows, shared, out, hidden, 4)

    starts = private + ld_i64(job, Job.P_COUNTS)
    used = starts + 8 * (experts + 1)
    order, iota = private + ld_i64(job, Job.P_ORDER), ld_i64(job, Job.IOTA)
    form = ld_i64(layer, Layer.DOWN_FORM)
    size = _panel_bytes(form, inner)
    x = ld_i64(job, Job.INNERS)
    for n in range(ld_i64(used, experts)):
        e = ld_i64(used, n)
        panel = ld_i64(layer, Layer.DOWN) + (e * (hidden // 64) + segment) * size
        ahead = panel + size * threads  # What this thread takes next, if all go at one pace.
        at, end = ld_i64(starts, e), ld_i64(starts, e + 1)
        while at < end:
            count = _block(form, end - at)
            rows_times_panel(
                form, count, panel, x + 4 * inner * at, inner, iota, inner, tile, ahead
            )
            for m in range(count):
                place = out + 4 * hidden * ld_i64(order, at + m)
                for c in range(0, 64, 16):
                    v_st(place, c, v_add(v_ld(place, c), v_ld(tile, 64 * m + c)))
            at += count


# -------------------------------------------------------------------------------------- phases


@kernel
def _chunk(panels: int, rows: int, threads: int) -> int:
    """Panels to a task: few tasks where they are short, since taking one costs a tenth of one."""
    if threads == 1:
        return max(panels, 1)
    if rows <= 8 and panels <= 32:
        return max((panels + threads - 1) // threads, 1)
    return max(panels // (4 * threads), 1)


@kernel
def _read_phase(
    control: int,
    threads: int,
    base: int,
    job: int,
    private: int,
    affine: int,
    weight: int,
    layer: int,
) -> int:
    """Mix, collapse and norm every row; with a `layer`, route it too."""
    end = base + ld_i64(job, Job.ROWS)
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        x = _read_streams(job, affine, weight, task - base)
        if layer:
            _route(job, private, layer, task - base, x)
            if ld_i64(layer, Layer.UP_FORM) == FP4:
                width = 4 * ld_i64(job, Job.HIDDEN)
                out = ld_i64(job, Job.FIXED) + width * (task - base)
                for at in range(0, width, 128):
                    fix_32(x + at, out + at)
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    return end


@kernel
def _product_phase(
    control: int,
    threads: int,
    base: int,
    job: int,
    private: int,
    form: int,
    weight: int,
    x: int,
    x_stride: int,
    rows: int,
    inputs: int,
    out: int,
    out_stride: int,
    panels: int,
) -> int:
    """A whole product, panels shared out."""
    chunk = _chunk(panels, rows, threads)
    end = base + (panels + chunk - 1) // chunk
    size = _panel_bytes(form, inputs)
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        first = (task - base) * chunk
        for p in range(first, min(first + chunk, panels)):
            _product(
                job,
                private,
                form,
                weight + size * p,
                x,
                x_stride,
                rows,
                inputs,
                out + 256 * p,
                out_stride,
                4,
            )
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    return end


@kernel
def _write_phase(
    control: int, threads: int, base: int, job: int, layer: int, keys_only: bool
) -> int:
    end = base + ld_i64(job, Job.ROWS)
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        _write_row(job, layer, task - base, keys_only)
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    return end


@kernel
def _query_phase(
    control: int, threads: int, base: int, job: int, private: int, layer: int, indexed: bool
) -> int:
    """Close windows; queries of all heads, and of the indexer's where rows are chosen."""
    ratio, rows = ld_i64(layer, Layer.RATIO), ld_i64(job, Job.ROWS)
    head_dim, latent = ld_i64(job, Job.HEAD_DIM), ld_i64(job, Job.Q_LORA)
    width = ld_i64(job, Job.HEADS) * head_dim
    index_width = ld_i64(job, Job.INDEX_HEADS) * ld_i64(job, Job.INDEX_DIM)
    stride = ld_i64(job, Job.IN_STRIDE)
    x = ld_i64(job, Job.PROJECTED) + 4 * head_dim
    panels = (width + 63) // 64
    more = (index_width + 63) // 64 if indexed else 0
    closing = 0
    if ratio == 4:
        closing = ld_i64(job, Job.CLOSE4)
    elif ratio == 128:
        closing = ld_i64(job, Job.CLOSE128)
    chunk = _chunk(panels + more, rows, threads)
    end = base + closing + (panels + more + chunk - 1) // chunk
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        n = task - base
        if n < closing:
            if ratio == 4:
                _close4(job, layer, n)
            else:
                _close128(job, layer, n)
        else:
            first = (n - closing) * chunk
            for p in range(first, min(first + chunk, panels + more)):
                q, out, total = p, ld_i64(job, Job.QUERIES), width
                form, weight = ld_i64(layer, Layer.Q_B_FORM), ld_i64(layer, Layer.Q_B)
                if p >= panels:
                    q, out, total = p - panels, ld_i64(job, Job.INDEX_QUERIES), index_width
                    form, weight = ld_i64(layer, Layer.INDEX_B_FORM), ld_i64(layer, Layer.INDEX_B)
                _product(
                    job,
                    private,
                    form,
                    weight + q * _panel_bytes(form, latent),
                    x,
                    stride,
                    rows,
                    latent,
                    out + 256 * q,
                    total,
                    min(4, (total - 64 * q) // 16),
                )
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    return end


@kernel
def _select_phase(control: int, threads: int, base: int, job: int, private: int, layer: int) -> int:
    end = base + ld_i64(job, Job.ROWS)
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        _select(job, private, layer, task - base)
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    return end


@kernel
def _attend_phase(control: int, threads: int, base: int, job: int, private: int, layer: int) -> int:
    groups = ld_i64(job, Job.HEADS) // 4
    end = base + ld_i64(job, Job.ROWS) * groups
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        _attend(job, private, layer, (task - base) // groups, (task - base) % groups)
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    return end


@kernel
def _low_phase(control: int, threads: int, base: int, job: int, private: int, layer: int) -> int:
    """Each group of heads to its low-rank output."""
    groups, low = ld_i64(job, Job.GROUPS), ld_i64(job, Job.O_LORA)
    width = ld_i64(job, Job.HEADS) * ld_i64(job, Job.HEAD_DIM)
    inputs = width // groups
    form, weight = ld_i64(layer, Layer.O_A_FORM), ld_i64(layer, Layer.O_A)
    size = _panel_bytes(form, inputs)
    each = (low + 63) // 64
    chunk = _chunk(groups * each, ld_i64(job, Job.ROWS), threads)
    end = base + (groups * each + chunk - 1) // chunk
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        first = (task - base) * chunk
        for n in range(first, min(first + chunk, groups * each)):
            group, p = n // each, n % each
            _product(
                job,
                private,
                form,
                weight + size * n,
                ld_i64(job, Job.ATTENDED) + 4 * inputs * group,
                width,
                ld_i64(job, Job.ROWS),
                inputs,
                ld_i64(job, Job.LOW) + 4 * (low * group + 64 * p),
                low * groups,
                min(4, (low - 64 * p) // 16),
            )
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    return end


@kernel
def _output_phase(control: int, threads: int, base: int, job: int, private: int, layer: int) -> int:
    """Attention's output into the streams, and what the expert half will read of them."""
    hidden = ld_i64(job, Job.HIDDEN)
    inputs = ld_i64(job, Job.GROUPS) * ld_i64(job, Job.O_LORA)
    form, weight = ld_i64(layer, Layer.O_B_FORM), ld_i64(layer, Layer.O_B)
    size = _panel_bytes(form, inputs)
    end = base + hidden // 64
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        segment = task - base
        _product(
            job,
            private,
            form,
            weight + size * segment,
            ld_i64(job, Job.LOW),
            inputs,
            ld_i64(job, Job.ROWS),
            inputs,
            ld_i64(job, Job.OUT) + 256 * segment,
            hidden,
            4,
        )
        _post_segment(job, private, ld_i64(layer, Layer.FFN_FN), segment)
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    return end


@kernel
def _up_phase(control: int, threads: int, base: int, job: int, private: int, layer: int) -> int:
    """First half of all experts in use, and of the shared one."""
    rows, hidden = ld_i64(job, Job.ROWS), ld_i64(job, Job.HIDDEN)
    experts, inner = ld_i64(job, Job.EXPERTS), ld_i64(job, Job.INNER)
    shared = ld_i64(job, Job.SHARED_INNER)
    _group(job, private)
    starts = private + ld_i64(job, Job.P_COUNTS)
    used = starts + 8 * (experts + 1)
    order, weights = private + ld_i64(job, Job.P_ORDER), private + ld_i64(job, Job.P_WEIGHTS)
    # More experts than pairs cannot be in use; counting those that are would let a late thread,
    # whose list is stale, miscount the phase.
    most = min(experts, rows * ld_i64(job, Job.PICKS))
    panels, shared_panels = inner // 32, shared // 32
    # Whole experts where there are enough of them to share out.
    chunk = panels if most >= 2 * threads else min(panels, 4)
    each = (panels + chunk - 1) // chunk
    first_routed = (shared_panels + 3) // 4
    active = ld_i64(used, experts)
    up, up_form = ld_i64(layer, Layer.UP), ld_i64(layer, Layer.UP_FORM)
    down, down_form = ld_i64(layer, Layer.DOWN), ld_i64(layer, Layer.DOWN_FORM)
    size, down_size = _panel_bytes(up_form, hidden), _panel_bytes(down_form, inner)
    segments = hidden // 64
    end = base + first_routed + most * each
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        n = task - base
        if n < first_routed:
            form = ld_i64(layer, Layer.SHARED_UP_FORM)
            own = _panel_bytes(form, hidden)
            for p in range(4 * n, min(4 * n + 4, shared_panels)):
                _up_panel(
                    job,
                    private,
                    form,
                    ld_i64(layer, Layer.SHARED_UP) + own * p,
                    up + size * (ld_i64(used, 0) * panels + min(p, panels - 1)),
                    rows,
                    ld_i64(job, Job.IOTA),
                    0,
                    False,
                    ld_i64(job, Job.SHARED_INNERS) + 128 * p,
                    shared,
                )
        elif (n - first_routed) // each < active:
            m = (n - first_routed) // each
            e = ld_i64(used, m)
            at = ld_i64(starts, e)
            first = (n - first_routed) % each * chunk
            for p in range(first, min(first + chunk, panels)):
                # Memory is slower than the products: fetch the same panel of the next expert, at
                # the last one the first panels of the second half.
                if m + 1 < active:
                    ahead = up + size * (ld_i64(used, m + 1) * panels + p)
                else:
                    place = ld_i64(used, p % active) * segments + min(p // active, segments - 1)
                    ahead = down + down_size * place
                _up_panel(
                    job,
                    private,
                    up_form,
                    up + size * (e * panels + p),
                    ahead,
                    ld_i64(starts, e + 1) - at,
                    order + 8 * at,
                    weights + 4 * at,
                    down_form == FP4,
                    ld_i64(job, Job.INNERS) + 4 * (inner * at + 32 * p),
                    inner,
                )
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    return end


@kernel
def _down_phase(
    control: int, threads: int, base: int, job: int, private: int, layer: int, function: int
) -> int:
    """Second half of the experts into the streams, and what the next reader will mix."""
    end = base + ld_i64(job, Job.HIDDEN) // 64
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        _down_segment(job, private, layer, task - base, threads)
        _post_segment(job, private, function, task - base)
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    return end


@kernel
def _layer_phases(
    control: int, threads: int, base: int, job: int, private: int, layer: int, function: int
) -> int:
    """One block; `function` mixes its output streams for whatever comes next."""
    rows, hidden = ld_i64(job, Job.ROWS), ld_i64(job, Job.HIDDEN)
    base = _read_phase(
        control,
        threads,
        base,
        job,
        private,
        ld_i64(layer, Layer.ATTN_AFFINE),
        ld_i64(layer, Layer.ATTN_NORM),
        0,
    )
    keys_only = ld_i64(job, Job.KIND) == Kind.MTP_ROWS
    panels = ld_i64(layer, Layer.IN_PANELS)
    if keys_only:
        panels = (ld_i64(job, Job.HEAD_DIM) + 63) // 64
    base = _product_phase(
        control,
        threads,
        base,
        job,
        private,
        ld_i64(layer, Layer.IN_FORM),
        ld_i64(layer, Layer.IN),
        ld_i64(job, Job.NORMED),
        hidden,
        rows,
        hidden,
        ld_i64(job, Job.PROJECTED),
        ld_i64(job, Job.IN_STRIDE),
        panels,
    )
    base = _write_phase(control, threads, base, job, layer, keys_only)
    if keys_only:
        return base
    indexed = False
    if ld_i64(layer, Layer.RATIO) == 4:
        indexed = ld_i64(job, Job.CAP) // 4 > ld_i64(job, Job.INDEX_TOPK)
    base = _query_phase(control, threads, base, job, private, layer, indexed)
    if indexed:
        base = _select_phase(control, threads, base, job, private, layer)
    base = _attend_phase(control, threads, base, job, private, layer)
    base = _low_phase(control, threads, base, job, private, layer)
    base = _output_phase(control, threads, base, job, private, layer)
    base = _read_phase(
        control,
        threads,
        base,
        job,
        private,
        ld_i64(layer, Layer.FFN_AFFINE),
        ld_i64(layer, Layer.FFN_NORM),
        layer,
    )
    base = _up_phase(control, threads, base, job, private, layer)
    return _down_phase(control, threads, base, job, private, layer, function)


@kernel
def _gathered(job: int, token: int, first: int, width: int, out: int) -> None:
    """Channels first .. first + width of a token's embedding, as floats."""
    table, form = ld_i64(job, Job.EMBED), ld_i64(job, Job.EMBED_FORM)
    at = ld_i64(job, Job.HIDDEN) * token + first
    for c in range(0, width, 16):
        v_st(out, c, v_ld_bf16(table, at + c) if form == BF16 else v_ld(table, at + c))


@kernel
def _embed_phase(
    control: int, threads: int, base: int, job: int, private: int, function: int
) -> int:
    """Four equal streams of every row's embedding."""
    rows, hidden = ld_i64(job, Job.ROWS), ld_i64(job, Job.HIDDEN)
    ids, streams = ld_i64(job, Job.IDS), ld_i64(job, Job.STREAMS)
    most = ld_i64(job, Job.VOCAB) - 1
    parts = private + ld_i64(job, Job.P_SEGMENT)
    end = base + hidden // 64
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        segment = task - base
        for row in range(rows):
            token = min(max(ld_i64(ids, row), 0), most)
            _gathered(job, token, 64 * segment, 64, parts)
            for c in range(0, 64, 16):
                v = v_ld(parts, c)
                for k in range(4):
                    v_st(streams, hidden * (4 * row + k) + 64 * segment + c, v)
                    v_st(parts, 64 * k + c, v)
            _mix_segment(job, function, segment, row, 1, parts)
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    return end


@kernel
def _join_phases(
    control: int, threads: int, base: int, job: int, private: int, function: int
) -> int:
    """The draft block's input streams from embeddings and hidden streams."""
    rows, hidden = ld_i64(job, Job.ROWS), ld_i64(job, Job.HIDDEN)
    eps = ld_f32(ld_i64(job, Job.FLOATS), 0)
    embeds, hiddens = ld_i64(job, Job.EMBEDS_IN), ld_i64(job, Job.HIDDENS_IN)
    ids = ld_i64(job, Job.IDS_IN)
    normed, joined = ld_i64(job, Job.NORMED), ld_i64(job, Job.HEAD_IN)
    end = base + rows
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        row = task - base
        at = 4 * hidden * row
        embed = embeds + at
        if ids:
            embed = normed + at
            token = min(max(ld_i64(ids, row), 0), ld_i64(job, Job.VOCAB) - 1)
            _gathered(job, token, 0, hidden, embed)
        _normed(embed, ld_i64(job, Job.E_NORM), hidden, eps, normed + at)
        for k in range(4):
            at = 4 * hidden * (4 * row + k)
            _normed(hiddens + at, ld_i64(job, Job.H_NORM), hidden, eps, joined + at)
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)

    base = end
    end = base + hidden // 64
    done = 0
    parts = private + ld_i64(job, Job.P_SEGMENT)
    streams, out = ld_i64(job, Job.STREAMS), ld_i64(job, Job.OUT)
    task = _claim(control, end, threads)
    while task >= 0:
        segment = task - base
        at = 256 * segment
        form = ld_i64(job, Job.E_FORM)
        panel = ld_i64(job, Job.E_PROJ) + segment * _panel_bytes(form, hidden)
        _product(job, private, form, panel, normed, hidden, rows, hidden, out + at, hidden, 4)
        form = ld_i64(job, Job.H_FORM)
        panel = ld_i64(job, Job.H_PROJ) + segment * _panel_bytes(form, hidden)
        _product(
            job, private, form, panel, joined, hidden, 4 * rows, hidden, streams + at, hidden, 4
        )
        for row in range(rows):
            for k in range(4):
                x = streams + 4 * hidden * (4 * row + k) + at
                for c in range(0, 64, 16):
                    v = v_add(v_ld(out + 4 * hidden * row + at, c), v_ld(x, c))
                    v_st(x, c, v)
                    v_st(parts, 64 * k + c, v)
            _mix_segment(job, function, segment, row, 1, parts)
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    return end


@kernel
def _final_phase(control: int, threads: int, base: int, job: int, private: int, out: int) -> int:
    """Collapse and norm the rows asked for; copy the streams asked for."""
    hidden, wanted = ld_i64(job, Job.HIDDEN), ld_i64(job, Job.LOGITS)
    hiddens = ld_i64(job, Job.HIDDENS)
    logits_rows, hidden_rows = ld_i64(job, Job.LOGITS_ROWS), ld_i64(job, Job.HIDDEN_ROWS)
    streams, copies = ld_i64(job, Job.STREAMS), ld_i64(job, Job.HIDDENS_OUT)
    coefs = private + ld_i64(job, Job.P_TILE)
    end = base + wanted + hiddens
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        n = task - base
        if n < wanted:
            row = ld_i64(logits_rows, n)
            _mixed(job, ld_i64(job, Job.FINAL_AFFINE), row, False, coefs)
            _collapsed(job, row, coefs, ld_i64(job, Job.FINAL_NORM), out + 4 * hidden * n)
        else:
            row = ld_i64(hidden_rows, n - wanted)
            _copied(streams + 16 * hidden * row, 4 * hidden, copies + 16 * hidden * (n - wanted))
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    return end


@kernel
def _lead(logits: int, width: int, out: int) -> None:
    """Of up to 64 logits the largest and its place, the first of equals.

    A NaN or +inf among them makes it +inf: whoever judges then has to look at the row.
    """
    top, total = _LOWEST, _ZERO
    if width == 64:
        v0, v1, v2, v3 = v_ld(logits, 0), v_ld(logits, 16), v_ld(logits, 32), v_ld(logits, 48)
        top = v_top(v_max(v_max(v0, v1), v_max(v2, v3)))
        total = v_total(v_add(v_add(v0, v1), v_add(v2, v3)))
    else:
        for n in range(width):
            top = max(top, ld_f32(logits, n))
            total += ld_f32(logits, n)
    place = 0
    if total != total or top == -_LOWEST:
        top = -_LOWEST
    else:
        while ld_f32(logits, place) != top:
            place += 1
    st_f32(out, 0, top)
    st_u32(out, 1, place)


@kernel
def _head_phase(control: int, threads: int, base: int, job: int, private: int) -> int:
    """Logits of the rows asked for, and each row's pick: its largest, or -1 where none is finite.

    A NaN or an infinity makes the pick -1 too. Every thread works the picks out for itself.
    """
    rows, hidden, vocab = ld_i64(job, Job.LOGITS), ld_i64(job, Job.HIDDEN), ld_i64(job, Job.VOCAB)
    form, weight = ld_i64(job, Job.HEAD_FORM), ld_i64(job, Job.HEAD)
    x, out = ld_i64(job, Job.HEAD_IN), ld_i64(job, Job.LOGITS_OUT)
    leaders = ld_i64(job, Job.LEADERS)
    panels = (vocab + 63) // 64
    stride = 64 * panels
    size = _panel_bytes(form, hidden)
    chunk = _chunk(panels, rows, threads)
    end = base + (panels + chunk - 1) // chunk
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        first = (task - base) * chunk
        for p in range(first, min(first + chunk, panels)):
            panel, logits = weight + size * p, out + 256 * p
            _product(job, private, form, panel, x, hidden, rows, hidden, logits, stride, 4)
            width = min(64, vocab - 64 * p)
            for row in range(rows):
                _lead(logits + 4 * stride * row, width, leaders + 8 * (panels * row + p))
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    for row in range(rows):
        tops, best = leaders + 8 * panels * row, 0
        for p in range(1, panels):
            if ld_f32(tops, 2 * p) > ld_f32(tops, 2 * best):
                best = p
        top, pick = ld_f32(tops, 2 * best), -1
        if top - top == _ZERO:
            pick = 64 * best + ld_u32(tops, 2 * best + 1)
        st_i64(ld_i64(job, Job.BEST_IDS), row, pick)
    return end


@kernel
def _sum_up(logits: int, first: int, last: int, tile: int, out: int) -> None:
    """Of the scores first .. last - 1 of a row the largest, and the sum of exponentials below it.

    `tile` is memory for 16 floats.
    """
    whole = first + (last - first) // 16 * 16
    best = v_set(_LOWEST)
    for o in range(first, whole, 16):
        best = v_max(best, v_ld(logits, o))
    if whole < last:
        for n in range(16):
            st_f32(tile, n, ld_f32(logits, whole + n) if whole + n < last else _LOWEST)
        best = v_max(best, v_ld(tile, 0))
    top = v_top(best)
    # Where all are impossible their sum is 0, and a NaN among them still shows.
    below = v_set(top if top > _LOWEST else _ZERO)
    total = v_set(_ZERO)
    for o in range(first, whole, 16):
        total = v_add(total, v_exp(v_sub(v_ld(logits, o), below)))
    if whole < last:
        total = v_add(total, v_exp(v_sub(v_ld(tile, 0), below)))
    st_f32(out, 0, top)
    st_f32(out, 1, v_total(total))


@kernel
def _best_chunk(chunks: int, count: int) -> int:
    """The first of `_sum_up`'s chunks that has the largest score."""
    best = 0
    for n in range(1, count):
        if ld_f32(chunks, 2 * n) > ld_f32(chunks, 2 * best):
            best = n
    return best


@kernel
def _log_prob(chunks: int, count: int, top: float) -> float:
    """Log-probability of the row's largest score; -inf where a score is not finite."""
    total = _ZERO
    for n in range(count):
        below = v_exp(v_set(ld_f32(chunks, 2 * n) - top))
        total += ld_f32(chunks, 2 * n + 1) * v_top(below)
    # A NaN or an infinity anywhere makes the sum a NaN.
    log_prob: float = _LOWEST
    if total >= _ONE and top - top == _ZERO:
        log_prob = -v_top(v_log(v_set(total)))
    return log_prob


@kernel
def _score_phase(control: int, threads: int, base: int, job: int, private: int) -> int:
    """Logits of one row, and of each 512 the largest and the sum of exponentials below it."""
    hidden, limit = ld_i64(job, Job.HIDDEN), ld_i64(job, Job.LIMIT)
    form, weight = ld_i64(job, Job.HEAD_FORM), ld_i64(job, Job.HEAD)
    size = _panel_bytes(form, hidden)
    x, logits = ld_i64(job, Job.NORMED_OUT), ld_i64(job, Job.LOGITS_OUT)
    end = base + (limit + 511) // 512
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        first = 512 * (task - base)
        last = min(first + 512, limit)
        for o in range(first, last, 64):
            panel = weight + size * (o // 64)
            _product(job, private, form, panel, x, hidden, 1, hidden, logits + 4 * o, 64, 4)
        tile = private + ld_i64(job, Job.P_TILE)
        _sum_up(logits, first, last, tile, ld_i64(job, Job.CHUNKS) + 8 * (task - base))
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    return end


@kernel
def _pick(job: int) -> bool:
    """Note the best token of the scores and its log-probability; whether the chain goes on.

    Every thread works it out for itself, from memory that no later step of the chain reuses.
    """
    chunks = ld_i64(job, Job.CHUNKS)
    count = (ld_i64(job, Job.LIMIT) + 511) // 512
    best = _best_chunk(chunks, count)
    top = ld_f32(chunks, 2 * best)
    log_prob = _log_prob(chunks, count, top)
    token = -1
    if log_prob > _LOWEST:
        logits = ld_i64(job, Job.LOGITS_OUT)
        token = 512 * best
        while ld_f32(logits, token) != top:
            token += 1
        ids = ld_i64(job, Job.COLUMN_IDS)
        if ids:
            token = ld_i64(ids, token)
    st_i64(ld_i64(job, Job.TOKEN_OUT), 0, token)
    st_f32(ld_i64(job, Job.LOG_PROB_OUT), 0, log_prob)
    return token >= 0 and log_prob >= ld_f32(ld_i64(job, Job.FLOATS), 6)


@kernel
def _measure_phase(control: int, threads: int, base: int, job: int, private: int) -> int:
    """Log-probability of each row's largest score, by the sums of `_score_phase`."""
    limit, scores = ld_i64(job, Job.LIMIT), ld_i64(job, Job.M_X)
    stride, out = ld_i64(job, Job.M_X_STRIDE), ld_i64(job, Job.LOG_PROB_OUT)
    tile = private + ld_i64(job, Job.P_TILE)
    chunks = private + ld_i64(job, Job.P_SCORES)
    count = (limit + 511) // 512
    end = base + ld_i64(job, Job.ROWS)
    done = 0
    task = _claim(control, end, threads)
    while task >= 0:
        row = task - base
        for n in range(count):
            last = min(512 * (n + 1), limit)
            _sum_up(scores + 4 * stride * row, 512 * n, last, tile, chunks + 8 * n)
        top = ld_f32(chunks, 2 * _best_chunk(chunks, count))
        st_f32(out, row, _log_prob(chunks, count, top))
        done += 1
        task = _claim(control, end, threads)
    _settle(control, end, done, threads)
    return end


@kernel
def _run(control: int, threads: int, base: int, job: int, private: int) -> None:
    """All phases of a job, and of those that follow it in a chain."""
    while job:
        kind = ld_i64(job, Job.KIND)
        rows = ld_i64(job, Job.ROWS)
        table, layers = ld_i64(job, Job.LAYER_TABLE), ld_i64(job, Job.LAYERS)
        if kind == Kind.MEASURE:
            _measure_phase(control, threads, base, job, private)
            return
        if kind != Kind.MATMUL:
            first = ld_i64(table, Layer.ATTN_FN)
            if kind == Kind.TARGET:
                base = _embed_phase(control, threads, base, job, private, first)
            else:
                base = _join_phases(control, threads, base, job, private, first)
            for n in range(layers):
                layer = table + 8 * Layer.WORDS * n
                function = ld_i64(job, Job.FINAL_FN)
                if n + 1 < layers:
                    function = ld_i64(layer + 8 * Layer.WORDS, Layer.ATTN_FN)
                base = _layer_phases(control, threads, base, job, private, layer, function)
        if kind == Kind.TARGET or kind == Kind.MTP or kind == Kind.MTP_CHAIN:
            out = Job.HEAD_IN if kind == Kind.TARGET else Job.NORMED_OUT
            base = _final_phase(control, threads, base, job, private, ld_i64(job, out))
        if kind == Kind.MTP_CHAIN:
            base = _score_phase(control, threads, base, job, private)
            job = ld_i64(job, Job.NEXT) if _pick(job) else 0
            continue
        if kind == Kind.TARGET:
            _head_phase(control, threads, base, job, private)
        elif kind == Kind.MATMUL:
            _product_phase(
                control,
                threads,
                base,
                job,
                private,
                ld_i64(job, Job.M_FORM),
                ld_i64(job, Job.M_WEIGHT),
                ld_i64(job, Job.M_X),
                ld_i64(job, Job.M_X_STRIDE),
                rows,
                ld_i64(job, Job.M_INPUTS),
                ld_i64(job, Job.M_OUT),
                ld_i64(job, Job.M_OUT_STRIDE),
                ld_i64(job, Job.M_PANELS),
            )
        return


@kernel
def _open(control: int) -> None:
    """Post the job that the leading thread is about to run."""
    st_i64(control, Control.BASE, ld_i64(control, Control.TICKET))
    if ld_i64(control, Control.THREADS) > 1:
        atomic_add(control + 8 * Control.GATE, 65536 + _OPEN)


@kernel
def _close(control: int) -> None:
    """Let nobody join any more, and wait until nobody reads the job."""
    if ld_i64(control, Control.THREADS) == 1:
        return
    gate = control + 8 * Control.GATE
    atomic_add(gate, -_OPEN)
    spins = 0
    while atomic_get(gate) & 255:
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            _give_way()


@kernel
def _join(control: int, seen: int) -> int:
    """Join a job other than number `seen`: its number, -1 after a while without, -2 to stop."""
    gate = control + 8 * Control.GATE
    for _ in range(_IDLE_SPINS):
        if atomic_get(control + 8 * Control.STOP):
            return -2
        word = atomic_get(gate)
        number = word // 65536
        if word & _OPEN and number != seen and atomic_cas(gate, word, word + 1) == word:
            return number
        pause()
    return -1


# ------------------------------------------------------------------------------------- packing


@kernel
def _bits(row: int, k: int, half: int) -> int:
    return ld_u16(row, k) << 16 if half else ld_u32(row, k)


@kernel
def _pack_fp4(row: int, half: int, inputs: int, out: int, o: int) -> int:
    """One output's numbers as e2m1 codes under a power of two for each 32; 0 where they are not."""
    lane, v = o % 16, o // 16
    for block in range(inputs // 32):
        place = out + FP4_BLOCK_BYTES * block
        most = 0
        for n in range(32):
            most = max(most, _bits(row, 32 * block + n, half) & 0x7FFFFFFF)
        exponent = 127
        if most:
            exponent = (most >> 23) - 2  # The largest becomes 4 or 6.
            if exponent < 2 or exponent > 252:
                return 0
        st_u8(place, o, exponent - 1)  # Codes count halves.
        for n in range(32):
            bits = _bits(row, 32 * block + n, half)
            size = bits & 0x7FFFFFFF
            code = 0
            if size:
                if size & 0x3FFFFF:
                    return 0
                above, odd = (size >> 23) - exponent, (size >> 22) & 1
                if above >= 0:
                    code = 2 * above + 2 + odd
                elif above == -1 and not odd:
                    code = 1
                else:
                    return 0
            code |= (bits >> 31) << 3
            at = 64 + 64 * (2 * (n // 4) + v // 2) + 4 * lane + n % 4
            st_u8(place, at, ld_u8(place, at) | code << 4 * (v % 2))
    return 1


@kernel
def _pack_panels(form: int, rows: int, half: int, panels: int, inputs: int, out: int) -> int:
    """Lay out panels of 64 outputs; `rows` lists the address of each output's numbers, 0 for none.

    `half` says that the numbers are bf16, not fp32. `out` is zeroed memory. Returns 0 where the
    numbers are not e2m1 under powers of two, 1 otherwise.
    """
    size = _panel_bytes(form, inputs)
    for p in range(panels):
        for o in range(64):
            row = ld_i64(rows, 64 * p + o)
            if row == 0:
                continue
            place = out + size * p
            if form == FP4:
                if not _pack_fp4(row, half, inputs, place, o):
                    return 0
            elif form == FP32:
                for k in range(inputs):
                    st_u32(place, 64 * k + o, _bits(row, k, half))
            else:
                at = 2 * (16 * (o // 32) + o % 16) + o // 16 % 2
                for k in range(inputs):
                    st_u16(place, 64 * k + at, _bits(row, k, half) >> 16)
    return 1


def _stamp() -> str:
    """Names the sources the compiled code comes from; a cached copy of others is not used."""
    digest = hashlib.sha256()
    here = Path(__file__)
    for name in ("kernels.py", "layout.py", "simd.py"):
        digest.update(here.with_name(name).read_bytes())
    return digest.hexdigest()


def _compiled(function: Callable[..., int], arguments: int) -> Callable[..., int]:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    signature = types.int64(*[types.int64] * arguments)
    compile_: Any = numba.njit
    slow = threading.Timer(
        3.0, _log.warning, ["compiling the CPU kernels; once on this machine, within a minute"]
    )
    slow.daemon = True
    slow.start()
    try:
        made: Callable[..., int] = compile_(signature, cache=True, **options)(function)
    except RuntimeError:  # Nowhere to keep a compiled copy.
        made = compile_(signature, **options)(function)
    finally:
        slow.cancel()
    return made


@functools.cache
def step_entry() -> Callable[..., int]:
    """The compiled step: (control address, thread) -> 0, or 1 for a follower told to stop."""
    stamp = _stamp()

    def step(control: int, thread: int) -> int:
        if len(stamp) == 0:
            return -1
        seen = -1
        if thread == 0:
            _open(control)
        while True:
            if thread != 0:
                seen = _join(control, seen)
                if seen < 0:
                    return -1 - seen
            job = ld_i64(control, Control.JOB)
            private = ld_i64(job, Job.PRIVATE) + thread * ld_i64(job, Job.PRIVATE_BYTES)
            base = ld_i64(control, Control.BASE)
            _run(control, ld_i64(control, Control.THREADS), base, job, private)
            if thread == 0:
                _close(control)
                return 0
            atomic_add(control + 8 * Control.GATE, -1)

    return _compiled(step, 2)


@functools.cache
def pack_entry() -> Callable[..., int]:
    """The compiled packer; arguments as `pack_panels`."""
    stamp = _stamp()

    def pack(form: int, rows: int, half: int, panels: int, inputs: int, out: int) -> int:
        if len(stamp) == 0:
            return -1
        return _pack_panels(form, rows, half, panels, inputs, out)

    return _compiled(pack, 6)
