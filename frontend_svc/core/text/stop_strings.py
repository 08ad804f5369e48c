"""Stop strings in a text that arrives in pieces.

The rule, the same however the text is cut into pieces: the match is the one a reader would find who
looks after every single character, that is the one that *completes* first; when two complete on
the same character, the one that starts first (the longer). So of stops starting at the same place
the shortest wins, and generation ends as soon as it can.

Invariants of `StopMachine`:

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


class StopStep(NamedTuple):
    """What one piece of text led to (a tuple, since one is made per token)."""

    emit: str  # text that may go out now
    matched: str | None  # the stop string that this piece completed


_IGNORED = StopStep("", None)


class StopMachine:
    """Watches the text of one choice for its stop strings; see the module for the rule.

    Raises ValueError for an empty stop string, naming its place. Without stop strings `passive` is
    true and a caller may leave the machine out altogether.
    """

    __slots__ = ("_automaton", "_held", "_include", "_initials", "_state", "matched", "passive")

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        for place, stop in enumerate(stops):
            if not stop:
                raise ValueError(f"stop[{place}] is an empty string")
        self.passive = not stops
        self.matched: str | None = None
        self._include = include_in_output
        self._initials = frozenset(stop[0] for stop in stops)
        self._automaton = _Automaton(stops)
        self._state = _ROOT
        self._held = ""

    def feed(self, text: str) -> StopStep:
        """The next piece of text. `matched` is set on the one step that completes a stop string."""
        if self.passive:
            return StopStep(text, None)
        if self.matched is not None:
            return _IGNORED
        if self._state == _ROOT and self._initials.isdisjoint(text):
            return StopStep(text, None)
        return self._search(text)

    def finish(self) -> str:
        """The text still held back when no more comes: the start of a stop that never ended."""
        held, self._held = self._held, ""
        self._state = _ROOT
        return held

    def _search(self, text: str) -> StopStep:
        advance, complete = self._automaton.advance, self._automaton.complete
        state = self._state
        for place, character in enumerate(text):
            state = advance(state, character)
            stop = complete[state]
            if stop is not None:
                return self._match(stop, text[: place + 1])
        self._state = state
        if self._include:
            return StopStep(text, None)
        unsent = self._held + text
        clear = len(unsent) - self._automaton.depth[state]
        assert clear >= 0, "the automaton remembers text that was sent"
        self._held = unsent[clear:]
        return StopStep(unsent[:clear], None)

    def _match(self, stop: str, text: str) -> StopStep:
        self.matched = stop
        unsent = self._held + text
        self._held = ""
        return StopStep(unsent if self._include else unsent[: -len(stop)], stop)


class _Automaton:
    """All stop strings as one trie with failure links. Lists are indexed by state, 0 the root."""

    __slots__ = ("complete", "depth", "failure", "following")

    def __init__(self, stops: Sequence[str]) -> None:
        self.following: list[dict[str, int]] = [{}]
        self.failure = [_ROOT]
        self.depth = [0]
        self.complete: list[str | None] = [None]  # the longest stop that ends in this state
        for stop in stops:
            self._insert(stop)
        self._link()

    def advance(self, state: int, character: str) -> int:
        following, failure = self.following, self.failure
        while (successor := following[state].get(character)) is None:
            if state == _ROOT:
                return _ROOT
            state = failure[state]
        return successor

    def _insert(self, stop: str) -> None:
        state = _ROOT
        for character in stop:
            successor = self.following[state].get(character)
            if successor is None:
                successor = len(self.depth)
                self.following[state][character] = successor
                self.following.append({})
                self.failure.append(_ROOT)
                self.depth.append(self.depth[state] + 1)
                self.complete.append(None)
            state = successor
        self.complete[state] = stop

    def _link(self) -> None:
        """Failure links, breadth first, so that shallower states are linked before deeper ones."""
        queue = deque(self.following[_ROOT].values())
        while queue:
            state = queue.popleft()
            for character, successor in self.following[state].items():
                self.failure[successor] = self.advance(self.failure[state], character)
                if self.complete[successor] is None:
                    self.complete[successor] = self.complete[self.failure[successor]]
                queue.append(successor)
