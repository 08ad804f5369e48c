"""uvicorn's HTTP protocol with what a stream of tokens needs beyond ASGI.

A write of ASGI is a coroutine, so each token would cost a task step; and a disconnect is a message
that a task must wait for. A `ClientConnection` writes from a callback and calls on a disconnect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from frontend_svc.edge.asgi import CONNECTION
from frontend_svc.edge.connection import HttpConnection


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
