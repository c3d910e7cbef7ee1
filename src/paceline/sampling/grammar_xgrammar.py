"""Grammars through xgrammar, where it is installed: JSON, regular expressions, GBNF and choices."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.sampling.grammar import GrammarSpec, Words
from paceline.types import ConfigError, RequestError

__all__ = ["XGrammarLibrary", "check_installed"]


def check_installed() -> None:
    """Make sure that the library is there.

    Raises:
        ConfigError: it is not (says what to install).
    """
    if importlib.util.find_spec("xgrammar") is None:
        raise ConfigError(
            "the grammar library 'xgrammar' is not installed; install paceline[grammar-xgrammar], "
            "or use 'llguidance'"
        )


class XGrammarLibrary:
    """The library with a vocabulary.

    Args:
        tokens: bytes of each id; none for markers and for ids without a token.
        markers: ids that ordinary text is never made of.
        end_ids: ids that end a text.
    """

    name = "xgrammar"

    def __init__(
        self, *, tokens: Sequence[bytes], markers: Sequence[int], end_ids: Sequence[int]
    ) -> None:
        check_installed()
        import xgrammar

        self._library: Any = xgrammar
        self._end_ids = list(end_ids)
        # An id without bytes would match everywhere, so it is given none of a text's: the library
        # treats a token that begins with a zero byte of its own as special where it is empty.
        info = xgrammar.TokenizerInfo(
            list(tokens),
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=len(tokens),
            stop_token_ids=self._end_ids,
            add_prefix_space=False,
        )
        self._num_words = -(-len(tokens) // 32)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def matcher(self, spec: GrammarSpec) -> XGrammarMatcher:
        """Compile a grammar.

        Raises:
            RequestError: it is wrong, or of a kind that needs llguidance.
        """
        try:
            compiled = self._compiled(spec)
        except RequestError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:400]
            raise RequestError(f"the {spec.kind} cannot be served: {reason}") from None
        return XGrammarMatcher(self._library, compiled, self._end_ids, self._num_words)

    def _compiled(self, spec: GrammarSpec) -> Any:
        compiler = self._compiler
        match spec.kind:
            case "json_schema" | "json_object":
                return compiler.compile_json_schema(spec.source or '{"type":"object"}')
            case "regex":
                return compiler.compile_regex(spec.source)
            case "grammar":
                if "::=" not in spec.source:
                    raise RequestError("the grammar has no rule 'root ::='; allowed is GBNF")
                return compiler.compile_grammar(spec.source)
            case "choice":
                options = " | ".join(json.dumps(text) for text in json.loads(spec.source))
                return compiler.compile_grammar(f"root ::= {options}")
            case "tool_calls":
                raise RequestError("tool calls are served by llguidance; allowed here are others")


class XGrammarMatcher:
    """The library's automaton."""

    __slots__ = ("_compiled", "_end_ids", "_library", "_matcher", "_num_words")

    def __init__(
        self,
        library: Any,
        compiled: Any,
        end_ids: list[int],
        num_words: int,
        matcher: Any | None = None,
    ) -> None:
        self._library = library
        self._compiled = compiled
        self._end_ids = end_ids
        self._num_words = num_words
        self._matcher = library.GrammarMatcher(compiled) if matcher is None else matcher

    @property
    def error(self) -> str | None:
        """None: the library has no limits to run into."""
        return None

    def words(self) -> Words:
        """Ids allowed here."""
        words = np.zeros(self._num_words, np.int32)
        # Filled in place; rows that need no mask are left as they are.
        row = torch.full((1, self._num_words), -1, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(row)
        words[:] = row[0].numpy()
        return words

    def take(self, token: int) -> bool:
        """Walk over an id."""
        return bool(self._matcher.accept_token(token))

    def back(self, num_tokens: int) -> bool:
        """Forget the last ids."""
        self._matcher.rollback(num_tokens)
        return True

    def fork(self) -> XGrammarMatcher:
        """Return another at the same place."""
        return XGrammarMatcher(
            self._library, self._compiled, self._end_ids, self._num_words, self._matcher.fork()
        )
