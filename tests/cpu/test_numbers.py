"""Figures in documents come from result files, and nothing else gets in."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


numbers = load(ROOT / "scripts" / "update_numbers.py")
common = load(ROOT / "benchmarks" / "common.py")


def legs(rates: dict[str, tuple[str, int, float]]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "engine": engine,
            "num_drafts": drafts,
            "threads": 1,
            "decode_tokens_per_second": {"median": rate, "low": rate - 5, "high": rate + 5},
            "end_to_end_tokens_per_second": {"median": rate / 2, "low": 1.0, "high": 2.0},
            "speculation": {"mean_acceptance_length": 2.25} if drafts else None,
            "same_as_paceline": {"sequences": 12, "equal": 11, "mean_common_prefix": 126.5},
        }
        for name, (engine, drafts, rate) in rates.items()
    ]


@pytest.fixture
def decode() -> dict[str, Any]:
    run = legs(
        {
            "transformers, 1 thr": ("transformers", 0, 40.0),
            "llama.cpp, no drafts": ("llama.cpp", 0, 300.0),
            "llama.cpp, 2 drafts": ("llama.cpp", 2, 320.0),
            "paceline, no drafts": ("paceline", 0, 280.0),
            "paceline, 1 draft": ("paceline", 1, 350.0),
            "paceline, 2 drafts": ("paceline", 2, 392.0),
        }
    )
    ratios = {
        "off_over_transformers": 7.0,
        "on_over_off": 1.4,
        "best_num_drafts": 2,
        "best_over_llama_cpp_best": 1.225,
    }
    return {
        "benchmark": "decode",
        "quick": False,
        "command": ["decode.py", "--json", "x"],
        "date": "2026-01-01",
        "commit": "0123456789abcdef",
        "clean": True,
        "versions": {"python": "3.11", "torch": "2.13"},
        "cpu": "A Processor",
        "cores": 2,
        "device": "cpu",
        "platform": "Linux x86_64",
        "load_average_before": 0.1,
        "checkpoint_sha256": "c" * 64,
        "prompts_sha256": "d" * 64,
        "settings": {"classes": ["a", "b"], "repeats": 5, "threads": None},
        "tokens_equal": True,
        "ratios": ratios,
        "runs": [{"batch": 1, "legs": run, "ratios": ratios}],
    }


@pytest.fixture
def project(tmp_path: Path, decode: dict[str, Any]) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "decode.json").write_text(json.dumps(decode))
    (tmp_path / "README.md").write_text(
        "# x\n\n<!-- numbers:decode-summary -->\n<!-- /numbers -->\n\n"
        "So: <!-- numbers:decode-sentence --><!-- /numbers -->\n"
    )
    return tmp_path


def run(project: Path, *arguments: str) -> int:
    status: int = numbers.main([*arguments, "--root", str(project)])
    return status


def test_regions_are_written_and_then_up_to_date(project: Path) -> None:
    assert run(project, "--check") == 1
    assert run(project) == 0
    text = (project / "README.md").read_text()
    assert "| 1 | paceline, 2 drafts | 392 | 387 to 397 |" in text
    assert "paceline, 1 draft |" not in text
    assert "decodes 7.0 times as fast as `transformers`" in text
    assert "2 drafts a step it decodes 1.40 times as fast as without, still 1.2 times" in text
    assert run(project, "--check") == 0
    assert run(project) == 0
    assert (project / "README.md").read_text() == text


def test_differing_tokens_are_not_published(project: Path, decode: dict[str, Any]) -> None:
    stored = project / "benchmarks" / "results" / "decode.json"
    stored.write_text(json.dumps({**decode, "tokens_equal": False}))
    assert run(project) == 1


def test_tables_of_one_batch(decode: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "decode.json").write_text(json.dumps(decode))
    results = numbers.Results(tmp_path)
    table = numbers.render("decode-batch-1", results)
    assert "| paceline | 2 | 1 | 392 | 387 to 397 | 1.40 | 196 | 2.25 | 11 of 12 |" in table
    assert "no run at batch 8" in numbers.render("decode-batch-8", results)
    assert "commit 0123456789ab (clean)" in numbers.render("decode-environment", results)


def test_paths_elsewhere_are_shown_by_name() -> None:
    assert common.shown("/some/where/llama-server") == "llama-server"
    assert common.shown(str(ROOT / "benchmarks" / "x.json")) == "benchmarks/x.json"
    assert common.shown("--json") == "--json"


def test_check_fails_when_a_region_is_edited(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(project)
    readme = project / "README.md"
    edited = readme.read_text().replace("392", "492")
    readme.write_text(edited)
    assert run(project, "--check") == 1
    assert "-| 1 | paceline, 2 drafts | 492" in capsys.readouterr().err
    assert readme.read_text() == edited, "--check changes nothing"


def test_every_region_has_content_without_results(tmp_path: Path) -> None:
    results = numbers.Results(tmp_path)
    for name in [*numbers.RENDER, "text-demo"]:
        assert numbers.render(name, results)


def test_a_captured_text_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "demo.txt").write_text("$ paceline\n9 tok/s\n")
    text = numbers.rewrite("<!-- numbers:text-demo --><!-- /numbers -->", numbers.Results(tmp_path))
    assert "```text\n$ paceline\n9 tok/s\n```" in text
    assert not list(numbers.stray_figures(text))


@pytest.mark.parametrize(
    "text",
    [
        "<!-- numbers:no-such-region --><!-- /numbers -->",
        "<!-- numbers:decode-summary -->",
        "<!-- /numbers -->",
        "<!-- numbers:decode-summary --> <!-- numbers:decode-sentence --><!-- /numbers -->",
    ],
)
def test_malformed_regions_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(numbers.NumbersError):
        numbers.rewrite(text, numbers.Results(tmp_path))


def test_a_quick_result_is_refused(project: Path, decode: dict[str, Any]) -> None:
    stored = project / "benchmarks" / "results" / "decode.json"
    stored.write_text(json.dumps({**decode, "quick": True}))
    assert run(project) == 1


@pytest.mark.parametrize(
    "line",
    [
        "It does 312 tok/s.",
        "It does 312.5 tokens per second.",
        "It does 1,200 tokens/s.",
        "It is 1.4x faster.",
        "It is 3 × faster.",
        "It is 7 times as fast.",
        "80% are accepted",
        "80.5 % are accepted",
        "80 percent are accepted",
    ],
)
def test_figures_typed_by_hand_are_found(line: str) -> None:
    assert [number for number, _ in numbers.stray_figures(f"fine\n{line}")] == [2]
    assert not list(numbers.stray_figures(f"{line} {numbers.EXEMPT}"))
    inside = f"<!-- numbers:x -->\n{line}\n<!-- /numbers -->\nfine"
    assert not list(numbers.stray_figures(inside))


@pytest.mark.parametrize(
    "line",
    ["batch 8, K = 3, 2 cores", "tok/s is a unit", "a 4x4 matrix", "torch 2.13, 1x32 blocks"],
)
def test_other_numbers_are_left_alone(line: str) -> None:
    assert not list(numbers.stray_figures(line))


def test_a_line_after_a_region_keeps_its_number() -> None:
    text = "<!-- numbers:x -->\na\nb\n<!-- /numbers -->\n5 tok/s"
    assert list(numbers.stray_figures(text)) == [(5, "5 tok/s")]


def test_documents_of_this_project_are_up_to_date() -> None:
    assert numbers.main(["--check"]) == 0


def test_acceptance_follows_from_counts() -> None:
    # Four steps of two drafts: none, one, two and two accepted; one step of one draft, accepted.
    one = {
        "num_steps": 6,
        "num_draft_steps": 5,
        "num_drafted": 9,
        "num_accepted": 6,
        "drafted_at": [5, 4],
        "accepted_at": [4, 2],
    }
    got = common.acceptance(common.add_counts([one]))
    assert got["mean_acceptance_length"] == pytest.approx(1 + 6 / 5)
    assert got["histogram"] == [1, 2, 2]
    assert got["by_position"] == pytest.approx([4 / 5, 2 / 4])
    assert got["by_position_conditional"] == pytest.approx([4 / 5, 2 / 4])
    twice = common.add_counts([one, {**one, "drafted_at": [5], "accepted_at": [4]}])
    assert twice["drafted_at"] == [10, 4]
    assert twice["num_accepted"] == 12


def test_ratios_agree_with_the_engines_own() -> None:
    from paceline.types import SpeculationStats

    stats = SpeculationStats()
    for drafted, accepted in ((3, 0), (3, 3), (3, 1), (2, 2), (0, 0)):
        stats.record(num_drafted=drafted, num_accepted=accepted)
    got = common.acceptance(common.counts(stats))
    assert got["mean_acceptance_length"] == stats.mean_acceptance_length
    assert got["acceptance_rate"] == stats.acceptance_rate
    assert got["by_position"] == stats.acceptance_by_position
    assert got["by_position_conditional"] == stats.conditional_acceptance_by_position
    assert sum(got["histogram"]) == stats.num_draft_steps


def test_prompts_are_chosen_by_class(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"class": c, "id": f"{c}-{i:02d}", "prompt": f"{c}{i}"} for c in "ab" for i in range(3)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert [p.text for p in common.load_prompts(path, per_class=2)] == ["a0", "a1", "b0", "b1"]
    assert [p.kind for p in common.load_prompts(path, kinds=["b"])] == ["b"] * 3
    with pytest.raises(SystemExit, match="there are a, b"):
        common.load_prompts(path, kinds=["c"])


def spread(value: float) -> dict[str, Any]:
    return {"median": value, "low": value - 0.01, "high": value + 0.01, "values": [value]}


def test_times_of_mechanisms_and_draft_lengths(tmp_path: Path) -> None:
    speed = [
        {"name": "as it is", "tokens_per_second": spread(300.0), "over_first": spread(1.0)},
        {"name": "1024 ids", "tokens_per_second": spread(330.0), "over_first": spread(1.1)},
    ]
    scoring = [{"rows": 1, "seconds": {"0": 4e-5, "1024": 1e-5}}]
    (tmp_path / "mechanisms-speed.json").write_text(
        json.dumps({"speed": [{"batch": 1, "runs": speed}], "scoring": scoring})
    )
    row = {
        "name": "all",
        "fixed": {
            n: {"tokens_per_second": spread(x), "over_off": spread(x / 200)}
            for n, x in (("0", 200.0), ("2", 260.0))
        },
        "auto": {
            "tokens_per_second": spread(256.0),
            "mean_drafts": 1.75,
            "over_off": spread(1.28),
            "over_best_fixed": spread(0.985),
            "first_round_over_best_fixed": 0.9,
        },
        "best_fixed": 2,
    }
    lengths = {"tokens_equal": True, "runs": [{"batch": 1, "rows": [row]}]}
    (tmp_path / "lengths.json").write_text(json.dumps(lengths))
    results = numbers.Results(tmp_path)
    assert "| 1024 ids | 330 | 1.10 | 1.09 to 1.11 |" in numbers.render(
        "mechanisms-speed-1", results
    )
    assert "no run at batch 8" in numbers.render("mechanisms-speed-8", results)
    assert "| 1 | 1,024 | 10 | 0.25 |" in numbers.render("mechanisms-scoring", results)
    table = numbers.render("lengths-batch-1", results)
    assert "| **all** | 200 | 1.30 | 1.28 | 1.75 | 0.985 | 0.975 to 0.995 |" in table
    assert "no run at batch 8" in numbers.render("lengths-batch-8", results)
    assert "0.985 times as fast as the best fixed length, 2" in numbers.render(
        "lengths-sentence", results
    )
    (tmp_path / "lengths.json").write_text(json.dumps({**lengths, "tokens_equal": False}))
    with pytest.raises(numbers.NumbersError, match="tokens with drafts differ"):
        numbers.render("lengths-sentence", results)


def test_rows_that_differ_from_the_heads_are_not_published(tmp_path: Path) -> None:
    run = {"num_drafts": 3, "exact_equals_head": False, "policies": []}
    (tmp_path / "acceptance.json").write_text(json.dumps({"rows": [run]}))
    with pytest.raises(numbers.NumbersError, match="differs from the head"):
        numbers.render("acceptance-rows-sentence", numbers.Results(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("script", ["decode.py", "acceptance.py", "lengths.py"])
def test_benchmarks_run(script: str, tmp_path: Path) -> None:
    from paceline.models.deepseek_v4.synth import preset_config, write_synthetic

    if script == "decode.py":
        pytest.importorskip("transformers")
    model = write_synthetic(
        tmp_path / "model",
        preset_config("tiny"),
        dtype="fp4",
    )
    out = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--quick", "--model", str(model)]
    # The byte tokenizer makes long prompts of them; short ones do here.
    prompts = tmp_path / "prompts.jsonl"
    kinds = ("code_completion", "humaneval")
    rows = [
        {"class": kind, "id": f"{kind}-{i:02d}", "prompt": f"def f{i}(value):\n    return "}
        for kind in kinds
        for i in range(4)
    ]
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    command += ["--prompts", str(prompts), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(out.read_text())
    assert result["tokens_equal"] is True
    assert result["quick"] is True
    if script == "decode.py":
        assert result["ratios"]["off_over_transformers"] > 0
        assert result["ratios"]["on_over_off"] > 0
        assert result["ratios"]["best_num_drafts"] in (1, 2)
        assert "on_over_off" in result["ratios"]["batch_8"]
        same = {leg["name"]: leg["same_as_paceline"] for leg in result["runs"][0]["legs"]}
        assert same["transformers, 1 thr"]["equal"] == 2
    elif script == "lengths.py":
        assert [run["batch"] for run in result["runs"]] == [1, 8]
        assert list(result["runs"][0]["rows"][0]["fixed"]) == ["0", "1", "3"]
    else:
        assert [run["num_drafts"] for run in result["runs"]] == [1, 3]
