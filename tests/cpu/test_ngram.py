"""Prompt lookup: the table against a scan of the whole text, in any history."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import continuation, decode, toy_config, toy_engine

from paceline.draft import NgramProposer, NgramState
from paceline.types import ConfigError, Draft, DraftRequest, SamplingParams

NO_STREAMS = torch.zeros(0)


def ask(history: list[int], num_drafts: int = 3, mask: torch.Tensor | None = None) -> DraftRequest:
    return DraftRequest(
        last_token=history[-1],
        position=len(history) - 1,
        target_hidden=NO_STREAMS,
        num_drafts=num_drafts,
        history=history,
        grammar_bitmask=mask,
    )


def scan(history: list[int], count: int, *, low: int, high: int, window: int) -> list[int]:
    """The rule, told by looking everywhere."""
    length = len(history)
    for n in range(high, low - 1, -1):
        for start in range(length - n - 1, max(-1, length - window - 1), -1):
            if history[start : start + n] == history[length - n :]:
                text = list(history)
                while len(text) < length + count:
                    text.append(text[start + n + len(text) - length])
                return text[length:]
    return []


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    ids=st.integers(1, 5),
    low=st.integers(1, 4),
    more=st.integers(0, 3),
    window=st.sampled_from([1, 2, 3, 5, 8, 17, 40, 2048]),
    steps=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=60),
    prompt=st.integers(1, 50),
)
def test_the_table_says_what_a_scan_says(
    seed: int,
    ids: int,
    low: int,
    more: int,
    window: int,
    steps: list[tuple[int, int]],
    prompt: int,
) -> None:
    rng = random.Random(seed)
    history = [rng.randrange(ids) for _ in range(prompt)]
    ngram = NgramProposer(min_ngram=low, max_ngram=low + more, window=window)
    state = ngram.alloc_state()
    for num_drafts, accept in steps:
        draft = ngram.propose(ask(history, num_drafts), state)
        assert draft.tokens == scan(history, num_drafts, low=low, high=low + more, window=window)
        accept = min(accept, len(draft.tokens))
        if draft.tokens:
            ngram.after_verify(accept, state)
        history += [*draft.tokens[:accept], rng.randrange(ids)]
        # Steps decoded without a proposal in between, as many as come.
        history += [rng.randrange(ids) for _ in range(rng.choice([0, 0, 0, 1, 12]))]
        if rng.random() < 0.1:
            history = list(history)  # a resumed sequence may come with a list of its own


def test_tables_hold_no_more_than_the_window() -> None:
    rng = random.Random(0)
    ngram = NgramProposer(min_ngram=1, max_ngram=3, window=50)
    state = ngram.alloc_state()
    history = [rng.randrange(10_000) for _ in range(500)]
    for _ in range(300):
        ngram.propose(ask(history), state)
        assert all(len(ends) <= 50 for ends in state.ends)
        assert sum(map(len, state.ends)) > 100
        history += [rng.randrange(10_000) for _ in range(rng.randrange(1, 5))]


def test_a_shorter_text_begins_anew() -> None:
    ngram = NgramProposer(min_ngram=2)
    state = ngram.alloc_state()
    assert ngram.propose(ask([1, 2, 3, 1, 2]), state).tokens == [3, 1, 2]
    assert ngram.propose(ask([9, 1, 2]), state).tokens == []
    assert ngram.propose(ask([9, 1, 2, 7, 1, 2]), state).tokens == [7, 1, 2]


def test_a_freed_state_knows_nothing() -> None:
    ngram = NgramProposer(min_ngram=2)
    state = ngram.alloc_state()
    ngram.propose(ask([1, 2, 3, 1, 2]), state)
    ngram.free_state(state)
    ngram.free_state(state)
    assert state.ends == []
    with pytest.raises(ValueError, match="num_accepted is 1; the last propose drafted 0"):
        ngram.after_verify(1, state)


def test_it_drafts_what_followed_last_time() -> None:
    draft = NgramProposer(max_ngram=3).propose(
        ask([1, 2, 3, 4, 9, 2, 3, 5, 6, 7, 2, 3]), NgramState()
    )
    assert draft == Draft(tokens=[5, 6, 7])


def test_a_period_goes_on() -> None:
    for period in (1, 2, 3):
        history = list(range(period)) * 6
        draft = NgramProposer().propose(ask(history, 8), NgramState())
        assert draft.tokens == (list(range(period)) * 8)[:8]


@pytest.mark.parametrize("device_dtype", [torch.int32])
def test_a_grammar_refuses_the_first_draft_only(device_dtype: torch.dtype) -> None:
    ngram = NgramProposer()
    history = [1, 2, 40, 3, 1, 2]
    for allowed, tokens in (({40}, [40, 3, 1]), ({3, 1, 39, 8}, []), ({31}, [])):
        words = [0, 0]
        for token in allowed:
            words[token // 32] |= 1 << (token % 32)
        signed = [w - (1 << 32) if w >> 31 else w for w in words]
        mask = torch.tensor(signed, dtype=device_dtype)
        assert ngram.propose(ask(history, 3, mask), ngram.alloc_state()).tokens == tokens
    # Words that end before the token do not allow it.
    short = torch.tensor([-1], dtype=device_dtype)
    assert ngram.propose(ask(history, 3, short), ngram.alloc_state()).tokens == []


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"min_ngram": 0}, "min_ngram is 0; allowed is at least 1"),
        ({"window": 0}, "window is 0; allowed is at least 1"),
        ({"max_ngram": 1, "min_ngram": 2}, "max_ngram is 1; allowed is at least min_ngram, 2"),
    ],
)
def test_bad_numbers_are_refused(options: dict[str, int], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        NgramProposer(**options)


def test_a_proposal_does_not_grow_with_the_text() -> None:
    """Work is counted, not timed: looks at the history in a step of a long text."""

    class Counting(list[int]):
        reads = 0

        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            Counting.reads += 1
            return super().__getitem__(at)

    rng = random.Random(1)
    ngram = NgramProposer()
    work = {}
    for length in (100, 20_000):
        history = Counting(rng.randrange(50) for _ in range(length))
        state = ngram.alloc_state()
        ngram.propose(ask(history), state)
        Counting.reads = 0
        for _ in range(50):
            history.append(rng.randrange(50))
            ngram.propose(ask(history), state)
        work[length] = Counting.reads
    assert work[20_000] < 2 * work[100] < 50 * 40


def test_tokens_in_an_engine_do_not_change_and_states_come_home() -> None:
    prompts = [[1, 2, 3, 4] * 10, [5, 6] * 30, list(range(40))]
    params = SamplingParams(max_tokens=40)
    engine = toy_engine(
        config=toy_config(eos_token_ids=()), proposer=NgramProposer(min_ngram=1), num_drafts=4
    )
    for prompt, (tokens, _) in zip(prompts, decode(engine, prompts, params), strict=True):
        assert tokens == continuation(prompt, 40)
    assert engine.num_proposer_failures == 0
