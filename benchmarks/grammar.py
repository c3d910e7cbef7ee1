"""Structured output under drafts: what it gives, what is accepted, and what its masks cost.

    python benchmarks/grammar.py --json benchmarks/results/grammar.json

Random JSON schemas and regexes are decoded without drafts and with 1 to 8 a step: every answer is
checked against its grammar by other code, ids are compared with those without drafts, and every
draft is checked against the drafts before it. The exit status is 1 where anything is wrong. Then
prompts that ask for JSON are decoded with the schema as a grammar and without one; where the text
is the same, steps and refused drafts are compared, and the time within the grammar is taken.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
from grammars import fits, random_regex, random_schema

from paceline import LLM, SamplingParams, bundled_model_path
from paceline.engine import Engine
from paceline.sampling.grammar import GrammarCursor, Words, walk
from paceline.types import FinishReason, GenerationResult

PROMPT = "An answer: "
TEMPERATURES = (0.0, 0.7, 1.0, 1.3)


def random_grammars(count: int) -> list[dict[str, Any]]:
    """Parameters of `count` requests, schemas and regexes in turn."""
    found: list[dict[str, Any]] = []
    for seed in range(count):
        chance = random.Random(seed)
        name, made = ("regex", random_regex) if seed % 2 else ("json_schema", random_schema)
        temperature = TEMPERATURES[seed // 2 % len(TEMPERATURES)]
        found.append({name: made(chance), "temperature": temperature, "seed": seed})
    return found


def follows(text: str, given: dict[str, Any]) -> bool:
    """Whether an answer is one of its grammar's."""
    if "regex" in given:
        return re.fullmatch(given["regex"], text) is not None
    try:
        return fits(json.loads(text), given["json_schema"])
    except ValueError:
        return False


@contextmanager
def watched_drafts() -> Iterator[dict[str, int]]:
    """Count the drafts of rows with a grammar, and those it forbids, before they are cut."""
    seen = {"drafts": 0, "legal": 0, "free": 0}
    inner = Engine._walked

    def walked(engine: Engine, row: Any, draft: Any) -> Any:
        masks = walk(row.sequence.grammar, draft.tokens)
        seen["drafts"] += draft.num_tokens
        seen["legal"] += len(masks) - 1
        seen["free"] += draft.num_tokens if draft.source == "grammar" else 0
        return inner(engine, row, draft)

    Engine._walked = walked  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Engine._walked = inner  # type: ignore[method-assign]


def validity(llm: LLM, given: list[dict[str, Any]], *, max_tokens: int) -> list[dict[str, Any]]:
    """One record for each number of drafts."""
    runs: list[dict[str, Any]] = []
    plain: list[list[int]] = []
    for num_drafts in range(9):
        params = [SamplingParams(max_tokens=max_tokens, num_drafts=num_drafts, **g) for g in given]
        with watched_drafts() as seen:
            done = llm.generate([PROMPT] * len(given), params)
        ids = [list(result.token_ids) for result in done]
        plain = plain or ids
        whole = [result.finish_reason is FinishReason.STOP for result in done]
        runs.append(
            {
                "num_drafts": num_drafts,
                "answers": len(done),
                "whole": sum(whole),
                "valid": sum(
                    one and follows(result.text, asked)
                    for one, result, asked in zip(whole, done, given, strict=True)
                ),
                "same_as_without": sum(a == b for a, b in zip(ids, plain, strict=True)),
                "tokens": sum(map(len, ids)),
                **seen,
            }
        )
    return runs


class TimedCursor(GrammarCursor):
    """A cursor that adds up the seconds spent in it."""

    seconds = 0.0

    def __init__(self, inner: GrammarCursor) -> None:
        self._inner = inner

    def _timed(self, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            TimedCursor.seconds += time.perf_counter() - start

    @property
    def num_tokens(self) -> int:
        return self._inner.num_tokens

    @property
    def error(self) -> str | None:
        return self._inner.error

    @property
    def is_finished(self) -> bool:
        return bool(self._timed(lambda: self._inner.is_finished))

    def mask(self) -> Words:
        words: Words = self._timed(self._inner.mask)
        return words

    def advance(self, token: int) -> bool:
        return bool(self._timed(self._inner.advance, token))

    def rollback(self, num_tokens: int) -> None:
        self._timed(self._inner.rollback, num_tokens)

    def forced(self, limit: int) -> list[int]:
        run: list[int] = self._timed(self._inner.forced, limit)
        return run

    def copy(self) -> GrammarCursor:
        return TimedCursor(self._inner.copy())


@contextmanager
def timed(llm: LLM) -> Iterator[list[tuple[float, float]]]:
    """Seconds of each step that is made meanwhile, and of them within cursors."""
    inner: Callable[..., GrammarCursor | None] = llm._cursor
    step = llm.engine.step
    steps: list[tuple[float, float]] = []

    def cursor(*args: Any) -> GrammarCursor | None:
        made = inner(*args)
        return None if made is None else TimedCursor(made)

    def one_step() -> Any:
        before, start = TimedCursor.seconds, time.perf_counter()
        emissions = step()
        steps.append((time.perf_counter() - start, TimedCursor.seconds - before))
        return emissions

    llm._cursor = cursor  # type: ignore[method-assign]
    llm.engine.step = one_step  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        llm._cursor = inner  # type: ignore[method-assign]
        llm.engine.step = step  # type: ignore[method-assign]


def json_prompts(
    llm: LLM, prompts: list[common.Prompt], *, num_drafts: int, max_tokens: int, repeats: int
) -> dict[str, Any]:
    """The same text with its grammar and without: steps, drafts, and time, one prompt at a time."""
    base = {"max_tokens": max_tokens, "num_drafts": num_drafts}
    ends = set(llm.config.eos_token_ids)
    pairs: list[tuple[bool, GenerationResult, GenerationResult]] = []
    shares: list[float] = []
    ratios: list[float] = []
    for prompt in prompts:
        schema = prompt.text[prompt.text.index("{") : prompt.text.index("<｜User｜>")]
        free_params = SamplingParams(**base)
        bound_params = SamplingParams(**base, json_schema=schema)
        llm._compiled(bound_params)
        results: list[list[GenerationResult]] = [[], []]
        medians: list[list[float]] = [[], []]
        for _ in range(repeats):
            for place, params in enumerate((free_params, bound_params)):
                with timed(llm) as steps:
                    results[place] = llm.generate(prompt.text, params, allow_special=True)
                medians[place].append(statistics.median(whole for whole, _ in steps))
                if place:
                    shares += [part / whole for whole, part in steps]
        free, bound = results[0][0], results[1][0]
        same = [i for i in free.token_ids if i not in ends] == list(bound.token_ids)
        pairs.append((same, free, bound))
        if same:
            ratios += [b / f for f, b in zip(*medians, strict=True)]
    legs = []
    for name, place in (("without", 1), ("with", 2)):
        stats = [pair[place].speculation for pair in pairs if pair[0]]
        legs.append(
            {
                "name": name,
                "steps": sum(s.num_steps for s in stats),
                "drafted": sum(s.num_drafted for s in stats),
                "accepted": sum(s.num_accepted for s in stats),
                "free": sum(s.drafted_by.get("grammar", 0) for s in stats),
            }
        )
    return {
        "num_drafts": num_drafts,
        "prompts": len(prompts),
        "same_text": sum(pair[0] for pair in pairs),
        "legs": legs,
        "grammar_share": spread(shares),
        "step_over_step_without": spread(ratios),
    }


def masks(llm: LLM, given: list[dict[str, Any]], *, batch: int, max_tokens: int) -> dict[str, Any]:
    """The grammar's share of each step, over random grammars in batches, at 3 drafts."""
    shares = []
    for start in range(0, len(given), batch):
        some = given[start : start + batch]
        params = [SamplingParams(max_tokens=max_tokens, num_drafts=3, **one) for one in some]
        for one in params:
            llm._compiled(one)
        with timed(llm) as steps:
            llm.generate([PROMPT] * len(some), params)
        shares += [part / whole for whole, part in steps]
    return {"num_drafts": 3, "grammars": len(given), "grammar_share": spread(shares)}


def spread(values: list[float]) -> dict[str, Any]:
    """Median, and the tenths from which on values are among the lowest and the highest."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return {
        "median": statistics.median(ordered),
        "tenth": ordered[tenth],
        "nine_tenths": ordered[-1 - tenth],
        "count": len(ordered),
    }


def main() -> None:
    args = parse()
    model = Path(args.model) if args.model else Path(bundled_model_path())
    prompts = common.load_prompts(args.prompts, kinds=["json_schema"], per_class=args.per_class)
    result: dict[str, Any] = {
        "benchmark": "grammar",
        "quick": args.quick,
        **common.provenance(model=model, prompts=args.prompts),
        "model": "bundled" if args.model is None else model.name,
        "settings": {
            "grammars": args.grammars,
            "prompts": len(prompts),
            "max_tokens": args.max_tokens,
            "batch": args.batch,
            "repeats": args.repeats,
            "threads": args.threads,
        },
    }
    given = random_grammars(args.grammars)
    with LLM(
        str(model), max_num_seqs=args.batch, max_seq_len=1024, num_threads=args.threads
    ) as llm:
        result["runs"] = validity(llm, given, max_tokens=args.max_tokens)
        result["json"] = json_prompts(
            llm, prompts, num_drafts=3, max_tokens=args.max_tokens, repeats=args.repeats
        )
        result["masks"] = masks(
            llm, given[: 8 * args.batch], batch=args.batch, max_tokens=args.max_tokens
        )
    print(show(result))
    wrong = [
        f"{run['num_drafts']} drafts"
        for run in result["runs"]
        if not run["answers"] == run["valid"] == run["same_as_without"]
        or run["drafts"] != run["legal"]
    ]
    result["all_valid_and_same"] = not wrong
    if args.json:
        common.write_json(args.json, result)
        print(f"wrote {args.json}")
    if wrong:
        raise SystemExit(f"error: answers or drafts are wrong with {', '.join(wrong)}")


def show(result: dict[str, Any]) -> str:
    """Tables for people."""
    header = ("drafts", "answers", "valid", "same ids", "drafted", "legal", "for free")
    names = ("num_drafts", "answers", "valid", "same_as_without", "drafts", "legal", "free")
    parts = [common.table(header, [[str(run[name]) for name in names] for run in result["runs"]])]
    found = result["json"]
    cells = [
        [leg["name"], *(str(leg[name]) for name in ("steps", "drafted", "accepted", "free"))]
        for leg in found["legs"]
    ]
    parts.append(common.table(("grammar", "steps", "drafted", "accepted", "for free"), cells))
    parts.append(
        f"same text: {found['same_text']} of {found['prompts']}; grammar's share of a step: "
        f"{found['grammar_share']['median']:.1%} at batch 1, "
        f"{result['masks']['grammar_share']['median']:.1%} in batches; a step against one without: "
        f"{found['step_over_step_without']['median']:.2f}"
    )
    return "\n\n".join(parts)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", help="checkpoint folder; default: the bundled model")
    add("--json", type=Path, help="write the result here")
    add("--prompts", type=Path, default=common.PROMPTS)
    add("--per-class", type=int, default=24, help="prompts that ask for JSON")
    add("--grammars", type=int, default=500)
    add("--max-tokens", type=int, default=400)
    add("--batch", type=int, default=8)
    add("--repeats", type=int, default=3)
    add("--threads", type=int, help="CPU threads; default: the libraries' choice")
    add("--quick", action="store_true", help="few grammars and prompts: shows that it runs")
    args = parser.parse_args()
    if args.quick:
        args.grammars, args.per_class, args.repeats = 16, 2, 1
    return args


if __name__ == "__main__":
    main()
