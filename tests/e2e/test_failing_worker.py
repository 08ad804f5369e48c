"""A worker with an engine that fails without dying: clients notice little, and it comes back."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from common.inspection.members import FAILING
from common.rpc import channel as rpc
from common.runtime.config import ServiceConfig
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from meshctl.commands.status import Row, gather
from tests.chaos.client import body_of
from tests.e2e.failing_engine import POISON
from tests.kit.oracle import Oracle
from tests.kit.processes import Mesh, Service
from tests.kit.waiting import WAIT_S, until

pytestmark = pytest.mark.slow

TOKENS = 8
REQUESTS_PER_S = 40
# Requests in flight when the worker is excluded, and those before it.
ERROR_SHARE_MAX = 0.01
NO_ERRORS_AFTER_S = 5.0
LOAD_S = 6.5
POISON_REQUESTS = 40
OPENED = r"it failed \d+ of \d+ requests in 10 s, its peers \d+ of \d+|its engine fails"
EXCLUDED = "excluded by the frontend: its circuit is open: its engine fails"
OPEN_CIRCUITS = 'kvmesh_frontend_open_circuits{cause="failing"}'


@dataclass(slots=True)
class Load:
    """Requests at a steady rate. results: start, seconds after the first one, and the problem or
    ""."""

    results: list[tuple[float, str]] = field(default_factory=list)

    @property
    def failures(self) -> list[tuple[float, str]]:
        return [result for result in self.results if result[1]]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture
def mode(tmp_path: Path) -> Path:
    """The file with the mode of the failing engine."""
    path = tmp_path / "mode"
    path.write_text("")
    return path


@pytest.fixture
def mesh(tmp_path: Path, mode: Path) -> Iterator[Mesh]:
    with Mesh(tmp_path, workers=2, worker_flags=["--speedup=10"]) as running:
        flags = ["--engine=tests.e2e.failing_engine:make", f"--engine-args={mode}"]
        running.spawn("worker", *flags).wait_ready()
        deadline = time.monotonic() + WAIT_S
        while not running.is_complete():
            assert time.monotonic() < deadline, running.logs()
        yield running


def failing_worker(mesh: Mesh) -> Service:
    return mesh.workers[-1]


@asynccontextmanager
async def steady_load(mesh: Mesh, oracle: Oracle) -> AsyncIterator[Load]:
    """Sends requests at a steady rate until the block ends, and compares each response."""
    load, began_at = Load(), time.monotonic()

    async def send(number: int) -> None:
        prompt, at = f"Request {number} of the load", time.monotonic() - began_at
        response = await client.post(
            "/v1/completions", json=body_of(prompt, TOKENS, stream=False), timeout=WAIT_S
        )
        problem = response.text if response.status_code != 200 else ""
        expected = oracle.completion(prompt, TOKENS, ignore_eos=True).text
        if not problem and response.json()["choices"][0]["text"] != expected:
            problem = "wrong text"
        load.results.append((at, problem))

    async def run() -> None:
        async with asyncio.TaskGroup() as requests:
            for number in range(int(60 * REQUESTS_PER_S)):
                requests.create_task(send(number))
                # Sleep: the pace of the load.
                await asyncio.sleep(1 / REQUESTS_PER_S)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=mesh.url, trust_env=False, limits=limits) as client:
        task = asyncio.create_task(run())
        try:
            yield load
        finally:
            task.cancel()
            await asyncio.wait([task])


async def seconds_until_open_circuits(mesh: Mesh, count: int) -> float:
    began_at = time.monotonic()
    async with httpx.AsyncClient(base_url=mesh.url, trust_env=False, timeout=WAIT_S) as client:

        async def is_reached() -> bool:
            text = (await client.get("/metrics")).text
            return f"{OPEN_CIRCUITS} {float(count)}" in text

        await until(is_reached, f"{count} open circuits")
    return time.monotonic() - began_at


async def status_of(folder: Path, worker: Service) -> Row:
    rows = await gather(ServiceConfig(registry_path=folder / "registry"))
    (row,) = [row for row in rows if row.instance.id == worker.instance_id]
    return row


async def reason_of_exclusion(mesh: Mesh, worker: Service) -> str:
    """Why a request is not placed on a worker, as its router explains it."""
    await asyncio.to_thread(mesh.post_completion, "explained", "Why not there?")
    request = router_pb2.ExplainRequest(request_id=mesh.request_line("explained")["request_id"])
    (router,) = mesh.running("router")
    async with rpc.channel(router.address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        response: router_pb2.ExplainResponse
        response = await rpc.unary(stub.Explain, request, timeout_s=WAIT_S)
    rows = [row for row in response.candidates if row.worker.worker_id == worker.instance_id]
    return rows[0].excluded_reason


@pytest.mark.parametrize(
    "failure", ["raise", "raise at requests", "raise midway", "chunk after the end"]
)
async def test_clients_notice_little_of_a_failing_engine(
    mesh: Mesh, tmp_path: Path, mode: Path, oracle: Oracle, failure: str
) -> None:
    set_mode = mode.write_text
    worker = failing_worker(mesh)
    async with steady_load(mesh, oracle) as load:
        await until(lambda: len(load.results) >= 20, "the load runs")
        set_mode(failure)
        failed_at = load.results[-1][0]
        out_s = await seconds_until_open_circuits(mesh, 1)
        if failure == "raise":

            async def is_failing() -> bool:
                return (await status_of(tmp_path, worker)).health == FAILING

            await until(is_failing, "its own probe fails")
            assert "CUDA error" in (await status_of(tmp_path, worker)).failure
            (opened,) = mesh.frontend.events("worker_circuit_opened")
            assert re.fullmatch(OPENED, opened["reason"])
            # The report of the worker, with its next heartbeat, replaces the first reason.
            await until(lambda: mesh.frontend.events("worker_engine_fails"), "it is reported")
            assert await reason_of_exclusion(mesh, worker) == EXCLUDED
        await until(lambda: load.results[-1][0] >= failed_at + LOAD_S, "the load has run")
        set_mode("")
        well_at = time.monotonic()
        await seconds_until_open_circuits(mesh, 0)
        finished = worker.counters().get("finished", 0)
        await until(
            lambda: worker.counters().get("finished", 0) > finished + 3, "the worker serves again"
        )
        back_s = time.monotonic() - well_at
        assert (await status_of(tmp_path, worker)).failure == ""
    print(f"{failure}: out after {out_s:.2f} s, back after {back_s:.2f} s; "
          f"{len(load.failures)} of {len(load.results)} failed")  # fmt: skip
    assert out_s < 5.0
    assert [at for at, _ in load.failures if at > failed_at + NO_ERRORS_AFTER_S] == []
    assert len(load.failures) <= ERROR_SHARE_MAX * len(load.results), load.failures[:5]
    assert all("wrong" not in problem for _, problem in load.failures)


async def test_a_request_that_fails_in_every_engine_excludes_no_worker(
    tmp_path: Path, mode: Path, oracle: Oracle
) -> None:
    set_mode = mode.write_text
    set_mode("raise at poison")
    flags = ["--speedup=10", "--engine=tests.e2e.failing_engine:make", f"--engine-args={mode}"]
    with Mesh(tmp_path, workers=3, worker_flags=flags) as mesh:
        async with steady_load(mesh, oracle) as load:
            statuses = []
            for number in range(POISON_REQUESTS):
                poison = await asyncio.to_thread(mesh.post_completion, f"poison-{number}", POISON)
                statuses.append(poison.status_code)
            line = mesh.request_line("poison-0")
        assert statuses == [500] * POISON_REQUESTS
        assert len(set(line["workers"])) == 2, "it was tried on two workers"
        assert load.failures == []
        assert mesh.frontend.events("worker_circuit_opened") == []
        failed = sum(worker.counters()["failed"] for worker in mesh.workers)
        assert failed == 2 * POISON_REQUESTS
