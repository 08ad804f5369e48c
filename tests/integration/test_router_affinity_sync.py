"""Client sessions keep their workers whatever router a request reaches, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from common.registry.registry import MemoryStore
from common.request.preprocessed import RoutingHints, SessionAction, SessionControl
from common.wire.preprocessed import dataclass_to_proto
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.types.v1 import request_pb2
from router_svc.core.booking import SessionName
from tests.kit.local_router import FRONTEND, LocalRouter, key, local_router, query_of
from tests.kit.waiting import until

WORKERS = tuple(range(1, 9))
TTL_S = 60.0


class Mesh:
    """Routers of one registry, and eight workers. By load, requests would leave a bound worker."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.store = MemoryStore()
        self.routers: list[LocalRouter] = []

    async def router(self, **settings: Any) -> LocalRouter:
        """Adds a router, linked with all the others; with workers, if it is the first."""
        given = {"session_affinity_ttl_s": TTL_S, **settings}
        bed = await self.stack.enter_async_context(local_router(store=self.store, **given))
        if not self.routers:
            await bed.add_workers(*WORKERS)
        await bed.sees(*WORKERS)
        self.routers.append(bed)
        alive = [router for router in self.routers if router.is_running]
        await until(
            lambda: all(len(r.app.peers.replica.peers) == len(alive) - 1 for r in alive),
            "all routers are connected",
        )
        return bed


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        yield Mesh(stack)


def routing(action: SessionAction | None = None) -> request_pb2.RoutingHints:
    message = request_pb2.RoutingHints()
    dataclass_to_proto(RoutingHints(session_control=SessionControl("alice", action)), message)
    return message


async def route(router: LocalRouter, action: SessionAction | None = None) -> int:
    """The worker of the session's next request; `action` may open or close the session."""
    request = pb.RouteRequest(query=query_of(routing=routing(action)))
    response = await router.unary("Route", request)
    worker: int = response.decision.worker.worker_id
    return worker


def bound_at(router: LocalRouter) -> int | None:
    updates = router.router.affinity.updates([SessionName("m", "alice")], router.clock.now)
    session_placement = updates[0].record.placement if updates else None
    return None if session_placement is None else session_placement.worker.worker_id


@pytest.mark.parametrize("mode", ["hard", "soft"])
async def test_a_session_placed_by_one_router_keeps_its_worker_at_another(
    mesh: Mesh, mode: str
) -> None:
    one = await mesh.router(session_affinity_mode=mode)
    two = await mesh.router(session_affinity_mode=mode)
    async with one.session() as session:
        placed = await session.place(1, routing=routing())
        bound = placed.decision.worker.worker_id
        assert placed.decision.session_revision > 0
        await until(lambda: bound_at(two) == bound, "the other router has the session")
        assert {await route(two) for _ in range(5)} == {bound}


@pytest.mark.slow
async def test_a_restarted_router_has_the_sessions_of_its_peers(
    mesh: Mesh,
) -> None:
    one, two = await mesh.router(), await mesh.router()
    async with one.session() as session:
        bound = (await session.place(1, routing=routing())).decision.worker.worker_id
        await session.send(frees=[key(1)])
        await until(lambda: bound_at(two) == bound, "the other router has the session")
    await one.die()
    await until(lambda: not two.app.peers.replica.peers, "the router is gone")
    again = await mesh.router()
    assert bound_at(again) == bound, "before its first request"
    assert {await route(again) for _ in range(5)} == {bound}


@pytest.mark.slow
async def test_a_restarted_router_without_peers_restores_sessions_from_live_bookings(
    mesh: Mesh,
) -> None:
    one = await mesh.router()
    async with one.session() as session:
        decision = (await session.place(1, routing=routing())).decision
    await one.die()
    alone = await mesh.router()
    held = pb.Booking(
        key=key(1),
        frontend_id=FRONTEND,
        model="m",
        worker=decision.worker,
        prefill_tokens=100,
        decode_blocks=7,
        revision=1,
        session_id="alice",
        session_revision=decision.session_revision,
    )
    async with alone.session(FRONTEND, held) as session:
        assert (await session.place(1)).decision.session_revision == decision.session_revision
        assert {await route(alone) for _ in range(5)} == {decision.worker.worker_id}
        assert alone.metric("affinity_bindings") == 1


async def test_a_request_that_runs_through_another_router_keeps_the_session(mesh: Mesh) -> None:
    one, two = await mesh.router(), await mesh.router()
    async with one.session() as session:
        bound = (await session.place(1, routing=routing())).decision.worker.worker_id
        await until(
            lambda: len(two.router.load_tracker) == 1, "the other router counts the session"
        )
        for router in (one, two):
            router.clock.now += 2.0  # Less than the silence timeout of peers.
        two.router.affinity.expire(two.clock.now + 100 * TTL_S)
        assert bound_at(two) == bound
        await session.send(frees=[key(1)])
        await until(
            lambda: len(two.router.load_tracker) == 0,
            "the other router receives the end of the session",
        )
        two.router.affinity.expire(two.clock.now)
        two.router.affinity.expire(two.clock.now + TTL_S)
        assert bound_at(two) is None


async def test_closing_or_moving_a_session_at_one_router_applies_at_all_routers(mesh: Mesh) -> None:
    one, two = await mesh.router(), await mesh.router()
    async with one.session() as here, two.session(FRONTEND + 1) as there:
        bound = (await here.place(1, routing=routing())).decision.worker.worker_id
        await until(lambda: bound_at(two) == bound, "the other router has the session")
        moved = (await there.place(2, routing=routing(SessionAction.OPEN))).decision.worker
        assert moved.worker_id != bound, "the router chooses by load"
        await until(
            lambda: bound_at(one) == moved.worker_id, "the first router receives the new placement"
        )
        await here.place(3, routing=routing(SessionAction.CLOSE))
        await until(
            lambda: bound_at(two) is None, "the other router receives the end of the session"
        )
        assert len(two.router.affinity) == 0
