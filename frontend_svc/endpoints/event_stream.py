"""Sends a stream of events that no request to workers generates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from common.errors import MeshError
from frontend_svc.edge.asgi import (
    STREAM_HEADERS,
    ClientConnection,
    Headers,
    Send,
    body_part,
    last_part,
    response_start,
)
from frontend_svc.errors import error_event


async def send_events(
    send: Send, connection: ClientConnection, headers: Headers, events: AsyncIterator[bytes] | None
) -> None:
    """Sends events to their end, or until the client disconnects. A MeshError of theirs is the last
    event.

    - events: None: only the headers.
    """
    await send(response_start(200, (*STREAM_HEADERS, *headers)))
    if events is None:
        await send(last_part(b""))
        return
    writing = asyncio.create_task(_write(send, events), name="event stream")

    def client_gone() -> None:
        writing.cancel()

    with connection.watched(client_gone):
        try:
            await writing
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # Not by the client.


async def _write(send: Send, events: AsyncIterator[bytes]) -> None:
    end = b""
    try:
        async for part in events:
            await send(body_part(part))
    except MeshError as error:
        end = error_event(error)
    await send(last_part(end))
