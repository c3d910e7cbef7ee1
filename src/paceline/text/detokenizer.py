"""Text that grows with its tokens: never half a character, never a lost tail."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from paceline.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """Decodes one sequence token by token.

    What `push` returned so far and what `flush` returns at the end join to exactly what the
    tokenizer decodes from all the ids at once, also where their bytes are not valid UTF-8 and
    however many ids come at a time. A token costs the same however many came before it.

    Args:
        tokenizer: whose ids come.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that became certain with it, possibly none.

        A character belongs to the token that completes it.
        """
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def push_all(self, token_ids: Iterable[int]) -> list[str]:
        """Take the next ids; return one text per id, as `push` would."""
        return [self.push(token_id) for token_id in token_ids]

    def flush(self) -> str:
        """Return what was held back; the sequence is over."""
        return self._utf8.decode(b"", final=True)
