"""Updates of a subscription; the copy is checked after every frame."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from common.kv.events import (
    SNAPSHOT_CHUNK_BLOCKS,
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
    BatchApplied,
    IndexFeed,
    ResendRequest,
    SourceReplaced,
    StatusChanged,
    run_all_steps,
)
from common.kv.load import Load
from indexer_svc.core.history import BatchHistory
from indexer_svc.core.subscriber import (
    BatchUpdate,
    CaughtUp,
    LoadUpdate,
    Outbound,
    StatusUpdate,
    Subscriber,
)
from tests.kit.kv_events import advertised_blocks, array

PARTITION, OTHER = Partition("m", 16, 1), Partition("n", 16, 1)
A, B, C = Source(1), Source(2), Source(3)
CAP = 10**7


class Index:
    """An indexer without RPC: a feed with events for subscribers."""

    def __init__(self) -> None:
        self.feed = IndexFeed()
        self.histories: dict[Source, BatchHistory] = {}
        self.subscribers: list[Subscriber] = []
        self.absent: set[int] = set()

    def add(self, source: Source, *keys: int) -> None:
        """Add a source with a first batch that stores these blocks."""
        self.feed.register_source(PARTITION, SourcePosition(source, 1, 0), 0.0)
        self.dispatch()
        if keys:
            self.store(source, *keys)

    def store(self, source: Source, *keys: int) -> None:
        self.change(source, KvEvent(EventKind.STORED, array(keys)))

    def change(self, source: Source, *events: KvEvent, epoch: int | None = None) -> None:
        at = self.feed.position(source)
        sequence = at.sequence + 1 if epoch in (None, at.epoch) else 1
        batch = EventBatch(source, epoch or at.epoch, sequence, events)
        run_all_steps(self.feed.apply(batch, 0.0))
        self.dispatch()

    def subscribe(self, *resume: SourcePosition, cap: int = CAP) -> Subscriber:
        is_absent = self.absent.__contains__
        subscriber = Subscriber(self.feed, self.histories, resume, None, cap, is_absent=is_absent)
        self.subscribers.append(subscriber)
        return subscriber

    def dispatch(self) -> None:
        for event in self.feed.take_events():
            match event:
                case BatchApplied(batch):
                    self.histories.setdefault(batch.source, BatchHistory()).add(batch)
                    update = BatchUpdate(batch)
                    for subscriber in self.subscribers:
                        subscriber.batch(update)
                case SourceReplaced(source):
                    self.histories.pop(source, None)
                    for subscriber in self.subscribers:
                        subscriber.source_replaced(source)
                case StatusChanged(source, partition, status):
                    for subscriber in self.subscribers:
                        subscriber.status_changed(source, partition, status)


def give(copy: IndexFeed, updates: Iterable[Outbound]) -> None:
    for one in updates:
        match one:
            case StatusUpdate(source, partition, status, at):
                copy.apply_status(partition, source, status, 0.0, at)
            case BatchUpdate(batch):
                run_all_steps(copy.apply(batch, 0.0))
            case SnapshotChunk():
                run_all_steps(copy.load(one, 0.0))
            case _:
                pass


def everything(subscriber: Subscriber) -> list[Outbound]:
    updates: list[Outbound] = []
    while subscriber.has_more:
        updates += subscriber.take()
    return updates


def demands(copy: IndexFeed) -> list[ResendRequest]:
    return [event for event in copy.take_events() if isinstance(event, ResendRequest)]


def chunks(updates: Iterable[Outbound]) -> list[SnapshotChunk]:
    return [one for one in updates if isinstance(one, SnapshotChunk)]


def test_a_new_subscriber_receives_chunks_then_status_per_source_then_caught_up() -> None:
    index = Index()
    index.add(A, *range(1, SNAPSHOT_CHUNK_BLOCKS + 10))
    updates = everything(index.subscribe())
    kinds = [type(one) for one in updates]
    assert kinds == [StatusUpdate, SnapshotChunk, SnapshotChunk, StatusUpdate, CaughtUp]
    assert isinstance(updates[0], StatusUpdate)
    assert updates[0].status.state == "gapped", "gapped until the copy is complete"
    assert isinstance(updates[3], StatusUpdate)
    assert updates[3].status.state == "exact"
    assert [len(chunk.hashes) for chunk in chunks(updates)] == [SNAPSHOT_CHUNK_BLOCKS, 9]


def test_an_empty_index_is_caught_up_at_once() -> None:
    assert everything(Index().subscribe()) == [CaughtUp()]


def test_the_first_chunk_of_a_snapshot_precedes_every_batch_of_its_source() -> None:
    """Otherwise the copy detects a gap and subscribes again, under traffic forever."""
    index, copy = Index(), IndexFeed()
    for source in (A, B, C):
        index.add(source, *range(1, 3 * SNAPSHOT_CHUNK_BLOCKS))
    subscriber = index.subscribe()
    for n in range(20):
        give(copy, subscriber.take())
        for source in (A, B, C):
            index.store(source, 10**6 + n)
    give(copy, everything(subscriber))
    assert [advertised_blocks(copy, one) for one in (A, B, C)] == [
        advertised_blocks(index.feed, one) for one in (A, B, C)
    ]
    assert demands(copy) == []


def test_at_most_two_snapshots_are_read_at_once_and_live_batches_go_first() -> None:
    index = Index()
    for source in (A, B, C):
        index.add(source, *range(1, 3 * SNAPSHOT_CHUNK_BLOCKS))
    subscriber = index.subscribe()
    subscriber.take()
    index.store(A, 10**6)
    second = subscriber.take()
    assert isinstance(second[0], BatchUpdate)
    order = [chunk.source for chunk in chunks([*second, *everything(subscriber)])]
    assert order.index(C) > max(len(order) - 1 - order[::-1].index(B) - 3, 2)
    assert order[:4] == [B, A, B, A]


def test_an_up_to_date_subscriber_receives_only_statuses() -> None:
    index = Index()
    index.add(A, 1, 2)
    updates = everything(index.subscribe(index.feed.position(A)))
    assert [type(one) for one in updates] == [StatusUpdate, CaughtUp]


def test_a_subscriber_a_little_behind_receives_the_batches_in_between() -> None:
    index = Index()
    index.add(A, 1)
    behind = index.feed.position(A)
    index.store(A, 2)
    index.store(A, 4)
    updates = everything(index.subscribe(behind))
    assert [type(one) for one in updates] == [BatchUpdate, BatchUpdate, StatusUpdate, CaughtUp]


def test_the_first_status_of_a_source_precedes_its_live_batches() -> None:
    """The copy is of another partition: batches before the first status would be lost."""
    copy = IndexFeed()
    copy.apply_status(OTHER, A, SourceStatus("exact"), 0.0, (0, 0))
    before = EventBatch(A, 1, 1, (KvEvent(EventKind.STORED, array([1])),))
    run_all_steps(copy.apply(before, 0.0))
    copy.mark_all_disconnected(0.0, "the indexer is lost")
    index = Index()
    index.feed.register_source(PARTITION, SourcePosition(A, 2, 0), 0.0)
    index.dispatch()
    subscriber = index.subscribe(*copy.positions())
    index.store(A, 2)
    give(copy, everything(subscriber))
    assert copy.status(A).state == "exact"
    assert advertised_blocks(copy, A) == {2}


@pytest.mark.parametrize("cap", [1000, 3344, 3400, 6688, 6800])
def test_a_subscriber_behind_by_about_its_queue_limit_receives_a_snapshot(cap: int) -> None:
    """Regression: each resume overflowed at once while the source was quiet."""
    index = Index()
    index.add(A, 1)
    at = index.feed.position(A)
    for key in range(2, 40):
        index.store(A, key)
    subscriber = index.subscribe(at, cap=cap)
    updates = everything(subscriber)
    assert not subscriber.is_overflowed
    assert len(chunks(updates)) == 1


def test_a_subscriber_at_another_epoch_receives_a_snapshot() -> None:
    index = Index()
    index.add(A, 1)
    updates = everything(index.subscribe(SourcePosition(A, 0, 9)))
    assert len(chunks(updates)) == 1


def test_a_subscriber_ahead_of_the_index_waits_for_it() -> None:
    index = Index()
    index.add(A, 1)
    subscriber = index.subscribe(SourcePosition(A, 1, 2))
    everything(subscriber)
    index.store(A, 2)
    assert everything(subscriber) == []
    index.store(A, 4)
    assert [type(one) for one in everything(subscriber)] == [BatchUpdate]


def test_a_gapped_source_is_sent_only_after_its_repair() -> None:
    index = Index()
    index.feed.register_source(PARTITION, SourcePosition(A, 1, 5), 0.0)
    subscriber = index.subscribe()
    assert [type(one) for one in everything(subscriber)] == [StatusUpdate, CaughtUp]
    snapshot = SnapshotChunk(A, 1, 5, array([1, 2]), first=True, last=True)
    run_all_steps(index.feed.load(snapshot, 0.0))
    index.dispatch()
    updates = everything(subscriber)
    assert [chunk.hashes.tolist() for chunk in chunks(updates)] == [[1, 2]]
    assert updates[-1] == StatusUpdate(A, PARTITION, SourceStatus("exact"), (1, 5))


def test_a_source_removed_during_its_snapshot_is_reported_gone() -> None:
    index = Index()
    index.add(A, *range(1, 3 * SNAPSHOT_CHUNK_BLOCKS))
    subscriber = index.subscribe()
    subscriber.take()
    index.feed.forget(A, "left")
    index.dispatch()
    updates = everything(subscriber)
    assert chunks(updates) == []
    assert StatusUpdate(A, PARTITION, SourceStatus("gone", "left")) in updates


def states(updates: Iterable[Outbound]) -> list[str]:
    return [one.status.state for one in updates if isinstance(one, StatusUpdate)]


def test_a_subscriber_at_the_position_of_a_load_only_source_gets_it_reported_gone() -> None:
    """Regression: the copy was reported up to date and kept its old blocks forever."""
    index, copy = Index(), IndexFeed()
    index.add(A, 1, 2, 3)
    subscriber = index.subscribe()
    give(copy, everything(subscriber))
    assert advertised_blocks(copy, A) == {1, 2, 3}
    index.subscribers.clear()
    copy.mark_all_disconnected(0.0, "the stream was cut")
    index.feed.make_load_only(A, 0.0)
    index.dispatch()
    updates = everything(index.subscribe(*copy.positions()))
    assert states(updates) == ["gone", "degraded"]
    give(copy, updates)
    assert advertised_blocks(copy, A) == set()
    assert copy.position(A) == SourcePosition(A, 0, 0)


def test_a_copy_of_a_load_only_source_resumes_from_nothing_at_another_index() -> None:
    """Regression: the copy was reported exact and stayed empty."""
    one, other, copy = Index(), Index(), IndexFeed()
    for index in (one, other):
        index.add(A, 1, 2, 3)
    one.feed.make_load_only(A, 0.0)
    one.dispatch()
    give(copy, everything(one.subscribe()))
    assert copy.status(A).state == "degraded"
    copy.mark_all_disconnected(0.0, "it died")
    give(copy, everything(other.subscribe(*copy.positions())))
    assert copy.status(A) == SourceStatus("exact")
    assert advertised_blocks(copy, A) == {1, 2, 3}


def test_a_source_made_load_only_is_reported_once_and_sent_again_when_readmitted() -> None:
    index, copy = Index(), IndexFeed()
    index.add(A, *range(1, 3 * SNAPSHOT_CHUNK_BLOCKS))
    subscriber = index.subscribe()
    give(copy, subscriber.take())
    index.feed.make_load_only(A, 0.0)
    index.dispatch()
    updates = everything(subscriber)
    assert chunks(updates) == [], "its snapshot was being read"
    assert states(updates)[0] == "gone"
    assert states(updates).count("gone") == 1
    give(copy, updates)
    assert advertised_blocks(copy, A) == set()
    index.change(A, KvEvent(EventKind.REMOVED, array([1])))
    index.feed.end_load_only(A, 0.0)
    at = index.feed.position(A)
    snapshot = SnapshotChunk(A, at.epoch, 2, array([2, 3]), first=True, last=True)
    run_all_steps(index.feed.load(snapshot, 0.0))
    index.dispatch()
    updates = everything(subscriber)
    assert "gone" not in states(updates)
    give(copy, updates)
    assert copy.status(A) == SourceStatus("exact")
    assert advertised_blocks(copy, A) == {2, 3}


def test_a_source_that_restarts_empty_is_empty_in_the_copy() -> None:
    """Regression: an epoch without batches was reported up to date; the old blocks stayed."""
    index, copy = Index(), IndexFeed()
    index.add(A, 1, 2, 3)
    subscriber = index.subscribe()
    give(copy, everything(subscriber))
    index.feed.register_source(PARTITION, SourcePosition(A, 2, 0), 0.0)
    index.dispatch()
    give(copy, everything(subscriber))
    assert copy.status(A) == SourceStatus("exact")
    assert advertised_blocks(copy, A) == set()


def test_a_source_reported_gone_is_sent_in_full_when_it_returns() -> None:
    index, copy = Index(), IndexFeed()
    index.add(A, 1)
    give(copy, everything(index.subscribe()))
    restarted = Index()
    restarted.absent.add(A.worker_id)
    subscriber = restarted.subscribe(*copy.positions())
    give(copy, everything(subscriber))
    assert A not in copy
    restarted.add(A, 1)
    give(copy, everything(subscriber))
    assert copy.status(A) == SourceStatus("exact")
    assert advertised_blocks(copy, A) == {1}
    assert demands(copy) == []


def test_a_copy_without_a_source_is_sent_its_gap() -> None:
    index, copy = Index(), IndexFeed()
    index.add(A, 1)
    subscriber = index.subscribe()
    give(copy, everything(subscriber))
    index.feed.mark_disconnected(A, 0.0, "its publisher's stream ended")
    index.dispatch()
    give(copy, everything(subscriber))
    copy.forget(A, "no indexer has it")
    copy.take_events()
    index.feed.register_source(PARTITION, index.feed.position(A), 0.0)
    index.dispatch()
    give(copy, everything(subscriber))
    assert copy.status(A).state == "gapped"
    assert len(demands(copy)) == 1


def test_only_the_latest_load_of_a_source_is_queued() -> None:
    index = Index()
    subscriber = index.subscribe()
    for number in range(1000):
        subscriber.load(LoadUpdate(A, Load(running=number)), PARTITION)
    assert [one for one in everything(subscriber) if isinstance(one, LoadUpdate)] == [
        LoadUpdate(A, Load(running=999))
    ]


def test_a_subscription_over_its_queue_limit_ends_and_keeps_nothing() -> None:
    index = Index()
    index.add(A)
    subscriber = index.subscribe(cap=10_000)
    everything(subscriber)
    for start in range(0, 3000, 100):
        index.store(A, *range(start + 1, start + 101))
    assert subscriber.is_overflowed
    assert not subscriber._waiting


def test_the_messages_that_other_streams_encode_count_against_the_queue_limit() -> None:
    """They stay in memory as long as the slowest subscriber has them queued."""
    hashes = 1000
    index = Index()
    index.add(A)
    slow, fast = index.subscribe(cap=10 * 8 * hashes), index.subscribe(cap=10 * 8 * hashes)
    everything(slow)
    queued = 0
    while not slow.is_overflowed:
        everything(fast)
        index.store(A, *range(hashes * queued + 1, hashes * (queued + 1) + 1))
        queued += 1
        assert queued < 10, "batches and messages within the limit"
    assert queued == 5
    assert not fast.is_overflowed


def test_the_first_statuses_do_not_count_against_the_queue_limit() -> None:
    """Regression: with less than 128 bytes per source each resume overflowed at once."""
    index, copy = Index(), IndexFeed()
    sources = [Source(n) for n in range(1, 41)]
    for source in sources:
        index.add(source, source.worker_id)
    subscriber = index.subscribe(cap=100)
    give(copy, everything(subscriber))
    assert not subscriber.is_overflowed
    assert {frozenset(advertised_blocks(copy, one)) for one in sources} == {
        frozenset([one.worker_id]) for one in sources
    }
    copy.mark_all_disconnected(0.0, "it died")
    restarted = Index()
    restarted.absent.add(1)
    subscriber = restarted.subscribe(*copy.positions(), cap=100)
    give(copy, everything(subscriber))
    assert not subscriber.is_overflowed
    assert {copy.status(one).state for one in copy.sources()} == {"stale"}
    assert len(copy.sources()) == len(sources) - 1


class Pair:
    """Two indexes with the same input, and the expected set at each position."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self.indexes = (Index(), Index())
        self.truth: dict[Source, set[int]] = {}
        self.at: dict[Source, tuple[int, int]] = {}
        self.past: dict[tuple[Source, int, int], frozenset[int]] = {}
        for source in sources:
            self.truth[source], self.at[source] = set(), (1, 0)
            self.past[source, 0, 0] = self.past[source, 1, 0] = frozenset()
            for index in self.indexes:
                index.add(source)

    def change(self, source: Source, kind: EventKind, *keys: int, epoch: int | None = None) -> None:
        at, truth = self.at[source], self.truth[source]
        if epoch is not None:
            truth.clear()
            at = (epoch, 0)
            self.past[source, epoch, 0] = frozenset()
        match kind:
            case EventKind.STORED:
                truth.update(keys)
            case EventKind.REMOVED:
                truth.difference_update(keys)
            case EventKind.CLEARED:
                truth.clear()
        at = self.at[source] = (at[0], at[1] + 1)
        self.past[source, *at] = frozenset(truth)
        batch = EventBatch(source, *at, [KvEvent(kind, array(keys))])
        for index in self.indexes:
            run_all_steps(index.feed.apply(batch, 0.0))
            index.dispatch()

    def turn(self, index: Index, source: Source) -> None:
        """Make a source load-only or end that; its publisher resends on request."""
        if not index.feed.is_load_only(source):
            index.feed.make_load_only(source, 0.0)
            index.dispatch()
            return
        index.feed.end_load_only(source, 0.0)
        index.dispatch()
        all_of_it = array(sorted(self.truth[source]))
        snapshot = SnapshotChunk(source, *self.at[source], all_of_it, first=True, last=True)
        run_all_steps(index.feed.load(snapshot, 0.0))
        index.dispatch()


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(30))
def test_a_copy_is_never_wrong_and_ends_equal(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets that change while they are read in chunks of three blocks; frames of any size; a switch
    to another index; sources that are load-only for a while in one of them."""
    monkeypatch.setattr("common.kv.prefix_index.PrefixIndex.chunks.__defaults__", (3,))
    sources = [A, B, C]
    rng, copy, pair = Random(seed), IndexFeed(), Pair(sources)
    index = pair.indexes[0]
    for source in sources:
        pair.change(source, EventKind.STORED, *rng.sample(range(1, 200), 40))
    subscriber = index.subscribe()
    kinds = ("store", "remove", "clear", "epoch", "turn", "take", "again")
    for _ in range(400):
        source = rng.choice(sources)
        match rng.choices(kinds, (9, 9, 1, 1, 2, 20, 2))[0]:
            case "store":
                pair.change(source, EventKind.STORED, *rng.sample(range(1, 200), 3))
            case "remove":
                pair.change(source, EventKind.REMOVED, *rng.sample(range(1, 200), 5))
            case "clear":
                pair.change(source, EventKind.CLEARED)
            case "epoch":
                epoch = pair.at[source][0] + 1
                pair.change(source, EventKind.STORED, 5, 6, epoch=epoch)
            case "turn":
                pair.turn(rng.choice(pair.indexes), source)
            case "again":
                index.subscribers.remove(subscriber)
                copy.mark_all_disconnected(0.0, "the stream ended")
                index = rng.choice(pair.indexes)
                subscriber = index.subscribe(*copy.positions())
            case _:
                give(copy, subscriber.take(rng.choice([1, 200, 10_000])))
        for mine in copy.positions():
            if copy.is_matchable(mine.source):
                expected = pair.past[mine.source, mine.epoch, mine.sequence]
                assert advertised_blocks(copy, mine.source) == expected
        for feed in (*(one.feed for one in pair.indexes), copy):
            feed.sweep(256)
    give(copy, everything(subscriber))
    for source in sources:
        assert copy.status(source) == index.feed.status(source)
        assert advertised_blocks(copy, source) == advertised_blocks(index.feed, source)
        is_here = not index.feed.is_load_only(source)
        assert advertised_blocks(copy, source) == (pair.truth[source] if is_here else set())
    assert demands(copy) == [], "no further subscription is needed"
