"""The step: schedule, draft, run, verify, commit.

There is one path. Without a proposer every draft is empty and every decoding row one wide, so that
"drafts off" is the same code with nothing to verify.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paceline.config import ModelConfig
from paceline.draft import verify
from paceline.draft.proposer import DraftProposer
from paceline.engine.drafting import Drafting, Fed
from paceline.engine.runner import RowInputs, Runner
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Batch, Sequence
from paceline.models.step import TargetModel, TargetOutput
from paceline.types import (
    MAX_NUM_DRAFTS,
    ConfigError,
    Draft,
    FinishReason,
    RequestError,
    SamplingParams,
    SpeculationStats,
    Verdict,
)

__all__ = ["Emission", "Engine"]

_NOTHING = Draft(tokens=[])


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
        config: the target's shapes and end-of-sequence ids.
        num_drafts: drafts a step of a request that does not say.
        drafting: the engine's side of the proposer contract, or None without one.

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
        self.drafting: Drafting | None = None
        if proposer is not None:
            self.drafting = Drafting(
                proposer,
                vocab_size=config.vocab_size,
                max_seq_len=max_seq_len,
                max_num_seqs=max_num_seqs,
            )
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
        self._next_id = 0

    @property
    def max_seq_len(self) -> int:
        """Most tokens of one request, prompt included."""
        return self._scheduler.max_seq_len

    @property
    def num_forwards(self) -> int:
        """Target forwards so far."""
        return self._runner.num_forwards

    @property
    def num_proposer_failures(self) -> int:
        """Proposer calls that raised and drafts that had to be cut; costs drafts, never tokens."""
        return 0 if self.drafting is None else self.drafting.num_failures

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
        elif params.num_drafts and self.drafting is None:
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
            max_drafts=params.num_drafts or 0,
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
                ("drafter states", self.drafting.num_states if self.drafting else 0),
                ("kept prompts", self.drafting.num_kept_prompts if self.drafting else 0),
                ("carried drafter rows", self.drafting.num_carried if self.drafting else 0),
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

    def _draft(self, batch: Batch) -> list[Draft]:
        drafts = [_NOTHING] * len(batch.rows)
        if self.drafting is None:
            return drafts
        asking: list[int] = []
        for index, row in enumerate(batch.rows):
            if row.reads:
                self.drafting.open(row.sequence)
            elif row.max_drafts and self.drafting.has_state(row.sequence):
                asking.append(index)
        if asking:
            answers = self.drafting.propose([batch.rows[index] for index in asking])
            for index, draft in zip(asking, answers, strict=True):
                drafts[index] = draft
        return drafts

    def _drop(self, batch: Batch, drafts: list[Draft]) -> None:
        """Take back drafts that no verdict will follow."""
        for row, draft in zip(batch.rows, drafts, strict=True):
            if draft.num_tokens and self.drafting is not None:
                self.drafting.drop(row.sequence)

    # Run

    def _rows(self, batch: Batch, drafts: list[Draft]) -> list[RowInputs]:
        drafting = self.drafting
        rows = []
        for row, draft in zip(batch.rows, drafts, strict=True):
            ids = row.sequence.tokens[row.first : row.first + row.width]
            count = draft.num_tokens
            rows.append(
                RowInputs(
                    cache=row.sequence.handle,
                    ids=[*ids, *draft.tokens],
                    num_logits=1 + count if row.emits else 0,
                    num_hiddens=drafting.hiddens_wanted(row, count) if drafting is not None else 0,
                )
            )
        return rows

    # Verify

    def _verify(
        self, batch: Batch, drafts: list[Draft], logits: torch.Tensor
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
                last = start + min(early, 1 + draft.num_tokens)
                logits[start:last, list(sequence.stop_ids)] = lowest
            asked.append(draft.tokens)
            offsets.append(start + 1 + draft.num_tokens)
        if not asked:
            return [None] * len(drafts)
        verdicts: Iterator[Verdict] = iter(verify.greedy(logits, asked, offsets=offsets[:-1]))
        return [next(verdicts) if row.emits else None for row in batch.rows]

    # Commit

    def _commit(
        self,
        batch: Batch,
        drafts: list[Draft],
        verdicts: list[Verdict | None],
        rows: list[RowInputs],
        output: TargetOutput,
    ) -> list[Emission]:
        """Keep what was verified, end what is done, then feed the drafters of what goes on."""
        emissions: list[Emission] = []
        going: list[Fed] = []
        end = 0
        for row, proposed, verdict, given in zip(batch.rows, drafts, verdicts, rows, strict=True):
            sequence, draft = row.sequence, proposed.tokens
            end += given.num_hiddens
            accepted = 0
            if verdict is not None:
                accepted = verdict.num_accepted
                if draft and self.drafting is not None:
                    self.drafting.after_verify(sequence, accepted)
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
                going.append(Fed(row, draft, accepted, end - given.num_hiddens, end))
        if going and self.drafting is not None:
            self.drafting.feed(going, output.hiddens)
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

    def _close(self, sequence: Sequence) -> None:
        del self._requests[sequence.id]
        if self.drafting is not None:
            self.drafting.close(sequence)
        self._scheduler.remove(sequence)
