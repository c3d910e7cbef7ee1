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

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from paceline.config import ModelConfig, read_json_object
from paceline.models.deepseek_v4.quant import dequantize_fp4, dequantize_fp8
from paceline.models.deepseek_v4.shards import (
    DTYPE_BITS,
    INDEX_NAME,
    SINGLE_NAME,
    TORCH_DTYPES,
    MappedFiles,
    StoredTensor,
    index_problems,
    listed,
    read_header,
    read_index,
)
from paceline.models.deepseek_v4.tensors import (
    DrafterKind,
    StorageKind,
    TensorSpec,
    canonical_name,
    tensor_specs,
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
_DROPPED_DRAFTER = "the drafter's, and no drafts are wanted"
_FOREIGN_DRAFTER = "a DSpark drafter's, which this version does not run"


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
                index = read_index(folder / INDEX_NAME)
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
                entries = read_header(file)
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
            problems += index_problems(index, stored, {file.name for file in unreadable})

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
        if entry.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"{name} is stored as {entry.dtype}, which V4 does not use")
        return MappedFiles().view(entry).clone()


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
        reason = _ignore_reason(name, found=found, want_drafter=want_drafter)
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
            problems.append(f"{len(names)} {noun} {text}: {listed(names)}")
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

    total = sum(_bytes_to_read(source) for source in plan.sources.values())
    with _few_threads(total):
        buffers = _read(plan, dtype, total, progress)
        _check_filled(buffers, config)
    return Weights(buffers, config=config, drafter=plan.drafter, ignored=plan.ignored)


_SMALL_BYTES = 1 << 30


@contextmanager
def _few_threads(total: int) -> Iterator[None]:
    """Read a small checkpoint with one thread.

    To share its small tensors costs more than it saves, tenfold where another program keeps a core
    busy.
    """
    threads = torch.get_num_threads()
    if total < _SMALL_BYTES:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _read(
    plan: LoadPlan,
    dtype: torch.dtype | None,
    total: int,
    progress: Callable[[int, int], None] | None,
) -> dict[str, Tensor]:
    """Decode every planned tensor into its buffer."""
    buffers = _allocate(plan, dtype)
    files = MappedFiles()
    # Ascending file order keeps reads sequential on a disk.
    order = sorted(
        plan.sources.items(), key=lambda item: (item[1].weight.file, item[1].weight.start)
    )
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
    return buffers


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


def _ignore_reason(name: str, *, found: DrafterKind | None, want_drafter: bool) -> str | None:
    for pattern, reason in _ALWAYS_IGNORED:
        if pattern.fullmatch(name):
            return reason
    if not name.startswith("mtp."):
        return None
    if found == "dspark":
        return _FOREIGN_DRAFTER
    return None if want_drafter else _DROPPED_DRAFTER


def _bytes_to_read(source: _Source) -> int:
    scale = source.scale.num_bytes if source.scale is not None else 0
    if source.expert is None:
        return source.weight.num_bytes + scale
    bits = DTYPE_BITS[source.weight.dtype]
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


def _decode(files: MappedFiles, source: _Source, dtype: torch.dtype | None) -> Tensor:
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
        # Both ends are NaN if any value is; one pass and no copy, unlike isfinite over all.
        elif not bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()):
            count = tensor.numel() - int(torch.isfinite(tensor).sum())
            bad.append(f"{name} ({count} of {tensor.numel()} values are not finite)")
    if bad:
        noun = "parameter holds" if len(bad) == 1 else "parameters hold"
        raise CheckpointError(f"{len(bad)} {noun} no usable values: {listed(bad)}")
