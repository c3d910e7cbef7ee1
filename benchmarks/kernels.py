"""Time of one step of the compiled CPU path by number of rows, of a draft step and of the head.

    python benchmarks/kernels.py --json benchmarks/results/kernels.json

Runs on the bundled model's weights, or on a random checkpoint of its shape (`--random`). Rows of a
step are one sequence's, at the given context; ids are drawn anew for each step, so that routed
experts are read from memory as in use. Shown are the fastest step, the fifth fastest of a hundred
and the median: on a busy machine the first says most about the code.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

ROWS = (1, 2, 3, 4, 5, 8, 16, 64, 256)


class Timed:
    """A target that notes how long each forward takes."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.seconds: list[float] = []

    def forward(self, inputs: Any, pools: Any) -> Any:
        start = time.perf_counter()
        out = self.model.forward(inputs, pools)
        self.seconds.append(time.perf_counter() - start)
        return out


def summary(seconds: list[float]) -> dict[str, Any]:
    """Figures in milliseconds."""
    low, fifth, middle = np.percentile(np.array(seconds) * 1e3, [0, 5, 50])
    return {"min": float(low), "p5": float(fifth), "median": float(middle), "count": len(seconds)}


def timed(call: Callable[[], object], count: int) -> dict[str, Any]:
    """`count` calls."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return summary(seconds)


def measure(
    path: Path, *, threads: int, rows: list[int], context: int, repeats: int
) -> dict[str, Any]:
    """All timings at one number of threads."""
    from paceline.cache.blocks import BlockAllocator
    from paceline.cache.drafter import DrafterRing
    from paceline.cache.state import SequenceCache
    from paceline.engine.runner import RowInputs, Runner
    from paceline.models.deepseek_v4.build import build
    from paceline.models.deepseek_v4.checkpoint import load_weights
    from paceline.models.step import MtpInputs

    cpu, kind = torch.device("cpu"), torch.float32
    weights = load_weights(path)
    config = weights.config
    start = time.perf_counter()
    built = build(weights, config, device=cpu, dtype=kind, backend="fused", num_threads=threads)
    packing = time.perf_counter() - start
    widest = max(256, *rows)
    limit = -(-(context + widest) // 128) * 128
    target = Timed(built.model)
    runner = Runner(
        target,
        config,
        num_slots=1,
        num_blocks=limit // 128,
        max_seq_len=limit,
        max_rows=widest,
        device=cpu,
        dtype=kind,
    )
    cache = SequenceCache(BlockAllocator(limit // 128), slot=0, max_width=widest, max_seq_len=limit)
    rng = np.random.default_rng(0)

    def some(count: int, logits: int) -> RowInputs:
        ids = rng.integers(8, config.vocab_size, count).tolist()
        return RowInputs(cache=cache, ids=ids, num_logits=logits, num_hiddens=logits)

    while cache.length < context:
        count = min(256, context - cache.length)
        runner.run([some(count, 1)])
        cache.commit(count)

    result: dict[str, Any] = {"threads": threads, "packing_seconds": packing, "steps": {}}
    print(f"\n{threads} thread{'s' if threads > 1 else ''}, context {context}, milliseconds")
    print(f"{'':>16} {'min':>8} {'p5':>8} {'median':>8} {'of one row':>11}")

    def show(name: str, times: dict[str, Any], ratio: float | None = None) -> None:
        shown = "" if ratio is None else f"{ratio:11.2f}"
        print(
            f"{name:>16} {times['min']:8.3f} {times['p5']:8.3f} {times['median']:8.3f} {shown}",
            flush=True,
        )

    for count in rows:
        target.seconds.clear()
        for _ in range(max(5, repeats // (1 + count // 8))):
            # As decode asks for all rows, a prompt's chunk for the last.
            runner.run([some(count, count if count <= 16 else 1)])
            cache.commit(0)
        times = summary(target.seconds)
        result["steps"][count] = times
        show(f"{count} rows", times, times["p5"] / result["steps"][rows[0]]["p5"])

    if built.mtp is not None:
        mtp = built.mtp
        ring = DrafterRing.allocate(config, num_slots=1, max_width=16, device=cpu, dtype=kind)
        for count in (1, 4):
            zeros = torch.zeros(count, dtype=torch.int64)
            inputs = MtpInputs(
                embeds=torch.randn(count, config.hidden_size),
                hiddens=torch.randn(count, config.hc_mult, config.hidden_size),
                keys=torch.arange(context, context + count),
                slots=zeros,
                first_keys=zeros,
            )
            for name, call in (
                ("draft step", lambda i=inputs: mtp.forward(i, ring)),
                ("draft rows only", lambda i=inputs: mtp.write_rows(i, ring)),
                ("head", lambda i=inputs: built.lm_head.matmul(i.embeds)),
            ):
                times = timed(call, repeats)
                result[f"{name.replace(' ', '_')}_{count}"] = times
                show(f"{name}, {count}", times)
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="checkpoint; default: the bundled one")
    parser.add_argument("--random", action="store_true", help="a random one of the bundled shape")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)

    from paceline import bundled_model_path
    from paceline.models.deepseek_v4.synth import preset_config, write_synthetic
    from paceline.ops import numba_cpu

    if not numba_cpu.available():
        raise SystemExit(f"the compiled path is not to be had: {numba_cpu.why_not()}")
    with tempfile.TemporaryDirectory() as scratch:
        path = args.model
        if args.random:
            path = write_synthetic(Path(scratch) / "c", preset_config("small"), dtype="fp4")
        path = Path(path or bundled_model_path())
        about = common.provenance(model=path, prompts=common.PROMPTS)
        runs = [
            measure(
                path,
                threads=threads,
                rows=sorted(set(args.rows)),
                context=args.context,
                repeats=args.repeats,
            )
            for threads in args.threads
        ]
    after = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    document = {
        "provenance": about,
        "load_average_after": after,
        "model": "random" if args.random else "bundled" if args.model is None else "given",
        "context": args.context,
        "runs": runs,
    }
    line = json.dumps(document)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
