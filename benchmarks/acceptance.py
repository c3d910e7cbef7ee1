"""How many tokens a verified step yields: by class, draft length, position, and rows drafted from.

    python benchmarks/acceptance.py --json benchmarks/results/acceptance.json

Greedy, each prompt until the end-of-sequence token or the limit. Tokens with every draft length and
under every policy about the drafter's rows (`rows.py`) are compared with those without drafts; the
exit status is 1 if they differ, or if the plain drafter with exact rows does not draft what the
head drafts. docs/metrics.md defines the figures. Speed is not measured here, so the machine does
not matter. What a second turn keeps is measured by `turns.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import rows

LOOP = 16
"""Ids that must repeat for a token to count as part of a loop."""


def loop_share(sequences: Sequence[Sequence[int]]) -> float:
    """Share of emitted tokens that end a run of `LOOP` ids seen before in the same answer.

    A model that loops is easy to draft for, so a length is to be read with this beside it.
    """
    looping = total = 0
    for ids in sequences:
        seen: set[tuple[int, ...]] = set()
        for end in range(LOOP, len(ids) + 1):
            run = tuple(ids[end - LOOP : end])
            looping += run in seen
            seen.add(run)
        total += len(ids)
    return looping / total if total else 0.0


def main() -> None:
    args = parse()
    from paceline import LLM, SamplingParams, bundled_model_path

    model = Path(args.model) if args.model else Path(bundled_model_path())
    about = common.provenance(model=model, prompts=args.prompts, device=args.device)
    prompts = common.load_prompts(args.prompts, kinds=args.classes, per_class=args.per_class)
    params = SamplingParams(max_tokens=args.max_tokens)
    options: dict[str, Any] = {
        "max_num_seqs": args.batch,
        "max_seq_len": args.max_seq_len,
        "device": args.device,
        "backend": args.backend,
        "num_threads": args.threads,
        "prefix_cache": False,
    }

    plain: list[list[int]] = []
    runs, equal = [], True
    for drafts in (0, *args.num_drafts):
        with LLM(str(model), num_drafts=drafts, **options) as llm:
            done = finished(llm, prompts, params)
        ids = [list(r.token_ids) for r in done]
        if drafts == 0:
            plain = ids
            continue
        equal = equal and ids == plain
        runs.append({"num_drafts": drafts, "tokens_equal": ids == plain, **by_class(done, prompts)})
        print(f"{drafts} drafts: {runs[-1]['all']['mean_acceptance_length']:.2f}", flush=True)
    of_rows = compare_rows(
        str(model),
        prompts,
        params,
        plain,
        options,
        lengths=args.row_drafts,
        per_class=args.row_prompts,
    )
    equal = equal and all(one["tokens_equal"] for run in of_rows for one in run["policies"])
    result = {
        "benchmark": "acceptance",
        "quick": args.quick,
        **about,
        "model": "bundled" if args.model is None else model.name,
        "settings": {
            "per_class": args.per_class,
            "max_tokens": args.max_tokens,
            "batch": args.batch,
            "backend": args.backend,
            "temperature": 0,
            "ignore_eos": False,
            "row_prompts_per_class": args.row_prompts,
            "code_classes": list(common.CODE_CLASSES),
        },
        "tokens_equal": equal,
        "outputs": {
            kind: {
                "prompts": sum(p.kind == kind for p in prompts),
                "tokens": sum(
                    len(t) for t, p in zip(plain, prompts, strict=True) if p.kind == kind
                ),
                "loop_share": loop_share(
                    [t for t, p in zip(plain, prompts, strict=True) if p.kind == kind]
                ),
            }
            for kind in dict.fromkeys(p.kind for p in prompts)
        },
        "runs": runs,
        "rows": of_rows,
    }
    print(show(result))
    if args.json:
        common.write_json(args.json, result)
        print(f"wrote {args.json}")
    if not equal:
        raise SystemExit("error: tokens with drafts differ from tokens without")
    if not all(run["exact_equals_head"] for run in of_rows):
        raise SystemExit("error: the drafter with exact rows does not draft what the head drafts")


def finished(llm: Any, prompts: Sequence[common.Prompt], params: Any) -> list[Any]:
    """Results of all prompts; a failed request ends the benchmark."""
    done: list[Any] = llm.generate([p.text for p in prompts], params, allow_special=True)
    if failed := [r.error for r in done if r.error]:
        raise SystemExit(f"error: {failed[0]}")
    if llm.engine.num_proposer_failures:
        raise SystemExit(f"error: {llm.engine.num_proposer_failures} failures of the proposer")
    return done


def by_class(done: Sequence[Any], prompts: Sequence[common.Prompt]) -> dict[str, Any]:
    """Acceptance of each class, of the code classes together and of all."""
    classes = {}
    for kind in dict.fromkeys(p.kind for p in prompts):
        counted = [
            common.counts(r.speculation)
            for r, p in zip(done, prompts, strict=True)
            if p.kind == kind
        ]
        classes[kind] = common.acceptance(common.add_counts(counted))
    code = [classes[kind] for kind in common.CODE_CLASSES if kind in classes]
    return {
        "classes": classes,
        "code": _together(code) if code else None,
        "all": _together(list(classes.values())),
    }


def compare_rows(
    model: str,
    prompts: Sequence[common.Prompt],
    params: Any,
    plain: Sequence[list[int]],
    options: dict[str, Any],
    *,
    lengths: Sequence[int],
    per_class: int,
) -> list[dict[str, Any]]:
    """Run every policy of `rows.POLICIES` at every draft length.

    Args:
        model: the checkpoint's folder.
        prompts: of all classes.
        params: how they are decoded.
        plain: their ids without drafts.
        options: for `LLM`.
        lengths: numbers of drafts.
        per_class: prompts of each class, the first ones.

    Returns:
        One entry per draft length, each with one per policy.
    """
    from paceline import LLM
    from paceline.config import ModelConfig
    from paceline.models.deepseek_v4.checkpoint import load_weights

    taken = [i for i, p in enumerate(prompts) if _place(prompts, i) < per_class]
    some, want = [prompts[i] for i in taken], [plain[i] for i in taken]
    config = ModelConfig.from_path(model)
    collapse = rows.head_collapse(load_weights(model, config, want_drafter=False), config)
    out = []
    for drafts in lengths:
        with LLM(model, num_drafts=drafts, **options) as llm:
            head = by_class(finished(llm, some, params), some)
        policies = []
        for policy in rows.POLICIES:

            def make(context: Any, policy: rows.Policy = policy) -> rows.RowsDrafter:
                return rows.RowsDrafter(context, policy, collapse=collapse)

            with LLM(model, num_drafts=drafts, proposer=make, **options) as llm:
                done = finished(llm, some, params)
            ids = [list(r.token_ids) for r in done]
            policies.append(
                {"name": policy.name, "tokens_equal": ids == want, **by_class(done, some)}
            )
            length = policies[-1]["all"]["mean_acceptance_length"]
            print(f"{drafts} drafts, rows {policy.name}: {length:.2f}", flush=True)
        same = {k: v for k, v in policies[0].items() if k in head} == head
        out.append({"num_drafts": drafts, "exact_equals_head": same, "policies": policies})
    return out


def _place(prompts: Sequence[common.Prompt], index: int) -> int:
    """Which prompt of its class it is."""
    return sum(p.kind == prompts[index].kind for p in prompts[:index])


_RATIOS = (
    "mean_acceptance_length",
    "acceptance_rate",
    "by_position",
    "by_position_conditional",
    "histogram",
)


def _together(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios over the summed counts of several classes."""
    bare = [{k: v for k, v in row.items() if k not in _RATIOS} for row in rows]
    return common.acceptance(common.add_counts(bare))


def show(result: dict[str, Any]) -> str:
    """The tables for people."""
    runs = result["runs"]
    cells: list[tuple[str, ...]] = []
    for kind, output in result["outputs"].items():
        lengths = [f"{run['classes'][kind]['mean_acceptance_length']:.2f}" for run in runs]
        cells.append((kind, *lengths, f"{output['loop_share']:.0%}"))
    for name in ("code", "all"):
        if runs and runs[0][name]:
            lengths = [f"{run[name]['mean_acceptance_length']:.2f}" for run in runs]
            cells.append((name, *lengths, ""))
    header = ("mean acceptance length", *(f"K={run['num_drafts']}" for run in runs), "loops")
    lines = [common.table(header, cells)]
    if runs:
        last = runs[-1]
        places = range(1, last["num_drafts"] + 1)
        cells = [
            (
                kind,
                *(f"{x:.0%}" for x in row["by_position"]),
                *(f"{x:.0%}" for x in row["by_position_conditional"]),
            )
            for kind, row in last["classes"].items()
            if len(row["by_position"]) == len(places)
        ]
        header = ("accepted at", *(str(j) for j in places), *(f"{j} given" for j in places))
        lines += ["", common.table(header, cells)]
    for run in result["rows"]:
        cells = [
            (
                one["name"],
                f"{one['all']['mean_acceptance_length']:.3f}",
                *(f"{x:.0%}" for x in one["all"]["by_position"]),
            )
            for one in run["policies"]
        ]
        places = range(1, run["num_drafts"] + 1)
        header = (f"rows, K={run['num_drafts']}", "length", *(f"at {j}" for j in places))
        lines += ["", common.table(header, cells)]
    lines.append(f"tokens with drafts equal tokens without: {result['tokens_equal']}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", help="checkpoint folder; default: the bundled model")
    add("--json", type=Path, help="write the result here")
    add("--prompts", type=Path, default=common.PROMPTS)
    add("--classes", nargs="+", help="default: all")
    add("--per-class", type=int, help="prompts of each class; default: all")
    add("--num-drafts", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8])
    add("--row-drafts", type=int, nargs="+", default=[3, 8], help="K for policies about rows")
    add("--row-prompts", type=int, default=8, help="prompts of each class for those")
    add("--max-tokens", type=int, default=128)
    add("--max-seq-len", type=int, default=1024)
    add("--batch", type=int, default=8)
    add("--threads", type=int, help="CPU threads; default: the libraries' choice")
    add("--device", default="cpu")
    add("--backend", default="auto", choices=["auto", "torch", "fused"])
    add("--quick", action="store_true", help="few prompts and tokens: shows that it runs")
    args = parser.parse_args()
    if args.quick:
        args.per_class, args.num_drafts, args.max_tokens = 1, [1, 3], 12
        args.row_drafts = [3]
    return args


if __name__ == "__main__":
    main()
