"""What clients are told: bodies and stream chunks in OpenAI's shape, and what drafting earned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from paceline.server.protocol import Asked
from paceline.text import ChatParser, Detokenizer, Tokenizer
from paceline.text.parser import (
    ChatEvent,
    ContentDelta,
    MarkupError,
    ReasoningDelta,
    ToolCallBegin,
    ToolCallDelta,
)
from paceline.types import (
    FinishReason,
    GenerationResult,
    SpeculationStats,
    StreamChunk,
    TokenLogprob,
)

__all__ = [
    "ChatAnswer",
    "CompletionAnswer",
    "metrics_of",
    "summed",
    "usage_of",
    "usage_so_far",
]

_NO_CHANCE = -9999.0
"""OpenAI's number for a log-probability of minus infinity, which JSON does not have."""


def summed(results: Iterable[GenerationResult]) -> SpeculationStats:
    """What drafting did for several answers."""
    total = SpeculationStats()
    for result in results:
        total.add(result.speculation)
    return total


def usage_of(
    results: Sequence[GenerationResult], *, prompt_tokens: int, dropped: int = 0
) -> dict[str, Any]:
    """The usage of a request that is over.

    Args:
        results: of all its answers.
        prompt_tokens: of its prompts, each counted once.
        dropped: tokens of its answers that the client is not given.
    """
    completion_tokens = sum(result.usage.completion_tokens for result in results) - dropped
    stats = summed(results)
    cached = sum(result.usage.cached_tokens for result in results if result.sample_index == 0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "speculation": {
            "drafted": stats.num_drafted,
            "accepted": stats.num_accepted,
            "mean_acceptance_length": stats.mean_acceptance_length,
            "drafted_at": stats.drafted_at,
            "reached_at": stats.reached_at,
            "accepted_at": stats.accepted_at,
        },
    }


def usage_so_far(*, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The usage of a request that goes on."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def metrics_of(
    results: Sequence[GenerationResult], *, num_drafts: int | None
) -> dict[str, Any] | None:
    """`metrics` in vLLM's shape, of a request with one answer; None where nothing can be told.

    Args:
        results: of all its answers.
        num_drafts: most drafts a step of it might verify; None: as many as one did.
    """
    if len(results) != 1 or num_drafts == 0:
        return None
    stats = results[0].speculation
    at_least = [stats.num_draft_steps, *stats.accepted_at]
    most = max(len(stats.drafted_at), num_drafts or 0)
    at_least += [0] * (most + 2 - len(at_least))
    return {
        "speculative_decoding": {
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.acceptance_rate,
            "acceptance_histogram": [at_least[j] - at_least[j + 1] for j in range(most + 1)],
            "num_spec_steps": stats.num_draft_steps,
            "num_accepted_draft_tokens": stats.num_accepted,
            "num_draft_tokens": stats.num_drafted,
            "num_spec_tokens": most,
        }
    }


def _finish(reason: FinishReason | None) -> str | None:
    return None if reason is None else str(reason)


def _logprob(value: float) -> float:
    return value if math.isfinite(value) else _NO_CHANCE


class _Names:
    """Tokens as texts."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def data(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        """Its text; its bytes where they are no text, and its number where it has none."""
        data = self.data(token_id)
        if not data:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(kw_only=True)
class CompletionAnswer:
    """One answer of a completion, as its client sees it grow.

    Args:
        index: of the choice.
        asked: the request.
        prompt_ids: what it answers.
        tokenizer: of the model, or None.
    """

    index: int
    asked: Asked
    prompt_ids: list[int]
    tokenizer: Tokenizer | None
    result: GenerationResult | None = None
    num_tokens: int = 0
    _offset: int = 0
    _detokenizer: Detokenizer | None = None
    _began: bool = False

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            self._detokenizer = Detokenizer(self.tokenizer)

    def begin(self) -> list[dict[str, Any]]:
        """Choices of the chunks before the first token: the prompt where it is to be told."""
        if not self.asked.echo:
            return []
        return [self._choice(self._prompt_text(), None)]

    def add(self, chunk: StreamChunk) -> list[dict[str, Any]]:
        """Choices of the chunks that a step's tokens make."""
        self.num_tokens += len(chunk.token_ids)
        self.result = chunk.result
        ended = _ended(chunk)
        reason = None if ended is None else ended.finish_reason
        if self.asked.only_echo:
            if reason is None:
                return []
            choice = {**self._choice("", FinishReason.LENGTH), "stop_reason": None}
            self._extend(choice, _without_tokens(chunk))
            return [choice]
        listed = chunk.logprobs is not None
        tells = listed or self.asked.return_token_ids or self.asked.return_pieces
        if not (chunk.text or reason or (tells and chunk.token_ids)):
            return []
        choice = self._choice(chunk.text, reason)
        if chunk.logprobs is not None:
            choice["logprobs"] = self._logprobs(chunk.logprobs)
        if ended is not None:
            choice["stop_reason"] = ended.stop_reason
        self._extend(choice, chunk)
        return [choice]

    def whole(self, chunk: StreamChunk) -> dict[str, Any]:
        """The choice of an answer that is over; `chunk` is all of it."""
        result = self.result = chunk.result
        assert result is not None
        self.num_tokens = len(result.token_ids)
        echo = self.asked.echo
        text = "" if self.asked.only_echo else result.text
        choice = self._choice((self._prompt_text() if echo else "") + text, result.finish_reason)
        choice["stop_reason"] = result.stop_reason
        if self.asked.only_echo:
            choice["finish_reason"], choice["stop_reason"] = "length", None
            chunk = _without_tokens(chunk)
        if result.logprobs is not None:
            listed: list[TokenLogprob | None] = []
            ids: list[int] = []
            if echo and result.prompt_logprobs is not None:
                listed += result.prompt_logprobs
                ids += self.prompt_ids
            if not self.asked.only_echo:
                listed += result.logprobs
                ids += result.token_ids
            choice["logprobs"] = self._logprobs(listed, ids=ids)
        self._extend(choice, chunk)
        return choice

    def _choice(self, text: str, reason: FinishReason | None) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": text,
            "logprobs": None,
            "finish_reason": _finish(reason),
        }

    def _extend(self, choice: dict[str, Any], chunk: StreamChunk) -> None:
        if self.asked.return_token_ids:
            choice["token_ids"] = chunk.token_ids
            if not self._began:
                choice["prompt_token_ids"] = self.prompt_ids
        if self.asked.return_pieces:
            choice["pieces"] = _pieces(chunk)
        self._began = True

    def _prompt_text(self) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(self.prompt_ids)

    def _logprobs(
        self, listed: Sequence[TokenLogprob | None], *, ids: Sequence[int] | None = None
    ) -> dict[str, Any]:
        names = _Names(self.tokenizer)
        shown = ids if ids is not None else [one.id for one in listed if one is not None]
        tops: list[dict[str, float] | None] = []
        for one in listed:
            top = {} if one is None else {names.text(i): _logprob(p) for i, p in one.top}
            tops.append(None if one is None else top)
        offsets = []
        for token_id in shown:
            offsets.append(self._offset)
            if self._detokenizer is not None:
                self._offset += len(self._detokenizer.push(token_id))
        return {
            "tokens": [names.text(token_id) for token_id in shown],
            "token_logprobs": [None if one is None else _logprob(one.logprob) for one in listed],
            "top_logprobs": tops if self.asked.params.logprobs else None,
            "text_offset": offsets,
        }


@dataclass(kw_only=True)
class ChatAnswer:
    """One answer of a chat, as its client sees it grow.

    Args:
        index: of the choice.
        asked: the request.
        prompt_ids: what it answers.
        tokenizer: of the model, or None.
        parser: of this answer.
    """

    index: int
    asked: Asked
    prompt_ids: list[int]
    tokenizer: Tokenizer | None
    parser: ChatParser
    result: GenerationResult | None = None
    num_tokens: int = 0
    _num_calls: int = 0
    _began: bool = False

    def begin(self) -> list[dict[str, Any]]:
        """Choices of the chunks before the first token: whose turn it is."""
        return [self._choice({"role": "assistant", "content": ""}, None)]

    def add(self, chunk: StreamChunk) -> list[dict[str, Any]]:
        """Choices of the chunks that a step's tokens make."""
        self.num_tokens += len(chunk.token_ids)
        self.result = chunk.result
        events = self.parser.feed(chunk.text)
        if chunk.result is not None:
            events += self.parser.flush()
        deltas = self._deltas(events)
        tells = chunk.token_ids and (
            chunk.logprobs is not None or self.asked.return_token_ids or self.asked.return_pieces
        )
        ended = _ended(chunk)
        if not deltas and (tells or ended is not None):
            deltas.append({})
        choices = [self._choice(delta, None) for delta in deltas]
        if not choices:
            return []
        if chunk.logprobs is not None:
            choices[0]["logprobs"] = self._logprobs(chunk.logprobs)
        self._extend(choices[0], chunk)
        if ended is not None:
            choices[-1]["finish_reason"] = self._reason(ended)
            choices[-1]["stop_reason"] = ended.stop_reason
        return choices

    def whole(self, chunk: StreamChunk) -> dict[str, Any]:
        """The choice of an answer that is over; `chunk` is all of it."""
        result = self.result = chunk.result
        assert result is not None
        self.num_tokens = len(result.token_ids)
        content, reasoning = "", ""
        calls: list[dict[str, Any]] = []
        events = self.parser.feed(result.text) + self.parser.flush()
        for delta in self._deltas(events):
            content += delta.get("content", "")
            reasoning += delta.get("reasoning_content", "")
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    calls.append({key: part[key] for key in ("id", "type")})
                    calls[-1]["function"] = dict(part["function"])
                else:
                    calls[-1]["function"]["arguments"] += part["function"]["arguments"]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": self.index,
            "message": message,
            "logprobs": None if result.logprobs is None else self._logprobs(result.logprobs),
            "finish_reason": self._reason(result),
            "stop_reason": result.stop_reason,
        }
        self._extend(choice, chunk)
        return choice

    def _reason(self, result: GenerationResult) -> str:
        called = self._num_calls and result.finish_reason is FinishReason.STOP
        return "tool_calls" if called else str(result.finish_reason)

    def _choice(self, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _extend(self, choice: dict[str, Any], chunk: StreamChunk) -> None:
        if self.asked.return_token_ids:
            choice["token_ids"] = chunk.token_ids
            if not self._began:
                choice["prompt_token_ids"] = self.prompt_ids
        if self.asked.return_pieces:
            choice["pieces"] = _pieces(chunk)
        self._began = True

    def _deltas(self, events: Iterable[ChatEvent]) -> list[dict[str, Any]]:
        """Events as deltas, those of one kind in a row as one."""
        deltas: list[dict[str, Any]] = []
        for event in events:
            match event:
                case ReasoningDelta(text):
                    _append(deltas, "reasoning_content", text)
                case ContentDelta(text):
                    _append(deltas, "content", text)
                case MarkupError(_, text) if text:
                    # Said nowhere else, and nothing of an answer is kept from its reader.
                    _append(deltas, "content", text)
                case ToolCallBegin(index, name) if not (self.asked.one_call and index):
                    self._num_calls += 1
                    function = {"name": name, "arguments": ""}
                    call = {
                        "index": index,
                        "id": f"call_{uuid4().hex[:24]}",
                        "type": "function",
                        "function": function,
                    }
                    deltas.append({"tool_calls": [call]})
                case ToolCallDelta(index, arguments) if not (self.asked.one_call and index):
                    last = deltas[-1].get("tool_calls") if deltas else None
                    if last and last[0]["index"] == index:
                        last[0]["function"]["arguments"] += arguments
                    else:
                        call = {"index": index, "function": {"arguments": arguments}}
                        deltas.append({"tool_calls": [call]})
        return deltas

    def _logprobs(self, listed: Sequence[TokenLogprob]) -> dict[str, Any]:
        names = _Names(self.tokenizer)

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            return {
                "token": names.text(token_id),
                "logprob": _logprob(logprob),
                "bytes": list(names.data(token_id)) or None,
            }

        content = [
            {**entry(one.id, one.logprob), "top_logprobs": [entry(i, p) for i, p in one.top]}
            for one in listed
        ]
        return {"content": content, "refusal": None}


def _ended(chunk: StreamChunk) -> GenerationResult | None:
    """How an answer ended; None where it goes on or failed, which its client is told otherwise."""
    result = chunk.result
    return None if result is None or result.finish_reason is FinishReason.ERROR else result


def _without_tokens(chunk: StreamChunk) -> StreamChunk:
    return replace(chunk, text="", token_ids=[], origins=[], pieces=[])


def _pieces(chunk: StreamChunk) -> list[dict[str, Any]]:
    return [
        {"text": text, "origin": origin.kind, "position": origin.position}
        for text, origin in chunk.pieces
    ]


def _append(deltas: list[dict[str, Any]], kind: str, text: str) -> None:
    if deltas and kind in deltas[-1]:
        deltas[-1][kind] += text
    else:
        deltas.append({kind: text})
