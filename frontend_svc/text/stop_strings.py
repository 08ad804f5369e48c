"""Finds stop strings in a text that arrives in pieces (pure).

The match does not depend on how the text is split: it is the stop string that *completes* first; if
two complete at the same character, the one that starts first (the longer one). Of two stop strings
that start at the same character the shorter wins, so generation ends as early as possible.

Invariants of `StopStringMatcher`:

- The withheld text is exactly the longest suffix that is a proper prefix of a stop string: no part
  of a stop string is sent, and no other character is withheld.
- After a match all further text is ignored.

The search is Aho and Corasick's automaton (CACM 18(6), 1975): its state after any text *is* the
longest suffix that begins a stop string. Time is linear in the text, memory in the stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_ROOT = 0


class MatchStep(NamedTuple):
    """Result of one piece of text (a tuple, since one is created per token)."""

    emit: str  # text to send now
    matched: str | None  # stop string that this piece completed


_NO_OUTPUT = MatchStep("", None)


class StopStringMatcher:
    """Matches the stop strings of one choice; none of them is empty. includes_stop: whether the
    text ends with the stop string, and not before it."""

    def __init__(self, stop_strings: Sequence[str], *, includes_stop: bool = False) -> None:
        self.matched: str | None = None
        self._includes_stop = includes_stop
        self._first_characters = frozenset(stop[0] for stop in stop_strings)
        self._automaton = _Automaton(stop_strings)
        self._state = _ROOT
        self._withheld = ""

    def feed(self, text: str) -> MatchStep:
        """Processes the next piece; `matched` is set only in the step that completes a stop."""
        if self.matched is not None:
            return _NO_OUTPUT
        if self._state == _ROOT and self._first_characters.isdisjoint(text):
            return MatchStep(text, None)
        return self._search(text)

    def finish(self) -> str:
        """Returns the withheld text at the end: the start of an incomplete stop string."""
        withheld, self._withheld = self._withheld, ""
        self._state = _ROOT
        return withheld

    def _search(self, text: str) -> MatchStep:
        advance, completed_stop = self._automaton.advance, self._automaton.completed_stop
        state = self._state
        for index, character in enumerate(text):
            state = advance(state, character)
            stop = completed_stop[state]
            if stop is not None:
                return self._complete_match(stop, text[: index + 1])
        self._state = state
        unsent = self._withheld + text
        sendable_chars = len(unsent) - self._automaton.depth[state]
        assert sendable_chars >= 0, "the automaton withholds text that was sent"
        self._withheld = unsent[sendable_chars:]
        return MatchStep(unsent[:sendable_chars], None)

    def _complete_match(self, stop: str, text: str) -> MatchStep:
        self.matched = stop
        unsent = self._withheld + text
        self._withheld = ""
        return MatchStep(unsent if self._includes_stop else unsent[: -len(stop)], stop)


class _Automaton:
    """All stop strings as a trie with failure links. Lists are indexed by state; 0 is the root."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self.transitions: list[dict[str, int]] = [{}]
        self.failure = [_ROOT]
        self.depth = [0]
        self.completed_stop: list[str | None] = [None]  # the longest stop that ends in this state
        for stop in stop_strings:
            self._insert_stop(stop)
        self._set_failure_links()

    def advance(self, state: int, character: str) -> int:
        transitions, failure = self.transitions, self.failure
        while (successor := transitions[state].get(character)) is None:
            if state == _ROOT:
                return _ROOT
            state = failure[state]
        return successor

    def _insert_stop(self, stop: str) -> None:
        state = _ROOT
        for character in stop:
            successor = self.transitions[state].get(character)
            if successor is None:
                successor = len(self.depth)
                self.transitions[state][character] = successor
                self.transitions.append({})
                self.failure.append(_ROOT)
                self.depth.append(self.depth[state] + 1)
                self.completed_stop.append(None)
            state = successor
        self.completed_stop[state] = stop

    def _set_failure_links(self) -> None:
        """Sets failure links breadth first: shallower states before deeper ones."""
        queue = deque(self.transitions[_ROOT].values())
        while queue:
            state = queue.popleft()
            for character, successor in self.transitions[state].items():
                self.failure[successor] = self.advance(self.failure[state], character)
                if self.completed_stop[successor] is None:
                    self.completed_stop[successor] = self.completed_stop[self.failure[successor]]
                queue.append(successor)
