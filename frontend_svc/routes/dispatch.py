"""Calls the handler of a request's route, and refuses requests without a route."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import partial

from common.errors import MeshError
from common.service.metrics_server import bearer_check
from frontend_svc.access.keys import admit
from frontend_svc.edge.asgi import (
    JSON_HEADER,
    AsgiApp,
    Headers,
    Receive,
    Scope,
    Send,
    send_response,
)
from frontend_svc.edge.error_response import send_error
from frontend_svc.endpoints.header_ids import header_id, id_headers
from frontend_svc.endpoints.plain import PATH_PARAMETERS
from frontend_svc.endpoints.route import PATH_PARAMETER, Route
from frontend_svc.errors import OPENAI_ERRORS, ErrorForm

_METRICS_KEY_REFUSAL = (
    b'{"error": {"message": "the metrics key is required: authorization: Bearer ..."}}'
)


class Dispatcher:
    """The ASGI application of these routes. Handlers check the key of a request themselves."""

    def __init__(self, handlers: Iterable[tuple[Route, AsgiApp]]) -> None:
        self._handlers = [(route, path_pattern(route.path), app) for route, app in handlers]
        # Of the routes without parameters, by method and path.
        self._fixed = {
            (method, route.path): app
            for route, _, app in self._handlers
            for method in route.methods
            if "{" not in route.path
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._fixed.get((scope["method"], scope["path"])) or self._find(scope)
        await app(scope, receive, send)

    def _find(self, scope: Scope) -> AsgiApp:
        """Returns the handler of a path with parameters, or the refusal."""
        others = []
        for route, pattern, app in self._handlers:
            if (match := pattern.fullmatch(scope["path"])) is None:
                continue
            if scope["method"] in route.methods:
                scope[PATH_PARAMETERS] = match.groupdict()
                return app
            others.append(route)
        return partial(self._refuse, others)

    async def _refuse(self, others: Sequence[Route], scope: Scope, _: Receive, send: Send) -> None:
        """Sends a 404, or a 405 if the path has routes of other methods. Needs a key, unless the
        path is open."""
        path = scope["path"]
        form = self._error_form(path)
        client_id = dict(scope["headers"]).get(b"x-request-id", b"")
        own_id = header_id(client_id, os.urandom(16).hex())
        headers: Headers = id_headers(form, own_id)
        try:
            if not any(route.is_open for route in others):
                admit(scope, None)
        except MeshError as error:
            await send_error(send, form.http_error(error, own_id.decode("latin-1"), ()), headers)
            return
        headers = (JSON_HEADER, *headers)
        if others:
            status, code, problem = 405, "method_not_allowed", "Method not allowed"
            methods = sorted({method for route in others for method in route.methods})
            headers = (*headers, (b"allow", ", ".join(methods).encode()))
        else:
            status, code, problem = 404, "not_found", "No such route"
        message = f"{problem}: {scope['method']} {path}"
        body = form.route_error(status, message, code, own_id.decode("latin-1"))
        await send_response(send, status, headers, body)

    def _error_form(self, path: str) -> ErrorForm:
        """Returns the form of the API to which a path belongs: the first route above it."""
        forms = (route.errors for route, _, _ in self._handlers if path.startswith(route.path))
        return next(forms, OPENAI_ERRORS)


def path_pattern(path: str) -> re.Pattern[str]:
    """Returns the pattern of a route's path, whose groups are its parameters."""
    pattern, end = "", 0
    for match in PATH_PARAMETER.finditer(path):
        pattern += re.escape(path[end : match.start()])
        pattern += f"(?P<{match[1]}>{'(?s:.*)' if match[2] else '[^/]+'})"
        end = match.end()
    return re.compile(pattern + re.escape(path[end:]))


def with_metrics_key(api: AsgiApp, key: str | None) -> AsgiApp:
    """Returns the same API, which requires the key. None: it requires none."""
    is_permitted = bearer_check(key)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if is_permitted(dict(scope["headers"]).get(b"authorization", b"")):
            await api(scope, receive, send)
            return
        headers = (JSON_HEADER, (b"www-authenticate", b"Bearer"))
        await send_response(send, 401, headers, _METRICS_KEY_REFUSAL)

    return serve
