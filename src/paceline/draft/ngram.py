"""Prompt lookup: drafts what followed the last tokens the last time they stood in the sequence.

Text that repeats itself (code being edited, records, quotations) is drafted without a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.draft.proposer import DraftProposer
from paceline.types import ConfigError, Draft, DraftRequest

__all__ = ["NgramProposer", "NgramState"]


@dataclass(slots=True, eq=False)
class NgramState:
    """Where the runs of one sequence's tokens stand; belongs to its proposer.

    Attributes:
        ends: one table per run length, longest first: run to the position behind its latest
            occurrence that something follows.
        num_indexed: positions noted as ends of runs, plus one; 0 before the first proposal.
        num_expired: starts of runs that fell out of the window.
        num_drafted: tokens of the last draft whose verdict is out.
    """

    ends: list[dict[tuple[int, ...], int]] = field(default_factory=list)
    num_indexed: int = 0
    num_expired: int = 0
    num_drafted: int = 0

    def forget(self) -> None:
        """Hold nothing."""
        self.ends = []
        self.num_indexed = self.num_expired = self.num_drafted = 0


class NgramProposer(DraftProposer[NgramState]):
    """Drafts what followed the latest earlier occurrence of the last few tokens.

    Keeps a table of runs for each sequence and adds to it only what was committed since the last
    proposal, so that a proposal costs the same however long the sequence is. Nothing that was
    drafted is noted, so a refused draft leaves no trace. Where a match is so near the end that the
    text behind it runs out, the draft goes on into itself: "a b a b" is followed by "a b a b ..".

    Reads no streams. A grammar's mask is kept for the first draft: where the table's token is not
    allowed, nothing is drafted.

    Source: prompt lookup decoding (Saxena, 2023); the table is derived.

    Args:
        max_ngram: longest run of last tokens to look for; the longest that occurs decides.
        min_ngram: shortest run worth a draft.
        window: how many tokens back a run may begin; bounds the table too.

    Raises:
        ConfigError: a number is below 1, or `max_ngram` below `min_ngram`.
    """

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2, window: int = 2048) -> None:
        for name, value in (("min_ngram", min_ngram), ("window", window)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; allowed is at least 1")
        if max_ngram < min_ngram:
            raise ConfigError(
                f"max_ngram is {max_ngram}; allowed is at least min_ngram, {min_ngram}"
            )
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.window = window
        self._lengths = range(max_ngram, min_ngram - 1, -1)

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        """Return 0: no streams are read."""
        return 0

    def alloc_state(self) -> NgramState:
        """Return empty tables."""
        return NgramState()

    def free_state(self, state: NgramState) -> None:
        """Drop the tables; a second call does nothing."""
        state.forget()

    def propose(self, request: DraftRequest, state: NgramState) -> Draft:
        """Draft `num_drafts` tokens where the last tokens stood before, none elsewhere."""
        tokens: list[int] = []
        end = self._find(request.history, state)
        if end is not None:
            tokens = _copied(request.history, end, request.num_drafts)
            if tokens and not allows(request, tokens[0]):
                tokens = []
        state.num_drafted = len(tokens)
        return Draft(tokens=tokens)

    def after_verify(self, num_accepted: int, state: NgramState) -> None:
        """Check the count; the tables hold what was committed and need no undoing.

        Raises:
            ValueError: more than the last propose drafted.
        """
        if not 0 <= num_accepted <= state.num_drafted:
            raise ValueError(
                f"num_accepted is {num_accepted}; the last propose drafted {state.num_drafted}"
            )
        state.num_drafted = 0

    def _find(self, history: list[int], state: NgramState) -> int | None:
        """Position behind the latest occurrence of the longest known run of last tokens."""
        length = len(history)
        self._note(history, state)
        earliest = length - self.window
        for n, ends in zip(self._lengths, state.ends, strict=True):
            if n < length:
                end = ends.get(tuple(history[length - n :]))
                if end is not None and end - n >= earliest:
                    return end
        return None

    def _note(self, history: list[int], state: NgramState) -> None:
        """Enter the runs that end where something now follows, and drop those out of the window."""
        length = len(history)
        if not state.ends or length < state.num_indexed:
            state.forget()
            state.ends = [{} for _ in self._lengths]
            # Runs that begin before the window would be dropped again at once.
            state.num_expired = max(0, length - self.window)
            state.num_indexed = state.num_expired + 1
        first, start = state.num_indexed, state.num_expired
        state.num_indexed = max(first, length)
        state.num_expired = max(start, length - self.window)
        for n, ends in zip(self._lengths, state.ends, strict=True):
            for end in range(max(first, start + n), length):
                ends[tuple(history[end - n : end])] = end
            for begin in range(start, min(state.num_expired, length - n)):
                run = tuple(history[begin : begin + n])
                if ends.get(run) == begin + n:
                    del ends[run]


def allows(request: DraftRequest, token: int) -> bool:
    """Whether a request's grammar allows `token` as the first draft; waits for the mask's device.

    Args:
        request: with `grammar_bitmask` int32 words, lowest bit first, or None.
        token: id asked about.
    """
    mask = request.grammar_bitmask
    if mask is None:
        return True
    words = mask.flatten()
    return token < 32 * words.shape[0] and bool((int(words[token // 32]) >> (token % 32)) & 1)


def _copied(history: list[int], end: int, count: int) -> list[int]:
    """`count` tokens from `end` on, going round where the text ends."""
    tokens = history[end : end + count]
    period = len(history) - end
    while len(tokens) < count:
        tokens.append(tokens[-period])
    return tokens
