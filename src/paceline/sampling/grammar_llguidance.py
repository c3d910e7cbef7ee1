"""Grammars through llguidance: JSON schemas, regular expressions, Lark and GBNF, tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from paceline.sampling.grammar import GrammarSpec, TokenSource, Words
from paceline.types import RequestError

__all__ = ["LlguidanceLibrary"]

_WHITE_SPACE = r"\n {0,32}| "
"""Between the parts of JSON: nothing, one space, or a new line with an indent. Unbounded white
space would let a model that is at a loss go on with it for ever."""

_DSML = "｜DSML｜"
_ANY = "(.|\\n)*"
# A marker spelled in ordinary characters would be read as the marker.
_NO_MARKER = f"~/{_ANY}{_DSML}{_ANY}/"


class LlguidanceLibrary:
    """The library with a vocabulary.

    Args:
        tokenizer: of the model.
        tokens: bytes of each id; none for markers and for ids without a token.
        markers: ids that ordinary text is never made of.
        end_ids: ids that end a text.
    """

    name = "llguidance"

    def __init__(
        self,
        tokenizer: TokenSource,
        *,
        tokens: Sequence[bytes],
        markers: Sequence[int],
        end_ids: Sequence[int],
    ) -> None:
        self._source = tokenizer
        self._num_words = -(-len(tokens) // 32)
        vocabulary = _Vocabulary(tokenizer, tokens, markers, end_ids)
        self._tokenizer = llguidance.LLTokenizer(vocabulary, eos_token=list(end_ids))
        self._limits = llguidance.LLParserLimits(
            max_grammar_size=200_000, max_lexer_states=50_000, verbose_errors=False
        )

    def matcher(self, spec: GrammarSpec) -> LlguidanceMatcher:
        """Compile a grammar.

        Raises:
            RequestError: it is wrong or too large, with the library's reason.
        """
        try:
            text = self._written(spec)
        except ValueError as error:
            # Errors of a request are ValueErrors too, and say already what is wrong.
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"the {spec.kind} cannot be served: {error}") from None
        matcher = llguidance.LLMatcher(self._tokenizer, text, limits=self._limits, log_level=0)
        if matcher.is_error():
            raise RequestError(f"the {spec.kind} cannot be served: {_reason(matcher)}")
        return LlguidanceMatcher(matcher, self._num_words)

    def _written(self, spec: GrammarSpec) -> str:
        """A grammar in the library's own words."""
        matcher = llguidance.LLMatcher
        match spec.kind:
            case "json_schema" | "json_object":
                source = spec.source or '{"type":"object"}'
                return str(
                    matcher.grammar_from_json_schema(
                        source, defaults={"whitespace_pattern": _WHITE_SPACE}
                    )
                )
            case "regex":
                return str(matcher.grammar_from_regex(spec.source))
            case "grammar":
                return str(matcher.grammar_from_lark(_as_lark(spec.source)))
            case "choice":
                options = [_literal(text) for text in json.loads(spec.source)]
                return str(matcher.grammar_from_lark(f"start: {' | '.join(options)}"))
            case "tool_calls":
                marker = self._source.marker_id(_DSML)
                if marker is None:
                    raise RequestError(
                        f"tool calls need the marker {_DSML}, which this tokenizer does not have"
                    )
                wanted = json.loads(spec.source)
                return str(
                    matcher.grammar_from_lark(
                        _tool_grammar(
                            wanted["tools"],
                            f"<[{marker}]>",
                            required=wanted["required"],
                            at_once=wanted["at_once"],
                            form=wanted.get("form"),
                        )
                    )
                )


class LlguidanceMatcher:
    """The library's automaton, with its error state kept from the way back."""

    __slots__ = ("_matcher", "_num_words")

    def __init__(self, matcher: llguidance.LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    @property
    def error(self) -> str | None:
        """Why it can go on no more."""
        return _reason(self._matcher) if self._matcher.is_error() else None

    def words(self) -> Words:
        """Ids allowed here."""
        words = np.zeros(self._num_words, np.int32)
        if self._matcher.is_error():
            return words
        found = np.frombuffer(self._matcher.compute_bitmask(), "<i4")
        if self._matcher.is_error() or (
            # Where no text is left the library offers the end even if the text is not whole.
            self._matcher.is_stopped() and not self._matcher.is_accepting()
        ):
            return words
        reach = min(len(words), len(found))
        words[:reach] = found[:reach]
        return words

    def take(self, token: int) -> bool:
        """Walk over an id."""
        return bool(self._matcher.try_consume_tokens([token]) == 1)

    def back(self, num_tokens: int) -> bool:
        """Forget the last ids."""
        return bool(self._matcher.rollback(num_tokens)) and not self._matcher.is_error()

    def fork(self) -> LlguidanceMatcher:
        """Return another at the same place."""
        return LlguidanceMatcher(self._matcher.deep_copy(), self._num_words)


class _Vocabulary(llguidance.TokenizerWrapper):
    """A tokenizer as the library asks for it; its attributes are the library's names."""

    def __init__(
        self,
        tokenizer: TokenSource,
        tokens: Sequence[bytes],
        markers: Sequence[int],
        end_ids: Sequence[int],
    ) -> None:
        named = list(tokens)
        for marker in markers:
            named[marker] = tokenizer.token_bytes(marker) or f"<|{marker}|>".encode()
        self.tokens = named
        self.special_token_ids = list(markers)
        self.eos_token_id = end_ids[0]
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode()
        return self._encode(text, add_bos=False)


def _reason(matcher: llguidance.LLMatcher) -> str:
    """What the library complains of, without its own stack."""
    lines = str(matcher.get_error()).split("<backtrace>")[0].splitlines()
    text = " ".join(line.strip() for line in lines if line.strip())
    return text[:400] or "no reason is given"


def _as_lark(source: str) -> str:
    if re.search(r"^\s*(?:%llguidance\b|start\b[^:\n]*:(?!:=))", source, re.MULTILINE):
        return source
    if "::=" not in source:
        raise RequestError(
            "the grammar has no rule 'start:' (Lark) and no 'root ::=' (GBNF); allowed is one of "
            "these notations"
        )
    try:
        return gbnf_to_lark(_CODE_POINT.sub(_as_character, source))
    except Exception as error:
        raise RequestError(f"the grammar is no GBNF: {error}") from None


_CODE_POINT = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def _as_character(escape: re.Match[str]) -> str:
    """An escaped code point beyond ASCII as itself: Lark has no such escapes."""
    digits = escape[1] or escape[2]
    code = int(digits, 16) if digits else 0
    if not digits or not 0x80 <= code < 0x110000 or 0xD800 <= code < 0xE000:
        return escape[0]
    return chr(code)


def _literal(text: str) -> str:
    return json.dumps(text)


# Tool calls


def _tool_grammar(
    tools: Sequence[dict[str, Any]],
    marker: str,
    *,
    required: bool,
    at_once: bool,
    form: dict[str, Any] | None = None,
) -> str:
    """Lark of an answer with calls; the layout is that of DeepSeek-V4's encoding."""
    calls = " | ".join(f"call_{number}" for number in range(len(tools)))
    start = f"{'OPEN' if at_once else 'HEAD'} block{'' if required else ' | TEXT'}"
    rules = [
        "%llguidance {}",
        f"start: {start if form is None else 'OPEN block | form'}",
        f'block: {marker} "tool_calls>\\n" (call "\\n")+ "</" {marker} "tool_calls>"',
        f"call: {calls}",
        f"TEXT: /{_ANY}/ & {_NO_MARKER}",
        # The marker is an id of its own, so what comes before it ends there and nowhere else.
        f"HEAD: /{_ANY}\\n\\n</ & {_NO_MARKER}",
        r"OPEN: /\n\n</",
        f"STRING: /{_ANY}<\\// & {_NO_MARKER}",
    ]
    if form is not None:
        rules.append(f"form: {_json_rule(form)}")
    for number, tool in enumerate(tools):
        rules += _call_rules(number, tool, marker)
    return "\n".join(rules)


def _call_rules(number: int, tool: dict[str, Any], marker: str) -> list[str]:
    name, schema = tool["name"], tool["parameters"]
    where = f"the parameters of the tool {name!r}"
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object" or not isinstance(properties, dict):
        raise RequestError(f"{where} are {schema!r:.80}; allowed is a schema of type object")
    beyond = set(schema) - _OBJECT_KEYS
    if beyond:
        allowed = ", ".join(sorted(_OBJECT_KEYS))
        raise RequestError(f"{where} use {', '.join(sorted(beyond))}; allowed are {allowed}")
    for one in (name, *properties):
        if not one or '"' in one:
            raise RequestError(
                f"{where} hold the name {one!r}; allowed are names that are not empty and have no "
                "quotation mark, which the markup could not give back"
            )
    unknown = [key for key in required if key not in properties]
    if unknown:
        raise RequestError(f"{where} require {unknown[0]!r}, which is no property of theirs")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules: list[str] = []
    # first_i: the arguments from i on, one at least; rest_i: the same, or none.
    firsts: list[str] = []
    for place, (key, value) in enumerate(properties.items()):
        rule = f"p_{number}_{place}"
        follows = f" rest_{number}_{place + 1}" if place + 1 < len(properties) else ""
        rules.append(f"rest_{number}_{place}: {rule}{'' if key in required else '?'}{follows}")
        if not any(earlier in required for earlier in list(properties)[:place]):
            firsts.append(f"{rule}{follows}")
        variants = _parameter_variants(key, value, shared, rule, rules, where)
        head = _literal(f'parameter name="{key}" string="')
        rules.append(
            f'{rule}: "<" {marker} {head} ({" | ".join(variants)}) {marker} "parameter>\\n"'
        )
    arguments = [f'({" | ".join(firsts)}) "</"'] if firsts else []
    if not required:
        # What joins arguments and the closing tag is there without arguments too.
        arguments.append('"\\n</"')
    head = _literal(f'invoke name="{name}">\n')
    body = f'"<" {marker} {head} ({" | ".join(arguments)}) {marker} "invoke>"'
    return [f"call_{number}: {body}", *rules]


def _json_rule(schema: dict[str, Any]) -> str:
    guided = {**schema, "x-guidance": {"whitespace_pattern": _WHITE_SPACE}}
    return f"%json {json.dumps(guided)}"


_OBJECT_KEYS = {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions",
    "description", "title", "$schema", "strict",
}  # fmt: skip


def _parameter_variants(
    key: str,
    schema: object,
    shared: dict[str, Any],
    rule: str,
    rules: list[str],
    where: str,
) -> list[str]:
    """Ways to write one argument, up to the marker of its closing tag."""
    if not isinstance(schema, dict):
        schema = {}
    kinds = schema.get("type")
    listed = [kinds] if isinstance(kinds, str) else list(kinds or [])
    variants = []
    if "string" in listed:
        rules.append(f"{rule}_s: {_raw_string(schema, f'{rule}_S'.upper(), rules, where, key)}")
        variants.append(f'"true\\">" {rule}_s')
    rest = [kind for kind in listed if kind != "string"]
    if rest or not listed:
        other = dict(schema, **({"type": rest} if rest else {}))
        if rest and "enum" in other:
            other["enum"] = [value for value in other["enum"] if not isinstance(value, str)]
        rules.append(f"{rule}_j: {_json_rule({**other, **shared})}")
        variants.append(f'"false\\">" {rule}_j "</"')
    return variants


def _raw_string(
    schema: dict[str, Any], terminal: str, rules: list[str], where: str, key: str
) -> str:
    """A string that stands unquoted, with the beginning of the tag that closes it."""
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        texts = [_literal(f"{value}</") for value in values if isinstance(value, str)]
        if not texts:
            raise RequestError(f"{where} allow no text for {key!r}")
        return " | ".join(texts)
    beyond = set(schema) & {"format", "not", "allOf", "anyOf", "oneOf", "$ref"}
    if beyond:
        raise RequestError(
            f"{where} use {', '.join(sorted(beyond))} with the string {key!r}; allowed are enum, "
            "const, minLength, maxLength and pattern"
        )
    terms = []
    if "minLength" in schema or "maxLength" in schema:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        terms.append(f"/(.|\\n){{{least},{most}}}<\\//")
    if "pattern" in schema:
        terms.append(f"/{_searched(schema['pattern'])}<\\//")
    if not terms:
        return "STRING"
    rules.append(f"{terminal}: {' & '.join([*terms, _NO_MARKER])}")
    return terminal


def _searched(pattern: str) -> str:
    """A pattern that is looked for, as one that matches the whole text."""
    begins, ends = pattern.startswith("^"), bool(re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern))
    inner = pattern[begins : len(pattern) - ends]
    inner = llguidance.regex_to_lark(inner, "dw")
    return f"{'' if begins else _ANY}({inner}){'' if ends else _ANY}"
