"""What the apps of all services share, and their `main`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from random import SystemRandom
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from prometheus_client import CollectorRegistry

from common.registry.instances import (
    BUILD_META_KEY,
    HASH_KEY_META_KEY,
    HEALTH_META_KEY,
    HEALTH_SERVICE_META_KEY,
    METRICS_META_KEY,
    STREAM_META_KEY,
    Instance,
    Service,
    new_instance_id,
)
from common.registry.open import health_check_meta, open_registry
from common.registry.registry import Lease, Registry
from common.rpc import channel as rpc
from common.rpc.interceptors import RunningCalls
from common.rpc.stream_server import StreamServer
from common.runtime import env
from common.runtime.build import build_id
from common.runtime.certificates import CertificateFiles
from common.runtime.config import ServiceConfig, read_config_or_exit
from common.runtime.descriptors import raise_descriptor_limit
from common.runtime.hosts import WILDCARD_HOSTS
from common.runtime.member_key import MemberKey
from common.runtime.mesh_auth import key_fingerprint
from common.service.health import MEMBER_SERVICE
from common.service.lifecycle import App, Lifecycle, ServiceInfo, run_service
from common.service.metrics_server import add_instance_info, add_process_metrics, serve_metrics
from common.service.routable.peers import Routable
from common.service.routable.service import MemberServicer
from common.service.routable.watch import RoutableWatch
from common.service.state_metrics import Reading, StateCollector, counter, gauge
from common.streams.stall_clock import TICK_S, StallClock
from common.trials.child_process import unexpected_ends
from kvmesh.member.v1 import member_pb2_grpc

# Of the metric `routable`.
ROUTABLE_TEXT = "1 if the peers of this process send it work"

ConfigT = TypeVar("ConfigT", bound=ServiceConfig)
ConfigT_contra = TypeVar("ConfigT_contra", bound=ServiceConfig, contravariant=True)


class BuildApp(Protocol[ConfigT_contra]):
    """Returns the app of a process; usually its class."""

    def __call__(
        self, config: ConfigT_contra, *, instance_id: int, member_key: MemberKey | None
    ) -> App: ...


def main(service: str, config_class: type[ConfigT], build: BuildApp[ConfigT]) -> NoReturn:
    """Runs a service (router, ...) until stopped, and exits. build: called in the event loop."""
    config, warnings = read_config_or_exit(
        config_class, service.upper(), env.environ(), sys.argv[1:]
    )
    serve(service, config, build, warnings)


def serve(
    service: str, config: ConfigT, build: BuildApp[ConfigT], warnings: Sequence[str] = ()
) -> NoReturn:
    """Runs a configured service as a new instance until stopped, and exits."""
    member_key = _new_member_key(config)
    instance_id = new_instance_id(SystemRandom()) if member_key is None else member_key.id

    def build_app() -> App:
        raise_descriptor_limit()
        return build(config, instance_id=instance_id, member_key=member_key)

    run_service(
        service,
        config,
        build_app,
        instance_id=str(instance_id),
        warnings=warnings,
    )


class ServiceApp(Generic[ConfigT]):
    """Registry, gRPC server, metrics server and registration of one process.

    A subclass implements `start`, and overrides `_instance` to advertise more. `_reason_against`
    states when it acknowledges peers, `_own_need` what it needs to be routable itself.
    instance_id: None for a new one.
    member_key: has the id; None: if the instance id is None too, the configuration decides, else
        the instance has no key.
    registry: None for the configured one.
    """

    def __init__(
        self,
        service: Service,
        config: ConfigT,
        *,
        instance_id: int | None,
        member_key: MemberKey | None,
        registry: Registry | None,
    ) -> None:
        self._service_name = service
        self._config = config
        if instance_id is None:
            member_key = member_key or _new_member_key(config)
            instance_id = new_instance_id(SystemRandom()) if member_key is None else member_key.id
        self.instance_id = instance_id
        self._security = rpc.security_from_config(config, member_key)
        if registry is None:
            registry = open_registry(config, self._security.members)
        self._registry = registry
        self._stall_clock = StallClock(time.monotonic())
        self._calls = RunningCalls()
        self._own_addresses: set[str] = set()
        self._server = rpc.server(
            security=self._security, addresses=self._own_addresses, calls=self._calls
        )
        self._stream_addresses: set[str] = set()
        self._streams = StreamServer(
            security=self._security, addresses=self._stream_addresses, calls=self._calls
        )
        self._meta: dict[str, str] = {}
        self._lease: Lease | None = None
        self._routable: RoutableWatch | None = None
        self._close_metrics: Callable[[], Awaitable[None]] | None = None
        self.address = ""
        self.metrics_address = ""

    @property
    def routable(self) -> Routable:
        """Whether the peers of this process send it work."""
        return Routable(False) if self._routable is None else self._routable.state

    async def register(self) -> None:
        self._lease = await self._registry.register(self._instance())
        if self._routable is not None:
            await self._routable.join(self._lease.instance)

    async def deregister(self) -> None:
        if self._routable is not None:
            await self._routable.leave()
        if self._lease is not None:
            await self._lease.close()
            self._lease = None

    async def left(self, timeout_s: float) -> None:
        if self._routable is not None:
            await self._routable.left(timeout_s)

    async def drain(self, grace_s: float) -> Sequence[str]:
        return await self._stop_servers(grace_s)

    async def close(self) -> None:
        if self._close_metrics is not None:
            await self._close_metrics()
        await self._close_servers()
        await self._registry.close()

    def _bind(
        self, lifecycle: Lifecycle, grpc_services: Sequence[str] = (), *, has_streams: bool = True
    ) -> int:
        """Binds the gRPC servers and adds health and reflection; the port of the first one."""
        config = self._config
        lifecycle.spawn(self._measure_stalls(), name="stall clock")
        port = rpc.bind(self._server, config.host, config.port, security=self._security)
        self.address = rpc.join_address(config.advertise_host or config.host, port)
        self._own_addresses |= rpc.own_addresses(config.host, port, config.advertise_host)
        self._meta = health_check_meta(config, self.address, lifecycle.health.port)
        self._meta[HASH_KEY_META_KEY] = key_fingerprint(config.mesh_key)
        self._meta[BUILD_META_KEY] = build_id()
        if has_streams:
            stream_port = self._streams.bind(config.host, config.stream_port)
            host = config.advertise_host or config.host
            self._meta[STREAM_META_KEY] = rpc.join_address(host, stream_port)
            self._stream_addresses |= rpc.own_addresses(
                config.host, stream_port, config.advertise_host
            )
        rpc.add_health(self._server, lifecycle.health.servicer)
        self._add_member_service(lifecycle)
        rpc.enable_reflection(self._server, (*grpc_services, MEMBER_SERVICE))
        return port

    def _add_member_service(self, lifecycle: Lifecycle) -> None:
        if HEALTH_META_KEY in self._meta:
            self._meta[HEALTH_SERVICE_META_KEY] = MEMBER_SERVICE
        self._routable = RoutableWatch(
            self._registry,
            self._security,
            self._own_need,
            self._is_in_progress,
            lifecycle,
            limit_s=self._config.routable_limit_s,
            required=self._config.required_roles,
        )
        servicer = MemberServicer(self._reason_against, lambda: self.routable)
        member_pb2_grpc.add_MemberServiceServicer_to_server(servicer, self._server)

    async def _reason_against(self, member_id: int, is_leaving: bool) -> str:
        """Returns why this process does not acknowledge a member: that it does not send work to it
        yet or, if the member leaves, that it may still. "": it acknowledges the member."""
        return ""

    def _own_need(self, peer: Instance) -> str:
        """Returns what this process needs of a peer and does not have yet, so that it is not
        routable; "" if it needs nothing of it."""
        return ""

    def _is_in_progress(self, peer: Instance) -> bool:
        """Returns whether this process is about to have what it needs of a peer: it waits for that
        without a limit."""
        return False

    def _add_service(self, add: Callable[[Any, Any], None], servicer: object) -> None:
        """Adds a service to both servers. add: the generated function."""
        for server in (self._server, self._streams):
            add(servicer, server)

    async def _start_servers(self) -> None:
        await self._server.start()
        await self._streams.start()

    async def _stop_servers(self, grace_s: float) -> list[str]:
        self._streams.refuse()
        return await rpc.stop(
            self._server, grace_s, self._calls, end_streams=self._streams.end_calls
        )

    async def _close_servers(self) -> None:
        await self._server.stop(None)
        await self._streams.close()

    def _serve_metrics(
        self, metrics: CollectorRegistry, *, role: str = "", model: str = ""
    ) -> None:
        """Serves the metrics on their port if one is configured, and advertises it; call it after
        `_bind`. role, model: see `add_instance_info`."""
        config = self._config
        if config.metrics_port is not None:
            self.add_member_metrics(metrics, role=role, model=model)
            files = self._security.files
            self.metrics_address, self._close_metrics = serve_metrics(
                metrics,
                config.effective_metrics_host,
                config.metrics_port,
                key=config.metrics_key,
                context=None if files is None else files.server_context(),
            )
            self._meta[METRICS_META_KEY] = self._metrics_url(config.host, files) + "/metrics"

    def add_member_metrics(
        self, metrics: CollectorRegistry, *, role: str = "", model: str = ""
    ) -> None:
        """Adds what a service without HTTP has beside its own metrics."""
        self._add_process_metrics(metrics, role=role, model=model)
        metrics.register(StateCollector("kvmesh_stream", self._read_streams))
        metrics.register(StateCollector(f"kvmesh_{self._service_name}", self._read_routable))

    def _add_process_metrics(
        self, metrics: CollectorRegistry, *, role: str = "", model: str = ""
    ) -> None:
        """Adds what every process has."""
        add_process_metrics(metrics)
        name = self._config.stable_name
        add_instance_info(
            metrics, self._service_name, self.instance_id, name, role=role, model=model
        )
        metrics.register(StateCollector("kvmesh", self._read_process))

    def _metrics_url(self, own_host: str, files: CertificateFiles | None) -> str:
        """Returns the URL of the metrics port, without a path. own_host: if it binds all addresses
        and none is advertised. files: None: without TLS."""
        host, port = self.metrics_address.rsplit(":", 1)
        if self._config.effective_metrics_host in WILDCARD_HOSTS:
            host = self._config.advertise_host or own_host
        scheme = "http" if files is None else "https"
        return f"{scheme}://{rpc.join_address(host.strip('[]'), int(port))}"

    def _certificate_files(self) -> dict[str, CertificateFiles]:
        """Returns the certificates that this process presents, by the setting of their path."""
        files = self._security.files
        return {} if files is None else {"tls_cert_path": files}

    def _read_process(self) -> Iterator[Reading]:
        text = "1 if this process reads the registry and its own entry is there, else 0."
        yield gauge("registry_reachable", text, self._registry.is_reachable)
        text = "Peers that this process does not wait for any more, because they do not respond."
        yield gauge("routable_given_up", text, len(self.routable.given_up))
        text = "Unix time at which the first certificate of a file expires, by setting."
        ends = {name: files.newest().ends_at_s for name, files in self._certificate_files().items()}
        yield gauge("certificate_expiry_timestamp_seconds", text, ends, label="certificate")
        text = "Delay of the event loop in seconds; peers are not judged by this time."
        yield counter("event_loop_stalled_seconds", text, self._stalled_s())
        text = "Processes for inputs of clients and peers that ended before they were asked to."
        yield counter("child_process_ends", text, dict(unexpected_ends), label="kind")

    def _stalled_s(self) -> float:
        """Returns the seconds for which this process has stalled since its start."""
        return self._stall_clock.stalled_s(time.monotonic())

    async def _measure_stalls(self) -> None:
        while True:
            self._stall_clock.tick(time.monotonic())
            await asyncio.sleep(TICK_S)

    def _read_routable(self) -> Iterator[Reading]:
        yield gauge("routable", ROUTABLE_TEXT, self.routable.is_routable)

    def _read_streams(self) -> Iterator[Reading]:
        streams = self._streams
        connections = {"accepted": streams.accepted_calls, "pending": len(streams.pending)}
        text = "Connections of the stream port; pending: without an accepted call."
        yield gauge("connections", text, connections, label="state")
        text = "Connections of the stream port that exceeded a limit."
        yield counter("connections_ended", text, dict(streams.ended), label="limit")

    def _info(self, **addresses: str) -> ServiceInfo:
        addresses = {"grpc": self.address, **addresses}
        if STREAM_META_KEY in self._meta:
            addresses["streams"] = self._meta[STREAM_META_KEY]
        if self.metrics_address:
            addresses["metrics"] = self.metrics_address
        return ServiceInfo(str(self.instance_id), addresses)

    def _instance(self) -> Instance:
        return self._build_instance()

    def _build_instance(self, **facts: Any) -> Instance:
        stable_name = self._config.stable_name
        if not stable_name and self._config.port:
            # Only the successor of this process can bind the same fixed address.
            stable_name = f"{self._service_name}@{self.address}"
        values = {"stable_name": stable_name, "meta": self._meta, **facts}
        return Instance(
            id=self.instance_id,
            namespace=self._config.namespace,
            service=self._service_name,
            address=self.address,
            **values,
        )


def _new_member_key(config: ServiceConfig) -> MemberKey | None:
    """Returns the key of a new instance; None in a mesh without token and mutual TLS."""
    return MemberKey() if config.has_mesh_secret else None
