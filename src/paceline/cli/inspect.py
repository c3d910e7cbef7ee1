"""``paceline inspect``: what a checkpoint holds, takes and would be refused for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, JustifyMethod
from rich.table import Table

from paceline.cli import options
from paceline.config import ModelConfig
from paceline.types import CheckpointError

if TYPE_CHECKING:
    from paceline.models.deepseek_v4.census import Census

__all__ = ["inspect"]

_CONFIG_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "hc_mult",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "num_hash_layers",
    "routed_scaling_factor",
    "swiglu_limit",
    "rope_theta",
    "compress_rope_theta",
    "max_position_embeddings",
)
_KIND_WORDS = {"swa": "sliding window", "csa": "compressed sparse", "hca": "heavily compressed"}
_DRAFTER_WORDS = {
    "mtp": "MTP head",
    "dspark": "DSpark (not run by this version)",
    None: "none",
}


def inspect(
    path: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    max_width: Annotated[
        int, typer.Option(min=1, help="Rows of one sequence in one step, which size its rings.")
    ] = 256,
) -> None:
    """Describe a checkpoint from its headers, without loading it.

    Exits with 2 where the other verbs would refuse to load it; what is wrong is told all the same.
    """
    # Imported here, for torch's sake: the other verbs and --help need not wait for it.
    from paceline.models.deepseek_v4.census import take_census

    census = take_census(path, max_width=max_width)
    if as_json:
        typer.echo(json.dumps(census.to_dict(), indent=2, ensure_ascii=False))
    else:
        render(census, options.Output())
    if not _loads(census):
        raise CheckpointError(f"{census.path} would be refused")


def _loads(census: Census) -> bool:
    """Whether it is loaded, with the drafter that it brings and the tokenizer that it has."""
    refused = {refusal.what for refusal in census.refusals}
    drafts = census.drafter == "mtp" and "drafts" in refused
    text = (census.path / "tokenizer.json").is_file() and "text" in refused
    return not (drafts or text or "the checkpoint" in refused)


def render(census: Census, console: Console) -> None:
    """Print a census as tables."""
    console.print(
        f"[bold]{census.path}[/bold]  {census.tensors:,} tensors, {census.parameters:,} "
        f"parameters, {_size(census.num_bytes)} in {len(census.files)} file"
        f"{'s' if len(census.files) != 1 else ''}; drafter: {_DRAFTER_WORDS[census.drafter]}",
        highlight=False,
    )
    if census.config is not None:
        console.print(_config_table(census.config))
        console.print(_layer_table(census))
    console.print(_part_table(census))
    if census.cache:
        console.print(_cache_table(census))
    for note in census.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    if not census.refusals:
        console.print(
            "By names, shapes and configuration nothing would be refused; values are not read."
        )
    for refusal in census.refusals:
        text = f"{refusal.what} would be refused: {refusal.why}"
        console.print(text, style="red", highlight=False, markup=False)


def _table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="")
    for column in columns:
        justify: JustifyMethod = "right" if column in numbers else "left"
        table.add_column(column, justify=justify, overflow="fold")
    return table


def _config_table(config: ModelConfig) -> Table:
    table = _table("configuration", "field", "value", " ", "value ", numbers=("value", "value "))
    half = -(-len(_CONFIG_FIELDS) // 2)
    for left, right in zip(
        _CONFIG_FIELDS[:half], [*_CONFIG_FIELDS[half:], *[""] * half], strict=False
    ):
        other = _number(getattr(config, right)) if right else ""
        table.add_row(left, _number(getattr(config, left)), right, other)
    return table


def _layer_table(census: Census) -> Table:
    table = _table(
        "layers", "layer", "attention", "ratio", "routing", "tensors", "size",
        numbers=("ratio", "tensors", "size"),
    )  # fmt: skip
    for row in census.layers:
        table.add_row(
            row.name,
            _KIND_WORDS[row.attention],
            str(row.ratio or "-"),
            row.routing,
            f"{row.tensors:,}",
            _size(row.num_bytes),
        )
    return table


def _part_table(census: Census) -> Table:
    table = _table(
        "tensors", "part", "stored as", "tensors", "parameters", "size", "share",
        numbers=("tensors", "parameters", "size", "share"),
    )  # fmt: skip
    for row in census.parts:
        share = row.num_bytes / max(1, census.num_bytes)
        table.add_row(
            row.part,
            row.dtype,
            f"{row.tensors:,}",
            f"{row.parameters:,}",
            _size(row.num_bytes),
            f"{share:.1%}",
        )
    return table


def _cache_table(census: Census) -> Table:
    table = _table(
        f"cache (rings for steps of up to {census.max_width} rows)",
        "rows as", "a token", "a sequence", "its drafter", "full context",
        numbers=("a token", "a sequence", "its drafter", "full context"),
    )  # fmt: skip
    for row in census.cache:
        table.add_row(
            row.dtype,
            f"{row.per_token:,.0f} B",
            _size(row.per_sequence),
            _size(row.drafter_per_sequence),
            _size(row.full_context),
        )
    return table


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} GiB"
