"""The frontend's composition root: knows all the parts and wires them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from random import Random, SystemRandom
from typing import Any

import structlog
import uvicorn
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from common.errors import Conflict, MeshError, Unavailable
from common.registry.instances import PREFILL_BYPASS_META_KEY, Instance, Snapshot, new_instance_id
from common.registry.open import health_check_meta, open_registry
from common.registry.registry import Lease, Registry, follow
from common.rpc import channel as rpc
from common.rpc.interceptors import RunningCalls
from common.runtime.tasks import TaskGroup
from common.service.lifecycle import Lifecycle, ServiceInfo
from frontend_svc.config import FrontendConfig
from frontend_svc.core.models.routable import missing_pair_role, missing_role
from frontend_svc.core.peers.placement_query import Query
from frontend_svc.core.peers.recently_left import RecentlyLeft
from frontend_svc.core.peers.stall_clock import StallClock
from frontend_svc.core.request.machine import RoutingDecision
from frontend_svc.http.asgi import Receive, Scope, Send
from frontend_svc.http.routes import Readiness, build_api
from frontend_svc.metrics.collectors import (
    HitDriftCollector,
    ModelConfigCollector,
    ResilienceCollector,
    ResilienceStats,
)
from frontend_svc.metrics.families import DeploymentState, FrontendMetrics
from frontend_svc.models.artifacts import ArtifactCollector, grpc_artifact_opener
from frontend_svc.models.catalog import ModelCatalog
from frontend_svc.peers.attach_transport import GrpcDialer
from frontend_svc.peers.engine_client import EngineClient
from frontend_svc.peers.hit_monitor import HitMonitor
from frontend_svc.peers.router_client import RouterClient
from frontend_svc.peers.router_session import grpc_session_opener
from frontend_svc.peers.stall_monitor import own_address, own_security_of, run_stall_monitor
from frontend_svc.request.gateway import Gateway, has_workers, place_locally

# How often a model that could not be loaded is tried again.
MODEL_RETRY_INTERVAL_S = 1.0
BACKLOG = 4096
# How long the last bytes of answers that were cut may take to their clients.
FINAL_WRITE_TIMEOUT_S = 1.0

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

log = structlog.get_logger()


class FrontendApp:
    """One frontend process. registry: what to find the others by; by default as configured."""

    def __init__(
        self,
        config: FrontendConfig,
        *,
        instance_id: int | None = None,
        registry: Registry | None = None,
    ) -> None:
        self._config = config
        self._security = rpc.security_from_config(config)
        self._registry = open_registry(config) if registry is None else registry
        self.instance_id = new_instance_id(SystemRandom()) if instance_id is None else instance_id
        self._rng = Random()
        self._snapshot = Snapshot()
        self._recently_left = RecentlyLeft()
        self._snapshot_changed = asyncio.Event()
        self._calls = RunningCalls()
        self._server = rpc.server(security=self._security, calls=self._calls)
        self._models = ModelCatalog(
            self._registry.get_card,
            now_s=time.time,
            mesh_key=config.mesh_key.encode(),
            open_artifact=grpc_artifact_opener(self._security),
        )
        loop = asyncio.get_running_loop()
        self._stall_clock = StallClock(loop.time())

        def stalled_s() -> float:
            return self._stall_clock.stalled_s(loop.time())

        self._engines = EngineClient(
            self.instance_id, GrpcDialer(self._security), stalled_s=stalled_s
        )
        self._router = RouterClient(
            self.instance_id,
            lambda: self._snapshot.of("router"),
            self._place_locally,
            has_workers=lambda query: has_workers(self._snapshot, query),
            frontends=lambda: self._snapshot.of("frontend"),
            open_session=grpc_session_opener(self._security),
            rng=self._rng,
            stalled_s=stalled_s,
        )
        self.gateway = Gateway(
            self._router,
            self._engines,
            lambda: self._snapshot,
            self._rng,
            stalled_s=stalled_s,
            silent_s=self._engines.silent_s,
            recently_left=self._recently_left,
        )
        self._state = DeploymentState(
            self._models.names, frontend=FrontendMetrics(config.metrics_prefix)
        )
        self._hit_monitor = HitMonitor(lambda: self._snapshot, loop.time, config.kv_drift_max)
        self._http: uvicorn.Server | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._lease: Lease | None = None
        self._lifecycle: Lifecycle | None = None
        self.address = self.http_address = ""

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        """Bind; follow the mesh; serve HTTP."""
        self._lifecycle = lifecycle
        config = self._config
        port = rpc.bind(self._server, config.host, config.port, security=self._security)
        rpc.add_health(self._server, lifecycle.health.servicer)
        rpc.enable_reflection(self._server, [])
        self.address = rpc.join_address(config.advertise_host or config.host, port)
        listen_socket = _listen(config.http_host, config.http_port)
        http_port = listen_socket.getsockname()[1]
        self.http_address = rpc.join_address(config.advertise_host or config.http_host, http_port)
        self._stall_clock.tick(asyncio.get_running_loop().time())
        own, own_security = own_address(config, port), own_security_of(config, self._security)
        lifecycle.spawn(run_stall_monitor(self._stall_clock, own, own_security), name="pulse")
        client_started = asyncio.Event()
        lifecycle.spawn(self._run_engine_client(client_started), name="engine client")
        await client_started.wait()
        models_loaded = asyncio.Event()
        lifecycle.spawn(
            follow(self._registry, self._config.namespace, self._on_snapshot), name="mesh watch"
        )
        lifecycle.spawn(self._watch_models(models_loaded), name="models")
        lifecycle.spawn(self._router.run(), name="router session")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MODEL_RETRY_INTERVAL_S):
                await models_loaded.wait()
        self._serve_http(lifecycle, listen_socket)
        await self._server.start()
        return ServiceInfo(
            str(self.instance_id), {"grpc": self.address, "http": f"http://{self.http_address}"}
        )

    def _serve_http(self, lifecycle: Lifecycle, listen_socket: socket.socket) -> None:
        metrics = CollectorRegistry()
        self._state.register(metrics)
        prefix = self._config.metrics_prefix
        metrics.register(ModelConfigCollector(lambda: self._snapshot, self._models.names, prefix))
        metrics.register(ArtifactCollector(self._models.artifacts, prefix))
        metrics.register(HitDriftCollector(self._hit_monitor.drift_stats, prefix))
        metrics.register(ResilienceCollector(self._resilience_stats, prefix))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=metrics)
        api = build_api(
            self.gateway,
            self._models,
            self._state,
            metrics,
            self._config,
            self._readiness,
            self._hit_monitor.on_request_end,
        )
        server = _Uvicorn(
            uvicorn.Config(
                _close_connections_on_drain(api, lambda: lifecycle.is_draining),
                log_config=None,
                access_log=False,
                http="httptools",
                ws="none",
                lifespan="off",
                server_header=False,
                date_header=False,
                backlog=BACKLOG,
                # Longer than `drain` waits: what is cut then is told so, not dropped.
                timeout_graceful_shutdown=math.ceil(self._config.drain_s + FINAL_WRITE_TIMEOUT_S),
            )
        )
        self._http, self._http_task = (
            server,
            lifecycle.spawn(server.serve([listen_socket]), name="http"),
        )

    async def register(self) -> None:
        """Become known: routers free a frontend's bookings at once when it is gone."""
        self._lease = await self._registry.register(
            Instance(
                id=self.instance_id,
                namespace=self._config.namespace,
                service="frontend",
                stable_name=self._config.stable_name,
                address=self.address,
                http_address=self.http_address,
                meta=health_check_meta(
                    self._config,
                    self.address,
                    self._lifecycle.health.port if self._lifecycle else None,
                ),
            )
        )

    async def deregister(self) -> None:
        """Become unknown."""
        if self._lease is not None:
            await self._lease.close()

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Refuse new connections, let answers end; the rest is told so, then gRPC closes too."""
        abort_all: list[str] = []
        if self._http is not None and self._http_task is not None:
            self._http.should_exit = True
            done, _ = await asyncio.wait([self._http_task], timeout=grace_s)
            if not done:
                abort_all = self.gateway.abort_all(
                    Unavailable("this frontend is shutting down", 1.0)
                )
                await asyncio.wait([self._http_task], timeout=FINAL_WRITE_TIMEOUT_S)
        return [*abort_all, *await rpc.stop(self._server, 0.5, self._calls)]

    async def close(self) -> None:
        """Close clients and files."""
        await self._server.stop(None)
        await self._registry.close()

    async def _run_engine_client(self, client_started: asyncio.Event) -> None:
        """Owns the streams to workers, in the task that also ends them."""
        async with self._engines:
            client_started.set()
            await asyncio.get_running_loop().create_future()

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._engines.retain(snapshot.instances)
        self._recently_left.follow(snapshot.instances)
        self._hit_monitor.follow(snapshot)
        self._snapshot_changed.set()

    async def _watch_models(self, models_loaded: asyncio.Event) -> None:
        """Keeps the served models current; what could not be loaded is tried again."""

        async def update_models() -> None:
            await self._models.follow(self._snapshot)
            models_loaded.set()

        await self._snapshot_changed.wait()
        # One that waits for a card holds up no other: a model is loaded once at a time, so there
        # are no more of them than models.
        async with TaskGroup() as updates:
            while True:
                self._snapshot_changed.clear()
                updates.create_task(update_models())
                while not self._snapshot_changed.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(MODEL_RETRY_INTERVAL_S):
                            await self._snapshot_changed.wait()
                    if self._models.not_ready:
                        break

    def _place_locally(self, query: Query) -> RoutingDecision | MeshError:
        return place_locally(self._snapshot, self._engines.open_slots, query, self._rng)

    def _resilience_stats(self) -> ResilienceStats:
        retries, migrations = self.gateway.retries, self.gateway.migrations
        return ResilienceStats(
            stalled_s=self.gateway.stalled_s(),
            retries=retries.granted,
            retries_refused=retries.refused,
            unrouted=self._router.unrouted,
            migrations_active=migrations.computing,
            migrations_waiting=migrations.waiting,
            excluded_workers=len(self._engines.exclusion_reasons()),
        )

    def _readiness(self) -> Readiness:
        is_draining = self._lifecycle is not None and self._lifecycle.is_draining
        reasons = []
        if is_draining:
            reasons.append("draining")
        if not self._models.names():
            reasons.append("no model is served: no worker is known")
        missing = {
            name: reason
            for name in self._models.names()
            if (reason := missing_role(self._models.workers(name)))
        }
        reasons += [f"model {name}: {reason}" for name, reason in missing.items()]
        return Readiness(
            is_ready=not is_draining and bool(self._models.names() - missing.keys()),
            reasons=tuple(reasons),
            degraded=tuple(self._degraded_reasons()),
            models_not_ready={
                **dict.fromkeys(self._models.loading, "its card is being loaded"),
                **self._models.not_ready,
                **missing,
            },
            instances=tuple(map(_instance_summary, self._snapshot.instances.values())),
        )

    def _degraded_reasons(self) -> Iterator[str]:
        if not self._router.is_connected:
            yield "no router answers: requests wait, then go by this frontend's own load"
        for name in self._models.names():
            if reason := missing_pair_role(self._models.workers(name)):
                yield f"model {name}: requests are not split: {reason}"
        for worker_id, reason in self._engines.exclusion_reasons().items():
            yield f"worker {worker_id} gets no requests for now: {reason}"
        yield from self._hit_monitor.degraded()
        yield from map(_hidden_adapter_message, self._models.hidden.items())


def _hidden_adapter_message(adapter: tuple[tuple[str, str], str]) -> str:
    (name, model), reason = adapter
    return f"the adapter {name!r} of {model} cannot be asked for: {reason}"


def _instance_summary(instance: Instance) -> dict[str, object]:
    summary: dict[str, object] = {
        "id": str(instance.id),  # as a number, many readers of JSON would round it
        "service": instance.service,
        "name": instance.stable_name,
        "address": instance.address,
    }
    if instance.model:
        summary |= {"model": instance.model, "role": instance.role}
    if policy := instance.meta.get(PREFILL_BYPASS_META_KEY):
        summary[PREFILL_BYPASS_META_KEY] = policy
    return summary


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises Conflict when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listen_socket = socket.socket(family, socket.SOCK_STREAM)
    listen_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listen_socket.bind((host, port))
    except OSError as error:
        listen_socket.close()
        raise Conflict(
            f"cannot serve HTTP on {host}:{port}: {error.strerror}; choose another port with "
            "--http-port or KVMESH_FRONTEND_HTTP_PORT",
            field="http_port",
            reason="ADDRESS_IN_USE",
        ) from error
    return listen_socket


def _close_connections_on_drain(api: AsgiApp, is_draining: Callable[[], bool]) -> AsgiApp:
    """The same, but while it drains each answer ends its connection: clients go elsewhere in time.

    Connections that are idle when the drain is over are closed under their clients' hands.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_close(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await api(scope, receive, send_with_close if is_draining() else send)

    return serve


class _Uvicorn(uvicorn.Server):
    """uvicorn without its hands on signals: the lifecycle owns them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield
