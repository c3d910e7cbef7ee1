"""The command ``paceline``; one module per verb."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.cli.bench import bench
from paceline.cli.chat import chat
from paceline.cli.generate import generate
from paceline.cli.inspect import inspect
from paceline.cli.serve import serve
from paceline.cli.synth import synth
from paceline.types import GenerationError, PacelineError

__all__ = ["app", "main"]

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141


class _Verbs(TyperGroup):
    """Says what went wrong in a line, and in the exit code whose doing it was."""

    def invoke(self, ctx: Any) -> Any:
        try:
            done = super().invoke(ctx)
            sys.stdout.flush()
            return done
        except PacelineError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = isinstance(error, GenerationError)
            raise typer.Exit(EXIT_FAILED if failed else EXIT_BAD_INPUT) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            # As of `head`, which has all it wants. What is still buffered must go somewhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_NO_READER) from None


app = typer.Typer(
    cls=_Verbs,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Its tables cut the names of options on narrow terminals.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from paceline import __version__

        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _paceline(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Complete text with DeepSeek-V4 models, drafting with their own MTP head."""


for verb in (generate, chat, serve, bench, inspect, synth):
    app.command()(verb)


def main() -> None:
    """Run the command line and exit.

    Codes: 0 done, 1 a run failed, 2 bad input, 130 Ctrl-C, 141 nobody reads the output.
    """
    app(prog_name="paceline")
