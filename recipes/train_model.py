"""A differentiable, full-sequence DeepSeek-V4 with its MTP head, for training the bundled model.

The equations are those of the DeepSeek-V4 report and of DeepSeek's reference ``model.py``; the
module tree carries DeepSeek's tensor names, except that the routed experts of a layer are held as
two stacked tensors (``experts_w13`` ``[E, 2I, D]`` with the w1 rows first, ``experts_w2``
``[E, D, I]``).  Every forward sees whole sequences from position 0 on; there is no cache.

Numeric types: master weights are fp32; a forward runs in ``compute`` (bf16 on the GPU, fp32 in
tests), with hyper-connections, gate, compressors, norms and losses in fp32.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from sinkhorn import sinkhorn
from torch import Tensor, nn

FP4_BLOCK = 32
FP4_MAX = 6.0


@dataclass(frozen=True)
class Shape:
    """The numbers of a ``config.json`` that the computation needs, under the same names."""

    vocab_size: int = 8192
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    head_dim: int = 128
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 128
    o_groups: int = 2
    o_lora_rank: int = 128
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0, 4, 128, 4, 128, 4, 128, 0)
    index_n_heads: int = 8
    index_head_dim: int = 64
    index_topk: int = 256
    n_routed_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 256
    num_hash_layers: int = 2
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    max_position_embeddings: int = 4096

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Shape:
        """Read the fields out of a parsed ``config.json`` (unknown keys are ignored)."""
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in config.items() if k in known}
        if "compress_ratios" in values:
            values["compress_ratios"] = tuple(values["compress_ratios"])
        return cls(**values)

    def to_config(self) -> dict[str, Any]:
        """A complete ``config.json`` in DeepSeek-V4's Hugging Face form."""
        config: dict[str, Any] = {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "expert_dtype": "fp4",
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_key_value_heads": 1,
            "num_nextn_predict_layers": 1,
            "rope_scaling": {
                "type": "yarn",
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 65536,
            },
            "scoring_func": "sqrtsoftplus",
            "tie_word_embeddings": False,
            "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }
        config.update(asdict(self))
        config["compress_ratios"] = list(self.compress_ratios)
        return dict(sorted(config.items()))


# --- number formats ---------------------------------------------------------------------------


def fp4_codes(weight: Tensor, *, choose: bool = True) -> tuple[Tensor, Tensor]:
    """Round rows to e2m1 with one power-of-two scale per 32 inputs.

    ``weight`` is fp32 ``[..., I]`` with I a multiple of 32.  Returns the grid values (multiples of
    the scale, in -6..6, fp32, ``[..., I/32, 32]``) and the scale's exponent (int32
    ``[..., I/32, 1]``).  The scale is ``2^ceil(log2(amax / 6))``; with ``choose`` the next smaller
    power of two is taken where clipping to 6 costs less squared error than the coarser grid.
    """
    blocks = weight.unflatten(-1, (-1, FP4_BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    bits = (amax / FP4_MAX).clamp(min=2.0**-120).view(torch.int32)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    grid = _round_e2m1(blocks / _pow2(exponent))
    if choose:
        lower = exponent - 1
        finer = _round_e2m1(blocks / _pow2(lower))
        gain = (grid * _pow2(exponent) - blocks).square().sum(-1, keepdim=True) > (
            finer * _pow2(lower) - blocks
        ).square().sum(-1, keepdim=True)
        grid = torch.where(gain, finer, grid)
        exponent = torch.where(gain, lower, exponent)
    return grid, exponent


def _pow2(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)


def _round_e2m1(x: Tensor) -> Tensor:
    """Nearest value of {0, .5, 1, 1.5, 2, 3, 4, 6} with the sign kept; ties go to even codes."""
    size = x.abs().clamp(max=FP4_MAX)
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    return torch.round(size / step) * step * torch.sign(x)


def fp4_round(weight: Tensor) -> Tensor:
    """The fp32 weight after a round trip through e2m1 with ue8m0 scales (exact in bf16)."""
    grid, exponent = fp4_codes(weight)
    return (grid * _pow2(exponent)).flatten(-2)


class _StraightThrough(torch.autograd.Function):
    """Rounds (or only casts) a weight; the gradient passes unchanged in fp32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rounder: Any, dtype: torch.dtype) -> Tensor:
        return (weight if rounder is None else rounder(weight)).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.float(), None, None


# --- small parts ------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm over the last axis in fp32, cast to the type of ``x`` once at the end."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """``layer`` applied in the type of ``x``; its master weight stays fp32."""
    return F.linear(x, layer.weight.to(x.dtype))


def rotary_table(
    shape: Shape, length: int, *, compressed: bool, device: Any
) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 ``[length, rope/2]``; ``compressed`` selects base 160000 with YaRN."""
    dim = shape.qk_rope_head_dim
    base = shape.compress_rope_theta if compressed else shape.rope_theta
    freq = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if compressed:
        ends = [
            dim * math.log(65536 / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (32, 1)
        ]
        low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), dim - 1)
        ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)
        ramp = ramp.clamp(0, 1)
        freq = freq * (1 - ramp) + freq / 16 * ramp
    angle = torch.arange(length, dtype=torch.float32)[:, None] * freq.float()[None]
    return angle.cos().to(device), angle.sin().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last ``2 * cos.shape[-1]`` channels of ``x`` as interleaved pairs, in fp32.

    ``cos`` and ``sin`` must broadcast against ``x[..., :rope/2]``.
    """
    rope = 2 * cos.shape[-1]
    a, b = x[..., -rope:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-rope], turned.to(x.dtype)), -1)


def collapse(h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, shape: Shape) -> Tensor:
    """hc_head: weigh the streams ``[..., n, D]`` into one ``[..., D]``."""
    x = h.float()
    flat = x.flatten(-2)
    rho = torch.rsqrt(flat.square().mean(-1, keepdim=True) + shape.rms_norm_eps)
    weight = torch.sigmoid(F.linear(flat, fn) * rho * scale + base) + shape.hc_eps
    return (weight.unsqueeze(-1) * x).sum(-2).to(h.dtype)


class RMSNorm(nn.Module):
    """Only the weight; use with :func:`rms`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))


def _lin(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


# --- attention --------------------------------------------------------------------------------


class Compressor(nn.Module):
    """Pools every ``ratio`` tokens into one row; ratio 4 overlaps with the previous window."""

    def __init__(self, shape: Shape, ratio: int, dim: int) -> None:
        super().__init__()
        self.ratio, self.dim, self.overlap = ratio, dim, ratio == 4
        wide = dim * (2 if self.overlap else 1)
        self.ape = nn.Parameter(torch.zeros(ratio, wide))
        self.wkv = _lin(shape.hidden_size, wide)
        self.wgate = _lin(shape.hidden_size, wide)
        self.norm = RMSNorm(dim)
        self.eps = shape.rms_norm_eps

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` ``[B, T, D]`` -> rotated rows ``[B, T // ratio, dim]`` in the type of ``x``."""
        r, d = self.ratio, self.dim
        rows = x.shape[1] // r
        x32 = x[:, : rows * r].float()
        kv = F.linear(x32, self.wkv.weight).unflatten(1, (rows, r))
        score = F.linear(x32, self.wgate.weight).unflatten(1, (rows, r)) + self.ape
        if self.overlap:
            first = torch.zeros_like(kv[:, :1, :, :d])
            kv = torch.cat((torch.cat((first, kv[:, :-1, :, :d]), 1), kv[..., d:]), 2)
            never = torch.full_like(first, float("-inf"))
            score = torch.cat((torch.cat((never, score[:, :-1, :, :d]), 1), score[..., d:]), 2)
        pooled = (kv * torch.softmax(score, 2)).sum(2).to(x.dtype)
        pooled = rms(pooled, self.norm.weight, self.eps)
        return rotate(pooled, cos[: rows * r : r], sin[: rows * r : r])


class Indexer(nn.Module):
    """Scores the compressed rows of a ratio-4 layer for every query."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.dim = shape.index_n_heads, shape.index_head_dim
        self.wq_b = _lin(shape.q_lora_rank, self.heads * self.dim)
        self.weights_proj = _lin(shape.hidden_size, self.heads)
        self.compressor = Compressor(shape, 4, self.dim)

    def forward(self, x: Tensor, qr: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Scores fp32 ``[B, T, T // 4]`` (invisible rows included)."""
        batch, length = x.shape[:2]
        q = linear(qr, self.wq_b).view(batch, length, self.heads, self.dim)
        q = rotate(q, cos[:, None], sin[:, None])
        k = self.compressor(x, cos, sin)
        dots = torch.bmm(q.reshape(batch, length * self.heads, self.dim), k.transpose(1, 2))
        dots = F.relu(dots.view(batch, length, self.heads, -1).float())
        gate = linear(x, self.weights_proj).float() * (self.dim**-0.5 * self.heads**-0.5)
        return (dots * gate.unsqueeze(-1)).sum(2)


class Attention(nn.Module):
    """Window attention with a sink, plus compressed rows where ``ratio`` is not 0."""

    def __init__(self, shape: Shape, ratio: int) -> None:
        super().__init__()
        self.shape, self.ratio = shape, ratio
        heads, dim = shape.num_attention_heads, shape.head_dim
        self.wq_a = _lin(shape.hidden_size, shape.q_lora_rank)
        self.q_norm = RMSNorm(shape.q_lora_rank)
        self.wq_b = _lin(shape.q_lora_rank, heads * dim)
        self.wkv = _lin(shape.hidden_size, dim)
        self.kv_norm = RMSNorm(dim)
        self.wo_a = _lin(heads * dim // shape.o_groups, shape.o_groups * shape.o_lora_rank)
        self.wo_b = _lin(shape.o_groups * shape.o_lora_rank, shape.hidden_size)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.compressor = Compressor(shape, ratio, dim) if ratio else None
        self.indexer = Indexer(shape) if ratio == 4 else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        window: Tensor | None = None,
        extra: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` ``[B, T, D]`` -> (output ``[B, T, D]``, own rows ``[B, T, d]``, indexer loss).

        ``window`` and ``extra`` serve the recursion of the MTP head: with ``extra``
        ``[B, T, E, d]`` each query reads the ``window`` rows ``[B, T, d]`` of at least ``E + 1``
        positions before it, its own ``E`` extra rows and its own row.
        """
        s = self.shape
        batch, length = x.shape[:2]
        heads, dim, span = s.num_attention_heads, s.head_dim, s.sliding_window
        qr = rms(linear(x, self.wq_a), self.q_norm.weight, s.rms_norm_eps)
        q = linear(qr, self.wq_b).view(batch, length, heads, dim)
        q = rotate(rms(q, None, s.rms_norm_eps), cos[:, None], sin[:, None])
        q = q * dim**-0.5
        own = rotate(rms(linear(x, self.wkv), self.kv_norm.weight, s.rms_norm_eps), cos, sin)

        skip = 0
        if window is None:
            window = own
        else:
            own_row = own.unsqueeze(2)
            extra = own_row if extra is None else torch.cat((extra, own_row), 2)
            skip = extra.shape[2]

        # Queries and keys of normed rows keep the logits far from fp32's exponent limit, so the
        # softmax needs no running maximum; one pass yields the weights and their sum.
        pad = -length % span
        keys = F.pad(window, (0, 0, span, pad)).unflatten(1, (-1, span))
        chunks = keys.shape[1] - 1
        keys = torch.cat((keys[:, :-1], keys[:, 1:]), 2).flatten(0, 1)
        q_pad = F.pad(q, (0, 0, 0, 0, 0, pad)) if pad else q
        q_chunk = q_pad.reshape(batch * chunks, span * heads, dim)
        logits = torch.bmm(q_chunk, keys.transpose(1, 2)).view(batch, chunks, span, heads, 2 * span)
        here = torch.arange(span, device=x.device)
        there = torch.arange(2 * span, device=x.device)
        delta = span + here[:, None] - there[None, :]
        allowed = (delta >= skip) & (delta < span)
        starts = torch.arange(chunks, device=x.device)[:, None, None]
        allowed = allowed[None] & ((starts > 0) | (there >= span))
        mass = torch.where(allowed[None, :, :, None], logits.float().exp(), 0.0)
        total = mass.sum(-1).reshape(batch, chunks * span, heads)[:, :length]
        total = total + self.attn_sink.exp()
        out = torch.bmm(mass.to(x.dtype).flatten(0, 1).flatten(1, 2), keys)
        out = out.view(batch, chunks * span, heads, dim)[:, :length].float()
        if extra is not None:
            e = (q.unsqueeze(2).float() * extra.unsqueeze(3).float()).sum(-1)
            position = torch.arange(length, device=x.device)[:, None]
            back = torch.arange(skip - 1, -1, -1, device=x.device)[None]
            e = torch.where((position >= back)[None, :, :, None], e.exp(), 0.0)
            total = total + e.sum(2)
            out = out + (e.unsqueeze(-1) * extra.unsqueeze(3).float()).sum(2)

        index_loss = total.new_zeros(())
        if self.compressor is not None:
            rows = self.compressor(x, cos, sin)
            count = rows.shape[1]
            position = torch.arange(length, device=x.device)[:, None]
            visible = torch.arange(count, device=x.device)[None] < (position + 1) // self.ratio
            chosen = visible[None]
            scores = None
            if self.indexer is not None:
                scores = self.indexer(x.detach(), qr.detach(), cos, sin)
                scores = scores.masked_fill(~visible, float("-inf"))
                if count > s.index_topk:
                    top = scores.detach().topk(s.index_topk, -1).indices
                    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, top, True)
                    chosen = chosen & taken
            logits = torch.bmm(q.reshape(batch, length * heads, dim), rows.transpose(1, 2))
            logits = logits.view(batch, length, heads, count)
            mass = torch.where(chosen.unsqueeze(2), logits.float().exp(), 0.0)
            total = total + mass.sum(-1)
            out = out + torch.bmm(mass.to(x.dtype).view(batch, length * heads, count), rows).view(
                batch, length, heads, dim
            )
            if scores is not None:
                share = (mass / total.unsqueeze(-1)).sum(2).detach()
                share = share / share.sum(-1, keepdim=True).clamp(min=1e-9)
                # Rows that see nothing have no distribution; a finite stand-in keeps them silent.
                known = visible.any(-1)[None, :, None]
                logp = torch.log_softmax(torch.where(known, scores, 0.0), -1)
                cross = -(torch.where(share > 0, share * logp, 0.0)).sum(-1)
                entropy = -(share * share.clamp(min=1e-9).log()).sum(-1)
                index_loss = (cross - entropy).mean()
        out = (out / total.unsqueeze(-1)).to(x.dtype)
        out = rotate(out, cos[:, None], -sin[:, None])
        grouped = out.reshape(batch * length, s.o_groups, -1).transpose(0, 1)
        low = torch.bmm(
            grouped, self.wo_a.weight.to(x.dtype).unflatten(0, (s.o_groups, -1)).transpose(1, 2)
        )
        low = low.transpose(0, 1).reshape(batch, length, -1)
        return linear(low, self.wo_b), own, index_loss


# --- mixture of experts -----------------------------------------------------------------------


class _Scatter(torch.autograd.Function):
    """Copies each of N rows to its k places in expert order; the gradient is gathered, not added
    atomically, because the inverse permutation is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        back = grad[inverse].unflatten(0, (-1, ctx.copies))
        return back.float().sum(1).to(grad.dtype), None, None, None


class _Permute(torch.autograd.Function):
    """``x[to]`` for a permutation ``to`` whose inverse ``back`` is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[to]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.saved_tensors[0]], None, None


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Clamped SwiGLU in fp32."""
    return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


def experts_dense(
    x: Tensor, chosen: Tensor, weight: Tensor, w13: Tensor, w2: Tensor, limit: float
) -> Tensor:
    """Every expert for every token, with weight 0 where a token did not choose it.

    ``x`` ``[N, D]``, ``chosen`` and ``weight`` ``[N, k]`` -> fp32 ``[N, D]``.
    """
    count = w13.shape[0]
    full = torch.zeros(x.shape[0], count, device=x.device).scatter(1, chosen, weight)
    both = F.linear(x, w13.flatten(0, 1)).view(x.shape[0], count, -1)
    gate, up = both.chunk(2, -1)
    hidden = (swiglu(gate, up, limit) * full.unsqueeze(-1)).to(x.dtype)
    return F.linear(hidden.flatten(1), w2.permute(1, 0, 2).flatten(1)).float()


def experts_grouped(
    x: Tensor, chosen: Tensor, weight: Tensor, w13: Tensor, w2: Tensor, limit: float
) -> Tensor:
    """As :func:`experts_dense`, with tokens sorted by expert and grouped bf16 matrix products."""
    copies = chosen.shape[1]
    flat = chosen.flatten().to(torch.int32)
    order = torch.sort(flat, stable=True).indices
    inverse = torch.empty_like(order).scatter_(
        0, order, torch.arange(order.numel(), device=x.device)
    )
    count = (flat[:, None] == torch.arange(w13.shape[0], device=x.device)).sum(0)
    ends = count.cumsum(0).to(torch.int32)
    rows = _Scatter.apply(x, order, inverse, copies)
    both = torch._grouped_mm(rows, w13.transpose(1, 2), offs=ends)
    gate, up = both.chunk(2, -1)
    share = _Permute.apply(weight.flatten(), order, inverse)
    hidden = (swiglu(gate, up, limit) * share.unsqueeze(-1)).to(x.dtype)
    done = torch._grouped_mm(hidden, w2.transpose(1, 2), offs=ends)
    return _Permute.apply(done, inverse, order).unflatten(0, (-1, copies)).float().sum(1)


class Gate(nn.Module):
    """Router: learned top-k with a load-driven bias, or a fixed table per token id."""

    def __init__(self, shape: Shape, hashed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.n_routed_experts, shape.hidden_size))
        if hashed:
            self.register_buffer(
                "tid2eid",
                torch.zeros(shape.vocab_size, shape.num_experts_per_tok, dtype=torch.int64),
            )
        else:
            self.register_buffer("bias", torch.zeros(shape.n_routed_experts))


class SharedExpert(nn.Module):
    """The expert every token passes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = _lin(shape.hidden_size, shape.moe_intermediate_size)
        self.w3 = _lin(shape.hidden_size, shape.moe_intermediate_size)
        self.w2 = _lin(shape.moe_intermediate_size, shape.hidden_size)


class MoE(nn.Module):
    """Routed experts plus the shared one."""

    def __init__(self, shape: Shape, hashed: bool) -> None:
        super().__init__()
        self.shape, self.hashed, self.grouped = shape, hashed, False
        count, dim, inner = (
            shape.n_routed_experts,
            shape.hidden_size,
            shape.moe_intermediate_size,
        )
        self.gate = Gate(shape, hashed)
        self.experts_w13 = nn.Parameter(torch.empty(count, 2 * inner, dim))
        self.experts_w2 = nn.Parameter(torch.empty(count, dim, inner))
        self.shared_experts = SharedExpert(shape)

    def forward(self, x: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` ``[B, T, D]`` -> (output, tokens per expert ``[E]`` fp32)."""
        s = self.shape
        flat = x.flatten(0, 1)
        affinity = torch.sqrt(F.softplus(F.linear(flat.float(), self.gate.weight)))
        if self.hashed:
            chosen = self.gate.tid2eid[ids.flatten()]
        else:
            chosen = (affinity.detach() + self.gate.bias).topk(s.num_experts_per_tok, -1).indices
        weight = affinity.gather(1, chosen)
        weight = weight / weight.sum(-1, keepdim=True) * s.routed_scaling_factor
        run = experts_grouped if self.grouped else experts_dense
        routed = run(flat, chosen, weight, w13, w2, s.swiglu_limit)
        shared = self.shared_experts
        hidden = swiglu(linear(flat, shared.w1), linear(flat, shared.w3), s.swiglu_limit)
        out = routed + linear(hidden.to(x.dtype), shared.w2).float()
        experts = torch.arange(s.n_routed_experts, device=x.device)
        load = (chosen.flatten()[:, None] == experts).sum(0).float()
        return out.to(x.dtype).view_as(x), load


# --- block and model --------------------------------------------------------------------------


class Block(nn.Module):
    """One layer: attention and MoE, each inside manifold-constrained hyper-connections."""

    def __init__(self, shape: Shape, ratio: int, hashed: bool) -> None:
        super().__init__()
        self.shape = shape
        self.fused_sinkhorn = False
        n = shape.hc_mult
        self.attn = Attention(shape, ratio)
        self.ffn = MoE(shape, hashed)
        self.attn_norm = RMSNorm(shape.hidden_size)
        self.ffn_norm = RMSNorm(shape.hidden_size)
        for part in ("attn", "ffn"):
            wide = (2 + n) * n
            setattr(self, f"hc_{part}_fn", nn.Parameter(torch.empty(wide, n * shape.hidden_size)))
            setattr(self, f"hc_{part}_base", nn.Parameter(torch.zeros(wide)))
            setattr(self, f"hc_{part}_scale", nn.Parameter(torch.ones(3)))

    def _open(
        self, h: Tensor, fn: Tensor, base: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        s, n = self.shape, self.shape.hc_mult
        x = h.float()
        flat = x.flatten(-2)
        rho = torch.rsqrt(flat.square().mean(-1, keepdim=True) + s.rms_norm_eps)
        m = F.linear(flat, fn) * rho
        pre = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + s.hc_eps
        post = 2 * torch.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
        logits = (m[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
        mix = sinkhorn(logits, s.hc_sinkhorn_iters, s.hc_eps, fused=self.fused_sinkhorn)
        return (pre.unsqueeze(-1) * x).sum(-2).to(h.dtype), post, mix

    @staticmethod
    def _close(h: Tensor, out: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        kept = (mix.unsqueeze(-1) * h.float().unsqueeze(-2)).sum(-3)
        return (post.unsqueeze(-1) * out.float().unsqueeze(-2) + kept).to(h.dtype)

    def forward(
        self,
        h: Tensor,
        ids: Tensor,
        cos: Tensor,
        sin: Tensor,
        w13: Tensor,
        w2: Tensor,
        window: Tensor | None = None,
        extra: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Streams ``[B, T, n, D]`` -> (streams, attention rows, expert load, indexer loss)."""
        eps = self.shape.rms_norm_eps
        u, post, mix = self._open(h, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale)
        u = rms(u, self.attn_norm.weight, eps)
        out, rows, index_loss = self.attn(u, cos, sin, window, extra)
        h = self._close(h, out, post, mix)
        u, post, mix = self._open(h, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale)
        out, load = self.ffn(rms(u, self.ffn_norm.weight, eps), ids, w13, w2)
        return self._close(h, out, post, mix), rows, load, index_loss


class MTP(Block):
    """The multi-token-prediction block: projections of embedding and streams before a block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, shape.compress_ratios[shape.num_hidden_layers], hashed=False)
        dim = shape.hidden_size
        self.e_proj, self.h_proj = _lin(dim, dim), _lin(dim, dim)
        self.enorm, self.hnorm, self.norm = RMSNorm(dim), RMSNorm(dim), RMSNorm(dim)
        self.hc_head_fn = nn.Parameter(torch.empty(shape.hc_mult, shape.hc_mult * dim))
        self.hc_head_base = nn.Parameter(torch.zeros(shape.hc_mult))
        self.hc_head_scale = nn.Parameter(torch.ones(1))

    def combine(self, embedded: Tensor, streams: Tensor) -> Tensor:
        """Next token's embedding ``[B, T, D]`` and streams ``[B, T, n, D]`` -> block input."""
        eps = self.shape.rms_norm_eps
        e = linear(rms(embedded, self.enorm.weight, eps), self.e_proj)
        return e.unsqueeze(-2) + linear(rms(streams, self.hnorm.weight, eps), self.h_proj)


def head_rows(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, shape: Shape
) -> Tensor:
    """Streams -> normed rows ``[B, T, D]`` that the output head multiplies."""
    return rms(collapse(h, fn, base, scale, shape), norm, shape.rms_norm_eps)


def head_loss(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    head: Tensor,
    targets: Tensor,
    valid: Tensor,
    shape: Shape,
) -> Tensor:
    """Mean cross entropy in nats of ``targets`` ``[B, T]`` over the rows where ``valid`` is 1."""
    rows = head_rows(h, fn, base, scale, norm, shape)
    logits = F.linear(rows, head.to(rows.dtype)).float().flatten(0, 1)
    picked = logits.gather(1, targets.reshape(-1, 1)).squeeze(1)
    loss = torch.logsumexp(logits, -1) - picked
    return (loss * valid.flatten()).sum() / valid.sum()


class Model(nn.Module):
    """The trainable model: trunk, output head and one MTP block (``mtp.0``)."""

    def __init__(self, shape: Shape, *, compute: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape, self.compute = shape, compute
        self.quantise = False
        dim, n = shape.hidden_size, shape.hc_mult
        self.embed = nn.Embedding(shape.vocab_size, dim)
        self.layers = nn.ModuleList(
            Block(shape, shape.compress_ratios[i], i < shape.num_hash_layers)
            for i in range(shape.num_hidden_layers)
        )
        self.norm = RMSNorm(dim)
        self.head = _lin(dim, shape.vocab_size)
        self.hc_head_fn = nn.Parameter(torch.empty(n, n * dim))
        self.hc_head_base = nn.Parameter(torch.zeros(n))
        self.hc_head_scale = nn.Parameter(torch.ones(1))
        self.mtp = nn.ModuleList([MTP(shape)])
        self.compile_parts(False)
        self.tables: dict[tuple[bool, int], tuple[Tensor, Tensor]] = {}

    def compile_parts(self, on: bool = True) -> None:
        """Compile the blocks, the MTP input and the loss region by region (or undo that)."""
        wrap = (lambda f: torch.compile(f, dynamic=False)) if on else (lambda f: f)
        self._block = wrap(Block.forward)
        self._combine = wrap(MTP.combine)
        self._loss = wrap(head_loss)
        self._fp4 = wrap(fp4_round)

    def use(self, *, grouped: bool, fused_sinkhorn: bool) -> None:
        """Choose the expert and Sinkhorn kernels (both need a GPU)."""
        for block in [*self.layers, *self.mtp]:
            block.ffn.grouped = grouped
            block.fused_sinkhorn = fused_sinkhorn

    @torch.no_grad()
    def initialise(self, seed: int, frequency: Tensor | None = None) -> None:
        """Set all weights from ``seed``; ``frequency`` ``[vocab]`` balances the hash table."""
        rng = torch.Generator().manual_seed(seed)

        def normal(p: Tensor, std: float) -> None:
            p.copy_(torch.randn(p.shape, generator=rng) * std)

        for name, p in self.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if name == "embed.weight":
                normal(p, 0.5)
            elif name in ("head.weight",) or leaf.endswith("_fn"):
                normal(p, 0.02)
            elif p.ndim >= 2 and leaf != "ape":
                inputs = p.shape[-1]
                normal(p, (0.5 if "w2" in name or "wo_b" in name else 1.0) * inputs**-0.5)
        n = self.shape.hc_mult
        for i, block in enumerate([*self.layers, *self.mtp]):
            for j, part in enumerate(("attn", "ffn")):
                base = getattr(block, f"hc_{part}_base")
                base[:n] = -1.5
                base[(2 * i + j) % n] = 1.5
                normal(base[n : 2 * n], 0.3)
                base[2 * n :] = 3.0 * torch.eye(n).flatten()
                getattr(block, f"hc_{part}_scale").fill_(0.2)
        for gate in [b.ffn.gate for b in self.layers if b.ffn.hashed]:
            gate.tid2eid.copy_(hash_table(self.shape, rng, frequency))

    def table(self, compressed: bool, length: int) -> tuple[Tensor, Tensor]:
        """Rotary table for ``length`` positions on the model's device (kept between calls)."""
        key = (compressed, length)
        if key not in self.tables:
            self.tables[key] = rotary_table(
                self.shape, length, compressed=compressed, device=self.head.weight.device
            )
        return self.tables[key]

    def expert_weights(self, block: Block) -> tuple[Tensor, Tensor]:
        """A layer's expert weights in the compute type, rounded to fp4 when ``quantise`` is set."""
        rounder = self._fp4 if self.quantise else None
        return (
            _StraightThrough.apply(block.ffn.experts_w13, rounder, self.compute),
            _StraightThrough.apply(block.ffn.experts_w2, rounder, self.compute),
        )

    def trunk(self, ids: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """Ids ``[B, T]`` -> (streams ``[B, T, n, D]``, expert loads, indexer loss)."""
        h = self.embed(ids).to(self.compute)
        h = h.unsqueeze(2).expand(-1, -1, self.shape.hc_mult, -1).contiguous()
        loads, index_loss = [], torch.zeros((), device=ids.device)
        for block in self.layers:
            cos, sin = self.table(block.attn.ratio != 0, ids.shape[1])
            h, _, load, extra = self._block(block, h, ids, cos, sin, *self.expert_weights(block))
            loads.append(load)
            index_loss = index_loss + extra
        return h, loads, index_loss

    def drafts(
        self, streams: Tensor, following: Tensor, depth: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """MTP streams for depths 1..``depth``.

        ``streams`` are the trunk's, ``following`` ``[B, T]`` the ids one position later.  Row i of
        every depth predicts the token at i + 2; rows below ``depth - 1`` of depth ``depth`` have
        no complete past.  At depth j the last j rows of the window come from drafted streams and
        all earlier ones from the trunk's, as in recursive drafting.
        """
        block = self.mtp[0]
        cos, sin = self.table(block.attn.ratio != 0, following.shape[1])
        embedded = self.embed(following).to(self.compute)
        weights = self.expert_weights(block)
        outs, loads, rows = [], [], []
        for j in range(depth):
            x = self._combine(block, embedded, streams)
            extra = None
            if j > 1:
                extra = torch.stack([_later(rows[m], j - m) for m in range(1, j)], 2)
            out, own, load, _ = self._block(
                block, x, following, cos, sin, *weights, rows[0] if j else None, extra
            )
            rows.append(own)
            outs.append(out)
            loads.append(load)
            streams = _later(out, 1)
        return outs, loads

    def losses(
        self, tokens: Tensor, *, depth: int = 3
    ) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """Tokens ``[B, T + 2]`` -> (losses of trunk and depths 1.., indexer loss, expert loads).

        The loads are one ``[E]`` tensor per layer, the MTP block's (summed over depths) last.
        """
        length = tokens.shape[1] - 2
        streams, loads, index_loss = self.trunk(tokens[:, :length])
        valid = torch.ones(tokens.shape[0], length, device=tokens.device)
        out = [
            self._loss(
                streams,
                self.hc_head_fn,
                self.hc_head_base,
                self.hc_head_scale,
                self.norm.weight,
                self.head.weight,
                tokens[:, 1 : length + 1],
                valid,
                self.shape,
            )
        ]
        if depth:
            outs, mtp_loads = self.drafts(streams, tokens[:, 1 : length + 1], depth)
            m = self.mtp[0]
            for j, s in enumerate(outs):
                valid = torch.ones_like(valid)
                valid[:, :j] = 0
                out.append(
                    self._loss(
                        s,
                        m.hc_head_fn,
                        m.hc_head_base,
                        m.hc_head_scale,
                        m.norm.weight,
                        self.head.weight,
                        tokens[:, 2 : length + 2],
                        valid,
                        self.shape,
                    )
                )
            loads.append(torch.stack(mtp_loads).sum(0))
        return out, index_loss, loads

    def logits(self, streams: Tensor, *, mtp: bool = False) -> Tensor:
        """fp32 logits of trunk streams, or of MTP streams with the MTP block's own hc_head."""
        own: Any = self.mtp[0] if mtp else self
        rows = head_rows(
            streams,
            own.hc_head_fn,
            own.hc_head_base,
            own.hc_head_scale,
            own.norm.weight,
            self.shape,
        )
        return F.linear(rows.float(), self.head.weight)


def _later(x: Tensor, by: int) -> Tensor:
    """Rows moved ``by`` positions later; the first rows repeat and must be masked by the caller."""
    return torch.cat((x[:, :1].expand(-1, by, *x.shape[2:]), x[:, :-by]), 1)


def hash_table(shape: Shape, rng: torch.Generator, frequency: Tensor | None) -> Tensor:
    """Distinct experts per token id, int64 ``[vocab, k]``, random under ``rng``.

    With ``frequency`` (a weight per id) frequent ids go first to the least loaded experts, so that
    the expected load is even.
    """
    count, k = shape.n_routed_experts, shape.num_experts_per_tok
    table = torch.rand(shape.vocab_size, count, generator=rng).argsort(1)[:, :k].contiguous()
    if frequency is None:
        return table
    share = frequency.double().cpu() / frequency.double().sum().cpu()
    noise = torch.rand(shape.vocab_size, count, generator=rng, dtype=torch.float64)
    load = torch.zeros(count, dtype=torch.float64)
    jitter = share.mean() * 2
    for token in share.argsort(descending=True).tolist():
        best = (load + noise[token] * jitter).argsort()[:k]
        table[token] = best
        load[best] += share[token]
    return table


def balance(model: Model, loads: list[Tensor], rate: float) -> None:
    """Move each learned router's bias by ``rate`` towards an even load (noaux_tc)."""
    with torch.no_grad():
        for block, load in zip([*model.layers, *model.mtp], loads, strict=False):
            if not block.ffn.hashed:
                block.ffn.gate.bias += rate * torch.sign(load.mean() - load)
