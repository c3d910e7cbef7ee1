"""What each mechanism of drafting is worth, one at a time, also where that is nothing.

    python benchmarks/mechanisms.py --json benchmarks/results/mechanisms.json
    python benchmarks/mechanisms.py --speed --json benchmarks/results/mechanisms-speed.json

The first counts drafts: greedy, the same prompts with a mechanism and without, tokens compared with
those of no drafts at all; the exit status is 1 if any differ. Counts do not depend on the machine.
The second measures time: the settings take turns within each round, and a ratio to the first
setting is taken within a round. docs/metrics.md defines the figures.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import rows

from paceline import LLM, SamplingParams, bundled_model_path
from paceline.draft import DeepseekV4MtpHead
from paceline.engine import Engine
from paceline.types import MAX_NUM_DRAFTS, DrafterKv, SpeculationStats

PROMPT_ROWS = (127, 32, 8, 0)
VOCABULARIES = (0, 4096, 2048, 1024)
THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8)
KEPT = (1.0, 0.8, 0.6, 0.4)
DRAFTERS = ("mtp", "ngram", "mtp+ngram")
LENGTHS = (1, 2, 3)
NEW_TOKENS = (1, 16, 64)
PAUSE = 300
AFTER = (("1 to 4", 0, 4), ("5 to 16", 4, 16), ("17 to 64", 16, 64))
"""Steps behind a pause: how they are called, and the first and one past the last of them."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is decoded, with which model.

    Attributes:
        model: the checkpoint's folder.
        prompts: of all classes.
        params: how they are decoded.
        options: for every `LLM`.
        plain: ids of each prompt without drafts.
        num_drafts: drafts of a step.
    """

    model: str
    prompts: list[common.Prompt]
    params: SamplingParams
    options: dict[str, Any]
    plain: list[list[int]]
    num_drafts: int

    def llm(self, **changed: Any) -> LLM:
        """Build one, the number of drafts and the options as usual where they are not changed."""
        return LLM(self.model, **{"num_drafts": self.num_drafts, **self.options, **changed})

    def run(self, name: str, **changed: Any) -> dict[str, Any]:
        """Decode every prompt with changed options; counts of each class and of all."""
        with self.llm(**changed) as llm:
            done = finished(llm, [p.text for p in self.prompts], self.params)
        ids = [list(r.token_ids) for r in done]
        result = {
            "name": name,
            "tokens_equal": ids == self.plain,
            "all": tally(r.speculation for r in done),
            "classes": {
                kind: tally(
                    r.speculation for r, p in zip(done, self.prompts, strict=True) if p.kind == kind
                )
                for kind in dict.fromkeys(p.kind for p in self.prompts)
            },
        }
        print(f"  {name}: {result['all']['tokens_per_step']:.3f} tokens a step", flush=True)
        return result

    def short(self, max_tokens: int) -> Work:
        """The same with answers of at most so many tokens."""
        return Work(
            model=self.model,
            prompts=self.prompts,
            params=SamplingParams(max_tokens=max_tokens),
            options=self.options,
            plain=[ids[:max_tokens] for ids in self.plain],
            num_drafts=self.num_drafts,
        )


def finished(llm: LLM, prompts: list[Any], params: SamplingParams) -> list[Any]:
    """Results of all prompts; a failure ends the benchmark."""
    done: list[Any] = llm.generate(prompts, params, allow_special=True)
    if failed := [r.error for r in done if r.error]:
        raise SystemExit(f"error: {failed[0]}")
    if llm.engine.num_proposer_failures:
        raise SystemExit(f"error: {llm.engine.num_proposer_failures} failures of the proposer")
    return done


def tally(each: Iterable[SpeculationStats]) -> dict[str, Any]:
    """Sum statistics, and add the ratios of docs/metrics.md and two of all decode steps."""
    total = SpeculationStats()
    for stats in each:
        total.add(stats)
    target_rows = total.num_decode_steps + total.num_drafted
    return {
        **common.acceptance(common.add_counts([common.counts(total)])),
        "num_decode_steps": total.num_decode_steps,
        "num_emitted": total.num_emitted,
        "target_rows": target_rows,
        "tokens_per_step": total.num_emitted / max(1, total.num_decode_steps),
        "tokens_per_row": total.num_emitted / max(1, target_rows),
        "drafted_by": dict(total.drafted_by),
        "accepted_by": dict(total.accepted_by),
    }


# Context


def context(work: Work, *, opening: int = 16) -> dict[str, Any]:
    """How much of a prompt the drafter is told, and whether it is told what was accepted."""
    runs = []
    for name, policy in (
        *((f"prompt_{n}", rows.Policy(name=f"prompt_{n}", prompt_rows=n)) for n in PROMPT_ROWS),
        ("no_catchup", rows.Policy(name="no_catchup", catch_up="none")),
        ("neither", rows.Policy(name="neither", catch_up="none", prompt_rows=0)),
    ):

        def make(context: Any, policy: rows.Policy = policy) -> rows.RowsDrafter:
            return rows.RowsDrafter(context, policy)

        runs.append(
            {
                **work.run(name, proposer=make),
                "opening": work.short(opening).run(f"{name}, opening", proposer=make)["all"],
            }
        )
    return {"opening_tokens": opening, "runs": runs}


class Paused:
    """A length policy: some drafts for the first steps of a request, none, then some again."""

    def __init__(self, *, before: int, pause: int, num_drafts: int) -> None:
        self._silent = range(before, before + pause)
        self._num_drafts = num_drafts
        self._steps: dict[int, int] = {}

    def choose(self, sequences: Sequence[Any], *, max_drafts: int | None = None) -> list[int]:
        """By the count of each sequence's decode steps."""
        chosen = []
        for view in sequences:
            step = self._steps[view.id] = self._steps.get(view.id, -1) + 1
            chosen.append(0 if step in self._silent else min(view.limit, self._num_drafts))
        return chosen

    def observe(self, record: Any) -> None:
        """Learn nothing."""


class Untold(DeepseekV4MtpHead):
    """The head, were it not told what was decoded while it was not asked."""

    def catchup_drafter(self, *args: Any, **named: Any) -> int:
        """Decline."""
        return 0


def step_counts(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[list[list[int]], list[list[tuple[int, int, int]]]]:
    """Decode, and note every step.

    Returns:
        Each prompt's ids, and for each of its decode steps (tokens emitted before, drafted,
        accepted).
    """
    place = {engine.add(ids, params): n for n, ids in enumerate(prompts)}
    tokens: list[list[int]] = [[] for _ in prompts]
    steps: list[list[tuple[int, int, int]]] = [[] for _ in prompts]
    seen = [(0, 0)] * len(prompts)
    while engine.has_work:
        for emission in engine.step():
            if not emission.token_ids:
                continue
            n = place[emission.request_id]
            now = (emission.stats.num_drafted, emission.stats.num_accepted)
            if tokens[n]:
                steps[n].append((len(tokens[n]), now[0] - seen[n][0], now[1] - seen[n][1]))
            seen[n] = now
            tokens[n] += emission.token_ids
    return tokens, steps


def pause(work: Work, *, per_class: int, before: int = 8, length: int = PAUSE) -> dict[str, Any]:
    """Drafts, a stretch without, drafts again: with the catch-up, without it, and never paused.

    And once more "cold", with the text up to the end of the stretch as a prompt. The run that never
    paused is at other places of the text when it takes its steps, so it agrees on average only.
    """
    with work.llm(num_drafts=0) as llm:
        chosen = [
            p for n, p in enumerate(work.prompts) if place_in_class(work.prompts, n) < per_class
        ]
        assert llm.tokenizer is not None
        prompts = [llm.tokenizer.encode(p.text, allow_special=True) for p in chosen]
    last = max(stop for _, _, stop in AFTER)
    params = SamplingParams(
        max_tokens=length + (before + last) * (work.num_drafts + 1),
        ignore_eos=True,
        num_drafts="auto",
    )
    runs: dict[str, Any] = {}
    for name, kind, silent in (
        ("never paused", DeepseekV4MtpHead, 0),
        ("caught up", DeepseekV4MtpHead, length),
        ("not caught up", Untold, length),
    ):
        policy = Paused(before=before, pause=silent, num_drafts=work.num_drafts)
        engine = engine_with(work, head_factory(kind), lengths=policy)
        runs[name] = step_counts(engine, prompts, params)
        engine.close()
        print(f"  {name}", flush=True)
    # Where the first step with drafts behind the pause begins, by tokens emitted.
    ends = [steps[before + length][0] for steps in runs["caught up"][1]]
    said = runs["caught up"][0]
    # Asked to begin there, with all before it as a prompt: the same proposals are due.
    known = [[*ids, *some[: end - 1]] for ids, some, end in zip(prompts, said, ends, strict=True)]
    engine = engine_with(
        work,
        head_factory(DeepseekV4MtpHead),
        lengths=Paused(before=0, pause=0, num_drafts=work.num_drafts),
    )
    cold = step_counts(engine, known, replace(params, max_tokens=last * (work.num_drafts + 1)))
    engine.close()
    outcome = []
    for name, steps in (*((name, run[1]) for name, run in runs.items()), ("cold", cold[1])):
        starts = [1] * len(ends) if name == "cold" else ends
        behind = [
            [step for step in some if step[0] >= start and step[1]]
            for some, start in zip(steps, starts, strict=True)
        ]
        spans = {}
        for label, first, stop in AFTER:
            taken = [step for some in behind for step in some[first:stop]]
            drafted, accepted = sum(s[1] for s in taken), sum(s[2] for s in taken)
            spans[label] = {
                "steps": len(taken),
                "drafted": drafted,
                "accepted": accepted,
                "acceptance_rate": accepted / max(1, drafted),
            }
        outcome.append({"name": name, "spans": spans})
    first = next(iter(runs.values()))[0]
    return {
        "pause": length,
        "before": before,
        "sequences": len(prompts),
        "tokens_equal": all(tokens == first for tokens, _ in runs.values()),
        "runs": outcome,
    }


def place_in_class(prompts: Sequence[common.Prompt], index: int) -> int:
    """Which prompt of its class it is, from 0."""
    return sum(p.kind == prompts[index].kind for p in prompts[:index])


def head_factory(kind: type[DeepseekV4MtpHead]) -> Callable[[Any], DeepseekV4MtpHead]:
    """A factory of heads of a class of one's own, for `LLM(proposer=...)`."""

    def make(context: Any) -> DeepseekV4MtpHead:
        return kind.new(
            context.built.mtp,
            context.built.embed_tokens,
            context.built.lm_head,
            context.config,
            0,
            context.max_seq_len,
            num_slots=context.max_num_seqs,
            max_width=MAX_NUM_DRAFTS + 1,
        )

    return make


def engine_with(work: Work, make: Callable[[Any], DeepseekV4MtpHead], *, lengths: Any) -> Engine:
    """An engine of the usual options whose draft lengths somebody else chooses."""
    made: list[Any] = []

    def note(context: Any) -> DeepseekV4MtpHead:
        made.append((context, make(context)))
        return made[0][1]

    with work.llm(proposer=note):
        context, head = made[0]
    return Engine(
        context.built.model,
        context.config,
        proposer=head,
        num_drafts="auto",
        lengths=lengths,
        max_seq_len=context.max_seq_len,
        max_num_seqs=context.max_num_seqs,
    )


# Prefixes


class Forgets(DeepseekV4MtpHead):
    """The head, were its rows not restored with a prefix: it lets them go and says it took them."""

    def install_drafter_kv(self, kv: DrafterKv, state: Any) -> bool:
        """Free the rows."""
        self.free_drafter_kv(kv)
        return True


def carry(work: Work, *, answer: int, opening: int = 24) -> dict[str, Any]:
    """Texts that go on behind a kept prefix, with the drafter's rows restored and without.

    A first request fills the cache; later ones repeat its text up to a block's end and a few tokens
    more, which are read anew and leave rows of their own.
    """
    first, then = SamplingParams(max_tokens=answer), SamplingParams(max_tokens=opening)
    options = {**work.options, "max_num_seqs": 1, "prefix_cache": True}
    kinds = {"restored": DeepseekV4MtpHead, "not restored": Forgets}
    stats: dict[tuple[str, int], list[SpeculationStats]] = {
        (name, new): [] for new in NEW_TOKENS for name in kinds
    }
    llms = {name: work.llm(**options, proposer=head_factory(kind)) for name, kind in kinds.items()}
    equal = True
    for prompt in work.prompts:
        before, _ = (finished(llm, [prompt.text], first)[0] for llm in llms.values())
        text = [*before.prompt_token_ids, *before.token_ids[:-1]]
        for new in NEW_TOKENS:
            length = (len(text) - new) // 128 * 128
            if not length:
                continue
            tokens = []
            for name, llm in llms.items():
                (result,) = finished(llm, [text[: length + new]], then)
                if result.usage.cached_tokens != length:
                    raise SystemExit(f"error: {result.usage.cached_tokens} of {length} were kept")
                stats[name, new].append(result.speculation)
                tokens.append(list(result.token_ids))
            equal = equal and tokens[0] == tokens[1]
    for llm in llms.values():
        llm.close()
    return {
        "opening_tokens": opening,
        "tokens_equal": equal,
        "runs": [
            {"name": name, "new_tokens": new, "texts": len(some), "all": tally(some)}
            for (name, new), some in stats.items()
        ],
    }


# What is drafted


def vocabulary(work: Work) -> dict[str, Any]:
    """Drafts from the first ids of the vocabulary."""
    with work.llm(num_drafts=0) as llm:
        assert llm.tokenizer is not None
        special, size = sorted(llm.tokenizer.added_ids), llm.config.vocab_size
    sizes = [n for n in VOCABULARIES if n < size]
    runs = [work.run(f"{n or 'all'} ids", mtp_vocab_size=n) for n in sizes]
    emitted = [token for ids in work.plain for token in ids]
    return {
        "sizes": sizes,
        "vocab_size": size,
        "largest_special_id": max(special, default=0),
        "emitted_special": sum(token in special for token in emitted) / max(1, len(emitted)),
        "emitted_below": [
            sum(token < (n or size) for token in emitted) / max(1, len(emitted)) for n in sizes
        ],
        "runs": runs,
    }


def thresholds(work: Work) -> dict[str, Any]:
    """Chains that end at a draft the head gives little, against chains that are just shorter."""
    runs = [work.run(f"K = {n}", num_drafts=n) for n in LENGTHS if n < work.num_drafts]
    runs += [
        work.run(f"ends below {least}" if least else "no threshold", min_draft_probability=least)
        for least in THRESHOLDS
    ]
    runs += [
        work.run(f"discarded below {least}", discard_drafts_below=least)
        for least in THRESHOLDS
        if least
    ]
    return {"runs": runs}


def pruning(work: Work) -> dict[str, Any]:
    """A share of a step's drafts verified, the least likely tails of the batch left out."""
    return {
        "batch": work.options["max_num_seqs"],
        "runs": [work.run(f"{share:.0%} kept", keep_drafts=share) for share in KEPT],
    }


def drafters(work: Work) -> dict[str, Any]:
    """The package's drafters by kind of text."""
    return {"runs": [work.run(name, drafter=name) for name in DRAFTERS]}


def counts(work: Work, *, pause_prompts: int, only: Sequence[str] | None) -> dict[str, Any]:
    """Every section, or those named."""
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "context": lambda: context(work),
        "pause": lambda: pause(work, per_class=pause_prompts),
        "carry": lambda: carry(work, answer=work.params.max_tokens),
        "vocabulary": lambda: vocabulary(work),
        "thresholds": lambda: thresholds(work),
        "pruning": lambda: pruning(work),
        "drafters": lambda: drafters(work),
    }
    out = {}
    for name, make in sections.items():
        if only is None or name in only:
            print(name, flush=True)
            out[name] = make()
    return out


def unequal(sections: dict[str, Any]) -> list[str]:
    """What gave other tokens than no drafts."""
    found = []
    for name, section in sections.items():
        if not section.get("tokens_equal", True):
            found.append(name)
        found += [
            f"{name}, {run['name']}" for run in section["runs"] if not run.get("tokens_equal", True)
        ]
    return found


# Time


class Settings(common.PacelineEngine):
    """Several ways to set up an `LLM`, to be timed in turn."""

    def __init__(self, llms: Sequence[LLM]) -> None:
        self._llms = dict(enumerate(llms))


class OneByOne(DeepseekV4MtpHead):
    """The head, were it asked for each sequence of a batch alone."""

    def propose_batch_max(self) -> int:
        """One."""
        return 1


def speed_settings(batch: int) -> dict[str, dict[str, Any]]:
    """Settings that may change the time of a token; the first is what the others are held to."""
    settings: dict[str, dict[str, Any]] = {"as it is": {}, "drafts off": {"num_drafts": 0}}
    settings |= {f"{n} ids": {"mtp_vocab_size": n} for n in VOCABULARIES if n}
    settings |= {
        f"ends below {least}": {"min_draft_probability": least} for least in THRESHOLDS if least
    }
    if batch > 1:
        settings |= {f"{share:.0%} kept": {"keep_drafts": share} for share in KEPT if share < 1}
        settings["asked one by one"] = {"proposer": head_factory(OneByOne)}
    settings |= {name: {"drafter": name} for name in DRAFTERS[1:]}
    return settings


def speed(work: Work, *, batch: int, repeats: int, seed: int = 0) -> dict[str, Any]:
    """Decode tokens per second of every setting, in turn, and ratios to the first."""
    options = {**work.options, "max_num_seqs": batch}
    settings = speed_settings(batch)
    llms = [
        LLM(work.model, **{"num_drafts": work.num_drafts, **options, **one})
        for one in settings.values()
    ]
    engine = Settings(llms)
    prompts = engine.encode([p.text for p in work.prompts])
    groups = [prompts[at : at + batch] for at in range(0, len(prompts), batch)]
    order, shuffled = list(range(len(llms))), random.Random(seed)
    rates: list[list[float]] = [[] for _ in llms]
    for repeat in range(repeats + 1):
        done = [[0.0, 0] for _ in llms]
        for group in groups if repeat else groups[:1]:
            shuffled.shuffle(order)
            for which in order:
                timing = engine.run(
                    prompts=group, max_tokens=work.params.max_tokens, num_drafts=which
                )
                done[which][0] += timing.decode_seconds
                done[which][1] += timing.timed_tokens
        if repeat:
            for which, (seconds, tokens) in enumerate(done):
                rates[which].append(tokens / seconds)
    for llm in llms:
        llm.close()
    return {
        "batch": batch,
        "runs": [
            {
                "name": name,
                "tokens_per_second": common.summary(rates[n]),
                "over_first": common.summary(
                    [mine / base for mine, base in zip(rates[n], rates[0], strict=True)]
                ),
            }
            for n, name in enumerate(settings)
        ],
    }


def scoring(work: Work, *, rounds: int) -> list[dict[str, Any]]:
    """Seconds to score drafts over parts of the vocabulary, in turn; the 5th of 100 is given."""
    import torch

    made: list[Any] = []

    def note(context: Any) -> DeepseekV4MtpHead:
        made.append(context)
        return head_factory(DeepseekV4MtpHead)(context)

    with work.llm(proposer=note):
        context = made[0]
    out = []
    for count in (1, 8):
        x = torch.randn(count, context.config.hidden_size)
        seconds: dict[int, list[float]] = {n: [] for n in VOCABULARIES}
        for _ in range(rounds):
            for n, some in seconds.items():
                began = time.perf_counter()
                context.built.lm_head.matmul(x, num_rows=n)
                some.append(time.perf_counter() - began)
        low = {str(n): sorted(some)[len(some) // 20] for n, some in seconds.items()}
        out.append({"rows": count, "seconds": low})
    return out


def main() -> None:
    args = parse()
    model = Path(args.model) if args.model else Path(bundled_model_path())
    about = common.provenance(model=model, prompts=args.prompts)
    options = {
        "max_num_seqs": args.batch,
        "max_seq_len": args.max_seq_len,
        "backend": args.backend,
        "num_threads": args.threads,
        "prefix_cache": False,
    }
    prompts = common.load_prompts(args.prompts, kinds=args.classes, per_class=args.per_class)
    params = SamplingParams(max_tokens=args.max_tokens)
    plain: list[list[int]] = []
    if not args.speed:
        with LLM(str(model), num_drafts=0, **options) as llm:
            plain = [list(r.token_ids) for r in finished(llm, [p.text for p in prompts], params)]
    if args.speed:
        # One of each class in a batch, as a server would have it.
        prompts.sort(key=lambda p: p.name.rpartition("-")[2])
    work = Work(
        model=str(model),
        prompts=prompts,
        params=params,
        options=options,
        plain=plain,
        num_drafts=args.num_drafts,
    )
    result: dict[str, Any] = {
        "benchmark": "mechanisms-speed" if args.speed else "mechanisms",
        "quick": args.quick or args.only is not None,
        **about,
        "model": "bundled" if args.model is None else model.name,
        "settings": {
            "num_drafts": args.num_drafts,
            "prompts": len(prompts),
            "max_tokens": args.max_tokens,
            "batch": args.batch,
            "backend": args.backend,
            "threads": args.threads,
            "repeats": args.repeats if args.speed else None,
            "temperature": 0,
        },
    }
    if args.speed:
        result["scoring"] = scoring(work, rounds=args.rounds)
        result["speed"] = []
        for batch in args.speed_batch:
            result["speed"].append(speed(work, batch=batch, repeats=args.repeats))
            print(show_speed(result["speed"][-1]), flush=True)
    else:
        result["sections"] = counts(work, pause_prompts=args.pause_prompts, only=args.only)
        result["tokens_equal"] = not unequal(result["sections"])
        print(show(result["sections"]))
    if args.json:
        common.write_json(args.json, result)
        print(f"wrote {args.json}")
    if not args.speed and (found := unequal(result["sections"])):
        raise SystemExit(f"error: tokens differ: {'; '.join(found)}")


def show(sections: dict[str, Any]) -> str:
    """Tables for people."""
    parts = []
    for name, section in sections.items():
        if name == "pause":
            cells = [
                (run["name"], *(f"{s['acceptance_rate']:.3f}" for s in run["spans"].values()))
                for run in section["runs"]
            ]
            header = (name, *(f"steps {label}" for label, _, _ in AFTER))
        else:
            cells = [
                (
                    run["name"],
                    str(run["all"]["num_drafted"]),
                    str(run["all"]["num_accepted"]),
                    f"{run['all']['tokens_per_step']:.3f}",
                    f"{run['all']['tokens_per_row']:.3f}",
                )
                for run in section["runs"]
            ]
            header = (name, "drafted", "accepted", "tokens a step", "tokens a row")
        parts.append(common.table(header, cells))
    return "\n\n".join(parts)


def show_speed(run: dict[str, Any]) -> str:
    """Table for people."""
    cells = [
        (
            one["name"],
            f"{one['tokens_per_second']['median']:.0f}",
            f"{one['over_first']['median']:.3f}",
            f"{one['over_first']['low']:.3f} to {one['over_first']['high']:.3f}",
        )
        for one in run["runs"]
    ]
    header = (f"batch {run['batch']}", "tok/s", "against the first", "low to high")
    return common.table(header, cells)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", help="checkpoint folder; default: the bundled model")
    add("--json", type=Path, help="write the result here")
    add("--speed", action="store_true", help="measure time instead of counting drafts")
    add("--only", nargs="+", help="sections to count; such a result is not shown in documents")
    add("--prompts", type=Path, default=common.PROMPTS)
    add("--classes", nargs="+", help="default: all")
    add("--per-class", type=int, help="prompts of each class; default: 6, with --speed 2")
    add("--pause-prompts", type=int, default=3, help="of them for the stretch without drafts")
    add("--num-drafts", type=int, default=3)
    add("--max-tokens", type=int, default=96)
    add("--max-seq-len", type=int, default=1024)
    add("--batch", type=int, default=8)
    add("--speed-batch", type=int, nargs="+", default=[1, 8])
    add("--repeats", type=int, default=5, help="timed rounds")
    add("--rounds", type=int, default=200, help="timed products of the head alone")
    add("--threads", type=int, help="CPU threads; default: the libraries' choice")
    add("--backend", default="auto", choices=["auto", "torch", "fused"])
    add("--quick", action="store_true", help="few prompts and tokens: shows that it runs")
    args = parser.parse_args()
    args.per_class = args.per_class or (2 if args.speed else 6)
    if args.quick:
        args.per_class, args.max_tokens, args.pause_prompts = 1, 8, 1
        args.repeats, args.rounds, args.speed_batch = 1, 5, [args.batch]
    return args


if __name__ == "__main__":
    main()
