"""``paceline bench``: the same prompts, drafts off and on, through the same path in one run."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli import options
from paceline.types import (
    MAX_NUM_DRAFTS,
    ConfigError,
    FinishReason,
    GenerationError,
    RequestError,
    SamplingParams,
    SpeculationStats,
)

if TYPE_CHECKING:
    from paceline.llm import LLM

__all__ = ["bench"]

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\ndef main():\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(",
    "for line in open(path):\n    line = line.strip()\n    if not line:\n",
    "The module provides a function that",
    'def read_config(path):\n    """Read a configuration file.\n',
    "try:\n    value = int(text)\nexcept ValueError:\n",
    '{"name": "example", "version": "1.0", "files": [',
)


@dataclass(kw_only=True)
class Rung:
    """One number of drafts.

    Attributes:
        num_drafts: drafts per step; 0 is off, "auto" as many as pay.
        rates: tokens per second of each repeat.
        stats: counts over the first round; all are alike where the number is fixed.
        tokens_equal: whether every token was that of drafts off.
    """

    num_drafts: int | Literal["auto"]
    rates: list[float] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    tokens_equal: bool = True

    @property
    def label(self) -> str:
        """What tables and plots call it."""
        return str(self.num_drafts) if self.num_drafts else "off"

    @property
    def rate(self) -> float:
        """Median tokens per second."""
        return statistics.median(self.rates)


_PLOT_FORMATS = (".png", ".svg", ".pdf", ".jpg", ".jpeg")


def bench(
    model: options.Model = None,
    num_drafts: Annotated[
        str,
        typer.Option(
            "--num-drafts", "-k", help="Numbers of drafts, 0 to 8, and auto; 0 is always run."
        ),
    ] = "0,1,2,3,auto",
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", help="Prompts at once.")] = 1,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens a prompt.")] = 128,
    repeats: Annotated[int, typer.Option(help="Rounds; the median counts.")] = 3,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON list of prompts, texts or id lists.", show_default="eight of ours"),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw speed and acceptance into this file.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers here.")
    ] = None,
    drafter: options.Drafter = None,
    max_seq_len: options.MaxSeqLen = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    backend: options.Backend = "auto",
    num_threads: options.NumThreads = None,
) -> None:
    """Measure tokens per second with drafts off and on, and check that no token differs."""
    ladder = _ladder(num_drafts)
    for name, value in (
        ("--batch-size", batch_size),
        ("--max-tokens", max_tokens),
        ("--repeats", repeats),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}; allowed is at least 1")
    if plot is not None and find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'paceline[plot]'")
    if plot is not None and plot.suffix.lower() not in _PLOT_FORMATS:
        raise ConfigError(
            f"--plot is {plot.name}; allowed are names that end in {', '.join(_PLOT_FORMATS)}"
        )
    for target in (plot, json_file):
        if target is not None and not target.absolute().parent.is_dir():
            raise ConfigError(f"{target} cannot be written: its folder does not exist")
    given = list(PROMPTS) if prompts is None else _read_prompts(prompts)

    llm = options.load(
        model,
        num_drafts=ladder[-1],
        drafter=drafter,
        max_seq_len=max_seq_len,
        device=device,
        dtype=dtype,
        backend=backend,
        num_threads=num_threads,
        max_num_seqs=batch_size,
        # Every round runs the same prompts, which must be read each time.
        prefix_cache=False,
    )
    with llm:
        if prompts is None and llm.tokenizer is None:
            given = [[1 + n % (llm.config.vocab_size - 1)] * 8 for n in range(len(PROMPTS))]
        rungs = measure(
            llm,
            given,
            ladder,
            batch_size=batch_size,
            max_tokens=max_tokens,
            repeats=repeats,
        )
        about = repr(llm)
    document = to_document(rungs, about, batch_size=batch_size, max_tokens=max_tokens)
    Console().print(render(rungs, about, batch_size))
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        draw(rungs, plot, about, batch_size)
        Console(stderr=True).print(f"wrote {plot}")
    wrong = [rung.num_drafts for rung in rungs if not rung.tokens_equal]
    if wrong:
        raise GenerationError(
            f"tokens differ from drafts off at {', '.join(map(str, wrong))} drafts"
        )


def measure(
    llm: LLM,
    prompts: list[Any],
    ladder: list[int | Literal["auto"]],
    *,
    batch_size: int,
    max_tokens: int,
    repeats: int,
) -> list[Rung]:
    """Run every rung once to warm up and compare tokens, then `repeats` rounds of all of them.

    Rounds go through all rungs, so that a machine that grows slower slows all alike.
    """
    rungs = [Rung(num_drafts=k) for k in ladder]
    reference: list[list[int]] = []
    for turn in range(1 + repeats):
        for rung in rungs:
            params = SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, num_drafts=rung.num_drafts
            )
            results = []
            started = time.perf_counter()
            for start in range(0, len(prompts), batch_size):
                results += llm.generate(prompts[start : start + batch_size], params)
            seconds = time.perf_counter() - started
            for result in results:
                if result.finish_reason is FinishReason.ERROR:
                    raise GenerationError(result.error)
            tokens = [result.token_ids for result in results]
            if turn:
                rung.rates.append(sum(map(len, tokens)) / seconds)
            else:
                reference = reference or tokens
                rung.tokens_equal = tokens == reference
                for result in results:
                    rung.stats.add(result.speculation)
    return rungs


def render(rungs: list[Rung], about: str, batch_size: int) -> Table:
    """Draw up the table for people."""
    table = Table(title=f"{about}, batch {batch_size}", title_justify="left", header_style="")
    for column in ("drafts", "tok/s", "vs off", "tokens per step", "accepted", "by position"):
        table.add_column(column, justify="left" if column == "by position" else "right")
    table.add_column("tokens equal")
    off = rungs[0].rate
    for rung in rungs:
        stats = rung.stats
        table.add_row(
            rung.label,
            f"{rung.rate:.1f}",
            f"{rung.rate / off:.2f}x",
            f"{stats.mean_acceptance_length:.2f}",
            f"{stats.acceptance_rate:.0%}" if stats.num_drafted else "-",
            " ".join(f"{share:.0%}" for share in stats.acceptance_by_position) or "-",
            "yes" if rung.tokens_equal else "NO",
        )
    return table


def to_document(
    rungs: list[Rung], about: str, *, batch_size: int, max_tokens: int
) -> dict[str, Any]:
    """Gather the numbers for machines."""
    from paceline import __version__

    return {
        "paceline": __version__,
        "model": about,
        "batch_size": batch_size,
        "max_tokens": max_tokens,
        "tokens_equal": all(rung.tokens_equal for rung in rungs),
        "runs": [
            {
                "num_drafts": rung.num_drafts,
                "tokens_per_second": rung.rate,
                "tokens_per_second_each": rung.rates,
                "over_off": rung.rate / rungs[0].rate,
                "tokens_equal": rung.tokens_equal,
                "speculation": rung.stats.to_dict(),
            }
            for rung in rungs
        ],
    }


def draw(rungs: list[Rung], file: Path, about: str, batch_size: int) -> None:
    """Draw speed and acceptance over the number of drafts.

    Raises:
        ConfigError: the file's ending is no picture format, or it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    speed, share = figure.subplots(1, 2)
    labels = [rung.label for rung in rungs]
    bars = speed.bar(labels, [rung.rate for rung in rungs], color="#4c78a8")
    speed.bar_label(bars, [f"{rung.rate / rungs[0].rate:.2f}x" for rung in rungs])
    speed.margins(y=0.12)
    speed.set(xlabel="drafts per step", ylabel="tokens per second", title=f"batch {batch_size}")
    for rung in rungs:
        accepted = rung.stats.acceptance_by_position
        if accepted:
            places = list(range(1, 1 + len(accepted)))
            share.plot(places, accepted, marker="o", label=f"{rung.label} drafts")
            share.set_xticks(places)
    share.set(xlabel="position of the draft", ylabel="accepted", ylim=(0, 1), title="acceptance")
    if share.lines:
        share.legend()
    figure.suptitle(about, fontsize="small")
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be written: {error}") from None


def _ladder(text: str) -> list[int | Literal["auto"]]:
    parts = [part.strip() for part in text.split(",")]
    try:
        asked = {int(part) for part in parts if part != "auto"}
    except ValueError:
        asked = {-1}
    if not all(0 <= k <= MAX_NUM_DRAFTS for k in asked):
        raise ConfigError(
            f"--num-drafts is {text!r}; allowed are numbers 0 to {MAX_NUM_DRAFTS} and auto, with "
            "commas"
        )
    ladder: list[int | Literal["auto"]] = [*sorted(asked | {0})]
    if "auto" in parts:
        ladder.append("auto")
    return ladder


def _read_prompts(file: Path) -> list[Any]:
    try:
        prompts = json.loads(options.read_text(file))
    except json.JSONDecodeError as error:
        raise RequestError(f"{file} is not JSON: {error}") from None
    if not isinstance(prompts, list) or not prompts:
        raise RequestError(f"{file} must hold a JSON list of at least one prompt")
    return prompts
