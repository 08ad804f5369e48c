"""Keeps one connection to a peer: opens it again when it ends, ends it when the peer is silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from common.errors import MeshError, Unavailable
from common.streams.backoff import Backoff
from common.streams.stall_clock import never_stalled

# Of a silence watch.
TICK_S = 0.1


async def keep_connected(
    connect: Callable[[], Awaitable[bool]],
    backoff: Backoff,
    on_lost: Callable[[Exception, float], None],
) -> NoReturn:
    """Opens one connection after the other, until cancelled.

    connect: opens a connection and returns after its end: True if the next one follows at once,
        False after a pause. It resets the back-off when the peer has shown that it works.
    on_lost: receives an error of `connect` and the pause that follows, in seconds. It may log the
        traceback, and raise the error if the loop must end.
    """
    while True:
        try:
            is_next_at_once = await connect()
            pause_s = 0.0 if is_next_at_once else backoff.next_s()
        except Exception as error:
            pause_s = backoff.next_s()
            on_lost(error, pause_s)
        await asyncio.sleep(pause_s)


def always() -> bool:
    return True


def silent(message: str) -> MeshError:
    return Unavailable(message, reason="SILENT")


class SilenceWatch:
    """Measures how long a peer has been silent, without the time in which this process stalled."""

    limit_s: float
    """Silence after which the peer counts as lost. May change: peers can state their heartbeat."""

    def __init__(
        self,
        limit_s: float,
        message: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        stalled_s: Callable[[], float] = never_stalled,
        error: Callable[[str], MeshError] = silent,
    ) -> None:
        """Begins to measure.

        limit_s: silence after which `run` raises; see `common/streams/silence.py`.
        message: what the peer owes, for the error: "frame from the router".
        clock: seconds.
        stalled_s: seconds for which this process has stalled; see `StallClock`.
        error: builds the error of a silent peer from its text.
        """
        self.limit_s = limit_s
        self._message = message
        self._clock = clock
        self._stalled_s = stalled_s
        self._error = error
        self.restart()

    def restart(self) -> None:
        """Records a message of the peer, or the moment from which one is due."""
        self._since, self._stalled_before_s = self._clock(), self._stalled_s()

    @property
    def silent_s(self) -> float:
        stalled_s = self._stalled_s() - self._stalled_before_s
        return self._clock() - self._since - stalled_s

    def check(self) -> None:
        """Raises the error if the peer is silent for too long: Unavailable with the reason SILENT,
        unless another one was chosen."""
        if self.silent_s > self.limit_s:
            raise self._error(f"no {self._message} for {self.limit_s:g} s")

    async def run(self, is_due: Callable[[], bool] = always) -> NoReturn:
        """Raises as `check`, while `is_due` returns that a message of the peer is due."""
        while True:
            await asyncio.sleep(TICK_S)
            if self.silent_s > self.limit_s and is_due():
                self.check()
