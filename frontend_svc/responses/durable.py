"""Stored responses in the batch service, which survive their frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from common.access.caller import Caller
from common.conversation_append import NO_CONVERSATION, Append
from common.errors import Unavailable
from frontend_svc.batches.client import BatchClient
from frontend_svc.responses.store import StoredResponse
from kvmesh.batch.v1 import batch_pb2, responses_pb2

# The client waits for the end of its response meanwhile.
PUT_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class StreamedOutput:
    """Output of a response as far as it is stored. run: its number. parts: after those that the
    caller has; of another run, from the first one."""

    response: bytes
    has_ended: bool
    run: int
    parts: Sequence[bytes]


class DurableResponses:
    """Methods raise Unavailable if the batch service does not respond."""

    def __init__(self, client: BatchClient) -> None:
        self._client = client

    @property
    def is_there(self) -> bool:
        """Whether discovery shows a batch service."""
        return self._client.is_there

    @property
    def was_there(self) -> bool:
        """Whether discovery has shown one since the start of this process."""
        return self._client.was_there

    async def put(
        self,
        response_id: str,
        stored: StoredResponse,
        append: Append = NO_CONVERSATION,
        *,
        only_appends: bool = False,
    ) -> bool:
        """Stores a response; returns whether its conversation has its items. Raises InvalidRequest
        if it is too large.

        - only_appends: the response itself is not stored.
        """
        message = responses_pb2.PutResponseRequest(
            owner=batch_pb2.Owner(tenant=stored.tenant),
            response=responses_pb2.StoredResponse(
                id=response_id, response=stored.response, input_items=stored.input_items
            ),
            append=_append_message(append),
            only_appends=only_appends,
        )
        try:
            async with asyncio.timeout(PUT_TIMEOUT_S):
                response: responses_pb2.PutResponseResponse = await self._client.call(
                    "PutResponse", message
                )
                return response.has_appended
        except TimeoutError:
            text = f"the batch service did not store the response within {PUT_TIMEOUT_S:g} s"
            raise Unavailable(text, 1.0) from None

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        """Raises NotFound."""
        message = responses_pb2.GetStoredResponseRequest(
            owner=batch_pb2.Owner(tenant=tenant), response_id=response_id
        )
        response: responses_pb2.GetStoredResponseResponse = await self._client.call(
            "GetStoredResponse", message
        )
        found = response.response
        return StoredResponse(found.response, tuple(found.input_items), tenant)

    async def delete(self, response_id: str, tenant: str) -> None:
        """Raises NotFound."""
        message = responses_pb2.DeleteStoredResponseRequest(
            owner=batch_pb2.Owner(tenant=tenant), response_id=response_id
        )
        await self._client.call("DeleteStoredResponse", message)

    async def start(
        self,
        response_id: str,
        stored: StoredResponse,
        caller: Caller,
        request: bytes,
        created: int,
        append: Append,
        *,
        streams: bool,
    ) -> None:
        """Has a response run in the background. Raises InvalidRequest if it is too large, and
        Overloaded if its tenant has too many.

        - stored: with the status `queued`.
        - request: of `write_request`.
        - created: Unix seconds of its object.
        - streams: whether `read_stream` has its output.
        """
        message = responses_pb2.StartResponseRequest(
            owner=batch_pb2.Owner(tenant=caller.tenant, key_id=caller.key_id),
            response=responses_pb2.StoredResponse(
                id=response_id, response=stored.response, input_items=stored.input_items
            ),
            request=request,
            created_at=created,
            append=_append_message(append),
            streams=streams,
        )
        await self._client.call("StartResponse", message)

    async def read_stream(
        self, response_id: str, tenant: str, run: int, parts: int, *, waits: bool
    ) -> StreamedOutput:
        """Returns output of a response in the background. Raises NotFound, and InvalidRequest if
        its output is not stored as it is generated.

        - run, parts: the run of which the caller has parts, and how many.
        - waits: some seconds, if there are no more.
        """
        message = responses_pb2.ReadStreamRequest(
            owner=batch_pb2.Owner(tenant=tenant),
            response_id=response_id,
            run=run,
            parts=parts,
            waits=waits,
        )
        found: responses_pb2.ReadStreamResponse = await self._client.call("ReadStream", message)
        return StreamedOutput(found.response, found.has_ended, found.run, found.parts)

    async def cancel(self, response_id: str, tenant: str) -> bytes:
        """Ends a response in the background; returns its object. Raises NotFound, and
        InvalidRequest if it did not run in the background."""
        message = responses_pb2.CancelResponseRequest(
            owner=batch_pb2.Owner(tenant=tenant), response_id=response_id
        )
        response: responses_pb2.CancelResponseResponse = await self._client.call(
            "CancelResponse", message
        )
        return response.response.response


def _append_message(append: Append) -> responses_pb2.Append:
    return responses_pb2.Append(
        conversation_id=append.conversation_id, first_item=append.first_item
    )
