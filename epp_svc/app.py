"""Builds an endpoint picker from its parts.

For the other members of a mesh a picker is a frontend: it has the models, a session with a router
and a stream to each worker, by which it learns which of them respond. It serves no HTTP: its
gateway does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Final

import grpc

from common.errors import Conflict
from common.registry.instances import Instance
from common.registry.registry import Registry
from common.rpc import channel as rpc
from common.rpc.interceptors import RunningCalls
from common.runtime.certificates import CertificateFiles
from common.runtime.member_key import MemberKey
from common.service.base import ServiceApp
from common.service.lifecycle import Lifecycle, ServiceInfo
from common.trials.trials import Trials
from epp_svc.config import EppConfig
from epp_svc.metrics import Metrics
from epp_svc.placing import Placing
from epp_svc.service import Picker
from epp_svc.wire import SERVICE_NAME
from frontend_svc.mesh_client import MeshClient, wait_loaded
from frontend_svc.models import tokenizer_files
from frontend_svc.models.alias_file import AliasFile
from frontend_svc.recent_requests import service as recent_requests
from frontend_svc.recent_requests.ring import RecentRequests
from frontend_svc.recent_requests.service import RecentRequestServicer
from kvmesh.extproc.v1 import extproc_pb2 as pb
from kvmesh.frontend.v1 import frontend_pb2_grpc

# For the models to load before the port opens.
START_S: Final = 1.0
HEALTH_INTERVAL_S: Final = 0.1
# Health of the port for gateways, by service. The first ones are SERVING while the picker is
# routable, as the service "" is; the last one from the start on.
READY_SERVICES: Final = (SERVICE_NAME, "readiness", "inference-extension")
LIVE_SERVICE: Final = "liveness"


class EppApp(ServiceApp[EppConfig]):
    """One picker process; see `ServiceApp`."""

    def __init__(
        self,
        config: EppConfig,
        *,
        instance_id: int | None = None,
        member_key: MemberKey | None = None,
        registry: Registry | None = None,
    ) -> None:
        super().__init__(
            "frontend", config, instance_id=instance_id, member_key=member_key, registry=registry
        )
        rng = Random()
        self._mesh = mesh = MeshClient(
            self.instance_id,
            config,
            self._registry,
            self._security,
            Trials((tokenizer_files.PREPARE,)),
            rng,
            self._stalled_s,
            open_requests=lambda: dict(self._placing.open_picks),
        )
        self._placing = Placing(mesh.router, mesh.models, mesh.engines, config.fallbacks, rng)
        self._aliases: AliasFile | None = None
        if config.aliases:
            self._aliases = AliasFile(config.aliases, mesh.models.use_aliases)
        self.metrics = Metrics(lambda: self._picker.open_requests, lambda: mesh.router.unrouted)
        self._picker = Picker(self._placing, self.metrics, config)
        self._certificates = _certificates(config)
        self._gateway_calls = RunningCalls()
        self._gateway_server = rpc.server(calls=self._gateway_calls)
        self.ext_proc_address = ""

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        self._bind(lifecycle, [recent_requests.SERVICE_NAME], has_streams=False)
        # Operators read the requests of all frontends: a picker sees no responses, and has none.
        frontend_pb2_grpc.add_RecentRequestServiceServicer_to_server(
            RecentRequestServicer(RecentRequests(0, self._mesh.members)), self._server
        )
        if self._aliases is not None and self._aliases.path is not None:
            lifecycle.spawn(self._aliases.follow(), name="aliases")
        await wait_loaded(await self._mesh.start(lifecycle), START_S)
        self._serve_metrics(self.metrics.registry)
        await self._serve_gateways(lifecycle)
        await self._server.start()
        return self._info(ext_proc=self.ext_proc_address)

    async def _serve_gateways(self, lifecycle: Lifecycle) -> None:
        config = self._config
        handler = grpc.stream_stream_rpc_method_handler(
            self._picker.process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        service = grpc.method_handlers_generic_handler(SERVICE_NAME, {"Process": handler})
        self._gateway_server.add_generic_rpc_handlers((service,))
        rpc.add_health(self._gateway_server, lifecycle.health.servicer)
        port = self._bind_gateways()
        self.ext_proc_address = rpc.join_address(
            config.advertise_host or config.ext_proc_host, port
        )
        for name in READY_SERVICES:
            await lifecycle.health.set(name, False)
        await lifecycle.health.set(LIVE_SERVICE, True)
        lifecycle.spawn(self._follow_health(lifecycle), name="health for gateways")
        await self._gateway_server.start()

    def _bind_gateways(self) -> int:
        """Returns the port for gateways. Raises Conflict if the address cannot be bound."""
        config = self._config
        rpc.check_bindable(config.ext_proc_host, config.ext_proc_port, "ext_proc_port")
        address = rpc.join_address(config.ext_proc_host, config.ext_proc_port)
        try:
            if self._certificates is None:
                return self._gateway_server.add_insecure_port(address)
            credentials = rpc.server_credentials(self._certificates)
            return self._gateway_server.add_secure_port(address, credentials)
        except RuntimeError as error:
            text = f"cannot bind {address}: {error}"
            raise Conflict(text, field="ext_proc_port", reason="ADDRESS_IN_USE") from error

    async def _follow_health(self, lifecycle: Lifecycle) -> None:
        """Reports to gateways whether the picker is routable, as `""` does to other peers."""
        was_routable = False
        while True:
            is_routable = self.routable.is_routable
            if is_routable != was_routable:
                was_routable = is_routable
                for name in READY_SERVICES:
                    await lifecycle.health.set(name, is_routable)
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _reason_against(self, member_id: int, is_leaving: bool) -> str:
        return await self._mesh.acknowledgement.reason_against(member_id, is_leaving)

    def _own_need(self, peer: Instance) -> str:
        return self._mesh.acknowledgement.own_need(peer)

    def _is_in_progress(self, peer: Instance) -> bool:
        return self._mesh.acknowledgement.is_in_progress(peer)

    def _certificate_files(self) -> dict[str, CertificateFiles]:
        own = {} if self._certificates is None else {"ext_proc_tls_cert_path": self._certificates}
        return {**super()._certificate_files(), **own}

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Refuses new streams of gateways, waits for the open ones, then stops the other port."""
        names = await rpc.stop(self._gateway_server, grace_s, self._gateway_calls)
        return [*names, *await rpc.stop(self._server, 0.5, self._calls)]

    async def close(self) -> None:
        await self._gateway_server.stop(None)
        await super().close()


def _certificates(config: EppConfig) -> CertificateFiles | None:
    """Returns the files of the port for gateways; None: it has no TLS. Raises InvalidRequest with
    the setting of a file that cannot be used."""
    settings = ("ext_proc_tls_cert_path", "ext_proc_tls_key_path", "ext_proc_tls_ca_path")
    found = {setting: getattr(config, setting) for setting in settings}
    paths = {setting: path for setting, path in found.items() if path is not None}
    return CertificateFiles(paths) if paths else None
