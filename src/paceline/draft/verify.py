"""Acceptance of a batch: from target logits and drafts to verdicts, changing nothing.

The rows of a sequence that verifies drafts d_1 .. d_n are n + 1: row 0 belongs to the token
sampled last and judges d_1, row n gives the token after all of them. A row is judged only if every
draft before it was accepted: rows behind a refused draft would not exist without drafts, so nothing
in them, a NaN included, can matter. Stop tokens and limits are the caller's to cut.

`greedy` is the rule at temperature 0 with no knob. `invariant` is the rule for any request: what it
emits depends on the target and the seed alone. `rejection` accepts the most, and what it emits
follows the target's law but depends on the drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.sampling import noise, rules
from paceline.sampling.processors import Mask
from paceline.sampling.request import FAILURES, Sampler, host_row
from paceline.types import Verdict

__all__ = ["greedy", "greedy_tokens", "invariant", "race_rows", "rejection"]


def greedy_tokens(logits: torch.Tensor | npt.NDArray[np.float32]) -> list[int]:
    """Pick each row's largest logit; ties go to the lower id.

    Synchronises with the device once.

    Args:
        logits: [L, vocab] fp32; `-inf` is an ordinary, impossible token.

    Returns:
        L ids; -1 for a row that holds a NaN or `+inf`, or nothing but `-inf`.
    """
    if isinstance(logits, torch.Tensor):
        if logits.device.type != "cpu":
            # A NaN is the largest of its row, so the largest value tells of all of them.
            best, at = logits.max(-1)
            picked: list[int] = torch.where(torch.isfinite(best), at, -1).tolist()
            return picked
        logits = logits.detach().numpy()
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, token in enumerate(tokens):
        if not math.isfinite(logits[row, token]):
            tokens[row] = -1
    return tokens


def greedy(
    logits: torch.Tensor | npt.NDArray[np.float32],
    drafts: Sequence[Sequence[int]],
    *,
    offsets: Sequence[int] | None = None,
    picks: npt.NDArray[np.int64] | None = None,
) -> list[Verdict]:
    """Accept each sequence's leading drafts that are the target's own choice.

    Args:
        logits: [L, vocab] fp32 of all sequences' rows.
        drafts: [i] drafts of sequence i, possibly none.
        offsets: [i] first of the len(drafts[i]) + 1 rows of sequence i; None: they follow one
            another from row 0.
        picks: [L] each row's largest logit where the model found it, as `TargetOutput` has them.

    Returns:
        One verdict per sequence. Where the row that would give the next token is not finite,
        `error` says so, `next_token` is -1 and the drafts accepted before it still stand.

    Raises:
        ValueError: a sequence's rows lie outside the logits.
    """
    starts = _starts(logits, drafts, offsets)
    choices: list[int] = [-1] if picks is None else picks.tolist()
    if -1 in choices:
        choices = greedy_tokens(logits)
    verdicts = []
    for start, draft in zip(starts, drafts, strict=True):
        accepted = 0
        for token in draft:
            if choices[start + accepted] != token or token < 0:
                break
            accepted += 1
        verdicts.append(_verdict(accepted, choices[start + accepted]))
    return verdicts


def invariant(
    logits: torch.Tensor | npt.NDArray[np.float32],
    drafts: Sequence[Sequence[int]],
    samplers: Sequence[Sampler],
    *,
    offsets: Sequence[int] | None = None,
    masks: Sequence[Sequence[Mask | None] | None] | None = None,
) -> list[Verdict]:
    """Accept each sequence's leading drafts that are its target's own picks.

    Requests without knobs at temperature 0 are judged by their largest logits, all at once; on a
    device so are those with a temperature only. The rows of others are brought to the host.

    Args:
        logits: [L, vocab] fp32 of all sequences' rows; not changed.
        drafts: [i] drafts of sequence i, possibly none.
        samplers: [i] of sequence i; only looked at.
        offsets: [i] first row of sequence i; None: they follow one another from row 0.
        masks: [i][j] what the grammar allows at row j of sequence i; None for what has none.

    Returns:
        One verdict per sequence. Where the row that would give the next token is not finite, or
        nothing is allowed there, `error` says so, `next_token` is -1 and the drafts accepted before
        it still stand.

    Raises:
        ValueError: a sequence's rows lie outside the logits.
    """
    starts = _starts(logits, drafts, offsets)
    on_device = isinstance(logits, torch.Tensor) and logits.device.type != "cpu"
    plain: list[int] | None = None
    rows: npt.NDArray[np.float32] | None = None
    raced = _race_on_device(logits, drafts, samplers, starts, masks) if on_device else {}
    verdicts = []
    for index, (start, draft, sampler) in enumerate(zip(starts, drafts, samplers, strict=True)):
        mask = masks[index] if masks is not None else None
        picks: Sequence[int] | None = raced.get(index)
        if mask is None and sampler.is_argmax:
            if plain is None:
                plain = greedy_tokens(logits)
            picks = plain[start : start + len(draft) + 1]
        elif picks is None and rows is None:
            rows = host_row(logits)
        accepted, pick = 0, 0
        for j in range(len(draft) + 1):
            if picks is not None:
                pick = picks[j]
            else:
                assert rows is not None
                allowed = None if mask is None else mask[j]
                pick = sampler.pick(rows[start + j], drafted=draft[:j], mask=allowed)
            if pick < 0 or j == len(draft) or pick != draft[j]:
                break
            accepted += 1
        verdicts.append(_verdict(accepted, pick))
    return verdicts


def rejection(
    logits: torch.Tensor | npt.NDArray[np.float32],
    drafts: Sequence[Sequence[int]],
    samplers: Sequence[Sampler],
    *,
    laws: Sequence[Sequence[npt.NDArray[np.float64] | None]],
    offsets: Sequence[int] | None = None,
    masks: Sequence[Sequence[Mask | None] | None] | None = None,
    block: bool = False,
) -> list[Verdict]:
    """Accept drafts drawn from their drafter's law with min(1, p / q).

    Args:
        logits: [L, vocab] fp32 of all sequences' rows; not changed.
        drafts: [i] drafts of sequence i, drawn by `Sampler.draw` of the same sampler.
        samplers: [i] of sequence i; only looked at.
        laws: [i][j] the law draft j was drawn from, as `Sampler.draw` gave it; None for a draft
            chosen without chance.
        offsets: [i] first row of sequence i; None: they follow one another from row 0.
        masks: [i][j] what the grammar allows at row j of sequence i; None for what has none.
        block: judge the drafts of a step together, which accepts more.

    Returns:
        One verdict per sequence, as `invariant` gives them.

    Raises:
        ValueError: a sequence's rows lie outside the logits.
    """
    starts = _starts(logits, drafts, offsets)
    rows = host_row(logits)
    rule = rules.block_rejection if block else rules.rejection
    verdicts = []
    for index, (start, draft, sampler) in enumerate(zip(starts, drafts, samplers, strict=True)):
        mask = masks[index] if masks is not None else None
        found = [
            sampler.law(rows[start + j], drafted=draft[:j], mask=None if mask is None else mask[j])
            for j in range(len(draft) + 1)
        ]
        first = sampler.history.length
        accepted, token = rule(
            [None if isinstance(law, int) else law.probabilities() for law in found],
            laws[index],
            draft,
            accept=noise.uniforms(sampler.seed, first, noise.Purpose.ACCEPT, len(draft)),
            residual=noise.uniforms(sampler.seed, first, noise.Purpose.RESIDUAL, 1)[0],
        )
        failed = found[accepted]
        verdicts.append(_verdict(accepted, failed if isinstance(failed, int) else token))
    return verdicts


def _starts(
    logits: torch.Tensor | npt.NDArray[np.float32],
    drafts: Sequence[Sequence[int]],
    offsets: Sequence[int] | None,
) -> Sequence[int]:
    """First row of each sequence, all its rows being there."""
    num_rows = logits.shape[0]
    if offsets is None:
        starts, end = [], 0
        for draft in drafts:
            starts.append(end)
            end += len(draft) + 1
        offsets = starts
    for start, draft in zip(offsets, drafts, strict=True):
        if start < 0 or start + len(draft) >= num_rows:
            raise ValueError(
                f"rows {start} to {start + len(draft)} are asked for; the logits have {num_rows}"
            )
    return offsets


def _verdict(accepted: int, pick: int) -> Verdict:
    return Verdict(num_accepted=accepted, next_token=max(pick, -1), error=FAILURES.get(pick))


def _race_on_device(
    logits: torch.Tensor | npt.NDArray[np.float32],
    drafts: Sequence[Sequence[int]],
    samplers: Sequence[Sampler],
    starts: Sequence[int],
    masks: Sequence[Sequence[Mask | None] | None] | None,
) -> dict[int, list[int]]:
    """The picks at every row of the sequences that have a temperature and nothing else."""
    assert isinstance(logits, torch.Tensor)
    chosen = [
        index
        for index, sampler in enumerate(samplers)
        if sampler.is_tempered and (masks is None or masks[index] is None)
    ]
    if not chosen:
        return {}
    rows, keys, temperatures = [], [], []
    for index in chosen:
        for j in range(len(drafts[index]) + 1):
            rows.append(starts[index] + j)
            keys.append(samplers[index].key(j))
            temperatures.append(samplers[index].knobs.temperature)
    picks = iter(race_rows(logits[rows], keys, temperatures))
    return {index: [next(picks) for _ in range(len(drafts[index]) + 1)] for index in chosen}


def race_rows(
    logits: torch.Tensor, keys: Sequence[int], temperatures: Sequence[float]
) -> list[int]:
    """Pick each row's winner under shared noise, on the logits' device; one wait for it.

    The same picks as `Sampler.pick` of a request with a temperature only, the last place of the
    device's logarithm aside.

    Args:
        logits: [L, vocab] fp32.
        keys: [L] of the noise.
        temperatures: [L] above 0.

    Returns:
        L ids; -1 for a row that holds a NaN or `+inf`, or nothing but `-inf`.
    """
    values = logits.double()
    best = values.amax(-1, keepdim=True)
    heat = torch.tensor(temperatures, dtype=torch.float64, device=logits.device)[:, None]
    weights = ((values - best) / heat).exp_()
    racers = noise.exponentials_on(keys, vocab_size=logits.shape[1], device=logits.device)
    at = (weights / racers).argmax(-1)
    picks: list[int] = torch.where(torch.isfinite(best[:, 0]), at, -1).tolist()
    return picks
