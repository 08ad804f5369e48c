"""Placements respect taints, topology, adapters, allow-lists, pins and the present fleet."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest, MeshError, NotFound, Unavailable
from common.kv.events import Source
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance, Snapshot
from common.request.placement import Placement, Query
from common.request.preprocessed import RoutingConstraints, RoutingHints
from router_svc.core.booking import BookingKey
from router_svc.core.decision import DecisionRecord
from router_svc.core.eligibility import RECENTLY_REMOVED_MAX, AdapterResidency
from router_svc.core.fleet import GONE_MODEL_TTL_S
from router_svc.core.overlap import IndexStatus
from router_svc.core.pairing import TransferDomain
from router_svc.core.policy import Policy
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from tests.kit import instances
from tests.kit.instances import snapshot_of

QUERY = Query("m", 160, bytes(range(80)), 1, 16)
SEEDS = range(30)


def worker(worker_id: int, role: str = "aggregated", *taints: str, **fields: Any) -> Instance:
    given = {"taints": frozenset(taints), "local_prefill": role != "decode", **fields}
    return instances.worker(worker_id, role, **given)


def router_of(*workers: Instance, selector: str = "kv", **policy: Any) -> Router:
    router = Router(SELECTORS[selector](), policy=Policy(**policy))
    router.update(snapshot_of(*workers), 0.0)
    return router


def submit(router: Router, seed: int = 0, **hints: Any) -> DecisionRecord:
    query = replace(QUERY, routing=RoutingHints(**hints))
    return router.decide(query, None, 0.0, Random(seed))


def chosen(router: Router, **hints: Any) -> set[int]:
    """The workers that many seeds select."""
    return {submit(router, seed, **hints).decision.worker.worker_id for seed in SEEDS}


def refused(router: Router, kind: type[MeshError], **hints: Any) -> MeshError:
    """The error of a decision without a booking."""
    query = replace(QUERY, routing=RoutingHints(**hints))
    with pytest.raises(kind) as error:
        router.decide(query, BookingKey(7, "r", 0), 0.0, Random(0))
    assert type(error.value) is kind
    assert len(router.load_tracker) == 0
    assert all(row.load.requests == 0 for row in router.loads("", 0.0))
    return error.value


def required(*taints: str) -> RoutingConstraints:
    return RoutingConstraints(required_taints=frozenset(taints))


def preferred(**weights: float) -> RoutingConstraints:
    return RoutingConstraints(preferred_taints=weights)


def load(router: Router, worker_id: int, tokens: int) -> None:
    hints = RoutingHints(backend_instance_id=worker_id)
    query = Query("m", tokens, routing=hints)
    router.decide(query, BookingKey(1, f"load{worker_id}", 0), 0.0, Random(0))


# Taints.


def test_only_workers_with_every_required_taint_are_chosen() -> None:
    router = router_of(worker(1), worker(2, "aggregated", "a"), worker(3, "aggregated", "a", "b"))
    assert chosen(router, routing_constraints=required("a", "b")) == {3}
    assert chosen(router, routing_constraints=required("a")) == {2, 3}
    assert chosen(router, routing_constraints=required()) == {1, 2, 3}
    error = refused(router, Unavailable, routing_constraints=required("a", "c"))
    assert (error.reason, error.retryable) == ("NO_TAINTED_WORKER", True)
    assert "c" in error.message


@pytest.mark.parametrize("selector", ["kv", "least_loaded", "power_of_two"])
def test_a_preferred_taint_attracts_until_load_outweighs_it(selector: str) -> None:
    router = router_of(worker(1), worker(2, "aggregated", "fast"), selector=selector)
    assert chosen(router, routing_constraints=preferred(fast=2.0)) == {2}
    assert chosen(router, routing_constraints=preferred(fast=-2.0)) == {1}
    assert chosen(router, routing_constraints=preferred(none=2.0)) == {1, 2}
    load(router, 2, 16_000)
    assert chosen(router, routing_constraints=preferred(fast=2.0)) == {1}


@settings(max_examples=60)
@given(weights=st.dictionaries(st.sampled_from("abcd"), st.floats(-50, 50), max_size=4))
def test_preferences_multiply_the_cost_by_the_documented_factor(weights: dict[str, float]) -> None:
    router = router_of(worker(1), worker(2, "aggregated", "a", "b"))
    hints = RoutingHints(routing_constraints=preferred(**weights))
    record = router.preview(replace(QUERY, routing=hints), 0.0, Random(0))
    cost = {row.placement.worker_id: row.cost for row in record.considered}
    total = weights.get("a", 0.0) + weights.get("b", 0.0)
    assert cost[1] is not None
    assert cost[2] == pytest.approx(cost[1] * math.exp(-math.tanh(total)))
    assert cost[1] / math.e - 1e-9 <= (cost[2] or 0.0) <= cost[1] * math.e + 1e-9


# Topology.

ZONED = (
    worker(1, "prefill", "zone=a"),
    worker(2, "prefill", "zone=b"),
    worker(11, "decode", "zone=a"),
    worker(12, "decode", "zone=b"),
    worker(13, "decode", "zone=b"),
)
ZONE = TransferDomain("zone")


def legs(router: Router, **hints: Any) -> set[tuple[int, int]]:
    drawn = [submit(router, seed, **hints) for seed in range(60)]
    return {
        (d.decision.prefill.worker_id if d.decision.prefill else 0, d.decision.worker.worker_id)
        for d in drawn
    }


def test_a_required_domain_keeps_both_legs_inside() -> None:
    assert legs(router_of(*ZONED, domain=ZONE)) == {(1, 11), (2, 12), (2, 13)}
    assert (1, 12) in legs(router_of(*ZONED)), "without a domain, pairs cross it"


def test_a_required_domain_holds_under_load_and_lists_the_excluded_workers() -> None:
    router = router_of(*ZONED, domain=ZONE)
    load_decode(router, 11, 50)
    record = submit(router, prefill_worker_id=1)
    assert record.decision.worker.worker_id == 11
    why = {row.placement.worker_id: row.excluded_reason for row in record.considered}
    assert why[12] == why[13] == "in another transfer group or domain than prefill"


def load_decode(router: Router, worker_id: int, requests: int) -> None:
    for number in range(requests):
        hints = RoutingHints(decode_worker_id=worker_id)
        query = Query("m", 160, routing=hints)
        router.decide(query, BookingKey(2, f"d{worker_id}-{number}", 0), 0.0, Random(0))


def test_a_worker_outside_of_the_required_domain_is_in_no_pair() -> None:
    router = router_of(*ZONED, worker(3, "prefill"), worker(14, "decode", "rack=a"), domain=ZONE)
    assert legs(router) == {(1, 11), (2, 12), (2, 13)}


def test_only_taints_of_the_domain_itself_are_its_values() -> None:
    router = router_of(
        worker(1, "prefill", "zone=a", "zones=x", "z=x", "zone"),
        worker(11, "decode", "zone=b", "zones=x", "z=x", "zone"),
        domain=ZONE,
    )
    assert refused(router, Unavailable).reason == "NO_TRANSFER_DOMAIN"


def test_a_worker_with_two_domain_values_pairs_in_both() -> None:
    router = router_of(worker(1, "prefill", "zone=a", "zone=b"), *ZONED[2:4], domain=ZONE)
    assert legs(router) == {(1, 11), (1, 12)}


def test_a_domain_counts_inside_a_transfer_group_only() -> None:
    router = router_of(
        worker(1, "prefill", "zone=a", transfer_group="x"),
        worker(11, "decode", "zone=a", transfer_group="y"),
        worker(12, "decode", "zone=b", transfer_group="x"),
        domain=ZONE,
    )
    error = refused(router, Unavailable)
    assert error.reason == "NO_TRANSFER_DOMAIN"


def test_a_domain_without_pairs_is_reported_and_falls_back_to_unsplit_serving() -> None:
    apart = (worker(1, "prefill", "zone=a"), worker(11, "decode", "zone=b"))
    error = refused(router_of(*apart, domain=ZONE), Unavailable)
    assert (error.reason, error.retryable) == ("NO_TRANSFER_DOMAIN", True)
    assert "zone" in error.message
    record = submit(router_of(*apart, worker(21), domain=ZONE))
    assert (record.decision.worker.worker_id, record.fallback) == (21, "no_transfer_domain")
    local = replace(apart[1], local_prefill=True)
    record = submit(router_of(apart[0], local, domain=ZONE))
    assert (record.decision.worker.worker_id, record.fallback) == (11, "no_transfer_domain")


def test_pins_across_a_required_domain_are_rejected() -> None:
    router = router_of(*ZONED, domain=ZONE)
    error = refused(router, Unavailable, prefill_worker_id=1, decode_worker_id=12)
    assert error.reason == "NO_TRANSFER_DOMAIN"


def test_a_preferred_domain_attracts_decode_until_load_outweighs_it() -> None:
    router = router_of(*ZONED, domain=TransferDomain("zone", 1.0))
    assert legs(router) == {(1, 11), (2, 12), (2, 13)}
    load_decode(router, 11, 3)
    assert legs(router, prefill_worker_id=1) == {(1, 12), (1, 13)}


def test_a_preferred_domain_adds_to_the_preferences_of_the_request() -> None:
    router = router_of(*ZONED, domain=TransferDomain("zone", 0.5))
    against = preferred(**{"zone=a": -0.75})
    assert legs(router, prefill_worker_id=1, routing_constraints=against) == {(1, 12), (1, 13)}
    row = next(
        row
        for row in submit(router, prefill_worker_id=1, routing_constraints=against).considered
        if row.placement == Placement(11, 0)
    )
    assert row.terms is not None
    assert row.terms.taint_factor == pytest.approx(math.exp(-math.tanh(0.5 - 0.75)))


def test_a_zero_weight_or_a_prefill_worker_outside_the_domain_does_not_affect_decode() -> None:
    assert len(legs(router_of(*ZONED, domain=TransferDomain("zone", 0.0)))) == 6
    router = router_of(worker(3, "prefill"), *ZONED[2:], domain=TransferDomain("zone", 1.0))
    assert legs(router) == {(3, 11), (3, 12), (3, 13)}


@settings(max_examples=60)
@given(
    prefill=st.lists(st.sets(st.sampled_from("abc")), min_size=1, max_size=4),
    decode=st.lists(st.sets(st.sampled_from("abc")), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_no_pair_crosses_a_required_domain(
    prefill: list[set[str]], decode: list[set[str]], seed: int
) -> None:
    places = {n: {f"zone={z}" for z in zones} for n, zones in enumerate(prefill, 1)}
    places |= {n: {f"zone={z}" for z in zones} for n, zones in enumerate(decode, 11)}
    members = [worker(n, "decode" if n > 10 else "prefill", *at) for n, at in places.items()]
    router = router_of(*members, domain=ZONE)
    if not any(p & d for p in prefill for d in decode):
        assert refused(router, Unavailable).reason == "NO_TRANSFER_DOMAIN"
        return
    record = submit(router, seed)
    assert record.decision.prefill is not None
    assert places[record.decision.prefill.worker_id] & places[record.decision.worker.worker_id]


# Adapters.

FR, DE = frozenset({"fr"}), frozenset({"fr", "de"})


def test_a_request_for_an_adapter_runs_on_a_worker_that_has_it() -> None:
    router = router_of(worker(1), worker(2, loras=FR), worker(3, loras=DE))
    load(router, 3, 16_000)
    assert chosen(router, lora_name="fr") == {2}
    assert chosen(router, lora_name="de") == {3}
    assert chosen(router, lora_name="") == {1, 2}
    assert chosen(router) == {1, 2}


def test_an_unknown_adapter_is_an_error_with_its_name() -> None:
    router = router_of(worker(1), worker(2, loras=FR))
    error = refused(router, NotFound, lora_name="it")
    assert (error.reason, error.field) == ("UNKNOWN_ADAPTER", "query.routing.lora_name")
    assert "'it'" in error.message
    assert error.metadata["adapter"] == "it"
    assert not error.retryable


def test_an_adapter_only_on_ineligible_workers_is_unavailable() -> None:
    pair = (worker(1, "prefill", loras=FR), worker(11, "decode"))
    error = refused(router_of(*pair), Unavailable, lora_name="fr")
    assert (error.reason, error.metadata["leg"]) == ("NO_ADAPTER_WORKER", "decode")
    tainted = router_of(worker(1, loras=FR), worker(2, "aggregated", "t"))
    error = refused(tainted, Unavailable, lora_name="fr", routing_constraints=required("t"))
    assert error.reason == "NO_ADAPTER_WORKER"


def test_both_legs_need_the_adapter() -> None:
    router = router_of(
        worker(1, "prefill"),
        worker(2, "prefill", loras=FR),
        worker(11, "decode", loras=FR),
        worker(12, "decode"),
    )
    assert legs(router, lora_name="fr") == {(2, 11)}


def test_with_preferred_residency_other_workers_serve_an_adapter_that_none_has() -> None:
    members = (worker(1), worker(2, loras=FR), worker(3, "aggregated", "t"))
    router = router_of(*members, lora_residency="preferred")
    load(router, 2, 16_000)
    assert chosen(router, lora_name="fr") == {2}
    assert chosen(router, lora_name="it") == {1, 3}
    assert chosen(router, lora_name="fr", routing_constraints=required("t")) == {3}


def test_an_adapter_joins_and_leaves_with_its_worker() -> None:
    router = router_of(worker(1), worker(2, loras=FR))
    router.update(Snapshot(2, {1: replace(worker(1), loras=FR)}), 0.0)
    assert chosen(router, lora_name="fr") == {1}
    router.update(Snapshot(3, {1: worker(1)}), 0.0)
    error = refused(router, Unavailable, lora_name="fr")
    assert (error.reason, error.retryable) == ("NO_ADAPTER_WORKER", True)
    assert "'fr'" in error.message
    router.update(Snapshot(4, {1: worker(1), 2: worker(2, loras=FR)}), 0.0)
    assert chosen(router, lora_name="fr") == {2}


def test_a_removed_adapter_is_unavailable_for_a_minute_and_then_unknown() -> None:
    adapters = AdapterResidency()
    query = replace(QUERY, routing=RoutingHints(lora_name="fr"))
    adapters.update([worker(1, loras=FR)], 0.0)
    adapters.check(query, 1.0)
    adapters.update([worker(1)], 10.0)
    with pytest.raises(Unavailable):
        adapters.check(query, 10.0 + GONE_MODEL_TTL_S - 0.01)
    with pytest.raises(NotFound):
        adapters.check(query, 10.0 + GONE_MODEL_TTL_S)
    with pytest.raises(NotFound):
        adapters.check(replace(query, model="other"), 10.0)


def test_the_memory_of_removed_adapters_is_bounded() -> None:
    adapters = AdapterResidency()
    many = frozenset(f"a{n:05}" for n in range(RECENTLY_REMOVED_MAX + 10))
    adapters.update([worker(1, loras=many)], 0.0)
    adapters.update([worker(1)], 1.0)
    assert len(adapters._recently_removed) == RECENTLY_REMOVED_MAX


# Allow-lists and pins.


@pytest.mark.row("S1-73")
def test_only_allowed_workers_are_candidates_and_without_one_nothing_is_booked() -> None:
    router = router_of(worker(1), worker(2), worker(3))
    load(router, 2, 16_000)
    assert chosen(router, allowed_worker_ids=frozenset({2})) == {2}
    assert chosen(router, allowed_worker_ids=frozenset({2, 3, 99})) == {3}
    router = router_of(worker(1), worker(2), worker(3))
    for absent in (frozenset({99}), frozenset[int]()):
        error = refused(router, Unavailable, allowed_worker_ids=absent)
        assert error.reason == "NO_ALLOWED_WORKER"


def test_an_allow_list_holds_for_both_legs() -> None:
    router = router_of(*ZONED)
    assert legs(router, allowed_worker_ids=frozenset({2, 13})) == {(2, 13)}
    error = refused(router, Unavailable, allowed_worker_ids=frozenset({1, 2}))
    assert (error.reason, error.metadata["leg"]) == ("NO_ALLOWED_WORKER", "decode")


@pytest.mark.parametrize("selector", sorted(SELECTORS))
def test_pins_of_workers_and_ranks_hold_on_both_legs_with_every_selector(selector: str) -> None:
    members = [replace(w, dp_size=2) for w in ZONED]
    router = router_of(*members, selector=selector)
    record = submit(router, prefill_worker_id=2, prefill_dp_rank=1, decode_worker_id=11, dp_rank=0)
    assert (record.decision.prefill, record.decision.worker) == (
        Placement(2, 1),
        Placement(11, 0),
    )


def test_an_unknown_rank_is_rejected_with_its_field() -> None:
    router = router_of(*ZONED)
    for field in ("dp_rank", "prefill_dp_rank"):
        error = refused(router, InvalidRequest, **{field: 5})
        assert (error.reason, error.field) == ("NO_SUCH_RANK", f"query.routing.{field}")


def test_an_absent_pinned_worker_is_named_in_the_error() -> None:
    router = router_of(worker(1), worker(2))
    error = refused(router, Unavailable, backend_instance_id=77)
    assert error.reason == "PINNED_WORKER_GONE"
    assert "77" in error.message


# The present fleet.


class Stale:
    """An index that still lists a worker that left."""

    def match(self, query: Query) -> list[SourceMatch]:
        return [SourceMatch(Source(2), 10, 10, 10)]

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("exact")


@pytest.mark.row("S1-107")
def test_a_worker_that_disappears_between_match_and_decision_is_never_selected() -> None:
    members = [worker(n, kv_index="events") for n in (1, 2, 3)]
    router = Router(SELECTORS["kv"](), index=Stale())
    router.update(snapshot_of(*members), 0.0)
    matches = router.match(QUERY)
    assert (
        router.decide(QUERY, None, 0.0, Random(0), matches=matches).decision.worker.worker_id == 2
    )
    router.update(Snapshot(2, {i.id: i for i in members if i.id != 2}), 0.0)
    for seed in SEEDS:
        key = BookingKey(7, f"r{seed}", 0)
        record = router.decide(QUERY, key, 0.0, Random(seed), matches=matches)
        assert record.decision.worker.worker_id != 2
    hints = RoutingHints(backend_instance_id=2)
    with pytest.raises(Unavailable):
        router.decide(replace(QUERY, routing=hints), None, 0.0, Random(0), matches=matches)


@pytest.mark.row("S1-39")
def test_changes_of_what_a_worker_advertises_apply_at_once() -> None:
    router = router_of(worker(1, "aggregated", "t", dp_size=2, block_size=32), worker(2))
    assert chosen(router, routing_constraints=required("t")) == {1}
    found = router.fleet.candidate(Placement(1, 1))
    assert found is not None
    assert (found.instance.block_size, found.instance.dp_size) == (32, 2)
    changed = worker(2, "aggregated", "t", max_num_batched_tokens=99, total_kv_blocks=7)
    changes = router.update(Snapshot(2, {1: worker(1), 2: changed}), 0.0)
    assert {i.id for i in changes.changed} == {1, 2}
    assert chosen(router, routing_constraints=required("t")) == {2}
    found = router.fleet.candidate(Placement(2, 0))
    assert found is not None
    assert (found.instance.max_num_batched_tokens, found.instance.total_kv_blocks) == (99, 7)
    assert router.fleet.candidate(Placement(1, 1)) is None


@pytest.mark.row("S1-37")
def test_a_selection_names_worker_rank_and_overlap() -> None:
    router = Router(SELECTORS["kv"](), index=Stale())
    router.update(Snapshot(1, {2: worker(2, kv_index="events", dp_rank_start=0)}), 0.0)
    record = router.decide(QUERY, None, 0.0, Random(0))
    assert (record.decision.worker.worker_id, record.decision.worker.dp_rank) == (2, 0)
    assert (record.decision.overlap_blocks, record.decision.predicted_cached_tokens) == (
        10,
        144,
    )
