"""The step: schedule, draft, run, verify, commit.

There is one path. Without a proposer every draft is empty and every decoding row one wide, so that
"drafts off" is the same code with nothing to verify.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paceline.config import ModelConfig
from paceline.draft import verify
from paceline.draft.proposer import DraftProposer
from paceline.engine.runner import RowInputs, Runner
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Batch, BatchRow, Sequence
from paceline.models.step import TargetModel, TargetOutput
from paceline.types import (
    MAX_NUM_DRAFTS,
    ConfigError,
    Draft,
    DraftRequest,
    FinishReason,
    RequestError,
    SamplingParams,
    SpeculationStats,
    Verdict,
)

__all__ = ["Emission", "Engine"]

_log = logging.getLogger(__name__)

_FAILED = object()
"""What a contained call gives where the proposer raised; None is an answer of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """What a step gave one request.

    Attributes:
        request_id: whose.
        token_ids: ids emitted, in order; what was certain before the failure where one failed.
        drafted: per id, whether it was an accepted draft.
        stats: the request's counts so far; the engine's own object, still growing until the end.
        finish_reason: why the request ended with this step, or None while it goes on.
        error: what went wrong where the reason is "error".
    """

    request_id: int
    token_ids: list[int]
    drafted: list[bool]
    stats: SpeculationStats
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class _Request:
    sequence: Sequence
    stats: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass(slots=True, eq=False)
class _Fed:
    """A row whose sequence goes on, and where its streams stand in the step's output."""

    row: BatchRow
    draft: list[int]
    accepted: int
    start: int
    end: int


class Engine:
    """Decodes requests greedily, several at once, with or without drafts.

    Not for use from several threads at once.

    Args:
        model: the target's forward.
        config: its shapes and end-of-sequence ids.
        proposer: where drafts come from; None decodes without.
        num_drafts: drafts a step of a request that does not say, 0 to 8.
        max_seq_len: most tokens of one request, prompt included; the context limit.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: most rows of one target forward.
        num_blocks: cache blocks to share; None gives every slot room for `max_seq_len`.
        device: where the caches live.
        dtype: of the caches' keys.

    Attributes:
        num_proposer_failures: calls that raised and drafts that had to be cut; each costs drafts,
            never tokens.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        model: TargetModel,
        config: ModelConfig,
        *,
        proposer: DraftProposer[Any] | None = None,
        num_drafts: int = 0,
        max_seq_len: int,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        num_blocks: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if isinstance(num_drafts, bool) or not isinstance(num_drafts, int):
            raise ConfigError(f"num_drafts is {num_drafts!r}; allowed is 0 to {MAX_NUM_DRAFTS}")
        if not 0 <= num_drafts <= MAX_NUM_DRAFTS:
            raise ConfigError(f"num_drafts is {num_drafts}; allowed is 0 to {MAX_NUM_DRAFTS}")
        if num_drafts and proposer is None:
            raise ConfigError(f"num_drafts is {num_drafts}, but there is no proposer to draft")
        self.config = config
        self.num_drafts = num_drafts
        self._proposer = proposer
        self._scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_seq_len=max_seq_len,
            num_blocks=-(-max_seq_len // 128) * max_num_seqs if num_blocks is None else num_blocks,
        )
        self._runner = Runner(
            model,
            config,
            num_slots=max_num_seqs,
            num_blocks=self._scheduler.allocator.num_blocks,
            max_seq_len=max_seq_len,
            max_rows=max_num_batched_tokens,
            device=torch.device("cpu") if device is None else device,
            dtype=dtype,
        )
        self._requests: dict[int, _Request] = {}
        self._states: dict[int, Any] = {}
        self._deferred: dict[int, list[tuple[torch.Tensor, int]]] = {}
        self._hiddens: list[torch.Tensor] = []
        self._next_id = 0
        self.num_proposer_failures = 0
        if proposer is not None:
            self._prompt_hiddens = proposer.prefill_hidden_rows(max_seq_len)
            self._defers_prompt = proposer.prefill_uses_shared_buffers
            self._group = max(1, proposer.propose_batch_max())

    @property
    def max_seq_len(self) -> int:
        """Most tokens of one request, prompt included."""
        return self._scheduler.max_seq_len

    @property
    def num_forwards(self) -> int:
        """Target forwards so far."""
        return self._runner.num_forwards

    @property
    def has_work(self) -> bool:
        """Whether a request is queued or running."""
        return self._scheduler.has_work

    def add(self, prompt_ids: Iterable[int], params: SamplingParams) -> int:
        """Queue a request and return its number.

        Args:
            prompt_ids: 1 to `max_seq_len` - 1 ids of the vocabulary; copied.
            params: how it is decoded.

        Raises:
            RequestError: the prompt is empty, too long or holds what is no id, a stop id is none,
                or drafts are asked of an engine without a proposer. Others are not touched.
        """
        tokens = list(prompt_ids)
        limit, vocab = self.max_seq_len, self.config.vocab_size
        if not tokens:
            raise RequestError("the prompt is empty; at least one token is needed")
        if len(tokens) >= limit:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; allowed are 1 to {limit - 1}, which leaves "
                f"room for one more under the context limit of {limit}"
            )
        for name, ids in (("the prompt", tokens), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                    raise RequestError(f"{name} holds {token!r}; allowed are ids 0 to {vocab - 1}")
        if params.num_drafts is None:
            params = replace(params, num_drafts=self.num_drafts)
        elif params.num_drafts and self._proposer is None:
            raise RequestError(
                f"num_drafts is {params.num_drafts}, but this engine has no proposer; allowed is 0"
            )
        ends = () if params.ignore_eos else self.config.eos_token_ids
        sequence = Sequence(
            id=self._next_id,
            tokens=tokens,
            prompt_len=len(tokens),
            params=params,
            max_emitted=min(params.max_tokens, limit - len(tokens)),
            stop_ids=frozenset(ends) | frozenset(params.stop_token_ids),
        )
        self._scheduler.add(sequence)
        self._next_id += 1
        self._requests[sequence.id] = _Request(sequence)
        return sequence.id

    def abort(self, request_id: int) -> bool:
        """End a request, queued or running, without an emission; False where it is not there."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._close(request.sequence)
        return True

    def check_idle(self) -> None:
        """Make sure that nothing is left behind.

        Raises:
            RuntimeError: requests are there, or a block, a slot or a drafter's state is not home.
        """
        away = [
            f"{count} {what}"
            for what, count in (
                ("requests", len(self._requests)),
                ("drafter states", len(self._states)),
                ("kept prompts", len(self._deferred)),
                ("cache blocks", self._scheduler.allocator.num_blocks - self.num_free_blocks),
            )
            if count
        ]
        if away or not self._scheduler.all_home:
            raise RuntimeError(f"the engine is not idle: {', '.join(away) or 'a slot is taken'}")

    @property
    def num_free_blocks(self) -> int:
        """Cache blocks nobody holds."""
        return self._scheduler.allocator.num_free

    @torch.inference_mode()
    def step(self) -> list[Emission]:
        """Advance every running request; empty emissions where only prompts were read.

        A proposer that raises costs its drafts; a request whose logits are not finite ends with an
        error; both leave the others alone. An error of the forward itself is raised, and leaves
        every request as it was.
        """
        batch = self._scheduler.schedule()
        if not batch.rows:
            return []
        drafts = self._draft(batch)
        rows = self._rows(batch, drafts)
        try:
            output = self._runner.run(rows)
        except BaseException:
            self._drop(batch, drafts)
            raise
        verdicts = self._verify(batch, drafts, output.logits)
        return self._commit(batch, drafts, verdicts, rows, output)

    # Draft

    def _draft(self, batch: Batch) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in batch.rows]
        if self._proposer is None:
            return drafts
        asking: list[int] = []
        for index, row in enumerate(batch.rows):
            sequence = row.sequence
            if row.first == 0:
                self._open(sequence)
            elif sequence.id not in self._states or not sequence.num_emitted:
                continue
            elif row.max_drafts:
                asking.append(index)
            elif _may_draft(sequence, emitted=sequence.num_emitted):
                self._feed_passed(row)
        for start in range(0, len(asking), self._group):
            group = asking[start : start + self._group]
            rows = [batch.rows[index] for index in group]
            for index, draft in zip(group, self._propose(rows), strict=True):
                drafts[index] = draft
        return drafts

    def _open(self, sequence: Sequence) -> None:
        """Give an admitted sequence its drafter state, if it will ever draft."""
        assert self._proposer is not None
        if sequence.id in self._states or not _may_draft(sequence, emitted=1):
            return
        state = self._contained(self._proposer.alloc_state_for, sequence.budget_tokens)
        if state is not _FAILED:
            self._states[sequence.id] = state

    def _propose(self, rows: list[BatchRow]) -> list[list[int]]:
        proposer = self._proposer
        assert proposer is not None
        states = [self._states[row.sequence.id] for row in rows]
        for row in rows:
            self._feed_deferred(row.sequence)
        requests = [
            DraftRequest(
                last_token=row.sequence.tokens[-1],
                position=len(row.sequence.tokens) - 1,
                target_hidden=self._hiddens[row.sequence.handle.slot],
                num_drafts=row.max_drafts,
                history=row.sequence.tokens,
            )
            for row in rows
        ]
        answers: Any = None
        if len(rows) > 1:
            answers = self._contained(proposer.propose_batch, requests, states)
            if isinstance(answers, list) and len(answers) != len(rows):
                self._note_failure(f"{len(answers)} drafts for {len(rows)} requests")
                return [[] for _ in rows]
            if answers is _FAILED:
                # Some states may be half way; asking each again would not make them whole.
                return [[] for _ in rows]
        if not isinstance(answers, list):
            answers = [
                self._contained(proposer.propose, request, state)
                for request, state in zip(requests, states, strict=True)
            ]
        return [
            self._checked(answer, request, state)
            for answer, request, state in zip(answers, requests, states, strict=True)
        ]

    def _checked(self, draft: Any, request: DraftRequest, state: Any) -> list[int]:
        """The leading tokens of a draft that can be verified."""
        if draft is _FAILED:
            return []
        if not isinstance(draft, Draft) or not isinstance(draft.tokens, list):
            self._note_failure(f"{draft!r:.80} where a Draft with a list of ids is due")
            return []
        vocab, tokens = self.config.vocab_size, draft.tokens
        good = 0
        for token in tokens[: request.num_drafts]:
            if not isinstance(token, int) or not 0 <= token < vocab:
                break
            good += 1
        if good == len(tokens):
            return tokens
        if good < request.num_drafts:
            self._note_failure(f"draft id {tokens[good]!r}; allowed are ids 0 to {vocab - 1}")
        else:
            self._note_failure(f"{len(tokens)} drafts; allowed are {request.num_drafts}")
        if not good and self._proposer is not None:
            self._contained(self._proposer.after_verify, 0, state)
        return tokens[:good]

    def _feed_passed(self, row: BatchRow) -> None:
        """A row that may not draft in this step but will again: its drafter must know the pair."""
        assert self._proposer is not None
        sequence = row.sequence
        state = self._states[sequence.id]
        self._feed_deferred(sequence)
        held = self._contained(self._proposer.drafter_rows, state)
        if held is _FAILED:
            return
        self._contained(
            self._proposer.catchup_drafter,
            sequence.tokens[-1:],
            self._hiddens[sequence.handle.slot][None],
            held,
            len(sequence.tokens) - 1,
            state,
        )

    def _drop(self, batch: Batch, drafts: list[list[int]]) -> None:
        """Take back drafts that no verdict will follow."""
        for row, draft in zip(batch.rows, drafts, strict=True):
            if draft and self._proposer is not None:
                state = self._states[row.sequence.id]
                self._contained(self._proposer.after_verify, 0, state)

    # Run

    def _rows(self, batch: Batch, drafts: list[list[int]]) -> list[RowInputs]:
        rows = []
        for row, draft in zip(batch.rows, drafts, strict=True):
            sequence, last = row.sequence, row.first + row.width
            num_hiddens = 0
            if sequence.id in self._states:
                if sequence.num_emitted:
                    if _may_draft(sequence, emitted=sequence.num_emitted + 1):
                        num_hiddens = 1 + len(draft)
                else:
                    wanted_from = max(row.first, sequence.prompt_len - self._prompt_hiddens)
                    num_hiddens = max(0, last - wanted_from)
                    if row.emits:
                        num_hiddens = max(1, num_hiddens)
            rows.append(
                RowInputs(
                    cache=sequence.handle,
                    ids=[*sequence.tokens[row.first : last], *draft],
                    num_logits=1 + len(draft) if row.emits else 0,
                    num_hiddens=num_hiddens,
                )
            )
        return rows

    # Verify

    def _verify(
        self, batch: Batch, drafts: list[list[int]], logits: torch.Tensor
    ) -> list[Verdict | None]:
        """A verdict per row that emits, None for the others."""
        offsets: list[int] = [0]
        asked: list[list[int]] = []
        for row, draft in zip(batch.rows, drafts, strict=True):
            if not row.emits:
                continue
            sequence, start = row.sequence, offsets[-1]
            early = sequence.params.min_tokens - sequence.num_emitted
            if early > 0 and sequence.stop_ids:
                # The lowest finite number: not an infinity, which would look like a failed row.
                lowest = torch.finfo(logits.dtype).min
                last = start + min(early, 1 + len(draft))
                logits[start:last, list(sequence.stop_ids)] = lowest
            asked.append(draft)
            offsets.append(start + 1 + len(draft))
        if not asked:
            return [None] * len(drafts)
        verdicts: Iterator[Verdict] = iter(verify.greedy(logits, asked, offsets=offsets[:-1]))
        return [next(verdicts) if row.emits else None for row in batch.rows]

    # Commit

    def _commit(
        self,
        batch: Batch,
        drafts: list[list[int]],
        verdicts: list[Verdict | None],
        rows: list[RowInputs],
        output: TargetOutput,
    ) -> list[Emission]:
        """Keep what was verified, end what is done, then feed the drafters of what goes on."""
        emissions: list[Emission] = []
        going: list[_Fed] = []
        end = 0
        for row, draft, verdict, given in zip(batch.rows, drafts, verdicts, rows, strict=True):
            sequence = row.sequence
            end += given.num_hiddens
            accepted = 0
            if verdict is not None:
                accepted = verdict.num_accepted
                if draft and self._proposer is not None:
                    state = self._states[sequence.id]
                    self._contained(self._proposer.after_verify, accepted, state)
                if verdict.error:
                    self._runner.scrub(sequence.handle)
                else:
                    sequence.handle.commit(row.width + accepted)
                emission = self._emit(sequence, draft[:accepted], verdict, num_drafted=len(draft))
                emissions.append(emission)
                if emission.finish_reason is not None:
                    self._close(sequence)
                    continue
            else:
                sequence.handle.commit(row.width)
            if given.num_hiddens:
                going.append(_Fed(row, draft, accepted, end - given.num_hiddens, end))
        if going:
            self._feed(going, output.hiddens)
        return emissions

    def _emit(
        self, sequence: Sequence, accepted: list[int], verdict: Verdict, *, num_drafted: int
    ) -> Emission:
        """Append what the verdict gives, up to the token that ends the sequence."""
        stats = self._requests[sequence.id].stats
        if sequence.num_emitted:
            stats.record(num_drafted=num_drafted, num_accepted=len(accepted))
            if verdict.error:
                stats.num_emitted -= 1  # the target's own token, which did not come
        else:
            stats.num_steps += 1
        room = sequence.max_emitted - sequence.num_emitted
        given = accepted if verdict.error else [*accepted, verdict.next_token]
        reason = FinishReason.ERROR if verdict.error else None
        taken: list[int] = []
        for token in given:
            taken.append(token)
            if token in sequence.stop_ids:
                reason = FinishReason.STOP
                break
            if len(taken) == room:
                reason = FinishReason.LENGTH
                break
        sequence.tokens.extend(taken)
        return Emission(
            request_id=sequence.id,
            token_ids=taken,
            drafted=[index < len(accepted) for index in range(len(taken))],
            stats=stats,
            finish_reason=reason,
            error=verdict.error if reason is FinishReason.ERROR else None,
        )

    def _feed(self, going: list[_Fed], hiddens: torch.Tensor) -> None:
        """Hand the drafters the target's own streams of what was committed.

        What the next proposal starts from is copied first: the step's output is dead at the next
        forward, and a drafter may use the same memory.
        """
        for fed in going:
            if fed.row.sequence.num_emitted:
                last = fed.end - 1 - len(fed.draft) + fed.accepted
                self._keep_hidden(fed.row.sequence, hiddens[last])
        caught: list[_Fed] = []
        for fed in going:
            if fed.row.first < fed.row.sequence.prompt_len:
                self._feed_prompt(fed.row, hiddens[fed.start : fed.end])
            elif fed.accepted:
                caught.append(fed)
        for start in range(0, len(caught), self._group):
            group = caught[start : start + self._group]
            assert self._proposer is not None
            self._contained(
                self._proposer.catchup_batch,
                [fed.draft[: fed.accepted] for fed in group],
                [hiddens[fed.start : fed.start + fed.accepted] for fed in group],
                [fed.row.first + 1 for fed in group],
                [self._states[fed.row.sequence.id] for fed in group],
            )

    def _keep_hidden(self, sequence: Sequence, hidden: torch.Tensor) -> None:
        if not self._hiddens:
            shape = (self._scheduler.max_num_seqs, *hidden.shape)
            kept = torch.zeros(shape, dtype=hidden.dtype, device=hidden.device)
            self._hiddens = list(kept)
        self._hiddens[sequence.handle.slot].copy_(hidden)

    def _feed_prompt(self, row: BatchRow, hiddens: torch.Tensor) -> None:
        sequence = row.sequence
        first = row.first + row.width - hiddens.shape[0]
        if first == sequence.prompt_len - 1:
            return  # its pair waits for the token sampled from it
        if self._defers_prompt:
            self._deferred.setdefault(sequence.id, []).append((hiddens.clone(), first))
        else:
            self._prefill(sequence, hiddens, first)

    def _feed_deferred(self, sequence: Sequence) -> None:
        for hiddens, first in self._deferred.pop(sequence.id, ()):
            self._prefill(sequence, hiddens, first)

    def _prefill(self, sequence: Sequence, hiddens: torch.Tensor, first: int) -> None:
        assert self._proposer is not None
        self._contained(
            self._proposer.prefill_drafter,
            sequence.tokens[: sequence.prompt_len],
            hiddens,
            self._states[sequence.id],
            first_position=first,
        )

    # The end of a request, and what a proposer may not break

    def _close(self, sequence: Sequence) -> None:
        del self._requests[sequence.id]
        self._deferred.pop(sequence.id, None)
        if sequence.id in self._states:
            assert self._proposer is not None
            self._contained(self._proposer.free_state, self._states.pop(sequence.id))
        self._scheduler.remove(sequence)

    def _contained(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call the proposer; a raised error costs its answer and nothing else."""
        try:
            return call(*args, **named)
        except Exception as error:
            name = getattr(call, "__name__", "a call")
            self._note_failure(f"{name} raised {type(error).__name__}: {error}")
            return _FAILED

    def _note_failure(self, what: str) -> None:
        if not self.num_proposer_failures:
            _log.warning(
                "the proposer %s: %s; its drafts are dropped, the text is not affected (said once)",
                type(self._proposer).__name__,
                what,
            )
        self.num_proposer_failures += 1


def _may_draft(sequence: Sequence, *, emitted: int) -> bool:
    """Whether a step that begins with so many tokens emitted could use a draft."""
    return bool(sequence.params.num_drafts) and sequence.max_emitted - emitted > 1
