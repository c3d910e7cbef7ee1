"""Load tools: what they check of the server's answers, and what is recorded of them."""

from __future__ import annotations

import copy
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_numbers import load as load_module

from paceline import bundled_model_path
from paceline.server.logs import Outcome, RequestRecord
from paceline.server.metrics import ServerMetrics
from paceline.server.replies import metrics_of
from paceline.types import FinishReason, GenerationResult, SpeculationStats, Usage

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

numbers = load_module(ROOT / "scripts" / "update_numbers.py")


@pytest.fixture(scope="module")
def load() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import load as module
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


# The object


@given(
    steps=st.lists(
        st.integers(0, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=40
    ),
    least=st.integers(0, 8),
)
def test_the_object_stands_up_to_what_aiperf_checks(
    steps: list[tuple[int, int]], least: int
) -> None:
    stats = SpeculationStats()
    for drafted, accepted in steps:
        stats.record(num_drafted=drafted, num_accepted=accepted)
    most = max([least, 1, *(drafted for drafted, _ in steps)])
    result = answered(stats)
    told = metrics_of([result], num_drafts=most)
    assert told is not None
    # As the object is sent; aiperf wants plain integers and refuses what disagrees.
    row = json.loads(json.dumps(told["speculative_decoding"], allow_nan=False))
    histogram = row["acceptance_histogram"]
    assert all(type(count) is int and count >= 0 for count in histogram)
    assert len(histogram) == row["num_spec_tokens"] + 1 == most + 1
    drafting = [(drafted, accepted) for drafted, accepted in steps if drafted]
    assert histogram == [sum(a == j for _, a in drafting) for j in range(most + 1)]
    assert row["num_spec_steps"] == sum(histogram) == len(drafting)
    weighed = sum(j * count for j, count in enumerate(histogram))
    assert row["num_accepted_draft_tokens"] == weighed <= row["num_draft_tokens"]
    assert row["num_draft_tokens"] == sum(drafted for drafted, _ in drafting)
    assert math.isfinite(row["draft_acceptance_rate"])
    assert 1 <= row["mean_acceptance_length"] <= row["num_spec_tokens"] + 1


def answered(stats: SpeculationStats) -> GenerationResult:
    return GenerationResult(
        text="",
        token_ids=[],
        finish_reason=FinishReason.LENGTH,
        usage=Usage(prompt_tokens=1, completion_tokens=0),
        speculation=stats,
        origins=[],
        prompt_token_ids=[1],
    )


# Reading reports

AIPERF: dict[str, Any] = {
    "aiperf_version": "0.13.0",
    "request_count": {"unit": "requests", "avg": 3.0},
    "error_request_count": {"unit": "requests", "avg": 2.0},
    "error_summary": [
        {"error_details": {"code": 429, "type": "Too Many Requests", "message": "m"}, "count": 2}
    ],
    "total_osl": {"unit": "tokens", "avg": 48.0},
    "time_to_first_token": {"unit": "ms", "avg": 9.0, "p50": 7.5, "p90": 12.5},
    "inter_token_latency": {"unit": "ms", "avg": 3.0, "p50": 2.5, "p90": 4.5},
    "request_throughput": {"unit": "requests/sec", "avg": 1.5},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 24.0},
    "total_spec_decode_steps": {"unit": "count", "avg": 12.0},
    "total_draft_tokens": {"unit": "tokens", "avg": 30.0},
    "total_accepted_draft_tokens": {"unit": "tokens", "avg": 15.0},
    "pooled_spec_decode_acceptance_histogram": {"0": 5, "1": 2, "3": 3, "2": 2},
    "spec_decode_token_weighted_acceptance_length": {"unit": "ratio", "avg": 2.25},
    "spec_decode_overall_draft_acceptance_rate": {"unit": "%", "avg": 50.0},
}
"""The parts that are read of what aiperf exports."""


def row(histogram: list[int], drafted: int) -> dict[str, Any]:
    """A request's metrics as guidellm keeps them."""
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1.0,
            "draft_acceptance_rate": 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": sum(histogram),
            "num_accepted_draft_tokens": sum(j * count for j, count in enumerate(histogram)),
            "num_draft_tokens": drafted,
            "num_spec_tokens": len(histogram) - 1,
        }
    }


def of_all(median: float, p90: float, **more: Any) -> dict[str, Any]:
    return {"successful": {"median": median, "percentiles": {"p50": median, "p90": p90}, **more}}


GUIDELLM: dict[str, Any] = {
    "metadata": {"version": 2, "guidellm_version": "0.8.1"},
    "benchmarks": [
        {
            "metrics": {
                "request_totals": {"successful": 3, "errored": 1, "incomplete": 1, "total": 5},
                "output_token_count": of_all(16, 16, total_sum=48.0),
                "time_to_first_token_ms": of_all(7.5, 12.5),
                "inter_token_latency_ms": of_all(2.5, 4.5),
                "requests_per_second": of_all(1, 1, mean=1.5),
                "output_tokens_per_second": of_all(1, 1, mean=24.0),
            },
            "requests": {
                "successful": [
                    {"response_metrics": row([4, 1, 2], 14)},
                    {"response_metrics": None},
                    {"response_metrics": row([1, 1, 0, 3], 16)},
                ],
                "errored": [{"response_metrics": None}] * 2,
            },
        }
    ],
}
"""The parts that are read of what guidellm writes."""


@pytest.mark.parametrize("tool", ["aiperf", "guidellm"])
def test_a_report_is_read(load: Any, tool: str) -> None:
    reported = load.TOOLS[tool].read({"aiperf": AIPERF, "guidellm": GUIDELLM}[tool])
    assert reported == {
        "version": {"aiperf": "0.13.0", "guidellm": "0.8.1"}[tool],
        "requests": 3,
        "errors": 2,
        "output_tokens": 48,
        "ttft_ms": {"median": 7.5, "p90": 12.5},
        "itl_ms": {"median": 2.5, "p90": 4.5},
        "requests_per_second": 1.5,
        "output_tokens_per_second": 24.0,
        "acceptance": {
            "summed_by": {"aiperf": "the tool", "guidellm": "load.py"}[tool],
            "steps": 12,
            "drafted": 30,
            "accepted": 15,
            "histogram": [5, 2, 2, 3],
            "mean_acceptance_length": 2.25,
            "acceptance_rate": 0.5,
        },
    }


def test_a_report_without_acceptance_is_read(load: Any) -> None:
    spoken = {name: value for name, value in AIPERF.items() if "spec_decode" not in name}
    assert load.aiperf_report(spoken)["acceptance"] is None
    silent = copy.deepcopy(GUIDELLM)
    for request in silent["benchmarks"][0]["requests"]["successful"]:
        request["response_metrics"] = None
    assert load.guidellm_report(silent)["acceptance"] is None


# What the server counted


class Counted:
    """An engine at rest, for the metrics to read."""

    num_waiting = num_running = num_blocks = num_free_blocks = num_kept_blocks = 0
    num_forwards = num_preemptions = num_proposer_failures = 0
    num_prefix_lookups = num_prefix_hits = num_prefix_tokens = 0

    def __init__(self, speculation: SpeculationStats) -> None:
        self.speculation = speculation

    def alarms(self) -> list[Any]:
        return []


def test_the_servers_own_counts_are_read(load: Any) -> None:
    metrics, stats = ServerMetrics(model="m"), SpeculationStats()
    assert load.counted(metrics.render()[0].decode())["steps"] == 0
    for drafted, accepted in ((3, 3), (3, 1), (2, 0), (0, 0)):
        stats.record(num_drafted=drafted, num_accepted=accepted, source="d")
    metrics.after_step(Counted(stats), num_emitted=9)
    for path, outcome in (("/v1/completions", Outcome.STOP), ("/v1/chat", Outcome.REFUSED)):
        metrics.finished(
            RequestRecord(id="", endpoint=path, status=200, outcome=outcome, seconds=1)
        )
    once = load.counted(metrics.render()[0].decode())
    assert once == {
        "requests": 2,
        "tokens": 9,
        "steps": 3,
        "drafted": 8,
        "accepted": 4,
        "accepted_at": [2, 1, 1, 0, 0, 0, 0, 0],
    }
    stats.record(num_drafted=2, num_accepted=2, source="d")
    metrics.after_step(Counted(stats), num_emitted=3)
    twice = load.counted(metrics.render()[0].decode())
    assert load.since(once, twice) == {
        "requests": 0,
        "tokens": 3,
        "steps": 1,
        "drafted": 2,
        "accepted": 2,
        "accepted_at": [1, 1, 0, 0, 0, 0, 0, 0],
    }


def test_counts_are_read_when_they_are_whole(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, stats = ServerMetrics(model="m"), SpeculationStats()
    said = []
    for emitted in (4, 5, 6):
        stats.record(num_drafted=3, num_accepted=1, source="d")
        metrics.after_step(Counted(stats), num_emitted=emitted)
        said.append(metrics.render()[0].decode())
    monkeypatch.setattr(load, "fetch", lambda url: said.pop(0) if len(said) > 1 else said[0])
    assert load.settled("", 9)["steps"] == 2
    monkeypatch.setattr(load, "SETTLE_SECONDS", 0.0)
    assert load.settled("", 100)["tokens"] == 15


SERVER = {
    "requests": 3,
    "tokens": 48,
    "steps": 12,
    "drafted": 30,
    "accepted": 15,
    "accepted_at": [7, 5, 3, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize(
    ("of", "name", "value", "says"),
    [
        ("reported", "requests", 2, "2 of 3 requests answered"),
        ("reported", "errors", 1, "1 failed"),
        ("reported", "output_tokens", 47, "47 tokens by the tool, 48 by the server, of 48"),
        ("reported", "acceptance", None, "no acceptance is reported"),
        ("told", "steps", 13, "steps is 13 by the tool and 12"),
        ("told", "drafted", 31, "drafted is 31"),
        ("told", "accepted", 14, "accepted is 14"),
        ("told", "histogram", [5, 2, 3, 2], "accepted by position is"),
        ("told", "histogram", [5, 2, 2, 3, 1], "accepted by position is"),
        ("told", "mean_acceptance_length", 2.26, "mean acceptance length is 2.26"),
        ("told", "acceptance_rate", 0.51, "acceptance rate is 0.51"),
        ("server", "requests", 4, "the server counted 4 requests"),
        ("server", "tokens", 49, "48 tokens by the tool, 49 by the server, of 48"),
        ("server", "accepted_at", [7, 5, 3, 0, 1, 0, 0, 0], "accepted by position is"),
    ],
)
def test_what_does_not_agree_is_said(load: Any, of: str, name: str, value: Any, says: str) -> None:
    leg = load.Leg("completions", 4, 3, 16)
    reported, server = load.aiperf_report({**AIPERF, "error_summary": []}), copy.deepcopy(SERVER)
    assert load.faults(leg, reported, server) == []
    parts = {"reported": reported, "told": reported["acceptance"], "server": server}
    parts[of][name] = value
    (said,) = load.faults(leg, reported, server)
    assert says in said
    assert said.startswith("completions, 4 at a time: ")


# A run

TOOL = """#!{python}
import json, sys, urllib.request
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
backend = json.loads(options["--backend"])
open_ = urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open
keep, tokens = [], 0
for line in open(options["--data"].split("path=")[1], encoding="utf-8"):
    row = json.loads(line)
    body = {{"model": backend["model"], "stream": True, "ignore_eos": True, "stop": None,
            "stream_options": {{"include_usage": True, "continuous_usage_stats": True}},
            **backend["extras"]["body"]}}
    if "chat" in backend["request_format"]:
        content = [{{"type": "text", "text": row["prompt"]}}]
        body["messages"] = [{{"role": "user", "content": content}}]
        body["max_completion_tokens"] = row["output_tokens_count"]
    else:
        body |= {{"prompt": row["prompt"], "max_tokens": row["output_tokens_count"]}}
    request = urllib.request.Request(backend["target"] + backend["request_format"],
        json.dumps(body).encode(), {{"content-type": "application/json"}})
    metrics = usage = None
    with open_(request) as answer:
        for said in answer:
            if said.startswith(b"data: {{"):
                event = json.loads(said[6:])
                if isinstance(event.get("metrics"), dict):
                    metrics = event["metrics"]
                usage = event.get("usage") or usage
    tokens += usage["completion_tokens"]
    keep.append({{"response_metrics": metrics}})
spread = {{"successful": {{"median": 1.0, "mean": 1.0, "percentiles": {{"p90": 2.0}}}}}}
names = ["time_to_first_token_ms", "inter_token_latency_ms", "requests_per_second",
         "output_tokens_per_second"]
totals = {{"successful": len(keep), "errored": 0, "incomplete": 0}}
report = {{
    "metadata": {{"guidellm_version": "0.0.0"}},
    "benchmarks": [{{
        "metrics": {{"request_totals": totals, **{{name: spread for name in names}},
                    "output_token_count": {{"successful": {{"total_sum": float(tokens)}}}}}},
        "requests": {{"successful": keep}},
    }}],
}}
{spoil}
with open(options["--output"].split("path=")[1], "w") as out:
    json.dump(report, out)
"""
"""Asks and reports as guidellm does, without its clock."""

LIES = 'keep[0]["response_metrics"]["speculative_decoding"]["num_draft_tokens"] += 1'
FAILS = """print("something broke")
with open("report.json", "w") as out:
    json.dump(report, out)
sys.exit(3)"""
SILENT = "sys.exit(0)"


def tool(folder: Path, spoil: str = "") -> Path:
    path = folder / "guidellm"
    path.write_text(TOOL.format(python=sys.executable, spoil=spoil), encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def server(load: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with load.served(1, tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture
def at_hand(load: Any, server: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, with a server that runs already."""

    def served(*_: Any) -> AbstractContextManager[tuple[str, str]]:
        return nullcontext(server)

    monkeypatch.setattr(load, "served", served)
    return load


QUICK = ["--requests", "2", "--max-tokens", "8", "--concurrency", "1"]
SMALL = ["--requests", "3", "--max-tokens", "12", "--concurrency", "1", "2"]


def test_a_run_is_recorded(at_hand: Any, server: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "load-guidellm.json"
    at_hand.main(["--guidellm", str(tool(tmp_path)), *SMALL, "--json", str(out)])
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["wrong"] == []
    assert result["quick"] is False
    assert result["versions"]["guidellm"] == "0.0.0"
    assert "MtpHead, 3 drafts" in result["settings"]["drafter"]
    places = [(run["endpoint"], run["concurrency"]) for run in result["runs"]]
    assert places == [
        ("/v1/completions", 1),
        ("/v1/completions", 2),
        ("/v1/chat/completions", 1),
        ("/v1/chat/completions", 2),
    ]
    for run, other in zip(result["runs"][::2], result["runs"][1::2], strict=True):
        assert (run["requests"], run["output_tokens"]) == (3, 36)
        assert run["acceptance"]["accepted"] == sum(run["server"]["accepted_at"]) > 0
        assert run["acceptance"]["drafted"] == run["server"]["drafted"]
        assert run["acceptance"] == other["acceptance"]
        assert shlex.split(run["command"])[0] == "guidellm"
        assert "kind=synchronous" in run["command"]
        assert "kind=concurrent,streams=2" in other["command"]
    # Nothing of the machine is in it.
    text = out.read_text(encoding="utf-8")
    paths = (str(tmp_path), str(ROOT), str(bundled_model_path()), server[0])
    assert not any(path in text for path in paths)
    shown = numbers.load_sentence(result)
    drafted = sum(run["server"]["drafted"] for run in result["runs"])
    assert shown.startswith("guidellm 0.0.0: 12 requests in 4 runs, none failed.")
    assert f"{drafted} drafts" in shown
    mean = result["runs"][2]["acceptance"]["mean_acceptance_length"]
    cells = numbers.load_table(result).splitlines()[4].split(" | ")
    assert cells[:4] == ["| `/v1/chat/completions`", "1", "3", "0"]
    assert f"{mean:.3f}" in cells
    (shown,) = re.fullmatch(r"```bash\n(.*)\n```", numbers.load_command(result), re.DOTALL).groups()
    assert shlex.split(shown.replace("\\\n", "")) == shlex.split(result["runs"][-1]["command"])
    assert max(map(len, shown.splitlines())) < 200
    for name in ("load-guidellm", "load-guidellm-environment"):
        assert numbers.render(name, numbers.Results(tmp_path)).count("\n") > 4


def test_a_lie_is_found_and_not_published(at_hand: Any, tmp_path: Path) -> None:
    out = tmp_path / "load-guidellm.json"
    with pytest.raises(SystemExit, match="drafted is") as end:
        at_hand.main(["--guidellm", str(tool(tmp_path, LIES)), *QUICK, "--json", str(out)])
    result = json.loads(out.read_text(encoding="utf-8"))
    assert len(str(end.value).splitlines()) == len(result["wrong"]) >= 2
    for region in ("load-guidellm", "load-guidellm-sentence"):
        with pytest.raises(numbers.NumbersError, match="drafted is"):
            numbers.render(region, numbers.Results(tmp_path))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [(FAILS, "guidellm ended with 3: something broke"), (SILENT, "guidellm ended with 0")],
)
def test_a_tool_that_fails_is_told(at_hand: Any, tmp_path: Path, spoil: str, says: str) -> None:
    out = tmp_path / "result.json"
    with pytest.raises(SystemExit, match=says):
        at_hand.main(["--guidellm", str(tool(tmp_path, spoil)), *QUICK, "--json", str(out)])
    assert not out.exists()


@pytest.mark.parametrize("name", ["aiperf", "guidellm"])
def test_a_tool_that_is_not_there_is_told(load: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"no {name} at .*pip install {name}"):
        load.main([f"--{name}", str(tmp_path / name)])


def test_more_requests_than_prompts_are_refused(load: Any) -> None:
    for endpoint in load.PATHS:
        texts = load.prompts_of(endpoint, 48)
        assert len(set(texts)) == 48
        assert not any("<｜" in text for text in texts)
        with pytest.raises(SystemExit, match="49 requests"):
            load.prompts_of(endpoint, 49)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["aiperf", "guidellm"])
def test_the_real_tool_runs(name: str, tmp_path: Path) -> None:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    out = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / "load.py"), f"--{name}", path, "--quick"]
    command += ["--num-threads", "1", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert all(run["acceptance"]["accepted"] > 0 for run in runs)


# The page


def test_the_pages_commands_are_made_of_what_was_run(load: Any) -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    lines = [line for text in blocks for line in text.replace("\\\n", " ").splitlines()]
    leg = load.Leg("completions", 4, 32, 64)
    for name, known in load.TOOLS.items():
        (line,) = [line for line in lines if line.startswith(f"{name}-env/bin/{name} ")]
        _, *words = shlex.split(line)
        ran = known.arguments(leg, load.SHOWN_URL, "$MODEL")
        options = [word for word in words if word.startswith("--")]
        assert words[0] == ran[0]
        assert set(options) <= set(ran)
        if name == "aiperf":
            assert set(words) <= set(ran)
        else:
            kinds = set(re.findall(r"kind=(\w+)", line))
            assert kinds - {"synthetic_text", "openai_http"} <= set(
                re.findall(r"kind=(\w+)", " ".join(ran))
            )
