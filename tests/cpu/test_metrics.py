"""What operators see: metrics, the dashboard that shows them, and the log of requests."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from paceline import LLM, SamplingParams
from paceline.engine.alarms import ALARM_NAMES, Alarm
from paceline.server.logs import Outcome, RequestLog, RequestRecord
from paceline.server.metrics import CountedEngine, ServerMetrics
from paceline.types import MAX_NUM_DRAFTS, FinishReason, SpeculationStats

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "dashboards" / "paceline.json").read_text(encoding="utf-8"))

Labels = tuple[tuple[str, str], ...]


def samples(metrics: ServerMetrics) -> dict[tuple[str, Labels], float]:
    """Every sample by its name and its labels, as a scraper reads them."""
    found: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(metrics: ServerMetrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, tuple(sorted(labels.items()))]


def record(**given: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "id": "r",
        "endpoint": "/v1/completions",
        "status": 200,
        "outcome": Outcome.STOP,
        "seconds": 2.0,
    }
    return RequestRecord(**{**fields, **given})


class Counts:
    """An engine of numbers only."""

    def __init__(self) -> None:
        self.speculation = SpeculationStats()
        self.num_waiting = 3
        self.num_running = 2
        self.num_blocks = 40
        self.num_free_blocks = 25
        self.num_kept_blocks = 6
        self.num_forwards = 11
        self.num_preemptions = 4
        self.num_proposer_failures = 5
        self.num_prefix_lookups = 9
        self.num_prefix_hits = 7
        self.num_prefix_tokens = 1280
        self.found: list[Alarm] = []
        self.num_looks = 0

    def alarms(self) -> list[Alarm]:
        self.num_looks += 1
        return self.found


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


# The engine's counts


def test_every_count_of_the_engine_is_shown() -> None:
    engine: CountedEngine = Counts()
    metrics = ServerMetrics(model="m")
    metrics.after_step(engine, num_emitted=5, num_queued=10)
    metrics.after_step(engine, num_emitted=2, num_queued=10)
    expected = {
        "paceline_requests_queued": 13,
        "paceline_requests_running": 2,
        "paceline_cache_blocks": 40,
        "paceline_cache_blocks_used": 15,
        "paceline_cache_blocks_kept": 6,
        "paceline_generation_tokens_total": 7,
        "paceline_engine_steps_total": 11,
        "paceline_preemptions_total": 4,
        "paceline_proposer_failures_total": 5,
        "paceline_prefix_lookups_total": 9,
        "paceline_prefix_hits_total": 7,
        "paceline_prefix_tokens_total": 1280,
    }
    assert {name: value(metrics, name) for name in expected} == expected


def test_a_scrape_reads_the_copy_of_the_last_step() -> None:
    engine = Counts()
    engine.speculation.record(num_drafted=2, num_accepted=1)
    metrics = ServerMetrics(model="m")
    metrics.after_step(engine)
    before = samples(metrics)
    engine.speculation.record(num_drafted=2, num_accepted=2)
    engine.num_forwards += 1
    assert samples(metrics) == before
    metrics.after_step(engine)
    assert samples(metrics) != before


def test_scrapes_beside_a_stepping_engine_are_whole(llm: LLM) -> None:
    metrics = ServerMetrics(model="m")
    metrics.after_step(llm.engine)
    ended = threading.Event()

    def step() -> None:
        for _ in llm.stream(["import os\n", "def f(x):\n"], SamplingParams(max_tokens=48)):
            metrics.after_step(llm.engine)
        ended.set()

    thread = threading.Thread(target=step)
    thread.start()
    scraped = 0
    while not ended.is_set() or not scraped:
        seen = samples(metrics)
        at = [
            number
            for (name, _), number in seen.items()
            if name == "paceline_accepted_tokens_at_total"
        ]
        assert seen["paceline_accepted_tokens_total", ()] == sum(at)
        assert seen["paceline_draft_length_count", ()] == seen["paceline_decode_steps_total", ()]
        scraped += 1
    thread.join()
    assert value(metrics, "paceline_decode_steps_total") > 0


def test_drafting_is_counted_under_both_names(llm: LLM) -> None:
    llm.generate("import os\nimport sys\n", SamplingParams(max_tokens=64))
    metrics = ServerMetrics(model="a/b")
    metrics.after_step(llm.engine)
    stats = llm.engine.speculation
    assert stats.num_accepted
    for own, other, count in (
        ("draft_steps", "num_drafts", stats.num_draft_steps),
        ("draft_tokens", "num_draft_tokens", stats.num_drafted),
        ("accepted_tokens", "num_accepted_tokens", stats.num_accepted),
    ):
        assert value(metrics, f"paceline_{own}_total") == count
        named = f"vllm:spec_decode_{other}_total"
        assert value(metrics, named, model_name="a/b", engine="0") == count
    for position in range(MAX_NUM_DRAFTS):
        for name, counts in (
            ("draft_tokens_at", stats.drafted_at),
            ("reached_tokens_at", stats.reached_at),
            ("accepted_tokens_at", stats.accepted_at),
        ):
            count = counts[position] if position < len(counts) else 0
            assert value(metrics, f"paceline_{name}_total", position=str(position)) == count
        accepted = stats.accepted_at[position] if position < len(stats.accepted_at) else 0
        named = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        labels = {"model_name": "a/b", "engine": "0", "position": str(position)}
        assert value(metrics, named, **labels) == accepted
    assert value(metrics, "paceline_mean_acceptance_length") == stats.mean_acceptance_length
    (drafter,) = stats.drafted_by
    by = value(metrics, "paceline_accepted_tokens_by_total", drafter=drafter)
    assert by == stats.num_accepted


def test_the_histogram_of_draft_lengths_counts_each_step_once() -> None:
    engine = Counts()
    lengths = [0, 0, 1, 3, 3, 3, 8]
    for length in lengths:
        engine.speculation.record(num_drafted=length, num_accepted=0)
    metrics = ServerMetrics(model="m")
    metrics.after_step(engine)
    for most in range(MAX_NUM_DRAFTS + 1):
        count = value(metrics, "paceline_draft_length_bucket", le=str(float(most)))
        assert count == sum(length <= most for length in lengths)
    assert value(metrics, "paceline_draft_length_bucket", le="+Inf") == len(lengths)
    assert value(metrics, "paceline_draft_length_sum") == sum(lengths)


def test_alarms_are_looked_for_now_and_then_and_each_has_its_own_line() -> None:
    now = 0.0
    engine = Counts()
    engine.found = [Alarm("length_one", "why")]
    metrics = ServerMetrics(model="m", clock=lambda: now)
    for _ in range(5):
        metrics.after_step(engine)
    assert engine.num_looks == 1
    for name in ALARM_NAMES:
        assert value(metrics, "paceline_alarm", alarm=name) == (name == "length_one")
    engine.found, now = [], 60.0
    metrics.after_step(engine)
    assert not value(metrics, "paceline_alarm", alarm="length_one")


def test_no_alarm_lacks_a_name() -> None:
    source = (ROOT / "src" / "paceline" / "engine" / "alarms.py").read_text(encoding="utf-8")
    made = re.findall(r"Alarm\(\s*\"(\w+)\"", source)
    assert sorted(made) == sorted(ALARM_NAMES)


def test_health_is_asked_for_at_the_scrape() -> None:
    healthy = True
    metrics = ServerMetrics(model="m", is_healthy=lambda: healthy)
    assert value(metrics, "paceline_healthy") == 1
    healthy = False
    assert value(metrics, "paceline_healthy") == 0


# Requests


def test_requests_are_counted_by_route_and_outcome() -> None:
    metrics = ServerMetrics(model="m")
    metrics.finished(record(prompt_tokens=10, cached_tokens=4, ttft_seconds=0.5))
    metrics.finished(record(prompt_tokens=20, outcome=Outcome.CANCELLED, ttft_seconds=0.1))
    metrics.finished(
        record(prompt_tokens=7, outcome=Outcome.OVERLOADED, status=429, endpoint="/v1/x")
    )
    for endpoint, outcome in (
        ("/v1/completions", "stop"),
        ("/v1/completions", "cancelled"),
        ("/v1/x", "overloaded"),
    ):
        labels = {"endpoint": endpoint, "outcome": outcome}
        assert value(metrics, "paceline_requests_total", **labels) == 1
    assert value(metrics, "paceline_prompt_tokens_total") == 30
    assert value(metrics, "paceline_cached_prompt_tokens_total") == 4


def test_times_are_of_requests_that_gave_a_token() -> None:
    metrics = ServerMetrics(model="m")
    metrics.finished(record(seconds=3.0, ttft_seconds=1.0, completion_tokens=5))
    metrics.finished(record(seconds=4.0, ttft_seconds=1.5, completion_tokens=1))
    metrics.finished(record(seconds=0.1, outcome=Outcome.REFUSED, status=400))
    assert value(metrics, "paceline_time_to_first_token_seconds_count") == 2
    assert value(metrics, "paceline_time_to_first_token_seconds_sum") == 2.5
    assert value(metrics, "paceline_request_seconds_sum") == 7.0
    assert value(metrics, "paceline_time_per_output_token_seconds_count") == 1
    assert value(metrics, "paceline_time_per_output_token_seconds_sum") == 0.5


def test_several_answers_are_timed_as_the_average_one() -> None:
    one = record(seconds=3.0, ttft_seconds=1.0, completion_tokens=15, num_answers=3)
    assert one.seconds_per_token == 0.5
    assert (
        record(seconds=3.0, ttft_seconds=1.0, completion_tokens=3, num_answers=3).to_dict()[
            "seconds_per_token"
        ]
        is None
    )


def test_many_threads_count_every_request_once() -> None:
    metrics = ServerMetrics(model="m")

    def count() -> None:
        for _ in range(200):
            metrics.finished(record(prompt_tokens=1, ttft_seconds=0.1))

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value(metrics, "paceline_prompt_tokens_total") == 1600


def test_two_servers_share_a_process() -> None:
    one, other = ServerMetrics(model="a"), ServerMetrics(model="b")
    one.finished(record(prompt_tokens=3, ttft_seconds=0.1))
    assert value(other, "paceline_prompt_tokens_total") == 0
    assert value(one, "paceline_prompt_tokens_total") == 3
    assert value(other, "paceline_info", model="b") == 1


def test_the_text_keeps_the_colons_of_names() -> None:
    body, content_type = ServerMetrics(model="m").render()
    assert b"\nvllm:spec_decode_num_drafts_total{" in body
    assert content_type.startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize(
    ("reasons", "outcome"),
    [
        ([FinishReason.STOP], "stop"),
        ([FinishReason.STOP, FinishReason.LENGTH], "length"),
        ([FinishReason.LENGTH, FinishReason.ABORT], "cancelled"),
        ([FinishReason.ABORT, FinishReason.ERROR], "failed"),
    ],
)
def test_an_outcome_is_the_worst_of_its_answers(reasons: list[FinishReason], outcome: str) -> None:
    assert Outcome.of(reasons) == outcome


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (400, "refused"),
        (401, "unauthorized"),
        (404, "refused"),
        (413, "refused"),
        (429, "overloaded"),
        (500, "failed"),
        (503, "unavailable"),
    ],
)
def test_an_outcome_follows_from_the_status(status: int, outcome: str) -> None:
    assert Outcome.of_status(status) == outcome


# The dashboard


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def active() -> ServerMetrics:
    """Metrics in which every sample there can be is there."""
    engine = Counts()
    engine.speculation.record(num_drafted=3, num_accepted=2, source="mtp")
    metrics = ServerMetrics(model="m", info={"drafter": "mtp"}, is_healthy=lambda: True)
    metrics.after_step(engine)
    metrics.finished(record(ttft_seconds=1.0, completion_tokens=3))
    return metrics


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_the_dashboard_asks_for_metrics_there_are_and_for_all_of_them() -> None:
    there = {name for name, _ in samples(active())}
    asked = set(re.findall(r"\b(?:paceline|vllm:)\w+", " ".join(expressions())))
    assert asked <= there
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in there}
    shown = {re.sub(r"_bucket$", "", name) for name in asked}
    assert {name for name in families if name.startswith("paceline")} == shown


def test_the_dashboard_splits_by_labels_there_are() -> None:
    labels: dict[str, set[str]] = {}
    for name, pairs in samples(active()):
        labels.setdefault(name, set()).update(key for key, _ in pairs)
    for panel in panels():
        for target in panel["targets"]:
            expr = target["expr"]
            names = re.findall(r"\bpaceline\w+", expr)
            split = set(re.findall(r"by \(([\w, ]+)\)", expr))
            wanted = {one for group in split for one in group.split(", ")}
            wanted |= set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            for name in names:
                assert wanted <= labels[name], (panel["title"], name)


def test_the_dashboard_is_one_that_can_be_imported() -> None:
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    places: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & places, panel["title"]
        assert at["x"] + at["w"] <= 24
        places |= cells
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    text = json.dumps(everything)
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"}
    assert used == variables
    for expr in expressions():
        assert expr.count("(") == expr.count(")"), expr
        assert expr.count("{") == expr.count("}"), expr
    for panel in panels():
        assert panel["title"], panel["id"]
        assert panel["description"], panel["title"]


# The log


def test_a_request_is_one_line_of_json() -> None:
    out = io.StringIO()
    log = RequestLog(out, now=lambda: datetime(2026, 1, 2, 3, 4, 5, 678000, UTC))
    stats = SpeculationStats()
    stats.record(num_drafted=3, num_accepted=2)
    log.write(
        record(
            id="cmpl-1",
            ttft_seconds=0.25,
            prompt_tokens=12,
            cached_tokens=8,
            completion_tokens=4,
            finish_reasons=["stop"],
            stream=True,
            speculation=stats,
        )
    )
    assert out.getvalue().count("\n") == 1
    assert json.loads(out.getvalue()) == {
        "time": "2026-01-02T03:04:05.678Z",
        "event": "request",
        "id": "cmpl-1",
        "endpoint": "/v1/completions",
        "status": 200,
        "outcome": "stop",
        "finish_reason": "stop",
        "stream": True,
        "answers": 1,
        "prompt_tokens": 12,
        "cached_tokens": 8,
        "completion_tokens": 4,
        "drafted": 3,
        "accepted": 2,
        "mean_acceptance_length": 3.0,
        "ttft_seconds": 0.25,
        "seconds_per_token": 0.583333,
        "seconds": 2.0,
        "error_type": None,
    }


def test_an_id_with_a_line_end_stays_in_its_line() -> None:
    out = io.StringIO()
    RequestLog(out).write(record(id='a\n{"event": "forged"}'))
    assert len(out.getvalue().splitlines()) == 1


class Slow(io.StringIO):
    """Takes a line in two halves, and lets others in between."""

    def write(self, text: str) -> int:
        half = len(text) // 2
        super().write(text[:half])
        time.sleep(0.0002)
        return half + super().write(text[half:])


def test_lines_of_several_threads_do_not_mix() -> None:
    out = Slow()
    log = RequestLog(out)
    threads = [
        threading.Thread(target=lambda n=n: [log.write(record(id=f"{n}-{i}")) for i in range(50)])
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = {json.loads(line)["id"] for line in out.getvalue().splitlines()}
    assert len(ids) == 400


def test_a_log_that_cannot_be_written_costs_no_request(capsys: pytest.CaptureFixture[str]) -> None:
    closed = io.StringIO()
    closed.close()
    log = RequestLog(closed)
    log.write(record())
    log.event("stop")
    assert capsys.readouterr().err.count("the request log cannot be written") == 1
