"""The serving modes, pair or unsplit, if some of them are busy or full.

Worker 1 is a prefill worker, 2 a decode worker with local prefill, 3 an aggregated worker; tests
omit some of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import MeshError, Overloaded, Unavailable
from common.kv.load import Load
from common.registry.instances import Instance, Snapshot
from common.request.placement import Query
from common.request.preprocessed import RoutingHints
from router_svc.core.admission import NO_QUEUE, QueuedRequest, QueueSettings
from router_svc.core.booking import BookingKey
from router_svc.core.decision import DecisionRecord
from router_svc.core.eligibility import NO_LIMITS, BusyLimits
from router_svc.core.pairing import NO_BYPASS, Bypass
from router_svc.core.policy import Policy
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from tests.kit import instances
from tests.kit.instances import snapshot_of

BATCH = 1000
LIMITS = BusyLimits(active_prefill_tokens=500)
QUEUE = QueueSettings(threshold=1.0)


def worker(worker_id: int, role: str, **fields: Any) -> Instance:
    given = {
        "transfer_group": "g",
        "local_prefill": role != "prefill",
        "max_num_batched_tokens": BATCH,
        "total_kv_blocks": 1000,
        **fields,
    }
    return instances.worker(worker_id, role, **given)


PREFILL, DECODE, WHOLE = worker(1, "prefill"), worker(2, "decode"), worker(3, "aggregated")
REMOTE = worker(2, "decode", local_prefill=False)


class Bed:
    """A router and its workers at one moment, so that reports do not expire."""

    def __init__(
        self,
        *workers: Instance,
        busy: BusyLimits = NO_LIMITS,
        queue: QueueSettings = NO_QUEUE,
        bypass: Bypass = NO_BYPASS,
    ) -> None:
        policy = Policy(busy=busy, queue=queue, bypass=bypass)
        self.router = Router(SELECTORS["kv"](), policy=policy)
        self.router.update(snapshot_of(*workers), 0.0)
        self.count = 0

    def report(self, worker_id: int, **load: int) -> None:
        self.router.load_tracker.report(worker_id, 0, Load(**load), 0.0)

    def crowd(self, *workers: int) -> None:
        """Report far more prompt tokens than any threshold here."""
        for worker_id in workers:
            self.report(worker_id, waiting=1, waiting_tokens=5 * BATCH)

    def calm(self, *workers: int) -> None:
        for worker_id in workers:
            self.report(worker_id)

    def admit(
        self, tokens: int = 100, excluded: Iterable[int] = (), **hints: Any
    ) -> DecisionRecord | QueuedRequest:
        self.count += 1
        routing = RoutingHints(**hints) if hints else None
        query = Query("m", tokens, routing=routing, excluded_worker_ids=frozenset(excluded))
        key = BookingKey(7, f"r{self.count}", 0)
        return self.router.admit(query, key, 0.0, Random(self.count))

    def place(self, **hints: Any) -> DecisionRecord:
        answer = self.admit(**hints)
        assert isinstance(answer, DecisionRecord), "the request was queued"
        return answer

    def serve(self) -> list[DecisionRecord | MeshError]:
        outcomes = self.router.rescan(0.0, Random(0))
        return [outcome for _, outcome in outcomes if outcome is not None]


def legs(record: DecisionRecord) -> tuple[int, int | None]:
    prefill = record.decision.prefill
    return record.decision.worker.worker_id, None if prefill is None else prefill.worker_id


# Above a busy threshold.


def test_if_prefill_is_busy_an_idle_aggregated_worker_serves() -> None:
    bed = Bed(PREFILL, REMOTE, WHOLE, busy=LIMITS)
    assert legs(bed.place()) == (2, 1)
    bed.crowd(1)
    record = bed.place()
    assert (legs(record), record.fallback) == ((3, None), "prefill_busy")
    assert "aggregated fallback: prefill busy" in record.decision.reasons


def test_if_decode_is_busy_an_idle_aggregated_worker_serves() -> None:
    bed = Bed(PREFILL, DECODE, WHOLE, busy=BusyLimits(active_decode_blocks=0.5))
    bed.report(2, kv_used_blocks=900)
    record = bed.place()
    assert (legs(record), record.fallback) == ((3, None), "decode_busy")


def test_if_prefill_and_aggregated_workers_are_busy_an_idle_decode_worker_serves() -> None:
    bed = Bed(PREFILL, DECODE, WHOLE, busy=LIMITS)
    bed.crowd(1, 3)
    record = bed.place()
    assert (legs(record), record.fallback) == ((2, None), "prefill_busy")


def test_without_prefill_a_decode_worker_serves_if_aggregated_ones_are_busy() -> None:
    bed = Bed(DECODE, WHOLE, busy=LIMITS)
    bed.crowd(3)
    record = bed.place()
    assert (legs(record), record.fallback) == ((2, None), "no_prefill_worker")


@pytest.mark.parametrize(
    ("workers", "busy", "leg"),
    [
        ((PREFILL, REMOTE), (1,), "prefill"),
        ((PREFILL, REMOTE, WHOLE), (1, 3), "prefill"),
        ((PREFILL, DECODE, WHOLE), (1, 2, 3), "prefill"),
        ((DECODE, WHOLE), (2, 3), "whole"),
    ],
)
def test_a_request_is_rejected_as_busy_only_if_every_eligible_worker_is_busy(
    workers: tuple[Instance, ...], busy: tuple[int, ...], leg: str
) -> None:
    bed = Bed(*workers, busy=LIMITS)
    bed.crowd(*busy)
    with pytest.raises(Overloaded) as caught:
        bed.admit()
    assert (caught.value.reason, caught.value.metadata["leg"]) == ("ALL_WORKERS_BUSY", leg)
    assert len(bed.router.load_tracker) == 0


def test_a_busy_worker_is_reported_as_busy_though_others_are_ineligible() -> None:
    apart = worker(2, "decode", transfer_group="other", local_prefill=False)
    bed = Bed(PREFILL, apart, WHOLE, busy=LIMITS)
    bed.crowd(3)
    with pytest.raises(Overloaded):
        bed.admit()


def test_a_request_that_pins_prefill_gets_a_pair_or_a_busy_error() -> None:
    bed = Bed(PREFILL, DECODE, WHOLE, busy=LIMITS)
    bed.crowd(1)
    with pytest.raises(Overloaded):
        bed.admit(prefill_worker_id=1)


def test_the_decode_threshold_applies_to_requests_that_come_from_busy_prefill() -> None:
    gate = Bypass(policy="isl_bounding", decode_busy_threshold=0.5)
    bed = Bed(PREFILL, DECODE, busy=LIMITS, bypass=gate)
    bed.crowd(1)
    bed.report(2, kv_used_blocks=600)
    with pytest.raises(Overloaded):
        bed.admit()
    bed.report(2, kv_used_blocks=400)
    assert legs(bed.place()) == (2, None)


# Missing partners and busy ones.


def test_busy_prefill_is_not_reported_as_a_missing_transfer_group() -> None:
    unpaired = worker(4, "prefill", transfer_group="other")
    bed = Bed(PREFILL, REMOTE, unpaired, busy=LIMITS)
    assert legs(bed.place()) == (2, 1)
    bed.crowd(1)
    with pytest.raises(Overloaded) as caught:
        bed.admit()
    assert caught.value.metadata["leg"] == "prefill"
    bed.router.update(Snapshot(2, {w.id: w for w in (PREFILL, REMOTE, unpaired, WHOLE)}), 0.0)
    assert bed.place().fallback == "prefill_busy"


def test_a_missing_transfer_group_is_not_reported_as_busy_prefill() -> None:
    unpaired = worker(4, "prefill", transfer_group="other")
    bed = Bed(unpaired, REMOTE, busy=LIMITS)
    bed.crowd(4)
    with pytest.raises(Unavailable) as caught:
        bed.admit()
    assert caught.value.reason == "NO_TRANSFER_GROUP"


def test_free_workers_of_different_groups_make_no_pair_and_the_cause_is_busy() -> None:
    other = {"transfer_group": "other", "local_prefill": False}
    limits = BusyLimits(active_prefill_tokens=500, active_decode_blocks=0.5)
    bed = Bed(PREFILL, REMOTE, worker(4, "prefill", **other), worker(5, "decode", **other),
              busy=limits)  # fmt: skip
    bed.crowd(1)
    bed.report(5, kv_used_blocks=900)
    with pytest.raises(Overloaded):
        bed.admit()
    bed.calm(1)
    assert legs(bed.place()) == (2, 1)


def test_the_explanation_distinguishes_busy_workers_from_those_without_a_partner() -> None:
    unpaired = worker(4, "prefill", transfer_group="other")
    twin = worker(5, "prefill")
    bed = Bed(PREFILL, twin, unpaired, REMOTE, busy=LIMITS)
    bed.crowd(5)
    rows = bed.router.preview(Query("m", 100), 0.0, Random(0)).considered
    why = {row.placement.worker_id: row.excluded_reason for row in rows}
    assert why[5] == "busy: above a configured threshold"
    assert why[4] == "has no partner to send its KV cache to"


# Bypass: prefill that accepts no request counts as busy.


@pytest.mark.parametrize(
    ("policy", "bypass"), [("prefill_load", "prefill_busy"), ("isl_or_load", "prefill_busy")]
)
def test_prefill_above_its_limit_is_bypassed_by_load_policies(policy: Any, bypass: str) -> None:
    policy = Bypass(policy=policy, prefill_busy_threshold=100.0)
    bed = Bed(PREFILL, DECODE, busy=LIMITS, bypass=policy)
    assert bed.place().bypass == ""
    bed.crowd(1)
    record = bed.place()
    assert (legs(record), record.bypass, record.fallback) == ((2, None), bypass, "")


def test_prefill_that_would_queue_requests_is_bypassed_at_any_bypass_threshold() -> None:
    policy = Bypass(policy="prefill_load", prefill_busy_threshold=100.0)
    bed = Bed(PREFILL, DECODE, queue=QUEUE, bypass=policy)
    bed.crowd(1)
    record = bed.place()
    assert (legs(record), record.bypass) == ((2, None), "prefill_busy")


def test_a_bypass_uses_workers_below_the_decode_threshold_and_names_the_others() -> None:
    gate = Bypass(policy="prefill_load", decode_busy_threshold=0.5)
    bed = Bed(PREFILL, DECODE, worker(4, "decode"), queue=QUEUE, bypass=gate)
    bed.crowd(1)
    bed.report(2, kv_used_blocks=600)
    bed.report(4, kv_used_blocks=400, running=1, waiting_tokens=BATCH, waiting=300)
    record = bed.place()
    assert (legs(record), record.bypass) == ((4, None), "prefill_busy")
    assert [(row.placement.worker_id, row.excluded_reason) for row in record.considered] == [
        (4, ""),
        (2, "busy: too few free KV blocks for the bypass"),
    ]
    bed.crowd(4)
    assert isinstance(bed.admit(), QueuedRequest), (
        "the worker with capacity is above the decode threshold"
    )


def test_a_worker_above_the_decode_threshold_does_not_lead_to_a_full_aggregated_worker() -> None:
    gate = Bypass(policy="prefill_load", decode_busy_threshold=0.5)
    bed = Bed(PREFILL, DECODE, WHOLE, queue=QUEUE, bypass=gate)
    bed.crowd(1)
    bed.report(2, kv_used_blocks=900)
    bed.report(3, waiting=1, waiting_tokens=BATCH + 1)
    assert isinstance(bed.admit(), QueuedRequest)


def test_there_is_no_bypass_to_a_full_worker_if_the_pair_has_capacity() -> None:
    policy = Bypass(policy="isl_bounding", eff_isl_ratio_threshold=1.1)
    bed = Bed(PREFILL, DECODE, queue=QUEUE, bypass=policy)
    assert bed.place().bypass == "short_prompt"
    bed.crowd(2)
    assert legs(bed.place()) == (2, 1)


# The queue.


def test_no_request_waits_for_prefill_while_an_aggregated_worker_has_capacity() -> None:
    bed = Bed(PREFILL, REMOTE, WHOLE, queue=QUEUE)
    bed.crowd(1)
    record = bed.place()
    assert (legs(record), record.fallback) == ((3, None), "prefill_busy")


def test_a_queued_request_uses_the_first_serving_mode_with_capacity() -> None:
    for capacity_freed, expected in ((1, (2, 1)), (3, (3, None))):
        bed = Bed(PREFILL, REMOTE, WHOLE, queue=QUEUE)
        bed.crowd(1, 3)
        assert isinstance(bed.admit(), QueuedRequest)
        assert bed.serve() == []
        bed.calm(capacity_freed)
        (outcome,) = bed.serve()
        assert isinstance(outcome, DecisionRecord)
        assert legs(outcome) == expected


def test_a_request_behind_others_waits_for_every_serving_mode_too() -> None:
    bed = Bed(PREFILL, REMOTE, WHOLE, queue=QUEUE)
    bed.crowd(1, 3)
    assert isinstance(bed.admit(), QueuedRequest)
    bed.calm(3)
    assert isinstance(bed.admit(), QueuedRequest), "its class has a backlog"
    assert [legs(d) for d in bed.serve() if isinstance(d, DecisionRecord)] == [(3, None), (3, None)]


def test_a_decode_worker_that_can_prefill_does_not_bypass_the_queue_for_prefill() -> None:
    bed = Bed(PREFILL, DECODE, queue=QUEUE)
    bed.crowd(1)
    assert isinstance(bed.admit(), QueuedRequest)


@pytest.mark.parametrize(
    ("workers", "excluded"),
    [
        ((DECODE,), ()),
        ((PREFILL, DECODE), (1,)),
        ((worker(1, "prefill", transfer_group="x"), DECODE), ()),
    ],
    ids=["no prefill worker", "it failed the request", "it has no partner"],
)
def test_a_request_that_cannot_be_split_is_admitted_at_any_decode_threshold(
    workers: tuple[Instance, ...], excluded: tuple[int, ...]
) -> None:
    gate = Bypass(policy="prefill_load", decode_busy_threshold=0.5)
    bed = Bed(*workers, queue=QUEUE, bypass=gate)
    bed.report(2, kv_used_blocks=600, waiting_tokens=5 * BATCH)
    assert isinstance(bed.admit(excluded=excluded), QueuedRequest)
    bed.report(2, kv_used_blocks=600)
    (outcome,) = bed.serve()
    assert isinstance(outcome, DecisionRecord)
    assert legs(outcome) == (2, None)


def test_a_request_that_can_be_split_respects_the_decode_threshold() -> None:
    gate = Bypass(policy="prefill_load", decode_busy_threshold=0.5)
    bed = Bed(PREFILL, DECODE, queue=QUEUE, bypass=gate)
    bed.crowd(1)
    bed.report(2, kv_used_blocks=600)
    assert isinstance(bed.admit(), QueuedRequest)
    assert bed.serve() == []
    bed.report(2, kv_used_blocks=400)
    (outcome,) = bed.serve()
    assert isinstance(outcome, DecisionRecord)
    assert legs(outcome) == (2, None)


def test_a_request_that_pins_its_decode_worker_waits_for_prefill() -> None:
    bed = Bed(PREFILL, REMOTE, WHOLE, queue=QUEUE)
    bed.crowd(1)
    assert isinstance(bed.admit(decode_worker_id=2), QueuedRequest)


def test_a_full_serving_mode_queues_requests_and_one_above_its_limit_does_not() -> None:
    bed = Bed(PREFILL, REMOTE, WHOLE, queue=QUEUE, busy=BusyLimits(active_prefill_tokens=6 * BATCH))
    bed.report(1, waiting=1, waiting_tokens=9 * BATCH)
    bed.crowd(3)
    assert isinstance(bed.admit(), QueuedRequest)
    bed.calm(3)
    (outcome,) = bed.serve()
    assert isinstance(outcome, DecisionRecord)
    assert legs(outcome) == (3, None)


def test_a_query_without_a_booking_uses_the_serving_mode_with_capacity() -> None:
    bed = Bed(PREFILL, REMOTE, WHOLE, queue=QUEUE)
    bed.crowd(1)
    assert legs(bed.router.preview(Query("m", 100), 0.0, Random(0))) == (3, None)
    bed.crowd(3)
    assert legs(bed.router.preview(Query("m", 100), 0.0, Random(0))) == (2, 1)


@settings(max_examples=150, deadline=None)
@given(
    members=st.sets(st.sampled_from([PREFILL, DECODE, WHOLE]), min_size=1),
    crowded=st.sets(st.sampled_from([1, 2, 3])),
    closes=st.booleans(),
)
def test_a_request_is_rejected_or_queued_only_if_no_serving_mode_is_left(
    members: set[Instance], crowded: set[int], closes: bool
) -> None:
    """closes: above the threshold workers get no request; else requests are queued."""
    bed = Bed(*members, **({"busy": LIMITS} if closes else {"queue": QUEUE}))
    here = {w.id for w in members}
    bed.crowd(*(crowded & here))
    idle = here - crowded
    pair = {1, 2} <= here and 1 in idle
    alone = 2 in idle and (1 not in here or closes)
    can = pair or 3 in idle or alone
    answer: DecisionRecord | QueuedRequest | MeshError
    try:
        answer = bed.admit()
    except MeshError as error:
        answer = error
    if can:
        assert isinstance(answer, DecisionRecord)
    elif here == {1}:
        assert isinstance(answer, Unavailable)
    else:
        assert isinstance(answer, Overloaded if closes else QueuedRequest)


_GATES = st.builds(
    Bypass,
    policy=st.sampled_from(["isl_bounding", "prefill_load", "isl_or_load"]),
    eff_isl_ratio_threshold=st.sampled_from([0.7, 1.1]),
    prefill_busy_threshold=st.sampled_from([None, 0.5]),
    decode_busy_threshold=st.sampled_from([None, 0.5]),
)
_BLOCKS = st.sampled_from([0, 400, 900])


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    others=st.sets(st.sampled_from([PREFILL, WHOLE])),
    gate=_GATES,
    limits=st.sampled_from([NO_LIMITS, BusyLimits(active_decode_blocks=0.95)]),
    blocks=st.tuples(_BLOCKS, _BLOCKS, _BLOCKS),
    excluded=st.sampled_from([(), (1,)]),
    reliefs=st.lists(
        st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([0, 5 * BATCH]), _BLOCKS),
        min_size=1,
        max_size=4,
    ),
)
def test_a_full_rescan_admits_no_more_than_the_rescan_after_freed_capacity(
    others: set[Instance],
    gate: Bypass,
    limits: BusyLimits,
    blocks: tuple[int, int, int],
    excluded: tuple[int, ...],
    reliefs: list[tuple[int, int, int]],
) -> None:
    members = {DECODE, *others}
    bed = Bed(*members, busy=limits, queue=QUEUE, bypass=gate)
    load = {n: (5 * BATCH, blocks[n - 1]) for n in (1, 2, 3)}
    for member in members:
        tokens, held = load[member.id]
        bed.report(member.id, waiting_tokens=tokens, kv_used_blocks=held)
    try:
        answer = bed.admit(excluded=excluded)
    except Unavailable:
        return
    if isinstance(answer, DecisionRecord):
        return
    for worker_id, *less in reliefs:
        tokens, held = map(min, load[worker_id], less)
        load[worker_id] = tokens, held
        bed.report(worker_id, waiting_tokens=tokens, kv_used_blocks=held)
        placed = bed.serve()
        if placed:
            return
        assert bed.serve() == []
