"""uvicorn on sockets of ours, with TLS whose certificates may change."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

from common.runtime.certificates import CertificateFiles

# uvicorn has no limit of its own, and asyncio's is 60 s.
HANDSHAKE_TIMEOUT_S: Final = 10.0


class SocketServer(uvicorn.Server):
    """Serves until `should_exit` is set. The lifecycle owns the signals.

    uvicorn's `Config.backlog` is that of each socket. Relied on, beyond public classes: `startup`
    (with an empty list of sockets it opens none), `servers`, `server_state`, `lifespan.state`,
    `config.http_protocol_class`, `capture_signals`, `should_exit`.
    """

    def __init__(
        self, config: uvicorn.Config, certificates: CertificateFiles | None = None
    ) -> None:
        """certificates: for TLS; None: plain HTTP."""
        self._context = None if certificates is None else certificates.server_context()
        super().__init__(config)

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
                backlog=self.config.backlog,
            )
            self.servers.append(server)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
