"""Weights to running parts: chooses the plain torch path or its fused CPU twin, once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from paceline.config import ModelConfig
from paceline.models.deepseek_v4.mtp import DeepseekV4MtpModule
from paceline.models.deepseek_v4.transformer import DeepseekV4Model
from paceline.models.step import MtpBlock, TargetModel
from paceline.ops import numba_cpu
from paceline.ops.dense import DenseWeight
from paceline.types import ConfigError

__all__ = ["Backend", "Built", "build"]

log = logging.getLogger(__name__)

Backend = Literal["auto", "torch", "fused"]


@dataclass(frozen=True, kw_only=True)
class Built:
    """What an engine needs of a model.

    Attributes:
        model: the target.
        mtp: the draft block, or None where the checkpoint has none.
        embed_tokens, lm_head: tables shared by both.
        backend: "torch" or "fused", what was chosen.
    """

    model: TargetModel
    mtp: MtpBlock | None
    embed_tokens: DenseWeight
    lm_head: DenseWeight
    backend: str


def build(
    weights: Mapping[str, torch.Tensor],
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: Backend = "auto",
    num_threads: int | None = None,
) -> Built:
    """Build target and draft block.

    Args:
        weights: DeepSeek names; moved to `device` if elsewhere.
        config: shapes.
        device: where to run.
        dtype: of computation.
        backend: "fused" needs a CPU, fp32 and numba; "auto" takes it where it can be had and says
            once why not where it cannot.
        num_threads: threads of the fused path; None lets it choose.

    Raises:
        ConfigError: "fused" was asked for and cannot be had (says why).
    """
    if backend not in ("auto", "torch", "fused"):
        raise ConfigError(f"backend is {backend!r}; allowed are auto, torch, fused")
    why_not = _why_not_fused(config, device, dtype)
    if backend == "fused" and why_not:
        raise ConfigError(f"backend fused cannot be had: {why_not}")
    if backend == "auto" and why_not and device.type == "cpu" and dtype == torch.float32:
        log.warning("fused CPU kernels are off, plain torch runs instead: %s", why_not)
    has_mtp = "mtp.0.e_proj.weight" in weights
    if backend != "torch" and not why_not:
        from paceline.ops.numba_cpu import FusedDense, FusedModel, FusedMtpBlock

        fused_embed = FusedDense(weights["embed.weight"], num_threads=num_threads)
        fused_head = FusedDense(weights["head.weight"], num_threads=num_threads)
        return Built(
            model=FusedModel(
                weights,
                config,
                embed_tokens=fused_embed,
                lm_head=fused_head,
                num_threads=num_threads,
            ),
            mtp=FusedMtpBlock(weights, config, num_threads=num_threads) if has_mtp else None,
            embed_tokens=fused_embed,
            lm_head=fused_head,
            backend="fused",
        )
    weights = {name: tensor.to(device) for name, tensor in weights.items()}
    embed = DenseWeight(weights["embed.weight"], dtype=dtype)
    head = DenseWeight(weights["head.weight"], dtype=dtype)
    return Built(
        model=DeepseekV4Model(weights, config, dtype=dtype, embed_tokens=embed, lm_head=head),
        mtp=DeepseekV4MtpModule(weights, config, dtype=dtype) if has_mtp else None,
        embed_tokens=embed,
        lm_head=head,
        backend="torch",
    )


def _why_not_fused(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cpu":
        return f"it runs on a CPU, the device is {device}"
    if dtype != torch.float32:
        return f"it computes in float32, the dtype is {dtype}"
    return numba_cpu.why_not() or numba_cpu.unsupported(config)
