"""The public doubles do what they say, alone and in an engine."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from toy import VOCAB, continuation, decode, toy_config, toy_engine

from paceline.draft import (
    BlockProposer,
    CommProposer,
    ContextProposer,
    CyclingProposer,
    DeferredProposer,
    DraftProposer,
    FixedLawProposer,
    NgramProposer,
    NullProposer,
    OracleProposer,
    PoisonProposer,
    RandomProposer,
    SharedBuffersProposer,
    WrappingProposer,
)
from paceline.draft import doubles as module
from paceline.draft.doubles import PoisonError
from paceline.types import ConfigError, Draft, DraftRequest, SamplingParams

NO_EOS = toy_config(eos_token_ids=())
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9] * 20]


def ask(
    history: list[int], num_drafts: int = 3, *, streams: float = 1.0, target: Any = None
) -> DraftRequest:
    return DraftRequest(
        last_token=history[-1],
        position=len(history) - 1,
        target_hidden=torch.full((2, 8), streams),
        num_drafts=num_drafts,
        history=history,
        draft_embed_target=target,
    )


def texts(length: int = 200) -> list[list[int]]:
    return [[*prompt, *continuation(prompt, length)] for prompt in PROMPTS]


def test_all_are_exported() -> None:
    import paceline.draft as package

    for name in module.__all__:
        if name.endswith("Proposer") or name == "check_proposer":
            assert getattr(package, name) is getattr(module, name)


# Cycling


@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_cycling_counts_equal_the_closed_form(num_drafts: int) -> None:
    """The engine's statistics after any whole number of steps of one request."""
    proposer = CyclingProposer(texts(), num_drafts=num_drafts, vocab_size=VOCAB)
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=num_drafts)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=150))
    engine.step()
    steps, fields = 0, ("num_drafted", "num_accepted", "num_draft_steps", "num_decode_steps")
    while engine.has_work and steps < 25:
        (emission,) = engine.step()
        if emission.finish_reason is not None:
            break
        if emission.stats.drafted_at[-1] != steps + 1:
            break  # the last steps are narrower
        steps += 1
        due = proposer.expected(steps)
        assert len(emission.token_ids) == 1 + (steps - 1) % (num_drafts + 1)
        assert emission.stats.drafted_at == due.drafted_at
        assert emission.stats.accepted_at == due.accepted_at
        assert emission.stats.num_emitted == due.num_emitted
        assert [getattr(emission.stats, f) for f in fields] == [getattr(due, f) for f in fields]
    assert steps >= 2 * (num_drafts + 1)


def test_the_closed_form_is_that_of_counting() -> None:
    for k in range(1, 9):
        cycling = CyclingProposer([[0]], num_drafts=k, vocab_size=2)
        for steps in range(3 * k + 4):
            counts = [step % (k + 1) for step in range(steps)]
            due = cycling.expected(steps)
            assert due.num_accepted == sum(counts) == sum(due.accepted_at)
            assert due.accepted_at == [sum(count > j for count in counts) for j in range(k)]
            assert due.num_drafted == steps * k


# Fixed law


def test_drafts_follow_the_stated_law_and_say_so() -> None:
    law = [0.5, 0.25, 0.125, 0.0, 0.125]
    proposer = FixedLawProposer(law, seed=3)
    state = proposer.alloc_state()
    seen: Counter[int] = Counter()
    rng = random.Random(0)
    for turn in range(2500):
        history = [rng.randrange(5) for _ in range(6)] + [turn % 5]
        draft = proposer.propose(ask(history, 4), state)
        assert draft.confidence == [math.log(law[token]) for token in draft.tokens]
        seen.update(draft.tokens)
        proposer.after_verify(0, state)
    for token, share in enumerate(law):
        # Four standard deviations of a share of 10,000.
        slack = 4 * math.sqrt(share * (1 - share) / 10_000)
        assert abs(seen[token] / 10_000 - share) <= slack
    assert proposer.law == law


def test_draws_are_the_same_in_whatever_order() -> None:
    one, two = FixedLawProposer([0.5, 0.5], seed=1), FixedLawProposer([0.5, 0.5], seed=1)
    histories = [[i, i + 1, i + 2] for i in range(20)]
    state = one.alloc_state()
    forward = [one.propose(ask(h, 8), state).tokens for h in histories]
    backward = [two.propose(ask(h, 8), state).tokens for h in reversed(histories)]
    assert forward == backward[::-1]
    assert len({tuple(tokens) for tokens in forward}) > 10


# Context and shared buffers


def test_every_pair_shows_in_the_drafts_of_a_context() -> None:
    def draft(change: str = "") -> list[int]:
        proposer = ContextProposer(vocab_size=1000, window=8)
        state = proposer.alloc_state()
        streams = torch.arange(10.0)[:, None, None].expand(10, 2, 8).clone()
        prompt = list(range(10, 20))
        if change == "stream":
            streams[4] += 1e-3
        if change == "token":
            prompt[5] += 1
        if change == "old":
            streams[0] += 1  # pair 0 is out of the window of key 9
        first = int(change == "missing")
        proposer.prefill_drafter(prompt, streams[first:], state, first_position=first)
        if change == "gap":
            state.pairs.pop(8)
        return proposer.propose(ask([*prompt, 20]), state).tokens

    assert draft() == draft("old")
    assert draft("stream") != draft()
    assert draft("token") != draft()
    assert draft("gap") != draft()
    assert draft("missing") == draft()


def test_taken_pairs_are_counted() -> None:
    proposer = ContextProposer(vocab_size=9)
    state = proposer.alloc_state()
    assert proposer.take_drafter_kv(state) is None
    proposer.propose(ask([1, 2]), state)
    kv = proposer.take_drafter_kv(state)
    assert kv is not None
    shared = proposer.share_drafter_kv(kv)
    assert shared is not None
    assert proposer.num_moved == 2
    assert proposer.install_drafter_kv(shared, state)
    proposer.free_drafter_kv(kv)
    proposer.free_drafter_kv(kv)
    assert proposer.num_moved == 0
    assert proposer.share_drafter_kv(kv) is None


def shared_run(defers: bool) -> tuple[Any, SharedBuffersProposer]:
    """An engine that believes, or does not, what the proposer says of its prompt feed."""
    clock: list[Any] = []
    overwritten: list[int] = []
    proposer = SharedBuffersProposer(
        vocab_size=VOCAB,
        clock=lambda: clock[0].num_forwards,
        overwrite=lambda: overwritten.append(1),
    )
    proposer.prefill_uses_shared_buffers = defers  # read by the engine when it is built
    engine = toy_engine(
        config=NO_EOS, proposer=proposer, num_drafts=3, max_num_batched_tokens=24, max_num_seqs=3
    )
    clock.append(engine)
    got = decode(engine, PROMPTS, SamplingParams(max_tokens=30))
    for prompt, (tokens, _) in zip(PROMPTS, got, strict=True):
        assert tokens == continuation(prompt, 30)
    assert len(overwritten) == proposer.num_fed
    return engine, proposer


def test_a_prompt_that_may_be_fed_late_only_is_fed_late() -> None:
    engine, proposer = shared_run(defers=True)
    assert engine.num_proposer_failures == 0
    assert proposer.num_fed > len(PROMPTS)  # the long prompt came in pieces


def test_the_shared_double_sees_an_engine_that_feeds_early() -> None:
    engine, _ = shared_run(defers=False)
    assert engine.num_proposer_failures > 0


def test_the_shared_double_refuses_late_feeds_and_calls_in_between() -> None:
    proposer = SharedBuffersProposer(vocab_size=9)
    state, other = proposer.alloc_state(), proposer.alloc_state()
    streams = torch.zeros(2, 2, 8)
    proposer.prefill_drafter([1, 2, 3], streams, state)
    for call in (proposer.alloc_state, lambda: proposer.after_verify(0, other)):
        with pytest.raises(RuntimeError, match="came between a prompt's feed and its first use"):
            call()
    proposer.propose(ask([1, 2, 3, 4]), state)
    proposer.after_verify(0, other)
    with pytest.raises(RuntimeError, match="fed after the first propose"):
        proposer.prefill_drafter([1, 2, 3], streams, state)
    proposer.prefill_drafter([1, 2, 3], streams, other)
    proposer.free_state(other)
    proposer.alloc_state()


def test_the_shared_double_refuses_a_forward_between_feed_and_use() -> None:
    now = [5]
    proposer = SharedBuffersProposer(vocab_size=9, clock=lambda: now[0])
    streams = torch.zeros(2, 2, 8)
    uses: list[Any] = [
        lambda state: proposer.propose(ask([1, 2, 3, 4]), state),
        lambda state: proposer.catchup_drafter([4], streams[:1], 2, 3, state),
    ]
    for use in uses:
        for late in (0, 1):
            state = proposer.alloc_state()
            proposer.prefill_drafter([1, 2, 3], streams, state)
            now[0] += late
            if late:
                with pytest.raises(RuntimeError, match="a target forward ran between"):
                    use(state)
            else:
                use(state)
    state = proposer.alloc_state()
    proposer.prefill_drafter([1, 2, 3], streams[:1], state)
    now[0] += 1
    with pytest.raises(RuntimeError, match="fed in pieces between target forwards"):
        proposer.prefill_drafter([1, 2, 3], streams[1:], state, first_position=1)


# Wrappers


@pytest.mark.parametrize("gamma", [2, 3, 5, 8])
def test_a_block_sets_the_number_of_drafts(gamma: int) -> None:
    proposer = BlockProposer(OracleProposer(texts()), block_gamma=gamma)
    assert proposer.block_gamma == gamma
    state = proposer.alloc_state()
    history = texts()[0][:9]
    assert len(proposer.propose(ask(history, gamma - 1), state).tokens) == gamma - 1
    assert proposer.asked == [gamma - 1]
    with pytest.raises(ValueError, match=f"{gamma} drafts are wanted; a block of {gamma} holds"):
        proposer.propose(ask(history, gamma), state)


def test_a_collective_is_called_once_for_each_propose() -> None:
    said: list[tuple[int, list[int]]] = []

    def collective(position: int, tokens: list[int]) -> list[int]:
        said.append((position, tokens))
        return tokens[:1]

    proposer = CommProposer(ContextProposer(vocab_size=VOCAB), collective)
    assert proposer.needs_comm
    assert proposer.propose_batch_max() == 1
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=3)
    got = decode(engine, PROMPTS[:2], SamplingParams(max_tokens=12))
    assert [tokens for tokens, _ in got] == [continuation(p, 12) for p in PROMPTS[:2]]
    assert len(said) >= 10
    assert engine.num_proposer_failures == 0


def test_deferred_ids_lie_on_the_device_and_their_embedding_where_told() -> None:
    embedding = torch.arange(VOCAB * 8.0).reshape(VOCAB, 8)
    inner = OracleProposer(texts())
    history = texts()[0][:-2]
    for pad, ids in ((True, [*texts()[0][-2:], -1, -1]), (False, texts()[0][-2:])):
        proposer = DeferredProposer(inner, embedding, pad=pad)
        state = proposer.alloc_state()
        plain = proposer.propose(ask(history, 4), state)
        assert plain == Draft(tokens=texts()[0][-2:])
        assert proposer.read_deferred_draft_token() is None
        target = torch.zeros(8)
        draft = proposer.propose(ask(history, 4, target=target), state)
        assert draft.device_tokens is not None
        assert draft.tokens == []
        assert draft.device_tokens.tolist() == ids
        assert torch.equal(target, embedding[ids[0]])
        assert proposer.read_deferred_draft_token() == ids[0]


def test_nothing_drafted_is_nothing_deferred() -> None:
    proposer = DeferredProposer(NullProposer(), torch.zeros(4, 8))
    draft = proposer.propose(ask([1, 2], target=torch.zeros(8)), proposer.alloc_state())
    assert draft == Draft(tokens=[])
    assert proposer.read_deferred_draft_token() is None


def test_a_wrapper_hands_on_every_name_of_the_contract() -> None:
    """A method that is added to the contract and forgotten here would decline by itself."""
    names = {
        name
        for kind in DraftProposer.__mro__
        if kind.__module__ == DraftProposer.__module__
        for name, value in vars(kind).items()
        if callable(value) and not name.startswith("_")
    }
    assert names <= set(vars(WrappingProposer))
    assert len(names) > 20


# Poison


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "how",
    [
        "nan streams",
        "negative",
        "beyond",
        "float",
        "too many",
        "no draft",
        "no tokens",
        "short batch",
        "raises",
    ],
)
def test_poison_costs_an_engine_drafts_only(how: Any, batch: int) -> None:
    if how == "short batch" and batch == 1:
        pytest.skip("there is no batch to shorten")
    proposer = PoisonProposer(
        ContextProposer(vocab_size=VOCAB, batch=batch), how, vocab_size=VOCAB, nth=4, every=3
    )
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=3)
    params = SamplingParams(max_tokens=25)
    for prompt, (tokens, _) in zip(PROMPTS, decode(engine, PROMPTS, params), strict=True):
        assert tokens == continuation(prompt, 25)
    if how != "raises" or batch == 1:
        assert proposer.num_poisoned > 0
    if how != "nan streams" and proposer.num_poisoned:
        assert engine.num_proposer_failures > 0


@pytest.mark.parametrize(
    "method",
    [
        "alloc_state_for",
        "propose",
        "propose_batch",
        "after_verify",
        "free_state",
        "prefill_drafter",
        "catchup_batch",
    ],
)
def test_any_method_can_raise_on_its_nth_call(method: str) -> None:
    inner = OracleProposer(texts()) if method == "catchup_batch" else None
    proposer = PoisonProposer(
        inner or ContextProposer(vocab_size=VOCAB, batch=1 if method == "propose" else 8),
        "raises",
        vocab_size=VOCAB,
        method=method,
        nth=2,
        every=None,
    )
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=3)
    params = SamplingParams(max_tokens=25)
    for prompt, (tokens, _) in zip(PROMPTS, decode(engine, PROMPTS, params), strict=True):
        assert tokens == continuation(prompt, 25)
    assert proposer.num_poisoned == 1
    assert engine.num_proposer_failures >= 1


def test_poison_comes_when_it_is_due() -> None:
    proposer = PoisonProposer(
        RandomProposer(seed=0, vocab_size=9), "negative", vocab_size=9, nth=3, every=2
    )
    state = proposer.alloc_state()
    bad = [-1 in proposer.propose(ask([1, 2]), state).tokens for _ in range(8)]
    assert bad == [False, False, True, False, True, False, True, False]
    assert proposer.num_poisoned == 3
    once = PoisonProposer(NullProposer(), "raises", vocab_size=9, nth=2, every=None)
    state = once.alloc_state()
    once.propose(ask([1, 2]), state)
    with pytest.raises(PoisonError, match="propose is poisoned"):
        once.propose(ask([1, 2]), state)
    once.propose(ask([1, 2]), state)


@pytest.mark.parametrize(
    ("how", "due"),
    [
        ("negative", [-1]),
        ("beyond", [9]),
        ("float", [1.5]),
        ("bool", [True]),
        ("too many", [0, 0]),
    ],
)
def test_each_poison_is_what_it_says(how: Any, due: list[Any]) -> None:
    proposer = PoisonProposer(NullProposer(), how, vocab_size=9)
    tokens = proposer.propose(ask([1, 2], 1), proposer.alloc_state()).tokens
    assert tokens == due
    assert [type(token) for token in tokens] == [type(token) for token in due]


def test_streams_of_nan_reach_the_other_proposer_only() -> None:
    class Sees(NullProposer):
        seen = False

        def propose(self, request: DraftRequest, state: Any) -> Draft:
            self.seen = bool(request.target_hidden.isnan().all())
            return super().propose(request, state)

    inner = Sees()
    proposer = PoisonProposer(inner, "nan streams", vocab_size=9)
    request = ask([1, 2])
    proposer.propose(request, proposer.alloc_state())
    assert inner.seen
    assert not request.target_hidden.isnan().any()


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (
            lambda: CyclingProposer([], num_drafts=0, vocab_size=9),
            "num_drafts is 0; allowed is at least 1",
        ),
        (lambda: FixedLawProposer([], seed=0), "law has 0 entries"),
        (lambda: FixedLawProposer([0.5, 0.4], seed=0), "law has 2 entries of sum 0.9"),
        (lambda: FixedLawProposer([1.5, -0.5], seed=0), "law has 2 entries of sum 1.0"),
        (lambda: ContextProposer(vocab_size=0), "vocab_size is 0; allowed is at least 1"),
        (lambda: ContextProposer(vocab_size=1, window=0), "window is 0; allowed is at least 1"),
        (lambda: ContextProposer(vocab_size=1, batch=0), "batch is 0; allowed is at least 1"),
        (
            lambda: BlockProposer(NullProposer(), block_gamma=1),
            "block_gamma is 1; allowed is at least 2",
        ),
        (
            lambda: PoisonProposer(NullProposer(), "raises", vocab_size=9, method="draft"),
            "method is 'draft'; allowed are .*propose",
        ),
        (
            lambda: PoisonProposer(NullProposer(), "raises", vocab_size=9, nth=0),
            "nth is 0; allowed is at least 1",
        ),
        (
            lambda: PoisonProposer(NullProposer(), "raises", vocab_size=9, every=0),
            "every is 0; allowed is at least 1",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(build: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        build()


def test_a_lookup_is_not_a_double() -> None:
    assert not hasattr(module, "NgramProposer")
    assert NgramProposer.__module__ == "paceline.draft.ngram"
