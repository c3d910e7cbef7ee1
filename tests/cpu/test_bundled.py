"""The model that ships: small enough, readable elsewhere, worth drafting for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import make_rig

from paceline import LLM, SamplingParams, bundled_model_path
from paceline.models.deepseek_v4.checkpoint import Weights, load_weights

ROOT = Path(__file__).resolve().parents[2]
CODE = ("code_completion", "humaneval")


@pytest.fixture(scope="module")
def weights() -> Weights:
    return load_weights(bundled_model_path())


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for line in (ROOT / "benchmarks" / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        grouped.setdefault(entry["class"], []).append(entry["prompt"])
    return grouped


def test_it_fits_in_sixty_megabytes() -> None:
    assert sum(f.stat().st_size for f in bundled_model_path().iterdir()) < 60e6


def test_it_is_stored_as_the_release_stores(weights: Weights) -> None:
    import safetensors

    kinds: dict[str, str] = {}
    for file in bundled_model_path().glob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as tensors:  # type: ignore[no-untyped-call]
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                kinds[name] = tensors.get_slice(name).get_dtype()
    assert kinds["layers.3.ffn.experts.5.w1.weight"] == "I8"
    assert kinds["layers.3.ffn.experts.5.w1.scale"] == "F8_E8M0"
    assert kinds["mtp.0.e_proj.weight"] == kinds["layers.0.attn.wkv.weight"] == "BF16"
    assert set(weights.config.compress_ratios) == {0, 4, 128}
    assert 0 < weights.config.num_hash_layers < weights.config.num_hidden_layers


def test_transformers_gives_the_same_logits(
    weights: Weights, prompts: dict[str, list[str]], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from common import write_unquantised

    from paceline.text import Tokenizer

    write_unquantised(bundled_model_path(), tmp_path / "copy")
    transformers.logging.set_verbosity_error()
    reference: Any = transformers.DeepseekV4ForCausalLM.from_pretrained(
        tmp_path / "copy", dtype=torch.float32
    ).eval()
    config = weights.config
    tokenizer = Tokenizer(
        bundled_model_path(), vocab_size=config.vocab_size, bos_token_id=config.bos_token_id
    )
    ids = tokenizer.encode("\n".join(prompts["code_completion"][:4]), add_bos=True)[:500]
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0]
    rig = make_rig(weights, config, backend="auto", max_seq_len=512, max_width=512)
    logits = rig.run((0, 0, ids))[0]
    # Trained logits spread several times wider than a random model's.
    assert (logits - wanted).abs().max() < 2e-5 * wanted.std() / 0.5
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))


def test_drafts_are_worth_it_on_code(prompts: dict[str, list[str]]) -> None:
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    with LLM(num_drafts=3, max_seq_len=1024) as llm:
        results = llm.generate([p for name in CODE for p in prompts[name][:12]], params)
    steps = sum(r.speculation.num_draft_steps for r in results)
    accepted = sum(r.speculation.num_accepted for r in results)
    assert 1 + accepted / steps >= 2.0
    at = [sum(r.speculation.accepted_at[j] for r in results) for j in range(3)]
    # A later position accepted more often than an earlier one means rows or keys are mislabelled.
    assert at[0] > at[1] > at[2] > 0


def test_completions_end_and_read_as_text(prompts: dict[str, list[str]]) -> None:
    with LLM(max_seq_len=1024) as llm:
        question = "<｜User｜>What does os.path.join do?<｜Assistant｜></think>"
        answer = llm.generate(question, SamplingParams(max_tokens=120), allow_special=True)[0]
    assert answer.finish_reason == "stop"
    assert 5 < len(answer.text.split()) < 100
    assert "\N{REPLACEMENT CHARACTER}" not in answer.text


def test_the_first_step_of_an_engine_may_emit_nothing() -> None:
    ids = [list(range(3, 403))]
    with LLM(num_threads=1, max_seq_len=512, max_num_batched_tokens=100) as fresh:
        first = fresh.generate(ids, SamplingParams(max_tokens=8))[0].token_ids
    with LLM(num_threads=1, max_seq_len=512, max_num_batched_tokens=512) as at_once:
        assert at_once.generate(ids, SamplingParams(max_tokens=8))[0].token_ids == first
