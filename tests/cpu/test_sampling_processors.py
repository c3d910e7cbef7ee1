"""Processors against a naive law, and a history that only commits can change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_kit import END, KNOBS, VOCAB, make_sampler, naive_law

from paceline.sampling.processors import Law, TokenHistory, allowed_by, law_of
from paceline.sampling.request import NON_FINITE, NOTHING_ALLOWED, Sampler
from paceline.types import RequestError, SamplingParams

IDS = st.integers(0, VOCAB - 1)
# Quarters tie often; all values are exact, so that the naive law meets the same ties.
LOGITS = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB)


def subset(**knobs: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=knobs)


ANY_KNOBS = subset(
    top_p=st.sampled_from([0.05, 0.33, 0.61, 0.9, 1.0]),
    top_k=st.integers(-1, VOCAB + 2),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 2.0]),
    presence_penalty=st.sampled_from([-1.5, 0.0, 0.75]),
    frequency_penalty=st.sampled_from([-0.25, 0.0, 0.5]),
    logit_bias=st.dictionaries(IDS, st.integers(-8, 8).map(lambda n: n / 4), max_size=4),
    allowed_token_ids=st.lists(IDS, min_size=2, max_size=6, unique=True).filter(
        lambda ids: set(ids) - {END, 4}
    ),
    bad_word_ids=st.lists(
        st.one_of(st.just((4,)), st.lists(IDS, min_size=2, max_size=3).map(tuple)), max_size=4
    ),
    min_tokens=st.integers(0, 6),
)


def probabilities(law: Law | int) -> list[float]:
    assert isinstance(law, Law)
    return law.probabilities().tolist()


@given(
    LOGITS,
    st.lists(IDS, min_size=1, max_size=5),
    st.lists(IDS, max_size=5),
    st.lists(IDS, max_size=4),
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    ANY_KNOBS,
    st.none() | st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB),
)
def test_the_law_is_the_naive_one(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    drafted: list[int],
    temperature: float,
    knobs: dict[str, Any],
    allowed: list[bool] | None,
) -> None:
    sampler = make_sampler(prompt, temperature=temperature, **knobs)
    sampler.commit(output)
    mask = None if allowed is None else np.array(allowed)
    row = np.array(logits, np.float32)
    law = sampler.law(row, drafted=drafted, mask=mask)
    assert row.tolist() == logits
    try:
        want = naive_law(
            logits,
            prompt,
            [*output, *drafted],
            allowed=allowed,
            temperature=temperature,
            **knobs,
        )
    except LookupError:
        assert law == NOTHING_ALLOWED
        return
    got = probabilities(law)
    assert [p > 0 for p in got] == [p > 0 for p in want]
    assert got == pytest.approx(want, rel=1e-9)
    picked = sampler.pick(row, drafted=drafted, mask=mask)
    assert want[picked] > 0
    drawn, kept = sampler.draw(row, drafted=drafted, mask=mask)
    assert want[drawn] > 0
    assert kept is not None
    assert kept.tolist() == got


@pytest.mark.parametrize("knob", sorted(KNOBS))
def test_every_knob_of_the_tests_changes_something(knob: str) -> None:
    logits = np.linspace(-1, 1.2, VOCAB).astype(np.float32)
    plain = make_sampler(temperature=1.0)
    tuned = make_sampler(temperature=1.0, **KNOBS[knob])
    for sampler in (plain, tuned):
        sampler.commit([5, 5, 3, 2])
    same = probabilities(plain.law(logits)) == probabilities(tuned.law(logits))
    assert same is (knob == "none")


@pytest.mark.parametrize("spread", [0.01, 0.3, 1.0, 4.0])
@pytest.mark.parametrize(
    "knobs",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 300},
        {"top_k": 600},
        {"top_k": 5000},
        {"top_p": 1e-9},
        {"top_p": 0.5},
        {"top_p": 0.97},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
    ],
    ids=str,
)
def test_the_cuts_of_a_large_vocabulary_are_the_naive_ones(
    spread: float, knobs: dict[str, Any]
) -> None:
    rng = np.random.default_rng(7)
    logits = (rng.standard_normal(8190) * spread).astype(np.float32)
    logits = np.round(logits * 16) / 16 if spread == 1.0 else logits
    sampler = make_sampler(vocab=8190, temperature=1.0, **knobs)
    want = naive_law(logits.tolist(), [], [], temperature=1.0, **knobs)
    assert probabilities(sampler.law(logits)) == pytest.approx(want, rel=1e-9)


def test_every_mass_is_met_by_the_smallest_set_that_holds_it() -> None:
    logits = np.random.default_rng(4).standard_normal(500).astype(np.float32) * 2
    law = np.array(naive_law(logits.tolist(), [], [], temperature=1.0))
    held = np.cumsum(np.sort(law)[::-1])
    for mass in np.linspace(0.002, 0.999, 300).tolist():
        sampler = make_sampler(vocab=500, temperature=1.0, top_p=mass)
        kept = np.flatnonzero(probabilities(sampler.law(logits)))
        assert len(kept) == 1 + np.searchsorted(held, mass)
        assert law[kept].min() >= np.delete(law, kept).max()


def test_a_share_of_one_keeps_what_ties_with_the_largest() -> None:
    logits = np.array([0, 3, 1, 3, 2, 0, 0, 0], np.float32)
    law = make_sampler(temperature=1.7, min_p=1.0).law(logits)
    assert probabilities(law) == [0, 0.5, 0, 0.5, 0, 0, 0, 0]


def test_ties_at_the_edge_go_to_the_lower_ids() -> None:
    logits = np.array([0, 1, 1, 1, 0, 1, 0, 1], np.float32)
    law = make_sampler(temperature=1.0, top_k=3).law(logits)
    assert np.flatnonzero(probabilities(law)).tolist() == [1, 2, 3]
    law = make_sampler(temperature=1.0, top_k=7, top_p=0.999).law(np.zeros(VOCAB, np.float32))
    assert np.flatnonzero(probabilities(law)).tolist() == [0, 1, 2, 3, 4, 5, 6]
    law = make_sampler(temperature=1.0, top_p=0.5).law(np.zeros(VOCAB, np.float32))
    assert np.flatnonzero(probabilities(law)).tolist() == [0, 1, 2, 3]
    assert make_sampler(presence_penalty=1.0).pick(logits) == 1


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e6])
def test_extreme_temperatures_give_a_law(temperature: float) -> None:
    logits = np.array([3.4e38, -3.4e38, 1, 2, 0, 0, 0, -np.inf], np.float32)
    law = probabilities(make_sampler(temperature=temperature).law(logits))
    assert sum(law) == pytest.approx(1)
    assert law[0] == pytest.approx(1)


def test_a_temperature_that_is_nearly_nothing_is_greedy() -> None:
    assert make_sampler(temperature=9e-6).is_argmax
    assert not make_sampler(temperature=1e-5).is_argmax


# Rows that give no token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("knob", sorted(KNOBS))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_no_token(bad: float, knob: str, temperature: float) -> None:
    logits = np.full(VOCAB, bad, np.float32) if bad == -np.inf else np.zeros(VOCAB, np.float32)
    logits[4] = bad  # an id the banned words forbid: hiding it must not hide the failure
    sampler = make_sampler(temperature=temperature, **KNOBS[knob])
    assert sampler.law(logits) == NON_FINITE
    assert sampler.pick(logits) == NON_FINITE
    assert sampler.draw(logits) == (NON_FINITE, None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_wholly_masked_gives_no_token(temperature: float) -> None:
    logits = np.zeros(VOCAB, np.float32)
    sampler = make_sampler(temperature=temperature, allowed_token_ids=[1, 2])
    mask = np.arange(VOCAB) >= 3
    assert sampler.pick(logits, mask=mask) == NOTHING_ALLOWED
    assert sampler.draw(logits, mask=mask) == (NOTHING_ALLOWED, None)
    assert make_sampler(temperature=temperature).pick(logits, mask=~mask & mask) == NOTHING_ALLOWED
    assert sampler.pick(logits, mask=~mask) in (1, 2)


# Masks


@given(st.lists(st.booleans(), min_size=1, max_size=100), st.integers(1, 120))
def test_both_forms_of_a_mask_say_the_same(allowed: list[bool], vocab: int) -> None:
    flags = np.array(allowed)
    words = np.zeros(-(-len(flags) // 32), np.uint32)
    for index in np.flatnonzero(flags):
        words[index // 32] |= np.uint32(1 << (index % 32))
    want = [index < len(allowed) and allowed[index] for index in range(vocab)]
    for mask in (flags, words.view(np.int32)):
        assert allowed_by(mask, vocab).tolist() == want
        assert allowed_by(torch.from_numpy(mask), vocab).tolist() == want


@pytest.mark.parametrize(
    "mask", [np.zeros(8), np.zeros((1, 8), np.bool_), np.zeros(8, np.int64)], ids=str
)
def test_a_mask_of_another_kind_is_refused(mask: np.ndarray) -> None:
    with pytest.raises(ValueError, match="allowed is one row of bool or int32"):
        allowed_by(mask, 8)


# History


@given(
    st.lists(st.integers(0, 300), max_size=40),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 300), max_size=9), st.lists(st.integers(0, 300), max_size=8)
        ),
        max_size=30,
    ),
    st.integers(0, 4),
)
def test_counts_are_the_histogram_of_what_was_committed(
    prompt: list[int], steps: list[tuple[list[int], list[int]]], tail: int
) -> None:
    history = TokenHistory(prompt, tail=tail)
    output: list[int] = []
    for committed, drafted in steps:
        before = history.counts
        ids, counts = history.view(drafted)
        want = Counter([*output, *drafted])
        assert sorted(ids.tolist()) == sorted({*prompt, *output, *drafted})
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
            token: want[token] for token in ids.tolist()
        }
        assert history.counts == before
        history.commit(committed)
        output += committed
        assert history.counts == dict(Counter(output))
        assert history.num_output == len(output)
        assert history.length == len(prompt) + len(output)
        assert history.tail == (output[-tail:] if tail else [])


def test_looking_leaves_no_trace() -> None:
    knobs = {name: value for knob in KNOBS.values() for name, value in knob.items()}
    sampler, twin = (make_sampler(temperature=1.0, **knobs) for _ in range(2))
    row = np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32)
    for drafted in ([2], [2, 3], [5, 5, 5]):
        sampler.pick(row, drafted=drafted)
        sampler.draw(row, drafted=drafted)
    for each in (sampler, twin):
        each.commit([3, 2])
    assert probabilities(sampler.law(row)) == probabilities(twin.law(row))
    assert sampler.pick(row) == twin.pick(row)


def test_a_request_without_penalties_counts_nothing() -> None:
    sampler = make_sampler(temperature=1.0, top_k=3)
    sampler.commit([1, 2, 3])
    assert sampler.history.counts == {}
    assert sampler.history.length == 6


# What a request is told apart by


@pytest.mark.parametrize("knob", sorted(KNOBS))
def test_only_a_request_without_knobs_is_judged_by_its_largest_logit(knob: str) -> None:
    sampler = make_sampler(**KNOBS[knob])
    assert sampler.is_argmax is (knob in ("none", "top_p", "top_k", "min_p"))
    tempered = make_sampler(temperature=0.5, **KNOBS[knob])
    assert not tempered.is_argmax
    assert tempered.is_tempered is (knob == "none")


def test_a_minimum_length_is_a_knob_until_it_is_reached() -> None:
    sampler = make_sampler(min_tokens=2)
    assert not sampler.is_argmax
    sampler.commit([1])
    assert not sampler.is_argmax
    sampler.commit([1])
    assert sampler.is_argmax


def test_the_minimum_length_counts_drafts_and_not_the_prompt() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[END] = 5
    sampler = make_sampler([1] * 9, min_tokens=2)
    assert [sampler.pick(logits, drafted=[1] * n) == END for n in range(4)] == [
        False,
        False,
        True,
        True,
    ]


def test_unseeded_requests_differ_and_samples_differ() -> None:
    logits = np.zeros(4096, np.float32)
    picks = {make_sampler(vocab=4096, temperature=1.0, seed=None).pick(logits) for _ in range(50)}
    assert len(picks) > 40
    picks = {
        make_sampler(vocab=4096, temperature=1.0, n=50, sample=n).pick(logits) for n in range(50)
    }
    assert len(picks) > 40
    same = {make_sampler(vocab=4096, temperature=1.0, seed=3).pick(logits) for _ in range(5)}
    assert len(same) == 1


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"logit_bias": {8: 1.0}}, "logit_bias holds 8; allowed are ids 0 to 7"),
        ({"allowed_token_ids": [0, 9]}, "allowed_token_ids holds 9; allowed are ids 0 to 7"),
        ({"bad_word_ids": [(1, 8)]}, "bad_words holds 8; allowed are ids 0 to 7"),
        ({"bad_word_ids": [()]}, "a word without ids"),
        ({"bad_word_ids": [(i,) for i in range(8)]}, "leave no token"),
        ({"allowed_token_ids": [END], "min_tokens": 1}, "leave no token"),
        ({"allowed_token_ids": [3], "bad_word_ids": [(3,)]}, "leave no token"),
    ],
    ids=str,
)
def test_what_the_vocabulary_forbids_is_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_sampler(**knobs)


def test_a_stop_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="stop_token_ids holds 8"):
        Sampler(SamplingParams(), vocab_size=8, prompt_ids=[1], stop_ids=[8])


def test_a_masked_row_has_the_law_of_its_dense_twin() -> None:
    row = np.random.default_rng(1).standard_normal(64)
    row[::3] = -np.inf
    knobs = make_sampler(vocab=64, temperature=0.8, top_k=9, top_p=0.9).knobs
    dense, sparse = (law_of(row.copy(), knobs, masked=masked) for masked in (False, True))
    assert dense is not None
    assert sparse is not None
    assert probabilities(sparse) == pytest.approx(probabilities(dense), rel=1e-12)
