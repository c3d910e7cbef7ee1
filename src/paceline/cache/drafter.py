"""Memory of the MTP head's own attention: a ring of rows by pair key for each sequence slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.config import ModelConfig

__all__ = ["DrafterRing"]


@dataclass(slots=True)
class DrafterRing:
    """Keys (= values) of the draft block; row of pair key k lies at k mod ring.

    A query of key k reads keys k - 127 .. k, and a chain of drafts or a catch-up writes at most
    `max_width` rows beyond the newest exact one, so the ring holds 127 + max_width rows.

    Attributes:
        rows: [S+1, 127 + max_width, head_dim]; slot S takes padded rows.
        max_width: most rows of one sequence in one call.
    """

    rows: torch.Tensor
    max_width: int

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        num_slots: int,
        max_width: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> DrafterRing:
        """Allocate a zeroed ring for `num_slots` sequences and the inert slot."""
        ring = config.sliding_window - 1 + max_width
        shape = (num_slots + 1, ring, config.head_dim)
        return cls(rows=torch.zeros(shape, dtype=dtype, device=device), max_width=max_width)

    @property
    def inert_slot(self) -> int:
        """The slot padded rows use."""
        return self.rows.shape[0] - 1
