"""The options of `paceline generate` that are sampling parameters, and what is made of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options
from paceline.types import RequestError

__all__ = [
    "AllowedIds",
    "BadWords",
    "Choices",
    "FrequencyPenalty",
    "Grammar",
    "IncludeStop",
    "JsonObject",
    "JsonSchema",
    "LogitBias",
    "Logprobs",
    "MaxReasoning",
    "MinP",
    "MinTokens",
    "NumAnswers",
    "PresencePenalty",
    "PromptLogprobs",
    "Regex",
    "RepetitionPenalty",
    "Seed",
    "StopIds",
    "Stops",
    "Temperature",
    "TopK",
    "TopP",
    "biases",
    "ids",
    "text_or_file",
]

_PANEL = "Sampling"

Temperature = Annotated[
    float, typer.Option(help="0 is greedy; higher is more varied.", rich_help_panel=_PANEL)
]
TopP = Annotated[
    float, typer.Option(help="Mass of the most probable ids drawn from.", rich_help_panel=_PANEL)
]
TopK = Annotated[
    int, typer.Option(help="Most probable ids drawn from; 0: all.", rich_help_panel=_PANEL)
]
MinP = Annotated[
    float,
    typer.Option(help="Least share of the largest probability drawn.", rich_help_panel=_PANEL),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Over 1: against ids of prompt and answer.", rich_help_panel=_PANEL)
]
PresencePenalty = Annotated[
    float, typer.Option(help="-2 to 2: against ids of the answer.", rich_help_panel=_PANEL)
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="-2 to 2: the same, by how often they came.", rich_help_panel=_PANEL)
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=BIAS",
        help="Added to an id's logit; may be repeated.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
AllowedIds = Annotated[
    str | None,
    typer.Option(
        metavar="ID,ID..",
        help="The only ids that may come.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
BadWords = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="A text that may not come; may be repeated.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="The same seed gives the same text.", show_default=False, rich_help_panel=_PANEL
    ),
]
NumAnswers = Annotated[int, typer.Option("--n", help="Answers to give.", rich_help_panel=_PANEL)]
MinTokens = Annotated[
    int, typer.Option(help="Tokens before an end may come.", rich_help_panel=_PANEL)
]
Stops = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="A text that ends the answer; may be repeated.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
StopIds = Annotated[
    str | None,
    typer.Option(
        metavar="ID,ID..",
        help="Further ids that end the answer.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
IncludeStop = Annotated[
    bool,
    typer.Option(
        "--include-stop-str-in-output",
        help="Keep the stop text in the answer.",
        rich_help_panel=_PANEL,
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        help="Log-probabilities in --json, of so many most probable ids too.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
PromptLogprobs = Annotated[
    int | None,
    typer.Option(help="The same for the prompt.", show_default=False, rich_help_panel=_PANEL),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        metavar="SCHEMA",
        help="JSON schema of the answer, or @FILE.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
JsonObject = Annotated[
    bool,
    typer.Option("--json-object", help="The answer is a JSON object.", rich_help_panel=_PANEL),
]
Regex = Annotated[
    str | None,
    typer.Option(
        help="Regular expression of the answer.", show_default=False, rich_help_panel=_PANEL
    ),
]
Grammar = Annotated[
    str | None,
    typer.Option(
        metavar="EBNF",
        help="Grammar of the answer, or @FILE.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
Choices = Annotated[
    list[str] | None,
    typer.Option(
        "--choice",
        metavar="TEXT",
        help="A text the answer may be; may be repeated.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]


MaxReasoning = Annotated[
    int | None,
    typer.Option(
        "--max-reasoning-tokens",
        help="Most tokens of reasoning.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]


def ids(name: str, text: str | None) -> list[int] | None:
    """Read ids that stand between commas.

    Raises:
        RequestError: one is no whole number (names the option).
    """
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--{name} is {text!r}; allowed are ids with commas between") from None


def biases(given: Iterable[str] | None) -> dict[int, float] | None:
    """Read ID=BIAS pairs.

    Raises:
        RequestError: one is no such pair.
    """
    if not given:
        return None
    found: dict[int, float] = {}
    for pair in given:
        token, _, bias = pair.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            raise RequestError(f"--logit-bias is {pair!r}; allowed is ID=BIAS") from None
    return found


def text_or_file(given: str | None) -> Any:
    """A text as it is given, or what the file behind an @ holds.

    Raises:
        RequestError: the file cannot be read.
    """
    if given is not None and given.startswith("@"):
        return options.read_text(Path(given[1:]))
    return given
