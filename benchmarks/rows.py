"""What a drafter's rows are worth: the bundled head's rows kept as other engines keep theirs.

`RowsDrafter` is a second, plain implementation of the loop around the MTP block. It keeps a
sequence's rows as a list, so that any policy about which rows stay can be tried: one that loses
rows lets the remaining ones move together, as an append-only cache does, each at the rotary
position it was made for. With every fault turned off it must draft what `DeepseekV4MtpHead` drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import common  # noqa: F401  (puts a bare checkout on the path)
import torch

from paceline.cache.drafter import DrafterRing
from paceline.draft import DraftProposer
from paceline.models.step import MtpInputs
from paceline.types import MAX_NUM_DRAFTS, Draft, DraftRequest, PairKey

Streams = torch.Tensor
Collapse = Callable[[Streams], Streams]
"""[n, hc_mult, hidden] to the same shape, all streams of a row alike."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which rows a drafter has, and what they are made of.

    Attributes:
        name: in results.
        keep: rows of a verified chain that stay. "first": the one made from the target's streams.
            "accepted": those of accepted drafts too, as the recursion left them. "short": one fewer
            than "accepted", what a rollback by refused drafts leaves of an append-only cache.
        catch_up: pairs of accepted drafts that are written from the target's streams: "all",
            "last" (only the pair of the last draft of a chain accepted whole, for which the
            recursion made no row), or "none".
        prompt_rows: most rows written of a prompt.
        prompt_shift: tokens by which a prompt's pairs are off.
        stream_lag: positions by which all streams are late.
        collapsed: the target's streams are reduced to one, repeated.
    """

    name: str
    keep: str = "first"
    catch_up: str = "all"
    prompt_rows: int = 127
    prompt_shift: int = 0
    stream_lag: int = 0
    collapsed: bool = False


EXACT = Policy(name="exact")
POLICIES = (
    EXACT,
    Policy(name="recursion", keep="accepted", catch_up="last"),
    Policy(name="recursion_gap", keep="accepted", catch_up="none"),
    Policy(name="first_only", catch_up="none"),
    Policy(name="short", keep="short", catch_up="none"),
    Policy(name="no_prompt", prompt_rows=0),
    Policy(name="prompt_shift", prompt_shift=1),
    Policy(name="stream_lag", stream_lag=1),
    Policy(name="collapsed", collapsed=True),
    Policy(name="blind", keep="short", catch_up="none", prompt_rows=0, collapsed=True),
)


@dataclass(eq=False)
class RowsState:
    """Rows of one sequence in the order of their keys, which may have gaps."""

    slot: int
    rows: list[torch.Tensor] = field(default_factory=list)
    drafted: list[torch.Tensor] = field(default_factory=list)
    last_key: int = -1
    num_drafted: int = 0
    latest: dict[int, Streams] = field(default_factory=dict)


class RowsDrafter(DraftProposer[RowsState]):
    """The MTP block, stepped draft by draft under a `Policy`.

    Args:
        context: what an `LLM` tells a factory of proposers.
        policy: which rows it has.
        collapse: how streams are reduced, where the policy wants that.
    """

    def __init__(self, context: Any, policy: Policy, *, collapse: Collapse | None = None) -> None:
        built, config = context.built, context.config
        self.policy = policy
        self._block, self._embed, self._head = built.mtp, built.embed_tokens, built.lm_head
        self._window = config.sliding_window
        self._collapse = collapse
        self._ring = DrafterRing.allocate(
            config,
            num_slots=context.max_num_seqs,
            max_width=MAX_NUM_DRAFTS + 1,
            device=built.embed_tokens.table.device,
            dtype=torch.float32,
        )
        self._free = list(range(context.max_num_seqs))

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        """One more than are written, for those that read late."""
        return min(max_seq_len, self._window + 1)

    def alloc_state(self) -> RowsState:
        """Take a slot."""
        return RowsState(self._free.pop())

    def free_state(self, state: RowsState) -> None:
        """Give it back."""
        if state.slot >= 0:
            self._free.append(state.slot)
        state.slot = -1

    # What rows are made of

    def _streams(self, hiddens: Streams, first: int, state: RowsState) -> Streams:
        """The streams of positions first and on as the policy has them."""
        if self.policy.stream_lag:
            before = state.latest.get(first - 1, hiddens[0])
            late = torch.cat((before[None], hiddens[:-1]))
            last = first + hiddens.shape[0] - 1
            state.latest = {last - n: hiddens[-1 - n].clone() for n in range(min(2, len(hiddens)))}
            hiddens = late
        return self._collapse(hiddens) if self.policy.collapsed and self._collapse else hiddens

    def _inputs(
        self,
        tokens: Sequence[int],
        streams: Streams,
        keys: Sequence[int],
        slots: Sequence[int],
        first_keys: Sequence[int],
    ) -> MtpInputs:
        return MtpInputs(
            embeds=self._embed.gather(torch.tensor(tokens)),
            hiddens=streams.contiguous(),
            keys=torch.tensor(keys),
            slots=torch.tensor(slots),
            first_keys=torch.tensor(first_keys),
        )

    def _append(self, tokens: Sequence[int], streams: Streams, key: int, state: RowsState) -> int:
        """Write rows and put them behind those held."""
        most = MAX_NUM_DRAFTS + 1
        for at in range(0, len(tokens), most):
            some = tokens[at : at + most]
            keys = range(key + at, key + at + len(some))
            slots = [state.slot] * len(some)
            inputs = self._inputs(some, streams[at : at + most], keys, slots, keys)
            self._block.write_rows(inputs, self._ring)
            state.rows += self._read(state.slot, key + at, len(some))
        state.last_key = key + len(tokens) - 1
        return len(tokens)

    def _read(self, slot: int, key: int, count: int) -> list[torch.Tensor]:
        places = torch.arange(key, key + count) % self._ring.rows.shape[1]
        return list(self._ring.rows[slot, places].clone())

    # The contract

    def prefill_drafter(
        self,
        prompt_tokens: Sequence[int],
        hiddens: Streams,
        state: RowsState,
        *,
        first_position: int = 0,
    ) -> int:
        """Write the prompt's last pairs."""
        streams = self._streams(hiddens, first_position, state)
        last = len(prompt_tokens) - 2
        stop = min(first_position + hiddens.shape[0] - 1, last) + 1
        start = max(first_position, last - self.policy.prompt_rows + 1)
        if start >= stop:
            return 0
        ahead = 1 - self.policy.prompt_shift
        tokens = prompt_tokens[start + ahead : stop + ahead]
        rows = streams[start - first_position : stop - first_position]
        return self._append(tokens, rows, start, state)

    def propose(self, request: DraftRequest, state: RowsState) -> Draft:
        """Draft for one."""
        return self.propose_batch((request,), (state,))[0]

    def propose_batch_max(self) -> int:
        """As many as there are slots."""
        return self._ring.inert_slot

    def propose_batch(
        self, requests: Sequence[DraftRequest], states: Sequence[RowsState]
    ) -> list[Draft]:
        """One forward for each draft position, over the sequences that go on."""
        keys = [request.position - 1 for request in requests]
        tokens = [[request.last_token] for request in requests]
        streams = []
        for request, state, key in zip(requests, states, keys, strict=True):
            held = state.rows = state.rows[-(self._window - 1) :]
            if held:
                places = torch.arange(key - len(held), key) % self._ring.rows.shape[1]
                self._ring.rows[state.slot, places] = torch.stack(held)
            streams.append(self._streams(request.target_hidden[None], key, state))
        live = list(range(len(requests)))
        while live:
            inputs = self._inputs(
                [tokens[i][-1] for i in live],
                torch.cat([streams[i] for i in live]),
                [keys[i] + len(tokens[i]) - 1 for i in live],
                [states[i].slot for i in live],
                [keys[i] - len(states[i].rows) for i in live],
            )
            output = self._block.forward(inputs, self._ring)
            best = self._head.matmul(output.normed).argmax(-1).tolist()
            for row, i in enumerate(live):
                streams[i] = output.streams[row : row + 1].clone()
                tokens[i].append(best[row])
            live = [i for i in live if len(tokens[i]) <= requests[i].num_drafts]
        drafts = []
        for state, key, some in zip(states, keys, tokens, strict=True):
            drafted = some[1:]
            state.drafted = self._read(state.slot, key, len(drafted))
            state.num_drafted = len(drafted)
            state.last_key = key
            drafts.append(Draft(tokens=drafted))
        return drafts

    def after_verify(self, num_accepted: int, state: RowsState) -> None:
        """Keep what the policy keeps."""
        most = {"first": 1, "accepted": num_accepted + 1, "short": num_accepted}[self.policy.keep]
        state.rows += state.drafted[:most]
        if self.policy.keep == "accepted":
            state.last_key += min(num_accepted, state.num_drafted - 1)
        state.drafted = []

    def catchup_batch(
        self,
        tokens: Sequence[Sequence[int]],
        hiddens: Sequence[Streams],
        first_pos: Sequence[int],
        states: Sequence[RowsState],
    ) -> int:
        """Write what the policy catches up."""
        total = 0
        for some, given, position, state in zip(tokens, hiddens, first_pos, states, strict=True):
            if not some:
                continue
            streams, key = self._streams(given, position - 1, state), position - 1
            whole = len(some) == state.num_drafted
            if self.policy.catch_up == "all":
                total += self._append(some, streams, key, state)
            elif self.policy.catch_up == "last" and whole:
                last = len(some) - 1
                total += self._append(some[last:], streams[last:], key + last, state)
        return total

    def catchup_drafter(
        self,
        tokens: Sequence[int],
        hiddens: Streams,
        row_base: int,
        pos_base: int,
        state: RowsState,
    ) -> int:
        """Not needed where every step drafts."""
        return 0

    def drafter_rows(self, state: RowsState) -> int:
        """Rows held."""
        return len(state.rows)

    def last_pair_key(self, state: RowsState) -> PairKey | None:
        """Key of the newest."""
        return PairKey(state.last_key) if state.rows else None


def head_collapse(weights: Any, config: Any) -> Collapse:
    """Reduce streams as the trunk does before its norm, and repeat the result."""
    from paceline.models.deepseek_v4.hyper import Collapse as Weighted

    reduce = Weighted(weights, "", config)

    def collapse(streams: Streams) -> Streams:
        return reduce(streams)[:, None].expand_as(streams).contiguous()

    return collapse
