"""What a request's parameters do to a row of logits, and the law that is left.

The order is vLLM's:

 1. grammar mask
 2. allowed ids
 3. banned words: the last id of a word whose other ids were just emitted
 4. minimum length: the ids that end the sequence
 5. logit bias, added
 6. repetition penalty, over prompt and output: a positive logit is divided, another multiplied
 7. frequency penalty, times the count in the output; presence penalty, where the count is not 0
 8. temperature
 9. min-p: ids below `min_p` times the largest probability go
10. top-k
11. top-p: of what is left, the smallest set of the most probable ids that holds `top_p` of it

Steps 1 to 7 give processed logits, 8 to 11 the law. "Output" is what was committed and the drafts
before the row; a draft that is refused leaves no trace, since nothing here is changed by looking.
Where ids tie at the edge of top-k or top-p the lower ones stay and exactly k are kept (vLLM keeps
every id that ties with the k-th). Logits are raised to fp64 first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from paceline.types import GREEDY_BELOW, RequestError, SamplingParams

__all__ = [
    "Knobs",
    "Law",
    "Mask",
    "TokenHistory",
    "allowed_by",
    "compile_knobs",
    "law_of",
    "process",
]

Ids: TypeAlias = npt.NDArray[np.int64]
Row: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = torch.Tensor | npt.NDArray[np.bool_] | npt.NDArray[np.int32]
"""Allowed ids of one row: [vocab] bool, or [ceil(vocab / 32)] int32, id i being bit i % 32 of word
i // 32, set = allowed. Ids that a shorter mask does not reach are not allowed."""


class TokenHistory:
    """Which ids a request has seen, and how often it emitted each.

    Grows by `commit` only; drafts are given to `view` and leave no trace.

    Args:
        prompt: ids of the prompt.
        counting: whether the ids are counted; without, only the length is known.
        tail: how many of the last emitted ids are kept.

    Attributes:
        prompt_len: ids of the prompt.
        num_output: ids committed since.
        tail: the last of them, oldest first.
    """

    __slots__ = (
        "_counting",
        "_counts",
        "_ids",
        "_keep",
        "_slots",
        "num_output",
        "prompt_len",
        "tail",
    )

    def __init__(self, prompt: Iterable[int], *, counting: bool = True, tail: int = 0) -> None:
        ids = list(prompt)
        self.prompt_len = len(ids)
        self.num_output = 0
        self.tail: list[int] = []
        self._counting = counting
        self._keep = tail
        seen = dict.fromkeys(ids) if counting else {}
        self._slots = {token: slot for slot, token in enumerate(seen)}
        self._ids: Ids = np.fromiter(seen, np.int64, len(seen))
        self._counts: Ids = np.zeros(len(seen), np.int64)

    @property
    def length(self) -> int:
        """Tokens committed, the prompt included; the position of the next."""
        return self.prompt_len + self.num_output

    @property
    def counts(self) -> dict[int, int]:
        """How often each id was emitted; ids never emitted are left out."""
        held = len(self._slots)
        pairs = zip(self._ids[:held].tolist(), self._counts[:held].tolist(), strict=True)
        return {token: count for token, count in pairs if count}

    def commit(self, ids: Sequence[int]) -> None:
        """Append ids that were emitted."""
        self.num_output += len(ids)
        if self._keep:
            self.tail = [*self.tail, *ids][-self._keep :]
        if not self._counting:
            return
        for token in ids:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(slot + 64, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(slot + 64, np.int64)])
            self._ids[slot] = token
            self._counts[slot] += 1

    def view(self, drafted: Sequence[int] = ()) -> tuple[Ids, Ids]:
        """Distinct ids of prompt and output, and how often each was emitted, drafts included.

        Returns:
            Two [n] int64; read-only to the caller and dead at the next `commit`.
        """
        held = len(self._slots)
        ids, counts = self._ids[:held], self._counts[:held]
        if not drafted:
            return ids, counts
        added = [token for token in dict.fromkeys(drafted) if token not in self._slots]
        slots = {token: held + index for index, token in enumerate(added)}
        ids = np.concatenate([ids, np.array(added, np.int64)])
        counts = np.concatenate([counts, np.zeros(len(added), np.int64)])
        for token in drafted:
            counts[slots[token] if token in slots else self._slots[token]] += 1
        return ids, counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Knobs:
    """A request's parameters as the processors read them; made by `compile_knobs`.

    Attributes:
        vocab_size: ids there are.
        temperature: 0 is greedy.
        top_k: ids kept, 0 all.
        top_p: mass kept, 1 all.
        min_p: least share of the largest probability, 0 none.
        repetition_penalty: 1 is none.
        presence_penalty: 0 is none.
        frequency_penalty: 0 is none.
        allowed: [n] the only ids allowed, or None.
        banned: [n] ids never allowed, or None.
        bad_words: banned sequences of two ids and more.
        bias: ([n] ids, [n] fp64 added to them), or None.
        min_tokens: tokens before which no `stop_ids` may come.
        stop_ids: [n] ids that end the sequence.
    """

    vocab_size: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    allowed: Ids | None = None
    banned: Ids | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    bias: tuple[Ids, Row] | None = None
    min_tokens: int = 0
    stop_ids: Ids = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def penalizes(self) -> bool:
        """Whether the ids seen so far matter."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def tail(self) -> int:
        """Emitted ids that have to be remembered for the banned words."""
        return max((len(word) - 1 for word in self.bad_words), default=0)

    @property
    def keeps_logits(self) -> bool:
        """Whether, past the minimum length, the processed logits are the model's."""
        return (
            self.allowed is None
            and self.banned is None
            and not self.bad_words
            and self.bias is None
            and not self.penalizes
        )


def compile_knobs(
    params: SamplingParams,
    *,
    vocab_size: int,
    stop_ids: Iterable[int] = (),
    bad_word_ids: Iterable[Sequence[int]] = (),
) -> Knobs:
    """Check what needs the vocabulary and lay the parameters out for the processors.

    Args:
        params: of the request.
        vocab_size: ids there are.
        stop_ids: every id that ends the sequence, the end-of-sequence ids included.
        bad_word_ids: `params.bad_words` as ids, every spelling of each.

    Raises:
        RequestError: an id lies outside the vocabulary, or no id could ever be emitted.
    """

    def checked(name: str, ids: Iterable[int]) -> list[int]:
        found = list(ids)
        for token in found:
            if not 0 <= token < vocab_size:
                raise RequestError(f"{name} holds {token}; allowed are ids 0 to {vocab_size - 1}")
        return found

    words = [tuple(checked("bad_words", word)) for word in bad_word_ids]
    if not all(words):
        raise RequestError("bad_words holds a word without ids; allowed are words of at least one")
    banned = sorted({word[0] for word in words if len(word) == 1})
    stops = sorted(set(checked("stop_token_ids", stop_ids)))
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = sorted(set(checked("allowed_token_ids", params.allowed_token_ids)))
    barred = set(banned) | (set(stops) if params.min_tokens else set())
    left = vocab_size - len(barred) if allowed is None else len(set(allowed) - barred)
    if not left:
        raise RequestError(
            "allowed_token_ids, bad_words and min_tokens leave no token; allowed are combinations "
            "that leave at least one"
        )
    bias = None
    if params.logit_bias:
        ids = checked("logit_bias", params.logit_bias)
        bias = (_ids(ids), np.array([float(params.logit_bias[i]) for i in ids], np.float64))
    return Knobs(
        vocab_size=vocab_size,
        temperature=0.0 if params.temperature < GREEDY_BELOW else float(params.temperature),
        top_k=max(params.top_k, 0),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        allowed=None if allowed is None else _ids(allowed),
        banned=_ids(banned) if banned else None,
        bad_words=tuple(dict.fromkeys(word for word in words if len(word) > 1)),
        bias=bias,
        min_tokens=params.min_tokens,
        stop_ids=_ids(stops),
    )


def _ids(ids: Sequence[int]) -> Ids:
    return np.array(ids, np.int64)


def allowed_by(mask: Mask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """[vocab_size] bool of a mask in either form.

    Raises:
        ValueError: the mask is neither a row of bool nor one of int32.
    """
    given: npt.NDArray[Any] = mask.cpu().numpy() if isinstance(mask, torch.Tensor) else mask
    if given.ndim != 1 or given.dtype not in (np.bool_, np.int32):
        raise ValueError(
            f"the mask is {given.dtype} of shape {given.shape}; allowed is one row of bool or int32"
        )
    if given.dtype == np.int32:
        octets = np.ascontiguousarray(given, "<i4").view(np.uint8)
        given = np.unpackbits(octets, bitorder="little").view(np.bool_)
    allowed = np.zeros(vocab_size, np.bool_)
    reach = min(vocab_size, len(given))
    allowed[:reach] = given[:reach]
    return allowed


def process(
    logits: npt.NDArray[np.floating[Any]],
    knobs: Knobs,
    history: TokenHistory,
    *,
    drafted: Sequence[int] = (),
    mask: Mask | None = None,
) -> Row:
    """Apply everything that comes before the temperature.

    Args:
        logits: [vocab], the model's; not changed.
        knobs: of the request.
        history: what is committed.
        drafted: the drafts before this row.
        mask: what the grammar allows after them, or None.

    Returns:
        [vocab] fp64, owned by the caller; `-inf` where an id is not allowed.
    """
    row = logits.astype(np.float64)
    if mask is not None:
        np.copyto(row, -np.inf, where=~allowed_by(mask, len(row)))
    if knobs.allowed is not None:
        kept = row[knobs.allowed]
        row.fill(-np.inf)
        row[knobs.allowed] = kept
    if knobs.banned is not None:
        row[knobs.banned] = -np.inf
    if knobs.bad_words:
        past = (*history.tail, *drafted)
        for word in knobs.bad_words:
            if past[1 - len(word) :] == word[:-1]:
                row[word[-1]] = -np.inf
    if history.num_output + len(drafted) < knobs.min_tokens:
        row[knobs.stop_ids] = -np.inf
    if knobs.bias is not None:
        ids, added = knobs.bias
        row[ids] += added
    if knobs.penalizes:
        ids, counts = history.view(drafted)
        some = row[ids]
        some = np.where(some > 0, some / knobs.repetition_penalty, some * knobs.repetition_penalty)
        some -= knobs.frequency_penalty * counts + knobs.presence_penalty * (counts > 0)
        row[ids] = some
    return row


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """Which ids may be drawn and how likely each is, up to a common factor.

    Attributes:
        vocab_size: ids there are.
        ids: [n] those that may be drawn, ascending, or None for all.
        weights: [n] fp64, the largest being 1.
    """

    vocab_size: int
    ids: Ids | None
    weights: Row

    def probabilities(self) -> Row:
        """[vocab_size] fp64 that sum to 1; owned by the caller."""
        weights: Row = self.weights / self.weights.sum()
        if self.ids is None:
            return weights
        dense: Row = np.zeros(self.vocab_size)
        dense[self.ids] = weights
        return dense


def law_of(row: Row, knobs: Knobs, *, masked: bool = False) -> Law | None:
    """Temperature, min-p, top-k and top-p.

    Args:
        row: [vocab] processed logits, no NaN among them; changed, and dead afterwards.
        knobs: of the request; at temperature 0 the law is the largest logit, the lower id of a tie.
        masked: whether many logits are `-inf`, which are then dropped first.

    Returns:
        The law, or None where every logit is `-inf`.
    """
    vocab = len(row)
    best = int(row.argmax())
    top = row[best]
    if top == -np.inf:
        return None
    if knobs.temperature == 0:
        return Law(vocab, _ids([best]), np.ones(1))
    ids: Ids | None = None
    if masked:
        ids = np.flatnonzero(row > -np.inf)
        row = row[ids]
    row -= top
    if knobs.temperature != 1:
        row /= knobs.temperature
    weights = np.exp(row)
    if knobs.min_p > 0:
        kept = np.flatnonzero(weights >= knobs.min_p)
        ids = kept if ids is None else ids[kept]
        row, weights = row[kept], weights[kept]
    if 0 < knobs.top_k < len(row):
        kept = _first(row, _kth_largest(row, knobs.top_k), knobs.top_k)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    if knobs.top_p < 1:
        kept = _nucleus(weights, knobs.top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    return Law(vocab, ids, weights)


def _first(values: Row, edge: float, count: int) -> Ids:
    """Ascending indices of the `count` largest, `edge` being the smallest of these.

    Among those that equal the edge the lower indices are taken.
    """
    kept = values >= edge
    indices = np.flatnonzero(kept)
    if len(indices) > count:
        ties = np.flatnonzero(values == edge)
        kept[ties[count - len(indices) :]] = False
        indices = np.flatnonzero(kept)
    return indices


def _kth_largest(row: Row, count: int) -> float:
    """The `count`-th largest value.

    The largest entries of some columns are that many different entries, so that the `count`-th of
    them is a lower bound: little is left to partition.
    """
    columns = len(row) // 16
    if 2 * count < columns:
        peaks = row[: 16 * columns].reshape(16, columns).max(0)
        row = row[row >= np.partition(peaks, columns - count)[columns - count]]
    return float(np.partition(row, len(row) - count)[len(row) - count])


def _nucleus(weights: Row, mass: float) -> Ids:
    """Ascending indices of the smallest set of the largest that holds `mass` of the sum.

    At least one; the lower index first among equals. Sorts only what the set can hold.
    """
    wanted = mass * float(weights.sum())
    some = weights
    for least in (0.1, 1e-2, 1e-3, 1e-4):
        above = weights[weights >= least]
        if above.sum() > wanted:
            some = above
            break
    falling = np.sort(some)[::-1]
    last = min(int(np.searchsorted(np.cumsum(falling), wanted)), len(falling) - 1)
    return _first(weights, float(falling[last]), last + 1)
