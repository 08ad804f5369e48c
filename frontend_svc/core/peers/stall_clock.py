"""How much time this process itself has lost, so that peers are not blamed for it (pure).

A timer that judges a peer ("it did not accept within a second") counts time in which the answer may
lie unread because this process did not run. A ticker that should come round every TICK_S measures
that (`frontend_svc/peers/stall_monitor.py`); each judge leaves out what was lost since it began to
wait:

    waited = (now - began) - (lost_s(now) - lost_s(began))

Deadlines of requests, and what this process itself owes to peers, stay on the plain clock.

Invariants: lost_s never falls, and never grows faster than time; who comes round in time loses
nothing.
"""

from __future__ import annotations

TICK_S = 0.1
# Later than this is late. Well below what judges wait for: a busy machine is not a starved one, and
# a hang there is to be found as soon.
SLACK_S = 0.1


class StallClock:
    """The account of one process. `now`: its loop's clock, seconds."""

    def __init__(self, now: float) -> None:
        self._ticked_at = now
        self._stalled_s = 0.0

    def tick(self, now: float) -> None:
        """It came round; to be called every TICK_S."""
        self._stalled_s = self.stalled_s(now)
        self._ticked_at = now

    def stalled_s(self, now: float) -> float:
        """Seconds lost since the beginning, also in a stall that no tick has ended yet."""
        return self._stalled_s + max(0.0, now - self._ticked_at - TICK_S - SLACK_S)


def never_stalled() -> float:
    """The `stalled_s` of a process that does not measure it."""
    return 0.0
