"""Every sampling parameter is an option of `paceline generate`, and reaches the engine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline import LLM, SamplingParams, bundled_model_path
from paceline.cli import app
from paceline.types import MAX_LOGPROBS


def generate(*args: str) -> Any:
    return CliRunner().invoke(app, ["generate", str(bundled_model_path()), *args])


GIVEN: dict[str, tuple[list[str], Any]] = {
    "max_tokens": (["-n", "6"], 6),
    "temperature": (["--temperature", "0.7"], 0.7),
    "top_p": (["--top-p", "0.9"], 0.9),
    "top_k": (["--top-k", "30"], 30),
    "min_p": (["--min-p", "0.01"], 0.01),
    "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
    "presence_penalty": (["--presence-penalty", "0.2"], 0.2),
    "frequency_penalty": (["--frequency-penalty", "-0.3"], -0.3),
    "logit_bias": (["--logit-bias", "5=2", "--logit-bias", "9=-1.5"], {5: 2.0, 9: -1.5}),
    "allowed_token_ids": (
        ["--allowed-token-ids", ",".join(map(str, range(2000)))],
        tuple(range(2000)),
    ),
    "bad_words": (["--bad-words", "foo", "--bad-words", "a b"], ("foo", "a b")),
    "seed": (["--seed", "7"], 7),
    "n": (["--n", "2"], 2),
    "min_tokens": (["--min-tokens", "2"], 2),
    "stop": (["--stop", "zz", "--stop", "\n\n"], ("zz", "\n\n")),
    "stop_token_ids": (["--stop-token-ids", "11,12"], (11, 12)),
    "ignore_eos": (["--ignore-eos"], True),
    "include_stop_str_in_output": (["--include-stop-str-in-output"], True),
    "logprobs": (["--logprobs", "2"], 2),
    "prompt_logprobs": (["--prompt-logprobs", "1"], 1),
}

ALONE: dict[str, tuple[list[str], Any]] = {
    "json_schema": (["--json-schema", '{"type": "boolean"}'], '{"type": "boolean"}'),
    "json_object": (["--json-object"], True),
    "regex": (["--regex", "[ab]+"], "[ab]+"),
    "grammar": (["--grammar", 'start: "a" | "b"'], 'start: "a" | "b"'),
    "choice": (["--choice", "yes", "--choice", "no"], ("yes", "no")),
    "max_reasoning_tokens": (["--max-reasoning-tokens", "3"], 3),
    "num_drafts": (["-k", "2"], None),
}


def test_no_parameter_lacks_an_option() -> None:
    assert {f.name for f in dataclasses.fields(SamplingParams)} == {*GIVEN, *ALONE}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SamplingParams, bool]]:
    """Parameters of every stream, and whether markers counted."""
    seen: list[tuple[SamplingParams, bool]] = []
    stream = LLM.stream

    def noted(self: LLM, prompts: Any, params: Any, **named: Any) -> Any:
        seen.append((params, named["allow_special"]))
        return stream(self, prompts, params, **named)

    monkeypatch.setattr(LLM, "stream", noted)
    return seen


def test_all_together_arrive(seen: list[tuple[SamplingParams, bool]]) -> None:
    args = [arg for given, _ in GIVEN.values() for arg in given]
    result = generate("-p", "def f", "--json", "--special", *args)
    assert result.exit_code == 0, result.stderr
    ((params, special),) = seen
    assert special
    assert params == SamplingParams(**{name: value for name, (_, value) in GIVEN.items()})
    documents = json.loads(result.stdout)
    assert [document["sample_index"] for document in documents] == [0, 1]
    for document in documents:
        ids = document["token_ids"]
        assert [one["id"] for one in document["logprobs"]] == ids
        assert all(len(one["top"]) == 2 for one in document["logprobs"])
        assert len(document["prompt_logprobs"]) == document["usage"]["prompt_tokens"]


@pytest.mark.parametrize("name", [name for name in ALONE if name != "num_drafts"])
def test_each_arrives(name: str, seen: list[tuple[SamplingParams, bool]]) -> None:
    given, value = ALONE[name]
    result = generate("-p", "An answer: ", "-n", "4", *given)
    assert result.exit_code == 0, result.stderr
    ((params, special),) = seen
    assert not special
    assert params == SamplingParams(**{"max_tokens": 4, name: value})


def test_log_probabilities_may_be_of_the_law() -> None:
    args = ["-p", "x", "-n", "4", "--json", "--logprobs", "2", "--regex", "[ab]{9}"]
    raw, processed = (
        json.loads(generate(*args, "--logprobs-mode", mode).stdout) for mode in ("raw", "processed")
    )
    assert raw["token_ids"] == processed["token_ids"]
    # Greedily picked, and so with certainty.
    assert [one["logprob"] for one in processed["logprobs"]] == [0.0] * 4
    assert all(one["logprob"] < -0.1 for one in raw["logprobs"])


def test_a_parameter_that_is_none_is_refused_by_name() -> None:
    for name in ("--best-of", "--beams"):
        result = generate("-p", "x", name, "2")
        assert result.exit_code == 2
        assert name in result.stderr
        assert result.stdout == ""


def test_several_answers_are_shown_one_after_another(tmp_path: Path) -> None:
    args = ["-p", "def f", "-n", "5", "--temperature", "1", "--seed", "3", "--n", "3"]
    shown = generate(*args)
    documents = json.loads(generate(*args, "--json").stdout)
    texts = [document["text"] for document in documents]
    assert len(set(texts)) == 3
    assert shown.stdout == "---\n".join(t if t.endswith("\n") else t + "\n" for t in texts)
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "boolean"}')
    assert generate("-p", "x", "--json-schema", f"@{schema}").stdout.strip() in ("true", "false")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0; allowed is a number of at least 0"),
        (["--top-p", "0"], "top_p is 0.0; allowed is a number above 0 and at most 1"),
        (["--logit-bias", "x"], "--logit-bias is 'x'; allowed is ID=BIAS"),
        (["--logit-bias", "99999=1"], "logit_bias holds 99999; allowed are ids 0 to 8191"),
        (["--stop-token-ids", "a,b"], "--stop-token-ids is 'a,b'; allowed are ids with commas"),
        (["--n", "2"], "n is 2 at temperature 0.0, where all answers are the same"),
        (["--min-tokens", "9", "-n", "3"], "min_tokens is 9; allowed is at most max_tokens, 3"),
        (["--logprobs", "21"], f"logprobs is 21; allowed is an integer 0 to {MAX_LOGPROBS}"),
        (["--acceptance", "greedy"], "acceptance is 'greedy'; allowed are 'invariant', 'rejec"),
        (["--logprobs-mode", "x"], "logprobs_mode is 'x'; allowed are 'raw', 'processed'"),
        (["--regex", "a", "--choice", "b"], "regex and choice are given; allowed is one of them"),
        (["--json-schema", "@/nowhere/s.json"], "/nowhere/s.json cannot be read"),
        (["--include-stop-str-in-output"], "include_stop_str_in_output is True without stop"),
    ],
)
def test_bad_values_are_one_line_and_exit_code_2(args: list[str], message: str) -> None:
    result = generate("-p", "x", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert message in line
