"""Stored responses of other frontends: fetched over gRPC, with errors that name the cause."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from common.conversation_append import NO_CONVERSATION, Append
from common.errors import InvalidRequest, MeshError, NotFound, Unavailable
from common.registry.instances import Instance, Snapshot
from common.response_refusals import RESPONSE_TOO_LARGE
from common.rpc import channel as rpc
from frontend_svc.members import Members
from frontend_svc.responses.ids import response_id
from frontend_svc.responses.store import ResponseStore, StoredResponse
from frontend_svc.responses.stored import (
    PutResult,
    ResponseStoreService,
    StoredResponses,
)
from kvmesh.frontend.v1 import frontend_pb2_grpc

OWNER, OTHER = 5, 2**63 - 1
ID = response_id("ab" * 16, OWNER)
DURABLE_ID = response_id("ab" * 16, OWNER, is_durable=True)
STORED = StoredResponse(b'{"output":[]}', (b"{}", b"[]"))
TOKEN = rpc.Security(token="secret")


def frontend(address: str) -> Instance:
    return Instance(
        id=OWNER, namespace="n", service="frontend", stable_name="", address=address, model=""
    )


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[StoredResponses, StoredResponses]]:
    """The stored responses of a frontend, and the view of another one."""
    own = StoredResponses(OWNER, ResponseStore(10**6, 60.0), Members(), lambda: 0.0)
    addresses: set[str] = set()
    server = rpc.server(security=TOKEN, addresses=addresses)
    service = ResponseStoreService(own)
    frontend_pb2_grpc.add_ResponseStoreServiceServicer_to_server(service, server)
    port = rpc.bind(server, "127.0.0.1", 0)
    addresses |= rpc.own_addresses("127.0.0.1", port)
    await server.start()
    try:
        peers = Members(Snapshot(1, {OWNER: frontend(f"127.0.0.1:{port}")}))
        yield (
            own,
            StoredResponses(OTHER, ResponseStore(10**6, 60.0), peers, lambda: 0.0, TOKEN),
        )
    finally:
        await server.stop(None)


async def test_another_frontend_reads_and_deletes_a_response() -> None:
    async with serving() as (own, other):
        assert await own.put(ID, STORED)
        assert await own.get(ID) == await other.get(ID) == STORED
        await other.delete(ID)
        for one in (own, other):
            with pytest.raises(NotFound, match="not stored") as raised:
                await one.get(ID)
            assert raised.value.field == "response_id"


async def test_a_frontend_that_does_not_respond_is_a_retryable_error() -> None:
    async with serving() as (_, other):
        pass
    with pytest.raises(Unavailable, match="does not respond") as raised:
        await other.get(ID)
    assert (raised.value.retryable, raised.value.field) == (True, "response_id")


async def test_a_response_of_a_frontend_that_has_left_is_lost() -> None:
    other = StoredResponses(OTHER, ResponseStore(10**6, 60.0), Members(), lambda: 0.0)
    with pytest.raises(NotFound, match="has left"):
        await other.get(ID)
    with pytest.raises(NotFound, match="no id of a response"):
        await other.delete("resp_1")


class FakeDurable:
    """A batch service with one conversation. failure: of each call but for one that appends only,
    of which `append_failure` is that."""

    def __init__(self) -> None:
        self.failure: MeshError | None = None
        self.append_failure: MeshError | None = None
        self.appended: list[str] = []
        self.rows: set[str] = set()

    async def put(
        self,
        response_id: str,
        stored: StoredResponse,
        append: Append = NO_CONVERSATION,
        *,
        only_appends: bool = False,
    ) -> bool:
        failure = self.append_failure if only_appends else self.failure
        if failure is not None:
            raise failure
        if not only_appends:
            self.rows.add(response_id)
        if append.conversation_id:
            self.appended.append(append.conversation_id)
        return bool(append.conversation_id)

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        if self.failure is not None:
            raise self.failure
        if response_id not in self.rows:
            raise NotFound("not in the batch service")
        return STORED

    async def delete(self, response_id: str, tenant: str) -> None:
        await self.get(response_id, tenant)
        self.rows.remove(response_id)


def stored_beside(durable: FakeDurable) -> StoredResponses:
    # Any: only the methods above are used.
    store = ResponseStore(10**6, 60.0)
    return StoredResponses(
        OWNER, store, Members(), lambda: 0.0, durable=cast(Any, durable), writes_durably=True
    )


TOO_LARGE = InvalidRequest("17 MB", "input", reason=RESPONSE_TOO_LARGE)


async def test_a_response_that_is_too_large_for_a_row_appends_to_its_conversation() -> None:
    durable = FakeDurable()
    durable.failure = TOO_LARGE
    stored = stored_beside(durable)
    assert await stored.put(DURABLE_ID, STORED, Append("conv_1")) == PutResult(True, True)
    assert durable.appended == ["conv_1"]
    assert await stored.put(DURABLE_ID, STORED) == PutResult(True, False)
    assert durable.appended == ["conv_1"]
    durable.append_failure = Unavailable("gone")
    assert await stored.put(DURABLE_ID, STORED, Append("conv_1")) == PutResult(True, False)


async def test_no_second_call_appends_after_one_that_may_have_done_so() -> None:
    durable = FakeDurable()
    durable.failure = Unavailable("no response in time")
    stored = stored_beside(durable)
    assert await stored.put(DURABLE_ID, STORED, Append("conv_1")) == PutResult(True, False)
    assert durable.appended == []


async def test_a_delete_removes_the_row_and_the_copy_in_memory() -> None:
    durable = FakeDurable()
    stored = stored_beside(durable)
    durable.failure = Unavailable("no response in time")
    await stored.put(DURABLE_ID, STORED)
    durable.failure = None
    await stored.put(DURABLE_ID, STORED)
    await stored.delete(DURABLE_ID)
    with pytest.raises(NotFound):
        await stored.get(DURABLE_ID)
    with pytest.raises(NotFound):
        await stored.delete(DURABLE_ID)


async def test_a_delete_that_the_batch_service_did_not_answer_is_sent_again() -> None:
    durable = FakeDurable()
    stored = stored_beside(durable)
    await stored.put(DURABLE_ID, STORED)
    durable.failure = Unavailable("gone")
    await stored.put(DURABLE_ID, STORED)
    with pytest.raises(Unavailable, match="gone"):
        await stored.delete(DURABLE_ID)
    with pytest.raises(NotFound):
        stored.get_own(DURABLE_ID)
    durable.failure = None
    await stored.delete(DURABLE_ID)
    assert not durable.rows


async def test_a_copy_in_memory_alone_is_deleted() -> None:
    durable = FakeDurable()
    stored = stored_beside(durable)
    durable.failure = TOO_LARGE
    await stored.put(DURABLE_ID, STORED)
    durable.failure = None
    await stored.delete(DURABLE_ID)
    with pytest.raises(NotFound):
        await stored.get(DURABLE_ID)
