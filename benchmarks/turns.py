"""What a second turn keeps of the first: acceptance, tokens, and how much is read anew.

    python benchmarks/turns.py --json benchmarks/results/turns.json

Two-turn conversations over the prompts of the prompt file. The second turn runs twice over the same
ids: once where the first turn ran, with the cache of prefixes on, and once in an engine that keeps
nothing. Greedy, so tokens must be equal; the exit status is 1 if they are not, if acceptance
differs by 0.02 or more, or if a block and a window of the prefix or more was read anew.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

BLOCK = WINDOW = 128
CLOSE = 0.02
USER = "<｜User｜>"


@dataclass(frozen=True)
class Conversation:
    """What is asked first, and what is asked after the answer."""

    name: str
    kind: str
    first: str
    second: str


def conversations(path: Path, count: int) -> list[Conversation]:
    """Conversations of all classes in turn; a second question is another prompt of the class."""
    prompts = common.load_prompts(path)
    kinds = {kind: [p for p in prompts if p.kind == kind] for kind in {p.kind: 0 for p in prompts}}
    out: list[Conversation] = []
    for index in range(max(map(len, kinds.values()))):
        for kind, rows in kinds.items():
            if index < len(rows) and len(out) < count:
                after = rows[(index + 1) % len(rows)].text
                _, marker, question = after.rpartition(USER)
                second = marker + question if marker else f"\n\n{after}"
                out.append(Conversation(rows[index].name, kind, rows[index].text, second))
    return out


def second_turn(llm: Any, ids: list[int], params: Any) -> tuple[Any, float]:
    """The result, and the seconds until its first token."""
    began = time.perf_counter()
    first, result = 0.0, None
    for chunk in llm.stream([ids], params):
        if chunk.token_ids and not first:
            first = time.perf_counter() - began
        result = chunk.result
    return result, first


def measure(warm: Any, cold: Any, some: list[Conversation], *, answer: int) -> list[dict[str, Any]]:
    """Run every conversation.

    Args:
        warm: an `LLM` that keeps prefixes.
        cold: one over the same model that does not.
        some: what is said.
        answer: most tokens of either answer.

    Returns:
        One record per conversation.
    """
    from paceline import SamplingParams

    params = SamplingParams(max_tokens=answer)
    records = []
    for one in some:
        (before,) = warm.generate(one.first, params, allow_special=True)
        more = warm.tokenizer.encode(one.second, add_bos=False, allow_special=True)
        ids = [*before.prompt_token_ids, *before.token_ids, *more]
        (here, here_first), (there, there_first) = (
            second_turn(llm, ids, params) for llm in (warm, cold)
        )
        # The first answer's last token was emitted and never run, so it is new to the second turn.
        known = len(before.prompt_token_ids) + len(before.token_ids) - 1
        records.append(
            {
                "id": one.name,
                "class": one.kind,
                "prompt_tokens": len(ids),
                "known_tokens": known,
                "cached_tokens": here.usage.cached_tokens,
                "read_anew": known - here.usage.cached_tokens,
                "tokens": len(here.token_ids),
                "tokens_equal": list(here.token_ids) == list(there.token_ids),
                "first_turn": common.counts(before.speculation),
                "warm": common.counts(here.speculation),
                "cold": common.counts(there.speculation),
                "first_token_seconds": {"warm": here_first, "cold": there_first},
            }
        )
    return records


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the conversations."""
    sides = {
        side: common.acceptance(common.add_counts(r[side] for r in records))
        for side in ("first_turn", "warm", "cold")
    }
    rates = {side: value["acceptance_rate"] for side, value in sides.items()}
    return {
        "conversations": len(records),
        "tokens_equal": all(r["tokens_equal"] for r in records),
        "acceptance_difference": rates["warm"] - rates["cold"],
        "largest_difference": max(abs(_rate(r["warm"]) - _rate(r["cold"])) for r in records),
        "prompt_tokens": sum(r["prompt_tokens"] for r in records),
        "cached_tokens": sum(r["cached_tokens"] for r in records),
        "most_read_anew": max(r["read_anew"] for r in records),
        "first_token_seconds": {
            side: common.summary([r["first_token_seconds"][side] for r in records])
            for side in ("warm", "cold")
        },
        **sides,
    }


def _rate(counts: dict[str, Any]) -> float:
    return counts["num_accepted"] / counts["num_drafted"] if counts["num_drafted"] else 0.0


def keeping(warm: Any, cold: Any, *, tokens: int, repeats: int) -> dict[str, Any]:
    """What keeping blocks costs a sequence that decodes without drafts and shares nothing.

    Returns:
        Seconds for `tokens` tokens, rounds in turn; and the median ratio of a round's two.
    """
    from paceline import SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True, num_drafts=0)
    seconds: dict[str, list[float]] = {"warm": [], "cold": []}
    for turn in range(repeats + 1):
        for name, llm in (("warm", warm), ("cold", cold)):
            llm.engine.clear_prefix_cache()
            began = time.perf_counter()
            llm.generate([[10 + turn] * 8], params)
            if turn:
                seconds[name].append(time.perf_counter() - began)
    ratios = [a / b for a, b in zip(seconds["warm"], seconds["cold"], strict=True)]
    return {
        "tokens": tokens,
        "blocks": (tokens + 7) // BLOCK,
        "warm_over_cold": common.summary(ratios),
        **{name: common.summary(values) for name, values in seconds.items()},
    }


def faults(summary: dict[str, Any]) -> list[str]:
    """What of the promise does not hold."""
    found = []
    if not summary["tokens_equal"]:
        found.append("tokens behind a kept prefix differ from those of a cold run")
    if not abs(summary["acceptance_difference"]) < CLOSE:
        found.append(f"acceptance differs by {summary['acceptance_difference']:.3f}")
    if not summary["most_read_anew"] < BLOCK + WINDOW:
        found.append(f"{summary['most_read_anew']} tokens of a known prefix were read anew")
    return found


def main() -> None:
    args = parse()
    from paceline import LLM, bundled_model_path

    model = Path(args.model) if args.model else Path(bundled_model_path())
    about = common.provenance(model=model, prompts=args.prompts, device=args.device)
    some = conversations(args.prompts, args.conversations)
    options: dict[str, Any] = {
        "num_drafts": args.num_drafts,
        "max_num_seqs": 1,
        "max_seq_len": args.max_seq_len,
        "device": args.device,
        "backend": args.backend,
    }
    with (
        LLM(str(model), prefix_cache=True, **options) as warm,
        LLM(str(model), prefix_cache=False, **options) as cold,
    ):
        # So that neither pays for what is made once.
        measure(warm, cold, some[:1], answer=8)
        warm.engine.clear_prefix_cache()
        records = measure(warm, cold, some, answer=args.max_tokens)
        kept = {
            "blocks": warm.engine.prefix.tree.num_blocks,
            "bytes": warm.engine.prefix.tree.num_bytes,
            "evicted": warm.engine.prefix.tree.num_evicted,
        }
        cost = keeping(warm, cold, tokens=args.decode_tokens, repeats=args.repeats)
    summary = summarise(records)
    result = {
        "benchmark": "turns",
        "quick": args.quick,
        **about,
        "model": "bundled" if args.model is None else model.name,
        "settings": {
            "num_drafts": args.num_drafts,
            "max_tokens": args.max_tokens,
            "max_seq_len": args.max_seq_len,
            "backend": args.backend,
            "temperature": 0,
        },
        "summary": summary,
        "kept": kept,
        "cost": cost,
        "runs": records,
    }
    print(show(summary))
    ratio = cost["warm_over_cold"]
    print(
        f"decoding {cost['tokens']} tokens while keeping {cost['blocks']} blocks: "
        f"{ratio['median']:.4f} of the time without ({ratio['low']:.4f} to {ratio['high']:.4f})"
    )
    if args.json:
        common.write_json(args.json, result)
        print(f"wrote {args.json}")
    if found := faults(summary):
        raise SystemExit("error: " + "; ".join(found))


def show(summary: dict[str, Any]) -> str:
    """The table for people."""
    rows = []
    for side, name in (("warm", "prefix kept"), ("cold", "cold")):
        counts, seconds = summary[side], summary["first_token_seconds"][side]
        read = summary["prompt_tokens"] - (summary["cached_tokens"] if side == "warm" else 0)
        rows.append(
            (
                name,
                str(read),
                f"{counts['acceptance_rate']:.4f}",
                f"{counts['mean_acceptance_length']:.3f}",
                f"{1000 * seconds['median']:.1f}",
            )
        )
    header = ("second turn", "tokens read", "acceptance", "mean acceptance length", "ms to first")
    lines = [common.table(header, rows)]
    lines.append(
        f"{summary['conversations']} conversations; tokens equal: {summary['tokens_equal']}; at "
        f"most {summary['most_read_anew']} known tokens read anew"
    )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", help="checkpoint folder; default: the bundled model")
    add("--json", type=Path, help="write the result here")
    add("--prompts", type=Path, default=common.PROMPTS)
    add("--conversations", type=int, default=50)
    add("--num-drafts", type=int, default=3)
    add("--max-tokens", type=int, default=160, help="most tokens of an answer")
    add("--max-seq-len", type=int, default=2048)
    add("--decode-tokens", type=int, default=1280, help="tokens of each round that is timed")
    add("--repeats", type=int, default=7, help="rounds")
    add("--device", default="cpu")
    add("--backend", default="auto", choices=["auto", "torch", "fused"])
    add("--quick", action="store_true", help="few conversations: shows that it runs")
    args = parser.parse_args()
    if args.quick:
        args.conversations, args.max_tokens = 3, 40
        args.decode_tokens, args.repeats = 130, 1
    return args


if __name__ == "__main__":
    main()
