"""Requests that no client sends: the batch service has them run in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from common.access.caller import Caller
from frontend_svc.access.keys import CALLER
from frontend_svc.edge.asgi import CONNECTION, AsgiApp, Headers, Message, Scope
from kvmesh.frontend.v1 import frontend_pb2

# Returns the client with a tenant and the id of an API key. Raises Unauthenticated.
FindCaller: TypeAlias = Callable[[str, str], Caller]
M = TypeVar("M", frontend_pb2.RunLineResponse, frontend_pb2.RunResponseResponse)


class _NoConnection:
    """The connection of a request whose body is there, and that no client ends: the end of the call
    cancels it."""

    has_body = True
    can_write = False

    def write(self, data: bytes) -> None:
        raise AssertionError("the response is no stream")

    @contextmanager
    def watched(self, on_disconnect: Callable[[], None]) -> Iterator[None]:
        yield


class Exchange:
    """One request and its response."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._headers: dict[bytes, bytes] = {}
        self._response = bytearray()
        self.status = 0

    @property
    def response(self) -> bytes:
        """The body of the response."""
        return bytes(self._response)

    async def receive(self) -> Message:
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self._headers = message["status"], dict(message["headers"])
        else:
            self._response += message.get("body", b"")

    def header(self, name: bytes) -> str:
        return self._headers.get(name, b"").decode("latin-1")

    def reply(self, kind: Callable[..., M]) -> M:
        """Returns the response as a message of the batch service's calls."""
        message = kind(
            status=self.status, body=self.response, request_id=self.header(b"x-request-id")
        )
        if (pause_s := self.retry_after_s()) is not None:
            message.retry_after_s = pause_s
        return message

    def retry_after_s(self) -> float | None:
        """Returns the pause after which the same request may succeed; None: never."""
        try:
            pause_s = float(self.header(b"retry-after-ms")) / 1000
        except ValueError:
            return None
        return pause_s if math.isfinite(pause_s) else None


# Any: values of the state of a scope.
async def exchange(
    app: AsgiApp,
    path: str,
    body: bytes,
    caller: Caller,
    headers: Headers = (),
    state: Mapping[str, Any] | None = None,
) -> Exchange:
    """Returns a POST request of a client, with its response.

    - state: more of its scope.
    """
    ended = Exchange(body)
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), *headers],
        "state": {CONNECTION: _NoConnection(), CALLER: caller, **(state or {})},
    }
    await app(scope, ended.receive, ended.send)
    return ended
