"""What media a model takes, and how media enter a prompt's identity. Pure.

A medium occupies a fixed number of copies of a placeholder token. For hashes and for engines that
see media, the copies become the lower and the upper half of the medium's content hash by turns
(`with_media`). So the prefix hashes of routers, the pages of an engine and its KV events differ
exactly if tokens or media differ, without a second kind of hash.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from common.errors import InvalidRequest
from common.request.preprocessed import BlockExtraInfo, MmObject, TokenIds

# Kind of medium -> key of `multi_modal_data`.
PART_NAMES: Final[Mapping[str, str]] = {"image": "image_url", "audio": "audio_url"}
# A small file may stand for a large image; 200 MB when decoded.
PIXELS_MAX: Final = 1 << 26
_DATA_URL: Final = re.compile(r"data:([^,;]*)(?:;[^,;]*)*;base64,", re.IGNORECASE)
_HEAD_CHARS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class MediaInput:
    """How a model takes one kind of medium.

    Raises InvalidRequest for a value that is out of range.
    """

    token_id: int
    """The placeholder."""

    tokens: int
    """Copies of the placeholder for each medium."""

    count_max: int
    """Limit of media in a request."""

    bytes_max: int
    """Limit of the size of each medium."""

    def __post_init__(self) -> None:
        if not 0 <= self.token_id < 2**32:
            raise InvalidRequest("token_id must fit 32 bits", "media.token_id")
        for name in ("tokens", "count_max", "bytes_max"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1", f"media.{name}")


@dataclass(frozen=True, slots=True)
class MediaHashes:
    """The content hashes of all media of one kind, in the order of the prompt."""

    input: MediaInput
    hashes: Sequence[int]


def content_hash(data: bytes) -> int:
    """Returns the identity of a medium: 64 bits of BLAKE2b of its bytes. Not XXH3, because clients
    could construct a medium with the hash of another one."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def read_data_url(url: str, field: str) -> tuple[str, bytes]:
    """Returns media type (lower case, "" if absent) and content of a base64 `data:` URL. Raises
    InvalidRequest with `field`."""
    head = _DATA_URL.match(url[:_HEAD_CHARS_MAX])
    if head is None:
        text = f"Invalid '{field}': expected a URL that starts with data:TYPE;base64,"
        raise InvalidRequest(f"{text}.", field, reason="INVALID_MEDIA")
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except ValueError as error:
        text = f"Invalid '{field}': not base64: {error}."
        raise InvalidRequest(text, field, reason="INVALID_MEDIA") from None
    return head[1].strip().lower(), data


def expand_placeholders(token_ids: TokenIds, inputs: Iterable[MediaInput]) -> TokenIds:
    """Returns the prompt in which each placeholder has its copies."""
    ids = token_ids.array
    repeats = np.ones(len(ids), dtype=np.int64)
    for media_input in inputs:
        repeats[ids == media_input.token_id] = media_input.tokens
    return TokenIds.of(np.repeat(ids, repeats))


def with_media(token_ids: TokenIds, media: Iterable[MediaHashes]) -> TokenIds:
    """Returns an expanded prompt with the content of its media; see the module. Placeholders after
    those of the media stay. Raises InvalidRequest if a medium has no placeholders."""
    ids = token_ids.array.copy()
    for medium in media:
        ids[_positions(token_ids, medium)] = np.concatenate(
            [media_words(mm_hash, medium.input.tokens) for mm_hash in medium.hashes]
        )
    return TokenIds.of(ids)


def block_media(
    token_ids: TokenIds, media: Iterable[MediaHashes], block_size: int
) -> tuple[BlockExtraInfo | None, ...]:
    """Returns the media of each started block of an expanded prompt, with their token ranges inside
    of the block."""
    objects: list[dict[int, list[int]]] = [{} for _ in range(-(-len(token_ids) // block_size))]
    for medium in media:
        runs = _positions(token_ids, medium).reshape(len(medium.hashes), medium.input.tokens)
        for mm_hash, run in zip(medium.hashes, runs.tolist(), strict=True):
            for position in run:
                block, offset = divmod(position, block_size)
                objects[block].setdefault(mm_hash, []).append(offset)
    return tuple(
        BlockExtraInfo(tuple(MmObject(mm_hash, _ranges(at)) for mm_hash, at in block.items()))
        if block
        else None
        for block in objects
    )


def _positions(token_ids: TokenIds, media: MediaHashes) -> npt.NDArray[np.int64]:
    count = len(media.hashes) * media.input.tokens
    positions = np.flatnonzero(token_ids.array == media.input.token_id)[:count]
    if len(positions) < count:
        text = f"{len(media.hashes)} media need {count} placeholders, not {len(positions)}"
        raise InvalidRequest(text, "token_ids")
    return positions


def media_words(mm_hash: int, count: int) -> npt.NDArray[np.uint32]:
    """Returns the tokens that stand for a medium: the halves of its hash by turns."""
    return np.resize(np.array([mm_hash & 0xFFFFFFFF, mm_hash >> 32], dtype=np.uint32), count)


def _ranges(offsets: Sequence[int]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for offset in offsets:
        if ranges and ranges[-1][1] == offset:
            ranges[-1] = (ranges[-1][0], offset + 1)
        else:
            ranges.append((offset, offset + 1))
    return tuple(ranges)
