"""Calls of a frontend to batch services that do not respond."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.errors import Conflict, InvalidRequest, Unavailable
from common.registry.instances import Instance
from common.rpc import channel as rpc
from common.rpc.interceptors import RunningCalls
from frontend_svc.batches.client import (
    BATCH_SERVICE_OLD,
    BATCH_SERVICE_SILENT,
    NO_BATCH_SERVICE,
    BatchClient,
)
from frontend_svc.members import Members
from kvmesh.batch.v1 import batch_pb2, batch_pb2_grpc, responses_pb2
from tests.kit.instances import snapshot_of

LIST = batch_pb2.ListBatchesRequest(limit=1)
READ = batch_pb2.ReadFileRequest(file_id="file-1")


class Servicer(batch_pb2_grpc.BatchServiceServicer):
    """A service with one file, that refuses to cancel."""

    async def ListBatches(self, request: Any, context: Any) -> batch_pb2.ListBatchesResponse:
        return batch_pb2.ListBatchesResponse(has_more=True)

    async def CancelBatch(self, request: Any, context: Any) -> batch_pb2.CancelBatchResponse:
        raise Conflict("the batch has ended", field="batch_id")

    async def ReadFile(
        self, request: Any, context: Any
    ) -> AsyncIterator[batch_pb2.ReadFileResponse]:
        for part in (b"a", b"b"):
            yield batch_pb2.ReadFileResponse(content=part)

    async def UploadFile(self, requests: Any, context: Any) -> batch_pb2.UploadFileResponse:
        async for _ in requests:
            pass
        return batch_pb2.UploadFileResponse(file=batch_pb2.File(id="file-2"))


def instance(instance_id: int, port: int) -> Instance:
    return Instance(instance_id, "mesh", "batch", f"batch-{instance_id}", f"127.0.0.1:{port}")


@pytest.fixture
def dead() -> Instance:
    """A service that is registered, and whose process has ended; the newest one."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return instance(9, bound.getsockname()[1])


@pytest.fixture
async def live() -> AsyncIterator[Instance]:
    addresses: set[str] = set()
    server = rpc.server(security=rpc.PLAINTEXT, addresses=addresses, calls=RunningCalls())
    servicer: Any = Servicer  # Without the other methods.
    batch_pb2_grpc.add_BatchServiceServicer_to_server(servicer(), server)
    port = rpc.bind(server, "127.0.0.1", 0, security=rpc.PLAINTEXT)
    addresses |= rpc.own_addresses("127.0.0.1", port)
    await server.start()
    yield instance(1, port)
    await server.stop(None)


@asynccontextmanager
async def client_of(*services: Instance) -> AsyncIterator[BatchClient]:
    client = BatchClient(Members(snapshot_of(*services)), rpc.PLAINTEXT)
    try:
        yield client
    finally:
        await client.close()


async def uploads(failure: Exception | None = None) -> AsyncIterator[batch_pb2.UploadFileRequest]:
    yield batch_pb2.UploadFileRequest(content=b"x")
    if failure is not None:
        raise failure


async def read(client: BatchClient) -> list[bytes]:
    return [part async for part in client.read(READ)]


CALLS: dict[str, Callable[[BatchClient], Any]] = {
    "a read": lambda client: client.call("ListBatches", LIST),
    "a write": lambda client: client.call("CreateBatch", batch_pb2.CreateBatchRequest()),
    "an upload": lambda client: client.upload(uploads()),
    "a download": read,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_dead_service_is_an_error_that_names_it_without_its_address(
    dead: Instance, call: Callable[[BatchClient], Any]
) -> None:
    async with client_of(dead) as client:
        with pytest.raises(Unavailable, match="the batch service does not respond") as caught:
            await call(client)
    error = caught.value
    assert (error.reason, error.retry_after_s) == (BATCH_SERVICE_SILENT, 1.0)
    assert "127.0.0.1" not in error.message


async def test_without_a_service_the_error_says_so() -> None:
    async with client_of() as client:
        with pytest.raises(Unavailable) as caught:
            await client.call("ListBatches", LIST)
    assert caught.value.reason == NO_BATCH_SERVICE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GetStoredResponse", responses_pb2.GetStoredResponseRequest()),
        ("PutResponse", responses_pb2.PutResponseRequest()),
    ],
)
async def test_a_service_of_an_older_version_is_one_that_is_not_there(
    live: Instance, name: str, message: Any
) -> None:
    async with client_of(live) as client:
        with pytest.raises(Unavailable, match="older version") as caught:
            await client.call(name, message)
    assert caught.value.reason == BATCH_SERVICE_OLD


async def test_reads_of_a_dead_service_are_sent_to_another_one(
    dead: Instance, live: Instance
) -> None:
    async with client_of(live, dead) as client:
        assert (await client.call("ListBatches", LIST)).has_more
    async with client_of(live, dead) as client:
        assert await read(client) == [b"a", b"b"]


async def test_a_write_is_sent_once_and_the_next_one_to_a_service_that_responds(
    dead: Instance, live: Instance
) -> None:
    async with client_of(live, dead) as client:
        with pytest.raises(Unavailable):
            await client.upload(uploads())
        assert (await client.upload(uploads())).file.id == "file-2"


async def test_errors_of_the_service_and_of_the_client_stay_what_they_are(live: Instance) -> None:
    async with client_of(live) as client:
        with pytest.raises(Conflict, match="the batch has ended"):
            await client.call("CancelBatch", batch_pb2.CancelBatchRequest())
        with pytest.raises(InvalidRequest, match="no form"):
            await client.upload(uploads(InvalidRequest("no form")))
