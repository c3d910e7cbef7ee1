"""Names that users' scripts rely on."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys

import pytest

import paceline
from paceline import (
    FinishReason,
    GenerationResult,
    SamplingParams,
    SpeculationStats,
    StreamChunk,
    Usage,
)
from paceline.types import Origin, PacelineError, RequestError


def test_all_is_sorted_and_true() -> None:
    assert dir(paceline) == sorted(set(paceline.__all__))
    assert len(set(paceline.__all__)) == len(paceline.__all__)
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    expected = {"LLM", "SamplingParams", "bundled_model_path", "GenerationResult", "StreamChunk"}
    assert expected <= set(paceline.__all__)
    for name in paceline.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(paceline, name), PacelineError)


def test_every_module_names_its_public_parts_truly() -> None:
    for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
        if module.name == "paceline.__main__":
            continue
        loaded = importlib.import_module(module.name)
        for name in getattr(loaded, "__all__", ()):
            if "numba" not in module.name:
                assert hasattr(loaded, name), f"{module.name}.{name}"


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        paceline.nothing  # noqa: B018


def test_import_and_help_do_not_import_torch() -> None:
    code = "import paceline, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import paceline.cli, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_draft_names() -> None:
    from paceline.draft import DeepseekV4MtpHead, DraftProposer

    assert issubclass(DeepseekV4MtpHead, DraftProposer)
    wanted = ["module", "embed_tokens", "lm_head", "config", "mtp_vocab_size", "max_seq_len"]
    assert list(inspect.signature(DeepseekV4MtpHead.new).parameters)[: len(wanted)] == wanted


def test_results_have_the_promised_fields() -> None:
    result = GenerationResult(
        text="a",
        token_ids=[1, 2],
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=3, completion_tokens=2),
        speculation=SpeculationStats(),
        origins=[Origin("target"), Origin("accepted", 1)],
        prompt_token_ids=[1, 2, 3],
    )
    document = json.loads(json.dumps(result.to_dict()))
    assert {"text", "token_ids", "finish_reason", "usage", "speculation"} <= set(document)
    assert document["finish_reason"] == "stop"
    assert document["usage"]["total_tokens"] == 5
    assert document["drafted"] == [False, True]
    assert document["origins"] == [["target", None], ["accepted", 1]]
    fields = {f.name for f in dataclasses.fields(GenerationResult)}
    assert set(document) <= fields | {"drafted"}
    assert dataclasses.is_dataclass(StreamChunk)


def test_sampling_params_speak_vllm_and_refuse_the_rest() -> None:
    params = SamplingParams(max_tokens=5, temperature=0, seed=1, ignore_eos=True, top_k=-1)
    assert params.stop_token_ids == ()
    with pytest.raises(TypeError):
        SamplingParams(max_new_tokens=5)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match=r"unknown sampling parameters max_new_tokens; known"):
        SamplingParams.from_dict({"max_new_tokens": 5})
    assert SamplingParams(temperature=0.7, top_p=0.5).top_p == 0.5
    with pytest.raises(RequestError, match="top_p is 0; allowed is a number above 0 and at most 1"):
        SamplingParams(top_p=0)
    with pytest.raises(RequestError, match="max_tokens is 0; allowed is an integer of at least 1"):
        SamplingParams(max_tokens=0)
    with pytest.raises(RequestError, match="num_drafts is 9; allowed is an integer 0 to 8"):
        SamplingParams(num_drafts=9)


def test_version() -> None:
    assert paceline.__version__[0].isdigit()
