"""When a member is routable, beside peers that acknowledge late, never, or are of the version
before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from common.registry.instances import Instance, Service
from common.registry.registry import MemoryRegistry, MemoryStore
from common.rpc import channel as rpc
from common.service.health import MEMBER_SERVICE
from common.service.routable.peers import Routable
from common.service.routable.service import MemberServicer, read_routable
from kvmesh.engine.v1 import admin_pb2, admin_pb2_grpc
from kvmesh.member.v1 import member_pb2_grpc
from tests.kit.apps import living
from tests.kit.waiting import WAIT_S, until
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig

NS = "default"
SERVING = health_pb2.HealthCheckResponse.SERVING
PEER = 77


class FakePeer:
    """What a peer responds. reasons: while a member joins (False), and leaves (True)."""

    def __init__(self) -> None:
        self.reasons = {False: "its card is loading", True: "it still sends requests"}
        self.calls: list[tuple[int, bool]] = []

    async def reason_against(self, member_id: int, is_leaving: bool) -> str:
        self.calls.append((member_id, is_leaving))
        return self.reasons[is_leaving]


@asynccontextmanager
async def peer(
    store: MemoryStore,
    reason_against: Callable[[int, bool], Awaitable[str]] | None,
    service: Service = "frontend",
) -> AsyncIterator[None]:
    """A registered peer. reason_against: None: it has no MemberService, as the version before."""
    server = rpc.server()
    if reason_against is not None:
        servicer = MemberServicer(reason_against, lambda: Routable(True))
        member_pb2_grpc.add_MemberServiceServicer_to_server(servicer, server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    registry = MemoryRegistry(store)
    await registry.register(Instance(PEER, NS, service, "front", f"127.0.0.1:{port}"))
    try:
        yield
    finally:
        await registry.close()
        await server.stop(None)


@asynccontextmanager
async def worker(store: MemoryStore, **settings: Any) -> AsyncIterator[WorkerApp]:
    config = WorkerConfig(registry="memory", speedup=0.0, canary_idle_s=0.0, **settings)
    app = WorkerApp(config, registry=MemoryRegistry(store))
    async with living(app):
        yield app


async def health(app: WorkerApp, service: str = "") -> bool:
    async with rpc.channel(app.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        response = await rpc.unary(stub.Check, request, timeout_s=WAIT_S)
        return bool(response.status == SERVING)


async def read(app: WorkerApp) -> Routable:
    async with rpc.channel(app.address) as channel:
        state = await read_routable(channel)
    assert state is not None
    return state


async def test_a_worker_without_peers_is_routable_at_once() -> None:
    async with worker(MemoryStore()) as app:
        assert app.routable == Routable(True)
        assert await health(app)


async def test_a_worker_is_routable_once_its_peer_acknowledges_it() -> None:
    store, fake = MemoryStore(), FakePeer()
    with capture_logs() as logs:
        async with peer(store, fake.reason_against), worker(store) as app:
            await until(lambda: fake.calls, "the worker calls its peer")
            assert fake.calls[0] == (app.instance_id, False)

            async def is_named() -> bool:
                (missing,) = (await read(app)).missing
                return missing.reason == fake.reasons[False]

            await until(is_named, "the reason of the peer is named")
            (missing,) = (await read(app)).missing
            assert (missing.instance_id, missing.stable_name, missing.service) == (
                PEER,
                "front",
                "frontend",
            )
            assert [await health(app), await health(app, MEMBER_SERVICE)] == [False, True]
            fake.reasons[False] = ""
            await until(lambda: health(app), "the worker is routable")
            assert await read(app) == Routable(True)
    (event,) = [line for line in logs if line["event"] == "routable"]
    assert event["given_up"] == []


async def test_a_worker_waits_for_a_live_member_of_a_required_role() -> None:
    store, fake = MemoryStore(), FakePeer()
    fake.reasons[False] = ""
    async with worker(store, required_roles=("frontend",), routable_limit_s=0.1) as app:
        # Sleep: a role has no limit, unlike a peer.
        await asyncio.sleep(0.3)
        assert not await health(app)
        assert [str(absent) for absent in (await read(app)).missing] == [
            "frontend: no live member has this role, which --required-roles names"
        ]
        async with peer(store, fake.reason_against):
            await until(lambda: health(app), "the worker is routable")


async def test_a_peer_without_the_service_counts_as_acknowledged() -> None:
    store = MemoryStore()
    async with peer(store, None), worker(store) as app:
        await until(lambda: health(app), "the worker is routable")
        assert app.routable == Routable(True)


async def test_a_peer_that_never_responds_is_given_up_and_named() -> None:
    async def hang(_: int, __: bool) -> str:
        # Sleep: the peer hangs for longer than the test.
        await asyncio.sleep(WAIT_S)
        return ""

    store = MemoryStore()
    async with peer(store, hang), worker(store, routable_limit_s=0.2) as app:
        assert not app.routable.is_routable
        await until(lambda: health(app), "the worker is routable without its peer")
        (given_up,) = (await read(app)).given_up
        assert (given_up.instance_id, given_up.service) == (PEER, "frontend")


async def test_a_failing_engine_hides_a_routable_worker_from_peers() -> None:
    async with worker(MemoryStore()) as app:
        assert app._lifecycle is not None
        await app._lifecycle.health.set("", False)
        assert [await health(app), await health(app, MEMBER_SERVICE)] == [False, False]
        await app._lifecycle.health.set("", True)
        assert [await health(app), await health(app, MEMBER_SERVICE)] == [True, True]


async def test_a_member_that_leaves_waits_until_no_peer_sends_it_work() -> None:
    store, fake = MemoryStore(), FakePeer()
    fake.reasons[False] = ""
    async with peer(store, fake.reason_against), worker(store) as app:
        await until(lambda: app.routable.is_routable, "the worker is routable")
        await app.deregister()
        assert not await health(app)
        leaving = asyncio.create_task(app.left(WAIT_S))
        await until(lambda: (app.instance_id, True) in fake.calls, "the worker calls its peer")
        state = await read(app)
        assert (state.is_routable, state.is_leaving) == (False, True)
        assert [peer.instance_id for peer in state.missing] == [PEER]
        assert not leaving.done()
        fake.reasons[True] = ""
        async with asyncio.timeout(WAIT_S):
            await leaving


async def test_a_member_that_leaves_waits_for_the_limit_at_most() -> None:
    store, fake = MemoryStore(), FakePeer()
    fake.reasons[False] = ""
    with capture_logs() as logs:
        async with (
            peer(store, fake.reason_against),
            worker(store, routable_limit_s=1.0) as app,
        ):
            await app.deregister()
            async with asyncio.timeout(WAIT_S):
                await app.left(WAIT_S)
    (event,) = [line for line in logs if line["event"] == "left_with_peers"]
    assert event["peers"] == ["frontend front: it still sends requests"]


async def test_a_drained_worker_refuses_requests_once_no_peer_sends_any_and_joins_again() -> None:
    store, fake = MemoryStore(), FakePeer()
    fake.reasons[False] = ""
    settings: dict[str, Any] = {"admin_token": "admin", "notice_s": 0.0}
    async with peer(store, fake.reason_against), worker(store, **settings) as app:
        await until(lambda: health(app), "the worker is routable")
        draining = asyncio.create_task(admin(app, "Drain", admin_pb2.DrainRequest()))
        await until(lambda: (app.instance_id, True) in fake.calls, "the worker calls its peer")
        assert not draining.done(), "the peer still sends requests"
        fake.reasons[True] = ""
        await draining
        assert app.runner.is_draining
        await admin(app, "Resume", admin_pb2.ResumeRequest())
        await until(lambda: health(app), "the worker is routable again")
        assert app.routable == Routable(True)


# Any: a message of AdminService.
async def admin(app: WorkerApp, method: str, request: Any) -> Any:
    async with rpc.channel(app.address) as channel:
        call = getattr(admin_pb2_grpc.AdminServiceStub(channel), method)
        return await call(request, metadata=[("authorization", "Bearer admin")], timeout=WAIT_S)


@pytest.mark.parametrize("service", ["indexer", "worker"])
async def test_a_worker_does_not_wait_for_peers_that_send_it_no_work(service: Service) -> None:
    store, fake = MemoryStore(), FakePeer()
    async with peer(store, fake.reason_against, service), worker(store) as app:
        assert app.routable.is_routable
        assert fake.calls == []
