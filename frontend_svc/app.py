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
from common.registry.instances import PREFILL_BYPASS, Instance, Snapshot, new_instance_id
from common.registry.open import health_meta, open_registry
from common.registry.registry import Lease, Registry, follow
from common.rpc import channel as rpc
from common.rpc.interceptors import Calls
from common.runtime.tasks import TaskGroup
from common.service.lifecycle import Life, Ready
from frontend_svc.config import FrontendConfig
from frontend_svc.core.models.routable import missing_role, unsplit
from frontend_svc.core.peers.recently_left import Departed
from frontend_svc.core.peers.stall_clock import Patience
from frontend_svc.core.request.machine import Placed
from frontend_svc.http.routes import Readiness, Receive, Scope, Send, build_api
from frontend_svc.metrics import (
    DeploymentState,
    FrontendMetrics,
    KvDriftCollector,
    ModelConfigCollector,
    Survival,
    SurvivalCollector,
)
from frontend_svc.models.artifacts import ArtifactCollector, grpc_artifacts
from frontend_svc.models.catalog import Models
from frontend_svc.peers.engine_client import EngineClient, GrpcDialer
from frontend_svc.peers.hit_monitor import KvWatch
from frontend_svc.peers.router_client import Query, RouterClient, grpc_sessions
from frontend_svc.peers.stall_monitor import measure, own_address, own_security_of
from frontend_svc.request.gateway import Gateway, place_alone, sees

# How often a model that could not be loaded is tried again.
RETRY_S = 1.0
BACKLOG = 4096
# How long the last bytes of answers that were cut may take to their clients.
LAST_BYTES_S = 1.0

Application = Callable[[Scope, Receive, Send], Awaitable[None]]

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
        self._security = rpc.security_of(config)
        self._registry = open_registry(config) if registry is None else registry
        self.instance_id = new_instance_id(SystemRandom()) if instance_id is None else instance_id
        self._rng = Random()
        self._snapshot = Snapshot()
        self._departed = Departed()
        self._changed = asyncio.Event()
        self._calls = Calls()
        self._server = rpc.server(security=self._security, calls=self._calls)
        self._models = Models(
            self._registry.get_card,
            now_s=time.time,
            mesh_key=config.mesh_key.encode(),
            open_artifact=grpc_artifacts(self._security),
        )
        loop = asyncio.get_running_loop()
        self._patience = Patience(loop.time())

        def lost_s() -> float:
            return self._patience.lost_s(loop.time())

        self._engines = EngineClient(self.instance_id, GrpcDialer(self._security), lost_s=lost_s)
        self._router = RouterClient(
            self.instance_id,
            lambda: self._snapshot.of("router"),
            self._place_alone,
            sees=lambda query: sees(self._snapshot, query),
            frontends=lambda: self._snapshot.of("frontend"),
            open_session=grpc_sessions(self._security),
            rng=self._rng,
            lost_s=lost_s,
        )
        self.gateway = Gateway(
            self._router,
            self._engines,
            lambda: self._snapshot,
            self._rng,
            lost_s=lost_s,
            silent_s=self._engines.silent_s,
            departed=self._departed,
        )
        self._state = DeploymentState(
            self._models.names, frontend=FrontendMetrics(config.metrics_prefix)
        )
        self._kv = KvWatch(lambda: self._snapshot, loop.time, config.kv_drift_max)
        self._http: uvicorn.Server | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._lease: Lease | None = None
        self._life: Life | None = None
        self.address = self.http_address = ""

    async def start(self, life: Life) -> Ready:
        """Bind; follow the mesh; serve HTTP."""
        self._life = life
        config = self._config
        port = rpc.bind(self._server, config.host, config.port, security=self._security)
        rpc.add_health(self._server, life.health.servicer)
        rpc.enable_reflection(self._server, [])
        self.address = rpc.join_address(config.advertise_host or config.host, port)
        listener = _listen(config.http_host, config.http_port)
        http_port = listener.getsockname()[1]
        self.http_address = rpc.join_address(config.advertise_host or config.http_host, http_port)
        self._patience.tick(asyncio.get_running_loop().time())
        own, own_security = own_address(config, port), own_security_of(config, self._security)
        life.spawn(measure(self._patience, own, own_security), name="pulse")
        entered = asyncio.Event()
        life.spawn(self._run_engines(entered), name="engine client")
        await entered.wait()
        seen = asyncio.Event()
        life.spawn(follow(self._registry, self._config.namespace, self._see), name="mesh watch")
        life.spawn(self._follow_models(seen), name="models")
        life.spawn(self._router.run(), name="router session")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await seen.wait()
        self._serve_http(life, listener)
        await self._server.start()
        return Ready(
            str(self.instance_id), {"grpc": self.address, "http": f"http://{self.http_address}"}
        )

    def _serve_http(self, life: Life, listener: socket.socket) -> None:
        metrics = CollectorRegistry()
        self._state.register(metrics)
        prefix = self._config.metrics_prefix
        metrics.register(ModelConfigCollector(lambda: self._snapshot, self._models.names, prefix))
        metrics.register(ArtifactCollector(self._models.artifacts, prefix))
        metrics.register(KvDriftCollector(self._kv.standings, prefix))
        metrics.register(SurvivalCollector(self._survival, prefix))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=metrics)
        api = build_api(
            self.gateway,
            self._models,
            self._state,
            metrics,
            self._config,
            self._readiness,
            self._kv.ended,
        )
        server = _Uvicorn(
            uvicorn.Config(
                _closing_connections(api, lambda: life.draining),
                log_config=None,
                access_log=False,
                http="httptools",
                ws="none",
                lifespan="off",
                server_header=False,
                date_header=False,
                backlog=BACKLOG,
                # Longer than `drain` waits: what is cut then is told so, not dropped.
                timeout_graceful_shutdown=math.ceil(self._config.drain_s + LAST_BYTES_S),
            )
        )
        self._http, self._http_task = server, life.spawn(server.serve([listener]), name="http")

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
                meta=health_meta(
                    self._config, self.address, self._life.health.port if self._life else None
                ),
            )
        )

    async def deregister(self) -> None:
        """Become unknown."""
        if self._lease is not None:
            await self._lease.close()

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Refuse new connections, let answers end; the rest is told so, then gRPC closes too."""
        cut: list[str] = []
        if self._http is not None and self._http_task is not None:
            self._http.should_exit = True
            done, _ = await asyncio.wait([self._http_task], timeout=grace_s)
            if not done:
                cut = self.gateway.cut(Unavailable("this frontend is shutting down", 1.0))
                await asyncio.wait([self._http_task], timeout=LAST_BYTES_S)
        return [*cut, *await rpc.stop(self._server, 0.5, self._calls)]

    async def close(self) -> None:
        """Close clients and files."""
        await self._server.stop(None)
        await self._registry.close()

    async def _run_engines(self, entered: asyncio.Event) -> None:
        """Owns the streams to workers, in the task that also ends them."""
        async with self._engines:
            entered.set()
            await asyncio.get_running_loop().create_future()

    def _see(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._engines.keep(snapshot.instances)
        self._departed.follow(snapshot.instances)
        self._kv.follow(snapshot)
        self._changed.set()

    async def _follow_models(self, seen: asyncio.Event) -> None:
        """Keeps the served models current; what could not be loaded is tried again."""

        async def follow_once() -> None:
            await self._models.follow(self._snapshot)
            seen.set()

        await self._changed.wait()
        # One that waits for a card holds up no other: a model is loaded once at a time, so there
        # are no more of them than models.
        async with TaskGroup() as following:
            while True:
                self._changed.clear()
                following.create_task(follow_once())
                while not self._changed.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(RETRY_S):
                            await self._changed.wait()
                    if self._models.not_ready:
                        break

    def _place_alone(self, query: Query) -> Placed | MeshError:
        return place_alone(self._snapshot, self._engines.open_slots, query, self._rng)

    def _survival(self) -> Survival:
        retries, reroutes = self.gateway.retries, self.gateway.reroutes
        return Survival(
            lost_s=self.gateway.lost_s(),
            retries=retries.taken,
            retries_refused=retries.refused,
            unrouted=self._router.unrouted,
            rerouted=reroutes.computing,
            rerouted_waiting=reroutes.waiting,
            left_alone=len(self._engines.why_left_alone()),
        )

    def _readiness(self) -> Readiness:
        is_draining = self._life is not None and self._life.draining
        reasons = []
        if is_draining:
            reasons.append("draining")
        if not self._models.names():
            reasons.append("no model is served: no worker is known")
        missing = {
            name: why
            for name in self._models.names()
            if (why := missing_role(self._models.workers(name)))
        }
        reasons += [f"model {name}: {why}" for name, why in missing.items()]
        return Readiness(
            is_ready=not is_draining and bool(self._models.names() - missing.keys()),
            is_draining=is_draining,
            reasons=tuple(reasons),
            degraded=tuple(self._degraded()),
            models_not_ready={
                **dict.fromkeys(self._models.loading, "its card is being loaded"),
                **self._models.not_ready,
                **missing,
            },
            instances=tuple(map(_shown, self._snapshot.instances.values())),
        )

    def _degraded(self) -> Iterator[str]:
        if not self._router.is_connected:
            yield "no router answers: requests wait, then go by this frontend's own load"
        for name in self._models.names():
            if why := unsplit(self._models.workers(name)):
                yield f"model {name}: requests are not split: {why}"
        for worker_id, why in self._engines.why_left_alone().items():
            yield f"worker {worker_id} gets no requests for now: {why}"
        yield from self._kv.degraded()
        yield from map(_hidden, self._models.hidden.items())


def _hidden(adapter: tuple[tuple[str, str], str]) -> str:
    (name, model), why = adapter
    return f"the adapter {name!r} of {model} cannot be asked for: {why}"


def _shown(instance: Instance) -> dict[str, object]:
    shown: dict[str, object] = {
        "id": str(instance.id),  # as a number, many readers of JSON would round it
        "service": instance.service,
        "name": instance.stable_name,
        "address": instance.address,
    }
    if instance.model:
        shown |= {"model": instance.model, "role": instance.role}
    if policy := instance.meta.get(PREFILL_BYPASS):
        shown[PREFILL_BYPASS] = policy
    return shown


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises Conflict when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Conflict(
            f"cannot serve HTTP on {host}:{port}: {error.strerror}; choose another port with "
            "--http-port or KVMESH_FRONTEND_HTTP_PORT",
            field="http_port",
            reason="ADDRESS_IN_USE",
        ) from error
    return listener


def _closing_connections(api: Application, is_draining: Callable[[], bool]) -> Application:
    """The same, but while it drains each answer ends its connection: clients go elsewhere in time.

    Connections that are idle when the drain is over are closed under their clients' hands.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await api(scope, receive, send_closing if is_draining() else send)

    return serve


class _Uvicorn(uvicorn.Server):
    """uvicorn without its hands on signals: the lifecycle owns them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield
