"""What the server refuses, how it says so, and that it does not slow down by it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_kit import NAME, Live, running, until

from paceline import LLM
from paceline.sampling.grammar import Grammar, GrammarSpec
from paceline.sampling.grammar_compiler import GrammarCompiler
from paceline.server import http as sockets
from paceline.server.protocol import CHAT_FIELDS, COMPLETION_FIELDS, IGNORED

KEY = "key-äöü-1"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with (
        LLM(max_seq_len=512, num_threads=1) as llm,
        running(llm, grammar_seconds=3.0, body_seconds=0.5) as live,
    ):
        yield live


@pytest.fixture(scope="module")
def locked(live: Live) -> Iterator[Live]:
    with (
        LLM(max_seq_len=256, num_drafts=0, num_threads=1) as llm,
        running(llm, api_keys=("other", KEY), cors_origins=("https://a.example",)) as locked,
    ):
        yield locked


def post(live: Live, body: Any, path: str = "/v1/completions", **more: Any) -> httpx.Response:
    if isinstance(body, (bytes, str)):
        headers = {"content-type": "application/json"}
        return httpx.post(live.url + path, content=body, headers=headers, timeout=20, **more)
    return httpx.post(live.url + path, json=body, timeout=20, **more)


def check_error(answer: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text[:300]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert len(error["message"]) < 1000
    return error


P = "/v1/completions"
C = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
OTHER = {"type": "function", "function": {"name": "g"}}
OBJECT = {"type": "json_object"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (P, {}, "prompt"),
        (P, {"prompt": ""}, "prompt"),
        (P, {"prompt": []}, "prompt"),
        (P, {"prompt": [[]]}, "prompt"),
        (P, {"prompt": ["a", 1]}, "prompt"),
        (P, {"prompt": [True]}, "prompt"),
        (P, {"prompt": [10**30]}, "prompt"),
        (P, {"prompt": [-1]}, "prompt"),
        (P, {"prompt": ["a"] * 129}, "prompt"),
        (P, {"prompt": "\ud800"}, "prompt"),
        (P, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (P, {"prompt": "a", "max_tokens": "4"}, "max_tokens"),
        (P, {"prompt": "a", "max_tokens": 10**40}, "max_tokens"),
        (P, {"prompt": "a", "temperature": -1}, "temperature"),
        (P, {"prompt": "a", "temperature": 10**400}, "temperature"),
        (P, {"prompt": "a", "top_p": 0}, "top_p"),
        (P, {"prompt": "a", "n": 0}, "n"),
        (P, {"prompt": "a", "n": 10**9}, "n"),
        (P, {"prompt": "a", "n": 100}, "n"),
        (P, {"prompt": "a", "n": 2, "temperature": 0}, "n"),
        (P, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (P, {"prompt": "a", "logprobs": True}, "logprobs"),
        (P, {"prompt": "a", "num_drafts": 9}, "num_drafts"),
        (P, {"prompt": "a", "num_drafts": "many"}, "num_drafts"),
        (P, {"prompt": "a", "seed": 2**64}, "seed"),
        (P, {"prompt": "a", "stop": ["x"] * 10_000}, "stop"),
        (P, {"prompt": "a", "stop": ["x" * 9000]}, "stop"),
        (P, {"prompt": "a", "stop": [""]}, "stop"),
        (P, {"prompt": "a", "bad_words": ["x"] * 1000}, "bad_words"),
        (P, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        (P, {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias"),
        (P, {"prompt": "a", "logit_bias": [1]}, "logit_bias"),
        (P, {"prompt": "a", "stream": 1}, "stream"),
        (P, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        (P, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (P, {"prompt": "a", "stream": True, "echo": True, "logprobs": 1}, "stream"),
        (P, {"prompt": "a", "colour": "red"}, "colour"),
        (P, {"prompt": "a", "best_of": 3}, "best_of"),
        (P, {"prompt": "a", "suffix": "b"}, "suffix"),
        (P, {"prompt": "a", "messages": HI}, "messages"),
        (P, {"prompt": "a", "model": 3}, "model"),
        (P, {"prompt": "a", "regex": "("}, "regex"),
        (P, {"prompt": "a", "regex": "a", "choice": ["b"]}, "regex"),
        (C, {}, "messages"),
        (C, {"messages": []}, "messages"),
        (C, {"messages": ["x"]}, "messages"),
        (C, {"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        (C, {"messages": [{"role": ["user"], "content": "x"}]}, "messages"),
        (C, {"messages": [{"role": "user", "content": {"a": 1}}]}, "messages"),
        (C, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (C, {"messages": [{"role": "user", "content": "x", "task": []}]}, "messages"),
        (C, {"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        (C, {"messages": HI, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (C, {"messages": HI, "top_logprobs": 3}, "top_logprobs"),
        (C, {"messages": HI, "tools": "f"}, "tools"),
        (C, {"messages": HI, "tools": [TOOL, TOOL]}, "tools"),
        (C, {"messages": HI, "tools": [TOOL] * 200}, "tools"),
        (C, {"messages": HI, "tool_choice": "required"}, "tool_choice"),
        (C, {"messages": HI, "tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        (C, {"messages": HI, "tools": [TOOL], "tool_choice": OTHER}, "tool_choice"),
        (C, {"messages": HI, "response_format": {"type": "xml"}}, "response_format"),
        (C, {"messages": HI, "response_format": {"type": "json_schema"}}, "response_format"),
        (C, {"messages": HI, "tools": [TOOL], "regex": "a+"}, "regex"),
        (C, {"messages": HI, "tools": [{**TOOL, "type": "custom"}]}, "tools[0].type"),
        (C, {"messages": HI, "tools": [TOOL, {**OTHER, "x": 1}]}, "tools[1].x"),
        (C, {"messages": HI, "tools": [{"function": {"name": "f", "strict": 1}}]},
         "tools[0].function.strict"),
        (C, {"messages": HI, "tools": [{"function": {"name": "f", "parameters": "x"}}]},
         "tools[0].function.parameters"),
        (C, {"messages": HI, "tools": [TOOL], "tool_choice": {**TOOL, "x": 1}}, "tool_choice.x"),
        (C, {"messages": HI, "response_format": {**OBJECT, "x": 1}}, "response_format.x"),
        (C, {"messages": HI, "response_format": {"type": "json_schema", "json_schema":
            {"schema": {}, "x": 1}}}, "response_format.json_schema.x"),
        (C, {"messages": HI, "response_format": {"type": "json_schema", "json_schema":
            {"schema": {}, "strict": 1}}}, "response_format.json_schema.strict"),
        (C, {"messages": HI, "thinking": {"type": "enabled", "budget_tokens": 9}},
         "thinking.budget_tokens"),
        (C, {"messages": HI, "thinking": True, "chat_template_kwargs": {"thinking": False}},
         "thinking"),
        (C, {"messages": HI, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        (P, {"prompt": "a", "logit_bias": {"1_0": 1}}, "logit_bias"),
        (P, {"prompt": "a", "logit_bias": {"01": 1}}, "logit_bias"),
        (P, {"prompt": "a", "stop": {"x": "y" * 5000}}, "stop"),
        (P, {"prompt": "a", "repetition_penalty": 1e-9}, "repetition_penalty"),
        (P, {"prompt": "a", "best_of": True}, "best_of"),
        (C, {"messages": HI, "reasoning_effort": "heroic"}, "reasoning_effort"),
        (C, {"messages": HI, "thinking": {"type": ["x"]}}, "thinking"),
        (C, {"messages": HI, "functions": [TOOL]}, "functions"),
        (C, {"messages": HI, "modalities": ["audio"]}, "modalities"),
        (C, {"messages": HI, "thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
        (C, {"messages": HI, "chat_template_kwargs": {"thinking": True},
             "reasoning_effort": "none"}, "reasoning_effort"),
        (C, {"messages": HI, "response_format": OBJECT, "json_object": False}, "json_object"),
        (C, {"messages": HI, "response_format": OBJECT, "json_schema": {}}, "json_schema"),
        (C, {"messages": HI, "json_schema": {"type": "object"}, "response_format":
            {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}}, "json_schema"),
        (P, {"prompt": "a", "json_schema": {"type": "object"}, "response_format":
            {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}}, "json_schema"),
        *((C, {"messages": HI, "tools": [TOOL], "tool_choice": choice, **form}, *form)
          for choice in ("required", TOOL)
          for form in ({"regex": "a"}, {"choice": ["a"]}, {"grammar": "root ::= \"a\""})),
        *((C, {"messages": HI, "tools": [tool], "tool_choice": choice}, "tools")
          for tool in (5, {"type": "function", "function": {}})
          for choice in ("none", "auto", "required")),
        (C, {"messages": HI, "response_format": {"type": "json_schema", "json_schema":
            {"schema": {"type": "no type"}}}}, "response_format"),
        (P, {"prompt": "a", "json_schema": {"type": "no type"}}, "json_schema"),
        (C, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        (C, {"messages": [{"role": "user", "content": "x", "x": 1}]}, "messages"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)  # fmt: skip
def test_a_bad_request_is_refused_by_name(
    live: Live, path: str, body: dict[str, Any], param: str | None
) -> None:
    error = check_error(post(live, json.dumps(body), path), 400, param)
    assert error["type"] == "invalid_request_error"


def test_messages_are_refused_in_words_of_the_request(live: Live) -> None:
    def message(messages: list[Any]) -> str:
        error = check_error(post(live, {"messages": messages}, C), 400, "messages")
        return str(error["message"])

    assert "has no content; allowed are a string or" in message([{"role": "user", "content": None}])
    odd = message([{"role": "user", "content": "x", "x": 1}])
    assert "has x; allowed are content, mask, name" in odd
    most = live.llm.max_seq_len
    assert message([{"role": "user", "content": "the " * 10**6}]).endswith(
        f"the model's context is {most} and one is for the answer, so that {most - 1} are allowed"
    )


def test_wrong_keys_are_counted_at_every_route(locked: Live) -> None:
    for method, path, endpoint in (
        ("GET", "/v1/models", "/v1/models"),
        ("GET", "/v1/models/x/y", "/v1/models/{model}"),
        ("POST", "/tokenize", "/tokenize"),
        ("GET", "/metrics", "/metrics"),
        ("POST", P, P),
    ):
        name = "paceline_requests_total"
        labels = {"endpoint": endpoint, "outcome": "unauthorized"}
        before = locked.metrics.registry.get_sample_value(name, labels) or 0
        check_error(httpx.request(method, locked.url + path, json={}), 401)

        def counted() -> float:
            return locked.metrics.registry.get_sample_value(name, labels) or 0  # noqa: B023

        until(lambda: counted() == before + 1)  # noqa: B023


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'"x"', None),
        (b"\xff\xfe", None),
        (b'{"prompt": "a", "temperature": NaN}', None),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b"[" * 100_000, None),
        (b'{"prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}", None),
        (b'{"seed": ' + b"1" * 10_000 + b"}", None),
    ],
)
def test_a_body_that_is_no_request(live: Live, body: bytes, param: str | None) -> None:
    check_error(post(live, body), 400, param)


def test_what_is_ignored_has_no_effect(live: Live) -> None:
    plain = {"prompt": "def", "max_tokens": 4, "temperature": 0}
    more = {name: {"anything": [1]} for name in IGNORED}
    neutral = {"best_of": 1, "suffix": "", "logprobs": None, "stop": None, "model": NAME}
    texts = [
        post(live, body).json()["choices"][0]["text"]
        for body in (plain, {**plain, **more, **neutral})
    ]
    assert texts[0] == texts[1]


def test_the_model_must_be_the_one_served(live: Live) -> None:
    error = check_error(post(live, {"prompt": "a", "model": "gpt"}), 404, "model")
    assert error["code"] == "model_not_found"


def test_large_bodies_are_not_read(live: Live) -> None:
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        yield b'{"prompt": "'
        for _ in range(800):
            sent += 65_536
            yield b"x" * 65_536

    with httpx.Client(base_url=live.url, timeout=20) as client:
        headers = {"content-type": "application/json"}
        try:
            answer = client.post(P, content=parts(), headers=headers)
            check_error(answer, 413)
        except (httpx.WriteError, httpx.ReadError):
            # The server hangs up in the middle of the body, and the answer may be lost with it.
            pass
    # What it read, and what sockets hold.
    assert sent < 30_000_000
    said = _raw(
        live, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 52428800\r\n\r\n"
    )  # fmt: skip
    assert said.startswith(b"HTTP/1.1 413 ")


def _raw(live: Live, data: bytes, *, seconds: float = 5.0) -> bytes:
    """What the server says to some bytes until it hangs up or nothing comes."""
    said = b""
    with socket.create_connection(("127.0.0.1", live.port), timeout=seconds) as end:
        try:
            end.sendall(data)
            while part := end.recv(65_536):
                said += part
                if b"\r\n\r\n" in said and b'"error"' in said:
                    break
        except (ConnectionError, TimeoutError):
            pass
    return said


def _said_error(said: bytes, status: int, code: str) -> None:
    """A raw answer is an error in OpenAI's shape."""
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), said[:200]
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\n" + b"x-more: yes\r\n" * 20_000,
        b"GET /health HTTP/1.1\r\nx-long: " + b"y" * 100_000,
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"GET /he\xffalth HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
    ],
)
def test_headers_without_end_and_what_is_no_http(live: Live, data: bytes) -> None:
    _said_error(_raw(live, data), 400, "invalid_http")
    assert httpx.get(live.url + "/health").status_code == 200


def test_a_body_that_breaks_off_its_chunks(live: Live) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    said = _raw(live, head + b'transfer-encoding: chunked\r\n\r\n5\r\n{"pro\r\nno size\r\n')
    _said_error(said, 400, "invalid_http")


def test_a_header_that_does_not_come(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HEADER_SECONDS", 0.2)
    _said_error(_raw(live, b"GET /health HTTP/1.1\r\nx-half"), 400, "invalid_http")
    assert _raw(live, b"") == b""
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as end:
        # The second request of a connection has no more time than the first.
        end.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        said = b""
        while b'"ok"' not in said:
            said += end.recv(65_536)
        end.sendall(b"GET /health HTTP/1.1\r\nx-half")
        said = b""
        while part := end.recv(65_536):
            said += part
        _said_error(said, 400, "invalid_http")


def test_a_header_that_comes_in_time_is_no_trouble(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "HEADER_SECONDS", 0.2)
    body = json.dumps({"prompt": "a", "max_tokens": 400, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as end:
        end.sendall(head + b"content-length: %d\r\n" % len(body))
        end.sendall(b"\r\n" + body)
        said = b""
        while b'"usage"' not in said:
            part = end.recv(65_536)
            assert part, said
            said += part
        assert said.startswith(b"HTTP/1.1 200 ")


def test_more_connections_than_may_be(live: Live) -> None:
    crowd = live.server.config.app
    assert isinstance(crowd, sockets._Crowd)
    until(lambda: not crowd.connections)
    most, crowd._most = crowd._most, 1
    try:
        with socket.create_connection(("127.0.0.1", live.port)) as end:
            until(lambda: len(crowd.connections) == 1)
            answer = httpx.get(live.url + "/health")
            assert check_error(answer, 503)["code"] == "too_many_connections"
            assert answer.headers["retry-after"] == "1"
            end.close()
        until(lambda: not crowd.connections)
        assert httpx.get(live.url + "/health").status_code == 200
    finally:
        crowd._most = most


def test_a_body_that_does_not_come(live: Live) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    said = _raw(live, head + b'content-length: 100\r\n\r\n{"prom')
    assert said.startswith(b"HTTP/1.1 408 ")


def test_a_million_tokens(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    error = check_error(post(live, {"prompt": "x " * 3000}), 400, "prompt")
    assert error["code"] == "context_length_exceeded"
    # What cannot fit however it is cut up is not even cut up.
    assert live.llm.tokenizer is not None
    monkeypatch.setattr(live.llm.tokenizer, "encode", None)
    for body in ({"prompt": "word " * 700_000}, {"prompt": [5] * 1_000_000}):
        error = check_error(post(live, body), 400, "prompt")
        assert error["code"] == "context_length_exceeded"
    chat = {"messages": [{"role": "user", "content": "word " * 700_000}]}
    assert check_error(post(live, chat, C), 400, "messages")["code"] == "context_length_exceeded"
    check_error(post(live, {"prompt": "word " * 700_000}, "/tokenize"), 400, "prompt")


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _doubled(levels: int) -> dict[str, Any]:
    """Each definition has the next twice."""
    refs = [{"$ref": f"#/$defs/d{n}"} for n in range(1, levels + 1)]
    pairs = {f"d{n}": {"prefixItems": [refs[n], refs[n]]} for n in range(1, levels)}
    return {**refs[0], "$defs": {**pairs, f"d{levels}": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(a|b|c|d)*a(a|b|c|d){40}"},
        {"type": "string", "pattern": "((x{1,1000}){1,1000}){1,1000}"},
        {"type": "array", "items": {"enum": [f"v{n}" for n in range(20_000)]}},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        _deep(300),
        _doubled(40),
        {"allOf": [{"anyOf": [{"minimum": m}, {"maximum": m}]} for m in range(40)]},
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(20_000)}},
        {"type": "string", "minLength": 10**9},
        {"type": "array", "items": {"type": "array", "minItems": 10**6}, "minItems": 10**6},
        {"type": "integer", "multipleOf": 10**12},
        {"anyOf": [{"not": {}}]},
        {"type": "no such type"},
    ],
)
def test_schemas_that_explode(live: Live, schema: dict[str, Any]) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    answer = post(live, {"messages": HI, "response_format": shape, "max_tokens": 2}, C)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert check_error(answer, 400, answer.json()["error"]["param"])["message"]
    # The engine goes on for others.
    assert post(live, {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_schema_that_nests_without_end(live: Live) -> None:
    levels = 20_000
    schema = '{"properties":{"a":' * levels + "{}" + "}}" * levels
    body = f'{{"messages":[{{"role":"user","content":"a"}}],"json_schema":{schema}}}'
    error = check_error(post(live, body, C), 400)
    assert "nests too deep" in error["message"]


def test_others_go_on_while_a_schema_is_compiled(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, begun, go_on = GrammarCompiler._make, threading.Event(), threading.Event()

    def slowly(compiler: GrammarCompiler, spec: GrammarSpec) -> Grammar:
        begun.set()
        assert go_on.wait(20)
        return make(compiler, spec)

    monkeypatch.setattr(GrammarCompiler, "_make", slowly)
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": "slow"}}}
    with ThreadPoolExecutor(1) as pool:
        body = {"messages": HI, "response_format": shape, "max_tokens": 9}
        waiting = pool.submit(post, live, body, C)
        assert begun.wait(20)
        assert post(live, {"prompt": "a", "max_tokens": 4}).status_code == 200
        assert post(live, {"prompt": "a"}, "/tokenize").status_code == 200
        assert not waiting.done()
        go_on.set()
        answer = waiting.result(20)
    assert answer.json()["choices"][0]["message"]["content"] == '"slow"'


def test_a_schema_that_takes_too_long_is_refused(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    make = GrammarCompiler._make

    def slowly(compiler: GrammarCompiler, spec: GrammarSpec) -> Grammar:
        assert go_on.wait(20)
        return make(compiler, spec)

    monkeypatch.setattr(GrammarCompiler, "_make", slowly)
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": "slower"}}}
    body = {"messages": HI, "response_format": shape, "max_tokens": 9}
    error = check_error(post(live, body, C), 400, "response_format")
    assert "takes longer than 3 s" in error["message"]
    go_on.set()
    # It went on meanwhile and is there for the next that asks.
    assert post(live, body, C).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../v1/models",
        "/v1/../../etc/passwd",
        "//v1/models",
        "/v1/models/",
        "/v1//models",
        "/v1/%2e%2e/v1/models",
        "/v1/models/../../health",
        "/V1/MODELS",
        "/v1/completions/",
        "/%00",
        "/" + "a" * 5000,
        "/v1/models;x",
    ],
)
def test_path_tricks(live: Live, path: str) -> None:
    said = _raw(live, f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert said.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 405 ")), said[:200]
    assert b'"error"' in said


def test_methods_and_content_types(live: Live) -> None:
    check_error(httpx.get(live.url + P), 405)
    check_error(httpx.post(live.url + "/health"), 405)
    check_error(httpx.post(live.url + P, content=b"prompt=a"), 415)
    form = {"content-type": "text/plain"}
    check_error(httpx.post(live.url + P, content=b'{"prompt":"a"}', headers=form), 415)


def test_keys(locked: Live) -> None:
    paths = [("GET", "/v1/models"), ("GET", "/metrics"), ("POST", P), ("POST", C),
             ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/v1/models/x")]  # fmt: skip
    wrong = ["", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x"]
    for method, path in paths:
        for value in wrong:
            headers = {"authorization": value.encode()} if value else {}
            answer = httpx.request(method, locked.url + path, headers=headers)
            assert check_error(answer, 401)["code"] == "invalid_api_key"
            assert KEY not in answer.text
    right = {"authorization": f"Bearer {KEY}".encode()}
    assert httpx.get(locked.url + "/v1/models", headers=right).status_code == 200
    assert httpx.get(locked.url + "/health").status_code == 200
    with locked.client("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.completions.create(model=NAME, prompt="a")
    with locked.client("other") as client:
        assert client.completions.create(model=NAME, prompt="a", max_tokens=1).choices
    assert json.loads(locked.log.getvalue().splitlines()[-2])["outcome"] == "unauthorized"


def test_keys_are_compared_in_constant_time(locked: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("paceline.server.app.hmac.compare_digest", compare)
    for key, status in (("x", 401), ("other", 200), (KEY, 200), ("y" * 5000, 401)):
        headers = {"authorization": f"Bearer {key}".encode()}
        assert httpx.get(locked.url + "/v1/models", headers=headers).status_code == status
        # Each key is looked at whatever the others said, as digests of one length.
        assert len(compared) == 2
        assert {len(digest) for pair in compared for digest in pair} == {32}
        compared.clear()


def test_an_engine_without_drafts_refuses_some(locked: Live) -> None:
    headers = {"authorization": "Bearer other"}
    answer = post(locked, {"prompt": "a", "num_drafts": 3}, headers=headers)
    assert "no proposer" in check_error(answer, 400, "num_drafts")["message"]


def test_other_origins_are_let_in_only_where_asked_for(live: Live, locked: Live) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    allowed = httpx.options(locked.url + P, headers=asked)
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    asked["origin"] = "https://b.example"
    other = httpx.options(locked.url + P, headers=asked)
    assert "access-control-allow-origin" not in other.headers
    off = httpx.options(live.url + P, headers=asked)
    assert off.status_code == 405
    assert not [name for name in off.headers if name.startswith("access-control")]


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "function", "name", "schema", "text", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_fuzzed_bodies_are_answered_or_refused(live: Live, data: st.DataObject) -> None:
    chat = data.draw(st.booleans())
    names = sorted(CHAT_FIELDS if chat else COMPLETION_FIELDS)
    body = data.draw(st.dictionaries(st.sampled_from(names), _VALUES, max_size=4))
    start: dict[str, Any] = {"messages": HI} if chat else {"prompt": "a"}
    body = {**start, **body} if data.draw(st.integers(0, 3)) else body
    if isinstance(body.get("max_tokens", 4), int):
        body["max_tokens"] = min(4, body.get("max_tokens", 4) or 4)
    body.pop("max_completion_tokens", None)
    answer = post(live, body, C if chat else P)
    assert answer.status_code in (200, 400, 404, 429), (body, answer.text)


def test_nothing_is_left_behind(live: Live, locked: Live) -> None:
    live.wait_idle()
    locked.wait_idle()
    assert httpx.get(live.url + "/health").status_code == 200
    until(lambda: not live.server.server_state.tasks)
