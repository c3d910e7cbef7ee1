"""Faults that engines with drafts have had in grammars, text and sampling, forced here.

Most kinds are ruled out by tests of the part concerned; these need the whole engine.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from sampling_kit import p_value
from sampling_toy import Asked, Picking, SpreadToy, logits_of, outcome, prompt_of, tokens_of
from toy import VOCAB, Carrying, run, toy_config, toy_engine

from paceline import LLM, SamplingParams
from paceline.draft import AntiProposer, OracleProposer
from paceline.engine import Emission, Engine
from paceline.sampling.grammar import Grammar, GrammarCursor, GrammarSpec, Words, words_of
from paceline.text.parser import parse_answer
from paceline.types import FinishReason, GenerationResult

PROMPT = "def main(argv):\n"
RULES = ("invariant", "rejection", "block")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_seq_len=512, max_num_seqs=4, num_threads=1) as model:
        yield model


def scripted(llm: LLM, proposer: Any, *, ends: tuple[int, ...] | None = None) -> LLM:
    """A door to the same target with another drafter, and perhaps other ids that end an answer."""
    config = llm.config if ends is None else dataclasses.replace(llm.config, eos_token_ids=ends)
    engine = Engine(
        llm.engine._runner._model, config, proposer=proposer, num_drafts=8, max_seq_len=256
    )
    return LLM.from_engine(engine, llm.tokenizer)


def whole(result: GenerationResult) -> list[int]:
    return [*result.prompt_token_ids, *result.token_ids]


def answer(
    llm: LLM, ids: list[int], params: SamplingParams, grammar: Grammar | None = None
) -> tuple[GenerationResult, list[list[int]]]:
    """The result, and the ids of each step."""
    ((number, one),) = llm.begin(ids, params, grammar=grammar).items()
    steps: list[list[int]] = []
    while True:
        for emission in llm.engine.step():
            assert emission.request_id == number
            steps.append(emission.token_ids)
            chunk = one.take(emission)
            if chunk.result is not None:
                llm.engine.check_idle()
                return chunk.result, steps


# Grammars, the end of reasoning, tools


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_the_end_of_reasoning_at_each_row_of_an_accepted_block(llm: LLM, num_drafts: int) -> None:
    """Anything may come before the marker, in its own block too; right behind it the grammar is."""
    assert llm.tokenizer is not None
    think, end = (llm.tokenizer.marker_id(marker) for marker in ("<think>", "</think>"))
    assert think is not None
    assert end is not None
    ids = [*llm.tokenizer.encode("A question. "), think]
    rows = set()
    for place in range(1, num_drafts + 2):
        params = SamplingParams(
            max_tokens=60,
            temperature=1.0,
            seed=place,
            num_drafts=0,
            json_schema={
                "type": "object",
                "properties": {"a": {"type": "boolean"}},
                "additionalProperties": False,
            },
            logit_bias={end: -100.0, think: -100.0},
            max_reasoning_tokens=place,
        )
        (plain,) = llm.generate([ids], params)
        assert plain.token_ids.index(end) == place
        assert plain.finish_reason is FinishReason.STOP
        answered = llm.tokenizer.decode(plain.token_ids[place + 1 :])
        assert set(json.loads(answered)) <= {"a"}
        with pytest.raises(json.JSONDecodeError):
            json.loads(llm.tokenizer.decode(plain.token_ids))
        door = scripted(llm, OracleProposer([whole(plain)]))
        grammar = llm._compiled(params)
        asked = dataclasses.replace(params, num_drafts=num_drafts)
        result, steps = answer(door, ids, asked, grammar)
        assert result.token_ids == plain.token_ids
        block = next(step for step in steps if end in step)
        rows.add(block.index(end))
        if len(block) > block.index(end) + 1 or block.index(end) < num_drafts:
            assert result.drafted[place]
    assert rows == set(range(num_drafts + 1))


def test_the_last_marker_of_the_prompt_says_whether_it_ends_within_reasoning(llm: LLM) -> None:
    assert llm.tokenizer is not None
    marker_ids = [llm.tokenizer.marker_id(marker) for marker in ("<think>", "</think>")]
    think, end = (one for one in marker_ids if one is not None)
    said = llm.tokenizer.encode("So it is. ", add_bos=False)
    for markers, reasons in (
        ([], False),
        ([think, *said, end], False),
        ([think, *said, end, *said, think], True),
        ([end, *said, think, *said], True),
    ):
        params = SamplingParams(
            max_tokens=20, choice=["yes", "no"], max_reasoning_tokens=3, logit_bias={end: -100.0}
        )
        (result,) = llm.generate([[0, *said, *markers, *said]], params)
        assert (end in result.token_ids) == reasons
        if reasons:
            assert result.token_ids.index(end) == 3
        answered = result.token_ids[4:] if reasons else result.token_ids
        assert llm.tokenizer.decode(answered) in ("yes", "no")
        assert result.finish_reason is FinishReason.STOP


TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
            "required": ["n"],
        },
    },
}


def test_the_end_of_tool_calls_at_many_rows_of_an_accepted_block(llm: LLM) -> None:
    assert llm.tokenizer is not None
    spec = GrammarSpec.tool_calls([TOOL], at_once=True)
    grammar = llm.grammar_compiler(spec).compile(spec)
    ids = llm.tokenizer.encode("Look it up. ")
    rows = set()
    for seed in range(3):
        params = SamplingParams(max_tokens=150, temperature=1.0, seed=seed, num_drafts=0)
        plain, steps = answer(llm, ids, params, grammar)
        assert all(len(step) == 1 for step in steps)
        parsed = parse_answer(plain.text, thinking=False)
        assert (parsed.errors, parsed.content) == ([], "")
        assert all(call.name == "look" and call.error is None for call in parsed.tool_calls)
        assert all(1 <= json.loads(call.arguments)["n"] <= 99 for call in parsed.tool_calls)
        for num_drafts in range(1, 9):
            for door in (llm, scripted(llm, OracleProposer([whole(plain)]))):
                asked = dataclasses.replace(params, num_drafts=num_drafts)
                result, steps = answer(door, ids, asked, grammar)
                assert result.token_ids == plain.token_ids
                assert result.finish_reason is FinishReason.STOP
                rows.add(len(steps[-1]) - 1)
    assert len(rows) >= 6


def test_every_step_of_a_grammar_gives_a_token_whatever_is_drafted(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, regex="[a-f]{3}(?: [0-9]{2}){6}", num_drafts=0)
    (plain,) = llm.generate([[5, 6, 7]], params)
    vocab = llm.config.vocab_size
    for kind in (AntiProposer([whole(plain)], vocab_size=vocab), OracleProposer([whole(plain)])):
        asked = dataclasses.replace(params, num_drafts=4)
        result, steps = answer(scripted(llm, kind), [5, 6, 7], asked, llm._compiled(params))
        assert result.token_ids == plain.token_ids
        assert all(steps)


# Text, ends, limits


def test_a_stop_text_and_an_end_id_in_one_block_in_both_orders(llm: LLM) -> None:
    assert llm.tokenizer is not None
    base = SamplingParams(max_tokens=40, num_drafts=0, ignore_eos=True)
    (plain,) = llm.generate(PROMPT, base)
    pieces = [llm.tokenizer.decode([token]) for token in plain.token_ids]
    # Places of tokens that come nowhere before, as ids and as texts.
    fresh = [
        n
        for n, (token, piece) in enumerate(zip(plain.token_ids, pieces, strict=True))
        if token not in plain.token_ids[:n]
        and piece.isascii()
        and piece.strip()
        and plain.text.find(piece) == len("".join(pieces[:n]))
    ]
    pairs = [(a, b) for a in fresh for b in fresh if min(a, b) >= 1 and max(a, b) <= 7]
    assert {(a > b) - (a < b) for a, b in pairs} == {-1, 0, 1}
    for text_at, end_at in pairs:
        door = scripted(llm, OracleProposer([whole(plain)]), ends=(plain.token_ids[end_at],))
        stop = pieces[text_at]
        for include in (False, True):
            for ignore in (False, True):
                results = [
                    door.generate(
                        PROMPT,
                        dataclasses.replace(
                            base,
                            num_drafts=num_drafts,
                            stop=[stop],
                            include_stop_str_in_output=include,
                            ignore_eos=ignore,
                            logprobs=0,
                        ),
                    )[0]
                    for num_drafts in (0, 8)
                ]
                by_id = not ignore and end_at < text_at
                last = end_at if by_id else text_at
                text = "".join(pieces[: last + (by_id or include)])
                for one in results:
                    assert one.token_ids == plain.token_ids[: last + 1]
                    assert one.text == text
                    assert one.finish_reason is FinishReason.STOP
                    assert one.stop_reason == (plain.token_ids[end_at] if by_id else stop)
                    assert one.logprobs is not None
                    assert len(one.logprobs) == one.usage.completion_tokens == last + 1


@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_as_many_tokens_as_asked_for_are_delivered_and_charged(llm: LLM, num_drafts: int) -> None:
    (plain,) = llm.generate(PROMPT, SamplingParams(max_tokens=16, num_drafts=0, ignore_eos=True))
    assert llm.tokenizer is not None
    door = scripted(llm, OracleProposer([whole(plain)]))
    for count in range(1, 2 * num_drafts + 4):
        text = llm.tokenizer.decode(plain.token_ids[:count])
        # The stop text never comes, but much of it may be held back until the end.
        params = SamplingParams(
            max_tokens=count,
            num_drafts=num_drafts,
            ignore_eos=True,
            stop=[f"{text[-6:]}\0"],
        )
        chunks = list(door.stream(PROMPT, params))
        result = chunks[-1].result
        assert result is not None
        assert result.finish_reason is FinishReason.LENGTH
        assert sum(len(chunk.token_ids) for chunk in chunks) == count
        assert result.usage.completion_tokens == len(result.token_ids) == count
        assert "".join(chunk.text for chunk in chunks) == result.text == text


# Sampling

MIXED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 1.7, "top_p": 0.8, "frequency_penalty": 0.7},
    {},
    {"temperature": 0.3, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 4, "logit_bias": {3: 2.0, 9: -4.0}},
    {"temperature": 1.0, "bad_word_ids": [(7,), (8, 9)]},
    {"repetition_penalty": 1.5},
    {"temperature": 1.3, "presence_penalty": 1.0},
]


@pytest.mark.parametrize("batch", [2, 3, 4, 8])
@pytest.mark.parametrize("acceptance", RULES)
def test_requests_of_a_batch_draw_what_they_draw_alone(acceptance: Any, batch: int) -> None:
    """Laws, noise and drafts of one are never another's, although all have the same seed."""

    def make() -> Engine:
        return toy_engine(
            model=SpreadToy(),
            proposer=Picking(0.5, batch=3),
            num_drafts=3,
            max_num_seqs=batch,
            acceptance=acceptance,
        )

    asked = [Asked(prompt_of(5 + n, n), MIXED[n], num_drafts=1 + n % 4) for n in range(batch)]
    alone = []
    for one in asked:
        engine = make()
        number = one.add(engine)
        alone.append(outcome(run(engine)[number]))
    engine = make()
    numbers = [one.add(engine) for one in asked]
    out = run(engine)
    assert [outcome(out[number]) for number in numbers] == alone
    assert 0 < engine.speculation.num_accepted < engine.speculation.num_drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("acceptance", RULES)
def test_a_bias_that_settles_it_settles_every_token(acceptance: Any, temperature: float) -> None:
    engine = toy_engine(
        model=SpreadToy(), proposer=Picking(0.5), num_drafts=3, acceptance=acceptance
    )
    knobs = {"temperature": temperature, "logit_bias": {17: 100.0}}
    number = Asked(prompt_of(6, 1), knobs).add(engine)
    assert tokens_of(run(engine)[number]) == [17] * 24
    assert engine.speculation.num_accepted == engine.speculation.num_drafted > 0


@pytest.mark.parametrize("acceptance", RULES)
def test_penalties_count_what_was_committed_and_nothing_else(acceptance: Any) -> None:
    """After every step, whatever was drafted, refused, cut off or read again."""
    engine = toy_engine(
        model=SpreadToy(),
        config=toy_config(eos_token_ids=()),
        proposer=Picking(1.0),
        num_drafts=5,
        acceptance=acceptance,
    )
    knobs = {"temperature": 1.0, "frequency_penalty": 0.8, "stop_token_ids": [11]}
    numbers = [Asked(prompt_of(7, n), knobs).add(engine, max_tokens=40) for n in range(3)]
    said: dict[int, list[int]] = {number: [] for number in numbers}
    samplers = {number: engine._requests[number].sequence.sampler for number in numbers}
    chance = random.Random(3)
    while engine.has_work:
        if chance.random() < 0.2:
            engine._scheduler.preempt_last()
        for emission in engine.step():
            said[emission.request_id] += emission.token_ids
        for number, sampler in samplers.items():
            assert sampler is not None
            assert sampler.history.counts == dict(Counter(said[number]))
    assert engine.num_preemptions > 0
    assert 0 < engine.speculation.num_accepted < engine.speculation.num_drafted
    assert all(said.values())


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_draft_that_the_target_forbids_is_never_accepted(acceptance: Any) -> None:
    """From the first draft of the first step on, and without a law of the drafter's."""

    def least(history: list[int], count: int, step: int) -> list[int]:
        return [int(logits_of(history).argmin())] * count

    engine = toy_engine(
        model=SpreadToy(), proposer=Carrying(least), num_drafts=4, acceptance=acceptance
    )
    prompts = [prompt_of(6, n) for n in range(20)]
    numbers = [
        Asked(prompt, {"temperature": 1.7, "top_k": 10, "seed": n}).add(engine)
        for n, prompt in enumerate(prompts)
    ]
    out = run(engine)
    assert engine.speculation.num_drafted > 100
    assert engine.speculation.num_accepted == 0
    for prompt, number in zip(prompts, numbers, strict=True):
        ids = list(prompt)
        for token in tokens_of(out[number]):
            assert int((logits_of(ids) > logits_of(ids)[token]).sum()) < 10
            ids.append(token)


class Even(GrammarCursor):
    """Even ids alone."""

    WORDS = words_of(range(0, VOCAB, 2), VOCAB)

    def __init__(self, num_tokens: int = 0) -> None:
        self._num_tokens = num_tokens

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def error(self) -> str | None:
        return None

    @property
    def is_finished(self) -> bool:
        return False

    def mask(self) -> Words:
        return self.WORDS

    def advance(self, token: int) -> bool:
        self._num_tokens += token % 2 == 0
        return token % 2 == 0

    def rollback(self, num_tokens: int) -> None:
        self._num_tokens -= num_tokens

    def copy(self) -> Even:
        return Even(self._num_tokens)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_drafter_that_draws_what_a_grammar_forbids_changes_no_law(acceptance: Any) -> None:
    """Left out by what it is, a draft would. One false alarm in a thousand."""
    prompt = prompt_of(5, 8)
    engine = toy_engine(
        model=SpreadToy(),
        config=toy_config(eos_token_ids=()),
        proposer=Picking(0.8),
        num_drafts=3,
        acceptance=acceptance,
        max_num_seqs=16,
        max_num_batched_tokens=256,
    )
    params = SamplingParams(temperature=1.0, top_k=3, max_tokens=3)
    numbers = [
        engine.add(prompt, dataclasses.replace(params, seed=seed), grammar=Even())
        for seed in range(2500)
    ]
    out = run(engine, limit=20000)

    def law(ids: list[int]) -> dict[int, float]:
        row = logits_of(ids).astype(np.float64)
        best = sorted(range(0, VOCAB, 2), key=lambda token: -row[token])[:3]
        mass = np.exp(row[best] - row[best[0]])
        return dict(zip(best, (mass / mass.sum()).tolist(), strict=True))

    joint = {
        (a, b): pa * pb for a, pa in law(prompt).items() for b, pb in law([*prompt, a]).items()
    }
    seen = Counter(tuple(tokens_of(out[number])[:2]) for number in numbers)
    assert seen.keys() <= joint.keys()
    counts = np.array([seen[pair] for pair in joint], np.int64)
    assert p_value(counts, np.array(list(joint.values()))) > 1e-3
    assert 0 < engine.speculation.num_accepted < engine.speculation.num_drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("acceptance", RULES)
def test_a_row_that_is_broken_or_barren_is_an_error_and_never_a_token(
    acceptance: Any, temperature: float
) -> None:
    def outcomes(model: SpreadToy) -> list[Any]:
        engine = toy_engine(model=model, proposer=Picking(0.3), num_drafts=4, acceptance=acceptance)
        knobs = {"temperature": temperature, "presence_penalty": 0.1}
        numbers = [Asked(prompt_of(8, n), knobs).add(engine) for n in (1, 2)]
        out = run(engine)
        return [outcome(out[number]) for number in numbers]

    (ids, _, _), other = outcomes(SpreadToy())
    there = {*prompt_of(8, 1), *prompt_of(8, 2), *other[0]}
    marks = [token for token in dict.fromkeys(ids[:-1]) if token not in there]
    assert marks
    for mark in marks:
        for model in (SpreadToy(poison=mark), SpreadToy(barren=mark)):
            (said, reason, error), untouched = outcomes(model)
            assert untouched == other
            if acceptance == "block" and temperature:
                # A row without a law is judged up to, which may come out another way before it.
                assert mark not in said[:-1]
            else:
                assert said == ids[: ids.index(mark) + 1]
            if mark in said[:23]:
                assert (reason, error) == (FinishReason.ERROR, "non-finite logits")


@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("acceptance", RULES)
def test_there_is_a_log_probability_for_every_id(acceptance: Any, top: int) -> None:
    for num_drafts in range(6):
        engine = toy_engine(
            model=SpreadToy(), proposer=Picking(0.4), num_drafts=3, acceptance=acceptance
        )
        asked = Asked(prompt_of(9, 2), {"temperature": 1.0}, num_drafts=num_drafts)
        number = asked.add(engine, logprobs=top)
        emissions: list[Emission] = run(engine)[number]
        listed = [one for e in emissions for one in e.logprobs or ()]
        assert [one.id for one in listed] == tokens_of(emissions)
        assert all(len(one.top) == min(top, VOCAB) for one in listed)
        assert (engine.speculation.num_drafted > 0) == (num_drafts > 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_of_the_law_count_the_grammar(llm: LLM, temperature: float) -> None:
    params = SamplingParams(
        max_tokens=40, regex="[ab]{3}-[0-9]{4}", temperature=temperature, seed=5, num_drafts=0
    )
    (plain,) = llm.generate([[5, 6, 7]], params)
    engine = Engine(
        llm.engine._runner._model,
        llm.config,
        proposer=OracleProposer([whole(plain)]),
        num_drafts=4,
        max_seq_len=256,
        logprobs_mode="processed",
    )
    door = LLM.from_engine(engine, llm.tokenizer)
    asked = dataclasses.replace(params, num_drafts=4, logprobs=20)
    grammar = llm._compiled(params)
    assert grammar is not None
    result, _ = answer(door, [5, 6, 7], asked, grammar)
    assert result.token_ids == plain.token_ids
    assert result.logprobs is not None
    assert result.speculation.num_accepted > 0
    cursor = grammar.cursor()
    for token, one in zip(result.token_ids, result.logprobs, strict=True):
        assert one.id == token
        assert all(cursor.allows(other) for other, _ in one.top)
        assert one.logprob > -math.inf
        if temperature == 0:
            assert (one.logprob, one.rank) == (0.0, 1)
        cursor.advance(token)


def test_several_answers_do_not_need_the_cache_of_prefixes(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, n=3, seed=11)
    want = [one.token_ids for one in llm.generate(PROMPT * 40, params)]
    with LLM(max_seq_len=512, max_num_seqs=4, num_threads=1, prefix_cache=False) as bare:
        assert [one.token_ids for one in bare.generate(PROMPT * 40, params)] == want
        bare.engine.check_idle()
