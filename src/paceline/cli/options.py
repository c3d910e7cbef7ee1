"""What several verbs share: the options of a model, and loading it in view of the user."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from paceline.types import ConfigError

if TYPE_CHECKING:
    from paceline.llm import LLM

__all__ = [
    "LOADING",
    "Acceptance",
    "Backend",
    "Device",
    "Drafter",
    "Dtype",
    "LogprobsMode",
    "MaxSeqLen",
    "Model",
    "NumThreads",
    "Output",
    "load",
    "load_asked",
    "read_text",
]

Model = Annotated[
    str | None,
    typer.Argument(help="Checkpoint folder; without, the bundled model.", show_default=False),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16, or auto: float32 on a CPU, bfloat16 elsewhere.")
]
Backend = Annotated[
    str, typer.Option(help="torch, fused (compiled CPU kernels), or auto: fused where possible.")
]
MaxSeqLen = Annotated[
    int | None,
    typer.Option(help="Context limit, prompt included.", show_default="the model's, at most 4096"),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="mtp: the model's head; ngram: lookup in the text; mtp+ngram: both; module:name: a "
        "proposer of your own, as LLM(proposer=..) takes it.",
        show_default="mtp where there is a head",
    ),
]
Acceptance = Annotated[
    str,
    typer.Option(
        help="At a temperature: invariant (drafts change no token), rejection or block (they do, "
        "and more are accepted)."
    ),
]
LogprobsMode = Annotated[
    str,
    typer.Option(
        help="Log-probabilities of the model's own logits (raw), or of the law a token was drawn "
        "from (processed)."
    ),
]
NumThreads = Annotated[
    int | None, typer.Option(help="CPU threads.", show_default="the libraries' choice")
]


LOADING = (
    "acceptance",
    "logprobs_mode",
    "drafter",
    "max_seq_len",
    "device",
    "dtype",
    "backend",
    "num_threads",
)
"""Parameters of verbs, and of `load`, that say how a model is loaded."""


def load_asked(context: typer.Context, model: str | None) -> LLM:
    """Load a model as the options say that a verb has: those of `LOADING`, and --num-drafts."""
    given: dict[str, Any] = {
        name: context.params[name] for name in LOADING if name in context.params
    }
    return load(model, num_drafts=drafts(context.params["num_drafts"]), **given)


def load(
    model: str | None,
    *,
    backend: str,
    num_drafts: int | Literal["auto"] | None,
    max_seq_len: int | None,
    device: str,
    dtype: str,
    num_threads: int | None,
    max_num_seqs: int = 1,
    drafter: str | None = None,
    acceptance: str = "invariant",
    logprobs_mode: str = "raw",
    prefix_cache: bool = True,
) -> LLM:
    """Load a model, with a progress bar on standard error where that is a terminal.

    Raises:
        ConfigError: an option is not allowed, or there is no such drafter.
    """
    named, proposer = _drafter(drafter)
    with _loading() as progress:
        from paceline.llm import LLM

        chosen: Any = backend
        rule: Any = acceptance
        mode: Any = logprobs_mode
        return LLM(
            model,
            num_drafts=num_drafts,
            max_seq_len=max_seq_len,
            max_num_seqs=max_num_seqs,
            device=device,
            dtype=dtype,
            backend=chosen,
            drafter=named,
            proposer=proposer,
            acceptance=rule,
            logprobs_mode=mode,
            prefix_cache=prefix_cache,
            num_threads=num_threads,
            progress=progress,
        )


def _drafter(given: str | None) -> tuple[Any, Any]:
    """What --drafter says: a name of the package's own, or a proposer of the user's.

    Raises:
        ConfigError: it is neither.
    """
    if given is None:
        return None, None
    from paceline.draft import DraftProposer
    from paceline.llm import Drafter as Names

    names = get_args(Names)
    allowed = f"allowed are {', '.join(names)}, and module:name of a proposer of your own"
    if given in names:
        return given, None
    module, _, name = given.partition(":")
    if not module or not name:
        raise ConfigError(f"--drafter is {given!r}; {allowed}")
    value = _imported(given, module, name, allowed)
    if not isinstance(value, DraftProposer) and not callable(value):
        raise ConfigError(
            f"--drafter {given} is {value!r:.80}; allowed are an instance of a DraftProposer, and "
            "a callable that makes one from a ProposerContext"
        )
    return None, value


def _imported(given: str, module: str, name: str, allowed: str) -> Any:
    """The named object; modules are found as by `python -m`, in the current folder first."""
    if not sys.flags.safe_path and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        value = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"--drafter {given}: {module} needs {error.name}: {error}") from error
        raise ConfigError(
            f"--drafter is {given!r}, but there is no module {error.name!r} in {os.getcwd()} or "
            f"where Python looks for modules; {allowed}"
        ) from None
    except Exception as error:
        raise ConfigError(
            f"--drafter {given}: importing {module} raised {type(error).__name__}: {error}"
        ) from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"--drafter is {given!r}, but {module} has no {name}; {allowed}")
        value = getattr(value, part)
    return value


class Output(Console):
    """Standard output for tables; a reader that left is told of like one that other prints miss."""

    def on_broken_pipe(self) -> None:
        """Leave it to the caller, instead of ending with code 1.

        Raises:
            BrokenPipeError: always.
        """
        raise BrokenPipeError


@contextmanager
def _loading() -> Iterator[Callable[[int, int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def drafts(text: str | None) -> int | Literal["auto"] | None:
    """What --num-drafts says.

    Raises:
        ConfigError: it is neither a whole number nor auto.
    """
    from paceline.types import MAX_NUM_DRAFTS

    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"--num-drafts is {text!r}; allowed are 0 to {MAX_NUM_DRAFTS} and auto"
        ) from None


def read_text(file: Path | Literal["-"]) -> str:
    """Text of a UTF-8 file, or of standard input.

    Raises:
        RequestError: it cannot be read, or is not UTF-8; names it.
    """
    from paceline.types import RequestError

    name = "standard input" if file == "-" else str(file)
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 text: {error}") from None
