"""Signs that drafting or the cache of prefixes does not do what it should, read from counts.

Drafts never change a token, so a drafter that is broken shows in its counts only. Each sign here
has been seen to go with a fault: a head fed the wrong streams, weights that were not loaded, a
cache that keeps what it never finds. None is certain; all deserve a look. No tensor, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from paceline.cache.blocks import BLOCK_TOKENS
from paceline.types import SpeculationStats

__all__ = ["ALARM_NAMES", "Alarm", "Repeats", "drafting_alarms", "prefix_alarms"]

MIN_DRAFTS = 200
"""Drafts at a position, or drafted steps, below which nothing is said."""

MIN_VERDICTS = 20
"""Refusals in a row of the draft itself that make "never accepted" mean something.

A position that the drafts before it seldom let count has been judged seldom, however often it was
drafted: at four in ten accepted, 20 refusals happen once in 27,000 times.
"""

LEAST_LENGTH = 1.02
"""Tokens a drafted step yields below which drafting cannot pay."""

NOISE = 4.0
"""Standard deviations that a difference of two rates must exceed."""

SURVIVORS = 0.25
"""What position two may be above position one for a good reason.

Where text is easy in parts and hard in parts, position two is judged mostly in easy ones: half of
it at 0.95 and half at 0.3 puts it 0.17 above position one.
"""

MIN_LOOKUPS = 20
"""Requests with a beginning that an earlier one had, below which nothing is said."""


ALARM_NAMES = (
    "never_accepted",
    "always_accepted",
    "length_one",
    "second_above_first",
    "no_prefix_hits",
)
"""Every kind of sign there is."""

_MOST_SEEN = 1024


@dataclass(frozen=True, slots=True)
class Alarm:
    """One sign.

    Attributes:
        name: what kind, one of `ALARM_NAMES`.
        message: the counts it was read from, and what to look at.
    """

    name: str
    message: str


def drafting_alarms(stats: SpeculationStats, *, min_drafts: int = MIN_DRAFTS) -> list[Alarm]:
    """Read the signs from what was drafted and accepted.

    Args:
        stats: of many steps; the more kinds of text, the better.
        min_drafts: drafts at a position, or drafted steps, below which nothing is said.
    """
    alarms = []
    never, always = [], []
    for j, (drafted, accepted, reached) in enumerate(
        zip(stats.drafted_at, stats.accepted_at, stats.reached_at, strict=True)
    ):
        if drafted < min_drafts:
            continue
        if accepted == 0 and reached >= MIN_VERDICTS:
            never.append(j + 1)
        if accepted == drafted:
            always.append(j + 1)
    if never:
        alarms.append(
            Alarm(
                "never_accepted",
                f"{_places(never)} never accepted, drafted {_drafted(stats, never)}: the drafter "
                "may see wrong streams or lack weights, or K is beyond what it can do",
            )
        )
    if always:
        alarms.append(
            Alarm(
                "always_accepted",
                f"{_places(always)} accepted every time, drafted {_drafted(stats, always)}: unless "
                "the text repeats itself, verification may not look at them",
            )
        )
    length = stats.mean_acceptance_length
    if stats.num_draft_steps >= min_drafts and length < LEAST_LENGTH:
        alarms.append(
            Alarm(
                "length_one",
                f"a drafted step yields {length:.3f} tokens over {stats.num_draft_steps} steps: "
                "drafting costs time and brings nothing",
            )
        )
    second = _second_above_first(stats, min_drafts)
    if second is not None:
        alarms.append(second)
    return alarms


def prefix_alarms(
    *, num_repeats: int, num_hits: int, min_lookups: int = MIN_LOOKUPS
) -> list[Alarm]:
    """Read the sign from lookups in the cache of prefixes.

    Args:
        num_repeats: `Repeats.count`.
        num_hits: requests that found any prefix.
        min_lookups: requests below which nothing is said.
    """
    if num_repeats < min_lookups or num_hits:
        return []
    return [
        Alarm(
            "no_prefix_hits",
            f"{num_repeats} requests began like an earlier one and none found its prefix: the "
            "cache may be too small for one of them, or does not find what it keeps",
        )
    ]


class Repeats:
    """Counts requests that a cache of prefixes should have served.

    Attributes:
        count: requests whose first block of tokens was that of one that had ended before.
    """

    def __init__(self) -> None:
        self.count = 0
        self._seen: dict[int, None] = {}

    def begun(self, prompt: Sequence[int]) -> None:
        """Take notice of a request that is queued."""
        if len(prompt) > BLOCK_TOKENS and hash(tuple(prompt[:BLOCK_TOKENS])) in self._seen:
            self.count += 1

    def ended(self, tokens: Sequence[int]) -> None:
        """Take notice of a request that ended well; all but the last of its tokens were read."""
        if len(tokens) > BLOCK_TOKENS:
            self._seen[hash(tuple(tokens[:BLOCK_TOKENS]))] = None
            if len(self._seen) > _MOST_SEEN:
                del self._seen[next(iter(self._seen))]


def _second_above_first(stats: SpeculationStats, min_drafts: int) -> Alarm | None:
    """Compare the first two positions over the steps that drafted both."""
    if len(stats.drafted_at) < 2 or stats.drafted_at[1] < min_drafts:
        return None
    drafted, reached, accepted = stats.drafted_at[1], stats.reached_at[1], stats.accepted_at[1]
    if reached < MIN_VERDICTS:
        return None
    first, second = reached / drafted, accepted / reached
    noise = sqrt(first * (1 - first) / drafted + second * (1 - second) / reached)
    if second - first <= max(SURVIVORS, NOISE * noise):
        return None
    return Alarm(
        "second_above_first",
        f"of {drafted} steps with two drafts the first was accepted in {first:.1%}, and the second "
        f"in {second:.1%} of those: the first may be made from the wrong streams",
    )


def _places(positions: list[int]) -> str:
    many = len(positions) > 1
    listed = ", ".join(map(str, positions))
    return f"draft{'s' if many else ''} {listed} {'were' if many else 'was'}"


def _drafted(stats: SpeculationStats, positions: list[int]) -> str:
    return ", ".join(str(stats.drafted_at[position - 1]) for position in positions) + " times"
