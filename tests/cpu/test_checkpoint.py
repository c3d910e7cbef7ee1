"""Reading checkpoints: every spelling and storage, and every way in which one can be broken."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.config import ModelConfig
from paceline.models.deepseek_v4 import checkpoint as checkpoint_module
from paceline.models.deepseek_v4.checkpoint import (
    Checkpoint,
    Weights,
    canonical_name,
    load_weights,
    plan_load,
    tensor_specs,
)
from paceline.models.deepseek_v4.quant import dequantize_fp4, dequantize_fp8
from paceline.models.deepseek_v4.synth import preset_config, write_synthetic
from paceline.types import CheckpointError, ConfigError

TINY = preset_config("tiny", layers=4)
FILE = "model.safetensors"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_synthetic(tmp_path / "tiny", TINY)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Apply `change` to the tensors of a single-file checkpoint."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / FILE).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


# --- the table -------------------------------------------------------------------------------


def test_flash_table_is_the_published_one() -> None:
    specs = tensor_specs(preset_config("flash"), "mtp")
    published = {
        "embed.weight": ("bf16", 129280, 4096),
        "head.weight": ("bf16", 129280, 4096),
        "norm.weight": ("bf16", 4096),
        "hc_head_fn": ("fp32", 4, 16384),
        "hc_head_base": ("fp32", 4),
        "hc_head_scale": ("fp32", 1),
        "layers.0.attn_norm.weight": ("bf16", 4096),
        "layers.0.hc_attn_fn": ("fp32", 24, 16384),
        "layers.0.hc_ffn_base": ("fp32", 24),
        "layers.0.hc_ffn_scale": ("fp32", 3),
        "layers.0.attn.wq_a.weight": ("fp8", 1024, 4096),
        "layers.0.attn.q_norm.weight": ("bf16", 1024),
        "layers.0.attn.wq_b.weight": ("fp8", 32768, 1024),
        "layers.0.attn.wkv.weight": ("fp8", 512, 4096),
        "layers.0.attn.kv_norm.weight": ("bf16", 512),
        "layers.0.attn.wo_a.weight": ("fp8", 8192, 4096),
        "layers.0.attn.wo_b.weight": ("fp8", 4096, 8192),
        "layers.0.attn.attn_sink": ("fp32", 64),
        "layers.2.attn.compressor.ape": ("fp32", 4, 1024),
        "layers.2.attn.compressor.wkv.weight": ("bf16", 1024, 4096),
        "layers.3.attn.compressor.ape": ("fp32", 128, 512),
        "layers.3.attn.compressor.wgate.weight": ("bf16", 512, 4096),
        "layers.3.attn.compressor.norm.weight": ("bf16", 512),
        "layers.2.attn.indexer.wq_b.weight": ("fp8", 8192, 1024),
        "layers.2.attn.indexer.weights_proj.weight": ("bf16", 64, 4096),
        "layers.2.attn.indexer.compressor.ape": ("fp32", 4, 256),
        "layers.2.attn.indexer.compressor.wkv.weight": ("bf16", 256, 4096),
        "layers.2.attn.indexer.compressor.norm.weight": ("bf16", 128),
        "layers.2.ffn.gate.weight": ("bf16", 256, 4096),
        "layers.2.ffn.gate.tid2eid": ("int64", 129280, 6),
        "layers.3.ffn.gate.bias": ("fp32", 256),
        "layers.3.ffn.experts.255.w1.weight": ("fp4", 2048, 4096),
        "layers.3.ffn.experts.255.w2.weight": ("fp4", 4096, 2048),
        "layers.3.ffn.shared_experts.w3.weight": ("fp8", 2048, 4096),
        "mtp.0.e_proj.weight": ("fp8", 4096, 4096),
        "mtp.0.hc_head_fn": ("fp32", 4, 16384),
        "mtp.0.ffn.gate.bias": ("fp32", 256),
    }
    for name, (kind, *shape) in published.items():
        assert (specs[name].release_kind, specs[name].shape) == (kind, tuple(shape)), name
    for absent in (
        "layers.0.attn.compressor.ape",
        "layers.3.attn.indexer.wq_b.weight",
        "layers.2.ffn.gate.bias",
        "layers.3.ffn.gate.tid2eid",
        "mtp.0.ffn.gate.tid2eid",
        "mtp.0.embed.weight",
    ):
        assert absent not in specs
    stored = [
        name
        for name, spec in specs.items()
        for _ in range(1 + (spec.scale_shape(spec.release_kind) is not None))
        if name.startswith("mtp.")
    ]
    assert len(stored) == 6 * 256 + 39
    w1 = specs["layers.3.ffn.experts.0.w1.weight"]
    assert w1.stored_shape("fp4") == (2048, 2048)
    assert w1.scale_shape("fp4") == (2048, 128)
    assert specs["layers.0.attn.wq_b.weight"].scale_shape("fp8") == (256, 8)


def test_pro_table_differs_where_published() -> None:
    specs = tensor_specs(preset_config("pro"), None)
    assert specs["hc_head_fn"].shape == (4, 28672)
    assert specs["layers.0.hc_attn_fn"].shape == (24, 28672)
    assert specs["layers.0.attn.wq_b.weight"].shape == (65536, 1536)
    assert specs["layers.0.attn.compressor.ape"].shape == (128, 512)
    assert not any(name.startswith("mtp.") for name in specs)


# --- what is loaded --------------------------------------------------------------------------


def test_storage_and_shapes_of_bf16(tiny: Path) -> None:
    weights = load_weights(tiny)
    assert isinstance(weights, Weights)
    assert weights.config == TINY
    assert weights.drafter == "mtp"
    assert weights["layers.0.attn.wq_a.weight"].dtype == torch.bfloat16
    assert weights["layers.0.hc_attn_fn"].dtype == torch.float32
    assert weights["layers.0.ffn.gate.tid2eid"].dtype == torch.int64
    experts, inner, hidden = TINY.n_routed_experts, TINY.moe_intermediate_size, TINY.hidden_size
    for prefix in ("layers.0", "mtp.0"):
        assert weights[f"{prefix}.ffn.experts.w1"].shape == (experts, inner, hidden)
        assert weights[f"{prefix}.ffn.experts.w2"].shape == (experts, hidden, inner)
        assert weights[f"{prefix}.ffn.experts.w3"].shape == (experts, inner, hidden)
        assert weights[f"{prefix}.ffn.experts.w1"].is_contiguous()
    assert not any(".experts.0." in name for name in weights)
    stored = load_file(tiny / FILE)
    assert torch.equal(weights["layers.1.attn.wo_b.weight"], stored["layers.1.attn.wo_b.weight"])
    assert torch.equal(
        weights["layers.1.ffn.experts.w3"][5], stored["layers.1.ffn.experts.5.w3.weight"]
    )


def test_dtype_argument(tmp_path: Path, tiny: Path) -> None:
    full = write_synthetic(tmp_path / "full", TINY, dtype="fp32")
    natural = load_weights(full)
    assert {tensor.dtype for tensor in natural.values()} == {torch.float32, torch.int64}
    wide = load_weights(tiny, dtype=torch.float32)
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32, torch.int64}
    narrow = load_weights(full, dtype=torch.bfloat16)
    assert narrow["layers.0.attn.wq_a.weight"].dtype == torch.bfloat16
    assert narrow["layers.0.attn.attn_sink"].dtype == torch.float32
    assert same(narrow, load_weights(tiny))
    with pytest.raises(ConfigError, match=r"dtype is torch\.float16; allowed"):
        load_weights(tiny, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_release_is_decoded_exactly(tmp_path: Path, dtype: torch.dtype | None) -> None:
    out = write_synthetic(tmp_path / "out", TINY, dtype="release", shard_bytes=200_000)
    weights = load_weights(out, dtype=dtype)
    checkpoint = Checkpoint.open(out)
    assert len(checkpoint.files) > 5
    for name in ("layers.2.attn.wq_b", "mtp.0.h_proj", "layers.0.ffn.shared_experts.w2"):
        expected = dequantize_fp8(
            checkpoint.read(f"{name}.weight"), checkpoint.read(f"{name}.scale")
        )
        got = weights[f"{name}.weight"]
        assert got.dtype == (dtype or torch.bfloat16)
        assert torch.equal(got.float(), expected)
    for expert in (0, 7):
        name = f"layers.1.ffn.experts.{expert}.w2"
        expected = dequantize_fp4(
            checkpoint.read(f"{name}.weight"), checkpoint.read(f"{name}.scale")
        )
        assert torch.equal(weights["layers.1.ffn.experts.w2"][expert].float(), expected)


def test_values_outside_bf16_stay_fp32(tmp_path: Path) -> None:
    """A scale of 2 ** -127 takes fp8 values below bf16's smallest number."""
    out = write_synthetic(tmp_path / "out", TINY, dtype="release")

    def shrink(tensors: dict[str, Tensor]) -> None:
        tensors["layers.0.attn.wq_a.scale"].view(torch.uint8).zero_()

    rewrite(out, shrink)
    weights = load_weights(out)
    assert weights["layers.0.attn.wq_a.weight"].dtype == torch.float32
    stored = load_file(out / FILE)
    expected = dequantize_fp8(
        stored["layers.0.attn.wq_a.weight"], stored["layers.0.attn.wq_a.scale"]
    )
    assert torch.equal(weights["layers.0.attn.wq_a.weight"], expected)
    assert expected.count_nonzero() > 0
    assert weights["layers.1.attn.wq_a.weight"].dtype == torch.bfloat16


def test_fp8_experts_and_mixed_stacks(tmp_path: Path) -> None:
    out = write_synthetic(tmp_path / "out", TINY)
    expected = load_weights(out)
    from paceline.models.deepseek_v4.quant import quantize_fp8

    name = "layers.0.ffn.experts.3.w1"

    def store_fp8(tensors: dict[str, Tensor]) -> None:
        codes, scale = quantize_fp8(tensors[f"{name}.weight"])
        tensors[f"{name}.weight"], tensors[f"{name}.scale"] = codes, scale

    rewrite(out, store_fp8)
    weights = load_weights(out)
    stack = weights["layers.0.ffn.experts.w1"]
    assert stack.dtype == torch.bfloat16
    assert torch.equal(stack[2], expected["layers.0.ffn.experts.w1"][2])
    assert (stack[3] - expected["layers.0.ffn.experts.w1"][3]).abs().max() < 0.02

    def underflow(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}.scale"].view(torch.uint8).zero_()

    rewrite(out, underflow)
    widened = load_weights(out)["layers.0.ffn.experts.w1"]
    assert widened.dtype == torch.float32
    assert torch.equal(widened[2], stack[2].float())


def test_progress_counts_every_byte(tiny: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_weights(tiny, progress=lambda done, total: seen.append((done, total)))
    assert (
        seen[-1][0]
        == seen[-1][1]
        == sum(entry.num_bytes for entry in Checkpoint.open(tiny).tensors.values())
    )
    assert seen == sorted(seen)


def test_parameters_do_not_alias_the_file(tiny: Path) -> None:
    before = (tiny / FILE).read_bytes()
    weights = load_weights(tiny)
    for tensor in weights.values():
        tensor.zero_()
    assert (tiny / FILE).read_bytes() == before
    assert load_weights(tiny)["embed.weight"].count_nonzero() > 0


def test_unaligned_tensors_are_read(tiny: Path) -> None:
    """The format does not promise alignment; build a file with an odd first tensor."""
    expected = load_weights(tiny)
    raw = (tiny / FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [offset + 1 for offset in entry["data_offsets"]]
    header["mtp.0.head.weight"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    text = json.dumps(header).encode()
    (tiny / FILE).write_bytes(len(text).to_bytes(8, "little") + text + b"\0" + raw[8 + length :])
    weights = load_weights(tiny)
    assert same(expected, weights)
    assert list(weights.ignored) == ["mtp.0.head.weight"]


# --- transformers' names ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_what_transformers_saves(tmp_path: Path, tiny: Path, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.DeepseekV4ForCausalLM.from_pretrained(tiny, dtype=dtype)
    model.save_pretrained(tmp_path / "saved")
    names = set(load_file(tmp_path / "saved" / FILE))
    # The half-converted names that only transformers can read back.
    assert {"model.embed_tokens.weight", "model.layers.2.attn.norm.weight"} <= names
    expected = load_weights(tiny, dtype=torch.float32, want_drafter=False)
    got = load_weights(tmp_path / "saved", dtype=torch.float32, want_drafter=False)
    assert set(got) == set(expected)
    for name, tensor in got.items():
        # In bf16, transformers rounds some of what the release keeps in fp32.
        rounded = expected[name].to(dtype).to(tensor.dtype)
        assert torch.equal(tensor, expected[name]) or torch.equal(tensor, rounded), name
    assert got.config == replace(TINY, num_nextn_predict_layers=got.config.num_nextn_predict_layers)


def test_reads_module_names_with_fused_experts(tmp_path: Path, tiny: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.DeepseekV4ForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    out = tmp_path / "modules"
    out.mkdir()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    save_file(state, out / FILE)
    (out / "config.json").write_text((tiny / "config.json").read_text())
    expected = load_weights(tiny, dtype=torch.float32, want_drafter=False)
    assert same(load_weights(out, want_drafter=False), expected)

    state["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(7, 128, 128)
    save_file(state, out / FILE)
    with pytest.raises(CheckpointError, match=r"layers\.0\.ffn\.experts\.7\.w1\.weight"):
        load_weights(out, want_drafter=False)
    state["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(8, 100, 128)
    save_file(state, out / FILE)
    message = r"1 tensor is of the wrong shape: \S+gate_up_proj is \[8, 100, 128\], needed: \[8, 12"
    with pytest.raises(CheckpointError, match=message):
        load_weights(out, want_drafter=False)


def test_converter_synonyms() -> None:
    pairs = {
        "layers.3.self_attn.wq_a.weight_scale_inv": "layers.3.attn.wq_a.scale",
        "layers.3.mlp.gate.e_score_correction_bias": "layers.3.ffn.gate.bias",
        "model.layers.3.self_attn.compressor.indexer.scorer.weights_proj.weight": (
            "layers.3.attn.indexer.weights_proj.weight"
        ),
        "mtp.0.hc_head.hc_fn": "mtp.0.hc_head_fn",
        "something.else": "something.else",
    }
    assert {name: canonical_name(name) for name in pairs} == pairs
    for name in tensor_specs(TINY, "mtp"):
        assert canonical_name(name) == name


# --- drafters --------------------------------------------------------------------------------


def test_drafter_is_told_by_names_not_by_configuration(tmp_path: Path, tiny: Path) -> None:
    change_config(tiny, num_nextn_predict_layers=0)
    assert load_weights(tiny).drafter == "mtp"
    dspark = write_synthetic(tmp_path / "dspark", TINY, drafter="dspark", dtype="release")
    assert json.loads((dspark / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert Checkpoint.open(dspark).drafter == "dspark"
    bare = write_synthetic(tmp_path / "bare", TINY, drafter=None)
    change_config(bare, num_nextn_predict_layers=1)
    assert Checkpoint.open(bare).drafter is None
    with pytest.raises(CheckpointError, match=r"needs an MTP head.*has a DSpark drafter"):
        load_weights(dspark)
    with pytest.raises(CheckpointError, match=r"needs an MTP head.*has no drafter"):
        load_weights(bare)
    trunk = load_weights(dspark, want_drafter=False)
    assert trunk.drafter is None
    assert set(trunk.ignored) == {
        entry.name for name, entry in Checkpoint.open(dspark).tensors.items() if "mtp." in name
    }
    assert set(trunk.ignored.values()) == {"a DSpark drafter's, which this version does not run"}
    assert load_weights(bare, want_drafter=False).ignored == {}


def test_unwanted_head_is_left_unread(tiny: Path) -> None:
    weights = load_weights(tiny, want_drafter=False)
    assert weights.drafter is None
    assert not any(name.startswith("mtp.") for name in weights)
    assert set(weights.ignored.values()) == {"the drafter's, and no drafts are wanted"}


def test_copies_of_embedding_and_head_are_ignored(tiny: Path) -> None:
    copies = ("mtp.0.embed.weight", "mtp.0.head.weight", "mtp.0.emb.tok_emb.weight")

    def add(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: torch.zeros(3, dtype=torch.bfloat16) for name in copies})

    rewrite(tiny, add)
    weights = load_weights(tiny)
    assert set(weights.ignored) == set(copies)


def test_fragments_of_a_drafter_are_named(tiny: Path) -> None:
    rewrite(tiny, lambda tensors: drop(tensors, "mtp.0.e_proj.weight"))
    with pytest.raises(CheckpointError, match=r"mtp\.\* tensors without mtp\.0\.e_proj"):
        load_weights(tiny)


# --- broken in every way ---------------------------------------------------------------------


def drop(tensors: dict[str, Tensor], *names: str) -> None:
    for name in names:
        del tensors[name]


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_weights(folder)


def test_missing_tensors_are_listed(tiny: Path) -> None:
    rewrite(tiny, lambda tensors: drop(tensors, "layers.2.attn.attn_sink", "mtp.0.enorm.weight"))
    refuse(tiny, r"2 tensors are missing .*layers\.2\.attn\.attn_sink, mtp\.0\.enorm\.weight")


def test_missing_scale_is_listed(tmp_path: Path) -> None:
    out = write_synthetic(tmp_path / "out", TINY, dtype="release")
    rewrite(out, lambda tensors: drop(tensors, "layers.1.ffn.experts.4.w3.scale"))
    refuse(out, r"1 tensor is missing from the files: layers\.1\.ffn\.experts\.4\.w3\.scale$")


def test_left_over_tensors_are_listed_twenty_at_most(tiny: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors.update({f"layers.0.attn.extra{number:02}": torch.zeros(1) for number in range(25)})

    rewrite(tiny, add)
    with pytest.raises(CheckpointError) as caught:
        load_weights(tiny)
    message = str(caught.value)
    assert "25 tensors are in the files but not part of this model" in message
    assert message.count("extra") == 20
    assert message.endswith("and 5 more")


def test_a_second_mtp_layer_is_left_over(tiny: Path) -> None:
    rewrite(tiny, lambda tensors: tensors.update({"mtp.1.enorm.weight": torch.zeros(128)}))
    refuse(tiny, r"not part of this model: mtp\.1\.enorm\.weight")


def test_wrong_shapes_are_listed_with_their_meaning(tiny: Path) -> None:
    name = "layers.1.attn.wo_a.weight"
    rewrite(tiny, lambda tensors: tensors.update({name: torch.zeros(64, 255).bfloat16()}))
    refuse(
        tiny,
        r"1 tensor is of the wrong shape: layers\.1\.attn\.wo_a\.weight is \[64, 255\], needed: "
        r"\[64, 256\] \(o_groups\*o_lora_rank x num_attention_heads\*head_dim/o_groups\)",
    )


def test_wrong_dtypes_are_listed(tiny: Path) -> None:
    name = "layers.1.attn.q_norm.weight"
    rewrite(tiny, lambda tensors: tensors.update({name: tensors[name].half()}))
    refuse(tiny, r"1 tensor is of the wrong dtype: \S+ is F16, allowed: BF16, F32")


def test_scales_must_be_ue8m0_of_the_right_shape(tmp_path: Path) -> None:
    out = write_synthetic(tmp_path / "out", TINY, dtype="release")
    name = "layers.0.attn.wq_b.scale"
    kept = load_file(out / FILE)[name].clone()
    rewrite(out, lambda tensors: tensors.update({name: torch.ones(4, 1)}))
    refuse(out, r"wq_b\.scale is F32, allowed: F8_E8M0")
    rewrite(out, lambda tensors: tensors.update({name: kept[:2]}))
    refuse(out, r"wq_b\.scale is \[2, 1\], needed: \[4, 1\]")


def test_nan_scale_is_named(tmp_path: Path) -> None:
    out = write_synthetic(tmp_path / "out", TINY, dtype="release")

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["layers.0.ffn.experts.2.w1.scale"].view(torch.uint8)[3, 1] = 255

    rewrite(out, spoil)
    refuse(out, r"layers\.0\.ffn\.experts\.2\.w1\.weight in .*: 1 of 256 block scales are NaN")


def test_nan_and_infinity_in_the_file_are_named(tiny: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["layers.0.ffn.experts.2.w1.weight"][1, 1] = math.nan
        tensors["layers.1.attn.attn_sink"][0] = math.inf

    rewrite(tiny, spoil)
    with pytest.raises(CheckpointError, match="2 parameters hold no usable values") as caught:
        load_weights(tiny)
    assert "layers.0.ffn.experts.w1 (1 of 65536 values" in str(caught.value)
    assert "layers.1.attn.attn_sink (1 of 8 values" in str(caught.value)


def test_a_parameter_that_was_never_written_is_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers start as NaN (tables as -1), so a reader that skips one cannot go unnoticed."""
    store = checkpoint_module._store
    skipped = ("layers.0.ffn.experts.5.w2.weight", "norm.weight", "layers.1.ffn.gate.tid2eid")

    def lazy(buffers: dict[str, Tensor], name: str, values: Tensor, *, widen: bool) -> None:
        if name not in skipped:
            store(buffers, name, values, widen=widen)

    monkeypatch.setattr(checkpoint_module, "_store", lazy)
    with pytest.raises(CheckpointError, match="3 parameters hold no usable values") as caught:
        load_weights(tiny)
    for name in ("layers.0.ffn.experts.w2", "norm.weight", "layers.1.ffn.gate.tid2eid"):
        assert name in str(caught.value)


def test_hash_table_beyond_the_experts_is_refused(tiny: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["layers.0.ffn.gate.tid2eid"][7, 1] = 8

    rewrite(tiny, spoil)
    refuse(tiny, r"tid2eid \(1 of 1024 entries are not experts 0 to 7\)")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": 600},
            r"configuration says vocab_size = 600, but embed\.weight and \d+ more tensors say 512",
        ),
        ({"hidden_size": 64}, r"configuration says hidden_size = 64, but .* say 128"),
        (
            {"num_hidden_layers": 3, "compress_ratios": [0, 0, 4, 0]},
            r"says num_hidden_layers = 3, but the tensors hold layers 0 to 3",
        ),
        (
            {"num_hidden_layers": 5, "compress_ratios": [0, 0, 4, 128, 4, 0]},
            r"says num_hidden_layers = 5, but the tensors hold layers 0 to 3",
        ),
        ({"n_routed_experts": 9}, r"n_routed_experts = 9, but the tensors hold 8 experts a layer"),
        ({"moe_intermediate_size": 32}, r"says moe_intermediate_size = 32, but .* say 64"),
        ({"compress_ratios": [0, 0, 128, 4, 0]}, r"compressor\.ape is \[4, 128\], needed: \[128,"),
        ({"num_hash_layers": 1}, r"missing from the files: layers\.1\.ffn\.gate\.bias"),
    ],
)
def test_configuration_that_contradicts_the_tensors(
    tiny: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(tiny, **changes)
    refuse(tiny, message)
    given = ModelConfig.from_path(tiny)
    assert load_weights(tiny, TINY).config == TINY
    with pytest.raises(CheckpointError, match=message):
        load_weights(tiny, given)


def test_packed_widths_are_reported_in_elements(tmp_path: Path) -> None:
    out = write_synthetic(tmp_path / "out", TINY, dtype="release")
    change_config(out, moe_intermediate_size=32)
    refuse(out, r"says moe_intermediate_size = 32, but .* say 64")


@pytest.mark.parametrize("keep", [0, 7, 500, -1])
def test_truncated_file_is_named(tiny: Path, keep: int) -> None:
    data = (tiny / FILE).read_bytes()
    (tiny / FILE).write_bytes(data[:keep])
    refuse(tiny, r"model\.safetensors is truncated")


def test_malformed_files_are_named(tiny: Path) -> None:
    file = tiny / FILE
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")

    def with_header(header: Any) -> bytes:
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text

    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    for content, message in (
        (data + b"\0", "malformed: its header describes"),
        (b"\xff" * 64, "not a safetensors file"),
        (data[:8] + b"[" * length + data[8 + length :], "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (with_header([1]), "no JSON object"),
        (with_header({"x": {"dtype": "F32"}}), "bad header entry for x"),
        (with_header({"x": one | {"shape": [-1]}}) + b"0000", "bad header entry for x"),
        (with_header({"x": one | {"dtype": "F3"}}) + b"0000", "stores x as F3"),
        (with_header({"x": one | {"shape": [2]}}) + b"0000", r"x is F32 \[2\] but has 4 bytes"),
        (with_header({"x": one, "y": one}) + b"0000", "y does not follow on the last"),
    ):
        file.write_bytes(content)
        refuse(tiny, rf"model\.safetensors.*{message}")


def test_folders_that_are_no_checkpoint(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist; a checkpoint folder"):
        load_weights(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is a file; a checkpoint folder"):
        load_weights(tiny / FILE)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist.*no safetensors files"):
        load_weights(empty)
    (tiny / "config.json").write_text("{,}")
    refuse(tiny, r"config\.json is not valid JSON")


def test_shards(tmp_path: Path) -> None:
    out = write_synthetic(tmp_path / "out", TINY, shard_bytes=600_000)
    index_file = out / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    whole = load_weights(write_synthetic(tmp_path / "whole", TINY))
    assert same(load_weights(out), whole)

    # A file that the index does not name is not read.
    (out / "consolidated.safetensors").write_bytes(b"")
    assert same(load_weights(out), whole)
    assert [file.name for file in Checkpoint.open(out).unindexed_files] == [
        "consolidated.safetensors"
    ]

    shard = sorted(set(index["weight_map"].values()))[1]
    data = (out / shard).read_bytes()
    (out / shard).write_bytes(data[:-5])
    refuse(out, rf"{shard} is truncated")
    (out / shard).unlink()
    refuse(out, rf"{shard} does not exist, but model\.safetensors\.index\.json places \d+ tensors")
    (out / shard).write_bytes(data)

    for change, message in (
        ({"embed.weight": shard}, r"places 1 tensors in files that lack them: embed\.weight"),
        ({"ghost": shard}, r"places 1 tensors in files that lack them: ghost"),
        ({"embed.weight": None}, r"1 tensors are in the files but not in .*: embed\.weight"),
        ({"embed.weight": "../x.safetensors"}, r"names the file '\.\./x\.safetensors'"),
        ({"embed.weight": 3}, r"has no weight_map"),
    ):
        table = index["weight_map"] | change
        table = {name: file for name, file in table.items() if file is not None}
        index_file.write_text(json.dumps({"weight_map": table}))
        refuse(out, message)
    index_file.unlink()
    refuse(out, r"holds \d+ safetensors files but no readable model\.safetensors\.index\.json")


def test_the_same_parameter_twice(tiny: Path) -> None:
    rewrite(
        tiny,
        lambda tensors: tensors.update({"model.embed_tokens.weight": tensors["embed.weight"] + 1}),
    )
    refuse(tiny, r"are the same parameter")


def test_every_problem_is_in_the_plan(tiny: Path) -> None:
    rewrite(tiny, lambda tensors: drop(tensors, "norm.weight"))
    plan = plan_load(Checkpoint.open(tiny), replace(TINY, vocab_size=400), want_drafter=True)
    assert len(plan.problems) == 3
    assert re.search("vocab_size = 400", plan.problems[0])
    assert re.search("missing.*norm", plan.problems[1])
    assert re.search("wrong shape", plan.problems[2])


def test_read_refuses_unknown_names_and_types(tiny: Path) -> None:
    rewrite(tiny, lambda tensors: tensors.update({"odd": torch.zeros(2).half()}))
    checkpoint = Checkpoint.open(tiny)
    with pytest.raises(CheckpointError, match="holds no tensor layers"):
        checkpoint.read("layers.99.attn_norm.weight")
    with pytest.raises(CheckpointError, match="odd is stored as F16"):
        checkpoint.read("odd")
