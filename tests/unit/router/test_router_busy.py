"""Busy thresholds: busy workers get no request, and rejected requests get a retry hint."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest

from common.errors import Overloaded, Unavailable
from common.kv.load import Load
from common.registry.instances import Instance
from common.request.placement import Placement, Query
from common.request.preprocessed import RoutingHints, SessionControl
from router_svc.core.booking import BookingKey
from router_svc.core.candidate import Candidate, LoadTotals
from router_svc.core.decision import DecisionRecord
from router_svc.core.eligibility import BusyLimits, busy_worker_ids
from router_svc.core.policy import Policy
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from tests.kit import instances
from tests.kit.instances import snapshot_of

FRONTEND = 7
worker = partial(instances.worker, total_kv_blocks=100, max_num_batched_tokens=1000)


def router_of(limits: BusyLimits, *workers: Instance, **policy: Any) -> Router:
    router = Router(SELECTORS["least_loaded"](), policy=Policy(busy=limits, **policy))
    router.update(snapshot_of(*workers), 0.0)
    return router


def decide(router: Router, **hints: Any) -> DecisionRecord:
    query = Query("m", 10, routing=RoutingHints(**hints) if hints else None)
    return router.decide(query, None, 0.0, Random(0))


def report(router: Router, worker_id: int, rank: int = 0, **load: int) -> None:
    router.load_tracker.report(worker_id, rank, Load(**load), 0.0)


@pytest.mark.parametrize(
    ("limits", "at", "above"),
    [
        (BusyLimits(active_decode_blocks=0.5), LoadTotals(0, 50, 1), LoadTotals(0, 51, 1)),
        (BusyLimits(active_prefill_tokens=700), LoadTotals(700, 0, 1), LoadTotals(701, 0, 1)),
        (
            BusyLimits(active_prefill_tokens_frac=2.5),
            LoadTotals(2500, 0, 1),
            LoadTotals(2501, 0, 1),
        ),
        (BusyLimits(active_prefill_tokens=0), LoadTotals(0, 99, 9), LoadTotals(1, 0, 0)),
    ],
)
def test_a_rank_is_busy_above_a_limit_and_not_at_it(
    limits: BusyLimits, at: LoadTotals, above: LoadTotals
) -> None:
    candidate = Candidate(Placement(1, 0), worker(1))
    assert not limits.is_exceeded(candidate, at, "whole")
    assert limits.is_exceeded(candidate, above, "whole")


def test_a_limit_on_an_unknown_capacity_has_no_effect() -> None:
    silent = worker(1, total_kv_blocks=None, max_num_batched_tokens=None)
    limits = BusyLimits(active_decode_blocks=0.1, active_prefill_tokens_frac=0.1)
    load = LoadTotals(10**9, 10**9, 1)
    assert not limits.is_exceeded(Candidate(Placement(1, 0), silent), load, "whole")


def test_each_leg_is_limited_by_the_resources_that_it_uses() -> None:
    limits = BusyLimits(active_decode_blocks=0.5, active_prefill_tokens=100)
    candidate = Candidate(Placement(1, 0), worker(1))
    computes, holds = LoadTotals(101, 0, 1), LoadTotals(0, 51, 1)
    assert limits.is_exceeded(candidate, computes, "prefill")
    assert not limits.is_exceeded(candidate, holds, "prefill")
    assert limits.is_exceeded(candidate, holds, "decode")
    assert not limits.is_exceeded(candidate, computes, "decode")


def test_a_worker_is_busy_if_each_of_its_ranks_is() -> None:
    two = worker(1, dp_size=2)
    ranks = [Candidate(Placement(1, rank), two) for rank in (0, 1)]
    loads = {Placement(1, 0): LoadTotals(0, 99, 1), Placement(1, 1): LoadTotals(0, 10, 1)}
    limits = BusyLimits(active_decode_blocks=0.5)
    assert busy_worker_ids(ranks, loads.__getitem__, limits, "whole") == frozenset()
    loads[Placement(1, 1)] = LoadTotals(0, 51, 1)
    assert busy_worker_ids(ranks, loads.__getitem__, limits, "whole") == {1}
    assert busy_worker_ids(ranks, loads.__getitem__, BusyLimits(), "whole") == frozenset()


def test_a_busy_worker_gets_no_request_and_the_explanation_has_the_reason() -> None:
    router = router_of(BusyLimits(active_decode_blocks=0.5), worker(1), worker(2))
    report(router, 1, kv_used_blocks=51)
    report(router, 2, kv_used_blocks=50, running=5)
    record = router.preview(Query("m", 10), 0.0, Random(0))
    assert record.decision.worker == Placement(2, 0)
    (left_out,) = [row for row in record.considered if row.excluded_reason]
    assert left_out.placement == Placement(1, 0)
    assert left_out.excluded_reason == "busy: above a configured threshold"


def test_if_all_workers_are_busy_requests_get_a_retry_hint_and_no_booking() -> None:
    router = router_of(BusyLimits(active_prefill_tokens_frac=1.0), worker(1), worker(2))
    for at in (1, 2):
        report(router, at, waiting_tokens=1001)
    with pytest.raises(Overloaded) as caught:
        router.decide(Query("m", 10), BookingKey(FRONTEND, "r", 0), 0.0, Random(0))
    assert (caught.value.reason, caught.value.retry_after_s) == ("ALL_WORKERS_BUSY", 1.0)
    assert len(router.load_tracker) == 0


def test_no_workers_and_all_workers_busy_are_different_errors() -> None:
    router = router_of(BusyLimits(active_prefill_tokens=0), worker(1))
    report(router, 1, waiting_tokens=1)
    with pytest.raises(Unavailable):
        decide(router, backend_instance_id=9)
    with pytest.raises(Overloaded):
        decide(router, backend_instance_id=1)


def test_a_soft_session_leaves_a_busy_worker_and_a_hard_one_does_not() -> None:
    hints: dict[str, Any] = {"session_control": SessionControl("s", None)}
    for mode, moves in (("soft", True), ("hard", False)):
        router = router_of(
            BusyLimits(active_decode_blocks=0.5), worker(1), worker(2), session_mode=mode
        )
        query = Query("m", 10, routing=RoutingHints(**hints))
        bound = router.decide(query, BookingKey(FRONTEND, "r", 0), 0.0, Random(0)).decision.worker
        report(router, bound.worker_id, kv_used_blocks=99)
        if moves:
            assert decide(router, **hints).decision.worker != bound
        else:
            with pytest.raises(Overloaded):
                decide(router, **hints)


def test_a_busy_pair_is_rejected_with_the_busy_leg() -> None:
    group = {"transfer_group": "g", "local_prefill": False}
    router = router_of(
        BusyLimits(active_decode_blocks=0.5, active_prefill_tokens=100),
        worker(1, role="prefill", **group),
        worker(2, role="decode", **group),
    )
    decide(router)
    report(router, 2, kv_used_blocks=99)
    with pytest.raises(Overloaded) as caught:
        decide(router)
    assert caught.value.metadata["leg"] == "decode"
