"""Any history of requests, aborts, lack of room and broken calls, against a model of tokens."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support import make_rig
from toy import VOCAB, ToyModel, next_token, run, toy_config, toy_engine

from paceline.draft import ContextProposer, DeepseekV4MtpHead, PoisonProposer
from paceline.draft.doubles import ContextState
from paceline.draft.length import SequenceView, StepRecord
from paceline.engine import Emission, Engine
from paceline.models.deepseek_v4.build import Backend
from paceline.models.deepseek_v4.checkpoint import Weights
from paceline.ops import numba_cpu
from paceline.types import Draft, DraftRequest, FinishReason, SamplingParams

POISON = 60
NO_EOS = toy_config(eos_token_ids=())
LIMIT = 400


@cache
def after(tokens: tuple[int, ...]) -> int:
    return next_token(list(tokens))


def expected(prompt: list[int], count: int) -> tuple[list[int], FinishReason]:
    """Tokens and end of a request, told directly; the poison turns its logits into NaN."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        if POISON in tokens:
            return tokens[len(prompt) :], FinishReason.ERROR
        tokens.append(after(tuple(tokens)))
    return tokens[len(prompt) :], FinishReason.LENGTH


def _prompts() -> list[list[int]]:
    rng = random.Random(5)
    bases = [[rng.randrange(2, POISON) for _ in range(300)] for _ in range(2)]
    lengths = [1, 2, 5, 40, 126, 127, 128, 129, 140, 200, 256, 257, 270]
    return [base[:n] for base in bases for n in lengths] + [[*bases[0][:129], 7]]


PROMPTS = _prompts()


class Flaky(ToyModel):
    """Fails when told to."""

    fails = False

    def forward(self, inputs: Any, pools: Any) -> Any:
        if self.fails:
            self.fails = False
            raise MemoryError("no room")
        return super().forward(inputs, pools)


class Moody:
    """A length policy whose counts are set from outside."""

    num_drafts = 3

    def choose(
        self, sequences: Sequence[SequenceView], *, max_drafts: int | None = None
    ) -> list[int]:
        return [min(view.limit, (self.num_drafts + view.id) % 9) for view in sequences]

    def observe(self, record: StepRecord) -> None:
        pass


@cache
def digest_of(position: int, token: int, said: int, follows: int) -> int:
    """What `ContextProposer` makes of a pair whose streams are the toy's."""
    stream = np.zeros((2, 8), dtype=np.float32)
    stream[:, 0], stream[:, 1], stream[:, 2] = position, token, said
    return zlib.crc32(stream.tobytes(), follows)


class Exact(ContextProposer):
    """Holds each pair it has against the history, and drafts right, wrong or too little."""

    def __init__(self, batch: int, *, checks: bool) -> None:
        super().__init__(vocab_size=VOCAB, batch=batch)
        self.checks = checks
        self.live: list[ContextState] = []

    def alloc_state(self) -> ContextState:
        state = super().alloc_state()
        self.live.append(state)
        return state

    def free_state(self, state: ContextState) -> None:
        super().free_state(state)
        self.live = [one for one in self.live if one is not state]

    def propose(self, request: DraftRequest, state: ContextState) -> Draft:
        history = request.history
        super().propose(request, state)
        keys = sorted(state.pairs)
        assert keys[-1] == request.position - 1
        assert keys[0] <= max(0, request.position - 128) or not self.checks
        for key in keys if self.checks else ():
            said = after(tuple(history[: key + 1]))
            wanted = digest_of(key, history[key], said, history[key + 1])
            assert state.pairs[key] == wanted, f"pair {key} of {len(history)} tokens"
        kind = next_token([*history, state.num_proposals])
        tokens = list(history)
        for n in range(request.num_drafts):
            right = after(tuple(tokens))
            tokens.append(right if n < kind % 7 else (right + kind) % VOCAB)
        drafts = tokens[len(history) :][: request.num_drafts - (kind % 5 == 0)]
        state.num_drafted = len(drafts)
        return Draft(tokens=drafts)


class Life(RuleBasedStateMachine):
    """An engine whose proposer is exact, or poisoned, beside the tokens it should say."""

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[int, list[int]] = {}
        self.asked: dict[int, tuple[list[int], int]] = {}
        self.num_failures = 0

    @initialize(
        slots=st.integers(1, 4),
        blocks=st.integers(4, 9),
        budget=st.integers(4, 300),
        batch=st.integers(1, 4),
        prefix_bytes=st.sampled_from([0, 20_000, 1 << 24]),
        poison=st.sampled_from([None, None, "raises", "beyond", "too many", "nan streams"]),
        method=st.sampled_from(["propose", "catchup_batch", "prefill_drafter", "after_verify"]),
        failures=st.sampled_from([3, 1000]),
    )
    def start(
        self,
        slots: int,
        blocks: int,
        budget: int,
        batch: int,
        prefix_bytes: int,
        poison: Any,
        method: str,
        failures: int,
    ) -> None:
        self.proposer = Exact(batch, checks=poison is None)
        self.poisoned = poison is not None
        asked: Any = self.proposer
        if poison is not None:
            asked = PoisonProposer(
                self.proposer, poison, vocab_size=VOCAB, method=method, nth=2, every=3
            )
        self.model = Flaky(poison=POISON)
        self.policy = Moody()
        self.engine = toy_engine(
            model=self.model,
            config=NO_EOS,
            proposer=asked,
            num_drafts="auto",
            lengths=self.policy,
            max_seq_len=LIMIT,
            max_num_seqs=slots,
            max_num_batched_tokens=max(budget, slots),
            num_blocks=blocks,
            prefix_cache_bytes=prefix_bytes,
            max_proposer_failures=failures,
        )

    @precondition(lambda self: len(self.asked) < 7)
    @rule(
        which=st.sampled_from(range(len(PROMPTS))),
        count=st.sampled_from([130, 90, 60, 20, 8, 2, 1]),
        num_drafts=st.sampled_from([0, 1, 3, 8, "auto", "auto"]),
    )
    def add(self, which: int, count: int, num_drafts: Any) -> None:
        prompt = PROMPTS[which]
        params = SamplingParams(max_tokens=count, num_drafts=num_drafts)
        number = self.engine.add(prompt, params)
        self.asked[number] = prompt, count
        self.said[number] = []

    @precondition(lambda self: len(self.asked) < 7)
    @rule(prompt=st.lists(st.integers(2, 59), min_size=1, max_size=20), at=st.integers(0, 20))
    def add_poison(self, prompt: list[int], at: int) -> None:
        prompt.insert(at, POISON)
        number = self.engine.add(prompt, SamplingParams(max_tokens=9))
        self.asked[number] = prompt, 9
        self.said[number] = []

    @precondition(lambda self: self.asked)
    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.hear(self.engine.step())
            self.check()

    @precondition(lambda self: self.asked)
    @rule(times=st.integers(10, 60))
    def many_steps(self, times: int) -> None:
        self.step(times)

    @rule(count=st.integers(0, 8))
    def change_drafts(self, count: int) -> None:
        self.policy.num_drafts = count

    @precondition(lambda self: self.asked)
    @rule()
    def preempt(self) -> None:
        self.engine._scheduler.preempt_last()

    @rule()
    def clear_prefixes(self) -> None:
        self.engine.clear_prefix_cache()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.asked))))

    def end(self, number: int) -> None:
        assert self.engine.abort(number)
        assert not self.engine.abort(number)
        del self.asked[number]

    @precondition(lambda self: self.asked)
    @rule()
    def fail(self) -> None:
        self.model.fails = True
        with pytest.raises(MemoryError):
            self.engine.step()
        self.num_failures += 1

    def hear(self, emissions: list[Emission]) -> None:
        for emission in emissions:
            number = emission.request_id
            prompt, count = self.asked[number]
            tokens, reason = expected(prompt, count)
            self.said[number] += emission.token_ids
            assert self.said[number] == tokens[: len(self.said[number])]
            assert (
                sum(origin.is_draft for origin in emission.origins)
                == len(emission.token_ids)
                - (0 if emission.finish_reason is FinishReason.ERROR else 1)
                or len(self.said[number]) == count
            )
            if emission.finish_reason is not None:
                assert emission.finish_reason is reason
                assert self.said[number] == tokens
                del self.asked[number]

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine, scheduler = self.engine, self.engine._scheduler
        alive = {n: request.sequence for n, request in engine._requests.items()}
        assert set(alive) == set(self.asked)
        running = {n: one for n, one in alive.items() if one.cache is not None}
        assert [one.id for one in scheduler._running] == sorted(running)
        assert [one.id for one in scheduler._waiting] == sorted(set(alive) - set(running))

        slots = [one.handle.slot for one in running.values()]
        assert sorted([*slots, *scheduler._free_slots]) == list(range(scheduler.max_num_seqs))

        holders = Counter(block for one in running.values() for block in one.handle.blocks)
        tree = None if engine.prefix is None else engine.prefix.tree
        if tree is not None:
            holders.update(node.block for node in tree._order)
        allocator = scheduler.allocator
        for block in range(1, allocator.num_blocks + 1):
            assert allocator.holders(block) == holders[block]
        assert allocator.num_free == allocator.num_blocks - len(holders)

        for number, one in alive.items():
            prompt, count = self.asked[number]
            assert one.tokens == [*prompt, *self.said[number]]
            assert one.num_emitted < max(count, 1)
            if one.cache is not None:
                assert one.handle.length < len(one.tokens)

        drafting = engine.drafting
        assert drafting is not None
        heard = {one.id for one in scheduler._preempted}
        assert set(drafting._states) <= set(running) | heard
        assert set(drafting._carried) <= set(alive) - set(running)
        assert len(self.proposer.live) == len(drafting._states)
        kept = 0
        if tree is not None:
            kept = sum(
                node.payload is not None and node.payload.drafter is not None
                for node in tree._order
            )
        assert self.proposer.num_moved == len(drafting._carried) + kept
        if not self.poisoned:
            assert engine.num_proposer_failures == 0

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for emissions in run(self.engine).values():
            self.hear(emissions)
        assert not self.asked
        assert not self.proposer.live
        self.engine.clear_prefix_cache()
        assert self.engine._scheduler.all_home
        assert self.proposer.num_moved == 0


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("seed", range(8))
def test_long_lives(seed: int) -> None:
    """The same for longer, and with more steps between the events than a shrinker would choose."""
    rng = random.Random(seed)
    life = Life()
    life.start(
        slots=rng.randint(1, 4),
        blocks=rng.randint(4, 8),
        budget=rng.choice([5, 24, 100, 300]),
        batch=rng.randint(1, 4),
        prefix_bytes=rng.choice([0, 20_000, 1 << 24]),
        poison=rng.choice([None, None, "raises", "beyond", "nan streams"]),
        method=rng.choice(["propose", "catchup_batch"]),
        failures=1000,
    )
    for _ in range(220):
        event = rng.random()
        if len(life.asked) < 2 or (event < 0.25 and len(life.asked) < 9):
            life.add(
                rng.randrange(len(PROMPTS)), rng.randint(1, 130), rng.choice([0, 3, 8, "auto"])
            )
        elif event < 0.3:
            life.preempt()
        elif event < 0.35:
            life.end(rng.choice(sorted(life.asked)))
        elif event < 0.38:
            life.fail()
        elif event < 0.45:
            life.change_drafts(rng.choice([0, 0, 1, 3, 8]))
        elif event < 0.46:
            life.clear_prefixes()
        else:
            life.step(rng.randint(1, 12))
        life.check()
    life.teardown()
    totals = life.engine
    assert totals.num_forwards > 200
    assert totals.num_preemptions > 0
    assert totals.speculation.num_accepted > 100
    assert (totals.num_prefix_hits > 0) == (totals.prefix is not None)


# Over the real model and its head


def test_a_long_life_of_the_real_model(tiny_weights: Weights) -> None:
    backend: Backend = "fused" if numba_cpu.available() else "torch"
    config = tiny_weights.config
    rig = make_rig(tiny_weights, config, backend=backend, num_slots=1, max_seq_len=256)
    built, rng = rig.built, random.Random(3)
    assert built.mtp is not None
    base = [rng.randrange(8, config.vocab_size) for _ in range(200)]
    prompts = [base[:n] for n in (3, 60, 127, 128, 129, 150)]
    count = 24
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    plain = Engine(built.model, config, max_seq_len=256, max_num_seqs=1)
    for prompt in prompts:
        plain.add(prompt, params)
    want = [[t for e in es for t in e.token_ids] for _, es in sorted(run(plain).items())]

    head = DeepseekV4MtpHead.new(
        built.mtp, built.embed_tokens, built.lm_head, config, 0, 256, num_slots=3
    )
    engine = Engine(
        built.model,
        config,
        proposer=head,
        num_drafts="auto",
        lengths=Moody(),
        max_seq_len=256,
        max_num_seqs=3,
        max_num_batched_tokens=48,
        num_blocks=5,
        prefix_cache_bytes=1 << 24,
    )
    assert engine.prefix is not None
    policy = engine.lengths
    assert isinstance(policy, Moody)
    said: dict[int, list[int]] = {}
    which: dict[int, int] = {}

    def hear(emissions: list[Emission]) -> None:
        for emission in emissions:
            number = emission.request_id
            said[number] += emission.token_ids
            assert said[number] == want[which[number]][: len(said[number])]
            if emission.finish_reason is not None:
                assert len(said[number]) == count

    for _ in range(110):
        event = rng.random()
        if event < 0.2 and engine._scheduler.num_waiting < 3:
            index = rng.randrange(len(prompts))
            number = engine.add(prompts[index], replace(params, num_drafts=rng.choice([3, "auto"])))
            said[number], which[number] = [], index
        elif event < 0.24:
            engine._scheduler.preempt_last()
        elif event < 0.28 and engine._requests:
            engine.abort(rng.choice(sorted(engine._requests)))
        elif event < 0.4:
            policy.num_drafts = rng.choice([0, 1, 3, 8])
        else:
            hear(engine.step())
    for number, emissions in run(engine).items():
        del number
        hear(emissions)
    assert engine.num_proposer_failures == 0
    assert engine.num_preemptions > 2
    assert engine.num_prefix_hits > 2
    assert head.num_free_slots == head.num_slots
    engine.clear_prefix_cache()
    assert engine._scheduler.all_home
    assert head.num_carried == 0
