"""The OpenAPI document of the server, made from the fields that it reads."""

from __future__ import annotations

from typing import Any

from paceline.server.protocol import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    IGNORED,
    TOKENIZE_FIELDS,
)
from paceline.types import MAX_LOGPROBS, MAX_NUM_DRAFTS

__all__ = ["document"]

_STRING = {"type": "string"}
_BOOLEAN = {"type": "boolean"}
_OBJECT = {"type": "object"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXTS = {"type": "array", "items": {"type": "string", "minLength": 1}}


def _number(low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return _bounded("number", low, high)


def _integer(low: int | None = None, high: int | None = None) -> dict[str, Any]:
    return _bounded("integer", low, high)


def _bounded(kind: str, low: float | None, high: float | None) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": kind}
    if low is not None:
        schema["minimum"] = low
    if high is not None:
        schema["maximum"] = high
    return schema


_SCHEMAS: dict[str, dict[str, Any]] = {
    "add_special_tokens": _BOOLEAN,
    "allow_special": _BOOLEAN,
    "allowed_token_ids": _IDS,
    "bad_words": _TEXTS,
    "chat_template_kwargs": _OBJECT,
    "choice": _TEXTS,
    "echo": _BOOLEAN,
    "frequency_penalty": _number(-2, 2),
    "grammar": _STRING,
    "ignore_eos": _BOOLEAN,
    "include_stop_str_in_output": _BOOLEAN,
    "json_object": _BOOLEAN,
    "json_schema": {"anyOf": [_STRING, _OBJECT]},
    "logit_bias": {"type": "object", "additionalProperties": _number(-100, 100)},
    "logprobs": {"anyOf": [_BOOLEAN, _integer(0, MAX_LOGPROBS)]},
    "max_completion_tokens": _integer(1),
    "max_reasoning_tokens": _integer(0),
    "max_tokens": _integer(0),
    "messages": {"type": "array", "items": _OBJECT, "minItems": 1},
    "min_p": _number(0, 1),
    "min_tokens": _integer(0),
    "model": _STRING,
    "n": _integer(1),
    "num_drafts": {"anyOf": [_integer(0, MAX_NUM_DRAFTS), {"const": "auto"}]},
    "parallel_tool_calls": _BOOLEAN,
    "presence_penalty": _number(-2, 2),
    "prompt": {"anyOf": [_STRING, _IDS, _TEXTS, {"type": "array", "items": _IDS}]},
    "reasoning_effort": _STRING,
    "regex": _STRING,
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "response_format": _OBJECT,
    "return_pieces": _BOOLEAN,
    "return_token_ids": _BOOLEAN,
    "seed": _integer(),
    "stop": {"anyOf": [_STRING, _TEXTS]},
    "stop_token_ids": _IDS,
    "stream": _BOOLEAN,
    "stream_options": _OBJECT,
    "temperature": _number(0),
    "thinking": {"anyOf": [_BOOLEAN, _OBJECT]},
    "tokens": _IDS,
    "tool_choice": {"anyOf": [_STRING, _OBJECT]},
    "tools": {"type": "array", "items": _OBJECT},
    "top_k": _integer(-1),
    "top_logprobs": _integer(0, MAX_LOGPROBS),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
}


def document() -> dict[str, Any]:
    """Return the document, as JSON values."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Paceline",
            "version": "1",
            "description": "OpenAI's completions and chats, with speculative decoding in view.",
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "Error": {
                    "type": "object",
                    "required": ["error"],
                    "properties": {
                        "error": {
                            "type": "object",
                            "required": ["message", "type", "param", "code"],
                            "properties": {
                                "message": _STRING,
                                "type": _STRING,
                                "param": {"type": ["string", "null"]},
                                "code": {"type": ["string", "null"]},
                            },
                        }
                    },
                }
            },
        },
        "security": [{"key": []}],
        "paths": {
            "/v1/completions": _post(
                "Complete a prompt.", COMPLETION_FIELDS | IGNORED, ["prompt"], streams=True
            ),
            "/v1/chat/completions": _post(
                "Answer a conversation.", CHAT_FIELDS | IGNORED, ["messages"], streams=True
            ),
            "/tokenize": _post("Ids of a text.", TOKENIZE_FIELDS, ["prompt"]),
            "/detokenize": _post("Text of ids.", DETOKENIZE_FIELDS, ["tokens"]),
            "/v1/models": _get("The model that is served."),
            "/v1/models/{model}": {
                **_get("The model that is served, by its name."),
                "parameters": [
                    {"name": "model", "in": "path", "required": True, "schema": _STRING}
                ],
            },
            "/metrics": _get("Metrics in Prometheus' text format.", kind="text/plain"),
            "/health": _get("Whether the engine can answer.", is_open=True, unhealthy=True),
            "/openapi.json": _get("This document.", is_open=True),
        },
    }


def _errors(*statuses: int) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        str(status): {"description": "See the error's message.", "content": content}
        for status in statuses
    }


def _post(
    summary: str, fields: frozenset[str], required: list[str], *, streams: bool = False
) -> dict[str, Any]:
    # What is taken without effect has no form of its own.
    properties = {
        name: _nullable(_SCHEMAS.get(name, {}), name in required) for name in sorted(fields)
    }
    schema = {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": False,
    }
    content: dict[str, Any] = {"application/json": {"schema": _OBJECT}}
    if streams:
        content["text/event-stream"] = {"schema": _STRING}
    statuses = (400, 401, 404, 408, 413, 415) + ((429, 500, 503) if streams else ())
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": {
                "200": {"description": "The answer.", "content": content},
                **_errors(*statuses),
            },
        }
    }


def _nullable(schema: dict[str, Any], is_required: bool) -> dict[str, Any]:
    return schema if is_required or not schema else {"anyOf": [schema, {"type": "null"}]}


def _get(
    summary: str,
    *,
    kind: str = "application/json",
    is_open: bool = False,
    unhealthy: bool = False,
) -> dict[str, Any]:
    schema = _STRING if kind == "text/plain" else _OBJECT
    responses: dict[str, Any] = {
        "200": {"description": "What is asked for.", "content": {kind: {"schema": schema}}}
    }
    if unhealthy:
        responses["503"] = {
            "description": "The engine is stuck or dead.",
            "content": {"application/json": {"schema": _OBJECT}},
        }
    if not is_open:
        responses.update(_errors(401, 404))
    got: dict[str, Any] = {"summary": summary, "responses": responses}
    if is_open:
        got["security"] = []
    return {"get": got}
