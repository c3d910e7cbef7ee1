"""The contract suite: what keeps the contract passes, and each way to break it is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from paceline.config import ModelConfig
from paceline.draft import (
    AntiProposer,
    BlockProposer,
    CombinedProposer,
    CommProposer,
    ContextProposer,
    ContractReport,
    CyclingProposer,
    DeepseekV4MtpHead,
    DeferredProposer,
    DraftProposer,
    FixedLawProposer,
    NgramProposer,
    NullProposer,
    OracleProposer,
    PoisonProposer,
    RandomProposer,
    ScriptedProposer,
    SharedBuffersProposer,
    WrappingProposer,
    check_proposer,
)
from paceline.draft.checks import _CLAUSES
from paceline.draft.doubles import ContextState
from paceline.models.deepseek_v4.build import Built, build
from paceline.types import Draft, DrafterKv, DraftRequest

VOCAB = 64
TEXTS = [[(7 * i * i + i // 5 + s) % VOCAB for i in range(512)] for s in range(8)]
EMBEDDING = torch.arange(VOCAB * 16).reshape(VOCAB, 16).float()

check = partial(check_proposer, vocab_size=VOCAB)

OPTIONAL = {
    "batch",
    "prefill",
    "catch-up",
    "handover",
    "sharing",
    "blocks",
    "deferral",
    "circuit",
}


def context(**options: Any) -> ContextProposer:
    return ContextProposer(vocab_size=VOCAB, **options)


def combined(head: DraftProposer[Any]) -> DraftProposer[Any]:
    return CombinedProposer(NgramProposer(min_ngram=3), head)


KEPT: dict[str, tuple[Callable[[], DraftProposer[Any]], set[str]]] = {
    "null": (NullProposer, OPTIONAL),
    "random": (lambda: RandomProposer(seed=1, vocab_size=VOCAB), OPTIONAL),
    "oracle": (lambda: OracleProposer(TEXTS), OPTIONAL),
    "anti": (lambda: AntiProposer(TEXTS, vocab_size=VOCAB), OPTIONAL),
    "scripted": (
        lambda: ScriptedProposer(TEXTS, accept_counts=[0, 2, 1], vocab_size=VOCAB),
        OPTIONAL,
    ),
    "cycling": (lambda: CyclingProposer(TEXTS, num_drafts=3, vocab_size=VOCAB), OPTIONAL),
    "fixed law": (lambda: FixedLawProposer([1 / VOCAB] * VOCAB, seed=1), OPTIONAL),
    "ngram": (NgramProposer, OPTIONAL),
    "context": (context, {"blocks", "deferral", "circuit"}),
    "shared": (
        lambda: SharedBuffersProposer(vocab_size=VOCAB),
        {"blocks", "deferral", "circuit"},
    ),
    "combined": (lambda: combined(context()), {"blocks", "deferral", "circuit"}),
    "combined, no batch": (
        lambda: combined(context(batch=1)),
        {"batch", "blocks", "deferral", "circuit"},
    ),
    "combined, shared": (
        lambda: combined(SharedBuffersProposer(vocab_size=VOCAB)),
        {"blocks", "deferral", "circuit"},
    ),
    "combined, deferred": (
        lambda: combined(DeferredProposer(context(), EMBEDDING)),
        {"blocks", "circuit"},
    ),
    "block": (lambda: BlockProposer(context(), block_gamma=4), {"deferral", "circuit"}),
    "comm": (
        lambda: CommProposer(context(), lambda position, tokens: tokens),
        {"batch", "blocks", "deferral", "circuit"},
    ),
    "deferred": (lambda: DeferredProposer(context(), EMBEDDING), {"blocks", "circuit"}),
    "wrapping": (lambda: WrappingProposer(context()), {"blocks", "deferral", "circuit"}),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_packages_proposers_keep_the_contract(name: str, seed: int) -> None:
    make, declined = KEPT[name]
    texts = TEXTS if name in ("oracle", "anti", "scripted", "cycling") else None
    report = check(make, texts=texts, seed=seed)
    assert set(report.declined) == declined
    assert {*report.checked, *report.declined} == set(_CLAUSES)
    assert not set(report.checked) & set(report.declined)


def test_the_report_reads_well() -> None:
    report = check(NgramProposer)
    assert isinstance(report, ContractReport)
    assert str(report).startswith("NgramProposer keeps the contract: facts, ")
    assert "NgramProposer declines: batch, " in str(report)
    assert str(ContractReport("X", ("facts",), ())).endswith("X declines: nothing")


def test_arguments_that_leave_no_room_are_refused() -> None:
    for changes in ({"vocab_size": 1}, {"max_seq_len": 511}, {"num_sequences": 1}):
        with pytest.raises(ValueError, match="allowed is at least 2, 512 and 2"):
            check_proposer(NullProposer, **{"vocab_size": 9, **changes})


# The model's own head


@pytest.fixture(scope="module")
def tiny(tiny_path: Any, tiny_weights: Any) -> tuple[ModelConfig, Built]:
    config = ModelConfig.from_path(tiny_path)
    options: Any = {"backend": "auto", "num_threads": 1}
    cpu = torch.device("cpu")
    return config, build(tiny_weights, config, device=cpu, dtype=torch.float32, **options)


def head(tiny: tuple[ModelConfig, Built], kind: Any = DeepseekV4MtpHead, **options: Any) -> Any:
    config, built = tiny
    assert built.mtp is not None
    return kind.new(
        built.mtp, built.embed_tokens, built.lm_head, config, 0, 512, num_slots=8, **options
    )


def check_head(tiny: tuple[ModelConfig, Built], make: Callable[[], Any]) -> ContractReport:
    config, _ = tiny
    shape = (config.hc_mult, config.hidden_size)
    return check_proposer(make, vocab_size=config.vocab_size, streams_shape=shape)


@pytest.mark.parametrize("options", [{}, {"confidence": True, "fold_catchup": True}])
def test_the_models_own_head_keeps_the_contract(
    tiny: tuple[ModelConfig, Built], options: dict[str, Any]
) -> None:
    report = check_head(tiny, lambda: head(tiny, **options))
    assert set(report.declined) == {"blocks"}


def test_the_head_beside_a_lookup_keeps_the_contract(tiny: tuple[ModelConfig, Built]) -> None:
    report = check_head(tiny, lambda: combined(head(tiny)))
    # The twin without a runner drafts by the same lookups, so all of the head's clauses apply.
    assert set(report.declined) == {"blocks"}


# Broken in one way each: a `ContextProposer` with one method changed


class Broken(ContextProposer):
    """A base to break; drafts in batches of up to four."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB, batch=4)
        self.calls = 0
        self.kept: Any = None

    def changed(self, draft: Draft, **changes: Any) -> Draft:
        return replace(draft, **changes)


def breaking(**methods: Any) -> Callable[[], DraftProposer[Any]]:
    return type("Broken", (Broken,), methods)


def drafting(change: Callable[[Any, DraftRequest, Draft], Any]) -> Callable[[], DraftProposer[Any]]:
    """Broken in `propose`: `change` says what it returns."""

    def propose(self: Broken, request: DraftRequest, state: ContextState) -> Any:
        self.calls += 1
        return change(self, request, ContextProposer.propose(self, request, state))

    return breaking(propose=propose)


def budget_matters(self: Broken, budget_tokens: int) -> ContextState:
    state = ContextProposer.alloc_state(self)
    if budget_tokens > 10**6:
        raise MemoryError("no room for that many rows")
    return state


def budget_shows(self: Broken, budget_tokens: int) -> ContextState:
    state = ContextProposer.alloc_state(self)
    if budget_tokens == 2**62:
        state.pairs[-1] = 7
    return state


def adds_to_history(self: Broken, request: DraftRequest, draft: Draft) -> Draft:
    request.history.append(0)
    return draft


def never_refuses(self: Broken, num_accepted: int, state: ContextState) -> None:
    state.num_drafted = 0


def stays_open(self: Broken, num_accepted: int, state: ContextState) -> None:
    if num_accepted > state.num_drafted:
        raise ValueError(num_accepted)


def refuses_all(self: Broken, num_accepted: int, state: ContextState) -> None:
    if num_accepted >= state.num_drafted > 2:
        raise ValueError("all of a long draft")
    ContextProposer.after_verify(self, num_accepted, state)


class Slots(Broken):
    """Hands out one of eight states; a state freed twice is handed out twice."""

    def __init__(self) -> None:
        super().__init__()
        self.free = [ContextState() for _ in range(8)]

    def alloc_state(self) -> ContextState:
        return self.free.pop()

    def free_state(self, state: ContextState) -> None:
        super().free_state(state)
        self.free.append(state)


class Leaking(Slots):
    """Gives no state back that has a draft open."""

    def free_state(self, state: ContextState) -> None:
        if not state.num_drafted and state not in self.free:
            super().free_state(state)


class Stale(Slots):
    """Forgets nothing when a state is freed."""

    def free_state(self, state: ContextState) -> None:
        if state not in self.free:
            self.free.append(state)


class FreeRaises(Broken):
    def free_state(self, state: ContextState) -> None:
        if state.num_proposals < 0:
            raise KeyError("freed before")
        state.num_proposals = -1


def of_all_sequences(self: Broken, request: DraftRequest, draft: Draft) -> Draft:
    """Drafts depend on the sequence asked before, where it is another."""
    before, self.kept = self.kept, request.history[0]
    if before in (None, request.history[0]):
        return draft
    return replace(draft, tokens=[(t + before) % VOCAB for t in draft.tokens])


def by_chance(self: Broken, request: DraftRequest, draft: Draft) -> Draft:
    return replace(draft, tokens=[random.randrange(VOCAB) for _ in draft.tokens])


def reads_old_streams(self: Broken, request: DraftRequest, draft: Draft) -> Draft:
    old, self.kept = self.kept, request.target_hidden
    if old is None:
        return draft
    shift = int(old.sum() * 1000) if old.isfinite().all() else 1
    return replace(draft, tokens=[(t + shift) % VOCAB for t in draft.tokens])


def normalises_in_place(self: Broken, request: DraftRequest, draft: Draft) -> Draft:
    request.target_hidden.div_(2)
    return draft


def keeps_its_list(self: Broken, request: DraftRequest, draft: Draft) -> Draft:
    shift = len(self.kept) if self.kept is not None else 8
    self.kept = draft.tokens
    return replace(draft, tokens=[(t + 1) % VOCAB for t in draft.tokens]) if shift < 1 else draft


class Tidies(Broken):
    """Keeps the list it returned and changes it with the verdict."""

    def propose(self, request: DraftRequest, state: ContextState) -> Draft:
        self.kept = super().propose(request, state)
        return self.kept

    def after_verify(self, num_accepted: int, state: ContextState) -> None:
        super().after_verify(num_accepted, state)
        self.tidy(self.kept.tokens)

    def tidy(self, tokens: list[int]) -> None:
        tokens.clear()


class Overwrites(Tidies):
    def tidy(self, tokens: list[int]) -> None:
        tokens[:] = [9] * len(tokens)


class CountsItsList(Broken):
    """Counts the drafts in the list it returned, which is the caller's by then."""

    def propose(self, request: DraftRequest, state: ContextState) -> Draft:
        draft = super().propose(request, state)
        self.kept = draft.tokens
        return draft

    def after_verify(self, num_accepted: int, state: ContextState) -> None:
        if num_accepted > len(self.kept or ()):
            raise ValueError("more accepted than drafted")
        super().after_verify(num_accepted, state)


def raises_on_nan(self: Broken, request: DraftRequest, draft: Draft) -> Draft:
    if request.target_hidden.isnan().any():
        raise FloatingPointError("NaN")
    return draft


def id_of_nan(self: Broken, request: DraftRequest, draft: Draft) -> Draft:
    return replace(draft, tokens=[-1]) if request.target_hidden.isnan().any() else draft


def spreads_nan(self: Broken, request: DraftRequest, draft: Draft) -> Draft:
    self.kept = self.kept or bool(request.target_hidden.isnan().any())
    return replace(draft, tokens=[]) if self.kept else draft


def reversed_batch(self: Broken, requests: Any, states: Any) -> list[Draft]:
    drafts = [self.propose(*each) for each in zip(requests, states, strict=True)]
    shortest = min(len(draft.tokens) for draft in drafts)
    return [replace(draft, tokens=draft.tokens[:shortest]) for draft in drafts]


def touching_batch(self: Broken, requests: Any, states: Any) -> None:
    for state in states:
        state.pairs.clear()


def short_batch(self: Broken, requests: Any, states: Any) -> list[Draft]:
    return [self.propose(*each) for each in zip(requests, states, strict=True)][1:]


def single_batch(self: Broken, requests: Any, states: Any) -> list[Draft]:
    return [self.propose(*each) for each in zip(requests, states, strict=True)]


def forgets_first_position(
    self: Broken, prompt: Any, hiddens: Any, state: Any, *, first_position: int = 0
) -> int:
    return ContextProposer.prefill_drafter(self, prompt, hiddens, state)


def loses_the_seam(
    self: Broken, prompt: Any, hiddens: Any, state: Any, *, first_position: int = 0
) -> int:
    """The pair across two pieces of a prompt is left out."""
    stop = first_position + len(hiddens)
    return ContextProposer.prefill_drafter(
        self, prompt[:stop], hiddens, state, first_position=first_position
    )


def counts_wrong(
    self: Broken, prompt: Any, hiddens: Any, state: Any, *, first_position: int = 0
) -> int:
    ContextProposer.prefill_drafter(self, prompt, hiddens, state, first_position=first_position)
    return len(prompt) + 1


def wrong_key(self: Broken, state: ContextState) -> int | None:
    return max(state.pairs) + 1 if state.pairs else None


def shifted_catchup(self: Broken, tokens: Any, hiddens: Any, first: Any, states: Any) -> int:
    later = [position + 1 for position in first]
    return ContextProposer.catchup_batch(self, tokens, hiddens, later, states)


def lazy_catchup(self: Broken, tokens: Any, hiddens: Any, first: Any, states: Any) -> int:
    """Says it took the pairs, and did not."""
    return sum(map(len, tokens))


def other_streams(self: Broken, tokens: Any, hiddens: Any, first: Any, states: Any) -> int:
    turned = [streams.roll(1, 0) for streams in hiddens]
    return ContextProposer.catchup_batch(self, tokens, turned, first, states)


def silent_catchup(self: Broken, tokens: Any, hiddens: Any, first: Any, states: Any) -> int:
    """Took them, and says it did not."""
    ContextProposer.catchup_batch(self, tokens, hiddens, first, states)
    return 0


def any_row_base(
    self: Broken, tokens: Any, hiddens: Any, row_base: int, pos_base: int, state: Any
) -> int:
    return ContextProposer.catchup_batch(self, [tokens], [hiddens], [pos_base], [state])


def half_a_stretch(
    self: Broken, tokens: Any, hiddens: Any, row_base: int, pos_base: int, state: Any
) -> int:
    count = len(tokens) // 2
    return ContextProposer.catchup_drafter(
        self, tokens[:count], hiddens[:count], row_base, pos_base, state
    )


def copies_out(self: Broken, state: ContextState) -> DrafterKv | None:
    kv = ContextProposer.take_drafter_kv(self, state)
    if kv is not None:
        state.pairs = dict(self._moved[kv.blocks[0]])
    return kv


def installs_over(self: Broken, kv: DrafterKv, state: ContextState) -> bool:
    state.pairs = dict(self._moved.pop(kv.blocks[0], {}))
    return True


def installs_twice(self: Broken, kv: DrafterKv, state: ContextState) -> bool:
    if state.pairs:
        return False
    state.pairs = dict(self._moved[kv.blocks[0]])
    return True


def installs_half(self: Broken, kv: DrafterKv, state: ContextState) -> bool:
    done = ContextProposer.install_drafter_kv(self, kv, state)
    if done:
        for key in sorted(state.pairs)[:-1]:
            del state.pairs[key]
    return done


def frees_once(self: Broken, kv: DrafterKv) -> None:
    del self._moved[kv.blocks[0]]


class LeakingRows(Broken):
    """Rows take one of ten places, and are never given back."""

    def take_drafter_kv(self, state: ContextState) -> DrafterKv | None:
        self.calls += bool(state.pairs)
        return super().take_drafter_kv(state) if self.calls < 10 else None


def moves_for_a_snapshot(self: Broken, state: ContextState, through_key: int) -> DrafterKv | None:
    kv = ContextProposer.snapshot_drafter_kv(self, state, through_key)
    state.pairs.clear()
    return kv


def copies_all(self: Broken, state: ContextState, through_key: int) -> DrafterKv | None:
    return ContextProposer.snapshot_drafter_kv(self, state, through_key + 2)


class Aliased(Broken):
    """Shared rows are one and the same for all who install them."""

    def install_drafter_kv(self, kv: DrafterKv, state: ContextState) -> bool:
        if state.pairs or kv.blocks[0] not in self._moved:
            return False
        state.pairs = self._moved.pop(kv.blocks[0])
        return True


class NeverTheSameBlock(BlockProposer[Any]):
    def propose(self, request: DraftRequest, state: Any) -> Draft:
        draft = super().propose(request, state)
        shift = request.num_drafts
        return replace(draft, tokens=[(t + shift) % VOCAB for t in draft.tokens])


class ReadsWrong(DeferredProposer[Any]):
    def read_deferred_draft_token(self) -> int | None:
        token = super().read_deferred_draft_token()
        return None if token is None else token + 1


class WritesNothing(DeferredProposer[Any]):
    def propose(self, request: DraftRequest, state: Any) -> Draft:
        target = request.draft_embed_target
        if target is not None:
            request = replace(request, draft_embed_target=torch.empty_like(target))
        return super().propose(request, state)


class SaysBoth(DeferredProposer[Any]):
    def propose(self, request: DraftRequest, state: Any) -> Draft:
        draft = super().propose(request, state)
        return draft if draft.device_tokens is None else replace(draft, tokens=[1])


class OneFewer(DeferredProposer[Any]):
    def propose(self, request: DraftRequest, state: Any) -> Draft:
        draft = super().propose(request, state)
        if draft.device_tokens is None:
            return draft
        return replace(draft, device_tokens=draft.device_tokens[:-1])


class ReadsWithoutAny(Broken):
    def read_deferred_draft_token(self) -> int | None:
        return 0


def growing_width(self: Broken) -> int:
    return 2 + self.calls


def counted(self: Broken, request: DraftRequest, state: ContextState) -> Draft:
    self.calls += 1
    return ContextProposer.propose(self, request, state)


WAYS: list[tuple[str, str, Callable[[], DraftProposer[Any]]]] = [
    ("facts", "block_gamma is True", breaking(block_gamma=True)),
    ("facts", "block_gamma is 1", breaking(block_gamma=1)),
    ("facts", "needs_comm is 1", breaking(needs_comm=1)),
    (
        "facts",
        r"prefill_hidden_rows\(1\) is 128; allowed is 0 to 1",
        breaking(prefill_hidden_rows=lambda self, most: 128),
    ),
    ("facts", r"propose_batch_max\(\) is 0", breaking(propose_batch_max=lambda self: 0)),
    ("constancy", "facts changed from", breaking(propose_batch_max=growing_width, propose=counted)),
    ("budgets", "MemoryError", breaking(alloc_state_for=budget_matters)),
    ("budgets", "with a budget of 4611686018427387904", breaking(alloc_state_for=budget_shows)),
    (
        "drafts",
        "2 drafts where 1 were wanted",
        drafting(lambda self, r, d: replace(d, tokens=[*d.tokens, 0])),
    ),
    (
        "drafts",
        "drafted -1; allowed are ids 0 to 63",
        drafting(lambda self, r, d: replace(d, tokens=[*d.tokens[:-1], -1])),
    ),
    (
        "drafts",
        "drafted 64;",
        drafting(lambda self, r, d: replace(d, tokens=[*d.tokens[:-1], VOCAB])),
    ),
    ("drafts", r"drafted 1\.5;", drafting(lambda self, r, d: replace(d, tokens=[1.5]))),
    ("drafts", "drafted True;", drafting(lambda self, r, d: replace(d, tokens=[True]))),
    ("drafts", "propose returned None; a Draft is due", drafting(lambda self, r, d: None)),
    (
        "drafts",
        "tokens are None; a list is due",
        drafting(lambda self, r, d: replace(d, tokens=None)),
    ),
    (
        "drafts",
        "due are log-probabilities",
        drafting(lambda self, r, d: replace(d, confidence=[-0.5])),
    ),
    (
        "drafts",
        "due are log-probabilities",
        drafting(lambda self, r, d: replace(d, confidence=[0.5] * len(d.tokens))),
    ),
    (
        "drafts",
        "device_tokens are torch.float32",
        drafting(lambda self, r, d: replace(d, tokens=[], device_tokens=torch.zeros(1))),
    ),
    ("drafts", "last_confidence returned 3.0", breaking(last_confidence=lambda self, state: 3.0)),
    ("memory", "the request's history was changed", drafting(adds_to_history)),
    (
        "verdicts",
        r"after_verify\(2\) after 1 drafts was not refused",
        breaking(after_verify=never_refuses),
    ),
    (
        "verdicts",
        r"after_verify\(1\) with no draft open was not refused",
        breaking(after_verify=stays_open),
    ),
    ("verdicts", "all of a long draft", breaking(after_verify=refuses_all)),
    ("freeing", "drafted .* in place of", Slots),
    ("freeing", "IndexError", Leaking),
    ("freeing", "a new state tells of", Stale),
    ("freeing", "KeyError", FreeRaises),
    ("interleaving", "beside others", drafting(of_all_sequences)),
    ("repeating", "from two proposers made alike", drafting(by_chance)),
    ("memory", "once the caller's memory was overwritten", drafting(reads_old_streams)),
    ("memory", "the caller's streams were changed", drafting(normalises_in_place)),
    ("memory", "once the caller's memory was overwritten", drafting(keeps_its_list)),
    ("memory", r"after_verify changed the draft .* from \[\d+\] to \[\]", Tidies),
    ("memory", r"after_verify changed the draft .* from \[\d+\] to \[9\]", Overwrites),
    (
        "memory",
        r"refused \d accepted of \d drafts after the caller changed the list that propose returned",
        CountsItsList,
    ),
    ("not finite", "FloatingPointError", drafting(raises_on_nan)),
    ("not finite", "drafted -1", drafting(id_of_nan)),
    ("not finite", "beside a sequence with a NaN", drafting(spreads_nan)),
    ("batch", "in a batch of 2, against propose", breaking(propose_batch=reversed_batch)),
    ("batch", "after a declined batch", breaking(propose_batch=touching_batch)),
    ("batch", "for 1 requests", breaking(propose_batch=short_batch)),
    (
        "batch",
        r"but propose_batch_max\(\) is 1",
        breaking(propose_batch=single_batch, propose_batch_max=lambda self: 1),
    ),
    ("prefill", "last_pair_key is 4 after", breaking(prefill_drafter=forgets_first_position)),
    ("prefill", "in pieces of", breaking(prefill_drafter=loses_the_seam)),
    (
        "prefill",
        "prefill_drafter returned 3 for 2 streams",
        breaking(prefill_drafter=counts_wrong),
    ),
    (
        "prefill",
        "last_pair_key is 1 after a prompt of 2 tokens; due is 0",
        breaking(last_pair_key=wrong_key),
    ),
    ("catch-up", "last_pair_key is 18 after catchup", breaking(catchup_batch=lazy_catchup)),
    ("catch-up", "last_pair_key is 20 after catchup", breaking(catchup_drafter=half_a_stretch)),
    ("catch-up", "against a fresh prefill", breaking(catchup_batch=other_streams)),
    ("catch-up", "with row_base 25 where 24 rows are held", breaking(catchup_drafter=any_row_base)),
    ("handover", "a state still tells of", breaking(take_drafter_kv=copies_out)),
    (
        "handover",
        "did not refuse a state that holds rows",
        breaking(install_drafter_kv=installs_over),
    ),
    (
        "handover",
        "took rows that a state already owns",
        breaking(install_drafter_kv=installs_twice),
    ),
    ("handover", "after .* was installed", breaking(install_drafter_kv=installs_half)),
    ("handover", "KeyError", breaking(free_drafter_kv=frees_once)),
    ("handover", "declined where it did not before", LeakingRows),
    ("sharing", "after snapshot_drafter_kv", breaking(snapshot_drafter_kv=moves_for_a_snapshot)),
    ("sharing", "snapshot_drafter_kv through key", breaking(snapshot_drafter_kv=copies_all)),
    ("sharing", "from a snapshot and catch-up", Aliased),
    ("blocks", "drafted of a block of", lambda: NeverTheSameBlock(context(batch=1), block_gamma=4)),
    ("deferral", "the id left is", lambda: ReadsWrong(context(), EMBEDDING)),
    ("deferral", "draft_embed_target was not written", lambda: WritesNothing(context(), EMBEDDING)),
    ("deferral", "both in tokens and on the device", lambda: SaysBoth(context(), EMBEDDING)),
    ("deferral", "with and .* without a target", lambda: OneFewer(context(), EMBEDDING)),
    ("deferral", "but no id was left", ReadsWithoutAny),
]


@pytest.mark.parametrize(
    ("clause", "what", "make"), WAYS, ids=[f"{i}-{way[0]}" for i, way in enumerate(WAYS)]
)
def test_each_way_to_break_the_contract_is_named(
    clause: str, what: str, make: Callable[[], DraftProposer[Any]]
) -> None:
    with pytest.raises(AssertionError, match=what) as caught:
        check(make)
    assert f"breaks clause {clause!r}" in str(caught.value)


@pytest.mark.parametrize("catch", [shifted_catchup, silent_catchup])
def test_a_wrong_catch_up_of_a_batch_is_seen(catch: Any) -> None:
    with pytest.raises(AssertionError, match="breaks clause"):
        check(breaking(catchup_batch=catch))


@pytest.mark.parametrize("how", ["negative", "beyond", "float", "too many", "no draft"])
def test_poison_is_seen(how: Any) -> None:
    with pytest.raises(AssertionError, match="breaks clause 'drafts'"):
        check(lambda: PoisonProposer(context(), how, vocab_size=VOCAB, nth=9))


class IgnoresRunner(DeepseekV4MtpHead):
    def set_circuit_draft(self, runner: Any) -> None:
        pass


class KeepsRunner(DeepseekV4MtpHead):
    def set_circuit_draft(self, runner: Any) -> None:
        if runner is not None:
            super().set_circuit_draft(runner)


@pytest.mark.parametrize(
    ("kind", "what"),
    [(IgnoresRunner, "0 runs with a runner in place"), (KeepsRunner, "runs without it in place")],
)
def test_a_runner_that_is_not_obeyed_is_seen(
    tiny: tuple[ModelConfig, Built], kind: Any, what: str
) -> None:
    with pytest.raises(AssertionError, match=f"breaks clause 'circuit'.*{what}"):
        check_head(tiny, lambda: head(tiny, kind))


def test_every_clause_is_broken_by_something() -> None:
    assert {clause for clause, _, _ in WAYS} | {"circuit"} == set(_CLAUSES)


def test_an_error_of_the_proposer_is_named_with_its_clause() -> None:
    class Angry(NullProposer):
        def propose(self, request: DraftRequest, state: Any) -> Draft:
            raise RuntimeError("not today")

    with pytest.raises(AssertionError, match="raised RuntimeError: not today") as caught:
        check(Angry)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("method", ["alloc_state", "after_verify", "free_state", "drafter_rows"])
def test_the_call_that_raised_is_named(method: str) -> None:
    def raises(*args: Any) -> Any:
        raise KeyError("not here")

    raises.__code__ = raises.__code__.replace(co_name=method)
    with pytest.raises(AssertionError, match=f": {method} raised KeyError: 'not here'"):
        check(breaking(**{method: raises}))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (NullProposer(), "make is a NullProposer; allowed is what makes"),
        (3, "make is 3; allowed is what makes"),
        (int, "gave 0; allowed is what makes a DraftProposer"),
    ],
)
def test_what_makes_no_proposer_is_refused(make: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        check(make)


def test_it_needs_no_test_framework() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from paceline.draft import NgramProposer, check_proposer; "
        "check_proposer(NgramProposer, vocab_size=9); assert 'pytest' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
