"""Routers and indexers that die and return in any order, as real processes under load."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from tests.e2e.mesh import MODEL, WAIT_S, Mesh, Oracle, Service

pytestmark = pytest.mark.slow

CLIENTS = 4
TOKENS = 20
# Requests without a router wait this long before their frontend places them by itself.
UNROUTED_S = 3.0
LONG_S = 60.0
LONG_STREAMS = 6

T = TypeVar("T")
Bookings = dict[tuple[int, str, int], tuple[int, int]]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture
def start(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., AbstractContextManager[Mesh]]]:
    """Starts a mesh whose logs are shown when the test fails."""

    @contextmanager
    def started(**shape: Any) -> Iterator[Mesh]:
        given = {"routers": 2, "indexers": 2, "router_flags": ["--metrics-port=0"], **shape}
        with Mesh(tmp_path, frontends=2, **given) as mesh:
            meshes.append(mesh)
            yield mesh

    meshes: list[Mesh] = []
    failed_before = request.session.testsfailed
    yield started
    if request.session.testsfailed > failed_before:
        for mesh in meshes:
            print(mesh.logs())


def now() -> float:
    return time.monotonic()


async def until(condition: Callable[[], T | None], what: str, timeout_s: float = LONG_S) -> T:
    """The first true value; asked in a thread, since it asks processes."""
    deadline = now() + timeout_s
    while not (value := await asyncio.to_thread(condition)):
        assert now() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.01)
    return value


class Load:
    """Clients that ask one request after the other, each at its own frontend."""

    def __init__(self, urls: Sequence[str], oracle: Oracle) -> None:
        self.urls = urls
        self.answered = 0
        self.slowest_s = 0.0
        self.failures: list[str] = []
        self._oracle = oracle

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        async with httpx.AsyncClient(timeout=LONG_S, trust_env=False) as http:
            clients = [asyncio.create_task(self._run(http, n)) for n in range(CLIENTS)]
            try:
                await self.goes_on()
                yield self
                assert not any(client.done() for client in clients), clients
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.wait(clients)

    async def goes_on(self, count: int = 3 * CLIENTS) -> None:
        """Returns when so many more were answered."""
        wanted = self.answered + count
        await until(lambda: self.answered >= wanted, "requests are answered")

    async def _run(self, http: httpx.AsyncClient, number: int) -> None:
        url = self.urls[number % len(self.urls)]
        prompt = f"Client number {number} " * 12
        expected = self._oracle.completion(prompt, TOKENS, ignore_eos=True).text
        while True:
            began = now()
            answer = await http.post(f"{url}/v1/completions", json=body_of(prompt, TOKENS))
            if answer.status_code != 200:
                self.failures.append(answer.text)
            elif answer.json()["choices"][0]["text"] != expected:
                self.failures.append(f"inexact: {answer.text}")
            self.slowest_s = max(self.slowest_s, now() - began)
            self.answered += 1


def body_of(prompt: str, tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}


def bookings(router: Service) -> Bookings:
    """What a router holds: worker and prefill tokens by key. Blocks grow with the answer."""
    stub = router_pb2_grpc.RouterServiceStub(router.channel)
    return {
        (b.frontend_id, b.key.request_id, b.key.attempt): (b.worker.worker_id, b.prefill_tokens)
        for b in stub.Dump(router_pb2.DumpRequest(), timeout=WAIT_S).bookings
    }


def gauge(router: Service, name: str) -> float:
    text = httpx.get(f"http://{router.addresses['metrics']}/metrics", trust_env=False).text
    families = text_string_to_metric_families(text)
    (value,) = (s.value for f in families for s in f.samples if s.name == f"kvmesh_router_{name}")
    return value


def is_balanced(mesh: Mesh) -> bool:
    """Whether each router has a peer, and one of the two frontends."""
    return all(
        (gauge(router, "sessions"), gauge(router, "peers")) == (1, 1)
        for router in mesh.of("router")
    )


def is_exact(indexer: Service, workers: int) -> bool:
    """Whether an indexer claims of every worker exactly what that holds."""
    stub = indexer_pb2_grpc.IndexerServiceStub(indexer.channel)
    found = stub.Verify(indexer_pb2.VerifyRequest(), timeout=WAIT_S).sources
    return len(found) == workers and all(
        s.equal > 0 and s.extra == s.missing == 0 and not s.error for s in found
    )


async def replace(mesh: Mesh, load: Load, victims: Sequence[Service]) -> None:
    """kill -9 of all of them; requests go on without; then as many new ones."""
    for victim in victims:
        victim.process.kill()
    for victim in victims:
        await asyncio.to_thread(victim.process.wait, WAIT_S)
    await load.goes_on()
    for service in [mesh.spawn(victim.kind) for victim in victims]:
        await asyncio.to_thread(service.wait_ready)
    await load.goes_on()
    assert load.failures == []


async def test_routers_and_indexers_die_and_return_in_any_order_and_no_request_fails(
    start: Any, oracle: Oracle
) -> None:
    with start(workers=2) as mesh:
        async with Load(mesh.urls, oracle).running() as load:
            await until(lambda: is_balanced(mesh), "each router has a frontend")
            for kind in ("router", "indexer"):
                for _ in range(2):
                    await replace(mesh, load, mesh.of(kind)[:1])
                await replace(mesh, load, mesh.of(kind))
            await replace(mesh, load, [mesh.of("router")[0], mesh.of("indexer")[0]])
            await until(lambda: is_balanced(mesh), "frontends have gone home again")
            print(f"{load.answered} answered, the slowest in {load.slowest_s:.2f} s")
        routers, indexers = mesh.of("router"), mesh.of("indexer")
        await until(lambda: not any(map(bookings, routers)), "no booking is left at either router")
        for indexer in indexers:
            await until(partial(is_exact, indexer, 2), "the index is exact")


async def test_books_of_both_routers_agree_through_the_death_of_one(
    start: Any,
) -> None:
    """kill -9 of one router amid long streams: within a second the new one has all their loads."""
    with start(indexers=0, worker_flags=["--speedup=0.2"]) as mesh:
        async with httpx.AsyncClient(timeout=LONG_S, trust_env=False) as http:
            streams = [
                asyncio.create_task(
                    http.post(
                        f"{mesh.urls[n % 2]}/v1/completions", json=body_of(f"Stream {n}", 4000)
                    )
                )
                for n in range(LONG_STREAMS)
            ]
            try:
                await until(lambda: is_balanced(mesh), "each router has a frontend")
                held = await until(lambda: agreed(mesh, LONG_STREAMS), "both know all bookings")
                for _ in range(2):
                    victim = mesh.of("router")[0]
                    victim.kill()
                    killed_at = now()
                    (left,) = mesh.of("router")
                    await until(partial(holds, left, held), "orphans count, and are announced")
                    new = mesh.spawn("router")
                    await asyncio.to_thread(new.wait_ready)
                    ready_at = now()
                    await until(partial(holds, new, held), "the new one learns them")
                    right_s = now() - ready_at
                    await until(partial(is_balanced, mesh), "frontends have gone home again")
                    print(
                        f"new router ready {ready_at - killed_at:.2f} s after the kill, right "
                        f"{right_s:.3f} s later, balanced after {now() - ready_at:.2f} s"
                    )
                    await until(lambda: agreed(mesh, LONG_STREAMS) == held, "the books agree")
            finally:
                for stream in streams:
                    stream.cancel()
                await asyncio.wait(streams)
        await until(lambda: not any(map(bookings, mesh.of("router"))), "all are free")


def holds(router: Service, held: Bookings) -> bool:
    return bookings(router) == held


def agreed(mesh: Mesh, count: int) -> Bookings | None:
    """What all routers hold, if that is the same, prefilled, and so many."""
    held = [bookings(router) for router in mesh.of("router")]
    same = all(one == held[0] for one in held) and len(held[0]) == count
    return held[0] if same and all(b[1] == 0 for b in held[0].values()) else None


async def test_a_router_that_restarts_alone_under_load_is_right_again_within_a_second(
    start: Any, oracle: Oracle
) -> None:
    with start(routers=1, indexers=0) as mesh:
        async with (
            Load(mesh.urls, oracle).running() as load,
            httpx.AsyncClient(timeout=LONG_S, trust_env=False) as http,
        ):
            body = body_of("A long answer", 3000)
            stream = asyncio.create_task(http.post(f"{mesh.url}/v1/completions", json=body))
            try:
                await until(lambda: len(bookings(mesh.router)) > CLIENTS, "the stream is booked")
                mesh.router.kill()
                new = mesh.spawn("router")
                await asyncio.to_thread(new.wait_ready)
                ready_at = now()
                await until(lambda: gauge(new, "sessions") == 2, "both frontends are back")
                back_s = now() - ready_at
                await until(lambda: len(bookings(new)) > 0, "they have announced what they hold")
                await load.goes_on()
                print(f"sessions back {back_s:.2f} s after the router was ready; slowest request "
                      f"{load.slowest_s:.2f} s")  # fmt: skip
                assert load.failures == []
            finally:
                stream.cancel()
                await asyncio.wait([stream])
        await until(lambda: not bookings(mesh.router), "all are free")


async def test_a_router_that_hangs_is_left_and_gone_back_to_when_it_goes_on(
    start: Any, oracle: Oracle
) -> None:
    with start(indexers=0) as mesh:
        async with Load(mesh.urls, oracle).running() as load:
            await until(lambda: is_balanced(mesh), "each router has a frontend")
            hung, other = mesh.of("router")
            hung.send(signal.SIGSTOP)
            try:
                await until(lambda: gauge(other, "sessions") == 2, "the other one has both")
                await load.goes_on()
            finally:
                hung.send(signal.SIGCONT)
            await until(lambda: is_balanced(mesh), "frontends have gone home again")
            assert load.failures == []
            print(f"the slowest request took {load.slowest_s:.2f} s")
        await until(lambda: not any(map(bookings, mesh.of("router"))), "all are free")
