"""Random numbers that are functions of (seed, position, token id) and of nothing else.

No state advances here, so that neither the width of a step, nor the batch around a request, nor a
pre-emption can shift what a position draws. A token's 64 bits are

    mix(row_key(seed, position) + (id + 1) * GOLDEN)

with `mix` the finaliser of SplitMix64 (Steele, Lea and Flood, 2014); along the ids of one row these
are the successive outputs of that generator, seeded with a key that is itself mixed twice. The bits
are integers and the same on every device; what floating-point functions make of them agrees to the
last place or so.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "Purpose",
    "derive_seed",
    "exponentials",
    "exponentials_on",
    "fresh_seed",
    "mix",
    "row_key",
    "token_bits",
    "token_bits_on",
    "uniforms",
]

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
_UNIT: Final = 2.0**-52


class Purpose(IntEnum):
    """What a uniform of the rejection rules is for; each purpose draws from its own stream."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def mix(value: int) -> int:
    """Map 64 bits to 64 bits one to one, every input bit moving every output bit."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def fresh_seed() -> int:
    """A seed of 64 bits nobody else has, from the operating system."""
    return secrets.randbits(64)


def derive_seed(seed: int, sample: int) -> int:
    """Seed of the `sample`-th answer to one prompt; the 0-th keeps the request's own."""
    return seed if sample == 0 else mix(mix(seed) ^ mix(sample + _GOLDEN))


def row_key(seed: int, position: int, purpose: int = 0) -> int:
    """Key of the noise vector of one position.

    Args:
        seed: 64 bits.
        position: absolute position of the token to be picked.
        purpose: 0 for the shared noise of the ids, else a `Purpose`.
    """
    return mix(mix(seed + _GOLDEN) ^ mix(2 * position + 1) ^ (purpose << 56))


@lru_cache(maxsize=8)
def _steps(vocab_size: int) -> npt.NDArray[np.uint64]:
    return np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


def token_bits(
    key: int, *, vocab_size: int, ids: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.uint64]:
    """64 random bits per token.

    Args:
        key: of the row.
        vocab_size: ids there are.
        ids: [n] the ids wanted; None: all of them.

    Returns:
        [n] or [vocab_size] uint64, owned by the caller; an id's bits do not depend on `ids`.
    """
    steps = _steps(vocab_size)
    bits = (steps if ids is None else steps[ids]) + np.uint64(key)
    moved = bits >> np.uint64(30)
    bits ^= moved
    bits *= np.uint64(_FIRST)
    np.right_shift(bits, np.uint64(27), out=moved)
    bits ^= moved
    bits *= np.uint64(_SECOND)
    np.right_shift(bits, np.uint64(31), out=moved)
    bits ^= moved
    return bits


def exponentials(
    key: int, *, vocab_size: int, ids: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.float64]:
    """Independent standard exponentials, one per token, above 0.

    `argmax(p / e)` over them is a draw from p, and `-log(e)` is Gumbel noise: both pick the same.
    They are made of 52 bits each, so that probabilities are met to about 2^-52.

    Args:
        key: of the row.
        vocab_size: ids there are.
        ids: [n] the ids wanted; None: all of them.

    Returns:
        [n] or [vocab_size] fp64, owned by the caller.
    """
    bits = token_bits(key, vocab_size=vocab_size, ids=ids)
    bits >>= np.uint64(12)
    noise = bits.astype(np.float64)
    noise += 0.5
    noise *= _UNIT
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    return noise


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right filling with zeros; torch fills with the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def token_bits_on(
    keys: Sequence[int], *, vocab_size: int, device: torch.device | str
) -> torch.Tensor:
    """`token_bits` of several rows on a device.

    Returns:
        [len(keys), vocab_size] int64: the same 64 bits, read as signed.
    """
    ids = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)
    rows = torch.tensor([_signed(key) for key in keys], dtype=torch.int64, device=device)
    bits = ids * _signed(_GOLDEN) + rows[:, None]
    bits = (bits ^ _shifted(bits, 30)) * _signed(_FIRST)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_SECOND)
    return bits ^ _shifted(bits, 31)


def exponentials_on(
    keys: Sequence[int], *, vocab_size: int, device: torch.device | str
) -> torch.Tensor:
    """`exponentials` of several rows on a device, [len(keys), vocab_size] fp64."""
    bits = token_bits_on(keys, vocab_size=vocab_size, device=device)
    return _shifted(bits, 12).double().add_(0.5).mul_(_UNIT).log_().neg_()


def uniforms(seed: int, start: int, purpose: Purpose, count: int) -> list[float]:
    """Numbers of (0, 1) for one step of a rejection rule.

    Args:
        seed: 64 bits.
        start: position of the first token the step may emit. Steps emit at least one token, so no
            two steps of a request share it: a position drafted twice gets fresh numbers.
        purpose: which stream.
        count: how many.

    Returns:
        `count` floats, the j-th for draft j of the step.
    """
    key = row_key(seed, start, purpose)
    bits = (mix(key + (j + 1) * _GOLDEN) >> 12 for j in range(count))
    return [(value + 0.5) * _UNIT for value in bits]
