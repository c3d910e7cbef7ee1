"""The chain of drafts behind a runner: equal drafts, inert padding, and what is not served."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from head_rig import (
    DeviceRun,
    Run,
    Tiny,
    assert_exact,
    make_tiny,
    no_host_read,
    toy_config,
    toy_head,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.draft import DeepseekV4MtpHead
from paceline.draft.planned import PlannedDraftRunner
from paceline.draft.proposer import DraftShape
from paceline.types import ConfigError, Draft


@pytest.fixture(scope="module", params=["torch", "fused"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", request.param)


class Poisoning(PlannedDraftRunner):
    """Fills what padding may be computed from, and all that is left over, before each run."""

    def __init__(self, head: DeepseekV4MtpHead, shapes: list[DraftShape] | None = None) -> None:
        self.head, self.bound = head, head.circuit_draft()
        self.seen: list[DraftShape] = []
        super().__init__(self.bound, shapes)

    def run_draft(self, shape: DraftShape) -> None:
        live = int((self.bound.inputs["slots"][: shape.width] != self.bound.inert_slot).sum())
        nan = float("nan")
        self.bound.inputs["hiddens"][live:] = nan
        self.head.ring.rows[self.bound.inert_slot] = nan
        for name in ("tokens", "log_probs", "streams"):
            self.bound.outputs[name].fill_(-7 if name == "tokens" else nan)
        self.seen.append(shape)
        super().run_draft(shape)


# What is described


def test_the_binding_lists_widths_pairs_and_depths() -> None:
    config = toy_config()
    for num_slots, widths in ((1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9))):
        binding = toy_head(config, num_slots=num_slots, max_width=5).circuit_draft()
        assert binding.widths == widths
        assert set(binding.shapes) == {
            DraftShape(width=w, pairs=p, depth=d)
            for w in widths
            for p in (0, 4 * w)
            for d in (1, 2, 3, 4)
        }
        assert binding.inert_slot == num_slots
        assert binding.vocab_rows == config.vocab_size


def test_the_buffers_are_where_they_were_and_as_the_contract_says() -> None:
    config = toy_config()
    head = toy_head(config, num_slots=3, max_width=5)
    binding = head.circuit_draft()
    streams = (config.hc_mult, config.hidden_size)
    shapes = {name: tuple(buffer.shape) for name, buffer in binding.inputs.items()}
    assert shapes == {
        **dict.fromkeys(("ids", "keys", "slots", "first_keys", "depths"), (3,)),
        **dict.fromkeys(("pair_ids", "pair_keys", "pair_slots", "pair_rows"), (12,)),
        "hiddens": (3, *streams),
        "pending": (12, *streams),
    }
    assert {name: tuple(buffer.shape) for name, buffer in binding.outputs.items()} == {
        "tokens": (3, 4),
        "log_probs": (3, 4),
        "streams": (3, *streams),
        "nonfinite": (1,),
    }
    places = {name: buffer.data_ptr() for name, buffer in {**binding.inputs}.items()}
    sequence = DeviceRun(head, config, 1)
    sequence.prefill(20)
    for _ in range(4):
        sequence.step(3, 2)
    again = head.circuit_draft()
    assert {name: buffer.data_ptr() for name, buffer in again.inputs.items()} == places


def test_a_run_leaves_its_inputs_and_gives_the_same_again(tiny: Tiny) -> None:
    head = tiny.head(num_slots=4)
    binding = head.circuit_draft()
    sequences = [DeviceRun(head, tiny.config, i) for i in range(3)]
    for sequence in sequences:
        sequence.prefill(10)
        sequence.step(3, 2)
    requests = [s.deferred(3) for s in sequences]
    head.propose_batch(requests, [s.state for s in sequences])
    inputs = {name: buffer.clone() for name, buffer in binding.inputs.items()}
    outputs = {name: buffer.clone() for name, buffer in binding.outputs.items()}
    rows = head.ring.rows.clone()
    with no_host_read():
        binding.run(DraftShape(width=3, pairs=6, depth=3))
    for name, buffer in binding.inputs.items():
        assert torch.equal(buffer, inputs[name]), name
    for name in ("tokens", "log_probs", "streams", "nonfinite"):
        assert torch.equal(binding.outputs[name][:3], outputs[name][:3]), name
    assert torch.equal(head.ring.rows[:4], rows[:4])


def test_a_warm_up_on_padding_touches_nothing_but_the_inert_slot(tiny: Tiny) -> None:
    head = tiny.head(num_slots=4)
    sequence = DeviceRun(head, tiny.config, 1)
    sequence.prefill(150)
    sequence.step(4, 2)
    rows = head.ring.rows.clone()
    PlannedDraftRunner(head.circuit_draft())
    assert torch.equal(head.ring.rows[:4], rows[:4])
    assert head.num_nonfinite == 0


# Equal drafts


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    confidence=st.booleans(),
    min_probability=st.sampled_from([0.0, 0.4]),
)
def test_any_history_behind_a_runner_drafts_as_without(
    seed: int, confidence: bool, min_probability: float
) -> None:
    """Sequences join and leave, K changes each step, padding is poison; toy block."""
    rng = random.Random(seed)
    config = toy_config(8)
    options = {"confidence": confidence, "min_probability": min_probability}
    eager, bound = (toy_head(config, num_slots=5, **options) for _ in range(2))
    fresh = toy_head(config)
    runner = Poisoning(bound)
    bound.set_circuit_draft(runner)
    alive: list[tuple[Run, Run]] = []
    drafted = set()
    for turn in range(12):
        for n in range(rng.randint(0 if alive else 1, 5 - len(alive))):
            pair = (
                Run(eager, config, seed + 10 * turn + n),
                Run(bound, config, seed + 10 * turn + n),
            )
            length = rng.randint(1, 30)
            for sequence in pair:
                sequence.prefill(length)
            alive.append(pair)
        counts = [rng.randint(0, 8) for _ in alive]
        accepts = [rng.randint(0, 8) for _ in alive]
        answers = []
        for side, head in enumerate((eager, bound)):
            requests = [p[side].request(n) for p, n in zip(alive, counts, strict=True)]
            answers.append(head.propose_batch(requests, [p[side].state for p in alive]))
        assert answers[0] == answers[1]
        drafted |= {len(draft.tokens) for draft in answers[0]}
        for i, (one, other) in enumerate(alive):
            assert eager.drafter_rows(one.state) == bound.drafter_rows(other.state)
            for side, sequence in enumerate((one, other)):
                sequence.settle(answers[side][i], accepts[i])
                if not counts[i]:
                    sequence.catch_up_stretch()
                assert_exact(sequence, fresh)
        for i in sorted(rng.sample(range(len(alive)), rng.randint(0, 1)), reverse=True):
            for sequence in alive.pop(i):
                sequence.head.free_state(sequence.state)
    assert bound.num_circuit_fallbacks == bound.num_nonfinite == 0
    assert bound.num_circuit_runs == runner.num_runs
    assert eager.num_circuit_runs == eager.num_circuit_fallbacks == 0
    assert len(drafted) > 1


@pytest.mark.parametrize("on_device", [False, True])
def test_a_batch_that_drains_from_eight_to_one_drafts_as_without(
    tiny: Tiny, on_device: bool
) -> None:
    kind = DeviceRun if on_device else Run
    eager, bound = tiny.head(num_slots=8), tiny.head(num_slots=8)
    runner = Poisoning(bound, [s for s in bound.circuit_draft().shapes if s.depth <= 5])
    bound.set_circuit_draft(runner)
    rng = random.Random(1)
    ours = [kind(bound, tiny.config, i) for i in range(8)]
    theirs = [Run(eager, tiny.config, i) for i in range(8)]
    for i in range(8):
        for sequence in (ours[i], theirs[i]):
            sequence.prefill(5 + 25 * i)
    for turn in range(16):
        size = 8 - turn // 2
        depth = 1 + turn % 5
        counts = [rng.randint(1, depth) for _ in range(size - 1)] + [depth]
        accepts = [rng.randint(0, depth) for _ in range(size)]
        expected = eager.propose_batch(
            [s.request(n) for s, n in zip(theirs[:size], counts, strict=True)],
            [s.state for s in theirs[:size]],
        )
        asked = [
            s.deferred(n) if isinstance(s, DeviceRun) else s.request(n)
            for s, n in zip(ours[:size], counts, strict=True)
        ]
        drafts = bound.propose_batch(asked, [s.state for s in ours[:size]])
        kept = [d if d.device_tokens is None else copied(d) for d in drafts]
        for i in range(size):
            sequence, draft = ours[i], kept[i]
            if isinstance(sequence, DeviceRun):
                assert sequence.finish(asked[i], draft, accepts[i]) == expected[i]
            else:
                assert draft == expected[i]
                sequence.settle(draft, accepts[i])
            theirs[i].settle(expected[i], accepts[i])
    assert [shape.width for shape in runner.seen] == [8] * 8 + [4] * 4 + [2] * 2 + [1] * 2
    assert [shape.depth for shape in runner.seen] == [1 + turn % 5 for turn in range(16)]
    assert bound.num_circuit_runs == 16
    assert bound.num_nonfinite == 0
    assert_exact(ours[0], eager)


def copied(draft: Draft) -> Draft:
    assert draft.device_tokens is not None
    return dataclasses.replace(draft, device_tokens=draft.device_tokens.clone())


def test_without_a_runner_the_heads_own_forward_is_back(tiny: Tiny) -> None:
    head = tiny.head(num_slots=1)
    sequence, plain = Run(head, tiny.config, 1), Run(tiny.head(num_slots=1), tiny.config, 1)
    for each in (sequence, plain):
        each.prefill(9)
    runner = PlannedDraftRunner(head.circuit_draft())
    for used, runs in ((runner, 1), (None, 1), (runner, 2)):
        head.set_circuit_draft(used)
        assert sequence.step(3, 1) == plain.step(3, 1)
        assert (head.num_circuit_runs, runner.num_runs) == (runs, runs)
    assert head.num_circuit_fallbacks == 0


# What is not served


def test_shapes_the_runner_lacks_fall_back_and_are_counted(tiny: Tiny) -> None:
    eager, bound = tiny.head(num_slots=4), tiny.head(num_slots=4)
    served = [s for s in bound.circuit_draft().shapes if s.width == 2 and s.depth != 3]
    runner = Poisoning(bound, served)
    bound.set_circuit_draft(runner)
    ours = [Run(bound, tiny.config, i) for i in range(4)]
    theirs = [Run(eager, tiny.config, i) for i in range(4)]
    for sequence in (*ours, *theirs):
        sequence.prefill(12)
    plan = [(1, 2, False), (2, 2, True), (3, 2, False), (2, 3, False), (4, 1, False), (2, 8, True)]
    for n, (size, depth, fits) in enumerate(plan):
        answers = []
        for head, runs in ((bound, ours), (eager, theirs)):
            requests = [s.request(depth) for s in runs[:size]]
            answers.append(head.propose_batch(requests, [s.state for s in runs[:size]]))
            for sequence, draft in zip(runs, answers[-1], strict=False):
                sequence.settle(draft, 1)
        assert answers[0] == answers[1]
        assert bound.num_circuit_runs == sum(fits for *_, fits in plan[: n + 1]) == runner.num_runs
        assert bound.num_circuit_fallbacks == n + 1 - bound.num_circuit_runs
    assert {shape.width for shape in runner.seen} == {2}


def test_a_grammar_falls_back(tiny: Tiny) -> None:
    head = tiny.head(num_slots=1)
    head.set_circuit_draft(PlannedDraftRunner(head.circuit_draft()))
    sequence = Run(head, tiny.config, 1)
    sequence.prefill(9)
    words = torch.zeros(tiny.config.vocab_size // 32, dtype=torch.int32)
    words[0] = 8
    masked = dataclasses.replace(sequence.request(2), grammar_bitmask=words)
    assert head.propose(masked, sequence.state).tokens[0] == 3
    assert (head.num_circuit_runs, head.num_circuit_fallbacks) == (0, 1)


def test_only_shapes_of_the_binding_can_be_planned() -> None:
    binding = toy_head(toy_config(), num_slots=2).circuit_draft()
    with pytest.raises(ConfigError, match=r"width=3.*cannot be planned; allowed are widths \[1, 2"):
        PlannedDraftRunner(binding, [DraftShape(width=3, pairs=0, depth=1)])


def test_broken_streams_behind_a_runner_cost_what_they_cost_without() -> None:
    config = toy_config(8)
    eager, bound = Run(toy_head(config), config, 3), Run(toy_head(config), config, 3)
    bound.head.set_circuit_draft(PlannedDraftRunner(bound.head.circuit_draft()))
    for n in range(8):
        for sequence in (eager, bound):
            if not n:
                sequence.prefill(12)
        answers = []
        for sequence in (eager, bound):
            request = sequence.request(3)
            if n in (2, 5):
                nan = torch.full_like(request.target_hidden, float("nan"))
                request = dataclasses.replace(request, target_hidden=nan)
            answers.append(sequence.head.propose(request, sequence.state))
            rows = sequence.head.drafter_rows(sequence.state)
            answers.append(Draft(tokens=[rows]))
            sequence.settle(answers[-2], n % 4)
        assert answers[:2] == answers[2:]
    assert eager.head.num_nonfinite == bound.head.num_nonfinite == 2
