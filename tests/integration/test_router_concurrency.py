"""Many callers at once, and callers that wait: nothing is lost or booked twice, over real gRPC."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest

from common import rpc
from common.error_proto import error_from_proto
from common.errors import (
    Conflict,
    MeshError,
    Overloaded,
    RequestCancelled,
    Unavailable,
)
from common.instances import Instance
from common.interceptors import from_rpc_error
from common.lifecycle import Health, Life
from common.registry import Lease, MemoryRegistry, MemoryStore
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.router.v1 import router_pb2_grpc
from router_svc.app import RouterApp
from router_svc.config import RouterConfig
from router_svc.core.fleet import Placement
from router_svc.core.load import Totals

NS = "default"
FRONTEND = 77
BATCH = 1000
TOKENS = 2 * BATCH  # One such prompt makes a worker busy.
WAIT_S = 20.0


class Bed:
    """A running router over a socket, and the registry it follows; its clock is set by hand."""

    def __init__(self, app: RouterApp, registry: MemoryRegistry) -> None:
        self.app = app
        self.router = app.router
        self.decisions = app._service.decisions
        self.registry = registry
        self.now = 1000.0
        self.leases: dict[int, Lease] = {}
        self.channel: grpc.aio.Channel
        self.stub: Any

    async def add_workers(self, *worker_ids: int) -> None:
        for worker_id in worker_ids:
            self.leases[worker_id] = await self.registry.register(
                Instance(
                    worker_id,
                    NS,
                    "worker",
                    "",
                    "127.0.0.1:1",
                    model="m",
                    block_size=16,
                    max_num_batched_tokens=BATCH,
                )
            )
        await until(lambda: self.router.fleet.worker_count >= len(self.leases), "workers seen")

    async def route(self, number: int, **query: Any) -> pb.Decision:
        request = pb.RouteRequest(
            query=query_of(**query), book=True, key=key(number), frontend_id=FRONTEND
        )
        response = await rpc.unary(self.stub.Route, request, timeout_s=WAIT_S)
        assert isinstance(response, pb.RouteResponse)
        return response.decision

    @asynccontextmanager
    async def session(self, frontend_id: int = FRONTEND) -> AsyncIterator[Session]:
        call = self.stub.Session()
        async with rpc.cancelling(call):
            session = Session(call)
            await session.send(hello=pb.SessionHello(frontend_id=frontend_id))
            session.hello_ack = (await session.read()).hello_ack
            yield session

    async def waiting(self, count: int) -> None:
        await until(lambda: len(self.router.queue) == count, f"{count} wait in the queue")

    async def metric(self, name: str, **labels: str) -> float:
        found = self.app.metrics.registry.get_sample_value(f"kvmesh_router_{name}", labels)
        assert found is not None, name
        return found


class Session:
    """A frontend's end."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.hello_ack = pb.SessionHelloAck()

    async def send(self, **parts: Any) -> None:
        await self.call.write(pb.SessionRequest(**parts))

    async def read(self) -> pb.SessionResponse:
        """The next frame; the router's error if the stream ended with one."""
        async with asyncio.timeout(WAIT_S):
            try:
                frame = await self.call.read()
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
        assert isinstance(frame, pb.SessionResponse), "the stream has ended"
        return frame

    async def results(self, count: int) -> dict[int, pb.NewResult]:
        """The next `count` answers by id, however they are framed."""
        results: list[pb.NewResult] = []
        while len(results) < count:
            results += (await self.read()).results
        by_id = {result.id: result for result in results}
        assert len(by_id) == len(results) == count, "an answer came twice"
        return by_id

    async def results_now(self) -> dict[int, pb.NewResult]:
        """The answers of the next frame, by id."""
        results = (await self.read()).results
        return {result.id: result for result in results}

    async def ask(self, *numbers: int, **query: Any) -> None:
        await self.send(news=[new(number, **query) for number in numbers])


def query_of(**facts: Any) -> pb.Query:
    return pb.Query(**{"model": "m", "total_tokens": TOKENS, **facts})


def key(number: int) -> pb.BookingKey:
    return pb.BookingKey(request_id=f"r{number}")


def new(number: int, **query: Any) -> pb.New:
    return pb.New(id=number, key=key(number), query=query_of(**query))


def error_of(result: pb.NewResult) -> MeshError:
    assert result.HasField("error"), result
    return error_from_proto(result.error)


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"never: {what}"
        await asyncio.sleep(0.002)


@asynccontextmanager
async def running(**knobs: Any) -> AsyncIterator[Bed]:
    store = MemoryStore()
    app = RouterApp(
        RouterConfig(registry="memory", **knobs),
        registry=MemoryRegistry(store),
        rng=Random(1),
        clock=lambda: mesh.now,
    )
    mesh = Bed(app, MemoryRegistry(store))
    life = Life(Health())
    await app.start(life)
    await life.health.open(True)
    await app.register()
    mesh.channel = rpc.channel(app.address)
    mesh.stub = router_pb2_grpc.RouterServiceStub(mesh.channel)
    try:
        yield mesh
    finally:
        await mesh.channel.close()
        await app.deregister()
        await app.drain(0)
        life.drain("test over")
        assert await life.cancel_tasks(WAIT_S) == []
        await app.close()
        await mesh.registry.close()


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    """One worker, and a queue."""
    async with running(queue_threshold=1.0) as bed:
        await bed.add_workers(1)
        yield bed


# A thousand at once.


@pytest.mark.slow
@pytest.mark.row("S1-105")
async def test_a_thousand_decisions_at_once_over_session_and_route_lose_and_double_none() -> None:
    async with running() as bed, bed.session() as one, bed.session() as other:
        await bed.add_workers(1, 2, 3, 4, 5)
        tokens = 100

        async def by_session(session: Session, numbers: range) -> list[int]:
            for number in numbers:
                await session.ask(number, total_tokens=tokens)
            answers = await session.results(len(numbers))
            assert set(answers) == set(numbers)
            return [answer.decision.worker.worker_id for answer in answers.values()]

        async def by_route(number: int) -> list[int]:
            return [(await bed.route(number, total_tokens=tokens)).worker.worker_id]

        placed = await asyncio.gather(
            by_session(one, range(400)),
            by_session(other, range(400, 800)),
            *(by_route(number) for number in range(800, 1000)),
        )
        at = Counter(worker_id for workers in placed for worker_id in workers)
        assert sum(at.values()) == 1000
        assert len(bed.router.book) == 1000
        for worker_id, requests in at.items():
            load = bed.router.book.load(Placement(worker_id, 0), bed.now)
            assert load == Totals(requests * tokens, requests * 7, requests)
        assert max(at.values()) - min(at.values()) <= 1, "each saw what all before it had booked"
        # All again, by other ways than before: the same answers, and no load twice.
        again = await asyncio.gather(*(by_route(number) for number in range(0, 1000, 5)))
        assert len(again) == 200
        assert len(bed.router.book) == 1000
        await one.send(frees=[key(number) for number in range(500)])
        await other.send(frees=[key(number) for number in range(500, 1000)])
        await until(lambda: len(bed.router.book) == 0, "all are freed")
        for worker_id in at:
            assert bed.router.book.load(Placement(worker_id, 0), bed.now) == Totals()


@pytest.mark.slow
@pytest.mark.row("S1-105", "S1-106")
async def test_a_thousand_that_wait_are_each_placed_once_and_never_two_on_a_busy_worker(
    bed: Bed,
) -> None:
    await bed.add_workers(2, 3, 4)
    async with bed.session() as session:
        for first in range(0, 1000, 100):
            await session.ask(*range(first, first + 100))
        open_ones, seen = set[int](), set[int]()
        while len(seen) < 1000:
            for number, answer in (await session.results_now()).items():
                assert number not in seen
                assert answer.HasField("decision"), answer
                open_ones.add(number)
                seen.add(number)
            loads = [bed.router.book.load(Placement(at, 0), bed.now) for at in (1, 2, 3, 4)]
            assert all(load.requests <= 1 for load in loads), "one prompt makes a worker busy"
            await session.send(frees=[key(number) for number in open_ones])
            open_ones.clear()
        await until(lambda: len(bed.router.book) == 0, "all are freed")
    assert len(bed.router.queue) == 0


@pytest.mark.row("S1-106")
async def test_a_booking_counts_before_its_caller_has_the_answer() -> None:
    async with running() as bed, bed.session() as session:
        await bed.add_workers(1, 2, 3, 4)
        await session.ask(*range(8))
        await until(lambda: len(bed.router.book) == 8, "all are booked; no answer was read yet")
        at = Counter(booking.worker.worker_id for booking in bed.router.book)
        assert at == {1: 2, 2: 2, 3: 2, 4: 2}, "no herd on one worker"
        assert len(await session.results(8)) == 8


# The queue over the wire.


@pytest.mark.row("S1-21")
async def test_a_new_that_must_wait_is_answered_when_a_worker_has_room(bed: Bed) -> None:
    async with bed.session() as session:
        await session.ask(1, 2, 3)
        assert set(await session.results(1)) == {1}
        await bed.waiting(2)
        bed.now += 0.25
        await session.send(prefills_done=[key(1)])
        (answer,) = (await session.results(1)).values()
        assert (answer.id, answer.decision.queued_ms) == (2, 250)
        await session.send(frees=[key(1), key(2)])
        assert set(await session.results(1)) == {3}
    assert await bed.metric("queue_wait_seconds_count") == 2
    assert await bed.metric("decisions_total", selector="kv", outcome="placed") == 3


async def test_a_route_waits_like_a_new_and_both_by_priority(bed: Bed) -> None:
    async with bed.session() as session:
        await bed.route(0)
        low = asyncio.ensure_future(bed.route(1))
        await bed.waiting(1)
        await session.ask(2, strict_priority=1)
        await bed.waiting(2)
        await session.send(frees=[key(0)])
        assert set(await session.results(1)) == {2}
        await session.send(frees=[key(2)])
        assert (await low).worker.worker_id == 1
        await session.send(frees=[key(1)])
        await until(lambda: len(bed.router.book) == 0, "all are freed")


async def test_what_waits_is_told_by_potential_loads_and_metrics(bed: Bed) -> None:
    async with bed.session() as session:
        await session.ask(1, 2, 3)
        await bed.waiting(2)
        request = pb.PotentialLoadsRequest(query=query_of(total_tokens=10))
        told = await rpc.unary(bed.stub.PotentialLoads, request, timeout_s=WAIT_S)
        assert (told.pending_count, told.pending_tokens) == (2, 2 * TOKENS)
        assert await bed.metric("queue_requests") == 2
        assert await bed.metric("queue_tokens") == 2 * TOKENS


async def test_who_books_nothing_never_waits(bed: Bed) -> None:
    await bed.route(0)
    request = pb.RouteRequest(query=query_of())
    response = await rpc.unary(bed.stub.Route, request, timeout_s=WAIT_S)
    assert response.decision.worker.worker_id == 1
    assert len(bed.router.queue) == 0


async def test_a_request_freed_while_it_waits_is_gone_and_books_nothing(bed: Bed) -> None:
    async with bed.session() as session:
        await session.ask(1, 2, 3)
        await session.results(1)
        await bed.waiting(2)
        await session.send(frees=[key(2)])
        answer = (await session.results(1))[2]
        assert isinstance(error_of(answer), RequestCancelled)
        await session.send(frees=[key(1)])
        assert set(await session.results(1)) == {3}
        assert [booking.key.request_id for booking in bed.router.book] == ["r3"]
    assert await bed.metric("unclaimed_total", kind="free") == 0


async def test_a_request_asked_and_freed_in_one_frame_leaves_nothing(bed: Bed) -> None:
    async with bed.session() as session:
        await bed.route(0)
        await session.send(news=[new(1)], frees=[key(1)])
        assert isinstance(error_of((await session.results(1))[1]), RequestCancelled)
        assert (len(bed.router.queue), len(bed.router.book)) == (0, 1)


async def test_a_session_that_ends_takes_its_waiting_requests_with_it(bed: Bed) -> None:
    await bed.route(0)
    async with bed.session() as session:
        await session.ask(1, 2)
        await bed.waiting(2)
    await bed.waiting(0)
    assert len(bed.router.book) == 1


async def test_a_caller_of_route_that_gives_up_leaves_the_queue(bed: Bed) -> None:
    await bed.route(0)
    call = asyncio.ensure_future(bed.route(1))
    await bed.waiting(1)
    call.cancel()
    await asyncio.wait([call])
    await bed.waiting(0)
    assert len(bed.router.book) == 1


async def test_a_key_asked_for_again_takes_over_its_place(bed: Bed) -> None:
    async with bed.session() as old, bed.session() as young:
        await old.ask(1, 2)
        await old.results(1)
        await bed.waiting(1)
        await young.ask(2, waited_ms=500)
        answer = (await old.results(1))[2]
        error = error_of(answer)
        assert isinstance(error, Conflict)
        assert error.reason == "ASKED_AGAIN"
        await bed.waiting(1)
        await old.send(frees=[key(1)])
        assert set(await young.results(1)) == {2}
        assert len(bed.router.book) == 1


async def test_a_full_queue_refuses_with_the_limit_and_a_time_to_come_again() -> None:
    async with running(queue_threshold=1.0, queue_requests_max=2) as bed, bed.session() as session:
        await bed.add_workers(1)
        await session.ask(1, 2, 3, 4)
        answers = await session.results(2)
        assert set(answers) == {1, 4}
        error = error_of(answers[4])
        assert isinstance(error, Overloaded)
        assert (error.reason, error.retry_after_s) == ("QUEUE_FULL", 1.0)
        assert error.metadata["limit_kind"] == "requests"
        with pytest.raises(Overloaded) as caught:
            await bed.route(5)
        assert caught.value.reason == "QUEUE_FULL"
        assert caught.value.metadata["limit"] == "2"
        assert await bed.metric("queue_full_total", limit="requests") == 2


async def test_a_wait_that_is_too_long_ends_with_a_typed_error(bed: Bed) -> None:
    async with bed.session() as session:
        await session.ask(1, 2)
        await session.results(1)
        await bed.waiting(1)
        bed.now += 60.0
        error = error_of((await session.results(1))[2])
        assert isinstance(error, Overloaded)
        assert error.reason == "QUEUE_TIMEOUT"


async def test_when_all_workers_go_all_who_wait_are_told_at_once(bed: Bed) -> None:
    async with bed.session() as session:
        await session.ask(1, 2, 3)
        await session.results(1)
        await bed.waiting(2)
        await bed.leases[1].close()
        for answer in (await session.results(2)).values():
            error = error_of(answer)
            assert isinstance(error, Unavailable)
            assert error.reason == "NO_WORKER"


async def test_a_router_that_closes_tells_all_who_wait_to_ask_another_one(bed: Bed) -> None:
    async with bed.session() as session:
        await session.ask(1, 2)
        await session.results(1)
        unary = asyncio.ensure_future(bed.route(3))
        await bed.waiting(2)
        drain = asyncio.ensure_future(bed.app.drain(WAIT_S))
        with pytest.raises(Unavailable) as by_stream:
            await session.read()
        with pytest.raises(Unavailable) as by_call:
            await unary
        await drain
        reasons = {by_stream.value.reason, by_call.value.reason}
        assert reasons == {"ROUTER_DRAINING"}
        assert len(bed.router.queue) == 0


async def test_who_asks_a_closing_router_and_would_wait_is_told_to_ask_another_one(
    bed: Bed,
) -> None:
    async with bed.session() as session:
        await session.ask(1)
        await session.results(1)
        bed.decisions.close()
        await session.ask(2, 3)
        with pytest.raises(Unavailable) as closing:
            await session.read()
        assert closing.value.reason == "ROUTER_DRAINING"
        assert len(bed.router.queue) == 0


@pytest.mark.parametrize("tracks", [True, False])
async def test_a_router_tells_its_frontends_whether_to_tell_of_output(tracks: bool) -> None:
    async with running(track_output_blocks=tracks) as bed, bed.session() as session:
        assert session.hello_ack.track_output_blocks is tracks


async def test_busy_workers_are_left_out_and_where_all_are_busy_callers_come_again() -> None:
    async with running(active_prefill_tokens_threshold=TOKENS - 1) as bed, bed.session() as session:
        await bed.add_workers(1, 2)
        await session.ask(1, 2, 3)
        answers = await session.results(3)
        assert {answers[n].decision.worker.worker_id for n in (1, 2)} == {1, 2}
        error = error_of(answers[3])
        assert isinstance(error, Overloaded)
        assert error.reason == "ALL_WORKERS_BUSY"
