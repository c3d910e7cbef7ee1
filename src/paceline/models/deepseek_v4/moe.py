"""Router and experts.

Source: DeepSeek-V4 report, MoE section; reference model, Gate / Expert / MoE.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.config import ModelConfig
from paceline.ops.reference import ROW_TILE, linear, softplus, swiglu

__all__ = ["MoE"]


class MoE:
    """Routed experts and one shared expert; `hashed` layers take experts from a table of ids."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], prefix: str, config: ModelConfig, *, hashed: bool
    ):
        self.config = config
        self.gate = weights[f"{prefix}.gate.weight"]
        self.bias = None if hashed else weights[f"{prefix}.gate.bias"]
        self.tid2eid = weights[f"{prefix}.gate.tid2eid"] if hashed else None
        self.w1, self.w2, self.w3 = (weights[f"{prefix}.experts.w{i}"] for i in (1, 2, 3))
        shared = f"{prefix}.shared_experts"
        self.shared = tuple(weights[f"{shared}.w{i}.weight"] for i in (1, 2, 3))

    def route(self, x_RD: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights of each row.

        Returns:
            (experts [R, n] int64, weights [R, n] fp32). Weights come from the scores without the
            correction bias, also where the table chose the experts.
        """
        scores = softplus(linear(x_RD.float(), self.gate.float())).sqrt()
        if self.tid2eid is not None:
            experts = self.tid2eid[ids]
        else:
            assert self.bias is not None
            n = self.config.num_experts_per_tok
            experts = (scores + self.bias.float()).topk(n, -1, sorted=True)[1]
        weights = scores.gather(1, experts)
        weights = weights / weights.sum(-1, keepdim=True) * self.config.routed_scaling_factor
        return experts, weights

    def __call__(self, x_RD: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[R, D] to [R, D] in x's dtype; `ids` [R] are the rows' tokens."""
        experts, weights = self.route(x_RD, ids)
        w1, w2, w3 = self.shared
        limit = self.config.swiglu_limit
        shared = swiglu(linear(x_RD, w1), linear(x_RD, w3), limit).to(x_RD.dtype)
        out = linear(shared, w2).float()
        if x_RD.device.type == "cpu" or x_RD.shape[0] <= 2 * ROW_TILE:
            routed = [
                self._gathered(x_RD[s], experts[s], weights[s])
                for s in (slice(i, i + ROW_TILE) for i in range(0, x_RD.shape[0], ROW_TILE))
            ]
            out = out + torch.cat(routed)
        else:
            out = out + self._every_expert(x_RD, experts, weights)
        return out.to(x_RD.dtype)

    def _gathered(
        self, x_RD: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Few rows: each (row, expert) pair multiplies its own gathered matrices; fp32 [R, D]."""
        rows, n = experts.shape
        chosen, dtype = experts.flatten(), x_RD.dtype
        x = x_RD.repeat_interleave(n, 0)[..., None]
        gate = torch.bmm(self.w1[chosen].to(dtype), x)[..., 0]
        up = torch.bmm(self.w3[chosen].to(dtype), x)[..., 0]
        inner = swiglu(gate, up, self.config.swiglu_limit) * weights.flatten()[:, None]
        down = torch.bmm(self.w2[chosen].to(dtype), inner.to(dtype)[..., None])[..., 0]
        return down.float().view(rows, n, -1).sum(1)

    def _every_expert(
        self, x_RD: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Many rows: every expert runs every row, weight zero where not chosen; fp32 [R, D].

        Shapes depend on the row count only, so nothing is read back by the host.
        """
        num_experts = self.w1.shape[0]
        share = x_RD.new_zeros(x_RD.shape[0], num_experts, dtype=torch.float32)
        share.scatter_(1, experts, weights)
        out = x_RD.new_zeros(x_RD.shape, dtype=torch.float32)
        for e in range(num_experts):
            gate, up = linear(x_RD, self.w1[e]), linear(x_RD, self.w3[e])
            inner = swiglu(gate, up, self.config.swiglu_limit) * share[:, e, None]
            out += linear(inner.to(x_RD.dtype), self.w2[e]).float()
        return out
