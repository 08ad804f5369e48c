"""One gRPC call, with streams in both directions, on an HTTP/2 connection of its own. Pure.

This is the client's end of RFC 9113 and of gRPC over HTTP/2, as far as one call needs it: no second
stream, no priorities, no push, no compression. Its peers are grpc.aio servers. Why it exists: a
message costs a third of the CPU that it costs in grpc.aio (ADR 0029).
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias
from urllib.parse import unquote

from grpc import StatusCode
from hpack import Decoder, Encoder, HPACKError

# What the peer may send before the messages are taken.
WINDOW_BYTES: Final = 4 << 20
FRAME_BYTES_MAX: Final = 256 << 10
_WINDOW_MAX: Final = 2**31 - 1
_WINDOW_DEFAULT: Final = 65_535
_FRAME_BYTES_DEFAULT: Final = 16_384
# Settings, pings and empty frames that one read may bring: each of the first two has a response.
_CONTROL_FRAMES_MAX: Final = 1000

_STREAM: Final = 1
_FRAME = struct.Struct(">BHBBL")
_PREFIX = struct.Struct(">BL")
_U32 = struct.Struct(">L")
_SETTING = struct.Struct(">HL")
_GOAWAY = struct.Struct(">LL")


class FrameType(IntEnum):
    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flags(IntEnum):
    NONE = 0
    END_STREAM = 1
    ACK = 1
    END_HEADERS = 4
    PADDED = 8
    PRIORITY = 32


class Setting(IntEnum):
    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


# Error code of RST_STREAM -> status, as gRPC over HTTP/2 defines it; others: INTERNAL.
_REFUSED_STREAM, _CANCEL, _ENHANCE_YOUR_CALM, _INADEQUATE_SECURITY = 7, 8, 11, 12
_CODE_BY_RESET: Final = {
    _REFUSED_STREAM: StatusCode.UNAVAILABLE,
    _CANCEL: StatusCode.UNAVAILABLE,
    _ENHANCE_YOUR_CALM: StatusCode.RESOURCE_EXHAUSTED,
    _INADEQUATE_SECURITY: StatusCode.PERMISSION_DENIED,
}
# HTTP status of a response that is not of gRPC -> status; others: UNKNOWN.
_CODE_BY_HTTP_STATUS: Final = {
    "401": StatusCode.UNAUTHENTICATED,
    "403": StatusCode.PERMISSION_DENIED,
    "404": StatusCode.UNIMPLEMENTED,
    **dict.fromkeys(("429", "502", "503", "504"), StatusCode.UNAVAILABLE),
}

_CODE_BY_NUMBER: Final = {code.value[0]: code for code in StatusCode}

Headers: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CallStatus:
    """How a call ended. details: the peer's `grpc-status-details-bin`."""

    code: StatusCode
    message: str
    details: bytes | None = None


class Http2Call:
    """One call. `receive` takes what arrives; `take_output` returns what to send next.

    messages: received and not taken; take them with `take_message`. headers: of the response; None
    before they arrive. status: how the call ended, after its last message; None while it runs.
    """

    def __init__(
        self, headers: Iterable[tuple[str, str]], *, message_bytes_max: int, header_bytes_max: int
    ) -> None:
        self.messages: deque[bytes] = deque()
        self.headers: Headers | None = None
        self.status: CallStatus | None = None
        self._message_bytes_max = message_bytes_max
        self._header_bytes_max = header_bytes_max
        self._decoder = Decoder(header_bytes_max)
        # Bytes of an incomplete frame, of an incomplete message, of incomplete headers.
        self._frame = b""
        self._message = bytearray()
        self._header_block: bytearray | None = None
        self._header_flags = Flags.NONE
        self._unacknowledged = 0
        self._send_windows = {0: _WINDOW_DEFAULT, _STREAM: _WINDOW_DEFAULT}
        self._peer_window = _WINDOW_DEFAULT
        self._peer_frame_bytes = _FRAME_BYTES_DEFAULT
        self._unsent: deque[memoryview] = deque()
        self._is_half_closed = self._ends_after_unsent = False
        self._handlers: Mapping[int, Callable[[int, int, bytes], None]] = {
            FrameType.DATA: self._receive_data,
            FrameType.HEADERS: self._receive_headers,
            FrameType.RST_STREAM: self._receive_reset,
            FrameType.SETTINGS: self._receive_settings,
            FrameType.PUSH_PROMISE: self._refuse_push,
            FrameType.PING: self._receive_ping,
            FrameType.GOAWAY: self._receive_goaway,
            FrameType.WINDOW_UPDATE: self._receive_window_update,
        }
        settings = (
            (Setting.HEADER_TABLE_SIZE, 0),
            (Setting.ENABLE_PUSH, 0),
            (Setting.INITIAL_WINDOW_SIZE, WINDOW_BYTES),
            (Setting.MAX_FRAME_SIZE, FRAME_BYTES_MAX),
            (Setting.MAX_HEADER_LIST_SIZE, header_bytes_max),
        )
        encoder = Encoder()
        self._output = [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            _frame(FrameType.SETTINGS, 0, 0, b"".join(_SETTING.pack(*one) for one in settings)),
            _window_update(0, WINDOW_BYTES - _WINDOW_DEFAULT),
            _frame(
                FrameType.HEADERS,
                Flags.END_HEADERS,
                _STREAM,
                encoder.encode(headers, huffman=False),
            ),
        ]

    @property
    def is_blocked(self) -> bool:
        """Whether messages wait for the peer's window."""
        return bool(self._unsent)

    def take_output(self) -> bytes:
        output = b"".join(self._output)
        self._output.clear()
        return output

    def take_message(self) -> bytes:
        message = self.messages.popleft()
        self._acknowledge()
        return message

    def send(self, message: bytes) -> None:
        """Queues a message."""
        data = _PREFIX.pack(0, len(message)) + message
        size, windows = len(data), self._send_windows
        if (
            not self._unsent
            and size <= self._peer_frame_bytes
            and size <= windows[0]
            and size <= windows[_STREAM]
        ):
            windows[0] -= size
            windows[_STREAM] -= size
            self._output.append(_frame(FrameType.DATA, 0, _STREAM, data))
            return
        self._unsent.append(memoryview(data))
        self._send_unsent()

    def half_close(self) -> None:
        """Ends the client's side, after all queued messages."""
        self._ends_after_unsent = True
        self._send_unsent()

    def cancel(self) -> None:
        """Ends the call from this side."""
        if self.status is None:
            self._output.append(
                _frame(FrameType.RST_STREAM, Flags.NONE, _STREAM, _U32.pack(_CANCEL))
            )
            self.end(StatusCode.UNAVAILABLE, "the call was cancelled")

    def ping(self) -> None:
        self._output.append(_frame(FrameType.PING, Flags.NONE, 0, bytes(8)))

    def end(self, code: StatusCode, message: str) -> None:
        """The connection failed."""
        if self.status is None:
            self.status = CallStatus(code, message)

    def receive(self, data: bytes) -> None:
        """Takes bytes of the connection. A violation of the protocol ends the call."""
        if self.status is not None:
            return
        buffer = self._frame + data if self._frame else data
        offset, size, control_frames = 0, len(buffer), 0
        while size - offset >= _FRAME.size and self.status is None:
            high, low, kind, flags, stream = _FRAME.unpack_from(buffer, offset)
            length = high << 16 | low
            if length > FRAME_BYTES_MAX:
                self.end(StatusCode.INTERNAL, f"a frame of {length} bytes")
                break
            start, end = offset + _FRAME.size, offset + _FRAME.size + length
            if end > size:
                break
            offset = end
            if kind != FrameType.DATA or not length:
                control_frames += 1
                if control_frames > _CONTROL_FRAMES_MAX:
                    self.end(StatusCode.INTERNAL, "too many control frames")
                    break
            try:
                self._receive_frame(kind, flags, stream & 0x7FFFFFFF, buffer[start:end])
            except _ProtocolError as error:
                self.end(error.code, str(error))
        self._frame = buffer[offset:]
        if self.status is None:
            self._acknowledge()

    def _receive_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._header_block is not None:
            if kind != FrameType.CONTINUATION or stream != _STREAM:
                raise _ProtocolError("headers without their continuation")
            self._continue_headers(flags, payload)
        elif kind == FrameType.CONTINUATION:
            raise _ProtocolError("a continuation without headers")
        elif (handler := self._handlers.get(kind)) is not None:
            handler(flags, stream, payload)

    def _receive_data(self, flags: int, stream: int, payload: bytes) -> None:
        if stream != _STREAM or self.headers is None:
            raise _ProtocolError("data without headers")
        self._unacknowledged += len(payload)
        if self._unacknowledged > WINDOW_BYTES:
            raise _ProtocolError("more data than the window allows")
        if flags & Flags.PADDED:
            payload = _unpadded(payload)
        self._receive_messages(payload)
        if flags & Flags.END_STREAM:
            raise _ProtocolError("the stream ended without a status")

    def _receive_messages(self, payload: bytes) -> None:
        data: bytes | bytearray = payload
        if self._message:
            self._message += payload
            data = self._message
        start, size = 0, len(data)
        while size - start >= _PREFIX.size:
            is_compressed, length = _PREFIX.unpack_from(data, start)
            if is_compressed:
                raise _ProtocolError("a compressed message")
            if length > self._message_bytes_max:
                text = f"message larger than max ({length} vs. {self._message_bytes_max})"
                raise _ProtocolError(text, StatusCode.RESOURCE_EXHAUSTED)
            end = start + _PREFIX.size + length
            if end > size:
                break
            self.messages.append(bytes(data[start + _PREFIX.size : end]))
            start = end
        if data is self._message:
            del self._message[:start]
        elif start < size:
            self._message += data[start:]

    def _acknowledge(self) -> None:
        """Opens the peer's window again. Messages that are not taken keep it closed."""
        if self._unacknowledged >= WINDOW_BYTES // 2 and not self.messages:
            update = self._unacknowledged
            self._output += (_window_update(0, update), _window_update(_STREAM, update))
            self._unacknowledged = 0

    def _receive_headers(self, flags: int, stream: int, payload: bytes) -> None:
        if stream != _STREAM:
            raise _ProtocolError("headers of another stream")
        if flags & Flags.PADDED:
            payload = _unpadded(payload)
        if flags & Flags.PRIORITY:
            payload = payload[5:]
        self._header_block, self._header_flags = bytearray(), Flags(flags & Flags.END_STREAM)
        self._continue_headers(flags, payload)

    def _continue_headers(self, flags: int, payload: bytes) -> None:
        block = self._header_block
        assert block is not None
        block += payload
        if len(block) > self._header_bytes_max:
            raise _ProtocolError(f"headers above {self._header_bytes_max} bytes")
        if not flags & Flags.END_HEADERS:
            return
        self._header_block = None
        try:
            headers = {str(name): str(value) for name, value in self._decoder.decode(bytes(block))}
        except (HPACKError, UnicodeDecodeError) as error:
            raise _ProtocolError(f"unreadable headers: {error}") from error
        has_ended = bool(self._header_flags & Flags.END_STREAM)
        if self.headers is None and not has_ended:
            _check_response(headers)
            if not headers[":status"].startswith("1"):
                self.headers = headers
        elif has_ended:
            self.status = _status_of(headers, is_only=self.headers is None)
        else:
            raise _ProtocolError("headers between messages")

    def _receive_reset(self, _flags: int, stream: int, payload: bytes) -> None:
        if stream == _STREAM:
            (error,) = _unpack(_U32, payload)
            raise _ProtocolError(
                f"the peer reset the stream (HTTP/2 error {error})",
                _CODE_BY_RESET.get(error, StatusCode.INTERNAL),
            )

    def _receive_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream or len(payload) % _SETTING.size:
            raise _ProtocolError("invalid settings")
        if flags & Flags.ACK:
            return
        for name, value in _SETTING.iter_unpack(payload):
            match name:
                case Setting.INITIAL_WINDOW_SIZE:
                    if value > _WINDOW_MAX:
                        raise _ProtocolError("a window that is too large")
                    self._send_windows[_STREAM] += value - self._peer_window
                    self._peer_window = value
                case Setting.MAX_FRAME_SIZE:
                    if not _FRAME_BYTES_DEFAULT <= value < 1 << 24:
                        raise _ProtocolError("an invalid size of frames")
                    self._peer_frame_bytes = value
        self._output.append(_frame(FrameType.SETTINGS, Flags.ACK, 0, b""))
        self._send_unsent()

    def _receive_ping(self, flags: int, _stream: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise _ProtocolError("an invalid ping")
        if not flags & Flags.ACK:
            self._output.append(_frame(FrameType.PING, Flags.ACK, 0, payload))

    def _receive_goaway(self, _flags: int, _stream: int, payload: bytes) -> None:
        last_stream, error = _unpack(_GOAWAY, payload[:8])
        # Otherwise the peer finishes this call, and takes no new ones.
        if last_stream & 0x7FFFFFFF < _STREAM or error:
            text = payload[8:200].decode(errors="replace") or f"HTTP/2 error {error}"
            raise _ProtocolError(f"the peer closes the connection: {text}", StatusCode.UNAVAILABLE)

    def _receive_window_update(self, _flags: int, stream: int, payload: bytes) -> None:
        (increment,) = _unpack(_U32, payload)
        if stream not in self._send_windows:
            return
        self._send_windows[stream] += increment & 0x7FFFFFFF
        if not increment or self._send_windows[stream] > _WINDOW_MAX:
            raise _ProtocolError("an invalid window update")
        self._send_unsent()

    def _refuse_push(self, _flags: int, _stream: int, _payload: bytes) -> None:
        raise _ProtocolError("a push, which was disabled")

    def _send_unsent(self) -> None:
        """Sends what the windows allow of the queued messages."""
        windows = self._send_windows
        while self._unsent:
            data = self._unsent[0]
            size = min(len(data), self._peer_frame_bytes, *windows.values())
            if size <= 0:
                return
            windows[0] -= size
            windows[_STREAM] -= size
            self._output.append(_frame(FrameType.DATA, 0, _STREAM, data[:size]))
            if size == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = data[size:]
        if self._ends_after_unsent and not self._is_half_closed:
            self._is_half_closed = True
            self._output.append(_frame(FrameType.DATA, Flags.END_STREAM, _STREAM, b""))


class _ProtocolError(Exception):
    def __init__(self, text: str, code: StatusCode = StatusCode.INTERNAL) -> None:
        super().__init__(text)
        self.code = code


def _frame(kind: int, flags: int, stream: int, payload: bytes | memoryview) -> bytes:
    size = len(payload)
    return _FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def _window_update(stream: int, increment: int) -> bytes:
    return _frame(FrameType.WINDOW_UPDATE, Flags.NONE, stream, _U32.pack(increment))


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise _ProtocolError("invalid padding")
    return payload[1 : len(payload) - payload[0]]


def _unpack(form: struct.Struct, payload: bytes) -> tuple[int, ...]:
    if len(payload) != form.size:
        raise _ProtocolError("a frame of the wrong size")
    return form.unpack(payload)


def _check_response(headers: Headers) -> None:
    status = headers.get(":status", "")
    if status.startswith("1"):
        return
    if status != "200" or not headers.get("content-type", "").startswith("application/grpc"):
        code = _CODE_BY_HTTP_STATUS.get(status, StatusCode.UNKNOWN)
        raise _ProtocolError(f"the peer's response is not of gRPC (HTTP status {status})", code)


def _status_of(headers: Headers, *, is_only: bool) -> CallStatus:
    """The status of the last headers. is_only: there were none before."""
    if is_only:
        _check_response(headers)
    code = headers.get("grpc-status", "")
    if not code.isdecimal():
        raise _ProtocolError("the stream ended without a status")
    encoded = headers.get("grpc-status-details-bin")
    details = None
    if encoded is not None:
        try:
            details = base64.b64decode(encoded + "=" * (-len(encoded) % 4))
        except binascii.Error as error:
            raise _ProtocolError("unreadable details of a status") from error
    return CallStatus(
        _CODE_BY_NUMBER.get(int(code), StatusCode.UNKNOWN),
        unquote(headers.get("grpc-message", "")),
        details,
    )
