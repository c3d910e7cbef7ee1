"""The trunk: embedding, blocks, collapse, head. Reads like the paper; runs anywhere torch does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from paceline.cache.blocks import BLOCK_TOKENS
from paceline.cache.pools import CachePools
from paceline.config import ModelConfig
from paceline.models.deepseek_v4.attention import Attention
from paceline.models.deepseek_v4.hyper import Collapse, HyperConnection
from paceline.models.deepseek_v4.moe import MoE
from paceline.models.step import StepInputs, TargetOutput
from paceline.ops.dense import DenseWeight
from paceline.ops.reference import rms_norm

__all__ = ["Block", "DeepseekV4Model"]


class Block:
    """Attention and experts, each between a hyper-connection's read and write."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        prefix: str,
        config: ModelConfig,
        *,
        ratio: int,
        hashed: bool,
    ):
        self.eps = config.rms_norm_eps
        self.attn = Attention(weights, f"{prefix}.attn", config, ratio=ratio)
        self.ffn = MoE(weights, f"{prefix}.ffn", config, hashed=hashed)
        self.hc_attn = HyperConnection(weights, f"{prefix}.hc_attn", config)
        self.hc_ffn = HyperConnection(weights, f"{prefix}.hc_ffn", config)
        self.attn_norm = weights[f"{prefix}.attn_norm.weight"]
        self.ffn_norm = weights[f"{prefix}.ffn_norm.weight"]

    def __call__(
        self, x_RkD: torch.Tensor, inputs: StepInputs, pools: CachePools, layer: int
    ) -> torch.Tensor:
        """Streams [R, k, D] to streams."""
        u, post, comb = self.hc_attn.pre(x_RkD)
        o = self.attn(rms_norm(u, self.attn_norm, self.eps), inputs, pools, layer)
        return self.experts(self.hc_attn.post(o, x_RkD, post, comb), inputs.ids)

    def experts(self, x_RkD: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The second half: experts."""
        u, post, comb = self.hc_ffn.pre(x_RkD)
        o = self.ffn(rms_norm(u, self.ffn_norm, self.eps), ids)
        return self.hc_ffn.post(o, x_RkD, post, comb)


class DeepseekV4Model:
    """The target in plain torch; the definition every faster path is held to.

    Args:
        weights: DeepSeek names to tensors on one device (experts stacked per layer).
        config: shapes.
        dtype: of streams and matrix products; fp32 where the reference says fp32.
        embed_tokens, lm_head: shared with the draft head.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        embed_tokens: DenseWeight,
        lm_head: DenseWeight,
    ):
        self.config = config
        self.dtype = dtype
        self.embed_tokens = embed_tokens
        self.lm_head = lm_head
        self.blocks = [
            Block(
                weights,
                f"layers.{layer}",
                config,
                ratio=ratio,
                hashed=layer < config.num_hash_layers,
            )
            for layer, ratio in enumerate(config.compress_ratios)
        ]
        self.collapse = Collapse(weights, "", config)
        self.norm = weights["norm.weight"]

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, pools: CachePools) -> TargetOutput:
        """Run the rows of a step.

        No value is read back by the host and no shape depends on a value, so the step can be
        captured. On a CPU a row's bits depend on that row alone, see `_settled`.
        """
        if inputs.ids.device.type == "cpu":
            inputs = _settled(inputs, pools)
        x = self.embed_tokens.gather(inputs.ids)
        x = x[:, None].expand(-1, self.config.hc_mult, -1).contiguous()
        for layer, block in enumerate(self.blocks):
            x = block(x, inputs, pools, layer)
        wanted = x[inputs.logits_rows]
        y = rms_norm(self.collapse(wanted), self.norm, self.config.rms_norm_eps)
        return TargetOutput(logits=self.lm_head.matmul(y), hiddens=x[inputs.hidden_rows])


def _settled(inputs: StepInputs, pools: CachePools) -> StepInputs:
    """The same step in a form whose rows' bits depend on nothing but the rows.

    The length of a sum sets the order of its additions, so dense reads get one length always;
    libraries treat one row unlike several, so a lone row is run twice, writing the same values to
    the same places.
    """
    cap = pools.block_tables.shape[1] * BLOCK_TOKENS
    if inputs.ids.shape[0] > 1:
        return dataclasses.replace(inputs, context_cap=cap)
    return dataclasses.replace(
        inputs,
        ids=torch.cat((inputs.ids, inputs.ids)),
        positions=torch.cat((inputs.positions, inputs.positions)),
        slots=torch.cat((inputs.slots, inputs.slots)),
        context_cap=cap,
    )
