"""Messages of a KV handoff between simulated engines, and their encoding. Pure."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from common.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Pull:
    """Decode's pages for a room, in the order of the prompt. tokens: of the prompt.

    incarnation: id of the decode worker.
    """

    room: int
    incarnation: int
    tokens: int
    block_size: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Drop:
    """No decode leg will pull this room."""

    room: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The prefill leg is present."""


@dataclass(frozen=True, slots=True)
class Ping:
    """The prefill leg is still alive."""


@dataclass(frozen=True, slots=True)
class Write:
    """Pages and the stamps written to them (`page_stamps`)."""

    pages: Sequence[int]
    stamps: Sequence[int]


@dataclass(frozen=True, slots=True)
class Done:
    """All pages are written. token: the first of the output, even if it ends the output.

    cached_tokens: prompt tokens found in prefill's cache.
    """

    token: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Prefill failed and writes nothing more. reason: as above."""

    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Decode requests the end of all writes."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """Prefill writes nothing more."""


@dataclass(frozen=True, slots=True)
class Received:
    """Decode has received all pages."""


Message: TypeAlias = Pull | Drop | Joined | Ping | Write | Done | Fail | Abort | Aborted | Received

_PULL: Final = struct.Struct("<QQII")
_ROOM: Final = struct.Struct("<Q")
_DONE: Final = struct.Struct("<II")
_MESSAGE_TYPES: Final = (Pull, Drop, Joined, Ping, Write, Done, Fail, Abort, Aborted, Received)
_EMPTY_MESSAGES: Final = (Joined, Ping, Abort, Aborted, Received)
_WRITE_BYTES: Final = 12
_PAGE_BYTES: Final = 4


def to_bytes(message: Message) -> bytes:
    """Encodes a message: a byte for the kind, then the fields, little endian; arrays last."""
    kind = bytes([_MESSAGE_TYPES.index(type(message))])
    match message:
        case Pull():
            header = _PULL.pack(
                message.room, message.incarnation, message.tokens, message.block_size
            )
            return kind + header + np.asarray(message.pages, dtype="<u4").tobytes()
        case Drop():
            return kind + _ROOM.pack(message.room)
        case Write():
            pages = np.asarray(message.pages, dtype="<u4").tobytes()
            return kind + pages + np.asarray(message.stamps, dtype="<i8").tobytes()
        case Done():
            return kind + _DONE.pack(message.token, message.cached_tokens)
        case Fail():
            return kind + message.reason.encode()
        case _:
            return kind


def from_bytes(frame: bytes) -> Message:
    """Decodes a frame. Raises InvalidRequest if it is malformed."""
    if not frame or frame[0] >= len(_MESSAGE_TYPES):
        raise InvalidRequest(f"unknown message kind {frame[:1].hex() or 'none'}", "kind")
    kind, body = _MESSAGE_TYPES[frame[0]], frame[1:]
    try:
        return _parse_message(kind, body)
    except (struct.error, ValueError) as error:
        raise InvalidRequest(f"{kind.__name__}: {error}", "body") from None


def _parse_message(kind: type[Message], body: bytes) -> Message:
    if kind is Pull:
        pages = np.frombuffer(body, dtype="<u4", offset=_PULL.size)
        room, incarnation, tokens, block_size = _PULL.unpack_from(body)
        return Pull(room, incarnation, tokens, block_size, pages.tolist())
    if kind is Drop:
        return Drop(*_ROOM.unpack(body))
    if kind is Write:
        count, remainder = divmod(len(body), _WRITE_BYTES)
        if remainder:
            raise ValueError(f"{len(body)} bytes are not a whole number of pages and stamps")
        stamps = np.frombuffer(body, dtype="<i8", offset=_PAGE_BYTES * count)
        return Write(np.frombuffer(body, dtype="<u4", count=count).tolist(), stamps.tolist())
    if kind is Done:
        return Done(*_DONE.unpack(body))
    if kind is Fail:
        return Fail(body.decode())
    for message_type in _EMPTY_MESSAGES:
        if kind is message_type:
            if body:
                raise ValueError(f"{len(body)} bytes too many")
            return message_type()
    raise AssertionError(f"{kind.__name__} has no reader")


def page_stamps(prompt: bytes, block_size: int, lora_name: str = "") -> list[int]:
    """Returns the stamp of each page of a prompt: a CRC of all tokens up to the page's end.

    prompt: token ids, 4 bytes little endian each. Stamps are equal on all workers and not negative.
    """
    size = 4 * block_size
    stamp = zlib.crc32(lora_name.encode())
    stamps = []
    for start in range(0, len(prompt), size):
        stamp = zlib.crc32(prompt[start : start + size], stamp)
        stamps.append(stamp)
    return stamps
