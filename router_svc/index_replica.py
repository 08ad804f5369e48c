"""A local replica of an indexer's index, for prefix matching inside the router process.

The router follows one indexer of discovery at a time. If it loses that one, it follows another
from the present position (`SubscribeRequest.resume`). A source without updates becomes stale: it
counts for 10 s more (`common/kv/index_feed.py`) and is dropped a minute later. Updates are applied
in slices of about SLICE_S, between which decisions run. Load reports on the stream go to the load
tracker, and count until the stream or that of their publisher ends. A router that uses no KV events
subscribes to loads only, so that no events are sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, closing
from random import Random
from typing import NoReturn, Protocol

import structlog

from common.errors import MeshError, Unavailable
from common.kv.events import Partition, Source, SourceStatus
from common.kv.hashing import hashes_from_bytes
from common.kv.index_feed import IndexFeed, ResendRequest
from common.kv.load import Load
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.request.placement import Placement, Query
from common.rpc import channel as rpc
from common.rpc.stream import open_stream
from common.runtime.tasks import TaskGroup
from common.streams.backoff import Backoff
from common.streams.peer import SilenceWatch, keep_connected
from common.streams.silence import SUBSCRIBE
from common.wire.kv import (
    batch_from_proto,
    message_parts,
    partition_from_proto,
    snapshot_chunk_from_proto,
    source_from_proto,
    source_state_to_proto,
    source_status_from_proto,
)
from common.wire.load import load_from_proto
from kvmesh.indexer.v1 import indexer_pb2
from router_svc.core.overlap import IndexStatus

LOG = structlog.get_logger(__name__)

# Delay before reconnecting, with jitter, so that routers do not all dial a new indexer at once.
REDIAL_S = 0.3
TICK_S = 0.25
# Time of applying after which decisions run.
SLICE_S = 0.001
SWEEP_BLOCKS = 4096
# No indexer has a source that was stale for this long.
STALE_FORGET_S = 60.0

_NOT_REPORTED = SourceStatus("gapped", "no status from the indexer yet")

# Takes (worker id, rank, load, now): `LoadTracker.report`.
ReportLoad = Callable[[int, int, Load | None, float], None]


class Subscription(Protocol):
    """One Subscribe call."""

    async def read(self) -> indexer_pb2.SubscribeResponse | None:
        """Returns the next message; None at the end. Raises MeshError if the stream failed."""


Subscribe = Callable[
    [Instance, indexer_pb2.SubscribeRequest], AbstractAsyncContextManager[Subscription]
]


class IndexReplica:
    """The replica, and the task that maintains it (`run`)."""

    def __init__(
        self,
        report: ReportLoad,
        *,
        subscribe: Subscribe | None = None,
        feed: IndexFeed | None = None,
        loads_only: bool = False,
        rng: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Creates an empty replica, which follows the indexers of `on_snapshot`.

        report: receives loads.
        loads_only: whether no KV events are subscribed to.
        clock: seconds, the clock of decisions.
        stopwatch: seconds, measures slices.
        """
        self._indexers: Sequence[Instance] = ()
        self._has_indexers = asyncio.Event()
        # The one that is followed, or was followed last.
        self._followed_id: int | None = None
        self._report_load = report
        self._subscribe = subscribe or grpc_subscriptions()
        self._loads_only = loads_only
        self._rng = rng or Random()
        self._clock = clock
        self._stopwatch = stopwatch
        self._partitions: dict[tuple[str, int, int], tuple[Partition, ...]] = {}
        self._last_received_at: dict[Source, float] = {}
        self._silence = SilenceWatch(SUBSCRIBE.limit_s, "message", clock=clock)
        self._has_subscribed = False
        # While an update is being applied, no other code may change its source.
        self._is_applying = False
        self._is_tick_due = False
        self._slice_began = 0.0
        self.feed = IndexFeed() if feed is None else feed
        self.indexer_id: int | None = None
        self.is_caught_up = False

    # `core.overlap.Index`.

    def match(self, query: Query) -> Sequence[SourceMatch]:
        """Matches as `Index` states; ranks count with any version of their adapter."""
        partitions_by_key = (query.model, query.block_size, query.hash_scheme)
        partitions = self._partitions.get(partitions_by_key, ())
        if not (partitions and query.prefix_hashes):
            return ()
        hashes = hashes_from_bytes(query.prefix_hashes)
        if len(partitions) == 1:
            return self.feed.match(partitions[0], hashes)
        return [row for partition in partitions for row in self.feed.match(partition, hashes)]

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        source = Source(*placement)
        received_at = self._last_received_at.get(source)
        if received_at is None or source not in self.feed:
            reason = "not in the index" if self._has_subscribed else "no indexer was reached yet"
            return IndexStatus("none", reason)
        state, reason = self.feed.status(source)
        if state == "stale" and not self.feed.is_matchable(source):
            reason = f"{reason}; not counted any more"
        return IndexStatus(state, reason, now - received_at)

    # Following.

    def on_snapshot(self, snapshot: Snapshot, _: SnapshotDiff) -> None:
        """Sets the indexers of which one is followed."""
        self._indexers = snapshot.of("indexer")
        if self._indexers:
            self._has_indexers.set()
        else:
            self._has_indexers.clear()

    async def run(self) -> None:
        """Follows indexers; ends only by cancellation."""
        async with TaskGroup() as tasks:
            tasks.create_task(self._run_maintenance())
            backoff = Backoff(REDIAL_S, REDIAL_S, self._rng)
            await keep_connected(self._connect, backoff, self._on_lost)

    async def _connect(self) -> bool:
        """Follows an indexer until an error. Returns False once there is one, if there was none."""
        if self._indexers:
            # Not the one that was just lost, if there is another.
            others = [indexer for indexer in self._indexers if indexer.id != self._followed_id]
            await self._follow_indexer(self._rng.choice(others or self._indexers))
        await self._has_indexers.wait()
        return False

    async def _follow_indexer(self, indexer: Instance) -> None:
        """Applies the updates of an indexer; always raises MeshError."""
        self._followed_id = indexer.id
        resume = [source_state_to_proto(state) for state in self.feed.positions()]
        request = indexer_pb2.SubscribeRequest(resume=resume, loads_only=self._loads_only)
        try:
            async with self._subscribe(indexer, request) as subscription, TaskGroup() as tasks:
                self._has_subscribed = True
                self._silence.restart()
                tasks.create_task(self._silence.run(self._expects_messages))
                await self._read(subscription, indexer)
        finally:
            self.indexer_id, self.is_caught_up = None, False

    def _on_lost(self, error: Exception, _: float) -> None:
        """Marks all sources as disconnected: decisions use the present index until it is stale."""
        reason = "indexer lost"
        if isinstance(error, MeshError):
            reason = f"{reason}: {error}"
            LOG.warning("indexer_lost", indexer_id=self._followed_id, reason=str(error))
        else:
            LOG.exception("indexer_subscription_failed", indexer_id=self._followed_id)
        now = self._clock()
        for source in self.feed.sources():
            self.feed.mark_disconnected(source, now, reason)
            self._report_load(*source, None, now)

    async def _read(self, subscription: Subscription, indexer: Instance) -> NoReturn:
        """Applies messages until the stream ends or is unusable; always raises MeshError."""
        while (message := await subscription.read()) is not None:
            self._silence.restart()
            if self.indexer_id is None:
                self.indexer_id = indexer.id
                LOG.info("indexer_followed", indexer_id=indexer.id)
            self._slice_began = self._stopwatch()
            for part in message_parts(message):
                await self._apply_part(part)
                await self._yield_if_slice_used()
            if self._is_tick_due:
                self.tick(self._clock())
            for event in self.feed.take_events():
                if isinstance(event, ResendRequest):
                    raise Unavailable(f"batches of {event.source} are missing", reason="INDEX_GAP")
        raise Unavailable("the indexer closed the stream")

    async def _apply_part(self, part: indexer_pb2.SubscribeResponse) -> None:
        """Applies a part of a message: the status of its source first, then the blocks."""
        now = self._clock()
        if part.HasField("source"):
            source = source_from_proto(part.source)
            self._last_received_at[source] = now
            if part.HasField("partition") or part.HasField("status"):
                self._apply_source_status(source, part, now)
            if part.HasField("batch"):
                batch = batch_from_proto(part.batch, source.worker_id)
                await self._run_steps(self.feed.apply(batch, now))
            if part.HasField("snapshot"):
                await self._run_steps(self.feed.load(snapshot_chunk_from_proto(part.snapshot), now))
            if part.HasField("load"):
                load = load_from_proto(part.load)
                self._report_load(source.worker_id, source.dp_rank, load, now)
        if part.caught_up:
            self.is_caught_up = True

    def _apply_source_status(
        self, source: Source, part: indexer_pb2.SubscribeResponse, now: float
    ) -> None:
        """Applies the status of a source; until the first one, the source is gapped."""
        is_known = source in self.feed
        if part.HasField("status"):
            status = source_status_from_proto(part.status)
        elif is_known:
            return  # Unchanged.
        else:
            status = _NOT_REPORTED
        if status.state in ("gone", "stale"):
            self._report_load(*source, None, now)
        if status.state == "gone":
            self._last_received_at.pop(source, None)
            self.feed.forget(source, status.reason)
            return
        if not (is_known or part.HasField("partition")):
            LOG.debug("unknown_source_ignored", source=source, state=status.state)
            return
        new_partition = partition_from_proto(part.partition) if part.HasField("partition") else None
        self.feed.apply_status(new_partition, source, status, now, (part.epoch, part.sequence))
        partition = self.feed.partition(source)
        key = _partition_key(partition)
        if partition not in self._partitions.get(key, ()):
            self._partitions[key] = (*self._partitions.get(key, ()), partition)

    async def _run_steps(self, steps: Iterator[None]) -> None:
        assert isinstance(steps, Generator), "iterators of the feed are generators"
        self._is_applying = True
        try:
            with closing(steps):
                for _ in steps:
                    await self._yield_if_slice_used()
        finally:
            self._is_applying = False

    async def _yield_if_slice_used(self) -> None:
        """Lets decisions run if the steps since the last yield took SLICE_S."""
        if self._stopwatch() - self._slice_began >= SLICE_S:
            await asyncio.sleep(0)
            self._slice_began = self._stopwatch()

    def _expects_messages(self) -> bool:
        """Returns whether the rest of the initial state, or load reports of live workers are
        due."""
        if not self.is_caught_up:
            return True
        states = (self.feed.status(source).state for source in self.feed.sources())
        # With loads_only, the indexer reports live sources as gapped.
        live_states = ("exact", "degraded", "gapped") if self._loads_only else ("exact", "degraded")
        return any(state in live_states for state in states)

    # Time.

    async def _run_maintenance(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self._is_applying:
                self._is_tick_due = True
            else:
                self.tick(self._clock())
            has_more = True
            while has_more:
                has_more = self.feed.sweep(SWEEP_BLOCKS)
                await asyncio.sleep(0)

    def tick(self, now: float) -> None:
        """Ends the grace period of stale sources, and drops those that stayed stale."""
        self._is_tick_due = False
        self.feed.tick(now)
        for source in self.feed.sources():
            is_stale = self.feed.status(source).state == "stale"
            if is_stale and now - self._last_received_at.get(source, 0.0) > STALE_FORGET_S:
                self.feed.forget(source, "no indexer has it")
        for source in [s for s in self._last_received_at if s not in self.feed]:
            del self._last_received_at[source]
        self._rebuild_partitions()

    def _rebuild_partitions(self) -> None:
        partitions_by_key: dict[tuple[str, int, int], dict[Partition, None]] = {}
        for source in self.feed.sources():
            partition = self.feed.partition(source)
            partitions_by_key.setdefault(_partition_key(partition), {})[partition] = None
        self._partitions = {key: tuple(found) for key, found in partitions_by_key.items()}


def grpc_subscriptions(security: rpc.Security = rpc.PLAINTEXT) -> Subscribe:
    """Returns an opener of subscriptions over gRPC, each on a channel of its own."""

    def subscribe(
        indexer: Instance, request: indexer_pb2.SubscribeRequest
    ) -> AbstractAsyncContextManager[Subscription]:
        return open_stream(
            indexer.stream_address,
            "/kvmesh.indexer.v1.IndexerService/Subscribe",
            indexer_pb2.SubscribeResponse,
            security,
            request,
            peer_id=indexer.id,
        )

    return subscribe


def _partition_key(partition: Partition) -> tuple[str, int, int]:
    """Returns the fields of a query that select partitions."""
    return (partition.model, partition.block_size, partition.hash_scheme)
