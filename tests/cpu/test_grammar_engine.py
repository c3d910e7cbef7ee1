"""Structured output under drafts: valid, the same for any number of them, and drafted legally."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from grammar_kit import fits, random_regex, random_schema

from paceline import LLM, SamplingParams
from paceline.draft import (
    AntiProposer,
    CyclingProposer,
    DeepseekV4MtpHead,
    OracleProposer,
    PoisonProposer,
    RandomProposer,
)
from paceline.engine import Engine
from paceline.engine.sequence import BatchRow
from paceline.sampling.grammar import GrammarCursor, walk
from paceline.types import Draft, DraftRequest, FinishReason, GenerationResult, RequestError

PROMPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "prompts.jsonl"
LENGTHS = (0, 1, 2, 3, 5, 8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_seq_len=512, max_num_seqs=8, num_threads=1) as model:
        yield model


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, int, int]]:
    """(source, drafts, legal ones among them) of every draft before it is cut."""
    seen: list[tuple[str | None, int, int]] = []
    inner = Engine._walked

    def walked(engine: Engine, row: BatchRow, draft: Draft) -> Draft:
        assert row.sequence.grammar is not None
        seen.append(
            (draft.source, draft.num_tokens, len(walk(row.sequence.grammar, draft.tokens)) - 1)
        )
        return inner(engine, row, draft)

    monkeypatch.setattr(Engine, "_walked", walked)
    return seen


def specs(count: int) -> list[dict[str, Any]]:
    """Parameters of random grammars, schemas and regexes in turn."""
    found: list[dict[str, Any]] = []
    for seed in range(count):
        chance = random.Random(seed)
        given = (
            {"regex": random_regex(chance)} if seed % 2 else {"json_schema": random_schema(chance)}
        )
        found.append({**given, "temperature": (0.0, 0.7, 1.3)[seed // 2 % 3], "seed": seed})
    return found


def follows(text: str, given: dict[str, Any]) -> bool:
    if "regex" in given:
        return re.fullmatch(given["regex"], text) is not None
    return fits(json.loads(text), given["json_schema"])


def run(
    llm: LLM, prompts: list[Any], given: list[dict[str, Any]], **more: Any
) -> list[GenerationResult]:
    params = [SamplingParams(**{"max_tokens": 200, **one, **more}) for one in given]
    return llm.generate(prompts, params)


def test_random_grammars_hold_for_any_number_of_drafts(
    llm: LLM, drafted: list[tuple[str | None, int, int]]
) -> None:
    given = specs(40)
    plain: list[list[int]] | None = None
    for num_drafts in LENGTHS:
        done = run(llm, ["An answer: "] * len(given), given, num_drafts=num_drafts)
        for one, result in zip(given, done, strict=True):
            assert result.finish_reason is FinishReason.STOP, (one, result.text)
            assert follows(result.text, one), (one, result.text)
        ids = [result.token_ids for result in done]
        plain = plain or ids
        assert ids == plain, f"{num_drafts} drafts"
    assert sum(count for _, count, _ in drafted) > 500
    assert all(count == legal for _, count, legal in drafted), "a draft its grammar forbids"


@pytest.mark.parametrize("options", [{"drafter": "ngram"}, {"drafter": "mtp+ngram"}])
def test_a_drafter_that_knows_no_grammar_is_cut_where_it_leaves_it(
    options: dict[str, Any], drafted: list[tuple[str | None, int, int]]
) -> None:
    given = [{"regex": "(?:the cat |the dog |a |[0-9]{2} ){10}", "temperature": 0.0}, *specs(8)]
    prompts = ["the cat the dog a the cat the bird the cat the"] * len(given)
    with LLM(max_seq_len=512, max_num_seqs=4, num_threads=1, **options) as model:
        plain = run(model, prompts, given, num_drafts=0)
        for num_drafts in (1, 3, 8):
            done = run(model, prompts, given, num_drafts=num_drafts)
            assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert all(follows(r.text, one) for one, r in zip(given, plain, strict=True))
    assert any(legal < count for _, count, legal in drafted)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_grammars_hold_under_rejection(
    acceptance: Any, drafted: list[tuple[str | None, int, int]]
) -> None:
    given = [{**one, "temperature": 1.0} for one in specs(20)]
    with LLM(max_seq_len=512, max_num_seqs=8, num_threads=1, acceptance=acceptance) as model:
        for num_drafts in (2, 5):
            done = run(model, ["An answer: "] * 20, given, num_drafts=num_drafts)
            for one, result in zip(given, done, strict=True):
                assert result.finish_reason is FinishReason.STOP
                assert follows(result.text, one), (one, result.text)
    assert all(count == legal for _, count, legal in drafted)
    assert any(count for _, count, _ in drafted)


@pytest.mark.parametrize("num_drafts", [3, 8])
def test_drafts_for_free_leave_the_heads_rows_as_they_are(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """A head that was passed over drafts what it would have, where it is asked again."""
    drafts: dict[int, list[int]] = {}
    inner = DeepseekV4MtpHead.propose

    def propose(head: Any, request: DraftRequest, state: Any) -> Draft:
        draft = inner(head, request, state)
        drafts[request.position] = draft.tokens
        return draft

    monkeypatch.setattr(DeepseekV4MtpHead, "propose", propose)
    params = SamplingParams(
        max_tokens=300,
        temperature=0.8,
        seed=3,
        num_drafts=num_drafts,
        regex="(?:[a-z]{3} is one of the first kind and it is not of the second, not of the third "
        "and not of the last kind [0-9]{2} ){5}",
    )
    with_free = llm.generate(["Some words: "], params)[0]
    passed, drafts = drafts, {}
    assert with_free.speculation.drafted_by["grammar"] > 5 * num_drafts
    assert with_free.speculation.accepted_by == with_free.speculation.drafted_by | {
        "DeepseekV4MtpHead": with_free.speculation.accepted_by["DeepseekV4MtpHead"]
    }
    for kind in (GrammarCursor, *GrammarCursor.__subclasses__()):
        monkeypatch.setattr(kind, "forced", lambda cursor, limit: [])
    always = llm.generate(["Some words: "], params)[0]
    assert always.token_ids == with_free.token_ids
    common = passed.keys() & drafts.keys()
    assert 5 < len(common) < len(drafts)
    assert {place: passed[place] for place in common} == {place: drafts[place] for place in common}


@pytest.mark.parametrize("bias", [2.0, 6.0, 30.0])
def test_a_grammar_begins_behind_reasoning_wherever_that_ends(llm: LLM, bias: float) -> None:
    assert llm.tokenizer is not None
    think, end = (llm.tokenizer.marker_id(marker) for marker in ("<think>", "</think>"))
    assert think is not None
    assert end is not None
    prompts = [[*llm.tokenizer.encode(f"Question {n}. "), think] for n in range(6)]
    given = [
        {
            "choice": ["yes, of course", "no, never", "maybe"],
            "temperature": 1.0,
            "seed": n,
            "logit_bias": {end: bias},
        }
        for n in range(6)
    ]
    plain = run(llm, prompts, given, num_drafts=0)
    places = []
    for result in plain:
        ids = result.token_ids
        if end not in ids:
            assert result.finish_reason is FinishReason.LENGTH
            continue
        places.append(ids.index(end))
        assert result.finish_reason is FinishReason.STOP
        text = llm.tokenizer.decode(ids[places[-1] + 1 :])
        assert text in given[0]["choice"]
    assert places or bias < 3
    assert (max(places, default=0) == 0) == (bias > 20 or not places)
    for num_drafts in (1, 3, 8):
        done = run(llm, prompts, given, num_drafts=num_drafts)
        assert [one.token_ids for one in done] == [one.token_ids for one in plain]


def test_a_finished_grammar_ends_the_answer_at_its_row(llm: LLM) -> None:
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 60}):
        for num_drafts in (0, 3, 8):
            result = run(llm, ["Say: "], [{"regex": "[ab]{3}c"}], num_drafts=num_drafts, **more)[0]
            assert result.finish_reason is FinishReason.STOP
            assert re.fullmatch("[ab]{3}c", result.text)
            assert llm.config.eos_token_ids[0] not in result.token_ids
    # Where more could follow, the model ends it, or the length does.
    end = llm.config.eos_token_ids[0]
    given = {"regex": "(?:ab)+", "logit_bias": {end: 100.0}, "ignore_eos": True}
    result = run(llm, ["Say: "], [given], num_drafts=3)[0]
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids[-1] == end
    assert re.fullmatch("(?:ab)+", result.text)


def test_length_cuts_a_grammar_and_says_so(llm: LLM) -> None:
    results = [
        run(llm, ["Say: "], [{"json_object": True}], num_drafts=k, max_tokens=7)[0] for k in (0, 8)
    ]
    assert results[0].token_ids == results[1].token_ids
    assert len(results[0].token_ids) == 7
    assert results[0].finish_reason is FinishReason.LENGTH


def test_a_batch_mixes_grammars_and_none(llm: LLM) -> None:
    given: list[dict[str, Any]] = [
        {"regex": "[0-9]{3}-[0-9]{4}", "num_drafts": 1},
        {"num_drafts": 3, "max_tokens": 40},
        {"choice": ["left", "right"], "num_drafts": 8},
        {"temperature": 0.9, "seed": 5, "num_drafts": 0, "max_tokens": 30},
        {"json_object": True, "num_drafts": 5, "max_tokens": 50},
        {"num_drafts": 8, "max_tokens": 25},
    ]
    prompts = [f"Line {n}: the " for n in range(len(given))]
    alone = [run(llm, [p], [one])[0].token_ids for p, one in zip(prompts, given, strict=True)]
    assert [one.token_ids for one in run(llm, prompts, given)] == alone


def test_a_bad_grammar_is_refused_at_the_door_and_costs_nobody_else(llm: LLM) -> None:
    for bad, reason in (
        ({"regex": "a("}, "unclosed group"),
        ({"json_schema": {"not": {}}}, "Unimplemented keys"),
        ({"grammar": "no grammar"}, "no rule 'start:'"),
        ({"json_schema": "{"}, "json_schema is no JSON"),
    ):
        with pytest.raises(RequestError, match=re.escape(reason)):
            run(llm, ["a", "b"], [{}, bad])
    llm.engine.check_idle()


def test_drafts_of_json_are_accepted_as_often_as_without_its_grammar(llm: LLM) -> None:
    """The same ids: without the grammar the answer is cut where the grammar ends it."""
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    prompts = [one["prompt"] for one in lines if one["class"] == "json_schema"][:8]
    schemas = [p[p.index("{") : p.index("<｜User｜>")] for p in prompts]
    base = {"max_tokens": 120, "num_drafts": 3}
    bound = llm.generate(
        prompts, [SamplingParams(**base, json_schema=one) for one in schemas], allow_special=True
    )
    lengths = [len(one.token_ids) for one in bound]
    free = llm.generate(
        prompts,
        [SamplingParams(max_tokens=length, num_drafts=3) for length in lengths],
        allow_special=True,
    )
    same = 0
    steps, drafted, accepted = [0, 0], [0, 0], [0, 0]
    for pair in zip(free, bound, strict=True):
        if pair[0].token_ids != pair[1].token_ids:
            continue
        same += 1
        for at, result in enumerate(pair):
            steps[at] += result.speculation.num_steps
            drafted[at] += result.speculation.num_drafted
            accepted[at] += result.speculation.num_accepted
    assert same >= 6
    assert accepted[0] > 100
    assert steps[1] <= steps[0]
    assert accepted[1] / drafted[1] >= accepted[0] / drafted[0]


@pytest.mark.parametrize("kind", ["random", "oracle", "anti", "cycling", "poison"])
def test_no_drafter_can_lead_an_answer_out_of_its_grammar(llm: LLM, kind: str) -> None:
    given = [{**one, "temperature": 0.0} for one in specs(16)]
    prompt = "An answer: "
    plain = run(llm, [prompt] * len(given), given, num_drafts=0)
    texts = [[*one.prompt_token_ids, *one.token_ids] for one in plain]
    vocab = llm.config.vocab_size
    proposer: Any = {
        "random": lambda: RandomProposer(seed=1, vocab_size=vocab),
        "oracle": lambda: OracleProposer(texts),
        "anti": lambda: AntiProposer(texts, vocab_size=vocab),
        "cycling": lambda: CyclingProposer(texts, num_drafts=3, vocab_size=vocab),
        "poison": lambda: PoisonProposer(OracleProposer(texts), "beyond", vocab_size=vocab),
    }[kind]()
    options = {"max_seq_len": 512, "max_num_seqs": 4, "num_threads": 1}
    with LLM(proposer=proposer, num_drafts=3, **options) as model:
        done = run(model, [prompt] * len(given), given)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert all(follows(one.text, asked) for asked, one in zip(given, done, strict=True))


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("at", range(2, 8))
def test_a_sequence_that_is_preempted_goes_on_where_its_grammar_stood(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, at: int, num_drafts: int
) -> None:
    given = {"regex": "(?:[a-z]{3}[0-9] ){12}", "num_drafts": num_drafts}
    plain = run(llm, ["A record: "], [given])[0].token_ids
    inner = llm.engine.step
    count = 0

    def step() -> Any:
        nonlocal count
        count += 1
        if count == at:
            llm.engine._scheduler.preempt_last()
        return inner()

    monkeypatch.setattr(llm.engine, "step", step)
    before = llm.engine.num_preemptions
    assert run(llm, ["A record: "], [given])[0].token_ids == plain
    assert llm.engine.num_preemptions == before + 1


def test_rows_of_masks_stay_beside_their_drafts_where_some_are_cut(llm: LLM) -> None:
    given: list[dict[str, Any]] = [
        {"regex": "[0-9]{3}-[0-9]{4}", "num_drafts": 1},
        {"num_drafts": 3, "max_tokens": 30},
        {"choice": ["left", "right"], "num_drafts": 8},
        {"json_object": True, "num_drafts": 0, "max_tokens": 30},
        {"json_object": True, "num_drafts": 5, "max_tokens": 30},
    ]
    prompts = [f"Line {n}: the " for n in range(len(given))]
    plain = [one.token_ids for one in run(llm, prompts, [{**g, "num_drafts": 0} for g in given])]
    options = {"max_seq_len": 512, "max_num_seqs": 8, "num_threads": 1}
    with LLM(keep_drafts=0.5, **options) as model:
        done = run(model, prompts, given)
    assert [one.token_ids for one in done] == plain


def test_others_go_on_while_a_grammar_is_compiled(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=60, num_drafts=0, ignore_eos=True)
    alone = llm.generate(["Once "], params)[0].token_ids
    run(llm, ["a"], [{"regex": "warm"}])
    compiler = llm._grammars
    assert compiler is not None
    stream = llm.stream("Once ", params)
    chunks = [next(stream)]
    start = llm.engine.num_forwards

    class Slow(Future[Any]):
        def done(self) -> bool:
            return llm.engine.num_forwards >= start + 20

    waited: list[int] = []
    submit = compiler.submit

    def slowly(spec: Any) -> Future[Any]:
        if waited:
            waited.append(llm.engine.num_forwards - start)
            return submit(spec)
        waited.append(0)
        return Slow()

    monkeypatch.setattr(compiler, "submit", slowly)
    assert run(llm, ["Say "], [{"regex": "[0-9]{3}"}])[0].text.isdigit()
    assert waited == [0, 20], "the other request stood still"
    chunks += stream
    assert [token for chunk in chunks for token in chunk.token_ids] == alone


@pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="an extra")
def test_the_other_library_holds_for_any_number_of_drafts(
    drafted: list[tuple[str | None, int, int]],
) -> None:
    given = specs(16)
    plain: list[list[int]] | None = None
    with LLM(max_seq_len=512, num_threads=1, grammar_library="xgrammar") as model:
        for num_drafts in (0, 1, 3, 8):
            done = run(model, ["An answer: "] * len(given), given, num_drafts=num_drafts)
            for one, result in zip(given, done, strict=True):
                if result.finish_reason is FinishReason.STOP:
                    assert follows(result.text, one), (one, result.text)
            ids = [result.token_ids for result in done]
            plain = plain or ids
            assert ids == plain, f"{num_drafts} drafts"
    assert sum(count for _, count, _ in drafted) > 50
    assert all(count == legal for _, count, legal in drafted)
