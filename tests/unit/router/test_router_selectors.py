"""Filters and built-in selectors."""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest, Unavailable
from common.registry.instances import Instance
from common.request.placement import Placement, Query
from common.request.preprocessed import RoutingConstraints, RoutingHints
from router_svc.core.booking import Booking, BookingKey
from router_svc.core.candidate import Candidate, LoadTotals
from router_svc.core.eligibility import eligible
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.scoring import View, load_cost, preferred_taint_factor
from router_svc.core.selectors import SELECTORS, WorkerSelector


def candidate(worker_id: int, dp_rank: int = 0, taints: frozenset[str] = frozenset()) -> Candidate:
    instance = Instance(
        worker_id, "mesh", "worker", "", "127.0.0.1:1", model="m", taints=taints, dp_size=4
    )
    return Candidate(Placement(worker_id, dp_rank), instance)


FOUR = [candidate(n) for n in (1, 2, 3, 4)]


def busy(*workers: int, tokens: int = 160) -> LoadTracker:
    """A tracker with one booking for each mention of a worker."""
    load_tracker = LoadTracker()
    session = load_tracker.open_session(7)
    for number, worker in enumerate(workers):
        key = BookingKey(7, f"r{number}", 0)
        load_tracker.book(Booking(key, "m", Placement(worker, 0), None, tokens), session, 0.0)
    return load_tracker


def chosen(
    name: str,
    load_tracker: LoadTracker,
    *,
    candidates: list[Candidate] = FOUR,
    query: Query | None = None,
    last: Placement | None = None,
    seed: int = 0,
) -> int:
    view = View(load_tracker, 0.0, last)
    choice = SELECTORS[name]().select(query or Query("m"), candidates, view, Random(seed))
    return choice.candidate.placement.worker_id


def hinted(**hints: Any) -> Query:
    return Query("m", routing=RoutingHints(**hints))


def kept(query: Query, candidates: list[Candidate] = FOUR) -> list[Placement]:
    return [c.placement for c in eligible(query, candidates)[0]]


def workers(placements: list[Placement]) -> list[int]:
    return [p.worker_id for p in placements]


def test_round_robin_takes_each_in_turn_also_when_workers_leave() -> None:
    load_tracker = LoadTracker()
    assert chosen("round_robin", load_tracker) == 1
    assert chosen("round_robin", load_tracker, last=Placement(1, 0)) == 2
    assert chosen("round_robin", load_tracker, last=Placement(4, 0)) == 1
    without_2 = [FOUR[0], FOUR[2], FOUR[3]]
    assert chosen("round_robin", load_tracker, last=Placement(2, 0), candidates=without_2) == 3


def test_random_draws_all_candidates_equally_often() -> None:
    drawn = Counter(chosen("random", busy(1, 1, 1), seed=seed) for seed in range(400))
    assert set(drawn) == {1, 2, 3, 4}
    assert all(60 <= count <= 140 for count in drawn.values()), drawn


def test_least_loaded_takes_the_idle_worker() -> None:
    assert chosen("least_loaded", busy(1, 2, 2, 4)) == 3


def test_least_loaded_counts_requests_of_unknown_length() -> None:
    assert chosen("least_loaded", busy(1, 2, 3, tokens=0)) == 4


def test_ties_are_broken_uniformly_at_random() -> None:
    drawn = Counter(chosen("least_loaded", busy(2), seed=seed) for seed in range(300))
    assert set(drawn) == {1, 3, 4}
    assert all(70 <= count <= 130 for count in drawn.values()), drawn


def test_power_of_two_never_takes_the_most_loaded_of_all() -> None:
    load_tracker = busy(1, 1, 1, 2, 2, 3)
    drawn = Counter(chosen("power_of_two", load_tracker, seed=seed) for seed in range(300))
    assert drawn[1] == 0
    assert drawn[4] > drawn[3] > drawn[2] > 0


def test_power_of_two_with_one_candidate_takes_it() -> None:
    assert chosen("power_of_two", busy(2), candidates=[candidate(2)]) == 2


@pytest.mark.row("S1-20")
def test_direct_refuses_a_request_without_pin() -> None:
    with pytest.raises(InvalidRequest) as refused:
        chosen("direct", LoadTracker())
    assert refused.value.reason == "PIN_REQUIRED"
    assert chosen("direct", busy(3), candidates=[FOUR[2]], query=hinted(decode_worker_id=3)) == 3


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_every_selector_takes_a_pinned_worker_and_reports_its_name(name: str) -> None:
    query = hinted(backend_instance_id=2)
    candidates = list(eligible(query, FOUR)[0])
    assert chosen(name, busy(2, 2), candidates=candidates, query=query) == 2
    selector: WorkerSelector = SELECTORS[name]()
    assert selector.name == name


def test_the_cost_is_in_blocks_and_a_request_counts_one() -> None:
    assert load_cost(LoadTotals(prefill_tokens=32, decode_blocks=5, requests=2), 16, 1.0) == 10.0


def test_a_preferred_taint_makes_a_worker_cheaper_within_bounds() -> None:
    worker = candidate(1, taints=frozenset({"fast"})).instance
    likes = RoutingConstraints(
        required_taints=frozenset(), preferred_taints={"fast": 9.0, "far": -5.0}
    )
    assert preferred_taint_factor(worker, likes) == pytest.approx(1 / math.e)
    assert preferred_taint_factor(candidate(2).instance, likes) == 1.0
    assert preferred_taint_factor(worker, None) == 1.0


def test_a_preferred_taint_decides_among_idle_workers_and_load_overrules_it() -> None:
    tainted = [candidate(1), candidate(2, taints=frozenset({"fast"}))]
    likes = RoutingConstraints(required_taints=frozenset(), preferred_taints={"fast": 1.0})
    query = hinted(routing_constraints=likes)
    for seed in range(20):
        assert chosen("least_loaded", busy(), candidates=tainted, query=query, seed=seed) == 2
        assert chosen("least_loaded", busy(2), candidates=tainted, query=query, seed=seed) == 1


def test_without_hints_all_candidates_are_eligible() -> None:
    assert eligible(Query("m"), FOUR) == (FOUR, [])


@pytest.mark.row("S1-73")
def test_only_allowed_workers_are_candidates_and_the_empty_set_allows_none() -> None:
    assert workers(kept(hinted(allowed_worker_ids=frozenset({2, 4, 99})))) == [2, 4]
    for no_candidates in (frozenset[int](), frozenset({99})):
        with pytest.raises(Unavailable) as refused:
            kept(hinted(allowed_worker_ids=no_candidates))
        assert refused.value.reason == "NO_ALLOWED_WORKER"


def test_workers_that_failed_the_request_are_left_out() -> None:
    left, excluded = eligible(Query("m", excluded_worker_ids=frozenset({1, 2})), FOUR)
    assert [c.placement.worker_id for c in left] == [3, 4]
    assert [e.candidate.placement.worker_id for e in excluded] == [1, 2]
    with pytest.raises(Unavailable) as refused:
        kept(Query("m", excluded_worker_ids=frozenset({1, 2, 3, 4})))
    assert refused.value.reason == "ALL_EXCLUDED"
    assert refused.value.retryable


@pytest.mark.parametrize("pin", ["backend_instance_id", "decode_worker_id"])
def test_a_pin_leaves_one_worker(pin: str) -> None:
    assert workers(kept(hinted(**{pin: 3}))) == [3]
    with pytest.raises(Unavailable) as refused:
        kept(hinted(**{pin: 99}))
    assert refused.value.reason == "PINNED_WORKER_GONE"
    assert refused.value.field == f"query.routing.{pin}"
    assert f"no worker is 99, as {pin} requires" in refused.value.message


def test_two_pins_must_agree() -> None:
    assert workers(kept(hinted(backend_instance_id=3, decode_worker_id=3))) == [3]
    with pytest.raises(InvalidRequest) as refused:
        kept(hinted(backend_instance_id=3, decode_worker_id=4))
    assert refused.value.field == "query.routing.decode_worker_id"


def test_a_rank_pin_leaves_that_rank() -> None:
    ranks = [candidate(n, rank) for n in (1, 2) for rank in (0, 1)]
    assert kept(hinted(dp_rank=1), ranks) == [(1, 1), (2, 1)]
    assert kept(hinted(backend_instance_id=2, dp_rank=0), ranks) == [(2, 0)]
    with pytest.raises(InvalidRequest) as refused:
        kept(hinted(dp_rank=5), ranks)
    assert refused.value.field == "query.routing.dp_rank"


def test_a_worker_must_have_every_required_taint() -> None:
    tainted = [
        candidate(1),
        candidate(2, taints=frozenset({"a"})),
        candidate(3, taints=frozenset({"a", "b", "c"})),
    ]
    needs = RoutingConstraints(required_taints=frozenset({"a", "b"}), preferred_taints={})
    assert workers(kept(hinted(routing_constraints=needs), tainted)) == [3]
    with pytest.raises(Unavailable) as refused:
        kept(hinted(routing_constraints=needs), tainted[:2])
    assert refused.value.reason == "NO_TAINTED_WORKER"
    assert refused.value.field == "query.routing.routing_constraints.required_taints"
    assert "required_taints ['a', 'b']" in refused.value.message


@given(
    allowed=st.none() | st.frozensets(st.integers(1, 5)),
    excluded=st.frozensets(st.integers(1, 5)),
    pin=st.none() | st.integers(1, 5),
)
def test_filters_split_the_candidates_or_name_a_reason(
    allowed: frozenset[int] | None, excluded: frozenset[int], pin: int | None
) -> None:
    hints = RoutingHints(allowed_worker_ids=allowed, backend_instance_id=pin)
    query = Query("m", routing=hints, excluded_worker_ids=excluded)
    may = {1, 2, 3, 4} - excluded
    if allowed is not None:
        may &= allowed
    if pin is not None:
        may &= {pin}
    if not may:
        with pytest.raises(Unavailable):
            eligible(query, FOUR)
        return
    left, out = eligible(query, FOUR)
    assert {c.placement.worker_id for c in left} == may
    assert {e.candidate.placement.worker_id for e in out} == {1, 2, 3, 4} - may
