"""The client's and the server's end of a gRPC call on an HTTP/2 connection of its own. Pure."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, unquote

from grpc import StatusCode

from common.rpc.http2.call import CallStatus, Headers, Http2Call
from common.rpc.http2.frames import (
    GOAWAY,
    PREFACE,
    STREAM,
    Flags,
    FrameType,
    ProtocolError,
    frame,
)

# HTTP status of a response that is not of gRPC -> status; others: UNKNOWN.
_CODE_BY_HTTP_STATUS: Final = {
    "401": StatusCode.UNAUTHENTICATED,
    "403": StatusCode.PERMISSION_DENIED,
    "404": StatusCode.UNIMPLEMENTED,
    **dict.fromkeys(("429", "502", "503", "504"), StatusCode.UNAVAILABLE),
}
_CODE_BY_NUMBER: Final = {code.value[0]: code for code in StatusCode}
_CODE_DIGITS_MAX: Final = 3
_CONTENT_TYPE: Final = "application/grpc"
_RESPONSE_HEADERS: Final = ((":status", "200"), ("content-type", _CONTENT_TYPE))
_DETAILS_KEY: Final = "grpc-status-details-bin"
# Characters of a message that are sent as they are.
_PLAIN: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


class ClientCall(Http2Call):
    """The end that calls. headers: of its request. Its servers are ours and those of grpc.aio."""

    def __init__(
        self, headers: Iterable[tuple[str, str]], *, message_bytes_max: int, header_bytes_max: int
    ) -> None:
        super().__init__(message_bytes_max=message_bytes_max, header_bytes_max=header_bytes_max)
        self._output = [PREFACE, *self._output, self._headers_frame(headers, Flags.NONE)]
        self.open_window()

    def half_close(self) -> None:
        """Ends the messages of this end, after all that are queued."""
        self._end_after_unsent(frame(FrameType.DATA, Flags.END_STREAM, STREAM, b""), None)

    def _take_headers(self, headers: Headers, *, has_ended: bool) -> None:
        if self.headers is None and not has_ended:
            _check_response(headers)
            if not headers[":status"].startswith("1"):
                self.headers = headers
        elif has_ended:
            self.status = _status_of(headers, is_only=self.headers is None)
        else:
            raise ProtocolError("headers between messages")

    def _end_messages(self) -> None:
        raise ProtocolError("the stream ended without a status")


class ServerCall(Http2Call):
    """The end that is called."""

    def __init__(self, *, message_bytes_max: int, header_bytes_max: int) -> None:
        super().__init__(message_bytes_max=message_bytes_max, header_bytes_max=header_bytes_max)
        self._preface = PREFACE
        self._has_responded = False

    def receive(self, data: bytes) -> bool:
        if self._preface and self.status is None:
            expected, self._preface = self._preface[: len(data)], self._preface[len(data) :]
            if not data.startswith(expected):
                self.end(StatusCode.INTERNAL, "not HTTP/2")
            data = data[len(expected) :]
        return super().receive(data)

    def respond(self, metadata: Iterable[tuple[str, str]] = ()) -> None:
        """Begins the response. metadata: sent before its messages."""
        if not self._has_responded:
            self._has_responded = True
            headers = (*_RESPONSE_HEADERS, *metadata)
            self._output.append(self._headers_frame(headers, Flags.NONE))

    def finish(self, status: CallStatus) -> None:
        """Ends the call with a status, after all queued messages. A call without a response gets
        the status alone, so that the client never takes the response for an acceptance."""
        trailers = [] if self._has_responded else list(_RESPONSE_HEADERS)
        trailers.append(("grpc-status", str(status.code.value[0])))
        if status.message:
            trailers.append(("grpc-message", quote(status.message, safe=_PLAIN)))
        if status.details is not None:
            encoded = base64.b64encode(status.details).decode().rstrip("=")
            trailers.append((_DETAILS_KEY, encoded))
        self._end_after_unsent(self._headers_frame(trailers, Flags.END_STREAM), status)

    def _take_headers(self, headers: Headers, *, has_ended: bool) -> None:
        if self.headers is None:
            is_grpc = headers.get("content-type", "").startswith(_CONTENT_TYPE)
            if headers.get(":method") != "POST" or not is_grpc:
                raise ProtocolError("the call is not of gRPC")
            self.headers = headers
            # The client opens another connection for its next call.
            goaway = GOAWAY.pack(STREAM, 0)
            self._output.append(frame(FrameType.GOAWAY, Flags.NONE, 0, goaway))
        elif not has_ended:
            raise ProtocolError("headers between messages")
        if has_ended:
            self._receive_last()

    def _end_messages(self) -> None:
        if self._message:
            raise ProtocolError("an incomplete message")

    def _receive_goaway(self, _flags: int, _stream: int, _payload: bytes) -> None:
        """Limits streams that a server begins, of which there are none. The call continues."""


def _check_response(headers: Headers) -> None:
    status = headers.get(":status", "")
    if status.startswith("1"):
        return
    if status != "200" or not headers.get("content-type", "").startswith(_CONTENT_TYPE):
        code = _CODE_BY_HTTP_STATUS.get(status, StatusCode.UNKNOWN)
        raise ProtocolError(f"the peer's response is not of gRPC (HTTP status {status})", code)


def _status_of(headers: Headers, *, is_only: bool) -> CallStatus:
    """Returns the status of the last headers. is_only: there were none before."""
    if is_only:
        _check_response(headers)
    code = headers.get("grpc-status", "")
    if not code.isdecimal() or len(code) > _CODE_DIGITS_MAX:
        raise ProtocolError("the stream ended without a status")
    encoded = headers.get(_DETAILS_KEY)
    details = None
    if encoded is not None:
        try:
            details = base64.b64decode(encoded + "=" * (-len(encoded) % 4))
        except ValueError as error:
            raise ProtocolError("unreadable details of a status") from error
    return CallStatus(
        _CODE_BY_NUMBER.get(int(code), StatusCode.UNKNOWN),
        unquote(headers.get("grpc-message", "")),
        details,
    )
