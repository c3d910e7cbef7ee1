"""What a token costs through the server and through the library: one stream, turn by turn.

The client is a process of its own, so that its work is not the server's.

    python benchmarks/serving.py --json benchmarks/results/serving.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import common

from paceline import LLM, SamplingParams, bundled_model_path
from paceline.server.app import Settings, create_app
from paceline.server.engine_thread import EngineThread
from paceline.server.http import http_server

PROMPT = "def add(a, b):"
CLIENT = """
import json, socket, sys, time
port, tokens, prompt = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                   "stream": True}).encode()
head = "POST /v1/completions HTTP/1.0\\r\\ncontent-type: application/json\\r\\ncontent-length: "
for _ in sys.stdin:
    with socket.create_connection(("127.0.0.1", port)) as end:
        end.sendall(f"{head}{len(body)}\\r\\n\\r\\n".encode() + body)
        first, said = None, b""
        while b"[DONE]" not in said:
            said = said[-20:] + end.recv(65536)
            if first is None and b"data:" in said:
                first = time.perf_counter()
    print(time.perf_counter() - first, flush=True)
"""


def through_library(llm: LLM, tokens: int) -> float:
    """Seconds from the first chunk to the last."""
    first = None
    for _ in llm.stream(PROMPT, SamplingParams(max_tokens=tokens, ignore_eos=True)):
        first = first or time.perf_counter()
    assert first is not None
    return time.perf_counter() - first


def main() -> None:
    """Measure both in turn and print a JSON document."""
    args = parse()
    about = common.provenance(model=bundled_model_path(), prompts=common.PROMPTS)
    seconds: dict[str, list[float]] = {"library": [], "server": []}
    options = {"max_seq_len": 1024, "num_threads": args.num_threads, "prefix_cache": False}
    with LLM(**options) as library, LLM(**options) as served:
        engine = EngineThread(served)
        ports: list[int] = []
        ready = threading.Event()

        def on_ready(port: int) -> None:
            ports.append(port)
            ready.set()

        app = create_app(engine, Settings(name="model"))
        server = http_server(app, engine, host="127.0.0.1", port=0, on_ready=on_ready)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        ready.wait()
        command = [sys.executable, "-c", CLIENT, str(ports[0]), str(args.max_tokens), PROMPT]
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert client.stdin is not None
        assert client.stdout is not None
        for _ in range(args.repeats + 1):
            seconds["library"].append(through_library(library, args.max_tokens))
            client.stdin.write("go\n")
            client.stdin.flush()
            seconds["server"].append(float(client.stdout.readline()))
        client.stdin.close()
        client.wait()
        server.should_exit = True
        thread.join()
    # The first round of each warms up.
    library_times, server_times = seconds["library"][1:], seconds["server"][1:]
    ratios = [b / a for a, b in zip(library_times, server_times, strict=True)]
    document = {
        "about": about,
        "quick": args.quick,
        "max_tokens": args.max_tokens,
        "rounds": args.repeats,
        "library_ms_per_token": 1000 * statistics.median(library_times) / args.max_tokens,
        "server_ms_per_token": 1000 * statistics.median(server_times) / args.max_tokens,
        "server_over_library": common.summary(ratios),
    }
    print(json.dumps(document, indent=2))
    if args.json is not None:
        common.write_json(args.json, document)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--json", type=Path, help="write the result here")
    add("--max-tokens", type=int, default=400)
    add("--repeats", type=int, default=21, help="rounds")
    add("--num-threads", type=int)
    add("--quick", action="store_true", help="few rounds: shows that it runs")
    args = parser.parse_args()
    if args.quick:
        args.max_tokens, args.repeats = 50, 2
    return args


if __name__ == "__main__":
    main()
