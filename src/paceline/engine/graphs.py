"""Steps captured once and replayed: which shapes are captured, and how.

A captured step reads and writes fixed memory, so a step is served by the smallest captured shape it
fits into, and the rows it lacks are padded. Padded rows stand at position 0 of the inert slot, the
windows they close go to block 0, and nothing reads what they compute.

`GraphPlan` is the policy and counts only; `CudaCapture` and `EagerCapture` are the mechanism;
`TargetGraphs` and `GraphedDraftRunner` hold what was captured of the target and of a draft head.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.cache.blocks import BLOCK_TOKENS
from paceline.draft.proposer import DraftBinding, DraftShape
from paceline.types import MAX_NUM_DRAFTS, ConfigError

__all__ = [
    "Capture",
    "CudaCapture",
    "EagerCapture",
    "GraphPlan",
    "GraphShape",
    "GraphedDraftRunner",
    "Program",
    "TargetGraphs",
]

Program = Callable[[], None]
"""A captured step: runs it once more over the same memory."""

_FIRST_CONTEXT = 512
"""Least context a shape is captured for; each further one is twice as long."""


class Capture(Protocol):
    """How a step becomes a program.

    Attributes:
        seconds: time spent on captures so far, warm-up included.
        num_captures: programs made so far.
    """

    seconds: float
    num_captures: int

    def capture(self, run: Program) -> Program:
        """Turn `run` into a program.

        `run` is called a few times. It must give the same each time, keep all it reads and writes
        at the same addresses, and allocate nothing that outlives the call.
        """
        ...


class EagerCapture:
    """Replays by running again: the same memory and the same padding without a graph."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_captures = 0

    def capture(self, run: Program) -> Program:
        """Return `run`, which is called once as a graph's warm-up would."""
        start = time.perf_counter()
        run()
        self.num_captures += 1
        self.seconds += time.perf_counter() - start
        return run


class CudaCapture:
    """CUDA graphs that share one memory pool.

    Sharing is safe in any order of replays, since a step leaves nothing in the pool that is read
    after it. Replays belong on one stream.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self.num_captures = 0
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Program) -> Program:
        """Warm up on a side stream, capture, and return the graph's replay."""
        start = time.perf_counter()
        with torch.inference_mode(), torch.cuda.device(self._device):
            torch.cuda.synchronize()
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Freeing a graph while another is captured would end the capture.
            collecting = gc.isenabled()
            gc.disable()
            try:
                with torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=self._stream,
                    capture_error_mode="thread_local",
                ):
                    run()
            finally:
                if collecting:
                    gc.enable()
            torch.cuda.synchronize()
        self.num_captures += 1
        self.seconds += time.perf_counter() - start
        return graph.replay


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShape:
    """What the memory of a captured step depends on.

    Attributes:
        num_seqs: sequences, at most.
        num_rows: rows of all of them, at most.
        context_cap: positions are below it.
    """

    num_seqs: int
    num_rows: int
    context_cap: int

    @property
    def num_close4(self) -> int:
        """Most entries of windows of 4 that such rows make, ceil(width / 4) for each sequence."""
        return min(self.num_rows, (self.num_rows + 3 * self.num_seqs) // 4)

    @property
    def num_close128(self) -> int:
        """Likewise for windows of 128; no sequence has more rows than one."""
        return self.num_seqs


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """Which shapes are captured.

    A shape is b sequences of w rows each, for b in `batch_sizes` and w from 1 to `max_width`. It
    also serves fewer sequences and unequal widths, as long as the rows fit.

    Attributes:
        batch_sizes: numbers of sequences, rising.
        max_width: most rows of one sequence in the uniform layout, drafts and one.
        context_caps: multiples of 128, rising.
    """

    batch_sizes: tuple[int, ...]
    max_width: int
    context_caps: tuple[int, ...]

    @classmethod
    def new(
        cls,
        *,
        max_num_seqs: int,
        max_seq_len: int,
        batch_sizes: Iterable[int] = (1, 2, 4, 8),
        max_width: int = MAX_NUM_DRAFTS + 1,
    ) -> GraphPlan:
        """Plan for an engine: batch sizes it can reach, contexts from 512 on, doubling.

        Raises:
            ConfigError: a width or batch size is out of range.
        """
        if not 1 <= max_width <= BLOCK_TOKENS:
            raise ConfigError(f"max_width is {max_width}; allowed is 1 to {BLOCK_TOKENS}")
        sizes = sorted(set(batch_sizes))
        if not sizes or sizes[0] < 1:
            raise ConfigError(f"batch_sizes is {sizes}; allowed are numbers of at least 1")
        reachable = [size for size in sizes if size < max_num_seqs]
        # The first that holds all sequences is the last that is of use.
        reachable += [size for size in sizes if size >= max_num_seqs][:1]
        longest = -(-max_seq_len // BLOCK_TOKENS) * BLOCK_TOKENS
        caps = []
        cap = _FIRST_CONTEXT
        while cap < longest:
            caps.append(cap)
            cap *= 2
        return cls(batch_sizes=tuple(reachable), max_width=max_width, context_caps=(*caps, longest))

    @property
    def max_rows(self) -> int:
        """Rows of the largest shape."""
        return self.batch_sizes[-1] * self.max_width

    def shape_for(
        self, *, num_seqs: int, num_rows: int, widest: int, longest: int
    ) -> GraphShape | None:
        """Return the smallest shape that serves a step, or None: it is run as it is.

        Args:
            num_seqs: sequences of the step, at least 1.
            num_rows: rows of all of them.
            widest: most rows of one.
            longest: one more than the highest position.
        """
        size = next((size for size in self.batch_sizes if size >= num_seqs), None)
        if size is None:
            return None
        width = -(-num_rows // size)
        cap = next((cap for cap in self.context_caps if cap >= longest), None)
        # A sequence of more rows than a window may close more windows than there is room for.
        if cap is None or width > self.max_width or widest > BLOCK_TOKENS:
            return None
        return GraphShape(num_seqs=size, num_rows=size * width, context_cap=cap)

    def shapes(
        self, batch_sizes: Iterable[int], widths: Iterable[int], contexts: Iterable[int]
    ) -> list[GraphShape]:
        """List the shapes that serve uniform steps of the sizes given, largest first.

        Raises:
            ConfigError: no shape serves one of them.
        """
        found: dict[GraphShape, None] = {}
        wanted = [(b, w, c) for b in batch_sizes for w in widths for c in contexts]
        for size, width, context in sorted(wanted, reverse=True):
            shape = self.shape_for(
                num_seqs=size, num_rows=size * width, widest=width, longest=context
            )
            if shape is None:
                raise ConfigError(
                    f"batch {size}, width {width}, context {context} cannot be captured; allowed "
                    f"are batches up to {self.batch_sizes[-1]}, widths up to {self.max_width}, "
                    f"contexts up to {self.context_caps[-1]}"
                )
            found[shape] = None
        return list(found)


class TargetGraphs:
    """The target's captured steps, by shape.

    Args:
        capture: how.
        plan: which.

    Attributes:
        plan: which shapes there may be.
        num_replays: steps served.
    """

    def __init__(self, capture: Capture, plan: GraphPlan) -> None:
        self.plan = plan
        self.num_replays = 0
        self._capture = capture
        self._programs: dict[GraphShape, Program] = {}

    @property
    def seconds(self) -> float:
        """Time spent on captures."""
        return self._capture.seconds

    @property
    def shapes(self) -> list[GraphShape]:
        """Shapes captured so far."""
        return list(self._programs)

    def has(self, shape: GraphShape) -> bool:
        """Whether the shape was captured."""
        return shape in self._programs

    def add(self, shape: GraphShape, run: Program) -> None:
        """Capture `run`, a step over the memory of `shape` that holds padding only by now."""
        self._programs[shape] = self._capture.capture(run)

    def replay(self, shape: GraphShape) -> None:
        """Run the shape's program over its memory."""
        self._programs[shape]()
        self.num_replays += 1


class GraphedDraftRunner:
    """A head's chain of drafts, captured for each shape: a `DraftRunner`.

    Args:
        binding: what the head says of its chain. Its buffers must not move.
        capture: how.
        shapes: what is served; None: all shapes of the binding.

    Attributes:
        num_replays: chains run.

    Raises:
        ConfigError: the binding does not list a shape.
    """

    def __init__(
        self,
        binding: DraftBinding,
        capture: Capture,
        *,
        shapes: Iterable[DraftShape] | None = None,
    ) -> None:
        self.num_replays = 0
        self._binding = binding
        self._capture = capture
        self._shapes = frozenset(binding.shapes if shapes is None else shapes)
        strange = self._shapes - set(binding.shapes)
        if strange:
            raise ConfigError(
                f"{next(iter(strange))} cannot be captured; allowed are {list(binding.shapes)}"
            )
        self._programs: dict[DraftShape, Program] = {}

    @property
    def seconds(self) -> float:
        """Time spent on captures."""
        return self._capture.seconds

    @property
    def shapes(self) -> list[DraftShape]:
        """Shapes captured so far."""
        return list(self._programs)

    def serves(self, shape: DraftShape) -> bool:
        """Whether the shape is served; its program may still have to be made."""
        return shape in self._shapes

    def capture(self, shapes: Iterable[DraftShape] | None = None) -> float:
        """Make programs now, over padding, rather than at first use; None: all that are served.

        Returns:
            Seconds it took.

        Raises:
            ConfigError: a shape is not served.
        """
        before = self._capture.seconds
        wanted = self._shapes if shapes is None else set(shapes)
        for shape in sorted(wanted, key=lambda s: (s.width, s.pairs, s.depth), reverse=True):
            if shape not in self._shapes:
                raise ConfigError(f"{shape} cannot be captured; it is not among those served")
            if shape not in self._programs:
                self._binding.make_inert(shape)
                self._make(shape)
        return self._capture.seconds - before

    def run_draft(self, shape: DraftShape) -> None:
        """Run the chain on the bound buffers; captures it the first time."""
        program = self._programs.get(shape)
        if program is None:
            program = self._make(shape)
        program()
        self.num_replays += 1

    def _make(self, shape: DraftShape) -> Program:
        # A chain leaves its inputs as they are and gives the same each time, so it is captured
        # over whatever the buffers hold.
        program = self._capture.capture(lambda: self._binding.run(shape))
        self._programs[shape] = program
        return program
