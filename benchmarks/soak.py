"""Many streams at one server for a while: no lost or mixed token, nothing left behind.

Clients, in a process of their own, ask for whole answers and streams of completions and chats,
greedy and drawn, one and several, free and under a schema. They leave in the middle of an answer or
of a request, read slowly, and send what is no request. Every answer is compared with what the same
request was given before, when it was alone. The server is the application as `paceline serve` makes
it, with its metrics, log and page, which are asked for meanwhile.

    python benchmarks/soak.py --json benchmarks/results/soak.json
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import common
import httpx
from serving import served

from paceline import LLM, bundled_model_path

STARTS = [f"{kind} number_{n}" for n in range(20) for kind in ("def", "class", "# The", "import")]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["one", "two", "three"]}, "large": {"type": "boolean"}},
    "required": ["name", "large"],
    "additionalProperties": False,
}
BROKEN: list[bytes] = [
    b"{", b"[]", b"null", b'{"prompt": 1}', b'{"prompt": "a", "n": -1}', b"\xff",
    b'{"prompt": "a", "x": 1}', b'{"prompt": "a", "temperature": NaN}', b"[" * 5000,
    b'{"prompt": "a", "max_tokens": 1e400}', b'{"prompt": ["a", 1]}', b'{"messages": []}',
]  # fmt: skip
GROWTH = 0.05
"""Share by which memory may be larger in the last quarter than in the second: its noise."""


IDLE_SECONDS = 60.0
"""Longest wait for the engine to have nothing to do once the clients are gone."""


def asked(place: int) -> tuple[str, dict[str, Any]]:
    """The path and body of one of the requests."""
    start, kind = STARTS[place % len(STARTS)], place % 5
    body: dict[str, Any] = {"max_tokens": 16 + 7 * (place % 20), "temperature": 0, "seed": place}
    if kind < 3:
        body["prompt"] = start
        body["ignore_eos"] = place % 3 == 0
        if kind:
            body["temperature"] = 0.8
            body["n"] = kind
        return "/v1/completions", body
    body["messages"] = [{"role": "user", "content": start}]
    if kind == 4:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": SCHEMA},
        }
    return "/v1/chat/completions", body


def said(choice: dict[str, Any]) -> str:
    """The text of a choice, whole or of a stream."""
    inner = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or inner.get("content") or "")


def whole(document: dict[str, Any]) -> list[str]:
    """The texts of an answer."""
    return [said(choice) for choice in document["choices"]]


class Lines(io.TextIOBase):
    """A log that is written and not kept, so that it is not the memory that grows.

    Attributes:
        count: lines so far.
    """

    def __init__(self) -> None:
        self.count = 0

    def write(self, text: str) -> int:
        self.count += text.count("\n")
        return len(text)


class Clients:
    """Many of them at one server.

    Attributes:
        counts: what came of the requests.
    """

    def __init__(self, url: str, places: int, end_after: float) -> None:
        self.counts: Counter[str] = Counter()
        self._url = url
        self._places = places
        self._seconds = end_after
        self._expected: list[list[str]] = []
        self._end = 0.0

    async def run(self, streams: int) -> None:
        """All of them until the end."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=300, limits=limits) as http:
            for place in range(self._places):
                path, body = asked(place)
                answer = await http.post(path, json=body)
                self._expected.append(whole(answer.raise_for_status().json()))
            print("alone", flush=True)
            self._end = time.monotonic() + self._seconds
            clients = [self._client(http, seed) for seed in range(streams)]
            await asyncio.gather(self._watch(http), *clients)

    async def _watch(self, http: httpx.AsyncClient) -> None:
        """Do what operators do."""
        while time.monotonic() < self._end:
            for path in ("/metrics", "/health", "/"):
                answer = await http.get(path)
                self.counts["watched" if answer.is_success else "WRONG STATUS"] += 1
            await asyncio.sleep(1.0)

    async def _client(self, http: httpx.AsyncClient, seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < self._end:
            place = chance.randrange(len(self._expected))
            kinds = ("stream", "stream", "stream", "whole", "leave", "slow", "broken", "torn")
            kind = chance.choice(kinds)
            if kind == "broken":
                await self._break(http, chance)
            elif kind == "torn":
                await self._tear(place, chance)
            elif kind == "whole":
                await self._ask_whole(http, place)
            else:
                await self._ask_stream(http, place, kind, chance)

    async def _break(self, http: httpx.AsyncClient, chance: random.Random) -> None:
        """Send what is no request: from the list, or a good one with a few bytes changed."""
        path, body = asked(chance.randrange(self._places))
        data = chance.choice(BROKEN)
        allowed = {400}
        if chance.random() < 0.5:
            changed = bytearray(json.dumps({**body, "max_tokens": 1, "n": 1}).encode())
            for _ in range(chance.randint(1, 4)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            # Some changes leave a good request.
            data, allowed = bytes(changed), {200, 400, 404, 429}
        answer = await http.post(path, content=data, headers={"content-type": "application/json"})
        self.counts["broken" if answer.status_code in allowed else "WRONG STATUS"] += 1

    async def _tear(self, place: int, chance: random.Random) -> None:
        """Leave in the middle of a request, or behind it without reading a byte."""
        path, body = asked(place)
        data = json.dumps({**body, "stream": True}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        ).encode()
        url = httpx.URL(self._url)
        _, writer = await asyncio.open_connection(url.host, url.port)
        message = head + data
        writer.write(message[: chance.randint(0, len(message))])
        await writer.drain()
        await asyncio.sleep(chance.random() * 0.05)
        writer.close()
        self.counts["torn"] += 1

    async def _ask_whole(self, http: httpx.AsyncClient, place: int) -> None:
        path, body = asked(place)
        answer = await http.post(path, json=body)
        if answer.status_code == 429:
            await self._overloaded()
        elif answer.status_code != 200:
            self.counts["WRONG STATUS"] += 1
        else:
            right = whole(answer.json()) == self._expected[place]
            self.counts["whole" if right else "MIXED"] += 1

    async def _ask_stream(
        self, http: httpx.AsyncClient, place: int, kind: str, chance: random.Random
    ) -> None:
        path, body = asked(place)
        expected = self._expected[place]
        async with http.stream("POST", path, json={**body, "stream": True}) as stream:
            if stream.status_code == 429:
                await self._overloaded()
                return
            if stream.status_code != 200:
                self.counts["WRONG STATUS"] += 1
                return
            texts, done, leaves_at = [""] * len(expected), False, chance.randint(1, 60)
            async for line in stream.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    for choice in json.loads(line[6:])["choices"]:
                        texts[choice["index"]] += said(choice)
                if kind == "slow":
                    await asyncio.sleep(0.02)
                if kind == "leave" and len(texts[0]) > leaves_at:
                    break
        if kind == "leave" and not done:
            right = all(
                all_of.startswith(text) for all_of, text in zip(expected, texts, strict=True)
            )
            self.counts["left" if right else "MIXED"] += 1
        elif not done:
            self.counts["LOST"] += 1
        else:
            self.counts[kind if texts == expected else "MIXED"] += 1

    async def _overloaded(self) -> None:
        self.counts["overloaded"] += 1
        await asyncio.sleep(0.05)


def resident_mib() -> float:
    """Memory of the process that is in use, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--json", type=Path, help="write the result here")
    add("--seconds", type=float, default=600)
    add("--streams", type=int, default=64)
    add("--requests", type=int, default=len(STARTS), metavar="N", help="how many there are")
    add("--num-threads", type=int)
    add("--quick", action="store_true", help="a few seconds: shows that it runs")
    add("--clients-of", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.streams, args.requests = 3.0, 16, 12
    return args


def under_load(url: str, args: argparse.Namespace) -> tuple[Counter[str], list[float]]:
    """What came of the clients' requests, and this process' memory every twentieth of the time."""
    command = [sys.executable, __file__, "--clients-of", url]
    for name in ("seconds", "streams", "requests"):
        command += [f"--{name}", str(getattr(args, name))]
    memory: list[float] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as clients:
        assert clients.stdout is not None
        if clients.stdout.readline() != "alone\n":
            raise SystemExit("the clients did not get their answers alone")
        end = time.monotonic() + args.seconds
        while time.monotonic() < end and clients.poll() is None:
            time.sleep(args.seconds / 20)
            memory.append(resident_mib())
        counted = clients.stdout.read()
    if clients.returncode:
        raise SystemExit(f"the clients ended with {clients.returncode}")
    return Counter(json.loads(counted)), memory


def main() -> None:
    """Run it and print a JSON document; exit 1 where a token was lost, mixed or left behind."""
    args = parse()
    if args.clients_of is not None:
        clients = Clients(args.clients_of, args.requests, args.seconds)
        asyncio.run(clients.run(args.streams))
        print(json.dumps(clients.counts))
        return
    about = common.provenance(model=bundled_model_path(), prompts=common.PROMPTS)
    with LLM(max_seq_len=512, num_threads=args.num_threads, num_drafts=3) as llm:
        lines = Lines()
        with served(llm, max_waiting=args.streams, log=lines) as (engine, port):
            counts, memory = under_load(f"http://127.0.0.1:{port}", args)
            end = time.monotonic() + IDLE_SECONDS
            while (engine.num_answers or llm.engine.has_work) and time.monotonic() < end:
                time.sleep(0.01)
            # What is left behind, a request included, is an error.
            llm.engine.check_idle()
        stats, steps = llm.engine.speculation, llm.engine.num_forwards
        running = llm.engine.max_num_seqs
    wrong = {name: counts[name] for name in ("LOST", "MIXED", "WRONG STATUS") if counts[name]}
    quarter = max(1, len(memory) // 4)
    early, late = max(memory[quarter : 2 * quarter], default=0), max(memory[-quarter:], default=0)
    if late > early * (1 + GROWTH) and not args.quick:
        wrong["MEMORY GREW"] = round(late - early)
    document = {
        **about,
        "quick": args.quick,
        "settings": {
            "seconds": args.seconds,
            "clients": args.streams,
            "different requests": args.requests,
            "drafts": 3,
            "most answers at once": running,
        },
        "requests": dict(sorted(counts.items())),
        "steps": steps,
        "tokens": stats.num_emitted,
        "drafted": stats.num_drafted,
        "accepted": stats.num_accepted,
        "log_lines": lines.count,
        "memory_mib": {"second_quarter": round(early), "last_quarter": round(late)},
        "wrong": wrong,
    }
    print(json.dumps(document, indent=2))
    if args.json is not None:
        common.write_json(args.json, document)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
