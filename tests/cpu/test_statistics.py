"""What is counted equals a closed form, and what the counts give away is told once."""

from __future__ import annotations

import inspect
import json.decoder
import logging
import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy import EOS, VOCAB, Checked, anti, continuation, decode, oracle, run, toy_config, toy_engine

import paceline
from paceline import LLM
from paceline.draft import AntiProposer, CyclingProposer, OracleProposer
from paceline.engine import Engine
from paceline.engine.alarms import (
    ALARM_NAMES,
    MIN_DRAFTS,
    MIN_LOOKUPS,
    Repeats,
    drafting_alarms,
    prefix_alarms,
)
from paceline.types import Draft, DraftRequest, SamplingParams, SpeculationStats

NO_EOS = toy_config(eos_token_ids=())
PROMPTS = [[5, 6, 7], [9] * 130, [11, 12]]
TEXTS = [[*prompt, *continuation(prompt, 330)] for prompt in PROMPTS]


def cycling(num_drafts: int) -> CyclingProposer:
    return CyclingProposer(TEXTS, num_drafts=num_drafts, vocab_size=VOCAB)


# Counts


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 8])
def test_counts_equal_the_closed_form_after_every_step(num_drafts: int) -> None:
    proposer = cycling(num_drafts)
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=num_drafts)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=300))
    (emission,) = engine.step()
    for steps in range(1, 2 * num_drafts + 7):
        (emission,) = engine.step()
        expected = proposer.expected(steps)
        # The prompt's forward gave the first token and is a step too.
        assert emission.stats == replace(expected, num_steps=steps + 1)
        assert engine.speculation == emission.stats
        assert len(emission.token_ids) == (steps - 1) % (num_drafts + 1) + 1
        assert sum(one.is_draft for one in emission.origins) == (steps - 1) % (num_drafts + 1)


def test_counts_of_requests_add_up_to_the_engines() -> None:
    proposer = cycling(3)
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=3)
    each = [SamplingParams(max_tokens=n, num_drafts=k) for n, k in ((40, 3), (33, 0), (50, 2))]
    ids = [engine.add(p, one) for p, one in zip(PROMPTS, each, strict=True)]
    emissions = run(engine)
    total = SpeculationStats()
    for number in ids:
        total.add(emissions[number][-1].stats)
    assert total == engine.speculation
    assert emissions[ids[1]][-1].stats.num_drafted == 0
    assert total.drafted_at[2] < total.drafted_at[1]
    assert total.num_emitted >= sum(one.max_tokens for one in each) - 3


def test_rates_are_exact_where_widths_differ() -> None:
    stats = SpeculationStats()
    for drafted, accepted in ((1, 1), (1, 1), (3, 0), (3, 2), (3, 3), (2, 1), (0, 0)):
        stats.record(num_drafted=drafted, num_accepted=accepted)
    assert stats.drafted_at == [6, 4, 3]
    assert stats.accepted_at == [5, 2, 1]
    assert stats.reached_at == [6, 3, 2]
    assert stats.conditional_acceptance_by_position == [5 / 6, 2 / 3, 1 / 2]
    assert stats.mean_acceptance_length == 1 + 8 / 6


class Two(OracleProposer):
    """Drafts in turn as one drafter, always right, and another, right once."""

    def propose(self, request: DraftRequest, state: Any) -> Draft:
        draft = super().propose(request, state)
        if state.num_proposals % 2:
            return replace(draft, source="sure")
        tokens = [t if n == 0 else (t + 1) % VOCAB for n, t in enumerate(draft.tokens)]
        return replace(draft, tokens=tokens, source="unsure")


def test_drafts_are_counted_by_who_made_them() -> None:
    engine = toy_engine(config=NO_EOS, proposer=Two(TEXTS), num_drafts=3)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=100))
    for _ in range(11):
        (emission,) = engine.step()
    assert emission.stats.drafted_by == {"sure": 15, "unsure": 15}
    assert emission.stats.accepted_by == {"sure": 15, "unsure": 5}
    assert emission.stats.to_dict()["drafted_by"] == {"sure": 15, "unsure": 15}
    again = SpeculationStats()
    again.add(emission.stats)
    again.add(emission.stats)
    assert again.accepted_by == {"sure": 30, "unsure": 10}
    assert emission.stats.accepted_by == {"sure": 15, "unsure": 5}


def test_drafts_of_the_only_drafter_are_counted_by_its_class() -> None:
    engine = toy_engine(config=NO_EOS, proposer=AntiProposer(TEXTS, vocab_size=VOCAB), num_drafts=2)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=20))
    stats = run(engine)[0][-1].stats
    assert stats.drafted_by == {"AntiProposer": stats.num_drafted}
    assert stats.accepted_by == {"AntiProposer": 0}


# Alarms, from counts


def counted(steps: list[tuple[int, int]], times: int = 1) -> SpeculationStats:
    stats = SpeculationStats()
    for _ in range(times):
        for drafted, accepted in steps:
            stats.record(num_drafted=drafted, num_accepted=accepted)
    return stats


def names(stats: SpeculationStats) -> list[str]:
    return [alarm.name for alarm in drafting_alarms(stats)]


GOOD = [(3, 3), (3, 2), (3, 1), (3, 0), (3, 1), (3, 0)]


def test_good_counts_raise_no_alarm() -> None:
    assert names(counted(GOOD, 200)) == []
    assert names(SpeculationStats()) == []


@pytest.mark.parametrize(("times", "told"), [(99, False), (100, True)])
def test_a_position_that_is_never_accepted(times: int, told: bool) -> None:
    # The first draft is accepted in every second step, the second in none.
    stats = counted([(2, 1), (2, 0)], times)
    assert names(stats) == ["never_accepted"] * told
    if told:
        (alarm,) = drafting_alarms(stats)
        assert "draft 2 was never accepted, drafted 200 times" in alarm.message
    assert names(counted([(2, 2), *[(2, 1), (2, 0)] * 100])) == []


def test_a_position_that_was_hardly_ever_judged_is_not_blamed() -> None:
    steps = [*[(3, 0)] * 190, *[(3, 1)] * 40, *[(3, 2)] * 19]
    assert names(counted(steps)) == []
    assert names(counted([*steps, (3, 2)])) == ["never_accepted"]


@pytest.mark.parametrize(("times", "told"), [(199, False), (200, True)])
def test_a_position_that_is_always_accepted(times: int, told: bool) -> None:
    assert names(counted([(2, 2)], times)) == ["always_accepted"] * told
    assert names(counted([(1, 1), (1, 0)], times)) == []


@pytest.mark.parametrize(("accepted", "told"), [(3, True), (4, False)])
def test_a_mean_length_of_about_one(accepted: int, told: bool) -> None:
    stats = counted([*[(1, 0)] * (200 - accepted), *[(1, 1)] * accepted])
    assert names(stats) == ["length_one"] * told
    assert names(counted([(1, 0)], 199)) == []


def test_a_second_draft_that_does_better_than_the_first() -> None:
    # The first is accepted in one of ten, the second in nine of ten of those.
    worse = [*[(2, 0)] * 90, (2, 1), *[(2, 2)] * 9]
    assert names(counted(worse, 3)) == ["second_above_first"]
    assert names(counted(worse, 1)) == []
    # Text that is half easy and half hard does this to a good drafter.
    mixed = [*[(2, 2)] * 45, *[(2, 1)] * 2, *[(2, 0)] * 3, *[(2, 2)] * 5, *[(2, 1)] * 10]
    mixed += [(2, 0)] * 35
    stats = counted(mixed, 50)
    first, second = stats.conditional_acceptance_by_position
    assert second > first + 0.1
    assert names(stats) == []


def test_a_difference_that_chance_can_make_is_not_told() -> None:
    steps = [*[(2, 0)] * 178, *[(2, 1)] * 11, *[(2, 2)] * 11]
    assert names(counted(steps)) == []
    assert names(counted(steps, 10)) == ["second_above_first"]


def test_steps_with_one_draft_do_not_weigh_in_the_comparison() -> None:
    """A first draft that is verified alone where it is poor makes no alarm."""
    steps = [*[(1, 0)] * 900, *[(2, 2)] * 80, *[(2, 1)] * 10, *[(2, 0)] * 10]
    stats = counted(steps, 3)
    first, second = stats.conditional_acceptance_by_position
    assert second - first > 0.5
    assert names(stats) == []


@pytest.mark.parametrize(
    ("repeats", "hits", "told"), [(20, 0, True), (19, 0, False), (20, 1, False), (0, 0, False)]
)
def test_prefixes_that_are_never_found(repeats: int, hits: int, told: bool) -> None:
    found = prefix_alarms(num_repeats=repeats, num_hits=hits)
    assert [alarm.name for alarm in found] == ["no_prefix_hits"] * told


def test_requests_that_could_have_hit_are_counted() -> None:
    repeats = Repeats()
    long, short = [1] * 129, [1] * 128
    repeats.begun(long)
    repeats.ended(short)
    repeats.begun(long)
    assert repeats.count == 0
    repeats.ended([*long, 5])
    repeats.begun(short)
    repeats.begun([2, *long])
    assert repeats.count == 0
    repeats.begun([*long, 7, 8])
    assert repeats.count == 1
    for first in range(2000):
        repeats.ended([first, *long])
    repeats.begun(long)
    assert repeats.count == 1


# Alarms, by the engine


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message.split(":")[0] for r in caplog.records if "said once" in r.message]


def test_the_engine_says_each_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = toy_engine(config=NO_EOS, proposer=Checked(anti), num_drafts=2, max_seq_len=1024)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            decode(engine, [[3, 4]], SamplingParams(max_tokens=290))
    assert warnings(caplog) == ["never_accepted", "length_one"]
    assert [alarm.name for alarm in engine.alarms()] == ["never_accepted", "length_one"]
    assert warnings(caplog) == ["never_accepted", "length_one"]


def test_the_engine_looks_now_and_then_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[int] = []
    engine = toy_engine(config=NO_EOS, proposer=Checked(oracle), num_drafts=1, max_seq_len=2048)
    monkeypatch.setattr(engine, "alarms", lambda: looks.append(engine.num_forwards))
    engine.add([3, 4], SamplingParams(max_tokens=1100))
    run(engine)
    assert looks == [256, 512]


@pytest.mark.parametrize(("budget", "told"), [(1, True), (1 << 24, False)])
def test_a_cache_that_never_hits_is_told_of(budget: int, told: bool) -> None:
    engine = toy_engine(config=NO_EOS, prefix_cache_bytes=budget)
    for n in range(21):
        assert engine.alarms() == []
        decode(engine, [[*[9] * 140, n]], SamplingParams(max_tokens=2))
    assert [alarm.name for alarm in engine.alarms()] == ["no_prefix_hits"] * told


def test_requests_that_fail_do_not_count_as_read() -> None:
    engine = toy_engine(config=NO_EOS, prefix_cache_bytes=1 << 24)
    number = engine.add([9] * 140, SamplingParams(max_tokens=50))
    engine.step()
    engine.abort(number)
    engine.add([9] * 140, SamplingParams(max_tokens=50))
    assert engine._repeats.count == 0
    run(engine)


def test_the_page_knows_every_alarm_and_when_it_comes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, flags=re.MULTILINE))
    assert set(listed) == set(ALARM_NAMES)
    for name in ("never_accepted", "always_accepted", "length_one"):
        assert f" {MIN_DRAFTS} " in listed[name]
    assert listed["no_prefix_hits"].startswith(f"{MIN_LOOKUPS} ")


def test_a_normal_run_of_the_bundled_model_raises_no_alarm() -> None:
    try:
        path = paceline.bundled_model_path()
    except paceline.CheckpointError as error:
        pytest.skip(str(error))
    with LLM(path, num_drafts=3, max_seq_len=1024) as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(inspect.getsource(textwrap) + inspect.getsource(json.decoder))
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        some = [ids[53 * n : 53 * n + 60] for n in range(14)]
        llm.generate(some, params)
        engine: Engine = llm.engine
        assert engine.speculation.drafted_at[2] > 200
        assert drafting_alarms(engine.speculation) == []
        assert engine.alarms() == []


def test_end_of_sequence_does_not_change_what_is_counted() -> None:
    """A step counts all that it verified, also where a stop token cuts the block."""
    text = continuation(PROMPTS[0], 9)
    config = toy_config(eos_token_ids=(text[2],))
    assert text[2] not in text[:2]
    engine = toy_engine(config=config, proposer=Checked(oracle), num_drafts=8)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=60))
    (emission,) = run(engine)[0][1:]
    assert emission.token_ids == text[1:3]
    assert (emission.stats.num_drafted, emission.stats.num_accepted) == (8, 8)
    assert EOS not in emission.token_ids
