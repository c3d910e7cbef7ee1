"""Reading DeepSeek-V4 checkpoints: which tensors there must be, and turning them into parameters.

Three steps, each usable alone:

1. `Checkpoint` reads the headers of the safetensors files (no data) and gives every tensor its
   DeepSeek name, whether the file uses DeepSeek's names or those that transformers writes.
2. `plan_load` compares the headers with `tensor_specs`, the full table of what a configuration
   needs, and lists everything that is missing, left over, or of the wrong shape or dtype.
3. `load_weights` maps the files into memory, decodes tensor by tensor into buffers that start as
   NaN, and checks that none of that NaN remains.

The drafter a checkpoint carries is told by its tensors' names, never by its configuration: releases
with a DSpark drafter still say ``num_nextn_predict_layers: 1``.

Sources: the released DeepSeek-V4-Flash and -Pro indices; DeepSeek's ``inference/convert.py`` for
the meaning of the quantised tensors; the safetensors format description.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.config import ModelConfig, read_json_object
from paceline.models.deepseek_v4.quant import (
    FP4_BLOCK,
    dequantize_fp4,
    dequantize_fp8,
    fp8_scale_shape,
)
from paceline.types import CheckpointError, ConfigError

__all__ = [
    "Checkpoint",
    "DrafterKind",
    "LoadPlan",
    "StorageKind",
    "StoredTensor",
    "TensorSpec",
    "Weights",
    "canonical_name",
    "load_weights",
    "plan_load",
    "tensor_specs",
]

DrafterKind = Literal["mtp", "dspark"]
"""The multi-token-prediction head, or the block-parallel DSpark drafter of later releases."""

StorageKind = Literal["fp32", "bf16", "fp8", "fp4", "int64"]
"""How a tensor lies in the file; fp8 and fp4 have a ue8m0 ``scale`` beside the ``weight``."""

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}
_TORCH_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
}
_STORAGE_OF_DTYPE: dict[str, StorageKind] = {
    "F32": "fp32",
    "BF16": "bf16",
    "F8_E4M3": "fp8",
    "I8": "fp4",
    "U8": "fp4",
    "I64": "int64",
}
_DTYPE_OF_STORAGE: dict[StorageKind, str] = {
    "fp32": "F32",
    "bf16": "BF16",
    "fp8": "F8_E4M3 (with F8_E8M0 scales)",
    "fp4": "I8 (packed fp4, with F8_E8M0 scales)",
    "int64": "I64",
}
# What may stand in a file where the release stores the kind on the left.
_ACCEPTED: dict[StorageKind, tuple[StorageKind, ...]] = {
    "fp32": ("fp32", "bf16"),
    "bf16": ("bf16", "fp32"),
    "fp8": ("fp8", "bf16", "fp32"),
    "fp4": ("fp4", "fp8", "bf16", "fp32"),
    "int64": ("int64",),
}

_HEADER_LIMIT = 100_000_000
_LISTED_NAMES = 20

_EXPERT = re.compile(r"(?P<ffn>.+\.ffn)\.experts\.(?P<expert>\d+)\.(?P<matrix>w[123])\.weight")

# Files may hold these; the reasons are what `paceline inspect` prints.
_ALWAYS_IGNORED: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"mtp\.\d+\.(embed|embed_tokens|emb\.tok_emb|head|lm_head|shared_head\.head)\.weight"
        ),
        "a drafter's copy of the trunk's embedding or output head, which are shared",
    ),
)
_DRAFTER_IGNORED = (re.compile(r"mtp\..+"), "the drafter, and no drafts are wanted")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes:
        name: as the file spells it.
        file: the safetensors file.
        dtype: safetensors' name of the stored type, for example ``"BF16"``.
        shape: stored shape (fp4 weights are packed two inputs a byte).
        start, end: byte range within the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes of data."""
        return self.end - self.start


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


@dataclass(frozen=True, slots=True)
class _Source:
    """How one expected tensor is found: a stored tensor, its scales, or rows of a fused one."""

    spec: TensorSpec
    kind: StorageKind
    weight: StoredTensor
    scale: StoredTensor | None = None
    expert: int | None = None
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What loading would do, known from headers alone.

    Attributes:
        config: the configuration the plan is for.
        drafter: the kind whose tensors are read, or None.
        sources: expected DeepSeek name -> where it comes from.
        ignored: stored names that are knowingly left unread -> why.
        problems: every reason to refuse, each a sentence with names; empty when it can load.
    """

    config: ModelConfig
    drafter: DrafterKind | None
    sources: Mapping[str, _Source]
    ignored: Mapping[str, str]
    problems: tuple[str, ...]


class Weights(Mapping[str, Tensor]):
    """The parameters of one checkpoint on the CPU, by DeepSeek name.

    Routed experts are stacked so that a kernel can read them without gathering:
    ``layers.L.ffn.experts.w1`` and ``.w3`` are ``[experts, moe_intermediate, hidden]``, ``.w2`` is
    ``[experts, hidden, moe_intermediate]``; likewise under ``mtp.0.ffn``. Everything else keeps
    name and shape (``layers.0.attn.wq_a.weight`` ``[q_lora_rank, hidden]``, ...).

    Attributes:
        config: the configuration the weights belong to.
        drafter: "mtp" if ``mtp.0.*`` was loaded, else None.
        ignored: stored names that were knowingly not read -> why.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        config: ModelConfig,
        drafter: DrafterKind | None = None,
        ignored: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._tensors = dict(tensors)
        self.config = config
        self.drafter = drafter
        self.ignored = ignored

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters together."""
        return sum(tensor.nbytes for tensor in self._tensors.values())


class Checkpoint:
    """A checkpoint folder as its headers describe it; no tensor data is held.

    Attributes:
        path: the folder.
        raw_config: the parsed ``config.json``, None if there is a problem with it.
        files: the safetensors files, in name order.
        tensors: DeepSeek name -> where the tensor lies.
        unindexed_files: safetensors files beside the index that it does not name; not read.
        problems: what is wrong with the files; always empty after `open`.
    """

    def __init__(
        self,
        *,
        path: Path,
        raw_config: Mapping[str, Any] | None,
        files: tuple[Path, ...],
        tensors: Mapping[str, StoredTensor],
        unindexed_files: tuple[Path, ...],
        problems: tuple[str, ...],
    ) -> None:
        self.path = path
        self.raw_config = raw_config
        self.files = files
        self.tensors = tensors
        self.unindexed_files = unindexed_files
        self.problems = problems

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the headers of a checkpoint folder.

        Raises:
            CheckpointError: a file is missing, truncated, malformed, or contradicts the index; the
                message names every such file.
        """
        checkpoint = cls.scan(path)
        if checkpoint.problems:
            raise CheckpointError("; ".join(checkpoint.problems))
        return checkpoint

    @classmethod
    def scan(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the headers like `open`, but collect the files' problems instead of raising.

        Raises:
            CheckpointError: `path` is no folder, so that there is nothing to describe.
        """
        folder = Path(path)
        if not folder.exists():
            raise CheckpointError(f"{folder} does not exist; a checkpoint folder is needed")
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is a file; a checkpoint folder is needed")
        problems: list[str] = []
        raw_config: dict[str, Any] | None = None
        try:
            raw_config = read_json_object(folder / "config.json")
        except CheckpointError as error:
            problems.append(str(error))

        present = sorted(folder.glob("*.safetensors"))
        index: dict[str, str] | None = None
        if (folder / INDEX_NAME).exists():
            try:
                index = _read_index(folder / INDEX_NAME)
            except CheckpointError as error:
                problems.append(str(error))
        if index is not None:
            files = [folder / name for name in sorted(set(index.values()))]
        elif len(present) > 1 and (folder / SINGLE_NAME) in present:
            files = [folder / SINGLE_NAME]
        elif len(present) > 1:
            problems.append(
                f"{folder} holds {len(present)} safetensors files but no readable {INDEX_NAME}"
            )
            files = present
        else:
            files = present
            if not present:
                problems.append(f"{folder} holds no safetensors files")

        stored: dict[str, StoredTensor] = {}
        unreadable: set[Path] = set()
        for file in files:
            if not file.exists():
                names = [name for name, shard in (index or {}).items() if shard == file.name]
                problems.append(
                    f"{file} does not exist, but {INDEX_NAME} places {len(names)} tensors in it"
                )
                unreadable.add(file)
                continue
            try:
                entries = _read_header(file)
            except CheckpointError as error:
                problems.append(str(error))
                unreadable.add(file)
                continue
            for entry in entries:
                if entry.name in stored:
                    other = stored[entry.name].file.name
                    problems.append(f"{entry.name} is both in {other} and in {file.name}")
                stored[entry.name] = entry
        if index is not None:
            problems += _index_problems(index, stored, {file.name for file in unreadable})

        tensors: dict[str, StoredTensor] = {}
        for name, entry in stored.items():
            canonical = canonical_name(name)
            if canonical in tensors:
                problems.append(f"{tensors[canonical].name} and {name} are the same parameter")
            tensors[canonical] = entry
        return cls(
            path=folder,
            raw_config=raw_config,
            files=tuple(files),
            tensors=tensors,
            unindexed_files=tuple(file for file in present if file not in files),
            problems=tuple(problems),
        )

    @property
    def drafter(self) -> DrafterKind | None:
        """The drafter that the tensors' names tell of; None if neither kind is there."""
        if "mtp.0.e_proj.weight" in self.tensors:
            return "mtp"
        if "mtp.0.main_proj.weight" in self.tensors:
            return "dspark"
        return None

    def read(self, name: str) -> Tensor:
        """Return the stored tensor of DeepSeek name `name`, undecoded, as a copy.

        Raises:
            CheckpointError: there is no such tensor, or its type is none that V4 uses.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} holds no tensor {name}")
        entry = self.tensors[name]
        if entry.dtype not in _TORCH_DTYPES:
            raise CheckpointError(f"{name} is stored as {entry.dtype}, which V4 does not use")
        return _MappedFiles().view(entry).clone()


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


def plan_load(checkpoint: Checkpoint, config: ModelConfig, *, want_drafter: bool) -> LoadPlan:
    """Match the stored tensors with what `config` needs, without reading data.

    Args:
        checkpoint: headers.
        config: the shapes wanted.
        want_drafter: whether drafts will be asked for; without, a drafter's tensors are ignored.

    Returns:
        The plan; its `problems` say what stands against loading.
    """
    problems = list(checkpoint.problems)
    found = checkpoint.drafter
    if want_drafter and found != "mtp":
        problems.append(_no_mtp_message(checkpoint))
    drafter: DrafterKind | None = "mtp" if want_drafter and found == "mtp" else None

    sources: dict[str, _Source] = {}
    used: set[str] = set()
    missing: list[str] = []
    wrong_shapes: list[str] = []
    wrong_dtypes: list[str] = []
    contradictions: dict[tuple[str, int], list[str]] = {}
    for name, spec in tensor_specs(config, drafter).items():
        located = _locate(checkpoint.tensors, name, spec)
        if located is None:
            missing.append(name)
            continue
        stored_name, entry, expected, expert, rows = located
        used.add(stored_name)
        kind = _STORAGE_OF_DTYPE.get(entry.dtype)
        if kind is None or kind not in spec.kinds or (expert is not None and kind == "fp4"):
            allowed = ", ".join(_DTYPE_OF_STORAGE[each] for each in spec.kinds)
            wrong_dtypes.append(f"{stored_name} is {entry.dtype}, allowed: {allowed}")
            used.add(_scale_name(stored_name))
            continue
        if expert is None:
            expected = spec.stored_shape(kind)
        if entry.shape != expected:
            wrong_shapes.append(
                f"{stored_name} is {list(entry.shape)}, needed: {list(expected)} "
                f"({' x '.join(spec.dims)})"
            )
            if expert is None:
                _note_contradictions(contradictions, stored_name, entry, spec, expected)
            used.add(_scale_name(stored_name))
            continue
        scale_shape = spec.scale_shape(kind)
        scale = None
        if scale_shape is not None:
            scale_name = _scale_name(stored_name)
            scale = checkpoint.tensors.get(scale_name)
            if scale is None:
                missing.append(scale_name)
                continue
            used.add(scale_name)
            if scale.dtype != "F8_E8M0":
                wrong_dtypes.append(f"{scale_name} is {scale.dtype}, allowed: F8_E8M0")
                continue
            if scale.shape != scale_shape:
                wrong_shapes.append(
                    f"{scale_name} is {list(scale.shape)}, needed: {list(scale_shape)}"
                )
                continue
        sources[name] = _Source(spec, kind, entry, scale, expert, rows)

    ignored: dict[str, str] = {}
    unexpected: list[str] = []
    for name, entry in checkpoint.tensors.items():
        if name in used:
            continue
        reason = _ignore_reason(name, drop_drafter=not want_drafter or found == "dspark")
        if reason is None:
            unexpected.append(entry.name)
        else:
            ignored[entry.name] = reason

    problems += _config_problems(config, checkpoint.tensors, contradictions)
    for names, text in (
        (missing, "missing from the files"),
        (unexpected, "in the files but not part of this model"),
        (wrong_shapes, "of the wrong shape"),
        (wrong_dtypes, "of the wrong dtype"),
    ):
        names = list(dict.fromkeys(names))
        if names:
            noun = "tensor is" if len(names) == 1 else "tensors are"
            problems.append(f"{len(names)} {noun} {text}: {_listed(names)}")
    return LoadPlan(config, drafter, sources, ignored, tuple(problems))


def load_weights(
    path: str | os.PathLike[str],
    config: ModelConfig | None = None,
    *,
    dtype: torch.dtype | None = None,
    want_drafter: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Weights:
    """Read a checkpoint into memory, every quantised tensor decoded exactly.

    Parameters that the release stores in fp32 (hyper-connections, sinks, position biases, router
    biases) are always fp32. Of the others, what the file holds as fp32 stays fp32 and everything
    else becomes bf16, or fp32 if a value's exponent leaves bf16's range.

    Args:
        path: checkpoint folder.
        config: its configuration, if already read; by default ``config.json``.
        dtype: None for the above; torch.float32 for everything; torch.bfloat16 to round what the
            file holds as fp32, except the parameters that are always fp32.
        want_drafter: load ``mtp.0.*`` too; without, a drafter of any kind is left unread.
        progress: called with (bytes read so far, bytes to read) after each tensor.

    Raises:
        CheckpointError: files missing, truncated or inconsistent; tensors missing, left over, of
            the wrong shape or dtype, or holding NaN; drafts wanted where no MTP head is.
        ConfigError: the configuration is not one Paceline runs, or `dtype` is none of the above.
    """
    if dtype not in (None, torch.float32, torch.bfloat16):
        raise ConfigError(f"dtype is {dtype}; allowed: None, torch.float32, torch.bfloat16")
    checkpoint = Checkpoint.open(path)
    if config is None:
        config = ModelConfig.from_dict(checkpoint.raw_config or {})
    plan = plan_load(checkpoint, config, want_drafter=want_drafter)
    if plan.problems:
        raise CheckpointError(f"{checkpoint.path} cannot be loaded: {'; '.join(plan.problems)}")

    buffers = _allocate(plan, dtype)
    files = _MappedFiles()
    # Ascending file order keeps reads sequential on a disk.
    order = sorted(
        plan.sources.items(), key=lambda item: (item[1].weight.file, item[1].weight.start)
    )
    total = sum(_bytes_to_read(source) for source in plan.sources.values())
    done = 0
    for name, source in order:
        try:
            values = _decode(files, source, dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{name} in {source.weight.file}: {error}") from None
        _store(buffers, name, values, widen=dtype is None)
        done += _bytes_to_read(source)
        if progress is not None:
            progress(done, total)
    _check_filled(buffers, config)
    return Weights(buffers, config=config, drafter=plan.drafter, ignored=plan.ignored)


def _no_mtp_message(checkpoint: Checkpoint) -> str:
    if checkpoint.drafter == "dspark":
        found = (
            "a DSpark drafter (mtp.0.main_proj), which this version does not run; it can still "
            "decode without drafts"
        )
    elif any(name.startswith("mtp.") for name in checkpoint.tensors):
        found = "mtp.* tensors without mtp.0.e_proj or mtp.0.main_proj, so no whole drafter"
    else:
        found = "no drafter (no mtp.* tensors); it can still decode without drafts"
    return (
        f"drafts are asked for, which needs an MTP head (mtp.0.e_proj); the checkpoint has {found}"
    )


def _scale_name(name: str) -> str:
    return name.removesuffix(".weight") + ".scale"


def _locate(
    tensors: Mapping[str, StoredTensor], name: str, spec: TensorSpec
) -> tuple[str, StoredTensor, tuple[int, ...], int | None, tuple[int, int] | None] | None:
    """Find a tensor, or the fused expert stack that holds it.

    Returns:
        (stored DeepSeek name, entry, whole stored shape if fused, expert, row range of `w1`/`w3`).
    """
    if name in tensors:
        return name, tensors[name], spec.shape, None, None
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    matrix, expert = match["matrix"], int(match["expert"])
    fused = f"{match['ffn']}.experts.{'down_proj' if matrix == 'w2' else 'gate_up_proj'}"
    if fused not in tensors:
        return None
    entry = tensors[fused]
    experts = entry.shape[0] if entry.shape else 0
    if expert >= experts:
        return None
    rows, columns = spec.shape
    if matrix == "w2":
        return fused, entry, (experts, rows, columns), expert, None
    start = 0 if matrix == "w1" else rows
    return fused, entry, (experts, 2 * rows, columns), expert, (start, start + rows)


def _note_contradictions(
    noted: dict[tuple[str, int], list[str]],
    name: str,
    entry: StoredTensor,
    spec: TensorSpec,
    expected: tuple[int, ...],
) -> None:
    """Record which single configuration fields a wrongly shaped tensor disagrees with."""
    if len(entry.shape) != len(expected):
        return
    for field, given, needed in zip(spec.dims, entry.shape, expected, strict=True):
        if given != needed and field.isidentifier():
            # A packed dimension counts bytes; the field counts elements.
            packed = needed != spec.shape[spec.dims.index(field)]
            noted.setdefault((field, given * 2 if packed else given), []).append(name)


def _config_problems(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    contradictions: Mapping[tuple[str, int], list[str]],
) -> list[str]:
    """Name the configuration fields that the tensors as a whole disagree with."""
    problems = []
    for (field, said), names in contradictions.items():
        others = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
        problems.append(
            f"the configuration says {field} = {getattr(config, field)}, but {names[0]}{others} "
            f"say {said}"
        )
    layers = {int(match[1]) for name in tensors if (match := re.match(r"layers\.(\d+)\.", name))}
    if layers and max(layers) + 1 != config.num_hidden_layers:
        problems.append(
            f"the configuration says num_hidden_layers = {config.num_hidden_layers}, but the "
            f"tensors hold layers {min(layers)} to {max(layers)}"
        )
    experts = set()
    for name, entry in tensors.items():
        if not name.startswith("layers."):
            continue
        if match := re.match(r"layers\.\d+\.ffn\.experts\.(\d+)\.", name):
            experts.add(int(match[1]) + 1)
        elif name.endswith(".ffn.experts.gate_up_proj") and entry.shape:
            experts.add(entry.shape[0])
    if experts and max(experts) != config.n_routed_experts:
        problems.append(
            f"the configuration says n_routed_experts = {config.n_routed_experts}, but the tensors "
            f"hold {max(experts)} experts a layer"
        )
    return problems


def _ignore_reason(name: str, *, drop_drafter: bool) -> str | None:
    for pattern, reason in _ALWAYS_IGNORED:
        if pattern.fullmatch(name):
            return reason
    pattern, reason = _DRAFTER_IGNORED
    return reason if drop_drafter and pattern.fullmatch(name) else None


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    shown = ", ".join(every[:_LISTED_NAMES])
    rest = len(every) - _LISTED_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown


def _bytes_to_read(source: _Source) -> int:
    scale = source.scale.num_bytes if source.scale is not None else 0
    if source.expert is None:
        return source.weight.num_bytes + scale
    bits = _DTYPE_BITS[source.weight.dtype]
    return math.prod(source.spec.shape) * bits // 8


def _target_dtype(source: _Source, dtype: torch.dtype | None) -> torch.dtype:
    if source.kind == "int64":
        return torch.int64
    if source.spec.release_kind == "fp32":
        return torch.float32
    if dtype is not None:
        return dtype
    return torch.float32 if source.kind == "fp32" else torch.bfloat16


def _allocate(plan: LoadPlan, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Make every parameter's buffer, filled with NaN (table entries with -1)."""
    buffers: dict[str, Tensor] = {}
    for name, source in plan.sources.items():
        wanted = _target_dtype(source, dtype)
        shape = source.spec.shape
        match = _EXPERT.fullmatch(name)
        if match is not None:
            name = f"{match['ffn']}.experts.{match['matrix']}"
            shape = (plan.config.n_routed_experts, *shape)
            if name in buffers:
                # One expert stored wider than the others widens the stack.
                wanted = torch.promote_types(wanted, buffers[name].dtype)
                if wanted == buffers[name].dtype:
                    continue
        fill = -1 if wanted == torch.int64 else math.nan
        buffers[name] = torch.full(shape, fill, dtype=wanted)
    return buffers


def _decode(files: _MappedFiles, source: _Source, dtype: torch.dtype | None) -> Tensor:
    """Return one tensor's values; a view of the file where nothing had to be decoded."""
    stored = files.view(source.weight)
    if source.expert is not None:
        stored = stored[source.expert]
        if source.rows is not None:
            stored = stored[slice(*source.rows)]
    if source.scale is None:
        return stored
    decode = dequantize_fp8 if source.kind == "fp8" else dequantize_fp4
    if dtype is not None:
        return decode(stored, files.view(source.scale), dtype=dtype)
    if source.kind == "fp4":
        # Two significant bits: bf16 holds every value that fp32 holds.
        return decode(stored, files.view(source.scale), dtype=torch.bfloat16)
    exact = decode(stored, files.view(source.scale))
    narrow = exact.to(torch.bfloat16)
    return narrow if torch.equal(narrow.to(torch.float32), exact) else exact


def _store(buffers: dict[str, Tensor], name: str, values: Tensor, *, widen: bool) -> None:
    """Copy one tensor's values into its buffer, or its expert's place in the stack.

    Args:
        buffers: all parameters; a buffer that must become wider is replaced here.
        name: DeepSeek name of the single tensor.
        values: decoded.
        widen: make a bf16 buffer fp32 when `values` are (they are only where bf16 would round).
    """
    match = _EXPERT.fullmatch(name)
    key = name if match is None else f"{match['ffn']}.experts.{match['matrix']}"
    if widen and values.dtype == torch.float32 and buffers[key].dtype == torch.bfloat16:
        buffers[key] = buffers[key].to(torch.float32)
    target = buffers[key] if match is None else buffers[key][int(match["expert"])]
    target.copy_(values)


def _check_filled(buffers: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Refuse parameters that are, in part, not finite numbers or not expert numbers.

    Raises:
        CheckpointError: lists them; the NaN is the file's own, or a buffer was never written.
    """
    bad = []
    for name, tensor in buffers.items():
        if tensor.dtype == torch.int64:
            inside = (tensor >= 0) & (tensor < config.n_routed_experts)
            outside = tensor.numel() - int(inside.sum())
            if outside:
                bad.append(
                    f"{name} ({outside} of {tensor.numel()} entries are not experts 0 to "
                    f"{config.n_routed_experts - 1})"
                )
        else:
            finite = torch.isfinite(tensor)
            if not bool(finite.all()):
                count = tensor.numel() - int(finite.sum())
                bad.append(f"{name} ({count} of {tensor.numel()} values are not finite)")
    if bad:
        noun = "parameter holds" if len(bad) == 1 else "parameters hold"
        raise CheckpointError(f"{len(bad)} {noun} no usable values: {_listed(bad)}")


class _MappedFiles:
    """A memory map of the file in use; it lives as long as a view of it."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def view(self, entry: StoredTensor) -> Tensor:
        """Return the stored tensor as a view of the file; private, so writes never reach it."""
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=_TORCH_DTYPES[entry.dtype])
        if entry.file not in self._maps:
            try:
                with entry.file.open("rb") as handle:
                    mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                reason = error.strerror or error
                raise CheckpointError(f"{entry.file} cannot be mapped: {reason}") from None
            self._maps = {entry.file: mapped}
        dtype = _TORCH_DTYPES[entry.dtype]
        raw = torch.frombuffer(
            self._maps[entry.file], dtype=torch.uint8, count=entry.num_bytes, offset=entry.start
        )
        if entry.start % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)


def _read_index(path: Path) -> dict[str, str]:
    """Return the index's tensor name -> file name table.

    Raises:
        CheckpointError: the table is malformed or points outside the folder.
    """
    table = read_json_object(path).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise CheckpointError(f"{path} has no weight_map of tensor names to file names")
    for file in table.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path} names the file {file!r}; a safetensors file of the same folder is needed"
            )
    return table


def _index_problems(
    index: Mapping[str, str], stored: Mapping[str, StoredTensor], unreadable: set[str]
) -> list[str]:
    problems = []
    absent = [
        f"{name} (in {file})"
        for name, file in index.items()
        if file not in unreadable and (name not in stored or stored[name].file.name != file)
    ]
    if absent:
        problems.append(
            f"{INDEX_NAME} places {len(absent)} tensors in files that lack them: {_listed(absent)}"
        )
    extra = [name for name in stored if name not in index]
    if extra:
        problems.append(
            f"{len(extra)} tensors are in the files but not in {INDEX_NAME}: {_listed(extra)}"
        )
    return problems


def _read_header(path: Path) -> list[StoredTensor]:
    """Read and check the header of one safetensors file.

    Raises:
        CheckpointError: the file is truncated or malformed; the message names it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            prefix = handle.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix.startswith(b"version "):
                raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself")
            if len(prefix) < 8 or (length <= _HEADER_LIMIT and 8 + length > size):
                raise CheckpointError(f"{path} is truncated: {size} bytes do not hold its header")
            if length > _HEADER_LIMIT:
                raise CheckpointError(f"{path} is not a safetensors file")
            text = handle.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        header = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise CheckpointError(f"{path} is not a safetensors file: its header is no JSON") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is no JSON object")

    base = 8 + length
    entries = [
        _parse_entry(path, name, value, base)
        for name, value in header.items()
        if name != "__metadata__"
    ]
    position = base
    for entry in sorted(entries, key=lambda each: (each.start, each.end)):
        if entry.start != position:
            raise CheckpointError(f"{path} is malformed: {entry.name} does not follow on the last")
        position = entry.end
    if position > size:
        raise CheckpointError(
            f"{path} is truncated: its header describes {position} bytes, the file has {size}"
        )
    if position < size:
        raise CheckpointError(
            f"{path} is malformed: its header describes {position} bytes, the file has {size}"
        )
    return entries


def _parse_entry(path: Path, name: str, value: object, base: int) -> StoredTensor:
    try:
        fields: Any = value
        dtype, shape, (start, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        valid = isinstance(dtype, str) and all(
            isinstance(number, int) and number >= 0 for number in (*shape, start, end)
        )
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise CheckpointError(f"{path} is malformed: bad header entry for {name}")
    if dtype not in _DTYPE_BITS:
        raise CheckpointError(f"{path} stores {name} as {dtype}, which is not understood")
    if (end - start) * 8 != math.prod(shape) * _DTYPE_BITS[dtype]:
        raise CheckpointError(
            f"{path} is malformed: {name} is {dtype} {list(shape)} but has {end - start} bytes"
        )
    return StoredTensor(name, path, dtype, shape, base + start, base + end)
