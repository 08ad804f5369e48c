"""The last batches of a source."""

from __future__ import annotations

import numpy as np

from common.kv.events import EventBatch, EventKind, KvEvent, Source
from indexer_svc.core.history import BATCHES_MAX, BLOCKS_MAX, BatchHistory


def batch(sequence: int, *, epoch: int = 1, blocks: int = 1) -> EventBatch:
    event = KvEvent(EventKind.STORED, np.arange(blocks, dtype=np.uint64))
    return EventBatch(Source(1), epoch, sequence, [event])


def batches_since(history: BatchHistory, epoch: int, sequence: int) -> list[int] | None:
    batches = history.batches_since(epoch, sequence)
    return None if batches is None else [one.sequence for one in batches]


def test_it_gives_what_came_after_a_batch_it_has() -> None:
    history = BatchHistory()
    for sequence in (5, 6, 7):
        history.add(batch(sequence))
    assert batches_since(history, 1, 4) == [5, 6, 7]
    assert batches_since(history, 1, 6) == [7]
    assert batches_since(history, 1, 7) == []


def test_it_has_nothing_for_who_is_further_behind_or_in_another_epoch() -> None:
    history = BatchHistory()
    assert batches_since(history, 1, 0) is None
    history.add(batch(5))
    assert batches_since(history, 1, 3) is None
    assert batches_since(history, 2, 5) is None


def test_a_batch_that_does_not_follow_begins_it_anew() -> None:
    history = BatchHistory()
    history.add(batch(5))
    history.add(batch(1, epoch=2))
    assert batches_since(history, 1, 4) is None
    assert batches_since(history, 2, 0) == [1]
    history.add(batch(9, epoch=2))
    assert batches_since(history, 2, 0) is None


def test_it_keeps_within_its_bounds() -> None:
    history = BatchHistory()
    for sequence in range(1, BATCHES_MAX + 2):
        history.add(batch(sequence, blocks=0))
    assert batches_since(history, 1, 0) is None
    assert len(batches_since(history, 1, 1) or []) == BATCHES_MAX
    history.add(batch(BATCHES_MAX + 2, blocks=BLOCKS_MAX))
    assert batches_since(history, 1, BATCHES_MAX) == [BATCHES_MAX + 1, BATCHES_MAX + 2]
    history.add(batch(BATCHES_MAX + 3, blocks=BLOCKS_MAX + 1))
    assert history.batches_since(1, BATCHES_MAX + 2) is None, "one batch may be too much alone"
