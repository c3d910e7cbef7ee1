"""Many streams at one server for a while: no lost or mixed token, nothing left behind.

Clients ask for whole answers and streams, leave in the middle, read slowly and send what is no
request. Every whole answer is compared with what the same prompt gives alone.

    python benchmarks/soak.py --json benchmarks/results/soak.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import common
import httpx

from paceline import LLM, SamplingParams, bundled_model_path
from paceline.server.app import Settings, create_app
from paceline.server.engine_thread import EngineThread
from paceline.server.http import http_server

PROMPTS = [f"{kind} number_{n}" for n in range(20) for kind in ("def", "class", "# The", "import")]
BROKEN: list[bytes] = [
    b"{", b"[]", b'{"prompt": 1}', b'{"prompt": "a", "n": -1}', b'{"prompt": "a", "x": 1}', b"\xff",
]  # fmt: skip


def asked(place: int) -> dict[str, Any]:
    """The request of a prompt: some greedy, some drawn, of several lengths."""
    return {
        "prompt": PROMPTS[place],
        "max_tokens": 16 + 7 * (place % 20),
        "temperature": float(place % 2),
        "seed": place,
        "ignore_eos": place % 3 == 0,
    }


def alone(llm: LLM, count: int) -> list[str]:
    """The first prompts' answers, each with nothing beside it."""
    texts = []
    for place in range(count):
        given = asked(place)
        prompt = given.pop("prompt")
        texts.append(llm.generate(prompt, SamplingParams(**given))[0].text)
    return texts


def resident_mib() -> float:
    """Memory of the process that is in use, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


async def client(
    http: httpx.AsyncClient, expected: list[str], end: float, counts: Counter[str], seed: int
) -> None:
    """Ask one thing after another until the end."""
    chance = random.Random(seed)
    while time.monotonic() < end:
        place = chance.randrange(len(expected))
        body = asked(place)
        kind = chance.choice(("stream", "stream", "stream", "whole", "leave", "slow", "broken"))
        if kind == "broken":
            headers = {"content-type": "application/json"}
            answer = await http.post(
                "/v1/completions", content=chance.choice(BROKEN), headers=headers
            )
            counts["broken" if answer.status_code == 400 else "WRONG STATUS"] += 1
            continue
        if kind == "whole":
            answer = await http.post("/v1/completions", json=body)
            if answer.status_code == 429:
                counts["overloaded"] += 1
                await asyncio.sleep(0.05)
                continue
            text = answer.json()["choices"][0]["text"]
            counts["whole" if text == expected[place] else "MIXED"] += 1
            continue
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            if stream.status_code == 429:
                counts["overloaded"] += 1
                await asyncio.sleep(0.05)
                continue
            text, whole, leaves_at = "", False, chance.randint(1, 60)
            async for line in stream.aiter_lines():
                if line == "data: [DONE]":
                    whole = True
                elif line.startswith("data: "):
                    text += json.loads(line[6:])["choices"][0]["text"]
                if kind == "slow":
                    await asyncio.sleep(0.02)
                if kind == "leave" and len(text) > leaves_at:
                    break
            if kind == "leave" and not whole:
                counts["left" if expected[place].startswith(text) else "MIXED"] += 1
            elif not whole:
                counts["LOST"] += 1
            else:
                counts[kind if text == expected[place] else "MIXED"] += 1


async def clients(
    url: str, expected: list[str], seconds: float, streams: int
) -> tuple[Counter[str], list[float]]:
    """All clients, and the memory in use every twentieth of the time."""
    counts: Counter[str] = Counter()
    memory: list[float] = []
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        running = [
            asyncio.ensure_future(client(http, expected, end, counts, seed))
            for seed in range(streams)
        ]
        while time.monotonic() < end:
            await asyncio.sleep(seconds / 20)
            memory.append(resident_mib())
        await asyncio.gather(*running)
    return counts, memory


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--json", type=Path, help="write the result here")
    add("--seconds", type=float, default=600)
    add("--streams", type=int, default=64)
    add("--prompts", type=int, default=len(PROMPTS), metavar="N")
    add("--num-threads", type=int)
    add("--quick", action="store_true", help="a few seconds: shows that it runs")
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.streams, args.prompts = 3.0, 16, 12
    return args


def main() -> None:
    """Run it and print a JSON document; exit 1 where a token was lost, mixed or left behind."""
    args = parse()
    about = common.provenance(model=bundled_model_path(), prompts=common.PROMPTS)
    with LLM(max_seq_len=512, num_threads=args.num_threads, num_drafts=3) as llm:
        expected = alone(llm, args.prompts)
        engine = EngineThread(llm, max_waiting=args.streams)
        app = create_app(engine, Settings(name="model"))
        ports: list[int] = []
        ready = threading.Event()
        server = http_server(
            app,
            engine,
            host="127.0.0.1",
            port=0,
            on_ready=lambda port: (ports.append(port), ready.set())[0],
        )
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        ready.wait()
        before = llm.engine.num_forwards
        counts, memory = asyncio.run(
            clients(f"http://127.0.0.1:{ports[0]}", expected, args.seconds, args.streams)
        )
        while llm.engine.has_work:
            time.sleep(0.01)
        llm.engine.check_idle()
        steps = llm.engine.num_forwards - before
        server.should_exit = True
        thread.join()
    wrong = {name: counts[name] for name in ("LOST", "MIXED", "WRONG STATUS") if counts[name]}
    quarter = max(1, len(memory) // 4)
    document = {
        "about": about,
        "quick": args.quick,
        "seconds": args.seconds,
        "streams": args.streams,
        "requests": dict(sorted(counts.items())),
        "steps": steps,
        "memory_mib": {
            "second_quarter": round(max(memory[quarter : 2 * quarter], default=0)),
            "last_quarter": round(max(memory[-quarter:], default=0)),
        },
        "wrong": wrong,
    }
    print(json.dumps(document, indent=2))
    if args.json is not None:
        common.write_json(args.json, document)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
