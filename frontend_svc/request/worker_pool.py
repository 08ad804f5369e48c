"""The workers that serve a model, from the snapshot of members and the open circuits."""

from __future__ import annotations

from common.registry.instances import Snapshot
from frontend_svc.members import Members
from frontend_svc.models.adapters import serving
from frontend_svc.request.ports import WorkerPort


class WorkerPool:
    """Answers which workers serve a model."""

    def __init__(self, members: Members, workers: WorkerPort) -> None:
        self._members = members
        self._workers = workers
        # (model, adapter) -> its workers, of one snapshot.
        self._pools: dict[tuple[str, str], frozenset[int]] = {}
        self._pools_snapshot: Snapshot | None = None

    def members(self, model: str, adapter: str = "") -> tuple[frozenset[int], frozenset[int]]:
        """Workers that serve a model, and those among them with an open circuit. adapter: only
        workers that have it; "" is the model itself."""
        pool = self._pool(model, adapter)
        return pool, self._workers.excluded_workers(pool)

    def _pool(self, model: str, adapter: str) -> frozenset[int]:
        snapshot = self._members.snapshot
        if snapshot is not self._pools_snapshot:
            self._pools, self._pools_snapshot = {}, snapshot
        pool = self._pools.get((model, adapter))
        if pool is None:
            pool = frozenset(instance.id for instance in serving(snapshot.serving(model), adapter))
            self._pools[model, adapter] = pool
        return pool

    def available(self, model: str, adapter: str = "") -> frozenset[int]:
        """Workers that serve a model and have a closed circuit; see `members`."""
        pool, open_circuits = self.members(model, adapter)
        return pool - open_circuits

    def count_available(self, model: str, adapter: str = "") -> int:
        """Returns the number of workers that compute prompts and have a closed circuit; see
        `members`."""
        serving_workers = serving(self._members.snapshot.serving(model), adapter)
        eligible = [i.id for i in serving_workers if i.role != "decode"]
        return len(eligible) - len(self._workers.excluded_workers(eligible))

    def address(self, worker_id: int, routers_address: str) -> str:
        """Returns the address of a worker, "" if it has left. routers_address: used for a worker
        that discovery does not show yet; the router may see a new worker first."""
        instance = self._members.snapshot.instances.get(worker_id)
        if instance is not None:
            return instance.stream_address
        return "" if self._members.has_left(worker_id) else routers_address

    def has_left(self, worker_id: int) -> bool:
        """Returns whether a worker was in the mesh and is not any more."""
        return self._members.has_left(worker_id)
