"""Which workers are registered, and since when others are absent."""

from __future__ import annotations

from collections.abc import Callable

from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.registry.registry import Registry, follow


class WorkerPresence:
    """Follows one namespace. `snapshot` has revision 0 until the first update."""

    def __init__(self, registry: Registry, namespace: str, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._namespace = namespace
        self._clock = clock
        self._absent_since: dict[int, float] = {}
        self.snapshot = Snapshot()

    def worker(self, worker_id: int) -> Instance | None:
        instance = self.snapshot.instances.get(worker_id)
        return instance if instance is not None and instance.service == "worker" else None

    def is_absent(self, worker_id: int) -> bool:
        """Returns whether a worker is absent; False before the first update."""
        return self.snapshot.revision > 0 and self.worker(worker_id) is None

    def absent_since(self, worker_id: int) -> float | None:
        """Returns when the first query since `forget` found it absent; None if present."""
        if not self.is_absent(worker_id):
            self._absent_since.pop(worker_id, None)
            return None
        return self._absent_since.setdefault(worker_id, self._clock())

    def forget(self, worker_id: int) -> None:
        self._absent_since.pop(worker_id, None)

    async def run(self) -> None:
        await follow(self._registry, self._namespace, self._on_snapshot)

    def _on_snapshot(self, snapshot: Snapshot, _: SnapshotDiff) -> None:
        self.snapshot = snapshot
