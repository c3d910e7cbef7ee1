"""Decode speed of one checkpoint on a CPU: transformers, Paceline without and with drafts.

    python benchmarks/decode.py --json benchmarks/results/decode.json
    python benchmarks/decode.py --llama-server PATH --gguf trunk.gguf --gguf-mtp mtp.gguf

All engines decode the same token ids greedily in one run, in turn: every batch of prompts is given
to each engine before the next batch, the order changes from batch to batch, and a ratio is taken
within each repeat before the median over repeats. docs/metrics.md defines the figures.

The exit status is 1 if Paceline's tokens with drafts differ from its tokens without.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common

THREAD_CHOICES = (1, 2)


@dataclass
class Leg:
    """One engine in one setting, and what it did: per repeat, a timing for each batch."""

    name: str
    engine: common.Engine
    arguments: dict[str, Any]
    num_drafts: int = 0
    threads: int | None = None
    repeats: list[list[common.Timing]] = field(default_factory=list)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> common.Timing:
        return self.engine.run(prompts, max_tokens=max_tokens, **self.arguments)

    def rates(self) -> list[float]:
        """Decode tokens per second of each repeat."""
        return [
            sum(t.timed_tokens for t in repeat) / sum(t.decode_seconds for t in repeat)
            for repeat in self.repeats
        ]

    def end_to_end(self) -> list[float]:
        """Tokens per second of each repeat with the prompt's time counted."""
        return [
            sum(len(ids) for t in repeat for ids in t.token_ids) / sum(t.total for t in repeat)
            for repeat in self.repeats
        ]

    def tokens(self, repeat: int = 0) -> list[list[int]]:
        return [ids for timing in self.repeats[repeat] for ids in timing.token_ids]


def leg_name(engine: str, drafts: int) -> str:
    amount = "no drafts" if not drafts else "1 draft" if drafts == 1 else f"{drafts} drafts"
    return f"{engine}, {amount}"


def main() -> None:
    args = parse()
    from paceline import bundled_model_path

    model = Path(args.model) if args.model else Path(bundled_model_path())
    about = common.provenance(model=model, prompts=args.prompts)
    per_class = -(-max(args.num_prompts, max(args.batch) * args.groups) // len(args.classes))
    prompts = common.load_prompts(args.prompts, kinds=args.classes, per_class=per_class)
    prompts.sort(key=lambda p: p.name.rpartition("-")[2])  # the classes take turns

    result: dict[str, Any] = {
        "benchmark": "decode",
        "quick": args.quick,
        **about,
        "model": "bundled" if args.model is None else model.name,
        "settings": {
            "classes": args.classes,
            "max_tokens": args.max_tokens,
            "repeats": args.repeats,
            "warm_up": "one batch for each engine and setting, not counted",
            "seed": args.seed,
            "temperature": 0,
            "ignore_eos": True,
            "threads": args.threads,
            "backend": args.backend,
        },
        "runs": [],
        "ratios": {},
    }
    for batch in args.batch:
        run = measure(args, str(model), prompts, batch)
        result["runs"].append(run)
        print(show(run), flush=True)
    result["tokens_equal"] = all(run["tokens_equal"] for run in result["runs"])
    for run in result["runs"]:
        if run["batch"] == 1:
            result["ratios"].update(run["ratios"])
        else:
            result["ratios"][f"batch_{run['batch']}"] = run["ratios"]
    if args.json:
        common.write_json(args.json, result)
        print(f"wrote {args.json}")
    if not result["tokens_equal"]:
        raise SystemExit("error: tokens with drafts differ from tokens without")


def measure(
    args: argparse.Namespace, model: str, prompts: list[common.Prompt], batch: int
) -> dict[str, Any]:
    """All engines at one batch size."""
    with Engines() as engines:
        ours = engines.start(
            "paceline",
            common.PacelineEngine,
            model=model,
            draft_lengths=[0, *args.num_drafts],
            max_num_seqs=batch,
            max_seq_len=args.max_seq_len,
            num_threads=args.threads,
            backend=args.backend,
        )
        batches = make_batches(ours, prompts, batch, args)
        legs = []
        if not args.no_transformers:
            theirs = engines.start("transformers", common.TransformersEngine, model=model)
            choices = [
                Leg(f"transformers, {n} thr", theirs, {"num_threads": n}, threads=n)
                for n in args.thread_choices
            ]
            legs.append(fastest(choices, batches, args.max_tokens))
        if args.llama_server:
            legs += llama_legs(engines, args, batch, batches)
        legs += [
            Leg(
                leg_name("paceline", drafts),
                ours,
                {"num_drafts": drafts},
                num_drafts=drafts,
                threads=args.threads,
            )
            for drafts in (0, *args.num_drafts)
        ]
        for leg in legs:
            leg.run(batches[0], min(args.max_tokens, 32))
        order = random.Random(args.seed)
        for _ in range(args.repeats):
            for leg in legs:
                leg.repeats.append([])
            for ids in batches:
                for leg in order.sample(legs, len(legs)):
                    leg.repeats[-1].append(leg.run(ids, args.max_tokens))
        return report(legs, batch, batches, args)


class Engines:
    """Processes that end with the block."""

    def __init__(self) -> None:
        self._started: list[common.Engine] = []

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._started:
            engine.close()

    def start(self, name: str, factory: Any, **arguments: Any) -> common.Engine:
        engine = common.Engine(name, factory, **arguments)
        self._started.append(engine)
        return engine


def make_batches(
    ours: common.Engine, prompts: list[common.Prompt], batch: int, args: argparse.Namespace
) -> list[list[list[int]]]:
    """Prompts as ids, in batches; a batch is cut to its shortest prompt, so none needs padding."""
    count = args.num_prompts if batch == 1 else batch * args.groups
    chosen = prompts[:count]
    if len(chosen) < count:
        raise SystemExit(f"{count} prompts are needed, the classes have {len(chosen)}")
    ids = ours.call("encode", texts=[p.text for p in chosen])
    if batch > 1:
        ids.sort(key=len)
    out = []
    for group in [ids[at : at + batch] for at in range(0, len(ids), batch)]:
        length = min(len(row) for row in group)
        out.append([list(row[:length]) for row in group])
    return out


def llama_legs(
    engines: Engines, args: argparse.Namespace, batch: int, batches: list[list[list[int]]]
) -> list[Leg]:
    """llama.cpp without drafts at its best number of threads, then with drafts at the same."""

    def leg(drafts: int, threads: int) -> Leg:
        name = leg_name("llama.cpp", drafts)
        engine = engines.start(
            name,
            common.LlamaServer,
            server=str(args.llama_server),
            gguf=str(args.gguf),
            gguf_mtp=str(args.gguf_mtp) if args.gguf_mtp else None,
            num_drafts=drafts,
            num_threads=threads,
            max_num_seqs=batch,
            max_seq_len=args.max_seq_len,
        )
        return Leg(name, engine, {}, num_drafts=drafts, threads=threads)

    plain = fastest([leg(0, n) for n in args.thread_choices], batches, args.max_tokens)
    assert plain.threads is not None
    out = [plain]
    if args.gguf_mtp:
        out += [leg(drafts, plain.threads) for drafts in args.llama_drafts]
    return out


def fastest(choices: list[Leg], batches: list[list[list[int]]], max_tokens: int) -> Leg:
    """The leg with the best median over three short calls, taken in turn after one to warm up."""
    if len(choices) == 1:
        return choices[0]
    rates: dict[str, list[float]] = {leg.name + str(leg.threads): [] for leg in choices}
    for turn in range(4):
        for leg in choices:
            timing = leg.run(batches[turn % len(batches)], min(max_tokens, 48))
            if turn:
                rate = timing.timed_tokens / timing.decode_seconds
                rates[leg.name + str(leg.threads)].append(rate)
    return max(choices, key=lambda leg: statistics.median(rates[leg.name + str(leg.threads)]))


def report(
    legs: list[Leg], batch: int, batches: list[list[list[int]]], args: argparse.Namespace
) -> dict[str, Any]:
    """Figures of one batch size."""
    by_name = {leg.name: leg for leg in legs}
    off = by_name[leg_name("paceline", 0)]
    on = [leg for leg in legs if leg.engine is off.engine and leg.num_drafts]
    plain = off.tokens()
    equal = all(leg.tokens(r) == plain for leg in [off, *on] for r in range(args.repeats))
    rows = []
    for leg in legs:
        same = [common.common_prefix(a, b) for a, b in zip(leg.tokens(), plain, strict=True)]
        rows.append(
            {
                "name": leg.name,
                "engine": leg.engine.name.partition(",")[0],
                "num_drafts": leg.num_drafts,
                "threads": leg.threads,
                "about": leg.engine.about,
                "decode_tokens_per_second": common.summary(leg.rates()),
                "end_to_end_tokens_per_second": common.summary(leg.end_to_end()),
                "first_token_seconds": statistics.median(
                    t.first for repeat in leg.repeats for t in repeat
                ),
                "speculation": speculation(leg) if leg.num_drafts else None,
                "same_as_paceline": {
                    "sequences": len(same),
                    "equal": sum(n == len(ids) for n, ids in zip(same, plain, strict=True)),
                    "mean_common_prefix": statistics.mean(same),
                },
            }
        )

    def ratio(a: Leg, b: Leg) -> dict[str, Any]:
        return common.summary([x / y for x, y in zip(a.rates(), b.rates(), strict=True)])

    ratios: dict[str, Any] = {}
    spread: dict[str, Any] = {}

    def note(name: str, a: Leg, b: Leg) -> None:
        spread[name] = ratio(a, b)
        ratios[name] = spread[name]["median"]

    best = off
    if on:
        best = max(on, key=lambda leg: ratio(leg, off)["median"])
        note("on_over_off", best, off)
        ratios["best_num_drafts"] = best.num_drafts
        ratios["on_over_off_by_num_drafts"] = {
            str(leg.num_drafts): ratio(leg, off)["median"] for leg in on
        }
    for leg in legs:
        if leg.name.startswith("transformers"):
            note("off_over_transformers", off, leg)
            note("best_over_transformers", best, leg)
    rivals = [leg for leg in legs if leg.name.startswith("llama.cpp")]
    if rivals:
        note("off_over_llama_cpp_off", off, by_name[leg_name("llama.cpp", 0)])
        fast = max(rivals, key=lambda leg: statistics.median(leg.rates()))
        note("best_over_llama_cpp_best", best, fast)
        ratios["llama_cpp_best_num_drafts"] = fast.num_drafts
    return {
        "batch": batch,
        "prompts": sum(len(ids) for ids in batches),
        "prompt_tokens": sum(len(row) for ids in batches for row in ids),
        "tokens_equal": equal,
        "legs": rows,
        "ratios": ratios,
        "ratio_spread": spread,
    }


def speculation(leg: Leg) -> dict[str, Any]:
    """What drafting did in one repeat; every repeat does the same."""
    timings = leg.repeats[0]
    total = common.add_counts(t.speculation for t in timings)
    if total["num_draft_steps"]:
        return common.acceptance(total)
    # llama.cpp counts drafts, not steps; each step yields its accepted drafts and one token.
    emitted = sum(t.timed_tokens for t in timings)
    drafted, accepted = total["num_drafted"], total["num_accepted"]
    return {
        "num_drafted": drafted,
        "num_accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "mean_acceptance_length": emitted / (emitted - accepted) if emitted > accepted else 1.0,
    }


def show(run: dict[str, Any]) -> str:
    """The table for people."""
    rows = []
    for leg in run["legs"]:
        rate, drafted = leg["decode_tokens_per_second"], leg["speculation"]
        length = f"{drafted['mean_acceptance_length']:.2f}" if drafted else "-"
        same = leg["same_as_paceline"]
        rows.append(
            (
                leg["name"],
                "auto" if leg["threads"] is None else str(leg["threads"]),
                f"{rate['median']:.1f}",
                f"{rate['low']:.1f} to {rate['high']:.1f}",
                f"{leg['end_to_end_tokens_per_second']['median']:.1f}",
                f"{leg['first_token_seconds'] * 1e3:.0f}",
                length,
                f"{same['equal']}/{same['sequences']}",
            )
        )
    header = ("", "threads", "decode tok/s", "spread", "end to end", "first, ms", "length", "same")
    lines = [f"\nbatch {run['batch']}, {run['prompts']} prompts", common.table(header, rows)]
    for name, value in run["ratios"].items():
        if isinstance(value, float):
            lines.append(f"{name}: {value:.2f}")
    lines.append(f"tokens with drafts equal tokens without: {run['tokens_equal']}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", help="checkpoint folder; default: the bundled model")
    add("--json", type=Path, help="write the result here")
    add("--prompts", type=Path, default=common.PROMPTS)
    add("--classes", nargs="+", default=list(common.CODE_CLASSES))
    add("--num-prompts", type=int, default=12, help="prompts at batch 1")
    add("--groups", type=int, default=2, help="batches at a batch size above 1")
    add("--batch", type=int, nargs="+", default=[1, 8])
    add("--num-drafts", type=int, nargs="+", default=[1, 2, 3, 4])
    add("--max-tokens", type=int, default=128)
    add("--max-seq-len", type=int, default=1024)
    add("--repeats", type=int, default=5)
    add("--seed", type=int, default=0, help="of the order of engines")
    add("--threads", type=int, help="Paceline's; default: its own choice")
    add("--backend", default="auto", choices=["auto", "torch", "fused"], help="Paceline's")
    add(
        "--thread-choices",
        type=int,
        nargs="+",
        default=list(THREAD_CHOICES),
        help="numbers of threads that the other engines may pick their best from",
    )
    add("--no-transformers", action="store_true")
    add("--llama-server", type=Path, help="llama.cpp's server; adds its legs")
    add("--gguf", type=Path, help="the checkpoint's trunk for llama.cpp (benchmarks/README.md)")
    add("--gguf-mtp", type=Path, help="its MTP head; adds legs with drafts")
    add("--llama-drafts", type=int, nargs="+", default=[1, 2, 3])
    add("--quick", action="store_true", help="few prompts and tokens: shows that it runs")
    args = parser.parse_args()
    if args.llama_server and not args.gguf:
        parser.error("--llama-server needs --gguf")
    if args.quick:
        args.num_prompts, args.groups, args.max_tokens, args.repeats = 2, 1, 12, 1
        args.num_drafts, args.thread_choices, args.llama_drafts = [1, 2], [1], [1]
    if args.max_tokens < 2:
        parser.error("--max-tokens must be at least 2: the first token is the prompt's")
    return args


if __name__ == "__main__":
    main()
