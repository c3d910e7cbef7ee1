"""The step: schedule, draft, run, verify, commit.

There is one path. Without a proposer every draft is empty and every decoding row one wide, so that
"drafts off" is the same code with nothing to verify.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal, get_args

import torch

from paceline.config import ModelConfig
from paceline.dist import RankGroup
from paceline.draft import verify
from paceline.draft.length import LengthController, LengthPolicy, StepRecord
from paceline.draft.proposer import DraftProposer
from paceline.engine.alarms import Alarm, Repeats, drafting_alarms, prefix_alarms
from paceline.engine.drafting import MAX_FAILURES, Drafting, Fed
from paceline.engine.graphs import Capture, GraphedDraftRunner
from paceline.engine.origins import origins
from paceline.engine.prefix import PrefixCache, Snapshot
from paceline.engine.ranks import LeadingProposer, lead
from paceline.engine.runner import RowInputs, Runner
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Batch, BatchRow, Sequence, TextEnd
from paceline.models.step import TargetModel, TargetOutput
from paceline.sampling.grammar import GrammarCursor, Words, walk
from paceline.sampling.logprobs import law_logprob, token_logprobs
from paceline.sampling.request import Sampler
from paceline.types import (
    MAX_NUM_DRAFTS,
    ConfigError,
    Draft,
    FinishReason,
    Origin,
    RequestError,
    SamplingParams,
    SpeculationStats,
    TokenLogprob,
    Verdict,
)

__all__ = ["Acceptance", "Emission", "Engine", "LogprobsMode"]

Acceptance = Literal["invariant", "rejection", "block"]
"""How drafts are judged at a temperature; see docs/sampling.md."""

LogprobsMode = Literal["raw", "processed"]
"""Whether log-probabilities are the model's own or those of the law a token was drawn from."""

AUTO: Literal["auto"] = "auto"

_log = logging.getLogger(__name__)

_NOTHING = Draft(tokens=[])

_ALARM_STEPS = 256
"""Steps from one look at the counts to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """What a step gave one request.

    Attributes:
        request_id: whose.
        token_ids: ids emitted, in order; what was certain before the failure where one failed.
        origins: per id, how it came to be.
        stats: the request's counts so far; the engine's own object, still growing until the end.
        finish_reason: why the request ended with this step, or None while it goes on.
        error: what went wrong where the reason is "error".
        cached_tokens: tokens of the prompt that were taken from the cache of prefixes.
        logprobs: one entry per id, or None where they were not asked for.
        prompt_logprobs: one per id of the prompt, in the request's first emission, where they were
            asked for; the first is None.
    """

    request_id: int
    token_ids: list[int]
    origins: list[Origin]
    stats: SpeculationStats
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(slots=True, eq=False)
class _Request:
    sequence: Sequence
    stats: SpeculationStats = field(default_factory=SpeculationStats)


class Engine:
    """Decodes requests, several at once, with or without drafts.

    Not for use from several threads at once.

    Args:
        model: the target's forward.
        config: its shapes and end-of-sequence ids.
        proposer: where drafts come from; None decodes without.
        acceptance: how drafts of requests with a temperature are judged. "invariant": what is
            emitted depends on target and seed alone, as without drafts. "rejection": more drafts
            are accepted, and the law is the target's, but ids depend on the drafts; "block" judges
            a step's drafts together, and accepts more yet.
        logprobs_mode: what the log-probabilities of emitted ids are of: "raw", the model's logits
            as they are, or "processed", the law the id was drawn from, after all parameters and the
            grammar. Those of the prompt are raw.
        num_drafts: drafts a step of a request that does not say, 0 to 8, or "auto": as many as pay,
            chosen anew for each step. None: none, or a block drafter's `block_gamma - 1`.
        lengths: who chooses where it is "auto"; None: a `LengthController`.
        max_seq_len: most tokens of one request, prompt included; the context limit.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: most rows of one target forward.
        num_blocks: cache blocks to share; None gives every slot room for `max_seq_len`.
        prefix_cache_bytes: most bytes of prefixes kept for later requests, their blocks and what is
            restored beside them; 0 keeps none. See docs/prefix_cache.md.
        device: where the caches live.
        dtype: of the caches' keys.
        capture: how steps are captured and replayed; None runs each as it is.
        drafts_on_device: drafts stay where the model is, and a step makes one read of it; None: on
            every device but a CPU, whose memory is the host's.
        keep_drafts: share of a step's drafts that is verified, 0 to 1; the tails that the proposer
            finds least likely, over the whole batch, are left out.
        discard_drafts_below: a draft whose least probability is lower is not verified, 0 to 1.
        max_proposer_failures: failures after which the proposer is asked no more.
        ranks: ranks that hold a part of the proposer each, this one the first; the others
            `follow`. Not used where the proposer's `needs_comm` is false. See docs/ranks.md.

    Attributes:
        config: the target's shapes and end-of-sequence ids.
        acceptance: how drafts are judged at a temperature.
        logprobs_mode: what log-probabilities are of.
        num_drafts: drafts a step of a request that does not say.
        drafting: the engine's side of the proposer contract, or None without one.
        prefix: the cache of prefixes, or None without one.
        num_preemptions: times a running request lost its blocks to an older one; it reads its
            tokens anew later, and what it says does not change.
        speculation: what drafting did for all requests so far.

    Raises:
        ConfigError: a value is out of range, or contradicts the proposer's `block_gamma`.
    """

    def __init__(
        self,
        model: TargetModel,
        config: ModelConfig,
        *,
        proposer: DraftProposer[Any] | None = None,
        acceptance: Acceptance = "invariant",
        logprobs_mode: LogprobsMode = "raw",
        num_drafts: int | Literal["auto"] | None = None,
        lengths: LengthPolicy | None = None,
        max_seq_len: int,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        num_blocks: int | None = None,
        prefix_cache_bytes: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        capture: Capture | None = None,
        drafts_on_device: bool | None = None,
        keep_drafts: float = 1.0,
        discard_drafts_below: float = 0.0,
        max_proposer_failures: int = MAX_FAILURES,
        ranks: RankGroup | None = None,
    ) -> None:
        num_drafts = _num_drafts(num_drafts, proposer)
        if acceptance not in get_args(Acceptance):
            raise ConfigError(
                f"acceptance is {acceptance!r}; allowed are "
                f"{', '.join(map(repr, get_args(Acceptance)))}"
            )
        if logprobs_mode not in get_args(LogprobsMode):
            raise ConfigError(
                f"logprobs_mode is {logprobs_mode!r}; allowed are "
                f"{', '.join(map(repr, get_args(LogprobsMode)))}"
            )
        if max_proposer_failures < 1:
            raise ConfigError(
                f"max_proposer_failures is {max_proposer_failures}; allowed is at least 1"
            )
        whole = isinstance(num_drafts, int) and not isinstance(num_drafts, bool)
        if num_drafts != AUTO and not (whole and 0 <= num_drafts <= MAX_NUM_DRAFTS):
            raise ConfigError(
                f"num_drafts is {num_drafts!r}; allowed is 0 to {MAX_NUM_DRAFTS}, or {AUTO!r}"
            )
        if num_drafts and proposer is None:
            raise ConfigError(f"num_drafts is {num_drafts}, but there is no proposer to draft")
        self.config = config
        for name, share in (
            ("keep_drafts", keep_drafts),
            ("discard_drafts_below", discard_drafts_below),
        ):
            if not 0 <= share <= 1:
                raise ConfigError(f"{name} is {share}; allowed is 0 to 1")
        if acceptance != "invariant" and (keep_drafts < 1 or discard_drafts_below > 0):
            raise ConfigError(
                f"acceptance is {acceptance!r} with keep_drafts {keep_drafts} and "
                f"discard_drafts_below {discard_drafts_below}; allowed are 1 and 0, since the law "
                "would change if drafts were left out by what was drawn"
            )
        self.acceptance: Acceptance = acceptance
        self.logprobs_mode: LogprobsMode = logprobs_mode
        self.num_drafts: int | Literal["auto"] = num_drafts
        place = torch.device("cpu") if device is None else device
        self._on_device = place.type != "cpu" if drafts_on_device is None else drafts_on_device
        gamma = None if proposer is None else proposer.block_gamma
        self._block_drafts = None if gamma is None else gamma - 1
        self.drafting: Drafting | None = None
        if proposer is not None and ranks is not None:
            proposer = lead(proposer, ranks)
        if proposer is not None:
            self.drafting = Drafting(
                proposer,
                vocab_size=config.vocab_size,
                max_seq_len=max_seq_len,
                max_num_seqs=max_num_seqs,
                on_device=self._on_device,
                draws=acceptance != "invariant",
                keep_ratio=keep_drafts,
                discard_below=discard_drafts_below,
                snapshots=prefix_cache_bytes > 0,
                max_failures=max_proposer_failures,
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
            device=place,
            dtype=dtype,
            capture=capture,
        )
        if capture is not None and proposer is not None:
            binding = proposer.circuit_draft()
            if binding is not None:
                proposer.set_circuit_draft(GraphedDraftRunner(binding, capture))
        self.lengths: LengthPolicy = LengthController() if lengths is None else lengths
        self._scheduler.lengths = self.lengths
        self.prefix: PrefixCache | None = None
        if prefix_cache_bytes > 0:
            self.prefix = self._scheduler.prefix = PrefixCache(
                self._scheduler.allocator,
                self._runner.pools,
                window=config.sliding_window,
                budget_bytes=prefix_cache_bytes,
                drafting=self.drafting,
            )
        self._requests: dict[int, _Request] = {}
        self._held: dict[int, list[Sequence]] = {}
        self._next_id = 0
        self.num_preemptions = 0
        self.speculation = SpeculationStats()
        # Made once: to make one for every step would take longer than to schedule it.
        self._inference_mode = torch.inference_mode()
        self._repeats = Repeats()
        self._told: set[str] = set()

    @property
    def max_seq_len(self) -> int:
        """Most tokens of one request, prompt included."""
        return self._scheduler.max_seq_len

    @property
    def max_num_seqs(self) -> int:
        """Requests that run at once."""
        return self._scheduler.max_num_seqs

    @property
    def num_forwards(self) -> int:
        """Target forwards so far."""
        return self._runner.num_forwards

    @property
    def num_proposer_failures(self) -> int:
        """Proposer calls that raised and drafts that had to be cut; costs drafts, never tokens."""
        return 0 if self.drafting is None else self.drafting.num_failures

    @property
    def num_prefix_lookups(self) -> int:
        """Admissions that asked the cache of prefixes; pre-empted requests ask anew."""
        return 0 if self.prefix is None else self.prefix.num_lookups

    @property
    def num_prefix_hits(self) -> int:
        """Those that found something."""
        return 0 if self.prefix is None else self.prefix.num_hits

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens that were not computed because their prefix was kept."""
        return 0 if self.prefix is None else self.prefix.num_tokens

    def clear_prefix_cache(self) -> None:
        """Let all kept prefixes go; requests that use one go on."""
        if self.prefix is not None:
            self.prefix.clear()

    @property
    def has_work(self) -> bool:
        """Whether a request is queued or running."""
        return self._scheduler.has_work

    def add(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams,
        *,
        sample: int = 0,
        after: int | None = None,
        text_end: TextEnd | None = None,
        bad_word_ids: Iterable[Items[int]] = (),
        grammar: GrammarCursor | None = None,
    ) -> int:
        """Queue a request and return its number.

        Args:
            prompt_ids: 1 to `max_seq_len` - 1 ids of the vocabulary; copied.
            params: how it is decoded; one request is one answer, so that `n` is the caller's to
                repeat.
            sample: which of several answers it is; each has noise of its own under one seed.
            after: a request of the same prompt that is to have read it first, so that its blocks
                are there to be shared.
            text_end: who ends the request by its text; needed where `params.stop` is given.
            bad_word_ids: `params.bad_words` as ids, every spelling of each.
            grammar: what the answer follows, before its first id; the engine's from now on. Needed
                where the parameters ask for a grammar.

        Raises:
            RequestError: the prompt is empty, too long or holds what is no id, another id is none,
                the parameters leave no token to emit, drafts are asked of an engine without a
                proposer, or texts are given that nobody made ids or a grammar of. Others are not
                touched.
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
        words = [tuple(word) for word in bad_word_ids]
        readers = {"stop": text_end is not None, "bad_words": bool(words)}
        shapes = ("json_schema", "json_object", "regex", "grammar", "choice")
        for shape in (*shapes, "max_reasoning_tokens"):
            readers[shape] = grammar is not None
        for given, done in readers.items():
            asked = getattr(params, given)
            if asked is not None and asked is not False and asked != () and not done:
                raise RequestError(
                    f"{given} is {getattr(params, given)!r}, but there is no tokenizer to read it "
                    "with; allowed is None"
                )
        for name, ids in (("the prompt", tokens), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                    raise RequestError(f"{name} holds {token!r}; allowed are ids 0 to {vocab - 1}")
        if params.num_drafts is None:
            params = replace(params, num_drafts=self.num_drafts)
        elif params.num_drafts and self._block_drafts not in (None, params.num_drafts):
            raise RequestError(
                f"num_drafts is {params.num_drafts!r}, but the proposer drafts in blocks; allowed "
                f"is 0 or {self._block_drafts}"
            )
        elif params.num_drafts and self.drafting is None:
            raise RequestError(
                f"num_drafts is {params.num_drafts}, but this engine has no proposer; allowed is 0"
            )
        ends = () if params.ignore_eos else self.config.eos_token_ids
        stop_ids = frozenset(ends) | frozenset(params.stop_token_ids)
        sequence = Sequence(
            id=self._next_id,
            tokens=tokens,
            prompt_len=len(tokens),
            params=params,
            max_emitted=min(params.max_tokens, limit - len(tokens)),
            stop_ids=stop_ids,
            max_drafts=params.num_drafts if isinstance(params.num_drafts, int) else MAX_NUM_DRAFTS,
            adapts=params.num_drafts == AUTO,
            sampler=Sampler(
                params,
                vocab_size=vocab,
                prompt_ids=tokens,
                stop_ids=stop_ids,
                bad_word_ids=words,
                sample=sample,
            ),
            grammar=grammar,
            text_end=text_end,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        self._scheduler.check(sequence)
        if after in self._requests and not self._requests[after].sequence.num_emitted:
            self._held.setdefault(after, []).append(sequence)
        else:
            self._scheduler.add(sequence)
        self._next_id += 1
        self._requests[sequence.id] = _Request(sequence)
        self._repeats.begun(tokens)
        return sequence.id

    def abort(self, request_id: int) -> bool:
        """End a request, queued or running, without an emission; False where it is not there."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._close(request.sequence)
        return True

    def check_idle(self) -> None:
        """Make sure that nothing is left behind but the prefixes that are kept.

        Raises:
            RuntimeError: requests are there, or a block, a slot or a drafter's state is not home.
        """
        tree = None if self.prefix is None else self.prefix.tree
        held = self._scheduler.allocator.num_blocks - self.num_free_blocks
        away = [
            f"{count} {what}"
            for what, count in (
                ("requests", len(self._requests)),
                ("drafter states", self.drafting.num_states if self.drafting else 0),
                ("kept prompts", self.drafting.num_kept_prompts if self.drafting else 0),
                ("carried drafter rows", self.drafting.num_carried if self.drafting else 0),
                ("cache blocks", held - (0 if tree is None else tree.num_blocks)),
                ("kept blocks still shared", 0 if tree is None else tree.num_shared),
            )
            if count
        ]
        if away or not self._scheduler.all_slots_home:
            raise RuntimeError(f"the engine is not idle: {', '.join(away) or 'a slot is taken'}")

    @property
    def num_waiting(self) -> int:
        """Requests that are queued, those included that wait for another one's prompt."""
        return len(self._requests) - self.num_running

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self._scheduler.num_running

    @property
    def num_blocks(self) -> int:
        """Cache blocks in all."""
        return self._scheduler.allocator.num_blocks

    @property
    def num_kept_blocks(self) -> int:
        """Cache blocks that hold prefixes for later requests."""
        return 0 if self.prefix is None else self.prefix.tree.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Cache blocks nobody holds."""
        return self._scheduler.allocator.num_free

    def close(self) -> None:
        """Let the other ranks of the proposer go; a second call does nothing."""
        if self.drafting is not None and isinstance(self.drafting.proposer, LeadingProposer):
            self.drafting.proposer.close()

    def alarms(self) -> list[Alarm]:
        """Signs in the counts so far that drafts or kept prefixes do not do what they should.

        Looked for every 256 steps too; each kind is logged once.
        """
        found = drafting_alarms(self.speculation)
        if self.prefix is not None:
            found += prefix_alarms(num_repeats=self._repeats.count, num_hits=self.prefix.num_hits)
        for alarm in found:
            if alarm.name not in self._told:
                self._told.add(alarm.name)
                _log.warning("%s: %s (said once)", alarm.name, alarm.message)
        return found

    def step(self) -> list[Emission]:
        """Advance every running request; empty emissions where only prompts were read.

        A proposer that raises costs its drafts; a request whose logits are not finite ends with an
        error; both leave the others alone. An error of the forward itself is raised, and leaves
        every request as it was.
        """
        with self._inference_mode:
            return self._step()

    def _step(self) -> list[Emission]:
        start = perf_counter()
        batch = self._scheduler.schedule()
        self._come_and_go(batch)
        if not batch.rows:
            return []
        before = perf_counter()
        drafts = self._draft(batch)
        draft_seconds = perf_counter() - before
        rows = self._rows(batch, drafts)
        try:
            output = self._runner.run(rows)
        except BaseException:
            self._drop(batch, drafts)
            raise
        starts = _first_logits(rows)
        verdicts = self._verify(batch, drafts, starts, output)
        emissions = self._commit(batch, drafts, verdicts, rows, starts, output)
        if batch.adapts:
            seconds = perf_counter() - start
            self.lengths.observe(_record(batch, drafts, verdicts, draft_seconds, seconds))
        if self.num_forwards % _ALARM_STEPS == 0:
            self.alarms()
        return emissions

    def _come_and_go(self, batch: Batch) -> None:
        """Take notice of who lost a slot, who was given one, and what it goes on from."""
        self.num_preemptions += len(batch.preempted)
        if self.drafting is not None:
            if self.drafting.is_off:
                self.drafting.retire()
            for sequence in batch.preempted:
                self.drafting.suspend(sequence)
            for admission in batch.admitted:
                self.drafting.open(admission.sequence)
        if self.prefix is not None:
            for admission in batch.admitted:
                self.prefix.admit(admission)
            # What was evicted may have had rows, also where nobody came.
            self.prefix.settle()

    # Draft

    def _draft(self, batch: Batch) -> list[Draft]:
        drafts = [_NOTHING] * len(batch.rows)
        asking: list[int] = []
        ruled: list[int] = []
        for index, row in enumerate(batch.rows):
            grammar = row.sequence.grammar
            drafts_for = self.drafting is not None and self.drafting.has_state(row.sequence)
            if grammar is not None and row.emits:
                ruled.append(index)
                forced = grammar.forced(row.max_drafts) if row.max_drafts else []
                # A run that leaves room is left to a drafter, whose masks force it too and which
                # goes on behind it.
                if forced and (len(forced) == row.max_drafts or not drafts_for):
                    drafts[index] = Draft(tokens=forced, source="grammar")
                    continue
            if row.max_drafts and drafts_for:
                asking.append(index)
        if asking and self.drafting is not None:
            answers = self.drafting.propose([batch.rows[index] for index in asking])
            for index, draft in zip(asking, answers, strict=True):
                drafts[index] = draft
        for index in ruled:
            drafts[index] = self._walked(batch.rows[index], drafts[index])
        return drafts

    def _walked(self, row: BatchRow, draft: Draft) -> Draft:
        """A draft without what its grammar forbids; notes the masks of the rows that are left."""
        if draft.device_tokens is not None:
            ids: list[int] = draft.device_tokens.tolist()
            draft = replace(draft, tokens=ids, device_tokens=None)
        assert row.sequence.grammar is not None
        row.masks = walk(row.sequence.grammar, draft.tokens)
        legal = len(row.masks) - 1
        if legal < draft.num_tokens and draft.laws:
            # What was drawn is judged, and refused for certain: left out by what it is, it would
            # change the law of what comes in its place. No mask matters behind it.
            row.masks.append(row.masks[-1])
            legal += 1
        if legal == draft.num_tokens or self.drafting is None:
            return draft
        return self.drafting.shortened(row.sequence, draft, legal)

    def _drop(self, batch: Batch, drafts: list[Draft]) -> None:
        """Take back drafts that no verdict will follow."""
        for row, draft in zip(batch.rows, drafts, strict=True):
            if draft.num_tokens and row.proposed and self.drafting is not None:
                self.drafting.drop(row.sequence)

    # Run

    def _rows(self, batch: Batch, drafts: list[Draft]) -> list[RowInputs]:
        drafting, prefix = self.drafting, self.prefix
        rows = []
        for row, draft in zip(batch.rows, drafts, strict=True):
            ids = row.sequence.tokens[row.first : row.first + row.width]
            count = draft.num_tokens
            row.num_fed = 0 if drafting is None else drafting.hiddens_wanted(row, count)
            kept = 0 if prefix is None else prefix.streams_wanted(row, row.width + count)
            rows.append(
                RowInputs(
                    cache=row.sequence.handle,
                    ids=[*ids, *draft.tokens],
                    device_ids=draft.device_tokens,
                    num_logits=1 + count if row.emits else 0,
                    num_hiddens=max(row.num_fed, kept),
                    num_more_logits=_more_logits(row),
                )
            )
        return rows

    # Verify

    def _verify(
        self, batch: Batch, drafts: list[Draft], starts: list[int], output: TargetOutput
    ) -> list[Verdict | None]:
        """A verdict per row that emits, None for the others.

        Requests whose tokens are the largest logits are judged together, on the device where the
        drafts are there; others by the engine's rule. Drafts that stayed on the device come with
        the verdicts and are put into `drafts`.
        """
        verdicts: list[Verdict | None] = [None] * len(drafts)
        plain: list[int] = []
        ruled: list[int] = []
        for index, row in enumerate(batch.rows):
            if row.emits:
                (plain if row.sequence.picks_largest else ruled).append(index)
        if self._on_device and (plain or ruled):
            for index, one in enumerate(self._runner.read_verdicts()):
                if one is not None:
                    verdicts[index] = one.verdict
                    if drafts[index].device_tokens is not None:
                        drafts[index] = replace(
                            drafts[index], tokens=one.drafts, device_tokens=None
                        )
        elif plain:
            found = verify.greedy(
                output.logits,
                [drafts[i].tokens for i in plain],
                offsets=[starts[i] for i in plain],
                picks=output.picks,
            )
            for index, verdict in zip(plain, found, strict=True):
                verdicts[index] = verdict
        if ruled:
            found = self._judge(
                output.logits,
                [drafts[i] for i in ruled],
                [_sampler(batch.rows[i].sequence) for i in ruled],
                [starts[i] for i in ruled],
                [batch.rows[i].masks for i in ruled],
            )
            for index, verdict in zip(ruled, found, strict=True):
                grammar = batch.rows[index].sequence.grammar
                if verdict.error and grammar is not None and grammar.error is not None:
                    verdict = replace(verdict, error=f"the grammar fails: {grammar.error}")
                verdicts[index] = verdict
        return verdicts

    def _judge(
        self,
        logits: torch.Tensor,
        drafts: list[Draft],
        samplers: list[Sampler],
        offsets: list[int],
        masks: Items[list[Words] | None],
    ) -> list[Verdict]:
        """The verdicts of the engine's rule."""
        tokens = [draft.tokens for draft in drafts]
        if self.acceptance == "invariant":
            return verify.invariant(logits, tokens, samplers, offsets=offsets, masks=masks)
        return verify.rejection(
            logits,
            tokens,
            samplers,
            laws=[draft.laws or [None] * len(draft.tokens) for draft in drafts],
            offsets=offsets,
            masks=masks,
            block=self.acceptance == "block",
        )

    # Commit

    def _commit(
        self,
        batch: Batch,
        drafts: list[Draft],
        verdicts: list[Verdict | None],
        rows: list[RowInputs],
        starts: list[int],
        output: TargetOutput,
    ) -> list[Emission]:
        """Keep what was verified, end what is done, then feed the drafters of what goes on.

        A request that passed a block's end with its last step ends after that, so that its rows
        and its drafter's can be kept.
        """
        emissions: list[Emission] = []
        going: list[Fed] = []
        ending: list[Sequence] = []
        kept: list[tuple[Sequence, Snapshot, Fed | None]] = []
        end = 0
        for row, proposed, verdict, given, start in zip(
            batch.rows, drafts, verdicts, rows, starts, strict=True
        ):
            sequence, draft = row.sequence, proposed.tokens
            if given.num_more_logits:
                _note_prompt(row, output.logits[start - given.num_more_logits :])
            end += given.num_hiddens
            accepted, ends = 0, False
            if verdict is not None:
                accepted = verdict.num_accepted
                if draft and row.proposed and self.drafting is not None:
                    self.drafting.after_verify(sequence, accepted)
                if verdict.error:
                    self._runner.scrub(sequence.handle)
                else:
                    sequence.handle.commit(row.width + accepted)
                emission = self._emit(
                    sequence,
                    draft[:accepted],
                    verdict,
                    None
                    if sequence.params.logprobs is None
                    else output.logits[start : start + given.num_logits],
                    masks=row.masks,
                    num_drafted=_drafted(draft),
                    source=proposed.source,
                )
                emissions.append(emission)
                ends = emission.finish_reason is not None
            else:
                sequence.handle.commit(row.width)
            passed: list[int] = []
            if self.prefix is not None and not (verdict is not None and verdict.error):
                passed = self.prefix.ends(row)
            if ends and not passed:
                self._close(sequence)
                continue
            fed = None
            if row.num_fed:
                fed = Fed(row, draft, accepted, end - row.num_fed, end, ends=passed)
                going.append(fed)
            if self.prefix is not None:
                after_last = row.first + row.width + proposed.num_tokens
                for place in passed:
                    streams = output.hiddens[end - after_last + place - 1]
                    kept.append((sequence, self.prefix.take(sequence, place, streams), fed))
            if ends:
                ending.append(sequence)
        if going and self.drafting is not None:
            self.drafting.feed(going, output.hiddens)
        if self.prefix is not None and kept:
            for sequence, snapshot, fed in kept:
                place = snapshot.rings.length
                self.prefix.keep(sequence, snapshot, fed.copied.get(place) if fed else None)
            self.prefix.settle()
        for sequence in ending:
            self._close(sequence)
        return emissions

    def _emit(
        self,
        sequence: Sequence,
        accepted: list[int],
        verdict: Verdict,
        logits: torch.Tensor | None,
        *,
        masks: list[Words] | None,
        num_drafted: int,
        source: str | None,
    ) -> Emission:
        """Append what the verdict gives, up to the token that ends the sequence.

        An id, a grammar or a text that ends it is looked for before its length.
        """
        stats = self._requests[sequence.id].stats
        first = sequence.num_emitted == 0
        if sequence.num_emitted:
            if num_drafted and source is None and self.drafting is not None:
                source = self.drafting.name
            for counts in (stats, self.speculation):
                counts.record(num_drafted=num_drafted, num_accepted=len(accepted), source=source)
                if verdict.error:
                    counts.num_emitted -= 1  # the target's own token, which did not come
        else:
            stats.num_steps += 1
            self.speculation.num_steps += 1
        room = sequence.max_emitted - sequence.num_emitted
        given = accepted if verdict.error else [*accepted, verdict.next_token]
        reason = FinishReason.ERROR if verdict.error else None
        taken: list[int] = []
        for token in given:
            taken.append(token)
            if sequence.grammar is not None:
                sequence.grammar.advance(token)
            finished = sequence.grammar is not None and sequence.grammar.is_finished
            if finished or token in sequence.stop_ids:
                reason = FinishReason.STOP
                break
            if len(taken) == room:
                reason = FinishReason.LENGTH
                break
        if sequence.text_end is not None and taken:
            spared = sequence.params.min_tokens - sequence.num_emitted
            kept = sequence.text_end.scan(taken, num_unstoppable=max(0, spared))
            if kept is not None:
                taken, reason = taken[:kept], FinishReason.STOP
        logprobs = self._logprobs(sequence, taken, logits, masks)
        sequence.tokens.extend(taken)
        _sampler(sequence).commit(taken)
        if first:
            for one in self._held.pop(sequence.id, ()):
                self._scheduler.add(one)
        if reason is not None and reason is not FinishReason.ERROR:
            self._repeats.ended(sequence.tokens)
        return Emission(
            request_id=sequence.id,
            token_ids=taken,
            origins=origins(
                len(taken), num_drafted=num_drafted, num_accepted=len(accepted), masks=masks
            ),
            stats=stats,
            finish_reason=reason,
            error=verdict.error if reason is FinishReason.ERROR else None,
            cached_tokens=sequence.num_cached or 0,
            logprobs=logprobs,
            prompt_logprobs=sequence.prompt_logprobs if first else None,
        )

    def _logprobs(
        self,
        sequence: Sequence,
        taken: list[int],
        logits: torch.Tensor | None,
        masks: list[Words] | None,
    ) -> list[TokenLogprob] | None:
        """Those of a step's ids, before they are committed; None where they are not asked for."""
        top = sequence.params.logprobs
        if top is None:
            return None
        assert logits is not None
        if self.logprobs_mode == "raw":
            return token_logprobs(logits, taken, top=top)
        listed = []
        for row, token in enumerate(taken):
            mask = None if masks is None else masks[row]
            law = _sampler(sequence).law(logits[row], drafted=taken[:row], mask=mask)
            assert not isinstance(law, int), "an id came from a row without a law"
            listed.append(law_logprob(law, token, top=top))
        return listed

    def _close(self, sequence: Sequence) -> None:
        del self._requests[sequence.id]
        for one in self._held.pop(sequence.id, ()):
            self._scheduler.add(one)
        for waiting in self._held.values():
            if sequence in waiting:
                waiting.remove(sequence)
                return
        if self.drafting is not None:
            self.drafting.close(sequence)
        if self.prefix is not None:
            self.prefix.forget(sequence)
        self._scheduler.remove(sequence)


def _num_drafts(
    given: int | Literal["auto"] | None, proposer: DraftProposer[Any] | None
) -> int | Literal["auto"]:
    """What requests that do not say draft, where the proposer may have a say too."""
    gamma = None if proposer is None else proposer.block_gamma
    if gamma is None:
        return 0 if given is None else given
    if not 2 <= gamma <= MAX_NUM_DRAFTS + 1:
        raise ConfigError(
            f"the proposer's block_gamma is {gamma}; allowed is 2 to {MAX_NUM_DRAFTS + 1}"
        )
    if given is not None and given not in (0, gamma - 1):
        raise ConfigError(
            f"num_drafts is {given!r}, but the proposer drafts in blocks of {gamma}, the known "
            f"token included; allowed is {gamma - 1}, or 0 for no drafts"
        )
    return gamma - 1 if given is None else given


def _record(
    batch: Batch,
    drafts: list[Draft],
    verdicts: list[Verdict | None],
    draft_seconds: float,
    seconds: float,
) -> StepRecord:
    """What the policy is told of a step."""
    drafted, accepted, prompt_rows = [], [], 0
    for row, draft, verdict in zip(batch.rows, drafts, verdicts, strict=True):
        if row.reads:
            prompt_rows += row.width
        else:
            drafted.append(draft.num_tokens)
            accepted.append(0 if verdict is None else verdict.num_accepted)
    return StepRecord(
        drafted=drafted,
        accepted=accepted,
        draft_seconds=draft_seconds,
        rest_seconds=seconds - draft_seconds,
        prompt_rows=prompt_rows,
    )


def _sampler(sequence: Sequence) -> Sampler:
    assert sequence.sampler is not None, f"sequence {sequence.id} has no sampler"
    return sequence.sampler


def _more_logits(row: BatchRow) -> int:
    """Rows of the prompt whose next ids' log-probabilities are wanted, the last row left out."""
    if not row.sequence.needs_prompt_rows:
        return 0
    return row.width - 1 if row.emits else row.width


def _first_logits(rows: list[RowInputs]) -> list[int]:
    """Per row, where its verdict's logits begin; those wanted for other purposes are before."""
    starts, end = [], 0
    for row in rows:
        starts.append(end + row.num_more_logits)
        end += row.num_more_logits + row.num_logits
    return starts


def _note_prompt(row: BatchRow, logits: torch.Tensor) -> None:
    """Append the log-probabilities of the prompt's ids that follow a row's positions.

    Args:
        row: of the prompt.
        logits: [L, vocab], its positions' from the first on.
    """
    sequence, params = row.sequence, row.sequence.params
    listed = sequence.prompt_logprobs
    assert listed is not None
    assert params.prompt_logprobs is not None
    # A request that was pre-empted reads anew what it has listed before.
    first, end = len(listed), min(row.first + row.width + 1, sequence.prompt_len)
    ids = sequence.tokens[first:end]
    listed += token_logprobs(logits[first - 1 - row.first :], ids, top=params.prompt_logprobs)


def _drafted(draft: list[int]) -> int:
    """Drafts of a chain, which ends at the first -1."""
    return draft.index(-1) if -1 in draft else len(draft)
