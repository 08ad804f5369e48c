"""Which routers are unresponsive, and which placements are overdue."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from common.errors import WorkerLost
from common.request.placement import Query
from common.streams.silence import SESSION
from frontend_svc.routers.choice import AVOID_FAILED_ROUTER_S
from frontend_svc.routers.monitor import (
    REQUERY_DELAY_S,
    STALE_ROUTER_AFTER_S,
    UNROUTED_AFTER_S,
    PendingPlacement,
    RouterMonitor,
    RunningTime,
)
from tests.kit.placements import placement_request


def at(seconds: float, *, stalled_s: float = 0.0) -> RunningTime:
    return RunningTime(seconds, stalled_s)


def pending(since: float) -> PendingPlacement:
    return PendingPlacement(
        ("r", 0), placement_request("m", 1, since), lambda result: None, at(since)
    )


def connected(queue_wait_s: float | None = None) -> RouterMonitor:
    monitor = RouterMonitor(at(0.0))
    monitor.session_opening()
    monitor.hello_received(at(0.0), queue_wait_s)
    monitor.frame_received(at(0.0), is_hello=True, has_results=False)
    return monitor


def test_a_query_open_for_longer_than_the_queue_wait_loses_the_router() -> None:
    monitor = connected(queue_wait_s=5.0)
    limit_s = 5.0 + SESSION.limit_s
    monitor.frame_received(at(limit_s), is_hello=False, has_results=False)
    monitor.check(at(limit_s), [pending(0.0)])
    with pytest.raises(WorkerLost, match="has not answered a query"):
        monitor.check(at(limit_s + 0.1), [pending(0.0)])


@pytest.mark.parametrize(("queue_wait_s", "overdue"), [(None, []), (60.0, []), (0.0, [1])])
def test_heartbeats_keep_a_query_pending_only_if_the_router_may_queue_it(
    queue_wait_s: float | None, overdue: list[int]
) -> None:
    monitor = connected(queue_wait_s)
    monitor.frame_received(at(UNROUTED_AFTER_S), is_hello=False, has_results=False)
    assert monitor.overdue({1: pending(0.0)}, at(UNROUTED_AFTER_S)) == overdue


def test_without_a_session_a_query_is_overdue_after_the_limit() -> None:
    monitor, queries = RouterMonitor(at(0.0)), {1: pending(1.0), 2: pending(2.0)}
    assert monitor.overdue(queries, at(1.0 + UNROUTED_AFTER_S)) == [1]


def test_a_background_query_waits_for_idle_capacity_however_long() -> None:
    monitor, query = connected(), pending(0.0)
    query.request = replace(query.request, query=Query("m", is_background=True))
    monitor.check(at(1e6), [query])
    assert monitor.overdue({1: query}, at(1e6)) == []


def test_a_router_that_keeps_reporting_a_served_model_unknown_is_left_now_and_then() -> None:
    monitor, query = connected(), pending(0.0)

    def report(now: float) -> float:
        return monitor.unknown_reported(query, at(now), has_other_router=True, rng=Random(1)) - now

    def must_leave(now: float) -> bool:
        report(now)
        return monitor.is_stale

    assert report(0.9) == pytest.approx(REQUERY_DELAY_S)
    assert not must_leave(1.0)
    assert must_leave(1.0 + STALE_ROUTER_AFTER_S)
    monitor.left_stale_router_at = 2.0
    monitor.session_opening()
    now = 2.0
    while now + STALE_ROUTER_AFTER_S < 2.0 + AVOID_FAILED_ROUTER_S:
        now += STALE_ROUTER_AFTER_S
        assert not must_leave(now), "not back at once"
    assert must_leave(2.0 + AVOID_FAILED_ROUTER_S)
