"""A lookup beside the head: whoever drafts, the head's rows stay those of a fresh prefill."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy import RULES, VOCAB, Checked, continuation, decode, toy_config, toy_engine

from paceline.cache.drafter import DrafterRing
from paceline.config import ModelConfig
from paceline.draft import (
    BlockProposer,
    CombinedProposer,
    CombinedState,
    CommProposer,
    ContextProposer,
    DeepseekV4MtpHead,
    DeferredProposer,
    DraftProposer,
    NgramProposer,
    NullProposer,
    OracleProposer,
    RandomProposer,
    WrappingProposer,
)
from paceline.models.deepseek_v4.build import Built, build
from paceline.models.step import MtpInputs
from paceline.types import ConfigError, Draft, DraftRequest, SamplingParams

MAX_SEQ_LEN = 1024


class Watched(WrappingProposer[Any]):
    """Notes which methods were called, and the widths of batches."""

    def __init__(self, inner: DraftProposer[Any]) -> None:
        super().__init__(inner)
        self.calls: list[str] = []

    def propose(self, request: DraftRequest, state: Any) -> Draft:
        self.calls.append("propose")
        return super().propose(request, state)

    def propose_batch(self, requests: Any, states: Any) -> list[Draft] | None:
        self.calls.append(f"propose_batch {len(requests)}")
        return super().propose_batch(requests, states)


@dataclass
class Run:
    """A text of few ids, so that lookups match, with streams of its own, and the engine's side."""

    proposer: DraftProposer[Any]
    config: ModelConfig
    seed: int
    ids: int = 3
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (MAX_SEQ_LEN, self.config.hc_mult, self.config.hidden_size)
        self.streams = torch.randn(shape, generator=generator)
        self.rng = random.Random(self.seed)
        self.state = self.proposer.alloc_state_for(MAX_SEQ_LEN)
        self.sources: list[str | None] = []

    def draw(self) -> int:
        return self.rng.randrange(self.ids)

    def prefill(self, length: int) -> None:
        self.tokens = [self.draw() for _ in range(length)]
        rows = self.streams[:length].clone()
        self.proposer.prefill_drafter(self.tokens, rows, self.state)
        self.tokens.append(self.draw())

    def request(self, num_drafts: int) -> DraftRequest:
        position = len(self.tokens) - 1
        return DraftRequest(
            last_token=self.tokens[-1],
            position=position,
            target_hidden=self.streams[position - 1].clone(),
            num_drafts=num_drafts,
            history=list(self.tokens),
        )

    def settle(self, draft: Draft, accept: int) -> None:
        position = len(self.tokens) - 1
        accept = min(accept, len(draft.tokens))
        if draft.tokens:
            self.sources.append(draft.source)
            self.proposer.after_verify(accept, self.state)
        accepted = draft.tokens[:accept]
        self.tokens += [*accepted, self.draw()]
        if accepted:
            true = self.streams[position : position + accept].clone()
            self.proposer.catchup_batch([accepted], [true], [position + 1], [self.state])

    def step(self, num_drafts: int, accept: int) -> Draft:
        request = self.request(num_drafts)
        draft = self.proposer.propose(request, self.state)
        request.target_hidden.fill_(-1.0)  # dead at the next target step
        self.settle(draft, accept)
        return draft

    def rest(self, count: int) -> None:
        """A stretch without drafts, handed over when it ends."""
        first = len(self.tokens) - 1
        self.tokens += [self.draw() for _ in range(count)]
        self.proposer.catchup_drafter(
            self.tokens[first:-1],
            self.streams[first - 1 : first - 1 + count].clone(),
            self.proposer.drafter_rows(self.state),
            first,
            self.state,
        )


@pytest.fixture(scope="module")
def tiny(tiny_path: Any, tiny_weights: Any) -> tuple[ModelConfig, Built]:
    config = ModelConfig.from_path(tiny_path)
    options: Any = {"backend": "auto", "num_threads": 1}
    cpu = torch.device("cpu")
    return config, build(tiny_weights, config, device=cpu, dtype=torch.float32, **options)


def head(tiny: tuple[ModelConfig, Built], **options: Any) -> DeepseekV4MtpHead:
    config, built = tiny
    assert built.mtp is not None
    return DeepseekV4MtpHead.new(
        built.mtp,
        built.embed_tokens,
        built.lm_head,
        config,
        0,
        MAX_SEQ_LEN,
        **{"num_slots": 8, **options},
    )


def truth(tiny: tuple[ModelConfig, Built], run: Run, first_key: int, count: int) -> torch.Tensor:
    """The rows of keys first_key .. in one pass over the committed tokens."""
    config, built = tiny
    assert built.mtp is not None
    keys = torch.arange(first_key, first_key + count)
    tokens = torch.tensor(run.tokens[first_key + 1 : first_key + 1 + count])
    ring = DrafterRing(rows=torch.zeros(1, MAX_SEQ_LEN, config.head_dim), max_width=1)
    inputs = MtpInputs(
        embeds=built.embed_tokens.gather(tokens),
        hiddens=run.streams[first_key : first_key + count],
        keys=keys,
        slots=torch.zeros_like(keys),
        first_keys=torch.zeros_like(keys),
    )
    built.mtp.write_rows(inputs, ring)
    return ring.rows[0, first_key : first_key + count]


def assert_exact(tiny: tuple[ModelConfig, Built], run: Run) -> None:
    """Every row held is the true one, the newest is the last pair's, and none is missing."""
    window = tiny[0].sliding_window
    mtp = run.proposer.head  # type: ignore[attr-defined]
    first, held = mtp.held_rows(run.state.head)
    assert torch.equal(held, truth(tiny, run, first, len(held)))
    # The pair of the token sampled last waits for the next propose.
    assert first + len(held) - 1 == len(run.tokens) - 3
    assert first <= max(0, first + len(held) - (window - 1))


def fresh_draft(tiny: tuple[ModelConfig, Built], run: Run, num_drafts: int) -> list[int]:
    """What the head alone drafts, given the committed tokens anew."""
    mtp = head(tiny, num_slots=1)
    state = mtp.alloc_state()
    prompt = run.tokens[:-1]
    mtp.prefill_drafter(prompt, run.streams[: len(prompt)], state)
    return mtp.propose(run.request(num_drafts), state).tokens


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["draft"] * 4 + ["drop", "rest"]), st.integers(1, 8), st.integers(0, 8)
    ),
    min_size=1,
    max_size=30,
)


@pytest.mark.parametrize("fold_catchup", [False, True])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(prompt=st.integers(1, 170), steps=STEPS, seed=st.integers(0, 999), ngram=st.integers(2, 6))
def test_rows_are_exact_after_any_mixed_history(
    tiny: tuple[ModelConfig, Built],
    fold_catchup: bool,
    prompt: int,
    steps: list[tuple[str, int, int]],
    seed: int,
    ngram: int,
) -> None:
    mtp = head(tiny, fold_catchup=fold_catchup)
    lookup = NgramProposer(min_ngram=ngram, max_ngram=8)
    run = Run(CombinedProposer(lookup, mtp), tiny[0], seed)
    run.prefill(prompt)
    for what, num_drafts, accept in steps:
        if what == "rest":
            run.rest(num_drafts)
        elif what == "drop":
            draft = run.proposer.propose(run.request(num_drafts), run.state)
            if draft.tokens:
                run.proposer.after_verify(0, run.state)
        else:
            run.step(num_drafts, accept)
            assert_exact(tiny, run)
    run.proposer.free_state(run.state)
    run.proposer.free_state(run.state)
    assert mtp.num_free_slots == mtp.num_slots


def test_the_head_drafts_after_lookups_as_after_a_fresh_prefill(
    tiny: tuple[ModelConfig, Built],
) -> None:
    run = Run(CombinedProposer(NgramProposer(min_ngram=2), head(tiny)), tiny[0], 5, ids=12)
    run.prefill(150)
    for turn in range(60):
        expected = fresh_draft(tiny, run, 4)
        draft = run.proposer.propose(run.request(4), run.state)
        # An untrained head's drafts are ids that never come again; few of them may be accepted.
        run.settle(draft, turn % 5 if draft.source == "ngram" else turn % 2)
        if draft.source == "mtp":
            assert draft.tokens == expected
        assert_exact(tiny, run)
    assert run.sources.count("ngram") > 10
    assert run.sources.count("mtp") > 10
    pairs = list(zip(run.sources, run.sources[1:], strict=False))
    for change in (("ngram", "mtp"), ("mtp", "ngram"), ("ngram", "ngram"), ("mtp", "mtp")):
        assert change in pairs


def test_without_the_pair_of_the_last_token_rows_would_go_missing(
    tiny: tuple[ModelConfig, Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the handing over at propose is for: without it each lookup leaves a gap."""
    monkeypatch.setattr(CombinedProposer, "_tell_head", lambda self, request, state: None)
    run = Run(CombinedProposer(NgramProposer(min_ngram=1), head(tiny)), tiny[0], 5)
    run.prefill(150)
    run.step(4, 2)
    assert run.sources == ["ngram"]
    assert run.proposer.drafter_rows(run.state) < 5


@pytest.mark.parametrize("size", range(1, 9))
def test_a_batch_asks_the_head_once_for_those_that_need_it(
    tiny: tuple[ModelConfig, Built], size: int
) -> None:
    watched = Watched(head(tiny))
    batched = CombinedProposer(NgramProposer(min_ngram=4), watched)
    single = CombinedProposer(NgramProposer(min_ngram=4), head(tiny))
    together = [Run(batched, tiny[0], seed) for seed in range(size)]
    alone = [Run(single, tiny[0], seed) for seed in range(size)]
    for runs in (together, alone):
        for i, run in enumerate(runs):
            run.prefill(5 + 20 * i)
    mixed = 0
    for turn in range(12):
        numbers = [1 + (turn + 3 * i) % 8 for i in range(size)]
        watched.calls.clear()
        drafts = batched.propose_batch(
            [run.request(n) for run, n in zip(together, numbers, strict=True)],
            [run.state for run in together],
        )
        assert drafts is not None
        by_head = sum(draft.source == "mtp" for draft in drafts)
        due = [f"propose_batch {by_head}"] if by_head > 1 else ["propose"] * by_head
        assert watched.calls == due
        mixed += 0 < by_head < size
        for i, (run, other) in enumerate(zip(together, alone, strict=True)):
            assert drafts[i] == other.proposer.propose(other.request(numbers[i]), other.state)
            run.settle(drafts[i], (turn + i) % 4)
            other.settle(drafts[i], (turn + i) % 4)
            for each in (run, other):
                rows = each.proposer.drafter_rows(each.state)
                assert rows == min(len(each.tokens) - 2, rows)
    assert mixed or size == 1
    for run in together:
        first, held = watched.inner.held_rows(run.state.head)  # type: ignore[attr-defined]
        assert torch.equal(held, truth(tiny, run, first, len(held)))


def test_a_head_that_declines_its_batch_is_asked_one_by_one() -> None:
    class Declines(ContextProposer):
        def propose_batch(self, requests: Any, states: Any) -> None:
            return None

    config = toy_config()
    both = CombinedProposer(NgramProposer(min_ngram=4), Declines(vocab_size=VOCAB))
    runs = [Run(both, config, seed) for seed in range(3)]
    alone = [Run(both, config, seed) for seed in range(3)]
    for run in (*runs, *alone):
        run.prefill(9)
    drafts = both.propose_batch([run.request(3) for run in runs], [run.state for run in runs])
    assert drafts == [both.propose(run.request(3), run.state) for run in alone]


def test_a_head_without_batches_declines_for_both_and_touches_nothing() -> None:
    both = CombinedProposer(NgramProposer(min_ngram=1), ContextProposer(vocab_size=9, batch=1))
    assert both.propose_batch_max() == 1
    run = Run(both, toy_config(), 1)
    run.prefill(9)
    assert both.propose_batch([run.request(3)], [run.state]) is None
    assert run.state.lookup.num_indexed == 0


def test_a_lookup_that_falls_short_leaves_the_draft_to_the_head() -> None:
    texts = [[1, 2, 3, 4, 5]]
    both = CombinedProposer(OracleProposer(texts), ContextProposer(vocab_size=9))
    run = Run(both, toy_config(), 1)
    run.tokens = [1, 2, 3]
    assert both.propose(run.request(2), run.state) == Draft(tokens=[4, 5], source="ngram")
    both.after_verify(2, run.state)
    draft = both.propose(run.request(3), run.state)
    assert draft.source == "mtp"
    assert len(draft.tokens) == 3
    assert run.state.lookup.num_drafted == 0
    both.after_verify(3, run.state)
    with pytest.raises(ValueError, match="num_accepted is 1"):
        both.after_verify(1, run.state)


def test_names_can_be_given_and_a_drafters_own_is_kept() -> None:
    class Named(ContextProposer):
        def propose(self, request: DraftRequest, state: Any) -> Draft:
            return replace(super().propose(request, state), source="other")

    run = Run(CombinedProposer(NgramProposer(), Named(vocab_size=9)), toy_config(), 1)
    run.tokens = [1, 2]
    assert run.step(2, 0).source == "other"
    both = CombinedProposer(
        NgramProposer(min_ngram=1), ContextProposer(vocab_size=9), lookup_name="a", head_name="b"
    )
    run = Run(both, toy_config(), 1)
    run.tokens = [1, 2]
    assert run.step(2, 0).source == "b"
    run.tokens = [1, 2, 1]
    assert run.step(2, 0).source == "a"


def test_facts_are_the_heads() -> None:
    inner = ContextProposer(vocab_size=9, window=7, batch=3)
    for facts in (
        BlockProposer(inner, block_gamma=5),
        CommProposer(inner, lambda position, tokens: tokens),
    ):
        both = CombinedProposer(NgramProposer(), facts)
        for name in ("block_gamma", "needs_comm", "prefill_uses_shared_buffers"):
            assert getattr(both, name) == getattr(facts, name)
        assert both.prefill_hidden_rows(100) == 7
        assert both.propose_batch_max() == facts.propose_batch_max()


def test_confidence_and_deferred_ids_are_of_whoever_drafted() -> None:
    class Sure(DeferredProposer[Any]):
        def last_confidence(self, state: Any) -> float | None:
            return 0.25

    embedding = torch.zeros(9, 8)
    both = CombinedProposer(
        NgramProposer(min_ngram=2), Sure(ContextProposer(vocab_size=9), embedding)
    )
    run = Run(both, toy_config(), 1)
    for tokens, by_head in (([1, 2, 3], True), ([1, 2, 1, 2], False), ([5, 6, 7], True)):
        run.tokens = list(tokens)
        request = replace(run.request(2), draft_embed_target=torch.zeros(8))
        draft = both.propose(request, run.state)
        assert (draft.device_tokens is not None) == by_head
        assert (both.read_deferred_draft_token() is not None) == by_head
        assert both.last_confidence(run.state) == (0.25 if by_head else None)
        both.after_verify(0, run.state)


def test_the_heads_state_is_not_lost_where_the_lookup_has_none() -> None:
    class Full(NgramProposer):
        def alloc_state(self) -> Any:
            raise MemoryError("full")

    class Counting(NullProposer):
        held = 0

        def alloc_state(self) -> Any:
            self.held += 1
            return super().alloc_state()

        def free_state(self, state: Any) -> None:
            self.held -= 1

    mtp = Counting()
    both = CombinedProposer(Full(), mtp)
    for alloc in (both.alloc_state, lambda: both.alloc_state_for(5)):
        with pytest.raises(MemoryError):
            alloc()
    assert mtp.held == 0


class FourVerbs(DraftProposer[None]):
    def alloc_state(self) -> None: ...

    def propose(self, request: DraftRequest, state: None) -> Draft:
        return Draft(tokens=[])

    def after_verify(self, num_accepted: int, state: None) -> None: ...

    def free_state(self, state: None) -> None: ...


@pytest.mark.parametrize(
    "lookup",
    [
        FourVerbs(),
        ContextProposer(vocab_size=9),
        BlockProposer(NgramProposer(), block_gamma=3),
        CommProposer(NgramProposer(), lambda position, tokens: tokens),
    ],
)
def test_what_cannot_be_a_lookup_is_refused(lookup: DraftProposer[Any]) -> None:
    with pytest.raises(ConfigError, match=f"the lookup is a {type(lookup).__name__}, which"):
        CombinedProposer(lookup, NullProposer())


# In an engine


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_the_engine_tells_the_head_every_pair_once(rule: str, batch: int) -> None:
    """`Checked` refuses a pair that is missing, doubled or made from another position's streams."""
    inner = Checked(RULES[rule], batch=batch)
    proposer = CombinedProposer(NgramProposer(min_ngram=1, max_ngram=2), inner)
    engine = toy_engine(
        config=toy_config(eos_token_ids=()),
        proposer=proposer,
        num_drafts=3,
        max_num_batched_tokens=24,
    )
    some = prompts(1, 2, 40, 127, 128, 129, 200)
    params = SamplingParams(max_tokens=45)
    for prompt, (tokens, _) in zip(some, decode(engine, some, params), strict=True):
        assert tokens == continuation(prompt, 45)
    assert engine.num_proposer_failures == 0
    assert not inner.live
    counts = engine.speculation
    assert set(counts.drafted_by) == {"mtp", "ngram"}
    assert sum(counts.drafted_by.values()) == counts.num_drafted
    assert sum(counts.accepted_by.values()) == counts.num_accepted
    # Both had their turn: the head was asked, and was told of pairs it did not propose from.
    assert inner.calls["catchup_drafter"] > 0
    assert inner.calls.get("propose", 0) + inner.calls.get("propose_batch", 0) > 0


def test_real_model_tokens_do_not_depend_on_who_drafts(tiny: tuple[ModelConfig, Built]) -> None:
    from paceline.engine import Engine

    config, built = tiny
    phrase = [5, 9, 17, 300, 2, 44, 8]
    some: Sequence[list[int]] = [phrase * 6, phrase * 3 + [1, 2, 3], list(range(3, 150))]
    params = SamplingParams(max_tokens=24, ignore_eos=True)

    def tokens(proposer: DraftProposer[Any] | None, num_drafts: int) -> Any:
        engine = Engine(
            built.model, config, proposer=proposer, num_drafts=num_drafts, max_seq_len=512
        )
        got = decode(engine, list(some), params)
        assert engine.num_proposer_failures == 0
        return got

    plain = tokens(None, 0)
    for num_drafts in (1, 4, 8):
        mtp = head(tiny)
        both = CombinedProposer(NgramProposer(min_ngram=2), mtp)
        assert tokens(both, num_drafts) == plain
        assert mtp.num_free_slots == mtp.num_slots
    assert tokens(CombinedProposer(NgramProposer(), RandomProposer(seed=0, vocab_size=9)), 3) == (
        plain
    )


def test_states_are_of_both() -> None:
    both = CombinedProposer(NgramProposer(), ContextProposer(vocab_size=9))
    assert isinstance(both.alloc_state(), CombinedState)
