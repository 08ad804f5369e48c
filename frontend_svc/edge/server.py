"""The HTTP server of the API.

Beyond ASGI and what `common/service/socket_server.py` states, these parts of uvicorn are relied on.
pyproject.toml pins its version, because none of them is stable between versions.

- `HttpToolsProtocol`, callbacks of asyncio: `connection_made`, `connection_lost`, `data_received`,
  `pause_writing`, `resume_writing`.
- `HttpToolsProtocol`, callbacks of the parser: `on_message_begin`, `on_header`,
  `on_headers_complete`, `on_body`, `on_message_complete`.
- `HttpToolsProtocol`, other methods: `on_response_complete`, called once for each response,
  `timeout_keep_alive_handler`, `shutdown`, and `_unsupported_upgrade_warning`. A request for an
  upgrade is served as any other if the server has no WebSocket protocol of its own.
- `HttpToolsProtocol`, attributes: `loop`, `transport`, `flow`, `connections` (of the server),
  `pipeline` (requests that wait for the response before), `parser`, `url`, `headers`, `scope` and
  `cycle` (of the last request), `app`, which `on_headers_complete` reads for that request.
- The task of a request starts at the next turn of the event loop after `on_headers_complete`.
- `RequestResponseCycle`: `body` and `response_complete`, and the attributes of `connection.Cycle`.
  A chunk that is written between two calls of `send` is a valid part of a chunked response.

A write of ASGI is a coroutine, so each token would cost a task step; and a disconnect is a message
that a task must wait for. A `ClientConnection` writes from a callback and calls on a disconnect.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, Final

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.runtime.certificates import CertificateFiles
from common.service.socket_server import SocketServer
from frontend_svc.edge.asgi import (
    CONNECTION,
    JSON_HEADER,
    AsgiApp,
    Receive,
    Scope,
    Send,
    send_response,
)
from frontend_svc.edge.connection import HttpConnection
from frontend_svc.edge.sockets import REFUSED_MAX
from frontend_svc.errors import INVALID, error_body

BACKLOG: Final = 4096
# Clients and load balancers close idle connections after 4 to 60 s. If the server closed one first,
# a request that the client sends at the same moment would be lost.
IDLE_CONNECTION_S: Final = 75
# Time for the last bytes of aborted responses to reach their clients.
FINAL_WRITE_TIMEOUT_S: Final = 1.0
# The request line and the headers of a request, together; as Envoy's edge defaults.
HEAD_BYTES_MAX: Final = 60 << 10
HEADERS_MAX: Final = 100
# Bytes of a chunked body besides its content: sizes, extensions, trailers.
FRAMING_BYTES_MAX: Final = 64 << 10
FRAMING_PER_BYTE_MAX: Final = 8
# Requests that arrive before the response to the one before, and the body of the last of them.
PIPELINED_MAX: Final = 32
# Bytes of one connection that a turn of the event loop parses.
TURN_BYTES: Final = 32 << 10
PIPELINED_BODY_BYTES_MAX: Final = 1 << 20

log = structlog.get_logger()


class HttpServer(SocketServer):
    """Serves an API until `should_exit` is set."""

    def __init__(
        self,
        api: AsgiApp,
        is_draining: Callable[[], bool],
        drain_s: float,
        connections_max: int,
        certificates: CertificateFiles | None = None,
    ) -> None:
        """certificates: for TLS; None: plain HTTP."""
        protocol = partial(BoundedProtocol, connections_max=connections_max)
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
                backlog=BACKLOG,
            ),
            certificates,
        )

    def stop_accepting(self) -> None:
        """Accepts no more connections; those that are open continue."""
        for server in self.servers:
            server.close()


class _TooManyRequests(Exception):
    """Ends the parsing of pipelined requests; the connection has been aborted."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection: passes a ClientConnection in the state of a request's scope, and closes if
    the client exceeds a limit."""

    head_timeout_s = 10.0
    """From the connection, or the first byte of a request, to the end of its headers."""

    linger_s = 30.0
    """After a response, for the rest of the request's body."""

    write_timeout_s = 60.0
    """In which a client must read what has been written."""

    refused_s = 1.0
    """In which a refused client must send."""

    # Any: the parameters of uvicorn's class.
    def __init__(self, *args: Any, connections_max: int, **kwargs: Any) -> None:
        """
        - connections_max: connections of the server above which new ones are refused.
        """
        super().__init__(*args, **kwargs)
        self._disconnect_callbacks: set[Callable[[], None]] = set()
        self._connections_max = connections_max
        self._is_refused = False
        # Between the beginning of a request and its headers, and from there to its end.
        self._is_in_head = self._is_in_body = False
        self._head_bytes = self._body_bytes = self._framing_bytes = 0
        # Received, for the next turn.
        self._waiting = b""
        self._next_turn: asyncio.Handle | None = None
        self._client_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        excess = len(self.connections) - self._connections_max
        if excess == 1:
            log.warning("connections_full", connections=len(self.connections))
        if excess > REFUSED_MAX:
            transport.abort()
            return
        self._is_refused = excess > 0
        self._await_client(self.refused_s if self._is_refused else self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting()
        if self._next_turn is not None:
            self._next_turn.cancel()
        self.resume_writing()
        super().connection_lost(exc)
        for on_disconnect in tuple(self._disconnect_callbacks):
            on_disconnect()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._refuse(503, "too many connections; try again later", "overloaded")
            return
        if self._next_turn is not None:
            self._waiting += data
            return
        if len(data) > TURN_BYTES:
            data, self._waiting = data[:TURN_BYTES], data[TURN_BYTES:]
            self._next_turn = self.loop.call_soon(self._take_turn)
            self.transport.pause_reading()
        self._head_bytes += len(data)
        self._framing_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._is_in_body and self._head_bytes > HEAD_BYTES_MAX:
            text = f"the headers are larger than {HEAD_BYTES_MAX} bytes"
            self._refuse(431, text, "headers_too_large")
        elif self._is_in_body and (
            self._framing_bytes > FRAMING_BYTES_MAX + FRAMING_PER_BYTE_MAX * self._body_bytes
        ):
            self._refuse(400, "the chunks have too many bytes besides content", "invalid_chunks")
        elif self.pipeline and len(self.cycle.body) > PIPELINED_BODY_BYTES_MAX:
            self.transport.abort()
        elif not self._is_in_body and self._client_timer is None and self._is_client_next:
            self._await_client(self.head_timeout_s)

    def _take_turn(self) -> None:
        """Parses the next part of what was received."""
        self._next_turn = None
        if self.transport.is_closing():
            return
        data, self._waiting = self._waiting, b""
        self.data_received(data)
        is_done = self._next_turn is None and not self.transport.is_closing()
        if is_done and not self.flow.read_paused:
            self.transport.resume_reading()

    def shutdown(self) -> None:
        # After an upgrade, the connection has another protocol.
        if (protocol := self.transport.get_protocol()) is self:
            super().shutdown()
        else:
            protocol.shutdown()  # type: ignore[attr-defined]

    def _unsupported_upgrade_warning(self) -> None:
        """An upgrade is a request; its route serves it."""

    def send_400_response(self, msg: str) -> None:
        # Nothing may be written after `_TooManyRequests`.
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        if len(self.pipeline) > PIPELINED_MAX:
            self.transport.abort()
            raise _TooManyRequests
        self._is_in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are not headers.
        if not self._is_in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_awaiting()
        self._is_in_head, self._is_in_body = False, True
        self._head_bytes = self._body_bytes = self._framing_bytes = 0
        api = self.app
        if refusal := self._head_problem():
            self.app = refusal
        super().on_headers_complete()
        self.app = api
        # The task of the request has been created and has not run.
        connection = HttpConnection(self.cycle, self._disconnect_callbacks)
        self.scope["state"][CONNECTION] = connection
        # A request that follows before the response pauses reading, which would hide a disconnect.
        if self._disconnect_callbacks:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        self._head_bytes = 0
        self._stop_awaiting()
        super().on_message_complete()
        if self.cycle.response_complete:
            self._await_client(self.head_timeout_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            if self.transport.get_write_buffer_size():
                self.pause_writing()
        elif self._is_in_body:
            self._await_client(self.linger_s)
        elif self._is_in_head:
            self._await_client(self.head_timeout_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        # `close` would wait for a client that does not read.
        self.transport.abort()

    @property
    def _is_client_next(self) -> bool:
        """Whether the client has begun a request, or has received all responses."""
        return self._is_in_head or self.cycle is None or self.cycle.response_complete

    def _await_client(self, timeout_s: float) -> None:
        self._stop_awaiting()
        self._client_timer = self.loop.call_later(timeout_s, self._on_timeout)

    def _stop_awaiting(self) -> None:
        if self._client_timer is not None:
            self._client_timer.cancel()
            self._client_timer = None

    def _on_timeout(self) -> None:
        self._client_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            return  # a request before: its end starts the time again
        if self._is_in_head:
            self._refuse(408, "the headers were not complete in time", "request_timeout")
        else:
            self.transport.abort()

    def _head_problem(self) -> AsgiApp | None:
        """Returns the application that refuses the request; None if its headers are valid."""
        size, hosts = len(self.url), []
        for name, value in self.headers:
            size += len(name) + len(value) + 4
            if name == b"host":
                hosts.append(value)
        if len(self.headers) > HEADERS_MAX or size > HEAD_BYTES_MAX:
            text = f"the headers are more than {HEADERS_MAX} or larger than {HEAD_BYTES_MAX} bytes"
            return _refusal(431, text, "headers_too_large")
        is_required = self.parser.get_http_version() != "1.0"
        if len(hosts) > 1 or (is_required and not any(hosts)):
            return _refusal(400, "exactly one Host header is required", "invalid_host")
        return None

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Sends a response outside of a request, and closes."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = _error_body(message, code)
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
        self.pause_writing()


def _close_connections_on_drain(api: AsgiApp, is_draining: Callable[[], bool]) -> AsgiApp:
    """Returns the same API, but during a drain each response ends its connection. Clients then
    connect to another frontend before the server closes idle connections."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_close(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await api(scope, receive, send_with_close if is_draining() else send)

    return serve


def _refusal(status: int, message: str, code: str) -> AsgiApp:
    async def refuse(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = (JSON_HEADER, (b"connection", b"close"))
        await send_response(send, status, headers, _error_body(message, code))

    return refuse


def _error_body(message: str, code: str) -> bytes:
    return error_body(message, "server_error" if code == "overloaded" else INVALID, None, code)
