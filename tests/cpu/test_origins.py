"""Where each token came from: by hand, against the counts, and under a grammar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import LLM, SamplingParams
from paceline.engine.origins import origins
from paceline.sampling.grammar import words_of
from paceline.types import GenerationResult

SCHEMA = {
    "type": "object",
    "properties": {"a_rather_long_name": {"type": "boolean"}},
    "required": ["a_rather_long_name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_seq_len=512, max_num_seqs=4, num_threads=1) as llm:
        yield llm


def told(count: int, drafted: int, accepted: int) -> list[tuple[str, int | None]]:
    found = origins(count, num_drafted=drafted, num_accepted=accepted)
    return [(origin.kind, origin.position) for origin in found]


def test_the_kinds_by_hand() -> None:
    assert told(1, 0, 0) == [("target", None)]
    assert told(1, 3, 0) == [("corrected", None)]
    assert told(3, 3, 2) == [("accepted", 1), ("accepted", 2), ("corrected", None)]
    assert told(3, 2, 2) == [("accepted", 1), ("accepted", 2), ("bonus", None)]
    # Blocks that are cut, and one that failed behind its accepted drafts.
    assert told(1, 3, 2) == [("accepted", 1)]
    assert told(2, 2, 2) == [("accepted", 1), ("accepted", 2)]
    assert told(0, 2, 0) == []


@given(st.data())
def test_a_mask_of_one_id_forces(data: st.DataObject) -> None:
    drafted = data.draw(st.integers(0, 8))
    accepted = data.draw(st.integers(0, drafted))
    count = data.draw(st.integers(1, accepted + 1))
    allowed = [data.draw(st.sets(st.integers(0, 99), min_size=1, max_size=3)) for _ in range(count)]
    masks = [words_of(ids, 100) for ids in allowed]
    free = origins(count, num_drafted=drafted, num_accepted=accepted)
    bound = origins(count, num_drafted=drafted, num_accepted=accepted, masks=masks)
    for place, (one, other, ids) in enumerate(zip(free, bound, allowed, strict=True)):
        assert other.kind == ("forced" if len(ids) == 1 else one.kind)
        assert other.position == one.position == (place + 1 if place < accepted else None)
        assert other.is_draft == (place < accepted)


def follow(llm: LLM, params: SamplingParams) -> GenerationResult:
    """An answer whose stream was held to its steps."""
    prompt = "def add(first, second):"
    steps, before = [], 0
    for chunk in llm.stream(prompt, params):
        steps.append(chunk)
        assert "".join(piece.text for piece in chunk.pieces) == chunk.text
        assert len(chunk.origins) == len(chunk.token_ids)
        assert [piece.origin for piece in chunk.pieces] == chunk.origins
        places = [origin.position for origin in chunk.origins if origin.is_draft]
        assert places == list(range(1, len(places) + 1))
        for origin in chunk.origins[:-1]:
            assert origin.is_draft
        before += len(chunk.token_ids)
    result = steps[-1].result
    assert result is not None
    assert [one for chunk in steps for one in chunk.origins] == result.origins
    assert result.origins[0].position is None
    return result


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 8])
def test_origins_agree_with_the_counts(llm: LLM, num_drafts: int) -> None:
    params = SamplingParams(max_tokens=120, ignore_eos=True, num_drafts=num_drafts)
    result = follow(llm, params)
    stats = result.speculation
    kinds = Counter(origin.kind for origin in result.origins)
    at = Counter(origin.position for origin in result.origins if origin.is_draft)
    cut = stats.num_accepted - sum(at.values())
    assert 0 <= cut <= num_drafts
    if not num_drafts:
        assert set(kinds) == {"target"}
        return
    for place, accepted in enumerate(stats.accepted_at):
        assert 0 <= accepted - at[place + 1] <= 1
    # A step ends in one token of the target's own, but where the answer's length cut it.
    own = kinds["corrected"] + kinds["bonus"] + kinds["target"]
    assert stats.num_steps - 1 <= own <= stats.num_steps
    assert kinds["corrected"] > 0
    if num_drafts == 1:
        # All drafts of a step are its only one.
        assert 0 <= kinds["accepted"] - kinds["bonus"] <= 1


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_what_a_grammar_leaves_no_choice_is_forced(llm: LLM, num_drafts: int) -> None:
    params = SamplingParams(max_tokens=80, json_schema=SCHEMA, num_drafts=num_drafts)
    result = follow(llm, params)
    kinds = [origin.kind for origin in result.origins]
    assert kinds.count("forced") >= 2
    assert kinds.count("forced") < len(kinds)
    if num_drafts:
        assert any(one.kind == "forced" and one.is_draft for one in result.origins)
    else:
        assert not any(one.is_draft for one in result.origins)
    free = follow(llm, SamplingParams(max_tokens=80, num_drafts=num_drafts))
    assert "forced" not in {origin.kind for origin in free.origins}


def test_a_token_within_a_character_has_a_piece_without_text(llm: LLM) -> None:
    assert llm.tokenizer is not None
    prompt = "text = '日本語のテキスト、中文文本"
    ids = llm.encode(prompt)
    within = [i for i in ids if not llm.tokenizer.token_bytes(i).isascii()]
    params = SamplingParams(max_tokens=40, allowed_token_ids=within, num_drafts=3)
    chunks = list(llm.stream(prompt, params))
    pieces = [piece for chunk in chunks for piece in chunk.pieces]
    result = chunks[-1].result
    assert result is not None
    assert [piece.origin for piece in pieces] == result.origins
    assert "".join(piece.text for piece in pieces) == result.text
    assert "" in {piece.text for piece in pieces}
