"""The gRPC service: files and batches for frontends, progress for operators."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio

from batch_svc.core.batch import BatchRow, Owner, StoredFile
from batch_svc.core.limits import (
    COMPLETION_WINDOW,
    ENDPOINTS,
    FILENAME_CHARS_MAX,
    UPLOAD_PURPOSE,
)
from batch_svc.runner.runner import Runner
from batch_svc.store.batches import BatchStore
from batch_svc.store.files import FileStore, Upload
from batch_svc.store.lease import RunnerLease
from batch_svc.store.responses import StoredResponses
from common.errors import InvalidRequest, Unavailable
from kvmesh.batch.v1 import batch_pb2, batch_pb2_grpc

SERVICE_NAME: Final = "kvmesh.batch.v1.BatchService"
PROGRESS_DEFAULT, PROGRESS_MAX = 100, 1000
FILES_PAGE_MAX, BATCHES_PAGE_MAX = 10_000, 100
EXPIRES_MIN_S, EXPIRES_MAX_S = 3600, 2_592_000

Context = grpc.aio.ServicerContext[Any, Any]


class BatchServicer(batch_pb2_grpc.BatchServiceServicer):
    """Translates between messages and the stores."""

    def __init__(
        self,
        files: FileStore,
        batches: BatchStore,
        responses: StoredResponses,
        runner: Runner,
        lease: RunnerLease,
    ) -> None:
        self._files = files
        self._batches = batches
        self._responses = responses
        self._runner = runner
        self._lease = lease

    async def UploadFile(
        self, request_iterator: AsyncIterator[batch_pb2.UploadFileRequest], context: Context
    ) -> batch_pb2.UploadFileResponse:
        upload = Upload(self._files)
        try:
            file = await _receive(upload, request_iterator)
        except BaseException:
            # Without an owner, it would be counted for no tenant until it is swept.
            with contextlib.suppress(Unavailable):
                await upload.abandon()
            raise
        return batch_pb2.UploadFileResponse(file=_file(file))

    async def GetFile(
        self, request: batch_pb2.GetFileRequest, context: Context
    ) -> batch_pb2.GetFileResponse:
        file = await self._files.get(request.owner.tenant, request.file_id)
        return batch_pb2.GetFileResponse(file=_file(file))

    async def ListFiles(
        self, request: batch_pb2.ListFilesRequest, context: Context
    ) -> batch_pb2.ListFilesResponse:
        if "\0" in request.purpose:
            raise InvalidRequest("'purpose' must not contain the character NUL.", "purpose")
        files, has_more = await self._files.page(
            request.owner.tenant,
            request.purpose,
            _limit(request.limit, FILES_PAGE_MAX),
            request.after,
            ascending=request.ascending,
        )
        return batch_pb2.ListFilesResponse(files=map(_file, files), has_more=has_more)

    async def DeleteFile(
        self, request: batch_pb2.DeleteFileRequest, context: Context
    ) -> batch_pb2.DeleteFileResponse:
        await self._files.delete(request.owner.tenant, request.file_id)
        return batch_pb2.DeleteFileResponse()

    async def ReadFile(
        self, request: batch_pb2.ReadFileRequest, context: Context
    ) -> AsyncIterator[batch_pb2.ReadFileResponse]:
        await self._files.get(request.owner.tenant, request.file_id)
        async for content in self._files.read(request.file_id):
            yield batch_pb2.ReadFileResponse(content=content)

    async def CreateBatch(
        self, request: batch_pb2.CreateBatchRequest, context: Context
    ) -> batch_pb2.CreateBatchResponse:
        owner = Owner(request.owner.tenant, request.owner.key_id)
        if request.endpoint not in ENDPOINTS:
            text = f"'endpoint' must be one of {', '.join(ENDPOINTS)}, not {request.endpoint!r}."
            raise InvalidRequest(text, "endpoint")
        if request.completion_window != COMPLETION_WINDOW:
            text = f"'completion_window' must be '{COMPLETION_WINDOW}', the only window."
            raise InvalidRequest(text, "completion_window")
        _check_expiry(request.output_expires_after_s, "output_expires_after.seconds")
        file = await self._files.get(owner.tenant, request.input_file_id)
        if file.purpose != UPLOAD_PURPOSE:
            text = f"'input_file_id' must name a file of the purpose {UPLOAD_PURPOSE!r}."
            raise InvalidRequest(text, "input_file_id")
        batch = await self._batches.create(
            owner,
            file.id,
            request.endpoint,
            request.completion_window,
            request.metadata,
            request.output_expires_after_s,
        )
        self._runner.wake()
        return batch_pb2.CreateBatchResponse(batch=_batch(batch))

    async def GetBatch(
        self, request: batch_pb2.GetBatchRequest, context: Context
    ) -> batch_pb2.GetBatchResponse:
        batch = await self._batches.get(request.owner.tenant, request.batch_id)
        return batch_pb2.GetBatchResponse(batch=_batch(batch))

    async def CancelBatch(
        self, request: batch_pb2.CancelBatchRequest, context: Context
    ) -> batch_pb2.CancelBatchResponse:
        batch = await self._batches.cancel(request.owner.tenant, request.batch_id)
        self._runner.wake()
        return batch_pb2.CancelBatchResponse(batch=_batch(batch))

    async def ListBatches(
        self, request: batch_pb2.ListBatchesRequest, context: Context
    ) -> batch_pb2.ListBatchesResponse:
        limit = _limit(request.limit, BATCHES_PAGE_MAX)
        batches, has_more = await self._batches.page(request.owner.tenant, limit, request.after)
        return batch_pb2.ListBatchesResponse(batches=map(_batch, batches), has_more=has_more)

    async def ListProgress(
        self, request: batch_pb2.ListProgressRequest, context: Context
    ) -> batch_pb2.ListProgressResponse:
        limit = _limit(request.limit or PROGRESS_DEFAULT, PROGRESS_MAX)
        batches = await self._batches.newest(limit)
        owner, fence = await self._lease.holder()
        in_flight = self._runner.in_flight
        return batch_pb2.ListProgressResponse(
            batches=[
                batch_pb2.Progress(
                    batch=_batch(batch),
                    tenant=batch.owner.tenant,
                    in_flight=in_flight.get(batch.id, 0),
                )
                for batch in batches
            ],
            runner_id=int(owner or 0),
            fence=fence,
            responses=[
                batch_pb2.ResponseCount(tenant=one.tenant, status=one.status, count=one.count)
                for one in await self._responses.counts()
            ],
        )


async def _receive(
    upload: Upload, requests: AsyncIterator[batch_pb2.UploadFileRequest]
) -> StoredFile:
    """Stores an upload. Raises InvalidRequest, Overloaded and Unavailable."""
    async for request in requests:
        if request.WhichOneof("part") == "content":
            await upload.add(request.content)
            continue
        description = request.description
        _check_expiry(description.expires_after_s, "expires_after.seconds")
        return await upload.finish(
            description.owner.tenant,
            _filename(description.filename),
            _purpose(description.purpose),
            description.expires_after_s,
        )
    raise InvalidRequest("the upload has no description", "description")


def _limit(value: int, most: int) -> int:
    if not 1 <= value <= most:
        raise InvalidRequest(f"'limit' must be within 1..{most}, not {value}.", "limit")
    return value


def _check_expiry(seconds: int, field: str) -> None:
    if seconds and not EXPIRES_MIN_S <= seconds <= EXPIRES_MAX_S:
        text = f"'{field}' must be within {EXPIRES_MIN_S}..{EXPIRES_MAX_S}, not {seconds}."
        raise InvalidRequest(text, field)


def _filename(name: str) -> str:
    if not 0 < len(name) <= FILENAME_CHARS_MAX or "\0" in name:
        text = f"the name of 'file' must have 1 to {FILENAME_CHARS_MAX} characters."
        raise InvalidRequest(text, "file")
    return name


def _purpose(purpose: str) -> str:
    if purpose != UPLOAD_PURPOSE:
        text = f"'purpose' must be '{UPLOAD_PURPOSE}'; files have no other use here."
        raise InvalidRequest(text, "purpose")
    return purpose


def _file(file: StoredFile) -> batch_pb2.File:
    return batch_pb2.File(
        id=file.id,
        bytes=file.size,
        created_at=int(file.created_at),
        expires_at=int(file.expires_at),
        filename=file.filename,
        purpose=file.purpose,
    )


def _batch(batch: BatchRow) -> batch_pb2.Batch:
    return batch_pb2.Batch(
        id=batch.id,
        endpoint=batch.endpoint,
        status=str(batch.status),
        input_file_id=batch.input_file_id,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        completion_window=batch.window,
        created_at=int(batch.created_at),
        expires_at=int(batch.expires_at),
        total=batch.total,
        completed=batch.completed,
        failed=batch.failed,
        metadata=batch.metadata,
        errors=map(_error, batch.errors),
        **{name: int(value) for name, value in batch.times.items()},
    )


# Any: JSON.
def _error(error: Any) -> batch_pb2.BatchError:
    return batch_pb2.BatchError(
        code=error["code"],
        message=error["message"],
        param=error["param"] or "",
        line=error["line"] or 0,
    )
