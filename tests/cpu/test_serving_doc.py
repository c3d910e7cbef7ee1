"""What docs/serving.md says is so: its commands run, its tables are those of the code."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from prometheus_client import Metric
from starlette.testclient import TestClient

from paceline import LLM
from paceline.cli import app
from paceline.engine.alarms import ALARM_NAMES
from paceline.llm import DEFAULT_MAX_SEQ_LEN
from paceline.server import http, protocol
from paceline.server.app import Settings, create_app
from paceline.server.engine_thread import EngineThread
from paceline.server.logs import Outcome, RequestLog, RequestRecord
from paceline.server.metrics import ServerMetrics
from paceline.server.openapi import document

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS: Any = typer.main.get_command(app)


def starts_a_server(block: tuple[str, str]) -> bool:
    return block[0] == "sh" and block[1].startswith("paceline serve")


RUN = [
    number
    for number, block in enumerate(BLOCKS)
    if block[0] in ("sh", "python") and not starts_a_server(block)
]


def section(title: str) -> str:
    found = re.search(rf"^#+ {title}$(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def coded(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def rows(text: str, heading: str) -> list[list[str]]:
    """The rows of the table whose first heading is given."""
    table = text[text.index(f"| {heading} |") :].split("\n\n")[0]
    lines = [line.strip("|").split("|") for line in table.splitlines()]
    return [[cell.strip() for cell in line] for line in lines[2:]]


class Server:
    """The server of the page's first command, at a port of its own."""

    def __init__(self, folder: Path) -> None:
        (command,) = [text for kind, text in BLOCKS[:1] if starts_a_server((kind, text))]
        args = shlex.split(command)
        assert args[0] == "paceline"
        assert "8000" in args
        args[args.index("8000")] = "0"
        self._tools = folder / "bin"
        self._tools.mkdir()
        for name, more in (("paceline", "-m paceline"), ("python", "")):
            tool = self._tools / name
            tool.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {more} "$@"\n')
            tool.chmod(0o755)
        self._env = {
            **os.environ,
            "PATH": f"{self._tools}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "127.0.0.1",
        }
        self.log = folder / "log"
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline", *args[1:]],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self._env,
            )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.line)
        assert found is not None, self.log.read_text()
        self.port = found[1]

    def run(self, kind: str, text: str) -> str:
        """What a block prints; it must succeed."""
        script = text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        command = ["bash", "-euo", "pipefail", "-c"] if kind == "sh" else ["python", "-c"]
        done = subprocess.run(
            [shutil.which(command[0], path=self._env["PATH"]) or command[0], *command[1:], script],
            capture_output=True,
            text=True,
            timeout=120,
            env=self._env,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            if self.process.stdout is not None:
                self.process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if shutil.which("curl") is None:
        pytest.skip("the page's commands need curl")
    pytest.importorskip("openai")
    server = Server(tmp_path_factory.mktemp("serving"))
    try:
        yield server
    finally:
        server.stop()


# Commands


def shape(value: Any) -> Any:
    """Names and kinds of a document, not its values."""
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, (int, float)) else type(value).__name__


@pytest.mark.parametrize("number", RUN)
def test_the_command_runs_and_answers_as_shown(server: Server, number: int) -> None:
    kind, text = BLOCKS[number]
    printed = server.run(kind, text)
    assert printed
    following = BLOCKS[number + 1] if number + 1 < len(BLOCKS) else ("", "")
    if following[0] == "json":
        assert shape(json.loads(printed)) == shape(json.loads(following[1]))
    elif "colour" not in text:
        assert '"error"' not in printed


def test_what_is_printed_at_the_start_is_shown(server: Server) -> None:
    shown = re.search(r"^ {4}(serving .*)$", PAGE, flags=re.MULTILINE)
    assert shown is not None
    assert server.line.strip() == shown[1].replace(":8000/", f":{server.port}/")


def test_answers_are_what_the_page_says_of_them(server: Server) -> None:
    for number in RUN:
        kind, text = BLOCKS[number]
        if "response_format" in text:
            message = json.loads(server.run(kind, text))["choices"][0]["message"]
            assert set(json.loads(message["content"])) == {"name", "large"}
        elif '"num_drafts": 0' in text:
            answer = json.loads(server.run(kind, text))
            assert answer["usage"]["speculation"]["drafted"] == 0
            assert "metrics" not in answer
        elif "paceline chat" in text:
            assert len(server.run(kind, text).splitlines()) == 2
        elif kind == "python":
            assert "'drafted': " in server.run(kind, text)
        elif '"stream": true' in text:
            events = server.run(kind, text).strip().split("\n\n")
            assert events[-1] == "data: [DONE]"
            last = json.loads(events[-2].removeprefix("data: "))
            assert {"usage", "metrics"} <= set(last)
            assert "speculation" in last["usage"]


def test_all_that_is_counted_has_its_line(server: Server) -> None:
    server.run(*BLOCKS[RUN[0]])
    exposed = server.run("sh", "curl -sS http://127.0.0.1:8000/metrics")
    counted = re.findall(r"^paceline_requests_total\{.*\} ([\d.]+)$", exposed, flags=re.MULTILINE)
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert len(lines) == sum(map(float, counted)) > 0
    assert set(re.findall(r'outcome="(\w+)"', exposed)) == {line["outcome"] for line in lines}
    drafted = re.search(r"^paceline_draft_tokens_total ([\d.]+)$", exposed, flags=re.MULTILINE)
    assert drafted is not None
    assert sum(line["drafted"] for line in lines) == float(drafted[1])
    emitted = re.search(r"^paceline_generation_tokens_total ([\d.]+)$", exposed, flags=re.MULTILINE)
    assert emitted is not None
    assert sum(line["completion_tokens"] for line in lines) == float(emitted[1])
    assert not any("zebra" in json.dumps(line) for line in lines)


def test_it_ends_in_order(tmp_path: Path) -> None:
    server = Server(tmp_path)
    # A signal that was handled in order is told to whoever waits for the process.
    assert server.stop() in (0, -signal.SIGTERM)
    assert "Traceback" not in server.log.read_text()


def test_all_but_what_the_page_names_wants_the_key(tiny_path: Path) -> None:
    open_to_all = re.search(r"all but (.*?) wants", section("Security"), flags=re.DOTALL)
    assert open_to_all is not None
    log = io.StringIO()
    metrics = ServerMetrics(model="m")
    with LLM(tiny_path, max_seq_len=256, max_num_seqs=1, backend="torch") as llm:
        door = create_app(
            EngineThread(llm),
            Settings(name="m", api_keys=("right",)),
            metrics=metrics,
            log=RequestLog(log),
        )
        with TestClient(door) as client:
            asked = {}
            for path, methods in document()["paths"].items():
                for method in methods:
                    if method in ("get", "post"):
                        given = {"json": {}} if method == "post" else {}
                        answer = client.request(method, path.replace("{model}", "m"), **given)
                        asked[path] = answer.status_code
            # With the key, and wrong in another way.
            right = {"Authorization": "Bearer right"}
            for body in ({"prompt": "x", "model": "other"}, {"prompt": "x", "max_tokens": 2}):
                client.post("/v1/completions", json=body, headers=right)
    assert {path for path, status in asked.items() if status != 401} == coded(open_to_all[1])
    records = [json.loads(line) for line in log.getvalue().splitlines()]
    outcomes = [(record["status"], record["outcome"]) for record in records]
    assert outcomes == [
        (401, "unauthorized"),
        (401, "unauthorized"),
        (404, "refused"),
        (200, "length"),
    ]
    exposed = metrics.render()[0].decode()
    for endpoint, outcome in (
        ("completions", "unauthorized"),
        ("chat/completions", "unauthorized"),
        ("completions", "refused"),
        ("completions", "length"),
    ):
        labels = f'endpoint="/v1/{endpoint}",outcome="{outcome}"'
        assert f"paceline_requests_total{{{labels}}} 1.0\n" in exposed
    assert "right" not in log.getvalue()


@pytest.mark.parametrize("block", [block for block in BLOCKS if starts_a_server(block)])
def test_commands_that_start_servers_are_understood(block: tuple[str, str]) -> None:
    for line in block[1].replace("\\\n", " ").splitlines():
        _, verb, *args = shlex.split(line)
        COMMANDS.commands[verb].make_context(verb, args)


def test_options_that_are_named_exist() -> None:
    there = set()
    for verb in ("serve", "chat"):
        for option in COMMANDS.commands[verb].params:
            there |= {*option.opts, *option.secondary_opts}
    named = {code.split()[0] for code in coded(PAGE) if code.startswith("--")}
    assert named
    assert named <= there


# Tables


def test_every_endpoint_is_listed() -> None:
    listed = {(*coded(path), method) for path, method, _ in rows(section("Endpoints"), "endpoint")}
    paths = document()["paths"]
    there = {
        (path, method.upper())
        for path, methods in paths.items()
        for method in methods
        if method in ("get", "post")
    }
    assert listed == there


def test_every_field_is_named_where_it_belongs() -> None:
    text = section("Fields")
    both = set()
    for names, _ in rows(text, "fields"):
        both |= coded(names)
    completions = coded(re.search(r"^Of `/v1/completions` only:(.*?)\n\n", text, re.M | re.S)[1])
    chats = coded(re.search(r"^Of `/v1/chat/completions` only:(.*?)Without", text, re.M | re.S)[1])
    ignored = coded(re.search(r"^Taken without effect,(.*?)\n\n", text, re.M | re.S)[1])
    refused = coded(re.search(r"^Refused unless(.*?)\n\n", text, re.M | re.S)[1])
    assert both == protocol.COMPLETION_FIELDS & protocol.CHAT_FIELDS
    assert completions == protocol.COMPLETION_FIELDS - protocol.CHAT_FIELDS
    assert chats == protocol.CHAT_FIELDS - protocol.COMPLETION_FIELDS
    assert ignored == protocol.IGNORED
    assert refused == protocol.NOT_SERVED
    assert coded(text) >= protocol._STREAM_OPTIONS


def default(verb: str, name: str) -> Any:
    (found,) = [one for one in COMMANDS.commands[verb].params if one.name == name]
    return found.default


def test_the_limits_are_those_of_the_code() -> None:
    limits = protocol.Limits(max_seq_len=DEFAULT_MAX_SEQ_LEN, bytes_per_token=1)
    settings = Settings(name="m")
    connections = http.http_server.__kwdefaults__["max_connections"]
    expected = {
        "bytes of a body (`--max-body-mb`)": default("serve", "max_body_mb") * 2**20,
        "seconds for a body to arrive": settings.body_seconds,
        "bytes of a header": http.HEADER_BYTES,
        "seconds for a request's header to arrive": http.HEADER_SECONDS,
        "connections": connections,
        "tokens of prompt and answer (`--max-seq-len`)": limits.max_seq_len,
        "answers that run at once (`--max-num-seqs`)": default("serve", "max_num_seqs"),
        "answers that wait (`--max-waiting`)": default("serve", "max_waiting"),
        "answers to a prompt (`n`)": limits.answers,
        "prompts of a completion": limits.prompts,
        "messages": limits.messages,
        "tools": limits.tools,
        "stop strings": limits.stops,
        "characters of all stop strings": limits.stop_chars,
        "seconds for a schema or grammar to compile": settings.grammar_seconds,
        "seconds a reader may take nothing of its stream": settings.write_seconds,
        "seconds of a step (`--stall-seconds`)": default("serve", "stall_seconds"),
        "seconds answers may go on at the end (`--shutdown-seconds`)": default(
            "serve", "shutdown_seconds"
        ),
    }
    assert settings.max_body_bytes == expected["bytes of a body (`--max-body-mb`)"]
    stated = {name: float(value) for name, value, _ in rows(section("Limits"), "limit")}
    assert stated == expected
    named = {field.name for field in fields(limits)} - {"max_seq_len", "bytes_per_token"}
    assert named == {"answers", "prompts", "messages", "tools", "stops", "stop_chars"}


def exposed_name(family: Metric) -> str:
    if family.type in ("counter", "info"):
        return f"{family.name}_{'total' if family.type == 'counter' else 'info'}"
    return str(family.name)


def metrics_table() -> list[list[str]]:
    """The rows of the page's table, made from a server's registry."""
    metrics = ServerMetrics(model="m", info={"drafter": "d"}, is_healthy=lambda: True)
    metrics.finished(RequestRecord(id="", endpoint="", status=200, outcome=Outcome.STOP, seconds=1))
    labels = {"paceline_draft_tokens_by": ["drafter"], "paceline_accepted_tokens_by": ["drafter"]}
    table = []
    for family in metrics.registry.collect():
        names = labels.get(family.name, [])
        for sample in family.samples:
            names = names or [name for name in sample.labels if name != "le"]
        if family.type == "info":
            names = []
        shown = ", ".join(f"`{name}`" for name in names)
        table.append([f"`{exposed_name(family)}`", family.type, shown, family.documentation])
    return table


def test_the_metrics_are_those_of_the_registry() -> None:
    expected = metrics_table()
    lines = "\n".join("| " + " | ".join(row) + " |" for row in expected)
    assert rows(section("What operators see"), "metric") == expected, f"should be\n{lines}"


def test_every_field_of_a_log_line_is_explained() -> None:
    record = RequestRecord(id="", endpoint="", status=200, outcome=Outcome.STOP, seconds=1)
    listed: set[str] = set()
    for names, meaning in rows(section("What operators see"), "field"):
        listed |= coded(names)
        if names == "`outcome`":
            assert coded(meaning) == set(Outcome)
    assert listed == {"time", "event", *record.to_dict()}


def test_every_alarm_is_explained() -> None:
    # One phrase each, in the order of the names.
    told = section("What operators see").replace("\n", " ")
    phrases = [
        "never accepted",
        "or always",
        "brings nothing",
        "second draft does better than its first",
        "finds nothing",
    ]
    assert len(phrases) == len(ALARM_NAMES)
    assert all(phrase in told for phrase in phrases)
