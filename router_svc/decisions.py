"""Every decision of a router process: made at once, or when the queue lets it; measured and traced.

The core never waits; here is who does. An answer that comes late goes to the `OnDecision` that came
with the question, exactly once, unless whoever asked withdraws it first. Whatever goes wrong with
one question is its own answer, a MeshError; what is only told of a decision never undoes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

import structlog

from common.errors import Conflict, InternalError, MeshError, RequestCancelled, Unavailable
from common.kv.hashing import HASH_SCHEME_ID
from kvmesh.router.v1 import router_pb2
from router_svc.core.admission import QueuedRequest, queue_timeout_error
from router_svc.core.query import Query, block_size_of
from router_svc.core.rank_load import REPORT_MAX_AGE_S
from router_svc.core.router import AdmissionResult, Decision, Router
from router_svc.core.types import BookingKey, Placement, SessionName
from router_svc.hashing import HasherCache
from router_svc.metrics import Metrics
from router_svc.proto import query_from_proto
from router_svc.tracing import DecisionSpans, Stopwatch

LOG = structlog.get_logger(__name__)

# The parked that are picked for without letting the loop run; about 5 ms.
REQUESTS_PER_SLICE = 64
# Looking through the queue takes at most one part in so many of the loop's time.
LOOP_TIME_DIVISOR = 4
# What changes by the passing of time is noticed so much later at least: no loop of timers.
TIMER_DELAY_MIN_S = 0.005
# The reason of the error that a router which is closing gives to those who wait.
DRAINING_REASON = "ROUTER_DRAINING"

OnDecision = Callable[[Decision | MeshError], None]


@dataclass(frozen=True, slots=True)
class _PendingReply:
    """What a parked request needs when its turn comes."""

    queued: QueuedRequest
    on_decision: OnDecision
    stopwatch: Stopwatch
    traceparent: str


class Decisions:
    """Asks the core, and keeps those who wait. `clock` is the one that feeds the core, seconds."""

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
        self._next_slice: asyncio.TimerHandle | None = (
            None  # The next call of `_serve_queue_slice`.
        )
        self._timer: asyncio.TimerHandle | None = None  # Of `serve_queue`, when time has passed.
        self._timer_at = 0.0  # By the clock.
        self._is_serving = False
        self._freed_ranks: dict[Placement, None] = {}  # Whose relief nobody has profited from yet.
        self._is_rescanning = False  # A sweep through the queue is due, or to be gone on with.
        self._rescan_again = False  # Another one is due after it.
        self._rebound_sessions: dict[SessionName, None] = {}  # Bound anew while somebody waited.
        self._next_slice_at = 0.0  # Loop time.
        self._is_closed = False
        events = router.events
        events.capacity_freed.subscribe(self._on_capacity_freed)
        events.frontend_session_superseded.subscribe(self.withdraw_session)
        events.fleet_changed.subscribe(self._on_fleet_changed)
        events.session_moved.subscribe(self._on_session_moved)

    def submit(
        self,
        message: router_pb2.Query,
        key: BookingKey | None,
        session: int | None,
        traceparent: str,
        on_decision: OnDecision,
    ) -> Decision | QueuedRequest:
        """The decision, booked under `key` unless that is None; or, where there is a queue and no
        worker has room, a place in it: then `on_decision` is called later.

        Without a key nothing is booked, and so nobody waits. Raises what `Router.admit` does; one
        who asked for the same key before and still waits is answered Conflict (ASKED_AGAIN).
        """
        stopwatch = Stopwatch()
        decided: Decision | QueuedRequest
        try:
            if session is not None and self._router.book.is_superseded(session):
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
                self._supersede(key)
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
            bug = InternalError("the router failed to decide")
            bug.__cause__ = error
            self._record_failure(bug, message.model, stopwatch, traceparent)
            raise bug from error
        laps_s = (*stopwatch.laps_s(), stopwatch.total_s())
        self._record_decision(query, key, decided, stopwatch, traceparent, laps_s)
        return decided

    def with_hashes(self, query: Query, message: router_pb2.Query) -> Query:
        """The query with the hashes of its token ids, where it has those and no hashes."""
        if not message.token_ids or query.prefix_hashes or not query.model:
            return query
        block_size = block_size_of(query, self._router.fleet.block_size(query.model))
        lora_name = query.routing.lora_name if query.routing is not None else None
        hashes = self._hasher_cache.prefix_hashes(
            message.token_ids, model=query.model, block_size=block_size, lora_name=lora_name or ""
        )
        return replace(
            query, prefix_hashes=hashes, hash_scheme=HASH_SCHEME_ID, block_size=block_size
        )

    def withdraw(self, queued: QueuedRequest) -> bool:
        """Whoever asked is gone: no answer, no booking. False if it does not wait any more."""
        pending = self._pending.get(queued.key)
        if pending is None or pending.queued is not queued:
            return False
        self._dequeue(queued.key)
        self._finish_cancelled(pending)
        return True

    def withdraw_session(self, session: int) -> int:
        """The same for all that a session has parked; how many."""
        withdrawn = self._router.queue.withdraw_session(session)
        for queued in withdrawn:
            self._finish_cancelled(self._pending.pop(queued.key))
        return len(withdrawn)

    def cancel_request(self, key: BookingKey) -> bool:
        """The request under `key` has ended: its question, if it waits, is answered
        RequestCancelled. False if it does not wait.
        """
        pending = self._dequeue(key)
        if pending is not None:
            error = RequestCancelled("the request was given up while it waited for a worker")
            self._finish(pending, error)
        return pending is not None

    def serve_queue(self) -> None:
        """Time has passed: place whoever need not wait any more because of that, and turn away who
        has waited too long.

        To be called now and then; reliefs and changes of the fleet are noticed by themselves.
        """
        self._router.expire(self._clock())
        self._freed_ranks.update((slot.placement, None) for slot in self._router.queue.slots)
        self._is_rescanning |= self._router.needs_periodic_rescan
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._serve_queue_slice()

    def _serve_queue_slice(self) -> None:
        if self._next_slice is not None:
            self._next_slice.cancel()
            self._next_slice = None
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        self._is_serving = True  # The next turn is set when it is known how long this one took.
        try:
            self._serve_slice()
        finally:
            finished_at = loop.time()
            self._next_slice_at = finished_at + (LOOP_TIME_DIVISOR - 1) * (finished_at - started_at)
            self._is_serving = False
        if self._freed_ranks or self._is_rescanning or self._rebound_sessions:
            self._schedule_slice()
        self._set_timer()

    def _serve_slice(self) -> None:
        """One slice of what is to be looked at."""
        now, router = self._clock(), self._router
        for queued in router.queue.pop_overdue(now):
            pending = self._pending.pop(queued.key)
            self._finish(pending, queue_timeout_error(queued, now - queued.queued_at))
        if not router.queue:
            self._freed_ranks.clear()
            self._rebound_sessions.clear()
            self._is_rescanning = self._rescan_again = False
            return
        remaining = REQUESTS_PER_SLICE
        # However often sessions move, or the fleet changes, half of what is left is for others.
        reserved = remaining // 2 if self._is_rescanning or self._freed_ranks else 0
        for session in tuple(self._rebound_sessions):
            if remaining <= reserved:
                break
            del self._rebound_sessions[session]
            remaining -= self._deliver(
                router.rebound_requests(session, now, self._rng), remaining - reserved
            )[0]
            if remaining <= reserved:
                self._rebound_sessions[session] = None  # There may be more of it.
        if self._is_rescanning and remaining > 0:
            # First, for those not seen since the fleet changed hold up whom a relief would help.
            share = remaining // 2 if self._freed_ranks else remaining
            count, _ = self._deliver(router.rescan(now, self._rng), share)
            remaining -= count
            if count < share:
                self._is_rescanning, self._rescan_again = self._rescan_again, False
        for placement in tuple(self._freed_ranks):
            if remaining <= 0:
                return
            del self._freed_ranks[placement]
            count, placed = self._deliver(
                router.capacity_freed(placement, now, self._rng), remaining
            )
            remaining -= count
            if remaining <= 0 and placed:
                self._freed_ranks[placement] = None  # It may have more room.

    def _deliver(self, outcomes: Iterator[AdmissionResult], outcomes_max: int) -> tuple[int, int]:
        """Answer the first of these; how many were looked at, and how many answered."""
        count = delivered = 0
        for queued, outcome in islice(outcomes, outcomes_max):
            count += 1
            if outcome is not None:
                delivered += 1
                self._finish(self._pending.pop(queued.key), outcome)
        return count, delivered

    def close(self) -> None:
        """Nobody waits here any more: all who do are answered Unavailable (ROUTER_DRAINING)."""
        self._is_closed = True
        for queued in self._router.queue.clear():
            self._finish(self._pending.pop(queued.key), _draining())

    # Inside.

    def _on_capacity_freed(self, placement: Placement) -> None:
        """Load went down there."""
        if self._pending and self._router.has_waiters_for(placement):
            self._freed_ranks[placement] = None
            self._schedule_slice()

    def _on_session_moved(self, session: SessionName) -> None:
        """Whoever waits where it was bound before need not any more."""
        if self._pending and self._router.queue.has_queued_for_session(session):
            self._rebound_sessions[session] = None
            self._schedule_slice()

    def _on_fleet_changed(self) -> None:
        if self._pending:
            self._rescan_again, self._is_rescanning = self._is_rescanning, True
            self._schedule_slice()

    def _schedule_slice(self) -> None:
        if self._pending and self._next_slice is None and not self._is_serving:
            loop = asyncio.get_running_loop()
            self._next_slice = loop.call_at(self._next_slice_at, self._serve_queue_slice)

    def _set_timer(self) -> None:
        """For the next time at which somebody may be let in, or turned away, by time alone.

        A report puts off when its worker's load is forgotten: at worst it rings too early.
        """
        now = self._clock()
        is_soon = self._timer is not None and self._timer_at - now <= REPORT_MAX_AGE_S
        if is_soon or not self._pending:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._router.next_wakeup_at(now)
        after_s = max(TIMER_DELAY_MIN_S, self._timer_at - now)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(after_s, self.serve_queue)

    def _enqueue(self, pending: _PendingReply) -> None:
        key = pending.queued.key
        if self._is_closed:
            self._router.queue.withdraw(key)
            raise _draining()
        self._pending[key] = pending
        self._set_timer()

    def _supersede(self, key: BookingKey) -> None:
        pending = self._dequeue(key)
        if pending is not None:
            error = Conflict("the same booking was asked for again meanwhile", reason="ASKED_AGAIN")
            self._finish(pending, error)

    def _dequeue(self, key: BookingKey) -> _PendingReply | None:
        pending = self._pending.pop(key, None)
        if pending is not None:
            self._router.queue.withdraw(key)
        return pending

    def _finish(self, pending: _PendingReply, outcome: Decision | MeshError) -> None:
        """Answer, measure, trace."""
        queued, stopwatch = pending.queued, pending.stopwatch
        if not isinstance(outcome, MeshError):
            stopwatch.lap()
        pending.on_decision(outcome)
        queued_s = self._clock() - queued.queued_at
        self._metrics.record_queue_wait(queued_s)
        if isinstance(outcome, MeshError):
            self._record_failure(
                outcome, queued.query.model, stopwatch, pending.traceparent, queued_s
            )
        else:
            hashed_s, matched_s, scheduled_s = stopwatch.laps_s()
            total_s = max(0.0, stopwatch.total_s() - queued_s)
            laps_s = (hashed_s, matched_s, max(0.0, scheduled_s - queued_s), total_s)
            self._record_decision(
                queued.query, queued.key, outcome, stopwatch, pending.traceparent, laps_s
            )

    def _finish_cancelled(self, pending: _PendingReply) -> None:
        """Like `_finish` where nobody is there to be answered."""
        queued_s = self._clock() - pending.queued.queued_at
        self._metrics.record_queue_wait(queued_s)
        withdrawn = RequestCancelled("who asked is gone")
        model = pending.queued.query.model
        self._record_failure(withdrawn, model, pending.stopwatch, pending.traceparent, queued_s)

    def _record_decision(
        self,
        query: Query,
        key: BookingKey | None,
        decision: Decision,
        stopwatch: Stopwatch,
        traceparent: str,
        laps_s: Sequence[float],
    ) -> None:
        """Measure and trace a decision. laps_s: as `Metrics.placed` takes them."""
        try:
            self._metrics.decided("placed", laps_s[-1])
            self._metrics.placed(query, decision, laps_s)
            self.spans.placed(traceparent, stopwatch, query, key, decision)
        except Exception:
            LOG.exception("decision not measured", model=query.model)

    def _record_failure(
        self,
        error: MeshError,
        model: str,
        stopwatch: Stopwatch,
        traceparent: str,
        queued_s: float = 0.0,
    ) -> None:
        """Log, measure and trace a failure. The error may be somebody else's, and ill-formed."""
        if isinstance(error, InternalError):
            cause = error.__cause__ or error
            LOG.error("decision failed", model=model, reason=error.message, exc_info=cause)
        try:
            self._metrics.decided(error.kind.lower(), max(0.0, stopwatch.total_s() - queued_s))
            self._metrics.refused(error)
            self.spans.failed(traceparent, stopwatch, error)
        except Exception:
            LOG.exception("failure not measured", error=type(error).__name__)


def _draining() -> Unavailable:
    return Unavailable("this router is closing: ask another one", 1.0, reason=DRAINING_REASON)
