"""ASGI types and the messages of a response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

# ASGI leaves the values of its messages open.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

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


async def send_response(send: Send, status: int, headers: Headers, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send(response_start(status, (*headers, length)))
    await send({"type": "http.response.body", "body": body})
