"""Answers taken apart: one text, one outcome, however it is cut; nothing lost, nothing leaked."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text import ChatParser, ChatTemplate, parse_answer
from paceline.text.parser import (
    MAX_TAG_CHARS,
    ChatEvent,
    ContentDelta,
    MarkupError,
    ParsedAnswer,
    ReasoningDelta,
    ToolCall,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    collect,
)

D = "｜DSML｜"
OPEN, CLOSE = f"\n\n<{D}tool_calls>", f"\n</{D}tool_calls>"


def parameter(name: str, value: str, *, string: bool = True) -> str:
    kind = "true" if string else "false"
    return f'\n<{D}parameter name="{name}" string="{kind}">{value}</{D}parameter>'


def call(name: str, *parameters: str) -> str:
    return f'\n<{D}invoke name="{name}">{"".join(parameters)}\n</{D}invoke>'


WEATHER = call(
    "get_weather", parameter("city", 'São "Paulo"\n'), parameter("days", "3", string=False)
)
EMPTY = call("now")
TWO_CALLS = f"Let me look.{OPEN}{WEATHER}{EMPTY}{CLOSE}"
BROKEN = [
    f"a{OPEN}\nnot a tag</{D}tool_calls>b",
    f"a{OPEN}{WEATHER}\n<b>{CLOSE}c",
    f'{OPEN}\n<{D}invoke name="">x',
    f'{OPEN}\n<{D}invoke name="f" kind="g">',
    f"{OPEN}{call('f', parameter('k', 'v'), parameter('k', 'w'))}{CLOSE}",
    f"{OPEN}{call('f', 'oops')}{CLOSE} tail",
    f'{OPEN}\n<{D}invoke name="{"n" * MAX_TAG_CHARS}">',
    f"{OPEN}{' ' * MAX_TAG_CHARS}{EMPTY}{CLOSE}",
    f"{OPEN}{' ' * (MAX_TAG_CHARS - 30)}{EMPTY}{CLOSE}",
    f"{OPEN}{call('f', parameter('k', 'NaN', string=False))}{CLOSE}",
    f"{OPEN}{call('f', parameter('k', 'bare word', string=False), parameter('l', '1'))}{CLOSE}",
    f"{OPEN}{OPEN}{EMPTY}{CLOSE}",
    f"{OPEN}{' ' * MAX_TAG_CHARS}{CLOSE}",
    f'{OPEN}\n<{D}invoke name="f">{" " * MAX_TAG_CHARS}</{D}invoke>{CLOSE}',
    f"{OPEN}{CLOSE}x{OPEN}{EMPTY}{CLOSE}y",
    f"</think>a<think>b</think>{OPEN}{EMPTY}{CLOSE}",
]
TEXTS = [TWO_CALLS, f"I think.</think>{TWO_CALLS}", f"no end{TWO_CALLS}", *BROKEN]


def merged(events: list[ChatEvent]) -> list[ChatEvent]:
    """Deltas of a kind in a row as one; all else as it came."""
    out: list[ChatEvent] = []
    for event in events:
        last = out[-1] if out else None
        match last, event:
            case (ContentDelta(a), ContentDelta(b)):
                out[-1] = ContentDelta(a + b)
            case (ReasoningDelta(a), ReasoningDelta(b)):
                out[-1] = ReasoningDelta(a + b)
            case (ToolCallDelta(i, a), ToolCallDelta(j, b)) if i == j:
                out[-1] = ToolCallDelta(i, a + b)
            case _:
                out.append(event)
    return out


def events_of(parts: list[str], *, thinking: bool, tools: bool = True) -> list[ChatEvent]:
    parser = ChatParser(thinking=thinking, tools=tools)
    events = [event for part in parts for event in parser.feed(part)]
    assert all(event.text for event in events if isinstance(event, (ContentDelta, ReasoningDelta)))
    return merged([*events, *parser.flush()])


def cut(text: str, places: list[int]) -> list[str]:
    places = sorted(place for place in places if place <= len(text))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def test_a_whole_answer() -> None:
    answer = parse_answer(f"I think.</think>{TWO_CALLS}", thinking=True)
    assert answer == ParsedAnswer(
        reasoning="I think.",
        content="Let me look.",
        tool_calls=[
            ToolCall(name="get_weather", arguments='{"city": "São \\"Paulo\\"\\n", "days": 3}'),
            ToolCall(name="now", arguments="{}"),
        ],
    )
    assert json.loads(answer.tool_calls[0].arguments) == {"city": 'São "Paulo"\n', "days": 3}


def test_events_come_in_order() -> None:
    events = events_of(
        [f"hm</think>ok{OPEN}{call('f', parameter('k', 'v'))}{CLOSE}"], thinking=True
    )
    assert events == [
        ReasoningDelta("hm"),
        ContentDelta("ok"),
        ToolCallBegin(0, "f"),
        ToolCallDelta(0, '{"k": "v"}'),
        ToolCallEnd(0),
    ]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_every_single_cut_gives_the_same(text: str, thinking: bool) -> None:
    whole = events_of([text], thinking=thinking)
    assert events_of(list(text), thinking=thinking) == whole
    for place in range(len(text) + 1):
        assert events_of(cut(text, [place]), thinking=thinking) == whole


FRAGMENTS = st.sampled_from(
    [
        *("\n", "\n\n", "<", "</", ">", '"', " ", "a", "é", "</think>", "<think>", D, f"<{D}"),
        *(OPEN, OPEN.strip(), CLOSE, EMPTY, WEATHER, f'<{D}invoke name="f">', f"</{D}invoke>"),
        *(
            parameter("k", "v"),
            parameter("k", "[1]", string=False),
            parameter("j", "{", string=False),
        ),
        *(f'<{D}parameter name="p" string="true">', f'<{D}parameter name="q" string="false">'),
        *(f"</{D}parameter>", ' string="true">', "tool_calls>"),
    ]
)


@given(
    fragments=st.lists(FRAGMENTS, max_size=14),
    thinking=st.booleans(),
    tools=st.booleans(),
    data=st.data(),
)
@settings(max_examples=800, deadline=None)
def test_random_cuts_of_random_texts_give_the_same(
    fragments: list[str], thinking: bool, tools: bool, data: st.DataObject
) -> None:
    text = "".join(fragments)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    whole = events_of([text], thinking=thinking, tools=tools)
    assert events_of(cut(text, places), thinking=thinking, tools=tools) == whole
    assert events_of(list(text), thinking=thinking, tools=tools) == whole
    check_shape(whole)


def check_shape(events: list[ChatEvent]) -> None:
    """Calls are counted, opened and ended one after the other; without an error they are JSON."""
    open_call: int | None = None
    count = 0
    for event in events:
        match event:
            case ToolCallBegin(index, name):
                assert open_call is None
                assert index == count
                assert name
                open_call = index
            case ToolCallDelta(index, _):
                assert index == open_call
            case ToolCallEnd(index, _):
                assert index == open_call
                open_call, count = None, count + 1
            case _:
                assert open_call is None
    assert open_call is None
    for made in collect(events).tool_calls:
        if made.error is None:
            assert isinstance(json.loads(made.arguments), dict)


@given(
    fragments=st.lists(FRAGMENTS, max_size=10),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_what_was_shown_is_never_unsaid(fragments: list[str], data: st.DataObject) -> None:
    """A text that breaks off shows a beginning of what the whole shows, up to what flush adds."""
    text = "".join(fragments)
    end = data.draw(st.integers(0, len(text)))
    parser = ChatParser(thinking=True)
    early = collect(parser.feed(text[:end]))
    whole = parse_answer(text, thinking=True)
    assert whole.reasoning.startswith(early.reasoning)
    assert whole.content.startswith(early.content)
    for mine, theirs in zip(early.tool_calls, whole.tool_calls, strict=False):
        assert mine.name == theirs.name
        assert theirs.arguments.startswith(mine.arguments)


def test_well_formed_markup_never_leaks() -> None:
    text = f"Let me look.{OPEN}{WEATHER}{EMPTY}{CLOSE}"
    for end in range(len(text) + 1):
        parser = ChatParser(thinking=False)
        events = [event for character in text[:end] for event in parser.feed(character)]
        assert "<" not in collect(events).content
        assert collect(events).content == text[:end][: len("Let me look.")]


@given(text=st.text(alphabet="\n<｜DSMLtol_cas>/think ab", max_size=40))
@settings(max_examples=500, deadline=None)
def test_plain_answers_arrive_whole_and_soon(text: str) -> None:
    parser = ChatParser(thinking=False)
    shown = ""
    for count, character in enumerate(text, 1):
        shown += collect(parser.feed(character)).content
        if f"<{D}tool_calls>" in text:
            return
        held = text[len(shown) : count]
        assert held == "" or f"\n\n<{D}tool_calls>".find(held) in (0, 2)
    assert shown + collect(parser.flush()).content == text


@pytest.mark.parametrize("length", range(1, 31))
@pytest.mark.parametrize("thinking", [False, True])
def test_short_answers_arrive_whole(length: int, thinking: bool) -> None:
    for text in (f"\n\n<{D}tool_calls"[:length], "</think"[:length], ("x <" * 10)[:length]):
        answer = parse_answer(text, thinking=thinking)
        assert (answer.reasoning, answer.content) == ((text, "") if thinking else ("", text))


def test_a_blank_line_belongs_to_the_block_and_nothing_more() -> None:
    assert parse_answer(f"a\n{OPEN}{EMPTY}{CLOSE}\nb", thinking=False).content == "a\n\nb"
    assert parse_answer(f"a\n{OPEN.strip()}{EMPTY}{CLOSE}", thinking=False).content == "a\n"
    assert parse_answer(f"{OPEN.strip()}{EMPTY}{CLOSE}", thinking=False).content == ""


def test_blocks_may_follow_each_other() -> None:
    answer = parse_answer(f"a{OPEN}{EMPTY}{CLOSE}b{OPEN}{EMPTY}{WEATHER}{CLOSE}c", thinking=False)
    assert answer.content == "abc"
    assert [made.name for made in answer.tool_calls] == ["now", "now", "get_weather"]
    assert answer.errors == []


def test_markup_within_reasoning_is_reasoning() -> None:
    text = f"I could call{OPEN}{EMPTY}{CLOSE}"
    answer = parse_answer(f"{text}</think>No.", thinking=True)
    assert (answer.reasoning, answer.content, answer.tool_calls) == (text, "No.", [])


def test_without_tools_their_markup_is_content() -> None:
    assert parse_answer(TWO_CALLS, thinking=False, tools=False).content == TWO_CALLS
    thought = parse_answer(f"a</think>{TWO_CALLS}", thinking=True, tools=False)
    assert (thought.reasoning, thought.content) == ("a", TWO_CALLS)


def test_markers_of_thinking_out_of_place_are_content() -> None:
    assert parse_answer("a</think>b<think>c", thinking=False).content == "a</think>b<think>c"
    answer = parse_answer("a</think>b</think>c", thinking=True)
    assert (answer.reasoning, answer.content) == ("a", "b</think>c")


def test_a_block_without_a_call_is_content_when_it_is_wrong() -> None:
    text = f"Write <{D}tool_calls> to call.\n\nIt is easy."
    answer = parse_answer(text, thinking=False)
    assert answer.content == text
    assert answer.errors == [MarkupError("a call or the end of the tool calls is expected")]


def test_wrong_markup_after_a_call_is_content_from_there_on() -> None:
    answer = parse_answer(f"a{OPEN}{EMPTY}\n<b>{CLOSE}c", thinking=False)
    assert answer.content == f"a\n<b>{CLOSE}c"
    assert answer.tool_calls == [ToolCall(name="now", arguments="{}")]
    assert len(answer.errors) == 1


def test_wrong_markup_within_a_call_ends_it_with_an_error() -> None:
    answer = parse_answer(f"{OPEN}{call('f', parameter('k', 'v'), 'oops')}{CLOSE}", thinking=False)
    assert answer.content == f"oops\n</{D}invoke>{CLOSE}"
    (made,) = answer.tool_calls
    assert made.error == "wrong markup: a parameter or the end of the call is expected"
    assert made.arguments == '{"k": "v"'


def test_a_parameter_given_twice_is_an_error() -> None:
    answer = parse_answer(BROKEN[4], thinking=False)
    (made,) = answer.tool_calls
    assert made.error == "wrong markup: the parameter 'k' is given twice"
    assert answer.content.startswith(parameter("k", "w"))


@pytest.mark.parametrize("value", ["bare word", "NaN", "", "[1,", "{'a': 1}", "-Infinity"])
def test_a_value_that_is_no_json_becomes_a_string_with_an_error(value: str) -> None:
    text = f"{OPEN}{call('f', parameter('k', value, string=False), parameter('l', 'x'))}{CLOSE}"
    answer = parse_answer(text, thinking=False)
    (made,) = answer.tool_calls
    assert json.loads(made.arguments) == {"k": value, "l": "x"}
    assert made.error == f"a value marked as JSON is none: {value!r}"
    assert (answer.content, answer.errors) == ("", [])


@pytest.mark.parametrize("length", [MAX_TAG_CHARS, MAX_TAG_CHARS + 1])
def test_the_longest_tag(length: int) -> None:
    frame = f'<{D}invoke name="">'
    tag = frame.replace('""', f'"{"n" * (length - len(frame))}"')
    answer = parse_answer(f"{OPEN}{tag}</{D}invoke>{CLOSE}", thinking=False)
    assert len(answer.tool_calls) == (length <= MAX_TAG_CHARS)
    assert (answer.errors == []) == (length <= MAX_TAG_CHARS)


def test_no_tag_is_waited_for_without_end() -> None:
    parser = ChatParser(thinking=False)
    head = f'{OPEN}\n<{D}invoke name="'
    shown = collect([*parser.feed(head + "n" * MAX_TAG_CHARS), *parser.feed("n")])
    assert shown.content == f"{head}{'n' * MAX_TAG_CHARS}n"
    for blank in (f"{OPEN}{' ' * MAX_TAG_CHARS}", f"{OPEN}{EMPTY}{' ' * MAX_TAG_CHARS}"):
        parser = ChatParser(thinking=False)
        assert collect([*parser.feed(blank), *parser.feed(f" {CLOSE}")]).errors != []


def test_an_error_is_its_calls_own() -> None:
    bad = call("f", parameter("k", "bare", string=False))
    answer = parse_answer(f"{OPEN}{bad}{EMPTY}{CLOSE}", thinking=False)
    assert [made.error is None for made in answer.tool_calls] == [False, True]


def test_a_json_value_that_breaks_off_is_in_the_error() -> None:
    text = f'{OPEN}\n<{D}invoke name="f">\n<{D}parameter name="k" string="false">[1, 2'
    parser = ChatParser(thinking=False)
    answer = collect([event for c in text for event in parser.feed(c)] + parser.flush())
    assert answer.errors == [MarkupError("the answer breaks off within tool calls", "[1, 2")]
    assert answer.content == ""


def test_an_answer_that_breaks_off_within_a_call() -> None:
    text = TWO_CALLS
    block = text.index(f"<{D}tool_calls>") + len(f"<{D}tool_calls>")
    whole = parse_answer(text, thinking=False)
    for end in range(block, len(text)):
        answer = parse_answer(text[:end], thinking=False)
        assert answer.content == "Let me look."
        (error,) = answer.errors
        assert error.reason == "the answer breaks off within tool calls"
        assert text[:end].endswith(error.text)
        for made, full in itertools.zip_longest(
            answer.tool_calls, whole.tool_calls[: len(answer.tool_calls)]
        ):
            assert made.name == full.name
            assert full.arguments.startswith(made.arguments) or made.error
        assert all(made.error is None for made in answer.tool_calls[:-1])


def test_a_string_that_breaks_off_keeps_its_tail() -> None:
    text = f'{OPEN}\n<{D}invoke name="f">\n<{D}parameter name="k" string="true">va</{D}par'
    (made,) = parse_answer(text, thinking=False).tool_calls
    assert made.arguments == f'{{"k": "va</{D}par'
    assert made.error == "the answer breaks off within tool calls"


def test_arguments_stream_while_they_are_written() -> None:
    parser = ChatParser(thinking=False)
    parser.feed(f'{OPEN}\n<{D}invoke name="f">\n<{D}parameter name="k" string="true">')
    assert parser.feed("abc") == [ToolCallDelta(0, "abc")]
    assert parser.feed('"\n') == [ToolCallDelta(0, '\\"\\n')]


def test_a_long_answer_in_one_piece_equals_it_in_many() -> None:
    value = json.dumps(["x" * 50] * 400)
    text = "y" * 9000 + OPEN + call("f", parameter("k", value, string=False)) * 5 + CLOSE
    whole = parse_answer(text, thinking=False)
    assert whole.content == "y" * 9000
    assert [made.arguments for made in whole.tool_calls] == [f'{{"k": {value}}}'] * 5
    parts = cut(text, list(range(0, len(text), 7)))
    assert collect(events_of(parts, thinking=False)) == whole


def test_nothing_comes_after_the_end() -> None:
    parser = ChatParser(thinking=False)
    parser.feed("<")
    assert parser.flush() == [ContentDelta("<")]
    assert parser.flush() == []
    with pytest.raises(ValueError, match="the answer is over"):
        parser.feed("a")


VALUES = st.recursive(
    st.one_of(st.text('aé"\\\n<>/', max_size=8), st.integers(), st.booleans(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("ab", max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    reasoning=st.text("ab \n<", max_size=12),
    content=st.text("ab \n<", max_size=12),
    calls=st.lists(
        st.tuples(
            st.text("fg_", min_size=1, max_size=5),
            st.dictionaries(st.text("kl é", min_size=1, max_size=4), VALUES, max_size=3),
        ),
        max_size=3,
    ),
    thinking=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_what_the_template_writes_comes_back(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], thinking: bool
) -> None:
    template = ChatTemplate.deepseek_v4()
    user = {"role": "user", "content": "go"}
    answer = {
        "role": "assistant",
        "reasoning": reasoning,
        "content": content,
        "tool_calls": [
            {"function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in calls
        ],
    }
    prompt = template.render([user], thinking=thinking)
    whole = template.render([user, answer], thinking=thinking, complete=True).text
    written = whole.removeprefix(prompt.text).removesuffix("<｜end▁of▁sentence｜>")
    parser = ChatParser.of_prompt(prompt)
    parsed = collect([*parser.feed(written), *parser.flush()])
    assert parsed.reasoning == (reasoning if thinking else "")
    assert parsed.content == content
    assert parsed.errors == []
    assert [(made.name, json.loads(made.arguments)) for made in parsed.tool_calls] == calls
