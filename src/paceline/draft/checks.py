"""One contract suite that any proposer is run through, the package's own or a user's.

It plays the engine: prompts in pieces, drafts, verdicts, catch-up, stretches without drafts,
batches and handover, over made-up texts and streams, and compares what a proposer drafts with what
the same proposer drafts where the contract says that nothing may differ. It needs no model and no
test framework. What it cannot see is whether drafts are good.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from paceline.draft import proposer as contract
from paceline.draft.proposer import DraftBinding, DraftProposer, DraftShape
from paceline.types import MAX_NUM_DRAFTS, Draft, DrafterKv, DraftRequest

__all__ = ["ContractReport", "check_proposer"]

_Proposer = DraftProposer[Any]


@dataclass(frozen=True, slots=True)
class ContractReport:
    """What was found.

    Attributes:
        proposer: the class's name.
        checked: clauses that hold.
        declined: clauses about what the proposer declines to do.
    """

    proposer: str
    checked: tuple[str, ...]
    declined: tuple[str, ...]

    def __str__(self) -> str:
        """One line for each list."""
        return (
            f"{self.proposer} keeps the contract: {', '.join(self.checked)}\n"
            f"{self.proposer} declines: {', '.join(self.declined) or 'nothing'}"
        )


def check_proposer(
    make: Callable[[], DraftProposer[Any]],
    *,
    vocab_size: int,
    streams_shape: tuple[int, int] = (4, 16),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    max_seq_len: int = 512,
    num_sequences: int = 8,
    texts: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
) -> ContractReport:
    """Hold a proposer to the contract of `paceline.draft.proposer`.

    Args:
        make: builds a fresh proposer; called often. Two of them must draft alike.
        vocab_size: ids are below it, in texts and in drafts; at least 2.
        streams_shape: (hc_mult, hidden) of the target's streams.
        dtype: of the streams.
        device: where they are.
        max_seq_len: most tokens of a sequence, at least 512.
        num_sequences: states the proposer has room for at once; 8 lets every batch width be tried.
        texts: what sequences say while drafts follow them, for drafters that know their texts;
            None: texts that repeat themselves, drawn from `seed`.
        seed: of all that is made up.

    Returns:
        The clauses that hold, and those about what the proposer declines to do.

    Raises:
        AssertionError: a clause is broken; names it and says what happened.
        ValueError: the arguments leave no room for the suite, or `make` makes no proposer.
    """
    if vocab_size < 2 or max_seq_len < _LONGEST or num_sequences < 2:
        raise ValueError(
            f"vocab_size is {vocab_size}, max_seq_len {max_seq_len}, num_sequences {num_sequences};"
            f" allowed is at least 2, {_LONGEST} and 2"
        )
    given: Any = make
    if isinstance(given, DraftProposer) or not callable(given):
        what = f"a {type(given).__name__}" if isinstance(given, DraftProposer) else repr(given)
        raise ValueError(
            f"make is {what}; allowed is what makes a fresh proposer when it is called without "
            "arguments, as its class does"
        )
    first: Any = make()
    if not isinstance(first, DraftProposer):
        raise ValueError(f"make() gave {first!r:.80}; allowed is what makes a DraftProposer")
    rig = _Rig(
        make,
        vocab_size,
        streams_shape,
        dtype,
        torch.device(device),
        max_seq_len,
        num_sequences,
        texts,
        seed,
    )
    name = type(first).__name__
    checked: list[str] = []
    declined: list[str] = []
    for clause, (check, _) in _CLAUSES.items():
        try:
            with torch.inference_mode():
                served = check(rig)
        except _Broken as error:
            raise AssertionError(_told(name, error.clause or clause, str(error))) from error
        except Exception as error:
            what = f"{_call_of(error)}raised {type(error).__name__}: {error}"
            raise AssertionError(_told(name, clause, what)) from error
        (checked if served else declined).append(clause)
    return ContractReport(name, tuple(checked), tuple(declined))


def _call_of(error: Exception) -> str:
    """Which method of the contract an error came from, as the beginning of a sentence, or ""."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        # The contract's own defaults call another method, which is the one to name.
        if code.co_name in _CALLS and code.co_filename not in (__file__, contract.__file__):
            return f"{code.co_name} "
        trace = trace.tb_next
    return ""


_CALLS = frozenset(name for name in dir(DraftProposer) if not name.startswith("_"))


class _Broken(AssertionError):
    """What does not hold, of the clause that is checked or of the one named."""

    def __init__(self, what: str, clause: str | None) -> None:
        super().__init__(what)
        self.clause = clause


def _told(name: str, clause: str, what: str) -> str:
    return f"{name} breaks clause {clause!r} ({_CLAUSES[clause][1]}): {what}"


_LONGEST = 512
"""Tokens that the longest play may take."""


class _Rig(NamedTuple):
    """The arguments of `check_proposer`."""

    make: Callable[[], _Proposer]
    vocab_size: int
    streams_shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    max_seq_len: int
    num_sequences: int
    texts: Sequence[Sequence[int]] | None
    seed: int

    def text(self, which: int) -> list[int]:
        """What sequence `which` says while nothing else was accepted."""
        if self.texts:
            return list(self.texts[which % len(self.texts)])
        draw = random.Random(f"text {self.seed} {which}")
        phrase = [draw.randrange(self.vocab_size) for _ in range(draw.randint(9, 23))]
        # Some tokens differ, so that a lookup is sometimes wrong.
        return [
            draw.randrange(self.vocab_size) if draw.random() < 0.05 else phrase[i % len(phrase)]
            for i in range(self.max_seq_len)
        ]

    def streams(self, which: int) -> torch.Tensor:
        """[max_seq_len, *streams_shape], what the target made of the sequence."""
        generator = torch.Generator().manual_seed(997 * self.seed + which)
        table = torch.randn(self.max_seq_len, *self.streams_shape, generator=generator)
        return table.to(dtype=self.dtype, device=self.device)

    def script(self, which: int, length: int, *, rests: bool = True) -> list[tuple[str, int, int]]:
        """Steps of (what, drafts wanted, drafts accepted at most)."""
        draw = random.Random(f"script {self.seed} {which}")
        kinds = ["draft"] * 6 + (["drop", "rest"] if rests else ["drop"])
        return [
            (draw.choice(kinds), draw.randint(1, MAX_NUM_DRAFTS), draw.randint(0, MAX_NUM_DRAFTS))
            for _ in range(length)
        ]


class _Play:
    """One sequence and the engine's side of the contract for it.

    Args:
        rig: sizes.
        proposer: who drafts.
        which: number of the sequence; says its text and streams.
        spoil: overwrite whatever was handed over as soon as the call returns.
        state: the proposer's state, where it is not a new one.
    """

    def __init__(
        self,
        rig: _Rig,
        proposer: _Proposer,
        which: int,
        *,
        spoil: bool = False,
        state: Any = None,
        fresh: bool = True,
    ) -> None:
        self.rig, self.proposer, self.which, self.spoil = rig, proposer, which, spoil
        self.text, self.streams = rig.text(which), rig.streams(which)
        self.tokens: list[int] = []
        self.state = proposer.alloc_state_for(rig.max_seq_len) if fresh else state
        self.waiting: list[Callable[[], None]] = []
        self.kept: tuple[Draft, tuple[Any, Any]] | None = None
        self.prompt_len = 0
        self.rows_fed = 0
        self.rows_caught = 0

    # Tokens

    def say(self) -> None:
        """Commit the target's own next token."""
        at = len(self.tokens)
        if self.text[:at] == self.tokens and at < len(self.text):
            self.tokens.append(self.text[at])
        else:
            draw = random.Random(f"{self.which} {at} {self.tokens[-1]}")
            self.tokens.append(draw.randrange(self.rig.vocab_size))

    # Prompt

    def prefill(self, length: int, chunks: Sequence[int] = (), *, whole: bool = False) -> None:
        """Feed a prompt of `length` tokens, in chunks, and say the token after it."""
        while len(self.tokens) < length:
            self.say()
        self.feed(chunks, whole=whole)
        self.say()

    def feed(self, chunks: Sequence[int] = (), *, whole: bool = False) -> None:
        """Feed all tokens so far as a prompt; its last streams only, unless `whole`."""
        length = self.prompt_len = len(self.tokens)
        wanted = length if whole else self.proposer.prefill_hidden_rows(self.rig.max_seq_len)
        start = 0
        for width in (*chunks, length):
            stop = min(start + width, length)
            first = max(start, length - wanted)
            if first < stop and first < length - 1:
                part = self.streams[first:stop].clone()
                if self.proposer.prefill_uses_shared_buffers:
                    self.waiting.append(partial(self.feed_part, part, first))
                else:
                    self.feed_part(part, first)
            start = max(start, stop)

    def feed_part(self, part: torch.Tensor, first: int) -> None:
        prompt = self.tokens[: self.prompt_len]
        written = self.guarded(
            lambda: self.proposer.prefill_drafter(prompt, part, self.state, first_position=first),
            part,
            prompt,
        )
        _require(
            _is_int(written) and 0 <= written <= part.shape[0],
            f"prefill_drafter returned {written!r} for {part.shape[0]} streams",
            "prefill",
        )
        self.rows_fed += written

    def feed_waiting(self) -> None:
        """Feed what was put off until just before the first propose."""
        waiting, self.waiting = self.waiting, []
        for feed in waiting:
            feed()

    # Drafts

    def request(self, num_drafts: int, *, target: torch.Tensor | None = None) -> DraftRequest:
        position = len(self.tokens) - 1
        gamma = self.proposer.block_gamma
        return DraftRequest(
            last_token=self.tokens[-1],
            position=position,
            target_hidden=self.streams[position - 1].clone(),
            num_drafts=num_drafts if gamma is None else min(num_drafts, gamma - 1),
            history=list(self.tokens),
            draft_embed_target=target,
        )

    def propose(self, num_drafts: int) -> Draft:
        """Ask, and check all that a draft must be."""
        self.feed_waiting()
        request = self.request(num_drafts)
        draft = self.guarded(
            lambda: self.proposer.propose(request, self.state), request.target_hidden
        )
        return self.checked(request, draft)

    def checked(self, request: DraftRequest, draft: Draft) -> Draft:
        _require(request.history == self.tokens, "the request's history was changed", "memory")
        _check_draft(draft, request.num_drafts, self.rig.vocab_size)
        sure = self.proposer.last_confidence(self.state)
        _require(
            sure is None or (isinstance(sure, float) and 0 <= sure <= 1 + 1e-6),
            f"last_confidence returned {sure!r}; allowed are None and 0 to 1",
        )
        # The caller owns what it was given and may change it.
        copied = Draft(
            tokens=_ids(draft),
            confidence=None if draft.confidence is None else list(draft.confidence),
        )
        self.kept = None
        if self.spoil:
            draft.tokens.clear()
        else:
            self.kept = (draft, _content(draft))
        return copied

    def settle(self, draft: Draft, accept: int) -> None:
        """Hand over the verdict, commit, and catch up."""
        taken = self.verdict(draft, accept)
        if taken:
            self.catch_up(taken)

    def verdict(self, draft: Draft, accept: int) -> list[int]:
        accept = min(accept, len(draft.tokens))
        if draft.tokens:
            self.tell(accept, len(draft.tokens))
        taken = draft.tokens[:accept]
        self.tokens += taken
        self.say()
        return taken

    def tell(self, accepted: int, drafted: int) -> None:
        """Hand over the verdict on a draft of so many tokens."""
        try:
            self.proposer.after_verify(accepted, self.state)
        except ValueError as error:
            changed = " after the caller changed the list that propose returned"
            raise _Broken(
                f"after_verify({accepted}) refused {accepted} accepted of {drafted} drafts"
                f"{changed if self.spoil else ''}: ValueError: {error}",
                "memory" if self.spoil else None,
            ) from error
        if self.kept is not None:
            kept, due = self.kept
            self.kept = None
            _require(
                _content(kept) == due,
                f"after_verify changed the draft that propose had returned, from {due[0]} to "
                f"{kept.tokens}; what is returned is the caller's",
                "memory",
            )

    def catch_up(self, taken: list[int]) -> None:
        """Hand over the target's streams of accepted drafts."""
        first = len(self.tokens) - 1 - len(taken)
        part, tokens = self.streams[first - 1 : first - 1 + len(taken)].clone(), list(taken)
        before = self.proposer.drafter_rows(self.state)
        written = self.guarded(
            lambda: self.proposer.catchup_batch([tokens], [part], [first], [self.state]),
            part,
            tokens,
        )
        self.note_caught(written, before, first, taken)

    def note_caught(self, written: Any, before: int, first: int, taken: list[int]) -> None:
        _require(
            _is_int(written) and 0 <= written <= len(taken),
            f"catchup_batch returned {written!r} for {len(taken)} tokens",
            "catch-up",
        )
        if not written:
            after = self.proposer.drafter_rows(self.state)
            _require(
                after == before, "catchup_batch returned 0 but changed the rows held", "catch-up"
            )
            part = self.streams[first - 1 : first - 1 + len(taken)]
            written = self.append(list(taken), part.clone(), first)
        self.rows_caught += written

    def append(self, tokens: list[int], part: torch.Tensor, first: int) -> int:
        """Hand over a stretch that was decoded without drafts."""
        count = len(tokens)
        rows = self.proposer.drafter_rows(self.state)
        _require(_is_int(rows) and rows >= 0, f"drafter_rows returned {rows!r}")
        written = self.guarded(
            lambda: self.proposer.catchup_drafter(tokens, part, rows, first, self.state),
            part,
            tokens,
        )
        _require(
            _is_int(written) and 0 <= written <= count,
            f"catchup_drafter returned {written!r} for {count} tokens",
            "catch-up",
        )
        return int(written)

    def rest(self, count: int) -> None:
        """Decode so many tokens without drafts, then hand the pairs over."""
        first = len(self.tokens) - 1
        for _ in range(count):
            self.say()
        # The pair of the token said last is the next propose's own.
        tokens = self.tokens[first:-1]
        part = self.streams[first - 1 : first - 1 + len(tokens)].clone()
        if self.waiting:
            self.waiting.append(partial(self.append_rest, tokens, part, first))
        else:
            self.append_rest(tokens, part, first)

    def append_rest(self, tokens: list[int], part: torch.Tensor, first: int) -> None:
        self.rows_caught += self.append(tokens, part, first)

    def step(self, what: str, num_drafts: int, accept: int) -> Draft | None:
        """Play one step of a script; the draft where there was one."""
        if what == "rest":
            self.rest(num_drafts)
            return None
        draft = self.propose(num_drafts)
        if what == "drop":
            if draft.tokens:
                self.tell(0, len(draft.tokens))
            return draft
        self.settle(draft, accept)
        return draft

    def play(self, script: Sequence[tuple[str, int, int]]) -> list[Draft | None]:
        return [self.step(*each) for each in script]

    def free(self) -> None:
        self.proposer.free_state(self.state)

    def guarded(
        self, call: Callable[[], Any], tensor: torch.Tensor, tokens: list[int] | None = None
    ) -> Any:
        """Call; what was handed over must come back unchanged, and is dead then."""
        before, said = tensor.clone(), None if tokens is None else list(tokens)
        result = call()
        same = torch.equal(tensor.nan_to_num(), before.nan_to_num())
        _require(same, "the caller's streams were changed", "memory")
        _require(tokens == said, "the caller's tokens were changed", "memory")
        if self.spoil:
            tensor.fill_(float("nan"))
            if tokens is not None:
                tokens.clear()
        return result


# Clauses: each returns whether the proposer serves what it is about


def _facts(rig: _Rig) -> bool:
    proposer = rig.make()
    before = _facts_of(proposer, rig)
    gamma, needs_comm, shared, rows, width = before
    _require(
        gamma is None or (_is_int(gamma) and gamma >= 2),
        f"block_gamma is {gamma!r}; allowed are None and an int of at least 2",
    )
    for name, fact in (("needs_comm", needs_comm), ("prefill_uses_shared_buffers", shared)):
        _require(isinstance(fact, bool), f"{name} is {fact!r}; allowed are True and False")
    for most, few in rows.items():
        _require(
            _is_int(few) and 0 <= few <= most,
            f"prefill_hidden_rows({most}) is {few!r}; allowed is 0 to {most}",
        )
    _require(
        _is_int(width) and width >= 1,
        f"propose_batch_max() is {width!r}; allowed is at least 1",
    )
    other = _facts_of(rig.make(), rig)
    _require(other == before, f"two proposers differ: {before} and {other}")
    return True


def _constancy(rig: _Rig) -> bool:
    proposer = rig.make()
    before = _facts_of(proposer, rig)
    play = _Play(rig, proposer, 0)
    play.prefill(12)
    play.play(rig.script(0, 6))
    after = _facts_of(proposer, rig)
    _require(after == before, f"facts changed from {before} to {after}")
    return True


def _facts_of(proposer: _Proposer, rig: _Rig) -> tuple[Any, Any, Any, dict[int, Any], Any]:
    return (
        proposer.block_gamma,
        proposer.needs_comm,
        proposer.prefill_uses_shared_buffers,
        {n: proposer.prefill_hidden_rows(n) for n in (1, 7, rig.max_seq_len)},
        proposer.propose_batch_max(),
    )


def _budgets(rig: _Rig) -> bool:
    expected = None
    for budget in (None, rig.max_seq_len, 2**62):
        proposer = rig.make()
        state = proposer.alloc_state() if budget is None else proposer.alloc_state_for(budget)
        play = _Play(rig, proposer, 1, state=state, fresh=False)
        play.prefill(30, (7, 9))
        drafts = play.play(rig.script(1, 8))
        expected = drafts if expected is None else expected
        _require_same(drafts, expected, f"with a budget of {budget}")
        play.free()
    return True


def _drafts(rig: _Rig) -> bool:
    proposer = rig.make()
    for which, length in enumerate((1, 2, 30)):
        play = _Play(rig, proposer, which)
        play.prefill(length)
        for num_drafts in range(1, MAX_NUM_DRAFTS + 1):
            play.settle(play.propose(num_drafts), num_drafts // 2)
        play.free()
    return True


def _verdicts(rig: _Rig) -> bool:
    proposer = rig.make()
    play = _Play(rig, proposer, 2)
    play.prefill(40)
    for num_drafts in range(1, MAX_NUM_DRAFTS + 1):
        for accept in range(num_drafts + 1):
            draft = play.propose(num_drafts)
            drafted = len(draft.tokens)
            told = f"after_verify({drafted + 1}) after {drafted} drafts"
            _require_refused(partial(proposer.after_verify, drafted + 1, play.state), told)
            play.settle(draft, accept)
            told = "after_verify(1) with no draft open"
            _require_refused(lambda: proposer.after_verify(1, play.state), told)
    return True


def _freeing(rig: _Rig) -> bool:
    proposer = rig.make()
    for turn in range(3):
        plays = [_Play(rig, proposer, turn + i) for i in range(rig.num_sequences)]
        for i, play in enumerate(plays):
            play.prefill(5 + 6 * i)
            play.play(rig.script(turn + i, 3))
            if i % 2:
                play.propose(3)  # a request may be aborted before its verdict
        for play in plays:
            play.free()
            play.free()
    _like_fresh(rig, proposer, "after all states were freed twice")
    return True


def _like_fresh(rig: _Rig, proposer: _Proposer, when: str) -> None:
    """All states there is room for are free, and draft as those of a fresh proposer."""
    results = []
    for one in (proposer, rig.make()):
        plays = [_Play(rig, one, 40 + i) for i in range(rig.num_sequences)]
        for play in plays:
            told = (one.drafter_rows(play.state), one.last_pair_key(play.state))
            _require(told == (0, None), f"a new state tells of {told} {when}")
        results.append(_interleaved(rig, plays))
        for play in plays:
            play.free()
    _require_same(results[0], results[1], f"{when}, against a fresh proposer")


def _interleaved(rig: _Rig, plays: Sequence[_Play], length: int = 6) -> list[Any]:
    for i, play in enumerate(plays):
        play.prefill(3 + 11 * i % 60)
    scripts = [rig.script(play.which, length) for play in plays]
    return [
        [play.step(*script[at]) for play, script in zip(plays, scripts, strict=True)]
        for at in range(length)
    ]


def _interleaving(rig: _Rig) -> bool:
    proposer = rig.make()
    plays = [_Play(rig, proposer, i) for i in range(min(4, rig.num_sequences))]
    together = _interleaved(rig, plays, 12)
    for i in range(len(plays)):
        play = _Play(rig, rig.make(), i)
        play.prefill(3 + 11 * i % 60)
        alone = play.play(rig.script(i, 12))
        _require_same([step[i] for step in together], alone, f"sequence {i} beside others")
    return True


def _repeating(rig: _Rig) -> bool:
    results = []
    for _ in range(2):
        play = _Play(rig, rig.make(), 3)
        play.prefill(45, (20,))
        results.append(play.play(rig.script(3, 20)))
    _require_same(results[1], results[0], "from two proposers made alike")
    return True


def _memory(rig: _Rig) -> bool:
    results = []
    for spoil in (False, True):
        proposer = rig.make()
        play = _Play(rig, proposer, 4, spoil=spoil)
        play.prefill(45, (20,))
        results.append(play.play(rig.script(4, 25)))
    _require_same(results[1], results[0], "once the caller's memory was overwritten")
    return True


def _not_finite(rig: _Rig) -> bool:
    alone = _Play(rig, rig.make(), 6)
    alone.prefill(20)
    expected = alone.play(rig.script(6, 6))
    proposer = rig.make()
    spoiled, other = _Play(rig, proposer, 5), _Play(rig, proposer, 6)
    spoiled.prefill(20)
    other.prefill(20)
    spoiled.streams[len(spoiled.tokens) - 2] = float("nan")
    beside = []
    for each in rig.script(6, 6):
        spoiled.settle(spoiled.propose(4), 0)
        beside.append(other.step(*each))
    _require_same(beside, expected, "beside a sequence with a NaN in its streams")
    spoiled.free()
    other.free()
    _like_fresh(rig, proposer, "after a sequence with a NaN in its streams")
    return True


def _batch(rig: _Rig) -> bool:
    widest = min(rig.make().propose_batch_max(), rig.num_sequences, 8)
    served = False
    for size in range(1, widest + 1) if widest > 1 else (2,):
        proposer = rig.make()
        plays = [_Play(rig, proposer, i) for i in range(size)]
        singles = [_Play(rig, rig.make(), i) for i in range(size)]
        for i in range(size):
            plays[i].prefill(1 + 17 * i)
            singles[i].prefill(1 + 17 * i)
        scripts = [rig.script(i, 6, rests=False) for i in range(size)]
        for at in range(6):
            steps = [script[at] for script in scripts]
            for play in plays:
                play.feed_waiting()
            requests = [p.request(k) for p, (_, k, _) in zip(plays, steps, strict=True)]
            answers = proposer.propose_batch(requests, [play.state for play in plays])
            if answers is None:
                drafts = [p.propose(k) for p, (_, k, _) in zip(plays, steps, strict=True)]
                told = "proposed one by one after a declined batch"
            else:
                _require(widest > 1, "propose_batch drafts, but propose_batch_max() is 1")
                _require(
                    isinstance(answers, list) and len(answers) == size,
                    f"propose_batch returned {answers!r:.80} for {size} requests",
                )
                served = True
                drafts = [
                    p.checked(request, answer)
                    for p, request, answer in zip(plays, requests, answers, strict=True)
                ]
                told = f"in a batch of {size}"
            alone = [s.propose(k) for s, (_, k, _) in zip(singles, steps, strict=True)]
            _require_same(drafts, alone, f"{told}, against propose")
            _settle_together(proposer, plays, drafts, [accept for _, _, accept in steps])
            for single, draft, (_, _, accept) in zip(singles, alone, steps, strict=True):
                single.settle(draft, accept)
    return served


def _settle_together(
    proposer: _Proposer, plays: Sequence[_Play], drafts: Sequence[Draft], accepts: Sequence[int]
) -> None:
    """Verdicts one by one, then one catch-up for all."""
    taken = [p.verdict(d, a) for p, d, a in zip(plays, drafts, accepts, strict=True)]
    some = [(p, t) for p, t in zip(plays, taken, strict=True) if t]
    if not some:
        return
    firsts = [len(p.tokens) - 1 - len(t) for p, t in some]
    parts = [
        p.streams[f - 1 : f - 1 + len(t)].clone() for (p, t), f in zip(some, firsts, strict=True)
    ]
    before = [proposer.drafter_rows(p.state) for p, _ in some]
    written = proposer.catchup_batch(
        [list(t) for _, t in some], parts, firsts, [p.state for p, _ in some]
    )
    _require(_is_int(written) and written >= 0, f"catchup_batch returned {written!r}")
    if not written:
        for (play, tokens), rows, first in zip(some, before, firsts, strict=True):
            play.note_caught(0, rows, first, tokens)


def _prefill(rig: _Rig) -> bool:
    served = False
    ways: list[tuple[tuple[int, ...], bool]] = [
        ((), False),
        ((), True),
        ((7,) * 30, True),
        ((1, 1, 64), False),
        ((1,) * 200, False),
    ]
    for length in (1, 2, 40, 140):
        expected = None
        for chunks, whole in ways:
            proposer = rig.make()
            play = _Play(rig, proposer, 7)
            play.prefill(length, chunks, whole=whole)
            play.feed_waiting()
            served = served or play.rows_fed > 0
            if play.rows_fed:
                _require_newest(proposer, play, length - 2, f"after a prompt of {length} tokens")
            drafts = play.play([("drop", 3, 0)])
            if play.rows_fed:
                _require_newest(proposer, play, length - 1, "after a draft that was dropped")
            drafts += play.play(rig.script(7, 4))
            expected = drafts if expected is None else expected
            how = f"after a prompt of {length} tokens in pieces of {chunks[:4]}"
            _require_same(drafts, expected, f"{how}, against the same in one piece")
    return served


def _require_newest(proposer: _Proposer, play: _Play, key: int, when: str) -> None:
    newest = proposer.last_pair_key(play.state)
    _require(newest in (None, key), f"last_pair_key is {newest} {when}; due is {key}")
    rows = proposer.drafter_rows(play.state)
    _require(_is_int(rows) and rows >= 0, f"drafter_rows returned {rows!r}")
    _require(newest is None or rows > 0, f"last_pair_key is {newest} with {rows} rows held {when}")


def _catch_up(rig: _Rig) -> bool:
    proposer = rig.make()
    _require(proposer.catchup_batch([], [], [], []) == 0, "an empty catchup_batch is not 0")
    probe = _Play(rig, proposer, 8)
    probe.prefill(20)
    probe.rest(5)
    probe.feed_waiting()
    if not probe.rows_caught:
        _require(
            proposer.drafter_rows(probe.state) in (0, probe.rows_fed),
            "catchup_drafter returned 0 but changed the rows held",
        )
        return False
    _require_newest(proposer, probe, len(probe.tokens) - 3, "after catchup_drafter")
    rows = proposer.drafter_rows(probe.state)
    told = f"catchup_drafter with row_base {rows + 1} where {rows} rows are held"
    part = probe.streams[:1].clone()
    _require_refused(
        lambda: proposer.catchup_drafter([0], part, rows + 1, len(probe.tokens), probe.state), told
    )
    probe.free()
    for which, length in ((9, 1), (10, 150)):
        play = _Play(rig, proposer, which)
        play.prefill(length)
        script = rig.script(which, 14)
        script[8:8] = [("rest", 135, 0), ("draft", 4, 4), ("draft", 3, 3)]
        anew = rig.make()
        for what, num_drafts, accept in script:
            if what != "rest":
                fresh = _fresh(rig, anew, play)
                expected = fresh.propose(num_drafts)
                fresh.free()
            draft = play.step(what, num_drafts, accept)
            if draft is not None:
                when = f"at position {len(play.tokens) - 1}"
                _require_same(draft, expected, f"{when} after catching up, against a fresh prefill")
        play.free()
    return True


def _fresh(rig: _Rig, proposer: _Proposer, play: _Play) -> _Play:
    """The same committed tokens, given to a fresh state as a prompt."""
    fresh = _Play(rig, proposer, play.which)
    fresh.tokens = play.tokens[:-1]
    fresh.feed()
    fresh.tokens = list(play.tokens)
    fresh.feed_waiting()
    if not fresh.rows_fed and len(fresh.tokens) > 2:
        # One that reads no prompts but catches up: all is a stretch to catch up with.
        count = len(fresh.tokens) - 2
        fresh.append(fresh.tokens[1:-1], fresh.streams[:count].clone(), 1)
    return fresh


def _handover(rig: _Rig) -> bool:
    proposer, twin = rig.make(), _Play(rig, rig.make(), 11)
    play = _Play(rig, proposer, 11)
    empty = proposer.take_drafter_kv(play.state)
    _require(empty is None or empty.rows == 0, f"a fresh state handed over {empty!r}")
    before = rig.script(11, 5)
    for each in (play, twin):
        each.prefill(40)
        each.play(before)
    rows, newest = proposer.drafter_rows(play.state), proposer.last_pair_key(play.state)
    kv = proposer.take_drafter_kv(play.state)
    after = rig.script(12, 6)
    if kv is None:
        _require_same(play.play(after), twin.play(after), "after take_drafter_kv declined")
        return False
    _require(
        isinstance(kv, DrafterKv) and 0 < kv.rows <= rows and kv.last_pair_key == newest,
        f"take_drafter_kv gave {kv!r}; due are at most {rows} rows up to key {newest}",
    )
    left = (proposer.drafter_rows(play.state), proposer.last_pair_key(play.state))
    _require(left == (0, None), f"a state still tells of {left} after its rows were taken")
    play.free()
    busy, busy_twin = _Play(rig, proposer, 13), _Play(rig, rig.make(), 13)
    for each in (busy, busy_twin):
        each.prefill(10)
        each.play(before)
    _require(
        proposer.install_drafter_kv(kv, busy.state) is False,
        "install_drafter_kv did not refuse a state that holds rows",
    )
    _require_same(busy.play(after), busy_twin.play(after), "after a refused install_drafter_kv")
    busy.free()
    play.state = proposer.alloc_state_for(rig.max_seq_len)
    _require(
        proposer.install_drafter_kv(kv, play.state) is True,
        "install_drafter_kv refused an empty state",
    )
    second = proposer.alloc_state_for(rig.max_seq_len)
    _require_not_taken(proposer, kv, second, "rows that a state already owns")
    proposer.free_state(second)
    back = (proposer.drafter_rows(play.state), proposer.last_pair_key(play.state))
    _require(back == (kv.rows, newest), f"a state tells of {back} after {kv!r} was installed")
    _require_same(play.play(after), twin.play(after), "after rows were moved to a new state")
    play.free()
    for turn in range(3 * rig.num_sequences):
        passing = _Play(rig, proposer, turn)
        passing.prefill(9)
        passing.settle(passing.propose(2), 1)
        kv = proposer.take_drafter_kv(passing.state)
        _require(kv is not None, "take_drafter_kv declined where it did not before")
        assert kv is not None
        passing.free()
        proposer.free_drafter_kv(kv)
        proposer.free_drafter_kv(kv)
        again = proposer.alloc_state_for(rig.max_seq_len)
        _require_not_taken(proposer, kv, again, "rows that were freed")
        proposer.free_state(again)
    _like_fresh(rig, proposer, "after rows were taken and freed")
    return True


def _require_not_taken(proposer: _Proposer, kv: DrafterKv, state: Any, what: str) -> None:
    try:
        taken = proposer.install_drafter_kv(kv, state)
    except ValueError:
        return
    _require(taken is False, f"install_drafter_kv took {what}")


def _sharing(rig: _Rig) -> bool:
    proposer, twin = rig.make(), _Play(rig, rig.make(), 17)
    play = _Play(rig, proposer, 17)
    before, after = rig.script(17, 5), rig.script(18, 6)
    for each in (play, twin):
        each.prefill(40)
        each.play(before)
    tokens, newest = list(play.tokens), proposer.last_pair_key(play.state)
    through = 0 if newest is None else newest - 4
    kv = proposer.snapshot_drafter_kv(play.state, through)
    expected = twin.play(after)
    _require_same(play.play(after), expected, "after snapshot_drafter_kv")
    if kv is None:
        return False
    _require(
        kv.rows > 0 and kv.last_pair_key == through,
        f"snapshot_drafter_kv through key {through} gave {kv!r}",
    )
    play.free()
    owned = [kv]
    second = proposer.share_drafter_kv(kv)
    if second is not None:
        _require(
            (second.rows, second.last_pair_key) == (kv.rows, through),
            f"share_drafter_kv of {kv!r} gave {second!r}",
        )
        # In turn, so that rows that were not copied would have been written to.
        owned.append(second)
    for which in owned:
        later = _Play(rig, proposer, 17)
        later.tokens = list(tokens)
        _require(
            proposer.install_drafter_kv(which, later.state) is True,
            "install_drafter_kv refused an empty state a snapshot",
        )
        first = through + 2
        missing = tokens[first:-1]
        later.append(list(missing), later.streams[first - 1 : len(tokens) - 2].clone(), first)
        _require_same(later.play(after), expected, "from a snapshot and catch-up")
        later.free()
    _like_fresh(rig, proposer, "after a snapshot was shared")
    return True


def _blocks(rig: _Rig) -> bool:
    proposer = rig.make()
    gamma = proposer.block_gamma
    if gamma is None:
        return False
    play, twin = _Play(rig, proposer, 14), _Play(rig, rig.make(), 14)
    play.prefill(20)
    twin.prefill(20)
    for accept in range(gamma):
        block = play.propose(gamma - 1)
        some = twin.propose(1 + accept % (gamma - 1))
        begins = block.tokens[: len(some.tokens)]
        _require(some.tokens == begins, f"{some.tokens} drafted of a block of {block.tokens}")
        play.settle(block, min(accept, len(some.tokens)))
        twin.settle(some, accept)
    return True


def _deferral(rig: _Rig) -> bool:
    proposer, twin = rig.make(), _Play(rig, rig.make(), 15)
    play = _Play(rig, proposer, 15)
    play.prefill(20)
    twin.prefill(20)
    served = False
    for turn in range(6):
        target = torch.full((rig.streams_shape[1],), -77.0, dtype=rig.dtype, device=rig.device)
        play.feed_waiting()
        request = play.request(3, target=target)
        draft = proposer.propose(request, play.state)
        _check_draft(draft, request.num_drafts, rig.vocab_size)
        tokens = _ids(draft)
        read = proposer.read_deferred_draft_token()
        if draft.device_tokens is None or not tokens:
            _require(read is None, f"read_deferred_draft_token is {read!r}, but no id was left")
        else:
            served = True
            _require(_is_int(read), f"read_deferred_draft_token is {read!r}; an id is due")
            _require(read == tokens[0], f"the id left is {tokens[0]}, the one read {read}")
            _require(bool((target != -77.0).any()), "draft_embed_target was not written")
        copied = Draft(tokens=tokens)
        expected = twin.propose(3)
        _require(tokens == expected.tokens, f"{tokens} with and {expected.tokens} without a target")
        for each in (play, twin):
            each.settle(copied, turn % 4)
    return served


class _Stepping:
    """A runner that does what the binding says, for every shape it names or for none."""

    def __init__(self, binding: DraftBinding, *, serving: bool) -> None:
        self.binding = binding
        self.serving = serving
        self.num_runs = 0

    def serves(self, shape: DraftShape) -> bool:
        return self.serving and shape in self.binding.shapes

    def run_draft(self, shape: DraftShape) -> None:
        self.num_runs += 1
        self.binding.run(shape)


def _circuit(rig: _Rig) -> bool:
    proposer = rig.make()
    proposer.set_circuit_draft(None)
    binding = proposer.circuit_draft()
    if binding is None:
        return False
    widths = binding.widths
    _require(
        len(widths) > 0 and widths[0] >= 1,
        f"widths are {widths}; allowed are numbers of at least 1, one or more",
    )
    for name in ("tokens", "log_probs"):
        buffer = binding.outputs.get(name)
        _require(
            buffer is not None and buffer.shape[0] >= widths[-1],
            f"output {name!r} has no room for {widths[-1]} sequences",
        )
    due: list[Draft | None] = []
    runner: _Stepping | None = None
    for how in ("without a runner", "with one that serves nothing", "with a runner", "without it"):
        ran = 0 if runner is None else runner.num_runs
        if how.startswith("with "):
            runner, ran = _Stepping(binding, serving=how == "with a runner"), 0
        proposer.set_circuit_draft(runner if how.startswith("with ") else None)
        play = _Play(rig, proposer, 16)
        play.prefill(30)
        drafts = play.play(rig.script(16, 8))
        play.free()
        due = due or drafts
        _require_same(drafts, due, f"{how}, against none")
        runs = 0 if runner is None else runner.num_runs - ran
        _require(bool(runs) == (how == "with a runner"), f"{runs} runs {how} in place")
    return True


_CLAUSES: dict[str, tuple[Callable[[_Rig], bool], str]] = {
    "facts": (_facts, "facts are of their type, in range, and alike"),
    "drafts": (_drafts, "1 to num_drafts ids of the vocabulary, or none"),
    "verdicts": (_verdicts, "after_verify takes every count up to the drafts and refuses more"),
    "repeating": (_repeating, "equal calls give equal drafts"),
    "memory": (_memory, "nothing of the caller's is changed, or read after a call"),
    "constancy": (_constancy, "facts do not change with use"),
    "interleaving": (_interleaving, "a sequence drafts the same beside others"),
    "budgets": (_budgets, "alloc_state_for takes any budget and drafts the same"),
    "freeing": (_freeing, "free_state twice is harmless, and a state used again is as new"),
    "not finite": (_not_finite, "a NaN ends a chain, raises nothing and touches nobody else"),
    "batch": (_batch, "propose_batch drafts as propose does, or declines and touches nothing"),
    "prefill": (_prefill, "a prompt in pieces is the same prompt"),
    "catch-up": (_catch_up, "a drafter that caught up drafts as one that reads all anew"),
    "handover": (_handover, "rows have one owner, move whole, and come back when freed"),
    "sharing": (
        _sharing,
        "a copy of rows is whole, shared rows do not change, and the owner goes on",
    ),
    "blocks": (_blocks, "a draft is the beginning of a block of block_gamma - 1"),
    "deferral": (_deferral, "ids left on the device are those that would have been returned"),
    "circuit": (_circuit, "a runner in place of the step changes no draft"),
}


def _require(holds: bool, what: str, clause: str | None = None) -> None:
    if not holds:
        raise _Broken(what, clause)


def _require_refused(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except ValueError:
        return
    raise _Broken(f"{what} was not refused with ValueError", None)


def _require_same(given: Any, due: Any, when: str) -> None:
    if isinstance(due, list):
        for one, other in zip(given, due, strict=True):
            _require_same(one, other, when)
        return
    if given is None or due is None:
        _require(given is due, f"{given} in place of {due} {when}")
        return
    _require(given.tokens == due.tokens, f"drafted {given.tokens} in place of {due.tokens} {when}")
    sure = [d.confidence if d.confidence is not None else [] for d in (given, due)]
    near = len(sure[0]) == len(sure[1]) and all(
        abs(a - b) < 1e-4 for a, b in zip(*sure, strict=True)
    )
    _require(near, f"confidence {sure[0]} in place of {sure[1]} {when}")


def _check_draft(draft: Any, num_drafts: int, vocab_size: int) -> None:
    _require(isinstance(draft, Draft), f"propose returned {draft!r:.80}; a Draft is due")
    tokens, left = draft.tokens, draft.device_tokens
    _require(isinstance(tokens, list), f"tokens are {tokens!r:.80}; a list is due")
    if left is not None:
        _require(not tokens, "ids are both in tokens and on the device")
        _require(
            left.dtype == torch.int64 and left.dim() == 1,
            f"device_tokens are {left.dtype} of shape {list(left.shape)}; due is [n] int64",
        )
        tokens = _ids(draft)
    count = draft.num_tokens
    _require(count <= num_drafts, f"{count} drafts where {num_drafts} were wanted")
    for token in tokens:
        _require(
            _is_int(token) and 0 <= token < vocab_size,
            f"drafted {token!r}; allowed are ids 0 to {vocab_size - 1}",
        )
    if draft.confidence is not None:
        _require(
            len(draft.confidence) == len(tokens) and all(c <= 1e-4 for c in draft.confidence),
            f"confidence is {draft.confidence} for {len(tokens)} drafts; due are log-probabilities",
        )


def _content(draft: Draft) -> tuple[Any, Any]:
    """What a draft holds on the host, to be compared later."""
    return list(draft.tokens), None if draft.confidence is None else list(draft.confidence)


def _ids(draft: Draft) -> list[int]:
    """The drafted ids, wherever they are, up to the end of the chain."""
    if draft.device_tokens is None:
        return list(draft.tokens)
    ids: list[int] = draft.device_tokens.tolist()
    return ids[: ids.index(-1)] if -1 in ids else ids


def _is_int(value: object) -> bool:
    return type(value) is int
