"""The command line as a user meets it: text, documents, colours, exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import write_tiny
from typer.testing import CliRunner, Result

from paceline import LLM, SamplingParams
from paceline.cli import app
from paceline.text import ChatTemplate

FAST = ["--backend", "torch", "--max-seq-len", "256"]
CONTROL = re.compile(r"\x1b\[[0-9;]*m")


def call(*args: str | Path, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


def generate(path: Path, *args: str | Path, stdin: str | bytes | None = None) -> Result:
    return call("generate", path, *args, *FAST, "-n", "8", "--ignore-eos", stdin=stdin)


@pytest.fixture(scope="module")
def expected(tiny_path: Path) -> str:
    with LLM(tiny_path, num_drafts=0, max_seq_len=256, backend="torch") as llm:
        return llm.generate("def f", SamplingParams(max_tokens=8, ignore_eos=True))[0].text


def test_text_on_standard_output_and_a_summary_on_the_other(tiny_path: Path, expected: str) -> None:
    for drafts in ("0", "2"):
        result = generate(tiny_path, "-p", "def f", "-k", drafts)
        assert result.exit_code == 0
        assert result.stdout.rstrip("\n") == expected.rstrip("\n")
        (summary,) = result.stderr.splitlines()
        assert re.match(r"8 tokens in [\d.]+ s, [\d.]+ tok/s \(first after [\d.]+ s\); ", summary)
        assert ("no drafts" in summary) == (drafts == "0")
        assert ("tokens per step" in summary) == (drafts == "2")


def test_prompt_from_a_file_and_from_standard_input(
    tiny_path: Path, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("def f", encoding="utf-8")
    for result in (
        generate(tiny_path, "-f", file),
        generate(tiny_path, "-f", "-", stdin="def f"),
        generate(tiny_path, "-", stdin="def f"),
    ):
        assert result.exit_code == 0, result.stderr
        assert result.stdout.rstrip("\n") == expected.rstrip("\n")


def test_json_is_one_document_with_the_results_fields(tiny_path: Path, expected: str) -> None:
    result = generate(tiny_path, "-p", "def f", "--json")
    assert result.exit_code == 0
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert document["text"] == expected
    assert document["finish_reason"] == "length"
    assert document["usage"]["completion_tokens"] == len(document["token_ids"]) == 8
    assert {"num_steps", "num_drafted", "num_accepted", "mean_acceptance_length"} <= set(
        document["speculation"]
    )
    counts = document["speculation"]
    assert counts["num_drafted"] > 0
    assert counts["drafted_by"] == {"DeepseekV4MtpHead": counts["num_drafted"]}
    assert counts["accepted_by"] == {"DeepseekV4MtpHead": counts["num_accepted"]}


def test_chat_wraps_the_text_in_the_plain_template(tiny_path: Path) -> None:
    plain = generate(tiny_path, "-p", "hi", "--json")
    chat = generate(tiny_path, "-p", "hi", "--chat", "--json")
    with LLM(tiny_path, num_drafts=0, max_seq_len=256, backend="torch") as llm:
        text = "<｜User｜>hi<｜Assistant｜></think>"
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        (want,) = llm.generate(text, params, allow_special=True)
    assert json.loads(chat.stdout)["token_ids"] == want.token_ids
    assert json.loads(chat.stdout)["usage"] != json.loads(plain.stdout)["usage"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-p", ""], "the prompt is empty"),
        ([], "0 prompts are given; give one"),
        (["-p", "a", "-f", "b"], "2 prompts are given"),
        (["-f", "/nowhere/x"], "/nowhere/x cannot be read: No such file"),
        (["odd", "-p", "x"], "2 prompts are given"),
        (["odd"], "the argument 'odd' is not understood"),
        (["-p", "x", "-k", "9"], "num_drafts is 9; allowed is an integer 0 to 8"),
        (["-p", "x" * 300], "the prompt has 301 tokens; allowed are 1 to 255"),
        (["-p", "x", "--device", "tpu"], "device is 'tpu'"),
        (["-p", "x", "--dtype", "int4"], "dtype is 'int4'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tiny_path: Path, args: list[str], message: str
) -> None:
    result = generate(tiny_path, *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_more_bad_input(tiny_path: Path, tmp_path: Path) -> None:
    result = call("generate", tiny_path, "-p", "x", "-n", "0")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: max_tokens is 0; allowed is an integer of at least 1\n"
    result = call("generate", tmp_path / "none", "-p", "x")
    assert result.exit_code == 2
    assert "does not exist; a checkpoint folder is needed" in result.stderr
    bad = tmp_path / "latin"
    bad.write_bytes(b"caf\xe9")
    result = generate(tiny_path, "-f", bad)
    assert result.exit_code == 2
    assert "is not UTF-8" in result.stderr
    headless = write_tiny(tmp_path, drafter=None)
    result = generate(headless, "-p", "x", "-k", "2")
    assert result.exit_code == 2
    assert "MTP" in result.stderr
    assert generate(headless, "-p", "x").exit_code == 0
    assert call("generate", tiny_path, "-p", "x", "--nonsense").exit_code == 2


def test_a_failed_run_is_exit_code_1(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.models.deepseek_v4.transformer import DeepseekV4Model
    from paceline.models.step import TargetOutput

    forward = DeepseekV4Model.forward

    def poisoned(self: DeepseekV4Model, inputs: object, pools: object) -> TargetOutput:
        out = forward(self, inputs, pools)  # type: ignore[arg-type]
        return TargetOutput(logits=out.logits * float("nan"), hiddens=out.hiddens)

    monkeypatch.setattr(DeepseekV4Model, "forward", poisoned)
    result = generate(tiny_path, "-p", "x", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["finish_reason"] == "error"
    assert "error: " in result.stderr
    assert "finite" in result.stderr


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "paceline", *map(str, args)]


def on_a_terminal(args: list[str], *, until: str = "", send: int | None = None) -> tuple[str, int]:
    """Run with all three streams on a pseudo-terminal; what it showed, and its exit code."""
    parent, child = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    env |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(args, stdin=child, stdout=child, stderr=child, env=env) as process:
        os.close(child)
        shown = b""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if not select.select([parent], [], [], 1)[0]:
                continue
            try:
                part = os.read(parent, 65536)
            except OSError:
                break
            if not part:
                break
            shown += part
            if send is not None and until.encode() in shown:
                process.send_signal(send)
                send = None
        os.close(parent)
        return shown.decode("utf-8", "replace"), process.wait(timeout=60)


def test_accepted_drafts_are_tinted_on_a_terminal_only(tiny_path: Path, tmp_path: Path) -> None:
    # The tiny model's own drafts are never right, so a drafter that is right is put in its place.
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from paceline import LLM, SamplingParams\n"
        "from paceline.cli import app, options\n"
        "from paceline.draft import OracleProposer\n"
        "path = sys.argv[2]\n"
        "quick = dict(max_seq_len=256, backend='torch')\n"
        "with LLM(path, num_drafts=0, **quick) as llm:\n"
        "    result = llm.generate('def f', SamplingParams(max_tokens=9, ignore_eos=True))[0]\n"
        "texts = [[*result.prompt_token_ids, *result.token_ids]]\n"
        "def load(model, **given):\n"
        "    return LLM(model, num_drafts=3, proposer=OracleProposer(texts), **quick)\n"
        "options.load = load\n"
        "app()\n"
    )
    args = ["generate", str(tiny_path), "-p", "def f", "-n", "9", "--ignore-eos"]
    shown, code = on_a_terminal([sys.executable, str(script), *args])
    assert code == 0, shown
    assert "\x1b[32m" in shown
    assert "6 of 6 drafts accepted" in shown
    piped = subprocess.run(
        [sys.executable, str(script), *args], capture_output=True, check=True, timeout=120
    )
    assert b"\x1b" not in piped.stdout
    assert b"\x1b" not in piped.stderr


def test_ctrl_c_keeps_the_text_and_exits_with_130(tiny_path: Path) -> None:
    args = command(
        "generate", tiny_path, "-p", "def f", "-n", "4000", "--ignore-eos", "--backend", "torch",
        "--max-seq-len", "4096",
    )  # fmt: skip
    # Unbuffered: what read(1) took beyond its byte would be lost to communicate().
    process = subprocess.Popen(args, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first
    assert (first + rest).endswith(b"\n")
    assert errors.splitlines()[-1:] == [b"interrupted"]
    assert b"Traceback" not in errors


@pytest.mark.parametrize(
    "verb",
    [
        ["generate", "-p", "x", "-n", "400", "--ignore-eos", "--max-seq-len", "1024"],
        ["generate", "-p", "x", "-n", "4", "--json"],
        ["inspect"],
        ["inspect", "--json"],
    ],
)
def test_a_reader_that_leaves_ends_it_quietly(tiny_path: Path, verb: list[str]) -> None:
    more = ["--backend", "torch"] if verb[0] == "generate" else []
    args = command(verb[0], tiny_path, *verb[1:], *more)
    process = subprocess.Popen(args, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    if "400" in verb:
        assert process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    # The code that the shell gives a program which SIGPIPE ended.
    assert process.wait(timeout=60) == 141
    assert errors == b""


def test_chat_ends_where_the_layout_says(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a tokenizer without role markers, whose turns are paragraphs.
    monkeypatch.setattr(
        ChatTemplate, "for_tokenizer", classmethod(lambda cls, tokenizer: ChatTemplate.plain())
    )
    seen: list[SamplingParams] = []
    stream = LLM.stream

    def noted(self: LLM, prompts: Any, params: SamplingParams, **named: Any) -> Any:
        seen.append(params)
        return stream(self, prompts, params, **named)

    monkeypatch.setattr(LLM, "stream", noted)
    for more in ([], ["--stop", "zz"], ["--chat"], ["--chat", "--stop", "zz"]):
        assert call("generate", "-p", "hi", "-n", "4", *more).exit_code == 0
    turn = "\n\n### User\n"
    assert [params.stop for params in seen] == [None, ("zz",), (turn,), ("zz", turn)]


def test_what_a_grammar_forced_has_a_tint_of_its_own() -> None:
    args = command("generate", "-p", "x", "-n", "30", "--regex", "yes yes yes|no [0-9]{3}")
    shown, code = on_a_terminal(args)
    assert code == 0, shown
    assert "\x1b[36m" in shown
    assert re.search(r"yes yes yes|no \d{3}", CONTROL.sub("", shown))


def test_version_help_and_module() -> None:
    result = call("--version")
    assert (result.exit_code, result.stdout.split()[0]) == (0, "paceline")
    result = call("--help")
    for verb in ("generate", "bench", "inspect", "synth"):
        assert verb in CONTROL.sub("", result.stdout)
    done = subprocess.run(command("--version"), capture_output=True, check=True, text=True)
    assert done.stdout.startswith("paceline ")


def test_bench_compares_and_writes(tiny_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    numbers, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    result = call(
        "bench", tiny_path, "-k", "2", "-n", "6", "-b", "3", "--repeats", "2", "--json", numbers,
        "--plot", picture, *FAST,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "tok/s" in result.stdout
    document = json.loads(numbers.read_text())
    assert document["tokens_equal"] is True
    assert [run["num_drafts"] for run in document["runs"]] == [0, 2]
    assert document["runs"][0]["over_off"] == 1.0
    assert all(len(run["tokens_per_second_each"]) == 2 for run in document["runs"])
    assert document["runs"][1]["speculation"]["num_drafted"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-k", "9"], "--num-drafts is '9'; allowed are numbers 0 to 8 and auto, with"),
        (["-k", "a"], "--num-drafts is 'a'"),
        (["--repeats", "0"], "--repeats is 0; allowed is at least 1"),
        (["-b", "0"], "--batch-size is 0"),
        (["--json", "/nowhere/x.json"], "/nowhere/x.json cannot be written: its folder"),
        (["--prompts", "/nowhere/x.json"], "/nowhere/x.json cannot be read"),
    ],
)
def test_bench_refuses_before_it_runs(tiny_path: Path, args: list[str], message: str) -> None:
    result = call("bench", tiny_path, *args)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")


def test_plot_without_matplotlib(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The package's attribute of that name is the verb, not the module.
    monkeypatch.setattr(sys.modules["paceline.cli.bench"], "find_spec", lambda name: None)
    result = call("bench", tiny_path, "--plot", "x.png")
    assert result.exit_code == 2
    assert "--plot needs matplotlib: pip install 'paceline[plot]'" in result.stderr


def test_bench_refuses_a_picture_it_cannot_draw_before_it_runs(tiny_path: Path) -> None:
    result = call("bench", tiny_path, "--plot", "speed.xyz")
    assert result.exit_code == 2
    assert "speed.xyz; allowed are names that end in .png" in result.stderr
    assert result.stdout == ""
