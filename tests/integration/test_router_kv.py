"""Routing by cache over real gRPC: a fake indexer, the router's replica of it, its decisions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.errors import InvalidRequest, Unavailable
from common.kv.events import EventBatch, EventKind, Hashes, KvEvent, Partition, Source, Tier
from common.kv.hashing import HASH_SCHEME_ID, PrefixHasher, hashes_to_bytes
from common.registry.instances import Instance
from common.request.placement import Placement
from common.rpc import channel as rpc
from common.wire.errors import error_from_proto
from common.wire.kv import batch_to_proto, partition_to_proto, source_to_proto
from indexer_svc.app import IndexerApp
from indexer_svc.config import IndexerConfig
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.types.v1 import load_pb2
from router_svc.tracing import SPANS, DecisionSpans
from tests.kit import instances
from tests.kit.apps import living
from tests.kit.local_router import NS, LocalRouter, key, local_router
from tests.kit.waiting import until

B = 16
MESH_KEY = "secret"
PART = Partition("m", B, HASH_SCHEME_ID)
HASHER = PrefixHasher(mesh_key=MESH_KEY.encode(), model="m", block_size=B)
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
worker = partial(instances.worker, namespace=NS, kv_index="events")


class FakeIndexer(indexer_pb2_grpc.IndexerServiceServicer):
    """Sends its messages to subscribers in order; a late subscriber gets all of them."""

    def __init__(self, instance_id: int) -> None:
        self.instance_id = instance_id
        self.requests: list[indexer_pb2.SubscribeRequest] = []
        self.story: list[indexer_pb2.SubscribeResponse] = []
        self.server = rpc.server()
        self.port = rpc.bind(self.server, "127.0.0.1", 0)
        self._grown = asyncio.Event()
        indexer_pb2_grpc.add_IndexerServiceServicer_to_server(self, self.server)

    def publish(self, *messages: indexer_pb2.SubscribeResponse) -> None:
        self.story += messages
        self._grown.set()

    async def Subscribe(  # type: ignore[override]
        self, request: indexer_pb2.SubscribeRequest, context: Any
    ) -> None:
        self.requests.append(request)
        sent = 0
        # Ends: the caller cancels it.
        while True:
            for message in self.story[sent:]:
                await context.write(message)
            sent = len(self.story)
            self._grown.clear()
            await self._grown.wait()

    @property
    def instance(self) -> Instance:
        return Instance(self.instance_id, NS, "indexer", "", f"127.0.0.1:{self.port}")


@pytest.fixture
async def bed() -> AsyncIterator[LocalRouter]:
    async with local_router(mesh_key=MESH_KEY) as bed:
        yield bed


@asynccontextmanager
async def indexer(instance_id: int = 900) -> AsyncIterator[FakeIndexer]:
    fake = FakeIndexer(instance_id)  # type: ignore[abstract]  # Only Subscribe is called.
    await fake.server.start()
    try:
        yield fake
    finally:
        await fake.server.stop(None)


async def place(
    bed: LocalRouter, number: int, query: pb.Query, traceparent: str = ""
) -> pb.NewResult:
    """Places a query on its own session."""
    async with bed.session() as session:
        routed_query = pb.New(id=number, key=key(number), query=query, traceparent=traceparent)
        await session.send(news=[routed_query])
        return (await session.results(1))[0]


async def explain(bed: LocalRouter, query: pb.Query) -> pb.ExplainResponse:
    explained: pb.ExplainResponse = await bed.unary("Explain", pb.ExplainRequest(query=query))
    return explained


def depth(bed: LocalRouter, worker_id: int, hashes: Hashes) -> int:
    rows = bed.app.index.feed.match(PART, hashes)
    return next((r.device_blocks for r in rows if r.source.worker_id == worker_id), 0)


def tokens(count: int, seed: int = 0) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(0, 1 << 17, count).tolist()
    return drawn


def query(token_ids: list[int], **fields: Any) -> pb.Query:
    return pb.Query(
        model="m",
        total_tokens=len(token_ids),
        prefix_hashes=hashes_to_bytes(HASHER.prefix_hashes(token_ids)),
        hash_scheme=HASH_SCHEME_ID,
        block_size=B,
        **fields,
    )


def trusted(worker_id: int, state: str = "exact") -> indexer_pb2.SubscribeResponse:
    return indexer_pb2.SubscribeResponse(
        source=source_to_proto(Source(worker_id)),
        partition=partition_to_proto(PART),
        status=indexer_pb2.SourceStatus(state=state, reason="" if state == "exact" else "a test"),
    )


def stores(
    worker_id: int, hashes: Hashes, tier: Tier = Tier.DEVICE
) -> indexer_pb2.SubscribeResponse:
    source = Source(worker_id)
    batch = EventBatch(source, 0, 1, [KvEvent(EventKind.STORED, hashes, tier)])
    return indexer_pb2.SubscribeResponse(
        source=source_to_proto(source), batch=batch_to_proto(batch)
    )


@pytest.mark.row("S1-69", "S1-80")
async def test_a_prompt_goes_to_the_worker_that_holds_its_prefix(bed: LocalRouter) -> None:
    prompt = tokens(10 * B)
    hashes = HASHER.prefix_hashes(prompt)
    async with indexer() as fake:
        await bed.add(worker(1), worker(2), worker(3), fake.instance)
        fake.publish(trusted(1), trusted(2), trusted(3), stores(2, hashes[:8]))
        await until(lambda: depth(bed, 2, hashes) == 8, "the replica has the blocks")
        decision = (await place(bed, 1, query(prompt))).decision
        assert decision.worker.worker_id == 2
        assert (decision.overlap_blocks, decision.predicted_cached_tokens) == (8, 128)
        (booking,) = (await bed.unary("Dump", pb.DumpRequest())).bookings
        assert (booking.prefill_tokens, booking.decode_blocks) == (2 * B, 10)


async def test_blocks_in_host_memory_count_for_a_decision_less_than_those_on_the_device(
    bed: LocalRouter,
) -> None:
    prompt = tokens(10 * B)
    hashes = HASHER.prefix_hashes(prompt)
    async with indexer() as fake:
        await bed.add(worker(1), worker(2), worker(3), fake.instance)
        fake.publish(trusted(1), trusted(2), trusted(3), stores(2, hashes[:8], Tier.HOST))
        fake.publish(stores(3, hashes[:5]))
        await until(lambda: depth(bed, 3, hashes) == 5, "the replica has all blocks")
        explained = await explain(bed, query(prompt))
        credited = {
            row.worker.worker_id: row.terms["overlap_credit"] for row in explained.candidates
        }
        assert credited == {1: 0, 2: 0.75 * 8, 3: 5}
        assert (await place(bed, 1, query(prompt))).decision.worker.worker_id == 2


@pytest.mark.row("S1-67", "S1-72")
async def test_a_route_with_token_ids_hashes_them_as_frontends_do(bed: LocalRouter) -> None:
    prompt = tokens(10 * B + 3)
    async with indexer() as fake:
        await bed.add(worker(1), worker(2, loras=frozenset({"mine"})), fake.instance)
        hashes = HASHER.prefix_hashes(prompt)
        fake.publish(trusted(2), stores(2, hashes))
        await until(lambda: depth(bed, 2, hashes) == 10, "the replica has the blocks")
        routed_query = pb.Query(model="m", token_ids=prompt)
        decision = (await bed.unary("Route", pb.RouteRequest(query=routed_query))).decision
        assert (decision.worker.worker_id, decision.overlap_blocks) == (2, 10)
        assert decision.predicted_cached_tokens == 10 * B
        routed_query.routing.lora_name = "mine"
        decision = (await bed.unary("Route", pb.RouteRequest(query=routed_query))).decision
        assert decision.worker.worker_id == 2
        assert decision.overlap_blocks == 0, "an adapter has its own blocks"
        bad = pb.Query(model="m", token_ids=prompt, block_size=2**31)
        with pytest.raises(InvalidRequest) as refused:
            await bed.unary("Route", pb.RouteRequest(query=bad))
        assert refused.value.field == "query.block_size"


@pytest.mark.row("S1-84", "S1-85", "S1-86")
async def test_potential_loads_use_the_cached_blocks_of_each_worker(bed: LocalRouter) -> None:
    prompt = tokens(10 * B)
    hashes = HASHER.prefix_hashes(prompt)
    async with indexer() as fake:
        await bed.add(worker(1), worker(2), fake.instance)
        fake.publish(trusted(1), stores(1, hashes[:4]))
        await until(lambda: depth(bed, 1, hashes) == 4, "the replica has the blocks")
        request = pb.PotentialLoadsRequest(query=pb.Query(model="m", token_ids=prompt))
        rows = (await bed.unary("PotentialLoads", request)).loads
        assert {r.worker.worker_id: r.potential_prefill_tokens for r in rows} == {1: 96, 2: 160}
        explained = await explain(bed, request.query)
        assert {r.worker.worker_id: r.overlap_blocks for r in explained.candidates} == {1: 4, 2: 0}


async def test_an_explanation_has_terms_states_and_ages(bed: LocalRouter) -> None:
    prompt = tokens(10 * B)
    hashes = HASHER.prefix_hashes(prompt)
    async with indexer() as fake:
        await bed.add(worker(1), worker(2), worker(3), fake.instance)
        fake.publish(
            trusted(1),
            stores(1, hashes[:4]),
            trusted(2, "gapped"),
            indexer_pb2.SubscribeResponse(
                source=source_to_proto(Source(1)), load=load_pb2.Load(running=1, kv_used_blocks=2)
            ),
        )
        load_tracker = bed.router.load_tracker
        await until(
            lambda: load_tracker.ranks.report_age_s(Placement(1, 0), 0.0) is not None,
            "the router has a load report",
        )
        bed.clock.now += 0.25
        explained = await explain(bed, query(prompt))
        rows = {row.worker.worker_id: row for row in explained.candidates}
        one, two, three = rows[1], rows[2], rows[3]
        assert explained.candidates[0] == one
        assert explained.selector == "kv"
        assert (one.overlap_blocks, one.source_state, one.source_age_ms) == (4, "exact", 250)
        assert one.report_age_ms == 250
        terms = dict(one.terms)
        # Six uncached blocks count twice, twelve held ones a fiftieth.
        assert (terms["overlap_credit"], terms["prefill"], terms["decode"]) == (4.0, 12.0, 0.24)
        parts = sum(terms[name] for name in ("prefill", "decode", "active", "misses"))
        assert parts * terms["taint_factor"] == one.cost
        assert (two.source_state, two.source_reason, two.overlap_blocks) == ("gapped", "a test", 0)
        assert (three.source_state, three.HasField("source_age_ms")) == ("none", False)


async def test_workers_without_kv_events_have_no_cached_blocks(bed: LocalRouter) -> None:
    prompt = tokens(4 * B)
    hashes = HASHER.prefix_hashes(prompt)
    async with indexer() as fake:
        await bed.add(worker(1, kv_index="none"), worker(2, kv_index="approx"), fake.instance)
        fake.publish(trusted(1), stores(1, hashes), trusted(2), stores(2, hashes))
        await until(lambda: depth(bed, 2, hashes) == 4, "the replica has the blocks")
        explained = await explain(bed, query(prompt))
        assert [row.overlap_blocks for row in explained.candidates] == [0, 0]
        assert "no worker publishes KV events" in explained.decision.reasons[0]


@pytest.mark.row("S1-25")
async def test_if_the_indexer_dies_the_replica_continues_and_finds_another(
    bed: LocalRouter,
) -> None:
    prompt = tokens(4 * B)
    hashes = HASHER.prefix_hashes(prompt)
    async with indexer(900) as first:
        await bed.add(worker(1), worker(2), first.instance)
        first.publish(trusted(2), stores(2, hashes))
        await until(lambda: depth(bed, 2, hashes) == 4, "the replica has the blocks")
    await until(lambda: bed.app.index.indexer_id is None, "the indexer is lost")
    explained = await explain(bed, query(prompt))
    assert explained.candidates[0].source_state == "stale"
    assert explained.decision.worker.worker_id == 2
    async with indexer(901) as second:
        await bed.registry.deregister(NS, 900)
        await bed.add(second.instance)
        await until(lambda: len(second.requests) > 0, "the replica subscribes to the other")
        (resume,) = second.requests[0].resume
        assert (resume.source.worker_id, resume.sequence) == (2, 1)
        second.publish(trusted(2))
        await until(lambda: bed.app.index.indexer_id == 901, "the replica follows the other")
        assert (await explain(bed, query(prompt))).candidates[0].source_state == "exact"


async def test_ten_seconds_after_the_last_indexer_no_overlap_counts(bed: LocalRouter) -> None:
    prompt = tokens(4 * B)
    hashes = HASHER.prefix_hashes(prompt)
    async with indexer() as fake:
        await bed.add(worker(1), worker(2), fake.instance)
        fake.publish(trusted(2), stores(2, hashes))
        await until(lambda: depth(bed, 2, hashes) == 4, "the replica has the blocks")
    await until(lambda: bed.app.index.indexer_id is None, "the indexer is lost")
    bed.clock.now += 10.5
    await until(lambda: depth(bed, 2, hashes) == 0, "the grace is over")
    assert (await place(bed, 1, query(prompt))).decision.overlap_blocks == 0


@pytest.mark.row("S1-18")
async def test_pairs_are_sent_with_their_bootstrap_room(bed: LocalRouter) -> None:
    meeting = {"bootstrap_host": "p", "bootstrap_port": 8998}
    await bed.add(
        worker(1, role="prefill", dp_size=2, **meeting),
        worker(11, role="decode", local_prefill=False),
    )
    routed_query = query(tokens(4 * B))
    decision = (await place(bed, 1, routed_query)).decision
    assert (decision.prefill.worker_id, decision.worker.worker_id) == (1, 11)
    assert decision.bootstrap.bootstrap_host == "p"
    assert decision.bootstrap.bootstrap_room % 2 == decision.prefill.dp_rank
    explained = await explain(bed, routed_query)
    assert [row.leg for row in explained.candidates] == ["prefill", "prefill", "decode"]
    await bed.registry.deregister(NS, 1)
    await until(lambda: not bed.router.fleet.is_present(1), "the prefill worker is removed")
    error = error_from_proto((await place(bed, 2, routed_query)).error)
    assert isinstance(error, Unavailable)
    assert error.reason == "NO_PREFILL_WORKER"


@pytest.mark.row("S1-105", "S1-106")
async def test_a_burst_of_one_prompt_spreads_although_one_worker_holds_it(bed: LocalRouter) -> None:
    prompt = tokens(8 * B)
    hashes = HASHER.prefix_hashes(prompt)
    async with indexer() as fake:
        await bed.add(worker(1), worker(2), worker(3), worker(4), fake.instance)
        fake.publish(trusted(1), stores(1, hashes))
        await until(lambda: depth(bed, 1, hashes) == 8, "the replica has the blocks")
        results = await asyncio.gather(*(place(bed, n, query(prompt)) for n in range(40)))
        shares = [a.decision.worker.worker_id for a in results]
        assert max(map(shares.count, (1, 2, 3, 4))) <= 16
        assert min(map(shares.count, (1, 2, 3, 4))) >= 6


@pytest.fixture
def spans() -> tuple[InMemorySpanExporter, trace.Tracer]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter, provider.get_tracer("test")


@pytest.mark.row("S1-75")
async def test_a_sampled_request_gets_the_stages_of_its_decision_as_spans(
    bed: LocalRouter, spans: tuple[InMemorySpanExporter, trace.Tracer]
) -> None:
    exporter, tracer = spans
    bed.decisions.spans = DecisionSpans(tracer)
    await bed.add(worker(1))
    routed_query = query(tokens(2 * B))
    await place(bed, 1, routed_query, f"00-{TRACE_ID}-{SPAN_ID}-00")
    await place(bed, 2, routed_query)
    await place(bed, 3, routed_query, "nonsense")
    assert exporter.get_finished_spans() == (), "not sampled, no trace, no traceparent"
    await place(bed, 4, routed_query, f"00-{TRACE_ID}-{SPAN_ID}-01")
    finished = exporter.get_finished_spans()
    assert tuple(span.name for span in finished) == SPANS
    for span in finished:
        assert span.parent is not None
        assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (
            TRACE_ID,
            SPAN_ID,
        )
    ends = [(span.start_time or 0, span.end_time or 0) for span in finished]
    assert all(a[0] <= a[1] == b[0] for a, b in pairwise(ends))
    fields = finished[-1].attributes or {}
    assert (fields["request_id"], fields["worker_id"], fields["isl_tokens"]) == ("r4", "1", 32)
    exporter.clear()
    routed_query.model = "nope"
    await place(bed, 5, routed_query, f"00-{TRACE_ID}-{SPAN_ID}-01")
    failed = exporter.get_finished_spans()[-1]
    assert failed.name == "kv_router.schedule"
    assert failed.status.status_code is trace.StatusCode.ERROR


@pytest.mark.row("S1-17", "S1-76")
async def test_metrics_show_the_stages_the_hits_the_index_and_fallbacks(bed: LocalRouter) -> None:
    prompt = tokens(10 * B)
    hashes = HASHER.prefix_hashes(prompt)
    async with indexer() as fake:
        await bed.add(worker(1), worker(11, role="decode"), fake.instance)
        fake.publish(trusted(1), stores(1, hashes[:4]), trusted(2, "gapped"))
        await until(lambda: depth(bed, 1, hashes) == 4, "the replica has the blocks")
        await until(lambda: len(bed.app.index.feed.sources()) == 2, "and the other source")
        await place(bed, 1, query(prompt))
        with pytest.raises(InvalidRequest):
            await bed.unary("Route", pb.RouteRequest(query=pb.Query()))

        for stage in ("block_hashes", "find_matches", "schedule", "total"):
            assert bed.metric("overhead_seconds_count", stage=stage) == 1, "of successes only"
        assert bed.metric("prompt_blocks_total") == 10
        assert bed.metric("overlap_blocks_total") == 4
        assert bed.metric("aggregated_fallbacks_total", reason="no_prefill_worker") == 1
        assert bed.metric("index_connected") == 1
        assert bed.metric("index_blocks") == 4
        assert bed.metric("index_sources", state="exact") == 1
        assert bed.metric("index_sources", state="gapped") == 1
        assert bed.metric("stale_reports") == 0


@pytest.mark.row("S1-14")
async def test_overrides_of_one_request_change_its_decision(bed: LocalRouter) -> None:
    prompt = tokens(10 * B)
    hashes = HASHER.prefix_hashes(prompt)
    async with indexer() as fake:
        await bed.add(worker(1), worker(2), fake.instance)
        fake.publish(
            trusted(1),
            stores(1, hashes),
            indexer_pb2.SubscribeResponse(
                source=source_to_proto(Source(1)), load=load_pb2.Load(kv_used_blocks=2)
            ),
        )
        await until(lambda: depth(bed, 1, hashes) == 10, "the replica has the blocks")
        routed_query = query(prompt)
        assert (await explain(bed, routed_query)).decision.worker.worker_id == 1
        routed_query.config_override.overlap_score_credit = 0.0
        await until(
            lambda: bed.router.load_tracker.load(Placement(1, 0), bed.clock.now).decode_blocks == 2,
            "the load is known",
        )
        assert (await explain(bed, routed_query)).decision.worker.worker_id == 2
        routed_query.config_override.router_temperature = -1.0
        with pytest.raises(InvalidRequest) as refused:
            await explain(bed, routed_query)
        assert refused.value.field == "query.config_override.router_temperature"


async def test_without_an_indexer_in_the_fleet_load_alone_decides(bed: LocalRouter) -> None:
    await bed.add(worker(1), worker(2))
    decision = (await place(bed, 1, query(tokens(2 * B)))).decision
    assert decision.overlap_blocks == 0
    explained = await explain(bed, query(tokens(2 * B)))
    assert {row.source_state for row in explained.candidates} == {"none"}


@pytest.mark.row("S1-51")
async def test_an_unreachable_indexer_does_not_stop_decisions(bed: LocalRouter) -> None:
    await bed.add(worker(1), Instance(900, NS, "indexer", "", "127.0.0.1:9"))
    for number in range(3):
        assert (await place(bed, number, query(tokens(B)))).decision.worker.worker_id == 1


async def test_kv_events_published_to_an_indexer_attract_matching_prompts(bed: LocalRouter) -> None:
    prompt = tokens(10 * B)
    hashes = HASHER.prefix_hashes(prompt)
    async with AsyncExitStack() as stack:
        config = IndexerConfig(registry="memory")
        app = await stack.enter_async_context(living(IndexerApp(config, registry=bed.registry)))
        await bed.add(worker(1), worker(2))
        channel = await stack.enter_async_context(rpc.channel(app.address))
        call: Any = indexer_pb2_grpc.IndexerServiceStub(channel).Publish()
        await stack.enter_async_context(rpc.cancelling(call))
        hello = indexer_pb2.PublishHello(
            worker_id=2,
            partition=partition_to_proto(PART),
            sources=[indexer_pb2.SourceState(source=source_to_proto(Source(2)))],
        )
        batches = [
            batch_to_proto(EventBatch(Source(2), 0, n, [KvEvent(EventKind.STORED, part)]))
            for n, part in enumerate((hashes[:3], hashes[3:7]), 1)
        ]
        await call.write(indexer_pb2.PublishRequest(hello=hello))
        await call.write(indexer_pb2.PublishRequest(batch=batches[0]))
        await until(lambda: depth(bed, 2, hashes) == 3, "the first batch is applied")
        load = load_pb2.Load(running=1, kv_used_blocks=3)
        await call.write(indexer_pb2.PublishRequest(batch=batches[1], loads=[load]))
        await until(lambda: depth(bed, 2, hashes) == 7, "the second batch is applied")
        load_tracker = bed.router.load_tracker
        at = Placement(2, 0)
        await until(
            lambda: load_tracker.load(at, bed.clock.now).requests == 1, "the load report is applied"
        )
        explained = await explain(bed, query(prompt))
        assert explained.decision.worker.worker_id == 2
        assert (explained.candidates[0].overlap_blocks, explained.candidates[0].source_state) == (
            7,
            "exact",
        )
        assert bed.app.index.is_caught_up
