"""Requirements of every index kind of a router: rules of S1.C and S1.E, pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest, MeshError, Unavailable
from common.kv.events import (
    EventBatch,
    EventKind,
    KvEvent,
    Partition,
    Source,
    SourcePosition,
    SourceStatus,
)
from common.kv.hashing import hashes_to_bytes
from common.kv.index_feed import IndexFeed, run_all_steps
from common.kv.load import Load
from common.kv.prefix_index import SourceMatch
from common.request.placement import Placement, Query
from common.runtime.config import ConfigError, read_config
from indexer_svc.core.history import BatchHistory
from indexer_svc.core.subscriber import BatchUpdate, LoadUpdate, StatusUpdate, Subscriber
from router_svc.config import RouterConfig
from router_svc.core.booking import BookingKey
from router_svc.core.candidate import Candidate
from router_svc.core.overlap import Index, IndexSettings, IndexStatus, NoIndex, Overlaps
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS, Selection
from tests.kit import instances
from tests.kit.instances import snapshot_of

PART = Partition("m", 16, 1)
ONE, TWO = Source(1), Source(2, 3)
BLOCKS = np.arange(1, 9, dtype=np.uint64)
worker = partial(instances.worker, kv_index="events")


def query(count: int = 8) -> Query:
    return Query("m", 16 * count, hashes_to_bytes(BLOCKS[:count]), 1, 16)


def stored(source: Source, sequence: int, *keys: int) -> EventBatch:
    event = KvEvent(EventKind.STORED, np.array(keys, dtype=np.uint64))
    return EventBatch(source, 1, sequence, [event])


def removed(source: Source, sequence: int, *keys: int) -> EventBatch:
    event = KvEvent(EventKind.REMOVED, np.array(keys, dtype=np.uint64))
    return EventBatch(source, 1, sequence, [event])


class Fed:
    """A replica: applies events to a feed and answers queries."""

    def __init__(self) -> None:
        self.feed = IndexFeed()

    def match(self, query: Query) -> list[SourceMatch]:
        return self.feed.match(PART, np.frombuffer(query.prefix_hashes, "<u8").astype(np.uint64))

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("exact", "", 0.0)

    def register_source(self, *sources: Source) -> None:
        for source in sources:
            self.feed.register_source(PART, SourcePosition(source, 1, 0), 0.0)

    def apply(self, *batches: EventBatch) -> None:
        for batch in batches:
            run_all_steps(self.feed.apply(batch, 0.0))


def replica() -> Index:
    fed = Fed()
    fed.register_source(ONE, TWO)
    fed.apply(stored(ONE, 1, *range(1, 6)), stored(TWO, 1, 1, 2))
    return fed


def overlaps(choice: IndexSettings, index: Index | None = None) -> Overlaps:
    one = Overlaps(replica() if index is None else index, choice)
    one.update_workers([worker(1), worker(2, dp_size=4)])
    return one


def approximate() -> Overlaps:
    one = overlaps(RouterConfig(kv_events=False).index_settings)
    one.record_placement(query(5), Placement(*ONE), 0.0)
    one.record_placement(query(2), Placement(*TWO), 0.0)
    return one


KINDS: dict[str, Callable[[], Overlaps]] = {
    "events": lambda: overlaps(RouterConfig().index_settings),
    "approx": approximate,
}


# Types (S1.C).


@pytest.mark.row("S1-32", "S1-37")
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_per_worker_rank_and_omit_ranks_without_blocks(kind: str) -> None:
    matches = KINDS[kind]().matches(query())
    assert {tuple(at): row.device_blocks for at, row in matches.items()} == {(1, 0): 5, (2, 3): 2}
    assert matches[Placement(2, 3)].device_blocks == 2, "the row is that of the placement"
    at = Placement(worker_id=2, dp_rank=3)
    assert (at.worker_id, at.dp_rank) == (2, 3)


@pytest.mark.row("S1-32", "S1-48")
def test_no_index_gives_empty_scores_and_never_an_error() -> None:
    assert list(NoIndex().match(query())) == []
    none = overlaps(RouterConfig(overlap_score_credit=0.0).index_settings)
    assert len(none.matches(query())) == 0
    assert len(none.matches(Query("m", 128))) == 0


@pytest.mark.row("S1-37")
def test_a_selection_has_the_candidate_its_rank_and_the_reason() -> None:
    chosen = Candidate(Placement(2, 3), worker(2, dp_size=4))
    choice = Selection(chosen, "chosen by the test")
    assert (choice.candidate.placement, choice.reason) == (Placement(2, 3), "chosen by the test")
    router = Router(SELECTORS["kv"](), index=replica())
    router.update(snapshot_of(worker(1), worker(2, dp_size=4)), 0.0)
    decision = router.decide(query(), None, 0.0, Random(0))
    assert isinstance(decision.decision.worker, Placement)
    assert decision.decision.overlap_blocks == 5


@pytest.mark.row("S1-33")
def test_an_event_belongs_to_one_rank_of_one_worker_and_to_no_other() -> None:
    fed = Fed()
    fed.register_source(Source(1, 0), Source(1, 1), Source(2, 0))
    fed.apply(stored(Source(1, 1), 1, 1, 2, 3))
    assert fed.match(query()) == [SourceMatch(Source(1, 1), 3, 3, 3)]


# Which index (S1.E).


@pytest.mark.row("S1-41")
def test_a_worker_without_events_uses_one_of_three_index_kinds() -> None:
    kinds = {
        RouterConfig(overlap_score_credit=credit, kv_events=events).index_settings.kind
        for credit, events in itertools.product((0.0, 1.0), (False, True))
    }
    assert kinds == {"none", "approx", "events"}
    fed = Fed()
    fed.register_source(ONE)
    fed.apply(stored(ONE, 1, 1, 2, 3))
    mixed = Overlaps(fed, RouterConfig().index_settings)
    mixed.update_workers([worker(1), worker(2, kv_index="approx"), worker(3, kv_index="none")])
    for placement in (Placement(2, 0), Placement(3, 0)):
        mixed.record_placement(query(4), placement, 0.0)
    assert {at[0]: row.device_blocks for at, row in mixed.matches(query()).items()} == {1: 3, 2: 4}


@pytest.mark.row("S1-44", "S1-101")
@pytest.mark.parametrize("name", ["--router-event-threads", "KVMESH_ROUTER_ROUTER_EVENT_THREADS"])
def test_the_event_threads_setting_is_rejected_by_name(name: str) -> None:
    """Events are applied in slices on the event loop; the next tests check uses of threads."""
    flags, variables = ([], {name: "4"}) if name.startswith("KV") else ([name, "4"], {})
    with pytest.raises(ConfigError) as refused:
        read_config(RouterConfig, "ROUTER", variables, flags)
    assert name in str(refused.value)


@pytest.mark.row("S1-44", "S1-55")
def test_a_query_during_a_batch_sees_the_part_applied_so_far() -> None:
    fed = Fed()
    fed.register_source(ONE, TWO)
    fed.apply(stored(TWO, 1, 1, 2))
    keys = range(1, 5001)
    steps = fed.feed.apply(stored(ONE, 1, *keys), 0.0)
    seen = []
    chain = np.array(keys, dtype=np.uint64)
    for _ in steps:
        rows = {row.source: row.device_blocks for row in fed.feed.match(PART, chain)}
        seen.append(rows.get(ONE, 0))
        assert rows[TWO] == 2, "other sources are not affected"
    assert len(seen) > 3
    assert seen == sorted(seen)
    assert {row.source: row.device_blocks for row in fed.feed.match(PART, chain)}[ONE] == 5000


@pytest.mark.row("S1-55")
@settings(max_examples=60, deadline=None)
@given(order=st.permutations([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]), data=st.data())
def test_events_of_a_source_are_applied_in_order_regardless_of_arrival(
    order: list[int], data: st.DataObject
) -> None:
    """Three sources store and remove the same block in turn; only the order within one matters."""
    fed = Fed()
    sources = [Source(n + 1) for n in range(3)]
    fed.register_source(*sources)
    last = (stored(sources[0], 4, 1, 2), removed(sources[1], 4, 1), stored(sources[2], 4, 1, 2))
    scripts = {
        source: data.draw(
            st.permutations(
                [stored(source, 1, 1), removed(source, 2, 1), stored(source, 3, 1), last[n]]
            )
        )
        for n, source in enumerate(sources)
    }
    for n in order:
        fed.apply(scripts[sources[n]].pop(0))
    held = {row.source.worker_id: row.device_blocks for row in fed.match(query())}
    assert held == {1: 2, 3: 2}, (
        "the last event of each source counts; the second source removed its blocks"
    )


@pytest.mark.row("S1-52")
@pytest.mark.parametrize("kind", KINDS)
def test_removing_a_worker_removes_all_its_ranks(kind: str) -> None:
    if kind == "events":
        fed = Fed()
        ranks = [Source(2, n) for n in range(4)]
        fed.register_source(ONE, *ranks)
        for source in (ONE, *ranks):
            fed.apply(stored(source, 1, 1, 2))
        known = overlaps(RouterConfig().index_settings, fed)
        assert len(known.matches(query())) == 5
    else:
        known = approximate()
        for rank in range(4):
            known.record_placement(query(2), Placement(2, rank), 0.0)
    known.update_workers([worker(1)])
    known.forget(2)
    known.forget(404)
    assert {at[0] for at in known.matches(query())} == {1}


@pytest.mark.row("S1-50")
def test_a_decision_inserts_predicted_entries_only_with_an_index() -> None:
    for choice, inserted in (
        (RouterConfig(kv_events=False).index_settings, 8),
        (RouterConfig().index_settings, 8),
        (RouterConfig(router_predicted_ttl_secs=0.0).index_settings, 5),
        (RouterConfig(overlap_score_credit=0.0).index_settings, 0),
    ):
        known = overlaps(choice)
        known.record_placement(query(), Placement(*ONE), 0.0)
        row = known.matches(query()).get((1, 0))
        assert (0 if row is None else row.device_blocks) == inserted, choice.reason


@pytest.mark.row("S1-51")
def test_an_invalid_event_is_a_typed_error_and_affects_no_other_source() -> None:
    fed = Fed()
    fed.register_source(ONE)
    fed.apply(stored(ONE, 1, 1, 2))
    with pytest.raises(InvalidRequest) as refused:
        fed.apply(stored(TWO, 1, 1))
    assert refused.value.reason == "UNKNOWN_SOURCE"
    fed.apply(removed(ONE, 2, 999, 2))
    assert fed.match(query()) == [SourceMatch(ONE, 1, 1, 1)], (
        "an absent block does not stop the removal"
    )


# A loads-only subscription gets no events (S1-54, the trap), and none are queued.


class Indexer:
    """The feed of an indexer with one subscriber."""

    def __init__(self, *, loads_only: bool) -> None:
        self.feed = IndexFeed()
        self.feed.register_source(PART, SourcePosition(ONE, 1, 0), 0.0)
        histories: dict[Source, BatchHistory] = {}
        self.subscriber = Subscriber(
            self.feed,
            histories,
            [],
            None,
            10**6,
            is_absent=lambda worker_id: False,
            loads_only=loads_only,
        )

    def publish(self, batches: Iterable[EventBatch]) -> None:
        for batch in batches:
            run_all_steps(self.feed.apply(batch, 0.0))
            self.subscriber.batch(BatchUpdate(batch))

    def drain(self) -> list[object]:
        updates: list[object] = []
        while self.subscriber.has_more:
            updates += self.subscriber.take()
        return updates


@pytest.mark.row("S1-54")
def test_no_events_are_queued_for_a_loads_only_subscription() -> None:
    batches = [stored(ONE, n, *range(100 * n, 100 * n + 100)) for n in range(1, 2001)]
    subscribed = Indexer(loads_only=False)
    subscribed.drain()
    subscribed.publish(batches)
    assert subscribed.subscriber.is_overflowed, "the queue limit is reached"
    spared = Indexer(loads_only=True)
    spared.drain()
    spared.publish(batches)
    assert not spared.subscriber.is_overflowed
    assert not spared.subscriber.has_more
    spared.subscriber.source_replaced(ONE)
    spared.subscriber.status_changed(ONE, PART, SourceStatus("exact"))
    for running in range(1000):
        spared.subscriber.load(LoadUpdate(ONE, Load(running=running)), PART)
    updates = spared.drain()
    assert [one for one in updates if isinstance(one, LoadUpdate)] == [
        LoadUpdate(ONE, Load(running=999))
    ]
    assert {one.status.state for one in updates if isinstance(one, StatusUpdate)} == {"gapped"}
    assert not any(hasattr(one, "hashes") or hasattr(one, "events") for one in updates)


@pytest.mark.row("S1-54")
def test_a_loads_only_subscription_still_receives_that_a_source_is_gone() -> None:
    spared = Indexer(loads_only=True)
    spared.drain()
    spared.feed.forget(ONE, "left")
    spared.subscriber.status_changed(ONE, PART, SourceStatus("gone", "left"))
    assert spared.drain() == [StatusUpdate(ONE, PART, SourceStatus("gone", "left"))]


# Errors of an index (S1-78).


class Failing:
    """An index that fails every query."""

    def match(self, query: Query) -> list[SourceMatch]:
        raise Unavailable("the index is gone", reason="INDEX_GONE")

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("none")


@pytest.mark.row("S1-78", "S1-108")
def test_an_error_of_the_index_reaches_the_caller_and_leaves_no_booking() -> None:
    router = Router(SELECTORS["kv"](), index=Failing())
    router.update(snapshot_of(worker(1)), 0.0)
    for query_index in (
        lambda: router.match(query()),
        lambda: router.decide(query(), BookingKey(7, "r", 0), 0.0, Random(0)),
        lambda: router.potential_loads(query(), 0.0),
    ):
        with pytest.raises(MeshError) as failed:
            query_index()
        assert failed.value.reason == "INDEX_GONE"
    assert len(router.load_tracker) == 0
    assert [row.load.requests for row in router.loads("m", 0.0)] == [0]
