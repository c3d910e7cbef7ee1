"""What a checkpoint holds, what serving it takes, and what would be refused: all from headers."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.cache.pools import cache_bytes_per_sequence, cache_bytes_per_token
from paceline.config import ModelConfig, read_json_object, unrecognised_fields
from paceline.models.deepseek_v4.checkpoint import Checkpoint, plan_load
from paceline.models.deepseek_v4.shards import StoredTensor
from paceline.models.deepseek_v4.tensors import DrafterKind
from paceline.types import MAX_NUM_DRAFTS, CheckpointError, ConfigError

__all__ = [
    "CacheBytes",
    "Census",
    "LayerRow",
    "Part",
    "PartRow",
    "Refusal",
    "cache_bytes",
    "part_of",
    "take_census",
]

Part = Literal[
    "embedding",
    "head",
    "norms",
    "hyper-connections",
    "attention",
    "compressor",
    "indexer",
    "router",
    "experts",
    "shared expert",
    "drafter",
    "other",
]
"""What a tensor is for; everything under ``mtp.`` is the drafter's."""

_PART_PATTERNS: tuple[tuple[str, Part], ...] = (
    (r"mtp\.", "drafter"),
    (r"embed\.", "embedding"),
    (r"head\.", "head"),
    (r"(.+\.)?hc_", "hyper-connections"),
    (r"layers\.\d+\.attn\.compressor\.", "compressor"),
    (r"layers\.\d+\.attn\.indexer\.", "indexer"),
    (r"(.+[._])?norm\.", "norms"),
    (r"layers\.\d+\.attn\.", "attention"),
    (r"layers\.\d+\.ffn\.gate\.", "router"),
    (r"layers\.\d+\.ffn\.experts\.", "experts"),
    (r"layers\.\d+\.ffn\.shared_experts\.", "shared expert"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """Tensors of one part that are stored alike.

    Attributes:
        part: what they are for.
        dtype: safetensors' name of the stored type.
        tensors: how many.
        parameters: their elements; packed fp4 counts two a byte, block scales count none.
        num_bytes: bytes in the files.
    """

    part: Part
    dtype: str
    tensors: int
    parameters: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One trunk layer, or the MTP block.

    Attributes:
        name: ``"0"``, ``"1"``, ... or ``"mtp.0"``.
        attention: "swa", "csa" or "hca".
        ratio: tokens a compressed row stands for; 0 for none.
        routing: "hash" (experts by token id) or "learned".
        tensors: stored tensors found for it.
        num_bytes: their bytes in the files.
    """

    name: str
    attention: str
    ratio: int
    routing: Literal["hash", "learned"]
    tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBytes:
    """Cache memory when rows are held as `dtype`.

    Attributes:
        dtype: of window rows and compressed rows; raw and index rows are fp32 always.
        per_token: bytes that one more token of context adds.
        per_sequence: bytes of a sequence's rings, whatever its length.
        drafter_per_sequence: bytes of the MTP head's ring and of the target's streams that are kept
            for it; 0 without one.
        full_context: bytes of one sequence of max_position_embeddings tokens.
    """

    dtype: Literal["fp32", "bf16"]
    per_token: float
    per_sequence: int
    drafter_per_sequence: int
    full_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Something that would be refused.

    Attributes:
        what: "the checkpoint" (nothing runs), "drafts" or "text" (prompts that are not ids).
        why: a sentence.
    """

    what: Literal["the checkpoint", "drafts", "text"]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """A checkpoint described; see `take_census`.

    Attributes:
        path: the folder.
        config: its configuration; None if that is refused.
        drafter: the drafter kind that the tensors' names tell of.
        files: safetensors files with their bytes on disk, by name.
        parts: tensors by part and stored type.
        layers: the layer map; empty without a configuration.
        cache: cache memory for fp32 and for bf16 rows; empty without a configuration.
        max_width: rows of one sequence in one step that the rings in `cache` have room for.
        refusals: what would be refused and why; empty for a checkpoint that serves everything.
        notes: what a reader may want to know but nothing is refused for.
    """

    path: Path
    config: ModelConfig | None
    drafter: DrafterKind | None
    files: Mapping[str, int]
    parts: tuple[PartRow, ...]
    layers: tuple[LayerRow, ...]
    cache: tuple[CacheBytes, ...]
    max_width: int
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...]

    @property
    def tensors(self) -> int:
        """Stored tensors, scales counted."""
        return sum(row.tensors for row in self.parts)

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(row.parameters for row in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(row.num_bytes for row in self.parts)

    def bytes_by_part(self) -> dict[str, int]:
        """Return bytes of tensor data by part, largest first."""
        totals: Counter[str] = Counter()
        for row in self.parts:
            totals[row.part] += row.num_bytes
        return dict(totals.most_common())

    def to_dict(self) -> dict[str, Any]:
        """Return the census as JSON values; sizes in bytes."""
        return {
            "path": str(self.path),
            "config": None if self.config is None else self.config.to_dict(),
            "drafter": self.drafter,
            "tensors": self.tensors,
            "parameters": self.parameters,
            "bytes": self.num_bytes,
            "bytes_by_part": self.bytes_by_part(),
            "files": dict(self.files),
            "parts": [asdict(row) for row in self.parts],
            "layers": [asdict(row) for row in self.layers],
            "cache": {"max_width": self.max_width, "rows": [asdict(row) for row in self.cache]},
            "refusals": [asdict(refusal) for refusal in self.refusals],
            "notes": list(self.notes),
        }


def take_census(path: str | os.PathLike[str], *, max_width: int = 256) -> Census:
    """Describe the checkpoint folder `path` from its JSON files and tensor headers.

    No tensor data is read. Problems with the files, the configuration or the tensors become
    refusals, so that a broken checkpoint can be looked at.

    Args:
        path: the folder.
        max_width: most rows of one sequence in one step (a prompt chunk, or 1 + drafts), which
            sizes the rings.

    Raises:
        CheckpointError: `path` is no folder.
    """
    checkpoint = Checkpoint.scan(path)
    refusals: list[Refusal] = []
    notes: list[str] = []
    config: ModelConfig | None = None
    if checkpoint.raw_config is not None:
        try:
            config = ModelConfig.from_dict(checkpoint.raw_config)
        except ConfigError as error:
            refusals.append(Refusal(what="the checkpoint", why=f"config.json: {error}"))
        unknown = unrecognised_fields(checkpoint.raw_config)
        if unknown:
            notes.append(f"config.json has fields that are not read: {', '.join(unknown)}")
    if config is None:
        problems: tuple[str, ...] = checkpoint.problems
    else:
        plain = plan_load(checkpoint, config, want_drafter=False)
        drafting = plan_load(checkpoint, config, want_drafter=True)
        problems = plain.problems
        refusals += [
            Refusal(what="drafts", why=why)
            for why in drafting.problems
            if why not in plain.problems
        ]
        for reason, count in Counter(drafting.ignored.values()).items():
            notes.append(f"{count} tensors would not be read: {reason}")
        if checkpoint.drafter is None and config.num_nextn_predict_layers:
            notes.append(
                f"config.json says num_nextn_predict_layers = {config.num_nextn_predict_layers}, "
                "but there is no drafter among the tensors"
            )
    refusals[:0] = [Refusal(what="the checkpoint", why=why) for why in problems]
    for file in checkpoint.unindexed_files:
        notes.append(f"{file.name} is not part of the checkpoint and would not be read")
    refusals += _text_refusals(checkpoint.path, config)

    return Census(
        path=checkpoint.path,
        config=config,
        drafter=checkpoint.drafter,
        files={file.name: file.stat().st_size for file in checkpoint.files if file.exists()},
        parts=_count_parts(checkpoint.tensors),
        layers=() if config is None else _layer_rows(config, checkpoint),
        cache=() if config is None else _cache_rows(config, checkpoint.drafter, max_width),
        max_width=max_width,
        refusals=tuple(refusals),
        notes=tuple(notes),
    )


def part_of(name: str) -> Part:
    """Return what the tensor of DeepSeek name `name` is for."""
    for pattern, part in _PART_PATTERNS:
        if re.match(pattern, name):
            return part
    return "other"


def cache_bytes(
    config: ModelConfig,
    *,
    dtype: Literal["fp32", "bf16"],
    drafter: DrafterKind | None,
    max_width: int,
) -> CacheBytes:
    """Return the cache memory of one sequence.

    With e the bytes of a row's element, d and i the attention's and the indexer's head width, W the
    window, w `max_width`, and A, A4, A128 the trunk layers in all and by compression ratio:

    * per token: ``A4 (d e + 4 i) / 4 + A128 d e / 128``: compressed rows, and the indexer's in
      fp32. They come in blocks of 128 tokens, so a sequence's share is rounded up to a block.
    * per sequence: ``A (W - 1 + w) d e`` of window rows, and what the compressors still need of
      single tokens, value and score in fp32:
      ``A4 (7 + w) (2 d + 2 i) 8 + A128 (127 + w) d 8``.
    * the drafter, k being the most drafts that may be asked for: ``(W - 1 + k + 1) d e`` of rows;
      with s the elements of a position's streams, ``max(W, 128) s e`` that the engine keeps to
      catch up from, and ``(2 k + 1) s e`` of pairs that wait to be written and of a step's inputs.

    Args:
        config: the shapes.
        dtype: of window rows and compressed rows.
        drafter: the kind that would run; only "mtp" takes memory.
        max_width: most rows of one sequence in one step.
    """
    element = 4 if dtype == "fp32" else 2
    per_token = cache_bytes_per_token(config, element)
    per_sequence = cache_bytes_per_sequence(config, element, max_width)
    block = 128
    ring = (config.sliding_window + MAX_NUM_DRAFTS) * config.head_dim * element
    kept = max(config.sliding_window, block) + 2 * MAX_NUM_DRAFTS + 1
    streams = kept * config.hc_mult * config.hidden_size * element
    drafting = ring + streams if drafter == "mtp" else 0
    blocks = -(-config.max_position_embeddings // block)
    return CacheBytes(
        dtype=dtype,
        per_token=per_token,
        per_sequence=per_sequence,
        drafter_per_sequence=drafting,
        full_context=round(blocks * block * per_token) + per_sequence + drafting,
    )


def _cache_rows(
    config: ModelConfig, drafter: DrafterKind | None, max_width: int
) -> tuple[CacheBytes, ...]:
    return (
        cache_bytes(config, dtype="fp32", drafter=drafter, max_width=max_width),
        cache_bytes(config, dtype="bf16", drafter=drafter, max_width=max_width),
    )


def _count_parts(tensors: Mapping[str, StoredTensor]) -> tuple[PartRow, ...]:
    counts: dict[tuple[Part, str], list[int]] = {}
    for name, entry in tensors.items():
        row = counts.setdefault((part_of(name), entry.dtype), [0, 0, 0])
        row[0] += 1
        row[1] += _parameters(name, entry)
        row[2] += entry.num_bytes
    rows = [
        PartRow(part=part, dtype=dtype, tensors=row[0], parameters=row[1], num_bytes=row[2])
        for (part, dtype), row in counts.items()
    ]
    totals: Counter[str] = Counter()
    for each in rows:
        totals[each.part] += each.num_bytes
    return tuple(sorted(rows, key=lambda each: (-totals[each.part], each.part, -each.num_bytes)))


def _parameters(name: str, entry: StoredTensor) -> int:
    elements = 1
    for size in entry.shape:
        elements *= size
    if entry.dtype == "F8_E8M0":
        return 0
    return elements * 2 if entry.dtype in ("I8", "U8") and ".experts." in name else elements


def _layer_rows(config: ModelConfig, checkpoint: Checkpoint) -> tuple[LayerRow, ...]:
    tensors: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name, entry in checkpoint.tensors.items():
        if match := re.match(r"layers\.(\d+)\.|(mtp\.\d+)\.", name):
            block = match[1] or match[2]
            tensors[block] += 1
            sizes[block] += entry.num_bytes
    rows = [
        LayerRow(
            name=str(layer),
            attention=config.attention_kind(layer),
            ratio=ratio,
            routing="hash" if config.is_hash_routed(layer) else "learned",
            tensors=tensors[str(layer)],
            num_bytes=sizes[str(layer)],
        )
        for layer, ratio in enumerate(config.compress_ratios)
    ]
    rows += [
        LayerRow(
            name=block,
            attention="swa",
            ratio=0,
            routing="learned",
            tensors=tensors[block],
            num_bytes=sizes[block],
        )
        for block in sorted(tensors)
        if block.startswith("mtp.")
    ]
    return tuple(rows)


def _text_refusals(path: Path, config: ModelConfig | None) -> list[Refusal]:
    file = path / "tokenizer.json"
    try:
        raw = read_json_object(file)
    except CheckpointError as error:
        return [Refusal(what="text", why=str(error))]
    model = raw.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    added = raw.get("added_tokens", [])
    if not isinstance(vocab, dict) or not isinstance(added, list):
        return [Refusal(what="text", why=f"{file} has no vocabulary of token to id")]
    ids = [value for value in vocab.values() if isinstance(value, int)]
    ids += [token["id"] for token in added if isinstance(token, dict) and "id" in token]
    size = max(ids, default=-1) + 1
    if config is not None and size > config.vocab_size:
        why = f"{file} has ids up to {size - 1}, but the model's vocab_size is {config.vocab_size}"
        return [Refusal(what="the checkpoint", why=why)]
    return []
