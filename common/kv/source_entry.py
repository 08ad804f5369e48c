"""State of one source inside an `IndexFeed`. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.kv.events import (
    EventBatch,
    EventKind,
    Partition,
    SnapshotChunk,
    Source,
    SourceStatus,
)
from common.kv.prefix_index import AdvertisedBlocks, PrefixIndex

EXACT = SourceStatus("exact")
GAPPED = SourceStatus("gapped", "batches are missing")
LOAD_ONLY = SourceStatus("degraded", "over budget: only the load is known")
DEGRADED = SourceStatus("degraded", "events were lost: a subset is advertised")

# Weight of a batch in the buffer besides its hashes; 450 bytes, measured.
_BATCH_OVERHEAD_BLOCKS = 56


@dataclass(slots=True, eq=False)
class PendingSnapshot:
    """A snapshot without its last chunk."""

    epoch: int
    sequence: int
    advertised: AdvertisedBlocks


@dataclass(slots=True, eq=False)
class SourceEntry:
    """Position, blocks, pending work and status of one source.

    head_sequence: the highest sequence known to exist; above `sequence`, the source is gapped.
    unindexed_blocks: estimate of the blocks that a load-only source holds.
    upstream_status: status at the index that this one follows.
    is_interrupted: pending work was dropped although the connection is up.
    """

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
    unindexed_blocks: int = 0
    upstream_status: SourceStatus = EXACT
    stale_since: float | None = None
    stale_reason: str = ""
    pending_snapshot: PendingSnapshot | None = None
    is_interrupted: bool = False
    buffer: dict[int, EventBatch] = field(default_factory=dict)
    buffered_blocks: int = 0
    resend_requested_at: float | None = None
    last_received_at: float = 0.0
    last_progress_at: float = 0.0

    @property
    def is_gapped(self) -> bool:
        return self.sequence < self.head_sequence

    @property
    def covered_sequence(self) -> int:
        """The highest sequence that the set or the pending snapshot includes."""
        pending = self.pending_snapshot
        return self.sequence if pending is None else max(self.sequence, pending.sequence)

    @property
    def retained_blocks(self) -> int:
        pending = self.pending_snapshot
        pending_blocks = 0 if pending is None else pending.advertised.blocks
        return self.advertised.blocks + pending_blocks + self.buffered_blocks

    def compute_status(self) -> SourceStatus:
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

    def mark_stale(self, now: float, reason: str) -> None:
        self.stale_reason = reason
        if self.stale_since is None:
            self.stale_since = now

    def begin_epoch(self, epoch: int) -> None:
        self.drop_pending()
        self.clear_blocks()
        self.epoch, self.sequence, self.head_sequence = epoch, 0, 0
        self.is_interrupted = False

    def raise_head(self, epoch: int, sequence: int) -> None:
        """Records that the source has reached (epoch, sequence); gapped until it is applied."""
        if epoch > self.epoch:
            self.begin_epoch(epoch)
        if epoch == self.epoch:
            self.head_sequence = max(self.head_sequence, sequence)

    def clear_blocks(self) -> None:
        """Replaces the set by an empty one with the same visibility."""
        is_visible = self.advertised.is_visible
        self.index.retire(self.advertised)
        self.advertised = self.index.add_source(self.source)
        self.index.set_visible(self.advertised, is_visible)

    def drop_pending(self) -> None:
        """Drops the pending snapshot, the buffer and the open resend request."""
        if self.pending_snapshot is not None:
            self.index.retire(self.pending_snapshot.advertised)
            self.pending_snapshot = None
        self.buffer.clear()
        self.buffered_blocks = 0
        self.resend_requested_at = None

    def push_batch(self, batch: EventBatch) -> None:
        self.buffer[batch.sequence] = batch
        self.buffered_blocks += batch_weight(batch)

    def pop_batch(self, sequence: int) -> EventBatch | None:
        batch = self.buffer.pop(sequence, None)
        if batch is not None:
            self.buffered_blocks -= batch_weight(batch)
        return batch

    def begin_snapshot(self, chunk: SnapshotChunk) -> None:
        """Starts the snapshot of a first chunk, unless it is older than the set."""
        if (chunk.epoch, chunk.sequence) < (self.epoch, self.sequence):
            return
        if chunk.epoch > self.epoch:
            self.begin_epoch(chunk.epoch)
        if self.pending_snapshot is not None:
            self.index.retire(self.pending_snapshot.advertised)
        self.pending_snapshot = PendingSnapshot(
            chunk.epoch, chunk.sequence, self.index.add_source(self.source)
        )
        self.head_sequence = max(self.head_sequence, chunk.sequence)
        for sequence in [s for s in self.buffer if s <= chunk.sequence]:
            self.pop_batch(sequence)

    def install_snapshot(self, snapshot: PendingSnapshot) -> None:
        self.index.retire(self.advertised)
        self.advertised, self.pending_snapshot = snapshot.advertised, None
        self.sequence = snapshot.sequence
        self.is_interrupted = False

    def begin_load_only(self) -> None:
        # A pending snapshot replaces the set; its remaining chunks are counted as they arrive.
        pending = self.pending_snapshot
        self.unindexed_blocks = (
            self.retained_blocks if pending is None else pending.advertised.blocks
        )
        self.drop_pending()
        self.clear_blocks()
        self.load_only = True
        self.is_interrupted = False
        self.head_sequence = self.sequence

    def skip_batch(self, batch: EventBatch) -> bool:
        """Updates position and estimate of a load-only source; returns whether the batch is new."""
        position = (batch.epoch, batch.sequence)
        if position <= (self.epoch, self.sequence):
            return False
        if batch.epoch > self.epoch:
            self.unindexed_blocks = 0
        for event in batch.events:
            match event.kind:
                case EventKind.STORED:
                    self.unindexed_blocks += len(event.hashes)
                case EventKind.REMOVED:
                    self.unindexed_blocks = max(0, self.unindexed_blocks - len(event.hashes))
                case EventKind.CLEARED:
                    self.unindexed_blocks = 0
                    self.degraded = False
        self._move_to(*position)
        return True

    def skip_chunk(self, chunk: SnapshotChunk) -> None:
        """Skips a chunk as `skip_batch` does; live batches may be ahead of its position."""
        if chunk.epoch < self.epoch:
            return
        if chunk.first:
            self.unindexed_blocks = 0
        self.unindexed_blocks += len(chunk.hashes)
        if chunk.last:
            self._move_to(*max((chunk.epoch, chunk.sequence), (self.epoch, self.sequence)))

    def _move_to(self, epoch: int, sequence: int) -> None:
        self.epoch, self.sequence, self.head_sequence = epoch, sequence, sequence


def batch_weight(batch: EventBatch) -> int:
    """Returns the size of a buffered batch in blocks, its overhead included."""
    return _BATCH_OVERHEAD_BLOCKS + sum(len(event.hashes) for event in batch.events)
