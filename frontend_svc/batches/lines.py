"""Runs the lines of batches as requests of their tenants, in this process, on idle capacity."""

from __future__ import annotations

from typing import Any, Final

import grpc.aio

from common.errors import InvalidRequest
from frontend_svc.batches.exchange import FindCaller, exchange
from frontend_svc.edge.asgi import BACKGROUND, AsgiApp, Headers
from kvmesh.frontend.v1 import frontend_pb2, frontend_pb2_grpc

SERVICE_NAME: Final = "kvmesh.frontend.v1.BatchLineService"
LINE_PATHS: Final = (
    *("/v1/chat/completions", "/v1/completions"),
    *("/v1/embeddings", "/v1/responses"),
)

Context = grpc.aio.ServicerContext[Any, Any]


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
        headers: Headers = ()
        if request.request_id:
            headers = ((b"x-request-id", request.request_id.encode("latin-1", "replace")),)
        ended = await exchange(
            self._api, request.url, request.body, caller, headers, {BACKGROUND: True}
        )
        return ended.reply(frontend_pb2.RunLineResponse)
