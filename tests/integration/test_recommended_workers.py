"""Recommended worker counts and sleeping models of a running mesh."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import generate_latest

from common.rpc import channel as rpc
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from meshctl.view.pools import Pool, describe_pools, join_pools, read_pools
from router_svc.app import RouterApp
from router_svc.core import replicas
from tests.kit.engines import RecordingEngine
from tests.kit.local_mesh import LocalMesh, local_mesh
from tests.kit.waiting import WAIT_S, until


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "SAMPLE_S", 0.05)
    monkeypatch.setattr("router_svc.app.REPLICAS_TICK_S", 0.05)


@asynccontextmanager
async def pools_of(app: RouterApp) -> AsyncIterator[Any]:
    """A function that returns the pools of a router, as `meshctl status` reads them."""
    address = app._instance().address
    async with rpc.channel(address, role="router") as channel:

        async def read() -> list[Pool]:
            return list(await read_pools(channel, timeout_s=WAIT_S))

        yield read


async def shows(read: Any, **expected: object) -> None:
    async def is_shown() -> bool:
        pools = await read()
        return len(pools) == 1 and expected.items() <= pools[0].fields().items()

    await until(is_shown, f"one pool has {expected}")


def metrics_of(app: RouterApp) -> str:
    return generate_latest(app.metrics.registry).decode()


async def a_request(mesh: LocalMesh) -> int:
    return (await mesh.complete()).status_code


@pytest.mark.interpreted
async def test_a_configured_model_sleeps_wakes_at_a_request_and_serves_it() -> None:
    async with (
        local_mesh(configured_models=("m",)) as mesh,
        mesh.router(scaling_min=0) as router,
        pools_of(router) as read,
    ):
        await shows(read, model="m", workers=0, recommended=0, state="asleep", reason="asleep")
        assert 'kvmesh_router_pool_asleep{model="m",role="aggregated"} 1.0' in metrics_of(router)
        call = asyncio.create_task(a_request(mesh))
        await shows(read, recommended=1, state="waking", reason="wake", awaiting=1)
        label = 'model="m",reason="wake",role="aggregated"'
        assert f"kvmesh_router_recommended_workers{{{label}}} 1.0" in metrics_of(router)
        assert not call.done()
        async with mesh.worker(RecordingEngine()):
            assert await call == 200
            await shows(read, workers=1, state="awake", awaiting=0)
            assert 'pool_asleep{model="m",role="aggregated"} 0.0' in metrics_of(router)


@pytest.mark.interpreted
async def test_the_demand_of_a_frontend_ends_with_its_session() -> None:
    async with local_mesh(configured_models=("m",)) as mesh:
        async with mesh.router() as router, pools_of(router) as read:
            await shows(read, model="m")
            session = router_pb2.SessionRequest(awaiting=router_pb2.Awaiting(requests={"x": 1}))
            assert session.HasField("awaiting")
            assert router.replicas.demand.by_model() == {"m": 0}
        await until(lambda: not router.replicas.demand.by_model(), "the session has ended")


async def test_a_router_without_pools_reports_none() -> None:
    async with local_mesh() as mesh, mesh.router() as router, pools_of(router) as read:
        assert await read() == []
        async with rpc.channel(router._instance().address, role="router") as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            response = await stub.Replicas(router_pb2.ReplicasRequest(), timeout=WAIT_S)
            assert not response.pools


def test_the_greatest_count_of_all_routers_counts_once() -> None:
    low = Pool("m", "decode", 2, 2, "steady", "awake", 1)
    high = Pool("m", "decode", 2, 4, "kv", "awake", 2)
    other = Pool("a", "aggregated", 0, 0, "asleep", "asleep", 0)
    assert join_pools([low, high, other]) == [
        other,
        Pool("m", "decode", 2, 4, "kv", "awake", 3),
    ]
    assert describe_pools([]) == ""
    table = describe_pools([low, high, other]).splitlines()
    assert table[0] == ""
    assert table[1].split()[:4] == ["MODEL", "ROLE", "WORKERS", "RECOMMENDED"]
    assert table[3].split() == ["m", "decode", "2", "4", "kv", "awake", "3"]
