"""The frontend's end of the router's Session: placements, batched per loop turn, with failover.

Each frontend has a home router (`routers/choice.py`). A frontend that had to leave its
home returns after a random delay, once the home answers again.

A query that no router responds to is placed by the frontend itself (`routers/monitor.py`,
counted as unrouted). Every session begins with all live bookings, so that the books of a new router
are right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random
from typing import NoReturn

import structlog

from common.errors import MeshError, Overloaded, Unavailable, WorkerLost
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.request.placement import Decision, Query
from common.runtime.tasks import TaskGroup
from common.streams.backoff import Backoff
from common.streams.peer import SilenceWatch, keep_connected
from common.streams.silence import SESSION
from common.streams.stall_clock import never_stalled
from common.streams.writer import TIMER_RESOLUTION_S, FrameWriter
from common.wire.errors import error_from_proto
from common.wire.preprocessed import dataclass_from_proto
from frontend_svc.request.placement_request import PlacementCallback, PlacementKey, PlacementRequest
from frontend_svc.routers.bookings import HeldBookings
from frontend_svc.routers.choice import RouterSelector
from frontend_svc.routers.monitor import (
    PendingPlacement,
    RouterMonitor,
    RunningTime,
    is_unknown_model,
)
from frontend_svc.routers.session import (
    OpenRouterSession,
    Session,
    grpc_session_opener,
    query_to_proto,
)
from kvmesh.router.v1 import router_pb2

PENDING_PLACEMENTS_MAX = 8192
# Models whose waiting requests are sent to the router; it accepts no more.
AWAITED_MODELS_MAX = 1024
TICK_S = 0.1
# Random delay before the next session, from a tenth of it: the frontends of a router that died do
# not all reach the other routers at once.
RECONNECT_MAX_S = 0.2
RECONNECT_JITTER = (0.1, 1.0)
# A frontend returns to its home router after a random delay of up to HOME_RETURN_JITTER_S, if the
# home answers within HOME_PROBE_TIMEOUT_S.
HOME_CHECK_INTERVAL_S = 0.5
HOME_RETURN_JITTER_S = 1.0
HOME_PROBE_TIMEOUT_S = 1.0
# Between frames with nothing but changes of bookings.
CHANGE_SPACING_S = 0.01
_HOME_ROUTER_REACHABLE = "HOME"

log = structlog.get_logger()


class RouterClient:
    """Keeps one Session with one of the routers in discovery."""

    unrouted: int
    """Queries that were placed without a router."""

    def __init__(
        self,
        frontend_id: int,
        place_locally: Callable[[Query], Decision | MeshError],
        *,
        has_workers: Callable[[Query], bool] = lambda query: False,
        awaiting: Callable[[], Mapping[str, int]] = dict,
        open_session: OpenRouterSession | None = None,
        rng: Random | None = None,
        stalled_s: Callable[[], float] = never_stalled,
    ) -> None:
        """Begins without routers.

        place_locally: places a query without a router.
        has_workers: returns whether this frontend sees workers for a query.
        awaiting: returns the requests that wait for a worker, and 0 for configured models.
        stalled_s: seconds the event loop has stalled so far; they do not count against a router.
        """
        self._stalled_s = stalled_s
        self._frontend_id = frontend_id
        self._routers: Mapping[int, Instance] = {}
        self._choice = RouterSelector(frontend_id)
        self._place_locally = place_locally
        self._has_workers = has_workers
        self._awaiting = awaiting
        # Of this session; unsent: None if the router has the last one.
        self._last_awaiting: Mapping[str, int] = {}
        self._unsent_awaiting: Mapping[str, int] | None = None
        self._open_session = open_session or grpc_session_opener()
        self._rng = rng or Random()
        self._loop = asyncio.get_running_loop()
        self._writer = FrameWriter(self._next_frame)
        self._monitor = RouterMonitor(self._now())
        self._silence = SilenceWatch(
            SESSION.limit_s,
            "message from the router",
            clock=self._loop.time,
            stalled_s=stalled_s,
        )
        self._held_bookings = HeldBookings(frontend_id, self._loop.time, self._on_booking_change)
        self._last_frame_at = 0.0
        self._generation = 0  # of the session, see SessionHello
        self._last_query_id = 0
        self._session_router_id: int | None = None
        self._waiting: dict[int, PendingPlacement] = {}
        self._query_ids: dict[PlacementKey, int] = {}
        self._unsent_queries: list[int] = []
        # What the next frames consist of, beside the queries.
        self._is_hello_due = self._is_heartbeat_due = self._has_changes = False
        self.unrouted = 0

    @property
    def is_connected(self) -> bool:
        return self._monitor.is_connected

    @property
    def has_routers(self) -> bool:
        """Whether discovery shows a router."""
        return bool(self._routers)

    @property
    def session_router_id(self) -> int | None:
        """The router of the present session, or None."""
        return self._session_router_id if self.is_connected else None

    async def is_reachable(self, router: Instance) -> bool:
        """Returns whether a router accepts a session; the present session continues meanwhile."""
        if self._session_router_id == router.id:
            return self.is_connected  # else the session with it is being opened
        hello = router_pb2.SessionHello(frontend_id=self._frontend_id)
        try:
            async with asyncio.timeout(HOME_PROBE_TIMEOUT_S), self._open_session(router) as session:
                await session.write(router_pb2.SessionRequest(hello=hello))
                frame = await session.read()
                return frame is not None and frame.hello_ack.router_id == router.id
        except (MeshError, TimeoutError):
            return False

    def on_snapshot(self, snapshot: Snapshot, _: SnapshotDiff) -> None:
        """Takes the routers and frontends in discovery."""
        self._routers = {router.id: router for router in snapshot.of("router")}
        frontends = (frontend.id for frontend in snapshot.of("frontend"))
        self._choice.update(frontends, self._routers)

    def place(
        self, key: PlacementKey, request: PlacementRequest, callback: PlacementCallback
    ) -> None:
        """Requests a placement, booked under `key`. Calls `callback` once, never from here."""
        if len(self._waiting) >= PENDING_PLACEMENTS_MAX:
            limit = f"{len(self._waiting)}/{PENDING_PLACEMENTS_MAX}"
            error = Overloaded(1.0, f"too many requests wait for the router: {limit}")
            self._loop.call_soon(callback, error)
            return
        self._last_query_id += 1
        self._waiting[self._last_query_id] = PendingPlacement(key, request, callback, self._now())
        self._query_ids[key] = self._last_query_id
        self._send_query(self._last_query_id)

    def prefill_done(self, key: PlacementKey) -> None:
        self._held_bookings.prefill_done(key)

    def output(self, key: PlacementKey, blocks: int, decay_fraction: float | None) -> None:
        self._held_bookings.output(key, blocks, decay_fraction)

    def free(self, key: PlacementKey) -> None:
        """Ends a booking, or a placement that is still pending."""
        query_id = self._query_ids.pop(key, None)
        if query_id is not None:
            del self._waiting[query_id]
        self._held_bookings.free(key)

    async def run(self) -> None:
        """Keeps a Session open until it is cancelled."""
        backoff = Backoff(RECONNECT_MAX_S, RECONNECT_MAX_S, self._rng, jitter=RECONNECT_JITTER)
        async with TaskGroup() as tasks:
            tasks.create_task(self._run_unrouted_placement())
            await keep_connected(self._run_session, backoff, _raise_defect)

    def _send_query(self, query_id: int) -> None:
        if self._held_bookings.is_session_open:  # a new session sends all pending queries
            self._unsent_queries.append(query_id)
            self._writer.wake()

    def _on_booking_change(self) -> None:
        """Changes wait for each other and for the next query, for CHANGE_SPACING_S at most."""
        if not self._has_changes:
            self._has_changes = True
            self._writer.wake_at(max(self._loop.time(), self._last_frame_at + CHANGE_SPACING_S))

    def _choose(self) -> Instance | None:
        chosen = self._choice.choose(self._loop.time())
        return None if chosen is None else self._routers[chosen]

    def _now(self) -> RunningTime:
        return RunningTime(self._loop.time(), self._stalled_s())

    async def _run_session(self) -> bool:
        """Runs a session until it ends; returns whether it ended to return to the home router."""
        router = self._choose()
        if router is None:
            return False
        self._session_router_id = router.id
        self._monitor.session_opening()
        self._silence.restart()
        self._is_hello_due = True
        try:
            async with self._open_session(router) as session, TaskGroup() as tasks:
                tasks.create_task(self._writer.run(session.write))
                tasks.create_task(self._send_heartbeats())
                tasks.create_task(self._return_to_home_router(router))
                await self._read(session, router)
        except MeshError as error:
            if error.reason == _HOME_ROUTER_REACHABLE:
                log.info("router_left", router_id=router.id, reason=str(error))
                return True
            self._choice.mark_failed(router.id, self._loop.time())
            log.warning("router_lost", router_id=router.id, reason=str(error))
        finally:
            self._monitor.is_connected = self._held_bookings.is_session_open = False
        return False

    async def _return_to_home_router(self, router: Instance) -> None:
        while True:
            await asyncio.sleep(HOME_CHECK_INTERVAL_S)
            if (home := self._choose()) is None or home.id == router.id:
                continue
            await asyncio.sleep(HOME_RETURN_JITTER_S * self._rng.random())
            if (home := self._choose()) is None or home.id == router.id:
                continue
            if await self.is_reachable(home):
                text = f"this frontend returns to its home router {home.id}"
                raise Unavailable(text, reason=_HOME_ROUTER_REACHABLE)
            self._choice.mark_failed(home.id, self._loop.time())

    async def _read(self, session: Session, router: Instance) -> None:
        while (frame := await session.read()) is not None:
            self._silence.restart()
            now, is_hello = self._now(), frame.HasField("hello_ack")
            if is_hello:
                self._on_hello_ack(frame.hello_ack, router, now)
            self._monitor.frame_received(now, is_hello=is_hello, has_results=bool(frame.results))
            for result in frame.results:
                self._on_result(result)
            if self._monitor.is_stale:
                self._monitor.left_stale_router_at = self._loop.time()
                raise WorkerLost("the router does not know a model that is served", retryable=True)
        raise WorkerLost("the router closed the session", retryable=True)

    def _on_hello_ack(
        self, hello_ack: router_pb2.SessionHelloAck, router: Instance, now: RunningTime
    ) -> None:
        if hello_ack.router_id != router.id:
            message = f"{router.address} is now the address of router {hello_ack.router_id}"
            raise WorkerLost(message, retryable=True)
        has_wait = hello_ack.HasField("queue_wait_ms")
        self._monitor.hello_received(now, hello_ack.queue_wait_ms / 1000 if has_wait else None)
        self._held_bookings.is_output_tracked = hello_ack.track_output_blocks

    async def _send_heartbeats(self) -> None:
        """Sends heartbeats; raises WorkerLost or Unavailable if the router does not respond.

        PING of HTTP/2 is slower and does not detect a process that hangs.
        """
        while True:
            await asyncio.sleep(SESSION.heartbeat_s)
            self._silence.check()
            self._monitor.check(self._now(), self._waiting.values())
            self._is_heartbeat_due = True
            self._has_changes |= self._held_bookings.is_renewal_due
            self._read_awaiting()
            self._writer.wake()

    def _on_result(self, result: router_pb2.NewResult) -> None:
        pending = self._waiting.get(result.id)
        if pending is None:
            return  # freed meanwhile
        if result.HasField("error"):
            error = error_from_proto(result.error)
            if error.reason == "ASKED_AGAIN":
                return  # the result of the repeated query has the same id
            if is_unknown_model(error) and self._has_workers(pending.request.query):
                at = self._monitor.unknown_reported(
                    pending, self._now(), has_other_router=len(self._routers) > 1, rng=self._rng
                )
                self._loop.call_at(at, self._requery, result.id, self._generation)
                return
            self._remove_pending(result.id, pending)
            pending.callback(error)
            return
        # Read first: if it is invalid, the query stays for the next session.
        decision = dataclass_from_proto(Decision, result.decision)
        decision.router_id = self._session_router_id or 0
        self._remove_pending(result.id, pending)
        if not pending.request.is_query_only:
            self._held_bookings.add(pending.key, pending.request.query, decision)
        pending.callback(decision)

    def _remove_pending(self, query_id: int, pending: PendingPlacement) -> None:
        del self._waiting[query_id]
        if self._query_ids.get(pending.key) == query_id:
            del self._query_ids[pending.key]

    def _requery(self, query_id: int, generation: int) -> None:
        # A later session has sent all queries already.
        if query_id in self._waiting and generation == self._generation:
            self._send_query(query_id)

    def _next_frame(self) -> router_pb2.SessionRequest | None:
        """Returns all that gathered since the last frame as one; None if nothing is due."""
        now = self._loop.time()
        if self._is_hello_due:
            frame = self._first_frame()
        elif self._is_heartbeat_due:
            self._is_heartbeat_due = False
            return router_pb2.SessionRequest()  # The router responds to an empty frame at once.
        elif self._unsent_queries or self._are_changes_due(now):
            frame = router_pb2.SessionRequest()
        else:
            return None
        for query_id in self._unsent_queries:
            pending = self._waiting.get(query_id)
            if pending is not None:
                waited_ms = round((now - pending.request.arrived_at) * 1000)
                new = query_to_proto(query_id, pending.key, pending.request, waited_ms)
                frame.news.append(new)
        self._unsent_queries = []
        self._held_bookings.move_changes_to(frame)
        if (awaiting := self._unsent_awaiting) is not None:
            self._unsent_awaiting = None
            frame.awaiting.SetInParent()
            frame.awaiting.requests.update(awaiting)
        self._has_changes = False
        self._last_frame_at = now
        return frame

    def _read_awaiting(self) -> None:
        """Sends the waiting requests with the next frame if they have changed."""
        counts = self._awaiting()
        models = sorted(counts, key=lambda model: -counts[model])[:AWAITED_MODELS_MAX]
        awaiting = {model: counts[model] for model in models}
        if awaiting != self._last_awaiting:
            self._last_awaiting = self._unsent_awaiting = awaiting
            self._has_changes = True

    def _are_changes_due(self, now: float) -> bool:
        if not self._has_changes:
            return False
        due_at = self._last_frame_at + CHANGE_SPACING_S
        is_due = now > due_at - TIMER_RESOLUTION_S
        if not is_due:
            self._writer.wake_at(due_at)
        return is_due

    def _first_frame(self) -> router_pb2.SessionRequest:
        self._is_hello_due = self._is_heartbeat_due = False
        self._generation += 1
        self._last_awaiting, self._unsent_awaiting = {}, None
        self._read_awaiting()
        self._unsent_queries = list(self._waiting)
        for pending in self._waiting.values():
            if pending.requery_at is not None:
                pending.requery_at = self._now()
        return router_pb2.SessionRequest(
            hello=router_pb2.SessionHello(
                frontend_id=self._frontend_id, generation=self._generation
            ),
            announced=self._held_bookings.begin_session(),
        )

    async def _run_unrouted_placement(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for query_id in self._monitor.overdue(self._waiting, self._now()):
                pending = self._waiting.get(query_id)
                if pending is None:
                    continue  # freed by an earlier callback
                self._remove_pending(query_id, pending)
                self.unrouted += 1
                # A router may have booked, or may still book, another placement for it.
                self._held_bookings.free(pending.key)
                pending.callback(self._place_locally(pending.request.query))


def _raise_defect(error: Exception, _: float) -> NoReturn:
    """Ends the process: a session handles the errors of its router itself."""
    raise error
