"""Applies all changes to the index in time slices and reports them to its streams.

Changes run one at a time under one lock. Between two steps of a change other tasks run once SLICE_S
of the event loop's turn is used. Queries need no lock, because a set is prefix-closed at every
step. Subscribers and publishers receive the changes before the lock is released.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager

import structlog

from common.kv.events import Partition, Source
from common.kv.index_feed import (
    BatchApplied,
    IndexFeed,
    ResendRequest,
    SourceReplaced,
    StatusChanged,
)
from common.kv.load import Load
from indexer_svc.core.budget import Budget
from indexer_svc.core.history import BatchHistory
from indexer_svc.core.subscriber import BatchUpdate, LoadUpdate, Outbound, Subscriber
from indexer_svc.outbox import PublisherOutbox
from indexer_svc.worker_presence import WorkerPresence

LOG = structlog.get_logger(__name__)

SLICE_S = 0.001
SWEEP_BLOCKS = 2048
TICK_S = 0.25
# Loads that arrive within this time leave in one frame per subscriber.
LOAD_BATCH_S = 0.02
# An unregistered worker without a stream is removed after this time.
GONE_GRACE_S = 2.0


class Ingest:
    """The feed and the streams of one indexer. stopwatch: measures slices, in seconds."""

    def __init__(
        self,
        feed: IndexFeed,
        budget: Budget,
        clock: Callable[[], float],
        *,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.feed = feed
        self.budget = budget
        self.histories: dict[Source, BatchHistory] = {}
        # The last loads of sources with an open stream.
        self.loads: dict[Source, tuple[Partition, Load]] = {}
        self._load_wakeup: asyncio.TimerHandle | None = None
        self.publishers: dict[int, PublisherOutbox] = {}
        # With what wakes the writer of their stream.
        self.subscribers: dict[Subscriber, Callable[[], None]] = {}
        # Whether a subscriber waits for the end of the present change.
        self._is_take_due = False
        self.first_published = asyncio.Event()
        self.slow_slices = 0
        self._clock = clock
        self._stopwatch = stopwatch
        self._lock = asyncio.Lock()
        self._turn_began: float | None = None

    @property
    def used_bytes(self) -> int:
        """Estimated memory of the index and the batch histories."""
        kept = sum(history.used_bytes for history in self.histories.values())
        return self.feed.used_bytes + kept

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Holds the lock; changes made inside are reported at the end."""
        async with self._lock:
            try:
                yield
            finally:
                self.dispatch_changes()

    async def run(self, steps: Iterable[None]) -> None:
        """Runs one change to its end, in slices."""
        async with self.exclusive():
            self._begin_turn()
            for _ in steps:
                began = self._begin_turn()
                used_s = self._stopwatch() - began
                if used_s >= SLICE_S:
                    self.slow_slices += used_s >= 2 * SLICE_S
                    await asyncio.sleep(0)
                    self._begin_turn()

    async def tick(self, presence: WorkerPresence) -> None:
        """Removes absent workers, updates stale sources, keeps the budget, does deferred work."""
        now = self._clock()
        async with self.exclusive():
            self._forget_gone(presence, now)
            self.feed.tick(now)
            self._enforce_budget(now)
        while self.feed.sweep(0):
            await self.run(self._sweep())

    def wake(self) -> None:
        self._load_wakeup = None
        for wake_writer in self.subscribers.values():
            wake_writer()

    def take(self, subscriber: Subscriber) -> list[Outbound]:
        """Returns what is next for a subscriber.

        While a change is applied a snapshot cannot be read: nothing is next until its end, which
        wakes the writers.
        """
        if not subscriber.has_more:
            return []
        if self._lock.locked():
            self._is_take_due = True
            return []
        return subscriber.take()

    def report_load(self, source: Source, partition: Partition, load: Load) -> None:
        self.loads[source] = partition, load
        update = LoadUpdate(source, load)
        for subscriber in self.subscribers:
            subscriber.load(update, partition)
        if self._load_wakeup is None:
            self._load_wakeup = asyncio.get_running_loop().call_later(LOAD_BATCH_S, self.wake)

    def publisher_lost(self, worker_id: int) -> None:
        """Marks the sources of a worker after its stream ended; their loads count no more."""
        for source in self.feed.sources_of(worker_id):
            self.loads.pop(source, None)
            self.feed.mark_disconnected(source, self._clock(), "the stream of its publisher ended")
        self.dispatch_changes()

    def _begin_turn(self) -> float:
        """Returns when the first work in this turn of the event loop began."""
        if self._turn_began is None:
            self._turn_began = self._stopwatch()
            asyncio.get_running_loop().call_soon(self._end_turn)
        return self._turn_began

    def _end_turn(self) -> None:
        self._turn_began = None

    def _sweep(self) -> Iterator[None]:
        # Other changes wait for the lock, so only a part of it at once.
        for _ in range(32):
            if not self.feed.sweep(SWEEP_BLOCKS):
                return
            yield

    def dispatch_changes(self) -> None:
        feed_events = self.feed.take_events()
        for event in feed_events:
            match event:
                case BatchApplied(batch):
                    self.histories.setdefault(batch.source, BatchHistory()).add(batch)
                    update = BatchUpdate(batch)
                    for subscriber in self.subscribers:
                        subscriber.batch(update)
                case SourceReplaced(source):
                    self.histories.pop(source, None)
                    for subscriber in self.subscribers:
                        subscriber.source_replaced(source)
                case StatusChanged():
                    self._dispatch_status_change(event)
                case ResendRequest():
                    if (publisher := self.publishers.get(event.source.worker_id)) is not None:
                        publisher.resend(event)
        if feed_events or self._is_take_due:
            self._is_take_due = False
            self.wake()

    def _dispatch_status_change(self, event: StatusChanged) -> None:
        source, status = event.source, event.status
        LOG.info("source_status_changed", source=source, state=status.state, reason=status.reason)
        if source not in self.feed:
            self.histories.pop(source, None)
            self.loads.pop(source, None)
        for subscriber in self.subscribers:
            subscriber.status_changed(source, event.partition, status)

    def _forget_gone(self, presence: WorkerPresence, now: float) -> None:
        known = {source.worker_id for source in self.feed.sources()}
        for worker_id in known:
            since = presence.absent_since(worker_id)
            if since is None or worker_id in self.publishers:
                continue
            lost = [self.feed.last_received_at(s) for s in self.feed.sources_of(worker_id)]
            if now - max([since, *lost]) >= GONE_GRACE_S:
                presence.forget(worker_id)
                for source in self.feed.sources_of(worker_id):
                    self.feed.forget(source, "its worker left")

    def _enforce_budget(self, now: float) -> None:
        feed, budget_bytes = self.feed, self.budget.budget_bytes
        if budget_bytes and self.used_bytes > budget_bytes:
            # Histories are optional: without them, subscribers that are behind get snapshots.
            self.histories.clear()
        sources = feed.sources()
        budget_actions = self.budget.plan_actions(
            now,
            self.used_bytes,
            {source: feed.retained_blocks_of(source) for source in sources},
            {s: feed.unindexed_blocks_of(s) for s in sources if feed.is_load_only(s)},
        )
        for worker_id, count in budget_actions.shrink.items():
            if (publisher := self.publishers.get(worker_id)) is not None:
                publisher.shrink(count)
        if shrink := dict(budget_actions.shrink):
            LOG.warning("over_budget", used_bytes=self.used_bytes, shrink=shrink)
        if budget_actions.drop is not None:
            feed.make_load_only(budget_actions.drop, now)
        if budget_actions.end_load_only is not None:
            feed.end_load_only(budget_actions.end_load_only, now)
