"""Keeps a KV index equal to what its sources publish: order, gaps, snapshots, trust. Pure.

Each source (one rank of one worker) has a state machine over (epoch, sequence):

- The next batch is applied. A batch at or before the position is a duplicate and changes nothing.
  A batch after the next one is buffered, the missing ones are requested, and the source is *gapped*
  (it does not match) until it reaches the highest sequence known to exist (its *head*).
- A newer epoch begins with an empty set.
- A snapshot is assembled next to the current set while live batches are buffered. Its last chunk
  replaces the set at once, then the buffer is applied; only then does the source match again. A
  snapshot may therefore be read while its source goes on, if every batch after its sequence arrives
  on the same stream before its last chunk: applying them settles every block they touch.
- If the buffer exceeds its limit, the buffer and the pending snapshot are dropped and the missing
  batches are requested again.
- A *load-only* source advertises no blocks and applies no events. Its position is the last one
  received, regardless of gaps, so it is never gapped; the position does not describe its set.

States: exact; degraded (a subset is advertised: matches); stale (no reports: matches for
`stale_s`); gapped (does not match); gone. An indexer calls `register_source` (a publisher's hello)
and serves the resend requests. A replica calls `apply_status` (an indexer's status of a source) and
takes a resend request as the signal to subscribe again.

`apply` and `load` are iterators that process STEP_BLOCKS_MAX blocks per step, so that a caller can
let other tasks run in between. Run or close each of them before the next call for that source.

Invariants: the blocks of a source are visible exactly while it matches; a matching source
advertises at most the blocks that its publisher held at `position`, plus a part of the next batch
if that was interrupted; the buffer holds only batches after `position`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np

from common.errors import InvalidRequest
from common.kv.events import (
    EventBatch,
    EventKind,
    Hashes,
    KvEvent,
    Partition,
    SnapshotChunk,
    Source,
    SourcePosition,
    SourceStatus,
    Tier,
)
from common.kv.prefix_index import AdvertisedBlocks, PrefixIndex, SourceMatch
from common.kv.source_entry import SourceEntry, batch_weight

STEP_BLOCKS_MAX = 1024
"""Blocks applied between two steps; about 0.2 ms."""

STALE_GRACE_S = 10.0
"""Seconds a source matches after its publisher, or the followed index, is lost."""

RETRY_S = 2.0
"""Seconds without progress after which a resend is requested again."""

BUFFER_BLOCKS_MAX = 2**20
"""Buffered blocks per source while batches or a snapshot are missing; 8 MiB of hashes."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchApplied:
    """A batch was applied, in order."""

    batch: EventBatch


@dataclass(frozen=True, slots=True)
class SourceReplaced:
    """The set of a source was replaced, not by batches: copies need a snapshot."""

    source: Source


@dataclass(frozen=True, slots=True)
class StatusChanged:
    """The status of a source changed."""

    source: Source
    partition: Partition
    status: SourceStatus


@dataclass(frozen=True, slots=True)
class ResendRequest:
    """Batches are missing: the source must send from this sequence on, or a snapshot."""

    source: Source
    epoch: int
    from_sequence: int


FeedEvent: TypeAlias = BatchApplied | SourceReplaced | StatusChanged | ResendRequest


@dataclass(slots=True)
class FeedCounters:
    """Totals since the start."""

    batches: int = 0
    duplicates: int = 0
    gaps: int = 0
    snapshots: int = 0
    overflows: int = 0


class IndexFeed:
    """All sources of an index, in any number of partitions. Times are seconds of one clock."""

    def __init__(
        self,
        *,
        stale_s: float = STALE_GRACE_S,
        retry_s: float = RETRY_S,
        buffer_blocks_max: int = BUFFER_BLOCKS_MAX,
        rows_max: int | None = None,
    ) -> None:
        self._stale_s = stale_s
        self._retry_s = retry_s
        self._buffer_blocks_max = buffer_blocks_max
        self._rows_max = rows_max
        self._entries: dict[Source, SourceEntry] = {}
        self._indexes: dict[Partition, PrefixIndex] = {}
        self._feed_events: list[FeedEvent] = []
        self.counters = FeedCounters()

    # Queries. Methods with a source require a known one.

    @property
    def blocks(self) -> int:
        """Blocks in all indexes; a block held by n sources counts n times."""
        return sum(index.blocks for index in self._indexes.values())

    @property
    def used_bytes(self) -> int:
        """Estimated memory of the indexes and the buffered batches."""
        buffered = sum(entry.buffered_blocks for entry in self._entries.values())
        return 8 * buffered + sum(index.used_bytes for index in self._indexes.values())

    def sources(self) -> list[Source]:
        return list(self._entries)

    def state_counts(self) -> Counter[str]:
        """Returns the number of sources by state. Any thread may call this."""
        return Counter(entry.compute_status().state for entry in list(self._entries.values()))

    def sources_of(self, worker_id: int) -> list[Source]:
        return [source for source in self._entries if source.worker_id == worker_id]

    def __contains__(self, source: Source) -> bool:
        return source in self._entries

    def partition(self, source: Source) -> Partition:
        return self._entries[source].partition

    def position(self, source: Source) -> SourcePosition:
        """Returns the last applied position of a known source; the last received if load-only."""
        entry = self._entries[source]
        return SourcePosition(source, entry.epoch, entry.sequence, entry.degraded)

    def positions(self) -> list[SourcePosition]:
        """Returns all positions; after `mark_all_disconnected`, a subscriber resumes from them."""
        return [self.position(source) for source in self._entries]

    def status(self, source: Source) -> SourceStatus:
        return self._entries[source].compute_status()

    def is_load_only(self, source: Source) -> bool:
        return self._entries[source].load_only

    def unindexed_blocks_of(self, source: Source) -> int:
        """Returns the estimated blocks that a load-only source holds and does not advertise."""
        return self._entries[source].unindexed_blocks

    def last_received_at(self, source: Source) -> float:
        return self._entries[source].last_received_at

    def last_progress_at(self, source: Source) -> float:
        """Returns when the last batch or part of a snapshot was taken; 0: never."""
        return self._entries[source].last_progress_at

    def is_matchable(self, source: Source) -> bool:
        return self._entries[source].advertised.is_visible

    def retained_blocks_of(self, source: Source) -> int:
        """Returns the blocks kept for a known source: advertised, in a snapshot, or buffered."""
        return self._entries[source].retained_blocks

    def blocks_of(self, source: Source, tier: Tier = Tier.DEVICE) -> int:
        """Returns the blocks of a known source on one tier."""
        return self._entries[source].advertised.blocks_on(tier)

    def advertised(self, source: Source) -> tuple[PrefixIndex, AdvertisedBlocks]:
        """Returns the blocks of a known source and the index to read them with (`chunks`)."""
        entry = self._entries[source]
        return entry.index, entry.advertised

    def match(self, partition: Partition, hashes: Hashes) -> list[SourceMatch]:
        """Returns one row for each matching source with the first block, deepest first."""
        index = self._indexes.get(partition)
        return [] if index is None else index.match(hashes)

    def take_events(self) -> list[FeedEvent]:
        """Returns the feed events since the last call, in order."""
        feed_events, self._feed_events = self._feed_events, []
        return feed_events

    # Reports about sources.

    def register_source(self, partition: Partition, state: SourcePosition, now: float) -> None:
        """Processes the position that a publisher reports at the start of its stream."""
        entry = self._get_or_create_entry(partition, state.source)
        entry.drop_pending()
        is_continuation = state.epoch == entry.epoch and state.sequence >= entry.sequence
        if not is_continuation or entry.load_only:
            self._reset_source(entry, state.epoch)
        entry.head_sequence = state.sequence
        entry.degraded = state.degraded
        entry.stale_since = None
        entry.last_received_at = now
        self._reconcile(entry, now)

    def mark_received(self, source: Source, now: float) -> None:
        """Records a sign of life of a publisher; a no-op for an unknown source."""
        entry = self._entries.get(source)
        if entry is not None:
            entry.last_received_at = now

    def apply_status(
        self,
        partition: Partition | None,
        source: Source,
        status: SourceStatus,
        now: float,
        position: tuple[int, int] = (0, 0),
    ) -> None:
        """Processes the status of a source at the index that this one follows.

        position: (epoch, sequence) that the index has sent; a copy behind it is gapped. Raises
        InvalidRequest if the source is new and its partition is missing.
        """
        if status.state == "gone":
            self.forget(source, status.reason)
            return
        if partition is None:
            partition = self._require_entry(source).partition
        entry = self._get_or_create_entry(partition, source)
        entry.upstream_status = status
        if entry.pending_snapshot is None and not entry.buffer and not entry.is_interrupted:
            # The former index may have announced a head that it never sent; this index restates it.
            entry.head_sequence = entry.sequence
        entry.raise_head(*position)
        if status.state == "stale":
            entry.mark_stale(now, status.reason)
        else:
            entry.stale_since = None
        self._reconcile(entry, now)

    def set_degraded(self, source: Source, degraded: bool, now: float) -> None:
        """Processes a publisher's report that events were lost for good, or its recovery."""
        entry = self._require_entry(source)
        entry.degraded = degraded
        entry.last_received_at = now
        self._reconcile(entry, now)

    def mark_disconnected(self, source: Source, now: float, reason: str) -> None:
        """Marks a source as stale, because reports about it end; a no-op if it is unknown."""
        entry = self._entries.get(source)
        if entry is not None:
            entry.drop_pending()
            entry.is_interrupted = False
            entry.mark_stale(now, reason)
            self._reconcile(entry, now)

    def mark_all_disconnected(self, now: float, reason: str) -> None:
        """Processes the loss of the followed index; drops work that `positions` does not
        include."""
        for source in self._entries:
            self.mark_disconnected(source, now, reason)

    def make_load_only(self, source: Source, now: float) -> None:
        """Drops the blocks of a source and ignores its events until it is registered again."""
        entry = self._require_entry(source)
        entry.begin_load_only()
        self._feed_events.append(SourceReplaced(source))
        self._reconcile(entry, now)

    def end_load_only(self, source: Source, now: float) -> None:
        """Ends `make_load_only`; the blocks of the source are requested."""
        entry = self._require_entry(source)
        head_sequence = entry.sequence
        self._reset_source(entry, entry.epoch)
        entry.head_sequence = head_sequence
        self._reconcile(entry, now)

    def forget(self, source: Source, reason: str) -> None:
        """Removes a source in O(1); `sweep` frees its blocks later."""
        entry = self._entries.pop(source, None)
        if entry is not None:
            entry.drop_pending()
            entry.index.retire(entry.advertised)
            self._feed_events.append(
                StatusChanged(source, entry.partition, SourceStatus("gone", reason))
            )

    def tick(self, now: float) -> None:
        """Ends the grace period of stale sources; repeats resend requests without progress."""
        for entry in self._entries.values():
            idle_since = max(entry.last_progress_at, entry.resend_requested_at or 0.0)
            if entry.resend_requested_at is not None and now - idle_since >= self._retry_s:
                entry.drop_pending()
                entry.is_interrupted = True
            self._reconcile(entry, now)

    def sweep(self, blocks: int) -> bool:
        """Does deferred work for about `blocks` blocks; returns whether more is left."""
        for partition, index in tuple(self._indexes.items()):
            if index.needs_sweep:
                index.sweep(blocks)
                return True
            if not index.blocks and not any(e.index is index for e in self._entries.values()):
                del self._indexes[partition]
        return False

    # Batches and snapshots.

    def apply(self, batch: EventBatch, now: float) -> Iterator[None]:
        """Processes a batch in steps; raises InvalidRequest for an unregistered source."""
        entry = self._require_entry(batch.source)
        entry.last_received_at = now
        if entry.load_only:
            is_new = entry.skip_batch(batch)
            self.counters.batches += is_new
            self.counters.duplicates += not is_new
            return
        if batch.epoch > entry.epoch:
            entry.begin_epoch(batch.epoch)
        if batch.epoch < entry.epoch or batch.sequence <= entry.covered_sequence:
            self.counters.duplicates += 1
            return
        if entry.pending_snapshot is not None or batch.sequence > entry.sequence + 1:
            entry.head_sequence = max(entry.head_sequence, batch.sequence)
            self._buffer_batch(entry, batch)
        else:
            entry.last_progress_at = now
            yield from self._apply_batch(entry, batch)
            yield from self._apply_buffered(entry)
        self._reconcile(entry, now)

    def load(self, chunk: SnapshotChunk, now: float) -> Iterator[None]:
        """Processes a snapshot chunk in steps; raises InvalidRequest for an unregistered source."""
        entry = self._require_entry(chunk.source)
        entry.last_received_at = now
        if entry.load_only:
            entry.skip_chunk(chunk)
            return
        if chunk.first:
            entry.begin_snapshot(chunk)
        pending = entry.pending_snapshot
        if pending is None or (pending.epoch, pending.sequence) != (chunk.epoch, chunk.sequence):
            # Part of a snapshot that was dropped or is older than the set.
            return
        entry.last_progress_at = now
        for start in range(0, len(chunk.hashes), STEP_BLOCKS_MAX):
            part = chunk.hashes[start : start + STEP_BLOCKS_MAX]
            entry.index.store(pending.advertised, part, chunk.tier)
            yield
        if chunk.last:
            entry.install_snapshot(pending)
            self.counters.snapshots += 1
            self._feed_events.append(SourceReplaced(entry.source))
            yield from self._apply_buffered(entry)
        self._reconcile(entry, now)

    def _require_entry(self, source: Source) -> SourceEntry:
        entry = self._entries.get(source)
        if entry is None:
            raise InvalidRequest(
                f"rank {source.dp_rank} of worker {source.worker_id} is not registered",
                "dp_rank",
                reason="UNKNOWN_SOURCE",
            )
        return entry

    def _get_or_create_entry(self, partition: Partition, source: Source) -> SourceEntry:
        entry = self._entries.get(source)
        if entry is not None and entry.partition == partition:
            return entry
        self.forget(source, "moved to another partition")
        index = self._indexes.setdefault(partition, PrefixIndex(self._rows_max))
        entry = SourceEntry(source, partition, index, index.add_source(source))
        self._entries[source] = entry
        return entry

    def _reset_source(self, entry: SourceEntry, epoch: int) -> None:
        entry.begin_epoch(epoch)
        entry.load_only = False
        entry.unindexed_blocks = 0
        self._feed_events.append(SourceReplaced(entry.source))

    def _buffer_batch(self, entry: SourceEntry, batch: EventBatch) -> None:
        if batch.sequence in entry.buffer:
            self.counters.duplicates += 1
        elif entry.buffered_blocks + batch_weight(batch) > self._buffer_blocks_max:
            self.counters.overflows += 1
            entry.drop_pending()
            entry.is_interrupted = True
        else:
            entry.push_batch(batch)

    def _apply_buffered(self, entry: SourceEntry) -> Iterator[None]:
        while (batch := entry.pop_batch(entry.sequence + 1)) is not None:
            yield from self._apply_batch(entry, batch)

    def _apply_batch(self, entry: SourceEntry, batch: EventBatch) -> Iterator[None]:
        # The position moves at the end: an interrupted batch is applied again, which is idempotent.
        for event in _joined(batch.events):
            yield from _apply_event(entry, event)
        self._feed_events.append(BatchApplied(batch))
        entry.sequence = batch.sequence
        entry.head_sequence = max(entry.head_sequence, batch.sequence)
        self.counters.batches += 1

    def _reconcile(self, entry: SourceEntry, now: float) -> None:
        """Updates visibility, reports a changed status, requests missing batches."""
        status = entry.compute_status()
        in_grace_period = entry.stale_since is None or now - entry.stale_since < self._stale_s
        is_matchable = status.state != "gapped" and in_grace_period
        if is_matchable != entry.advertised.is_visible:
            entry.index.set_visible(entry.advertised, is_matchable)
        if status != entry.status:
            self.counters.gaps += status.state == "gapped"
            entry.status = status
            self._feed_events.append(StatusChanged(entry.source, entry.partition, status))
        if not entry.is_gapped:
            entry.resend_requested_at = None
        elif (
            entry.stale_since is None
            and entry.pending_snapshot is None
            and entry.resend_requested_at is None
        ):
            entry.resend_requested_at = now
            self._feed_events.append(ResendRequest(entry.source, entry.epoch, entry.sequence + 1))


def _joined(events: Iterable[KvEvent]) -> Iterator[KvEvent]:
    """Yields the events, consecutive ones of one kind and tier as one: a few large ones cost
    less."""
    for (kind, tier), run in groupby(events, key=lambda event: (event.kind, event.tier)):
        parts = [event.hashes for event in run]
        yield KvEvent(kind, parts[0] if len(parts) == 1 else np.concatenate(parts), tier)


def _apply_event(entry: SourceEntry, event: KvEvent) -> Iterator[None]:
    if event.kind is EventKind.CLEARED:
        entry.clear_blocks()
        entry.degraded = False
        return
    update = entry.index.store if event.kind is EventKind.STORED else entry.index.remove
    for start in range(0, len(event.hashes), STEP_BLOCKS_MAX):
        update(entry.advertised, event.hashes[start : start + STEP_BLOCKS_MAX], event.tier)
        yield


def run_all_steps(steps: Iterable[None]) -> None:
    """Runs `apply` or `load` to its end at once."""
    for _ in steps:
        pass
