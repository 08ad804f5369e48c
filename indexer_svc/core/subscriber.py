"""What one subscriber has, is owed and has waiting: a replica of the index (pure).

For each source the subscriber knows, `_positions` is where its copy will stand once all that waits
has
arrived. A batch is passed on only to who stands right before it. Who stands elsewhere gets the
batches in between if they are still there, else a snapshot: at most SNAPSHOTS_MAX are read at once,
one part whenever nothing else waits, so a snapshot never delays live batches and never queues up.

A snapshot is read while its source goes on. That is sound (`common/kv/index_feed.py`) because every
batch since its sequence goes out before its last part: a part is only taken when nothing waits.

Nor does what is to be said at the beginning: it is found out, source by source, when it goes out.
So the cap has nothing to do with how many sources there are.

Before a source's copy is right it is told to be gapped, and its true status only afterwards, with
where the copy then stands. A load-only source stands somewhere but has no content here: what the
subscriber has of it is told to be gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
SNAPSHOT_PENDING = SourceStatus("gapped", "a snapshot is on its way")
LOADS_ONLY = SourceStatus("gapped", "the subscriber asked for loads only")
CONTENT_WITHDRAWN = SourceStatus("gone", "its claims were dropped here")
NOT_KNOWN_YET = SourceStatus("stale", "its publisher has not come to this index yet")
ABSENT = SourceStatus("gone", "its worker is not in discovery")


@dataclass(frozen=True, slots=True)
class StatusUpdate:
    """How far a source can be trusted; the first thing said about it.

    at: (epoch, sequence) of what the subscriber has of it then; zeros: not said.
    """

    source: Source
    partition: Partition | None
    status: SourceStatus
    at: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class LoadUpdate:
    """A source's load."""

    source: Source
    load: Load


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All that was there at the beginning has been told."""


Outbound: TypeAlias = StatusUpdate | LoadUpdate | CaughtUp | EventBatch | SnapshotChunk


@dataclass(slots=True, eq=False)
class _SnapshotRead:
    """A snapshot being sent."""

    source: Source
    chunks: Iterator[SnapshotChunk]


class Subscriber:
    """One subscription. `is_overflowed`: more than `cap_bytes` waited; it has to resume.

    resume: what the subscriber has. partition: None for all. is_absent: whether a worker is not in
    discovery. loads_only: it wants no claims, so none are kept for it.
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
        # None: it has something, of no use. Not there: it has nothing.
        self._positions: dict[Source, tuple[int, int] | None] = {
            state.source: (state.epoch, state.sequence) for state in resume
        }
        self._waiting: deque[Outbound] = deque()
        self._waiting_bytes = 0
        self._loads: dict[Source, Load] = {}
        self._pending_snapshots: dict[Source, None] = {}
        self._snapshot_reads: deque[_SnapshotRead] = deque()
        # Of which nothing was said yet; the next one last, since a dict loses its first slowly.
        self._unreported = dict.fromkeys(reversed([*self._positions, *feed.sources()]))
        self._is_caught_up = False
        self.is_overflowed = False

    @property
    def has_more(self) -> bool:
        """Whether `take` would return something."""
        return bool(self._waiting or self._loads) or self._is_behind or not self._is_caught_up

    # News.

    def batch(self, batch: EventBatch) -> None:
        """A batch was applied to the index."""
        source = batch.source
        at = (batch.epoch, batch.sequence)
        position = self._positions.get(source)
        # Before the first word the copy may stand in another partition: the history brings it.
        if position is None or self._loads_only or source in self._unreported:
            return
        begins_epoch = batch.sequence == 1 and batch.epoch > position[0]
        if begins_epoch or at == (position[0], position[1] + 1):
            self._positions[source] = at
            self._put(batch)

    def source_replaced(self, source: Source) -> None:
        """A source's set has changed otherwise than by batches."""
        if source in self._positions:
            self._positions[source] = None
        self._cancel_snapshot(source)
        if source in self._feed:
            self.reconcile(source)

    def status_changed(self, source: Source, partition: Partition, status: SourceStatus) -> None:
        """How far a source can be trusted has changed."""
        if source in self._feed:
            self.reconcile(source)
            return
        self._unreported.pop(source, None)
        if self._includes(partition):
            self._cancel_snapshot(source)
            self._positions.pop(source, None)
            self._loads.pop(source, None)
            self._put(StatusUpdate(source, partition, status))

    def load(self, source: Source, partition: Partition, load: Load) -> None:
        """A source's load; one that still waits is overtaken."""
        if self._includes(partition):
            self._loads[source] = load

    def reconcile(self, source: Source) -> None:
        """Sees to it that the subscriber gets what it lacks of a source, and its status."""
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
        elif source in self._pending_snapshots or any(
            r.source == source for r in self._snapshot_reads
        ):
            return  # Its status follows its snapshot.
        elif self._catch_up_from_history(source):
            self._put(self._status_update(source))
        else:
            self._pending_snapshots[source] = None
            self._put(StatusUpdate(source, partition, SNAPSHOT_PENDING))

    # What to send.

    def take(self, size: int = FRAME_BYTES) -> list[Outbound]:
        """What to send next, in order: about `size` bytes of what waits, then a snapshot's part.

        Must not run amid the application of a batch.
        """
        outbound: list[Outbound] = []
        while (self._waiting or self._unreported) and size > 0:
            if not self._waiting:
                self._send_first_status(self._unreported.popitem()[0])
                continue
            item = self._waiting.popleft()
            item_bytes = _item_bytes(item)
            self._waiting_bytes -= item_bytes
            size -= item_bytes
            outbound.append(item)
        outbound += [LoadUpdate(source, load) for source, load in self._loads.items()]
        self._loads.clear()
        if not (self._waiting or self._unreported):
            self._take_snapshot_chunk(outbound)
        if not (self._is_caught_up or self._waiting or self._is_behind):
            self._is_caught_up = True
            outbound.append(CaughtUp())
        return outbound

    # Inside.

    @property
    def _is_behind(self) -> bool:
        """Whether there is more to find out than what waits."""
        return bool(self._unreported or self._pending_snapshots or self._snapshot_reads)

    def _send_first_status(self, source: Source) -> None:
        """The first word about a source that the subscriber has, or the index, or both."""
        if source in self._feed:
            self.reconcile(source)
            return
        # After a restart of this index, workers are on their way to it.
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
        self._waiting_bytes += _item_bytes(item)
        if self._waiting_bytes > self._cap_bytes:
            self.is_overflowed = True
            self._waiting.clear()

    def _status_update(self, source: Source) -> StatusUpdate:
        at = self._positions.get(source) or (0, 0)
        return StatusUpdate(source, self._feed.partition(source), self._feed.status(source), at)

    def _withdraw(self, source: Source) -> None:
        """Lets the subscriber forget what it has of a source."""
        self._cancel_snapshot(source)
        if source in self._positions:
            del self._positions[source]
            self._put(StatusUpdate(source, None, CONTENT_WITHDRAWN))

    def _catch_up_from_history(self, source: Source) -> bool:
        """Without a snapshot; whether that was possible."""
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
        # What does not fit would be cut now and whenever it resumes; a snapshot is read as it goes.
        # Half is for statuses and what comes meanwhile.
        if self._waiting_bytes + sum(map(_item_bytes, missing_batches)) > self._cap_bytes // 2:
            return False
        for batch in missing_batches:
            self.batch(batch)
        return self._positions[source] == current

    def _take_snapshot_chunk(self, outbound: list[Outbound]) -> None:
        if self._pending_snapshots and len(self._snapshot_reads) < SNAPSHOTS_MAX:
            source = next(iter(self._pending_snapshots))
            del self._pending_snapshots[source]
            # Its first part goes out at once: no batch may go ahead of that, or it is a gap.
            self._snapshot_reads.appendleft(self._begin_snapshot(source))
        if not self._snapshot_reads:
            return
        snapshot_read = self._snapshot_reads.popleft()
        # Cleared meanwhile, it ends early, and the batch that cleared it has gone ahead.
        chunk = next(snapshot_read.chunks)
        outbound.append(chunk)
        if not chunk.last:
            self._snapshot_reads.append(snapshot_read)
            return
        outbound.append(self._status_update(snapshot_read.source))

    def _begin_snapshot(self, source: Source) -> _SnapshotRead:
        at = self._feed.position(source)
        self._positions[source] = (at.epoch, at.sequence)
        index, advertised = self._feed.advertised(source)
        return _SnapshotRead(source, snapshot_chunks(at, index.chunks(advertised)))

    def _cancel_snapshot(self, source: Source) -> None:
        self._pending_snapshots.pop(source, None)
        for snapshot_read in [r for r in self._snapshot_reads if r.source == source]:
            self._snapshot_reads.remove(snapshot_read)
            # Its copy is neither the old nor the new.
            self._positions[source] = None


def snapshot_chunks(
    at: SourcePosition, parts: Iterator[tuple[Tier, Hashes]]
) -> Iterator[SnapshotChunk]:
    """The parts as chunks, marked first and last; one empty chunk when there are none."""
    tier, hashes = next(parts, (Tier.DEVICE, EMPTY_HASHES))
    is_first = True
    for next_part in parts:
        yield SnapshotChunk(at.source, at.epoch, at.sequence, hashes, tier, first=is_first)
        is_first = False
        tier, hashes = next_part
    yield SnapshotChunk(at.source, at.epoch, at.sequence, hashes, tier, first=is_first, last=True)


def _item_bytes(item: Outbound) -> int:
    if isinstance(item, EventBatch):
        return ITEM_BYTES + sum(8 * len(event.hashes) + 16 for event in item.events)
    return ITEM_BYTES
