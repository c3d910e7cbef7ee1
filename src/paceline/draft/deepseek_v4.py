"""DeepSeek-V4's own draft head, recursed for as many drafts as are wanted.

The head owns a ring of rows by pair key (drawn in `paceline.draft.proposer`) for each sequence and
the integers that say which of them count. It knows neither engine nor target: what it needs of the
target's streams it is handed, and copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.cache.drafter import DrafterRing
from paceline.config import ModelConfig
from paceline.draft.proposer import DraftProposer
from paceline.models.step import ChainingMtpBlock, MtpBlock, MtpInputs
from paceline.ops.dense import DenseWeight
from paceline.types import (
    MAX_NUM_DRAFTS,
    ConfigError,
    Draft,
    DraftRequest,
    GenerationError,
    PairKey,
)

__all__ = ["DeepseekV4MtpHead", "DeepseekV4MtpState"]

_FREED = -1


class DeepseekV4MtpState:
    """One sequence's place in the head's memory; integers and the tokens of pending pairs.

    Rows of keys first_key .. last_key are held, without a gap. Those up to `exact_through` equal,
    bit for bit on a CPU, the rows of a fresh prefill of the committed tokens; those above it come
    from the head's own streams and live from a propose to the verdict on it.

    Attributes:
        slot: ring slot; -1 once freed.
        first_key: lowest key held; a row never attends below it.
        last_key: newest key held, `first_key - 1` where none is.
        exact_through: newest key made from the target's streams and a committed token.
        high_key: highest key written over rows still held; what it displaced in the ring is gone.
        pending: tokens of the newest pairs, accepted but not yet written; their streams are copied.
        last_num_drafted: drafts of the last propose, 0 once their verdict is known.
        last_log_probs: log-probabilities of the last drafts, or None where not measured.
    """

    __slots__ = (
        "exact_through",
        "first_key",
        "high_key",
        "last_key",
        "last_log_probs",
        "last_num_drafted",
        "pending",
        "slot",
    )

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.first_key = 0
        self.last_key = -1
        self.exact_through = -1
        self.high_key = -1
        self.pending: list[int] = []
        self.last_num_drafted = 0
        self.last_log_probs: list[float] | None = None

    def start_at(self, key: int) -> None:
        """Hold nothing, and take `key` next."""
        self.first_key = key
        self.last_key = self.exact_through = self.high_key = key - 1
        self.pending.clear()


class _Rows:
    """Preallocated integer columns of a call's rows, filled on the host.

    On a CPU the host's memory is the device's; elsewhere `upload` copies it.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._host = torch.zeros(4, capacity, dtype=torch.int64)
        on_cpu = device.type == "cpu"
        self._device = self._host if on_cpu else self._host.to(device)
        columns: npt.NDArray[np.int64] = self._host.numpy()
        self.ids, self.keys, self.slots, self.first_keys = columns
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}

    def upload(self, count: int) -> tuple[torch.Tensor, ...]:
        """Return ids, keys, slots and first keys of the first `count` rows, on the device."""
        if self._device is not self._host:
            self._device[:, :count].copy_(self._host[:, :count])
        views = self._views.get(count)
        if views is None:
            views = self._views[count] = tuple(self._device[:, :count].unbind())
        return views


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

    Source: DeepSeek-V4 report, MTP section; reference model, MTPBlock. The loop around the block
    is derived from the pairing.

    Args:
        module: the block.
        embed_tokens: the trunk's embedding table.
        lm_head: the trunk's output head.
        config: shapes.
        ring: the block's rows; the head becomes their owner and hands out their slots.
        mtp_vocab_size: drafts are taken from the first so many ids; 0: from all.
        max_seq_len: most tokens of a sequence; nothing is drafted beyond.
        fold_catchup: write pending pairs in a propose's first forward rather than before it.
        confidence: measure each draft's log-probability.
        min_probability: a draft the head gives less than this ends the chain and is not proposed,
            since verifying it would cost more than it brings.

    Attributes:
        ring: the rows.
        num_nonfinite: drafts given up because the head's logits were not finite.
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
        fold_catchup: bool = False,
        confidence: bool = False,
        min_probability: float = 0.0,
    ) -> None:
        self.module = module
        self.ring = ring
        self.num_nonfinite = 0
        self._embed_tokens = embed_tokens
        self._lm_head = lm_head
        self._vocab_rows = 0 if mtp_vocab_size == config.vocab_size else mtp_vocab_size
        self._max_seq_len = max_seq_len
        self._fold_catchup = fold_catchup
        self._confidence = confidence
        self._min_log_prob = math.log(min_probability) if min_probability else -math.inf
        self._chaining: ChainingMtpBlock | None = None
        if isinstance(module, ChainingMtpBlock) and module.can_chain(embed_tokens, lm_head):
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
        self._rows = _Rows(capacity, self._device)
        self._hiddens = torch.empty(
            (capacity, *self._streams_shape), dtype=dtype, device=self._device
        )
        self._pending = torch.empty(
            (self._num_slots, self._max_pending, *self._streams_shape),
            dtype=dtype,
            device=self._device,
        )
        self._steps = np.arange(capacity, dtype=np.int64)

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
        fold_catchup: bool | None = None,
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
            fold_catchup: see the class; None: where rows are cheap and calls are not, so on
                everything but a CPU.
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
        if fold_catchup is None:
            # On a CPU a row of a forward costs about seven times a written row, and a call little.
            fold_catchup = ring.rows.device.type != "cpu"
        return cls(
            module,
            embed_tokens,
            lm_head,
            config,
            ring=ring,
            mtp_vocab_size=mtp_vocab_size,
            max_seq_len=max_seq_len,
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

    # Facts

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        """Return the window: the first propose reads keys P - 128 .. P - 1 and none below."""
        return min(max_seq_len, self._window)

    # Core

    def alloc_state(self) -> DeepseekV4MtpState:
        """Take a slot.

        Raises:
            GenerationError: all slots are taken.
        """
        if not self._free_slots:
            raise GenerationError(f"the draft head's {self._num_slots} slots are all taken")
        return DeepseekV4MtpState(self._free_slots.pop())

    def alloc_state_for(self, budget_tokens: int) -> DeepseekV4MtpState:
        """Take a slot; a ring holds a window whatever the budget, so none is wasted on it."""
        return self.alloc_state()

    def free_state(self, state: DeepseekV4MtpState) -> None:
        """Give the slot back; a second call does nothing."""
        if state.slot == _FREED:
            return
        self._free_slots.append(state.slot)
        state.slot = _FREED
        state.start_at(0)
        state.last_num_drafted = 0

    def propose(self, request: DraftRequest, state: DeepseekV4MtpState) -> Draft:
        """Draft for one sequence: `propose_batch` of one.

        `draft_embed_target` and `target_hidden_stack` are not used; ids are always returned.
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
        """Return the least probability of the last drafts, where `confidence` is on."""
        return math.exp(min(state.last_log_probs)) if state.last_log_probs else None

    # Batching

    def propose_batch(
        self, requests: Sequence[DraftRequest], states: Sequence[DeepseekV4MtpState]
    ) -> list[Draft]:
        """Draft for all sequences with one forward for each draft position.

        Bit for bit what `propose` gives for each (on a CPU, where rows are independent).
        """
        return self._draft(requests, states)

    def propose_batch_max(self) -> int:
        """Return the number of slots."""
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
            ValueError: tokens and streams do not pair up; nothing was taken then.
        """
        for some, streams, position in zip(tokens, hiddens, first_pos, strict=True):
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
        self._settle((state,))
        keys = torch.arange(state.first_key, state.last_key + 1, device=self._device)
        return state.first_key, self.ring.rows[state.slot, keys % self._ring_rows].clone()

    # Rows

    def _continue_at(self, state: DeepseekV4MtpState, key: int) -> None:
        """Make `key` the append point: forget rows from it on, and all where a gap would stay."""
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
        rows = self._rows
        rows.ids[:count] = tokens
        rows.keys[:count] = self._steps[:count] + key
        rows.slots[:count] = state.slot
        rows.first_keys[:count] = self._mark_written(state, last)
        state.last_key = state.exact_through = last
        self._hiddens[:count].copy_(hiddens)
        self.module.write_rows(self._inputs(count), self.ring)
        return count

    def _settle(self, states: Sequence[DeepseekV4MtpState]) -> None:
        """Write all pending pairs, in one pass."""
        count, parts = 0, []
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
        rows = self._rows
        rows.ids[at:end] = state.pending
        rows.keys[at:end] = self._steps[:count] + (state.last_key - count + 1)
        rows.slots[at:end] = state.slot
        rows.first_keys[at:end] = self._mark_written(state, state.last_key)
        state.pending.clear()
        return count

    def _inputs(self, count: int) -> MtpInputs:
        ids, keys, slots, first_keys = self._rows.upload(count)
        return MtpInputs(
            embeds=self._embed_tokens.gather(ids),
            hiddens=self._hiddens[:count],
            keys=keys,
            slots=slots,
            first_keys=first_keys,
        )

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

    def _draft(
        self, requests: Sequence[DraftRequest], states: Sequence[DeepseekV4MtpState]
    ) -> list[Draft]:
        """One forward for each draft position, over the sequences that go on."""
        tokens: list[list[int]] = [[] for _ in requests]
        log_probs: list[list[float]] | None = [[] for _ in requests] if self._confidence else None
        wanted, live = [], []
        for i, (request, state) in enumerate(zip(requests, states, strict=True)):
            state.last_num_drafted = 0
            state.last_log_probs = None
            if request.position < 1 or state.slot == _FREED:
                raise ValueError(
                    f"position is {request.position} and slot {state.slot}; allowed are a position "
                    "of at least 1 and a state that was not freed"
                )
            room = self._max_seq_len - 1 - request.position
            wanted.append(min(request.num_drafts, self._max_pending, room))
            if wanted[i] > 0:
                live.append(i)
        if live:
            masks = {i: mask for i in live if (mask := requests[i].grammar_bitmask) is not None}
            if self._chaining is not None and len(live) == 1 and not masks:
                self._chain_one(requests, states, wanted, live[0], tokens, log_probs)
            else:
                self._chain(requests, states, wanted, live, masks, tokens, log_probs)
        drafts = []
        for i, (state, some) in enumerate(zip(states, tokens, strict=True)):
            state.last_num_drafted = len(some)
            confidence = log_probs[i] if log_probs is not None else None
            state.last_log_probs = confidence
            drafts.append(Draft(tokens=some, confidence=confidence))
        return drafts

    def _chain(
        self,
        requests: Sequence[DraftRequest],
        states: Sequence[DeepseekV4MtpState],
        wanted: list[int],
        live: list[int],
        masks: dict[int, torch.Tensor],
        tokens: list[list[int]],
        log_probs: list[list[float]] | None,
    ) -> None:
        """Fill `tokens` (and `log_probs`) of the sequences `live`."""
        rows = self._rows
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
            picked, measured = self._pick(normed, live, masks if first else {})
            kept = []
            for row, i in enumerate(live):
                token = picked[row]
                if token < 0:
                    self._end_chain(states[i], first=first, masked=first and i in masks)
                    continue
                if measured is not None and measured[row] < self._min_log_prob:
                    continue
                tokens[i].append(token)
                if log_probs is not None and measured is not None:
                    log_probs[i].append(measured[row])
                if len(tokens[i]) < wanted[i]:
                    kept.append(row)
            if not kept:
                return
            if len(kept) != len(live):
                streams = streams.index_select(0, torch.tensor(kept, device=self._device))
                live = [live[row] for row in kept]
            for row, i in enumerate(live):
                state = states[i]
                state.last_key = key = state.last_key + 1
                rows.ids[row] = tokens[i][-1]
                rows.keys[row] = key
                rows.slots[row] = state.slot
                rows.first_keys[row] = self._mark_written(state, key)
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
        """`_chain` of the one sequence i, by a block that runs it in one call."""
        assert self._chaining is not None
        state = states[i]
        _, count = self._place_first(requests, states, [i])
        ids, keys, slots, first_keys = self._rows.upload(count)
        drawn = self._chaining.draft_greedy(
            ids=ids,
            hiddens=self._hiddens[:count],
            keys=keys,
            slots=slots,
            first_keys=first_keys,
            ring=self.ring,
            embed_tokens=self._embed_tokens,
            lm_head=self._lm_head,
            num_rows=self._vocab_rows,
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
        rows = self._rows
        ends, parts, count = [], [], 0
        for i in live:
            request, state = requests[i], states[i]
            key = request.position - 1
            self._continue_at(state, key)
            if state.pending:
                parts.append(self._pending[state.slot, : len(state.pending)])
                count += self._place_pending(state, count)
            rows.ids[count] = request.last_token
            rows.keys[count] = key
            rows.slots[count] = state.slot
            rows.first_keys[count] = self._mark_written(state, key)
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
        self.num_nonfinite += 1
        if first:
            # The row just written may be what is not finite, and would spoil a window of queries.
            state.start_at(state.last_key + 1)

    def _pick(
        self, normed: torch.Tensor, live: list[int], masks: dict[int, torch.Tensor]
    ) -> tuple[list[int], list[float] | None]:
        """Each row's best id, -1 where its logits are not finite, and its log-probability."""
        measure = self._confidence or self._min_log_prob > -math.inf
        logits = self._lm_head.matmul(normed, num_rows=self._vocab_rows)
        for row, i in enumerate(live):
            if i in masks:
                logits[row].masked_fill_(~_allowed(masks[i], logits), -math.inf)
        if logits.device.type != "cpu":
            # One read for the whole batch; a NaN is the largest of its row.
            best, at = logits.max(-1)
            ids: list[int] = torch.where(torch.isfinite(best), at, -1).tolist()
            if not measure:
                return ids, None
            return ids, (best - logits.logsumexp(-1)).tolist()
        table = logits.numpy()
        ids = table.argmax(-1).tolist()
        measured: list[float] | None = [] if measure else None
        for row, token in enumerate(ids):
            top = float(table[row, token])
            if not math.isfinite(top):
                ids[row] = -1
            if measured is not None:
                finite = ids[row] >= 0
                measured.append(-math.log(np.exp(table[row] - top).sum()) if finite else -math.inf)
        return ids, measured


def _allowed(bitmask: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Bits of int32 words, lowest first, as [vocab rows] bool beside `logits`."""
    words = bitmask.to(logits.device).flatten()
    bits = (words[:, None] >> torch.arange(32, device=logits.device)) & 1
    return bits.flatten()[: logits.shape[-1]].bool()
