"""The frontend's end of the router's Session: placements, batched per loop tick, failing over.

Frontends share themselves out over the routers (`core/router_choice.py`). One that had to go to
another router than its home goes back once that answers, each after a random while.

What no router has attended to for UNROUTED_AFTER_S, the frontend places by itself, by power of two
on its own requests in flight (counted as unrouted). To attend is to answer. A router with a queue
may keep a question there: then it attends by a sign of life, but not by its greeting alone, for a
router that dies of a question greets as well. Nor does one that denies what this frontend sees: who
knows nobody of a model whose workers are there is asked again, then another router is.
Bookings that live are announced to whatever router comes next, so that its books are right.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple, Protocol, TypeVar

import grpc.aio
import structlog

from common.errors import MeshError, Overloaded, Unavailable, UnknownModel, WorkerLost
from common.kv.hashing import ChainState, PrefixHasher, hashes_to_bytes
from common.registry.instances import Instance
from common.request.preprocessed import BootstrapInfo, RouterConfigOverride, RoutingHints, TokenIds
from common.rpc import channel as rpc
from common.runtime.tasks import TaskGroup
from common.wire.errors import error_from_proto
from common.wire.preprocessed import dataclass_from_proto, dataclass_to_proto
from frontend_svc.core.peers.router_choice import AVOID_FAILED_ROUTER_S, RouterSelector
from frontend_svc.core.peers.stall_clock import never_stalled
from frontend_svc.core.request.types import Placement, RoutingDecision
from kvmesh.router.v1 import router_pb2, router_pb2_grpc

UNROUTED_AFTER_S = 3.0
PENDING_PLACEMENTS_MAX = 8192
TICK_S = 0.1
# Before dialling again, at least and at most: at random, so that the frontends of a router that
# died do not stampede the others.
RECONNECT_MIN_S = 0.02
RECONNECT_MAX_S = 0.2
# A frontend whose home is another router goes there within this, at random; that one has HOME_S
# to show that it answers.
HOME_RETURN_JITTER_S = 1.0
HOME_PROBE_TIMEOUT_S = 1.0
# A router is asked for a sign of life this often; one that gave none for SILENT_AFTER_S is lost.
# Below UNROUTED_AFTER_S, so that a router which hangs is no worse than one that is gone.
PING_INTERVAL_S = 0.5
SILENCE_TIMEOUT_S = 2.0
# A session has so long to attend to what it was begun with; with a sign of life, at the latest.
SESSION_SETTLE_S = 1.0
# A router that denies what is there learns of it soon, or else another one is asked. Where there is
# none it is asked now and then, at random: a long prompt is long each time.
REQUERY_DELAY_S = 0.1
STALE_ROUTER_AFTER_S = 0.5
REQUERY_DELAY_MAX_S = 1.0
# A booking is announced again this often, for a router forgets those that nobody speaks of.
RENEW_INTERVAL_S = 100.0
_HOME_ROUTER_REACHABLE = "HOME"
# The router's word for an adapter that no worker has.
UNKNOWN_ADAPTER = "UNKNOWN_ADAPTER"
# What a router says that has not seen those who could serve a request.
_UNKNOWN_MODEL_REASONS = frozenset({UnknownModel.kind, UNKNOWN_ADAPTER, "FLEET_UNKNOWN"})
# Where the chain of prefix hashes begins.
ROOT_CHAIN = ChainState(0, 0)

log = structlog.get_logger()

T = TypeVar("T")
PlacementKey = tuple[str, int]
PlacementCallback = Callable[[RoutingDecision | MeshError], None]


class Session(Protocol):
    """One open Session, as messages."""

    async def read(self) -> router_pb2.SessionResponse | None:
        """The next frame; None at the end of the stream. Raises MeshError when it failed."""

    async def write(self, frame: router_pb2.SessionRequest) -> None:
        """Sends a frame; returns when the next one can be taken. Raises MeshError."""


# Opens a Session with a router; leaving the context ends it.
OpenRouterSession = Callable[[Instance], AbstractAsyncContextManager[Session]]


class _GrpcSession:
    """A Session over gRPC."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[router_pb2.SessionRequest, router_pb2.SessionResponse],
    ) -> None:
        self._call = call

    async def read(self) -> router_pb2.SessionResponse | None:
        """See Session."""
        return await rpc.read(self._call)

    async def write(self, frame: router_pb2.SessionRequest) -> None:
        """See Session."""
        try:
            await self._call.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise WorkerLost("the session has ended", retryable=True) from error


def grpc_session_opener(security: rpc.Security = rpc.PLAINTEXT) -> OpenRouterSession:
    """Sessions over gRPC. The channel belongs to the session and dies with it."""

    @asynccontextmanager
    async def open_session(router: Instance) -> AsyncIterator[Session]:
        channel = rpc.channel(router.address, security=security)
        stub = router_pb2_grpc.RouterServiceStub(channel)
        try:
            call = stub.Session(metadata=rpc.call_metadata(security))
            async with rpc.cancelling(call):
                yield _GrpcSession(call)
        finally:
            await channel.close()

    return open_session


@dataclass(frozen=True, slots=True)
class Query:
    """What to place; see `router.v1.Query`. arrived_at: loop time, seconds.

    hasher: what makes its prefix hashes; None: a prompt that grows gets no further ones. chain:
    where those that it has end.
    """

    model: str
    total_tokens: int
    arrived_at: float
    prefix_hashes: bytes = b""
    hash_scheme: int = 0
    block_size: int = 0
    routing: RoutingHints | None = None
    config_override: RouterConfigOverride | None = None
    excluded: frozenset[int] = frozenset()
    expected_output_tokens: int | None = None
    traceparent: str = ""
    strict_priority: int = 0
    hasher: PrefixHasher | None = None
    chain: ChainState = ROOT_CHAIN

    def extended(self, token_ids: TokenIds, count: int) -> Query:
        """The same with a longer prompt: token_ids, of which the last `count` are new.

        What is new was expected as output before. Only blocks that have no hash yet are hashed.
        """
        expected = self.expected_output_tokens
        extended = replace(
            self,
            total_tokens=self.total_tokens + count,
            expected_output_tokens=None if expected is None else max(0, expected - count),
        )
        if self.hasher is None:
            return extended
        hashed_tokens = self.chain.position * self.hasher.block_size
        hashes, chained_hashes = self.hasher.extend(self.chain, token_ids.array[hashed_tokens:])
        if not len(chained_hashes):
            return extended
        return replace(
            extended,
            prefix_hashes=self.prefix_hashes + hashes_to_bytes(hashes),
            chain=ChainState(self.chain.position + len(chained_hashes), int(chained_hashes[-1])),
        )

    def excluding(self, excluded: frozenset[int]) -> Query:
        """The same, not to be placed on `excluded`."""
        return replace(self, excluded=excluded)


@dataclass(slots=True)
class _UnsentOutput:
    """Growth of an answer that the router was not told of yet."""

    blocks: int = 0
    decay_fraction: float | None = None


class _LoopTime(NamedTuple):
    """Loop time, and how long the loop had stood still by then."""

    at: float
    stalled_before_s: float

    def since(self, earlier: _LoopTime) -> float:
        """Seconds that the loop ran since then."""
        return self.at - earlier.at - (self.stalled_before_s - earlier.stalled_before_s)


@dataclass(slots=True)
class _PendingPlacement:
    """since: when it came. denied_since, again_at: since when routers deny what could serve it, and
    when one is, or was, asked again after that.
    """

    key: PlacementKey
    query: Query
    callback: PlacementCallback
    since: _LoopTime
    unknown_since: _LoopTime | None = None
    requery_at: _LoopTime | None = None

    def is_reported_unknown(self, now: _LoopTime) -> bool:
        """Whether it still is: one that was asked again and not answered at once waits there."""
        return self.requery_at is not None and now.since(self.requery_at) < SESSION_SETTLE_S


class RouterClient:
    """One Session at a time with one of the routers in discovery.

    routers, frontends: who is there now. place_alone: chooses without a router. sees: whether this
    frontend knows workers that a query asks for. open_session: how to reach a router; by default
    over gRPC. lost_s: how long the loop has stood still so far, which is held against no router,
    see `core/patience.py`.
    """

    def __init__(
        self,
        frontend_id: int,
        routers: Callable[[], Sequence[Instance]],
        place_locally: Callable[[Query], RoutingDecision | MeshError],
        *,
        frontends: Callable[[], Sequence[Instance]] = tuple,
        has_workers: Callable[[Query], bool] = lambda query: False,
        open_session: OpenRouterSession | None = None,
        rng: Random | None = None,
        stalled_s: Callable[[], float] = never_stalled,
    ) -> None:
        self._stalled_s = stalled_s
        self._frontend_id = frontend_id
        self._routers = routers
        self._frontends = frontends
        self._choice = RouterSelector(frontend_id)
        self._place_locally = place_locally
        self._has_workers = has_workers
        self._open_session = open_session or grpc_session_opener()
        self._rng = rng or Random()
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._generation = 0  # Of the session, see SessionHello.
        self._last_query_id = 0
        self._waiting: dict[int, _PendingPlacement] = {}
        self._query_ids: dict[PlacementKey, int] = {}
        self._unsent_queries: list[int] = []
        self._unsent_prefills_done: list[PlacementKey] = []
        self._unsent_outputs: dict[PlacementKey, _UnsentOutput] = {}
        self._unsent_frees: list[PlacementKey] = []
        # Whether what is told to the router is kept for it: the next session begins with the whole
        # state, so without one these lists would only grow.
        self._is_session_open = False
        self._held_bookings: dict[PlacementKey, router_pb2.Booking] = {}
        # When each was last spoken of; longest ago first.
        self._renewed_at: dict[PlacementKey, float] = {}
        self._is_output_tracked = False  # Whether the router wants to hear of output.
        self._mark_received()
        # When a router last attended to what it may keep in its queue.
        self._last_responsive_at = self._last_received_at
        self._session_opened_at = self._last_received_at
        self._queue_wait_s: float | None = None  # Of the router; None: not told.
        self._is_router_stale = False  # Whether the router denied something for too long.
        self._left_stale_router_at = -math.inf
        self._is_ping_due = False  # Whether the router is to be asked for a sign of life.
        self.is_connected = False
        self.unrouted = 0

    def place(self, key: PlacementKey, query: Query, callback: PlacementCallback) -> None:
        """Asks for a placement, booked under `key`. `callback` is called once, never from here."""
        if len(self._waiting) >= PENDING_PLACEMENTS_MAX:
            error = Overloaded(1.0, "too many requests wait for the router")
            self._loop.call_soon(callback, error)
            return
        self._last_query_id += 1
        self._waiting[self._last_query_id] = _PendingPlacement(key, query, callback, self._now())
        self._query_ids[key] = self._last_query_id
        self._enqueue(self._unsent_queries, self._last_query_id)

    def prefill_done(self, key: PlacementKey) -> None:
        """The first token is there."""
        booking = self._held_bookings.get(key)
        if booking is not None:
            booking.prefill_tokens = 0
            booking.revision += 1
            self._enqueue(self._unsent_prefills_done, key)

    def output(self, key: PlacementKey, blocks: int, decay_fraction: float | None) -> None:
        """The answer grew by so many blocks; of no effect where the router does not track output.

        decay_fraction: share of the expected output still to come, 0..1; None: unknown.
        """
        booking = self._held_bookings.get(key)
        if booking is None or not self._is_output_tracked:
            return
        booking.decode_blocks += blocks
        if decay_fraction is not None:
            booking.decay_fraction = decay_fraction
        unsent_output = self._unsent_outputs.get(key)
        if unsent_output is None:
            unsent_output = self._unsent_outputs[key] = _UnsentOutput()
            booking.revision += 1  # By one a word, and what is unsent is one word.
        unsent_output.blocks += blocks
        unsent_output.decay_fraction = (
            decay_fraction if decay_fraction is not None else unsent_output.decay_fraction
        )
        self._wake.set()

    def free(self, key: PlacementKey) -> None:
        """The booking holds nothing any more; also right while its placement is still open."""
        self._held_bookings.pop(key, None)
        self._renewed_at.pop(key, None)
        self._unsent_outputs.pop(key, None)
        query_id = self._query_ids.pop(key, None)
        if query_id is not None:
            del self._waiting[query_id]
        self._enqueue(self._unsent_frees, key)

    def _enqueue(self, outbox: list[T], item: T) -> None:
        if self._is_session_open:
            outbox.append(item)
            self._wake.set()

    async def run(self) -> None:
        """Keeps a Session open for as long as the frontend lives."""
        async with TaskGroup() as tasks:
            tasks.create_task(self._run_unrouted_placement())
            while True:
                router = self._choose()
                if router is None or not await self._run_session(router):
                    await asyncio.sleep(self._rng.uniform(RECONNECT_MIN_S, RECONNECT_MAX_S))

    def _choose(self) -> Instance | None:
        """The router to ask now, if there is any."""
        routers = {router.id: router for router in self._routers()}
        frontends = [frontend.id for frontend in self._frontends()]
        chosen = self._choice.choose(frontends, routers, self._loop.time())
        return None if chosen is None else routers[chosen]

    def _now(self) -> _LoopTime:
        return _LoopTime(self._loop.time(), self._stalled_s())

    def _elapsed_s(self, since: _LoopTime) -> float:
        """Seconds since then that are to be held against others."""
        return self._now().since(since)

    def _mark_received(self) -> None:
        self._last_received_at = self._now()

    async def _run_session(self, router: Instance) -> bool:
        """A session until it ends; whether that is because another router is to be asked."""
        self._mark_received()
        try:
            async with self._open_session(router) as session, TaskGroup() as tasks:
                tasks.create_task(self._write(session))
                tasks.create_task(self._ping())
                tasks.create_task(self._return_to_home_router(router))
                await self._read(session, router)
        except MeshError as error:
            if error.reason == _HOME_ROUTER_REACHABLE:
                log.info("router_left", router_id=router.id, why=str(error))
                return True
            self._choice.mark_failed(router.id, self._loop.time())
            log.warning("router_lost", router_id=router.id, why=str(error))
        finally:
            self.is_connected = self._is_session_open = False
        return False

    async def _return_to_home_router(self, router: Instance) -> None:
        """Ends the session when another router is to be asked, and answers."""
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            if (home := self._choose()) is None or home.id == router.id:
                continue
            await asyncio.sleep(HOME_RETURN_JITTER_S * self._rng.random())
            if (home := self._choose()) is None or home.id == router.id:
                continue
            if await self._is_reachable(home):
                raise Unavailable(
                    f"router {home.id} is this frontend's home", reason=_HOME_ROUTER_REACHABLE
                )
            self._choice.mark_failed(home.id, self._loop.time())

    async def _is_reachable(self, router: Instance) -> bool:
        """Whether a session with that router could be had now; this one goes on meanwhile."""
        hello = router_pb2.SessionHello(frontend_id=self._frontend_id)
        try:
            async with asyncio.timeout(HOME_PROBE_TIMEOUT_S), self._open_session(router) as session:
                await session.write(router_pb2.SessionRequest(hello=hello))
                frame = await session.read()
                return frame is not None and frame.hello_ack.router_id == router.id
        except (MeshError, TimeoutError):
            return False

    async def _read(self, session: Session, router: Instance) -> None:
        self._is_router_stale = False
        while (frame := await session.read()) is not None:
            self._mark_received()
            if frame.HasField("hello_ack"):
                self._on_hello_ack(frame.hello_ack, router)
            if self._queue_wait_s != 0 and (frame.results or not frame.HasField("hello_ack")):
                self._last_responsive_at = self._last_received_at
            for result in frame.results:
                self._on_result(result)
            if self._is_router_stale:
                self._left_stale_router_at = self._loop.time()
                raise WorkerLost(
                    "the router knows nobody of a model that is served", retryable=True
                )
        raise WorkerLost("the router closed the session", retryable=True)

    def _on_hello_ack(self, hello_ack: router_pb2.SessionHelloAck, router: Instance) -> None:
        if hello_ack.router_id != router.id:
            why = f"at {router.address} there is router {hello_ack.router_id} now"
            raise WorkerLost(why, retryable=True)
        self.is_connected, self._session_opened_at = True, self._last_received_at
        self._is_output_tracked = hello_ack.track_output_blocks
        has_queue_wait = hello_ack.HasField("queue_wait_ms")
        self._queue_wait_s = hello_ack.queue_wait_ms / 1000 if has_queue_wait else None

    async def _ping(self) -> None:
        """An empty frame asks for an empty one. Keepalive is slower, and sees no hung process.

        Only an empty one does: a router has nothing to answer to frames of output and frees.
        """
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            silent_s = self._elapsed_s(self._last_received_at)
            if silent_s > SILENCE_TIMEOUT_S:
                raise WorkerLost(f"the router said nothing for {silent_s:.1f} s", retryable=True)
            self._check_response_time()
            self._is_ping_due = True
            self._wake.set()

    def _check_response_time(self) -> None:
        """Raises WorkerLost when a question is open for longer than the router says it may be."""
        if self._queue_wait_s is None or not self.is_connected:
            return
        now = self._now()
        pending = next((w for w in self._waiting.values() if not w.is_reported_unknown(now)), None)
        if pending is not None:
            sent = max(pending.since, pending.requery_at or pending.since)
            pending_s = self._elapsed_s(max(sent, self._session_opened_at))
            if pending_s > self._queue_wait_s + SILENCE_TIMEOUT_S:
                raise WorkerLost(
                    f"the router left a question open for {pending_s:.1f} s", retryable=True
                )

    def _on_result(self, result: router_pb2.NewResult) -> None:
        pending = self._waiting.get(result.id)
        if pending is None:
            return  # freed meanwhile
        if result.HasField("error"):
            error = error_from_proto(result.error)
            if error.reason == "ASKED_AGAIN":
                return  # The answer to that comes under the same number.
            if error.reason in _UNKNOWN_MODEL_REASONS and self._has_workers(pending.query):
                self._on_unknown_model(result.id, pending)
                return
            self._remove_pending(result.id, pending)
            pending.callback(error)
            return
        self._remove_pending(result.id, pending)
        decision = result.decision
        self._held_bookings[pending.key] = self._make_booking(pending, decision)
        self._renewed_at[pending.key] = self._loop.time()
        pending.callback(_to_placed(decision))

    def _remove_pending(self, query_id: int, pending: _PendingPlacement) -> None:
        del self._waiting[query_id]
        if self._query_ids.get(pending.key) == query_id:
            del self._query_ids[pending.key]

    def _on_unknown_model(self, query_id: int, pending: _PendingPlacement) -> None:
        """The router has not seen what we see: it may any moment, or another one has."""
        now = self._now()
        if pending.unknown_since is None or not pending.is_reported_unknown(now):
            pending.unknown_since = now
        is_router_stale = now.since(pending.unknown_since) >= STALE_ROUTER_AFTER_S
        # Not from one to the other all the time: neither may ever see it.
        may_leave = now.at - self._left_stale_router_at >= AVOID_FAILED_ROUTER_S
        if is_router_stale and may_leave and len(self._routers()) > 1:
            self._is_router_stale = True
        delay_s = (
            REQUERY_DELAY_MAX_S * self._rng.uniform(0.5, 1.0)
            if is_router_stale
            else REQUERY_DELAY_S
        )
        pending.requery_at = now._replace(at=now.at + delay_s)
        self._loop.call_at(pending.requery_at.at, self._requery, query_id, self._generation)

    def _requery(self, query_id: int, generation: int) -> None:
        # Another session began with all questions.
        if query_id in self._waiting and generation == self._generation:
            self._enqueue(self._unsent_queries, query_id)

    def _make_booking(
        self, pending: _PendingPlacement, decision: router_pb2.Decision
    ) -> router_pb2.Booking:
        routing, session_revision = pending.query.routing, decision.session_revision
        session, lora_name = None, None
        if routing is not None and session_revision:
            session, lora_name = routing.session_control, routing.lora_name
        return router_pb2.Booking(
            key=_to_booking_key(pending.key),
            frontend_id=self._frontend_id,
            model=pending.query.model,
            worker=decision.worker,
            prefill=decision.prefill if decision.HasField("prefill") else None,
            prefill_tokens=decision.charged_prefill_tokens,
            decode_blocks=decision.charged_decode_blocks,
            revision=1,
            session_id="" if session is None else session.session_id,
            session_revision=session_revision,
            lora_name=lora_name or "",
        )

    async def _write(self, session: Session) -> None:
        """The one writer: what gathered since the last write goes out as one frame."""
        self._unsent_queries, self._unsent_prefills_done, self._unsent_frees = (
            list(self._waiting),
            [],
            [],
        )
        for sent in self._waiting.values():
            if sent.requery_at is not None:
                sent.requery_at = self._now()
        self._unsent_outputs.clear()
        self._renewed_at = dict.fromkeys(self._held_bookings, self._loop.time())
        self._is_session_open = True
        self._generation += 1
        frame = router_pb2.SessionRequest(
            hello=router_pb2.SessionHello(
                frontend_id=self._frontend_id, generation=self._generation
            ),
            announced=self._held_bookings.values(),
        )
        while True:
            for query_id in self._unsent_queries:
                pending = self._waiting.get(query_id)
                if pending is not None:
                    frame.news.append(self._to_new_message(query_id, pending))
            frame.announced.extend(self._take_due_renewals())
            frame.prefills_done.extend(map(_to_booking_key, self._unsent_prefills_done))
            frame.outputs.extend(map(_to_output_blocks, self._unsent_outputs.items()))
            self._unsent_outputs.clear()
            frame.frees.extend(map(_to_booking_key, self._unsent_frees))
            self._unsent_queries, self._unsent_prefills_done, self._unsent_frees = [], [], []
            await session.write(frame)
            if self._is_ping_due:
                self._is_ping_due = False
                if frame.ListFields():
                    await session.write(router_pb2.SessionRequest())
            await self._wake.wait()
            self._wake.clear()
            frame = router_pb2.SessionRequest()

    def _take_due_renewals(self) -> list[router_pb2.Booking]:
        """Bookings to be announced again, with all that is not sent yet of their output."""
        now = self._loop.time()
        due: list[PlacementKey] = []
        for key, at in self._renewed_at.items():
            if now - at < RENEW_INTERVAL_S:
                break
            due.append(key)
        for key in due:
            del self._renewed_at[key]
            self._renewed_at[key] = now
            self._unsent_outputs.pop(key, None)
        return [self._held_bookings[key] for key in due]

    def _to_new_message(self, query_id: int, pending: _PendingPlacement) -> router_pb2.New:
        query = pending.query
        message = router_pb2.Query(
            model=query.model,
            total_tokens=query.total_tokens,
            prefix_hashes=query.prefix_hashes,
            hash_scheme=query.hash_scheme,
            block_size=query.block_size,
            excluded_worker_ids=query.excluded,
            waited_ms=round((self._loop.time() - query.arrived_at) * 1000),
            expected_output_tokens=query.expected_output_tokens,
            strict_priority=query.strict_priority,
        )
        if query.routing is not None:
            dataclass_to_proto(query.routing, message.routing)
        if query.config_override is not None:
            dataclass_to_proto(query.config_override, message.config_override)
        return router_pb2.New(
            id=query_id,
            key=_to_booking_key(pending.key),
            query=message,
            traceparent=query.traceparent,
        )

    async def _run_unrouted_placement(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for query_id in self._overdue_query_ids():
                pending = self._waiting.get(query_id)
                if pending is None:
                    continue  # freed by who was answered just before
                self._remove_pending(query_id, pending)
                self.unrouted += 1
                # The router may have been asked: what it books now is not what happens.
                self._enqueue(self._unsent_frees, pending.key)
                pending.callback(self._place_locally(pending.query))

    def _overdue_query_ids(self) -> list[int]:
        """The questions that no router has attended to for too long."""
        now = self._now()
        is_settling = self.is_connected and now.since(self._session_opened_at) < SESSION_SETTLE_S
        return [
            query_id
            for query_id, pending in self._waiting.items()
            if now.since(self._unresponsive_since(pending, now)) >= UNROUTED_AFTER_S
            and not (is_settling and not pending.is_reported_unknown(now))
        ]

    def _unresponsive_since(self, pending: _PendingPlacement, now: _LoopTime) -> _LoopTime:
        if pending.unknown_since is not None and pending.is_reported_unknown(now):
            return pending.unknown_since
        return max(pending.since, self._last_responsive_at, pending.requery_at or pending.since)


def _to_output_blocks(extended: tuple[PlacementKey, _UnsentOutput]) -> router_pb2.OutputBlocks:
    key, output = extended
    return router_pb2.OutputBlocks(
        key=_to_booking_key(key), blocks=output.blocks, decay_fraction=output.decay_fraction
    )


def _to_booking_key(key: PlacementKey) -> router_pb2.BookingKey:
    return router_pb2.BookingKey(request_id=key[0], attempt=key[1])


def _to_placed(decision: router_pb2.Decision) -> RoutingDecision:
    has = decision.HasField
    prefill = decision.prefill
    return RoutingDecision(
        worker_id=decision.worker.worker_id,
        dp_rank=decision.worker.dp_rank,
        overlap_blocks=decision.overlap_blocks,
        predicted_cached_tokens=decision.predicted_cached_tokens,
        reasons=tuple(decision.reasons),
        prefill=(
            Placement(prefill.worker_id, prefill.dp_rank, decision.prefill_address)
            if has("prefill")
            else None
        ),
        bootstrap=(
            dataclass_from_proto(BootstrapInfo, decision.bootstrap) if has("bootstrap") else None
        ),
        address=decision.worker_address,
    )
