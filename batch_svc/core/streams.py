"""The output of a response as it is generated, and what of it a second run repeats (pure).

A response whose run is lost runs again. As long as the output of the next run begins like that of
the one before, which is stored and which clients have, only what is new is added. If it differs, it
replaces what is stored, under the next number: no client gets a mixture of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

# Tag of a delta without text; see `RunStreamResponse` of the frontend.
_CALL: Final = "call"

# Any: JSON.
_Delta = list[Any]


@dataclass(frozen=True, slots=True)
class StoredOutput:
    """Output of a response as far as it is stored. run: number of the run that it is of. parts:
    deltas, each part as lines of JSON with their breaks."""

    run: int = 0
    parts: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a reader of a stream receives. response: its object, as JSON. output: after the parts
    that it has."""

    response: bytes
    has_ended: bool
    output: StoredOutput


@dataclass(frozen=True, slots=True)
class Addition:
    """Output that is to be stored. run: number of its run; that after the stored one replaces it.
    offset: bytes of the run before it, so that a repeated write adds nothing."""

    run: int
    offset: int
    deltas: bytes


class RepeatedOutput:
    """Compares the output of a run with that of the run before it."""

    def __init__(self, stored: StoredOutput) -> None:
        """
        - stored: of the run before; without parts: nothing is.
        """
        lines = (line for part in stored.parts for line in part.splitlines())
        self._expected = _joined(map(orjson.loads, lines))
        self._next = 0
        # Lines of this run, until it differs.
        self._seen: list[bytes] = []
        self._run = stored.run
        self._offset = sum(map(len, stored.parts))

    def _repeats(self) -> bool:
        return self._next < len(self._expected)

    def feed(self, deltas: bytes) -> Addition | None:
        """Returns what to store of the next deltas; None: nothing, it is there."""
        if not self._repeats():
            return self._added(deltas)
        added: list[bytes] = []
        lines = deltas.splitlines()
        for number, line in enumerate(lines):
            if not self._repeats():
                added.append(line)
                continue
            self._seen.append(line)
            rest = self._skip(orjson.loads(line))
            if rest is None:
                return self._replaced(lines[number + 1 :])
            if rest[-1] and rest[0] != _CALL:
                added.append(orjson.dumps(rest))
        return self._added(_lines(added)) if added else None

    def end(self) -> Addition | None:
        """Returns what to store at the end of the run: all of it, if the run before had more."""
        return self._replaced(()) if self._repeats() else None

    def _replaced(self, more: Iterable[bytes]) -> Addition:
        self._expected = []
        self._run, self._offset = self._run + 1, 0
        return self._added(_lines([*self._seen, *more]))

    def _added(self, deltas: bytes) -> Addition:
        addition = Addition(self._run, self._offset, deltas)
        self._offset += len(deltas)
        return addition

    def _skip(self, delta: _Delta) -> _Delta | None:
        """Returns a delta without what is stored; None: it differs."""
        expected = self._expected[self._next]
        if delta[0] == _CALL:
            self._next += 1
            return delta if delta == expected else None
        *kind, text = delta
        if not text:
            return delta
        if expected[:-1] != kind:
            return None
        common = min(len(text), len(expected[-1]))
        if text[:common] != expected[-1][:common]:
            return None
        left = expected[-1][common:]
        self._expected[self._next] = [*kind, left]
        if not left:
            self._next += 1
        return [*kind, text[common:]]


def merged(additions: Iterable[Addition]) -> list[Addition]:
    """Returns the same output in as few additions as there are runs."""
    found: list[Addition] = []
    for addition in additions:
        if found and found[-1].run == addition.run:
            last = found[-1]
            found[-1] = Addition(last.run, last.offset, last.deltas + addition.deltas)
        else:
            found.append(addition)
    return found


def _lines(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _joined(deltas: Iterable[_Delta]) -> list[_Delta]:
    """Returns deltas in which no two neighbours are text of one kind."""
    joined: list[_Delta] = []
    for delta in deltas:
        if delta[0] != _CALL and not delta[-1]:
            continue
        if joined and delta[0] != _CALL and joined[-1][:-1] == delta[:-1]:
            joined[-1] = [*delta[:-1], joined[-1][-1] + delta[-1]]
        else:
            joined.append(delta)
    return joined
