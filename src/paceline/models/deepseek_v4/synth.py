"""Random checkpoints of real shapes in the release's format, for tests and benchmarks.

Every parameter is non-trivial. A freshly initialised model hides mistakes: with zero position
biases, sinks, hyper-connection bases and router biases, code that forgets them, swaps them or adds
them to the wrong rows gives the same numbers. Here they are random, norms and scales scatter around
one, hash tables hold distinct experts, and linear weights are large enough for logits to spread.

Tensors are made and written one after the other, in slices; memory stays far below the size of the
checkpoint. Each tensor's numbers depend on the seed and on its own name only, so neither the shard
size nor the other tensors change them. Only the quantised kinds of ``dtype="release"`` differ from
the bf16 ones by more than rounding: fp4 codes are drawn directly.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from paceline.config import ModelConfig, RopeScaling, read_json_object
from paceline.models.deepseek_v4.quant import FP4_BLOCK, FP8_BLOCK, quantize_fp8
from paceline.models.deepseek_v4.shards import INDEX_NAME, SINGLE_NAME
from paceline.models.deepseek_v4.tensors import (
    DrafterKind,
    StorageKind,
    TensorSpec,
    tensor_specs,
)
from paceline.types import CheckpointError, ConfigError

__all__ = [
    "SPECIAL_TOKENS",
    "Preset",
    "SynthDtype",
    "byte_tokenizer_json",
    "preset_config",
    "write_synthetic",
]

Preset = Literal["tiny", "small", "flash", "pro"]
"""tiny exercises every branch; small is the bundled model's shape; flash and pro are DeepSeek's."""

SynthDtype = Literal["bf16", "fp32", "fp4", "release"]
"""bf16 as DeepSeek's names have it (some tensors fp32); everything fp32; as bf16 with fp4 experts;
or the release's mix of fp8, fp4, bf16 and fp32."""

SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
)
"""DeepSeek-V4's special tokens in the order of their ids in the byte tokenizer."""

# Only these three are "special" to a tokenizer in DeepSeek's own file; the rest decode as text.
_NUM_CONTROL_TOKENS = 3

_YARN = RopeScaling(
    factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536
)
_RELEASE_QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
_STORED_DTYPE: dict[StorageKind, str] = {
    "fp32": "F32",
    "bf16": "BF16",
    "fp8": "F8_E4M3",
    "fp4": "I8",
    "int64": "I64",
}
_ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}

_SLICE_ELEMENTS = 1 << 21
_DSPARK_STAGES = 3
_E2M1_RMS = math.sqrt(sum(v * v for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)) / 8)


def preset_config(preset: Preset, *, layers: int | None = None) -> ModelConfig:
    """Return a preset's configuration.

    Args:
        preset: which.
        layers: keep only the first `layers` trunk layers; None for all.

    Raises:
        ConfigError: an unknown preset, or more layers than it has (or fewer than one).
    """
    if preset not in get_args(Preset):
        raise ConfigError(f"preset is {preset!r}; allowed: {', '.join(get_args(Preset))}")
    config = _PRESETS[preset]()
    if layers is None:
        return config
    if not 1 <= layers <= config.num_hidden_layers:
        raise ConfigError(
            f"layers is {layers}; preset {preset} allows 1 to {config.num_hidden_layers}"
        )
    return replace(
        config,
        num_hidden_layers=layers,
        compress_ratios=config.compress_ratios[:layers],
        num_hash_layers=min(config.num_hash_layers, layers),
    )


def _tiny() -> ModelConfig:
    return ModelConfig(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=8,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=48,
        o_lora_rank=32,
        o_groups=2,
        sliding_window=128,
        compress_ratios=(0, 0, 4, 128, 4, 128),
        index_n_heads=16,
        index_head_dim=32,
        index_topk=16,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        num_hash_layers=3,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        rope_scaling=_YARN,
        max_position_embeddings=4096,
        num_nextn_predict_layers=1,
        bos_token_id=0,
        eos_token_ids=(1,),
        pad_token_id=2,
    )


def _small() -> ModelConfig:
    return replace(
        _tiny(),
        vocab_size=8192,
        hidden_size=256,
        num_hidden_layers=8,
        head_dim=128,
        qk_rope_head_dim=64,
        q_lora_rank=128,
        o_lora_rank=128,
        compress_ratios=(0, 0, 4, 128, 4, 128, 4, 128),
        index_n_heads=8,
        index_head_dim=64,
        index_topk=256,
        n_routed_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=256,
        num_hash_layers=2,
    )


def _flash() -> ModelConfig:
    return replace(
        _tiny(),
        vocab_size=129280,
        hidden_size=4096,
        num_hidden_layers=43,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1024,
        o_lora_rank=1024,
        o_groups=8,
        compress_ratios=(0, 0, *(4, 128) * 20, 4),
        index_n_heads=64,
        index_head_dim=128,
        index_topk=512,
        n_routed_experts=256,
        num_experts_per_tok=6,
        moe_intermediate_size=2048,
        max_position_embeddings=1048576,
        pad_token_id=None,
    )


def _pro() -> ModelConfig:
    return replace(
        _flash(),
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=128,
        q_lora_rank=1536,
        o_groups=16,
        compress_ratios=(128, 128, *(4, 128) * 29, 4),
        index_topk=1024,
        n_routed_experts=384,
        moe_intermediate_size=3072,
        routed_scaling_factor=2.5,
    )


_PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "tiny": _tiny,
    "small": _small,
    "flash": _flash,
    "pro": _pro,
}


@dataclass(frozen=True, slots=True)
class _Planned:
    """One tensor to write.

    Attributes:
        name, dtype, shape: as the header states them.
        kind: how the parameter is stored.
        logical: the parameter's unpacked shape.
        experts: routed experts of a layer, the range of a hash table's entries.
        scale: whether these are the scales of the weight planned just before.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: StorageKind
    logical: tuple[int, ...]
    experts: int
    scale: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def write_synthetic(
    out: str | os.PathLike[str],
    config: ModelConfig,
    *,
    dtype: SynthDtype = "bf16",
    seed: int = 0,
    drafter: DrafterKind | None = "mtp",
    tokenizer: Literal["bytes"] | os.PathLike[str] | None = "bytes",
    expert_gain: float = 1.0,
    shard_bytes: int = 4 << 30,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a random checkpoint for `config` into the folder `out`.

    Args:
        out: folder to create, or an existing one that holds no checkpoint.
        config: the shapes.
        dtype: how tensors are stored, see `SynthDtype`.
        seed: of every number.
        drafter: "mtp" adds the MTP head, "dspark" tensors named like a DSpark drafter's.
        tokenizer: "bytes" writes one token for each byte and DeepSeek-V4's special tokens; a path
            is a ``tokenizer.json`` to copy; None writes none.
        expert_gain: factor on the routed and shared experts' first two matrices; about 8 makes the
            clamp at ``swiglu_limit`` act.
        shard_bytes: most bytes of data in a file; with more than one file an index is written.
        progress: called with (bytes written, bytes in all).

    Returns:
        The folder.

    Raises:
        CheckpointError: `out` already holds a checkpoint, or cannot be written.
        ConfigError: an unknown `dtype` or `drafter`, or a shape that the format or the byte
            tokenizer cannot hold.
    """
    if dtype not in get_args(SynthDtype):
        raise ConfigError(f"dtype is {dtype!r}; allowed: {', '.join(get_args(SynthDtype))}")
    if drafter not in (None, *get_args(DrafterKind)):
        raise ConfigError(f"drafter is {drafter!r}; allowed: 'mtp', 'dspark', None")
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes is {shard_bytes}; at least 1 is needed")
    planned = list(_plan(config, dtype, drafter))
    tokenizer_text = None
    if tokenizer == "bytes":
        tokenizer_text = byte_tokenizer_json(config.vocab_size)
    elif tokenizer is not None:
        tokenizer_text = json.dumps(read_json_object(Path(tokenizer)), ensure_ascii=False)

    folder = Path(out)
    if any(folder.glob("*.safetensors")) or (folder / "config.json").exists():
        raise CheckpointError(f"{folder} already holds a checkpoint; an empty folder is needed")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_tensors(folder, planned, seed, expert_gain, shard_bytes, progress)
        _write_json(folder / "config.json", _config_json(config, dtype, drafter))
        generation = {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": list(config.eos_token_ids),
            "do_sample": True,
            "temperature": 1.0,
            "top_p": 1.0,
        }
        _write_json(folder / "generation_config.json", generation)
        if tokenizer_text is not None:
            (folder / "tokenizer.json").write_text(tokenizer_text, encoding="utf-8")
            _write_json(folder / "tokenizer_config.json", _tokenizer_config(config))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from None
    return folder


def byte_tokenizer_json(vocab_size: int) -> str:
    """Return a ``tokenizer.json`` of special tokens 0 to 7 and one token for each byte.

    Raises:
        ConfigError: `vocab_size` is below the 264 ids that this takes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL_TOKENS, *alphabet]
    if vocab_size < len(pieces):
        raise ConfigError(
            f"vocab_size is {vocab_size}; the byte tokenizer needs at least {len(pieces)}"
        )
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for index, piece in enumerate(SPECIAL_TOKENS):
        control = index < _NUM_CONTROL_TOKENS
        token = AddedToken(piece, special=control, normalized=False)
        if control:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    text: str = tokenizer.to_str()
    return text


def _tokenizer_config(config: ModelConfig) -> dict[str, Any]:
    bos, eos, pad = SPECIAL_TOKENS[:_NUM_CONTROL_TOKENS]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }


def _config_json(
    config: ModelConfig, dtype: SynthDtype, drafter: DrafterKind | None
) -> dict[str, Any]:
    raw = config.to_dict()
    raw.pop("quantization_config", None)
    raw.pop("expert_dtype", None)
    if dtype == "fp32":
        raw["torch_dtype"] = "float32"
    if dtype in ("fp4", "release"):
        raw["expert_dtype"] = "fp4"
    if dtype == "release":
        raw["quantization_config"] = _RELEASE_QUANTIZATION
    raw["num_nextn_predict_layers"] = 0 if drafter is None else 1
    if drafter == "dspark":
        raw["compress_ratios"] = [*config.compress_ratios, *[0] * _DSPARK_STAGES]
        raw["dspark_block_size"] = 5
        raw["dspark_markov_rank"] = _markov_rank(config)
        raw["dspark_noise_token_id"] = config.vocab_size - 1
        raw["dspark_target_layer_ids"] = list(
            range(max(0, config.num_hidden_layers - 3), config.num_hidden_layers)
        )
    return raw


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _plan(
    config: ModelConfig, dtype: SynthDtype, drafter: DrafterKind | None
) -> Iterator[_Planned]:
    specs = tensor_specs(config, "mtp" if drafter == "mtp" else None)
    if drafter == "dspark":
        specs.update(_dspark_specs(config))
    for name, spec in specs.items():
        kind = _stored_kind(spec.release_kind, dtype)
        stored = spec.stored_shape(kind)
        if kind == "fp4" and spec.shape[-1] % FP4_BLOCK:
            raise ConfigError(
                f"{name} has {spec.shape[-1]} inputs; fp4 storage needs a multiple of {FP4_BLOCK}"
            )
        experts = config.n_routed_experts
        yield _Planned(name, _STORED_DTYPE[kind], stored, kind, spec.shape, experts)
        scales = spec.scale_shape(kind)
        if scales is not None:
            scale_name = name.removesuffix(".weight") + ".scale"
            yield _Planned(scale_name, "F8_E8M0", scales, kind, spec.shape, experts, scale=True)


def _stored_kind(release: StorageKind, dtype: SynthDtype) -> StorageKind:
    if release == "int64" or dtype == "release":
        return release
    if dtype == "fp32":
        return "fp32"
    if release == "fp32" or (release == "fp4" and dtype == "fp4"):
        return release
    return "bf16"


def _markov_rank(config: ModelConfig) -> int:
    return min(256, config.hidden_size // 2)


def _dspark_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Return tensors named and shaped like the DSpark drafter's of the later releases."""
    block = {
        name.removeprefix("mtp.0."): spec
        for name, spec in tensor_specs(config, "mtp").items()
        if name.startswith("mtp.0.")
    }
    own = ("e_proj.", "h_proj.", "enorm.", "hnorm.")
    last = ("norm.", "hc_head_")
    specs: dict[str, TensorSpec] = {}
    for stage in range(_DSPARK_STAGES):
        for name, spec in block.items():
            if name.startswith(own) or (name.startswith(last) and stage < _DSPARK_STAGES - 1):
                continue
            specs[f"mtp.{stage}.{name}"] = spec
    hidden, rank = config.hidden_size, _markov_rank(config)
    projection, norm = block["e_proj.weight"], block["enorm.weight"]
    head = f"mtp.{_DSPARK_STAGES - 1}"
    wide = (hidden, 3 * hidden)
    specs["mtp.0.main_proj.weight"] = TensorSpec(wide, projection.kinds, ())
    specs["mtp.0.main_norm.weight"] = norm
    for name, shape in (
        ("markov_head.markov_w1.weight", (config.vocab_size, rank)),
        ("markov_head.markov_w2.weight", (config.vocab_size, rank)),
        ("confidence_head.proj.weight", (1, hidden + rank)),
    ):
        specs[f"{head}.{name}"] = TensorSpec(shape, norm.kinds, ())
    return specs


def _write_tensors(
    folder: Path,
    planned: list[_Planned],
    seed: int,
    expert_gain: float,
    shard_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    shards: list[list[_Planned]] = [[]]
    filled = 0
    for tensor in planned:
        # A weight and its scales stay in one file: both come from one pass over the numbers.
        if shards[-1] and not tensor.scale and filled + tensor.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    total = sum(tensor.num_bytes for tensor in planned)
    done = 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE_NAME
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # Wide types first keeps every tensor aligned; the format allows no padding.
        ordered = sorted(shard, key=lambda tensor: -_ITEM_BYTES[tensor.dtype])
        weight_map.update({tensor.name: file for tensor in ordered})
        with (folder / file).open("wb") as handle:
            handle.write(_header(ordered))
            scales = b""
            for tensor in ordered:
                if tensor.scale:
                    handle.write(scales)
                else:
                    parts: list[bytes] = []
                    for data, part in _values(tensor, seed, expert_gain):
                        handle.write(data)
                        parts.append(part)
                    scales = b"".join(parts)
                done += tensor.num_bytes
                if progress is not None:
                    progress(done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / INDEX_NAME, index)


def _header(tensors: list[_Planned]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.num_bytes],
        }
        position += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _values(tensor: _Planned, seed: int, expert_gain: float) -> Iterator[tuple[bytes, bytes]]:
    """Yield a tensor's bytes slice by slice, each with the bytes of its scales (or none)."""
    rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    shape = tensor.logical
    columns = tensor.experts if tensor.kind == "int64" else math.prod(shape[1:])
    rows = max(1, _SLICE_ELEMENTS // columns)
    if tensor.kind == "fp8":
        rows = max(FP8_BLOCK, rows // FP8_BLOCK * FP8_BLOCK)
    for start in range(0, shape[0], rows):
        part = (min(rows, shape[0] - start), *shape[1:])
        if tensor.kind == "int64":
            yield _expert_table(rng, part, tensor.experts), b""
        elif tensor.kind == "fp4":
            yield _random_fp4(rng, tensor.name, part, expert_gain)
        else:
            values = torch.from_numpy(_random(rng, tensor.name, part, expert_gain))
            if tensor.kind == "fp8":
                codes, scales = quantize_fp8(values)
                yield _to_bytes(codes), _to_bytes(scales)
            else:
                wide = tensor.kind == "fp32"
                yield _to_bytes(values if wide else values.to(torch.bfloat16)), b""


def _to_bytes(tensor: Tensor) -> bytes:
    data: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return data


def _random(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], expert_gain: float
) -> NDArray[np.float32]:
    """Draw values whose spread suits the parameter's role."""
    values = rng.standard_normal(shape, dtype=np.float32)
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf.endswith("_scale"):
        return 1 + np.float32(0.1) * values
    if leaf.endswith("norm"):
        return 1 + np.float32(0.1) * values
    if leaf.endswith("_base"):
        return np.float32(0.7) * values
    if leaf == "ape":
        return np.float32(0.5) * values
    if leaf == "attn_sink":
        return values
    if leaf == "bias":
        return np.float32(0.1) * values
    return np.float32(_linear_std(name, shape[-1], expert_gain)) * values


def _linear_std(name: str, inputs: int, expert_gain: float) -> float:
    # Outputs of unit-size inputs stay near one at every width; 0.1 bounds narrow ones.
    spread = min(0.1, 1 / math.sqrt(inputs))
    widened = "experts" in name and name.endswith((".w1.weight", ".w3.weight"))
    return spread * (expert_gain if widened else 1.0)


def _random_fp4(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], expert_gain: float
) -> tuple[bytes, bytes]:
    """Draw uniform codes and scales within a factor of two of the spread wanted."""
    rows, columns = shape
    middle = round(math.log2(_linear_std(name, columns, expert_gain) / _E2M1_RMS)) + 127
    scales = rng.integers(middle - 1, middle + 2, (rows, columns // FP4_BLOCK), dtype=np.uint8)
    return rng.bytes(rows * columns // 2), scales.tobytes()


def _expert_table(rng: np.random.Generator, shape: tuple[int, ...], experts: int) -> bytes:
    """Draw distinct experts for every token id."""
    tokens, chosen = shape
    order = rng.random((tokens, experts), dtype=np.float32).argsort(axis=1)
    return order[:, :chosen].astype("<i8").tobytes()
