"""The configuration in its three spellings, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from paceline.config import ModelConfig, RopeScaling, unrecognised_fields
from paceline.models.deepseek_v4.synth import preset_config
from paceline.types import CheckpointError, ConfigError

YARN = {
    "type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}


def flash_json() -> dict[str, Any]:
    """DeepSeek-V4-Flash's file, field by field."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "sliding_window": 128,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
        "compress_rope_theta": 160000,
        "rope_theta": 10000,
        "rope_scaling": dict(YARN),
        "max_position_embeddings": 1048576,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048,
        "num_hash_layers": 3,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "num_nextn_predict_layers": 1,
        "vocab_size": 129280,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "transformers_version": "4.57.1",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        },
    }


def pro_json() -> dict[str, Any]:
    """DeepSeek-V4-Pro's differences."""
    return flash_json() | {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5,
        "index_topk": 1024,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
        "expert_dtype": "fp4",
    }


def inference_json() -> dict[str, Any]:
    """The same numbers under the names of DeepSeek's inference code."""
    return {
        "vocab_size": 129280,
        "dim": 4096,
        "moe_inter_dim": 2048,
        "n_layers": 43,
        "n_hash_layers": 3,
        "n_mtp_layers": 1,
        "n_heads": 64,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "n_activated_experts": 6,
        "score_func": "sqrtsoftplus",
        "route_scale": 1.5,
        "swiglu_limit": 10.0,
        "q_lora_rank": 1024,
        "head_dim": 512,
        "rope_head_dim": 64,
        "norm_eps": 1e-6,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "window_size": 128,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
        "compress_rope_theta": 160000.0,
        "original_seq_len": 65536,
        "rope_theta": 10000.0,
        "rope_factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "max_seq_len": 1048576,
        "dtype": "fp8",
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
        "scale_dtype": "fp8",
    }


def test_flash_reads_field_by_field() -> None:
    config = ModelConfig.from_dict(flash_json())
    assert len(config.compress_ratios) == 43
    assert config.compress_ratios.count(0) == 2
    assert config.compress_ratios.count(4) == 21
    assert config.compress_ratios.count(128) == 20
    assert config.mtp_compress_ratio == 0
    assert [config.attention_kind(layer) for layer in (0, 2, 3, 42)] == ["swa", "csa", "hca", "csa"]
    assert [config.is_hash_routed(layer) for layer in (0, 2, 3)] == [True, True, False]
    assert config.rope_scaling == RopeScaling(factor=16.0)
    assert config.eos_token_ids == (1,)
    assert config.nope_head_dim == 448
    assert unrecognised_fields(flash_json()) == ()


def test_pro_has_no_window_only_layer() -> None:
    config = ModelConfig.from_dict(pro_json())
    assert config.compress_ratios.count(128) == 31
    assert config.compress_ratios.count(4) == 30
    assert config.index_topk == 1024
    assert config.expert_dtype == "fp4"


@pytest.mark.parametrize("raw", [flash_json(), pro_json()], ids=["flash", "pro"])
def test_presets_are_the_released_shapes(raw: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(raw)
    preset = preset_config("flash" if config.num_hidden_layers == 43 else "pro")
    bare = raw.copy()
    del bare["quantization_config"]
    bare.pop("expert_dtype", None)
    assert ModelConfig.from_dict(bare) == preset


@pytest.mark.parametrize("raw", [flash_json(), pro_json()], ids=["flash", "pro"])
def test_to_dict_round_trips_and_keeps_the_released_values(raw: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(raw)
    written = config.to_dict()
    assert ModelConfig.from_dict(json.loads(json.dumps(written))) == config
    differing = {name for name in raw if name in written and written[name] != raw[name]}
    assert differing == set()
    assert set(raw) - set(written) == {"transformers_version"}


def test_inference_spelling_is_the_same_model() -> None:
    config = ModelConfig.from_dict(inference_json())
    raw = flash_json() | {"expert_dtype": "fp4", "bos_token_id": None, "eos_token_id": None}
    del raw["quantization_config"]
    assert config == ModelConfig.from_dict(raw)
    assert unrecognised_fields(inference_json()) == ()


@pytest.mark.parametrize("preset", ["tiny", "small", "flash", "pro"])
def test_transformers_spelling_is_the_same_model(preset: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = preset_config(preset)
    transformers.DeepseekV4Config(**config.to_dict()).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "compress_ratios" not in raw
    assert "rope_scaling" not in raw
    assert ModelConfig.from_path(tmp_path) == config
    assert unrecognised_fields(raw) == ()


def test_dspark_configuration_has_more_ratios() -> None:
    raw = flash_json()
    raw["compress_ratios"] = [*raw["compress_ratios"], 0, 0]
    raw["dspark_block_size"] = 5
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(flash_json())
    assert unrecognised_fields(raw | {"surprise": 1}) == ("surprise",)


def test_plain_rope_has_no_scaling() -> None:
    raw = flash_json()
    del raw["rope_scaling"]
    config = ModelConfig.from_dict(raw)
    assert config.rope_scaling is None
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_several_ends_of_text() -> None:
    config = ModelConfig.from_dict(flash_json() | {"eos_token_id": [1, 5]})
    assert config.eos_token_ids == (1, 5)
    assert config.to_dict()["eos_token_id"] == [1, 5]
    assert ModelConfig.from_dict(flash_json() | {"eos_token_id": None}).eos_token_ids == ()


def test_is_frozen_and_hashable() -> None:
    config = ModelConfig.from_dict(flash_json())
    assert hash(config) == hash(ModelConfig.from_dict(flash_json()))
    with pytest.raises(FrozenInstanceError):
        config.vocab_size = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v3"}, r"model_type is 'deepseek_v3'; allowed: 'deepseek_v4'"),
        ({"model_type": "deepseek_v41"}, r"DeepSeek-V4\.1"),
        ({"scoring_func": "sigmoid"}, r"scoring_func is 'sigmoid'; allowed: 'sqrtsoftplus'"),
        ({"attention_bias": True}, r"attention_bias is True; allowed: False"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'; allowed: 'silu'"),
        ({"norm_topk_prob": False}, r"norm_topk_prob is False; allowed: True"),
        ({"num_key_value_heads": 2}, r"num_key_value_heads is 2; allowed: 1"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings is True"),
        ({"topk_method": "greedy"}, r"topk_method is 'greedy'"),
        ({"n_group": 8}, r"n_group is 8"),
        ({"expert_dtype": "int4"}, r"expert_dtype is 'int4'; allowed: .*'fp4'"),
        ({"vocab_size": 0}, r"vocab_size is 0; a whole number of at least 1"),
        ({"vocab_size": "many"}, r"vocab_size is 'many'"),
        ({"hc_mult": 2.5}, r"hc_mult is 2\.5"),
        ({"hidden_size": True}, r"hidden_size is True"),
        ({"rms_norm_eps": 0.0}, r"rms_norm_eps is 0\.0; a number above 0"),
        ({"swiglu_limit": 0}, r"swiglu_limit is 0"),
        ({"compress_ratios": [0, 4]}, r"compress_ratios has 2 entries but num_hidden_layers is 43"),
        ({"compress_ratios": 4}, r"compress_ratios is 4; a list"),
        ({"compress_ratios": [0] * 42 + [8, 0]}, r"compress_ratios\[42\] is 8; allowed are 0, 4"),
        ({"compress_ratios": [0] * 43 + [4]}, r"compress_ratios\[43\] \(the MTP layer's\) is 4"),
        ({"compress_ratios": None}, r"lacks compress_ratios"),
        ({"sliding_window": 64}, r"sliding_window is 64 .* at least 128"),
        ({"num_hash_layers": 44}, r"num_hash_layers is 44; at most num_hidden_layers = 43"),
        ({"num_hash_layers": "three"}, r"num_hash_layers is 'three'"),
        ({"num_hash_layers": None}, r"lacks num_hash_layers"),
        ({"qk_rope_head_dim": 63}, r"qk_rope_head_dim is 63; .* even"),
        ({"qk_rope_head_dim": 256}, r"qk_rope_head_dim is 256; at most"),
        ({"qk_rope_head_dim": None}, r"lacks qk_rope_head_dim"),
        ({"o_groups": 7}, r"num_attention_heads is 64 and o_groups is 7"),
        ({"num_experts_per_tok": 300}, r"num_experts_per_tok is 300; at most n_routed_experts"),
        ({"n_shared_experts": 2}, r"n_shared_experts is 2; only 1"),
        ({"eos_token_id": 200000}, r"eos_token_id \(0\) is 200000; ids below vocab_size = 129280"),
        ({"bos_token_id": -1}, r"bos_token_id is -1"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, r"rope_scaling is 'linear'"),
        ({"rope_scaling": {"type": "yarn"}}, r"factor in rope_scaling is None"),
        ({"rope_scaling": YARN | {"attention_factor": 1.3}}, r"attention_factor .* is 1\.3"),
        ({"rope_scaling": YARN | {"truncate": False}}, r"truncate in rope_scaling is False"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; an object"),
        ({"rope_parameters": 3}, r"rope_parameters is 3; an object"),
        ({"quantization_config": 3}, r"quantization_config is 3; an object"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config\.quant_method"),
        (
            {"quantization_config": {"weight_block_size": [32, 32]}},
            r"weight_block_size is \[32, 32\]; allowed: \[128, 128\]",
        ),
        ({"layer_types": ["full_attention"] * 43}, r"layer_types\[0\] is 'full_attention'"),
        ({"layer_types": ["sliding_attention"] * 43}, r"contradict each other"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types has 1 entries"),
        ({"mlp_layer_types": ["moe"] * 43}, r"num_hash_layers is 3 but mlp_layer_types names 0"),
        ({"mlp_layer_types": ["moe"] * 2}, r"mlp_layer_types has 2 entries"),
        ({"mlp_layer_types": ["moe", *["hash_moe"] * 42]}, r"'hash_moe' layers first"),
        ({"compress_rates": {"compressed_sparse_attention": 8}}, r"is 8; allowed: 4"),
        ({"compress_rate_hca": 64}, r"is 64; allowed: 128"),
        ({"partial_rotary_factor": 0.5}, r"states qk_rope_head_dim more than once"),
        ({"hidden_size": None, "head_dim": None}, r"lacks hidden_size, head_dim"),
    ],
)
def test_refuses_with_the_given_and_the_allowed(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(flash_json() | change)


def test_nested_rope_must_agree() -> None:
    main = {"rope_type": "default", "rope_theta": 10000}
    compress = YARN | {"rope_theta": 160000}
    good = flash_json() | {"rope_parameters": {"main": main, "compress": compress}}
    assert ModelConfig.from_dict(good) == ModelConfig.from_dict(flash_json())
    for parameters, message in (
        ({"main": main | {"rope_theta": 5}, "compress": compress}, "states rope_theta"),
        ({"main": main, "compress": compress | {"factor": 4}}, "contradict each other"),
        ({"main": main | {"rope_type": "yarn"}, "compress": compress}, "main.rope_type is 'yarn'"),
    ):
        with pytest.raises(ConfigError, match=message):
            ModelConfig.from_dict(flash_json() | {"rope_parameters": parameters})


def test_from_path_reads_a_folder_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(flash_json()))
    assert ModelConfig.from_path(tmp_path) == ModelConfig.from_path(str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "does not exist"), ("{", "not valid JSON"), ("[]", "JSON list; an object is needed")],
)
def test_unreadable_files_are_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelConfig.from_path(tmp_path)
    assert "config.json" in str(caught.value)
