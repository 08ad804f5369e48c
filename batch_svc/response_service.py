"""The gRPC service of stored responses, for frontends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc.aio

from batch_svc.core.batch import Owner
from batch_svc.core.responses import Append, ResponseRow, ResponseRun
from batch_svc.store.responses import StoredResponses
from kvmesh.batch.v1 import batch_pb2, responses_pb2, responses_pb2_grpc

SERVICE_NAME: Final = "kvmesh.batch.v1.StoredResponseService"

Context = grpc.aio.ServicerContext[Any, Any]


class StoredResponseServicer(responses_pb2_grpc.StoredResponseServiceServicer):
    """Translates between messages and the store. wake: has the runner look at the responses."""

    def __init__(self, responses: StoredResponses, wake: Callable[[], None]) -> None:
        self._responses = responses
        self._wake = wake

    async def PutResponse(
        self, request: responses_pb2.PutResponseRequest, context: Context
    ) -> responses_pb2.PutResponseResponse:
        has_appended = await self._responses.put(
            owner_of(request.owner),
            _row(request.response),
            _append(request.append),
            only_appends=request.only_appends,
        )
        return responses_pb2.PutResponseResponse(has_appended=has_appended)

    async def GetStoredResponse(
        self, request: responses_pb2.GetStoredResponseRequest, context: Context
    ) -> responses_pb2.GetStoredResponseResponse:
        row = await self._responses.get(request.owner.tenant, request.response_id)
        return responses_pb2.GetStoredResponseResponse(response=_message(row))

    async def DeleteStoredResponse(
        self, request: responses_pb2.DeleteStoredResponseRequest, context: Context
    ) -> responses_pb2.DeleteStoredResponseResponse:
        await self._responses.delete(request.owner.tenant, request.response_id)
        self._wake()
        return responses_pb2.DeleteStoredResponseResponse()

    async def StartResponse(
        self, request: responses_pb2.StartResponseRequest, context: Context
    ) -> responses_pb2.StartResponseResponse:
        run = ResponseRun(
            owner_of(request.owner),
            _row(request.response),
            request.request,
            request.created_at,
            _append(request.append),
        )
        await self._responses.start(run)
        self._wake()
        return responses_pb2.StartResponseResponse()

    async def CancelResponse(
        self, request: responses_pb2.CancelResponseRequest, context: Context
    ) -> responses_pb2.CancelResponseResponse:
        row = await self._responses.cancel(request.owner.tenant, request.response_id)
        self._wake()
        return responses_pb2.CancelResponseResponse(response=_message(row))


def owner_of(message: batch_pb2.Owner) -> Owner:
    return Owner(message.tenant, message.key_id)


def _append(message: responses_pb2.Append) -> Append:
    return Append(message.conversation_id, message.first_item)


def _row(message: responses_pb2.StoredResponse) -> ResponseRow:
    return ResponseRow(message.id, message.response, tuple(message.input_items))


def _message(row: ResponseRow) -> responses_pb2.StoredResponse:
    return responses_pb2.StoredResponse(
        id=row.id, response=row.response, input_items=row.input_items
    )
