"""Conversations to prompts: DeepSeek-V4's chat encoding, and a plain one for other tokenizers.

Knows the layout of a conversation only; which ids its markers have is the tokenizer's to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from paceline.text.tokenizer import Tokenizer
from paceline.types import CheckpointError, RequestError, UnsupportedError

__all__ = ["ChatPrompt", "ChatTemplate", "Message", "Piece", "Release"]

Message = Mapping[str, Any]
"""One message in OpenAI's form: ``role``, ``content`` and what belongs to the role."""

Release = Literal["2026-04", "0731"]
"""Release of DeepSeek-V4 whose wording of reasoning efforts is meant."""

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
TASKS = {
    task: f"<｜{task}｜>"
    for task in ("action", "query", "authority", "domain", "title", "read_url")
}


class Piece(NamedTuple):
    """A stretch of a prompt: a marker that is one token, or text that is none."""

    text: str
    is_marker: bool = False


_Parts = list[Piece]


def _mark(marker: str) -> Piece:
    return Piece(marker, is_marker=True)


_NOTHING = Piece("")
_EOS, _USER, _ASSISTANT = map(_mark, (EOS, USER, ASSISTANT))


# The fixed wording below is part of the format: the model was trained on exactly these characters.
# Source: DeepSeek-V4-Flash and -0731, encoding/encoding_dsv4.py (MIT).

_MAX_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
    "unchecked.\n\n"
)
_BEYOND_MAX_EFFORT = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: "
    "exhaustively decompose the problem into its most fundamental components, trace every causal "
    "chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles "
    "and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
_EFFORTS: dict[Release, dict[str, str]] = {
    "2026-04": {"high": "", "max": _MAX_EFFORT},
    "0731": {"low": "", "high": _MAX_EFFORT, "max": _BEYOND_MAX_EFFORT},
}

# In these two a marker is written as itself and becomes a piece when they are cut up.
_V4_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, \
booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_V4_AFTER_TOOLS = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool "
    "calls.\n"
)
_PLAIN_TOOLS = "## Tools\n\n### Available Tool Schemas\n\n"
_RESPONSE_FORMAT = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)

_FIELDS = {
    "system": {"content", "tools", "response_format"},
    "developer": {"content", "tools", "response_format"},
    "user": {"content", "task"},
    "assistant": {"content", "reasoning", "reasoning_content", "tool_calls", "prefix"},
    "tool": {"content", "tool_call_id"},
    "latest_reminder": {"content"},
}
# Accepted in every message, without effect: a speaker's name has no place in the format, and a
# training mask none in a prompt.
_IGNORED_FIELDS = {"role", "name", "mask"}


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A conversation laid out for the model.

    Attributes:
        pieces: markers and texts in order; no two texts touch.
        starts: what the model writes next, "reasoning" or "content"; None where the conversation is
            complete.
        stop: strings that end the answer where the layout has no marker that does.
    """

    pieces: tuple[Piece, ...]
    starts: Literal["reasoning", "content"] | None
    stop: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The prompt as one text; markers spelled in messages cannot be told from real ones."""
        return "".join(piece.text for piece in self.pieces)

    def ids(self, tokenizer: Tokenizer, *, allow_special: bool = False) -> list[int]:
        """Ids of the prompt, the begin-of-sequence id included where the layout has one.

        Args:
            tokenizer: has all the layout's markers.
            allow_special: markers spelled in messages count as such too. Otherwise they are text,
                so no message can end its turn.

        Raises:
            RequestError: a message holds a lone surrogate.
            CheckpointError: the tokenizer lacks a marker of the layout.
        """
        if allow_special:
            return tokenizer.encode(self.text, add_bos=False, allow_special=True)
        ids: list[int] = []
        for piece in self.pieces:
            if not piece.is_marker:
                ids += tokenizer.encode(piece.text, add_bos=False)
                continue
            marker_id = tokenizer.marker_id(piece.text)
            if marker_id is None:
                raise CheckpointError(
                    f"the tokenizer has no marker {piece.text}; this chat template needs it"
                )
            ids.append(marker_id)
        return ids


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A layout of conversations.

    Take one by `for_tokenizer`, `deepseek_v4` or `plain`.

    The layout of DeepSeek-V4: the system text stands bare behind the begin marker; every user turn
    is marked, and so is the answer, which begins with reasoning in thinking mode and with the end
    of reasoning in chat mode; an answer ends with the end marker. Tool results are user turns, in
    the order of the calls, together with the user text that follows them; user messages in a row
    are one turn. In thinking mode answers before the last user turn come without their reasoning,
    and developer messages before it do not come at all, unless tools are offered anywhere.

    Attributes:
        name: "deepseek_v4" or "plain".
        thinks: has markers for reasoning.
        calls_tools: has markup for tools.
        efforts: text in front of everything for each reasoning effort, in thinking mode.
        tasks: marker of each of DeepSeek's auxiliary tasks.

    Source: DeepSeek-V4-Flash, encoding/encoding_dsv4.py and its tests; the rules only.
    """

    name: str
    bos: Piece = _NOTHING
    eos: Piece = _EOS
    system_end: str = ""
    user: Piece = _USER
    user_end: str = ""
    assistant: Piece = _ASSISTANT
    reminder: Piece | None = None
    thinks: bool = True
    calls_tools: bool = True
    tools_before: str = _PLAIN_TOOLS
    tools_after: str = "\n"
    efforts: Mapping[str, str] = field(default_factory=dict)
    tasks: Mapping[str, str] = field(default_factory=dict)
    stop: tuple[str, ...] = ()

    @classmethod
    def deepseek_v4(cls, *, release: Release = "2026-04") -> ChatTemplate:
        """DeepSeek-V4's own encoding."""
        return cls(
            name="deepseek_v4",
            bos=_mark(BOS),
            reminder=_mark(REMINDER),
            tools_before=_V4_TOOLS,
            tools_after=_V4_AFTER_TOOLS,
            efforts=_EFFORTS[release],
            tasks=TASKS,
        )

    @classmethod
    def plain(cls, markers: Iterable[str] = ()) -> ChatTemplate:
        """V4's layout with a short tool section, or headed paragraphs where roles have no markers.

        Args:
            markers: those of V4's markers that the tokenizer has.
        """
        have = set(markers)
        turns = {USER, ASSISTANT, EOS} <= have
        thinks = turns and {THINK, END_THINK} <= have
        template = cls(
            name="plain",
            bos=_mark(BOS) if BOS in have else _NOTHING,
            thinks=thinks,
            calls_tools=thinks and DSML in have,
        )
        if turns:
            return template
        return replace(
            template,
            eos=_EOS if EOS in have else Piece("\n\n"),
            system_end="\n\n",
            user=Piece("### User\n"),
            user_end="\n\n",
            assistant=Piece("### Assistant\n"),
            stop=("\n\n### User\n",),
        )

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer, *, release: Release = "2026-04") -> ChatTemplate:
        """V4's encoding where the tokenizer has all of V4's markers, else the plain one."""
        wanted = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML, REMINDER, *TASKS.values())
        have = [marker for marker in wanted if tokenizer.marker_id(marker) is not None]
        return cls.deepseek_v4(release=release) if len(have) == len(wanted) else cls.plain(have)

    def render(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        drop_reasoning: bool = True,
        add_bos: bool = True,
        complete: bool = False,
    ) -> ChatPrompt:
        """Lay a conversation out.

        Args:
            messages: in OpenAI's form. Roles: system, user, assistant, tool; with V4's encoding
                also developer and latest_reminder. Content is a string or a list of text parts.
                An assistant message may have ``reasoning`` (or ``reasoning_content``) and
                ``tool_calls``; the last one may have ``prefix`` true: the model goes on with it. A
                user message may have a ``task``, one of `tasks`.
            thinking: thinking mode; otherwise chat mode, in which no reasoning appears anywhere.
            tools: functions in OpenAI's form; they go to the leading system or developer message,
                or to an empty system message.
            response_format: JSON schema of the answer; goes where the tools go.
            reasoning_effort: one of `efforts`; adds its text in thinking mode.
            drop_reasoning: leave out the reasoning of earlier answers where no tools are offered.
            add_bos: begin with the begin marker.
            complete: the conversation is whole and nothing is to be generated.

        Raises:
            RequestError: a message or an argument is not as described (says which and what is
                allowed), or nothing is left for the model to say although `complete` is not set.
            UnsupportedError: content other than text, or what this layout has no markers for.
        """
        if not isinstance(messages, (list, tuple)) or not messages:
            raise RequestError("messages must be a list of at least one message")
        if thinking and not self.thinks:
            raise UnsupportedError("this tokenizer has no markers for reasoning")
        if reasoning_effort is not None and reasoning_effort not in self.efforts:
            allowed = ", ".join(map(repr, self.efforts)) or "none by this chat template"
            raise RequestError(f"reasoning_effort is {reasoning_effort!r}; allowed are {allowed}")
        turns = _turns(self, messages, tools, response_format)
        keep_all = not thinking or not drop_reasoning or any(turn.tools for turn in turns)
        if not keep_all:
            turns = _without_dropped(turns)
        last = _last_user(turns)

        parts: _Parts = []
        if add_bos:
            parts.append(self.bos)
        if thinking and reasoning_effort is not None:
            parts.append(Piece(self.efforts[reasoning_effort]))
        starts: Literal["reasoning", "content"] | None = None
        for index, turn in enumerate(turns):
            parts += self._turn(turn, thinking=thinking, reasons=keep_all or index > last)
            starts = None
            following = turns[index + 1].role if index + 1 < len(turns) else None
            if turn.role == "assistant" and turn.prefix:
                starts = "content"
            elif following in (None, "assistant", "latest_reminder"):
                opens = thinking and (keep_all or index >= last)
                opening, starts = self._opening(turn, thinking=thinking, opens=opens)
                parts += opening
                if following == "assistant" and turn.task is not None:
                    turns[index + 1].answers_task = True
        if starts is None and not complete:
            raise RequestError(
                f"the last message is the {turns[-1].role}'s; allowed are a user's, a tool's, or "
                "an assistant's with prefix=True"
            )
        return ChatPrompt(pieces=tuple(_merged(parts)), starts=starts, stop=self.stop)

    def _turn(self, turn: _Turn, *, thinking: bool, reasons: bool) -> _Parts:
        if turn.role == "latest_reminder":
            assert self.reminder is not None
            return [self.reminder, Piece(turn.content)]
        if turn.role == "assistant":
            parts: _Parts = []
            if thinking and reasons and not turn.answers_task:
                parts += [Piece(turn.reasoning), _mark(END_THINK)]
            parts.append(Piece(turn.content))
            if turn.calls:
                parts += _calls(turn.calls)
            if not turn.prefix:
                parts.append(self.eos)
            return parts
        parts = [] if turn.role == "system" else [self.user]
        parts.append(Piece(turn.content))
        if turn.tools:
            parts += [Piece("\n\n"), *_cut_up(self.tools_before)]
            parts.append(Piece("\n".join(_json(tool, "a tool") for tool in turn.tools)))
            parts.append(Piece(self.tools_after))
        if turn.response_format:
            schema = _json(turn.response_format, "response_format")
            parts.append(Piece(f"\n\n{_RESPONSE_FORMAT}{schema}"))
        parts.append(Piece(self.system_end if turn.role == "system" else self.user_end))
        return parts

    def _opening(
        self, turn: _Turn, *, thinking: bool, opens: bool
    ) -> tuple[_Parts, Literal["reasoning", "content"] | None]:
        """What makes the model answer a turn, and what its answer begins with."""
        if turn.role not in ("user", "developer"):
            return [], None
        if turn.task is not None and turn.task != "action":
            return [_mark(self.tasks[turn.task])], "content"
        if not self.thinks:
            return [self.assistant], "content"
        if turn.task is not None:
            return [
                self.assistant,
                _mark(THINK if thinking else END_THINK),
                _mark(self.tasks[turn.task]),
            ], "content"
        return [self.assistant, _mark(THINK if opens else END_THINK)], (
            "reasoning" if opens else "content"
        )


@dataclass(kw_only=True)
class _Call:
    name: str
    arguments: dict[str, Any]
    call_id: str | None


@dataclass(kw_only=True)
class _Turn:
    """A message as it is laid out: tool results are part of a user turn."""

    role: str
    blocks: list[str] = field(default_factory=list)
    # Places of tool results in `blocks`, with the id of the call each answers.
    results: list[tuple[int, str | None]] = field(default_factory=list)
    reasoning: str = ""
    calls: list[_Call] = field(default_factory=list)
    tools: list[Mapping[str, Any]] = field(default_factory=list)
    response_format: Mapping[str, Any] | None = None
    task: str | None = None
    prefix: bool = False
    answers_task: bool = False

    @property
    def content(self) -> str:
        return "\n\n".join(self.blocks)


def _turns(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    response_format: Mapping[str, Any] | None,
) -> list[_Turn]:
    turns: list[_Turn] = []
    # Of the last answer that called tools: its calls, and the results that came for them.
    calls: list[_Call] = []
    num_results = 0
    answered: set[str] = set()
    for index, message in enumerate(messages):
        where = f"message {index}"
        _check_fields(template, message, where)
        role = message["role"]
        if role == "tool":
            call_id = message.get("tool_call_id")
            _check_result(call_id, calls, num_results, answered, where)
            num_results += 1
            block = f"<tool_result>{_content(message, where)}</tool_result>"
            turn = _open_user_turn(turns)
            turn.results.append((len(turn.blocks), call_id))
            turn.blocks.append(block)
            continue
        if role == "user":
            turn = _open_user_turn(turns)
            turn.blocks.append(_content(message, where))
            turn.task = _task(template, message, where)
            continue
        turn = _Turn(role=role)
        if role == "assistant":
            _fill_answer(turn, message, where, is_last=index == len(messages) - 1)
            if turn.calls:
                if not template.calls_tools:
                    raise UnsupportedError(f"{where} calls tools; this tokenizer has no markup")
                calls, num_results, answered = turn.calls, 0, set()
        else:
            turn.tools = _functions(message.get("tools"), where)
            turn.response_format = _schema(message.get("response_format"), where)
            may_lack = role == "system" and bool(turn.tools or turn.response_format)
            turn.blocks.append(_content(message, where, optional=may_lack))
            if role == "developer" and not turn.content:
                raise RequestError(f"{where}, of a developer, has no content; some is needed")
        turns.append(turn)

    offered = _functions(tools, "the request")
    schema = _schema(response_format, "the request")
    if offered or schema:
        if turns[0].role not in ("system", "developer"):
            turns.insert(0, _Turn(role="system"))
        head = turns[0]
        for name, given, there in (
            ("tools", offered, head.tools),
            ("response_format", schema, head.response_format),
        ):
            if given and there:
                raise RequestError(
                    f"{name} are given with the request and in message 0; allowed is one of both"
                )
        head.tools = head.tools or offered
        head.response_format = head.response_format or schema
    if not template.calls_tools and any(turn.tools for turn in turns):
        raise UnsupportedError("tools are offered; this tokenizer has no markup for them")
    _sort_results(turns)
    return turns


def _open_user_turn(turns: list[_Turn]) -> _Turn:
    """The user turn that is being collected, or a new one."""
    if turns and turns[-1].role == "user" and turns[-1].task is None:
        return turns[-1]
    turns.append(_Turn(role="user"))
    return turns[-1]


def _sort_results(turns: list[_Turn]) -> None:
    order: dict[str | None, int] = {}
    for turn in turns:
        if turn.calls:
            order = {
                call.call_id: n for n, call in enumerate(turn.calls) if call.call_id is not None
            }
        places = [place for place, _ in turn.results]
        in_order = sorted(turn.results, key=lambda result: order.get(result[1], 0))
        sorted_blocks = [turn.blocks[place] for place, _ in in_order]
        for place, block in zip(places, sorted_blocks, strict=True):
            turn.blocks[place] = block


def _last_user(turns: Sequence[_Turn]) -> int:
    return max(
        (n for n, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1
    )


def _without_dropped(turns: list[_Turn]) -> list[_Turn]:
    last = _last_user(turns)
    return [turn for n, turn in enumerate(turns) if turn.role != "developer" or n >= last]


def _calls(calls: Iterable[_Call]) -> _Parts:
    parts = _tag("\n\n<", "tool_calls>\n")
    for number, call in enumerate(calls):
        parts += _tag("\n<" if number else "<", f'invoke name="{call.name}">\n')
        for place, (key, value) in enumerate(call.arguments.items()):
            is_string = isinstance(value, str)
            parts += _tag(
                "\n<" if place else "<",
                f'parameter name="{key}" string="{"true" if is_string else "false"}">',
            )
            parts.append(Piece(value if is_string else _json(value, f"argument {key!r}")))
            parts += _tag("</", "parameter>")
        parts += _tag("\n</", "invoke>")
    return parts + _tag("\n</", "tool_calls>")


def _tag(before: str, after: str) -> _Parts:
    return [Piece(before), _mark(DSML), Piece(after)]


def _cut_up(text: str) -> Iterator[Piece]:
    """Fixed wording as pieces, its markers as such."""
    rest = text
    while rest:
        found = [(rest.find(marker), marker) for marker in (DSML, THINK, END_THINK)]
        place, marker = min((f for f in found if f[0] >= 0), default=(len(rest), ""))
        yield Piece(rest[:place])
        if marker:
            yield _mark(marker)
        rest = rest[place + len(marker) :]


def _merged(parts: Iterable[Piece]) -> Iterator[Piece]:
    """Texts that touch as one, so that they are encoded as one; empty ones left out."""
    text = ""
    for part in parts:
        if not part.is_marker:
            text += part.text
            continue
        if text:
            yield Piece(text)
        text = ""
        yield part
    if text:
        yield Piece(text)


def _check_fields(template: ChatTemplate, message: object, where: str) -> None:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is a {type(message).__name__}; allowed is a mapping")
    roles = [
        role
        for role in _FIELDS
        if template.reminder is not None or role not in ("developer", "latest_reminder")
    ]
    role = message.get("role")
    if role not in roles:
        raise RequestError(f"{where} has the role {role!r}; allowed are {', '.join(roles)}")
    known = _FIELDS[role] | _IGNORED_FIELDS
    unknown = [
        name for name, value in message.items() if name not in known and value not in (None, [], "")
    ]
    if unknown:
        raise RequestError(
            f"{where}, of role {role}, has {', '.join(map(str, unknown))}; allowed are "
            f"{', '.join(sorted(known - {'role'} - (set() if template.tasks else {'task'})))}"
        )


def _content(message: Message, where: str, *, optional: bool = False) -> str:
    content = message.get("content")
    if content is None and optional:
        return ""
    if isinstance(content, str):
        return content
    if content is None:
        raise RequestError(
            f"{where}, of role {message['role']}, has no content; allowed are a string or a list "
            "of text parts"
        )
    if not isinstance(content, (list, tuple)):
        raise RequestError(
            f"{where}, of role {message['role']}, has the content {content!r}; allowed are a "
            "string or a list of text parts"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise UnsupportedError(f"{where} has content of type {kind}; served is text")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where} has a text part without a text")
        texts.append(part["text"])
    return "\n\n".join(texts)


def _task(template: ChatTemplate, message: Message, where: str) -> str | None:
    task = message.get("task")
    if task is None:
        return None
    if task not in template.tasks:
        allowed = ", ".join(template.tasks) or "none by this chat template"
        raise RequestError(f"{where} has the task {task!r}; allowed are {allowed}")
    return str(task)


def _fill_answer(turn: _Turn, message: Message, where: str, *, is_last: bool) -> None:
    thoughts = [message.get(name) for name in ("reasoning", "reasoning_content")]
    if any(thought is not None and not isinstance(thought, str) for thought in thoughts):
        raise RequestError(f"{where} has reasoning that is no string")
    given = {thought for thought in thoughts if thought}
    if len(given) > 1:
        raise RequestError(f"{where} has reasoning and another reasoning_content")
    turn.reasoning = given.pop() if given else ""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, (list, tuple)):
        raise RequestError(f"{where} has the tool_calls {calls!r}; allowed is a list")
    turn.calls = [_call(call, f"{where}, call {n}") for n, call in enumerate(calls)]
    ids = [call.call_id for call in turn.calls if call.call_id is not None]
    if len(set(ids)) < len(ids):
        raise RequestError(f"{where} has two calls of one id")
    prefix = message.get("prefix", False)
    if prefix not in (True, False, None) or (prefix and (not is_last or turn.calls)):
        raise RequestError(
            f"{where} has the prefix {prefix!r}; allowed is True in the last message, without calls"
        )
    turn.prefix = bool(prefix)
    may_lack = bool(turn.calls or turn.reasoning)
    turn.blocks.append(_content(message, where, optional=may_lack))


def _call(call: object, where: str) -> _Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RequestError(f"{where} is {call!r}; allowed is a mapping with a function")
    name = _name(function.get("name"), where)
    given = function.get("arguments")
    arguments: object = given
    if isinstance(given, str) and given:
        try:
            arguments = json.loads(given)
        except ValueError:
            raise RequestError(f"{where} has arguments that are no JSON: {given!r}") from None
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where} has the arguments {given!r}; allowed is a JSON object")
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise RequestError(f"{where} has the id {call_id!r}; allowed is a string")
    return _Call(
        name=name,
        arguments={_name(key, where): value for key, value in arguments.items()},
        call_id=call_id or None,
    )


def _name(name: object, where: str) -> str:
    if not isinstance(name, str) or not name or not _NAME_BREAKERS.isdisjoint(name):
        raise RequestError(
            f"{where} has the name {name!r}; allowed are strings without quotes, angle brackets "
            "and line ends"
        )
    return name


_NAME_BREAKERS = frozenset('"<>\r\n')


def _check_result(
    call_id: object, calls: Sequence[_Call], num_results: int, answered: set[str], where: str
) -> None:
    if num_results >= len(calls):
        raise RequestError(f"{where} is a tool's result without a call before it")
    ids = [call.call_id for call in calls if call.call_id is not None]
    if not call_id or not ids:
        return
    if not isinstance(call_id, str) or call_id not in ids:
        raise RequestError(
            f"{where} answers the call {call_id!r}; the calls before it are {', '.join(ids)}"
        )
    if call_id in answered:
        raise RequestError(f"{where} answers the call {call_id!r} a second time")
    answered.add(call_id)


def _functions(tools: object, where: str) -> list[Mapping[str, Any]]:
    if not tools:
        return []
    if not isinstance(tools, (list, tuple)):
        raise RequestError(f"{where} has the tools {tools!r}; allowed is a list")
    functions = []
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise RequestError(
                f"tool {number} of {where} is {tool!r}; allowed is a mapping with a function"
            )
        _name(function.get("name"), f"tool {number} of {where}")
        functions.append(function)
    return functions


def _schema(schema: object, where: str) -> Mapping[str, Any] | None:
    if schema is not None and not isinstance(schema, Mapping):
        raise RequestError(
            f"{where} has the response_format {schema!r}; allowed is a JSON schema as a mapping"
        )
    return schema


def _json(value: object, what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{what} cannot be written as JSON: {error}") from None
