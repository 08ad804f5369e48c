"""Applies the policy for requests of web pages, and CORS."""

from __future__ import annotations

from dataclasses import replace

from common.access.browser_policy import UNSUPPORTED_MEDIA_TYPE, BrowserPolicy
from common.errors import MeshError
from common.runtime.hosts import is_loopback
from frontend_svc.config import FrontendConfig
from frontend_svc.edge.asgi import AsgiApp, Message, Receive, Scope, Send, send_response
from frontend_svc.edge.cors import CorsPolicy, is_preflight
from frontend_svc.edge.error_response import send_error
from frontend_svc.errors import HttpError, http_error


def with_browser_policy(api: AsgiApp, config: FrontendConfig) -> AsgiApp:
    """Returns the same API, without requests that the policy refuses."""
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
    return _with_cors(serve, CorsPolicy(frozenset(config.cors_origins)))


def _with_cors(api: AsgiApp, policy: CorsPolicy) -> AsgiApp:
    """Returns the same API, which lets pages read its responses."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if is_preflight(scope["method"], headers):
            await send_response(send, *policy.preflight(headers))
            return
        added = policy.response_headers(headers.get(b"origin"))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = (*message["headers"], *added)
            await send(message)

        await api(scope, receive, send_with_headers)

    return serve


def _response(refusal: MeshError) -> HttpError:
    response = http_error(refusal)
    return replace(response, status=415) if refusal.reason == UNSUPPORTED_MEDIA_TYPE else response
