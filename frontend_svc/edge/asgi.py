"""ASGI types and the messages of a response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

# ASGI leaves the values of its messages open.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

# Key of the ClientConnection in the state of a scope.
CONNECTION = "kvmesh.connection"
# Key in the state of a scope that is there if the request runs on idle capacity only.
BACKGROUND = "kvmesh.background"
SEND_BYTES = 256 << 10
JSON_HEADER = (b"content-type", b"application/json")
# The last two keep caches and proxies from buffering events.
STREAM_HEADERS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientConnection(Protocol):
    """The connection of a request, beside ASGI's `send` and `receive`. has_body: whether the whole
    body has arrived. can_write: whether the client is connected and reads what is written."""

    @property
    def has_body(self) -> bool: ...
    @property
    def can_write(self) -> bool: ...

    def write(self, data: bytes) -> None:
        """Writes a part, not empty, of the body of a response without a length that has begun."""
        ...

    def watched(self, on_disconnect: Callable[[], None]) -> AbstractContextManager[None]:
        """Calls `on_disconnect` if the client disconnects before the end of the block. The body has
        been read."""
        ...


def response_start(status: int, headers: Headers) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body_part(data: bytes) -> Message:
    """Returns a message with a part of the body; more parts follow."""
    return {"type": "http.response.body", "body": data, "more_body": True}


def last_part(data: bytes) -> Message:
    """Returns a message with the rest of the body."""
    return {"type": "http.response.body", "body": data, "more_body": False}


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
    await send(last_part(b"".join(piece)))


async def send_response(send: Send, status: int, headers: Headers, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send(response_start(status, (*headers, length)))
    await send(last_part(body))
