"""The frontend's end of Attach: one stream a worker, opened on first use, closed when idle.

Placement does not depend on open streams. A stream that fails ends its slots; the request machines
decide what follows.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

import structlog

from common.registry.instances import Snapshot, SnapshotDiff
from common.request.token_stream import HEARTBEAT_S, Hello, LegRequest, LegSink
from common.runtime.tasks import TaskGroup
from common.streams.stall_clock import never_stalled
from frontend_svc.workers.breaker import Cause, CircuitBreaker
from frontend_svc.workers.connection import (
    TICK_S,
    ProbeResult,
    WorkerConnection,
)
from frontend_svc.workers.outliers import OutlierDetector
from frontend_svc.workers.transport import Dialer

DIALS_PER_S_MAX = 50
# Time that a worker has beyond a heartbeat interval to show that it is back.
REPLY_TIMEOUT_S = 1.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Submission:
    """A submitted request."""

    connection: WorkerConnection
    slot: int

    def abort(self, reason: str) -> None:
        """Requests its end; no effect if it has ended."""
        self.connection.abort(self.slot, reason)


class EngineClient:
    """All Attach streams of a frontend process. Use as an async context manager. stalled_s: seconds
    the event loop has stalled so far; they do not count against workers."""

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
        self._outliers = OutlierDetector()
        # Workers of which the engine must respond before the circuit closes: HUNG or FAILING.
        self._suspect_engines: dict[int, Cause] = {}
        self._addresses: dict[int, str] = {}
        self._members: frozenset[int] | None = None  # of the last snapshot
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
        """Submits a request to a worker. `sink` receives all its events, the loss included."""
        self._addresses[worker_id] = address
        self._outliers.count_request(worker_id, self._loop.time())
        connection = self._connection(worker_id, address)
        return Submission(connection, connection.submit(leg_request, sink))

    def connect(self, worker_id: int, address: str) -> str:
        """Opens the stream to a worker if there is none. Returns why it is not open, or why its
        worker gets no requests; "" if it is open."""
        if reason := self._breaker.reasons().get(worker_id, ""):
            return reason  # its probe opens the stream
        self._addresses[worker_id] = address
        is_open = self._connection(worker_id, address).link.is_open
        return "" if is_open else "the stream to it is not open yet"

    def excluded_workers(self, pool: Iterable[int]) -> frozenset[int]:
        """Returns the workers of a pool that get no requests now; see CircuitBreaker."""
        return self._breaker.excluded(pool)

    def exclusion_reasons(self) -> dict[int, str]:
        return self._breaker.reasons()

    def open_circuits(self) -> dict[str, int]:
        """Returns the number of open circuits of each cause."""
        return {cause.value: count for cause, count in self._breaker.count_by_cause().items()}

    def on_snapshot(self, snapshot: Snapshot, _: SnapshotDiff) -> None:
        """Drops the state of workers that are not in the mesh; their streams end by themselves.

        They may never have been in it: a router can place on a worker that discovery never shows.
        """
        self._members = members = frozenset(snapshot.instances)
        self._breaker.retain(members)
        for worker_id in self._suspect_engines.keys() - members:
            del self._suspect_engines[worker_id]
        for worker_id in [w for w in self._addresses if w not in members]:
            del self._addresses[worker_id]
        for worker_id in [w for w in self._stream_seq if w not in members]:
            if worker_id not in self._connections:  # its next incarnation has another id
                del self._stream_seq[worker_id]

    def failed(self, worker_id: int, reason: str, cause: Cause = Cause.LOST) -> None:
        """Opens the circuit of a worker; see ConnectionObserver."""
        if cause is not Cause.LOST and self._suspect_engines.get(worker_id) is not Cause.FAILING:
            self._suspect_engines[worker_id] = cause
        if self._breaker.open_circuit(worker_id, reason, self._loop.time(), cause):
            log.warning(
                "worker_circuit_opened", worker_id=worker_id, cause=cause.value, reason=reason
            )

    def request_failed(self, worker_id: int, peers: Iterable[int]) -> None:
        """Counts a failed request against a worker. peers: workers that can replace it."""
        reason = self._outliers.count_failure(worker_id, peers, self._loop.time())
        if reason:
            self.failed(worker_id, reason, Cause.FAILING)

    def progressed(self, worker_id: int) -> None:
        """Closes the circuit if a hang opened it; see ConnectionObserver."""
        if self._suspect_engines.get(worker_id) is Cause.HUNG:
            self._close_circuit(worker_id)

    def engine_recovered(self, worker_id: int) -> None:
        """Probes the worker soon; see ConnectionObserver."""
        self._breaker.probe_early(worker_id, self._loop.time())

    def _close_circuit(self, worker_id: int) -> None:
        self._suspect_engines.pop(worker_id, None)
        self._outliers.forget(worker_id)
        if self._breaker.close_circuit(worker_id, self._loop.time()):
            log.info("worker_circuit_closed", worker_id=worker_id)

    def silent_s(self, worker_id: int) -> float:
        """Returns the seconds since the worker's last frame; infinite without an open stream."""
        entry = self._connections.get(worker_id)
        if entry is None or not entry[0].link.is_open:
            return math.inf
        return entry[0].silent_s

    @property
    def open_slots(self) -> dict[int, int]:
        return {worker_id: c.link.open_slots for worker_id, (c, _) in self._connections.items()}

    async def _probe_open_circuits(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for worker_id in self._breaker.due(self._loop.time()):
                self._tasks.create_task(self._probe(worker_id))

    async def _probe(self, worker_id: int) -> None:
        """Probes a suspect engine; of another worker it awaits a frame, on a new stream if
        needed."""
        if self._members is not None and worker_id not in self._members:
            # A router placed on it before discovery showed it. If it left before that, no snapshot
            # reports its departure; if it is about to appear, routers place on it anyway.
            self._suspect_engines.pop(worker_id, None)
            self._addresses.pop(worker_id, None)
        address = self._addresses.get(worker_id)
        if address is None:
            self._breaker.retain(self._addresses)  # no request is going to use it
            return
        connection = self._connection(worker_id, address)
        if worker_id in self._suspect_engines:
            # Without requests the engine makes no step, so its heartbeats prove nothing.
            is_healthy = await connection.probe() is ProbeResult.ANSWERED
            # A worker that is then silent, or reports a failure, has not recovered.
            is_healthy = is_healthy and not connection.engine_failure
        else:
            connection.received.clear()
            # On an open stream the next heartbeat is due within HEARTBEAT_S.
            timeout_s = REPLY_TIMEOUT_S + HEARTBEAT_S
            received = await connection.wait_for_event(connection.received, timeout_s)
            is_healthy = received and not connection.is_closed
            is_healthy = is_healthy and worker_id not in self._suspect_engines
        if is_healthy:
            self._close_circuit(worker_id)
        else:
            self._breaker.record_probe(worker_id, False, self._loop.time())

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
            # A sink that received the loss may have opened the next stream already.
            if self._connections.get(worker_id, (None,))[0] is connection:
                del self._connections[worker_id]

    async def _wait_for_dial_slot(self) -> None:
        dial_at = max(self._loop.time(), self._dial_times[0] + 1.0)
        self._dial_times.append(dial_at)
        await asyncio.sleep(dial_at - self._loop.time())
