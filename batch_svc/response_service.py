"""The gRPC service of stored responses, for frontends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

import grpc.aio

from batch_svc.core.batch import Owner
from batch_svc.core.responses import ResponseRow, ResponseRun
from batch_svc.core.streams import StoredOutput
from batch_svc.runner.streams import OutputSignals
from batch_svc.store.responses import StoredResponses
from common.conversation_append import Append
from kvmesh.batch.v1 import batch_pb2, responses_pb2, responses_pb2_grpc

SERVICE_NAME: Final = "kvmesh.batch.v1.StoredResponseService"

# A reader of a stream waits so long for more output.
STREAM_WAIT_S: Final = 3.0
# Between two looks at the output of a response that another service runs.
STREAM_POLL_S: Final = 0.5

Context = grpc.aio.ServicerContext[Any, Any]


class StoredResponseServicer(responses_pb2_grpc.StoredResponseServiceServicer):
    """Translates between messages and the store."""

    def __init__(
        self, responses: StoredResponses, signals: OutputSignals, wake: Callable[[], None]
    ) -> None:
        """
        - signals: of new output in this process.
        - wake: has the runner look at the responses.
        """
        self._responses = responses
        self._signals = signals
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
            StoredOutput() if request.streams else None,
        )
        await self._responses.start(run)
        self._wake()
        return responses_pb2.StartResponseResponse()

    async def CancelResponse(
        self, request: responses_pb2.CancelResponseRequest, context: Context
    ) -> responses_pb2.CancelResponseResponse:
        row = await self._responses.cancel(request.owner.tenant, request.response_id)
        self._wake()
        self._signals.notify(request.response_id)
        return responses_pb2.CancelResponseResponse(response=_message(row))

    async def ReadStream(
        self, request: responses_pb2.ReadStreamRequest, context: Context
    ) -> responses_pb2.ReadStreamResponse:
        loop = asyncio.get_running_loop()
        until = loop.time() + (STREAM_WAIT_S if request.waits else 0.0)
        with self._signals.awaited(request.response_id) as signal:
            # Ends: at the latest after STREAM_WAIT_S.
            while True:
                signal.clear()
                found = await self._responses.read_stream(
                    request.owner.tenant, request.response_id, request.run, request.parts
                )
                has_news = found.output.parts or found.has_ended or found.output.run != request.run
                if has_news or (left := until - loop.time()) <= 0:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(STREAM_POLL_S, left)):
                        await signal.wait()
        return responses_pb2.ReadStreamResponse(
            response=found.response,
            has_ended=found.has_ended,
            run=found.output.run,
            parts=found.output.parts,
        )


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
