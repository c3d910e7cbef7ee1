"""Which drafts of a batch are worth a row of the target's forward; knows no tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["prune_drafts"]


def prune_drafts(
    confidences: Sequence[Sequence[float]],
    *,
    max_drafts: int | None = None,
    keep_ratio: float | None = None,
) -> list[int]:
    """Cut the tails that are least likely to be reached, over all sequences at once.

    A draft pays only if it and all before it are accepted, so it is ranked by the product of the
    drafter's probabilities up to it. The best are kept; what is kept of a sequence is a prefix.
    Equal products go to the earlier position, then to the earlier sequence.

    Source: the cut by prefix product is known as D-Cut.

    Args:
        confidences: [i][j] log-probability of sequence i's draft j, at most 0; 0 where it was not
            measured, which keeps it.
        max_drafts: most drafts to keep in all.
        keep_ratio: share of all drafts to keep, 0 to 1, rounded up. Both given: the lesser.

    Returns:
        [i] how many of sequence i's first drafts to keep.

    Raises:
        ValueError: a log-probability is above 0 or no number, or a limit is out of range.
    """
    if max_drafts is not None and max_drafts < 0:
        raise ValueError(f"max_drafts is {max_drafts}; allowed is at least 0")
    if keep_ratio is not None and not 0 <= keep_ratio <= 1:
        raise ValueError(f"keep_ratio is {keep_ratio}; allowed is 0 to 1")
    ranked = []
    for i, log_probs in enumerate(confidences):
        for j, (log_prob, reach) in enumerate(zip(log_probs, accumulate(log_probs), strict=True)):
            if not log_prob <= 0:
                raise ValueError(
                    f"log-probability {j} of sequence {i} is {log_prob}; allowed is at most 0"
                )
            ranked.append((-reach, j, i))
    count = len(ranked)
    if keep_ratio is not None:
        count = math.ceil(keep_ratio * count)
    if max_drafts is not None:
        count = min(count, max_drafts)
    kept = [0] * len(confidences)
    for _, _, i in sorted(ranked)[:count]:
        kept[i] += 1
    return kept
