"""Runs the lines of batches as requests of their tenants, in this process, on idle capacity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc.aio

from common.access.caller import Caller
from common.errors import InvalidRequest
from frontend_svc.access.keys import CALLER
from frontend_svc.edge.asgi import BACKGROUND, CONNECTION, AsgiApp, Message, Scope
from kvmesh.frontend.v1 import frontend_pb2, frontend_pb2_grpc

SERVICE_NAME: Final = "kvmesh.frontend.v1.BatchLineService"
LINE_PATHS: Final = (
    *("/v1/chat/completions", "/v1/completions"),
    *("/v1/embeddings", "/v1/responses"),
)

Context = grpc.aio.ServicerContext[Any, Any]
# Returns the client with a tenant and the id of an API key. Raises Unauthenticated.
FindCaller = Callable[[str, str], Caller]


class BatchLineServicer(frontend_pb2_grpc.BatchLineServiceServicer):
    """api: the routes of LINE_PATHS. Its requests have no quota: idle capacity is their limit."""

    def __init__(self, api: AsgiApp, find_caller: FindCaller) -> None:
        self._api = api
        self._find_caller = find_caller

    async def RunLine(
        self, request: frontend_pb2.RunLineRequest, context: Context
    ) -> frontend_pb2.RunLineResponse:
        if request.url not in LINE_PATHS:
            text = f"url must be one of {', '.join(LINE_PATHS)}, not {request.url!r}"
            raise InvalidRequest(text, "url")
        caller = self._find_caller(request.tenant, request.key_id)
        exchange = _Exchange(request.body)
        headers = [(b"content-type", b"application/json")]
        if request.request_id:
            headers.append((b"x-request-id", request.request_id.encode("latin-1", "replace")))
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": request.url,
            "query_string": b"",
            "headers": headers,
            "state": {CONNECTION: _NoConnection(), CALLER: caller, BACKGROUND: True},
        }
        await self._api(scope, exchange.receive, exchange.send)
        response = frontend_pb2.RunLineResponse(
            status=exchange.status,
            body=bytes(exchange.response),
            request_id=exchange.header(b"x-request-id"),
        )
        if (pause_s := exchange.retry_after_s()) is not None:
            response.retry_after_s = pause_s
        return response


class _NoConnection:
    """The connection of a request whose body is there, and that no client ends: the end of the call
    cancels it."""

    has_body = True
    can_write = False

    def write(self, data: bytes) -> None:
        raise AssertionError("a line is no stream")

    @contextmanager
    def watched(self, on_disconnect: Callable[[], None]) -> Iterator[None]:
        yield


class _Exchange:
    """One request and its response."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._headers: dict[bytes, bytes] = {}
        self.status = 0
        self.response = bytearray()

    async def receive(self) -> Message:
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self._headers = message["status"], dict(message["headers"])
        else:
            self.response += message.get("body", b"")

    def header(self, name: bytes) -> str:
        return self._headers.get(name, b"").decode("latin-1")

    def retry_after_s(self) -> float | None:
        """Returns the pause after which the same request may succeed; None: never."""
        try:
            pause_s = float(self.header(b"retry-after-ms")) / 1000
        except ValueError:
            return None
        return pause_s if math.isfinite(pause_s) else None
