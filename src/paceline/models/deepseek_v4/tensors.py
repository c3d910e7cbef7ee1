"""Names, shapes and storage of every DeepSeek-V4 parameter.

Sources: the released DeepSeek-V4-Flash and -Pro indices; DeepSeek's ``inference/convert.py`` for
synonyms and for the meaning of the quantised tensors; transformers' conversion table for its names.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from paceline.config import ModelConfig
from paceline.models.deepseek_v4.quant import FP4_BLOCK, fp8_scale_shape

__all__ = ["DrafterKind", "StorageKind", "TensorSpec", "canonical_name", "tensor_specs"]

DrafterKind = Literal["mtp", "dspark"]
"""The multi-token-prediction head, or the block-parallel DSpark drafter of later releases."""

StorageKind = Literal["fp32", "bf16", "fp8", "fp4", "int64"]
"""How a tensor lies in the file; fp8 and fp4 have a ue8m0 ``scale`` beside the ``weight``."""

# What may stand in a file where the release stores the kind on the left.
_ACCEPTED: dict[StorageKind, tuple[StorageKind, ...]] = {
    "fp32": ("fp32", "bf16"),
    "bf16": ("bf16", "fp32"),
    "fp8": ("fp8", "bf16", "fp32"),
    "fp4": ("fp4", "fp8", "bf16", "fp32"),
    "int64": ("int64",),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a configuration needs.

    Attributes:
        shape: unpacked shape in elements; linear weights are ``[out, in]``.
        kinds: the storage kinds accepted; the first is the one the release uses.
        dims: `shape` in terms of the configuration's fields, for messages.
    """

    shape: tuple[int, ...]
    kinds: tuple[StorageKind, ...]
    dims: tuple[str, ...]

    @property
    def release_kind(self) -> StorageKind:
        """The storage kind of the released checkpoints."""
        return self.kinds[0]

    def stored_shape(self, kind: StorageKind) -> tuple[int, ...]:
        """Return the shape in the file when stored as `kind`."""
        if kind == "fp4":
            return (*self.shape[:-1], self.shape[-1] // 2)
        return self.shape

    def scale_shape(self, kind: StorageKind) -> tuple[int, ...] | None:
        """Return the shape of the scales when stored as `kind`; None where there are none."""
        if kind == "fp8":
            return fp8_scale_shape(self.shape)
        if kind == "fp4":
            return self.shape[0], -(-self.shape[1] // FP4_BLOCK)
        return None


def canonical_name(name: str) -> str:
    """Return DeepSeek's name of a parameter, given that or transformers' name.

    transformers' module names, and the half-converted ones that its ``save_pretrained`` writes
    (``model.layers.0.attn.norm.weight`` for ``layers.0.attn.kv_norm.weight``), are both understood.
    A name that is none of these comes back as it is.
    """
    bare = name.removeprefix("model.")
    for pattern, replacement in _TOP_LEVEL_NAMES:
        bare = pattern.sub(replacement, bare)
    block = re.match(r"(layers|mtp)\.\d+\.", bare)
    if block is None:
        return bare
    rest = bare[block.end() :]
    for pattern, replacement in _BLOCK_NAMES:
        rest = pattern.sub(replacement, rest)
    return block.group() + rest


_TOP_LEVEL_NAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
    )
)
_BLOCK_NAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\.weight_scale_inv$", ".scale"),
        (r"^self_attn\.", "attn."),
        (r"^mlp\.", "ffn."),
        (r"^input_layernorm\.", "attn_norm."),
        (r"^post_attention_layernorm\.", "ffn_norm."),
        (r"^(attn|ffn)_hc\.", r"hc_\1_"),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"^attn\.compressor\.indexer\.scorer\.weights_proj\.", "attn.indexer.weights_proj."),
        (r"^attn\.compressor\.indexer\.q_b_proj\.", "attn.indexer.wq_b."),
        (r"^attn\.compressor\.indexer\.", "attn.indexer.compressor."),
        (r"compressor\.kv_proj\.", "compressor.wkv."),
        (r"compressor\.gate_proj\.", "compressor.wgate."),
        (r"compressor\.position_bias$", "compressor.ape"),
        (r"compressor\.kv_norm\.", "compressor.norm."),
        (r"^attn\.sinks$", "attn.attn_sink"),
        (r"^attn\.q_a_proj\.", "attn.wq_a."),
        (r"^attn\.q_a_norm\.", "attn.q_norm."),
        (r"^attn\.q_b_proj\.", "attn.wq_b."),
        (r"^attn\.kv_proj\.", "attn.wkv."),
        (r"^attn\.norm\.", "attn.kv_norm."),
        (r"^attn\.o_a_proj\.", "attn.wo_a."),
        (r"^attn\.o_b_proj\.", "attn.wo_b."),
        (r"^ffn\.gate\.e_score_correction_bias$", "ffn.gate.bias"),
        (r"^ffn\.shared_experts\.gate_proj\.", "ffn.shared_experts.w1."),
        (r"^ffn\.shared_experts\.down_proj\.", "ffn.shared_experts.w2."),
        (r"^ffn\.shared_experts\.up_proj\.", "ffn.shared_experts.w3."),
    )
)


def tensor_specs(config: ModelConfig, drafter: DrafterKind | None) -> dict[str, TensorSpec]:
    """Return every tensor that running `config` needs, by DeepSeek name, in reading order.

    Args:
        config: the shapes.
        drafter: "mtp" adds ``mtp.0.*``. A DSpark drafter is not run, so it adds nothing.
    """
    table = _SpecTable(config)
    table.add("embed.weight", "bf16", "vocab_size", "hidden_size")
    for layer, ratio in enumerate(config.compress_ratios):
        table.add_block(f"layers.{layer}", ratio=ratio, hashed=config.is_hash_routed(layer))
    table.add_collapse("")
    table.add("head.weight", "bf16", "vocab_size", "hidden_size")
    if drafter == "mtp":
        for projection in ("e_proj", "h_proj"):
            name = f"mtp.0.{projection}.weight"
            table.add(name, "fp8", "hidden_size", "hidden_size")
        for norm in ("enorm", "hnorm"):
            table.add(f"mtp.0.{norm}.weight", "bf16", "hidden_size")
        table.add_block("mtp.0", ratio=0, hashed=False)
        table.add_collapse("mtp.0.")
    return table.specs


class _SpecTable:
    """Collects specs whose dimensions are written in terms of configuration fields."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.specs: dict[str, TensorSpec] = {}

    def _size(self, text: str) -> int:
        """Evaluate a product of fields, numbers and ``(hc_mult+2)``, perhaps with ``/field``."""
        product, _, divisor = text.partition("/")
        value = math.prod(
            sum(int(term) if term.isdigit() else getattr(self.config, term) for term in terms)
            for terms in (factor.strip("()").split("+") for factor in product.split("*"))
        )
        return value // int(getattr(self.config, divisor)) if divisor else value

    def add(self, name: str, kind: StorageKind, *dims: str) -> None:
        """Add one tensor that the release stores as `kind`."""
        shape = tuple(self._size(text) for text in dims)
        self.specs[name] = TensorSpec(shape, _ACCEPTED[kind], dims)

    def add_block(self, prefix: str, *, ratio: int, hashed: bool) -> None:
        """Add the tensors of one decoder block under ``prefix.``."""
        self.add(f"{prefix}.attn_norm.weight", "bf16", "hidden_size")
        self.add(f"{prefix}.ffn_norm.weight", "bf16", "hidden_size")
        mixes = "hc_mult*(hc_mult+2)"
        for name in (f"{prefix}.hc_attn", f"{prefix}.hc_ffn"):
            self.add(f"{name}_fn", "fp32", mixes, "hc_mult*hidden_size")
            self.add(f"{name}_base", "fp32", mixes)
            self.add(f"{name}_scale", "fp32", "3")

        attn = f"{prefix}.attn"
        heads = "num_attention_heads*head_dim"
        grouped = "o_groups*o_lora_rank"
        self.add(f"{attn}.wq_a.weight", "fp8", "q_lora_rank", "hidden_size")
        self.add(f"{attn}.q_norm.weight", "bf16", "q_lora_rank")
        self.add(f"{attn}.wq_b.weight", "fp8", heads, "q_lora_rank")
        self.add(f"{attn}.wkv.weight", "fp8", "head_dim", "hidden_size")
        self.add(f"{attn}.kv_norm.weight", "bf16", "head_dim")
        self.add(f"{attn}.wo_a.weight", "fp8", grouped, f"{heads}/o_groups")
        self.add(f"{attn}.wo_b.weight", "fp8", "hidden_size", grouped)
        self.add(f"{attn}.attn_sink", "fp32", "num_attention_heads")
        if ratio:
            # Rows of ratio-4 compressors overlap: their projections hold two halves.
            self._add_compressor(f"{attn}.compressor", ratio, "head_dim")
        if ratio == 4:
            indexer = f"{attn}.indexer"
            queries = "index_n_heads*index_head_dim"
            self.add(f"{indexer}.wq_b.weight", "fp8", queries, "q_lora_rank")
            name = f"{indexer}.weights_proj.weight"
            self.add(name, "bf16", "index_n_heads", "hidden_size")
            self._add_compressor(f"{indexer}.compressor", ratio, "index_head_dim")

        ffn = f"{prefix}.ffn"
        inner = "moe_intermediate_size"
        self.add(f"{ffn}.gate.weight", "bf16", "n_routed_experts", "hidden_size")
        if hashed:
            name = f"{ffn}.gate.tid2eid"
            self.add(name, "int64", "vocab_size", "num_experts_per_tok")
        else:
            self.add(f"{ffn}.gate.bias", "fp32", "n_routed_experts")
        for expert in range(self.config.n_routed_experts):
            name = f"{ffn}.experts.{expert}"
            self.add(f"{name}.w1.weight", "fp4", inner, "hidden_size")
            self.add(f"{name}.w2.weight", "fp4", "hidden_size", inner)
            self.add(f"{name}.w3.weight", "fp4", inner, "hidden_size")
        for matrix in ("w1", "w2", "w3"):
            dims = ("hidden_size", inner) if matrix == "w2" else (inner, "hidden_size")
            self.add(f"{ffn}.shared_experts.{matrix}.weight", "fp8", *dims)

    def _add_compressor(self, name: str, ratio: int, width: str) -> None:
        wide = f"2*{width}" if ratio == 4 else width
        self.add(f"{name}.ape", "fp32", str(ratio), wide)
        self.add(f"{name}.wkv.weight", "bf16", wide, "hidden_size")
        self.add(f"{name}.wgate.weight", "bf16", wide, "hidden_size")
        self.add(f"{name}.norm.weight", "bf16", width)

    def add_collapse(self, prefix: str) -> None:
        """Add the final norm and the weights that join the streams."""
        self.add(f"{prefix}norm.weight", "bf16", "hidden_size")
        name = f"{prefix}hc_head"
        self.add(f"{name}_fn", "fp32", "hc_mult", "hc_mult*hidden_size")
        self.add(f"{name}_base", "fp32", "hc_mult")
        self.add(f"{name}_scale", "fp32", "1")
