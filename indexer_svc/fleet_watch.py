"""Discovery: one task that keeps the last snapshot of the fleet.

A lost or failing registry leaves the fleet as it was last seen; the watch is opened again with
growing pauses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from common.instances import Instance, Snapshot
from common.registry import Registry

LOG = structlog.get_logger(__name__)

PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 5.0


class FleetWatch:
    """Follows one namespace. `snapshot` has revision 0 until something was seen."""

    def __init__(self, registry: Registry, namespace: str, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._namespace = namespace
        self._clock = clock
        self._left_at: dict[int, float] = {}
        self.snapshot = Snapshot()

    def worker(self, worker_id: int) -> Instance | None:
        """A worker that is there."""
        instance = self.snapshot.instances.get(worker_id)
        return instance if instance is not None and instance.service == "worker" else None

    def absent_since(self, worker_id: int) -> float | None:
        """When a worker was missed first; None while it is there, or nothing was ever seen.

        To be asked about the workers that matter: who is asked about first is missed from then on.
        """
        if self.snapshot.revision == 0 or self.worker(worker_id) is not None:
            self._left_at.pop(worker_id, None)
            return None
        return self._left_at.setdefault(worker_id, self._clock())

    def forget(self, worker_id: int) -> None:
        """Nobody will ask about it any more."""
        self._left_at.pop(worker_id, None)

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
                # Whatever ails the registry, the index goes on with the fleet as it was.
                LOG.warning("fleet watch failed", error=repr(error), pause_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    def _take(self, snapshot: Snapshot) -> None:
        # Revision 0 has seen nothing yet, so it cannot take anybody away.
        if snapshot.revision > 0:
            self.snapshot = snapshot
