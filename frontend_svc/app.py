"""Builds a frontend from its parts."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from common.access.caller import ANONYMOUS, Caller
from common.access.key_file import KeyFile
from common.errors import Unavailable
from common.registry.instances import HTTP_META_KEY, METRICS_META_KEY, Instance
from common.registry.registry import Registry
from common.rpc import channel as rpc
from common.runtime.certificates import CertificateFiles
from common.runtime.config import ConfigError, flag_name
from common.runtime.member_key import MemberKey
from common.service.base import ServiceApp
from common.service.lifecycle import Lifecycle, ServiceInfo
from common.trials import constraints
from common.trials.trials import Trials
from frontend_svc.access.keys import with_keys
from frontend_svc.access.quotas import TenantQuotas
from frontend_svc.batches import lines
from frontend_svc.batches.client import BatchClient
from frontend_svc.batches.lines import LINE_PATHS, BatchLineServicer
from frontend_svc.canaries.monitor import CanaryMonitor
from frontend_svc.config import FrontendConfig
from frontend_svc.edge.asgi import AsgiApp
from frontend_svc.edge.browsers import with_browser_policy
from frontend_svc.edge.server import FINAL_WRITE_TIMEOUT_S, HttpServer
from frontend_svc.edge.sockets import connection_limit, inherit, listen
from frontend_svc.endpoints.endpoint import EndpointDependencies
from frontend_svc.endpoints.record_file import RecordFile
from frontend_svc.endpoints.request_records import RequestRecords
from frontend_svc.mesh_client import MeshClient, wait_loaded
from frontend_svc.metrics.collectors import (
    CanaryCollector,
    CircuitCollector,
    HitDriftCollector,
    MemberCollector,
    ModelConfigCollector,
    RecordCollector,
    ResilienceCollector,
    StoreCollector,
    WaitCollector,
)
from frontend_svc.metrics.families import CanaryMetrics, DeploymentState, FrontendMetrics
from frontend_svc.models import tokenizer_files
from frontend_svc.models.alias_file import AliasFile
from frontend_svc.models.artifacts import ArtifactCollector
from frontend_svc.models.loading import MODEL_RETRY_INTERVAL_S
from frontend_svc.processes.siblings import Siblings
from frontend_svc.readiness import Readiness, assess_readiness
from frontend_svc.recent_requests import service as recent_requests
from frontend_svc.recent_requests.ring import RecentRequests
from frontend_svc.recent_requests.service import RecentRequestServicer
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.ports import WorkerPort
from frontend_svc.responses import background, stored
from frontend_svc.responses.background import RESPONSES_PATH, BackgroundResponseServicer
from frontend_svc.responses.durable import DurableResponses
from frontend_svc.responses.store import ResponseStore
from frontend_svc.responses.stored import ResponseStoreService, StoredResponses
from frontend_svc.routes.api import ApiDependencies
from frontend_svc.routes.dispatch import with_metrics_key
from frontend_svc.routes.table import dispatcher, routes
from frontend_svc.usage.ledger import UsageCollector, UsageLedger
from frontend_svc.usage.store import MEMORY, UsageStore
from frontend_svc.workers.hit_monitor import HitMonitor
from kvmesh.frontend.v1 import frontend_pb2_grpc

# In which a frontend with an inherited socket loads the models before it accepts connections.
INHERITED_START_S = 20.0
# For the records of the last requests to be written.
RECORDS_CLOSE_TIMEOUT_S = 5.0
ADMIN_CONNECTIONS_MAX = 64
GRPC_SERVICES = (
    *(stored.SERVICE_NAME, recent_requests.SERVICE_NAME),
    *(lines.SERVICE_NAME, background.SERVICE_NAME),
)


class FrontendApp(ServiceApp[FrontendConfig]):
    """One frontend process; see `ServiceApp`."""

    def __init__(
        self,
        config: FrontendConfig,
        *,
        instance_id: int | None = None,
        member_key: MemberKey | None = None,
        registry: Registry | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        """siblings: None if no other process shares the HTTP port."""
        self._connections_max = connection_limit(config.connections_max)
        super().__init__(
            "frontend", config, instance_id=instance_id, member_key=member_key, registry=registry
        )
        self._siblings = siblings
        self._rng = Random()
        self._trials = Trials((constraints.PREPARE, tokenizer_files.PREPARE))
        self._mesh = mesh = MeshClient(
            self.instance_id,
            config,
            self._registry,
            self._security,
            self._trials,
            self._rng,
            self._stalled_s,
            awaiting=self._awaiting_by_model,
            configured=config.configured_models,
        )
        self._members, self._models = mesh.members, mesh.models
        self._engines, self._router = mesh.engines, mesh.router
        self.gateway = self._open_gateway(self._engines)
        self._batches = BatchClient(self._members, self._security)
        self._stored_responses = self._make_response_store()
        metrics = FrontendMetrics(config.metrics_prefix)
        self._state = DeploymentState(self._models.request_names, frontend=metrics)
        loop = asyncio.get_running_loop()
        self._hit_monitor = HitMonitor(loop.time, config.kv_drift_max)
        self._canary_metrics = CanaryMetrics(config.metrics_prefix)
        self._canaries = CanaryMonitor(
            config,
            self._models,
            self._open_gateway,
            self._engines,
            lambda model: self.gateway.successes.pop(model, None),
            self._canary_metrics,
            self._rng,
        )
        self._canary_task: asyncio.Task[None] | None = None
        self._recent_requests = RecentRequests(config.recent_requests, self._members)
        self._records = _open_records(config, self._recent_requests)
        self._usage = UsageLedger(_open_usage(config, siblings), time.time)
        self._http: HttpServer | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._lifecycle: Lifecycle | None = None
        self._certificates = _http_certificates(config)
        self._aliases: AliasFile | None = None
        if config.aliases:
            self._aliases = AliasFile(config.aliases, self._models.use_aliases)
        self.http_address = ""

    def _open_gateway(self, workers: WorkerPort) -> Gateway:
        """Returns a gateway of its own to these workers, by the routers of this frontend."""
        return Gateway(
            self._router,
            workers,
            self._members,
            self._rng,
            stalled_s=self._stalled_s,
            silent_s=self._engines.silent_s,
            request_failed=self._engines.request_failed,
            open_circuits=self._engines.exclusion_reasons,
            worker_wait_s=self._config.worker_wait_s,
        )

    def _make_response_store(self) -> StoredResponses:
        config, store = self._config, None
        if config.response_store_mb:
            store = ResponseStore(config.response_store_mb << 20, config.response_ttl_s)
        return StoredResponses(
            self.instance_id,
            store,
            self._members,
            asyncio.get_running_loop().time,
            self._security,
            DurableResponses(self._batches),
            writes_durably=config.durable_responses,
        )

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        self._lifecycle = lifecycle
        config = self._config
        port = self._bind(lifecycle, GRPC_SERVICES, has_streams=False)
        frontend_pb2_grpc.add_RecentRequestServiceServicer_to_server(
            RecentRequestServicer(self._recent_requests), self._server
        )
        frontend_pb2_grpc.add_ResponseStoreServiceServicer_to_server(
            ResponseStoreService(self._stored_responses), self._server
        )
        is_shared = self._siblings is not None
        if config.http_fd:
            listen_sockets = [inherit(fd) for fd in config.http_fd]
        else:
            listen_sockets = [listen(config.http_host, config.http_port, shared=is_shared)]
        http_port = listen_sockets[0].getsockname()[1]
        self.http_address = rpc.join_address(config.advertise_host or config.http_host, http_port)
        models_loaded = await self._mesh.start(lifecycle, self._hit_monitor.on_snapshot)
        if self._aliases is not None and self._aliases.path is not None:
            lifecycle.spawn(self._aliases.follow(), name="aliases")
        if config.canary_interval_s:
            self._canary_task = lifecycle.spawn(self._canaries.run(), name="canaries")
        # The clients of an inherited socket wait meanwhile, or another process accepts them.
        limit_s = INHERITED_START_S if config.http_fd else MODEL_RETRY_INTERVAL_S
        await wait_loaded(models_loaded, limit_s)
        metrics = self.build_metrics()
        if self._siblings is not None:
            await self._siblings.open(metrics, self._readiness)
        self._http, admin = self._build_http_servers(lifecycle, metrics)
        self._http_task = lifecycle.spawn(self._http.serve(listen_sockets), name="http")
        if admin is not None:
            admin_socket = listen(
                config.effective_metrics_host,
                config.metrics_port or 0,
                shared=is_shared,
                setting="metrics_port",
            )
            host, port = admin_socket.getsockname()[:2]
            self.metrics_address = rpc.join_address(host, port)
            lifecycle.spawn(admin.serve([admin_socket]), name="metrics")
        await self._server.start()
        url = _url(self.http_address, self._certificates)
        self._meta |= {HTTP_META_KEY: url, METRICS_META_KEY: self._scrape_url(url)}
        return self._info(http=url)

    def _scrape_url(self, url: str) -> str:
        """Returns the URL of the metrics. url: that of the API."""
        if self.metrics_address:
            files = self._certificates or self._security.files
            url = self._metrics_url(self._config.http_host, files)
        return url + self._config.metrics_path

    def _certificate_files(self) -> dict[str, CertificateFiles]:
        own = {} if self._certificates is None else {"http_tls_cert_path": self._certificates}
        return {**super()._certificate_files(), **own}

    def build_metrics(self) -> CollectorRegistry:
        """Returns the metrics of this process."""
        metrics = CollectorRegistry()
        families, prefix = self._config.metrics_families, self._config.metrics_prefix
        self._state.register(metrics, legacy=families != "current", current=families != "legacy")
        metrics.register(MemberCollector(self._members, prefix))
        metrics.register(ModelConfigCollector(self._members, self._models.names, prefix))
        metrics.register(ArtifactCollector(self._models.artifacts, prefix))
        metrics.register(HitDriftCollector(self._hit_monitor.drift_stats, prefix))
        metrics.register(ResilienceCollector(self._resilience_values, prefix))
        self._canary_metrics.register(metrics)
        metrics.register(CanaryCollector(self._canary_values, prefix))
        metrics.register(WaitCollector(self._awaiting_worker, prefix))
        metrics.register(CircuitCollector(self._engines.open_circuits, prefix))
        metrics.register(RecordCollector(self._record_counts, prefix))
        metrics.register(StoreCollector(lambda: self._stored_responses.not_durable, prefix))
        metrics.register(UsageCollector(self._usage, prefix))
        self._add_process_metrics(metrics)
        return metrics

    def _build_http_servers(
        self, lifecycle: Lifecycle, metrics: CollectorRegistry
    ) -> tuple[HttpServer, HttpServer | None]:
        """Returns the servers of the API, and of its routes of administrators if they have a
        listener of their own."""
        config = self._config
        dependencies = self._api_dependencies(metrics, lambda: lifecycle.is_draining)
        entries = routes(config.metrics_path)
        responses_route = next(entry for entry in entries if entry.path == RESPONSES_PATH)
        line_api = dispatcher((e for e in entries if e.path in LINE_PATHS), dependencies)
        admin = None
        if config.metrics_port is not None:
            admin_api = dispatcher((entry for entry in entries if entry.is_admin), dependencies)
            entries = tuple(entry for entry in entries if not entry.is_admin)
            admin = HttpServer(
                with_metrics_key(admin_api, config.metrics_key),
                lambda: lifecycle.is_draining,
                config.drain_s,
                ADMIN_CONNECTIONS_MAX,
                self._certificates or self._security.files,
            )
        served: AsgiApp = dispatcher(entries, dependencies)
        find_caller = _unchecked
        with_quotas: Callable[[AsgiApp], AsgiApp] = _without_keys
        if self._config.api_keys is not None:
            keys = KeyFile(self._config.api_keys)
            lifecycle.spawn(keys.follow(), name="api keys")
            find_caller = keys.find_id
            quotas = TenantQuotas(self._members)
            with_quotas = partial(with_keys, keys=keys, quotas=quotas)
            served = with_quotas(served)
        frontend_pb2_grpc.add_BatchLineServiceServicer_to_server(
            BatchLineServicer(line_api, find_caller), self._server
        )
        frontend_pb2_grpc.add_BackgroundResponseServiceServicer_to_server(
            BackgroundResponseServicer(
                lambda api: with_quotas(dependencies.generation(responses_route, api)), find_caller
            ),
            self._server,
        )
        server = HttpServer(
            with_browser_policy(served, config),
            lambda: lifecycle.is_draining,
            config.drain_s,
            self._connections_max,
            self._certificates,
        )
        return server, admin

    def _api_dependencies(
        self, metrics: CollectorRegistry, is_draining: Callable[[], bool]
    ) -> ApiDependencies:
        siblings = self._siblings
        return ApiDependencies(
            EndpointDependencies(
                self.gateway,
                self._models,
                self._state,
                self._config,
                self._records,
                self._usage,
                self._hit_monitor.on_request_end,
            ),
            self._trials,
            self._stored_responses,
            self._readiness,
            _unchanged if siblings is None else siblings.combine,
            partial(_encode, metrics) if siblings is None else siblings.encode,
            self._members,
            self._batches,
            self._registry,
            is_draining,
        )

    def _instance(self) -> Instance:
        """Returns the entry by which routers free the bookings of a frontend that leaves."""
        return self._build_instance(
            stable_name=self._config.stable_name, http_address=self.http_address
        )

    async def _reason_against(self, member_id: int, is_leaving: bool) -> str:
        return await self._mesh.acknowledgement.reason_against(member_id, is_leaving)

    def _own_need(self, peer: Instance) -> str:
        return self._mesh.acknowledgement.own_need(peer)

    def _is_in_progress(self, peer: Instance) -> bool:
        return self._mesh.acknowledgement.is_in_progress(peer)

    async def deregister(self) -> None:
        if self._http is not None and self._config.http_fd:
            # New connections wait in the socket, which the launcher keeps, for a successor.
            self._http.stop_accepting()
        await super().deregister()

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Refuses new connections, waits for responses, aborts the rest with an error."""
        aborted: list[str] = []
        if self._canary_task is not None:
            self._canary_task.cancel()
        if self._http is not None and self._http_task is not None:
            self._http.should_exit = True
            done, _ = await asyncio.wait([self._http_task], timeout=grace_s)
            if not done:
                shutdown = Unavailable("this frontend is shutting down", 1.0)
                aborted = self.gateway.abort_all(shutdown)
                self._models.waits.abort_all(shutdown)
                await asyncio.wait([self._http_task], timeout=FINAL_WRITE_TIMEOUT_S)
        return [*aborted, *await rpc.stop(self._server, 0.5, self._calls)]

    async def close(self) -> None:
        if self._siblings is not None:
            await self._siblings.close()
        await self._batches.close()
        await super().close()
        await asyncio.to_thread(self._records.close, RECORDS_CLOSE_TIMEOUT_S)
        await asyncio.to_thread(self._usage.store.close, RECORDS_CLOSE_TIMEOUT_S)

    def _resilience_values(self) -> tuple[float, ...]:
        retries, migrations = self.gateway.retries, self.gateway.migrations
        return (
            retries.granted,
            retries.refused,
            self._router.unrouted,
            migrations.computing,
            migrations.waiting,
            sum(self._awaiting_worker().values()),
            len(self._engines.exclusion_reasons()),
            self.routable.is_routable,
        )

    def _canary_values(self) -> dict[str, tuple[bool, float | None]]:
        """Returns whether each model is served, and since when: served models that have a result,
        and configured ones that are not served."""
        found = {
            model: (result.failure is None, self._canaries.age_s(result))
            for model, result in self._canaries.results.items()
        }
        if not self._config.canary_interval_s:
            return found
        return {**dict.fromkeys(self._models.unserved, (False, None)), **found}

    def _record_counts(self) -> dict[str, tuple[int, int]]:
        """Returns written and dropped records by file; of the usage records, requests."""
        usage = self._usage.store
        return {**self._records.counts(), "usage": (usage.written, usage.dropped)}

    def _awaiting_worker(self) -> Counter[str]:
        """Returns the number of requests that wait for a worker of each model."""
        counts = Counter(self._models.awaiting)
        counts.update(self.gateway.worker_waits.counts())
        return counts

    def _awaiting_by_model(self) -> Mapping[str, int]:
        """Returns `_awaiting_worker` with aliases and adapters as the models that serve them."""
        counts: dict[str, int] = {}
        for name, count in self._awaiting_worker().items():
            model = self._models.served_as(name)
            counts[model] = counts.get(model, 0) + count
        return counts

    def _readiness(self) -> Readiness:
        return assess_readiness(
            self._members.snapshot,
            self._models,
            self._router,
            self._engines,
            self._hit_monitor,
            self._canaries,
            self.routable,
            is_draining=self._lifecycle is not None and self._lifecycle.is_draining,
        )


def _encode(metrics: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Returns metrics as text, and its media type, by an Accept header."""
    encode, media_type = choose_encoder(accept)
    return encode(metrics), media_type


def _without_keys(api: AsgiApp) -> AsgiApp:
    return api


def _unchecked(tenant: str, key_id: str) -> Caller:
    """Returns the client of a line at a frontend without keys; other frontends may have some."""
    return replace(ANONYMOUS, tenant=tenant, key_id=key_id)


async def _unchanged(own: Readiness) -> Readiness:
    """Returns the readiness of a frontend with one process."""
    return own


def _url(address: str, certificates: CertificateFiles | None) -> str:
    return f"{'http' if certificates is None else 'https'}://{address}"


def _http_certificates(config: FrontendConfig) -> CertificateFiles | None:
    cert, key = config.http_tls_cert_path, config.http_tls_key_path
    if cert is None or key is None:
        return None
    return CertificateFiles({"http_tls_cert_path": cert, "http_tls_key_path": key})


def _open_records(config: FrontendConfig, recent: RecentRequests) -> RequestRecords:
    def open_file(name: str, path: str) -> RecordFile | None:
        try:
            return RecordFile(Path(path), config.record_file_mb << 20) if path else None
        except OSError as error:
            raise ConfigError([f"{flag_name(name)}: {path!r} cannot be opened: {error}"]) from None

    audit = open_file("audit_log", config.audit_log)
    trace = open_file("request_trace", config.request_trace)
    return RequestRecords(audit, trace, config.audit_content, recent.add)


def _open_usage(config: FrontendConfig, siblings: Siblings | None) -> UsageStore:
    file = config.usage_file or (MEMORY if siblings is None else siblings.usage_file)
    try:
        return UsageStore(file, config.usage_days)
    except (OSError, sqlite3.Error) as error:
        name = flag_name("usage_file")
        raise ConfigError([f"{name}: {file!r} cannot be opened: {error}"]) from None
