"""Shared by the tests: a tiny checkpoint, its parts, and steps written by hand."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.cache.blocks import BLOCK_TOKENS
from paceline.cache.pools import CachePools
from paceline.config import ModelConfig
from paceline.models.deepseek_v4.build import Backend, Built, build
from paceline.models.deepseek_v4.checkpoint import DrafterKind
from paceline.models.deepseek_v4.synth import preset_config, write_synthetic
from paceline.models.step import MtpInputs, StepInputs

CPU = torch.device("cpu")


@dataclass
class Rig:
    """A built model with pools that every slot has blocks in."""

    config: ModelConfig
    built: Built
    pools: CachePools

    def step(self, *rows: tuple[int, int, Sequence[int]]) -> StepInputs:
        return step_inputs(self.pools, rows)

    def run(self, *rows: tuple[int, int, Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, streams) of every row, cloned."""
        out = self.built.model.forward(self.step(*rows), self.pools)
        return out.logits.clone(), out.hiddens.clone()


def make_rig(
    weights: Mapping[str, torch.Tensor],
    config: ModelConfig,
    *,
    backend: Backend,
    max_seq_len: int = 1024,
    max_width: int = 1024,
    num_slots: int = 4,
    num_threads: int | None = None,
) -> Rig:
    built = build(
        weights, config, device=CPU, dtype=torch.float32, backend=backend, num_threads=num_threads
    )
    per_slot = -(-max_seq_len // BLOCK_TOKENS)
    pools = CachePools.allocate(
        config,
        num_slots=num_slots,
        num_blocks=num_slots * per_slot,
        max_seq_len=max_seq_len,
        max_width=max_width,
        device=CPU,
        dtype=torch.float32,
    )
    for slot in range(num_slots):
        # Blocks in falling order: a table that was read as the identity would show.
        first = 1 + slot * per_slot
        pools.block_tables[slot] = torch.arange(first + per_slot - 1, first - 1, -1)
    return Rig(config, built, pools)


def step_inputs(pools: CachePools, rows: Sequence[tuple[int, int, Sequence[int]]]) -> StepInputs:
    """A step from (slot, first position, ids) rows; every row asks for logits and streams."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    closing: dict[int, list[list[int]]] = {4: [[], [], []], 128: [[], [], []]}
    for slot, first, tokens in rows:
        width = len(tokens)
        ids += tokens
        positions += range(first, first + width)
        slots += [slot] * width
        for ratio, (c_slots, c_windows, c_dest) in closing.items():
            done = [p for p in range(first, first + width) if (p + 1) % ratio == 0]
            per_block = BLOCK_TOKENS // ratio
            for p in done:
                w = p // ratio
                c_slots.append(slot)
                c_windows.append(w)
                block = int(pools.block_tables[slot, w // per_block])
                c_dest.append(block * per_block + w % per_block)
            for _ in range(-(-width // ratio) - len(done)):
                c_slots.append(pools.inert_slot)
                c_windows.append(0)
                c_dest.append(0)

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    every = torch.arange(len(ids))
    return StepInputs(
        ids=tensor(ids),
        positions=tensor(positions),
        slots=tensor(slots),
        close4_slots=tensor(closing[4][0]),
        close4_windows=tensor(closing[4][1]),
        close4_dest=tensor(closing[4][2]),
        close128_slots=tensor(closing[128][0]),
        close128_windows=tensor(closing[128][1]),
        close128_dest=tensor(closing[128][2]),
        logits_rows=every,
        hidden_rows=every,
        context_cap=-(-(max(positions) + 1) // BLOCK_TOKENS) * BLOCK_TOKENS,
    )


def random_widths(rng: random.Random, total: int, low: int = 1, high: int = 16) -> list[int]:
    widths = []
    while total:
        widths.append(min(total, rng.randint(low, high)))
        total -= widths[-1]
    return widths


def visible_cache(
    pools: CachePools, slot: int, length: int, window: int
) -> dict[str, torch.Tensor]:
    """Everything a step at committed length `length` can read of a sequence, in order."""
    back = torch.arange(max(0, length - (window - 1)), length)
    seen = {"window": pools.window[:, slot][:, back % pools.window.shape[2]].clone()}
    raw4 = torch.arange(max(0, length - 7), length)
    for name in ("raw4_kv", "raw4_score", "index_raw_kv", "index_raw_score"):
        ring = getattr(pools, name)
        seen[name] = ring[:, slot][:, raw4 % ring.shape[2]].clone()
    raw128 = torch.arange(max(0, length - 127), length)
    for name in ("raw128_kv", "raw128_score"):
        ring = getattr(pools, name)
        seen[name] = ring[:, slot][:, raw128 % ring.shape[2]].clone()
    for name, ratio in (("rows4", 4), ("index4", 4), ("rows128", 128)):
        per_block = BLOCK_TOKENS // ratio
        rows = torch.arange(length // ratio)
        places = pools.block_tables[slot, rows // per_block] * per_block + rows % per_block
        seen[name] = getattr(pools, name)[:, places].clone()
    return seen


def mtp_inputs(
    built: Built,
    slot: int,
    first_key: int,
    ids: Sequence[int],
    hiddens: torch.Tensor,
    *,
    lowest: int = 0,
) -> MtpInputs:
    """Rows of pair keys first_key .. for one sequence: ids[j] is the token of key + 1."""
    keys = torch.arange(first_key, first_key + len(ids))
    return MtpInputs(
        embeds=built.embed_tokens.gather(torch.tensor(list(ids))),
        hiddens=hiddens,
        keys=keys,
        slots=torch.full_like(keys, slot),
        first_keys=torch.full_like(keys, lowest),
    )


def write_tiny(
    path: Path, *, seed: int = 0, drafter: DrafterKind | None = "mtp", **changes: Any
) -> Path:
    """A tiny fp32 checkpoint in the release's layout with every parameter non-trivial."""
    config = dataclasses.replace(preset_config("tiny"), **changes)
    return write_synthetic(path / "tiny", config, dtype="fp32", seed=seed, drafter=drafter)
