"""Drafters spread over two ranks: equal tokens, equal operations, and no hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import rank_kit as kit
from rank_kit import CONFIG, Ranks, led, prompts, run_led, run_together, together
from toy import VOCAB, continuation, toy_engine

from paceline.dist import RankGroup
from paceline.draft import DeepseekV4MtpHead
from paceline.draft.doubles import CommProposer, ContextProposer, check_proposer
from paceline.engine.ranks import LeadingProposer, LockstepProposer, lead
from paceline.types import ConfigError

THREE = prompts(3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.end()


@pytest.fixture
def lost_pair(tmp_path: Any) -> Iterator[Ranks]:
    """For scenarios that do not come back."""
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.end()


def alone(what: dict[str, Any]) -> dict[str, Any]:
    return run_led(RankGroup.alone(), {**what, "on": {}, "debug": False, "zeroed": None})


def check_tokens(told: dict[str, Any], what: dict[str, Any]) -> None:
    assert told["tokens"] == [
        continuation(prompt, what["max_tokens"])
        for _ in range(what.get("rounds", 1))
        for prompt in what["prompts"]
    ]


def names(log: list[str]) -> set[str]:
    return {entry.split()[0] for entry in log}


# One engine leads


def test_two_ranks_draft_what_one_does_from_the_same_context(pair: Ranks) -> None:
    """Chunks, batches, kept prefixes, pre-emption and carried rows: all of it on both ranks."""
    what = {
        "inner": "context",
        "prompts": prompts(4, lengths=(120, 100, 120, 260)),
        "max_tokens": 20,
        "rounds": 2,
        "debug": True,
        "engine": {
            "max_num_batched_tokens": 90,
            "num_blocks": 4,
            "max_seq_len": 384,
            "prefix_cache_bytes": 1 << 20,
            "max_num_seqs": 3,
        },
    }
    first, second = pair.run(led, what=what)
    check_tokens(first, what)
    one = alone(what)
    assert first["said"] == second["said"] == one["said"]
    assert len(first["said"]) > 100
    for name in ("tokens", "stats", "preemptions", "hits"):
        assert first[name] == one[name], name
    assert first["preemptions"] > 0
    assert first["hits"] > 0
    assert first["failures"] == first["held"] == 0
    assert first["commands"] == second["commands"]
    assert first["log"] == second["log"]
    assert names(first["log"]) >= {"command", "all_reduce", "decide", "exchange"}


@pytest.mark.parametrize("counts", [[0, 1, 3], [8, 0, 2], [0, 0, 0]])
def test_unequal_numbers_of_drafts(pair: Ranks, counts: list[int]) -> None:
    what = {"inner": "phased", "prompts": THREE, "max_tokens": 30, "num_drafts": counts}
    first, second = pair.run(led, what=what)
    check_tokens(first, what)
    one = alone(what)
    assert first["stats"] == one["stats"]
    assert first["said"] == second["said"] == one["said"]
    assert first["log"] == second["log"]
    assert first["failures"] == 0
    assert (first["stats"]["num_drafted"] > 0) == any(counts)
    # Requests that never draft cost the ranks nothing.
    assert first["commands"] == 1 or any(counts)


def test_three_requests_out_of_phase_for_three_hundred_steps(pair: Ranks) -> None:
    what = {
        "inner": "phased",
        "prompts": THREE,
        "max_tokens": 800,
        "steps": 300,
        "engine": {"max_seq_len": 1024},
    }
    first, second = pair.run(led, what=what)
    for tokens, prompt in zip(first["tokens"], THREE, strict=True):
        assert len(tokens) > 600
        assert tokens == continuation(prompt, len(tokens))
    assert first["log"] == second["log"]
    assert first["log"].count("all_reduce 183") >= 800  # three rows of the vocabulary
    assert first["said"] == second["said"]
    rates = first["stats"]["acceptance_by_position"]
    assert all(abs(rate - due) < 0.05 for rate, due in zip(rates, (0.75, 0.5, 0.25), strict=True))
    assert first["failures"] == 0


@pytest.mark.parametrize("where", [0, 1])
def test_a_rank_with_noise_takes_the_picks_of_rank_0(pair: Ranks, where: int) -> None:
    what = {"inner": "phased", "prompts": THREE, "max_tokens": 25, "on": {where: {"noise": 3.0}}}
    first, second = pair.run(led, what=what)
    check_tokens(first, what)
    assert first["said"] == second["said"]
    assert first["log"] == second["log"]
    assert first["failures"] == 0
    # Rank 1's noise changes nothing; rank 0's is what is drafted.
    assert (first["said"] == alone(what)["said"]) == (where == 1)


def test_ranks_that_pick_for_themselves_are_found_out(pair: Ranks) -> None:
    on = {0: {"decides": False}, 1: {"decides": False, "noise": 3.0}}
    what = {"inner": "phased", "prompts": THREE, "max_tokens": 25, "on": on}
    first, second = pair.run(led, what=what)
    check_tokens(first, what)
    assert first["failures"] > 0
    assert first["off"]
    assert first["log"] == second["log"]
    assert not first["broken"]


@pytest.mark.parametrize("missing", [0, 1, 2, 3, 4])
def test_a_request_that_ends_near_the_context_limit(pair: Ranks, missing: int) -> None:
    what = {
        "inner": "phased",
        "prompts": prompts(2, lengths=(20, 120 - missing)),
        "max_tokens": 8,
        "engine": {"max_seq_len": 128},
        "counts": (3,),
    }
    first, second = pair.run(led, what=what)
    for tokens, prompt in zip(first["tokens"], what["prompts"], strict=True):
        assert tokens == continuation(prompt, 8)
    assert first["log"] == second["log"]
    assert first["stats"] == alone(what)["stats"]
    assert first["failures"] == 0


@pytest.mark.parametrize(
    ("where", "method", "calls", "failures"),
    [
        (0, "propose", (2,), 1),
        (1, "propose", (2,), 1),
        (0, "score", (5, 9), 2),
        (1, "score", (5, 9), 2),
        (1, "after_verify", (3,), 1),
        (0, "alloc_state_for", (2,), 1),
        (1, "alloc_state_for", (2,), 1),
        (0, "prefill_drafter", (1,), 1),
        (1, "take_drafter_kv", (1,), 1),
    ],
)
def test_what_raises_on_one_rank_costs_its_drafts_on_all(
    pair: Ranks, where: int, method: str, calls: tuple[int, ...], failures: int
) -> None:
    fault = {where: {"faults": [(method, calls, "raises")]}}
    what = {
        "inner": "context",
        "prompts": prompts(3, lengths=(120, 100, 120)),
        "max_tokens": 40,
        "on": fault,
        "debug": True,  # a state that stays different would cost more than this one call
        "engine": {"num_blocks": 3, "max_seq_len": 256},
    }
    first, second = pair.run(led, what=what, timeout=5.0)
    check_tokens(first, what)
    assert first["failures"] == failures
    assert first["log"] == second["log"]
    assert not first["broken"]
    assert not second["broken"]
    assert not first["off"]
    assert first["held"] == 0
    assert first["preemptions"] > 0
    assert first["stats"]["num_drafted"] > 30
    assert first["said"] == second["said"] or method in ("propose", "score")


def test_what_all_ranks_raise_alike_is_raised_as_on_one_rank(pair: Ranks) -> None:
    """A refusal, say: the states stay what they are."""
    mine = {"faults": [("score", (4, 30), "raises"), ("after_verify", (5,), "raises")]}
    what = {"inner": "context", "prompts": THREE, "max_tokens": 25, "on": {0: mine, 1: mine}}
    first, second = pair.run(led, what=what, timeout=5.0)
    one = run_led(RankGroup.alone(), what)
    assert first["failures"] == one["failures"] == 3
    assert first["said"] == second["said"] == one["said"]
    assert first["log"] == second["log"]


def test_a_state_that_cannot_begin_anew_on_one_rank_holds_nobody_up(pair: Ranks) -> None:
    """Its sequence costs the drafts of all until it ends, soon, at the context limit."""
    mine = {"faults": [("propose", (2,), "raises"), ("alloc_state_for", (4,), "raises")]}
    what = {
        "inner": "context",
        "prompts": prompts(3, lengths=(120, 9, 14)),
        "max_tokens": 40,
        "on": {1: mine},
        "debug": True,
        "engine": {"max_seq_len": 128},
    }
    first, second = pair.run(led, what=what, timeout=5.0)
    for tokens, prompt, count in zip(first["tokens"], what["prompts"], (8, 40, 40), strict=True):
        assert tokens == continuation(prompt, count)
    assert 2 < first["failures"] < 9
    assert first["stats"]["num_drafted"] > 100
    assert first["log"] == second["log"]
    assert not first["broken"]


@pytest.mark.parametrize("where", [0, 1])
def test_what_always_raises_on_one_rank_is_switched_off_on_all(pair: Ranks, where: int) -> None:
    what = {
        "inner": "context",
        "prompts": THREE,
        "max_tokens": 40,
        "on": {where: {"faults": [("score", (), "raises")]}},
        "engine": {"max_proposer_failures": 4},
    }
    first, second = pair.run(led, what=what, timeout=5.0)
    check_tokens(first, what)
    assert first["off"]
    assert first["failures"] == 4
    assert first["log"] == second["log"]
    assert first["log"].count("command") < 40
    assert first["stats"]["num_drafted"] == 0
    assert "error" not in second
    assert first["commands"] == second["commands"]


@pytest.mark.parametrize("how", ["extra", "wide"])
def test_ranks_out_of_step_are_told_apart_and_not_left_waiting(pair: Ranks, how: str) -> None:
    """An operation that one rank alone wants, and one of another shape."""
    what = {
        "inner": "phased",
        "prompts": THREE,
        "max_tokens": 25,
        "on": {1: {"faults": [("score", (4,), how)]}},
    }
    first, second = pair.run(led, what=what, timeout=5.0)
    check_tokens(first, what)
    assert first["failures"] == 1
    assert first["log"] == second["log"]
    assert not first["broken"]


def test_debug_finds_a_rank_that_sees_other_streams(pair: Ranks) -> None:
    """Nothing else would: what this drafter says does not depend on them."""
    what = {"inner": "phased", "prompts": THREE, "max_tokens": 25, "zeroed": 1}
    first, second = pair.run(led, what={**what, "debug": False})
    check_tokens(first, what)
    assert first["failures"] == 0
    assert first["stats"]["num_drafted"] > 20
    first, second = pair.run(led, what={**what, "debug": True})
    check_tokens(first, what)
    assert first["failures"] > 3
    assert first["off"]
    assert first["log"] == second["log"]


def test_debug_finds_a_rank_that_was_not_fed(pair: Ranks) -> None:
    mine = {"faults": [("prefill_drafter", (1,), "skips")]}
    what = {"inner": "context", "prompts": THREE, "max_tokens": 25, "on": {1: mine}}
    first, _ = pair.run(led, what=what)
    check_tokens(first, what)
    assert first["failures"] == 0
    first, second = pair.run(led, what={**what, "debug": True})
    check_tokens(first, what)
    assert first["failures"] == 1  # the states began anew and were alike again
    assert first["log"] == second["log"]


def test_unchecked_operations_give_the_same(pair: Ranks) -> None:
    what = {"inner": "phased", "prompts": THREE, "max_tokens": 25}
    first, second = pair.run(led, what=what, checked=False)
    check_tokens(first, what)
    checked, _ = pair.run(led, what=what)
    assert first["said"] == second["said"] == checked["said"]
    assert first["log"] == second["log"]
    assert len(first["log"]) < len(checked["log"])


# Ranks that are lost


def test_without_the_broadcast_the_drafts_are_lost_and_nothing_hangs(pair: Ranks) -> None:
    what = {"inner": "phased", "prompts": THREE, "max_tokens": 25, "mute": True}
    first, second = pair.run(led, what=what, timeout=1.0, idle_timeout=2.0)
    check_tokens(first, what)
    assert first["failures"] > 0
    assert first["stats"]["num_drafted"] == 0
    assert first["broken"]
    assert "a command did not come through" in second["error"]


@pytest.mark.parametrize("checked", [True, False])
def test_a_rank_that_does_not_answer_breaks_the_group_in_time(pair: Ranks, checked: bool) -> None:
    what = {
        "inner": "phased",
        "prompts": THREE,
        "max_tokens": 25,
        "on": {1: {"faults": [("score", (4,), "sleeps")]}},
    }
    first, second = pair.run(led, what=what, timeout=1.0, checked=checked)
    check_tokens(first, what)
    assert first["broken"]
    assert first["off"]
    assert first["held"] == 0
    assert "rank 1: " in second["error"]


@pytest.mark.parametrize("where", [0, 1])
def test_a_rank_that_dies_is_noticed(lost_pair: Ranks, where: int) -> None:
    what = {
        "inner": "phased",
        "prompts": THREE,
        "max_tokens": 25,
        "on": {where: {"faults": [("score", (4,), "dies")]}},
    }
    told = lost_pair.run(led, what=what)
    assert told[where] == 7
    if where == 1:
        check_tokens(told[0], what)
        assert told[0]["off"]
        assert told[0]["broken"]
    else:
        assert "did not come through: rank 0 died" in told[1]["error"]


def test_the_watchdog_ends_a_hang_and_shows_all_stacks(lost_pair: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"the watchdog ended hang(.|\n)*rank 1") as caught:
        lost_pair.run(kit.hang, watchdog=3.0)
    assert "_idle_here" in str(caught.value)
    assert "receive" in str(caught.value)


# An engine on each rank


@pytest.mark.parametrize(
    ("numbers", "drafts", "lengths", "late"),
    [
        ((3, 0), (3, 3), (40, 40), {}),
        ((0, 2), (3, 3), (40, 40), {}),
        ((2, 1), (3, 1), (30, 50), {}),
        ((1, 4), (0, 8), (50, 20), {}),
        ((2, 0), (3, 5), (40, 30), {1: 12}),
    ],
)
def test_a_rank_with_less_to_draft_runs_empty_forwards(
    pair: Ranks,
    numbers: tuple[int, int],
    drafts: tuple[int, int],
    lengths: tuple[int, int],
    late: dict[int, int],
) -> None:
    mine = [prompts(number) or [[5, 6, 7]] * (rank in late) for rank, number in enumerate(numbers)]
    what = {"prompts": mine, "num_drafts": drafts, "max_tokens": lengths, "late": late}
    for rank in late:
        what["prompts"][rank] = [[5, 6, 7]]
    told = pair.run(together, what=what)
    assert told[0]["log"] == told[1]["log"]
    assert told[0]["forwards"] == told[1]["forwards"] > 20
    assert told[0]["steps"] == told[1]["steps"]
    for rank in range(2):
        one = run_together(RankGroup.alone(), what, rank)
        due = [continuation(prompt, lengths[rank]) for prompt in mine[rank]]
        assert told[rank]["tokens"] == one["tokens"]
        assert told[rank]["tokens"][: len(due)] == due
        assert told[rank]["stats"] == one["stats"]
        assert told[rank]["failures"] == told[rank]["faults"] == 0
        assert told[rank]["forwards"] == one["forwards"] + told[rank]["empty"]
    assert told[0]["empty"] + told[1]["empty"] > 0


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_one_rank_comes_to_the_context_limit(pair: Ranks, missing: int) -> None:
    what = {
        "prompts": [prompts(1, lengths=(120 - missing,)), prompts(1, lengths=(9,))],
        "num_drafts": (3, 3),
        "max_tokens": (40, 60),
        "engine": {"max_seq_len": 128},
    }
    told = pair.run(together, what=what)
    assert told[0]["log"] == told[1]["log"]
    assert told[0]["tokens"] == [continuation(what["prompts"][0][0], 8 + missing)]
    assert told[1]["tokens"] == [continuation(what["prompts"][1][0], 60)]
    assert told[0]["failures"] == told[1]["failures"] == 0


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("idle", [False, True])
def test_a_forward_that_raises_on_one_rank_holds_nobody_up(
    pair: Ranks, where: int, idle: bool
) -> None:
    numbers = [2, 2]
    if idle:
        numbers[where] = 0
    what = {
        "prompts": [prompts(number) for number in numbers],
        "num_drafts": (3, 2),
        "max_tokens": (40, 40),
        "on": {where: {"fault": ("forward", (7, 12), "raises")}},
    }
    told = pair.run(together, what=what, timeout=5.0)
    assert told[0]["log"] == told[1]["log"]
    for rank in range(2):
        assert told[rank]["tokens"] == [continuation(p, 40) for p in what["prompts"][rank]]
        assert told[rank]["failures"] + told[rank]["faults"] >= 1 + (idle or rank == where)
    assert told[1 - where]["stats"]["num_drafted"] > 20


def test_what_always_raises_in_a_shared_forward_is_switched_off_on_all(pair: Ranks) -> None:
    what = {
        "prompts": [prompts(2), prompts(2)],
        "num_drafts": (3, 2),
        "max_tokens": (60, 60),
        "on": {1: {"fault": ("forward", (), "raises")}},
        "engine": {"max_proposer_failures": 4},
    }
    told = pair.run(together, what=what, timeout=5.0)
    assert told[0]["log"] == told[1]["log"]
    for rank in range(2):
        assert told[rank]["failures"] == 4
        assert told[rank]["tokens"] == [continuation(p, 60) for p in what["prompts"][rank]]
        assert told[rank]["stats"]["num_drafted"] == 0


# The group itself


def test_what_goes_over_arrives_whole(pair: Ranks) -> None:
    first, second = pair.run(kit.moved)
    assert all(second["same"])
    second.pop("same")
    first.pop("same")
    assert first == second
    assert first["command"] == ["name", [list(range(70)), {"tensor": 0}], {"key": None}, 3]
    assert first["decided"] == list(range(70))
    assert first["nothing"] == []
    assert first["sum"] == [2.0, 10.0]
    assert first["gathered"] == [[[0], [5]], [[1], [5]]]
    assert first["first"] == [3]


def test_operations_outside_of_a_call_raise_at_once(pair: Ranks) -> None:
    for rank, told in enumerate(pair.run(kit.outside)):
        assert told == [
            f"rank {rank}: decide outside of any call of the engine's",
            f"rank {rank}: meet on a group that is broken or closed",
        ]


def test_a_group_of_one_gives_back_what_it_gets() -> None:
    what = {"inner": "phased", "prompts": THREE, "max_tokens": 25}
    told = alone(what)
    check_tokens(told, what)
    assert told["commands"] is None
    assert told["stats"]["acceptance_rate"] > 0.4
    assert RankGroup.connect("nowhere", rank=0, size=1).size == 1


def test_a_drafter_of_one_rank_is_asked_directly() -> None:
    assert DeepseekV4MtpHead.needs_comm is False
    many = RankGroup(
        rank=1,
        size=2,
        commands=None,
        control=None,
        data=None,
        timeout=1.0,
        checked=True,
        record=False,
    )
    plain = ContextProposer(vocab_size=VOCAB)
    assert lead(plain, many) is plain
    comm = CommProposer(plain, lambda position, ids: many.decide(ids))
    assert lead(comm, RankGroup.alone()) is comm
    with pytest.raises(ConfigError, match="rank 1 cannot lead; allowed is rank 0"):
        toy_engine(config=CONFIG, proposer=comm, ranks=many, num_drafts=2)
    with pytest.raises(ConfigError, match="ContextProposer has no draft_nothing"):
        LockstepProposer(plain, many)


@pytest.mark.parametrize("width", [1, 4])
def test_the_side_that_leads_is_held_to_the_contract(width: int) -> None:
    """Through commands and back, on one rank: states, tokens, rows and tensors by number."""

    def make() -> LeadingProposer:
        inner = ContextProposer(vocab_size=VOCAB, batch=width)
        return LeadingProposer(inner, RankGroup.alone(), debug=True)

    check_proposer(make, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "size": 2}, "rank is 2 of 2; allowed is 0 to size - 1"),
        ({"rank": 0, "size": 0}, "rank is 0 of 0"),
        ({"rank": 0, "size": 2, "timeout": 0}, "timeout is 0; allowed are seconds above 0"),
        ({"rank": 0, "size": 2, "idle_timeout": -1}, "idle_timeout is -1; allowed"),
    ],
)
def test_a_group_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RankGroup.connect("nowhere", **options)
