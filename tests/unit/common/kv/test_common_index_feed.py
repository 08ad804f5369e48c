"""The feed of an index against a naive model of a publisher and a faulty network."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import InvalidRequest
from common.kv.events import (
    EventBatch,
    EventKind,
    KvEvent,
    Partition,
    SnapshotChunk,
    Source,
    SourcePosition,
    SourceStatus,
)
from common.kv.index_feed import (
    RETRY_S,
    STALE_GRACE_S,
    BatchApplied,
    IndexFeed,
    ResendRequest,
    SourceReplaced,
    StatusChanged,
    run_all_steps,
)
from common.kv.source_entry import LOAD_ONLY
from tests.kit.kv_events import advertised_blocks, array, path, removed, stored

PARTITION = Partition("m", 16, 1)
SOURCE = Source(7, 0)
EPOCH = 3
LEAVES = 64


def batch(
    sequence: int, *events: KvEvent, epoch: int = EPOCH, source: Source = SOURCE
) -> EventBatch:
    return EventBatch(source, epoch, sequence, events)


def chunk(
    sequence: int, *keys: int, epoch: int = EPOCH, first: bool = False, last: bool = False
) -> SnapshotChunk:
    return SnapshotChunk(SOURCE, epoch, sequence, array(keys), first=first, last=last)


def depth(feed: IndexFeed, *chain: int) -> int:
    rows = feed.match(PARTITION, array(chain))
    return rows[0].device_blocks if rows else 0


def registered_feed(sequence: int = 0, *, epoch: int = EPOCH, **settings: float) -> IndexFeed:
    feed = IndexFeed(**settings)  # type: ignore[arg-type]
    feed.register_source(PARTITION, SourcePosition(SOURCE, epoch, sequence), 0.0)
    return feed


def give(feed: IndexFeed, *items: EventBatch | SnapshotChunk, now: float = 0.0) -> None:
    for item in items:
        run_all_steps(
            feed.apply(item, now) if isinstance(item, EventBatch) else feed.load(item, now)
        )


def demands(feed: IndexFeed) -> list[tuple[int, int]]:
    """Return (epoch, from_sequence) of the resend requests since the last call."""
    return [(n.epoch, n.from_sequence) for n in feed.take_events() if isinstance(n, ResendRequest)]


# Order.


@pytest.mark.row("S1-28")
def test_a_new_source_is_exact_with_its_first_batch_and_its_blocks_match() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(1, 2, 4)))
    assert feed.status(SOURCE) == SourceStatus("exact")
    assert depth(feed, 1, 2, 4, 8) == 3
    assert feed.position(SOURCE) == SourcePosition(SOURCE, EPOCH, 1)
    assert demands(feed) == []


def test_a_duplicate_changes_nothing() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(1)), batch(2, removed(1)), batch(1, stored(1)))
    assert advertised_blocks(feed, SOURCE) == set()
    assert feed.position(SOURCE).sequence == 2
    assert feed.counters.duplicates == 1


def test_a_gap_hides_the_source_and_requests_the_missing_batches() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(1)), batch(3, stored(4)))
    assert feed.status(SOURCE).state == "gapped"
    assert depth(feed, 1) == 0
    assert demands(feed) == [(EPOCH, 2)]
    give(feed, batch(2, stored(2)))
    assert feed.status(SOURCE).state == "exact"
    assert depth(feed, 1, 2, 4) == 3


def test_a_resend_is_requested_again_only_without_progress() -> None:
    feed = registered_feed()
    give(feed, batch(2), batch(3), batch(4))
    assert demands(feed) == [(EPOCH, 1)]
    feed.tick(RETRY_S / 2)
    give(feed, batch(5), now=RETRY_S / 2)
    feed.tick(RETRY_S * 0.9)
    assert demands(feed) == []
    feed.tick(RETRY_S)
    assert demands(feed) == [(EPOCH, 1)]


def test_an_unknown_publisher_must_resend_from_its_first_batch() -> None:
    feed = registered_feed(40)
    assert demands(feed) == [(EPOCH, 1)]
    assert feed.status(SOURCE).state == "gapped"


def test_a_returning_publisher_resends_only_the_missed_batches() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(1)))
    feed.mark_disconnected(SOURCE, 1.0, "stream ended")
    feed.register_source(PARTITION, SourcePosition(SOURCE, EPOCH, 3), 2.0)
    assert demands(feed) == [(EPOCH, 2)]
    give(feed, batch(2, stored(2)), batch(3, stored(4)))
    assert advertised_blocks(feed, SOURCE) == {1, 2, 4}
    assert feed.status(SOURCE).state == "exact"


def test_a_publisher_with_an_earlier_position_is_read_again() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(1)), batch(2, stored(2)))
    feed.register_source(PARTITION, SourcePosition(SOURCE, EPOCH, 1), 0.0)
    assert advertised_blocks(feed, SOURCE) == set()
    assert demands(feed) == [(EPOCH, 1)]


def test_clearing_is_a_barrier_inside_a_batch() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(1, 2), KvEvent(EventKind.CLEARED), stored(1)))
    assert advertised_blocks(feed, SOURCE) == {1}
    assert depth(feed, 1, 2) == 1


def test_an_absent_block_does_not_stop_the_rest_of_a_removal() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(1, 2, 3)), batch(2, removed(9, 3, 2)))
    assert advertised_blocks(feed, SOURCE) == {1}


@pytest.mark.row("S1-28")
def test_an_unregistered_source_is_rejected_by_name() -> None:
    feed = registered_feed()
    with pytest.raises(InvalidRequest) as refused:
        give(feed, batch(1, source=Source(7, 5)))
    assert refused.value.field == "dp_rank"
    with pytest.raises(InvalidRequest):
        feed.apply_status(None, Source(9), SourceStatus("exact"), 0.0)


# Snapshots.


def test_a_snapshot_is_installed_at_once_and_buffered_batches_are_applied() -> None:
    feed = registered_feed(10)
    give(feed, chunk(10, 1, 2, first=True), batch(11, stored(5)), batch(12, removed(4)))
    assert advertised_blocks(feed, SOURCE) == set()
    assert depth(feed, 1) == 0
    give(feed, chunk(10, 4, last=True))
    assert advertised_blocks(feed, SOURCE) == {1, 2, 5}
    assert feed.position(SOURCE).sequence == 12
    assert feed.status(SOURCE).state == "exact"
    kinds = [type(n) for n in feed.take_events() if isinstance(n, BatchApplied | SourceReplaced)]
    assert kinds == [SourceReplaced, SourceReplaced, BatchApplied, BatchApplied]


def test_a_snapshot_read_while_its_source_changes_ends_correct() -> None:
    """Blocks 1, 2, 4 at sequence 10; then 4 is removed, 5 and 3 stored, while chunks are read."""
    feed = registered_feed(10)
    give(feed, chunk(10, 1, first=True))
    give(feed, batch(11, removed(4)), batch(12, stored(5)), batch(13, stored(3)))
    give(feed, chunk(10, 2, 5, last=True))  # 4 is missing, 5 is early, 3 is late
    assert advertised_blocks(feed, SOURCE) == {1, 2, 5, 3}


def test_the_old_set_matches_until_an_unrequested_snapshot_is_complete() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(1)), chunk(1, 1, first=True))
    assert depth(feed, 1) == 1
    give(feed, chunk(1, 2, last=True))
    assert depth(feed, 1, 2) == 2


def test_a_snapshot_older_than_the_set_is_ignored() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(1)), batch(2, stored(2)))
    give(feed, chunk(1, 1, first=True, last=True))
    assert advertised_blocks(feed, SOURCE) == {1, 2}


def test_a_restarted_snapshot_discards_its_first_chunks() -> None:
    feed = registered_feed(5)
    give(feed, chunk(5, 1, 2, first=True), chunk(6, 1, 3, first=True), chunk(5, 9, last=True))
    give(feed, chunk(6, 7, last=True))
    assert advertised_blocks(feed, SOURCE) == {1, 3, 7}


def test_an_empty_snapshot_installs_an_empty_set() -> None:
    feed = registered_feed(5)
    give(feed, chunk(5, first=True, last=True))
    assert feed.status(SOURCE).state == "exact"


def test_a_buffer_over_its_limit_is_dropped_and_a_resend_requested() -> None:
    feed = registered_feed(buffer_blocks_max=180)
    give(feed, batch(2, stored(*range(50))))
    assert demands(feed) == [(EPOCH, 1)]
    give(feed, batch(3, stored(*range(50, 100))))
    assert feed.counters.overflows == 1
    assert demands(feed) == [(EPOCH, 1)]
    give(feed, chunk(3, 1, first=True, last=True))
    assert feed.status(SOURCE).state == "exact"


def test_a_buffer_overflow_drops_the_pending_snapshot() -> None:
    feed = registered_feed(1, buffer_blocks_max=100)
    assert demands(feed) == [(EPOCH, 1)]
    give(feed, chunk(1, 1, first=True), batch(2, stored(*range(100))), chunk(1, 2, last=True))
    assert demands(feed) == [(EPOCH, 1)]
    assert advertised_blocks(feed, SOURCE) == set()


# Status.


def test_a_lost_source_matches_for_ten_more_seconds() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(1)))
    feed.mark_disconnected(SOURCE, 100.0, "its stream ended")
    assert feed.status(SOURCE) == SourceStatus("stale", "its stream ended")
    feed.tick(100.0 + STALE_GRACE_S - 0.1)
    assert depth(feed, 1) == 1
    feed.tick(100.0 + STALE_GRACE_S)
    assert depth(feed, 1) == 0
    feed.register_source(PARTITION, SourcePosition(SOURCE, EPOCH, 1), 200.0)
    assert depth(feed, 1) == 1


def test_a_second_loss_does_not_extend_the_grace_period() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(1)))
    feed.mark_disconnected(SOURCE, 100.0, "its stream ended")
    feed.mark_disconnected(SOURCE, 105.0, "the indexer is gone")
    feed.tick(100.0 + STALE_GRACE_S)
    assert not feed.is_matchable(SOURCE)


def test_a_gapped_stale_source_does_not_match_and_requests_nothing() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(1)), batch(3))
    feed.take_events()
    feed.mark_disconnected(SOURCE, 0.0, "its stream ended")
    feed.tick(10 * RETRY_S)
    assert depth(feed, 1) == 0
    assert demands(feed) == []


def test_a_degraded_source_matches_until_its_cache_is_cleared() -> None:
    feed = registered_feed()
    feed.set_degraded(SOURCE, True, 0.0)
    give(feed, batch(1, stored(1)))
    assert feed.status(SOURCE).state == "degraded"
    assert depth(feed, 1) == 1
    give(feed, batch(2, KvEvent(EventKind.CLEARED)))
    assert feed.status(SOURCE).state == "exact"


def test_a_removed_source_matches_nothing_and_is_swept() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(*range(1, 3000))))
    feed.forget(SOURCE, "its worker left")
    assert depth(feed, 1) == 0
    assert SOURCE not in feed
    assert feed.blocks == 0
    assert feed.used_bytes > 0, "the rest is freed off the request path"
    while feed.sweep(500):
        pass
    assert feed.used_bytes == 0
    assert feed.take_events()[-1] == StatusChanged(
        SOURCE, PARTITION, SourceStatus("gone", "its worker left")
    )


def test_a_load_only_source_advertises_and_requests_nothing_until_readmitted() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(1)))
    feed.make_load_only(SOURCE, 0.0)
    feed.take_events()
    give(feed, batch(2, stored(2)), chunk(2, 1, 2, first=True, last=True))
    assert advertised_blocks(feed, SOURCE) == set()
    assert feed.status(SOURCE) == LOAD_ONLY
    assert feed.position(SOURCE).sequence == 2
    assert feed.take_events() == [], "no advertised blocks, so none to copy"
    feed.end_load_only(SOURCE, 0.0)
    assert demands(feed) == [(EPOCH, 1)]
    give(feed, chunk(2, 1, 2, first=True, last=True))
    assert depth(feed, 1, 2) == 2


def test_a_load_only_source_accepts_any_newer_position_without_requests() -> None:
    """Regression: behind the ring of its publisher it requested useless snapshots repeatedly."""
    feed = registered_feed(1)
    feed.make_load_only(SOURCE, 0.0)
    feed.take_events()
    give(feed, batch(2000, stored(1, 2)), batch(1999, stored(1)))
    assert feed.position(SOURCE).sequence == 2000
    give(feed, chunk(2005, 1, 2, 3, first=True), chunk(2005, 4, last=True))
    assert feed.position(SOURCE).sequence == 2005
    give(feed, batch(7, stored(1), epoch=EPOCH + 1))
    assert feed.position(SOURCE) == SourcePosition(SOURCE, EPOCH + 1, 7)
    for now in range(20):
        feed.tick(float(now))
    assert feed.status(SOURCE) == LOAD_ONLY
    assert feed.take_events() == []
    assert advertised_blocks(feed, SOURCE) == set()


def test_the_blocks_of_a_load_only_source_are_estimated() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(1, 2, 4)), chunk(2, 1, 2, first=True), batch(3, stored(4, 5)))
    assert feed.retained_blocks_of(SOURCE) > 3 + 2 + 2, "pending and deferred blocks are kept too"
    feed.make_load_only(SOURCE, 0.0)
    assert feed.retained_blocks_of(SOURCE) == 0
    give(feed, chunk(3, 1, 2, 3, first=True), chunk(3, 4, last=True))
    assert feed.unindexed_blocks_of(SOURCE) == 4
    give(feed, batch(4, stored(5, 6), removed(4)))
    assert feed.unindexed_blocks_of(SOURCE) == 5
    give(feed, batch(5, KvEvent(EventKind.CLEARED), stored(1)))
    assert feed.unindexed_blocks_of(SOURCE) == 1
    feed.end_load_only(SOURCE, 0.0)
    assert feed.unindexed_blocks_of(SOURCE) == 0


def test_remaining_chunks_count_for_a_source_made_load_only_during_its_snapshot() -> None:
    feed = registered_feed(100)
    give(feed, chunk(100, *range(300), first=True))
    feed.make_load_only(SOURCE, 0.0)
    assert feed.unindexed_blocks_of(SOURCE) == 300
    give(feed, batch(101, stored(2000)), chunk(100, *range(300, 600)))
    give(feed, batch(102, stored(2001)), chunk(100, *range(600, 1000), last=True))
    assert feed.unindexed_blocks_of(SOURCE) == 1002
    assert feed.position(SOURCE).sequence == 102
    give(feed, chunk(999, 1, 2, epoch=EPOCH - 1, first=True, last=True))
    assert feed.unindexed_blocks_of(SOURCE) == 1002, "of an older epoch"
    assert feed.position(SOURCE) == SourcePosition(SOURCE, EPOCH, 102)


def test_the_estimate_uses_the_pending_snapshot_instead_of_the_set_it_replaces() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(*range(1, 50))), chunk(2, 1, 2, first=True))
    feed.make_load_only(SOURCE, 0.0)
    give(feed, chunk(2, 3, last=True))
    assert feed.unindexed_blocks_of(SOURCE) == 3


def test_a_source_is_not_gapped_during_an_in_order_batch() -> None:
    feed = registered_feed()
    give(feed, batch(1, stored(1)))
    steps = feed.apply(batch(2, stored(*range(2, 5000))), 0.0)
    states = [feed.status(SOURCE).state for _ in steps]
    assert len(states) > 3
    assert set(states) == {"exact"}
    assert feed.position(SOURCE).sequence == 2


def test_a_copy_behind_the_announced_position_is_gapped_and_requests_the_rest() -> None:
    copy, exact = IndexFeed(), SourceStatus("exact")
    copy.apply_status(PARTITION, SOURCE, exact, 0.0, (EPOCH, 2))
    assert copy.status(SOURCE).state == "gapped"
    assert demands(copy) == [(EPOCH, 1)]
    give(copy, chunk(2, 1, first=True, last=True))
    copy.apply_status(PARTITION, SOURCE, exact, 0.0, (EPOCH, 2))
    assert copy.status(SOURCE) == exact
    copy.apply_status(PARTITION, SOURCE, exact, 0.0, (EPOCH, 1))
    assert copy.status(SOURCE) == exact, "a copy may be ahead of the index: the index lags"
    copy.apply_status(PARTITION, SOURCE, exact, 0.0, (EPOCH + 1, 0))
    assert copy.status(SOURCE) == exact
    assert advertised_blocks(copy, SOURCE) == set(), "of an older epoch"


def test_every_message_of_a_publisher_is_a_sign_of_life() -> None:
    feed = registered_feed()
    feed.mark_received(SOURCE, 5.0)
    assert feed.last_received_at(SOURCE) == 5.0
    feed.set_degraded(SOURCE, True, 6.0)
    assert feed.last_received_at(SOURCE) == 6.0
    feed.mark_received(Source(999), 7.0)


def test_buffered_batches_count_as_used_memory() -> None:
    feed = registered_feed()
    give(feed, batch(2, stored(*range(1000))))
    assert 8000 < feed.used_bytes < 10_000
    feed.mark_disconnected(SOURCE, 0.0, "gone")
    assert feed.used_bytes == 0


def test_partitions_never_match_each_other() -> None:
    feed, other = registered_feed(), Partition("other", 16, 1)
    feed.register_source(other, SourcePosition(Source(8), 1, 0), 0.0)
    give(feed, batch(1, stored(1)), batch(1, stored(1, 2), epoch=1, source=Source(8)))
    assert [row.source for row in feed.match(PARTITION, array([1, 2]))] == [SOURCE]
    assert [row.source for row in feed.match(other, array([1, 2]))] == [Source(8)]
    assert feed.match(Partition("third", 16, 1), array([1])) == []


def test_a_worker_that_changes_its_partition_is_removed_from_the_old_one() -> None:
    feed, other = registered_feed(), Partition("m", 32, 1)
    give(feed, batch(1, stored(1)))
    feed.register_source(other, SourcePosition(SOURCE, EPOCH, 0), 0.0)
    assert depth(feed, 1) == 0
    give(feed, batch(1, stored(1)))
    assert len(feed.match(other, array([1]))) == 1


# Replica.


def test_a_replica_takes_gaps_from_its_index() -> None:
    feed = IndexFeed()
    feed.apply_status(PARTITION, SOURCE, SourceStatus("exact"), 0.0)
    give(feed, batch(1, stored(1)))
    assert depth(feed, 1) == 1
    feed.apply_status(None, SOURCE, SourceStatus("gapped", "batches are missing"), 0.0)
    assert depth(feed, 1) == 0
    feed.apply_status(None, SOURCE, SourceStatus("exact"), 0.0)
    assert depth(feed, 1) == 1
    feed.apply_status(None, SOURCE, SourceStatus("gone", "left"), 0.0)
    assert SOURCE not in feed


def test_a_replica_matches_a_stale_source_for_the_grace_period() -> None:
    feed = IndexFeed()
    feed.apply_status(PARTITION, SOURCE, SourceStatus("exact"), 0.0)
    give(feed, batch(1, stored(1)))
    feed.apply_status(None, SOURCE, SourceStatus("stale", "stream ended"), 5.0)
    feed.tick(5.0 + STALE_GRACE_S - 0.1)
    assert depth(feed, 1) == 1
    feed.tick(5.0 + STALE_GRACE_S)
    assert depth(feed, 1) == 0


def test_a_replica_that_loses_its_index_during_a_snapshot_resumes_from_its_position() -> None:
    feed = IndexFeed()
    feed.apply_status(PARTITION, SOURCE, SourceStatus("exact"), 0.0)
    give(feed, batch(1, stored(1)), chunk(3, 1, first=True), batch(4, stored(8)))
    feed.mark_all_disconnected(0.0, "the stream ended")
    assert feed.positions() == [SourcePosition(SOURCE, EPOCH, 1)]
    # The missed batches arrive first, then the status.
    give(feed, batch(2, stored(2)), batch(3, stored(4)), batch(4, stored(8)))
    feed.apply_status(None, SOURCE, SourceStatus("exact"), 0.0)
    assert feed.status(SOURCE).state == "exact"
    assert advertised_blocks(feed, SOURCE) == {1, 2, 4, 8}
    assert demands(feed) == []


def test_a_replica_with_a_snapshot_announced_again_requests_nothing() -> None:
    """A request would make the replica subscribe again and restart the snapshot, forever."""
    feed = IndexFeed()
    feed.apply_status(PARTITION, SOURCE, SourceStatus("gapped", "a snapshot is in transit"), 0.0)
    give(feed, chunk(3, 1, first=True), batch(4, stored(8)))
    feed.mark_all_disconnected(0.0, "the stream ended")
    feed.apply_status(None, SOURCE, SourceStatus("gapped", "a snapshot is in transit"), 0.0)
    assert demands(feed) == []
    assert feed.match(PARTITION, array([1])) == []
    give(feed, chunk(4, 1, 8, first=True, last=True))
    feed.apply_status(None, SOURCE, SourceStatus("exact"), 0.0)
    assert feed.status(SOURCE).state == "exact"
    assert advertised_blocks(feed, SOURCE) == {1, 8}
    assert demands(feed) == []


def test_a_replica_with_a_buffer_overflow_stays_gapped_despite_an_exact_status() -> None:
    feed = IndexFeed(buffer_blocks_max=100)
    feed.apply_status(PARTITION, SOURCE, SourceStatus("gapped", "a snapshot is in transit"), 0.0)
    give(feed, chunk(3, 1, first=True), batch(4, stored(*range(100))), chunk(3, 2, last=True))
    assert feed.counters.overflows == 1
    feed.apply_status(None, SOURCE, SourceStatus("exact"), 0.0)
    assert feed.status(SOURCE).state == "gapped"
    feed.mark_all_disconnected(0.0, "it subscribes again")
    give(feed, chunk(4, 1, 2, first=True, last=True))
    feed.apply_status(None, SOURCE, SourceStatus("exact"), 0.0)
    assert feed.status(SOURCE).state == "exact"


# Defects of Dynamo's index (reference, section 11).


def test_equal_content_under_other_engine_hashes_loses_no_removals() -> None:
    """Defect 10: engines have their own block hashes; prefix hashes are published here."""
    feed, other = registered_feed(), Source(8)
    feed.register_source(PARTITION, SourcePosition(other, 1, 0), 0.0)
    give(feed, batch(1, stored(1, 2)), batch(1, stored(1, 2), epoch=1, source=other))
    give(feed, batch(2, stored(4), epoch=1, source=other))
    rows = feed.match(PARTITION, array([1, 2, 4]))
    assert [(row.source, row.device_blocks) for row in rows] == [(other, 3), (SOURCE, 2)]
    give(feed, batch(3, removed(4, 2, 1), epoch=1, source=other))
    assert [row.source for row in feed.match(PARTITION, array([1, 2, 4]))] == [SOURCE]


def test_a_middle_block_that_returns_brings_its_tail_back() -> None:
    """Defect 11: the publisher removes the tail with the middle and stores both again."""
    feed = registered_feed()
    give(feed, batch(1, stored(1, 2, 4, 8)))
    give(feed, batch(2, removed(8, 4, 2)))
    assert depth(feed, 1, 2, 4, 8) == 1
    give(feed, batch(3, stored(2, 4, 8)))
    assert depth(feed, 1, 2, 4, 8) == 4


def test_an_engine_restart_that_resets_the_sequence_is_detected() -> None:
    """Defect 12: a new epoch begins with an empty set, regardless of its sequence."""
    feed = registered_feed()
    give(feed, *(batch(n, stored(n)) for n in range(1, 20)))
    give(feed, batch(1, stored(1, 2), epoch=EPOCH + 1))
    assert advertised_blocks(feed, SOURCE) == {1, 2}
    assert feed.position(SOURCE) == SourcePosition(SOURCE, EPOCH + 1, 1)
    give(feed, batch(20, stored(77)))
    assert advertised_blocks(feed, SOURCE) == {1, 2}, "batches of the old epoch are ignored"


def test_a_gap_that_is_never_filled_never_serves_a_wrong_index() -> None:
    """Defect 13."""
    feed = registered_feed()
    give(feed, batch(1, stored(1, 2, 4)))
    now = 0.0
    for sequence in range(3, 50):
        now += 1.0
        give(feed, batch(sequence, stored(sequence)), now=now)
        feed.tick(now)
        assert feed.match(PARTITION, array([1, 2, 4])) == []
    assert len(demands(feed)) > 10


# Model.

blocks = st.integers(1, LEAVES - 1)
Message = EventBatch | SnapshotChunk


class Publisher:
    """A worker's publisher: a prefix-closed set, a short ring, exact snapshots."""

    def __init__(self) -> None:
        self.epoch, self.sequence = 1, 0
        self.held: set[int] = set()
        self.ring: deque[EventBatch] = deque(maxlen=2)
        self.history = {(1, 0): frozenset[int]()}

    @property
    def state(self) -> SourcePosition:
        return SourcePosition(SOURCE, self.epoch, self.sequence)

    def publish(self, *events: KvEvent) -> EventBatch:
        self.sequence += 1
        made = batch(self.sequence, *events, epoch=self.epoch)
        self.ring.append(made)
        self.history[self.epoch, self.sequence] = frozenset(self.held)
        return made

    def store(self, block: int) -> KvEvent:
        new = [b for b in path(block) if b not in self.held]
        self.held.update(new)
        return stored(*new)

    def remove(self, block: int) -> KvEvent:
        gone = sorted((b for b in self.held if block in path(b)), reverse=True)
        self.held.difference_update(gone)
        return removed(*gone)

    def clear(self) -> KvEvent:
        self.held.clear()
        return KvEvent(EventKind.CLEARED)

    def reset(self) -> None:
        self.epoch, self.sequence = self.epoch + 1, 0
        self.held.clear()
        self.ring.clear()
        self.history[self.epoch, 0] = frozenset()

    def answer(self, demand: ResendRequest) -> Iterator[Message]:
        """The batches of the ring if it has them, else a snapshot in chunks of two blocks."""
        first = demand.from_sequence
        if demand.epoch == self.epoch and self.ring and self.ring[0].sequence <= first:
            yield from (one for one in self.ring if one.sequence >= first)
            return
        keys = sorted(self.held)
        starts = range(0, max(1, len(keys)), 2)
        for start in starts:
            part = array(keys[start : start + 2])
            is_last = start == starts[-1]
            yield SnapshotChunk(
                SOURCE, self.epoch, self.sequence, part, first=start == 0, last=is_last
            )


class FeedMachine(RuleBasedStateMachine):
    """Batches are lost, repeated and reordered; engines restart; streams break."""

    def __init__(self) -> None:
        super().__init__()
        self.publisher = Publisher()
        self.feed = IndexFeed(buffer_blocks_max=120)
        self.wire: list[Message] = []
        self.now = 0.0
        self.stood = (0, 0)
        self.feed.register_source(PARTITION, self.publisher.state, self.now)

    @rule(
        many=st.lists(st.tuples(st.sampled_from(["store", "remove", "clear"]), blocks, blocks)),
        ahead=st.integers(0, 6),
    )
    def publishes(self, many: list[tuple[str, int, int]], ahead: int) -> None:
        publisher = self.publisher
        for what, block, other in many[:5]:
            match what:
                case "store":
                    first = publisher.store(block)
                case "remove":
                    first = publisher.remove(block)
                case _:
                    first = publisher.clear()
            second = publisher.store(other)
            made = publisher.publish(first, second)
            # Live batches do not wait for snapshot chunks.
            self.wire.insert(len(self.wire) - min(ahead, len(self.wire)), made)

    @rule(block=blocks)
    def begins_an_epoch(self, block: int) -> None:
        self.publisher.reset()
        self.wire.append(self.publisher.publish(self.publisher.store(block)))

    @rule(count=st.integers(1, 12))
    def delivers(self, count: int) -> None:
        while self.wire and count:
            give(self.feed, self.wire.pop(0), now=self.now)
            self.answers()
            count -= 1

    @precondition(lambda self: self.batches_on_the_wire())
    @rule(where=st.integers(0, 99))
    def loses(self, where: int) -> None:
        del self.wire[self.pick(where)]

    @precondition(lambda self: self.batches_on_the_wire())
    @rule(where=st.integers(0, 99), to=st.integers(0, 99))
    def repeats(self, where: int, to: int) -> None:
        self.wire.insert(to % len(self.wire), self.wire[self.pick(where)])

    @precondition(lambda self: self.batches_on_the_wire())
    @rule(where=st.integers(0, 99), to=st.integers(0, 99))
    def moves(self, where: int, to: int) -> None:
        self.wire.insert(to % len(self.wire), self.wire.pop(self.pick(where)))

    @rule()
    def time_passes(self) -> None:
        self.now += RETRY_S
        self.feed.tick(self.now)
        self.answers()
        self.feed.sweep(1000)

    @rule(missed=st.integers(0, 4), block=blocks)
    def the_stream_breaks(self, missed: int, block: int) -> None:
        self.wire.clear()
        self.feed.mark_disconnected(SOURCE, self.now, "stream ended")
        for number in range(missed):
            self.publisher.publish(self.publisher.store((block + number) % LEAVES or 1))
        self.what_counts_was_held_by_the_publisher_where_it_stands()
        self.feed.register_source(PARTITION, self.publisher.state, self.now)
        self.answers()

    def batches_on_the_wire(self) -> list[int]:
        """Messages in transit; chunks are never lost alone, a stream breaks as a whole."""
        return [i for i, message in enumerate(self.wire) if isinstance(message, EventBatch)]

    def pick(self, number: int) -> int:
        places = self.batches_on_the_wire()
        return places[number % len(places)]

    def answers(self) -> None:
        for event in self.feed.take_events():
            if isinstance(event, ResendRequest):
                # Inserted anywhere: live batches do not wait for snapshot chunks.
                # A snapshot requested again starts again.
                waiting = [m for m in self.wire if isinstance(m, EventBatch)]
                self.wire = []
                for answer in self.publisher.answer(event):
                    self.wire += [answer, *waiting[:1]]
                    del waiting[:1]
                self.wire += waiting

    @invariant()
    def what_counts_was_held_by_the_publisher_where_it_stands(self) -> None:
        at = self.feed.position(SOURCE)
        assert (at.epoch, at.sequence) >= self.stood, "the position is monotonic"
        self.stood = (at.epoch, at.sequence)
        if self.feed.is_matchable(SOURCE):
            assert self.feed.status(SOURCE).state in ("exact", "stale")
            assert (
                advertised_blocks(self.feed, SOURCE)
                == self.publisher.history[at.epoch, at.sequence]
            )
        else:
            assert self.feed.match(PARTITION, array([1])) == []

    def teardown(self) -> None:
        self.the_stream_breaks(0, 1)
        while self.wire:
            self.delivers(1)
        assert self.feed.status(SOURCE).state == "exact"
        assert advertised_blocks(self.feed, SOURCE) == self.publisher.held
        for block in range(LEAVES // 2, LEAVES):
            chain = path(block)
            held = sum(b in self.publisher.held for b in chain)
            assert depth(self.feed, *chain) == held
        while self.feed.sweep(1000):
            pass
        index, advertised = self.feed.advertised(SOURCE)
        assert len(index) == index.blocks == advertised.blocks == len(self.publisher.held)


FeedMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, database=None
)
TestFeed = pytest.mark.slow(FeedMachine.TestCase)
