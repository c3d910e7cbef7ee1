"""Sinkhorn normalisation of the hyper-connections' mixing matrices, with a fused GPU kernel.

The GPU version keeps a token's 4x4 matrix in registers through all rounds and stores the divisors
(four numbers per half round) for the backward pass, which walks the rounds in reverse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

try:
    import triton
    import triton.language as tl
except ImportError:  # machines without a GPU build of torch
    triton = None


def sinkhorn(logits: Tensor, iters: int, eps: float, *, fused: bool = False) -> Tensor:
    """Near doubly stochastic matrices from fp32 ``logits`` ``[..., n, n]``.

    The first round is a row softmax (plus ``eps``) and a column division; ``iters - 1`` rounds of
    row and column division follow, each by (sum + ``eps``).  ``fused`` needs CUDA and n = 4.
    """
    if fused:
        flat = logits.reshape(-1, 4, 4).contiguous()
        return _sinkhorn_fused(flat, iters, eps)[0].view(logits.shape)
    x = torch.softmax(logits, -1) + eps
    x = x / (x.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        x = x / (x.sum(-1, keepdim=True) + eps)
        x = x / (x.sum(-2, keepdim=True) + eps)
    return x


if triton is not None:

    @triton.jit
    def _forward_kernel(logits, out, sums, count, eps, ITERS: tl.constexpr, BLOCK: tl.constexpr):
        n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        r = tl.arange(0, 4)
        place = n[:, None, None] * 16 + r[None, :, None] * 4 + r[None, None, :]
        inside = n < count
        mask = inside[:, None, None] & (r[None, :, None] < 4) & (r[None, None, :] < 4)
        line = n[:, None] * 4 + r[None, :]
        line_mask = inside[:, None] & (r[None, :] < 4)
        x = tl.load(logits + place, mask=mask, other=0.0)
        x = tl.exp(x - tl.max(x, 2)[:, :, None])
        x = x / tl.sum(x, 2)[:, :, None] + eps
        s = tl.sum(x, 1) + eps
        x = x / s[:, None, :]
        tl.store(sums + line, s, mask=line_mask)
        for i in range(1, ITERS):
            s = tl.sum(x, 2) + eps
            x = x / s[:, :, None]
            tl.store(sums + (2 * i - 1) * count * 4 + line, s, mask=line_mask)
            s = tl.sum(x, 1) + eps
            x = x / s[:, None, :]
            tl.store(sums + 2 * i * count * 4 + line, s, mask=line_mask)
        tl.store(out + place, x, mask=mask)

    @triton.jit
    def _backward_kernel(
        out, sums, grad, result, count, eps, ITERS: tl.constexpr, BLOCK: tl.constexpr
    ):
        n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        r = tl.arange(0, 4)
        place = n[:, None, None] * 16 + r[None, :, None] * 4 + r[None, None, :]
        inside = n < count
        mask = inside[:, None, None] & (r[None, :, None] < 4) & (r[None, None, :] < 4)
        line = n[:, None] * 4 + r[None, :]
        line_mask = inside[:, None] & (r[None, :] < 4)
        x = tl.load(out + place, mask=mask, other=0.0)
        g = tl.load(grad + place, mask=mask, other=0.0)
        for k in range(1, ITERS):
            i = ITERS - k
            s = tl.load(sums + 2 * i * count * 4 + line, mask=line_mask, other=1.0)
            g = (g - tl.sum(g * x, 1)[:, None, :]) / s[:, None, :]
            x = x * s[:, None, :]
            s = tl.load(sums + (2 * i - 1) * count * 4 + line, mask=line_mask, other=1.0)
            g = (g - tl.sum(g * x, 2)[:, :, None]) / s[:, :, None]
            x = x * s[:, :, None]
        s = tl.load(sums + line, mask=line_mask, other=1.0)
        g = (g - tl.sum(g * x, 1)[:, None, :]) / s[:, None, :]
        x = x * s[:, None, :] - eps
        g = x * (g - tl.sum(g * x, 2)[:, :, None])
        tl.store(result + place, g, mask=mask)


_BLOCK = 64


@library.custom_op("paceline_recipes::sinkhorn", mutates_args=())
def _sinkhorn_fused(logits: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor]:
    count = logits.shape[0]
    out = torch.empty_like(logits)
    sums = logits.new_empty(2 * iters - 1, count, 4)
    _forward_kernel[(triton.cdiv(count, _BLOCK),)](
        logits, out, sums, count, eps, ITERS=iters, BLOCK=_BLOCK
    )
    return out, sums


@_sinkhorn_fused.register_fake
def _(logits: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(logits), logits.new_empty(2 * iters - 1, logits.shape[0], 4)


@library.custom_op("paceline_recipes::sinkhorn_backward", mutates_args=())
def _sinkhorn_fused_backward(
    out: Tensor, sums: Tensor, grad: Tensor, iters: int, eps: float
) -> Tensor:
    count = out.shape[0]
    grad = grad.contiguous()
    result = torch.empty_like(grad)
    _backward_kernel[(triton.cdiv(count, _BLOCK),)](
        out, sums, grad, result, count, eps, ITERS=iters, BLOCK=_BLOCK
    )
    return result


@_sinkhorn_fused_backward.register_fake
def _(out: Tensor, sums: Tensor, grad: Tensor, iters: int, eps: float) -> Tensor:
    return torch.empty_like(out)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output)
    ctx.iters, ctx.eps = inputs[1], inputs[2]


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    out, sums = ctx.saved_tensors
    return _sinkhorn_fused_backward(out, sums, grad, ctx.iters, ctx.eps), None, None


_sinkhorn_fused.register_autograd(_backward, setup_context=_save)
