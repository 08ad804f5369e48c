"""Messages of a KV handoff between simulated engines, and their encoding as JSON lines. Pure."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, Literal, TypeAlias

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
    kind: Literal["pull"] = "pull"


@dataclass(frozen=True, slots=True)
class Drop:
    """No decode leg will pull this room."""

    room: U64
    kind: Literal["drop"] = "drop"


@dataclass(frozen=True, slots=True)
class Write:
    """The content of pages."""

    pages: list[int]
    stamps: list[int]
    """What is written to each page (`page_stamps`)."""
    kind: Literal["write"] = "write"


@dataclass(frozen=True, slots=True)
class Done:
    """All pages are written."""

    token: U32
    """The first of the output, even if it ends the output."""
    cached_tokens: U32
    """Prompt tokens found in prefill's cache."""
    kind: Literal["done"] = "done"


@dataclass(frozen=True, slots=True)
class Fail:
    """Prefill failed and writes nothing more."""

    reason: str
    kind: Literal["fail"] = "fail"


class Signal(StrEnum):
    """The messages without fields."""

    JOINED = "joined"
    """The prefill leg is present."""
    PING = "ping"
    """The prefill leg is still alive."""
    ABORT = "abort"
    """Decode requests the end of all writes."""
    ABORTED = "aborted"
    """Prefill writes nothing more."""
    RECEIVED = "received"
    """Decode has received all pages."""


Message: TypeAlias = Pull | Drop | Write | Done | Fail | Signal
_CODEC: Final[TypeAdapter[Message]] = TypeAdapter(
    Annotated[Pull | Drop | Write | Done | Fail, Field(discriminator="kind")] | Signal
)


def to_line(message: Message) -> bytes:
    """Returns the message as one line of JSON."""
    return _CODEC.dump_json(message) + b"\n"


def from_line(line: bytes) -> Message:
    """Returns the message of a line. Raises InvalidRequest if it is malformed."""
    try:
        return _CODEC.validate_json(line, strict=True)
    except ValidationError as error:
        raise InvalidRequest(error.errors()[0]["msg"], "message") from None


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
