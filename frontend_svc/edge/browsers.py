"""Applies the policy for requests of web pages, and CORS."""

from __future__ import annotations

from dataclasses import replace

from starlette.middleware.cors import CORSMiddleware

from common.errors import MeshError
from common.runtime.hosts import is_loopback
from frontend_svc.config import FrontendConfig
from frontend_svc.edge.asgi import AsgiApp, Receive, Scope, Send
from frontend_svc.edge.browser_policy import UNSUPPORTED_MEDIA_TYPE, BrowserPolicy
from frontend_svc.edge.error_response import send_error
from frontend_svc.errors import HttpError, http_error

_EXPOSED_HEADERS = ("x-request-id", "request-id", "retry-after", "retry-after-ms")


def with_browser_policy(api: AsgiApp, config: FrontendConfig) -> AsgiApp:
    """The same API, without requests that the policy refuses."""
    policy = BrowserPolicy(
        frozenset(config.cors_origins),
        frozenset(map(str.lower, config.allowed_hosts)),
        checks_host=is_loopback(config.http_host) or bool(config.allowed_hosts),
    )

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        refusal = policy.refusal(scope["method"], scope["headers"])
        if refusal is None:
            await api(scope, receive, send)
            return
        await send_error(send, _response(refusal))

    if not config.cors_origins:
        return serve
    return CORSMiddleware(
        serve,
        allow_origins=config.cors_origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=_EXPOSED_HEADERS,
    )


def _response(refusal: MeshError) -> HttpError:
    response = http_error(refusal)
    return replace(response, status=415) if refusal.reason == UNSUPPORTED_MEDIA_TYPE else response
