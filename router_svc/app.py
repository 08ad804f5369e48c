"""Builds a router from its parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random

import structlog

from common.kv.index_feed import IndexFeed
from common.kv.load import Load
from common.registry.instances import PREFILL_BYPASS_META_KEY, Instance
from common.registry.registry import Registry
from common.request.placement import Placement
from common.runtime.member_key import MemberKey
from common.service.base import ServiceApp
from common.service.lifecycle import Lifecycle, ServiceInfo
from kvmesh.router.v1 import router_pb2_grpc
from router_svc.acknowledgement import Acknowledgement
from router_svc.config import RouterConfig, load_selector
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.replicas import TICK_S as REPLICAS_TICK_S
from router_svc.core.replicas import Replicas
from router_svc.core.router import Router
from router_svc.fleet_watch import FleetWatch
from router_svc.hashing import HasherCache
from router_svc.index_replica import IndexReplica, grpc_subscriptions
from router_svc.metrics import Metrics
from router_svc.replication_sync import PeerSync, grpc_syncs
from router_svc.service import SERVICE_NAME, RouterService
from router_svc.unused_settings import settings_without_effect

LOG = structlog.get_logger(__name__)

# A router serves after this time even without the fleet or the bookings of its peers.
STARTUP_TIMEOUT_S = 1.0
# Interval of expiring bookings and index entries.
TICK_S = 0.5
# Approximate entries expired per event loop turn; about 1 ms.
EXPIRE_BLOCKS_PER_STEP = 2048


class RouterApp(ServiceApp[RouterConfig]):
    """One router process; see `ServiceApp`."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        instance_id: int | None = None,
        member_key: MemberKey | None = None,
        registry: Registry | None = None,
        rng: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            "router", config, instance_id=instance_id, member_key=member_key, registry=registry
        )
        self._clock = clock
        rng = rng or Random()
        load_tracker = LoadTracker(expiry_s=config.active_request_expiry_s)
        index_settings = config.index_settings
        self.index = IndexReplica(
            self._report_load,
            subscribe=grpc_subscriptions(self._security),
            feed=IndexFeed(rows_max=config.candidates_max),
            loads_only=not index_settings.follows_events,
            rng=rng,
            clock=clock,
        )
        self.router = Router(
            load_selector(config.selector),
            index=self.index,
            index_settings=index_settings,
            cost_settings=config.cost_settings,
            policy=config.policy,
            load_tracker=load_tracker,
            epoch_s=time.time() - clock(),
        )
        self.peers = PeerSync(
            self.instance_id,
            load_tracker,
            self.router.affinity,
            self.router.overlaps,
            open_sync=grpc_syncs(self._security),
            rng=rng,
            clock=clock,
        )
        self._acknowledgement = Acknowledgement(
            self.router.fleet,
            self.index,
            clock,
            follows_events=index_settings.follows_events,
        )
        self.replicas = Replicas(self.router, config.scaling)
        self.metrics = Metrics(
            self.router, self.index, self.peers.replica, self.replicas, clock=clock
        )
        self._service = RouterService(
            self.router,
            self.instance_id,
            self.metrics,
            hasher_cache=HasherCache(config.mesh_key.encode()),
            peers=self.peers,
            replicas=self.replicas,
            track_output_blocks=config.track_output_blocks,
            rng=rng,
            clock=clock,
        )

    def _report_load(self, worker_id: int, dp_rank: int, load: Load | None, now: float) -> None:
        """Stores a load that an indexer reports, unless the worker has left."""
        if load is None or self.router.fleet.has(Placement(worker_id, dp_rank)):
            self.router.load_tracker.report(worker_id, dp_rank, load, now)

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        """Serves gRPC once the fleet and the bookings of all peers are known, or after
        STARTUP_TIMEOUT_S. A router without peers does not wait: frontends register their bookings
        again.
        """
        config = self._config
        self._bind(lifecycle, [SERVICE_NAME])
        if config.bypass_policy != "off":
            self._meta[PREFILL_BYPASS_META_KEY] = config.bypass_policy
        self._add_service(router_pb2_grpc.add_RouterServiceServicer_to_server, self._service)
        self._serve_metrics(self.metrics.registry)
        followers = [self.index.on_snapshot, self.peers.on_snapshot]
        watch = FleetWatch(self._registry, config.namespace, self.router, self._clock, followers)
        if not self.router.overlaps.settings.follows_events:
            credit = config.overlap_score_credit
            LOG.info(
                "kv_events_not_followed", kv_events=config.kv_events, overlap_score_credit=credit
            )
        if unused := settings_without_effect(config):
            LOG.warning("settings_without_effect", reasons=unused)
        lifecycle.spawn(watch.run(), name="fleet watch")
        lifecycle.spawn(self.index.run(), name="index replica")
        lifecycle.spawn(self._tick(), name="tick")
        lifecycle.spawn(self._recommend(), name="recommended replicas")
        await self._wait_until_current(lifecycle, watch)
        await self._start_servers()
        await lifecycle.health.set(SERVICE_NAME, True)
        return self._info()

    async def _wait_until_current(self, lifecycle: Lifecycle, watch: FleetWatch) -> None:
        deadline = asyncio.get_running_loop().time() + STARTUP_TIMEOUT_S
        lifecycle.spawn(self.peers.run(), name="sync with peers")
        if not await _wait_for_event(watch.first_snapshot, deadline):
            LOG.warning("serving_without_fleet", reason="the registry did not answer")
        elif not await _wait_for_event(self.peers.caught_up, deadline):
            LOG.warning("serving_without_peer_bookings", reason="a peer did not answer")

    async def _reason_against(self, member_id: int, is_leaving: bool) -> str:
        return self._acknowledgement.reason_against(member_id, is_leaving)

    def _own_need(self, peer: Instance) -> str:
        return self._acknowledgement.own_need(peer)

    def _is_in_progress(self, peer: Instance) -> bool:
        return self._acknowledgement.is_in_progress(peer)

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Ends the sessions, which have no end of their own, and waits for calls."""
        self._service.end_sessions()
        return await super().drain(grace_s)

    async def _recommend(self) -> None:
        while True:
            await asyncio.sleep(REPLICAS_TICK_S)
            self.replicas.tick(self._clock())

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
    """Returns whether the event is set before a loop time."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            await event.wait()
    return event.is_set()
