"""How many drafts a step asks for: a fixed count, or the count that pays by what was measured.

Counts and seconds only: no tensor, no token, no clock and no random number. What a step verifies is
chosen before its target forward, from earlier steps alone, so that the choice can bias nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Protocol

from paceline.types import MAX_NUM_DRAFTS, ConfigError

__all__ = ["FixedLength", "LengthController", "LengthPolicy", "SequenceView", "StepRecord"]


@dataclass(slots=True)
class SequenceView:
    """What a policy is told about one sequence that decodes in this step.

    Attributes:
        id: the engine's number for it, never used twice.
        limit: most drafts this step may verify for it, 0 to 8: the room left in its answer.
        fixed: drafts a step that the request itself asked for (0 is off), or None to let the policy
            choose.
    """

    id: int
    limit: int
    fixed: int | None = None


@dataclass(slots=True)
class StepRecord:
    """What became of a step, after its commit.

    The lists go with the sequences of the last `choose`, in its order.

    Attributes:
        drafted: drafts verified for each; fewer than chosen where the proposer offered fewer.
        accepted: leading drafts accepted of each.
        draft_seconds: wall time of the draft phase.
        rest_seconds: wall time of all else in the step: the forward, verification, bookkeeping.
        prompt_rows: rows of prompts read in the same step. Such a step teaches acceptance only.
    """

    drafted: Sequence[int]
    accepted: Sequence[int]
    draft_seconds: float
    rest_seconds: float
    prompt_rows: int = 0


class LengthPolicy(Protocol):
    """Chooses before each step, and may learn after it."""

    def choose(
        self, sequences: Sequence[SequenceView], *, max_drafts: int | None = None
    ) -> list[int]:
        """Drafts to ask for, one count per sequence, 0 to its limit.

        The engine takes no more than a limit, and a request's own number whatever is said of it.

        Args:
            sequences: those that decode in this step.
            max_drafts: most drafts of the step in all; None sets no bound.
        """
        ...

    def observe(self, record: StepRecord) -> None:
        """Learn from the step that `choose` was asked for last; to be called once or not at all.

        Raises:
            ValueError: the record is not as long as the last answer.
        """
        ...


class FixedLength:
    """The same count in every step.

    Args:
        num_drafts: drafts a step of a sequence that asks for no count of its own, 0 to 8.

    Raises:
        ConfigError: the count is out of range.
    """

    def __init__(self, num_drafts: int) -> None:
        if isinstance(num_drafts, bool) or not isinstance(num_drafts, int):
            raise ConfigError(f"num_drafts is {num_drafts!r}; allowed is 0 to {MAX_NUM_DRAFTS}")
        if not 0 <= num_drafts <= MAX_NUM_DRAFTS:
            raise ConfigError(f"num_drafts is {num_drafts}; allowed is 0 to {MAX_NUM_DRAFTS}")
        self.num_drafts = num_drafts

    def choose(
        self, sequences: Sequence[SequenceView], *, max_drafts: int | None = None
    ) -> list[int]:
        """The fixed count, cut to each limit; the first come first where the step has a bound."""
        default = self.num_drafts
        chosen = [
            min(default if view.fixed is None else view.fixed, view.limit) for view in sequences
        ]
        return chosen if max_drafts is None else _cut(chosen, max_drafts)

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""


def _cut(chosen: list[int], max_drafts: int) -> list[int]:
    """Counts lowered from the end until their sum fits."""
    room = max(0, max_drafts)
    for index, count in enumerate(chosen):
        chosen[index] = count = min(count, room)
        room -= count
    return chosen


# Acceptance

_SEQUENCE_DECAY = 0.97
"""Weight an outcome of a sequence loses with each later one at its position: a memory of 33."""

_SHARED_DECAY = 0.99
"""The same for what all sequences share: a memory of 100."""

_SHARED_WEIGHT = 16.0
"""Outcomes that the shared rate counts for in a sequence's own."""

_BEFORE_WEIGHT = 2.0
"""Outcomes that the position before counts for: a position never tried does as well as that."""

_FIRST_GUESS = 0.7
"""Acceptance of a first draft before anything is known."""

_STALE_STEPS = 64
"""Steps without an outcome after which older outcomes and times weigh less than fresh ones."""


class _Rates:
    """Decayed outcomes by position, each given that all positions before were accepted."""

    __slots__ = ("hits", "idle", "seen", "tries")

    def __init__(self) -> None:
        self.hits = [0.0] * MAX_NUM_DRAFTS
        self.tries = [0.0] * MAX_NUM_DRAFTS
        self.seen = [0] * MAX_NUM_DRAFTS
        self.idle = 0

    def add(self, asked: int, accepted: int, step: int, decay: float) -> None:
        """Count one step: `accepted` leading drafts of `asked` were right, the next was not."""
        hits, tries, seen = self.hits, self.tries, self.seen
        reached = accepted + 1 if accepted < asked else asked
        if step - seen[reached - 1] > _STALE_STEPS:
            self._freshen(reached, step)
        for j in range(reached):
            seen[j] = step
            tries[j] = tries[j] * decay + 1.0
            hits[j] *= decay
            if j < accepted:
                hits[j] += 1.0

    def add_all(self, reached: list[int], accepted: list[int], step: int) -> None:
        """Count a step of several: [j] how many sequences had an outcome at j, and a right one."""
        hits, tries, seen = self.hits, self.tries, self.seen
        if step - seen[len(reached) - 1] > _STALE_STEPS:
            self._freshen(len(reached), step)
        for j, (number, right) in enumerate(zip(reached, accepted, strict=True)):
            fade = _SHARED_DECAY if number == 1 else _SHARED_DECAY**number
            seen[j] = step
            tries[j] = tries[j] * fade + number
            hits[j] = hits[j] * fade + right

    def _freshen(self, reached: int, step: int) -> None:
        """Make outcomes light at those of the first positions that had none for long."""
        for j in range(reached):
            if step - self.seen[j] > _STALE_STEPS and self.tries[j] > _STALE_WEIGHT:
                self.hits[j] *= _STALE_WEIGHT / self.tries[j]
                self.tries[j] = _STALE_WEIGHT

    def lighten(self) -> None:
        """Let later outcomes weigh more than all so far."""
        for j, tries in enumerate(self.tries):
            if tries > _STALE_WEIGHT:
                self.hits[j] *= _STALE_WEIGHT / tries
                self.tries[j] = _STALE_WEIGHT


_STALE_WEIGHT = 4.0
"""Outcomes that all stale ones together still count for."""


# Costs

_MEMORY = 60
"""Most samples a time remembers."""

_SCALE_GAIN = 0.05
"""Share of a deviation that is put down to the whole machine rather than to one width."""

_CLIP = 3.0
"""Deviations count up to so many times the usual one."""

_SETTLED = 24
"""A change so few steps after the width changed is put down to the width."""

_FIRST_CALL = 3.0
"""A first sample so many times over the expected is a compilation or a capture, and is dropped."""

_ROW_GUESS = 0.25
"""Cost of a further row per sequence against a step without drafts, until it was measured."""

_MODEL_WEIGHT = 3.0
"""Samples of a knot that the straight line through all knots counts for."""


_NOTHING, _NEW_WIDTH, _CHANGE = range(3)
"""What a measured step was: one more of its kind, one of the first, the sign of a clear change."""


class _Curve:
    """Seconds of a step without its draft phase, by the number of drafts verified in it.

    For one number of sequences. Piecewise linear in the drafts, over knots that lie close where
    few drafts are and apart where many are. A knot's time is `scale` times its own factor: a
    machine that slows down moves all knots, also those that were not measured lately.
    """

    __slots__ = (
        "_at",
        "_below",
        "_dirty",
        "_donor",
        "_drift",
        "_early",
        "_noise",
        "_since",
        "_table",
        "count",
        "factor",
        "knots",
        "num_sequences",
        "scale",
        "seen",
    )

    def __init__(self, num_sequences: int) -> None:
        most = num_sequences * MAX_NUM_DRAFTS
        knots = list(range(min(most, 8) + 1))
        while knots[-1] < most:
            knots.append(min(most, knots[-1] + max(2, knots[-1] // 4)))
        self.num_sequences = num_sequences
        self.knots = knots
        self.factor = [1.0] * len(knots)
        self.count = [0.0] * len(knots)
        self.seen = [0] * len(knots)
        self.scale = 0.0
        self._below = [0] * (most + 1)
        for k, (low, high) in enumerate(pairwise(knots)):
            for e in range(low, high):
                self._below[e] = k
        self._below[most] = len(knots) - 1
        self._early: dict[int, list[float]] = {}
        self._noise = 0.15
        self._drift = 0.0
        self._at = self._since = 0
        self._donor: _Curve | None = None
        self._table: list[float] = []
        self._dirty = True

    @property
    def measured(self) -> bool:
        """Whether any width has a time."""
        return self.scale > 0.0

    def table(self) -> list[float]:
        """[e] seconds with e drafts verified, 0 to 8 for each sequence; rises with e."""
        if self._dirty:
            self._table = self._fill()
            self._dirty = False
        return self._table

    def lean_on(self, donor: _Curve | None) -> None:
        """Take the shape from a curve for another number of sequences, until measured here."""
        if donor is not self._donor:
            self._donor = donor
            self._dirty = True

    def add(self, drafts: int, seconds: float, step: int) -> int:
        """Take in one measured step; what that means for decisions made on earlier ones."""
        k = self._below[drafts]
        low = self.knots[k]
        if low != drafts:
            share = (drafts - low) / (self.knots[k + 1] - low)
            k += share > 0.5
            # Referred to the nearer knot; between two knots the line is good enough.
            if self._table:
                seconds *= self._table[self.knots[k]] / self._table[drafts]
        self._dirty = True
        count = self.count[k]
        if count < 3.0:
            self._add_early(k, seconds, step)
            return _NEW_WIDTH
        error = seconds / (self.scale * self.factor[k]) - 1.0
        most = _CLIP * self._noise
        if error > most:
            error = most
        elif error < -most:
            if error < -min(max(5.0 * self._noise, 0.3), 0.6):
                # Chance slows steps down but does not speed them up: what was known is past.
                self.factor[k] *= 1.0 + 0.5 * error
                self.count[k] = min(count, 6.0)
                self.seen[k] = step
                return _NEW_WIDTH
            error = -most
        self._noise += 0.02 * (max(abs(error), 0.02) - self._noise)
        if step - self.seen[k] > _STALE_STEPS and count > 12.0:
            count = 12.0
        self.seen[k] = step
        self.count[k] = count + 1.0 if count < _MEMORY else count
        self.factor[k] *= 1.0 + error / (count + 1.0)
        self.scale *= 1.0 + _SCALE_GAIN * error
        self._drift += 0.15 * (error - self._drift)
        if k != self._at:
            self._at, self._since = k, step
        if abs(self._drift) > 1.5 * self._noise:
            if step - self._since < _SETTLED:
                # It came with the knot, so it is the knot's.
                self.factor[k] *= 1.0 + self._drift
            else:
                self.scale *= 1.0 + self._drift
            self._drift = 0.0
            self.count = [min(c, 6.0) for c in self.count]
            return _CHANGE
        return _NOTHING

    def _add_early(self, k: int, seconds: float, step: int) -> None:
        """The first few samples of a knot: their median stands, and a slow first call is dropped.

        The very first sample of a curve is dropped unseen: there is nothing to hold it against.
        """
        samples = self._early.get(k)
        self.seen[k] = step
        if samples is None:
            samples = self._early[k] = []
            expected = self.table()[self.knots[k]] if self.measured else 0.0
            if seconds > _FIRST_CALL * expected:
                return
        samples.append(seconds)
        middle = sorted(samples)[(len(samples) - 1) // 2]
        if not self.measured:
            self.scale = middle
        self.factor[k] = middle / self.scale
        self.count[k] = float(len(samples))

    def _fill(self) -> list[float]:
        knots, most = self.knots, self.knots[-1]
        shape = self._donor.stretched(self.num_sequences) if self._donor else None
        if not self.measured:
            return shape or [1.0 + _ROW_GUESS / self.num_sequences * e for e in range(most + 1)]
        at = [k for k, count in enumerate(self.count) if count > 0.0]
        weights = [self.count[k] for k in at]
        values = [self.factor[k] * self.scale for k in at]
        drafts = [knots[k] for k in at]
        if shape:
            model = _scaled(shape, drafts, values, weights)
        else:
            model = _line(most, drafts, values, weights, _ROW_GUESS / self.num_sequences)
        values = [
            (value * weight + model[e] * _MODEL_WEIGHT) / (weight + _MODEL_WEIGHT)
            for e, value, weight in zip(drafts, values, weights, strict=True)
        ]
        values = _rising(values, [weight + _MODEL_WEIGHT for weight in weights])
        out = list(model)
        # Between measured knots the deviation from the model is drawn as a line.
        off = [value - model[e] for e, value in zip(drafts, values, strict=True)]
        for e in range(drafts[0] + 1):
            out[e] = max(out[e] + off[0], 0.05 * values[0])
        for i, (low, high) in enumerate(pairwise(drafts)):
            step = (off[i + 1] - off[i]) / (high - low)
            for e in range(low + 1, high + 1):
                out[e] += off[i] + step * (e - low)
        last = drafts[-1]
        slope = (model[most] - model[last]) / (most - last) if most > last else 0.0
        if len(drafts) > 1:
            slope = min(slope, (values[-1] - values[-2]) / (last - drafts[-2]))
        for e in range(last + 1, most + 1):
            out[e] = values[-1] + slope * (e - last)
        return list(accumulate(out, max))

    def stretched(self, num_sequences: int) -> list[float]:
        """This curve for another number of sequences: equal rows cost the same."""
        table = self.table()
        last = len(table) - 1
        slope = (table[last] - table[0]) / last
        out = []
        for e in range(num_sequences * MAX_NUM_DRAFTS + 1):
            at = num_sequences + e - self.num_sequences
            if at < 0:
                out.append(max(table[0] + slope * at, table[0] * 0.1))
            else:
                out.append(table[at] if at <= last else table[last] + slope * (at - last))
        return out


def _scaled(
    shape: list[float], drafts: list[int], values: list[float], weights: list[float]
) -> list[float]:
    """The shape times the mean ratio of what was measured to it."""
    ratio = sum(
        weight * value / shape[e] for e, value, weight in zip(drafts, values, weights, strict=True)
    ) / sum(weights)
    return [ratio * value for value in shape]


def _line(
    most: int, drafts: list[int], values: list[float], weights: list[float], guess: float
) -> list[float]:
    """The straight line through what was measured; its slope is `guess` where there is one point.

    `guess` is in parts of the first value.
    """
    total = sum(weights)
    middle = sum(w * e for w, e in zip(weights, drafts, strict=True)) / total
    height = sum(w * v for w, v in zip(weights, values, strict=True)) / total
    spread = sum(w * (e - middle) ** 2 for w, e in zip(weights, drafts, strict=True))
    slope = guess * values[0]
    if spread > 0.0:
        product = sum(
            w * (e - middle) * (v - height) for w, e, v in zip(weights, drafts, values, strict=True)
        )
        # A line that would be below zero somewhere is no cost.
        slope = min(max(0.0, product / spread), 0.9 * height / max(middle, 1.0))
    return [height + slope * (e - middle) for e in range(most + 1)]


def _rising(values: list[float], weights: list[float]) -> list[float]:
    """The closest values that never fall, by weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        size = 1
        while pools and pools[-1][0] > value:
            before, heavy, many = pools.pop()
            value = (before * heavy + value * weight) / (heavy + weight)
            weight += heavy
            size += many
        pools.append((value, weight, size))
    return [value for value, _, size in pools for _ in range(size)]


class _DraftCost:
    """Seconds of a draft phase: a constant, a part per pass of the chain, and a part per draft.

    Fitted by decayed least squares under "none is negative", from where the last fit stood: what
    the data of late cannot tell apart stays as it was.
    """

    __slots__ = ("_count", "_first", "_last", "_moments", "_passed", "_seen", "_sums", "parts")

    def __init__(self) -> None:
        self.parts = [0.0, 0.0, 0.0]
        self._moments = [0.0] * 6
        self._sums = [0.0] * 3
        self._count = 0
        self._seen = 0
        self._last = 0
        self._passed = 0
        self._first: set[int] = set()

    def add(self, depth: int, drafts: int, seconds: float) -> None:
        """Take in one draft phase of `depth` passes and `drafts` drafts.

        Of a long run of the same kind every fourth is enough.
        """
        if drafts == self._last and self._count > 32:
            self._passed += 1
            if self._passed & 3:
                return
        self._last = drafts
        expected = self.parts[0] + self.parts[1] * depth + self.parts[2] * drafts
        if depth not in self._first:
            self._first.add(depth)
            if not expected or seconds > _FIRST_CALL * expected:
                return
        if self._count >= 4 and expected > 0.0:
            seconds = min(max(seconds, 0.4 * expected), 2.0 * expected)
        self._count += 1
        m, s, keep = self._moments, self._sums, 0.97
        m[0] = m[0] * keep + 1.0
        m[1] = m[1] * keep + depth
        m[2] = m[2] * keep + drafts
        m[3] = m[3] * keep + depth * depth
        m[4] = m[4] * keep + depth * drafts
        m[5] = m[5] * keep + drafts * drafts
        s[0] = s[0] * keep + seconds
        s[1] = s[1] * keep + seconds * depth
        s[2] = s[2] * keep + seconds * drafts

    def fit(self) -> list[float]:
        """The three parts, in seconds."""
        if self._seen != self._count:
            m, s, parts = self._moments, self._sums, self.parts
            a, b, c = parts
            for _ in range(3 if self._count > 8 else 30):
                b = max(0.0, (s[1] - m[1] * a - m[4] * c) / m[3])
                c = max(0.0, (s[2] - m[2] * a - m[4] * b) / m[5])
                a = max(0.0, (s[0] - m[1] * b - m[2] * c) / m[0])
            self.parts = [a, b, c]
            self._seen = self._count
        return self.parts


# The controller

_PROBE_SHARE = 0.01
"""Most of the time that probes may cost."""

_MARGIN = 0.01
"""Drafts must beat their absence by so much to be kept, and by twice that to be taken up again."""

_OPENING = (0, 0, 0, 1, 1, 3, 3, 1)
"""Lengths of the very first steps, once one without drafts was run: no cost is known before."""

_NO_CHANCE = 0.01
"""A draft less likely than this is not considered in a batch."""

_HOLD = 16
"""Steps that a plan is good for unless something happens; planning costs more than the rest."""

_BURST = 4
"""Steps of a probe that looks for acceptance; one that looks for the plain step's time has half."""

_FURTHER = (1, 2, 4)
"""Drafts that such probes add, in turn: what a next row costs may not tell of the row after."""

_SHORTEST_WAIT = 16
_LONGEST_WAIT = 256
"""Steps between two probes; doubled by each that changes nothing."""

_CATCH_UP_STEPS = 4
"""A sequence longer without drafts lets its drafter catch up, which is no draft's usual cost."""

_KEPT_SEQUENCES = 64
"""Sequences beside the running ones whose rates are kept, for those that come back."""


class LengthController:
    """Chooses the counts with the most expected tokens per second of the whole batch.

    Expected tokens come from acceptance by position (each given those before), decayed, per
    sequence, with a rate shared by all sequences behind it. Seconds come from measured steps: a
    curve over the drafts verified for each number of sequences, and a draft phase linear in passes
    and drafts. The best counts may all be 0. From time to time a few steps try another length; what
    such probes cost against the plan's rate is kept to 1 % of all time and one probe's overrun,
    the opening steps apart, and a probe that changes nothing doubles the wait for the next.

    The same calls with the same figures give the same answers.

    Attributes:
        seconds: time of the steps that costs were learned from.
        probe_seconds: what probes among them lost against the rate that was expected without.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.probe_seconds = 0.0
        self._step = 0
        self._shared = _Rates()
        self._rates: dict[int, _Rates] = {}
        self._curves: dict[int, _Curve] = {}
        self._drafts = _DraftCost()
        self._offered = 1.0
        self._opening = 0
        self._opens = False
        self._clean = False
        self._ids: list[int] = []
        self._asked: list[int] = []
        # The plan: counts for the sequences `_plan_ids`, good for `_hold` more steps.
        self._plan_ids: list[int] = []
        self._plan: list[int] = []
        self._plan_rate = 0.0
        self._plan_accepts = 0.0
        self._hold = 0
        # Accepted drafts against the plan's: mean and size of the difference, of late.
        self._surprise = 0.0
        self._spread = 0.5
        # The probe: counts for `_trial_left` more steps.
        self._trial: list[int] = []
        self._trial_left = 0
        self._trialling = False
        self._trial_views: Sequence[SequenceView] = ()
        self._num_trials = 0
        self._credit = 0.0
        self._wait = _SHORTEST_WAIT
        self._next_trial = _SHORTEST_WAIT

    # Choosing

    def choose(
        self, sequences: Sequence[SequenceView], *, max_drafts: int | None = None
    ) -> list[int]:
        """Drafts to ask for, one count per sequence, from what earlier steps have shown."""
        self._step += 1
        ids = [view.id for view in sequences]
        self._ids = ids
        self._trialling = False
        if not ids:
            self._asked = []
            return []
        if ids != self._plan_ids:
            self._meet(ids)
        if self._hold <= 0:
            self._renew(sequences)
        self._hold -= 1
        counts = self._plan
        self._opens = False
        if self._opening < len(_OPENING):
            count = _OPENING[self._opening] if self._clean else 0
            counts = [count] * len(ids)
            self._opens = any(view.fixed is None and view.limit >= count for view in sequences)
        elif self._trial_left or (self._step >= self._next_trial and self._start_trial(sequences)):
            self._trial_left -= 1
            self._trialling = True
            counts = self._trial
        chosen = []
        for view, count in zip(sequences, counts, strict=True):
            if view.fixed is not None:
                count = view.fixed
            limit = view.limit
            chosen.append(count if count < limit else limit)
        if max_drafts is not None and sum(chosen) > max_drafts:
            chosen = _cut(chosen, max_drafts)
        self._asked = chosen
        return list(chosen)

    def _meet(self, ids: list[int]) -> None:
        self._trial_left = self._hold = 0
        self._plan_ids = ids
        for each in ids:
            if each not in self._rates:
                self._rates[each] = _Rates()
        if len(self._rates) > 2 * len(ids) + _KEPT_SEQUENCES:
            kept = set(ids)
            self._rates = {each: r for each, r in self._rates.items() if each in kept}

    def _renew(self, sequences: Sequence[SequenceView]) -> None:
        self._plan, self._plan_rate, self._plan_accepts = self._best(sequences)
        self._hold = _HOLD

    def _curve(self, num_sequences: int) -> _Curve:
        curve = self._curves.get(num_sequences)
        if curve is None:
            curve = self._curves[num_sequences] = _Curve(num_sequences)
        if not curve.measured:
            # The nearest number below or above, by ratio.
            donors = [c for c in self._curves.values() if c.measured]
            here = num_sequences
            curve.lean_on(
                min(
                    donors,
                    key=lambda c: max(c.num_sequences, here) / min(c.num_sequences, here),
                    default=None,
                )
            )
        return curve

    def _chances(self, view: SequenceView, shared: list[float]) -> list[float]:
        """[j] probability that draft j and all before it are accepted, up to the limit."""
        rates = self._rates[view.id]
        hits, tries = rates.hits, rates.tries
        out = []
        chance = 1.0
        for j in range(min(view.limit, MAX_NUM_DRAFTS)):
            chance *= (hits[j] + _SHARED_WEIGHT * shared[j]) / (tries[j] + _SHARED_WEIGHT)
            out.append(chance)
        return out

    def _shared_rates(self) -> list[float]:
        before = _FIRST_GUESS
        out = []
        for hits, tries in zip(self._shared.hits, self._shared.tries, strict=True):
            before = (hits + _BEFORE_WEIGHT * before) / (tries + _BEFORE_WEIGHT)
            out.append(before)
        return out

    def _seconds(self, table: list[float], drafts: int, depth: int) -> float:
        """A whole step with `drafts` asked for over `depth` passes."""
        if not drafts:
            return table[0]
        a, b, c = self._drafts.parts
        return table[round(drafts * self._offered)] + a + b * depth + c * drafts

    def _thinned(self, table: list[float]) -> list[float]:
        """[e] seconds where e drafts are asked for and fewer are offered."""
        return [table[round(e * self._offered)] for e in range(len(table))]

    def _best(
        self, sequences: Sequence[SequenceView], *, must_draft: bool = False
    ) -> tuple[list[int], float, float]:
        """The counts with the most expected tokens per second, that rate, and drafts accepted.

        Drafts are added in the order of their chances, which for a sequence is their own order,
        once for each bound on the passes of the chain; the best prefix of all is taken.
        """
        num = len(sequences)
        table = self._curve(num).table()
        self._drafts.fit()
        shared = self._shared_rates()
        tokens, drafts, depth, deepest = float(num), 0, 0, 0
        entries: list[tuple[float, int, int]] = []
        for i, view in enumerate(sequences):
            chances = self._chances(view, shared)
            if view.fixed is None:
                entries += [(-chance, j, i) for j, chance in enumerate(chances)]
                deepest = max(deepest, len(chances))
            elif fixed := min(view.fixed, view.limit):
                tokens += sum(chances[:fixed])
                drafts += fixed
                depth = max(depth, fixed)
        rate = plain = tokens / self._seconds(table, drafts, depth)
        first, each_pass, each_draft = self._drafts.parts
        rows = table if self._offered > 0.999 else self._thinned(table)
        if num > 1:
            entries = sorted(entry for entry in entries if entry[0] < -_NO_CHANCE)
        found = (0, 0)
        best = best_tokens = 0.0
        if num == 1:
            # The chain's own prefixes: each bound adds one draft.
            sum_tokens = tokens
            for cap, (minus, _, _) in enumerate(entries, start=1):
                sum_tokens -= minus
                value = sum_tokens / (rows[cap] + (first + each_pass * cap) + each_draft * cap)
                if value > best:
                    best, best_tokens, found = value, sum_tokens, (cap, cap)
            deepest = 0
        for cap in range(1, deepest + 1):
            over = first + each_pass * max(cap, depth)
            tried = [entry for entry in entries if entry[1] < cap]
            sum_tokens, sum_drafts = tokens, drafts
            peak = 0.0
            for minus, _, _ in tried:
                sum_tokens -= minus
                sum_drafts += 1
                value = sum_tokens / (rows[sum_drafts] + over + each_draft * sum_drafts)
                if value > peak:
                    peak = value
                    if value > best:
                        best, best_tokens = value, sum_tokens
                        found = (cap, sum_drafts - drafts)
                elif value < 0.8 * peak:
                    break
        counts = [0] * num
        margin = _MARGIN if any(self._plan) else 2 * _MARGIN
        if must_draft or best > plain * (1.0 + margin):
            rate, tokens = best, best_tokens
            cap, left = found
            for _, j, i in entries:
                if j < cap and left:
                    counts[i] += 1
                    left -= 1
        return counts, rate, tokens - num

    # Probing

    def _start_trial(self, sequences: Sequence[SequenceView]) -> bool:
        """Set up an affordable probe: more drafts than planned, half of them, or none."""
        trial, burst = self._raised(sequences), _BURST
        if any(self._plan) and (trial == self._plan or self._num_trials % 2 == 0):
            half = self._num_trials % 4 == 2
            trial = [count // 2 if half else 0 for count in self._plan]
            burst = _BURST // 2
        if trial == self._plan or burst * self._excess(sequences, trial) > self._credit:
            # Asking again at every step would cost more than many a probe.
            self._next_trial = self._step + _SHORTEST_WAIT
            return False
        self._num_trials += 1
        self._trial, self._trial_left, self._trial_views = trial, burst, sequences
        self._hold = max(self._hold, burst)
        return True

    def _raised(self, sequences: Sequence[SequenceView]) -> list[int]:
        """The plan with more drafts for each sequence that may have more."""
        if any(self._plan):
            more = _FURTHER[self._num_trials // 2 % len(_FURTHER)]
            goal = [count + more for count in self._plan]
        else:
            goal = [max(1, count) for count in self._best(sequences, must_draft=True)[0]]
        return [
            0 if view.fixed is not None else min(view.limit, count)
            for view, count in zip(sequences, goal, strict=True)
        ]

    def _excess(self, sequences: Sequence[SequenceView], counts: list[int]) -> float:
        """Seconds that a step with these counts is expected to lose against the plan's rate."""
        shared = self._shared_rates()
        tokens = float(len(counts))
        for view, count in zip(sequences, counts, strict=True):
            if count:
                tokens += sum(self._chances(view, shared)[:count])
        table = self._curve(len(counts)).table()
        return self._seconds(table, sum(counts), max(counts)) - tokens / self._plan_rate

    # Learning

    def observe(self, record: StepRecord) -> None:
        """Learn acceptance from the step, and costs too where it read no prompt.

        Raises:
            ValueError: the record is not as long as the last answer.
        """
        asked, drafted, accepted = self._asked, record.drafted, record.accepted
        if not len(drafted) == len(accepted) == len(asked):
            raise ValueError(
                f"the record has {len(drafted)} drafted and {len(accepted)} accepted counts; "
                f"the step had {len(asked)} sequences"
            )
        if not asked:
            return
        num, step, caught_up = len(asked), self._step, False
        total = wanted = depth = won = 0
        if num == 1:
            wanted = depth = asked[0]
            total, won = drafted[0], accepted[0]
            rates = self._rates[self._ids[0]]
            if wanted:
                caught_up = rates.idle > _CATCH_UP_STEPS
                rates.idle = 0
                rates.add(wanted, won, step, _SEQUENCE_DECAY)
                self._shared.add(wanted, won, step, _SHARED_DECAY)
            else:
                rates.idle += 1
        else:
            ended, right_at = [0] * MAX_NUM_DRAFTS, [0] * MAX_NUM_DRAFTS
            for each, want, got, right in zip(self._ids, asked, drafted, accepted, strict=True):
                rates = self._rates[each]
                if not want:
                    rates.idle += 1
                    continue
                if rates.idle > _CATCH_UP_STEPS:
                    caught_up = True
                rates.idle = 0
                wanted += want
                total += got
                won += right
                if want > depth:
                    depth = want
                rates.add(want, right, step, _SEQUENCE_DECAY)
                ended[right if right < want else want - 1] += 1
                if right:
                    right_at[right - 1] += 1
            if wanted:
                # From "so many ended here" to "so many came at least here".
                for j in range(depth - 2, -1, -1):
                    ended[j] += ended[j + 1]
                    right_at[j] += right_at[j + 1]
                self._shared.add_all(ended[:depth], right_at[:depth], step)
        if wanted:
            if total != wanted or self._offered < 1.0:
                self._offered += 0.05 * (total / wanted - self._offered)
            if asked == self._plan and not self._trialling:
                self._compare(won)
        self._clean = not record.prompt_rows
        if not self._clean:
            return
        seconds = record.rest_seconds + record.draft_seconds
        if not (record.rest_seconds > 0.0 and record.draft_seconds >= 0.0 and seconds < inf):
            return
        curve = self._curve(num)
        news = curve.add(total, record.rest_seconds, step)
        if self._opens and curve.measured:
            self._opening += 1
        if news:
            self._hold = 0
            if news == _CHANGE:
                self._probe_soon()
        if wanted and not caught_up:
            self._drafts.add(depth, wanted, record.draft_seconds)
        self.seconds += seconds
        self._credit += _PROBE_SHARE * seconds
        if self._trialling:
            lost = seconds - (num + won) / self._plan_rate
            self._credit -= lost
            self.probe_seconds += lost
            if not self._trial_left:
                self._finish_trial()

    def _compare(self, won: int) -> None:
        """Hold accepted drafts against the plan's; a lasting difference makes old outcomes light.

        The bound is some three and a half deviations of the mean over the last ten steps or so.
        """
        error = won - self._plan_accepts
        self._surprise += 0.1 * (error - self._surprise)
        self._spread += 0.01 * (abs(error) - self._spread)
        if abs(self._surprise) > self._spread:
            self._surprise = 0.0
            self._hold = 0
            self._shared.lighten()
            for each in self._ids:
                self._rates[each].lighten()
            self._probe_soon()

    def _probe_soon(self) -> None:
        self._wait = _SHORTEST_WAIT
        self._next_trial = min(self._next_trial, self._step + _SHORTEST_WAIT)

    def _finish_trial(self) -> None:
        self._hold = 0
        after, _, _ = self._best(self._trial_views)
        changed = after != self._plan
        self._wait = _SHORTEST_WAIT if changed else min(2 * self._wait, _LONGEST_WAIT)
        self._next_trial = self._step + self._wait
