from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from frontend_svc.text.output_text import TextStream
from frontend_svc.text.token_queue import TokenQueue

PIECES = st.lists(st.text("abc", max_size=3), max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=2)


class Pieces:
    """A detokenizer whose token i has the text pieces[i]."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def feed(self, token_ids: tuple[int, ...] | list[int]) -> list[str]:
        return [self._pieces[one] for one in token_ids]

    def finish(self) -> str:
        return ""


@given(PIECES, STOPS, st.booleans())
def test_tokens_are_sent_with_the_last_part_of_their_text(
    pieces: list[str], stops: list[str], includes_stop: bool
) -> None:
    text = TextStream(Pieces(pieces), stops, includes_stop=includes_stop)  # type: ignore[arg-type]
    queue = TokenQueue[int]()
    sent, tokens = "", list[int]()
    for token in range(len(pieces)):
        characters, piece = text.feed_token(token)
        queue.add(token, characters)
        sent += piece
        tokens += queue.send(len(piece))
        assert "".join(pieces[one] for one in tokens) == sent[: sum(len(pieces[t]) for t in tokens)]
        if text.matched_stop is not None:
            tokens += queue.stop()
            break
    else:
        rest = text.finish()
        sent += rest
        tokens += queue.send(len(rest))
        tokens += queue.finish()
        assert tokens == list(range(len(pieces)))
    assert tokens == list(range(len(tokens))), "in order, without gaps"
    joined = "".join(pieces[one] for one in tokens)
    assert joined.startswith(sent)
    if tokens and text.matched_stop is not None:
        assert len(joined) - len(pieces[tokens[-1]]) < len(sent), "no token of the withheld text"
    whole = TextStream(Pieces(pieces), stops, includes_stop=includes_stop)  # type: ignore[arg-type]
    assert "".join([*whole.feed(range(len(pieces))), whole.finish()]) == sent


def test_a_part_of_a_character_is_sent_with_the_rest_of_it() -> None:
    queue = TokenQueue[str]()
    queue.add("first byte", 0)
    assert queue.send(0) == []
    queue.add("second byte", 1)
    assert queue.send(1) == ["first byte", "second byte"]
