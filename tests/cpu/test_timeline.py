"""Every method of the proposer contract is called by the engine, when the contract says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from toy import VOCAB, ToyModel, continuation, run, toy_config, toy_engine

from paceline import LLM, bundled_model_path
from paceline.draft import (
    BlockProposer,
    ContextProposer,
    DraftProposer,
    OracleProposer,
    ScriptedProposer,
)
from paceline.draft.doubles import WrappingProposer
from paceline.types import (
    CheckpointError,
    ConfigError,
    Draft,
    DraftRequest,
    RequestError,
    SamplingParams,
)

NO_EOS = toy_config(eos_token_ids=())
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
Event = tuple[Any, ...]


def text(prompt: list[int] = PROMPT) -> list[int]:
    return [*prompt, *continuation(prompt, 120)]


class Recorder(WrappingProposer[Any]):
    """Hands everything on and writes down what was said, and of whom."""

    def __init__(self, inner: DraftProposer[Any], **facts: Any) -> None:
        super().__init__(inner)
        self.events: list[Event] = []
        self.batch = 1
        self.hidden_rows = 128
        self.names: dict[int, int] = {}
        self.rows: dict[int, list[int]] = {}
        for name, value in facts.items():
            setattr(self, name, value)

    def who(self, state: Any) -> int:
        return self.names[id(state)]

    def named(self, *names: str) -> list[Event]:
        return [event for event in self.events if event[0] in names]

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        return min(max_seq_len, self.hidden_rows)

    def alloc_state(self) -> Any:
        raise AssertionError("the engine knows the budget")

    def alloc_state_for(self, budget_tokens: int) -> Any:
        state = self.inner.alloc_state_for(budget_tokens)
        self.names[id(state)] = len(self.names)
        self.rows[self.who(state)] = []
        self.kept = [*getattr(self, "kept", []), state]
        self.events.append(("alloc", self.who(state), budget_tokens))
        return state

    def prefill_drafter(
        self, prompt_tokens: Any, hiddens: torch.Tensor, state: Any, *, first_position: int = 0
    ) -> int:
        positions = [int(stream[0, 0]) for stream in hiddens]
        assert positions == list(range(first_position, first_position + len(positions)))
        self.rows[self.who(state)] += positions
        self.events.append(("prefill", self.who(state), first_position, len(positions)))
        return self.inner.prefill_drafter(
            prompt_tokens, hiddens, state, first_position=first_position
        )

    def propose_batch_max(self) -> int:
        return self.batch

    def propose_batch(self, requests: Any, states: Any) -> Any:
        whose = tuple(self.who(state) for state in states)
        self.events.append(("propose_batch", whose, tuple(r.num_drafts for r in requests)))
        return [self.inner.propose(*each) for each in zip(requests, states, strict=True)]

    def propose(self, request: DraftRequest, state: Any) -> Any:
        self.events.append(("propose", self.who(state), request.position, request.num_drafts))
        assert request.target_hidden[0, 0] == request.position - 1
        return self.inner.propose(request, state)

    def after_verify(self, num_accepted: int, state: Any) -> None:
        self.events.append(("after_verify", self.who(state), num_accepted))
        self.inner.after_verify(num_accepted, state)

    def catchup_batch(self, tokens: Any, hiddens: Any, first_pos: Any, states: Any) -> int:
        for ids, streams, first in zip(tokens, hiddens, first_pos, strict=True):
            assert [int(s[0, 0]) for s in streams] == [first - 1 + n for n in range(len(ids))]
        whose = tuple(self.who(state) for state in states)
        self.events.append(("catchup_batch", whose, tuple(map(list, tokens)), tuple(first_pos)))
        return self.inner.catchup_batch(tokens, hiddens, first_pos, states)

    def catchup_drafter(
        self, tokens: Any, hiddens: Any, row_base: int, pos_base: int, state: Any
    ) -> int:
        assert [int(s[0, 0]) for s in hiddens] == [pos_base - 1 + n for n in range(len(tokens))]
        event = ("catchup_drafter", self.who(state), list(tokens), row_base, pos_base)
        self.events.append(event)
        return self.inner.catchup_drafter(tokens, hiddens, row_base, pos_base, state)

    def drafter_rows(self, state: Any) -> int:
        self.events.append(("drafter_rows", self.who(state)))
        return self.inner.drafter_rows(state)

    def last_pair_key(self, state: Any) -> Any:
        self.events.append(("last_pair_key", self.who(state)))
        return self.inner.last_pair_key(state)

    def take_drafter_kv(self, state: Any) -> Any:
        kv = self.inner.take_drafter_kv(state)
        self.events.append(("take", self.who(state), None if kv is None else kv.last_pair_key))
        return kv

    def install_drafter_kv(self, kv: Any, state: Any) -> bool:
        self.events.append(("install", self.who(state), kv.last_pair_key))
        return self.inner.install_drafter_kv(kv, state)

    def free_drafter_kv(self, kv: Any) -> None:
        self.events.append(("free_kv", kv.last_pair_key))
        self.inner.free_drafter_kv(kv)

    def free_state(self, state: Any) -> None:
        self.events.append(("free", self.who(state)))
        self.inner.free_state(state)


def scripted(*accept_counts: int, prompts: list[list[int]] | None = None) -> ScriptedProposer:
    texts = [text(prompt) for prompt in prompts or [PROMPT]]
    return ScriptedProposer(texts, accept_counts=accept_counts, vocab_size=VOCAB)


class Context(ContextProposer):
    """Keeps pairs as a head would and drafts the right tokens all the same."""

    def __init__(self, texts: list[list[int]], counts: tuple[int, ...] = (9,)) -> None:
        super().__init__(vocab_size=VOCAB)
        self.right = ScriptedProposer(texts, accept_counts=counts, vocab_size=VOCAB)

    def propose(self, request: DraftRequest, state: Any) -> Any:
        super().propose(request, state)
        draft = self.right.propose(request, state)
        state.num_drafted = draft.num_tokens
        return draft


def test_the_whole_life_of_a_sequence() -> None:
    proposer = Recorder(scripted(2, 0, 3))
    engine = toy_engine(
        config=NO_EOS, proposer=proposer, num_drafts=3, max_num_batched_tokens=4, max_num_seqs=1
    )
    engine.add(PROMPT, SamplingParams(max_tokens=10))
    run(engine)
    said = text()
    assert proposer.events == [
        ("alloc", 0, 20),
        ("prefill", 0, 0, 4),
        ("prefill", 0, 4, 4),
        ("prefill", 0, 8, 1),  # the pair of position 9 waits for the token sampled there
        ("propose", 0, 10, 3),
        ("after_verify", 0, 2),
        ("catchup_batch", (0,), ([said[11], said[12]],), (11,)),
        ("propose", 0, 13, 3),
        ("after_verify", 0, 0),
        ("propose", 0, 14, 3),
        ("after_verify", 0, 3),
        ("catchup_batch", (0,), ([said[15], said[16], said[17]],), (15,)),
        # One token is left to emit, for which no draft is asked.
        ("free", 0),
    ]


def test_a_sequence_that_drafts_nothing_costs_a_proposer_nothing() -> None:
    for params in (SamplingParams(max_tokens=9, num_drafts=0), SamplingParams(max_tokens=1)):
        proposer = Recorder(scripted(1))
        engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=3)
        engine.add(PROMPT, params)
        run(engine)
        assert proposer.events == []


class Reusing(ToyModel):
    """Gives its streams in memory that the next forward overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.zeros(64, 2, 8)

    def forward(self, inputs: Any, pools: Any) -> Any:
        output = super().forward(inputs, pools)
        self.buffer.fill_(-1.0)
        count = len(output.hiddens)
        self.buffer[:count] = output.hiddens
        return type(output)(logits=output.logits, hiddens=self.buffer[:count])


@pytest.mark.parametrize("deferred", [False, True])
def test_a_prompt_is_fed_chunk_by_chunk_or_just_before_the_first_propose(deferred: bool) -> None:
    proposer = Recorder(scripted(1), prefill_uses_shared_buffers=deferred)
    engine = toy_engine(
        model=Reusing(), config=NO_EOS, proposer=proposer, num_drafts=2, max_num_batched_tokens=8
    )
    engine.add(PROMPT, SamplingParams(max_tokens=12))
    engine.step()
    engine.step()
    fed = [("prefill", 0, 0, 8), ("prefill", 0, 8, 1)]
    assert proposer.events == [("alloc", 0, 22), *([] if deferred else fed)]
    engine.step()
    # `Recorder` checks that the streams are still those of their positions.
    assert proposer.events[1:4] == [*fed, ("propose", 0, 10, 2)]
    run(engine)
    assert len(proposer.named("prefill")) == 2
    assert engine.num_proposer_failures == 0


def test_what_is_put_off_is_dropped_with_its_sequence() -> None:
    proposer = Recorder(scripted(1), prefill_uses_shared_buffers=True)
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=2)
    number = engine.add(PROMPT, SamplingParams(max_tokens=12))
    engine.step()
    assert engine.drafting is not None
    assert engine.drafting.num_kept_prompts == 1
    engine.abort(number)
    engine.check_idle()
    assert proposer.named("prefill") == []


@pytest.mark.parametrize("wanted", [0, 1, 2, 5, 39, 40, 128])
def test_exactly_the_rows_asked_for_are_retained(wanted: int) -> None:
    prompt = [3 + n % 50 for n in range(40)]
    model, asked = ToyModel(), []
    forward = model.forward
    proposer = Recorder(scripted(1, prompts=[prompt]), hidden_rows=wanted)

    def counting(inputs: Any, pools: Any) -> Any:
        asked.extend(inputs.positions[inputs.hidden_rows].tolist())
        return forward(inputs, pools)

    model.forward = counting  # type: ignore[method-assign]
    engine = toy_engine(
        model=model,
        config=NO_EOS,
        proposer=proposer,
        num_drafts=2,
        max_num_batched_tokens=7,
        max_num_seqs=1,
    )
    engine.add(prompt, SamplingParams(max_tokens=9))
    while not any(e.token_ids for e in engine.step()):
        pass
    # The first propose starts from the last row, whatever is retained beside it.
    assert asked == list(range(40 - max(1, min(wanted, 40)), 40))
    assert proposer.rows[0] == list(range(40 - max(1, min(wanted, 40)), 39))
    run(engine)
    assert engine.num_proposer_failures == 0


def test_a_stretch_without_drafts_is_caught_up_from_the_newest_pair_on() -> None:
    prompts = [PROMPT, [20] * 90]
    proposer = Recorder(Context([text(prompt) for prompt in prompts]))
    engine = toy_engine(
        config=NO_EOS, proposer=proposer, num_drafts=3, max_num_batched_tokens=2, max_num_seqs=2
    )
    engine.add(prompts[0], SamplingParams(max_tokens=60))
    while len(proposer.named("propose")) < 1:
        engine.step()
    # A prompt takes every row that a draft could have.
    reader = engine.add(prompts[1], SamplingParams(max_tokens=1))
    del proposer.events[:]
    for _ in range(20):
        engine.step()
    assert proposer.events == []
    engine.abort(reader)
    known = len(engine._requests[0].sequence.tokens)
    engine.step()
    said = text()
    # The prompt, a propose and its accepted draft made pairs 0 to 10.
    assert proposer.events[:4] == [
        ("last_pair_key", 0),
        ("drafter_rows", 0),
        ("catchup_drafter", 0, said[12 : known - 1], 11, 12),
        ("propose", 0, known - 1, 1),
    ]
    assert known > 30
    run(engine)
    assert engine.num_proposer_failures == 0


def test_batches_are_cut_to_what_a_proposer_takes() -> None:
    prompts = [[*PROMPT, n] for n in range(5)]
    proposer = Recorder(scripted(2, prompts=prompts), batch=2)
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=3)
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=30))
    engine.step()
    del proposer.events[:]
    engine.step()
    assert [event[:2] for event in proposer.events] == [
        ("propose_batch", (0, 1)),
        ("propose_batch", (2, 3)),
        ("propose", 4),
        *[("after_verify", n) for n in range(5)],
        ("catchup_batch", (0, 1)),
        ("catchup_batch", (2, 3)),
        ("catchup_batch", (4,)),
    ]
    run(engine)


def test_a_batch_of_one_at_a_time() -> None:
    prompts = [[*PROMPT, n] for n in range(3)]
    proposer = Recorder(scripted(2, prompts=prompts), batch=1)
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=3)
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=9))
    run(engine)
    assert proposer.named("propose_batch") == []
    assert {event[1] for event in proposer.named("propose")} == {0, 1, 2}


@pytest.mark.parametrize(("count", "budget"), [(7, 17), (1000, 64)])
def test_a_state_is_sized_to_the_request_or_to_the_context(count: int, budget: int) -> None:
    proposer = Recorder(scripted(1))
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=1, max_seq_len=64)
    engine.add(PROMPT, SamplingParams(max_tokens=count))
    engine.step()
    assert proposer.events[0] == ("alloc", 0, budget)


def test_rows_are_taken_before_a_state_is_freed_and_installed_before_anything_is_fed() -> None:
    proposer = Recorder(Context([text()]))
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=3, max_num_batched_tokens=8)
    engine.add(PROMPT, SamplingParams(max_tokens=40))
    for _ in range(4):
        engine.step()
    del proposer.events[:]
    engine._scheduler.preempt_last()
    while not proposer.named("propose"):
        engine.step()
    said = text()
    assert proposer.events == [
        ("take", 0, 16),
        ("free", 0),
        ("alloc", 1, 50),
        ("install", 1, 16),
        ("last_pair_key", 1),
        # Of the 19 tokens read anew, only the one pair that was not there to be carried.
        ("drafter_rows", 1),
        ("catchup_drafter", 1, [said[18]], 17, 18),
        ("propose", 1, 19, 3),
        ("after_verify", 1, 3),
        ("catchup_batch", (1,), (said[20:23],), (20,)),
    ]
    run(engine)
    assert engine.num_proposer_failures == 0


def test_rows_nobody_comes_back_for_are_freed_once() -> None:
    other = [*PROMPT, 3]
    inner = Context([text(), text(other)])
    proposer = Recorder(inner)
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=3, num_blocks=2)
    engine.add(PROMPT, SamplingParams(max_tokens=40))
    number = engine.add(other, SamplingParams(max_tokens=40))
    for _ in range(3):
        engine.step()
    engine._scheduler.preempt_last()
    # The block it would come back to is somebody else's for a while.
    taken = engine._scheduler.allocator.allocate(1)
    engine.step()
    assert inner.num_moved == 1
    engine.abort(number)
    assert inner.num_moved == 0
    assert len(proposer.named("free_kv")) == 1
    engine._scheduler.allocator.release(taken or [])
    run(engine)
    assert sorted(proposer.named("free")) == [("free", 0), ("free", 1)]


# Blocks


def block(gamma: int) -> BlockProposer[Any]:
    return BlockProposer(OracleProposer([text()]), block_gamma=gamma)


@pytest.mark.parametrize("gamma", [2, 4, 9])
@pytest.mark.parametrize("given", [None, "same"])
def test_a_block_drafter_says_how_many(gamma: int, given: Any) -> None:
    proposer = block(gamma)
    count = gamma - 1 if given else None
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=count)
    assert engine.num_drafts == gamma - 1
    engine.add(PROMPT, SamplingParams(max_tokens=1 + 3 * gamma))
    emissions = run(engine)[0]
    assert [len(e.token_ids) for e in emissions] == [1, gamma, gamma, gamma]
    assert proposer.asked == [gamma - 1] * 3
    engine.add(PROMPT, SamplingParams(max_tokens=9, num_drafts=0))
    run(engine)
    assert len(proposer.asked) == 3


@pytest.mark.parametrize("given", [1, 2, 4, "auto"])
def test_a_number_that_contradicts_the_block_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="blocks of 4, the known token included; allowed is 3"):
        toy_engine(proposer=block(4), num_drafts=given)
    engine = toy_engine(proposer=block(4))
    with pytest.raises(RequestError, match="drafts in blocks; allowed is 0 or 3"):
        engine.add(PROMPT, SamplingParams(num_drafts=given))
    engine.check_idle()


def test_a_block_wider_than_a_step_is_refused_and_off_is_off() -> None:
    with pytest.raises(ConfigError, match="block_gamma is 10; allowed is 2 to 9"):
        toy_engine(proposer=block(10))
    engine = toy_engine(config=NO_EOS, proposer=block(4), num_drafts=0)
    engine.add(PROMPT, SamplingParams(max_tokens=9))
    assert run(engine)[0][-1].stats.num_drafted == 0


def test_the_door_leaves_the_number_to_a_block_drafter() -> None:
    try:
        path = bundled_model_path()
    except CheckpointError as error:
        pytest.skip(str(error))
    make: Callable[..., Any] = lambda context: block(6)  # noqa: E731
    with LLM(path, proposer=make, max_seq_len=256) as llm:
        assert llm.num_drafts == 5
    with pytest.raises(ConfigError, match="num_drafts is 3"):
        LLM(path, proposer=make, num_drafts=3, max_seq_len=256)


# Left on the device


class Hiding(OracleProposer):
    """Leaves one right id where only it can read it, when it is told where an embedding goes."""

    left: int | None = None
    num_left = num_read = 0

    def propose(self, request: DraftRequest, state: Any) -> Draft:
        draft = super().propose(request, state)
        self.left = None
        if request.draft_embed_target is None or not draft.tokens:
            return draft
        self.left = draft.tokens[0]
        self.num_left += 1
        return Draft(tokens=[])

    def read_deferred_draft_token(self) -> int | None:
        self.num_read += self.left is not None
        return self.left


@pytest.mark.parametrize("on_device", [False, True])
def test_an_id_that_was_left_for_the_proposer_to_read_is_read(on_device: bool) -> None:
    proposer = Hiding([text()])
    engine = toy_engine(config=NO_EOS, proposer=proposer, num_drafts=3, drafts_on_device=on_device)
    engine.add(PROMPT, SamplingParams(max_tokens=21))
    emissions = run(engine)[0]
    assert [token for e in emissions for token in e.token_ids] == text()[10:31]
    assert proposer.num_read == proposer.num_left == (10 if on_device else 0)
    assert emissions[-1].stats.num_accepted == (10 if on_device else 15)
    assert engine.num_proposer_failures == 0
