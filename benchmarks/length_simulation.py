"""What the length controller loses against the best fixed draft length, where all costs are known.

    python benchmarks/length_simulation.py --json benchmarks/results/length-simulation.json

A discrete simulation: every scenario gives the seconds of a step by its rows and drafts, and the
probability of each draft by its position in the text. The controller sees what an engine would see:
counts of accepted drafts and noisy seconds with outliers. It is charged the noiseless seconds,
those of first calls and of its probes included, and so is every fixed length, over the same texts
(the draws behind "is this draft right" go with the places of a text). No clock is read: the figures
do not depend on the machine, and repeat exactly. The exit status is 1 where the controller loses
more than 5 % against the best fixed length or 2 % against drafts off.
"""

from __future__ import annotations

import argparse
import bisect
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

from paceline.draft.length import (
    FixedLength,
    LengthController,
    LengthPolicy,
    SequenceView,
    StepRecord,
)

Rest = Callable[[int, int], float]
"""(sequences, rows) -> seconds of a step without its draft phase."""

Rates = tuple[float, ...]
"""Probability of each draft of a step, given that those before it were right."""

LENGTHS = range(9)


@dataclass(frozen=True)
class Costs:
    """A machine. All in seconds."""

    rest: Rest
    draft: Callable[[int, int, int], float]
    """(sequences, passes of the chain, drafts in all) -> seconds, where anything is drafted."""
    catch_up: float
    """A row that a drafter has missed, up to 128 of them, when its sequence drafts again."""


@dataclass(frozen=True)
class Scenario:
    """One machine and one kind of text.

    Attributes:
        phases: (tokens, kinds of text) in turn, around and around; a sequence takes the kind of its
            number among them.
        batch: sequences at once.
        tokens: emitted in all before the run ends.
        length: tokens of one sequence, drawn between the two.
        later: the machine after half of the tokens.
        noise: spread of the measured seconds (of their logarithm).
        outliers: share of steps that are measured 3 to 10 times too long.
        first_call: times the usual seconds that a number of rows takes when it is first run.
    """

    name: str
    costs: Costs
    phases: tuple[tuple[int, tuple[Rates, ...]], ...]
    batch: int = 1
    tokens: int = 6000
    length: tuple[int, int] = (400, 1200)
    later: Costs | None = None
    noise: float = 0.15
    outliers: float = 0.01
    first_call: float = 1.0


@dataclass
class Outcome:
    """One run."""

    seconds: float
    tokens: int
    steps: int
    probe_seconds: float
    mean_length: float


class _Text:
    """A sequence: its draws by place in the text, and how far it has come."""

    def __init__(self, number: int, length: int, seed: int) -> None:
        draws = random.Random(f"{seed}/{number}")
        self.number = number
        self.length = length
        self.draws = [draws.random() for _ in range(length + 16)]
        self.emitted = 1
        self.missed = 0


def run(scenario: Scenario, policy: LengthPolicy, seed: int) -> Outcome:
    """Decode the scenario's texts with one policy."""
    noise = random.Random(f"noise/{scenario.name}/{seed}")
    lengths = random.Random(f"lengths/{scenario.name}/{seed}")
    ends: list[int] = []
    for tokens, _ in scenario.phases:
        ends.append(tokens + (ends[-1] if ends else 0))
    live: list[_Text] = []
    number = emitted = steps = lengths_sum = choices = 0
    seconds = 0.0
    met: set[tuple[int, int]] = set()

    while emitted < scenario.tokens:
        prompt_rows = 0
        decoding = list(live)
        if len(live) < scenario.batch:
            # One prompt a step is read beside the decoding rows.
            text = _Text(number, lengths.randint(*scenario.length), seed)
            live.append(text)
            number += 1
            prompt_rows = 64
            if not decoding:
                continue
        costs = scenario.costs
        if scenario.later is not None and emitted > scenario.tokens // 2:
            costs = scenario.later
        views = [SequenceView(t.number, min(8, t.length - t.emitted - 1)) for t in decoding]
        chosen = policy.choose(views)
        accepted = []
        missed = 0
        for text, count in zip(decoding, chosen, strict=True):
            right = 0
            if count:
                missed += min(128, text.missed)
                text.missed = 0
                place = text.emitted % ends[-1]
                kinds = scenario.phases[bisect.bisect_right(ends, place)][1]
                rates = kinds[text.number % len(kinds)]
                while right < count and text.draws[text.emitted + right] < rates[right]:
                    right += 1
            else:
                text.missed += 1
            accepted.append(right)
            text.emitted += right + 1
            emitted += right + 1
        drafts = sum(chosen)
        rows = len(decoding) + drafts
        rest = costs.rest(len(decoding), rows + prompt_rows)
        draft = costs.draft(len(decoding), max(chosen), drafts) if drafts else 0.0
        draft += missed * costs.catch_up
        if scenario.first_call > 1.0 and not prompt_rows and (len(decoding), rows) not in met:
            met.add((len(decoding), rows))
            rest *= scenario.first_call
        seconds += rest + draft
        steps += 1
        lengths_sum += drafts
        choices += len(decoding)
        spread = scenario.noise
        factor = noise.lognormvariate(-spread * spread / 2, spread)
        if noise.random() < scenario.outliers:
            factor *= noise.uniform(3.0, 10.0)
        policy.observe(
            StepRecord(
                drafted=chosen,
                accepted=accepted,
                draft_seconds=draft * noise.lognormvariate(-spread * spread / 2, spread),
                rest_seconds=rest * factor,
                prompt_rows=prompt_rows,
            )
        )
        live = [t for t in live if t.emitted < t.length]
    probes = policy.probe_seconds if isinstance(policy, LengthController) else 0.0
    return Outcome(seconds, emitted, steps, probes, lengths_sum / choices)


# Machines


def linear(first: float, row: float, draft: float, *, sequence: float = 0.0) -> Costs:
    """Each row costs the same; `row`, `draft`, `sequence` in parts of the first."""
    return Costs(
        rest=lambda n, rows: first * (1.0 + row * (rows - 1) + sequence * (n - 1)),
        draft=lambda n, passes, drafts: first * draft * (0.5 * passes + 0.5 * drafts),
        catch_up=first * 0.02,
    )


def saturating(first: float, row: float, until: int, after: float, draft: float) -> Costs:
    """Rows cost `row` up to a number of them and `after` beyond."""

    def rest(n: int, rows: int) -> float:
        low = min(rows, until) - 1
        return first * (1.0 + row * low + after * max(0, rows - until))

    return Costs(
        rest=rest,
        draft=lambda n, passes, drafts: first * draft * passes,
        catch_up=first * 0.005,
    )


def stairs(first: float, wide: int, row: float, draft: float) -> Costs:
    """Rows are filled up to a multiple of `wide`."""
    return Costs(
        rest=lambda n, rows: first * (1.0 + row * wide * (-(-rows // wide) - 1)),
        draft=lambda n, passes, drafts: first * draft * passes,
        catch_up=first * 0.005,
    )


FUSED = linear(0.35e-3, 0.6, 0.3)
FUSED_CHEAP = linear(0.35e-3, 0.45, 0.12)
TORCH = linear(45e-3, 0.04, 0.13)
GPU = saturating(4e-3, 0.01, 16, 0.02, 0.07)
GPU_BUSY = saturating(8e-3, 0.004, 48, 0.025, 0.05)
MOE = linear(20e-3, 0.3, 0.1)
MOE_BATCH = saturating(20e-3, 0.3, 12, 0.06, 0.05)
SATURATED = linear(2e-3, 0.8, 0.05)
STAIRS = stairs(5e-3, 4, 0.15, 0.06)


def flat(rate: float) -> Rates:
    return (rate,) * 8


CODE = (0.92, 0.9, 0.88, 0.86, 0.85, 0.84, 0.83, 0.82)
BUNDLED = (0.77, 0.74, 0.74, 0.74, 0.73, 0.73, 0.72, 0.72)
PROSE = (0.45, 0.35, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3)
RECURSED = (0.98, 0.65, 0.23, 0.15, 0.1, 0.1, 0.1, 0.1)
NEVER = flat(0.05)
ALWAYS = flat(0.99)


def steady(*kinds: Rates) -> tuple[tuple[int, tuple[Rates, ...]], ...]:
    return ((1_000_000, kinds),)


DRIFT = ((1500, (CODE,)), (1500, (PROSE,)))
LONG = (6000, 6000)

SCENARIOS = [
    Scenario("fused, bundled head", FUSED, steady(BUNDLED), tokens=4000),
    Scenario("fused, never accepted", FUSED, steady(NEVER), tokens=4000),
    Scenario("fused, always accepted", FUSED, steady(ALWAYS), tokens=8000),
    Scenario("fused, cheap drafts, code", FUSED_CHEAP, steady(CODE), tokens=6000),
    Scenario("torch, bundled head", TORCH, steady(BUNDLED)),
    Scenario("torch, never accepted", TORCH, steady(NEVER), tokens=4000),
    Scenario("torch, always accepted", TORCH, steady(ALWAYS), tokens=12000),
    Scenario("torch, falls with position", TORCH, steady(RECURSED)),
    Scenario("GPU, bundled head", GPU, steady(BUNDLED), tokens=8000, first_call=10.0),
    Scenario("GPU, prose", GPU, steady(PROSE), first_call=10.0),
    Scenario("GPU, rows by fours", STAIRS, steady(CODE), tokens=8000),
    Scenario("MoE, bundled head", MOE, steady(BUNDLED)),
    Scenario("MoE, falls with position", MOE, steady(RECURSED)),
    Scenario("MoE, code to prose to code", MOE, DRIFT, length=LONG, tokens=12000),
    Scenario("torch, code to prose to code", TORCH, DRIFT, length=LONG, tokens=12000),
    Scenario("fused, code to prose to code", FUSED_CHEAP, DRIFT, length=LONG, tokens=12000),
    Scenario("MoE, noise of 0.3", MOE, steady(CODE), noise=0.3, outliers=0.03),
    Scenario("fused, noise of 0.3", FUSED, steady(PROSE), noise=0.3, outliers=0.03, tokens=4000),
    Scenario("rows become dear", GPU, steady(BUNDLED), later=FUSED, tokens=8000),
    Scenario("rows become cheap", FUSED, steady(BUNDLED), later=GPU, tokens=8000),
    Scenario("all slows down", MOE, steady(CODE), later=linear(40e-3, 0.3, 0.1)),
    Scenario("batch 8, saturated", SATURATED, steady(BUNDLED), batch=8, tokens=24000),
    Scenario("batch 8, GPU", GPU, steady(BUNDLED), batch=8, tokens=40000),
    Scenario("batch 8, MoE", MOE_BATCH, steady(CODE), batch=8, tokens=40000),
    Scenario("batch 8, two kinds of text", MOE_BATCH, steady(CODE, PROSE), batch=8, tokens=30000),
    Scenario("batch 32, GPU", GPU_BUSY, steady(BUNDLED), batch=32, tokens=100000),
    Scenario("batch 32, saturated", SATURATED, steady(PROSE), batch=32, tokens=64000),
    Scenario(
        "batch 8, short requests", MOE_BATCH, steady(CODE, BUNDLED, PROSE), batch=8,
        tokens=30000, length=(16, 160),
    ),
]  # fmt: skip


def study(scenario: Scenario, seeds: Sequence[int]) -> dict[str, Any]:
    """The controller against every fixed length, means over the seeds."""
    fixed = []
    for length in LENGTHS:
        outcomes = [run(scenario, FixedLength(length), seed) for seed in seeds]
        fixed.append(statistics.mean(o.tokens / o.seconds for o in outcomes))
    outcomes = [run(scenario, LengthController(), seed) for seed in seeds]
    rate = statistics.mean(o.tokens / o.seconds for o in outcomes)
    best = max(fixed)
    return {
        "name": scenario.name,
        "batch": scenario.batch,
        "steps": round(statistics.mean(o.steps for o in outcomes)),
        "fixed_tokens_per_second": fixed,
        "best_fixed": fixed.index(best),
        "tokens_per_second": rate,
        "over_best_fixed": rate / best,
        "over_off": rate / fixed[0],
        "worst_seed_over_best_fixed": min(o.tokens / o.seconds for o in outcomes) / best,
        "mean_length": statistics.mean(o.mean_length for o in outcomes),
        "probe_share": max(o.probe_seconds / o.seconds for o in outcomes),
    }


def about() -> dict[str, Any]:
    """What a reader needs to repeat the figures; the machine is not in it, it does not matter."""
    return {
        "command": [Path(sys.argv[0]).name, *map(common.shown, sys.argv[1:])],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        **common.commit(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="runs of each scenario")
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    document = about()
    header = ["scenario", "batch", "steps", "best K", "mean K", "of best", "worst", "of off"]
    rows = []
    for scenario in SCENARIOS:
        if args.only in scenario.name:
            rows.append(study(scenario, range(args.seeds)))
            print(f"{len(rows)} {scenario.name}", file=sys.stderr, flush=True)
    if not rows:
        raise SystemExit(f"no scenario has {args.only!r} in its name")
    cells = [
        [
            row["name"],
            str(row["batch"]),
            str(row["steps"]),
            str(row["best_fixed"]),
            f"{row['mean_length']:.2f}",
            f"{row['over_best_fixed']:.3f}",
            f"{row['worst_seed_over_best_fixed']:.3f}",
            f"{row['over_off']:.3f}",
        ]
        for row in rows
    ]
    print(common.table(header, cells))
    document |= {"seeds": args.seeds, "complete": not args.only, "scenarios": rows}
    if args.json:
        common.write_json(args.json, document)
    kept = all(row["over_best_fixed"] >= 0.95 and row["over_off"] >= 0.98 for row in rows)
    print(json.dumps(document))
    raise SystemExit(0 if kept else 1)


if __name__ == "__main__":
    main()
