"""Stop strings and the reasoning budget: the same outcome however tokens and steps cut the text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.models.deepseek_v4.synth import byte_tokenizer_json
from paceline.text import Detokenizer, ReasoningBudget, StopMatcher, StopStrings, Tokenizer
from paceline.text.stops import MAX_STOP_CHARS, MAX_STOP_STRINGS
from paceline.types import RequestError

LETTERS = st.text("abc", max_size=6)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=5)


def naive(
    pieces: list[str], stops: list[str], *, include: bool, min_tokens: int = 0
) -> tuple[str, int, str | None]:
    """(text, tokens kept, stop) by looking at the whole text at each of its characters."""
    text = "".join(pieces)
    owner = [index for index, piece in enumerate(pieces) for _ in piece]
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        kept = owner[end - 1] + 1
        if found and kept >= min_tokens:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], kept, stop
    return text, len(pieces), None


def matched(
    pieces: list[str],
    stops: list[str],
    cuts: list[int],
    *,
    include: bool,
    min_tokens: int = 0,
) -> tuple[str, int, str | None]:
    """The same from a matcher that gets the pieces in blocks that end at the cuts."""
    matcher = StopMatcher(stops, include_stop_str_in_output=include)
    text, kept = "", 0
    for start, end in zip([0, *cuts], [*cuts, len(pieces)], strict=True):
        block = pieces[start:end]
        scan = matcher.scan(block, num_unstoppable=max(0, min_tokens - 1 - start))
        assert len(scan.texts) == scan.num_tokens
        text += "".join(scan.texts)
        kept += scan.num_tokens
        if scan.stop is not None:
            assert matcher.stop == scan.stop
            assert matcher.flush() == ""
            return text, kept, scan.stop
        assert scan.num_tokens == len(block)
    return text + matcher.flush(), kept, None


@given(
    pieces=st.lists(LETTERS, max_size=12),
    stops=STOPS,
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    data=st.data(),
)
@settings(max_examples=1000, deadline=None)
def test_equal_to_a_search_of_the_whole_text(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pieces)), max_size=4)))
    wanted = naive(pieces, stops, include=include, min_tokens=min_tokens)
    assert matched(pieces, stops, cuts, include=include, min_tokens=min_tokens) == wanted


@given(text=st.text("ab", max_size=30), stops=STOPS, data=st.data())
@settings(max_examples=300, deadline=None)
def test_the_text_does_not_depend_on_the_tokens(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    cut, _, stop = matched(pieces, stops, [], include=False)
    whole, _, same_stop = matched([text], stops, [], include=False)
    assert (cut, stop) == (whole, same_stop)


@given(pieces=st.lists(LETTERS, max_size=12), stops=STOPS)
@settings(max_examples=300, deadline=None)
def test_held_back_is_only_what_may_begin_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_so_far = shown = ""
    for piece in pieces:
        given_so_far += piece
        shown += matcher.push(piece)
        if matcher.stop is not None:
            return
        held = given_so_far[len(shown) :]
        assert given_so_far.startswith(shown)
        longest = max(
            (n for stop in stops for n in range(len(stop)) if given_so_far.endswith(stop[:n])),
            default=0,
        )
        assert len(held) == longest


@pytest.mark.parametrize("width", [1, 2, 4, 9, 17])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_at_every_row_of_a_block_and_across_blocks(width: int, include: bool) -> None:
    for before in range(2 * width + 2):
        pieces = ["x"] * before + ["<", "en", "d>y", "z"] + ["x"] * width
        cuts = list(range(width, len(pieces), width))
        text, kept, stop = matched(pieces, ["<end>"], cuts, include=include)
        assert text == "x" * before + "<end>" * include
        assert kept == before + 3
        assert stop == "<end>"


@pytest.mark.parametrize("length", range(1, 31))
def test_short_answers_arrive_whole(length: int) -> None:
    text = "<end" * 8
    pieces = list(text[:length])
    assert matched(
        pieces, ["<end>", "<end<end<end<end<end<end<end<end<end"], [], include=False
    ) == (
        text[:length],
        length,
        None,
    )


def test_no_stops_hold_nothing_back() -> None:
    matcher = StopMatcher([])
    assert [matcher.push(piece) for piece in ("a", "", "bc")] == ["a", "", "bc"]
    assert matcher.flush() == ""


def test_the_longest_of_those_that_end_together_counts() -> None:
    assert matched(["xab"], ["b", "ab"], [], include=False) == ("x", 1, "ab")
    # And the one that ends first, although another began before it.
    assert matched(["xabc"], ["abc", "b"], [], include=False) == ("xa", 1, "b")


def test_nothing_comes_after_the_stop() -> None:
    matcher = StopMatcher("b")
    assert matcher.push("abc") == "a"
    with pytest.raises(AssertionError, match="the text has ended"):
        matcher.push("d")


def test_ids_kept_end_with_the_token_that_completes_the_stop(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(byte_tokenizer_json(300), encoding="utf-8")
    tokenizer = Tokenizer(file, vocab_size=300)
    ids = tokenizer.encode("für 日本。 und mehr", add_bos=False)
    for width in range(1, 17):
        detokenizer, matcher = Detokenizer(tokenizer), StopMatcher("本。")
        kept: list[int] = []
        text = ""
        for start in range(0, len(ids), width):
            block = ids[start : start + width]
            scan = matcher.scan(detokenizer.push_all(block))
            kept += block[: scan.num_tokens]
            text += "".join(scan.texts)
            if scan.stop is not None:
                break
        assert text == "für 日"
        assert tokenizer.decode(kept) == "für 日本。"


def test_a_stop_of_the_tail_is_found_in_what_the_detokenizer_flushes() -> None:
    matcher = StopMatcher("a\N{REPLACEMENT CHARACTER}")
    assert matcher.push("xa") == "x"
    assert matcher.push("\N{REPLACEMENT CHARACTER}") == ""
    assert matcher.stop is not None


def test_one_set_of_stops_serves_many_matchers() -> None:
    stops = StopStrings(["end", "end", "e"])
    assert stops.strings == ("end", "e")
    first, second = StopMatcher(stops), StopMatcher(stops)
    assert first.push("xe") == "x"
    assert second.push("xn") == "xn"
    assert (first.stop, second.stop) == ("e", None)


@pytest.mark.parametrize("count", [1, MAX_STOP_STRINGS])
def test_work_per_character_does_not_grow_with_the_stops(count: int) -> None:
    rng = random.Random(count)
    stops = StopStrings({"".join(rng.choices("ab", k=20)) for _ in range(count)})

    class Counting(list[dict[str, int]]):
        calls = 0

        def __getitem__(self, index: object) -> dict[str, int]:  # type: ignore[override]
            Counting.calls += 1
            return super().__getitem__(index)  # type: ignore[index]

    stops._next = Counting(stops._next)
    text = "".join(rng.choices("ab", k=5000))
    StopMatcher(stops).push(text, can_stop=False)
    # Every step down was paid for by a character's step up, and each character asks once more.
    assert 5000 <= Counting.calls <= 2 * 5000 + 1


def test_stops_beyond_the_limits_are_refused() -> None:
    StopStrings(str(n) for n in range(MAX_STOP_STRINGS))
    with pytest.raises(RequestError, match=f"10000 stop strings .* allowed are {MAX_STOP_STRINGS}"):
        StopStrings(str(n) for n in range(10_000))
    StopStrings("x" * MAX_STOP_CHARS)
    with pytest.raises(RequestError, match=f"allowed are {MAX_STOP_CHARS} together"):
        StopStrings(["x" * MAX_STOP_CHARS, "y"])


@pytest.mark.parametrize("stop", ["", 3, None, b"x"])
def test_stops_that_are_none_are_refused(stop: object) -> None:
    with pytest.raises(RequestError, match="allowed are strings of at least one character"):
        StopStrings(["fine", stop])  # type: ignore[list-item]


BEGIN, END = 1, 2


def counted(tokens: list[int], *, inside: bool) -> tuple[bool, int]:
    """(in reasoning, reasoning tokens) of a whole history."""
    used = 0
    for token in tokens:
        if inside and token == END:
            inside = False
        elif inside:
            used += 1
        elif token == BEGIN:
            inside = True
    return inside, used


@given(
    budget=st.integers(0, 5),
    inside=st.booleans(),
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("advance"), st.integers(0, 4)),
            st.tuples(st.just("rollback"), st.integers(0, 6)),
            st.tuples(st.just("copy"), st.just(0)),
        ),
        max_size=40,
    ),
)
@settings(max_examples=500, deadline=None)
def test_budget_walks_as_a_recount_of_the_history(
    budget: int, inside: bool, moves: list[tuple[str, int]]
) -> None:
    walked = ReasoningBudget(begin_id=BEGIN, end_id=END, budget=budget, in_reasoning=inside)
    history: list[int] = []
    for move, value in moves:
        if move == "advance":
            if walked.allows(value):
                walked.advance(value)
                history.append(value)
            else:
                with pytest.raises(ValueError, match="allowed is 2 alone"):
                    walked.advance(value)
        elif move == "rollback":
            if value > len(history):
                with pytest.raises(ValueError, match=f"allowed are 0 to {len(history)}"):
                    walked.rollback(value)
            else:
                walked.rollback(value)
                del history[len(history) - value :]
        else:
            left_behind = walked
            walked = walked.copy()
            left_behind.rollback(left_behind.num_tokens)
        now_inside, used = counted(history, inside=inside)
        assert (walked.in_reasoning, walked.num_used) == (now_inside, used)
        assert walked.num_tokens == len(history)
        assert walked.forced() == (END if now_inside and used >= budget else None)
        assert used <= budget


@pytest.mark.parametrize("budget", [0, 1, 2, 5, 7])
def test_the_budget_holds_at_any_number_of_drafts(budget: int) -> None:
    """A target that is a function of the history, drafts right or wrong, forced at each row."""

    def target(history: list[int], walked: ReasoningBudget) -> int:
        forced = walked.forced()
        wish = random.Random(str(history)).choice([BEGIN, END, 3, 4, 5, 6])
        return wish if forced is None else forced

    def generate(num_drafts: int) -> list[int]:
        rng = random.Random(num_drafts)
        walked = ReasoningBudget(begin_id=BEGIN, end_id=END, budget=budget, in_reasoning=True)
        history: list[int] = []
        while len(history) < 60:
            drafts: list[int] = []
            for _ in range(num_drafts):
                forced = walked.forced()
                guess = target([*history, *drafts], walked)
                if forced is None and rng.random() < 0.3:
                    guess = rng.choice([BEGIN, END, 3, 4])
                walked.advance(guess)
                drafts.append(guess)
            walked.rollback(len(drafts))
            for draft in [*drafts, None]:
                token = target(history, walked)
                walked.advance(token)
                history.append(token)
                if token != draft:
                    break
        return history[:60]

    plain = generate(0)
    assert counted(plain, inside=True)[1] == budget
    for num_drafts in range(1, 9):
        assert generate(num_drafts) == plain


def test_budget_memory_does_not_grow_with_the_tokens() -> None:
    walked = ReasoningBudget(begin_id=BEGIN, end_id=END, budget=10_000, in_reasoning=True)
    for _ in range(5000):
        walked.advance(7)
    assert len(walked._changes) == 1


@pytest.mark.parametrize("budget", [-1, 1.5, True, None])
def test_budgets_that_are_none_are_refused(budget: object) -> None:
    with pytest.raises(RequestError, match="allowed is an integer of at least 0"):
        ReasoningBudget(begin_id=1, end_id=2, budget=budget)  # type: ignore[arg-type]


def test_equal_markers_are_refused() -> None:
    with pytest.raises(RequestError, match="two ids are needed"):
        ReasoningBudget(begin_id=1, end_id=1, budget=3)
