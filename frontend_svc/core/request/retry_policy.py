"""Limits of retries and migrations; the machine beside it decides each retry (pure).

Three limits protect the workers that are left when others fail:

- `RetryBudget`: retries as a fraction of recent requests, per frontend.
- `MigrationLimiter`: retried requests that compute their prompt at the same time, per worker.
- `ExclusionPolicy`: which workers one request avoids, and whether it waits for an open circuit.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from typing import Generic, TypeVar

from common.errors import MeshError, Unavailable

K = TypeVar("K", bound=Hashable)

# A worker computes prompts almost one after the other; more at once only delays new requests.
PERMITS_PER_WORKER = 32
WAITING_MAX = 1024
# While all workers a request may use have an open circuit, it waits up to 30 * 0.1 s = 3 s.
EXCLUDED_RETRY_S = 0.1
EXCLUDED_RETRY_ATTEMPTS = 30

# Adapter -> available workers of a model that compute prompts and have it; "" counts all of them.
WorkerCount = Callable[[str], int]


class RetryBudget:
    """Limits the retries of a frontend to RETRY_FRACTION of its requests of the last WINDOW_S.
    RETRIES_MIN retries are allowed in any case. granted, refused: totals since the start."""

    RETRY_FRACTION = 0.1
    RETRIES_MIN = 64
    WINDOW_S = 10.0

    def __init__(self) -> None:
        self.granted = 0
        self.refused = 0
        self._window_start = 0.0
        # Of the previous half window and of the current one.
        self._requests = [0, 0]
        self._retries = [0, 0]

    def count_request(self, now: float) -> None:
        self._advance_window(now)
        self._requests[1] += 1

    def take(self, now: float) -> bool:
        """Whether the budget allows one more retry; if so, counts it."""
        self._advance_window(now)
        if sum(self._retries) >= max(self.RETRIES_MIN, self.RETRY_FRACTION * sum(self._requests)):
            self.refused += 1
            return False
        self.granted += 1
        self._retries[1] += 1
        return True

    def _advance_window(self, now: float) -> None:
        half = self.WINDOW_S / 2
        elapsed = now - self._window_start
        if elapsed < half:
            return
        is_adjacent = elapsed < 2 * half
        for counts in (self._requests, self._retries):
            counts[:] = [counts[1] if is_adjacent else 0, 0]
        self._window_start = now - elapsed % half


class Permit(Enum):
    """Result of a permit request."""

    GRANTED = auto()
    QUEUED = auto()  # `MigrationLimiter.release` grants it later
    QUEUE_FULL = auto()


@dataclass(slots=True)
class _ModelQueue(Generic[K]):
    # Request -> its adapter, and the number of requests per adapter.
    computing: dict[K, str] = field(default_factory=dict)
    by_adapter: Counter[str] = field(default_factory=Counter)
    # (arrival, sequence number, request, adapter). The number breaks ties, so that requests
    # are never compared.
    waiting: list[tuple[float, int, K, str]] = field(default_factory=list)

    def begin(self, request: K, adapter: str) -> None:
        self.computing[request] = adapter
        self.by_adapter[adapter] += 1

    def end(self, request: K) -> None:
        adapter = self.computing.pop(request, None)
        if adapter is not None:
            self.by_adapter[adapter] -= 1


class MigrationLimiter(Generic[K]):
    """Limits how many retried requests of a model compute their prompt at once.

    A retried request computes its prompt again, and the tokens generated so far. `per_worker`
    requests run per available worker; the others wait, ordered by arrival of the request. If
    `waiting_max` requests wait, the queue is full. An adapter has a limit of its own, by the
    workers that have it, within the limit of its model; a request that waits for one adapter does
    not block requests that can run elsewhere.

    Invariants: a request is queued or counted at most once; if a request waits, another request of
    its model computes, so the release of that one admits it.
    """

    def __init__(
        self, per_worker: int = PERMITS_PER_WORKER, waiting_max: int = WAITING_MAX
    ) -> None:
        self._per_worker = per_worker
        self.waiting_max = waiting_max
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
    ) -> Permit:
        """Grants the request a permit or queues it. A request with a permit keeps it. arrived_at:
        when the client sent the request, seconds."""
        queue = self._queues.setdefault(model, _ModelQueue())
        if request in queue.computing:
            return Permit.GRANTED
        workers = cache(workers)
        adapters_ahead = {waiting_entry[3] for waiting_entry in queue.waiting}
        would_overtake = adapter in adapters_ahead or any(
            self._has_capacity(queue, a, workers) for a in adapters_ahead
        )
        if not would_overtake and self._has_capacity(queue, adapter, workers):
            queue.begin(request, adapter)
            return Permit.GRANTED
        if self.waiting >= self.waiting_max:
            return Permit.QUEUE_FULL
        self._sequence += 1
        insort(queue.waiting, (arrived_at, self._sequence, request, adapter))
        return Permit.QUEUED

    def release(self, model: str, request: K, workers: WorkerCount) -> list[K]:
        """Removes a request (first token, or end) and returns those that now have a permit. An
        unknown request is ignored."""
        queue = self._queues.get(model)
        if queue is None:
            return []
        queue.end(request)
        workers = cache(workers)
        admitted, still_waiting = [], []
        for waiting_entry in queue.waiting:
            _, _, other, adapter = waiting_entry
            if other == request:
                continue
            if self._has_capacity(queue, adapter, workers):
                queue.begin(other, adapter)
                admitted.append(other)
            else:
                still_waiting.append(waiting_entry)
        queue.waiting = still_waiting
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
    """Decides which workers one request avoids, and when it waits for a circuit to close. If every
    worker that the request may use has an open circuit, the request waits: usually a connection was
    cut for a moment, and a short wait costs less than a failure. A worker that failed the request
    may be used again if its circuit closes during the wait."""

    def __init__(self) -> None:
        self._waits_left = EXCLUDED_RETRY_ATTEMPTS
        self._failed: frozenset[int] = frozenset()
        self._open_circuits: frozenset[int] = frozenset()
        # Workers that failed the request and had an open circuit when a wait began.
        self._awaited: frozenset[int] = frozenset()

    def start_attempt(self, failed: frozenset[int]) -> None:
        self._failed = failed

    def excluded(
        self, pool: frozenset[int], open_circuits: frozenset[int]
    ) -> frozenset[int] | None:
        """Workers that the router must not choose; None: ask again after EXCLUDED_RETRY_S. pool:
        workers that serve the request's model and adapter; open_circuits: a subset of it."""
        closed_circuits = self._awaited - open_circuits
        self._failed -= closed_circuits
        self._awaited -= closed_circuits
        self._open_circuits = open_circuits
        not_failed = pool - self._failed
        if not_failed and not_failed <= open_circuits and self._take_wait():
            return None
        return self._failed | open_circuits

    def waits_after(self, error: MeshError) -> bool:
        """Whether to ask the router again after EXCLUDED_RETRY_S although it returned `error`. The
        router may lack workers that this frontend has, with an open circuit."""
        return isinstance(error, Unavailable) and bool(self._open_circuits) and self._take_wait()

    def _take_wait(self) -> bool:
        if not self._waits_left:
            return False
        self._waits_left -= 1
        self._awaited |= self._failed & self._open_circuits
        return True
