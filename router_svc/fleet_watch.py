"""Discovery to core: one task that hands every snapshot to the router.

A lost or failing registry leaves the fleet as it was last seen; the watch is opened again with
growing pauses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from common.instances import Changes, Snapshot
from common.registry import Registry
from router_svc.core.route import Router

LOG = structlog.get_logger(__name__)

PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 5.0


class FleetWatch:
    """Follows one namespace. `first_seen` is set once a first snapshot was taken."""

    def __init__(
        self, registry: Registry, namespace: str, router: Router, clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._namespace = namespace
        self._router = router
        self._clock = clock
        self.first_seen = asyncio.Event()

    async def run(self) -> None:
        """Follow for ever; ends by cancellation only."""
        pause_s = PAUSE_FIRST_S
        while True:
            try:
                async with self._registry.watch(self._namespace) as watch:
                    self._take(watch.current)
                    pause_s = PAUSE_FIRST_S
                    while True:
                        self._take(await watch.next())
            except Exception as error:
                # Whatever ails the registry, decisions go on with the fleet as it was.
                LOG.warning("fleet watch failed", error=repr(error), pause_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    def _take(self, snapshot: Snapshot) -> None:
        # Revision 0 has seen nothing yet, so it cannot take anybody away.
        if snapshot.revision > 0 or not self.first_seen.is_set():
            changes = self._router.update(snapshot, self._clock())
            self._log(changes)
        self.first_seen.set()

    def _log(self, changes: Changes) -> None:
        joined = [i.id for i in changes.joined if i.service == "worker"]
        left = [i.id for i in changes.left if i.service == "worker"]
        if joined or left:
            LOG.info(
                "fleet changed", joined=joined, left=left, workers=self._router.fleet.worker_count
            )
