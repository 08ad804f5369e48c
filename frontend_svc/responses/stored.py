"""Stored responses: those of the batch service, and those in the memory of frontends.

Without a batch service, each frontend keeps its own responses in memory and serves them to the
others over gRPC. So it does with a response that the batch service does not take.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc.aio
import structlog

from common.conversation_append import NO_CONVERSATION, Append
from common.errors import MeshError, NotFound, Unavailable, Unsupported
from common.registry.instances import Instance
from common.response_refusals import (
    RESPONSE_TOO_LARGE,
    not_in_background,
    not_stored,
    not_streamed,
)
from common.rpc import channel as rpc
from frontend_svc.members import Members
from frontend_svc.responses.durable import DurableResponses, StreamedOutput
from frontend_svc.responses.ids import frontend_of, is_durable, response_id
from frontend_svc.responses.store import ResponseStore, StoredResponse
from kvmesh.frontend.v1 import frontend_pb2, frontend_pb2_grpc

SERVICE_NAME = "kvmesh.frontend.v1.ResponseStoreService"
PEER_TIMEOUT_S = 5.0

_FIELD = "response_id"

Context = grpc.aio.ServicerContext[Any, Any]

LOG = structlog.get_logger(__name__)


class PutResult(NamedTuple):
    """Whether a response is stored, and whether its conversation has its items."""

    is_stored: bool
    has_appended: bool


class StoredResponses:
    """The stored responses of the mesh, as one frontend writes and reads them."""

    def __init__(
        self,
        frontend_id: int,
        store: ResponseStore | None,
        members: Members,
        clock: Callable[[], float],
        security: rpc.Security = rpc.PLAINTEXT,
        durable: DurableResponses | None = None,
        *,
        writes_durably: bool = True,
    ) -> None:
        """
        - store: of this frontend; None: it keeps none in memory.
        - clock: of the store, in seconds.
        - durable: None: the mesh has no batch service.
        - writes_durably: whether the batch service gets new responses while it is there.
        """
        self.frontend_id = frontend_id
        self._store = store
        self._members = members
        self._clock = clock
        self._security = security
        self._durable = durable
        self._writes_durably = writes_durably
        self.not_durable = 0
        """Responses that the batch service did not take."""

    @property
    def is_durable(self) -> bool:
        """Whether new responses go to the batch service."""
        return self._durable is not None and self._writes_durably and self._durable.is_there

    @property
    def is_available(self) -> bool:
        """Whether new responses can be stored."""
        return self._store is not None or self.is_durable

    def require_durable(self, field: str, purpose: str) -> None:
        """Raises Unsupported if the mesh has no batch service, and Unavailable if it had one.

        - purpose: what the service does for the field.
        """
        if self._durable is None or not (self._durable.is_there or self._durable.was_there):
            raise Unsupported(field, f"the mesh has no batch service, which {purpose}")
        if not self._durable.is_there:
            text = "no batch service is there: the mesh has lost it"
            raise Unavailable(text, 1.0, reason="NO_BATCH_SERVICE", field=field)

    def new_id(self, request_id: str, *, must_be_durable: bool = False) -> str:
        """Returns the id of a new response."""
        return response_id(
            request_id, self.frontend_id, is_durable=must_be_durable or self.is_durable
        )

    async def put(
        self,
        response_id: str,
        stored: StoredResponse,
        append: Append = NO_CONVERSATION,
        *,
        only_appends: bool = False,
    ) -> PutResult:
        """Stores a response of this frontend, at the latest in its memory.

        - only_appends: the response itself is not stored.
        """
        has_appended = False
        if is_durable(response_id) and self._durable is not None:
            try:
                has_appended = await self._durable.put(
                    response_id, stored, append, only_appends=only_appends
                )
                return PutResult(not only_appends, has_appended)
            except MeshError as error:
                self.not_durable += 1
                LOG.warning("response_not_durable", response=response_id, error=error.message)
                if error.reason == RESPONSE_TOO_LARGE and append.conversation_id:
                    # The conversation is stored apart, with a limit of its own.
                    has_appended = await self._append(self._durable, response_id, stored, append)
        if only_appends or self._store is None:
            return PutResult(False, has_appended)
        self._store.put(response_id, stored, self._clock())
        return PutResult(True, has_appended)

    async def _append(
        self, durable: DurableResponses, response_id: str, stored: StoredResponse, append: Append
    ) -> bool:
        """Appends the items of a response to its conversation; returns whether it has them."""
        try:
            return await durable.put(response_id, stored, append, only_appends=True)
        except MeshError as error:
            LOG.warning("response_not_appended", response=response_id, error=error.message)
            return False

    def get_own(self, response_id: str, tenant: str = "") -> StoredResponse:
        """Returns a tenant's response in the memory of this frontend. Raises NotFound."""
        if self._store is None:
            text = "this frontend keeps no responses in memory (--response-store-mb)"
            raise NotFound(text, field=_FIELD)
        stored = self._store.get(response_id, self._clock())
        if stored is None or stored.tenant != tenant:
            raise _not_stored(response_id)
        return stored

    def delete_own(self, response_id: str, tenant: str = "") -> None:
        """Removes a tenant's response from the memory of this frontend. Raises NotFound."""
        self.get_own(response_id, tenant)
        if self._store is not None:
            self._store.delete(response_id, self._clock())

    async def get(self, response_id: str, tenant: str = "") -> StoredResponse:
        """Returns a tenant's response. Raises NotFound, also if its frontend has left, and
        Unavailable if the process that stores it does not respond."""
        if not is_durable(response_id) or self._durable is None:
            return await self._get_kept(response_id, tenant)
        try:
            return await self._durable.get(response_id, tenant)
        except (NotFound, Unavailable) as error:
            try:
                return await self._get_kept(response_id, tenant)
            except (NotFound, Unavailable):
                raise error from None

    async def delete(self, response_id: str, tenant: str = "") -> None:
        """Removes a response, also one that is both in the batch service and in memory: its write
        may have had no response in time. Raises as `get`."""
        if not is_durable(response_id) or self._durable is None:
            await self._delete_kept(response_id, tenant)
            return
        error: MeshError | None = None
        try:
            await self._durable.delete(response_id, tenant)
        except (NotFound, Unavailable) as failure:
            error = failure
        try:
            await self._delete_kept(response_id, tenant)
        except (NotFound, Unavailable):
            if error is not None:
                raise error from None
        if isinstance(error, Unavailable):
            raise error

    @property
    def durable(self) -> DurableResponses:
        """Those of the batch service, after `require_durable`."""
        assert self._durable is not None, "checked before"
        return self._durable

    async def read_stream(
        self, response_id: str, tenant: str, run: int = 0, parts: int = 0, *, waits: bool = False
    ) -> StreamedOutput:
        """Returns output of a response in the background: see `DurableResponses.read_stream`."""
        if is_durable(response_id) and self._durable is not None:
            return await self._durable.read_stream(response_id, tenant, run, parts, waits=waits)
        await self._get_kept(response_id, tenant)
        raise not_streamed(response_id)

    async def cancel(self, response_id: str, tenant: str = "") -> bytes:
        """Ends a response in the background; returns its object. Raises as `get`, and
        InvalidRequest if it did not run in the background."""
        if is_durable(response_id) and self._durable is not None:
            return await self._durable.cancel(response_id, tenant)
        await self._get_kept(response_id, tenant)
        raise not_in_background(response_id)

    async def _get_kept(self, response_id: str, tenant: str) -> StoredResponse:
        """Returns a tenant's response in the memory of any frontend."""
        owner = self._owner(response_id)
        if owner is None:
            return self.get_own(response_id, tenant)
        async with self._stub(owner) as stub:
            request = frontend_pb2.GetResponseRequest(response_id=response_id, tenant=tenant)
            response: frontend_pb2.GetResponseResponse = await self._call(stub.GetResponse, request)
        return StoredResponse(response.response, tuple(response.input_items), tenant)

    async def _delete_kept(self, response_id: str, tenant: str) -> None:
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
    return not_stored(response_id, "the store was full")


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
