"""Shared by the draft head's tests: a toy block, the real one, and an engine's side by hand.

The trunk is played by fixed tables: a token and the streams of every position. What a sequence
holds must then equal, row for row, what a fresh head makes of the same committed tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.cache.drafter import DrafterRing
from paceline.config import ModelConfig
from paceline.draft import DeepseekV4MtpHead
from paceline.models.deepseek_v4.build import Backend, build
from paceline.models.deepseek_v4.checkpoint import load_weights
from paceline.models.deepseek_v4.synth import preset_config, write_synthetic
from paceline.models.step import MtpBlock, MtpInputs, MtpOutput
from paceline.ops import numba_cpu
from paceline.ops.dense import DenseWeight
from paceline.types import Draft, DraftRequest

MAX_SEQ_LEN = 1024
TOLERANCE = 2e-5


# A toy block: exact in integers of float64, quick, and every row depends on all it may read.


class ToyBlock:
    """Row = f(embedding, streams, key); output = row + a weighted sum over the window.

    Values are small integers, so sums are exact in whatever order and equality is of bits.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.window = config.sliding_window

    def rows(self, inputs: MtpInputs) -> torch.Tensor:
        lanes = torch.arange(1, inputs.hiddens.shape[1] + 1, dtype=inputs.hiddens.dtype)
        mixed = (inputs.hiddens * lanes[None, :, None]).sum(1)
        return (3 * inputs.embeds + mixed + inputs.keys[:, None] % 7) % 251

    def write_rows(self, inputs: MtpInputs, ring: DrafterRing) -> None:
        ring.rows[inputs.slots, inputs.keys % ring.rows.shape[1]] = self.rows(inputs)

    def forward(self, inputs: MtpInputs, ring: DrafterRing) -> MtpOutput:
        ToyBlock.write_rows(self, inputs, ring)
        outputs = []
        for key, slot, first in zip(
            inputs.keys.tolist(), inputs.slots.tolist(), inputs.first_keys.tolist(), strict=True
        ):
            seen = torch.arange(max(first, key - self.window + 1), key + 1)
            weights = (1 + (key - seen) % 5)[:, None].to(ring.rows.dtype)
            held = ring.rows[slot, seen % ring.rows.shape[1]]
            outputs.append((held * weights).sum(0) % 241)
        normed = torch.stack(outputs)
        return MtpOutput(normed=normed, streams=(inputs.hiddens + normed[:, None]) % 239)


class ToyTable(DenseWeight):
    """An embedding whose product with a row picks a token from all of its columns."""

    def matmul(self, x: torch.Tensor, *, num_rows: int = 0) -> torch.Tensor:
        tokens = num_rows or self.num_rows
        picked = x @ torch.arange(1, x.shape[1] + 1, dtype=x.dtype) % tokens
        distance = torch.arange(tokens, dtype=x.dtype)[None] - picked[:, None]
        # A NaN spreads over its row, as a product would have it.
        return -distance.abs().float()


def toy_config(window: int = 128) -> ModelConfig:
    return dataclasses.replace(
        preset_config("tiny"),
        vocab_size=64,
        hidden_size=6,
        head_dim=6,
        qk_rope_head_dim=2,
        hc_mult=2,
        sliding_window=window,
        num_hidden_layers=1,
        compress_ratios=(0,),
        num_hash_layers=0,
    )


def toy_head(config: ModelConfig, **options: Any) -> DeepseekV4MtpHead:
    generator = torch.Generator().manual_seed(1)
    table = torch.randint(
        0, 50, (config.vocab_size, config.hidden_size), generator=generator
    ).double()
    dense = ToyTable(table, dtype=torch.float64)
    return DeepseekV4MtpHead.new(ToyBlock(config), dense, dense, config, 0, MAX_SEQ_LEN, **options)


# The real block on a tiny random checkpoint.


@dataclass
class Tiny:
    config: ModelConfig
    weights: dict[str, torch.Tensor]
    module: MtpBlock
    embed: DenseWeight
    lm_head: DenseWeight

    def head(self, **options: Any) -> DeepseekV4MtpHead:
        return DeepseekV4MtpHead.new(
            self.module, self.embed, self.lm_head, self.config, 0, MAX_SEQ_LEN, **options
        )

    def ring(self) -> DrafterRing:
        return DrafterRing.allocate(
            self.config,
            num_slots=1,
            max_width=512,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )

    def forward(
        self,
        tokens: Sequence[int],
        hiddens: torch.Tensor,
        first_key: int,
        ring: DrafterRing,
        *,
        lowest: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, streams) of every row, cloned."""
        keys = torch.arange(first_key, first_key + len(tokens))
        inputs = MtpInputs(
            embeds=self.embed.gather(torch.tensor(list(tokens))),
            hiddens=hiddens,
            keys=keys,
            slots=torch.zeros_like(keys),
            first_keys=torch.full_like(keys, lowest),
        )
        out = self.module.forward(inputs, ring)
        return self.lm_head.matmul(out.normed).clone(), out.streams.clone()


def make_tiny(path: Path, backend: Backend, *, seed: int = 5) -> Tiny:
    """A tiny random checkpoint, built; skips where the backend cannot be had."""
    if backend == "fused" and not numba_cpu.available():
        pytest.skip(numba_cpu.why_not())
    config = preset_config("tiny")
    write_synthetic(path, config, dtype="fp32", seed=seed)
    weights = dict(load_weights(path, config))
    built = build(
        weights,
        config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        backend=backend,
        num_threads=1,
    )
    assert built.mtp is not None
    return Tiny(config, weights, built.mtp, built.embed_tokens, built.lm_head)


@dataclass(eq=False)
class Run:
    """A committed text with its true streams, and the engine's side of the contract."""

    head: DeepseekV4MtpHead
    config: ModelConfig
    seed: int
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (MAX_SEQ_LEN, self.config.hc_mult, self.config.hidden_size)
        if self.head.ring.rows.dtype == torch.float64:
            self.streams = torch.randint(0, 50, shape, generator=generator).double()
        else:
            self.streams = torch.randn(shape, generator=generator)
        self.rng = random.Random(self.seed)
        self.state = self.head.alloc_state_for(MAX_SEQ_LEN)

    def draw(self) -> int:
        return self.rng.randrange(self.config.vocab_size)

    def prefill(self, length: int, chunks: Sequence[int] = ()) -> None:
        """A prompt of `length` tokens in chunks, and the token sampled from it."""
        self.tokens = [self.draw() for _ in range(length)]
        start = 0
        for width in (*chunks, length):
            stop = min(start + width, length)
            if start < stop:
                rows = self.streams[start:stop].clone()
                self.head.prefill_drafter(self.tokens, rows, self.state, first_position=start)
                rows.fill_(-1.0)  # the caller's memory is dead after the call
            start = stop
        self.tokens.append(self.draw())

    def request(self, num_drafts: int) -> DraftRequest:
        position = len(self.tokens) - 1
        return DraftRequest(
            last_token=self.tokens[-1],
            position=position,
            target_hidden=self.streams[position - 1],
            num_drafts=num_drafts,
            history=self.tokens,
        )

    def settle(self, draft: Draft, accept: int, *, catch_up: bool = True) -> None:
        """The target accepts `accept` drafts and adds a token of its own."""
        position = len(self.tokens) - 1
        accept = min(accept, len(draft.tokens))
        if draft.tokens:
            self.head.after_verify(accept, self.state)
        accepted = draft.tokens[:accept]
        self.tokens += [*accepted, self.draw()]
        if catch_up:
            true = self.streams[position : position + accept].clone()
            taken = self.head.catchup_batch([accepted], [true], [position + 1], [self.state])
            assert taken == accept
            true.fill_(-1.0)

    def step(self, num_drafts: int, accept: int, *, catch_up: bool = True) -> Draft:
        draft = self.head.propose(self.request(num_drafts), self.state)
        self.settle(draft, accept, catch_up=catch_up)
        return draft

    def undrafted(self, count: int) -> None:
        """Tokens decoded while nothing was drafted; the drafter hears nothing."""
        self.tokens += [self.draw() for _ in range(count)]

    def catch_up_stretch(self) -> int:
        """Hand over all pairs between the newest row and the token sampled last."""
        last = self.head.last_pair_key(self.state)
        first_key = 0 if last is None else last + 1
        stop_key = len(self.tokens) - 2
        if first_key >= stop_key:
            return 0
        return self.head.catchup_drafter(
            self.tokens[first_key + 1 : stop_key + 1],
            self.streams[first_key:stop_key].clone(),
            self.head.drafter_rows(self.state),
            first_key + 1,
            self.state,
        )


def truth(sequence: Run, fresh: DeepseekV4MtpHead, first_key: int, count: int) -> torch.Tensor:
    """The rows of keys first_key .. as one pass over the committed tokens makes them."""
    keys = torch.arange(first_key, first_key + count)
    tokens = torch.tensor(sequence.tokens[first_key + 1 : first_key + 1 + count])
    dense = fresh._embed_tokens
    ring = DrafterRing(
        rows=torch.zeros(1, MAX_SEQ_LEN, sequence.config.head_dim, dtype=dense.dtype), max_width=1
    )
    inputs = MtpInputs(
        embeds=dense.gather(tokens),
        hiddens=sequence.streams[first_key : first_key + count],
        keys=keys,
        slots=torch.zeros_like(keys),
        first_keys=torch.zeros_like(keys),
    )
    fresh.module.write_rows(inputs, ring)
    return ring.rows[0, first_key : first_key + count]


def assert_exact(sequence: Run, fresh: DeepseekV4MtpHead, *, gapless: bool = True) -> None:
    """Every row held is the true one, and the window is there where nothing was left out."""
    first, held = sequence.head.held_rows(sequence.state)
    count = held.shape[0]
    assert count == sequence.head.drafter_rows(sequence.state)
    if count:
        assert torch.equal(held, truth(sequence, fresh, first, count))
        assert sequence.head.last_pair_key(sequence.state) == first + count - 1
    if gapless:
        window = sequence.config.sliding_window
        assert first <= max(0, first + count - (window - 1))


def fresh_draft(sequence: Run, fresh: DeepseekV4MtpHead, num_drafts: int) -> Draft:
    """What a head drafts that is given the committed tokens anew."""
    prompt = sequence.tokens[:-1]
    state = fresh.alloc_state()
    fresh.prefill_drafter(prompt, sequence.streams[: len(prompt)], state)
    draft = fresh.propose(sequence.request(num_drafts), state)
    fresh.after_verify(0, state)
    fresh.free_state(state)
    return draft


# Drafts that stay on the device, and what may not happen meanwhile


class HostRead(AssertionError):
    """Something waited for a value."""


class _ForbidReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in READING_OPS:
            raise HostRead(str(func))
        return func(*args, **(kwargs or {}))


READING_OPS = (
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.item,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.equal,
    torch.ops.aten.nonzero,
)
READING_METHODS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)


@contextlib.contextmanager
def no_host_read() -> Iterator[None]:
    """Make every way of reading a tensor's value, or its size by value, an error."""

    def forbidden(name: str) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            raise HostRead(name)

        return read

    with pytest.MonkeyPatch.context() as patch, _ForbidReads():
        for name in READING_METHODS:
            patch.setattr(torch.Tensor, name, forbidden(name))
        yield


@dataclass(eq=False)
class DeviceRun(Run):
    """A run whose drafts stay on the device; drafting happens without a host read."""

    guarded: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head.circuit_draft()  # memory is laid out by now

    def deferred(self, num_drafts: int) -> DraftRequest:
        shape = (self.config.hidden_size,)
        target = torch.full(shape, float("nan"), dtype=self.head.ring.rows.dtype)
        return dataclasses.replace(self.request(num_drafts), draft_embed_target=target)

    def step(self, num_drafts: int, accept: int, *, catch_up: bool = True) -> Draft:
        request = self.deferred(num_drafts)
        with no_host_read() if self.guarded else contextlib.nullcontext():
            draft = self.head.propose(request, self.state)
        return self.finish(request, draft, accept, catch_up=catch_up)

    def finish(
        self, request: DraftRequest, draft: Draft, accept: int, *, catch_up: bool = True
    ) -> Draft:
        """What a step leaves on the device, read; then the verdict."""
        assert draft.tokens == []
        assert draft.device_tokens is not None
        target = request.draft_embed_target
        assert target is not None
        ids = draft.device_tokens.tolist()
        assert draft.num_tokens == len(ids)
        first = torch.tensor([max(ids[0], 0)])
        assert torch.equal(target, self.head._embed_tokens.gather(first)[0])
        drafted = ids.index(-1) if -1 in ids else len(ids)
        assert ids[drafted:] == [-1] * (len(ids) - drafted)
        read = Draft(tokens=ids[:drafted])
        if not drafted:
            self.head.after_verify(0, self.state)
        self.settle(read, accept, catch_up=catch_up)
        return read
