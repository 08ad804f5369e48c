"""Stored responses of other frontends: fetched over gRPC, with errors that name the cause."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.errors import NotFound, Unavailable
from common.registry.instances import Instance, Snapshot
from common.rpc import channel as rpc
from frontend_svc.members import Members
from frontend_svc.responses.ids import response_id
from frontend_svc.responses.store import ResponseStore, StoredResponse
from frontend_svc.responses.stored import ResponseStoreService, StoredResponses
from kvmesh.frontend.v1 import frontend_pb2_grpc

OWNER, OTHER = 5, 2**63 - 1
ID = response_id("ab" * 16, OWNER)
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
