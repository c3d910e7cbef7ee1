"""``paceline serve`` as a process: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import app


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and the line that it printed once it was ready."""
    command = [sys.executable, "-m", "paceline", "serve", *options, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--num-threads", "1", "--max-seq-len", "256"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0], "it does not get ready"
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def test_it_serves_until_it_is_told_to_end() -> None:
    with served("--num-drafts", "2", "--shutdown-seconds", "5") as (process, line):
        found = re.fullmatch(
            r"serving paceline-bundled at (http://127\.0\.0\.1:\d+)/v1, drafter: \w+, "
            r"2 drafts a step\n",
            line,
        )
        assert found, line
        body = {"prompt": "def add(a, b):", "max_tokens": 100, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{found[1]}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert '"finish_reason":"length"' in rest[-4]
        output, errors = process.communicate(timeout=20)
        assert process.returncode in (0, -signal.SIGTERM)
        assert output == ""
        assert "warning" not in errors
        assert "Traceback" not in errors
        assert '"event": "request"' in errors


def test_an_open_door_is_warned_of(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of clients\nfirst\n\nsecond\n")
    with served("--host", "0.0.0.0", "--num-drafts", "0", "--no-request-log") as (process, line):
        assert "drafter: none" in line
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert "warning: 0.0.0.0 can be reached from other machines" in errors
    with served("--host", "0.0.0.0", "--api-key", f"@{keys}") as (process, line):
        url = re.sub(r".*:(\d+)/v1.*\n", r"http://127.0.0.1:\1", line)
        for key, status in (("first", 200), ("second", 200), ("third", 401), ("# of clients", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == status
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, errors = process.communicate(timeout=20)
        assert time.monotonic() - began < 8
        assert "warning" not in errors


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key", f"@{os.devnull}"], "holds no key"),
        (["--api-key", "@/no/such/file"], "cannot be read"),
        (["--max-body-mb", "-1"], "--max-body-mb is -1"),
        (["--max-body-mb", "0"], "--max-body-mb is 0"),
        (["--max-body-mb", "nan"], "--max-body-mb is nan"),
        (["--max-body-mb", "inf"], "--max-body-mb is inf"),
        *(
            (["--cors-origin", one], "--cors-origin is")
            for one in ("foo", "", "https://a.example/", "https://A.example", "https://a b")
        ),
        (["--num-drafts", "many"], "--num-drafts"),
        (["/no/such/model", "--port", "0"], "/no/such/model"),
    ],
)
def test_bad_options_are_said_in_a_line(options: list[str], says: str) -> None:
    ran = CliRunner().invoke(app, ["serve", *options])
    assert ran.exit_code == 2
    assert says in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", ["soak.py", "serving.py"])
def test_what_measures_the_server_runs(script: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    path = Path(__file__).parents[2] / "benchmarks" / script
    command = [sys.executable, str(path), "--quick", "--num-threads", "1", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(out.read_text())
    assert result["quick"] is True
    if script == "soak.py":
        assert result["wrong"] == {}
        assert result["requests"]["stream"] > 0


def test_a_port_in_use_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = CliRunner().invoke(app, ["serve", "/no/such/model", "--port", port])
    assert ran.exit_code == 2
    assert f"error: 127.0.0.1:{port} is in use by another program" in ran.stderr


@pytest.mark.parametrize("verb", ["generate", "chat", "serve", "bench", "inspect", "synth"])
def test_help_has_whole_names_at_80_columns(verb: str) -> None:
    shown = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "80"}).stdout
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    for parameter in command.params:
        for name in parameter.opts:
            assert not name.startswith("--") or name in shown, name
