"""The sockets: uvicorn with limits of its own, and an end that loses no answer silently."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.server.engine_thread import EngineThread

__all__ = ["HttpServer", "http_server"]

HEADER_SECONDS = 20.0
"""Longest time for the header of a connection's first request to arrive."""

HEADER_BYTES = 32 * 1024
"""Most bytes of a request's header."""

_SPARE_SECONDS = 5
"""Beyond the time for answers to end: for their last bytes to go out."""


class _Protocol(H11Protocol):
    """Ends connections whose header does not come."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting = self.loop.call_later(HEADER_SECONDS, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None:
            self._wait_no_more()

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _too_late(self) -> None:
        self._waiting = None
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self.send_400_response("The request's header did not come in time.")
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves one engine's application.

    Args:
        config: of uvicorn.
        engine: told to come to an end when the server does.
        shutdown_seconds: how long answers may go on then.
        on_ready: called with the port once connections are taken.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: EngineThread,
        *,
        shutdown_seconds: float,
        on_ready: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._shutdown_seconds = shutdown_seconds
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections."""
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            self._on_ready(self.port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more, wait for the answers that run, end those that take too long."""
        self._engine.drain(self._shutdown_seconds)
        await super().shutdown(sockets)

    @property
    def port(self) -> int:
        """The port that is listened at."""
        bound = self.servers[0].sockets[0].getsockname()
        return int(bound[1])


def http_server(
    app: ASGIApp,
    engine: EngineThread,
    *,
    host: str,
    port: int,
    shutdown_seconds: float = 10.0,
    max_connections: int = 1024,
    on_ready: Callable[[int], None] | None = None,
) -> HttpServer:
    """Return a server for an application; `run` it.

    Args:
        app: what `create_app` made of the engine.
        engine: told when the server ends.
        host: address to listen at.
        port: 0 takes a free one.
        shutdown_seconds: how long answers may go on when the server ends.
        max_connections: beyond these a connection is answered 503.
        on_ready: called with the port once connections are taken.
    """
    protocol: Any = _Protocol
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=max_connections,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_graceful_shutdown=math.ceil(shutdown_seconds) + _SPARE_SECONDS,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return HttpServer(config, engine, shutdown_seconds=shutdown_seconds, on_ready=on_ready)
