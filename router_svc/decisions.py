"""Every decision of a router process: made at once, or when the queue lets it; measured and traced.

The core never waits; here is who does. An answer that comes late goes to the `Answer` that came
with the question, exactly once, unless whoever asked withdraws it first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

import structlog

from common.blocks import SCHEME_ID
from common.errors import Bug, Conflict, MeshError, RequestCancelled, Unavailable
from kvmesh.router.v1 import router_pb2
from router_svc.core.load import BookingKey
from router_svc.core.query import Query, block_size_of
from router_svc.core.queue import Parked, overdue_error
from router_svc.core.route import Decision, Router
from router_svc.hashing import Hashers
from router_svc.metrics import Metrics
from router_svc.router_proto import query_from_proto
from router_svc.tracing import DecisionSpans, Stopwatch

LOG = structlog.get_logger(__name__)

# The parked that are picked for without letting the loop run; about 5 ms.
SLICE = 64
# Looking through the queue takes at most one part in so many of the loop's time.
PART = 4
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
        self._turn: asyncio.TimerHandle | None = None  # The next call of `serve_parked`.
        self._is_serving = False
        self._is_midway = False  # A sweep through the queue is to be gone on with.
        self._was_relieved = False  # Since that sweep, or else the next one, began.
        self._next_at = 0.0  # Loop time.
        self._is_closed = False
        router.book.relieved = self._relieved

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
            self._failed(error, watch, traceparent)
            raise
        except Exception as error:
            # A selector may be somebody else's code: one request fails, the session does not.
            LOG.exception("decision failed", model=message.model)
            bug = Bug("the router failed to decide")
            self._failed(bug, watch, traceparent)
            raise bug from error
        self._metrics.decided("placed", watch.total_s())
        self._metrics.placed(query, decided, (*watch.laps_s(), watch.total_s()))
        self.spans.placed(traceparent, watch, query, key, decided)
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
        """Place whoever need not wait any more, and turn away who has waited too long.

        To be called now and then: other reasons than the passing of time are noticed at once.
        """
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        if not self._is_midway:
            self._was_relieved = False
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._is_serving = True  # The next turn is set when it is known how long this one took.
        try:
            self._is_midway = self._serve()
        finally:
            ended = loop.time()
            self._next_at = ended + (PART - 1) * (ended - began)
            self._is_serving = False
        if self._is_midway or self._was_relieved:
            self._wake()

    def _serve(self) -> bool:
        """Whether there may be more to pick for in the same sweep."""
        now, queue = self._clock(), self._router.queue
        for parked in queue.overdue(now):
            waiting = self._waiting.pop(parked.key)
            self._end(waiting, overdue_error(parked, now - parked.parked_at))
        count = 0
        if queue:
            for parked, outcome in islice(self._router.admitted(now, self._rng), SLICE):
                count += 1
                if outcome is not None:
                    self._end(self._waiting.pop(parked.key), outcome)
        return count == SLICE

    def close(self) -> None:
        """Nobody waits here any more: all who do are answered Unavailable (ROUTER_DRAINING)."""
        self._is_closed = True
        for parked in self._router.queue.clear():
            self._end(self._waiting.pop(parked.key), _draining())

    # Inside.

    def _relieved(self) -> None:
        """Load went down somewhere, or the fleet changed."""
        self._was_relieved = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting and self._turn is None and not self._is_serving:
            loop = asyncio.get_running_loop()
            self._turn = loop.call_at(self._next_at, self.serve_parked)

    def _park(self, waiting: _Waiting) -> None:
        key = waiting.parked.key
        if self._is_closed:
            self._router.queue.withdraw(key)
            raise _draining()
        self._waiting[key] = waiting

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
        """Measure, trace, answer."""
        parked, watch = waiting.parked, waiting.watch
        queued_s = self._clock() - parked.parked_at
        self._metrics.waited(queued_s)
        if isinstance(outcome, MeshError):
            if isinstance(outcome, Bug):
                LOG.error("decision failed", model=parked.query.model, exc_info=outcome.__cause__)
            self._failed(outcome, watch, waiting.traceparent, queued_s)
        else:
            watch.lap()
            hashed_s, matched_s, scheduled_s = watch.laps_s()
            total_s = max(0.0, watch.total_s() - queued_s)
            laps_s = (hashed_s, matched_s, max(0.0, scheduled_s - queued_s), total_s)
            self._metrics.decided("placed", total_s)
            self._metrics.placed(parked.query, outcome, laps_s)
            self.spans.placed(waiting.traceparent, watch, parked.query, parked.key, outcome)
        waiting.answer(outcome)

    def _cancelled(self, waiting: _Waiting) -> None:
        """Like `_end` where nobody is there to be answered."""
        queued_s = self._clock() - waiting.parked.parked_at
        self._metrics.waited(queued_s)
        gone = RequestCancelled("who asked is gone")
        self._failed(gone, waiting.watch, waiting.traceparent, queued_s)

    def _failed(
        self, error: MeshError, watch: Stopwatch, traceparent: str, queued_s: float = 0.0
    ) -> None:
        self._metrics.decided(error.kind.lower(), max(0.0, watch.total_s() - queued_s))
        self._metrics.refused(error)
        self.spans.failed(traceparent, watch, error)


def _draining() -> Unavailable:
    return Unavailable("this router is closing: ask another one", 1.0, reason=DRAINING)
