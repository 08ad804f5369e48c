"""Builds an indexer from its parts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from common.kv.index_feed import IndexFeed
from common.registry.instances import Instance
from common.registry.registry import Registry
from common.runtime.member_key import MemberKey
from common.service.base import ServiceApp
from common.service.lifecycle import Lifecycle, ServiceInfo
from indexer_svc.config import IndexerConfig
from indexer_svc.core.budget import Budget
from indexer_svc.ingest import TICK_S, Ingest
from indexer_svc.metrics import Metrics
from indexer_svc.service import SERVICE_NAME, IndexerService
from indexer_svc.worker_presence import WorkerPresence
from kvmesh.indexer.v1 import indexer_pb2_grpc

MB = 1_000_000
# Without a publisher, an indexer is SERVING after this time: there may be no workers.
FIRST_PUBLISHER_S = 1.0
# Events of a worker are being received if the last one is younger.
PROGRESS_S = 1.0


class IndexerApp(ServiceApp[IndexerConfig]):
    """One indexer process; see `ServiceApp`."""

    def __init__(
        self,
        config: IndexerConfig,
        *,
        instance_id: int | None = None,
        member_key: MemberKey | None = None,
        registry: Registry | None = None,
        feed: IndexFeed | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            "indexer", config, instance_id=instance_id, member_key=member_key, registry=registry
        )
        self.ingest = Ingest(feed or IndexFeed(), Budget(config.budget_mb * MB), clock)
        self._clock = clock
        self.metrics = Metrics(self.ingest)
        self.presence = WorkerPresence(self._registry, config.namespace, clock)
        self._service = IndexerService(
            self.ingest,
            self.presence,
            self.metrics,
            security=self._security,
            subscriber_bytes=config.subscriber_mb * MB,
            clock=clock,
        )

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        """Registers and serves at once; SERVING after the first publisher, or FIRST_PUBLISHER_S."""
        self._bind(lifecycle, [SERVICE_NAME])
        self._add_service(indexer_pb2_grpc.add_IndexerServiceServicer_to_server, self._service)
        self._serve_metrics(self.metrics.registry)
        await lifecycle.health.set(SERVICE_NAME, False)
        await lifecycle.health.set("", False)
        lifecycle.spawn(self.presence.run(), name="worker presence")
        lifecycle.spawn(self._tick(), name="tick")
        lifecycle.spawn(
            self._serve_when_published(lifecycle), name="first publisher", essential=False
        )
        await self._start_servers()
        return self._info()

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Ends the streams, which have no end of their own, and waits for calls."""
        self._service.end_streams()
        return await super().drain(grace_s)

    def _own_need(self, peer: Instance) -> str:
        """Returns why routers would lose cache hits that another indexer has."""
        if peer.service != "worker" or peer.kv_index != "events":
            return ""
        states = [self.ingest.feed.status(s).state for s in self.ingest.feed.sources_of(peer.id)]
        if states and all(state in ("exact", "degraded") for state in states):
            return ""
        return "its KV events are not in this index"

    def _is_in_progress(self, peer: Instance) -> bool:
        """Returns whether the events of a worker are being received."""
        feed, since = self.ingest.feed, self._clock() - PROGRESS_S
        return any(feed.last_progress_at(source) > since for source in feed.sources_of(peer.id))

    async def _serve_when_published(self, lifecycle: Lifecycle) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PUBLISHER_S):
                await self.ingest.first_published.wait()
        await lifecycle.health.set(SERVICE_NAME, True)
        await lifecycle.health.set("", True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self.ingest.tick(self.presence)
