"""Every decision of a router process: made at once, or when the queue lets it; measured and traced.

The core never waits; here is who does. An answer that comes late goes to the `Answer` that came
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

from common.errors import Bug, Conflict, MeshError, RequestCancelled, Unavailable
from common.kv.hashing import SCHEME_ID
from kvmesh.router.v1 import router_pb2
from router_svc.core.admission import Parked, overdue_error
from router_svc.core.fleet import Placement
from router_svc.core.load_tracker import REPORT_MAX_AGE_S, BookingKey
from router_svc.core.query import Query, block_size_of
from router_svc.core.router import Decision, Outcome, Router
from router_svc.core.sessions import SessionName
from router_svc.hashing import Hashers
from router_svc.metrics import Metrics
from router_svc.proto import query_from_proto
from router_svc.tracing import DecisionSpans, Stopwatch

LOG = structlog.get_logger(__name__)

# The parked that are picked for without letting the loop run; about 5 ms.
SLICE = 64
# Looking through the queue takes at most one part in so many of the loop's time.
PART = 4
# What changes by the passing of time is noticed so much later at least: no loop of timers.
LAPSE_MIN_S = 0.005
# The reason of the error that a router which is closing gives to those who wait.
DRAINING = "ROUTER_DRAINING"

Answer = Callable[[Decision | MeshError], None]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """What a parked request needs when its turn comes."""

    parked: Parked
    answer: Answer
    watch: Stopwatch
    traceparent: str


class Decisions:
    """Asks the core, and keeps those who wait. `clock` is the one that feeds the core, seconds."""

    def __init__(
        self,
        router: Router,
        metrics: Metrics,
        *,
        rng: Random,
        hashers: Hashers,
        spans: DecisionSpans,
        clock: Callable[[], float],
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._rng = rng
        self._hashers = hashers
        self.spans = spans
        self._clock = clock
        self._waiting: dict[BookingKey, _Waiting] = {}
        self._turn: asyncio.TimerHandle | None = None  # The next call of `_serve_parked`.
        self._alarm: asyncio.TimerHandle | None = None  # Of `serve_parked`, when time has passed.
        self._alarm_at = 0.0  # By the clock.
        self._is_serving = False
        self._relieved: dict[Placement, None] = {}  # Whose relief nobody has profited from yet.
        self._is_sweeping = False  # A sweep through the queue is due, or to be gone on with.
        self._sweeps_again = False  # Another one is due after it.
        self._strays: dict[SessionName, None] = {}  # Bound anew while somebody waited.
        self._next_at = 0.0  # Loop time.
        self._is_closed = False
        router.book.relieved = self._was_relieved
        router.book.session_over = self.withdraw_session
        router.fleet_changed = self._fleet_changed
        router.affinity.moved = self._session_moved

    def ask(
        self,
        message: router_pb2.Query,
        key: BookingKey | None,
        session: int | None,
        traceparent: str,
        answer: Answer,
    ) -> Decision | Parked:
        """The decision, booked under `key` unless that is None; or, where there is a queue and no
        worker has room, a place in it: then `answer` is called later.

        Without a key nothing is booked, and so nobody waits. Raises what `Router.admit` does; one
        who asked for the same key before and still waits is answered Conflict (ASKED_AGAIN).
        """
        watch = Stopwatch()
        decided: Decision | Parked
        try:
            if session is not None and self._router.book.is_superseded(session):
                raise Conflict("a later session of this frontend has begun", reason="SUPERSEDED")
            query = query_from_proto(message)
            if message.token_ids:
                query = self.hashed(query, message)
            watch.lap()
            matches = self._router.match(query)
            watch.lap()
            now, rng = self._clock(), self._rng
            if key is None:
                decided = self._router.decide(query, None, now, rng, None, matches)
            else:
                self._supersede(key)
                decided = self._router.admit(query, key, now, rng, session, matches)
            if isinstance(decided, Parked):
                self._park(_Waiting(decided, answer, watch, traceparent))
                return decided
            watch.lap()
        except MeshError as error:
            self._failed(error, message.model, watch, traceparent)
            raise
        except Exception as error:
            # One request fails, the session does not.
            bug = Bug("the router failed to decide")
            bug.__cause__ = error
            self._failed(bug, message.model, watch, traceparent)
            raise bug from error
        laps_s = (*watch.laps_s(), watch.total_s())
        self._placed(query, key, decided, watch, traceparent, laps_s)
        return decided

    def hashed(self, query: Query, message: router_pb2.Query) -> Query:
        """The query with the hashes of its token ids, where it has those and no hashes."""
        if not message.token_ids or query.prefix_hashes or not query.model:
            return query
        block_size = block_size_of(query, self._router.fleet.block_size(query.model))
        lora_name = query.routing.lora_name if query.routing is not None else None
        hashes = self._hashers.prefix_hashes(
            message.token_ids, model=query.model, block_size=block_size, lora_name=lora_name or ""
        )
        return replace(query, prefix_hashes=hashes, hash_scheme=SCHEME_ID, block_size=block_size)

    def withdraw(self, parked: Parked) -> bool:
        """Whoever asked is gone: no answer, no booking. False if it does not wait any more."""
        waiting = self._waiting.get(parked.key)
        if waiting is None or waiting.parked is not parked:
            return False
        self._leave(parked.key)
        self._cancelled(waiting)
        return True

    def withdraw_session(self, session: int) -> int:
        """The same for all that a session has parked; how many."""
        gone = self._router.queue.withdraw_session(session)
        for parked in gone:
            self._cancelled(self._waiting.pop(parked.key))
        return len(gone)

    def give_up(self, key: BookingKey) -> bool:
        """The request under `key` has ended: its question, if it waits, is answered
        RequestCancelled. False if it does not wait.
        """
        waiting = self._leave(key)
        if waiting is not None:
            error = RequestCancelled("the request was given up while it waited for a worker")
            self._end(waiting, error)
        return waiting is not None

    def serve_parked(self) -> None:
        """Time has passed: place whoever need not wait any more because of that, and turn away who
        has waited too long.

        To be called now and then; reliefs and changes of the fleet are noticed by themselves.
        """
        self._router.expire(self._clock())
        self._relieved.update((spot.placement, None) for spot in self._router.queue.spots)
        self._is_sweeping |= self._router.sweeps
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._serve_parked()

    def _serve_parked(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._is_serving = True  # The next turn is set when it is known how long this one took.
        try:
            self._serve()
        finally:
            ended = loop.time()
            self._next_at = ended + (PART - 1) * (ended - began)
            self._is_serving = False
        if self._relieved or self._is_sweeping or self._strays:
            self._wake()
        self._set_alarm()

    def _serve(self) -> None:
        """One slice of what is to be looked at."""
        now, router = self._clock(), self._router
        for parked in router.queue.overdue(now):
            waiting = self._waiting.pop(parked.key)
            self._end(waiting, overdue_error(parked, now - parked.parked_at))
        if not router.queue:
            self._relieved.clear()
            self._strays.clear()
            self._is_sweeping = self._sweeps_again = False
            return
        left = SLICE
        # However often sessions move, or the fleet changes, half of what is left is for others.
        kept = left // 2 if self._is_sweeping or self._relieved else 0
        for session in tuple(self._strays):
            if left <= kept:
                break
            del self._strays[session]
            left -= self._tell(router.strays(session, now, self._rng), left - kept)[0]
            if left <= kept:
                self._strays[session] = None  # There may be more of it.
        if self._is_sweeping and left > 0:
            # First, for those not seen since the fleet changed hold up whom a relief would help.
            part = left // 2 if self._relieved else left
            count, _ = self._tell(router.admitted(now, self._rng), part)
            left -= count
            if count < part:
                self._is_sweeping, self._sweeps_again = self._sweeps_again, False
        for placement in tuple(self._relieved):
            if left <= 0:
                return
            del self._relieved[placement]
            count, placed = self._tell(router.relieved(placement, now, self._rng), left)
            left -= count
            if left <= 0 and placed:
                self._relieved[placement] = None  # It may have more room.

    def _tell(self, outcomes: Iterator[Outcome], count_max: int) -> tuple[int, int]:
        """Answer the first of these; how many were looked at, and how many answered."""
        count = answered = 0
        for parked, outcome in islice(outcomes, count_max):
            count += 1
            if outcome is not None:
                answered += 1
                self._end(self._waiting.pop(parked.key), outcome)
        return count, answered

    def close(self) -> None:
        """Nobody waits here any more: all who do are answered Unavailable (ROUTER_DRAINING)."""
        self._is_closed = True
        for parked in self._router.queue.clear():
            self._end(self._waiting.pop(parked.key), _draining())

    # Inside.

    def _was_relieved(self, placement: Placement) -> None:
        """Load went down there."""
        if self._waiting and self._router.awaits(placement):
            self._relieved[placement] = None
            self._wake()

    def _session_moved(self, session: SessionName) -> None:
        """Whoever waits where it was bound before need not any more."""
        if self._waiting and self._router.queue.is_bound(session):
            self._strays[session] = None
            self._wake()

    def _fleet_changed(self) -> None:
        if self._waiting:
            self._sweeps_again, self._is_sweeping = self._is_sweeping, True
            self._wake()

    def _wake(self) -> None:
        if self._waiting and self._turn is None and not self._is_serving:
            loop = asyncio.get_running_loop()
            self._turn = loop.call_at(self._next_at, self._serve_parked)

    def _set_alarm(self) -> None:
        """For the next time at which somebody may be let in, or turned away, by time alone.

        A report puts off when its worker's load is forgotten: at worst it rings too early.
        """
        now = self._clock()
        is_soon = self._alarm is not None and self._alarm_at - now <= REPORT_MAX_AGE_S
        if is_soon or not self._waiting:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = self._router.wakes_at(now)
        after_s = max(LAPSE_MIN_S, self._alarm_at - now)
        loop = asyncio.get_running_loop()
        self._alarm = loop.call_later(after_s, self.serve_parked)

    def _park(self, waiting: _Waiting) -> None:
        key = waiting.parked.key
        if self._is_closed:
            self._router.queue.withdraw(key)
            raise _draining()
        self._waiting[key] = waiting
        self._set_alarm()

    def _supersede(self, key: BookingKey) -> None:
        waiting = self._leave(key)
        if waiting is not None:
            error = Conflict("the same booking was asked for again meanwhile", reason="ASKED_AGAIN")
            self._end(waiting, error)

    def _leave(self, key: BookingKey) -> _Waiting | None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._router.queue.withdraw(key)
        return waiting

    def _end(self, waiting: _Waiting, outcome: Decision | MeshError) -> None:
        """Answer, measure, trace."""
        parked, watch = waiting.parked, waiting.watch
        if not isinstance(outcome, MeshError):
            watch.lap()
        waiting.answer(outcome)
        queued_s = self._clock() - parked.parked_at
        self._metrics.waited(queued_s)
        if isinstance(outcome, MeshError):
            self._failed(outcome, parked.query.model, watch, waiting.traceparent, queued_s)
        else:
            hashed_s, matched_s, scheduled_s = watch.laps_s()
            total_s = max(0.0, watch.total_s() - queued_s)
            laps_s = (hashed_s, matched_s, max(0.0, scheduled_s - queued_s), total_s)
            self._placed(parked.query, parked.key, outcome, watch, waiting.traceparent, laps_s)

    def _cancelled(self, waiting: _Waiting) -> None:
        """Like `_end` where nobody is there to be answered."""
        queued_s = self._clock() - waiting.parked.parked_at
        self._metrics.waited(queued_s)
        gone = RequestCancelled("who asked is gone")
        model = waiting.parked.query.model
        self._failed(gone, model, waiting.watch, waiting.traceparent, queued_s)

    def _placed(
        self,
        query: Query,
        key: BookingKey | None,
        decision: Decision,
        watch: Stopwatch,
        traceparent: str,
        laps_s: Sequence[float],
    ) -> None:
        """Measure and trace a decision. laps_s: as `Metrics.placed` takes them."""
        try:
            self._metrics.decided("placed", laps_s[-1])
            self._metrics.placed(query, decision, laps_s)
            self.spans.placed(traceparent, watch, query, key, decision)
        except Exception:
            LOG.exception("decision not measured", model=query.model)

    def _failed(
        self,
        error: MeshError,
        model: str,
        watch: Stopwatch,
        traceparent: str,
        queued_s: float = 0.0,
    ) -> None:
        """Log, measure and trace a failure. The error may be somebody else's, and ill-formed."""
        if isinstance(error, Bug):
            cause = error.__cause__ or error
            LOG.error("decision failed", model=model, why=error.message, exc_info=cause)
        try:
            self._metrics.decided(error.kind.lower(), max(0.0, watch.total_s() - queued_s))
            self._metrics.refused(error)
            self.spans.failed(traceparent, watch, error)
        except Exception:
            LOG.exception("failure not measured", error=type(error).__name__)


def _draining() -> Unavailable:
    return Unavailable("this router is closing: ask another one", 1.0, reason=DRAINING)
