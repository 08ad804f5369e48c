"""Finds stop strings in a text that arrives in pieces (pure).

The match does not depend on how the text is split: it is the stop string that *completes* first; if
two complete at the same character, the one that starts first (the longer one). Of two stop strings
that start at the same character the shorter wins, so generation ends as early as possible.

Invariants of `StopStringMatcher`:

- The withheld text is exactly the longest suffix that is a proper prefix of a stop string: no part
  of a stop string is sent, and no other character is withheld.
- After a match all further text is ignored.

A text that contains no first character of a stop string costs one set operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class MatchStep(NamedTuple):
    """Result of one piece of text (a tuple, since one is created per token)."""

    emit: str  # text to send now
    matched: str | None  # stop string that this piece completed


_NO_OUTPUT = MatchStep("", None)


class StopStringMatcher:
    """Matches the stop strings of one choice; none of them is empty."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self.matched: str | None = None
        self._first_characters = frozenset(stop[0] for stop in stop_strings)
        self._stop_strings = tuple(stop_strings)
        self._longest = max(map(len, stop_strings), default=0)
        self._withheld = ""

    def feed(self, text: str) -> MatchStep:
        """Processes the next piece; `matched` is set only in the step that completes a stop."""
        if self.matched is not None:
            return _NO_OUTPUT
        if not self._withheld and self._first_characters.isdisjoint(text):
            return MatchStep(text, None)
        unsent = self._withheld + text
        found = [(unsent.find(stop), stop) for stop in self._stop_strings]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if matches:
            _end, sendable_chars, self.matched = min(matches)
            self._withheld = ""
        else:
            sendable_chars = self._withheld_from(unsent)
            self._withheld = unsent[sendable_chars:]
        return MatchStep(unsent[:sendable_chars], self.matched)

    def finish(self) -> str:
        """The withheld text at the end: the start of an incomplete stop string."""
        withheld, self._withheld = self._withheld, ""
        return withheld

    def _withheld_from(self, text: str) -> int:
        """Where the longest suffix begins that is a proper prefix of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters:
                suffix = text[start:]
                if any(stop.startswith(suffix) for stop in self._stop_strings):
                    return start
        return len(text)
