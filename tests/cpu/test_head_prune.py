"""Cutting weak tails over a batch: against brute force, and the edges."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.prune import prune_drafts

# Multiples of an eighth add up exactly, so equal products are equal sums.
LOG_PROBS = st.integers(0, 24).map(lambda n: -n / 8)
BATCHES = st.lists(st.lists(LOG_PROBS, max_size=4), max_size=4)


def reached(confidences: list[list[float]], kept: tuple[int, ...] | list[int]) -> float:
    """Expected number of accepted drafts, were the drafter's probabilities true."""
    return sum(
        math.exp(sum(log_probs[: j + 1]))
        for log_probs, count in zip(confidences, kept, strict=True)
        for j in range(count)
    )


@settings(max_examples=200, deadline=None)
@given(confidences=BATCHES, budget=st.integers(0, 18))
def test_no_other_choice_of_as_many_drafts_is_likelier(
    confidences: list[list[float]], budget: int
) -> None:
    kept = prune_drafts(confidences, max_drafts=budget)
    total = sum(len(log_probs) for log_probs in confidences)
    assert sum(kept) == min(budget, total)
    assert all(0 <= n <= len(c) for n, c in zip(kept, confidences, strict=True))
    every = itertools.product(*(range(len(log_probs) + 1) for log_probs in confidences))
    best = max(reached(confidences, choice) for choice in every if sum(choice) == sum(kept))
    assert reached(confidences, kept) == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(confidences=BATCHES, budget=st.integers(0, 18))
def test_a_greater_budget_keeps_what_a_smaller_one_kept(
    confidences: list[list[float]], budget: int
) -> None:
    some = prune_drafts(confidences, max_drafts=budget)
    more = prune_drafts(confidences, max_drafts=budget + 1)
    assert all(a <= b for a, b in zip(some, more, strict=True))


@settings(max_examples=100, deadline=None)
@given(confidences=BATCHES, ratio=st.floats(0, 1), budget=st.integers(0, 18))
def test_a_ratio_is_a_budget_of_its_share_and_the_lesser_rules(
    confidences: list[list[float]], ratio: float, budget: int
) -> None:
    total = sum(len(log_probs) for log_probs in confidences)
    share = math.ceil(ratio * total)
    assert prune_drafts(confidences, keep_ratio=ratio) == prune_drafts(
        confidences, max_drafts=share
    )
    both = prune_drafts(confidences, keep_ratio=ratio, max_drafts=budget)
    assert both == prune_drafts(confidences, max_drafts=min(share, budget))


def test_everything_is_kept_without_a_limit() -> None:
    assert prune_drafts([[-1.0, -9.0], [], [-math.inf]]) == [2, 0, 1]


def test_a_late_draft_of_a_sure_sequence_beats_an_early_one_of_an_unsure() -> None:
    assert prune_drafts([[-0.1, -0.1, -0.1], [-2.0, 0.0]], max_drafts=4) == [3, 1]


def test_what_was_not_measured_stays_first_and_ties_go_to_early_positions() -> None:
    assert prune_drafts([[-0.5, 0.0], [0.0, 0.0], [-0.5]], max_drafts=3) == [1, 2, 0]
    assert prune_drafts([[0.0, 0.0], [0.0, 0.0]], max_drafts=3) == [2, 1]


@pytest.mark.parametrize(
    ("confidences", "limits", "what"),
    [
        ([[0.5]], {}, "log-probability 0 of sequence 0 is 0.5; allowed is at most 0"),
        ([[], [-1.0, math.nan]], {}, "log-probability 1 of sequence 1 is nan"),
        ([], {"max_drafts": -1}, "max_drafts is -1; allowed is at least 0"),
        ([], {"keep_ratio": 1.5}, "keep_ratio is 1.5; allowed is 0 to 1"),
        ([], {"keep_ratio": math.nan}, "keep_ratio is nan; allowed is 0 to 1"),
    ],
)
def test_what_is_no_probability_and_no_limit_is_refused(
    confidences: list[list[float]], limits: dict[str, float], what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        prune_drafts(confidences, **limits)  # type: ignore[arg-type]
