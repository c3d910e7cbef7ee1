"""The two block formats of the released DeepSeek-V4 weights, decoded exactly and encoded.

* **fp8**: e4m3 codes ``[out, in]`` and one power-of-two scale for every 128 x 128 block.
* **fp4**: two e2m1 codes a byte ``[out, in / 2]`` (low nibble: the even input) and one
  power-of-two scale for every 32 consecutive inputs of a row.

A scale is a ue8m0 byte ``b`` and stands for ``2 ** (b - 127)``; byte 255 is not a number. Scales
being powers of two, a decoded value has at most four significant bits, so decoding is exact in fp32
and, unless the exponent leaves the range, in bf16.

Source: DeepSeek-V4 report (mixed-precision storage of experts); the OCP microscaling formats
specification, version 1.0, for e2m1 and e8m0.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.types import CheckpointError, ConfigError

__all__ = [
    "FP4_BLOCK",
    "FP8_BLOCK",
    "decode_scales",
    "dequantize_fp4",
    "dequantize_fp8",
    "encode_scales",
    "fp4_scale_shape",
    "fp8_scale_shape",
    "quantize_fp4",
    "quantize_fp8",
]

FP8_BLOCK = 128
"""Rows and columns that share one scale in the fp8 format."""
FP4_BLOCK = 32
"""Consecutive inputs of one row that share one scale in the fp4 format."""

_NAN_SCALE = 255
_BIAS = 127
_E4M3_MAX = 448.0
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halfway points between neighbouring codes. A tie goes to the even code: upwards or downwards.
_E2M1_TIES_UP = (0.75, 1.75, 3.5)
_E2M1_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)


def _pair_table() -> np.ndarray:
    """Return ``[256]`` int32: a packed byte -> the bits of its two bf16 values, in memory order."""
    codes = torch.tensor([*_E2M1_VALUES, *(-value for value in _E2M1_VALUES)])
    values = codes.to(torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=1)
    return pairs.view(torch.int32).flatten().numpy()


_FP4_PAIRS = _pair_table()


def fp8_scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the scale's shape for an fp8 weight ``[out, in]``; edges count as whole blocks."""
    rows, columns = shape
    return -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)


def fp4_scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the scale's shape for an fp4 weight whose unpacked shape is ``[out, in]``.

    Raises:
        ConfigError: ``in`` is not a multiple of 32.
    """
    rows, columns = shape
    if columns % FP4_BLOCK:
        raise ConfigError(
            f"a weight of {columns} inputs was given to the fp4 format; a multiple of {FP4_BLOCK} "
            "is needed"
        )
    return rows, columns // FP4_BLOCK


def decode_scales(scale: Tensor) -> Tensor:
    """Turn ue8m0 bytes (uint8 or float8_e8m0fnu, any shape) into fp32 powers of two.

    Raises:
        CheckpointError: a byte is 255, which stands for no number.
    """
    exponent = scale.contiguous().view(torch.uint8)
    nans = int((exponent == _NAN_SCALE).sum())
    if nans:
        raise CheckpointError(f"{nans} of {exponent.numel()} block scales are NaN (byte 255)")
    bits = exponent.to(torch.int32) << 23
    # Byte 0 is 2 ** -127, which fp32 holds as a subnormal number.
    return torch.where(exponent == 0, 1 << 22, bits).view(torch.float32)


def encode_scales(exponent: Tensor) -> Tensor:
    """Turn whole exponents (any integer dtype, clamped to -127 ... 127) into ue8m0 bytes, uint8."""
    return (exponent.clamp(-_BIAS, _BIAS) + _BIAS).to(torch.uint8)


def dequantize_fp8(weight: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode e4m3 ``[out, in]`` with its ue8m0 scales ``[ceil(out/128), ceil(in/128)]``.

    Args:
        weight: float8_e4m3fn, or its bytes as uint8.
        scale: float8_e8m0fnu, or its bytes as uint8.
        dtype: of the result; fp32 is exact, bf16 is exact unless the exponent leaves its range.

    Returns:
        A new tensor ``[out, in]``.

    Raises:
        CheckpointError: a scale is NaN, or the shapes do not belong together.
    """
    expected = fp8_scale_shape(tuple(weight.shape))
    if tuple(scale.shape) != expected:
        raise CheckpointError(
            f"scales of shape {list(scale.shape)} were given for an fp8 weight of shape "
            f"{list(weight.shape)}; {list(expected)} is needed"
        )
    columns = weight.shape[1]
    values = weight.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    factors = decode_scales(scale).repeat_interleave(FP8_BLOCK, dim=1)[:, :columns]
    for block in range(expected[0]):
        start = block * FP8_BLOCK
        values[start : start + FP8_BLOCK] *= factors[block]
    return values.to(dtype)


def dequantize_fp4(packed: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode packed e2m1 ``[out, in / 2]`` with its ue8m0 scales ``[out, in / 32]``.

    Args:
        packed: int8 or uint8 on the CPU; the low nibble is the even input.
        scale: float8_e8m0fnu, or its bytes as uint8.
        dtype: of the result; bf16 is exact wherever fp32 is.

    Returns:
        A new tensor ``[out, in]``.

    Raises:
        CheckpointError: a scale is NaN, or the shapes do not belong together.
    """
    rows, half = packed.shape
    if (half * 2) % FP4_BLOCK or tuple(scale.shape) != (rows, half * 2 // FP4_BLOCK):
        raise CheckpointError(
            f"scales of shape {list(scale.shape)} were given for a packed fp4 weight of shape "
            f"{list(packed.shape)}; [out, in / {FP4_BLOCK}] for [out, in / 2] is needed"
        )
    factors = decode_scales(scale).to(torch.bfloat16)
    indices = packed.contiguous().view(torch.uint8).numpy()
    values = torch.from_numpy(np.take(_FP4_PAIRS, indices)).view(torch.bfloat16)
    blocks = values.view(rows, -1, FP4_BLOCK)
    # Two significant bits times a power of two: the product rounds only where it overflows.
    blocks *= factors[:, :, None]
    return values.to(dtype)


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Encode ``[out, in]`` as e4m3 with the smallest 128 x 128 power-of-two scales that fit.

    Values round to the nearest code, ties to the even one; none saturates.

    Returns:
        Codes ``[out, in]`` (float8_e4m3fn) and scales ``[ceil(out/128), ceil(in/128)]``
        (float8_e8m0fnu).

    Raises:
        ConfigError: a weight is NaN or infinite.
    """
    rows, columns = weight.shape
    scale_rows, scale_columns = fp8_scale_shape(tuple(weight.shape))
    padded = weight.new_zeros(
        scale_rows * FP8_BLOCK, scale_columns * FP8_BLOCK, dtype=torch.float32
    )
    padded[:rows, :columns] = weight
    blocks = padded.view(scale_rows, FP8_BLOCK, scale_columns, FP8_BLOCK)
    exponent = _exponents(blocks.abs().amax(dim=(1, 3)), _E4M3_MAX)
    scaled = torch.ldexp(blocks, -exponent[:, None, :, None])
    codes = scaled.to(torch.float8_e4m3fn).view(scale_rows * FP8_BLOCK, -1)[:rows, :columns]
    return codes.contiguous(), encode_scales(exponent).view(torch.float8_e8m0fnu)


def quantize_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Encode ``[out, in]`` as packed e2m1 with the smallest 1 x 32 power-of-two scales that fit.

    Values round to the nearest code, ties to the even one; none saturates.

    Returns:
        Packed codes ``[out, in / 2]`` (int8) and scales ``[out, in / 32]`` (float8_e8m0fnu).

    Raises:
        ConfigError: ``in`` is not a multiple of 32, or a weight is NaN or infinite.
    """
    shape = fp4_scale_shape(tuple(weight.shape))
    blocks = weight.to(torch.float32).reshape(*shape, FP4_BLOCK)
    exponent = _exponents(blocks.abs().amax(dim=-1), _E2M1_VALUES[-1])
    scaled = torch.ldexp(blocks, -exponent[:, :, None])
    magnitude = scaled.abs()
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for boundary in _E2M1_TIES_UP:
        codes += magnitude >= boundary
    for boundary in _E2M1_TIES_DOWN:
        codes += magnitude > boundary
    codes |= torch.signbit(scaled).to(torch.uint8) << 3
    flat = codes.view(shape[0], -1)
    packed = flat[:, 0::2] | (flat[:, 1::2] << 4)
    return packed.view(torch.int8), encode_scales(exponent).view(torch.float8_e8m0fnu)


def _exponents(largest: Tensor, limit: float) -> Tensor:
    """Return the smallest whole e, as int32, with ``largest <= limit * 2 ** e``; 0 for zero."""
    if not bool(torch.isfinite(largest).all()):
        raise ConfigError("weights to encode hold NaN or infinity; finite numbers are needed")
    mantissa, exponent = torch.frexp(largest)
    limit_mantissa, limit_exponent = np.frexp(limit)
    needed = exponent - int(limit_exponent) + (mantissa > float(limit_mantissa)).to(torch.int32)
    return torch.where(largest > 0, needed.clamp(-_BIAS, _BIAS), 0).to(torch.int32)
