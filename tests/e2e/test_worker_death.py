"""Workers, routers and frontends that die, hang or leave under load: effects on clients."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.chaos.client import body_of
from tests.kit.oracle import Oracle
from tests.kit.processes import Mesh, Service, mesh_fixture
from tests.kit.waiting import WAIT_S, until, wait_for

pytestmark = pytest.mark.slow

STREAMS = 16
# About 7 ms a token: a stream lasts long enough to lose its worker in the middle.
TOKENS = 150
PROBE_INTERVAL_S = 0.02
# Discovery reports a dead process within 50 ms; the rest is for a busy machine.
OUTAGE_MAX_S = 1.0
# A frontend waits 3 s for a router, then selects workers itself: not twice that.
UNROUTED_MAX_S = 6.0
# Three heartbeats of a second each, and the migration. Stalls of the frontend delay it on a busy
# machine (see `common/streams/stall_clock.py`).
HANG_RECOVERY_MAX_S = 10.0
# Longer than three heartbeats, after which a silent worker is lost.
STOPPED_S = 5.0
# Such a stream has not ended when its worker dies.
LONG_STREAM_TOKENS = 2000

shared_mesh = mesh_fixture()


@dataclass(slots=True)
class Stream:
    """What a client has received of a stream."""

    prompt: str
    text: str = ""
    events: int = 0
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    status: int = 0


@dataclass(slots=True)
class Probe:
    """Results of short requests, sent one after the other: loop time, status, error code."""

    results: list[tuple[float, int, str]] = field(default_factory=list)

    @property
    def failures(self) -> list[tuple[float, int, str]]:
        return [result for result in self.results if result[1] != 200]

    def outage_s(self) -> float:
        """Returns the longest time between two successes with a failure between them."""
        longest, last_success_at, has_failure = 0.0, None, False
        for at, status, _ in self.results:
            if status != 200:
                has_failure = True
                continue
            if has_failure and last_success_at is not None:
                longest = max(longest, at - last_success_at)
            last_success_at, has_failure = at, False
        return longest


@pytest.fixture
def mesh(shared_mesh: Mesh) -> Mesh:
    """The mesh of the module with two workers and a router, of which the test may end some."""
    for kind, count in (("worker", 2), ("router", 1)):
        for _ in range(count - len(shared_mesh.running(kind))):
            shared_mesh.spawn(kind).wait_ready()
    wait_for(shared_mesh.is_complete, "the frontend uses the router and both workers")
    return shared_mesh


def now() -> float:
    return asyncio.get_running_loop().time()


async def read_stream(client: httpx.AsyncClient, stream: Stream, tokens: int = TOKENS) -> None:
    """Streams one completion into `stream`."""
    body = body_of(stream.prompt, tokens, stream=True)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        stream.status = response.status_code
        if response.status_code != 200:
            stream.error = json.loads(await response.aread())["error"]
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                stream.error = event["error"]
                return
            choice = event["choices"][0]
            stream.text += choice["text"]
            stream.events += 1
            stream.finish_reason = choice["finish_reason"] or stream.finish_reason


@asynccontextmanager
async def open_client(mesh: Mesh, url: str = "") -> AsyncIterator[httpx.AsyncClient]:
    """A client of the frontend at `url`, by default of the oldest one."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url or mesh.url, timeout=WAIT_S, trust_env=False, limits=limits
    ) as client:
        yield client


@asynccontextmanager
async def open_streams(
    client: httpx.AsyncClient, count: int = STREAMS, tokens: int = TOKENS
) -> AsyncIterator[tuple[list[Stream], asyncio.Future[Any]]]:
    """Opens streams; yields them once all have begun, with a future of their end."""
    streams = [Stream(f"Stream number {number}") for number in range(count)]
    end = asyncio.gather(*(read_stream(client, stream, tokens) for stream in streams))
    try:
        await until(lambda: all(s.events >= 5 for s in streams), "all streams have begun")
        yield streams, end
    finally:
        end.cancel()
        await asyncio.wait([end])


@asynccontextmanager
async def run_probe(client: httpx.AsyncClient) -> AsyncIterator[Probe]:
    """Sends short requests until the block ends."""
    probe = Probe()

    async def run() -> None:
        # Ends: the block cancels it.
        while True:
            body = body_of(f"Probe {len(probe.results)}", 2, stream=False)
            response = await client.post("/v1/completions", json=body)
            code = "" if response.status_code == 200 else response.json()["error"]["code"]
            probe.results.append((now(), response.status_code, code))
            # Sleep: the pace of the probe.
            await asyncio.sleep(PROBE_INTERVAL_S)

    task = asyncio.create_task(run())
    try:
        await until(lambda: len(probe.results) >= 3, "the probe has results")
        yield probe
        assert not task.done(), f"the probe failed: {task}"
    finally:
        task.cancel()
        await asyncio.wait([task])


def assert_exact(streams: list[Stream], oracle: Oracle, tokens: int = TOKENS) -> None:
    for stream in streams:
        assert stream.error is None, stream
        expected = oracle.completion(stream.prompt, tokens, ignore_eos=True)
        assert (stream.text, stream.finish_reason) == (expected.text, "length")


def busiest_worker(mesh: Mesh) -> Service:
    return max(mesh.workers, key=Service.open_slots)


def logged_requests(mesh: Mesh) -> list[dict[str, Any]]:
    return mesh.frontend.events("request")


async def test_streams_of_a_killed_worker_migrate_without_an_error(
    mesh: Mesh, oracle: Oracle
) -> None:
    before = len(logged_requests(mesh))
    # Twice as long as elsewhere, so that none ends before the slots are counted.
    async with (
        open_client(mesh) as client,
        run_probe(client) as probe,
        open_streams(client, STREAMS, 2 * TOKENS) as (streams, end),
    ):
        victim = busiest_worker(mesh)
        held = victim.open_slots()
        victim.kill()
        await asyncio.wait_for(end, WAIT_S)
        assert held > 0
        assert_exact(streams, oracle, 2 * TOKENS)
        assert probe.outage_s() < OUTAGE_MAX_S
        print(f"{held} migrated; probe: {len(probe.failures)} failed, outage "
              f"{probe.outage_s():.3f} s")  # fmt: skip
    await until(
        lambda: len(logged_requests(mesh)) >= before + STREAMS, "the streams are in the log"
    )
    logged = logged_requests(mesh)[before:]
    migrated = [r for r in logged if r["attempts"] > 1 and r["status"] == 200]
    assert len(migrated) >= held - 1, "streams that did not migrate had ended before"
    assert all(len(r["workers"]) == r["attempts"] for r in migrated)


async def test_without_a_worker_and_a_wait_requests_get_503_until_a_worker_is_back(
    start: Any, oracle: Oracle
) -> None:
    with start(workers=1, frontend_flags=["--worker-wait-s=0"]) as mesh:
        async with open_client(mesh) as client, run_probe(client) as probe:
            async with open_streams(client, 4, LONG_STREAM_TOKENS) as (streams, end):
                mesh.workers[0].kill()
                killed_at = now()
                await asyncio.wait_for(end, WAIT_S)
                for stream in streams:
                    assert stream.error is not None
                    assert stream.error["type"] == "server_error"
                    assert stream.finish_reason is None
            await until(lambda: probe.failures, "a request fails")
            await until(lambda: len(probe.failures) >= 20, "requests still fail")
            print({code for _, _, code in probe.failures}, f"{probe.failures[0][0] - killed_at:.3f}"
                  " s to the first refusal")  # fmt: skip
            assert probe.failures[0][0] - killed_at < OUTAGE_MAX_S
            # worker_lost: the router placed each attempt on the dead worker before discovery
            # reported its death.
            codes = {(status, code) for _, status, code in probe.failures}
            assert codes <= {(503, "unavailable"), (503, "worker_lost")}
            assert probe.failures[-1][1:] == (503, "unavailable")
            refused = await client.post("/v1/completions", json=body_of("x", 1, stream=False))
            assert refused.headers["retry-after-ms"]
            assert "no worker" in refused.json()["error"]["message"]
            assert (await client.get("/v1/models")).json()["data"] == []
            assert (await client.get("/ready")).status_code == 503

            spawned_at = now()
            worker = mesh.spawn("worker")
            await asyncio.to_thread(worker.wait_ready)
            ready_at = now()
            await until(lambda: probe.results[-1][1] == 200, "requests succeed again")
            print(f"served {now() - ready_at:.3f} s after the worker was ready, "
                  f"{now() - spawned_at:.3f} s after its start")  # fmt: skip
            assert now() - ready_at < OUTAGE_MAX_S
        assert {r["failure"] for r in logged_requests(mesh) if r["status"] == 503} <= {
            # Errors of the frontend and of the router without a worker.
            *("NO_WORKER", "ALL_EXCLUDED", "MODEL_LOADING"),
            # The last attempt: its stream ended, broke, or could not be opened.
            *("WORKER_LOST", "UNAVAILABLE"),
        }


@pytest.mark.parametrize(
    ("drain_s", "tokens"),
    [(30, TOKENS), (0.2, 2 * TOKENS)],
    ids=["streams end", "streams are cut"],
)
async def test_no_request_fails_while_a_worker_drains(
    mesh: Mesh, oracle: Oracle, drain_s: float, tokens: int
) -> None:
    draining = mesh.spawn("worker", f"--drain-s={drain_s}").wait_ready()
    await asyncio.to_thread(draining.wait_routable)
    async with (
        open_client(mesh) as client,
        run_probe(client) as probe,
        open_streams(client, STREAMS, tokens) as (streams, end),
    ):
        assert draining.open_slots() > 0
        draining.send(signal.SIGTERM)
        status = await asyncio.to_thread(draining.wait)
        await asyncio.wait_for(end, WAIT_S)
        assert_exact(streams, oracle, tokens)
        answered = len(probe.results)
        await until(lambda: len(probe.results) >= answered + 10, "the other workers serve")
        assert probe.failures == []
    assert status == 0, draining.tail()
    was_cut = draining.events("calls_cancelled")
    assert bool(was_cut) == (drain_s < 1)


async def test_the_last_worker_completes_its_streams_before_it_exits(
    start: Any, oracle: Oracle
) -> None:
    with start(workers=1) as mesh:
        async with open_client(mesh) as client, open_streams(client) as (streams, end):
            worker = mesh.workers[0]
            worker.send(signal.SIGTERM)
            # A stream that lost its last frame could not migrate: there is no other worker.
            await asyncio.wait_for(end, WAIT_S)
            assert_exact(streams, oracle)
            assert await asyncio.to_thread(worker.wait) == 0


async def test_streams_of_a_hung_worker_migrate(mesh: Mesh, oracle: Oracle) -> None:
    async with open_client(mesh) as client, open_streams(client) as (streams, end):
        hung = busiest_worker(mesh)
        assert hung.open_slots() > 0
        hung.send(signal.SIGSTOP)
        began = now()
        try:
            await asyncio.wait_for(end, WAIT_S)
        finally:
            hung.send(signal.SIGCONT)
        print(f"all ended {now() - began:.1f} s after the hang began")
        assert now() - began < HANG_RECOVERY_MAX_S
        assert_exact(streams, oracle)
        await until(lambda: hung.open_slots() == 0, "the worker frees its slots")


async def test_a_frontend_that_was_stopped_does_not_migrate_its_streams(
    mesh: Mesh, oracle: Oracle
) -> None:
    async def totals() -> dict[str, float]:
        text = (await client.get("/metrics")).text
        pattern = r"^kvmesh_(frontend_retries|event_loop_stalled_seconds)_total (.+)"
        return {name: float(value) for name, value in re.findall(pattern, text, re.M)}

    async with open_client(mesh) as client:
        before = await totals()
        async with open_streams(client) as (streams, end):
            mesh.frontend.send(signal.SIGSTOP)
            # Sleep: the frontend is stopped for this time.
            await asyncio.sleep(STOPPED_S)
            mesh.frontend.send(signal.SIGCONT)
            await asyncio.wait_for(end, WAIT_S)
            assert_exact(streams, oracle)
            after = await totals()
    assert after["frontend_retries"] == before["frontend_retries"]
    stalled_s = after["event_loop_stalled_seconds"] - before["event_loop_stalled_seconds"]
    assert stalled_s > STOPPED_S - 1.0


async def test_no_request_fails_while_a_frontend_drains(mesh: Mesh, oracle: Oracle) -> None:
    async def persistent(client: httpx.AsyncClient, number: int) -> int:
        """Sends requests on one connection until a response closes it; returns their number."""
        prompt, count = f"Client {number}", 0
        expected = oracle.completion(prompt, 10, ignore_eos=True).text
        # Ends: the server closes; the test waits with a limit.
        while True:
            response = await client.post("/v1/completions", json=body_of(prompt, 10, stream=False))
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["text"] == expected
            count += 1
            if response.headers.get("connection") == "close":
                return count

    # Time for the next request of each client: its response closes the connection.
    draining = mesh.spawn("frontend", "--notice-s=2").wait_ready()
    await until(mesh.is_complete, "the new frontend uses the router and both workers")
    url = draining.addresses["http"]
    async with open_client(mesh, url) as client, open_streams(client) as (streams, end):
        clients = [asyncio.create_task(persistent(client, number)) for number in range(8)]
        draining.send(signal.SIGTERM)
        counts = await asyncio.wait_for(asyncio.gather(*clients), WAIT_S)
        assert all(counts)
        await asyncio.wait_for(end, WAIT_S)
        assert_exact(streams, oracle)
        began = now()
        assert await asyncio.to_thread(draining.wait) == 0
        print(f"ended {now() - began:.2f} s after its last response")
    assert draining.events("calls_cancelled") == []


async def test_streams_longer_than_the_frontends_drain_end_with_a_typed_error(
    mesh: Mesh,
) -> None:
    draining = mesh.spawn("frontend", "--notice-s=0", "--drain-s=0.2").wait_ready()
    await until(mesh.is_complete, "the new frontend uses the router and both workers")
    async with (
        open_client(mesh, draining.addresses["http"]) as client,
        open_streams(client, 4, LONG_STREAM_TOKENS) as (streams, end),
    ):
        draining.send(signal.SIGTERM)
        await asyncio.wait_for(end, WAIT_S)
        assert await asyncio.to_thread(draining.wait) == 0
    for stream in streams:
        assert stream.error is not None
        assert stream.error["code"] == "unavailable"


async def test_without_a_router_streams_continue_and_new_requests_are_served(
    mesh: Mesh, oracle: Oracle
) -> None:
    before = len(logged_requests(mesh))
    async with (
        open_client(mesh) as client,
        open_streams(client, STREAMS, 600) as (streams, end),
    ):
        mesh.router.kill()
        began = now()
        late_stream = Stream("Late")
        await asyncio.wait_for(read_stream(client, late_stream, 10), WAIT_S)
        took_s = now() - began
        assert_exact([late_stream], oracle, 10)
        print(f"served unrouted after {took_s:.2f} s")
        assert took_s < UNROUTED_MAX_S
        health = (await client.get("/health")).json()
        assert (health["status"], health["reasons"]) == ("healthy", [])
        assert any("no router answers" in reason for reason in health["degraded"])
        await asyncio.wait_for(end, WAIT_S)
        assert_exact(streams, oracle, 600)

        router = mesh.spawn("router")
        await asyncio.to_thread(router.wait_ready)
        ready_at = now()
        await until(mesh.is_complete, "the frontend uses the new router")
        print(f"routed again {now() - ready_at:.2f} s after the router was ready")
        second_stream = Stream("Again")
        began = now()
        await asyncio.wait_for(read_stream(client, second_stream, 10), WAIT_S)
        assert now() - began < OUTAGE_MAX_S

    def late_requests() -> list[dict[str, Any]]:
        return [r for r in logged_requests(mesh)[before:] if r["completion_tokens"] == 10]

    await until(lambda: len(late_requests()) == 2, "both requests are in the log")
    unrouted, routed = (" ".join(r["routing"]) for r in late_requests())
    assert "unrouted" in unrouted
    assert "unrouted" not in routed
    assert all(r["attempts"] == 1 for r in logged_requests(mesh)[before:])
    assert mesh.frontend.events("router_lost")
