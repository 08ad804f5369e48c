"""Distinguishes a repeated signal from a second request to stop, which kills (pure)."""

from __future__ import annotations

import signal
from enum import Enum, auto

# `timeout` signals the process group and `make` forwards the signal, so it arrives twice; a service
# manager may add SIGHUP to its SIGTERM.
DUPLICATE_WINDOW_S = 1.0


class StopAction(Enum):
    STOP = auto()
    KILL = auto()
    IGNORE = auto()


class StopRequests:
    """Maps signals to actions. The first stops; a later SIGINT always kills."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def receive(self, number: signal.Signals, now: float) -> StopAction:
        """Returns the action for a signal. now: seconds of one monotonic clock."""
        if self._first_at is None:
            self._first_at = now
            return StopAction.STOP
        is_duplicate = number is not signal.SIGINT and now - self._first_at < DUPLICATE_WINDOW_S
        return StopAction.IGNORE if is_duplicate else StopAction.KILL
