"""An endpoint without a body: checks the key, responds, and reports errors."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import parse_qsl

from common.access.caller import ANONYMOUS, Caller
from common.errors import MeshError
from frontend_svc.access.keys import admit
from frontend_svc.edge.asgi import Receive, Scope, Send, send_response
from frontend_svc.edge.error_response import send_error
from frontend_svc.endpoints.header_ids import header_id, id_headers
from frontend_svc.endpoints.route import Route

# Header of Anthropic's clients.
ANTHROPIC_VERSION = b"anthropic-version"
# Key of the parameters of the path in a scope.
PATH_PARAMETERS = "path_params"


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """A request without a body."""

    caller: Caller

    parameters: Mapping[str, str]
    """Those of the path, by name."""

    query_string: bytes

    is_anthropic: bool = False
    """Whether it gets the response of Anthropic's API, on a route that has it."""

    accept: str = ""
    """The media types that the client accepts, as it names them."""

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


Respond: TypeAlias = Callable[[PlainRequest], Awaitable[PlainResponse]]


class PlainEndpoint:
    """The ASGI application of a route without a body."""

    def __init__(self, route: Route, respond: Respond) -> None:
        self._route = route
        self._respond = respond

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
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
            request = PlainRequest(caller, parameters, query, is_anthropic, accept)
            response = await self._respond(request)
        except MeshError as error:
            await send_error(send, form.http_error(error, own_id.decode("latin-1"), ()), headers)
            return
        headers = ((b"content-type", response.media_type.encode()), *headers)
        await send_response(send, response.status, headers, response.body)
