"""What the server costs over the library at batch 1, and how soon it is ready.

The library and the server take turns on one engine, one stream at a time, so that both have the
same weights in the same place; a server's turn is compared with the two library's turns around it.
The server is the application as `paceline serve` makes it, metrics and log included. Its client is
a process of its own that does the least a client can do: it reads the socket. It needs a core all
the same, so both are measured: engines that leave it one and engines that take them all.

For the start, `paceline serve` itself is started several times, after once that does not count.

    python benchmarks/serving.py --json benchmarks/results/serving.json
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import common

if TYPE_CHECKING:
    from paceline import LLM
    from paceline.server.engine_thread import EngineThread

PROMPT = "def add(a, b):"
START_SECONDS = 120.0
"""Longest wait for a server to get ready: the first start may compile the kernels."""

LATER = 5
"""Requests after a server's first that it is compared with."""


def asked(port: int, max_tokens: int) -> dict[str, Any]:
    """Stream one answer.

    Returns:
        Seconds to the first token (`first`) and from there to the end (`rest`), the client's own
        CPU seconds (`cpu`), reads of the socket (`reads`), the `text`.

    Raises:
        RuntimeError: the answer is not whole.
    """
    body = json.dumps(
        {
            "prompt": PROMPT,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = "POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
    parts: list[bytes] = []
    first = None
    cpu, begun = time.process_time(), time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as end:
        end.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        while part := end.recv(65_536):
            parts.append(part)
            if first is None and b"data:" in part:
                first = time.perf_counter()
            if b"[DONE]" in part:
                break
    over, cpu = time.perf_counter(), time.process_time() - cpu
    said = b"".join(parts).decode()
    if first is None or "data: [DONE]" not in said:
        raise RuntimeError(f"the server did not answer: {said[:500]}")
    frames = said.partition("\r\n\r\n")[2].split("\n\n")
    choices = [json.loads(frame[6:])["choices"] for frame in frames if frame.startswith("data: {")]
    return {
        "first": first - begun,
        "rest": over - first,
        "cpu": cpu,
        "reads": len(parts),
        "text": "".join(choice["text"] for of_frame in choices for choice in of_frame),
    }


def client(pipe: Connection, port: int) -> None:
    """Ask whenever told how many tokens to ask for, until the pipe is closed."""
    while True:
        try:
            pipe.send(asked(port, pipe.recv()))
        except EOFError:
            return
        except (OSError, RuntimeError) as error:
            pipe.send(f"{type(error).__name__}: {error}")


def through_library(llm: LLM, max_tokens: int) -> dict[str, Any]:
    """What `asked` returns, of the library; `cpu` is left out."""
    from paceline import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    texts: list[str] = []
    first = None
    begun = time.perf_counter()
    for chunk in llm.stream(PROMPT, params):
        texts.append(chunk.text)
        first = first or time.perf_counter()
    over = time.perf_counter()
    assert first is not None
    return {"first": first - begun, "rest": over - first, "text": "".join(texts)}


@contextmanager
def served(
    llm: LLM, *, max_waiting: int = 64, log: TextIO | None = None
) -> Iterator[tuple[EngineThread, int]]:
    """A server in this process, as `paceline serve` makes it, and its port.

    Args:
        llm: what answers; stays open.
        max_waiting: answers that may wait.
        log: where each request has its line; None: a text that is dropped.
    """
    from paceline.server.app import Settings, create_app
    from paceline.server.engine_thread import EngineThread
    from paceline.server.http import http_server
    from paceline.server.logs import RequestLog
    from paceline.server.metrics import ServerMetrics
    from paceline.server.page import page_routes

    ports: list[int] = []
    ready = threading.Event()

    def on_ready(port: int) -> None:
        ports.append(port)
        ready.set()

    engine = EngineThread(
        llm,
        max_waiting=max_waiting,
        after_step=lambda stepped, emitted, queued: metrics.after_step(
            stepped, num_emitted=emitted, num_queued=queued
        ),
    )
    metrics = ServerMetrics(model="model", is_healthy=lambda: engine.trouble is None)
    app = create_app(
        engine,
        Settings(name="model"),
        metrics=metrics,
        log=RequestLog(log or io.StringIO()),
        pages=page_routes(),
    )
    server = http_server(app, engine, host="127.0.0.1", port=0, on_ready=on_ready)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    if not ready.wait(START_SECONDS):
        raise RuntimeError("the server does not start")
    try:
        yield engine, ports[0]
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def serving(llm: LLM) -> Iterator[tuple[EngineThread, Connection]]:
    """A server in this process and a client in another."""
    with served(llm) as (engine, port):
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=client, args=(theirs, port), daemon=True)
        process.start()
        theirs.close()
        try:
            yield engine, ours
        finally:
            ours.close()
            process.join(10)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """`common.summary` with the quartiles."""
    whole = common.summary(values)
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {**whole, "quarter": low, "three_quarters": high}


def overhead(num_threads: int, *, max_tokens: int, repeats: int) -> dict[str, Any]:
    """Take turns with an engine of so many threads."""
    from paceline import LLM

    library: list[dict[str, Any]] = []
    server: list[dict[str, Any]] = []
    with (
        LLM(max_seq_len=1024, num_threads=num_threads, prefix_cache=False) as llm,
        serving(llm) as (engine, pipe),
    ):

        def turn_of_library() -> dict[str, Any]:
            # The engine's thread waits for a request and leaves the engine alone meanwhile.
            while engine.num_answers or llm.engine.has_work:
                time.sleep(0.001)
            time.sleep(0.01)
            cpu = time.process_time()
            timed = through_library(llm, max_tokens)
            return {**timed, "cpu_here": time.process_time() - cpu}

        def turn_of_server() -> dict[str, Any]:
            cpu = time.process_time()
            pipe.send(max_tokens)
            timed = pipe.recv()
            if isinstance(timed, str):
                raise RuntimeError(timed)
            return {**timed, "cpu_here": time.process_time() - cpu}

        # The first turns warm up, and bring the server to its pace.
        for _ in range(2):
            turn_of_library()
            turn_of_server()
        library.append(turn_of_library())
        for _ in range(repeats):
            server.append(turn_of_server())
            library.append(turn_of_library())
    texts = {turn["text"] for turn in (*library, *server)}
    if len(texts) != 1:
        raise RuntimeError("the server's text is not the library's")

    def over(name: str) -> list[float]:
        """Each server's turn over those of the library around it."""
        around = itertools.pairwise(library)
        pairs = zip(server, around, strict=True)
        return [turn[name] / ((a[name] + b[name]) / 2) for turn, (a, b) in pairs]

    per_token = 1000 / (max_tokens - 1)
    return {
        "num_threads": num_threads,
        "library_ms_per_token": spread([turn["rest"] * per_token for turn in library]),
        "server_ms_per_token": spread([turn["rest"] * per_token for turn in server]),
        "overhead_per_token": spread([ratio - 1 for ratio in over("rest")]),
        "cpu_overhead": spread([ratio - 1 for ratio in over("cpu_here")]),
        "library_first_token_ms": spread([1000 * turn["first"] for turn in library]),
        "server_first_token_ms": spread([1000 * turn["first"] for turn in server]),
        "client_cpu_ms_per_token": spread([1000 * turn["cpu"] / max_tokens for turn in server]),
        "tokens_per_read": spread([max_tokens / turn["reads"] for turn in server]),
    }


def start(num_threads: int | None) -> dict[str, Any]:
    """Start `paceline serve` once.

    Returns:
        Seconds from the start of its process to the first 200 of `/health` (`ready`), milliseconds
        to the first token of its first request and, as the median, of `LATER` more.
    """
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", "--no-request-log"]
    command += [] if num_threads is None else ["--num-threads", str(num_threads)]
    path = os.pathsep.join(filter(None, [str(common.ROOT / "src"), os.environ.get("PYTHONPATH")]))
    begun = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        late = threading.Timer(START_SECONDS, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("serving "):
                process.kill()
                raise RuntimeError(f"the server does not start: {process.communicate()[1][-500:]}")
            port = int(line.partition(":")[2].partition(":")[2].partition("/")[0])
            while not is_healthy(port):
                time.sleep(0.005)
            ready = time.perf_counter() - begun
            first = asked(port, 2)["first"]
            later = [asked(port, 2)["first"] for _ in range(LATER)]
        finally:
            late.cancel()
            process.terminate()
            process.communicate()
    return {"ready": ready, "first": 1000 * first, "later": 1000 * statistics.median(later)}


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    """Measure and print a JSON document."""
    args = parse()
    from paceline import bundled_model_path

    about = common.provenance(model=bundled_model_path(), prompts=common.PROMPTS)
    cores = about["cores"]
    counts = [args.num_threads] if args.num_threads else sorted({max(1, cores - 1), cores})
    # The first start fills caches of the system and of the compiler.
    starts = [start(args.num_threads) for _ in range(args.starts + 1)][1:]
    document = {
        **about,
        "quick": args.quick,
        "settings": {
            "prompt": json.dumps(PROMPT),
            "max_tokens": args.max_tokens,
            "turns": args.repeats,
            "starts": args.starts,
            "num_threads": [str(count) for count in counts],
        },
        "legs": [
            overhead(count, max_tokens=args.max_tokens, repeats=args.repeats) for count in counts
        ],
        "start": {
            "ready_seconds": spread([one["ready"] for one in starts]),
            "first_request_ms": spread([one["first"] for one in starts]),
            "later_request_ms": spread([one["later"] for one in starts]),
        },
    }
    print(json.dumps(document, indent=1))
    if args.json is not None:
        common.write_json(args.json, document)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--json", type=Path, help="write the result here")
    add("--max-tokens", type=int, default=400, help="of a turn")
    add("--repeats", type=int, default=41, help="turns of the server for each number of threads")
    add("--starts", type=int, default=5, help="starts that count")
    add("--num-threads", type=int, help="of the engine; all cores but one and all, if not given")
    add("--quick", action="store_true", help="few turns: shows that it runs")
    args = parser.parse_args()
    if args.quick:
        args.max_tokens, args.repeats, args.starts = 50, 2, 1
    if args.max_tokens < 2 or args.repeats < 1 or args.starts < 1:
        parser.error("--max-tokens takes at least 2, --repeats and --starts at least 1")
    return args


if __name__ == "__main__":
    main()
