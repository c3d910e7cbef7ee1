"""Greedy tokens on a GPU against the CPU's, with every near-tie listed, and the GPU's own speed.

Each position is judged with the CPU's tokens before it: where the GPU chooses another token, the
difference is listed with the margin by which the CPU preferred its own, and the walk goes on from
the CPU's choice. Prints a table; `--json FILE` writes the record.

    python benchmarks/device.py --device cuda --tokens 1000 --json benchmarks/results/device.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from paceline import LLM, SamplingParams
from paceline.cache.blocks import BlockAllocator
from paceline.cache.state import SequenceCache
from paceline.config import ModelConfig
from paceline.engine.runner import RowInputs, Runner
from paceline.models.step import TargetModel

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
    with LLM(num_drafts=0, max_seq_len=1024) as cpu:
        expected = cpu.generate(prompts, params)
        ids = [result.prompt_token_ids for result in expected]
        reference = [result.token_ids for result in expected]
        with LLM(device=device, dtype=dtype, num_drafts=num_drafts, max_seq_len=1024) as other:
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


def speed(*, device: str, dtype: str, prompts: list[str], repeats: int) -> list[dict[str, Any]]:
    """Tokens per second with drafts off and on, interleaved, batches of 1 and 8."""
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    rows = []
    llms = {
        k: LLM(device=device, dtype=dtype, num_drafts=k, max_num_seqs=8, max_seq_len=1024)
        for k in (0, 1, 2, 3)
    }
    for batch in (1, 8):
        chosen = prompts[:batch]
        times: dict[int, list[float]] = {k: [] for k in llms}
        length = {}
        for turn in range(repeats + 1):
            for k, llm in llms.items():
                start = time.perf_counter()
                results = llm.generate(chosen, params)
                if turn:
                    count = sum(len(r.token_ids) for r in results)
                    times[k].append(count / (time.perf_counter() - start))
                length[k] = statistics.fmean(r.speculation.mean_acceptance_length for r in results)
        for k, values in times.items():
            rows.append(
                {
                    "batch": batch,
                    "num_drafts": k,
                    "tokens_per_second": statistics.median(values),
                    "over_off": statistics.median(values) / statistics.median(times[0]),
                    "mean_acceptance_length": length[k],
                }
            )
    return rows


def record(device: str) -> dict[str, Any]:
    """What was measured where."""

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", *args], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        )
        return done.stdout.strip()

    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": git("rev-parse", "HEAD"),
        "clean": git("status", "--porcelain") == "",
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
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prompts = read_prompts(16)
    result = record(args.device)
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
    result["speed"] = {
        dtype: speed(device=args.device, dtype=dtype, prompts=prompts, repeats=args.repeats)
        for dtype in ("float32", "bfloat16")
    }
    for dtype, rows in result["speed"].items():
        for row in rows:
            print(dtype, {k: round(v, 3) for k, v in row.items()}, flush=True)
    save(args.json, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
