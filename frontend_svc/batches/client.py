"""Calls the batch service that discovery shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from common.errors import Unavailable
from common.registry.instances import Instance
from common.rpc import channel as rpc
from common.rpc.status import map_rpc_errors
from frontend_svc.members import Members
from kvmesh.batch.v1 import batch_pb2, batch_pb2_grpc

CALL_TIMEOUT_S: Final = 30.0
# Of an upload or a download.
TRANSFER_TIMEOUT_S: Final = 3600.0


class BatchClient:
    """The batch services, of which any has all files and batches of its database."""

    def __init__(self, members: Members, security: rpc.Security) -> None:
        self._members = members
        self._security = security
        self._channels: dict[int, rpc.MeshChannel] = {}

    # Any: a method of the stub, and its messages.
    async def call(self, name: str, request: Any) -> Any:
        """Returns the response of a unary method. Raises MeshError."""
        return await rpc.unary(getattr(await self._stub(), name), request, timeout_s=CALL_TIMEOUT_S)

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

        stub = await self._stub()
        # Any: the generated types are those of blocking stubs.
        upload: Any = stub.UploadFile
        call = upload(guarded(), timeout=TRANSFER_TIMEOUT_S)
        try:
            with map_rpc_errors():
                async with rpc.cancelling(call):
                    response: batch_pb2.UploadFileResponse = await call
                    return response
        except (Exception, asyncio.CancelledError):
            if failures:
                raise failures[0] from None
            raise

    async def read(self, request: batch_pb2.ReadFileRequest) -> AsyncIterator[bytes]:
        """Yields the content of a file. Raises MeshError."""
        stub = await self._stub()
        # Any: as above.
        read: Any = stub.ReadFile
        call = read(request, timeout=TRANSFER_TIMEOUT_S)
        with map_rpc_errors():
            async with rpc.cancelling(call):
                async for response in call:
                    yield response.content

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def _stub(self) -> batch_pb2_grpc.BatchServiceStub:
        """Raises Unavailable without a batch service."""
        instances = {instance.id: instance for instance in self._members.snapshot.of("batch")}
        for instance_id in [*self._channels.keys() - instances.keys()]:
            await self._channels.pop(instance_id).close()
        if not instances:
            text = "no batch service is there: the mesh has no member of the service 'batch'"
            raise Unavailable(text, 1.0, reason="NO_BATCH_SERVICE")
        # The newest: one before may have died without leaving yet.
        newest = next(reversed(instances.values()))
        return batch_pb2_grpc.BatchServiceStub(self._channel(newest))

    def _channel(self, instance: Instance) -> rpc.MeshChannel:
        channel = self._channels.get(instance.id)
        if channel is None:
            channel = rpc.channel(instance.address, role="batch", security=self._security)
            self._channels[instance.id] = channel
        return channel
