"""The handlers of the routes of files and batches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import orjson
from pydantic import ValidationError

from common.access.caller import Caller
from frontend_svc.batches.client import BatchClient
from frontend_svc.batches.form import UploadForm
from frontend_svc.batches.objects import Json, batch_object, file_object, page
from frontend_svc.batches.schema import BatchesQuery, BatchRequest, FilesQuery
from frontend_svc.endpoints.plain import PlainRequest, PlainResponse
from frontend_svc.endpoints.plain_body import body_parts, read_body
from frontend_svc.endpoints.query import parse_query
from frontend_svc.openai.body.parsing import parse_json_object
from frontend_svc.openai.body.validation_errors import invalid_value
from kvmesh.batch.v1 import batch_pb2

# Of the body of a batch.
_BODY_BYTES_MAX: Final = 64 << 10
_PART_BYTES: Final = 256 << 10


class BatchHandlers:
    """Translates between HTTP and the batch service."""

    def __init__(self, client: BatchClient) -> None:
        self._client = client

    async def upload_file(self, request: PlainRequest) -> PlainResponse:
        form = UploadForm(request.content_type)
        response = await self._client.upload(_upload(form, request))
        return _json(file_object(response.file))

    async def list_files(self, request: PlainRequest) -> PlainResponse:
        query = parse_query(FilesQuery, request.query)
        response: batch_pb2.ListFilesResponse = await self._client.call(
            "ListFiles",
            batch_pb2.ListFilesRequest(
                owner=_owner(request.caller),
                purpose=query.purpose or "",
                limit=query.limit,
                after=query.after or "",
                ascending=query.order == "asc",
            ),
        )
        return _json(page([*map(file_object, response.files)], has_more=response.has_more))

    async def get_file(self, request: PlainRequest) -> PlainResponse:
        return _json(file_object(await self._file(request)))

    async def delete_file(self, request: PlainRequest) -> PlainResponse:
        file_id = request.parameters["id"]
        message = batch_pb2.DeleteFileRequest(owner=_owner(request.caller), file_id=file_id)
        await self._client.call("DeleteFile", message)
        return _json({"id": file_id, "object": "file", "deleted": True})

    async def read_file(self, request: PlainRequest) -> PlainResponse:
        file = await self._file(request)
        message = batch_pb2.ReadFileRequest(owner=_owner(request.caller), file_id=file.id)
        return PlainResponse(
            b"",
            media_type="application/octet-stream",
            parts=self._client.read(message),
            size=file.bytes,
        )

    async def create_batch(self, request: PlainRequest) -> PlainResponse:
        body = _parse_batch(await read_body(request.receive, _BODY_BYTES_MAX))
        expiry = body.output_expires_after
        response: batch_pb2.CreateBatchResponse = await self._client.call(
            "CreateBatch",
            batch_pb2.CreateBatchRequest(
                owner=_owner(request.caller),
                input_file_id=body.input_file_id,
                endpoint=body.endpoint,
                completion_window=body.completion_window,
                metadata=body.metadata or {},
                output_expires_after_s=0 if expiry is None else expiry.seconds,
            ),
        )
        return _json(batch_object(response.batch))

    async def list_batches(self, request: PlainRequest) -> PlainResponse:
        query = parse_query(BatchesQuery, request.query)
        response: batch_pb2.ListBatchesResponse = await self._client.call(
            "ListBatches",
            batch_pb2.ListBatchesRequest(
                owner=_owner(request.caller), limit=query.limit, after=query.after or ""
            ),
        )
        return _json(page([*map(batch_object, response.batches)], has_more=response.has_more))

    async def get_batch(self, request: PlainRequest) -> PlainResponse:
        message = batch_pb2.GetBatchRequest(
            owner=_owner(request.caller), batch_id=request.parameters["id"]
        )
        response: batch_pb2.GetBatchResponse = await self._client.call("GetBatch", message)
        return _json(batch_object(response.batch))

    async def cancel_batch(self, request: PlainRequest) -> PlainResponse:
        message = batch_pb2.CancelBatchRequest(
            owner=_owner(request.caller), batch_id=request.parameters["id"]
        )
        response: batch_pb2.CancelBatchResponse = await self._client.call("CancelBatch", message)
        return _json(batch_object(response.batch))

    async def _file(self, request: PlainRequest) -> batch_pb2.File:
        message = batch_pb2.GetFileRequest(
            owner=_owner(request.caller), file_id=request.parameters["id"]
        )
        response: batch_pb2.GetFileResponse = await self._client.call("GetFile", message)
        return response.file


async def _upload(
    form: UploadForm, request: PlainRequest
) -> AsyncIterator[batch_pb2.UploadFileRequest]:
    """Yields the messages of an upload while its body arrives. Raises MeshError."""
    async for part in body_parts(request.receive):
        content = form.feed(part)
        for start in range(0, len(content), _PART_BYTES):
            yield batch_pb2.UploadFileRequest(content=content[start : start + _PART_BYTES])
    form.close()
    yield batch_pb2.UploadFileRequest(
        description=batch_pb2.FileDescription(
            owner=_owner(request.caller),
            filename=form.filename,
            purpose=form.fields["purpose"],
            expires_after_s=form.expires_after_s,
        )
    )


def _parse_batch(raw: bytes) -> BatchRequest:
    """Raises InvalidRequest with the path of the first invalid field."""
    try:
        return BatchRequest.model_validate(parse_json_object(raw))
    except ValidationError as error:
        raise invalid_value(error) from None


def _owner(caller: Caller) -> batch_pb2.Owner:
    return batch_pb2.Owner(tenant=caller.tenant, key_id=caller.key_id)


def _json(value: Json) -> PlainResponse:
    return PlainResponse(orjson.dumps(value))
