"""What one subscriber has, is owed and has waiting: a replica of the index (pure).

For each source the subscriber knows, `_known` is where its copy will stand once all that waits has
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
    NO_HASHES,
    EventBatch,
    Hashes,
    Partition,
    SnapshotChunk,
    Source,
    SourceState,
    SourceStatus,
    Tier,
)
from common.kv.index_feed import IndexFeed
from common.kv.load import Load
from indexer_svc.core.history import History

SNAPSHOTS_MAX = 2
FRAME_BYTES = 256 * 1024
ITEM_BYTES = 64
UNSENT = SourceStatus("gapped", "a snapshot is on its way")
UNWANTED = SourceStatus("gapped", "the subscriber asked for loads only")
WITHDRAWN = SourceStatus("gone", "its claims were dropped here")
NOT_KNOWN_YET = SourceStatus("stale", "its publisher has not come to this index yet")
ABSENT = SourceStatus("gone", "its worker is not in discovery")


@dataclass(frozen=True, slots=True)
class StatusTold:
    """How far a source can be trusted; the first thing said about it.

    at: (epoch, sequence) of what the subscriber has of it then; zeros: not said.
    """

    source: Source
    partition: Partition | None
    status: SourceStatus
    at: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class LoadTold:
    """A source's load."""

    source: Source
    load: Load


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All that was there at the beginning has been told."""


Told: TypeAlias = StatusTold | LoadTold | CaughtUp | EventBatch | SnapshotChunk


@dataclass(slots=True, eq=False)
class _Reading:
    """A snapshot being sent."""

    source: Source
    chunks: Iterator[SnapshotChunk]


class Subscriber:
    """One subscription. `is_cut`: more than `cap_bytes` waited; it has to resume.

    resume: what the subscriber has. partition: None for all. is_absent: whether a worker is not in
    discovery. loads_only: it wants no claims, so none are kept for it.
    """

    def __init__(
        self,
        feed: IndexFeed,
        histories: Mapping[Source, History],
        resume: Iterable[SourceState],
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
        self._known: dict[Source, tuple[int, int] | None] = {
            state.source: (state.epoch, state.sequence) for state in resume
        }
        self._waiting: deque[Told] = deque()
        self._waiting_bytes = 0
        self._loads: dict[Source, Load] = {}
        self._wanted: dict[Source, None] = {}
        self._readings: deque[_Reading] = deque()
        # Of which nothing was said yet; the next one last, since a dict loses its first slowly.
        self._unsaid = dict.fromkeys(reversed([*self._known, *feed.sources()]))
        self._is_caught_up = False
        self.is_cut = False

    @property
    def has_more(self) -> bool:
        """Whether `take` would return something."""
        return bool(self._waiting or self._loads) or self._is_behind or not self._is_caught_up

    # News.

    def batch(self, batch: EventBatch) -> None:
        """A batch was applied to the index."""
        source = batch.source
        at = (batch.epoch, batch.sequence)
        known = self._known.get(source)
        # Before the first word the copy may stand in another partition: the history brings it.
        if known is None or self._loads_only or source in self._unsaid:
            return
        begins_epoch = batch.sequence == 1 and batch.epoch > known[0]
        if begins_epoch or at == (known[0], known[1] + 1):
            self._known[source] = at
            self._put(batch)

    def replaced(self, source: Source) -> None:
        """A source's set has changed otherwise than by batches."""
        if source in self._known:
            self._known[source] = None
        self._stop_reading(source)
        if source in self._feed:
            self.reconcile(source)

    def changed(self, source: Source, partition: Partition, status: SourceStatus) -> None:
        """How far a source can be trusted has changed."""
        if source in self._feed:
            self.reconcile(source)
            return
        self._unsaid.pop(source, None)
        if self._wants(partition):
            self._stop_reading(source)
            self._known.pop(source, None)
            self._loads.pop(source, None)
            self._put(StatusTold(source, partition, status))

    def load(self, source: Source, partition: Partition, load: Load) -> None:
        """A source's load; one that still waits is overtaken."""
        if self._wants(partition):
            self._loads[source] = load

    def reconcile(self, source: Source) -> None:
        """Sees to it that the subscriber gets what it lacks of a source, and its status."""
        self._unsaid.pop(source, None)
        partition, status = self._feed.partition(source), self._feed.status(source)
        if not self._wants(partition):
            return
        if self._loads_only:
            is_there = status.state in ("exact", "degraded")
            self._put(StatusTold(source, partition, UNWANTED if is_there else status))
        elif self._feed.is_load_only(source):
            self._withdraw(source)
            self._put(StatusTold(source, partition, status))
        elif status.state == "gapped":
            self._stop_reading(source)
            self._put(StatusTold(source, partition, status))
        elif source in self._wanted or any(r.source == source for r in self._readings):
            return  # Its status follows its snapshot.
        elif self._bring_up_to_date(source):
            self._put(self._told_with_position(source))
        else:
            self._wanted[source] = None
            self._put(StatusTold(source, partition, UNSENT))

    # What to send.

    def take(self, size: int = FRAME_BYTES) -> list[Told]:
        """What to send next, in order: about `size` bytes of what waits, then a snapshot's part.

        Must not run amid the application of a batch.
        """
        told: list[Told] = []
        while (self._waiting or self._unsaid) and size > 0:
            if not self._waiting:
                self._say(self._unsaid.popitem()[0])
                continue
            item = self._waiting.popleft()
            weight = _weight(item)
            self._waiting_bytes -= weight
            size -= weight
            told.append(item)
        told += [LoadTold(source, load) for source, load in self._loads.items()]
        self._loads.clear()
        if not (self._waiting or self._unsaid):
            self._take_part(told)
        if not (self._is_caught_up or self._waiting or self._is_behind):
            self._is_caught_up = True
            told.append(CaughtUp())
        return told

    # Inside.

    @property
    def _is_behind(self) -> bool:
        """Whether there is more to find out than what waits."""
        return bool(self._unsaid or self._wanted or self._readings)

    def _say(self, source: Source) -> None:
        """The first word about a source that the subscriber has, or the index, or both."""
        if source in self._feed:
            self.reconcile(source)
            return
        # After a restart of this index, workers are on their way to it.
        is_absent = self._is_absent(source.worker_id)
        if is_absent:
            del self._known[source]
        self._put(StatusTold(source, None, ABSENT if is_absent else NOT_KNOWN_YET))

    def _wants(self, partition: Partition) -> bool:
        return self._partition is None or partition == self._partition

    def _put(self, item: Told) -> None:
        if self.is_cut:
            return
        self._waiting.append(item)
        self._waiting_bytes += _weight(item)
        if self._waiting_bytes > self._cap_bytes:
            self.is_cut = True
            self._waiting.clear()

    def _told_with_position(self, source: Source) -> StatusTold:
        at = self._known.get(source) or (0, 0)
        return StatusTold(source, self._feed.partition(source), self._feed.status(source), at)

    def _withdraw(self, source: Source) -> None:
        """Lets the subscriber forget what it has of a source."""
        self._stop_reading(source)
        if source in self._known:
            del self._known[source]
            self._put(StatusTold(source, None, WITHDRAWN))

    def _bring_up_to_date(self, source: Source) -> bool:
        """Without a snapshot; whether that was possible."""
        at = self._feed.position(source)
        here = (at.epoch, at.sequence)
        known = self._known.get(source)
        if known is not None and known >= here:
            return True
        if at.sequence == 0 and source not in self._known:
            self._known[source] = here
            return True
        if known is None or source not in self._histories:
            return False
        missed = self._histories[source].since(*known)
        if missed is None or known[0] != at.epoch:
            return False
        # What does not fit would be cut now and whenever it resumes; a snapshot is read as it goes.
        # Half is for statuses and what comes meanwhile.
        if self._waiting_bytes + sum(map(_weight, missed)) > self._cap_bytes // 2:
            return False
        for batch in missed:
            self.batch(batch)
        return self._known[source] == here

    def _take_part(self, told: list[Told]) -> None:
        if self._wanted and len(self._readings) < SNAPSHOTS_MAX:
            source = next(iter(self._wanted))
            del self._wanted[source]
            # Its first part goes out at once: no batch may go ahead of that, or it is a gap.
            self._readings.appendleft(self._begin(source))
        if not self._readings:
            return
        reading = self._readings.popleft()
        # Cleared meanwhile, it ends early, and the batch that cleared it has gone ahead.
        chunk = next(reading.chunks)
        told.append(chunk)
        if not chunk.last:
            self._readings.append(reading)
            return
        told.append(self._told_with_position(reading.source))

    def _begin(self, source: Source) -> _Reading:
        at = self._feed.position(source)
        self._known[source] = (at.epoch, at.sequence)
        index, claims = self._feed.claims(source)
        return _Reading(source, snapshot_of(at, index.chunks(claims)))

    def _stop_reading(self, source: Source) -> None:
        self._wanted.pop(source, None)
        for reading in [r for r in self._readings if r.source == source]:
            self._readings.remove(reading)
            # Its copy is neither the old nor the new.
            self._known[source] = None


def snapshot_of(at: SourceState, parts: Iterator[tuple[Tier, Hashes]]) -> Iterator[SnapshotChunk]:
    """The parts as chunks, marked first and last; one empty chunk when there are none."""
    tier, hashes = next(parts, (Tier.DEVICE, NO_HASHES))
    is_first = True
    for following in parts:
        yield SnapshotChunk(at.source, at.epoch, at.sequence, hashes, tier, first=is_first)
        is_first = False
        tier, hashes = following
    yield SnapshotChunk(at.source, at.epoch, at.sequence, hashes, tier, first=is_first, last=True)


def _weight(item: Told) -> int:
    if isinstance(item, EventBatch):
        return ITEM_BYTES + sum(8 * len(event.hashes) + 16 for event in item.events)
    return ITEM_BYTES
