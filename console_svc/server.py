"""The HTTP server of the pages."""

from __future__ import annotations

import asyncio
import math
import socket
from functools import partial
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import Conflict
from common.runtime.certificates import CertificateFiles
from common.service.socket_server import SocketServer
from console_svc.access.gate import AsgiApp

BACKLOG: Final = 512
# Of a message of a browser: an event of a page.
MESSAGE_BYTES_MAX: Final = 1 << 20
# Messages that a websocket queues for the application.
MESSAGES_MAX: Final = 32
IDLE_CONNECTION_S: Final = 75
# From the connection, or the first byte of a request, to the end of its headers.
HEAD_TIMEOUT_S: Final = 10.0
# Connections above viewers_max that receive 503; more are closed at once.
REFUSED_MAX: Final = 64


class ConsoleServer(SocketServer):
    """Serves the pages until `should_exit` is set."""

    def __init__(
        self,
        app: AsgiApp,
        *,
        viewers_max: int,
        drain_s: float,
        certificates: CertificateFiles | None = None,
        head_timeout_s: float = HEAD_TIMEOUT_S,
    ) -> None:
        """certificates: for TLS; None: plain HTTP."""
        super().__init__(
            uvicorn.Config(
                app,
                # Any callable that makes a protocol.
                http=partial(  # type: ignore[arg-type]
                    _BoundedProtocol,
                    connections_max=viewers_max + REFUSED_MAX,
                    head_timeout_s=head_timeout_s,
                ),
                log_config=None,
                access_log=False,
                lifespan="on",
                proxy_headers=False,
                server_header=False,
                date_header=False,
                limit_concurrency=viewers_max,
                backlog=BACKLOG,
                ws_max_size=MESSAGE_BYTES_MAX,
                ws_max_queue=MESSAGES_MAX,
                timeout_keep_alive=IDLE_CONNECTION_S,
                timeout_graceful_shutdown=max(1, math.ceil(drain_s)),
            ),
            certificates,
        )


class _BoundedProtocol(HttpToolsProtocol):
    """One connection, which is closed if no request follows in time: without a session a client
    must not keep descriptors that the console needs for the mesh."""

    # Any: the parameters of uvicorn's class.
    def __init__(
        self, *args: Any, connections_max: int, head_timeout_s: float, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._connections_max = connections_max
        self._head_timeout_s = head_timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._connections_max:
            transport.abort()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._head_timeout_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def listen(host: str, port: int) -> socket.socket:
    """Returns a bound socket. Raises Conflict if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listen_socket = socket.socket(family, socket.SOCK_STREAM)
    listen_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listen_socket.bind((host, port))
    except OSError as error:
        listen_socket.close()
        raise Conflict(
            f"cannot serve the console on {host}:{port}: {error.strerror}; choose another port with"
            " --http-port or KVMESH_CONSOLE_HTTP_PORT",
            field="http_port",
            reason="ADDRESS_IN_USE",
        ) from error
    return listen_socket
