"""The HTTP server: uvicorn on a socket of ours, without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import socket
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

import structlog
import uvicorn

from common.errors import Conflict
from common.runtime.certificates import CertificateFiles
from common.runtime.config import flag_name
from frontend_svc.edge.asgi import AsgiApp, Receive, Scope, Send
from frontend_svc.edge.bounded_protocol import REFUSED_MAX, BoundedProtocol

BACKLOG = 4096
# Clients and load balancers close idle connections after 4 to 60 s. If the server closed one first,
# a request that the client sends at the same moment would be lost.
IDLE_CONNECTION_S = 75
SEND_BUFFER_BYTES = 256 << 10
# Descriptors for files and other services.
OTHER_DESCRIPTORS = 512
# uvicorn has no limit of its own, and asyncio's is 60 s.
HANDSHAKE_TIMEOUT_S = 10.0
# Time for the last bytes of aborted responses to reach their clients.
FINAL_WRITE_TIMEOUT_S = 1.0

log = structlog.get_logger()


class HttpServer(uvicorn.Server):
    """Serves an API until `should_exit` is set. The lifecycle owns the signals."""

    def __init__(
        self,
        api: AsgiApp,
        is_draining: Callable[[], bool],
        drain_s: float,
        connections_max: int,
        certificates: CertificateFiles | None = None,
    ) -> None:
        """certificates: for TLS; None: plain HTTP."""
        self._context = None if certificates is None else certificates.server_context()
        limit = _connection_limit(connections_max)
        protocol = partial(BoundedProtocol, connections_max=limit)
        super().__init__(
            uvicorn.Config(
                _close_connections_on_drain(api, is_draining),
                log_config=None,
                access_log=False,
                # Any callable that makes a protocol.
                http=protocol,  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=IDLE_CONNECTION_S,
                # Longer than `drain` waits: aborted responses still send their error.
                timeout_graceful_shutdown=math.ceil(drain_s + FINAL_WRITE_TIMEOUT_S),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        loop = asyncio.get_running_loop()

        def make_protocol() -> asyncio.Protocol:
            # mypy: any callable that makes a protocol.
            return self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                _loop=loop,
            )

        for listen_socket in sockets or ():
            server = await loop.create_server(
                make_protocol,
                sock=listen_socket,
                ssl=self._context,
                ssl_handshake_timeout=None if self._context is None else HANDSHAKE_TIMEOUT_S,
                backlog=BACKLOG,
            )
            self.servers.append(server)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(
    host: str, port: int, *, shared: bool = False, setting: str = "http_port"
) -> socket.socket:
    """A bound socket. shared: with other sockets; those that listen share the connections. setting:
    the field that `port` is from. Raises Conflict if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listen_socket = socket.socket(family, socket.SOCK_STREAM)
    listen_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listen_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Connections inherit it. The kernel would buffer megabytes for each client that does not read.
    listen_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        listen_socket.bind((host, port))
    except OSError as error:
        listen_socket.close()
        raise Conflict(
            f"cannot serve HTTP on {host}:{port}: {error.strerror}; choose another port with "
            f"{flag_name(setting)} or KVMESH_FRONTEND_{setting.upper()}",
            field=setting,
            reason="ADDRESS_IN_USE",
        ) from error
    return listen_socket


def _connection_limit(connections_max: int) -> int:
    """The connections that the limit of descriptors permits; raises that limit if possible."""
    others = OTHER_DESCRIPTORS + REFUSED_MAX
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + others
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    limit = max(1, min(connections_max, wanted - others))
    if limit < connections_max:
        log.warning("connections_limited", connections_max=limit, descriptors=wanted)
    return limit


def _close_connections_on_drain(api: AsgiApp, is_draining: Callable[[], bool]) -> AsgiApp:
    """The same API, but during a drain each response ends its connection. Clients then connect to
    another frontend before the server closes idle connections."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_close(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await api(scope, receive, send_with_close if is_draining() else send)

    return serve
