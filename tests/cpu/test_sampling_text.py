"""Sampling through the public door: text, stops, several answers, log-probabilities."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams, bundled_model_path
from paceline.draft import AntiProposer, OracleProposer
from paceline.engine import Emission, Engine
from paceline.text import Tokenizer
from paceline.types import FinishReason, RequestError

KNOBS: list[dict[str, Any]] = [
    {"temperature": 1.3},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.2},
    {"logit_bias": {7: 3.0, 11: -5.0, 13: 2.5}},
    {"bad_words": ["self", "return"]},
    {"min_tokens": 18, "stop_token_ids": list(range(200, 400))},
]


# Text


@pytest.fixture(scope="module")
def bundled() -> Iterator[LLM]:
    with LLM(num_drafts=3, max_seq_len=512) as llm:
        yield llm


PROMPT = "def main(argv):\n"


def scripted(llm: LLM, proposer: Any, **options: Any) -> LLM:
    """A door to the same target with another drafter."""
    model = llm.engine._runner._model
    engine = Engine(model, llm.config, proposer=proposer, num_drafts=8, max_seq_len=512, **options)
    return LLM.from_engine(engine, llm.tokenizer)


def test_a_stop_text_cuts_at_every_row_of_an_accepted_block(bundled: LLM) -> None:
    params = SamplingParams(max_tokens=24, logprobs=1, num_drafts=0)
    (plain,) = bundled.generate(PROMPT, params)
    whole = [*plain.prompt_token_ids, *plain.token_ids]
    tokenizer = bundled.tokenizer
    assert tokenizer is not None
    ends = [len(tokenizer.decode(plain.token_ids[: i + 1])) for i in range(24)]
    llm = scripted(bundled, OracleProposer([whole]))
    cuts = set()
    for last in range(1, 24):
        # Two characters around the end of token last - 1, so that most straddle tokens.
        begin = max(0, ends[last - 1] - 1)
        stop = plain.text[begin : ends[last - 1] + 1]
        if plain.text.find(stop) != begin or len(stop) < 2:
            continue
        (got,) = llm.generate(PROMPT, dataclasses.replace(params, stop=[stop], num_drafts=8))
        assert got.text == plain.text[:begin]
        assert got.token_ids == plain.token_ids[: last + 1]
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)
        assert got.usage.completion_tokens == len(got.token_ids) == len(got.drafted)
        assert got.logprobs is not None
        assert len(got.logprobs) == len(got.token_ids)
        assert [one.id for one in got.logprobs] == got.token_ids
        (off,) = bundled.generate(PROMPT, dataclasses.replace(params, stop=[stop]))
        assert (off.text, off.token_ids) == (got.text, got.token_ids)
        kept = SamplingParams(
            max_tokens=24, stop=[stop], num_drafts=8, include_stop_str_in_output=True
        )
        chunks = list(llm.stream(PROMPT, kept))
        assert "".join(chunk.text for chunk in chunks) == plain.text[: begin + len(stop)]
        assert [t for chunk in chunks for t in chunk.token_ids] == got.token_ids
        cuts.add((last - 1) % 9)
        assert got.speculation.num_accepted > 0 or last < 2
    assert len(cuts) >= 7
    llm.engine.check_idle()


def test_stop_comes_before_length_and_after_min_tokens(bundled: LLM) -> None:
    (plain,) = bundled.generate(PROMPT, SamplingParams(max_tokens=30))
    assert bundled.tokenizer is not None
    upto = bundled.tokenizer.decode(plain.token_ids[:6])
    stop = upto[-3:]
    assert plain.text.find(stop) == len(upto) - 3
    for num_drafts in (0, 3, 8):

        def answer(num_drafts: int = num_drafts, **knobs: Any) -> Any:
            return bundled.generate(PROMPT, SamplingParams(num_drafts=num_drafts, **knobs))[0]

        assert answer(max_tokens=6, stop=stop).finish_reason == "stop"
        assert answer(max_tokens=5, stop=stop).finish_reason == "length"
        assert answer(max_tokens=5, stop=stop).text == bundled.tokenizer.decode(plain.token_ids[:5])
        assert answer(max_tokens=30, min_tokens=5, stop=stop).token_ids == plain.token_ids[:6]
        spared = answer(max_tokens=30, min_tokens=6, stop=stop)
        assert len(spared.token_ids) > 6
        assert spared.text.startswith(upto)
        third = plain.token_ids[2]
        by_id = answer(max_tokens=30, stop_token_ids=[third])
        assert by_id.stop_reason == third == by_id.token_ids[-1]
        assert len(by_id.token_ids) == plain.token_ids.index(third) + 1


def test_several_answers_share_the_prompt_and_are_told_apart(bundled: LLM) -> None:
    bundled.engine.clear_prefix_cache()
    prompts = [PROMPT * 40, [3, 4, 5]]
    params = SamplingParams(
        max_tokens=10, temperature=1.0, n=3, seed=11, logprobs=0, prompt_logprobs=1
    )
    results = bundled.generate(prompts, params)
    assert [r.sample_index for r in results] == [0, 1, 2] * 2
    assert [r.prompt_token_ids for r in results[3:]] == [[3, 4, 5]] * 3
    assert results[0].usage.cached_tokens == 0
    whole_blocks = (len(results[0].prompt_token_ids) - 1) // 128 * 128
    assert [r.usage.cached_tokens for r in results[1:3]] == [whole_blocks] * 2
    assert whole_blocks > 0
    assert len({tuple(r.token_ids) for r in results[:3]}) == 3
    single = dataclasses.replace(params, n=1)
    assert bundled.generate(prompts[0], single)[0].token_ids == results[0].token_ids
    for result in results:
        assert result.prompt_logprobs is not None
        assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    again = bundled.generate(prompts, dataclasses.replace(params, num_drafts=0))
    assert [r.token_ids for r in again] == [r.token_ids for r in results]
    unseeded = [
        r.token_ids
        for _ in range(2)
        for r in bundled.generate([3, 4, 5], dataclasses.replace(params, seed=None))
    ]
    assert len(set(map(tuple, unseeded))) == 6
    streamed: dict[int, list[int]] = {}
    for chunk in bundled.stream(prompts[0], params):
        streamed.setdefault(chunk.sample_index, []).extend(chunk.token_ids)
    assert [streamed[i] for i in range(3)] == [r.token_ids for r in results[:3]]
    bundled.engine.check_idle()


def test_leaving_early_frees_answers_that_wait_for_the_first(bundled: LLM) -> None:
    for _ in bundled.stream(PROMPT * 60, SamplingParams(temperature=1.0, n=4, max_tokens=4)):
        break
    bundled.engine.check_idle()
    first = bundled.engine.add([5, 6, 7], SamplingParams(max_tokens=3))
    second = bundled.engine.add([5, 6, 7], SamplingParams(max_tokens=3), after=first)
    assert bundled.engine.abort(second)
    assert bundled.engine.abort(first)
    bundled.engine.check_idle()
    first = bundled.engine.add([5, 6, 7], SamplingParams(max_tokens=3))
    second = bundled.engine.add([5, 6, 7], SamplingParams(max_tokens=3), after=first)
    assert bundled.engine.abort(first)
    out: dict[int, list[Emission]] = {}
    while bundled.engine.has_work:
        for emission in bundled.engine.step():
            out.setdefault(emission.request_id, []).append(emission)
    assert list(out) == [second]
    bundled.engine.check_idle()


@pytest.mark.parametrize("knob", [{}, KNOBS[0], KNOBS[4]])
def test_the_bundled_models_log_probabilities_are_a_teacher_forced_passs(
    bundled: LLM, knob: dict[str, Any]
) -> None:
    knobs = {"max_tokens": 40, "seed": 1, "logprobs": 4, "prompt_logprobs": 2, "ignore_eos": True}
    knobs |= knob
    (result,) = bundled.generate(PROMPT * 3, SamplingParams(**knobs))
    assert result.speculation.num_accepted > 0
    assert result.logprobs is not None
    assert result.prompt_logprobs is not None
    ids = [*result.prompt_token_ids, *result.token_ids]
    # Its prompt is the whole text, so that its prompt's log-probabilities are such a pass.
    (forced,) = bundled.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=4))
    told = [*result.prompt_logprobs, *result.logprobs]
    assert forced.prompt_logprobs is not None
    assert len(told) == len(forced.prompt_logprobs) == len(ids)
    for got, want, token in zip(told[1:], forced.prompt_logprobs[1:], ids[1:], strict=True):
        assert got is not None
        assert want is not None
        assert got.id == want.id == token
        assert got.logprob == pytest.approx(want.logprob, abs=1e-4)
        for (a, p), (b, q) in zip(got.top, want.top, strict=False):
            assert a == b
            assert p == pytest.approx(q, abs=1e-4)


def test_the_bundled_model_at_temperatures_with_and_without_drafts(bundled: LLM) -> None:
    rng = random.Random(9)
    prompts = [PROMPT, "import argparse\n", "The whale", "class Node:\n    def __init__"]
    each = []
    for index in range(12):
        knobs = dict(KNOBS[index % len(KNOBS)])
        knobs.setdefault("temperature", rng.choice([0.0, 0.7, 1.0]))
        each.append(SamplingParams(**{"max_tokens": 24, "seed": index, **knobs}))
    given = [prompts[i % 4] for i in range(12)]
    off = bundled.generate(given, [dataclasses.replace(p, num_drafts=0) for p in each])
    drafted = [dataclasses.replace(p, num_drafts=1 + i % 8) for i, p in enumerate(each)]
    on = bundled.generate(given, drafted)
    assert [r.token_ids for r in on] == [r.token_ids for r in off]
    assert [r.text for r in on] == [r.text for r in off]
    assert sum(r.speculation.num_accepted for r in on) > 20
    assert all(r.speculation.num_drafted > 0 for r in on if len(r.token_ids) > 2)


def test_wrong_drafts_never_leak_at_a_temperature(bundled: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=2, num_drafts=0)
    (plain,) = bundled.generate(PROMPT, params)
    whole = [*plain.prompt_token_ids, *plain.token_ids]
    llm = scripted(bundled, AntiProposer([whole], vocab_size=bundled.config.vocab_size))
    (got,) = llm.generate(PROMPT, dataclasses.replace(params, num_drafts=8))
    assert got.token_ids == plain.token_ids
    assert got.speculation.num_drafted > 0
    assert got.speculation.num_accepted == 0


def test_bad_words_do_not_come_in_either_spelling(bundled: LLM) -> None:
    (plain,) = bundled.generate("The ", SamplingParams(max_tokens=40))
    words = [word for word in plain.text.split() if word.isalpha() and len(word) > 2][:3]
    assert words
    (got,) = bundled.generate("The ", SamplingParams(max_tokens=40, bad_words=words))
    assert got.token_ids != plain.token_ids
    for word in words:
        assert f" {word} " not in f" {got.text} "


def test_markers_in_a_prompt_are_text_unless_asked_for(bundled: LLM) -> None:
    marker = "<｜User｜>"
    tokenizer = Tokenizer(
        bundled_model_path(), vocab_size=bundled.config.vocab_size, bos_token_id=None
    )
    one = SamplingParams(max_tokens=1)
    (plain,) = bundled.generate(marker, one)
    (special,) = bundled.generate(marker, one, allow_special=True)
    marker_id = tokenizer.marker_id(marker)
    assert marker_id not in plain.prompt_token_ids
    assert special.prompt_token_ids[1:] == [marker_id]
    assert tokenizer.decode(plain.prompt_token_ids) == marker


def test_results_are_documents(bundled: LLM) -> None:
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=0, stop=["zzz"])
    (result,) = bundled.generate(PROMPT, params)
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert [one["id"] for one in document["logprobs"]] == result.token_ids
    assert [len(one["top"]) for one in document["logprobs"]] == [2, 2, 2]
    assert document["prompt_logprobs"][0] is None
    assert document["sample_index"] == 0
    assert document["stop_reason"] is None


# Reasoning, grammars


@pytest.fixture(scope="module")
def tiny(tiny_path: Path) -> Iterator[LLM]:
    with LLM(tiny_path, num_drafts=3, max_seq_len=256, backend="torch") as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("budget", [0, 1, 2, 5, 12])
def test_a_reasoning_budget_is_never_exceeded(tiny: LLM, budget: int, temperature: float) -> None:
    assert tiny.tokenizer is not None
    end = tiny.tokenizer.marker_id("</think>")
    assert end is not None
    params = SamplingParams(
        max_tokens=24,
        temperature=temperature,
        seed=4,
        ignore_eos=True,
        max_reasoning_tokens=budget,
        # Unforced, the end would not come; and reasoning begins anew now and then.
        logit_bias={end: -100, tiny.tokenizer.marker_id("<think>") or 0: 4},
    )
    prompt = "<｜User｜>a<｜Assistant｜><think>"
    texts = []
    for num_drafts in range(9):
        one = dataclasses.replace(params, num_drafts=num_drafts)
        (result,) = tiny.generate(prompt, one, allow_special=True)
        assert result.token_ids.index(end) == budget
        assert len(result.token_ids) == 24
        texts.append(result.token_ids)
        if budget == 1 and num_drafts:
            # The step behind the prompt's begins where the marker is due, which is drafted then.
            assert result.speculation.num_accepted > 0
    assert all(text == texts[0] for text in texts)
    (free,) = tiny.generate("<｜User｜>a<｜Assistant｜></think>", params, allow_special=True)
    assert free.token_ids[:1] != [end]


def test_a_budget_needs_markers(bundled: LLM) -> None:
    engine_only = LLM.from_engine(bundled.engine)
    with pytest.raises(RequestError, match="the tokenizer has no markers for reasoning"):
        engine_only.generate([5], SamplingParams(max_reasoning_tokens=0))
    with pytest.raises(RequestError, match="max_reasoning_tokens is 0, but there is no tokenizer"):
        bundled.engine.add([5], SamplingParams(max_reasoning_tokens=0))
    with pytest.raises(RequestError, match="max_reasoning_tokens is -1; allowed is an integer of"):
        SamplingParams(max_reasoning_tokens=-1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "shape",
    [
        {"regex": "[a-f]{5}-[0-9]{3}"},
        {"choice": ["yes, of course", "no"]},
        {"json_object": True, "max_tokens": 30},
    ],
)
def test_grammars_are_drafted_and_followed(
    bundled: LLM, shape: dict[str, Any], temperature: float
) -> None:
    params = SamplingParams(**{"seed": 6, "temperature": temperature, "max_tokens": 40, **shape})
    results = [
        bundled.generate("An answer: ", dataclasses.replace(params, num_drafts=k, logprobs=0))[0]
        for k in (0, 1, 3, 8)
    ]
    assert len({tuple(r.token_ids) for r in results}) == 1
    first = results[0]
    if "json_object" not in shape:
        assert first.finish_reason is FinishReason.STOP
        assert first.stop_reason is None or first.stop_reason in bundled.config.eos_token_ids
    if "choice" in shape:
        assert first.text in shape["choice"]
    assert all(r.speculation.num_drafted > 0 for r in results[1:])
    if temperature == 0 or "json_object" not in shape:
        assert sum(r.speculation.num_accepted for r in results) > 0
    assert all(r.logprobs is not None and len(r.logprobs) == len(r.token_ids) for r in results)
    assert bundled.engine.num_proposer_failures == 0
    bundled.engine.check_idle()


def test_a_grammar_that_is_wrong_is_refused_and_runs_nothing(bundled: LLM) -> None:
    before = bundled.engine.num_forwards
    with pytest.raises(RequestError):
        bundled.generate(["a", "b"], [SamplingParams(), SamplingParams(regex="(")])
    assert bundled.engine.num_forwards == before
    bundled.engine.check_idle()
