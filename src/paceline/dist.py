"""Ranks that talk to each other: the only place that knows `torch.distributed`.

Two rules keep a group from waiting for ever. Every operation has a timeout, after which the group
is broken and says so. And before data moves, the ranks say in a frame of fixed size what each of
them wants; where they differ, or one of them has failed, all of them learn it in that exchange, all
raise, and none is left in an operation that the others will never enter.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from paceline.types import ConfigError, RankError

__all__ = ["RankGroup"]

_WORDS = 32
_HEAD = 4
_ROOM = _WORDS - _HEAD
"""A frame: what is wanted, how many words of load follow, two words to compare, the load."""

_FRAME_BYTES = 8192
"""A command up to this size is one broadcast."""

_DECIDE, _ALL_REDUCE, _ALL_GATHER, _BROADCAST, _FORWARD, _DONE, _FAILED = range(1, 8)

_NAMES = {
    _DECIDE: "decide",
    _ALL_REDUCE: "all_reduce",
    _ALL_GATHER: "all_gather",
    _BROADCAST: "broadcast",
    _FORWARD: "meet",
    _DONE: "done",
    _FAILED: "failed",
}


class RankGroup:
    """A fixed set of ranks, and what a proposer may do across them.

    Made by `connect` or `alone`. A proposer uses `decide`, `all_reduce`, `all_gather`, `broadcast`
    and `meet`; all ranks must call them in the same order with tensors of the same shapes. An
    engine uses the rest. Not for use from several threads at once.

    Attributes:
        rank: this one, from 0.
        size: how many there are.
        checked: whether ranks compare what they want before data moves. It costs one exchange of
            256 bytes between hosts for each operation. Without it a rank that fails halfway is
            noticed by the others when their timeout ends.
        is_broken: a rank died or did not answer in time; nothing more goes through.
        log: names and sizes of all operations so far, where recording was asked for; the same on
            all ranks.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        commands: dist.ProcessGroup | None,
        control: dist.ProcessGroup | None,
        data: dist.ProcessGroup | None,
        timeout: float,
        checked: bool,
        record: bool,
    ) -> None:
        self.rank = rank
        self.size = size
        self.checked = checked
        self.is_broken = False
        self.log: list[str] | None = [] if record else None
        self._commands = commands
        self._control = control
        self._data = data
        self._timeout = timeout
        self._met: list[int] | None = None
        self._fault: RankError | None = None
        self._is_open = True
        self._owns_world = False

    @classmethod
    def alone(cls) -> RankGroup:
        """A group of one: every operation gives back what it got."""
        return cls(
            rank=0,
            size=1,
            commands=None,
            control=None,
            data=None,
            timeout=0.0,
            checked=True,
            record=False,
        )

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        rank: int,
        size: int,
        backend: str = "gloo",
        timeout: float = 60.0,
        idle_timeout: float = 86_400.0,
        checked: bool = True,
        record: bool = False,
    ) -> RankGroup:
        """Meet the other ranks; returns when all are there.

        Where the process has met them through `torch.distributed` before, that is used and the
        address is not.

        Args:
            address: where ranks meet, "tcp://host:port" or "file:///path", the same for all.
            rank: this one.
            size: how many there are.
            backend: what moves tensors, "gloo" for a CPU's and "nccl" for a CUDA device's. Frames
                and commands go between the hosts by gloo.
            timeout: seconds an operation may take; also the longest that the slowest rank may
                lag behind.
            idle_timeout: seconds that a rank waits for its next command. A process that dies is
                noticed at once; this is for one that lives and says nothing.
            checked: see the class; the same on all ranks.
            record: keep the names of all operations in `log`.

        Raises:
            ConfigError: a number is out of range, or differs from what the process has met.
            RankError: the others did not come in time.
        """
        if size < 1 or not 0 <= rank < size:
            raise ConfigError(f"rank is {rank} of {size}; allowed is 0 to size - 1, of at least 1")
        for name, seconds in (("timeout", timeout), ("idle_timeout", idle_timeout)):
            if not seconds > 0:
                raise ConfigError(f"{name} is {seconds}; allowed are seconds above 0")
        if size == 1:
            return cls.alone()
        owns = not dist.is_initialized()
        limit = timedelta(seconds=timeout)
        try:
            if owns:
                dist.init_process_group(
                    "gloo", init_method=address, rank=rank, world_size=size, timeout=limit
                )
            elif (dist.get_rank(), dist.get_world_size()) != (rank, size):
                raise ConfigError(
                    f"rank is {rank} of {size}, but this process is rank {dist.get_rank()} of "
                    f"{dist.get_world_size()}; allowed is what it is"
                )
            idle = timedelta(seconds=idle_timeout)
            commands = dist.new_group(backend="gloo", timeout=idle)
            control = dist.new_group(backend="gloo", timeout=limit)
            data = control
            if backend != "gloo":
                data = dist.new_group(backend=backend, timeout=limit)
        except RuntimeError as error:
            raise RankError(f"rank {rank} of {size} could not meet the others: {error}") from error
        group = cls(
            rank=rank,
            size=size,
            commands=commands,
            control=control,
            data=data,
            timeout=timeout,
            checked=checked,
            record=record,
        )
        group._owns_world = owns
        return group

    def close(self) -> None:
        """Leave the group; a second call does nothing."""
        self.is_broken = self.is_broken or self.size > 1
        groups = {id(one): one for one in (self._commands, self._control, self._data) if one}
        self._commands = self._control = self._data = None
        for one in groups.values():
            dist.destroy_process_group(one)
        if groups and self._owns_world:
            dist.destroy_process_group()

    # What a proposer uses

    def decide(self, ids: Sequence[int]) -> list[int]:
        """Return rank 0's ids on every rank.

        To be asked at each draft position: ranks whose scores differ in the last bit would
        otherwise go on from different tokens.

        Args:
            ids: what this rank would take; lengths may differ.

        Raises:
            RankError: a rank failed or wants something else.
        """
        if self.size == 1:
            return list(ids)
        told: list[int] = []
        start = 0
        while True:
            frames = self._agree(_DECIDE, ids[start : start + _ROOM], len(ids))
            told += _load(frames[0])
            start += _ROOM
            if len(told) >= frames[0][2]:
                self._note("decide", len(told))
                return told

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over the ranks, in place; every rank gets the same bits.

        Args:
            tensor: contiguous, of any shape, the same on all ranks.

        Raises:
            RankError: a rank failed or wants something else.
        """
        self._move(_ALL_REDUCE, tensor, lambda: dist.all_reduce(tensor, group=self._data))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return [size, ...], the ranks' tensors, which have the same shape.

        Raises:
            RankError: a rank failed or wants something else.
        """
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        if self.size == 1:
            return tensor.unsqueeze(0).clone()
        given = tensor.contiguous()
        self._move(_ALL_GATHER, given, lambda: dist.all_gather(parts, given, group=self._data))
        return torch.stack(parts)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite a contiguous tensor with rank 0's.

        Raises:
            RankError: a rank failed or wants something else.
        """
        self._move(_BROADCAST, tensor, lambda: dist.broadcast(tensor, 0, group=self._data))
        return tensor

    def meet(self, num_rows: int) -> list[int]:
        """Begin a forward that all ranks take part in; ranks that have none run an empty one.

        For ranks with requests of their own (`paceline.engine.ranks.LockstepProposer`).

        Args:
            num_rows: rows this rank brings.

        Returns:
            Rows of each rank; 0 where it runs an empty forward.

        Raises:
            RankError: a rank failed or wants something else.
        """
        if self.size == 1:
            return [num_rows]
        if self._met is not None:
            counts, self._met = self._met, None
            return counts
        return self._counts(self._agree(_FORWARD, (), num_rows, also=_DONE))

    # What an engine uses

    def begin(self) -> None:
        """Open a command: from here to its end the ranks are in step."""
        self._fault = None
        self._met = None
        self._is_open = True

    def end(self, answer: int, arguments: int) -> None:
        """Agree that a command went well, or learn that it did not.

        Args:
            answer: digest of what it gave on this rank.
            arguments: digest of what it was called with, or 0.

        Raises:
            RankError: it failed on some rank, or ranks differ from rank 0; the same on all ranks.
        """
        if self.size == 1:
            return
        frames = self._agree(_DONE, (), answer, arguments)
        self._is_open = False
        for word, what in ((3, "arguments"), (2, "answer")):
            odd = [rank for rank, frame in enumerate(frames) if frame[word] != frames[0][word]]
            if odd:
                self._raise(f"{_ranks(odd)} differ from rank 0 in the {what} of a call")

    def fail(self, error: BaseException) -> bool:
        """Tell the other ranks that this one cannot go on with a command they are in.

        Says nothing where they know: the error came out of an operation of this group.

        Returns:
            Whether all ranks raised the same, so that they are alike still.
        """
        if self.size == 1:
            return True
        if self._fault is not None or not self._is_open:
            return False
        text = f"{type(error).__name__}: {error}".encode()[: _ROOM * 8]
        words = [
            int.from_bytes(text[at : at + 8].ljust(8), "little", signed=True)
            for at in range(0, len(text), 8)
        ]
        frames = self._exchange(_FAILED, words, 0, 0)
        self._is_open = False
        return all(frame == frames[0] for frame in frames)

    def finish(self, *, goes_on: bool) -> bool | None:
        """Say that this rank has no more forwards in this step.

        Args:
            goes_on: whether it wants another step.

        Returns:
            Whether any rank does, where all are done with this step. None: some have a forward to
            run, which this one must take part in: its `meet` gives the counts.

        Raises:
            RankError: a rank failed.
        """
        if self.size == 1:
            return goes_on
        frames = self._agree(_DONE, (), int(goes_on), also=_FORWARD)
        if all(frame[0] == _DONE for frame in frames):
            return any(frame[2] for frame in frames)
        self._met = self._counts(frames)
        return None

    def send(self, text: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Give a command to all other ranks; to be called by rank 0.

        Args:
            text: what to do.
            tensors: what goes with it; those of a device go by the group's backend.
        """
        if self.size == 1:
            return
        whole = len(text).to_bytes(8, "little") + text
        self._note("command", len(whole))
        frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        head = whole[:_FRAME_BYTES]
        frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._command(frame)
        if len(whole) > _FRAME_BYTES:
            self._command(torch.frombuffer(bytearray(whole[_FRAME_BYTES:]), dtype=torch.uint8))
        for tensor in tensors:
            self._through(tensor)

    def receive(self) -> bytes:
        """Wait for rank 0's next command; `receive_into` gets its tensors.

        Raises:
            RankError: rank 0 is gone.
        """
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        self._command(frame)
        whole = frame.numpy().tobytes()
        length = int.from_bytes(whole[:8], "little")
        if length + 8 > _FRAME_BYTES:
            rest = torch.empty(length + 8 - _FRAME_BYTES, dtype=torch.uint8)
            self._command(rest)
            whole += rest.numpy().tobytes()
        self._note("command", length + 8)
        return whole[8 : 8 + length]

    def receive_into(self, tensor: torch.Tensor) -> None:
        """Get one tensor of the command received last."""
        self._through(tensor)

    def _command(self, tensor: torch.Tensor) -> None:
        self._guarded(
            "a command", lambda: dist.broadcast(tensor, 0, group=self._commands), idle=True
        )

    def _through(self, tensor: torch.Tensor) -> None:
        self._note("tensor", tensor.numel())
        # Bytes: gloo does not move every dtype.
        flat = tensor.contiguous().flatten().view(torch.uint8)
        self._guarded("a tensor", lambda: dist.broadcast(flat, 0, group=self._data))

    # One exchange

    def _move(self, kind: int, tensor: torch.Tensor, call: Callable[[], Any]) -> None:
        if self.size == 1:
            return
        if self.checked:
            shape = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            frames = self._agree(kind, (), shape)
            odd = [rank for rank, frame in enumerate(frames) if frame[2] != frames[0][2]]
            if odd:
                self._raise(f"{_ranks(odd)} and rank 0 {_NAMES[kind]} different shapes")
        elif self._fault is not None:
            raise self._fault
        self._note(_NAMES[kind], tensor.numel())
        self._guarded(_NAMES[kind], call)

    def _agree(
        self,
        kind: int,
        load: Sequence[int],
        first: int,
        second: int = 0,
        *,
        also: int | None = None,
    ) -> list[list[int]]:
        """Exchange frames; give them where all ranks want `kind`, or some of them `also`."""
        if self._fault is not None:
            # The ranks have agreed that this command is over; whoever goes on does so alone.
            raise self._fault
        if not self._is_open:
            raise RankError(f"rank {self.rank}: {_NAMES[kind]} outside of any call of the engine's")
        frames = self._exchange(kind, load, first, second)
        failed = [rank for rank, frame in enumerate(frames) if frame[0] == _FAILED]
        if failed:
            self._raise(f"rank {failed[0]} failed: {_text(frames[failed[0]])}")
        wanted = [frame[0] for frame in frames]
        if any(one not in (kind, also) for one in wanted):
            each = (f"rank {rank} wants {_NAMES[one]}" for rank, one in enumerate(wanted))
            self._raise(f"the ranks are out of step: {', '.join(each)}")
        return frames

    def _exchange(self, kind: int, load: Sequence[int], first: int, second: int) -> list[list[int]]:
        self._note("exchange", _WORDS)
        mine = torch.tensor(
            [kind, len(load), first, second, *load, *[0] * (_ROOM - len(load))], dtype=torch.int64
        )
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self._guarded(_NAMES[kind], lambda: dist.all_gather(parts, mine, group=self._control))
        return [part.tolist() for part in parts]

    def _counts(self, frames: list[list[int]]) -> list[int]:
        return [frame[2] if frame[0] == _FORWARD else 0 for frame in frames]

    def _raise(self, what: str) -> NoReturn:
        self._fault = RankError(what)
        self._is_open = False
        raise self._fault

    def _guarded(self, what: str, call: Callable[[], Any], *, idle: bool = False) -> None:
        if self.is_broken:
            raise RankError(f"rank {self.rank}: {what} on a group that is broken or closed")
        try:
            call()
        except RuntimeError as error:
            self.is_broken = True
            others = [rank for rank in range(self.size) if rank != self.rank]
            late = "" if idle else f" or did not answer within {self._timeout:g} s"
            self._fault = RankError(
                f"rank {self.rank}: {what} did not come through: {_ranks(others)} died{late} "
                f"({error})"
            )
            raise self._fault from error

    def _note(self, name: str, size: int) -> None:
        if self.log is not None:
            self.log.append(f"{name} {size}")


def _load(frame: list[int]) -> list[int]:
    return frame[_HEAD : _HEAD + frame[1]]


def _text(frame: list[int]) -> str:
    words = (word.to_bytes(8, "little", signed=True) for word in _load(frame))
    return b"".join(words).decode(errors="replace").strip()


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
