"""The gate before all pages: names of this server, sessions, and headers of responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final
from urllib.parse import quote

from starlette.requests import cookie_parser

from common.access.browser_policy import BrowserPolicy
from common.errors import MeshError
from console_svc.access.login import Logins
from console_svc.access.sessions import Session

# Any: ASGI leaves its types open.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# Key of the session in the state of a scope.
SESSION: Final = "kvmesh.session"
# Served without a session.
OPEN_PATHS: Final = frozenset({"/login", "/live", "/ready"})
# Served also with an API key in a header, for programs.
KEY_PATHS: Final = frozenset({"/health", "/metrics"})
# Close code of a websocket: the policy does not permit it.
_POLICY_VIOLATION: Final = 1008
# NiceGUI compiles the templates of its components in the browser, so `unsafe-eval`; its page has a
# script and styles of its own.
PAGE_POLICY: Final = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
_HEADERS: Final = {
    b"content-security-policy": PAGE_POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    # Without a referrer, browsers send `Origin: null` with the forms of login and logout.
    b"referrer-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
}


class Gate:
    """An ASGI application that passes what an operator may use on to another one."""

    def __init__(
        self, app: AsgiApp, logins: Logins, policy: BrowserPolicy, cookie_name: Callable[[], str]
    ) -> None:
        """
        - policy: which names and pages are refused.
        - cookie_name: of the session; known once the port is bound.
        """
        self.app = app
        self._logins = logins
        self._policy = policy
        self._cookie_name = cookie_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._serve_http(scope, receive, _with_headers(send))
            case "websocket":
                await self._serve_websocket(scope, receive, send)
            case _:
                await self.app(scope, receive, send)

    async def _serve_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._policy.refusal(scope["method"], scope["headers"])
        if refusal is not None:
            status = 400 if refusal.field == "host" else 403
            await send_text(send, status, refusal.message)
            return
        path, session = scope["path"], self._session(scope)
        if session is None and path not in OPEN_PATHS and not self._has_key(path, scope):
            is_page = scope["method"] == "GET" and b"text/html" in _header(scope, b"accept")
            if is_page:
                headers = ((b"location", b"/login?next=" + quote(path, safe="").encode()),)
                await send_text(send, 303, "log in first", headers)
            else:
                await send_text(send, 401, "log in first, or send an API key where keys are served")
            return
        scope.setdefault("state", {})[SESSION] = session
        await self.app(scope, receive, send)

    async def _serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = self._session(scope)
        if session is None or self._policy.refusal("GET", scope["headers"]) is not None:
            # Before `accept`: the server responds 403.
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        scope.setdefault("state", {})[SESSION] = session
        task = asyncio.ensure_future(self.app(scope, receive, send))
        has_ended = False

        def end() -> None:
            nonlocal has_ended
            has_ended = True
            task.cancel()

        session.on_end.add(end)
        try:
            await task
        except asyncio.CancelledError:
            if not has_ended:
                task.cancel()
                raise
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        finally:
            session.on_end.discard(end)

    def _session(self, scope: Scope) -> Session | None:
        return self._logins.find(read_cookie(scope, self._cookie_name()))

    def _has_key(self, path: str, scope: Scope) -> bool:
        if path not in KEY_PATHS:
            return False
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        try:
            self._logins.identify(key.strip().decode("latin-1"))
        except MeshError:
            return False
        return True


def read_cookie(scope: Scope, name: str) -> str:
    """Returns the value of a cookie; "" if it is absent."""
    return cookie_parser(_header(scope, b"cookie").decode("latin-1")).get(name, "")


async def send_text(
    send: Send, status: int, text: str, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    """Sends a whole response."""
    body = f"{text}\n".encode()
    head = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*head, *headers]})
    await send({"type": "http.response.body", "body": body})


def _header(scope: Scope, name: bytes) -> bytes:
    headers: Mapping[bytes, bytes] = dict(scope["headers"])
    return headers.get(name, b"")


def _with_headers(send: Send) -> Send:
    """Adds the headers of every response; those that it has stay."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            names = {bytes(name).lower() for name, _ in headers}
            headers += [(name, value) for name, value in _HEADERS.items() if name not in names]
            if b"cache-control" not in names:
                headers.append((b"cache-control", b"no-store"))
            message["headers"] = headers
        await send(message)

    return send_with_headers
