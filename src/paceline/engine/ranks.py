"""Drafting with a proposer that is spread over several ranks.

Two shapes. One engine on rank 0 leads and the others follow: every call that changes the proposer
or runs its forward is sent as a command first, so that all ranks make the same calls, in the same
order, on states of their own (`LeadingProposer`, `follow`). Or each rank has an engine and requests
of its own, and only the drafter's forward is shared: then all ranks run the same number of
forwards, empty ones where they have nothing to draft (`LockstepProposer`, `step_together`).

The target stays whole on its rank in both. See docs/ranks.md.
"""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch

from paceline.dist import RankGroup
from paceline.draft.proposer import ContextFeed, DraftProposer, KvHandover
from paceline.types import ConfigError, Draft, DrafterKv, DraftRequest, PairKey, RankError

__all__ = [
    "LeadingProposer",
    "LockstepProposer",
    "SharesForwards",
    "StateHandle",
    "follow",
    "lead",
    "step_together",
]

_log = logging.getLogger(__name__)

S = TypeVar("S")
E = TypeVar("E")

_STOP = "stop"

_UNKNOWN = 2**63 - 1
"""A budget beyond any context."""


@dataclass(frozen=True, slots=True)
class StateHandle:
    """Names a sequence's states, one on each rank.

    Attributes:
        number: never used twice.
    """

    number: int


@dataclass(slots=True)
class _Held(Generic[S]):
    """One sequence on one rank: the proposer's state, and the tokens it was told of so far."""

    state: S
    budget: int
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Command:
    """A call as all ranks make it.

    Attributes:
        name: of the proposer's method.
        args: JSON values; tagged objects stand for states, rows, tokens, tensors and requests.
        named: the same by name.
        new: number of what the call makes, or None.
        tensors: what the tags "tensor" count through.
    """

    name: str
    args: list[Any]
    named: dict[str, Any] = field(default_factory=dict)
    new: int | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)

    def tensor(self, tensor: torch.Tensor | None) -> Any:
        """Tag a tensor."""
        if tensor is None:
            return None
        self.tensors.append(tensor)
        return {"tensor": len(self.tensors) - 1}

    def to_bytes(self) -> tuple[bytes, list[torch.Tensor]]:
        """Write down for the other ranks; tensors of a CPU are in the bytes, the others apart."""
        kinds = [
            [str(t.dtype).removeprefix("torch."), list(t.shape), t.device.type]
            for t in self.tensors
        ]
        fields = {
            "name": self.name,
            "args": self.args,
            "named": self.named,
            "new": self.new,
            "tensors": kinds,
        }
        text = json.dumps(fields, separators=(",", ":")).encode()
        near = [_bytes(t) for t in self.tensors if t.device.type == "cpu"]
        apart = [t for t in self.tensors if t.device.type != "cpu"]
        return b"".join((len(text).to_bytes(8, "little"), text, *near)), apart

    @classmethod
    def receive(cls, group: RankGroup) -> _Command:
        """Wait for rank 0's next command."""
        data = group.receive()
        end = 8 + int.from_bytes(data[:8], "little")
        fields = json.loads(data[8:end])
        command = cls(fields["name"], fields["args"], fields["named"], fields["new"])
        for name, shape, device in fields["tensors"]:
            tensor = torch.empty(shape, dtype=getattr(torch, name), device=device)
            if device == "cpu":
                size = tensor.numel() * tensor.element_size()
                if size:
                    piece = torch.frombuffer(bytearray(data[end : end + size]), dtype=torch.uint8)
                    tensor = piece.view(tensor.dtype).reshape(shape)
                end += size
            else:
                group.receive_into(tensor)
            command.tensors.append(tensor)
        return command

    def digest(self) -> int:
        """What the ranks compare of a call's arguments, tensors bit for bit."""
        text = json.dumps([self.name, self.args, self.named, self.new]).encode()
        total = zlib.crc32(text)
        for tensor in self.tensors:
            total = zlib.crc32(_bytes(tensor), total)
        return total


class _Rank(Generic[S]):
    """Runs commands on one rank's proposer; the same code on the rank that leads."""

    def __init__(self, proposer: DraftProposer[S], group: RankGroup, *, debug: bool) -> None:
        self.proposer = proposer
        self.group = group
        self.held: dict[int, _Held[S]] = {}
        self.rows: dict[int, DrafterKv] = {}
        self._debug = debug

    def run(self, command: _Command) -> Any:
        """Make the call, and agree with the other ranks on how it went.

        Raises:
            RankError: it failed on some rank, or the ranks differ; the states it touched begin
                anew then, on all ranks.
            Exception: all ranks raised it alike, such as a refusal; nothing else happens.
        """
        self.group.begin()
        answer: Any = None
        if self._debug:
            arguments = command.digest()
        try:
            try:
                answer = self._call(command)
            except Exception as error:
                alike = self.group.fail(error)
                if alike or isinstance(error, RankError):
                    raise
                text = f"rank {self.group.rank} failed: {type(error).__name__}: {error}"
                raise RankError(text) from error
            told = _summary(command.name, answer)
            if self._debug:
                told = zlib.crc32(repr(self._rows_of(command)).encode(), told)
            self.group.end(told, arguments if self._debug else 0)
        except RankError:
            self._undo(command, answer)
            raise
        return answer

    def _call(self, command: _Command) -> Any:
        proposer, new = self.proposer, command.new
        if command.name == "alloc_state_for":
            assert new is not None
            budget = command.args[0]
            self.held[new] = _Held(proposer.alloc_state_for(budget), budget)
            return None
        if command.name == "free_state":
            held = self.held.pop(command.args[0]["state"], None)
            return None if held is None else proposer.free_state(held.state)
        if command.name == "free_drafter_kv":
            kv = self.rows.pop(command.args[0]["rows"], None)
            return None if kv is None else proposer.free_drafter_kv(kv)
        args = [self._value(arg, command) for arg in command.args]
        answer = getattr(proposer, command.name)(*args, **command.named)
        if new is not None and isinstance(answer, DrafterKv):
            self.rows[new] = answer
        if command.name == "install_drafter_kv" and answer is True:
            del self.rows[command.args[0]["rows"]]
        return answer

    def _value(self, arg: Any, command: _Command) -> Any:
        if isinstance(arg, list):
            return [self._value(one, command) for one in arg]
        if not isinstance(arg, dict):
            return arg
        if "tensor" in arg:
            return command.tensors[arg["tensor"]]
        if "state" in arg:
            return self._there(arg["state"]).state
        if "rows" in arg:
            return self.rows[arg["rows"]]
        if "told" in arg:
            return self._tokens(arg)
        return DraftRequest(**{name: self._value(one, command) for name, one in arg.items()})

    def _there(self, number: int) -> _Held[S]:
        held = self.held.get(number)
        if held is None:
            raise LookupError(f"state {number} was lost when a call failed")
        return held

    def _tokens(self, arg: dict[str, Any]) -> list[int]:
        tokens = self._there(arg["told"]).tokens
        if len(tokens) < arg["keep"]:
            raise LookupError(f"{arg['keep']} tokens of state {arg['told']} are not there")
        tokens[arg["keep"] :] = arg["more"]
        return tokens if arg["length"] == len(tokens) else tokens[: arg["length"]]

    def _undo(self, command: _Command, answer: Any) -> None:
        """Drop what a failed call made, and let the states it touched begin anew.

        An empty history costs less than one that differs from rank to rank.
        """
        proposer, new = self.proposer, command.new
        if new is not None:
            made = self.held.pop(new, None)
            if made is not None:
                _quietly(proposer.free_state, made.state)
            rows = self.rows.pop(new, None)
            if rows is not None:
                _quietly(proposer.free_drafter_kv, rows)
        for number in _states(command):
            held = self.held.get(number)
            if held is not None:
                _quietly(proposer.free_state, held.state)
                fresh = _quietly(proposer.alloc_state_for, held.budget)
                if fresh is None:
                    del self.held[number]
                else:
                    held.state = fresh

    def _rows_of(self, command: _Command) -> list[Any]:
        held = [self.held.get(number) for number in _states(command)]
        return [
            (self.proposer.drafter_rows(one.state), self.proposer.last_pair_key(one.state))
            for one in held
            if one is not None
        ]


class LeadingProposer(DraftProposer[StateHandle]):
    """Rank 0's side of a proposer that all ranks hold a part of; the others `follow`.

    Made by `lead`. Every call that changes a state or runs a forward is a command to all ranks and
    ends when all of them agree that it went well. If it raised on one, if a rank died, or if the
    ranks answer differently, it raises `RankError` on all and costs its drafts; the states that it
    touched begin anew. What all ranks raise alike is raised as it is. Questions are answered on
    rank 0. Drafts are always given as ids on the host.

    Args:
        inner: rank 0's part.
        group: the ranks; this one is rank 0.
        debug: compare arguments, bit for bit, and rows after each command.

    Attributes:
        inner: rank 0's part.
        num_commands: commands sent.
    """

    needs_comm = True

    def __init__(self, inner: DraftProposer[Any], group: RankGroup, *, debug: bool = False) -> None:
        if group.rank != 0:
            raise ConfigError(
                f"rank {group.rank} cannot lead; allowed is rank 0, while the others follow"
            )
        self.inner = inner
        self.num_commands = 0
        self.block_gamma = inner.block_gamma
        self.prefill_uses_shared_buffers = inner.prefill_uses_shared_buffers
        self._group = group
        self._rank: _Rank[Any] = _Rank(inner, group, debug=debug)
        self._told: dict[int, list[int]] = {}
        self._next = 0
        self._is_closed = False

    def close(self) -> None:
        """Let the other ranks go; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            if not self._group.is_broken:
                self._send(_Command(_STOP, []))

    # Questions

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        """Ask rank 0's part."""
        return self.inner.prefill_hidden_rows(max_seq_len)

    def propose_batch_max(self) -> int:
        """Ask rank 0's part."""
        return self.inner.propose_batch_max()

    def drafter_rows(self, state: StateHandle) -> int:
        """Ask rank 0's part."""
        held = self._rank.held.get(state.number)
        return 0 if held is None else self.inner.drafter_rows(held.state)

    def last_pair_key(self, state: StateHandle) -> PairKey | None:
        """Ask rank 0's part."""
        held = self._rank.held.get(state.number)
        return None if held is None else self.inner.last_pair_key(held.state)

    def last_confidence(self, state: StateHandle) -> float | None:
        """Ask rank 0's part."""
        held = self._rank.held.get(state.number)
        return None if held is None else self.inner.last_confidence(held.state)

    # Commands

    def alloc_state(self) -> StateHandle:
        """Make a state of unknown budget on every rank."""
        return self.alloc_state_for(_UNKNOWN)

    def alloc_state_for(self, budget_tokens: int) -> StateHandle:
        """Make a state on every rank."""
        number = self._number()
        self._lead(_Command("alloc_state_for", [budget_tokens], new=number))
        return StateHandle(number)

    def free_state(self, state: StateHandle) -> None:
        """Free the states on all ranks; only here where the others cannot be reached."""
        self._told.pop(state.number, None)
        if state.number not in self._rank.held:
            return
        if self._is_cut:
            self.inner.free_state(self._rank.held.pop(state.number).state)
            return
        self._lead(_Command("free_state", [_tag(state)]))

    def propose(self, request: DraftRequest, state: StateHandle) -> Draft:
        """Draft on all ranks; the ids are rank 0's."""
        command = _Command("propose", [])
        command.args = [self._request(request, state, command), _tag(state)]
        draft: Draft = self._named(self._lead(command))
        return draft

    def propose_batch(
        self, requests: Sequence[DraftRequest], states: Sequence[StateHandle]
    ) -> list[Draft] | None:
        """The same for several."""
        command = _Command("propose_batch", [])
        asked = [self._request(*each, command) for each in zip(requests, states, strict=True)]
        command.args = [asked, [_tag(state) for state in states]]
        drafts = self._lead(command)
        return [self._named(draft) for draft in drafts] if isinstance(drafts, list) else drafts

    def after_verify(self, num_accepted: int, state: StateHandle) -> None:
        """Hand the verdict to all ranks."""
        self._lead(_Command("after_verify", [num_accepted, _tag(state)]))

    def prefill_drafter(
        self,
        prompt_tokens: Sequence[int],
        hiddens: torch.Tensor,
        state: StateHandle,
        *,
        first_position: int = 0,
    ) -> int:
        """Feed all ranks, those that want it."""
        if _declines(self.inner, ContextFeed, "prefill_drafter"):
            return 0
        command = _Command("prefill_drafter", [], {"first_position": first_position})
        told = self._tokens(prompt_tokens, state)
        command.args = [told, command.tensor(hiddens), _tag(state)]
        return self._count(self._lead(command))

    def catchup_drafter(
        self,
        tokens: Sequence[int],
        hiddens: torch.Tensor,
        row_base: int,
        pos_base: int,
        state: StateHandle,
    ) -> int:
        """Feed all ranks, those that want it."""
        if _declines(self.inner, ContextFeed, "catchup_drafter"):
            return 0
        command = _Command("catchup_drafter", [])
        command.args = [
            list(tokens),
            command.tensor(hiddens),
            row_base,
            pos_base,
            _tag(state),
        ]
        return self._count(self._lead(command))

    def catchup_batch(
        self,
        tokens: Sequence[Sequence[int]],
        hiddens: Sequence[torch.Tensor],
        first_pos: Sequence[int],
        states: Sequence[StateHandle],
    ) -> int:
        """Feed all ranks, those that want it."""
        if _declines(self.inner, ContextFeed, "catchup_batch"):
            return 0
        command = _Command("catchup_batch", [])
        command.args = [
            [list(some) for some in tokens],
            [command.tensor(streams) for streams in hiddens],
            list(first_pos),
            [_tag(state) for state in states],
        ]
        return self._count(self._lead(command))

    def take_drafter_kv(self, state: StateHandle) -> DrafterKv | None:
        """Move the rows out on all ranks."""
        return self._rows("take_drafter_kv", _tag(state))

    def snapshot_drafter_kv(self, state: StateHandle, through_key: int) -> DrafterKv | None:
        """Copy rows on all ranks."""
        return self._rows("snapshot_drafter_kv", _tag(state), through_key)

    def share_drafter_kv(self, kv: DrafterKv) -> DrafterKv | None:
        """Share rows on all ranks."""
        if kv.blocks[0] not in self._rank.rows:
            return None
        return self._rows("share_drafter_kv", {"rows": kv.blocks[0]})

    def install_drafter_kv(self, kv: DrafterKv, state: StateHandle) -> bool:
        """Move rows in on all ranks; refused where they are not the caller's."""
        if kv.blocks[0] not in self._rank.rows:
            return False
        command = _Command("install_drafter_kv", [{"rows": kv.blocks[0]}, _tag(state)])
        return self._lead(command) is True

    def free_drafter_kv(self, kv: DrafterKv) -> None:
        """Free rows on all ranks; only here where the others cannot be reached."""
        if kv.blocks[0] not in self._rank.rows:
            return
        if self._is_cut:
            self.inner.free_drafter_kv(self._rank.rows.pop(kv.blocks[0]))
            return
        self._lead(_Command("free_drafter_kv", [{"rows": kv.blocks[0]}]))

    def _rows(self, name: str, *args: Any) -> DrafterKv | None:
        if _declines(self.inner, KvHandover, name):
            return None
        number = self._number()
        kv = self._lead(_Command(name, list(args), new=number))
        # Blocks differ from rank to rank; the number names the rows on all of them.
        return replace(kv, blocks=[number]) if isinstance(kv, DrafterKv) else None

    def _lead(self, command: _Command) -> Any:
        if self._is_cut:
            what = "the other ranks were let go" if self._is_closed else "the group is broken"
            raise RankError(f"{command.name} cannot run on all ranks: {what}")
        self._send(command)
        try:
            return self._rank.run(command)
        except Exception:
            # Some rank may not have come to the tokens; the next command brings all of them.
            for number in _states(command):
                self._told.pop(number, None)
            raise

    @property
    def _is_cut(self) -> bool:
        return self._is_closed or self._group.is_broken

    def _send(self, command: _Command) -> None:
        self.num_commands += 1
        self._group.send(*command.to_bytes())

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _named(self, draft: Any) -> Any:
        """A draft that counts as the inner proposer's."""
        if isinstance(draft, Draft) and draft.source is None:
            return replace(draft, source=type(self.inner).__name__)
        return draft

    def _count(self, rows: Any) -> int:
        return rows if isinstance(rows, int) else 0

    def _request(self, request: DraftRequest, state: StateHandle, command: _Command) -> Any:
        return {
            "last_token": request.last_token,
            "position": request.position,
            "target_hidden": command.tensor(request.target_hidden),
            "num_drafts": request.num_drafts,
            "history": self._tokens(request.history, state),
            "grammar_bitmask": command.tensor(request.grammar_bitmask),
            "target_hidden_stack": command.tensor(request.target_hidden_stack),
        }

    def _tokens(self, tokens: Sequence[int], state: StateHandle) -> Any:
        """Tokens of a sequence, of which the ranks hold a beginning."""
        told = self._told.setdefault(state.number, [])
        given = list(tokens)
        keep = len(told) if told[: len(given)] == given[: len(told)] else 0
        more = given[keep:]
        told[keep:] = more
        return {"told": state.number, "keep": keep, "more": more, "length": len(given)}


def lead(
    proposer: DraftProposer[Any], group: RankGroup, *, debug: bool = False
) -> DraftProposer[Any]:
    """Return what rank 0's engine is to ask: the proposer itself where it needs no other rank.

    Raises:
        ConfigError: the proposer needs all ranks, and this is not rank 0.
    """
    if group.size == 1 or not proposer.needs_comm or isinstance(proposer, LeadingProposer):
        return proposer
    return LeadingProposer(proposer, group, debug=debug)


@torch.inference_mode()
def follow(group: RankGroup, proposer: DraftProposer[Any], *, debug: bool = False) -> int:
    """Run rank 0's commands on this rank's part of a proposer, until rank 0 lets go.

    A command that fails is logged once, and the next one is waited for: rank 0 counts failures.

    Args:
        group: the ranks.
        proposer: this rank's part.
        debug: as rank 0 says.

    Returns:
        Commands run.

    Raises:
        RankError: rank 0 died, or a rank did not answer in time.
    """
    rank: _Rank[Any] = _Rank(proposer, group, debug=debug)
    num_commands, told = 0, False
    while True:
        command = _Command.receive(group)
        num_commands += 1
        if command.name == _STOP:
            for held in rank.held.values():
                _quietly(proposer.free_state, held.state)
            return num_commands
        try:
            rank.run(command)
        except Exception as error:
            if group.is_broken:
                raise
            if not told:
                _log.warning("%s: %s; its drafts are dropped (said once)", command.name, error)
                told = True


class SharesForwards(Protocol):
    """What a proposer offers whose forwards run on all ranks, for requests of each."""

    def draft_nothing(self) -> None:
        """Run one forward without rows of its own, for the rows of other ranks.

        Begins with `RankGroup.meet(0)`, as every forward of the proposer begins with `meet`.
        """
        ...


class LockstepProposer(DraftProposer[Any]):
    """A rank's own requests, drafted by forwards that all ranks take part in.

    Each forward of the inner proposer begins with `RankGroup.meet`. A rank that has drafted all it
    wants, or nothing, runs empty forwards in `finish` until the others are done too, so numbers of
    drafts, of sequences and of feeds may differ from rank to rank, and be 0. A call that raises on
    one rank costs the drafts of all ranks that are drafting then.

    Args:
        inner: this rank's part; also a `SharesForwards`.
        group: the ranks, all of which have an engine.

    Attributes:
        inner: this rank's part.
        num_empty: empty forwards run.
        num_faults: failures, of this rank or another, met while this one had nothing to draft.
    """

    needs_comm = True

    def __init__(self, inner: DraftProposer[Any], group: RankGroup) -> None:
        if not callable(getattr(inner, "draft_nothing", None)):
            raise ConfigError(
                f"{type(inner).__name__} has no draft_nothing(); allowed are proposers that can "
                "run a forward without rows of their own"
            )
        self.inner = inner
        self.num_empty = 0
        self.num_faults = 0
        self.block_gamma = inner.block_gamma
        self.prefill_uses_shared_buffers = inner.prefill_uses_shared_buffers
        self._group = group

    @torch.inference_mode()
    def finish(self, *, goes_on: bool) -> bool:
        """End a step of this rank: take part in the others' forwards until all have ended it.

        Args:
            goes_on: whether this rank has more to do.

        Returns:
            Whether any rank has.

        Raises:
            RankError: a rank died or did not answer in time.
        """
        while True:
            try:
                self._group.begin()
                any_goes_on = self._group.finish(goes_on=goes_on)
                if any_goes_on is not None:
                    return any_goes_on
                self.num_empty += 1
                self._call("draft_nothing")
            except Exception as error:
                if self._group.is_broken:
                    raise
                if not self.num_faults:
                    _log.warning("an empty forward: %s; drafts are dropped (said once)", error)
                self.num_faults += 1

    def _call(self, name: str, *args: Any, **named: Any) -> Any:
        try:
            return getattr(self.inner, name)(*args, **named)
        except Exception as error:
            self._group.fail(error)
            raise

    def _forward(self, name: str, *args: Any, **named: Any) -> Any:
        self._group.begin()
        return self._call(name, *args, **named)

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        """Hand on."""
        return self.inner.prefill_hidden_rows(max_seq_len)

    def propose_batch_max(self) -> int:
        """Hand on."""
        return self.inner.propose_batch_max()

    def drafter_rows(self, state: Any) -> int:
        """Hand on."""
        return self.inner.drafter_rows(state)

    def last_pair_key(self, state: Any) -> PairKey | None:
        """Hand on."""
        return self.inner.last_pair_key(state)

    def last_confidence(self, state: Any) -> float | None:
        """Hand on."""
        return self.inner.last_confidence(state)

    def alloc_state(self) -> Any:
        """Hand on."""
        return self.inner.alloc_state()

    def alloc_state_for(self, budget_tokens: int) -> Any:
        """Hand on."""
        return self.inner.alloc_state_for(budget_tokens)

    def free_state(self, state: Any) -> None:
        """Hand on."""
        self.inner.free_state(state)

    def after_verify(self, num_accepted: int, state: Any) -> None:
        """Hand on."""
        self.inner.after_verify(num_accepted, state)

    def propose(self, request: DraftRequest, state: Any) -> Draft:
        """Draft, with the other ranks in every forward."""
        draft: Draft = self._forward("propose", request, state)
        return draft

    def propose_batch(
        self, requests: Sequence[DraftRequest], states: Sequence[Any]
    ) -> list[Draft] | None:
        """The same for several."""
        drafts: list[Draft] | None = self._forward("propose_batch", requests, states)
        return drafts

    def prefill_drafter(
        self,
        prompt_tokens: Sequence[int],
        hiddens: torch.Tensor,
        state: Any,
        *,
        first_position: int = 0,
    ) -> int:
        """Feed, with the other ranks where that is a forward."""
        return int(
            self._forward(
                "prefill_drafter", prompt_tokens, hiddens, state, first_position=first_position
            )
        )

    def catchup_drafter(
        self,
        tokens: Sequence[int],
        hiddens: torch.Tensor,
        row_base: int,
        pos_base: int,
        state: Any,
    ) -> int:
        """Feed, with the other ranks where that is a forward."""
        return int(self._forward("catchup_drafter", tokens, hiddens, row_base, pos_base, state))

    def catchup_batch(
        self,
        tokens: Sequence[Sequence[int]],
        hiddens: Sequence[torch.Tensor],
        first_pos: Sequence[int],
        states: Sequence[Any],
    ) -> int:
        """Feed, with the other ranks where that is a forward."""
        return int(self._forward("catchup_batch", tokens, hiddens, first_pos, states))

    def take_drafter_kv(self, state: Any) -> DrafterKv | None:
        """Hand on."""
        return self.inner.take_drafter_kv(state)

    def install_drafter_kv(self, kv: DrafterKv, state: Any) -> bool:
        """Hand on."""
        return self.inner.install_drafter_kv(kv, state)

    def free_drafter_kv(self, kv: DrafterKv) -> None:
        """Hand on."""
        self.inner.free_drafter_kv(kv)

    def snapshot_drafter_kv(self, state: Any, through_key: int) -> DrafterKv | None:
        """Hand on."""
        return self.inner.snapshot_drafter_kv(state, through_key)

    def share_drafter_kv(self, kv: DrafterKv) -> DrafterKv | None:
        """Hand on."""
        return self.inner.share_drafter_kv(kv)


class _Steps(Protocol[E]):
    @property
    def has_work(self) -> bool: ...

    def step(self) -> list[E]: ...


def step_together(engine: _Steps[E], proposer: LockstepProposer) -> Iterator[list[E]]:
    """Step this rank's engine until no rank has anything left to do.

    Called on all ranks at once; a rank without requests gives empty steps. Requests may be added
    between the steps.

    Args:
        engine: this rank's, whose proposer is `proposer`.
        proposer: what it drafts with.

    Raises:
        RankError: a rank died or did not answer in time.
    """
    goes_on = proposer.finish(goes_on=engine.has_work)
    while goes_on:
        emissions = engine.step() if engine.has_work else []
        yield emissions
        goes_on = proposer.finish(goes_on=engine.has_work)


def _tag(state: StateHandle) -> dict[str, int]:
    return {"state": state.number}


def _states(command: _Command) -> list[int]:
    """Numbers of the states in a command; none where it frees one."""
    if command.name == "free_state":
        return []
    numbers = []
    for arg in command.args:
        for one in arg if isinstance(arg, list) else [arg]:
            if isinstance(one, dict) and "state" in one:
                numbers.append(one["state"])
    return numbers


def _summary(name: str, answer: Any) -> int:
    """What the ranks compare of an answer: ids and counts, not what noise may change."""
    if name in ("propose", "propose_batch"):
        drafts = answer if isinstance(answer, list) else [answer]
        answer = [_ids(draft) for draft in drafts]
    elif isinstance(answer, DrafterKv):
        answer = [answer.rows, answer.last_pair_key]
    return zlib.crc32(repr(answer).encode())


def _ids(draft: Any) -> Any:
    if not isinstance(draft, Draft):
        return type(draft).__name__
    return draft.tokens if draft.device_tokens is None else draft.device_tokens.tolist()


def _declines(proposer: DraftProposer[Any], concern: type, name: str) -> bool:
    return getattr(type(proposer), name) is getattr(concern, name)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()


def _quietly(call: Any, *args: Any) -> Any:
    with contextlib.suppress(Exception):
        return call(*args)
    return None
