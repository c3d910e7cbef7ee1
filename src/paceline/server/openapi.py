"""The OpenAPI document of the server: every field it reads, every body it answers with.

It says what a field may be by itself. What depends on another field, on the model or on what the
server was started with is said in words, and answered 400 where it does not fit.
"""

from __future__ import annotations

from typing import Any

from paceline.server.protocol import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    EFFORTS,
    IGNORED,
    MAX_INTEGER,
    NOT_SERVED,
    TOKENIZE_FIELDS,
    Limits,
)
from paceline.types import MAX_LOGPROBS, MAX_NUM_DRAFTS

__all__ = ["document"]

_Schema = dict[str, Any]

_LIMITS = Limits(max_seq_len=1, bytes_per_token=1)


def _number(low: float | None = None, high: float | None = None, **more: Any) -> _Schema:
    return _bounded("number", low, high, more)


def _integer(low: int | None = None, high: int | None = MAX_INTEGER, **more: Any) -> _Schema:
    return _bounded("integer", low, high, more)


def _bounded(kind: str, low: float | None, high: float | None, more: _Schema) -> _Schema:
    schema: _Schema = {"type": kind}
    if low is not None:
        schema["minimum"] = low
    if high is not None:
        schema["maximum"] = high
    return {**schema, **more}


def _list(items: _Schema, least: int = 0, most: int | None = None) -> _Schema:
    schema: _Schema = {"type": "array", "items": items}
    if least:
        schema["minItems"] = least
    if most is not None:
        schema["maxItems"] = most
    return schema


def _any(*schemas: _Schema, **more: Any) -> _Schema:
    return {"anyOf": list(schemas), **more}


def _or_null(schema: _Schema) -> _Schema:
    """A schema that takes null too: a field that is null is not given."""
    if not schema:
        return schema
    note = {"description": schema["description"]} if "description" in schema else {}
    bare = {name: value for name, value in schema.items() if name != "description"}
    return {"anyOf": [bare, {"type": "null"}], **note}


def _object(required: list[str], **properties: _Schema) -> _Schema:
    return {"type": "object", "required": required, "properties": properties}


def _closed(schema: _Schema) -> _Schema:
    """An object that has no other fields."""
    return {**schema, "additionalProperties": False}


def _given(required: list[str], **properties: _Schema) -> _Schema:
    """A part of a request: no other fields, and null for those that are not given."""
    fields = {
        name: schema if name in required else _or_null(schema)
        for name, schema in properties.items()
    }
    return _closed(_object(required, **fields))


def _ref(name: str) -> _Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_STRING: _Schema = {"type": "string"}
_TEXT: _Schema = {"type": "string", "minLength": 1}
_BOOLEAN: _Schema = {"type": "boolean"}
_OBJECT: _Schema = {"type": "object"}
_NULL: _Schema = {"type": "null"}
_ID = _integer(0)
_IDS = _list(_ID)
_PROMPT_IDS = _list(_ID, 1)
_COUNT = _integer(0)
_NAME: _Schema = {"type": "string", "pattern": '^[^"<>\\r\\n]+$'}

_SERVED: dict[str, _Schema] = {
    "add_special_tokens": {
        **_BOOLEAN,
        "description": "Whether texts begin with the begin-of-sequence token; they do by default.",
    },
    "allow_special": {
        **_BOOLEAN,
        "description": "Whether markers spelled in texts count as markers.",
    },
    "allowed_token_ids": _PROMPT_IDS,
    "bad_words": _list(_TEXT, 0, _LIMITS.stops),
    "chat_template_kwargs": _given([], thinking=_BOOLEAN, enable_thinking=_BOOLEAN),
    "choice": _list(_TEXT, 1, _LIMITS.stops),
    "echo": {**_BOOLEAN, "description": "Whether the prompt comes before the answer."},
    "frequency_penalty": _number(-2, 2),
    "grammar": {**_STRING, "description": "A grammar in Lark's or GBNF's notation."},
    "ignore_eos": _BOOLEAN,
    "include_stop_str_in_output": {**_BOOLEAN, "description": "Needs `stop`."},
    "json_object": _BOOLEAN,
    "json_schema": _any(_STRING, _OBJECT),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,18})$"},
        "additionalProperties": _number(-100, 100),
    },
    "max_completion_tokens": _integer(1),
    "max_reasoning_tokens": _COUNT,
    "messages": _list(_ref("Message"), 1, _LIMITS.messages),
    "min_p": _number(0, 1),
    "min_tokens": _integer(0, description="At most `max_tokens`."),
    "model": {**_STRING, "description": "The one that is served, or left out."},
    "n": _integer(1, _LIMITS.answers, description="Several need a temperature above 0."),
    "num_drafts": {
        **_any(_integer(0, MAX_NUM_DRAFTS), {"const": "auto"}),
        "description": "Most drafts a step verifies for this request; 0 is off, and 'auto' as many "
        "as pay. What it may be follows from what the server drafts with.",
    },
    "parallel_tool_calls": {
        **_BOOLEAN,
        "description": "False: only the first of an answer's calls is told.",
    },
    "presence_penalty": _number(-2, 2),
    "prompt": _any(
        _TEXT,
        _PROMPT_IDS,
        _list(_any(_TEXT, _PROMPT_IDS), 1, _LIMITS.prompts),
        description="A text, token ids, or a list of either.",
    ),
    "reasoning_effort": {
        "enum": list(EFFORTS),
        "description": "Which have a text of their own follows from the model.",
    },
    "regex": _STRING,
    "repetition_penalty": _number(1e-6, 1e6),
    "response_format": _any(
        _given(["type"], type={"const": "text"}),
        _given(["type"], type={"const": "json_object"}),
        _given(
            ["type", "json_schema"],
            type={"const": "json_schema"},
            json_schema=_given(
                ["schema"], name={}, description={}, schema=_OBJECT, strict=_BOOLEAN
            ),
        ),
    ),
    "return_pieces": {**_BOOLEAN, "description": "Whether choices have `pieces`."},
    "return_token_ids": {**_BOOLEAN, "description": "Whether choices have `token_ids`."},
    "seed": _integer(-(2**63), 2**64 - 1),
    "stop": _any(_TEXT, _list(_TEXT, 0, _LIMITS.stops)),
    "stop_token_ids": _IDS,
    "stream": _BOOLEAN,
    "stream_options": {
        **_given(
            [], include_usage=_BOOLEAN, continuous_usage_stats=_BOOLEAN, include_obfuscation={}
        ),
        "description": "Needs `stream`, unless it is empty.",
    },
    "temperature": _number(0),
    "thinking": _any(_BOOLEAN, _given(["type"], type={"enum": ["enabled", "disabled"]})),
    "tokens": _list(_ID),
    "tool_choice": _any(
        {"enum": ["none", "auto", "required"]},
        _given(
            ["function"],
            type={"const": "function"},
            function={**_object(["name"], name=_STRING), "additionalProperties": True},
        ),
        description="Needs `tools`, unless it is 'none'.",
    ),
    "tools": _list(_ref("Tool"), 0, _LIMITS.tools),
    "top_k": _integer(-1),
    "top_logprobs": _integer(0, MAX_LOGPROBS, description="Needs `logprobs`."),
    "top_p": _number(None, 1, exclusiveMinimum=0),
}

_WITHOUT_EFFECT: _Schema = {"description": "Taken without effect."}

_REFUSED: dict[str, _Schema] = {
    "best_of": _integer(1, description="As `n`, or not at all."),
    "suffix": {"enum": [""], "description": "Empty, or not at all."},
    "modalities": {"const": ["text"], "description": "Text only."},
}
"""What may be said of what is not served; of what is not here, nothing."""


def _body(fields: frozenset[str], required: list[str], **own: _Schema) -> _Schema:
    """What a route takes, of its fields; `own` are those that differ from another's."""
    properties: dict[str, _Schema] = {}
    for name in sorted(fields | IGNORED | NOT_SERVED):
        if name in IGNORED:
            properties[name] = _WITHOUT_EFFECT
        elif name in NOT_SERVED:
            properties[name] = _or_null(_REFUSED[name]) if name in _REFUSED else _NULL
        else:
            schema = own[name] if name in own else _SERVED[name]
            properties[name] = schema if name in required else _or_null(schema)
    return _closed(_object(required, **properties))


def _requests() -> dict[str, _Schema]:
    text_part = _object(["type", "text"], type={"const": "text"}, text=_STRING)
    call = _object(
        ["function"],
        id=_any(_STRING, _NULL),
        function=_object(["name"], name=_NAME, arguments=_any(_STRING, _OBJECT, _NULL)),
    )
    function = {
        **_object(
            ["name"],
            name=_NAME,
            parameters=_or_null(_OBJECT),
            strict=_or_null(_BOOLEAN),
        ),
        "description": "All of it is said to the model.",
    }
    message = _object(
        ["role"],
        role={
            "enum": ["system", "developer", "user", "assistant", "tool", "latest_reminder"],
            "description": "A developer's message is taken as the system's.",
        },
        content=_any(_STRING, _list(text_part), _NULL),
        tool_calls=_any(_list(call), _NULL),
        tool_call_id=_any(_STRING, _NULL),
        reasoning=_any(_STRING, _NULL),
        reasoning_content=_any(_STRING, _NULL),
        prefix=_or_null(_BOOLEAN),
        task=_any(_STRING, _NULL),
        tools=_any(_list(_ref("Tool")), _NULL),
        response_format=_any(_OBJECT, _NULL),
        name=_WITHOUT_EFFECT,
        mask=_WITHOUT_EFFECT,
    )
    # What other clients send of fields that are not given.
    message["additionalProperties"] = {"enum": [None, [], ""]}
    message["description"] = "Which fields it has follows from its role."
    return {
        "Message": message,
        "Tool": _given(["function"], type={"const": "function"}, function=function),
        "CompletionRequest": _body(
            COMPLETION_FIELDS,
            ["prompt"],
            max_tokens=_integer(0, description="16 by default; 0 needs `echo`."),
            logprobs=_integer(0, MAX_LOGPROBS),
        ),
        "ChatRequest": _body(
            CHAT_FIELDS,
            ["messages"],
            max_tokens=_integer(1),
            logprobs=_BOOLEAN,
        ),
        "TokenizeRequest": _body(TOKENIZE_FIELDS, ["prompt"], prompt=_TEXT),
        "DetokenizeRequest": _body(DETOKENIZE_FIELDS, ["tokens"]),
    }


def _replies() -> dict[str, _Schema]:
    finish = {"enum": ["stop", "length", "tool_calls", "abort", "error"]}
    maybe_finish = _any(finish, _NULL)
    stop_reason = _any(
        _STRING, _ID, _NULL, description="The stop string or id that ended it, or null."
    )
    told = {
        "token_ids": {**_IDS, "description": "Where `return_token_ids` is set."},
        "prompt_token_ids": {**_IDS, "description": "In the first chunk of an answer."},
        "pieces": {
            **_list(_ref("Piece")),
            "description": "One per token, where `return_pieces` is set.",
        },
    }
    head: dict[str, _Schema] = {"id": _STRING, "created": _COUNT, "model": _STRING}
    heads = [*head, "object", "choices"]
    usage = _ref("Usage")
    metrics = {
        **_ref("Metrics"),
        "description": "Of one answer that may draft; in a stream in the chunk with the usage, or "
        "in the last with a choice where none is asked for.",
    }
    part_usage = _any(_ref("Usage"), _ref("UsageSoFar"), _NULL)

    def answer(kind: str, choice: str, *, streams: bool) -> _Schema:
        required = heads if streams else [*heads, "usage"]
        return _object(
            required,
            **head,
            object={"const": kind},
            choices=_list(_ref(choice)),
            usage=part_usage if streams else usage,
            metrics=metrics,
        )

    entry = {
        "token": _STRING,
        "logprob": _number(),
        "bytes": _any(_list(_integer(0, 255)), _NULL),
    }
    call_parts = {"name": _STRING, "arguments": _STRING}
    return {
        "Error": _object(
            ["error"],
            error=_object(
                ["message", "type", "param", "code"],
                message=_STRING,
                type={"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                param=_any(_STRING, _NULL),
                code=_any(_STRING, _NULL),
            ),
        ),
        "Completion": answer("text_completion", "CompletionChoice", streams=False),
        "CompletionChunk": answer("text_completion", "CompletionChoice", streams=True),
        "CompletionChoice": _object(
            ["index", "text", "logprobs", "finish_reason"],
            index=_COUNT,
            text=_STRING,
            logprobs=_any(_ref("CompletionLogprobs"), _NULL),
            finish_reason=maybe_finish,
            stop_reason=stop_reason,
            **told,
        ),
        "CompletionLogprobs": _object(
            ["tokens", "token_logprobs", "top_logprobs", "text_offset"],
            tokens=_list(_STRING),
            token_logprobs=_list(_any(_number(), _NULL)),
            top_logprobs=_any(
                _list(_any({"type": "object", "additionalProperties": _number()}, _NULL)), _NULL
            ),
            text_offset=_IDS,
        ),
        "Chat": answer("chat.completion", "ChatChoice", streams=False),
        "ChatChunk": answer("chat.completion.chunk", "ChatChunkChoice", streams=True),
        "ChatChoice": _object(
            ["index", "message", "logprobs", "finish_reason"],
            index=_COUNT,
            message=_object(
                ["role", "content", "refusal"],
                role={"const": "assistant"},
                content=_any(_STRING, _NULL),
                refusal=_NULL,
                reasoning_content=_STRING,
                tool_calls=_list(
                    _object(
                        ["id", "type", "function"],
                        id=_STRING,
                        type={"const": "function"},
                        function=_object(["name", "arguments"], **call_parts),
                    ),
                    1,
                ),
            ),
            logprobs=_any(_ref("ChatLogprobs"), _NULL),
            finish_reason=finish,
            stop_reason=stop_reason,
            **told,
        ),
        "ChatChunkChoice": _object(
            ["index", "delta", "logprobs", "finish_reason"],
            index=_COUNT,
            delta=_object(
                [],
                role={"const": "assistant"},
                content=_STRING,
                reasoning_content=_STRING,
                tool_calls=_list(
                    _object(
                        ["index", "function"],
                        index=_COUNT,
                        id=_STRING,
                        type={"const": "function"},
                        function=_object(["arguments"], **call_parts),
                    ),
                    1,
                ),
            ),
            logprobs=_any(_ref("ChatLogprobs"), _NULL),
            finish_reason=maybe_finish,
            stop_reason=stop_reason,
            **told,
        ),
        "ChatLogprobs": _object(
            ["content", "refusal"],
            content=_list(
                _object(
                    [*entry, "top_logprobs"],
                    **entry,
                    top_logprobs=_list(_object(list(entry), **entry)),
                )
            ),
            refusal=_NULL,
        ),
        "Piece": {
            **_object(
                ["text", "origin", "position"],
                text=_STRING,
                origin={"enum": ["accepted", "corrected", "bonus", "target", "forced"]},
                position=_any(
                    _integer(1, MAX_NUM_DRAFTS),
                    _NULL,
                    description="Its place in the draft, from 1, of a token that was drafted.",
                ),
            ),
            "description": "A token's text, empty where it has none or ends within a character "
            "that comes with a later token, and how it came: an accepted draft, the model's own in "
            "place of a refused one, its own behind drafts that were all accepted, its own where "
            "none was verified, or the only one that the grammar allowed.",
        },
        "Usage": _object(
            [
                "prompt_tokens",
                "completion_tokens",
                "total_tokens",
                "prompt_tokens_details",
                "speculation",
            ],
            prompt_tokens=_COUNT,
            completion_tokens=_COUNT,
            total_tokens=_COUNT,
            prompt_tokens_details=_object(["cached_tokens"], cached_tokens=_COUNT),
            speculation={
                **_object(
                    [
                        "drafted",
                        "accepted",
                        "mean_acceptance_length",
                        "drafted_at",
                        "reached_at",
                        "accepted_at",
                    ],
                    drafted=_COUNT,
                    accepted=_COUNT,
                    mean_acceptance_length=_number(1, MAX_NUM_DRAFTS + 1),
                    drafted_at=_list(_COUNT, 0, MAX_NUM_DRAFTS),
                    reached_at=_list(_COUNT, 0, MAX_NUM_DRAFTS),
                    accepted_at=_list(_COUNT, 0, MAX_NUM_DRAFTS),
                ),
                "description": "Drafts verified and accepted, and the tokens a step with drafts "
                "yielded, of all answers together; by place in the draft those verified, those "
                "with all before them accepted, and those accepted.",
            },
        ),
        "UsageSoFar": _object(
            ["prompt_tokens", "completion_tokens", "total_tokens"],
            prompt_tokens=_COUNT,
            completion_tokens=_COUNT,
            total_tokens=_COUNT,
        ),
        "Metrics": _object(
            ["speculative_decoding"],
            speculative_decoding=_object(
                [
                    "mean_acceptance_length",
                    "draft_acceptance_rate",
                    "acceptance_histogram",
                    "num_spec_steps",
                    "num_accepted_draft_tokens",
                    "num_draft_tokens",
                    "num_spec_tokens",
                ],
                mean_acceptance_length=_number(1, MAX_NUM_DRAFTS + 1),
                draft_acceptance_rate=_number(0, 1),
                acceptance_histogram={
                    **_list(_COUNT),
                    "description": "Steps with drafts, by how many of them were accepted.",
                },
                num_spec_steps=_COUNT,
                num_accepted_draft_tokens=_COUNT,
                num_draft_tokens=_COUNT,
                num_spec_tokens=_integer(0, MAX_NUM_DRAFTS),
            ),
        ),
        "Model": _object(
            ["id", "object", "created", "owned_by", "max_model_len"],
            id=_STRING,
            object={"const": "model"},
            created=_COUNT,
            owned_by=_STRING,
            max_model_len=_COUNT,
        ),
        "Models": _object(["object", "data"], object={"const": "list"}, data=_list(_ref("Model"))),
        "Tokens": _object(
            ["tokens", "count", "max_model_len"], tokens=_IDS, count=_COUNT, max_model_len=_COUNT
        ),
        "Text": _object(["prompt"], prompt=_STRING),
        "Health": _object(["status"], status={"const": "ok"}),
        "Trouble": _object(["status", "reason"], status={"const": "error"}, reason=_STRING),
    }


_CONTENT = "application/json"
_MEANINGS = {
    400: "A field, or two together, cannot be served; the error says which.",
    401: "The key is missing or wrong.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    429: "The queue is full; `Retry-After` says when to come again.",
    500: "The server is at fault.",
    503: "The engine is dead, the server shuts down, or too many connections are open.",
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
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Asked for where the server was started with a key.",
                }
            },
            "schemas": {**_requests(), **_replies()},
        },
        # A key is asked for or it is not.
        "security": [{"key": []}, {}],
        "paths": {
            "/v1/completions": _post(
                "Complete a prompt.", "CompletionRequest", "Completion", streams="CompletionChunk"
            ),
            "/v1/chat/completions": _post(
                "Answer a conversation.", "ChatRequest", "Chat", streams="ChatChunk"
            ),
            "/tokenize": _post("Ids of a text.", "TokenizeRequest", "Tokens"),
            "/detokenize": _post("Text of ids.", "DetokenizeRequest", "Text"),
            "/v1/models": _get("The model that is served.", _ref("Models"), 401),
            "/v1/models/{model}": {
                **_get("The model that is served, by its name.", _ref("Model"), 401, 404),
                "parameters": [
                    {"name": "model", "in": "path", "required": True, "schema": _STRING}
                ],
            },
            "/metrics": _get(
                "Metrics in Prometheus' text format.", _STRING, 401, 404, kind="text/plain"
            ),
            "/health": _health(),
            "/openapi.json": _open(_get("This document.", _OBJECT)),
        },
    }


def _errors(*statuses: int) -> dict[str, Any]:
    content = {_CONTENT: {"schema": _ref("Error")}}
    answers: dict[str, Any] = {}
    for status in statuses:
        answers[str(status)] = {"description": _MEANINGS[status], "content": content}
        if status == 429:
            wait = {"required": True, "description": "Seconds.", "schema": _integer(1, 60)}
            answers["429"]["headers"] = {"Retry-After": wait}
    return answers


def _post(summary: str, takes: str, gives: str, *, streams: str | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {_CONTENT: {"schema": _ref(gives)}}
    overload = (429,) if streams else ()
    if streams:
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": f"Where `stream` is set: server-sent events whose data is a "
                f"{streams}, or an Error and then no more choices of that answer; the last event's "
                "data is `[DONE]`.",
                "x-event": _any(_ref(streams), _ref("Error")),
            }
        }
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {_CONTENT: {"schema": _ref(takes)}}},
            "responses": {
                "200": {"description": "The answer.", "content": content},
                **_errors(400, 401, 404, 408, 413, 415, *overload, 500, 503),
            },
        }
    }


def _get(summary: str, gives: _Schema, *statuses: int, kind: str = _CONTENT) -> dict[str, Any]:
    return {
        "get": {
            "summary": summary,
            "responses": {
                "200": {"description": "What is asked for.", "content": {kind: {"schema": gives}}},
                **_errors(*statuses, 500, 503),
            },
        }
    }


def _open(path: dict[str, Any]) -> dict[str, Any]:
    """A path that no key is asked for."""
    path["get"]["security"] = []
    return path


def _health() -> dict[str, Any]:
    path = _open(_get("Whether the engine can answer.", _ref("Health")))
    path["get"]["responses"]["503"] = {
        "description": "The engine is stuck or dead, or too many connections are open.",
        "content": {_CONTENT: {"schema": _any(_ref("Trouble"), _ref("Error"))}},
    }
    return path
