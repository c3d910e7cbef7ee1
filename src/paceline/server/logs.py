"""What is kept of a request when it is over: one record, one line of a log.

No text of prompts or answers is in it, and none of an error's message, which may quote them.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TextIO

from paceline.types import FinishReason, SpeculationStats

__all__ = ["Outcome", "RequestLog", "RequestRecord"]


class Outcome(StrEnum):
    """How a request ended, for operators.

    Several answers to one prompt are one request: it failed where one of them failed, was cancelled
    where one was, and is cut where one was.
    """

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REFUSED = "refused"
    UNAUTHORIZED = "unauthorized"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"

    @classmethod
    def of(cls, reasons: list[FinishReason]) -> Outcome:
        """The outcome of a request that ran, from its answers' reasons, one or more."""
        if FinishReason.ERROR in reasons:
            return cls.FAILED
        if FinishReason.ABORT in reasons:
            return cls.CANCELLED
        return cls.LENGTH if FinishReason.LENGTH in reasons else cls.STOP

    @classmethod
    def of_status(cls, status: int) -> Outcome:
        """The outcome of a request that was answered with an error, from its HTTP status."""
        if status == 429:
            return cls.OVERLOADED
        if status == 503:
            return cls.UNAVAILABLE
        if status in (401, 403):
            return cls.UNAUTHORIZED
        return cls.REFUSED if status < 500 else cls.FAILED


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One request, when it is over.

    Attributes:
        id: as the client was told it.
        endpoint: the route it came to, such as "/v1/completions"; never a path of the client's own
            making, since metrics have it as a label.
        status: HTTP status; that of the header where a stream had begun.
        outcome: how it ended.
        seconds: from the request's arrival to its end.
        ttft_seconds: from its arrival to its first token; None where none came.
        prompt_tokens: of the prompt, counted once however many answers it has.
        cached_tokens: those of them that an earlier request had computed.
        completion_tokens: of all its answers.
        num_answers: answers it has, each with a share of `completion_tokens`.
        finish_reasons: what the client was told of each answer; empty where it was not answered.
        stream: whether it was streamed.
        speculation: what drafting did for all its answers.
        error_type: class or code of what went wrong, or None; not the message.
    """

    id: str
    endpoint: str
    status: int
    outcome: Outcome
    seconds: float
    ttft_seconds: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_answers: int = 1
    finish_reasons: list[str] = field(default_factory=list)
    stream: bool = False
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    error_type: str | None = None

    @property
    def seconds_per_token(self) -> float | None:
        """Time from the first token to the end over the tokens after it, of an average answer.

        None where no answer has a second token.
        """
        if self.ttft_seconds is None or self.completion_tokens <= self.num_answers:
            return None
        after_first = self.completion_tokens / self.num_answers - 1
        return max(0.0, self.seconds - self.ttft_seconds) / after_first

    def to_dict(self) -> dict[str, Any]:
        """The fields of a log line, flat; see docs/serving.md."""
        stats = self.speculation
        per_token = self.seconds_per_token
        return {
            "id": self.id,
            "endpoint": self.endpoint,
            "status": self.status,
            "outcome": str(self.outcome),
            "finish_reason": ",".join(self.finish_reasons) or None,
            "stream": self.stream,
            "answers": self.num_answers,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "drafted": stats.num_drafted,
            "accepted": stats.num_accepted,
            "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
            "ttft_seconds": None if self.ttft_seconds is None else round(self.ttft_seconds, 6),
            "seconds_per_token": None if per_token is None else round(per_token, 6),
            "seconds": round(self.seconds, 6),
            "error_type": self.error_type,
        }


class RequestLog:
    """Writes a JSON object a line, one for each request.

    Any thread may write; lines do not mix. A log that cannot be written costs its lines, never a
    request: the failure is told once, on standard error.

    Args:
        stream: where lines go; None: standard error as it is when a line is written.
        now: the time, for the field "time"; with its zone.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._stream = stream
        self._now = now
        self._lock = threading.Lock()
        self._failed = False

    def write(self, record: RequestRecord) -> None:
        """Write one request's line."""
        self._line({"event": "request", **record.to_dict()})

    def event(self, event: str, **fields: str | int | float | bool | None) -> None:
        """Write a line on something else than a request, such as the server's start."""
        self._line({"event": event, **fields})

    def _line(self, fields: dict[str, Any]) -> None:
        stamp = self._now().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"time": stamp, **fields}, allow_nan=False) + "\n"
        with self._lock:
            stream = sys.stderr if self._stream is None else self._stream
            try:
                stream.write(line)
                stream.flush()
            except (OSError, ValueError) as error:
                if not self._failed:
                    self._failed = True
                    print(f"the request log cannot be written: {error}", file=sys.stderr)
