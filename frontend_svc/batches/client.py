"""Calls the batch services that discovery shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import structlog

from common.errors import MeshError, Unavailable, Unimplemented
from common.registry.instances import Instance
from common.rpc import channel as rpc
from common.rpc.status import has_no_response, map_rpc_errors
from frontend_svc.batches.stub import BatchStub
from frontend_svc.members import Members
from kvmesh.batch.v1 import batch_pb2

LOG = structlog.get_logger(__name__)

CALL_TIMEOUT_S: Final = 30.0
# Of an upload or a download.
TRANSFER_TIMEOUT_S: Final = 3600.0
RETRY_AFTER_S: Final = 1.0
# Methods that change nothing: another service has the same response.
READS: Final = frozenset(
    {
        *("GetFile", "ListFiles", "GetBatch", "ListBatches", "GetStoredResponse"),
        *("GetConversation", "ListItems", "GetItem", "ReadConversation", "ReadStream"),
    }
)
# Reasons of an Unavailable: no service is registered; one is, and gives no response; each is of an
# older version, without the method.
NO_BATCH_SERVICE: Final = "NO_BATCH_SERVICE"
BATCH_SERVICE_SILENT: Final = "BATCH_SERVICE_SILENT"
BATCH_SERVICE_OLD: Final = "BATCH_SERVICE_OLD"


@dataclass(slots=True, eq=False)
class _Service:
    instance_id: int
    channel: rpc.MeshChannel
    stub: BatchStub
    calls: int = 0
    """In progress."""

    is_silent: bool = False
    """Whether its last call had no response."""


class BatchClient:
    """The batch services, of which any has all files and batches of its database. A read that has
    no response from one of them is sent to the next one, and so is any call of a method that one
    does not have."""

    def __init__(self, members: Members, security: rpc.Security) -> None:
        self._members = members
        self._security = security
        self._opened: dict[int, _Service] = {}
        self.was_there = False
        """Whether `is_there` was true before."""

    @property
    def is_there(self) -> bool:
        """Whether discovery shows a batch service."""
        is_there = bool(self._members.snapshot.of("batch"))
        self.was_there = self.was_there or is_there
        return is_there

    # Any: a method of the stub, and its messages.
    async def call(self, name: str, request: Any) -> Any:
        """Returns the response of a unary method. Raises MeshError."""
        services = await self._services()
        lost: MeshError | None = None
        for service in services:
            if self._opened.get(service.instance_id) is not service:
                continue  # It has left meanwhile.
            try:
                with _calling(service):
                    method = service.stub.method(name)
                    return await rpc.unary(method, request, timeout_s=CALL_TIMEOUT_S)
            except Unimplemented:
                text = f"the batch service is of an older version, without {name}"
                lost = Unavailable(text, RETRY_AFTER_S, reason=BATCH_SERVICE_OLD)
            except Unavailable as error:
                if error.reason != BATCH_SERVICE_SILENT or name not in READS:
                    raise
                lost = error
        assert lost is not None, "the first service has not left"
        raise lost

    async def upload(
        self, requests: AsyncIterator[batch_pb2.UploadFileRequest]
    ) -> batch_pb2.UploadFileResponse:
        """Sends a file. Raises MeshError, also that of `requests`."""
        failures: list[BaseException] = []

        async def guarded() -> AsyncIterator[batch_pb2.UploadFileRequest]:
            # grpc reports an error of the iterator as one of its own.
            try:
                async for request in requests:
                    yield request
            except Exception as error:
                failures.append(error)
                raise

        service = (await self._services())[0]
        # Any: the generated types are those of blocking stubs.
        upload: Any = service.stub.batches.UploadFile
        with _calling(service):
            call = upload(guarded(), timeout=TRANSFER_TIMEOUT_S)
            try:
                async with rpc.cancelling(call):
                    response: batch_pb2.UploadFileResponse = await call
                    return response
            except (Exception, asyncio.CancelledError):
                if failures:
                    raise failures[0] from None
                raise

    async def read(self, request: batch_pb2.ReadFileRequest) -> AsyncIterator[bytes]:
        """Yields the content of a file. Raises MeshError."""
        services = await self._services()
        lost: MeshError | None = None
        has_begun = False
        for service in services:
            if self._opened.get(service.instance_id) is not service:
                continue  # It has left meanwhile.
            # Any: as above.
            read: Any = service.stub.batches.ReadFile
            try:
                with _calling(service):
                    call = read(request, timeout=TRANSFER_TIMEOUT_S)
                    async with rpc.cancelling(call):
                        async for response in call:
                            has_begun = True
                            yield response.content
                return
            except Unavailable as error:
                if has_begun or error.reason != BATCH_SERVICE_SILENT:
                    raise
                lost = error
        assert lost is not None, "the first service has not left"
        raise lost

    async def close(self) -> None:
        opened, self._opened = self._opened, {}
        for service in opened.values():
            await service.channel.close()

    async def _services(self) -> list[_Service]:
        """Returns the services, the best first. Raises Unavailable without any."""
        instances = {instance.id: instance for instance in self._members.snapshot.of("batch")}
        departed = self._opened.keys() - instances.keys()
        # The end of a channel cancels its calls.
        idle = [one for one in departed if not self._opened[one].calls]
        for service in [self._opened.pop(one) for one in idle]:
            await service.channel.close()
        if not instances:
            text = "no batch service is there: the mesh has no member of the service 'batch'"
            raise Unavailable(text, RETRY_AFTER_S, reason=NO_BATCH_SERVICE)
        # The newest first: those before may have died without leaving yet.
        services = [self._service(instance) for instance in reversed(instances.values())]
        return sorted(services, key=lambda service: service.is_silent)

    def _service(self, instance: Instance) -> _Service:
        service = self._opened.get(instance.id)
        if service is None:
            channel = rpc.channel(instance.address, role="batch", security=self._security)
            stub = BatchStub(channel)
            service = self._opened[instance.id] = _Service(instance.id, channel, stub)
        return service


@contextmanager
def _calling(service: _Service) -> Iterator[None]:
    """Raises Unavailable, with the reason BATCH_SERVICE_SILENT, if a call has no response."""
    service.calls += 1
    try:
        with map_rpc_errors():
            yield
    except MeshError as error:
        if not has_no_response(error):
            service.is_silent = False
            raise
        if not service.is_silent:
            service.is_silent = True
            # The client gets no address of the mesh.
            LOG.warning(
                "batch_service_silent", member=str(service.instance_id), error=error.message
            )
        text = "the batch service does not respond; send the request again"
        raise Unavailable(text, RETRY_AFTER_S, reason=BATCH_SERVICE_SILENT) from error
    else:
        service.is_silent = False
    finally:
        service.calls -= 1
