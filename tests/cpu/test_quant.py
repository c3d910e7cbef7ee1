"""Block formats: exact decoding against a scalar reading of the format, and encoding's bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.models.deepseek_v4.quant import (
    decode_scales,
    dequantize_fp4,
    dequantize_fp8,
    encode_scales,
    fp4_scale_shape,
    fp8_scale_shape,
    quantize_fp4,
    quantize_fp8,
)
from paceline.types import CheckpointError, ConfigError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
seeds = st.integers(0, 2**31)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def e4m3(code: int) -> float:
    """Value of an e4m3fn byte by the format's definition."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def test_scales_are_powers_of_two_over_the_whole_range() -> None:
    every = torch.arange(255, dtype=torch.uint8)
    expected = torch.tensor([2.0 ** (byte - 127) for byte in range(255)], dtype=torch.float64)
    assert torch.equal(decode_scales(every).double(), expected)
    assert torch.equal(decode_scales(every.view(torch.float8_e8m0fnu)).double(), expected)
    assert torch.equal(encode_scales(torch.arange(-127, 128)), every)


def test_nan_scale_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"1 of 2 block scales are NaN \(byte 255\)"):
        decode_scales(torch.tensor([127, 255], dtype=torch.uint8))


def test_fp4_byte_holds_the_even_input_low() -> None:
    packed = torch.full((1, 16), 0x2A, dtype=torch.uint8).view(torch.int8)
    scale = torch.tensor([[127]], dtype=torch.uint8)
    assert dequantize_fp4(packed, scale)[0, :2].tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp4_decodes_every_byte_exactly(dtype: torch.dtype) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(1, 256)
    # Byte 252 is the largest scale whose products stay finite; byte 0 gives subnormal ones.
    exponents = torch.tensor([[0, 1, 100, 126, 127, 128, 150, 200, 252, 127, 0, 90, 3, 4, 5, 6]])
    values = dequantize_fp4(packed, exponents.to(torch.uint8), dtype=dtype)
    assert values.dtype == dtype
    for column in range(512):
        code = (column // 2) & 15 if column % 2 == 0 else (column // 2) >> 4
        sign = -1.0 if code & 8 else 1.0
        expected = sign * E2M1[code & 7] * 2.0 ** (int(exponents[0, column // 32]) - 127)
        assert float(values[0, column]) == expected
        assert math.copysign(1.0, float(values[0, column])) == sign


def test_fp8_decodes_every_byte_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    for low, high in ((127, 127), (0, 246), (110, 130)):
        scale = torch.tensor([[low, high]], dtype=torch.uint8)
        values = dequantize_fp8(codes, scale)
        for code in range(256):
            expected = e4m3(code) * 2.0 ** ((low if code < 128 else high) - 127)
            got = float(values[0, code])
            assert got == expected or (math.isnan(got) and math.isnan(expected))


def test_fp8_blocks_are_128_square_with_partial_edges() -> None:
    codes = torch.full((130, 200), 0x38, dtype=torch.uint8)
    scale = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
    values = dequantize_fp8(codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))
    assert values[:128, :128].unique().tolist() == [1.0]
    assert values[:128, 128:].unique().tolist() == [2.0]
    assert values[128:, :128].unique().tolist() == [4.0]
    assert values[128:, 128:].unique().tolist() == [8.0]


@settings(deadline=None, max_examples=40)
@given(seed=seeds, rows=st.integers(1, 300), columns=st.integers(1, 300), spread=st.integers(0, 40))
def test_fp8_round_trip(seed: int, rows: int, columns: int, spread: int) -> None:
    weight = torch.randn(rows, columns, generator=generator(seed))
    weight *= torch.exp2(torch.randint(-spread, 1, (rows, 1), generator=generator(seed + 1)))
    codes, scale = quantize_fp8(weight)
    assert tuple(scale.shape) == fp8_scale_shape((rows, columns))
    decoded = dequantize_fp8(codes, scale)
    factor = decode_scales(scale).repeat_interleave(128, 0)[:rows]
    factor = factor.repeat_interleave(128, 1)[:, :columns]
    # Half a step: 2 ** -4 of a normal value, half of 2 ** -9 scales for a subnormal one.
    assert ((decoded - weight).abs() <= torch.maximum(weight.abs() / 16, factor / 1024)).all()
    assert torch.equal(dequantize_fp8(*quantize_fp8(decoded)), decoded)
    assert torch.equal(dequantize_fp8(codes, scale, dtype=torch.bfloat16).float(), decoded)


@settings(deadline=None, max_examples=40)
@given(seed=seeds, rows=st.integers(1, 60), blocks=st.integers(1, 6), spread=st.integers(0, 60))
def test_fp4_round_trip(seed: int, rows: int, blocks: int, spread: int) -> None:
    weight = torch.randn(rows, blocks * 32, generator=generator(seed))
    weight *= torch.exp2(torch.randint(-spread, 1, (rows, 1), generator=generator(seed + 1)))
    packed, scale = quantize_fp4(weight)
    assert packed.dtype == torch.int8
    assert tuple(packed.shape) == (rows, blocks * 16)
    assert tuple(scale.shape) == fp4_scale_shape((rows, blocks * 32))
    decoded = dequantize_fp4(packed, scale)
    factor = decode_scales(scale).repeat_interleave(32, 1)
    grid = torch.tensor([*E2M1, *(-value for value in E2M1[1:])])
    nearest = (weight[:, :, None] / factor[:, :, None] - grid).abs().amin(dim=-1)
    assert torch.equal((decoded / factor - weight / factor).abs(), nearest)
    assert torch.equal(dequantize_fp4(*quantize_fp4(decoded)), decoded)
    assert torch.equal(dequantize_fp4(packed, scale, dtype=torch.bfloat16).float(), decoded)


def test_scales_are_the_smallest_that_do_not_saturate() -> None:
    for largest, byte in ((6.0, 127), (6.0001, 128), (3.0, 126), (3.0001, 127), (1e-45, 0)):
        weight = torch.zeros(1, 32)
        weight[0, 5] = largest
        assert quantize_fp4(weight)[1].view(torch.uint8).item() == byte
    for largest, byte in ((448.0, 127), (448.1, 128), (224.0, 126), (-448.0, 127)):
        weight = torch.zeros(4, 4)
        weight[1, 2] = largest
        assert quantize_fp8(weight)[1].view(torch.uint8).item() == byte


def test_fp4_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4).view(1, 32)
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert dequantize_fp4(*quantize_fp4(ties))[0, :8].tolist() == expected
    assert dequantize_fp4(*quantize_fp4(-ties))[0, :8].tolist() == [-value for value in expected]


def test_zero_stays_zero() -> None:
    assert dequantize_fp4(*quantize_fp4(torch.zeros(2, 64))).count_nonzero() == 0
    assert dequantize_fp8(*quantize_fp8(torch.zeros(2, 64))).count_nonzero() == 0


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"33 inputs.*multiple of 32"):
        quantize_fp4(torch.zeros(2, 33))
    with pytest.raises(CheckpointError, match=r"scales of shape \[1, 1\]"):
        dequantize_fp4(torch.zeros(2, 16, dtype=torch.int8), torch.zeros(1, 1, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=r"\[2, 1\] is needed"):
        dequantize_fp8(torch.zeros(129, 16, dtype=torch.uint8), torch.zeros(1, 1).byte())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_to_encode_must_be_finite(bad: float) -> None:
    weight = torch.zeros(32, 32)
    weight[3, 4] = bad
    for encode in (quantize_fp4, quantize_fp8):
        with pytest.raises(ConfigError, match="NaN or infinity"):
            encode(weight)
