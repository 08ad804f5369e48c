"""The router's composition root: knows all the parts and wires them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random, SystemRandom

import structlog

from common.kv.load import Load
from common.registry.instances import PREFILL_BYPASS_META_KEY, Instance, new_instance_id
from common.registry.open import health_check_meta, open_registry
from common.registry.registry import Lease, Registry
from common.rpc import channel as rpc
from common.rpc.interceptors import RunningCalls
from common.service.lifecycle import Lifecycle, ServiceInfo
from common.service.metrics_server import serve_metrics
from kvmesh.router.v1 import router_pb2_grpc
from router_svc.config import RouterConfig, load_selector
from router_svc.core.fleet import Placement
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.router import Router
from router_svc.fleet_watch import FleetWatch
from router_svc.hashing import HasherCache
from router_svc.index_replica import IndexReplica, grpc_subscriptions
from router_svc.metrics import Metrics
from router_svc.replication_sync import PeerSync, grpc_syncs
from router_svc.service import SERVICE_NAME, RouterService
from router_svc.unused_settings import settings_without_effect

LOG = structlog.get_logger(__name__)

# A router serves after this, whatever it could not learn by then of the fleet and from its peers.
STARTUP_TIMEOUT_S = 1.0
# How often orphans and old guesses are looked after when there is nothing to decide.
TICK_S = 0.5
# Old guesses dropped without letting decisions run; about 1 ms.
EXPIRE_BLOCKS_PER_STEP = 2048


class RouterApp:
    """One router process. registry: what to find the others by; by default as configured."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        instance_id: int | None = None,
        registry: Registry | None = None,
        rng: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._security = rpc.security_from_config(config)
        self._registry = open_registry(config) if registry is None else registry
        self.instance_id = new_instance_id(SystemRandom()) if instance_id is None else instance_id
        rng = rng or Random()
        book = LoadTracker(expiry_s=config.active_request_expiry_s)
        choice = config.index_settings
        self.index = IndexReplica(
            lambda: self.router.fleet.indexers,
            self._report_load,
            subscribe=grpc_subscriptions(self._security),
            loads_only=not choice.follows_events,
            rng=rng,
            clock=clock,
        )
        self.router = Router(
            load_selector(config.selector),
            index=self.index,
            choice=choice,
            cost_settings=config.cost_settings,
            policy=config.policy,
            book=book,
            epoch_s=time.time() - clock(),
        )
        self.peers = PeerSync(
            self.instance_id,
            lambda: self.router.fleet.routers,
            book,
            self.router.affinity,
            open_sync=grpc_syncs(self._security),
            rng=rng,
            clock=clock,
        )
        self.metrics = Metrics(self.router, self.index, self.peers.replica, clock=clock)
        self._service = RouterService(
            self.router,
            self.instance_id,
            self.metrics,
            hasher_cache=HasherCache(config.mesh_key.encode()),
            peers=self.peers,
            track_output_blocks=config.track_output_blocks,
            rng=rng,
            clock=clock,
        )
        self._calls = RunningCalls()
        self._server = rpc.server(security=self._security, calls=self._calls)
        self._lease: Lease | None = None
        self._meta: dict[str, str] = {}
        self._close_metrics: Callable[[], Awaitable[None]] | None = None
        self.address = ""
        self.metrics_address = ""

    def _report_load(self, worker_id: int, dp_rank: int, load: Load, now: float) -> None:
        """A rank's load, as the indexer tells it; those of workers that have left are void."""
        if self.router.fleet.has(Placement(worker_id, dp_rank)):
            self.router.book.report(worker_id, dp_rank, load, now)

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        """Bind; follow the fleet; serve once it was seen and all peers there have said what they
        have booked, or after FIRST_SNAPSHOT_S.

        A router without peers waits for nobody: frontends announce to it what they hold.
        """
        config = self._config
        port = rpc.bind(self._server, config.host, config.port, security=self._security)
        self.address = rpc.join_address(config.advertise_host or config.host, port)
        self._meta = health_check_meta(config, self.address, lifecycle.health.port)
        if config.bypass_policy != "off":
            self._meta[PREFILL_BYPASS_META_KEY] = config.bypass_policy
        router_pb2_grpc.add_RouterServiceServicer_to_server(self._service, self._server)
        rpc.add_health(self._server, lifecycle.health.servicer)
        rpc.enable_reflection(self._server, [SERVICE_NAME])
        addresses = {"grpc": self.address, **self._serve_metrics()}
        watch = FleetWatch(self._registry, config.namespace, self.router, self._clock)
        if not self.router.overlaps.choice.follows_events:
            LOG.info(
                "KV events are not followed",
                kv_events=config.kv_events,
                overlap_score_credit=config.overlap_score_credit,
            )
        if unused := settings_without_effect(config):
            LOG.warning("settings_without_effect", reasons=unused)
        lifecycle.spawn(watch.run(), name="fleet watch")
        lifecycle.spawn(self.index.run(), name="index replica")
        lifecycle.spawn(self._tick(), name="tick")
        await self._wait_until_current(lifecycle, watch)
        await self._server.start()
        await lifecycle.health.set(SERVICE_NAME, True)
        return ServiceInfo(str(self.instance_id), addresses)

    async def _wait_until_current(self, lifecycle: Lifecycle, watch: FleetWatch) -> None:
        deadline = asyncio.get_running_loop().time() + STARTUP_TIMEOUT_S
        lifecycle.spawn(self._run_peer_sync(watch), name="sync with peers")
        if not await _wait_for_event(watch.first_snapshot, deadline):
            LOG.warning("serving without a fleet: the registry has not answered")
        elif not await _wait_for_event(self.peers.caught_up, deadline):
            LOG.warning("serving without the bookings of a peer, which has not answered")

    async def _run_peer_sync(self, watch: FleetWatch) -> None:
        """Peers that are there when the fleet is first seen, however late, are asked for all."""
        await watch.first_snapshot.wait()
        await self.peers.run()

    async def register(self) -> None:
        self._lease = await self._registry.register(self._instance())

    async def deregister(self) -> None:
        if self._lease is not None:
            await self._lease.close()

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Close the sessions, which would never end by themselves, and let calls end."""
        self._service.end_sessions()
        return await rpc.stop(self._server, grace_s, self._calls)

    async def close(self) -> None:
        if self._close_metrics is not None:
            await self._close_metrics()
        await self._server.stop(None)
        await self._registry.close()

    def _instance(self) -> Instance:
        # A fixed address can only be taken by the successor of the process that had it.
        stable_name = f"router@{self.address}" if self._config.port else ""
        return Instance(
            id=self.instance_id,
            namespace=self._config.namespace,
            service="router",
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

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.router.expire(self._clock())
            self._service.decisions.serve_queue()
            has_more = True
            while has_more:
                has_more = self.router.overlaps.expire(self._clock(), EXPIRE_BLOCKS_PER_STEP)
                await asyncio.sleep(0)


async def _wait_for_event(event: asyncio.Event, deadline: float) -> bool:
    """Waits for it, at most until that loop time."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            await event.wait()
    return event.is_set()
