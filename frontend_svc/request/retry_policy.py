"""Limits of retries and migrations; the machine beside it decides each retry (pure).

The cause of a failure decides what limits the retry. If a worker was lost or is draining, every
request of it moves, and only the pace is limited. If the request or overload may be the cause,
retries have a budget.

- `RetryBudget`: retries after overload and internal errors as a fraction of recent requests, per
  frontend.
- `MigrationLimiter`: retried requests that compute their prompt at the same time, per worker.
- `ExclusionPolicy`: which workers one request avoids, and whether it waits for a worker.
- `WorkerWait`: when a waiting request asks the router again, and when its wait ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from typing import Generic, Literal, TypeVar

from common.errors import REQUEST_STALLED, InternalError, MeshError, Unavailable, WorkerLost
from common.streams.backoff import Backoff
from frontend_svc.recent_counts import RecentCounts

K = TypeVar("K", bound=Hashable)

# A worker computes prompts almost one after the other; more at once only delays new requests.
PERMITS_PER_WORKER = 32
# The worker's reason if it refuses a request because it is about to stop.
DRAINING = "DRAINING"
# The router's reason if all workers that could serve the request are excluded.
ALL_EXCLUDED = "ALL_EXCLUDED"
NO_ROUTER = "NO_ROUTER"
# How long a request waits for a worker, unless configured.
WORKER_WAIT_S = 30.0
# Interval at which a waiting request asks the router again; it doubles up to the maximum. A router
# may see a worker later, or earlier, than this frontend.
ASK_AGAIN_MIN_S = 0.1
ASK_AGAIN_MAX_S = 3.0

# Adapter -> available workers of a model that compute prompts and have it; "" counts all of them.
WorkerCount = Callable[[str], int]


def is_worker_loss(error: MeshError) -> bool:
    """Returns whether an attempt ended because its worker was lost or is draining, not by
    overload."""
    return isinstance(error, WorkerLost) or error.reason == DRAINING


def is_engine_failure(error: MeshError) -> bool:
    """Returns whether a leg ended because its engine failed at the request. Bad input, overload,
    a drain, a deadline, and failures of a handoff, which has two ends, are none."""
    if isinstance(error, WorkerLost):
        return error.reason in (WorkerLost.kind, REQUEST_STALLED)
    return isinstance(error, InternalError)


class RetryBudget:
    """Limits the retries of a frontend after overload and internal errors of engines to
    RETRY_FRACTION of its requests of the last WINDOW_S; RETRIES_MIN are allowed in any case.
    Retries after the loss of a worker have no limit.
    granted, refused: totals of all retries since the start."""

    RETRY_FRACTION = 0.1
    RETRIES_MIN = 64
    WINDOW_S = 10.0

    def __init__(self) -> None:
        self.granted = 0
        self.refused = 0
        self._recent = RecentCounts[Literal["requests", "retries"]](self.WINDOW_S)

    def count_request(self, now: float) -> None:
        self._recent.add("requests", now)

    def take(self, now: float, error: MeshError) -> bool:
        """Returns whether a retry after `error` is allowed; if so, counts it."""
        if is_worker_loss(error):
            self.granted += 1
            return True
        recent = self._recent
        recent.advance(now)
        if recent["retries"] >= max(self.RETRIES_MIN, self.RETRY_FRACTION * recent["requests"]):
            self.refused += 1
            return False
        self.granted += 1
        recent.add("retries", now)
        return True


@dataclass(slots=True)
class _ModelQueue(Generic[K]):
    # Request -> its adapter, and the number of requests per adapter.
    computing: dict[K, str] = field(default_factory=dict)
    by_adapter: Counter[str] = field(default_factory=Counter)
    waiting: set[K] = field(default_factory=set)
    # Adapter -> heap of (arrival, sequence number, request), with entries of requests that no
    # longer wait. The number breaks ties, so that requests are never compared.
    heaps: dict[str, list[tuple[float, int, K]]] = field(default_factory=dict)

    def begin(self, request: K, adapter: str) -> None:
        self.computing[request] = adapter
        self.by_adapter[adapter] += 1

    def end(self, request: K) -> None:
        self.waiting.discard(request)
        adapter = self.computing.pop(request, None)
        if adapter is not None:
            self.by_adapter[adapter] -= 1

    def adapters_waiting(self) -> list[str]:
        """Adapters with a waiting request, the earliest first."""
        for adapter, heap in list(self.heaps.items()):
            while heap and heap[0][2] not in self.waiting:
                heappop(heap)
            if not heap:
                del self.heaps[adapter]
        return sorted(self.heaps, key=lambda adapter: self.heaps[adapter][0][:2])


class MigrationLimiter(Generic[K]):
    """Limits how many retried requests of a model compute their prompt at once.

    A retried request computes its prompt again, and the tokens generated so far. `per_worker`
    requests run per available worker; the others wait, ordered by arrival of the request. Their
    number needs no limit: the frontend has admitted them. An adapter has a limit of its own, by the
    workers that have it, within the limit of its model; a request that waits for one adapter does
    not block requests that can run elsewhere.

    Invariants: a request is queued or counted at most once; if a request waits, another request of
    its model computes, so the release of that one admits it.
    """

    def __init__(self, per_worker: int = PERMITS_PER_WORKER) -> None:
        self._per_worker = per_worker
        self._queues: dict[str, _ModelQueue[K]] = {}
        self._sequence = 0

    @property
    def computing(self) -> int:
        return sum(len(queue.computing) for queue in self._queues.values())

    @property
    def waiting(self) -> int:
        return sum(len(queue.waiting) for queue in self._queues.values())

    def request_permit(
        self, model: str, request: K, arrived_at: float, workers: WorkerCount, adapter: str = ""
    ) -> bool:
        """Returns whether the request has a permit; if not, it is queued, and `release` grants
        it later.
        arrived_at: when the client sent the request, seconds."""
        queue = self._queues.setdefault(model, _ModelQueue())
        if request in queue.computing:
            return True
        workers = cache(workers)
        adapters_ahead = queue.adapters_waiting()
        would_overtake = adapter in adapters_ahead or any(
            self._has_capacity(queue, a, workers) for a in adapters_ahead
        )
        if not would_overtake and self._has_capacity(queue, adapter, workers):
            queue.begin(request, adapter)
            return True
        self._sequence += 1
        queue.waiting.add(request)
        heappush(queue.heaps.setdefault(adapter, []), (arrived_at, self._sequence, request))
        return False

    def release(self, model: str, request: K, workers: WorkerCount) -> list[K]:
        """Removes a request (first token, or end) and returns those that now have a permit. An
        unknown request is ignored."""
        queue = self._queues.get(model)
        if queue is None:
            return []
        queue.end(request)
        workers = cache(workers)
        admitted: list[K] = []
        while True:
            fitting = (a for a in queue.adapters_waiting() if self._has_capacity(queue, a, workers))
            adapter = next(fitting, None)
            if adapter is None:
                break
            _, _, other = heappop(queue.heaps[adapter])
            queue.waiting.discard(other)
            queue.begin(other, adapter)
            admitted.append(other)
        if not queue.computing:
            del self._queues[model]
        return admitted

    def _has_capacity(self, queue: _ModelQueue[K], adapter: str, workers: WorkerCount) -> bool:
        if len(queue.computing) >= self._limit(workers("")):
            return False
        return not adapter or queue.by_adapter[adapter] < self._limit(workers(adapter))

    def _limit(self, workers: int) -> int:
        return self._per_worker * max(1, workers)


class ExclusionPolicy:
    """Decides which workers one request avoids, and when it waits for a worker. A worker that
    failed the request is used again if its circuit was open and is closed, or after a wait if no
    other worker is left."""

    def __init__(self) -> None:
        self._failed: frozenset[int] = frozenset()
        self._pool: frozenset[int] = frozenset()
        self._open_circuits: frozenset[int] = frozenset()

    def start_attempt(self, failed: frozenset[int]) -> None:
        self._failed = failed

    def must_wait(self, pool: frozenset[int], open_circuits: frozenset[int]) -> bool:
        """Returns whether every worker that could serve the request has an open circuit, or has
        failed it.
        pool: workers that serve the request's model and adapter; open_circuits: a subset of it."""
        self._failed -= (self._open_circuits - open_circuits) & pool
        self._pool, self._open_circuits = pool, open_circuits
        if not pool <= self._failed:
            return pool - self._failed <= open_circuits
        self._failed -= pool - open_circuits
        return bool(pool)

    def excluded(self) -> frozenset[int]:
        """Workers that the router must not choose."""
        return self._failed | self._open_circuits

    def readmits_after(self, error: MeshError) -> bool:
        """Returns whether to ask the router again, after a wait, because workers that failed the
        request are excluded and have a closed circuit: no other worker of their role is left."""
        readmitted = (self._failed & self._pool) - self._open_circuits
        if error.reason != ALL_EXCLUDED or not readmitted:
            return False
        self._failed -= readmitted
        return True

    def waits_after(self, error: MeshError) -> bool:
        """Returns whether a worker that appears or recovers could serve the request that the router
        refused with `error`. An error with a field is one of the request's own constraints."""
        if not isinstance(error, Unavailable) or error.field is not None:
            return False
        return error.reason != NO_ROUTER or bool(self._open_circuits)


class WorkerWait:
    """The waits of one request for a worker. longest_s: limit of one wait, which may consist of
    several queries."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._ask_again = Backoff(ASK_AGAIN_MIN_S, ASK_AGAIN_MAX_S, None)
        # None: the request does not wait.
        self._until: float | None = None

    def ask_again_at(self, now: float) -> float | None:
        """Returns when to ask the router again, even if no worker appears before; None: the request
        has waited long enough."""
        if self._until is None:
            self._until = now + self._longest_s
        if now >= self._until:
            return None
        return min(now + self._ask_again.next_s(), self._until)

    def end(self) -> None:
        """Records a placement. A later wait has the whole time."""
        self._until = None

    def prefill_done(self) -> None:
        """Records that a worker computed the prompt: the next interval is the shortest one."""
        self._ask_again.reset()
