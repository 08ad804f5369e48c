"""One Attach stream to a worker: its life, its probes and the detection of a hung engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Protocol

import structlog

from common.errors import InvalidRequest, MeshError, WorkerLost
from common.kv.load import Load
from common.request.preprocessed import PreprocessedRequest, StopConditions, TokenIds, TokenLogprob
from common.request.token_stream import (
    ATTACH_BREACH,
    FrontendLink,
    Hello,
    LegRequest,
    LegSink,
    RequestFrame,
    ResponseFrame,
    Terminal,
)
from common.runtime.tasks import TaskGroup
from common.streams.peer import SilenceWatch
from common.streams.silence import ATTACH
from common.streams.stall_clock import never_stalled
from common.streams.writer import FrameWriter
from frontend_svc.workers.breaker import Cause
from frontend_svc.workers.rank_watch import EngineProgress, EngineWatch, step_limit_s
from frontend_svc.workers.transport import Dialer

IDLE_TIMEOUT_S = 60.0
TICK_S = 0.1
# A shorter timer could expire within the same loop time again and again.
_TIMER_MIN_S = 0.001
# Ends of a stream that do not mean that its worker failed.
_BENIGN_CLOSE_REASONS = frozenset({"IDLE", "CLOSED", "REPLACED", "STALLED"})
# A stall of this process after which workers end its streams: they miss its heartbeats.
_OWN_STALL_S = ATTACH.limit_s - ATTACH.heartbeat_s
# One token, ahead of the queue, without the cache.
_PROBE_REQUEST = PreprocessedRequest(
    token_ids=TokenIds.of([1]), stop_conditions=StopConditions(max_tokens=1), is_probe=True
)

log = structlog.get_logger()


class ConnectionObserver(Protocol):
    """Receives what a connection observes of its worker. failed: the stream was lost, a request was
    not accepted, the engine hangs, or the worker reports that its engine fails. progressed: the
    engine makes steps. engine_recovered: the worker reports that its engine does not fail any
    more."""

    def failed(self, worker_id: int, reason: str, cause: Cause = Cause.LOST) -> None: ...
    def progressed(self, worker_id: int) -> None: ...
    def engine_recovered(self, worker_id: int) -> None: ...


class ProbeResult(Enum):
    """Outcome of a probe. A worker that is too full for one REFUSES, which proves nothing."""

    ANSWERED = "answered"
    REFUSED = "refused"
    SILENT = "silent"


class _ProbeSink:
    """The sink of a probe. An engine that rejects probes as invalid counts as answering."""

    def __init__(self) -> None:
        self.finished = asyncio.Event()
        self.result = ProbeResult.SILENT

    def accepted(self) -> None:
        pass  # sent by the worker service, not by its engine

    def rejected(self, error: MeshError) -> None:
        self._finish(is_answered=isinstance(error, InvalidRequest))

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        self._finish(is_answered=True)

    def chunk(self, json: bytes) -> None:
        self._finish(is_answered=True)

    def terminal(self, terminal: Terminal) -> None:
        self._finish(is_answered=terminal.error is None)

    def lost(self, error: MeshError) -> None:
        self.finished.set()

    def _finish(self, *, is_answered: bool) -> None:
        self.result = ProbeResult.ANSWERED if is_answered else ProbeResult.REFUSED
        self.finished.set()


class WorkerConnection:
    """One Attach stream from its first request to its end. stalled_s: seconds the event loop has
    stalled so far; they do not count against the worker. received: set when a frame arrives, and at
    the end. engine_failure: why the worker's engine fails, by its last heartbeat; "" if it does
    not."""

    def __init__(
        self,
        hello: Hello,
        address: str,
        dialer: Dialer,
        observer: ConnectionObserver,
        stalled_s: Callable[[], float] = never_stalled,
    ) -> None:
        self._stalled_s = stalled_s
        # `stalled_s` at each tick of the last second of running time.
        self._recent_stalled_s = deque([stalled_s()], maxlen=round(1 / TICK_S))
        self._is_unresponsive = False
        self._loop = asyncio.get_running_loop()
        self.link = FrontendLink(hello, self._loop.time())
        self._address = address
        self._dialer = dialer
        self._observer = observer
        self._engine_watch = EngineWatch()
        self.engine_failure = ""
        self._tasks = TaskGroup()
        self._hang_probe: asyncio.Task[None] | None = None
        self._writer = FrameWriter(self._next_frame)
        self._silence = SilenceWatch(
            ATTACH.limit_s,
            f"message from worker {self.link.worker_id}",
            clock=self._loop.time,
            stalled_s=stalled_s,
            error=partial(WorkerLost, retryable=True),
        )
        self.received = asyncio.Event()
        self._last_used_at = self._loop.time()
        self.is_closed = False

    @property
    def silent_s(self) -> float:
        """Seconds since the last frame, without the stalls of this process."""
        return self._silence.silent_s

    def submit(self, leg_request: LegRequest, sink: LegSink) -> int:
        """Queues a request; returns its slot."""
        self._last_used_at = self._loop.time()
        slot = self.link.submit(leg_request, sink)
        self._writer.wake()
        return slot

    def abort(self, slot: int, reason: str) -> None:
        if reason == "not_accepted":
            self._observer.failed(self.link.worker_id, "did not accept a request in time")
        self.link.abort(slot, reason)
        self._writer.wake()

    async def run(self) -> None:
        """Runs until the stream is lost or idle for too long. Every slot has ended then."""
        message, reason = "the connection was closed", "CLOSED"
        try:
            await self._serve()
        except MeshError as error:
            message, reason = error.message, error.reason
        except Exception:
            log.exception("attach_failed", worker_id=self.link.worker_id)
            message, reason = "internal error; see the frontend's log", "BUG"
        finally:
            worker_id = self.link.worker_id
            own_stall_s = self._stalled_s() - self._recent_stalled_s[0]
            if reason not in _BENIGN_CLOSE_REASONS and own_stall_s >= _OWN_STALL_S:
                message = f"the frontend did not run for {own_stall_s:.1f} s ({message})"
                reason = "STALLED"
            if self.link.open_slots:
                fields = {"worker_id": worker_id, "reason": reason, "error": message}
                if reason in _BENIGN_CLOSE_REASONS:
                    log.info("worker_stream_closed", **fields)
                else:
                    log.warning("worker_lost", **fields)
            self.is_closed = True
            self.received.set()
            if reason not in _BENIGN_CLOSE_REASONS:
                cause = Cause.HUNG if self._is_unresponsive else Cause.LOST
                if reason == ATTACH_BREACH:  # its process is well, and a new stream proves nothing
                    cause = Cause.FAILING
                self._observer.failed(worker_id, message, cause)
            message = f"worker {worker_id} was lost: {message}"
            self.link.close(WorkerLost(message, retryable=True, reason=reason))

    async def probe(self) -> ProbeResult:
        """Sends a probe, which the engine computes ahead of its queue; returns its outcome. It may
        take half of the step limit, as its step is short."""
        sink, timeout_s = _ProbeSink(), step_limit_s(self.link.loads) / 2
        try:
            # The deadline of the probe would end it with an error: it must come after the timeout.
            slot = self.submit(
                LegRequest("probe", timeout_s=2 * timeout_s, request=_PROBE_REQUEST), sink
            )
        except MeshError:  # the stream has ended
            return ProbeResult.SILENT
        await self.wait_for_event(sink.finished, timeout_s)
        self.abort(slot, "probe_late")
        return sink.result

    async def wait_for_event(self, event: asyncio.Event, timeout_s: float) -> bool:
        """Returns whether the event is set in time; stalls of this process do not count."""
        started_at = self._running_time()
        while not event.is_set():
            remaining_s = timeout_s - (self._running_time() - started_at)
            if remaining_s < _TIMER_MIN_S:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining_s):
                    await event.wait()
        return True

    def _running_time(self) -> float:
        return self._loop.time() - self._stalled_s()

    async def _serve(self) -> None:
        transport = await self._dialer.dial(self._address, self.link.worker_id)
        self._silence.restart()  # the dial may have taken long
        try:
            async with self._tasks as tasks:
                tasks.create_task(self._writer.run(transport.write))
                tasks.create_task(self._tick())
                await transport.deliver(self._receive)
                raise WorkerLost("the worker closed the stream", retryable=True)
        finally:
            await transport.close()

    def _receive(self, frame: ResponseFrame) -> None:
        self._silence.restart()
        if self.link.receive(frame):
            self._writer.wake()
        self.received.set()
        if frame.heartbeat:
            self._check_progress(frame.heartbeat)
            self._check_engine(frame.engine_failure)

    def _check_engine(self, failure: str) -> None:
        """Handles the worker's own verdict on its engine; "": it does not fail."""
        worker_id = self.link.worker_id
        last_failure, self.engine_failure = self.engine_failure, failure
        if failure and failure != last_failure:
            log.warning("worker_engine_fails", worker_id=worker_id, failure=failure)
        if failure:
            self._observer.failed(worker_id, "its engine fails", Cause.FAILING)
        elif last_failure:
            self._observer.engine_recovered(worker_id)

    def _check_progress(self, loads: Sequence[Load]) -> None:
        match self._engine_watch.received(loads, self._running_time()):
            case EngineProgress.HUNG:
                self._declare_hung()
            case EngineProgress.STALLED:
                if self._hang_probe is None or self._hang_probe.done():
                    self._hang_probe = self._tasks.create_task(self._probe_stalled_engine())
            case EngineProgress.STEPPED:
                self._observer.progressed(self.link.worker_id)

    async def _probe_stalled_engine(self) -> None:
        """Decides whether a stalled engine hangs: its requests may all wait for KV."""
        result = await self.probe()
        # An engine that runs a request by now has the step limit for it.
        if result is ProbeResult.SILENT and not any(load.running for load in self.link.loads):
            self._declare_hung()

    def _declare_hung(self) -> None:
        """Ends all slots, so that their requests go to other workers."""
        worker_id = self.link.worker_id
        self._observer.failed(worker_id, "its engine makes no progress", Cause.HUNG)
        message = f"the engine of worker {worker_id} makes no progress"
        self.link.abort_all(WorkerLost(message, retryable=True, reason="HUNG"))
        self._writer.wake()

    def _next_frame(self) -> RequestFrame | None:
        return self.link.next_frame(self._loop.time())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._recent_stalled_s.append(self._stalled_s())
            now = self._loop.time()
            self._check_silence()
            if self.link.open_slots:
                self._last_used_at = now
            elif now - self._last_used_at >= IDLE_TIMEOUT_S:
                raise WorkerLost("the stream was idle", retryable=True, reason="IDLE")
            if self.link.is_heartbeat_due(now):
                self._writer.wake()

    def _check_silence(self) -> None:
        self._silence.limit_s = ATTACH.with_heartbeat(self.link.heartbeat_s).limit_s
        try:
            self._silence.check()
        except WorkerLost:
            self._is_unresponsive = self.link.is_open
            raise
