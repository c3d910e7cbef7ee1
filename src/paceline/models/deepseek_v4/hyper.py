"""Manifold-constrained hyper-connections: four residual streams, mixed before and after a layer.

Source: DeepSeek-V4 report, mHC section; reference model, hc_pre / hc_post / hc_head.
Shapes: x_RkD streams, R rows, k = hc_mult streams, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.config import ModelConfig
from paceline.ops.reference import linear, sigmoid, sinkhorn

__all__ = ["Collapse", "HyperConnection"]


def _mixes(x_RkD: torch.Tensor, fn: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    flat = x_RkD.float().flatten(1)
    rho = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    return flat, linear(flat, fn.float()) * rho


class HyperConnection:
    """Weights `{prefix}_fn` [k (k + 2), k D], `_base`, `_scale`; all fp32."""

    def __init__(self, weights: Mapping[str, torch.Tensor], prefix: str, config: ModelConfig):
        self.fn = weights[f"{prefix}_fn"]
        self.base = weights[f"{prefix}_base"]
        self.scale = weights[f"{prefix}_scale"]
        self.config = config

    def pre(self, x_RkD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read the streams.

        Returns:
            (u [R, D] in x's dtype: the layer's input; post [R, k] fp32; comb [R, k, k] fp32,
            entry [j, k]: how much of old stream j goes into new stream k).
        """
        config, k = self.config, self.config.hc_mult
        flat, mixes = _mixes(x_RkD, self.fn, config.rms_norm_eps)
        s_pre, s_post, s_comb = self.scale.float().unbind()
        base = self.base.float()
        pre = sigmoid(mixes[:, :k] * s_pre + base[:k]) + config.hc_eps
        post = 2 * sigmoid(mixes[:, k : 2 * k] * s_post + base[k : 2 * k])
        comb = (mixes[:, 2 * k :] * s_comb + base[2 * k :]).view(-1, k, k)
        comb = sinkhorn(comb, iters=config.hc_sinkhorn_iters, eps=config.hc_eps)
        u = (pre[..., None] * flat.view(x_RkD.shape)).sum(1)
        return u.to(x_RkD.dtype), post, comb

    @staticmethod
    def post(
        o_RD: torch.Tensor, x_RkD: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        """New streams: post_k o + sum_j comb[j, k] x_j, in fp32, cast to x's dtype."""
        mixed = torch.bmm(comb.transpose(1, 2), x_RkD.float())
        return (post[..., None] * o_RD.float()[:, None] + mixed).to(x_RkD.dtype)


class Collapse:
    """`hc_head`, streams to one vector: `{prefix}hc_head_fn` [k, k D], `_base`, `_scale`."""

    def __init__(self, weights: Mapping[str, torch.Tensor], prefix: str, config: ModelConfig):
        self.fn = weights[f"{prefix}hc_head_fn"]
        self.base = weights[f"{prefix}hc_head_base"]
        self.scale = weights[f"{prefix}hc_head_scale"]
        self.config = config

    def __call__(self, x_RkD: torch.Tensor) -> torch.Tensor:
        """[R, k, D] to [R, D] in x's dtype."""
        flat, mixes = _mixes(x_RkD, self.fn, self.config.rms_norm_eps)
        w = sigmoid(mixes * self.scale.float() + self.base.float()) + self.config.hc_eps
        return (w[..., None] * flat.view(x_RkD.shape)).sum(1).to(x_RkD.dtype)
