"""Synthetic checkpoints: in the real format, non-trivial, streamed, and read by transformers."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors import safe_open
from typer.testing import CliRunner

from paceline.cli.synth import synth
from paceline.config import ModelConfig
from paceline.models.deepseek_v4 import synth as synth_module
from paceline.models.deepseek_v4.checkpoint import Checkpoint, load_weights
from paceline.models.deepseek_v4.synth import (
    SPECIAL_TOKENS,
    byte_tokenizer_json,
    preset_config,
    write_synthetic,
)
from paceline.types import CheckpointError, ConfigError

TINY = preset_config("tiny")


def test_tiny_exercises_every_branch() -> None:
    assert set(TINY.compress_ratios) == {0, 4, 128}
    assert 0 < TINY.num_hash_layers < TINY.num_hidden_layers
    # Enough index heads that scores rarely tie at zero.
    assert TINY.index_n_heads >= 16


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp4", "release"])
def test_the_reference_reader_reads_what_is_written(tmp_path: Path, dtype: Any) -> None:
    """The safetensors library's own checks pass, and it sees the numbers that we load."""
    out = write_synthetic(tmp_path / "out", TINY, dtype=dtype)
    checkpoint = Checkpoint.open(out)
    with safe_open(out / "model.safetensors", framework="pt") as reference:
        names = set(reference.keys())
        assert names == set(checkpoint.tensors)
        for name in names:
            expected = reference.get_tensor(name)
            got = checkpoint.read(name)
            assert got.dtype == expected.dtype
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_release_kinds_and_configuration(tmp_path: Path) -> None:
    out = write_synthetic(tmp_path / "out", TINY, dtype="release")
    tensors = Checkpoint.open(out).tensors
    kinds = {
        "layers.2.attn.wq_a.weight": "F8_E4M3",
        "layers.2.attn.wq_a.scale": "F8_E8M0",
        "layers.2.attn.indexer.wq_b.weight": "F8_E4M3",
        "layers.2.attn.compressor.wkv.weight": "BF16",
        "layers.2.attn.compressor.ape": "F32",
        "layers.2.attn.attn_sink": "F32",
        "layers.2.ffn.gate.tid2eid": "I64",
        "layers.3.ffn.gate.bias": "F32",
        "layers.3.ffn.experts.7.w2.weight": "I8",
        "layers.3.ffn.experts.7.w2.scale": "F8_E8M0",
        "layers.3.hc_attn_fn": "F32",
        "mtp.0.e_proj.weight": "F8_E4M3",
        "embed.weight": "BF16",
        "norm.weight": "BF16",
    }
    assert {name: tensors[name].dtype for name in kinds} == kinds
    assert tensors["layers.3.ffn.experts.7.w2.weight"].shape == (128, 32)
    config = ModelConfig.from_path(out)
    assert config.expert_dtype == "fp4"
    assert config.quantization_config is not None
    assert replace(config, expert_dtype=None, quantization_config=None) == TINY
    bare = write_synthetic(tmp_path / "bare", TINY)
    assert ModelConfig.from_path(bare) == TINY


def test_flash_with_dspark_counts_like_the_published_files() -> None:
    """DeepSeek-V4-Flash-0731's headers: so many tensors, types and bytes."""
    planned = list(synth_module._plan(preset_config("flash"), "release", "dspark"))
    assert len(planned) == 72_317
    assert Counter(tensor.dtype for tensor in planned) == {
        "I8": 35_328,
        "F8_E8M0": 35_718,
        "F8_E4M3": 390,
        "BF16": 445,
        "F32": 433,
        "I64": 3,
    }
    assert sum(tensor.num_bytes for tensor in planned) == 166_878_536_440


def test_every_parameter_is_non_trivial(tmp_path: Path) -> None:
    weights = load_weights(write_synthetic(tmp_path / "out", TINY, dtype="fp32"))
    for name, tensor in weights.items():
        if tensor.dtype == torch.int64:
            for row in tensor.tolist():
                assert len(set(row)) == len(row)
            assert len(tensor.unique()) == TINY.n_routed_experts
            continue
        assert tensor.numel() == 1 or tensor.unique().numel() > 1, name
        assert (tensor != tensor.round()).any(), name
        assert tensor.count_nonzero() > 0.999 * tensor.numel(), name
        centre = 1.0 if name.endswith(("norm.weight", "_scale")) else 0.0
        if tensor.numel() > 40:
            assert abs(float(tensor.mean()) - centre) < 5 * float(tensor.std()) / 5, name


def test_numbers_depend_on_seed_and_name_only(tmp_path: Path) -> None:
    first = load_weights(write_synthetic(tmp_path / "a", TINY, dtype="fp32", seed=3))
    sharded = write_synthetic(
        tmp_path / "b", TINY, dtype="fp32", seed=3, shard_bytes=300_000, drafter=None
    )
    assert len(Checkpoint.open(sharded).files) > 10
    again = load_weights(sharded, want_drafter=False)
    for name, tensor in again.items():
        assert torch.equal(tensor, first[name])
    other = load_weights(write_synthetic(tmp_path / "c", TINY, dtype="fp32", seed=4))
    assert not any(torch.equal(tensor, other[name]) for name, tensor in first.items())
    # bf16 storage is the same numbers, rounded.
    rounded = load_weights(write_synthetic(tmp_path / "d", TINY, seed=3))
    for name, tensor in rounded.items():
        assert torch.equal(tensor, first[name].to(tensor.dtype))


def test_expert_gain_reaches_the_clamp(tmp_path: Path) -> None:
    plain = load_weights(write_synthetic(tmp_path / "a", TINY))
    loud = load_weights(write_synthetic(tmp_path / "b", TINY, expert_gain=8))
    for name in ("layers.0.ffn.experts.w1", "layers.0.ffn.shared_experts.w3.weight"):
        assert 7 < float(loud[name].float().std() / plain[name].float().std()) < 9
    assert torch.equal(plain["layers.0.ffn.experts.w2"], loud["layers.0.ffn.experts.w2"])


def test_memory_stays_far_below_the_checkpoint(tmp_path: Path) -> None:
    config = replace(
        TINY, vocab_size=300_000, num_hidden_layers=1, compress_ratios=(0,), num_hash_layers=0
    )
    seen: list[tuple[int, int]] = []
    tracemalloc.start()
    out = write_synthetic(
        tmp_path / "out", config, progress=lambda done, total: seen.append((done, total))
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = (out / "model.safetensors").stat().st_size
    assert size > 150_000_000
    assert peak < size / 3
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_layers_cut_the_front(layers: int, tmp_path: Path) -> None:
    config = preset_config("flash", layers=layers)
    assert config.compress_ratios == (0, 0, 4, 128, 4)[:layers]
    assert config.num_hash_layers == min(3, layers)
    tiny = preset_config("tiny", layers=layers)
    assert load_weights(write_synthetic(tmp_path / "out", tiny)).config == tiny


def test_byte_tokenizer_round_trips() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(byte_tokenizer_json(512))
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(8))
    text = "naïve 数字 🙂\n\tx = 1"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    turn = tokenizer.encode("<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>").ids
    assert turn[:2] == [0, 3]
    assert turn[-2:] == [4, 6]
    # Control tokens vanish when asked to; role tokens are ordinary ones, as in DeepSeek's file.
    assert tokenizer.decode(turn, skip_special_tokens=True) == "<｜User｜>Hi<｜Assistant｜></think>"


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="preset is 'huge'; allowed: tiny, small, flash, pro"):
        preset_config("huge")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="layers is 7; preset tiny allows 1 to 6"):
        preset_config("tiny", layers=7)
    with pytest.raises(ConfigError, match="dtype is 'int3'; allowed: bf16"):
        write_synthetic(tmp_path / "a", TINY, dtype="int3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="drafter is 'eagle'"):
        write_synthetic(tmp_path / "a", TINY, drafter="eagle")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="vocab_size is 100; the byte tokenizer needs"):
        write_synthetic(tmp_path / "a", replace(TINY, vocab_size=100))
    with pytest.raises(ConfigError, match=r"w2\.weight has 48 inputs; fp4"):
        write_synthetic(tmp_path / "a", replace(TINY, moe_intermediate_size=48), dtype="fp4")
    assert not (tmp_path / "a").exists()
    write_synthetic(tmp_path / "a", TINY)
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        write_synthetic(tmp_path / "a", TINY)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_synthetic(tmp_path / "file" / "deeper", TINY)


def test_command_writes_a_checkpoint(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(synth)
    out = tmp_path / "out"
    arguments = [str(out), "--layers", "4", "--dtype", "release", "--seed", "7"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    weights = load_weights(out)
    assert weights.config.num_hidden_layers == 4
    assert weights.drafter == "mtp"
    assert (out / "tokenizer.json").exists()
    copied = tmp_path / "copied"
    arguments = [str(copied), "--drafter", "none", "--tokenizer", str(out / "tokenizer.json")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert Checkpoint.open(copied).drafter is None
    assert json.loads((copied / "tokenizer.json").read_text()) == json.loads(
        (out / "tokenizer.json").read_text()
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_transformers_loads_it_whole(tmp_path: Path, dtype: Any) -> None:
    """No key is missing or left over there, and every parameter equals the one we load."""
    transformers = pytest.importorskip("transformers")
    out = write_synthetic(tmp_path / "out", TINY, dtype=dtype)
    model, info = transformers.DeepseekV4ForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = load_weights(out, dtype=torch.float32)
    state = model.state_dict()
    pairs = {
        "model.embed_tokens.weight": weights["embed.weight"],
        "lm_head.weight": weights["head.weight"],
        "model.hc_head.hc_fn": weights["hc_head_fn"],
        "model.layers.2.self_attn.kv_norm.weight": weights["layers.2.attn.kv_norm.weight"],
        "model.layers.2.self_attn.compressor.position_bias": weights[
            "layers.2.attn.compressor.ape"
        ],
        "model.layers.2.self_attn.compressor.indexer.kv_norm.weight": weights[
            "layers.2.attn.indexer.compressor.norm.weight"
        ],
        "model.layers.2.mlp.gate.tid2eid": weights["layers.2.ffn.gate.tid2eid"],
        "model.layers.3.mlp.gate.e_score_correction_bias": weights["layers.3.ffn.gate.bias"],
        "model.layers.3.mlp.experts.down_proj": weights["layers.3.ffn.experts.w2"],
        "model.layers.3.mlp.experts.gate_up_proj": torch.cat(
            [weights["layers.3.ffn.experts.w1"], weights["layers.3.ffn.experts.w3"]], dim=1
        ),
        "model.layers.5.self_attn.sinks": weights["layers.5.attn.attn_sink"],
    }
    for name, expected in pairs.items():
        assert torch.equal(state[name], expected), name
    with torch.no_grad():
        logits = model(torch.arange(20, 60).view(1, -1)).logits
    assert 0.2 < float(logits.std()) < 3
