"""The compiled CPU path against its plain torch twin, and against itself however rows are cut."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import (
    CPU,
    Rig,
    make_rig,
    mtp_inputs,
    random_widths,
    step_inputs,
    visible_cache,
    write_tiny,
)

from paceline.cache.drafter import DrafterRing
from paceline.draft.deepseek_v4 import DeepseekV4MtpHead, _least_log_prob
from paceline.draft.verify import greedy
from paceline.engine.graphs import EagerCapture, GraphedDraftRunner
from paceline.models.deepseek_v4.checkpoint import Weights, load_weights
from paceline.models.deepseek_v4.synth import preset_config, write_synthetic
from paceline.models.step import ChainingMtpBlock, MtpInputs
from paceline.ops import numba_cpu
from paceline.ops.dense import DenseWeight
from paceline.types import ConfigError, DraftRequest

pytestmark = pytest.mark.skipif(not numba_cpu.available(), reason=numba_cpu.why_not())

# Both sides round; in units of the standard deviation of what is compared, where that is above 1.
TOLERANCE = 4e-5


def assert_close(mine: torch.Tensor, theirs: torch.Tensor, what: str = "") -> None:
    assert torch.isfinite(mine).all(), what
    scale = max(1.0, float(theirs.std())) if theirs.numel() > 1 else 1.0
    worst = float((mine - theirs).abs().max()) if theirs.numel() else 0.0
    assert worst < TOLERANCE * scale, f"{what} {worst} at scale {scale}"


def ids_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(8, 260, (length,), generator=generator).tolist()


@pytest.fixture(scope="module", params=["fp32", "release"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """fp32 everywhere, and the release's mix: fp8 and bf16 read as bf16, experts in fp4."""
    path = tmp_path_factory.mktemp(request.param)
    config = preset_config("tiny")
    # A gain that drives some gates and ups into the clamp.
    return load_weights(write_synthetic(path / "c", config, dtype=request.param, expert_gain=4.0))


@pytest.fixture(scope="module")
def fused(weights: Weights) -> Rig:
    return make_rig(weights, weights.config, backend="fused", num_threads=1)


@pytest.fixture(scope="module")
def twin(weights: Weights) -> Rig:
    return make_rig(weights, weights.config, backend="torch")


def ragged_steps(
    lengths: list[int], seed: int, widths: list[int]
) -> Iterator[list[tuple[int, int, list[int]]]]:
    """Steps of random subsets of sequences at random widths until all are through."""
    rng = random.Random(seed)
    texts = [ids_of(n, seed=100 + n) for n in lengths]
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        rows = []
        for slot in rng.sample(range(len(lengths)), rng.randint(1, len(lengths))):
            width = min(rng.choice(widths), lengths[slot] - done[slot])
            if width:
                rows.append((slot, done[slot], texts[slot][done[slot] : done[slot] + width]))
                done[slot] += width
        if rows:
            yield rows


def test_ragged_steps_equal_the_twin(fused: Rig, twin: Rig) -> None:
    # The longest goes far past 4 * index_topk = 64 tokens and past three windows of 128.
    lengths = [440, 261, 37]
    for rows in ragged_steps(lengths, seed=0, widths=[1, 2, 3, 4, 5, 7, 16, 40]):
        logits, streams = fused.run(*rows)
        other_logits, other_streams = twin.run(*rows)
        assert_close(logits, other_logits)
        assert_close(streams, other_streams)
    assert logits.std() > 0.3
    for slot, length in enumerate(lengths):
        mine = visible_cache(fused.pools, slot, length, fused.config.sliding_window)
        theirs = visible_cache(twin.pools, slot, length, fused.config.sliding_window)
        for name, tensor in mine.items():
            assert_close(tensor, theirs[name], name)


@pytest.mark.parametrize("width", range(1, 17))
def test_a_row_does_not_depend_on_how_many_run_with_it(fused: Rig, width: int) -> None:
    length = 128 + 5 * width
    ids = ids_of(length, seed=width)
    logits, streams = fused.run((0, 0, ids))
    held = visible_cache(fused.pools, 0, length, fused.config.sliding_window)
    at = 0
    for step in [120, *random_widths(random.Random(width), length - 120, width, width)]:
        other = fused.run((1, at, ids[at : at + step]))
        assert torch.equal(other[0], logits[at : at + step])
        assert torch.equal(other[1], streams[at : at + step])
        at += step
    again = visible_cache(fused.pools, 1, length, fused.config.sliding_window)
    for name, tensor in held.items():
        assert torch.equal(tensor, again[name]), name


def test_a_sequence_does_not_depend_on_its_neighbours(fused: Rig) -> None:
    lengths = [300, 131, 64]
    alone = [fused.run((3, 0, ids_of(n, seed=100 + n))) for n in lengths]
    for rows in ragged_steps(lengths, seed=5, widths=[1, 2, 5, 16, 33]):
        logits, streams = fused.run(*rows)
        at = 0
        for slot, first, tokens in rows:
            end = at + len(tokens)
            assert torch.equal(logits[at:end], alone[slot][0][first : first + len(tokens)])
            assert torch.equal(streams[at:end], alone[slot][1][first : first + len(tokens)])
            at = end


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_change_no_bit(weights: Weights, fused: Rig, num_threads: int) -> None:
    several = make_rig(weights, weights.config, backend="fused", num_threads=num_threads)
    for rows in ragged_steps([200, 150], seed=9, widths=[1, 1, 2, 4, 16]):
        logits, streams = fused.run(*rows)
        other_logits, other_streams = several.run(*rows)
        assert torch.equal(logits, other_logits)
        assert torch.equal(streams, other_streams)


def test_only_the_rows_asked_for_are_returned(fused: Rig) -> None:
    ids = ids_of(20, seed=3)
    logits, streams = fused.run((0, 0, ids))
    step = dataclasses.replace(
        fused.step((0, 0, ids)),
        logits_rows=torch.tensor([19, 4]),
        hidden_rows=torch.tensor([7]),
    )
    out = fused.built.model.forward(step, fused.pools)
    assert torch.equal(out.logits, logits[[19, 4]])
    assert torch.equal(out.hiddens, streams[[7]])
    none = dataclasses.replace(
        step, logits_rows=step.logits_rows[:0], hidden_rows=step.hidden_rows[:0]
    )
    out = fused.built.model.forward(none, fused.pools)
    assert out.logits.shape == (0, fused.config.vocab_size)
    assert out.hiddens.shape[0] == 0


def test_the_same_inputs_may_be_run_again_whatever_ran_between(
    weights: Weights, fused: Rig
) -> None:
    """An engine's inputs are the same objects for every step of a shape, over other numbers."""
    rig = make_rig(weights, weights.config, backend="fused", num_threads=1)
    model, pools = rig.built.model, rig.pools
    ids = ids_of(40, seed=12)
    one, two = rig.step((0, 0, ids[:1])), rig.step((1, 0, ids[:3]))
    for step, slot, width in ((one, 0, 1), (two, 1, 3)):
        want = fused.run((slot, 0, ids[:width]))
        assert torch.equal(model.forward(step, pools).logits, want[0])
        assert torch.equal(model.forward(step, pools).hiddens, want[1])
    other = dataclasses.replace(
        pools, **{f: torch.zeros_like(getattr(pools, f)) for f in ("window", "raw4_kv", "rows4")}
    )
    model.forward(two, other)
    long = rig.step((2, 0, ids_of(300, seed=3)))
    # First the memory of streams moves, then that of logits too.
    for token, wanted in zip(ids[5:7], (long.logits_rows[:1], long.logits_rows), strict=True):
        model.forward(dataclasses.replace(long, logits_rows=wanted), pools)
        one.ids.fill_(token)
        for step, slot, tokens in ((one, 0, [token]), (two, 1, ids[:3]), (one, 0, [token])):
            want = fused.run((slot, 0, tokens))
            out = model.forward(step, pools)
            assert torch.equal(out.logits, want[0])
            assert torch.equal(out.hiddens, want[1])
    assert other.window[:, 1].count_nonzero()


def test_picks_are_the_largest_logits(tmp_path: Path) -> None:
    """Of a vocabulary that is no multiple of a panel, with ties and with what is not finite."""
    weights = load_weights(write_tiny(tmp_path, vocab_size=333))
    head = weights["head.weight"].clone()
    head[320] = head[40] = head[70] = 3 * head[41]
    rigs = []
    for value in (None, math.nan, math.inf):
        changed = {**weights, "head.weight": head.clone()}
        if value is not None:
            changed["head.weight"][331] = value
        rigs.append(make_rig(changed, weights.config, backend="fused", num_threads=2))
    ids = ids_of(70, seed=5)
    for rig in rigs:
        out = rig.built.model.forward(rig.step((0, 0, ids)), rig.pools)
        assert out.picks is not None
        broken = rig is not rigs[0]
        assert out.picks.tolist() == ([-1] * 70 if broken else out.logits.argmax(-1).tolist())
        drafts = [ids[1:4], [], ids[9:12]]
        assert greedy(out.logits, drafts, picks=out.picks) == greedy(out.logits, drafts)
    assert 40 in out.logits[:, :331].argmax(-1).tolist()


def test_ties_in_the_indexer_go_to_the_lower_row(weights: Weights) -> None:
    """With scores all zero both paths must take the first `index_topk` rows."""
    changed = dict(weights)
    for name in weights:
        if name.endswith("indexer.weights_proj.weight"):
            changed[name] = torch.zeros_like(weights[name])
    ids = ids_of(200, seed=8)
    mine = make_rig(changed, weights.config, backend="fused", num_threads=1).run((0, 0, ids))
    theirs = make_rig(changed, weights.config, backend="torch").run((0, 0, ids))
    assert_close(mine[0], theirs[0])


def test_a_sequence_of_nan_leaves_its_neighbours_alone(weights: Weights) -> None:
    bad = 300
    changed = dict(weights)
    changed["embed.weight"] = weights["embed.weight"].clone()
    changed["embed.weight"][bad] = float("nan")
    rig = make_rig(changed, weights.config, backend="fused", num_threads=2)
    good = ids_of(150, seed=4)
    alone = rig.run((0, 0, good[:140]))[0], rig.run((0, 140, good[140:]))[0]
    poison = [bad, *ids_of(139, seed=6)]
    logits, _ = rig.run((1, 0, good[:140]), (2, 0, poison))
    assert torch.equal(logits[:140], alone[0])
    assert logits[140].isnan().all()
    logits, _ = rig.run((2, 140, good[:3]), (1, 140, good[140:]))
    assert logits[:3].isnan().all()
    assert torch.equal(logits[3:], alone[1])


# ---------------------------------------------------------------------------------- draft block


def rings(rig: Rig, max_width: int = 64) -> DrafterRing:
    return DrafterRing.allocate(
        rig.config, num_slots=3, max_width=max_width, device=CPU, dtype=torch.float32
    )


def block_inputs(rig: Rig, slot: int, length: int, lowest: int = 0) -> MtpInputs:
    generator = torch.Generator().manual_seed(length)
    hiddens = 3 * torch.randn(length, 4, rig.config.hidden_size, generator=generator)
    return mtp_inputs(rig.built, slot, lowest, ids_of(length, seed=1), hiddens, lowest=lowest)


def cut(inputs: MtpInputs, first: int, last: int) -> MtpInputs:
    return MtpInputs(
        **{f.name: getattr(inputs, f.name)[first:last] for f in dataclasses.fields(inputs)}
    )


@pytest.mark.parametrize("lowest", [0, 70])
def test_draft_block_equals_the_twin(fused: Rig, twin: Rig, lowest: int) -> None:
    inputs = block_inputs(twin, 1, 300, lowest)
    mine, theirs = rings(fused), rings(twin)
    assert fused.built.mtp is not None
    assert twin.built.mtp is not None
    at = 0
    for width in random_widths(random.Random(2), 300, 1, 64):
        part = cut(inputs, at, at + width)
        a, b = fused.built.mtp.forward(part, mine), twin.built.mtp.forward(part, theirs)
        assert_close(a.normed, b.normed)
        assert_close(a.streams, b.streams)
        logits = fused.built.lm_head.matmul(a.normed)
        assert_close(logits, twin.built.lm_head.matmul(b.normed))
        at += width
    assert_close(mine.rows, theirs.rows)


def test_draft_rows_do_not_depend_on_their_number(fused: Rig) -> None:
    inputs = block_inputs(fused, 0, 200)
    block = fused.built.mtp
    assert block is not None
    whole, written, stepped = rings(fused, 200), rings(fused, 200), rings(fused, 200)
    out = block.forward(inputs, whole)
    normed, streams = out.normed.clone(), out.streams.clone()
    block.write_rows(inputs, written)
    assert torch.equal(written.rows, whole.rows)
    at = 0
    for width in random_widths(random.Random(7), 200, 1, 9):
        out = block.forward(cut(inputs, at, at + width), stepped)
        assert torch.equal(out.normed, normed[at : at + width])
        assert torch.equal(out.streams, streams[at : at + width])
        at += width
    assert torch.equal(stepped.rows, whole.rows)


def test_recursion_may_feed_the_blocks_own_memory_back(fused: Rig, twin: Rig) -> None:
    start = block_inputs(twin, 0, 1)
    results = []
    for rig in (fused, twin):
        block, ring, inputs = rig.built.mtp, rings(rig), start
        assert block is not None
        for _ in range(4):
            out = block.forward(inputs, ring)
            inputs = dataclasses.replace(inputs, hiddens=out.streams, keys=inputs.keys + 1)
        results.append(out.normed.clone())
    assert_close(results[0], results[1])


def chain(rig: Rig, inputs: MtpInputs, ids: list[int], ring: DrafterRing, **how: Any) -> Any:
    block = rig.built.mtp
    assert isinstance(block, ChainingMtpBlock)
    assert block.can_chain(rig.built.embed_tokens, rig.built.lm_head)
    return block.draft_greedy(
        ids=torch.tensor(ids),
        hiddens=inputs.hiddens,
        keys=inputs.keys,
        slots=inputs.slots,
        first_keys=inputs.first_keys,
        ring=ring,
        embed_tokens=rig.built.embed_tokens,
        lm_head=rig.built.lm_head,
        **{"num_rows": 0, "count": 5, "min_log_prob": -math.inf, **how},
    )


@pytest.mark.parametrize(("num_rows", "num_threads"), [(0, 1), (0, 2), (100, 1)])
def test_a_chain_is_its_steps_one_by_one(weights: Weights, num_rows: int, num_threads: int) -> None:
    rig = make_rig(weights, weights.config, backend="fused", num_threads=num_threads)
    built, block = rig.built, rig.built.mtp
    assert block is not None
    # More rows than the ring keeps behind it: a chain must not read what it displaced.
    start, mine, theirs = 130, rings(rig, 8), rings(rig, 8)
    whole = block_inputs(rig, 0, start + 3)
    ids = ids_of(start + 3, seed=1)
    for ring in (mine, theirs):
        for at in range(0, start, 5):
            block.write_rows(cut(whole, at, at + 5), ring)
    part = cut(whole, start, start + 3)
    part = dataclasses.replace(part, first_keys=torch.full_like(part.keys, start + 2 - 134))
    drawn = chain(rig, part, ids[start:], mine, num_rows=num_rows)

    block.write_rows(cut(part, 0, 2), theirs)
    inputs = cut(part, 2, 3)
    assert len(drawn) == 5
    for token, log_prob in drawn:
        out = block.forward(inputs, theirs)
        logits = built.lm_head.matmul(out.normed, num_rows=num_rows)[0]
        assert token == int(logits.argmax())
        assert log_prob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-5)
        keys = inputs.keys + 1
        inputs = MtpInputs(
            embeds=built.embed_tokens.gather(torch.tensor([token])),
            hiddens=out.streams.clone(),
            keys=keys,
            slots=inputs.slots,
            first_keys=torch.maximum(inputs.first_keys, keys - 134),
        )
    assert torch.equal(mine.rows, theirs.rows)


def test_a_chain_ends_at_an_unlikely_draft_and_at_nan(fused: Rig) -> None:
    inputs = block_inputs(fused, 1, 1)
    ids, ring = ids_of(1, seed=1), rings(fused)
    every = chain(fused, inputs, ids, ring)
    least = min(range(5), key=lambda n: every[n][1])
    limit = every[least][1] + 1e-6
    cut_short = chain(fused, inputs, ids, ring, min_log_prob=limit)
    first = next(n for n, (_, log_prob) in enumerate(every) if log_prob < limit)
    assert cut_short == every[: first + 1]
    assert chain(fused, inputs, ids, ring, count=2) == every[:2]
    inputs.hiddens[0, 2, 5] = float("nan")
    assert chain(fused, inputs, ids, ring) == [(-1, -math.inf)]


@pytest.mark.parametrize("least", [0.0, 0.004, 1.0])
@pytest.mark.parametrize("vocab", [0, 200])
def test_head_proposes_alike_with_and_without_the_chain(
    weights: Weights, fused: Rig, vocab: int, least: float
) -> None:
    """In a batch the head goes step by step, alone in one call; captured chains are one program.

    All stop at unlikely drafts, and what they measure has the same bits.
    """
    built, config = fused.built, fused.config
    assert built.mtp is not None
    answers = []
    for way in ("together", "alone", "captured"):
        head = DeepseekV4MtpHead.new(
            built.mtp,
            built.embed_tokens,
            built.lm_head,
            config,
            vocab,
            512,
            num_slots=2,
            confidence=True,
            min_probability=least,
        )
        if way == "captured":
            binding = head.circuit_draft()
            head.set_circuit_draft(GraphedDraftRunner(binding, EagerCapture()))
        states = [head.alloc_state(), head.alloc_state()]
        requests = []
        for n, state in enumerate(states):
            hiddens = block_inputs(fused, 0, 21 + n).hiddens
            prompt = ids_of(21 + n, seed=n)
            head.prefill_drafter(prompt, hiddens, state)
            requests.append(
                DraftRequest(
                    last_token=9,
                    position=21 + n,
                    target_hidden=hiddens[-1],
                    num_drafts=4,
                    history=[*prompt, 9],
                )
            )
        if way != "alone":
            answers.append(head.propose_batch(requests, states))
        else:
            answers.append([head.propose(r, s) for r, s in zip(requests, states, strict=True)])
    for one, *others in zip(*answers, strict=True):
        for other in others:
            assert one.tokens == other.tokens
            assert one.confidence == other.confidence
        assert len(one.tokens) == (4 if least == 0 else 0 if least == 1 else len(one.tokens))


# ---------------------------------------------------------------------------------- dense table


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dense_equals_the_twin(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(200, 96, generator=generator).to(dtype)
    fused = numba_cpu.FusedDense(table, num_threads=2)
    twin = DenseWeight(table, dtype=torch.float32)
    x = torch.randn(19, 96, generator=generator)
    every = fused.matmul(x)
    assert every.shape == (19, 200)
    assert_close(every, twin.matmul(x))
    for rows in (1, 2, 7):
        assert torch.equal(fused.matmul(x[:rows]), every[:rows])
    assert torch.equal(fused.matmul(x, num_rows=70), every[:, :70])
    assert fused.matmul(x[:0]).shape == (0, 200)
    ids = torch.tensor([5, 199, 5])
    assert torch.equal(fused.gather(ids), twin.gather(ids))


@pytest.mark.parametrize("width", [200, 512, 1200])
def test_measured_logits_equal_the_twin(width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(1280, 32, generator=generator)
    fused = numba_cpu.FusedDense(table, num_threads=2)
    twin = DenseWeight(table, dtype=torch.float32)
    # A row of the product is longer than what counts of it, and what follows does not count.
    logits = (4 * torch.randn(9, 1280, generator=generator))[:, :width]
    logits[:, width:] = 50.0
    logits[1, :150] = -math.inf
    logits[2] -= 1e30
    logits[3, 7], logits[4, width - 1], logits[5, 3] = math.nan, math.nan, math.inf
    logits[6] = -math.inf
    logits[7, : min(width - 1, 1024)] = -math.inf
    best = logits.max(-1)[0]
    every = fused.log_prob_of_best(logits, best)
    assert every[3:7].tolist() == [-math.inf] * 4
    good = [0, 1, 2, 7, 8]
    assert torch.allclose(every[good], twin.log_prob_of_best(logits, best)[good], atol=2e-6)
    for row in range(9):
        alone = fused.log_prob_of_best(logits[row : row + 1], best[row : row + 1])
        assert torch.equal(alone, every[row : row + 1])
    assert fused.log_prob_of_best(logits[:0], best[:0]).shape == (0,)


@given(st.floats(1e-30, 1, exclude_min=True), st.floats(-70, 0, width=32))
def test_a_least_probability_decides_alike_in_both_precisions(
    probability: float, log_prob: float
) -> None:
    limit = _least_log_prob(probability)
    assert limit == float(np.float32(limit))
    for near in (log_prob, limit, float(np.nextafter(np.float32(limit), np.float32(-np.inf)))):
        assert (near >= limit) == (near >= math.log(probability))
    assert _least_log_prob(0.0) == -math.inf


# ------------------------------------------------------------------------------------- packing


def unpacked(packed: Any, outputs: int, inputs: int) -> np.ndarray:
    """What packed panels say the matrix is."""
    from paceline.ops.numba_cpu.simd import BF16, FP4, FP4_BLOCK_BYTES

    panels = -(-outputs // 64)
    if packed.form == FP4:
        blocks = packed.data.reshape(panels, inputs // 32, FP4_BLOCK_BYTES)
        scale = 2.0 ** (blocks[..., :64].astype(float) - 127)
        bytes_ = blocks[..., 64:].reshape(panels, inputs // 32, 8, 2, 16, 4)
        codes = np.stack((bytes_ & 15, bytes_ >> 4), 4)  # panel, block, four, half, v, lane, k
        table = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
        values = table[codes].transpose(0, 3, 4, 5, 1, 2, 6).reshape(panels, 64, -1, 32)
        full = values * scale.transpose(0, 2, 1)[..., None]
        return full.reshape(panels * 64, inputs)[:outputs]
    if packed.form == BF16:
        words = packed.data.view(np.uint16).reshape(panels, inputs, 2, 16, 2)
        ordered = words.transpose(0, 2, 4, 3, 1).reshape(panels * 64, inputs).astype(np.uint32)
        return (ordered << 16).view(np.float32)[:outputs]
    floats = packed.data.view(np.float32).reshape(panels, inputs, 64)
    return floats.transpose(0, 2, 1).reshape(panels * 64, inputs)[:outputs]


def test_packing_keeps_every_number() -> None:
    from paceline.ops.numba_cpu import pack, simd

    generator = torch.Generator().manual_seed(0)
    arena = pack.Arena()
    full = torch.randn(80, 64, generator=generator)
    for tensor, form in ((full, simd.FP32), (full.bfloat16(), simd.BF16)):
        packed = pack.pack_matrix(arena, tensor)
        assert packed.form == form
        assert np.array_equal(unpacked(packed, 80, 64), tensor.float().numpy())
    same = pack.pack_matrix(arena, full.bfloat16().float())
    assert same.form == simd.BF16

    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.randint(0, 8, (2, 64, 96), generator=generator)
    signs = torch.randint(0, 2, codes.shape, generator=generator) * 2 - 1
    scales = 2.0 ** torch.randint(-20, 4, (2, 64, 3), generator=generator)
    experts = (grid[codes] * signs * scales.repeat_interleave(32, -1)).bfloat16()
    experts[0, 0, :32] = 0
    packed = pack.pack_experts(arena, experts)
    assert packed.form == (simd.FP4 if simd.has_vnni() else simd.BF16)
    assert np.array_equal(unpacked(packed, 128, 96), experts.float().reshape(128, 96).numpy())
    experts[1, 3, 40] = 2.5
    assert pack.pack_experts(arena, experts).form == simd.BF16


# -------------------------------------------------------------------------------------- refusals


def test_other_dtypes_and_thread_counts_are_refused(fused: Rig, weights: Weights) -> None:
    pools = dataclasses.replace(fused.pools, window=fused.pools.window.bfloat16())
    with pytest.raises(ConfigError, match=r"bfloat16.*float32"):
        fused.built.model.forward(step_inputs(fused.pools, [(0, 0, [9])]), pools)
    with pytest.raises(ConfigError, match="num_threads is 0"):
        numba_cpu.FusedDense(weights["head.weight"], num_threads=0)


def test_shapes_it_does_not_serve_are_named() -> None:
    config = preset_config("tiny")
    assert numba_cpu.unsupported(config) == ""
    assert numba_cpu.unsupported(preset_config("flash")) == ""
    assert numba_cpu.unsupported(preset_config("pro")) == ""
    odd = dataclasses.replace(config, hidden_size=96)
    assert "hidden_size is 96" in numba_cpu.unsupported(odd)
    assert "hc_mult is 2" in numba_cpu.unsupported(dataclasses.replace(config, hc_mult=2))


def test_an_expert_count_and_picks_other_than_the_tiny_ones(tmp_path: Path) -> None:
    """Experts beyond one panel of 32 scores, a sliding window other than 128, long index rows."""
    path = write_tiny(tmp_path, n_routed_experts=40, num_experts_per_tok=3, index_topk=9)
    weights = load_weights(path)
    mine = make_rig(weights, weights.config, backend="fused", num_threads=1)
    theirs = make_rig(weights, weights.config, backend="torch")
    ids = ids_of(280, seed=2)
    assert_close(mine.run((0, 0, ids))[0], theirs.run((0, 0, ids))[0])
