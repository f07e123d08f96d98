"""Text and stop strings do not depend on how the text was cut into tokens."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.text_cursor import StopMatcher, TextCursor
from tests.unit.api.fakes import ByteDecoder

# A tiny alphabet makes overlapping stop strings and partial matches the rule, not the exception.
SMALL = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)
UNICODE = st.text(alphabet="aé世🎉\n", max_size=30)


def first_completed(text: str, stops: Sequence[str]) -> tuple[int, str | None]:
    """The slow, obvious definition: read on character by character until some stop string ends here."""
    for end in range(len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            longest = max(matching, key=len)
            return end - len(longest), longest
    return len(text), None


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@given(SMALL, STOPS, st.lists(st.integers(0, 40), max_size=20))
def test_shown_text_is_the_text_before_the_first_completed_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown = [matcher.push(piece) for piece in pieces(text, cuts)] + [matcher.flush()]
    end, matched = first_completed(text, stops)
    assert "".join(shown) == text[:end]
    assert matcher.matched == matched


@given(SMALL, STOPS, st.lists(st.integers(0, 40), max_size=20))
def test_only_a_possible_prefix_is_held_back(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    pushed = shown = ""
    for piece in pieces(text, cuts):
        pushed += piece
        shown += matcher.push(piece)
        if matcher.matched is not None:
            break
        held = pushed[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@given(UNICODE, st.lists(st.text(alphabet="aé世🎉\n", min_size=1, max_size=3), max_size=3), st.data())
def test_bytes_as_tokens_in_any_batches_give_the_same_text(text: str, stops: list[str], data: st.DataObject) -> None:
    tokens = list(text.encode())
    cursor = TextCursor(ByteDecoder(), stops)
    shown, at = "", 0
    while at < len(tokens) and cursor.matched is None:
        count = data.draw(st.integers(1, 6))
        shown += cursor.push(tokens[at : at + count])
        at += count
    if cursor.matched is None:
        shown += cursor.finish()
    end, matched = first_completed(text, stops)
    assert shown == text[:end]
    assert cursor.matched == matched
    if matched is not None:  # the token that completed the match is the last one counted
        assert cursor.num_tokens == len((text[:end] + matched).encode())


def test_an_unfinished_character_comes_at_the_end() -> None:
    cursor = TextCursor(ByteDecoder())
    assert cursor.push([ord("a"), 0xE4]) == "a"
    assert cursor.finish() == "\ufffd"


def test_no_stop_within_the_first_min_tokens() -> None:
    cursor = TextCursor(ByteDecoder(), ["ab"], min_tokens=2)
    assert cursor.push(list(b"abcab!")) == "abc"
    assert cursor.matched == "ab" and cursor.num_tokens == 5
