"""`paceline chat`: on a terminal and through a pipe, with a model here and behind a server."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline import LLM, SamplingParams
from paceline.cli import app
from paceline.cli.chat import _Answer, _ServedModel
from paceline.text import ChatTemplate

FAST = ["--backend", "torch", "--max-seq-len", "2048"]
GREEN = "\x1b[32m"


def chat(*args: str | Path, stdin: str | bytes) -> Result:
    return CliRunner().invoke(app, ["chat", *map(str, args)], input=stdin)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[dict[str, str]], SamplingParams]]:
    """Every conversation that was laid out, and the parameters it was answered with."""
    seen: list[Any] = []
    render, stream = ChatTemplate.render, LLM.stream

    def rendered(self: ChatTemplate, messages: Any, **given: Any) -> Any:
        seen.append(list(messages))
        return render(self, messages, **given)

    def streamed(self: LLM, prompt: Any, params: Any, **given: Any) -> Any:
        seen[-1] = (seen[-1], params)
        return stream(self, prompt, params, **given)

    monkeypatch.setattr(ChatTemplate, "render", rendered)
    monkeypatch.setattr(LLM, "stream", streamed)
    return seen


# Through a pipe


def test_answers_go_to_standard_output_and_counts_to_the_other() -> None:
    result = chat("-n", "40", stdin="Define zebra\nDefine lion\n")
    assert result.exit_code == 0, result.stderr
    with LLM() as llm:
        assert llm.tokenizer is not None
        template = ChatTemplate.for_tokenizer(llm.tokenizer)
        messages: list[dict[str, str]] = []
        for question in ("Define zebra", "Define lion"):
            messages.append({"role": "user", "content": question})
            ids = template.render(messages).ids(llm.tokenizer)
            text = llm.generate([ids], SamplingParams(max_tokens=40))[0].text
            messages.append({"role": "assistant", "content": text})
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    assert result.stdout.splitlines() == "\n".join(said).splitlines()
    counts = [line for line in result.stderr.splitlines() if "tok/s" in line]
    assert len(counts) == 2
    assert "\x1b" not in result.output


def test_turns_are_remembered_and_forgotten(tiny_path: Path, prompts: list[Any]) -> None:
    lines = ["one", "", "two", "/reset", "three", "/exit", "four"]
    result = chat(
        tiny_path, "--system", "Be brief.", "-n", "6", *FAST, stdin="\n".join(lines) + "\n"
    )
    assert result.exit_code == 0, result.stderr
    system = {"role": "system", "content": "Be brief."}
    asked = [messages for messages, _ in prompts]
    assert [len(messages) for messages in asked] == [2, 4, 2]
    assert all(messages[0] == system for messages in asked)
    assert [m["role"] for m in asked[1]] == ["system", "user", "assistant", "user"]
    assert asked[1][2]["content"]
    assert [messages[-1]["content"] for messages in asked] == ["one", "two", "three"]


def test_the_second_turn_reads_its_new_tokens_only() -> None:
    system = "You answer questions about Python. " * 20
    result = chat("--system", system, "-n", "24", stdin="Define zebra\nDefine lion\n")
    assert result.exit_code == 0, result.stderr
    first, second = (line for line in result.stderr.splitlines() if "tok/s" in line)
    assert "cached" not in first
    found = re.search(r"(\d+) tokens of the prompt were cached", second)
    assert found is not None
    assert int(found[1]) >= 128


def test_options_reach_the_engine(tiny_path: Path, prompts: list[Any]) -> None:
    result = chat(
        tiny_path, "-n", "5", "-k", "2", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "7",
        "--min-p", "0.01", "--repetition-penalty", "1.1", "--presence-penalty", "0.1",
        "--frequency-penalty", "0.2", "--seed", "3", "--stop", "zz", *FAST,
        stdin="a\n/drafts 1\nb\n/drafts\nc\n",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    given = [params for _, params in prompts]
    assert [params.num_drafts for params in given] == [2, 1, None]
    first = given[0]
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k) == (5, 0.5, 0.9, 7)
    assert (first.min_p, first.repetition_penalty, first.seed) == (0.01, 1.1, 3)
    assert (first.presence_penalty, first.frequency_penalty) == (0.1, 0.2)
    assert "zz" in first.stop


def test_a_line_may_go_on_and_may_begin_with_a_slash(tiny_path: Path, prompts: list[Any]) -> None:
    result = chat(tiny_path, "-n", "4", *FAST, stdin="a\\\nb\n /etc/passwd\n")
    assert result.exit_code == 0, result.stderr
    assert [messages[-1]["content"] for messages, _ in prompts] == ["a\nb", "/etc/passwd"]


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        ("/nonsense\n", "/nonsense is no command"),
        ("/drafts 9\n", "num_drafts is 9"),
        (b"\xff\n", "not UTF-8"),
        ("a" * 60000 + "\n", "the prompt has"),
    ],
)
def test_in_a_pipe_what_cannot_be_answered_ends_it(
    tiny_path: Path, stdin: str | bytes, message: str
) -> None:
    result = chat(tiny_path, *FAST, stdin=stdin)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--api-key", "k"], "--api-key is for a server"),
        (["--url", "ftp://x"], "allowed is http:// or https://"),
        (["--url", "http://"], "allowed is http:// or https://"),
        (["--url", "http://x:port"], "--url is 'http://x:port'"),
        (["--url", "http://127.0.0.1:1", "--device", "cpu"], "--device and --url are given"),
        (["--url", "http://127.0.0.1:1", "--api-key", "a\nb"], "--api-key has characters"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--system", "@/nowhere/text"], "/nowhere/text cannot be read"),
    ],
)
def test_options_are_checked_before_anything_is_loaded(args: list[str], message: str) -> None:
    result = chat(*args, stdin="")
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")


# On a terminal


class Terminal:
    """A program on a pseudo-terminal, read and typed to."""

    def __init__(self, *args: str | Path) -> None:
        self._parent, child = pty.openpty()
        env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "CI")}
        env |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "INPUTRC": "/dev/null"}
        self.process = subprocess.Popen(
            [sys.executable, *map(str, args)],
            stdin=child,
            stdout=child,
            stderr=child,
            env=env,
            start_new_session=True,
        )
        os.close(child)
        self.shown = ""
        self._unread = ""

    def wait_for(self, pattern: str, *, seconds: float = 180) -> str:
        """Read on up to a pattern; what was shown since the last, its match included."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self._unread)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in {self._unread[-400:]!r}"
            if select.select([self._parent], [], [], 1)[0]:
                part = os.read(self._parent, 65536).decode("utf-8", "replace")
                self.shown += part
                self._unread += part
        read, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return read

    def type(self, text: str) -> None:
        os.write(self._parent, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def leave(self) -> int:
        self.type("/exit\n")
        return self.process.wait(timeout=60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._parent)


@contextmanager
def on_a_terminal(*args: str | Path) -> Iterator[Terminal]:
    terminal = Terminal(*args)
    try:
        yield terminal
    finally:
        terminal.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(tiny_path: Path) -> None:
    # The tiny model never ends by itself, so that only Ctrl-C can.
    with on_a_terminal(
        "-m", "paceline", "chat", tiny_path, "-n", "1900", "--repetition-penalty", "1.5", *FAST
    ) as terminal:
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for(r"hello\r\n[^\r]{5}")
        terminal.interrupt()
        terminal.wait_for(r"\(stopped after [\d.]+ s\)")
        terminal.wait_for("> ")
        terminal.interrupt()
        terminal.wait_for(r"\(Ctrl-D leaves\)")
        terminal.type("/nonsense\n")
        terminal.wait_for("error: /nonsense is no command")
        terminal.type("again\n")
        terminal.wait_for(r"again\r\n[^\r]{5}")
        terminal.interrupt()
        terminal.wait_for(r"\(stopped")
        assert terminal.leave() == 0
    assert "Traceback" not in terminal.shown


def test_accepted_drafts_are_tinted_and_end_of_input_leaves() -> None:
    with on_a_terminal("-m", "paceline", "chat", "-n", "32") as terminal:
        terminal.wait_for("> ")
        terminal.type("Define zebra\n")
        shown = terminal.wait_for(r"drafts accepted\)")
        assert GREEN in shown
        terminal.type("/drafts 0\n")
        terminal.type("Define lion\n")
        assert GREEN not in terminal.wait_for("no drafts")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=60) == 0


# Behind a server


class FakeServer:
    """OpenAI's interface with answers from a script, and a note of what was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.events: list[Any] = []
        self.models: list[dict[str, str]] = [{"id": "first"}, {"id": "second"}]
        self.status = 200
        self.more_headers: dict[str, str] = {}
        self.endless = False
        self.left = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._json(200, {"object": "list", "data": outer.models})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.asked.append({"path": self.path, **json.loads(body)})
                outer.headers.append(dict(self.headers))
                if outer.status != 200:
                    self._json(outer.status, {"error": {"message": "not now", "code": None}})
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for event in outer.events:
                    text = event if isinstance(event, str) else json.dumps(event)
                    self.wfile.write(f"data: {text}\r\n\r\n".encode())
                try:
                    while outer.endless:
                        self.wfile.write(f"data: {json.dumps(said('word '))}\n\n".encode())
                        time.sleep(0.02)
                except OSError:
                    outer.left.set()

            def _json(self, status: int, document: dict[str, Any]) -> None:
                body = json.dumps(document).encode()
                self.send_response(status)
                for name, value in outer.more_headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self.endless = False
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}, **more}]}


ANSWER = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    said("Hello "),
    said("there"),
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {"completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 128}},
        "metrics": {
            "speculative_decoding": {
                "num_spec_steps": 2,
                "num_draft_tokens": 6,
                "num_accepted_draft_tokens": 3,
            }
        },
    },
    "[DONE]",
]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def test_a_servers_answer_streams_with_its_counts(server: FakeServer) -> None:
    server.events = ANSWER
    result = chat(
        "--url", server.url, "--api-key", "secret", "--system", "S", "-k", "auto", "-n", "9",
        "--top-k", "4", "--stop", "zz", stdin="hi\nmore\n",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "Hello there\nHello there\n"
    first, second = (line for line in result.stderr.splitlines() if "tok/s" in line)
    assert "2.50 tokens per step, 3 of 6 drafts accepted" in first
    assert "128 tokens of the prompt were cached" in second
    one, two = server.asked
    assert one == {
        "path": "/v1/chat/completions",
        "model": "first",
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 9,
        "temperature": 0.0,
        "top_k": 4,
        "num_drafts": "auto",
        "stop": ["zz"],
    }
    assert two["messages"][2:] == [
        {"role": "assistant", "content": "Hello there"},
        {"role": "user", "content": "more"},
    ]
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_a_key_may_be_in_a_file_and_a_path_in_the_url(server: FakeServer, tmp_path: Path) -> None:
    server.events = ANSWER
    (tmp_path / "key").write_text("from-file\n", encoding="utf-8")
    result = chat(
        "name", "--url", f"{server.url}/v1/", "--api-key", f"@{tmp_path / 'key'}", stdin="hi\n"
    )
    assert result.exit_code == 0, result.stderr
    assert server.asked[0]["model"] == "name"
    assert server.asked[0]["path"] == "/v1/chat/completions"
    assert server.headers[0]["Authorization"] == "Bearer from-file"


def test_only_what_was_asked_for_is_sent(server: FakeServer) -> None:
    server.events = ANSWER
    assert chat("m", "--url", server.url, stdin="hi\n").exit_code == 0
    assert set(server.asked[0]) == {
        "path", "model", "messages", "stream", "stream_options", "max_completion_tokens",
        "temperature",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (400, 2, "answers 400: not now"),
        (401, 2, "answers 401: not now"),
        (429, 1, "answers 429: not now (try again in 7 s)"),
        (503, 1, "answers 503: not now"),
    ],
)
def test_a_refusal_is_told(server: FakeServer, status: int, code: int, message: str) -> None:
    server.status, server.more_headers = status, {"Retry-After": "7"}
    result = chat("m", "--url", server.url, stdin="hi\n")
    assert result.exit_code == code
    assert message in result.stderr


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([said("Hel")], "broke off"),
        ([said("Hel"), {"error": {"message": "the engine is dead"}}], "the engine is dead"),
        (["{nonsense"], "does not answer in OpenAI's form"),
        ([["a"]], "does not answer in OpenAI's form"),
        ([{"choices": ["a"]}], "does not answer in OpenAI's form"),
        ([said("a", pieces=[1])], "does not answer in OpenAI's form"),
    ],
)
def test_a_stream_that_breaks_is_an_error(
    server: FakeServer, events: list[Any], message: str
) -> None:
    server.events = events
    result = chat("m", "--url", server.url, stdin="hi\n")
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_nobody_there_is_an_error_in_a_line() -> None:
    result = chat("--url", "http://127.0.0.1:1", stdin="hi\n")
    assert result.exit_code == 1
    assert re.match(r"error: http://127.0.0.1:1 cannot be reached: ", result.stderr)


def test_reasoning_is_shown_and_not_remembered(server: FakeServer) -> None:
    server.events = [
        {"choices": [{"index": 0, "delta": {"reasoning_content": "hmm. "}}]},
        *ANSWER,
    ]
    result = chat("m", "--url", server.url, stdin="hi\nmore\n")
    assert result.stdout == "hmm. Hello there\n" * 2
    assert server.asked[1]["messages"][1]["content"] == "Hello there"


def test_leaving_an_answer_ends_it_on_the_server(server: FakeServer) -> None:
    server.endless = True
    model = _ServedModel(server.url, "m", None)
    pieces = model.answer([{"role": "user", "content": "hi"}], SamplingParams(), _Answer())
    assert next(pieces).text == "word "
    pieces.close()
    assert server.left.wait(timeout=10)


def test_ctrl_c_stops_a_servers_answer_too(server: FakeServer) -> None:
    server.endless = True
    with on_a_terminal("-m", "paceline", "chat", "m", "--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("hi\n")
        terminal.wait_for("word word word")
        terminal.interrupt()
        terminal.wait_for(r"\(stopped")
        assert server.left.wait(timeout=10)
        server.endless, server.events = False, ANSWER
        terminal.type("more\n")
        terminal.wait_for("Hello there")
        assert terminal.leave() == 0
    # What came before Ctrl-C is part of the conversation.
    assert server.asked[1]["messages"][1]["content"].startswith("word word word")


def test_a_question_without_answer_is_not_remembered(server: FakeServer) -> None:
    server.status = 503
    with on_a_terminal("-m", "paceline", "chat", "m", "--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("hi\n")
        terminal.wait_for("answers 503")
        server.status, server.events = 200, ANSWER
        terminal.type("hi\n")
        terminal.wait_for("Hello there")
        assert terminal.leave() == 0
    assert [m["content"] for m in server.asked[1]["messages"]] == ["hi"]


def test_a_server_without_models_is_an_error(server: FakeServer) -> None:
    server.models = []
    result = chat("--url", server.url, stdin="hi\n")
    assert result.exit_code == 1
    assert "lists no model; name one" in result.stderr
    server.events = ANSWER
    assert chat("m", "--url", server.url, stdin="hi\n").exit_code == 0


def piece(text: str, origin: str, position: int | None = None) -> dict[str, Any]:
    return {"text": text, "origin": origin, "position": position}


def test_drafts_are_tinted_where_the_server_tells_them(server: FakeServer) -> None:
    server.models = [{"id": "m", "owned_by": "paceline"}]
    server.events = [
        said("one two", pieces=[piece("one ", "target"), piece("two", "accepted", 1)]),
        said(" three", pieces=[piece("</think> three", "accepted", 2)]),
        *ANSWER[3:],
    ]
    with on_a_terminal("-m", "paceline", "chat", "--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("hi\n")
        shown = terminal.wait_for("tok/s")
        assert terminal.leave() == 0
    assert f"one {GREEN}two\x1b[0m three" in shown
    assert server.asked[0]["return_pieces"] is True
