"""The target and the draft block in compiled loops for a CPU, and what decides whether they run.

Importing this package needs no numba; the names below are loaded when first used.

Legend: R rows of a step, D hidden, H heads, d head_dim, E experts.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from paceline.config import ModelConfig

if TYPE_CHECKING:
    from paceline.ops.numba_cpu.model import FusedDense, FusedModel, FusedMtpBlock

__all__ = ["FusedDense", "FusedModel", "FusedMtpBlock", "available", "unsupported", "why_not"]


def why_not() -> str:
    """Why the compiled path cannot run on this machine; empty where it can."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    if sys.byteorder != "little":
        return "packed weights are little-endian, this machine is not"
    try:
        importlib.import_module("paceline.ops.numba_cpu.kernels")
    except Exception as error:
        return f"numba cannot be used: {error}"
    return ""


def available() -> bool:
    """Whether numba is here and loads."""
    return not why_not()


def unsupported(config: ModelConfig) -> str:
    """Which of a model's shapes the compiled path does not serve; empty where it serves all.

    Vectors are 16 wide and heads go by fours, which every released DeepSeek-V4 shape obeys.
    """
    multiples = {
        "hidden_size": 64,
        "head_dim": 16,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 16,
        "o_lora_rank": 16,
        "index_head_dim": 16,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "index_n_heads": 4,
    }
    for name, unit in multiples.items():
        value = getattr(config, name)
        if value % unit:
            return f"{name} is {value}; multiples of {unit} are served"
    if config.num_attention_heads * config.head_dim // config.o_groups % 16:
        return f"o_groups is {config.o_groups}; groups must be multiples of 16 wide"
    if config.hc_mult != 4:
        return f"hc_mult is {config.hc_mult}; 4 is served"
    return ""


def __getattr__(name: str) -> Any:
    if name in ("FusedDense", "FusedModel", "FusedMtpBlock"):
        return getattr(importlib.import_module("paceline.ops.numba_cpu.model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
