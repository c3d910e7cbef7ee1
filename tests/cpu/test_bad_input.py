"""Whatever is wrong is said in a sentence, before time is spent, and costs nobody else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import write_tiny

from paceline import LLM, CheckpointError, ConfigError, RequestError, SamplingParams
from paceline.models.deepseek_v4.synth import byte_tokenizer_json


@pytest.fixture
def copied(tiny_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_path, tmp_path / "copy"))


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def no_weights(path: Path) -> None:
    for file in path.glob("*.safetensors"):
        file.unlink()


def truncate_weights(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])


def broken_header(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:8] + b"x" + data[9:])


def large_tokenizer(path: Path) -> None:
    text = byte_tokenizer_json(264)
    vocabulary = json.loads(text)
    vocabulary["model"]["vocab"]["zzz"] = 513
    (path / "tokenizer.json").write_text(json.dumps(vocabulary))


@pytest.mark.parametrize(
    ("harm", "kind", "message"),
    [
        (lambda p: (p / "config.json").unlink(), CheckpointError, r"config\.json does not exist"),
        (lambda p: (p / "config.json").write_text("{"), CheckpointError, "not valid JSON"),
        (lambda p: (p / "config.json").write_text("[]"), CheckpointError, "an object is needed"),
        (no_weights, CheckpointError, "holds no safetensors files"),
        (truncate_weights, CheckpointError, r"model\.safetensors"),
        (broken_header, CheckpointError, r"model\.safetensors"),
        (change_config(hidden_size=256), CheckpointError, "256"),
        (change_config(num_hidden_layers=4), (CheckpointError, ConfigError), "layer"),
        (change_config(n_routed_experts=64), CheckpointError, "experts"),
        (change_config(model_type="llama"), ConfigError, "model_type is 'llama'"),
        (change_config(vocab_size=513), CheckpointError, "513"),
        (large_tokenizer, CheckpointError, r"vocabulary of 514; the model's vocab_size is 512"),
        (lambda p: (p / "tokenizer.json").write_text("no"), CheckpointError, "not a tokenizer"),
    ],
)
def test_checkpoints_that_cannot_be_served(
    copied: Path, harm: Callable[[Path], None], kind: type[Exception], message: str
) -> None:
    harm(copied)
    with pytest.raises(kind, match=message):
        LLM(copied, max_seq_len=64, backend="torch")


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; a checkpoint folder is needed"):
        LLM(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(CheckpointError, match="is a file; a checkpoint folder is needed"):
        LLM(file)


def test_drafts_without_a_head(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, drafter=None)
    with pytest.raises(CheckpointError, match="MTP"):
        LLM(path, num_drafts=1, max_seq_len=64, backend="torch")
    with LLM(path, max_seq_len=64, backend="torch") as llm:
        assert llm.num_drafts == 0
        with pytest.raises(RequestError, match="num_drafts is 2, but this engine has no proposer"):
            llm.generate([1], SamplingParams(num_drafts=2))
        assert llm.generate([1, 2], SamplingParams(max_tokens=2))[0].usage.total_tokens <= 4


def test_a_drafter_of_another_kind(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, drafter="dspark")
    with pytest.raises(CheckpointError, match="DSpark"):
        LLM(path, num_drafts=2, max_seq_len=64, backend="torch")
    with LLM(path, max_seq_len=64, backend="torch") as llm:
        assert llm.num_drafts == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_drafts": 9}, "num_drafts is 9; allowed is an integer 0 to 8"),
        ({"num_drafts": -1}, "num_drafts is -1"),
        ({"num_drafts": True}, "num_drafts is True"),
        ({"num_drafts": 2.0}, r"num_drafts is 2\.0"),
        ({"max_seq_len": 1}, "max_seq_len is 1; allowed is an integer 2 to"),
        ({"max_seq_len": 10**9}, "max_seq_len is 1000000000"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens is 7; allowed is an integer of"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "meta"}, "device is 'meta'"),
        ({"device": "cuda:77"}, "device is 'cuda:77'; this PyTorch sees"),
        ({"dtype": "int8"}, "dtype is 'int8'; allowed are 'auto'"),
        ({"backend": "magic"}, "backend is 'magic'; allowed are auto, torch, fused"),
        ({"mtp_vocab_size": 513}, "mtp_vocab_size is 513; allowed is an integer 0 to 512"),
    ],
)
def test_settings_out_of_range(tiny_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tiny_path, **options)


def test_longest_prompt_and_one_over(tiny_path: Path) -> None:
    with LLM(tiny_path, max_seq_len=140, backend="torch") as llm:
        (result,) = llm.generate([7] * 139)
        assert (result.usage.completion_tokens, str(result.finish_reason)) == (1, "length")
        with pytest.raises(RequestError, match="has 140 tokens; allowed are 1 to 139"):
            llm.generate([7] * 140)
        llm.engine.check_idle()


def test_ids_do_without_a_tokenizer_and_text_does_not(copied: Path) -> None:
    (copied / "tokenizer.json").unlink()
    with LLM(copied, max_seq_len=64, backend="torch") as llm:
        (result,) = llm.generate([5, 6], SamplingParams(max_tokens=3))
        assert result.token_ids
        assert result.text == ""
        with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
            llm.generate("text")


def test_no_bundled_model_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import paceline

    monkeypatch.setattr(paceline.resources, "files", lambda package: tmp_path)
    with pytest.raises(CheckpointError, match="carries no model"):
        paceline.bundled_model_path()
