"""The greedy verdict where the logits are: nothing is read back but the answer.

One packed tensor holds what an engine has to know of a step: how many drafts were accepted, the
token after them, and the drafts' ids and log-probabilities, which may never have left the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.types import Verdict

__all__ = ["DeviceVerdict", "packed_verdicts", "unpack"]

_NON_FINITE = "non-finite logits"

_HEAD = 2
"""Columns before the drafts: accepted count and next token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceVerdict:
    """A verdict with the drafts it judged.

    Attributes:
        verdict: as `paceline.draft.verify.greedy` gives it.
        drafts: ids verified; -1 where a chain had ended.
        log_probs: log-probability of each under the drafter; NaN where it was not left on the
            device.
    """

    verdict: Verdict
    drafts: list[int]
    log_probs: list[float]


def packed_verdicts(
    logits: torch.Tensor,
    ids: torch.Tensor,
    logits_rows: torch.Tensor,
    firsts: torch.Tensor,
    counts: torch.Tensor,
    *,
    max_drafts: int,
    log_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Judge every sequence's drafts by the rule of `paceline.draft.verify.greedy`.

    No value is read by the host and no shape depends on one, so this can be captured.

    Args:
        logits: [L, vocab] fp32; those of a sequence's rows stand together.
        ids: [R] int64 the step's tokens, -1 where a draft is none.
        logits_rows: [L] int64, the row of the step each logits row belongs to.
        firsts: [B] int64, the logits row that judges sequence b's first draft.
        counts: [B] int64, drafts of sequence b, 0 to `max_drafts`.
        max_drafts: most drafts of a sequence, D.
        log_probs: [R] fp32, the drafter's of each row's token, or None.

    Returns:
        [B, 2 + 2 D] int64: accepted drafts, next token (-1 where its logits are not finite), the
        drafts' ids, and the bits of their log-probabilities; D entries each, -1 and NaN beyond a
        sequence's own.
    """
    # A NaN is the largest of its row, so the largest value tells of all of them.
    best, at = logits.max(-1)
    choices = torch.where(torch.isfinite(best), at, -1)
    steps = torch.arange(max_drafts + 1, device=logits.device)
    places = (firsts[:, None] + steps).clamp(max=logits.shape[0] - 1)
    choices = choices[places]
    rows = logits_rows[places][:, 1:]
    live = steps[:-1] < counts[:, None]
    drafts = torch.where(live, ids[rows], -1)
    agreed = (drafts == choices[:, :-1]) & (drafts >= 0)
    accepted = agreed.to(torch.int64).cumprod(1).sum(1, keepdim=True)
    following = choices.gather(1, accepted)
    measured = torch.full(drafts.shape, math.nan, device=logits.device)
    if log_probs is not None:
        measured = torch.where(live, log_probs[rows], measured)
    bits = measured.view(torch.int32).to(torch.int64)
    return torch.cat((accepted, following, drafts, bits), 1)


def unpack(packed: npt.NDArray[np.int64], counts: list[int]) -> list[DeviceVerdict]:
    """Read the first len(counts) rows of `packed_verdicts`.

    Args:
        packed: [B, 2 + 2 D], on the host.
        counts: [b] drafts of sequence b.
    """
    max_drafts = (packed.shape[1] - _HEAD) // 2
    heads: list[list[int]] = packed[:, : _HEAD + max_drafts].tolist()
    bits = np.ascontiguousarray(packed[:, _HEAD + max_drafts :]).astype(np.int32)
    measured: list[list[float]] = bits.view(np.float32).tolist()
    verdicts = []
    for row, count in enumerate(counts):
        accepted, following, *drafts = heads[row]
        error = None if following >= 0 else _NON_FINITE
        verdicts.append(
            DeviceVerdict(
                verdict=Verdict(num_accepted=accepted, next_token=following, error=error),
                drafts=drafts[:count],
                log_probs=measured[row][:count],
            )
        )
    return verdicts
