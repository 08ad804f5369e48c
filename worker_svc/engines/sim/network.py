"""Connections between simulated engines: frames over TCP.

A frame is its length (u32, little endian) and a message. The machines of `transfer.py` rely on one
guarantee: after `Connection.close` nothing is received.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

FRAME_BYTES_MAX: Final = 4 << 20
_LENGTH: Final = struct.Struct("<I")

log = structlog.get_logger()


class Connection(Protocol):
    """A stream of frames between two engines, read by one task."""

    def send(self, frame: bytes) -> None:
        """Queues the frame for sending, in order; no effect on a lost connection."""

    async def flushed(self) -> None:
        """Returns when the send buffer has capacity. Raises OSError if the connection is lost."""

    async def receive(self) -> bytes | None:
        """Returns the next frame; None after either side has closed or the connection is lost."""

    def close(self) -> None:
        """Stops receiving; queued frames are still sent."""


ConnectionHandler = Callable[[Connection], Awaitable[None]]


class Listener(Protocol):
    """Accepts connections."""

    @property
    def port(self) -> int:
        """Returns the port it listens on."""

    async def close(self) -> None:
        """Stops accepting."""


class Network(Protocol):
    """Connects engines; the simulator has its own in virtual time."""

    async def listen(self, host: str, port: int, handler: ConnectionHandler) -> Listener:
        """Serves each connection until `handler` returns, then closes it. Raises OSError."""

    async def dial(self, host: str, port: int) -> Connection:
        """Connects to a listener. Raises OSError."""


@dataclass(slots=True, eq=False)
class _TcpConnection:
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _linger_s: float
    _is_closed: bool = False

    def send(self, frame: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(frame)) + frame)

    async def flushed(self) -> None:
        await self._writer.drain()

    async def receive(self) -> bytes | None:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > FRAME_BYTES_MAX:
                log.warning("handoff_frame_too_long", bytes=length)
                return None
            frame = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            return None
        return None if self._is_closed else frame

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._writer.close()
        # A peer that does not read must not keep the connection open forever.
        asyncio.get_running_loop().call_later(self._linger_s, self._writer.transport.abort)


@dataclass(frozen=True, slots=True)
class _TcpListener:
    server: asyncio.Server
    port: int

    async def close(self) -> None:
        self.server.close()


class TcpNetwork:
    """TCP. linger_s: time to send queued frames after a close."""

    def __init__(self, linger_s: float = 2.0) -> None:
        self._linger_s = linger_s
        self._serving: dict[asyncio.Future[None], Connection] = {}

    async def listen(self, host: str, port: int, handler: ConnectionHandler) -> Listener:

        # Not a coroutine: asyncio logs an error if its own handler task is cancelled.
        def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = _TcpConnection(reader, writer, self._linger_s)
            task = asyncio.ensure_future(handler(connection))
            self._serving[task] = connection
            task.add_done_callback(self._on_served)

        server = await asyncio.start_server(on_connection, host, port, backlog=1024)
        return _TcpListener(server, server.sockets[0].getsockname()[1])

    def _on_served(self, task: asyncio.Future[None]) -> None:
        self._serving.pop(task).close()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("sim_handoff_failed", exc_info=error)

    async def dial(self, host: str, port: int) -> Connection:
        reader, writer = await asyncio.open_connection(host, port)
        return _TcpConnection(reader, writer, self._linger_s)
