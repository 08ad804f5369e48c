"""Serves streaming RPCs on a port of its own, one call on each connection (`message_stream.py`).

The handlers are those of a grpc.aio server, with the same interceptor around them. Clients of the
mesh use this port for streams that live as long as they do; grpc.aio serves all methods on the main
port, for all clients of gRPC.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn, cast
from urllib.parse import quote

import grpc
import grpc.aio
import structlog
from grpc import StatusCode

from common.errors import InvalidRequest
from common.rpc.channel import (
    MESSAGE_BYTES_MAX,
    METADATA_BYTES_MAX,
    PLAINTEXT,
    Security,
    check_bindable,
    check_open_host,
    mesh_interceptor,
)
from common.rpc.http2.call import CallStatus
from common.rpc.http2.ends import ServerCall
from common.rpc.interceptors import STATUS_DETAILS_KEY, Handler, RunningCalls
from common.rpc.message_stream import CLOSE_TIMEOUT_S, MessageStream

LOG = structlog.get_logger(__name__)

# A client has this long to send its headers.
HEADER_TIMEOUT_S = 10.0
CONNECTIONS_MAX = 4096

_OK = CallStatus(StatusCode.OK, "")
_Metadata = Iterable[tuple[str, str | bytes]]


class StreamServer:
    """The streaming methods of services. Register them as at a grpc.aio server.

    addresses: under which peers dial it. May be filled later. calls: counts running calls.
    """

    def __init__(
        self,
        *,
        security: Security = PLAINTEXT,
        addresses: Collection[str] = (),
        calls: RunningCalls | None = None,
    ) -> None:
        self._security = security
        self._interceptor = mesh_interceptor(security, addresses, calls)
        self._handlers: dict[str, Handler] = {}
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._calls: set[ServedCall] = set()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._is_full = False

    def add_generic_rpc_handlers(self, _handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """For generated code, which registers each service in both ways."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        for name, handler in handlers.items():
            if handler.response_streaming:
                method = f"/{service}/{name}"
                self._handlers[method] = self._interceptor.wrap(method, handler)

    def bind(self, host: str, port: int, setting: str = "stream_port") -> int:
        """Binds a port (0: any) and returns it. setting: its name, for errors. Raises
        InvalidRequest and Conflict as `channel.bind`."""
        check_open_host(host, self._security)
        check_bindable(host, port, setting)
        self._socket = socket.create_server(
            (host.strip("[]"), port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=CONNECTIONS_MAX,
        )
        return int(self._socket.getsockname()[1])

    async def start(self) -> None:
        if self._socket is not None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._accept, sock=self._socket)

    def refuse(self) -> None:
        """Refuses new calls; running ones continue."""
        if self._server is not None:
            self._server.close()
        elif self._socket is not None:
            self._socket.close()

    def end_calls(self) -> None:
        """Cancels running calls."""
        for call in list(self._calls):
            call.end()

    async def close(self) -> None:
        """Ends everything; returns when the handlers have returned."""
        self.refuse()
        for task in self._handshakes:
            task.cancel()
        tasks = [call.task for call in self._calls if call.task is not None]
        self.end_calls()
        if tasks:
            await asyncio.wait(tasks)

    def _is_at_limit(self) -> bool:
        return len(self._calls) + len(self._handshakes) >= CONNECTIONS_MAX

    def _accept(self) -> asyncio.Protocol:
        was_full, self._is_full = self._is_full, self._is_at_limit()
        if self._is_full:
            if not was_full:
                LOG.warning("streams_refused", connections=CONNECTIONS_MAX)
            return _Refusal()
        call = ServedCall(self._handlers, self._calls)
        if self._security.files is None:
            return call
        return _TlsAcceptor(call, self._newest_context, self._handshakes)

    def _newest_context(self) -> ssl.SSLContext:
        assert self._security.files is not None
        context = self._security.files.newest().mutual_context
        assert context is not None, "files of mutual TLS name authorities"
        return context


class ServedCall(MessageStream[ServerCall, Any]):
    """One connection and its call; the `grpc.aio.ServicerContext` of its handler, as far as
    handlers of this project use it."""

    wrong_message = InvalidRequest

    def __init__(self, handlers: Mapping[str, Handler], calls: set[ServedCall]) -> None:
        call = ServerCall(message_bytes_max=MESSAGE_BYTES_MAX, header_bytes_max=METADATA_BYTES_MAX)
        super().__init__(call, bytes)
        self.task: asyncio.Task[None] | None = None
        self._handlers = handlers
        self._calls = calls
        self._serialize: Callable[[Any], bytes] = bytes
        self._is_ended = False

    # For handlers.

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        headers = self._call.headers or {}
        return tuple(one for one in headers.items() if not one[0].startswith(":"))

    def peer(self) -> str:
        host, port, *rest = self._transport.get_extra_info("peername")
        return f"ipv6:{quote(f'[{host}]', safe='')}:{port}" if rest else f"ipv4:{host}:{port}"

    def auth_context(self) -> Mapping[str, list[bytes]]:
        certificate = self._transport.get_extra_info("peercert") or {}
        names = [value.encode() for _, value in certificate.get("subjectAltName", ())]
        return {"x509_subject_alternative_name": names}

    def time_remaining(self) -> float | None:
        return None

    def done(self) -> bool:
        return self._is_ended or self._call.status is not None

    async def send_initial_metadata(self, metadata: Collection[tuple[str, str]]) -> None:
        self._call.respond(metadata)
        self._send()

    async def read(self) -> Any:
        """The next message; `grpc.aio.EOF` after the last one, or after the call."""
        call = self._call
        call.open_window()
        while not call.messages:
            if call.has_all_messages or call.status is not None:
                return grpc.aio.EOF
            self._send()
            await self._wait_to_read()
        return self._take_message()

    async def write(self, message: Any) -> None:
        """Sends a message; returns when the next one can be sent."""
        self._call.respond()
        self._call.send(self._serialize(message))
        await self._drained()

    async def abort(
        self, code: StatusCode, details: str = "", metadata: _Metadata = ()
    ) -> NoReturn:
        raw = dict(metadata).get(STATUS_DETAILS_KEY)
        self._finish(CallStatus(code, details, raw if isinstance(raw, bytes) else None))
        raise grpc.aio.AbortError

    # Of the connection.

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._calls.add(self)
        self._loop.call_later(HEADER_TIMEOUT_S, self._require_headers)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._calls.discard(self)
        self._cancel()

    def end(self) -> None:
        """Ends the call in any state."""
        self._cancel()
        self._call.cancel()
        self._send()
        self._close_transport()

    def _on_received(self) -> None:
        call = self._call
        if self.task is None and call.headers is not None and call.status is None:
            self._start(call.headers.get(":path", ""))
        if call.status is not None and not self._is_ended:
            # By the client, or by a violation of the protocol.
            if call.headers is None:
                self._is_ended = True
                self._close_transport()
            else:
                self._finish(call.status)
            self._cancel()
        self._wake(self._reader)

    def _start(self, method: str) -> None:
        handler = self._handlers.get(method)
        if handler is None:
            self._finish(CallStatus(StatusCode.UNIMPLEMENTED, f"no streaming method {method}"))
            return
        if handler.request_deserializer is not None:
            self._parse = handler.request_deserializer
        if handler.response_serializer is not None:
            self._serialize = handler.response_serializer
        self.task = self._loop.create_task(self._run(handler), name=method)

    async def _run(self, handler: Handler) -> None:
        try:
            if handler.request_streaming:
                await cast(Any, handler.stream_stream)(self._messages(), self)
            else:
                request = await self.read()
                if request is not grpc.aio.EOF:
                    await cast(Any, handler.unary_stream)(request, self)
            self._finish(_OK)
        except grpc.aio.AbortError:
            return  # `abort` has sent the status.
        except Exception:
            # The interceptor raises the errors of a call that has ended.
            if not self.done():
                raise
        finally:
            if not self._is_ended:
                self._close_transport()

    def _finish(self, status: CallStatus) -> None:
        """Sends the status. The client closes the connection, or this process after a while: if it
        closed it at once, the client could lose the status."""
        if self._is_ended:
            return
        self._is_ended = True
        self._call.finish(status)
        self._send()
        self._timer.cancel()
        self._loop.call_later(CLOSE_TIMEOUT_S, self._transport.close)

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def _require_headers(self) -> None:
        if self._call.headers is None:
            self._transport.abort()

    async def _messages(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message


class _Refusal(asyncio.Protocol):
    """Closes a connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


class _TlsAcceptor(asyncio.Protocol):
    """Does the handshake of a connection with the newest certificates, then passes it on."""

    def __init__(
        self,
        call: ServedCall,
        newest_context: Callable[[], ssl.SSLContext],
        handshakes: set[asyncio.Task[None]],
    ) -> None:
        self._call = call
        self._newest_context = newest_context
        self._handshakes = handshakes
        # What comes before the handshake has returned.
        self._early: list[bytes] | None = []
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        plain = cast(asyncio.Transport, transport)
        task = asyncio.get_running_loop().create_task(self._handshake(plain))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _handshake(self, plain: asyncio.Transport) -> None:
        try:
            encrypted = await asyncio.get_running_loop().start_tls(
                plain,
                self,
                self._newest_context(),
                server_side=True,
                ssl_handshake_timeout=HEADER_TIMEOUT_S,
            )
        except (OSError, asyncio.CancelledError):  # ssl.SSLError is an OSError.
            plain.abort()
            return
        assert encrypted is not None
        early, self._early = self._early, None
        self._call.connection_made(encrypted)
        for data in early or ():
            self._call.data_received(data)
        if self._is_lost:
            self._call.connection_lost(None)

    def data_received(self, data: bytes) -> None:
        if self._early is None:
            self._call.data_received(data)
        else:
            self._early.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        if self._early is None:
            self._call.connection_lost(error)

    def pause_writing(self) -> None:
        self._call.pause_writing()

    def resume_writing(self) -> None:
        self._call.resume_writing()
