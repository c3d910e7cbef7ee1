"""The census and `paceline inspect`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy import decode
from typer.testing import CliRunner

from paceline import LLM
from paceline.cache.pools import CachePools
from paceline.cli import app
from paceline.config import ModelConfig
from paceline.draft import DeepseekV4MtpHead
from paceline.engine import Engine
from paceline.models.deepseek_v4.build import build
from paceline.models.deepseek_v4.census import cache_bytes, part_of, take_census
from paceline.models.deepseek_v4.checkpoint import load_weights, tensor_specs
from paceline.models.deepseek_v4.synth import preset_config, write_synthetic
from paceline.types import CheckpointError, SamplingParams

TINY = preset_config("tiny")
FILE = "model.safetensors"


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["inspect", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    assert ("would be refused\n" in result.stderr) == (code == 2)
    return result.stdout


def loads(path: Path) -> bool:
    """Whether it can be loaded as the verbs do."""
    try:
        LLM(path, backend="torch").close()
    except CheckpointError:
        return False
    return True


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_synthetic(tmp_path / "tiny", TINY)


def test_counts_are_those_of_the_parameters(tiny: Path, tmp_path: Path) -> None:
    weights = load_weights(tiny)
    expected = sum(tensor.numel() for tensor in weights.values())
    plain = take_census(tiny)
    assert plain.parameters == expected
    assert plain.num_bytes == weights.num_bytes
    assert plain.files == {FILE: (tiny / FILE).stat().st_size}
    # Packed codes count two a byte and scales count none: the same parameters.
    release = take_census(write_synthetic(tmp_path / "release", TINY, dtype="release"))
    assert release.parameters == expected
    assert release.num_bytes < plain.num_bytes
    assert plain.refusals == release.refusals == ()
    assert plain.notes == ()
    assert sum(plain.bytes_by_part().values()) == plain.num_bytes
    assert sum(row.num_bytes for row in plain.layers) < plain.num_bytes


def test_every_tensor_of_the_model_has_a_part() -> None:
    parts = {name: part_of(name) for name in tensor_specs(TINY, "mtp")}
    assert "other" not in parts.values()
    assert {part for name, part in parts.items() if name.startswith("mtp.")} == {"drafter"}
    assert parts["layers.2.attn.compressor.norm.weight"] == "compressor"
    assert parts["layers.2.attn.indexer.compressor.ape"] == "indexer"
    assert parts["layers.2.attn.attn_sink"] == "attention"
    assert parts["layers.2.attn.q_norm.weight"] == "norms"
    assert parts["norm.weight"] == parts["layers.0.ffn_norm.weight"] == "norms"
    assert parts["hc_head_fn"] == parts["layers.0.hc_ffn_base"] == "hyper-connections"
    assert parts["head.weight"] == "head"
    assert parts["layers.0.ffn.gate.tid2eid"] == "router"
    assert parts["layers.0.ffn.shared_experts.w1.weight"] == "shared expert"
    assert part_of("vision.patch") == "other"


def test_layer_map(tiny: Path) -> None:
    rows = take_census(tiny).layers
    assert [row.name for row in rows] == ["0", "1", "2", "3", "4", "5", "mtp.0"]
    assert [row.attention for row in rows] == ["swa", "swa", "csa", "hca", "csa", "hca", "swa"]
    assert [row.routing for row in rows] == ["hash"] * 3 + ["learned"] * 4
    assert rows[0].tensors == 21 + 3 * TINY.n_routed_experts


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_cache_bytes_are_what_the_pools_allocate(preset: Any, dtype: Any) -> None:
    config = preset_config(preset)
    width, tokens = 24, 1024
    stated = cache_bytes(config, dtype=dtype, drafter="mtp", max_width=width)

    def allocate(slots: int, blocks: int) -> int:
        pools = CachePools.allocate(
            config,
            num_slots=slots,
            num_blocks=blocks,
            max_seq_len=tokens,
            max_width=width,
            device=torch.device("cpu"),
            dtype=torch.float32 if dtype == "fp32" else torch.bfloat16,
        )
        tables = pools.block_tables.nbytes
        return pools.num_bytes - tables

    assert allocate(2, 3) - allocate(1, 3) == stated.per_sequence
    assert allocate(1, 3 + tokens // 128) - allocate(1, 3) == tokens * stated.per_token
    context = replace(config, max_position_embeddings=tokens)
    assert cache_bytes(
        context, dtype=dtype, drafter=None, max_width=width
    ).full_context == allocate(1, tokens // 128) - allocate(0, 0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_drafter_bytes_are_what_a_head_and_its_engine_hold(tiny: Path, dtype: Any) -> None:
    """All that one more sequence adds, and no memory that grows with vocabulary times drafts."""
    weights = load_weights(tiny)
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    built = build(weights, TINY, device=torch.device("cpu"), dtype=kind, backend="torch")
    assert built.mtp is not None

    def held(slots: int) -> int:
        head = DeepseekV4MtpHead.new(
            built.mtp, built.embed_tokens, built.lm_head, TINY, 0, 256, num_slots=slots
        )
        engine = Engine(
            built.model,
            TINY,
            proposer=head,
            num_drafts=3,
            max_seq_len=256,
            max_num_seqs=slots,
            dtype=kind,
        )
        decode(engine, [[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))
        assert engine.speculation.num_drafted > 0
        weight = {built.embed_tokens.table.data_ptr(), built.lm_head.table.data_ptr()}
        owners = (head, head.ring, engine.drafting)
        names = (getattr(owner, "__slots__", None) or vars(owner) for owner in owners)
        found = {
            tensor.data_ptr(): tensor
            for owner, some in zip(owners, names, strict=True)
            for tensor in (getattr(owner, name) for name in some)
            if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in weight
        }
        return sum(tensor.nbytes for tensor in found.values() if tensor.is_floating_point())

    stated = cache_bytes(TINY, dtype=dtype, drafter="mtp", max_width=24)
    # With few slots a buffer of one step is as wide as the ring, whoever uses it.
    assert held(21) - held(20) == stated.drafter_per_sequence
    assert stated.drafter_per_sequence > 100 * TINY.hidden_size
    without = cache_bytes(TINY, dtype=dtype, drafter=None, max_width=24)
    assert stated.full_context - without.full_context == stated.drafter_per_sequence


def test_flash_takes_about_seven_kilobytes_a_token() -> None:
    stated = cache_bytes(preset_config("flash"), dtype="bf16", drafter=None, max_width=1)
    # 21 layers x (1024 + 4 x 128) / 4 + 20 layers x 1024 / 128, index rows in fp32.
    assert stated.per_token == 21 * (1024 + 512) / 4 + 20 * 1024 / 128


def test_dspark_is_named_and_drafts_refused(tmp_path: Path) -> None:
    census = take_census(write_synthetic(tmp_path / "out", TINY, drafter="dspark"))
    assert census.drafter == "dspark"
    assert [refusal.what for refusal in census.refusals] == ["drafts"]
    assert "DSpark" in census.refusals[0].why
    assert census.cache[0].drafter_per_sequence == 0
    assert [note.split(":")[0] for note in census.notes] == ["144 tensors would not be read"]
    assert [row.name for row in census.layers[-3:]] == ["mtp.0", "mtp.1", "mtp.2"]


def test_no_drafter(tmp_path: Path) -> None:
    out = write_synthetic(tmp_path / "out", TINY, drafter=None)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    census = take_census(out)
    assert census.drafter is None
    assert [refusal.what for refusal in census.refusals] == ["drafts"]
    assert "num_nextn_predict_layers = 1, but there is no drafter" in census.notes[0]


def test_broken_checkpoints_are_described_all_the_same(tiny: Path) -> None:
    data = (tiny / FILE).read_bytes()
    (tiny / FILE).write_bytes(data[:-1])
    census = take_census(tiny)
    assert census.config == TINY
    assert census.tensors == 0
    assert {refusal.what for refusal in census.refusals} >= {"the checkpoint"}
    assert "truncated" in census.refusals[0].why
    (tiny / FILE).write_bytes(data)

    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(config | {"scoring_func": "softmax", "new": 1}))
    census = take_census(tiny)
    assert census.config is None
    assert census.layers == census.cache == ()
    assert census.drafter == "mtp"
    assert "scoring_func is 'softmax'" in census.refusals[0].why
    assert census.notes == ("config.json has fields that are not read: new",)
    assert "scoring_func is 'softmax'" in run(str(tiny), code=2)
    document = json.loads(run(str(tiny), "--json", code=2))
    assert "scoring_func is 'softmax'" in document["refusals"][0]["why"]

    (tiny / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    whys = " | ".join(refusal.why for refusal in take_census(tiny).refusals)
    assert "vocab_size = 100" in whys
    assert "tokenizer.json has ids up to 263, but the model's vocab_size is 100" in whys


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "does not exist"), ("{", "not valid JSON"), ("{}", "no vocabulary")],
)
def test_text_needs_a_tokenizer(tiny: Path, text: str | None, message: str) -> None:
    (tiny / "tokenizer.json").unlink()
    if text is not None:
        (tiny / "tokenizer.json").write_text(text)
    refusals = take_census(tiny).refusals
    assert [refusal.what for refusal in refusals] == ["text"]
    assert message in refusals[0].why
    # Without one, prompts may be ids; one that is broken is refused.
    assert loads(tiny) == (text is None)
    assert message in run(str(tiny), code=0 if text is None else 2)


@pytest.mark.parametrize("drafter", ["mtp", "dspark", None])
def test_the_exit_code_says_whether_it_loads(tmp_path: Path, drafter: Any) -> None:
    out = write_synthetic(tmp_path / "out", TINY, drafter=drafter)
    assert loads(out)
    run(str(out))


def test_a_head_that_is_refused_refuses_the_checkpoint(tiny: Path) -> None:
    tensors = {
        name: tensor
        for name, tensor in load_file(tiny / FILE).items()
        if not name.startswith("mtp.0.attn.q_norm")
    }
    save_file(tensors, tiny / FILE)
    assert [refusal.what for refusal in take_census(tiny).refusals] == ["drafts"]
    assert not loads(tiny)
    assert "mtp.0.attn.q_norm.weight" in run(str(tiny), code=2)


def test_command_prints_tables(tiny: Path) -> None:
    output = run(str(tiny))
    for words in (
        "drafter: MTP head",
        "hidden_size",
        "compressed sparse",
        "hash",
        "experts",
        "BF16",
        "full context",
        "nothing would be refused",
    ):
        assert words in output


def test_command_prints_json(tiny: Path) -> None:
    document = json.loads(run(str(tiny), "--json", "--max-width", "8"))
    assert ModelConfig.from_dict(document["config"]) == TINY
    assert document["drafter"] == "mtp"
    assert document["refusals"] == []
    assert document["cache"]["max_width"] == 8
    assert document["bytes"] == sum(document["bytes_by_part"].values())
    stated = cache_bytes(TINY, dtype="bf16", drafter="mtp", max_width=8)
    assert document["cache"]["rows"][1]["per_token"] == stated.per_token


def test_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        take_census(tmp_path / "nowhere")
