"""Entries of recorded KV events, and their effect on a replica. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from common.kv.events import EventBatch, SnapshotChunk, Source, SourcePosition
from common.kv.index_feed import IndexFeed
from indexer_svc.core.subscriber import StatusUpdate


@dataclass(frozen=True, slots=True)
class IndexLost:
    """Entry: the recorder lost the index and the unfinished snapshots; missed entries follow."""


@dataclass(frozen=True, slots=True)
class RecordingEnd:
    """Entry: the recording ended in order."""


RecordingEntry: TypeAlias = StatusUpdate | EventBatch | SnapshotChunk | IndexLost | RecordingEnd


def play(feed: IndexFeed, entry: RecordingEntry, now: float) -> Iterator[None]:
    """Applies an entry to a replica; steps as in `IndexFeed.apply`. Raises InvalidRequest."""
    match entry:
        case StatusUpdate(source, partition, status, at):
            feed.apply_status(partition, source, status, now, at)
        case EventBatch():
            yield from feed.apply(entry, now)
        case SnapshotChunk():
            yield from feed.load(entry, now)
        case IndexLost():
            feed.mark_all_disconnected(now, "the recorder lost its index")
        case RecordingEnd():
            pass


class SourcePositions:
    """Positions of a replica of the recording, to resume from. A snapshot counts from its last
    chunk, with the batches received since its first.
    """

    def __init__(self) -> None:
        self._positions: dict[Source, tuple[int, int]] = {}
        self._loading: dict[Source, tuple[int, int]] = {}

    def states(self) -> list[SourcePosition]:
        """Returns the position of each known source; call after `IndexLost` was taken."""
        return [SourcePosition(source, *at) for source, at in self._positions.items()]

    def is_loading(self, worker_id: int) -> bool:
        """Returns whether a snapshot of one of the worker's sources is incomplete."""
        return any(source.worker_id == worker_id for source in self._loading)

    def take(self, entry: RecordingEntry) -> None:
        """Moves the positions past an entry."""
        match entry:
            case StatusUpdate(source, _, status):
                if status.state == "gone":
                    self._positions.pop(source, None)
                    self._loading.pop(source, None)
            case EventBatch(source, epoch, sequence):
                if epoch > self._loading.get(source, self._positions.get(source, (0, 0)))[0]:
                    self._loading.pop(source, None)
                at = self._loading if source in self._loading else self._positions
                at[source] = (epoch, sequence)
            case SnapshotChunk(source):
                if entry.first:
                    self._loading[source] = (entry.epoch, entry.sequence)
                if entry.last and source in self._loading:
                    self._positions[source] = self._loading.pop(source)
            case IndexLost():
                self._loading.clear()
            case RecordingEnd():
                pass
