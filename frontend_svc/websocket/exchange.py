"""One response over a WebSocket: its request as ASGI, and its stream as messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from frontend_svc.edge.asgi import CONNECTION, Headers, Message, Scope
from frontend_svc.edge.websocket import WebSocket
from frontend_svc.openai.output.sse import KEEP_ALIVE
from frontend_svc.responses.kept import Turn
from frontend_svc.websocket.messages import CreateEvent, error_message, server_events

_JSON: Final = (b"content-type", b"application/json")
# Of the handshake; the rest of its headers are those of each request.
_HANDSHAKE_HEADERS: Final = frozenset(
    {
        *(b"connection", b"upgrade", b"content-length", b"content-type", b"x-request-id"),
        *(b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-extensions"),
        *(b"sec-websocket-protocol",),
    }
)


class SocketExchange:
    """The ClientConnection of one response, its `receive` and its `send`. turn: what the endpoint
    needs of the connection."""

    has_body: Final = True

    def __init__(self, socket: WebSocket, event: CreateEvent, turn: Turn) -> None:
        self.turn = turn
        self._socket = socket
        self._event = event
        self._status = 0
        self._headers: Headers = ()
        # Of a response that is no stream: an error.
        self._body = bytearray()

    def scope(self, handshake: Scope, request_id: str) -> Scope:
        """Returns the scope of the request: a POST with the headers of the handshake."""
        headers: Headers = tuple(
            pair for pair in handshake["headers"] if pair[0] not in _HANDSHAKE_HEADERS
        )
        return {
            **handshake,
            "method": "POST",
            "headers": (*headers, _JSON, (b"x-request-id", request_id.encode("latin-1"))),
            "state": {**handshake["state"], CONNECTION: self},
        }

    @property
    def can_write(self) -> bool:
        return self._socket.can_write

    def write(self, data: bytes) -> None:
        """Sends events of the stream."""
        if data == KEEP_ALIVE:
            self._socket.ping()
            return
        for event in server_events(data, self._event.stream_id):
            self._socket.send(event)

    def watched(self, on_disconnect: Callable[[], None]) -> AbstractContextManager[None]:
        return self._socket.watched(on_disconnect)

    async def receive(self) -> Message:
        return {"type": "http.request", "body": self._event.body, "more_body": False}

    async def send(self, message: Message) -> None:
        await self._socket.writable()
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], tuple(message["headers"])
            return
        data: bytes = message.get("body", b"")
        if self._status == 200:
            self.write(data)
            return
        self._body += data
        if not message.get("more_body"):
            headers = [(name.decode(), value.decode("latin-1")) for name, value in self._headers]
            self._socket.send(
                error_message(self._status, bytes(self._body), headers, self._event.stream_id)
            )
