"""Proposers that need no model: for tests, for measurements, and to show what the contract asks.

Three families. The simple ones know the four core verbs and answer one question, which tokens:
`NullProposer`, `RandomProposer`, `OracleProposer`, `AntiProposer`, `ScriptedProposer`,
`CyclingProposer`, `FixedLawProposer`. `ContextProposer` keeps pairs as a head would, serves every
concern but capture, and drafts what a wrong or missing pair would change; `SharedBuffersProposer`
is one that may be fed late only. The wrappers change one thing of another proposer:
`BlockProposer`, `CommProposer`, `DeferredProposer`, `PoisonProposer`.

`check_proposer` of `paceline.draft.checks`, which holds any proposer to the contract, is here too.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

import torch

from paceline.draft.checks import ContractReport, check_proposer
from paceline.draft.proposer import DraftBinding, DraftProposer, DraftRunner
from paceline.types import (
    ConfigError,
    Draft,
    DrafterKv,
    DraftRequest,
    PairKey,
    SpeculationStats,
)

__all__ = [
    "AntiProposer",
    "BlockProposer",
    "CommProposer",
    "ContextProposer",
    "ContextState",
    "ContractReport",
    "CyclingProposer",
    "DeferredProposer",
    "FixedLawProposer",
    "NullProposer",
    "OracleProposer",
    "PoisonError",
    "PoisonHow",
    "PoisonProposer",
    "RandomProposer",
    "ScriptedProposer",
    "SharedBuffersProposer",
    "SimpleState",
    "WrappingProposer",
    "check_proposer",
]

S = TypeVar("S")


@dataclass(slots=True)
class SimpleState:
    """State of the proposers here.

    Attributes:
        num_proposals: drafts that were not empty.
        num_drafted: tokens of the last draft whose verdict is out.
    """

    num_proposals: int = 0
    num_drafted: int = 0


class _SimpleProposer(DraftProposer[SimpleState]):
    """Draws up `propose` around one question: which tokens?"""

    @abstractmethod
    def guess(self, request: DraftRequest, state: SimpleState) -> list[int]:
        """Return at most `request.num_drafts` tokens; reads nothing but the request and state."""

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        """Return 0: no streams are read."""
        return 0

    def alloc_state(self) -> SimpleState:
        """Return counters at zero."""
        return SimpleState()

    def propose(self, request: DraftRequest, state: SimpleState) -> Draft:
        """Ask `guess`."""
        tokens = self.guess(request, state) if request.num_drafts > 0 else []
        state.num_drafted = len(tokens)
        if tokens:
            state.num_proposals += 1
        return Draft(tokens=tokens)

    def after_verify(self, num_accepted: int, state: SimpleState) -> None:
        """Check the count; there are no rows to forget."""
        _check_accepted(num_accepted, state.num_drafted)
        state.num_drafted = 0

    def free_state(self, state: SimpleState) -> None:
        """Do nothing: nothing is held."""


class NullProposer(_SimpleProposer):
    """Never drafts; every step is one token wide."""

    def guess(self, request: DraftRequest, state: SimpleState) -> list[int]:
        """Return no token."""
        return []


class RandomProposer(_SimpleProposer):
    """Drafts tokens drawn evenly from the vocabulary.

    The draw depends on the seed, the position and the last token only, so a sequence's drafts are
    the same in whatever batch it runs.
    """

    def __init__(self, *, seed: int, vocab_size: int) -> None:
        _require_positive("vocab_size", vocab_size)
        self._seed = seed
        self._vocab_size = vocab_size

    def guess(self, request: DraftRequest, state: SimpleState) -> list[int]:
        """Return `num_drafts` random tokens."""
        draw = random.Random(f"{self._seed} {request.position} {request.last_token}")
        return [draw.randrange(self._vocab_size) for _ in range(request.num_drafts)]


class OracleProposer(_SimpleProposer):
    """Always right, as long as a sequence follows one of the texts it was given.

    Args:
        texts: whole sequences of ids, prompt and continuation, as decoding without drafts gave
            them; where several begin with the history, the longest counts.
    """

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = sorted((list(text) for text in texts), key=len, reverse=True)

    def guess(self, request: DraftRequest, state: SimpleState) -> list[int]:
        """Return what follows the history in its text; nothing where no text begins with it."""
        history = request.history
        length = len(history)
        for text in self._texts:
            # The last id first: it refuses most other texts without comparing all of them.
            if length <= len(text) and text[length - 1] == history[-1] and text[:length] == history:
                return text[length : length + request.num_drafts]
        return []


class AntiProposer(OracleProposer):
    """Always wrong: the right tokens, each plus one modulo the vocabulary."""

    def __init__(self, texts: Sequence[Sequence[int]], *, vocab_size: int) -> None:
        if vocab_size < 2:
            raise ConfigError(f"vocab_size is {vocab_size}; allowed is at least 2")
        super().__init__(texts)
        self._vocab_size = vocab_size

    def guess(self, request: DraftRequest, state: SimpleState) -> list[int]:
        """Return the right tokens, spoiled."""
        return [(token + 1) % self._vocab_size for token in super().guess(request, state)]


class ScriptedProposer(OracleProposer):
    """Right for a scripted number of leading drafts, then wrong once, then right again.

    Args:
        texts: as for `OracleProposer`.
        accept_counts: leading drafts that shall be accepted in a sequence's first drafted step, its
            second, and so on, starting over at the end; counts beyond the drafts accept them all.
        vocab_size: to spoil a token within.
    """

    def __init__(
        self, texts: Sequence[Sequence[int]], *, accept_counts: Sequence[int], vocab_size: int
    ) -> None:
        if not accept_counts or min(accept_counts) < 0:
            raise ConfigError(
                f"accept_counts is {list(accept_counts)}; allowed are counts of at least 0, one or "
                "more"
            )
        if vocab_size < 2:
            raise ConfigError(f"vocab_size is {vocab_size}; allowed is at least 2")
        super().__init__(texts)
        self._accept_counts = list(accept_counts)
        self._vocab_size = vocab_size

    def guess(self, request: DraftRequest, state: SimpleState) -> list[int]:
        """Return the right tokens with one of them spoiled."""
        tokens = super().guess(request, state)
        right = self._accept_counts[state.num_proposals % len(self._accept_counts)]
        if right < len(tokens):
            tokens[right] = (tokens[right] + 1) % self._vocab_size
        return tokens


class CyclingProposer(ScriptedProposer):
    """Right for 0, 1, .., `num_drafts` leading drafts in turn, so that all counts are known before.

    Args:
        texts: as for `OracleProposer`.
        num_drafts: K, what the engine asks for.
        vocab_size: to spoil a token within.
    """

    def __init__(self, texts: Sequence[Sequence[int]], *, num_drafts: int, vocab_size: int) -> None:
        _require_positive("num_drafts", num_drafts)
        super().__init__(texts, accept_counts=range(num_drafts + 1), vocab_size=vocab_size)
        self._num_drafts = num_drafts

    def expected(self, num_steps: int) -> SpeculationStats:
        """Return the counts of one sequence's first `num_steps` decode steps, each K drafts wide.

        With q, r = divmod(num_steps, K + 1): accepted are q K (K + 1) / 2 + r (r - 1) / 2, at
        position j q (K - j) + max(0, r - 1 - j), and as many with K + 1 for K and r + 1 for r
        are the steps whose verdict reaches position j.
        """
        k = self._num_drafts
        whole, rest = divmod(num_steps, k + 1)
        accepted = whole * k * (k + 1) // 2 + rest * (rest - 1) // 2
        return SpeculationStats(
            num_steps=num_steps,
            num_draft_steps=num_steps,
            num_drafted=num_steps * k,
            num_accepted=accepted,
            num_emitted=num_steps + accepted,
            num_decode_steps=num_steps,
            drafted_at=[num_steps] * k,
            accepted_at=[whole * (k - j) + max(0, rest - 1 - j) for j in range(k)],
            reached_at=[whole * (k + 1 - j) + max(0, rest - j) for j in range(k)],
            drafted_by={type(self).__name__: num_steps * k},
            accepted_by={type(self).__name__: accepted},
        )


class FixedLawProposer(_SimpleProposer):
    """Draws every draft from one stated law q, and says its log-probability.

    Against a target whose law is p everywhere, speculative sampling accepts a draft with
    probability sum(min(p, q)), and what is emitted follows p whatever q is.

    A draw depends on the seed, the position and the last few tokens only, so it is the same in
    whatever batch; sequences that differ draw independently.

    Args:
        law: probability of each id; not negative, of sum 1 within 1e-6.
        seed: of the draws.

    Attributes:
        law: q as given.
    """

    def __init__(self, law: Sequence[float], *, seed: int) -> None:
        self.law = [float(p) for p in law]
        if not self.law or min(self.law) < 0 or abs(math.fsum(self.law) - 1) > 1e-6:
            raise ConfigError(
                f"law has {len(self.law)} entries of sum {math.fsum(self.law)}; allowed are "
                "probabilities of at least 0, one or more, of sum 1"
            )
        self._seed = seed
        self._cumulated = list(itertools.accumulate(self.law))

    def guess(self, request: DraftRequest, state: SimpleState) -> list[int]:
        """Return `num_drafts` draws."""
        draw = random.Random(f"{self._seed} {request.position} {request.history[-8:]}")
        return draw.choices(range(len(self.law)), cum_weights=self._cumulated, k=request.num_drafts)

    def propose(self, request: DraftRequest, state: SimpleState) -> Draft:
        """Draw, and add each draft's log-probability under the law."""
        draft = super().propose(request, state)
        return replace(draft, confidence=[math.log(self.law[t]) for t in draft.tokens])


@dataclass(slots=True, eq=False)
class ContextState:
    """State of `ContextProposer`.

    Attributes:
        pairs: pair key to a digest of the pair; keys without a gap.
        num_drafted: tokens of the last draft whose verdict is out.
        num_proposals: proposals so far.
    """

    pairs: dict[int, int] = field(default_factory=dict)
    num_drafted: int = 0
    num_proposals: int = 0


class ContextProposer(DraftProposer[ContextState]):
    """A drafter with a context, whose drafts are a digest of all pairs in its window.

    A pair that is missing, doubled, shifted, of another sequence or made from streams that were
    overwritten changes the next draft, where a trained head would only be wrong a little more
    often. Serves every concern but capture. The pairing is drawn in `paceline.draft.proposer`.

    Args:
        vocab_size: drafts are below it.
        window: pairs that a draft depends on.
        batch: widest batch taken; 1 declines batches.
    """

    def __init__(self, *, vocab_size: int, window: int = 128, batch: int = 8) -> None:
        for name, value in (("vocab_size", vocab_size), ("window", window), ("batch", batch)):
            _require_positive(name, value)
        self._vocab_size = vocab_size
        self._window = window
        self._batch = batch
        self._moved: dict[int, dict[int, int]] = {}
        self._next_block = 0

    @property
    def num_moved(self) -> int:
        """Sets of pairs that were taken and neither installed nor freed."""
        return len(self._moved)

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        """Return the window."""
        return min(max_seq_len, self._window)

    def alloc_state(self) -> ContextState:
        """Return a state without pairs."""
        return ContextState()

    def free_state(self, state: ContextState) -> None:
        """Forget the pairs; a second call does nothing."""
        state.pairs.clear()
        state.num_drafted = 0

    def propose(self, request: DraftRequest, state: ContextState) -> Draft:
        """Write the pair of the token sampled last, then draft from the digest of the window."""
        key = request.position - 1
        self._write(state, key, request.last_token, request.target_hidden)
        seen = [state.pairs[k] for k in sorted(state.pairs) if k > key - self._window]
        tokens, digest = [], zlib.crc32(repr(seen).encode())
        for _ in range(request.num_drafts):
            digest = zlib.crc32(repr(digest).encode())
            tokens.append(digest % self._vocab_size)
        state.num_drafted = len(tokens)
        state.num_proposals += 1
        return Draft(tokens=tokens)

    def after_verify(self, num_accepted: int, state: ContextState) -> None:
        """Check the count; no pair of a draft was kept.

        Raises:
            ValueError: more than the last propose drafted.
        """
        _check_accepted(num_accepted, state.num_drafted)
        state.num_drafted = 0

    def propose_batch(
        self, requests: Sequence[DraftRequest], states: Sequence[ContextState]
    ) -> list[Draft] | None:
        """Propose for each, or decline where `batch` is 1."""
        if self._batch == 1:
            return None
        return [self.propose(*each) for each in zip(requests, states, strict=True)]

    def propose_batch_max(self) -> int:
        """Return `batch`."""
        return self._batch

    def prefill_drafter(
        self,
        prompt_tokens: Sequence[int],
        hiddens: torch.Tensor,
        state: ContextState,
        *,
        first_position: int = 0,
    ) -> int:
        """Note the prompt's pairs."""
        stop = min(first_position + hiddens.shape[0], len(prompt_tokens) - 1)
        for key in range(first_position, stop):
            self._write(state, key, prompt_tokens[key + 1], hiddens[key - first_position])
        return max(0, stop - first_position)

    def catchup_drafter(
        self,
        tokens: Sequence[int],
        hiddens: torch.Tensor,
        row_base: int,
        pos_base: int,
        state: ContextState,
    ) -> int:
        """Note the pairs of a stretch.

        Raises:
            ValueError: `row_base` is not the append point.
        """
        if row_base != len(state.pairs):
            raise ValueError(f"row_base is {row_base}; the append point is {len(state.pairs)}")
        return self.catchup_batch([tokens], [hiddens], [pos_base], [state])

    def catchup_batch(
        self,
        tokens: Sequence[Sequence[int]],
        hiddens: Sequence[torch.Tensor],
        first_pos: Sequence[int],
        states: Sequence[ContextState],
    ) -> int:
        """Note the pairs of accepted drafts."""
        for some, streams, first, state in zip(tokens, hiddens, first_pos, states, strict=True):
            for j, (token, stream) in enumerate(zip(some, streams, strict=True)):
                self._write(state, first - 1 + j, token, stream)
        return sum(map(len, tokens))

    def drafter_rows(self, state: ContextState) -> int:
        """Return the pairs held."""
        return len(state.pairs)

    def last_pair_key(self, state: ContextState) -> PairKey | None:
        """Return the newest pair's key."""
        return PairKey(max(state.pairs)) if state.pairs else None

    def take_drafter_kv(self, state: ContextState) -> DrafterKv | None:
        """Move the pairs out; None where there are none."""
        if not state.pairs:
            return None
        pairs, state.pairs = state.pairs, {}
        return self._lent(pairs)

    def install_drafter_kv(self, kv: DrafterKv, state: ContextState) -> bool:
        """Move pairs in; refused by a state that has some and for pairs that are not the caller's.

        What is installed is no longer the caller's to free.
        """
        if state.pairs or kv.blocks[0] not in self._moved:
            return False
        state.pairs = dict(self._moved.pop(kv.blocks[0]))
        return True

    def free_drafter_kv(self, kv: DrafterKv) -> None:
        """Forget pairs; a second call does nothing."""
        self._moved.pop(kv.blocks[0], None)

    def snapshot_drafter_kv(self, state: ContextState, through_key: int) -> DrafterKv | None:
        """Copy the pairs of keys up to `through_key`; None where there are none."""
        pairs = {key: pair for key, pair in state.pairs.items() if key <= through_key}
        return self._lent(pairs) if pairs else None

    def share_drafter_kv(self, kv: DrafterKv) -> DrafterKv | None:
        """Make a second value of the same pairs; None where they are not the caller's."""
        pairs = self._moved.get(kv.blocks[0])
        return None if pairs is None else self._lent(pairs)

    def _lent(self, pairs: dict[int, int]) -> DrafterKv:
        block, self._next_block = self._next_block, self._next_block + 1
        self._moved[block] = pairs
        return DrafterKv(blocks=[block], rows=len(pairs), last_pair_key=max(pairs))

    def _write(self, state: ContextState, key: int, token: int, stream: torch.Tensor) -> None:
        if state.pairs and key - 1 not in state.pairs:
            state.pairs.clear()
        for later in [k for k in state.pairs if k >= key]:
            del state.pairs[later]
        data = stream.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()
        state.pairs[key] = zlib.crc32(data, token)


class SharedBuffersProposer(ContextProposer):
    """A `ContextProposer` whose prompt feed overwrites the target's step memory.

    So it must be fed just before a sequence's first propose and at no other time; it checks that,
    as far as it can see, and raises RuntimeError.

    Args:
        vocab_size, window, batch: as for `ContextProposer`.
        clock: returns the number of target forwards so far; one between the feed and its first use
            (a propose, or a stretch to catch up with) is refused. Without it only feeds after the
            first propose, and other calls between feed and use, are seen.
        overwrite: called at each feed; may spoil what the target shares with the drafter.

    Attributes:
        num_fed: feeds so far.
    """

    prefill_uses_shared_buffers = True

    def __init__(
        self,
        *,
        vocab_size: int,
        window: int = 128,
        batch: int = 8,
        clock: Callable[[], int] | None = None,
        overwrite: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(vocab_size=vocab_size, window=window, batch=batch)
        self.num_fed = 0
        self._clock = clock
        self._overwrite = overwrite
        self._fed_at: dict[int, int] = {}

    def prefill_drafter(
        self,
        prompt_tokens: Sequence[int],
        hiddens: torch.Tensor,
        state: ContextState,
        *,
        first_position: int = 0,
    ) -> int:
        """Note the pairs, and when."""
        if state.num_proposals:
            raise RuntimeError("the prompt was fed after the first propose")
        now = 0 if self._clock is None else self._clock()
        if self._fed_at.setdefault(id(state), now) != now:
            raise RuntimeError("the prompt was fed in pieces between target forwards")
        self.num_fed += 1
        written = super().prefill_drafter(
            prompt_tokens, hiddens, state, first_position=first_position
        )
        if self._overwrite is not None:
            self._overwrite()
        return written

    def propose(self, request: DraftRequest, state: ContextState) -> Draft:
        """Check that no forward came between."""
        self._used(state)
        return super().propose(request, state)

    def catchup_drafter(
        self,
        tokens: Sequence[int],
        hiddens: torch.Tensor,
        row_base: int,
        pos_base: int,
        state: ContextState,
    ) -> int:
        """Check that no forward came between: a stretch may follow the prompt at once."""
        self._used(state)
        return super().catchup_drafter(tokens, hiddens, row_base, pos_base, state)

    def after_verify(self, num_accepted: int, state: ContextState) -> None:
        """Check that no feed waits for its propose."""
        self._nothing_fed("after_verify")
        super().after_verify(num_accepted, state)

    def alloc_state(self) -> ContextState:
        """Check that no feed waits for its propose."""
        self._nothing_fed("alloc_state")
        return super().alloc_state()

    def free_state(self, state: ContextState) -> None:
        """Forget that it was fed."""
        self._fed_at.pop(id(state), None)
        super().free_state(state)

    def _used(self, state: ContextState) -> None:
        fed_at = self._fed_at.pop(id(state), None)
        if fed_at is not None and self._clock is not None and self._clock() != fed_at:
            raise RuntimeError("a target forward ran between the prompt's feed and its first use")

    def _nothing_fed(self, name: str) -> None:
        if self._fed_at:
            raise RuntimeError(f"{name} came between a prompt's feed and its first use")


class WrappingProposer(DraftProposer[S], Generic[S]):
    """Hands every call on to another proposer; to be changed in one place by a subclass.

    Args:
        inner: the other; states are its.
    """

    def __init__(self, inner: DraftProposer[S]) -> None:
        self.inner = inner
        self.block_gamma = inner.block_gamma
        self.needs_comm = inner.needs_comm
        self.prefill_uses_shared_buffers = inner.prefill_uses_shared_buffers

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        """Hand on."""
        return self.inner.prefill_hidden_rows(max_seq_len)

    def alloc_state(self) -> S:
        """Hand on."""
        return self.inner.alloc_state()

    def alloc_state_for(self, budget_tokens: int) -> S:
        """Hand on."""
        return self.inner.alloc_state_for(budget_tokens)

    def propose(self, request: DraftRequest, state: S) -> Draft:
        """Hand on."""
        return self.inner.propose(request, state)

    def after_verify(self, num_accepted: int, state: S) -> None:
        """Hand on."""
        self.inner.after_verify(num_accepted, state)

    def free_state(self, state: S) -> None:
        """Hand on."""
        self.inner.free_state(state)

    def last_confidence(self, state: S) -> float | None:
        """Hand on."""
        return self.inner.last_confidence(state)

    def propose_batch(
        self, requests: Sequence[DraftRequest], states: Sequence[S]
    ) -> list[Draft] | None:
        """Hand on."""
        return self.inner.propose_batch(requests, states)

    def propose_batch_max(self) -> int:
        """Hand on."""
        return self.inner.propose_batch_max()

    def prefill_drafter(
        self,
        prompt_tokens: Sequence[int],
        hiddens: torch.Tensor,
        state: S,
        *,
        first_position: int = 0,
    ) -> int:
        """Hand on."""
        return self.inner.prefill_drafter(
            prompt_tokens, hiddens, state, first_position=first_position
        )

    def catchup_drafter(
        self,
        tokens: Sequence[int],
        hiddens: torch.Tensor,
        row_base: int,
        pos_base: int,
        state: S,
    ) -> int:
        """Hand on."""
        return self.inner.catchup_drafter(tokens, hiddens, row_base, pos_base, state)

    def catchup_batch(
        self,
        tokens: Sequence[Sequence[int]],
        hiddens: Sequence[torch.Tensor],
        first_pos: Sequence[int],
        states: Sequence[S],
    ) -> int:
        """Hand on."""
        return self.inner.catchup_batch(tokens, hiddens, first_pos, states)

    def drafter_rows(self, state: S) -> int:
        """Hand on."""
        return self.inner.drafter_rows(state)

    def last_pair_key(self, state: S) -> PairKey | None:
        """Hand on."""
        return self.inner.last_pair_key(state)

    def take_drafter_kv(self, state: S) -> DrafterKv | None:
        """Hand on."""
        return self.inner.take_drafter_kv(state)

    def install_drafter_kv(self, kv: DrafterKv, state: S) -> bool:
        """Hand on."""
        return self.inner.install_drafter_kv(kv, state)

    def free_drafter_kv(self, kv: DrafterKv) -> None:
        """Hand on."""
        self.inner.free_drafter_kv(kv)

    def snapshot_drafter_kv(self, state: S, through_key: int) -> DrafterKv | None:
        """Hand on."""
        return self.inner.snapshot_drafter_kv(state, through_key)

    def share_drafter_kv(self, kv: DrafterKv) -> DrafterKv | None:
        """Hand on."""
        return self.inner.share_drafter_kv(kv)

    def circuit_draft(self) -> DraftBinding | None:
        """Hand on."""
        return self.inner.circuit_draft()

    def set_circuit_draft(self, runner: DraftRunner | None) -> None:
        """Hand on."""
        self.inner.set_circuit_draft(runner)

    def read_deferred_draft_token(self) -> int | None:
        """Hand on."""
        return self.inner.read_deferred_draft_token()


class BlockProposer(WrappingProposer[S]):
    """Drafts in blocks of a fixed width, the known token included.

    Args:
        inner: whose drafts fill the block.
        block_gamma: width, at least 2; an engine drafts one fewer.

    Attributes:
        asked: numbers of drafts asked for, in order.
    """

    def __init__(self, inner: DraftProposer[S], *, block_gamma: int) -> None:
        if block_gamma < 2:
            raise ConfigError(f"block_gamma is {block_gamma}; allowed is at least 2")
        super().__init__(inner)
        self.block_gamma = block_gamma
        self.asked: list[int] = []

    def propose(self, request: DraftRequest, state: S) -> Draft:
        """Hand on, and note the number wanted.

        Raises:
            ValueError: more than `block_gamma - 1` are wanted.
        """
        self._note((request,))
        return self.inner.propose(request, state)

    def propose_batch(
        self, requests: Sequence[DraftRequest], states: Sequence[S]
    ) -> list[Draft] | None:
        """Hand on, and note the numbers wanted where the batch was taken.

        Raises:
            ValueError: more than `block_gamma - 1` are wanted.
        """
        drafts = self.inner.propose_batch(requests, states)
        if drafts is not None:
            self._note(requests)
        return drafts

    def _note(self, requests: Sequence[DraftRequest]) -> None:
        assert self.block_gamma is not None
        for request in requests:
            if request.num_drafts >= self.block_gamma:
                raise ValueError(
                    f"{request.num_drafts} drafts are wanted; a block of {self.block_gamma} holds "
                    f"{self.block_gamma - 1}"
                )
            self.asked.append(request.num_drafts)


class CommProposer(WrappingProposer[S]):
    """Drafts with a collective in it, so that a rank which does not draft alike hangs or differs.

    Args:
        inner: whose drafts they are.
        collective: called once in each propose with (position, drafted ids) and meant to talk to
            the other ranks; what it returns is drafted.
    """

    def __init__(
        self, inner: DraftProposer[S], collective: Callable[[int, list[int]], list[int]]
    ) -> None:
        super().__init__(inner)
        self.needs_comm = True
        self._collective = collective

    def propose(self, request: DraftRequest, state: S) -> Draft:
        """Draft, and agree."""
        draft = self.inner.propose(request, state)
        return replace(draft, tokens=self._collective(request.position, draft.tokens))

    def propose_batch(
        self, requests: Sequence[DraftRequest], states: Sequence[S]
    ) -> list[Draft] | None:
        """Decline: a collective is for one sequence."""
        return None

    def propose_batch_max(self) -> int:
        """Return 1."""
        return 1


class DeferredProposer(WrappingProposer[S]):
    """Leaves its drafts on a device when it is told where the first one's embedding goes.

    Args:
        inner: whose drafts they are.
        embedding: [vocab, hidden], rows to write; its device is the drafts'.
        pad: fill up to the number wanted with -1, as a chain that ended early would.
    """

    def __init__(
        self, inner: DraftProposer[S], embedding: torch.Tensor, *, pad: bool = True
    ) -> None:
        super().__init__(inner)
        self._embedding = embedding
        self._pad = pad
        self._left: torch.Tensor | None = None

    def propose(self, request: DraftRequest, state: S) -> Draft:
        """Draft, and move the ids to the device where `draft_embed_target` is given."""
        return self._move(request, self.inner.propose(request, state))

    def propose_batch(
        self, requests: Sequence[DraftRequest], states: Sequence[S]
    ) -> list[Draft] | None:
        """The same for several."""
        drafts = self.inner.propose_batch(requests, states)
        if drafts is None:
            return None
        return [self._move(*each) for each in zip(requests, drafts, strict=True)]

    def read_deferred_draft_token(self) -> int | None:
        """Return the first id left, or None where the last propose left none."""
        return None if self._left is None else int(self._left[0])

    def _move(self, request: DraftRequest, draft: Draft) -> Draft:
        self._left = None
        if request.draft_embed_target is None or not draft.tokens:
            return draft
        missing = request.num_drafts - len(draft.tokens) if self._pad else 0
        device = self._embedding.device
        ids = torch.tensor([*draft.tokens, *[-1] * missing], dtype=torch.int64, device=device)
        request.draft_embed_target.copy_(self._embedding[ids[0]])
        self._left = ids
        return replace(draft, tokens=[], device_tokens=ids)


PoisonHow = Literal[
    "nan streams",
    "negative",
    "beyond",
    "float",
    "bool",
    "too many",
    "no draft",
    "no tokens",
    "short batch",
    "raises",
]
"""What `PoisonProposer` can do."""


class PoisonError(RuntimeError):
    """What a `PoisonProposer` raises; no error of the project's, as a user's would be none."""


class PoisonProposer(WrappingProposer[S]):
    """Breaks the contract in one way, now and then; an engine must lose nothing but drafts.

    * "nan streams": the other proposer gets streams of NaN;
    * "negative", "beyond", "float", "bool": the last draft is -1, `vocab_size`, 1.5, True;
    * "too many": more drafts than were wanted;
    * "no draft", "no tokens": None in place of a `Draft`, of its tokens;
    * "short batch": one draft too few from `propose_batch`;
    * "raises": the method `method` raises `PoisonError`.

    Args:
        inner: the proposer that is spoiled.
        how: what is done.
        vocab_size: what "beyond" drafts.
        method: what "raises" raises in.
        nth: the first call that is spoiled, from 1 (calls of `method`, else proposals).
        every: calls from one spoiled call to the next; None: there is only one.

    Attributes:
        num_poisoned: calls spoiled so far.
    """

    def __init__(
        self,
        inner: DraftProposer[S],
        how: PoisonHow,
        *,
        vocab_size: int,
        method: str = "propose",
        nth: int = 1,
        every: int | None = 1,
    ) -> None:
        _require_positive("nth", nth)
        if every is not None:
            _require_positive("every", every)
        known = [name for name in vars(WrappingProposer) if not name.startswith("_")]
        if method not in known:
            raise ConfigError(f"method is {method!r}; allowed are {', '.join(known)}")
        super().__init__(inner)
        self.num_poisoned = 0
        self._how = how
        self._vocab_size = vocab_size
        self._nth = nth
        self._every = every
        self._num_calls = 0
        if how == "raises":
            setattr(self, method, self._raising(method, getattr(inner, method)))

    def propose(self, request: DraftRequest, state: S) -> Draft:
        """Hand on, spoiled where it is due."""
        if self._how == "short batch" or not self._due():
            return self.inner.propose(request, state)
        if self._how == "nan streams":
            request = replace(request, target_hidden=request.target_hidden * float("nan"))
        return self._spoiled(self.inner.propose(request, state), request)

    def propose_batch(
        self, requests: Sequence[DraftRequest], states: Sequence[S]
    ) -> list[Draft] | None:
        """Hand on, the first sequence's part spoiled where it is due."""
        if self.inner.propose_batch_max() <= 1 or not requests or not self._due():
            return self.inner.propose_batch(requests, states)
        asked = list(requests)
        if self._how == "nan streams":
            asked[0] = replace(asked[0], target_hidden=asked[0].target_hidden * float("nan"))
        drafts = self.inner.propose_batch(asked, states)
        if drafts is None:
            return None
        if self._how == "short batch":
            return drafts[:-1]
        return [self._spoiled(drafts[0], asked[0]), *drafts[1:]]

    def _due(self) -> bool:
        if self._how == "raises":
            return False
        return self._count()

    def _count(self) -> bool:
        self._num_calls += 1
        beyond = self._num_calls - self._nth
        due = beyond == 0 if self._every is None else beyond >= 0 and beyond % self._every == 0
        self.num_poisoned += due
        return due

    def _raising(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def spoiled(*args: Any, **named: Any) -> Any:
            if self._count():
                raise PoisonError(f"{method} is poisoned")
            return call(*args, **named)

        spoiled.__name__ = method
        return spoiled

    def _spoiled(self, draft: Draft, request: DraftRequest) -> Draft:
        wrong: Any = {
            "negative": -1,
            "beyond": self._vocab_size,
            "float": 1.5,
            "bool": True,
        }.get(self._how)
        nothing: Any = None
        if wrong is not None:
            return replace(draft, tokens=[*draft.tokens[: request.num_drafts - 1], wrong])
        if self._how == "too many":
            return replace(draft, tokens=[*draft.tokens, *[0] * (request.num_drafts + 1)])
        if self._how == "no draft":
            return nothing  # type: ignore[no-any-return]
        return replace(draft, tokens=nothing) if self._how == "no tokens" else draft


def _check_accepted(num_accepted: int, num_drafted: int) -> None:
    if not 0 <= num_accepted <= num_drafted:
        raise ValueError(f"num_accepted is {num_accepted}; the last propose drafted {num_drafted}")


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}; allowed is at least 1")
