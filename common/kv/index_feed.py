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
`stale_s`); gapped (does not count); gone. An indexer feeds it with `announce` (a publisher's hello)
and answers its demands; a replica with `follow` (an indexer's word about a source) and takes a
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
    SourceState,
    SourceStatus,
    Tier,
)
from common.kv.prefix_index import Claims, Matched, PrefixIndex

STEP_BLOCKS = 1024
"""Blocks applied between two steps; about 0.2 ms."""

STALE_S = 10.0
"""How long a source counts after its publisher, or the index it is read from, was lost."""

RETRY_S = 2.0
"""A demand that brings nothing for this long is made again."""

BUFFER_BLOCKS_MAX = 2**20
"""Blocks of batches that wait for a gap or a snapshot, a source; 8 MiB of hashes."""

_BATCH_BLOCKS = 56  # What a batch weighs in the buffer beside its hashes; 450 bytes, measured.

EXACT = SourceStatus("exact")
GAPPED = SourceStatus("gapped", "batches are missing")
LOAD_ONLY = SourceStatus("degraded", "over budget: only its load is known")
DEGRADED = SourceStatus("degraded", "events were lost: a subset is claimed")


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """A batch was applied, in order."""

    batch: EventBatch


@dataclass(frozen=True, slots=True)
class Replaced:
    """A source's set was replaced, not by batches: who copies it needs a snapshot."""

    source: Source


@dataclass(frozen=True, slots=True)
class Changed:
    """How far a source can be trusted has changed."""

    source: Source
    partition: Partition
    status: SourceStatus


@dataclass(frozen=True, slots=True)
class Demand:
    """Batches are missing: send from this sequence on, or a snapshot."""

    source: Source
    epoch: int
    from_sequence: int


News: TypeAlias = Applied | Replaced | Changed | Demand


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
class _Incoming:
    """A snapshot being gathered."""

    epoch: int
    sequence: int
    claims: Claims


@dataclass(slots=True, eq=False)
class _Track:
    """One source."""

    source: Source
    partition: Partition
    index: PrefixIndex
    claims: Claims
    epoch: int = 0
    sequence: int = 0
    head: int = 0
    status: SourceStatus | None = None
    degraded: bool = False
    load_only: bool = False
    withheld_blocks: int = 0  # What a load-only source is estimated to hold.
    said: SourceStatus = EXACT  # What the index this one follows says.
    stale_since: float | None = None
    stale_reason: str = ""
    incoming: _Incoming | None = None
    is_cut_short: bool = False  # What was under way was dropped, though nobody was lost.
    buffer: dict[int, EventBatch] = field(default_factory=dict)
    buffered_blocks: int = 0
    demanded_at: float | None = None
    heard_at: float = 0.0
    progressed_at: float = 0.0

    @property
    def is_gapped(self) -> bool:
        return self.sequence < self.head

    @property
    def kept_blocks(self) -> int:
        incoming = 0 if self.incoming is None else self.incoming.claims.blocks
        return self.claims.blocks + incoming + self.buffered_blocks

    def state(self) -> SourceStatus:
        if self.is_gapped:
            return GAPPED
        if self.said.state == "gapped":
            return self.said
        if self.stale_since is not None:
            return SourceStatus("stale", self.stale_reason)
        if self.load_only:
            return LOAD_ONLY
        if self.said.state == "degraded":
            return self.said
        return DEGRADED if self.degraded else EXACT


class IndexFeed:
    """All sources of an index, in any number of partitions. Times are seconds of one clock."""

    def __init__(
        self,
        *,
        stale_s: float = STALE_S,
        retry_s: float = RETRY_S,
        buffer_blocks_max: int = BUFFER_BLOCKS_MAX,
    ) -> None:
        self._stale_s = stale_s
        self._retry_s = retry_s
        self._buffer_blocks_max = buffer_blocks_max
        self._tracks: dict[Source, _Track] = {}
        self._indexes: dict[Partition, PrefixIndex] = {}
        self._news: list[News] = []
        self.counters = FeedCounters()

    # Questions.

    @property
    def blocks(self) -> int:
        """Blocks in all indexes; one held by n sources counts n times."""
        return sum(index.blocks for index in self._indexes.values())

    @property
    def used_bytes(self) -> int:
        """What the indexes, and the batches that wait, are estimated to use."""
        waiting = sum(track.buffered_blocks for track in self._tracks.values())
        return 8 * waiting + sum(index.used_bytes for index in self._indexes.values())

    def sources(self) -> list[Source]:
        """All sources known."""
        return list(self._tracks)

    def sources_of(self, worker_id: int) -> list[Source]:
        """The sources of one worker."""
        return [source for source in self._tracks if source.worker_id == worker_id]

    def __contains__(self, source: Source) -> bool:
        return source in self._tracks

    def partition(self, source: Source) -> Partition:
        """Where a known source's blocks are."""
        return self._tracks[source].partition

    def position(self, source: Source) -> SourceState:
        """The batch applied last of a known source; heard last, if it is load-only."""
        track = self._tracks[source]
        return SourceState(source, track.epoch, track.sequence, track.degraded)

    def positions(self) -> list[SourceState]:
        """The positions of all sources: what a subscriber resumes from, after `lose_all`."""
        return [self.position(source) for source in self._tracks]

    def status(self, source: Source) -> SourceStatus:
        """How far a known source can be trusted."""
        return self._tracks[source].state()

    def is_load_only(self, source: Source) -> bool:
        """Whether `make_load_only` is in force for a known source."""
        return self._tracks[source].load_only

    def withheld_blocks_of(self, source: Source) -> int:
        """Blocks a known source is estimated to hold that a load-only one does not claim here."""
        return self._tracks[source].withheld_blocks

    def heard_at(self, source: Source) -> float:
        """When a known source's publisher said something last."""
        return self._tracks[source].heard_at

    def counts(self, source: Source) -> bool:
        """Whether a known source matches."""
        return self._tracks[source].claims.shown

    def blocks_of(self, source: Source) -> int:
        """Blocks a known source claims, over all tier sets."""
        return self._tracks[source].claims.blocks

    def kept_blocks_of(self, source: Source) -> int:
        """Blocks that are kept of a known source: claimed, being gathered, or put off."""
        return self._tracks[source].kept_blocks

    def device_blocks_of(self, source: Source) -> int:
        """Blocks a known source claims on the device."""
        return self._tracks[source].claims.blocks_on(Tier.DEVICE)

    def claims(self, source: Source) -> tuple[PrefixIndex, Claims]:
        """What a known source claims, and the index to read it from (`PrefixIndex.chunks`)."""
        track = self._tracks[source]
        return track.index, track.claims

    def match(self, partition: Partition, hashes: Hashes) -> list[Matched]:
        """One row for each source that counts and holds the first block, deepest first."""
        index = self._indexes.get(partition)
        return [] if index is None else index.match(hashes)

    def take_news(self) -> list[News]:
        """What has happened since this was called last, in order."""
        news, self._news = self._news, []
        return news

    # What sources and those who know them say.

    def announce(self, partition: Partition, state: SourceState, now: float) -> None:
        """A publisher says where it stands, at the start of its stream."""
        track = self._opened(partition, state.source)
        self._drop_pending(track)
        known = state.epoch == track.epoch and state.sequence >= track.sequence
        if not known or track.load_only:
            self._start_over(track, state.epoch)
        track.head = state.sequence
        track.degraded = state.degraded
        track.stale_since = None
        track.heard_at = now
        self._settle(track, now)

    def heard(self, source: Source, now: float) -> None:
        """A publisher said something that changes nothing here; no matter if it is unknown."""
        track = self._tracks.get(source)
        if track is not None:
            track.heard_at = now

    def follow(
        self,
        partition: Partition | None,
        source: Source,
        status: SourceStatus,
        now: float,
        at: tuple[int, int] = (0, 0),
    ) -> None:
        """The index that this one copies says how far it trusts a source.

        at: (epoch, sequence) of what it has sent of it; who has less than that is gapped. Raises
        InvalidRequest when the source is new and its partition is missing.
        """
        if status.state == "gone":
            self.forget(source, status.reason)
            return
        if partition is None:
            partition = self._known(source).partition
        track = self._opened(partition, source)
        track.said = status
        if track.incoming is None and not track.buffer and not track.is_cut_short:
            # What an index lost meanwhile had been about to send, this one sends if it has it.
            track.head = track.sequence
        self._look_ahead(track, *at)
        if status.state == "stale":
            self._mark_stale(track, now, status.reason)
        else:
            track.stale_since = None
        self._settle(track, now)

    def set_degraded(self, source: Source, degraded: bool, now: float) -> None:
        """A publisher has lost events beyond repair, or has recovered from that."""
        track = self._known(source)
        track.degraded = degraded
        track.heard_at = now
        self._settle(track, now)

    def lose(self, source: Source, now: float, reason: str) -> None:
        """Nobody reports about the source any more; nothing happens if it is unknown."""
        track = self._tracks.get(source)
        if track is not None:
            self._drop_pending(track)
            track.is_cut_short = False
            self._mark_stale(track, now, reason)
            self._settle(track, now)

    def lose_all(self, now: float, reason: str) -> None:
        """The index that this one copies is lost; due before another subscription begins.

        What was under way is dropped, since `positions`, from which that resumes, leave it out.
        """
        for source in self._tracks:
            self.lose(source, now, reason)

    def make_load_only(self, source: Source, now: float) -> None:
        """Drops what a source claims, and takes no events of it until it is announced again."""
        track = self._known(source)
        # A snapshot being gathered replaces the claims; what is left of it will be counted.
        incoming = track.incoming
        track.withheld_blocks = track.kept_blocks if incoming is None else incoming.claims.blocks
        self._drop_pending(track)
        self._empty(track)
        track.load_only = True
        track.is_cut_short = False
        track.head = track.sequence
        self._news.append(Replaced(source))
        self._settle(track, now)

    def admit(self, source: Source, now: float) -> None:
        """Ends `make_load_only`: what the source holds is demanded."""
        track = self._known(source)
        head = track.sequence
        self._start_over(track, track.epoch)
        track.head = head
        self._settle(track, now)

    def forget(self, source: Source, reason: str) -> None:
        """The source is gone; O(1), what it held is swept later."""
        track = self._tracks.pop(source, None)
        if track is not None:
            self._drop_pending(track)
            track.index.retire(track.claims)
            self._news.append(Changed(source, track.partition, SourceStatus("gone", reason)))

    def tick(self, now: float) -> None:
        """Ends the grace of stale sources and repeats demands that brought nothing."""
        for track in self._tracks.values():
            quiet_since = max(track.progressed_at, track.demanded_at or 0.0)
            if track.demanded_at is not None and now - quiet_since >= self._retry_s:
                self._drop_pending(track)
                track.is_cut_short = True
            self._settle(track, now)

    def sweep(self, blocks: int) -> bool:
        """Does about `blocks` blocks' worth of put-off work; whether there is more to do."""
        for partition, index in tuple(self._indexes.items()):
            if index.needs_sweep:
                index.sweep(blocks)
                return True
            if not index.blocks and not any(t.index is index for t in self._tracks.values()):
                del self._indexes[partition]
        return False

    # Batches and snapshots.

    def apply(self, batch: EventBatch, now: float) -> Iterator[None]:
        """Takes a batch; raises InvalidRequest for a source that was not announced."""
        track = self._known(batch.source)
        track.heard_at = now
        if track.load_only:
            self._pass_over(track, batch)
            return
        if batch.epoch > track.epoch:
            self._begin_epoch(track, batch.epoch)
        covered = max(track.sequence, track.incoming.sequence if track.incoming else 0)
        if batch.epoch < track.epoch or batch.sequence <= covered:
            self.counters.duplicates += 1
            return
        if track.incoming is not None or batch.sequence > track.sequence + 1:
            track.head = max(track.head, batch.sequence)
            self._put_off(track, batch)
        else:
            track.progressed_at = now
            yield from self._apply_now(track, batch)
            yield from self._apply_put_off(track)
        self._settle(track, now)

    def load(self, chunk: SnapshotChunk, now: float) -> Iterator[None]:
        """Takes a part of a snapshot; raises InvalidRequest for a source not announced."""
        track = self._known(chunk.source)
        track.heard_at = now
        if track.load_only:
            self._pass_over_chunk(track, chunk)
            return
        if chunk.first:
            self._begin_snapshot(track, chunk)
        incoming = track.incoming
        at = (chunk.epoch, chunk.sequence)
        if incoming is None or (incoming.epoch, incoming.sequence) != at:
            # Of a snapshot that was given up, or that is older than what is here.
            self.counters.chunks_ignored += 1
            return
        track.progressed_at = now
        for start in range(0, len(chunk.hashes), STEP_BLOCKS):
            part = chunk.hashes[start : start + STEP_BLOCKS]
            track.index.store(incoming.claims, part, chunk.tier)
            yield
        if chunk.last:
            self._swap_in(track, incoming)
            yield from self._apply_put_off(track)
        self._settle(track, now)

    # Inside.

    def _known(self, source: Source) -> _Track:
        track = self._tracks.get(source)
        if track is None:
            raise InvalidRequest(
                f"rank {source.dp_rank} of worker {source.worker_id} was not announced",
                "dp_rank",
                reason="UNKNOWN_SOURCE",
            )
        return track

    def _opened(self, partition: Partition, source: Source) -> _Track:
        """The track of a source; a new one, if it is unknown or was in another partition."""
        track = self._tracks.get(source)
        if track is not None and track.partition == partition:
            return track
        self.forget(source, "it has moved to another partition")
        index = self._indexes.setdefault(partition, PrefixIndex())
        track = self._tracks[source] = _Track(source, partition, index, index.open(source))
        return track

    def _begin_epoch(self, track: _Track, epoch: int) -> None:
        self._drop_pending(track)
        self._empty(track)
        track.epoch, track.sequence, track.head = epoch, 0, 0
        track.is_cut_short = False

    def _start_over(self, track: _Track, epoch: int) -> None:
        self._begin_epoch(track, epoch)
        track.load_only = False
        track.withheld_blocks = 0
        self._news.append(Replaced(track.source))

    def _look_ahead(self, track: _Track, epoch: int, sequence: int) -> None:
        """There is that much of a source: until it is here, the source is gapped."""
        if epoch > track.epoch:
            self._begin_epoch(track, epoch)
        if epoch == track.epoch:
            track.head = max(track.head, sequence)

    def _pass_over(self, track: _Track, batch: EventBatch) -> None:
        """A batch of a load-only source: where it stands, and about how much it holds."""
        at = (batch.epoch, batch.sequence)
        if at <= (track.epoch, track.sequence):
            self.counters.duplicates += 1
            return
        if batch.epoch > track.epoch:
            track.withheld_blocks = 0
        for event in batch.events:
            match event.kind:
                case EventKind.STORED:
                    track.withheld_blocks += len(event.hashes)
                case EventKind.REMOVED:
                    track.withheld_blocks = max(0, track.withheld_blocks - len(event.hashes))
                case EventKind.CLEARED:
                    track.withheld_blocks = 0
                    track.degraded = False
        track.epoch, track.sequence = at
        track.head = track.sequence
        self.counters.batches += 1

    def _pass_over_chunk(self, track: _Track, chunk: SnapshotChunk) -> None:
        """A part of a snapshot of a load-only source, which live batches may have gone past."""
        if chunk.epoch < track.epoch:
            self.counters.chunks_ignored += 1
            return
        if chunk.first:
            track.withheld_blocks = 0
        track.withheld_blocks += len(chunk.hashes)
        if chunk.last:
            at, here = (chunk.epoch, chunk.sequence), (track.epoch, track.sequence)
            track.epoch, track.sequence = max(at, here)
            track.head = track.sequence

    def _empty(self, track: _Track) -> None:
        """A new empty set, shown as the old one was."""
        shown = track.claims.shown
        track.index.retire(track.claims)
        track.claims = track.index.open(track.source)
        track.index.show(track.claims, shown)

    def _drop_pending(self, track: _Track) -> None:
        if track.incoming is not None:
            track.index.retire(track.incoming.claims)
            track.incoming = None
        track.buffer.clear()
        track.buffered_blocks = 0
        track.demanded_at = None

    def _put_off(self, track: _Track, batch: EventBatch) -> None:
        if batch.sequence in track.buffer:
            self.counters.duplicates += 1
            return
        weight = _weight(batch)
        if track.buffered_blocks + weight > self._buffer_blocks_max:
            self.counters.overflows += 1
            self._drop_pending(track)
            track.is_cut_short = True
            return
        track.buffer[batch.sequence] = batch
        track.buffered_blocks += weight

    def _apply_put_off(self, track: _Track) -> Iterator[None]:
        while (batch := track.buffer.pop(track.sequence + 1, None)) is not None:
            track.buffered_blocks -= _weight(batch)
            yield from self._apply_now(track, batch)

    def _apply_now(self, track: _Track, batch: EventBatch) -> Iterator[None]:
        # The position moves at the end: a batch cut short is applied again, which does no harm.
        for event in batch.events:
            yield from self._apply_event(track, event.kind, event.hashes, event.tier)
        self._news.append(Applied(batch))
        track.sequence = batch.sequence
        track.head = max(track.head, batch.sequence)
        self.counters.batches += 1

    def _apply_event(
        self, track: _Track, kind: EventKind, hashes: Hashes, tier: Tier
    ) -> Iterator[None]:
        if kind is EventKind.CLEARED:
            self._empty(track)
            track.degraded = False
            return
        change = track.index.store if kind is EventKind.STORED else track.index.remove
        for start in range(0, len(hashes), STEP_BLOCKS):
            change(track.claims, hashes[start : start + STEP_BLOCKS], tier)
            yield

    def _begin_snapshot(self, track: _Track, chunk: SnapshotChunk) -> None:
        here = (track.epoch, track.sequence)
        if (chunk.epoch, chunk.sequence) < here:
            return
        if chunk.epoch > track.epoch:
            self._begin_epoch(track, chunk.epoch)
        if track.incoming is not None:
            track.index.retire(track.incoming.claims)
        track.incoming = _Incoming(chunk.epoch, chunk.sequence, track.index.open(track.source))
        track.head = max(track.head, chunk.sequence)
        for sequence in [s for s in track.buffer if s <= chunk.sequence]:
            track.buffered_blocks -= _weight(track.buffer.pop(sequence))

    def _swap_in(self, track: _Track, incoming: _Incoming) -> None:
        track.index.retire(track.claims)
        track.claims, track.incoming = incoming.claims, None
        track.sequence = incoming.sequence
        track.is_cut_short = False
        self.counters.snapshots += 1
        self._news.append(Replaced(track.source))

    def _mark_stale(self, track: _Track, now: float, reason: str) -> None:
        track.stale_reason = reason
        if track.stale_since is None:
            track.stale_since = now

    def _settle(self, track: _Track, now: float) -> None:
        """Shows or hides the claims, tells of a new status, demands what is missing."""
        status = track.state()
        in_grace = track.stale_since is None or now - track.stale_since < self._stale_s
        counts = status.state != "gapped" and in_grace
        if counts != track.claims.shown:
            track.index.show(track.claims, counts)
        if status != track.status:
            self.counters.gaps += status.state == "gapped"
            track.status = status
            self._news.append(Changed(track.source, track.partition, status))
        if not track.is_gapped:
            track.demanded_at = None
        elif track.stale_since is None and track.incoming is None and track.demanded_at is None:
            track.demanded_at = now
            self._news.append(Demand(track.source, track.epoch, track.sequence + 1))


def _weight(batch: EventBatch) -> int:
    return _BATCH_BLOCKS + sum(len(event.hashes) for event in batch.events)


def exhaust(steps: Iterable[None]) -> None:
    """Runs `apply` or `load` to its end at once."""
    for _ in steps:
        pass
