"""The second turn of a conversation, through the public door and with the bundled model."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.types import ConfigError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def turns() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import turns as module
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[LLM, LLM]]:
    """One that keeps prefixes, one that does not."""
    options: dict[str, Any] = {"max_num_seqs": 2, "max_seq_len": 1024, "num_threads": 1}
    with LLM(**options) as warm, LLM(prefix_cache=False, **options) as cold:
        yield warm, cold


def test_second_turns_draft_as_well_as_cold_ones(turns: Any, both: tuple[LLM, LLM]) -> None:
    some = turns.conversations(BENCHMARKS / "prompts.jsonl", 6)
    assert len({one.kind for one in some}) == 6
    records = turns.measure(*both, some, answer=60)
    summary = turns.summarise(records)
    assert turns.faults(summary) == []
    assert summary["acceptance_difference"] == 0
    assert summary["warm"] == summary["cold"]
    assert summary["warm"]["num_drafted"] > 50
    # Conversations of more than a block are found, each as far as the formula says.
    assert sum(r["cached_tokens"] for r in records) > 128
    for record in records:
        assert record["cached_tokens"] == 128 * (record["known_tokens"] // 128)


def test_a_broken_promise_is_told(turns: Any) -> None:
    good = {"tokens_equal": True, "acceptance_difference": -0.019, "most_read_anew": 255}
    assert turns.faults(good) == []
    for name, value in (
        ("tokens_equal", False),
        ("acceptance_difference", 0.02),
        ("acceptance_difference", -0.03),
        ("most_read_anew", 256),
    ):
        bad = copy.copy(good)
        bad[name] = value
        assert len(turns.faults(bad)) == 1


def test_the_stored_run_is_whole_and_keeps_what_is_promised(turns: Any) -> None:
    stored = json.loads((BENCHMARKS / "results" / "turns.json").read_text(encoding="utf-8"))
    asked = [one.name for one in turns.conversations(BENCHMARKS / "prompts.jsonl", 50)]
    assert [run["id"] for run in stored["runs"]] == asked
    assert not stored["quick"]
    assert turns.faults(stored["summary"]) == []
    for side in ("warm", "cold"):
        total = sum(run[side]["num_drafted"] for run in stored["runs"])
        assert stored["summary"][side]["num_drafted"] == total > 1000


def test_the_benchmark_asks_as_many_as_it_is_told(turns: Any) -> None:
    some = turns.conversations(BENCHMARKS / "prompts.jsonl", 50)
    assert len({one.name for one in some}) == 50
    assert {one.kind for one in some} >= {"define_chat", "code_completion", "docs_prose"}
    for one in some:
        assert one.second
        if one.kind == "define_chat":
            assert one.second.count(turns.USER) == 1


def test_usage_says_what_was_cached_and_a_switch_turns_it_off(both: tuple[LLM, LLM]) -> None:
    warm, cold = both
    prompt = [5 + n % 300 for n in range(300)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    tokens = []
    for llm, want in ((warm, (0, 256)), (cold, (0, 0))):
        for expected in want:
            (result,) = llm.generate([prompt], params)
            assert result.usage.cached_tokens == expected
            assert result.to_dict()["usage"]["cached_tokens"] == expected
            assert result.usage.prompt_tokens == 300
            tokens.append(result.token_ids)
    assert all(ids == tokens[0] for ids in tokens)
    assert cold.engine.prefix is None
    assert cold.engine.num_prefix_lookups == 0
    assert warm.engine.prefix is not None
    assert warm.engine.num_prefix_hits > 0
    assert warm.engine.num_prefix_tokens >= 256
    warm.engine.clear_prefix_cache()
    assert warm.generate([prompt], params)[0].usage.cached_tokens == 0


def test_a_closed_stream_leaves_a_prefix_that_is_right(both: tuple[LLM, LLM]) -> None:
    warm, _ = both
    prompt = [7 + n % 211 for n in range(200)]
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    for count, _ in enumerate(warm.stream([prompt], params)):
        if count == 5:
            break
    warm.engine.check_idle()
    here, there = (llm.generate([prompt], params)[0] for llm in both)
    assert here.token_ids == there.token_ids
    assert here.usage.cached_tokens == 128
    assert here.speculation.to_dict() == there.speculation.to_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache": 1}, "prefix_cache is 1; allowed is True or False"),
        ({"prefix_cache_bytes": 0}, "prefix_cache_bytes is 0; allowed is an integer of at least 1"),
        ({"prefix_cache_bytes": 1.5}, "prefix_cache_bytes is 1.5"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**options)
