"""Captured steps: what fits which shape, and that padding is run and never read."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from graph_rig import CPU, MAX_SEQ_LEN, SLOTS, Bench, drain, drain_drafts, make_head, plan, poison
from head_rig import no_host_read
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cache.state import SequenceCache
from paceline.config import ModelConfig
from paceline.draft import verify
from paceline.draft.length import SequenceView, StepRecord
from paceline.draft.proposer import DraftShape
from paceline.draft.verify_device import packed_verdicts, unpack
from paceline.engine import Engine
from paceline.engine.graphs import EagerCapture, GraphedDraftRunner, GraphPlan
from paceline.models.deepseek_v4.build import Built, build
from paceline.models.deepseek_v4.checkpoint import Weights
from paceline.models.step import TargetModel
from paceline.types import ConfigError, SamplingParams, SpeculationStats


@pytest.fixture(scope="module")
def built(tiny_weights: Weights) -> Built:
    return build(
        tiny_weights, tiny_weights.config, device=CPU, dtype=torch.float32, backend="torch"
    )


@pytest.fixture(scope="module")
def model(built: Built) -> TargetModel:
    return built.model


@pytest.fixture(scope="module")
def config(tiny_weights: Weights) -> ModelConfig:
    return tiny_weights.config


# Shapes


@given(
    widths=st.lists(st.integers(1, 140), min_size=1, max_size=9),
    firsts=st.lists(st.integers(0, 120), min_size=9, max_size=9),
    sizes=st.sampled_from(((1, 2, 4, 8), (1, 16), (32,))),
)
def test_a_shape_holds_all_that_its_step_writes(
    widths: list[int], firsts: list[int], sizes: tuple[int, ...]
) -> None:
    some = plan(batch_sizes=sizes)
    longest = max(first + width for first, width in zip(firsts, widths, strict=False))
    shape = some.shape_for(
        num_seqs=len(widths), num_rows=sum(widths), widest=max(widths), longest=longest
    )
    if shape is None:
        size = next((b for b in some.batch_sizes if b >= len(widths)), 0)
        assert sum(widths) > size * some.max_width or longest > 256 or max(widths) > 128
        return
    assert shape.num_seqs >= len(widths)
    assert shape.num_rows >= sum(widths)
    assert shape.context_cap >= longest
    assert shape.num_close4 >= sum(-(-width // 4) for width in widths)
    assert shape.num_close128 >= sum(-(-width // 128) for width in widths)
    assert shape.num_rows - sum(widths) < shape.num_seqs, "a narrower shape would do"


def test_a_plan_stops_where_the_engine_does() -> None:
    new = GraphPlan.new(max_num_seqs=5, max_seq_len=3000, max_width=4)
    assert new.batch_sizes == (1, 2, 4, 8)
    assert new.context_caps == (512, 1024, 2048, 3072)
    assert GraphPlan.new(max_num_seqs=2, max_seq_len=100).batch_sizes == (1, 2)
    assert GraphPlan.new(max_num_seqs=2, max_seq_len=100).context_caps == (128,)
    assert GraphPlan.new(max_num_seqs=64, max_seq_len=100).batch_sizes == (1, 2, 4, 8)
    sixteen = plan(batch_sizes=(16,))
    assert sixteen.shape_for(num_seqs=16, num_rows=143, widest=128, longest=256)
    assert not sixteen.shape_for(num_seqs=16, num_rows=144, widest=129, longest=256)
    with pytest.raises(ConfigError, match="max_width is 0; allowed is 1 to 128"):
        GraphPlan.new(max_num_seqs=2, max_seq_len=100, max_width=0)
    with pytest.raises(ConfigError, match="batch_sizes"):
        GraphPlan.new(max_num_seqs=2, max_seq_len=100, batch_sizes=())
    with pytest.raises(ConfigError, match="batch 9, width 1, context 128 cannot be captured"):
        plan().shapes([1, 9], [1], [128])


# Steps


def test_replays_equal_ragged_steps_while_k_changes_and_the_batch_drains(
    model: TargetModel, config: ModelConfig
) -> None:
    eager, graphed = Bench.new(model, config), Bench.new(model, config, capture=EagerCapture())
    accepted = drain(eager, graphed, vocab=config.vocab_size, num_steps=26, seed=5)
    assert graphed.runner.num_replays == 26
    assert graphed.runner.num_forwards == 26 + SLOTS
    assert eager.runner.num_replays == 0
    assert {0, 1, 2} <= set(accepted)


def test_prompt_pieces_ride_along_and_wide_steps_run_as_they_are(
    model: TargetModel, config: ModelConfig
) -> None:
    eager, graphed = Bench.new(model, config), Bench.new(model, config, capture=EagerCapture())
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:
        return torch.randint(8, config.vocab_size, (count,), generator=generator).tolist()

    for bench in (eager, graphed):
        for slot in (6, 1, 3):
            bench.open(slot)
    steps: list[list[tuple[int, list[int], int, int]]] = [
        [(6, ids(9), 1, 9), (1, ids(120), 0, 20)],  # too wide
        [(6, ids(3), 3, 1), (1, ids(8), 1, 0), (3, ids(20), 0, 4)],
        [(3, ids(1), 0, 0)],
        [(1, ids(2), 2, 2), (3, ids(5), 5, 0), (6, ids(1), 1, 1)],
    ]
    replays = [0, 1, 2, 3]
    for rows, count in zip(steps, replays, strict=True):
        outputs = []
        for bench in (eager, graphed):
            poison(bench.runner)
            given_rows = [
                bench.row(slot, tokens, num_logits=logits, num_hiddens=hiddens)
                for slot, tokens, logits, hiddens in rows
            ]
            outputs.append(bench.runner.run(given_rows))
            for row in given_rows:
                row.cache.commit(len(row.ids))
        want, got = outputs
        assert torch.equal(want.logits, got.logits)
        assert torch.equal(want.hiddens, got.hiddens)
        assert graphed.runner.num_replays == count
        told = graphed.runner.read_verdicts()
        for (_, tokens, logits, _), verdict in zip(rows, told, strict=True):
            assert (verdict is None) == (logits == 0)
            if verdict is not None:
                assert verdict.drafts == tokens[len(tokens) - logits + 1 :]
        for one, other in zip(told, eager.runner.read_verdicts(), strict=True):
            assert (one and (one.verdict, one.drafts)) == (other and (other.verdict, other.drafts))


def test_captures_touch_no_sequence_and_happen_once(
    model: TargetModel, config: ModelConfig
) -> None:
    bench = Bench.new(model, config, capture=EagerCapture(), graphs=plan((1, 2)))
    runner, pools = bench.runner, bench.runner.pools
    with pytest.raises(RuntimeError, match="no step was run"):
        runner.read_verdicts()
    bench.open(0)
    row = bench.row(0, list(range(8, 130)))
    runner.run([row])
    row.cache.commit(122)
    names = ("window", "raw4_kv", "raw4_score", "index_raw_kv", "raw128_kv", "raw128_score")
    rings = {name: getattr(pools, name)[:, : pools.inert_slot].clone() for name in names}
    rows = {n: getattr(pools, n)[:, k:].clone() for n, k in (("rows4", 32), ("rows128", 1))}
    assert runner.capture(widths=range(1, 4)) > 0
    assert runner.graphs is not None
    assert len(runner.graphs.shapes) == 2 * 3 * 2
    for name, was in rings.items():
        assert torch.equal(getattr(pools, name)[:, : pools.inert_slot], was), name
    for name, was in rows.items():
        assert torch.equal(getattr(pools, name)[:, 32 if name == "rows4" else 1 :], was), name
    assert runner.capture(widths=range(1, 4)) == 0
    runner.run([bench.row(0, [5, 6])])
    assert len(runner.graphs.shapes) == 12
    runner.run([bench.row(0, [5, 6, 7, 8])])
    assert len(runner.graphs.shapes) == 13
    with pytest.raises(ConfigError, match="batch 4, width 1"):
        runner.capture(batch_sizes=[4], widths=[1])
    assert Bench.new(model, config).runner.capture() == 0


def test_a_shape_is_always_at_the_same_addresses(model: TargetModel, config: ModelConfig) -> None:
    bench = Bench.new(model, config, capture=EagerCapture())
    seen: list[list[int]] = []

    def note(width: int) -> None:
        bench.runner.run([bench.row(4, list(range(8, 8 + width)))])
        last = bench.runner._last
        assert last is not None
        fields = [getattr(last.step.inputs, name) for name in last.step.inputs.__slots__]
        fields += [last.step.sources, last.step.firsts, last.step.counts]
        seen.append([f.data_ptr() for f in fields if isinstance(f, torch.Tensor)])

    bench.open(4)
    for width in (3, 1, 9, 3):
        note(width)
    bench.runner._buffers._shapes.clear()
    note(3)
    assert seen[0] == seen[3] == seen[4]
    assert seen[0] != seen[1]


def test_a_slot_given_to_another_gets_a_table_of_its_own(
    model: TargetModel, config: ModelConfig
) -> None:
    bench = Bench.new(model, config, capture=EagerCapture())
    table = bench.runner.pools.block_tables
    held: list[SequenceCache] = []
    for width in (140, 20, 3, 150, 1):
        bench.open(0)
        bench.runner.run([bench.row(0, list(range(8, 8 + width)))])
        held.append(bench.live[0])
        blocks = list(held[-1].blocks)
        assert table[0].tolist() == [*blocks, *[0] * (2 - len(blocks))]
    assert len({block for cache in held for block in cache.blocks}) == 7


# Chains of drafts


def test_captured_chains_equal_the_heads_own_while_k_changes_and_the_batch_drains(
    built: Built, config: ModelConfig
) -> None:
    own, captured = make_head(built, config), make_head(built, config)
    assert drain_drafts(own, captured, config, EagerCapture(), num_steps=20, seed=8) > 10


def test_a_draft_runner_serves_what_it_was_given(built: Built, config: ModelConfig) -> None:
    binding = make_head(built, config).circuit_draft()
    assert binding is not None
    runner = GraphedDraftRunner(binding, EagerCapture(), shapes=binding.shapes[:3])
    assert [runner.serves(shape) for shape in binding.shapes[:5]] == [True] * 3 + [False] * 2
    assert runner.capture() > 0
    assert runner.capture() == 0
    assert set(runner.shapes) == set(binding.shapes[:3])
    with pytest.raises(ConfigError, match=r"width=1.*cannot be captured"):
        runner.capture(binding.shapes[3:4])
    with pytest.raises(ConfigError, match="width=3, pairs=0, depth=1"):
        GraphedDraftRunner(binding, EagerCapture(), shapes=[DraftShape(width=3, pairs=0, depth=1)])


# The engine


class Changing:
    """Another number of drafts in each step and for each sequence, 0 to 8."""

    def __init__(self) -> None:
        self.step = 0

    def choose(
        self, sequences: Sequence[SequenceView], *, max_drafts: int | None = None
    ) -> list[int]:
        self.step += 1
        return [(5 * self.step + 3 * view.id) % 9 for view in sequences]

    def observe(self, record: StepRecord) -> None:
        pass


@pytest.mark.parametrize(
    "depths",
    [(8, 0, 3, 1, 4, 2, 7, 5), ("auto", 0, "auto", "auto", 4, "auto", "auto", "auto")],
    ids=["own", "chosen"],
)
def test_an_engine_over_captured_steps_says_the_same_with_one_read_a_step(
    built: Built, config: ModelConfig, depths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(12)
    prompts = [[rng.randrange(config.vocab_size) for _ in range(20 + 13 * i)] for i in range(SLOTS)]
    said, counted = [], []
    to_numpy = torch.Tensor.numpy
    for capture in (None, EagerCapture()):
        engine = Engine(
            built.model,
            config,
            proposer=make_head(built, config),
            num_drafts=3,
            lengths=Changing(),
            max_seq_len=MAX_SEQ_LEN,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=96,
            capture=capture,
            drafts_on_device=capture is not None,
        )
        assert engine.drafting is not None
        runner, head = engine._runner, engine.drafting.proposer
        reads = 0

        def counting(values: torch.Tensor) -> Any:
            nonlocal reads
            reads += 1
            return to_numpy(values)

        monkeypatch.setattr(runner, "_fetch", counting)
        got: dict[int, list[int]] = {}
        stats: dict[int, SpeculationStats] = {}
        for i, (ids, depth) in enumerate(zip(prompts, depths, strict=True)):
            params = SamplingParams(max_tokens=6 + 3 * i, ignore_eos=True, num_drafts=depth)
            got[engine.add(ids, params)] = []
        while engine.has_work:
            reads = 0
            if capture is not None:
                poison(runner)
                binding = head.circuit_draft()
                for name, buffer in {**binding.inputs, **binding.outputs}.items():
                    if name != "pending":
                        buffer.fill_(math.nan if buffer.is_floating_point() else -(2**60))
                head.ring.rows[binding.inert_slot] = math.nan
            # Any other way to a value raises; within the proposer it is counted as a failure.
            with no_host_read() if capture is not None else contextlib.nullcontext():
                emissions = engine.step()
            assert reads == (bool(emissions) and capture is not None)
            for emission in emissions:
                got[emission.request_id] += emission.token_ids
                stats[emission.request_id] = emission.stats
        engine.check_idle()
        assert engine.num_proposer_failures == 0
        said.append(list(got.values()))
        counted.append({i: one.to_dict() for i, one in stats.items()})
        if capture is not None:
            assert runner.num_replays > runner.num_forwards // 2
            assert head.num_circuit_runs > 20
            assert head.num_circuit_fallbacks == 0
    assert said[0] == said[1]
    assert counted[0] == counted[1]
    assert [len(ids) for ids in said[0]] == [6 + 3 * i for i in range(SLOTS)]


# Verdicts


@settings(max_examples=150)
@given(data=st.data())
def test_the_devices_verdict_is_the_hosts(data: st.DataObject) -> None:
    vocab = 6
    counts = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    lead = data.draw(st.lists(st.integers(0, 2), min_size=len(counts), max_size=len(counts)))
    value = st.one_of(
        st.integers(-2, 2).map(float), st.sampled_from((math.nan, math.inf, -math.inf))
    )
    rows, ids, firsts, drafts = [], [], [], []
    for count, before in zip(counts, lead, strict=True):
        ids += [0] * (before + 1)
        firsts.append(len(rows))
        rows += range(len(ids) - 1, len(ids) + count)
        drafts.append(data.draw(st.lists(st.integers(-1, vocab), min_size=count, max_size=count)))
        ids += drafts[-1]
    size = len(rows) * vocab
    flat = data.draw(st.lists(value, min_size=size, max_size=size))
    logits = torch.tensor(flat).view(-1, vocab)
    log_probs = torch.arange(len(ids)).float() / 3
    packed = packed_verdicts(
        logits,
        torch.tensor(ids),
        torch.tensor(rows),
        torch.tensor(firsts),
        torch.tensor(counts),
        max_drafts=3,
        log_probs=log_probs,
    )
    told = unpack(packed.numpy(), counts)
    assert [one.verdict for one in told] == verify.greedy(logits, drafts)
    assert [one.drafts for one in told] == drafts
    for one, first, count in zip(told, firsts, counts, strict=True):
        at = rows[first + 1 : first + 1 + count]
        assert one.log_probs == log_probs[at].tolist()
