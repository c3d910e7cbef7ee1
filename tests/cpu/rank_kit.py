"""Two processes that are two ranks, a watchdog over them, and drafters that are spread over both.

The processes live for a whole test module and run one scenario after the other, each with groups of
its own. A scenario is a function of this module; what it returns comes back, one for each rank.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from toy import VOCAB, continuation, decode, next_token, toy_config, toy_engine

from paceline.dist import RankGroup
from paceline.draft.doubles import (
    ContextProposer,
    OracleProposer,
    ScriptedProposer,
    SimpleState,
    WrappingProposer,
)
from paceline.engine import ranks
from paceline.engine.ranks import LeadingProposer, LockstepProposer, follow, step_together
from paceline.types import Draft, DraftRequest, RankError, SamplingParams

SIZE = 2
WATCHDOG = 60.0
CONFIG = toy_config(eos_token_ids=())
"""Never ends by itself."""


# Processes


class Ranks:
    """The processes; `run` gives a scenario to both and waits no longer than the watchdog."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        # Imported once, by a process without threads; the ranks are its forks.
        context.set_forkserver_preload(["torch.distributed", "paceline.engine", "paceline.draft"])
        self.stacks = [folder / f"stacks{rank}.txt" for rank in range(SIZE)]
        self.pipes = []
        self.processes = []
        for rank in range(SIZE):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, str(folder / "store"), str(self.stacks[rank]), theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        for pipe in self.pipes:
            assert pipe.poll(WATCHDOG), "a rank did not start"
            assert pipe.recv() == "ready"

    def run(self, scenario: Callable[..., Any], *, watchdog: float = WATCHDOG, **args: Any) -> Any:
        for pipe in self.pipes:
            pipe.send((scenario.__name__, watchdog, args))
        end = time.monotonic() + watchdog + 3
        answers: list[Any] = []
        for rank, pipe in enumerate(self.pipes):
            try:
                there = pipe.poll(max(0.0, end - time.monotonic()))
                answers.append(pipe.recv() if there else ("hangs", None))
            except (EOFError, ConnectionResetError):
                self.processes[rank].join(1)
                answers.append(("gone", self.processes[rank].exitcode))
        if any(how == "hangs" for how, _ in answers) or any(
            what == STACKS_DUMPED for _, what in answers
        ):
            self.end()
            told = "\n".join(
                f"--- rank {rank}\n{path.read_text()}" for rank, path in enumerate(self.stacks)
            )
            raise AssertionError(f"the watchdog ended {scenario.__name__}\n{told}")
        for rank, (how, what) in enumerate(answers):
            if how == "raised":
                raise AssertionError(f"rank {rank} raised\n{what}")
        return [what for _, what in answers]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(5)


STACKS_DUMPED = 1
"""Exit status of a process that `faulthandler` ended."""


def _serve(rank: int, store: str, stacks: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=30),
    )
    with open(stacks, "w") as file:
        pipe.send("ready")
        while True:
            try:
                name, watchdog, args = pipe.recv()
            except EOFError:
                os._exit(0)
            faulthandler.dump_traceback_later(watchdog, exit=True, file=file)
            try:
                pipe.send(("gave", globals()[name](rank, **args)))
            except BaseException:
                pipe.send(("raised", traceback.format_exc()))
            faulthandler.cancel_dump_traceback_later()


def _connect(rank: int, **options: Any) -> RankGroup:
    options = {"timeout": 20.0, "idle_timeout": 40.0, "record": True, **options}
    return RankGroup.connect("met before", rank=rank, size=SIZE, **options)


# Drafters


class Phased(ScriptedProposer):
    """Accept counts in turn, each sequence from a place of its own."""

    def guess(self, request: DraftRequest, state: SimpleState) -> list[int]:
        tokens = OracleProposer.guess(self, request, state)
        counts = self._accept_counts
        right = counts[(state.num_proposals + request.history[0]) % len(counts)]
        if right < len(tokens):
            tokens[right] = (tokens[right] + 1) % VOCAB
        return tokens


class Sharded(WrappingProposer[Any]):
    """Every rank scores its share of the ids; the scores are added up at each draft position.

    Args:
        inner: whose drafts are scored.
        comm: the ranks.
        noise: size of what this rank adds to its scores.
        decides: whether rank 0 picks for all.
        batch: widest batch.
        faults: methods, which calls of them (from 1; none: all), and what happens in those.
    """

    def __init__(
        self,
        inner: Any,
        comm: RankGroup,
        *,
        noise: float = 0.0,
        decides: bool = True,
        batch: int = 4,
        faults: Sequence[tuple[str, tuple[int, ...], str]] = (),
    ) -> None:
        super().__init__(inner)
        self.needs_comm = True
        self.comm = comm
        self.noise = noise
        self.decides = decides
        self.batch = batch
        self.faults = faults
        self.said: list[tuple[int, list[int]]] = []
        self.calls: dict[str, int] = {}
        self.random = torch.Generator().manual_seed(1)

    def _due(self, method: str) -> str | None:
        count = self.calls[method] = self.calls.get(method, 0) + 1
        for name, calls, how in self.faults:
            if name == method and (count in calls or not calls):
                return how
        return None

    def _scored(self, wanted: list[int]) -> list[int]:
        how = self._due("score")
        _suffer(how)
        width = VOCAB + (how == "wide")
        scores = torch.zeros(len(wanted), width, dtype=torch.float64)
        for row, token in enumerate(wanted):
            if token % self.comm.size == self.comm.rank:
                scores[row, token] = 1.0
        self.comm.all_reduce(scores)
        if how == "extra":
            self.comm.all_reduce(scores)
        scores += self.noise * torch.rand(scores.shape, generator=self.random, dtype=scores.dtype)
        picks = scores[:, :VOCAB].argmax(dim=1).tolist()
        return self.comm.decide(picks) if self.decides else picks

    def propose_batch_max(self) -> int:
        return self.batch

    def propose(self, request: DraftRequest, state: Any) -> Draft:
        return self.propose_batch([request], [state])[0]

    def propose_batch(self, requests: Sequence[DraftRequest], states: Any) -> list[Draft]:
        _suffer(self._due("propose"))
        wanted = [
            self.inner.propose(request, state).tokens
            for request, state in zip(requests, states, strict=True)
        ]
        picked: list[list[int]] = [[] for _ in wanted]
        for position in range(max(map(len, wanted))):
            live = [row for row, tokens in enumerate(wanted) if position < len(tokens)]
            picks = self._scored([wanted[row][position] for row in live])
            for row, token in zip(live, picks, strict=True):
                picked[row].append(token)
        for request, tokens in zip(requests, picked, strict=True):
            self.said.append((request.position, tokens))
        return [Draft(tokens=tokens) for tokens in picked]

    def alloc_state_for(self, budget_tokens: int) -> Any:
        _suffer(self._due("alloc_state_for"))
        return self.inner.alloc_state_for(budget_tokens)

    def after_verify(self, num_accepted: int, state: Any) -> None:
        _suffer(self._due("after_verify"))
        self.inner.after_verify(num_accepted, state)

    def prefill_drafter(self, *args: Any, **named: Any) -> int:
        how = self._due("prefill_drafter")
        _suffer(how)
        if how == "skips":
            args = (*args[:2], self.inner.alloc_state())
        return self.inner.prefill_drafter(*args, **named)

    def take_drafter_kv(self, state: Any) -> Any:
        kv = self.inner.take_drafter_kv(state)
        _suffer(self._due("take_drafter_kv"))
        return kv


class Experts(WrappingProposer[Any]):
    """Each rank holds the experts of its share of the ids and computes them for all ranks' rows.

    A rank that is not there leaves the others' rows without an answer.
    """

    def __init__(
        self, inner: Any, comm: RankGroup, *, fault: tuple[str, tuple[int, ...], str] | None = None
    ) -> None:
        super().__init__(inner)
        self.needs_comm = True
        self.comm = comm
        self.fault = fault
        self.num_forwards = 0

    def _forward(self, ids: list[int]) -> list[int]:
        self.num_forwards += 1
        counts = self.comm.meet(len(ids))
        assert counts[self.comm.rank] == len(ids)
        if self.fault is not None and (self.num_forwards in self.fault[1] or not self.fault[1]):
            _suffer(self.fault[2])
        rows = torch.zeros(max(counts), dtype=torch.int64)
        rows[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
        everyones = self.comm.all_gather(rows)
        own = everyones % self.comm.size == self.comm.rank
        answers = torch.where(own, everyones + 1, 0)
        self.comm.all_reduce(answers)
        mine = answers[self.comm.rank, : len(ids)]
        assert (mine > 0).all()
        return (mine - 1).tolist()

    def draft_nothing(self) -> None:
        self._forward([])

    def propose_batch_max(self) -> int:
        return 3

    def propose(self, request: DraftRequest, state: Any) -> Draft:
        return self.propose_batch([request], [state])[0]

    def propose_batch(self, requests: Any, states: Any) -> list[Draft]:
        wanted = [
            self.inner.propose(request, state).tokens
            for request, state in zip(requests, states, strict=True)
        ]
        drafted: list[list[int]] = [[] for _ in wanted]
        for position in range(max(map(len, wanted), default=0)):
            live = [row for row, tokens in enumerate(wanted) if position < len(tokens)]
            answers = self._forward([wanted[row][position] for row in live])
            for row, token in zip(live, answers, strict=True):
                drafted[row].append(token)
        return [Draft(tokens=tokens) for tokens in drafted]

    def prefill_drafter(self, prompt_tokens: Any, hiddens: Any, state: Any, **named: Any) -> int:
        self._forward(list(prompt_tokens[:2]))
        return self.inner.prefill_drafter(prompt_tokens, hiddens, state, **named)


def _suffer(how: str | None) -> None:
    if how == "raises":
        raise ArithmeticError("told to fail")
    if how == "sleeps":
        time.sleep(2.5)
    if how == "dies":
        os._exit(7)


def phased(prompts: list[list[int]], count: int, counts: Sequence[int]) -> Phased:
    texts = [prompt + continuation(prompt, count) for prompt in prompts]
    return Phased(texts, accept_counts=counts, vocab_size=VOCAB)


def prompts(number: int, *, lengths: Sequence[int] = (5, 9, 14)) -> list[list[int]]:
    """Each begins with its number, which `Phased` takes as its phase."""
    return [
        [row, *(next_token([row, j]) for j in range(lengths[row % len(lengths)] - 1))]
        for row in range(number)
    ]


# Scenarios: one engine that leads


def drafter(group: RankGroup, what: dict[str, Any]) -> Sharded:
    """The drafter of a scenario, on any rank."""
    if what["inner"] == "context":
        inner: Any = ContextProposer(vocab_size=VOCAB, window=what.get("window", 128))
    else:
        inner = phased(what["prompts"], what["max_tokens"] + 8, what.get("counts", (0, 1, 2, 3)))
    mine = what.get("on", {}).get(group.rank, {})
    return Sharded(inner, group, batch=what.get("batch", 4), **mine)


def led(rank: int, *, what: dict[str, Any], **options: Any) -> Any:
    """Decode on rank 0, follow on rank 1."""
    group = _connect(rank, **options)
    return run_led(group, what)


def run_led(group: RankGroup, what: dict[str, Any]) -> dict[str, Any]:
    proposer = drafter(group, what)
    debug = what.get("debug", False)
    told: dict[str, Any] = {"said": proposer.said}
    receive = ranks._Command.receive
    if what.get("zeroed") == group.rank:
        ranks._Command.receive = _zeroed(receive)  # type: ignore[method-assign, assignment]
    try:
        if group.rank == 0:
            told |= _decoded(group, proposer, what)
        else:
            told["commands"] = follow(group, proposer, debug=debug)
    except RankError as error:
        told["error"] = str(error)
    finally:
        ranks._Command.receive = receive  # type: ignore[method-assign]
    told["broken"] = group.is_broken
    told["log"] = group.log
    if group.size > 1:
        group.close()
    return told


def _decoded(group: RankGroup, proposer: Sharded, what: dict[str, Any]) -> dict[str, Any]:
    asked: Any = proposer
    if what.get("mute"):
        asked = Mute(proposer, group)
    elif group.size > 1 and what.get("debug"):
        asked = LeadingProposer(proposer, group, debug=True)
    engine = toy_engine(
        config=CONFIG, proposer=asked, num_drafts=3, ranks=group, **what.get("engine", {})
    )
    counts = what.get("num_drafts", [None] * len(what["prompts"]))
    params = [SamplingParams(max_tokens=what["max_tokens"], num_drafts=count) for count in counts]
    steps = what.get("steps")
    if steps is None:
        decoded = [
            tokens
            for _ in range(what.get("rounds", 1))
            for tokens, _ in decode(engine, what["prompts"], params)
        ]
    else:
        ids = [engine.add(*each) for each in zip(what["prompts"], params, strict=True)]
        taken: dict[int, list[int]] = {one: [] for one in ids}
        for _ in range(steps):
            for emission in engine.step():
                taken[emission.request_id] += emission.token_ids
        for one in ids:
            assert engine.abort(one)
        engine.check_idle()
        decoded = list(taken.values())
    drafting = engine.drafting
    assert drafting is not None
    engine.close()
    engine.close()
    return {
        "tokens": decoded,
        "stats": engine.speculation.to_dict(),
        "failures": engine.num_proposer_failures,
        "off": drafting.is_off,
        "preemptions": engine.num_preemptions,
        "hits": engine.num_prefix_hits,
        "held": len(getattr(getattr(drafting.proposer, "_rank", None), "held", ())),
        "commands": getattr(drafting.proposer, "num_commands", None),
    }


class Mute(LeadingProposer):
    """Leads without a word."""

    def _send(self, command: Any) -> None:
        pass


def _zeroed(receive: Callable[[RankGroup], Any]) -> Callable[[RankGroup], Any]:
    """Let this rank see zeros for the streams of every propose."""

    def zeroed(group: RankGroup) -> Any:
        command = receive(group)
        if command.name == "propose_batch":
            command.tensors = [torch.zeros_like(tensor) for tensor in command.tensors]
        return command

    return zeroed


# Scenarios: an engine on each rank


def together(rank: int, *, what: dict[str, Any], **options: Any) -> Any:
    """Decode each rank's own prompts with a drafter spread over both."""
    group = _connect(rank, **options)
    return run_together(group, what, rank)


def run_together(group: RankGroup, what: dict[str, Any], rank: int) -> dict[str, Any]:
    """The requests of `rank`, in whatever group."""
    mine = what["prompts"][rank]
    count = what["max_tokens"][rank]
    inner = phased(mine, count + 8, (0, 1, 2, 3))
    experts = Experts(inner, group, **what.get("on", {}).get(group.rank, {}))
    proposer = LockstepProposer(experts, group)
    engine = toy_engine(config=CONFIG, proposer=proposer, **what.get("engine", {}))
    ids = [
        engine.add(prompt, SamplingParams(max_tokens=count, num_drafts=what["num_drafts"][rank]))
        for prompt in mine
    ]
    late = what.get("late", {}).get(rank)
    taken: dict[int, list[int]] = {one: [] for one in ids}
    steps = 0
    for emissions in step_together(engine, proposer):
        steps += 1
        for emission in emissions:
            taken[emission.request_id] += emission.token_ids
        if late is not None and steps == late:
            params = SamplingParams(max_tokens=count, num_drafts=what["num_drafts"][rank])
            taken[engine.add(mine[0], params)] = []
    engine.check_idle()
    told = {
        "tokens": list(taken.values()),
        "stats": replace(engine.speculation).to_dict(),
        "failures": engine.num_proposer_failures,
        "faults": proposer.num_faults,
        "empty": proposer.num_empty,
        "forwards": experts.num_forwards,
        "steps": steps,
        "log": group.log,
    }
    if group.size > 1:
        group.close()
    return told


# Scenarios: the group itself


def moved(rank: int) -> Any:
    """What commands and operations carry."""
    group = _connect(rank)
    group.begin()
    sent = [
        torch.arange(5.0).to(torch.bfloat16),
        torch.tensor(7, dtype=torch.int64),
        torch.zeros(0, 3),
        torch.arange(6000, dtype=torch.int32).reshape(2, 3000)[:, ::2],
    ]
    many = list(range(70))
    if rank == 0:
        command = ranks._Command("name", [many, {"tensor": 0}], {"key": None}, 3, sent)
        group.send(*command.to_bytes())
    else:
        command = ranks._Command.receive(group)
    same = [
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(command.tensors, sent, strict=True)
    ]
    told = {
        "same": [*same, len(command.tensors) == 4],
        "command": [command.name, command.args, command.named, command.new],
        "digest": command.digest(),
        "decided": group.decide(many if rank == 0 else [1, 2, 3]),
        "nothing": group.decide([] if rank == 0 else many),
        "sum": group.all_reduce(torch.tensor([1.0, 10.0 * rank])).tolist(),
        "gathered": group.all_gather(torch.tensor([[rank], [5]])).tolist(),
        "first": group.broadcast(torch.tensor([rank + 3])).tolist(),
    }
    group.close()
    return told


def outside(rank: int) -> Any:
    """Operations outside of a call, and after the group is closed."""
    group = _connect(rank)
    group.begin()
    group.end(1, 0)
    told = []
    for call in (lambda: group.decide([1]), lambda: (group.close(), group.begin(), group.meet(1))):
        try:
            call()
        except RankError as error:
            told.append(str(error))
    return told


def hang(rank: int) -> None:
    """Rank 1 waits for what never comes."""
    group = _connect(rank)
    if rank == 1:
        group.receive()
    else:
        _idle_here()


def _idle_here() -> None:
    time.sleep(600)
