"""Drafts that the proposer itself gives little are left out before the target runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import toy

from paceline import LLM, SamplingParams
from paceline.draft.doubles import OracleProposer, SimpleState
from paceline.types import ConfigError, Draft, DraftRequest

PROMPTS = [[5, 6, 7], [9, 3, 2, 8], [11], [4, 4, 1]]


class Sure(OracleProposer):
    """Right always; says how sure it is by a rule, and counts what becomes of its drafts."""

    def __init__(self, texts: list[list[int]], shares: dict[int, list[float]]) -> None:
        super().__init__(texts)
        self.shares = shares
        self.verdicts: list[int] = []

    def propose(self, request: DraftRequest, state: SimpleState) -> Draft:
        draft = super().propose(request, state)
        shares = self.shares[request.history[0]][: len(draft.tokens)]
        state.least = min(shares, default=1.0)  # type: ignore[attr-defined]
        return Draft(tokens=draft.tokens, confidence=[math.log(share) for share in shares])

    def after_verify(self, num_accepted: int, state: SimpleState) -> None:
        self.verdicts.append(num_accepted)
        super().after_verify(num_accepted, state)

    def alloc_state(self) -> Any:
        return _State()

    def last_confidence(self, state: SimpleState) -> float | None:
        return getattr(state, "least", None)


class _State(SimpleState):
    __slots__ = ("least",)


def texts(count: int) -> list[list[int]]:
    return [prompt + toy.continuation(prompt, count) for prompt in PROMPTS]


def engine(proposer: Any, **options: Any) -> Any:
    drafts = 0 if proposer is None else 3
    config = toy.toy_config(eos_token_ids=())
    return toy.toy_engine(
        config=config, proposer=proposer, num_drafts=drafts, max_num_seqs=4, **options
    )


def run(one: Any, count: int) -> list[list[int]]:
    said: dict[int, list[int]] = {
        one.add(prompt, SamplingParams(max_tokens=count)): [] for prompt in PROMPTS
    }
    while one.has_work:
        for emission in one.step():
            said[emission.request_id] += emission.token_ids
    one.check_idle()
    return [prompt + tokens for prompt, tokens in zip(PROMPTS, said.values(), strict=True)]


def test_a_batch_keeps_the_drafts_most_likely_to_be_reached() -> None:
    want = texts(5)
    shares = {5: [0.9, 0.9, 0.9], 9: [0.5, 0.5, 0.5], 11: [0.8, 0.1, 0.9], 4: [0.01, 0.9, 0.9]}
    proposer = Sure(want, shares)
    one = engine(proposer, keep_drafts=0.5)
    ids = [one.add(prompt, SamplingParams(max_tokens=5)) for prompt in PROMPTS]
    one.step()
    emissions = {emission.request_id: emission for emission in one.step()}
    # Products: .9 .81 .729 | .5 .25 .125 | .8 .08 .072 | .01 .009 .0081: the six largest stay.
    drafted = [emissions[number].stats.num_drafted for number in ids]
    assert drafted == [3, 2, 1, 0]
    assert one.drafting.num_pruned == 6
    assert sorted(proposer.verdicts) == [0, 1, 2, 3], "each draft has one verdict, cut or not"


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.75])
def test_pruning_changes_no_token(keep: float) -> None:
    want = texts(20)
    shares = {first: [0.9, 0.6, 0.2] for first in (5, 9, 11, 4)}
    proposer = Sure(want, shares)
    assert run(engine(proposer, keep_drafts=keep), 20) == want
    assert not any(proposer.verdicts) or keep > 0


def test_a_draft_with_an_unlikely_token_is_discarded_whole() -> None:
    want = texts(20)
    shares = {5: [0.9, 0.9, 0.9], 9: [0.9, 0.2, 0.9], 11: [0.9] * 3, 4: [0.9] * 3}
    proposer = Sure(want, shares)
    one = engine(proposer, discard_drafts_below=0.5)
    stats = {}
    said: dict[int, list[int]] = {
        one.add(prompt, SamplingParams(max_tokens=20)): [] for prompt in PROMPTS
    }
    while one.has_work:
        for emission in one.step():
            said[emission.request_id] += emission.token_ids
            stats[emission.request_id] = emission.stats
    drafted = [stats[number].num_drafted for number in said]
    assert min(drafted[0], drafted[2], drafted[3]) > 9
    # Its drafts of one token, near the end, hold nothing unlikely.
    assert drafted[1] <= 1
    assert one.drafting.num_pruned > 10


def test_shares_out_of_range_are_refused() -> None:
    for name in ("keep_drafts", "discard_drafts_below"):
        for share in (-0.1, 1.1):
            with pytest.raises(ConfigError, match=rf"{name} is {share}; allowed is 0 to 1"):
                engine(None, **{name: share})


def test_the_bundled_heads_own_thresholds_change_counts_and_no_token() -> None:
    prompts = ["import unittest\n", "def f(x):\n"]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    runs = {}
    for name, options in {
        "plain": {},
        "stop": {"min_draft_probability": 0.5},
        "keep": {"keep_drafts": 0.5},
        "discard": {"discard_drafts_below": 0.5},
    }.items():
        with LLM(num_drafts=3, num_threads=1, max_seq_len=256, **options) as llm:  # type: ignore[arg-type]
            runs[name] = llm.generate(prompts, params)
    plain = runs.pop("plain")
    for name, results in runs.items():
        assert [r.token_ids for r in results] == [r.token_ids for r in plain], name
        for got, was in zip(results, plain, strict=True):
            assert 0 < got.speculation.num_drafted < was.speculation.num_drafted, name
            assert got.speculation.acceptance_rate > was.speculation.acceptance_rate, name
