"""Who is tried again now and who waits, so that survivors are not buried under a death (pure).

A request that is tried again computes its prompt, and what it had generated, anew. Of those, so
many run at once per worker that is left; the others wait, the longest-standing request first. Past
WAITING_MAX a request is told to come again: by then the mesh has lost more than it can catch up on.

An adapter's re-routes run on the workers that have it: these set a limit of its own, within that of
its model. Who waits for one adapter holds up nobody who can run elsewhere.

Invariants: nobody is in twice; who waits implies that others of its model compute, so somebody's
leave lets it go; per model, and per adapter, workers that are left set the limit.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, Literal, TypeVar

K = TypeVar("K", bound=Hashable)

# A worker computes prompts nearly one after the other: more at once only pushes new ones back.
PER_WORKER = 32
WAITING_MAX = 1024

Permit = Literal["go", "wait", "full"]
# Adapter -> how many workers of a model are left, compute prompts and have it; "": the model's own.
WorkerCount = Callable[[str], int]


@dataclass(slots=True)
class _ModelQueue(Generic[K]):
    # Who -> its adapter, and how many of each that is.
    computing: dict[K, str] = field(default_factory=dict)
    by_adapter: Counter[str] = field(default_factory=Counter)
    # (arrival, order of asking, who, adapter); the order breaks ties: `request` is never compared.
    waiting: list[tuple[float, int, K, str]] = field(default_factory=list)

    def begin(self, request: K, adapter: str) -> None:
        self.computing[request] = adapter
        self.by_adapter[adapter] += 1

    def end(self, request: K) -> None:
        adapter = self.computing.pop(request, None)
        if adapter is not None:
            self.by_adapter[adapter] -= 1


class MigrationLimiter(Generic[K]):
    """The re-routes of one frontend, by model. K: whatever names a request."""

    def __init__(self, per_worker: int = PER_WORKER, waiting_max: int = WAITING_MAX) -> None:
        self._per_worker = per_worker
        self._waiting_max = waiting_max
        self._queues: dict[str, _ModelQueue[K]] = {}
        self._sequence = 0

    @property
    def computing(self) -> int:
        """Re-routes that have not had a token yet."""
        return sum(len(queue.computing) for queue in self._queues.values())

    @property
    def waiting(self) -> int:
        """Re-routes that wait for their turn."""
        return sum(len(queue.waiting) for queue in self._queues.values())

    def request_permit(
        self, model: str, request: K, arrived_at: float, workers: WorkerCount, adapter: str = ""
    ) -> Permit:
        """Whether a request may be tried again now. arrived_at: when its client sent it.

        Who waits is let go by `release`; who asks again while it computes may go on.
        """
        queue = self._queues.setdefault(model, _ModelQueue())
        if request in queue.computing:
            return "go"
        workers = cache(workers)
        adapters_ahead = {waiting_entry[3] for waiting_entry in queue.waiting}
        would_overtake = adapter in adapters_ahead or any(
            self._has_capacity(queue, a, workers) for a in adapters_ahead
        )
        if not would_overtake and self._has_capacity(queue, adapter, workers):
            queue.begin(request, adapter)
            return "go"
        if self.waiting >= self._waiting_max:
            return "full"
        self._sequence += 1
        insort(queue.waiting, (arrived_at, self._sequence, request, adapter))
        return "wait"

    def release(self, model: str, request: K, workers: WorkerCount) -> list[K]:
        """The request had its token, or is over; who may go now. Unknown: nobody."""
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
