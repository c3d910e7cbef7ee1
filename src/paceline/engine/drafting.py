"""The engine's side of the proposer contract: who is asked, what is fed, and what may not break.

Keeps each sequence's proposer state, the target's streams that the next proposal starts from, and
what a drafter has not been told yet. Knows neither schedule nor verdict rules. Whatever a proposer
drafts, returns, raises or does to what it is handed, the target's tokens stay what they are: it
works on copies, what it returns is copied, and its errors are counted and cost its drafts only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.cache.blocks import BLOCK_TOKENS
from paceline.draft.proposer import ContextFeed, DraftProposer, KvHandover
from paceline.draft.prune import prune_drafts
from paceline.engine.sequence import BatchRow, Sequence
from paceline.sampling.grammar import GrammarCursor, Words
from paceline.types import Draft, DrafterKv, DraftRequest

if TYPE_CHECKING:
    from paceline.sampling.request import Sampler

__all__ = ["MAX_FAILURES", "Drafting", "Fed", "may_draft"]

_log = logging.getLogger(__name__)

_FAILED = object()
"""What a contained call gives where the proposer raised; None is an answer of its own."""

_NOTHING = Draft(tokens=[])

_ROUNDING = 1e-6
"""How far from 1 the sum of a law may be."""

_LEAST_KEPT = 128
"""Streams kept of a stretch without drafts, whatever a proposer wants of prompts."""

MAX_FAILURES = 16
"""Failures after which a proposer is no longer asked, where nobody says otherwise."""


@dataclass(slots=True, eq=False)
class Fed:
    """A row whose sequence goes on, and where its streams stand in the step's output.

    Attributes:
        row: the row; its sequence holds by now what the step emitted.
        drafts: ids that were verified behind the row's known tokens.
        accepted: how many of them stand.
        start: first of the row's streams in the step's output.
        end: one past the last.
        ends: block ends the row passed where the drafter's rows are to be copied, rising.
        copied: by block end, the rows up to the pair before its last token; the caller's.
    """

    row: BatchRow
    drafts: list[int]
    accepted: int
    start: int
    end: int
    ends: Items[int] = ()
    copied: dict[int, DrafterKv] = field(default_factory=dict)


class _Lent(GrammarCursor):
    """A sequence's cursor as a proposer gets it: it walks on from here, and only until it answers.

    The masks stay those of the one cursor, so that nothing is computed twice.
    """

    __slots__ = ("_cursor", "_depth", "_is_open")

    def __init__(self, cursor: GrammarCursor) -> None:
        self._cursor = cursor
        self._depth = 0
        self._is_open = True

    @property
    def num_tokens(self) -> int:
        return self._cursor.num_tokens

    @property
    def error(self) -> str | None:
        return self._cursor.error

    @property
    def is_finished(self) -> bool:
        return self._cursor.is_finished

    def mask(self) -> Words:
        return self._cursor.mask()

    def advance(self, token: int) -> bool:
        if not self._is_open:
            raise ValueError("a request's grammar is walked after propose returned")
        walked = self._cursor.advance(token)
        self._depth += walked
        return walked

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._depth or not self._is_open:
            raise ValueError(
                f"{num_tokens} tokens of a grammar are taken back; this propose walked "
                f"{self._depth if self._is_open else 'none'}"
            )
        self._cursor.rollback(num_tokens)
        self._depth -= num_tokens

    def copy(self) -> GrammarCursor:
        return self._cursor.copy()

    def give_back(self) -> int:
        """End the loan; the tokens that were walked and not taken back, which are now."""
        self._is_open = False
        left, self._depth = self._depth, 0
        if left:
            self._cursor.rollback(left)
        return left


class _Shown:
    """What a proposer sees of one sequence: copies that follow it, so that no change reaches it."""

    __slots__ = ("history", "num_committed", "num_tokens", "sampler")

    def __init__(self, sequence: Sequence) -> None:
        self.history = list(sequence.tokens)
        self.num_tokens = len(self.history)
        self.sampler: Sampler | None = None
        self.num_committed = 0

    def follow(self, tokens: list[int]) -> bool:
        """Add what the sequence said since; False where the list had to be made anew."""
        known, history = self.num_tokens, self.history
        self.num_tokens = len(tokens)
        if len(history) != known:
            history[:] = tokens
            return False
        history.extend(tokens[known:])
        return True

    def sampler_of(self, sequence: Sequence) -> Sampler | None:
        """The twin of what picks the sequence's next token; made where it is first wanted."""
        if sequence.sampler is None:
            return None
        if self.sampler is None:
            self.sampler = deepcopy(sequence.sampler)
        else:
            self.sampler.commit(sequence.tokens[self.num_committed :])
        self.num_committed = len(sequence.tokens)
        return self.sampler


class Drafting:
    """Everything the engine does with its proposer.

    Args:
        proposer: whom to ask.
        vocab_size: ids a draft may hold are below it.
        max_seq_len: most tokens of a sequence.
        max_num_seqs: slots of the target's caches; streams are kept by slot.
        snapshots: copy a drafter's rows at the ends of blocks, for a cache of prefixes. A prompt's
            streams are then retained whole, since every block's end needs those before it.
        on_device: ask for drafts that stay on the device, where the proposer can leave them.
        draws: ask for drafts drawn from their laws, since they are verified by rejection.
        keep_ratio: share of a step's drafts that is verified, the least likely tails of the batch
            left out, where the proposer measures them.
        discard_below: a draft whose least probability is lower is not verified at all.
        max_failures: failures after which the proposer is switched off.

    Attributes:
        num_pruned: drafts left out for being unlikely.
        snapshots: whether rows are copied: asked for, and within the proposer's means.
        proposer: whom to ask.
        prompt_hiddens: last rows of a prompt whose streams the proposer can use.
        num_failures: calls that raised and drafts that had to be cut; each costs drafts, never
            tokens.
        is_off: whether the proposer failed so often that it is no longer asked.
        num_catchup_rows: pairs handed over after stretches in which nothing was drafted.
    """

    def __init__(
        self,
        proposer: DraftProposer[Any],
        *,
        vocab_size: int,
        max_seq_len: int,
        max_num_seqs: int,
        snapshots: bool = False,
        on_device: bool = False,
        draws: bool = False,
        keep_ratio: float = 1.0,
        discard_below: float = 0.0,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        self.proposer = proposer
        self.prompt_hiddens = proposer.prefill_hidden_rows(max_seq_len)
        self.num_failures = 0
        self.is_off = False
        self.num_catchup_rows = 0
        self._max_failures = max_failures
        self._on_device = on_device
        self._keep_ratio = keep_ratio
        self._discard_below = discard_below
        # What is measured must be known on the host before the target runs.
        self._measures = keep_ratio < 1 or discard_below > 0
        self.num_pruned = 0
        self._draws = draws
        self._embeds: torch.Tensor | None = None
        self._vocab_size = vocab_size
        self._max_num_seqs = max_num_seqs
        self._defers_prompt = proposer.prefill_uses_shared_buffers
        copies = type(proposer).snapshot_drafter_kv is not KvHandover.snapshot_drafter_kv
        self.snapshots = snapshots and copies and not self._defers_prompt
        self._group = max(1, proposer.propose_batch_max())
        self._states: dict[int, Any] = {}
        self._shown: dict[int, _Shown] = {}
        self._deferred: dict[int, list[tuple[torch.Tensor, int, int]]] = {}
        self._held_through: dict[int, int] = {}
        self._carried: dict[int, DrafterKv] = {}
        self._behind: set[int] = set()
        self._kept: torch.Tensor | None = None
        self._kept_array: npt.NDArray[np.float32] | None = None
        self._seen: torch.Tensor | None = None
        self._seen_array: npt.NDArray[np.float32] | None = None
        self._kept_from = [0] * max_num_seqs
        # A proposer that catches up is told at once what was decoded without it.
        catches_up = type(proposer).catchup_drafter is not ContextFeed.catchup_drafter
        self._ring = 1
        if catches_up:
            self._ring = min(max(self.prompt_hiddens, _LEAST_KEPT), max_seq_len)

    @property
    def name(self) -> str:
        """What drafts are counted as where they do not say who made them."""
        return type(self.proposer).__name__

    @property
    def num_states(self) -> int:
        """Sequences with a state of the proposer's."""
        return len(self._states)

    @property
    def num_kept_prompts(self) -> int:
        """Sequences whose prompt streams wait for the first propose."""
        return len(self._deferred)

    @property
    def num_carried(self) -> int:
        """Sequences that were pre-empted and whose rows wait for them."""
        return len(self._carried)

    def has_state(self, sequence: Sequence) -> bool:
        """Whether the sequence is drafted for; never once the proposer is off."""
        return sequence.id in self._states and not self.is_off

    # Sequences come and go

    def open(self, sequence: Sequence) -> None:
        """Give an admitted sequence its state, if it will ever draft, and its rows from before."""
        if sequence.id in self._states:
            return
        carried = self._carried.pop(sequence.id, None)
        state = _FAILED
        if not self.is_off and may_draft(sequence, max(1, sequence.num_emitted)):
            state = self._contained(self.proposer.alloc_state_for, sequence.budget_tokens)
        if state is _FAILED:
            if carried is not None:
                self._contained(self.proposer.free_drafter_kv, carried)
            return
        self._states[sequence.id] = state
        if carried is not None and self._install(carried, state):
            newest = self._contained(self.proposer.last_pair_key, state)
            if isinstance(newest, int):
                self._held_through[sequence.id] = newest

    def suspend(self, sequence: Sequence) -> None:
        """Put a pre-empted sequence's rows aside and free its state; `open` brings them back."""
        if sequence.id in self._states:
            kv = self._contained(self.proposer.take_drafter_kv, self._states[sequence.id])
            if isinstance(kv, DrafterKv):
                self._carried[sequence.id] = kv
        self._release(sequence)

    def close(self, sequence: Sequence) -> None:
        """Free all that is held for a sequence."""
        self._release(sequence)
        carried = self._carried.pop(sequence.id, None)
        if carried is not None:
            self._contained(self.proposer.free_drafter_kv, carried)

    def retire(self) -> None:
        """Free all states and carried rows of a proposer that is off, between two steps."""
        self._deferred.clear()
        self._held_through.clear()
        self._behind.clear()
        self._shown.clear()
        for state in self._states.values():
            self._contained(self.proposer.free_state, state)
        self._states.clear()
        for kv in self._carried.values():
            self._contained(self.proposer.free_drafter_kv, kv)
        self._carried.clear()

    def wants_rows(self, sequence: Sequence, length: int) -> bool:
        """Whether a sequence that goes on behind `length` tokens will miss rows of before.

        It will not where it never drafts, brings rows of its own, or has so much left to read that
        all the rows a proposal sees are made on the way.
        """
        return (
            not self.is_off
            and sequence.id not in self._carried
            and len(sequence.tokens) - length < self.prompt_hiddens
            and may_draft(sequence, max(1, sequence.num_emitted))
        )

    def go_on(
        self, sequence: Sequence, length: int, kv: DrafterKv | None, streams: torch.Tensor
    ) -> None:
        """Bring an open sequence's drafter to where its first `length` tokens, not run, leave it.

        Args:
            sequence: opened, and with more than `length` tokens.
            length: tokens that are restored.
            kv: rows of the pairs up to key length - 2, shared and not taken; None: there are none.
            streams: [hc_mult, hidden] of position length - 1.
        """
        if not self.has_state(sequence):
            return
        state = self._states[sequence.id]
        newest = self._contained(self.proposer.last_pair_key, state)
        if newest is None and kv is not None:
            shared = self._contained(self.proposer.share_drafter_kv, kv)
            if isinstance(shared, DrafterKv) and self._install(shared, state):
                newest = kv.last_pair_key
        if newest == length - 2:
            self._append(sequence, streams.unsqueeze(0), length - 1)
            self._held_through[sequence.id] = length - 1

    def free_rows(self, kv: DrafterKv) -> None:
        """Free copied rows."""
        self._contained(self.proposer.free_drafter_kv, kv)

    def _release(self, sequence: Sequence) -> None:
        self._deferred.pop(sequence.id, None)
        self._held_through.pop(sequence.id, None)
        self._behind.discard(sequence.id)
        self._shown.pop(sequence.id, None)
        if sequence.id in self._states:
            self._contained(self.proposer.free_state, self._states.pop(sequence.id))

    def _install(self, kv: DrafterKv, state: Any) -> bool:
        if self._contained(self.proposer.install_drafter_kv, kv, state) is True:
            return True
        self._contained(self.proposer.free_drafter_kv, kv)
        return False

    # Asking

    def propose(self, rows: Items[BatchRow]) -> list[Draft]:
        """Ask for drafts behind each row's last token, in groups the proposer can take.

        Args:
            rows: rows of one known token each, with `max_drafts` of at least 1.

        Returns:
            One draft per row, its ids checked; possibly empty.
        """
        drafts: list[Draft] = []
        for start in range(0, len(rows), self._group):
            drafts += self._propose_group(rows[start : start + self._group])
        return self._pruned(rows, drafts) if self._measures else drafts

    def _pruned(self, rows: Items[BatchRow], drafts: list[Draft]) -> list[Draft]:
        """Cut drafts, and tails of drafts, that the proposer itself gives little."""
        kept = [draft.num_tokens for draft in drafts]
        if self._discard_below > 0:
            for index, row in enumerate(rows):
                if kept[index]:
                    least = self._contained(
                        self.proposer.last_confidence, self._states[row.sequence.id]
                    )
                    if isinstance(least, float) and least < self._discard_below:
                        kept[index] = 0
        if self._keep_ratio < 1:
            measured = [
                [0.0] * count if draft.confidence is None else draft.confidence[:count]
                for draft, count in zip(drafts, kept, strict=True)
            ]
            kept = prune_drafts(measured, keep_ratio=self._keep_ratio)
        pruned: list[Draft] = []
        for row, draft, count in zip(rows, drafts, kept, strict=True):
            self.num_pruned += draft.num_tokens - count
            pruned.append(self.shortened(row.sequence, draft, count))
        return pruned

    def shortened(self, sequence: Sequence, draft: Draft, count: int) -> Draft:
        """The first `count` of a draft's tokens; no verdict follows where none are left."""
        if count == draft.num_tokens:
            return draft
        if not count:
            self.drop(sequence)
        return replace(
            draft,
            tokens=draft.tokens[:count],
            confidence=None if draft.confidence is None else draft.confidence[:count],
            laws=None if draft.laws is None else draft.laws[:count],
        )

    def _propose_group(self, rows: Items[BatchRow]) -> list[Draft]:
        for row in rows:
            self._feed_deferred(row.sequence)
            if row.sequence.id in self._behind:
                self._catch_up(row.sequence)
            row.proposed = True
        if self.is_off:
            return [_NOTHING] * len(rows)
        states = [self._states[row.sequence.id] for row in rows]
        requests = [self._request(row) for row in rows]
        try:
            answers = self._answers(requests, states)
        finally:
            for request in requests:
                if isinstance(request.grammar, _Lent) and (left := request.grammar.give_back()):
                    self._note_failure(f"propose left a grammar {left} tokens further on")
        return [
            self._checked(answer, request, state)
            for answer, request, state in zip(answers, requests, states, strict=True)
        ]

    def _answers(self, requests: list[DraftRequest], states: list[Any]) -> list[Any]:
        """What the proposer returns for each request, as it is; `_FAILED` where it raised."""
        proposer = self.proposer
        answers: Any = None
        if len(requests) > 1:
            answers = self._contained(proposer.propose_batch, requests, states)
            if isinstance(answers, list) and len(answers) != len(requests):
                self._note_failure(f"{len(answers)} drafts for {len(requests)} requests")
                return [_FAILED] * len(requests)
            if answers is _FAILED:
                # Some states may be half way; asking each again would not make them whole.
                return [_FAILED] * len(requests)
        if isinstance(answers, list):
            return answers
        return [
            _FAILED if self.is_off else self._propose_one(request, state)
            for request, state in zip(requests, states, strict=True)
        ]

    def _request(self, row: BatchRow) -> DraftRequest:
        sequence = row.sequence
        # Only ids that are chosen without the host's help can stay where the host does not see.
        stays = self._on_device and sequence.picks_largest and not self._measures
        shown = self._shown.get(sequence.id)
        if shown is None:
            shown = self._shown[sequence.id] = _Shown(sequence)
        elif not shown.follow(sequence.tokens):
            self._note_failure("request.history was made longer or shorter")
        sampler = None
        if not sequence.picks_largest:
            sampler = self._contained(shown.sampler_of, sequence)
            if sampler is _FAILED:
                sampler = shown.sampler = deepcopy(sequence.sampler)
                shown.num_committed = len(sequence.tokens)
        return DraftRequest(
            last_token=sequence.tokens[-1],
            position=len(sequence.tokens) - 1,
            target_hidden=self._kept_row(sequence, len(sequence.tokens) - 2),
            num_drafts=row.max_drafts,
            history=shown.history,
            draft_embed_target=self._embed_target(sequence) if stays else None,
            sampler=sampler,
            draws=self._draws,
            grammar=None if sequence.grammar is None else _Lent(sequence.grammar),
        )

    def _propose_one(self, request: DraftRequest, state: Any) -> Any:
        draft = self._contained(self.proposer.propose, request, state)
        deferred = request.draft_embed_target is not None
        if deferred and isinstance(draft, Draft) and not draft.num_tokens:
            # A proposer may have left one id where only it can read it.
            token = self._contained(self.proposer.read_deferred_draft_token)
            if isinstance(token, int):
                return replace(draft, tokens=[token])
        return draft

    def _embed_target(self, sequence: Sequence) -> torch.Tensor:
        assert self._kept is not None, "nothing was kept before a proposal"
        if self._embeds is None:
            shape = (self._max_num_seqs, self._kept.shape[-1])
            self._embeds = torch.zeros(shape, dtype=self._kept.dtype, device=self._kept.device)
        return self._embeds[sequence.handle.slot]

    def _checked(self, draft: Any, request: DraftRequest, state: Any) -> Draft:
        """A copy of a draft, cut to its leading tokens that can be verified.

        A copy, since the proposer may keep what it returned and change it before the verdict.
        """
        if draft is _FAILED:
            return _NOTHING
        if not isinstance(draft, Draft) or not isinstance(draft.tokens, list):
            self._note_failure(f"{draft!r:.80} where a Draft with a list of ids is due")
            return _NOTHING
        tokens, source = list(draft.tokens), draft.source
        if source is not None and type(source) is not str:
            source = None
        left = draft.device_tokens
        if left is not None:
            if not isinstance(left, torch.Tensor) or left.dtype != torch.int64 or left.dim() != 1:
                self._note_failure(f"{left!r:.80} where device_tokens of [n] int64 are due")
                return _NOTHING
            if request.draft_embed_target is not None:
                if left.shape[0] > request.num_drafts:
                    self._note_failure(f"{left.shape[0]} drafts; allowed are {request.num_drafts}")
                    left = left[: request.num_drafts]
                return Draft(tokens=[], device_tokens=left, source=source)
            tokens = left.tolist()
            if -1 in tokens:
                del tokens[tokens.index(-1) :]
                if not tokens:
                    self._contained(self.proposer.after_verify, 0, state)
        vocab, good = self._vocab_size, 0
        for token in tokens[: request.num_drafts]:
            # A subclass of int could say what it likes when it is compared with the target's id.
            if type(token) is not int or not 0 <= token < vocab:
                break
            good += 1
        if good < len(tokens):
            if good < request.num_drafts:
                self._note_failure(f"draft id {tokens[good]!r}; allowed are ids 0 to {vocab - 1}")
            else:
                self._note_failure(f"{len(tokens)} drafts; allowed are {request.num_drafts}")
            if not good:
                self._contained(self.proposer.after_verify, 0, state)
            del tokens[good:]
        confidence = laws = None
        if draft.confidence is not None and self._measures:
            confidence = self._contained(_floats, draft.confidence, good)
        if draft.laws is not None and self._draws:
            laws = self._contained(_laws, draft.laws, good, vocab)
        return Draft(
            tokens=tokens,
            confidence=None if confidence is _FAILED else confidence,
            # A draft without a law counts as chosen, which keeps the target's law whatever it was.
            laws=None if laws is _FAILED else laws,
            source=source,
        )

    def drop(self, sequence: Sequence) -> None:
        """Take back a draft that no verdict will follow."""
        self.after_verify(sequence, 0)

    def after_verify(self, sequence: Sequence, num_accepted: int) -> None:
        """Hand over the verdict on a draft that was not empty."""
        if sequence.id in self._states:
            state = self._states[sequence.id]
            self._contained(self.proposer.after_verify, num_accepted, state)

    # Feeding

    def hiddens_wanted(self, row: BatchRow, num_drafts: int) -> int:
        """Say how many of a row's last streams are needed, drafts' rows included."""
        sequence = row.sequence
        if not self.has_state(sequence):
            return 0
        if not row.reads:
            goes_on = self.snapshots or may_draft(sequence, sequence.num_emitted + 1)
            return 1 + num_drafts if goes_on else 0
        last = row.first + row.width
        wanted = max(row.first, 0 if self.snapshots else row.known - self.prompt_hiddens)
        held = self._held_through.get(sequence.id)
        if held is not None:
            wanted = max(wanted, held + 1)
        # A proposal begins with the streams of the last known token but one, or of the last.
        return max(1 if last >= row.known - 1 else 0, last - wanted)

    def feed(self, going: Items[Fed], hiddens: torch.Tensor) -> None:
        """Hand the drafter the target's own streams of what was committed.

        What the next proposal starts from is copied first: the step's output is dead at the next
        forward, and a drafter may use the same memory.

        Args:
            going: rows whose sequences go on, each with a state and streams.
            hiddens: [H, hc_mult, hidden], the step's output.
        """
        for fed in going:
            self._keep(fed, hiddens)
        caught: list[Fed] = []
        for fed in going:
            if fed.row.reads:
                self._feed_known(fed, hiddens[fed.start : fed.end])
                continue
            # Without a proposal the pair before these is lacking too; all of them come later.
            if fed.accepted and fed.row.proposed:
                caught.append(fed)
            if not fed.row.proposed and self._ring > 1:
                self._behind.add(fed.row.sequence.id)
        for start in range(0, len(caught), self._group):
            group = caught[start : start + self._group]
            self._contained(
                self.proposer.catchup_batch,
                [fed.drafts[: fed.accepted] for fed in group],
                [hiddens[fed.start : fed.start + fed.accepted] for fed in group],
                [fed.row.first + 1 for fed in group],
                [self._states[fed.row.sequence.id] for fed in group],
            )
        for fed in going:
            if not fed.row.reads:
                for end in fed.ends:
                    if fed.row.sequence.id in self._behind:
                        self._catch_up(fed.row.sequence)
                    self._copy_rows(fed, end)

    def _copy_rows(self, fed: Fed, end: int) -> None:
        """Copy the rows that `end` tokens leave, if they are all that a proposal can see."""
        state = self._states[fed.row.sequence.id]
        kv = self._contained(self.proposer.snapshot_drafter_kv, state, end - 2)
        if not isinstance(kv, DrafterKv):
            return
        whole = min(end - 1, self.prompt_hiddens - 1)
        if kv.last_pair_key == end - 2 and kv.rows >= whole:
            fed.copied[end] = kv
        else:
            self.free_rows(kv)

    def _keep(self, fed: Fed, hiddens: torch.Tensor) -> None:
        """Copy the committed rows' streams, by position modulo the ring."""
        row, ring = fed.row, self._ring
        slot = row.sequence.handle.slot
        if self._kept is None:
            self._kept = self._kept_memory(hiddens)
        committed = row.first + row.width + fed.accepted
        end = fed.end - len(fed.drafts) + fed.accepted
        count = 1 + min(fed.accepted, ring - 1)
        if row.reads:
            self._kept_from[slot] = committed - 1
            count = 1
        array = self._kept_array
        if array is None:
            for back in range(1, count + 1):
                self._kept[slot, (committed - back) % ring].copy_(hiddens[end - back])
            return
        if hiddens is not self._seen or self._seen_array is None:
            self._seen, self._seen_array = hiddens, hiddens.numpy()
        for back in range(1, count + 1):
            array[slot, (committed - back) % ring] = self._seen_array[end - back]

    def _kept_memory(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self._max_num_seqs, self._ring, *like.shape[-2:])
        kept = torch.zeros(shape, dtype=like.dtype, device=like.device)
        if like.dtype == torch.float32 and like.device.type == "cpu" and not self._on_device:
            # The same memory, at a fraction of the cost of three calls of torch in every step.
            self._kept_array = kept.numpy()
        return kept

    def _kept_row(self, sequence: Sequence, position: int) -> torch.Tensor:
        assert self._kept is not None, "nothing was kept before a proposal"
        return self._kept[sequence.handle.slot, position % self._ring]

    def _catch_up(self, sequence: Sequence) -> None:
        """Tell the drafter of the pairs that came while it was not asked, as far as they matter."""
        self._behind.discard(sequence.id)
        state = self._states[sequence.id]
        newest = self._contained(self.proposer.last_pair_key, state)
        if newest is _FAILED or self._kept is None:
            return
        if newest is not None and not isinstance(newest, int):
            self._note_failure(
                f"last_pair_key returned {newest!r:.80}; allowed are an int and None"
            )
            return
        slot, position = sequence.handle.slot, len(sequence.tokens) - 1
        # Keys up to position - 2; the pair of the token sampled last is the propose's own.
        oldest = max(self._kept_from[slot], position - self._ring)
        first = oldest if newest is None else max(oldest, newest + 1)
        if first < position - 1:
            begin, end = first % self._ring, (position - 1) % self._ring
            ring = self._kept[slot]
            if begin < end:
                self._append(sequence, ring[begin:end], first)
            elif self._kept_array is not None:
                # So large a copy by torch would wake its own threads, which then spin.
                parts = self._kept_array[slot, begin:], self._kept_array[slot, :end]
                self._append(sequence, torch.from_numpy(np.concatenate(parts)), first)
            else:
                self._append(sequence, torch.cat((ring[begin:], ring[:end])), first)

    def _append(self, sequence: Sequence, streams: torch.Tensor, first: int) -> None:
        """Append the pairs of `streams`, which stand at positions first and on."""
        state = self._states[sequence.id]
        held = self._contained(self.proposer.drafter_rows, state)
        if held is _FAILED:
            return
        written = self._contained(
            self.proposer.catchup_drafter,
            sequence.tokens[first + 1 : first + 1 + streams.shape[0]],
            streams,
            held,
            first + 1,
            state,
        )
        if isinstance(written, int):
            self.num_catchup_rows += written

    def _feed_known(self, fed: Fed, hiddens: torch.Tensor) -> None:
        row = fed.row
        sequence = row.sequence
        last = row.first + row.width
        first = last - hiddens.shape[0]
        # The last known token's pair waits for the token sampled from it.
        stop = min(last, row.known - 1)
        if self._defers_prompt:
            if first < stop:
                waiting = self._deferred.setdefault(sequence.id, [])
                waiting.append((hiddens[: stop - first].clone(), first, row.known))
            return
        if not self.snapshots:
            if first < stop:
                self._feed_pairs(sequence, hiddens[: stop - first], first, row.known)
            return
        # In pieces that end where rows are copied: a drafter holds no more than a window of them.
        start = first
        for end in range((row.first // BLOCK_TOKENS + 1) * BLOCK_TOKENS, last + 1, BLOCK_TOKENS):
            if start < end - 1:
                piece = hiddens[start - first : end - 1 - first]
                self._feed_pairs(sequence, piece, start, end)
                start = end - 1
            if end in fed.ends:
                self._copy_rows(fed, end)
        if start < stop:
            piece = hiddens[start - first : stop - first]
            self._feed_pairs(sequence, piece, start, stop + 1)

    def _feed_deferred(self, sequence: Sequence) -> None:
        for hiddens, first, known in self._deferred.pop(sequence.id, ()):
            self._feed_pairs(sequence, hiddens, first, known)

    def _feed_pairs(
        self, sequence: Sequence, hiddens: torch.Tensor, first: int, known: int
    ) -> None:
        held = self._held_through.get(sequence.id)
        if held is None:
            self._contained(
                self.proposer.prefill_drafter,
                sequence.tokens[:known],
                hiddens,
                self._states[sequence.id],
                first_position=first,
            )
            return
        skip = max(0, held + 1 - first)
        if skip < hiddens.shape[0]:
            self._append(sequence, hiddens[skip:], first + skip)
            self._held_through[sequence.id] = first + hiddens.shape[0] - 1

    # What a proposer may not break

    def _contained(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call the proposer; a raised error costs its answer and nothing else."""
        try:
            return call(*args, **named)
        except Exception as error:
            name = getattr(call, "__name__", "a call")
            self._note_failure(f"{name} raised {type(error).__name__}: {error}")
            return _FAILED

    def _note_failure(self, what: str) -> None:
        if not self.num_failures:
            _log.warning(
                "the proposer %s: %s; its drafts are dropped, the text is not affected (said once)",
                type(self.proposer).__name__,
                what,
            )
        self.num_failures += 1
        if self.num_failures >= self._max_failures and not self.is_off:
            self.is_off = True
            _log.error(
                "the proposer %s failed %d times and is switched off; decoding goes on without",
                type(self.proposer).__name__,
                self.num_failures,
            )


def _floats(given: list[float], count: int) -> list[float]:
    """The first `count` measures of a draft.

    Raises:
        ValueError: there are fewer, or one is no number.
    """
    measures = [float(each) for each in given[:count]]
    if len(measures) < count:
        raise ValueError(f"confidence has {len(measures)} numbers for {count} drafts")
    return measures


def _laws(
    given: list[npt.NDArray[np.float64] | None], count: int, vocab_size: int
) -> list[npt.NDArray[np.float64] | None]:
    """Copies of the laws of the first `count` drafts.

    Raises:
        ValueError: there are fewer, or one is no law over the vocabulary.
    """
    laws: list[npt.NDArray[np.float64] | None] = []
    for law in given[:count]:
        copied = None if law is None else np.array(law, dtype=np.float64)
        if copied is not None and (
            copied.shape != (vocab_size,) or not abs(copied.sum() - 1) < _ROUNDING
        ):
            raise ValueError(f"a law has shape {copied.shape} and sums to {copied.sum()}")
        laws.append(copied)
    if len(laws) < count:
        raise ValueError(f"laws has {len(laws)} entries for {count} drafts")
    return laws


def may_draft(sequence: Sequence, emitted: int) -> bool:
    """Whether a step that begins with so many tokens emitted could use a draft."""
    return sequence.max_drafts > 0 and sequence.max_emitted - emitted > 1
