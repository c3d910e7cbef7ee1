"""Acceptance rules: pure functions from target logits and drafts to verdicts; no state, no random.

The rows of a sequence that verifies drafts d_1 .. d_n are n + 1: row 0 belongs to the token
sampled last and judges d_1, row n gives the token after all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.types import Verdict

__all__ = ["greedy", "greedy_tokens"]

_NON_FINITE = "non-finite logits"


def greedy_tokens(logits: torch.Tensor | npt.NDArray[np.float32]) -> list[int]:
    """Pick each row's largest logit; ties go to the lower id.

    Synchronises with the device once.

    Args:
        logits: [L, vocab] fp32; `-inf` is an ordinary, impossible token.

    Returns:
        L ids; -1 for a row that holds a NaN or `+inf`, or nothing but `-inf`.
    """
    if isinstance(logits, torch.Tensor):
        if logits.device.type != "cpu":
            # A NaN is the largest of its row, so the largest value tells of all of them.
            best, at = logits.max(-1)
            picked: list[int] = torch.where(torch.isfinite(best), at, -1).tolist()
            return picked
        logits = logits.detach().numpy()
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, token in enumerate(tokens):
        if not math.isfinite(logits[row, token]):
            tokens[row] = -1
    return tokens


def greedy(
    logits: torch.Tensor | npt.NDArray[np.float32],
    drafts: Sequence[Sequence[int]],
    *,
    offsets: Sequence[int] | None = None,
) -> list[Verdict]:
    """Accept each sequence's leading drafts that are the target's own choice.

    A row is judged only if every draft before it was accepted: rows behind a refused draft would
    not exist without drafts, so nothing in them, a NaN included, can matter. Stop tokens and limits
    are the caller's to cut.

    Args:
        logits: [L, vocab] fp32 of all sequences' rows.
        drafts: [i] drafts of sequence i, possibly none.
        offsets: [i] first of the len(drafts[i]) + 1 rows of sequence i; None: they follow one
            another from row 0.

    Returns:
        One verdict per sequence. Where the row that would give the next token is not finite,
        `error` says so, `next_token` is -1 and the drafts accepted before it still stand.

    Raises:
        ValueError: a sequence's rows lie outside the logits.
    """
    num_rows = logits.shape[0]
    if offsets is None:
        starts, end = [], 0
        for draft in drafts:
            starts.append(end)
            end += len(draft) + 1
        offsets = starts
    for start, draft in zip(offsets, drafts, strict=True):
        if start < 0 or start + len(draft) >= num_rows:
            raise ValueError(
                f"rows {start} to {start + len(draft)} are asked for; the logits have {num_rows}"
            )
    choices = greedy_tokens(logits)
    verdicts = []
    for start, draft in zip(offsets, drafts, strict=True):
        accepted = 0
        for token in draft:
            if choices[start + accepted] != token or token < 0:
                break
            accepted += 1
        choice = choices[start + accepted]
        error = None if choice >= 0 else _NON_FINITE
        verdicts.append(Verdict(num_accepted=accepted, next_token=choice, error=error))
    return verdicts
