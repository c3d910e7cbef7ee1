"""The engine's thread under clients that leave, wait, read slowly, and a server that ends."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_kit import NAME, Live, running, until

from paceline import LLM, SamplingParams
from paceline.llm import Answer
from paceline.server import engine_thread
from paceline.server.engine_thread import (
    LEAST_WAKE_SECONDS,
    MOST_WAKE_SECONDS,
    EngineThread,
    Job,
    Mailbox,
    _Pace,
)
from paceline.server.errors import ApiError
from paceline.types import Origin, StreamChunk, StreamPiece

LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_seq_len=512, max_num_seqs=4, num_threads=1) as llm:
        yield llm


@pytest.fixture
def live(llm: LLM) -> Iterator[Live]:
    with running(llm, max_waiting=4) as live:
        yield live
    llm.engine.check_idle()


def begin(live: Live, prompt: str = "def", **more: Any) -> socket.socket:
    """Ask for a long answer and read nothing of it."""
    body = json.dumps({"prompt": prompt, **LONG, **more}).encode()
    head = (
        "POST /v1/completions HTTP/1.0\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    end = socket.create_connection(("127.0.0.1", live.port), timeout=20)
    end.sendall(head.encode() + body)
    return end


def read_all(end: socket.socket) -> str:
    said = b""
    while part := end.recv(65_536):
        said += part
        if b"[DONE]" in said:
            break
    return said.decode()


def outcomes(live: Live) -> list[str]:
    return [json.loads(line)["outcome"] for line in live.log.getvalue().splitlines()]


@pytest.fixture
def slowly(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Steps that take a while, so that there is something to interrupt; their times."""
    whole = llm.engine.step
    times: list[float] = []

    def step() -> Any:
        time.sleep(0.02)
        emissions = whole()
        times.append(time.monotonic())
        return emissions

    monkeypatch.setattr(llm.engine, "step", step)
    return times


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is for the engine's thread."""
    now = [100.0]
    monkeypatch.setattr(engine_thread, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_request(
    live: Live, slowly: list[float], stream: bool
) -> None:
    end = begin(live, stream=stream)
    until(lambda: len(slowly) > 5)
    before = len(slowly)
    end.close()
    until(lambda: not live.llm.engine.has_work)
    assert len(slowly) - before <= 2
    live.wait_idle()
    until(lambda: outcomes(live) == ["cancelled"])


def test_a_client_that_goes_away_while_it_waits(live: Live, slowly: list[float]) -> None:
    ends = [begin(live, stream=True) for _ in range(6)]
    until(lambda: live.engine.num_answers == 6 and len(slowly) > 2)
    ends[5].close()
    until(lambda: live.engine.num_answers == 5)
    for end in ends[:5]:
        end.close()
    live.wait_idle()


def test_a_full_queue_is_told(live: Live, slowly: list[float]) -> None:
    ends = [begin(live, stream=True) for _ in range(8)]
    until(lambda: live.engine.num_answers == 8)
    answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert answer.status_code == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.json()["error"]["code"] == "queue_full"
    with live.client() as client, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "a"}])
    assert outcomes(live) == ["overloaded"] * 2
    for end in ends:
        end.close()
    live.wait_idle()
    assert httpx.post(
        f"{live.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}
    ).is_success


def test_answers_that_waited_are_whole(live: Live) -> None:
    with live.client() as client:
        more: dict[str, Any] = {"n": 8, "seed": 1, "max_tokens": 8}
        together = client.completions.create(model=NAME, prompt="def", **more)
        again = client.completions.create(model=NAME, prompt="def", **more)
    assert [c.text for c in together.choices] == [c.text for c in again.choices]
    assert [choice.index for choice in together.choices] == list(range(8))


def test_a_slow_reader_slows_nobody(live: Live) -> None:
    lines = [begin(live, stream=True, logprobs=20, max_tokens=500) for _ in range(2)]
    until(lambda: live.engine.num_answers == 2)
    with live.client() as client:
        stream = client.completions.create(
            model=NAME, prompt="def", stream=True, max_tokens=100, temperature=0
        )
        quick = "".join(chunk.choices[0].text for chunk in stream)
    # Nobody has read a byte of the slow ones, and their answers end all the same.
    live.wait_idle()
    for line in lines:
        body = read_all(line).partition("\r\n\r\n")[2]
        line.close()
        parts = [part for part in body.split("\n\n") if part.startswith("data: {")]
        frames = [json.loads(part[6:]) for part in parts]
        text = "".join(choice["text"] for frame in frames for choice in frame["choices"])
        assert text.startswith(quick)
        tokens = [t for f in frames for c in f["choices"] for t in c["logprobs"]["tokens"]]
        assert len(tokens) == 500


def test_a_reader_that_takes_nothing_is_given_up(llm: LLM) -> None:
    body = json.dumps({"prompt": "def", "stream": True, "n": 4, "logprobs": 20, **LONG,
                       "temperature": 1}).encode()  # fmt: skip
    head = "POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
    with running(llm, write_seconds=0.4) as live, socket.socket() as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # What is accepted inherits it, and kernels would take the whole answer otherwise.
        live.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        end.connect(("127.0.0.1", live.port))
        end.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: outcomes(live) == ["cancelled"], 20)
        live.wait_idle()


def test_the_end_of_the_server_is_told_to_all(
    llm: LLM, slowly: list[float], clock: list[float]
) -> None:
    drafted_before = llm.engine.speculation.num_drafted
    with running(llm, max_waiting=4, shutdown_seconds=5) as live:
        ends = [begin(live, stream=True) for _ in range(5)] + [begin(live) for _ in range(2)]
        until(lambda: live.engine.num_answers == 7 and len(slowly) > 3)
        live.server.should_exit = True
        until(lambda: live.engine.is_draining)
        clock[0] += 4.9
        before = len(slowly)
        until(lambda: len(slowly) > before + 2)
        assert live.engine.num_answers == 7, "they may go on"
        clock[0] += 0.2
        said = [read_all(end) for end in ends]
        live.end()
    for text in said[:5]:
        assert '"code":"shutting_down"' in text
        assert text.endswith("data: [DONE]\n\n")
    for text in said[5:]:
        assert text.startswith("HTTP/1.1 503 ")
        assert '"code":"shutting_down"' in text
    for end in ends:
        end.close()
    assert outcomes(live) == ["unavailable"] * 7
    lines = [json.loads(line) for line in live.log.getvalue().splitlines()]
    drafted = sum(line["drafted"] for line in lines)
    assert drafted == llm.engine.speculation.num_drafted - drafted_before > 0
    llm.engine.check_idle()


def test_short_answers_end_before_the_server_does(llm: LLM, slowly: list[float]) -> None:
    with running(llm, shutdown_seconds=10) as live:
        ends = [begin(live, stream=True, max_tokens=20) for _ in range(6)]
        until(lambda: live.engine.num_answers == 6)
        live.server.should_exit = True
        for end in ends:
            said = read_all(end)
            assert '"finish_reason":"length"' in said
            assert "error" not in said
            end.close()
    assert outcomes(live) == ["length"] * 6


def test_nothing_new_is_taken_at_the_end(llm: LLM) -> None:
    with running(llm) as live:
        live.engine.drain(5)
        answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"


def test_health_is_red_while_a_step_hangs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    whole, in_step, go_on = llm.engine.step, threading.Event(), threading.Event()

    def step() -> Any:
        in_step.set()
        go_on.wait(20)
        return whole()

    monkeypatch.setattr(llm.engine, "step", step)
    with running(llm, stall_seconds=10) as live:
        assert httpx.get(f"{live.url}/health").status_code == 200
        clock[0] += 11
        assert httpx.get(f"{live.url}/health").status_code == 200, "idle is no stall"
        with begin(live):
            assert in_step.wait(20)
            clock[0] += 9
            assert httpx.get(f"{live.url}/health").status_code == 200
            clock[0] += 2
            assert httpx.get(f"{live.url}/health").status_code == 503
            assert "not stepped" in httpx.get(f"{live.url}/health").json()["reason"]
            # What does not need the engine is answered meanwhile.
            assert httpx.get(f"{live.url}/metrics").is_success
            assert httpx.post(f"{live.url}/tokenize", json={"prompt": "a"}).is_success
            go_on.set()
            until(lambda: httpx.get(f"{live.url}/health").status_code == 200)
        live.wait_idle()
        clock[0] += 11
        # The thread notes that it has nothing to do a moment after the last answer is over.
        until(lambda: httpx.get(f"{live.url}/health").status_code == 200)


def test_health_is_green_through_long_work(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, slowly: list[float], clock: list[float]
) -> None:
    whole = llm.engine.step

    def step() -> Any:
        clock[0] += 7
        return whole()

    monkeypatch.setattr(llm.engine, "step", step)
    with running(llm, stall_seconds=10) as live, begin(live, stream=True):
        until(lambda: len(slowly) > 1)
        while len(slowly) < 10:
            assert httpx.get(f"{live.url}/health").status_code == 200
            assert live.llm.engine.has_work


def frames_of(said: str) -> list[dict[str, Any]]:
    """What the events of a stream hold, its end left out."""
    parts = said.partition("\r\n\r\n")[2].split("\n\n")
    return [json.loads(part[6:]) for part in parts if part.startswith("data: {")]


@pytest.mark.parametrize("chat", [False, True])
def test_what_came_before_an_answer_failed_is_told(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    """Also where nobody had taken it yet."""
    monkeypatch.setattr(engine_thread, "LEAST_WAKE_SECONDS", 3600.0)
    monkeypatch.setattr(engine_thread, "MOST_WAKE_SECONDS", 3600.0)
    verify, calls = llm.engine._verify, [0]

    def fail(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        verdicts = verify(*given, **named)
        if calls[0] != 6:
            return verdicts
        return [None if one is None else replace(one, error="broken") for one in verdicts]

    body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    path = "completions"
    if chat:
        path = "chat/completions"
        body |= {"messages": [{"role": "user", "content": "Define zebra"}]}
    else:
        body |= {"prompt": "import os\n"}
    told = {"stream": True, "return_token_ids": True, "return_pieces": True}
    with running(llm) as live:
        url = f"{live.url}/v1/{path}"
        alone = httpx.post(url, json={**body, "return_token_ids": True}, timeout=20).json()
        whole = alone["choices"][0]
        calls[0] = 0
        monkeypatch.setattr(llm.engine, "_verify", fail)
        said = httpx.post(url, json={**body, **told}, timeout=20).text
        live.wait_idle()
        until(lambda: len(outcomes(live)) == 2)
        line = json.loads(live.log.getvalue().splitlines()[-1])
    *frames, error = frames_of("\r\n\r\n" + said)
    assert error["error"]["code"] == "generation_failed"
    assert said.endswith("data: [DONE]\n\n")
    choices = [choice for frame in frames for choice in frame["choices"]]
    assert {choice["finish_reason"] for choice in choices} == {None}
    ids = [token for choice in choices for token in choice.get("token_ids", ())]
    assert 4 < len(ids) < 60
    assert ids == whole["token_ids"][: len(ids)]
    pieces = [piece for choice in choices for piece in choice.get("pieces", ())]
    assert len(pieces) == len(ids)
    text = "".join(
        choice["delta"].get("content", "") if chat else choice["text"] for choice in choices
    )
    expected = whole["message"]["content"] if chat else whole["text"]
    assert text
    assert expected.startswith(text)
    assert (line["outcome"], line["error_type"]) == ("failed", "generation_failed")
    assert (line["finish_reason"], line["completion_tokens"]) == ("error", len(ids))


@pytest.mark.parametrize("stops_at", ["first", "result"])
def test_what_a_reader_had_not_taken_is_counted_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stops_at: str
) -> None:
    take, stopped = Mailbox.take, [False]

    async def some(self: Mailbox) -> list[StreamChunk]:
        if stopped[0]:
            await asyncio.Event().wait()
        chunks = await take(self)
        stopped[0] = stops_at == "first" or any(chunk.result is not None for chunk in chunks)
        return chunks

    monkeypatch.setattr(Mailbox, "take", some)
    before = llm.engine.speculation.num_drafted
    with running(llm) as live:
        # Two of them wait for the others, so that all of them are never over at once.
        end = begin(live, stream=True, n=6, max_tokens=30, temperature=1, seed=1)
        until(lambda: stopped[0])
        until(lambda: live.engine.num_answers == 0)
        end.close()
        until(lambda: outcomes(live) == ["cancelled"])
        live.wait_idle()
        line = json.loads(live.log.getvalue())
    assert line["drafted"] == llm.engine.speculation.num_drafted - before > 0
    assert line["completion_tokens"] == 6 * 30
    assert bool(line["finish_reason"]) == (stops_at == "result")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_told_leaves_the_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    whole = Answer.take
    odd = llm.encode("class")

    def take(self: Answer, emission: Any) -> StreamChunk:
        if self._prompt == odd and len(self._token_ids) > 3:
            raise ValueError("a secret path")
        return whole(self, emission)

    with running(llm) as live:
        body = {"prompt": "def", **LONG}
        alone = httpx.post(f"{live.url}/v1/completions", json=body, timeout=30).json()
        monkeypatch.setattr(Answer, "take", take)
        with begin(live, stream=True) as other:
            with begin(live, "class", stream=stream, n=2, temperature=1) as failing:
                said = read_all(failing)
            frames = frames_of(read_all(other))
        assert '"the answer failed: ValueError"' in said
        assert said.startswith("HTTP/1.1 200 " if stream else "HTTP/1.1 500 ")
        assert "secret" not in said
        text = "".join(choice["text"] for frame in frames for choice in frame["choices"])
        assert text == alone["choices"][0]["text"]
        live.wait_idle()
        assert not live.engine._unread
        assert httpx.get(f"{live.url}/health").is_success
        assert sorted(outcomes(live)) == ["failed", "length", "length"]


def test_what_comes_while_a_step_fails_is_served(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, fails, in_step = llm.engine.step, threading.Event(), threading.Event()

    def step() -> Any:
        if not fails.is_set():
            in_step.set()
            assert fails.wait(20)
            raise RuntimeError("broken")
        return whole()

    monkeypatch.setattr(llm.engine, "step", step)
    with running(llm) as live, begin(live) as first:
        assert in_step.wait(20)
        with begin(live, stream=True, max_tokens=3) as second:
            until(lambda: live.engine.num_answers == 2)
            fails.set()
            assert '"finish_reason":"length"' in read_all(second)
        assert read_all(first).startswith("HTTP/1.1 500 ")


def test_what_comes_just_before_the_end_is_told_once(llm: LLM) -> None:
    engine = EngineThread(llm)

    async def ask() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        params = SamplingParams(max_tokens=5)
        job = Job(prompts=[[0, 5]], params=params, grammar=None, mailbox=mailbox)
        engine.submit(job)
        engine.stop()
        assert isinstance(await mailbox.accepted, ApiError)
        assert engine.num_answers == 0
        engine.start()
        with pytest.raises(ApiError, match="shutting down"):
            await mailbox.take()

    asyncio.run(ask())
    until(lambda: engine.trouble is not None)
    llm.engine.check_idle()


def test_a_failed_step_costs_what_runs_and_no_more(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, fails = llm.engine.step, [True]

    def step() -> Any:
        if fails:
            fails.pop()
            raise RuntimeError("a secret path")
        return whole()

    monkeypatch.setattr(llm.engine, "step", step)
    with running(llm) as live:
        answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text
        again = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert again.is_success
        assert httpx.get(f"{live.url}/health").is_success


def test_an_engine_that_keeps_failing_is_dead(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(llm.engine, "step", step)
    with running(llm) as live:
        asked = [httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"}) for _ in range(4)]
        assert [answer.status_code for answer in asked] == [500, 500, 500, 503]
        until(lambda: httpx.get(f"{live.url}/health").status_code == 503)
        reason = httpx.get(f"{live.url}/health").json()["reason"]
        assert "died of RuntimeError" in reason
        assert "rows" not in reason


def test_an_answer_that_fails_leaves_the_others(llm: LLM, live: Live) -> None:
    with live.client() as client:
        good = client.completions.create(model=NAME, prompt="def", max_tokens=40, temperature=0)
        stream = client.completions.create(
            model=NAME, prompt="def", max_tokens=40, temperature=0, stream=True
        )
        # An id that the model has no row for is refused by the engine, on its own thread.
        with pytest.raises(openai.BadRequestError, match="ids"):
            client.completions.create(model=NAME, prompt=[10**6])
        assert "".join(chunk.choices[0].text for chunk in stream) == good.choices[0].text


def test_who_watches_and_fails_costs_nothing(llm: LLM) -> None:
    calls: list[int] = []

    def watch(engine: Any, emitted: int, queued: int) -> None:
        calls.append(emitted)
        raise RuntimeError("watching failed")

    engine = EngineThread(llm, after_step=watch)
    engine.start()

    async def ask() -> list[int]:
        mailbox = Mailbox(asyncio.get_running_loop())
        params = SamplingParams(max_tokens=5)
        engine.submit(Job(prompts=[[0, 5]], params=params, grammar=None, mailbox=mailbox))
        assert await mailbox.accepted is None
        ids: list[int] = []
        while True:
            for chunk in await mailbox.take():
                ids += chunk.token_ids
                if chunk.result is not None:
                    return ids

    assert len(asyncio.run(ask())) == 5
    assert calls == calls[:1]
    engine.stop()
    engine.stop()
    assert engine.trouble is not None


def test_a_job_that_is_aborted_wakes_nobody(llm: LLM) -> None:
    engine = EngineThread(llm)

    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        params = SamplingParams(max_tokens=5)
        job = Job(prompts=[[0, 5]], params=params, grammar=None, mailbox=mailbox)
        # On the thread that steps, which this one is as the other is not started.
        engine._jobs.add(job)
        engine._begin(job)
        engine._deliver(llm.engine.step())
        engine._unread[mailbox] = None
        engine._abort(job)
        assert not engine._unread
        engine._wake_all()

    asyncio.run(run())
    llm.engine.check_idle()


def _chunk(number: int, *, sample: int = 0) -> StreamChunk:
    origin = Origin("accepted", 1 + number % 2)
    return StreamChunk(
        index=0,
        sample_index=sample,
        text=f"{number} ",
        token_ids=[number],
        origins=[origin],
        pieces=[StreamPiece(f"{number} ", origin)],
        logprobs=[],
    )


def test_a_mailbox_joins_what_is_not_taken() -> None:
    async def run() -> None:
        box = Mailbox(asyncio.get_running_loop())
        woken = [box.put(_chunk(number)) for number in range(1000)]
        assert woken == [True] + [False] * 999
        box.put(_chunk(7, sample=1))
        first, second = await box.take()
        assert first.token_ids == list(range(1000))
        assert first.text == "".join(f"{number} " for number in range(1000))
        assert "".join(text for text, _ in first.pieces) == first.text
        assert (second.sample_index, second.token_ids) == (1, [7])
        assert box.put(_chunk(1)) is True
        box.fail(ApiError(503, "over"))
        box.fail(ApiError(500, "later"))
        assert [chunk.token_ids for chunk in await box.take()] == [[1]]
        with pytest.raises(ApiError, match="over"):
            await box.take()
        assert isinstance(await box.accepted, ApiError)

    asyncio.run(run())


def test_a_mailbox_loses_nothing_between_threads() -> None:
    async def run() -> list[int]:
        loop = asyncio.get_running_loop()
        box = Mailbox(loop)

        def give() -> None:
            for number in range(3000):
                if box.put(_chunk(number)):
                    loop.call_soon_threadsafe(box.wake)
            box.fail(ApiError(503, "over"))

        giver = threading.Thread(target=give)
        giver.start()
        taken: list[int] = []
        try:
            while True:
                for chunk in await box.take():
                    taken += chunk.token_ids
        except ApiError:
            giver.join()
        return taken

    assert asyncio.run(run()) == list(range(3000))


class _Counted(Mailbox):
    """Counts how often its reader is woken for chunks."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.num_woken = 0

    def wake(self) -> None:
        self.num_woken += 1
        super().wake()

    async def ids(self) -> list[int]:
        return [token for chunk in await self.take() for token in chunk.token_ids]


def test_a_token_waits_for_others_a_stated_time_at_most(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(engine_thread, "monotonic", lambda: clock[0])
    whole, go_on, begun = llm.engine.step, threading.Semaphore(0), [0]

    def step() -> Any:
        begun[0] += 1
        assert go_on.acquire(timeout=20)
        return whole()

    params = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, num_drafts=0)
    alone = llm.generate([0, 5], params)[0].token_ids
    monkeypatch.setattr(llm.engine, "step", step)
    engine = EngineThread(llm)
    engine.start()

    async def steps(count: int = 1) -> None:
        """Let steps go on, each until its tokens are delivered."""
        for _ in range(count):
            before = begun[0]
            go_on.release()
            while begun[0] == before and engine.num_answers:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)

    def submit() -> _Counted:
        box = _Counted()
        engine.submit(Job(prompts=[[0, 5]], params=params, grammar=None, mailbox=box))
        return box

    async def run() -> None:
        first = submit()
        assert await first.accepted is None
        await steps()
        assert first.num_woken == 1
        ids = await first.ids()
        assert len(ids) == 1, "the first token waits for none"

        await steps()
        clock[0] += LEAST_WAKE_SECONDS * 0.9
        await steps(2)
        assert first.num_woken == 1
        clock[0] += MOST_WAKE_SECONDS * 1.001
        await steps()
        assert first.num_woken == 2, "they have waited long enough"
        ids += await first.ids()
        assert len(ids) == 5

        await steps()
        second = submit()
        await steps()
        assert first.num_woken == 3, "the step that reads a prompt is not waited for"
        ids += await first.ids()
        assert len(ids) == 7

        await steps()
        while not second.num_woken:
            await steps()
        assert len(await second.ids()) == 1
        assert first.num_woken == 3, "another's first token does not wake it"
        while engine.num_answers == 2:
            await steps()
        assert (first.num_woken, second.num_woken) == (4, 1), "its end wakes it, and it only"
        ids += await first.ids()
        assert ids == alone

        clock[0] += MOST_WAKE_SECONDS * 1.001
        await steps()
        assert (first.num_woken, second.num_woken) == (4, 2), "who is over is not woken again"
        ids = alone[:1] + await second.ids()
        while engine.num_answers:
            await steps()
        assert second.num_woken == 3
        assert ids + await second.ids() == alone

    async def run_or_give_up() -> None:
        async with asyncio.timeout(30):
            await run()

    try:
        asyncio.run(run_or_give_up())
    finally:
        go_on.release(100)
        engine.stop()
    llm.engine.check_idle()


def test_readers_are_woken_less_often_where_that_costs_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spent = [5.0]
    monkeypatch.setattr(engine_thread, "thread_time", lambda: spent[0])
    pace = _Pace()

    def wake(cost: float) -> float:
        for _ in range(200):
            spent[0] += cost
            pace.note()
        return pace.seconds

    assert pace.seconds == LEAST_WAKE_SECONDS
    assert wake(100e-6) == pytest.approx(100e-6 / engine_thread.WAKE_SHARE)
    # Threads have clocks of their own, and differences between those mean nothing.
    spent[0] += 1e6
    other = threading.Thread(target=pace.note)
    other.start()
    other.join()
    spent[0] -= 1e6
    pace.note()
    assert pace.seconds == pytest.approx(100e-6 / engine_thread.WAKE_SHARE)
    assert wake(1e-6) == LEAST_WAKE_SECONDS
    assert wake(0.5) == MOST_WAKE_SECONDS


def test_the_document_states_how_long_a_token_waits() -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    least, most = 1000 * LEAST_WAKE_SECONDS, 1000 * MOST_WAKE_SECONDS
    assert f"wakes them every {least:g} to {most:g} ms" in text
    assert f"waits for at most {most:g} ms" in text


def test_no_token_is_lost_where_readers_are_hardly_woken(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "LEAST_WAKE_SECONDS", 3600.0)
    monkeypatch.setattr(engine_thread, "MOST_WAKE_SECONDS", 3600.0)
    prompts = ["def", "import os", "The", "x = ", "class A", "# "]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    alone = [result.token_ids for result in llm.generate(prompts, params)]
    with running(llm) as live:
        ends = [
            begin(live, prompt, stream=True, max_tokens=40, return_token_ids=True)
            for prompt in prompts
        ]
        for end, expected in zip(ends, alone, strict=True):
            body = read_all(end).partition("\r\n\r\n")[2]
            end.close()
            parts = [part for part in body.split("\n\n") if part.startswith("data: {")]
            choices = [choice for part in parts for choice in json.loads(part[6:])["choices"]]
            assert [token for choice in choices for token in choice["token_ids"]] == expected
            assert choices[-1]["finish_reason"] == "length"
