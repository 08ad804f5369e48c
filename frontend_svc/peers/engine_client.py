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
    LegRequest,
    LegSink,
    RequestFrame,
    ResponseFrame,
    Terminal,
)
from common.rpc import channel as rpc
from common.rpc.interceptors import mesh_error_from_rpc
from common.runtime.tasks import TaskGroup
from common.wire.token_stream import request_frame_to_proto, response_frame_from_proto
from frontend_svc.core.peers.circuit_breaker import CircuitBreaker
from frontend_svc.core.peers.hang_detector import HangDetector
from frontend_svc.core.peers.stall_clock import never_stalled
from kvmesh.engine.v1 import engine_pb2_grpc

IDLE_TIMEOUT_S = 60.0
DIALS_PER_S_MAX = 50
TICK_S = 0.1
# A probed worker has this long to answer.
PROBE_TIMEOUT_S = 1.0
# How long an engine may stand still with work before its requests go elsewhere.
HANG_TIMEOUT_S = 2.0
# So much less than HANG_S between two heartbeats will do: one that was late, on a busy frontend,
# shortens the time to the next, and waiting for yet another would cost a second.
HEARTBEAT_JITTER_S = 0.2
# Ends of a stream that say nothing bad about its worker.
_BENIGN_CLOSE_REASONS = frozenset({"IDLE", "CLOSED", "REPLACED"})

log = structlog.get_logger()


class Transport(Protocol):
    """One open Attach stream, as messages."""

    async def read(self) -> ResponseFrame | None:
        """The next frame; None at the end of the stream. Raises MeshError when it failed."""

    async def write(self, frame: RequestFrame) -> None:
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

    async def read(self) -> ResponseFrame | None:
        """See Transport."""
        message = await rpc.read(self._call)
        return None if message is None else response_frame_from_proto(message)

    async def write(self, frame: RequestFrame) -> None:
        """See Transport."""
        try:
            await self._call.write(request_frame_to_proto(frame))
        except grpc.aio.AioRpcError as error:
            raise mesh_error_from_rpc(error) from error
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


class ConnectionObserver(Protocol):
    """Who is told what a connection sees of its worker."""

    def failed(self, worker_id: int, why: str, *, is_hung: bool = False) -> None:
        """The stream was lost, an order was not accepted, or the engine stands still.

        is_hung: nothing was heard of it, or its engine stands still: it may be whole again soon.
        """

    def moved(self, worker_id: int) -> None:
        """The engine moves (again)."""


class _RankHangDetector:
    """What a rank's heartbeats say of its engine.

    hung: it stands still with requests running. stuck: the same while all of them wait, which may
    be right (for KV from prefill). moved: it stepped since the last one. "": nothing.
    """

    def __init__(self) -> None:
        self._running_detector = HangDetector(HANG_TIMEOUT_S - HEARTBEAT_JITTER_S)
        self._waiting_detector = HangDetector(HANG_TIMEOUT_S - HEARTBEAT_JITTER_S)
        self._last_step: int | None = None

    def received(self, load: Load, now: float) -> str:
        """A heartbeat came."""
        is_hung = self._running_detector.received(load.engine_step, load.running, now)
        waiting_while_idle = 0 if load.running else load.waiting
        is_stalled = self._waiting_detector.received(load.engine_step, waiting_while_idle, now)
        # An engine that has nothing to do has not moved by that: it may still hang.
        has_progressed = self._last_step is not None and load.engine_step != self._last_step
        self._last_step = load.engine_step
        return "hung" if is_hung else "stuck" if is_stalled else "moved" if has_progressed else ""


# One token, ahead of the queue, beside the cache.
_PROBE_REQUEST = PreprocessedRequest(
    token_ids=TokenIds.of([1]), stop_conditions=StopConditions(max_tokens=1), is_probe=True
)


# What came of a probe. A worker may be too full for one, which is no sign of anything.
ProbeResult = Literal["answered", "refused", "silent"]


class _ProbeSink:
    """The sink of a probe. An engine that cannot be probed has answered: nobody can tell more."""

    def __init__(self) -> None:
        self.finished = asyncio.Event()
        self.result: ProbeResult = "silent"

    def accepted(self) -> None:
        """That is the service's word, not the engine's."""

    def rejected(self, error: MeshError) -> None:
        """See LegSink."""
        self._finish("answered" if isinstance(error, InvalidRequest) else "refused")

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """See LegSink."""
        self._finish("answered")

    def chunk(self, json: bytes) -> None:
        """See LegSink."""
        self._finish("answered")

    def terminal(self, terminal: Terminal) -> None:
        """See LegSink."""
        self._finish("answered" if terminal.error is None else "refused")

    def lost(self, error: MeshError) -> None:
        """See LegSink."""
        self.finished.set()

    def _finish(self, result: ProbeResult) -> None:
        self.result = result
        self.finished.set()


class WorkerConnection:
    """One Attach stream from the first order to its end.

    lost_s: how long the loop has stood still so far; the worker is not judged for that time.
    """

    def __init__(
        self,
        hello: Hello,
        address: str,
        dialer: Dialer,
        observer: ConnectionObserver,
        stalled_s: Callable[[], float] = never_stalled,
    ) -> None:
        self._stalled_s = stalled_s
        self._last_received_at, self._stalled_before = 0.0, stalled_s()
        self._is_unresponsive = False
        self._loop = asyncio.get_running_loop()
        self.link = FrontendLink(hello, self._loop.time())
        self.address = address
        self._dialer = dialer
        self._observer = observer
        self._hang_detectors: dict[int, _RankHangDetector] = {}
        self._hang_probe: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self.received = asyncio.Event()
        self._last_used_at = self._loop.time()
        self.is_closed = False

    @property
    def silent_s(self) -> float:
        """Since when nothing was heard, without what this process lost meanwhile."""
        return (
            self._loop.time() - self._last_received_at - (self._stalled_s() - self._stalled_before)
        )

    def submit(self, leg_request: LegRequest, sink: LegSink) -> int:
        """Queues an order; returns its slot."""
        self._last_used_at = self._loop.time()
        slot = self.link.submit(leg_request, sink)
        self._wake.set()
        return slot

    def abort(self, slot: int, reason: str) -> None:
        """Asks for a slot's end."""
        if reason == "not_accepted":
            self._observer.failed(self.link.worker_id, "did not accept a request in time")
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
            self.is_closed = True
            self.received.set()
            if reason not in _BENIGN_CLOSE_REASONS:
                self._observer.failed(self.link.worker_id, why, is_hung=self._is_unresponsive)
            message = f"worker {self.link.worker_id} was lost: {why}"
            self.link.close(WorkerLost(message, retryable=True, reason=reason))

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
            self._last_received_at, self._stalled_before = loop.time(), self._stalled_s()
            self.received.set()
            if frame.heartbeat:
                self._check_progress(frame.heartbeat, tasks)
            if frame.sent_bytes:
                self._wake.set()
        raise WorkerLost("the worker closed the stream", retryable=True)

    def _check_progress(self, loads: Sequence[Load], tasks: TaskGroup) -> None:
        """Hung or not, by the ranks' steps; a hung engine's requests go elsewhere."""
        now = self._loop.time() - self._stalled_s()
        states = [
            self._hang_detectors.setdefault(load.dp_rank, _RankHangDetector()).received(load, now)
            for load in loads
        ]
        if "hung" in states:
            self._declare_hung()
        elif "stuck" in states:
            if self._hang_probe is None or self._hang_probe.done():
                self._hang_probe = tasks.create_task(self._probe_stalled_engine())
        elif "moved" in states:
            self._observer.moved(self.link.worker_id)

    async def _probe_stalled_engine(self) -> None:
        """Asks an engine that does not step although work waits: it may be hung, or wait for KV."""
        result = await self.probe(PROBE_TIMEOUT_S)
        if result == "silent" and not any(load.running for load in self.link.loads):
            self._declare_hung()  # one that has begun something since has its two seconds for it

    async def probe(self, timeout_s: float) -> ProbeResult:
        """What the engine says to a probe, which goes ahead of its queue, in that time."""
        probe_sink = _ProbeSink()
        try:
            # Its deadline is no answer, and comes after it was given up.
            slot = self.submit(
                LegRequest("probe", timeout_s=2 * timeout_s, request=_PROBE_REQUEST), probe_sink
            )
        except MeshError:  # the stream has ended
            return "silent"
        await self.wait_for_event(probe_sink.finished, timeout_s)
        self.abort(slot, "probe_late")  # a no-op for one that has ended
        return probe_sink.result

    async def wait_for_event(self, event: asyncio.Event, timeout_s: float) -> bool:
        """Whether it comes in that time, of which none counts in which the loop stood still."""
        started_at = self._loop.time() - self._stalled_s()
        while not event.is_set():
            remaining_s = timeout_s - (self._loop.time() - self._stalled_s() - started_at)
            if remaining_s < 0.001:  # a timer for less might ring at the same moment for ever
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining_s):
                    await event.wait()
        return True

    def _declare_hung(self) -> None:
        worker_id = self.link.worker_id
        self._observer.failed(worker_id, "its engine stands still", is_hung=True)
        error = WorkerLost(f"worker {worker_id} stands still", retryable=True, reason="HUNG")
        self.link.abort_all(error)
        self._wake.set()

    async def _write(self, transport: Transport) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (frame := self.link.next_frame(self._loop.time())) is not None:
                if frame.hello is not None:
                    self._stalled_before = self._stalled_s()
                await transport.write(frame)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            lost = self.link.tick(now - (self._stalled_s() - self._stalled_before))
            if lost is not None:
                self._is_unresponsive = self.link.is_open
                raise lost
            if self.link.open_slots:
                self._last_used_at = now
            elif now - self._last_used_at >= IDLE_TIMEOUT_S:
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
        stalled_s: Callable[[], float] = never_stalled,
    ) -> None:
        self._stalled_s = stalled_s
        self._frontend_id = frontend_id
        self._dialer = dialer
        self._loop = asyncio.get_running_loop()
        self._breaker = CircuitBreaker(Random() if rng is None else rng)
        self._hung_workers: set[int] = set()
        self._addresses: dict[int, str] = {}
        self._members: frozenset[int] | None = None  # What `retain` said last.
        self._probe_task: asyncio.Task[None] | None = None
        self._tasks = TaskGroup()
        self._connections: dict[int, tuple[WorkerConnection, asyncio.Task[None]]] = {}
        self._stream_seq: Counter[int] = Counter()
        self._dial_times: deque[float] = deque(
            [float("-inf")] * DIALS_PER_S_MAX, maxlen=DIALS_PER_S_MAX
        )

    async def __aenter__(self) -> EngineClient:
        await self._tasks.__aenter__()
        self._probe_task = self._tasks.create_task(self._probe_open_circuits())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._probe_task is not None:
            self._probe_task.cancel()
        for _connection, task in self._connections.values():
            task.cancel()
        await self._tasks.__aexit__(None, None, None)

    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Submission:
        """Submits an order to a worker; `sink` hears of it until its end, loss included."""
        self._addresses[worker_id] = address
        connection = self._connection(worker_id, address)
        return Submission(connection, connection.submit(leg_request, sink))

    def excluded_workers(self, pool: Iterable[int]) -> frozenset[int]:
        """Who of these workers gets no request for now; see `core/breaker.py`."""
        return self._breaker.excluded(pool)

    def exclusion_reasons(self) -> dict[int, str]:
        """The workers left alone, and what was seen of them."""
        return self._breaker.reasons()

    def retain(self, members: Iterable[int]) -> None:
        """Forgets workers that have left the mesh; their streams end by themselves."""
        self._members = members = frozenset(members)
        self._breaker.retain(members)
        self._hung_workers &= members
        for worker_id in [w for w in self._addresses if w not in members]:
            del self._addresses[worker_id]
        for worker_id in [w for w in self._stream_seq if w not in members]:
            if worker_id not in self._connections:  # its next incarnation has another id
                del self._stream_seq[worker_id]

    def failed(self, worker_id: int, why: str, *, is_hung: bool = False) -> None:
        """See Witness."""
        if is_hung:
            self._hung_workers.add(worker_id)
        if self._breaker.open_circuit(worker_id, why, self._loop.time(), is_hung=is_hung):
            log.warning("worker_left_alone", worker_id=worker_id, why=why)

    def moved(self, worker_id: int) -> None:
        """See Witness. Only what tripped for standing still is healed by moving."""
        if worker_id in self._hung_workers:
            self._hung_workers.discard(worker_id)
            if self._breaker.close_circuit(worker_id):
                log.info("worker_back", worker_id=worker_id)

    async def _probe_open_circuits(self) -> None:
        """Looks at tripped workers with growing intervals; each probe in a task of its own."""
        while True:
            await asyncio.sleep(TICK_S)
            for worker_id in self._breaker.due(self._loop.time()):
                self._tasks.create_task(self._probe(worker_id))

    async def _probe(self, worker_id: int) -> None:
        """Opens a stream, or waits for a heartbeat on the open one; asks an engine that hung."""
        address = self._addresses.get(worker_id)
        if self._members is not None and worker_id not in self._members:
            # A router told of it, and it was gone before discovery showed it: nobody is going to
            # say that it left. Were it on its way, it would get requests by the router's word.
            self._hung_workers.discard(worker_id)
            self._addresses.pop(worker_id, None)
            address = None
        if address is None:
            self._breaker.retain(self._addresses)  # nobody asks for it any more
            return
        connection = self._connection(worker_id, address)
        if worker_id in self._hung_workers:
            # Without requests it does not step, and how it stands then says nothing.
            if await connection.probe(PROBE_TIMEOUT_S) == "answered":
                self.moved(worker_id)
            self._breaker.record_probe(
                worker_id, worker_id not in self._hung_workers, self._loop.time()
            )
            return
        connection.received.clear()
        # On an open stream the next heartbeat is due within HEARTBEAT_S.
        received = await connection.wait_for_event(
            connection.received, PROBE_TIMEOUT_S + HEARTBEAT_S
        )
        is_healthy = received and not connection.is_closed and worker_id not in self._hung_workers
        self._breaker.record_probe(worker_id, is_healthy, self._loop.time())
        if is_healthy:
            log.info("worker_back", worker_id=worker_id)

    def loads(self, worker_id: int) -> tuple[Sequence[Load], float] | None:
        """A worker's last heartbeat and when it came (loop time); None without a stream."""
        entry = self._connections.get(worker_id)
        return None if entry is None else (entry[0].link.loads, entry[0].link.loads_received_at)

    def silent_s(self, worker_id: int) -> float:
        """Seconds since a frame of the worker came; infinite without one on an open stream."""
        entry = self._connections.get(worker_id)
        if entry is None or not entry[0].link.is_open:
            return math.inf
        return entry[0].silent_s

    @property
    def open_slots(self) -> dict[int, int]:
        """Slots open by worker."""
        return {worker_id: c.link.open_slots for worker_id, (c, _) in self._connections.items()}

    def _connection(self, worker_id: int, address: str) -> WorkerConnection:
        entry = self._connections.get(worker_id)
        if entry is not None and not entry[0].is_closed:
            return entry[0]
        self._stream_seq[worker_id] += 1
        hello = Hello(self._frontend_id, worker_id, self._stream_seq[worker_id])
        connection = WorkerConnection(hello, address, self._dialer, self, self._stalled_s)
        task = self._tasks.create_task(self._run_connection(worker_id, connection))
        self._connections[worker_id] = connection, task
        return connection

    async def _run_connection(self, worker_id: int, connection: WorkerConnection) -> None:
        try:
            await self._wait_for_dial_slot()
            await connection.run()
        finally:
            # Sinks that were told of the loss may already have opened the next stream.
            if self._connections.get(worker_id, (None,))[0] is connection:
                del self._connections[worker_id]

    async def _wait_for_dial_slot(self) -> None:
        loop = asyncio.get_running_loop()
        dial_at = max(loop.time(), self._dial_times[0] + 1.0)
        self._dial_times.append(dial_at)
        await asyncio.sleep(dial_at - loop.time())
