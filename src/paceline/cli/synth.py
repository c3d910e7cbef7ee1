"""``paceline synth``: random checkpoints of real shapes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from paceline.models.deepseek_v4.tensors import DrafterKind

__all__ = ["synth"]


class PresetName(StrEnum):
    """Shapes on offer."""

    tiny = "tiny"
    small = "small"
    flash = "flash"
    pro = "pro"


class DtypeName(StrEnum):
    """Storage on offer."""

    bf16 = "bf16"
    fp32 = "fp32"
    fp4 = "fp4"
    release = "release"


class DrafterName(StrEnum):
    """Drafters on offer."""

    mtp = "mtp"
    dspark = "dspark"
    none = "none"


_DRAFTERS: dict[DrafterName, DrafterKind | None] = {
    DrafterName.mtp: "mtp",
    DrafterName.dspark: "dspark",
    DrafterName.none: None,
}


def synth(
    out: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    preset: Annotated[
        PresetName, typer.Option(help="Shapes: a test's, the bundled model's, or DeepSeek's.")
    ] = PresetName.tiny,
    layers: Annotated[
        int | None, typer.Option(help="Trunk layers to keep, from the first.", show_default="all")
    ] = None,
    dtype: Annotated[
        DtypeName,
        typer.Option(help="Storage: bf16, fp32, bf16 with fp4 experts, or the release's mix."),
    ] = DtypeName.bf16,
    seed: Annotated[int, typer.Option(min=0, help="Of every number.")] = 0,
    drafter: Annotated[DrafterName, typer.Option(help="Drafter to add.")] = DrafterName.mtp,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer.json to copy.", show_default="bytes for tiny and small, else none"
        ),
    ] = None,
) -> None:
    """Write a random checkpoint in the release's format, streamed to disk."""
    # Imported here, for torch's sake: the other verbs and --help need not wait for it.
    from paceline.models.deepseek_v4.synth import preset_config, write_synthetic

    config = preset_config(preset.value, layers=layers)
    small = preset in (PresetName.tiny, PresetName.small)
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("writing", total=None)
        folder = write_synthetic(
            out,
            config,
            dtype=dtype.value,
            seed=seed,
            drafter=_DRAFTERS[drafter],
            tokenizer=tokenizer if tokenizer is not None else ("bytes" if small else None),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    written = sum(file.stat().st_size for file in folder.iterdir())
    typer.echo(f"{folder}: {config.num_hidden_layers} layers, {written:,} bytes")
