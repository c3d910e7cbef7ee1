"""A checkpoint's ``tokenizer.json``: byte-level BPE, as DeepSeek's models have it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import tokenizers

from paceline.types import CheckpointError, RequestError

__all__ = ["Tokenizer"]


class Tokenizer:
    """Text to ids and back.

    Args:
        path: the ``tokenizer.json``, or the folder it lies in.
        vocab_size: rows of the model's embedding; an id beyond them could not be run.
        bos_token_id: the id that begins a text, or None.

    Raises:
        CheckpointError: the file is missing or unreadable, is not byte-level, or holds an id the
            model has no row for.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        vocab_size: int,
        bos_token_id: int | None = None,
    ) -> None:
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{file} does not exist; prompts of ids need no tokenizer, text does"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise CheckpointError(f"{file} is not a tokenizer: {error}") from None
        # Ids need not be dense, so the count alone would not tell.
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if highest >= vocab_size:
            raise CheckpointError(
                f"{file} has ids up to {highest}, a vocabulary of {highest + 1}; the model's "
                f"vocab_size is {vocab_size}"
            )
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            raise CheckpointError(
                f"{file} has the decoder {decoder.get('type')}; DeepSeek's is ByteLevel, no other "
                "is served"
            )
        self.bos_token_id = bos_token_id
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_bos: bool = True, allow_special: bool = False) -> list[int]:
        """Ids of a text.

        Args:
            text: what to encode.
            add_bos: begin with the begin-of-sequence id where the ids do not and there is one.
            allow_special: added tokens spelled out in the text, such as ``<think>`` or the role
                markers, count as themselves. Otherwise they are encoded as the characters they
                are, so that no text from outside can end a turn or begin one.

        Raises:
            RequestError: the text holds a lone surrogate, which no UTF-8 has.
        """
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise _not_encodable(text) from None
        if not allow_special and not self.added_ids.isdisjoint(ids):
            ids = self._encode_plain(text)
        bos = self.bos_token_id
        if add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        # The library can leave out only those added tokens that are marked special, and DeepSeek's
        # role and thinking markers are not; so its stages are run here without the one that looks
        # for added tokens.
        if self._tokenizer.normalizer is not None:
            text = self._tokenizer.normalizer.normalize_str(text)
        pieces = [(text, (0, len(text)))]
        if self._tokenizer.pre_tokenizer is not None:
            pieces = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        tokenize = self._tokenizer.model.tokenize
        return [token.id for piece, _ in pieces for token in tokenize(piece)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens left out; ids without a token give nothing."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out."""
        return frozenset(
            token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids that stand for a marker and are never made of ordinary text."""
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    def marker_id(self, marker: str) -> int | None:
        """Id of an added token, or None where the tokenizer has no such marker."""
        token_id = self._tokenizer.token_to_id(marker)
        return token_id if token_id in self.added_ids else None

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, of which texts are made; none for special and unknown ids."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up_bytes(token_id)
        return known

    def _look_up_bytes(self, token_id: int) -> bytes:
        if token_id in self.special_ids:
            return b""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:
            # An added token is written as itself, not in the alphabet of bytes.
            return token.encode()


def _not_encodable(text: object) -> RequestError:
    if not isinstance(text, str):
        return RequestError(f"a text is needed; {type(text).__name__} is given")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return RequestError(
            f"the text holds the lone surrogate {text[error.start]!a} at character {error.start}; "
            "allowed is what UTF-8 can hold"
        )
    return RequestError("the tokenizer cannot encode the text")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + n): byte for n, byte in enumerate(others)},
    }


_BYTE_OF = _byte_alphabet()
