"""Serves streaming RPCs on a port of its own, one call on each connection (`message_stream.py`).

The handlers are those of a grpc.aio server, with the same interceptor around them. Clients of the
mesh use this port for streams that live as long as they do; grpc.aio serves all methods on the main
port, for all clients of gRPC.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn, cast
from urllib.parse import quote

import grpc
import grpc.aio
import structlog
from grpc import StatusCode

from common.errors import Conflict, InvalidRequest, Overloaded, Unavailable
from common.rpc.channel import (
    MESSAGE_BYTES_MAX,
    METADATA_BYTES_MAX,
    PLAINTEXT,
    Security,
    check_bindable,
    check_open_host,
    join_address,
    mesh_interceptor,
)
from common.rpc.http2.call import CallStatus
from common.rpc.http2.ends import ServerCall
from common.rpc.interceptors import Handler, RunningCalls
from common.rpc.message_stream import CLOSE_TIMEOUT_S, MessageStream
from common.rpc.pending_connections import (
    PENDING_MAX,
    PendingConnection,
    PendingConnections,
    source_of,
)
from common.rpc.status import STATUS_DETAILS_KEY
from common.runtime.hosts import WILDCARD_HOSTS

LOG = structlog.get_logger(__name__)

# A client has this long for the TLS handshake, and to send its headers.
HEADER_TIMEOUT_S = 10.0
# A client has this long to take the status of a call and the messages before it.
STATUS_TIMEOUT_S = 10.0
# Connections of accepted calls; those before have places of their own (`pending_connections.py`).
CONNECTIONS_MAX = 4096
# After a failed accept, of too many open files for example.
_ACCEPT_RETRY_S = 1.0
# Between two log events about connections that were ended because there were too many.
_LOG_INTERVAL_S = 10.0
# A handler that writes this much without a pause lets other tasks run.
_TURN_BYTES = 256 << 10

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
        self.handlers: dict[str, Handler] = {}
        self.is_refusing = False
        self._socket: socket.socket | None = None
        # Connections after their handshake.
        self.connections: set[ServedCall] = set()
        self.accepted_calls = 0
        # Connections that this process has ended, by the limit that their peers have exceeded.
        self.ended: Counter[str] = Counter()
        self.pending = PendingConnections(self.ended)
        # Limit -> time of its last log event.
        self._logged_at: dict[str, float] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._running: set[asyncio.Task[None]] = set()

    def add_generic_rpc_handlers(self, _handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Does nothing; generated code registers each service in both ways."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        for name, handler in handlers.items():
            if handler.response_streaming:
                method = f"/{service}/{name}"
                self.handlers[method] = self._interceptor.wrap(method, handler)

    def bind(self, host: str, port: int, setting: str = "stream_port") -> int:
        """Binds a port (0: any) and returns it. setting: its name, for errors. Raises
        InvalidRequest and Conflict as `channel.bind`."""
        check_open_host(host, self._security)
        check_bindable(host, port, setting)
        try:
            self._socket = _listen(host, port)
        except OSError as error:
            address = join_address(host, port)
            raise Conflict(f"cannot bind {address}: {error}", reason="ADDRESS_IN_USE") from error
        return int(self._socket.getsockname()[1])

    async def start(self) -> None:
        if self._socket is not None:
            self._accepting = asyncio.create_task(self._accept(self._socket), name="accept streams")
            self._accepting.add_done_callback(lambda _: self._close_socket())

    def refuse(self) -> None:
        """Refuses new calls; running ones continue."""
        self.is_refusing = True
        if self._accepting is not None:
            self._accepting.cancel()
        else:
            self._close_socket()

    def end_calls(self) -> None:
        """Cancels running calls."""
        for call in list(self.connections):
            call.end()

    async def close(self) -> None:
        """Ends everything; returns when the handlers have returned."""
        self.refuse()
        self.pending.end_all()
        self.end_calls()
        tasks = self._handshakes | self._running
        if self._accepting is not None:
            tasks.add(self._accepting)
        if tasks:
            await asyncio.wait(tasks)

    def run(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs a handler; `close` waits for it."""
        return _run_in(self._running, work, name)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                LOG.warning("accept_failed", error=str(error))
                # A connection without an accepted call has the descriptor that is needed.
                await asyncio.sleep(0 if self.pending.end_oldest() else _ACCEPT_RETRY_S)
                continue
            if _has_ended(accepted):
                accepted.close()
                await asyncio.sleep(0)
                continue
            call = ServedCall(self, source_of(str(address[0])))
            if len(self.pending) >= PENDING_MAX:
                self.log_ended("pending", f"more than {PENDING_MAX} connections without a call")
            self.pending.add(call.pending)
            handshake = _run_in(self._handshakes, self._serve(accepted, call), "serve a connection")
            call.pending.end = handshake.cancel
            handshake.add_done_callback(partial(self._end_handshake, accepted, call.pending))
            await asyncio.sleep(0)  # one connection a turn
            await self.pending.is_calm.wait()

    async def _serve(self, accepted: socket.socket, call: ServedCall) -> None:
        """Serves a connection, after a TLS handshake with the newest certificates."""
        files = self._security.files
        context = None if files is None else files.newest().mutual_context
        assert files is None or context is not None, "files of mutual TLS name authorities"
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: call.pending,
                accepted,
                ssl=context,
                ssl_handshake_timeout=None if context is None else HEADER_TIMEOUT_S,
            )
        except OSError as error:  # ssl.SSLError is an OSError.
            LOG.debug("handshake_failed", error=str(error))

    def _end_handshake(
        self, accepted: socket.socket, pending: PendingConnection, _: asyncio.Task[None]
    ) -> None:
        if pending.transport is None:
            self.pending.remove(pending)
            accepted.close()

    def log_ended(self, limit: str, reason: str, peer: str = "") -> None:
        """Logs that a connection is ended because of a limit: not each time, since each client can
        cause it."""
        now = asyncio.get_running_loop().time()
        if now - self._logged_at.get(limit, float("-inf")) >= _LOG_INTERVAL_S:
            self._logged_at[limit] = now
            LOG.warning("streams_refused", limit=limit, reason=reason, peer=peer)


class ServedCall(MessageStream[ServerCall, Any]):
    """One connection and its call; the `grpc.aio.ServicerContext` of its handler, as far as
    handlers of this project use it."""

    wrong_message = InvalidRequest

    def __init__(self, server: StreamServer, source: str) -> None:
        call = ServerCall(message_bytes_max=MESSAGE_BYTES_MAX, header_bytes_max=METADATA_BYTES_MAX)
        super().__init__(call, bytes)
        self._server = server
        self.pending = PendingConnection(server.pending, source, self)
        self._is_accepted = False
        self._task: asyncio.Task[None] | None = None
        self._serialize: Callable[[Any], bytes] = bytes
        self._is_ended = self._is_cancelled = False
        self._turn_bytes = 0
        self._peer = ""
        self._certificate: Mapping[str, Any] = {}
        # Ends the connection: without headers, or after the status.
        self._limit: asyncio.TimerHandle

    # For handlers.

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        headers = self._call.headers or {}
        return tuple(header for header in headers.items() if not header[0].startswith(":"))

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> Mapping[str, list[bytes]]:
        names = [value for _, value in self._certificate.get("subjectAltName", ())]
        encoded = [name.encode() for name in names if isinstance(name, str)]
        return {"x509_subject_alternative_name": encoded}

    def time_remaining(self) -> float | None:
        return None

    def done(self) -> bool:
        return self._is_ended or self._call.status is not None

    async def send_initial_metadata(self, metadata: Collection[tuple[str, str]]) -> None:
        self._accept()
        self._call.respond(metadata)
        self._send()

    async def read(self) -> Any:
        """Returns the next message; `grpc.aio.EOF` after the last one, or after the call."""
        call = self._call
        if not self._is_accepted:
            self._accept()
        while not call.messages:
            if call.is_behind:
                self._await_turn()
            elif call.has_all_messages or call.status is not None:
                return grpc.aio.EOF
            self._send()
            await self._wait_to_read()
        return self._take_message()

    async def write(self, message: Any) -> None:
        """Sends a message; returns when the next one can be sent. Raises Unavailable after the end
        of the call."""
        if self.done():
            raise Unavailable("the call has ended")
        if not self._is_accepted:
            self._accept()
        data = self._serialize(message)
        self._call.respond()
        self._call.send(data)
        await self._drained()
        self._turn_bytes += len(data)
        if self._turn_bytes >= _TURN_BYTES:
            self._turn_bytes = 0
            await asyncio.sleep(0)

    async def abort(
        self, code: StatusCode, details: str = "", metadata: _Metadata = ()
    ) -> NoReturn:
        raw = dict(metadata).get(STATUS_DETAILS_KEY)
        self._finish(CallStatus(code, details, raw if isinstance(raw, bytes) else None))
        raise grpc.aio.AbortError

    # Of the connection.

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._peer = _peer_text(transport.get_extra_info("peername"))
        self._certificate = transport.get_extra_info("peercert") or {}
        self._server.connections.add(self)
        self._limit = self._loop.call_later(HEADER_TIMEOUT_S, transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._limit.cancel()
        self._server.connections.discard(self)
        if self._is_accepted:
            self._server.accepted_calls -= 1

    def end(self) -> None:
        """Ends the call in any state."""
        self._cancel()
        self._call.cancel()
        self._send()
        self._close_transport()

    def _on_received(self) -> None:
        call = self._call
        if self._task is None and call.headers is not None and call.status is None:
            self._start(call.headers.get(":path", ""))
        if call.status is not None and not self._is_ended:
            # By the client, or by a violation of the protocol.
            if call.exceeded:
                self._server.ended[call.exceeded] += 1
                self._server.log_ended(call.exceeded, call.status.message, self._peer)
            if call.headers is None:
                self._is_ended = True
                self._send()
                self._close_transport()
            else:
                self._finish(call.status)
            self._cancel()
        self._wake(self._reader)

    def _accept(self) -> None:
        """Gives the connection the place of a member: the handler does not read or write before the
        caller is authenticated. Raises Overloaded if there is none."""
        if self._is_accepted or self.done():
            return
        server = self._server
        if server.accepted_calls >= CONNECTIONS_MAX:
            reason = f"too many streams: {CONNECTIONS_MAX}/{CONNECTIONS_MAX}"
            server.ended["connections"] += 1
            server.log_ended("connections", reason, self._peer)
            raise Overloaded(1.0, reason)
        server.accepted_calls += 1
        self._is_accepted = True
        self._call.open_window()
        self.pending.accept()

    def _start(self, method: str) -> None:
        if self._is_ended:
            return
        self._limit.cancel()
        handler = self._server.handlers.get(method)
        if handler is None:
            self._finish(CallStatus(StatusCode.UNIMPLEMENTED, f"no streaming method {method}"))
            return
        if self._server.is_refusing:
            self._finish(CallStatus(StatusCode.UNAVAILABLE, "the process takes no new calls"))
            return
        if handler.request_deserializer is not None:
            self._parse = handler.request_deserializer
        if handler.response_serializer is not None:
            self._serialize = handler.response_serializer
        self.pending.is_checked = True
        self._task = self._server.run(self._run(handler), method)

    async def _run(self, handler: Handler) -> None:
        try:
            await cast(Any, handler.stream_stream)(self._messages(), self)
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
        self.pending.is_checked = False
        self._call.finish(status)
        self._send()
        self._timer.cancel()
        self._limit.cancel()
        self._limit = self._loop.call_later(CLOSE_TIMEOUT_S, self._close_finished)

    def _close_finished(self) -> None:
        """Closes the connection if the status is sent; ends it later in any state."""
        if self._call.status is not None:
            self._transport.close()
        self._limit = self._loop.call_later(STATUS_TIMEOUT_S, self._transport.abort)

    def _fail(self, text: str) -> None:
        super()._fail(text)
        self._cancel()

    def _cancel(self) -> None:
        """Cancels the handler once: a second cancellation would interrupt its cleanup."""
        if self._task is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    async def _messages(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message


def _has_ended(connection: socket.socket) -> bool:
    """Returns whether the client has closed a connection before it was accepted, without a call. A
    flood leaves thousands of them behind."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at a host; for all hosts on both IP versions, as grpc."""
    if host in WILDCARD_HOSTS and socket.has_dualstack_ipv6():
        listening = socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=CONNECTIONS_MAX, dualstack_ipv6=True
        )
    else:
        name = "" if host == "*" else host.strip("[]")
        found = socket.getaddrinfo(
            name or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        listening = socket.create_server(
            (str(address[0]), port), family=family, backlog=CONNECTIONS_MAX
        )
    listening.setblocking(False)
    # Accepted connections inherit it; asyncio sets it on those it has opened itself.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _peer_text(address: object) -> str:
    """Returns what `grpc.aio.ServicerContext.peer` does; empty for a connection that has ended."""
    if not isinstance(address, tuple):
        return ""
    host, port, *_ = address
    mapped = str(host).removeprefix("::ffff:")
    if ":" in mapped:
        return f"ipv6:{quote(f'[{mapped}]', safe='')}:{port}"
    return f"ipv4:{mapped}:{port}"


def _run_in(
    tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None], name: str
) -> asyncio.Task[None]:
    """Returns a task that is in `tasks` until it ends."""
    task = asyncio.create_task(work, name=name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
