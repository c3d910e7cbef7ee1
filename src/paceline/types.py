"""Values that cross layers, and the errors; knows no tensor at run time.

PacelineError
├── CheckpointError     files, tensors or tokenizer that cannot be served
├── ConfigError         a configuration value outside what is allowed
├── RequestError        one request's input is bad; others are untouched
├── UnsupportedError    understood, but not served by this version
└── GenerationError     one request failed while it ran
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NewType

if TYPE_CHECKING:
    import torch

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
    "PacelineError",
    "PairKey",
    "Position",
    "RequestError",
    "Row",
    "SamplingParams",
    "SpeculationStats",
    "StreamChunk",
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


class FinishReason(StrEnum):
    """Why a sequence ended; the values are OpenAI's and vLLM's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


_NOT_SERVED: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "n": 1,
    "stop": None,
    "logprobs": None,
    "prompt_logprobs": None,
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded; the field names are vLLM's.

    This version decodes greedily: `temperature` is 0 by default and any other value is refused.
    Fields that are listed by vLLM and not served yet may be given their neutral value only.

    Attributes:
        max_tokens: most tokens to emit, at least 1.
        temperature: 0.0, greedy.
        seed: kept for compatibility; greedy decoding draws no random number.
        ignore_eos: go on past the end-of-sequence token.
        stop_token_ids: further ids that end the sequence; the id is kept in `token_ids`.
        min_tokens: no end-of-sequence or stop id ends the sequence before so many tokens.
        num_drafts: drafts per step for this request; None takes the engine's, 0 turns drafting off.

    Raises:
        RequestError: a value is out of range (says what was given and what is allowed).
        UnsupportedError: a field of vLLM's that this version does not serve is not neutral.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] | list[int] = ()
    min_tokens: int = 0
    num_drafts: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    n: int = 1
    stop: str | list[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _require_int("max_tokens", self.max_tokens, low=1)
        _require_int("min_tokens", self.min_tokens, low=0)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; allowed is at most max_tokens, {self.max_tokens}"
            )
        if self.num_drafts is not None:
            _require_int("num_drafts", self.num_drafts, low=0, high=MAX_NUM_DRAFTS)
        if self.seed is not None:
            _require_int("seed", self.seed, low=0)
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, (int, float)):
            raise RequestError(f"temperature is {self.temperature!r}; allowed is a number")
        if self.temperature != 0:
            raise UnsupportedError(
                f"temperature is {self.temperature}; this version decodes greedily, allowed is 0"
            )
        for token in self.stop_token_ids:
            _require_int("stop_token_ids", token, low=0)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, neutral in _NOT_SERVED.items():
            given = getattr(self, name)
            if given != neutral and not (name == "top_k" and given == -1):
                raise UnsupportedError(
                    f"{name} is {given!r}; this version serves only {name}={neutral!r}"
                )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """Build from a mapping and refuse unknown names by name.

        Raises:
            RequestError: a key is no field (lists the fields there are).
        """
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


def _require_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    allowed = f"an integer of at least {low}" if high is None else f"an integer {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}; allowed is {allowed}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name} is {value}; allowed is {allowed}")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens a request took in and gave out."""

    prompt_tokens: int
    completion_tokens: int

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

    def record(self, *, num_drafted: int, num_accepted: int) -> None:
        """Count one verified step."""
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
        for j in range(num_drafted):
            self.drafted_at[j] += 1
        for j in range(num_accepted):
            self.accepted_at[j] += 1

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
        ):
            mine.extend([0] * (len(theirs) - len(mine)))
            for j, count in enumerate(theirs):
                mine[j] += count

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
        """[j] accepted at j over steps that drafted at j and accepted all before it.

        Exact where every drafted step has the same width; with mixed widths the denominator is the
        accepted count of the position before, bounded by the drafted count of this one.
        """
        out = []
        for j, accepted in enumerate(self.accepted_at):
            before = self.drafted_at[0] if j == 0 else self.accepted_at[j - 1]
            reach = min(before, self.drafted_at[j])
            out.append(accepted / reach if reach else 0.0)
        return out

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
        }


@dataclass(kw_only=True)
class GenerationResult:
    """One finished request.

    Attributes:
        text: decoded completion, special tokens removed.
        token_ids: every emitted id, the stop id included.
        finish_reason: why it ended.
        usage: token counts; `completion_tokens == len(token_ids)`.
        speculation: what drafting did.
        drafted: per emitted token, whether it was an accepted draft.
        prompt_token_ids: the prompt as ids.
        error: what went wrong where `finish_reason` is "error".
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    speculation: SpeculationStats
    drafted: list[bool]
    prompt_token_ids: list[int]
    error: str | None = None

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
            },
            "speculation": self.speculation.to_dict(),
            "drafted": self.drafted,
            "error": self.error,
        }


@dataclass(frozen=True, kw_only=True)
class StreamChunk:
    """What one step added to one request.

    Attributes:
        index: which prompt of the call.
        text: text that became certain with this step (never half a character).
        token_ids: ids emitted by this step.
        drafted: per id, whether it was an accepted draft.
        pieces: (text, drafted) pieces that join to `text`, for display.
        result: the finished request, in its last chunk only.
    """

    index: int
    text: str
    token_ids: list[int]
    drafted: list[bool]
    pieces: list[tuple[str, bool]]
    result: GenerationResult | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRequest:
    """What a proposer is told about one sequence.

    Attributes:
        last_token: id sampled last; its target cache row is not written yet.
        position: its absolute position P.
        target_hidden: [hc_mult, hidden], the target's streams of position P - 1, before collapse
            and before the final norm. Dead at the next target step unless copied.
        num_drafts: most drafts wanted, at least 1.
        history: ids committed so far, the last one included, for drafters that look things up;
            owned by the engine, not to be changed.
        draft_embed_target: [hidden] buffer to receive the embedding of the first draft, whose id
            then stays on the device, or None.
        grammar_bitmask: int32 words, bit set = allowed, for the first draft only, or None.
        target_hidden_stack: hiddens of several layers for drafters that read them, or None.
    """

    last_token: int
    position: int
    target_hidden: torch.Tensor
    num_drafts: int
    history: list[int]
    draft_embed_target: torch.Tensor | None = None
    grammar_bitmask: torch.Tensor | None = None
    target_hidden_stack: torch.Tensor | None = None


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
    """

    tokens: list[int]
    confidence: list[float] | None = None
    device_tokens: torch.Tensor | None = None
    source: str | None = None

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
        rows: rows held.
        last_pair_key: key of the newest row, or None.
    """

    blocks: list[int]
    rows: int
    last_pair_key: int | None
