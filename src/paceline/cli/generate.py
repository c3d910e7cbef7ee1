"""``paceline generate``: complete a text, and show which of it was drafted."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paceline.cli import options, sampling
from paceline.types import (
    CheckpointError,
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

__all__ = ["Screen", "generate", "summary"]


def generate(
    context: typer.Context,
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
    special: Annotated[
        bool,
        typer.Option("--special", help="Special tokens spelled in the text count as themselves."),
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
    temperature: sampling.Temperature = 0.0,
    top_p: sampling.TopP = 1.0,
    top_k: sampling.TopK = 0,
    min_p: sampling.MinP = 0.0,
    repetition_penalty: sampling.RepetitionPenalty = 1.0,
    presence_penalty: sampling.PresencePenalty = 0.0,
    frequency_penalty: sampling.FrequencyPenalty = 0.0,
    logit_bias: sampling.LogitBias = None,
    allowed_token_ids: sampling.AllowedIds = None,
    bad_words: sampling.BadWords = None,
    seed: sampling.Seed = None,
    num_answers: sampling.NumAnswers = 1,
    min_tokens: sampling.MinTokens = 0,
    stop: sampling.Stops = None,
    stop_token_ids: sampling.StopIds = None,
    include_stop: sampling.IncludeStop = False,
    logprobs: sampling.Logprobs = None,
    prompt_logprobs: sampling.PromptLogprobs = None,
    json_schema: sampling.JsonSchema = None,
    json_object: sampling.JsonObject = False,
    regex: sampling.Regex = None,
    grammar: sampling.Grammar = None,
    choice: sampling.Choices = None,
    max_reasoning_tokens: sampling.MaxReasoning = None,
    acceptance: options.Acceptance = "invariant",
    logprobs_mode: options.LogprobsMode = "raw",
    drafter: options.Drafter = None,
    max_seq_len: options.MaxSeqLen = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    backend: options.Backend = "auto",
    num_threads: options.NumThreads = None,
) -> None:
    """Complete a text. On a terminal, accepted drafts are green and what a grammar forced is cyan.

    Several answers (--n) are shown one after another, and --json prints a list of them.
    """
    if model == "-" and source is None:
        model, source = None, "-"
    text = _prompt(prompt, file, source)
    if not text:
        raise RequestError("the prompt is empty; at least one character is needed")
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=sampling.biases(logit_bias),
        allowed_token_ids=sampling.ids("allowed-token-ids", allowed_token_ids),
        bad_words=bad_words or None,
        seed=seed,
        n=num_answers,
        min_tokens=min_tokens,
        stop=stop or None,
        stop_token_ids=sampling.ids("stop-token-ids", stop_token_ids) or (),
        include_stop_str_in_output=include_stop,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        json_schema=sampling.text_or_file(json_schema),
        json_object=json_object,
        regex=regex,
        grammar=sampling.text_or_file(grammar),
        choice=choice or None,
        max_reasoning_tokens=max_reasoning_tokens,
    )
    with options.load_asked(context, model) as llm:
        given: str | list[int] = text
        if chat:
            given, ends = _asked(llm, text, allow_special=special)
            params = replace(params, stop=(*(params.stop or ()), *ends) or None)
        results = _run(llm, given, params, show=not as_json, allow_special=special)
    if as_json:
        documents = [result.to_dict() for result in results]
        shown = documents if num_answers > 1 else documents[0]
        typer.echo(json.dumps(shown, indent=2, ensure_ascii=False))
    for result in results:
        if result.finish_reason is FinishReason.ERROR:
            raise GenerationError(result.error)


def _asked(llm: LLM, text: str, *, allow_special: bool) -> tuple[list[int], tuple[str, ...]]:
    """A question to the assistant, in the checkpoint's own layout, and texts that end an answer."""
    from paceline.text import ChatTemplate

    if llm.tokenizer is None:
        raise CheckpointError(f"{llm.path} has no tokenizer.json; a chat needs one")
    template = ChatTemplate.for_tokenizer(llm.tokenizer)
    prompt = template.render([{"role": "user", "content": text}])
    return prompt.ids(llm.tokenizer, allow_special=allow_special), prompt.stop


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


def _run(
    llm: LLM, prompt: str | list[int], params: SamplingParams, *, show: bool, allow_special: bool
) -> list[GenerationResult]:
    """Generate; text goes to standard output as it comes, the summary to standard error.

    The first of several answers is shown as it comes, the others when those before are done.
    """
    screen = Screen()
    started = first = time.perf_counter()
    num_tokens = 0
    waiting: list[list[StreamChunk]] = [[] for _ in range(params.n)]
    results: dict[int, GenerationResult] = {}
    turn = 0
    try:
        for chunk in llm.stream(prompt, params, allow_special=allow_special):
            if not num_tokens:
                first = time.perf_counter()
            num_tokens += len(chunk.token_ids)
            if chunk.result is not None:
                results[chunk.sample_index] = chunk.result
            if not show:
                continue
            waiting[chunk.sample_index].append(chunk)
            while turn < params.n:
                for one in waiting[turn]:
                    screen.write(one)
                waiting[turn].clear()
                if turn not in results:
                    break
                turn += 1
                if turn < params.n:
                    screen.part()
    finally:
        # Also where Ctrl-C ends it: what was written stays, and the shell's prompt starts a line.
        if show:
            screen.end()
    if show:
        seconds = time.perf_counter() - started
        stats = SpeculationStats()
        for result in results.values():
            stats.add(result.speculation)
        print(summary(num_tokens, seconds, first - started, stats), file=sys.stderr)
    return [results[sample] for sample in sorted(results)]


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


_TINTS = {"accepted": typer.colors.GREEN, "forced": typer.colors.CYAN}
_MEANINGS = {"accepted": "an accepted draft", "forced": "all that the grammar allowed"}


class Screen:
    """Standard output; on a terminal origins are tinted and stray control characters shown."""

    def __init__(self) -> None:
        console = Console()
        self._terminal = console.is_terminal
        self._tint = console.is_terminal and not console.no_color
        self._at_line_start = True

    def write(self, chunk: StreamChunk) -> None:
        """Show what a step added."""
        for text, origin in chunk.pieces:
            self.show(text, origin.kind)
        sys.stdout.flush()

    def show(self, text: str, origin: str | None = None, *, dim: bool = False) -> None:
        """Add a piece of text, which may still have to be flushed.

        Args:
            text: the piece.
            origin: the kind of an `Origin`, or None where it is not known.
            dim: show it as something aside.
        """
        shown = text.translate(_CONTROLS) if self._terminal else text
        color = _TINTS.get(origin or "")
        if self._tint and (color or dim):
            shown = typer.style(shown, fg=color, dim=dim or None)
        # Before the write: Ctrl-C may come out of it, and end() must know what was shown.
        self._at_line_start = text.endswith("\n")
        sys.stdout.write(shown)

    def part(self) -> None:
        """End one answer; another follows."""
        self.end()
        sys.stdout.write("---\n")

    def end(self) -> None:
        """Begin a line where none begins, and flush."""
        if not self._at_line_start:
            self._at_line_start = True
            sys.stdout.write("\n")
        sys.stdout.flush()

    def legend(self) -> str:
        """One line for standard error on what the tints of standard output mean."""
        if not self._tint:
            return "no tints, since the output is no terminal or colours are off"
        if Console(stderr=True).is_terminal:
            parts = [typer.style(_MEANINGS[kind], fg=color) for kind, color in _TINTS.items()]
            parts.append(typer.style("reasoning", dim=True))
        else:
            parts = [f"{color}: {_MEANINGS[kind]}" for kind, color in _TINTS.items()]
            parts.append("dim: reasoning")
        return f"{', '.join(parts)}; all else is the model's own token"
