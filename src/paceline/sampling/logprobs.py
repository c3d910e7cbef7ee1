"""Log-probabilities of emitted tokens.

They are "raw" unless asked otherwise: the log-softmax of the model's logits before any processing,
which is what a teacher-forced pass over the finished text gives. "Processed" ones are those of the
law the token was drawn from. The engine's `logprobs_mode` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.sampling.processors import Law
from paceline.types import TokenLogprob

__all__ = ["law_logprob", "token_logprobs"]


def token_logprobs(
    logits: torch.Tensor | npt.NDArray[np.floating[Any]], ids: Sequence[int], *, top: int
) -> list[TokenLogprob]:
    """Raw log-probabilities, one structure per emitted id.

    Args:
        logits: [L, vocab] of the rows the ids were picked at, L at least len(ids); further rows are
            ignored. Of the model, unprocessed; not changed.
        ids: [n] ids emitted, in order.
        top: how many of the most probable ids to list, 0 for none; cut to the vocabulary.

    Returns:
        n structures. Ranks count from 1, the lower id first among equals, and the list is sorted
        the same way; on a device, which of several ids that tie at the list's end is listed is the
        device's choice.

    Raises:
        ValueError: there are fewer rows than ids.
    """
    if len(ids) > logits.shape[0]:
        raise ValueError(f"{len(ids)} ids are given for {logits.shape[0]} rows of logits")
    if not len(ids):
        return []
    if isinstance(logits, torch.Tensor):
        if logits.device.type != "cpu":
            return _on_device(logits[: len(ids)], ids, top)
        logits = logits.detach().numpy()
    return [_of_row(logits[index], chosen, top) for index, chosen in enumerate(ids)]


def law_logprob(law: Law, chosen: int, *, top: int) -> TokenLogprob:
    """Processed log-probabilities: those of the law an id was drawn from.

    Ids the law forbids have -inf and are never listed.
    """
    with np.errstate(divide="ignore"):
        return _of_row(np.log(law.probabilities()), chosen, top)


def _of_row(row: npt.NDArray[np.floating[Any]], chosen: int, top: int) -> TokenLogprob:
    values = row.astype(np.float64)
    values -= values.max()
    total = float(np.log(np.exp(values).sum()))
    own = values[chosen]
    rank = 1 + int((values > own).sum()) + int((values[:chosen] == own).sum())
    return TokenLogprob(
        id=chosen,
        logprob=float(own) - total,
        rank=rank,
        top=[(i, float(values[i]) - total) for i in _best(values, top) if values[i] > -np.inf],
    )


def _best(values: npt.NDArray[np.float64], top: int) -> list[int]:
    """Indices of the largest, descending, the lower index first among equals."""
    top = min(top, len(values))
    if not top:
        return []
    least = np.partition(values, len(values) - top)[len(values) - top]
    few = np.flatnonzero(values >= least)
    best: list[int] = few[np.argsort(-values[few], kind="stable")[:top]].tolist()
    return best


def _on_device(logits: torch.Tensor, ids: Sequence[int], top: int) -> list[TokenLogprob]:
    values = logits.double()
    values = values - torch.logsumexp(values, -1, keepdim=True)
    chosen = torch.tensor(ids, device=logits.device)[:, None]
    own = values.gather(1, chosen)
    before = torch.arange(values.shape[1], device=logits.device) < chosen
    rank = 1 + (values > own).sum(-1) + ((values == own) & before).sum(-1)
    best, at = values.topk(min(top, values.shape[1]), -1)
    listed = [
        sorted(
            ((i, v) for i, v in zip(*pair, strict=True) if v > -np.inf),
            key=lambda one: (-one[1], one[0]),
        )
        for pair in zip(at.tolist(), best.tolist(), strict=True)
    ]
    return [
        TokenLogprob(id=i, logprob=value, rank=place, top=row)
        for i, value, place, row in zip(ids, own[:, 0].tolist(), rank.tolist(), listed, strict=True)
    ]
