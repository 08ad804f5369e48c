"""The ClientConnection of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

P = TypeVar("P", bound=asyncio.Protocol)


class Flow(Protocol):
    """Flow control of a connection."""

    write_paused: bool

    def resume_reading(self) -> None: ...


class Cycle(Protocol):
    """One request and its response, in the HTTP server."""

    transport: asyncio.Transport
    more_body: bool
    disconnected: bool
    chunked_encoding: bool | None

    @property
    def flow(self) -> Flow: ...


class HttpConnection:
    """Writes into the chunked body of one response, and calls on a disconnect."""

    def __init__(self, cycle: Cycle, disconnect_callbacks: set[Callable[[], None]]) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._disconnect_callbacks = disconnect_callbacks

    @property
    def has_body(self) -> bool:
        return not self._cycle.more_body

    @property
    def can_write(self) -> bool:
        return not self._flow.write_paused and not self._cycle.disconnected

    def write(self, data: bytes) -> None:
        assert self._cycle.chunked_encoding, "the response has a length"
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    @contextmanager
    def watched(self, on_disconnect: Callable[[], None]) -> Iterator[None]:
        # A large body may have paused reading, which would also hide the disconnect.
        self._flow.resume_reading()
        if self._cycle.disconnected:
            asyncio.get_running_loop().call_soon(on_disconnect)
        self._disconnect_callbacks.add(on_disconnect)
        try:
            yield
        finally:
            self._disconnect_callbacks.discard(on_disconnect)

    def upgrade(self, response: bytes, make: Callable[[Any, asyncio.Transport], P]) -> P | None:
        """Sends the response to a handshake, and gives the connection to another protocol; None if
        the client has disconnected. For the HTTP server, the client of the request then has.

        - make: takes the protocol of the HTTP server, which still has to learn of the end of the
          connection and of its flow, and the transport.
        """
        if self._cycle.disconnected or self._transport.is_closing():
            return None
        self._cycle.disconnected = True
        protocol = make(self._transport.get_protocol(), self._transport)
        self._transport.set_protocol(protocol)
        self._transport.write(response)
        self._flow.resume_reading()
        return protocol
