"""Stored responses of all frontends: each keeps its own and serves them to the others over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from common.errors import MeshError, NotFound, Unavailable
from common.registry.instances import Instance
from common.rpc import channel as rpc
from frontend_svc.members import Members
from frontend_svc.responses.ids import frontend_of
from frontend_svc.responses.store import ResponseStore, StoredResponse
from kvmesh.frontend.v1 import frontend_pb2, frontend_pb2_grpc

SERVICE_NAME = "kvmesh.frontend.v1.ResponseStoreService"
PEER_TIMEOUT_S = 5.0
_FIELD = "response_id"

Context = grpc.aio.ServicerContext[Any, Any]


class StoredResponses:
    """store: of this frontend. clock: of the store, in seconds."""

    def __init__(
        self,
        frontend_id: int,
        store: ResponseStore,
        members: Members,
        clock: Callable[[], float],
        security: rpc.Security = rpc.PLAINTEXT,
    ) -> None:
        self.frontend_id = frontend_id
        self._store = store
        self._members = members
        self._clock = clock
        self._security = security

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Stores a response of this frontend."""
        self._store.put(response_id, stored, self._clock())

    def get_own(self, response_id: str, tenant: str = "") -> StoredResponse:
        """Returns a tenant's response of this frontend. Raises NotFound."""
        stored = self._store.get(response_id, self._clock())
        if stored is None or stored.tenant != tenant:
            raise _not_stored(response_id)
        return stored

    def delete_own(self, response_id: str, tenant: str = "") -> None:
        """Removes a tenant's response of this frontend. Raises NotFound."""
        self.get_own(response_id, tenant)
        self._store.delete(response_id, self._clock())

    async def get(self, response_id: str, tenant: str = "") -> StoredResponse:
        """Returns a tenant's response of any frontend. Raises NotFound, also if that has left, and
        Unavailable if its frontend does not respond."""
        owner = self._owner(response_id)
        if owner is None:
            return self.get_own(response_id, tenant)
        async with self._stub(owner) as stub:
            request = frontend_pb2.GetResponseRequest(response_id=response_id, tenant=tenant)
            response: frontend_pb2.GetResponseResponse = await self._call(stub.GetResponse, request)
        return StoredResponse(response.response, tuple(response.input_items), tenant)

    async def delete(self, response_id: str, tenant: str = "") -> None:
        """Removes a response of any frontend. Raises as `get`."""
        owner = self._owner(response_id)
        if owner is None:
            self.delete_own(response_id, tenant)
            return
        async with self._stub(owner) as stub:
            request = frontend_pb2.DeleteResponseRequest(response_id=response_id, tenant=tenant)
            await self._call(stub.DeleteResponse, request)

    def _owner(self, response_id: str) -> Instance | None:
        """Returns the frontend that stores a response; None: this one."""
        frontend_id = frontend_of(response_id)
        if frontend_id is None:
            raise NotFound(f"{response_id!r} is no id of a response", field=_FIELD)
        if frontend_id == self.frontend_id:
            return None
        owner = self._members.snapshot.instances.get(frontend_id)
        if owner is not None and owner.service == "frontend":
            return owner
        text = f"the response {response_id!r} is lost: the frontend that stored it has left"
        raise NotFound(text, field=_FIELD)

    @asynccontextmanager
    async def _stub(
        self, owner: Instance
    ) -> AsyncIterator[frontend_pb2_grpc.ResponseStoreServiceStub]:
        channel = rpc.channel(owner.address, role="frontend", security=self._security)
        try:
            yield frontend_pb2_grpc.ResponseStoreServiceStub(channel)
        finally:
            await channel.close()

    # Any: a method of the stub, and its messages.
    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await rpc.unary(method, request, timeout_s=PEER_TIMEOUT_S)
        except NotFound:
            raise
        except MeshError as error:
            text = f"the frontend that stores the response does not respond: {error.message}"
            raise Unavailable(text, 1.0, field=_FIELD) from error


def _not_stored(response_id: str) -> NotFound:
    text = (
        f"the response {response_id!r} is not stored: it has expired, was deleted or not stored, "
        "or was removed because the store was full"
    )
    return NotFound(text, field=_FIELD)


class ResponseStoreService(frontend_pb2_grpc.ResponseStoreServiceServicer):
    """Serves the responses of this frontend to the others."""

    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored

    async def GetResponse(
        self, request: frontend_pb2.GetResponseRequest, context: Context
    ) -> frontend_pb2.GetResponseResponse:
        stored = self._stored.get_own(request.response_id, request.tenant)
        return frontend_pb2.GetResponseResponse(
            response=stored.response, input_items=stored.input_items
        )

    async def DeleteResponse(
        self, request: frontend_pb2.DeleteResponseRequest, context: Context
    ) -> frontend_pb2.DeleteResponseResponse:
        self._stored.delete_own(request.response_id, request.tenant)
        return frontend_pb2.DeleteResponseResponse()
