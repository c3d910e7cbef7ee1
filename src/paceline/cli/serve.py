"""``paceline serve``: an OpenAI-compatible server for one model."""

from __future__ import annotations

import errno
import ipaddress
import math
import os
import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline import __version__
from paceline.cli import options
from paceline.types import ConfigError, RequestError

if TYPE_CHECKING:
    from paceline.llm import LLM

__all__ = ["serve"]

BUNDLED_NAME = "paceline-bundled"

_MOST_BODY_BYTES = 1 << 30
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")
"""As browsers write it: they compare it as a text."""


def serve(
    model: options.Model = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="What clients call the model.", show_default="the checkpoint folder's name"
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that clients must send, or @FILE with one a line, lines that begin with # "
            "left out; may be repeated.",
            show_default=False,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose pages may ask, or *; may be repeated.", show_default=False),
    ] = None,
    num_drafts: Annotated[
        str | None,
        typer.Option(
            "--num-drafts",
            "-k",
            help="Drafts per step, 0 to 8, or auto: as many as pay.",
            show_default="3, or 0 without head",
        ),
    ] = None,
    max_seq_len: options.MaxSeqLen = None,
    max_num_seqs: Annotated[int, typer.Option(help="Answers that run at once.", min=1)] = 8,
    max_waiting: Annotated[
        int, typer.Option(help="Answers that wait; more are answered 429.", min=0)
    ] = 64,
    max_body_mb: Annotated[float, typer.Option(help="Largest request body, in MB.")] = 4.0,
    shutdown_seconds: Annotated[
        float, typer.Option(help="How long answers may go on at the end.", min=0)
    ] = 10.0,
    stall_seconds: Annotated[
        float, typer.Option(help="A step that takes longer makes /health red.", min=0.1)
    ] = 30.0,
    request_log: Annotated[
        bool, typer.Option(help="Write a line of JSON a request to standard error.")
    ] = True,
    prefix_cache: Annotated[
        bool, typer.Option(help="Keep what prompts computed for those that begin alike.")
    ] = True,
    acceptance: options.Acceptance = "invariant",
    drafter: options.Drafter = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    backend: options.Backend = "auto",
    num_threads: options.NumThreads = None,
) -> None:
    """Serve a model to OpenAI's clients: completions, chats, tools, structured output."""
    try:
        from paceline.server.app import Settings, create_app
        from paceline.server.engine_thread import EngineThread
        from paceline.server.http import http_server
        from paceline.server.logs import RequestLog
        from paceline.server.metrics import ServerMetrics
        from paceline.server.page import page_routes
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed; the server needs it: pip install 'paceline[serve]'"
        ) from None

    keys = _keys(api_key or [])
    origins = _origins(cors_origin or [])
    if not 0 < max_body_mb * 2**20 <= _MOST_BODY_BYTES:
        raise ConfigError(
            f"--max-body-mb is {max_body_mb:g}; allowed is more than 0 and at most "
            f"{_MOST_BODY_BYTES >> 20}"
        )
    most_drafts = options.drafts(num_drafts)
    # Before the model is loaded, which takes its time.
    sockets = _bound(host, port)
    try:
        llm = options.load(
            model,
            acceptance=acceptance,
            num_drafts=most_drafts,
            drafter=drafter,
            max_seq_len=max_seq_len,
            max_num_seqs=max_num_seqs,
            device=device,
            dtype=dtype,
            backend=backend,
            prefix_cache=prefix_cache,
            num_threads=num_threads,
        )
    except BaseException:
        for one in sockets:
            one.close()
        raise
    name = served_model_name or _name(model)
    with llm:
        shown = _drafter(llm)
        engine = EngineThread(
            llm,
            max_waiting=max_waiting,
            stall_seconds=stall_seconds,
            after_step=lambda stepped, emitted, queued: metrics.after_step(
                stepped, num_emitted=emitted, num_queued=queued
            ),
        )
        metrics = ServerMetrics(
            model=name,
            info={"drafter": shown, "device": device, "version": __version__},
            is_healthy=lambda: engine.trouble is None,
        )
        metrics.after_step(llm.engine)
        settings = Settings(
            name=name,
            api_keys=keys,
            cors_origins=origins,
            max_body_bytes=math.ceil(max_body_mb * 2**20),
        )
        app = create_app(
            engine,
            settings,
            metrics=metrics,
            log=RequestLog() if request_log else None,
            pages=page_routes(),
        )

        def ready(bound: int) -> None:
            where = f"[{host}]" if ":" in host else host
            print(f"serving {name} at http://{where}:{bound}/v1, drafter: {shown}", flush=True)

        if not keys and not _is_loopback(host):
            print(
                f"warning: {host} can be reached from other machines and no --api-key is set, so "
                "that everybody there can use the model",
                file=sys.stderr,
            )
        server = http_server(
            app,
            engine,
            host=host,
            port=port,
            shutdown_seconds=shutdown_seconds,
            on_ready=ready,
        )
        try:
            server.run(sockets)
        except OSError as error:
            # Somebody else may have begun to listen meanwhile.
            if error.errno != errno.EADDRINUSE:
                raise
            raise _not_bound(host, port, error) from None
        if not server.started:
            raise ConfigError(f"{host}:{port} cannot be listened at")


def _bound(host: str, port: int) -> list[socket.socket]:
    """Sockets at all addresses of a host, bound and not yet listening; the caller closes them.

    Raises:
        ConfigError: an address is none of this machine, or is in use.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host is {host!r}, which is no address: {error}") from None
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            one = socket.socket(family, kind, protocol)
        except OSError:
            continue
        sockets.append(one)
        try:
            if os.name == "posix":
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL and len(found) > 1:
                # A machine without IPv6 may still have names for it.
                sockets.pop().close()
                continue
            for other in sockets:
                other.close()
            raise _not_bound(host, port, error) from None
    if not sockets:
        raise ConfigError(f"--host is {host!r}, which is no address of this machine")
    return sockets


def _not_bound(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{host}:{port} is in use by another program; choose another --port")
    return ConfigError(f"{host}:{port} cannot be listened at: {error.strerror or error}")


def _name(model: str | None) -> str:
    if model is None:
        return BUNDLED_NAME
    return Path(os.path.abspath(model)).name or model


def _drafter(llm: LLM) -> str:
    """What drafts, in a few words."""
    if llm.engine.drafting is None:
        return "none"
    drafts = "as many drafts as pay" if llm.num_drafts == "auto" else f"{llm.num_drafts} drafts"
    return f"{llm.engine.drafting.name}, {drafts} a step"


def _keys(given: list[str]) -> tuple[str, ...]:
    """Keys as given, and those that files hold.

    Raises:
        ConfigError: one is empty.
        RequestError: a file cannot be read.
    """
    keys: list[str] = []
    for one in given:
        if one.startswith("@"):
            lines = options.read_text(Path(one[1:])).splitlines()
            held = [line.strip() for line in lines]
            held = [line for line in held if line and not line.startswith("#")]
            keys += held
            if not held:
                raise RequestError(f"{one[1:]} holds no key")
        else:
            keys.append(one)
    if not all(keys):
        raise ConfigError("an --api-key is empty; allowed is at least one character")
    return tuple(keys)


def _origins(given: list[str]) -> tuple[str, ...]:
    """Origins whose pages may ask.

    Raises:
        ConfigError: one is none.
    """
    for one in given:
        if not _ORIGIN.fullmatch(one):
            raise ConfigError(
                f"--cors-origin is {one!r}; allowed are *, and origins such as "
                "https://example.org:8443, in small letters and without a path"
            )
    return tuple(given)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
