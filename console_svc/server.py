"""The HTTP server of the pages: uvicorn on a socket of ours."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

from common.errors import Conflict
from common.runtime.certificates import CertificateFiles
from console_svc.access.gate import AsgiApp

BACKLOG: Final = 512
# Of a message of a browser: an event of a page.
MESSAGE_BYTES_MAX: Final = 1 << 20
# Messages that a websocket queues for the application.
MESSAGES_MAX: Final = 32
HANDSHAKE_TIMEOUT_S: Final = 10.0
IDLE_CONNECTION_S: Final = 75


class ConsoleServer(uvicorn.Server):
    """Serves the pages until `should_exit` is set. The lifecycle owns the signals."""

    def __init__(
        self,
        app: AsgiApp,
        *,
        viewers_max: int,
        drain_s: float,
        certificates: CertificateFiles | None = None,
    ) -> None:
        """certificates: for TLS; None: plain HTTP."""
        self._context = None if certificates is None else certificates.server_context()
        super().__init__(
            uvicorn.Config(
                app,
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
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        if self.should_exit:
            return  # The application did not start.
        loop = asyncio.get_running_loop()

        def make_protocol() -> asyncio.Protocol:
            # Any: its parameters are those of an implementation.
            protocol: Any = self.config.http_protocol_class
            made: asyncio.Protocol = protocol(
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                _loop=loop,
            )
            return made

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
