"""Chains of drafts planned ahead where there is no graph to capture: a runner for any device."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.draft.proposer import DraftBinding, DraftShape
from paceline.types import ConfigError

__all__ = ["PlannedDraftRunner"]


class PlannedDraftRunner:
    """Runs a binding's program on shapes settled beforehand: a `DraftRunner`.

    Each shape is run once on padding when the runner is made, so that views, scratch and compiled
    code are there before the first draft; be sure that nothing is being drafted then.

    Args:
        binding: what a head says of its chain.
        shapes: the shapes to serve; None: all the binding lists.

    Attributes:
        num_runs: chains run, those on padding not counted.

    Raises:
        ConfigError: the binding does not list a shape.
    """

    def __init__(self, binding: DraftBinding, shapes: Iterable[DraftShape] | None = None) -> None:
        self.num_runs = 0
        self._run = binding.run
        self._shapes = frozenset(binding.shapes if shapes is None else shapes)
        strange = self._shapes - set(binding.shapes)
        if strange:
            raise ConfigError(
                f"shapes {sorted(map(str, strange))} cannot be planned; allowed are widths "
                f"{list(binding.widths)} and the rest as the binding lists it"
            )
        for shape in self._shapes:
            binding.make_inert(shape)
            binding.run(shape)

    def serves(self, shape: DraftShape) -> bool:
        """Whether the shape was planned."""
        return shape in self._shapes

    def run_draft(self, shape: DraftShape) -> None:
        """Run the program on the bound buffers."""
        self._run(shape)
        self.num_runs += 1
