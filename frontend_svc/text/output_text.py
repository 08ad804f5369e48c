"""Converts tokens to the client's text: detokenization, then stop strings (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from frontend_svc.text.stop_strings import StopStringMatcher


class DetokenizerLike(Protocol):
    """Detokenizer or StreamDetokenizer."""

    def feed(self, token_ids: Sequence[int]) -> list[str]: ...
    def finish(self) -> str: ...


class RecordedText:
    """A detokenizer that keeps the text, as the model wrote it."""

    def __init__(self, detokenizer: DetokenizerLike) -> None:
        self._detokenizer = detokenizer
        self._pieces: list[str] = []

    def feed(self, token_ids: Sequence[int]) -> list[str]:
        pieces = self._detokenizer.feed(token_ids)
        self._pieces += pieces
        return pieces

    def finish(self) -> str:
        tail = self._detokenizer.finish()
        self._pieces.append(tail)
        return tail

    def text(self) -> str:
        return "".join(self._pieces)


class TextStream:
    """The text of one response.

    min_tokens: stop strings in the text of the first `min_tokens` tokens do not end the response.
    includes_stop: whether the text includes the stop string.
    consumed: tokens of the response, without those after a stop string.
    matched_stop: the stop string that ended the response, or None.
    """

    def __init__(
        self,
        detokenizer: DetokenizerLike,
        stop_strings: Sequence[str],
        *,
        min_tokens: int = 0,
        includes_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_matcher = (
            StopStringMatcher(stop_strings, includes_stop=includes_stop) if stop_strings else None
        )
        self._min_tokens = min_tokens
        self.consumed = 0
        self.matched_stop: str | None = None

    def feed(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text that each token completes, without empty pieces; none after a stop
        string."""
        pieces = self._detokenizer.feed(token_ids)
        stop = self._stop_matcher
        if stop is None:
            self.consumed += len(token_ids)
            return [piece for piece in pieces if piece]
        sendable = []
        for piece in pieces:
            if self.matched_stop is not None:
                break
            if text := self._step(stop, piece):
                sendable.append(text)
        return sendable

    def feed_token(self, token_id: int) -> tuple[int, str]:
        """As `feed` for one token of a text that no stop string has ended: how many characters the
        token completes, and the text to send."""
        (piece,) = self._detokenizer.feed((token_id,))
        if self._stop_matcher is not None:
            return len(piece), self._step(self._stop_matcher, piece)
        self.consumed += 1
        return len(piece), piece

    def _step(self, stop: StopStringMatcher, piece: str) -> str:
        """Returns the text to send after one more token."""
        self.consumed += 1
        if self.consumed <= self._min_tokens:
            return piece
        match_step = stop.feed(piece)
        self.matched_stop = match_step.matched
        return match_step.emit

    def finish(self) -> str:
        """Returns the withheld text, after the last token."""
        if self.matched_stop is not None:
            return ""
        tail = self._detokenizer.finish()
        if self._stop_matcher is None:
            return tail
        match_step = self._stop_matcher.feed(tail)
        self.matched_stop = match_step.matched
        return match_step.emit + self._stop_matcher.finish()
