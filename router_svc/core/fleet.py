"""The worker fleet as discovery shows it (pure).

Invariants: a candidate belongs to an instance of the newest snapshot; the candidates of a model are
sorted by (worker id, rank), so that positions have the same meaning in every call; a worker without
a model (its metadata is not known yet) is no candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from common.registry.instances import Instance, Role, Snapshot, SnapshotDiff, diff_snapshots
from common.request.placement import Placement
from router_svc.core.candidate import Candidate

# A model without workers is unavailable (503), not unknown (404), for this long: its running
# requests need another worker at that moment.
GONE_MODEL_TTL_S = 60.0
_GONE_MODELS_MAX = 1024

KeyT = TypeVar("KeyT")


class Fleet:
    """The instances of the newest snapshot; indexes those of workers by model and role."""

    def __init__(self) -> None:
        self.has_snapshot = False
        self._snapshot = Snapshot()
        self._candidates: dict[tuple[str, Role], tuple[Candidate, ...]] = {}
        self._roles: dict[str, tuple[Role, ...]] = {}
        self.models: frozenset[str] = frozenset()  # Served now, in any role.
        # When models lost their last worker; oldest first.
        self._gone_models: dict[str, float] = {}

    def update(
        self, snapshot: Snapshot, now: float, changes: SnapshotDiff | None = None
    ) -> SnapshotDiff:
        """Replaces the snapshot. Returns what changed.

        now: seconds.
        changes: since the last update; None: they are found here.
        """
        if changes is None:
            changes = diff_snapshots(self._snapshot, snapshot)
        self._snapshot = snapshot
        self.has_snapshot = True
        candidates_by_role: dict[tuple[str, Role], list[Candidate]] = {}
        for worker in snapshot.of("worker"):
            if worker.model:
                candidates_by_role.setdefault((worker.model, worker.role), []).extend(
                    Candidate(Placement(worker.id, rank), worker) for rank in _ranks(worker)
                )
        self._candidates = {
            key: tuple(sorted(worker_candidates, key=lambda c: c.placement))
            for key, worker_candidates in candidates_by_role.items()
        }
        self._roles = {}
        for model, role in self._candidates:
            self._roles[model] = (*self._roles.get(model, ()), role)
        self._track_gone_models(frozenset(model for model, _ in candidates_by_role), now)
        return changes

    def candidates(self, model: str, role: Role) -> tuple[Candidate, ...]:
        """Returns every (worker, rank) of `role` that serves `model`, sorted by placement."""
        return self._candidates.get((model, role), ())

    def all_candidates(self, model: str = "") -> Iterator[Candidate]:
        """Yields the candidates of every role, of one model or, for "", of all."""
        for (name, _), worker_candidates in self._candidates.items():
            if model in ("", name):
                yield from worker_candidates

    def roles(self, model: str) -> tuple[Role, ...]:
        return self._roles.get(model, ())

    def block_size(self, model: str) -> int | None:
        """Returns tokens per block, of the first worker of the model that advertises them."""
        sizes = (c.instance.block_size for c in self.all_candidates(model))
        return next((size for size in sizes if size is not None), None)

    def is_known_model(self, model: str, now: float) -> bool:
        """Returns whether `model` is served, or was until less than GONE_MODEL_TTL_S ago."""
        if model in self.models:
            return True
        gone_at = self._gone_models.get(model)
        return gone_at is not None and now - gone_at < GONE_MODEL_TTL_S

    def has(self, placement: Placement) -> bool:
        """Returns whether the worker is present, serves a model and has that rank."""
        worker = self._snapshot.instances.get(placement.worker_id)
        return (
            worker is not None
            and bool(worker.model)
            and placement.dp_rank in _ranks(worker)
            and worker.service == "worker"
        )

    def candidate(self, placement: Placement) -> Candidate | None:
        """Returns the candidate of a placement; None unless `has` is true."""
        if not self.has(placement):
            return None
        return Candidate(placement, self._snapshot.instances[placement.worker_id])

    def instance(self, instance_id: int) -> Instance | None:
        """Returns the instance of that id, of any service; None if discovery does not show it."""
        return self._snapshot.instances.get(instance_id)

    def is_present(self, instance_id: int) -> bool:
        """Returns whether discovery shows an instance of that id, of any service."""
        return instance_id in self._snapshot.instances

    def address(self, instance_id: int) -> str:
        """Returns the gRPC address of an instance; empty if discovery does not show it."""
        instance = self._snapshot.instances.get(instance_id)
        return "" if instance is None else instance.address

    @property
    def worker_count(self) -> int:
        """Workers that serve a model."""
        return sum(1 for worker in self._snapshot.of("worker") if worker.model)

    def _track_gone_models(self, models: frozenset[str], now: float) -> None:
        for model in self.models - models:
            self._gone_models[model] = now
        for model in models:
            self._gone_models.pop(model, None)
        drop_gone(self._gone_models, now, _GONE_MODELS_MAX)
        self.models = models


def drop_gone(gone_at: dict[KeyT, float], now: float, count_max: int) -> None:
    """Drops entries, oldest first, that left GONE_MODEL_TTL_S ago or exceed `count_max`."""
    while gone_at:
        oldest, at = next(iter(gone_at.items()))
        if now - at < GONE_MODEL_TTL_S and len(gone_at) <= count_max:
            return
        del gone_at[oldest]


def _ranks(worker: Instance) -> range:
    return range(worker.dp_rank_start, worker.dp_rank_start + worker.dp_size)
