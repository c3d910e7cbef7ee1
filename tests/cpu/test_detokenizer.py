"""Text that grows: joined deltas are the whole, and no character is ever half shown."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.models.deepseek_v4.synth import byte_tokenizer_json
from paceline.text import Detokenizer, Tokenizer
from paceline.types import CheckpointError

BUNDLED = Path(__file__).parents[2] / "src/paceline/bundled/tokenizer.json"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte, ids 8 to 263, in some order; special tokens below."""
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_text(byte_tokenizer_json(300), encoding="utf-8")
    return Tokenizer(file, vocab_size=300, bos_token_id=0)


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return Tokenizer(BUNDLED, vocab_size=8192, bos_token_id=0)


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    of_byte = {tokenizer.token_bytes(i): i for i in range(300)}
    return [of_byte[bytes([byte])] for byte in data]


@given(data=st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_random_bytes_join_to_the_whole(byte_tokenizer: Tokenizer, data: bytes) -> None:
    ids = ids_of(byte_tokenizer, data)
    assert "".join(deltas(byte_tokenizer, ids)) == byte_tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 299), max_size=60))
@settings(max_examples=200, deadline=None)
def test_special_and_unknown_ids_too(byte_tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(deltas(byte_tokenizer, ids)) == byte_tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 8200), max_size=40))
@settings(max_examples=200, deadline=None)
def test_the_bundled_tokenizer_too(bundled: Tokenizer, ids: list[int]) -> None:
    assert "".join(deltas(bundled, ids)) == bundled.decode(ids)


@given(text=st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_character_comes_whole_with_its_last_byte(byte_tokenizer: Tokenizer, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    shown = ""
    detokenizer = Detokenizer(byte_tokenizer)
    data = text.encode()
    for n, token_id in enumerate(ids_of(byte_tokenizer, data), 1):
        shown += detokenizer.push(token_id)
        assert shown == data[:n].decode("utf-8", "ignore")
    assert shown + detokenizer.flush() == text


@pytest.mark.parametrize("length", range(1, 31))
def test_short_answers_arrive_whole(bundled: Tokenizer, length: int) -> None:
    text = ("naïve 日本語 \N{GRINNING FACE} x" * 2)[:length]
    assert "".join(deltas(bundled, bundled.encode(text, add_bos=False))) == text


def test_a_cut_character_is_flushed_as_the_tokenizer_would(byte_tokenizer: Tokenizer) -> None:
    parts = deltas(byte_tokenizer, ids_of(byte_tokenizer, "日".encode()[:2]))
    assert parts == ["", "", REPLACEMENT]


def test_work_per_token_does_not_grow(byte_tokenizer: Tokenizer) -> None:
    calls = 0

    class Counting:
        def token_bytes(self, token_id: int) -> bytes:
            nonlocal calls
            calls += 1
            return byte_tokenizer.token_bytes(token_id)

    detokenizer = Detokenizer(Counting())  # type: ignore[arg-type]
    rng = random.Random(0)
    for _ in range(500):
        detokenizer.push(rng.randrange(8, 264))
    assert calls == 500


def test_begin_of_sequence(byte_tokenizer: Tokenizer) -> None:
    plain = byte_tokenizer.encode("ab", add_bos=False)
    assert byte_tokenizer.encode("ab") == [0, *plain]
    assert byte_tokenizer.encode("<｜begin▁of▁sentence｜>ab") == [0, *plain]
    assert byte_tokenizer.decode([0, *plain, 1]) == "ab"


def test_a_vocabulary_beyond_the_models_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(byte_tokenizer_json(300), encoding="utf-8")
    highest = max(json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"].values())
    Tokenizer(file, vocab_size=highest + 1)
    with pytest.raises(
        CheckpointError,
        match=f"a vocabulary of {highest + 1}; the model's vocab_size is {highest}",
    ):
        Tokenizer(file, vocab_size=highest)


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        Tokenizer(tmp_path, vocab_size=300)
    file = tmp_path / "tokenizer.json"
    file.write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        Tokenizer(tmp_path, vocab_size=300)
    parsed = json.loads(byte_tokenizer_json(300))
    file.write_text(json.dumps({**parsed, "decoder": None}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="decoder None"):
        Tokenizer(tmp_path, vocab_size=300)
