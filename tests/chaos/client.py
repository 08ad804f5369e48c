"""A cheap HTTP client that measures the pauses of a streamed response.

A general client spends more time on a token than the whole mesh; on a small machine its own pauses
would look like pauses of the mesh. This client keeps the bytes and the longest gap, and parses at
the end. Each call has a connection of its own.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.kit.processes import MODEL

_EVENT = b"data: {"
_DONE = "data: [DONE]"
CALL_S = 120.0


@dataclass(slots=True)
class Reply:
    """What a client has received of one response. Times: `time.monotonic`, 0: not yet.

    error: "" while it runs and if it succeeds. events: pieces received. pause_s: longest time
    between two pieces, which ended at pause_at. last_at: when the last piece was received.
    """

    prompt: str
    tokens: int
    begun_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    ended_at: float = 0.0
    status: int = 0
    events: int = 0
    pause_s: float = 0.0
    pause_at: float = 0.0
    text: str = ""
    finish_reason: str = ""
    error: str = ""
    raw: bytearray = field(default_factory=bytearray, repr=False)


def body_of(prompt: str, tokens: int, *, stream: bool) -> dict[str, Any]:
    """Returns the body of a completion of exactly `tokens` tokens."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
    }


def request_of(
    url: str, body: dict[str, Any], path: str = "/v1/completions", headers: str = ""
) -> bytes:
    """Returns the bytes of a request; the response ends with the connection. headers: more lines,
    each with its end."""
    data = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\nconnection: close\r\n{headers}"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    ).encode() + data


class HttpCall(asyncio.Protocol):
    """One request on its own connection. ended: set when the connection has ended."""

    def __init__(self, request: bytes, reply: Reply) -> None:
        self.reply = reply
        self.ended = asyncio.Event()
        self._request = request
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        reply = self.reply
        reply.raw += data
        count = data.count(_EVENT)
        if count == 0:
            return
        now = time.monotonic()
        reply.events += count
        if not reply.first_at:
            reply.first_at = now
        elif now - reply.last_at > reply.pause_s:
            reply.pause_s, reply.pause_at = now - reply.last_at, now
        reply.last_at = now

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.reply.error = f"connection lost: {exc!r}"
        self.ended.set()

    def hang_up(self) -> None:
        """Aborts the connection."""
        if self._transport is not None:
            self._transport.abort()


async def connect(url: str, reply: Reply, *, stream: bool) -> HttpCall:
    """Sends the request. Raises OSError if the connection is refused."""
    body = body_of(reply.prompt, reply.tokens, stream=stream)
    return await _send(url, request_of(url, body), reply)


async def _send(url: str, request: bytes, reply: Reply) -> HttpCall:
    host, _, port = urlsplit(url).netloc.rpartition(":")
    reply.begun_at = time.monotonic()
    _, call = await asyncio.get_running_loop().create_connection(
        lambda: HttpCall(request, reply), host, int(port)
    )
    return call


# Any: JSON.
async def fetch(url: str, reply: Reply, *, stream: bool = True, **fields: Any) -> Reply:
    """Returns the complete response; errors of the mesh are in `error`. fields: of the body."""
    body = {**body_of(reply.prompt, reply.tokens, stream=stream), **fields}
    await exchange(url, request_of(url, body), reply)
    if not reply.error:
        _read(reply)
    return reply


async def exchange(url: str, request: bytes, reply: Reply) -> None:
    """Sends a request and receives the response up to its end; `error` states if there is none."""
    call = None
    try:
        async with asyncio.timeout(CALL_S):
            call = await _send(url, request, reply)
            await call.ended.wait()
    except OSError as error:  # TimeoutError is one
        reply.error = f"no response: {error!r}"
        if call is not None:
            call.hang_up()
    reply.ended_at = time.monotonic()


def content_of(raw: bytes | bytearray) -> tuple[int, str]:
    """Returns status and body of a response. Raises ValueError if it is incomplete."""
    head, blank, body = bytes(raw).partition(b"\r\n\r\n")
    if not blank:
        raise ValueError("the connection ended before a body")
    text = (_dechunked(body) if b"chunked" in head.lower() else body).decode()
    return int(head.split(b" ", 2)[1]), text


def _read(reply: Reply) -> None:
    """Parses `raw` into the other fields."""
    try:
        reply.status, text = content_of(reply.raw)
    except ValueError as error:
        reply.error = f"incomplete response: {error}"
        return
    if reply.status != 200:
        reply.error = f"{reply.status} {json.loads(text)['error']['message']}"
    elif text.startswith(("data: ", ":")):
        _read_events(reply, text)
    else:
        choice = json.loads(text)["choices"][0]
        reply.text, reply.finish_reason = choice["text"], choice["finish_reason"]


def _read_events(reply: Reply, text: str) -> None:
    lines = [line for line in text.split("\n") if line and not line.startswith(":")]
    for line in lines:
        if line == _DONE:
            break
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            reply.error = event["error"]["message"]
            return
        for choice in event["choices"]:
            reply.text += choice["text"]
            reply.finish_reason = choice["finish_reason"] or reply.finish_reason
    if lines[-1] != _DONE:
        reply.error = "the stream ended without [DONE]"


def _dechunked(body: bytes) -> bytes:
    """Raises ValueError if the last chunk is missing."""
    parts: list[bytes] = []
    at = 0
    while True:
        line_end = body.index(b"\r\n", at)
        size = int(body[at:line_end], 16)
        if size == 0:
            return b"".join(parts)
        at = line_end + 2
        parts.append(body[at : at + size])
        at += size + 2
