"""Numbers the changes of a source's published sets, and keeps batches for gap repair. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from common.kv.events import (
    SNAPSHOT_CHUNK_BLOCKS,
    EventBatch,
    EventKind,
    Hashes,
    KvEvent,
    SnapshotChunk,
    Source,
    SourcePosition,
    Tier,
)
from worker_svc.kv_events.external_events import ExternalEvent, PagesCleared
from worker_svc.kv_events.normalizer import Normalizer

# Batches that an event log keeps for gap repair.
RING_BATCHES = 1024


class EventLog:
    """The published sets of one source, and the numbered batches that produced them.

    Invariants: sequences are contiguous within an epoch, from 1. The ring holds the last
    RING_BATCHES batches, each of at most SNAPSHOT_CHUNK_BLOCKS hashes. The sets are the sum of all
    batches of the epoch. Every epoch but the first begins with an empty batch, so that all
    receivers drop the previous epoch.
    """

    def __init__(self, source: Source, *, tiers: int = 1) -> None:
        self.source = source
        self.epoch = 1
        self.sequence = 0
        self.is_degraded = False
        self._ring: deque[EventBatch] = deque(maxlen=RING_BATCHES)
        # Dicts keep the order: parents before children.
        self._sets: list[dict[int, None]] = [{} for _ in range(tiers)]

    @property
    def state(self) -> SourcePosition:
        return SourcePosition(self.source, self.epoch, self.sequence, self.is_degraded)

    def append(self, events: Iterable[KvEvent]) -> list[EventBatch]:
        """Appends the events as one batch, or as several above SNAPSHOT_CHUNK_BLOCKS hashes."""
        groups: list[list[KvEvent]] = []
        size = 0
        for event in _split_large_events(events):
            size += len(event.hashes)
            if not groups or size > SNAPSHOT_CHUNK_BLOCKS:
                groups.append([])
                size = len(event.hashes)
            groups[-1].append(event)
        return [self._append_batch(group) for group in groups]

    def _append_batch(self, events: Sequence[KvEvent]) -> EventBatch:
        for event in events:
            self._update_sets(event)
        self.sequence += 1
        batch = EventBatch(self.source, self.epoch, self.sequence, tuple(events))
        self._ring.append(batch)
        return batch

    def _update_sets(self, event: KvEvent) -> None:
        if event.kind is EventKind.CLEARED:
            for held in self._sets:
                held.clear()
            return
        hashes = event.hashes.tolist()
        held = self._sets[event.tier]
        if event.kind is EventKind.STORED:
            held.update(dict.fromkeys(hashes))
        else:
            for name in hashes:
                del held[name]

    def begin_epoch(self, *, is_degraded: bool) -> EventBatch:
        """Starts an epoch with empty sets. is_degraded: after a loss, not a cache reset."""
        self.epoch += 1
        self.sequence = 0
        self.is_degraded = is_degraded
        self._ring.clear()
        for held in self._sets:
            held.clear()
        return self._append_batch(())

    def batch(self, sequence: int) -> EventBatch | None:
        """Returns the batch of this epoch with that sequence; None if it is not in the ring."""
        index = sequence - (self._ring[0].sequence if self._ring else self.sequence + 1)
        return self._ring[index] if 0 <= index < len(self._ring) else None

    def has_batches_from(self, sequence: int) -> bool:
        """Returns whether the ring has all batches from that sequence on; true for the next one."""
        return sequence == self.sequence + 1 or self.batch(sequence) is not None

    def snapshot(self) -> list[SnapshotChunk]:
        """Returns a copy of the sets by tier, parents first; one empty chunk if they are empty."""
        parts: list[tuple[Hashes, Tier]] = []
        for tier, held in enumerate(self._sets):
            hashes = np.fromiter(held, dtype=np.uint64, count=len(held))
            parts += [(piece, Tier(tier)) for piece in _chunked(hashes)]
        parts = parts or [(np.empty(0, dtype=np.uint64), Tier.DEVICE)]
        last = len(parts) - 1
        return [
            SnapshotChunk(
                self.source, self.epoch, self.sequence, piece, tier, index == 0, index == last
            )
            for index, (piece, tier) in enumerate(parts)
        ]


def _chunked(hashes: Hashes) -> Iterator[Hashes]:
    for start in range(0, len(hashes), SNAPSHOT_CHUNK_BLOCKS):
        yield hashes[start : start + SNAPSHOT_CHUNK_BLOCKS]


def _split_large_events(events: Iterable[KvEvent]) -> Iterator[KvEvent]:
    """Yields the events, splitting those with too many hashes for a batch."""
    for event in events:
        if len(event.hashes) <= SNAPSHOT_CHUNK_BLOCKS:
            yield event
        else:
            yield from (KvEvent(event.kind, part, event.tier) for part in _chunked(event.hashes))


class PublishedSource:
    """A source at its worker: engine events in, batches out.

    `event_log` reflects the last `seal_changes`.
    """

    def __init__(self, source: Source, normalizer: Normalizer) -> None:
        self.normalizer = normalizer
        self.event_log = EventLog(source, tiers=normalizer.event_format.tiers)

    def apply(self, event: ExternalEvent) -> None:
        """Applies one event. A clear after a loss starts a new epoch, which is not degraded."""
        has_lost = self.event_log.is_degraded or self.normalizer.is_incomplete
        if has_lost and isinstance(event, PagesCleared):
            self.reset()
        else:
            self.normalizer.apply(event)

    def seal_changes(self) -> list[EventBatch]:
        """Appends the changes since the last call to the log and returns their batches."""
        if self.normalizer.is_incomplete:
            self.event_log.is_degraded = True
        return self.event_log.append(self.normalizer.take())

    def reset(self) -> None:
        """Starts a new epoch: the engine's cache or its event numbering was reset."""
        self._begin_epoch(is_degraded=False)

    def record_loss(self) -> None:
        """Starts a new epoch with empty sets, degraded until the engine's cache is cleared."""
        self._begin_epoch(is_degraded=True)

    def _begin_epoch(self, *, is_degraded: bool) -> None:
        self.normalizer.discard_all()
        self.normalizer.take()
        self.event_log.begin_epoch(is_degraded=is_degraded)
