"""The size of an image in pixels, by its header, without decoding it (pure).

A file of some kilobytes may stand for gigabytes of pixels, which engines would decode.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Final

# Start of frame: markers C0 to CF, without those of tables (C4), extensions (C8), arithmetic (CC).
_JPEG_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Markers without a length.
_JPEG_BARE: Final = frozenset({0x01, *range(0xD0, 0xD9)})
_JPEG_SEGMENTS_MAX: Final = 4096
_JPEG_MARKER: Final = re.compile(rb"\xff++([^\xff])", re.DOTALL)


def image_pixels(media_type: str, data: bytes) -> int | None:
    """Returns width times height; None if the header does not state them."""
    read = _READERS.get(media_type)
    return None if read is None else read(data)


def _png(data: bytes) -> int | None:
    if data[12:16] != b"IHDR" or len(data) < 24:
        return None
    return int.from_bytes(data[16:20], "big") * int.from_bytes(data[20:24], "big")


def _gif(data: bytes) -> int | None:
    if len(data) < 10:
        return None
    return int.from_bytes(data[6:8], "little") * int.from_bytes(data[8:10], "little")


def _jpeg(data: bytes) -> int | None:
    """Returns the largest of all frames: decoders may use any."""
    pixels, at = None, 2
    for _ in range(_JPEG_SEGMENTS_MAX):
        if (marker := _JPEG_MARKER.match(data, at)) is None:
            break
        at, kind = marker.end(), marker[1][0]
        if kind in _JPEG_BARE:
            continue
        if kind in _JPEG_FRAMES and len(data) >= at + 7:
            height, width = data[at + 3 : at + 5], data[at + 5 : at + 7]
            size = int.from_bytes(height, "big") * int.from_bytes(width, "big")
            pixels = max(pixels or 0, size)
        if kind == 0xDA:  # the pixels follow
            break
        at += max(2, int.from_bytes(data[at : at + 2], "big"))
    return pixels


def _webp(data: bytes) -> int | None:
    if len(data) < 30:
        return None
    match data[12:16]:
        case b"VP8X":
            width, height = data[24:27], data[27:30]
            return (int.from_bytes(width, "little") + 1) * (int.from_bytes(height, "little") + 1)
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            return ((bits & 0x3FFF) + 1) * ((bits >> 14 & 0x3FFF) + 1)
        case b"VP8 ":
            sides = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (26, 28))
            return math.prod(sides)
    return None


_READERS: Final[Mapping[str, Callable[[bytes], int | None]]] = {
    "image/png": _png,
    "image/jpeg": _jpeg,
    "image/gif": _gif,
    "image/webp": _webp,
}
