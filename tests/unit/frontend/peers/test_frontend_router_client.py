"""The Session with a router: failing over, announcing, going home; in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from common.errors import MeshError, NotFound, Unavailable, UnknownModel
from common.registry.instances import Instance
from common.wire.errors import error_to_proto
from frontend_svc.core.peers.placement_query import UNKNOWN_ADAPTER, Query
from frontend_svc.core.peers.router_choice import AVOID_FAILED_ROUTER_S, home_router
from frontend_svc.core.peers.router_monitor import (
    REQUERY_DELAY_MAX_S,
    REQUERY_DELAY_S,
    SILENCE_TIMEOUT_S,
    STALE_ROUTER_AFTER_S,
    UNROUTED_AFTER_S,
)
from frontend_svc.core.request.types import RoutingDecision
from frontend_svc.peers.router_client import (
    HOME_RETURN_JITTER_S,
    PING_INTERVAL_S,
    RECONNECT_MAX_S,
    RouterClient,
)
from kvmesh.router.v1 import router_pb2 as pb
from tests.sim.loop import run_virtually

FRONTEND = 7
HOME, OTHER = sorted((1, 2), key=lambda router: router != home_router(FRONTEND, (), {1, 2}))
MOVED_S = PING_INTERVAL_S + HOME_RETURN_JITTER_S + 0.1


class FakeRouter:
    """Answers at once, unless it hangs or is dead. sessions: the frames of each, oldest first.

    parks: no worker has room, so that nobody is placed. queue_wait_ms: what it says of its queue.
    dies_of: ends the session when it is asked this. error: its answer to everything.
    """

    def __init__(self, router_id: int) -> None:
        self.id = router_id
        self.is_dead = self.hangs = self.parks = False
        self.queue_wait_ms: int | None = None
        self.dies_of = ""
        self.error: MeshError | None = None
        self.sessions: list[list[pb.SessionRequest]] = []
        self._open: set[asyncio.Queue[pb.SessionResponse | None]] = set()

    @property
    def open_sessions(self) -> int:
        return len(self._open)

    @property
    def frames(self) -> list[pb.SessionRequest]:
        return self.sessions[-1]

    def die(self) -> None:
        self.is_dead = True
        for answers in self._open:
            answers.put_nowait(None)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[_FakeSession]:
        if self.is_dead:
            raise Unavailable("nobody listens")
        answers: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        self.sessions.append([])
        self._open.add(answers)
        try:
            yield _FakeSession(self, self.sessions[-1], answers)
        finally:
            self._open.discard(answers)

    def answer(self, frame: pb.SessionRequest) -> pb.SessionResponse:
        decision = pb.Decision(
            worker=pb.Placement(worker_id=50), worker_address="w:50", predicted_cached_tokens=20
        )
        hello_ack = pb.SessionHelloAck(router_id=self.id, queue_wait_ms=self.queue_wait_ms)
        result = pb.NewResult(decision=decision)
        if self.error is not None:
            result = pb.NewResult(error=error_to_proto(self.error))
        poisoned = self.dies_of in [new.key.request_id for new in frame.news]
        response = pb.SessionResponse(hello_ack=hello_ack if frame.HasField("hello") else None)
        for new in () if self.parks or poisoned else frame.news:
            response.results.append(result)
            response.results[-1].id = new.id
        return response


class _FakeSession:
    def __init__(
        self,
        router: FakeRouter,
        frames: list[pb.SessionRequest],
        answers: asyncio.Queue[pb.SessionResponse | None],
    ) -> None:
        self._router = router
        self._frames = frames
        self._answers = answers

    async def read(self) -> pb.SessionResponse | None:
        return await self._answers.get()

    async def write(self, frame: pb.SessionRequest) -> None:
        copy = pb.SessionRequest()
        copy.CopyFrom(frame)
        self._frames.append(copy)
        if self._router.hangs or self._router.is_dead:
            return
        answer = self._router.answer(frame)
        if answer.ListFields() or not frame.ListFields():
            self._answers.put_nowait(answer)
        if self._router.dies_of in [new.key.request_id for new in frame.news]:
            self._answers.put_nowait(None)


class Bed:
    """A client and its routers. `there`: those that discovery shows; `has_workers`: workers as
    well."""

    def __init__(self, *there: int) -> None:
        self.there = list(there)
        self.has_workers = True
        self.routers = {router: FakeRouter(router) for router in (HOME, OTHER)}
        self.home, self.other = self.routers[HOME], self.routers[OTHER]
        self.client = RouterClient(
            FRONTEND,
            lambda: [Instance(r, "n", "router", "", "a:1") for r in self.there],
            lambda query: Unavailable("no router"),
            has_workers=lambda query: self.has_workers,
            open_session=lambda router: self.routers[router.id].session(),
            rng=Random(1),
        )
        self.answers: list[RoutingDecision | MeshError] = []

    def place(self, name: str) -> None:
        now = asyncio.get_running_loop().time()
        query = Query("m", 100, now, block_size=16)
        self.client.place((name, 0), query, self.answers.append)


def play(script: Callable[[Bed], Coroutine[Any, Any, None]], *there: int) -> None:
    async def main() -> None:
        bed = Bed(*there)
        task = asyncio.get_running_loop().create_task(bed.client.run())
        try:
            await script(bed)
        finally:
            task.cancel()
            await asyncio.wait([task])

    run_virtually(main(), until=300.0)


def test_a_frontend_asks_its_home_and_nobody_else() -> None:
    async def script(bed: Bed) -> None:
        await asyncio.sleep(10.0)
        bed.place("a")
        await asyncio.sleep(0.1)
        assert isinstance(bed.answers[0], RoutingDecision)
        assert (bed.home.open_sessions, bed.other.sessions) == (1, [])
        assert len(bed.home.sessions) == 1

    play(script, HOME, OTHER)


@pytest.mark.parametrize("shown", [True, False], ids=["discovery lags", "discovery knows"])
def test_when_the_router_dies_the_other_is_asked_and_told_what_is_held(shown: bool) -> None:
    async def script(bed: Bed) -> None:
        bed.place("a")
        bed.place("b")
        await asyncio.sleep(0.1)
        bed.client.prefill_done(("a", 0))
        bed.client.free(("b", 0))
        if not shown:
            bed.there = [OTHER]
        bed.home.die()
        bed.place("c")
        await asyncio.sleep(RECONNECT_MAX_S + 0.01)
        first = bed.other.frames[0]
        assert [b.key.request_id for b in first.announced] == ["a"]
        assert (first.announced[0].prefill_tokens, first.announced[0].revision) == (0, 2)
        assert [new.key.request_id for new in first.news] == ["c"]
        assert len(bed.answers) == 3

    play(script, HOME, OTHER)


def test_a_router_that_comes_back_gets_its_frontends_again() -> None:
    async def script(bed: Bed) -> None:
        await asyncio.sleep(1.0)
        bed.place("a")
        await asyncio.sleep(0.1)
        assert bed.other.open_sessions == 1
        bed.there = [HOME, OTHER]
        await asyncio.sleep(MOVED_S)
        assert (bed.home.open_sessions, bed.other.open_sessions) == (1, 0)
        assert [b.key.request_id for b in bed.home.frames[0].announced] == ["a"]

    play(script, OTHER)


def test_a_home_that_hangs_is_left_after_silence_and_not_gone_back_to_while_it_hangs() -> None:
    async def script(bed: Bed) -> None:
        await asyncio.sleep(1.0)
        bed.home.hangs = True
        await asyncio.sleep(SILENCE_TIMEOUT_S + PING_INTERVAL_S + RECONNECT_MAX_S)
        assert bed.other.open_sessions == 1
        waited_s = 0.0
        for n in range(300):
            bed.place(f"{n}")
            await asyncio.sleep(0.1)
            waited_s += 0.1
            assert len(bed.answers) == n + 1, "answered, also while home is tried"
        assert waited_s > 2 * AVOID_FAILED_ROUTER_S
        assert len(bed.home.sessions) > 2, "it was tried"
        assert len(bed.other.sessions) == 1
        bed.home.hangs = False
        await asyncio.sleep(AVOID_FAILED_ROUTER_S + MOVED_S + 1.0)
        assert (bed.home.open_sessions, bed.other.open_sessions) == (1, 0)

    play(script, HOME, OTHER)


def test_an_answer_says_where_the_worker_is() -> None:
    async def script(bed: Bed) -> None:
        bed.place("a")
        await asyncio.sleep(0.1)
        (placed,) = bed.answers
        assert isinstance(placed, RoutingDecision)
        assert (placed.worker_id, placed.address) == (50, "w:50")

    play(script, HOME)


def test_who_waits_in_a_queue_is_not_placed_unrouted_while_its_session_moves() -> None:
    async def script(bed: Bed) -> None:
        bed.home.parks = bed.other.parks = True
        bed.place("a")
        await asyncio.sleep(10 * UNROUTED_AFTER_S + 0.05)
        bed.there = []
        bed.home.die()
        # In time to be greeted, but too late to be heard of again.
        await asyncio.sleep(UNROUTED_AFTER_S - RECONNECT_MAX_S - 0.1)
        bed.there = [OTHER]
        await asyncio.sleep(10 * UNROUTED_AFTER_S)
        assert [new.key.request_id for new in bed.other.frames[0].news] == ["a"]
        assert (bed.client.unrouted, bed.answers) == (0, [])

    play(script, HOME)


@pytest.mark.parametrize("hangs", [True, False], ids=["hung", "gone"])
def test_who_waits_in_a_queue_is_placed_unrouted_when_no_router_answers_for_long(
    hangs: bool,
) -> None:
    async def script(bed: Bed) -> None:
        bed.home.parks = True
        bed.place("a")
        await asyncio.sleep(10 * UNROUTED_AFTER_S)
        if hangs:
            bed.home.hangs = True
        else:
            bed.home.die()
        await asyncio.sleep(UNROUTED_AFTER_S + 0.2)
        assert (bed.client.unrouted, len(bed.answers)) == (1, 1)

    play(script, HOME)


@pytest.mark.parametrize("queue_wait_ms", [None, 0, 60_000], ids=["not told", "none", "a minute"])
def test_a_question_that_its_routers_die_of_is_placed_unrouted(queue_wait_ms: int | None) -> None:
    async def script(bed: Bed) -> None:
        for router in (bed.home, bed.other):
            router.queue_wait_ms, router.dies_of = queue_wait_ms, "poison"
        bed.place("poison")
        bed.place("beside it")
        await asyncio.sleep(UNROUTED_AFTER_S + 1.0)
        assert len(bed.home.sessions) > 3, "greeted each time"
        assert (bed.client.unrouted, len(bed.answers)) == (2, 2)
        bed.place("after it")
        await asyncio.sleep(0.5)
        assert isinstance(bed.answers[-1], RoutingDecision)

    play(script, HOME, OTHER)


def test_a_router_that_lives_and_answers_nothing_is_left_for_one_that_does() -> None:
    async def script(bed: Bed) -> None:
        bed.home.parks, bed.home.queue_wait_ms = True, 0
        await asyncio.sleep(1.0)
        bed.place("a")
        await asyncio.sleep(SILENCE_TIMEOUT_S + PING_INTERVAL_S + RECONNECT_MAX_S + 0.1)
        assert isinstance(bed.answers[0], RoutingDecision)
        assert bed.other.open_sessions == 1

    play(script, HOME, OTHER)


def test_where_no_router_answers_although_they_live_requests_are_placed_unrouted() -> None:
    async def script(bed: Bed) -> None:
        bed.home.parks, bed.home.queue_wait_ms = True, 0
        for n in range(5):
            bed.place(f"{n}")
            await asyncio.sleep(UNROUTED_AFTER_S + 2.0)
            assert bed.client.unrouted == n + 1

    play(script, HOME)


def test_a_router_may_keep_a_question_for_as_long_as_it_says_and_no_longer() -> None:
    async def script(bed: Bed) -> None:
        bed.home.parks, bed.home.queue_wait_ms = True, 60_000
        bed.place("a")
        await asyncio.sleep(60.0)
        assert (bed.answers, len(bed.home.sessions)) == ([], 1)
        await asyncio.sleep(SILENCE_TIMEOUT_S + PING_INTERVAL_S + RECONNECT_MAX_S + 0.1)
        assert isinstance(bed.answers[0], RoutingDecision)
        assert bed.client.unrouted == 0

    play(script, HOME, OTHER)


def test_another_router_at_the_address_of_one_is_not_taken_for_it() -> None:
    async def script(bed: Bed) -> None:
        bed.home.id = 3
        bed.place("a")
        await asyncio.sleep(2 * RECONNECT_MAX_S)
        assert isinstance(bed.answers[0], RoutingDecision)
        assert bed.other.open_sessions == 1
        assert bed.home.open_sessions == 0
        await asyncio.sleep(AVOID_FAILED_ROUTER_S + 2 * MOVED_S)
        assert (len(bed.home.sessions), len(bed.other.sessions)) == (2, 1), "tried, and not gone to"

    play(script, HOME, OTHER)


DENIALS = (
    UnknownModel("m"),
    NotFound("no such adapter", reason=UNKNOWN_ADAPTER),
    Unavailable("nothing was seen", reason="FLEET_UNKNOWN"),
)


@pytest.mark.parametrize("denial", DENIALS, ids=lambda error: error.reason)
def test_a_router_that_does_not_know_what_is_there_is_left_for_one_that_does(
    denial: MeshError,
) -> None:
    async def script(bed: Bed) -> None:
        bed.home.error = denial
        bed.place("a")
        await asyncio.sleep(STALE_ROUTER_AFTER_S + REQUERY_DELAY_S + RECONNECT_MAX_S + 0.1)
        (answer,) = bed.answers
        assert isinstance(answer, RoutingDecision)
        assert bed.other.open_sessions == 1

    play(script, HOME, OTHER)


def test_a_router_that_learns_of_a_model_a_moment_later_is_asked_again_and_kept() -> None:
    async def script(bed: Bed) -> None:
        bed.home.error = UnknownModel("m")
        bed.place("a")
        await asyncio.sleep(STALE_ROUTER_AFTER_S / 2)
        bed.home.error = None
        await asyncio.sleep(2 * REQUERY_DELAY_S)
        assert isinstance(bed.answers[0], RoutingDecision)
        assert (len(bed.home.sessions), bed.other.sessions) == (1, [])

    play(script, HOME, OTHER)


def test_who_was_denied_and_is_then_parked_waits_in_the_queue_like_everybody() -> None:
    async def script(bed: Bed) -> None:
        bed.home.error, bed.home.queue_wait_ms = UnknownModel("m"), 60_000
        bed.place("a")
        await asyncio.sleep(STALE_ROUTER_AFTER_S / 2)
        bed.home.error, bed.home.parks = None, True
        await asyncio.sleep(3 * UNROUTED_AFTER_S)
        assert (bed.answers, bed.client.unrouted) == ([], 0)

    play(script, HOME, OTHER)


@pytest.mark.parametrize("seed", range(10))
def test_nobody_is_asked_twice_in_one_session_for_being_denied_in_the_last(seed: int) -> None:
    async def script(bed: Bed) -> None:
        bed.client._rng = Random(seed)
        bed.home.error, bed.other.parks = UnknownModel("m"), True
        for number in range(20):
            bed.place(f"{number}")
            await asyncio.sleep(0.03)
        await asyncio.sleep(STALE_ROUTER_AFTER_S + 2 * REQUERY_DELAY_S + RECONNECT_MAX_S)
        asked = [new.id for frame in bed.other.frames for new in frame.news]
        assert len(asked) == len(set(asked)) > 0

    play(script, HOME, OTHER)


def test_what_all_routers_deny_and_the_frontend_sees_is_placed_unrouted() -> None:
    async def script(bed: Bed) -> None:
        bed.home.error = bed.other.error = UnknownModel("m")
        for n in range(40):
            bed.place(f"{n}")
            await asyncio.sleep(0.5)
        assert len(bed.answers) == bed.client.unrouted
        assert bed.client.unrouted >= 40 - (UNROUTED_AFTER_S + 0.2) / 0.5
        moves = len(bed.home.sessions) + len(bed.other.sessions) - 1
        assert moves <= 2 * 20.0 / AVOID_FAILED_ROUTER_S, "there and back, now and then"

    play(script, HOME, OTHER)


@pytest.mark.parametrize("seed", range(10))
def test_a_question_that_is_denied_all_the_time_is_sent_a_few_times_only(seed: int) -> None:
    async def script(bed: Bed) -> None:
        bed.client._rng = Random(seed)
        bed.home.error = UnknownModel("m")
        await asyncio.sleep(1.0)
        for n in range(20):
            bed.place(f"{n}")
        await asyncio.sleep(UNROUTED_AFTER_S + 0.2)
        assert (bed.client.unrouted, len(bed.answers)) == (20, 20), "in time all the same"
        asked = Counter(new.id for frame in bed.home.frames for new in frame.news)
        first, later = (
            STALE_ROUTER_AFTER_S / REQUERY_DELAY_S,
            UNROUTED_AFTER_S / (REQUERY_DELAY_MAX_S / 2),
        )
        assert all(3 <= times <= 2 + first + later for times in asked.values()), asked
        at_once = [len(frame.news) for frame in bed.home.frames if frame.news]
        assert max(at_once[-5:]) < 20, "not all of them in one moment"

    play(script, HOME)


@pytest.mark.parametrize("denied_s", [0.3, 1.0, 1.9])
def test_who_was_denied_for_long_is_placed_soon_after_the_router_knows(denied_s: float) -> None:
    async def script(bed: Bed) -> None:
        bed.home.error = UnknownModel("m")
        await asyncio.sleep(1.0)
        bed.place("a")
        await asyncio.sleep(denied_s)
        bed.home.error = None
        await asyncio.sleep(
            REQUERY_DELAY_S if denied_s < STALE_ROUTER_AFTER_S else REQUERY_DELAY_MAX_S
        )
        await asyncio.sleep(0.01)
        assert isinstance(bed.answers[0], RoutingDecision)
        assert bed.client.unrouted == 0

    play(script, HOME)


def test_what_routers_deny_and_the_frontend_does_not_see_either_is_answered_so() -> None:
    async def script(bed: Bed) -> None:
        bed.home.error, bed.has_workers = UnknownModel("m"), False
        bed.place("a")
        await asyncio.sleep(0.1)
        (answer,) = bed.answers
        assert isinstance(answer, UnknownModel)

    play(script, HOME, OTHER)


def test_who_is_placed_unrouted_may_free_another_that_waits() -> None:
    async def script(bed: Bed) -> None:
        def free_b(answer: RoutingDecision | MeshError) -> None:
            bed.answers.append(answer)
            bed.client.free(("b", 0))

        query = Query("m", 100, asyncio.get_running_loop().time())
        bed.client.place(("a", 0), query, free_b)
        bed.place("b")
        await asyncio.sleep(UNROUTED_AFTER_S + 1.0)
        assert (bed.client.unrouted, len(bed.answers)) == (1, 1)

    play(script)


def test_a_router_that_is_told_much_and_has_nothing_to_answer_is_not_silent() -> None:
    async def script(bed: Bed) -> None:
        bed.home.parks = True
        for n in range(round(5 * SILENCE_TIMEOUT_S / PING_INTERVAL_S * 8)):
            bed.client.free((f"{n}", 0))
            await asyncio.sleep(PING_INTERVAL_S / 8)
        assert sum(len(frame.frees) > 0 for frame in bed.home.frames) > 100
        assert len(bed.home.sessions) == 1

    play(script, HOME)
