"""Builds a console from its parts.

A console is no member of the registry: no service sends it work, and none may wait for it. It reads
the mesh as `meshctl` does.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.util import find_spec
from random import SystemRandom
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry

from common.access.browser_policy import BrowserPolicy
from common.access.key_file import KeyFile
from common.access.login_links import open_folder, remove_url, write_url
from common.errors import InternalError
from common.registry.instances import new_instance_id
from common.registry.open import open_registry
from common.registry.registry import Registry
from common.rpc import channel as rpc
from common.runtime.build import build_name
from common.runtime.certificates import CertificateFiles
from common.runtime.config import ConfigError
from common.runtime.hosts import WILDCARD_HOSTS
from common.runtime.member_key import MemberKey
from common.service.lifecycle import Lifecycle, ServiceInfo
from common.service.metrics_server import serve_metrics
from console_svc.access.failures import LoginFailures
from console_svc.access.gate import Gate
from console_svc.access.login import Logins
from console_svc.access.login_page import LoginPages
from console_svc.access.sessions import Sessions
from console_svc.backend import Backend
from console_svc.config import ConsoleConfig
from console_svc.metrics import build_metrics
from console_svc.server import ConsoleServer, listen

TOKEN_BYTES = 32
SWEEP_S = 1.0
# For the last messages of pages; a session has nothing to finish.
DRAIN_MAX_S = 2.0
START_TIMEOUT_S = 30.0
START_POLL_S = 0.02


class ConsoleApp:
    """One console process; see `App` of `common/service/lifecycle.py`."""

    def __init__(
        self,
        config: ConsoleConfig,
        *,
        instance_id: int | None = None,
        member_key: MemberKey | None = None,
        registry: Registry | None = None,
    ) -> None:
        """member_key: unused: a console is no member. registry: None for the configured one."""
        if find_spec("nicegui") is None:
            raise ConfigError(["the console needs more packages: pip install 'kvmesh[console]'"])
        self._config = config
        self.instance_id = instance_id or new_instance_id(SystemRandom())
        self._registry = open_registry(config) if registry is None else registry
        self._keys = None if config.api_keys is None else KeyFile(config.api_keys)
        self._logins = Logins(
            Sessions(lambda: secrets.token_urlsafe(TOKEN_BYTES)),
            LoginFailures(),
            config.login_path,
            self._keys,
            time.monotonic,
            time.time,
        )
        security = rpc.security_from_config(config)
        self.backend = Backend(config, self._registry, security, self._keys)
        self._certificates = _certificates(config)
        self._login_pages = LoginPages(self._logins, is_secure=config.uses_https)
        self._server: ConsoleServer | None = None
        self._server_task: asyncio.Task[None] | None = None
        self._close_metrics: Callable[[], Awaitable[None]] | None = None
        self.url = ""
        self.metrics_address = ""

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        config = self._config
        open_folder(config.login_path)
        listen_socket = listen(config.http_host, config.http_port)
        port = listen_socket.getsockname()[1]
        otlp_port = await self.backend.start(lifecycle)
        self._login_pages.cookie_name = f"kvmesh_console_{port}"
        self.url = config.public_url or self._own_url(port)
        if self._keys is not None:
            lifecycle.spawn(self._keys.follow(), name="api keys")
        await self._serve(lifecycle, listen_socket)
        write_url(config.login_path, self.url)
        addresses = {"http": self.url, "otlp": rpc.join_address(config.otlp_host, otlp_port)}
        if self.metrics_address:
            addresses["metrics"] = self.metrics_address
        return ServiceInfo(str(self.instance_id), addresses)

    async def register(self) -> None:
        """Does nothing: it is no member."""

    async def deregister(self) -> None:
        """Removes its address, so that no link leads to it any more."""
        if self.url:
            remove_url(self._config.login_path, self.url)

    async def left(self, timeout_s: float) -> None:
        """Returns at once: no service sends it work."""

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Ends all sessions with their pages."""
        self._logins.end_all()
        if self._server is not None and self._server_task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._server_task], timeout=min(grace_s, DRAIN_MAX_S) + 1.0)
        return []

    async def close(self) -> None:
        if self._close_metrics is not None:
            await self._close_metrics()
        await self.backend.close()
        await self._registry.close()

    def _own_url(self, port: int) -> str:
        host = self._config.http_host
        shown = "127.0.0.1" if host in WILDCARD_HOSTS else host
        scheme = "http" if self._certificates is None else "https"
        return f"{scheme}://{rpc.join_address(shown, port)}"

    async def _serve(self, lifecycle: Lifecycle, listen_socket: socket.socket) -> None:
        """Serves the pages; returns when their server accepts connections. Raises InternalError if
        it does not start."""
        # Imported here: NiceGUI takes half a second, and the settings are checked without it.
        from console_svc.web import build_web, count_viewers, remove_unconnected_pages

        config, backend = self._config, self.backend
        metrics = build_metrics(
            backend.collector,
            backend.traces,
            backend.receiver,
            self._logins,
            count_viewers,
            self.instance_id,
            config.stable_name,
        )
        web = build_web(
            backend.state,
            self._login_pages,
            metrics,
            self._health,
            lambda: not lifecycle.is_draining,
            reconnect_s=config.reconnect_s,
        )
        server = self._server = ConsoleServer(
            Gate(web, self._logins, _browser_policy(config), lambda: self._login_pages.cookie_name),
            viewers_max=config.viewers_max,
            drain_s=min(config.drain_s, DRAIN_MAX_S),
            certificates=self._certificates,
        )
        task = self._server_task = lifecycle.spawn(server.serve([listen_socket]), name="pages")
        lifecycle.spawn(self._sweep(remove_unconnected_pages), name="sessions and pages")
        self._serve_metrics(metrics)
        async with asyncio.timeout(START_TIMEOUT_S):
            while not server.started:
                if task.done():
                    raise InternalError("the server of the pages did not start; see the log")
                await asyncio.sleep(START_POLL_S)

    def _serve_metrics(self, metrics: CollectorRegistry) -> None:
        config = self._config
        if config.metrics_port is not None:
            self.metrics_address, self._close_metrics = serve_metrics(
                metrics,
                config.effective_metrics_host,
                config.metrics_port,
                key=config.metrics_key,
                context=None if self._certificates is None else self._certificates.server_context(),
            )

    async def _sweep(self, remove_pages: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._logins.sweep()
            remove_pages()

    def _health(self) -> Mapping[str, object]:
        overview = self.backend.state.overview
        return {
            "status": "healthy",
            "members": overview.members,
            "unhealthy": overview.unhealthy,
            "registry_problem": overview.registry_problem,
            "traces": len(self.backend.traces),
            "sessions": self._logins.open_sessions,
            "build": build_name(),
        }


def _browser_policy(config: ConsoleConfig) -> BrowserPolicy:
    names = {*config.allowed_hosts, urlsplit(config.public_url).hostname or ""}
    return BrowserPolicy(
        origins=frozenset(),
        hosts=frozenset(map(str.lower, names)) - {""},
        checks_host=True,
        is_json_only=False,
    )


def _certificates(config: ConsoleConfig) -> CertificateFiles | None:
    cert, key = config.http_tls_cert_path, config.http_tls_key_path
    if cert is None or key is None:
        return None
    return CertificateFiles({"http_tls_cert_path": cert, "http_tls_key_path": key})
