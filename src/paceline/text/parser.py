"""Answers to reasoning, content and tool calls, as the text grows: the way back from `chat`.

Works on characters and never on how they came: one text has one outcome, however it is cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.text.chat import DSML, END_THINK, ChatPrompt

__all__ = [
    "ChatEvent",
    "ChatParser",
    "ContentDelta",
    "MarkupError",
    "ParsedAnswer",
    "ReasoningDelta",
    "ToolCall",
    "ToolCallBegin",
    "ToolCallDelta",
    "ToolCallEnd",
    "collect",
    "parse_answer",
]


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call of a tool begins; `index` counts the answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the arguments of a call: its deltas join to a JSON object."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is over. With an error its arguments may be no JSON, or not what the model meant."""

    index: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class MarkupError:
    """Markup of tool calls that is wrong or breaks off.

    Attributes:
        reason: what was expected.
        text: the markup that broke off at the end of the answer, given nowhere else. Empty where
            the markup is wrong: it is content then, from the wrong place on, and follows.
    """

    reason: str
    text: str = ""


ChatEvent = (
    ReasoningDelta | ContentDelta | ToolCallBegin | ToolCallDelta | ToolCallEnd | MarkupError
)

MAX_TAG_CHARS = 1024
"""Longest tag, with the white space before it; a longer one is wrong markup."""

_PART_CHARS = 4096
_OPEN_BLOCK = f"<{DSML}tool_calls>"
_BLANK_LINE = "\n\n"
_CLOSE_BLOCK = f"</{DSML}tool_calls>"
_OPEN_CALL = f'<{DSML}invoke name="'
_CLOSE_CALL = f"</{DSML}invoke>"
_OPEN_PARAMETER = f'<{DSML}parameter name="'
_CLOSE_PARAMETER = f"</{DSML}parameter>"
_WHITE_SPACE = " \t\r\n"


class ChatParser:
    """Parses one answer in DeepSeek-V4's format.

    The answer is reasoning up to the end-of-thinking marker where it starts within reasoning, then
    content, in which blocks of tool calls may stand. Only what may still turn out to be markup is
    held back, at most a marker's length of text outside tags and values that are not strings; at
    the end `flush` gives it. A blank line right before a block belongs to it. All other characters
    are given as they are, so markers of thinking out of place are content.

    Arguments come as JSON while they are written: strings character by character, other values
    when they are whole. A value marked as no string that is no JSON is given as a string and its
    call ends with an error.

    Wrong markup, in contrast, ends the block: a call that is open ends with an error, a
    `MarkupError` says why, and from the first wrong tag on the text is content; from the block's
    beginning on if no call had begun. Markup that breaks off with the answer is in a `MarkupError`
    and not in content, unless not even the block's first tag was whole.

    Args:
        thinking: the answer starts within reasoning.
        tools: look for tool calls; otherwise their markup is content.
    """

    def __init__(self, *, thinking: bool, tools: bool = True) -> None:
        self._tools = tools
        self._pending = ""
        self._state: Callable[[], bool] = self._reasoning if thinking else self._content
        self._events: list[ChatEvent] = []
        self._flushed = False
        self._num_calls = 0
        # Of the open block: its beginning as written, until a call in it begins.
        self._block_start: str | None = None
        # Of the open call.
        self._keys: set[str] = set()
        self._call_error: str | None = None
        self._value: list[str] = []

    @classmethod
    def of_prompt(cls, prompt: ChatPrompt, *, tools: bool = True) -> ChatParser:
        """Return a parser for the answer to a prompt."""
        return cls(thinking=prompt.starts == "reasoning", tools=tools)

    def feed(self, text: str) -> list[ChatEvent]:
        """Take more of the answer; return what became certain with it.

        Raises:
            ValueError: the answer is over.
        """
        if self._flushed:
            raise ValueError("the answer is over; a new one needs a new parser")
        # In bounded parts, so that what is pending and copied stays short.
        for start in range(0, len(text), _PART_CHARS):
            self._pending += text[start : start + _PART_CHARS]
            while self._pending and self._state():
                pass
        return self._taken()

    def flush(self) -> list[ChatEvent]:
        """End the answer; return what was held back. A second call returns nothing."""
        if self._flushed:
            return []
        self._flushed = True
        rest, self._pending = self._pending, ""
        if self._state == self._reasoning:
            self._say(ReasoningDelta, rest)
        elif self._state == self._content:
            self._say(ContentDelta, rest)
        else:
            self._break_off(rest)
        return self._taken()

    def _taken(self) -> list[ChatEvent]:
        events, self._events = self._events, []
        return events

    def _say(self, kind: type[ReasoningDelta] | type[ContentDelta], text: str) -> None:
        if text:
            self._events.append(kind(text))

    # A state takes what it can from the pending text and says whether the next one, possibly
    # itself, can go on without more text.

    def _reasoning(self) -> bool:
        place = self._pending.find(END_THINK)
        if place < 0:
            self._say(ReasoningDelta, self._take_but(END_THINK))
            return False
        self._say(ReasoningDelta, self._take(place))
        self._take(len(END_THINK))
        self._state = self._content
        return True

    def _content(self) -> bool:
        if not self._tools:
            self._say(ContentDelta, self._take(len(self._pending)))
            return False
        place = self._pending.find(_OPEN_BLOCK)
        if place < 0:
            self._say(ContentDelta, self._take_but(_BLANK_LINE + _OPEN_BLOCK, _OPEN_BLOCK))
            return False
        before = self._take(place).removesuffix(_BLANK_LINE)
        self._say(ContentDelta, before)
        self._block_start = _BLANK_LINE * (place - len(before) > 0) + self._take(len(_OPEN_BLOCK))
        self._state = self._block
        return True

    def _block(self) -> bool:
        """Between calls."""
        start = self._tag_start()
        if (size := _literal(self._pending, start, _CLOSE_BLOCK)) is not None:
            if size:
                self._take(size)
                self._block_start = None
                self._state = self._content
            return size > 0
        opened = _named(self._pending, start, _OPEN_CALL, (">",))
        if opened is None:
            return self._wrong("a call or the end of the tool calls is expected")
        size, name, _ = opened
        if size:
            self._take(size)
            self._block_start = None
            self._keys = set()
            self._call_error = None
            self._events.append(ToolCallBegin(self._num_calls, name))
            self._state = self._call
        return size > 0

    def _call(self) -> bool:
        """Between the parameters of a call."""
        start = self._tag_start()
        if (size := _literal(self._pending, start, _CLOSE_CALL)) is not None:
            if size:
                self._take(size)
                self._argue("}" if self._keys else "{}")
                self._end_call(self._call_error)
                self._state = self._block
            return size > 0
        kinds = (' string="true">', ' string="false">')
        opened = _named(self._pending, start, _OPEN_PARAMETER, kinds)
        if opened is None:
            return self._wrong("a parameter or the end of the call is expected")
        size, name, kind = opened
        if size and name in self._keys:
            return self._wrong(f"the parameter {name!r} is given twice")
        if size:
            self._take(size)
            lead = ", " if self._keys else "{"
            self._argue(f"{lead}{json.dumps(name, ensure_ascii=False)}: ")
            self._keys.add(name)
            if kind == kinds[0]:
                self._argue('"')
                self._state = self._string
            else:
                self._value = []
                self._state = self._json_value
        return size > 0

    def _string(self) -> bool:
        place = self._pending.find(_CLOSE_PARAMETER)
        if place < 0:
            self._argue(_escaped(self._take_but(_CLOSE_PARAMETER)))
            return False
        self._argue(_escaped(self._take(place)) + '"')
        self._take(len(_CLOSE_PARAMETER))
        self._state = self._call
        return True

    def _json_value(self) -> bool:
        place = self._pending.find(_CLOSE_PARAMETER)
        if place < 0:
            self._value.append(self._take_but(_CLOSE_PARAMETER))
            return False
        value = "".join([*self._value, self._take(place)])
        self._take(len(_CLOSE_PARAMETER))
        if not _is_json(value):
            self._call_error = f"a value marked as JSON is none: {value[:80]!r}"
            value = f'"{_escaped(value)}"'
        self._argue(value)
        self._state = self._call
        return True

    def _take(self, count: int) -> str:
        taken, self._pending = self._pending[:count], self._pending[count:]
        return taken

    def _take_but(self, *markers: str) -> str:
        """Take all that no marker can begin in."""
        pending = self._pending
        return self._take(len(pending) - max(_overlap(pending, marker) for marker in markers))

    def _tag_start(self) -> int:
        return len(self._pending) - len(self._pending.lstrip(_WHITE_SPACE))

    def _argue(self, arguments: str) -> None:
        if arguments:
            self._events.append(ToolCallDelta(self._num_calls, arguments))

    def _end_call(self, error: str | None) -> None:
        self._events.append(ToolCallEnd(self._num_calls, error))
        self._num_calls += 1

    def _wrong(self, reason: str) -> bool:
        if self._state == self._call:
            self._end_call(f"wrong markup: {reason}")
        self._events.append(MarkupError(reason))
        text, self._block_start = self._block_start or "", None
        self._state = self._content
        # Its own beginning must not be taken for a block again.
        self._say(ContentDelta, text)
        return True

    def _break_off(self, rest: str) -> None:
        reason = "the answer breaks off within tool calls"
        if self._state == self._string:
            self._argue(_escaped(rest))
            rest = ""
        elif self._state == self._json_value:
            rest = "".join([*self._value, rest])
        if self._state != self._block:
            self._end_call(reason)
        start, self._block_start = self._block_start or "", None
        self._events.append(MarkupError(reason, start + rest))


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of the text that begins the marker, short of the whole."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def _literal(text: str, start: int, tag: str) -> int | None:
    """Size of the text up to a tag's end; 0 if it may yet come, None if it cannot."""
    there = text[start : start + len(tag)]
    if not tag.startswith(there) or start + len(tag) > MAX_TAG_CHARS:
        return None
    return start + len(tag) if len(there) == len(tag) else 0


def _named(text: str, start: int, head: str, tails: tuple[str, ...]) -> tuple[int, str, str] | None:
    """Size, name and tail of a tag with a name; size 0 if it may yet come, None if it cannot."""
    may_come = (0, "", "") if len(text) <= MAX_TAG_CHARS else None
    there = text[start : start + len(head)]
    if not head.startswith(there):
        return None
    name_start = start + len(head)
    name_end = text.find('"', name_start)
    if len(there) < len(head) or name_end < 0:
        return may_come
    for tail in tails:
        found = text[name_end + 1 : name_end + 1 + len(tail)]
        if found == tail:
            size = name_end + 1 + len(tail)
            name = text[name_start:name_end]
            return (size, name, tail) if size <= MAX_TAG_CHARS and name else None
        if tail.startswith(found):
            return may_come
    return None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_json(text: str) -> bool:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


@dataclass(kw_only=True)
class ToolCall:
    """A call of a tool; `arguments` is a JSON object where `error` is None."""

    name: str
    arguments: str = ""
    error: str | None = None


@dataclass(kw_only=True)
class ParsedAnswer:
    """A whole answer.

    Attributes:
        reasoning: text before the end-of-thinking marker.
        content: text outside reasoning and tool calls.
        tool_calls: calls in order.
        errors: what was wrong with the markup.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    errors: list[MarkupError] = field(default_factory=list)

    def add(self, events: Iterable[ChatEvent]) -> None:
        """Take what a parser returned."""
        for event in events:
            match event:
                case ReasoningDelta(text):
                    self.reasoning += text
                case ContentDelta(text):
                    self.content += text
                case ToolCallBegin(_, name):
                    self.tool_calls.append(ToolCall(name=name))
                case ToolCallDelta(index, arguments):
                    self.tool_calls[index].arguments += arguments
                case ToolCallEnd(index, error):
                    self.tool_calls[index].error = error
                case MarkupError():
                    self.errors.append(event)


def collect(events: Iterable[ChatEvent]) -> ParsedAnswer:
    """Put an answer's events together."""
    answer = ParsedAnswer()
    answer.add(events)
    return answer


def parse_answer(text: str, *, thinking: bool, tools: bool = True) -> ParsedAnswer:
    """Parse an answer that is there as a whole, as `ChatParser` would."""
    parser = ChatParser(thinking=thinking, tools=tools)
    return collect([*parser.feed(text), *parser.flush()])
