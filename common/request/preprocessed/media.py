"""Media of a multimodal prompt. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, TypeAlias
from urllib.parse import urlsplit

from common.request.preprocessed.codecs import (
    TEXT,
    U64,
    JsonValue,
    from_json_value,
    invalid_value,
    to_json_value,
)
from common.request.preprocessed.token_ids import TokenIds

# Longer than any scheme, user and host that a fetcher accepts.
URL_HEAD_CHARS_MAX = 2048


@dataclass(frozen=True, slots=True)
class MmObject:
    """One medium in a block: the hash of its content and token ranges [start, end)."""

    mm_hash: U64
    offsets: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class BlockExtraInfo:
    """The media that touch one block, in prompt order."""

    mm_objects: tuple[MmObject, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MmRoutingInfo:
    """Identity of a prompt for routing only; block_mm_infos: per block, None without media."""

    routing_token_ids: TokenIds = field(default=TokenIds())
    block_mm_infos: tuple[BlockExtraInfo | None, ...] = ()


@dataclass(frozen=True, slots=True)
class NixlDescriptor:
    """A registered memory range of another process; size in bytes."""

    addr: U64
    size: U64
    mem_type: str
    device_id: U64


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaMediaDataDescriptor:
    """A decoded medium to read by RDMA; shape: outermost dimension first."""

    nixl_metadata: str
    nixl_descriptor: NixlDescriptor
    shape: tuple[U64, ...] = ()
    dtype: str
    metadata: JsonValue = None
    content_hash: str | None = None


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """A medium at a valid URL (`check_absolute_url`)."""

    url: str


@dataclass(frozen=True, slots=True)
class MediaRawUrl:
    """A medium at a URL that is not validated.

    JSON writes it as `Url` and reads it as `RawUrl`: readers get an ordinary URL, and an invalid
    URL is accepted only from a writer that uses the other tag on purpose.
    """

    url: str


@dataclass(frozen=True, slots=True)
class MediaCodec:
    """One medium: an object with exactly one key."""

    def read(self, value: JsonValue, path: str) -> MultimodalData:
        match value:
            case {"Url": url, **rest} if not rest:
                return MediaUrl(check_absolute_url(TEXT.read(url, f"{path}.Url"), f"{path}.Url"))
            case {"RawUrl": url, **rest} if not rest:
                return MediaRawUrl(TEXT.read(url, f"{path}.RawUrl"))
            case {"Decoded": decoded, **rest} if not rest:
                return from_json_value(RdmaMediaDataDescriptor, decoded, f"{path}.Decoded")
        raise invalid_value(path, "an object with one key of Url, RawUrl, Decoded", value)

    def write(self, value: MultimodalData) -> JsonValue:
        match value:
            case MediaUrl(url) | MediaRawUrl(url):
                return {"Url": url}
            case RdmaMediaDataDescriptor():
                return {"Decoded": to_json_value(value)}


MultimodalData: TypeAlias = Annotated[
    MediaUrl | MediaRawUrl | RdmaMediaDataDescriptor, MediaCodec()
]


def check_absolute_url(url: str, path: str) -> str:
    """Returns `url` if it is absolute and can be fetched. Raises InvalidRequest with `path`."""
    # Only the head is parsed: urlsplit caches its argument, and data: URLs are large.
    url_head = url[:URL_HEAD_CHARS_MAX]
    try:
        parts = urlsplit(url_head)
        # urlsplit checks the port when it is read.
        has_host = bool(parts.hostname) and (parts.port is None or parts.port >= 0)
    except ValueError:
        raise invalid_value(path, "a valid URL", url_head) from None
    needs_host = parts.scheme in ("http", "https", "ws", "wss", "ftp")
    is_absolute = bool(parts.scheme) and (has_host or bool(parts.path and not needs_host))
    if not is_absolute or any(whitespace in url for whitespace in " \t\r\n\0"):
        raise invalid_value(path, "a valid URL", url_head)
    return url
