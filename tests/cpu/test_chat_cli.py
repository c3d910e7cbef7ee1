"""`paceline chat`: on a terminal and through a pipe, with a model here and behind a server."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import struct
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
from server_kit import running, until
from typer.testing import CliRunner, Result

from paceline import LLM, SamplingParams
from paceline.cli import app
from paceline.cli.chat import _Answer, _ServedModel
from paceline.cli.interrupts import Interrupts
from paceline.engine import Engine
from paceline.text import ChatTemplate

FAST = ["--backend", "torch", "--max-seq-len", "2048"]
GREEN, CYAN = "\x1b[32m", "\x1b[36m"


def chat(*args: str | Path, stdin: str | bytes) -> Result:
    return CliRunner().invoke(app, ["chat", *map(str, args)], input=stdin)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[dict[str, str]], SamplingParams]]:
    """Every conversation that was laid out, and the parameters it was answered with."""
    seen: list[Any] = []
    render, begin = ChatTemplate.render, LLM.begin

    def rendered(self: ChatTemplate, messages: Any, **given: Any) -> Any:
        seen.append(list(messages))
        return render(self, messages, **given)

    def begun(self: LLM, ids: Any, params: Any, **given: Any) -> Any:
        seen[-1] = (seen[-1], params)
        return begin(self, ids, params, **given)

    monkeypatch.setattr(ChatTemplate, "render", rendered)
    monkeypatch.setattr(LLM, "begin", begun)
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


def test_the_second_turn_drafts_as_well_as_the_first() -> None:
    questions = ["Define zebra", "Define lion", "What is a list?"]
    result = chat("-n", "40", stdin="\n".join(questions) + "\n")
    assert result.exit_code == 0, result.stderr
    counts = re.findall(r"(\d+) of (\d+) drafts accepted", result.stderr)
    with LLM(prefix_cache=False) as llm:
        assert llm.tokenizer is not None
        template = ChatTemplate.for_tokenizer(llm.tokenizer)
        messages: list[dict[str, str]] = []
        for question, (accepted, drafted) in zip(questions, counts, strict=True):
            messages.append({"role": "user", "content": question})
            ids = template.render(messages).ids(llm.tokenizer)
            alone = llm.generate([ids], SamplingParams(max_tokens=40))[0]
            messages.append({"role": "assistant", "content": alone.text})
            # As many as where the whole conversation is read anew: nothing of the drafter's own
            # state is lost between turns.
            assert int(drafted) == alone.speculation.num_drafted > 0
            assert int(accepted) == alone.speculation.num_accepted > 0


def test_in_a_pipe_ctrl_c_ends_it_between_two_steps(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    idle: list[bool] = []
    step, close = Engine.step, LLM.close

    def interrupted(self: Engine) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        steps.append(len(steps))
        return step(self)

    def closed(self: LLM) -> None:
        self.engine.check_idle()
        idle.append(True)
        close(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    monkeypatch.setattr(LLM, "close", closed)
    # The prompt takes several steps, none of which gives text.
    result = chat(tiny_path, "-n", "9", *FAST, stdin="word " * 250 + "\nmore\n")
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"
    assert (steps, idle, result.stdout) == ([0], [True], "")


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
        ("/drafts 9\n", "/drafts takes 0 to 8, auto or nothing; '9' is given"),
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

    def __init__(self, *args: str | Path, stdout: int | None = None, **more: str) -> None:
        self._parent, child = pty.openpty()
        env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "CI")}
        env |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "INPUTRC": "/dev/null", **more}
        self.process = subprocess.Popen(
            [sys.executable, *map(str, args)],
            stdin=child,
            stdout=child if stdout is None else stdout,
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
def on_a_terminal(*args: str | Path, stdout: int | None = None, **more: str) -> Iterator[Terminal]:
    terminal = Terminal(*args, stdout=stdout, **more)
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
        assert "Ctrl-D" not in terminal.wait_for("> ")
        terminal.interrupt()
        terminal.wait_for(r"\(Ctrl-D leaves\)")
        terminal.type("/nonsense\n")
        terminal.wait_for("error: /nonsense is no command")
        terminal.wait_for("> ")
        terminal.type("again\n")
        terminal.wait_for(r"again\r\n[^\r]{5}")
        terminal.interrupt()
        terminal.wait_for(r"\(stopped")
        assert terminal.leave() == 0
    assert "Traceback" not in terminal.shown


# Ctrl-C comes again wherever an answer is torn down, as it does where the keys are held down; at
# the end nothing of the engine may still be in use.
HELD_DOWN = """\
import os, signal
from paceline.cli import app
from paceline.cli.generate import Screen
from paceline.engine import Engine
from paceline.llm import LLM

def hit(owner, name):
    real = getattr(owner, name)
    def struck(self, *given):
        os.kill(os.getpid(), signal.SIGINT)
        done = real(self, *given)
        os.kill(os.getpid(), signal.SIGINT)
        return done
    setattr(owner, name, struck)

def close(self):
    self.engine.check_idle()
    print("all is free")
    closed(self)

hit(Engine, "abort")
hit(Screen, "end")
closed, LLM.close = LLM.close, close
app()
"""


def test_ctrl_c_held_down_tears_nothing_apart(tiny_path: Path) -> None:
    with on_a_terminal(
        "-c", HELD_DOWN, "chat", tiny_path, "-n", "1900", "--repetition-penalty", "1.5", *FAST
    ) as terminal:
        for _ in range(2):
            terminal.wait_for("> ")
            terminal.type("hello\n")
            terminal.wait_for(r"hello\r\n[^\r]{5}")
            terminal.interrupt()
            terminal.wait_for(r"\(stopped")
        terminal.wait_for("> ")
        terminal.interrupt()
        terminal.wait_for(r"\(Ctrl-D leaves\)")
        terminal.wait_for("> ")
        terminal.type("/exit\n")
        terminal.wait_for("all is free")
        assert terminal.process.wait(timeout=60) == 0
    assert "Traceback" not in terminal.shown


# Ctrl-C is then taken by a thread that waits for ever, so that it interrupts nothing on the main
# one: as if it had come just before that began to wait.
UNHEARD = """\
import signal, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
from paceline.cli import app
app()
"""


def test_ctrl_c_just_before_a_wait_is_not_lost(server: FakeServer) -> None:
    server.events, server.holds = [said("word ")], True
    with on_a_terminal("-c", UNHEARD, "chat", "m", "--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.interrupt()
        terminal.wait_for(r"\(Ctrl-D leaves\)", seconds=30)
        terminal.wait_for("> ")
        terminal.type("hi\n")
        terminal.wait_for("word ")
        terminal.interrupt()
        terminal.wait_for(r"\(stopped", seconds=30)
        assert terminal.leave() == 0


def test_arrows_recall_lines_and_commands(server: FakeServer) -> None:
    server.events = ANSWER
    with on_a_terminal("-m", "paceline", "chat", "m", "--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("first question\n")
        terminal.wait_for("tok/s")
        terminal.wait_for("> ")
        terminal.type("/drafts 2\n")
        terminal.wait_for("a step: 2")
        terminal.wait_for("> ")
        terminal.type("\x1b[A\x1b[A?\n")
        terminal.wait_for("tok/s")
        terminal.wait_for("> ")
        terminal.type("\x1b[A\x1b[A3\n")
        terminal.wait_for("0 to 8")
        assert terminal.leave() == 0
    first, second = server.asked
    assert first["messages"][-1]["content"] == "first question"
    assert [message["content"] for message in second["messages"]] == [
        "first question",
        "Hello there",
        "first question?",
    ]
    assert second["num_drafts"] == 2


def test_commands_on_a_terminal(server: FakeServer) -> None:
    server.events = ANSWER
    command = ("-m", "paceline", "chat", "m", "--url", server.url)
    with on_a_terminal(*command) as terminal:
        terminal.wait_for("> ")
        terminal.type("/help\n")
        shown = terminal.wait_for("recall lines")
        assert all(name in shown for name in ("/reset", "/drafts", "/legend", "/exit"))
        terminal.wait_for("> ")
        terminal.type("/legend\n")
        shown = terminal.wait_for("model's own")
        assert f"{GREEN}an accepted draft" in shown
        assert f"{CYAN}all that the grammar allowed" in shown
        for text in ("one", "two", "/reset", "three"):
            terminal.wait_for("> ")
            terminal.type(f"{text}\n")
            terminal.wait_for("forgotten" if text == "/reset" else "tok/s")
        assert terminal.leave() == 0
    assert [len(asked["messages"]) for asked in server.asked] == [1, 3, 1]
    with on_a_terminal(*command, NO_COLOR="1") as terminal:
        terminal.wait_for("> ")
        terminal.type("/legend\n")
        terminal.wait_for("no tints, since")
        assert terminal.leave() == 0
    assert "\x1b[3" not in terminal.shown


def test_with_its_output_elsewhere_it_is_still_a_conversation(
    server: FakeServer, tmp_path: Path
) -> None:
    server.events, server.holds = [said("word ")], True
    with (
        (tmp_path / "log").open("wb") as log,
        on_a_terminal(
            "-m", "paceline", "chat", "m", "--url", server.url, stdout=log.fileno()
        ) as terminal,
    ):
        terminal.wait_for("> ")
        terminal.type("hi\n")
        until(lambda: (tmp_path / "log").read_bytes() == b"word ", 60)
        terminal.interrupt()
        terminal.wait_for(r"\(stopped")
        terminal.wait_for("> ")
        terminal.interrupt()
        terminal.wait_for(r"\(Ctrl-D leaves\)")
        server.status = 503
        terminal.type("hi\n")
        terminal.wait_for("error: .* answers 503")
        assert terminal.leave() == 0
    assert (tmp_path / "log").read_bytes() == b"word \n"


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
        self.models: list[dict[str, str]] = [{"id": one} for one in ("first", "m", "name")]
        self.status = 200
        self.more_headers: dict[str, str] = {}
        self.endless = False
        self.holds = False
        self.dies: str | None = None
        self.left = threading.Event()
        self.is_read = threading.Event()
        self._ends = threading.Event()
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
                if outer.dies == "in a chunk":
                    self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                if outer.dies == "in a chunk":
                    self.wfile.write(b"fff\r\n")
                for event in outer.events:
                    text = event if isinstance(event, str) else json.dumps(event)
                    self.wfile.write(f"data: {text}\r\n\r\n".encode())
                if outer.holds:
                    outer._ends.wait()
                if outer.dies == "with a reset":
                    outer.is_read.wait()
                    self.connection.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
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
        self._ends.set()
        self.is_read.set()
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
    asked = [{"role": "user", "content": "hi"}]
    pieces = model.answer(asked, SamplingParams(), _Answer(), Interrupts())
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
    assert f"one {GREEN}two\x1b[0m{GREEN} three" in shown
    assert server.asked[0]["return_pieces"] is True


def test_what_a_grammar_forced_has_a_tint_of_its_own(server: FakeServer) -> None:
    server.models = [{"id": "m", "owned_by": "paceline"}]
    pieces = [
        piece("a", "forced"),
        piece("b", "forced", 1),
        piece("c", "accepted", 2),
        piece("d", "corrected"),
        piece("e", "bonus"),
        piece("f", "target"),
    ]
    server.events = [said("abcdef", pieces=pieces), *ANSWER[3:]]
    with on_a_terminal("-m", "paceline", "chat", "--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("hi\n")
        shown = terminal.wait_for("tok/s")
        assert terminal.leave() == 0
    assert f"{CYAN}a\x1b[0m{CYAN}b\x1b[0m{GREEN}c\x1b[0mdef\r\n" in shown


@pytest.mark.parametrize("dies", ["orderly", "with a reset", "in a chunk"])
def test_a_server_that_dies_in_an_answer_does_not_end_the_program(
    server: FakeServer, dies: str
) -> None:
    server.events, server.dies = [said("Hello "), said("wor")], dies
    with on_a_terminal("-m", "paceline", "chat", "m", "--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("hi\n")
        shown = terminal.wait_for("Hello wor")
        server.is_read.set()
        shown += terminal.wait_for(r"error: [^\r]*\r\n")
        assert "Hello wor\r\nerror: " in shown
        assert re.search(rf"{server.url} (broke off in the middle|went away)", shown)
        server.events, server.dies = ANSWER, None
        terminal.wait_for("> ")
        terminal.type("more\n")
        terminal.wait_for("Hello there")
        assert terminal.leave() == 0
    assert "Traceback" not in terminal.shown
    # What came of it stays in the conversation.
    assert [m["content"] for m in server.asked[1]["messages"]] == ["hi", "Hello wor", "more"]


def test_a_real_server_that_is_killed_does_not_end_the_program(tiny_path: Path) -> None:
    serve = subprocess.Popen(
        [
            sys.executable, "-m", "paceline", "serve", tiny_path, "--port", "0", "--backend",
            "torch", "--num-threads", "1", "--max-seq-len", "2048", "--no-request-log",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert serve.stdout is not None
        found = re.search(r"http://[\d.:]+", serve.stdout.readline())
        assert found is not None
        with on_a_terminal(
            "-m", "paceline", "chat", "--url", found[0], "-n", "1900",
            "--repetition-penalty", "1.5",
        ) as terminal:  # fmt: skip
            terminal.wait_for("> ")
            terminal.type("hi\n")
            terminal.wait_for(r"hi\r\n[\s\S]{5}")
            serve.kill()
            terminal.wait_for(rf"error: {found[0]} (broke off in the middle|went away)")
            terminal.wait_for("> ")
            terminal.type("more\n")
            terminal.wait_for(rf"error: {found[0]} cannot be reached")
            assert terminal.leave() == 0
        assert "Traceback" not in terminal.shown
    finally:
        serve.kill()
        serve.communicate()


def test_a_real_servers_drafts_are_tinted_and_its_turns_are_cached() -> None:
    with (
        LLM(num_threads=1) as llm,
        running(llm) as live,
        on_a_terminal("-m", "paceline", "chat", "--url", live.url, "-n", "48") as terminal,
    ):
        for question in ("Define zebra", "Define lion"):
            terminal.wait_for("> ")
            terminal.type(f"{question}\n")
            shown = terminal.wait_for(r"[1-9]\d* of \d+ drafts accepted")
            assert GREEN in shown
        terminal.wait_for("> ")
        terminal.type("/drafts 0\n")
        terminal.wait_for("> ")
        terminal.type("Define tiger\n")
        assert GREEN not in terminal.wait_for("no drafts")
        assert terminal.leave() == 0
        live.wait_idle()


def test_pieces_are_matched_with_reasoning_and_content(server: FakeServer) -> None:
    server.models = [{"id": "m", "owned_by": "paceline"}]
    pieces = [piece("hm", "target"), piece("</think>Yes", "accepted", 1), piece("!", "bonus")]
    parts = [{"reasoning_content": "hm"}, {"content": "Yes!"}]
    server.events = [
        {"choices": [{"index": 0, "delta": parts[0], "pieces": pieces}]},
        {"choices": [{"index": 0, "delta": parts[1]}]},
        *ANSWER[3:],
    ]
    model = _ServedModel(server.url, "m", None)
    asked = [{"role": "user", "content": "hi"}]
    found = list(model.answer(asked, SamplingParams(), _Answer(), Interrupts()))
    assert found == [("hm", "target", True), ("Yes", "accepted", False), ("!", "bonus", False)]


def test_a_model_that_is_not_served_is_told_at_once(server: FakeServer) -> None:
    result = chat("nosuch", "--url", server.url, stdin="")
    assert result.exit_code == 2
    assert "has no model 'nosuch'; it serves first, m, name" in result.stderr


def test_in_a_pipe_ctrl_c_in_the_last_step_ends_it(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def interrupted(self: Engine) -> Any:
        done = step(self)
        if any(emission.finish_reason is not None for emission in done):
            os.kill(os.getpid(), signal.SIGINT)
        return done

    monkeypatch.setattr(Engine, "step", interrupted)
    assert chat(tiny_path, "-n", "1", *FAST, stdin="a").exit_code == 130
