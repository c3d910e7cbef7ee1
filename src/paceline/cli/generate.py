"""``paceline generate``: complete a text, and show which of it was drafted."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paceline.cli import options
from paceline.types import (
    FinishReason,
    GenerationError,
    GenerationResult,
    RequestError,
    SamplingParams,
    SpeculationStats,
    StreamChunk,
)

if TYPE_CHECKING:
    from paceline.llm import LLM

__all__ = ["generate"]

_CHAT = "<｜User｜>{}<｜Assistant｜></think>"


def generate(
    model: options.Model = None,
    source: Annotated[
        str | None, typer.Argument(metavar="[-]", help="- reads the prompt from standard input.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text to complete.", show_default=False)
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f", help="Read it from a file; - is standard input.", show_default=False
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The text is a question to the assistant.")
    ] = False,
    num_drafts: Annotated[
        str | None,
        typer.Option(
            "--num-drafts",
            "-k",
            help="Drafts per step, 0 to 8, or auto: as many as pay.",
            show_default="3, or 0 without head",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens.")] = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of text.")
    ] = False,
    drafter: options.Drafter = None,
    max_seq_len: options.MaxSeqLen = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    backend: options.Backend = "auto",
    num_threads: options.NumThreads = None,
) -> None:
    """Complete a text. Accepted drafts are tinted on a terminal."""
    if model == "-" and source is None:
        model, source = None, "-"
    text = _prompt(prompt, file, source)
    if not text:
        raise RequestError("the prompt is empty; at least one character is needed")
    if chat:
        text = _CHAT.format(text)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    llm = options.load(
        model,
        num_drafts=options.drafts(num_drafts),
        drafter=drafter,
        max_seq_len=max_seq_len,
        device=device,
        dtype=dtype,
        backend=backend,
        num_threads=num_threads,
    )
    with llm:
        result = _run(llm, text, params, show=not as_json)
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2, ensure_ascii=False))
    if result.finish_reason is FinishReason.ERROR:
        raise GenerationError(result.error)


def _prompt(prompt: str | None, file: str | None, source: str | None) -> str:
    given = [value for value in (prompt, file, source) if value is not None]
    if len(given) != 1:
        raise RequestError(
            f"{len(given)} prompts are given; give one: -p TEXT, -f FILE, or - for standard input"
        )
    if prompt is not None:
        return prompt
    if source is not None and source != "-":
        raise RequestError(
            f"the argument {source!r} is not understood; only - may follow the model"
        )
    name = file if file is not None else "-"
    return options.read_text("-" if name == "-" else Path(name))


def _run(llm: LLM, text: str, params: SamplingParams, *, show: bool) -> GenerationResult:
    """Generate; text goes to standard output as it comes, the summary to standard error."""
    screen = _Screen()
    started = first = time.perf_counter()
    num_tokens = 0
    result: GenerationResult | None = None
    try:
        for chunk in llm.stream(text, params):
            if not num_tokens:
                first = time.perf_counter()
            num_tokens += len(chunk.token_ids)
            if show:
                screen.write(chunk)
            result = chunk.result or result
    finally:
        # Also where Ctrl-C ends it: what was written stays, and the shell's prompt starts a line.
        if show:
            screen.end()
    assert result is not None
    if show:
        seconds = time.perf_counter() - started
        print(summary(num_tokens, seconds, first - started, result.speculation), file=sys.stderr)
    return result


def summary(tokens: int, seconds: float, first: float, stats: SpeculationStats) -> str:
    """One line on a run: tokens, rate, and what drafting did."""
    line = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tok/s"
    line += f" (first after {first:.2f} s)"
    if not stats.num_drafted:
        return f"{line}; no drafts"
    return (
        f"{line}; {stats.mean_acceptance_length:.2f} tokens per step, "
        f"{stats.num_accepted} of {stats.num_drafted} drafts accepted"
    )


# A model may emit any byte, and a terminal obeys some of them.
_CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(0x20), 0x7F, *range(0x80, 0xA0))
    if chr(code) not in "\n\t"
}


class _Screen:
    """Standard output; on a terminal drafts are tinted and stray control characters shown."""

    def __init__(self) -> None:
        console = Console()
        self._terminal = console.is_terminal
        self._tint = console.is_terminal and not console.no_color
        self._at_line_start = True

    def write(self, chunk: StreamChunk) -> None:
        for text, drafted in chunk.pieces:
            shown = text.translate(_CONTROLS) if self._terminal else text
            if drafted and self._tint:
                shown = typer.style(shown, fg=typer.colors.GREEN)
            # Before the write: Ctrl-C may come out of it, and end() must know what was shown.
            self._at_line_start = text.endswith("\n")
            sys.stdout.write(shown)
        sys.stdout.flush()

    def end(self) -> None:
        if not self._at_line_start:
            sys.stdout.write("\n")
        sys.stdout.flush()
