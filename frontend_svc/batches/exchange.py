"""Requests that no client sends: the batch service has them run in this process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias, TypeVar

from common.access.caller import Caller
from common.runtime.tasks import TaskGroup
from frontend_svc.access.keys import CALLER
from frontend_svc.edge.asgi import CONNECTION, AsgiApp, Headers, Message, Scope
from frontend_svc.errors import HttpError
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
        self.response = bytearray()
        """The body of the response."""

        self.status = 0

    async def receive(self) -> Message:
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self._headers = message["status"], dict(message["headers"])
        else:
            self.response += message.get("body", b"")

    def replace(self, response: HttpError) -> None:
        """Puts an error in place of the response."""
        headers = [(name.encode(), value.encode()) for name, value in response.headers]
        self._headers |= dict(headers)
        self.status, self.response = response.status, bytearray(response.body)

    def header(self, name: bytes) -> str:
        return self._headers.get(name, b"").decode("latin-1")

    def reply(self, kind: Callable[..., M]) -> M:
        """Returns the response as a message of the batch service's calls."""
        message = kind(
            status=self.status, body=bytes(self.response), request_id=self.header(b"x-request-id")
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


class StreamedExchange(Exchange):
    """One whose response is a stream, unless it is an error."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        # None: the end.
        self._parts = asyncio.Queue[bytes | None]()

    async def send(self, message: Message) -> None:
        if self.status != 200:
            await super().send(message)
        elif part := message.get("body", b""):
            self._parts.put_nowait(part)

    def close(self) -> None:
        """No more parts follow."""
        self._parts.put_nowait(None)

    async def parts(self) -> AsyncIterator[bytes]:
        """Yields the parts of the stream."""
        # Ends: by the end of the application.
        while (part := await self._parts.get()) is not None:
            yield part


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
    await app(_scope(path, caller, headers, state or {}), ended.receive, ended.send)
    return ended


@asynccontextmanager
async def streamed_exchange(
    app: AsgiApp, path: str, body: bytes, caller: Caller, headers: Headers
) -> AsyncIterator[StreamedExchange]:
    """A POST request that runs for the duration of the block, at most to its own end."""
    running = StreamedExchange(body)

    async def run() -> None:
        try:
            await app(_scope(path, caller, headers, {}), running.receive, running.send)
        finally:
            running.close()

    async with TaskGroup() as group:
        task = group.create_task(run(), name="streamed response")
        try:
            yield running
        finally:
            task.cancel()


def _scope(path: str, caller: Caller, headers: Headers, state: Mapping[str, Any]) -> Scope:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), *headers],
        "state": {CONNECTION: _NoConnection(), CALLER: caller, **state},
    }
