"""What a subscriber is sent: its copy of the index is checked after every frame."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import numpy as np
import pytest

from common.kv.events import (
    SNAPSHOT_CHUNK_BLOCKS,
    EventBatch,
    EventKind,
    Hashes,
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
from indexer_svc.core.subscriber import CaughtUp, LoadUpdate, Outbound, StatusUpdate, Subscriber

PARTITION, OTHER = Partition("m", 16, 1), Partition("n", 16, 1)
A, B, C = Source(1), Source(2), Source(3)
CAP = 10**7


def array(keys: Iterable[int]) -> Hashes:
    return np.array(list(keys), dtype=np.uint64)


class Index:
    """An indexer without its wire: a feed whose news go to subscribers."""

    def __init__(self) -> None:
        self.feed = IndexFeed()
        self.histories: dict[Source, BatchHistory] = {}
        self.subscribers: list[Subscriber] = []
        self.absent: set[int] = set()

    def add(self, source: Source, *keys: int) -> None:
        """A source that holds these blocks since its first batch."""
        self.feed.register_source(PARTITION, SourcePosition(source, 1, 0), 0.0)
        self.tell()
        if keys:
            self.store(source, *keys)

    def store(self, source: Source, *keys: int) -> None:
        self.change(source, KvEvent(EventKind.STORED, array(keys)))

    def change(self, source: Source, *events: KvEvent, epoch: int | None = None) -> None:
        at = self.feed.position(source)
        sequence = at.sequence + 1 if epoch in (None, at.epoch) else 1
        batch = EventBatch(source, epoch or at.epoch, sequence, events)
        run_all_steps(self.feed.apply(batch, 0.0))
        self.tell()

    def subscribe(self, *resume: SourcePosition, cap: int = CAP) -> Subscriber:
        is_absent = self.absent.__contains__
        subscriber = Subscriber(self.feed, self.histories, resume, None, cap, is_absent=is_absent)
        self.subscribers.append(subscriber)
        return subscriber

    def tell(self) -> None:
        for news in self.feed.take_events():
            match news:
                case BatchApplied(batch):
                    self.histories.setdefault(batch.source, BatchHistory()).add(batch)
                    for subscriber in self.subscribers:
                        subscriber.batch(batch)
                case SourceReplaced(source):
                    self.histories.pop(source, None)
                    for subscriber in self.subscribers:
                        subscriber.source_replaced(source)
                case StatusChanged(source, partition, status):
                    for subscriber in self.subscribers:
                        subscriber.status_changed(source, partition, status)


def give(copy: IndexFeed, told: Iterable[Outbound]) -> None:
    for one in told:
        match one:
            case StatusUpdate(source, partition, status, at):
                copy.apply_status(partition, source, status, 0.0, at)
            case EventBatch():
                run_all_steps(copy.apply(one, 0.0))
            case SnapshotChunk():
                run_all_steps(copy.load(one, 0.0))
            case _:
                pass


def everything(subscriber: Subscriber) -> list[Outbound]:
    told: list[Outbound] = []
    while subscriber.has_more:
        told += subscriber.take()
    return told


def held(feed: IndexFeed, source: Source) -> set[int]:
    index, advertised = feed.advertised(source)
    return {key for _, part in index.chunks(advertised) for key in part.tolist()}


def demands(copy: IndexFeed) -> list[ResendRequest]:
    return [news for news in copy.take_events() if isinstance(news, ResendRequest)]


def chunks(told: Iterable[Outbound]) -> list[SnapshotChunk]:
    return [one for one in told if isinstance(one, SnapshotChunk)]


def test_a_newcomer_gets_each_source_in_parts_then_its_status_then_the_end() -> None:
    index = Index()
    index.add(A, *range(1, SNAPSHOT_CHUNK_BLOCKS + 10))
    told = everything(index.subscribe())
    kinds = [type(one) for one in told]
    assert kinds == [StatusUpdate, SnapshotChunk, SnapshotChunk, StatusUpdate, CaughtUp]
    assert isinstance(told[0], StatusUpdate)
    assert told[0].status.state == "gapped", "not before it is a copy"
    assert isinstance(told[3], StatusUpdate)
    assert told[3].status.state == "exact"
    assert [len(chunk.hashes) for chunk in chunks(told)] == [SNAPSHOT_CHUNK_BLOCKS, 9]


def test_an_empty_index_is_caught_up_at_once() -> None:
    assert everything(Index().subscribe()) == [CaughtUp()]


def test_no_batch_of_a_source_goes_ahead_of_the_first_part_of_its_snapshot() -> None:
    """A copy would see a gap, and subscribe again: under traffic for ever."""
    index, copy = Index(), IndexFeed()
    for source in (A, B, C):
        index.add(source, *range(1, 3 * SNAPSHOT_CHUNK_BLOCKS))
    subscriber = index.subscribe()
    for n in range(20):
        give(copy, subscriber.take())
        for source in (A, B, C):
            index.store(source, 10**6 + n)
    give(copy, everything(subscriber))
    assert [held(copy, one) for one in (A, B, C)] == [held(index.feed, one) for one in (A, B, C)]
    assert demands(copy) == []


def test_at_most_two_snapshots_are_read_at_once_and_live_batches_go_first() -> None:
    index = Index()
    for source in (A, B, C):
        index.add(source, *range(1, 3 * SNAPSHOT_CHUNK_BLOCKS))
    subscriber = index.subscribe()
    subscriber.take()
    index.store(A, 10**6)
    second = subscriber.take()
    assert isinstance(second[0], EventBatch)
    order = [chunk.source for chunk in chunks([*second, *everything(subscriber)])]
    assert order.index(C) > max(len(order) - 1 - order[::-1].index(B) - 3, 2)
    assert order[:4] == [B, A, B, A]


def test_who_has_all_gets_nothing_but_the_status() -> None:
    index = Index()
    index.add(A, 1, 2)
    told = everything(index.subscribe(index.feed.position(A)))
    assert [type(one) for one in told] == [StatusUpdate, CaughtUp]


def test_who_is_a_little_behind_gets_the_batches_in_between() -> None:
    index = Index()
    index.add(A, 1)
    behind = index.feed.position(A)
    index.store(A, 2)
    index.store(A, 4)
    told = everything(index.subscribe(behind))
    assert [type(one) for one in told] == [EventBatch, EventBatch, StatusUpdate, CaughtUp]


def test_no_live_batch_goes_ahead_of_the_first_word_about_its_source() -> None:
    """The copy has it of another partition: what it begins with there would be lost to this one."""
    copy = IndexFeed()
    copy.apply_status(OTHER, A, SourceStatus("exact"), 0.0, (0, 0))
    before = EventBatch(A, 1, 1, (KvEvent(EventKind.STORED, array([1])),))
    run_all_steps(copy.apply(before, 0.0))
    copy.mark_all_disconnected(0.0, "the indexer is lost")
    index = Index()
    index.feed.register_source(PARTITION, SourcePosition(A, 2, 0), 0.0)
    index.tell()
    subscriber = index.subscribe(*copy.positions())
    index.store(A, 2)
    give(copy, everything(subscriber))
    assert copy.status(A).state == "exact"
    assert held(copy, A) == {2}


@pytest.mark.parametrize("cap", [1000, 3344, 3400])
def test_who_is_behind_by_about_what_may_wait_for_it_gets_a_snapshot(cap: int) -> None:
    """It was cut at once, whenever it resumed, for as long as the source was quiet."""
    index = Index()
    index.add(A, 1)
    at = index.feed.position(A)
    for key in range(2, 40):
        index.store(A, key)
    subscriber = index.subscribe(at, cap=cap)
    told = everything(subscriber)
    assert not subscriber.is_overflowed
    assert len(chunks(told)) == 1


def test_who_is_of_another_epoch_gets_a_snapshot() -> None:
    index = Index()
    index.add(A, 1)
    told = everything(index.subscribe(SourcePosition(A, 0, 9)))
    assert len(chunks(told)) == 1


def test_who_is_ahead_of_a_lagging_index_waits_for_it() -> None:
    index = Index()
    index.add(A, 1)
    subscriber = index.subscribe(SourcePosition(A, 1, 2))
    everything(subscriber)
    index.store(A, 2)
    assert everything(subscriber) == []
    index.store(A, 4)
    assert [type(one) for one in everything(subscriber)] == [EventBatch]


def test_a_gapped_source_is_not_sent_before_it_is_right() -> None:
    index = Index()
    index.feed.register_source(PARTITION, SourcePosition(A, 1, 5), 0.0)
    subscriber = index.subscribe()
    assert [type(one) for one in everything(subscriber)] == [StatusUpdate, CaughtUp]
    snapshot = SnapshotChunk(A, 1, 5, array([1, 2]), first=True, last=True)
    run_all_steps(index.feed.load(snapshot, 0.0))
    index.tell()
    told = everything(subscriber)
    assert [chunk.hashes.tolist() for chunk in chunks(told)] == [[1, 2]]
    assert told[-1] == StatusUpdate(A, PARTITION, SourceStatus("exact"), (1, 5))


def test_a_source_that_goes_while_it_is_read_is_told_to_be_gone() -> None:
    index = Index()
    index.add(A, *range(1, 3 * SNAPSHOT_CHUNK_BLOCKS))
    subscriber = index.subscribe()
    subscriber.take()
    index.feed.forget(A, "left")
    index.tell()
    told = everything(subscriber)
    assert chunks(told) == []
    assert StatusUpdate(A, PARTITION, SourceStatus("gone", "left")) in told


def states(told: Iterable[Outbound]) -> list[str]:
    return [one.status.state for one in told if isinstance(one, StatusUpdate)]


def test_a_load_only_source_is_void_for_whoever_had_it_at_its_position() -> None:
    """It was told to be up to date, and claimed for ever what it had when the stream was cut."""
    index, copy = Index(), IndexFeed()
    index.add(A, 1, 2, 3)
    subscriber = index.subscribe()
    give(copy, everything(subscriber))
    assert held(copy, A) == {1, 2, 3}
    index.subscribers.clear()
    copy.mark_all_disconnected(0.0, "the stream was cut")
    index.feed.make_load_only(A, 0.0)
    index.tell()
    told = everything(index.subscribe(*copy.positions()))
    assert states(told) == ["gone", "degraded"]
    give(copy, told)
    assert held(copy, A) == set()
    assert copy.position(A) == SourcePosition(A, 0, 0)


def test_a_copy_of_a_load_only_source_is_no_copy_for_an_index_that_holds_it() -> None:
    """It was told to be exact, and held nothing for ever."""
    one, other, copy = Index(), Index(), IndexFeed()
    for index in (one, other):
        index.add(A, 1, 2, 3)
    one.feed.make_load_only(A, 0.0)
    one.tell()
    give(copy, everything(one.subscribe()))
    assert copy.status(A).state == "degraded"
    copy.mark_all_disconnected(0.0, "it died")
    give(copy, everything(other.subscribe(*copy.positions())))
    assert copy.status(A) == SourceStatus("exact")
    assert held(copy, A) == {1, 2, 3}


def test_a_source_that_becomes_load_only_is_told_so_once_and_sent_again_when_admitted() -> None:
    index, copy = Index(), IndexFeed()
    index.add(A, *range(1, 3 * SNAPSHOT_CHUNK_BLOCKS))
    subscriber = index.subscribe()
    give(copy, subscriber.take())
    index.feed.make_load_only(A, 0.0)
    index.tell()
    told = everything(subscriber)
    assert chunks(told) == [], "it was being read"
    assert states(told)[0] == "gone"
    assert states(told).count("gone") == 1
    give(copy, told)
    assert held(copy, A) == set()
    index.change(A, KvEvent(EventKind.REMOVED, array([1])))
    index.feed.end_load_only(A, 0.0)
    at = index.feed.position(A)
    snapshot = SnapshotChunk(A, at.epoch, 2, array([2, 3]), first=True, last=True)
    run_all_steps(index.feed.load(snapshot, 0.0))
    index.tell()
    told = everything(subscriber)
    assert "gone" not in states(told)
    give(copy, told)
    assert copy.status(A) == SourceStatus("exact")
    assert held(copy, A) == {2, 3}


def test_a_source_that_begins_anew_with_nothing_is_nothing_for_the_copy_too() -> None:
    """An announced epoch without a batch was called up to date; the old claims stayed."""
    index, copy = Index(), IndexFeed()
    index.add(A, 1, 2, 3)
    subscriber = index.subscribe()
    give(copy, everything(subscriber))
    index.feed.register_source(PARTITION, SourcePosition(A, 2, 0), 0.0)
    index.tell()
    give(copy, everything(subscriber))
    assert copy.status(A) == SourceStatus("exact")
    assert held(copy, A) == set()


def test_who_was_told_that_a_source_is_gone_gets_all_of_it_when_it_comes_after_all() -> None:
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
    assert held(copy, A) == {1}
    assert demands(copy) == []


def test_a_copy_that_has_forgotten_a_source_learns_that_it_lacks_it() -> None:
    index, copy = Index(), IndexFeed()
    index.add(A, 1)
    subscriber = index.subscribe()
    give(copy, everything(subscriber))
    index.feed.mark_disconnected(A, 0.0, "its publisher's stream ended")
    index.tell()
    give(copy, everything(subscriber))
    copy.forget(A, "no indexer knows it")
    copy.take_events()
    index.feed.register_source(PARTITION, index.feed.position(A), 0.0)
    index.tell()
    give(copy, everything(subscriber))
    assert copy.status(A).state == "gapped"
    assert len(demands(copy)) == 1


def test_only_the_latest_load_of_a_source_waits() -> None:
    index = Index()
    subscriber = index.subscribe()
    for number in range(1000):
        subscriber.load(A, PARTITION, Load(running=number))
    assert [one for one in everything(subscriber) if isinstance(one, LoadUpdate)] == [
        LoadUpdate(A, Load(running=999))
    ]


def test_more_than_its_cap_cuts_it_and_keeps_nothing() -> None:
    index = Index()
    index.add(A)
    subscriber = index.subscribe(cap=10_000)
    everything(subscriber)
    for start in range(0, 3000, 100):
        index.store(A, *range(start + 1, start + 101))
    assert subscriber.is_overflowed
    assert not subscriber._waiting


def test_a_cap_that_not_even_all_statuses_fit_into_cuts_nobody_at_the_beginning() -> None:
    """Who had fewer than 128 bytes a source was cut at once, whenever it resumed."""
    index, copy = Index(), IndexFeed()
    sources = [Source(n) for n in range(1, 41)]
    for source in sources:
        index.add(source, source.worker_id)
    subscriber = index.subscribe(cap=100)
    give(copy, everything(subscriber))
    assert not subscriber.is_overflowed
    assert {frozenset(held(copy, one)) for one in sources} == {
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
    """Two indexes that are told the same, and what is true at each position."""

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
            index.tell()

    def turn(self, index: Index, source: Source) -> None:
        """Makes a source load-only, or ends that: its publisher sends what is demanded."""
        if not index.feed.is_load_only(source):
            index.feed.make_load_only(source, 0.0)
            index.tell()
            return
        index.feed.end_load_only(source, 0.0)
        index.tell()
        all_of_it = array(sorted(self.truth[source]))
        snapshot = SnapshotChunk(source, *self.at[source], all_of_it, first=True, last=True)
        run_all_steps(index.feed.load(snapshot, 0.0))
        index.tell()


@pytest.mark.parametrize("seed", range(30))
def test_a_copy_is_never_wrong_and_right_in_the_end(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets that change while they are read in parts of three blocks; frames of any size; an index
    that is lost for another; sources that are load-only for a while, in one of them."""
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
                assert held(copy, mine.source) == expected
        for feed in (*(one.feed for one in pair.indexes), copy):
            feed.sweep(256)
    give(copy, everything(subscriber))
    for source in sources:
        assert copy.status(source) == index.feed.status(source)
        assert held(copy, source) == held(index.feed, source)
        is_here = not index.feed.is_load_only(source)
        assert held(copy, source) == (pair.truth[source] if is_here else set())
    assert demands(copy) == [], "it never has to subscribe again"
