"""Drafts change nothing: the ids are the target's and the seed's, whoever drafts and how many."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sampling_kit import (
    END,
    KNOBS,
    VOCAB,
    Drafter,
    Table,
    make_sampler,
    picking,
    run_invariant,
    run_rejection,
)

from paceline.draft import verify
from paceline.sampling.request import Sampler

PROMPT = [1, 2, 2]
LENGTH = 40
TARGET = Table(1)


def guessing(seed: int) -> Drafter:
    """A drafter that knows nothing."""
    rng = random.Random(seed)

    def draft(sampler: Sampler, ids: list[int], count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    return draft


def knowing(answer: Sequence[int], *, wrong: bool = False) -> Drafter:
    """A drafter that knows the answer, and tells it or something else."""

    def draft(sampler: Sampler, ids: list[int], count: int) -> list[int]:
        there = len(ids) - len(PROMPT)
        told = answer[there : there + count]
        return [(token + 1) % VOCAB for token in told] if wrong else list(told)

    return draft


def random_knobs(rng: random.Random) -> dict[str, Any]:
    knobs: dict[str, Any] = {"temperature": rng.choice([0.0, 0.3, 1.0, 1.7])}
    for knob in KNOBS.values():
        if rng.random() < 0.4:
            knobs.update(knob)
    if rng.random() < 0.3:
        knobs["top_k"] = rng.randrange(1, VOCAB)
    return knobs


def fence(ids: Sequence[int]) -> np.ndarray:
    """A grammar: what may come depends on all that came; never nothing."""
    allowed = np.array([(token + sum(ids)) % 3 != 0 for token in range(VOCAB)])
    allowed[3] = True
    return allowed


def check_all_drafters(knobs: dict[str, Any], seed: int, *, masked: bool = False) -> None:
    mask_of = fence if masked else None

    def run(drafter: Drafter | None, widths: Any) -> tuple[list[int], int]:
        sampler = make_sampler(PROMPT, seed=seed, **knobs)
        out = run_invariant(
            TARGET, sampler, PROMPT, LENGTH, drafter=drafter, widths=widths, mask_of=mask_of
        )
        if sampler.knobs.penalizes:
            assert sampler.history.counts == dict(Counter(out[0]))
        return out

    want, none = run(None, lambda step: 0)
    assert none == 0
    for width in range(9):
        assert run(picking(Table(2), mask_of), lambda step, k=width: k)[0] == want
    rng = random.Random(seed)
    for drafter in (guessing(seed), picking(Table(2)), knowing(want, wrong=True)):
        assert run(drafter, lambda step: rng.randrange(9))[0] == want
    got, accepted = run(knowing(want, wrong=True), lambda step: 4)
    assert (got, accepted) == (want, 0)
    for drafter in (knowing(want), picking(TARGET, mask_of)):
        got, accepted = run(drafter, lambda step: 4)
        assert got == want
        assert accepted == LENGTH - LENGTH // 5


@pytest.mark.parametrize("masked", [False, True], ids=["", "grammar"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("knob", sorted(KNOBS))
def test_each_knob_alone(knob: str, temperature: float, masked: bool) -> None:
    check_all_drafters({"temperature": temperature, **KNOBS[knob]}, seed=3, masked=masked)


@pytest.mark.parametrize("block", range(10))
def test_two_hundred_random_combinations(block: int) -> None:
    for case in range(20):
        seed = 20 * block + case
        rng = random.Random(seed)
        knobs = random_knobs(rng)
        want, _ = run_invariant(TARGET, make_sampler(PROMPT, seed=seed, **knobs), PROMPT, LENGTH)
        for drafter in (guessing(seed), picking(Table(2))):
            got, _ = run_invariant(
                TARGET,
                make_sampler(PROMPT, seed=seed, **knobs),
                PROMPT,
                LENGTH,
                drafter=drafter,
                widths=lambda step, rng=rng: rng.randrange(9),
            )
            assert got == want, knobs


def test_at_temperature_zero_it_is_the_greedy_rule() -> None:
    rng = np.random.default_rng(0)
    logits = rng.integers(-2, 3, (40, VOCAB)).astype(np.float32)
    logits[7, 2] = np.nan
    drafts = [rng.integers(0, VOCAB, 3).tolist() for _ in range(10)]
    drafts[3] = logits[12:15].argmax(-1).tolist()
    samplers = [make_sampler() for _ in drafts]
    assert verify.invariant(logits, drafts, samplers) == verify.greedy(logits, drafts)
    # A knob that changes nothing takes the other road and must come to the same place.
    samplers = [make_sampler(allowed_token_ids=list(range(VOCAB))) for _ in drafts]
    assert not samplers[0].is_argmax
    assert verify.invariant(logits, drafts, samplers) == verify.greedy(logits, drafts)


def test_a_batch_of_mixed_knobs_and_widths_is_each_request_alone() -> None:
    rng = random.Random(1)
    knobs = [random_knobs(rng) for _ in range(16)]
    knobs[0] = knobs[9] = {"temperature": 0.0}
    alone = [
        run_invariant(TARGET, make_sampler(PROMPT, seed=n, **each), PROMPT, LENGTH)[0]
        for n, each in enumerate(knobs)
    ]
    samplers = [make_sampler(PROMPT, seed=n, **each) for n, each in enumerate(knobs)]
    texts = [list(PROMPT) for _ in knobs]
    drafter = picking(Table(2))
    while live := [n for n, ids in enumerate(texts) if len(ids) < len(PROMPT) + LENGTH]:
        rng.shuffle(live)
        drafts = [drafter(samplers[n], texts[n], rng.randrange(9)) for n in live]
        rows, offsets = [np.full(VOCAB, np.nan, np.float32)], []
        for n, draft in zip(live, drafts, strict=True):
            offsets.append(len(rows))
            rows += [TARGET([*texts[n], *draft[:j]]) for j in range(len(draft) + 1)]
            rows.append(np.full(VOCAB, np.nan, np.float32))
        verdicts = verify.invariant(
            torch.from_numpy(np.stack(rows)),
            drafts,
            [samplers[n] for n in live],
            offsets=offsets,
            masks=[None for _ in live],
        )
        for n, draft, verdict in zip(live, drafts, verdicts, strict=True):
            given = [*draft[: verdict.num_accepted], verdict.next_token]
            samplers[n].commit(given)
            texts[n] += given
    assert [ids[len(PROMPT) :][:LENGTH] for ids in texts] == alone


def test_the_seed_alone_decides_and_other_seeds_decide_otherwise() -> None:
    def ids(seed: int | None) -> tuple[int, ...]:
        sampler = make_sampler(PROMPT, seed=seed, temperature=1.0)
        return tuple(run_invariant(TARGET, sampler, PROMPT, LENGTH)[0])

    assert ids(5) == ids(5)
    assert len({ids(seed) for seed in range(20)} | {ids(None) for _ in range(20)}) == 40


def test_a_request_taken_up_again_goes_on_as_it_would_have() -> None:
    knobs = {"temperature": 1.0, "frequency_penalty": 0.5, "bad_word_ids": [(2, 3)], "seed": 9}
    want, _ = run_invariant(TARGET, make_sampler(PROMPT, **knobs), PROMPT, LENGTH)
    for cut in range(1, LENGTH, 7):
        resumed = make_sampler(PROMPT, **knobs)
        resumed.commit(want[:cut])
        got, _ = run_invariant(TARGET, resumed, [*PROMPT, *want[:cut]], LENGTH - cut)
        assert got == want[cut:]


def test_the_noise_goes_by_the_absolute_position() -> None:
    want, _ = run_invariant(TARGET, make_sampler(PROMPT, temperature=1.0), PROMPT, LENGTH)
    for cut in range(1, LENGTH, 7):
        longer = [*PROMPT, *want[:cut]]
        sampler = make_sampler(longer, temperature=1.0)
        assert run_invariant(TARGET, sampler, longer, LENGTH - cut)[0] == want[cut:]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_that_settles_it_settles_it_under_drafts(temperature: float) -> None:
    sampler = make_sampler(PROMPT, temperature=temperature, logit_bias={5: 100.0})
    got, accepted = run_invariant(
        TARGET, sampler, PROMPT, LENGTH, drafter=picking(Table(2)), widths=lambda step: 3
    )
    assert got == [5] * LENGTH
    assert accepted == LENGTH - LENGTH // 4


def test_the_end_cannot_come_before_the_minimum_length_whatever_is_drafted() -> None:
    target = Table(1)
    target.rows[..., END] += 20
    for width in range(9):
        sampler = make_sampler(PROMPT, temperature=1.0, min_tokens=7)
        got, _ = run_invariant(
            target, sampler, PROMPT, 12, drafter=picking(target), widths=lambda step, k=width: k
        )
        assert END not in got[:7]
        assert got[7] == END


@pytest.mark.parametrize("knob", ["allowed_token_ids", "bad_words", "min_tokens"])
def test_drafts_are_never_what_the_target_forbids(knob: str) -> None:
    drafter = Table(2)
    drafter.rows[..., [1, 4, END]] += 3
    for seed in range(30):
        sampler = make_sampler(PROMPT, temperature=1.0, seed=seed, **KNOBS[knob])
        ids = list(PROMPT)
        drafted: list[int] = []
        for _ in range(6):
            pick = sampler.pick(drafter([*ids, *drafted]), drafted=drafted)
            drawn, _ = sampler.draw(drafter([*ids, *drafted]), drafted=drafted)
            law = sampler.law(TARGET([*ids, *drafted]), drafted=drafted)
            assert not isinstance(law, int)
            assert law.probabilities()[pick] > 0
            assert law.probabilities()[drawn] > 0
            drafted.append(pick)


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
def test_rejection_in_a_batch_is_each_request_alone(block: bool) -> None:
    drafter = Table(2)
    rows: list[np.ndarray] = []
    drafts, laws, samplers, alone = [], [], [], []
    for n in range(6):
        sampler = make_sampler(PROMPT, temperature=1.0, seed=n, top_p=0.5 + n / 12)
        draft: list[int] = []
        kept = []
        for _ in range(n):
            token, law = sampler.draw(drafter([*PROMPT, *draft]), drafted=draft)
            draft.append(token)
            kept.append(law)
        mine = [TARGET([*PROMPT, *draft[:j]]) for j in range(n + 1)]
        alone += verify.rejection(np.stack(mine), [draft], [sampler], laws=[kept], block=block)
        drafts.append(draft)
        laws.append(kept)
        samplers.append(sampler)
        rows += mine
    together = verify.rejection(np.stack(rows), drafts, samplers, laws=laws, block=block)
    assert together == alone
    assert {verdict.num_accepted for verdict in together} > {0}


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
def test_a_drafter_that_is_the_target_is_always_accepted(block: bool) -> None:
    for temperature in (0.0, 0.6, 1.0):
        sampler = make_sampler(PROMPT, temperature=temperature, top_p=0.9, repetition_penalty=1.3)
        ids, accepted = run_rejection(
            TARGET, TARGET, sampler, PROMPT, LENGTH, num_drafts=4, block=block
        )
        assert accepted == [4] * len(accepted)
        assert len(ids) == LENGTH


def test_block_verification_accepts_more_in_the_long_run() -> None:
    means = []
    for block in (False, True):
        steps = []
        for seed in range(60):
            sampler = make_sampler(PROMPT, temperature=1.0, seed=seed)
            steps += run_rejection(
                TARGET, Table(2), sampler, PROMPT, LENGTH, num_drafts=4, block=block
            )[1]
        means.append(np.mean(steps))
    assert means[1] > means[0]


# Rows that give no token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("knob", ["none", "top_k", "frequency_penalty"])
def test_a_broken_row_is_an_error_where_it_is_reached_and_nothing_elsewhere(
    knob: str, temperature: float
) -> None:
    sampler = make_sampler(PROMPT, temperature=temperature, **KNOBS[knob])
    draft: list[int] = []
    for _ in range(4):
        draft.append(sampler.pick(TARGET([*PROMPT, *draft]), drafted=draft))
    rows = np.stack([TARGET([*PROMPT, *draft[:j]]) for j in range(4)])
    for broken in range(4):
        bad = rows.copy()
        bad[broken, 6] = np.nan
        (verdict,) = verify.invariant(bad, [draft[:3]], [sampler])
        assert (verdict.num_accepted, verdict.next_token) == (broken, -1)
        assert verdict.error == "non-finite logits"
        wrong = [*draft[:1], (draft[1] + 1) % VOCAB, draft[2]]
        (verdict,) = verify.invariant(bad, [wrong], [sampler])
        if broken > 1:
            assert (verdict.num_accepted, verdict.next_token) == (1, draft[1])
            assert verdict.error is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_where_nothing_is_allowed_is_an_error_of_its_own(temperature: float) -> None:
    samplers = [make_sampler(PROMPT, temperature=temperature) for _ in range(2)]
    rows = np.stack([TARGET(PROMPT)] * 2)
    masks = [[np.zeros(VOCAB, np.bool_)], None]
    bad, good = verify.invariant(rows, [[], []], samplers, masks=masks)
    assert (bad.num_accepted, bad.next_token, bad.error) == (0, -1, "no token is allowed here")
    assert good.error is None
    bad, good = verify.rejection(rows, [[], []], samplers, laws=[[], []], masks=masks)
    assert (bad.next_token, bad.error) == (-1, "no token is allowed here")
    assert good.error is None


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
def test_rejection_reports_a_broken_row_where_it_is_reached(block: bool) -> None:
    sampler = make_sampler(PROMPT, temperature=1.0)
    token, law = sampler.draw(TARGET(PROMPT))
    rows = np.stack([TARGET(PROMPT), TARGET([*PROMPT, token])])
    rows[1, 0] = np.nan
    (verdict,) = verify.rejection(rows, [[token]], [sampler], laws=[[law]], block=block)
    assert (verdict.num_accepted, verdict.next_token) == (1, -1)
    assert verdict.error == "non-finite logits"
    rows[0, 0] = np.nan
    (verdict,) = verify.rejection(rows, [[token]], [sampler], laws=[[law]], block=block)
    assert (verdict.num_accepted, verdict.next_token) == (0, -1)


@pytest.mark.parametrize("rule", ["invariant", "rejection"])
def test_rows_outside_the_logits_are_refused(rule: str) -> None:
    rows = np.zeros((2, VOCAB), np.float32)
    more = {"laws": [[None, None]]} if rule == "rejection" else {}
    with pytest.raises(ValueError, match="the logits have 2"):
        getattr(verify, rule)(rows, [[0, 1]], [make_sampler()], **more)


def test_a_draft_that_is_no_id_is_never_accepted() -> None:
    rows = np.stack([TARGET(PROMPT)] * 2)
    rows[0] = np.nan
    for knobs in ({}, {"temperature": 1.0}):
        (verdict,) = verify.invariant(rows, [[-1]], [make_sampler(**knobs)])
        assert (verdict.num_accepted, verdict.next_token) == (0, -1)
        assert verdict.error == "non-finite logits"


# The device's road, which is the same code on any device


def test_rows_raced_on_a_device_pick_what_the_host_picks() -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((64, 4096)).astype(np.float32) * 2
    logits[5, 9] = np.nan
    logits[6, 9] = np.inf
    logits[7] = -np.inf
    logits[8, :4000] = -np.inf
    samplers = [
        make_sampler(vocab=4096, temperature=(0.3, 1.0, 1.7)[n % 3], seed=n) for n in range(64)
    ]
    want = [max(sampler.pick(row), -1) for sampler, row in zip(samplers, logits, strict=True)]
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        got = verify.race_rows(
            torch.from_numpy(logits).to(device),
            [sampler.key() for sampler in samplers],
            [sampler.knobs.temperature for sampler in samplers],
        )
        assert got == want
    assert want[5:8] == [-1, -1, -1]
    assert len(set(want)) > 50


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_batch_on_a_device_is_the_batch_on_the_host() -> None:
    rng = random.Random(5)
    knobs = [random_knobs(rng) for _ in range(24)] + [{"temperature": 0.8}] * 8 + [{}] * 4
    samplers = [make_sampler(PROMPT, seed=n, **each) for n, each in enumerate(knobs)]
    drafts = [picking(TARGET)(sampler, list(PROMPT), rng.randrange(5)) for sampler in samplers]
    rows = torch.from_numpy(
        np.stack([TARGET([*PROMPT, *draft[:j]]) for draft in drafts for j in range(len(draft) + 1)])
    )
    want = verify.invariant(rows, drafts, samplers)
    assert verify.invariant(rows.cuda(), drafts, samplers) == want
    assert sum(verdict.num_accepted for verdict in want) == sum(len(draft) for draft in drafts)
