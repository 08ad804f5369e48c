"""Latest batches of a source, so that subscribers a little behind need no snapshot. Pure."""

from __future__ import annotations

from collections import deque

from common.kv.events import EventBatch

BATCHES_MAX = 1024
BLOCKS_MAX = 16_384
# Measured: a batch without events, and an event without hashes.
_BATCH_BYTES = 250
_EVENT_BYTES = 200


class BatchHistory:
    """The latest contiguous batches of one epoch, within both limits."""

    def __init__(self) -> None:
        self._batches: deque[EventBatch] = deque()
        self._blocks = 0
        self._events = 0

    @property
    def used_bytes(self) -> int:
        """Estimated memory of the batches."""
        return _BATCH_BYTES * len(self._batches) + _EVENT_BYTES * self._events + 8 * self._blocks

    def add(self, batch: EventBatch) -> None:
        if self._batches:
            last = self._batches[-1]
            if (batch.epoch, batch.sequence) != (last.epoch, last.sequence + 1):
                self.clear()
        self._batches.append(batch)
        self._blocks += _blocks_of(batch)
        self._events += len(batch.events)
        while len(self._batches) > BATCHES_MAX or self._blocks > BLOCKS_MAX:
            oldest = self._batches.popleft()
            self._blocks -= _blocks_of(oldest)
            self._events -= len(oldest.events)

    def clear(self) -> None:
        """Removes all batches, because the set changed by other means."""
        self._batches.clear()
        self._blocks = self._events = 0

    def batches_since(self, epoch: int, sequence: int) -> list[EventBatch] | None:
        """Returns all batches after that position; None if some are missing."""
        batches = self._batches
        if not batches or batches[0].epoch != epoch or batches[0].sequence > sequence + 1:
            return None
        return [batch for batch in batches if batch.sequence > sequence]


def _blocks_of(batch: EventBatch) -> int:
    return sum(len(event.hashes) for event in batch.events)
