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

Turn = Literal["go", "wait", "full"]
# Adapter -> how many workers of a model are left, compute prompts and have it; "": the model's own.
Survivors = Callable[[str], int]


@dataclass(slots=True)
class _Queue(Generic[K]):
    # Who -> its adapter, and how many of each that is.
    computing: dict[K, str] = field(default_factory=dict)
    by_adapter: Counter[str] = field(default_factory=Counter)
    # (arrival, order of asking, who, adapter); the order breaks ties: `who` is never compared.
    waiting: list[tuple[float, int, K, str]] = field(default_factory=list)

    def begin(self, who: K, adapter: str) -> None:
        self.computing[who] = adapter
        self.by_adapter[adapter] += 1

    def end(self, who: K) -> None:
        adapter = self.computing.pop(who, None)
        if adapter is not None:
            self.by_adapter[adapter] -= 1


class Reroutes(Generic[K]):
    """The re-routes of one frontend, by model. K: whatever names a request."""

    def __init__(self, per_worker: int = PER_WORKER, waiting_max: int = WAITING_MAX) -> None:
        self._per_worker = per_worker
        self._waiting_max = waiting_max
        self._queues: dict[str, _Queue[K]] = {}
        self._asked = 0

    @property
    def computing(self) -> int:
        """Re-routes that have not had a token yet."""
        return sum(len(queue.computing) for queue in self._queues.values())

    @property
    def waiting(self) -> int:
        """Re-routes that wait for their turn."""
        return sum(len(queue.waiting) for queue in self._queues.values())

    def ask(
        self, model: str, who: K, arrived_at: float, workers: Survivors, adapter: str = ""
    ) -> Turn:
        """Whether a request may be tried again now. arrived_at: when its client sent it.

        Who waits is let go by `leave`; who asks again while it computes may go on.
        """
        queue = self._queues.setdefault(model, _Queue())
        if who in queue.computing:
            return "go"
        workers = cache(workers)
        ahead = {waiter[3] for waiter in queue.waiting}
        overtakes = adapter in ahead or any(self._has_room(queue, a, workers) for a in ahead)
        if not overtakes and self._has_room(queue, adapter, workers):
            queue.begin(who, adapter)
            return "go"
        if self.waiting >= self._waiting_max:
            return "full"
        self._asked += 1
        insort(queue.waiting, (arrived_at, self._asked, who, adapter))
        return "wait"

    def leave(self, model: str, who: K, workers: Survivors) -> list[K]:
        """The request had its token, or is over; who may go now. Unknown: nobody."""
        queue = self._queues.get(model)
        if queue is None:
            return []
        queue.end(who)
        workers = cache(workers)
        let_go, still = [], []
        for waiter in queue.waiting:
            _, _, other, adapter = waiter
            if other == who:
                continue
            if self._has_room(queue, adapter, workers):
                queue.begin(other, adapter)
                let_go.append(other)
            else:
                still.append(waiter)
        queue.waiting = still
        if not queue.computing:
            del self._queues[model]
        return let_go

    def _has_room(self, queue: _Queue[K], adapter: str, workers: Survivors) -> bool:
        if len(queue.computing) >= self._limit(workers("")):
            return False
        return not adapter or queue.by_adapter[adapter] < self._limit(workers(adapter))

    def _limit(self, workers: int) -> int:
        return self._per_worker * max(1, workers)
