"""The sockets: uvicorn with limits of its own, and an end that loses no answer silently."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
from collections.abc import Callable, Collection
from typing import Any

import h11
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.server.engine_thread import EngineThread
from paceline.server.errors import ApiError, crowded

__all__ = ["HttpServer", "http_server"]

HEADER_SECONDS = 20.0
"""Longest time for a request's header to arrive, from the connection or the header's first byte."""

HEADER_BYTES = 32 * 1024
"""Most bytes of a request's header."""

_SPARE_SECONDS = 5
"""Beyond the time for answers to end: for their last bytes to go out."""


class _Protocol(H11Protocol):
    """Ends connections whose header does not come, and says what is no HTTP in OpenAI's shape."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.transport.is_closing():
            return
        if self._waits_for_header():
            self._wait()
        elif self.cycle is not None:
            self._wait_no_more()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read as a request, and hang up."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # Another answer has begun; it ends here.
            self.transport.close()
            return
        error = ApiError(400, msg, code="invalid_http")
        body = json.dumps(error.to_dict()).encode()
        fields = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=fields, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _waits_for_header(self) -> bool:
        """Whether a part of a header is there and nothing else."""
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(HEADER_SECONDS, self._too_late)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _too_late(self) -> None:
        self._waiting = None
        if self.transport.is_closing():
            return
        if self._waits_for_header():
            self.send_400_response("The request's header did not come in time.")
        self.transport.close()


class _Crowd:
    """The application, or a refusal where more connections are open than may be.

    uvicorn's own limit would be told as plain text.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self.connections: Collection[object] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or len(self.connections) <= self._most:
            await self._app(scope, receive, send)
            return
        error = crowded(self._most)
        answer = JSONResponse(error.to_dict(), status_code=error.status, headers=error.headers)
        await answer(scope, receive, send)


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
    crowd = _Crowd(app, max_connections)
    config = uvicorn.Config(
        crowd,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_graceful_shutdown=math.ceil(shutdown_seconds) + _SPARE_SECONDS,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server = HttpServer(config, engine, shutdown_seconds=shutdown_seconds, on_ready=on_ready)
    crowd.connections = server.server_state.connections
    return server
