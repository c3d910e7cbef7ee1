"""A request in progress, and the rows a step gives it. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from paceline.cache.state import SequenceCache
from paceline.types import BlockId, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from paceline.sampling.grammar import GrammarCursor, Words
    from paceline.sampling.request import Sampler

__all__ = ["Admission", "Batch", "BatchRow", "PrefixHit", "Sequence", "TextEnd"]


class TextEnd(Protocol):
    """Reads what a request says and knows when its text has ended, by a stop string say."""

    def scan(self, token_ids: Items[int], *, num_unstoppable: int) -> int | None:
        """Take the tokens that come next; called once for each step that emits some.

        Args:
            token_ids: what the step would emit.
            num_unstoppable: leading ones that may not end the text.

        Returns:
            How many are kept where the text ends among them, at least 1, or None: it goes on.
        """
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One request: its tokens, its limits and its handle on the caches.

    No proposer's state is here: that lives with the engine's drafting, by `id`.

    Attributes:
        id: the engine's number for the request, never used twice.
        tokens: prompt, then what was emitted; grows only.
        prompt_len: tokens of the prompt, at least 1.
        params: how it is decoded.
        max_emitted: tokens it may emit: `params.max_tokens`, cut where the context limit is nearer.
        stop_ids: ids that end it.
        max_drafts: most drafts one of its steps may verify; 0: none ever.
        adapts: whether each step's number is chosen by what pays, up to `max_drafts`.
        cache: its rows in the pools from admission to its end, else None.
        num_cached: tokens of the prompt that a cache of prefixes had when it was first admitted;
            None before.
        sampler: what picks its tokens; kept through pre-emption, since it holds the history.
        grammar: what it must follow, standing behind its last token, or None.
        text_end: who ends it by its text, or None.
        prompt_logprobs: those of the prompt's ids that were computed so far, or None where nobody
            wants them.
    """

    id: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    max_emitted: int
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    max_drafts: int = 0
    adapts: bool = False
    cache: SequenceCache | None = None
    num_cached: int | None = None
    sampler: Sampler | None = None
    grammar: GrammarCursor | None = None
    text_end: TextEnd | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    _largest: bool = field(default=False, init=False, repr=False)

    @property
    def num_emitted(self) -> int:
        """Tokens emitted so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def budget_tokens(self) -> int:
        """Most tokens it can ever hold, prompt included."""
        return self.prompt_len + self.max_emitted

    @property
    def needs_prompt_rows(self) -> bool:
        """Whether rows of the prompt have to run although their caches may be kept somewhere."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len

    @property
    def picks_largest(self) -> bool:
        """Whether this and every later token is the model's largest logit."""
        if not self._largest:
            self._largest = self.grammar is None and (
                self.sampler is None or self.sampler.is_argmax
            )
        return self._largest

    @property
    def handle(self) -> SequenceCache:
        """The cache handle of an admitted sequence."""
        assert self.cache is not None, f"sequence {self.id} is not admitted"
        return self.cache


@dataclass(slots=True, eq=False)
class BatchRow:
    """What one step computes of one sequence.

    Attributes:
        sequence: whose.
        first: position of the first row, the sequence's committed length.
        width: known tokens to run: a piece of what is to be read, or the one emitted last.
        known: tokens the sequence had when the row was made.
        reads: whether it reads known tokens (a prompt, or anew what was pre-empted) rather than
            decodes behind the token emitted last.
        max_drafts: drafts that may be verified behind them; 0 where it reads.
        proposed: whether a proposer was asked for this row.
        num_fed: last rows, drafts included, whose streams the drafting wants.
        masks: what the grammar allows in each row that is verified; None without a grammar.
    """

    sequence: Sequence
    first: int
    width: int
    known: int
    reads: bool
    max_drafts: int = 0
    proposed: bool = False
    num_fed: int = 0
    masks: list[Words] | None = None

    @property
    def emits(self) -> bool:
        """Whether the step's last row is the sequence's last known token, so that one follows."""
        return self.first + self.width == self.known


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """The beginning of a sequence that need not be computed.

    Attributes:
        length: tokens of it, fewer than the sequence has.
        blocks: their blocks in order, each held once for whoever gets the hit.
        snapshot: what else the tokens left behind; for its maker to read, and whole for as long as
            somebody refers to it.
    """

    length: int
    blocks: list[BlockId]
    snapshot: object


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that was given a slot, and what it need not compute.

    Attributes:
        sequence: whose handle is new; none of its rows ran yet.
        hit: what its handle begins with, or None.
    """

    sequence: Sequence
    hit: PrefixHit | None


@dataclass(slots=True, eq=False)
class Batch:
    """The rows of one step, at most one per sequence, and who came and went before it.

    Attributes:
        rows: what to run.
        admitted: sequences that were given a slot, for the first time or again.
        preempted: sequences that lost theirs and wait at the head of the queue.
        adapts: whether a policy chose the drafts, and wants to hear of the step.
    """

    rows: list[BatchRow]
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    adapts: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the forward if every draft that may be verified is given."""
        return sum(row.width + row.max_drafts for row in self.rows)
