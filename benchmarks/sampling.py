"""How many drafts are accepted at a temperature, by acceptance rule and draft length.

    python benchmarks/sampling.py --json benchmarks/results/sampling.json

The rules are those of docs/sampling.md; "greedy drafts" are the head's largest logits, judged by
the invariant rule, which is what drafting without the shared noise would give. Under the invariant
rule every token is compared with those without drafts, and the exit status is 1 if one differs.
Speed is not measured here, so the machine does not matter.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common

RULES = ("invariant", "greedy drafts", "rejection", "block")


def greedy_head(context: Any) -> Any:
    """A factory of heads that draft their largest logits, whatever the request picks with."""
    from paceline.draft import DeepseekV4MtpHead

    class GreedyDrafts(DeepseekV4MtpHead):
        def propose(self, request: Any, state: Any) -> Any:
            return super().propose(replace(request, sampler=None), state)

        def propose_batch(self, requests: Any, states: Any) -> Any:
            return super().propose_batch([replace(r, sampler=None) for r in requests], states)

    built = context.built
    return GreedyDrafts.new(
        built.mtp,
        built.embed_tokens,
        built.lm_head,
        context.config,
        0,
        context.max_seq_len,
        num_slots=context.max_num_seqs,
    )


def options_of(rule: str) -> dict[str, Any]:
    """What `LLM` is told for a rule."""
    if rule == "greedy drafts":
        return {"proposer": greedy_head}
    return {"acceptance": rule}


def measure(
    model: str,
    prompts: Sequence[common.Prompt],
    *,
    temperature: float,
    lengths: Sequence[int],
    max_tokens: int,
    options: dict[str, Any],
    rules: Sequence[str] = RULES,
) -> list[dict[str, Any]]:
    """Decode every prompt, with its number as the seed, under every rule and draft length.

    Returns:
        One record per draft length and rule; `tokens_equal` only under the invariant rule.
    """
    from paceline import LLM, SamplingParams

    each = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    texts = [p.text for p in prompts]
    with LLM(model, num_drafts=0, **options) as llm:
        plain = [r.token_ids for r in llm.generate(texts, each, allow_special=True)]
    records = []
    for rule in rules:
        with LLM(model, num_drafts=max(lengths), **options_of(rule), **options) as llm:
            for length in lengths:
                asked = [replace(one, num_drafts=length) for one in each]
                done = llm.generate(texts, asked, allow_special=True)
                if failed := [r.error for r in done if r.error]:
                    raise SystemExit(f"error: {failed[0]}")
                if llm.engine.num_proposer_failures:
                    raise SystemExit("error: the proposer failed")
                total = common.add_counts(common.counts(r.speculation) for r in done)
                record = {"rule": rule, "num_drafts": length, **common.acceptance(total)}
                if rule in ("invariant", "greedy drafts"):
                    record["tokens_equal"] = [r.token_ids for r in done] == plain
                records.append(record)
                shown = record["mean_acceptance_length"]
                print(f"{rule}, {length} drafts: {shown:.3f}", flush=True)
    return records


def main() -> None:
    args = parse()
    from paceline import bundled_model_path

    model = Path(args.model) if args.model else Path(bundled_model_path())
    about = common.provenance(model=model, prompts=args.prompts)
    prompts = common.load_prompts(args.prompts, per_class=args.per_class)
    runs = measure(
        str(model),
        prompts,
        temperature=args.temperature,
        lengths=args.num_drafts,
        max_tokens=args.max_tokens,
        options={"max_num_seqs": args.batch, "max_seq_len": 1024, "prefix_cache": False},
    )
    equal = all(run.get("tokens_equal", True) for run in runs)
    result = {
        "benchmark": "sampling",
        "quick": args.quick,
        **about,
        "model": "bundled" if args.model is None else model.name,
        "settings": {
            "per_class": args.per_class,
            "prompts": len(prompts),
            "max_tokens": args.max_tokens,
            "batch": args.batch,
            "temperature": args.temperature,
            "ignore_eos": True,
        },
        "tokens_equal": equal,
        "runs": runs,
    }
    print(show(result))
    if args.json:
        common.write_json(args.json, result)
        print(f"wrote {args.json}")
    if not equal:
        raise SystemExit("error: tokens with drafts differ from tokens without")


def show(result: dict[str, Any]) -> str:
    """The table for people."""
    cells = [
        (
            run["rule"],
            str(run["num_drafts"]),
            f"{run['mean_acceptance_length']:.3f}",
            " ".join(f"{x:.0%}" for x in run["by_position"]),
        )
        for run in result["runs"]
    ]
    return common.table(("rule", "K", "mean acceptance length", "by position"), cells)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", help="checkpoint folder; default: the bundled model")
    add("--json", type=Path, help="write the result here")
    add("--prompts", type=Path, default=common.PROMPTS)
    add("--per-class", type=int, default=4, help="prompts of each class")
    add("--num-drafts", type=int, nargs="+", default=[1, 3, 5])
    add("--max-tokens", type=int, default=96)
    add("--temperature", type=float, default=1.0)
    add("--batch", type=int, default=8)
    add("--quick", action="store_true", help="few prompts and tokens: shows that it runs")
    args = parser.parse_args()
    if args.quick:
        args.per_class, args.num_drafts, args.max_tokens = 1, [2], 8
    return args


if __name__ == "__main__":
    main()
