from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend_svc.text.stop_strings import StopStringMatcher

# Few letters, so that stop strings overlap with each other, themselves and the text.
texts = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)
positions = st.lists(st.integers(0, 30), max_size=8)


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(edges)]


def first_match(text: str, stop_strings: Sequence[str]) -> tuple[int, int, str] | None:
    """(end, start, stop) of the match that completes first; of several, the earliest start."""
    found = [(text.find(stop), stop) for stop in stop_strings]
    return min(((at + len(stop), at, stop) for at, stop in found if at >= 0), default=None)


def undecided(text: str, stop_strings: Sequence[str]) -> str:
    """The longest suffix that is a proper prefix of a stop string."""
    suffixes = (text[start:] for start in range(len(text)))
    return next((s for s in suffixes if any(t != s and t.startswith(s) for t in stop_strings)), "")


@settings(max_examples=150)
@given(text=texts, stop_strings=stop_lists, places=positions)
def test_every_chunking_stops_at_the_position_of_str_find(
    text: str, stop_strings: list[str], places: list[int]
) -> None:
    matcher = StopStringMatcher(stop_strings)
    steps = [matcher.feed(piece) for piece in cut(text, places)]
    output = "".join(step.emit for step in steps) + matcher.finish()
    match = first_match(text, stop_strings)

    if match is None:
        assert output == text
        assert matcher.matched is None
    else:
        _end, start, stop = match
        assert output == text[:start]
        assert matcher.matched == stop
    assert [step.matched for step in steps if step.matched] == ([match[2]] if match else [])


@settings(max_examples=150)
@given(text=texts, stop_strings=stop_lists, places=positions)
def test_only_a_possible_start_of_a_stop_string_is_withheld(
    text: str, stop_strings: list[str], places: list[int]
) -> None:
    matcher = StopStringMatcher(stop_strings)
    seen = sent = ""
    for piece in cut(text, places):
        seen += piece
        sent += matcher.feed(piece).emit
        if matcher.matched is not None:
            return
        assert sent == seen.removesuffix(undecided(seen, stop_strings))


def test_no_part_of_a_stop_string_split_over_pieces_is_sent() -> None:
    matcher = StopStringMatcher(["\n\nUser:"])

    assert matcher.feed("Hello.\n") == ("Hello.", None)
    assert matcher.feed("\nUs") == ("", None)
    assert matcher.feed("er: next") == ("", "\n\nUser:")


def test_withheld_text_is_sent_as_soon_as_it_cannot_become_a_stop_string() -> None:
    matcher = StopStringMatcher(["END"])

    assert matcher.feed("the E") == ("the ", None)
    assert matcher.feed("N") == ("", None)
    assert matcher.feed("T") == ("ENT", None)
    assert matcher.feed(" E") == (" ", None)
    assert matcher.finish() == "E"
    assert matcher.finish() == ""


def test_the_match_that_completes_first_wins() -> None:
    assert StopStringMatcher(["abcd", "bc"]).feed("abcd") == ("a", "bc")
    assert StopStringMatcher(["abcd", "ab"]).feed("abcd") == ("", "ab")


def test_of_two_matches_that_complete_together_the_longer_wins() -> None:
    assert StopStringMatcher(["c", "abc", "bc"]).feed("xabc") == ("x", "abc")


def test_text_after_a_match_is_ignored() -> None:
    matcher = StopStringMatcher(["stop"])

    assert matcher.feed("now stop here") == ("now ", "stop")
    assert matcher.feed("stop again") == ("", None)
    assert matcher.finish() == ""
    assert matcher.matched == "stop"


def test_stop_strings_may_contain_any_characters() -> None:
    matcher = StopStringMatcher(["停止", "👩‍💻"])

    assert matcher.feed("好停") == ("好", None)
    assert matcher.feed("👩") == ("停", None)
    assert matcher.feed("\u200d💻") == ("", "👩‍💻")


def test_without_stop_strings_the_matcher_returns_the_text() -> None:
    matcher = StopStringMatcher([])
    text = "".join(["any ", "text"])

    assert matcher.feed(text).emit is text
    assert matcher.finish() == ""


def test_time_is_linear_for_a_long_periodic_stop_string() -> None:
    length = 20_000
    stop = "a" * length + "b"
    matcher = StopStringMatcher([stop])

    assert matcher.feed("a" * (3 * length)) == ("a" * (2 * length), None)
    assert matcher.feed("b") == ("", stop)
