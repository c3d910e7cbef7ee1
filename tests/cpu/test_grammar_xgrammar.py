"""Both grammar libraries behind the one interface: what they allow, and where they differ."""

from __future__ import annotations

import importlib.util
import json
import random

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

from paceline.sampling.grammar import GrammarSpec, walk
from paceline.sampling.grammar_compiler import GrammarCompiler
from paceline.types import ConfigError, RequestError

HAS_XGRAMMAR = importlib.util.find_spec("xgrammar") is not None
needs_xgrammar = pytest.mark.skipif(not HAS_XGRAMMAR, reason="xgrammar, an extra, is not installed")

TOKENIZER = SmallTokenizer(("ab", "ba", "abc", '{"', '":', '",', "01", "true", "null", "yes", "no"))
END = TOKENIZER.END


def make(library: str) -> GrammarCompiler:
    return GrammarCompiler(
        TOKENIZER,
        vocab_size=TOKENIZER.vocab_size + 40,
        end_ids=[END],
        library=library,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def default() -> GrammarCompiler:
    return make("llguidance")


@pytest.fixture(scope="module")
def other() -> GrammarCompiler:
    return make("xgrammar")


@pytest.mark.skipif(HAS_XGRAMMAR, reason="xgrammar is installed")
def test_a_library_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match="grammar-xgrammar"):
        make("xgrammar")


@needs_xgrammar
def test_regexes_allow_the_same_ids_where_text_is_not_forced(
    default: GrammarCompiler, other: GrammarCompiler
) -> None:
    """Where it is, llguidance keeps to the tokenizer's spelling and xgrammar allows every one."""
    compared = forced = 0
    for chance in seeds(60):
        # What a digit is they see differently: Unicode's here, ASCII's there.
        regex = random_regex(chance).replace("\\d", "[0-9]")
        ids, _ = random_walk(default.compile(GrammarSpec("regex", regex)), chance)
        # The notation's own switch takes the difference away.
        plain = default.compile(
            GrammarSpec("grammar", f'%llguidance {{"no_forcing": true}}\nstart: /{regex}/')
        ).cursor()
        one, two = (c.compile(GrammarSpec("regex", regex)).cursor() for c in (default, other))
        for token in [*ids, None]:
            allowed, expected = ids_of(one.mask()), ids_of(two.mask())
            assert ids_of(plain.mask()) == expected, regex
            compared += 1
            if allowed != expected:
                forced += 1
                assert len(allowed) == 1
                assert set(allowed) < set(expected)
            assert one.is_finished == two.is_finished
            if token is not None:
                assert one.advance(token)
                assert two.advance(token)
                assert plain.advance(token)
    assert 0 < forced < compared / 2


@needs_xgrammar
def test_choices_and_gbnf_allow_the_same_ids_where_text_is_not_forced(
    default: GrammarCompiler, other: GrammarCompiler
) -> None:
    specs = [
        GrammarSpec("choice", json.dumps(["yes", "yes no", "no", 'a "b"', "é\n"])),
        GrammarSpec("grammar", 'root ::= "a" [0-9]{1,2} x*\nx ::= "b" | "\\u00e9" | "\\n"'),
        GrammarSpec("grammar", 'root ::= item+ "."\nitem ::= "(" item* ")"'),
    ]
    for spec in specs:
        for chance in seeds(10):
            ids, _ = random_walk(default.compile(spec), chance, most=40)
            one, two = default.compile(spec).cursor(), other.compile(spec).cursor()
            for token in ids:
                allowed, expected = set(ids_of(one.mask())), set(ids_of(two.mask()))
                assert allowed == expected or (len(allowed) == 1 and allowed < expected)
                assert one.advance(token)
                assert two.advance(token)


@needs_xgrammar
def test_schemas_of_one_library_give_documents_that_fit_in_the_other(
    default: GrammarCompiler, other: GrammarCompiler
) -> None:
    """Their masks differ in white space and in spelling; see the documents' list."""
    for chance in seeds(30):
        schema = random_schema(chance)
        spec = GrammarSpec("json_schema", json.dumps(schema))
        ids, cursor = random_walk(other.compile(spec), chance, most=2000)
        if not cursor.is_finished:
            continue
        text = b"".join(TOKENIZER.token_bytes(token) for token in ids).decode()
        assert fits(json.loads(text), schema), (schema, text)
        follower = other.compile(spec).cursor()
        mine, _ = random_walk(default.compile(spec), chance)
        written = b"".join(TOKENIZER.token_bytes(token) for token in mine).decode()
        compact = json.dumps(json.loads(written), ensure_ascii=False)
        if '"const": [' in spec.source or '"const": {' in spec.source:
            continue  # There a constant has no white space within.
        taken = [follower.advance(token) for token in TOKENIZER.encode(compact)]
        assert all(taken), (schema, compact)


@needs_xgrammar
def test_the_way_back_is_exact_in_the_other_library(other: GrammarCompiler) -> None:
    specs = [
        GrammarSpec("json_object"),
        GrammarSpec("regex", "(?:ab|ba){2,4}[0-9]?"),
        GrammarSpec("choice", json.dumps(["yes", "no"])),
    ]
    for spec in specs:
        grammar = other.compile(spec)
        for seed in range(10):
            chance = random.Random(seed)
            cursor, ids = grammar.cursor(), []
            for _ in range(30):
                if chance.random() < 0.65:
                    token = chance.choice(ids_of(cursor.mask()))
                    assert cursor.advance(token)
                    ids.append(token)
                else:
                    back = chance.randint(0, min(8, len(ids)))
                    cursor.rollback(back)
                    ids = ids[: len(ids) - back]
                if chance.random() < 0.1:
                    cursor = cursor.copy()
                replay = grammar.cursor()
                assert all(replay.advance(token) for token in ids)
                assert ids_of(cursor.mask()) == ids_of(replay.mask())
                assert cursor.is_finished == replay.is_finished


@needs_xgrammar
def test_markers_are_no_text_and_forced_ids_are_alone(other: GrammarCompiler) -> None:
    cursor = other.compile(GrammarSpec("regex", "(.|\\n)*")).cursor()
    allowed = ids_of(cursor.mask())
    assert TOKENIZER.MARKER not in allowed
    assert max(allowed) < TOKENIZER.vocab_size
    assert END in allowed
    cursor = other.compile(GrammarSpec("regex", "x[zy]q")).cursor()
    assert cursor.forced(8) == TOKENIZER.encode("x")
    assert len(walk(cursor, TOKENIZER.encode("xyq"))) == 4


@needs_xgrammar
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec("regex", "a("), "not closed"),
        (GrammarSpec("grammar", "start: A"), "allowed is GBNF"),
        (GrammarSpec("grammar", "root ::= foo"), "foo"),
        (GrammarSpec.tool_calls([{"function": {"name": "f"}}]), "served by llguidance"),
    ],
)
def test_a_bad_grammar_is_refused_by_the_other_library_too(
    other: GrammarCompiler, spec: GrammarSpec, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        other.compile(spec)


@needs_xgrammar
def test_the_differences_that_are_documented_are_there(
    default: GrammarCompiler, other: GrammarCompiler
) -> None:
    digits = GrammarSpec("regex", "\\d")
    thai = "๓".encode()[0]
    byte = TOKENIZER.tokens.index(bytes([thai]))
    assert default.compile(digits).cursor().allows(byte)
    assert not other.compile(digits).cursor().allows(byte)
    odd = GrammarSpec("json_schema", '{"not":{"type":"string"}}')
    with pytest.raises(RequestError, match="Unimplemented keys"):
        default.compile(odd)
    assert other.compile(odd).cursor().mask().any()
    spaced = GrammarSpec("json_object")
    text = TOKENIZER.encode("{   ")
    assert len(walk(default.compile(spaced).cursor(), text)) < 5
    assert len(walk(other.compile(spaced).cursor(), text)) == 5
    constant = GrammarSpec("json_schema", '{"const":[1,2]}')
    text = TOKENIZER.encode("[1, 2]")
    assert len(walk(default.compile(constant).cursor(), text)) == 1 + len(text)
    assert len(walk(other.compile(constant).cursor(), text)) < 1 + len(text)
