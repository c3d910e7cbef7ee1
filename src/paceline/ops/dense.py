"""A dense table that is read by row (embedding) or multiplied with (head)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.ops.reference import linear

__all__ = ["DenseWeight"]


class DenseWeight:
    """A [rows, columns] table kept as the checkpoint has it and computed in `dtype`.

    Args:
        table: [rows, columns] bf16 or fp32; kept, not copied.
        dtype: of what `gather` returns.
    """

    def __init__(self, table: torch.Tensor, *, dtype: torch.dtype) -> None:
        self.table = table
        self.dtype = dtype

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self.table.shape[0]

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of `ids` [R] int64 as [R, columns] in `dtype`."""
        return self.table.index_select(0, ids).to(self.dtype)

    def take_rows(self, ids: Sequence[int]) -> DenseWeight:
        """Return a table like this one of the rows `ids`, copied."""
        places = torch.tensor(ids, dtype=torch.int64, device=self.table.device)
        return type(self)(self.table[places], dtype=self.dtype)

    def matmul(self, x: torch.Tensor, *, num_rows: int = 0) -> torch.Tensor:
        """`x` [R, columns] times the table's first `num_rows` rows (0: all), fp32 [R, num_rows]."""
        table = self.table[:num_rows] if num_rows else self.table
        return linear(x.float(), table.float())

    def log_prob_of_best(self, logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """Log-probability of each row's largest logit, fp32 [R]; -inf where that is not finite.

        On a CPU a row's bits do not depend on the other rows.

        Args:
            logits: [R, V] fp32, of `matmul`; -inf is an ordinary, impossible id.
            best: [R] their maxima.
        """
        rows = logits.shape[0]
        below = (logits - best[:, None]).exp()
        if rows == 1 and below.device.type == "cpu":
            # One sum is shared out among threads, several are not.
            below = torch.cat((below, below))
        total = below.sum(-1)[:rows]
        return torch.where(torch.isfinite(best), -total.log(), -math.inf)
