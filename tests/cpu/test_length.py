"""Draft lengths: never beyond a limit, near the best fixed one, and hardly ever dearer than none.

What the controller is worth is shown on a simulation whose costs are known
(`benchmarks/length_simulation.py`); here on some of its scenarios.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.length import (
    FixedLength,
    LengthController,
    LengthPolicy,
    SequenceView,
    StepRecord,
    _rising,
)
from paceline.types import ConfigError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    if "common" not in sys.modules:
        load("common")
    return load("length_simulation")


def views(*limits: int, fixed: int | None = None) -> list[SequenceView]:
    return [SequenceView(i, limit, fixed) for i, limit in enumerate(limits)]


class Machine:
    """Steps of known cost and acceptance for one policy.

    Seconds are 1 for the first row, `row` for each further one and `draft` for each draft.
    """

    def __init__(
        self,
        policy: LengthPolicy,
        *,
        rate: float | Callable[[int], float] = 0.8,
        row: float = 0.3,
        draft: float = 0.1,
        noise: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.policy = policy
        self.rate = rate
        self.row = row
        self.draft = draft
        self.noise = noise
        self.draws = random.Random(seed)
        self.asked: list[list[int]] = []
        self.tokens = self.seconds = 0.0

    def step(
        self, sequences: Sequence[SequenceView], *, prompt_rows: int = 0, slow: float = 1.0
    ) -> list[int]:
        chosen = self.policy.choose(sequences)
        accepted = []
        for count in chosen:
            rate = self.rate if isinstance(self.rate, float) else self.rate(len(self.asked))
            right = 0
            while right < count and self.draws.random() < rate:
                right += 1
            accepted.append(right)
        self.asked.append(chosen)
        drafts, num = sum(chosen), len(sequences)
        rest = 1.0 + self.row * (num + drafts + prompt_rows - 1)
        draft = self.draft * drafts
        self.tokens += num + sum(accepted)
        self.seconds += rest + draft
        rest *= slow * self.draws.lognormvariate(0.0, self.noise)
        self.policy.observe(StepRecord(chosen, accepted, draft, rest, prompt_rows))
        return chosen

    def run(self, steps: int, sequences: Sequence[SequenceView] | None = None) -> list[int]:
        """The counts of the first sequence."""
        at = views(8) if sequences is None else sequences
        return [self.step(at)[0] for _ in range(steps)]


# Fixed


def test_a_fixed_length_is_cut_to_limit_and_to_what_a_request_asks() -> None:
    policy = FixedLength(3)
    assert policy.choose(views(8, 2, 0)) == [3, 2, 0]
    assert policy.choose(views(8, 2, fixed=5)) == [5, 2]
    assert policy.choose(views(8, fixed=0)) == [0]
    assert policy.choose(views(8, 8, 8), max_drafts=4) == [3, 1, 0]
    assert policy.choose([]) == []


@pytest.mark.parametrize("count", [-1, 9, 2.0, True, None])
def test_a_fixed_length_out_of_range_is_refused(count: object) -> None:
    with pytest.raises(ConfigError, match="allowed is 0 to 8"):
        FixedLength(count)  # type: ignore[arg-type]


# What always holds

SECONDS = st.sampled_from([0.0, 1e-9, 1e-4, 3e-4, 1e-3, 0.5, 1e6, math.inf, math.nan, -1.0])
STEP = st.tuples(
    st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, 8)), max_size=5, unique_by=lambda v: v[0]
    ),
    st.randoms(use_true_random=False),
    SECONDS,
    SECONDS,
    st.sampled_from([0, 0, 0, 7]),
    st.sampled_from([None, None, 0, 3, 100]),
)


@given(steps=st.lists(STEP, min_size=1, max_size=60), fixed=st.sampled_from([None, 0, 2, 8]))
@settings(deadline=None)
def test_counts_stay_within_limits_whatever_is_measured(steps: list, fixed: int | None) -> None:  # type: ignore[type-arg]
    """Times of zero, of infinity, of no number and below zero; sequences that come and go."""
    policy = LengthController()
    for running, draws, draft, rest, prompt_rows, most in steps:
        at = [SequenceView(i, limit, fixed if i % 3 == 0 else None) for i, limit in running]
        chosen = policy.choose(at, max_drafts=most)
        assert all(type(count) is int for count in chosen)
        assert all(0 <= c <= view.limit for c, view in zip(chosen, at, strict=True))
        if most is None:
            for count, view in zip(chosen, at, strict=True):
                assert view.fixed is None or count == min(view.fixed, view.limit)
        else:
            assert sum(chosen) <= most
        if draws.random() < 0.9:
            drafted = [draws.randint(0, count) for count in chosen]
            accepted = [draws.randint(0, count) for count in drafted]
            policy.observe(StepRecord(drafted, accepted, draft, rest, prompt_rows))
        assert math.isfinite(policy.probe_seconds)
        assert math.isfinite(policy.seconds)


def test_a_record_of_another_length_is_refused() -> None:
    policy = LengthController()
    policy.choose(views(8, 8))
    with pytest.raises(ValueError, match="the step had 2 sequences"):
        policy.observe(StepRecord([0], [0], 0.0, 1.0))
    with pytest.raises(ValueError, match="the step had 2 sequences"):
        policy.observe(StepRecord([0, 0], [0], 0.0, 1.0))


def test_equal_histories_give_equal_answers() -> None:
    one, two = Machine(LengthController()), Machine(LengthController())
    assert one.run(800) == two.run(800)


def test_what_a_step_verifies_does_not_depend_on_its_own_outcome() -> None:
    """Two futures of one past: the next count is fixed before either is known."""
    right, wrong = Machine(LengthController(), seed=3), Machine(LengthController(), seed=3)
    for machine in (right, wrong):
        machine.run(300)
    for accepted_all in (True, False):
        policy = (right if accepted_all else wrong).policy
        chosen = policy.choose(views(8))
        answer = list(chosen)
        count = chosen[0] if accepted_all else 0
        policy.observe(StepRecord(chosen, [count], 0.1, 1.5))
        assert chosen == answer
        (right if accepted_all else wrong).asked.append(answer)
    assert right.asked == wrong.asked


def test_an_answer_is_the_callers_own() -> None:
    policy = LengthController()
    policy.choose(views(8)).append(99)
    policy.observe(StepRecord([0], [0], 0.0, 1.0))


def test_a_step_that_failed_needs_no_record() -> None:
    machine = Machine(LengthController())
    machine.run(50)
    for _ in range(20):
        machine.policy.choose(views(8))
    assert set(machine.run(300)[-100:]) <= set(range(9))


def test_rates_of_sequences_long_gone_are_not_kept() -> None:
    policy = LengthController()
    for number in range(500):
        chosen = policy.choose([SequenceView(number, 8), SequenceView(number + 1, 8)])
        policy.observe(StepRecord(chosen, [0, 0], 0.0, 1.0))
    assert len(policy._rates) <= 70


# What it learns


def test_drafts_that_pay_are_taken_and_others_are_not() -> None:
    cheap = Machine(LengthController(), rate=0.9, row=0.05, draft=0.05)
    assert sum(cheap.run(600)[-200:]) / 200 > 4
    dear = Machine(LengthController(), rate=0.5, row=0.7, draft=0.2)
    assert sum(dear.run(600)[-200:]) / 200 < 0.1


def test_a_limit_of_zero_turns_one_sequence_off_and_no_other() -> None:
    machine = Machine(LengthController(), rate=0.95, row=0.05, draft=0.02)
    at = [SequenceView(0, 8), SequenceView(1, 0), SequenceView(2, 8, 0), SequenceView(3, 8, 2)]
    for _ in range(300):
        machine.step(at)
    late = machine.asked[-100:]
    assert all(asked[1:] == [0, 0, 2] for asked in machine.asked)
    assert sum(asked[0] for asked in late) / 100 > 4


def test_a_new_sequence_starts_from_what_others_have_shown() -> None:
    machine = Machine(LengthController(), rate=0.95, row=0.05, draft=0.05)
    machine.run(400)
    assert machine.step([SequenceView(77, 8)])[0] >= 4
    machine = Machine(LengthController(), rate=0.05, row=0.4, draft=0.2)
    machine.run(400)
    asked = [machine.step([SequenceView(number, 8)])[0] for number in range(77, 177)]
    assert asked.count(0) >= 90


def test_sequences_of_one_batch_get_their_own_counts() -> None:
    policy = LengthController()
    draws = random.Random(5)
    sums = [0, 0]
    for step in range(800):
        chosen = policy.choose(views(8, 8))
        accepted = []
        for count, rate in zip(chosen, (0.95, 0.15), strict=True):
            right = 0
            while right < count and draws.random() < rate:
                right += 1
            accepted.append(right)
        drafts = sum(chosen)
        policy.observe(StepRecord(chosen, accepted, 0.03 * drafts, 1.0 + 0.15 * drafts))
        if step >= 400:
            sums = [s + c for s, c in zip(sums, chosen, strict=True)]
    assert sums[0] > 4 * 400
    assert sums[1] < 1.5 * 400


def test_drafts_come_back_when_the_text_turns_easy() -> None:
    machine = Machine(
        LengthController(), rate=lambda step: 0.05 if step < 1000 else 0.95, row=0.3, draft=0.1
    )
    asked = machine.run(2500)
    assert sum(asked[500:1000]) < 50
    back = next(step for step in range(1000, 2500) if min(asked[step : step + 20]) > 1)
    assert back < 1000 + 700
    assert sum(asked[-200:]) / 200 > 2


def test_drafts_stop_when_rows_become_dear() -> None:
    machine = Machine(LengthController(), rate=0.75, row=0.05, draft=0.05)
    assert sum(machine.run(1000)[-200:]) / 200 > 2
    machine.row, machine.draft = 0.9, 0.3
    assert sum(machine.run(1500)[-200:]) / 200 < 0.3


def test_prompts_in_a_step_teach_no_cost() -> None:
    clean, mixed = Machine(LengthController(), seed=1), Machine(LengthController(), seed=1)
    clean.run(400)
    mixed.run(400)
    table = list(mixed.policy._curve(1).table())  # type: ignore[attr-defined]
    for _ in range(200):
        mixed.step(views(8), prompt_rows=64)
    assert mixed.policy._curve(1).table() == table  # type: ignore[attr-defined]


def test_nothing_is_tried_before_a_step_without_prompts_was_measured() -> None:
    machine = Machine(LengthController(), rate=0.95, row=0.9, draft=0.3)
    for _ in range(200):
        assert machine.step(views(8, 8), prompt_rows=64) == [0, 0]


def test_the_opening_waits_for_steps_without_prompts() -> None:
    machine = Machine(LengthController(), rate=0.95, row=0.9, draft=0.3)
    machine.run(4)
    assert machine.asked == [[0]] * 4
    asked = [machine.step(views(8), prompt_rows=64)[0] for _ in range(50)]
    assert sum(asked) <= 1
    assert 3 in machine.run(10)


def test_the_opening_waits_for_a_batch_that_lasts() -> None:
    """A curve's first sample is dropped, so sizes met once have no time to decide by."""
    machine = Machine(LengthController(), rate=0.95)
    for num in range(1, 20):
        assert not any(machine.step(views(*[8] * num)))


def test_times_rise_with_the_rows() -> None:
    assert _rising([1.0, 3.0, 2.0, 4.0], [1.0, 1.0, 3.0, 1.0]) == [1.0, 2.25, 2.25, 4.0]
    assert _rising([3.0, 2.0, 1.0], [1.0, 1.0, 1.0]) == [2.0, 2.0, 2.0]
    policy = LengthController()
    machine = Machine(policy, rate=0.6, row=0.02, draft=0.01, noise=0.4)
    for step in range(300):
        machine.step(views(8, 8) if step % 3 else views(8, 8, 8))
        for curve in policy._curves.values():
            table = curve.table()
            assert table == sorted(table)
            assert table[0] > 0.0


@pytest.mark.parametrize("share", [0.02, 0.06])
def test_slow_outliers_leave_the_choice_alone(share: float) -> None:
    machine = Machine(LengthController(), rate=0.9, row=0.1, draft=0.05)
    draws = random.Random(9)
    for _ in range(1200):
        machine.step(views(8), slow=draws.uniform(5, 50) if draws.random() < share else 1.0)
    late = [asked[0] for asked in machine.asked[-400:]]
    assert sum(late) / len(late) > 3


def test_the_first_call_of_a_width_is_no_cost_of_it() -> None:
    """A width whose first step takes a thousand times as long is used all the same."""
    machine = Machine(LengthController(), rate=0.95, row=0.02, draft=0.02)
    met: set[int] = set()
    for _ in range(400):
        policy = machine.policy
        chosen = policy.choose(views(8))
        count = chosen[0]
        right = 0
        while right < count and machine.draws.random() < 0.95:
            right += 1
        slow = 1.0 if count in met else 1000.0
        met.add(count)
        policy.observe(
            StepRecord(chosen, [right], 0.02 * count * slow, (1.0 + 0.02 * count) * slow)
        )
        machine.asked.append(chosen)
    late = [asked[0] for asked in machine.asked[-200:]]
    assert sum(late) / len(late) > 6


def test_a_drafter_that_catches_up_does_not_look_dear() -> None:
    """Back from a stretch without drafts the draft phase is slow once; the fit must not see it."""
    machine = Machine(LengthController(), rate=0.05, row=0.3, draft=0.1)
    machine.run(1500)
    policy = machine.policy
    assert isinstance(policy, LengthController)
    before = list(policy._drafts.fit())
    late = policy.choose(views(8, fixed=3))
    assert late == [3]
    policy.observe(StepRecord(late, [0], 50.0, 1.6))
    assert list(policy._drafts.fit()) == before


def test_offers_shorter_than_asked_are_charged_for_the_rows_they_have() -> None:
    """A drafter that has nothing to say most of the time costs no rows then."""
    policy = LengthController()
    draws = random.Random(2)
    late = 0
    for step in range(1500):
        chosen = policy.choose(views(8))
        offers = chosen[0] if draws.random() < 0.2 else 0
        policy.observe(StepRecord([offers], [offers], 0.001, 1.0 + 0.5 * offers))
        if step >= 1000:
            late += chosen[0] > 0
    assert late > 400


# Probes


def test_probes_cost_what_is_stated_and_become_rare() -> None:
    """Excess over drafts off where drafts never pay: 1 % and one probe, and the opening."""
    policy = LengthController()
    machine = Machine(policy, rate=0.05, row=0.6, draft=0.3, noise=0.2)
    machine.run(9 + 3)
    opening = machine.seconds - machine.tokens
    assert opening < 12
    machine.tokens = machine.seconds = 0.0
    asked = machine.run(6000)
    lost = machine.seconds - machine.tokens
    assert 0.0 < lost <= 0.01 * machine.seconds + 8.0
    assert policy.probe_seconds <= 0.01 * policy.seconds + 8.0
    probes = [step for step in range(1, 6000) if asked[step] and not asked[step - 1]]
    assert len(probes) >= 5
    gaps = [b - a for a, b in pairwise(probes)]
    assert min(gaps[3:]) > 64


def test_probes_that_lose_wait_twice_as_long_each() -> None:
    policy = LengthController()
    machine = Machine(policy, rate=0.6, row=0.3, draft=0.1, noise=0.01)
    waits = set()
    for _ in range(3000):
        machine.step(views(8))
        waits.add(policy._wait)
    assert waits == {16, 32, 64, 128, 256}


def rested(rate: float) -> Machine:
    """A machine whose last probe has just lost, so that the next is far."""
    machine = Machine(LengthController(), rate=rate, row=0.3, draft=0.1, noise=0.05)
    policy = machine.policy
    assert isinstance(policy, LengthController)
    for _ in range(5000):
        machine.step(views(8))
        if policy._wait == 256 and policy._next_trial - policy._step > 200:
            return machine
    raise AssertionError("it never rested")


@pytest.mark.parametrize("change", ["nothing", "times", "acceptance"])
def test_a_clear_change_brings_the_next_probe_near(change: str) -> None:
    machine = rested(0.8)
    policy = machine.policy
    assert isinstance(policy, LengthController)
    rates = {"acceptance": 0.2}
    machine.rate = rates.get(change, 0.8)
    nearest = 256
    for _ in range(60):
        machine.step(views(8), slow=2.0 if change == "times" else 1.0)
        nearest = min(nearest, policy._wait)
    assert (nearest == 16) == (change != "nothing")


# On the simulation

QUICK = [
    ("fused, bundled head", 0.95),
    ("fused, never accepted", 0.95),
    ("torch, bundled head", 0.95),
    ("MoE, falls with position", 0.95),
    ("MoE, code to prose to code", 0.95),
    ("rows become cheap", 0.95),
    ("batch 8, saturated", 0.95),
]


@pytest.mark.parametrize(("name", "least"), QUICK)
def test_regret_is_small(simulation: ModuleType, name: str, least: float) -> None:
    scenario = next(s for s in simulation.SCENARIOS if s.name == name)
    row = simulation.study(scenario, [101])
    assert row["over_best_fixed"] >= least
    assert row["over_off"] >= 0.98


def test_the_stored_study_is_whole_and_keeps_what_is_promised(simulation: ModuleType) -> None:
    stored = json.loads((BENCHMARKS / "results" / "length-simulation.json").read_text())
    rows = stored["scenarios"]
    assert [row["name"] for row in rows] == [one.name for one in simulation.SCENARIOS]
    assert len(rows) >= 20
    assert stored["complete"]
    assert stored["seeds"] >= 5
    for row in rows:
        rate, fixed = row["tokens_per_second"], row["fixed_tokens_per_second"]
        assert len(fixed) == 9
        assert rate >= 0.95 * max(fixed), row["name"]
        assert rate >= 0.98 * fixed[0], row["name"]


def test_the_simulation_charges_fixed_lengths_what_they_cost(simulation: ModuleType) -> None:
    """Against the closed form: tokens of a step are a geometric sum, seconds are given."""
    costs = simulation.linear(1.0, 0.3, 0.1)
    scenario = simulation.Scenario(
        "closed form", costs, simulation.steady(simulation.flat(0.5)), tokens=20000,
        length=(20000, 20000),
    )  # fmt: skip
    outcome = simulation.run(scenario, FixedLength(3), 1)
    expected = (1 + 0.5 + 0.25 + 0.125) / (1.0 + 3 * 0.3 + 3 * 0.1)
    assert outcome.tokens / outcome.seconds == pytest.approx(expected, rel=0.02)
    assert outcome.mean_length == pytest.approx(3.0, rel=0.01)
    off = simulation.run(scenario, FixedLength(0), 1)
    assert off.tokens / off.seconds == pytest.approx(1.0)


def test_a_controller_that_never_drafts_would_fail(simulation: ModuleType) -> None:
    scenario = next(s for s in simulation.SCENARIOS if s.name == "torch, bundled head")
    rates = []
    for length in range(9):
        outcome = simulation.run(scenario, FixedLength(length), 101)
        rates.append(outcome.tokens / outcome.seconds)
    assert rates[0] < 0.6 * max(rates)
    assert rates[8] < 0.9 * max(rates)
