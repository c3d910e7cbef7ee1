"""The engine on a thread of its own: jobs go in through a queue, chunks come back to the loop.

Neither side waits for the other. The engine's thread never blocks on a reader: what a reader has
not taken yet is joined to one chunk per answer, so that a slow one holds at most its answers' text.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic, thread_time

from paceline.engine import Emission, Engine
from paceline.llm import LLM, Answer
from paceline.sampling.grammar import Grammar
from paceline.server.errors import ApiError, overloaded, shutting_down, unavailable
from paceline.types import (
    Origin,
    PacelineError,
    SamplingParams,
    SpeculationStats,
    StreamChunk,
    StreamPiece,
    TokenLogprob,
)

__all__ = ["Done", "EngineThread", "Job", "Mailbox"]

_log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Steps in a row that may fail, each costing all answers that run, before the engine is dead."""

WATCH_SECONDS = 0.05
"""Least time from one call of what watches the steps to the next, while there is work."""

WAKE_SHARE = 0.01
"""Share of the time that readers' loop may spend on streams where waking it less often saves it.

While it works the steps wait for the interpreter, and the waking itself costs them as much again.
"""

LEAST_WAKE_SECONDS = 0.004
"""Least time from one waking of all readers to the next, however little it costs.

Steps that take longer wake them each time. An answer's first token and its end wake its own reader
at once and do not count as a waking of all; a request that begins wakes all, since the step that
reads its prompt may be long.
"""

MOST_WAKE_SECONDS = 0.02
"""Longest that a token waits for others, whatever they cost, beside the step that then runs."""

JOIN_SECONDS = 5.0
"""How long a step may go on after the end before its thread is given up."""

_MAX_RETRY_SECONDS = 60


class _Gathered:
    """Chunks of one answer that nobody has taken; adding one costs what is in it."""

    def __init__(self, chunk: StreamChunk) -> None:
        self._last = chunk
        # Filled with the second chunk: mostly there is none.
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._origins: list[Origin] = []
        self._pieces: list[StreamPiece] = []
        self._logprobs: list[TokenLogprob] | None = None

    def add(self, chunk: StreamChunk) -> None:
        if not self._texts:
            self._append(self._last)
        self._append(chunk)

    def _append(self, chunk: StreamChunk) -> None:
        self._last = chunk
        self._texts.append(chunk.text)
        self._token_ids += chunk.token_ids
        self._origins += chunk.origins
        self._pieces += chunk.pieces
        if chunk.logprobs is not None:
            self._logprobs = (self._logprobs or []) + chunk.logprobs

    def joined(self) -> StreamChunk:
        if not self._texts:
            return self._last
        return replace(
            self._last,
            text="".join(self._texts),
            token_ids=self._token_ids,
            origins=self._origins,
            pieces=self._pieces,
            logprobs=self._logprobs,
        )


class _Pace:
    """How long readers go without being woken, by what waking them costs.

    Attributes:
        seconds: from one waking to the next.
    """

    def __init__(self) -> None:
        self.seconds = LEAST_WAKE_SECONDS
        self._cost = 0.0
        self._seen: tuple[int, float] | None = None

    def note(self) -> None:
        """Readers are woken; on the thread of their loop, whose work since the last time counts."""
        before, thread, spent = self._seen, threading.get_ident(), thread_time()
        self._seen = (thread, spent)
        if before is None or before[0] != thread:
            return
        self._cost += 0.1 * (spent - before[1] - self._cost)
        self.seconds = min(MOST_WAKE_SECONDS, max(LEAST_WAKE_SECONDS, self._cost / WAKE_SHARE))


class Mailbox:
    """What the engine's thread has for one reader on an event loop.

    Args:
        loop: the reader's, which runs.

    Attributes:
        accepted: on the reader's loop; None once all answers are queued, or why they are not.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.accepted: asyncio.Future[Exception | None] = loop.create_future()
        self._lock = threading.Lock()
        self._event = asyncio.Event()
        self._chunks: dict[tuple[int, int], _Gathered] = {}
        self._error: Exception | None = None
        self._told = False

    def put(self, chunk: StreamChunk) -> bool:
        """Add a chunk, from any thread; whether the reader is to be woken."""
        key = (chunk.index, chunk.sample_index)
        with self._lock:
            gathered = self._chunks.get(key)
            if gathered is None:
                self._chunks[key] = _Gathered(chunk)
            else:
                gathered.add(chunk)
            told, self._told = self._told, True
        return not told

    def fail(self, error: Exception) -> None:
        """End with an error behind the chunks that are there, from any thread; the first stays."""
        with self._lock:
            self._error = self._error or error
        _call(self.loop, partial(self._settle, error))

    def accept(self) -> None:
        """Tell the reader that its answers are queued, from any thread."""
        _call(self.loop, partial(self._settle, None))

    def wake(self) -> None:
        """Wake the reader; on its loop."""
        self._event.set()

    async def take(self) -> list[StreamChunk]:
        """Wait for chunks and take them, at most one per answer.

        Raises:
            Exception: what `fail` was given, once all chunks were taken.
        """
        while True:
            with self._lock:
                gathered, self._chunks = self._chunks, {}
                self._told = False
                error = self._error
            if gathered:
                return [one.joined() for one in gathered.values()]
            if error is not None:
                raise error
            await self._event.wait()
            self._event.clear()

    def _settle(self, error: Exception | None) -> None:
        if not self.accepted.done():
            self.accepted.set_result(error)
        self._event.set()


@dataclass(slots=True)
class Done:
    """What the engine did for one answer so far.

    Attributes:
        stats: of its drafting; the engine's own object.
        num_tokens: given to it.
    """

    stats: SpeculationStats
    num_tokens: int = 0


@dataclass(eq=False, kw_only=True)
class Job:
    """One HTTP request's prompts.

    Attributes:
        prompts: as ids, each with `params.n` answers.
        params: of all of them.
        grammar: what the answers follow, or None.
        mailbox: where chunks go; `StreamChunk.index` is the prompt's place.
        running: the engine's numbers of answers that have not ended; the engine thread's.
        done: what was done for each answer that has begun, by (prompt, sample). It stays when an
            answer is over and grows no more once `EngineThread.abort` is carried out.
        num_open: answers that have not ended, in the engine or before it; the engine thread's.
    """

    prompts: list[list[int]]
    params: SamplingParams
    grammar: Grammar | None
    mailbox: Mailbox
    running: set[int] = field(default_factory=set)
    done: dict[tuple[int, int], Done] = field(default_factory=dict)
    num_open: int = 0

    @property
    def num_answers(self) -> int:
        """Answers in all."""
        return len(self.prompts) * self.params.n


class EngineThread:
    """Runs an LLM's engine for many readers.

    The LLM is this object's from `start` to `stop`; its tokenizer, grammar compiler and `encode`
    may be used elsewhere. All methods may be called from any thread.

    Args:
        llm: what answers.
        max_waiting: answers that may wait beside those that run.
        stall_seconds: longest step of a healthy engine.
        after_step: called on the engine's thread between steps, every `WATCH_SECONDS` and when
            nothing is left to do, with (engine, tokens emitted since the last call, answers
            accepted and not in the engine); if it raises, that is logged and it is called no more.

    Attributes:
        llm: what answers.
        max_answers: answers there may be at once.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_waiting: int = 64,
        stall_seconds: float = 30.0,
        after_step: Callable[[Engine, int, int], None] | None = None,
    ) -> None:
        self.llm = llm
        self.max_answers = llm.engine.max_num_seqs + max_waiting
        self._stall_seconds = stall_seconds
        self._after_step = after_step
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._jobs: set[Job] = set()
        self._num_answers = 0
        self._answers: dict[int, tuple[Job, Answer, float]] = {}
        self._seconds_per_answer = 1.0
        self._draining = False
        self._deadline = math.inf
        self._stopping = False
        self._died: str | None = None
        self._failed_steps = 0
        self._busy_since: float | None = None
        self._num_emitted = 0
        self._watched_at = -math.inf
        self._unread: dict[Mailbox, None] = {}
        self._woken_at = -math.inf
        self._pace = _Pace()
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    @property
    def num_answers(self) -> int:
        """Answers accepted and not over."""
        return self._num_answers

    @property
    def is_draining(self) -> bool:
        """Whether no more is taken."""
        return self._draining

    @property
    def trouble(self) -> str | None:
        """Why the engine is not healthy, or None."""
        if self._died is not None:
            return self._died
        if not self._thread.is_alive():
            return "its thread does not run"
        since = self._busy_since
        if since is not None and monotonic() - since > self._stall_seconds:
            return f"it has not stepped for {monotonic() - since:.0f} s although there is work"
        return None

    def check_room(self, num_answers: int) -> None:
        """Refuse what there is no room for now.

        Raises:
            ApiError: 400 where there never is, 429 where there is none now, 503 where the engine
                is dead or shuts down.
        """
        with self._lock:
            self._check_room(num_answers)

    def _check_room(self, num_answers: int) -> None:
        if self._died is not None:
            raise unavailable(self._died)
        if self._draining:
            raise shutting_down()
        if num_answers > self.max_answers:
            raise ApiError(
                400,
                f"the request wants {num_answers} answers; allowed are {self.max_answers} at once",
                param="n",
            )
        if self._num_answers + num_answers > self.max_answers:
            raise overloaded(self._retry_seconds())

    def _retry_seconds(self) -> int:
        """When a place should be free: an answer's time over those that run beside each other."""
        expected = self._seconds_per_answer / self.llm.engine.max_num_seqs
        return max(1, min(_MAX_RETRY_SECONDS, math.ceil(expected)))

    def submit(self, job: Job) -> None:
        """Queue a job; its mailbox says whether the engine took it.

        Raises:
            ApiError: as `check_room`.
        """
        with self._lock:
            self._check_room(job.num_answers)
            job.num_open = job.num_answers
            self._num_answers += job.num_answers
            self._jobs.add(job)
        self._commands.put(partial(self._begin, job))

    def abort(self, job: Job) -> Future[None]:
        """End what still runs of a job before the next step; its reader is not told.

        Returns:
            Done when that was carried out; never where the engine's thread is over.
        """
        done: Future[None] = Future()
        self._commands.put(partial(self._abort, job, done))
        return done

    def drain(self, seconds: float) -> None:
        """Take no more, and end what runs after so many seconds with an error for its reader."""
        with self._lock:
            self._draining = True
            self._deadline = min(self._deadline, monotonic() + seconds)
        self._commands.put(_nothing)

    def stop(self) -> None:
        """End what runs with an error for its reader, and the thread; a second call is free."""
        self.drain(0.0)
        self._stopping = True
        self._commands.put(_nothing)
        if self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            _log.error("the engine's step did not end in %g s; it is given up", JOIN_SECONDS)
        self._fail_all(shutting_down())

    # On the engine's thread

    def _run(self) -> None:
        engine = self.llm.engine
        try:
            while not self._stopping:
                self._obey(wait=not engine.has_work)
                if monotonic() >= self._deadline:
                    self._cancel_all(shutting_down())
                if engine.has_work:
                    self._step(engine)
                if not engine.has_work or monotonic() - self._watched_at >= WATCH_SECONDS:
                    self._watch()
                if not engine.has_work:
                    self._busy_since = None
            self._cancel_all(shutting_down())
        except BaseException as error:
            _log.exception("the engine's thread died")
            self._die(f"its thread died of {type(error).__name__}")

    def _obey(self, *, wait: bool) -> None:
        """Carry out what was asked; wait for something where there is nothing else to do."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except Empty:
                return
            if self._busy_since is None:
                self._busy_since = monotonic()
            command()
            wait = False

    def _step(self, engine: Engine) -> None:
        self._busy_since = monotonic()
        try:
            emissions = engine.step()
            self._failed_steps = 0
        except Exception as error:
            self._step_failed(error)
            return
        self._deliver(emissions)

    def _step_failed(self, error: Exception) -> None:
        """A step that fails costs all the engine has; several in a row the engine."""
        _log.exception("a step failed; %d answers end with it", len(self._answers))
        self._failed_steps += 1
        told = ApiError(500, f"the step failed: {type(error).__name__}", code="step_failed")
        for job in {job for job, _, _ in self._answers.values()}:
            self._abort(job)
            job.mailbox.fail(told)
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise RuntimeError(f"{self._failed_steps} steps in a row failed") from error

    def _deliver(self, emissions: Iterable[Emission]) -> None:
        now = monotonic()
        urgent: list[Mailbox] = []
        for emission in emissions:
            self._num_emitted += len(emission.token_ids)
            running = self._answers.get(emission.request_id)
            if running is None:
                # Its job failed on an emission before this one.
                continue
            job, answer, begun_at = running
            try:
                chunk = answer.take(emission)
            except Exception as error:
                _log.exception("an answer could not be put into words; its request ends with it")
                self._abort(job)
                told = f"the answer failed: {type(error).__name__}"
                job.mailbox.fail(ApiError(500, told, code="answer_failed"))
                continue
            key = (chunk.index, chunk.sample_index)
            done = job.done.get(key)
            if done is None:
                done = job.done[key] = Done(emission.stats)
            done.num_tokens += len(chunk.token_ids)
            if chunk.result is not None:
                seconds = monotonic() - begun_at
                self._seconds_per_answer += 0.1 * (seconds - self._seconds_per_answer)
                self._over(emission.request_id)
            if job.mailbox.put(chunk):
                self._unread[job.mailbox] = None
            if emission.stats.num_steps == 1 or chunk.result is not None:
                urgent.append(job.mailbox)
        if now - self._woken_at >= self._pace.seconds:
            self._wake_all()
        elif urgent:
            self._wake([mailbox for mailbox in dict.fromkeys(urgent) if mailbox in self._unread])

    def _wake_all(self) -> None:
        """Wake whoever has something to read."""
        if self._unread:
            self._woken_at = monotonic()
            self._wake(list(self._unread))

    def _wake(self, mailboxes: Iterable[Mailbox]) -> None:
        loops: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
        for mailbox in mailboxes:
            del self._unread[mailbox]
            loops.setdefault(mailbox.loop, []).append(mailbox)
        for loop, its in loops.items():
            _call(loop, partial(_wake_readers, its, self._pace))

    def _begin(self, job: Job) -> None:
        if job not in self._jobs:
            # It came just before the end and was told so.
            return
        self._wake_all()
        now = monotonic()
        error: Exception
        try:
            for index, ids in enumerate(job.prompts):
                begun = self.llm.begin(ids, job.params, grammar=job.grammar, index=index)
                for request_id, answer in begun.items():
                    self._answers[request_id] = (job, answer, now)
                    job.running.add(request_id)
        except PacelineError as refusal:
            error = refusal
        except Exception as fault:
            _log.exception("a request could not be begun")
            error = ApiError(500, f"{type(fault).__name__} at the request's start")
        else:
            job.mailbox.accept()
            return
        self._abort(job)
        job.mailbox.fail(error)

    def _abort(self, job: Job, done: Future[None] | None = None) -> None:
        for request_id in list(job.running):
            self.llm.engine.abort(request_id)
            self._over(request_id)
        self._unread.pop(job.mailbox, None)
        self._forget(job)
        if done is not None and done.set_running_or_notify_cancel():
            done.set_result(None)

    def _over(self, request_id: int) -> None:
        """Forget an answer, and its job with the last."""
        job, _, _ = self._answers.pop(request_id)
        job.running.discard(request_id)
        with self._lock:
            job.num_open -= 1
            self._num_answers -= 1
        if not job.num_open:
            self._forget(job)

    def _forget(self, job: Job) -> None:
        """Let a job go, with answers that never came into the engine."""
        with self._lock:
            self._num_answers -= job.num_open
            job.num_open = 0
            self._jobs.discard(job)

    def _cancel_all(self, error: Exception) -> None:
        for job in list(self._jobs):
            self._abort(job)
            job.mailbox.fail(error)

    def _watch(self) -> None:
        self._watched_at = monotonic()
        if self._after_step is None:
            return
        num_emitted, self._num_emitted = self._num_emitted, 0
        num_queued = max(0, self._num_answers - len(self._answers))
        try:
            self._after_step(self.llm.engine, num_emitted, num_queued)
        except Exception:
            _log.exception("what watches the steps failed; it is called no more")
            self._after_step = None

    # On either

    def _die(self, reason: str) -> None:
        self._died = reason
        self._fail_all(unavailable(reason))

    def _fail_all(self, error: Exception) -> None:
        """Tell the readers that are left; the engine is of no use any more."""
        with self._lock:
            self._draining = True
            jobs, self._jobs = self._jobs, set()
            self._num_answers = 0
        for job in jobs:
            job.mailbox.fail(error)


def _nothing() -> None:
    """Wake the thread."""


def _wake_readers(mailboxes: list[Mailbox], pace: _Pace) -> None:
    pace.note()
    for mailbox in mailboxes:
        mailbox.wake()


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        # The loop is closed, and its readers with it.
        _log.debug("a reader's loop is closed")
