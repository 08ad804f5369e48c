"""Changes of the index are atomic and yield between their steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from common.kv.events import (
    EventBatch,
    EventKind,
    Hashes,
    KvEvent,
    Partition,
    SnapshotChunk,
    Source,
    SourcePosition,
)
from common.kv.index_feed import IndexFeed
from common.registry.registry import MemoryRegistry, MemoryStore
from indexer_svc.core.budget import SHRINK_GRACE_S, Budget
from indexer_svc.core.subscriber import CaughtUp, Subscriber
from indexer_svc.ingest import SLICE_S, Ingest
from indexer_svc.worker_presence import WorkerPresence

PARTITION = Partition("m", 16, 1)
A, B = Source(1), Source(2)


def busy(steps: int, log: list[str], name: str) -> Iterator[None]:
    """Steps of half a slice each."""
    for _ in range(steps):
        until = time.perf_counter() + SLICE_S / 2
        while time.perf_counter() < until:
            pass
        log.append(name)
        yield


async def test_other_tasks_run_after_each_slice_and_changes_do_not_interleave() -> None:
    ingest = Ingest(IndexFeed(), Budget(0), time.monotonic)
    log: list[str] = []

    async def tick() -> None:
        # Ends: the other task has logged as often.
        while log.count("b") < 20:
            log.append("tick")
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ingest.run(busy(20, log, "a")))
        tasks.create_task(ingest.run(busy(20, log, "b")))
        tasks.create_task(tick())
    assert log.count("tick") >= 20, "two steps a slice, a slice a turn"
    work = [entry for entry in log if entry != "tick"]
    assert work == ["a"] * 20 + ["b"] * 20


async def test_a_cancelled_change_releases_the_lock() -> None:
    ingest = Ingest(IndexFeed(), Budget(0), time.monotonic)
    log: list[str] = []
    task = asyncio.create_task(ingest.run(busy(1000, log, "a")))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    await ingest.run(busy(1, log, "b"))
    assert log[-1] == "b"
    assert len(log) < 1000


async def test_a_subscriber_takes_nothing_during_a_change_and_is_woken_at_its_end() -> None:
    ingest = Ingest(IndexFeed(), Budget(0), time.monotonic)
    subscriber = Subscriber(
        ingest.feed, ingest.histories, [], None, 1000, is_absent=lambda worker_id: False
    )
    woken: list[str] = []
    ingest.subscribers[subscriber] = lambda: woken.append("woken")
    async with ingest.exclusive():
        assert ingest.take(subscriber) == []
        assert woken == []
    assert woken == ["woken"]
    assert ingest.take(subscriber) == [CaughtUp()]
    async with ingest.exclusive():
        assert ingest.take(subscriber) == []
    assert woken == ["woken"], "nothing was left to take"


class Bed:
    """The ingest of an indexer without RPC; time advances with `ticks`."""

    def __init__(self, budget_bytes: int) -> None:
        self.now = 0.0
        self.ingest = Ingest(IndexFeed(), Budget(budget_bytes), lambda: self.now)
        self.presence = WorkerPresence(MemoryRegistry(MemoryStore()), "mesh", lambda: self.now)

    def register_source(self, source: Source, sequence: int = 0) -> None:
        self.ingest.feed.register_source(PARTITION, SourcePosition(source, 1, sequence), self.now)

    async def store(self, source: Source, hashes: Hashes) -> None:
        feed = self.ingest.feed
        sequence = feed.position(source).sequence + 1
        event = KvEvent(EventKind.STORED, hashes)
        await self.ingest.run(feed.apply(EventBatch(source, 1, sequence, [event]), self.now))

    async def ticks(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.now += 1.0
            await self.ingest.tick(self.presence)


def keys(numbers: Iterable[int]) -> Hashes:
    return np.array(list(numbers), dtype=np.uint64)


async def test_histories_count_as_used_memory_and_are_dropped_first() -> None:
    bed = Bed(60_000)
    bed.register_source(A)
    for number in range(100):
        await bed.store(A, keys([number]))
    feed = bed.ingest.feed
    assert feed.used_bytes < 12_000 < 40_000 < bed.ingest.used_bytes < 60_000
    await bed.ticks(1)
    assert bed.ingest.histories, "histories fit into the budget"
    await bed.store(A, keys(range(100, 350)))
    assert bed.ingest.used_bytes > 60_000
    await bed.ticks(2 * SHRINK_GRACE_S)
    assert not bed.ingest.histories
    assert feed.status(A).state == "exact", "the index fits without histories"


async def test_a_source_with_only_a_pending_snapshot_can_be_dropped() -> None:
    """Regression: no source advertised a block, so none was shrunk or dropped."""
    bed = Bed(100_000)
    feed = bed.ingest.feed
    for source, count in ((A, 500), (B, 1000)):
        bed.register_source(source, 5)
        chunk = SnapshotChunk(source, 1, 5, keys(range(1, count)), first=True)
        await bed.ingest.run(feed.load(chunk, 0.0))
    assert feed.blocks_of(A) == feed.blocks_of(B) == 0
    for _ in range(round(SHRINK_GRACE_S) + 3):
        await bed.ticks(1)
        for source in (A, B):  # They continue, slowly.
            more = SnapshotChunk(source, 1, 5, keys([10**6 + round(bed.now)]))
            await bed.ingest.run(feed.load(more, bed.now))
    assert feed.is_load_only(B)
    assert not feed.is_load_only(A)
    assert feed.used_bytes < 100_000


async def test_a_source_whose_publisher_reconnected_is_not_reset_on_readmission() -> None:
    """Regression: the source was readmitted although it was no longer load-only."""
    bed = Bed(30_000)
    feed = bed.ingest.feed
    for source, first in ((A, 0), (B, 1000)):
        bed.register_source(source)
        await bed.store(source, keys(range(first, first + 150 + first // 10)))
    await bed.ticks(SHRINK_GRACE_S + 2)
    assert feed.is_load_only(B)
    bed.register_source(B, 1)
    chunk = SnapshotChunk(B, 1, 1, keys(range(1000, 1010)), first=True, last=True)
    await bed.ingest.run(feed.load(chunk, bed.now))
    await bed.ticks(3)
    assert feed.status(B).state == "exact"
    assert feed.blocks_of(B) == 10


@pytest.mark.parametrize(
    ("sources", "sharing", "low", "high"), [(1, 1, 84, 94), (512, 2, 134, 184)]
)
def test_masks_of_shared_blocks_count_as_used_memory(
    sources: int, sharing: int, low: int, high: int
) -> None:
    """Bytes per block; measured: 74 and 154."""
    feed, rng = IndexFeed(), np.random.default_rng(1)
    for number in range(1, sources + 1):
        feed.register_source(PARTITION, SourcePosition(Source(number), 1, 0), 0.0)
    index, _ = feed.advertised(Source(1))
    for start in range(0, 4096, 16):
        for number in rng.choice(sources, sharing, replace=False):
            _, advertised = feed.advertised(Source(int(number) + 1))
            index.store(advertised, keys(range(start, start + 16)))
    assert low < feed.used_bytes / 4096 < high
