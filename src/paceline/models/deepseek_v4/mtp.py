"""The draft block: one V4 layer over the trunk's streams and the next token's embedding.

Source: DeepSeek-V4 report, MTP section; reference model, MTPBlock. Row of pair key k joins the
streams of position k with the token of position k + 1 and predicts the token of position k + 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.cache.drafter import DrafterRing
from paceline.config import ModelConfig
from paceline.models.deepseek_v4.hyper import Collapse
from paceline.models.deepseek_v4.transformer import Block
from paceline.models.step import MtpInputs, MtpOutput
from paceline.ops.reference import linear, rms_norm

__all__ = ["DeepseekV4MtpModule"]


class DeepseekV4MtpModule:
    """`mtp.0.*` in plain torch.

    The streams enter un-collapsed and un-normed; the embedding part is broadcast to all of them;
    the block is an ordinary V4 layer of ratio 0 (window 128, sink, plain rotary table) with
    learned routing; collapse and norm are its own, the output head is the trunk's. What recursion
    feeds back are the block's streams as they are.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], config: ModelConfig, *, dtype: torch.dtype
    ):
        self.config = config
        self.dtype = dtype
        self.e_proj = weights["mtp.0.e_proj.weight"]
        self.h_proj = weights["mtp.0.h_proj.weight"]
        self.enorm = weights["mtp.0.enorm.weight"]
        self.hnorm = weights["mtp.0.hnorm.weight"]
        self.norm = weights["mtp.0.norm.weight"]
        self.block = Block(weights, "mtp.0", config, ratio=0, hashed=False)
        self.collapse = Collapse(weights, "mtp.0.", config)

    def combine(self, embeds: torch.Tensor, hiddens: torch.Tensor) -> torch.Tensor:
        """[R, D] and [R, k, D] to the block's input [R, k, D]."""
        eps = self.config.rms_norm_eps
        e = linear(rms_norm(embeds.to(self.dtype), self.enorm, eps), self.e_proj)
        s = rms_norm(hiddens.to(self.dtype), self.hnorm, eps)
        projected = linear(s.flatten(0, 1), self.h_proj).view(s.shape)
        return e[:, None] + projected

    @torch.inference_mode()
    def forward(self, inputs: MtpInputs, ring: DrafterRing) -> MtpOutput:
        """Write keys, attend, return every row's output."""
        rows = inputs.keys.shape[0]
        if rows == 1 and inputs.keys.device.type == "cpu":
            inputs = _twice(inputs)
        x = self.combine(inputs.embeds, inputs.hiddens)
        block, eps = self.block, self.config.rms_norm_eps
        u, post, comb = block.hc_attn.pre(x)
        o = block.attn.window_only(
            rms_norm(u, block.attn_norm, eps),
            inputs.keys,
            inputs.slots,
            inputs.first_keys,
            ring.rows,
        )
        # Learned routing does not read ids; any tensor of the right length serves.
        streams = block.experts(block.hc_attn.post(o, x, post, comb), inputs.keys)
        normed = rms_norm(self.collapse(streams), self.norm, eps)
        return MtpOutput(normed=normed[:rows], streams=streams[:rows])

    @torch.inference_mode()
    def write_rows(self, inputs: MtpInputs, ring: DrafterRing) -> None:
        """Write keys only: a row's key depends on that row alone, not on attention."""
        if inputs.keys.shape[0] == 1 and inputs.keys.device.type == "cpu":
            inputs = _twice(inputs)
        x = self.combine(inputs.embeds, inputs.hiddens)
        u, _, _ = self.block.hc_attn.pre(x)
        normed = rms_norm(u, self.block.attn_norm, self.config.rms_norm_eps)
        keys = self.block.attn.key_rows(normed, inputs.keys)
        ring.rows[inputs.slots, inputs.keys % ring.rows.shape[1]] = keys.to(ring.rows.dtype)


def _twice(inputs: MtpInputs) -> MtpInputs:
    return MtpInputs(
        embeds=torch.cat((inputs.embeds, inputs.embeds)),
        hiddens=torch.cat((inputs.hiddens, inputs.hiddens)),
        keys=torch.cat((inputs.keys, inputs.keys)),
        slots=torch.cat((inputs.slots, inputs.slots)),
        first_keys=torch.cat((inputs.first_keys, inputs.first_keys)),
    )
