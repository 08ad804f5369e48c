"""Reads the body of a request that is not counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from common.errors import DeadlineExceeded, InvalidRequest, RequestCancelled
from frontend_svc.edge.asgi import Receive
from frontend_svc.errors import BODY_TOO_LARGE

# In which the next part of a body must arrive.
PART_TIMEOUT_S: Final = 60.0


async def read_body(receive: Receive, limit: int) -> bytes:
    """Returns a body. Raises InvalidRequest above its limit in bytes, and as `body_parts`."""
    body = b""
    async for part in body_parts(receive):
        body += part
        if len(body) > limit:
            text = f"The body is larger than {limit >> 10} KB."
            raise InvalidRequest(text, reason=BODY_TOO_LARGE)
    return body


async def body_parts(receive: Receive) -> AsyncIterator[bytes]:
    """Yields a body as it arrives. Raises DeadlineExceeded and RequestCancelled."""
    has_more = True
    while has_more:
        try:
            async with asyncio.timeout(PART_TIMEOUT_S):
                # Any: a message of ASGI.
                message: Any = await receive()
        except TimeoutError:
            text = f"No part of the body arrived within {PART_TIMEOUT_S:g} s."
            raise DeadlineExceeded(text) from None
        if message["type"] == "http.disconnect":
            raise RequestCancelled("The client disconnected before its body was complete.")
        yield message.get("body", b"")
        has_more = message.get("more_body", False)
