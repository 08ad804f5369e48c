"""When those who wait at a router are looked through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from common.errors import MeshError
from common.instances import Instance, Snapshot
from kvmesh.router.v1 import router_pb2
from router_svc.core.load import ORPHAN_S, BookingKey
from router_svc.core.queue import Parked, QueueRules
from router_svc.core.route import Decision, Router
from router_svc.core.rules import Rules
from router_svc.core.select import SELECTORS
from router_svc.decisions import PART, SLICE, Decisions
from router_svc.hashing import Hashers
from router_svc.metrics import Metrics
from router_svc.tracing import DecisionSpans

BATCH = 1000
TOO_MUCH = 2 * BATCH


class Turn:
    """A call that is to come."""

    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when, self.call, self.is_cancelled = when, call, False

    def cancel(self) -> None:
        self.is_cancelled = True


class HandLoop:
    """A loop whose time goes on by one second each time it is asked for; runs nothing by itself."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.turns: list[Turn] = []

    def time(self) -> float:
        self.now += 1.0
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Turn:
        self.turns.append(Turn(when, call))
        return self.turns[-1]

    @property
    def due(self) -> list[float]:
        """When the calls that still are to come will come."""
        return [turn.when for turn in self.turns if not turn.is_cancelled]

    def run(self) -> None:
        """Make the only call that is to come."""
        (turn,) = (turn for turn in self.turns if not turn.is_cancelled)
        self.turns.clear()
        turn.call()


class Desk:
    """Decisions on one worker that is busy above BATCH tokens."""

    def __init__(self) -> None:
        self.now = 100.0
        self.answers: dict[str, Decision | MeshError] = {}
        self.router = Router(
            SELECTORS["least_loaded"](), rules=Rules(queue=QueueRules(threshold=1.0))
        )
        self.see(BATCH)
        self.session = self.router.book.open_session(7)
        self.decisions = Decisions(
            self.router,
            Metrics(self.router, clock=lambda: self.now),
            rng=Random(0),
            hashers=Hashers(b""),
            spans=DecisionSpans(),
            clock=lambda: self.now,
        )

    def see(self, batch: int) -> None:
        worker = Instance(
            1, "mesh", "worker", "", "127.0.0.1:1", model="m", max_num_batched_tokens=batch
        )
        self.router.update(Snapshot(1, {1: worker}), self.now)

    def ask(self, name: str, session: int | None = None, lane: int = 0) -> Decision | Parked:
        message = router_pb2.Query(model="m", total_tokens=TOO_MUCH)
        if lane:
            message.excluded_worker_ids.append(1000 + lane)
        key = BookingKey(7 if session is None else 8, name, 0)
        session = self.session if session is None else session

        def answer(outcome: Decision | MeshError) -> None:
            self.answers[name] = outcome

        return self.decisions.ask(message, key, session, "", answer)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> HandLoop:
    loop = HandLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    return loop


@pytest.mark.parametrize("is_expired_first", [False, True], ids=["by the sweep", "just before it"])
def test_a_sweep_after_an_orphan_was_freed_is_followed_by_a_paced_one_only(
    loop: HandLoop, is_expired_first: bool
) -> None:
    desk = Desk()
    lost = desk.router.book.open_session(8)
    desk.ask("lost", lost)
    for name in ("first", "second"):
        assert isinstance(desk.ask(name), Parked)
    desk.router.book.end_session(lost, desk.now)
    desk.now += ORPHAN_S
    if is_expired_first:
        desk.router.expire(desk.now)
        assert len(loop.due) == 1
    desk.decisions.serve_parked()
    assert list(desk.answers) == ["first"]
    expected = [] if is_expired_first else [loop.now + PART - 1]
    assert loop.due == expected, "it took a second, and so three are the loop's"


def test_who_must_wait_on_is_looked_at_in_slices_and_a_relief_meanwhile_is_not_lost(
    loop: HandLoop,
) -> None:
    desk = Desk()
    desk.ask("a")
    for number in range(SLICE + 1):
        assert isinstance(desk.ask(f"r{number}", lane=number + 1), Parked)
    desk.see(BATCH + 1)
    loop.run()
    assert desk.answers == {}
    assert loop.due == [loop.now + PART - 1], "one lane is left"
    desk.router.book.free(BookingKey(7, "a", 0))
    loop.run()
    assert list(desk.answers) == [f"r{SLICE}"], "the sweep goes on where it was"
    desk.router.book.free(BookingKey(7, f"r{SLICE}", 0))
    loop.run()
    assert list(desk.answers) == [f"r{SLICE}", "r0"], "and another one begins"
    assert loop.due == []


def test_a_sweep_in_slices_ends_where_nothing_was_relieved(loop: HandLoop) -> None:
    desk = Desk()
    desk.ask("a")
    for number in range(SLICE + 1):
        desk.ask(f"r{number}", lane=number + 1)
    desk.see(BATCH + 1)
    loop.run()
    loop.run()
    assert (desk.answers, loop.due) == ({}, [])
