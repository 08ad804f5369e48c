"""A router process of S1: its start, its calls and its end."""

from __future__ import annotations

import ast
import asyncio
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio
import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

import router_svc
from common.errors import DeadlineExceeded, NotFound, Unavailable, UnknownModel
from common.kv.events import EventBatch, EventKind, KvEvent, Partition, Source, SourcePosition
from common.kv.hashing import HASH_SCHEME_ID, PrefixHasher, hashes_to_bytes
from common.kv.index_feed import IndexFeed, run_all_steps
from common.registry.instances import ENDPOINT_NAME, EndpointId, Instance
from common.registry.registry import MemoryRegistry, MemoryStore
from common.request.placement import Placement
from common.rpc import channel as rpc
from common.rpc.status import mesh_error_from_rpc
from common.service.health import HealthReporter
from common.service.lifecycle import Lifecycle
from common.wire.errors import error_from_proto
from common.wire.kv import (
    batch_to_proto,
    partition_from_proto,
    partition_to_proto,
    snapshot_chunk_from_proto,
    source_to_proto,
)
from indexer_svc.app import IndexerApp
from indexer_svc.config import IndexerConfig
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.router.v1 import router_pb2_grpc
from kvmesh.types.v1 import load_pb2
from router_svc.app import RouterApp
from router_svc.config import RouterConfig
from router_svc.tracing import SPANS, DecisionSpans
from tests.kit import instances
from tests.kit.apps import end, living
from tests.kit.waiting import WAIT_S, until

NS = "default"
FRONTEND = 77
B = 16
MESH_KEY = "secret"
PART = Partition("m", B, HASH_SCHEME_ID)
HASHER = PrefixHasher(mesh_key=MESH_KEY.encode(), model="m", block_size=B)
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
worker = partial(instances.worker, namespace=NS, kv_index="events")


class Running:
    """A running router and a channel to it."""

    def __init__(self, app: RouterApp, lifecycle: Lifecycle) -> None:
        self.app = app
        self.lifecycle = lifecycle
        self.channel = rpc.channel(app.address)
        self.stub = router_pb2_grpc.RouterServiceStub(self.channel)

    async def unary(self, method: str, request: Any, timeout_s: float = WAIT_S) -> Any:
        return await rpc.unary(getattr(self.stub, method), request, timeout_s=timeout_s)

    async def route(self, **facts: Any) -> pb.Decision:
        """A decision without a booking."""
        query = pb.Query(**{"model": "m", "total_tokens": 100, **facts})
        decision: pb.Decision = (await self.unary("Route", pb.RouteRequest(query=query))).decision
        return decision

    async def session(self, *frames: pb.SessionRequest) -> list[pb.NewResult]:
        """All results of a session with these frames, which ends then."""
        call: Any = self.stub.Session()
        results: list[pb.NewResult] = []
        async with rpc.cancelling(call), asyncio.timeout(WAIT_S):
            await call.write(pb.SessionRequest(hello=pb.SessionHello(frontend_id=FRONTEND)))
            for frame in frames:
                await call.write(frame)
            await call.done_writing()
            async for response in call:
                results += response.results
        return results

    async def requests(self) -> int:
        """Live bookings."""
        return len((await self.unary("Dump", pb.DumpRequest())).bookings)


@asynccontextmanager
async def router(store: MemoryStore, **settings: Any) -> AsyncIterator[Running]:
    app = RouterApp(
        RouterConfig(registry="memory", mesh_key=MESH_KEY, **settings),
        registry=MemoryRegistry(store),
        rng=Random(1),
    )
    lifecycle = Lifecycle(HealthReporter())
    async with living(app, lifecycle):
        running = Running(app, lifecycle)
        async with running.channel:
            yield running


class Bed:
    """A store with a registry of the test's own, and routers on it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.store = MemoryStore()
        self.registry = MemoryRegistry(self.store)
        self._stack = stack
        stack.push_async_callback(self.registry.close)

    async def router(self, **settings: Any) -> Running:
        return await self._stack.enter_async_context(router(self.store, **settings))

    async def add(self, running: Running, *instances: Instance) -> None:
        for instance in instances:
            await self.registry.register(instance)
        await sees(running, *(instance.id for instance in instances))

    async def indexer(self) -> IndexerApp:
        app = IndexerApp(IndexerConfig(registry="memory"), registry=MemoryRegistry(self.store))
        return await self._stack.enter_async_context(living(app))

    async def publish(self, app: IndexerApp, worker_id: int, blocks: np.ndarray[Any, Any]) -> Any:
        """Opens a publication of a worker that stores the blocks and reports a load."""
        channel = await self._stack.enter_async_context(rpc.channel(app.address))
        call: Any = indexer_pb2_grpc.IndexerServiceStub(channel).Publish()
        await self._stack.enter_async_context(rpc.cancelling(call))
        source = Source(worker_id)
        hello = indexer_pb2.PublishHello(
            worker_id=worker_id,
            partition=partition_to_proto(PART),
            sources=[indexer_pb2.SourceState(source=source_to_proto(source))],
        )
        batch = EventBatch(source, 0, 1, [KvEvent(EventKind.STORED, blocks)])
        await call.write(indexer_pb2.PublishRequest(hello=hello))
        await call.write(
            indexer_pb2.PublishRequest(
                batch=batch_to_proto(batch), loads=[load_pb2.Load(running=3, kv_used_blocks=40)]
            )
        )
        return call


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    async with AsyncExitStack() as stack:
        yield Bed(stack)


async def sees(running: Running, *ids: int) -> None:
    fleet = running.app.router.fleet
    await until(lambda: all(fleet.is_present(i) for i in ids), "the router sees them")


def tokens(count: int, seed: int = 0) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(0, 1 << 17, count).tolist()
    return drawn


def named(token_ids: Sequence[int]) -> dict[str, Any]:
    """The fields of a query that identify the blocks of a prompt."""
    return {
        "total_tokens": len(token_ids),
        "prefix_hashes": hashes_to_bytes(HASHER.prefix_hashes(list(token_ids))),
        "hash_scheme": HASH_SCHEME_ID,
        "block_size": B,
    }


def new(number: int, **facts: Any) -> pb.New:
    query = pb.Query(**{"model": "m", "total_tokens": 100, **facts})
    return pb.New(id=number, key=pb.BookingKey(request_id=f"r{number}"), query=query)


# Start (S1.F).


@pytest.mark.row("S1-56", "S1-57", "S1-61", "S1-63")
async def test_a_router_is_built_from_its_configuration_and_reports_it(bed: Bed) -> None:
    running = await bed.router()
    app = running.app
    defaults = RouterConfig()
    assert app.router.selector.name == defaults.selector == "kv"
    assert app.router.overlaps.settings == defaults.index_settings
    assert app.index.indexer_id is None
    await bed.add(running, worker(1, role="prefill"), worker(2, role="decode", block_size=B))
    assert app.router.fleet.block_size("m") == B
    query = pb.Query(model="m", total_tokens=100)
    explained = await running.unary("Explain", pb.ExplainRequest(query=query))
    assert explained.selector == "kv"
    assert [(row.worker.worker_id, row.leg) for row in explained.candidates] == [
        (1, "prefill"),
        (2, "decode"),
    ]
    assert (await running.unary("Dump", pb.DumpRequest())).router_id == app.instance_id


@pytest.mark.slow
@pytest.mark.row("S1-57", "S1-102")
async def test_an_invalid_configuration_stops_the_start_before_any_work(tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router_svc", "--registry-path", str(registry)),
        *("--router-ttl-secs", "0", "--router-prune-target-ratio", "2"),
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]},
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        _, stderr = await process.communicate()
    assert process.returncode == 2
    assert "--router-ttl-secs" in stderr.decode()
    assert "--router-prune-target-ratio" in stderr.decode(), "all problems at once"
    assert not registry.exists(), "nothing was registered or created"


@pytest.mark.row("S1-58")
async def test_a_router_decides_once_a_worker_is_known(bed: Bed) -> None:
    running = await bed.router()
    await bed.registry.register(Instance(5, NS, "worker", "", "127.0.0.1:1"))
    await sees(running, 5)
    with pytest.raises(UnknownModel):
        await running.route()
    await bed.add(running, worker(1))
    assert (await running.route()).worker.worker_id == 1
    await bed.registry.deregister(NS, 1)
    await until(lambda: not running.app.router.fleet.is_present(1), "the registration is removed")
    with pytest.raises(Unavailable) as refused:
        await running.route()
    assert refused.value.reason == "NO_WORKER", "a worker without a model is no candidate"
    await bed.add(running, worker(2))
    assert (await running.route()).worker.worker_id == 2


@pytest.mark.row("S1-60")
async def test_waiting_for_workers_of_one_model_delays_no_other_and_can_be_cancelled(
    bed: Bed,
) -> None:
    running = await bed.router()
    await bed.registry.register(worker(1, model="early"))
    await sees(running, 1)

    async def wait_for(model: str) -> int:
        """Retries while there is no worker, as frontends do."""
        # Ends: the test cancels it, or awaits it with a limit.
        while True:
            try:
                return (await running.route(model=model)).worker.worker_id
            except Exception:
                # Sleep: the pace of retries.
                await asyncio.sleep(0.002)

    late, never = (asyncio.create_task(wait_for(model)) for model in ("late", "never"))
    try:
        for _ in range(20):
            assert (await running.route(model="early")).worker.worker_id == 1
        assert not late.done()
        await bed.add(running, worker(2, model="late"))
        async with asyncio.timeout(WAIT_S):
            assert await late == 2
        assert not never.done()
    finally:
        never.cancel()
        late.cancel()
        done, _ = await asyncio.wait({late, never}, timeout=WAIT_S)
    assert never in done
    assert never.cancelled()


@pytest.mark.row("S1-60")
async def test_a_start_that_waits_for_its_registry_can_be_cancelled() -> None:
    class Silent(MemoryRegistry):
        """A registry that never responds to a watch."""

        @asynccontextmanager
        async def watch(self, namespace: str) -> AsyncGenerator[Any, None]:
            await asyncio.Event().wait()
            yield

    app = RouterApp(RouterConfig(registry="memory"), registry=Silent())
    lifecycle = Lifecycle(HealthReporter())
    starting = asyncio.create_task(app.start(lifecycle))
    try:
        await until(lambda: app.address != "", "it waits")
        channel = rpc.channel(app.address)
        stub = router_pb2_grpc.RouterServiceStub(channel)
        query = pb.Query(model="m", total_tokens=1)
        with pytest.raises((DeadlineExceeded, Unavailable)):
            await rpc.unary(stub.Route, pb.RouteRequest(query=query), timeout_s=0.05)
        await channel.close()
    finally:
        starting.cancel()
        await asyncio.wait({starting}, timeout=WAIT_S)
        lifecycle.drain("test over")
        assert await lifecycle.cancel_tasks(WAIT_S) == []
        await app.close()
    assert starting.done()


# Discovery (S1-11 … S1-13).


@pytest.mark.row("S1-11", "S1-12", "S1-13")
async def test_discovery_of_the_routers_of_a_namespace_finds_exactly_those(bed: Bed) -> None:
    first, second = await bed.router(), await bed.router()
    for instance in (
        worker(1),
        Instance(2, NS, "frontend", "", "127.0.0.1:1"),
        Instance(3, NS, "indexer", "", "127.0.0.1:9"),
        Instance(4, "elsewhere", "router", "", "127.0.0.1:1"),
    ):
        await bed.registry.register(instance)
    async with bed.registry.watch(NS) as watch:
        found = {router.id: router for router in watch.current.of("router")}
        assert set(found) == {first.app.instance_id, second.app.instance_id}
        for running in (first, second):
            entry = found[running.app.instance_id]
            assert entry.address == running.app.address
            endpoint = EndpointId(NS, "router", ENDPOINT_NAME)
            assert entry.key == endpoint.instance_key(entry.id)
        await end(first.app, first.lifecycle)
        async with asyncio.timeout(WAIT_S):
            while len(watch.current.of("router")) == 2:
                await watch.next()
        assert [one.id for one in watch.current.of("router")] == [second.app.instance_id]


# Routers with and without KV events (S1-62, S1-54).

NOT_FOLLOWED = "kv_events_not_followed"


@pytest.mark.row("S1-54", "S1-62", "S1-96", "S1-97", "S1-103")
@pytest.mark.parametrize(
    ("settings", "logged"),
    [
        ({"overlap_score_credit": 0.0}, {"kv_events": True, "overlap_score_credit": 0.0}),
        ({"kv_events": False}, {"kv_events": False, "overlap_score_credit": 1.0}),
    ],
)
async def test_a_router_that_needs_no_events_follows_loads_only_and_logs_the_reason(
    bed: Bed, settings: dict[str, Any], logged: dict[str, Any]
) -> None:
    indexer = await bed.indexer()
    blocks = HASHER.prefix_hashes(tokens(8 * B))
    with capture_logs() as logs:
        running = await bed.router(**settings)
        await bed.add(running, worker(1), worker(2))
        await bed.publish(indexer, 1, blocks)
        book, feed = running.app.router.load_tracker, running.app.index.feed
        await until(
            lambda: book.ranks.report_age_s(Placement(1, 0), 0.0) is not None,
            "the router has a load report",
        )
        await until(lambda: indexer.ingest.feed.blocks == 8, "the indexer has the blocks")
        lines = [line for line in logs if line["event"] == NOT_FOLLOWED]
    assert len(lines) == 1
    assert {name: lines[0][name] for name in logged} == logged
    assert lines[0]["log_level"] == "info"
    decision = await running.route(**named(tokens(8 * B)))
    assert (decision.worker.worker_id, decision.overlap_blocks) == (2, 0)
    assert feed.blocks == 0
    (subscriber,) = indexer.ingest.subscribers
    await until(lambda: not subscriber.has_more, "no message waits for it")


@pytest.mark.row("S1-62", "S1-103")
async def test_a_router_that_needs_events_follows_them_without_a_log_line(bed: Bed) -> None:
    indexer = await bed.indexer()
    with capture_logs() as logs:
        running = await bed.router()
    assert not [line for line in logs if line["event"] == NOT_FOLLOWED]
    await bed.add(running, worker(1), worker(2))
    await bed.publish(indexer, 1, HASHER.prefix_hashes(tokens(8 * B)))
    await until(lambda: running.app.index.feed.blocks == 8, "the blocks are there")
    decision = await running.route(**named(tokens(10 * B)))
    assert decision.overlap_blocks in (0, 8)


@pytest.mark.row("S1-27", "S1-50")
async def test_a_router_without_events_uses_approximate_entries_over_the_wire(bed: Bed) -> None:
    running = await bed.router(kv_events=False, recent_miss_weight=0.0)
    await bed.add(running, worker(1), worker(2), worker(3))
    prompt = tokens(10 * B)
    (first,) = await running.session(pb.SessionRequest(news=[new(1, **named(prompt))]))
    explained = await running.unary(
        "Explain", pb.ExplainRequest(query=pb.Query(model="m", **named(prompt)))
    )
    held = {row.worker.worker_id: row.overlap_blocks for row in explained.candidates}
    assert held == {n: 10 * (n == first.decision.worker.worker_id) for n in (1, 2, 3)}
    assert {row.source_state for row in explained.candidates} == {"approx"}
    gauge = running.app.metrics.registry.get_sample_value
    assert gauge("kvmesh_router_guessed_blocks", {"kind": "guesses"}) == 10
    assert gauge("kvmesh_router_guessed_blocks", {"kind": "predictions"}) == 0


# Dumps and states (S1-49, the trap; S1-53, S1-87).


@pytest.mark.row("S1-49", "S1-87")
async def test_a_dump_can_be_replayed_into_an_index_that_answers_the_same(bed: Bed) -> None:
    indexer = await bed.indexer()
    chain = HASHER.prefix_hashes(tokens(200 * B))
    for worker_id, depth in ((1, 200), (2, 90)):
        await bed.registry.register(worker(worker_id))
        await bed.publish(indexer, worker_id, chain[:depth])
    await until(lambda: indexer.ingest.feed.blocks == 290, "both sources are published")
    copy = IndexFeed()
    async with rpc.channel(indexer.address) as channel:
        stub = indexer_pb2_grpc.IndexerServiceStub(channel)
        call: Any = stub.Dump(indexer_pb2.DumpRequest(), timeout=WAIT_S)
        async for response in call:
            chunk = snapshot_chunk_from_proto(response.chunk)
            if chunk.first:
                state = SourcePosition(chunk.source, chunk.epoch, chunk.sequence)
                copy.register_source(partition_from_proto(response.partition), state, 0.0)
            run_all_steps(copy.load(chunk, 0.0))
        for depth in (1, 90, 91, 200):
            expected = indexer.ingest.feed.match(PART, chain[:depth])
            assert len(expected) == 2
            assert copy.match(PART, chain[:depth]) == expected


@pytest.mark.row("S1-49")
async def test_a_missing_index_is_a_typed_error_or_an_explicit_state(bed: Bed) -> None:
    indexer = await bed.indexer()
    running = await bed.router(overlap_score_credit=0.0)
    await bed.add(running, worker(7, kv_index="none"))
    async with rpc.channel(indexer.address) as channel:
        stub = indexer_pb2_grpc.IndexerServiceStub(channel)
        call: Any = stub.Dump(indexer_pb2.DumpRequest(worker_id=7), timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
        error = mesh_error_from_rpc(failed.value)
        assert isinstance(error, NotFound)
        assert error.field == "worker_id"
    (row,) = (await running.unary("Dump", pb.DumpRequest())).workers
    assert (row.source_state, row.source_reason) == (
        "none",
        "no index: overlap_score_credit is 0",
    )


@pytest.mark.row("S1-53")
async def test_workers_are_listed_with_the_state_of_their_index(bed: Bed) -> None:
    running = await bed.router()
    await bed.add(running, worker(1), worker(2, kv_index="approx"), worker(3))
    rows = (await running.unary("Dump", pb.DumpRequest())).workers
    states = {row.worker.worker_id: (row.source_state, row.source_reason) for row in rows}
    assert states[1] == ("none", "no indexer was reached yet"), "a reason, and no failure"
    assert states[2][0] == "approx"
    indexer = await bed.indexer()
    await bed.publish(indexer, 1, HASHER.prefix_hashes(tokens(4 * B)))
    await until(lambda: running.app.index.feed.blocks == 4, "the first is known")
    rows = (await running.unary("Dump", pb.DumpRequest())).workers
    assert {row.worker.worker_id: row.source_state for row in rows} == {
        1: "exact",
        2: "approx",
        3: "none",
    }


# End (S1-64, the trap).


@pytest.mark.row("S1-64")
async def test_closing_one_router_leaves_a_second_one_working(bed: Bed) -> None:
    indexer = await bed.indexer()
    first, second = await bed.router(), await bed.router()
    await bed.add(first, worker(1), worker(2))
    await sees(second, 1, 2)
    await bed.publish(indexer, 1, HASHER.prefix_hashes(tokens(8 * B)))
    for running in (first, second):
        feed = running.app.index.feed
        await until(lambda feed=feed: feed.blocks == 8, "the blocks are there")  # type: ignore[misc]
    await end(first.app, first.lifecycle)
    await until(lambda: len(indexer.ingest.subscribers) == 1, "the first has left the indexer")
    routers = (await bed.registry.snapshot(NS)).of("router")
    assert [instance.id for instance in routers] == [second.app.instance_id]
    (result,) = await second.session(pb.SessionRequest(news=[new(1, **named(tokens(10 * B)))]))
    assert result.HasField("decision")
    await bed.add(second, worker(3))
    await bed.publish(indexer, 3, HASHER.prefix_hashes(tokens(4 * B, 9)))
    await until(
        lambda: second.app.index.feed.blocks == 12, "the router still follows fleet and index"
    )


@pytest.mark.row("S1-47", "S1-64")
async def test_a_router_that_stops_ends_all_its_tasks_and_calls_only(bed: Bed) -> None:
    indexer = await bed.indexer()
    running = await bed.router()
    await until(lambda: len(indexer.ingest.subscribers) == 1, "the router follows the indexer")
    mine = asyncio.create_task(asyncio.Event().wait())
    try:
        await end(running.app, running.lifecycle)
        await until(lambda: not indexer.ingest.subscribers, "its call has ended")
        assert not mine.done()
        connected = running.app.metrics.registry.get_sample_value("kvmesh_router_index_connected")
        assert connected == 0
    finally:
        mine.cancel()
        await asyncio.wait({mine})


# Calls (S1.I).


@pytest.mark.row("S1-34", "S1-35", "S1-88")
async def test_one_id_identifies_a_request_from_new_over_prefill_done_to_free(bed: Bed) -> None:
    running = await bed.router()
    await bed.add(running, worker(1))
    key = pb.BookingKey(request_id="r1")
    book = running.app.router.load_tracker
    call: Any = running.stub.Session()
    async with rpc.cancelling(call), asyncio.timeout(WAIT_S):
        await call.write(
            pb.SessionRequest(hello=pb.SessionHello(frontend_id=FRONTEND), news=[new(1)])
        )
        while not (frame := await call.read()).results:
            pass
        decision = frame.results[0].decision
        assert (decision.worker.worker_id, decision.worker.dp_rank) == (1, 0)
        assert decision.overlap_blocks == 0
        assert [one.key.request_id for one in book] == ["r1"]
        await call.write(pb.SessionRequest(prefills_done=[key]))
        await until(lambda: next(iter(book)).prefill_tokens == 0, "prefill is marked")
        await call.write(pb.SessionRequest(frees=[key]))
        await until(lambda: len(book) == 0, "the booking is freed")


@pytest.mark.row("S1-89")
async def test_a_query_books_what_its_result_reports(bed: Bed) -> None:
    running = await bed.router()
    await bed.add(running, worker(1), worker(2))
    call: Any = running.stub.Session()
    async with rpc.cancelling(call), asyncio.timeout(WAIT_S):
        await call.write(
            pb.SessionRequest(hello=pb.SessionHello(frontend_id=FRONTEND), news=[new(1), new(2)])
        )
        results: list[pb.NewResult] = []
        while len(results) < 2:
            results += (await call.read()).results
        placed = {result.decision.worker.worker_id for result in results}
        assert placed == {1, 2}, "the second includes the booking of the first"
        bookings = (await running.unary("Dump", pb.DumpRequest())).bookings
        assert {one.worker.worker_id for one in bookings} == placed


@pytest.mark.row("S1-65", "S1-71", "S1-90")
async def test_a_query_carries_constraints_pins_overrides_and_adapters(bed: Bed) -> None:
    running = await bed.router()
    await bed.add(
        running, worker(1), worker(2, taints=frozenset({"big"})), worker(3, dp_size=2), worker(4)
    )
    tainted, allowed, pinned, ranked, overridden = (new(n) for n in range(5))
    tainted.query.routing.routing_constraints.required_taints.append("big")
    allowed.query.routing.allowed_worker_ids.worker_ids.append(4)
    pinned.query.routing.backend_instance_id = 1
    ranked.query.routing.backend_instance_id = 3
    ranked.query.routing.dp_rank = 1
    overridden.query.config_override.router_temperature = -1.0
    news = [tainted, allowed, pinned, ranked, overridden]
    results = {r.id: r for r in await running.session(pb.SessionRequest(news=news))}
    chosen = {n: results[n].decision.worker for n in range(4)}
    assert {n: at.worker_id for n, at in chosen.items()} == {0: 2, 1: 4, 2: 1, 3: 3}
    assert chosen[3].dp_rank == 1
    refused = error_from_proto(results[4].error)
    assert refused.field == "query.config_override.router_temperature", "the request was read"
    await bed.add(running, worker(5, loras=frozenset({"an-adapter"})))
    adapters = [new(n) for n in range(9, 13)]
    for one, name in zip(adapters, ["an-adapter"] * 3 + ["unknown"], strict=True):
        one.query.routing.lora_name = name
    results = {r.id: r for r in await running.session(pb.SessionRequest(news=adapters))}
    assert {results[n].decision.worker.worker_id for n in (9, 10, 11)} == {5}
    assert error_from_proto(results[12].error).field == "query.routing.lora_name"


@pytest.mark.row("S1-91", "S1-92")
async def test_updates_of_unknown_bookings_are_counted_and_ignored(bed: Bed) -> None:
    running = await bed.router()
    await bed.add(running, worker(1))
    key, unknown = pb.BookingKey(request_id="r1"), pb.BookingKey(request_id="r404")
    results = await running.session(
        pb.SessionRequest(news=[new(1)]),
        pb.SessionRequest(prefills_done=[key, unknown]),
        pb.SessionRequest(frees=[key, key]),
        pb.SessionRequest(news=[new(2)]),
    )
    assert [result.id for result in results] == [1, 2], "the session continues"
    count = running.app.metrics.registry.get_sample_value
    name = "kvmesh_router_unclaimed_total"
    assert count(name, {"kind": "prefill_done"}) == 1
    assert count(name, {"kind": "free"}) == 1, "the second free of r1"


@pytest.mark.row("S1-93")
async def test_every_query_has_exactly_one_result_with_its_own_id(bed: Bed) -> None:
    running = await bed.router()
    await bed.add(running, worker(1))
    news = [new(n, model="m" if n % 3 else "nope") for n in range(1, 301)]
    frames = [pb.SessionRequest(news=news[n : n + 7]) for n in range(0, 300, 7)]
    results = await running.session(*frames)
    assert sorted(result.id for result in results) == list(range(1, 301))
    for result in results:
        assert result.HasField("decision") != result.HasField("error")
        assert result.HasField("decision") == bool(result.id % 3)


@pytest.mark.row("S1-94")
async def test_a_failed_decision_ends_the_call_with_its_status(bed: Bed) -> None:
    running = await bed.router()
    await bed.add(running, worker(1))
    request = pb.RouteRequest(query=pb.Query(model="nope", total_tokens=1))
    call: Any = running.stub.Route(request, timeout=WAIT_S)
    with pytest.raises(Exception, match="nope") as failed:
        await call
    assert mesh_error_from_rpc(failed.value).kind == "UNKNOWN_MODEL"  # type: ignore[arg-type]
    assert await running.requests() == 0


@pytest.mark.row("S1-95")
async def test_a_router_decides_and_connects_to_no_worker(bed: Bed) -> None:
    touched = []

    async def touch(_reader: Any, writer: asyncio.StreamWriter) -> None:
        touched.append(writer)
        writer.close()

    server = await asyncio.start_server(touch, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    running = await bed.router()
    there = Instance(
        1, NS, "worker", "", f"127.0.0.1:{port}", model="m", block_size=B, kv_index="events"
    )
    await bed.add(running, there)
    results = await running.session(pb.SessionRequest(news=[new(n) for n in range(50)]))
    assert len(results) == 50
    server.close()
    await server.wait_closed()
    assert touched == []


@pytest.mark.row("S1-95")
def test_no_module_of_the_router_imports_the_engine_contract() -> None:
    folder = Path(str(router_svc.__file__)).parent
    files = sorted(folder.rglob("*.py"))
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                assert not name.startswith(("kvmesh.engine", "worker_svc", "frontend_svc")), file


# Metrics and spans of a decision (S1-75 … S1-77).


@pytest.mark.row("S1-75", "S1-77")
async def test_a_decision_leaves_its_stages_as_spans_in_order_with_their_figures(
    bed: Bed,
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    running = await bed.router()
    running.app._service.decisions.spans = DecisionSpans(provider.get_tracer("test"))
    await bed.add(running, worker(1))
    traced = new(1, **named(tokens(5 * B)))
    traced.traceparent = f"00-{TRACE_ID}-{SPAN_ID}-01"
    await running.session(pb.SessionRequest(news=[traced]))
    spans = exporter.get_finished_spans()
    assert tuple(span.name for span in spans) == SPANS
    assert SPANS == (
        "kv_router.compute_block_hashes",
        "kv_router.find_matches",
        "kv_router.schedule",
    )
    times = [(span.start_time or 0, span.end_time or 0) for span in spans]
    assert all(earlier[1] == later[0] for earlier, later in pairwise(times))
    for span in spans:
        assert span.parent is not None
        assert f"{span.parent.span_id:016x}" == SPAN_ID
        assert f"{span.context.trace_id:032x}" == TRACE_ID
    facts = dict(spans[-1].attributes or {})
    assert facts["isl_tokens"] == 5 * B
    stages = [facts[f"{stage}_us"] for stage in ("hash", "find_matches", "schedule")]
    assert all(isinstance(us, float) and us >= 0 for us in stages)
    assert facts["total_us"] == pytest.approx(sum(float(str(us)) for us in stages), abs=0.01)
    assert spans[-1].status.status_code is trace.StatusCode.UNSET


@pytest.mark.row("S1-76")
async def test_each_placed_request_is_measured_once_in_every_stage(bed: Bed) -> None:
    running = await bed.router()
    await bed.add(running, worker(1))
    value = running.app.metrics.registry.get_sample_value
    for placed in range(3):
        stages = ("block_hashes", "find_matches", "schedule", "total")
        sums = {}
        for stage in stages:
            labels = {"stage": stage}
            assert value("kvmesh_router_overhead_seconds_count", labels) == placed
            sums[stage] = value("kvmesh_router_overhead_seconds_sum", labels) or 0.0
        parts = sum(sums[stage] for stage in stages[:3])
        assert sums["total"] == pytest.approx(parts, rel=1e-6), "differences of one stopwatch"
        results = await running.session(
            pb.SessionRequest(news=[new(2 * placed), new(2 * placed + 1, model="nope")])
        )
        assert len(results) == 2, "only the placed request counts"
