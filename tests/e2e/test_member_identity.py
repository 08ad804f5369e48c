"""What a compromised member can do under the id of another one: through running services.

It has the mesh token and a key of its own, as a worker, router, indexer or frontend has, and calls
the processes of a running mesh.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from google.protobuf.message import Message

from common import errors
from common.instance_ids import MEMBER_IDS
from common.registry.file_lock import acquire_lock, write_atomically
from common.registry.file_view import encode_entry
from common.registry.instances import STREAM_META_KEY, Instance, new_instance_id
from common.registry.signature import EntrySigner
from common.rpc import channel as rpc
from common.rpc.stream import GrpcStream, open_stream
from common.runtime.member_key import MemberKey, MemberKeys
from kvmesh.engine.v1 import engine_pb2
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from tests.kit.processes import Mesh, Service
from tests.kit.waiting import WAIT_S, until, wait_for

pytestmark = pytest.mark.slow

TOKEN = "the secret of the mesh, 32 bytes"
FLAGS = [f"--mesh-token={TOKEN}"]
ENGINE = "/kvmesh.engine.v1.EngineService/"
INDEXER = "/kvmesh.indexer.v1.IndexerService/"
ROUTER = "/kvmesh.router.v1.RouterService/"
OPERATOR = rpc.Security(token=TOKEN)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with Mesh(
        tmp_path_factory.mktemp("mesh"),
        workers=2,
        routers=2,
        indexers=1,
        worker_flags=FLAGS,
        router_flags=FLAGS,
        indexer_flags=FLAGS,
        frontend_flags=FLAGS,
    ) as mesh:
        yield mesh


@pytest.fixture(params=["its own key", "no key"])
def security(request: pytest.FixtureRequest) -> rpc.Security:
    """The credentials of the compromised member, which proves its own id or none."""
    key = MemberKey() if request.param == "its own key" else None
    return rpc.Security(token=TOKEN, members=MemberKeys(key, is_required=True))


@asynccontextmanager
async def opened(
    service: Service, method: str, response: type[Any], security: rpc.Security
) -> AsyncIterator[GrpcStream[Message, Any]]:
    address = service.addresses["streams"]
    async with (
        asyncio.timeout(WAIT_S),
        open_stream(address, method, response, security) as stream,
    ):
        try:
            yield stream
        finally:
            # The loop of the test ends before the connection is closed in order.
            stream._transport.abort()


async def assert_refused(
    service: Service, method: str, response: type[Any], first: Message, security: rpc.Security
) -> None:
    """The stream ends with PermissionDenied after its first frame."""

    async def converse(stream: GrpcStream[Message, Any]) -> None:
        await stream.write(first)
        async with asyncio.timeout(WAIT_S):
            while await stream.read() is not None:
                pass

    async with opened(service, method, response, security) as stream:
        with pytest.raises(errors.PermissionDenied, match=r"the caller (is|has not)") as refused:
            await converse(stream)
    assert refused.value.reason == "OTHER_MEMBER"
    await until(lambda: service.events("member_id_refused"), "the refusal is logged")


async def sources(mesh: Mesh) -> dict[int, str]:
    """The state of the source of each worker at the indexer."""
    (indexer,) = mesh.running("indexer")
    async with rpc.channel(indexer.address, security=OPERATOR) as channel:
        stub = indexer_pb2_grpc.IndexerServiceStub(channel)
        stats: indexer_pb2.StatsResponse = await rpc.unary(
            stub.Stats, indexer_pb2.StatsRequest(), timeout_s=WAIT_S
        )
    return {row.state.source.worker_id: row.status.state for row in stats.sources}


async def bookings(router: Service) -> int:
    """The number of bookings of a router."""
    async with rpc.channel(router.address, security=OPERATOR) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        dump: router_pb2.DumpResponse = await rpc.unary(
            stub.Dump, router_pb2.DumpRequest(), timeout_s=WAIT_S
        )
    return len(dump.bookings)


@asynccontextmanager
async def running_request(mesh: Mesh) -> AsyncIterator[str]:
    """A request that runs, under the id that is yielded; it succeeds on the worker of its first
    attempt, and not before the block ends."""
    name = uuid.uuid4().hex
    body: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
    replies: list[int] = []

    def complete() -> None:
        replies.append(mesh.post_completion(name, **body).status_code)

    thread = threading.Thread(target=complete)
    thread.start()
    try:
        for router in mesh.running("router"):
            await until(partial(bookings, router), "the request is booked")
        yield name
        assert thread.is_alive(), "the request ended before the attack"
        for router in mesh.running("router"):
            assert await bookings(router) == 1, "its booking remains"
    finally:
        await asyncio.to_thread(thread.join)
    assert replies == [200]
    line = await asyncio.to_thread(mesh.request_line, name)
    assert (line["attempts"], line["completion_tokens"]) == (1, 400)


def test_every_process_of_a_mesh_with_a_token_has_an_id_with_a_key(mesh: Mesh) -> None:
    assert all(service.instance_id in MEMBER_IDS for service in mesh.services)
    assert mesh.post_completion("served").status_code == 200


async def test_a_publisher_with_the_id_of_another_worker_does_not_make_it_gapped(
    mesh: Mesh, security: rpc.Security
) -> None:
    victim, other = (worker.instance_id for worker in mesh.workers)
    partition = indexer_pb2.Partition(model="sim", block_size=16, hash_scheme=1)
    first = indexer_pb2.PublishRequest(
        hello=indexer_pb2.PublishHello(worker_id=victim, partition=partition)
    )
    (indexer,) = mesh.running("indexer")
    await assert_refused(indexer, f"{INDEXER}Publish", indexer_pb2.PublishResponse, first, security)
    assert await sources(mesh) == {victim: "exact", other: "exact"}


async def test_a_session_with_the_id_of_another_frontend_does_not_free_its_bookings(
    mesh: Mesh, security: rpc.Security
) -> None:
    hello = router_pb2.SessionHello(frontend_id=mesh.frontend.instance_id, generation=1 << 40)
    first = router_pb2.SessionRequest(hello=hello)
    async with running_request(mesh):
        for router in mesh.running("router"):
            await assert_refused(
                router, f"{ROUTER}Session", router_pb2.SessionResponse, first, security
            )


async def test_a_booking_of_another_frontend_is_refused(mesh: Mesh, security: rpc.Security) -> None:
    request = router_pb2.RouteRequest(
        query=router_pb2.Query(model="sim", total_tokens=10),
        book=True,
        key=router_pb2.BookingKey(request_id="stolen"),
        frontend_id=mesh.frontend.instance_id,
    )
    async with rpc.channel(mesh.router.address, security=security) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        with pytest.raises(errors.PermissionDenied, match="has not proved"):
            await rpc.unary(stub.Route, request, timeout_s=WAIT_S)


async def test_an_attach_stream_with_the_id_of_another_frontend_ends_none_of_its_requests(
    mesh: Mesh, security: rpc.Security
) -> None:
    async with running_request(mesh):
        for worker in mesh.workers:
            hello = engine_pb2.Hello(
                frontend_id=mesh.frontend.instance_id,
                expected_worker_id=worker.instance_id,
                stream_seq=1 << 30,
            )
            first = engine_pb2.AttachRequest(hello=hello)
            await assert_refused(
                worker, f"{ENGINE}Attach", engine_pb2.AttachResponse, first, security
            )


async def test_a_router_with_the_id_of_another_one_removes_none_of_its_bookings(
    mesh: Mesh, security: rpc.Security
) -> None:
    routers = mesh.running("router")
    async with running_request(mesh):
        for receiver, victim in (routers, routers[::-1]):
            first = router_pb2.SyncRequest(
                router_id=victim.instance_id, sequence=1, begins_all=True, ends_all=True
            )
            await assert_refused(
                receiver, f"{ROUTER}Sync", router_pb2.SyncResponse, first, security
            )


@pytest.mark.parametrize("kind", ["its own key", "an earlier version"])
async def test_a_member_is_served_under_its_own_id(mesh: Mesh, kind: str) -> None:
    """A process of an earlier version has no key, and an id that no key has."""
    key = MemberKey() if kind == "its own key" else None
    own_id = new_instance_id(Random(4)) if key is None else key.id
    security = rpc.Security(token=TOKEN, members=MemberKeys(key, is_required=True))
    hello = router_pb2.SessionHello(frontend_id=own_id, generation=1)
    async with opened(
        mesh.router, f"{ROUTER}Session", router_pb2.SessionResponse, security
    ) as stream:
        await stream.write(router_pb2.SessionRequest(hello=hello))
        response = await stream.read()
    assert response is not None
    assert response.hello_ack.router_id == mesh.router.instance_id


async def test_a_process_with_the_token_at_the_address_of_a_member_gets_no_message(
    mesh: Mesh,
) -> None:
    """A frontend that dials a worker reaches another member."""
    security = rpc.Security(token=TOKEN, members=MemberKeys(MemberKey(), is_required=True))
    dialled, reached = mesh.workers
    address, method = reached.addresses["streams"], f"{ENGINE}Attach"
    async with (
        asyncio.timeout(WAIT_S),
        open_stream(
            address, method, engine_pb2.AttachResponse, security, peer_id=dialled.instance_id
        ) as stream,
    ):
        text = f"the peer is instance {reached.instance_id}, not {dialled.instance_id}"
        with pytest.raises(errors.Unauthenticated, match=text):
            await stream.write(engine_pb2.AttachRequest())
        stream._transport.abort()


def test_a_mesh_serves_after_each_kind_of_process_was_replaced(mesh: Mesh) -> None:
    """The successors have other keys, and other ids, at the addresses of their predecessors."""
    for kind in ("indexer", "worker", "router"):
        old = mesh.running(kind)[0]
        port = old.address.rpartition(":")[2]
        old.kill()
        new = mesh.spawn(kind, f"--port={port}").wait_ready()
        assert new.instance_id != old.instance_id
        wait_for(mesh.is_complete, "the frontend uses the router and all workers")
        assert mesh.post_completion(f"after the {kind}").status_code == 200


def entry_path(mesh: Mesh, instance_id: int) -> Path:
    return mesh._folder / "registry" / "default" / "instances" / f"{instance_id:016x}.json"


def sealed_instance(content: bytes) -> bytes:
    """The JSON of the instance in an entry of the file registry."""
    text = content.partition(b"\n")[0]
    return text.partition(b',"instance":')[2].removesuffix(b"}")


class Forger(EntrySigner):
    """Signs entries with the token, without the proof of their instances."""

    def __init__(self) -> None:
        super().__init__(TOKEN)

    def seal(self, instance: Instance) -> bytes:
        return instance.to_json()


def test_a_process_without_the_token_of_its_mesh_never_becomes_routable(mesh: Mesh) -> None:
    flags = [f"--registry-path={mesh.folder / 'registry'}", "--routable-limit-s=0.1"]
    flags.append("--metrics-port=0")
    stranger = Service("worker", flags, mesh.folder, "stranger").wait_ready()
    try:
        wait_for(lambda: len(stranger.events("peer_given_up")) == 3, "no peer is waited for")
        assert stranger.metric("kvmesh_worker_routable") == 0
        assert stranger.events("routable") == []
        (warning,) = stranger.events("not_of_mesh")
        assert "--mesh-token" in warning["reason"]
    finally:
        stranger.kill()
        stranger.close()


async def test_an_entry_that_another_member_wrote_for_a_worker_leads_no_request_to_its_address(
    mesh: Mesh,
) -> None:
    calls: list[object] = []

    def count(*streams: object) -> None:
        calls.append(streams)

    worker = mesh.workers[0]
    path = entry_path(mesh, worker.instance_id)
    own = sealed_instance(path.read_bytes())
    MemberKeys(is_required=True).check_entry(own, worker.instance_id)
    thief = await asyncio.start_server(count, "127.0.0.1", 0)
    address = f"127.0.0.1:{thief.sockets[0].getsockname()[1]}"
    forged = replace(Instance.from_json(own), address=address, meta={STREAM_META_KEY: address})
    _, content = encode_entry(time.monotonic_ns(), forged, Forger())
    locked: list[int] = []
    for number in range(10):
        locked.append(write_atomically(path, content, acquire_lock))
        response = await asyncio.to_thread(mesh.post_completion, f"forged {number}")
        assert response.status_code == 200
        await until(
            lambda: path.exists() and sealed_instance(path.read_bytes()) == own,
            "the worker restores its entry",
        )
    for fd in locked:
        os.close(fd)
    thief.close()
    assert not calls
    await asyncio.to_thread(wait_for, mesh.is_complete, "the frontend uses all workers")
