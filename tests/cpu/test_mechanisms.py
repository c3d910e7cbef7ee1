"""What the benchmarks of acceptance, mechanisms and draft lengths do, on the tiny model."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.types import SpeculationStats

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def module(name: str) -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


common, rows, mechanisms, lengths, acceptance = (
    module(name) for name in ("common", "rows", "mechanisms", "lengths", "acceptance")
)


@pytest.fixture(scope="module")
def work(tiny_path: Path) -> Any:
    prompts = [
        common.Prompt(f"{kind}-{n:02d}", kind, f"def {kind}{n}(a, b):\n    return a{n} + ")
        for kind in ("humaneval", "docs_prose")
        for n in range(1)
    ]
    options = {
        "max_num_seqs": 2,
        "max_seq_len": 512,
        "backend": "torch",
        "num_threads": 1,
        "prefix_cache": False,
    }
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(tiny_path, num_drafts=0, **options) as llm:
        done = mechanisms.finished(llm, [p.text for p in prompts], params)
    return mechanisms.Work(
        model=str(tiny_path),
        prompts=prompts,
        params=params,
        options=options,
        plain=[list(r.token_ids) for r in done],
        num_drafts=3,
    )


def test_exact_rows_draft_what_the_head_drafts_and_no_policy_changes_tokens(
    work: Any, monkeypatch: Any
) -> None:
    some = [p for p in rows.POLICIES if p.name in ("exact", "recursion", "blind")]
    monkeypatch.setattr(rows, "POLICIES", some)
    (run,) = acceptance.compare_rows(
        work.model, work.prompts, work.params, work.plain, work.options, lengths=[3], per_class=1
    )
    assert run["exact_equals_head"]
    assert [one["name"] for one in run["policies"]] == ["exact", "recursion", "blind"]
    assert all(one["tokens_equal"] for one in run["policies"])
    assert run["policies"][0]["all"]["num_drafted"] > 0


class Block:
    """Stands for the MTP block: a row is (key, token, first stream); drafts count up from one."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def write_rows(self, inputs: Any, ring: Any) -> None:
        for key, slot, embed, streams in zip(
            inputs.keys, inputs.slots, inputs.embeds, inputs.hiddens, strict=True
        ):
            row = torch.tensor([float(key), float(embed[0]), float(streams[0, 0]), 0.0])
            ring.rows[slot, key % ring.rows.shape[1]] = row

    def forward(self, inputs: Any, ring: Any) -> Any:
        self.write_rows(inputs, ring)
        key, first = int(inputs.keys[0]), int(inputs.first_keys[0])
        places = torch.arange(first, key + 1) % ring.rows.shape[1]
        self.seen.append(ring.rows[inputs.slots[0], places, 0].tolist())
        normed = inputs.embeds + 1
        return argparse.Namespace(normed=normed, streams=torch.full_like(inputs.hiddens, -1.0))


class Table:
    table = torch.zeros(1)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.float()[:, None].expand(-1, 4)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(x[:, 0].long(), 64).float()


def drafter(**changes: Any) -> tuple[Any, Block]:
    block = Block()
    config = argparse.Namespace(sliding_window=128, head_dim=4, hc_mult=2, hidden_size=4)
    built = argparse.Namespace(mtp=block, embed_tokens=Table(), lm_head=Table())
    context = argparse.Namespace(built=built, config=config, max_num_seqs=2)
    return rows.RowsDrafter(context, rows.Policy(name="x", **changes)), block


def streams(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None, None].expand(-1, 2, 4)


def after(accepted: int, **changes: Any) -> tuple[list[float], list[float], list[float]]:
    """Keys, tokens and streams of the rows behind a prompt of 4 and one chain of 3 drafts."""
    one, block = drafter(**changes)
    state = one.alloc_state()
    # Token n of the prompt is 10 + n, its streams are n / 10.
    one.prefill_drafter([10, 11, 12, 13], streams(0.0, 0.1, 0.2, 0.3), state, first_position=0)
    request = argparse.Namespace(
        last_token=14, position=4, target_hidden=streams(0.3)[0], num_drafts=3
    )
    draft = one.propose(request, state)
    assert draft.tokens == [15, 16, 17]
    one.after_verify(accepted, state)
    truth = streams(*(0.4 + 0.1 * n for n in range(accepted)))
    one.catchup_batch([draft.tokens[:accepted]], [truth], [5], [state])
    held = torch.stack(state.rows)
    *before, own = block.seen[0]
    assert own == 3.0
    assert before == held[: len(before), 0].tolist()
    return tuple(held[:, n].tolist() for n in range(3))  # type: ignore[return-value]


def near(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_exact_rows_come_from_the_targets_streams(accepted: int) -> None:
    keys, tokens, made_of = after(accepted)
    count = 4 + accepted
    assert keys == [float(n) for n in range(count)]
    assert tokens == [11.0 + n for n in range(count)]
    assert made_of == near([0.1 * n for n in range(count)])


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rows_of_the_recursion_hold_its_own_streams(accepted: int) -> None:
    keys, tokens, made_of = after(accepted, keep="accepted", catch_up="last")
    count = 4 + accepted
    assert keys == [float(n) for n in range(count)]
    assert tokens == [11.0 + n for n in range(count)]
    drafted = [-1.0] * min(accepted, 2) + ([0.6] if accepted == 3 else [])
    assert made_of == near([0.0, 0.1, 0.2, 0.3, *drafted])
    gap, _, _ = after(accepted, keep="accepted", catch_up="none")
    assert gap == [float(n) for n in range(min(count, 6))]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_a_short_rollback_loses_a_row_each_step(accepted: int) -> None:
    keys, _, _ = after(accepted, keep="short", catch_up="none")
    assert keys == [float(n) for n in range(3 + accepted)]
    assert after(accepted, catch_up="none")[0] == [0.0, 1.0, 2.0, 3.0]


def test_mistakes_about_the_prompt() -> None:
    assert after(0, prompt_rows=0)[0] == [3.0]
    assert after(0, prompt_rows=2)[0] == [1.0, 2.0, 3.0]
    assert after(0, prompt_shift=1)[1] == [10.0, 11.0, 12.0, 14.0]
    assert after(2, stream_lag=1)[2] == near([0.0, 0.0, 0.1, 0.2, 0.3, 0.4])


def test_rows_left_move_together_and_the_window_bounds_them() -> None:
    one, block = drafter(keep="short", catch_up="none", prompt_rows=0)
    state = one.alloc_state()
    for position in range(4, 300, 2):
        request = argparse.Namespace(
            last_token=3, position=position, target_hidden=streams(0.5)[0], num_drafts=2
        )
        one.propose_batch([request], [state])
        one.after_verify(1, state)
    # A row for each step, 127 of them and the query's own.
    assert block.seen[-2] == [float(key) for key in range(297 - 2 * 127, 298, 2)]


def test_streams_are_collapsed_only_where_asked() -> None:
    context = argparse.Namespace(
        built=argparse.Namespace(mtp=Block(), embed_tokens=Table(), lm_head=Table()),
        config=argparse.Namespace(sliding_window=128, head_dim=4, hc_mult=2, hidden_size=4),
        max_num_seqs=1,
    )
    for collapsed, want in ((True, 7.0), (False, 0.3)):
        policy = rows.Policy(name="x", collapsed=collapsed)
        one = rows.RowsDrafter(context, policy, collapse=lambda x: torch.full_like(x, 7.0))
        state = one.alloc_state()
        one.prefill_drafter([1, 2], streams(0.3, 0.4), state)
        assert float(state.rows[0][2]) == pytest.approx(want)
        one.free_state(state)


def test_sections_count_and_their_tokens_are_those_without_drafts(
    work: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(mechanisms, "PROMPT_ROWS", (0,))
    monkeypatch.setattr(mechanisms, "KEPT", (1.0, 0.4))
    monkeypatch.setattr(mechanisms, "DRAFTERS", ("mtp+ngram",))
    sections = {
        "vocabulary": mechanisms.vocabulary(work),
        "pruning": mechanisms.pruning(work),
        "drafters": mechanisms.drafters(work),
        "context": mechanisms.context(work, opening=2),
    }
    assert mechanisms.unequal(sections) == []
    whole, *_, least = sections["pruning"]["runs"]
    assert least["all"]["num_drafted"] < whole["all"]["num_drafted"]
    assert least["all"]["tokens_per_row"] > 0
    assert sections["vocabulary"]["sizes"][0] == 0
    assert mechanisms.show(sections)
    broken = dataclasses.replace(work, plain=[ids[::-1] for ids in work.plain])
    assert mechanisms.unequal({"x": {"runs": [broken.run("y")]}}) == ["x, y"]


def test_a_pause_is_measured_from_the_same_place(work: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(mechanisms, "AFTER", (("1 to 4", 0, 4),))
    section = mechanisms.pause(work, per_class=1, before=1, length=3)
    assert section["tokens_equal"]
    assert section["sequences"] == 2
    assert [run["name"] for run in section["runs"]] == [
        "never paused",
        "caught up",
        "not caught up",
        "cold",
    ]
    assert section["runs"][1]["spans"] == section["runs"][3]["spans"]
    for run in section["runs"]:
        first = run["spans"]["1 to 4"]
        assert first["steps"] == 8
        assert first["drafted"] == 24


def test_rows_come_back_with_a_prefix_or_do_not(work: Any, monkeypatch: Any) -> None:
    asked: list[int] = []
    install = mechanisms.Forgets.install_drafter_kv

    def noted(self: Any, kv: Any, state: Any) -> bool:
        asked.append(kv.rows)
        return bool(install(self, kv, state))

    monkeypatch.setattr(mechanisms.Forgets, "install_drafter_kv", noted)
    long = [common.Prompt("humaneval-00", "humaneval", "def f(a, b): return a\n" * 10)]
    section = mechanisms.carry(dataclasses.replace(work, prompts=long), answer=4, opening=4)
    assert section["tokens_equal"]
    assert len(section["runs"]) == 6
    assert asked
    assert min(asked) == 127
    for run in section["runs"]:
        assert run["texts"] == 1
        assert run["all"]["num_decode_steps"] > 0


def test_tallies_count_every_row_of_the_target() -> None:
    stats = SpeculationStats()
    for drafted, accepted in ((3, 1), (0, 0), (2, 2)):
        stats.record(num_drafted=drafted, num_accepted=accepted)
    total = mechanisms.tally([stats, stats])
    assert total["num_emitted"] == 12
    assert total["target_rows"] == 2 * (3 + 5)
    assert total["tokens_per_row"] == pytest.approx(12 / 16)
    assert total["tokens_per_step"] == pytest.approx(2)


def test_settings_and_lengths_are_timed_in_turn(work: Any) -> None:
    names = list(mechanisms.speed_settings(8))
    assert names[:2] == ["as it is", "drafts off"]
    assert "80% kept" in names
    assert "80% kept" not in mechanisms.speed_settings(1)
    assert "asked one by one" not in mechanisms.speed_settings(1)
    with LLM(work.model, **work.options, **mechanisms.speed_settings(8)["asked one by one"]) as llm:
        drafting = llm.engine.drafting
        assert drafting is not None
        assert drafting._group == 1
        results = llm.generate([p.text for p in work.prompts], work.params)
        assert sum(result.speculation.num_drafted for result in results) > 0
        assert llm.engine.num_proposer_failures == 0
    options = {k: v for k, v in work.options.items() if k not in ("prefix_cache", "max_num_seqs")}
    ladder = [lengths.AUTO, 0, 2]
    engine = lengths.Lengths(work.model, ladder, max_num_seqs=1, **options)
    run = lengths.measure(engine, ladder, work.prompts, batch=1, max_tokens=4, repeats=2)
    engine.close()
    assert run["tokens_equal"]
    assert [row["name"] for row in run["rows"]] == ["all", "humaneval", "docs_prose"]
    for row in run["rows"]:
        assert list(row["fixed"]) == ["0", "2"]
        assert row["best_fixed"] in (0, 2)
        best = row["fixed"][str(row["best_fixed"])]["tokens_per_second"]["values"]
        auto = row["auto"]["tokens_per_second"]["values"]
        ratios = [a / b for a, b in zip(auto, best, strict=True)]
        assert row["auto"]["over_best_fixed"]["values"] == pytest.approx(ratios)
        assert row["auto"]["first_round_over_best_fixed"] == pytest.approx(ratios[0])
    assert lengths.show(run)
