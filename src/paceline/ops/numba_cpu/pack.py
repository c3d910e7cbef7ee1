"""Weights laid out once, at load, in the order in which the compiled loops read them.

A product's outputs are cut into panels of 64. A panel holds, for each input in turn, the 64 weights
it meets, in the narrowest form that keeps every number exactly: e2m1 codes under a power of two for
each 32 inputs, bf16, or fp32.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.ops.numba_cpu.kernels import pack_entry
from paceline.ops.numba_cpu.simd import BF16, FP4, FP4_BLOCK_BYTES, FP32, has_vnni

__all__ = [
    "Arena",
    "Packed",
    "aligned_bytes",
    "pack_experts",
    "pack_matrix",
    "pack_mixer",
    "pack_pairs",
]

PANEL = 64


def aligned_bytes(count: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes that begin on a cache line."""
    raw = np.zeros(count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count]


class Arena:
    """Memory for packed weights, in few large pieces that the system may back with large pages.

    Weights are read once a step in an order caches cannot learn, so page walks would show.
    """

    _PIECE = 64 << 20

    def __init__(self) -> None:
        self._piece: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    def take(self, count: int) -> npt.NDArray[np.uint8]:
        """Zeroed bytes that begin on a cache line; they keep their piece alive."""
        if count > self._piece.size:
            size = max(count, self._PIECE) + (2 << 20)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                with contextlib.suppress(OSError):
                    memory.madvise(mmap.MADV_HUGEPAGE)
            else:
                memory = mmap.mmap(-1, size)
            piece = np.frombuffer(memory, np.uint8)
            self._piece = piece[-piece.ctypes.data % (2 << 20) :]
        taken, self._piece = self._piece[:count], self._piece[(count + 63) // 64 * 64 :]
        return taken


@dataclass(frozen=True, slots=True)
class Packed:
    """Panels in memory.

    Attributes:
        form: how the numbers are stored (FP32, BF16, FP4).
        data: the bytes; owned.
        panels: how many panels.
    """

    form: int
    data: npt.NDArray[np.uint8]
    panels: int

    @property
    def address(self) -> int:
        """Where the first panel begins."""
        return int(self.data.ctypes.data)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as contiguous bf16 or fp32; fp32 whose numbers all are bf16 becomes bf16."""
    tensor = tensor.detach()
    if tensor.dtype == torch.float32:
        bits = tensor.contiguous().view(torch.int32)
        if not bool((bits & 0xFFFF).any()):
            tensor = tensor.to(torch.bfloat16)
    elif tensor.dtype != torch.bfloat16:
        tensor = tensor.to(torch.float32)
    return tensor.contiguous()


def _pack(
    arena: Arena,
    form: int,
    tensors: Sequence[torch.Tensor],
    rows: npt.NDArray[np.int64],
    inputs: int,
) -> Packed | None:
    """Pack rows given by address; None where fp4 cannot hold them. `tensors` share one dtype."""
    panels = rows.size // PANEL
    size = {
        FP32: 4 * PANEL * inputs,
        BF16: 2 * PANEL * inputs,
        FP4: inputs // 32 * FP4_BLOCK_BYTES,
    }[form]
    half = int(tensors[0].dtype == torch.bfloat16)
    data = arena.take(panels * size)
    rows = np.ascontiguousarray(rows)
    pack, base, start = pack_entry(), data.ctypes.data, rows.ctypes.data

    def part(first: int, last: int) -> int:
        return pack(
            form, start + 8 * PANEL * first, half, last - first, inputs, base + size * first
        )

    if panels < 64:
        fits = part(0, panels)
    else:
        middle = panels // 2
        with ThreadPoolExecutor(2) as pool:
            halves = [pool.submit(part, 0, middle), pool.submit(part, middle, panels)]
            fits = min(h.result() for h in halves)
    return Packed(form, data, panels) if fits else None


def _addresses(tensor: torch.Tensor) -> npt.NDArray[np.int64]:
    """Address of each row of a contiguous tensor, all leading axes flattened."""
    inputs = tensor.shape[-1]
    count = tensor.numel() // inputs
    step = inputs * tensor.element_size()
    return tensor.data_ptr() + step * np.arange(count, dtype=np.int64)


def _padded(rows: npt.NDArray[np.int64], unit: int) -> npt.NDArray[np.int64]:
    return np.concatenate([rows, np.zeros(-rows.size % unit, np.int64)])


def _alike(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    plain = [_plain(t) for t in tensors]
    if any(t.dtype == torch.float32 for t in plain):
        plain = [t.float() for t in plain]
    return plain


def pack_matrix(arena: Arena, *tensors: torch.Tensor) -> Packed:
    """Pack matrices [outputs, inputs] of equal inputs, one below another; bf16 or fp32.

    Each begins at a multiple of 16 outputs.
    """
    plain = _alike(tensors)
    rows = np.concatenate([_padded(_addresses(t), 16) for t in plain])
    form = BF16 if plain[0].dtype == torch.bfloat16 else FP32
    packed = _pack(arena, form, plain, _padded(rows, PANEL), plain[0].shape[-1])
    assert packed is not None
    return packed


def _pack_narrowest(
    arena: Arena, plain: list[torch.Tensor], rows: npt.NDArray[np.int64], *, narrow: bool = True
) -> Packed:
    inputs = plain[0].shape[-1]
    packed = None
    if plain[0].dtype == torch.bfloat16 and inputs % 32 == 0 and narrow and has_vnni():
        packed = _pack(arena, FP4, plain, rows, inputs)
    if packed is None:
        form = BF16 if plain[0].dtype == torch.bfloat16 else FP32
        packed = _pack(arena, form, plain, rows, inputs)
    assert packed is not None
    return packed


def pack_grouped(arena: Arena, tensor: torch.Tensor, groups: int) -> Packed:
    """Pack [groups * outputs, inputs], the panels of each group apart."""
    plain = _alike([tensor])
    rows = [_padded(part, PANEL) for part in np.split(_addresses(plain[0]), groups)]
    form = BF16 if plain[0].dtype == torch.bfloat16 else FP32
    packed = _pack(arena, form, plain, np.concatenate(rows), plain[0].shape[-1])
    assert packed is not None
    return packed


def pack_pairs(arena: Arena, gate: torch.Tensor, up: torch.Tensor, *, narrow: bool) -> Packed:
    """Pack w1 and w3 [..., inner, inputs]: a panel joins 32 rows of each.

    `narrow` allows fp4 where it is exact and this processor multiplies it fast.
    """
    plain = _alike([gate, up])
    first, second = (_addresses(t).reshape(-1, PANEL // 2) for t in plain)
    return _pack_narrowest(
        arena, plain, np.concatenate([first, second], axis=1).reshape(-1), narrow=narrow
    )


def pack_experts(arena: Arena, down: torch.Tensor) -> Packed:
    """Pack w2 [..., outputs, inner], outputs a multiple of 64."""
    plain = _alike([down])
    return _pack_narrowest(arena, plain, _addresses(plain[0]))


def pack_quarters(
    weight: npt.NDArray[np.float32], outputs: Sequence[int], inputs: int
) -> npt.NDArray[np.uint8]:
    """Pack [outputs, inputs] for the small product: 32 outputs wide, inputs in four quarters.

    Args:
        weight: the matrix.
        outputs: for each place of each panel of 32, the output it holds, -1 for none.
        inputs: inputs of the product, a multiple of 4.
    """
    order = np.asarray(outputs)
    wide = np.zeros((order.size, inputs), np.float32)
    wide[order >= 0] = weight[order[order >= 0]]
    panels = wide.reshape(-1, 32, 4, inputs // 4).transpose(0, 3, 2, 1)
    data = aligned_bytes(panels.size * 4)
    data.view(np.float32)[:] = panels.reshape(-1)
    return data


# Places of a mixer's outputs: comb in the first sixteen, then pre, then post.
_MIXER = (*range(8, 24), 0, 1, 2, 3, 4, 5, 6, 7, *[-1] * 8)
_COLLAPSE = (*[-1] * 16, 0, 1, 2, 3, *[-1] * 12)


def pack_mixer(
    function: torch.Tensor, base: torch.Tensor, scale: torch.Tensor
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Pack a hyper-connection (24 outputs) or a collapse (4): segments of 64 channels, affine.

    Returns:
        (per segment the small product over [4 streams, 64]; [scale 32, base 32] by place).
    """
    fn = function.detach().float().numpy()
    count, hidden = fn.shape[0], fn.shape[1] // 4
    places = _MIXER if count == 24 else _COLLAPSE
    by_segment = fn.reshape(count, 4, hidden // 64, 64).transpose(2, 0, 1, 3)
    data = np.concatenate(
        [pack_quarters(part.reshape(count, 256), places, 256) for part in by_segment]
    )
    out = aligned_bytes(data.size)
    out[:] = data
    scales = scale.detach().float().numpy()
    kinds = np.repeat(scales, [4, 4, 16]) if count == 24 else np.repeat(scales[:1], 4)
    affine = np.zeros(64, np.float32)
    order = np.asarray(places)
    held = np.flatnonzero(order >= 0)
    affine[held] = kinds[order[held]]
    affine[32 + held] = base.detach().float().numpy()[order[held]]
    return out, affine
