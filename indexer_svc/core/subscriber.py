"""State of one subscription, which copies the index to a replica. Pure.

For each source of the subscriber, `_positions` is the position of its copy after everything queued
has arrived. A batch is sent only if the copy is at the position right before it. Otherwise the
subscriber gets the batches in between if the history has them, else a snapshot. At most
SNAPSHOTS_MAX snapshots are read at once, one chunk whenever the queue is empty, so that a snapshot
never delays live batches. A source goes on while its snapshot is read: every batch after its
sequence is sent before its last chunk (`common/kv/index_feed.py`).

The first statuses are computed as they are sent, so the size limit does not depend on the number of
sources. Until the copy of a source is right, its status is sent as gapped; the actual status
follows with the position of the copy. A load-only source has a position but no blocks here: the
subscriber's copy of it is reported as gone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from common.kv.events import (
    EMPTY_HASHES,
    EventBatch,
    Hashes,
    Partition,
    SnapshotChunk,
    Source,
    SourcePosition,
    SourceStatus,
    Tier,
)
from common.kv.index_feed import IndexFeed
from common.kv.load import Load
from indexer_svc.core.history import BatchHistory

SNAPSHOTS_MAX = 2
FRAME_BYTES = 256 * 1024
ITEM_BYTES = 64
SNAPSHOT_PENDING = SourceStatus("gapped", "a snapshot follows")
LOADS_ONLY = SourceStatus("gapped", "the subscription has loads only")
CONTENT_WITHDRAWN = SourceStatus("gone", "over budget: its blocks were dropped")
NOT_KNOWN_YET = SourceStatus("stale", "its publisher is not connected yet")
ABSENT = SourceStatus("gone", "its worker is not registered")


@dataclass(frozen=True, slots=True)
class StatusUpdate:
    """The first update of a source. at: (epoch, sequence) of the subscriber's copy; zeros: not
    given.
    """

    source: Source
    partition: Partition | None
    status: SourceStatus
    at: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class LoadUpdate:
    """Load of a source: one object for all subscribers that receive it."""

    source: Source
    load: Load
    message: object = field(default=None, compare=False, repr=False)
    """Its message, which the stream of the first of them encodes for all; None before."""


@dataclass(slots=True, eq=False)
class BatchUpdate:
    """A batch: one object for all subscribers that receive it."""

    batch: EventBatch

    message: object = None
    """Its message, which the stream of the first of them encodes for all; None before."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Everything that existed at the start has been sent."""


Outbound: TypeAlias = StatusUpdate | LoadUpdate | CaughtUp | BatchUpdate | SnapshotChunk


class Subscriber:
    """One subscription.

    resume: positions of the subscriber's copies.
    partition: None for all.
    is_absent: returns whether a worker is not registered.
    loads_only: neither batches nor snapshots are sent.
    is_overflowed: over `cap_bytes` were queued; it must resume.
    """

    def __init__(
        self,
        feed: IndexFeed,
        histories: Mapping[Source, BatchHistory],
        resume: Iterable[SourcePosition],
        partition: Partition | None,
        cap_bytes: int,
        *,
        is_absent: Callable[[int], bool],
        loads_only: bool = False,
    ) -> None:
        self._feed = feed
        self._histories = histories
        self._partition = partition
        self._cap_bytes = cap_bytes
        self._is_absent = is_absent
        self._loads_only = loads_only
        # None: the copy is useless. Missing: there is no copy.
        self._positions: dict[Source, tuple[int, int] | None] = {
            state.source: (state.epoch, state.sequence) for state in resume
        }
        self._waiting: deque[Outbound] = deque()
        self._waiting_bytes = 0
        self._loads: dict[Source, LoadUpdate] = {}
        self._pending_snapshots: dict[Source, None] = {}
        # Snapshots that are being sent; the next one first.
        self._snapshot_reads: OrderedDict[Source, Iterator[SnapshotChunk]] = OrderedDict()
        # Sources without a first status; the next one last, since a dict removes its first slowly.
        self._unreported = dict.fromkeys(reversed([*self._positions, *feed.sources()]))
        self._is_caught_up = False
        self.is_overflowed = False

    @property
    def has_more(self) -> bool:
        return bool(self._waiting or self._loads) or self._is_behind or not self._is_caught_up

    # Changes of the index.

    def batch(self, update: BatchUpdate) -> None:
        """Processes a batch that was applied to the index."""
        batch = update.batch
        source = batch.source
        at = (batch.epoch, batch.sequence)
        position = self._positions.get(source)
        # Before the first status the copy may be of another partition; the history has the batch.
        if position is None or self._loads_only or source in self._unreported:
            return
        begins_epoch = batch.sequence == 1 and batch.epoch > position[0]
        if begins_epoch or at == (position[0], position[1] + 1):
            self._positions[source] = at
            self._put(update)

    def source_replaced(self, source: Source) -> None:
        """Processes a change of a source's set other than by batches."""
        if source in self._positions:
            self._positions[source] = None
        self._cancel_snapshot(source)
        if source in self._feed:
            self.reconcile(source)

    def status_changed(self, source: Source, partition: Partition, status: SourceStatus) -> None:
        if status.state in ("stale", "gone"):
            self._loads.pop(source, None)
        if source in self._feed:
            self.reconcile(source)
            return
        self._unreported.pop(source, None)
        if self._includes(partition):
            self._cancel_snapshot(source)
            self._positions.pop(source, None)
            self._put(StatusUpdate(source, partition, status))

    def load(self, update: LoadUpdate, partition: Partition) -> None:
        """Queues the load of a source; it replaces one that is queued."""
        if self._includes(partition):
            self._loads[update.source] = update

    def reconcile(self, source: Source) -> None:
        """Queues the missing part of a source's copy, and its status."""
        self._unreported.pop(source, None)
        partition, status = self._feed.partition(source), self._feed.status(source)
        if not self._includes(partition):
            return
        if self._loads_only:
            is_there = status.state in ("exact", "degraded")
            self._put(StatusUpdate(source, partition, LOADS_ONLY if is_there else status))
        elif self._feed.is_load_only(source):
            self._withdraw(source)
            self._put(StatusUpdate(source, partition, status))
        elif status.state == "gapped":
            self._cancel_snapshot(source)
            self._put(StatusUpdate(source, partition, status))
        elif source in self._pending_snapshots or source in self._snapshot_reads:
            return  # Its status follows its snapshot.
        elif self._catch_up_from_history(source):
            self._put(self._status_update(source))
        else:
            self._pending_snapshots[source] = None
            self._put(StatusUpdate(source, partition, SNAPSHOT_PENDING))

    def take(self, size: int = FRAME_BYTES) -> list[Outbound]:
        """Returns about `size` bytes, then a snapshot chunk. Not while a batch is being applied."""
        outbound: list[Outbound] = []
        while (self._waiting or self._unreported) and size > 0:
            if not self._waiting:
                self._send_first_status(self._unreported.popitem()[0])
                continue
            item = self._waiting.popleft()
            item_bytes = _queued_bytes(item)
            self._waiting_bytes -= item_bytes
            size -= item_bytes // 2 if isinstance(item, BatchUpdate) else item_bytes
            outbound.append(item)
        outbound += self._loads.values()
        self._loads.clear()
        if not (self._waiting or self._unreported):
            self._take_snapshot_chunk(outbound)
        if not (self._is_caught_up or self._waiting or self._is_behind):
            self._is_caught_up = True
            outbound.append(CaughtUp())
        return outbound

    @property
    def _is_behind(self) -> bool:
        """Whether there are updates that are not queued yet."""
        return bool(self._unreported or self._pending_snapshots or self._snapshot_reads)

    def _send_first_status(self, source: Source) -> None:
        """Queues the first status of a source of the subscriber or the index."""
        if source in self._feed:
            self.reconcile(source)
            return
        # After a restart of this index, registered workers connect to it soon.
        is_absent = self._is_absent(source.worker_id)
        if is_absent:
            del self._positions[source]
        self._put(StatusUpdate(source, None, ABSENT if is_absent else NOT_KNOWN_YET))

    def _includes(self, partition: Partition) -> bool:
        return self._partition is None or partition == self._partition

    def _put(self, item: Outbound) -> None:
        if self.is_overflowed:
            return
        self._waiting.append(item)
        self._waiting_bytes += _queued_bytes(item)
        if self._waiting_bytes > self._cap_bytes:
            self.is_overflowed = True
            self._waiting.clear()

    def _status_update(self, source: Source) -> StatusUpdate:
        at = self._positions.get(source) or (0, 0)
        return StatusUpdate(source, self._feed.partition(source), self._feed.status(source), at)

    def _withdraw(self, source: Source) -> None:
        """Reports the subscriber's copy of a source as gone."""
        self._cancel_snapshot(source)
        if source in self._positions:
            del self._positions[source]
            self._put(StatusUpdate(source, None, CONTENT_WITHDRAWN))

    def _catch_up_from_history(self, source: Source) -> bool:
        """Queues the missing batches; returns False if a snapshot is needed."""
        at = self._feed.position(source)
        current = (at.epoch, at.sequence)
        position = self._positions.get(source)
        if position is not None and position >= current:
            return True
        if at.sequence == 0 and source not in self._positions:
            self._positions[source] = current
            return True
        if position is None or source not in self._histories:
            return False
        missing_batches = self._histories[source].batches_since(*position)
        if missing_batches is None or position[0] != at.epoch:
            return False
        # Batches over the limit would end this subscription now and after each resume; a snapshot
        # is read as it is sent. Half of the limit is for statuses and new batches.
        missing_updates = [BatchUpdate(batch) for batch in missing_batches]
        if self._waiting_bytes + sum(map(_queued_bytes, missing_updates)) > self._cap_bytes // 2:
            return False
        for update in missing_updates:
            self.batch(update)
        return self._positions[source] == current

    def _take_snapshot_chunk(self, outbound: list[Outbound]) -> None:
        if self._pending_snapshots and len(self._snapshot_reads) < SNAPSHOTS_MAX:
            source = next(iter(self._pending_snapshots))
            del self._pending_snapshots[source]
            at = self._feed.position(source)
            self._positions[source] = (at.epoch, at.sequence)
            index, advertised = self._feed.advertised(source)
            self._snapshot_reads[source] = snapshot_chunks(at, index.chunks(advertised))
            # Its first chunk is sent at once: a batch before it would be a gap.
            self._snapshot_reads.move_to_end(source, last=False)
        if not self._snapshot_reads:
            return
        source, chunks = next(iter(self._snapshot_reads.items()))
        # If the source is cleared, it ends early; the batch that cleared it was sent before.
        chunk = next(chunks)
        outbound.append(chunk)
        self._snapshot_reads.move_to_end(source)
        if chunk.last:
            del self._snapshot_reads[source]
            outbound.append(self._status_update(source))

    def _cancel_snapshot(self, source: Source) -> None:
        self._pending_snapshots.pop(source, None)
        if self._snapshot_reads.pop(source, None) is not None:
            # The copy is neither the old nor the new set.
            self._positions[source] = None


def snapshot_chunks(
    at: SourcePosition, parts: Iterator[tuple[Tier, Hashes]]
) -> Iterator[SnapshotChunk]:
    """Returns the parts as chunks, marked first and last; one empty chunk if there are none."""
    tier, hashes = next(parts, (Tier.DEVICE, EMPTY_HASHES))
    is_first = True
    for next_part in parts:
        yield SnapshotChunk(at.source, at.epoch, at.sequence, hashes, tier, first=is_first)
        is_first = False
        tier, hashes = next_part
    yield SnapshotChunk(at.source, at.epoch, at.sequence, hashes, tier, first=is_first, last=True)


def _queued_bytes(item: Outbound) -> int:
    """Returns the memory of a queued item. The stream of another subscriber may encode a batch
    while it is queued, so a batch counts twice: as it is, and as its message."""
    if isinstance(item, BatchUpdate):
        return 2 * (ITEM_BYTES + sum(8 * len(event.hashes) + 16 for event in item.batch.events))
    return ITEM_BYTES
