"""One contract for every proposer: ours, the doubles', and a user's of four verbs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline.draft.proposer as contract
from paceline.cache.drafter import DrafterRing
from paceline.draft import (
    AntiProposer,
    DeepseekV4MtpHead,
    DraftProposer,
    NgramProposer,
    NullProposer,
    OracleProposer,
    RandomProposer,
    ScriptedProposer,
)
from paceline.models.deepseek_v4.synth import preset_config
from paceline.models.step import MtpInputs, MtpOutput
from paceline.ops.dense import DenseWeight
from paceline.types import ConfigError, Draft, DraftRequest

CONFIG = preset_config("tiny")
TEXT = [(7 * i + i // 5) % CONFIG.vocab_size for i in range(64)]
MAX_SEQ_LEN = 256

SEED_NAMES = [
    "after_verify",
    "alloc_state",
    "alloc_state_for",
    "block_gamma",
    "catchup_batch",
    "catchup_drafter",
    "circuit_draft",
    "drafter_rows",
    "free_drafter_kv",
    "free_state",
    "install_drafter_kv",
    "last_pair_key",
    "needs_comm",
    "prefill_drafter",
    "prefill_hidden_rows",
    "prefill_uses_shared_buffers",
    "propose",
    "propose_batch",
    "propose_batch_max",
    "read_deferred_draft_token",
    "set_circuit_draft",
    "take_drafter_kv",
]


class MeanBlock:
    """A draft block of one line: rows are means of what they read, so drafts are cheap."""

    def forward(self, inputs: MtpInputs, ring: DrafterRing) -> MtpOutput:
        self.write_rows(inputs, ring)
        streams = (inputs.hiddens + inputs.embeds[:, None]) / 2
        return MtpOutput(normed=streams.mean(1), streams=streams)

    def write_rows(self, inputs: MtpInputs, ring: DrafterRing) -> None:
        rows = inputs.embeds[:, : ring.rows.shape[2]]
        ring.rows[inputs.slots, inputs.keys % ring.rows.shape[1]] = rows


class FourVerbs(DraftProposer[list[int]]):
    """What the shortest useful proposer looks like: repeats the last token."""

    def alloc_state(self) -> list[int]:
        return []

    def propose(self, request: DraftRequest, state: list[int]) -> Draft:
        state[:] = [request.last_token] * request.num_drafts
        return Draft(tokens=list(state))

    def after_verify(self, num_accepted: int, state: list[int]) -> None:
        if num_accepted > len(state):
            raise ValueError(num_accepted)
        state.clear()

    def free_state(self, state: list[int]) -> None:
        state.clear()


def mtp_head() -> DeepseekV4MtpHead:
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=generator)
    dense = DenseWeight(table, dtype=torch.float32)
    return DeepseekV4MtpHead.new(MeanBlock(), dense, dense, CONFIG, 0, MAX_SEQ_LEN, num_slots=4)


MAKERS: dict[str, Callable[[], DraftProposer[Any]]] = {
    "mtp": mtp_head,
    "null": NullProposer,
    "random": lambda: RandomProposer(seed=1, vocab_size=CONFIG.vocab_size),
    "oracle": lambda: OracleProposer([TEXT]),
    "anti": lambda: AntiProposer([TEXT], vocab_size=CONFIG.vocab_size),
    "scripted": lambda: ScriptedProposer(
        [TEXT], accept_counts=[0, 2, 1], vocab_size=CONFIG.vocab_size
    ),
    "ngram": NgramProposer,
    "four verbs": FourVerbs,
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[], DraftProposer[Any]]:
    return MAKERS[request.param]


def hiddens(first: int, count: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(MAX_SEQ_LEN, CONFIG.hc_mult, CONFIG.hidden_size, generator=generator)
    return table[first : first + count]


def ask(
    text: Sequence[int] = TEXT, *, position: int = 20, num_drafts: int = 3, seed: int = 0
) -> DraftRequest:
    return DraftRequest(
        last_token=text[position],
        position=position,
        target_hidden=hiddens(position - 1, 1, seed=seed)[0],
        num_drafts=num_drafts,
        history=list(text[: position + 1]),
    )


def test_every_name_of_the_contract_is_there() -> None:
    assert [name for name in SEED_NAMES if not hasattr(DraftProposer, name)] == []
    for name in SEED_NAMES:
        member = getattr(DraftProposer, name)
        if callable(member):
            assert member.__doc__, name


def test_the_contract_knows_no_tensor_at_run_time() -> None:
    tree = ast.parse(Path(contract.__file__).read_text(encoding="utf-8"))
    at_run_time = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [alias.name for node in at_run_time for alias in node.names]
    assert "torch" not in names
    assert not hasattr(contract, "torch")


def test_defaults_decline_by_value() -> None:
    proposer = FourVerbs()
    state = proposer.alloc_state_for(10**9)
    streams = hiddens(0, 4)
    assert proposer.block_gamma is None
    assert proposer.needs_comm is False
    assert proposer.prefill_uses_shared_buffers is False
    assert proposer.prefill_hidden_rows(77) == 77
    assert proposer.propose_batch([ask()], [state]) is None
    assert proposer.propose_batch_max() == 1
    assert proposer.prefill_drafter(TEXT[:4], streams, state) == 0
    assert proposer.catchup_drafter(TEXT[:4], streams, 0, 1, state) == 0
    assert proposer.catchup_batch([TEXT[:4]], [streams], [1], [state]) == 0
    assert proposer.drafter_rows(state) == 0
    assert proposer.last_pair_key(state) is None
    assert proposer.take_drafter_kv(state) is None
    assert proposer.circuit_draft() is None
    assert proposer.read_deferred_draft_token() is None
    assert proposer.last_confidence(state) is None
    proposer.set_circuit_draft(None)


@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        ("propose_batch", "propose_batch_max"),
        ("propose_batch_max", "propose_batch"),
        ("prefill_drafter", "drafter_rows, last_pair_key"),
        ("catchup_drafter", "drafter_rows, last_pair_key"),
        ("catchup_batch", "drafter_rows, last_pair_key"),
        ("take_drafter_kv", "install_drafter_kv, free_drafter_kv"),
        ("install_drafter_kv", "take_drafter_kv, free_drafter_kv"),
        ("free_drafter_kv", "take_drafter_kv, install_drafter_kv"),
        ("circuit_draft", "set_circuit_draft"),
        ("set_circuit_draft", "circuit_draft"),
    ],
)
def test_half_a_concern_is_refused_when_the_class_is_made(given: str, lacking: str) -> None:
    with pytest.raises(TypeError, match=f"Half defines {given} but not {lacking};"):
        type("Half", (FourVerbs,), {given: lambda self, *args: None})


def test_a_proposer_without_its_core_cannot_be_made() -> None:
    class NoCore(DraftProposer[int]):
        pass

    with pytest.raises(TypeError, match="abstract"):
        NoCore()  # type: ignore[abstract]


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_a_draft_is_no_longer_than_asked(
    make: Callable[[], DraftProposer[Any]], num_drafts: int
) -> None:
    proposer = make()
    state = proposer.alloc_state()
    draft = proposer.propose(ask(num_drafts=num_drafts), state)
    assert len(draft.tokens) <= num_drafts
    assert all(isinstance(token, int) for token in draft.tokens)
    assert all(0 <= token < CONFIG.vocab_size for token in draft.tokens)
    assert draft.confidence is None or len(draft.confidence) == len(draft.tokens)


def test_no_drafts_wanted_gives_an_empty_draft(make: Callable[[], DraftProposer[Any]]) -> None:
    proposer = make()
    state = proposer.alloc_state()
    assert proposer.propose(ask(num_drafts=0), state) == Draft(tokens=[])
    proposer.after_verify(0, state)


def test_no_more_can_be_accepted_than_was_drafted(make: Callable[[], DraftProposer[Any]]) -> None:
    proposer = make()
    state = proposer.alloc_state()
    draft = proposer.propose(ask(), state)
    with pytest.raises(ValueError, match=str(len(draft.tokens) + 1)):
        proposer.after_verify(len(draft.tokens) + 1, state)


def test_the_history_is_left_as_it_is(make: Callable[[], DraftProposer[Any]]) -> None:
    proposer = make()
    state = proposer.alloc_state()
    request = ask()
    before = list(request.history)
    proposer.propose(request, state).tokens.append(-5)
    assert request.history == before


def test_dropped_drafts_leave_the_next_proposal_the_same(
    make: Callable[[], DraftProposer[Any]],
) -> None:
    proposer = make()
    if isinstance(proposer, ScriptedProposer):
        pytest.skip("its script moves on with every draft")
    state = proposer.alloc_state()
    first = proposer.propose(ask(), state)
    proposer.after_verify(0, state)
    assert proposer.propose(ask(), state) == first


def test_freeing_twice_is_harmless_and_leaves_room(make: Callable[[], DraftProposer[Any]]) -> None:
    proposer = make()
    states = [proposer.alloc_state_for(100) for _ in range(4)]
    for state in states:
        proposer.propose(ask(), state)
        proposer.free_state(state)
        proposer.free_state(state)
    again = [proposer.alloc_state() for _ in range(4)]
    fresh = make()
    expected = fresh.propose(ask(), fresh.alloc_state())
    assert [proposer.propose(ask(), state) for state in again] == [expected] * 4


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_batch_equals_its_proposals_one_by_one_or_is_declined(
    make: Callable[[], DraftProposer[Any]], size: int
) -> None:
    batched, alone = make(), make()
    requests = [ask(position=9 + 3 * i, num_drafts=1 + (5 * i) % 4, seed=i) for i in range(size)]
    states = [batched.alloc_state() for _ in range(size)]
    drafts = batched.propose_batch(requests, states)
    if batched.propose_batch_max() == 1:
        assert drafts is None
        return
    expected = [alone.propose(request, alone.alloc_state()) for request in requests]
    assert drafts == expected


def test_two_interleaved_sequences_draft_as_each_alone(
    make: Callable[[], DraftProposer[Any]],
) -> None:
    def draft_on(proposer: DraftProposer[Any], state: Any, position: int, seed: int) -> list[int]:
        tokens = proposer.propose(ask(position=position, seed=seed), state).tokens
        proposer.after_verify(0, state)
        return tokens

    def alone(seed: int) -> list[list[int]]:
        proposer = make()
        state = proposer.alloc_state()
        return [draft_on(proposer, state, position, seed) for position in range(10, 16)]

    both = make()
    first, second = both.alloc_state(), both.alloc_state()
    together: tuple[list[list[int]], list[list[int]]] = ([], [])
    for position in range(10, 16):
        together[0].append(draft_on(both, first, position, 1))
        together[1].append(draft_on(both, second, position, 2))
    assert together == (alone(1), alone(2))


def test_a_declining_handover_leaves_the_rows_where_they_are(
    make: Callable[[], DraftProposer[Any]],
) -> None:
    proposer = make()
    state = proposer.alloc_state()
    proposer.propose(ask(), state)
    proposer.after_verify(0, state)
    rows = proposer.drafter_rows(state)
    if proposer.take_drafter_kv(state) is None:
        assert proposer.drafter_rows(state) == rows


# What each double is for


def test_the_oracle_is_always_right() -> None:
    oracle = OracleProposer([TEXT, TEXT[:30]])
    state = oracle.alloc_state()
    for position in range(1, 60):
        draft = oracle.propose(ask(position=position, num_drafts=4), state)
        assert draft.tokens == TEXT[position + 1 : position + 5]


def test_the_oracle_is_silent_off_its_texts() -> None:
    oracle = OracleProposer([TEXT])
    state = oracle.alloc_state()
    strange = [TEXT[0] + 1, *TEXT[1:]]
    assert oracle.propose(ask(strange), state).tokens == []
    assert oracle.propose(ask(position=len(TEXT) - 1), state).tokens == []


def test_the_anti_oracle_is_always_wrong() -> None:
    anti = AntiProposer([TEXT], vocab_size=CONFIG.vocab_size)
    draft = anti.propose(ask(num_drafts=8), anti.alloc_state())
    assert len(draft.tokens) == 8
    assert all(a != b for a, b in zip(draft.tokens, TEXT[21:29], strict=True))


def test_the_scripted_proposer_cycles_its_accept_counts() -> None:
    scripted = ScriptedProposer([TEXT], accept_counts=[0, 2, 9], vocab_size=CONFIG.vocab_size)
    state = scripted.alloc_state()
    accepted = []
    for _ in range(6):
        draft = scripted.propose(ask(num_drafts=4), state)
        right = [a == b for a, b in zip(draft.tokens, TEXT[21:25], strict=True)]
        accepted.append((*right, False).index(False))
        scripted.after_verify(accepted[-1], state)
    assert accepted == [0, 2, 4, 0, 2, 4]


def test_the_random_proposer_depends_on_its_seed_and_place_only() -> None:
    def draw(seed: int, position: int) -> list[int]:
        proposer = RandomProposer(seed=seed, vocab_size=CONFIG.vocab_size)
        return proposer.propose(ask(position=position), proposer.alloc_state()).tokens

    assert draw(1, 20) == draw(1, 20)
    assert draw(1, 20) != draw(2, 20)
    assert draw(1, 20) != draw(1, 21)


def test_the_ngram_proposer_drafts_what_followed_last_time() -> None:
    text = [1, 2, 3, 4, 9, 2, 3, 5, 6, 7, 2, 3]
    ngram = NgramProposer(max_ngram=3, min_ngram=2)
    draft = ngram.propose(ask(text, position=len(text) - 1), ngram.alloc_state())
    assert draft.tokens == [5, 6, 7]
    fresh = list(range(12))
    assert ngram.propose(ask(fresh, position=11), ngram.alloc_state()).tokens == []


def test_the_ngram_proposer_prefers_the_longest_match() -> None:
    text = [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]
    ngram = NgramProposer(max_ngram=3, min_ngram=2)
    draft = ngram.propose(ask(text, position=len(text) - 1, num_drafts=2), ngram.alloc_state())
    assert draft.tokens == [4, 9]


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (lambda: RandomProposer(seed=0, vocab_size=0), "vocab_size is 0; allowed is at least 1"),
        (lambda: AntiProposer([], vocab_size=1), "vocab_size is 1; allowed is at least 2"),
        (
            lambda: ScriptedProposer([], accept_counts=[], vocab_size=9),
            "accept_counts is .*; allowed",
        ),
        (
            lambda: ScriptedProposer([], accept_counts=[-1], vocab_size=9),
            "accept_counts is .*; allowed",
        ),
        (lambda: NgramProposer(min_ngram=0), "min_ngram is 0; allowed is at least 1"),
        (lambda: NgramProposer(max_ngram=1, min_ngram=2), "max_ngram is 1; allowed is at least"),
    ],
)
def test_doubles_refuse_what_makes_no_sense(build: Callable[[], object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        build()
