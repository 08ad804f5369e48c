"""How many lines are in flight (pure).

The router keeps background requests until a worker has room, so more lines in flight than workers
run are only a queue. The limit falls by a half when the mesh refuses lines, at most once in
`FALL_PAUSE_S`, and rises by one line for each `SUCCESSES_A_LINE`: a limit of 256 is back after a
thousand lines.
"""

from __future__ import annotations

from typing import Final

FALL_PAUSE_S: Final = 1.0
SUCCESSES_A_LINE: Final = 4
_FLOOR: Final = 4.0


class Pace:
    """most: lines in flight at most. Times are seconds of one clock."""

    def __init__(self, most: int) -> None:
        self._most = float(most)
        self._limit = float(most)
        self._fell_at = float("-inf")

    @property
    def limit(self) -> int:
        """Lines that may be in flight."""
        return max(1, int(self._limit))

    def succeeded(self) -> None:
        self._limit = min(self._most, self._limit + 1.0 / SUCCESSES_A_LINE)

    def refused(self, now: float) -> None:
        if now - self._fell_at >= FALL_PAUSE_S:
            self._fell_at = now
            self._limit = max(min(_FLOOR, self._most), self._limit / 2)
