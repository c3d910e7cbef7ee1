"""Log-probabilities: their values, ranks and lists, and one per id at any width."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_kit import KNOBS, VOCAB, Table, make_sampler, naive_law, picking

from paceline.draft import verify
from paceline.sampling.logprobs import law_logprob, token_logprobs
from paceline.types import TokenLogprob

ROWS = st.lists(
    st.lists(st.integers(-9, 9).map(lambda n: n / 3), min_size=VOCAB, max_size=VOCAB),
    min_size=1,
    max_size=6,
)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def naive(row: list[float], chosen: int, top: int) -> TokenLogprob:
    total = math.log(sum(math.exp(value) for value in row))
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    return TokenLogprob(
        id=chosen,
        logprob=row[chosen] - total,
        rank=1 + order.index(chosen),
        top=[(i, row[i] - total) for i in order[:top]],
    )


def check(got: TokenLogprob, want: TokenLogprob) -> None:
    assert (got.id, got.rank) == (want.id, want.rank)
    assert got.logprob == pytest.approx(want.logprob, abs=1e-6)
    assert [i for i, _ in got.top] == [i for i, _ in want.top]
    assert [v for _, v in got.top] == pytest.approx([v for _, v in want.top], abs=1e-6)


@given(ROWS, st.data(), st.integers(0, VOCAB + 2))
def test_values_ranks_and_lists_are_the_naive_ones(
    rows: list[list[float]], data: st.DataObject, top: int
) -> None:
    ids = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=len(rows)))
    array = np.array(rows, np.float32)
    for logits in (array, torch.from_numpy(array)):
        got = token_logprobs(logits, ids, top=top)
        assert len(got) == len(ids)
        for one, row, chosen in zip(got, array.tolist(), ids, strict=False):
            check(one, naive(row, chosen, top))


@pytest.mark.parametrize("device", DEVICES)
def test_the_device_gives_what_the_host_gives(device: str) -> None:
    from paceline.sampling import logprobs

    logits = torch.randn(9, 4096, generator=torch.Generator().manual_seed(0)) * 3
    logits[4, 1000:] = -torch.inf
    ids = torch.randint(4096, (9,), generator=torch.Generator().manual_seed(1)).tolist()
    ids[4] = 2000
    for top in (0, 1, 5, 20):
        want = token_logprobs(logits, ids, top=top)
        got = logprobs._on_device(logits.to(device), ids, top)
        for one, other in zip(got, want, strict=True):
            check(one, other)
    assert want[4].logprob == -math.inf


def test_what_cannot_come_is_minus_infinity_and_not_listed() -> None:
    row = np.full((1, VOCAB), -np.inf, np.float32)
    row[0, [2, 5]] = [1.0, 3.0]
    (got,) = token_logprobs(row, [7], top=8)
    assert got.logprob == -math.inf
    assert [token for token, _ in got.top] == [5, 2]
    assert sum(math.exp(value) for _, value in got.top) == pytest.approx(1)


def test_more_ids_than_rows_are_refused_and_further_rows_ignored() -> None:
    rows = np.zeros((2, VOCAB), np.float32)
    with pytest.raises(ValueError, match="3 ids are given for 2 rows"):
        token_logprobs(rows, [1, 2, 3], top=0)
    assert len(token_logprobs(rows, [1], top=0)) == 1
    assert token_logprobs(rows, [], top=0) == []


@pytest.mark.parametrize("knob", sorted(KNOBS))
def test_processed_ones_are_those_of_the_law(knob: str) -> None:
    knobs: dict[str, Any] = {"temperature": 0.7, **KNOBS[knob]}
    row = Table(3)([1, 2])
    sampler = make_sampler([1, 2, 2], **knobs)
    sampler.commit([3])
    law = sampler.law(row, drafted=[2])
    assert not isinstance(law, int)
    want = naive_law(row.tolist(), [1, 2, 2], [3, 2], **knobs)
    for token in range(VOCAB):
        got = law_logprob(law, token, top=VOCAB)
        assert math.exp(got.logprob) == pytest.approx(want[token], abs=1e-9)
        assert dict(got.top).keys() == {i for i in range(VOCAB) if want[i] > 0}
        values = [value for _, value in got.top]
        assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("width", range(6))
def test_one_per_emitted_id_and_equal_to_a_teacher_forced_pass(width: int, top: int) -> None:
    target, prompt = Table(1), [1, 2]
    sampler = make_sampler(prompt, temperature=1.0, presence_penalty=0.5)
    ids, said = list(prompt), []
    drafter = picking(Table(2))
    while len(ids) < 30:
        draft = drafter(sampler, ids, width)
        rows = np.stack([target([*ids, *draft[:j]]) for j in range(len(draft) + 1)])
        (verdict,) = verify.invariant(rows, [draft], [sampler])
        given = [*draft[: verdict.num_accepted], verdict.next_token]
        said += token_logprobs(rows, given, top=top)
        sampler.commit(given)
        ids += given
    assert len(said) == len(ids) - len(prompt)
    for place, one in enumerate(said, start=len(prompt)):
        check(one, naive(target(ids[:place]).tolist(), ids[place], top))
