"""The acceptance rules in exact arithmetic, and the shared-noise rule by counting.

Counts are compared by chi-square. Seeds are fixed, so that the tests are deterministic; each of
them would have raised a false alarm with a chance of 1e-4 when its seed was chosen, all of them
together with less than 1 %.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from sampling_kit import (
    KNOBS,
    VOCAB,
    Table,
    joint_law,
    make_sampler,
    p_value,
    run_invariant,
)

from paceline.sampling import rules
from paceline.sampling.noise import row_key
from paceline.sampling.processors import Law

ALARM = 1e-4
PROMPT = [1, 2, 2]
TEMPERATURES = [0.3, 1.0, 1.7]
Rule = Callable[..., tuple[int, int]]


# Counting


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("knob", sorted(KNOBS))
def test_picks_follow_the_law_of_the_target(knob: str, temperature: float) -> None:
    target, knobs = Table(5), {"temperature": temperature, **KNOBS[knob]}
    counts = np.zeros(VOCAB**2, np.int64)
    for seed in range(1500):
        ids, _ = run_invariant(target, make_sampler(PROMPT, seed=seed, **knobs), PROMPT, 2)
        counts[ids[0] * VOCAB + ids[1]] += 1
    assert p_value(counts, joint_law(target, PROMPT, 2, **knobs)) > ALARM


def test_the_race_follows_a_law_of_any_shape() -> None:
    weights = np.array([1.0, 0.5, 0.0, 1e-3, 0.25, 0.25, 1.0, 0.01])
    law = Law(VOCAB, None, weights)
    sparse = Law(64, np.arange(3, 64, 8), weights)
    counts = np.zeros(VOCAB, np.int64)
    for position in range(20000):
        counts[rules.race(law, row_key(1, position))] += 1
    assert p_value(counts, weights / weights.sum()) > ALARM
    counts[:] = 0
    for position in range(20000):
        counts[rules.race(sparse, row_key(2, position)) // 8] += 1
    assert p_value(counts, weights / weights.sum()) > ALARM


def test_the_chi_square_notices_a_wrong_law() -> None:
    target = Table(5)
    counts = np.zeros(VOCAB**2, np.int64)
    for seed in range(1200):
        ids, _ = run_invariant(target, make_sampler(PROMPT, seed=seed, temperature=1.0), PROMPT, 2)
        counts[ids[0] * VOCAB + ids[1]] += 1
    for wrong in ({"temperature": 0.85}, {"temperature": 1.0, "presence_penalty": 0.5}):
        assert p_value(counts, joint_law(target, PROMPT, 2, **wrong)) < ALARM


# Exact arithmetic: the uniforms are integrated out by bisection, nothing is drawn

SMALL = 3


def threshold(below: Callable[[float], bool]) -> float:
    """Where a predicate of [0, 1] turns from true to false."""
    low, high = 0.0, 1.0
    if not below(low):
        return 0.0
    for _ in range(46):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high if high < 1 else 1.0


def outcome(
    rule: Rule,
    p: Sequence[np.ndarray],
    q: Sequence[np.ndarray | None],
    drafts: Sequence[int],
    *,
    in_turn: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """[n + 1] chance of each accepted count, and [n + 1, SMALL] the law of the token behind."""
    n = len(drafts)
    never = 1.0  # no chance is above 1

    def call(accept: Sequence[float], residual: float = 0.5) -> tuple[int, int]:
        return rule(p, q, drafts, accept=accept, residual=residual)

    chances = []
    for j in range(n):
        rest = [0.0] * n if in_turn else [never] * n

        def accepts(u: float, j: int = j, rest: list[float] = rest) -> bool:
            return call([*rest[:j], u, *rest[j + 1 :]])[0] > j or (
                not in_turn and call([*rest[:j], u, *rest[j + 1 :]])[0] == j + 1
            )

        chances.append(threshold(accepts))
    counts = np.zeros(n + 1)
    for count in range(n + 1):
        if in_turn:
            counts[count] = np.prod(chances[:count]) * (1 - chances[count] if count < n else 1)
        else:
            counts[count] = (chances[count - 1] if count else 1) * np.prod(
                [1 - chance for chance in chances[count:]]
            )
    behind = np.zeros((n + 1, SMALL))
    for count in range(n + 1):
        if counts[count] < 1e-13:
            continue
        accept = [0.0] * count + [never] * (n - count)
        assert call(accept)[0] == count
        reached = [
            threshold(lambda u, a=accept, t=token: call(a, u)[1] <= t) for token in range(SMALL)
        ]
        behind[count] = np.diff(reached, prepend=0)
    return counts, behind


def random_rows(rng: np.random.Generator, count: int) -> dict[tuple[int, ...], np.ndarray]:
    """A law behind every prefix of up to `count` ids, some with ids that cannot come."""
    rows = {}
    for length in range(count + 1):
        for prefix in itertools.product(range(SMALL), repeat=length):
            law = rng.dirichlet([rng.choice([0.3, 1.0, 5.0])] * SMALL)
            if rng.random() < 0.3:
                law[rng.integers(SMALL)] = 0
            rows[prefix] = law / law.sum()
    return rows


def whole_law(
    rule: Rule, p: dict[tuple[int, ...], np.ndarray], q: dict[tuple[int, ...], np.ndarray], n: int
) -> tuple[dict[tuple[int, ...], float], float]:
    """The law of n + 1 ids when a step of n drafts is followed by the target, and its accepted."""
    law = dict.fromkeys(itertools.product(range(SMALL), repeat=n + 1), 0.0)
    mean = 0.0
    for drafts in itertools.product(range(SMALL), repeat=n):
        chance = np.prod([q[drafts[:j]][drafts[j]] for j in range(n)])
        if not chance:
            continue
        counts, behind = outcome(
            rule,
            [p[drafts[:j]] for j in range(n + 1)],
            [q[drafts[:j]] for j in range(n)],
            drafts,
            in_turn=rule is rules.rejection,
        )
        mean += chance * float(counts @ np.arange(n + 1))
        for ids in law:
            for count in range(n + 1):
                if ids[:count] == drafts[:count]:
                    ahead = np.prod([p[ids[:j]][ids[j]] for j in range(count + 1, n + 1)])
                    law[ids] += chance * counts[count] * behind[count, ids[count]] * ahead
    return law, mean


@pytest.mark.parametrize("seed", range(12))
def test_both_rejection_rules_keep_the_law_exactly_and_block_accepts_no_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 1 + seed % 3 if seed < 6 else 2
    p, q = random_rows(rng, n), random_rows(rng, n)
    if seed == 7:
        q = p
    means = []
    for rule in (rules.rejection, rules.block_rejection):
        law, mean = whole_law(rule, p, q, n)
        for ids, chance in law.items():
            want = np.prod([p[ids[:j]][ids[j]] for j in range(n + 1)])
            assert chance == pytest.approx(want, abs=1e-9), (rule, ids)
        means.append(mean)
    assert means[1] >= means[0] - 1e-9
    if n == 1:
        overlap = np.minimum(p[()], q[()]).sum()
        assert means == pytest.approx([overlap, overlap], abs=1e-9)
    if seed == 7:
        assert means == pytest.approx([n, n], abs=1e-9)


def test_block_verification_accepts_more_where_drafts_are_judged_together() -> None:
    # The example of the paper: two ids, laws that do not depend on the past.
    p, q = np.array([1 / 3, 2 / 3, 0]), np.array([2 / 3, 1 / 3, 0])
    rows = {ids: p for n in range(3) for ids in itertools.product(range(SMALL), repeat=n)}
    drafts = dict.fromkeys(rows, q)
    _, token = whole_law(rules.rejection, rows, drafts, 2)
    _, block = whole_law(rules.block_rejection, rows, drafts, 2)
    assert token == pytest.approx(10 / 9, abs=1e-9)
    assert block == pytest.approx(11 / 9, abs=1e-9)


@pytest.mark.parametrize("rule", [rules.rejection, rules.block_rejection])
def test_drafts_chosen_without_chance_keep_the_law(rule: Rule) -> None:
    rng = np.random.default_rng(3)
    for drafts in itertools.product(range(SMALL), repeat=2):
        p = random_rows(rng, 2)
        counts, behind = outcome(
            rule,
            [p[drafts[:j]] for j in range(3)],
            [None, None],
            drafts,
            in_turn=rule is rules.rejection,
        )
        first = counts[0] * behind[0]
        first[drafts[0]] += counts[1:].sum()
        assert first == pytest.approx(p[()], abs=1e-9)
        assert counts[1:].sum() == pytest.approx(p[()][drafts[0]], abs=1e-9)


@pytest.mark.parametrize("rule", [rules.rejection, rules.block_rejection])
def test_a_row_without_a_law_stops_there_and_gives_no_token(rule: Rule) -> None:
    law = np.full(SMALL, 1 / SMALL)
    for broken in range(3):
        p = [law if j != broken else None for j in range(3)]
        taken = rule(p, [law, law], [0, 1], accept=[0.0, 0.0], residual=0.5)
        assert taken == (broken, -1)
    # Behind a refused draft nothing matters.
    sure = np.array([0.0, 0.0, 1.0])
    taken = rule([sure, None, None], [law, law], [0, 1], accept=[0.5, 0.5], residual=0.5)
    assert taken == (0, 2)


@pytest.mark.parametrize("rule", [rules.rejection, rules.block_rejection])
def test_a_draft_its_own_law_excludes_is_never_accepted_unless_the_target_has_it(
    rule: Rule,
) -> None:
    p, q = np.array([0.0, 1.0, 0.0]), np.array([0.5, 0.0, 0.5])
    assert rule([p, p], [q], [0], accept=[0.0], residual=0.9) == (0, 1)


@pytest.mark.parametrize("rule", [rules.rejection, rules.block_rejection])
def test_laws_that_are_all_but_sure_and_differ_by_next_to_nothing_are_judged(rule: Rule) -> None:
    p, q = np.array([1.0, 1e-44, 0.0]), np.array([1.0, 0.0, 1e-44])
    assert rule([p, p, p], [q, q], [0, 0], accept=[0.9, 0.9], residual=0.5) == (2, 0)


def test_drawing_never_gives_what_cannot_come() -> None:
    weights = np.array([0.0, 0.1, 0.0, 0.7, 0.2, 0.0, 0.0])
    top = np.nextafter(1.0, 0)
    assert rules.draw(weights, 0.0) == 1
    assert rules.draw(weights, top) == 4
    tiny = np.array([1e-300, 0.0, 1.0, 1e-17, 0.0])
    for uniform in (0.0, 1e-310, 0.5, top):
        assert tiny[rules.draw(tiny, uniform)] > 0
    assert rules.draw(np.array([0.0, 5e-324, 0.0]), 0.9) == 1
