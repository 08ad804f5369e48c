"""`GET /v1/responses`: accepts a WebSocket, and serves its events as `POST /v1/responses`."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Final

import structlog

from common.errors import InvalidRequest, MeshError
from frontend_svc.access.keys import admit
from frontend_svc.config import FrontendConfig
from frontend_svc.edge.asgi import (
    CONNECTION,
    JSON_HEADER,
    AsgiApp,
    Headers,
    Receive,
    Scope,
    Send,
    send_response,
)
from frontend_svc.edge.connection import HttpConnection
from frontend_svc.edge.error_response import send_error
from frontend_svc.edge.websocket import UPGRADE_REQUIRED, WebSocket, handshake_response
from frontend_svc.endpoints.endpoint import EndpointDependencies
from frontend_svc.endpoints.header_ids import header_id, id_headers
from frontend_svc.endpoints.request_context import HttpRequest
from frontend_svc.endpoints.route import Route
from frontend_svc.errors import INVALID, error_body
from frontend_svc.generation.api import ParsedBody
from frontend_svc.generation.constraints import ConstraintChecks
from frontend_svc.generation.endpoint import GenerationEndpoint
from frontend_svc.media.loader import MediaLoader
from frontend_svc.metrics.families import FrontendMetrics
from frontend_svc.responses.endpoint import ResponsesApi
from frontend_svc.responses.kept import KeptResponses
from frontend_svc.responses.store import ResponseStore
from frontend_svc.websocket.connection import ResponsesConnection, SocketLimits
from frontend_svc.websocket.exchange import SocketExchange
from frontend_svc.websocket.messages import refusal

# Characters of a connection's id; those of its requests add a number.
_ID_CHARS_MAX: Final = 100

log = structlog.get_logger()


class SocketResponses(GenerationEndpoint):
    """Generation whose requests are events of WebSockets."""

    def __init__(
        self,
        route: Route,
        responses: ResponsesApi,
        dependencies: EndpointDependencies,
        constraints: ConstraintChecks,
        media: MediaLoader,
    ) -> None:
        super().__init__(route, responses, dependencies, constraints, media)
        self._responses = responses

    async def parse(self, context: HttpRequest, raw: bytes) -> ParsedBody:
        exchange = context.connection
        assert isinstance(exchange, SocketExchange), "its requests are made by connections"
        return self.accept(context, await self._responses.parse(raw, context.caller, exchange.turn))


class SocketEndpoint:
    """The ASGI application of the handshake, and of the connection after it."""

    def __init__(
        self, route: Route, serve: AsgiApp, config: FrontendConfig, metrics: FrontendMetrics
    ) -> None:
        """
        - serve: the application of each event, as a POST.
        """
        self._open_sockets = metrics.websockets
        self._route = route
        self._serve = serve
        self._bytes_max = config.body_limit_mb << 20
        self._store = ResponseStore(config.websocket_cache_mb << 20, config.websocket_age_s)
        self._limits = SocketLimits(
            config.websocket_idle_s, config.websocket_age_s, config.keep_alive_s, self._bytes_max
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_headers = dict(scope["headers"])
        request_id = os.urandom(16).hex()
        own_id = header_id(request_headers.get(b"x-request-id", b""), request_id)
        own_headers = id_headers(self._route.errors, own_id)
        connection: HttpConnection = scope["state"][CONNECTION]
        try:
            admit(scope, self._route.permission)
            _check_body(request_headers)
            response = handshake_response(scope["path"], scope["headers"], own_headers)
        except MeshError as error:
            await self._refuse(send, error, own_id.decode("latin-1"), own_headers)
            return
        open_socket = partial(WebSocket, bytes_max=self._bytes_max, refusal=refusal)
        if (socket := connection.upgrade(response, open_socket)) is not None:
            await self._run(socket, scope, own_id.decode("latin-1")[:_ID_CHARS_MAX])

    async def _run(self, socket: WebSocket, scope: Scope, connection_id: str) -> None:
        """Serves a connection to its end."""
        clock = asyncio.get_running_loop().time
        began = clock()
        kept = KeptResponses(self._store, clock)
        connection = ResponsesConnection(
            socket, self._serve, scope, connection_id, kept, self._limits
        )
        self._open_sockets.inc()
        try:
            await connection.run()
            await socket.lost()
        finally:
            self._open_sockets.dec()
            socket.abort()
            kept.close()
            log.info(
                "websocket_closed",
                connection=connection_id,
                code=socket.close_code,
                responses=connection.responses,
                seconds=round(clock() - began, 1),
            )

    async def _refuse(self, send: Send, error: MeshError, own_id: str, headers: Headers) -> None:
        if error.reason == UPGRADE_REQUIRED:
            body = error_body(error.message, INVALID, error.field, UPGRADE_REQUIRED.lower())
            upgrade = ((b"upgrade", b"websocket"), (b"connection", b"upgrade"))
            await send_response(send, 426, (JSON_HEADER, *upgrade, *headers), body)
            return
        await send_error(send, self._route.errors.http_error(error, own_id, ()), headers)


def _check_body(headers: dict[bytes, bytes]) -> None:
    """Raises InvalidRequest for a handshake with a body, whose bytes would be read as frames."""
    if headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers:
        raise InvalidRequest("A WebSocket handshake has no body.")
