"""The model's configuration, as the checkpoint's ``config.json`` states it.

`ModelConfig` carries the Hugging Face / DeepSeek field names of the DeepSeek-V4 family unchanged,
so that a field can be searched for in the report, in the checkpoint and here under one name. It is
pure Python: no torch, no file access outside `ModelConfig.from_path`.

Three spellings are read: the one the released checkpoints carry (``compress_ratios``,
``num_hash_layers``, ``qk_rope_head_dim``, ``rope_scaling``), the one transformers 5 writes
(``layer_types``, ``mlp_layer_types``, ``partial_rotary_factor``, ``rope_parameters``,
``compress_rates``) and the one of DeepSeek's own ``inference/config.json`` (``dim``, ``n_layers``,
...). A value that would change what the model computes and that Paceline does not implement is a
`ConfigError`, never a silent approximation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.types import CheckpointError, ConfigError

AttentionKind = Literal["swa", "csa", "hca"]
"""Sliding window only, compressed sparse (ratio 4, indexed), heavily compressed (ratio 128)."""

CSA_RATIO = 4
HCA_RATIO = 128

_KIND_OF_RATIO: dict[int, AttentionKind] = {0: "swa", CSA_RATIO: "csa", HCA_RATIO: "hca"}

_RATIO_OF_LAYER_TYPE = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CSA_RATIO,
    "heavily_compressed_attention": HCA_RATIO,
}

# DeepSeek's inference/config.json -> config.json in Hugging Face naming.
_INFERENCE_NAMES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_hash_layers": "num_hash_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
}

# Fields that say one fixed thing; anything else would be another model.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("deepseek_v4",),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "num_key_value_heads": (1,),
    "tie_word_embeddings": (False,),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "expert_dtype": (None, "fp4", "fp8", "bf16", "bfloat16", "fp32", "float32"),
}

_QUANTIZATION_FIXED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    "scale_fmt": ("ue8m0",),
    "weight_block_size": ([128, 128],),
    "expert_dtype": _FIXED["expert_dtype"],
}

_POSITIVE_INTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "hc_mult",
    "hc_sinkhorn_iters",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "max_position_embeddings",
)
_NON_NEGATIVE_INTS = ("num_hash_layers", "num_nextn_predict_layers")
_POSITIVE_FLOATS = (
    "hc_eps",
    "rms_norm_eps",
    "routed_scaling_factor",
    "swiglu_limit",
    "rope_theta",
    "compress_rope_theta",
)

# Written by others beside the fields above; none changes what inference computes.
_INERT = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "chunk_size_feed_forward",
        "dtype",
        "generation_config",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "max_batch_size",
        "moe_layer_freq",
        "original_seq_len",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "scale_dtype",
        "scale_fmt",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_READ_ELSEWHERE = frozenset(
    {
        "beta_fast",
        "beta_slow",
        "bos_token_id",
        "compress_rate_csa",
        "compress_rate_hca",
        "compress_rates",
        "compress_ratios",
        "eos_token_id",
        "layer_types",
        "mlp_layer_types",
        "pad_token_id",
        "partial_rotary_factor",
        "quantization_config",
        "rope_factor",
        "rope_parameters",
        "rope_scaling",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN interpolation of the rotary table that compressed layers use.

    Attributes:
        factor: how many times the context was stretched.
        beta_fast: rotations over the original context above which a frequency is kept.
        beta_slow: rotations below which a frequency is divided by `factor`.
        original_max_position_embeddings: context length in tokens before stretching.
    """

    factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Every number of a DeepSeek-V4 checkpoint that the computation depends on.

    Build one with `from_path` or `from_dict`; the constructor checks the values that depend on one
    another, so an instance is always consistent. Attribute names are those of the checkpoint's
    ``config.json``; widths are in elements, positions in tokens.

    Attributes:
        compress_ratios: one entry per trunk layer: 0 (window only), 4 (CSA) or 128 (HCA).
        mtp_compress_ratio: the entry after the trunk's, for the MTP layer; only 0 exists.
        rope_scaling: YaRN numbers of the compressed layers' table; None where it is plain.
        eos_token_ids: every id that ends a text (``eos_token_id`` may be one number or a list).
        expert_dtype: what the checkpoint says its experts are stored as; the tensors decide.
        quantization_config: the checkpoint's block, kept as read; the tensors decide.

    Raises:
        ConfigError: a value is missing, contradicts another, or asks for another model; the message
            states what was given and what is allowed.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    mtp_compress_ratio: int = 0
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    num_nextn_predict_layers: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    expert_dtype: str | None = None
    quantization_config: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        for name in _POSITIVE_INTS:
            _require_int(name, getattr(self, name), minimum=1)
        for name in _NON_NEGATIVE_INTS:
            _require_int(name, getattr(self, name), minimum=0)
        for name in _POSITIVE_FLOATS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{name} is {value!r}; a number above 0 is needed")

        ratios = self.compress_ratios
        if len(ratios) != self.num_hidden_layers:
            raise ConfigError(
                f"compress_ratios has {len(ratios)} trunk entries but num_hidden_layers is "
                f"{self.num_hidden_layers}; one entry per layer is needed"
            )
        for layer, ratio in enumerate(ratios):
            if ratio not in _KIND_OF_RATIO:
                raise ConfigError(
                    f"compress_ratios[{layer}] is {ratio!r}; allowed are "
                    f"{', '.join(map(str, _KIND_OF_RATIO))}"
                )
        if self.mtp_compress_ratio != 0:
            raise ConfigError(
                f"compress_ratios[{self.num_hidden_layers}] (the MTP layer's) is "
                f"{self.mtp_compress_ratio!r}; only 0 is allowed"
            )
        largest = max(ratios)
        if largest > self.sliding_window:
            raise ConfigError(
                f"sliding_window is {self.sliding_window} but a layer compresses {largest} tokens "
                f"into a row; a window of at least {largest} is needed"
            )
        if self.num_hash_layers > self.num_hidden_layers:
            raise ConfigError(
                f"num_hash_layers is {self.num_hash_layers}; at most num_hidden_layers = "
                f"{self.num_hidden_layers} is allowed"
            )
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}; rotation works on pairs, so an even "
                "number is needed"
            )
        if self.qk_rope_head_dim > min(self.head_dim, self.index_head_dim):
            raise ConfigError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}; at most head_dim = {self.head_dim} "
                f"and index_head_dim = {self.index_head_dim} is allowed"
            )
        if self.num_attention_heads % self.o_groups:
            raise ConfigError(
                f"num_attention_heads is {self.num_attention_heads} and o_groups is "
                f"{self.o_groups}; the heads must divide evenly among the groups"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ConfigError(
                f"num_experts_per_tok is {self.num_experts_per_tok}; at most n_routed_experts = "
                f"{self.n_routed_experts} is allowed"
            )
        if self.n_shared_experts != 1:
            raise ConfigError(f"n_shared_experts is {self.n_shared_experts}; only 1 is allowed")
        ids = {"bos_token_id": self.bos_token_id, "pad_token_id": self.pad_token_id}
        ids.update({f"eos_token_id ({i})": token for i, token in enumerate(self.eos_token_ids)})
        for name, token in ids.items():
            if token is None:
                continue
            _require_int(name, token, minimum=0)
            if token >= self.vocab_size:
                raise ConfigError(
                    f"{name} is {token}; ids below vocab_size = {self.vocab_size} are allowed"
                )
        if self.quantization_config is not None:
            _check_fixed(self.quantization_config, _QUANTIZATION_FIXED, "quantization_config.")

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """Read ``config.json`` of a checkpoint folder, or a configuration file itself.

        Raises:
            CheckpointError: the file is missing, unreadable or not a JSON object.
            ConfigError: the values are not those of a model that Paceline runs.
        """
        return cls.from_dict(read_json_object(config_file(path)))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Build a configuration from the parsed JSON in any of the three spellings.

        Raises:
            ConfigError: see the class.
        """
        given = _hugging_face_names(raw)
        model_type = given.get("model_type", "deepseek_v4")
        if model_type == "deepseek_v41":
            raise ConfigError(
                "model_type is 'deepseek_v41' (DeepSeek-V4.1, another architecture); allowed is "
                "'deepseek_v4'"
            )
        _check_fixed(given, _FIXED)

        values: dict[str, Any] = {}
        missing: list[str] = []
        defaults: dict[str, Any] = {
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 0,
            "hc_eps": 1e-6,
            "rms_norm_eps": 1e-6,
        }
        derived = {"qk_rope_head_dim", "num_hash_layers", "rope_theta", "compress_rope_theta"}
        for name in (*_POSITIVE_INTS, *_NON_NEGATIVE_INTS, *_POSITIVE_FLOATS):
            if name in derived:
                continue
            value = given.get(name, defaults.get(name))
            if value is None:
                missing.append(name)
            else:
                values[name] = value
        if missing:
            raise ConfigError(f"the configuration lacks {', '.join(missing)}")

        layers = values["num_hidden_layers"]
        _require_int("num_hidden_layers", layers, minimum=1)
        _require_int("head_dim", values["head_dim"], minimum=1)
        ratios, mtp_ratio = _read_ratios(given, layers)
        values["compress_ratios"] = ratios
        values["mtp_compress_ratio"] = mtp_ratio
        values["num_hash_layers"] = _read_hash_layers(given, layers)
        values.update(_read_rope(given, values["head_dim"]))
        quantization = given.get("quantization_config")
        if quantization is not None and not isinstance(quantization, Mapping):
            raise ConfigError(f"quantization_config is {quantization!r}; an object is needed")
        values["quantization_config"] = None if quantization is None else dict(quantization)
        values["expert_dtype"] = given.get("expert_dtype", (quantization or {}).get("expert_dtype"))
        values["bos_token_id"] = given.get("bos_token_id")
        values["pad_token_id"] = given.get("pad_token_id")
        values["eos_token_ids"] = _read_eos(given.get("eos_token_id"))
        for name in _POSITIVE_FLOATS:
            if isinstance(values[name], int) and not isinstance(values[name], bool):
                values[name] = float(values[name])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the released checkpoints' ``config.json`` (Hugging Face names).

        ``from_dict(config.to_dict()) == config`` holds, and transformers reads the result.
        """
        eos: int | list[int] | None
        eos = list(self.eos_token_ids) if len(self.eos_token_ids) != 1 else self.eos_token_ids[0]
        result: dict[str, Any] = {
            "architectures": ["DeepseekV4ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "compress_ratios": [*self.compress_ratios, self.mtp_compress_ratio],
            "compress_rope_theta": _plain_number(self.compress_rope_theta),
            "eos_token_id": eos if self.eos_token_ids else None,
            "hc_eps": self.hc_eps,
            "hc_mult": self.hc_mult,
            "hc_sinkhorn_iters": self.hc_sinkhorn_iters,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "index_head_dim": self.index_head_dim,
            "index_n_heads": self.index_n_heads,
            "index_topk": self.index_topk,
            "initializer_range": 0.02,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": "deepseek_v4",
            "moe_intermediate_size": self.moe_intermediate_size,
            "n_routed_experts": self.n_routed_experts,
            "n_shared_experts": self.n_shared_experts,
            "norm_topk_prob": True,
            "num_attention_heads": self.num_attention_heads,
            "num_experts_per_tok": self.num_experts_per_tok,
            "num_hash_layers": self.num_hash_layers,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": 1,
            "num_nextn_predict_layers": self.num_nextn_predict_layers,
            "o_groups": self.o_groups,
            "o_lora_rank": self.o_lora_rank,
            "pad_token_id": self.pad_token_id,
            "q_lora_rank": self.q_lora_rank,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": _plain_number(self.rope_theta),
            "routed_scaling_factor": self.routed_scaling_factor,
            "scoring_func": "sqrtsoftplus",
            "sliding_window": self.sliding_window,
            "swiglu_limit": self.swiglu_limit,
            "tie_word_embeddings": False,
            "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }
        if self.rope_scaling is not None:
            scaling = self.rope_scaling
            result["rope_scaling"] = {
                "type": "yarn",
                "factor": _plain_number(scaling.factor),
                "beta_fast": _plain_number(scaling.beta_fast),
                "beta_slow": _plain_number(scaling.beta_slow),
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }
        if self.expert_dtype is not None:
            result["expert_dtype"] = self.expert_dtype
        if self.quantization_config is not None:
            result["quantization_config"] = dict(self.quantization_config)
        return result

    def attention_kind(self, layer: int) -> AttentionKind:
        """Return the attention kind of trunk layer `layer` (from 0)."""
        return _KIND_OF_RATIO[self.compress_ratios[layer]]

    def is_hash_routed(self, layer: int) -> bool:
        """Whether trunk layer `layer` takes its experts from a table indexed by token id."""
        return layer < self.num_hash_layers

    @property
    def nope_head_dim(self) -> int:
        """Elements of a head that are not rotated."""
        return self.head_dim - self.qk_rope_head_dim


def config_file(path: str | os.PathLike[str]) -> Path:
    """Return the configuration file of a checkpoint folder, or `path` itself if it is a file."""
    given = Path(path)
    return given / "config.json" if given.is_dir() else given


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a UTF-8 JSON file that holds one object.

    Raises:
        CheckpointError: missing, unreadable, not JSON, or not an object; the file is named.
    """
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} holds a JSON {type(parsed).__name__}; an object is needed")
    return parsed


def unrecognised_fields(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of a configuration that Paceline neither reads nor knows to be inert."""
    known = (
        set(_POSITIVE_INTS)
        | set(_NON_NEGATIVE_INTS)
        | set(_POSITIVE_FLOATS)
        | set(_FIXED)
        | _INERT
        | _READ_ELSEWHERE
    )
    names = _hugging_face_names(raw)
    # A DSpark drafter's numbers describe tensors that are recognised and left unread.
    return tuple(
        sorted(name for name in names if name not in known and not name.startswith("dspark_"))
    )


def _hugging_face_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    if "dim" not in raw or "n_layers" not in raw:
        return dict(raw)
    return {_INFERENCE_NAMES.get(name, name): value for name, value in raw.items()}


def _check_fixed(
    given: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]], prefix: str = ""
) -> None:
    for name, allowed in fixed.items():
        if name in given and given[name] not in allowed:
            raise ConfigError(
                f"{prefix}{name} is {given[name]!r}; allowed: "
                f"{', '.join(repr(value) for value in allowed)}"
            )


def _require_int(name: str, value: object, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} is {value!r}; a whole number of at least {minimum} is needed")


def _plain_number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def _list_field(name: str, value: object) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}; a list is needed")
    return list(value)


def _read_ratios(given: Mapping[str, Any], layers: int) -> tuple[tuple[int, ...], int]:
    rates = given.get("compress_rates") or {}
    if not isinstance(rates, Mapping):
        raise ConfigError(f"compress_rates is {rates!r}; an object is needed")
    rates = dict(rates)
    for flat, kind in (
        ("compress_rate_csa", "compressed_sparse_attention"),
        ("compress_rate_hca", "heavily_compressed_attention"),
    ):
        if given.get(flat) is not None:
            rates[kind] = given[flat]
    for kind, rate in rates.items():
        allowed = _RATIO_OF_LAYER_TYPE.get(kind)
        if rate != allowed:
            raise ConfigError(f"compress_rates[{kind!r}] is {rate!r}; allowed: {allowed}")

    legacy = given.get("compress_ratios")
    types = given.get("layer_types")
    if legacy is None and types is None:
        raise ConfigError("the configuration lacks compress_ratios (or layer_types)")
    from_types: tuple[int, ...] | None = None
    if types is not None:
        from_types = ()
        for layer, kind in enumerate(_list_field("layer_types", types)):
            if kind not in _RATIO_OF_LAYER_TYPE:
                raise ConfigError(
                    f"layer_types[{layer}] is {kind!r}; allowed: {', '.join(_RATIO_OF_LAYER_TYPE)}"
                )
            from_types += (_RATIO_OF_LAYER_TYPE[kind],)
        if len(from_types) != layers:
            raise ConfigError(
                f"layer_types has {len(from_types)} entries but num_hidden_layers is {layers}"
            )
    if legacy is None:
        assert from_types is not None
        return from_types, 0

    entries = tuple(_list_field("compress_ratios", legacy))
    if len(entries) < layers:
        raise ConfigError(
            f"compress_ratios has {len(entries)} entries but num_hidden_layers is {layers}; one "
            "entry per layer, then one for each drafter layer, is needed"
        )
    # transformers gives no meaning to the entries behind the trunk's; DeepSeek's are the drafter's.
    trunk = entries[:layers]
    if from_types is not None and from_types != trunk:
        raise ConfigError("compress_ratios and layer_types contradict each other")
    return trunk, entries[layers] if len(entries) > layers else 0


def _read_hash_layers(given: Mapping[str, Any], layers: int) -> int:
    legacy = given.get("num_hash_layers")
    types = given.get("mlp_layer_types")
    if types is None:
        if legacy is None:
            raise ConfigError("the configuration lacks num_hash_layers (or mlp_layer_types)")
        return int(legacy) if isinstance(legacy, int) else legacy  # the class refuses the rest
    kinds = _list_field("mlp_layer_types", types)
    if len(kinds) != layers:
        raise ConfigError(
            f"mlp_layer_types has {len(kinds)} entries but num_hidden_layers is {layers}"
        )
    hashed = kinds.count("hash_moe")
    if kinds != ["hash_moe"] * hashed + ["moe"] * (layers - hashed):
        raise ConfigError(
            f"mlp_layer_types is {kinds!r}; allowed: 'hash_moe' layers first, then 'moe' layers"
        )
    if legacy is not None and min(legacy, layers) != hashed:
        raise ConfigError(
            f"num_hash_layers is {legacy} but mlp_layer_types names {hashed} 'hash_moe' layers"
        )
    return hashed


def _read_rope(given: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    parameters = given.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"rope_parameters is {parameters!r}; an object is needed")
    nested = isinstance(parameters.get("main"), Mapping) and isinstance(
        parameters.get("compress"), Mapping
    )
    main: Mapping[str, Any] = parameters["main"] if nested else {}
    compress: Mapping[str, Any] = parameters["compress"] if nested else parameters

    kind = main.get("rope_type", main.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"rope_parameters.main.rope_type is {kind!r}; allowed: 'default'")

    scaling = _read_scaling("rope_parameters", compress)
    if given.get("rope_scaling") is not None:
        legacy = given["rope_scaling"]
        if not isinstance(legacy, Mapping):
            raise ConfigError(f"rope_scaling is {legacy!r}; an object is needed")
        from_legacy = _read_scaling("rope_scaling", legacy)
        if parameters and from_legacy != scaling:
            raise ConfigError("rope_scaling and rope_parameters contradict each other")
        scaling = from_legacy
    elif given.get("rope_factor") is not None and given.get("original_seq_len"):
        scaling = _read_scaling(
            "the configuration",
            {
                "type": "yarn",
                "factor": given["rope_factor"],
                "beta_fast": given.get("beta_fast", 32),
                "beta_slow": given.get("beta_slow", 1),
                "original_max_position_embeddings": given["original_seq_len"],
            },
        )

    fraction = _agree(
        "partial_rotary_factor",
        given.get("partial_rotary_factor"),
        main.get("partial_rotary_factor"),
        compress.get("partial_rotary_factor"),
    )
    rotated = _agree(
        "qk_rope_head_dim",
        given.get("qk_rope_head_dim"),
        None if fraction is None else int(head_dim * fraction),
    )
    theta = _agree("rope_theta", given.get("rope_theta"), main.get("rope_theta"))
    compress_theta = _agree(
        "compress_rope_theta",
        given.get("compress_rope_theta"),
        compress.get("rope_theta") if nested else None,
    )
    result = {
        "qk_rope_head_dim": rotated,
        "rope_theta": theta,
        "compress_rope_theta": compress_theta,
    }
    missing = [name for name, value in result.items() if value is None]
    if missing:
        raise ConfigError(f"the configuration lacks {', '.join(missing)}")
    return {**result, "rope_scaling": scaling}


def _read_scaling(where: str, block: Mapping[str, Any]) -> RopeScaling | None:
    kind = block.get("rope_type", block.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"the rope type in {where} is {kind!r}; allowed: 'yarn', 'default'")
    if block.get("attention_factor", 1.0) not in (None, 1.0):
        raise ConfigError(
            f"attention_factor in {where} is {block['attention_factor']!r}; allowed: 1.0"
        )
    if block.get("truncate", True) is not True:
        raise ConfigError(f"truncate in {where} is {block['truncate']!r}; allowed: true")
    numbers: dict[str, float] = {}
    for name, default in (
        ("factor", None),
        ("beta_fast", 32.0),
        ("beta_slow", 1.0),
        ("original_max_position_embeddings", None),
    ):
        value = block.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{name} in {where} is {value!r}; a number above 0 is needed")
        numbers[name] = float(value)
    return RopeScaling(
        factor=numbers["factor"],
        beta_fast=numbers["beta_fast"],
        beta_slow=numbers["beta_slow"],
        original_max_position_embeddings=int(numbers["original_max_position_embeddings"]),
    )


def _agree(name: str, *values: Any) -> Any:
    stated = [value for value in values if value is not None]
    if any(value != stated[0] for value in stated):
        raise ConfigError(
            f"the configuration states {name} more than once, with different values: "
            f"{', '.join(repr(value) for value in stated)}"
        )
    return stated[0] if stated else None


def _read_eos(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    return tuple(_list_field("eos_token_id", value))
