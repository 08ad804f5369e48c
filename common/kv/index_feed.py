"""Keeps a KV index equal to what its sources publish: order, gaps, snapshots, trust (pure).

For each source (one rank of one worker) a state machine over (epoch, sequence):

- a batch that is next is applied; one that was had is a duplicate and changes nothing; one from the
  future is a *gap*: it is buffered, what is missing is demanded, and until the source has caught up
  with the highest sequence it is known to have (its *head*) it is gapped and does not count;
- a newer epoch begins with an empty set;
- a snapshot is gathered beside what is there, live batches are buffered meanwhile; with its last
  part it is swapped in at once and the buffer is applied; only then does the source count again. So
  a snapshot may have been read while its source went on, as long as every batch since its sequence
  came on the same stream before its last part: replaying them settles every block they touch;
- a buffer over its cap is dropped together with the snapshot being gathered, and what is missing is
  demanded anew;
- a *load-only* source claims nothing and takes nothing in: its position is that of the last thing
  heard of it, whatever came before, so it is never gapped, and says nothing of what it claims.

States: exact; degraded (claims are a subset: counts); stale (nobody reports any more: counts for
`stale_s`); gapped (does not count); gone. An indexer feeds it with `register_source` (a
publisher's hello)
and answers its demands; a replica with `apply_status` (an indexer's word about a source) and takes
a
demand as the sign to subscribe again.

`apply` and `load` are iterators that do STEP_BLOCKS of work a step, so that a caller can let others
run between. Each must be run to its end, or closed, before the next call about that source.

Invariants: claims are shown exactly when the source counts; a source that counts claims the blocks
its publisher held at `position`, or fewer, or, where a batch was cut short, a part of the next one
as well; the buffer holds only what lies beyond `position`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from common.errors import InvalidRequest
from common.kv.events import (
    EventBatch,
    EventKind,
    Hashes,
    Partition,
    SnapshotChunk,
    Source,
    SourcePosition,
    SourceStatus,
    Tier,
)
from common.kv.prefix_index import AdvertisedBlocks, PrefixIndex, SourceMatch

STEP_BLOCKS_MAX = 1024
"""Blocks applied between two steps; about 0.2 ms."""

STALE_GRACE_S = 10.0
"""How long a source counts after its publisher, or the index it is read from, was lost."""

RETRY_S = 2.0
"""A demand that brings nothing for this long is made again."""

BUFFER_BLOCKS_MAX = 2**20
"""Blocks of batches that wait for a gap or a snapshot, a source; 8 MiB of hashes."""

_BATCH_OVERHEAD_BLOCKS = (
    56  # What a batch weighs in the buffer beside its hashes; 450 bytes, measured.
)

EXACT = SourceStatus("exact")
GAPPED = SourceStatus("gapped", "batches are missing")
LOAD_ONLY = SourceStatus("degraded", "over budget: only its load is known")
DEGRADED = SourceStatus("degraded", "events were lost: a subset is claimed")


@dataclass(frozen=True, slots=True, eq=False)
class BatchApplied:
    """A batch was applied, in order."""

    batch: EventBatch


@dataclass(frozen=True, slots=True)
class SourceReplaced:
    """A source's set was replaced, not by batches: who copies it needs a snapshot."""

    source: Source


@dataclass(frozen=True, slots=True)
class StatusChanged:
    """How far a source can be trusted has changed."""

    source: Source
    partition: Partition
    status: SourceStatus


@dataclass(frozen=True, slots=True)
class ResendRequest:
    """Batches are missing: send from this sequence on, or a snapshot."""

    source: Source
    epoch: int
    from_sequence: int


FeedEvent: TypeAlias = BatchApplied | SourceReplaced | StatusChanged | ResendRequest


@dataclass(slots=True)
class FeedCounters:
    """What has happened since the start."""

    batches: int = 0
    duplicates: int = 0
    gaps: int = 0
    snapshots: int = 0
    overflows: int = 0
    chunks_ignored: int = 0


@dataclass(slots=True, eq=False)
class _PendingSnapshot:
    """A snapshot being gathered."""

    epoch: int
    sequence: int
    advertised: AdvertisedBlocks


@dataclass(slots=True, eq=False)
class _SourceEntry:
    """One source."""

    source: Source
    partition: Partition
    index: PrefixIndex
    advertised: AdvertisedBlocks
    epoch: int = 0
    sequence: int = 0
    head_sequence: int = 0
    status: SourceStatus | None = None
    degraded: bool = False
    load_only: bool = False
    unindexed_blocks: int = 0  # What a load-only source is estimated to hold.
    upstream_status: SourceStatus = EXACT  # What the index this one follows says.
    stale_since: float | None = None
    stale_reason: str = ""
    pending_snapshot: _PendingSnapshot | None = None
    is_interrupted: bool = False  # What was under way was dropped, though nobody was lost.
    buffer: dict[int, EventBatch] = field(default_factory=dict)
    buffered_blocks: int = 0
    resend_requested_at: float | None = None
    last_received_at: float = 0.0
    last_progress_at: float = 0.0

    @property
    def is_gapped(self) -> bool:
        return self.sequence < self.head_sequence

    @property
    def retained_blocks(self) -> int:
        pending_snapshot = (
            0 if self.pending_snapshot is None else self.pending_snapshot.advertised.blocks
        )
        return self.advertised.blocks + pending_snapshot + self.buffered_blocks

    def state(self) -> SourceStatus:
        if self.is_gapped:
            return GAPPED
        if self.upstream_status.state == "gapped":
            return self.upstream_status
        if self.stale_since is not None:
            return SourceStatus("stale", self.stale_reason)
        if self.load_only:
            return LOAD_ONLY
        if self.upstream_status.state == "degraded":
            return self.upstream_status
        return DEGRADED if self.degraded else EXACT


class IndexFeed:
    """All sources of an index, in any number of partitions. Times are seconds of one clock."""

    def __init__(
        self,
        *,
        stale_s: float = STALE_GRACE_S,
        retry_s: float = RETRY_S,
        buffer_blocks_max: int = BUFFER_BLOCKS_MAX,
    ) -> None:
        self._stale_s = stale_s
        self._retry_s = retry_s
        self._buffer_blocks_max = buffer_blocks_max
        self._entries: dict[Source, _SourceEntry] = {}
        self._indexes: dict[Partition, PrefixIndex] = {}
        self._feed_events: list[FeedEvent] = []
        self.counters = FeedCounters()

    # Questions.

    @property
    def blocks(self) -> int:
        """Blocks in all indexes; one held by n sources counts n times."""
        return sum(index.blocks for index in self._indexes.values())

    @property
    def used_bytes(self) -> int:
        """What the indexes, and the batches that wait, are estimated to use."""
        buffered = sum(entry.buffered_blocks for entry in self._entries.values())
        return 8 * buffered + sum(index.used_bytes for index in self._indexes.values())

    def sources(self) -> list[Source]:
        """All sources known."""
        return list(self._entries)

    def sources_of(self, worker_id: int) -> list[Source]:
        """The sources of one worker."""
        return [source for source in self._entries if source.worker_id == worker_id]

    def __contains__(self, source: Source) -> bool:
        return source in self._entries

    def partition(self, source: Source) -> Partition:
        """Where a known source's blocks are."""
        return self._entries[source].partition

    def position(self, source: Source) -> SourcePosition:
        """The batch applied last of a known source; heard last, if it is load-only."""
        entry = self._entries[source]
        return SourcePosition(source, entry.epoch, entry.sequence, entry.degraded)

    def positions(self) -> list[SourcePosition]:
        """The positions of all sources: what a subscriber resumes from, after
        `mark_all_disconnected`."""
        return [self.position(source) for source in self._entries]

    def status(self, source: Source) -> SourceStatus:
        """How far a known source can be trusted."""
        return self._entries[source].state()

    def is_load_only(self, source: Source) -> bool:
        """Whether `make_load_only` is in force for a known source."""
        return self._entries[source].load_only

    def unindexed_blocks_of(self, source: Source) -> int:
        """Blocks a known source is estimated to hold that a load-only one does not claim here."""
        return self._entries[source].unindexed_blocks

    def last_received_at(self, source: Source) -> float:
        """When a known source's publisher said something last."""
        return self._entries[source].last_received_at

    def is_matchable(self, source: Source) -> bool:
        """Whether a known source matches."""
        return self._entries[source].advertised.is_visible

    def blocks_of(self, source: Source) -> int:
        """Blocks a known source claims, over all tier sets."""
        return self._entries[source].advertised.blocks

    def retained_blocks_of(self, source: Source) -> int:
        """Blocks that are kept of a known source: claimed, being gathered, or put off."""
        return self._entries[source].retained_blocks

    def device_blocks_of(self, source: Source) -> int:
        """Blocks a known source claims on the device."""
        return self._entries[source].advertised.blocks_on(Tier.DEVICE)

    def advertised(self, source: Source) -> tuple[PrefixIndex, AdvertisedBlocks]:
        """What a known source claims, and the index to read it from (`PrefixIndex.chunks`)."""
        entry = self._entries[source]
        return entry.index, entry.advertised

    def match(self, partition: Partition, hashes: Hashes) -> list[SourceMatch]:
        """One row for each source that counts and holds the first block, deepest first."""
        index = self._indexes.get(partition)
        return [] if index is None else index.match(hashes)

    def take_events(self) -> list[FeedEvent]:
        """What has happened since this was called last, in order."""
        feed_events, self._feed_events = self._feed_events, []
        return feed_events

    # What sources and those who know them say.

    def register_source(self, partition: Partition, state: SourcePosition, now: float) -> None:
        """A publisher says where it stands, at the start of its stream."""
        entry = self._get_or_create_entry(partition, state.source)
        self._drop_pending(entry)
        is_continuation = state.epoch == entry.epoch and state.sequence >= entry.sequence
        if not is_continuation or entry.load_only:
            self._reset_source(entry, state.epoch)
        entry.head_sequence = state.sequence
        entry.degraded = state.degraded
        entry.stale_since = None
        entry.last_received_at = now
        self._reconcile(entry, now)

    def mark_received(self, source: Source, now: float) -> None:
        """A publisher said something that changes nothing here; no matter if it is unknown."""
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
        """The index that this one copies says how far it trusts a source.

        at: (epoch, sequence) of what it has sent of it; who has less than that is gapped. Raises
        InvalidRequest when the source is new and its partition is missing.
        """
        if status.state == "gone":
            self.forget(source, status.reason)
            return
        if partition is None:
            partition = self._require_entry(source).partition
        entry = self._get_or_create_entry(partition, source)
        entry.upstream_status = status
        if entry.pending_snapshot is None and not entry.buffer and not entry.is_interrupted:
            # What an index lost meanwhile had been about to send, this one sends if it has it.
            entry.head_sequence = entry.sequence
        self._raise_head(entry, *position)
        if status.state == "stale":
            self._mark_stale(entry, now, status.reason)
        else:
            entry.stale_since = None
        self._reconcile(entry, now)

    def set_degraded(self, source: Source, degraded: bool, now: float) -> None:
        """A publisher has lost events beyond repair, or has recovered from that."""
        entry = self._require_entry(source)
        entry.degraded = degraded
        entry.last_received_at = now
        self._reconcile(entry, now)

    def mark_disconnected(self, source: Source, now: float, reason: str) -> None:
        """Nobody reports about the source any more; nothing happens if it is unknown."""
        entry = self._entries.get(source)
        if entry is not None:
            self._drop_pending(entry)
            entry.is_interrupted = False
            self._mark_stale(entry, now, reason)
            self._reconcile(entry, now)

    def mark_all_disconnected(self, now: float, reason: str) -> None:
        """The index that this one copies is lost; due before another subscription begins.

        What was under way is dropped, since `positions`, from which that resumes, leave it out.
        """
        for source in self._entries:
            self.mark_disconnected(source, now, reason)

    def make_load_only(self, source: Source, now: float) -> None:
        """Drops what a source claims, and takes no events of it until it is announced again."""
        entry = self._require_entry(source)
        # A snapshot being gathered replaces the claims; what is left of it will be counted.
        pending_snapshot = entry.pending_snapshot
        entry.unindexed_blocks = (
            entry.retained_blocks
            if pending_snapshot is None
            else pending_snapshot.advertised.blocks
        )
        self._drop_pending(entry)
        self._clear_blocks(entry)
        entry.load_only = True
        entry.is_interrupted = False
        entry.head_sequence = entry.sequence
        self._feed_events.append(SourceReplaced(source))
        self._reconcile(entry, now)

    def end_load_only(self, source: Source, now: float) -> None:
        """Ends `make_load_only`: what the source holds is demanded."""
        entry = self._require_entry(source)
        head_sequence = entry.sequence
        self._reset_source(entry, entry.epoch)
        entry.head_sequence = head_sequence
        self._reconcile(entry, now)

    def forget(self, source: Source, reason: str) -> None:
        """The source is gone; O(1), what it held is swept later."""
        entry = self._entries.pop(source, None)
        if entry is not None:
            self._drop_pending(entry)
            entry.index.retire(entry.advertised)
            self._feed_events.append(
                StatusChanged(source, entry.partition, SourceStatus("gone", reason))
            )

    def tick(self, now: float) -> None:
        """Ends the grace of stale sources and repeats demands that brought nothing."""
        for entry in self._entries.values():
            idle_since = max(entry.last_progress_at, entry.resend_requested_at or 0.0)
            if entry.resend_requested_at is not None and now - idle_since >= self._retry_s:
                self._drop_pending(entry)
                entry.is_interrupted = True
            self._reconcile(entry, now)

    def sweep(self, blocks: int) -> bool:
        """Does about `blocks` blocks' worth of put-off work; whether there is more to do."""
        for partition, index in tuple(self._indexes.items()):
            if index.needs_sweep:
                index.sweep(blocks)
                return True
            if not index.blocks and not any(t.index is index for t in self._entries.values()):
                del self._indexes[partition]
        return False

    # Batches and snapshots.

    def apply(self, batch: EventBatch, now: float) -> Iterator[None]:
        """Takes a batch; raises InvalidRequest for a source that was not announced."""
        entry = self._require_entry(batch.source)
        entry.last_received_at = now
        if entry.load_only:
            self._skip_batch(entry, batch)
            return
        if batch.epoch > entry.epoch:
            self._begin_epoch(entry, batch.epoch)
        covered_sequence = max(
            entry.sequence, entry.pending_snapshot.sequence if entry.pending_snapshot else 0
        )
        if batch.epoch < entry.epoch or batch.sequence <= covered_sequence:
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
        """Takes a part of a snapshot; raises InvalidRequest for a source not announced."""
        entry = self._require_entry(chunk.source)
        entry.last_received_at = now
        if entry.load_only:
            self._skip_chunk(entry, chunk)
            return
        if chunk.first:
            self._begin_snapshot(entry, chunk)
        pending_snapshot = entry.pending_snapshot
        position = (chunk.epoch, chunk.sequence)
        if (
            pending_snapshot is None
            or (pending_snapshot.epoch, pending_snapshot.sequence) != position
        ):
            # Of a snapshot that was given up, or that is older than what is here.
            self.counters.chunks_ignored += 1
            return
        entry.last_progress_at = now
        for start in range(0, len(chunk.hashes), STEP_BLOCKS_MAX):
            part = chunk.hashes[start : start + STEP_BLOCKS_MAX]
            entry.index.store(pending_snapshot.advertised, part, chunk.tier)
            yield
        if chunk.last:
            self._install_snapshot(entry, pending_snapshot)
            yield from self._apply_buffered(entry)
        self._reconcile(entry, now)

    # Inside.

    def _require_entry(self, source: Source) -> _SourceEntry:
        entry = self._entries.get(source)
        if entry is None:
            raise InvalidRequest(
                f"rank {source.dp_rank} of worker {source.worker_id} was not announced",
                "dp_rank",
                reason="UNKNOWN_SOURCE",
            )
        return entry

    def _get_or_create_entry(self, partition: Partition, source: Source) -> _SourceEntry:
        """The track of a source; a new one, if it is unknown or was in another partition."""
        entry = self._entries.get(source)
        if entry is not None and entry.partition == partition:
            return entry
        self.forget(source, "it has moved to another partition")
        index = self._indexes.setdefault(partition, PrefixIndex())
        entry = self._entries[source] = _SourceEntry(
            source, partition, index, index.add_source(source)
        )
        return entry

    def _begin_epoch(self, entry: _SourceEntry, epoch: int) -> None:
        self._drop_pending(entry)
        self._clear_blocks(entry)
        entry.epoch, entry.sequence, entry.head_sequence = epoch, 0, 0
        entry.is_interrupted = False

    def _reset_source(self, entry: _SourceEntry, epoch: int) -> None:
        self._begin_epoch(entry, epoch)
        entry.load_only = False
        entry.unindexed_blocks = 0
        self._feed_events.append(SourceReplaced(entry.source))

    def _raise_head(self, entry: _SourceEntry, epoch: int, sequence: int) -> None:
        """There is that much of a source: until it is here, the source is gapped."""
        if epoch > entry.epoch:
            self._begin_epoch(entry, epoch)
        if epoch == entry.epoch:
            entry.head_sequence = max(entry.head_sequence, sequence)

    def _skip_batch(self, entry: _SourceEntry, batch: EventBatch) -> None:
        """A batch of a load-only source: where it stands, and about how much it holds."""
        position = (batch.epoch, batch.sequence)
        if position <= (entry.epoch, entry.sequence):
            self.counters.duplicates += 1
            return
        if batch.epoch > entry.epoch:
            entry.unindexed_blocks = 0
        for event in batch.events:
            match event.kind:
                case EventKind.STORED:
                    entry.unindexed_blocks += len(event.hashes)
                case EventKind.REMOVED:
                    entry.unindexed_blocks = max(0, entry.unindexed_blocks - len(event.hashes))
                case EventKind.CLEARED:
                    entry.unindexed_blocks = 0
                    entry.degraded = False
        entry.epoch, entry.sequence = position
        entry.head_sequence = entry.sequence
        self.counters.batches += 1

    def _skip_chunk(self, entry: _SourceEntry, chunk: SnapshotChunk) -> None:
        """A part of a snapshot of a load-only source, which live batches may have gone past."""
        if chunk.epoch < entry.epoch:
            self.counters.chunks_ignored += 1
            return
        if chunk.first:
            entry.unindexed_blocks = 0
        entry.unindexed_blocks += len(chunk.hashes)
        if chunk.last:
            position, current_position = (
                (chunk.epoch, chunk.sequence),
                (entry.epoch, entry.sequence),
            )
            entry.epoch, entry.sequence = max(position, current_position)
            entry.head_sequence = entry.sequence

    def _clear_blocks(self, entry: _SourceEntry) -> None:
        """A new empty set, shown as the old one was."""
        is_visible = entry.advertised.is_visible
        entry.index.retire(entry.advertised)
        entry.advertised = entry.index.add_source(entry.source)
        entry.index.set_visible(entry.advertised, is_visible)

    def _drop_pending(self, entry: _SourceEntry) -> None:
        if entry.pending_snapshot is not None:
            entry.index.retire(entry.pending_snapshot.advertised)
            entry.pending_snapshot = None
        entry.buffer.clear()
        entry.buffered_blocks = 0
        entry.resend_requested_at = None

    def _buffer_batch(self, entry: _SourceEntry, batch: EventBatch) -> None:
        if batch.sequence in entry.buffer:
            self.counters.duplicates += 1
            return
        batch_weight = _batch_weight(batch)
        if entry.buffered_blocks + batch_weight > self._buffer_blocks_max:
            self.counters.overflows += 1
            self._drop_pending(entry)
            entry.is_interrupted = True
            return
        entry.buffer[batch.sequence] = batch
        entry.buffered_blocks += batch_weight

    def _apply_buffered(self, entry: _SourceEntry) -> Iterator[None]:
        while (batch := entry.buffer.pop(entry.sequence + 1, None)) is not None:
            entry.buffered_blocks -= _batch_weight(batch)
            yield from self._apply_batch(entry, batch)

    def _apply_batch(self, entry: _SourceEntry, batch: EventBatch) -> Iterator[None]:
        # The position moves at the end: a batch cut short is applied again, which does no harm.
        for event in batch.events:
            yield from self._apply_event(entry, event.kind, event.hashes, event.tier)
        self._feed_events.append(BatchApplied(batch))
        entry.sequence = batch.sequence
        entry.head_sequence = max(entry.head_sequence, batch.sequence)
        self.counters.batches += 1

    def _apply_event(
        self, entry: _SourceEntry, kind: EventKind, hashes: Hashes, tier: Tier
    ) -> Iterator[None]:
        if kind is EventKind.CLEARED:
            self._clear_blocks(entry)
            entry.degraded = False
            return
        update = entry.index.store if kind is EventKind.STORED else entry.index.remove
        for start in range(0, len(hashes), STEP_BLOCKS_MAX):
            update(entry.advertised, hashes[start : start + STEP_BLOCKS_MAX], tier)
            yield

    def _begin_snapshot(self, entry: _SourceEntry, chunk: SnapshotChunk) -> None:
        current_position = (entry.epoch, entry.sequence)
        if (chunk.epoch, chunk.sequence) < current_position:
            return
        if chunk.epoch > entry.epoch:
            self._begin_epoch(entry, chunk.epoch)
        if entry.pending_snapshot is not None:
            entry.index.retire(entry.pending_snapshot.advertised)
        entry.pending_snapshot = _PendingSnapshot(
            chunk.epoch, chunk.sequence, entry.index.add_source(entry.source)
        )
        entry.head_sequence = max(entry.head_sequence, chunk.sequence)
        for sequence in [s for s in entry.buffer if s <= chunk.sequence]:
            entry.buffered_blocks -= _batch_weight(entry.buffer.pop(sequence))

    def _install_snapshot(self, entry: _SourceEntry, pending_snapshot: _PendingSnapshot) -> None:
        entry.index.retire(entry.advertised)
        entry.advertised, entry.pending_snapshot = pending_snapshot.advertised, None
        entry.sequence = pending_snapshot.sequence
        entry.is_interrupted = False
        self.counters.snapshots += 1
        self._feed_events.append(SourceReplaced(entry.source))

    def _mark_stale(self, entry: _SourceEntry, now: float, reason: str) -> None:
        entry.stale_reason = reason
        if entry.stale_since is None:
            entry.stale_since = now

    def _reconcile(self, entry: _SourceEntry, now: float) -> None:
        """Shows or hides the claims, tells of a new status, demands what is missing."""
        status = entry.state()
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


def _batch_weight(batch: EventBatch) -> int:
    return _BATCH_OVERHEAD_BLOCKS + sum(len(event.hashes) for event in batch.events)


def run_all_steps(steps: Iterable[None]) -> None:
    """Runs `apply` or `load` to its end at once."""
    for _ in steps:
        pass
