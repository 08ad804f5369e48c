"""Decisions of more candidates than a router computes costs of."""

from __future__ import annotations

from random import Random

import pytest

from common.kv.events import Source
from common.kv.hashing import hashes_to_bytes
from common.kv.load import Load
from common.kv.prefix_index import PrefixIndex, SourceMatch
from common.request.placement import Placement, Query
from router_svc.core.booking import BookingKey
from router_svc.core.candidate import Candidate
from router_svc.core.overlap import IndexStatus
from router_svc.core.policy import Policy
from router_svc.core.router import Router
from router_svc.core.selectors import KvSelector, LeastLoadedSelector
from router_svc.core.shortlist import Shortlist
from tests.kit.instances import snapshot_of, worker
from tests.kit.kv_events import array

FLEET = 200
SIZE = 16


def candidates(count: int = FLEET) -> list[Candidate]:
    return [Candidate(Placement(n, 0), worker(n)) for n in range(1, count + 1)]


def held(*rows: tuple[int, int]) -> dict[tuple[int, int], SourceMatch]:
    return {(n, 0): SourceMatch(Source(n), depth, depth, depth) for n, depth in rows}


class Held:
    """An index in which a worker n holds the first blocks of the prompt 1, 2, …, 9."""

    def __init__(self, **depths: int) -> None:
        self.index = PrefixIndex(SIZE)
        for n in range(1, FLEET + 1):
            source = self.index.add_source(Source(n))
            self.index.set_visible(source, True)
            self.index.store(source, array(range(1, depths.get(f"w{n}", 1) + 1)))

    def match(self, query: Query) -> list[SourceMatch]:
        return self.index.match(array(range(1, 10)))

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("exact")


def router(index: Held, selector: KvSelector | LeastLoadedSelector | None = None) -> Router:
    made = Router(selector or KvSelector(), index=index, policy=Policy(candidates_max=SIZE))
    fleet = [worker(n, block_size=16, kv_index="events") for n in range(1, FLEET + 1)]
    made.update(snapshot_of(*fleet), 0.0)
    return made


def query() -> Query:
    return Query("m", 9 * 16, hashes_to_bytes(array(range(1, 10))), 1, 16)


def test_few_candidates_are_all_compared() -> None:
    few = candidates(SIZE)
    assert Shortlist(SIZE).choose(few, held((3, 4)), Random(1)) is few


def test_the_deepest_holders_are_compared_with_others_drawn_at_random() -> None:
    shortlist, seen = Shortlist(SIZE), set()
    matches = held(*((n, n) for n in range(1, 31)), (999, 90))
    for seed in range(50):
        chosen = [c.placement.worker_id for c in shortlist.choose(ALL, matches, Random(seed))]
        assert len(chosen) == SIZE
        assert chosen == sorted(chosen)
        assert {30, 29, 28, 27} <= set(chosen)
        seen.update(chosen)
    assert len(seen) > FLEET / 2


ALL = candidates()


def test_a_changed_fleet_is_compared_as_it_is_now() -> None:
    shortlist = Shortlist(SIZE)
    shortlist.choose(ALL, {}, Random(1))
    later = candidates(FLEET + 5)
    matches = held((FLEET + 5, 3))
    chosen = shortlist.choose(later, matches, Random(1))
    assert Placement(FLEET + 5, 0) in [c.placement for c in chosen]


def test_the_worker_with_most_of_the_prompt_is_found_in_a_large_fleet() -> None:
    made = router(Held(w77=8))
    for number in range(5):
        record = made.decide(query(), BookingKey(7, f"{number}", 1), 0.0, Random(number))
        assert record.decision.worker == Placement(77, 0)
        assert any("of 16 compared" in reason for reason in record.decision.reasons)
        made.load_tracker.free(BookingKey(7, f"{number}", 1))


def test_busy_workers_are_avoided_in_a_large_fleet() -> None:
    made = router(Held())
    for n in range(1, FLEET + 1):
        busy = Load(waiting=4, waiting_tokens=90_000) if n % 4 else Load()
        made.load_tracker.report(n, 0, busy, 0.0)
    placed = [
        made.decide(query(), BookingKey(7, f"{n}", 1), 0.0, Random(n)).decision.worker.worker_id
        for n in range(20)
    ]
    assert all(n % 4 == 0 for n in placed)
    assert len(set(placed)) > 10


def test_an_explanation_has_the_cost_of_every_candidate() -> None:
    made = router(Held(w77=8))
    rows = made.preview(query(), 0.0, Random(1)).considered
    assert len(rows) == FLEET
    assert all(row.cost is not None for row in rows)


def test_selectors_without_a_cost_get_all_candidates() -> None:
    made = router(Held(), LeastLoadedSelector())
    for n in range(1, FLEET + 1):
        made.load_tracker.report(n, 0, Load(waiting=1) if n != 150 else Load(), 0.0)
    record = made.decide(query(), None, 0.0, Random(1))
    assert record.decision.worker == Placement(150, 0)


@pytest.mark.parametrize("count", [40, 3000])
def test_an_index_returns_the_deepest_rows_up_to_its_limit(count: int) -> None:
    index = PrefixIndex(rows_max=10)
    for n in range(1, count + 1):
        source = index.add_source(Source(n))
        index.set_visible(source, True)
        index.store(source, array([1, 2] if n <= 4 else [1]))
    rows = index.match(array([1, 2, 3]))
    assert sorted(row.source.worker_id for row in rows if row.device_blocks == 2) == [1, 2, 3, 4]
    rest = {row.source.worker_id for row in rows if row.device_blocks == 1}
    assert len(rows) == 10
    assert len(rest) == 6
    other = {row.source.worker_id for row in index.match(array([1, 2, 77 << 8]))}
    assert other != {row.source.worker_id for row in rows}


def test_a_mask_of_many_sources_names_each_of_them_also_after_others_left() -> None:
    index = PrefixIndex()
    sources = []
    for n in range(1, 3001):
        sources.append(source := index.add_source(Source(n)))
        index.set_visible(source, True)
        index.store(source, array([1]))
    for source in sources[::3]:
        index.retire(source)
    while index.sweep(1000):
        pass
    kept = {n for n in range(1, 3001) if n % 3 != 1}
    assert {row.source.worker_id for row in index.match(array([1]))} == kept
    again = index.add_source(Source(5000))
    index.set_visible(again, True)
    index.store(again, array([1]))
    assert {row.source.worker_id for row in index.match(array([1]))} == kept | {5000}
