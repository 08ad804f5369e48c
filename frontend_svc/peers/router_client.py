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
from common.wire.preprocessed import part_from_proto, part_to_proto
from frontend_svc.core.peers.router_choice import AVOID_S, RouterChoice
from frontend_svc.core.peers.stall_clock import never_late
from frontend_svc.core.request.machine import Place, Placed
from kvmesh.router.v1 import router_pb2, router_pb2_grpc

UNROUTED_AFTER_S = 3.0
WAITING_MAX = 8192
TICK_S = 0.1
# Before dialling again, at least and at most: at random, so that the frontends of a router that
# died do not stampede the others.
REDIAL_MIN_S = 0.02
REDIAL_S = 0.2
# A frontend whose home is another router goes there within this, at random; that one has HOME_S
# to show that it answers.
MOVE_S = 1.0
HOME_S = 1.0
# A router is asked for a sign of life this often; one that gave none for SILENT_AFTER_S is lost.
# Below UNROUTED_AFTER_S, so that a router which hangs is no worse than one that is gone.
PING_S = 0.5
SILENT_AFTER_S = 2.0
# A session has so long to attend to what it was begun with; with a sign of life, at the latest.
SETTLE_S = 1.0
# A router that denies what is there learns of it soon, or else another one is asked. Where there is
# none it is asked now and then, at random: a long prompt is long each time.
ASK_AGAIN_S = 0.1
DENIED_S = 0.5
ASK_AGAIN_MAX_S = 1.0
# A booking is announced again this often, for a router forgets those that nobody speaks of.
RENEW_S = 100.0
_HOME = "HOME"
# The router's word for an adapter that no worker has.
UNKNOWN_ADAPTER = "UNKNOWN_ADAPTER"
# What a router says that has not seen those who could serve a request.
_DENIALS = frozenset({UnknownModel.kind, UNKNOWN_ADAPTER, "FLEET_UNKNOWN"})
# Where the chain of prefix hashes begins.
ROOT = ChainState(0, 0)

log = structlog.get_logger()

T = TypeVar("T")
Key = tuple[str, int]
Answer = Callable[[Placed | MeshError], None]


class Session(Protocol):
    """One open Session, as messages."""

    async def read(self) -> router_pb2.SessionResponse | None:
        """The next frame; None at the end of the stream. Raises MeshError when it failed."""

    async def write(self, frame: router_pb2.SessionRequest) -> None:
        """Sends a frame; returns when the next one can be taken. Raises MeshError."""


# Opens a Session with a router; leaving the context ends it.
OpenSession = Callable[[Instance], AbstractAsyncContextManager[Session]]


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


def grpc_sessions(security: rpc.Security = rpc.PLAINTEXT) -> OpenSession:
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
    chain: ChainState = ROOT

    def grown(self, token_ids: TokenIds, count: int) -> Query:
        """The same with a longer prompt: token_ids, of which the last `count` are new.

        What is new was expected as output before. Only blocks that have no hash yet are hashed.
        """
        expected = self.expected_output_tokens
        grown = replace(
            self,
            total_tokens=self.total_tokens + count,
            expected_output_tokens=None if expected is None else max(0, expected - count),
        )
        if self.hasher is None:
            return grown
        hashed = self.chain.position * self.hasher.block_size
        hashes, sums = self.hasher.extend(self.chain, token_ids.array[hashed:])
        if not len(sums):
            return grown
        return replace(
            grown,
            prefix_hashes=self.prefix_hashes + hashes_to_bytes(hashes),
            chain=ChainState(self.chain.position + len(sums), int(sums[-1])),
        )

    def without(self, excluded: frozenset[int]) -> Query:
        """The same, not to be placed on `excluded`."""
        return replace(self, excluded=excluded)


@dataclass(slots=True)
class _Output:
    """Growth of an answer that the router was not told of yet."""

    blocks: int = 0
    decay_fraction: float | None = None


class _Moment(NamedTuple):
    """Loop time, and how long the loop had stood still by then."""

    at: float
    lost_before: float

    def since(self, earlier: _Moment) -> float:
        """Seconds that the loop ran since then."""
        return self.at - earlier.at - (self.lost_before - earlier.lost_before)


@dataclass(slots=True)
class _Waiting:
    """since: when it came. denied_since, again_at: since when routers deny what could serve it, and
    when one is, or was, asked again after that.
    """

    key: Key
    query: Query
    answer: Answer
    since: _Moment
    denied_since: _Moment | None = None
    again_at: _Moment | None = None

    def is_denied(self, now: _Moment) -> bool:
        """Whether it still is: one that was asked again and not answered at once waits there."""
        return self.again_at is not None and now.since(self.again_at) < SETTLE_S


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
        place_alone: Callable[[Query], Placed | MeshError],
        *,
        frontends: Callable[[], Sequence[Instance]] = tuple,
        sees: Callable[[Query], bool] = lambda query: False,
        open_session: OpenSession | None = None,
        rng: Random | None = None,
        lost_s: Callable[[], float] = never_late,
    ) -> None:
        self._lost_s = lost_s
        self._frontend_id = frontend_id
        self._routers = routers
        self._frontends = frontends
        self._choice = RouterChoice(frontend_id)
        self._place_alone = place_alone
        self._sees = sees
        self._open_session = open_session or grpc_sessions()
        self._rng = rng or Random()
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._generation = 0  # Of the session, see SessionHello.
        self._last_id = 0
        self._waiting: dict[int, _Waiting] = {}
        self._numbers: dict[Key, int] = {}
        self._news: list[int] = []
        self._prefills_done: list[Key] = []
        self._outputs: dict[Key, _Output] = {}
        self._frees: list[Key] = []
        # Whether what is told to the router is kept for it: the next session begins with the whole
        # state, so without one these lists would only grow.
        self._is_told = False
        self._bookings: dict[Key, router_pb2.Booking] = {}
        # When each was last spoken of; longest ago first.
        self._renewed: dict[Key, float] = {}
        self._tracks_output = False  # Whether the router wants to hear of output.
        self._heard()
        # When a router last attended to what it may keep in its queue.
        self._attended = self._heard_last
        self._session_since = self._heard_last
        self._queue_wait_s: float | None = None  # Of the router; None: not told.
        self._is_denied = False  # Whether the router denied something for too long.
        self._left_denied_at = -math.inf
        self._is_sign_due = False  # Whether the router is to be asked for a sign of life.
        self.is_connected = False
        self.unrouted = 0

    def place(self, key: Key, query: Query, answer: Answer) -> None:
        """Asks for a placement, booked under `key`. `answer` is called once, never from here."""
        if len(self._waiting) >= WAITING_MAX:
            error = Overloaded(1.0, "too many requests wait for the router")
            self._loop.call_soon(answer, error)
            return
        self._last_id += 1
        self._waiting[self._last_id] = _Waiting(key, query, answer, self._now())
        self._numbers[key] = self._last_id
        self._tell(self._news, self._last_id)

    def prefill_done(self, key: Key) -> None:
        """The first token is there."""
        booking = self._bookings.get(key)
        if booking is not None:
            booking.prefill_tokens = 0
            booking.revision += 1
            self._tell(self._prefills_done, key)

    def output(self, key: Key, blocks: int, decay_fraction: float | None) -> None:
        """The answer grew by so many blocks; of no effect where the router does not track output.

        decay_fraction: share of the expected output still to come, 0..1; None: unknown.
        """
        booking = self._bookings.get(key)
        if booking is None or not self._tracks_output:
            return
        booking.decode_blocks += blocks
        if decay_fraction is not None:
            booking.decay_fraction = decay_fraction
        unsent = self._outputs.get(key)
        if unsent is None:
            unsent = self._outputs[key] = _Output()
            booking.revision += 1  # By one a word, and what is unsent is one word.
        unsent.blocks += blocks
        unsent.decay_fraction = (
            decay_fraction if decay_fraction is not None else unsent.decay_fraction
        )
        self._wake.set()

    def free(self, key: Key) -> None:
        """The booking holds nothing any more; also right while its placement is still open."""
        self._bookings.pop(key, None)
        self._renewed.pop(key, None)
        self._outputs.pop(key, None)
        number = self._numbers.pop(key, None)
        if number is not None:
            del self._waiting[number]
        self._tell(self._frees, key)

    def _tell(self, outbox: list[T], what: T) -> None:
        if self._is_told:
            outbox.append(what)
            self._wake.set()

    async def run(self) -> None:
        """Keeps a Session open for as long as the frontend lives."""
        async with TaskGroup() as tasks:
            tasks.create_task(self._place_unrouted())
            while True:
                router = self._choose()
                if router is None or not await self._serve(router):
                    await asyncio.sleep(self._rng.uniform(REDIAL_MIN_S, REDIAL_S))

    def _choose(self) -> Instance | None:
        """The router to ask now, if there is any."""
        routers = {router.id: router for router in self._routers()}
        frontends = [frontend.id for frontend in self._frontends()]
        chosen = self._choice.choose(frontends, routers, self._loop.time())
        return None if chosen is None else routers[chosen]

    def _now(self) -> _Moment:
        return _Moment(self._loop.time(), self._lost_s())

    def _elapsed_s(self, since: _Moment) -> float:
        """Seconds since then that are to be held against others."""
        return self._now().since(since)

    def _heard(self) -> None:
        self._heard_last = self._now()

    async def _serve(self, router: Instance) -> bool:
        """A session until it ends; whether that is because another router is to be asked."""
        self._heard()
        try:
            async with self._open_session(router) as session, TaskGroup() as tasks:
                tasks.create_task(self._write(session))
                tasks.create_task(self._ping())
                tasks.create_task(self._go_home(router))
                await self._read(session, router)
        except MeshError as error:
            if error.reason == _HOME:
                log.info("router_left", router_id=router.id, why=str(error))
                return True
            self._choice.lost(router.id, self._loop.time())
            log.warning("router_lost", router_id=router.id, why=str(error))
        finally:
            self.is_connected = self._is_told = False
        return False

    async def _go_home(self, router: Instance) -> None:
        """Ends the session when another router is to be asked, and answers."""
        while True:
            await asyncio.sleep(PING_S)
            if (home := self._choose()) is None or home.id == router.id:
                continue
            await asyncio.sleep(MOVE_S * self._rng.random())
            if (home := self._choose()) is None or home.id == router.id:
                continue
            if await self._answers(home):
                raise Unavailable(f"router {home.id} is this frontend's home", reason=_HOME)
            self._choice.lost(home.id, self._loop.time())

    async def _answers(self, router: Instance) -> bool:
        """Whether a session with that router could be had now; this one goes on meanwhile."""
        hello = router_pb2.SessionHello(frontend_id=self._frontend_id)
        try:
            async with asyncio.timeout(HOME_S), self._open_session(router) as session:
                await session.write(router_pb2.SessionRequest(hello=hello))
                frame = await session.read()
                return frame is not None and frame.hello_ack.router_id == router.id
        except (MeshError, TimeoutError):
            return False

    async def _read(self, session: Session, router: Instance) -> None:
        self._is_denied = False
        while (frame := await session.read()) is not None:
            self._heard()
            if frame.HasField("hello_ack"):
                self._greeted(frame.hello_ack, router)
            if self._queue_wait_s != 0 and (frame.results or not frame.HasField("hello_ack")):
                self._attended = self._heard_last
            for result in frame.results:
                self._answered(result)
            if self._is_denied:
                self._left_denied_at = self._loop.time()
                raise WorkerLost(
                    "the router knows nobody of a model that is served", retryable=True
                )
        raise WorkerLost("the router closed the session", retryable=True)

    def _greeted(self, hello_ack: router_pb2.SessionHelloAck, router: Instance) -> None:
        if hello_ack.router_id != router.id:
            why = f"at {router.address} there is router {hello_ack.router_id} now"
            raise WorkerLost(why, retryable=True)
        self.is_connected, self._session_since = True, self._heard_last
        self._tracks_output = hello_ack.track_output_blocks
        told = hello_ack.HasField("queue_wait_ms")
        self._queue_wait_s = hello_ack.queue_wait_ms / 1000 if told else None

    async def _ping(self) -> None:
        """An empty frame asks for an empty one. Keepalive is slower, and sees no hung process.

        Only an empty one does: a router has nothing to answer to frames of output and frees.
        """
        while True:
            await asyncio.sleep(PING_S)
            silent_s = self._elapsed_s(self._heard_last)
            if silent_s > SILENT_AFTER_S:
                raise WorkerLost(f"the router said nothing for {silent_s:.1f} s", retryable=True)
            self._check_answers()
            self._is_sign_due = True
            self._wake.set()

    def _check_answers(self) -> None:
        """Raises WorkerLost when a question is open for longer than the router says it may be."""
        if self._queue_wait_s is None or not self.is_connected:
            return
        now = self._now()
        waiting = next((w for w in self._waiting.values() if not w.is_denied(now)), None)
        if waiting is not None:
            asked = max(waiting.since, waiting.again_at or waiting.since)
            open_s = self._elapsed_s(max(asked, self._session_since))
            if open_s > self._queue_wait_s + SILENT_AFTER_S:
                raise WorkerLost(
                    f"the router left a question open for {open_s:.1f} s", retryable=True
                )

    def _answered(self, result: router_pb2.NewResult) -> None:
        waiting = self._waiting.get(result.id)
        if waiting is None:
            return  # freed meanwhile
        if result.HasField("error"):
            error = error_from_proto(result.error)
            if error.reason == "ASKED_AGAIN":
                return  # The answer to that comes under the same number.
            if error.reason in _DENIALS and self._sees(waiting.query):
                self._denied(result.id, waiting)
                return
            self._forget(result.id, waiting)
            waiting.answer(error)
            return
        self._forget(result.id, waiting)
        decision = result.decision
        self._bookings[waiting.key] = self._booking(waiting, decision)
        self._renewed[waiting.key] = self._loop.time()
        waiting.answer(_placed(decision))

    def _forget(self, number: int, waiting: _Waiting) -> None:
        del self._waiting[number]
        if self._numbers.get(waiting.key) == number:
            del self._numbers[waiting.key]

    def _denied(self, number: int, waiting: _Waiting) -> None:
        """The router has not seen what we see: it may any moment, or another one has."""
        now = self._now()
        if waiting.denied_since is None or not waiting.is_denied(now):
            waiting.denied_since = now
        is_blind = now.since(waiting.denied_since) >= DENIED_S
        # Not from one to the other all the time: neither may ever see it.
        may_leave = now.at - self._left_denied_at >= AVOID_S
        if is_blind and may_leave and len(self._routers()) > 1:
            self._is_denied = True
        wait_s = ASK_AGAIN_MAX_S * self._rng.uniform(0.5, 1.0) if is_blind else ASK_AGAIN_S
        waiting.again_at = now._replace(at=now.at + wait_s)
        self._loop.call_at(waiting.again_at.at, self._ask_again, number, self._generation)

    def _ask_again(self, number: int, generation: int) -> None:
        # Another session began with all questions.
        if number in self._waiting and generation == self._generation:
            self._tell(self._news, number)

    def _booking(self, waiting: _Waiting, decision: router_pb2.Decision) -> router_pb2.Booking:
        routing, session_revision = waiting.query.routing, decision.session_revision
        session, lora_name = None, None
        if routing is not None and session_revision:
            session, lora_name = routing.session_control, routing.lora_name
        return router_pb2.Booking(
            key=_key(waiting.key),
            frontend_id=self._frontend_id,
            model=waiting.query.model,
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
        self._news, self._prefills_done, self._frees = list(self._waiting), [], []
        for asked in self._waiting.values():
            if asked.again_at is not None:
                asked.again_at = self._now()
        self._outputs.clear()
        self._renewed = dict.fromkeys(self._bookings, self._loop.time())
        self._is_told = True
        self._generation += 1
        frame = router_pb2.SessionRequest(
            hello=router_pb2.SessionHello(
                frontend_id=self._frontend_id, generation=self._generation
            ),
            announced=self._bookings.values(),
        )
        while True:
            for number in self._news:
                waiting = self._waiting.get(number)
                if waiting is not None:
                    frame.news.append(self._new(number, waiting))
            frame.announced.extend(self._renewals())
            frame.prefills_done.extend(map(_key, self._prefills_done))
            frame.outputs.extend(map(_output, self._outputs.items()))
            self._outputs.clear()
            frame.frees.extend(map(_key, self._frees))
            self._news, self._prefills_done, self._frees = [], [], []
            await session.write(frame)
            if self._is_sign_due:
                self._is_sign_due = False
                if frame.ListFields():
                    await session.write(router_pb2.SessionRequest())
            await self._wake.wait()
            self._wake.clear()
            frame = router_pb2.SessionRequest()

    def _renewals(self) -> list[router_pb2.Booking]:
        """Bookings to be announced again, with all that is not sent yet of their output."""
        now = self._loop.time()
        due: list[Key] = []
        for key, at in self._renewed.items():
            if now - at < RENEW_S:
                break
            due.append(key)
        for key in due:
            del self._renewed[key]
            self._renewed[key] = now
            self._outputs.pop(key, None)
        return [self._bookings[key] for key in due]

    def _new(self, number: int, waiting: _Waiting) -> router_pb2.New:
        query = waiting.query
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
            part_to_proto(query.routing, message.routing)
        if query.config_override is not None:
            part_to_proto(query.config_override, message.config_override)
        return router_pb2.New(
            id=number, key=_key(waiting.key), query=message, traceparent=query.traceparent
        )

    async def _place_unrouted(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for number in self._unattended():
                waiting = self._waiting.get(number)
                if waiting is None:
                    continue  # freed by who was answered just before
                self._forget(number, waiting)
                self.unrouted += 1
                # The router may have been asked: what it books now is not what happens.
                self._tell(self._frees, waiting.key)
                waiting.answer(self._place_alone(waiting.query))

    def _unattended(self) -> list[int]:
        """The questions that no router has attended to for too long."""
        now = self._now()
        is_settling = self.is_connected and now.since(self._session_since) < SETTLE_S
        return [
            number
            for number, waiting in self._waiting.items()
            if now.since(self._unattended_since(waiting, now)) >= UNROUTED_AFTER_S
            and not (is_settling and not waiting.is_denied(now))
        ]

    def _unattended_since(self, waiting: _Waiting, now: _Moment) -> _Moment:
        if waiting.denied_since is not None and waiting.is_denied(now):
            return waiting.denied_since
        return max(waiting.since, self._attended, waiting.again_at or waiting.since)


def _output(grown: tuple[Key, _Output]) -> router_pb2.OutputBlocks:
    key, output = grown
    return router_pb2.OutputBlocks(
        key=_key(key), blocks=output.blocks, decay_fraction=output.decay_fraction
    )


def _key(key: Key) -> router_pb2.BookingKey:
    return router_pb2.BookingKey(request_id=key[0], attempt=key[1])


def _placed(decision: router_pb2.Decision) -> Placed:
    has = decision.HasField
    prefill = decision.prefill
    return Placed(
        worker_id=decision.worker.worker_id,
        dp_rank=decision.worker.dp_rank,
        overlap_blocks=decision.overlap_blocks,
        predicted_cached_tokens=decision.predicted_cached_tokens,
        reasons=tuple(decision.reasons),
        prefill=(
            Place(prefill.worker_id, prefill.dp_rank, decision.prefill_address)
            if has("prefill")
            else None
        ),
        bootstrap=(
            part_from_proto(BootstrapInfo, decision.bootstrap) if has("bootstrap") else None
        ),
        address=decision.worker_address,
    )
