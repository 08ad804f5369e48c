"""Measures the stalls of this process (pure).

A timer that judges a peer ("it did not accept within a second") also counts time during which the
peer's message lies unread because this process did not run. The event loop reads the streams of
all peers, so a task of the loop that ticks every TICK_S measures that time. Each timer subtracts
the time stalled since its wait began:

    waited = (now - began) - (stalled_s(now) - stalled_s(began))

Deadlines of requests, and obligations of this process to its peers, use the plain clock.

Invariants: stalled_s never decreases, and never grows faster than time; it is 0 for a process that
ticks in time.
"""

from __future__ import annotations

TICK_S = 0.1
# A later tick counts as a stall. Well below the timers' limits: a busy machine is not a stalled
# one, and a hang must be detected there too.
SLACK_S = 0.1


class StallClock:
    """Stalled time of one process. now: clock of its event loop, seconds."""

    def __init__(self, now: float) -> None:
        self._ticked_at = now
        self._stalled_s = 0.0

    def tick(self, now: float) -> None:
        self._stalled_s = self.stalled_s(now)
        self._ticked_at = now

    def stalled_s(self, now: float) -> float:
        """Returns the seconds stalled since the start, including a stall that no tick has ended
        yet."""
        return self._stalled_s + max(0.0, now - self._ticked_at - TICK_S - SLACK_S)


def never_stalled() -> float:
    """Returns the `stalled_s` of a process that does not measure it."""
    return 0.0
