"""Structured output: what a request may say next, walked token by token with a way back.

A `GrammarSpec` says what is wanted, `grammar_compiler` makes a `Grammar` of it once, and every
sequence walks a `GrammarCursor` of its own. Which ids are allowed is a pure function of the ids
walked, so a row's mask is the same whether its ids were drafted or emitted, and whatever was
drafted and taken back before. The libraries behind it are in `grammar_llguidance` and
`grammar_xgrammar`; they are used through `Matcher` alone.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.types import RequestError, SamplingParams

__all__ = [
    "AfterMarker",
    "Grammar",
    "GrammarCursor",
    "GrammarSpec",
    "Kind",
    "Library",
    "Matcher",
    "TokenSource",
    "Words",
    "only_id",
    "walk",
    "words_of",
]

Words: TypeAlias = npt.NDArray[np.int32]
"""[ceil(vocab / 32)] int32: id i is bit i % 32 of word i // 32, set = allowed."""

Kind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "tool_calls"]

MAX_MULTIPLE_OF = 100_000
"""Largest `multipleOf` of a schema: the automaton that divides has as many states."""

_KEPT_PLACES = 32
"""Places whose masks are kept behind the newest: more than a step can verify."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as it was asked for; equal specs share what is compiled.

    Attributes:
        kind: what `source` is.
        source: a JSON schema, a regular expression, a grammar in Lark's or GBNF's notation, or a
            JSON list of texts or tools; empty for any JSON object.
    """

    kind: Kind
    source: str = ""

    @classmethod
    def of(cls, params: SamplingParams) -> GrammarSpec | None:
        """Return what a request's parameters ask for, or None where they ask for no grammar.

        Raises:
            RequestError: the JSON schema is no JSON, is no schema, or divides by large numbers.
        """
        if params.json_schema is not None:
            return cls("json_schema", _schema(params.json_schema))
        if params.json_object:
            return cls("json_object")
        if params.regex is not None:
            return cls("regex", params.regex)
        if params.grammar is not None:
            return cls("grammar", params.grammar)
        if params.choice is not None:
            return cls("choice", json.dumps(list(params.choice)))
        return None

    @classmethod
    def tool_calls(
        cls,
        tools: Sequence[Mapping[str, Any]],
        *,
        required: bool = False,
        at_once: bool = False,
        form: GrammarSpec | None = None,
    ) -> GrammarSpec:
        """Return the grammar of an answer that may call tools, in DeepSeek-V4's markup.

        Free text, then at most one block of calls, with which the answer ends. Arguments come in
        the order of the schema and follow their own schemas. With a form there is no free text:
        the answer is a block of calls, or what has the form.

        Args:
            tools: functions in OpenAI's form, at least one.
            required: whether a block must come.
            at_once: whether it must come without text before it.
            form: of an answer that calls no tool, of kind "json_schema" or "json_object"; of no
                effect where a block is required.

        Raises:
            RequestError: a tool is no function with a name, or its schema is no JSON, or the form
                is of another kind.
        """
        functions: list[dict[str, Any]] = []
        for number, tool in enumerate(tools):
            function = tool.get("function") if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
                raise RequestError(
                    f"tool {number} is {tool!r:.80}; allowed is a mapping with a named function"
                )
            if name in (known["name"] for known in functions):
                raise RequestError(f"the tool {name!r} is given twice; allowed is once")
            schema = function.get("parameters") or {"type": "object", "properties": {}}
            functions.append({"name": name, "parameters": json.loads(_schema(schema))})
        if not functions:
            raise RequestError("no tool is given; a grammar of tool calls needs at least one")
        required = required or at_once
        wanted: dict[str, Any] = {"tools": functions, "required": required, "at_once": at_once}
        if form is not None and not required:
            if form.kind not in ("json_schema", "json_object"):
                raise RequestError(
                    f"tools are given with a {form.kind}; allowed beside them are a JSON schema "
                    "and json_object"
                )
            wanted["form"] = json.loads(form.source or _ANY_OBJECT)
        return cls("tool_calls", json.dumps(wanted))


_ANY_OBJECT = '{"type":"object"}'


def _schema(given: str | Mapping[str, Any]) -> str:
    """A schema as JSON of one spelling, its keys in the order they came in."""
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError) as error:
        raise RequestError(f"json_schema is no JSON: {error}") from None
    except RecursionError:
        raise RequestError(
            "json_schema nests too deep; allowed is what JSON parsers take"
        ) from None
    if not isinstance(schema, Mapping):
        raise RequestError(f"json_schema is {text:.80}; allowed is a JSON object")
    _check_divisors(schema)
    return text


def _check_divisors(schema: object) -> None:
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            divisor = part.get("multipleOf")
            if isinstance(divisor, (int, float)) and divisor > MAX_MULTIPLE_OF:
                raise RequestError(
                    f"json_schema has a multipleOf of {divisor}; allowed is at most "
                    f"{MAX_MULTIPLE_OF}"
                )
            pending += part.values()
        elif isinstance(part, list):
            pending += part


class TokenSource(Protocol):
    """What a grammar has to know of a tokenizer; `paceline.text.Tokenizer` is one."""

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids that stand for a marker and are never made of ordinary text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; none for special and unknown ids."""

    def encode(self, text: str, *, add_bos: bool = True, allow_special: bool = False) -> list[int]:
        """Ids of a text."""

    def marker_id(self, marker: str) -> int | None:
        """Id of an added token, or None."""


class Matcher(Protocol):
    """A library's automaton, standing behind the ids it took."""

    @property
    def error(self) -> str | None:
        """Why it can go on no more, or None."""

    def words(self) -> Words:
        """Ids allowed here, in memory that nobody else has.

        An end id is allowed where the text may end; all are 0 where nothing can follow.
        """

    def take(self, token: int) -> bool:
        """Walk over an id that is allowed."""

    def back(self, num_tokens: int) -> bool:
        """Forget the last ids; False where that fails, and the matcher is of no use then."""

    def fork(self) -> Matcher:
        """Return another that stands at the same place."""


class Library(Protocol):
    """A grammar library with a vocabulary."""

    name: str

    def matcher(self, spec: GrammarSpec) -> Matcher:
        """Compile; may take long, and may be called from any thread.

        Raises:
            RequestError: the grammar is wrong, too large, or of a kind the library does not have.
        """


class GrammarCursor(ABC):
    """Where one sequence stands in its grammar.

    Memory grows by one id per token walked; masks are kept for the last places only. For one thread
    at a time.
    """

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens walked."""

    @property
    @abstractmethod
    def error(self) -> str | None:
        """Why nothing is allowed, where that is a failure and not the grammar."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether an end id was walked over, or nothing but an end id may come."""

    @abstractmethod
    def mask(self) -> Words:
        """Return the ids allowed here; read-only. All 0: nothing can follow."""

    @abstractmethod
    def advance(self, token: int) -> bool:
        """Walk over an id; False, with nothing changed, where the mask forbids it."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens walked, end ids included.

        Raises:
            ValueError: fewer were walked; nothing has changed then.
        """

    @abstractmethod
    def copy(self) -> GrammarCursor:
        """Return another one that stands at the same place and walks on by itself."""

    def allows(self, token: int) -> bool:
        """Whether the mask has an id."""
        words = self.mask()
        return 0 <= token < 32 * len(words) and _has(words, token)

    def forced(self, limit: int) -> list[int]:
        """Return the ids that must come, as long as it is one each time and not the end.

        Args:
            limit: most ids to return.
        """
        run: list[int] = []
        try:
            while len(run) < limit and not self.is_finished:
                token = only_id(self.mask())
                if token is None or not self.advance(token):
                    break
                run.append(token)
        finally:
            self.rollback(len(run))
        return run


def _has(words: Words, token: int) -> bool:
    return bool(int(words[token // 32]) >> token % 32 & 1)


def only_id(words: Words) -> int | None:
    """The id of a mask that has just one."""
    places = np.flatnonzero(words)
    if len(places) != 1:
        return None
    word = int(words[places[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else 32 * int(places[0]) + word.bit_length() - 1


def walk(cursor: GrammarCursor, drafts: Sequence[int]) -> list[Words]:
    """Masks of the rows that drafts are verified in.

    Args:
        cursor: behind all that is committed; left there.
        drafts: ids in order.

    Returns:
        The mask of the row before each draft that is legal after its predecessors, and of the row
        behind the last of them: one more than there are drafts to verify. Drafts past these have no
        row; they cannot be accepted.
    """
    masks = [cursor.mask()]
    try:
        for draft in drafts:
            if not cursor.advance(draft):
                break
            masks.append(cursor.mask())
    finally:
        cursor.rollback(len(masks) - 1)
    return masks


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar; shared, and never changed.

    Attributes:
        spec: what it was made of.
        start: the library's automaton before the first id.
        vocab_size: ids of a mask.
        usable: the ids there are tokens for.
        ends: the ids that end a text.
    """

    spec: GrammarSpec
    start: Matcher
    vocab_size: int
    usable: Words
    ends: Words

    def cursor(self) -> GrammarCursor:
        """Return a cursor before the first id."""
        return _MatcherCursor(self)


class _Place(NamedTuple):
    """What a place allows: its mask, whether that has end ids only, and its id if it has one."""

    words: Words
    ends: bool
    only: int | None


class _MatcherCursor(GrammarCursor):
    """Walks a library's matcher, which follows where a mask is not known yet and only there.

    So walking the same drafts to draft, to verify and to commit costs the library one way. A
    matcher that failed is made anew where the walk went back.
    """

    __slots__ = (
        "_agreed",
        "_ended",
        "_failure",
        "_grammar",
        "_matcher",
        "_places",
        "_taken",
        "_tokens",
        "_undone",
    )

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._tokens: list[int] = []
        # Place of the first end id walked over; the matcher does not hear of those.
        self._ended: int | None = None
        self._matcher = grammar.start.fork()
        # Ids the matcher took, of which the first `_agreed` are the walk's.
        self._taken: list[int] = []
        self._agreed = 0
        # By number of ids before them: the last places, and those ahead that were taken back.
        self._places: dict[int, _Place] = {}
        # Ids taken back, the next one last: what is known ahead holds as long as they come again.
        self._undone: list[int] = []
        # Where the library could go on no more, and why.
        self._failure: tuple[int, str] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def error(self) -> str | None:
        at, reason = self._failure or (-1, None)
        return reason if at == len(self._tokens) else None

    @property
    def is_finished(self) -> bool:
        return self._ended is not None or self._place().ends

    def mask(self) -> Words:
        return self._place().words

    def _place(self) -> _Place:
        at = len(self._tokens)
        known = self._places.get(at)
        if known is None:
            ends = self._grammar.ends
            words = ends if self._ended is not None else self._computed()
            only = only_id(words)
            known = _Place(words, bool(words.any()) and not (words & ~ends).any(), only)
            self._places[at] = known
        return known

    def _computed(self) -> Words:
        at = len(self._tokens)
        words = self._matcher.words() if self._follow() else np.zeros_like(self._grammar.ends)
        if self._failure is None and self._matcher.error is not None:
            self._failure = at, self._matcher.error
        words &= self._grammar.usable
        words.flags.writeable = False
        return words

    def _follow(self) -> bool:
        """Bring the matcher here; False where it cannot come."""
        behind = len(self._taken) - self._agreed
        if self._matcher.error is not None or (behind and not self._matcher.back(behind)):
            self._matcher = self._grammar.start.fork()
            self._agreed = 0
        del self._taken[self._agreed :]
        for token in self._tokens[self._agreed :]:
            if not self._matcher.take(token):
                reason = self._matcher.error or "it does not take what it allowed"
                self._failure = len(self._tokens), reason
                return False
            self._taken.append(token)
        self._agreed = len(self._taken)
        return True

    def advance(self, token: int) -> bool:
        if not self.allows(token):
            return False
        at = len(self._tokens)
        if self._ended is None and _has(self._grammar.ends, token):
            self._ended = at
        elif self._agreed == at < len(self._taken) and self._taken[at] == token:
            self._agreed += 1
        if self._undone and self._undone.pop() != token:
            self._undone.clear()
            self._places = {place: one for place, one in self._places.items() if place <= at}
            self._failure = None
        self._tokens.append(token)
        self._places.pop(at - _KEPT_PLACES, None)
        return True

    def rollback(self, num_tokens: int) -> None:
        walked = len(self._tokens)
        if not 0 <= num_tokens <= walked:
            raise ValueError(f"{num_tokens} tokens to go back; allowed are 0 to {walked}")
        left = walked - num_tokens
        if self._ended is not None and self._ended >= left:
            self._ended = None
        self._agreed = min(self._agreed, left)
        self._undone += reversed(self._tokens[left:])
        del self._tokens[left:]

    def forced(self, limit: int) -> list[int]:
        run: list[int] = []
        while len(run) < limit and (token := self._place().only) is not None:
            if _has(self._grammar.ends, token):
                break
            self.advance(token)
            run.append(token)
        self.rollback(len(run))
        return run

    def copy(self) -> GrammarCursor:
        other = _MatcherCursor.__new__(_MatcherCursor)
        other._grammar = self._grammar
        other._tokens = self._tokens.copy()
        other._ended = self._ended
        other._matcher = self._matcher.fork()
        other._taken = self._taken.copy()
        other._agreed = self._agreed
        other._places = self._places.copy()
        other._undone = self._undone.copy()
        other._failure = self._failure
        return other


class AfterMarker(GrammarCursor):
    """A grammar that begins right behind a marker, wherever in a block of drafts it comes.

    Up to the marker every id is allowed but those that end the answer, which would end it before
    the grammar began.

    Args:
        inner: the grammar's cursor, before its first id; taken over.
        end_id: the marker, such as the one that ends reasoning.
        usable: the ids allowed before it; the marker is among them.
    """

    def __init__(self, inner: GrammarCursor, *, end_id: int, usable: Words) -> None:
        self._inner = inner
        self._end_id = end_id
        self._free = usable
        self._num_free = 0
        self._inside = False

    @classmethod
    def of(cls, grammar: Grammar, *, end_id: int) -> AfterMarker:
        """Return a cursor before the reasoning that a grammar's text follows.

        Raises:
            ValueError: the marker is no id there is a token for.
        """
        usable = grammar.usable & ~grammar.ends
        if not 0 <= end_id < grammar.vocab_size or not int(usable[end_id // 32]) >> end_id % 32 & 1:
            raise ValueError(
                f"the marker is the id {end_id}, which has no token or ends the answer"
            )
        usable.flags.writeable = False
        return cls(grammar.cursor(), end_id=end_id, usable=usable)

    @property
    def num_tokens(self) -> int:
        """Tokens walked, the marker and those before it included."""
        return self._num_free + self._inner.num_tokens

    @property
    def error(self) -> str | None:
        """Why nothing is allowed."""
        return self._inner.error

    @property
    def is_finished(self) -> bool:
        """Whether the marker came and the grammar is finished."""
        return self._inside and self._inner.is_finished

    def mask(self) -> Words:
        """Return the grammar's mask behind the marker, and all ids but the ends before it."""
        return self._inner.mask() if self._inside else self._free

    def advance(self, token: int) -> bool:
        """Walk over an id."""
        if self._inside:
            return self._inner.advance(token)
        if not self.allows(token):
            return False
        self._num_free += 1
        self._inside = token == self._end_id
        return True

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens, over the marker too."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"{num_tokens} tokens to go back; allowed are 0 to {self.num_tokens}")
        within = min(num_tokens, self._inner.num_tokens)
        self._inner.rollback(within)
        if num_tokens > within:
            self._num_free -= num_tokens - within
            # The marker is the last of the free ids.
            self._inside = False

    def copy(self) -> GrammarCursor:
        """Return another one at the same place."""
        other = AfterMarker(self._inner.copy(), end_id=self._end_id, usable=self._free)
        other._num_free = self._num_free
        other._inside = self._inside
        return other


def words_of(ids: Iterable[int], vocab_size: int) -> Words:
    """A read-only mask of ids."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    words = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
    words.flags.writeable = False
    return words
