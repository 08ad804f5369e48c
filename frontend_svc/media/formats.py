"""File formats of media, by their first bytes (pure)."""

from __future__ import annotations

import re
from typing import Final

from common.errors import InvalidRequest
from common.request.media import PIXELS_MAX
from frontend_svc.media.image_size import image_pixels

INVALID_MEDIA: Final = "INVALID_MEDIA"
MEDIA_REFUSED: Final = "MEDIA_REFUSED"
MEDIA_TOO_LARGE: Final = "MEDIA_TOO_LARGE"
_FORMATS: Final = (
    ("image/png", re.compile(rb"\x89PNG\r\n\x1a\n")),
    ("image/jpeg", re.compile(rb"\xff\xd8\xff")),
    ("image/gif", re.compile(rb"GIF8[79]a")),
    ("image/webp", re.compile(rb"RIFF....WEBP", re.DOTALL)),
    ("audio/wav", re.compile(rb"RIFF....WAVE", re.DOTALL)),
    ("audio/mpeg", re.compile(rb"ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]")),
    ("audio/flac", re.compile(rb"fLaC")),
    ("audio/ogg", re.compile(rb"OggS")),
)
_NAMES: Final = {"image": "PNG, JPEG, GIF or WebP image", "audio": "WAV, MP3, FLAC or Ogg file"}
# Servers send it for files whose type they do not know.
_UNKNOWN_TYPES: Final = ("", "application/octet-stream", "binary/octet-stream")


def media_type(kind: str, declared: str, data: bytes, field: str) -> str:
    """Returns the media type of a medium by its first bytes. declared: the type that its source
    states. Raises InvalidRequest with `field` if either is of another kind, or if an image has too
    many pixels."""
    found = next((name for name, magic in _FORMATS if magic.match(data)), "")
    if not found.startswith(f"{kind}/"):
        raise invalid_media(field, f"the content is not a {_NAMES[kind]}")
    if declared not in _UNKNOWN_TYPES and not declared.startswith(f"{kind}/"):
        raise invalid_media(field, f"its type is {declared[:80]!r}, not {kind}/...")
    if (pixels := image_pixels(found, data)) is not None and pixels > PIXELS_MAX:
        text = f"the image has {pixels} pixels, at most {PIXELS_MAX}"
        raise invalid_media(field, text, MEDIA_TOO_LARGE)
    return found


def invalid_media(field: str, message: str, reason: str = INVALID_MEDIA) -> InvalidRequest:
    """Returns the error of a medium. reason: OpenAI's `code`, in upper case."""
    return InvalidRequest(f"Invalid '{field}': {message}.", field, reason=reason)


def too_large(field: str, bytes_max: int) -> InvalidRequest:
    return invalid_media(field, f"the medium has more than {bytes_max} bytes", MEDIA_TOO_LARGE)
