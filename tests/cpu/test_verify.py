"""Greedy acceptance: what is accepted, how ties break, and what a broken row costs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.draft.verify import greedy, greedy_tokens

VOCAB = 12


def rows(*choices: int) -> torch.Tensor:
    logits = torch.zeros(len(choices), VOCAB)
    for row, token in enumerate(choices):
        logits[row, token] = 1.0
    return logits


def test_without_drafts_the_verdict_is_the_argmax() -> None:
    (verdict,) = greedy(rows(7), [[]])
    assert (verdict.num_accepted, verdict.next_token, verdict.error) == (0, 7, None)


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), st.data())
def test_accepts_exactly_the_leading_drafts_the_target_agrees_with(
    choices: list[int], data: st.DataObject
) -> None:
    draft = [data.draw(st.sampled_from([token, (token + 1) % VOCAB])) for token in choices[:-1]]
    accepted = 0
    while accepted < len(draft) and draft[accepted] == choices[accepted]:
        accepted += 1
    (verdict,) = greedy(rows(*choices), [draft])
    assert (verdict.num_accepted, verdict.next_token) == (accepted, choices[accepted])


def test_full_acceptance_gives_the_bonus_token() -> None:
    (verdict,) = greedy(rows(3, 4, 5), [[3, 4]])
    assert (verdict.num_accepted, verdict.next_token) == (2, 5)


def test_sequences_of_different_widths_follow_one_another() -> None:
    verdicts = greedy(rows(1, 2, 3, 4, 5, 6), [[1], [], [4, 9]])
    assert [(v.num_accepted, v.next_token) for v in verdicts] == [(1, 2), (0, 3), (1, 5)]


def test_offsets_place_a_sequence_anywhere() -> None:
    verdicts = greedy(rows(0, 1, 2, 3, 4), [[3], [0]], offsets=[3, 0])
    assert [(v.num_accepted, v.next_token) for v in verdicts] == [(1, 4), (1, 1)]


@pytest.mark.parametrize("offset", [-1, 2])
def test_rows_outside_the_logits_are_refused(offset: int) -> None:
    with pytest.raises(ValueError, match="the logits have 3"):
        greedy(rows(0, 1, 2), [[0]], offsets=[offset])


@pytest.mark.parametrize("vocab", [5, 64, 8192])
def test_ties_go_to_the_lower_id(vocab: int) -> None:
    logits = torch.zeros(3, vocab)
    logits[1, vocab // 2 :] = 2.0
    logits[2, [vocab - 1, 2, 3]] = 7.0
    assert greedy_tokens(logits) == [0, vocab // 2, 2]
    assert greedy_tokens(logits.numpy()) == [0, vocab // 2, 2]


@pytest.mark.parametrize("at", [0, 5, VOCAB - 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_gives_an_error_and_no_token(value: float, at: int) -> None:
    logits = rows(3, 4)
    logits[1, at] = value
    (verdict,) = greedy(logits, [[3]])
    assert verdict.num_accepted == 1
    assert verdict.next_token == -1
    assert verdict.error == "non-finite logits"


def test_a_row_of_minus_infinity_only_gives_an_error() -> None:
    logits = rows(3)
    logits[0] = float("-inf")
    assert greedy(logits, [[]])[0].error is not None


def test_masked_tokens_of_minus_infinity_are_ordinary() -> None:
    logits = rows(3)
    logits[0, :3] = float("-inf")
    assert greedy(logits, [[]])[0].next_token == 3


def test_a_broken_row_behind_a_refused_draft_does_not_matter() -> None:
    logits = rows(3, 4)
    logits[1] = float("nan")
    (verdict,) = greedy(logits, [[9]])
    assert (verdict.num_accepted, verdict.next_token, verdict.error) == (0, 3, None)


def test_a_broken_sequence_leaves_its_neighbours_alone() -> None:
    logits = rows(1, 2, 3, 4)
    logits[1, 0] = float("nan")
    verdicts = greedy(logits, [[], [], [3]])
    assert [v.next_token for v in verdicts] == [1, -1, 4]


def test_a_draft_of_minus_one_never_agrees_with_a_broken_row() -> None:
    logits = rows(1, 2)
    logits[0] = float("nan")
    (verdict,) = greedy(logits, [[-1]])
    assert verdict.num_accepted == 0
    assert verdict.error is not None


@given(st.integers(0, 2**32 - 1))
def test_numpy_and_torch_agree(seed: int) -> None:
    logits = np.random.default_rng(seed).integers(-3, 3, (6, 40)).astype(np.float32)
    tensor = torch.from_numpy(logits)
    assert greedy_tokens(logits) == greedy_tokens(tensor) == logits.argmax(-1).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_path_equals_the_host_path() -> None:
    logits = torch.randint(-3, 3, (64, 8192)).float()
    logits[3, 17] = float("nan")
    logits[9, 8000] = float("inf")
    logits[11] = float("-inf")
    assert greedy_tokens(logits.cuda()) == greedy_tokens(logits)
