"""Acceptance at a temperature: pure functions of laws, drafts and numbers.

`p` is the target's law and `q` the drafter's, both after all processing, row j being the law of the
token that draft j + 1 stands for, given the drafts before it.

- `race` picks by shared noise. Target and drafter race with the same numbers and a draft is
  accepted where both pick it, so what is emitted is the target's pick alone (Daliri, Musco and
  Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2024).
- `rejection` accepts a draft with min(1, p / q), the most that any rule which judges one draft at a
  time can accept: the sum of min(p, q) (Leviathan et al. and Chen et al., 2023).
- `block_rejection` judges the drafts together and never accepts fewer on average (Sun et al.,
  "Block verification accelerates speculative decoding", 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.sampling import noise
from paceline.sampling.processors import Law

__all__ = ["block_rejection", "draw", "race", "rejection"]

Dense = npt.NDArray[np.float64]


def race(law: Law, key: int) -> int:
    """The id that wins with the noise of `key`; over random keys, a draw from the law.

    Ties, which need two equal quotients of 52 random bits, go to the lower id.
    """
    if len(law.weights) == 1:
        return 0 if law.ids is None else int(law.ids[0])
    racers = noise.exponentials(key, vocab_size=law.vocab_size, ids=law.ids)
    np.divide(law.weights, racers, out=racers)
    first = int(racers.argmax())
    return first if law.ids is None else int(law.ids[first])


def draw(weights: Dense, uniform: float) -> int:
    """Draw an index by inverting the distribution function.

    Args:
        weights: [n] not negative, not all zero.
        uniform: of [0, 1).
    """
    reached = np.cumsum(weights)
    index = int(np.searchsorted(reached, uniform * reached[-1], side="right"))
    # Where the total is subnormal the product can round up to it, past the last possible index.
    return min(index, int(np.searchsorted(reached, reached[-1])))


def rejection(
    p: Sequence[Dense | None],
    q: Sequence[Dense | None],
    drafts: Sequence[int],
    *,
    accept: Sequence[float],
    residual: float,
) -> tuple[int, int]:
    """Judge drafts drawn from `q` one after the other.

    Args:
        p: [n + 1] laws of the target, [vocab] each, summing to 1; None for a row that gives no law.
        q: [n] laws the drafts were drawn from; None for a draft that was not drawn but chosen
            without chance, a law that is all on the draft.
        drafts: [n] ids.
        accept: [n] uniforms of [0, 1), one per draft.
        residual: the uniform that draws the token behind the accepted drafts.

    Returns:
        Drafts accepted, and the token behind them: -1 where the row it needs gives no law.
    """
    for j, draft in enumerate(drafts):
        target, drafter = p[j], q[j]
        if target is None:
            return j, -1
        likely = 1.0 if drafter is None else drafter[draft]
        if accept[j] * likely < target[draft]:
            continue
        return j, draw(_residual(target, drafter, draft, 1.0), residual)
    last = p[len(drafts)]
    return len(drafts), -1 if last is None else draw(last, residual)


def block_rejection(
    p: Sequence[Dense | None],
    q: Sequence[Dense | None],
    drafts: Sequence[int],
    *,
    accept: Sequence[float],
    residual: float,
) -> tuple[int, int]:
    """Judge drafts drawn from `q` together; arguments and result are those of `rejection`.

    The uniforms must be fresh in every call, also for positions drafted before: what is accepted
    depends on the drafts behind it, so a number used again would carry knowledge.
    """
    usable = next((j for j, row in enumerate(p) if row is None), len(drafts))
    taken, share, taken_share = 0, 1.0, 1.0
    for j, draft in enumerate(drafts[:usable]):
        target, drafter = p[j], q[j]
        assert target is not None
        likely = 1.0 if drafter is None else float(drafter[draft])
        share = min(1.0, share * float(target[draft]) / likely) if likely else 0.0
        chance = share
        if j + 1 < usable:
            ahead, behind = p[j + 1], q[j + 1]
            assert ahead is not None
            over = float(_over(ahead, behind, drafts[j + 1], share).sum())
            # Both vanish only where share is 1 and the laws agree: then nothing is to be corrected.
            chance = over / (over + (1.0 - share)) if over > 0 or share < 1 else 1.0
        if accept[j] < chance:
            taken, taken_share = j + 1, share
    last = p[taken]
    if last is None:
        return taken, -1
    if taken == usable:
        return taken, draw(last, residual)
    return taken, draw(_residual(last, q[taken], drafts[taken], taken_share), residual)


def _over(target: Dense, drafter: Dense | None, draft: int, share: float) -> Dense:
    """[vocab] by how much `share` of the target's law exceeds the drafter's."""
    over = target * share
    if drafter is None:
        over[draft] = max(0.0, over[draft] - 1.0)
    else:
        over -= drafter
        np.maximum(over, 0.0, out=over)
    return over


def _residual(target: Dense, drafter: Dense | None, draft: int, share: float) -> Dense:
    """What to draw from once a draft is refused."""
    over = _over(target, drafter, draft, share)
    # Equal laws refuse with a chance of rounding only; what rounding leaves is no law.
    return over if over.sum() > 0 else target
