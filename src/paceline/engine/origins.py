"""How each token of a step came to be; counts and masks, no logits."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.sampling.grammar import Words, only_id
from paceline.types import MAX_NUM_DRAFTS, Origin

__all__ = ["origins"]

_ACCEPTED = tuple(Origin("accepted", place + 1) for place in range(MAX_NUM_DRAFTS))
_FORCED = tuple(Origin("forced", place + 1) for place in range(MAX_NUM_DRAFTS))
_FORCED_LAST = Origin("forced")
_CORRECTED = Origin("corrected")
_BONUS = Origin("bonus")
_TARGET = Origin("target")


def origins(
    count: int, *, num_drafted: int, num_accepted: int, masks: Sequence[Words] | None = None
) -> list[Origin]:
    """Return the origin of each token that a step emits.

    Args:
        count: tokens emitted, at most `num_accepted` + 1; fewer where a block is cut.
        num_drafted: drafts the step verified.
        num_accepted: leading drafts accepted.
        masks: what the grammar allowed at each of the tokens, or None without a grammar.
    """
    found = list(_ACCEPTED[: min(count, num_accepted)])
    if count > num_accepted:
        if not num_drafted:
            found.append(_TARGET)
        else:
            found.append(_BONUS if num_accepted == num_drafted else _CORRECTED)
    if masks is not None:
        for place in range(count):
            if only_id(masks[place]) is not None:
                found[place] = _FORCED[place] if place < num_accepted else _FORCED_LAST
    return found
