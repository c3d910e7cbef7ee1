"""Values that cross layers, and the errors; knows no tensor at run time.

PacelineError
├── CheckpointError     files, tensors or tokenizer that cannot be served
├── ConfigError         a configuration value outside what is allowed
├── RequestError        one request's input is bad; others are untouched
├── UnsupportedError    understood, but not served by this version
├── GenerationError     one request failed while it ran
└── RankError           ranks that work together differ, or one of them failed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NewType

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from paceline.sampling.grammar import GrammarCursor
    from paceline.sampling.request import Sampler

__all__ = [
    "BlockId",
    "CheckpointError",
    "ConfigError",
    "Draft",
    "DraftRequest",
    "DrafterKv",
    "FinishReason",
    "GenerationError",
    "GenerationResult",
    "Origin",
    "PacelineError",
    "PairKey",
    "Position",
    "RankError",
    "RequestError",
    "Row",
    "SamplingParams",
    "SpeculationStats",
    "StreamChunk",
    "StreamPiece",
    "TokenLogprob",
    "UnsupportedError",
    "Usage",
    "Verdict",
]

Position = NewType("Position", int)
"""Absolute place of a token in its sequence, from 0; also its rotary position."""
PairKey = NewType("PairKey", int)
"""Names the pair (hidden of position k, token of position k + 1) a drafter row is made from."""
Row = NewType("Row", int)
"""Index of storage; never a position."""
BlockId = NewType("BlockId", int)
"""A block of the compressed pools; block 0 is never handed out."""


class PacelineError(Exception):
    """Base of every error a caller can meet."""


class CheckpointError(PacelineError):
    """Files, tensors or tokenizer that cannot be served as they are."""


class ConfigError(PacelineError, ValueError):
    """A configuration value outside what is allowed."""


class RequestError(PacelineError, ValueError):
    """A request that cannot be admitted; costs other requests nothing."""


class UnsupportedError(PacelineError, NotImplementedError):
    """Something understood that this version does not serve."""


class GenerationError(PacelineError, RuntimeError):
    """A request that failed while it ran, for example on non-finite logits."""


class RankError(PacelineError, RuntimeError):
    """A rank failed, wanted something else than the others, died, or did not answer in time."""


class FinishReason(StrEnum):
    """Why a sequence ended; the values are OpenAI's and vLLM's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded; the field names are vLLM's.

    Decoding is greedy by default (`temperature` 0). Every field is checked when the object is made;
    what needs the vocabulary is checked when the request is added.

    Attributes:
        max_tokens: most tokens to emit, at least 1.
        temperature: 0 is greedy, as is anything under 1e-5; no upper bound.
        top_p: mass of the most probable ids to draw from, above 0 and at most 1.
        top_k: most probable ids to draw from; 0 and -1 are all.
        min_p: ids below this share of the largest probability are not drawn, 0 to 1.
        repetition_penalty: 1e-6 to 1e6; over 1 makes ids of prompt and output less likely.
        presence_penalty: taken from the logit of ids of the output, -2 to 2.
        frequency_penalty: taken as often as the id is in the output, -2 to 2.
        logit_bias: id to what is added to its logit, -100 to 100.
        allowed_token_ids: the only ids that may be emitted, or None.
        bad_words: texts that may not be emitted, as the tokenizer spells each by itself and behind
            a space; where it joins a word with what stands before, that spelling is not found.
        seed: of the noise, 0 to 2^64 - 1; the same seed gives the same tokens, whatever is drafted
            and whatever else runs. None: no two requests draw the same.
        n: answers to give, each with noise of its own; several need a temperature.
        min_tokens: no end-of-sequence or stop id comes before so many tokens.
        stop: texts that end the answer, checked before its length; none ends one of `min_tokens`
            tokens or fewer.
        stop_token_ids: further ids that end the sequence; the id is kept in `token_ids`.
        ignore_eos: go on past the end-of-sequence token.
        include_stop_str_in_output: keep the stop text in the answer.
        logprobs: log-probabilities of each token and of so many most probable ids, 0 to 20; of the
            model's own logits, before anything here is applied, unless `LLM(logprobs_mode=)` says
            otherwise.
        prompt_logprobs: the same for the prompt, which is then computed as a whole, without the
            cache of prefixes.
        json_schema: JSON schema the answer follows, as text or as a mapping.
        json_object: whether the answer is a JSON object.
        regex: regular expression the answer matches.
        grammar: EBNF grammar the answer follows.
        choice: texts one of which is the answer.
        max_reasoning_tokens: most tokens between the markers of reasoning, 0 or more; then the
            end marker comes. None: no limit.
        num_drafts: drafts per step for this request; None takes the engine's, 0 turns drafting off,
            "auto" lets the engine choose.

    Raises:
        RequestError: a value is out of range, or two contradict each other (says what was given and
            what is allowed).
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] | None = None
    seed: int | None = None
    n: int = 1
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    max_reasoning_tokens: int | None = None
    num_drafts: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_ids()
        self._check_texts()
        self._check_together()

    def _check_numbers(self) -> None:
        _require_int("max_tokens", self.max_tokens, low=1)
        _require_int("min_tokens", self.min_tokens, low=0)
        _require_int("n", self.n, low=1)
        _require_int("top_k", self.top_k, low=-1)
        if self.seed is not None:
            _require_int("seed", self.seed, low=0, high=2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        if self.max_reasoning_tokens is not None:
            _require_int("max_reasoning_tokens", self.max_reasoning_tokens, low=0)
        if self.num_drafts not in (None, "auto"):
            if isinstance(self.num_drafts, str):
                raise RequestError(
                    f"num_drafts is {self.num_drafts!r}; allowed is an integer 0 to "
                    f"{MAX_NUM_DRAFTS}, or 'auto'"
                )
            _require_int("num_drafts", self.num_drafts, low=0, high=MAX_NUM_DRAFTS)
        _require_number("temperature", self.temperature, low=0)
        _require_number("top_p", self.top_p, above=0, high=1)
        _require_number("min_p", self.min_p, low=0, high=1)
        # Farther from 1 than any use has, and near enough that no logit overflows.
        _require_number("repetition_penalty", self.repetition_penalty, low=1e-6, high=1e6)
        _require_number("presence_penalty", self.presence_penalty, low=-2, high=2)
        _require_number("frequency_penalty", self.frequency_penalty, low=-2, high=2)
        for name in ("ignore_eos", "include_stop_str_in_output", "json_object"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; allowed is True or False")

    def _check_ids(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids is None and name == "allowed_token_ids":
                continue
            if not isinstance(ids, (list, tuple)):
                raise RequestError(f"{name} is {ids!r}; allowed is a list of ids")
            for token in ids:
                _require_int(name, token, low=0)
            object.__setattr__(self, name, tuple(ids))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty; allowed is at least one id, or None")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise RequestError(
                    f"logit_bias is {self.logit_bias!r}; allowed is a mapping of ids to numbers"
                )
            for token, bias in self.logit_bias.items():
                _require_int("logit_bias", token, low=0)
                _require_number(f"logit_bias[{token}]", bias, low=-100, high=100)

    def _check_texts(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "bad_words", "choice"):
            texts = getattr(self, name)
            if texts is None:
                continue
            if not isinstance(texts, (list, tuple)) or not all(
                isinstance(text, str) and text for text in texts
            ):
                raise RequestError(f"{name} is {texts!r}; allowed is a list of non-empty texts")
            object.__setattr__(self, name, tuple(texts))
        if self.choice is not None and not self.choice:
            raise RequestError("choice is empty; allowed is at least one text, or None")
        for name, kinds in (
            ("json_schema", (str, dict)),
            ("regex", (str,)),
            ("grammar", (str,)),
        ):
            given = getattr(self, name)
            if given is not None and not isinstance(given, kinds):
                what = "a text or a mapping" if dict in kinds else "a text"
                raise RequestError(f"{name} is {given!r}; allowed is {what}")

    def _check_together(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; allowed is at most max_tokens, {self.max_tokens}"
            )
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            raise RequestError(
                f"n is {self.n} at temperature {self.temperature}, where all answers are the same; "
                "allowed is 1, or a temperature above 0"
            )
        shapes = [
            name
            for name in ("json_schema", "json_object", "regex", "grammar", "choice")
            if getattr(self, name) not in (None, False)
        ]
        if len(shapes) > 1:
            raise RequestError(f"{' and '.join(shapes)} are given; allowed is one of them")
        if self.include_stop_str_in_output and not self.stop:
            raise RequestError(
                "include_stop_str_in_output is True without stop; allowed is False, or a stop text"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """Build from a mapping and refuse unknown names by name.

        Raises:
            RequestError: a key is no field (lists the fields there are).
        """
        if "best_of" in values:
            raise RequestError(
                f"best_of is {values['best_of']!r}; it is not served, since it would hide tokens "
                "that were computed; allowed is n, which returns every answer"
            )
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise RequestError(
                f"unknown sampling parameters {', '.join(unknown)}; known are "
                f"{', '.join(sorted(known))}"
            )
        return cls(**values)


MAX_NUM_DRAFTS = 8
"""Most drafts a step may verify; ring slack and kernels are sized for it."""

GREEDY_BELOW = 1e-5
"""A temperature under this decodes greedily, as in vLLM."""

MAX_LOGPROBS = 20
"""Most log-probabilities listed per token."""


def _require_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    allowed = f"an integer of at least {low}" if high is None else f"an integer {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}; allowed is {allowed}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name} is {value}; allowed is {allowed}")


def _require_number(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
) -> None:
    allowed = f"a number of at least {low}" if above == -math.inf else f"a number above {above}"
    if high != math.inf:
        allowed += f" and at most {high}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} is {value!r}; allowed is {allowed}")
    if not (math.isfinite(value) and low <= value <= high and value > above):
        raise RequestError(f"{name} is {value}; allowed is {allowed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """How likely one token was.

    Attributes:
        id: the token.
        logprob: its log-probability; -inf where it was forbidden.
        rank: its place among all ids, 1 the most probable, the lower id first among equals.
        top: (id, log-probability) of the most probable ids, most probable first; ids of probability
            0 are left out.
    """

    id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinities: None stands for them."""
        return {
            "id": self.id,
            "logprob": self.logprob if math.isfinite(self.logprob) else None,
            "rank": self.rank,
            "top": [list(pair) for pair in self.top],
        }


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens a request took in and gave out.

    Attributes:
        prompt_tokens: tokens of the prompt, cached ones included.
        completion_tokens: tokens emitted.
        cached_tokens: tokens of the prompt that an earlier request had computed.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(kw_only=True)
class SpeculationStats:
    """What drafting did for one sequence, or summed over several.

    Counted before the answer is cut: a step that verifies d drafts and accepts a of them counts
    d drafted and a accepted, also where a stop token or a limit then cuts the block.

    Attributes:
        num_steps: target forwards that emitted tokens (the prompt's last chunk included).
        num_draft_steps: those that verified at least one draft.
        num_drafted: drafts verified.
        num_accepted: drafts accepted.
        drafted_at: [j] steps that verified a draft at position j (0 is the first draft).
        accepted_at: [j] steps that accepted the draft at position j.
        reached_at: [j] steps that drafted at position j and accepted all before it.
        drafted_by: drafts verified by name of the drafter.
        accepted_by: drafts accepted by name of the drafter.
        num_emitted: tokens emitted by decode steps (the one of the prompt's forward excluded).
        num_decode_steps: target forwards after the prompt's.
    """

    num_steps: int = 0
    num_draft_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_decode_steps: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    reached_at: list[int] = field(default_factory=list)
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)

    def record(self, *, num_drafted: int, num_accepted: int, source: str | None = None) -> None:
        """Count one verified step; `source` names the drafter, None where nobody asks."""
        self.num_steps += 1
        self.num_decode_steps += 1
        self.num_emitted += num_accepted + 1
        if num_drafted:
            self.num_draft_steps += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        while len(self.drafted_at) < num_drafted:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
            self.reached_at.append(0)
        for j in range(num_drafted):
            self.drafted_at[j] += 1
        for j in range(min(num_accepted + 1, num_drafted)):
            self.reached_at[j] += 1
        for j in range(num_accepted):
            self.accepted_at[j] += 1
        if source is not None and num_drafted:
            self.drafted_by[source] = self.drafted_by.get(source, 0) + num_drafted
            self.accepted_by[source] = self.accepted_by.get(source, 0) + num_accepted

    def add(self, other: SpeculationStats) -> None:
        """Add another's counts to these."""
        for name in (
            "num_steps",
            "num_draft_steps",
            "num_drafted",
            "num_accepted",
            "num_emitted",
            "num_decode_steps",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in (
            (self.drafted_at, other.drafted_at),
            (self.accepted_at, other.accepted_at),
            (self.reached_at, other.reached_at),
        ):
            mine.extend([0] * (len(theirs) - len(mine)))
            for j, count in enumerate(theirs):
                mine[j] += count
        for named, others in (
            (self.drafted_by, other.drafted_by),
            (self.accepted_by, other.accepted_by),
        ):
            for source, count in others.items():
                named[source] = named.get(source, 0) + count

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted; 0 where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a drafted step yields, the target's own included: 1 + accepted / drafted steps."""
        return 1.0 + self.num_accepted / self.num_draft_steps if self.num_draft_steps else 1.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """[j] accepted at j over steps that drafted at j (unconditional)."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def conditional_acceptance_by_position(self) -> list[float]:
        """[j] accepted at j over steps that drafted at j and accepted all before it."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted_at, self.reached_at, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Counts and ratios, for JSON."""
        return {
            "num_steps": self.num_steps,
            "num_decode_steps": self.num_decode_steps,
            "num_draft_steps": self.num_draft_steps,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
            "num_emitted": self.num_emitted,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_by_position": self.acceptance_by_position,
            "conditional_acceptance_by_position": self.conditional_acceptance_by_position,
            "drafted_by": dict(self.drafted_by),
            "accepted_by": dict(self.accepted_by),
        }


@dataclass(frozen=True, slots=True)
class Origin:
    """How a token came to be emitted.

    Attributes:
        kind: "accepted", a draft that the target accepted; "corrected", the target's own token in
            place of a draft it refused; "bonus", its own token behind drafts that were all
            accepted; "target", its own token in a step that verified no drafts, as behind the
            prompt; "forced", the only token the grammar allowed there, drafted or not.
        position: its place among the drafts of its step, from 1; None for a token that was not
            drafted.
    """

    kind: Literal["accepted", "corrected", "bonus", "target", "forced"]
    position: int | None = None

    @property
    def is_draft(self) -> bool:
        """Whether it was drafted and accepted."""
        return self.position is not None


class StreamPiece(NamedTuple):
    """The text that became certain with one token.

    Attributes:
        text: never half a character; empty where the token has none, or needs the next one for it.
        origin: of the token.
    """

    text: str
    origin: Origin


@dataclass(kw_only=True)
class GenerationResult:
    """One finished answer.

    Attributes:
        text: decoded completion, special tokens removed; it ends before the stop text that ended
            it, or with it where that was asked for.
        token_ids: every emitted id, the stop id included.
        finish_reason: why it ended.
        usage: token counts; `completion_tokens == len(token_ids)`.
        speculation: what drafting did.
        origins: per emitted token, how it came to be.
        prompt_token_ids: the prompt as ids.
        error: what went wrong where `finish_reason` is "error".
        sample_index: which of the prompt's `n` answers it is, from 0.
        stop_reason: the stop text or the id that ended it where `finish_reason` is "stop".
        logprobs: one entry per id of `token_ids`, or None where they were not asked for.
        prompt_logprobs: one per id of the prompt, None for the first, which nothing precedes; or
            None where they were not asked for, or the request failed before they were there.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    speculation: SpeculationStats
    origins: list[Origin]
    prompt_token_ids: list[int]
    error: str | None = None
    sample_index: int = 0
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def drafted(self) -> list[bool]:
        """Per emitted token, whether it was an accepted draft."""
        return [origin.is_draft for origin in self.origins]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `paceline generate --json`; field names are those of this class."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": str(self.finish_reason),
            "usage": {
                "prompt_tokens": self.usage.prompt_tokens,
                "completion_tokens": self.usage.completion_tokens,
                "total_tokens": self.usage.total_tokens,
                "cached_tokens": self.usage.cached_tokens,
            },
            "speculation": self.speculation.to_dict(),
            "drafted": self.drafted,
            "origins": [[origin.kind, origin.position] for origin in self.origins],
            "error": self.error,
            "sample_index": self.sample_index,
            "stop_reason": self.stop_reason,
            "logprobs": _listed(self.logprobs),
            "prompt_logprobs": _listed(self.prompt_logprobs),
        }


def _listed(given: Sequence[TokenLogprob | None] | None) -> list[dict[str, Any] | None] | None:
    if given is None:
        return None
    return [None if one is None else one.to_dict() for one in given]


@dataclass(frozen=True, kw_only=True)
class StreamChunk:
    """What one step added to one request.

    Attributes:
        index: which prompt of the call.
        text: text that became certain with this step (never half a character).
        token_ids: ids emitted by this step.
        origins: per id, how it came to be.
        pieces: one per id, and none without a tokenizer; they join to `text`. Text that was held
            back when the request failed without a further id is a piece of its own.
        result: the finished request, in its last chunk only.
        sample_index: which of the prompt's `n` answers.
        logprobs: one entry per id, or None where they were not asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    origins: list[Origin]
    pieces: list[StreamPiece]
    result: GenerationResult | None = None
    sample_index: int = 0
    logprobs: list[TokenLogprob] | None = None

    @property
    def drafted(self) -> list[bool]:
        """Per id, whether it was an accepted draft."""
        return [origin.is_draft for origin in self.origins]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRequest:
    """What a proposer is told about one sequence.

    Attributes:
        last_token: id sampled last; its target cache row is not written yet.
        position: its absolute position P.
        target_hidden: [hc_mult, hidden], the target's streams of position P - 1, before collapse
            and before the final norm. Dead at the next target step unless copied.
        num_drafts: most drafts wanted, at least 1.
        history: ids committed so far, the last one included, for drafters that look things up; the
            proposer's own list of them, which the engine extends from step to step. One that is
            changed is made anew, and counts as a failure.
        draft_embed_target: [hidden] buffer to receive the embedding of the first draft, whose id
            then stays on the device, or None.
        grammar_bitmask: int32 words, bit set = allowed, for the first draft only, or None.
        grammar: where the sequence stands in its grammar, or None. A proposer that walks it masks
            every draft by those before it, and leaves it where it found it; one that does not is
            cut at its first draft that is not allowed.
        target_hidden_stack: hiddens of several layers for drafters that read them, or None.
        sampler: what picks the request's tokens from logits, to be looked at only: a drafter that
            picks its drafts with it, from its own logits, is accepted where the target agrees.
            None: the largest logit is picked.
        draws: drafts are to be drawn (`Sampler.draw`) and their laws kept in `Draft.laws`, since
            they are verified by rejection. Otherwise they are picked (`Sampler.pick`). What was
            chosen without chance has no law in either case.
    """

    last_token: int
    position: int
    target_hidden: torch.Tensor
    num_drafts: int
    history: list[int]
    draft_embed_target: torch.Tensor | None = None
    grammar_bitmask: torch.Tensor | None = None
    grammar: GrammarCursor | None = None
    target_hidden_stack: torch.Tensor | None = None
    sampler: Sampler | None = None
    draws: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """Tokens proposed for one sequence; may be shorter than asked, and empty.

    Attributes:
        tokens: drafted ids in order; empty where they were left on the device.
        confidence: log-probability of each under the drafter, or None where not measured.
        device_tokens: [n] int64, the ids where they were left on the device, or None. From the
            first -1 on nothing was drafted; such an entry is verified as a draft never accepted.
            Dead at the proposer's next call unless copied.
        source: name of the drafter among several that made it, for counting; None: there is one.
        laws: per id the law it was drawn from, [vocab] fp64 summing to 1, or None for an id chosen
            without chance. None: all were.
    """

    tokens: list[int]
    confidence: list[float] | None = None
    device_tokens: torch.Tensor | None = None
    source: str | None = None
    laws: list[npt.NDArray[np.float64] | None] | None = None

    @property
    def num_tokens(self) -> int:
        """Drafts to verify, wherever their ids are."""
        return len(self.tokens) if self.device_tokens is None else self.device_tokens.shape[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """All that verification says of one sequence.

    Attributes:
        num_accepted: leading drafts accepted.
        next_token: the target's own token after them.
        error: why no token can be given (non-finite logits), or None.
    """

    num_accepted: int
    next_token: int
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterKv:
    """Drafter rows moved out of a state: exactly one owner, or freed.

    Attributes:
        blocks: storage the rows live in.
        rows: rows held; the oldest has key last_pair_key - rows + 1.
        last_pair_key: key of the newest row, or None.
        num_bytes: memory of the rows, shared or not.
    """

    blocks: list[int]
    rows: int
    last_pair_key: int | None
    num_bytes: int = 0
