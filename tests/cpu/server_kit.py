"""A live server on a free port of this machine, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from typing import Any

import openai
from starlette.routing import BaseRoute

from paceline import LLM
from paceline.server.app import Settings, create_app
from paceline.server.engine_thread import EngineThread
from paceline.server.http import HttpServer, http_server
from paceline.server.logs import RequestLog
from paceline.server.metrics import ServerMetrics

NAME = "model"


@dataclass
class Live:
    llm: LLM
    engine: EngineThread
    server: HttpServer
    thread: threading.Thread
    port: int
    log: StringIO
    metrics: ServerMetrics

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "any", **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **more)

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Wait until the engine has nothing to do, and make sure that it holds nothing."""
        until(lambda: self.engine.num_answers == 0 and not self.llm.engine.has_work, seconds)
        self.llm.engine.check_idle()

    def end(self, seconds: float = 20.0) -> None:
        self.server.should_exit = True
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the server does not end"


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.005)


@contextmanager
def running(
    llm: LLM,
    *,
    max_waiting: int = 64,
    stall_seconds: float = 30.0,
    shutdown_seconds: float = 5.0,
    pages: Sequence[BaseRoute] = (),
    **settings: Any,
) -> Iterator[Live]:
    """Serve until the end of the block; the LLM stays open."""
    log = StringIO()
    ports: list[int] = []
    ready = threading.Event()
    metrics = ServerMetrics(model=NAME)

    def on_ready(port: int) -> None:
        ports.append(port)
        ready.set()

    engine = EngineThread(
        llm,
        max_waiting=max_waiting,
        stall_seconds=stall_seconds,
        after_step=lambda stepped, emitted, queued: metrics.after_step(
            stepped, num_emitted=emitted, num_queued=queued
        ),
    )
    app = create_app(
        engine,
        Settings(name=NAME, **settings),
        metrics=metrics,
        log=RequestLog(log),
        pages=pages,
    )
    server = http_server(
        app,
        engine,
        host="127.0.0.1",
        port=0,
        shutdown_seconds=shutdown_seconds,
        on_ready=on_ready,
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(20), "the server does not start"
    live = Live(llm, engine, server, thread, ports[0], log, metrics)
    try:
        yield live
    finally:
        live.end()
