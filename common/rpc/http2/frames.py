"""Frames of HTTP/2 (RFC 9113): their parts, and the errors of a peer that violates the protocol."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from grpc import StatusCode

# What the peer may send before the messages are taken.
WINDOW_BYTES: Final = 4 << 20
FRAME_BYTES_MAX: Final = 256 << 10
# Of a connection's first settings.
WINDOW_MAX: Final = 2**31 - 1
WINDOW_DEFAULT: Final = 65_535
FRAME_BYTES_DEFAULT: Final = 16_384
HEADER_TABLE_BYTES_DEFAULT: Final = 4096

# The only stream of a connection.
STREAM: Final = 1
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

FRAME = struct.Struct(">BHBBL")
PREFIX = struct.Struct(">BL")
U32 = struct.Struct(">L")
SETTING = struct.Struct(">HL")
GOAWAY = struct.Struct(">LL")

# Error codes of RST_STREAM.
REFUSED_STREAM, CANCEL, ENHANCE_YOUR_CALM, INADEQUATE_SECURITY = 7, 8, 11, 12


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


class ProtocolError(Exception):
    """The peer violates the protocol, or refuses the call."""

    def __init__(self, text: str, code: StatusCode = StatusCode.INTERNAL) -> None:
        super().__init__(text)
        self.code = code


class LimitExceeded(ProtocolError):
    """The peer sends more than a limit allows. limit: its name, as the metrics have it."""

    def __init__(self, limit: str, text: str) -> None:
        super().__init__(text)
        self.limit = limit


def frame(kind: int, flags: int, stream: int, payload: bytes | memoryview) -> bytes:
    size = len(payload)
    return FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def window_update(stream: int, increment: int) -> bytes:
    return frame(FrameType.WINDOW_UPDATE, Flags.NONE, stream, U32.pack(increment))


def settings(values: dict[Setting, int]) -> bytes:
    payload = b"".join(SETTING.pack(*value) for value in values.items())
    return frame(FrameType.SETTINGS, Flags.NONE, 0, payload)


def unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("invalid padding")
    return payload[1 : len(payload) - payload[0]]


def unpack(form: struct.Struct, payload: bytes) -> tuple[int, ...]:
    if len(payload) != form.size:
        raise ProtocolError("a frame of the wrong size")
    return form.unpack(payload)
