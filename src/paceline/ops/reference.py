"""Plain torch twin of every operation: the definition that faster kernels are held to.

Rows are independent: on a CPU the bits of a row's result do not depend on how many rows are
computed with it. Library matrix products choose their kernel by the number of rows, so `linear`
always multiplies tiles of exactly eight, the last one padded; `sigmoid`, `silu` and `softplus` are
composed from operations whose vector and tail code agree, which the library's own do not.

Shape legend: R rows, H heads, d head width, S keys, D hidden, k streams, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from paceline.config import ModelConfig

__all__ = [
    "attend",
    "inverse_rotate",
    "linear",
    "rms_norm",
    "rotary_frequencies",
    "rotate",
    "sigmoid",
    "silu",
    "sinkhorn",
    "softplus",
    "swiglu",
    "top_rows",
    "unit_rms",
]

ROW_TILE = 8
"""Rows of every matrix product on a CPU."""


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [R, in] times `weight` [out, in] transposed, in `x`'s dtype: [R, out]."""
    weight = weight.to(x.dtype)
    if x.device.type != "cpu":
        return F.linear(x, weight)
    rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -rows % ROW_TILE))
    tiles = [F.linear(tile, weight) for tile in torch.split(padded, ROW_TILE)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:rows]


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x times sigmoid(x)."""
    return x / (1 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x))."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide the last axis by its root mean square, statistics in fp32; keeps the dtype."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis: statistics and weight product in fp32, cast last."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def rotary_frequencies(config: ModelConfig, *, compressed: bool) -> torch.Tensor:
    """Angular frequencies [rd / 2] fp32 of one of the two rotary tables.

    Layers without compression and the draft block use `rope_theta` plainly; every other layer
    uses `compress_rope_theta` with YaRN's frequency ramp and no attention factor.
    Source: DeepSeek-V4 reference model, precompute_freqs_cis.
    """
    width = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    freqs = 1.0 / torch.pow(torch.tensor(float(base)), exponents)
    scaling = config.rope_scaling
    if not compressed or scaling is None:
        return freqs

    def dim(rotations: float) -> float:
        span = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return width * math.log(span) / (2 * math.log(base))

    low = max(math.floor(dim(scaling.beta_fast)), 0)
    high = min(math.ceil(dim(scaling.beta_slow)), width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0, 1)
    return freqs * (1 - ramp) + freqs / scaling.factor * ramp


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    width = 2 * cos.shape[-1]
    keep, turn = x[..., : x.shape[-1] - width], x[..., x.shape[-1] - width :].float()
    even, odd = turn[..., 0::2], turn[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((keep, turned.to(x.dtype)), -1)


def _angles(
    x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions.float()[:, None] * freqs
    if x.dim() == 3:
        angles = angles[:, None]
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate the last 2 * len(freqs) channels of `x` [R, d] or [R, H, d], pairs (2i, 2i + 1)."""
    cos, sin = _angles(x, positions, freqs)
    return _turn(x, cos, sin)


def inverse_rotate(x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Undo `rotate`: what attention output needs, since the values are rotated keys."""
    cos, sin = _angles(x, positions, freqs)
    return _turn(x, cos, -sin)


def sinkhorn(logits: torch.Tensor, *, iters: int, eps: float) -> torch.Tensor:
    """Nearly doubly stochastic [R, k, k] fp32 from logits; the first row step is a softmax.

    Source: manifold-constrained hyper-connections; DeepSeek-V4 reference, hc_split_sinkhorn.
    """
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def attend(
    q: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """Attention of one key-value head with a sink in the denominator only.

    Args:
        q: [R, H, d].
        keys: [R, S, d]; keys are also values.
        visible: [R, S] bool.
        sink: [H] fp32.

    Returns:
        [R, H, d] in q's dtype; softmax in fp32.
    """
    logits = torch.bmm(q, keys.transpose(1, 2)).float() * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~visible[:, None], -math.inf)
    sinks = sink.float()[None, :, None].expand(q.shape[0], -1, 1)
    weights = torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
    return torch.bmm(weights.to(keys.dtype), keys.masked_fill(~visible[..., None], 0.0))


def top_rows(
    scores: torch.Tensor, visible: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` best visible rows, in rising order; ties go to the lower row.

    Args:
        scores: [R, C] fp32.
        visible: [R] int64: rows below it may be chosen.
        count: most rows to choose.

    Returns:
        (rows [R, min(count, C)] int64, chosen [R, same] bool); places beyond what is visible hold
        row 0 and False.
    """
    width = scores.shape[1]
    count = min(count, width)
    places = torch.arange(width, device=scores.device)
    seen = places < visible[:, None]
    masked = scores.masked_fill(~seen, -math.inf)
    order = torch.sort(masked, dim=-1, descending=True, stable=True)[1]
    best = order[:, :count]
    best = torch.where(best < visible[:, None], best, width).sort(-1)[0]
    chosen = best < width
    return torch.where(chosen, best, 0), chosen


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in fp32."""
    gate, up = gate.float(), up.float()
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
