"""The indexer over a real gRPC socket with simulated publishers, subscribers and workers."""

from __future__ import annotations

import asyncio
import sys
import time
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import indexer_svc.app
import indexer_svc.ingest
import indexer_svc.service
import indexer_svc.verify
from common.errors import Conflict, InvalidRequest, MeshError, NotFound, Overloaded, Unavailable
from common.kv.events import (
    SNAPSHOT_CHUNK_BLOCKS,
    EventBatch,
    Hashes,
    Partition,
    Source,
    SourcePosition,
)
from common.kv.index_feed import STALE_GRACE_S, IndexFeed, ResendRequest
from common.registry.instances import Instance
from common.registry.registry import MemoryRegistry, MemoryStore
from common.rpc import channel as rpc
from common.rpc.status import mesh_error_from_rpc
from common.service.health import HealthReporter
from common.service.lifecycle import Lifecycle
from common.wire.kv import (
    batch_to_proto,
    message_parts,
    partition_to_proto,
    source_state_to_proto,
)
from indexer_svc.app import PROGRESS_S, IndexerApp
from indexer_svc.config import IndexerConfig
from indexer_svc.ingest import GONE_GRACE_S
from indexer_svc.service import SERVICE_NAME
from kvmesh.engine.v1 import engine_pb2
from kvmesh.indexer.v1 import indexer_pb2 as pb
from kvmesh.indexer.v1 import indexer_pb2_grpc
from kvmesh.types.v1 import load_pb2
from tests.integration.service_process import check_life
from tests.integration.subscription import apply_subscription_message
from tests.kit.apps import living
from tests.kit.clock import Clock
from tests.kit.kv_events import advertised_blocks, path
from tests.kit.waiting import WAIT_S, until

NS = "default"
PARTITION = Partition("m", 16, 1)
STORED, REMOVED, CLEARED = pb.EVENT_KIND_STORED, pb.EVENT_KIND_REMOVED, pb.EVENT_KIND_CLEARED


def wire(keys: Iterable[int]) -> bytes:
    return np.array(list(keys), dtype="<u8").tobytes()


class Mesh:
    """A running indexer, its registry, and a channel to it."""

    def __init__(
        self, app: IndexerApp, registry: MemoryRegistry, lifecycle: Lifecycle, clock: Clock
    ) -> None:
        self.app = app
        self.registry = registry
        self.lifecycle = lifecycle
        self.clock = clock
        self.channel = rpc.channel(app.address)
        self.stub = indexer_pb2_grpc.IndexerServiceStub(self.channel)

    @property
    def feed(self) -> IndexFeed:
        return self.app.ingest.feed

    def state(self, source: Source) -> str:
        return self.feed.status(source).state if source in self.feed else "unknown"

    async def exact(self, source: Source) -> None:
        await until(lambda: self.state(source) == "exact", f"{source} is exact")

    async def unary(self, method: str, request: Any) -> Any:
        return await rpc.unary(getattr(self.stub, method), request, timeout_s=WAIT_S)

    async def add_worker(self, worker_id: int, address: str = "127.0.0.1:1") -> None:
        instance = Instance(worker_id, NS, "worker", "", address, model="m", block_size=16)
        await self.registry.register(instance)
        await until(lambda: self.app.presence.worker(worker_id) is not None, "it is seen")

    async def match(self, *chain: int, **facts: Any) -> list[tuple[int, int]]:
        request = pb.MatchRequest(
            partition=partition_to_proto(PARTITION), prefix_hashes=wire(chain), **facts
        )
        rows = (await self.unary("Match", request)).matches
        return [(row.source.worker_id, row.device_blocks) for row in rows]


@asynccontextmanager
async def running(registry: MemoryRegistry | None = None, **settings: Any) -> AsyncIterator[Mesh]:
    store, clock = MemoryStore(), Clock()
    shared = registry or MemoryRegistry(store)
    config = IndexerConfig(registry="memory", **settings)
    app = IndexerApp(config, registry=shared, clock=clock)
    lifecycle = Lifecycle(HealthReporter())
    async with living(app, lifecycle, grace_s=0.5):
        mesh = Mesh(app, shared, lifecycle, clock)
        async with mesh.channel:
            yield mesh


class Publisher:
    """A worker's publisher: a closed set, a ring of batches, snapshots on demand.

    lose: batches to be made and not sent. acked: the indexer's last acknowledgement.
    """

    def __init__(self, worker_id: int, *, ring: int = 1024, epoch: int = 1) -> None:
        self.source = Source(worker_id, 0)
        self.epoch, self.sequence = epoch, 0
        self.held: set[int] = set()
        self.ring: deque[pb.EventBatch] = deque(maxlen=ring)
        self.acked = (0, 0)
        self.resends: list[pb.Resend] = []
        self.shrinks: list[int] = []
        self.snapshots = 0
        self.call: Any = None
        self._outbox: asyncio.Queue[pb.PublishRequest | None] = asyncio.Queue(10_000)
        self.is_mute = False
        self.listing: Hashes | None = None  # Content of a snapshot, in place of `held`.

    def hello(self) -> pb.PublishRequest:
        message = pb.PublishRequest()
        message.hello.worker_id = self.source.worker_id
        message.hello.partition.CopyFrom(partition_to_proto(PARTITION))
        state = message.hello.sources.add(epoch=self.epoch, sequence=self.sequence)
        state.source.worker_id = self.source.worker_id
        return message

    @asynccontextmanager
    async def connected(self, mesh: Mesh) -> AsyncIterator[Publisher]:
        call = self.call = mesh.stub.Publish()
        self._outbox = asyncio.Queue(10_000)
        async with rpc.cancelling(call), asyncio.TaskGroup() as tasks:
            await call.write(self.hello())
            reader = tasks.create_task(self._read(call))
            writer = tasks.create_task(self._write(call))
            try:
                yield self
            finally:
                reader.cancel()
                writer.cancel()

    def send(self, **parts: Any) -> None:
        self._outbox.put_nowait(pb.PublishRequest(**parts))

    def publish(self, *events: pb.Event, lose: bool = False) -> None:
        self.sequence += 1
        batch = pb.EventBatch(epoch=self.epoch, sequence=self.sequence, events=events)
        self.ring.append(batch)
        if not lose and self.call is not None:
            self.send(batch=batch)

    def store(self, *blocks: int, lose: bool = False) -> None:
        new: dict[int, None] = {}
        for block in blocks:
            new.update(dict.fromkeys(b for b in path(block) if b not in self.held))
        self.held.update(new)
        self.publish(pb.Event(kind=STORED, prefix_hashes=wire(new)), lose=lose)

    def remove(self, block: int) -> None:
        gone = [block] if block in self.held else []
        for parent in gone:  # The set grows while it is read: the children of its blocks follow.
            gone += [b for b in (2 * parent, 2 * parent + 1) if b in self.held]
        gone.reverse()
        self.held.difference_update(gone)
        self.publish(pb.Event(kind=REMOVED, prefix_hashes=wire(gone)))

    def clear(self) -> None:
        self.held.clear()
        self.publish(pb.Event(kind=CLEARED))

    def reset(self) -> None:
        self.epoch, self.sequence = self.epoch + 1, 0
        self.held.clear()
        self.ring.clear()

    async def _write(self, call: Any) -> None:
        # Ends: the test cancels it.
        while True:
            await call.write(await self._outbox.get())

    async def _read(self, call: Any) -> None:
        async for frame in call:
            for state in frame.acked:
                self.acked = (state.epoch, state.sequence)
            if frame.shrink_blocks:
                self.shrinks.append(frame.shrink_blocks)
            for resend in frame.resends:
                self.resends.append(resend)
                if not self.is_mute:
                    self._answer(resend)

    def _answer(self, resend: pb.Resend) -> None:
        has_it = bool(self.ring) and self.ring[0].sequence <= resend.from_sequence
        if resend.epoch == self.epoch and has_it:
            for batch in self.ring:
                if batch.sequence >= resend.from_sequence:
                    self.send(batch=batch)
            return
        self.snapshots += 1
        keys = self.listing
        if keys is None:
            keys = np.array(sorted(self.held), dtype="<u8")
        stops = range(
            SNAPSHOT_CHUNK_BLOCKS, len(keys) + SNAPSHOT_CHUNK_BLOCKS, SNAPSHOT_CHUNK_BLOCKS
        ) or [SNAPSHOT_CHUNK_BLOCKS]
        for stop in stops:
            part = pb.SnapshotChunk(epoch=self.epoch, sequence=self.sequence)
            part.source.worker_id = self.source.worker_id
            part.prefix_hashes = keys[stop - SNAPSHOT_CHUNK_BLOCKS : stop].tobytes()
            part.first, part.last = stop == stops[0], stop == stops[-1]
            self.send(snapshot=part)


class Replica:
    """A router's replica of the index."""

    def __init__(self) -> None:
        self.feed = IndexFeed()
        self.is_caught_up = False
        self.snapshots = 0
        self.taken = 0
        self.loads: dict[int, int] = {}

    async def follow(self, mesh: Mesh, frames: int | None = None) -> None:
        """Subscribe and apply `frames` frames. Raises the error that ends the stream."""
        self.is_caught_up = False
        self.feed.mark_all_disconnected(0.0, "the stream ended")
        request = pb.SubscribeRequest(resume=map(source_state_to_proto, self.feed.positions()))
        call: Any = mesh.stub.Subscribe(request)
        async with rpc.cancelling(call):
            # Ends: after the frames; without a number the test cancels it.
            while frames is None or frames > 0:
                try:
                    message = await call.read()
                except grpc.aio.AioRpcError as error:
                    raise mesh_error_from_rpc(error) from error
                if message is grpc.aio.EOF:
                    raise EOFError(await call.code())
                frames = None if frames is None else frames - 1
                self.take(message)

    def take(self, message: pb.SubscribeResponse) -> None:
        self.taken += 1
        for _ in apply_subscription_message(self.feed, message, 0.0):
            pass
        # A router would subscribe again here.
        assert not any(isinstance(event, ResendRequest) for event in self.feed.take_events())
        for part in message_parts(message):
            self.is_caught_up |= part.caught_up
            self.snapshots += part.HasField("snapshot") and part.snapshot.last
            if part.HasField("load"):
                self.loads[part.source.worker_id] = part.load.running

    def equals(self, publisher: Publisher) -> bool:
        return is_copied(self.feed, publisher)


def is_copied(feed: IndexFeed, publisher: Publisher) -> bool:
    source = publisher.source
    return (
        source in feed
        and feed.status(source).state == "exact"
        and advertised_blocks(feed, source) == publisher.held
    )


@asynccontextmanager
async def following(replica: Replica, mesh: Mesh) -> AsyncIterator[Replica]:
    task = asyncio.create_task(replica.follow(mesh))
    try:
        yield replica
    finally:
        task.cancel()
        await asyncio.wait({task})


# Routable.


@pytest.mark.slow
async def test_an_indexer_waits_for_a_worker_as_long_as_its_events_arrive() -> None:
    registry = MemoryRegistry(MemoryStore())
    worker = Instance(7, NS, "worker", "", "127.0.0.1:1", model="m", block_size=16)
    await registry.register(replace(worker, kv_index="events"))
    limit_s = 1.0
    async with (
        running(registry, routable_limit_s=limit_s) as mesh,
        Publisher(7).connected(mesh) as publisher,
    ):
        publisher.is_mute = True
        publisher.store(1, lose=True)
        publisher.store(2)
        await until(lambda: publisher.resends, "the indexer requests what is missing")
        for part in range(5):
            chunk = pb.SnapshotChunk(epoch=1, sequence=2, first=not part)
            chunk.source.worker_id = 7
            chunk.prefix_hashes = wire([part + 1])
            mesh.clock.now += PROGRESS_S
            publisher.send(snapshot=chunk)
            # Sleep: the parts of a large snapshot take longer than the limit.
            await asyncio.sleep(0.3 * limit_s)
            assert not mesh.app.routable.is_routable
        mesh.clock.now += 2 * PROGRESS_S
        await until(lambda: mesh.app.routable.is_routable, "it waits for the rest in vain")
        assert [peer.instance_id for peer in mesh.app.routable.given_up] == [7]


# Publishing.


@pytest.mark.row("S1-02", "S1-08", "S1-32", "S1-33", "S1-37")
async def test_what_is_published_matches_and_is_acknowledged() -> None:
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(4)
        publisher.store(9)
        await until(lambda: publisher.acked == (1, 2), "both are acknowledged")
        assert await mesh.match(1, 2, 4, 8) == [(7, 3)]
        assert await mesh.match(1, worker_ids=[8]) == []
        publisher.remove(2)
        await until(lambda: publisher.acked == (1, 3), "the removal too")
        assert await mesh.match(1, 2, 4, 8) == [(7, 1)]


async def test_acknowledgements_are_combined_and_have_the_last_batch() -> None:
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        for block in range(1, 501):
            publisher.store(block)
        await until(lambda: publisher.acked == (1, 500), "all are acknowledged")
        assert advertised_blocks(mesh.feed, publisher.source) == publisher.held


@pytest.mark.row("S1-26")
async def test_gap_repair_from_the_publishers_ring_makes_the_source_exact_again() -> None:
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(4)
        publisher.is_mute = True
        publisher.store(5, lose=True)
        publisher.store(6)
        await until(lambda: mesh.state(publisher.source) == "gapped", "the gap is seen")
        assert await mesh.match(1) == []
        await until(lambda: len(publisher.resends) == 1, "the gap is reported")
        assert publisher.resends[0].from_sequence == 2
        publisher._answer(publisher.resends[0])
        await mesh.exact(publisher.source)
        assert advertised_blocks(mesh.feed, publisher.source) == {1, 2, 3, 4, 5, 6}
        assert publisher.snapshots == 0


@pytest.mark.row("S1-09", "S1-26")
async def test_a_gap_older_than_the_ring_is_repaired_by_a_snapshot() -> None:
    async with running() as mesh, Publisher(7, ring=2).connected(mesh) as publisher:
        publisher.store(4)
        for block in (5, 6, 7, 8):
            publisher.store(block, lose=True)
        publisher.store(9)
        await until(lambda: publisher.acked == (1, 6), "it has caught up")
        await mesh.exact(publisher.source)
        assert advertised_blocks(mesh.feed, publisher.source) == publisher.held
        assert publisher.snapshots == 1


async def test_a_new_epoch_begins_with_an_empty_set() -> None:
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(40)
        publisher.reset()
        publisher.store(3)
        await until(lambda: publisher.acked == (2, 1), "the new epoch is known")
        assert advertised_blocks(mesh.feed, publisher.source) == {1, 3}


@pytest.mark.row("S1-06", "S1-07")
@pytest.mark.slow
async def test_a_restarted_indexer_gets_all_sources_back_including_idle_ones() -> None:
    idle, busy = Publisher(7, ring=4), Publisher(8)
    idle.store(*range(1, 5000))
    for block in range(1, 9):
        idle.store(5000 + block)
    busy.store(4)
    async with running() as mesh, idle.connected(mesh), busy.connected(mesh):
        await mesh.exact(idle.source)
        await mesh.exact(busy.source)
    async with running() as mesh, idle.connected(mesh), busy.connected(mesh):
        await mesh.exact(idle.source)
        await mesh.exact(busy.source)
        assert advertised_blocks(mesh.feed, idle.source) == idle.held
        assert advertised_blocks(mesh.feed, busy.source) == busy.held
        assert (idle.snapshots, busy.snapshots) == (2, 0), (
            "the ring had all batches of only one source"
        )
        assert idle.resends[-1].from_sequence == 1


async def test_a_reconnected_publisher_resends_only_the_missed_batches() -> None:
    async with running() as mesh:
        publisher = Publisher(7)
        async with publisher.connected(mesh):
            publisher.store(4)
            await until(lambda: publisher.acked == (1, 1), "acknowledged")
        await until(lambda: mesh.state(publisher.source) == "stale", "the stream is missed")
        assert await mesh.match(1, 2, 4) == [(7, 3)]
        publisher.store(5, lose=True)
        async with publisher.connected(mesh):
            await until(lambda: publisher.acked == (1, 2), "caught up")
            assert [r.from_sequence for r in publisher.resends] == [2]
            await mesh.exact(publisher.source)


async def test_a_stream_without_hello_is_refused() -> None:
    async with running() as mesh:
        error = await refused(mesh, pb.PublishRequest(batch=pb.EventBatch(sequence=1)))
        assert isinstance(error, Conflict)
        assert error.reason == "HELLO_REQUIRED"


async def test_an_invalid_frame_ends_the_stream_with_its_field() -> None:
    async with running() as mesh:
        hello = Publisher(7).hello()
        for frames, field in (
            ([hello, hello], "hello"),
            ([hello, pb.PublishRequest(batch=pb.EventBatch(dp_rank=3, sequence=1))], "dp_rank"),
            (
                [
                    hello,
                    pb.PublishRequest(snapshot=pb.SnapshotChunk(source=pb.Source(worker_id=8))),
                ],
                "snapshot.source",
            ),
            ([pb.PublishRequest(hello=pb.PublishHello())], "hello.worker_id"),
        ):
            error = await refused(mesh, *frames)
            assert isinstance(error, InvalidRequest)
            assert error.field == field
        await until(lambda: mesh.app.ingest.publishers == {}, "no state is left")


async def refused(mesh: Mesh, *frames: pb.PublishRequest) -> MeshError:
    call: Any = mesh.stub.Publish()
    async with rpc.cancelling(call):
        for frame in frames:
            await call.write(frame)
        return await error_of(call)


async def error_of(call: Any) -> MeshError:
    """Return the error that ends a stream."""
    async with asyncio.timeout(WAIT_S):
        try:
            while await call.read() is not grpc.aio.EOF:
                continue
            await call.wait_for_connection()
        except grpc.aio.AioRpcError as error:
            return mesh_error_from_rpc(error)
    raise AssertionError("the stream ended without an error")


async def test_a_newer_stream_of_a_worker_replaces_the_older_one() -> None:
    async with running() as mesh:
        older, newer = Publisher(7), Publisher(7)
        call: Any = mesh.stub.Publish()
        async with rpc.cancelling(call):
            await call.write(older.hello())
            await until(lambda: older.source in mesh.feed, "it is there")
            async with newer.connected(mesh):
                assert (await error_of(call)).reason == "REPLACED"
                newer.store(4)
                await until(lambda: newer.acked == (1, 1), "the newer one is served")
                assert mesh.state(newer.source) == "exact", (
                    "the end of the older stream does not end the newer"
                )


# Removal.


@pytest.mark.slow
async def test_a_lost_publisher_matches_for_ten_seconds_and_stays_known_while_registered() -> None:
    async with running() as mesh:
        await mesh.add_worker(7)
        async with Publisher(7).connected(mesh) as publisher:
            publisher.store(4)
            await until(lambda: publisher.acked == (1, 1), "acknowledged")
        await until(lambda: mesh.state(publisher.source) == "stale", "its stream is missed")
        assert await mesh.match(1) == [(7, 1)]
        mesh.clock.now += STALE_GRACE_S
        await until(lambda: not mesh.feed.is_matchable(publisher.source), "it no longer matches")
        assert publisher.source in mesh.feed


@pytest.mark.slow
async def test_an_unregistered_worker_without_a_stream_is_removed() -> None:
    async with running() as mesh:
        await mesh.add_worker(7)
        await mesh.add_worker(8)
        async with Publisher(7).connected(mesh) as publisher:
            publisher.store(*range(1, 3000))
            publisher.send(loads=[load_pb2.Load(running=1)])
            await until(lambda: publisher.acked == (1, 1), "acknowledged")
            await mesh.registry.deregister(NS, 7)
            await until(lambda: mesh.app.presence.worker(7) is None, "it has left")
            mesh.clock.now += 10 * GONE_GRACE_S
            await mesh.app.ingest.tick(mesh.app.presence)
            assert mesh.state(publisher.source) == "exact", "its stream is there"
        await until(lambda: mesh.state(publisher.source) == "stale", "its stream has ended")
        mesh.clock.now += GONE_GRACE_S
        await until(lambda: publisher.source not in mesh.feed, "its source is removed")
        await until(lambda: mesh.feed.used_bytes == 0, "its blocks are removed")
        assert mesh.app.ingest.histories == {}
        assert mesh.app.ingest.loads == {}


# Subscribing.


async def test_a_replica_receives_snapshots_then_live_batches_then_statuses() -> None:
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(*range(1, 10_000))
        await until(lambda: publisher.acked == (1, 1), "acknowledged")
        async with following(Replica(), mesh) as replica:
            await until(lambda: replica.is_caught_up, "caught up")
            assert replica.equals(publisher)
            publisher.store(10_001)
            publisher.remove(2500)
            await until(lambda: replica.equals(publisher), "live")
            assert replica.snapshots == 1
            publisher.is_mute = True
            publisher.store(3, lose=True)
            publisher.store(3)
            source = publisher.source
            await until(
                lambda: replica.feed.status(source).state == "gapped", "the gap is reported"
            )
            # Both are on separate streams: one may arrive long after the other.
            await until(lambda: len(publisher.resends) == 1, "its publisher has the request")
            publisher._answer(publisher.resends[0])
            await until(lambda: replica.equals(publisher), "and its end")
            assert replica.snapshots == 1, "gap repair needs no snapshot"


async def test_a_batch_is_encoded_once_for_all_subscribers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[int] = []

    def count_encoding(batch: EventBatch) -> pb.EventBatch:
        encoded.append(batch.sequence)
        return batch_to_proto(batch)

    monkeypatch.setattr(indexer_svc.service, "batch_to_proto", count_encoding)
    replicas = [Replica() for _ in range(4)]
    async with (
        running() as mesh,
        Publisher(7).connected(mesh) as publisher,
        AsyncExitStack() as streams,
    ):
        publisher.store(1)
        await mesh.exact(publisher.source)
        for replica in replicas:
            await streams.enter_async_context(following(replica, mesh))
        await until(lambda: all(replica.is_caught_up for replica in replicas), "all follow")
        encoded.clear()
        for block in range(2, 10):
            publisher.store(block)
            await until(
                lambda: all(replica.equals(publisher) for replica in replicas), "all received it"
            )
        for block in range(10, 50):
            publisher.store(block)
        await until(lambda: all(replica.equals(publisher) for replica in replicas), "all are equal")
        assert encoded == list(range(2, publisher.sequence + 1))


@pytest.mark.row("S1-16")
async def test_a_resumed_replica_receives_the_missed_batches_and_no_snapshot() -> None:
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(40)
        replica = Replica()
        async with following(replica, mesh):
            await until(lambda: replica.equals(publisher), "the replica equals the publisher")
        snapshots = replica.snapshots
        publisher.store(41)
        publisher.remove(20)
        await until(lambda: publisher.acked == (1, 3), "acknowledged")
        async with following(replica, mesh):
            await until(lambda: replica.equals(publisher), "the replica equals the publisher again")
            assert replica.snapshots == snapshots


async def test_a_resumed_replica_receives_which_sources_are_gone() -> None:
    async with running() as mesh:
        await mesh.add_worker(8)
        replica = Replica()
        async with Publisher(7).connected(mesh) as publisher:
            publisher.store(4)
            async with following(replica, mesh):
                await until(lambda: replica.equals(publisher), "the replica equals the publisher")
        mesh.feed.forget(publisher.source, "left")
        async with following(replica, mesh):
            await until(lambda: publisher.source not in replica.feed, "it is reported")


async def test_a_replica_survives_a_restart_of_its_indexer() -> None:
    publisher, replica = Publisher(7), Replica()
    publisher.store(*range(1, 100))
    async with running() as mesh, publisher.connected(mesh), following(replica, mesh):
        await until(lambda: replica.equals(publisher), "the replica equals the publisher")
    publisher.store(101, lose=True)
    async with running() as mesh:
        await mesh.add_worker(7)
        async with following(replica, mesh):
            source = publisher.source
            await until(
                lambda: replica.feed.status(source).state == "stale", "there are no reports"
            )
            async with publisher.connected(mesh):
                await until(
                    lambda: replica.equals(publisher), "the replica equals the publisher again"
                )


@pytest.mark.row("S1-03")
async def test_workers_known_only_to_a_resuming_subscriber_leave_no_state() -> None:
    async with running() as mesh:
        await mesh.add_worker(7)
        replica = Replica()
        for worker_id in range(100, 150):
            source = Source(worker_id)
            replica.feed.register_source(PARTITION, SourcePosition(source, 1, 1), 0.0)
        replica.feed.take_events()
        async with following(replica, mesh):
            await until(
                lambda: replica.is_caught_up and not replica.feed.sources(),
                "all subscribers are removed",
            )
        assert mesh.app.presence._absent_since == {}


async def test_a_new_subscriber_receives_the_latest_loads() -> None:
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        async with following(Replica(), mesh) as replica:
            await until(lambda: replica.is_caught_up, "caught up")
            for running_now in range(1, 20):
                publisher.send(loads=[load_pb2.Load(running=running_now)])
            await until(lambda: replica.loads == {7: 19}, "the last load arrives")
        async with following(Replica(), mesh) as late_replica:
            await until(lambda: late_replica.loads == {7: 19}, "a new subscriber has the load")


async def test_loads_of_many_workers_reach_a_subscriber_in_few_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(indexer_svc.ingest, "LOAD_BATCH_S", 1.0)
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(running())
        publishers = [Publisher(n) for n in range(1, 21)]
        for publisher in publishers:
            await stack.enter_async_context(publisher.connected(mesh))
        replica = await stack.enter_async_context(following(Replica(), mesh))
        await until(
            lambda: replica.is_caught_up and len(replica.feed.positions()) == 20, "caught up"
        )
        before = replica.taken
        for publisher in publishers:
            publisher.send(loads=[load_pb2.Load(running=publisher.source.worker_id)])
        await until(lambda: len(replica.loads) == 20, "all loads arrive")
        assert replica.taken - before <= 5


async def test_the_load_of_a_publisher_is_dropped_with_its_stream() -> None:
    async with running() as mesh:
        async with Publisher(7).connected(mesh) as publisher:
            publisher.send(loads=[load_pb2.Load(running=1)])
            await until(lambda: publisher.source in mesh.app.ingest.loads, "it is received")
        await until(lambda: mesh.state(publisher.source) == "stale", "its stream has ended")
        assert mesh.app.ingest.loads == {}
        async with following(Replica(), mesh) as replica:
            await until(lambda: replica.is_caught_up, "caught up")
            assert replica.loads == {}


async def test_a_subscriber_of_one_partition_receives_no_other() -> None:
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(4)
        publisher.send(loads=[load_pb2.Load(running=1)])
        await until(lambda: publisher.acked == (1, 1), "acknowledged")
        other = pb.Partition(model="other", block_size=16)
        call: Any = mesh.stub.Subscribe(pb.SubscribeRequest(partition=other))
        async with rpc.cancelling(call), asyncio.timeout(WAIT_S):
            message = await call.read()
        assert message.caught_up
        assert not message.more


@pytest.mark.slow
async def test_a_slow_subscriber_is_disconnected_resumes_and_becomes_equal() -> None:
    async with running(subscriber_mb=1) as mesh, Publisher(7).connected(mesh) as publisher:
        replica = Replica()
        await replica.follow(mesh, frames=1)
        call: Any = mesh.stub.Subscribe(pb.SubscribeRequest())
        async with rpc.cancelling(call):
            await call.read()  # and then stops reading, while some 8 MB are published
            for start in range(1, 1_000_000, 8192):
                keys = range(start, start + 8192)
                publisher.held.update(keys)
                publisher.publish(pb.Event(kind=STORED, prefix_hashes=wire(keys)))
            await until(lambda: publisher.acked[1] == publisher.sequence, "all batches are applied")
            error = await error_of(call)
            assert isinstance(error, Overloaded)
            assert error.reason == "SUBSCRIBER_CUT"
        async with following(replica, mesh):
            await until(lambda: replica.equals(publisher), "the replica equals the publisher")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_a_replica_equals_its_index_under_random_traffic_and_interruptions(
    seed: int,
) -> None:
    rng, replica = Random(seed), Replica()
    async with running() as mesh:
        publishers = [Publisher(n, ring=rng.choice([2, 1024])) for n in range(1, 6)]
        async with (
            asyncio.TaskGroup() as tasks,
            contexts(publisher.connected(mesh) for publisher in publishers),
        ):
            # Large enough that snapshots have several parts, with changes between them.
            for publisher in publishers:
                publisher.store(*range(1, 30_000))
            for _ in range(12):
                follower = tasks.create_task(replica.follow(mesh, rng.randrange(1, 30)))
                for _ in range(60):
                    disturb(rng.choice(publishers), rng)
                    if rng.random() < 0.2:
                        await asyncio.sleep(0)
                enough = replica.taken + rng.randrange(1, 20)
                await until(
                    lambda: follower.done() or replica.is_caught_up or replica.taken >= enough,  # noqa: B023
                    "it has progressed",
                )
                follower.cancel()
                await asyncio.wait({follower})
            for publisher in publishers:
                await mesh.exact(publisher.source)
            await until(
                lambda: all(is_copied(mesh.feed, p) for p in publishers), "the index is complete"
            )
            async with following(replica, mesh):
                await until(
                    lambda: all(map(replica.equals, publishers)), "the replica equals the publisher"
                )


@asynccontextmanager
async def contexts(many: Iterable[Any]) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for one in many:
            await stack.enter_async_context(one)
        yield


def disturb(publisher: Publisher, rng: Random) -> None:
    match rng.choices(("store", "lose", "remove", "clear", "reset"), (60, 3, 30, 2, 1))[0]:
        case "store":
            publisher.store(*(rng.randrange(1, 60_000) for _ in range(5)))
        case "lose":
            publisher.store(rng.randrange(1, 60_000), lose=True)
        case "remove":
            publisher.remove(rng.randrange(20, 60_000))
        case "clear":
            publisher.clear()
        case "reset":
            publisher.reset()
            publisher.store(rng.randrange(1, 60_000))


# Queries.


@pytest.mark.row("S1-08")
async def test_match_queries_can_be_pipelined() -> None:
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(8)
        await until(lambda: publisher.acked == (1, 1), "acknowledged")
        call: Any = mesh.stub.MatchStream()
        async with rpc.cancelling(call), asyncio.timeout(WAIT_S):
            for frame in range(10):
                questions = [
                    pb.MatchQuestion(
                        id=100 * frame + n,
                        request=pb.MatchRequest(
                            partition=partition_to_proto(PARTITION),
                            prefix_hashes=wire(path(8)[: 1 + n % 4]),
                        ),
                    )
                    for n in range(100)
                ]
                await call.write(pb.MatchStreamRequest(questions=questions))
            depths: dict[int, int] = {}
            while len(depths) < 1000:
                for answer in (await call.read()).answers:
                    depths[answer.id] = answer.response.matches[0].device_blocks
        assert depths == {n: 1 + n % 4 for n in range(1000)}


async def test_a_query_without_a_partition_is_rejected_by_field() -> None:
    async with running() as mesh:
        with pytest.raises(InvalidRequest) as error:
            await mesh.unary("Match", pb.MatchRequest())
        assert error.value.field == "partition"
        bad = pb.MatchRequest(partition=partition_to_proto(PARTITION), prefix_hashes=b"1")
        with pytest.raises(InvalidRequest) as error:
            await mesh.unary("Match", bad)
        assert error.value.field == "prefix_hashes"


async def test_dump_and_stats_report_the_indexed_sources() -> None:
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(*range(1, 9000))
        await until(lambda: publisher.acked == (1, 1), "acknowledged")
        chunks = [c async for c in mesh.stub.Dump(pb.DumpRequest(), timeout=WAIT_S)]
        assert [c.chunk.first for c in chunks] == [True, False, False]
        assert [c.chunk.last for c in chunks] == [False, False, True]
        data = b"".join(c.chunk.prefix_hashes for c in chunks)
        assert sorted(np.frombuffer(data, "<u8").tolist()) == list(range(1, 9000))
        stats = await mesh.unary("Stats", pb.StatsRequest())
        assert (stats.blocks, stats.batches_applied) == (8999, 1)
        (row,) = stats.sources
        assert (row.state.sequence, row.status.state, row.blocks) == (1, "exact", 8999)
        assert 0 < stats.used_bytes < stats.budget_bytes
        with pytest.raises(NotFound):
            await mesh.unary("Verify", pb.VerifyRequest(worker_id=99))


def dump_of(mesh: Mesh) -> AsyncIterator[Any]:
    """Open the call here, so that no message is read before the test."""
    context: Any = None
    return aiter(mesh.app._service.Dump(pb.DumpRequest(), context))


@pytest.mark.interpreted
async def test_a_source_cleared_during_its_dump_is_dumped_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a partial read was reported as complete."""
    monkeypatch.setattr("common.kv.prefix_index.PrefixIndex.chunks.__defaults__", (100,))
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(*range(1, 1000))
        await until(lambda: publisher.acked == (1, 1), "acknowledged")
        dump = dump_of(mesh)
        chunks = [(await anext(dump)).chunk for _ in range(3)]
        publisher.clear()
        publisher.store(2)
        await until(lambda: publisher.acked == (1, 3), "acknowledged")
        chunks += [response.chunk async for response in dump]
        assert [chunk.first for chunk in chunks] == [True, False, False, True]
        assert [chunk.last for chunk in chunks] == [False, False, False, True]
        assert np.frombuffer(chunks[-1].prefix_hashes, "<u8").tolist() == [1, 2]
        assert chunks[-1].sequence == 3


@pytest.mark.interpreted
async def test_a_dump_fails_after_five_clears(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.kv.prefix_index.PrefixIndex.chunks.__defaults__", (1,))
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(*range(1, 10))
        await until(lambda: publisher.acked == (1, 1), "acknowledged")

        async def dump() -> None:
            async for _ in dump_of(mesh):
                publisher.clear()
                publisher.store(*range(1, 10))
                at = (1, publisher.sequence)
                await until(lambda at=at: publisher.acked == at, "acknowledged")  # type: ignore[misc]  # mypy cannot infer defaults.

        with pytest.raises(Unavailable, match="rank 0 of worker 7 was cleared 5 times"):
            await dump()


async def test_a_source_that_leaves_before_its_turn_is_not_dumped() -> None:
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(1)
        await until(lambda: publisher.acked == (1, 1), "acknowledged")

        async def read() -> list[Any]:
            return [part async for part in dump_of(mesh)]

        async with mesh.app.ingest.exclusive():
            reader = asyncio.create_task(read())
            await until(lambda: bool(mesh.app.ingest._lock._waiters), "it waits")
            mesh.feed.forget(publisher.source, "its worker has left")
        assert await reader == []


async def test_a_source_that_leaves_before_its_turn_is_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def listing(*_: object) -> indexer_svc.verify._BlockListing:
        return indexer_svc.verify._BlockListing(1, 1, {})

    monkeypatch.setattr(indexer_svc.verify, "_list_worker_blocks", listing)
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(1)
        await until(lambda: publisher.acked == (1, 1), "acknowledged")
        ingest = mesh.app.ingest
        async with ingest.exclusive():
            comparing = asyncio.create_task(
                indexer_svc.verify.compare(ingest, publisher.source, "x:1", rpc.PLAINTEXT)
            )
            await until(lambda: bool(ingest._lock._waiters), "it waits")
            mesh.feed.forget(publisher.source, "its worker has left")
        assert (await comparing).error == "the source is gone"


async def test_a_load_only_source_is_dumped_as_unknown_and_not_compared() -> None:
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(1)
        await until(lambda: publisher.acked == (1, 1), "acknowledged")
        mesh.feed.make_load_only(publisher.source, 0.0)
        (part,) = [part async for part in dump_of(mesh)]
        assert (part.chunk.epoch, part.chunk.sequence, part.chunk.last) == (0, 0, True)
        assert not part.chunk.prefix_hashes
        with pytest.raises(Unavailable, match="over budget"):
            indexer_svc.verify._require_indexed(mesh.app.ingest, publisher.source)


async def test_a_load_is_a_sign_of_life_of_its_publisher() -> None:
    """Regression: the age in the stats was that of the last batch."""
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(1)
        await until(lambda: publisher.acked == (1, 1), "acknowledged")
        mesh.clock.now += 60.0
        publisher.send(loads=[load_pb2.Load(running=3)])
        await until(lambda: publisher.source in mesh.app.ingest.loads, "it is received")
        (row,) = (await mesh.unary("Stats", pb.StatsRequest())).sources
        assert row.age_ms == 0


class Engine:
    """A worker that lists the content of its publisher."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.injected: set[int] = set()

    async def list_kv_blocks(self, request: Any, context: Any) -> AsyncIterator[Any]:
        keys = sorted(self.publisher.held ^ self.injected)
        for start in range(0, max(1, len(keys)), SNAPSHOT_CHUNK_BLOCKS):
            yield engine_pb2.ListKvBlocksResponse(
                epoch=self.publisher.epoch,
                sequence=self.publisher.sequence,
                prefix_hashes=wire(keys[start : start + SNAPSHOT_CHUNK_BLOCKS]),
                tier="device",
            )


async def test_verify_finds_exactly_the_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer_svc.verify, "CATCH_UP_TIMEOUT_S", 0.02)
    publisher = Publisher(7)
    engine = Engine(publisher)
    server = rpc.server()
    handler = grpc.unary_stream_rpc_method_handler(
        engine.list_kv_blocks,
        request_deserializer=engine_pb2.ListKvBlocksRequest.FromString,
        response_serializer=engine_pb2.ListKvBlocksResponse.SerializeToString,
    )
    handlers = {"ListKvBlocks": handler}
    server.add_registered_method_handlers("kvmesh.engine.v1.EngineService", handlers)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with running() as mesh, publisher.connected(mesh):
            publisher.store(*range(1, 6000))
            await mesh.add_worker(7, f"127.0.0.1:{port}")

            async def verified() -> tuple[int, int, int, str]:
                (row,) = (await mesh.unary("Verify", pb.VerifyRequest())).sources
                return row.extra, row.missing, row.equal, row.error

            assert await verified() == (0, 0, 5999, "")
            engine.injected = {5, 6, 7, 70_000, 70_001}
            assert await verified() == (3, 2, 5996, "")
            publisher.sequence += 1  # the publisher remains ahead of the index
            assert "the worker at 1/2" in (await verified())[3]
    finally:
        await server.stop(None)


async def test_verify_reports_why_a_source_cannot_be_compared() -> None:
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        await until(lambda: publisher.source in mesh.feed, "it is there")
        (row,) = (await mesh.unary("Verify", pb.VerifyRequest())).sources
        assert row.error == "its worker is not registered"


# Budget.


@pytest.mark.slow
async def test_over_budget_publishers_shrink_and_an_unresponsive_one_becomes_load_only() -> None:
    async with running(budget_mb=1) as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(*range(1, 20_000))
        await until(lambda: bool(publisher.shrinks), "the publisher has the request")
        assert 9000 < publisher.shrinks[0] < 12_000
        for _ in range(11):
            mesh.clock.now += 1.0
            await mesh.app.ingest.tick(mesh.app.presence)
        status = mesh.feed.status(publisher.source)
        assert status.reason.startswith("over budget")
        assert await mesh.match(1) == []
        await until(lambda: mesh.feed.used_bytes == 0, "its memory is freed")


# Life.


async def test_health_is_serving_with_the_first_publisher_and_reflection_works() -> None:
    async with running() as mesh:
        channel: Any = mesh.channel
        health: Any = health_pb2_grpc.HealthStub(channel)

        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        watch = health.Watch(request)
        async with rpc.cancelling(watch), asyncio.timeout(WAIT_S):
            # The index is empty because no publisher has connected.
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            async with Publisher(7).connected(mesh):
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection.ServerReflectionInfo(iter([question]), timeout=WAIT_S)
        async with rpc.cancelling(call):
            listed = (await call.read()).list_services_response.service
        assert SERVICE_NAME in {service.name for service in listed}


async def test_an_indexer_without_publishers_serves_after_a_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(indexer_svc.app, "FIRST_PUBLISHER_S", 0.01)
    async with running() as mesh:
        await until(lambda: mesh.lifecycle.health._requested_status[SERVICE_NAME], "it serves")


async def test_a_drain_ends_all_streams_without_cutting_a_call() -> None:
    async with running() as mesh, Publisher(7).connected(mesh) as publisher:
        replica = Replica()
        follower = asyncio.create_task(replica.follow(mesh))
        questions: Any = mesh.stub.MatchStream()
        async with rpc.cancelling(questions):
            await questions.write(pb.MatchStreamRequest())
            publisher.store(4)
            await until(lambda: replica.is_caught_up, "it follows")
            await until(lambda: len(mesh.app._calls.names()) == 3, "three streams")
            assert await mesh.app.drain(WAIT_S) == []
            with pytest.raises(EOFError):
                await follower


@pytest.mark.row("S1-28")
@pytest.mark.slow
async def test_metrics_show_sources_by_state_and_count_batches() -> None:
    async with running(metrics_port=0) as mesh, Publisher(7).connected(mesh) as publisher:
        publisher.store(4)
        publisher.send(batch=publisher.ring[0])
        publisher.store(5)
        await until(lambda: publisher.acked == (1, 2), "acknowledged")
        await mesh.match(1)
        text = await asyncio.to_thread(scrape, f"http://{mesh.app.metrics_address}/metrics")
    for line in (
        'kvmesh_indexer_sources{state="exact"} 1.0',
        'kvmesh_indexer_sources{state="gapped"} 0.0',
        "kvmesh_indexer_blocks 4.0",
        "kvmesh_indexer_publishers 1.0",
        "kvmesh_indexer_batches_total 2.0",
        "kvmesh_indexer_duplicates_total 1.0",
        "kvmesh_indexer_match_seconds_count 1.0",
    ):
        assert line in text, text


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as response:
        body: bytes = response.read()
    return body.decode()


@pytest.mark.row("S1-15")
@pytest.mark.slow
async def test_the_process_serves_registers_and_ends_on_sigterm(tmp_path: Path) -> None:
    await check_life("indexer", tmp_path / "registry")


@pytest.mark.row("S1-44")
@pytest.mark.slow
async def test_a_million_blocks_are_restored_while_queries_are_answered(
    record_property: Callable[[str, object], None],
) -> None:
    hashes: Hashes = np.arange(1, 1_000_001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    publishers = [Publisher(n, ring=1) for n in range(1, 5)]
    for number, publisher in enumerate(publishers):
        publisher.listing = hashes[number::4].copy()
        publisher.sequence = 5000
    async with running() as mesh:
        began = time.perf_counter()
        longest_s = 0.0
        async with contexts(publisher.connected(mesh) for publisher in publishers):
            while not all(mesh.state(p.source) == "exact" for p in publishers):
                assert time.perf_counter() - began < WAIT_S, "the call takes too long"
                at = time.perf_counter()
                await mesh.match(int(hashes[0]))
                longest_s = max(longest_s, time.perf_counter() - at)
            took_s = time.perf_counter() - began
        assert mesh.feed.blocks == 1_000_000
        record_property("restore_s", round(took_s, 2))
        record_property("longest_match_ms", round(longest_s * 1e3, 1))
        sys.stderr.write(f"\n1M blocks in {took_s:.2f} s, longest Match {longest_s * 1e3:.1f} ms\n")
