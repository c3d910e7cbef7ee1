"""What operators see: Prometheus metrics of one server.

Two sources. Requests are counted where they end, by any thread. The engine's own counts are copied
after a step, by the thread that steps it, and a scrape reads the newest copy: it never touches the
engine, and no number in it is half of one step and half of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from paceline.engine.alarms import ALARM_NAMES, Alarm
from paceline.server.logs import RequestRecord
from paceline.types import MAX_NUM_DRAFTS, SpeculationStats

__all__ = ["CountedEngine", "EngineCounts", "ServerMetrics"]

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)

_ALARM_SECONDS = 1.0
"""Least time from one look at the alarms to the next; the look costs more than a copy."""


class CountedEngine(Protocol):
    """What metrics read of an engine, in the thread that steps it."""

    @property
    def speculation(self) -> SpeculationStats:
        """What drafting did so far."""

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet."""

    @property
    def num_running(self) -> int:
        """Requests that run."""

    @property
    def num_blocks(self) -> int:
        """Cache blocks in all."""

    @property
    def num_free_blocks(self) -> int:
        """Cache blocks nobody holds."""

    @property
    def num_kept_blocks(self) -> int:
        """Cache blocks that hold prefixes for later requests."""

    @property
    def num_forwards(self) -> int:
        """Target forwards so far."""

    @property
    def num_preemptions(self) -> int:
        """Times a request lost its blocks."""

    @property
    def num_proposer_failures(self) -> int:
        """Failures of the drafter."""

    @property
    def num_prefix_lookups(self) -> int:
        """Admissions that asked for a prefix."""

    @property
    def num_prefix_hits(self) -> int:
        """Those that found one."""

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens they did not compute."""

    def alarms(self) -> list[Alarm]:
        """Signs of faults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCounts:
    """The engine's counts between two steps; owns all it holds.

    Attributes:
        speculation: a copy of what drafting did so far.
        num_generated: tokens that steps have given requests, the prompt's own step included.
        num_queued: requests that are not admitted, in the engine and before it.
        num_running: requests that run.
        num_blocks: cache blocks in all.
        num_blocks_used: those that somebody holds, kept prefixes included.
        num_blocks_kept: those that hold prefixes for later requests.
        num_steps: target forwards.
        num_preemptions: times a request lost its blocks.
        num_proposer_failures: failures of the drafter.
        num_prefix_lookups: admissions that asked for a prefix.
        num_prefix_hits: those that found one.
        num_prefix_tokens: tokens they did not compute.
        alarms: names of the signs seen at the last look.
    """

    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    num_generated: int = 0
    num_queued: int = 0
    num_running: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0
    num_blocks_kept: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_proposer_failures: int = 0
    num_prefix_lookups: int = 0
    num_prefix_hits: int = 0
    num_prefix_tokens: int = 0
    alarms: frozenset[str] = frozenset()


class ServerMetrics:
    """All metrics of one server, in a registry of its own: several servers share a process.

    Args:
        model: name that clients use for the model; the label `model_name` of vLLM's counters.
        info: what is served, as labels of `paceline_info`: texts such as version, drafter, device.
        is_healthy: whether the server could answer now; asked at every scrape, by the thread that
            scrapes. None: not known, and `paceline_healthy` is left out.
        clock: monotonic seconds.

    Attributes:
        registry: where they are registered.
    """

    def __init__(
        self,
        *,
        model: str,
        info: dict[str, str] | None = None,
        is_healthy: Callable[[], bool] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.registry = _Registry(auto_describe=False)
        self._clock = clock
        self._counts = EngineCounts()
        self._num_generated = 0
        self._alarms: frozenset[str] = frozenset()
        self._alarms_at: float | None = None
        self._requests = Counter(
            "paceline_requests",
            "Requests that are over, by route and by how they ended.",
            ("endpoint", "outcome"),
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "paceline_prompt_tokens",
            "Tokens of the prompts of requests that ran and are over.",
            registry=self.registry,
        )
        self._cached_tokens = Counter(
            "paceline_cached_prompt_tokens",
            "Those of the prompts' tokens that an earlier request had computed.",
            registry=self.registry,
        )
        self._ttft = Histogram(
            "paceline_time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._per_token = Histogram(
            "paceline_time_per_output_token_seconds",
            "Time per token after the first, of requests with two tokens or more.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._seconds = Histogram(
            "paceline_request_seconds",
            "Time from a request's arrival to its end, of requests that ran.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(_EngineCollector(self, model, dict(info or {}), is_healthy))

    @property
    def counts(self) -> EngineCounts:
        """The newest copy of the engine's counts; any thread may read it."""
        return self._counts

    def after_step(
        self, engine: CountedEngine, *, num_emitted: int = 0, num_queued: int = 0
    ) -> None:
        """Copy the engine's counts; for the thread that steps it, between two steps only.

        Also when the engine runs dry or a request is dropped, or the gauges stay what they were.

        Args:
            engine: whose counts.
            num_emitted: tokens that came since the last call.
            num_queued: requests that were accepted and that the engine does not have yet.
        """
        self._num_generated += num_emitted
        now = self._clock()
        if self._alarms_at is None or now - self._alarms_at >= _ALARM_SECONDS:
            self._alarms_at = now
            self._alarms = frozenset(alarm.name for alarm in engine.alarms())
        speculation = SpeculationStats()
        speculation.add(engine.speculation)
        self._counts = EngineCounts(
            speculation=speculation,
            num_generated=self._num_generated,
            num_queued=num_queued + engine.num_waiting,
            num_running=engine.num_running,
            num_blocks=engine.num_blocks,
            num_blocks_used=engine.num_blocks - engine.num_free_blocks,
            num_blocks_kept=engine.num_kept_blocks,
            num_steps=engine.num_forwards,
            num_preemptions=engine.num_preemptions,
            num_proposer_failures=engine.num_proposer_failures,
            num_prefix_lookups=engine.num_prefix_lookups,
            num_prefix_hits=engine.num_prefix_hits,
            num_prefix_tokens=engine.num_prefix_tokens,
            alarms=self._alarms,
        )

    def finished(self, record: RequestRecord) -> None:
        """Count a request that is over, also one that was refused; once each, from any thread.

        One that gave no token has no times, and its prompt's tokens are not counted.
        """
        self._requests.labels(record.endpoint, str(record.outcome)).inc()
        if record.ttft_seconds is None:
            return
        self._prompt_tokens.inc(record.prompt_tokens)
        self._cached_tokens.inc(record.cached_tokens)
        self._ttft.observe(record.ttft_seconds)
        self._seconds.observe(record.seconds)
        if record.seconds_per_token is not None:
            self._per_token.observe(record.seconds_per_token)

    def render(self) -> tuple[bytes, str]:
        """The metrics as Prometheus text, whatever the scraper would like better.

        The client's OpenMetrics form changes the colons of vLLM's names to underscores.

        Returns:
            (body, content type).
        """
        return generate_latest(self.registry), _CONTENT_TYPE


class _Registry(CollectorRegistry):
    """Without the times at which series were made, which the client adds to its own metrics."""

    def collect(self) -> Iterator[Metric]:
        """What is registered."""
        for metric in super().collect():
            metric.samples = [one for one in metric.samples if not one.name.endswith("_created")]
            yield metric


class _EngineCollector(Collector):
    """Turns the newest copy of the engine's counts into metrics, at a scrape."""

    def __init__(
        self,
        metrics: ServerMetrics,
        model: str,
        info: dict[str, str],
        is_healthy: Callable[[], bool] | None,
    ) -> None:
        self._metrics = metrics
        self._model = model
        self._info = {"model": model, **info}
        self._is_healthy = is_healthy

    def describe(self) -> Iterable[Metric]:
        """Names, for the registry to find clashes with."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """The metrics; every one there is from the start, so that rates begin at zero."""
        counts = self._metrics.counts
        yield InfoMetricFamily("paceline", "What is served.", self._info)
        if self._is_healthy is not None:
            yield GaugeMetricFamily(
                "paceline_healthy",
                "1 where the engine answers, 0 where it is stuck or dead.",
                float(self._is_healthy()),
            )
        for name, text, gauge in (
            ("requests_queued", "Requests that wait for a place.", counts.num_queued),
            ("requests_running", "Requests that run.", counts.num_running),
            ("cache_blocks", "Cache blocks in all.", counts.num_blocks),
            (
                "cache_blocks_used",
                "Cache blocks that are held, kept prefixes included.",
                counts.num_blocks_used,
            ),
            (
                "cache_blocks_kept",
                "Cache blocks that hold prefixes for later requests; given up where one lacks.",
                counts.num_blocks_kept,
            ),
        ):
            yield GaugeMetricFamily(f"paceline_{name}", text, gauge)
        for name, text, count in (
            ("generation_tokens", "Tokens given to requests, as they come.", counts.num_generated),
            ("engine_steps", "Forwards of the target.", counts.num_steps),
            (
                "preemptions",
                "Times a running request gave its blocks to an older one.",
                counts.num_preemptions,
            ),
            (
                "proposer_failures",
                "Drafter calls that raised and drafts that had to be cut.",
                counts.num_proposer_failures,
            ),
            (
                "prefix_lookups",
                "Admissions that asked the cache of prefixes.",
                counts.num_prefix_lookups,
            ),
            ("prefix_hits", "Admissions that found a prefix.", counts.num_prefix_hits),
            (
                "prefix_tokens",
                "Tokens that were not computed since their prefix was found.",
                counts.num_prefix_tokens,
            ),
        ):
            yield CounterMetricFamily(f"paceline_{name}", text, count)
        alarms = GaugeMetricFamily(
            "paceline_alarm", "1 where the counts show this sign of a fault.", labels=["alarm"]
        )
        for name in ALARM_NAMES:
            alarms.add_metric([name], float(name in counts.alarms))
        yield alarms
        yield from _drafting(counts.speculation)
        yield from _under_other_names(counts.speculation, self._model)


def _drafting(stats: SpeculationStats) -> Iterator[Metric]:
    for name, text, count in (
        (
            "decode_steps",
            "Times a request was decoded by a forward, its prompt's own left out.",
            stats.num_decode_steps,
        ),
        ("draft_steps", "Decode steps that verified a draft.", stats.num_draft_steps),
        ("draft_tokens", "Drafts verified.", stats.num_drafted),
        ("accepted_tokens", "Drafts accepted.", stats.num_accepted),
    ):
        yield CounterMetricFamily(f"paceline_{name}", text, count)
    for name, text, per_position in (
        ("draft_tokens_at", "Drafts verified at a position, 0 the first.", stats.drafted_at),
        (
            "reached_tokens_at",
            "Drafts verified at a position with all before them accepted.",
            stats.reached_at,
        ),
        ("accepted_tokens_at", "Drafts accepted at a position.", stats.accepted_at),
    ):
        yield _at_positions(f"paceline_{name}", text, per_position, {})
    for name, text, by in (
        ("draft_tokens_by", "Drafts verified, by who drafted them.", stats.drafted_by),
        ("accepted_tokens_by", "Drafts accepted, by who drafted them.", stats.accepted_by),
    ):
        family = CounterMetricFamily(f"paceline_{name}", text, labels=["drafter"])
        for drafter, count in sorted(by.items()):
            family.add_metric([drafter], count)
        yield family
    yield GaugeMetricFamily(
        "paceline_mean_acceptance_length",
        "Tokens a drafted step yielded since the start, the target's own included.",
        stats.mean_acceptance_length,
    )
    # A step with more than k drafts has one at position k, so that these are cumulative already.
    within = [
        stats.num_decode_steps - (stats.drafted_at[k] if k < len(stats.drafted_at) else 0)
        for k in range(MAX_NUM_DRAFTS + 1)
    ]
    buckets = [(str(float(k)), float(count)) for k, count in enumerate(within)]
    yield HistogramMetricFamily(
        "paceline_draft_length",
        "Drafts of one request that a step verified, 0 included.",
        buckets=[*buckets, ("+Inf", float(stats.num_decode_steps))],
        sum_value=float(stats.num_drafted),
    )


def _under_other_names(stats: SpeculationStats, model: str) -> Iterator[Metric]:
    """The counters of drafting under the names that vLLM's V1 engine gives them."""
    labels = {"model_name": model, "engine": "0"}
    for name, text, count in (
        ("num_drafts", "`paceline_draft_steps` by another name.", stats.num_draft_steps),
        ("num_draft_tokens", "`paceline_draft_tokens` by another name.", stats.num_drafted),
        ("num_accepted_tokens", "`paceline_accepted_tokens` by another name.", stats.num_accepted),
    ):
        family = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), count)
        yield family
    yield _at_positions(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "`paceline_accepted_tokens_at` by another name.",
        stats.accepted_at,
        labels,
    )


def _at_positions(
    name: str, text: str, counts: Sequence[int], labels: dict[str, str]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[*labels, "position"])
    for position in range(MAX_NUM_DRAFTS):
        count = counts[position] if position < len(counts) else 0
        family.add_metric([*labels.values(), str(position)], count)
    return family
