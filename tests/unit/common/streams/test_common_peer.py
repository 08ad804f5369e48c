"""Connections that are opened again, and peers that are silent."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from common.errors import Unavailable
from common.streams import silence
from common.streams.backoff import Backoff
from common.streams.peer import SilenceWatch, keep_connected
from common.streams.silence import SilenceRule


class Peer:
    """A peer with the outcomes of its connections: an error, or whether the next one follows."""

    def __init__(self, *outcomes: Exception | bool) -> None:
        self.outcomes = list(outcomes)
        self.lost: list[tuple[str, float]] = []
        self.backoff = Backoff(0.001, 0.004, None)

    async def connect(self) -> bool:
        if not self.outcomes:
            raise asyncio.CancelledError
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def on_lost(self, error: Exception, pause_s: float) -> None:
        self.lost.append((str(error), pause_s))

    async def run(self) -> None:
        with suppress(asyncio.CancelledError):
            await keep_connected(self.connect, self.backoff, self.on_lost)


async def test_a_connection_that_fails_is_opened_again_after_growing_pauses() -> None:
    peer = Peer(Unavailable("a"), ValueError("b"), Unavailable("c"), Unavailable("d"))
    await peer.run()
    assert peer.lost == [("a", 0.001), ("b", 0.002), ("c", 0.004), ("d", 0.004)]


async def test_a_connection_that_ended_well_is_reported_by_nothing_but_its_pause() -> None:
    peer = Peer(False, False, Unavailable("a"))
    await peer.run()
    assert peer.lost == [("a", 0.004)], "the third pause in a row"


async def test_the_next_connection_follows_at_once_if_the_last_one_demands_it() -> None:
    peer = Peer(True, True, Unavailable("a"))
    await peer.run()
    assert peer.lost == [("a", 0.001)], "no pause before"


async def test_an_error_of_the_observer_ends_the_loop() -> None:
    def on_lost(error: Exception, pause_s: float) -> None:
        raise error

    peer = Peer(ValueError("a defect"))
    with pytest.raises(ValueError, match="a defect"):
        await keep_connected(peer.connect, peer.backoff, on_lost)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.stalled_s = 0.0


def silence_watch(clock: Clock, limit_s: float = 3.0) -> SilenceWatch:
    return SilenceWatch(
        limit_s, "frame", clock=lambda: clock.now, stalled_s=lambda: clock.stalled_s
    )


def test_silence_is_measured_from_the_last_message() -> None:
    clock = Clock()
    watch = silence_watch(clock)
    clock.now += 3.0
    watch.check()
    assert watch.silent_s == 3.0
    watch.restart()
    clock.now += 3.1
    with pytest.raises(Unavailable, match=r"no frame for 3 s") as raised:
        watch.check()
    assert raised.value.reason == "SILENT"


def test_time_in_which_this_process_stalled_does_not_count_as_silence() -> None:
    clock = Clock()
    clock.stalled_s = 7.0
    watch = silence_watch(clock)
    clock.now, clock.stalled_s = clock.now + 4.0, 9.0
    assert watch.silent_s == 2.0
    watch.check()


async def test_a_silent_peer_ends_the_watch_only_while_a_message_is_due() -> None:
    clock, is_due = Clock(), False
    watch = silence_watch(clock)
    clock.now += 10.0
    watching = asyncio.create_task(watch.run(lambda: is_due))
    done, _ = await asyncio.wait([watching], timeout=0.25)
    assert not done
    is_due = True
    with pytest.raises(Unavailable, match="no frame"):
        await asyncio.wait_for(watching, 5.0)


@pytest.mark.parametrize(
    "rule", [silence.ATTACH, silence.SESSION, silence.SYNC, silence.SUBSCRIBE], ids=str
)
def test_a_rule_tolerates_at_least_one_missed_heartbeat(rule: SilenceRule) -> None:
    assert rule.limit_s >= 2 * rule.heartbeat_s
