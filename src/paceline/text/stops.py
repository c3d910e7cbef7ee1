"""Stop strings, found as the text grows; knows nothing of tokens but where each one's text ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.types import RequestError

__all__ = ["MAX_STOP_CHARS", "MAX_STOP_STRINGS", "StopMatcher", "StopScan", "StopStrings"]

MAX_STOP_STRINGS = 1024
"""Most stop strings of one request."""
MAX_STOP_CHARS = 65_536
"""Most characters of one request's stop strings together."""


class StopStrings:
    """The stop strings of a request, ready to be looked for; immutable, to be shared.

    Looking for them costs the same per character of text however many they are.

    Args:
        stops: one string or several; duplicates count once.

    Attributes:
        strings: the distinct strings, in the order given.

    Raises:
        RequestError: one is no string or empty, or they are more than `MAX_STOP_STRINGS` or longer
            than `MAX_STOP_CHARS` together.

    Source: Aho and Corasick, Efficient string matching, CACM 18 (1975), algorithms 2 and 3.
    """

    def __init__(self, stops: str | Iterable[str] = ()) -> None:
        given = [stops] if isinstance(stops, str) else list(stops)
        if len(given) > MAX_STOP_STRINGS:
            raise RequestError(
                f"{len(given)} stop strings are given; allowed are {MAX_STOP_STRINGS}"
            )
        for stop in given:
            if not isinstance(stop, str) or not stop:
                raise RequestError(
                    f"a stop string is {stop!r}; allowed are strings of at least one character"
                )
        length = sum(map(len, given))
        if length > MAX_STOP_CHARS:
            raise RequestError(
                f"the stop strings have {length} characters; allowed are {MAX_STOP_CHARS} together"
            )
        self.strings: tuple[str, ...] = tuple(dict.fromkeys(given))
        # Node 0 is the root. A node stands for the prefix of some stop that leads to it; its depth
        # is that prefix's length.
        self._next: list[dict[str, int]] = [{}]
        self._fallback: list[int] = [0]
        self._depth: list[int] = [0]
        self._matched: list[str | None] = [None]
        for stop in self.strings:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        node = 0
        for character in stop:
            child = self._next[node].get(character)
            if child is None:
                child = len(self._next)
                self._next[node][character] = child
                self._next.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[node] + 1)
                self._matched.append(None)
            node = child
        self._matched[node] = stop

    def _link(self) -> None:
        level = list(self._next[0].values())
        while level:
            below: list[int] = []
            for node in level:
                for character, child in self._next[node].items():
                    self._fallback[child] = self.follow(self._fallback[node], character)
                    below.append(child)
                # A fallback is shallower, so what ends there is known by now; what ends here
                # itself is longer.
                if self._matched[node] is None:
                    self._matched[node] = self._matched[self._fallback[node]]
            level = below

    def follow(self, node: int, character: str) -> int:
        """Node of the longest suffix of the text that begins some stop, one character on."""
        while True:
            child = self._next[node].get(character)
            if child is not None:
                return child
            if node == 0:
                return 0
            node = self._fallback[node]

    def depth(self, node: int) -> int:
        """Characters of that suffix."""
        return self._depth[node]

    def matched(self, node: int) -> str | None:
        """Longest stop that ends here, or None."""
        return self._matched[node]


@dataclass(frozen=True, kw_only=True, slots=True)
class StopScan:
    """What one block of tokens came to.

    Attributes:
        num_tokens: leading tokens of the block that are kept.
        texts: per kept token, the text that became certain with it.
        stop: the stop string that ended the text, or None.
    """

    num_tokens: int
    texts: list[str]
    stop: str | None


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces, one piece per token.

    The first is the one whose last character comes first, and the longest of those that end there;
    so the text found does not depend on how tokens or steps cut it. The text ends where that stop
    begins, or with it where `include_stop_str_in_output` asks for it. The tokens kept are those up
    to and including the one that completes the stop: they are a prefix of what was generated, and
    ids, log-probabilities and usage all count them, although the last ones' text may be cut off.

    A stop wins over a length limit that the same token reaches.

    Args:
        stops: the strings, or what `StopStrings` made of them.
        include_stop_str_in_output: leave the stop in the text.

    Attributes:
        stop: the string found, or None so far; nothing may be pushed after.

    Raises:
        RequestError: as `StopStrings`.
    """

    def __init__(
        self,
        stops: StopStrings | str | Iterable[str],
        *,
        include_stop_str_in_output: bool = False,
    ) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._include = include_stop_str_in_output
        self._node = 0
        self._held = ""
        self.stop: str | None = None

    def push(self, text: str, *, can_stop: bool = True) -> str:
        """Take one token's text; return the text that became certain, possibly none.

        Args:
            text: what the token added.
            can_stop: False before `min_tokens` tokens: a stop completed here ends nothing.
        """
        assert self.stop is None, "the text has ended"
        stops = self._stops
        if not stops.strings:
            return text
        node = self._node
        for count, character in enumerate(text, 1):
            node = stops.follow(node, character)
            stop = stops.matched(node)
            if stop is not None and can_stop:
                self.stop = stop
                shown = self._held + text[:count]
                self._held = ""
                return shown if self._include else shown[: len(shown) - len(stop)]
        self._node = node
        text = self._held + text
        certain = len(text) - stops.depth(node)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Return what was held back because it might have begun a stop; the text is over."""
        held, self._held = self._held, ""
        return held

    def scan(self, texts: Sequence[str], *, num_unstoppable: int = 0) -> StopScan:
        """Take a block of tokens' texts, at most up to the one that completes a stop.

        Args:
            texts: per token, what it added.
            num_unstoppable: leading tokens that may not end the text, for `min_tokens`.
        """
        shown: list[str] = []
        for index, text in enumerate(texts):
            shown.append(self.push(text, can_stop=index >= num_unstoppable))
            if self.stop is not None:
                break
        return StopScan(num_tokens=len(shown), texts=shown, stop=self.stop)
