"""The indexer's composition root: knows all the parts and wires them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from random import SystemRandom

from common.kv.index_feed import IndexFeed
from common.registry.instances import Instance, new_instance_id
from common.registry.open import health_check_meta, open_registry
from common.registry.registry import Lease, Registry
from common.rpc import channel as rpc
from common.rpc.interceptors import RunningCalls
from common.service.lifecycle import Lifecycle, ServiceInfo
from common.service.metrics_server import serve_metrics
from indexer_svc.config import IndexerConfig
from indexer_svc.core.budget import Budget
from indexer_svc.fleet_watch import FleetWatch
from indexer_svc.ingest import TICK_S, Ingest
from indexer_svc.metrics import Metrics
from indexer_svc.service import SERVICE_NAME, IndexerService
from kvmesh.indexer.v1 import indexer_pb2_grpc

MB = 1_000_000
# An indexer with no publisher serves after this: there may be none.
FIRST_PUBLISHER_S = 1.0


class IndexerApp:
    """One indexer process. registry: what to find the others by; by default as configured."""

    def __init__(
        self,
        config: IndexerConfig,
        *,
        instance_id: int | None = None,
        registry: Registry | None = None,
        feed: IndexFeed | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._security = rpc.security_from_config(config)
        self._registry = open_registry(config) if registry is None else registry
        self.instance_id = new_instance_id(SystemRandom()) if instance_id is None else instance_id
        self.ingest = Ingest(feed or IndexFeed(), Budget(config.budget_mb * MB), clock)
        self.metrics = Metrics(self.ingest)
        self.fleet = FleetWatch(self._registry, config.namespace, clock)
        self._service = IndexerService(
            self.ingest,
            self.fleet,
            self.metrics,
            security=self._security,
            subscriber_bytes=config.subscriber_mb * MB,
            clock=clock,
        )
        self._calls = RunningCalls()
        self._server = rpc.server(security=self._security, calls=self._calls)
        self._lease: Lease | None = None
        self._meta: dict[str, str] = {}
        self._close_metrics: Callable[[], Awaitable[None]] | None = None
        self.address = ""
        self.metrics_address = ""

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        """Bind; follow the fleet; SERVING with the first publisher, or after a moment."""
        config = self._config
        port = rpc.bind(self._server, config.host, config.port, security=self._security)
        self.address = rpc.join_address(config.advertise_host or config.host, port)
        self._meta = health_check_meta(config, self.address, lifecycle.health.port)
        indexer_pb2_grpc.add_IndexerServiceServicer_to_server(self._service, self._server)
        rpc.add_health(self._server, lifecycle.health.servicer)
        rpc.enable_reflection(self._server, [SERVICE_NAME])
        addresses = {"grpc": self.address, **self._serve_metrics()}
        await lifecycle.health.set(SERVICE_NAME, False)
        await lifecycle.health.set("", False)
        lifecycle.spawn(self.fleet.run(), name="fleet watch")
        lifecycle.spawn(self._tick(), name="tick")
        lifecycle.spawn(
            self._serve_when_published(lifecycle), name="first publisher", essential=False
        )
        await self._server.start()
        return ServiceInfo(str(self.instance_id), addresses)

    async def register(self) -> None:
        # At once, not when SERVING: publishers have to find it first.
        self._lease = await self._registry.register(self._instance())

    async def deregister(self) -> None:
        if self._lease is not None:
            await self._lease.close()

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Close the streams, which would never end by themselves, and let calls end."""
        self._service.end_streams()
        return await rpc.stop(self._server, grace_s, self._calls)

    async def close(self) -> None:
        if self._close_metrics is not None:
            await self._close_metrics()
        await self._server.stop(None)
        await self._registry.close()

    def _instance(self) -> Instance:
        # A fixed address can only be taken by the successor of the process that had it.
        stable_name = f"indexer@{self.address}" if self._config.port else ""
        return Instance(
            id=self.instance_id,
            namespace=self._config.namespace,
            service="indexer",
            stable_name=stable_name,
            address=self.address,
            meta=self._meta,
        )

    def _serve_metrics(self) -> dict[str, str]:
        if self._config.metrics_port is None:
            return {}
        address, self._close_metrics = serve_metrics(
            self.metrics.registry, self._config.host, self._config.metrics_port
        )
        self.metrics_address = address
        return {"metrics": address}

    async def _serve_when_published(self, lifecycle: Lifecycle) -> None:
        # There may be no workers yet, and an empty index is a right one then.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PUBLISHER_S):
                await self.ingest.first_published.wait()
        await lifecycle.health.set(SERVICE_NAME, True)
        await lifecycle.health.set("", True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self.ingest.tick(self.fleet)
