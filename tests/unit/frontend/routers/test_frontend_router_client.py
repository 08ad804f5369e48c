"""The Session with a router: failover, announced bookings, the home router; in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from common.errors import MeshError, NotFound, Unavailable, UnknownModel
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.request.placement import Decision
from common.streams.silence import SESSION
from common.wire.errors import error_to_proto
from frontend_svc.request.placement_request import UNKNOWN_ADAPTER
from frontend_svc.routers.choice import AVOID_FAILED_ROUTER_S, home_router
from frontend_svc.routers.client import (
    HOME_CHECK_INTERVAL_S,
    HOME_RETURN_JITTER_S,
    RECONNECT_MAX_S,
    RouterClient,
)
from frontend_svc.routers.monitor import (
    REQUERY_DELAY_MAX_S,
    REQUERY_DELAY_S,
    STALE_ROUTER_AFTER_S,
    UNROUTED_AFTER_S,
)
from kvmesh.router.v1 import router_pb2 as pb
from tests.kit.placements import placement_request
from tests.sim.loop import run_virtually

FRONTEND = 7
HOME, OTHER = sorted((1, 2), key=lambda router: router != home_router(FRONTEND, (), {1, 2}))
MOVED_S = HOME_CHECK_INTERVAL_S + HOME_RETURN_JITTER_S + 0.1


class FakeRouter:
    """Replies at once, unless it hangs or is dead. sessions: the frames of each, oldest first.

    queues: it queues every query and never replies. queue_wait_ms: sent in its hello. dies_of: the
    request id that ends the session. error: its reply to every query.
    """

    def __init__(self, router_id: int) -> None:
        self.id = router_id
        self.is_dead = self.hangs = self.queues = False
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
        for responses in self._open:
            responses.put_nowait(None)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[_FakeSession]:
        if self.is_dead:
            raise Unavailable("connection refused")
        responses: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        self.sessions.append([])
        self._open.add(responses)
        try:
            yield _FakeSession(self, self.sessions[-1], responses)
        finally:
            self._open.discard(responses)

    def respond(self, frame: pb.SessionRequest) -> pb.SessionResponse:
        decision = pb.Decision(
            worker=pb.Placement(worker_id=50), worker_address="w:50", predicted_cached_tokens=20
        )
        hello_ack = pb.SessionHelloAck(router_id=self.id, queue_wait_ms=self.queue_wait_ms)
        result = pb.NewResult(decision=decision)
        if self.error is not None:
            result = pb.NewResult(error=error_to_proto(self.error))
        poisoned = self.dies_of in [new.key.request_id for new in frame.news]
        response = pb.SessionResponse(hello_ack=hello_ack if frame.HasField("hello") else None)
        for new in () if self.queues or poisoned else frame.news:
            response.results.append(result)
            response.results[-1].id = new.id
        return response


class _FakeSession:
    def __init__(
        self,
        router: FakeRouter,
        frames: list[pb.SessionRequest],
        responses: asyncio.Queue[pb.SessionResponse | None],
    ) -> None:
        self._router = router
        self._frames = frames
        self._responses = responses

    async def read(self) -> pb.SessionResponse | None:
        return await self._responses.get()

    async def write(self, frame: pb.SessionRequest) -> None:
        copy = pb.SessionRequest()
        copy.CopyFrom(frame)
        self._frames.append(copy)
        if self._router.hangs or self._router.is_dead:
            return
        response = self._router.respond(frame)
        if response.ListFields() or not frame.ListFields():
            self._responses.put_nowait(response)
        if self._router.dies_of in [new.key.request_id for new in frame.news]:
            self._responses.put_nowait(None)


class Harness:
    """A client and its routers.

    has_workers: whether discovery has workers. stalled_s: see RouterClient.
    """

    def __init__(self, *present: int) -> None:
        self.has_workers = True
        self.stalled_s = 0.0
        self.routers = {router: FakeRouter(router) for router in (HOME, OTHER)}
        self.home, self.other = self.routers[HOME], self.routers[OTHER]
        self.client = RouterClient(
            FRONTEND,
            lambda query: Unavailable("no router"),
            has_workers=lambda query: self.has_workers,
            open_session=lambda router: self.routers[router.id].session(),
            rng=Random(1),
            stalled_s=lambda: self.stalled_s,
        )
        self.results: list[Decision | MeshError] = []
        self.show(*present)

    def show(self, *present: int) -> None:
        """Discovery shows these routers."""
        members = {router: Instance(router, "n", "router", "", "a:1") for router in present}
        self.client.on_snapshot(Snapshot(1, members), SnapshotDiff())

    def place(self, name: str) -> None:
        now = asyncio.get_running_loop().time()
        query = placement_request("m", 100, now, block_size=16)
        self.client.place((name, 0), query, self.results.append)


def play(script: Callable[[Harness], Coroutine[Any, Any, None]], *present: int) -> None:
    async def main() -> None:
        harness = Harness(*present)
        task = asyncio.get_running_loop().create_task(harness.client.run())
        try:
            await script(harness)
        finally:
            task.cancel()
            await asyncio.wait([task])

    run_virtually(main(), until=300.0)


def test_a_frontend_has_one_session_with_its_home_router_only() -> None:
    async def script(harness: Harness) -> None:
        await asyncio.sleep(10.0)
        harness.place("a")
        await asyncio.sleep(0.1)
        assert isinstance(harness.results[0], Decision)
        assert (harness.home.open_sessions, harness.other.sessions) == (1, [])
        assert len(harness.home.sessions) == 1

    play(script, HOME, OTHER)


@pytest.mark.parametrize("is_shown", [True, False], ids=["discovery lags", "discovery is current"])
def test_the_session_after_a_dead_router_begins_with_all_bookings_and_queries(
    is_shown: bool,
) -> None:
    async def script(harness: Harness) -> None:
        harness.place("a")
        harness.place("b")
        await asyncio.sleep(0.1)
        harness.client.prefill_done(("a", 0))
        harness.client.free(("b", 0))
        if not is_shown:
            harness.show(OTHER)
        harness.home.die()
        harness.place("c")
        await asyncio.sleep(RECONNECT_MAX_S + 0.01)
        first = harness.other.frames[0]
        assert [b.key.request_id for b in first.announced] == ["a"]
        assert (first.announced[0].prefill_tokens, first.announced[0].revision) == (0, 2)
        assert [new.key.request_id for new in first.news] == ["c"]
        assert len(harness.results) == 3

    play(script, HOME, OTHER)


def test_a_frontend_returns_to_its_home_router_when_that_is_back() -> None:
    async def script(harness: Harness) -> None:
        await asyncio.sleep(1.0)
        harness.place("a")
        await asyncio.sleep(0.1)
        assert harness.other.open_sessions == 1
        harness.show(HOME, OTHER)
        await asyncio.sleep(MOVED_S)
        assert (harness.home.open_sessions, harness.other.open_sessions) == (1, 0)
        assert [b.key.request_id for b in harness.home.frames[0].announced] == ["a"]

    play(script, OTHER)


def test_a_frontend_leaves_a_hung_home_router_until_that_answers_again() -> None:
    async def script(harness: Harness) -> None:
        await asyncio.sleep(1.0)
        harness.home.hangs = True
        await asyncio.sleep(SESSION.limit_s + SESSION.heartbeat_s + RECONNECT_MAX_S)
        assert harness.other.open_sessions == 1
        waited_s = 0.0
        for n in range(300):
            harness.place(f"{n}")
            await asyncio.sleep(0.1)
            waited_s += 0.1
            assert len(harness.results) == n + 1, "queries succeed while the home is probed"
        assert waited_s > 2 * AVOID_FAILED_ROUTER_S
        assert len(harness.home.sessions) > 2, "the home was probed"
        assert len(harness.other.sessions) == 1
        harness.home.hangs = False
        await asyncio.sleep(AVOID_FAILED_ROUTER_S + MOVED_S + 1.0)
        assert (harness.home.open_sessions, harness.other.open_sessions) == (1, 0)

    play(script, HOME, OTHER)


def test_a_stall_of_the_frontend_is_not_a_silence_of_its_router() -> None:
    async def script(harness: Harness) -> None:
        await asyncio.sleep(1.0)
        harness.home.hangs = True
        for _ in range(100):
            await asyncio.sleep(SESSION.limit_s / 50)
            harness.stalled_s += SESSION.limit_s / 50
        assert (harness.home.open_sessions, harness.other.sessions) == (1, [])
        await asyncio.sleep(SESSION.limit_s + SESSION.heartbeat_s + RECONNECT_MAX_S)
        assert harness.other.open_sessions == 1

    play(script, HOME, OTHER)


def test_a_decision_has_the_address_of_the_worker() -> None:
    async def script(harness: Harness) -> None:
        harness.place("a")
        await asyncio.sleep(0.1)
        (placed,) = harness.results
        assert isinstance(placed, Decision)
        assert (placed.worker.worker_id, placed.worker_address) == (50, "w:50")

    play(script, HOME)


def test_a_queued_request_is_not_placed_unrouted_while_its_session_moves() -> None:
    async def script(harness: Harness) -> None:
        harness.home.queues = harness.other.queues = True
        harness.place("a")
        await asyncio.sleep(10 * UNROUTED_AFTER_S + 0.05)
        harness.show()
        harness.home.die()
        # In time for a hello, but too late for a heartbeat.
        await asyncio.sleep(UNROUTED_AFTER_S - RECONNECT_MAX_S - 0.1)
        harness.show(OTHER)
        await asyncio.sleep(10 * UNROUTED_AFTER_S)
        assert [new.key.request_id for new in harness.other.frames[0].news] == ["a"]
        assert (harness.client.unrouted, harness.results) == (0, [])

    play(script, HOME)


@pytest.mark.parametrize("hangs", [True, False], ids=["hung", "gone"])
def test_a_queued_request_is_placed_unrouted_when_no_router_responds_for_long(
    hangs: bool,
) -> None:
    async def script(harness: Harness) -> None:
        harness.home.queues = True
        harness.place("a")
        await asyncio.sleep(10 * UNROUTED_AFTER_S)
        if hangs:
            harness.home.hangs = True
        else:
            harness.home.die()
        await asyncio.sleep(UNROUTED_AFTER_S + 0.2)
        assert (harness.client.unrouted, len(harness.results)) == (1, 1)

    play(script, HOME)


@pytest.mark.parametrize("queue_wait_ms", [None, 0, 60_000], ids=["unknown", "none", "a minute"])
def test_a_query_that_crashes_its_routers_is_placed_unrouted(queue_wait_ms: int | None) -> None:
    async def script(harness: Harness) -> None:
        for router in (harness.home, harness.other):
            router.queue_wait_ms, router.dies_of = queue_wait_ms, "poison"
        harness.place("poison")
        harness.place("meanwhile")
        await asyncio.sleep(UNROUTED_AFTER_S + 1.0)
        assert len(harness.home.sessions) > 3, "each session had a hello"
        assert (harness.client.unrouted, len(harness.results)) == (2, 2)
        harness.place("afterwards")
        await asyncio.sleep(0.5)
        assert isinstance(harness.results[-1], Decision)

    play(script, HOME, OTHER)


def test_a_router_that_answers_no_query_is_left_for_another() -> None:
    async def script(harness: Harness) -> None:
        harness.home.queues, harness.home.queue_wait_ms = True, 0
        await asyncio.sleep(1.0)
        harness.place("a")
        await asyncio.sleep(SESSION.limit_s + SESSION.heartbeat_s + RECONNECT_MAX_S + 0.1)
        assert isinstance(harness.results[0], Decision)
        assert harness.other.open_sessions == 1

    play(script, HOME, OTHER)


def test_requests_are_placed_unrouted_when_a_live_router_answers_no_query() -> None:
    async def script(harness: Harness) -> None:
        harness.home.queues, harness.home.queue_wait_ms = True, 0
        for n in range(5):
            harness.place(f"{n}")
            await asyncio.sleep(UNROUTED_AFTER_S + 2.0)
            assert harness.client.unrouted == n + 1

    play(script, HOME)


def test_a_router_may_queue_a_query_for_its_advertised_queue_wait_and_no_longer() -> None:
    async def script(harness: Harness) -> None:
        harness.home.queues, harness.home.queue_wait_ms = True, 60_000
        harness.place("a")
        await asyncio.sleep(60.0)
        assert (harness.results, len(harness.home.sessions)) == ([], 1)
        await asyncio.sleep(SESSION.limit_s + SESSION.heartbeat_s + RECONNECT_MAX_S + 0.1)
        assert isinstance(harness.results[0], Decision)
        assert harness.client.unrouted == 0

    play(script, HOME, OTHER)


def test_a_router_with_another_id_at_a_known_address_is_rejected() -> None:
    async def script(harness: Harness) -> None:
        harness.home.id = 3
        harness.place("a")
        await asyncio.sleep(2 * RECONNECT_MAX_S)
        assert isinstance(harness.results[0], Decision)
        assert harness.other.open_sessions == 1
        assert harness.home.open_sessions == 0
        await asyncio.sleep(AVOID_FAILED_ROUTER_S + 2 * MOVED_S)
        assert (len(harness.home.sessions), len(harness.other.sessions)) == (2, 1), (
            "probed, not used"
        )

    play(script, HOME, OTHER)


UNKNOWN_MODEL_ERRORS = (
    UnknownModel("m"),
    NotFound("no such adapter", reason=UNKNOWN_ADAPTER),
    Unavailable("no snapshot yet", reason="FLEET_UNKNOWN"),
)


@pytest.mark.parametrize("unknown", UNKNOWN_MODEL_ERRORS, ids=lambda error: error.reason)
def test_a_router_that_does_not_see_the_workers_is_left_for_another(
    unknown: MeshError,
) -> None:
    async def script(harness: Harness) -> None:
        harness.home.error = unknown
        harness.place("a")
        await asyncio.sleep(STALE_ROUTER_AFTER_S + REQUERY_DELAY_S + RECONNECT_MAX_S + 0.1)
        (result,) = harness.results
        assert isinstance(result, Decision)
        assert harness.other.open_sessions == 1

    play(script, HOME, OTHER)


def test_a_query_is_repeated_when_the_router_sees_the_model_a_moment_later() -> None:
    async def script(harness: Harness) -> None:
        harness.home.error = UnknownModel("m")
        harness.place("a")
        await asyncio.sleep(STALE_ROUTER_AFTER_S / 2)
        harness.home.error = None
        await asyncio.sleep(2 * REQUERY_DELAY_S)
        assert isinstance(harness.results[0], Decision)
        assert (len(harness.home.sessions), harness.other.sessions) == (1, [])

    play(script, HOME, OTHER)


def test_a_repeated_query_that_is_queued_is_not_placed_unrouted() -> None:
    async def script(harness: Harness) -> None:
        harness.home.error, harness.home.queue_wait_ms = UnknownModel("m"), 60_000
        harness.place("a")
        await asyncio.sleep(STALE_ROUTER_AFTER_S / 2)
        harness.home.error, harness.home.queues = None, True
        await asyncio.sleep(3 * UNROUTED_AFTER_S)
        assert (harness.results, harness.client.unrouted) == ([], 0)

    play(script, HOME, OTHER)


@pytest.mark.parametrize("seed", range(10))
def test_a_new_session_sends_each_repeated_query_once(seed: int) -> None:
    async def script(harness: Harness) -> None:
        harness.client._rng = Random(seed)
        harness.home.error, harness.other.queues = UnknownModel("m"), True
        for number in range(20):
            harness.place(f"{number}")
            await asyncio.sleep(0.03)
        await asyncio.sleep(STALE_ROUTER_AFTER_S + 2 * REQUERY_DELAY_S + RECONNECT_MAX_S)
        sent = [new.id for frame in harness.other.frames for new in frame.news]
        assert len(sent) == len(set(sent)) > 0

    play(script, HOME, OTHER)


def test_a_served_model_that_no_router_knows_is_placed_unrouted() -> None:
    async def script(harness: Harness) -> None:
        harness.home.error = harness.other.error = UnknownModel("m")
        for n in range(40):
            harness.place(f"{n}")
            await asyncio.sleep(0.5)
        assert len(harness.results) == harness.client.unrouted
        assert harness.client.unrouted >= 40 - (UNROUTED_AFTER_S + 0.2) / 0.5
        moves = len(harness.home.sessions) + len(harness.other.sessions) - 1
        assert moves <= 2 * 20.0 / AVOID_FAILED_ROUTER_S, "few moves between the routers"

    play(script, HOME, OTHER)


@pytest.mark.parametrize("seed", range(10))
def test_a_query_for_a_model_that_stays_unknown_is_repeated_a_few_times_only(seed: int) -> None:
    async def script(harness: Harness) -> None:
        harness.client._rng = Random(seed)
        harness.home.error = UnknownModel("m")
        await asyncio.sleep(1.0)
        for n in range(20):
            harness.place(f"{n}")
        await asyncio.sleep(UNROUTED_AFTER_S + 0.2)
        assert (harness.client.unrouted, len(harness.results)) == (20, 20), "placed in time"
        sent = Counter(new.id for frame in harness.home.frames for new in frame.news)
        first, later = (
            STALE_ROUTER_AFTER_S / REQUERY_DELAY_S,
            UNROUTED_AFTER_S / (REQUERY_DELAY_MAX_S / 2),
        )
        assert all(3 <= times <= 2 + first + later for times in sent.values()), sent
        at_once = [len(frame.news) for frame in harness.home.frames if frame.news]
        assert max(at_once[-5:]) < 20, "not all at once"

    play(script, HOME)


@pytest.mark.parametrize("unknown_s", [0.3, 1.0, 1.9])
def test_a_query_is_placed_soon_after_the_router_sees_the_model(unknown_s: float) -> None:
    async def script(harness: Harness) -> None:
        harness.home.error = UnknownModel("m")
        await asyncio.sleep(1.0)
        harness.place("a")
        await asyncio.sleep(unknown_s)
        harness.home.error = None
        await asyncio.sleep(
            REQUERY_DELAY_S if unknown_s < STALE_ROUTER_AFTER_S else REQUERY_DELAY_MAX_S
        )
        await asyncio.sleep(0.01)
        assert isinstance(harness.results[0], Decision)
        assert harness.client.unrouted == 0

    play(script, HOME)


def test_an_unknown_model_without_workers_is_an_error() -> None:
    async def script(harness: Harness) -> None:
        harness.home.error, harness.has_workers = UnknownModel("m"), False
        harness.place("a")
        await asyncio.sleep(0.1)
        (result,) = harness.results
        assert isinstance(result, UnknownModel)

    play(script, HOME, OTHER)


def test_the_callback_of_an_unrouted_placement_may_free_another_pending_one() -> None:
    async def script(harness: Harness) -> None:
        def free_b(result: Decision | MeshError) -> None:
            harness.results.append(result)
            harness.client.free(("b", 0))

        query = placement_request("m", 100, asyncio.get_running_loop().time())
        harness.client.place(("a", 0), query, free_b)
        harness.place("b")
        await asyncio.sleep(UNROUTED_AFTER_S + 1.0)
        assert (harness.client.unrouted, len(harness.results)) == (1, 1)

    play(script)


def test_heartbeats_are_exchanged_while_only_frees_are_sent() -> None:
    async def script(harness: Harness) -> None:
        harness.home.queues = True
        for n in range(round(5 * SESSION.limit_s / SESSION.heartbeat_s * 8)):
            harness.client.free((f"{n}", 0))
            await asyncio.sleep(SESSION.heartbeat_s / 8)
        assert sum(len(frame.frees) > 0 for frame in harness.home.frames) > 100
        assert len(harness.home.sessions) == 1

    play(script, HOME)
