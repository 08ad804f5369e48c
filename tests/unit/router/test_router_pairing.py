"""Prefill and decode of one request on two workers: pairs, bookings and fallbacks."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest, MeshError, Unavailable
from common.kv.events import Source
from common.kv.load import Load
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance, Snapshot
from common.request.placement import Placement, Query
from common.request.preprocessed import RoutingConstraints, RoutingHints
from router_svc.core.booking import Booking
from router_svc.core.candidate import LoadTotals
from router_svc.core.decision import DecisionRecord
from router_svc.core.load_tracker import ORPHAN_S, LoadTracker
from router_svc.core.overlap import IndexStatus
from router_svc.core.pairing import BOOTSTRAP_ROOM_MAX, bootstrap_room
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from tests.kit import instances
from tests.kit.bookings import FRONTEND, key
from tests.kit.instances import snapshot_of

QUERY = Query("m", 160, bytes(range(80)), 1, 16)
P1, P2, D1, D2 = (Placement(n, 0) for n in (1, 2, 11, 12))


class Depths:
    """An index: blocks held by worker id."""

    def __init__(self, depths: dict[int, int]) -> None:
        self.depths = depths

    def match(self, query: Query) -> list[SourceMatch]:
        return [SourceMatch(Source(w), d, d, d) for w, d in self.depths.items()]

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("exact")


def worker(worker_id: int, role: str, **fields: Any) -> Instance:
    given = {"kv_index": "events", "local_prefill": role != "decode", **fields}
    if role == "prefill" and "bootstrap_port" not in fields:
        given |= {"bootstrap_host": f"host{worker_id}", "bootstrap_port": 8998}
    return instances.worker(worker_id, role, **given)


TWO_PAIRS = (worker(1, "prefill"), worker(2, "prefill"), worker(11, "decode"), worker(12, "decode"))


def router_of(*instances: Instance, depths: dict[int, int] | None = None, **options: Any) -> Router:
    selector = SELECTORS[options.pop("selector", "kv")]()
    router = Router(selector, index=Depths(depths or {}), **options)
    router.update(snapshot_of(*(instances or TWO_PAIRS)), 0.0)
    return router


def place(router: Router, number: int = 0, **changes: Any) -> DecisionRecord:
    return router.decide(replace(QUERY, **changes), key(number), 0.0, Random(number))


def hinted(**hints: Any) -> dict[str, Any]:
    return {"routing": RoutingHints(**hints)}


def loads(router: Router, now: float = 0.0) -> dict[Placement, LoadTotals]:
    return {r.placement: r.load for r in router.loads("", now) if r.load != LoadTotals()}


def refusal(router: Router, **changes: Any) -> MeshError:
    with pytest.raises((Unavailable, InvalidRequest)) as refused:
        place(router, **changes)
    assert len(router.load_tracker) == 0
    return refused.value


@pytest.mark.row("S1-18")
def test_prefill_follows_the_cache_and_decode_the_least_load() -> None:
    router = router_of(depths={2: 8, 11: 10})
    router.load_tracker.report(11, 0, Load(running=1, kv_used_blocks=5), 0.0)
    record = place(router)
    assert (record.decision.prefill, record.decision.worker) == (P2, D2)
    assert (record.decision.overlap_blocks, record.decision.predicted_cached_tokens) == (8, 128)
    assert record.fallback == ""


def test_decode_ignores_its_own_cache() -> None:
    router = router_of(depths={11: 10})
    drawn = {router.decide(QUERY, None, 0.0, Random(seed)).decision.worker for seed in range(40)}
    assert drawn == {D1, D2}


def test_each_leg_is_booked_on_its_worker_and_prefill_ends_before_decode() -> None:
    router = router_of(depths={1: 4})
    record = place(router)
    assert loads(router) == {
        P1: LoadTotals(160 - 64, 0, 1),
        record.decision.worker: LoadTotals(0, 10, 1),
    }
    assert router.load_tracker.mark_prefill_done(key())
    assert router.load_tracker.mark_prefill_done(key())
    assert loads(router) == {record.decision.worker: LoadTotals(0, 10, 1)}
    assert router.load_tracker.free(key())
    assert loads(router) == {}


def test_bookings_spread_both_legs() -> None:
    router = router_of()
    placed = [place(router, n) for n in range(8)]
    assert [sum(d.decision.prefill == p for d in placed) for p in (P1, P2)] == [4, 4]
    assert [sum(d.decision.worker == p for d in placed) for p in (D1, D2)] == [4, 4]


# Bootstrap rooms.


@given(seed=st.integers(0, 2**32), dp_size=st.integers(1, 64), rank=st.integers(0, 63))
def test_a_bootstrap_room_encodes_its_rank_and_fits_63_bits(
    seed: int, dp_size: int, rank: int
) -> None:
    rank %= dp_size
    room = bootstrap_room(Random(seed), dp_size, rank)
    assert 0 <= room <= BOOTSTRAP_ROOM_MAX
    assert room % dp_size == rank


def test_the_largest_bootstrap_rooms_stay_in_range() -> None:
    class Most(Random):
        def randrange(self, *args: Any) -> int:
            return int(args[0]) - 1

    for dp_size in (1, 2, 3, 7, 64):
        for rank in range(dp_size):
            assert bootstrap_room(Most(), dp_size, rank) <= BOOTSTRAP_ROOM_MAX


def test_each_pair_gets_its_own_bootstrap_room_on_the_prefill_rank() -> None:
    prefill = worker(1, "prefill", dp_size=4, bootstrap_host="h", bootstrap_port=9)
    router = router_of(prefill, worker(11, "decode"))
    rooms = set()
    for number in range(30):
        record = place(router, number)
        assert record.decision.prefill is not None
        assert record.decision.bootstrap is not None
        assert (
            record.decision.bootstrap.bootstrap_host,
            record.decision.bootstrap.bootstrap_port,
        ) == (
            "h",
            9,
        )
        assert record.decision.bootstrap.bootstrap_room % 4 == record.decision.prefill.dp_rank
        rooms.add(record.decision.bootstrap.bootstrap_room)
    assert len(rooms) == 30


def test_an_attempt_keeps_its_bootstrap_room_and_the_next_gets_another() -> None:
    router = router_of()
    first = place(router)
    assert place(router) == first
    router.load_tracker.free(key())
    again = router.decide(QUERY, key(attempt=1), 0.0, Random(9))
    assert again.decision.bootstrap != first.decision.bootstrap


def test_without_a_bootstrap_server_prefill_completes_first() -> None:
    prefill = worker(1, "prefill", bootstrap_host=None, bootstrap_port=None)
    record = place(router_of(prefill, worker(11, "decode")))
    assert (record.decision.prefill, record.decision.bootstrap) == (P1, None)


# Pairs.


def test_a_pair_never_crosses_transfer_groups() -> None:
    members = (
        worker(1, "prefill", transfer_group="a"),
        worker(2, "prefill", transfer_group="b"),
        worker(11, "decode", transfer_group="a"),
        worker(12, "decode", transfer_group="b"),
    )
    router = router_of(*members, depths={2: 10})
    router.load_tracker.report(12, 0, Load(running=9, kv_used_blocks=900), 0.0)
    for number in range(10):
        record = place(router, number)
        assert (record.decision.prefill, record.decision.worker) in {(P1, D1), (P2, D2)}
    preview = router.preview(QUERY, 0.0, Random(0))
    lost = [row for row in preview.considered if row.excluded_reason]
    assert [row.leg for row in lost] == ["decode"]
    assert "another transfer group" in lost[0].excluded_reason


def test_a_prefill_worker_without_partner_is_not_considered() -> None:
    members = (worker(1, "prefill", transfer_group="x"), *TWO_PAIRS[1:])
    router = router_of(*members, depths={1: 10})
    assert {place(router, n).decision.prefill for n in range(5)} == {P2}


def test_a_missing_transfer_group_is_reported_and_falls_back_to_unsplit_serving() -> None:
    apart = (worker(1, "prefill", transfer_group="a"), worker(11, "decode", transfer_group="b"))
    assert refusal(router_of(*apart)).reason == "NO_TRANSFER_GROUP"
    record = place(router_of(*apart, worker(21, "aggregated")))
    assert (record.decision.worker.worker_id, record.decision.prefill) == (21, None)
    assert record.fallback == "no_transfer_group"


def test_workers_that_failed_the_request_are_excluded_on_both_legs() -> None:
    router = router_of(depths={1: 10})
    record = place(router, excluded_worker_ids=frozenset({1, 11}))
    assert (record.decision.prefill, record.decision.worker) == (P2, D2)
    error = refusal(router_of(), excluded_worker_ids=frozenset({1, 2}))
    assert (error.reason, error.metadata["leg"]) == ("ALL_EXCLUDED", "prefill")
    error = refusal(router_of(), excluded_worker_ids=frozenset({11, 12}))
    assert (error.reason, error.metadata["leg"]) == ("ALL_EXCLUDED", "decode")


def test_both_legs_can_be_pinned() -> None:
    record = place(router_of(), **hinted(prefill_worker_id=2, decode_worker_id=11))
    assert (record.decision.prefill, record.decision.worker) == (P2, D1)
    ranked = router_of(worker(1, "prefill", dp_size=4), worker(11, "decode", dp_size=2))
    record = place(ranked, **hinted(prefill_dp_rank=3, dp_rank=1))
    assert (record.decision.prefill, record.decision.worker) == (
        Placement(1, 3),
        Placement(11, 1),
    )


@pytest.mark.parametrize(
    ("hints", "reason", "field"),
    [
        ({"prefill_worker_id": 99}, "PINNED_WORKER_GONE", "prefill_worker_id"),
        ({"prefill_dp_rank": 9}, "NO_SUCH_RANK", "prefill_dp_rank"),
        (
            {"prefill_worker_id": 1, "decode_worker_id": 99},
            "PINNED_WORKER_GONE",
            "decode_worker_id",
        ),
    ],
)
def test_a_prefill_pin_is_honoured_or_rejected_and_never_replaced(
    hints: dict[str, int], reason: str, field: str
) -> None:
    # The aggregated worker could serve it without the pin.
    router = router_of(*TWO_PAIRS, worker(21, "aggregated"))
    error = refusal(router, **hinted(**hints))
    assert (error.reason, error.field) == (reason, f"query.routing.{field}")


def test_constraints_hold_for_both_legs() -> None:
    tainted = [replace(i, taints=frozenset({"a"})) for i in TWO_PAIRS if i.id in (2, 12)]
    needs = RoutingConstraints(required_taints=frozenset({"a"}), preferred_taints={})
    router = router_of(TWO_PAIRS[0], TWO_PAIRS[2], *tainted)
    record = place(router, **hinted(routing_constraints=needs))
    assert (record.decision.prefill, record.decision.worker) == (P2, D2)
    record = place(router, 1, **hinted(allowed_worker_ids=frozenset({1, 12})))
    assert (record.decision.prefill, record.decision.worker) == (P1, D2)


# Fallbacks.


def test_pairs_come_before_aggregated_workers_unless_one_is_pinned() -> None:
    router = router_of(*TWO_PAIRS, worker(21, "aggregated"))
    assert all(place(router, n).decision.prefill is not None for n in range(10))
    pinned = place(router, 99, **hinted(backend_instance_id=21))
    assert (pinned.decision.worker.worker_id, pinned.decision.prefill, pinned.fallback) == (
        21,
        None,
        "",
    )


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ((worker(1, "prefill"),), "NO_DECODE_WORKER"),
        ((worker(11, "decode"),), "NO_PREFILL_WORKER"),
    ],
)
def test_a_missing_role_is_named(members: tuple[Instance, ...], reason: str) -> None:
    error = refusal(router_of(*members))
    assert (error.reason, error.retryable) == (reason, True)


@pytest.mark.parametrize(
    ("half", "fallback"),
    [(worker(1, "prefill"), "no_decode_worker"), (worker(11, "decode"), "no_prefill_worker")],
)
def test_a_missing_role_falls_back_to_aggregated_workers_and_is_reported(
    half: Instance, fallback: str
) -> None:
    record = place(router_of(half, worker(21, "aggregated")))
    assert record.decision.worker.worker_id == 21
    assert record.fallback == fallback
    assert f"aggregated fallback: {fallback.replace('_', ' ')}" in record.decision.reasons


def test_without_prefill_workers_a_decode_worker_that_can_prefill_does_both() -> None:
    router = router_of(worker(11, "decode", local_prefill=True), worker(12, "decode"))
    record = place(router)
    assert (record.decision.worker, record.decision.prefill, record.decision.bootstrap) == (
        D1,
        None,
        None,
    )
    assert record.fallback == "no_prefill_worker"
    assert "aggregated fallback: no prefill worker" in record.decision.reasons
    assert loads(router) == {D1: LoadTotals(160, 10, 1)}


def test_a_local_prefill_counts_the_cache_of_the_decode_worker() -> None:
    locals_ = [worker(n, "decode", local_prefill=True) for n in (11, 12)]
    record = place(router_of(*locals_, depths={12: 6}))
    assert (record.decision.worker, record.decision.overlap_blocks) == (D2, 6)


def test_when_all_prefill_workers_failed_a_request_a_local_prefill_serves_it() -> None:
    router = router_of(worker(1, "prefill"), worker(11, "decode", local_prefill=True))
    record = place(router, excluded_worker_ids=frozenset({1}))
    assert (record.decision.worker, record.fallback) == (D1, "no_prefill_worker")


def test_a_pinned_prefill_has_no_fallback() -> None:
    router = router_of(worker(11, "decode", local_prefill=True), worker(21, "aggregated"))
    assert refusal(router, **hinted(prefill_worker_id=1)).reason == "NO_PREFILL_WORKER"


def test_pairs_serve_again_once_both_roles_are_present() -> None:
    router = router_of(worker(1, "prefill"))
    assert refusal(router).reason == "NO_DECODE_WORKER"
    router.update(Snapshot(2, {i.id: i for i in TWO_PAIRS}), 1.0)
    assert place(router).decision.prefill is not None


# Other selectors.


@pytest.mark.parametrize("selector", ["random", "round_robin", "power_of_two", "least_loaded"])
def test_every_selector_chooses_pairs(selector: str) -> None:
    router = router_of(selector=selector)
    placed = [place(router, n) for n in range(12)]
    assert {d.decision.prefill for d in placed} == {P1, P2}
    assert {d.decision.worker for d in placed} == {D1, D2}


def test_round_robin_rotates_each_leg_separately() -> None:
    router = router_of(selector="round_robin")
    placed = [place(router, n) for n in range(4)]
    assert [d.decision.prefill for d in placed] == [P1, P2, P1, P2]
    assert [d.decision.worker for d in placed] == [D1, D2, D1, D2]


def test_direct_needs_both_pins() -> None:
    router = router_of(selector="direct")
    both = place(router, **hinted(prefill_worker_id=1, decode_worker_id=12))
    assert (both.decision.prefill, both.decision.worker) == (P1, D2)
    error = refusal(router_of(selector="direct"), **hinted(decode_worker_id=12))
    assert (error.reason, error.field) == ("PIN_REQUIRED", "query.routing.prefill_worker_id")


# Re-registered pairs.


def reregistered(revision: int = 1, prefill_tokens: int = 160, blocks: int = 10) -> Booking:
    return Booking(key(), "m", D1, P1, prefill_tokens, blocks, revision)


def test_a_reregistered_pair_is_booked_on_both_workers_until_prefill_is_done() -> None:
    router = router_of()
    load_tracker = router.load_tracker
    session = load_tracker.open_session(FRONTEND)
    assert load_tracker.reregister(reregistered(), session, 0.0)
    assert loads(router) == {P1: LoadTotals(160, 0, 1), D1: LoadTotals(0, 10, 1)}
    assert not load_tracker.reregister(reregistered(), session, 0.0), "no newer"
    assert load_tracker.reregister(
        reregistered(revision=3, prefill_tokens=0, blocks=12), session, 0.0
    )
    assert loads(router) == {D1: LoadTotals(0, 12, 1)}
    assert not load_tracker.reregister(reregistered(revision=2), session, 0.0), "older"
    assert loads(router) == {D1: LoadTotals(0, 12, 1)}
    load_tracker.free(key())
    assert loads(router) == {}


def test_an_orphaned_pair_counts_on_both_workers_for_three_seconds() -> None:
    router = router_of()
    session = router.load_tracker.open_session(FRONTEND)
    record = router.decide(QUERY, key(), 0.0, Random(0), session)
    router.load_tracker.end_session(session, 1.0)
    assert set(loads(router, 3.9)) == {record.decision.prefill, record.decision.worker}
    successor = router.load_tracker.open_session(FRONTEND)
    held = router.load_tracker.get(key())
    assert held is not None
    router.load_tracker.reregister(held, successor, 3.95)
    assert set(loads(router, 9.0)) == {record.decision.prefill, record.decision.worker}, "adopted"
    router.load_tracker.end_session(successor, 10.0)
    assert loads(router, 10.0 + ORPHAN_S) == {}


def test_a_repeated_request_for_a_reregistered_pair_gets_its_workers_and_one_fresh_room() -> None:
    router = router_of()
    router.load_tracker.reregister(reregistered(), None, 0.0)
    first = router.decide(QUERY, key(), 0.0, Random(1))
    assert (first.decision.prefill, first.decision.worker) == (P1, D1)
    assert first.decision.bootstrap is not None
    assert router.decide(QUERY, key(), 0.0, Random(2)) == first


def test_a_pair_that_lost_a_worker_is_placed_again() -> None:
    router = router_of(depths={1: 10})
    assert place(router).decision.prefill == P1
    router.update(Snapshot(2, {i.id: i for i in TWO_PAIRS[1:]}), 1.0)
    assert place(router).decision.prefill == P2
    assert set(loads(router)) >= {P2}
    assert P1 not in loads(router)


# Explanations.


def test_explanations_show_both_legs_each_cheapest_first() -> None:
    router = router_of(depths={1: 4})
    rows = router.preview(QUERY, 0.0, Random(0)).considered
    assert [row.leg for row in rows] == ["prefill", "prefill", "decode", "decode"]
    assert rows[0].placement == P1
    assert rows[0].terms is not None
    assert rows[0].terms.overlap_credit == 4
    assert rows[2].terms is not None
    assert rows[2].terms.prefill == 0
    assert [row.index_status.state for row in rows] == ["exact"] * 4


@pytest.mark.row("S1-86")
def test_potential_loads_add_to_each_worker_its_leg() -> None:
    router = router_of(depths={1: 4})
    rows = router.potential_loads(QUERY, 0.0)
    assert rows == {
        P1: LoadTotals(96, 0, 1),
        P2: LoadTotals(160, 0, 1),
        D1: LoadTotals(0, 10, 1),
        D2: LoadTotals(0, 10, 1),
    }
    alone = router_of(worker(11, "decode", local_prefill=True))
    assert list(alone.potential_loads(QUERY, 0.0).values()) == [LoadTotals(160, 10, 1)]


@given(seed=st.integers(0, 2**32), count=st.integers(1, 25))
def test_after_all_frees_both_sides_are_at_zero(seed: int, count: int) -> None:
    rng = Random(seed)
    router = router_of(load_tracker=LoadTracker(100), depths={1: 3, 2: 7})
    for number in range(count):
        router.decide(QUERY, key(number), 0.0, rng)
        if rng.random() < 0.5:
            router.load_tracker.mark_prefill_done(key(number))
        if rng.random() < 0.5:
            router.load_tracker.add_output_blocks(key(number), 2, rng.random())
        if rng.random() < 0.2:
            held = router.load_tracker.get(key(number))
            assert held is not None
            router.load_tracker.reregister(replace(held, revision=held.revision + 1), None, 0.0)
    for number in range(count):
        assert router.load_tracker.free(key(number))
    assert loads(router) == {}
