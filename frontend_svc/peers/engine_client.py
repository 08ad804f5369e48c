"""The frontend's end of Attach: one stream a worker, opened on first use, closed when idle.

Whether a stream is open never influences placement. A stream that fails ends its slots; the
request machines decide what becomes of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

import grpc.aio
import structlog

from common.errors import InvalidRequest, MeshError, WorkerLost
from common.kv.load import Load
from common.request.preprocessed import PreprocessedRequest, StopConditions, TokenIds, TokenLogprob
from common.request.token_stream import (
    HEARTBEAT_S,
    FrontendLink,
    Hello,
    LegSink,
    Order,
    Terminal,
    ToFrontend,
    ToWorker,
)
from common.rpc import channel as rpc
from common.rpc.interceptors import from_rpc_error
from common.runtime.tasks import TaskGroup
from common.wire.token_stream import to_frontend_from_proto, to_worker_to_proto
from frontend_svc.core.peers.circuit_breaker import Breaker, HangWatch
from frontend_svc.core.peers.stall_clock import never_late
from kvmesh.engine.v1 import engine_pb2_grpc

IDLE_S = 60.0
DIALS_PER_S = 50
TICK_S = 0.1
# A probed worker has this long to answer.
PROBE_S = 1.0
# How long an engine may stand still with work before its requests go elsewhere.
HANG_S = 2.0
# So much less than HANG_S between two heartbeats will do: one that was late, on a busy frontend,
# shortens the time to the next, and waiting for yet another would cost a second.
LATE_S = 0.2
# Ends of a stream that say nothing bad about its worker.
_HARMLESS = frozenset({"IDLE", "CLOSED", "REPLACED"})

log = structlog.get_logger()


class Transport(Protocol):
    """One open Attach stream, as messages."""

    async def read(self) -> ToFrontend | None:
        """The next frame; None at the end of the stream. Raises MeshError when it failed."""

    async def write(self, frame: ToWorker) -> None:
        """Sends a frame; returns when the transport can take the next one."""

    async def close(self) -> None:
        """Ends the stream, whatever state it is in."""


class Dialer(Protocol):
    """Opens Attach streams."""

    async def dial(self, address: str) -> Transport:
        """A stream to the worker at `address`. Raises MeshError."""


class GrpcTransport:
    """Attach over gRPC. The channel belongs to the stream and dies with it."""

    def __init__(self, channel: grpc.aio.Channel, security: rpc.Security) -> None:
        self._channel = channel
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        self._call = stub.Attach(metadata=rpc.call_metadata(security))

    async def read(self) -> ToFrontend | None:
        """See Transport."""
        message = await rpc.read(self._call)
        return None if message is None else to_frontend_from_proto(message)

    async def write(self, frame: ToWorker) -> None:
        """See Transport."""
        try:
            await self._call.write(to_worker_to_proto(frame))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError as error:  # the call is done; `read` says with what
            raise WorkerLost("the stream has ended", retryable=True) from error

    async def close(self) -> None:
        """See Transport."""
        self._call.cancel()
        await self._channel.close()


class GrpcDialer:
    """Dials workers over gRPC."""

    def __init__(self, security: rpc.Security = rpc.PLAINTEXT) -> None:
        self._security = security

    async def dial(self, address: str) -> Transport:
        """See Dialer."""
        return GrpcTransport(rpc.channel(address, security=self._security), self._security)


class Witness(Protocol):
    """Who is told what a connection sees of its worker."""

    def failed(self, worker_id: int, why: str, *, is_hung: bool = False) -> None:
        """The stream was lost, an order was not accepted, or the engine stands still.

        is_hung: nothing was heard of it, or its engine stands still: it may be whole again soon.
        """

    def moved(self, worker_id: int) -> None:
        """The engine moves (again)."""


class _RankWatch:
    """What a rank's heartbeats say of its engine.

    hung: it stands still with requests running. stuck: the same while all of them wait, which may
    be right (for KV from prefill). moved: it stepped since the last one. "": nothing.
    """

    def __init__(self) -> None:
        self._running = HangWatch(HANG_S - LATE_S)
        self._waiting = HangWatch(HANG_S - LATE_S)
        self._step: int | None = None

    def heard(self, load: Load, now: float) -> str:
        """A heartbeat came."""
        is_hung = self._running.heard(load.engine_step, load.running, now)
        idly_waiting = 0 if load.running else load.waiting
        is_stuck = self._waiting.heard(load.engine_step, idly_waiting, now)
        # An engine that has nothing to do has not moved by that: it may still hang.
        has_moved = self._step is not None and load.engine_step != self._step
        self._step = load.engine_step
        return "hung" if is_hung else "stuck" if is_stuck else "moved" if has_moved else ""


# One token, ahead of the queue, beside the cache.
_PROBE = PreprocessedRequest(
    token_ids=TokenIds.of([1]), stop_conditions=StopConditions(max_tokens=1), is_probe=True
)


# What came of a probe. A worker may be too full for one, which is no sign of anything.
Answer = Literal["answered", "refused", "silent"]


class _Canary:
    """The sink of a probe. An engine that cannot be probed has answered: nobody can tell more."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.answer: Answer = "silent"

    def accepted(self) -> None:
        """That is the service's word, not the engine's."""

    def rejected(self, error: MeshError) -> None:
        """See LegSink."""
        self._came("answered" if isinstance(error, InvalidRequest) else "refused")

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """See LegSink."""
        self._came("answered")

    def chunk(self, json: bytes) -> None:
        """See LegSink."""
        self._came("answered")

    def terminal(self, terminal: Terminal) -> None:
        """See LegSink."""
        self._came("answered" if terminal.error is None else "refused")

    def lost(self, error: MeshError) -> None:
        """See LegSink."""
        self.over.set()

    def _came(self, answer: Answer) -> None:
        self.answer = answer
        self.over.set()


class WorkerConnection:
    """One Attach stream from the first order to its end.

    lost_s: how long the loop has stood still so far; the worker is not judged for that time.
    """

    def __init__(
        self,
        hello: Hello,
        address: str,
        dialer: Dialer,
        witness: Witness,
        lost_s: Callable[[], float] = never_late,
    ) -> None:
        self._lost_s = lost_s
        self._heard_at, self._lost_before = 0.0, lost_s()
        self._is_silent = False
        self._loop = asyncio.get_running_loop()
        self.link = FrontendLink(hello, self._loop.time())
        self.address = address
        self._dialer = dialer
        self._witness = witness
        self._ranks: dict[int, _RankWatch] = {}
        self._examining: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self.heard = asyncio.Event()
        self._used_at = self._loop.time()
        self.is_over = False

    @property
    def silent_s(self) -> float:
        """Since when nothing was heard, without what this process lost meanwhile."""
        return self._loop.time() - self._heard_at - (self._lost_s() - self._lost_before)

    def submit(self, order: Order, sink: LegSink) -> int:
        """Queues an order; returns its slot."""
        self._used_at = self._loop.time()
        slot = self.link.submit(order, sink)
        self._wake.set()
        return slot

    def abort(self, slot: int, reason: str) -> None:
        """Asks for a slot's end."""
        if reason == "not_accepted":
            self._witness.failed(self.link.worker_id, "did not accept a request in time")
        self.link.abort(slot, reason)
        self._wake.set()

    async def run(self) -> None:
        """Lives until the stream is lost or was idle long enough. Every slot has ended then."""
        why, reason = "the connection was closed", "CLOSED"
        try:
            await self._serve()
        except MeshError as error:
            why, reason = error.message, error.reason
        except Exception:
            log.exception("attach_failed", worker_id=self.link.worker_id)
            why, reason = "the frontend's log says why", "BUG"
        finally:
            if self.link.open_slots:
                log.warning("worker_lost", worker_id=self.link.worker_id, why=why, reason=reason)
            self.is_over = True
            self.heard.set()
            if reason not in _HARMLESS:
                self._witness.failed(self.link.worker_id, why, is_hung=self._is_silent)
            message = f"worker {self.link.worker_id} was lost: {why}"
            self.link.lose(WorkerLost(message, retryable=True, reason=reason))

    async def _serve(self) -> None:
        transport = await self._dialer.dial(self.address)
        try:
            async with TaskGroup() as tasks:
                tasks.create_task(self._write(transport))
                tasks.create_task(self._tick())
                self._wake.set()
                await self._read(transport, tasks)
        finally:
            await transport.close()

    async def _read(self, transport: Transport, tasks: TaskGroup) -> None:
        link, loop = self.link, self._loop
        while (frame := await transport.read()) is not None:
            link.receive(frame, loop.time())
            self._heard_at, self._lost_before = loop.time(), self._lost_s()
            self.heard.set()
            if frame.heartbeat:
                self._judge(frame.heartbeat, tasks)
            if frame.sent_bytes:
                self._wake.set()
        raise WorkerLost("the worker closed the stream", retryable=True)

    def _judge(self, loads: Sequence[Load], tasks: TaskGroup) -> None:
        """Hung or not, by the ranks' steps; a hung engine's requests go elsewhere."""
        now = self._loop.time() - self._lost_s()
        seen = [
            self._ranks.setdefault(load.dp_rank, _RankWatch()).heard(load, now) for load in loads
        ]
        if "hung" in seen:
            self._condemn()
        elif "stuck" in seen:
            if self._examining is None or self._examining.done():
                self._examining = tasks.create_task(self._examine())
        elif "moved" in seen:
            self._witness.moved(self.link.worker_id)

    async def _examine(self) -> None:
        """Asks an engine that does not step although work waits: it may be hung, or wait for KV."""
        answer = await self.probe(PROBE_S)
        if answer == "silent" and not any(load.running for load in self.link.loads):
            self._condemn()  # one that has begun something since has its two seconds for it

    async def probe(self, within_s: float) -> Answer:
        """What the engine says to a probe, which goes ahead of its queue, in that time."""
        canary = _Canary()
        try:
            # Its deadline is no answer, and comes after it was given up.
            slot = self.submit(Order("probe", timeout_s=2 * within_s, request=_PROBE), canary)
        except MeshError:  # the stream has ended
            return "silent"
        await self.until(canary.over, within_s)
        self.abort(slot, "probe_late")  # a no-op for one that has ended
        return canary.answer

    async def until(self, event: asyncio.Event, within_s: float) -> bool:
        """Whether it comes in that time, of which none counts in which the loop stood still."""
        began_at = self._loop.time() - self._lost_s()
        while not event.is_set():
            left_s = within_s - (self._loop.time() - self._lost_s() - began_at)
            if left_s < 0.001:  # a timer for less might ring at the same moment for ever
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await event.wait()
        return True

    def _condemn(self) -> None:
        worker_id = self.link.worker_id
        self._witness.failed(worker_id, "its engine stands still", is_hung=True)
        error = WorkerLost(f"worker {worker_id} stands still", retryable=True, reason="HUNG")
        self.link.abandon(error)
        self._wake.set()

    async def _write(self, transport: Transport) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (frame := self.link.next_frame(self._loop.time())) is not None:
                if frame.hello is not None:
                    self._lost_before = self._lost_s()
                await transport.write(frame)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            lost = self.link.tick(now - (self._lost_s() - self._lost_before))
            if lost is not None:
                self._is_silent = self.link.is_open
                raise lost
            if self.link.open_slots:
                self._used_at = now
            elif now - self._used_at >= IDLE_S:
                raise WorkerLost("the stream was idle", retryable=True, reason="IDLE")
            self._wake.set()


@dataclass(frozen=True, slots=True)
class Submission:
    """A submitted order, to be aborted by whoever gave it."""

    connection: WorkerConnection
    slot: int

    def abort(self, reason: str) -> None:
        """Asks for its end; a no-op when it has ended."""
        self.connection.abort(self.slot, reason)


class EngineClient:
    """All Attach streams of a frontend process. Use as an async context manager.

    lost_s: how long the loop has stood still so far, see `core/patience.py`.
    """

    def __init__(
        self,
        frontend_id: int,
        dialer: Dialer,
        rng: Random | None = None,
        *,
        lost_s: Callable[[], float] = never_late,
    ) -> None:
        self._lost_s = lost_s
        self._frontend_id = frontend_id
        self._dialer = dialer
        self._loop = asyncio.get_running_loop()
        self._breaker = Breaker(Random() if rng is None else rng)
        self._hung: set[int] = set()
        self._addresses: dict[int, str] = {}
        self._present: frozenset[int] | None = None  # What `keep` said last.
        self._prober: asyncio.Task[None] | None = None
        self._tasks = TaskGroup()
        self._open: dict[int, tuple[WorkerConnection, asyncio.Task[None]]] = {}
        self._stream_seq: Counter[int] = Counter()
        self._dials: deque[float] = deque([float("-inf")] * DIALS_PER_S, maxlen=DIALS_PER_S)

    async def __aenter__(self) -> EngineClient:
        await self._tasks.__aenter__()
        self._prober = self._tasks.create_task(self._probe_tripped())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._prober is not None:
            self._prober.cancel()
        for _connection, task in self._open.values():
            task.cancel()
        await self._tasks.__aexit__(None, None, None)

    def submit(self, worker_id: int, address: str, order: Order, sink: LegSink) -> Submission:
        """Submits an order to a worker; `sink` hears of it until its end, loss included."""
        self._addresses[worker_id] = address
        connection = self._connection(worker_id, address)
        return Submission(connection, connection.submit(order, sink))

    def left_alone(self, pool: Iterable[int]) -> frozenset[int]:
        """Who of these workers gets no request for now; see `core/breaker.py`."""
        return self._breaker.excluded(pool)

    def why_left_alone(self) -> dict[int, str]:
        """The workers left alone, and what was seen of them."""
        return self._breaker.why()

    def keep(self, present: Iterable[int]) -> None:
        """Forgets workers that have left the mesh; their streams end by themselves."""
        self._present = present = frozenset(present)
        self._breaker.keep(present)
        self._hung &= present
        for worker_id in [w for w in self._addresses if w not in present]:
            del self._addresses[worker_id]
        for worker_id in [w for w in self._stream_seq if w not in present]:
            if worker_id not in self._open:  # its next incarnation has another id
                del self._stream_seq[worker_id]

    def failed(self, worker_id: int, why: str, *, is_hung: bool = False) -> None:
        """See Witness."""
        if is_hung:
            self._hung.add(worker_id)
        if self._breaker.trip(worker_id, why, self._loop.time(), is_hung=is_hung):
            log.warning("worker_left_alone", worker_id=worker_id, why=why)

    def moved(self, worker_id: int) -> None:
        """See Witness. Only what tripped for standing still is healed by moving."""
        if worker_id in self._hung:
            self._hung.discard(worker_id)
            if self._breaker.heal(worker_id):
                log.info("worker_back", worker_id=worker_id)

    async def _probe_tripped(self) -> None:
        """Looks at tripped workers with growing intervals; each probe in a task of its own."""
        while True:
            await asyncio.sleep(TICK_S)
            for worker_id in self._breaker.due(self._loop.time()):
                self._tasks.create_task(self._probe(worker_id))

    async def _probe(self, worker_id: int) -> None:
        """Opens a stream, or waits for a heartbeat on the open one; asks an engine that hung."""
        address = self._addresses.get(worker_id)
        if self._present is not None and worker_id not in self._present:
            # A router told of it, and it was gone before discovery showed it: nobody is going to
            # say that it left. Were it on its way, it would get requests by the router's word.
            self._hung.discard(worker_id)
            self._addresses.pop(worker_id, None)
            address = None
        if address is None:
            self._breaker.keep(self._addresses)  # nobody asks for it any more
            return
        connection = self._connection(worker_id, address)
        if worker_id in self._hung:
            # Without requests it does not step, and how it stands then says nothing.
            if await connection.probe(PROBE_S) == "answered":
                self.moved(worker_id)
            self._breaker.probed(worker_id, worker_id not in self._hung, self._loop.time())
            return
        connection.heard.clear()
        # On an open stream the next heartbeat is due within HEARTBEAT_S.
        heard = await connection.until(connection.heard, PROBE_S + HEARTBEAT_S)
        worked = heard and not connection.is_over and worker_id not in self._hung
        self._breaker.probed(worker_id, worked, self._loop.time())
        if worked:
            log.info("worker_back", worker_id=worker_id)

    def loads(self, worker_id: int) -> tuple[Sequence[Load], float] | None:
        """A worker's last heartbeat and when it came (loop time); None without a stream."""
        found = self._open.get(worker_id)
        return None if found is None else (found[0].link.loads, found[0].link.loads_at)

    def silent_s(self, worker_id: int) -> float:
        """Seconds since a frame of the worker came; infinite without one on an open stream."""
        found = self._open.get(worker_id)
        if found is None or not found[0].link.is_open:
            return math.inf
        return found[0].silent_s

    @property
    def open_slots(self) -> dict[int, int]:
        """Slots open by worker."""
        return {worker_id: c.link.open_slots for worker_id, (c, _) in self._open.items()}

    def _connection(self, worker_id: int, address: str) -> WorkerConnection:
        found = self._open.get(worker_id)
        if found is not None and not found[0].is_over:
            return found[0]
        self._stream_seq[worker_id] += 1
        hello = Hello(self._frontend_id, worker_id, self._stream_seq[worker_id])
        connection = WorkerConnection(hello, address, self._dialer, self, self._lost_s)
        task = self._tasks.create_task(self._live(worker_id, connection))
        self._open[worker_id] = connection, task
        return connection

    async def _live(self, worker_id: int, connection: WorkerConnection) -> None:
        try:
            await self._wait_for_turn()
            await connection.run()
        finally:
            # Sinks that were told of the loss may already have opened the next stream.
            if self._open.get(worker_id, (None,))[0] is connection:
                del self._open[worker_id]

    async def _wait_for_turn(self) -> None:
        loop = asyncio.get_running_loop()
        start_at = max(loop.time(), self._dials[0] + 1.0)
        self._dials.append(start_at)
        await asyncio.sleep(start_at - loop.time())
