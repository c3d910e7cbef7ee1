"""Drafts drawn from q and judged by p: counted over whole decoding loops.

Counts are compared by chi-square. Seeds are fixed, so that the tests are deterministic; each of
them would have raised a false alarm with a chance of 1e-4 when its seed was chosen, all of them
together with less than 1 %. The loops draw one to three drafts a step and compare two ids together,
so that the second falls behind a refused draft, an accepted one or a step's end.
"""

from __future__ import annotations

import numpy as np
import pytest
from sampling_kit import (
    KNOBS,
    VOCAB,
    Table,
    joint_law,
    make_sampler,
    naive_law,
    p_value,
    run_rejection,
)

from paceline.draft import verify
from paceline.sampling.processors import Law

ALARM = 1e-4
PROMPT = [1, 2, 2]


CASES = [
    (knob, temperature, block)
    for knob in sorted(KNOBS)
    for temperature in (0.3, 1.0, 1.7)
    for block in (False, True)
    if not block or temperature == 1 or knob == "none"
]


@pytest.mark.parametrize(("knob", "temperature", "block"), CASES)
def test_rejection_follows_the_law_of_the_target(
    knob: str, temperature: float, block: bool
) -> None:
    target, drafter = Table(5), Table(6)
    knobs = {"temperature": temperature, **KNOBS[knob]}
    counts = np.zeros(VOCAB**2, np.int64)
    for seed in range(500):
        sampler = make_sampler(PROMPT, seed=seed, **knobs)
        ids, _ = run_rejection(
            target, drafter, sampler, PROMPT, 2, num_drafts=1 + seed % 3, block=block
        )
        counts[ids[0] * VOCAB + ids[1]] += 1
    assert p_value(counts, joint_law(target, PROMPT, 2, **knobs)) > ALARM


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("knob", sorted(KNOBS))
def test_drafts_are_drawn_from_the_law_that_judges_them(knob: str, temperature: float) -> None:
    """At each place of a draft; and that law is the drafter's row under the request's knobs."""
    knobs = {"temperature": temperature, **KNOBS[knob]}
    sampler = make_sampler(PROMPT, **knobs)
    drafter = Table(6)
    for drafted in ([], [2, 3]):
        row = drafter([*PROMPT, *drafted])
        want = np.array(naive_law(row.tolist(), PROMPT, drafted, **knobs))
        counts = np.zeros(VOCAB, np.int64)
        for seed in range(3000):
            sampler.seed = seed
            token, law = sampler.draw(row, drafted=drafted)
            assert law is not None
            counts[token] += 1
        np.testing.assert_allclose(law, want, atol=1e-9)
        assert p_value(counts, want) > ALARM


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_rejection_accepts_the_sum_of_min_p_q(temperature: float) -> None:
    target, drafter = Table(8)(PROMPT), Table(9)(PROMPT)
    rows = np.stack([target, target])
    total, accepted = 12000, 0
    sampler = make_sampler(PROMPT, temperature=temperature)
    for seed in range(total):
        sampler.seed = seed
        token, law = sampler.draw(drafter)
        (verdict,) = verify.rejection(rows, [[token]], [sampler], laws=[[law]])
        accepted += verdict.num_accepted
    p, q = (sampler.law(row) for row in (target, drafter))
    assert isinstance(p, Law)
    assert isinstance(q, Law)
    overlap = np.minimum(p.probabilities(), q.probabilities()).sum()
    assert 0.2 < overlap < 0.8
    assert accepted / total == pytest.approx(overlap, abs=0.01)
