"""uvicorn's HTTP protocol with what a stream of tokens needs beyond ASGI.

A write of ASGI is a coroutine, so each token would cost a task step; and a disconnect is a message
that a task must wait for. A `ClientConnection` writes from a callback and calls on a disconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from frontend_svc.http.asgi import CONNECTION


class StreamProtocol(HttpToolsProtocol):
    """Passes a ClientConnection in the state of a request's scope."""

    # Any: the parameters of uvicorn's class.
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.disconnect_callbacks: set[Callable[[], None]] = set()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        # The task of the request has been created and has not run.
        connection = HttpConnection(self.cycle, self.disconnect_callbacks)
        self.scope["state"][CONNECTION] = connection
        # A request that follows before the response pauses reading, which would hide a disconnect.
        if self.disconnect_callbacks:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for on_disconnect in tuple(self.disconnect_callbacks):
            on_disconnect()


class HttpConnection:
    """The ClientConnection of one request."""

    def __init__(
        self, cycle: RequestResponseCycle, disconnect_callbacks: set[Callable[[], None]]
    ) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._disconnect_callbacks = disconnect_callbacks

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
