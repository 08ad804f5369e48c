"""Routes that are served on a listener of their own."""

from __future__ import annotations

from collections.abc import Container

from starlette.applications import Starlette
from starlette.routing import Route

from common.service.metrics_server import bearer_check
from frontend_svc.edge.asgi import JSON_HEADER, AsgiApp, Receive, Scope, Send, send_response

_REFUSAL = b'{"error": {"message": "the metrics key is required: authorization: Bearer ..."}}'


def split_admin_api(api: Starlette, paths: Container[str], key: str | None) -> AsgiApp:
    """Takes the routes of `paths` out of `api`; an API of them, which requires the key."""
    admin = Starlette(exception_handlers=api.exception_handlers)
    for route in tuple(api.router.routes):
        if isinstance(route, Route) and route.path in paths:
            admin.router.routes.append(route)
            api.router.routes.remove(route)
    is_permitted = bearer_check(key)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if is_permitted(dict(scope["headers"]).get(b"authorization", b"")):
            await admin(scope, receive, send)
            return
        headers = (JSON_HEADER, (b"www-authenticate", b"Bearer"))
        await send_response(send, 401, headers, _REFUSAL)

    return serve
