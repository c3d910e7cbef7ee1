"""A limit on reasoning tokens, walked like a grammar's cursor; forces an id and masks nothing."""

from __future__ import annotations

from paceline.types import RequestError

__all__ = ["ReasoningBudget"]


class ReasoningBudget:
    """Where a sequence stands with its reasoning, token by token, with the way back.

    Tokens between a begin and the next end marker are reasoning; the markers are not. Once `budget`
    of them have come, in all sections together, the end marker is the only token allowed. A drafted
    block is walked with `advance` and undone with `rollback`, so every row knows what is forced
    there, and the budget holds for any number of drafts.

    Memory grows with the markers seen and not with the tokens.

    Args:
        begin_id: id of the marker that begins reasoning.
        end_id: id of the marker that ends it.
        budget: most reasoning tokens, 0 or more.
        in_reasoning: the prompt ends within reasoning.

    Raises:
        RequestError: the budget is no integer or negative, or the markers are the same.
    """

    def __init__(
        self, *, begin_id: int, end_id: int, budget: int, in_reasoning: bool = False
    ) -> None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
            raise RequestError(
                f"the reasoning budget is {budget!r}; allowed is an integer of at least 0"
            )
        if begin_id == end_id:
            raise RequestError(
                f"reasoning begins and ends with the id {begin_id}; two ids are needed"
            )
        self.begin_id = begin_id
        self.end_id = end_id
        self.budget = budget
        self._num_tokens = 0
        # (tokens walked, in reasoning from here on, reasoning tokens so far), at each change.
        self._changes = [(0, in_reasoning, 0)]

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token is reasoning, if it is not a marker."""
        return self._changes[-1][1]

    @property
    def num_tokens(self) -> int:
        """Tokens walked."""
        return self._num_tokens

    @property
    def num_used(self) -> int:
        """Reasoning tokens so far."""
        since, inside, used = self._changes[-1]
        return used + (self._num_tokens - since if inside else 0)

    def forced(self) -> int | None:
        """Return the id that must come now, or None where any may."""
        return self.end_id if self.in_reasoning and self.num_used >= self.budget else None

    def allows(self, token_id: int) -> bool:
        """Whether a token may come now."""
        return self.forced() in (None, token_id)

    def advance(self, token_id: int) -> None:
        """Walk over a token.

        Raises:
            ValueError: another one is forced; nothing has changed then.
        """
        if not self.allows(token_id):
            raise ValueError(
                f"token {token_id} after {self.num_used} reasoning tokens; allowed is "
                f"{self.end_id} alone"
            )
        inside, used = self.in_reasoning, self.num_used
        self._num_tokens += 1
        if inside and token_id == self.end_id:
            self._changes.append((self._num_tokens, False, used))
        elif not inside and token_id == self.begin_id:
            self._changes.append((self._num_tokens, True, used))

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens walked.

        Raises:
            ValueError: fewer were walked; nothing has changed then.
        """
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"{num_tokens} tokens to go back; allowed are 0 to {self._num_tokens}")
        self._num_tokens -= num_tokens
        while self._changes[-1][0] > self._num_tokens:
            self._changes.pop()

    def copy(self) -> ReasoningBudget:
        """Return another one that stands at the same place and walks on by itself."""
        other = ReasoningBudget(begin_id=self.begin_id, end_id=self.end_id, budget=self.budget)
        other._num_tokens = self._num_tokens
        other._changes = list(self._changes)
        return other
