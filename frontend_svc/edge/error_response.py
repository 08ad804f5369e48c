"""Sends error responses through ASGI."""

from __future__ import annotations

from frontend_svc.edge.asgi import Headers, Send, send_response
from frontend_svc.errors import HttpError


async def send_error(send: Send, error: HttpError, headers: Headers = ()) -> None:
    """Sends the response of an error, with more headers."""
    own = tuple((name.encode(), value.encode()) for name, value in error.headers)
    await send_response(send, error.status, (*own, *headers), error.body)
