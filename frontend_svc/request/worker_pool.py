"""The workers that serve a model, from the snapshot of members and the open circuits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.registry.instances import Snapshot
from frontend_svc.members import Members
from frontend_svc.models.adapters import serving
from frontend_svc.request.ports import WorkerPort


@dataclass(frozen=True, slots=True)
class _Pool:
    """The workers that serve a model; those of one role can replace each other."""

    workers: frozenset[int]
    by_role: Mapping[str, frozenset[int]]


class WorkerPool:
    """Answers which workers serve a model."""

    def __init__(self, members: Members, workers: WorkerPort) -> None:
        self._members = members
        self._workers = workers
        # (model, adapter) -> its workers, of one snapshot.
        self._pools: dict[tuple[str, str], _Pool] = {}
        self._pools_snapshot: Snapshot | None = None

    def members(self, model: str, adapter: str = "") -> tuple[frozenset[int], frozenset[int]]:
        """Workers that serve a model, and those among them with an open circuit. adapter: only
        workers that have it; "" is the model itself."""
        pool = self._pool(model, adapter)
        excluded = map(self._workers.excluded_workers, pool.by_role.values())
        return pool.workers, frozenset[int]().union(*excluded)

    def peers(self, worker_id: int, model: str, adapter: str = "") -> frozenset[int]:
        """Returns the workers of the worker's role that serve a model, itself included."""
        pools = self._pool(model, adapter).by_role.values()
        return next((workers for workers in pools if worker_id in workers), frozenset())

    def _pool(self, model: str, adapter: str) -> _Pool:
        snapshot = self._members.snapshot
        if snapshot is not self._pools_snapshot:
            self._pools, self._pools_snapshot = {}, snapshot
        pool = self._pools.get((model, adapter))
        if pool is None:
            ids: dict[str, set[int]] = {}
            for instance in serving(snapshot.serving(model), adapter):
                ids.setdefault(instance.role, set()).add(instance.id)
            by_role = {role: frozenset(workers) for role, workers in ids.items()}
            pool = _Pool(frozenset[int]().union(*by_role.values()), by_role)
            self._pools[model, adapter] = pool
        return pool

    def available(self, model: str, adapter: str = "") -> frozenset[int]:
        """Workers that serve a model and have a closed circuit; see `members`."""
        pool, open_circuits = self.members(model, adapter)
        return pool - open_circuits

    def count_available(self, model: str, adapter: str = "") -> int:
        """Returns the number of workers that compute prompts and have a closed circuit; see
        `members`."""
        return sum(
            len(workers) - len(self._workers.excluded_workers(workers))
            for role, workers in self._pool(model, adapter).by_role.items()
            if role != "decode"
        )

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
