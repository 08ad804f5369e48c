"""Messages of a KV handoff between simulated engines, and their encoding. Pure.

A frame is its length (4 bytes, little endian), the name of the message, a space, and the fields as
a JSON object. It is the same in all versions that work together (docs/operate/versions.md).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from common.errors import InvalidRequest

U32: TypeAlias = Annotated[int, Field(ge=0, lt=2**32)]
U64: TypeAlias = Annotated[int, Field(ge=0, lt=2**64)]


@dataclass(frozen=True, slots=True)
class Pull:
    """Decode requests the KV of a prompt."""

    room: U64
    incarnation: U64
    """Id of the decode worker."""
    tokens: U32
    """Length of the prompt."""
    block_size: U32
    pages: list[int]
    """Where prefill writes, in the order of the prompt."""


@dataclass(frozen=True, slots=True)
class Drop:
    """No decode leg will pull this room."""

    room: U64


@dataclass(frozen=True, slots=True)
class Write:
    """The content of pages."""

    pages: list[int]
    stamps: list[int]
    """What is written to each page (`page_stamps`)."""


@dataclass(frozen=True, slots=True)
class Done:
    """All pages are written."""

    token: U32
    """The first of the output, even if it ends the output."""
    cached_tokens: U32
    """Prompt tokens found in prefill's cache."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Prefill failed and writes nothing more."""

    reason: str


class Signal(StrEnum):
    """The messages without fields."""

    JOINED = "Joined"
    """The prefill leg is present."""
    PING = "Ping"
    """The prefill leg is still alive."""
    ABORT = "Abort"
    """Decode requests the end of all writes."""
    ABORTED = "Aborted"
    """Prefill writes nothing more."""
    RECEIVED = "Received"
    """Decode has received all pages."""


Message: TypeAlias = Pull | Drop | Write | Done | Fail | Signal
FRAME_LENGTH_BYTES: Final = 4
# Any: an adapter of each type.
_FIELDS: Final[dict[bytes, TypeAdapter[Any]]] = {
    kind.__name__.encode(): TypeAdapter(kind) for kind in (Pull, Drop, Write, Done, Fail)
}
_NO_FIELDS: Final = b"{}"
_SIGNALS: Final = {signal.encode(): signal for signal in Signal}


def to_frame(message: Message) -> bytes:
    """Returns the message with its length before it."""
    if isinstance(message, Signal):
        name, fields = message.encode(), _NO_FIELDS
    else:
        name = type(message).__name__.encode()
        fields = _FIELDS[name].dump_json(message)
    length = len(name) + 1 + len(fields)
    return length.to_bytes(FRAME_LENGTH_BYTES, "little") + name + b" " + fields


def from_bytes(data: bytes) -> Message:
    """Returns the message of a frame without its length. Raises InvalidRequest if it is
    malformed."""
    name, _, fields = data.partition(b" ")
    if name in _SIGNALS and fields == _NO_FIELDS:
        return _SIGNALS[name]
    if name not in _FIELDS:
        raise InvalidRequest(f"unknown message {data!r:.40}", "message")
    try:
        message: Message = _FIELDS[name].validate_json(fields, strict=True)
    except ValidationError as error:
        raise InvalidRequest(f"{name.decode()}: {error.errors()[0]['msg']}", "message") from None
    return message


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
