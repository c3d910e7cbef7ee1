"""The noise is a function of (seed, position, id): reference values, uniformity, independence.

Seeds are fixed, so that every statistical test is deterministic; each would have raised a false
alarm with a chance of 1e-4 when its seed was chosen.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_kit import p_value

from paceline.sampling import noise
from paceline.sampling.noise import Purpose

ALARM = 1e-4
SEEDS = st.integers(0, 2**64 - 1)


def bits(seed: int, position: int, count: int = 4096) -> np.ndarray:
    return noise.token_bits(noise.row_key(seed, position), vocab_size=count)


def changed(first: np.ndarray, second: np.ndarray) -> float:
    """Bits per word that differ."""
    return float(np.unpackbits((first ^ second).view(np.uint8)).sum()) / len(first)


def test_a_row_is_the_published_generator() -> None:
    # The first outputs of SplitMix64 seeded with 1234567, as its authors' code prints them.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert noise.token_bits(1234567, vocab_size=5).tolist() == expected
    golden = 0x9E3779B97F4A7C15
    assert [noise.mix(1234567 + (i + 1) * golden) for i in range(5)] == expected


@given(SEEDS, st.integers(0, 2**20), st.integers(2, 600), st.data())
def test_the_bits_of_an_id_do_not_depend_on_which_ids_are_asked(
    seed: int, position: int, vocab: int, data: st.DataObject
) -> None:
    key = noise.row_key(seed, position)
    ids = np.array(data.draw(st.lists(st.integers(0, vocab - 1), max_size=9)), np.int64)
    whole = noise.token_bits(key, vocab_size=vocab)
    assert (noise.token_bits(key, vocab_size=vocab, ids=ids) == whole[ids]).all()
    assert (noise.token_bits(key, vocab_size=2 * vocab)[:vocab] == whole).all()
    exact = noise.exponentials(key, vocab_size=vocab)
    assert (noise.exponentials(key, vocab_size=vocab, ids=ids) == exact[ids]).all()


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_the_very_same_bits_come_on_a_device(device: str) -> None:
    keys = [
        noise.row_key(seed, position) for seed in (0, 1, 2**63, 2**64 - 1) for position in (0, 9)
    ]
    there = noise.token_bits_on(keys, vocab_size=8192, device=device).cpu().numpy()
    here = np.stack([noise.token_bits(key, vocab_size=8192) for key in keys])
    assert (there.view(np.uint64) == here).all()
    there = noise.exponentials_on(keys, vocab_size=8192, device=device).cpu().numpy()
    here = np.stack([noise.exponentials(key, vocab_size=8192) for key in keys])
    assert np.allclose(there, here, rtol=1e-14, atol=0)


def test_bits_are_uniform() -> None:
    rows = np.concatenate([bits(5, position) for position in range(64)])
    for shift in (0, 12, 28, 44, 56):
        counts = np.bincount((rows >> np.uint64(shift) & np.uint64(255)).astype(int), minlength=256)
        assert p_value(counts, np.full(256, 1 / 256)) > ALARM, shift


def test_exponentials_follow_their_law() -> None:
    drawn = np.concatenate(
        [noise.exponentials(noise.row_key(3, i), vocab_size=4096) for i in range(32)]
    )
    cells = np.minimum((-np.expm1(-drawn) * 100).astype(int), 99)
    assert p_value(np.bincount(cells, minlength=100), np.full(100, 0.01)) > ALARM


@pytest.mark.parametrize("shift", [12, 32, 60])
@pytest.mark.parametrize(
    "what",
    ["next token", "next position", "far position", "next seed", "next sample", "purposes"],
)
def test_neighbours_are_independent(what: str, shift: int) -> None:
    first, second = [], []
    for position in range(40):
        here = bits(11, position)
        there = {
            "next token": lambda h=here: np.roll(h, 1),
            "next position": lambda p=position: bits(11, p + 1),
            "far position": lambda p=position: bits(11, p + 4096),
            "next seed": lambda p=position: bits(12, p),
            "next sample": lambda p=position: bits(noise.derive_seed(11, 1), p),
            "purposes": lambda p=position: noise.token_bits(
                noise.row_key(11, p, Purpose.ACCEPT), vocab_size=4096
            ),
        }[what]()
        first.append(here)
        second.append(there)
    cut = [
        (np.concatenate(x) >> np.uint64(shift) & np.uint64(15)).astype(int) for x in (first, second)
    ]
    counts = np.bincount(cut[0] * 16 + cut[1], minlength=256)
    assert p_value(counts, np.full(256, 1 / 256)) > ALARM


def test_one_token_is_uniform_over_positions_and_over_seeds() -> None:
    for keys in (
        [noise.row_key(4, position) for position in range(20000)],
        [noise.row_key(seed, 4) for seed in range(20000)],
        [noise.row_key(noise.derive_seed(4, sample), 4) for sample in range(20000)],
    ):
        assert len(set(keys)) == len(keys)
        one = np.array([noise.mix(key + 0x9E3779B97F4A7C15) >> 58 for key in keys])
        assert p_value(np.bincount(one, minlength=64), np.full(64, 1 / 64)) > ALARM


def test_every_bit_of_seed_and_position_moves_half_of_the_bits() -> None:
    base = bits(0x0123456789ABCDEF, 1000)
    for bit in range(64):
        other = bits(0x0123456789ABCDEF ^ (1 << bit), 1000)
        assert abs(changed(base, other) - 32) < 0.5
    for bit in range(24):
        other = bits(0x0123456789ABCDEF, 1000 ^ (1 << bit))
        assert abs(changed(base, other) - 32) < 0.5


@pytest.mark.parametrize("value", [0, 2**64 - 1, 2**12 - 1, 2**63])
def test_no_bits_give_an_exponential_of_zero_or_infinity(
    value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        noise, "token_bits", lambda key, vocab_size, ids: np.full(vocab_size, value, np.uint64)
    )
    drawn = noise.exponentials(0, vocab_size=3)
    assert (drawn > 0).all()
    assert np.isfinite(drawn).all()


def test_uniforms_differ_by_seed_step_purpose_and_draft_and_do_not_depend_on_how_many() -> None:
    seen = [
        u
        for seed in (0, 1)
        for start in range(50)
        for purpose in Purpose
        for u in noise.uniforms(seed, start, purpose, 8)
    ]
    assert len(set(seen)) == len(seen)
    assert all(0 < u < 1 for u in seen)
    assert noise.uniforms(7, 3, Purpose.DRAFT, 8)[:3] == noise.uniforms(7, 3, Purpose.DRAFT, 3)
    counts = np.bincount((np.array(seen) * 20).astype(int), minlength=20)
    assert p_value(counts, np.full(20, 0.05)) > ALARM


def test_seeds() -> None:
    assert noise.derive_seed(99, 0) == 99
    derived = {noise.derive_seed(seed, n) for seed in range(100) for n in range(1, 9)}
    assert len(derived) == 800
    assert all(0 <= seed < 2**64 for seed in derived)
    assert len({noise.fresh_seed() for _ in range(200)}) == 200
    assert math.log2(max(noise.fresh_seed() for _ in range(200))) > 60
