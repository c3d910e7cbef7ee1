"""The draft-length controller against every fixed length, on a real model and a real clock.

    python benchmarks/lengths.py --json benchmarks/results/lengths.json

Greedy; `num_drafts="auto"` and each fixed number of drafts decode the same ids in turn, in an order
drawn anew for each batch of prompts; ratios are taken within a round. The controller keeps what it
learned from round to round, as in a server; the first round, in which it knows nothing, is also
given by itself. `length_simulation.py` is the same against simulated costs. docs/metrics.md defines
the figures. The exit status is 1 if tokens differ from those of drafts off.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common

from paceline import LLM, bundled_model_path

AUTO = -1
"""Stands for the controller where others have their number of drafts."""


class Lengths(common.PacelineEngine):
    """One `LLM` for the controller and one for each fixed length."""

    def __init__(self, model: str, lengths: Sequence[int], **options: Any) -> None:
        self._llms = {
            n: LLM(model, num_drafts="auto" if n == AUTO else n, prefix_cache=False, **options)
            for n in lengths
        }

    def close(self) -> None:
        """Let them go."""
        for llm in self._llms.values():
            llm.close()


def measure(
    engine: Lengths,
    lengths: Sequence[int],
    prompts: Sequence[common.Prompt],
    *,
    batch: int,
    max_tokens: int,
    repeats: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Every length in turn over all prompts, `repeats` times behind a warm-up of the fixed ones.

    Args:
        engine: one way to decode for each of `lengths`.
        lengths: `AUTO` and fixed numbers of drafts, 0 among them.
        prompts: at batch 1 grouped by class in the result; else decoded `batch` at a time in the
            order given, all classes together.
        batch: prompts at once.
        max_tokens: of each answer, which runs past the end of sequence.
        repeats: rounds.
        seed: of the order.
    """
    ids = engine.encode([p.text for p in prompts])
    groups = [range(at, min(at + batch, len(ids))) for at in range(0, len(ids), batch)]
    order, shuffled = list(lengths), random.Random(seed)
    for n in lengths:
        if n != AUTO:
            some = [ids[i] for i in groups[0]]
            engine.run(prompts=some, max_tokens=max_tokens, num_drafts=n)
    kinds = list(dict.fromkeys(p.kind for p in prompts)) if batch == 1 else []
    names = ["all", *kinds]
    rates: dict[str, dict[int, list[float]]] = {x: {n: [] for n in lengths} for x in names}
    drafted: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    plain: dict[int, list[list[int]]] = {}
    equal = True
    for _ in range(repeats):
        sums = {name: {n: [0, 0.0] for n in lengths} for name in names}
        for number, group in enumerate(groups):
            shuffled.shuffle(order)
            done = {}
            for n in order:
                some = [ids[i] for i in group]
                timing = done[n] = engine.run(prompts=some, max_tokens=max_tokens, num_drafts=n)
                for name in ["all", *([prompts[group[0]].kind] if kinds else [])]:
                    sums[name][n][0] += timing.timed_tokens
                    sums[name][n][1] += timing.decode_seconds
                    if n == AUTO:
                        drafted[name].append(timing.speculation)
            plain.setdefault(number, done[0].token_ids)
            equal = equal and all(t.token_ids == plain[number] for t in done.values())
        for name, one in sums.items():
            for n, (tokens, seconds) in one.items():
                rates[name][n].append(tokens / seconds)
    return {
        "batch": batch,
        "tokens_equal": equal,
        "rows": [_row(name, rates[name], common.add_counts(drafted[name])) for name in names],
    }


def _row(name: str, rates: dict[int, list[float]], counts: dict[str, Any]) -> dict[str, Any]:
    fixed = [n for n in rates if n != AUTO]
    medians = {n: common.summary(rates[n])["median"] for n in fixed}
    best = max(fixed, key=lambda n: medians[n])
    over_best = [a / b for a, b in zip(rates[AUTO], rates[best], strict=True)]
    over_off = [a / b for a, b in zip(rates[AUTO], rates[0], strict=True)]
    return {
        "name": name,
        "fixed": {
            str(n): {
                "tokens_per_second": common.summary(rates[n]),
                "over_off": common.summary(
                    [a / b for a, b in zip(rates[n], rates[0], strict=True)]
                ),
            }
            for n in fixed
        },
        "auto": {
            "tokens_per_second": common.summary(rates[AUTO]),
            "mean_drafts": counts["num_drafted"] / max(1, counts["num_steps"]),
            "over_off": common.summary(over_off),
            "over_best_fixed": common.summary(over_best),
            "first_round_over_best_fixed": over_best[0],
        },
        "best_fixed": best,
    }


def main() -> None:
    args = parse()
    model = Path(args.model) if args.model else Path(bundled_model_path())
    about = common.provenance(model=model, prompts=args.prompts)
    prompts = common.load_prompts(args.prompts, kinds=args.classes, per_class=args.per_class)
    lengths = [AUTO, *sorted({0, *args.num_drafts})]
    runs = []
    for batch in args.batch:
        engine = Lengths(
            str(model),
            lengths,
            max_num_seqs=batch,
            max_seq_len=args.max_seq_len,
            backend=args.backend,
            num_threads=args.threads,
        )
        # In a batch the classes stand side by side, as they would in a server.
        some = sorted(prompts, key=lambda p: p.name.rpartition("-")[2]) if batch > 1 else prompts
        run = measure(
            engine,
            lengths,
            some,
            batch=batch,
            max_tokens=args.max_tokens,
            repeats=args.repeats,
            seed=args.seed,
        )
        engine.close()
        runs.append(run)
        print(show(run), flush=True)
    equal = all(run["tokens_equal"] for run in runs)
    result = {
        "benchmark": "lengths",
        "quick": args.quick,
        **about,
        "model": "bundled" if args.model is None else model.name,
        "settings": {
            "per_class": args.per_class,
            "max_tokens": args.max_tokens,
            "repeats": args.repeats,
            "seed": args.seed,
            "threads": args.threads,
            "backend": args.backend,
            "temperature": 0,
            "ignore_eos": True,
        },
        "tokens_equal": equal,
        "runs": runs,
    }
    if args.json:
        common.write_json(args.json, result)
        print(f"wrote {args.json}")
    if not equal:
        raise SystemExit("error: tokens differ from those of drafts off")


def show(run: dict[str, Any]) -> str:
    """The table for people."""
    cells = []
    for row in run["rows"]:
        auto = row["auto"]
        cells.append(
            (
                row["name"],
                *(f"{x['over_off']['median']:.2f}" for x in row["fixed"].values()),
                f"{auto['over_off']['median']:.2f}",
                f"{auto['mean_drafts']:.2f}",
                str(row["best_fixed"]),
                f"{auto['over_best_fixed']['median']:.3f}",
                f"{auto['first_round_over_best_fixed']:.3f}",
            )
        )
    fixed = [f"K={n}" for n in run["rows"][0]["fixed"]]
    header = (f"batch {run['batch']}, over off", *fixed, "auto", "mean K", "best K")
    return common.table((*header, "auto over best", "first round"), cells)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", help="checkpoint folder; default: the bundled model")
    add("--json", type=Path, help="write the result here")
    add("--prompts", type=Path, default=common.PROMPTS)
    add("--classes", nargs="+", help="default: all")
    add("--per-class", type=int, default=3, help="prompts of each class")
    add("--num-drafts", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8])
    add("--max-tokens", type=int, default=96)
    add("--max-seq-len", type=int, default=1024)
    add("--batch", type=int, nargs="+", default=[1, 8])
    add("--repeats", type=int, default=5)
    add("--seed", type=int, default=0)
    add("--threads", type=int, help="CPU threads; default: the libraries' choice")
    add("--backend", default="auto", choices=["auto", "torch", "fused"])
    add("--quick", action="store_true", help="few prompts and tokens: shows that it runs")
    args = parser.parse_args()
    if args.quick:
        args.per_class, args.num_drafts, args.max_tokens, args.repeats = 1, [1, 3], 8, 1
    return args


if __name__ == "__main__":
    main()
