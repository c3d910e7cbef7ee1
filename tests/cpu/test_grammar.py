"""Grammars and their cursors: masks against brute force, the way back, and what is refused."""

from __future__ import annotations

import json
import random
import re
import threading
import time

import numpy as np
import pytest
from grammar_kit import (
    SmallTokenizer,
    fits,
    ids_of,
    random_regex,
    random_schema,
    random_walk,
    seeds,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import SamplingParams, bundled_model_path
from paceline.sampling.grammar import (
    AfterMarker,
    Grammar,
    GrammarSpec,
    Matcher,
    Words,
    walk,
    words_of,
)
from paceline.sampling.grammar_compiler import GrammarCompiler
from paceline.sampling.request import NON_FINITE, Sampler
from paceline.text import Tokenizer
from paceline.text.chat import ChatTemplate
from paceline.text.parser import parse_answer
from paceline.types import ConfigError, RequestError

PIECES = (
    "ab",
    "ba",
    "abc",
    '{"',
    '":',
    '",',
    " the",
    "01",
    "true",
    "null",
    "</",
    "\n\n",
    "yes",
    "no",
)
TOKENIZER = SmallTokenizer(PIECES)
END, MARKER = TOKENIZER.END, TOKENIZER.MARKER


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, vocab_size=TOKENIZER.vocab_size + 40, end_ids=[END])


def text_of(ids: list[int]) -> str:
    return b"".join(TOKENIZER.token_bytes(i) or "｜DSML｜".encode() for i in ids).decode()


def schema_spec(schema: object) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


SPECS = {
    "object": GrammarSpec("json_object"),
    "schema": schema_spec(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 4}, "n": {"type": "integer"}},
            "required": ["name", "n"],
            "additionalProperties": False,
        }
    ),
    "regex": GrammarSpec("regex", "(?:ab|ba){2,4}[0-9]?"),
    "choice": GrammarSpec("choice", json.dumps(["yes", "yes no", "no"])),
    "lark": GrammarSpec("grammar", 'start: item+ "."\nitem: "(" item* ")"'),
    "counted": GrammarSpec("grammar", 'start: a "b"\na[max_tokens=3]: /a*/'),
    "gbnf": GrammarSpec("grammar", 'root ::= "a" [0-9]{1,2} x*\nx ::= "b" | "\\u00e9"'),
    "tools": GrammarSpec.tool_calls(
        [{"function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}}}}}]
    ),
}


# Masks


@pytest.mark.parametrize("seed", range(12))
def test_masks_are_those_of_the_language_listed(compiler: GrammarCompiler, seed: int) -> None:
    """Where the text is forced the library keeps to the tokenizer's spelling, and nowhere else."""
    chance = random.Random(seed)
    language = {"".join(chance.choices("ab01", k=chance.randint(1, 7))) for _ in range(12)}
    grammar = compiler.compile(GrammarSpec("choice", json.dumps(sorted(language))))
    whole = {word.encode() for word in language}
    pending, seen = [grammar.cursor()], 0
    spelled = {pending[0]: b""}
    while pending and seen < 300:
        cursor = pending.pop()
        before = spelled.pop(cursor)
        seen += 1
        rests = [word[len(before) :] for word in whole if word.startswith(before)]
        legal = {
            token
            for token, text in enumerate(TOKENIZER.tokens)
            if text and any(rest.startswith(text) for rest in rests)
        }
        if b"" in rests:
            legal.add(END)
        allowed = set(ids_of(cursor.mask()))
        assert allowed
        assert allowed <= legal
        if allowed != legal:
            longest = max((TOKENIZER.token_bytes(token) for token in legal), key=len)
            assert len(allowed) == 1
            assert END not in legal
            assert all(longest.startswith(TOKENIZER.token_bytes(token)) for token in legal)
        assert cursor.is_finished == (legal == {END})
        for token in allowed - {END}:
            follower = cursor.copy()
            assert follower.advance(token)
            spelled[follower] = before + TOKENIZER.token_bytes(token)
            pending.append(follower)


def test_random_schemas_give_documents_that_fit(compiler: GrammarCompiler) -> None:
    for chance in seeds(40):
        schema = random_schema(chance)
        ids, cursor = random_walk(compiler.compile(schema_spec(schema)), chance)
        assert cursor.is_finished, (schema, text_of(ids))
        assert fits(json.loads(text_of(ids)), schema), (schema, text_of(ids))


def test_random_regexes_give_texts_that_match(compiler: GrammarCompiler) -> None:
    for chance in seeds(60):
        regex = random_regex(chance)
        ids, cursor = random_walk(compiler.compile(GrammarSpec("regex", regex)), chance)
        assert cursor.is_finished, regex
        assert re.fullmatch(regex, text_of(ids)), (regex, text_of(ids))


def test_any_object_is_one(compiler: GrammarCompiler) -> None:
    for chance in seeds(20):
        ids, cursor = random_walk(compiler.compile(SPECS["object"]), chance, most=2000)
        if cursor.is_finished:
            assert isinstance(json.loads(text_of(ids)), dict)


def test_documents_as_a_model_writes_them_are_taken(compiler: GrammarCompiler) -> None:
    document = {"name": 'a"b', "n": -12}
    for text in (
        json.dumps(document),
        json.dumps(document, indent=2),
        json.dumps(document, separators=(",", ":")),
    ):
        cursor = compiler.compile(SPECS["schema"]).cursor()
        assert all(cursor.advance(token) for token in TOKENIZER.encode(text)), text
        assert cursor.allows(END)
    cursor = compiler.compile(SPECS["schema"]).cursor()
    spaces = [cursor.advance(token) for token in TOKENIZER.encode("{  ")]
    assert spaces == [True, True, False], "white space must not go on for ever"


def test_markers_and_rows_without_a_token_are_never_text(compiler: GrammarCompiler) -> None:
    cursor = compiler.compile(GrammarSpec("regex", "(.|\\n)*")).cursor()
    allowed = ids_of(cursor.mask())
    assert MARKER not in allowed
    assert END in allowed
    assert max(allowed) < TOKENIZER.vocab_size
    spelled = compiler.compile(GrammarSpec("choice", json.dumps(["｜DSML｜"])))
    ids, _ = random_walk(spelled, random.Random(0))
    assert MARKER not in ids
    assert text_of(ids) == "｜DSML｜"


def test_an_id_without_a_token_is_not_allowed_where_a_grammar_names_it(
    compiler: GrammarCompiler,
) -> None:
    beyond = TOKENIZER.vocab_size + 2
    cursor = compiler.compile(GrammarSpec("grammar", f'start: "ab" | <[{beyond}]>')).cursor()
    assert ids_of(cursor.mask())
    assert not cursor.allows(beyond)


def test_a_marker_comes_where_the_grammar_names_its_id(compiler: GrammarCompiler) -> None:
    cursor = compiler.compile(GrammarSpec("grammar", f'start: "ab" <[{MARKER}]> "no"')).cursor()
    assert cursor.forced(9) == [*TOKENIZER.encode("ab"), MARKER, *TOKENIZER.encode("no")]


@pytest.mark.parametrize("ends", [(END,), (END, TOKENIZER.vocab_size + 3)])
def test_every_end_id_may_end_a_whole_text_and_none_another(ends: tuple[int, ...]) -> None:
    compiler = GrammarCompiler(TOKENIZER, vocab_size=TOKENIZER.vocab_size + 40, end_ids=ends)
    cursor = compiler.compile(GrammarSpec("regex", "ab*")).cursor()
    assert not any(cursor.allows(end) for end in ends)
    assert cursor.advance(TOKENIZER.encode("a")[0])
    assert not cursor.is_finished
    for end in ends:
        assert cursor.advance(end)
        assert cursor.is_finished
        assert ids_of(cursor.mask()) == sorted(ends)
        cursor.rollback(1)
        assert not cursor.is_finished
    compiler.close()


# The way back


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_masks_after_any_way_are_those_of_a_fresh_one(
    compiler: GrammarCompiler, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([*SPECS, "after"]))
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    grammar = compiler.compile(SPECS["schema" if name == "after" else name])

    def fresh():
        return AfterMarker.of(grammar, end_id=MARKER) if name == "after" else grammar.cursor()

    cursor, ids = fresh(), []
    for _ in range(data.draw(st.integers(1, 30))):
        what = chance.random()
        if what < 0.6:
            allowed = ids_of(cursor.mask()) if chance.random() < 0.8 else range(120)
            token = MARKER if name == "after" and chance.random() < 0.3 else chance.choice(allowed)
            legal = cursor.allows(token)
            assert cursor.advance(token) is legal
            ids += [token] * legal
        elif what < 0.9:
            back = chance.randint(0, min(9, len(ids)))
            cursor.rollback(back)
            ids = ids[: len(ids) - back]
        else:
            old, cursor = cursor, cursor.copy()
            if not old.is_finished:
                old.advance(chance.choice(ids_of(old.mask())))
        assert cursor.num_tokens == len(ids)
        replay = fresh()
        for token in ids:
            assert replay.advance(token)
        assert ids_of(cursor.mask()) == ids_of(replay.mask())
        assert cursor.is_finished == replay.is_finished


@pytest.mark.parametrize("name", SPECS)
def test_no_more_is_taken_back_than_was_walked(compiler: GrammarCompiler, name: str) -> None:
    cursor = compiler.compile(SPECS[name]).cursor()
    before = ids_of(cursor.mask())
    assert cursor.advance(before[-1])
    with pytest.raises(ValueError, match="2 tokens to go back; allowed are 0 to 1"):
        cursor.rollback(2)
    with pytest.raises(ValueError, match="-1 tokens"):
        cursor.rollback(-1)
    cursor.rollback(1)
    assert ids_of(cursor.mask()) == before


def test_a_library_that_runs_into_a_limit_is_made_anew_on_the_way_back() -> None:
    class Limited:
        """Takes any id, and breaks for good behind three of which the first is 1."""

        def __init__(self, ids: tuple[int, ...] = (), broken: bool = False) -> None:
            self.ids, self.broken = ids, broken

        @property
        def error(self) -> str | None:
            return "too many states" if self.broken else None

        def words(self) -> Words:
            self.broken |= len(self.ids) >= 3 and self.ids[0] == 1
            return words_of(() if self.broken else range(1, 9), 64).copy()

        def take(self, token: int) -> bool:
            self.ids += (token,) * (not self.broken)
            return not self.broken

        def back(self, num_tokens: int) -> bool:
            assert not self.broken, "nothing may be asked of it"
            self.ids = self.ids[:-num_tokens]
            return True

        def fork(self) -> Matcher:
            return Limited(self.ids, self.broken)

    grammar = Grammar(SPECS["regex"], Limited(), 64, words_of(range(64), 64), words_of([0], 64))
    cursor = grammar.cursor()
    masks = walk(cursor, [1, 2, 3, 4])
    assert [len(ids_of(words)) for words in masks] == [8, 8, 8, 0]
    assert cursor.error is None
    # Another way is open, to the same place too.
    assert [len(ids_of(words)) for words in walk(cursor, [5, 2, 3, 4])] == [8] * 5
    assert all(cursor.advance(5) for _ in range(3))
    assert cursor.error is None
    cursor.rollback(3)
    assert all(cursor.advance(token) for token in (1, 5, 5))
    assert ids_of(cursor.mask()) == []
    assert not cursor.is_finished, "a failure is no end"
    assert cursor.error == "too many states"
    assert not cursor.advance(5)
    assert cursor.copy().error == "too many states"


# Drafts


@pytest.mark.parametrize("name", SPECS)
def test_walk_masks_each_row_by_the_drafts_before_it(compiler: GrammarCompiler, name: str) -> None:
    grammar = compiler.compile(SPECS[name])
    for chance in seeds(8):
        ids, _ = random_walk(grammar, chance, most=40)
        for start in range(0, len(ids), 3):
            cursor = grammar.cursor()
            assert all(cursor.advance(token) for token in ids[:start])
            masks = walk(cursor, ids[start : start + 8])
            assert cursor.num_tokens == start
            assert len(masks) == 1 + len(ids[start : start + 8])
            replay = grammar.cursor()
            for place, token in enumerate(ids[: start + len(masks) - 1]):
                if place >= start:
                    assert ids_of(masks[place - start]) == ids_of(replay.mask())
                assert replay.advance(token)
            assert ids_of(masks[-1]) == ids_of(replay.mask())


def test_walk_ends_at_the_first_draft_that_is_not_allowed(compiler: GrammarCompiler) -> None:
    cursor = compiler.compile(SPECS["choice"]).cursor()
    yes, no, other = (TOKENIZER.encode(text)[0] for text in ("yes", "no", "x"))
    assert len(walk(cursor, [other, yes])) == 1
    assert len(walk(cursor, [yes, other, yes])) == 2
    assert len(walk(cursor, [yes, -1])) == 2, "what ends a chain on a device is no draft"
    # Behind the end there is nothing but the end.
    masks = walk(cursor, [no, END, yes])
    assert len(masks) == 3
    assert ids_of(masks[1]) == ids_of(masks[2]) == [END]


@pytest.mark.parametrize("name", SPECS)
def test_forced_ids_are_alone_in_their_masks(compiler: GrammarCompiler, name: str) -> None:
    grammar = compiler.compile(SPECS[name])
    for chance in seeds(10):
        ids, _ = random_walk(grammar, chance, most=30)
        cursor = grammar.cursor()
        for token in ids:
            run = cursor.forced(5)
            follower, expected = cursor.copy(), []
            while len(expected) < 5 and len(allowed := ids_of(follower.mask())) == 1:
                if follower.is_finished:
                    break
                expected += allowed
                follower.advance(allowed[0])
            assert run == expected
            assert END not in run
            assert cursor.advance(token)


def test_forced_text_is_one_run(compiler: GrammarCompiler) -> None:
    cursor = compiler.compile(GrammarSpec("regex", "[xy]abcno01 the[xy]")).cursor()
    assert cursor.forced(8) == []
    cursor.advance(TOKENIZER.encode("x")[0])
    run = TOKENIZER.encode("abcno01 the")
    assert cursor.forced(8) == run[: len(run)]
    assert cursor.forced(2) == run[:2]


# Behind a marker


@pytest.mark.parametrize("place", range(9))
def test_a_grammar_begins_right_behind_its_marker(compiler: GrammarCompiler, place: int) -> None:
    grammar = compiler.compile(SPECS["choice"])
    cursor = AfterMarker.of(grammar, end_id=MARKER)
    x, yes = TOKENIZER.encode("x")[0], TOKENIZER.encode("yes")[0]
    block = [x] * place + [MARKER] + [yes]
    masks = walk(cursor, block)
    assert len(masks) == len(block) + 1
    for row, words in enumerate(masks):
        allowed = ids_of(words)
        if row <= place:
            assert len(allowed) > 100, f"row {row} is reasoning"
            assert END not in allowed, "the answer would end before its grammar"
            assert MARKER in allowed
            assert max(allowed) < TOKENIZER.vocab_size
        else:
            replay = grammar.cursor()
            assert all(replay.advance(token) for token in block[place + 1 : row])
            assert allowed == ids_of(replay.mask())
    # Whatever is accepted of the block, the cursor goes on from there.
    for accepted in range(len(block) + 1):
        other = cursor.copy()
        assert all(other.advance(token) for token in block[:accepted])
        assert ids_of(other.mask()) == ids_of(masks[accepted])
    assert not cursor.is_finished
    # A marker of the answer's own is no text.
    assert len(walk(cursor, [MARKER, MARKER])) == 2


def test_a_marker_that_is_no_token_is_refused(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(SPECS["choice"])
    for token in (-1, END, TOKENIZER.vocab_size, 10**6):
        with pytest.raises(ValueError, match="marker"):
            AfterMarker.of(grammar, end_id=token)


# Tool calls

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "minLength": 1, "maxLength": 6},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "code": {"type": "string", "pattern": "^[A-C]{2}$"},
                "where": {"type": ["string", "null"], "maxLength": 3},
                "box": {"$ref": "#/$defs/box"},
            },
            "required": ["city", "days"],
            "$defs": {"box": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


def test_tool_calls_parse_and_follow_their_schemas(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(GrammarSpec.tool_calls([WEATHER, NOW], required=True))
    names = set()
    for chance in seeds(60):
        cursor = grammar.cursor()
        for token in TOKENIZER.encode("ab\n\n<"):
            assert cursor.advance(token)
        assert cursor.advance(MARKER)
        ids, cursor = random_walk(cursor, chance, most=3000)
        assert cursor.is_finished
        text = "ab\n\n<｜DSML｜" + text_of(ids)
        answer = parse_answer(text, thinking=False)
        assert answer.errors == []
        assert answer.content == "ab"
        assert answer.tool_calls
        for call in answer.tool_calls:
            names.add(call.name)
            assert call.error is None
            given = json.loads(call.arguments)
            if call.name == "now":
                assert given == {}
                continue
            assert 1 <= len(given.pop("city")) <= 6
            assert 1 <= given.pop("days") <= 14
            assert given.pop("unit", "C") in ("C", "F")
            assert re.fullmatch("[A-C]{2}", given.pop("code", "AA"))
            assert len(given.pop("where", None) or "") <= 3
            assert all(isinstance(item, bool) for item in given.pop("box", []))
            assert given == {}
    assert names == {"weather", "now"}


def test_text_before_calls_is_free_and_alone_where_calls_are_not_required(
    compiler: GrammarCompiler,
) -> None:
    free = compiler.compile(GrammarSpec.tool_calls([NOW])).cursor()
    must = compiler.compile(GrammarSpec.tool_calls([NOW], required=True)).cursor()
    for token in TOKENIZER.encode("no < yes"):
        assert free.advance(token)
        assert must.advance(token)
    assert free.allows(END)
    assert not must.allows(END)
    assert not free.allows(MARKER), "calls begin behind a blank line"
    for token in TOKENIZER.encode("\n\n<"):
        assert free.advance(token)
    assert free.allows(MARKER)
    assert free.advance(MARKER)
    assert text_of(free.forced(200)) == (
        'tool_calls>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n'
    )
    plain = compiler.compile(GrammarSpec.tool_calls([NOW])).cursor()
    for spelled in (must, plain):
        taken = [spelled.advance(token) for token in TOKENIZER.encode("｜DSML｜")]
        assert not all(taken), "a marker spelled out in text would be read as one"


def test_a_string_of_a_call_does_not_spell_the_marker_that_ends_it(
    compiler: GrammarCompiler,
) -> None:
    for schema in ({"type": "string"}, {"type": "string", "maxLength": 40}):
        tool = {"name": "f", "parameters": {"properties": {"s": schema}, "required": ["s"]}}
        cursor = compiler.compile(GrammarSpec.tool_calls([{"function": tool}])).cursor()
        for piece in ("\n\n<", ">tool_calls>\n<", '>invoke name="f">\n<'):
            ids = TOKENIZER.encode(piece.removeprefix(">"))
            assert all(map(cursor.advance, [MARKER] * piece.startswith(">") + ids))
        ids = TOKENIZER.encode('parameter name="s" string="true">ab</')
        assert all(map(cursor.advance, [MARKER, *ids]))
        assert cursor.allows(MARKER)
        assert not all(map(cursor.advance, TOKENIZER.encode("｜DSML｜")))


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ([], "no tool is given"),
        ([{"type": "function"}], "allowed is a mapping with a named function"),
        ([NOW, NOW], "'now' is given twice"),
        ([{"function": {"name": "f", "parameters": {"type": "array"}}}], "a schema of type object"),
        ([{"function": {"name": "f", "parameters": {"oneOf": []}}}], "use oneOf; allowed are"),
        ([{"function": {"name": "f", "parameters": {"required": ["q"]}}}], "require 'q'"),
        ([{"function": {"name": 'f"g'}}], "have no quotation mark"),
        (
            [
                {
                    "function": {
                        "name": "f",
                        "parameters": {"properties": {"d": {"type": "string", "format": "date"}}},
                    }
                }
            ],
            "use format with the string 'd'",
        ),
    ],
)
def test_tools_that_no_grammar_can_follow_are_refused(
    compiler: GrammarCompiler, tools: list[object], reason: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)):
        compiler.compile(GrammarSpec.tool_calls(tools))


# At the door


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec("regex", "a("), "unclosed group"),
        (GrammarSpec("regex", "a(?=b)"), "look-around"),
        (GrammarSpec("regex", "(a)\\1"), "backreferences are not supported"),
        (GrammarSpec("grammar", "foo"), "no rule 'start:' (Lark) and no 'root ::=' (GBNF)"),
        (GrammarSpec("grammar", "start: foo"), 'unknown name: "foo"'),
        (GrammarSpec("grammar", 'root ::= "a'), "no GBNF"),
        (GrammarSpec("grammar", 'x ::= "a"'), "No 'root' rule"),
        (GrammarSpec("grammar", "start: A\nA: /a/ & /b/"), "allows no text"),
        (schema_spec({"not": {}}), 'Unimplemented keys: ["not"]'),
        (schema_spec({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema_spec({"type": "strin"}), "Invalid type: strin"),
        (schema_spec({"type": "string", "format": "colour"}), "Unknown format: colour"),
        (schema_spec({"$ref": "https://example.com/a.json"}), "not present in a registry"),
        (schema_spec({"enum": []}), "Unsatisfiable"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_reason(
    compiler: GrammarCompiler, spec: GrammarSpec, reason: str
) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match=re.escape(reason)) as refused:
            compiler.compile(spec)
        assert spec.kind in str(refused.value) or "grammar" in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "a" * 200_000),
        GrammarSpec("regex", "(a{400}){400}b"),
        GrammarSpec("regex", "(" * 50_000),
        GrammarSpec("grammar", "start: " + "(" * 5_000 + '"a"' + ")" * 5_000),
        GrammarSpec("json_schema", '{"items":' * 5_000 + "{}" + "}" * 5_000),
        schema_spec(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]}
                    for i in range(8)
                ]
            }
        ),
    ],
    ids=("long", "forced", "deep-regex", "deep-lark", "deep-schema", "product"),
)
def test_a_grammar_that_explodes_is_refused_soon(
    compiler: GrammarCompiler, spec: GrammarSpec
) -> None:
    start = time.perf_counter()
    with pytest.raises(RequestError):
        compiler.compile(spec)
    assert time.perf_counter() - start < 10


def test_deep_rules_do_not_end_the_process(compiler: GrammarCompiler) -> None:
    count = 4_500
    rules = [f'r{i}: ("a" | "c") r{i + 1}' for i in range(count)]
    spec = GrammarSpec("grammar", "\n".join(["start: r0", *rules, f'r{count}: "b"']))
    cursor = compiler.compile(spec).cursor()
    assert cursor.allows(TOKENIZER.encode("c")[0])


def test_a_compiled_grammar_is_kept_by_its_content(compiler: GrammarCompiler) -> None:
    one = compiler.compile(GrammarSpec("regex", "ab{3}"))
    assert compiler.compile(GrammarSpec("regex", "".join(["ab", "{3}"]))) is one
    small = GrammarCompiler(TOKENIZER, vocab_size=TOKENIZER.vocab_size, end_ids=[END], max_cached=2)
    kept = small.compile(GrammarSpec("regex", "a"))
    small.compile(GrammarSpec("regex", "b"))
    assert small.compile(GrammarSpec("regex", "a")) is kept
    small.compile(GrammarSpec("regex", "c"))
    assert small.compile(GrammarSpec("regex", "a")) is kept
    gone = small.submit(GrammarSpec("regex", "b"))
    assert gone is not small.submit(GrammarSpec("regex", "a"))
    small.close()


def test_compiling_holds_up_nobody_and_is_given_up_in_time() -> None:
    entered, gate = threading.Event(), threading.Event()

    class Slow(SmallTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            entered.set()
            gate.wait(30)
            return super().token_bytes(token_id)

    compiler = GrammarCompiler(
        Slow(PIECES), vocab_size=TOKENIZER.vocab_size, end_ids=[END], max_seconds=0.05
    )
    spec = GrammarSpec("regex", "ab")
    future = compiler.submit(spec)
    assert entered.wait(10)
    assert not future.done()
    assert compiler.submit(spec) is future
    with pytest.raises(RequestError, match=r"longer than 0\.05 s to compile"):
        compiler.compile(spec)
    gate.set()
    assert future.result(10).cursor().forced(4) == TOKENIZER.encode("ab")
    assert compiler.compile(spec) is future.result()
    compiler.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"end_ids": []}, "end_ids are []"),
        ({"end_ids": [10**6]}, "allowed is at least one id of 0 to"),
        ({"library": "outlines"}, "allowed are 'llguidance' and 'xgrammar'"),
        ({"max_cached": 0}, "max_cached is 0"),
        ({"max_seconds": 0.0}, "max_seconds 0.0"),
    ],
)
def test_a_compiler_with_wrong_options_is_refused(change: dict[str, object], reason: str) -> None:
    options: dict[str, object] = {"vocab_size": TOKENIZER.vocab_size, "end_ids": [END], **change}
    with pytest.raises(ConfigError, match=re.escape(reason)):
        GrammarCompiler(TOKENIZER, **options)  # type: ignore[arg-type]


def test_specs_come_from_parameters() -> None:
    of = GrammarSpec.of
    assert of(SamplingParams()) is None
    assert of(SamplingParams(json_object=True)) == GrammarSpec("json_object")
    assert of(SamplingParams(regex="a")) == GrammarSpec("regex", "a")
    assert of(SamplingParams(grammar="start: A")) == GrammarSpec("grammar", "start: A")
    assert of(SamplingParams(choice=("a", "b"))) == GrammarSpec("choice", '["a", "b"]')
    as_text = of(SamplingParams(json_schema='{ "type" : "object" }'))
    assert as_text == of(SamplingParams(json_schema={"type": "object"}))
    # The order of keys is the order of the answer's.
    one, other = ({"properties": {"a": {}, "b": {}}}, {"properties": {"b": {}, "a": {}}})
    assert of(SamplingParams(json_schema=one)) != of(SamplingParams(json_schema=other))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ('{"type": ', "json_schema is no JSON"),
        ("[1]", "allowed is a JSON object"),
        ({"const": float("nan")}, "json_schema is no JSON"),
        ({"const": {1, 2}}, "json_schema is no JSON"),
        ("[" * 100_000, "json_schema"),
        ({"items": [{"multipleOf": 10**7}]}, "multipleOf of 10000000; allowed is at most 100000"),
    ],
)
def test_a_schema_that_is_none_is_refused(schema: object, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)):
        GrammarSpec.of(SamplingParams(json_schema=schema))


# With what is around it


@pytest.fixture(scope="module")
def bundled() -> tuple[Tokenizer, GrammarCompiler]:
    tokenizer = Tokenizer(bundled_model_path(), vocab_size=8192, bos_token_id=0)
    return tokenizer, GrammarCompiler(tokenizer, vocab_size=8192, end_ids=[1])


def test_calls_as_the_chat_encoding_writes_them_are_taken(
    bundled: tuple[Tokenizer, GrammarCompiler],
) -> None:
    tokenizer, compiler = bundled
    calls = [
        ("weather", {"city": "Köln", "days": 3, "unit": "C", "where": None, "box": [True, False]}),
        ("now", {}),
    ]
    answer = {
        "role": "assistant",
        "content": "I look it up.",
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in calls
        ],
    }
    template = ChatTemplate.for_tokenizer(tokenizer)
    messages = [{"role": "user", "content": "How is it?"}, answer, {"role": "user", "content": "?"}]
    prompt = template.render(messages, tools=[WEATHER, NOW], thinking=False)
    ids = prompt.ids(tokenizer)
    marker = tokenizer.marker_id("</think>")
    start = ids.index(marker) + 1
    said = ids[start : ids.index(1, start)]
    assert "I look it up." in tokenizer.decode(said)
    cursor = compiler.compile(GrammarSpec.tool_calls([WEATHER, NOW])).cursor()
    for place, token in enumerate(said):
        assert cursor.advance(token), tokenizer.decode(said[: place + 1])
    assert cursor.is_finished


def test_markers_of_the_models_tokenizer_are_no_text(
    bundled: tuple[Tokenizer, GrammarCompiler],
) -> None:
    tokenizer, compiler = bundled
    cursor = compiler.compile(GrammarSpec("regex", "(.|\\n)*")).cursor()
    assert tokenizer.added_ids & set(ids_of(cursor.mask())) == {1}
    spelled = compiler.compile(GrammarSpec("choice", json.dumps(["</think>"])))
    ids, _ = random_walk(spelled, random.Random(1), end_ids=(1,))
    assert tokenizer.decode(ids) == "</think>"
    assert tokenizer.added_ids.isdisjoint(ids)


@pytest.mark.parametrize("seed", range(20))
def test_greedy_picks_under_a_mask_are_those_of_the_law(seed: int) -> None:
    generator = np.random.default_rng(seed)
    logits = np.round(generator.standard_normal(100).astype(np.float32), seed % 2)
    logits[generator.random(100) < 0.2] = -np.inf
    sampler = Sampler(SamplingParams(), vocab_size=100, prompt_ids=[1])
    for share in (0.0, 0.05, 0.5, 1.0):
        mask = words_of(np.flatnonzero(generator.random(100) < share).tolist(), 100)
        law = sampler.law(logits, mask=mask)
        picked = sampler.pick(logits, mask=mask)
        assert picked == (law if isinstance(law, int) else int(law.ids[0]))
    logits[7] = np.nan
    assert sampler.pick(logits, mask=words_of([1], 100)) == NON_FINITE
