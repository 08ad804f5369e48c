"""One gRPC call, with streams in both directions, on an HTTP/2 connection of its own. Pure.

This is what both ends of RFC 9113 and of gRPC over HTTP/2 share, as far as one call needs it: no
second stream, no priorities, no push, no compression. `ends.py` has the two ends. Why they exist: a
message costs a third of the CPU that it costs in grpc.aio (ADR 0029, 0038).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from grpc import StatusCode
from hpack import Decoder, Encoder, HPACKError, OversizedHeaderListError

from common.rpc.http2.frames import (
    CANCEL,
    ENHANCE_YOUR_CALM,
    FRAME,
    FRAME_BYTES_DEFAULT,
    FRAME_BYTES_MAX,
    GOAWAY,
    HEADER_TABLE_BYTES_DEFAULT,
    INADEQUATE_SECURITY,
    PREFIX,
    REFUSED_STREAM,
    SETTING,
    STREAM,
    U32,
    WINDOW_BYTES,
    WINDOW_DEFAULT,
    WINDOW_MAX,
    Flags,
    FrameType,
    LimitExceeded,
    ProtocolError,
    Setting,
    frame,
    settings,
    unpack,
    unpadded,
    window_update,
)

# What one turn handles; the rest waits, so that other connections have their turns between. Small
# frames: those that begin within the first bytes, large ones not counted. Messages: each counts as
# its bytes and a constant.
TURN_FRAMES_BYTES: Final = 16 << 10
_LARGE_FRAME_BYTES: Final = 4 << 10
TURN_BYTES: Final = 512 << 10
MESSAGE_COST_BYTES: Final = 8 << 10
# Frames without data that a peer may send in a period, and more of them for the data that it
# receives: peers respond to data with window updates, and with pings that measure the bandwidth.
_CONTROL_FRAMES_MAX: Final = 1000
_CONTROL_FRAME_PER_BYTES: Final = 8
_DATA: Final = int(FrameType.DATA)
# Settings of one frame; RFC 9113 and its extensions define fewer than 20.
_SETTINGS_MAX: Final = 64
# Three changes of the table of HPACK at the beginning of headers; RFC 7541 allows two. The decoder
# takes 3 us for each.
_TABLE_CHANGES: Final = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){3}")
# The decoder quotes what it cannot read.
_ERROR_TEXT_MAX: Final = 200
# Bytes of a frame of headers beside its header block: padding and priority.
_HEADERS_OVERHEAD_MAX: Final = 512

# Error code of RST_STREAM -> status, as gRPC over HTTP/2 defines it; others: INTERNAL.
_CODE_BY_RESET: Final = {
    REFUSED_STREAM: StatusCode.UNAVAILABLE,
    CANCEL: StatusCode.UNAVAILABLE,
    ENHANCE_YOUR_CALM: StatusCode.RESOURCE_EXHAUSTED,
    INADEQUATE_SECURITY: StatusCode.PERMISSION_DENIED,
}

Headers: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CallStatus:
    """How a call ended. details: the peer's `grpc-status-details-bin`."""

    code: StatusCode
    message: str
    details: bytes | None = None


class Http2Call(ABC):
    """One end of a call. `receive` takes what arrives; `take_output` returns what to send next.

    - messages: received, parsed and not taken, at most those of one turn; take them with
      `take_message`.
    - is_behind: whether more messages than those of one turn have arrived; after `messages` are
      taken, the next `receive` parses them.
    - has_all_messages: whether the peer has sent its last message.
    - headers: of the peer; None before they arrive.
    - status: how the call ended, after its last message; None while it runs.
    - exceeded: name of the limit that the peer has exceeded; empty if none.
    """

    def __init__(self, *, message_bytes_max: int, header_bytes_max: int) -> None:
        self.messages: deque[bytes] = deque()
        self.headers: Headers | None = None
        self.status: CallStatus | None = None
        self.is_behind = self.has_all_messages = False
        self.exceeded = ""
        self._message_bytes_max = message_bytes_max
        self._header_bytes_max = header_bytes_max
        self._decoder = Decoder(header_bytes_max)
        # Bytes of frames that wait, of messages that are incomplete or wait, of incomplete headers.
        self._frame = b""
        self._message = bytearray()
        # Of the messages that were parsed since there was none, with the cost of each.
        self._turn_bytes = 0
        self._header_block: bytearray | None = None
        self._header_flags = Flags.NONE
        self._window = WINDOW_DEFAULT
        self._unacknowledged = 0
        self._send_windows = {0: WINDOW_DEFAULT, STREAM: WINDOW_DEFAULT}
        # Frames without data in this period. The window of the connection, if all that was sent
        # before the period, or nothing, had left it.
        self._control_frames = 0
        self._period_window = WINDOW_DEFAULT
        self._peer_window = WINDOW_DEFAULT
        self._peer_frame_bytes = FRAME_BYTES_DEFAULT
        self._encoder = Encoder()
        self._peer_table_bytes = HEADER_TABLE_BYTES_DEFAULT
        self._unsent: deque[memoryview] = deque()
        # The last frame of this end, until it is sent.
        self._last_frame: bytes | None = None
        self._final_status: CallStatus | None = None
        self._output = [
            settings(
                {
                    Setting.HEADER_TABLE_SIZE: 0,
                    Setting.ENABLE_PUSH: 0,
                    Setting.MAX_FRAME_SIZE: FRAME_BYTES_MAX,
                    Setting.MAX_HEADER_LIST_SIZE: header_bytes_max,
                }
            )
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
        messages = self.messages
        message = messages.popleft()
        if not messages:
            self._turn_bytes = 0
            self._acknowledge()
        return message

    def drop_messages(self) -> None:
        """Discards the messages that have arrived."""
        self.messages.clear()
        self._message.clear()
        self.is_behind = False

    def begin_period(self) -> None:
        """Begins a new period of the limit of frames without data. Call it every few seconds, while
        the peer takes what is sent to it."""
        self._control_frames = 0
        self._period_window = self._send_windows[0]

    def send(self, message: bytes) -> None:
        """Queues a message."""
        data = PREFIX.pack(0, len(message)) + message
        size, windows = len(data), self._send_windows
        if (
            not self._unsent
            and size <= self._peer_frame_bytes
            and size <= windows[0]
            and size <= windows[STREAM]
        ):
            windows[0] -= size
            windows[STREAM] -= size
            self._output.append(frame(FrameType.DATA, 0, STREAM, data))
            return
        self._unsent.append(memoryview(data))
        self._send_unsent()

    def open_window(self) -> None:
        """Lets the peer send up to WINDOW_BYTES before the messages are taken."""
        if self._window < WINDOW_BYTES:
            increment, self._window = WINDOW_BYTES - self._window, WINDOW_BYTES
            self._output += (window_update(0, increment), window_update(STREAM, increment))

    def cancel(self) -> None:
        """Ends the call from this end."""
        if self.status is None:
            self._output.append(frame(FrameType.RST_STREAM, Flags.NONE, STREAM, U32.pack(CANCEL)))
            self.end(StatusCode.UNAVAILABLE, "the call was cancelled")

    def ping(self) -> None:
        self._output.append(frame(FrameType.PING, Flags.NONE, 0, bytes(8)))

    def end(self, code: StatusCode, message: str) -> None:
        """Ends the call, because the connection failed."""
        if self.status is None:
            self.status = CallStatus(code, message)

    def receive(self, data: bytes) -> bool:
        """Takes bytes of the connection, and handles the frames and messages of one turn. A
        violation of the protocol ends the call. Returns whether frames wait for the next turn,
        `receive(b"")`."""
        if self.is_behind:
            self._parse_waiting()
        if self.status is not None:
            return False
        buffer = self._frame + data if self._frame else data
        offset, size = 0, len(buffer)
        turn_end = size - FRAME.size + 1
        if turn_end > TURN_FRAMES_BYTES:
            turn_end = TURN_FRAMES_BYTES
        while offset < turn_end and self.status is None:
            high, low, kind, flags, stream = FRAME.unpack_from(buffer, offset)
            length = high << 16 | low
            start, end = offset + FRAME.size, offset + FRAME.size + length
            try:
                if end > size or length > FRAME_BYTES_MAX:
                    self._check_frame_bytes(kind, length)
                    break
                offset = end
                if length > _LARGE_FRAME_BYTES:
                    turn_end = min(turn_end + length, size - FRAME.size + 1)
                payload = buffer[start:end]
                if kind == _DATA and length and self._header_block is None:
                    self._receive_data(flags, stream & 0x7FFFFFFF, payload)
                else:
                    self._count_control_frame()
                    self._receive_frame(kind, flags, stream & 0x7FFFFFFF, payload)
            except ProtocolError as error:
                self._refuse(error)
        self._frame = b""
        if self.status is None:
            self._frame = buffer[offset:]
            if not self.messages:
                self._acknowledge()
        return turn_end <= offset <= size - FRAME.size

    def _check_frame_bytes(self, kind: int, length: int) -> None:
        """Raises LimitExceeded for a frame that is too large to wait for its last bytes."""
        if length > FRAME_BYTES_MAX or length > self._held_bytes_max(kind):
            raise LimitExceeded("frame_bytes", f"a frame of {length} bytes")

    def _count_control_frame(self) -> None:
        self._control_frames += 1
        sent_bytes = self._period_window - self._send_windows[0]
        allowed = _CONTROL_FRAMES_MAX + sent_bytes // _CONTROL_FRAME_PER_BYTES
        if self._control_frames > allowed:
            text = f"too many control frames: {allowed} in this period"
            raise LimitExceeded("control_frames", text)

    def _refuse(self, error: ProtocolError) -> None:
        """Ends the call of a peer that violates the protocol."""
        if isinstance(error, LimitExceeded):
            self.exceeded = error.limit
            reason = GOAWAY.pack(STREAM, ENHANCE_YOUR_CALM) + str(error).encode()
            self._output.append(frame(FrameType.GOAWAY, Flags.NONE, 0, reason))
        self.end(error.code, str(error))

    def _held_bytes_max(self, kind: int) -> int:
        """Returns the size of a frame above which it is refused before its last bytes come."""
        if kind == FrameType.DATA:
            return self._window - self._unacknowledged
        return self._header_bytes_max + _HEADERS_OVERHEAD_MAX

    def _receive_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._header_block is not None:
            if kind != FrameType.CONTINUATION or stream != STREAM:
                raise ProtocolError("headers without their continuation")
            self._continue_headers(flags, payload)
        elif kind == FrameType.CONTINUATION:
            raise ProtocolError("a continuation without headers")
        else:
            self._dispatch(kind, flags, stream, payload)

    def _dispatch(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Handles a frame of any type but CONTINUATION; ignores unknown types. No table of bound
        methods: a reference cycle would keep each ended call until a collection."""
        match kind:
            case FrameType.WINDOW_UPDATE:
                self._receive_window_update(flags, stream, payload)
            case FrameType.PING:
                self._receive_ping(flags, stream, payload)
            case FrameType.DATA:
                self._receive_data(flags, stream, payload)
            case FrameType.HEADERS:
                self._receive_headers(flags, stream, payload)
            case FrameType.SETTINGS:
                self._receive_settings(flags, stream, payload)
            case FrameType.RST_STREAM:
                self._receive_reset(flags, stream, payload)
            case FrameType.GOAWAY:
                self._receive_goaway(flags, stream, payload)
            case FrameType.PUSH_PROMISE:
                self._refuse_push(flags, stream, payload)

    def _receive_data(self, flags: int, stream: int, payload: bytes) -> None:
        if stream != STREAM or self.headers is None:
            raise ProtocolError("data without headers")
        self._unacknowledged += len(payload)
        if self._unacknowledged > self._window:
            raise ProtocolError("more data than the window allows")
        if flags & Flags.PADDED:
            payload = unpadded(payload)
        if not self._message:
            self._parse(payload)
        else:
            self._message += payload
            if not self.is_behind:
                self._parse(self._message)
        if flags & Flags.END_STREAM:
            self._receive_last()

    def _parse(self, data: bytes | bytearray) -> None:
        """Parses the messages of one turn; what is left waits in `_message`."""
        messages, start, size = self.messages, 0, len(data)
        turn_bytes = self._turn_bytes
        while size - start >= PREFIX.size:
            is_compressed, length = PREFIX.unpack_from(data, start)
            if is_compressed:
                raise ProtocolError("a compressed message")
            if length > self._message_bytes_max:
                text = f"message larger than max ({length} vs. {self._message_bytes_max})"
                raise ProtocolError(text, StatusCode.RESOURCE_EXHAUSTED)
            end = start + PREFIX.size + length
            if end > size:
                break
            turn_bytes += length + MESSAGE_COST_BYTES
            if turn_bytes > TURN_BYTES and messages:
                self.is_behind = True
                break
            messages.append(bytes(data[start + PREFIX.size : end]))
            start = end
        self._turn_bytes = turn_bytes
        if data is self._message:
            del self._message[:start]
        elif start < size:
            self._message += data[start:]

    def _parse_waiting(self) -> None:
        """Parses the messages of the next turn, also after the end of the call."""
        self.is_behind = False
        try:
            self._parse(self._message)
            if self.has_all_messages and not self.is_behind:
                self._end_messages()
        except ProtocolError as error:
            self._message.clear()
            self.is_behind = False
            # It came before what has ended the call since.
            self.status = None
            self._refuse(error)

    def _receive_last(self) -> None:
        """Handles the end of the messages of the peer, once all were parsed."""
        self.has_all_messages = True
        if not self.is_behind:
            self._end_messages()

    def _acknowledge(self) -> None:
        """Opens the peer's window again. Messages that are not taken keep it closed."""
        if self._unacknowledged >= self._window // 2 and not self.messages and not self.is_behind:
            update = self._unacknowledged
            self._output += (window_update(0, update), window_update(STREAM, update))
            self._unacknowledged = 0

    def _receive_headers(self, flags: int, stream: int, payload: bytes) -> None:
        if stream != STREAM:
            raise ProtocolError("headers of another stream")
        if flags & Flags.PADDED:
            payload = unpadded(payload)
        if flags & Flags.PRIORITY:
            payload = payload[5:]
        self._header_block, self._header_flags = bytearray(), Flags(flags & Flags.END_STREAM)
        self._continue_headers(flags, payload)

    def _continue_headers(self, flags: int, payload: bytes) -> None:
        block = self._header_block
        assert block is not None
        block += payload
        if len(block) > self._header_bytes_max:
            raise LimitExceeded("header_bytes", f"headers above {self._header_bytes_max} bytes")
        if not flags & Flags.END_HEADERS:
            return
        self._header_block = None
        if _TABLE_CHANGES.match(block):
            raise ProtocolError("unreadable headers: too many changes of the table")
        try:
            headers = {str(name): str(value) for name, value in self._decoder.decode(bytes(block))}
        except OversizedHeaderListError as error:
            text = f"headers above {self._header_bytes_max} bytes"
            raise LimitExceeded("header_bytes", text) from error
        except (HPACKError, UnicodeDecodeError) as error:
            raise ProtocolError(f"unreadable headers: {error}"[:_ERROR_TEXT_MAX]) from error
        self._take_headers(headers, has_ended=bool(self._header_flags & Flags.END_STREAM))

    @abstractmethod
    def _take_headers(self, headers: Headers, *, has_ended: bool) -> None:
        """Takes headers of the peer. has_ended: it sends nothing after them."""

    @abstractmethod
    def _end_messages(self) -> None:
        """Handles the end of the messages of the peer without headers; all were parsed."""

    def _headers_frame(self, headers: Iterable[tuple[str, str]], flags: Flags) -> bytes:
        # Once for all settings that came: hpack keeps a list of each change.
        if self._encoder.header_table_size != self._peer_table_bytes:
            self._encoder.header_table_size = self._peer_table_bytes
        block = self._encoder.encode(headers, huffman=False)
        return frame(FrameType.HEADERS, Flags.END_HEADERS | flags, STREAM, block)

    def _end_after_unsent(self, last_frame: bytes, status: CallStatus | None) -> None:
        """Queues the last frame of this end. status: of the call then; None: it continues."""
        self._last_frame, self._final_status = last_frame, status
        self._send_unsent()

    def _receive_reset(self, _flags: int, stream: int, payload: bytes) -> None:
        if stream == STREAM:
            (error,) = unpack(U32, payload)
            raise ProtocolError(
                f"the peer reset the stream (HTTP/2 error {error})",
                _CODE_BY_RESET.get(error, StatusCode.INTERNAL),
            )

    def _receive_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream or len(payload) % SETTING.size or len(payload) > _SETTINGS_MAX * SETTING.size:
            raise ProtocolError("invalid settings")
        if flags & Flags.ACK:
            return
        for name, value in SETTING.iter_unpack(payload):
            match name:
                case Setting.INITIAL_WINDOW_SIZE:
                    if value > WINDOW_MAX:
                        raise ProtocolError("a window that is too large")
                    self._send_windows[STREAM] += value - self._peer_window
                    self._peer_window = value
                case Setting.HEADER_TABLE_SIZE:
                    self._peer_table_bytes = min(value, HEADER_TABLE_BYTES_DEFAULT)
                case Setting.MAX_FRAME_SIZE:
                    if not FRAME_BYTES_DEFAULT <= value < 1 << 24:
                        raise ProtocolError("an invalid size of frames")
                    self._peer_frame_bytes = value
        self._output.append(frame(FrameType.SETTINGS, Flags.ACK, 0, b""))
        self._send_unsent()

    def _receive_ping(self, flags: int, _stream: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise ProtocolError("an invalid ping")
        if not flags & Flags.ACK:
            self._output.append(frame(FrameType.PING, Flags.ACK, 0, payload))

    def _receive_goaway(self, _flags: int, _stream: int, payload: bytes) -> None:
        last_stream, error = unpack(GOAWAY, payload[:8])
        # Otherwise the peer finishes this call, and takes no new ones.
        if last_stream & 0x7FFFFFFF < STREAM or error:
            text = payload[8:200].decode(errors="replace") or f"HTTP/2 error {error}"
            raise ProtocolError(f"the peer closes the connection: {text}", StatusCode.UNAVAILABLE)

    def _receive_window_update(self, _flags: int, stream: int, payload: bytes) -> None:
        (increment,) = unpack(U32, payload)
        if stream not in self._send_windows:
            return
        self._send_windows[stream] += increment & 0x7FFFFFFF
        if not stream:
            self._period_window += increment & 0x7FFFFFFF
        if not increment or self._send_windows[stream] > WINDOW_MAX:
            raise ProtocolError("an invalid window update")
        self._send_unsent()

    def _refuse_push(self, _flags: int, _stream: int, _payload: bytes) -> None:
        raise ProtocolError("a push, which was disabled")

    def _send_unsent(self) -> None:
        """Sends what the windows allow of the queued messages."""
        windows = self._send_windows
        while self._unsent:
            data = self._unsent[0]
            size = min(len(data), self._peer_frame_bytes, *windows.values())
            if size <= 0:
                return
            windows[0] -= size
            windows[STREAM] -= size
            self._output.append(frame(FrameType.DATA, 0, STREAM, data[:size]))
            if size == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = data[size:]
        if self._last_frame is not None:
            self._output.append(self._last_frame)
            self._last_frame = None
            self.status = self.status or self._final_status
