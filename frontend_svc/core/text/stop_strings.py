"""Stop strings in a text that arrives in pieces.

The rule, the same however the text is cut into pieces: the match is the one a reader would find who
looks after every single character, that is the one that *completes* first; when two complete on
the same character, the one that starts first (the longer). So of stops starting at the same place
the shortest wins, and generation ends as soon as it can.

Invariants of `StopStringMatcher`:

- Held back is exactly the longest suffix of the text that is a proper prefix of a stop string:
  nothing of a stop string ever leaks, and no other character waits.
- With `include_in_output` the stop string is output like any text, so nothing is held back at all;
  the output ends with the stop string.
- After a match all further text is ignored.

The search is Aho and Corasick's automaton (CACM 18(6), 1975): its state after any text *is* the
longest suffix that begins a stop string. Time is linear in the text, memory in the stop strings,
whatever either holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_ROOT = 0


class MatchStep(NamedTuple):
    """What one piece of text led to (a tuple, since one is made per token)."""

    emit: str  # text that may go out now
    matched: str | None  # the stop string that this piece completed


_NO_OUTPUT = MatchStep("", None)


class StopStringMatcher:
    """Watches the text of one choice for its stop strings; see the module for the rule.

    Raises ValueError for an empty stop string, naming its place. Without stop strings `is_passive`
    is
    true and a caller may leave the machine out altogether.
    """

    __slots__ = (
        "_automaton",
        "_first_characters",
        "_include_in_output",
        "_state",
        "_withheld",
        "is_passive",
        "matched",
    )

    def __init__(self, stop_strings: Sequence[str], include_in_output: bool = False) -> None:
        for index, stop in enumerate(stop_strings):
            if not stop:
                raise ValueError(f"stop[{index}] is an empty string")
        self.is_passive = not stop_strings
        self.matched: str | None = None
        self._include_in_output = include_in_output
        self._first_characters = frozenset(stop[0] for stop in stop_strings)
        self._automaton = _Automaton(stop_strings)
        self._state = _ROOT
        self._withheld = ""

    def feed(self, text: str) -> MatchStep:
        """The next piece of text. `matched` is set on the one step that completes a stop string."""
        if self.is_passive:
            return MatchStep(text, None)
        if self.matched is not None:
            return _NO_OUTPUT
        if self._state == _ROOT and self._first_characters.isdisjoint(text):
            return MatchStep(text, None)
        return self._search(text)

    def finish(self) -> str:
        """The text still held back when no more comes: the start of a stop that never ended."""
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
        if self._include_in_output:
            return MatchStep(text, None)
        unsent = self._withheld + text
        sendable_chars = len(unsent) - self._automaton.depth[state]
        assert sendable_chars >= 0, "the automaton remembers text that was sent"
        self._withheld = unsent[sendable_chars:]
        return MatchStep(unsent[:sendable_chars], None)

    def _complete_match(self, stop: str, text: str) -> MatchStep:
        self.matched = stop
        unsent = self._withheld + text
        self._withheld = ""
        return MatchStep(unsent if self._include_in_output else unsent[: -len(stop)], stop)


class _Automaton:
    """All stop strings as one trie with failure links. Lists are indexed by state, 0 the root."""

    __slots__ = ("completed_stop", "depth", "failure", "transitions")

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
        """Failure links, breadth first, so that shallower states are linked before deeper ones."""
        queue = deque(self.transitions[_ROOT].values())
        while queue:
            state = queue.popleft()
            for character, successor in self.transitions[state].items():
                self.failure[successor] = self.advance(self.failure[state], character)
                if self.completed_stop[successor] is None:
                    self.completed_stop[successor] = self.completed_stop[self.failure[successor]]
                queue.append(successor)
