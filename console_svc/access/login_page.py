"""The pages of login and logout: plain HTML, which needs no script."""

from __future__ import annotations

import asyncio
from html import escape
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from common.errors import MeshError, Overloaded
from console_svc.access.gate import read_cookie
from console_svc.access.login import Logins
from console_svc.access.sessions import LONGEST_S

BODY_BYTES_MAX: Final = 4096
BODY_TIMEOUT_S: Final = 10.0
_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_STYLE: Final = (Path(__file__).parent.parent / "assets" / "login.css").read_text()
_WITH_KEY: Final = """
<form method="post" action="/login">
<label for="key">API key with the scope admin</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<input type="hidden" name="next" value="{next}">
<button>Log in</button>
</form>
<p>Or open the link that <code>meshctl console</code> prints.</p>
"""
_WITHOUT_KEY: Final = """
<p>This console has no file of API keys (<code>--api-keys</code>). Open the link that
<code>meshctl console</code> prints: it works once, for ten minutes.</p>
"""


class LoginPages:
    """The routes of one console."""

    def __init__(self, logins: Logins, *, is_secure: bool) -> None:
        """is_secure: whether browsers reach the console over TLS."""
        self._logins = logins
        self._is_secure = is_secure
        self.cookie_name = "kvmesh_console"
        """Browsers send a cookie to all ports of a host: the port belongs to the name."""

    def routes(self) -> list[Route]:
        return [
            Route("/login", self._show, methods=["GET"]),
            Route("/login", self._log_in, methods=["POST"]),
            Route("/logout", self._log_out, methods=["POST"]),
        ]

    async def _show(self, request: Request) -> Response:
        """The form; with a token of a one-time link, the login itself."""
        following = _local_path(request.query_params.get("next", ""))
        token = request.query_params.get("token", "")
        # A link that is only looked at stays valid.
        if not token or request.method != "GET":
            return self._form("", following)
        try:
            return self._logged_in(self._logins.by_link(token, _address(request)), following)
        except MeshError as error:
            return self._refused(error, following)

    async def _log_in(self, request: Request) -> Response:
        body = b""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in request.stream():
                    body += part
                    if len(body) > BODY_BYTES_MAX:
                        return PlainTextResponse("the form is too large\n", 413)
        except TimeoutError:
            return PlainTextResponse("the form was not complete in time\n", 408)
        fields = parse_qs(body.decode("latin-1"))
        following = _local_path("".join(fields.get("next", [])[:1]))
        key = "".join(fields.get("key", [])[:1])
        try:
            return self._logged_in(self._logins.by_key(key, _address(request)), following)
        except MeshError as error:
            return self._refused(error, following)

    async def _log_out(self, request: Request) -> Response:
        self._logins.end(read_cookie(request.scope, self.cookie_name))
        response = RedirectResponse("/login", 303)
        response.delete_cookie(self.cookie_name)
        return response

    def _logged_in(self, session_token: str, following: str) -> Response:
        # Not a redirect: the browser would not send a strict cookie along if a page of another
        # site, such as a mail client, has the link.
        refresh = f'<meta http-equiv="refresh" content="0;url={escape(following)}">'
        text = f'<p>Logged in. <a href="{escape(following)}">Continue</a></p>'
        response = _page(refresh, text, 200)
        response.set_cookie(
            self.cookie_name,
            session_token,
            max_age=int(LONGEST_S),
            secure=self._is_secure,
            httponly=True,
            samesite="strict",
        )
        return response

    def _refused(self, error: MeshError, following: str) -> Response:
        response = self._form(error.message, following)
        response.status_code = 429 if isinstance(error, Overloaded) else 403
        if error.retry_after_s is not None:
            response.headers["retry-after"] = f"{error.retry_after_s:.0f}"
        return response

    def _form(self, problem: str, following: str) -> Response:
        alert = f'<p role="alert">{escape(problem)}</p>' if problem else ""
        form = _WITH_KEY if self._logins.has_keys else _WITHOUT_KEY
        return _page("", alert + form.replace("{next}", escape(following)), 200)


def _page(head: str, text: str, status: int) -> HTMLResponse:
    document = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{head}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>KVMesh console</title><style>{_STYLE}</style></head>"
        f"<body><main><h1>KVMesh console</h1>{text}</main></body></html>"
    )
    return HTMLResponse(document, status, {"content-security-policy": _POLICY})


def _address(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def _local_path(text: str) -> str:
    """Returns a path of this server; `/` for anything else, such as another site."""
    is_local = text.startswith("/") and not text.startswith(("//", "/\\")) and text.isprintable()
    return text if is_local and len(text) <= 1024 else "/"
