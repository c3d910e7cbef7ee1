"""Numbers of drafts that are chosen in each step, and those that requests chose for themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from toy import Checked, continuation, oracle, run, toy_config, toy_engine

from paceline.draft.length import LengthController, LengthPolicy, SequenceView, StepRecord
from paceline.types import Draft, DraftRequest, SamplingParams

NO_EOS = toy_config(eos_token_ids=())


class Deaf:
    """Says a number in turn, -2 to 11, whatever limits and numbers it is told of."""

    def __init__(self) -> None:
        self.said: list[list[int]] = []
        self.views: list[list[SequenceView]] = []
        self.records: list[StepRecord] = []

    def choose(
        self, sequences: Sequence[SequenceView], *, max_drafts: int | None = None
    ) -> list[int]:
        self.views.append(list(sequences))
        self.said.append([len(self.said) % 14 - 2] * len(sequences))
        return list(self.said[-1])

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)


class Asked(Checked):
    """Notes how many drafts were asked for, by the prompt's first id."""

    def __init__(self) -> None:
        super().__init__(oracle, batch=4)
        self.asked: dict[int, list[int]] = {}

    def _draft(self, request: DraftRequest, state: Any) -> Draft:
        self.asked.setdefault(request.history[0], []).append(request.num_drafts)
        return super()._draft(request, state)


OWN = {5: 0, 6: 2, 7: 8, 8: "auto", 9: None}


@pytest.mark.parametrize("make", [Deaf, LengthController])
def test_a_requests_own_number_stands_whoever_chooses(make: Callable[[], LengthPolicy]) -> None:
    """0, 2 and 8 of their own beside two that leave it open, in one batch all the time."""
    proposer, policy = Asked(), make()
    engine = toy_engine(
        config=NO_EOS, proposer=proposer, num_drafts="auto", lengths=policy, max_num_seqs=5
    )
    numbers = {}
    for first, own in OWN.items():
        params = SamplingParams(max_tokens=100, num_drafts=own)  # type: ignore[arg-type]
        numbers[first] = engine.add([first, 3], params)
    emissions = run(engine)
    assert engine.num_proposer_failures == 0
    for first, number in numbers.items():
        tokens = [token for e in emissions[number] for token in e.token_ids]
        assert tokens == continuation([first, 3], 100)
    assert 5 not in proposer.asked
    assert emissions[numbers[5]][-1].stats.num_drafted == 0
    # All are right, so each step gives as many and one; the last ones have no room for more.
    assert proposer.asked[6] == [2] * 33
    assert proposer.asked[7] == [8] * 11
    for first in (8, 9):
        assert all(1 <= count <= 8 for count in proposer.asked[first])


def test_a_policy_is_held_to_its_bounds() -> None:
    """Beyond the limit and below 0 are cut to them; what was drafted is what it is told."""
    proposer, policy = Asked(), Deaf()
    engine = toy_engine(
        config=NO_EOS, proposer=proposer, num_drafts="auto", lengths=policy, max_num_seqs=1
    )
    engine.add([5, 3], SamplingParams(max_tokens=150))
    run(engine)
    limits = [view.limit for (view,) in policy.views]
    told = [count for (count,) in policy.said]
    want = [max(0, min(pair)) for pair in zip(told, limits, strict=True)]
    assert [record.drafted for record in policy.records] == [[count] for count in want]
    assert proposer.asked[5] == [count for count in want if count]
    assert {0, 8} < set(want)
    assert min(told) < 0 < 8 < max(told)


def test_a_policy_is_told_what_each_request_chose() -> None:
    policy = Deaf()
    engine = toy_engine(
        config=NO_EOS, proposer=Asked(), num_drafts="auto", lengths=policy, max_num_seqs=5
    )
    for first, own in OWN.items():
        engine.add([first, 3], SamplingParams(max_tokens=40, num_drafts=own))  # type: ignore[arg-type]
    engine.step()
    engine.step()
    assert [view.fixed for view in policy.views[0]] == [0, 2, 8, None, None]
    assert [view.limit for view in policy.views[0]] == [0, 2, 8, 8, 8]
    run(engine)


def test_a_policy_is_not_asked_where_nobody_leaves_it_open() -> None:
    policy = Deaf()
    engine = toy_engine(
        config=NO_EOS, proposer=Asked(), num_drafts="auto", lengths=policy, max_num_seqs=5
    )
    for first, own in ((5, 0), (6, 2), (7, 8)):
        engine.add([first, 3], SamplingParams(max_tokens=40, num_drafts=own))
    run(engine)
    assert policy.views == policy.records == []
