"""Counts of the recent past, in two half windows (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class RecentCounts(Generic[K]):
    """Counts by key, of the current half window and of the one before.

    A count is complete for the last half of `window_s`, and gone after the whole. Call `add` or
    `advance` before a count is read.
    """

    def __init__(self, window_s: float) -> None:
        self._half_s = window_s / 2
        self._half_start = 0.0
        self._last = Counter[K]()
        self._current = Counter[K]()

    def __getitem__(self, key: K) -> int:
        return self._last[key] + self._current[key]

    def add(self, key: K, now: float) -> None:
        self.advance(now)
        self._current[key] += 1

    def advance(self, now: float) -> None:
        """Drops what is older than the window."""
        elapsed_s = now - self._half_start
        if elapsed_s < self._half_s:
            return
        self._last = self._current if elapsed_s < 2 * self._half_s else Counter()
        self._current = Counter()
        self._half_start = now - elapsed_s % self._half_s

    def forget(self, key: K) -> None:
        self._last.pop(key, None)
        self._current.pop(key, None)
