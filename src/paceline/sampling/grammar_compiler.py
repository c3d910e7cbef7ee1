"""Grammars compiled off the engine's thread, kept, and refused where they are no good."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from time import thread_time
from typing import Literal

import numpy as np

from paceline.sampling.grammar import (
    Grammar,
    GrammarCursor,
    GrammarSpec,
    Library,
    TokenSource,
    words_of,
)
from paceline.types import ConfigError, RequestError

__all__ = ["MAX_SOURCE_BYTES", "GrammarCompiler"]

MAX_SOURCE_BYTES = 128 * 1024
"""Longest grammar taken, as UTF-8."""

_STACK_BYTES = 256 * 1024 * 1024
"""Of a thread that compiles: the libraries recurse as deep as a grammar nests, and a stack that
overflows would end the process. Reserved only, not used."""


_TRIED_TOKENS = 64
_TRIED_SECONDS = 0.5
_MAX_MASK_SECONDS = 0.05
_SLOW_IN_A_ROW = 3


class GrammarCompiler:
    """Makes grammars on threads of its own and keeps them by what they were made of.

    Args:
        tokenizer: of the model.
        vocab_size: ids of the model's logits; ids without a token are never allowed.
        end_ids: ids that may stand where a text may end, at least one.
        library: "llguidance", or "xgrammar" where it is installed.
        max_cached: grammars kept, the one used last longest.
        max_seconds: how long `compile` waits for one.
        num_threads: grammars compiled at a time.

    Raises:
        ConfigError: the library is unknown or not installed, or an id lies outside the vocabulary.
    """

    def __init__(
        self,
        tokenizer: TokenSource,
        *,
        vocab_size: int,
        end_ids: Iterable[int],
        library: Literal["llguidance", "xgrammar"] = "llguidance",
        max_cached: int = 64,
        max_seconds: float = 10.0,
        num_threads: int = 1,
    ) -> None:
        ends = sorted(set(end_ids))
        if not ends or not 0 <= ends[0] <= ends[-1] < vocab_size:
            raise ConfigError(
                f"end_ids are {ends}; allowed is at least one id of 0 to {vocab_size - 1}"
            )
        if max_cached < 1 or num_threads < 1 or not max_seconds > 0:
            raise ConfigError(
                f"max_cached is {max_cached}, num_threads {num_threads}, max_seconds "
                f"{max_seconds}; allowed are numbers above 0"
            )
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = ends
        self._library_name = library
        self._library: Library | None = None
        self._max_cached = max_cached
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._library_lock = threading.Lock()
        self._futures: OrderedDict[GrammarSpec, Future[Grammar]] = OrderedDict()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="paceline-grammar")
        self._end_words = words_of(ends, vocab_size)
        self._usable = self._end_words
        if library not in ("llguidance", "xgrammar"):
            raise ConfigError(
                f"the grammar library is {library!r}; allowed are 'llguidance' and 'xgrammar'"
            )
        if library == "xgrammar":
            # Said now and not with the first request.
            from paceline.sampling import grammar_xgrammar

            grammar_xgrammar.check_installed()

    def submit(self, spec: GrammarSpec) -> Future[Grammar]:
        """Begin to compile, and return at once.

        Returns:
            What gives the grammar, or raises `RequestError` with the reason. Shared with whoever
            asks for the same; not to be cancelled.

        Raises:
            RequestError: the grammar is too long to be looked at.
        """
        size = len(spec.source.encode("utf-8", "surrogatepass"))
        if size > MAX_SOURCE_BYTES:
            raise RequestError(
                f"the {spec.kind} has {size} bytes; allowed are at most {MAX_SOURCE_BYTES}"
            )
        with self._lock:
            known = self._futures.get(spec)
            if known is not None:
                self._futures.move_to_end(spec)
                return known
            before = threading.stack_size(_STACK_BYTES)
            try:
                future = self._pool.submit(self._make, spec)
            finally:
                threading.stack_size(before)
            self._futures[spec] = future
            while len(self._futures) > self._max_cached:
                self._futures.popitem(last=False)
        return future

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Return the grammar, compiling it where it is not kept.

        Raises:
            RequestError: it is wrong, unsatisfiable, too large, or takes too long.
        """
        try:
            return self.submit(spec).result(self._max_seconds)
        except FutureTimeoutError:
            raise RequestError(
                f"the {spec.kind} takes longer than {self._max_seconds:g} s to compile; allowed "
                "are simpler ones"
            ) from None

    def close(self) -> None:
        """Compile no more; what was compiled stays usable."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, spec: GrammarSpec) -> Grammar:
        start = self._loaded().matcher(spec)
        grammar = Grammar(spec, start, self._vocab_size, self._usable, self._end_words)
        cursor = grammar.cursor()
        if not cursor.mask().any():
            raise RequestError(
                f"the {spec.kind} allows no text: {start.error or 'nothing can match it'}"
            )
        _try_out(cursor, spec)
        return grammar

    def _loaded(self) -> Library:
        """The library with this vocabulary, which takes a second to read."""
        with self._library_lock:
            if self._library is None:
                tokenizer, vocab, added = (
                    self._tokenizer,
                    self._vocab_size,
                    self._tokenizer.added_ids,
                )
                tokens = [b"" if i in added else tokenizer.token_bytes(i) for i in range(vocab)]
                markers = sorted(i for i in added if i < vocab)
                known = [i for i, token in enumerate(tokens) if token]
                self._usable = words_of({*known, *markers, *self._ends}, vocab)
                self._library = _load(
                    self._library_name, tokenizer, tokens=tokens, markers=markers, ends=self._ends
                )
            return self._library


def _load(
    name: str,
    tokenizer: TokenSource,
    *,
    tokens: list[bytes],
    markers: list[int],
    ends: list[int],
) -> Library:
    # Imported here: one is an extra, and neither is needed without a grammar.
    if name == "xgrammar":
        from paceline.sampling.grammar_xgrammar import XGrammarLibrary

        return XGrammarLibrary(tokens=tokens, markers=markers, end_ids=ends)
    from paceline.sampling.grammar_llguidance import LlguidanceLibrary

    return LlguidanceLibrary(tokenizer, tokens=tokens, markers=markers, end_ids=ends)


def _try_out(cursor: GrammarCursor, spec: GrammarSpec) -> None:
    """Walk a way through a grammar, which also makes much of what its masks need.

    Raises:
        RequestError: its masks would hold up every step.
    """
    chance = random.Random(0)
    slow, spent = 0, 0.0
    for _ in range(_TRIED_TOKENS):
        # Of this thread alone: what else the machine has to do says nothing about a grammar.
        start = thread_time()
        words = cursor.mask()
        seconds = thread_time() - start
        spent += seconds
        slow = slow + 1 if seconds > _MAX_MASK_SECONDS else 0
        too_long = spent > _TRIED_SECONDS and (slow > 1 or seconds > _TRIED_SECONDS)
        if slow == _SLOW_IN_A_ROW or too_long:
            raise RequestError(
                f"the {spec.kind} needs more than {_MAX_MASK_SECONDS:g} s per token; allowed are "
                "simpler ones"
            )
        if cursor.is_finished or not words.any() or spent > _TRIED_SECONDS:
            return
        place = chance.choice(np.flatnonzero(words).tolist())
        word = int(words[place]) & 0xFFFFFFFF
        bits = [bit for bit in range(32) if word >> bit & 1]
        if not cursor.advance(32 * place + chance.choice(bits)):
            return
