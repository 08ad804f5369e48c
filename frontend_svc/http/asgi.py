"""ASGI types and the messages of a response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

# ASGI leaves the values of its messages open.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

SEND_BYTES = 256 << 10
JSON_HEADER = (b"content-type", b"application/json")
# The last two keep caches and proxies from buffering events.
STREAM_HEADERS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
BODY_END: Message = {"type": "http.response.body", "body": b"", "more_body": False}


def response_start(status: int, headers: Headers) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body_part(data: bytes) -> Message:
    """Returns a message with a part of the body; more parts follow."""
    return {"type": "http.response.body", "body": data, "more_body": True}


async def send_response_parts(
    send: Send, status: int, headers: Headers, parts: Sequence[bytes]
) -> None:
    """Sends a body that is too large for one buffer, in pieces of about SEND_BYTES."""
    length = (b"content-length", str(sum(map(len, parts))).encode())
    await send(response_start(status, (*headers, length)))
    piece: list[bytes] = []
    size = 0
    for part in parts:
        piece.append(part)
        size += len(part)
        if size >= SEND_BYTES:
            await send(body_part(b"".join(piece)))
            piece, size = [], 0
    await send({"type": "http.response.body", "body": b"".join(piece)})


async def send_response(send: Send, status: int, headers: Headers, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send(response_start(status, (*headers, length)))
    await send({"type": "http.response.body", "body": body})
