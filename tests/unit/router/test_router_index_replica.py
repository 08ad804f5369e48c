"""The router's replica of the index: which entries match at which time, and how it recovers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import numpy as np
import pytest

import router_svc.index_replica
from common.errors import MeshError, Unavailable
from common.kv.events import EventBatch, EventKind, Hashes, KvEvent, Partition, Source
from common.kv.hashing import hashes_to_bytes
from common.kv.index_feed import STALE_GRACE_S, STEP_BLOCKS_MAX
from common.kv.load import Load
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.request.placement import Placement, Query
from common.streams.silence import SUBSCRIBE
from common.wire.kv import batch_to_proto, partition_to_proto, source_to_proto
from kvmesh.indexer.v1 import indexer_pb2 as pb
from kvmesh.types.v1 import load_pb2
from router_svc.index_replica import STALE_FORGET_S, IndexReplica, Subscription
from tests.kit.waiting import until

PART = Partition("m", 16, 1)
ONE, TWO = Source(1), Source(2, 3)


def chain(count: int, seed: int = 0) -> Hashes:
    return np.random.default_rng(seed).integers(1, 1 << 63, count, dtype=np.uint64)


def query(hashes: Hashes, **changes: object) -> Query:
    facts: dict[str, object] = {"block_size": 16, "hash_scheme": 1, **changes}
    return Query(
        "m",
        16 * len(hashes),
        hashes_to_bytes(hashes),
        int(str(facts["hash_scheme"])),
        int(str(facts["block_size"])),
    )


def status(source: Source, state: str = "exact", **parts: object) -> pb.SubscribeResponse:
    message = pb.SubscribeResponse(
        source=source_to_proto(source),
        partition=partition_to_proto(PART),
        status=pb.SourceStatus(state=state),
    )
    message.MergeFrom(pb.SubscribeResponse(**parts))  # type: ignore[arg-type]  # Named by field.
    return message


def stored(source: Source, sequence: int, hashes: Hashes, epoch: int = 0) -> pb.SubscribeResponse:
    batch = EventBatch(source, epoch, sequence, [KvEvent(EventKind.STORED, hashes)])
    return pb.SubscribeResponse(source=source_to_proto(source), batch=batch_to_proto(batch))


def snapshot(
    source: Source, sequence: int, hashes: Hashes, *, first: bool = True, last: bool = True
) -> pb.SubscribeResponse:
    chunk = pb.SnapshotChunk(
        source=source_to_proto(source),
        sequence=sequence,
        prefix_hashes=hashes_to_bytes(hashes),
        first=first,
        last=last,
    )
    return pb.SubscribeResponse(source=source_to_proto(source), snapshot=chunk)


class FakeIndexer:
    """Subscriptions that a test feeds, one after the other; a MeshError fails the call."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, pb.SubscribeRequest]] = []
        self.messages: asyncio.Queue[pb.SubscribeResponse | MeshError | None] = asyncio.Queue()
        self.open = 0

    @asynccontextmanager
    async def subscribe(
        self, indexer: Instance, request: pb.SubscribeRequest
    ) -> AsyncIterator[Subscription]:
        self.calls.append((indexer.id, request))
        self.open += 1
        try:
            yield self
        finally:
            self.open -= 1

    async def read(self) -> pb.SubscribeResponse | None:
        message = await self.messages.get()
        if isinstance(message, MeshError):
            raise message
        return message


class Bed:
    """A running replica, its feeds, and its clock."""

    def __init__(
        self, indexer_ids: tuple[int, ...] = (91, 92), *, loads_only: bool = False
    ) -> None:
        self.now = 1000.0
        self.revision = 0
        self.loads: list[tuple[int, int, Load, float]] = []
        # Sources whose load does not count any more.
        self.without_load: list[Source] = []
        self.fake = FakeIndexer()
        self.replica = IndexReplica(
            self._report,
            subscribe=self.fake.subscribe,
            loads_only=loads_only,
            rng=Random(1),
            clock=lambda: self.now,
        )
        self.show(*indexer_ids)

    def show(self, *indexer_ids: int) -> None:
        """Discovery shows these indexers."""
        self.revision += 1
        indexers = [Instance(n, "mesh", "indexer", "", f"127.0.0.1:{n}") for n in indexer_ids]
        snapshot = Snapshot(self.revision, {instance.id: instance for instance in indexers})
        self.replica.on_snapshot(snapshot, SnapshotDiff())

    def _report(self, worker_id: int, dp_rank: int, load: Load | None, now: float) -> None:
        if load is None:
            self.without_load.append(Source(worker_id, dp_rank))
        else:
            self.loads.append((worker_id, dp_rank, load, now))

    def depth(self, hashes: Hashes, source: Source = ONE) -> int:
        rows = {row.source: row.device_blocks for row in self.replica.match(query(hashes))}
        return rows.get(source, 0)

    async def feed(self, *messages: pb.SubscribeResponse | MeshError | None) -> None:
        """Send messages, and wait until they are applied."""
        for message in messages:
            self.fake.messages.put_nowait(message)
        mark = len(self.loads) + 1
        if messages and isinstance(messages[-1], pb.SubscribeResponse):
            self.fake.messages.put_nowait(load_of(Source(999)))
            await until(lambda: len(self.loads) >= mark, "all messages are applied")
            self.loads.pop()

    def state(self, source: Source) -> str:
        return self.replica.index_status(Placement(*source), self.now).state


def load_of(source: Source, **facts: int) -> pb.SubscribeResponse:
    return pb.SubscribeResponse(source=source_to_proto(source), load=load_pb2.Load(**facts))


@pytest.fixture
def loads_only() -> bool:
    """Whether the replica subscribes to loads only; tests set it by parametrization."""
    return False


@pytest.fixture
async def bed(monkeypatch: pytest.MonkeyPatch, loads_only: bool) -> AsyncIterator[Bed]:
    monkeypatch.setattr(router_svc.index_replica, "REDIAL_S", 0.002)
    monkeypatch.setattr(router_svc.index_replica, "TICK_S", 0.005)
    bed = Bed(loads_only=loads_only)
    task = asyncio.create_task(bed.replica.run())
    await until(lambda: bed.fake.open == 1, "the replica has subscribed")
    yield bed
    assert not task.done(), "the replica runs until it is cancelled"
    task.cancel()
    await asyncio.wait({task})
    assert bed.fake.open == 0, "no call remains open"


@pytest.mark.row("S1-69")
async def test_stored_blocks_match_and_removed_blocks_do_not(bed: Bed) -> None:
    blocks = chain(8)
    await bed.feed(status(ONE), stored(ONE, 1, blocks[:5]), status(TWO), stored(TWO, 1, blocks[:3]))
    rows = [(row.source, row.device_blocks) for row in bed.replica.match(query(blocks))]
    assert rows == [(ONE, 5), (TWO, 3)]
    removal = EventBatch(ONE, 0, 2, [KvEvent(EventKind.REMOVED, blocks[1:5][::-1].copy())])
    await bed.feed(pb.SubscribeResponse(source=source_to_proto(ONE), batch=batch_to_proto(removal)))
    assert bed.depth(blocks) == 1


async def test_other_partitions_do_not_match(bed: Bed) -> None:
    blocks = chain(4)
    await bed.feed(status(ONE), stored(ONE, 1, blocks))
    assert bed.depth(blocks) == 4
    assert list(bed.replica.match(query(blocks, block_size=32))) == []
    assert list(bed.replica.match(query(blocks, hash_scheme=2))) == []
    assert list(bed.replica.match(Query("other", 64, hashes_to_bytes(blocks), 1, 16))) == []
    assert list(bed.replica.match(Query("m", 64))) == []


async def test_sources_of_all_adapter_versions_count(bed: Bed) -> None:
    blocks = chain(4)
    other = status(TWO)
    other.partition.adapter_version = 5
    await bed.feed(status(ONE), stored(ONE, 1, blocks), other, stored(TWO, 1, blocks[:2]))
    assert (bed.depth(blocks), bed.depth(blocks, TWO)) == (4, 2)


async def test_a_snapshot_counts_from_its_last_part_and_keeps_later_batches(
    bed: Bed,
) -> None:
    blocks = chain(10)
    await bed.feed(
        status(ONE, "gapped"), snapshot(ONE, 7, blocks[:4], last=False), stored(ONE, 8, blocks[8:])
    )
    assert bed.depth(blocks) == 0
    assert bed.state(ONE) == "gapped"
    await bed.feed(snapshot(ONE, 7, blocks[4:8], first=False), status(ONE))
    assert bed.depth(blocks) == 10
    assert bed.state(ONE) == "exact"


async def test_after_a_gap_it_subscribes_again_from_its_position(bed: Bed) -> None:
    blocks = chain(6)
    await bed.feed(status(ONE), stored(ONE, 1, blocks[:2]))
    bed.fake.messages.put_nowait(stored(ONE, 3, blocks[4:]))
    await until(lambda: len(bed.fake.calls) == 2, "the replica subscribes again")
    (resume,) = bed.fake.calls[1][1].resume
    assert (resume.source.worker_id, resume.sequence) == (1, 1)


@pytest.mark.row("S1-25")
async def test_after_the_loss_of_an_indexer_another_resumes_without_duplicates(bed: Bed) -> None:
    blocks = chain(6)
    await bed.feed(status(ONE), stored(ONE, 1, blocks[:2]), stored(ONE, 2, blocks[2:4]))
    await bed.feed(Unavailable("it died"))
    await until(lambda: len(bed.fake.calls) == 2, "the replica subscribes again")
    (first, _), (second, request) = bed.fake.calls
    assert {first, second} == {91, 92}
    (resume,) = request.resume
    assert (resume.epoch, resume.sequence) == (0, 2)
    assert bed.state(ONE) == "stale"
    await bed.feed(status(ONE), stored(ONE, 3, blocks[4:]))
    assert (bed.depth(blocks), bed.state(ONE)) == (6, "exact")


async def test_the_only_indexer_is_tried_again(bed: Bed) -> None:
    only = 91
    bed.show(only)
    for count in (2, 3):
        await bed.feed(None)
        await until(lambda count=count: len(bed.fake.calls) >= count, "it reconnects")  # type: ignore[misc]  # mypy cannot infer defaults.
    assert bed.fake.calls[-1][0] == only


async def test_stale_sources_count_for_ten_seconds_only(bed: Bed) -> None:
    blocks = chain(4)
    await bed.feed(status(ONE), stored(ONE, 1, blocks))
    bed.show()
    await bed.feed(None)
    await until(lambda: bed.state(ONE) == "stale", "the source is stale")
    bed.now += STALE_GRACE_S - 0.1
    bed.replica.tick(bed.now)
    assert bed.depth(blocks) == 4
    bed.now += 0.2
    bed.replica.tick(bed.now)
    assert bed.depth(blocks) == 0
    index_status = bed.replica.index_status(Placement(1, 0), bed.now)
    assert index_status.state == "stale"
    assert "not counted any more" in index_status.reason
    assert index_status.age_s == pytest.approx(STALE_GRACE_S + 0.1)
    bed.now += STALE_FORGET_S
    bed.replica.tick(bed.now)
    assert bed.state(ONE) == "none"
    assert bed.replica.feed.sources() == []


async def test_only_a_source_unknown_to_the_new_indexer_becomes_stale(bed: Bed) -> None:
    blocks = chain(4)
    await bed.feed(status(ONE), stored(ONE, 1, blocks), status(TWO), stored(TWO, 1, blocks))
    await bed.feed(None)
    await until(lambda: len(bed.fake.calls) == 2, "the replica subscribes again")
    await bed.feed(status(ONE))
    assert (bed.state(ONE), bed.state(TWO)) == ("exact", "stale")
    await bed.feed(status(TWO, "gone"))
    assert bed.state(TWO) == "none"
    assert bed.depth(blocks, TWO) == 0


async def test_a_new_epoch_begins_empty(bed: Bed) -> None:
    blocks = chain(4)
    await bed.feed(status(ONE), stored(ONE, 1, blocks))
    await bed.feed(stored(ONE, 1, blocks[:1], epoch=1))
    assert bed.depth(blocks) == 1


async def test_loads_go_to_the_load_tracker(bed: Bed) -> None:
    bed.fake.messages.put_nowait(
        load_of(TWO, running=2, waiting=1, waiting_tokens=50, kv_used_blocks=9, kv_total_blocks=99)
    )
    await until(lambda: len(bed.loads) == 1, "the load is reported")
    expected = Load(running=2, waiting=1, waiting_tokens=50, kv_used_blocks=9, kv_total_blocks=99)
    assert bed.loads == [(2, 3, expected, bed.now)]


async def test_the_load_of_a_source_ends_with_the_stream_of_its_publisher(bed: Bed) -> None:
    await bed.feed(status(ONE), status(TWO), load_of(ONE), load_of(TWO))
    assert bed.without_load == []
    await bed.feed(status(ONE, "stale"))
    assert bed.without_load == [ONE]


async def test_all_loads_end_with_the_stream_of_the_indexer(bed: Bed) -> None:
    await bed.feed(status(ONE), status(TWO), load_of(ONE), load_of(TWO))
    await bed.feed(None)
    await until(lambda: set(bed.without_load) == {ONE, TWO}, "no load counts")


async def test_a_silent_indexer_is_replaced(bed: Bed) -> None:
    await bed.feed(status(ONE))
    bed.now += SUBSCRIBE.limit_s + 0.1
    await until(lambda: len(bed.fake.calls) == 2, "the replica subscribes to another indexer")
    assert bed.fake.calls[0][0] != bed.fake.calls[1][0]


async def test_an_indexer_that_accepts_the_call_and_sends_nothing_is_replaced(bed: Bed) -> None:
    """The previous entries are stale, so only the silence timeout detects the indexer."""
    await bed.feed(status(ONE, caught_up=True))
    await bed.feed(None)
    await until(
        lambda: bed.fake.open == 1 and len(bed.fake.calls) == 2,
        "the replica subscribes to another indexer",
    )
    assert bed.state(ONE) == "stale"
    bed.now += SUBSCRIBE.limit_s + 0.1
    await until(lambda: len(bed.fake.calls) == 3, "the replica subscribes to the next indexer")


async def test_a_dropped_source_is_requested_again_when_its_publisher_returns(bed: Bed) -> None:
    """Formerly the indexer and the router treated the source as exact although it was empty."""
    blocks = chain(3)
    await bed.feed(status(ONE), stored(ONE, 1, blocks), status(ONE, "stale", caught_up=True))
    bed.now += STALE_FORGET_S + 0.1
    await until(lambda: bed.state(ONE) == "none", "the source is dropped")
    assert len(bed.fake.calls) == 1
    bed.fake.messages.put_nowait(status(ONE, sequence=1))
    await until(lambda: len(bed.fake.calls) == 2, "the replica subscribes again")
    assert bed.state(ONE) in ("gapped", "stale")
    (resume,) = bed.fake.calls[1][1].resume
    assert (resume.epoch, resume.sequence) == (0, 0)
    await bed.feed(status(ONE, "gapped"), snapshot(ONE, 1, blocks), status(ONE, sequence=1))
    assert (bed.depth(blocks), bed.state(ONE)) == (3, "exact")


@pytest.mark.parametrize("loads_only", [True])
async def test_a_loads_only_subscription_requests_loads_only_and_detects_silence(bed: Bed) -> None:
    assert bed.fake.calls[0][1].loads_only
    await bed.feed(status(ONE, "gapped"), load_of(ONE, running=3))
    assert [(worker, load.running) for worker, _, load, _ in bed.loads] == [(1, 3)]
    assert bed.depth(chain(2)) == 0
    bed.now += SUBSCRIBE.limit_s + 0.1
    await until(lambda: len(bed.fake.calls) == 2, "the replica subscribes to another indexer")
    assert bed.fake.calls[1][1].loads_only


async def test_an_event_subscription_does_not_request_loads_only(bed: Bed) -> None:
    assert not bed.fake.calls[0][1].loads_only


async def test_silence_is_no_failure_while_no_worker_is_alive(bed: Bed) -> None:
    await bed.feed(status(ONE, "stale", caught_up=True))
    bed.now += SUBSCRIBE.limit_s * 10
    for _ in range(20):
        # Sleep: nothing may happen: no subscription is opened.
        await asyncio.sleep(0.001)
    assert len(bed.fake.calls) == 1


@pytest.mark.row("S1-51")
@pytest.mark.parametrize(
    "message",
    [
        stored(Source(5), 1, chain(1)),
        pb.SubscribeResponse(source=pb.Source(worker_id=0), caught_up=True),
        pb.SubscribeResponse(
            source=pb.Source(worker_id=1), snapshot=pb.SnapshotChunk(prefix_hashes=b"odd")
        ),
    ],
)
async def test_an_indexer_with_invalid_messages_is_replaced(
    bed: Bed, message: pb.SubscribeResponse
) -> None:
    blocks = chain(4)
    await bed.feed(status(ONE), stored(ONE, 1, blocks))
    bed.fake.messages.put_nowait(message)
    await until(lambda: len(bed.fake.calls) == 2, "the replica subscribes to another indexer")
    await bed.feed(status(ONE))
    assert bed.depth(blocks) == 4


async def test_a_status_of_an_unknown_source_without_partition_is_ignored(bed: Bed) -> None:
    lone = pb.SubscribeResponse(source=pb.Source(worker_id=5), status=pb.SourceStatus(state="gone"))
    stale = pb.SubscribeResponse(
        source=pb.Source(worker_id=5), status=pb.SourceStatus(state="stale")
    )
    await bed.feed(lone, stale, status(ONE))
    assert len(bed.fake.calls) == 1


async def test_caught_up_is_reported_and_ends_with_the_stream(bed: Bed) -> None:
    await bed.feed(status(ONE), pb.SubscribeResponse(caught_up=True))
    assert bed.replica.is_caught_up
    assert bed.replica.indexer_id in (91, 92)
    bed.show()
    await bed.feed(None)
    await until(lambda: bed.replica.indexer_id is None, "the indexer is lost")
    assert not bed.replica.is_caught_up


@pytest.mark.row("S1-55")
async def test_decisions_run_while_a_large_batch_is_applied(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_svc.index_replica, "SLICE_S", 0.0)
    blocks = chain(STEP_BLOCKS_MAX * 20)
    await bed.feed(status(ONE))
    bed.fake.messages.put_nowait(stored(ONE, 1, blocks))
    depths: list[int] = []
    # Ends: each turn applies blocks.
    while not depths or depths[-1] < len(blocks):
        depths.append(bed.depth(blocks))
        await asyncio.sleep(0)
    assert len({d for d in depths if 0 < d < len(blocks)}) > 5, "the snapshot was applied in slices"


async def test_many_small_batches_of_one_message_are_applied_in_slices_too(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_svc.index_replica, "SLICE_S", 0.0)
    blocks = chain(50)
    message = status(ONE)
    message.more.extend(stored(ONE, n + 1, blocks[n : n + 1]) for n in range(50))
    bed.fake.messages.put_nowait(message)
    depths: list[int] = []
    # Ends: each turn applies blocks.
    while not depths or depths[-1] < len(blocks):
        depths.append(bed.depth(blocks))
        await asyncio.sleep(0)
    assert len(set(depths)) > 20, depths


async def test_a_source_without_status_does_not_count(bed: Bed) -> None:
    blocks = chain(4)
    without_status = pb.SubscribeResponse(
        source=source_to_proto(ONE), partition=partition_to_proto(PART)
    )
    await bed.feed(without_status, stored(ONE, 1, blocks))
    assert (bed.depth(blocks), bed.state(ONE)) == (0, "gapped")
    await bed.feed(status(ONE))
    assert bed.depth(blocks) == 4
    await bed.feed(without_status)
    assert (bed.depth(blocks), bed.state(ONE)) == (4, "exact"), "unchanged"


async def test_without_an_indexer_there_is_no_subscription() -> None:
    bed = Bed(())
    assert bed.replica.index_status(Placement(1, 0), 0.0).reason == "no indexer was reached yet"
    task = asyncio.create_task(bed.replica.run())
    await asyncio.sleep(0)
    assert bed.fake.calls == []
    task.cancel()
    await asyncio.wait({task})
