"""WebSocket connections (RFC 6455): frames of the library `websockets`, on a connection that the
HTTP server has accepted.

The HTTP server reads the handshake as any other request, so routes, keys and the policy for web
pages apply to it. After the upgrade the connection still counts as one of that server: its limits
of connections and of unread writes hold, and its shutdown reaches the `WebSocket`.

Relied on, beyond what `websockets` documents: `ServerProtocol.accept` takes a request that another
parser has read, `ServerProtocol(state=OPEN)` reads frames only, `parser_exc` is why it gave up,
`reader.buffer` has the bytes of an incomplete frame.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final, Protocol

from websockets.datastructures import Headers as HandshakeHeaders
from websockets.exceptions import InvalidUpgrade, PayloadTooBig
from websockets.frames import CloseCode as CloseCode  # part of the interface of this module
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from common.errors import DeadlineExceeded, InvalidRequest, MeshError
from frontend_svc.edge.asgi import Headers
from frontend_svc.errors import BODY_TOO_LARGE

# Time for the client to answer a close frame, and to receive the last bytes.
CLOSE_TIMEOUT_S: Final = 10.0
# From the first byte of a message to its end.
MESSAGE_TIMEOUT_S: Final = 60.0
# Messages that wait for the application; above it the connection is not read.
UNREAD_MAX: Final = 64
# Received bytes are read in parts; a turn of the event loop ends after the part that exceeds the
# time. Small frames take 8 µs each: 5 ms for a part of nothing else.
PART_BYTES: Final = 4 << 10
TURN_S: Final = 0.002
# Pings of a client that reads nothing; each is answered.
UNREAD_PINGS_MAX: Final = 64
# Reasons of errors: a request that is no handshake; a binary message.
UPGRADE_REQUIRED: Final = "UPGRADE_REQUIRED"
BINARY_MESSAGE: Final = "INVALID_TYPE"

# The library reports each connection; the application does so itself.
_SILENT: Final = logging.Logger("websocket", logging.CRITICAL)


class Notice(Enum):
    """What a WebSocket reports beside messages."""

    SHUTDOWN = "shutdown"
    """The server shuts down."""


class ConnectionFlow(Protocol):
    """Flow control of the connection, of the HTTP server."""

    write_paused: bool

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    async def drain(self) -> None: ...


class HttpProtocol(Protocol):
    """What the HTTP server still does for the connection."""

    flow: ConnectionFlow

    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


def handshake_response(path: str, headers: Headers, own_headers: Headers) -> bytes:
    """Returns the response that accepts a handshake. Raises InvalidRequest, with UPGRADE_REQUIRED
    if the request asks for no WebSocket.

    - own_headers: headers of the response beside those of the protocol.
    """
    pairs = HandshakeHeaders(
        [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    )
    handshake = ServerProtocol(logger=_SILENT)
    response = handshake.accept(Request(path, pairs))
    error = handshake.handshake_exc
    if isinstance(error, InvalidUpgrade):
        text = "this route is a WebSocket: connect with 'connection' and 'upgrade: websocket'"
        raise InvalidRequest(text, "upgrade", reason=UPGRADE_REQUIRED)
    if error is not None:
        raise InvalidRequest(f"Invalid WebSocket handshake: {error}.")
    del response.headers["Date"]  # as in other responses
    for name, value in own_headers:
        response.headers[name.decode("latin-1")] = value.decode("latin-1")
    return response.serialize()


class WebSocket(asyncio.Protocol):
    """One connection after its handshake. Messages are texts; pings are answered; extensions and
    subprotocols are not negotiated."""

    def __init__(
        self,
        http: HttpProtocol,
        transport: asyncio.Transport,
        bytes_max: int,
        refusal: Callable[[MeshError], bytes],
    ) -> None:
        """
        - http: the protocol that the connection had before.
        - bytes_max: of a message of the client.
        - refusal: returns the message that reports an error of the client.
        """
        self._http = http
        self._flow = http.flow
        self._transport = transport
        self._bytes_max = bytes_max
        self._refusal = refusal
        self._loop = asyncio.get_running_loop()
        self._frames = ServerProtocol(state=State.OPEN, max_size=bytes_max, logger=_SILENT)
        # The message that arrives, and whether it is binary.
        self._message: bytearray | None = None
        self._is_binary = False
        self._unread: deque[bytes | MeshError | Notice] = deque()
        self._unread_bytes = 0
        # Received, for the next turn.
        self._waiting = b""
        self._next_turn: asyncio.Handle | None = None
        self._arrived, self._lost = asyncio.Event(), asyncio.Event()
        self._disconnect_callbacks: set[Callable[[], None]] = set()
        self._message_timer: asyncio.TimerHandle | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._unread_pings = 0
        self.close_code = 0
        """Of the first close frame of either end; 0: there is none."""

    @property
    def is_open(self) -> bool:
        return self._frames.state is State.OPEN and not self._transport.is_closing()

    @property
    def can_write(self) -> bool:
        """Whether the client is connected and reads what is written."""
        return self.is_open and not self._flow.write_paused

    async def receive(self) -> bytes | MeshError | Notice | None:
        """Returns the next message, the error of one that is no text, or a notice; None after the
        end of the connection."""
        while self.is_open:
            if self._unread:
                message = self._unread.popleft()
                self._unread_bytes -= len(message) if isinstance(message, bytes) else 0
                self._pause_or_read()
                return message
            self._arrived.clear()
            await self._arrived.wait()
        return None

    def send(self, text: bytes) -> None:
        """Sends a message. No effect after the end. text: UTF-8."""
        if self.is_open:
            self._frames.send_text(text)
            self._flush()

    def ping(self) -> None:
        """Sends a ping, so that no proxy closes an idle connection. No answer is awaited: a client
        may be busy."""
        if self.can_write:
            self._frames.send_ping(b"")
            self._flush()

    async def writable(self) -> None:
        """Returns when the client has read enough of what was written, or has disconnected."""
        await self._flow.drain()

    def close(self, code: CloseCode, reason: str, *, within_s: float = CLOSE_TIMEOUT_S) -> None:
        """Sends a close frame, and ends the connection when the client has answered it.

        - reason: at most 123 bytes.
        - within_s: after which it ends without an answer.
        """
        if self.is_open:
            self.close_code = self.close_code or code
            self._frames.send_close(code, reason)
            self._flush()
            self._end_soon(within_s)
            self._on_end()

    def abort(self) -> None:
        """Ends the connection at once."""
        self._transport.abort()

    async def lost(self) -> None:
        """Returns when the connection has ended."""
        await self._lost.wait()

    @contextmanager
    def watched(self, on_disconnect: Callable[[], None]) -> Iterator[None]:
        """Calls `on_disconnect` if the connection ends before the block."""
        if not self.is_open:
            self._loop.call_soon(on_disconnect)
        self._disconnect_callbacks.add(on_disconnect)
        try:
            yield
        finally:
            self._disconnect_callbacks.discard(on_disconnect)

    def shutdown(self) -> None:
        """Reports that the server shuts down. The application closes the connection."""
        self._take(Notice.SHUTDOWN)

    def data_received(self, data: bytes) -> None:
        self._waiting += data
        if self._next_turn is None:
            self._take_turn()

    def _take_turn(self) -> None:
        """Reads the next part of what was received."""
        self._next_turn = None
        data, at = self._waiting, 0
        until = time.monotonic() + TURN_S
        while at < len(data) and (at == 0 or time.monotonic() < until):
            self._read(data[at : at + PART_BYTES])
            at += PART_BYTES
        self._waiting = data[at:]
        if self._waiting:
            self._next_turn = self._loop.call_soon(self._take_turn)
        self._pause_or_read()

    def _read(self, data: bytes) -> None:
        was_open = self.is_open
        self._frames.receive_data(data)
        for frame in self._frames.events_received():
            assert isinstance(frame, Frame), "the handshake has been read"
            self._on_frame(frame)
        if (error := self._frames.parser_exc) is not None and was_open:
            self._on_violation(error)
        self._await_rest()
        self._flush()
        if was_open and not self.is_open:
            self._on_end()

    def eof_received(self) -> bool:
        self._frames.receive_eof()
        self._flush()
        self._on_end()
        return False

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._unread_pings = 0
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for handle in (self._message_timer, self._close_timer, self._next_turn):
            if handle is not None:
                handle.cancel()
        self._lost.set()
        self._http.connection_lost(exc)
        self._on_end()

    def _on_frame(self, frame: Frame) -> None:
        match frame.opcode:
            case Opcode.TEXT | Opcode.BINARY:
                self._message, self._is_binary = bytearray(), frame.opcode is Opcode.BINARY
                self._add(frame)
            case Opcode.CONT:
                self._add(frame)
            case Opcode.PING if self._flow.write_paused:
                self._unread_pings += 1
                if self._unread_pings > UNREAD_PINGS_MAX:
                    self._transport.abort()
            case Opcode.CLOSE if self._frames.close_rcvd is not None:
                self.close_code = self.close_code or self._frames.close_rcvd.code
            case _:
                pass

    def _add(self, frame: Frame) -> None:
        """Adds a frame to the message that arrives."""
        assert self._message is not None, "the library checks the order of frames"
        self._message += frame.data
        if not frame.fin:
            return
        message, self._message = bytes(self._message), None
        if self._is_binary:
            text = f"Messages must be text, but got a binary one of {len(message)} bytes."
            self._take(InvalidRequest(text, reason=BINARY_MESSAGE))
        else:
            self._take(message)

    def _on_violation(self, error: Exception) -> None:
        """Reports why the library has ended the connection; its close frame follows."""
        self.close_code = CloseCode.PROTOCOL_ERROR
        if isinstance(error, PayloadTooBig):
            self.close_code = CloseCode.MESSAGE_TOO_BIG
            text = f"The message is larger than {self._bytes_max >> 20} MB."
            refusal = self._refusal(InvalidRequest(text, reason=BODY_TOO_LARGE))
            self._transport.write(Frame(Opcode.TEXT, refusal).serialize(mask=False))

    def _take(self, message: bytes | MeshError | Notice) -> None:
        self._unread.append(message)
        self._unread_bytes += len(message) if isinstance(message, bytes) else 0
        self._pause_or_read()
        self._arrived.set()

    def _pause_or_read(self) -> None:
        """Reads from the connection unless much of what it has sent waits."""
        has_room = len(self._unread) < UNREAD_MAX and self._unread_bytes < self._bytes_max
        if self._lost.is_set():
            return
        if has_room and self._next_turn is None:
            self._flow.resume_reading()
        else:
            self._flow.pause_reading()

    def _await_rest(self) -> None:
        """Starts the time for the rest of an incomplete message, or stops it."""
        is_incomplete = self._message is not None or bool(self._frames.reader.buffer)
        if not is_incomplete and self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None
        elif is_incomplete and self._message_timer is None:
            self._message_timer = self._loop.call_later(MESSAGE_TIMEOUT_S, self._on_slow_message)

    def _on_slow_message(self) -> None:
        self._message_timer = None
        text = f"The message was not complete within {MESSAGE_TIMEOUT_S:g} s."
        self.send(self._refusal(DeadlineExceeded(text)))
        self.close(CloseCode.POLICY_VIOLATION, text)

    def _flush(self) -> None:
        """Writes what the library has to send."""
        for data in self._frames.data_to_send():
            if data and not self._transport.is_closing():
                self._transport.write(data)
            elif not data:
                self._send_eof()

    def _send_eof(self) -> None:
        """Ends what is written. What the client still sends is read and discarded: a socket that is
        closed before would discard the close frame too."""
        if self._transport.is_closing() or self._lost.is_set():
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:  # TLS
            self._transport.close()
        self._end_soon()

    def _end_soon(self, within_s: float = CLOSE_TIMEOUT_S) -> None:
        """Gives the client time to answer, or to read the last bytes."""
        if self._close_timer is None and not self._lost.is_set():
            self._close_timer = self._loop.call_later(within_s, self._transport.abort)

    def _on_end(self) -> None:
        """Ends what waits for the client."""
        self._arrived.set()
        for on_disconnect in tuple(self._disconnect_callbacks):
            on_disconnect()
