"""An endpoint without a body: checks the key, responds, and reports errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import parse_qsl

from common.errors import MeshError
from frontend_svc.access.caller import ANONYMOUS, Caller
from frontend_svc.access.keys import admit
from frontend_svc.edge.asgi import Receive, Scope, Send, send_response
from frontend_svc.edge.error_response import send_error
from frontend_svc.endpoints.route import Route

# Key of the parameters of the path in a scope.
PATH_PARAMETERS = "path_params"


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """A request without a body."""

    caller: Caller

    parameters: Mapping[str, str]
    """Those of the path, by name."""

    query_string: bytes

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
        try:
            caller = ANONYMOUS if self._route.is_open else admit(scope, self._route.permission)
            parameters = scope.get(PATH_PARAMETERS, {})
            request = PlainRequest(caller, parameters, scope["query_string"])
            response = await self._respond(request)
        except MeshError as error:
            await send_error(send, self._route.errors.http_error(error, None, ()))
            return
        headers = ((b"content-type", response.media_type.encode()),)
        await send_response(send, response.status, headers, response.body)
