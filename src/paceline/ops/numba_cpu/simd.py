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
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import models, register_default
from numba.extending import intrinsic

__all__ = [
    "BF16",
    "FP4",
    "FP32",
    "add_i64",
    "attend_4x4",
    "cas_i64",
    "dot_4x4",
    "kernel",
    "ld_bf16",
    "ld_f32",
    "ld_i64",
    "ld_u16",
    "ld_u32",
    "load_acquire",
    "pause",
    "rows_times_panel",
    "rows_times_small",
    "sinkhorn_4x4",
    "st_f32",
    "st_i64",
    "v_add",
    "v_div",
    "v_exp",
    "v_fma",
    "v_get",
    "v_ld",
    "v_log1p_exp_neg_abs",
    "v_max",
    "v_min",
    "v_mul",
    "v_neg",
    "v_set",
    "v_sqrt",
    "v_st",
    "v_st4",
    "v_sub",
    "v_swap_pairs",
    "v_top",
    "v_total",
]

LANES = 16
FP32, BF16, FP4 = 0, 1, 2
"""How a packed matrix stores its numbers."""

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile on first call, without the interpreter lock and without exceptions."""
    return cast(F, njit(nogil=True, error_model="numpy", boundscheck=False)(function))


class _VecType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="PacelineVec16")


vec = _VecType()

_i32, _i64, _f32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_vf = ir.VectorType(_f32, LANES)
_vi = ir.VectorType(_i32, LANES)


class _VecModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _vf)


register_default(_VecType)(_VecModel)


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
    """exp to about one unit in the last place; 0 below -87, exp(88) above 88, NaN for NaN."""
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
    signature = result(*arguments)

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        out = emit(builder, *values)
        return context.get_dummy_value() if result is types.none else out

    names = [f"a{i}" for i in range(len(arguments))]
    scope: dict[str, Any] = {"signature": signature, "codegen": codegen}
    exec(f"def op(typingctx, {', '.join(names)}):\n    return signature, codegen\n", scope)
    return intrinsic(scope["op"])
