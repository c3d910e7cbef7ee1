"""The trunk against transformers, and against itself however its rows are cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support import CPU, Rig, make_rig, random_widths, step_inputs, visible_cache

from paceline.cache.pools import CachePools
from paceline.models.deepseek_v4.build import build
from paceline.models.deepseek_v4.checkpoint import Weights

TOLERANCE = 2e-5
# Past eight windows of 128 and far past 4 * index_topk = 64 tokens.
LENGTH = 1100


def ids_of(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(8, 260, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return ids_of(LENGTH)


@pytest.fixture(scope="module")
def reference(tiny_reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = tiny_reference(torch.tensor([ids])).logits[0]
    return logits


@pytest.fixture(scope="module")
def rig(tiny_weights: Weights, backend: str) -> Rig:
    return make_rig(
        tiny_weights, tiny_weights.config, backend=backend, max_seq_len=1152, max_width=1152
    )


def run_widths(rig: Rig, slot: int, ids: list[int], widths: list[int]) -> torch.Tensor:
    logits, at = [], 0
    for width in widths:
        logits.append(rig.run((slot, at, ids[at : at + width]))[0])
        at += width
    return torch.cat(logits)


def test_whole_prefill_equals_transformers(
    rig: Rig, ids: list[int], reference: torch.Tensor
) -> None:
    logits, streams = rig.run((0, 0, ids))
    assert reference.std() > 0.3
    assert (logits - reference).abs().max() < TOLERANCE
    assert streams.shape == (LENGTH, rig.config.hc_mult, rig.config.hidden_size)


def test_streams_are_those_of_the_last_layer_before_collapse(rig: Rig, tiny_reference: Any) -> None:
    held: list[torch.Tensor] = []
    hook = tiny_reference.model.layers[-1].register_forward_hook(
        lambda _m, _i, out: held.append(out[0] if isinstance(out, tuple) else out)
    )
    ids = ids_of(200)
    with torch.no_grad():
        tiny_reference(torch.tensor([ids]))
    hook.remove()
    theirs = held[0][0]
    # The tolerance is that of logits, whose standard deviation is near 1.
    assert (rig.run((0, 0, ids))[1] - theirs).abs().max() < TOLERANCE * theirs.std()


@pytest.mark.parametrize("seed", [0, 1])
def test_random_chunks_equal_transformers(
    rig: Rig, ids: list[int], reference: torch.Tensor, seed: int
) -> None:
    widths = random_widths(random.Random(seed), LENGTH, 1, 300)
    assert (run_widths(rig, 1, ids, widths) - reference).abs().max() < TOLERANCE


def test_step_by_step_equals_transformers(
    rig: Rig, ids: list[int], reference: torch.Tensor
) -> None:
    logits = run_widths(rig, 2, ids, [700] + [1] * (LENGTH - 700))
    assert (logits - reference).abs().max() < TOLERANCE


@pytest.mark.parametrize("width", range(1, 17))
def test_every_width_is_bit_equal_to_one_prefill(rig: Rig, width: int) -> None:
    ids = ids_of(300, seed=5)
    whole = rig.run((0, 0, ids))[0]
    # Prefix lengths chosen so that widths straddle 4-, 128- and chunk edges.
    start = 125 if width % 2 else 254
    rig.run((1, 0, ids[:start]))
    at = start
    while at + width <= 300:
        logits, _ = rig.run((1, at, ids[at : at + width]))
        assert torch.equal(logits, whole[at : at + width])
        at += width


def test_ragged_batch_rows_equal_themselves_alone(rig: Rig) -> None:
    rng = random.Random(3)
    texts = [ids_of(n, seed=n) for n in (260, 131, 129)]
    alone = [rig.run((3, 0, text))[0] for text in texts]
    done = [0, 0, 0]
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        rows = []
        for slot in rng.sample(range(3), 3):
            width = min(rng.choice([1, 2, 4, 5, 17]), len(texts[slot]) - done[slot])
            if width:
                rows.append((slot, done[slot], texts[slot][done[slot] : done[slot] + width]))
        logits, _ = rig.run(*rows)
        at = 0
        for slot, first, tokens in rows:
            width = len(tokens)
            assert torch.equal(logits[at : at + width], alone[slot][first : first + width])
            done[slot] += width
            at += width


@pytest.mark.parametrize("seed", range(4))
def test_rejected_rows_leave_no_trace_in_any_cache(
    tiny_weights: Weights, backend: str, seed: int
) -> None:
    rng = random.Random(seed)
    # The smallest rings the widest step allows: one row fewer would show.
    rig = make_rig(tiny_weights, tiny_weights.config, backend=backend, max_seq_len=640, max_width=9)
    ids = ids_of(640, seed=seed)
    length = 0
    steps = 0
    while length < 560:
        # Long accepted stretches first, so that the histories cross 128 several times.
        width = rng.randint(1, 9)
        accepted = rng.randint(1, width)
        drafts = [rng.randrange(8, 260) for _ in range(width - accepted)]
        rig.run((0, length, ids[length : length + accepted] + drafts))
        length += accepted
        steps += 1
    plain = make_rig(
        tiny_weights, tiny_weights.config, backend=backend, max_seq_len=640, max_width=9
    )
    at = 0
    for width in random_widths(random.Random(seed + 100), length, 1, 9):
        plain.run((0, at, ids[at : at + width]))
        at += width
    window = rig.config.sliding_window
    mine = visible_cache(rig.pools, 0, length, window)
    theirs = visible_cache(plain.pools, 0, length, window)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
    follow = ids[length : length + 6]
    assert torch.equal(rig.run((0, length, follow))[0], plain.run((0, length, follow))[0])


def test_a_ring_one_row_too_small_is_caught(tiny_weights: Weights, backend: str) -> None:
    """The sizes in the pools are the smallest: cutting a row changes a verify's logits."""
    ids = ids_of(200)
    logits = []
    for name in ("", "window", "raw128_kv", "raw4_kv"):
        rig = make_rig(
            tiny_weights, tiny_weights.config, backend=backend, max_seq_len=256, max_width=8
        )
        pools = rig.pools
        if name:
            pair = {"window": ["window"], "raw128_kv": ["raw128_kv", "raw128_score"]}
            for ring in pair.get(name, ["raw4_kv", "raw4_score"]):
                setattr(pools, ring, getattr(pools, ring)[:, :, :-1].clone())
        at = 0
        while at < 192:
            rig.run((0, at, ids[at : at + 8]))
            at += 8
            # A wholly rejected verify from an accepted length that is not a multiple of 8.
            rig.run((0, at - 1, [ids[at - 1], *range(100, 107)]))
        logits.append(rig.run((0, 192, ids[192:200]))[0])
    for cut in logits[1:]:
        assert not torch.equal(cut, logits[0])


def test_one_row_of_nan_disturbs_no_other(tiny_weights: Weights, backend: str) -> None:
    rig = make_rig(tiny_weights, tiny_weights.config, backend=backend, max_seq_len=384)
    a, b = ids_of(140, seed=1), ids_of(140, seed=2)
    want = rig.run((0, 0, a))[0]
    rig.run((1, 0, b[:130]))
    rig.pools.window[:, 1] = float("nan")
    logits, _ = rig.run((1, 130, b[130:]), (0, 0, a))
    assert torch.isnan(logits[0]).any()
    assert torch.equal(logits[10:], want)


def test_equal_scores_go_to_the_lower_row(tiny_weights: Weights, backend: str) -> None:
    """With an indexer that scores every row alike, the first `index_topk` rows are taken."""
    flat = dict(tiny_weights)
    for name in flat:
        if name.endswith("indexer.weights_proj.weight"):
            flat[name] = torch.zeros_like(flat[name])
    ids = ids_of(300)
    config = tiny_weights.config
    for changed in (range(4), range(200, 204)):
        # Tokens of an early window are read by the last query, those of a late one are not once
        # they have left the 128-token window: 200 .. 203 stand in row 50 of 16 chosen.
        rig = make_rig(flat, config, backend=backend, max_seq_len=384)
        rig.run((0, 0, ids))
        before = rig.pools.rows4.clone()
        block = int(rig.pools.block_tables[0, changed[0] // 128])
        row = block * 32 + (changed[0] % 128) // 4
        logits = rig.run((0, 299, ids[299:]))[0]
        rig.pools.rows4.copy_(before)
        rig.pools.rows4[:, row] += 1.0
        moved = not torch.equal(rig.run((0, 299, ids[299:]))[0], logits)
        assert moved == (changed[0] < 4 * config.index_topk)


def test_bf16_agrees_with_fp32_in_choice_and_mean(tiny_weights: Weights, ids: list[int]) -> None:
    fp32 = make_rig(tiny_weights, tiny_weights.config, backend="torch", max_seq_len=640)
    built = build(tiny_weights, tiny_weights.config, device=CPU, dtype=torch.bfloat16)
    pools = CachePools.allocate(
        tiny_weights.config,
        num_slots=1,
        num_blocks=5,
        max_seq_len=640,
        max_width=640,
        device=CPU,
        dtype=torch.bfloat16,
    )
    pools.block_tables[0] = torch.arange(1, 6)
    text = ids[:500]
    half = built.model.forward(step_inputs(pools, [(0, 0, text)]), pools).logits
    full = fp32.run((0, 0, text))[0]
    agree = (half.argmax(-1) == full.argmax(-1)).float().mean()
    assert agree > 0.85
    assert (half - full).abs().mean() < 0.1 * full.std()
