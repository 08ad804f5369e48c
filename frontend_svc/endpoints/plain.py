"""An endpoint that counts no request: checks the key, responds, and reports errors."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeAlias
from urllib.parse import parse_qsl

from common.access.caller import ANONYMOUS, Caller
from common.errors import MeshError
from frontend_svc.access.keys import admit
from frontend_svc.edge.asgi import (
    CONNECTION,
    Receive,
    Scope,
    Send,
    body_part,
    last_part,
    response_start,
    send_response,
)
from frontend_svc.edge.error_response import send_error
from frontend_svc.endpoints.event_stream import send_events
from frontend_svc.endpoints.header_ids import header_id, id_headers
from frontend_svc.endpoints.route import Route

# Header of Anthropic's clients.
ANTHROPIC_VERSION = b"anthropic-version"
# Key of the parameters of the path in a scope.
PATH_PARAMETERS = "path_params"


async def _no_body() -> NoReturn:
    raise AssertionError("the request has no body")


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """A request whose body its handler reads, if it has one."""

    caller: Caller

    parameters: Mapping[str, str]
    """Those of the path, by name."""

    query_string: bytes

    is_anthropic: bool = False
    """Whether it gets the response of Anthropic's API, on a route that has it."""

    accept: str = ""
    """The media types that the client accepts, as it names them."""

    content_type: bytes = b""
    """Of the body."""

    receive: Receive = _no_body
    """Returns the next part of the body, as ASGI does."""

    @property
    def query(self) -> list[tuple[str, str]]:
        """Names and values of the query."""
        return parse_qsl(self.query_string.decode("latin-1"), keep_blank_values=True)


@dataclass(frozen=True, slots=True)
class PlainResponse:
    """A response with a body of known length."""

    body: bytes
    status: int = 200
    media_type: str = "application/json"
    parts: AsyncIterator[bytes] | None = None
    """The body, if it is too large for one piece."""

    size: int = 0
    """Of all parts."""

    events: AsyncIterator[bytes] | None = None
    """A stream of events in place of a body."""


Respond: TypeAlias = Callable[[PlainRequest], Awaitable[PlainResponse]]


class PlainEndpoint:
    """The ASGI application of a route whose requests are not counted."""

    def __init__(self, route: Route, respond: Respond) -> None:
        self._route = route
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route, request_headers = self._route, dict(scope["headers"])
        anthropic = route.anthropic_errors if ANTHROPIC_VERSION in request_headers else None
        form = anthropic or route.errors
        own_id = header_id(request_headers.get(b"x-request-id", b""), os.urandom(16).hex())
        headers = id_headers(form, own_id)
        try:
            caller = ANONYMOUS if route.is_open else admit(scope, route.permission)
            parameters = scope.get(PATH_PARAMETERS, {})
            is_anthropic = anthropic is not None
            accept = request_headers.get(b"accept", b"").decode("latin-1")
            query = scope["query_string"]
            content_type = request_headers.get(b"content-type", b"")
            request = PlainRequest(
                caller, parameters, query, is_anthropic, accept, content_type, receive
            )
            response = await self._respond(request)
        except MeshError as error:
            await send_error(send, form.http_error(error, own_id.decode("latin-1"), ()), headers)
            return
        if response.events is not None:
            events = None if scope["method"] == "HEAD" else response.events
            await send_events(send, scope["state"][CONNECTION], headers, events)
            return
        headers = ((b"content-type", response.media_type.encode()), *headers)
        if response.parts is None:
            await send_response(send, response.status, headers, response.body)
            return
        length = (b"content-length", str(response.size).encode())
        await send(response_start(response.status, (*headers, length)))
        async for part in response.parts:
            await send(body_part(part))
        await send(last_part(b""))
