"""Sizes of images by their headers; images with too many pixels are refused."""

from __future__ import annotations

import struct
import time

import pytest

from common.errors import InvalidRequest
from frontend_svc.media.formats import media_type
from frontend_svc.media.image_size import image_pixels
from tests.kit.bombs import MEDIA_BOMBS, riff


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height) + bytes(9)


def jpeg(*frames: tuple[int, int], kind: int = 0xC2) -> bytes:
    data = b"\xff\xd8\xff\xe0" + struct.pack(">H", 16) + bytes(14)
    for width, height in frames:
        data += bytes([0xFF, 0xFF, kind]) + struct.pack(">HBHHB", 8, 8, height, width, 0)
    return data + b"\xff\xda\0\x08" + bytes(6) + b"pixels\xff\xd9"


@pytest.mark.parametrize(
    ("name", "data", "pixels"),
    [
        ("image/png", png(640, 480), 640 * 480),
        ("image/png", b"\x89PNG\r\n\x1a\n" + b"cat" * 100, None),
        ("image/png", b"\x89PNG\r\n\x1a\n", None),
        ("image/jpeg", jpeg((640, 480)), 640 * 480),
        ("image/jpeg", jpeg((10, 10), (640, 480)), 640 * 480),
        ("image/jpeg", jpeg((640, 480), kind=0xC4), None),
        ("image/jpeg", b"\xff\xd8\xff", None),
        ("image/gif", b"GIF89a" + struct.pack("<HH", 640, 480), 640 * 480),
        ("image/gif", b"GIF89a", None),
        ("image/webp", riff(b"VP8X", bytes(4) + b"\x7f\x02\0\xdf\x01\0" + bytes(9)), 640 * 480),
        ("image/webp", riff(b"VP8L", b"\x2f\x7f\xc2\x77\x00" + bytes(20)), 640 * 480),
        ("image/webp", riff(b"VP8 ", bytes(6) + struct.pack("<HH", 640, 480) + bytes(9)), 307_200),
        ("image/webp", riff(b"ANIM", bytes(30)), None),
        ("audio/wav", b"RIFF\0\0\0\0WAVE", None),
    ],
)
def test_the_size_is_that_of_the_header(name: str, data: bytes, pixels: int | None) -> None:
    assert image_pixels(name, data) == pixels


@pytest.mark.parametrize("name", MEDIA_BOMBS)
def test_an_image_with_too_many_pixels_is_refused_with_its_field(name: str) -> None:
    declared, data = MEDIA_BOMBS[name]
    with pytest.raises(InvalidRequest, match="pixels, at most 67108864") as error:
        media_type("image", declared, data, "messages[0].content[0].image_url")
    assert error.value.field == "messages[0].content[0].image_url"
    assert error.value.reason == "MEDIA_TOO_LARGE"


@pytest.mark.parametrize("part", [b"\xff\xe0\0\x02", b"\xff", b"\xff\x01"], ids=repr)
def test_many_segments_of_a_jpeg_take_no_time(part: bytes) -> None:
    data = b"\xff\xd8" + part * (20_000_000 // len(part))
    begin = time.process_time()
    assert image_pixels("image/jpeg", data) is None
    assert time.process_time() - begin < 1.0
