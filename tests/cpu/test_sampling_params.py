"""Sampling parameters: what is taken, and what is refused with what was given and is allowed."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from paceline.types import RequestError, SamplingParams

VLLM_NAMES = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "n",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "logprobs",
    "prompt_logprobs",
]
OWN_NAMES = [
    "json_schema",
    "json_object",
    "regex",
    "grammar",
    "choice",
    "max_reasoning_tokens",
    "num_drafts",
]


def test_the_names_are_vllms_and_each_is_described() -> None:
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert sorted(names) == sorted(VLLM_NAMES + OWN_NAMES)
    described = inspect.getdoc(SamplingParams) or ""
    for name in names:
        assert f"    {name}: " in described


def test_the_default_is_greedy() -> None:
    params = SamplingParams()
    assert params.temperature == 0
    assert (params.top_p, params.top_k, params.min_p, params.n) == (1, 0, 0, 1)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0},
        {"temperature": 1e9},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"top_k": -1},
        {"top_k": 10**9},
        {"min_p": 0},
        {"min_p": 1},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"logit_bias": {0: 100, 5: -100.0}},
        {"logit_bias": {}},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"n": 3, "temperature": 0.5},
        {"logprobs": 0},
        {"prompt_logprobs": 20},
        {"json_schema": {"type": "object"}},
        {"json_schema": "{}"},
        {"json_object": True},
        {"regex": "a+"},
        {"grammar": "root ::= 'a'"},
        {"num_drafts": "auto"},
        {"num_drafts": 0},
        {"num_drafts": 8},
        {"stop": "x", "include_stop_str_in_output": True},
        {"min_tokens": 16},
    ],
    ids=str,
)
def test_what_is_allowed_is_taken(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    assert SamplingParams.from_dict(given) == params
    for name, value in given.items():
        assert getattr(params, name) == ((value,) if name == "stop" else value)


def test_lists_are_copied() -> None:
    ids, words = [1, 2], ["a", "b"]
    params = SamplingParams(
        stop_token_ids=ids, allowed_token_ids=ids, bad_words=words, stop=words, choice=words
    )
    ids.append(3)
    words.append("c")
    assert params.stop_token_ids == params.allowed_token_ids == (1, 2)
    assert params.bad_words == params.stop == params.choice == ("a", "b")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; allowed is a number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan; allowed is a number of at least 0"),
        ({"temperature": float("inf")}, "temperature is inf; allowed is a number of at least 0"),
        ({"temperature": "1"}, "temperature is '1'; allowed is a number of at least 0"),
        ({"temperature": True}, "temperature is True; allowed is a number"),
        ({"temperature": None}, "temperature is None; allowed is a number"),
        ({"top_p": 0}, "top_p is 0; allowed is a number above 0 and at most 1"),
        ({"top_p": 1.0001}, "top_p is 1.0001; allowed is a number above 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p is nan; allowed is a number above 0 and at most 1"),
        ({"top_k": -2}, "top_k is -2; allowed is an integer of at least -1"),
        ({"top_k": 1.5}, "top_k is 1.5; allowed is an integer of at least -1"),
        ({"min_p": -0.1}, "min_p is -0.1; allowed is a number of at least 0 and at most 1"),
        ({"min_p": 1.1}, "min_p is 1.1; allowed is a number of at least 0 and at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; allowed is a number of at least"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1; allowed is a number of at least -2"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3; allowed is a number of at least -2"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]; allowed is a mapping of ids to numbers"),
        ({"logit_bias": {-1: 0.5}}, "logit_bias is -1; allowed is an integer of at least 0"),
        ({"logit_bias": {"1": 0.5}}, "logit_bias is '1'; allowed is an integer of at least 0"),
        ({"logit_bias": {1: 101}}, r"logit_bias\[1\] is 101; allowed is a number of at least -100"),
        ({"logit_bias": {1: None}}, r"logit_bias\[1\] is None; allowed is a number"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty; allowed is at least one id"),
        ({"allowed_token_ids": [-3]}, "allowed_token_ids is -3; allowed is an integer"),
        ({"allowed_token_ids": 3}, "allowed_token_ids is 3; allowed is a list of ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids is True; allowed is an integer"),
        ({"stop_token_ids": None}, "stop_token_ids is None; allowed is a list of ids"),
        ({"bad_words": [""]}, r"bad_words is \[''\]; allowed is a list of non-empty texts"),
        ({"bad_words": "no"}, "bad_words is 'no'; allowed is a list of non-empty texts"),
        ({"stop": ""}, r"stop is \(''.*; allowed is a list of non-empty texts"),
        ({"stop": [1]}, r"stop is \[1\]; allowed is a list of non-empty texts"),
        ({"seed": -1}, "seed is -1; allowed is an integer 0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed is 18446744073709551616; allowed is an integer 0 to"),
        ({"seed": 1.0}, "seed is 1.0; allowed is an integer 0 to"),
        ({"n": 0}, "n is 0; allowed is an integer of at least 1"),
        ({"max_tokens": 0}, "max_tokens is 0; allowed is an integer of at least 1"),
        ({"min_tokens": -1}, "min_tokens is -1; allowed is an integer of at least 0"),
        ({"ignore_eos": 1}, "ignore_eos is 1; allowed is True or False"),
        ({"json_object": "yes"}, "json_object is 'yes'; allowed is True or False"),
        ({"logprobs": 21}, "logprobs is 21; allowed is an integer 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1; allowed is an integer 0 to 20"),
        ({"json_schema": 3}, "json_schema is 3; allowed is a text or a mapping"),
        ({"regex": b"a"}, "regex is b'a'; allowed is a text"),
        ({"grammar": ["a"]}, r"grammar is \['a'\]; allowed is a text"),
        ({"choice": []}, "choice is empty; allowed is at least one text"),
        ({"choice": ["a", 1]}, "choice is .*; allowed is a list of non-empty texts"),
        ({"num_drafts": "most"}, "num_drafts is 'most'; allowed is .*0 to 8.*auto"),
        ({"num_drafts": 9}, "num_drafts is 9; allowed is"),
        ({"num_drafts": -1}, "num_drafts is -1; allowed is"),
        # Contradictions
        (
            {"max_tokens": 3, "min_tokens": 4},
            "min_tokens is 4; allowed is at most max_tokens, 3",
        ),
        ({"n": 2}, "n is 2 at temperature 0.0, where all answers are the same; allowed is 1"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice are given; allowed is one of them"),
        (
            {"json_schema": "{}", "json_object": True, "grammar": "x"},
            "json_schema and json_object and grammar are given; allowed is one of them",
        ),
        (
            {"include_stop_str_in_output": True},
            "include_stop_str_in_output is True without stop; allowed is False, or a stop text",
        ),
    ],
    ids=str,
)
def test_what_is_not_allowed_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**given)


def test_unknown_names_and_best_of_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="best_of is 4; it is not served"):
        SamplingParams.from_dict({"best_of": 4})
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=4)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="unknown sampling parameters beams, length_penalty;"):
        SamplingParams.from_dict({"length_penalty": 1.0, "beams": 2})
