"""The workers that serve a model, from the snapshot of members and the open circuits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from common.registry.instances import Snapshot
from frontend_svc.members import Members
from frontend_svc.models.adapters import serving
from frontend_svc.request.ports import WorkerPort

# Roles of which a worker each replaces a worker of this role.
_SUBSTITUTES: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "aggregated": ("prefill", "decode"),
        "prefill": ("aggregated",),
        "decode": ("aggregated",),
    }
)


@dataclass(frozen=True, slots=True)
class _Pool:
    """The workers that serve a model; those of one role can replace each other.

    If all roles have workers, those of one serving mode also replace those of the other: an
    aggregated worker, or a prefill worker and a decode worker.
    """

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
        return pool.workers, frozenset[int]().union(*self._excluded(pool).values())

    def _excluded(self, pool: _Pool) -> dict[str, frozenset[int]]:
        """Returns the workers of each role that get no requests now."""
        by_role, exclude = pool.by_role, self._workers.excluded_workers
        excluded = {role: exclude(workers) for role, workers in by_role.items()}
        if len(by_role) == len(_SUBSTITUTES):
            for role, others in _SUBSTITUTES.items():
                spare = [by_role[other] - excluded[other] for other in others]
                if all(spare):  # without its own role's last worker, a request is served by these
                    excluded[role] = by_role[role] & exclude(by_role[role].union(*spare))
        return excluded

    def peers(self, worker_id: int, model: str, adapter: str = "") -> frozenset[int]:
        """Returns the workers that can replace a worker, itself included."""
        by_role = self._pool(model, adapter).by_role
        role = next((role for role, workers in by_role.items() if worker_id in workers), None)
        if role is None:
            return frozenset()
        others = _SUBSTITUTES[role] if len(by_role) == len(_SUBSTITUTES) else ()
        return by_role[role].union(*(by_role[other] for other in others))

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
        pool = self._pool(model, adapter)
        return sum(
            len(pool.by_role[role]) - len(excluded)
            for role, excluded in self._excluded(pool).items()
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
