"""Two drafters behind one door: a lookup where the text repeats itself, a head elsewhere.

The pairs of the drawing in `paceline.draft.proposer` decide what the head has to be told. A propose
of the head writes key P - 1; `catchup_batch` gives keys P .. P + accepted - 1. So where the lookup
drafts in its place, key P - 1, and that one alone, would be missing. It is handed over at once,
while the streams it is made from are there, and the head's rows stay those of a fresh prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from paceline.draft.proposer import DraftBinding, DraftProposer, DraftRunner
from paceline.types import ConfigError, Draft, DrafterKv, DraftRequest, PairKey

if TYPE_CHECKING:
    import torch

__all__ = ["CombinedProposer", "CombinedState"]

L = TypeVar("L")
H = TypeVar("H")


@dataclass(slots=True, eq=False)
class CombinedState(Generic[L, H]):
    """Both drafters' states of one sequence.

    Attributes:
        lookup: the lookup's.
        head: the head's.
        by_lookup: whether the last draft was the lookup's.
    """

    lookup: L
    head: H
    by_lookup: bool = False


class CombinedProposer(DraftProposer[CombinedState[L, H]], Generic[L, H]):
    """Asks the lookup first and the head only where it has nothing to say.

    A lookup's draft costs no forward and, after a long match, is seldom wrong; how long the match
    must be is the lookup's own setting (`NgramProposer.min_ngram`). A lookup draft that is shorter
    than asked is left to the head. Everything the head learns from the target it goes on learning.
    In a batch the head runs once, for the sequences that need it.

    Drafts carry the name of their maker in `Draft.source`.

    Args:
        lookup: a drafter that reads ids only.
        head: any other drafter; facts, batching, context, handover and capture are its.
        lookup_name: what the lookup's drafts are counted as.
        head_name: what the head's are, where it does not say.

    Attributes:
        lookup, head: the drafters.
        block_gamma, needs_comm, prefill_uses_shared_buffers: the head's.

    Raises:
        ConfigError: the lookup wants streams or contains collectives, which only one of two can
            have.
    """

    def __init__(
        self,
        lookup: DraftProposer[L],
        head: DraftProposer[H],
        *,
        lookup_name: str = "ngram",
        head_name: str = "mtp",
    ) -> None:
        if lookup.prefill_hidden_rows(1) or lookup.needs_comm or lookup.block_gamma is not None:
            raise ConfigError(
                f"the lookup is a {type(lookup).__name__}, which reads streams, needs other ranks "
                "or drafts in blocks; allowed is a drafter that reads ids only "
                "(prefill_hidden_rows 0, needs_comm False, block_gamma None)"
            )
        self.lookup = lookup
        self.head = head
        self.block_gamma = head.block_gamma
        self.needs_comm = head.needs_comm
        self.prefill_uses_shared_buffers = head.prefill_uses_shared_buffers
        self._names = (lookup_name, head_name)
        self._head_was_last = True

    # Facts

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        """Ask for the streams the head wants."""
        return self.head.prefill_hidden_rows(max_seq_len)

    # Core

    def alloc_state(self) -> CombinedState[L, H]:
        """Take a state of each."""
        return self._beside(self.head.alloc_state(), self.lookup.alloc_state)

    def alloc_state_for(self, budget_tokens: int) -> CombinedState[L, H]:
        """Take a state of each for so many tokens."""
        return self._beside(
            self.head.alloc_state_for(budget_tokens),
            lambda: self.lookup.alloc_state_for(budget_tokens),
        )

    def _beside(self, head: H, alloc_lookup: Callable[[], L]) -> CombinedState[L, H]:
        try:
            return CombinedState(alloc_lookup(), head)
        except BaseException:
            self.head.free_state(head)
            raise

    def free_state(self, state: CombinedState[L, H]) -> None:
        """Free both; a second call does nothing."""
        self.lookup.free_state(state.lookup)
        self.head.free_state(state.head)

    def propose(self, request: DraftRequest, state: CombinedState[L, H]) -> Draft:
        """Return the lookup's draft where there is a whole one, else the head's."""
        draft = self._look_up(request, state)
        if draft is not None:
            self._tell_head(request, state)
            return draft
        self._head_was_last = True
        return self._named(self.head.propose(request, state.head))

    def after_verify(self, num_accepted: int, state: CombinedState[L, H]) -> None:
        """Tell the one whose draft it was.

        Raises:
            ValueError: more than it drafted.
        """
        if state.by_lookup:
            self.lookup.after_verify(num_accepted, state.lookup)
        else:
            self.head.after_verify(num_accepted, state.head)

    def last_confidence(self, state: CombinedState[L, H]) -> float | None:
        """Return what the drafter of the last draft measured."""
        if state.by_lookup:
            return self.lookup.last_confidence(state.lookup)
        return self.head.last_confidence(state.head)

    # Batching

    def propose_batch(
        self, requests: Sequence[DraftRequest], states: Sequence[CombinedState[L, H]]
    ) -> list[Draft] | None:
        """Look every sequence up, and ask the head once for the rest.

        Declined where the head takes no batch, before anything is touched.
        """
        if self.head.propose_batch_max() <= 1:
            return None
        drafts = [
            self._look_up(request, state) for request, state in zip(requests, states, strict=True)
        ]
        rest = [i for i, draft in enumerate(drafts) if draft is None]
        asked, theirs = [requests[i] for i in rest], [states[i].head for i in rest]
        answers = self.head.propose_batch(asked, theirs) if len(rest) > 1 else None
        if answers is None:
            answers = [self.head.propose(*each) for each in zip(asked, theirs, strict=True)]
        for i, answer in zip(rest, answers, strict=True):
            drafts[i] = self._named(answer)
        for request, state in zip(requests, states, strict=True):
            if state.by_lookup:
                self._tell_head(request, state)
        self._head_was_last = bool(rest)
        return [draft for draft in drafts if draft is not None]

    def propose_batch_max(self) -> int:
        """Return the head's widest batch."""
        return self.head.propose_batch_max()

    # Context

    def prefill_drafter(
        self,
        prompt_tokens: Sequence[int],
        hiddens: torch.Tensor,
        state: CombinedState[L, H],
        *,
        first_position: int = 0,
    ) -> int:
        """Feed the head."""
        return self.head.prefill_drafter(
            prompt_tokens, hiddens, state.head, first_position=first_position
        )

    def catchup_drafter(
        self,
        tokens: Sequence[int],
        hiddens: torch.Tensor,
        row_base: int,
        pos_base: int,
        state: CombinedState[L, H],
    ) -> int:
        """Feed the head."""
        return self.head.catchup_drafter(tokens, hiddens, row_base, pos_base, state.head)

    def catchup_batch(
        self,
        tokens: Sequence[Sequence[int]],
        hiddens: Sequence[torch.Tensor],
        first_pos: Sequence[int],
        states: Sequence[CombinedState[L, H]],
    ) -> int:
        """Feed the head, whoever drafted what was accepted."""
        return self.head.catchup_batch(tokens, hiddens, first_pos, [s.head for s in states])

    def drafter_rows(self, state: CombinedState[L, H]) -> int:
        """Return the head's rows."""
        return self.head.drafter_rows(state.head)

    def last_pair_key(self, state: CombinedState[L, H]) -> PairKey | None:
        """Return the head's newest key."""
        return self.head.last_pair_key(state.head)

    # Handover

    def take_drafter_kv(self, state: CombinedState[L, H]) -> DrafterKv | None:
        """Move the head's rows out; the lookup needs nothing but the ids."""
        return self.head.take_drafter_kv(state.head)

    def install_drafter_kv(self, kv: DrafterKv, state: CombinedState[L, H]) -> bool:
        """Move rows into the head."""
        return self.head.install_drafter_kv(kv, state.head)

    def free_drafter_kv(self, kv: DrafterKv) -> None:
        """Let the head release rows."""
        self.head.free_drafter_kv(kv)

    def snapshot_drafter_kv(self, state: CombinedState[L, H], through_key: int) -> DrafterKv | None:
        """Copy the head's rows."""
        return self.head.snapshot_drafter_kv(state.head, through_key)

    def share_drafter_kv(self, kv: DrafterKv) -> DrafterKv | None:
        """Share the head's rows."""
        return self.head.share_drafter_kv(kv)

    # Capture

    def circuit_draft(self) -> DraftBinding | None:
        """Describe the head's step."""
        return self.head.circuit_draft()

    def set_circuit_draft(self, runner: DraftRunner | None) -> None:
        """Run `runner` in place of the head's forward."""
        self.head.set_circuit_draft(runner)

    def read_deferred_draft_token(self) -> int | None:
        """Fetch the head's id where the last draft was the head's, else None."""
        return self.head.read_deferred_draft_token() if self._head_was_last else None

    # Whose turn it is

    def _look_up(self, request: DraftRequest, state: CombinedState[L, H]) -> Draft | None:
        """The lookup's draft if it is as long as wanted; marks the state as its own."""
        state.by_lookup = False
        draft = self.lookup.propose(request, state.lookup)
        if draft.num_tokens and draft.num_tokens >= request.num_drafts:
            state.by_lookup = True
            return draft if draft.source else replace(draft, source=self._names[0])
        if draft.num_tokens:
            self.lookup.after_verify(0, state.lookup)
        return None

    def _tell_head(self, request: DraftRequest, state: CombinedState[L, H]) -> None:
        """Give the head the pair of the token sampled last, which its propose would have written.

        The streams are dead at the next target step, so this cannot wait for the verdict.
        """
        self._head_was_last = False
        self.head.catchup_drafter(
            (request.last_token,),
            request.target_hidden[None],
            self.head.drafter_rows(state.head),
            request.position,
            state.head,
        )

    def _named(self, draft: Draft) -> Draft:
        return draft if draft.source else replace(draft, source=self._names[1])
