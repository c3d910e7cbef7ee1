"""Proposers that need no model: for tests, for measurements, and to show what the contract asks.

Only the four core verbs are defined here; every other method declines by its default.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.draft.proposer import DraftProposer
from paceline.types import ConfigError, Draft, DraftRequest

__all__ = [
    "AntiProposer",
    "NgramProposer",
    "NullProposer",
    "OracleProposer",
    "RandomProposer",
    "ScriptedProposer",
    "SimpleState",
]


@dataclass(slots=True)
class SimpleState:
    """State of the proposers here.

    Attributes:
        num_proposals: drafts that were not empty.
        num_drafted: tokens of the last draft whose verdict is out.
    """

    num_proposals: int = 0
    num_drafted: int = 0


class _SimpleProposer(DraftProposer[SimpleState]):
    """Draws up `propose` around one question: which tokens?"""

    @abstractmethod
    def guess(self, request: DraftRequest, state: SimpleState) -> list[int]:
        """Return at most `request.num_drafts` tokens; reads nothing but the request and state."""

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        """Return 0: no streams are read."""
        return 0

    def alloc_state(self) -> SimpleState:
        """Return counters at zero."""
        return SimpleState()

    def propose(self, request: DraftRequest, state: SimpleState) -> Draft:
        """Ask `guess`."""
        tokens = self.guess(request, state) if request.num_drafts > 0 else []
        state.num_drafted = len(tokens)
        if tokens:
            state.num_proposals += 1
        return Draft(tokens=tokens)

    def after_verify(self, num_accepted: int, state: SimpleState) -> None:
        """Check the count; there are no rows to forget."""
        if not 0 <= num_accepted <= state.num_drafted:
            raise ValueError(
                f"num_accepted is {num_accepted}; the last propose drafted {state.num_drafted}"
            )
        state.num_drafted = 0

    def free_state(self, state: SimpleState) -> None:
        """Do nothing: nothing is held."""


class NullProposer(_SimpleProposer):
    """Never drafts; every step is one token wide."""

    def guess(self, request: DraftRequest, state: SimpleState) -> list[int]:
        """Return no token."""
        return []


class RandomProposer(_SimpleProposer):
    """Drafts tokens drawn evenly from the vocabulary.

    The draw depends on the seed, the position and the last token only, so a sequence's drafts are
    the same in whatever batch it runs.
    """

    def __init__(self, *, seed: int, vocab_size: int) -> None:
        _require_positive("vocab_size", vocab_size)
        self._seed = seed
        self._vocab_size = vocab_size

    def guess(self, request: DraftRequest, state: SimpleState) -> list[int]:
        """Return `num_drafts` random tokens."""
        draw = random.Random(f"{self._seed} {request.position} {request.last_token}")
        return [draw.randrange(self._vocab_size) for _ in range(request.num_drafts)]


class OracleProposer(_SimpleProposer):
    """Always right, as long as a sequence follows one of the texts it was given.

    Args:
        texts: whole sequences of ids, prompt and continuation, as decoding without drafts gave
            them; where several begin with the history, the longest counts.
    """

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = sorted((list(text) for text in texts), key=len, reverse=True)

    def guess(self, request: DraftRequest, state: SimpleState) -> list[int]:
        """Return what follows the history in its text; nothing where no text begins with it."""
        history = request.history
        length = len(history)
        for text in self._texts:
            # The last id first: it refuses most other texts without comparing all of them.
            if length <= len(text) and text[length - 1] == history[-1] and text[:length] == history:
                return text[length : length + request.num_drafts]
        return []


class AntiProposer(OracleProposer):
    """Always wrong: the right tokens, each plus one modulo the vocabulary."""

    def __init__(self, texts: Sequence[Sequence[int]], *, vocab_size: int) -> None:
        if vocab_size < 2:
            raise ConfigError(f"vocab_size is {vocab_size}; allowed is at least 2")
        super().__init__(texts)
        self._vocab_size = vocab_size

    def guess(self, request: DraftRequest, state: SimpleState) -> list[int]:
        """Return the right tokens, spoiled."""
        return [(token + 1) % self._vocab_size for token in super().guess(request, state)]


class ScriptedProposer(OracleProposer):
    """Right for a scripted number of leading drafts, then wrong once, then right again.

    Args:
        texts: as for `OracleProposer`.
        accept_counts: leading drafts that shall be accepted in a sequence's first drafted step, its
            second, and so on, starting over at the end; counts beyond the drafts accept them all.
        vocab_size: to spoil a token within.
    """

    def __init__(
        self, texts: Sequence[Sequence[int]], *, accept_counts: Sequence[int], vocab_size: int
    ) -> None:
        if not accept_counts or min(accept_counts) < 0:
            raise ConfigError(
                f"accept_counts is {list(accept_counts)}; allowed are counts of at least 0, one or "
                "more"
            )
        if vocab_size < 2:
            raise ConfigError(f"vocab_size is {vocab_size}; allowed is at least 2")
        super().__init__(texts)
        self._accept_counts = list(accept_counts)
        self._vocab_size = vocab_size

    def guess(self, request: DraftRequest, state: SimpleState) -> list[int]:
        """Return the right tokens with one of them spoiled."""
        tokens = super().guess(request, state)
        right = self._accept_counts[state.num_proposals % len(self._accept_counts)]
        if right < len(tokens):
            tokens[right] = (tokens[right] + 1) % self._vocab_size
        return tokens


class NgramProposer(_SimpleProposer):
    """Prompt lookup: drafts what followed the latest earlier occurrence of the last few tokens.

    Args:
        max_ngram: longest run of last tokens to look for; the longest that occurs decides.
        min_ngram: shortest run worth a draft.
        window: how many tokens back to look.
    """

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2, window: int = 2048) -> None:
        _require_positive("min_ngram", min_ngram)
        _require_positive("window", window)
        if max_ngram < min_ngram:
            raise ConfigError(
                f"max_ngram is {max_ngram}; allowed is at least min_ngram, {min_ngram}"
            )
        self._ngrams = range(max_ngram, min_ngram - 1, -1)
        self._window = window

    def guess(self, request: DraftRequest, state: SimpleState) -> list[int]:
        """Return the tokens after the match, as many as there are."""
        text = request.history[-self._window :]
        for n in self._ngrams:
            suffix = text[-n:]
            for start in range(len(text) - n - 1, -1, -1):
                if text[start + n - 1] == suffix[-1] and text[start : start + n] == suffix:
                    return text[start + n : start + n + request.num_drafts]
        return []


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}; allowed is at least 1")
