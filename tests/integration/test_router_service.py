"""The router over a real gRPC socket, with the memory registry."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

import router_svc.app
from common.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    NotFound,
    Overloaded,
    Unavailable,
    UnknownModel,
)
from common.registry.instances import Snapshot
from common.registry.registry import MemoryRegistry, Watch
from common.request.placement import REASON_CHARS_MAX, Placement, Query
from common.rpc import channel as rpc
from common.service.health import HealthReporter
from common.service.lifecycle import Lifecycle
from common.wire.errors import error_from_proto
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.router.v1 import router_pb2_grpc
from router_svc.app import RouterApp
from router_svc.config import RouterConfig
from router_svc.core.candidate import Candidate
from router_svc.core.selectors import RoundRobinSelector, Selection
from router_svc.service import SERVICE_NAME
from tests.integration.service_process import check_life
from tests.kit.local_router import (
    FRONTEND,
    NS,
    LocalRouter,
    Session,
    key,
    local_router,
    new,
    query_of,
)
from tests.kit.waiting import WAIT_S, until


def reregistered(number: int, worker_id: int, **fields: Any) -> pb.Booking:
    given: dict[str, Any] = {
        "frontend_id": FRONTEND,
        "model": "m",
        "prefill_tokens": 100,
        "decode_blocks": 7,
        "revision": 1,
        **fields,
    }
    return pb.Booking(key=key(number), worker=pb.Placement(worker_id=worker_id), **given)


@pytest.fixture
async def mesh() -> AsyncIterator[LocalRouter]:
    async with local_router() as mesh:
        yield mesh


async def dump(mesh: LocalRouter) -> dict[int, pb.PotentialLoad]:
    """The load of each worker (rank 0)."""
    response: pb.DumpResponse = await mesh.unary("Dump", pb.DumpRequest())
    return {row.worker.worker_id: row.load for row in response.workers}


async def test_the_queries_of_one_frame_get_their_results_in_one_frame(mesh: LocalRouter) -> None:
    await mesh.add_workers(1, 2, 3, 4)
    async with mesh.session() as session:
        await session.send(news=[new(n) for n in range(100)])
        results = (await session.read()).results
        assert [r.id for r in results] == list(range(100))
        shares = Counter(r.decision.worker.worker_id for r in results)
        assert shares == {1: 25, 2: 25, 3: 25, 4: 25}
        assert results[0].decision.reasons[0].startswith("kv: ")


@pytest.mark.slow
@pytest.mark.row("S1-105")
async def test_a_thousand_queries_of_many_sessions_are_booked_once_each(mesh: LocalRouter) -> None:
    await mesh.add_workers(1, 2, 3, 4)

    async def frontend(frontend_id: int) -> Counter[int]:
        async with mesh.session(frontend_id) as session:
            for start in range(0, 250, 10):
                await session.send(news=[new(n) for n in range(start, start + 10)])
            results = await session.results(250)
            barrier[0] += 1
            await until(lambda: barrier[0] == 4, "all sessions have a response")
            loads = await dump(mesh)
            assert sum(load.active_requests for load in loads.values()) == 1000
            done[0] += 1
            await until(lambda: done[0] == 4, "all sessions have read the loads")
            return Counter(r.decision.worker.worker_id for r in results)

    barrier, done = [0], [0]
    shares: Counter[int] = sum(await asyncio.gather(*map(frontend, (5, 6, 7, 8))), Counter())
    assert shares == {1: 250, 2: 250, 3: 250, 4: 250}


@pytest.mark.row("S1-88", "S1-91", "S1-92")
async def test_a_booking_exists_from_new_to_free_and_unknown_keys_are_ignored(
    mesh: LocalRouter,
) -> None:
    await mesh.add_workers(1)
    async with mesh.session() as session:
        await session.place(0)
        assert (await dump(mesh))[1].potential_prefill_tokens == 100
        await session.send(
            prefills_done=[key(0), key(404)],
            outputs=[pb.OutputBlocks(key=key(0), blocks=2)],
            frees=[key(404)],
        )
        await session.place(1, total_tokens=0)  # Answered only after the frame before it.
        load = (await dump(mesh))[1]
        assert (load.potential_prefill_tokens, load.potential_decode_blocks) == (0, 9)
        await session.send(frees=[key(0), key(1), key(1)])
        await session.place(2, total_tokens=0)
        assert (await dump(mesh))[1].active_requests == 1


async def test_the_same_key_gets_the_same_result_and_one_booking(mesh: LocalRouter) -> None:
    await mesh.add_workers(1, 2, 3, 4)
    async with mesh.session() as session:
        first = await session.place(0)
        again = await session.place(0)
        assert again == first
        assert sum(load.active_requests for load in (await dump(mesh)).values()) == 1


@pytest.mark.row("S1-94", "S1-108")
async def test_an_unknown_model_fails_its_request_and_not_the_session(mesh: LocalRouter) -> None:
    await mesh.add_workers(1)
    async with mesh.session() as session:
        await session.send(news=[new(0, model="nope"), new(1), new(2, prefix_hashes=b"odd")])
        nope, fine, odd = await session.results(3)
        assert isinstance(error_from_proto(nope.error), UnknownModel)
        assert fine.decision.worker.worker_id == 1
        error = error_from_proto(odd.error)
        assert isinstance(error, InvalidRequest)
        assert error.field == "query.prefix_hashes"
        assert not nope.HasField("decision")
        assert (await dump(mesh))[1].active_requests == 1


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (pb.New(id=1, query=query_of()), "news.key.request_id"),
        (pb.New(id=1, key=key(1)), "news.query"),
        (pb.New(id=1, key=key(1), query=query_of(model="")), "query.model"),
    ],
)
async def test_a_malformed_query_gets_an_error_and_affects_no_other(
    mesh: LocalRouter, wrong: pb.New, field: str
) -> None:
    await mesh.add_workers(1)
    async with mesh.session() as session:
        await session.send(news=[new(0), wrong, new(2)])
        before, refused, after = await session.results(3)
        error = error_from_proto(refused.error)
        assert isinstance(error, InvalidRequest)
        assert (refused.id, error.field) == (1, field)
        assert before.HasField("decision")
        assert after.HasField("decision")
        assert (await session.place(3)).HasField("decision"), "the session continues"


async def test_no_worker_left_is_unavailable_with_a_reason(mesh: LocalRouter) -> None:
    await mesh.add_workers(1)
    async with mesh.session() as session:
        await session.place(0)
        await mesh.registry.deregister(NS, 1)
        await until(lambda: mesh.app.router.fleet.worker_count == 0, "the worker is gone")
        error = error_from_proto((await session.place(1)).error)
        assert isinstance(error, Unavailable)
        assert (error.reason, error.retryable) == ("NO_WORKER", True)
        with pytest.raises(Unavailable):
            await mesh.unary("Route", pb.RouteRequest(query=query_of()))


async def test_bookings_of_a_dead_stream_are_orphaned_and_then_freed(mesh: LocalRouter) -> None:
    await mesh.add_workers(1)
    async with mesh.session() as session:
        await session.place(0)
    load_tracker = mesh.app.router.load_tracker
    await until(lambda: load_tracker.orphan_count == 1, "the booking is orphaned")
    await until(lambda: mesh.app._calls.names() == [], "the handler has returned")
    mesh.clock.now += 2.9
    assert (await dump(mesh))[1].active_requests == 1
    mesh.clock.now += 0.2
    assert (await dump(mesh))[1].active_requests == 0
    assert len(load_tracker) == 0


async def test_reregistered_bookings_are_adopted_from_a_dead_stream(mesh: LocalRouter) -> None:
    await mesh.add_workers(1)
    async with mesh.session() as session:
        await session.place(0)
        await session.place(1)
    load_tracker = mesh.app.router.load_tracker
    await until(lambda: load_tracker.orphan_count == 2, "the bookings are orphaned")
    async with mesh.session() as session:
        await session.send(announced=[reregistered(0, 1)], news=[new(2)])
        await session.results(1)
        assert load_tracker.orphan_count == 1
        mesh.clock.now += 3.1
        loads = await dump(mesh)
        assert loads[1].active_requests == 2, "the adopted one and the new one"
        response = await mesh.unary("Dump", pb.DumpRequest(model="m"))
        assert {b.key.request_id for b in response.bookings} == {"r0", "r2"}


async def test_a_router_gets_the_bookings_of_another_by_reregistration(mesh: LocalRouter) -> None:
    await mesh.add_workers(1, 2)
    async with mesh.session() as session:
        busy = reregistered(0, 1, prefill_tokens=0, decode_blocks=50, revision=9)
        await session.send(announced=[busy], news=[new(1)])
        (result,) = await session.results(1)
        assert result.decision.worker.worker_id == 2
        response = await mesh.unary("Dump", pb.DumpRequest())
        assert busy in list(response.bookings)


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        ({"hello": pb.SessionHello(frontend_id=FRONTEND)}, "hello"),
        ({"frees": [pb.BookingKey()]}, "frees.request_id"),
        ({"frees": [pb.BookingKey(request_id="x" * 257)]}, "frees.request_id"),
        ({"outputs": [pb.OutputBlocks(key=key(1))]}, "blocks"),
        ({"announced": [reregistered(1, 1, frontend_id=5)]}, "announced.frontend_id"),
        ({"announced": [reregistered(1, 1, revision=0)]}, "announced.revision"),
        ({"announced": [pb.Booking(frontend_id=FRONTEND, revision=1)]}, "announced.worker"),
    ],
)
async def test_a_protocol_violation_ends_the_stream_with_its_field(
    mesh: LocalRouter, frame: dict[str, Any], field: str
) -> None:
    async with mesh.session() as session:
        await session.send(**frame)
        with pytest.raises(InvalidRequest) as refused:
            await session.read()
        assert refused.value.field == field


async def test_results_before_a_protocol_violation_still_arrive(mesh: LocalRouter) -> None:
    await mesh.add_workers(1)
    async with mesh.session() as session:
        await session.send(news=[new(0)])
        await session.send(hello=pb.SessionHello(frontend_id=FRONTEND))
        assert len(await session.results(1)) == 1
        with pytest.raises(InvalidRequest):
            await session.read()
    await until(lambda: mesh.app.router.load_tracker.orphan_count == 1, "its booking is orphaned")


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (pb.SessionRequest(news=[new(1)]), Conflict),
        (pb.SessionRequest(hello=pb.SessionHello()), InvalidRequest),
    ],
)
async def test_a_session_must_begin_with_hello(
    mesh: LocalRouter, frame: pb.SessionRequest, kind: type[MeshError]
) -> None:
    call: Any = mesh.stub.Session()
    async with rpc.cancelling(call):
        await call.write(frame)
        with pytest.raises(kind):
            await Session(call).read()


async def test_a_session_closed_by_its_frontend_ends_without_an_error(mesh: LocalRouter) -> None:
    await mesh.add_workers(1)
    async with mesh.session() as session:
        await session.send(news=[new(0)])
        await session.call.done_writing()
        assert len(await session.results(1)) == 1
        with pytest.raises(EOFError):
            await session.read()
        assert await session.call.code() is grpc.StatusCode.OK


async def test_draining_closes_sessions_after_all_results(mesh: LocalRouter) -> None:
    await mesh.add_workers(1)
    async with mesh.session() as session:
        await session.send(news=[new(0)])
        await until(lambda: len(mesh.app.router.load_tracker) == 1, "the request is decided")
        assert await mesh.app.drain(5.0) == []
        assert len(await session.results(1)) == 1
        with pytest.raises(EOFError):
            await session.read()


@pytest.mark.row("S1-74")
async def test_route_books_only_on_request(mesh: LocalRouter) -> None:
    await mesh.add_workers(1)
    reply = await mesh.unary(
        "Route", pb.RouteRequest(query=query_of(token_ids=[1, 2], total_tokens=0))
    )
    assert reply.decision.worker.worker_id == 1
    assert (await dump(mesh))[1].active_requests == 0
    await mesh.unary(
        "Route",
        pb.RouteRequest(query=query_of(), book=True, key=key(0), frontend_id=FRONTEND),
    )
    assert (await dump(mesh))[1].active_requests == 1
    async with mesh.session() as session:
        await session.send(frees=[key(0)], news=[new(1)])
        await session.results(1)
        await until(lambda: len(mesh.app.router.load_tracker) == 1, "the booking of Route is freed")


@pytest.mark.row("S1-66")
@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.RouteRequest(), "query"),
        (pb.RouteRequest(query=query_of(), book=True, key=key(0)), "frontend_id"),
        (pb.RouteRequest(query=query_of(), book=True, frontend_id=1), "key.request_id"),
        (pb.RouteRequest(query=query_of(token_ids=[1])), "query.total_tokens"),
        (pb.RouteRequest(query=pb.Query()), "query.model"),
    ],
)
async def test_a_malformed_route_call_is_rejected_before_any_work(
    mesh: LocalRouter, request_: pb.RouteRequest, field: str
) -> None:
    await mesh.add_workers(1)
    with pytest.raises(InvalidRequest) as refused:
        await mesh.unary("Route", request_)
    assert refused.value.field == field
    assert len(mesh.app.router.load_tracker) == 0


async def test_hints_reach_the_decision(mesh: LocalRouter) -> None:
    await mesh.add_workers(1, 2, 3)
    query = query_of(excluded_worker_ids=[1])
    query.routing.allowed_worker_ids.worker_ids.extend([1, 3])
    reply = await mesh.unary("Route", pb.RouteRequest(query=query))
    assert reply.decision.worker.worker_id == 3
    query.routing.backend_instance_id = 2
    with pytest.raises(Unavailable) as refused:
        await mesh.unary("Route", pb.RouteRequest(query=query))
    assert refused.value.reason == "NO_ALLOWED_WORKER"


@pytest.mark.row("S1-23", "S1-86")
async def test_potential_loads_include_the_request(mesh: LocalRouter) -> None:
    await mesh.add_workers(1, dp_size=2)
    request = pb.PotentialLoadsRequest(query=query_of())
    loads = (await mesh.unary("PotentialLoads", request)).loads
    assert [(row.worker.dp_rank, row.potential_prefill_tokens) for row in loads] == [
        (0, 100),
        (1, 100),
    ]
    assert [row.potential_decode_blocks for row in loads] == [7, 7]
    assert [row.active_requests for row in loads] == [1, 1]
    with pytest.raises(UnknownModel):
        await mesh.unary("PotentialLoads", pb.PotentialLoadsRequest(query=query_of(model="no")))


async def test_decisions_can_be_explained_after_and_before_they_are_made(mesh: LocalRouter) -> None:
    await mesh.add_workers(1, 2)
    async with mesh.session() as session:
        placed = (await session.place(0)).decision
        mesh.clock.now += 1.5
        after = await mesh.unary("Explain", pb.ExplainRequest(request_id="r0"))
        assert after.decision == placed
        assert (after.selector, after.age_ms) == ("kv", 1500)
        assert len(after.candidates) == 2
        query = query_of(excluded_worker_ids=[placed.worker.worker_id])
        before = await mesh.unary("Explain", pb.ExplainRequest(query=query))
        assert before.decision.worker != placed.worker
        kept, out = before.candidates
        assert kept.HasField("cost")
        assert not out.HasField("cost")
        assert out.excluded_reason.startswith(
            "excluded by the frontend: it failed this request, or"
        )
        assert out.load.active_requests == 1
        query.exclusion_reasons.append("its circuit is open: " + "x" * 1000)
        named = (await mesh.unary("Explain", pb.ExplainRequest(query=query))).candidates[1]
        reason = named.excluded_reason.removeprefix("excluded by the frontend: ")
        assert reason.startswith("its circuit is open: x")
        assert len(reason) == REASON_CHARS_MAX
    with pytest.raises(NotFound) as unknown:
        await mesh.unary("Explain", pb.ExplainRequest(request_id="r404"))
    for part in ("'r404'", "the last 4096", "the id of its response", "request_id"):
        assert part in unknown.value.message
    for word in ("chatcmpl", "cmpl"):
        by_answer = await mesh.unary("Explain", pb.ExplainRequest(request_id=f"{word}-r0"))
        assert by_answer.decision == after.decision
    with pytest.raises(InvalidRequest):
        await mesh.unary("Explain", pb.ExplainRequest())


async def test_health_and_reflection_respond(mesh: LocalRouter) -> None:
    channel: Any = mesh.channel  # The stubs' types know synchronous channels only.
    health: Any = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE_NAME):
        reply = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection.ServerReflectionInfo(iter([request]), timeout=WAIT_S)
    async with rpc.cancelling(call):
        listed = (await call.read()).list_services_response.service
    assert SERVICE_NAME in {service.name for service in listed}


@pytest.mark.row("S1-11")
async def test_the_router_is_in_discovery_until_it_deregisters(mesh: LocalRouter) -> None:
    (entry,) = (await mesh.registry.snapshot(NS)).of("router")
    assert (entry.id, entry.address) == (mesh.app.instance_id, mesh.app.address)
    await mesh.app.deregister()
    assert (await mesh.registry.snapshot(NS)).of("router") == ()


async def test_a_lost_registry_does_not_stop_decisions(mesh: LocalRouter) -> None:
    await mesh.add_workers(1)
    await mesh.app._registry.close()
    async with mesh.session() as session:
        assert (await session.place(0)).decision.worker.worker_id == 1


class Silent(MemoryRegistry):
    """A registry with a store that never responds to a watch."""

    @asynccontextmanager
    async def watch(self, namespace: str) -> AsyncGenerator[Watch, None]:
        await asyncio.Event().wait()
        yield cast("Watch", None)


class IndexLost(MemoryRegistry):
    """A registry with an unreachable store: its watches open without a snapshot."""

    @asynccontextmanager
    async def watch(self, namespace: str) -> AsyncGenerator[Watch, None]:
        yield cast("Watch", self)

    current = Snapshot()

    async def next(self) -> Snapshot:
        return cast("Snapshot", await asyncio.Event().wait())


@pytest.mark.row("S1-59")
@pytest.mark.parametrize("registry", [Silent, IndexLost])
async def test_without_a_snapshot_it_serves_after_a_timeout_and_reports_no_model_as_unknown(
    monkeypatch: pytest.MonkeyPatch, registry: type[MemoryRegistry]
) -> None:
    monkeypatch.setattr(router_svc.app, "STARTUP_TIMEOUT_S", 0.05)
    with capture_logs() as logs:
        async with local_router(registry()) as mesh:
            with pytest.raises(Unavailable) as refused:
                await mesh.unary("Route", pb.RouteRequest(query=query_of()))
    assert refused.value.reason == "FLEET_UNKNOWN"
    assert any(line["event"] == "serving_without_fleet" for line in logs)


async def test_it_does_not_serve_before_the_first_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_svc.app, "STARTUP_TIMEOUT_S", WAIT_S)
    app = RouterApp(RouterConfig(registry="memory"), registry=Silent())
    lifecycle = Lifecycle(HealthReporter())
    starting = asyncio.create_task(app.start(lifecycle))
    try:
        await until(lambda: app.address != "", "the port is bound")
        channel = rpc.channel(app.address)
        stub = router_pb2_grpc.RouterServiceStub(channel)
        with pytest.raises(DeadlineExceeded):
            await rpc.unary(stub.Route, pb.RouteRequest(query=query_of()), timeout_s=0.1)
        assert not starting.done()
        await channel.close()
    finally:
        starting.cancel()
        await asyncio.wait({starting})
        lifecycle.drain("test over")
        assert await lifecycle.cancel_tasks(WAIT_S) == []
        await app.close()


@pytest.mark.slow
async def test_the_process_serves_registers_and_ends_on_sigterm(tmp_path: Path) -> None:
    await check_life("router", tmp_path / "registry")


class Broken(RoundRobinSelector):
    """A selector with a bug."""

    name = "broken"

    def select(self, *args: Any) -> Any:
        raise ZeroDivisionError("a mistake")


async def test_a_selector_that_fails_fails_one_request_and_not_the_session() -> None:
    async with local_router(selector=f"{__name__}:Broken") as mesh:
        await mesh.add_workers(1)
        async with mesh.session() as session:
            for number in range(2):
                error = error_from_proto((await session.place(number)).error)
                assert (error.kind, error.reason) == ("BUG", "SELECTOR_FAILED")
                assert error.retryable, "nothing ran"
                assert error.message == "the selector 'broken' failed: it raised ZeroDivisionError"


class NoGpu(InvalidRequest):
    """An error class of a selector."""

    kind = "NO_GPU"


class IllFormed(MeshError):
    """An error that no message can encode."""

    def __init__(self) -> None:
        super().__init__("ill-formed", metadata={"limit": 5})  # type: ignore[dict-item]


RAISED: dict[int, Callable[[], Exception]] = {
    13: lambda: NoGpu("no gpu", "query"),
    14: lambda: MeshError("of no class"),
    15: lambda: Overloaded(reason="QUEUE_FULL"),
    16: lambda: Overloaded(reason="QUEUE_FULL", metadata={"limit_kind": "mine"}),
    17: IllFormed,
    18: lambda: KeyError("a mistake"),
}


# With prompts of this length the selector returns a worker that does not exist.
UNKNOWN_WORKER = 19


class Raising(RoundRobinSelector):
    """A selector with errors of its own, by the length of the prompt."""

    name = "raising"

    def select(self, query: Query, candidates: Sequence[Candidate], *args: Any) -> Any:
        if raised := RAISED.get(query.total_tokens):
            raise raised()
        if query.total_tokens == UNKNOWN_WORKER:
            return Selection(Candidate(Placement(-1, 0), candidates[0].instance), "invalid")
        return super().select(query, candidates, *args)


@pytest.mark.parametrize("tokens", [*RAISED, UNKNOWN_WORKER])
async def test_an_error_of_a_selector_affects_its_query_only(tokens: int) -> None:
    async with local_router(selector=f"{__name__}:Raising") as mesh:
        await mesh.add_workers(1)
        async with mesh.session() as session:
            await session.send(news=[new(0), new(1, total_tokens=tokens), new(2)])
            before, refused, after = await session.results(3)
            assert before.HasField("decision")
            assert after.HasField("decision")
            assert refused.error.kind
            assert not refused.HasField("decision")
            assert (await session.place(3)).HasField("decision"), "the session continues"
            assert len(mesh.app.router.load_tracker) == 3, "a rejected request is not booked"
        route = pb.RouteRequest(query=query_of(total_tokens=tokens))
        with pytest.raises(MeshError):
            await mesh.unary("Route", route)
        assert (await mesh.unary("Route", pb.RouteRequest(query=query_of()))).decision


@pytest.mark.slow
async def test_metrics_count_decisions_and_show_the_load() -> None:
    async with local_router(metrics_port=0) as mesh:
        await mesh.add_workers(1, 2)
        async with mesh.session() as session:
            await session.send(news=[new(0), new(1, model="nope")], frees=[key(404)])
            await session.results(2)
            address = mesh.app.metrics_address
            text = await asyncio.to_thread(scrape, f"http://{address}/metrics")
    for line in (
        'kvmesh_router_decisions_total{outcome="placed",selector="kv"} 1.0',
        'kvmesh_router_decisions_total{outcome="unknown_model",selector="kv"} 1.0',
        "kvmesh_router_bookings 1.0",
        "kvmesh_router_orphaned_bookings 0.0",
        "kvmesh_router_workers 2.0",
        "kvmesh_router_sessions 1.0",
        'kvmesh_router_unclaimed_total{kind="free"} 1.0',
        "kvmesh_router_decision_seconds_count 2.0",
    ):
        assert line in text
    assert "nope" not in text, "labels take configured values only"


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as response:
        body: bytes = response.read()
    return body.decode()
