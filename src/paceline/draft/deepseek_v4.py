"""DeepSeek-V4's own draft head, recursed for as many drafts as are wanted.

The head owns a ring of rows by pair key (drawn in `paceline.draft.proposer`) for each sequence and
the integers that say which of them count. It knows neither engine nor target: what it needs of the
target's streams it is handed, and copies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.cache.drafter import DrafterRing
from paceline.config import ModelConfig
from paceline.draft.chain import Columns, DraftChain, DraftScorer
from paceline.draft.proposer import DraftBinding, DraftProposer, DraftRunner, DraftShape
from paceline.draft.verify import race_rows
from paceline.models.step import ChainingMtpBlock, MtpBlock, MtpInputs
from paceline.ops.dense import DenseWeight
from paceline.sampling.grammar import GrammarCursor
from paceline.sampling.request import NON_FINITE, NOTHING_ALLOWED
from paceline.types import (
    MAX_NUM_DRAFTS,
    ConfigError,
    Draft,
    DrafterKv,
    DraftRequest,
    GenerationError,
    PairKey,
)

__all__ = ["DeepseekV4MtpHead", "DeepseekV4MtpState"]

Law = npt.NDArray[np.float64] | None
"""What a draft was drawn from, by id, as `Draft.laws` has it."""

_FREED = -1


class DeepseekV4MtpState:
    """One sequence's place in the head's memory; integers and the tokens of pending pairs.

    Rows of keys first_key .. last_key are held, without a gap. Those up to `exact_through` equal,
    bit for bit on a CPU, the rows of a fresh prefill of the committed tokens; those above it come
    from the head's own streams and live from a propose to the verdict on it.

    Attributes:
        slot: ring slot; -1 once freed.
        budget_tokens: most tokens the sequence will hold; nothing is drafted beyond.
        ring_rows: rows of the slot's ring the sequence can touch, at most one for each token.
        first_key: lowest key held; a row never attends below it.
        last_key: newest key held, `first_key - 1` where none is.
        exact_through: newest key made from the target's streams and a committed token.
        high_key: highest key written over rows still held; what it displaced in the ring is gone.
        pending: tokens of the newest pairs, accepted but not yet written; their streams are copied.
        last_num_drafted: drafts of the last propose, 0 once their verdict is known.
        last_log_probs: log-probabilities of the last drafts, or None where not measured.
        unread: a chain ran of which the host has not learned whether its first row was finite.
        on_device: (number of the chain, row, drafts) where the last drafts were left, or None.
    """

    __slots__ = (
        "budget_tokens",
        "exact_through",
        "first_key",
        "high_key",
        "last_key",
        "last_log_probs",
        "last_num_drafted",
        "on_device",
        "pending",
        "ring_rows",
        "slot",
        "unread",
    )

    def __init__(self, slot: int, *, budget_tokens: int, ring_rows: int) -> None:
        self.slot = slot
        self.budget_tokens = budget_tokens
        self.ring_rows = min(ring_rows, budget_tokens)
        self.first_key = 0
        self.last_key = -1
        self.exact_through = -1
        self.high_key = -1
        self.pending: list[int] = []
        self.last_num_drafted = 0
        self.last_log_probs: list[float] | None = None
        self.unread = False
        self.on_device: tuple[int, int, int] | None = None

    def start_at(self, key: int) -> None:
        """Hold nothing, and take `key` next."""
        self.first_key = key
        self.last_key = self.exact_through = self.high_key = key - 1
        self.pending.clear()


@dataclass(frozen=True, slots=True, eq=False)
class _Carried:
    """Rows outside of any sequence, [rows, head_dim] in the order of their keys; never changed."""

    kv: DrafterKv
    rows: torch.Tensor


class DeepseekV4MtpHead(DraftProposer[DeepseekV4MtpState]):
    """Drafts with a checkpoint's MTP block, the trunk's embedding and its output head.

    Pair key k joins the target's streams of position k, before collapse and before the final norm,
    with the embedding of token k + 1, at rotary position k; position 0 is like every other. Draft
    1 is read off the row of the last pair; draft j + 1 off a row made from the block's own streams
    of the row before and draft j. Weights were trained for the first; the others are recursion.

    Rows are exact: a verdict keeps only rows made from the target's streams, and the pairs of
    accepted drafts, handed over by `catchup_batch`, are written from the target's streams before
    anything reads them: by the next propose, in a pass of their own that computes keys only, or
    (`fold_catchup`) as further rows of the forward that it runs anyway.

    On a CPU a chain is stepped by the host, which drops sequences as they end, or is run in one
    call by a block that can. Elsewhere, and wherever a runner is set or ids are to stay on the
    device, it is one program over fixed memory (`paceline.draft.chain`); all give the same bits on
    a CPU. The chain that left its ids on the device counts as drafted in full. Whether its first
    row was finite is noted on the device, where later chains see it; the host learns it when it
    moves rows.

    One rank drafts by itself: the block holds all its experts (`needs_comm` is false).

    Source: DeepSeek-V4 report, MTP section; reference model, MTPBlock. The loop around the block
    is derived from the pairing.

    Args:
        module: the block.
        embed_tokens: the trunk's embedding table.
        lm_head: the trunk's output head.
        config: shapes.
        ring: the block's rows; the head becomes their owner and hands out their slots.
        mtp_vocab_size: drafts are taken from the first so many ids; 0: from all.
        extra_ids: ids from there on that may be drafted all the same, special tokens say; rising.
        max_seq_len: most tokens of a sequence; nothing is drafted beyond.
        fold_catchup: where the host steps a chain, write pending pairs in its first forward rather
            than before it.
        confidence: measure each draft's log-probability, among the ids that may be drafted.
        min_probability: a draft the head gives less than this ends the chain and is not proposed,
            since verifying it would cost more than it brings.

    Attributes:
        module: the block.
        ring: the rows.
        num_circuit_runs: chains a runner ran.
        num_circuit_fallbacks: chains that ran eagerly although a runner was set, since it does not
            serve their shape or a grammar's mask was given.
    """

    def __init__(
        self,
        module: MtpBlock,
        embed_tokens: DenseWeight,
        lm_head: DenseWeight,
        config: ModelConfig,
        *,
        ring: DrafterRing,
        mtp_vocab_size: int,
        max_seq_len: int,
        extra_ids: Sequence[int] = (),
        fold_catchup: bool = False,
        confidence: bool = False,
        min_probability: float = 0.0,
    ) -> None:
        self.module = module
        self.ring = ring
        self.num_circuit_runs = 0
        self.num_circuit_fallbacks = 0
        self._embed_tokens = embed_tokens
        num_rows = 0 if mtp_vocab_size == config.vocab_size else mtp_vocab_size
        self._scorer = DraftScorer(lm_head, num_rows=num_rows, extra_ids=extra_ids)
        self._vocab_size = config.vocab_size
        self._max_seq_len = max_seq_len
        self._fold_catchup = fold_catchup
        self._confidence = confidence
        self._min_log_prob = _least_log_prob(min_probability)
        self._measure = confidence or self._min_log_prob > -math.inf
        self._chaining: ChainingMtpBlock | None = None
        if isinstance(module, ChainingMtpBlock) and module.can_chain(
            embed_tokens, self._scorer.table
        ):
            self._chaining = module
        self._window = config.sliding_window
        self._streams_shape = (config.hc_mult, config.hidden_size)

        self._num_slots = ring.inert_slot
        self._ring_rows = ring.rows.shape[1]
        self._max_pending = ring.max_width - 1
        self._free_slots = list(range(self._num_slots - 1, -1, -1))
        self._device = ring.rows.device
        dtype = embed_tokens.dtype
        capacity = max(self._num_slots * ring.max_width, self._ring_rows)
        self._rows = Columns([capacity] * 4, self._device)
        self._hiddens = torch.empty(
            (capacity, *self._streams_shape), dtype=dtype, device=self._device
        )
        self._pending = torch.zeros(
            (self._num_slots, self._max_pending, *self._streams_shape),
            dtype=dtype,
            device=self._device,
        )
        self._steps = np.arange(capacity, dtype=np.int64)
        self._floor = torch.zeros(self._num_slots + 1, dtype=torch.int64, device=self._device)
        self._chain_program: DraftChain | None = None
        self._runner: DraftRunner | None = None
        self._nonfinite = 0
        self._nonfinite_there = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._any_there = False
        self._num_chains = 0
        self._deferred: torch.Tensor | None = None
        self._carried: dict[int, _Carried] = {}
        self._handles = itertools.count()
        if self._device.type != "cpu":
            self._program()

    @classmethod
    def new(
        cls,
        module: MtpBlock,
        embed_tokens: DenseWeight,
        lm_head: DenseWeight,
        config: ModelConfig,
        mtp_vocab_size: int,
        max_seq_len: int,
        *,
        num_slots: int = 16,
        max_width: int = MAX_NUM_DRAFTS + 1,
        ring: DrafterRing | None = None,
        extra_ids: Sequence[int] = (),
        fold_catchup: bool = False,
        confidence: bool = False,
        min_probability: float = 0.0,
    ) -> DeepseekV4MtpHead:
        """Build a head and the memory it needs.

        Args:
            module: the block.
            embed_tokens: the trunk's embedding table; its device and dtype are the head's.
            lm_head: the trunk's output head.
            config: shapes.
            mtp_vocab_size: drafts are taken from the first so many ids; 0: from all.
            max_seq_len: most tokens of a sequence.
            num_slots: most sequences at once.
            max_width: most rows of one sequence in one call, the drafts of a step plus one.
            ring: memory to use instead of allocating some; then `num_slots` and `max_width` are
                the ring's.
            extra_ids: ids that may be drafted wherever they lie, in any order; those below
                `mtp_vocab_size` may be anyway. Rows of the head are copied where some are not.
            fold_catchup: see the class. On a CPU a row of a forward costs about seven times a
                written row, and a call little.
            confidence: see the class.
            min_probability: see the class; 0 to 1.

        Raises:
            ConfigError: a number is outside what is allowed (says what was given and what is).
        """
        for name, value, low, high in (
            ("mtp_vocab_size", mtp_vocab_size, 0, config.vocab_size),
            ("max_seq_len", max_seq_len, 1, config.max_position_embeddings),
            ("num_slots", num_slots, 1, None),
            ("max_width", max_width, 2, None),
        ):
            if value < low or (high is not None and value > high):
                allowed = f"{low} to {high}" if high is not None else f"at least {low}"
                raise ConfigError(f"{name} is {value}; allowed is {allowed}")
        if not 0 <= min_probability <= 1:
            raise ConfigError(f"min_probability is {min_probability}; allowed is 0 to 1")
        if ring is None:
            ring = DrafterRing.allocate(
                config,
                num_slots=num_slots,
                max_width=max_width,
                device=embed_tokens.table.device,
                dtype=embed_tokens.dtype,
            )
        strange = [token for token in extra_ids if not 0 <= token < config.vocab_size]
        if strange:
            raise ConfigError(
                f"extra_ids has {strange}; allowed are ids 0 to {config.vocab_size - 1}"
            )
        return cls(
            module,
            embed_tokens,
            lm_head,
            config,
            ring=ring,
            mtp_vocab_size=mtp_vocab_size,
            max_seq_len=max_seq_len,
            extra_ids=sorted({token for token in extra_ids if token >= mtp_vocab_size}),
            fold_catchup=fold_catchup,
            confidence=confidence,
            min_probability=min_probability,
        )

    @property
    def num_slots(self) -> int:
        """Sequences the head has room for."""
        return self._num_slots

    @property
    def num_free_slots(self) -> int:
        """Slots at home; `num_slots` when idle."""
        return len(self._free_slots)

    @property
    def num_nonfinite(self) -> int:
        """Drafts given up because the head's logits were not finite; may wait for the device."""
        if self._any_there:
            self._nonfinite += int(self._nonfinite_there)
            self._nonfinite_there.zero_()
            self._any_there = False
        return self._nonfinite

    # Facts

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        """Return the window: the first propose reads keys P - 128 .. P - 1 and none below.

        Asked with a sequence's own budget, no more rows than it will have tokens.
        """
        return min(max_seq_len, self._window)

    # Core

    def alloc_state(self) -> DeepseekV4MtpState:
        """Take a slot for a sequence of any length.

        Raises:
            GenerationError: all slots are taken.
        """
        return self.alloc_state_inner(self._max_seq_len)

    def alloc_state_for(self, budget_tokens: int) -> DeepseekV4MtpState:
        """Take a slot for a sequence of at most `budget_tokens`, clamped to the context.

        A sequence shorter than the ring touches one row for each token at most, so what a slot
        costs to fill, to move and to keep follows the request. Slots themselves are all alike, as
        captured programs need fixed memory.

        Raises:
            GenerationError: all slots are taken.
            ValueError: a budget without room for a token.
        """
        if budget_tokens < 1:
            raise ValueError(f"budget_tokens is {budget_tokens}; allowed is at least 1")
        return self.alloc_state_inner(min(budget_tokens, self._max_seq_len))

    def alloc_state_inner(self, budget_tokens: int) -> DeepseekV4MtpState:
        """Take a slot: what both ways to allocate come to, with a budget that was checked.

        Raises:
            GenerationError: all slots are taken.
        """
        if not self._free_slots:
            raise GenerationError(f"the draft head's {self._num_slots} slots are all taken")
        return DeepseekV4MtpState(
            self._free_slots.pop(),
            budget_tokens=budget_tokens,
            ring_rows=self._ring_rows,
        )

    def free_state(self, state: DeepseekV4MtpState) -> None:
        """Give the slot back; a second call does nothing."""
        if state.slot == _FREED:
            return
        self._empty(state)
        self._free_slots.append(state.slot)
        state.slot = _FREED

    def propose(self, request: DraftRequest, state: DeepseekV4MtpState) -> Draft:
        """Draft for one sequence: `propose_batch` of one.

        With `draft_embed_target` ids stay on the device, all that were asked for and -1 from where
        the chain ended, and the first draft's embedding is written to the target: that of id 0
        where there is no first draft, nothing where none was wanted. With `sampler` its picks are
        drafted instead of the best ids, and always given. `target_hidden_stack` is not used.

        Raises:
            ValueError: the request does not fit the head or the state; nothing was touched.
        """
        return self._draft((request,), (state,))[0]

    def after_verify(self, num_accepted: int, state: DeepseekV4MtpState) -> None:
        """Keep of the drafted rows the first, the only one made from the target's streams.

        The rows of accepted drafts hold the right tokens beside the head's own streams; they are
        dropped too and come back, exact, through `catchup_batch`.

        Raises:
            ValueError: more than the last propose drafted.
        """
        if not 0 <= num_accepted <= state.last_num_drafted:
            raise ValueError(
                f"num_accepted is {num_accepted}; the last propose drafted {state.last_num_drafted}"
            )
        state.last_num_drafted = 0
        state.last_key = state.exact_through

    def last_confidence(self, state: DeepseekV4MtpState) -> float | None:
        """Return the least probability of the last drafts, where `confidence` is on.

        Waits for drafts that were left on the device, until the next propose of any sequence.
        """
        if self._confidence and state.on_device is not None:
            number, row, count = state.on_device
            state.on_device = None
            if number == self._num_chains:
                chain = self._program()
                ids = chain.tokens[row, :count].tolist()
                drafted = ids.index(-1) if -1 in ids else count
                state.last_log_probs = chain.log_probs[row, :drafted].tolist()
        return math.exp(min(state.last_log_probs)) if state.last_log_probs else None

    # Batching

    def propose_batch(
        self, requests: Sequence[DraftRequest], states: Sequence[DeepseekV4MtpState]
    ) -> list[Draft]:
        """Draft for all sequences with one forward for each draft position.

        Bit for bit what `propose` gives for each (on a CPU, where rows are independent).

        Raises:
            ValueError: a request does not fit the head or its state, or two states are one; then
                none was touched.
        """
        return self._draft(requests, states)

    def propose_batch_max(self) -> int:
        """Return the number of slots, which every buffer is laid out for."""
        return self._num_slots

    # Context

    def prefill_drafter(
        self,
        prompt_tokens: Sequence[int],
        hiddens: torch.Tensor,
        state: DeepseekV4MtpState,
        *,
        first_position: int = 0,
    ) -> int:
        """Write the prompt's pairs that the first propose can see: keys and values only.

        That propose has key P - 1 for a prompt of P tokens and reads keys P - 128 on.
        """
        self._check_held(state)
        self._check_hiddens(hiddens, None)
        last_pair = len(prompt_tokens) - 2
        stop = min(first_position + hiddens.shape[0] - 1, last_pair) + 1
        start = max(first_position, last_pair - (self._window - 2))
        if start >= stop:
            return 0
        rows = hiddens[start - first_position : stop - first_position]
        return self._append(state, prompt_tokens[start + 1 : stop + 1], rows, start)

    def catchup_drafter(
        self,
        tokens: Sequence[int],
        hiddens: torch.Tensor,
        row_base: int,
        pos_base: int,
        state: DeepseekV4MtpState,
    ) -> int:
        """Write the pairs of a stretch decoded without drafts; at most a window of them."""
        self._check_held(state)
        held = self.drafter_rows(state)
        if row_base != held:
            raise ValueError(f"row_base is {row_base}; the append point is {held}")
        self._check_pairs(tokens, hiddens, pos_base)
        if not tokens:
            return 0
        skip = max(0, len(tokens) - (self._window - 1))
        return self._take(state, tokens[skip:], hiddens[skip:], pos_base - 1 + skip)

    def catchup_batch(
        self,
        tokens: Sequence[Sequence[int]],
        hiddens: Sequence[torch.Tensor],
        first_pos: Sequence[int],
        states: Sequence[DeepseekV4MtpState],
    ) -> int:
        """Take over the pairs of accepted drafts; they are written before anything reads them.

        Raises:
            ValueError: tokens and streams do not pair up, a state was freed, or two are one;
                nothing was taken then.
        """
        self._check_distinct(states)
        for some, streams, position, state in zip(tokens, hiddens, first_pos, states, strict=True):
            self._check_held(state)
            self._check_pairs(some, streams, position)
        total = 0
        for some, streams, position, state in zip(tokens, hiddens, first_pos, states, strict=True):
            if some:
                total += self._take(state, some, streams, position - 1)
        return total

    def drafter_rows(self, state: DeepseekV4MtpState) -> int:
        """Return the rows held, pending ones included."""
        return state.last_key - state.first_key + 1

    def last_pair_key(self, state: DeepseekV4MtpState) -> PairKey | None:
        """Return the newest row's key, a pending one's included."""
        return PairKey(state.last_key) if state.last_key >= state.first_key else None

    def held_rows(self, state: DeepseekV4MtpState) -> tuple[int, torch.Tensor]:
        """Return (key of the first row, a copy of all rows held [rows, head_dim] in order)."""
        self._learn(state)
        self._settle((state,))
        return state.first_key, self._rows_of(state, state.first_key, state.last_key)

    # Handover

    @property
    def num_carried(self) -> int:
        """Values handed out that nobody has installed or freed; 0 when idle."""
        return len(self._carried)

    @property
    def num_carried_rows(self) -> int:
        """Rows they hold, shared ones counted once."""
        return sum(rows.shape[0] for rows in self._carried_storage())

    @property
    def num_carried_bytes(self) -> int:
        """Memory they hold, shared rows counted once."""
        return sum(rows.nbytes for rows in self._carried_storage())

    def take_drafter_kv(self, state: DeepseekV4MtpState) -> DrafterKv | None:
        """Move all exact rows out; drafted ones without a verdict are dropped.

        The state is then as freshly allocated. Waits for the device where ids were left there.
        """
        if state.slot == _FREED:
            return None
        kv = self._copy_out(state, state.exact_through, self._ring_rows)
        self._empty(state)
        return kv

    def install_drafter_kv(self, kv: DrafterKv, state: DeepseekV4MtpState) -> bool:
        """Move rows into an empty state whose budget covers their keys.

        Returns:
            False for any other state, and for a value that was installed or freed before or comes
            from another head: then nothing changed.
        """
        held = self._carried.get(kv.blocks[0]) if kv.blocks else None
        last = kv.last_pair_key
        if held is None or held.kv is not kv or last is None or state.slot == _FREED:
            return False
        if state.last_key >= state.first_key or state.last_num_drafted:
            return False
        if last >= state.budget_tokens:
            return False
        self._empty(state)
        first = last - kv.rows + 1
        self.ring.rows[state.slot].index_copy_(0, self._places(first, last), held.rows)
        state.first_key = first
        state.last_key = state.exact_through = state.high_key = last
        del self._carried[kv.blocks[0]]
        return True

    def free_drafter_kv(self, kv: DrafterKv) -> None:
        """Release rows; a value that is not outstanding is left alone."""
        if kv.blocks:
            held = self._carried.get(kv.blocks[0])
            if held is not None and held.kv is kv:
                del self._carried[kv.blocks[0]]

    def snapshot_drafter_kv(self, state: DeepseekV4MtpState, through_key: int) -> DrafterKv | None:
        """Copy the newest exact rows up to `through_key`, at most a window less one of them.

        That is all the propose after that key reads beside its own row. Waits for the device where
        ids were left there.
        """
        if state.slot == _FREED:
            return None
        return self._copy_out(state, min(through_key, state.exact_through), self._window - 1)

    def share_drafter_kv(self, kv: DrafterKv) -> DrafterKv | None:
        """Make a second value of the same rows; None where `kv` is not outstanding."""
        held = self._carried.get(kv.blocks[0]) if kv.blocks else None
        if held is None or held.kv is not kv:
            return None
        assert kv.last_pair_key is not None
        return self._carry(held.rows, kv.last_pair_key)

    def _carry(self, rows: torch.Tensor, last_key: int) -> DrafterKv:
        kv = DrafterKv(
            blocks=[next(self._handles)],
            rows=rows.shape[0],
            last_pair_key=last_key,
            num_bytes=rows.nbytes,
        )
        self._carried[kv.blocks[0]] = _Carried(kv, rows)
        return kv

    def _carried_storage(self) -> list[torch.Tensor]:
        return list({id(held.rows): held.rows for held in self._carried.values()}.values())

    def _copy_out(self, state: DeepseekV4MtpState, last: int, most: int) -> DrafterKv | None:
        self._learn(state)
        self._settle((state,))
        first = max(state.first_key, last - most + 1)
        if last < first:
            return None
        return self._carry(self._rows_of(state, first, last), last)

    # Capture

    def circuit_draft(self) -> DraftBinding:
        """Describe the whole chain, catch-up of pending pairs included, of any batch."""
        return self._program().binding()

    def set_circuit_draft(self, runner: DraftRunner | None) -> None:
        """Have `runner` run the chains it serves; None: none."""
        self._runner = runner

    def read_deferred_draft_token(self) -> int | None:
        """Fetch the first draft the last propose left on the device; None where there is none."""
        if self._deferred is None:
            return None
        token = int(self._deferred)
        return token if token >= 0 else None

    # Rows

    def _places(self, first: int, last: int) -> torch.Tensor:
        """Ring rows of keys first .. last."""
        return torch.arange(first, last + 1, device=self._device) % self._ring_rows

    def _rows_of(self, state: DeepseekV4MtpState, first: int, last: int) -> torch.Tensor:
        """A copy of the rows of keys first .. last, [rows, head_dim]."""
        return self.ring.rows[state.slot].index_select(0, self._places(first, last))

    def _empty(self, state: DeepseekV4MtpState) -> None:
        """Make a state hold nothing, as freshly allocated."""
        if state.unread:
            self._floor[state.slot].fill_(0)
        state.unread = False
        state.on_device = None
        state.last_num_drafted = 0
        state.last_log_probs = None
        state.start_at(0)

    def _learn(self, state: DeepseekV4MtpState) -> None:
        """Let the host know what the device found not to be finite; waits for it."""
        if not state.unread:
            return
        state.unread = False
        floor = int(self._floor[state.slot])
        if not floor:
            return
        self._floor[state.slot].fill_(0)
        if state.last_key < floor:
            state.start_at(floor)
        else:
            state.first_key = max(state.first_key, floor)

    def _continue_at(self, state: DeepseekV4MtpState, key: int) -> None:
        """Make `key` the append point: forget rows from it on, and all where a gap would stay."""
        if key <= state.exact_through:
            self._learn(state)
        newest = min(state.last_key, state.exact_through)
        if not state.first_key < key <= newest + 1:
            state.start_at(key)
            return
        if state.pending and newest >= key:
            del state.pending[max(0, len(state.pending) - (newest - key + 1)) :]
        state.last_key = state.exact_through = key - 1

    def _mark_written(self, state: DeepseekV4MtpState, key: int) -> int:
        """Note that rows up to `key` are in the ring, and forget the ones they displace.

        Returns:
            The lowest key still held.
        """
        if key > state.high_key:
            state.high_key = key
            first = key - self._ring_rows + 1
            if first > state.first_key:
                state.first_key = first
        return state.first_key

    def _take(
        self, state: DeepseekV4MtpState, tokens: Sequence[int], hiddens: torch.Tensor, key: int
    ) -> int:
        """Keep a few pairs for the next forward, or write many at once."""
        count = len(tokens)
        self._continue_at(state, key)
        held = len(state.pending)
        if held + count > self._max_pending:
            self._settle((state,))
            held = 0
            if count > self._max_pending:
                return self._append(state, tokens, hiddens, key)
        self._pending[state.slot, held : held + count].copy_(hiddens)
        state.pending.extend(tokens)
        state.last_key = state.exact_through = key + count - 1
        return count

    def _append(
        self, state: DeepseekV4MtpState, tokens: Sequence[int], hiddens: torch.Tensor, key: int
    ) -> int:
        """Write pairs (hiddens[j], tokens[j]) at keys key + j, at most a ring of them."""
        self._continue_at(state, key)
        if state.pending:
            self._settle((state,))
        count = len(tokens)
        last = key + count - 1
        ids, keys, slots, first_keys = self._rows.begin()
        ids[:count] = tokens
        keys[:count] = self._steps[:count] + key
        slots[:count] = state.slot
        first_keys[:count] = self._mark_written(state, last)
        state.last_key = state.exact_through = last
        # Read where they lie: a copy of a window of them would wake the threads of torch, which
        # then spin beside those of the block.
        self.module.write_rows(self._inputs(count, hiddens), self.ring)
        return count

    def _settle(self, states: Sequence[DeepseekV4MtpState]) -> None:
        """Write all pending pairs, in one pass."""
        count, parts = 0, []
        self._rows.begin()
        for state in states:
            if state.pending:
                parts.append(self._pending[state.slot, : len(state.pending)])
                count += self._place_pending(state, count)
        if count:
            torch.cat(parts, out=self._hiddens[:count])
            self.module.write_rows(self._inputs(count), self.ring)

    def _place_pending(self, state: DeepseekV4MtpState, at: int) -> int:
        """Fill rows at .. with a state's pending pairs, which end at its last key; how many."""
        count = len(state.pending)
        end = at + count
        ids, keys, slots, first_keys = self._rows.filling
        ids[at:end] = state.pending
        keys[at:end] = self._steps[:count] + (state.last_key - count + 1)
        slots[at:end] = state.slot
        first_keys[at:end] = self._mark_written(state, state.last_key)
        state.pending.clear()
        return count

    def _inputs(self, count: int, hiddens: torch.Tensor | None = None) -> MtpInputs:
        """Inputs of the first `count` rows; with `hiddens` instead of the head's own copies."""
        self._rows.upload()
        ids, keys, slots, first_keys = (column[:count] for column in self._rows.on_device)
        return MtpInputs(
            embeds=self._embed_tokens.gather(ids),
            hiddens=self._hiddens[:count] if hiddens is None else hiddens.to(self._hiddens.dtype),
            keys=keys,
            slots=slots,
            first_keys=first_keys,
        )

    def _check_held(self, state: DeepseekV4MtpState) -> None:
        if state.slot == _FREED:
            raise ValueError("the state was freed; allowed is one that was not freed")

    def _check_distinct(self, states: Sequence[DeepseekV4MtpState]) -> None:
        if len({id(state) for state in states}) != len(states):
            raise ValueError("two sequences have the same state; allowed is one state for each")

    def _check_hiddens(self, hiddens: torch.Tensor, count: int | None) -> None:
        shape = tuple(hiddens.shape)
        if shape[1:] != self._streams_shape or (count is not None and shape[0] != count):
            wanted = ("n" if count is None else count, *self._streams_shape)
            raise ValueError(
                f"streams have shape {list(shape)}; allowed is [{', '.join(map(str, wanted))}]"
            )

    def _check_pairs(self, tokens: Sequence[int], hiddens: torch.Tensor, position: int) -> None:
        if tokens:
            self._check_hiddens(hiddens, len(tokens))
            if position < 1:
                raise ValueError(
                    f"the first token's position is {position}; pairs begin at position 1"
                )

    # Drafting

    def _checked(
        self, requests: Sequence[DraftRequest], states: Sequence[DeepseekV4MtpState]
    ) -> list[int]:
        """How many drafts each request gets; raises before anything is touched."""
        self._check_distinct(states)
        wanted = []
        for request, state in zip(requests, states, strict=True):
            self._check_held(state)
            if request.position < 1:
                raise ValueError(f"position is {request.position}; allowed is at least 1")
            if not 0 <= request.last_token < self._vocab_size:
                raise ValueError(
                    f"last_token is {request.last_token}; allowed is 0 to {self._vocab_size - 1}"
                )
            if tuple(request.target_hidden.shape) != self._streams_shape:
                raise ValueError(
                    f"target_hidden has shape {list(request.target_hidden.shape)}; allowed is "
                    f"{list(self._streams_shape)}"
                )
            target = request.draft_embed_target
            if target is not None and tuple(target.shape) != self._streams_shape[1:]:
                raise ValueError(
                    f"draft_embed_target has shape {list(target.shape)}; allowed is "
                    f"{list(self._streams_shape[1:])}"
                )
            room = state.budget_tokens - 1 - request.position
            wanted.append(min(request.num_drafts, self._max_pending, room))
        return wanted

    def _draft(
        self, requests: Sequence[DraftRequest], states: Sequence[DeepseekV4MtpState]
    ) -> list[Draft]:
        """Draft for every sequence that has room, in the way that suits the device."""
        wanted = self._checked(requests, states)
        tokens: list[list[int]] = [[] for _ in requests]
        log_probs: list[list[float]] | None = [[] for _ in requests] if self._confidence else None
        laws: dict[int, list[Law]] = {
            i: [] for i, one in enumerate(requests) if one.sampler is not None and one.draws
        }
        left: dict[int, torch.Tensor] = {}
        for state in states:
            state.last_num_drafted = 0
            state.last_log_probs = None
            state.on_device = None
        live = [i for i, count in enumerate(wanted) if count > 0]
        if live:
            try:
                left = self._draft_live(requests, states, wanted, live, tokens, log_probs, laws)
            except BaseException:
                # Some rows may have been written and others not: hold none rather than wrong ones.
                for i in live:
                    states[i].start_at(requests[i].position)
                raise
        drafts = []
        for i, (state, some) in enumerate(zip(states, tokens, strict=True)):
            if i in left:
                state.last_num_drafted = wanted[i]
                drafts.append(Draft(tokens=[], device_tokens=left[i]))
                continue
            state.last_num_drafted = len(some)
            confidence = log_probs[i] if log_probs is not None else None
            state.last_log_probs = confidence
            kept = laws[i][: len(some)] if i in laws else None
            drafts.append(Draft(tokens=some, confidence=confidence, laws=kept))
        return drafts

    def _draft_live(
        self,
        requests: Sequence[DraftRequest],
        states: Sequence[DeepseekV4MtpState],
        wanted: list[int],
        live: list[int],
        tokens: list[list[int]],
        log_probs: list[list[float]] | None,
        laws: dict[int, list[Law]],
    ) -> dict[int, torch.Tensor]:
        """Fill what is given for the sequences `live`; return the ids left on the device.

        Sequences with a sampler are stepped by the host, which picks.
        """
        masks = {i: mask for i in live if (mask := requests[i].grammar_bitmask) is not None}
        steered = [i for i in live if requests[i].sampler is not None]
        chained = [i for i in live if requests[i].sampler is None]
        on_device = any(requests[i].draft_embed_target is not None for i in chained)
        left: dict[int, torch.Tensor] = {}
        if on_device or self._runner is not None or self._device.type != "cpu":
            if chained:
                free = {i: mask for i, mask in masks.items() if i in chained}
                left = self._run_chain(requests, states, wanted, chained, free, tokens, log_probs)
            live = steered
            if not live:
                return left
        for i in live:
            self._learn(states[i])
        if self._chaining is not None and len(live) == 1 and not masks and not steered:
            self._chain_one(requests, states, wanted, live[0], tokens, log_probs)
            return left
        try:
            self._step_chain(requests, states, wanted, live, masks, tokens, log_probs, laws)
        finally:
            for i in steered:
                grammar = requests[i].grammar
                if grammar is not None:
                    grammar.rollback(len(tokens[i]))
        return left

    # On the device

    def _program(self) -> DraftChain:
        if self._chain_program is None:
            self._chain_program = DraftChain(
                self.module,
                self._embed_tokens,
                self._scorer,
                ring=self.ring,
                pending=self._pending,
                floor=self._floor,
                min_log_prob=self._min_log_prob,
                measure=self._measure,
            )
        return self._chain_program

    def _run_chain(
        self,
        requests: Sequence[DraftRequest],
        states: Sequence[DeepseekV4MtpState],
        wanted: list[int],
        live: list[int],
        masks: dict[int, torch.Tensor],
        tokens: list[list[int]],
        log_probs: list[list[float]] | None,
    ) -> dict[int, torch.Tensor]:
        """Run the sequences `live` as one program, and read what is not to stay on the device.

        Returns:
            [n] ids of each sequence whose ids stay there.
        """
        chain = self._program()
        streams = [requests[i].target_hidden for i in live]
        torch.stack(streams, out=chain.hiddens[: len(live)])
        num_pairs = self._place_chain(chain, requests, states, wanted, live)
        size = {"width": len(live), "pairs": num_pairs, "depth": max(wanted[i] for i in live)}
        pad = self._runner is not None or self._device.type != "cpu"
        shape = chain.padded(**size) if pad else DraftShape(**size)
        chain.upload(shape, width=len(live), pairs=num_pairs)
        if self._runner is not None and not masks and self._runner.serves(shape):
            self._runner.run_draft(shape)
            self.num_circuit_runs += 1
        else:
            chain.run(shape, {live.index(i): mask for i, mask in masks.items()})
            self.num_circuit_fallbacks += self._runner is not None
        chain.note_broken(len(live), self._nonfinite_there)
        self._any_there = True
        self._num_chains += 1

        left = self._leave(chain, requests, states, wanted, live)
        if len(left) < len(live):
            ids = chain.tokens[: len(live)].tolist()
            measured = chain.log_probs[: len(live)].tolist() if log_probs is not None else None
        for row, i in enumerate(live):
            state = states[i]
            state.unread = True
            drafted = wanted[i]
            if i not in left:
                some = ids[row][: wanted[i]]
                drafted = some.index(-1) if -1 in some else wanted[i]
                tokens[i] += some[:drafted]
                if log_probs is not None and measured is not None:
                    log_probs[i] += measured[row][:drafted]
            # A row for each draft that was fed back, beside the first.
            state.last_key += min(drafted, wanted[i] - 1)
            self._mark_written(state, state.last_key)
            if not drafted:
                self._learn(state)
        return left

    def _place_chain(
        self,
        chain: DraftChain,
        requests: Sequence[DraftRequest],
        states: Sequence[DeepseekV4MtpState],
        wanted: list[int],
        live: list[int],
    ) -> int:
        """Fill the program's columns; how many pairs there are to catch up."""
        ids, keys, slots, first_keys, depths, *pair_columns = chain.begin()
        pair_ids, pair_keys, pair_slots, pair_rows = pair_columns
        num_pairs = 0
        for row, i in enumerate(live):
            request, state = requests[i], states[i]
            key = request.position - 1
            self._continue_at(state, key)
            count = len(state.pending)
            if count:
                end = num_pairs + count
                pair_ids[num_pairs:end] = state.pending
                pair_keys[num_pairs:end] = self._steps[:count] + (key - count)
                pair_slots[num_pairs:end] = state.slot
                pair_rows[num_pairs:end] = self._steps[:count] + state.slot * self._max_pending
                state.pending.clear()
                num_pairs = end
            ids[row] = request.last_token
            keys[row] = key
            slots[row] = state.slot
            first_keys[row] = self._mark_written(state, key)
            depths[row] = wanted[i]
            state.last_key = state.exact_through = key
        return num_pairs

    def _leave(
        self,
        chain: DraftChain,
        requests: Sequence[DraftRequest],
        states: Sequence[DeepseekV4MtpState],
        wanted: list[int],
        live: list[int],
    ) -> dict[int, torch.Tensor]:
        """Hand out what is to stay on the device, and the first drafts' embeddings."""
        left: dict[int, torch.Tensor] = {}
        self._deferred = None
        embeds: torch.Tensor | None = None
        for row, i in enumerate(live):
            target = requests[i].draft_embed_target
            if target is None:
                continue
            if embeds is None:
                first = chain.tokens[: len(live), 0]
                embeds = self._embed_tokens.gather(first.clamp(min=0))
                self._deferred = chain.tokens[row, 0]
            target.copy_(embeds[row])
            left[i] = chain.tokens[row, : wanted[i]]
            states[i].on_device = (self._num_chains, row, wanted[i])
        return left

    # Stepped by the host

    def _step_chain(
        self,
        requests: Sequence[DraftRequest],
        states: Sequence[DeepseekV4MtpState],
        wanted: list[int],
        live: list[int],
        masks: dict[int, torch.Tensor],
        tokens: list[list[int]],
        log_probs: list[list[float]] | None,
        laws: dict[int, list[Law]],
    ) -> None:
        """One forward for each draft position, over the sequences that go on."""
        if not self._fold_catchup:
            self._settle([states[i] for i in live])
        ends, count = self._place_first(requests, states, live)
        output = self.module.forward(self._inputs(count), self.ring)
        normed, streams = output.normed, output.streams
        if count != len(live):
            at = torch.tensor(ends, device=self._device)
            normed, streams = normed.index_select(0, at), streams.index_select(0, at)
        first = True
        while True:
            picked = self._pick(
                normed, live, masks if first else {}, requests=requests, drafted=tokens, laws=laws
            )
            kept = []
            for row, i in enumerate(live):
                token = picked.ids[row]
                if token < 0:
                    masked = token == NOTHING_ALLOWED or (first and i in masks)
                    self._end_chain(states[i], first=first, masked=masked)
                    continue
                # Whether a chain goes on must not depend on what was drawn, or laws would change.
                if picked.best is not None and picked.best[row] < self._min_log_prob:
                    continue
                grammar = requests[i].grammar if requests[i].sampler is not None else None
                if grammar is not None and not grammar.advance(token):
                    continue
                tokens[i].append(token)
                if log_probs is not None and picked.log_probs is not None:
                    log_probs[i].append(picked.log_probs[row])
                if grammar is not None:
                    run = _forced_rest(grammar, wanted[i] - len(tokens[i]))
                    tokens[i] += run
                    if log_probs is not None and picked.log_probs is not None:
                        log_probs[i] += [0.0] * len(run)
                    if i in laws:
                        laws[i] += [None] * len(run)
                ended = grammar is not None and grammar.is_finished
                if len(tokens[i]) < wanted[i] and not ended:
                    kept.append(row)
            if not kept:
                return
            if len(kept) != len(live):
                streams = streams.index_select(0, torch.tensor(kept, device=self._device))
                live = [live[row] for row in kept]
            ids, keys, slots, first_keys = self._rows.begin()
            for row, i in enumerate(live):
                state = states[i]
                state.last_key = key = state.last_key + 1
                ids[row] = tokens[i][-1]
                keys[row] = key
                slots[row] = state.slot
                first_keys[row] = self._mark_written(state, key)
            # The block may write its streams over those of its last call.
            self._hiddens[: len(live)].copy_(streams)
            output = self.module.forward(self._inputs(len(live)), self.ring)
            normed, streams = output.normed, output.streams
            first = False

    def _chain_one(
        self,
        requests: Sequence[DraftRequest],
        states: Sequence[DeepseekV4MtpState],
        wanted: list[int],
        i: int,
        tokens: list[list[int]],
        log_probs: list[list[float]] | None,
    ) -> None:
        """`_step_chain` of the one sequence i, by a block that runs it in one call."""
        assert self._chaining is not None
        state = states[i]
        _, count = self._place_first(requests, states, [i])
        ids, keys, slots, first_keys = (column[:count] for column in self._rows.on_device)
        drawn = self._chaining.draft_greedy(
            ids=ids,
            hiddens=self._hiddens[:count],
            keys=keys,
            slots=slots,
            first_keys=first_keys,
            ring=self.ring,
            embed_tokens=self._embed_tokens,
            lm_head=self._scorer.table,
            num_rows=self._scorer.width,
            column_ids=self._scorer.column_ids,
            count=wanted[i],
            min_log_prob=self._min_log_prob,
        )
        for n, (token, log_prob) in enumerate(drawn):
            if n:
                state.last_key += 1
                self._mark_written(state, state.last_key)
            if token < 0:
                self._end_chain(state, first=n == 0, masked=False)
                return
            if log_prob < self._min_log_prob:
                return
            tokens[i].append(token)
            if log_probs is not None:
                log_probs[i].append(log_prob)

    def _place_first(
        self,
        requests: Sequence[DraftRequest],
        states: Sequence[DeepseekV4MtpState],
        live: list[int],
    ) -> tuple[list[int], int]:
        """Fill the first call's rows: each sequence's pending pairs, then the pair just sampled.

        Returns:
            (the row each sequence drafts from, rows in all).
        """
        ids, keys, slots, first_keys = self._rows.begin()
        ends, parts, count = [], [], 0
        for i in live:
            request, state = requests[i], states[i]
            key = request.position - 1
            self._continue_at(state, key)
            if state.pending:
                parts.append(self._pending[state.slot, : len(state.pending)])
                count += self._place_pending(state, count)
            ids[count] = request.last_token
            keys[count] = key
            slots[count] = state.slot
            first_keys[count] = self._mark_written(state, key)
            state.last_key = state.exact_through = key
            parts.append(request.target_hidden.unsqueeze(0))
            ends.append(count)
            count += 1
        torch.cat(parts, out=self._hiddens[:count])
        return ends, count

    def _end_chain(self, state: DeepseekV4MtpState, *, first: bool, masked: bool) -> None:
        """End a sequence's chain without a draft from its newest row."""
        if masked:
            return
        self._nonfinite += 1
        if first:
            # The row just written may be what is not finite, and would spoil a window of queries.
            state.start_at(state.last_key + 1)

    def _pick(
        self,
        normed: torch.Tensor,
        live: list[int],
        masks: dict[int, torch.Tensor],
        *,
        requests: Sequence[DraftRequest],
        drafted: list[list[int]],
        laws: dict[int, list[Law]],
    ) -> _Picked:
        """Each row's id: the best, or what its request's sampler makes of the logits.

        Args:
            normed: [R, hidden].
            live: [R] sequence of each row.
            masks: bitmasks of what may come, by sequence.
            requests: of all sequences.
            drafted: by sequence, the drafts before its row.
            laws: by sequence, where drafts are drawn: the laws so far; grown.
        """
        logits = self._scorer.logits(normed)
        steered = [row for row, i in enumerate(live) if requests[i].sampler is not None]
        for row, i in enumerate(live):
            if i in masks and row not in steered:
                self._scorer.forbid(logits[row], masks[i])
        table = logits.cpu().numpy()
        columns = table.argmax(-1)
        best = table[self._steps[: len(live)], columns]
        finite = np.isfinite(best).tolist()
        ids = [
            self._scorer.id_of(column) if fine else NON_FINITE
            for column, fine in zip(columns.tolist(), finite, strict=True)
        ]
        rows = {
            row: self._scorer.spread(table[row], vocab_size=self._vocab_size) for row in steered
        }
        raced = self._race(logits, {row: live[row] for row in steered}, masks, requests, drafted)
        for row, scores in rows.items():
            i = live[row]
            sampler, grammar = requests[i].sampler, requests[i].grammar
            assert sampler is not None
            if row in raced:
                ids[row] = raced[row]
                continue
            mask = masks.get(i) if grammar is None else grammar.mask()
            if i in laws:
                ids[row], law = sampler.draw(scores, drafted=drafted[i], mask=mask)
                laws[i].append(law)
            else:
                ids[row] = sampler.pick(scores, drafted=drafted[i], mask=mask)
        if not self._measure:
            return _Picked(ids, None, None)
        measured: list[float] = self._scorer.table.log_prob_of_best(
            logits, torch.from_numpy(best).to(logits.device)
        ).tolist()
        own = list(measured)
        for row, scores in rows.items():
            if ids[row] >= 0:
                own[row] += float(scores[ids[row]]) - float(best[row])
        return _Picked(ids, measured, own)

    def _race(
        self,
        logits: torch.Tensor,
        steered: dict[int, int],
        masks: dict[int, torch.Tensor],
        requests: Sequence[DraftRequest],
        drafted: list[list[int]],
    ) -> dict[int, int]:
        """Picks of the rows that have a temperature only, by row, on a device that has one."""
        if logits.device.type == "cpu" or self._scorer.width != self._vocab_size:
            return {}
        keys: dict[int, int] = {}
        temperatures: list[float] = []
        for row, i in steered.items():
            request = requests[i]
            sampler = request.sampler
            free = request.grammar is None and i not in masks and not request.draws
            if sampler is not None and sampler.is_tempered and free:
                keys[row] = sampler.key(len(drafted[i]))
                temperatures.append(sampler.knobs.temperature)
        if not keys:
            return {}
        picks = race_rows(logits[list(keys)], list(keys.values()), temperatures)
        return dict(zip(keys, picks, strict=True))


def _least_log_prob(probability: float) -> float:
    """The least fp32 number that is no less than the logarithm of a probability.

    Held against fp32 numbers it decides alike wherever it is compared, in fp32 too.
    """
    if not probability:
        return -math.inf
    exact = math.log(probability)
    near = np.float32(exact)
    if float(near) < exact:
        near = np.nextafter(near, np.float32(math.inf))
    return float(near)


def _forced_rest(grammar: GrammarCursor, room: int) -> list[int]:
    """The ids that fill a draft, walked over, where the grammar leaves no choice up to its end.

    A shorter run is nothing: what is guessed behind it needs the rows that a chain writes.
    """
    run = grammar.forced(room)
    for token in run:
        grammar.advance(token)
    if len(run) < room and not grammar.is_finished:
        grammar.rollback(len(run))
        return []
    return run


@dataclass(frozen=True, slots=True)
class _Picked:
    """What rows were picked; `ids` may hold keys of `FAILURES`.

    `best` are the log-probabilities of the best ids, `log_probs` those of the ids picked; None
    where nothing is measured.
    """

    ids: list[int]
    best: list[float] | None
    log_probs: list[float] | None
