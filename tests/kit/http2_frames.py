"""Frames of HTTP/2, as a peer may send them, and the messages that a call received."""

from __future__ import annotations

import struct

from hpack import Encoder

from common.rpc.http2.call import Http2Call

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEAD, PRIORITY, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    *range(5),
    *range(6, 10),
)
END_HEADERS = 4
ENHANCE_YOUR_CALM = 11


GRPC = ("content-type", "application/grpc")


def frame(kind: int, flags: int = 0, payload: bytes = b"", stream: int = 1) -> bytes:
    """Returns a frame."""
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + struct.pack(">L", stream) + payload
    )


def headers(*pairs: tuple[str, str], flags: int = END_HEADERS, stream: int = 1) -> bytes:
    """Returns a frame of headers that changes no compression state."""
    encoder = Encoder()
    encoder.header_table_size = 0
    return frame(HEAD, flags, encoder.encode(pairs), stream)


def request(method: str, *more: tuple[str, str]) -> bytes:
    """Returns the first bytes of a connection that calls a method."""
    pairs = ((":method", "POST"), (":scheme", "http"), (":path", method))
    return PREFACE + frame(SETTINGS, stream=0) + headers(*pairs, GRPC, *more)


# Frames that a hostile peer repeats during its call; none of them ends the call by itself.
FLOODS = {
    "settings": frame(SETTINGS, stream=0),
    "ping": frame(PING, payload=bytes(8), stream=0),
    "empty_data": frame(DATA),
    "priority": frame(PRIORITY, payload=bytes(5)),
    "window_update": frame(WINDOW_UPDATE, payload=struct.pack(">L", 1), stream=0),
    "reset": frame(RESET, payload=struct.pack(">L", 8), stream=3),
    "unknown": frame(250, payload=b"x", stream=0),
}


def calm_text(received: bytes) -> str | None:
    """Returns the text of a GOAWAY of ENHANCE_YOUR_CALM among frames; None if there is none."""
    while len(received) >= 9:
        size = int.from_bytes(received[:3], "big")
        payload = received[9 : 9 + size]
        if received[3] == GOAWAY and payload[4:8] == struct.pack(">L", ENHANCE_YOUR_CALM):
            return payload[8:].decode()
        received = received[9 + size :]
    return None


def prefixed(message: bytes) -> bytes:
    """Returns a message of gRPC with its prefix."""
    return struct.pack(">BL", 0, len(message)) + message


def taken(call: Http2Call) -> list[bytes]:
    """All messages that have arrived, of several turns."""
    messages = []
    while call.messages or call.is_behind:
        if not call.messages:
            call.receive(b"")
        messages.append(call.take_message())
    return messages
