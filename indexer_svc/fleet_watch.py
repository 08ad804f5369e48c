"""Discovery: the last snapshot of the fleet, and who has been missed since when."""

from __future__ import annotations

from collections.abc import Callable

from common.registry.instances import Instance, Snapshot
from common.registry.registry import Registry, follow


class FleetWatch:
    """Follows one namespace. `snapshot` has revision 0 until something was seen."""

    def __init__(self, registry: Registry, namespace: str, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._namespace = namespace
        self._clock = clock
        self._absent_since: dict[int, float] = {}
        self.snapshot = Snapshot()

    def worker(self, worker_id: int) -> Instance | None:
        """A worker that is there."""
        instance = self.snapshot.instances.get(worker_id)
        return instance if instance is not None and instance.service == "worker" else None

    def is_absent(self, worker_id: int) -> bool:
        """Whether a worker is missing; not before anything was seen."""
        return self.snapshot.revision > 0 and self.worker(worker_id) is None

    def absent_since(self, worker_id: int) -> float | None:
        """When a worker was missed first; None while it is not.

        To be asked about workers that are kept: who is asked about is remembered until `forget`.
        """
        if not self.is_absent(worker_id):
            self._absent_since.pop(worker_id, None)
            return None
        return self._absent_since.setdefault(worker_id, self._clock())

    def forget(self, worker_id: int) -> None:
        """Nobody will ask about it any more."""
        self._absent_since.pop(worker_id, None)

    async def run(self) -> None:
        """Follow for ever; ends by cancellation only."""
        await follow(self._registry, self._namespace, self._take)

    def _take(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
