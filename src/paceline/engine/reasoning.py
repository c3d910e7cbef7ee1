"""A reasoning budget as a cursor, so that masks and drafts follow it like a grammar."""

from __future__ import annotations

from paceline.sampling.grammar import GrammarCursor, Words, words_of
from paceline.text.reasoning import ReasoningBudget

__all__ = ["BudgetedCursor"]


class BudgetedCursor(GrammarCursor):
    """Everything is allowed, or what a grammar allows, until a budget is spent.

    Then the end marker is the only id, which is so drafted for free.

    Args:
        budget: before its first token; taken over.
        vocab_size: ids of a mask.
        inner: the cursor of what the answer follows besides, before its first id; taken over.
    """

    def __init__(
        self, budget: ReasoningBudget, *, vocab_size: int, inner: GrammarCursor | None = None
    ) -> None:
        self._budget = budget
        self._inner = inner
        self._vocab_size = vocab_size
        self._all = words_of(range(vocab_size), vocab_size)
        self._end = words_of([budget.end_id], vocab_size)

    @property
    def num_tokens(self) -> int:
        """Tokens walked."""
        return self._budget.num_tokens

    @property
    def error(self) -> str | None:
        """Why the grammar allows nothing."""
        return None if self._inner is None else self._inner.error

    @property
    def is_finished(self) -> bool:
        """Whether the grammar is; a budget ends no answer."""
        return self._inner is not None and self._inner.is_finished

    def mask(self) -> Words:
        """Return the end marker's mask where the budget is spent, else what else allows."""
        if self._budget.forced() is not None:
            return self._end
        return self._all if self._inner is None else self._inner.mask()

    def advance(self, token: int) -> bool:
        """Walk over an id."""
        if not self._budget.allows(token) or not 0 <= token < self._vocab_size:
            return False
        if self._inner is not None and not self._inner.advance(token):
            return False
        self._budget.advance(token)
        return True

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens walked."""
        self._budget.rollback(num_tokens)
        if self._inner is not None:
            self._inner.rollback(num_tokens)

    def copy(self) -> GrammarCursor:
        """Return another one at the same place."""
        inner = None if self._inner is None else self._inner.copy()
        return BudgetedCursor(self._budget.copy(), vocab_size=self._vocab_size, inner=inner)
