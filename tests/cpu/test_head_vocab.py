"""Drafts over a part of the vocabulary: the first ids, and a few that lie elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from head_rig import MAX_SEQ_LEN, DeviceRun, Run, Tiny, make_tiny, toy_config, toy_head
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.draft import DeepseekV4MtpHead
from paceline.draft.chain import DraftScorer
from paceline.types import ConfigError

FIRST = 40


@pytest.fixture(scope="module", params=["torch", "fused"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", request.param)


def partial(tiny: Tiny, extra_ids: list[int], **options: Any) -> DeepseekV4MtpHead:
    return DeepseekV4MtpHead.new(
        *(tiny.module, tiny.embed, tiny.lm_head, tiny.config, FIRST, MAX_SEQ_LEN),
        extra_ids=extra_ids,
        **options,
    )


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    num_rows=st.integers(1, 511),
    extra=st.sets(st.integers(0, 511), max_size=20),
    rows=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_scores_are_those_of_the_whole_head_bit_for_bit(
    tiny: Tiny, num_rows: int, extra: set[int], rows: int, seed: int
) -> None:
    normed = torch.randn(
        rows, tiny.config.hidden_size, generator=torch.Generator().manual_seed(seed)
    )
    whole = tiny.lm_head.matmul(normed)
    above = sorted(token for token in extra if token >= num_rows)
    scorer = DraftScorer(tiny.lm_head, num_rows=num_rows, extra_ids=above)
    ids = [*range(num_rows), *above]
    assert scorer.width == len(ids)
    assert torch.equal(scorer.logits(normed), whole[:, ids])
    columns = torch.arange(len(ids))
    assert scorer.ids_of(columns).tolist() == ids == [scorer.id_of(c) for c in range(len(ids))]


@pytest.mark.parametrize("way", ["alone", "batch", "device"])
def test_special_ids_above_the_first_are_drafted_where_they_are_best(tiny: Tiny, way: str) -> None:
    """With what the whole head drafts among the extra ids, both draft the same."""
    whole = tiny.head(num_slots=2, confidence=True)
    runs = [Run(whole, tiny.config, i) for i in range(2)]
    for run in runs:
        run.prefill(20)
    expected = [[run.step(5, n % 3).tokens for n in range(6)] for run in runs]
    drafted = {token for drafts in expected for draft in drafts for token in draft}
    above = [token for token in drafted if token >= FIRST]
    assert len(above) > 10
    head = partial(tiny, [*reversed(above), 3], num_slots=2, confidence=True)
    assert head.circuit_draft().vocab_rows == FIRST + len(above)
    kind = DeviceRun if way == "device" else Run
    ours = [kind(head, tiny.config, i) for i in range(2)]
    for run in ours:
        run.prefill(20)
    for n in range(6):
        if way == "batch":
            drafts = head.propose_batch([r.request(5) for r in ours], [r.state for r in ours])
            for run, draft in zip(ours, drafts, strict=True):
                run.settle(draft, n % 3)
        else:
            drafts = [run.step(5, n % 3) for run in ours]
        assert [draft.tokens for draft in drafts] == [expected[i][n] for i in range(2)]


@pytest.mark.parametrize("extra", [[], [500, 501]])
def test_nothing_else_is_drafted(tiny: Tiny, extra: list[int]) -> None:
    head = partial(tiny, extra, num_slots=2)
    allowed = {*range(FIRST), *extra}
    runs = [Run(head, tiny.config, 1), DeviceRun(head, tiny.config, 2)]
    for run in runs:
        run.prefill(20)
        drafts = [run.step(8, n % 3).tokens for n in range(6)]
        assert {token for draft in drafts for token in draft} <= allowed


@pytest.mark.parametrize("on_device", [False, True])
def test_a_grammar_speaks_of_ids_not_of_columns(tiny: Tiny, on_device: bool) -> None:
    head = partial(tiny, [300, 410], num_slots=1)
    run = DeviceRun(head, tiny.config, 1)
    run.prefill(20)
    for allowed in (7, 300, 410):
        words = torch.zeros(tiny.config.vocab_size // 32, dtype=torch.int32)
        words[allowed // 32] = 1 << allowed % 32
        request = run.deferred(2) if on_device else run.request(2)
        draft = head.propose(dataclasses.replace(request, grammar_bitmask=words), run.state)
        ids = draft.tokens if draft.device_tokens is None else draft.device_tokens.tolist()
        assert ids[0] == allowed
        head.after_verify(0, run.state)


def test_two_heads_of_one_block_keep_their_vocabularies_apart(tiny: Tiny) -> None:
    """The block's compiled chain is made for one of them at a time."""
    heads = [partial(tiny, extra, num_slots=1) for extra in ([500], [501], [], [502])]
    runs = [Run(head, tiny.config, 1) for head in heads]
    alone = []
    for n, head in enumerate(([500], [501], [], [502])):
        run = Run(partial(tiny, head, num_slots=1), tiny.config, 1)
        run.prefill(20)
        runs[n].prefill(20)
        alone.append([run.step(6, 1) for _ in range(6)])
    together = [[run.step(6, 1) for run in runs] for _ in range(6)]
    assert [list(drafts) for drafts in zip(*together, strict=True)] == alone


def test_two_output_heads_of_one_block_are_kept_apart(tiny: Tiny) -> None:
    turned = tiny.lm_head.take_rows(list(reversed(range(tiny.config.vocab_size))))
    ring = tiny.head().ring
    heads = [
        DeepseekV4MtpHead.new(
            tiny.module, tiny.embed, table, tiny.config, 0, MAX_SEQ_LEN, ring=ring
        )
        for table in (tiny.lm_head, turned, tiny.lm_head)
    ]
    runs = [Run(head, tiny.config, 1) for head in heads]
    drafts = []
    for run in runs:
        # All have the same slot of one ring, one after the other.
        run.prefill(20)
        drafts.append(run.head.propose(run.request(1), run.state).tokens)
    first, other, again = drafts
    assert first == again == [tiny.config.vocab_size - 1 - other[0]]


def test_all_ids_need_no_others() -> None:
    config = toy_config()
    head = toy_head(config, extra_ids=[63, 1])
    assert head.circuit_draft().vocab_rows == config.vocab_size


@pytest.mark.parametrize("strange", [-1, 64])
def test_ids_that_are_none_are_refused(strange: int) -> None:
    with pytest.raises(ConfigError, match=rf"extra_ids has \[{strange}\]; allowed are ids 0 to 63"):
        toy_head(toy_config(), extra_ids=[3, strange])
