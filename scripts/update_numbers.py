"""Write measured numbers into README.md and docs/ from benchmarks/results, and keep others out.

    python scripts/update_numbers.py            rewrite the marked regions
    python scripts/update_numbers.py --check    change nothing, fail where something is wrong

A region stands between ``<!-- numbers:NAME -->`` and ``<!-- /numbers -->``, in a line of its own or
inside a sentence. Its content is made from one result file, so it never mixes commits. Outside of
regions a figure that looks measured (a number before tok/s, tokens per second, %, or "x faster") is
an error; a line that states a limit or a definition ends in ``<!-- not measured -->``.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

Result = dict[str, Any]

REGION = re.compile(r"<!-- numbers:(?P<name>[\w.-]+) -->(?P<body>.*?)<!-- /numbers -->", re.DOTALL)
OPENING = re.compile(r"<!-- numbers:[\w.-]+ -->|<!-- /numbers -->")
FIGURE = re.compile(
    r"\d(?:[\d.,]*\d)?\s*(?:"
    r"tok(?:en)?s?\s*/\s*s\b|tokens? (?:per|a) second|%|per ?cent\b"
    r"|(?:x|×|times)\s+(?:faster|slower|as fast|the speed))",
    re.IGNORECASE,
)
EXEMPT = "<!-- not measured -->"

CLASS_NAMES = {
    "code_completion": "code completion",
    "humaneval": "HumanEval",
    "docs_prose": "documentation prose",
    "define_chat": "word definitions, chat",
    "json_schema": "JSON for a schema, chat",
    "edit_repeat": "repeat code with one rename, chat",
    "random_identifiers": "random identifiers",
    "non_english": "non-English prose",
}


class NumbersError(Exception):
    """A document or a result file that cannot be used; the message names it."""


class Results:
    """Result files by name, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> Result | None:
        """The parsed file ``NAME.json``, or None where there is none.

        Raises:
            NumbersError: it is no JSON, or comes from a quick run, which is no measurement.
        """
        path = self.folder / f"{name}.json"
        if not path.is_file():
            return None
        try:
            value: Result = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise NumbersError(f"{path.name}: {error}") from None
        if value.get("quick"):
            raise NumbersError(f"{path.name} comes from --quick, which measures nothing")
        return value

    def text(self, name: str) -> str | None:
        """The file ``NAME.txt``, or None where there is none."""
        path = self.folder / f"{name}.txt"
        return path.read_text(encoding="utf-8").rstrip() if path.is_file() else None


def markdown(header: list[str], rows: list[list[str]], *, left: int = 1) -> str:
    """A table whose first `left` columns are words and the others numbers."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def _run(result: Result, batch: int) -> Result | None:
    return next((run for run in result["runs"] if run["batch"] == batch), None)


def _leg(run: Result, num_drafts: int) -> Result:
    """Paceline's own leg."""
    legs: list[Result] = run["legs"]
    return next(x for x in legs if x["engine"] == "paceline" and x["num_drafts"] == num_drafts)


def _rate(value: Result) -> str:
    return f"{value['median']:.0f}"


def _spread(value: Result) -> str:
    return f"{value['low']:.0f} to {value['high']:.0f}"


def decode_table(result: Result, batch: int) -> str:
    """Every engine at one batch size."""
    run = _run(result, batch)
    if run is None:
        return f"_The stored result has no run at batch {batch}._"
    base = _leg(run, 0)["decode_tokens_per_second"]["median"]
    rows = []
    for leg in run["legs"]:
        rate, drafted = leg["decode_tokens_per_second"], leg["speculation"]
        threads, same = leg["threads"], leg["same_as_paceline"]
        rows.append(
            [
                leg["name"].partition(", ")[0],
                str(leg["num_drafts"]) if leg["num_drafts"] else "off",
                "its own choice" if threads is None else str(threads),
                _rate(rate),
                _spread(rate),
                f"{rate['median'] / base:.2f}",
                _rate(leg["end_to_end_tokens_per_second"]),
                f"{drafted['mean_acceptance_length']:.2f}" if drafted else "",
                f"{same['equal']} of {same['sequences']}",
            ]
        )
    header = ["engine", "drafts", "threads", "decode tok/s", "low to high"]
    header += ["against drafts off", "end to end tok/s", "mean acceptance length"]
    header += ["same tokens"]
    return markdown(header, rows)


def decode_summary(result: Result) -> str:
    """The few rows a reader of the front page wants."""
    rows = []
    for batch in (1, 8):
        run = _run(result, batch)
        if run is None:
            continue
        best = run["ratios"].get("best_num_drafts")
        rivals = [leg for leg in run["legs"] if leg["engine"] == "llama.cpp"]
        fast = max(rivals, key=lambda leg: leg["decode_tokens_per_second"]["median"], default=None)
        for leg in run["legs"]:
            ours = leg["engine"] == "paceline"
            if (ours and leg["num_drafts"] not in (0, best)) or (
                leg["engine"] == "llama.cpp" and leg["num_drafts"] and leg is not fast
            ):
                continue
            name = leg["name"]
            if not ours and not leg["num_drafts"]:
                name = leg["engine"]
            rate = leg["decode_tokens_per_second"]
            rows.append([str(batch), name, _rate(rate), _spread(rate)])
    return markdown(["batch", "engine", "tok/s", "low to high"], rows, left=2)


def decode_sentence(result: Result) -> str:
    """The headline, with what it depends on."""
    ratios, run = result["ratios"], _run(result, 1)
    if run is None or "off_over_transformers" not in ratios or "on_over_off" not in ratios:
        return "_The stored result lacks the legs for this sentence._"
    if not result["tokens_equal"]:
        raise NumbersError("decode.json: tokens with drafts differ from tokens without")
    best = ratios["best_num_drafts"]
    leg = _leg(run, best)
    text = (
        f"At batch 1 on {result['cpu']} ({result['cores']} cores), Paceline without drafts decodes "
        f"{ratios['off_over_transformers']:.1f} times as fast as `transformers`"
    )
    if "off_over_llama_cpp_off" in ratios:
        text += f" and {ratios['off_over_llama_cpp_off']:.1f} times as fast as llama.cpp"
    text += (
        f"; with {best} {'draft' if best == 1 else 'drafts'} a step it decodes "
        f"{ratios['on_over_off']:.2f} times as fast as without"
    )
    if "best_over_llama_cpp_best" in ratios:
        text += f", still {ratios['best_over_llama_cpp_best']:.1f} times llama.cpp at its best"
    length = leg["speculation"]["mean_acceptance_length"]
    return text + f"; the mean acceptance length is {length:.2f}. The tokens are the same."


def environment(result: Result) -> str:
    """Where the figures of a file come from."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    clean = {True: "clean", False: "with uncommitted changes", None: "not a checkout"}
    commit = (result["commit"] or "unknown")[:12]
    settings = ", ".join(
        f"{name.replace('_', ' ')} {' and '.join(value) if isinstance(value, list) else value}"
        for name, value in result["settings"].items()
        if value is not None
    )
    lines = [
        f"- command: `python benchmarks/{' '.join(result['command'])}`",
        f"- commit {commit} ({clean[result['clean']]}), {result['date']}",
        f"- {result['cpu']}, {result['cores']} cores, {result['platform']}, device "
        f"{result['device']}, load average before the run {result['load_average_before']}",
        f"- {versions}",
        f"- settings: {settings}",
        f"- checkpoint sha256 `{result['checkpoint_sha256'][:16]}`, prompts sha256 "
        f"`{result['prompts_sha256'][:16]}`",
    ]
    return "\n".join(lines)


def _draft_lengths(result: Result) -> list[int]:
    return [run["num_drafts"] for run in result["runs"]]


def acceptance_by_class(result: Result) -> str:
    """Mean acceptance length of every class at every draft length."""
    rows = []
    for kind, output in result["outputs"].items():
        cells = [f"{run['classes'][kind]['mean_acceptance_length']:.2f}" for run in result["runs"]]
        name = CLASS_NAMES.get(kind, kind)
        rows.append([name, *cells, str(output["tokens"]), f"{output['loop_share']:.0%}"])
    for key, name in (("code", "**code classes together**"), ("all", "**all classes**")):
        if result["runs"] and result["runs"][0][key]:
            cells = [f"**{run[key]['mean_acceptance_length']:.2f}**" for run in result["runs"]]
            rows.append([name, *cells, "", ""])
    header = ["class", *(f"K = {n}" for n in _draft_lengths(result)), "tokens", "in loops"]
    return markdown(header, rows)


def acceptance_by_position(result: Result, *, conditional: bool) -> str:
    """Acceptance at each draft position, at the greatest draft length of the file."""
    run = result["runs"][-1]
    key = "by_position_conditional" if conditional else "by_position"
    places = range(run["num_drafts"])
    named = [(CLASS_NAMES.get(kind, kind), row) for kind, row in run["classes"].items()]
    named += [("**code classes together**", run["code"])] if run["code"] else []
    named += [("**all classes**", run["all"])]
    rows = [
        [name, *(f"{row[key][j]:.0%}" if j < len(row[key]) else "" for j in places)]
        for name, row in named
    ]
    return markdown(["class", *(f"draft {j + 1}" for j in places)], rows)


def acceptance_histogram(result: Result) -> str:
    """Share of verified steps by number of accepted drafts, code classes."""
    rows = []
    for run in result["runs"]:
        row = run["code"] or run["all"]
        steps = row["num_draft_steps"] or 1
        width = result["runs"][-1]["num_drafts"] + 1
        shares = [f"{count / steps:.0%}" for count in row["histogram"]]
        rows.append([f"K = {run['num_drafts']}", *shares, *[""] * (width - len(shares))])
    places = range(result["runs"][-1]["num_drafts"] + 1)
    return markdown(["", *(f"{j} accepted" for j in places)], rows)


def acceptance_sentence(result: Result) -> str:
    """The headline at K = 3, or at the greatest K below it that was run."""
    runs = [run for run in result["runs"] if run["num_drafts"] <= 3 and run["code"]]
    if not runs:
        return "_The stored result has no run over the code classes._"
    run = runs[-1]
    return (
        f"Over the code classes at K = {run['num_drafts']}, greedy, a verified step yields "
        f"{run['code']['mean_acceptance_length']:.2f} tokens on average."
    )


POLICY_NAMES = {
    "exact": "exact: every row from the target's streams (what the head does)",
    "recursion": "accepted drafts' rows as the recursion left them",
    "recursion_gap": "the same, and none for the last draft of a chain accepted whole",
    "first_only": "only the first row of a chain stays, nothing is caught up",
    "short": "as many rows stay as drafts were accepted, nothing is caught up",
    "no_prompt": "no rows of the prompt",
    "prompt_shift": "prompt's pairs off by one token",
    "stream_lag": "all streams late by one position",
    "collapsed": "streams collapsed to one",
    "blind": "collapsed, no prompt, rows too short",
}


_NO_ROWS = "_The stored result has no run about rows._"


def acceptance_rows(result: Result) -> str:
    """What drafts are worth under each policy about the drafter's rows."""
    runs = result.get("rows")
    if not runs:
        return _NO_ROWS
    near = runs[0]
    rows = []
    for n, one in enumerate(near["policies"]):
        cells = [f"{run['policies'][n]['all']['mean_acceptance_length']:.3f}" for run in runs]
        rows.append(
            [
                POLICY_NAMES.get(one["name"], one["name"]),
                *cells,
                f"{one['code']['mean_acceptance_length']:.3f}" if one["code"] else "",
                *(f"{x:.1%}" for x in one["all"]["by_position"]),
            ]
        )
    header = ["rows", *(f"length, K = {run['num_drafts']}" for run in runs)]
    header += [f"code, K = {near['num_drafts']}"]
    header += [f"draft {j + 1}" for j in range(near["num_drafts"])]
    return markdown(header, rows)


def acceptance_rows_by_class(result: Result) -> str:
    """The same by class, mean acceptance length at the first draft length of the file."""
    if not result.get("rows"):
        return _NO_ROWS
    policies = result["rows"][0]["policies"]
    kinds = list(policies[0]["classes"])
    rows = [
        [
            POLICY_NAMES.get(one["name"], one["name"]).partition(":")[0],
            *(f"{one['classes'][kind]['mean_acceptance_length']:.2f}" for kind in kinds),
        ]
        for one in policies
    ]
    return markdown(["rows", *(CLASS_NAMES.get(kind, kind) for kind in kinds)], rows)


def acceptance_rows_sentence(result: Result) -> str:
    """Exact rows against the rest, in a line."""
    if not result.get("rows"):
        return _NO_ROWS
    run = result["rows"][0]
    if not run["exact_equals_head"]:
        raise NumbersError("acceptance.json: the drafter with exact rows differs from the head")
    length = {p["name"]: p["all"]["mean_acceptance_length"] for p in run["policies"]}
    return (
        f"At K = {run['num_drafts']} over all classes a step yields {length['exact']:.3f} tokens "
        f"with exact rows, {length['recursion']:.3f} with the rows the recursion left, "
        f"{length['short']:.3f} where a row is lost at each step, {length['no_prompt']:.3f} "
        f"without the prompt, {length['collapsed']:.3f} from collapsed streams, and "
        f"{length['blind']:.3f} "
        "with the last three together"
    )


def _counted(runs: list[Result], first: str) -> str:
    """The counts of several settings over the same prompts."""
    rows = [
        [
            run["name"],
            f"{run['all']['num_drafted']:,}",
            f"{run['all']['num_accepted']:,}",
            f"{run['all']['acceptance_rate']:.1%}",
            f"{run['all']['tokens_per_step']:.3f}",
            f"{run['all']['tokens_per_row']:.3f}",
        ]
        for run in runs
    ]
    header = [first, "drafted", "accepted", "acceptance", "tokens per step"]
    return markdown([*header, "tokens per target row"], rows)


def _section(result: Result, name: str) -> Result:
    section: Result = result["sections"][name]
    if not result["tokens_equal"]:
        raise NumbersError("mechanisms.json: tokens with drafts differ from tokens without")
    return section


def mechanism_context(result: Result) -> str:
    """Rows of the prompt and catch-up of accepted drafts."""
    section = _section(result, "context")
    rows = []
    for run in section["runs"]:
        count = run["name"].removeprefix("prompt_")
        name = f"{count} rows of the prompt" if count.isdigit() else run["name"]
        name = {"no_catchup": "no catch-up of accepted drafts", "neither": "neither"}.get(
            run["name"], name
        )
        rows.append(
            [
                name,
                f"{run['all']['acceptance_rate']:.1%}",
                f"{run['all']['tokens_per_step']:.3f}",
                f"{run['opening']['acceptance_rate']:.1%}",
                f"{run['opening']['tokens_per_step']:.3f}",
            ]
        )
    opening = f"first {section['opening_tokens']} tokens"
    header = ["the drafter is told", "acceptance", "tokens per step"]
    return markdown([*header, f"acceptance, {opening}", "tokens per step"], rows)


def mechanism_pause(result: Result) -> str:
    """Acceptance behind a stretch without drafts."""
    section = _section(result, "pause")
    spans = list(section["runs"][0]["spans"])
    rows = [
        [run["name"], *(f"{run['spans'][span]['acceptance_rate']:.1%}" for span in spans)]
        for run in section["runs"]
    ]
    header = [f"{section['pause']} steps without drafts, then", *(f"steps {s}" for s in spans)]
    return markdown(header, rows)


def mechanism_carry(result: Result) -> str:
    """Openings behind a kept prefix."""
    rows = [
        [
            str(run["new_tokens"]),
            run["name"],
            str(run["texts"]),
            f"{run['all']['num_drafted']:,}",
            f"{run['all']['acceptance_rate']:.1%}",
            f"{run['all']['tokens_per_step']:.3f}",
        ]
        for run in _section(result, "carry")["runs"]
    ]
    rows.sort(key=lambda cells: int(cells[0]))
    header = ["tokens behind the kept prefix", "drafter's rows", "texts", "drafted", "acceptance"]
    return markdown([*header, "tokens per step"], rows, left=2)


def mechanism_vocabulary(result: Result) -> str:
    """Drafts from a part of the vocabulary."""
    section = _section(result, "vocabulary")
    rows = []
    for size, below, run in zip(
        section["sizes"], section["emitted_below"], section["runs"], strict=True
    ):
        total = run["all"]
        rows.append(
            [
                f"{size or section['vocab_size']:,}",
                f"{(size or section['vocab_size']) / section['vocab_size']:.1%}",
                f"{below:.1%}",
                f"{total['acceptance_rate']:.1%}",
                f"{total['mean_acceptance_length']:.3f}",
            ]
        )
    header = ["ids that may be drafted", "of the head's rows", "of the emitted tokens"]
    return markdown([*header, "acceptance", "mean acceptance length"], rows)


def mechanism_drafters(result: Result) -> str:
    """Tokens per decode step of each drafter and kind of text."""
    runs = _section(result, "drafters")["runs"]
    rows = []
    for kind in [*runs[0]["classes"], None]:
        name = "**all classes**" if kind is None else CLASS_NAMES.get(kind, kind)
        each = [run["all"] if kind is None else run["classes"][kind] for run in runs]
        by_lookup = each[-1]["drafted_by"].get("ngram", 0) / max(1, each[-1]["num_drafted"])
        rows.append(
            [
                name,
                *(f"{one['tokens_per_step']:.2f}" for one in each),
                *(f"{one['tokens_per_row']:.2f}" for one in each),
                f"{by_lookup:.0%}",
            ]
        )
    names = [run["name"] for run in runs]
    header = ["tokens per step", *names, *(f"per row, {name}" for name in names)]
    return markdown([*header, "drafted by lookup in the last"], rows)


def mechanism_speed(result: Result, batch: int) -> str:
    """Time of each setting against the first, in turn."""
    run = next((one for one in result["speed"] if one["batch"] == batch), None)
    if run is None:
        return f"_The stored result has no run at batch {batch}._"
    rows = [
        [
            one["name"],
            _rate(one["tokens_per_second"]),
            f"{one['over_first']['median']:.2f}",
            f"{one['over_first']['low']:.2f} to {one['over_first']['high']:.2f}",
        ]
        for one in run["runs"]
    ]
    return markdown([f"batch {batch}", "tok/s", "against the first", "low to high"], rows)


def mechanism_scoring(result: Result) -> str:
    """Time of the head alone."""
    rows = []
    for one in result["scoring"]:
        whole = one["seconds"]["0"]
        for size, seconds in one["seconds"].items():
            rows.append(
                [
                    str(one["rows"]),
                    "all" if size == "0" else f"{int(size):,}",
                    f"{1e6 * seconds:.0f}",
                    f"{seconds / whole:.2f}",
                ]
            )
    return markdown(["sequences", "ids", "microseconds", "of all ids"], rows, left=2)


def lengths_table(result: Result, batch: int) -> str:
    """Every fixed draft length and the controller, against drafts off."""
    run = _run(result, batch)
    if run is None:
        return f"_The stored result has no run at batch {batch}._"
    rows = []
    for row in run["rows"]:
        auto = row["auto"]
        rows.append(
            [
                "**all**" if row["name"] == "all" else CLASS_NAMES.get(row["name"], row["name"]),
                _rate(row["fixed"]["0"]["tokens_per_second"]),
                *(
                    f"{one['over_off']['median']:.2f}"
                    for k, one in row["fixed"].items()
                    if k != "0"
                ),
                f"{auto['over_off']['median']:.2f}",
                f"{auto['mean_drafts']:.2f}",
                f"{auto['over_best_fixed']['median']:.3f}",
                f"{auto['over_best_fixed']['low']:.3f} to {auto['over_best_fixed']['high']:.3f}",
            ]
        )
    fixed = [f"K = {k}" for k in run["rows"][0]["fixed"] if k != "0"]
    header = [f"batch {batch}", "off, tok/s", *fixed, "auto", "its mean K", "auto over best fixed"]
    return markdown([*header, "low to high"], rows)


def lengths_sentence(result: Result) -> str:
    """The controller in a line."""
    if not result["tokens_equal"]:
        raise NumbersError("lengths.json: tokens with drafts differ from tokens without")
    parts = []
    for run in result["runs"]:
        row = next(one for one in run["rows"] if one["name"] == "all")
        best = row["best_fixed"]
        parts.append(
            f"at batch {run['batch']} it decodes {row['auto']['over_off']['median']:.2f} times as "
            f"fast as drafts off and {row['auto']['over_best_fixed']['median']:.3f} times as fast "
            f"as the best fixed length, {best or 'off'}"
        )
    return "With the bundled model the controller keeps up as follows: " + "; ".join(parts)


def turns_summary(result: Result) -> str:
    """Second turns behind a kept prefix and cold."""
    summary = result["summary"]
    rows = []
    for side, name in (("warm", "prefix kept"), ("cold", "cold")):
        counts, seconds = summary[side], summary["first_token_seconds"][side]
        read = summary["prompt_tokens"] - (summary["cached_tokens"] if side == "warm" else 0)
        rows.append(
            [
                name,
                f"{read:,}",
                f"{counts['num_drafted']:,}",
                f"{counts['acceptance_rate']:.4f}",
                f"{counts['mean_acceptance_length']:.3f}",
                f"{1000 * seconds['median']:.0f}",
            ]
        )
    header = ["second turn", "tokens read", "drafted", "acceptance", "mean acceptance length"]
    return markdown([*header, "median ms to the first token"], rows)


def turns_sentence(result: Result) -> str:
    """What the promise came to."""
    summary = result["summary"]
    if not summary["tokens_equal"]:
        raise NumbersError("turns.json: tokens behind a kept prefix differ from a cold run's")
    apart, most = abs(summary["acceptance_difference"]), summary["largest_difference"]
    return (
        f"Over {summary['conversations']} two-turn conversations the second turn's acceptance "
        f"differs by {apart:.4f} from that of a cold run over the same ids, in no conversation by "
        f"more than {most:.4f}; the tokens are the same, and at most {summary['most_read_anew']} "
        "tokens of a known prefix were read anew."
    )


def turns_cost(result: Result) -> str:
    """What keeping costs a request that gains nothing."""
    cost, kept = result["cost"], result["kept"]
    ratio, rounds = cost["warm_over_cold"], len(cost["warm_over_cold"]["values"])
    return (
        f"A request of {cost['tokens']:,} tokens that decodes without drafts and leaves "
        f"{cost['blocks']} blocks behind takes {ratio['median']:.3f} of the time it takes without "
        f"the cache ({ratio['low']:.3f} to {ratio['high']:.3f} over {rounds} rounds). "
        f"With the bundled model a kept block is {kept['bytes'] / kept['blocks'] / 1e6:.2f} MB."
    )


SOAKED = {
    "whole": "answers taken as a whole, equal to the answer alone",
    "stream": "streams read to the end, equal to the answer alone",
    "slow": "the same by a slow reader",
    "leave": "the same by a client that meant to leave and came to the end before",
    "left": "streams left in the middle, equal as far as they came",
    "torn": "connections closed within or behind a request",
    "broken": "bodies that are no request, or changed at random, answered as such",
    "overloaded": "refused with 429 for lack of room",
    "watched": "of an operator, for metrics, health and the page",
    "MIXED": "answers that differ",
    "LOST": "streams that broke off",
    "WRONG STATUS": "answers with a status that does not fit",
}


def soak_requests(result: Result) -> str:
    """What came of every request of the soak."""
    counts = {**dict.fromkeys(("MIXED", "LOST", "WRONG STATUS"), 0), **result["requests"]}
    rows = [[words, f"{counts[name]:,}"] for name, words in SOAKED.items() if name in counts]
    return markdown(["requests", "count"], rows)


def soak_sentence(result: Result) -> str:
    """What the soak was and what it left."""
    if result["wrong"]:
        raise NumbersError(f"soak.json tells of faults: {result['wrong']}")
    memory, total = result["memory_mib"], sum(result["requests"].values())
    settings = result["settings"]
    return (
        f"{settings['clients']} clients at once for {settings['seconds'] / 60:g} minutes made "
        f"{total:,} requests; the engine took {result['steps']:,} steps for {result['tokens']:,} "
        f"tokens and accepted {result['accepted']:,} of {result['drafted']:,} drafts. No answer "
        "was lost, mixed up or cut, no cache block was left behind, and the server's memory was at "
        f"most {memory['second_quarter']:,} MiB in the second quarter of the time and "
        f"{memory['last_quarter']:,} MiB in the last."
    )


def training_quality(result: Result) -> str:
    """Held-out loss and accuracies by kind of text."""
    rows = []
    for kind, value in result["classes"].items():
        rows.append(
            [
                kind,
                f"{value['tokens']:,}",
                f"{value['loss']:.3f}",
                f"{100 * value['accuracy']:.1f} %",
                *(f"{100 * d['agrees_with_text']:.1f} %" for d in value["drafts"]),
                *(f"{100 * d['agrees_with_model']:.1f} %" for d in value["drafts"]),
            ]
        )
    depths = range(1, len(next(iter(result["classes"].values()))["drafts"]) + 1)
    header = ["held-out text", "tokens", "nats per token", "next token right"]
    header += [f"MTP right, depth {d}" for d in depths]
    header += [f"MTP agrees with the trunk, depth {d}" for d in depths]
    return markdown(header, rows)


def training_cost(result: Result) -> str:
    """What rounding the experts to fp4 costs."""
    cost = result["summary"]["fp4_cost_nats"]
    return (
        f"The rounded checkpoint's held-out loss minus the unrounded weights' is {cost:+.4f} "
        "nats per token: training saw the rounded weights, so they are the better ones"
        if cost < 0
        else f"Rounding costs {cost:.4f} nats per token on held-out text"
    )


def training_run(result: Result) -> str:
    """Length of the run."""
    args = result["args"]
    first, *others = json.loads(args["mtp_weights"])
    later = " and ".join(str(weight) for weight in others)
    return (
        f"{result['step']:,} steps of {args['batch']} rows of {args['length']} tokens, "
        f"{result['tokens'] / 1e6:.0f} million tokens in all, {result['minutes']:.1f} minutes on "
        f"one H200; MTP loss weight {first} at depth 1 and {later} at depths 2 and 3"
    )


def training_corpus(result: Result) -> str:
    """Kinds of text trained on."""
    tokens = result["documents_tokens"]["by_kind"]
    rows = [
        [kind, f"{result['bytes'][kind] / 1e6:.0f}", f"{count / 1e6:.1f}"]
        for kind, count in sorted(tokens.items(), key=lambda item: -item[1])
    ]
    return markdown(["kind", "MB", "million tokens"], rows)


def training_sources(result: Result) -> str:
    """Every source with version and licence."""
    rows = [
        [s["name"], s["version"], s["licence"], s["role"], f"{s['bytes'] / 1e6:.1f}"]
        for s in result["sources"]
    ]
    return markdown(["source", "version", "licence", "role", "MB"], rows, left=4)


def device_summary(result: Result) -> str:
    """Tokens that differ from the CPU's."""
    rows = [
        [
            one["dtype"],
            str(one["num_drafts"]) if one["num_drafts"] else "off",
            f"{one['tokens']:,}",
            str(len(one["differences"])),
            f"{one['largest_margin']:.3f}",
        ]
        for one in result["comparisons"]
    ]
    header = ["dtype", "drafts", "tokens", "differ from the CPU's", "largest margin lost"]
    return markdown(header, rows)


def device_differences(result: Result) -> str:
    """Each near-tie."""
    rows = [
        [
            f"{one['dtype']}, {one['num_drafts'] or 'off'}",
            str(d["prompt"]),
            str(d["position"]),
            str(d["cpu"]),
            str(d["device"]),
            f"{d['margin']:.3f}",
            f"{d['logit_std']:.2f}",
        ]
        for one in result["comparisons"]
        for d in one["differences"]
    ]
    header = ["run", "prompt", "position", "CPU's id", "device's id", "margin", "spread of logits"]
    return markdown(header, rows)


def gpu_tests(result: Result) -> str:
    """One sentence on the last run of the tests that need a GPU."""
    outcome = f"{result['passed']} passed, {result['failed']} failed"
    where = f"{result['device']}, torch {result['torch']}, Python {result['python']}"
    return (
        f"{outcome} in {result['seconds']:.0f} s on an {where}; {result['date']}, after commit "
        f"`{result['commit']}`; `{result['command']}`"
    )


def device_environment(result: Result) -> str:
    """Where and when."""
    line = (
        f"{result['device']}, torch {result['torch']}, Python {result['python']}, "
        f"{result['date']}, commit `{result['commit'][:12]}`; `{result['command']}`"
    )
    return f"{line}. Recorded {result['recorded']}." if "recorded" in result else line


def device_graph_sentence(result: Result) -> str:
    """Where drafts stand on a GPU at batch 1."""
    parts = []
    for run in result["speed"]:
        rows = [
            row
            for row in run["rows"]
            if row["batch"] == 1 and row["mode"] == "captured" and row["num_drafts"]
        ]
        best = max(rows, key=lambda row: float(row["over_off"]))
        parts.append(f"{best['over_off']:.2f} times in {run['dtype']}")
    return (
        f"captured on an {result['device']}, batch 1, the best number of drafts decodes "
        f"{' and '.join(parts)} as fast as without"
    )


def device_graph_speed(result: Result) -> str:
    """Captured steps against steps as they are, drafts off and on."""
    rows = []
    for run in result["speed"]:
        cells = {(r["batch"], r["num_drafts"], r["mode"]): r for r in run["rows"]}
        for batch, num_drafts, mode in cells:
            if mode == "eager":
                continue
            eager, row = (cells[batch, num_drafts, which] for which in ("eager", "captured"))
            rows.append(
                [
                    run["dtype"],
                    str(batch),
                    str(num_drafts) if num_drafts else "off",
                    _rate(eager["tokens_per_second"]),
                    _rate(row["tokens_per_second"]),
                    _spread(row["tokens_per_second"]),
                    f"{row['milliseconds_per_step']:.2f}",
                    f"{row['over_off']:.2f}",
                    f"{row['mean_acceptance_length']:.2f}",
                    f"{row['same_as_off']} of {row['sequences']}",
                    f"{row['same_as_eager']} of {row['sequences']}",
                ]
            )
    header = ["dtype", "batch", "drafts", "tok/s as they are", "captured", "low to high"]
    header += ["ms a step", "against drafts off", "mean acceptance length"]
    header += ["same as off", "same as not captured"]
    return markdown(header, rows)


def device_graph_steps(result: Result) -> str:
    """One step over padding, launched operation by operation and replayed."""
    rows = [
        [
            dtype,
            row["what"],
            str(row["batch"]),
            f"{row['eager']:.2f}",
            f"{row['replayed']:.2f}",
            f"{row['eager'] / row['replayed']:.1f}",
        ]
        for dtype, steps in result["steps"].items()
        for row in steps
    ]
    header = ["dtype", "step", "batch", "as it is, ms", "replayed, ms", "ratio"]
    return markdown(header, rows, left=2)


def device_graph_captures(result: Result) -> str:
    """What captures cost."""
    run = result["speed"][0]
    return (
        f"{run['captures']} shapes of the target were captured in "
        f"{run['capture_seconds']:.1f} seconds"
    )


def torch_sentence(result: Result) -> str:
    """What drafts bring where plain torch runs."""
    run, ratios = _run(result, 1), result["ratios"]
    if run is None:
        raise NumbersError("decode-torch.json has no run at batch 1")
    best = ratios["best_num_drafts"]
    length = _leg(run, best)["speculation"]["mean_acceptance_length"]
    return (
        f"with {best} {'draft' if best == 1 else 'drafts'} a step plain torch decodes "
        f"{ratios['on_over_off']:.2f} times as fast as without (mean acceptance length "
        f"{length:.2f})"
    )


def kernel_steps(result: Result) -> str:
    """Time of one forward by rows, and what a draft costs."""
    runs = result["runs"]
    header = ["rows of one step"]
    for run in runs:
        threads = f"{run['threads']} thread{'s' if run['threads'] > 1 else ''}"
        header += [f"{threads}, ms", "of one row"]
    rows = []
    for count in runs[0]["steps"]:
        cells = [count]
        for run in runs:
            times = run["steps"]
            cells += [f"{times[count]['p5']:.2f}", f"{times[count]['p5'] / times['1']['p5']:.2f}"]
        rows.append(cells)
    for name, key in (("draft block, one row", "draft_step_1"), ("output head, one row", "head_1")):
        cells = [name]
        for run in runs:
            cells += [f"{run[key]['p5']:.2f}", f"{run[key]['p5'] / run['steps']['1']['p5']:.2f}"]
        rows.append(cells)
    return markdown(header, rows)


def length_simulation(result: Result) -> str:
    """The controller against fixed draft lengths, by scenario."""
    rows = []
    for one in result["scenarios"]:
        fixed = one["fixed_tokens_per_second"]
        rows.append(
            [
                one["name"],
                str(one["batch"]),
                f"{one['steps']:,}",
                f"{max(fixed) / fixed[0]:.2f}",
                str(one["best_fixed"]) if one["best_fixed"] else "off",
                f"{one['mean_length']:.2f}",
                f"{one['over_best_fixed']:.3f}",
                f"{one['worst_seed_over_best_fixed']:.3f}",
                f"{one['over_off']:.3f}",
            ]
        )
    header = ["scenario", "batch", "steps", "best fixed against off", "best fixed K", "mean K"]
    header += ["against best fixed", "its worst seed", "against off"]
    return markdown(header, rows)


def length_sentence(result: Result) -> str:
    """The worst of all scenarios."""
    if not result["complete"]:
        raise NumbersError("length-simulation.json holds some scenarios only")
    rows = result["scenarios"]
    worst = min(rows, key=lambda one: one["over_best_fixed"])
    off = min(rows, key=lambda one: one["over_off"])
    ahead = sum(one["over_best_fixed"] > 1 for one in rows)
    return (
        f"Over {len(rows)} scenarios, {result['seeds']} seeds each, the controller loses at most "
        f"{100 * (1 - worst['over_best_fixed']):.1f} % against the fixed length that is best for "
        f"the scenario ({worst['name']}), and at most {100 * (1 - off['over_off']):.1f} % against "
        f"drafts off ({off['name']}); in {ahead} of them it beats every fixed length"
    )


def length_environment(result: Result) -> str:
    """How to repeat it."""
    clean = {True: "clean", False: "with uncommitted changes", None: "not a checkout"}
    commit = (result["commit"] or "unknown")[:12]
    return (
        f"`python benchmarks/{' '.join(result['command'])}`, commit {commit} "
        f"({clean[result['clean']]}), {result['date']}, Python {result['python']}"
    )


def sampling_acceptance(result: Result) -> str:
    """Rules against each other at every draft length."""
    rows = [
        [
            str(run["num_drafts"]),
            run["rule"],
            f"{run['mean_acceptance_length']:.2f}",
            *(f"{x:.0%}" for x in run["by_position"][:3]),
            *[""] * (3 - len(run["by_position"])),
            {True: "yes", False: "NO", None: ""}[run.get("tokens_equal")],
        ]
        for run in sorted(result["runs"], key=lambda run: int(run["num_drafts"]))
    ]
    header = ["K", "rule", "mean acceptance length", "draft 1", "draft 2", "draft 3"]
    return markdown([*header, "same tokens as without drafts"], rows, left=2)


def _grammar(result: Result) -> Result:
    if not result["all_valid_and_same"]:
        raise NumbersError("grammar.json: answers or drafts are wrong")
    return result


def grammar_validity(result: Result) -> str:
    """Answers and drafts of random grammars at every number of drafts."""
    rows = []
    for run in _grammar(result)["runs"]:
        names = ("answers", "valid", "same_as_without", "drafts", "legal", "free")
        rows.append([str(run["num_drafts"]), *(str(run[name]) for name in names)])
    header = ["drafts a step", "answers", "valid", "same ids", "drafted", "legal", "for free"]
    return markdown(header, rows)


def grammar_json(result: Result) -> str:
    """Steps and drafts of the same JSON with its grammar and without."""
    rows = []
    for leg in _grammar(result)["json"]["legs"]:
        refused = leg["drafted"] - leg["accepted"]
        counts = (leg["steps"], leg["drafted"], leg["accepted"], refused, leg["free"])
        rows.append([f"{leg['name']} the grammar", *map(str, counts)])
    return markdown(["", "steps", "drafted", "accepted", "refused", "for free"], rows)


def grammar_sentence(result: Result) -> str:
    """What the masks cost."""
    found = _grammar(result)["json"]
    share, batched = found["grammar_share"], result["masks"]["grammar_share"]
    return (
        f"At K = {found['num_drafts']} the grammar takes {share['median']:.1%} of a step at "
        f"batch 1 (median; under {share['nine_tenths']:.1%} in nine steps of ten) and "
        f"{batched['median']:.1%} (under {batched['nine_tenths']:.1%}) of one with "
        f"{result['settings']['batch']} short answers of as many grammars; with all that follows "
        "from it, such as picks on the host, a step at batch 1 takes "
        f"{found['step_over_step_without']['median']:.2f} times the time of one without"
    )


def _load(result: Result) -> Result:
    if result["wrong"]:
        raise NumbersError(f"load-{result['tool']}.json: {result['wrong'][0]}")
    return result


def load_table(result: Result) -> str:
    """What a load tool reported of each of its runs."""
    rows = []
    for run in _load(result)["runs"]:
        first, then, told = run["ttft_ms"], run["itl_ms"], run["acceptance"]
        rows.append(
            [
                f"`{run['endpoint']}`",
                str(run["concurrency"]),
                str(run["requests"]),
                str(run["errors"]),
                f"{first['median']:.0f}",
                f"{first['p90']:.0f}",
                f"{then['median']:.2f}",
                f"{then['p90']:.2f}",
                f"{run['requests_per_second']:.1f}",
                f"{run['output_tokens_per_second']:.0f}",
                f"{told['mean_acceptance_length']:.3f}",
                f"{told['acceptance_rate']:.1%}",
            ]
        )
    header = ["endpoint", "at a time", "answered", "failed", "ms to first token", "p90"]
    header += ["ms a token", "p90", "requests/s", "tok/s", "mean acceptance length", "accepted"]
    return markdown(header, rows)


def load_sentence(result: Result) -> str:
    """Whether the tool and the server agree on what drafting did."""
    runs = _load(result)["runs"]
    steps, drafted, accepted = (
        sum(run["acceptance"][name] for run in runs) for name in ("steps", "drafted", "accepted")
    )
    tool = result["tool"]
    return (
        f"{tool} {result['versions'][tool]}: {sum(run['requests'] for run in runs):,} requests in "
        f"{len(runs)} runs, none failed. It was told of {drafted:,} drafts in {steps:,} steps, "
        f"{accepted:,} accepted; in every run these counts, also by position, are those by which "
        "`/metrics` rose"
    )


def load_command(result: Result) -> str:
    """The tool's command line of the last run."""
    command = result["runs"][-1]["command"]
    return "```bash\n" + command.replace(" --", " \\\n    --") + "\n```"


def serving_table(result: Result) -> str:
    """What a token costs through the library and through the server, by the engine's threads."""
    rows = []
    for leg in result["legs"]:
        over, cpu = leg["overhead_per_token"], leg["cpu_overhead"]
        rows.append(
            [
                f"{leg['num_threads']} of {result['cores']} cores",
                f"{leg['library_ms_per_token']['median']:.3f}",
                f"{leg['server_ms_per_token']['median']:.3f}",
                f"{over['median']:+.1%}",
                f"{over['quarter']:+.1%} to {over['three_quarters']:+.1%}",
                f"{cpu['median']:+.1%}",
                f"{leg['library_first_token_ms']['median']:.1f}",
                f"{leg['server_first_token_ms']['median']:.1f}",
                f"{leg['tokens_per_read']['median']:.0f}",
            ]
        )
    header = ["engine's threads", "ms a token, library", "server", "overhead", "half of the turns"]
    header += ["in CPU time", "ms to the first token, library", "server", "tokens a read"]
    return markdown(header, rows)


def serving_sentence(result: Result) -> str:
    """The overhead where the client has a core, and where it has none."""
    said = []
    for leg in result["legs"]:
        has_core = leg["num_threads"] < result["cores"]
        where = "leaves its client a core" if has_core else "takes all cores"
        over = leg["overhead_per_token"]["median"]
        said.append(f"{over:+.1%} a token where the engine {where}")
    turns = result["settings"]["turns"]
    return f"The server's time over the library's at batch 1, the median of {turns} turns: " + (
        "; ".join(said) + "."
    )


def serving_start(result: Result) -> str:
    """How soon the server is ready, and what its first request takes."""
    begun = result["start"]
    ready, first, later = (
        begun[name] for name in ("ready_seconds", "first_request_ms", "later_request_ms")
    )
    return (
        f"From the start of its process to the first 200 of `/health` it took "
        f"{ready['median']:.1f} s ({ready['low']:.1f} to {ready['high']:.1f} in "
        f"{len(ready['values'])} starts); the first token of its first request then came after "
        f"{first['median']:.1f} ms, of later ones after {later['median']:.1f} ms."
    )


RENDER: dict[str, tuple[str, Callable[[Result], str]]] = {
    "serving-table": ("serving", serving_table),
    "serving-sentence": ("serving", serving_sentence),
    "serving-start": ("serving", serving_start),
    "serving-environment": ("serving", environment),
    "load-aiperf": ("load-aiperf", load_table),
    "load-aiperf-sentence": ("load-aiperf", load_sentence),
    "load-aiperf-command": ("load-aiperf", load_command),
    "load-aiperf-environment": ("load-aiperf", environment),
    "load-guidellm": ("load-guidellm", load_table),
    "load-guidellm-sentence": ("load-guidellm", load_sentence),
    "load-guidellm-command": ("load-guidellm", load_command),
    "load-guidellm-environment": ("load-guidellm", environment),
    "sampling-acceptance": ("sampling", sampling_acceptance),
    "sampling-environment": ("sampling", environment),
    "length-simulation": ("length-simulation", length_simulation),
    "length-sentence": ("length-simulation", length_sentence),
    "length-environment": ("length-simulation", length_environment),
    "decode-torch-sentence": ("decode-torch", torch_sentence),
    "decode-torch-batch-1": ("decode-torch", lambda result: decode_table(result, 1)),
    "decode-torch-environment": ("decode-torch", environment),
    "kernel-steps": ("kernels", kernel_steps),
    "training-quality": ("training-eval", training_quality),
    "training-cost": ("training-eval", training_cost),
    "training-run": ("training", training_run),
    "training-corpus": ("../../recipes/corpus_manifest", training_corpus),
    "training-sources": ("../../recipes/corpus_manifest", training_sources),
    "device-summary": ("device", device_summary),
    "device-differences": ("device", device_differences),
    "device-environment": ("device", device_environment),
    "device-graphs-speed": ("device-graphs", device_graph_speed),
    "device-graphs-steps": ("device-graphs", device_graph_steps),
    "device-graphs-captures": ("device-graphs", device_graph_captures),
    "device-graphs-environment": ("device-graphs", device_environment),
    "device-graphs-sentence": ("device-graphs", device_graph_sentence),
    "gpu-tests": ("gpu-tests", gpu_tests),
    "decode-sentence": ("decode", decode_sentence),
    "decode-summary": ("decode", decode_summary),
    "decode-batch-1": ("decode", lambda result: decode_table(result, 1)),
    "decode-batch-8": ("decode", lambda result: decode_table(result, 8)),
    "decode-environment": ("decode", environment),
    "turns-summary": ("turns", turns_summary),
    "turns-sentence": ("turns", turns_sentence),
    "turns-cost": ("turns", turns_cost),
    "turns-environment": ("turns", environment),
    "acceptance-sentence": ("acceptance", acceptance_sentence),
    "acceptance-by-class": ("acceptance", acceptance_by_class),
    "acceptance-by-position": (
        "acceptance",
        lambda result: acceptance_by_position(result, conditional=False),
    ),
    "acceptance-by-position-conditional": (
        "acceptance",
        lambda result: acceptance_by_position(result, conditional=True),
    ),
    "acceptance-histogram": ("acceptance", acceptance_histogram),
    "acceptance-rows": ("acceptance", acceptance_rows),
    "acceptance-rows-by-class": ("acceptance", acceptance_rows_by_class),
    "acceptance-rows-sentence": ("acceptance", acceptance_rows_sentence),
    "acceptance-environment": ("acceptance", environment),
    "mechanisms-context": ("mechanisms", mechanism_context),
    "mechanisms-pause": ("mechanisms", mechanism_pause),
    "mechanisms-carry": ("mechanisms", mechanism_carry),
    "mechanisms-vocabulary": ("mechanisms", mechanism_vocabulary),
    "mechanisms-thresholds": (
        "mechanisms",
        lambda result: _counted(_section(result, "thresholds")["runs"], "chains"),
    ),
    "mechanisms-pruning": (
        "mechanisms",
        lambda result: _counted(_section(result, "pruning")["runs"], "drafts of a step"),
    ),
    "mechanisms-drafters": ("mechanisms", mechanism_drafters),
    "mechanisms-environment": ("mechanisms", environment),
    "mechanisms-speed-1": ("mechanisms-speed", lambda result: mechanism_speed(result, 1)),
    "mechanisms-speed-8": ("mechanisms-speed", lambda result: mechanism_speed(result, 8)),
    "mechanisms-scoring": ("mechanisms-speed", mechanism_scoring),
    "mechanisms-speed-environment": ("mechanisms-speed", environment),
    "lengths-batch-1": ("lengths", lambda result: lengths_table(result, 1)),
    "lengths-batch-8": ("lengths", lambda result: lengths_table(result, 8)),
    "lengths-sentence": ("lengths", lengths_sentence),
    "lengths-environment": ("lengths", environment),
    "grammar-validity": ("grammar", grammar_validity),
    "grammar-json": ("grammar", grammar_json),
    "grammar-sentence": ("grammar", grammar_sentence),
    "grammar-environment": ("grammar", environment),
    "soak-requests": ("soak", soak_requests),
    "soak-sentence": ("soak", soak_sentence),
    "soak-environment": ("soak", environment),
}
"""Region -> result file and what makes the text. ``text-NAME`` shows the file ``NAME.txt``."""


SCRIPTS = {
    "mechanisms-speed": "mechanisms.py --speed",
    "device-graphs": "device.py --graphs",
    "load-aiperf": "load.py --aiperf aiperf",
    "load-guidellm": "load.py --guidellm guidellm",
}
"""Result file -> what makes it, where the names differ."""


def render(name: str, results: Results) -> str:
    """The content of one region.

    Raises:
        NumbersError: no region of that name, or a result file that is of no use.
    """
    if name.startswith("text-"):
        text = results.text(name.removeprefix("text-"))
        if text is None:
            return "_No capture is stored yet._"
        return f"```text\n{text}\n```"
    if name not in RENDER:
        raise NumbersError(
            f"no region is called {name!r}; there are {', '.join(RENDER)} and text-NAME"
        )
    file, make = RENDER[name]
    result = results.read(file)
    if result is None:
        script = SCRIPTS.get(file, f"{file}.py")
        command = f"python benchmarks/{script} --json benchmarks/results/{file}.json"
        return f"_No result is stored yet; `{command}` makes one._"
    try:
        return make(result)
    except (KeyError, IndexError, TypeError, StopIteration) as error:
        raise NumbersError(f"{file}.json lacks what {name} shows: {error!r}") from None


def rewrite(text: str, results: Results) -> str:
    """A document with every region made anew.

    Raises:
        NumbersError: an unknown region, or an opening without its end.
    """

    def fill(match: re.Match[str]) -> str:
        content = render(match["name"], results)
        around = "\n" if "\n" in match["body"] or "\n" in content else ""
        return f"<!-- numbers:{match['name']} -->{around}{content}{around}<!-- /numbers -->"

    stray = OPENING.search(REGION.sub("", text))
    nested = [m for m in REGION.finditer(text) if OPENING.search(m["body"])]
    if stray or nested:
        raise NumbersError("a numbers region without its end, or an end without a region")
    return REGION.sub(fill, text)


def stray_figures(text: str) -> Iterator[tuple[int, str]]:
    """(line number, figure) of everything that looks measured and stands outside of a region."""
    blanked = REGION.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(blanked.splitlines(), 1):
        if EXEMPT not in line:
            for match in FIGURE.finditer(line):
                yield number, match[0]


def documents(root: Path) -> list[Path]:
    """The documents that are kept."""
    card = root / "src" / "paceline" / "bundled" / "MODEL_CARD.md"
    pages = [root / "README.md", card, *sorted((root / "docs").glob("**/*.md"))]
    return [page for page in pages if page.exists()]


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if all is well, 1 if something is wrong or (with --check) out of date."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the repository")
    args = parser.parse_args(arguments)
    results = Results(args.root / "benchmarks" / "results")
    wrong = False
    for path in documents(args.root):
        name = path.relative_to(args.root).as_posix()
        text = path.read_text(encoding="utf-8")
        try:
            fresh = rewrite(text, results)
        except NumbersError as error:
            print(f"{name}: {error}", file=sys.stderr)
            wrong = True
            continue
        if fresh != text and args.check:
            print(
                f"{name}: numbers are out of date; run scripts/update_numbers.py", file=sys.stderr
            )
            lines = difflib.unified_diff(
                text.splitlines(), fresh.splitlines(), "stored", "from results", lineterm="", n=0
            )
            print("\n".join(lines), file=sys.stderr)
            wrong = True
        elif fresh != text:
            path.write_text(fresh, encoding="utf-8")
            print(f"{name}: rewritten")
        for number, figure in stray_figures(fresh):
            print(
                f"{name}:{number}: {figure!r} is typed by hand; take it from a region, or end the "
                f"line with {EXEMPT}",
                file=sys.stderr,
            )
            wrong = True
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
