"""Which signals are one request to stop, and which are a second one, that kills (pure)."""

from __future__ import annotations

import signal
from enum import Enum, auto

# Whoever signals a process group (`timeout`) through `make`, which passes signals on, signals twice
# at once; so does a service manager that adds SIGHUP to its SIGTERM.
DUPLICATE_WINDOW_S = 1.0


class StopAction(Enum):
    STOP = auto()
    KILL = auto()
    IGNORE = auto()


class StopRequests:
    """What each signal asks for. The first: to stop. A Ctrl-C after it always kills."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def receive(self, number: signal.Signals, now: float) -> StopAction:
        """A signal came at `now`, in seconds of one monotonic clock."""
        if self._first_at is None:
            self._first_at = now
            return StopAction.STOP
        is_duplicate = number is not signal.SIGINT and now - self._first_at < DUPLICATE_WINDOW_S
        return StopAction.IGNORE if is_duplicate else StopAction.KILL
