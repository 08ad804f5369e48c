"""Frames of HTTP/2, as a peer may send them."""

from __future__ import annotations

import struct

from hpack import Encoder

HEAD, END_HEADERS = 1, 4


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


def prefixed(message: bytes) -> bytes:
    """Returns a message of gRPC with its prefix."""
    return struct.pack(">BL", 0, len(message)) + message
