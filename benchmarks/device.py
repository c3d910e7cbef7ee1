"""Greedy tokens on a GPU against the CPU's, with every near-tie listed; or captured steps' speed.

Each position is judged with the CPU's tokens before it: where the GPU chooses another token, the
difference is listed with the margin by which the CPU preferred its own, and the walk goes on from
the CPU's choice. With `--graphs`, steps as they are run against captured ones instead, drafts off
and on. Prints a table; `--json FILE` writes the record, after each part.

    python benchmarks/device.py --device cuda --tokens 1000 --json benchmarks/results/device.json
    python benchmarks/device.py --graphs --json benchmarks/results/device-graphs.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from paceline import LLM, SamplingParams
from paceline.cache.blocks import BlockAllocator
from paceline.cache.state import SequenceCache
from paceline.config import ModelConfig
from paceline.draft.proposer import DraftShape
from paceline.engine.graphs import CudaCapture, GraphedDraftRunner
from paceline.engine.runner import RowInputs, Runner, StepLists
from paceline.models.step import TargetModel
from paceline.types import MAX_NUM_DRAFTS

MOST_DRAFTS = 4
PROMPTS = Path(__file__).parent / "prompts.jsonl"


def read_prompts(count: int) -> list[str]:
    """`count` prompts, taken in turn from the classes of the file."""
    by_class: dict[str, list[str]] = {}
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        by_class.setdefault(entry["class"], []).append(entry["prompt"])
    rounds = zip(*by_class.values(), strict=False)
    return [prompt for group in rounds for prompt in group][:count]


def teacher_forced(
    model: TargetModel, config: ModelConfig, ids: list[int], device: torch.device
) -> torch.Tensor:
    """Logits [len(ids), vocab] fp32 on the CPU of one forward over `ids`."""
    blocks = -(-len(ids) // 128)
    runner = Runner(
        model,
        config,
        num_slots=1,
        num_blocks=blocks,
        max_seq_len=blocks * 128,
        max_rows=len(ids),
        device=device,
        dtype=torch.float32,
    )
    cache = SequenceCache(
        BlockAllocator(blocks), slot=0, max_width=len(ids), max_seq_len=blocks * 128
    )
    row = RowInputs(cache=cache, ids=ids, num_logits=len(ids), num_hiddens=1)
    return runner.run([row]).logits.float().cpu()


def differences(
    llm: LLM, prompts: list[list[int]], reference: list[list[int]]
) -> list[dict[str, int]]:
    """Where `llm` chooses another token than `reference`, given the reference's tokens before."""
    found = []
    at = [0] * len(prompts)
    while True:
        open_ = [i for i, done in enumerate(at) if done < len(reference[i])]
        if not open_:
            return found
        results = llm.generate(
            [prompts[i] + reference[i][: at[i]] for i in open_],
            [SamplingParams(max_tokens=len(reference[i]) - at[i], ignore_eos=True) for i in open_],
        )
        for i, result in zip(open_, results, strict=True):
            wanted = reference[i][at[i] :]
            pairs = zip(result.token_ids, wanted, strict=True)
            bad = next((j for j, (a, b) in enumerate(pairs) if a != b), None)
            if bad is None:
                at[i] = len(reference[i])
                continue
            found.append(
                {
                    "prompt": i,
                    "position": at[i] + bad,
                    "cpu": wanted[bad],
                    "device": result.token_ids[bad],
                }
            )
            at[i] += bad + 1


def compare(
    *, device: str, dtype: str, num_drafts: int, prompts: list[str], tokens: int
) -> dict[str, Any]:
    """Tokens of the device against the CPU's; margins from the CPU's own logits."""
    each = -(-tokens // len(prompts))
    params = SamplingParams(max_tokens=each, ignore_eos=True)
    with LLM(num_drafts=0, max_seq_len=1024, prefix_cache=False) as cpu:
        expected = cpu.generate(prompts, params, allow_special=True)
        ids = [result.prompt_token_ids for result in expected]
        reference = [result.token_ids for result in expected]
        options: dict[str, Any] = {"max_seq_len": 1024, "prefix_cache": False}
        with LLM(device=device, dtype=dtype, num_drafts=num_drafts, **options) as other:
            found: list[dict[str, Any]] = list(differences(other, ids, reference))
        model = cpu.engine._runner._model
        for entry in found:
            i, j = entry["prompt"], entry["position"]
            logits = teacher_forced(
                model, cpu.config, ids[i] + reference[i][:j], torch.device("cpu")
            )[-1]
            entry["margin"] = float(logits[entry["cpu"]] - logits[entry["device"]])
            entry["logit_std"] = float(logits.std())
    return {
        "dtype": dtype,
        "num_drafts": num_drafts,
        "tokens": sum(len(r) for r in reference),
        "differences": found,
        "largest_margin": max((entry["margin"] for entry in found), default=0.0),
    }


class Stepped:
    """An LLM's engine run step by step, so that decoding is timed apart from reading prompts."""

    def __init__(self, llm: LLM, prompts: list[str]) -> None:
        self.engine = llm.engine
        params = SamplingParams(max_tokens=1, ignore_eos=True, num_drafts=0)
        read = llm.generate(prompts, params, allow_special=True)
        self.ids = [result.prompt_token_ids for result in read]

    def decode(self, count: int, *, batch: int, num_drafts: int) -> tuple[list[list[int]], Leg]:
        """Decode `count` tokens of each prompt from the moment that all have their first.

        Returns:
            (ids of each prompt, what it took).
        """
        params = SamplingParams(max_tokens=count, ignore_eos=True, num_drafts=num_drafts)
        chosen = self.ids[:batch]
        tokens = {self.engine.add(ids, params): [] for ids in chosen}
        stats = {}
        start, steps, before = 0.0, 0, 0
        while self.engine.has_work:
            if not start and all(tokens.values()):
                start, before = time.perf_counter(), sum(map(len, tokens.values()))
            steps += bool(start)
            for emission in self.engine.step():
                tokens[emission.request_id] += emission.token_ids
                stats[emission.request_id] = emission.stats
        seconds = time.perf_counter() - start
        drafted = sum(one.num_draft_steps for one in stats.values())
        accepted = sum(one.num_accepted for one in stats.values())
        leg = Leg(
            tokens_per_second=(sum(map(len, tokens.values())) - before) / seconds,
            milliseconds_per_step=1000 * seconds / steps,
            mean_acceptance_length=1 + accepted / drafted if drafted else 1.0,
        )
        return list(tokens.values()), leg


@dataclass(frozen=True)
class Leg:
    """One timed run."""

    tokens_per_second: float
    milliseconds_per_step: float
    mean_acceptance_length: float


def speeds(
    *, device: str, dtype: str, prompts: list[str], tokens: dict[str, int], repeats: int
) -> dict[str, Any]:
    """Steps as they are against captured ones, drafts off and on, batches of 1 and 8.

    Legs take turns within a repeat. The first repeat warms up and is not counted.
    """
    result: dict[str, Any] = {"dtype": dtype, "rows": []}
    llms = {
        mode: LLM(
            device=device,
            dtype=dtype,
            num_drafts=MOST_DRAFTS,
            max_num_seqs=8,
            max_seq_len=1024,
            prefix_cache=False,
            graphs=mode == "captured",
        )
        for mode in ("eager", "captured")
    }
    engines = {mode: Stepped(llm, prompts[:8]) for mode, llm in llms.items()}
    runner = llms["captured"].engine._runner
    result["capture_seconds"] = runner.capture(
        widths=range(1, MOST_DRAFTS + 2), contexts=[runner.graphs.plan.context_caps[0]]
    )
    result["captures"] = len(runner.graphs.shapes)
    for batch in (1, 8):
        legs: dict[tuple[str, int], list[Leg]] = {}
        seen: dict[tuple[str, int], list[list[int]]] = {}
        for turn in range(repeats + 1):
            for mode, stepped in engines.items():
                for num_drafts in range(MOST_DRAFTS + 1):
                    key = (mode, num_drafts)
                    seen[key], leg = stepped.decode(
                        tokens[mode], batch=batch, num_drafts=num_drafts
                    )
                    if turn:
                        legs.setdefault(key, []).append(leg)
        for (mode, num_drafts), runs in legs.items():
            rates = [leg.tokens_per_second for leg in runs]
            off = [leg.tokens_per_second for leg in legs[mode, 0]]
            ids, count = seen[mode, num_drafts], tokens["eager"]
            result["rows"].append(
                {
                    "batch": batch,
                    "mode": mode,
                    "num_drafts": num_drafts,
                    "tokens_per_second": spread(rates),
                    "milliseconds_per_step": statistics.median(
                        leg.milliseconds_per_step for leg in runs
                    ),
                    "over_off": statistics.median(a / b for a, b in zip(rates, off, strict=True)),
                    "mean_acceptance_length": runs[-1].mean_acceptance_length,
                    "tokens_each": len(ids[0]),
                    "same_as_off": sum(a == b for a, b in zip(ids, seen[mode, 0], strict=True)),
                    "same_as_eager": sum(
                        a[:count] == b[:count]
                        for a, b in zip(ids, seen["eager", num_drafts], strict=True)
                    ),
                    "sequences": batch,
                }
            )
    result["replayed_share"] = runner.num_replays / runner.num_forwards
    for llm in llms.values():
        llm.close()
    return result


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def step_times(*, dtype: str, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of single steps over padding: as they are and replayed, by shape."""
    rows = []
    with LLM(
        device="cuda",
        dtype=dtype,
        num_drafts=MAX_NUM_DRAFTS,
        max_num_seqs=8,
        max_seq_len=1024,
        prefix_cache=False,
        graphs=True,
    ) as llm:
        runner = llm.engine._runner
        plan = runner.graphs.plan
        cap = plan.context_caps[0]
        for batch in (1, 8):
            for width in range(1, plan.max_width + 1):
                (shape,) = plan.shapes([batch], [width], [cap])
                lists = StepLists()
                lists.pad(shape, runner.pools.inert_slot)
                runner.capture([batch], [width], [cap])
                step = runner._buffers.write(lists, cap)
                rows.append(
                    {
                        "what": "decode" if width == 1 else f"verify {width - 1}",
                        "batch": batch,
                        "eager": timed(lambda step=step: runner._serve(step), repeats),
                        "replayed": timed(
                            lambda shape=shape: runner.graphs.replay(shape), 4 * repeats
                        ),
                    }
                )
        head = llm.engine.drafting.proposer
        binding = head.circuit_draft()
        chains = GraphedDraftRunner(binding, CudaCapture(torch.device("cuda")))
        for batch in (1, 8):
            for depth in (1, 2, 3, 4, 8):
                shape = DraftShape(width=batch, pairs=0, depth=depth)
                chains.capture([shape])
                binding.make_inert(shape)
                rows.append(
                    {
                        "what": f"chain of {depth}",
                        "batch": batch,
                        "eager": timed(lambda shape=shape: binding.run(shape), repeats),
                        "replayed": timed(lambda shape=shape: chains.run_draft(shape), 4 * repeats),
                    }
                )
    return rows


def timed(run: Callable[[], None], repeats: int) -> float:
    """Median milliseconds of a call, the device waited for."""
    taken = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken[1:])


def record(device: str, commit: str | None) -> dict[str, Any]:
    """What was measured where; `commit` where the files are no checkout."""

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", *args], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        )
        return done.stdout.strip()

    return {
        "command": " ".join(
            ["python", *(Path(arg).name if Path(arg).is_absolute() else arg for arg in sys.argv)]
        ),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit or git("rev-parse", "HEAD"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine(),
    }


def save(path: Path | None, result: dict[str, Any]) -> None:
    """Write what there is so far: a lease may end before the run does."""
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--eager-tokens", type=int, default=24, help="with --graphs, each prompt")
    parser.add_argument("--captured-tokens", type=int, default=128, help="likewise")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", help="of the files, where they are no checkout")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prompts = read_prompts(16)
    result = record(args.device, args.commit)
    if args.graphs:
        measure_graphs(args, prompts, result)
    else:
        measure_tokens(args, prompts, result)
    print(json.dumps(result))


def measure_graphs(args: argparse.Namespace, prompts: list[str], result: dict[str, Any]) -> None:
    """Captured steps against steps as they are, saved part by part."""
    result["steps"], result["speed"] = {}, []
    tokens = {"eager": args.eager_tokens, "captured": args.captured_tokens}
    for dtype in ("bfloat16", "float32"):
        result["speed"].append(
            speeds(
                device=args.device,
                dtype=dtype,
                prompts=prompts,
                tokens=tokens,
                repeats=args.repeats,
            )
        )
        save(args.json, result)
        for row in result["speed"][-1]["rows"]:
            print(dtype, row, flush=True)
    result["steps"]["bfloat16"] = step_times(dtype="bfloat16", repeats=5)
    save(args.json, result)
    for row in result["steps"]["bfloat16"]:
        print(row, flush=True)


def measure_tokens(args: argparse.Namespace, prompts: list[str], result: dict[str, Any]) -> None:
    """Tokens against the CPU's, saved part by part."""
    result["comparisons"] = []
    for dtype, num_drafts in (("float32", 0), ("float32", 3), ("bfloat16", 0), ("bfloat16", 3)):
        one = compare(
            device=args.device,
            dtype=dtype,
            num_drafts=num_drafts,
            prompts=prompts,
            tokens=args.tokens,
        )
        result["comparisons"].append(one)
        print(
            f"{dtype} K={num_drafts}: {len(one['differences'])} of {one['tokens']} tokens differ, "
            f"largest margin {one['largest_margin']:.4g}",
            flush=True,
        )
        for entry in one["differences"]:
            print(f"  {entry}", flush=True)
        save(args.json, result)


if __name__ == "__main__":
    main()
