"""Shared by the sampling tests: a naive law, a toy target, decoding loops, a chi-square."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.draft import verify
from paceline.sampling.processors import Mask
from paceline.sampling.request import Sampler
from paceline.types import SamplingParams

VOCAB = 8
END = 7

# Every knob on its own, on a vocabulary of 8; `bad_word_ids` stands for `bad_words`.
KNOBS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "logit_bias": {"logit_bias": {1: 2.0, 5: -1.5}},
    "allowed_token_ids": {"allowed_token_ids": [0, 2, 3, 5, 6]},
    "bad_words": {"bad_word_ids": [(4,), (2, 3), (3, 2, 2)]},
    "min_tokens": {"min_tokens": 6},
}


def make_sampler(
    prompt: Sequence[int] = (1, 2, 2), *, vocab: int = VOCAB, sample: int = 0, **knobs: Any
) -> Sampler:
    knobs = dict(knobs)
    words = knobs.pop("bad_word_ids", ())
    knobs.setdefault("max_tokens", 64)
    knobs.setdefault("seed", 0)
    return Sampler(
        SamplingParams(**knobs),
        vocab_size=vocab,
        prompt_ids=prompt,
        stop_ids=[END],
        bad_word_ids=words,
        sample=sample,
    )


def naive_law(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    allowed: Sequence[bool] | None = None,
    **knobs: Any,
) -> list[float]:
    """The law of the next token, one Python float at a time, straight from the list of steps."""
    vocab = len(logits)
    values = list(logits)
    banned = {i for i in range(vocab) if allowed is not None and not allowed[i]}
    if knobs.get("allowed_token_ids") is not None:
        banned |= set(range(vocab)) - set(knobs["allowed_token_ids"])
    for word in knobs.get("bad_word_ids", ()):
        *before, last = word
        if list(output[len(output) - len(before) :]) == before and len(output) >= len(before):
            banned.add(last)
    if len(output) < knobs.get("min_tokens", 0):
        banned.add(END)
    for i in range(vocab):
        values[i] += knobs.get("logit_bias", {}).get(i, 0.0)
        if i in prompt or i in output:
            penalty = knobs.get("repetition_penalty", 1.0)
            values[i] = values[i] / penalty if values[i] > 0 else values[i] * penalty
        count = list(output).count(i)
        values[i] -= knobs.get("frequency_penalty", 0.0) * count
        values[i] -= knobs.get("presence_penalty", 0.0) * (count > 0)
    order = sorted((i for i in range(vocab) if i not in banned), key=lambda i: (-values[i], i))
    if not order:
        raise LookupError("nothing is allowed")
    temperature = knobs.get("temperature", 0.0)
    if temperature == 0:
        return [float(i == order[0]) for i in range(vocab)]
    mass = {i: math.exp((values[i] - values[order[0]]) / temperature) for i in order}
    order = [i for i in order if mass[i] >= knobs.get("min_p", 0.0)]
    if knobs.get("top_k", 0) > 0:
        order = order[: knobs["top_k"]]
    left = sum(mass[i] for i in order)
    kept, held = [], 0.0
    for i in order:
        kept.append(i)
        held += mass[i]
        if held >= knobs.get("top_p", 1.0) * left:
            break
    total = sum(mass[i] for i in kept)
    return [mass[i] / total if i in kept else 0.0 for i in range(vocab)]


class Table:
    """A model whose next logits depend on the last two ids, and on a seed."""

    def __init__(self, seed: int, *, vocab: int = VOCAB, spread: float = 1.5) -> None:
        rng = np.random.default_rng(seed)
        shape = (vocab, vocab, vocab)
        self.rows = (rng.standard_normal(shape) * spread).astype(np.float32)

    def __call__(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        row: npt.NDArray[np.float32] = self.rows[ids[-2], ids[-1]]
        return row


Drafter = Callable[[Sampler, list[int], int], list[int]]
MaskOf = Callable[[Sequence[int]], Mask | None]


def run_invariant(
    target: Table,
    sampler: Sampler,
    prompt: Sequence[int],
    length: int,
    *,
    drafter: Drafter | None = None,
    widths: Callable[[int], int] = lambda step: 0,
    mask_of: MaskOf | None = None,
) -> tuple[list[int], int]:
    """Decode step by step as an engine does; ids and how many of them were accepted drafts."""
    ids, accepted, step = list(prompt), 0, 0
    while len(ids) < len(prompt) + length:
        wanted = min(widths(step), len(prompt) + length - len(ids) - 1)
        draft = drafter(sampler, ids, wanted) if drafter and wanted else []
        rows = np.stack([target([*ids, *draft[:j]]) for j in range(len(draft) + 1)])
        masks = None
        if mask_of is not None:
            masks = [[mask_of([*ids, *draft[:j]]) for j in range(len(draft) + 1)]]
        (verdict,) = verify.invariant(rows, [draft], [sampler], masks=masks)
        assert verdict.error is None
        given = [*draft[: verdict.num_accepted], verdict.next_token]
        accepted += verdict.num_accepted
        sampler.commit(given)
        ids += given
        step += 1
    return ids[len(prompt) :], accepted


def picking(model: Table, mask_of: MaskOf | None = None) -> Drafter:
    """A drafter with a model of its own that picks under the shared noise."""

    def draft(sampler: Sampler, ids: list[int], count: int) -> list[int]:
        drafted: list[int] = []
        for _ in range(count):
            mask = None if mask_of is None else mask_of([*ids, *drafted])
            drafted.append(sampler.pick(model([*ids, *drafted]), drafted=drafted, mask=mask))
        return drafted

    return draft


def p_value(observed: npt.NDArray[np.int64], law: npt.NDArray[np.float64]) -> float:
    """Chance of counts at least so far from a law, cells of few pooled; 0 for what cannot be."""
    total = int(observed.sum())
    if observed[law == 0].sum():
        return 0.0
    observed, expected = observed[law > 0], law[law > 0] * total
    order = np.argsort(expected)
    few = order[np.cumsum(expected[order]) < 10]
    rest = np.setdiff1d(order, few)
    if len(few):
        rest, few = (
            rest[rest != rest[expected[rest].argmin()]],
            np.append(few, rest[expected[rest].argmin()]),
        )
        observed = np.append(observed[rest], observed[few].sum())
        expected = np.append(expected[rest], expected[few].sum())
    if len(observed) < 2:
        return 1.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(observed) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def run_rejection(
    target: Table,
    drafter: Table,
    sampler: Sampler,
    prompt: Sequence[int],
    length: int,
    *,
    num_drafts: int,
    block: bool,
) -> tuple[list[int], list[int]]:
    """Decode with drafts drawn from the drafter's law; ids, and the drafts accepted per step."""
    ids: list[int] = list(prompt)
    accepted: list[int] = []
    while len(ids) < len(prompt) + length:
        draft: list[int] = []
        laws = []
        for _ in range(num_drafts):
            token, law = sampler.draw(drafter([*ids, *draft]), drafted=draft)
            draft.append(token)
            laws.append(law)
        rows = np.stack([target([*ids, *draft[:j]]) for j in range(len(draft) + 1)])
        (verdict,) = verify.rejection(rows, [draft], [sampler], laws=[laws], block=block)
        assert verdict.error is None
        given = [*draft[: verdict.num_accepted], verdict.next_token]
        accepted.append(verdict.num_accepted)
        sampler.commit(given)
        ids += given
    return ids[len(prompt) : len(prompt) + length], accepted


def joint_law(
    target: Table, prompt: Sequence[int], length: int, **knobs: Any
) -> npt.NDArray[np.float64]:
    """The naive law of the next `length` ids together, flattened."""
    vocab = target.rows.shape[-1]
    joint = np.ones(1)
    outputs: list[list[int]] = [[]]
    for _ in range(length):
        rows = [
            naive_law(target([*prompt, *output]).tolist(), prompt, output, **knobs)
            for output in outputs
        ]
        joint = (joint[:, None] * np.array(rows)).ravel()
        outputs = [[*output, token] for output in outputs for token in range(vocab)]
    return joint
