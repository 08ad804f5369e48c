"""Who is tried again now and who waits, so that survivors are not buried under a death (pure).

A request that is tried again computes its prompt, and what it had generated, anew. Of those, so
many run at once per worker that is left; the others wait, the longest-standing request first. Past
WAITING_MAX a request is told to come again: by then the mesh has lost more than it can catch up on.

Invariants: nobody is in twice; who waits implies that the limit's worth of others compute, so each
leave lets somebody go; per model, workers that are left set the limit.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

K = TypeVar("K", bound=Hashable)

# A worker computes prompts nearly one after the other: more at once only pushes new ones back.
PER_WORKER = 32
WAITING_MAX = 1024

Turn = Literal["go", "wait", "full"]


@dataclass(slots=True)
class _Queue(Generic[K]):
    computing: set[K] = field(default_factory=set)
    # (arrival, order of asking, who); the order breaks ties, so that `who` is never compared.
    waiting: list[tuple[float, int, K]] = field(default_factory=list)


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

    def ask(self, model: str, who: K, arrived_at: float, workers: int) -> Turn:
        """Whether a request may be tried again now. arrived_at: when its client sent it.

        workers: those of the model that are left and compute prompts. Who waits is let go by
        `leave`; who asks again while it computes may go on.
        """
        queue = self._queues.setdefault(model, _Queue())
        if who in queue.computing:
            return "go"
        if len(queue.computing) < self._limit(workers) and not queue.waiting:
            queue.computing.add(who)
            return "go"
        if self.waiting >= self._waiting_max:
            return "full"
        self._asked += 1
        insort(queue.waiting, (arrived_at, self._asked, who))
        return "wait"

    def leave(self, model: str, who: K, workers: int) -> list[K]:
        """The request had its token, or is over; who may go now. Unknown: nobody."""
        queue = self._queues.get(model)
        if queue is None:
            return []
        queue.computing.discard(who)
        queue.waiting = [entry for entry in queue.waiting if entry[2] != who]
        room = max(0, self._limit(workers) - len(queue.computing))
        let_go = [who for _, _, who in queue.waiting[:room]]
        del queue.waiting[:room]
        queue.computing.update(let_go)
        if not queue.computing:
            del self._queues[model]
        return let_go

    def _limit(self, workers: int) -> int:
        return self._per_worker * max(1, workers)
