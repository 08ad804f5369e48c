"""Routable members of a mesh of processes: a stopped frontend, new workers, and the end of one."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc import channel as rpc
from common.service.health import MEMBER_SERVICE
from common.service.routable.peers import Routable
from common.service.routable.service import read_routable
from tests.kit.processes import Mesh, Service, mesh_fixture
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

LIMIT_S = 2.0
ROLLED = 5
TOKEN = "not that of the mesh, 32 bytes.."


mesh = mesh_fixture(
    frontends=2,
    routers=2,
    indexers=1,
    workers=1,
    worker_flags=["--speedup=20", "--metrics-port=0"],
)
Spawn = Callable[..., Service]


@pytest.fixture
def spawn(mesh: Mesh) -> Iterator[Spawn]:
    """Starts a process as `Mesh.spawn` and waits until it is ready; it ends with the test."""
    started: list[Service] = []

    def start(kind: str, *flags: str) -> Service:
        started.append(mesh.spawn(kind, *flags))
        return started[-1].wait_ready()

    yield start
    for service in started:
        service.kill()
    wait_for(mesh.is_complete, "the other tests have the mesh as it was")


def is_serving(service: Service, name: str = "") -> bool:
    stub: Any = health_pb2_grpc.HealthStub(service.channel)
    try:
        reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=WAIT_S)
    except grpc.RpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def read(service: Service, security: rpc.Security = rpc.PLAINTEXT) -> Routable:
    async def call() -> Routable | None:
        async with rpc.channel(service.address, security=security) as channel:
            return await read_routable(channel)

    state = asyncio.run(call())
    assert state is not None
    return state


def complete(url: str, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "hi", "max_tokens": 2}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S, trust_env=False)


def test_every_member_of_a_mesh_becomes_routable_and_no_process_with_another_token(
    mesh: Mesh, spawn: Spawn
) -> None:
    for service in [one for one in mesh.services if one.process.poll() is None]:
        wait_for(lambda service=service: is_serving(service), f"{service.name} is routable")  # type: ignore[misc]
        assert read(service) == Routable(True)
        assert service.wait_routable()["given_up"] == []
    stranger = spawn("worker", f"--mesh-token={TOKEN}")
    (peer,) = read(stranger, rpc.Security(token=TOKEN)).missing
    assert (peer.instance_id, peer.service) == (stranger.instance_id, "worker")
    assert "no other member proves its mesh token" in peer.reason
    assert not is_serving(stranger)
    assert stranger.events("routable") == []


def test_a_stopped_frontend_is_missing_then_given_up_and_both_times_named(
    mesh: Mesh, spawn: Spawn
) -> None:
    stopped = mesh.running("frontend")[1]
    stopped.send(signal.SIGSTOP)
    try:
        began = time.monotonic()
        worker = spawn("worker", f"--routable-limit-s={LIMIT_S:g}")
        ready_s = time.monotonic() - began

        def named() -> bool:
            return {peer.instance_id for peer in read(worker).missing} == {stopped.instance_id}

        wait_for(named, "only the stopped frontend is missing")
        assert [is_serving(worker), is_serving(worker, MEMBER_SERVICE)] == [False, True]
        assert worker.metric("kvmesh_worker_routable") == 0
        wait_for(lambda: is_serving(worker), "the worker is routable without the frontend")
        print(f"\nready after {ready_s:.2f} s, routable after {time.monotonic() - began:.2f} s")
        state = read(worker)
        assert state.is_routable
        (given_up,) = state.given_up
        assert (given_up.instance_id, given_up.service) == (stopped.instance_id, "frontend")
        assert worker.metric("kvmesh_worker_routable") == 1
        (event,) = worker.events("routable")
        assert event["s"] >= LIMIT_S
        assert len(event["given_up"]) == 1
    finally:
        stopped.send(signal.SIGCONT)
    wait_for(lambda: read(worker) == Routable(True), "the frontend acknowledges it late")


def test_a_routable_worker_serves_the_next_request_of_every_frontend(
    mesh: Mesh, spawn: Spawn
) -> None:
    for number in range(ROLLED):
        model = f"rolled-{number}"
        worker = spawn("worker", f"--model-name={model}")
        wait_for(lambda: is_serving(worker), "the worker is routable")  # noqa: B023
        assert [complete(url, model).status_code for url in mesh.urls] == [200, 200]
        worker.kill()


def test_a_worker_ends_only_when_no_frontend_sends_it_requests(mesh: Mesh, spawn: Spawn) -> None:
    worker = spawn("worker", "--model-name=leaving")  # the last one of its model
    wait_for(lambda: read(worker) == Routable(True), "every frontend sends it requests")
    stopped = mesh.running("frontend")[1]
    stopped.send(signal.SIGSTOP)
    try:
        worker.send(signal.SIGTERM)
        wait_for(lambda: read(worker).is_leaving, "the worker leaves")

        def named() -> bool:
            return {peer.instance_id for peer in read(worker).missing} == {stopped.instance_id}

        wait_for(named, "only the stopped frontend is missing")
        assert not is_serving(worker)
    finally:
        stopped.send(signal.SIGCONT)
    assert worker.wait() == 0
    assert worker.events("left_with_peers") == []


def test_a_new_frontend_is_routable_once_it_serves_every_model(spawn: Spawn) -> None:
    spawn("worker", "--model-name=second")
    frontend = spawn("frontend")
    wait_for(lambda: is_serving(frontend), "the frontend is routable")
    url = frontend.addresses["http"]
    assert httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    assert [complete(url, model).status_code for model in ("sim", "second")] == [200, 200]
