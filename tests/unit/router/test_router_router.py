"""Decisions: fleet, load tracker and selector together."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    UnknownModel,
    Unsupported,
)
from common.kv.events import Source
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance
from common.request.placement import Placement, Query
from common.request.preprocessed import RouterConfigOverride, RoutingHints
from router_svc.core.candidate import Candidate, LoadTotals
from router_svc.core.cost import CostSettings
from router_svc.core.decision import CONSIDERED_MAX
from router_svc.core.load_tracker import ORPHAN_S, LoadTracker
from router_svc.core.overlap import IndexStatus
from router_svc.core.placement import SELECTOR_FAILED
from router_svc.core.router import Router
from router_svc.core.scoring import View, score_candidates
from router_svc.core.selectors import SELECTORS, Selection, WorkerSelector
from tests.kit.bookings import FRONTEND, key
from tests.kit.instances import snapshot_of, worker

# A compiled module checks the type of what it receives.
NO_SELECTION_ERROR = (
    "TypeError"
    if str(sys.modules[Router.__module__].__file__).endswith(".so")
    else "AttributeError"
)
QUERY = Query("m", total_tokens=100)


def router_of(
    *instances: Instance, selector: str | WorkerSelector = "least_loaded", **options: Any
) -> Router:
    chooser = SELECTORS[selector]() if isinstance(selector, str) else selector
    router = Router(chooser, **options)
    router.update(snapshot_of(*(instances or (worker(1), worker(2), worker(3), worker(4)))), 0.0)
    return router


def book(router: Router, number: int, query: Query = QUERY, now: float = 0.0) -> int:
    """Decide and book; the selected worker."""
    return router.decide(query, key(number), now, Random(number)).decision.worker.worker_id


def total(router: Router, now: float = 0.0) -> LoadTotals:
    rows = [row.load for row in router.loads("", now)]
    return LoadTotals(
        sum(r.prefill_tokens for r in rows),
        sum(r.decode_blocks for r in rows),
        sum(r.requests for r in rows),
    )


class FakeIndex:
    """An index with the same result for every query: cached blocks by worker id."""

    def __init__(self, depths: dict[int, int]) -> None:
        self.depths = depths

    def match(self, query: Query) -> list[SourceMatch]:
        return [SourceMatch(Source(w), d, d, d) for w, d in self.depths.items() if d]

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("exact", "", 0.0)


class Always:
    """Selects one worker at any load."""

    name = "always"

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        self.calls: list[tuple[Query, Sequence[Candidate]]] = []

    def select(
        self, query: Query, candidates: Sequence[Candidate], view: View, rng: Random
    ) -> Selection:
        self.calls.append((query, candidates))
        mine = [c for c in candidates if c.placement.worker_id == self.worker_id]
        return Selection((mine or list(candidates))[0], "the preferred one")


@pytest.mark.row("S1-40")
def test_a_custom_selector_is_really_used() -> None:
    preferred = Always(3)
    router = router_of(selector=preferred)
    assert {book(router, n) for n in range(20)} == {3}
    assert len(preferred.calls) == 20
    query, candidates = preferred.calls[0]
    assert query == QUERY
    assert [c.instance.id for c in candidates] == [1, 2, 3, 4]
    assert (
        router.decide(QUERY, None, 0.0, Random(0)).decision.reasons[0]
        == "always: the preferred one"
    )


class Broken(Always):
    """Returns the given value, or raises it."""

    def __init__(self, answer: object) -> None:
        super().__init__(1)
        self.answer = answer

    def select(
        self, query: Query, candidates: Sequence[Candidate], view: View, rng: Random
    ) -> Selection:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Selection(Candidate(Placement(99, 0), worker(99)), "?"), "it chose no candidate"),
        (None, f"it raised {NO_SELECTION_ERROR}"),
        (KeyError("gpus"), "it raised KeyError"),
    ],
    ids=["an unknown worker", "no selection", "an error"],
)
def test_a_selector_failure_is_reported_with_its_cause_and_books_nothing(
    answer: object, why: str
) -> None:
    router = router_of(selector=Broken(answer))
    with pytest.raises(InternalError) as caught:
        book(router, 1)
    error = caught.value
    assert (error.reason, error.metadata) == (SELECTOR_FAILED, {"selector": "always", "model": "m"})
    assert error.message == f"the selector 'always' failed: {why}"
    assert error.retryable, "nothing ran, and another router may succeed"
    assert error.__cause__ is (answer if isinstance(answer, Exception) else error.__cause__)
    assert len(router.load_tracker) == 0


def test_a_mesh_error_of_a_selector_is_returned_unchanged() -> None:
    refusal = Overloaded(2.0, "not today")
    with pytest.raises(Overloaded) as caught:
        book(router_of(selector=Broken(refusal)), 1)
    assert caught.value is refusal


@pytest.mark.row("S1-106")
def test_a_booking_is_seen_by_the_next_decision() -> None:
    router = router_of()
    first_four = [book(router, n) for n in range(4)]
    assert sorted(first_four) == [1, 2, 3, 4], "each sees the bookings before it"


@pytest.mark.row("S1-105")
def test_a_thousand_interleaved_decisions_double_and_lose_nothing() -> None:
    router = router_of()
    rng = Random(5)
    live: dict[int, int] = {}
    for number in range(1000):
        live[number] = book(router, number)
        if rng.random() < 0.5:
            gone = rng.choice(sorted(live))
            assert router.load_tracker.free(key(gone))
            del live[gone]
        counts = Counter(live.values())
        assert {r.placement.worker_id: r.load.requests for r in router.loads("", 0.0)} == {
            w: counts[w] for w in (1, 2, 3, 4)
        }
    for number in live:
        assert router.load_tracker.free(key(number))
    assert total(router) == LoadTotals()
    assert len(router.load_tracker) == 0


@pytest.mark.parametrize(
    ("selector", "low", "high"),
    [("kv", 25, 25), ("least_loaded", 25, 25), ("round_robin", 25, 25), ("power_of_two", 22, 28)],
)
def test_a_hundred_concurrent_requests_spread_over_equal_workers(
    selector: str, low: int, high: int
) -> None:
    router = router_of(selector=selector)
    shares = Counter(book(router, n) for n in range(100))
    assert all(low <= shares[w] <= high for w in (1, 2, 3, 4)), shares


def test_the_same_key_gets_the_same_decision_and_one_booking() -> None:
    router = router_of()
    first = router.decide(QUERY, key(), 0.0, Random(0))
    load = total(router)
    for seed in range(10):
        assert router.decide(QUERY, key(), 1.0, Random(seed)) == first
    assert total(router) == load == LoadTotals(100, 7, 1)


def test_the_same_key_gets_another_worker_if_its_own_left() -> None:
    router = router_of(worker(1), worker(2))
    first = book(router, 0)
    router.update(snapshot_of(worker(3 - first)), 1.0)
    assert book(router, 0) == 3 - first
    assert total(router) == LoadTotals(100, 7, 1)


def test_a_reregistered_booking_keeps_its_worker() -> None:
    router = router_of()
    booked = router.decide(QUERY, key(), 0.0, Random(0))
    held = router.load_tracker.get(key())
    assert held is not None
    successor = router_of()
    successor.load_tracker.reregister(held, None, 0.0)
    answer = successor.decide(QUERY, key(), 0.0, Random(1))
    assert (answer.decision.worker, answer.decision.reasons) == (
        booked.decision.worker,
        ("booked before",),
    )


@pytest.mark.row("S1-74")
def test_a_decision_without_key_books_nothing() -> None:
    router = router_of()
    before = total(router)
    router.decide(QUERY, None, 0.0, Random(0))
    router.preview(QUERY, 0.0, Random(0))
    assert total(router) == before == LoadTotals()


def test_round_robin_advances_without_bookings_but_not_by_a_preview() -> None:
    router = router_of(selector="round_robin")
    turns = []
    for _ in range(4):
        router.preview(QUERY, 0.0, Random(0))
        turns.append(router.decide(QUERY, None, 0.0, Random(0)).decision.worker.worker_id)
    assert turns == [1, 2, 3, 4]


def test_a_model_that_was_never_served_is_unknown() -> None:
    router = router_of()
    with pytest.raises(UnknownModel):
        router.decide(Query("nope"), key(), 0.0, Random(0))
    with pytest.raises(UnknownModel):
        router.potential_loads(Query("nope"), 0.0)
    assert len(router.load_tracker) == 0


def test_a_model_whose_last_worker_left_is_unavailable_and_retryable() -> None:
    router = router_of(worker(1))
    router.update(snapshot_of(), 1.0)
    with pytest.raises(Unavailable) as refused:
        router.decide(QUERY, key(), 1.0, Random(0))
    assert refused.value.reason == "NO_WORKER"
    assert refused.value.retryable
    assert refused.value.retry_after_s


def test_before_the_first_snapshot_no_model_is_called_unknown() -> None:
    with pytest.raises(Unavailable) as refused:
        Router(SELECTORS["random"]()).decide(QUERY, None, 0.0, Random(0))
    assert refused.value.reason == "FLEET_UNKNOWN"


@pytest.mark.parametrize(
    ("field", "hints"),
    [
        ("prefill_worker_id", RoutingHints(prefill_worker_id=1)),
        ("prefill_dp_rank", RoutingHints(prefill_dp_rank=0)),
    ],
)
def test_prefill_pins_are_rejected_by_name_if_requests_are_not_split(
    field: str, hints: RoutingHints
) -> None:
    query = replace(QUERY, routing=hints)
    with pytest.raises(Unsupported) as refused:
        router_of().decide(query, key(), 0.0, Random(0))
    assert refused.value.field == f"query.routing.{field}"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        (Query(""), "query.model"),
        (Query("m", 16, b"1234567", 1, 16), "query.prefix_hashes"),
        (Query("m", 16, bytes(8), 1, 0), "query.block_size"),
        (Query("m", 16, bytes(8), 0, 16), "query.hash_scheme"),
        (Query("m", 31, bytes(16), 1, 16), "query.total_tokens"),
    ],
)
def test_a_malformed_query_is_rejected_with_its_field(query: Query, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        router_of().decide(query, key(), 0.0, Random(0))
    assert refused.value.field == field


@pytest.mark.row("S1-67")
def test_a_booking_counts_all_prompt_tokens_and_whole_blocks() -> None:
    router = router_of(worker(1))
    book(router, 0)
    assert total(router) == LoadTotals(100, 7, 1), "100 tokens are 7 blocks of 16"


def test_cached_blocks_are_not_booked_and_the_last_token_is_always_computed() -> None:
    router = router_of(worker(1, kv_index="events"), index=FakeIndex({1: 4}))
    query = Query("m", 64, bytes(32), 1, 16)
    record = router.decide(query, key(), 0.0, Random(0))
    assert (record.decision.overlap_blocks, record.decision.predicted_cached_tokens) == (4, 48)
    assert total(router) == LoadTotals(16, 4, 1)


def test_prefill_is_not_booked_if_the_request_overrides_it() -> None:
    router = router_of(worker(1))
    override = RouterConfigOverride(track_prefill_tokens=False)
    router.decide(replace(QUERY, config_override=override), key(), 0.0, Random(0))
    assert total(router) == LoadTotals(0, 7, 1)


@pytest.mark.row("S1-86")
def test_potential_loads_have_one_row_per_rank_with_the_request_on_it() -> None:
    router = router_of(worker(1, dp_size=2), worker(2))
    router.load_tracker.book(
        replace(_any_booking(), worker=Placement(1, 1)),
        router.load_tracker.open_session(FRONTEND),
        0.0,
    )
    rows = router.potential_loads(QUERY, 0.0)
    assert rows == {
        Placement(1, 0): LoadTotals(100, 7, 1),
        Placement(1, 1): LoadTotals(200, 14, 2),
        Placement(2, 0): LoadTotals(100, 7, 1),
    }


def _any_booking() -> Any:
    router = router_of(worker(1))
    router.decide(QUERY, key(), 0.0, Random(0))
    return router.load_tracker.get(key())


@pytest.mark.row("S1-107")
def test_a_worker_that_left_is_never_selected_again() -> None:
    router = router_of()
    router.update(snapshot_of(worker(2), worker(3), worker(4)), 1.0)
    assert 1 not in {book(router, n) for n in range(50)}


def test_bookings_of_a_worker_that_left_affect_no_other_worker() -> None:
    router = router_of(worker(1))
    book(router, 0)
    router.update(snapshot_of(worker(2)), 1.0)
    assert total(router) == LoadTotals()
    assert router.load_tracker.free(key(0)), "its frontend still ends it"


def test_orphans_count_for_three_seconds() -> None:
    router = router_of()
    session = router.load_tracker.open_session(FRONTEND)
    router.decide(QUERY, key(), 0.0, Random(0), session)
    router.load_tracker.end_session(session, 1.0)
    assert total(router, 1.0 + ORPHAN_S - 0.1).requests == 1
    assert total(router, 1.0 + ORPHAN_S) == LoadTotals()


def test_a_decision_ignores_expired_orphans() -> None:
    router = router_of(worker(1), worker(2))
    session = router.load_tracker.open_session(FRONTEND)
    busy = router.decide(QUERY, key(), 0.0, Random(0), session).decision.worker
    router.load_tracker.end_session(session, 1.0)
    chosen = {router.decide(QUERY, None, 3.9, Random(seed)).decision.worker for seed in range(20)}
    assert busy not in chosen
    chosen = {router.decide(QUERY, None, 4.0, Random(seed)).decision.worker for seed in range(20)}
    assert busy in chosen


def test_a_frontend_that_left_discovery_frees_its_orphans() -> None:
    frontend = Instance(FRONTEND, "mesh", "frontend", "", "127.0.0.1:1")
    router = router_of(worker(1), frontend)
    session = router.load_tracker.open_session(FRONTEND)
    router.decide(QUERY, key(), 0.0, Random(0), session)
    router.load_tracker.end_session(session, 1.0)
    router.update(snapshot_of(worker(1)), 1.1)
    assert total(router, 1.1) == LoadTotals()


def test_decisions_are_explained_with_all_candidates_cheapest_first() -> None:
    router = router_of(worker(1), worker(2), worker(3))
    busy = book(router, 0)
    query = replace(QUERY, excluded_worker_ids=frozenset({6, busy % 3 + 1}))
    preview = router.preview(query, 0.0, Random(0))
    rows = preview.considered
    assert [row.cost for row in rows[:-1]] == sorted(row.cost or 0 for row in rows[:-1])
    assert rows[0].placement == preview.decision.worker
    assert rows[1].placement.worker_id == busy
    assert rows[1].load == LoadTotals(100, 7, 1)
    assert rows[-1].placement.worker_id == busy % 3 + 1
    assert rows[-1].cost is None
    assert "failed" in rows[-1].excluded_reason


def test_candidates_without_a_cost_are_explained() -> None:
    router = router_of(selector="round_robin")
    rows = router.preview(QUERY, 0.0, Random(0)).considered
    assert [(r.placement.worker_id, r.cost) for r in rows] == [(n, None) for n in (1, 2, 3, 4)]


def test_recent_decisions_are_found_by_request_and_bounded() -> None:
    router = router_of(recent_max=3)
    for number in range(5):
        book(router, number)
    assert router.recent("r1") is None
    remembered = router.recent("r4")
    assert remembered is not None
    assert remembered.decision.worker.worker_id in (1, 2, 3, 4)
    again = router.decide(QUERY, key(4, attempt=1), 9.0, Random(0))
    assert router.recent("r4") is again, "the latest attempt"


def test_a_stored_decision_keeps_the_selected_candidate_and_a_bounded_number_of_others() -> None:
    router = router_of(*(worker(n) for n in range(1, 101)))
    for number in range(30):
        record = router.decide(QUERY, key(number), 0.0, Random(number))
        assert len(record.considered) == CONSIDERED_MAX
        assert record.decision.worker in {row.placement for row in record.considered}


@pytest.mark.parametrize("selector", ["kv", "least_loaded", "power_of_two"])
def test_the_cost_of_the_selected_candidate_is_stored_at_any_rank_of_cost(selector: str) -> None:
    hot = CostSettings(router_temperature=5.0 if selector == "kv" else 0.0)
    router = router_of(*(worker(n) for n in range(1, 41)), selector=selector, cost_settings=hot)
    ranks = set()
    for number in range(60):
        record = router.decide(QUERY, key(number), 0.0, Random(number))
        rows = record.considered
        (its,) = (row for row in rows if row.placement == record.decision.worker)
        assert its.cost is not None
        assert (its.terms is not None) == (selector == "kv")
        costs = [row.cost for row in rows if row.cost is not None]
        assert costs == sorted(costs)
        ranks.add(rows.index(its))
    assert selector != "kv" or len(ranks) > 1, "the temperature also selected expensive ones"


def test_candidates_without_a_cost_are_stored_with_the_selected_one_first() -> None:
    router = router_of(*(worker(n) for n in range(1, 41)), selector="round_robin")
    for number in range(12):
        record = router.decide(QUERY, key(number), 0.0, Random(0))
        rows = record.considered
        assert len({row.placement for row in rows}) == CONSIDERED_MAX
        assert rows[0].placement == record.decision.worker
        assert not any(row.cost or row.excluded_reason for row in rows)


def test_excluded_candidates_are_stored_with_reasons_while_rows_are_left() -> None:
    router = router_of(worker(1), worker(2), worker(3), selector="round_robin")
    query = replace(QUERY, excluded_worker_ids=frozenset({1}))
    rows = router.decide(query, key(0), 0.0, Random(0)).considered
    assert [(r.placement.worker_id, r.cost, bool(r.excluded_reason)) for r in rows] == [
        (2, None, False),
        (3, None, False),
        (1, None, True),
    ]


class Narrow:
    """Scores some candidates and selects another one."""

    name = "narrow"

    def select(
        self, query: Query, candidates: Sequence[Candidate], view: View, rng: Random
    ) -> Selection:
        return Selection(candidates[-1], "just so", score_candidates(query, candidates[:-1], view))


def test_a_selected_candidate_without_a_cost_is_stored_among_scored_ones() -> None:
    router = router_of(*(worker(n) for n in range(1, 41)), selector=Narrow())
    record = router.decide(QUERY, key(0), 0.0, Random(0))
    rows = record.considered
    assert len(rows) == CONSIDERED_MAX
    assert (rows[-1].placement, rows[-1].cost) == (record.decision.worker, None)


@pytest.mark.parametrize(
    ("selector", "override"),
    [
        ("least_loaded", {"router_temperature": 1.0}),
        ("round_robin", {"overlap_score_credit": 0.5}),
        ("random", {"prefill_load_scale": 2.0}),
        ("direct", {"overlap_score_weight": 0.0}),
        ("power_of_two", {"assume_kv_reuse": False}),
        ("kv", {"shared_cache_multiplier": 0.5}),
    ],
)
def test_overrides_without_effect_here_are_rejected_by_name(
    selector: str, override: dict[str, Any]
) -> None:
    router = router_of(selector=selector)
    query = replace(QUERY, config_override=RouterConfigOverride(**override))
    (name,) = override
    for ask in (
        lambda: router.decide(query, key(), 0.0, Random(0)),
        lambda: router.potential_loads(query, 0.0),
    ):
        with pytest.raises(Unsupported) as caught:
            ask()
        assert caught.value.field == f"query.config_override.{name}"
    assert len(router.load_tracker) == 0


def test_a_shared_cache_multiplier_of_zero_is_accepted() -> None:
    query = replace(QUERY, config_override=RouterConfigOverride(shared_cache_multiplier=0.0))
    router_of(selector="kv").decide(query, None, 0.0, Random(0))


@settings(max_examples=60)
@given(
    tokens=st.lists(st.integers(0, 5000), min_size=1, max_size=30),
    selector=st.sampled_from(["kv", "random", "least_loaded", "power_of_two", "round_robin"]),
    seed=st.integers(0, 2**32),
)
def test_after_all_frees_every_load_is_zero(tokens: list[int], selector: str, seed: int) -> None:
    router = router_of(
        worker(1, dp_size=2), worker(2), selector=selector, load_tracker=LoadTracker(100)
    )
    rng = Random(seed)
    for number, count in enumerate(tokens):
        query = Query("m", count)
        first = router.decide(query, key(number), 0.0, rng)
        assert router.decide(query, key(number), 0.0, rng) == first
        if rng.random() < 0.5:
            router.load_tracker.mark_prefill_done(key(number))
        if rng.random() < 0.5:
            router.load_tracker.add_output_blocks(key(number), 3, rng.random())
    assert total(router).requests == len(tokens)
    for number in range(len(tokens)):
        assert router.load_tracker.free(key(number))
        assert not router.load_tracker.free(key(number))
    assert total(router) == LoadTotals()
