"""Every decision of a router process: made at once or from the queue; measured and traced.

The core never waits; this module does. The result of a queued request goes to the `OnDecision` of
its submission, exactly once, unless the caller withdraws it first. A failure is the result of one
request, a MeshError. A failure to measure or trace a decision never undoes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

import structlog

from common.errors import Conflict, InternalError, MeshError, RequestCancelled, Unavailable
from common.kv.hashing import HASH_SCHEME_ID
from common.request.placement import Query
from common.request.preprocessed import RoutingHints
from kvmesh.router.v1 import router_pb2
from router_svc.core.admission import QueuedRequest, queue_timeout_error
from router_svc.core.booking import BookingKey
from router_svc.core.decision import DecisionRecord
from router_svc.core.query import block_size_of
from router_svc.core.router import Router
from router_svc.hashing import HasherCache
from router_svc.metrics import Metrics
from router_svc.proto import query_from_proto
from router_svc.tracing import DecisionSpans, Stopwatch

LOG = structlog.get_logger(__name__)

# Queued requests that are tried in one turn of the event loop; about 5 ms.
REQUESTS_PER_SLICE = 64
# Rescans of the queue take at most this share of the loop's time, as a divisor.
LOOP_TIME_DIVISOR = 4
# Reason of the error that a closing router gives to queued requests.
DRAINING_REASON = "ROUTER_DRAINING"

OnDecision = Callable[[DecisionRecord | MeshError], None]


@dataclass(frozen=True, slots=True)
class _PendingReply:
    queued: QueuedRequest
    on_decision: OnDecision
    stopwatch: Stopwatch
    traceparent: str


class Decisions:
    """Calls the core and serves its queue. clock: the one that the core uses, in seconds."""

    def __init__(
        self,
        router: Router,
        metrics: Metrics,
        *,
        rng: Random,
        hasher_cache: HasherCache,
        spans: DecisionSpans,
        clock: Callable[[], float],
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._rng = rng
        self._hasher_cache = hasher_cache
        self.spans = spans
        self._clock = clock
        self._pending: dict[BookingKey, _PendingReply] = {}
        self._next_slice: asyncio.TimerHandle | None = None
        self._next_slice_at = 0.0  # Loop time.
        self._is_serving = False
        self._is_closed = False
        # The router subscribed first: its queue is marked dirty by now.
        for event in (router.events.capacity_freed, router.events.session_moved):
            event.subscribe(lambda _: self._schedule_slice())
        router.events.fleet_changed.subscribe(self._schedule_slice)
        router.events.frontend_session_superseded.subscribe(self.withdraw_session)

    def submit(
        self,
        message: router_pb2.Query,
        key: BookingKey | None,
        session: int | None,
        traceparent: str,
        on_decision: OnDecision,
    ) -> DecisionRecord | QueuedRequest:
        """Returns the decision, booked under `key` unless that is None (then neither booked nor
        queued); or a queued request, for which `on_decision` is called later. A queued request with
        the same key gets Conflict (ASKED_AGAIN). Raises what `Router.admit` does, and Conflict
        (SUPERSEDED).
        """
        stopwatch = Stopwatch()
        decided: DecisionRecord | QueuedRequest
        try:
            if session is not None and self._router.load_tracker.is_superseded(session):
                raise Conflict("a later session of this frontend has begun", reason="SUPERSEDED")
            query = query_from_proto(message)
            if message.token_ids:
                query = self.with_hashes(query, message)
            stopwatch.lap()
            matches = self._router.match(query)
            stopwatch.lap()
            now, rng = self._clock(), self._rng
            if key is None:
                decided = self._router.decide(query, None, now, rng, None, matches)
            else:
                if (superseded := self._dequeue(key)) is not None:
                    text = "the same booking was requested again"
                    self._finish(superseded, Conflict(text, reason="ASKED_AGAIN"))
                decided = self._router.admit(query, key, now, rng, session, matches)
            if isinstance(decided, QueuedRequest):
                self._enqueue(_PendingReply(decided, on_decision, stopwatch, traceparent))
                return decided
            stopwatch.lap()
        except MeshError as error:
            self._record_failure(error, message.model, stopwatch, traceparent)
            raise
        except Exception as error:
            # One request fails, the session does not.
            internal_error = InternalError("the router failed to decide")
            internal_error.__cause__ = error
            self._record_failure(internal_error, message.model, stopwatch, traceparent)
            raise internal_error from error
        laps_s = (*stopwatch.laps_s(), stopwatch.total_s())
        self._record_decision(query, key, decided, stopwatch, traceparent, laps_s)
        return decided

    def with_hashes(self, query: Query, message: router_pb2.Query) -> Query:
        """Returns the query, with the hashes of its token ids if it has token ids and no hashes."""
        if not message.token_ids or query.prefix_hashes or not query.model:
            return query
        block_size = block_size_of(query, self._router.fleet.block_size(query.model))
        routing = query.routing or RoutingHints()
        hashes = self._hasher_cache.prefix_hashes(
            message.token_ids,
            model=query.model,
            block_size=block_size,
            lora_name=routing.lora_name or "",
            cache_salt=routing.cache_salt or "",
        )
        return replace(
            query, prefix_hashes=hashes, hash_scheme=HASH_SCHEME_ID, block_size=block_size
        )

    def withdraw(self, queued: QueuedRequest) -> bool:
        """Drops a request without a result: its caller is gone. False if it is not queued."""
        pending = self._pending.get(queued.key)
        if pending is None or pending.queued is not queued:
            return False
        self._dequeue(queued.key)
        self._record_withdrawn(pending)
        return True

    def withdraw_session(self, session: int) -> int:
        """Drops all queued requests of a frontend session; their number."""
        withdrawn = self._router.queue.withdraw_session(session)
        for queued in withdrawn:
            self._record_withdrawn(self._pending.pop(queued.key))
        return len(withdrawn)

    def cancel_request(self, key: BookingKey) -> bool:
        """Finishes a queued request with RequestCancelled. False if it is not queued."""
        pending = self._dequeue(key)
        if pending is not None:
            error = RequestCancelled("the request was cancelled while it was queued")
            self._finish(pending, error)
        return pending is not None

    def serve_queue(self) -> None:
        """Rescans the whole queue and rejects overdue requests; call it periodically, for what
        happens by time alone: a load report expires, or a request is overdue. Events schedule
        rescans themselves.
        """
        self._router.expire(self._clock())
        self._router.queue.mark_all_dirty()
        self._serve_slice()

    def close(self) -> None:
        """Finishes all queued requests, and rejects further ones, with ROUTER_DRAINING."""
        self._is_closed = True
        for queued in self._router.queue.clear():
            self._finish(self._pending.pop(queued.key), _draining())

    def _serve_slice(self) -> None:
        if self._next_slice is not None:
            self._next_slice.cancel()
            self._next_slice = None
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        self._is_serving = True  # No slice is scheduled before the duration of this one is known.
        try:
            self._try_queued()
        finally:
            finished_at = loop.time()
            self._next_slice_at = finished_at + (LOOP_TIME_DIVISOR - 1) * (finished_at - started_at)
            self._is_serving = False
        self._schedule_slice()

    def _try_queued(self) -> None:
        now, router = self._clock(), self._router
        for queued in router.queue.pop_overdue(now):
            error = queue_timeout_error(queued, now - queued.queued_at)
            self._finish(self._pending.pop(queued.key), error)
        for queued, outcome in islice(router.rescan(now, self._rng), REQUESTS_PER_SLICE):
            if outcome is not None:
                self._finish(self._pending.pop(queued.key), outcome)

    def _schedule_slice(self) -> None:
        if self._router.queue.has_dirty and self._next_slice is None and not self._is_serving:
            loop = asyncio.get_running_loop()
            self._next_slice = loop.call_at(self._next_slice_at, self._serve_slice)

    def _enqueue(self, pending: _PendingReply) -> None:
        key = pending.queued.key
        if self._is_closed:
            self._router.queue.withdraw(key)
            raise _draining()
        self._pending[key] = pending
        self._schedule_slice()

    def _dequeue(self, key: BookingKey) -> _PendingReply | None:
        pending = self._pending.pop(key, None)
        if pending is not None:
            self._router.queue.withdraw(key)
        return pending

    def _finish(self, pending: _PendingReply, outcome: DecisionRecord | MeshError) -> None:
        """Delivers the result, then measures and traces it."""
        queued, stopwatch = pending.queued, pending.stopwatch
        if not isinstance(outcome, MeshError):
            stopwatch.lap()
        pending.on_decision(outcome)
        queued_s = self._clock() - queued.queued_at
        self._record_wait(queued, queued_s)
        query, traceparent = queued.query, pending.traceparent
        if isinstance(outcome, MeshError):
            self._record_failure(outcome, query.model, stopwatch, traceparent, queued_s)
        else:
            hashed_s, matched_s, scheduled_s = stopwatch.laps_s()
            total_s = max(0.0, stopwatch.total_s() - queued_s)
            laps_s = (hashed_s, matched_s, max(0.0, scheduled_s - queued_s), total_s)
            self._record_decision(query, queued.key, outcome, stopwatch, traceparent, laps_s)

    def _record_withdrawn(self, pending: _PendingReply) -> None:
        """Records an end like `_finish`, for a caller that receives no result."""
        queued_s = self._clock() - pending.queued.queued_at
        self._record_wait(pending.queued, queued_s)
        withdrawn = RequestCancelled("the caller is gone")
        model = pending.queued.query.model
        self._record_failure(withdrawn, model, pending.stopwatch, pending.traceparent, queued_s)

    def _record_wait(self, queued: QueuedRequest, queued_s: float) -> None:
        # The waits of background requests are no measure of the mesh.
        if not queued.query.is_background:
            self._metrics.record_queue_wait(queued_s)

    def _record_decision(
        self,
        query: Query,
        key: BookingKey | None,
        record: DecisionRecord,
        stopwatch: Stopwatch,
        traceparent: str,
        laps_s: Sequence[float],
    ) -> None:
        """Measures and traces a decision. laps_s: as `Metrics.placed` takes them."""
        try:
            self._metrics.decided("placed", laps_s[-1])
            self._metrics.placed(query, record, laps_s)
            self.spans.placed(traceparent, stopwatch, query, key, record)
        except Exception:
            LOG.exception("decision_not_measured", model=query.model)

    def _record_failure(
        self,
        error: MeshError,
        model: str,
        stopwatch: Stopwatch,
        traceparent: str,
        queued_s: float = 0.0,
    ) -> None:
        """Logs, measures and traces a failure. The error may be foreign, and ill-formed."""
        if isinstance(error, InternalError):
            cause = error.__cause__ or error
            LOG.error("decision_failed", model=model, reason=error.message, exc_info=cause)
        try:
            self._metrics.decided(error.kind.lower(), max(0.0, stopwatch.total_s() - queued_s))
            self._metrics.refused(error)
            self.spans.failed(traceparent, stopwatch, error)
        except Exception:
            LOG.exception("failure_not_measured", error=type(error).__name__)


def _draining() -> Unavailable:
    return Unavailable("this router is closing: use another one", 1.0, reason=DRAINING_REASON)
