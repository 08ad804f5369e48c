"""Passes every discovery snapshot to the parts of a router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from common.registry.instances import Snapshot, SnapshotDiff
from common.registry.registry import OnSnapshot, Registry, follow
from router_svc.core.router import Router

LOG = structlog.get_logger(__name__)


class FleetWatch:
    """Follows one namespace. `first_snapshot` is set after the first snapshot."""

    def __init__(
        self,
        registry: Registry,
        namespace: str,
        router: Router,
        clock: Callable[[], float],
        followers: Sequence[OnSnapshot] = (),
    ) -> None:
        """Begins without a snapshot.

        followers: receive each snapshot after the router.
        """
        self._registry = registry
        self._namespace = namespace
        self._router = router
        self._clock = clock
        self._followers = followers
        self.first_snapshot = asyncio.Event()

    async def run(self) -> None:
        await follow(self._registry, self._namespace, self._take)

    def _take(self, snapshot: Snapshot, changes: SnapshotDiff) -> None:
        self._router.update(snapshot, self._clock(), changes)
        for on_snapshot in self._followers:
            on_snapshot(snapshot, changes)
        joined = [i.id for i in changes.joined if i.service == "worker"]
        left = [i.id for i in changes.left if i.service == "worker"]
        if joined or left:
            workers = self._router.fleet.worker_count
            LOG.info("fleet_changed", joined=joined, left=left, workers=workers)
        self.first_snapshot.set()
