"""What a client is answered when it cannot be served, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from paceline.types import PacelineError

__all__ = ["ApiError", "crowded", "overloaded", "shutting_down", "unavailable"]


_MAX_MESSAGE = 800


class ApiError(PacelineError):
    """A request that is answered with an error.

    Attributes:
        status: of HTTP.
        message: for people; cut where it is long, since it may quote what was given.
        param: the field that is wrong, or None.
        code: for programs, or None.
        headers: further ones of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        if len(message) > _MAX_MESSAGE:
            message = f"{message[:_MAX_MESSAGE]}..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def kind(self) -> str:
        """OpenAI's word for the kind of error."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def to_dict(self) -> dict[str, Any]:
        """The body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def overloaded(seconds: int) -> ApiError:
    """The queue is full; `seconds` is when to come again."""
    return ApiError(
        429,
        f"the queue is full; come again in {seconds} s",
        code="queue_full",
        headers={"retry-after": str(seconds)},
    )


def crowded(most: int) -> ApiError:
    """More connections are open than may be."""
    return ApiError(
        503,
        f"more than {most} connections are open; close some or come again",
        code="too_many_connections",
        headers={"retry-after": "1", "connection": "close"},
    )


def shutting_down() -> ApiError:
    """The server goes down."""
    return ApiError(
        503, "the server is shutting down", code="shutting_down", headers={"retry-after": "10"}
    )


def unavailable(reason: str) -> ApiError:
    """The engine is dead."""
    return ApiError(503, f"the engine is not running: {reason}", code="engine_dead")
