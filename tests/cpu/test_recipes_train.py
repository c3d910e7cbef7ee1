"""The training model against transformers' DeepSeek-V4, its export and its resumption."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import evaluate
import export
import train
from train_model import Model, Shape, fp4_round

TINY = Shape(
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=6,
    num_attention_heads=8,
    head_dim=64,
    qk_rope_head_dim=16,
    q_lora_rank=48,
    o_groups=2,
    o_lora_rank=32,
    sliding_window=128,
    compress_ratios=(0, 0, 4, 128, 4, 128, 0),
    index_n_heads=16,
    index_head_dim=32,
    index_topk=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    num_hash_layers=2,
    max_position_embeddings=1024,
)


def lively(shape: Shape, seed: int = 0) -> Model:
    """A model in which no parameter has a value that would hide a mistake."""
    model = Model(shape)
    model.initialise(seed)
    rng = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            leaf = name.rsplit(".", 1)[-1]
            noise = (
                torch.randn(p.shape, generator=rng)
                if p.is_floating_point()
                else torch.zeros(p.shape)
            )
            if leaf == "ape":
                p.copy_(0.5 * noise)
            elif leaf == "attn_sink":
                p.copy_(noise)
            elif leaf == "bias":
                p.copy_(0.1 * noise)
            elif leaf.endswith("_base"):
                p.add_(0.5 * noise)
            elif leaf.endswith("_scale") or "norm" in name:
                p.copy_(1 + 0.1 * noise)
            elif name == "head.weight":
                p.copy_(0.05 * noise)
    return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    """(training model, transformers model with the same weights, trunk streams' hook)."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV4ForCausalLM"):
        pytest.skip("this transformers has no DeepSeek-V4")
    torch.set_num_threads(1)
    model = lively(TINY)
    folder = tmp_path_factory.mktemp("plain")
    export.write_checkpoint(model, folder, plain=torch.float32, fp4=False)
    peer, info = transformers.DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    return model, peer.eval()


@pytest.mark.parametrize("length", [300, 420])
def test_trunk_equals_transformers(pair, length: int) -> None:
    model, peer = pair
    ids = torch.randint(0, 512, (2, length), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        streams, _, index_loss = model.trunk(ids)
        ours = model.logits(streams)
        theirs = peer(ids).logits
    assert theirs.std() > 0.2
    assert (ours - theirs).abs().max() < 2e-5
    assert torch.isfinite(index_loss)


def test_mtp_equals_transformers_parts(pair) -> None:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as parts

    model, peer = pair
    length = 300
    ids = torch.randint(0, 512, (1, length + 1), generator=torch.Generator().manual_seed(4))
    block = model.mtp[0]
    config = copy.deepcopy(peer.config)
    config.num_hidden_layers = 1
    config.layer_types = ["sliding_attention"]
    config.mlp_layer_types = ["moe"]
    config._attn_implementation = "eager"
    layer = parts.DeepseekV4DecoderLayer(config, 0).eval()
    names = {
        "input_layernorm.weight": block.attn_norm.weight,
        "post_attention_layernorm.weight": block.ffn_norm.weight,
        "self_attn.q_a_proj.weight": block.attn.wq_a.weight,
        "self_attn.q_a_norm.weight": block.attn.q_norm.weight,
        "self_attn.q_b_proj.weight": block.attn.wq_b.weight,
        "self_attn.kv_proj.weight": block.attn.wkv.weight,
        "self_attn.kv_norm.weight": block.attn.kv_norm.weight,
        "self_attn.o_a_proj.weight": block.attn.wo_a.weight,
        "self_attn.o_b_proj.weight": block.attn.wo_b.weight,
        "self_attn.sinks": block.attn.attn_sink,
        "mlp.gate.weight": block.ffn.gate.weight,
        "mlp.gate.e_score_correction_bias": block.ffn.gate.bias,
        "mlp.experts.gate_up_proj": block.ffn.experts_w13,
        "mlp.experts.down_proj": block.ffn.experts_w2,
        "mlp.shared_experts.gate_proj.weight": block.ffn.shared_experts.w1.weight,
        "mlp.shared_experts.up_proj.weight": block.ffn.shared_experts.w3.weight,
        "mlp.shared_experts.down_proj.weight": block.ffn.shared_experts.w2.weight,
    }
    for ours, theirs in (("attn", "attn_hc"), ("ffn", "ffn_hc")):
        for leaf in ("fn", "base", "scale"):
            names[f"{theirs}.{leaf}"] = getattr(block, f"hc_{ours}_{leaf}")
    layer.load_state_dict({k: v.detach() for k, v in names.items()}, strict=True)
    head = parts.DeepseekV4HyperHead(config)
    head.load_state_dict(
        {f"hc_{k}": getattr(block, f"hc_head_{k}").detach() for k in ("fn", "base", "scale")}
    )

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    with torch.no_grad():
        streams, _, _ = model.trunk(ids[:, :length])
        ours = model.logits(model.drafts(streams, ids[:, 1:], 1)[0][0], mtp=True)
        e = norm(model.embed(ids[:, 1:]), block.enorm.weight) @ block.e_proj.weight.T
        x = e.unsqueeze(2) + norm(streams, block.hnorm.weight) @ block.h_proj.weight.T
        positions = torch.arange(length)[None]
        rotary = peer.model.rotary_emb
        tables = {k: rotary(x, positions, layer_type=k) for k in ("main", "compress")}
        delta = torch.arange(length)[:, None] - torch.arange(length)[None]
        mask = torch.where((delta >= 0) & (delta < 128), 0.0, float("-inf"))[None, None]
        out = layer(
            x, position_embeddings=tables, position_ids=positions, attention_mask=mask, cache=None
        )
        theirs = norm(head(out), block.norm.weight) @ model.head.weight.T
    assert theirs.std() > 0.2
    assert (ours - theirs).abs().max() < 2e-5


def test_recursion_equals_a_literal_loop() -> None:
    """Depth j of a row equals drafting j times from that row's past, one round per row."""
    model = lively(TINY, seed=5)
    length, rounds = 150, (3, 60, 140)
    ids = torch.randint(0, 512, (1, length + 1), generator=torch.Generator().manual_seed(6))
    block = model.mtp[0]
    with torch.no_grad():
        streams, _, _ = model.trunk(ids[:, :length])
        outs, _ = model.drafts(streams, ids[:, 1:], 3)
        cos, sin = model.table(False, length)
        embedded = model.embed(ids[:, 1:])
        for n in rounds:
            # Rows 0..n-1 are true; rows n and n + 1 are drafted one after the other.
            x = block.combine(embedded[:, :n], streams[:, :n])
            for step in range(3):
                rows = x.shape[1]
                weights = model.expert_weights(block)
                h, *_ = block(x, ids[:, :rows], cos[:rows], sin[:rows], *weights)
                last = h[:, -1]
                assert (last - outs[step][:, n - 1 + step]).abs().max() < 2e-5
                if step < 2:
                    more = block.combine(embedded[:, rows : rows + 1], last[:, None])
                    x = torch.cat((x, more), 1)


def test_fp4_export_round_trip_is_exact(tmp_path: Path) -> None:
    model = lively(TINY, seed=2)
    with torch.no_grad():
        model.layers[0].ffn.experts_w2[0, 0] = 0.0
    total = export.write_checkpoint(model, tmp_path, shard_bytes=2**19)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert all(f.stat().st_size < 2**19 + 2**17 for f in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
    back = export.read_checkpoint(tmp_path)
    for (name, a), (_, b) in zip(
        model.state_dict().items(), back.state_dict().items(), strict=True
    ):
        if ".experts_w" in name:
            want = fp4_round(a)
            assert (a - want).square().mean() < 0.02 * a.square().mean()
            # Rounding again changes nothing.
            assert torch.equal(fp4_round(want), want)
        elif a.is_floating_point() and not export._keeps_fp32(name):
            want = a.to(torch.bfloat16).float()
        else:
            want = a
        assert torch.equal(b, want), name
    packed = torch.tensor([[0x2A] + [0] * 15], dtype=torch.int8)
    scale = torch.tensor([[127]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert export.unpack_fp4(packed, scale)[0, :2].tolist() == [-1.0, 1.0]


def test_hash_table_is_distinct_and_balanced() -> None:
    model = Model(TINY)
    frequency = 1.0 / torch.arange(1, 513)
    model.initialise(0, frequency)
    table = model.layers[0].ffn.gate.tid2eid
    assert all(len(set(row)) == 2 for row in table.tolist())
    load = torch.zeros(8).index_add_(0, table.flatten(), frequency.repeat_interleave(2))
    assert load.max() / load.min() < 1.6


def test_training_learns_and_resumes_exactly(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    shape = Shape(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
        sliding_window=16,
        compress_ratios=(0, 4, 16, 4, 0),
        index_n_heads=2,
        index_head_dim=16,
        index_topk=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        num_hash_layers=1,
    )
    config = tmp_path / "config.json"
    config.write_text(json.dumps(shape.to_config()))
    common = ["--config", str(config), "--synthetic", "20000", "--device", "cpu"]
    common += ["--batch", "4", "--length", "32", "--steps", "12", "--warmup", "2"]
    # Counted from when the program was read, which may be long ago here.
    common += ["--stop-after", "1e6"]
    whole = train.main([*common, "--work", str(tmp_path / "a")])
    train.main([*common, "--work", str(tmp_path / "b"), "--leg-steps", "5"])
    parts = train.main([*common, "--work", str(tmp_path / "b")])
    assert whole["step"] == parts["step"] == 12
    assert whole["losses"][-1] < whole["losses"][0] - 0.2
    a = torch.load(tmp_path / "a" / "state.pt", weights_only=False)["model"]
    b = torch.load(tmp_path / "b" / "state.pt", weights_only=False)["model"]
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_evaluation_reads_classes_and_counts_drafts(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = lively(TINY, seed=7)
    export.write_checkpoint(model, tmp_path)
    tokens = train.synthetic_tokens(900, 512, 3).numpy().astype("<u2")
    tokens[400], tokens[401] = 1, 0
    tokens[0], tokens[-1] = 0, 1
    (tmp_path / "heldout.bin").write_bytes(tokens.tobytes())
    manifest = tmp_path / "manifest.json"
    kinds = {"code": 401, "manual": 499, "dictionary": 0, "chat": 0}
    manifest.write_text(json.dumps({"heldout_tokens": {"count": 900, "by_kind": kinds}}))
    result = evaluate.evaluate_folder(
        tmp_path, tmp_path, device="cpu", master=model, manifest=manifest, length=128, batch=2
    )
    assert set(result["classes"]) == {"code", "manual"}
    code = result["classes"]["code"]
    assert code["tokens"] == 3 * 128
    assert 0 < code["loss"] < 12
    assert [row["depth"] for row in code["drafts"]] == [1, 2, 3]
    assert abs(result["summary"]["fp4_cost_nats"]) < 0.5
