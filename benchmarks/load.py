"""What load tools say of the server: aiperf or guidellm against `paceline serve`, as they are.

    python benchmarks/load.py --aiperf aiperf --json benchmarks/results/load-aiperf.json
    python benchmarks/load.py --guidellm guidellm --json benchmarks/results/load-guidellm.json

Starts a server of the bundled model and runs the tool against it: completions and chats, streamed,
each prompt once, at several numbers of requests at a time. Requests, times and rates are what the
tool reports. So is acceptance, and it must be what `/metrics` counted; the exit status is 1 where
it is not, or where a request failed. The tools are best in environments of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

import paceline
from paceline import bundled_model_path

SERVED = "paceline-bundled"
PROMPT_FILE = "prompts.jsonl"
SHOWN_URL = "http://127.0.0.1:8000"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
KINDS = {"completions": common.CODE_CLASSES, "chat": ("define_chat", "edit_repeat")}
TOOL_SECONDS = 300
SETTLE_SECONDS = 5.0

Report = dict[str, Any]


@dataclass(frozen=True)
class Leg:
    """One run of a tool."""

    endpoint: str
    concurrency: int
    requests: int
    max_tokens: int


@dataclass(frozen=True)
class Tool:
    """A load tool.

    Attributes:
        prompt_row: a line of its prompt file, from a prompt and the tokens to ask for.
        arguments: its command line after the executable, from leg, URL and tokenizer.
        report: the file it writes, in the folder it runs in.
        read: what it reported, from that file.
    """

    name: str
    prompt_row: Callable[[str, int], dict[str, Any]]
    arguments: Callable[[Leg, str, str], list[str]]
    report: str
    read: Callable[[Report], Report]


def prompts_of(endpoint: str, count: int) -> list[str]:
    """Plain code to go on with, or what the user says last in the chats of the prompt file."""
    prompts = common.load_prompts(kinds=KINDS[endpoint])
    if endpoint == "chat":
        texts = [p.text.rpartition(USER)[2].partition(ASSISTANT)[0] for p in prompts]
    else:
        texts = [p.text for p in prompts]
    if count > len(texts):
        raise SystemExit(f"{count} requests are more than the {len(texts)} prompts there are")
    # The kinds lie one after the other in the file; few requests are to be of all of them.
    half = len(texts) // 2
    return [text for pair in zip(texts[:half], texts[half:], strict=True) for text in pair][:count]


def aiperf_arguments(leg: Leg, url: str, tokenizer: str) -> list[str]:
    """aiperf's command line."""
    return [
        *("profile", "--model", SERVED, "--url", url),
        *("--endpoint-type", leg.endpoint, "--streaming"),
        *("--tokenizer", tokenizer, "--use-server-token-count"),
        *("--input-file", PROMPT_FILE, "--custom-dataset-type", "single-turn"),
        *("--dataset-sampling-strategy", "sequential"),
        *("--concurrency", str(leg.concurrency), "--request-count", str(leg.requests)),
        *("--osl", str(leg.max_tokens)),
        *("--extra-inputs", "temperature:0", "--extra-inputs", "ignore_eos:true"),
        *("--artifact-dir", "report", "--ui", "none", "--no-gpu-telemetry"),
    ]


def guidellm_arguments(leg: Leg, url: str, tokenizer: str) -> list[str]:
    """guidellm's command line; it asks to go past the end where a row says how many tokens."""
    backend = {
        "kind": "openai_http",
        "target": url,
        "model": SERVED,
        "request_format": PATHS[leg.endpoint],
        "extras": {"body": {"temperature": 0}},
    }
    concurrent = f"kind=concurrent,streams={leg.concurrency}"
    return [
        *("run", "--backend", json.dumps(backend)),
        *("--profile", "kind=synchronous" if leg.concurrency == 1 else concurrent),
        *("--constraint", f"kind=max_requests,count={leg.requests}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--data", f"kind=json_file,path={PROMPT_FILE}"),
        *("--output", "kind=json,path=report.json", "--disable-console"),
    ]


def aiperf_report(profile: Report) -> Report:
    """What aiperf exported; times in milliseconds, shares as shares."""

    def value(name: str, what: str = "avg") -> Any:
        return profile.get(name, {}).get(what)

    def spread(name: str) -> Report:
        return {"median": value(name, "p50"), "p90": value(name, "p90")}

    acceptance = None
    if "total_spec_decode_steps" in profile:
        pooled = profile["pooled_spec_decode_acceptance_histogram"]
        histogram = [pooled.get(str(j), 0) for j in range(1 + max(map(int, pooled), default=0))]
        acceptance = {
            "summed_by": "the tool",
            "steps": int(value("total_spec_decode_steps")),
            "drafted": int(value("total_draft_tokens")),
            "accepted": int(value("total_accepted_draft_tokens")),
            "histogram": histogram,
            "mean_acceptance_length": value("spec_decode_token_weighted_acceptance_length"),
            "acceptance_rate": value("spec_decode_overall_draft_acceptance_rate") / 100,
        }
    return {
        "version": profile["aiperf_version"],
        "requests": int(value("request_count") or 0),
        "errors": sum(row["count"] for row in profile["error_summary"]),
        "output_tokens": int(value("total_osl") or 0),
        "ttft_ms": spread("time_to_first_token"),
        "itl_ms": spread("inter_token_latency"),
        "requests_per_second": value("request_throughput"),
        "output_tokens_per_second": value("output_token_throughput"),
        "acceptance": acceptance,
    }


def guidellm_report(report: Report) -> Report:
    """What guidellm wrote; it keeps the server's metrics of each request and does not sum them."""
    (benchmark,) = report["benchmarks"]
    metrics, requests = benchmark["metrics"], benchmark["requests"]

    def spread(name: str) -> Report:
        of = metrics[name]["successful"]
        return {"median": of["median"], "p90": of["percentiles"]["p90"]}

    told = [
        (r["response_metrics"] or {}).get("speculative_decoding") for r in requests["successful"]
    ]
    rows = [row for row in told if row is not None]
    return {
        "version": report["metadata"]["guidellm_version"],
        "requests": metrics["request_totals"]["successful"],
        "errors": metrics["request_totals"]["errored"] + metrics["request_totals"]["incomplete"],
        "output_tokens": int(metrics["output_token_count"]["successful"]["total_sum"]),
        "ttft_ms": spread("time_to_first_token_ms"),
        "itl_ms": spread("inter_token_latency_ms"),
        "requests_per_second": metrics["requests_per_second"]["successful"]["mean"],
        "output_tokens_per_second": metrics["output_tokens_per_second"]["successful"]["mean"],
        "acceptance": summed(rows) if rows else None,
    }


def summed(rows: Sequence[Report]) -> Report:
    """Several requests' `metrics.speculative_decoding` as one."""
    steps, drafted, accepted = (
        sum(row[name] for row in rows)
        for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    )
    histogram = [0] * max(len(row["acceptance_histogram"]) for row in rows)
    for row in rows:
        for j, count in enumerate(row["acceptance_histogram"]):
            histogram[j] += count
    return {
        "summed_by": "load.py",
        "steps": steps,
        "drafted": drafted,
        "accepted": accepted,
        "histogram": histogram,
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
    }


TOOLS = {
    "aiperf": Tool(
        name="aiperf",
        prompt_row=lambda text, _: {"text": text},
        arguments=aiperf_arguments,
        report="report/profile_export_aiperf.json",
        read=aiperf_report,
    ),
    "guidellm": Tool(
        name="guidellm",
        prompt_row=lambda text, tokens: {"prompt": text, "output_tokens_count": tokens},
        arguments=guidellm_arguments,
        report="report.json",
        read=guidellm_report,
    ),
}


def counted(exposed: str) -> Report:
    """What `/metrics` says of requests, of tokens and, under vLLM's names, of drafting."""

    def values(name: str) -> list[int]:
        found = re.findall(rf"^{name}_total(?:\{{[^}}]*\}})? (\S+)$", exposed, flags=re.MULTILINE)
        return [int(float(value)) for value in found]

    def one(name: str) -> int:
        (value,) = values(name)
        return value

    return {
        "requests": sum(values("paceline_requests")),
        "tokens": one("paceline_generation_tokens"),
        "steps": one("vllm:spec_decode_num_drafts"),
        "drafted": one("vllm:spec_decode_num_draft_tokens"),
        "accepted": one("vllm:spec_decode_num_accepted_tokens"),
        "accepted_at": values("vllm:spec_decode_num_accepted_tokens_per_pos"),
    }


def since(before: Report, after: Report) -> Report:
    """What was counted between two readings."""
    return {
        name: [b - a for a, b in zip(before[name], value, strict=True)]
        if isinstance(value, list)
        else value - before[name]
        for name, value in after.items()
    }


def faults(leg: Leg, reported: Report, server: Report) -> list[str]:
    """What a run shows that must not be."""
    wrong = []
    where = f"{leg.endpoint}, {leg.concurrency} at a time"
    if reported["errors"] or reported["requests"] != leg.requests:
        wrong.append(
            f"{where}: {reported['requests']} of {leg.requests} requests answered, "
            f"{reported['errors']} failed"
        )
    if server["requests"] != leg.requests:
        wrong.append(f"{where}: the server counted {server['requests']} requests")
    tokens = leg.requests * leg.max_tokens
    if not reported["output_tokens"] == server["tokens"] == tokens:
        wrong.append(
            f"{where}: {reported['output_tokens']} tokens by the tool, {server['tokens']} by the "
            f"server, of {tokens}"
        )
    told = reported["acceptance"]
    if told is None:
        return [*wrong, f"{where}: no acceptance is reported"]
    # A step that accepts j drafts accepts at each of the first j positions.
    at = [sum(told["histogram"][j + 1 :]) for j in range(len(server["accepted_at"]))]
    for name, tools, ours in (
        ("steps", told["steps"], server["steps"]),
        ("drafted", told["drafted"], server["drafted"]),
        ("accepted", told["accepted"], server["accepted"]),
        ("accepted by position", at, server["accepted_at"]),
    ):
        if tools != ours:
            wrong.append(f"{where}: {name} is {tools} by the tool and {ours} by /metrics")
    for name, tools, ours in (
        (
            "mean acceptance length",
            told["mean_acceptance_length"],
            1 + server["accepted"] / (server["steps"] or 1),
        ),
        (
            "acceptance rate",
            told["acceptance_rate"],
            server["accepted"] / (server["drafted"] or 1),
        ),
    ):
        if abs(tools - ours) > 1e-9:
            wrong.append(f"{where}: {name} is {tools} by the tool and {ours} by /metrics")
    return wrong


@contextmanager
def served(num_threads: int | None, folder: Path) -> Iterator[tuple[str, str]]:
    """URL and drafter of a server of the bundled model; its standard error goes to `folder`.

    Prompts come again in each leg, so that prefixes are not kept.

    Raises:
        SystemExit: it does not start.
    """
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0"]
    command += ["--served-model-name", SERVED, "--no-prefix-cache", "--no-request-log"]
    if num_threads is not None:
        command += ["--num-threads", str(num_threads)]
    paths = [str(Path(paceline.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    log = folder / "server"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
    assert process.stdout is not None
    try:
        said = re.search(r"(http://[\d.]+:\d+).*drafter: (.*)", process.stdout.readline())
        if said is None:
            raise SystemExit(f"the server does not start: {log.read_text()[-2000:]}")
        yield said[1], said[2]
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def fetch(url: str, body: Report | None = None) -> str:
    """The answer to a GET, or to a POST of a JSON document."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        text: str = answer.read().decode()
    return text


def settled(url: str, tokens: int) -> Report:
    """What the server counted, once it has counted this many tokens.

    The counts are copied between steps, so that an answer's last ones may come a little after it.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        now = counted(fetch(f"{url}/metrics"))
        if now["tokens"] >= tokens or time.monotonic() >= deadline:
            return now
        time.sleep(0.05)


def warm_up(url: str) -> Report:
    """A request to each endpoint, so that no tool pays for what happens once.

    Returns:
        What the server counted when they were over.
    """
    more = {"max_tokens": 16, "temperature": 0}
    message = {"role": "user", "content": "Define zebra"}
    tokens = counted(fetch(f"{url}/metrics"))["tokens"]
    for path, asked in (
        (PATHS["completions"], {"prompt": "import os"}),
        (PATHS["chat"], {"messages": [message]}),
    ):
        tokens += json.loads(fetch(url + path, {**asked, **more}))["usage"]["completion_tokens"]
    return settled(url, tokens)


def run_leg(tool: Tool, executable: str, leg: Leg, url: str, folder: Path) -> tuple[Report, float]:
    """Run the tool once.

    Returns:
        What it reported, and the seconds it took, its own start included.

    Raises:
        SystemExit: it failed or wrote no report.
    """
    rows = [
        tool.prompt_row(text, leg.max_tokens) for text in prompts_of(leg.endpoint, leg.requests)
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / PROMPT_FILE).write_text(text, encoding="utf-8")
    # Told to stay off the model hub, aiperf takes the tokenizer's folder for a name of the hub.
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if tool.name == "aiperf" else ()
    env = {name: value for name, value in os.environ.items() if name not in offline}
    command = [executable, *tool.arguments(leg, url, str(bundled_model_path()))]
    output = folder / "output"
    begin = time.monotonic()
    with output.open("w") as said:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**env, "NO_PROXY": "127.0.0.1"},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(TOOL_SECONDS)
        except BaseException as error:
            # It works in processes of its own, which would outlive it.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise SystemExit(f"{tool.name} took more than {TOOL_SECONDS} seconds") from None
    seconds = time.monotonic() - begin
    written = folder / tool.report
    if code or not written.is_file():
        raise SystemExit(f"{tool.name} ended with {code}: {output.read_text()[-3000:]}")
    return tool.read(json.loads(written.read_text(encoding="utf-8"))), seconds


def shown_command(tool: Tool, leg: Leg) -> str:
    """The command line as others may run it, from the project's folder."""
    tokenizer = common.shown(str(bundled_model_path()))
    return shlex.join([tool.name, *tool.arguments(leg, SHOWN_URL, tokenizer)])


def find(name: str, path: str) -> str:
    """The executable.

    Raises:
        SystemExit: it is not there.
    """
    found = shutil.which(path)
    if found is None:
        raise SystemExit(
            f"no {name} at {path!r}; `python -m venv {name}-env && {name}-env/bin/pip install "
            f"{name}` makes one, to be given as --{name} {name}-env/bin/{name}"
        )
    return str(Path(found).absolute())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one tool and print a JSON document; exit 1 where something is wrong."""
    args = parse(arguments)
    tool = TOOLS["aiperf" if args.aiperf is not None else "guidellm"]
    executable = find(tool.name, args.aiperf or args.guidellm)
    about = common.provenance(model=bundled_model_path(), prompts=common.PROMPTS)
    runs: list[Report] = []
    wrong: list[str] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        served(args.num_threads, Path(scratch)) as (url, drafter),
    ):
        before = warm_up(url)
        for endpoint in PATHS:
            for concurrency in args.concurrency:
                leg = Leg(endpoint, concurrency, args.requests, args.max_tokens)
                folder = Path(scratch) / f"{endpoint}-{concurrency}"
                folder.mkdir()
                reported, seconds = run_leg(tool, executable, leg, url, folder)
                after = settled(url, before["tokens"] + args.requests * args.max_tokens)
                server, before = since(before, after), after
                wrong += faults(leg, reported, server)
                about["versions"][tool.name] = reported.pop("version")
                runs.append(
                    {
                        "endpoint": PATHS[endpoint],
                        "concurrency": concurrency,
                        "command": shown_command(tool, leg),
                        "seconds": round(seconds, 1),
                        **reported,
                        "server": server,
                    }
                )
                done = f"{tool.name}: {endpoint}, {concurrency} at a time: {seconds:.0f} s"
                print(done, file=sys.stderr, flush=True)
    document = {
        "benchmark": "load",
        "tool": tool.name,
        "quick": args.quick,
        **about,
        "settings": {
            "drafter": drafter,
            "requests": args.requests,
            "max_tokens": args.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "num_threads": args.num_threads,
            "prefix_cache": False,
        },
        "runs": runs,
        "wrong": wrong,
    }
    print(json.dumps(document, indent=1))
    if args.json is not None:
        common.write_json(args.json, document)
    if wrong:
        raise SystemExit("\n".join(wrong))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    for name in TOOLS:
        which.add_argument(f"--{name}", metavar="PATH", help=f"the executable of {name}")
    add = parser.add_argument
    add("--json", type=Path, help="write the result here")
    add("--concurrency", type=int, nargs="+", default=[1, 4, 16], help="requests at a time")
    add("--requests", type=int, default=48, help="of each run, each with a prompt of its own")
    add("--max-tokens", type=int, default=64, help="of each answer")
    add("--num-threads", type=int)
    add("--quick", action="store_true", help="few short requests: shows that it runs")
    args = parser.parse_args(arguments)
    if args.quick:
        args.concurrency, args.requests, args.max_tokens = [2], 4, 8
    return args


if __name__ == "__main__":
    main()
