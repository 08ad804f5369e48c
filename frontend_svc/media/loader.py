"""Loads the media of a chat: reads `data:` URLs, fetches others, checks and hashes the content."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from common.request.media import MediaInput, content_hash, read_data_url
from common.runtime.tasks import TaskGroup
from frontend_svc.media.formats import (
    MEDIA_REFUSED,
    MEDIA_TOO_LARGE,
    invalid_media,
    media_type,
    too_large,
)
from frontend_svc.media.prompt import MediaPart, Medium

if TYPE_CHECKING:
    from frontend_svc.media.fetcher import MediaFetcher

# Larger URLs are decoded in a thread: they could block the event loop for > 1 ms.
DECODE_INLINE_CHARS = 1 << 18


class MediaLoader:
    """fetcher: None: only `data:` URLs are loaded. bytes_max: of all media of a request together,
    so that they fit into one message to a worker."""

    def __init__(self, fetcher: MediaFetcher | None, bytes_max: int) -> None:
        self._fetcher = fetcher
        self._bytes_max = bytes_max

    async def load(
        self, parts: Sequence[MediaPart], inputs: Mapping[str, MediaInput], tenant: str = ""
    ) -> list[Medium]:
        """Returns the media of the parts, in their order. Raises InvalidRequest with the field of
        the part that cannot be loaded.

        - tenant: see `MediaFetcher.fetch`.
        """
        limits = {
            kind: min(self._bytes_max, media_input.bytes_max)
            for kind, media_input in inputs.items()
        }
        async with TaskGroup() as group:
            tasks = [
                group.create_task(self._load(part, limits[part.kind], tenant)) for part in parts
            ]
        media, total = [], 0
        for part, task in zip(parts, tasks, strict=True):
            medium, size = task.result()
            media.append(medium)
            total += size
            if total > self._bytes_max:
                text = f"all media together have more than {self._bytes_max} bytes"
                raise invalid_media(part.field, text, MEDIA_TOO_LARGE)
        return media

    async def _load(self, part: MediaPart, bytes_max: int, tenant: str) -> tuple[Medium, int]:
        """Returns the medium and its size in bytes."""
        if part.url[:5].lower() == "data:":
            # Four characters have three bytes.
            if len(part.url) > 1024 + bytes_max // 3 * 4:
                raise too_large(part.field, bytes_max)
            if len(part.url) <= DECODE_INLINE_CHARS:
                return _read(part, bytes_max)
            return await asyncio.to_thread(_read, part, bytes_max)
        if self._fetcher is None:
            text = "this server fetches no URLs (--media-urls); send the content as a data: URL"
            raise invalid_media(part.field, text, MEDIA_REFUSED)
        declared, data = await self._fetcher.fetch(part.url, bytes_max, part.field, tenant)
        return await asyncio.to_thread(_encode, part, declared, data)


def _read(part: MediaPart, bytes_max: int) -> tuple[Medium, int]:
    declared, data = read_data_url(part.url, part.field)
    if len(data) > bytes_max:
        raise too_large(part.field, bytes_max)
    media_type(part.kind, declared, data, part.field)
    return Medium(part.kind, part.url, content_hash(data)), len(data)


def _encode(part: MediaPart, declared: str, data: bytes) -> tuple[Medium, int]:
    kind = media_type(part.kind, declared, data, part.field)
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return Medium(part.kind, url, content_hash(data)), len(data)
