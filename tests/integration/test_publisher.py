"""The KV event publisher over real sockets, to indexers that follow the protocol, and the sim."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

import grpc
import grpc.aio
import pytest

from common.errors import NotFound, Unavailable, Unimplemented
from common.kv.events import EventKind, Partition, Source, SourcePosition
from common.kv.hashing import PrefixHasher, hashes_from_bytes
from common.kv.load import Load
from common.registry.instances import Instance
from common.registry.registry import Lease, MemoryRegistry, MemoryStore
from common.request.preprocessed import StopConditions, TokenIds
from common.request.token_stream import LegRequest
from common.rpc import channel as rpc
from common.rpc.interceptors import RunningCalls
from common.rpc.status import map_rpc_errors
from common.wire.kv import batch_from_proto, source_state_from_proto, source_state_to_proto
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc
from kvmesh.indexer.v1 import indexer_pb2 as pb
from tests.kit.apps import living
from tests.kit.waiting import WAIT_S, until
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.engines.contract import PreprocessedRequest
from worker_svc.engines.sim.config import SimConfig
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.engines.sim.timing import Timing
from worker_svc.kv_events import publish_link
from worker_svc.kv_events import publisher as publisher_module
from worker_svc.kv_events.event_log import RING_BATCHES, PublishedSource
from worker_svc.kv_events.external_events import (
    DuplicatePolicy,
    KvEventFormat,
    PagesCleared,
    PagesRemoved,
    PagesStored,
)
from worker_svc.kv_events.normalizer import Normalizer
from worker_svc.kv_events.publish_link import UNACKED_BATCHES_MAX
from worker_svc.kv_events.publisher import EVENT_PAGES_PER_TURN, Publisher

NS = "default"
SERVICE = pb.DESCRIPTOR.services_by_name["IndexerService"].full_name
WORKER = 7
SOURCE = Source(WORKER)
BLOCK = 4


@pytest.fixture(autouse=True)
def intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regrowing, due after half a minute, must not occur in a test on a slow machine. Each turn of
    the loop publishes its changes."""
    monkeypatch.setattr(publisher_module, "REGROW_INTERVAL_S", 3600.0)
    monkeypatch.setattr(publisher_module, "PUBLISH_SPACING_S", 0.0)
    monkeypatch.setattr(publisher_module, "SMALL_BATCH_SPACING_S", 0.0)


@dataclass
class Stream:
    """One Publish stream as recorded by the indexer."""

    context: Any
    hello: list[SourcePosition] = field(default_factory=list)
    partition: pb.Partition | None = None
    batches: list[tuple[int, int]] = field(default_factory=list)
    chunks: list[tuple[int, int, bool, bool]] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    # Frames with events and load.
    joined: int = 0
    is_over: bool = False
    # grpc allows one write at a time, but the stream's reader and the test may both write.
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def write(self, response: pb.PublishResponse) -> None:
        async with self.writing:
            await self.context.write(response)


@pytest.fixture(autouse=True)
async def _stopped_indexers() -> AsyncIterator[None]:
    """Stops what a failed test left: a server must not outlive its event loop."""
    yield
    for indexer in tuple(FakeIndexer.started):
        await indexer.stop()


class FakeIndexer:
    """Keeps the set of one rank across streams.

    is_mute: sends no response by itself. can_read: while cleared, reads nothing after the hello.
    """

    started: ClassVar[set[FakeIndexer]] = set()

    def __init__(self, indexer_id: int) -> None:
        self.id = indexer_id
        self.epoch = 0
        self.sequence = 0
        self.held: set[int] = set()
        self.streams: list[Stream] = []
        self.is_mute = False
        self.can_read = asyncio.Event()
        self.can_read.set()
        self.port = 0
        self.lease: Lease | None = None
        self._snapshot_hashes: set[int] = set()
        self._server: grpc.aio.Server | None = None
        self._calls = RunningCalls()

    @property
    def stream(self) -> Stream:
        return self.streams[-1]

    @property
    def position(self) -> tuple[int, int]:
        return self.epoch, self.sequence

    async def start(self) -> None:
        self._server = rpc.server(calls=self._calls)
        self.port = rpc.bind(self._server, "127.0.0.1", self.port)
        publish = grpc.stream_stream_rpc_method_handler(
            self.publish,
            request_deserializer=pb.PublishRequest.FromString,
            response_serializer=pb.PublishResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Publish": publish})
        self._server.add_generic_rpc_handlers([handler])
        await self._server.start()
        self.started.add(self)

    async def stop(self) -> None:
        assert self._server is not None
        await rpc.stop(self._server, 0.0, self._calls)
        self.started.discard(self)

    def instance(self) -> Instance:
        return Instance(self.id, NS, "indexer", "", f"127.0.0.1:{self.port}")

    async def publish(self, frames: AsyncIterator[pb.PublishRequest], context: Any) -> None:
        stream = Stream(context)
        try:
            async for frame in frames:
                if frame.HasField("hello"):
                    self._record_hello(stream, frame.hello)
                    self.streams.append(stream)
                    if not self.is_mute:
                        await stream.write(self._respond_to_hello(stream))
                    continue
                await self.can_read.wait()
                stream.loads += [load.engine_step for load in frame.loads]
                has_events = frame.HasField("batch") or frame.HasField("snapshot")
                if frame.HasField("batch"):
                    self._apply(stream, frame.batch)
                if frame.HasField("snapshot"):
                    self._collect_chunk(stream, frame.snapshot)
                if has_events and frame.loads:
                    stream.joined += 1
                if not self.is_mute and has_events:
                    await stream.write(pb.PublishResponse(acked=[self._acked()]))
        finally:
            stream.is_over = True

    async def resend(self, epoch: int, from_sequence: int) -> None:
        resend = pb.Resend(epoch=epoch, from_sequence=from_sequence)
        await self.stream.write(pb.PublishResponse(resends=[resend]))

    async def ack(self, epoch: int, sequence: int) -> None:
        state = source_state_to_proto(SourcePosition(SOURCE, epoch, sequence))
        await self.stream.write(pb.PublishResponse(acked=[state]))

    async def shrink(self, blocks: int) -> None:
        await self.stream.write(pb.PublishResponse(shrink_blocks=blocks))

    def _record_hello(self, stream: Stream, hello: pb.PublishHello) -> None:
        assert hello.worker_id == WORKER
        stream.hello = [source_state_from_proto(one) for one in hello.sources]
        stream.partition = hello.partition

    def _respond_to_hello(self, stream: Stream) -> pb.PublishResponse:
        response = pb.PublishResponse()
        for state in stream.hello:
            if state.epoch != self.epoch:
                self.epoch, self.sequence, self.held = state.epoch, 0, set()
            if state.sequence > self.sequence:
                response.resends.add(epoch=self.epoch, from_sequence=self.sequence + 1)
        if not response.resends:
            response.acked.append(self._acked())
        return response

    def _acked(self) -> pb.SourceState:
        return source_state_to_proto(SourcePosition(SOURCE, self.epoch, self.sequence))

    def _apply(self, stream: Stream, message: pb.EventBatch) -> None:
        batch = batch_from_proto(message, WORKER)
        stream.batches.append((batch.epoch, batch.sequence))
        if batch.epoch > self.epoch:
            self.epoch, self.sequence, self.held = batch.epoch, 0, set()
        if batch.sequence <= self.sequence:
            return
        assert batch.sequence == self.sequence + 1, "no gap"
        for event in batch.events:
            match event.kind:
                case EventKind.STORED:
                    self.held.update(event.hashes.tolist())
                case EventKind.REMOVED:
                    self.held.difference_update(event.hashes.tolist())
                case EventKind.CLEARED:
                    self.held.clear()
        self.sequence = batch.sequence

    def _collect_chunk(self, stream: Stream, chunk: pb.SnapshotChunk) -> None:
        stream.chunks.append((chunk.epoch, chunk.sequence, chunk.first, chunk.last))
        if chunk.first:
            self._snapshot_hashes = set()
        self._snapshot_hashes.update(hashes_from_bytes(chunk.prefix_hashes).tolist())
        if chunk.last:
            self.held = self._snapshot_hashes
            self.epoch, self.sequence = chunk.epoch, chunk.sequence


def hasher_factory(lora: str, salt: str, block_size: int) -> PrefixHasher:
    return PrefixHasher(mesh_key=b"", model="m", block_size=block_size)


class Mesh:
    """A running publisher, its registry, and the indexers of a test."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.registry = MemoryRegistry(self.store)
        event_format = KvEventFormat(BLOCK, BLOCK, DuplicatePolicy.IDEMPOTENT)
        self.feed = PublishedSource(SOURCE, Normalizer(event_format, hasher_factory))
        self.steps = 0
        self.samples = 0
        self.is_idle = False
        self.publisher = Publisher(
            WORKER,
            Partition("m", BLOCK, 1),
            {0: self.feed},
            self._loads,
            self.registry,
            NS,
            rng=Random(1),
        )
        self.indexers: list[FakeIndexer] = []
        self._last = 0

    def _loads(self) -> Sequence[Load]:
        self.samples += 1
        self.steps += not self.is_idle
        return (Load(engine_step=self.steps),)

    async def indexer(self, **fields: Any) -> FakeIndexer:
        """Adds an indexer to discovery and waits for its hello."""
        indexer = FakeIndexer(100 + len(self.indexers))
        for name, value in fields.items():
            setattr(indexer, name, value)
        self.indexers.append(indexer)
        await indexer.start()
        indexer.lease = await self.registry.register(indexer.instance())
        await until(lambda: indexer.streams, "a hello")
        return indexer

    def store_pages(self, count: int = 1) -> list[int]:
        """Stores unrelated blocks in one tick; returns their external hashes."""
        values = range(self._last, self._last + count)
        self._last += count
        self.publisher.take(
            PagesStored([value], None, struct.pack("<4I", value, 0, 0, 0), BLOCK)
            for value in values
        )
        return list(values)

    def remove_pages(self, values: Sequence[int]) -> None:
        self.publisher.take([PagesRemoved(values)])

    async def store_batches(self, count: int, pages: int = 1) -> None:
        """Stores one prompt of `pages` blocks per tick."""
        for _ in range(count):
            values = range(self._last, self._last + pages)
            self._last += pages
            tokens = struct.pack(f"<{BLOCK * pages}I", *[values[0]] * BLOCK * pages)
            self.publisher.take([PagesStored(values, None, tokens, BLOCK)])
            await asyncio.sleep(0)
        await self.end_tick()

    async def end_tick(self) -> None:
        """Lets the tick end."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    @property
    def published(self) -> set[int]:
        return {n for c in self.feed.event_log.snapshot() for n in c.hashes.tolist()}

    @property
    def position(self) -> tuple[int, int]:
        return self.feed.event_log.epoch, self.feed.event_log.sequence

    def is_resizing(self) -> bool:
        return self.feed.normalizer.is_resizing

    async def wait_until_synced(self, indexer: FakeIndexer) -> None:
        """Waits until the indexer is up to date, and checks that its set is equal."""
        await self.end_tick()
        await until(lambda: indexer.position == self.position, "the indexer has caught up")
        assert indexer.held == self.published


@asynccontextmanager
async def mesh() -> AsyncIterator[Mesh]:
    running = Mesh()
    task = asyncio.create_task(running.publisher.run())
    try:
        yield running
        assert not task.done(), "run() returns only when cancelled"
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=WAIT_S)
        for indexer in running.indexers:
            await indexer.stop()
        await running.registry.close()


@pytest.mark.row("S1-02")
async def test_all_changes_of_one_tick_are_one_batch_and_ticks_are_numbered() -> None:
    async with mesh() as m:
        indexer = await m.indexer()
        first = m.store_pages(3)
        m.remove_pages(first[:1])
        await m.wait_until_synced(indexer)
        m.store_pages()
        await m.wait_until_synced(indexer)
        assert indexer.stream.batches == [(1, 1), (1, 2)]
        assert indexer.stream.hello == [SourcePosition(SOURCE, 1, 0)]
        partition = indexer.stream.partition
        assert partition is not None
        assert (partition.model, partition.block_size, partition.hash_scheme) == ("m", BLOCK, 1)
        assert len(indexer.held) == 3


@pytest.mark.row("S1-19")
async def test_a_new_indexer_receives_all_batches_from_the_first() -> None:
    async with mesh() as m:
        await m.store_batches(5)
        indexer = await m.indexer()
        await m.wait_until_synced(indexer)
        assert indexer.stream.batches == [(1, n) for n in range(1, 6)]
        assert indexer.stream.chunks == []


@pytest.mark.row("S1-06", "S1-19")
@pytest.mark.slow
async def test_batches_past_the_ring_are_replaced_by_a_snapshot_followed_by_live_batches() -> None:
    async with mesh() as m:
        await m.store_batches(RING_BATCHES + 1, pages=5)
        indexer = await m.indexer()
        await m.wait_until_synced(indexer)
        last = RING_BATCHES + 1
        assert indexer.stream.chunks == [(1, last, True, False), (1, last, False, True)]
        m.store_pages()
        await m.wait_until_synced(indexer)
        assert indexer.stream.batches == [(1, last + 1)]


@pytest.mark.row("S1-16")
async def test_a_reconnected_indexer_receives_only_the_batches_it_missed() -> None:
    async with mesh() as m:
        indexer = await m.indexer()
        await m.store_batches(3)
        await m.wait_until_synced(indexer)
        await indexer.stop()
        await m.store_batches(2)
        await indexer.start()
        await m.wait_until_synced(indexer)
        assert indexer.stream.batches == [(1, 4), (1, 5)]
        assert len(indexer.streams) == 2


async def test_an_up_to_date_indexer_receives_live_batches_after_its_acknowledgement() -> None:
    async with mesh() as m:
        await m.store_batches(4)
        indexer = await m.indexer(epoch=1, sequence=4, held=m.published)
        m.store_pages()
        await m.wait_until_synced(indexer)
        assert indexer.stream.batches == [(1, 5)]


@pytest.mark.parametrize(
    ("epoch", "from_sequence", "sent"),
    [(1, 2, [(1, 2), (1, 3)]), (9, 3, [(1, 1), (1, 2), (1, 3)]), (1, 4, [])],
)
async def test_a_resend_is_replayed_from_the_ring(
    epoch: int, from_sequence: int, sent: list[tuple[int, int]]
) -> None:
    async with mesh() as m:
        indexer = await m.indexer()
        await m.store_batches(3)
        await m.wait_until_synced(indexer)
        indexer.stream.batches.clear()
        await indexer.resend(epoch, from_sequence)
        await until(lambda: m.publisher.counters["replays"] == 1, "the resend request arrives")
        m.store_pages()
        await m.wait_until_synced(indexer)
        assert indexer.stream.batches == [*sent, (1, 4)]


@pytest.mark.parametrize("from_sequence", [0, 5, 99])
async def test_a_resend_of_an_unknown_sequence_is_answered_with_a_snapshot(
    from_sequence: int,
) -> None:
    async with mesh() as m:
        indexer = await m.indexer()
        await m.store_batches(3)
        await m.wait_until_synced(indexer)
        await indexer.resend(1, from_sequence)
        await until(lambda: indexer.stream.chunks, "a snapshot")
        assert indexer.stream.chunks == [(1, 3, True, True)]
        await m.wait_until_synced(indexer)


@pytest.mark.slow
async def test_resends_requested_before_a_snapshot_arrives_do_not_restart_it() -> None:
    async with mesh() as m:
        await m.store_batches(RING_BATCHES + 1, pages=20)
        indexer = await m.indexer(is_mute=True)
        resends = [pb.Resend(epoch=1, from_sequence=1)] * 3
        await indexer.stream.write(pb.PublishResponse(resends=resends))
        await m.wait_until_synced(indexer)
        assert [first for _, _, first, _ in indexer.stream.chunks].count(True) == 1
        assert m.publisher.counters["snapshots"] == 1


async def test_no_batch_is_sent_before_the_indexer_names_its_position() -> None:
    async with mesh() as m:
        await m.store_batches(3)
        indexer = await m.indexer(is_mute=True, epoch=1, sequence=2)
        await until(lambda: len(indexer.stream.loads) > 1, "load is sent nevertheless")
        assert indexer.stream.batches == []
        await indexer.ack(1, 2)
        await until(lambda: indexer.stream.batches, "the rest")
        assert indexer.stream.batches == [(1, 3)]


async def test_a_silent_indexer_receives_new_batches_after_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publish_link, "RESUME_TIMEOUT_S", 0.02)
    async with mesh() as m:
        await m.store_batches(3)
        indexer = await m.indexer(is_mute=True, epoch=1, sequence=3)
        m.store_pages()
        await until(lambda: indexer.stream.batches, "a batch")
        assert indexer.stream.batches == [(1, 4)]


@pytest.mark.slow
async def test_an_indexer_that_does_not_read_gets_a_snapshot_later_and_delays_no_other() -> None:
    async with mesh() as m:
        slow, quick = await m.indexer(), await m.indexer()
        slow.can_read.clear()
        for _ in range(2 * RING_BATCHES // 256):
            await m.store_batches(256)
            await m.wait_until_synced(quick)
        assert slow.sequence == 0
        slow.can_read.set()
        await m.wait_until_synced(slow)
        assert slow.stream.batches == [(1, n) for n in range(1, UNACKED_BATCHES_MAX + 1)], (
            "then it waited"
        )
        assert slow.stream.chunks == [(1, 2 * RING_BATCHES, True, True)]
        assert quick.stream.chunks == []
        assert len(slow.streams) == len(quick.streams) == 1


async def test_changes_within_the_spacing_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "SMALL_BATCH_SPACING_S", 0.2)
    async with mesh() as m:
        for _ in range(5):
            m.store_pages()
            # Sleep: the pace of the changes.
            await asyncio.sleep(0.01)
        await until(lambda: m.publisher.counters["batches"] == 2, "the first, then the others")


async def test_events_that_wait_leave_with_the_next_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "SMALL_BATCH_SPACING_S", 3600.0)
    async with mesh() as m:
        indexer = await m.indexer()
        m.store_pages()
        await until(lambda: m.publisher.counters["batches"] == 1, "the first of a quiet time")
        m.store_pages()
        await until(lambda: indexer.sequence == 2, "the other")
        assert indexer.stream.joined, "one frame has it and the load"


async def test_a_large_batch_is_published_before_the_spacing_of_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher_module, "SMALL_BATCH_SPACING_S", 3600.0)
    monkeypatch.setattr(publisher_module, "BATCH_PAGES", 8)
    async with mesh() as m:
        m.store_pages()
        await until(lambda: m.publisher.counters["batches"] == 1, "the first of a quiet time")
        m.store_pages(7)
        await m.end_tick()
        assert m.publisher.counters["batches"] == 1
        m.store_pages()
        await until(lambda: m.publisher.counters["batches"] == 2, "eight pages are enough")


async def test_an_indexer_over_budget_makes_the_publisher_withdraw() -> None:
    async with mesh() as m:
        indexer, other = await m.indexer(), await m.indexer()
        m.store_pages(10)
        await m.wait_until_synced(indexer)
        await indexer.shrink(4)
        await until(lambda: m.publisher.counters["shrunk_blocks"], "it shrinks")
        for one in (indexer, other):
            await m.wait_until_synced(one)
        assert len(indexer.held) == 6
        m.store_pages(5)
        await m.end_tick()
        assert len(m.published) == 6, "no further blocks are advertised"


async def test_the_maps_of_a_lost_cache_are_freed_completely_over_several_loop_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker_svc.kv_events.publisher.RESIZE_PAGES_PER_TURN", 4)
    async with mesh() as m:
        m.store_pages(100)
        await m.end_tick()
        m.publisher.record_loss(0, "a test")
        kept = m.store_pages(2)
        turns = 0
        # Ends: each turn frees pages.
        while m.feed.normalizer.free_deferred(0):
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 20, "no turn frees more than four pages"
        assert len(m.published) == len(kept)


async def test_a_large_shrink_yields_to_the_loop_and_keeps_events_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher_module, "RESIZE_PAGES_PER_TURN", 4)
    async with mesh() as m:
        indexer = await m.indexer()
        first = m.store_pages(50)
        await m.store_batches(10, pages=5)
        await m.wait_until_synced(indexer)
        assert len(indexer.held) == 100
        m.publisher.shrink(80, {0: m.position})
        turns = 0
        # Ends: each turn withdraws blocks.
        while m.is_resizing():
            # A request sent meanwhile is for blocks that are already being withdrawn.
            m.publisher.shrink(20, {0: m.position})
            await asyncio.sleep(0)
            m.remove_pages(first[turns : turns + 1])
            m.store_pages()
            turns += 1
        assert turns >= 24, "no turn inspects more than four pages"
        await m.wait_until_synced(indexer)
        assert len(indexer.held) <= 20
        assert m.publisher.counters["shrunk_blocks"] <= 80
        m.remove_pages(range(m._last))
        await m.wait_until_synced(indexer)
        assert indexer.held == set()
        assert m.feed.normalizer.entry_count == 0
        assert len(indexer.streams) == 1
        assert indexer.stream.chunks == [], "no snapshot is needed"


async def test_a_reset_during_a_shrink_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher_module, "RESIZE_PAGES_PER_TURN", 1)
    async with mesh() as m:
        indexer = await m.indexer()
        m.store_pages(20)
        await m.wait_until_synced(indexer)
        m.publisher.shrink(10, {0: m.position})
        assert m.is_resizing()
        m.publisher.reset(0)
        assert not m.is_resizing()
        m.store_pages(15)
        await m.wait_until_synced(indexer)
        assert len(indexer.held) == 15, "the bound is removed"
        m.publisher.shrink(5, {0: m.position})
        await until(lambda: not m.is_resizing(), "the next demand counts")
        await m.wait_until_synced(indexer)
        assert len(indexer.held) == 10


async def test_withdrawn_blocks_are_published_again_after_a_time_without_shrink_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with mesh() as m:
        indexer = await m.indexer()
        m.store_pages(10)
        await m.wait_until_synced(indexer)
        await indexer.shrink(4)
        await until(lambda: len(m.published) == 6, "it shrinks")
        await m.wait_until_synced(indexer)
        monkeypatch.setattr(publisher_module, "REGROW_BLOCKS_MIN", 3)
        m.publisher.grow()
        await m.wait_until_synced(indexer)
        assert len(indexer.held) == 9, "a little at a time"
        m.publisher.grow()
        await m.wait_until_synced(indexer)
        assert indexer.held == m.published
        assert len(m.published) == 10
        m.store_pages(5)
        await m.wait_until_synced(indexer)
        assert len(m.published) == 15, "the bound is gone"
        assert m.publisher.counters["regrown_blocks"] == 4


async def test_regrowing_is_tried_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "REGROW_INTERVAL_S", 0.01)
    async with mesh() as m:
        indexer = await m.indexer()
        m.store_pages(10)
        await m.wait_until_synced(indexer)
        await indexer.shrink(4)
        await until(lambda: m.publisher.counters["regrown_blocks"], "regrowing is tried")
        await until(lambda: len(m.published) == 10, "capacity is available")


async def test_a_shrink_request_sent_before_the_last_shrink_was_acknowledged_is_ignored() -> None:
    async with mesh() as m:
        indexer = await m.indexer(is_mute=True)
        m.store_pages(10)
        await until(lambda: indexer.sequence == 1, "the blocks are known")
        await indexer.shrink(4)
        await indexer.shrink(4)
        await until(lambda: indexer.sequence == 2, "the withdrawal is known")
        assert len(m.published) == 6
        await indexer.ack(1, 2)
        await indexer.shrink(1)
        await until(lambda: indexer.sequence == 3, "a demand after the withdrawal")
        assert len(m.published) == 5


async def test_a_new_hello_reports_the_start_and_the_end_of_a_degraded_state() -> None:
    async with mesh() as m:
        indexer = await m.indexer()
        m.store_pages(3)
        await m.wait_until_synced(indexer)
        m.publisher.record_loss(0, "a test")
        await until(lambda: len(indexer.streams) == 2, "a new stream")
        assert indexer.streams[0].is_over, "streams of one worker do not overlap"
        assert indexer.stream.hello == [SourcePosition(SOURCE, 2, 1, degraded=True)]
        await m.wait_until_synced(indexer)
        assert indexer.held == set()
        m.publisher.take([PagesCleared()])
        m.store_pages(2)
        await until(lambda: len(indexer.streams) == 3, "a new stream")
        (state,) = indexer.stream.hello
        assert (state.epoch, state.degraded) == (3, False)
        await m.wait_until_synced(indexer)
        assert len(indexer.held) == 2


async def test_a_reset_engine_begins_a_new_epoch_on_the_same_stream() -> None:
    async with mesh() as m:
        indexer = await m.indexer()
        m.store_pages(3)
        await m.wait_until_synced(indexer)
        m.publisher.reset(0)
        await m.wait_until_synced(indexer)
        assert (indexer.held, indexer.position) == (set(), (2, 1))
        m.store_pages(1)
        await m.wait_until_synced(indexer)
        assert len(indexer.streams) == 1


@pytest.mark.slow
async def test_events_that_cannot_be_applied_do_not_affect_the_engine() -> None:
    async with mesh() as m:
        m.store_pages(2)
        broken: Any = ["not a hash"]
        m.publisher.take([PagesRemoved(broken), PagesStored([], None, b"", BLOCK, rank=5)])
        await m.end_tick()
        assert m.feed.event_log.state == SourcePosition(SOURCE, 2, 1, degraded=True)
        assert m.publisher.metric_values()["kv_events_lost"] == 1
        assert m.publisher.metric_values()["kv_unknown_rank"] == 1


async def test_many_pages_are_applied_over_several_turns_and_in_order() -> None:
    async with mesh() as m:
        values = list(range(1, 3 * EVENT_PAGES_PER_TURN + 1))
        tokens = bytes(BLOCK * 4 * len(values))
        m.publisher.take([PagesStored(values, None, tokens, BLOCK)])
        m.publisher.take([PagesRemoved([values[-1]])])
        normalizer = m.feed.normalizer
        seen = []
        for _ in range(5):
            seen.append(normalizer.published_blocks)
            await asyncio.sleep(0)
        turn = EVENT_PAGES_PER_TURN
        assert seen == [turn, 2 * turn, 3 * turn, 3 * turn - 1, 3 * turn - 1]
        indexer = await m.indexer()
        await m.wait_until_synced(indexer)
        assert len(indexer.held) == 3 * turn - 1


async def test_a_reset_drops_the_pages_that_are_not_applied_yet() -> None:
    async with mesh() as m:
        values = list(range(1, 3 * EVENT_PAGES_PER_TURN + 1))
        m.publisher.take([PagesStored(values, None, bytes(BLOCK * 4 * len(values)), BLOCK)])
        m.publisher.reset(0)
        m.store_pages(1)
        for _ in range(5):
            await asyncio.sleep(0)
        assert m.feed.normalizer.published_blocks == 1


@pytest.mark.row("S1-03")
@pytest.mark.slow
async def test_a_changing_load_is_reported_ten_times_a_second_to_every_indexer() -> None:
    async with mesh() as m:
        one, other = await m.indexer(), await m.indexer()
        await until(lambda: min(len(i.stream.loads) for i in (one, other)) >= 3, "three reports")
        # A report that is not sent before the next one is skipped.
        assert one.stream.loads == sorted(set(one.stream.loads)), "the newest, each once"
        loop = asyncio.get_running_loop()
        began, before = loop.time(), m.steps
        await until(lambda: m.steps >= before + 3, "three more")
        assert 0.15 < loop.time() - began < 3.0


async def test_the_workers_of_a_large_fleet_report_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers count as a fleet of ten times the size that reports at the full rate."""
    monkeypatch.setattr(publisher_module, "FULL_RATE_WORKERS", 0.2)
    async with mesh() as m:
        await m.indexer()
        for worker in (WORKER, WORKER + 1):
            member = Instance(worker, NS, "worker", "", "127.0.0.1:1")
            await m.registry.register(member)
        # A sample may still be due at the earlier rate.
        before = m.samples
        await until(lambda: m.samples >= before + 1, "a sample")
        loop = asyncio.get_running_loop()
        began = loop.time()
        await until(lambda: m.samples >= before + 2, "another one")
        assert 0.8 < loop.time() - began < 3.0


@pytest.mark.row("S1-03")
@pytest.mark.slow
async def test_an_unchanged_load_is_sent_once_to_each_stream_and_then_as_a_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with mesh() as m:
        m.is_idle = True
        indexer = await m.indexer()
        await until(lambda: m.samples >= 8, "eight samples")
        assert indexer.stream.loads == [0]
        other = await m.indexer()
        await until(lambda: other.stream.loads == [0], "a new stream gets the load at once")
        monkeypatch.setattr(publish_link, "LOAD_HEARTBEAT_S", 0.3)
        began, before = asyncio.get_running_loop().time(), m.samples
        await until(lambda: len(indexer.stream.loads) >= 3, "two heartbeats")
        assert asyncio.get_running_loop().time() - began >= 0.25
        assert len(indexer.stream.loads) < m.samples - before
        m.is_idle = False
        seen = len(indexer.stream.loads)
        await until(lambda: len(indexer.stream.loads) >= seen + 2, "changes are sent")


async def test_the_stream_to_an_indexer_ends_when_it_leaves_discovery() -> None:
    async with mesh() as m:
        indexer, other = await m.indexer(), await m.indexer()
        assert indexer.lease is not None
        await indexer.lease.close()
        await until(lambda: indexer.stream.is_over, "the stream ends")
        assert [link.indexer.id for link in m.publisher.links] == [other.id]
        m.store_pages()
        await m.wait_until_synced(other)


async def test_an_unreachable_or_rejecting_indexer_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publish_link, "BACKOFF_FIRST_S", 0.01)

    class Refusing(FakeIndexer):
        refusals = 3

        async def publish(self, frames: AsyncIterator[pb.PublishRequest], context: Any) -> None:
            if self.refusals:
                self.refusals -= 1
                raise Unavailable("not yet")
            await super().publish(frames, context)

    async with mesh() as m:
        indexer = Refusing(100)
        m.indexers.append(indexer)
        await indexer.start()
        await m.registry.register(indexer.instance())
        m.store_pages(2)
        await m.wait_until_synced(indexer)
        assert m.publisher.counters["streams"] == 4


# The sim engine.


def sim_worker(
    store: MemoryStore | None = None, *, engine: SimEngine | None = None, **settings: Any
) -> AbstractAsyncContextManager[WorkerApp]:
    config = WorkerConfig(registry="memory", speedup=0.0, **settings)
    registry = MemoryRegistry(store or MemoryStore())
    return living(WorkerApp(config, instance_id=WORKER, registry=registry, engine=engine))


async def complete(app: WorkerApp, tokens: Sequence[int], max_tokens: int = 40) -> None:
    request = PreprocessedRequest(
        token_ids=TokenIds.of(list(tokens)),
        stop_conditions=StopConditions(max_tokens=max_tokens, ignore_eos=True),
    )
    key = app.runner.admit(LegRequest(f"r{tokens[0]}", request=request))
    await app.runner.run(key, lambda _: None)


def cached_by(app: WorkerApp) -> set[int]:
    assert isinstance(app.engine, SimEngine)
    names = app.engine.blocks.names()
    assert len(names) == len(set(names)) == app.engine.blocks.cached_blocks
    return set(names)


def count_removals(app: WorkerApp) -> list[int]:
    """The number of blocks that the engine reports removed from now on."""
    assert isinstance(app.engine, SimEngine)
    inner = app.engine.kv_event_sink
    assert inner is not None
    count = [0]

    def sink(events: Sequence[PagesStored | PagesRemoved]) -> None:
        count[0] += sum(len(one.hashes) for one in events if isinstance(one, PagesRemoved))
        inner(events)

    app.engine.kv_event_sink = sink
    return count


async def listed(app: WorkerApp, rank: int = 0) -> list[engine_pb2.ListKvBlocksResponse]:
    async with rpc.channel(app.address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        call = stub.ListKvBlocks(engine_pb2.ListKvBlocksRequest(dp_rank=rank), timeout=WAIT_S)
        async with rpc.cancelling(call):
            with map_rpc_errors():
                return [message async for message in call]


async def info(app: WorkerApp) -> engine_pb2.GetInfoResponse:
    async with rpc.channel(app.address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        message = await rpc.unary(stub.GetInfo, engine_pb2.GetInfoRequest(), timeout_s=WAIT_S)
    assert isinstance(message, engine_pb2.GetInfoResponse)
    return message


@pytest.mark.parametrize(("blocks", "evicts"), [(16384, False), (24, True)])
async def test_an_indexer_holds_exactly_what_the_sim_engine_has_cached(
    blocks: int, evicts: bool
) -> None:
    store = MemoryStore()
    indexer = FakeIndexer(100)
    await indexer.start()
    registry = MemoryRegistry(store)
    await registry.register(indexer.instance())
    async with sim_worker(store, total_kv_blocks=blocks) as app:
        assert app.publisher is not None
        event_log = app.publisher.sources[0].event_log
        evicted = count_removals(app)
        rng = Random(5)
        shared = [rng.randrange(1000) for _ in range(100)]
        for n in range(12):
            tail = [rng.randrange(1000) for _ in range(rng.randrange(60))]
            await asyncio.gather(complete(app, [*shared, n, *tail]), complete(app, [n, *shared]))
        # The last events are published a little after the last response.
        await until(
            lambda: (
                indexer.held == cached_by(app)
                and indexer.position == (event_log.epoch, event_log.sequence)
            ),
            "caught up",
        )
        cached = cached_by(app)
        assert len(cached) > 10
        assert (evicted[0] > 0) == evicts
        messages = await listed(app)
        names = [n for one in messages for n in hashes_from_bytes(one.prefix_hashes).tolist()]
        assert set(names) == cached
        assert {(one.epoch, one.sequence, one.tier) for one in messages} == {
            (*indexer.position, "device")
        }
        assert isinstance(app.engine, SimEngine)
        await app.engine.flush_cache()
        await until(lambda: not indexer.held, "the cache is flushed")
        assert cached_by(app) == set()
        assert app.publisher.sources[0].normalizer.entry_count == 0
    await indexer.stop()
    await registry.close()


async def test_a_worker_advertises_that_it_publishes_events() -> None:
    store = MemoryStore()
    registry = MemoryRegistry(store)
    async with sim_worker(store) as app:
        (instance,) = (await registry.snapshot(NS)).of("worker")
        assert instance.kv_index == "events"
        await complete(app, range(100))
        response = await info(app)
        assert (response.kv_index, response.kv_index_reason) == ("events", "")
        assert response.counters["kv_blocks"] == len(cached_by(app)) > 0
        (empty_rank,) = [await _error_of(listed(app, rank=3))]
        assert isinstance(empty_rank, NotFound)
        assert empty_rank.field == "dp_rank"


async def test_a_worker_without_kv_events_advertises_an_approximate_index_and_reports_load() -> (
    None
):
    store = MemoryStore()
    registry = MemoryRegistry(store)
    indexer = FakeIndexer(100)
    await indexer.start()
    await registry.register(indexer.instance())
    async with sim_worker(store, kv_events=False) as app:
        (instance,) = (await registry.snapshot(NS)).of("worker")
        assert instance.kv_index == "approx"
        await complete(app, range(100))
        response = await info(app)
        assert (response.kv_index, response.kv_index_reason) == ("approx", "kv_events is off")
        assert isinstance(await _error_of(listed(app)), Unimplemented)
        await until(lambda: indexer.streams and indexer.stream.loads, "load")
        assert indexer.stream.batches == []
    async with sim_worker(MemoryStore()) as other:
        (published,) = (await other._registry.snapshot(NS)).of("worker")
    assert published.card_checksum == instance.card_checksum, "they serve the same model"
    await indexer.stop()


@pytest.mark.parametrize("kv_events", [True, False])
async def test_a_worker_without_a_cache_advertises_no_index(kv_events: bool) -> None:
    store = MemoryStore()
    engine = SimEngine(SimConfig(timing=Timing(speedup=0.0), prefix_caching=False))
    async with sim_worker(store, engine=engine, kv_events=kv_events) as app:
        (instance,) = (await MemoryRegistry(store).snapshot(NS)).of("worker")
        assert instance.kv_index == "none"
        response = await info(app)
        assert (response.kv_index, response.kv_index_reason) == ("none", "prefix caching is off")


async def test_an_empty_cache_is_listed_as_one_empty_message() -> None:
    async with sim_worker() as app:
        (message,) = await listed(app)
        assert (message.epoch, message.sequence, message.prefix_hashes) == (1, 0, b"")


async def _error_of(work: Any) -> Exception:
    try:
        await work
    except Exception as error:
        return error
    raise AssertionError("it should have failed")
