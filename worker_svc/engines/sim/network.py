"""Connections between simulated engines: frames over TCP.

The machines of `transfer.py` rely on one guarantee: after `Connection.close` nothing is received.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from common.errors import InvalidRequest
from worker_svc.engines.sim.messages import (
    FRAME_LENGTH_BYTES,
    Message,
    from_bytes,
    to_frame,
)

FRAME_BYTES_MAX: Final = 4 << 20
# Time to send queued messages after a close, in seconds: a peer that does not read must not keep
# the connection open forever.
_LINGER_S: Final = 2.0

log = structlog.get_logger()


class Connection(Protocol):
    """A stream of messages between two engines, read by one task."""

    def send(self, message: Message) -> None:
        """Queues the message for sending, in order; no effect on a lost connection."""

    async def flushed(self) -> None:
        """Returns when the send buffer has capacity. Raises OSError if the connection is lost."""

    async def receive(self) -> Message | None:
        """Returns the next message; None after either side has closed, the connection is lost, or
        the peer has sent a malformed message."""

    def close(self) -> None:
        """Stops receiving; queued messages are still sent."""


class Network(Protocol):
    """Connects one engine to others; the simulator has its own in virtual time."""

    async def listen(
        self, host: str, port: int, on_connection: Callable[[Connection], None]
    ) -> int:
        """Calls `on_connection` for each new connection; it closes the connection some time later.
        Returns the port. Raises OSError."""

    async def dial(self, host: str, port: int) -> Connection:
        """Connects to a listener. Raises OSError."""

    def close(self) -> None:
        """Stops listening."""


@dataclass(slots=True, eq=False)
class _TcpConnection:
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _is_closed: bool = False

    def send(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(to_frame(message))

    async def flushed(self) -> None:
        await self._writer.drain()

    async def receive(self) -> Message | None:
        try:
            prefix = await self._reader.readexactly(FRAME_LENGTH_BYTES)
            length = int.from_bytes(prefix, "little")
            if length > FRAME_BYTES_MAX:
                log.warning("handoff_frame_too_long", bytes=length)
                return None
            data = await self._reader.readexactly(length)
            return None if self._is_closed else from_bytes(data)
        except (asyncio.IncompleteReadError, OSError):
            return None
        except InvalidRequest as error:
            log.warning("handoff_frame_invalid", error=error.message)
            return None

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._writer.close()
            asyncio.get_running_loop().call_later(_LINGER_S, self._writer.transport.abort)


class TcpNetwork:
    """TCP."""

    _server: asyncio.Server | None = None

    async def listen(
        self, host: str, port: int, on_connection: Callable[[Connection], None]
    ) -> int:
        # Not a coroutine: asyncio logs an error if its own handler task is cancelled.
        def on_accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            on_connection(_TcpConnection(reader, writer))

        self._server = await asyncio.start_server(on_accepted, host, port, backlog=1024)
        bound_port: int = self._server.sockets[0].getsockname()[1]
        return bound_port

    async def dial(self, host: str, port: int) -> Connection:
        return _TcpConnection(*await asyncio.open_connection(host, port))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
