"""The server under bodies that are made from its own OpenAPI document, right ones and wrong ones.

Whatever comes, no answer is a 5xx, each is described in the document, and a refusal has OpenAI's
shape. The document is tested by it as much as the server: what it allows must be taken, and what
it forbids refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_kit import NAME, Live, running

pytest.importorskip("schemathesis")

import jsonschema_rs
import requests
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from paceline import LLM
from paceline.server.openapi import document
from paceline.server.protocol import CHAT_FIELDS, COMPLETION_FIELDS, IGNORED, NOT_SERVED

load_all_checks()

P, C = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
FUZZED = settings(
    max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def strict(schema: Any) -> Any:
    """A document whose replies have no fields but those it tells of."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: strict(one) for name, one in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


DOCUMENT = document()
REQUESTS = {"Message", "Tool", "CompletionRequest", "ChatRequest", "TokenizeRequest"}
CLOSED: Any = {
    **DOCUMENT,
    # The server here asks for no key.
    "security": [],
    "components": {
        **DOCUMENT["components"],
        "schemas": {
            name: one if name in REQUESTS else strict(one)
            for name, one in DOCUMENT["components"]["schemas"].items()
        },
    },
}
API = schemathesis.openapi.from_dict(CLOSED)


def validator(name: str) -> Any:
    """Of what the document has under a name."""
    return jsonschema_rs.validator_for(
        {"$ref": f"#/components/schemas/{name}", "components": CLOSED["components"]}
    )


ERROR = validator("Error")
EVENTS = {P: validator("CompletionChunk"), C: validator("ChatChunk")}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    # Few places, so that a body which asks for much is answered soon.
    with (
        LLM(max_seq_len=64, max_num_seqs=4, num_threads=1) as llm,
        running(llm, max_waiting=8, grammar_seconds=5.0) as live,
    ):
        yield live
        live.wait_idle()


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with requests.Session() as session:
        yield session


def check_events(path: str, text: str) -> None:
    """A stream is what the document says of its events."""
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert event.startswith("data: ")
        told = json.loads(event.removeprefix("data: "))
        (ERROR if "error" in told else EVENTS[path]).validate(told)


def send(live: Live, session: Any, case: Any, *, leave: tuple[str, ...] = ()) -> Any:
    """Send a case and look at the answer with all of the tool's checks but some."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = NAME
    answer = case.call(base_url=live.url, session=session, timeout=60)
    case.validate_response(answer, excluded_checks=CHECKS.get_by_names(list(leave)))
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        ERROR.validate(answer.json())
        assert len(answer.text) < 2000
    if answer.headers["content-type"][0].startswith("text/event-stream"):
        check_events(case.path, answer.text)
    return answer


@pytest.mark.parametrize("path", [P, C, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("mode", list(GenerationMode))
@FUZZED
@given(data=st.data())
def test_bodies_by_the_document(
    live: Live, session: Any, path: str, mode: GenerationMode, data: st.DataObject
) -> None:
    case = data.draw(API[path]["POST"].as_strategy(generation_mode=mode))
    # That two fields fit together is not said in the document's schemas.
    send(live, session, case, leave=("positive_data_acceptance",))


START: dict[str, dict[str, Any]] = {P: {"prompt": "a"}, C: {"messages": HI}}
# What a field needs beside it.
BESIDE: dict[str, dict[str, Any]] = {
    "include_stop_str_in_output": {"stop": "x"},
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "f"}}]},
}
# Of these the schemas do not say all: what the model or a grammar makes of them is not in them.
BEYOND_SCHEMAS = {
    "allowed_token_ids",
    "best_of",
    "grammar",
    "json_schema",
    "logit_bias",
    "max_tokens",
    "messages",
    "min_tokens",
    "model",
    "prompt",
    "reasoning_effort",
    "regex",
    "response_format",
    "stop_token_ids",
    "tool_choice",
    "tools",
}
NAMED = {P: "CompletionRequest", C: "ChatRequest"}
BODIES = {
    path: DOCUMENT["components"]["schemas"][name]["properties"] for path, name in NAMED.items()
}
FIELDS = [
    *((P, field) for field in BODIES[P]),
    *((C, field) for field, schema in BODIES[C].items() if schema != BODIES[P].get(field)),
]


def bodies_of(path: str, field: str) -> Any:
    """Values of one field, by the document."""
    schema = BODIES[path][field]
    body = {"type": "object", "required": [field], "properties": {field: schema}}
    alone = {
        "openapi": "3.1.0",
        "info": {"title": "one field", "version": "1"},
        "components": DOCUMENT["components"],
        "paths": {
            path: {
                "post": {
                    "requestBody": {
                        "required": True,
                        "content": {"application/json": {"schema": body}},
                    },
                    "responses": {"200": {"description": "x"}},
                }
            }
        },
    }
    operation = schemathesis.openapi.from_dict(alone)[path]["POST"]
    return operation.as_strategy().map(lambda case: {field: case.body[field]})


@pytest.mark.parametrize(("path", "field"), FIELDS)
@settings(FUZZED, max_examples=3)
@given(data=st.data())
def test_a_field_by_the_document_is_taken(
    live: Live, session: Any, path: str, field: str, data: st.DataObject
) -> None:
    chosen = data.draw(bodies_of(path, field))
    body = {"max_tokens": 2, **START[path], **BESIDE.get(field, {}), **chosen}
    if field in ("max_completion_tokens", "min_tokens"):
        del body["max_tokens"]
    answer = session.post(live.url + path, json=body, timeout=60)
    if field in BEYOND_SCHEMAS:
        assert answer.status_code in (200, 400, 404), answer.text
    elif answer.status_code != 200:
        # As many answers as may run and wait here are fewer than any server might have.
        assert field == "n", (body, answer.text)
        assert chosen["n"] > live.engine.max_answers


def edges() -> Iterator[tuple[str, str, float, bool]]:
    """Numbers at the ends of what a field may be, and right beyond them."""
    for path, field in FIELDS:
        for schema in (BODIES[path][field], *BODIES[path][field].get("anyOf", ())):
            step = 1 if schema.get("type") == "integer" else 1e-7
            for end, outwards in (("minimum", -step), ("maximum", step)):
                # As many answers as may run and wait here are fewer, and no answer is that long.
                beyond = {("n", "maximum"), ("min_tokens", "maximum"), ("best_of", "maximum")}
                if end in schema and (field, end) not in beyond:
                    yield path, field, schema[end], True
                    yield path, field, schema[end] + outwards, False


@pytest.mark.parametrize(("path", "field", "value", "is_allowed"), edges())
def test_a_number_is_taken_up_to_its_ends(
    live: Live, session: Any, path: str, field: str, value: float, is_allowed: bool
) -> None:
    # Without a number of tokens to compare with.
    start = {} if field == "min_tokens" else {"max_tokens": 2, "echo": True}
    if path == C or field == "logprobs":
        start.pop("echo", None)
    if field == "max_completion_tokens":
        start = {"ignore_eos": False}
    beside = BESIDE.get(field, {})
    body = {**start, **START[path], **beside, field: value}
    answer = session.post(live.url + path, json=body, timeout=60)
    if is_allowed:
        assert answer.status_code == 200, answer.text
    else:
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field


def test_the_document_has_every_field_that_is_read_and_no_other() -> None:
    known = {P: COMPLETION_FIELDS, C: CHAT_FIELDS}
    for path, properties in BODIES.items():
        assert properties.keys() == known[path] | IGNORED | NOT_SERVED


FORM = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"enum": ["a", 1]}}}
TOLD = {"return_pieces": True, "return_token_ids": True}
CALLED: dict[str, Any] = {"tools": BESIDE["tool_choice"]["tools"], "tool_choice": "required"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "more"),
    [
        (P, {}),
        (P, {**TOLD, "logprobs": 3, "n": 2}),
        (P, {"logprobs": 0, "stop": ["e", "\n"]}),
        (P, {"echo": True, "num_drafts": 0}),
        (P, {"prompt": ["a", [5, 6]], "num_drafts": "auto"}),
        (C, {}),
        (C, {**TOLD, "logprobs": True, "top_logprobs": 2, "n": 2}),
        (C, {**TOLD, "thinking": True, "max_reasoning_tokens": 2}),
        (C, {**TOLD, **CALLED, "max_tokens": 40}),
        (C, {**TOLD, "response_format": FORM, "num_drafts": 2, "max_tokens": 8}),
    ],
)
@pytest.mark.parametrize("usage", [None, "last", "always"])
def test_answers_are_as_described(
    live: Live, session: Any, path: str, more: dict[str, Any], stream: bool, usage: str | None
) -> None:
    body = {"max_tokens": 6, **START[path], **more}
    if stream:
        options = {"include_usage": usage is not None, "continuous_usage_stats": usage == "always"}
        body |= {"stream": True, "stream_options": options}
    elif usage is not None:
        return
    validator(NAMED[path]).validate(body)
    answer = session.post(live.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if stream:
        check_events(path, answer.text)
    else:
        {P: validator("Completion"), C: validator("Chat")}[path].validate(answer.json())


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{model}", "/health", "/metrics"])
@settings(FUZZED, max_examples=10)
@given(data=st.data())
def test_what_is_looked_at_is_as_described(
    live: Live, session: Any, path: str, data: st.DataObject
) -> None:
    case = data.draw(API[path]["GET"].as_strategy())
    if "model" in case.path_parameters and data.draw(st.booleans()):
        case.path_parameters["model"] = NAME
    send(live, session, case, leave=("positive_data_acceptance",))
