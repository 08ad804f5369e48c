"""The client of a mesh: what follows its members, in a frontend and in an endpoint picker."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from random import Random

from common.errors import MeshError
from common.registry.instances import Snapshot, SnapshotDiff
from common.registry.registry import Registry, follow
from common.request.placement import Decision, Query
from common.rpc import channel as rpc
from common.runtime.config import ServiceConfig
from common.service.lifecycle import Lifecycle
from common.trials.trials import Trials
from frontend_svc.acknowledgement import Acknowledgement
from frontend_svc.members import Members
from frontend_svc.models.artifacts import grpc_artifact_opener
from frontend_svc.models.catalog import ModelCatalog
from frontend_svc.models.loading import keep_loaded
from frontend_svc.request.local_placement import has_workers, place_locally
from frontend_svc.routers.client import RouterClient
from frontend_svc.routers.session import grpc_session_opener
from frontend_svc.workers.client import EngineClient
from frontend_svc.workers.transport import GrpcDialer

OnSnapshot = Callable[[Snapshot, SnapshotDiff], None]


class MeshClient:
    """The members, the models, a stream to each worker and a session with a router.

    `acknowledgement` is what the members of the mesh see of it.
    """

    def __init__(
        self,
        instance_id: int,
        config: ServiceConfig,
        registry: Registry,
        security: rpc.Security,
        trials: Trials,
        rng: Random,
        stalled_s: Callable[[], float],
        *,
        open_requests: Callable[[], dict[int, int]] | None = None,
        awaiting: Callable[[], Mapping[str, int]] = dict,
        configured: Iterable[str] = (),
    ) -> None:
        """
        - open_requests: returns those of this process by worker; None: those of its streams.
        - awaiting, stalled_s: see `RouterClient`. configured: see `ModelCatalog`.
        """
        self._registry = registry
        self._namespace = config.namespace
        self._rng = rng
        self._changed = asyncio.Event()
        self._on_snapshots: tuple[OnSnapshot, ...] = ()
        self.members = Members()
        self.models = ModelCatalog(
            registry.get_card,
            now_s=time.time,
            mesh_key=config.mesh_key.encode(),
            open_artifact=grpc_artifact_opener(security),
            trials=trials,
            configured=configured,
        )
        self.engines = EngineClient(instance_id, GrpcDialer(security), stalled_s=stalled_s)
        self._open_requests = open_requests or (lambda: self.engines.open_slots)
        self.router = RouterClient(
            instance_id,
            self._place_locally,
            has_workers=lambda query: has_workers(self.members.snapshot, query),
            awaiting=awaiting,
            open_session=grpc_session_opener(security),
            rng=rng,
            stalled_s=stalled_s,
        )
        self.acknowledgement = Acknowledgement(self.members, self.models, self.engines, self.router)

    async def start(self, lifecycle: Lifecycle, *others: OnSnapshot) -> asyncio.Event:
        """Follows the members until the end of the process. Returns an event that is set when no
        model is being loaded for the first time.

        - others: get each snapshot before the session with a router does.
        """
        self._on_snapshots = (
            self.members.on_snapshot,
            self.engines.on_snapshot,
            self.models.on_snapshot,
            *others,
            self.router.on_snapshot,
        )
        engines_started, models_loaded = asyncio.Event(), asyncio.Event()
        lifecycle.spawn(self._run_engines(engines_started), name="engine client")
        await engines_started.wait()
        watch = follow(self._registry, self._namespace, self._on_snapshot)
        lifecycle.spawn(watch, name="registry watch")
        models = keep_loaded(self.models, self._changed, models_loaded)
        lifecycle.spawn(models, name="models")
        lifecycle.spawn(self.router.run(), name="router session")
        return models_loaded

    async def _run_engines(self, started: asyncio.Event) -> None:
        """Owns the streams to workers: the task that opens them also ends them."""
        async with self.engines:
            started.set()
            await asyncio.get_running_loop().create_future()

    def _on_snapshot(self, snapshot: Snapshot, changes: SnapshotDiff) -> None:
        for on_snapshot in self._on_snapshots:
            on_snapshot(snapshot, changes)
        self._changed.set()

    def _place_locally(self, query: Query) -> Decision | MeshError:
        return place_locally(self.members.snapshot, self._open_requests(), query, self._rng)


async def wait_loaded(models_loaded: asyncio.Event, limit_s: float) -> None:
    """Waits for the models that the mesh has at the start of a process, for `limit_s` at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await models_loaded.wait()
