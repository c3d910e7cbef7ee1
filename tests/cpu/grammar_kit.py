"""A small vocabulary and random walks, and the random grammars that the benchmark has too."""

from __future__ import annotations

import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from paceline.sampling.grammar import Grammar, GrammarCursor, Words

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from grammars import fits, random_regex, random_schema

__all__ = [
    "SmallTokenizer",
    "fits",
    "ids_of",
    "random_regex",
    "random_schema",
    "random_walk",
    "seeds",
]


class SmallTokenizer:
    """Every printable character and a few longer pieces, with two markers; longest match first."""

    def __init__(self, pieces: tuple[str, ...] = ()) -> None:
        single = [*string.printable, "é", "｜", "D", "S"]
        texts = list(dict.fromkeys([*single, *pieces]))
        self.tokens: list[bytes] = [b"", b"", *(text.encode() for text in texts)]
        self.tokens += [bytes([byte]) for byte in range(0x80, 0xF5)]
        self._by_length = sorted(range(2, len(self.tokens)), key=lambda i: -len(self.tokens[i]))

    END, MARKER = 0, 1

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def added_ids(self) -> frozenset[int]:
        return frozenset((self.END, self.MARKER))

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id] if token_id < len(self.tokens) else b""

    def marker_id(self, marker: str) -> int | None:
        return self.MARKER if marker == "｜DSML｜" else None

    def encode(self, text: str, *, add_bos: bool = True, allow_special: bool = False) -> list[int]:
        data, place, ids = text.encode(), 0, []
        while place < len(data):
            token = next(i for i in self._by_length if data.startswith(self.tokens[i], place))
            ids.append(token)
            place += len(self.tokens[token])
        return ids


def ids_of(words: Words) -> list[int]:
    """The ids of a mask."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def random_walk(
    grammar: Grammar | GrammarCursor,
    chance: random.Random,
    *,
    most: int = 400,
    ends: float = 0.5,
    end_ids: tuple[int, ...] = (0,),
) -> tuple[list[int], GrammarCursor]:
    """Ids drawn from the masks up to the end, which is taken with `ends` where it is allowed."""
    cursor = grammar.cursor() if isinstance(grammar, Grammar) else grammar
    ids: list[int] = []
    while not cursor.is_finished and len(ids) < most:
        allowed = ids_of(cursor.mask())
        assert allowed, cursor.error
        others = [token for token in allowed if token not in end_ids]
        if not others or (len(others) < len(allowed) and chance.random() < ends):
            assert cursor.advance(next(token for token in allowed if token in end_ids))
            break
        ids.append(chance.choice(others))
        assert cursor.advance(ids[-1])
    return ids, cursor


def seeds(count: int) -> Iterator[random.Random]:
    """Independent sources of chance."""
    for seed in range(count):
        yield random.Random(seed)
