"""Messages of a KV handoff between simulated engines, and their encoding. Pure."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from common.errors import InvalidRequest

U32: TypeAlias = Annotated[int, Field(ge=0, lt=2**32)]
U64: TypeAlias = Annotated[int, Field(ge=0, lt=2**64)]


@dataclass(frozen=True, slots=True)
class Message:
    """A message between the two ends of a room."""


@dataclass(frozen=True, slots=True)
class Pull(Message):
    """Decode's pages, in the order of the prompt. incarnation: worker id. tokens: of the prompt."""

    room: U64
    incarnation: U64
    tokens: U32
    block_size: U32
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Drop(Message):
    """No decode leg will pull this room."""

    room: U64


class Joined(Message):
    """The prefill leg is present."""


class Ping(Message):
    """The prefill leg is still alive."""


@dataclass(frozen=True, slots=True)
class Write(Message):
    """Pages and the stamps written to them (`page_stamps`)."""

    pages: list[int]
    stamps: list[int]


@dataclass(frozen=True, slots=True)
class Done(Message):
    """All pages are written. token: the first of the output, even if it ends the output.

    cached_tokens: prompt tokens found in prefill's cache.
    """

    token: U32
    cached_tokens: U32


@dataclass(frozen=True, slots=True)
class Fail(Message):
    """Prefill failed and writes nothing more."""

    reason: str


class Abort(Message):
    """Decode requests the end of all writes."""


class Aborted(Message):
    """Prefill writes nothing more."""


class Received(Message):
    """Decode has received all pages."""


_ADAPTERS: Final[dict[bytes, TypeAdapter[Any]]] = {
    kind.__name__.encode(): TypeAdapter(kind)
    for kind in (Pull, Drop, Joined, Ping, Write, Done, Fail, Abort, Aborted, Received)
}


def to_bytes(message: Message) -> bytes:
    """Encodes a message: the name of its type, a space, and its fields as JSON."""
    name = type(message).__name__.encode()
    return name + b" " + _ADAPTERS[name].dump_json(message)


def from_bytes(frame: bytes) -> Message:
    """Decodes a frame. Raises InvalidRequest if it is malformed."""
    name, _, fields = frame.partition(b" ")
    if name not in _ADAPTERS:
        raise InvalidRequest(f"unknown message {name!r:.20}", "kind")
    try:
        message: Message = _ADAPTERS[name].validate_json(fields, strict=True)
    except ValidationError as error:
        raise InvalidRequest(f"{name.decode()}: {error.errors()[0]['msg']}", "body") from None
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
