"""Sixteen floats as a value inside compiled loops, and loads and stores by address.

`Vec` is LLVM's <16 x float>; a target with narrower registers splits it. Every operation here has
one fixed order of additions, so a result depends on its inputs only. Addresses are int64; index
arguments count elements (4 bytes for f32 and words, 8 for i64). Nothing checks bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numba
from numba import types
from numba.core import cgutils as _numba_cgutils
from numba.core import datamodel as _numba_datamodel
from numba.extending import intrinsic

__all__ = [
    "BF16",
    "FP4",
    "FP4_BLOCK_BYTES",
    "FP32",
    "MOST_FP4_ROWS",
    "MOST_ROWS",
    "atomic_add",
    "atomic_cas",
    "atomic_get",
    "dot_4x4",
    "fix_32",
    "has_vnni",
    "kernel",
    "ld_f32",
    "ld_i64",
    "ld_u8",
    "ld_u16",
    "ld_u32",
    "pause",
    "row_times_small",
    "rows_times_panel",
    "sinkhorn_4x4",
    "st_f32",
    "st_i64",
    "st_u8",
    "st_u16",
    "st_u32",
    "two_times_small",
    "v_add",
    "v_div",
    "v_exp",
    "v_fma",
    "v_ld",
    "v_ld_bf16",
    "v_log",
    "v_max",
    "v_mul",
    "v_relu",
    "v_set",
    "v_sigmoid",
    "v_softplus",
    "v_sqrt",
    "v_st",
    "v_st_quarters",
    "v_sub",
    "v_swap_pairs",
    "v_swiglu",
    "v_top",
    "v_total",
    "weigh_4x16",
    "weigh_4x64",
]

# numba is typed in part only, and not in the same parts from one release to the next.
cgutils: Any = _numba_cgutils
_datamodel: Any = _numba_datamodel
_njit: Any = numba.njit

LANES = 16
FP32, BF16, FP4 = 0, 1, 2
"""How a packed matrix stores its numbers."""

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile on first call, without the interpreter lock and without exceptions."""
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    # Called from compiled code only: ways in from Python would double the time to compile.
    inner = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(F, _njit(**options, **inner)(function))


class _VecType(types.Type):
    pass


vec = cast(Any, _VecType)(name="PacelineVec16")

_i32, _i64, _f32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_vf = ir.VectorType(_f32, LANES)
_vi = ir.VectorType(_i32, LANES)


_datamodel.register_default(_VecType)(
    lambda manager, kind: _datamodel.models.PrimitiveModel(manager, kind, _vf)
)


# ---------------------------------------------------------------------------------- IR helpers


def _ptr(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(kind))


def _offset(builder: Any, address: Any, index: Any, size: int) -> Any:
    return builder.add(address, builder.mul(index, _i64(size)))


def _load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    value = builder.load(_ptr(builder, address, kind))
    value.align = align
    return value


def _store(builder: Any, value: Any, address: Any, align: int) -> None:
    builder.store(value, _ptr(builder, address, value.type)).align = align


def _splat(builder: Any, scalar: Any) -> Any:
    kind = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, _i32(0))
    mask = ir.Constant(_vi, [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), mask)


def _const(value: float) -> Any:
    return ir.Constant(_vf, [ir.Constant(_f32, value)] * LANES)


def _iconst(value: int) -> Any:
    return ir.Constant(_vi, [ir.Constant(_i32, value)] * LANES)


def _call(builder: Any, name: str, kind: Any, *args: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [a.type for a in args]), name
    )
    return builder.call(function, args)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", _vf, a, b, c)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_i32, len(lanes)), [ir.Constant(_i32, n) for n in lanes])
    return builder.shuffle_vector(a, b, mask)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """`b` where it is larger or `a` is a NaN's equal; a NaN in `a` stays."""
    return builder.select(builder.fcmp_ordered("<", a, b), b, a)


def _smaller(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), b, a)


_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest whole number in the low bits
_LOWEST = -87.0
_HIGHEST = 88.0


def _exp(builder: Any, x: Any) -> Any:
    """Exponential to about one unit in the last place; 0 below -87, exp(88) above 88."""
    clamped = _smaller(builder, _larger(builder, x, _const(_LOWEST)), _const(_HIGHEST))
    shifted = _fma(builder, clamped, _const(1.4426950408889634), _const(_ROUND))
    whole = builder.fsub(shifted, _const(_ROUND))
    r = _fma(builder, whole, _const(-_LN2_HIGH), clamped)
    r = _fma(builder, whole, _const(-_LN2_LOW), r)
    p = _const(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(builder, p, r, _const(c))
    p = _fma(builder, p, builder.fmul(r, r), builder.fadd(r, _const(1.0)))
    bits = builder.shl(builder.bitcast(shifted, _vi), _iconst(23))
    power = builder.bitcast(builder.add(bits, _iconst(0x3F800000)), _vf)
    value = builder.fmul(p, power)
    return builder.select(builder.fcmp_ordered("<", x, _const(_LOWEST)), _const(0.0), value)


def _log(builder: Any, x: Any) -> Any:
    """Natural logarithm of normal positive numbers, to about one unit in the last place."""
    bits = builder.bitcast(x, _vi)
    # Centre the mantissa on 1: [sqrt(1/2), sqrt(2)).
    moved = builder.sub(bits, _iconst(0x3F3504F3))
    exponent = builder.ashr(moved, _iconst(23))
    mantissa = builder.bitcast(builder.sub(bits, builder.shl(exponent, _iconst(23))), _vf)
    e = builder.sitofp(exponent, _vf)
    m = builder.fsub(mantissa, _const(1.0))
    p = _const(7.0376836292e-2)
    for c in (
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ):
        p = _fma(builder, p, m, _const(c))
    square = builder.fmul(m, m)
    y = builder.fmul(builder.fmul(p, m), square)
    y = _fma(builder, e, _const(_LN2_LOW), y)
    y = _fma(builder, square, _const(-0.5), y)
    return _fma(builder, e, _const(_LN2_HIGH), builder.fadd(m, y))


def _tree(builder: Any, v: Any, join: Callable[[Any, Any], Any]) -> Any:
    """All lanes joined, in every lane; halves first, the same order whatever the values."""
    for step in (8, 4, 2, 1):
        v = join(v, _shuffle(builder, v, v, [lane ^ step for lane in range(LANES)]))
    return v


# ------------------------------------------------------------------------- one-line operations


def _define(result: Any, arguments: tuple[Any, ...], emit: Callable[..., Any]) -> Any:
    """An intrinsic of fixed types; `emit(builder, *values)` writes it."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        out = emit(builder, *values)
        return context.get_dummy_value() if result is types.none else out

    made = (result(*arguments), codegen)
    by_count: list[Callable[..., Any]] = [
        lambda typingctx: made,
        lambda typingctx, a: made,
        lambda typingctx, a, b: made,
        lambda typingctx, a, b, c: made,
        lambda typingctx, a, b, c, d: made,
        lambda typingctx, a, b, c, d, e: made,
        lambda typingctx, a, b, c, d, e, f: made,
        lambda typingctx, a, b, c, d, e, f, g: made,
        lambda typingctx, a, b, c, d, e, f, g, h: made,
        lambda typingctx, a, b, c, d, e, f, g, h, i: made,
    ]
    return intrinsic(by_count[len(arguments)])


_I, _F, _V, _N = types.int64, types.float32, vec, types.none


def _reader(kind: Any, size: int, then: str = "") -> Callable[..., Any]:
    def emit(builder: Any, address: Any, index: Any) -> Any:
        value = _load(builder, _offset(builder, address, index, size), kind, size)
        return getattr(builder, then)(value, _i64) if then else value

    return emit


def _writer(size: int) -> Callable[..., Any]:
    def emit(builder: Any, address: Any, index: Any, value: Any) -> None:
        _store(builder, value, _offset(builder, address, index, size), size)

    return emit


def _narrow_writer(size: int) -> Callable[..., Any]:
    def emit(builder: Any, address: Any, index: Any, value: Any) -> None:
        narrow = builder.trunc(value, ir.IntType(8 * size))
        _store(builder, narrow, _offset(builder, address, index, size), size)

    return emit


def _load_vec(builder: Any, address: Any, index: Any) -> Any:
    return _load(builder, _offset(builder, address, index, 4), _vf, 4)


def _load_bf16(builder: Any, address: Any, index: Any) -> Any:
    half = ir.VectorType(ir.IntType(16), LANES)
    raw = _load(builder, _offset(builder, address, index, 2), half, 2)
    return builder.bitcast(builder.shl(builder.zext(raw, _vi), _iconst(16)), _vf)


def _store_vec(builder: Any, address: Any, index: Any, value: Any) -> None:
    _store(builder, value, _offset(builder, address, index, 4), 4)


def _store_quarters(builder: Any, address: Any, index: Any, stride: Any, value: Any) -> None:
    place = _offset(builder, address, index, 4)
    for quarter in range(4):
        part = _shuffle(builder, value, value, [4 * quarter + lane for lane in range(4)])
        _store(builder, part, place, 4)
        place = _offset(builder, place, stride, 4)


def _reduced(join: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    def emit(builder: Any, v: Any) -> Any:
        joined = _tree(builder, v, lambda a, b: join(builder, a, b))
        return builder.extract_element(joined, _i32(0))

    return emit


def _softplus(builder: Any, x: Any) -> Any:
    size = _call(builder, "llvm.fabs.v16f32", _vf, x)
    y = _exp(builder, builder.fneg(size))
    u = builder.fadd(y, _const(1.0))
    rounded = builder.fsub(u, _const(1.0))
    # log(u) y / (u - 1) repairs what rounding 1 + y lost.
    exact = builder.fdiv(builder.fmul(_log(builder, u), y), rounded)
    log1p = builder.select(builder.fcmp_ordered("==", rounded, _const(0.0)), y, exact)
    return builder.fadd(_larger(builder, x, _const(0.0)), log1p)


def _sigmoid(builder: Any, x: Any) -> Any:
    one = _const(1.0)
    return builder.fdiv(one, builder.fadd(one, _exp(builder, builder.fneg(x))))


def _swiglu(builder: Any, gate: Any, up: Any, limit: Any) -> Any:
    most = _splat(builder, limit)
    gate = _smaller(builder, gate, most)
    up = _larger(builder, _smaller(builder, up, most), builder.fneg(most))
    grown = builder.fadd(_exp(builder, builder.fneg(gate)), _const(1.0))
    return builder.fmul(builder.fdiv(gate, grown), up)


def _sinkhorn(builder: Any, logits: Any, rounds: Any, eps: Any) -> Any:
    small = _splat(builder, eps)

    def joined(v: Any, steps: tuple[int, int], join: Callable[[Any, Any], Any]) -> Any:
        for step in steps:
            v = join(v, _shuffle(builder, v, v, [lane ^ step for lane in range(LANES)]))
        return v

    def divided(v: Any, steps: tuple[int, int]) -> Any:
        return builder.fdiv(v, builder.fadd(joined(v, steps, builder.fadd), small))

    rows, columns = (1, 2), (4, 8)
    top = joined(logits, rows, lambda a, b: _larger(builder, a, b))
    v = _exp(builder, builder.fsub(logits, top))
    v = builder.fadd(builder.fdiv(v, joined(v, rows, builder.fadd)), small)
    state = cgutils.alloca_once_value(builder, divided(v, columns))
    with cgutils.for_range(builder, builder.sub(rounds, _i64(1))):
        builder.store(divided(divided(builder.load(state), rows), columns), state)
    return builder.load(state)


ld_f32: Callable[..., float] = _define(_F, (_I, _I), _reader(_f32, 4))
ld_i64: Callable[..., int] = _define(_I, (_I, _I), _reader(_i64, 8))
ld_u32: Callable[..., int] = _define(_I, (_I, _I), _reader(_i32, 4, "zext"))
ld_u16: Callable[..., int] = _define(_I, (_I, _I), _reader(ir.IntType(16), 2, "zext"))
ld_u8: Callable[..., int] = _define(_I, (_I, _I), _reader(ir.IntType(8), 1, "zext"))
st_u32 = _define(_N, (_I, _I, _I), _narrow_writer(4))
st_u16 = _define(_N, (_I, _I, _I), _narrow_writer(2))
st_u8 = _define(_N, (_I, _I, _I), _narrow_writer(1))
st_f32 = _define(_N, (_I, _I, _F), _writer(4))
st_i64 = _define(_N, (_I, _I, _I), _writer(8))
v_ld = _define(_V, (_I, _I), _load_vec)
v_ld_bf16 = _define(_V, (_I, _I), _load_bf16)
v_st = _define(_N, (_I, _I, _V), _store_vec)
v_st_quarters = _define(_N, (_I, _I, _I, _V), _store_quarters)
v_set = _define(_V, (_F,), _splat)
v_add = _define(_V, (_V, _V), lambda b, x, y: b.fadd(x, y))
v_sub = _define(_V, (_V, _V), lambda b, x, y: b.fsub(x, y))
v_mul = _define(_V, (_V, _V), lambda b, x, y: b.fmul(x, y))
v_div = _define(_V, (_V, _V), lambda b, x, y: b.fdiv(x, y))
v_fma = _define(_V, (_V, _V, _V), _fma)
v_max = _define(_V, (_V, _V), _larger)
v_relu = _define(_V, (_V,), lambda b, x: _larger(b, x, _const(0.0)))
v_log = _define(_V, (_V,), _log)
v_exp = _define(_V, (_V,), _exp)
v_sqrt = _define(_V, (_V,), lambda b, x: _call(b, "llvm.sqrt.v16f32", _vf, x))
v_softplus = _define(_V, (_V,), _softplus)
v_sigmoid = _define(_V, (_V,), _sigmoid)
v_swiglu = _define(_V, (_V, _V, _F), _swiglu)
v_swap_pairs = _define(
    _V, (_V,), lambda b, x: _shuffle(b, x, x, [lane ^ 1 for lane in range(LANES)])
)
v_total: Callable[..., float] = _define(_F, (_V,), _reduced(lambda b, x, y: b.fadd(x, y)))
v_top: Callable[..., float] = _define(_F, (_V,), _reduced(_larger))
sinkhorn_4x4 = _define(_V, (_V, _I, _F), _sinkhorn)


# ------------------------------------------------------------------------------------- threads


def _atomic_add(builder: Any, address: Any, value: Any) -> Any:
    return builder.atomic_rmw("add", _ptr(builder, address, _i64), value, "seq_cst")


def _atomic_cas(builder: Any, address: Any, old: Any, new: Any) -> Any:
    pair = builder.cmpxchg(_ptr(builder, address, _i64), old, new, "seq_cst", "seq_cst")
    return builder.extract_value(pair, 0)


def _pause(builder: Any) -> None:
    if _IS_X86:
        _call(builder, "llvm.x86.sse2.pause", ir.VoidType())


_IS_X86 = llvm.get_process_triple().startswith(("x86_64", "amd64", "i686"))

atomic_add: Callable[..., int] = _define(_I, (_I, _I), _atomic_add)
atomic_cas: Callable[..., int] = _define(_I, (_I, _I, _I), _atomic_cas)
atomic_get: Callable[..., int] = _define(
    _I, (_I,), lambda b, address: b.load_atomic(_ptr(b, address, _i64), "seq_cst", 8)
)
pause = _define(_N, (), _pause)


# ------------------------------------------------------------------------------------ products


def has_vnni() -> bool:
    """Whether code is made for a processor that multiplies bytes by fours in 512-bit registers."""
    needed = ("avx512f", "avx512bw", "avx512vnni")
    if not _IS_X86:
        return False
    asked: Any = numba.config
    if asked.CPU_NAME or asked.CPU_FEATURES:  # numba was told to compile for another.
        return all(f"+{name}" in (asked.CPU_FEATURES or "").split(",") for name in needed)
    features = llvm.get_host_cpu_features()
    return all(features.get(name, False) for name in needed)


# Twice the value of each e2m1 code, plus 12 to make it unsigned.
_E2M1_BYTES = [12 + sign * n for sign in (1, -1) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
_bytes = ir.VectorType(ir.IntType(8), 64)


def _decode_e2m1(builder: Any, codes: Any) -> Any:
    """Bytes of `_E2M1_BYTES` for the low four bits of every byte."""
    table = ir.Constant(_bytes, [ir.Constant(ir.IntType(8), n) for n in _E2M1_BYTES * 4])
    index = builder.bitcast(builder.and_(codes, _iconst(0x0F0F0F0F)), _bytes)
    return builder.bitcast(_call(builder, "llvm.x86.avx512.pshuf.b.512", _bytes, table, index), _vi)


def _dot_bytes(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Each lane of `total` plus four products of bytes."""
    return _call(builder, "llvm.x86.avx512.vpdpbusd.512", _vi, total, unsigned, signed)


def _word_halves(builder: Any, words: Any) -> tuple[Any, Any]:
    """Two bf16 per word, widened: the low half, the high half."""
    low = builder.bitcast(builder.shl(words, _iconst(16)), _vf)
    high = builder.bitcast(builder.and_(words, _iconst(0xFFFF0000)), _vf)
    return low, high


class _Function:
    """An LLVM function of int64 arguments, made once per module and merged where modules meet."""

    def __init__(self, name: str, count: int, result: Any, emit: Callable[..., Any]) -> None:
        self.name = f"paceline_{name}"
        self.kind = ir.FunctionType(result, [_i64] * count)
        self.emit = emit

    def call(self, builder: Any, *values: Any) -> Any:
        module = builder.module
        function = module.globals.get(self.name)
        if function is None:
            function = ir.Function(module, self.kind, self.name)
            function.linkage = "linkonce_odr"
            function.attributes.add("noinline")
            inner = ir.IRBuilder(function.append_basic_block())
            out = self.emit(inner, *function.args)
            if out is None:
                inner.ret_void()
            else:
                inner.ret(out)
        return builder.call(function, values)


def _zeros(builder: Any, count: int) -> list[Any]:
    return [cgutils.alloca_once_value(builder, _const(0.0)) for _ in range(count)]


def _accumulate(builder: Any, place: Any, a: Any, b: Any) -> None:
    builder.store(_fma(builder, a, b, builder.load(place)), place)


def _prefetch(builder: Any, address: Any) -> None:
    byte = ir.IntType(8)
    pointer = _ptr(builder, address, byte)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [pointer.type, _i32, _i32, _i32]),
        "llvm.prefetch.p0",
    )
    builder.call(function, [pointer, _i32(0), _i32(2), _i32(1)])


def _panel_rows(form: int, rows: int) -> Callable[..., Any]:
    """FMA of widened weights; every output's sum goes by rising input."""

    def emit(
        b: Any, w: Any, x: Any, stride: Any, index: Any, inputs: Any, out: Any, ahead: Any
    ) -> None:
        starts = _row_starts(b, rows, x, stride, index)
        sums = _zeros(b, 4 * rows)
        size = 256 if form == FP32 else 128
        with cgutils.for_range(b, b.udiv(inputs, _i64(_UNROLL))) as loop:
            place = b.add(w, b.mul(loop.index, _i64(size * _UNROLL)))
            for line in (0, 64):
                _prefetch(b, b.add(ahead, b.add(b.mul(loop.index, _i64(128)), _i64(line))))
            first = b.mul(loop.index, _i64(_UNROLL))
            for u in range(_UNROLL):
                parts = [
                    _load(b, b.add(place, _i64(at)), _vf if form == FP32 else _vi, 64)
                    for at in range(size * u, size * (u + 1), 64)
                ]
                if form == BF16:
                    parts = [half for words in parts for half in _word_halves(b, words)]
                for r in range(rows):
                    at = _offset(b, starts[r], b.add(first, _i64(u)), 4)
                    value = _splat(b, _load(b, at, _f32, 4))
                    for v in range(4):
                        _accumulate(b, sums[4 * r + v], parts[v], value)
        for n, total in enumerate(sums):
            _store(b, b.load(total), b.add(out, _i64(64 * n)), 4)

    return emit


def _row_starts(b: Any, rows: int, x: Any, stride: Any, index: Any) -> list[Any]:
    return [
        _offset(b, x, b.mul(_load(b, _offset(b, index, _i64(r), 8), _i64, 8), stride), 4)
        for r in range(rows)
    ]


def _panel_fp4(rows: int) -> Callable[..., Any]:
    """Whole-number products of e2m1 codes with rows in fixed point (see `fix_32`).

    Within 32 inputs sums are exact; block sums are added in fp32 by rising input.
    """

    def emit(
        b: Any, w: Any, x: Any, stride: Any, index: Any, inputs: Any, out: Any, ahead: Any
    ) -> None:
        starts = _row_starts(b, rows, x, stride, index)
        sums = _zeros(b, 4 * rows)
        totals = [cgutils.alloca_once(b, _vi) for _ in range(12 * rows)]
        with cgutils.for_range(b, b.udiv(inputs, _i64(32))) as loop:
            offset = b.mul(loop.index, _i64(FP4_BLOCK_BYTES))
            place, later = b.add(w, offset), b.add(ahead, offset)
            digits = [b.add(start, b.mul(loop.index, _i64(128))) for start in starts]
            for r in range(rows):
                for digit in range(3):
                    first = _load(b, b.add(digits[r], _i64(96 + 4 * digit)), _i32, 4)
                    for v in range(4):
                        b.store(_splat(b, first), totals[12 * r + 4 * digit + v])
            _prefetch(b, later)
            with cgutils.for_range(b, _i64(4)) as inner:
                at = b.mul(inner.index, _i64(256))
                for half in range(2):
                    weights = []
                    for pair in range(2):
                        line = b.add(at, _i64(64 + 128 * half + 64 * pair))
                        words = _load(b, b.add(place, line), _vi, 64)
                        _prefetch(b, b.add(later, line))
                        weights.append(_decode_e2m1(b, words))
                        weights.append(_decode_e2m1(b, b.lshr(words, _iconst(4))))
                    for r in range(rows):
                        for digit in range(3):
                            four = b.add(b.mul(inner.index, _i64(8)), _i64(32 * digit + 4 * half))
                            value = _load(b, b.add(digits[r], four), _i32, 4)
                            for v in range(4):
                                total = totals[12 * r + 4 * digit + v]
                                b.store(
                                    _dot_bytes(b, b.load(total), weights[v], _splat(b, value)),
                                    total,
                                )
            for v in range(4):
                kind = ir.VectorType(ir.IntType(8), LANES)
                raw = _load(b, b.add(place, _i64(16 * v)), kind, 16)
                scale = b.bitcast(b.shl(b.zext(raw, _vi), _iconst(23)), _vf)
                for r in range(rows):
                    low, middle, high = (
                        b.sitofp(b.load(totals[12 * r + 4 * digit + v]), _vf) for digit in range(3)
                    )
                    value = _fma(b, middle, _const(256.0), low)
                    value = _fma(b, high, _const(65536.0), value)
                    unit = _splat(b, _load(b, b.add(digits[r], _i64(108)), _f32, 4))
                    _accumulate(b, sums[4 * r + v], value, b.fmul(scale, unit))
        for n, total in enumerate(sums):
            _store(b, b.load(total), b.add(out, _i64(64 * n)), 4)

    return emit


_FIXED_MOST = 8355000.0  # Three digits reach 127 * 65536 + 127 * 256 + 127; rounding needs room.


def _fix_32(b: Any, x: Any, out: Any) -> None:
    parts = [_load(b, b.add(x, _i64(at)), _vf, 4) for at in (0, 64)]
    sizes = [b.and_(b.bitcast(v, _vi), _iconst(0x7FFFFFFF)) for v in parts]
    largest = _call(b, "llvm.umax.v16i32", _vi, *sizes)
    most = _call(b, "llvm.vector.reduce.umax.v16i32", _i32, largest)
    size = b.bitcast(most, _f32)
    tiny = b.icmp_unsigned("<", most, _i32(0x0DA24260))  # 1e-30
    finite = b.icmp_unsigned("<", most, _i32(0x7F800000))
    plain = b.and_(finite, b.not_(tiny))
    zero, nan = ir.Constant(_f32, 0.0), ir.Constant(_f32, float("nan"))
    whole = ir.Constant(_f32, _FIXED_MOST)
    by = b.select(plain, b.fdiv(whole, size), zero)
    unit = b.select(finite, b.select(tiny, zero, b.fdiv(size, whole)), nan)
    numbers = []
    for v in parts:
        scaled = _call(b, "llvm.rint.v16f32", _vf, b.fmul(v, _splat(b, by)))
        real = b.select(b.fcmp_ordered("==", scaled, scaled), scaled, _const(0.0))
        numbers.append(b.fptosi(real, _vi))
    narrow = ir.VectorType(ir.IntType(8), LANES)
    for digit in range(3):
        total = None
        for n, q in enumerate(numbers):
            low = b.trunc(q, narrow)
            _store(b, low, b.add(out, _i64(32 * digit + 16 * n)), 1)
            value = b.sext(low, _vi)
            total = value if total is None else b.add(total, value)
            numbers[n] = b.ashr(b.add(q, _iconst(128)), _iconst(8))
        added = _call(b, "llvm.vector.reduce.add.v16i32", _i32, total)
        _store(b, b.mul(added, _i32(-12)), b.add(out, _i64(96 + 4 * digit)), 4)
    _store(b, unit, b.add(out, _i64(108)), 4)


_UNROLL = 4
FP4_BLOCK_BYTES = 64 + 64 * 16
"""32 inputs of 64 outputs: 64 exponents, then codes by four inputs, 32 outputs, output, input."""
MOST_ROWS = 6
MOST_FP4_ROWS = 2
"""Rows whose sums fit the registers."""

_panel = {
    (form, rows): _Function(f"panel{form}_{rows}", 7, ir.VoidType(), _panel_rows(form, rows))
    for form in (FP32, BF16)
    for rows in range(1, MOST_ROWS + 1)
}
if has_vnni():
    for _rows in range(1, MOST_FP4_ROWS + 1):
        _panel[FP4, _rows] = _Function(f"panel4_{_rows}", 7, ir.VoidType(), _panel_fp4(_rows))
_fix = _Function("fix_32", 2, ir.VoidType(), _fix_32)


def _switch(builder: Any, form: Any, rows: Any, *values: Any) -> None:
    end = builder.append_basic_block()
    choice = builder.switch(builder.add(builder.mul(form, _i64(8)), rows), end)
    for (this_form, this_rows), function in _panel.items():
        block = builder.append_basic_block()
        choice.add_case(_i64(8 * this_form + this_rows), block)
        builder.position_at_end(block)
        function.call(builder, *values)
        builder.branch(end)
    builder.position_at_end(end)


def _small_rows(rows: int) -> Callable[..., Any]:
    def emit(b: Any, w: Any, x: Any, stride: Any, inputs: Any, out: Any) -> None:
        quarter = b.udiv(inputs, _i64(4))
        starts = [
            [
                _offset(b, x, b.add(b.mul(stride, _i64(r)), b.mul(quarter, _i64(q))), 4)
                for q in range(4)
            ]
            for r in range(rows)
        ]
        sums = _zeros(b, 8 * rows)
        with cgutils.for_range(b, quarter) as loop:
            place = b.add(w, b.mul(loop.index, _i64(512)))
            for q in range(4):
                weights = [_load(b, b.add(place, _i64(128 * q + 64 * v)), _vf, 64) for v in (0, 1)]
                for r in range(rows):
                    value = _splat(b, _load(b, _offset(b, starts[r][q], loop.index, 4), _f32, 4))
                    for v in (0, 1):
                        _accumulate(b, sums[8 * r + 2 * q + v], weights[v], value)
        for r in range(rows):
            for v in (0, 1):
                a, c, d, e = (b.load(sums[8 * r + 2 * q + v]) for q in range(4))
                total = b.fadd(b.fadd(a, c), b.fadd(d, e))
                _store(b, total, b.add(out, _i64(128 * r + 64 * v)), 4)

    return emit


_small1 = _Function("small_1", 5, ir.VoidType(), _small_rows(1))
_small2 = _Function("small_2", 5, ir.VoidType(), _small_rows(2))


def _transposed_total(builder: Any, vectors: list[Any]) -> Any:
    """Lane n of the result is the sum of vector n's lanes, by halves."""
    patterns = [
        ([*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]),
        (
            [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27],
            [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31],
        ),
        (
            [n for q in range(4) for n in (4 * q, 4 * q + 1, 16 + 4 * q, 17 + 4 * q)],
            [n for q in range(4) for n in (4 * q + 2, 4 * q + 3, 18 + 4 * q, 19 + 4 * q)],
        ),
        (
            [n for q in range(4) for n in (4 * q, 4 * q + 2, 16 + 4 * q, 18 + 4 * q)],
            [n for q in range(4) for n in (4 * q + 1, 4 * q + 3, 17 + 4 * q, 19 + 4 * q)],
        ),
    ]
    # Follow which vector each lane belongs to, so that the inputs can be ordered to come out right.
    owners: list[list[int]] = [[n] * LANES for n in range(LANES)]
    for first, _ in patterns:
        owners = [
            [(owners[n] + owners[n + 1])[lane] for lane in first] for n in range(0, len(owners), 2)
        ]
    level = [vectors[owners[0].index(n)] for n in range(LANES)]
    for first, second in patterns:
        level = [
            builder.fadd(
                _shuffle(builder, level[n], level[n + 1], first),
                _shuffle(builder, level[n], level[n + 1], second),
            )
            for n in range(0, len(level), 2)
        ]
    return level[0]


def _dots(b: Any, q: Any, stride: Any, k0: Any, k1: Any, k2: Any, k3: Any, width: Any) -> Any:
    sums = _zeros(b, 16)
    heads = [_offset(b, q, b.mul(stride, _i64(h)), 4) for h in range(4)]
    with cgutils.for_range(b, b.udiv(width, _i64(LANES))) as loop:
        at = b.mul(loop.index, _i64(4 * LANES))
        keys = [_load(b, b.add(k, at), _vf, 4) for k in (k0, k1, k2, k3)]
        for h in range(4):
            query = _load(b, b.add(heads[h], at), _vf, 4)
            for n in range(4):
                _accumulate(b, sums[4 * h + n], query, keys[n])
    return _transposed_total(b, [b.load(s) for s in sums])


def _weighted(vectors: int) -> Callable[..., Any]:
    def emit(
        b: Any, keys: Any, count: Any, weights: Any, stride: Any, at: Any, out: Any, step: Any
    ) -> None:
        sums = _zeros(b, 4 * vectors)
        places = [_offset(b, weights, b.mul(stride, _i64(h)), 4) for h in range(4)]
        with cgutils.for_range(b, count) as loop:
            key = _load(b, _offset(b, keys, loop.index, 8), _i64, 8)
            key = _offset(b, key, at, 4)
            parts = [_load(b, b.add(key, _i64(64 * v)), _vf, 4) for v in range(vectors)]
            for h in range(4):
                value = _splat(b, _load(b, _offset(b, places[h], loop.index, 4), _f32, 4))
                for v in range(vectors):
                    _accumulate(b, sums[vectors * h + v], parts[v], value)
        for h in range(4):
            place = _offset(b, out, b.add(b.mul(step, _i64(h)), at), 4)
            for v in range(vectors):
                _store(b, b.load(sums[vectors * h + v]), b.add(place, _i64(64 * v)), 4)

    return emit


_dot = _Function("dot_4x4", 7, _vf, _dots)
_weighted4 = _Function("weighted_4", 7, ir.VoidType(), _weighted(4))
_weighted1 = _Function("weighted_1", 7, ir.VoidType(), _weighted(1))

rows_times_panel = _define(_N, (_I,) * 9, _switch)
"""(form, rows, panel, x, x stride, row numbers, inputs, out [rows, 64], panel to fetch ahead).

Rows are floats, or for FP4 what `fix_32` makes of them, which takes the same room. Fetched ahead
is as much as an fp4 panel of as many inputs holds, the form that comes from memory.
"""
fix_32 = _define(_N, (_I, _I), _fix.call)
"""(32 floats, out 128 bytes): whole numbers to 23 bits of the largest, as three signed digits.

Bytes: low, middle and high digits (32 each), -12 times the sum of each (int32), the unit (f32),
which is NaN where a number is not finite.
"""
row_times_small = _define(_N, (_I,) * 5, _small1.call)
two_times_small = _define(_N, (_I,) * 5, _small2.call)
"""(panel of 32, x, x stride, inputs, out [rows, 32]), fp32; four partial sums by input quarter."""
dot_4x4 = _define(_V, (_I,) * 7, _dot.call)
"""(four queries, stride, four key addresses, width): lane 4 h + k is query h times key k."""
weigh_4x64 = _define(_N, (_I,) * 7, _weighted4.call)
weigh_4x16 = _define(_N, (_I,) * 7, _weighted1.call)
"""(key addresses, count, weights, stride, first channel, out, stride): sums over keys in order."""
