"""A router over a real gRPC socket with the memory registry, and a frontend's end of a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio

from common.errors import MeshError
from common.registry.instances import Instance
from common.registry.registry import Lease, MemoryRegistry, MemoryStore
from common.rpc import channel as rpc
from common.rpc.status import mesh_error_from_rpc
from common.service.health import HealthReporter
from common.service.lifecycle import Lifecycle
from common.wire.errors import error_from_proto
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.router.v1 import router_pb2_grpc
from router_svc.app import RouterApp
from router_svc.config import RouterConfig
from tests.kit.apps import living
from tests.kit.clock import Clock
from tests.kit.waiting import WAIT_S, until

NS = "default"
FRONTEND = 77
NOTHING: Mapping[str, Any] = MappingProxyType({})


class LocalRouter:
    """A running router, the registry it watches, and a channel to it.

    query, worker: default fields of queries and workers.
    """

    def __init__(
        self,
        app: RouterApp,
        registry: MemoryRegistry,
        lifecycle: Lifecycle,
        clock: Clock,
        query: Mapping[str, Any],
        worker: Mapping[str, Any],
    ) -> None:
        self.app = app
        self.router = app.router
        self.decisions = app._service.decisions
        self.registry = registry
        self.lifecycle = lifecycle
        self.clock = clock
        self.leases: dict[int, Lease] = {}
        self.channel = rpc.channel(app.address)
        self.stub = router_pb2_grpc.RouterServiceStub(self.channel)
        self.is_running = True
        self._query = query
        self._worker = worker

    async def add(self, *instances: Instance) -> None:
        for instance in instances:
            self.leases[instance.id] = await self.registry.register(instance)
        await self.sees(*(instance.id for instance in instances))

    async def add_workers(self, *worker_ids: int, **fields: Any) -> None:
        given: dict[str, Any] = {"model": "m", "block_size": 16, **self._worker, **fields}
        await self.add(
            *(Instance(one, NS, "worker", "", "127.0.0.1:1", **given) for one in worker_ids)
        )

    async def sees(self, *worker_ids: int) -> None:
        fleet = self.router.fleet
        await until(lambda: all(map(fleet.is_present, worker_ids)), "the router sees the workers")

    @asynccontextmanager
    async def session(
        self, frontend_id: int = FRONTEND, *announced: pb.Booking
    ) -> AsyncIterator[Session]:
        call = self.stub.Session()
        async with rpc.cancelling(call):
            session = Session(call, self._query)
            hello = pb.SessionHello(frontend_id=frontend_id)
            await session.send(hello=hello, announced=announced)
            session.hello_ack = (await session.read()).hello_ack
            assert session.hello_ack.router_id == self.app.instance_id
            yield session

    async def unary(self, method: str, request: Any) -> Any:
        return await rpc.unary(getattr(self.stub, method), request, timeout_s=WAIT_S)

    async def route(self, number: int, **query: Any) -> pb.Decision:
        """A booked decision by a Route call, without a session."""
        request = pb.RouteRequest(
            query=query_of(**{**self._query, **query}),
            book=True,
            key=key(number),
            frontend_id=FRONTEND,
        )
        decision: pb.Decision = (await self.unary("Route", request)).decision
        return decision

    async def waiting(self, count: int) -> None:
        await until(lambda: len(self.router.queue) == count, f"{count} requests are queued")

    def metric(self, name: str, **labels: str) -> float:
        found = self.app.metrics.registry.get_sample_value(f"kvmesh_router_{name}", labels)
        assert found is not None, name
        return found

    async def die(self) -> None:
        """Like SIGKILL: connections break without a message; discovery still shows the router."""
        self.is_running = False
        await self.app._server.stop(None)
        self.lifecycle.drain("killed")
        assert await self.lifecycle.cancel_tasks(WAIT_S) == []


class Session:
    """The frontend's end of a session."""

    def __init__(self, call: Any, query: Mapping[str, Any] = NOTHING) -> None:
        self.call = call
        self.hello_ack = pb.SessionHelloAck()
        self._query = query

    async def send(self, **parts: Any) -> None:
        await self.call.write(pb.SessionRequest(**parts))

    async def read(self) -> pb.SessionResponse:
        """The next frame; the router's error if the stream ended with one, else EOFError."""
        async with asyncio.timeout(WAIT_S):
            try:
                frame = await self.call.read()
                if frame is grpc.aio.EOF:
                    await self.call.wait_for_connection()
                    raise EOFError(await self.call.code())
            except grpc.aio.AioRpcError as error:
                raise mesh_error_from_rpc(error) from error
        assert isinstance(frame, pb.SessionResponse)
        return frame

    async def results(self, count: int) -> list[pb.NewResult]:
        """The next `count` results, in any number of frames, each once."""
        results: list[pb.NewResult] = []
        async with asyncio.timeout(WAIT_S):
            while len(results) < count:
                results += (await self.read()).results
        assert len({result.id for result in results}) == len(results) == count
        return results

    async def results_by_id(self, count: int) -> dict[int, pb.NewResult]:
        """The next `count` results by id."""
        return {result.id: result for result in await self.results(count)}

    async def next_results_by_id(self) -> dict[int, pb.NewResult]:
        """The results of the next frame, by id."""
        return {result.id: result for result in (await self.read()).results}

    async def send_queries(self, *numbers: int, **query: Any) -> None:
        await self.send(news=[new(number, **{**self._query, **query}) for number in numbers])

    async def place(self, number: int, **query: Any) -> pb.NewResult:
        await self.send_queries(number, **query)
        return (await self.results(1))[0]


def query_of(**fields: Any) -> pb.Query:
    return pb.Query(**{"model": "m", "total_tokens": 100, **fields})


def key(number: int) -> pb.BookingKey:
    return pb.BookingKey(request_id=f"r{number}")


def new(number: int, **query: Any) -> pb.New:
    return pb.New(id=number, key=key(number), query=query_of(**query))


def error_of(result: pb.NewResult) -> MeshError:
    assert result.HasField("error"), result
    return error_from_proto(result.error)


@asynccontextmanager
async def local_router(
    watched: MemoryRegistry | None = None,
    *,
    store: MemoryStore | None = None,
    registered: bool = True,
    query: Mapping[str, Any] = NOTHING,
    worker: Mapping[str, Any] = NOTHING,
    **settings: Any,
) -> AsyncIterator[LocalRouter]:
    """watched: the router's registry; by default it shares its store with the registry of the
    tests. store: shared with other routers. registered: see `living`. query, worker: see
    `LocalRouter`.
    """
    store, clock = store or MemoryStore(), Clock()
    app = RouterApp(
        RouterConfig(registry="memory", **settings),
        registry=watched or MemoryRegistry(store),
        rng=Random(1),
        clock=clock,
    )
    lifecycle, registry = Lifecycle(HealthReporter()), MemoryRegistry(store)
    async with living(app, lifecycle, registered=registered):
        router = LocalRouter(app, registry, lifecycle, clock, query, worker)
        try:
            yield router
        finally:
            await router.channel.close()
            await registry.close()
