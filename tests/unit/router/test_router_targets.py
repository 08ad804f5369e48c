"""Latency targets: the order of deadlines, the estimate, the refusal."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

import pytest

from common.errors import InvalidRequest, MeshError, Overloaded
from common.kv.load import Load
from common.request.placement import TARGET_UNMET, Placement, Query
from router_svc.core.admission import QueuedRequest, QueueSettings
from router_svc.core.decision import DecisionRecord
from router_svc.core.policy import Policy
from router_svc.core.query import validate_query
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from router_svc.core.targets import FirstToken, check_first_token
from tests.kit import instances
from tests.kit.bookings import FRONTEND, key
from tests.kit.instances import snapshot_of

BATCH = 1000
worker = partial(instances.worker, max_num_batched_tokens=BATCH)


class Bed:
    """A router with workers that compute 1,000 prompt tokens a second, as it has measured.
    `now` is set by hand."""

    def __init__(self, workers: int = 1, **queue: Any) -> None:
        policy = Policy(queue=QueueSettings(**{"threshold": 1.0, **queue}))
        self.router = Router(SELECTORS["kv"](), policy=policy)
        self.router.update(snapshot_of(*(worker(n) for n in range(1, workers + 1))), 0.0)
        self.session = self.router.load_tracker.open_session(FRONTEND)
        self.now = 0.0
        for number in range(1, workers + 1):
            self.admit(f"measured-{number}", tokens=20_000)
        self.now = 20.0
        self.router.expire(self.now)
        for number in range(1, workers + 1):
            assert self.router.load_tracker.mark_prefill_done(key(f"measured-{number}"))
            self.free(f"measured-{number}")
        assert self.router.load_tracker.ranks.prompt_token_s == pytest.approx(0.001)

    def admit(
        self, name: str, target_ms: float | None = None, tokens: int = 2000, **fields: Any
    ) -> DecisionRecord | QueuedRequest:
        query = Query("m", tokens, ttft_target_ms=target_ms, **fields)
        return self.router.admit(query, key(name), self.now, Random(0), self.session)

    def free(self, name: str) -> None:
        assert self.router.load_tracker.free(key(name))

    def serve(self) -> dict[str, DecisionRecord | MeshError]:
        """Rescans the queue; the requests that left it, in order."""
        self.router.queue.mark_all_dirty()
        found = self.router.rescan(self.now, Random(0))
        return {queued.key.request_id: outcome for queued, outcome in found if outcome is not None}

    def drain(self) -> list[str]:
        """Serves one request after the other; their names in order."""
        order = []
        while len(self.router.queue):
            for name, outcome in self.serve().items():
                assert isinstance(outcome, DecisionRecord), outcome
                order.append(name)
                self.free(name)
        return order


def refusal_of(call: Any, *args: Any, **kwargs: Any) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        call(*args, **kwargs)
    assert caught.value.reason == TARGET_UNMET
    return caught.value


def test_the_estimate_adds_the_queue_the_rank_and_the_prompt() -> None:
    expected = FirstToken(0.5, 8000, 4, 1000, 500, 0.001, slowness=2.0)
    assert expected.seconds == pytest.approx(0.5 + 8000 / 4 * 0.001 + (1000 + 500) * 2 * 0.001)
    assert FirstToken(9.0, 8000, 4, 1000, 500, 0.0).seconds == 0.0, "nothing is measured yet"


def test_a_refusal_states_estimate_target_and_delay() -> None:
    late = FirstToken(0.0, 0, 1, 4000, 1000, 0.001)
    check_first_token(Query("m", ttft_target_ms=5000), late)
    check_first_token(Query("m"), late)
    error = refusal_of(check_first_token, Query("m", ttft_target_ms=2000), late)
    assert error.message == (
        "the first token is expected after 5000 ms, and the target is 2000 ms; retry after 3.0 s"
    )
    assert (error.retry_after_s, error.field) == (3.0, "query.ttft_target_ms")
    assert error.metadata["estimate_ms"] == "5000"


def test_a_target_that_an_idle_worker_cannot_meet_is_refused_at_once() -> None:
    bed = Bed()
    refusal_of(bed.admit, "late", 1900)
    assert len(bed.router.load_tracker) == 0
    assert isinstance(bed.admit("met", 2100), DecisionRecord)


def test_a_target_that_the_queue_cannot_meet_is_refused_at_once() -> None:
    bed = Bed()
    bed.admit("running")
    assert isinstance(bed.admit("queued", 4500), QueuedRequest)
    error = refusal_of(bed.admit, "late", 5000)
    assert float(error.metadata["estimate_ms"]) == pytest.approx(6000, rel=0.05)
    assert isinstance(bed.admit("met", 6500), QueuedRequest)


def test_the_time_at_the_frontend_counts() -> None:
    bed = Bed()
    assert isinstance(bed.admit("fresh", 3000), DecisionRecord)
    bed.free("fresh")
    refusal_of(bed.admit, "waited", 3000, waited_ms=1500)


def test_the_earliest_deadline_leaves_the_queue_first() -> None:
    bed = Bed(wait_max_s=60.0)
    bed.admit("running")
    for name, target_ms in {"slow": 50_000, "none": None, "fast": 9_000, "next": 20_000}.items():
        assert isinstance(bed.admit(name, target_ms), QueuedRequest)
    bed.free("running")
    assert bed.drain() == ["fast", "next", "slow", "none"]


def test_a_level_precedes_a_deadline_and_a_request_without_target_is_not_starved() -> None:
    bed = Bed(wait_max_s=10.0)
    bed.admit("running")
    bed.admit("old")
    bed.now += 5.0
    bed.admit("soon", 9_000)
    bed.admit("high", 20_000, strict_priority=1)
    bed.free("running")
    assert bed.drain() == ["high", "old", "soon"]


def test_tenants_share_whatever_their_targets() -> None:
    bed = Bed()
    bed.admit("running")
    for number in range(6):
        bed.admit(f"greedy-{number}", 100_000, tenant="greedy")
    for number in range(3):
        bed.admit(f"patient-{number}", tenant="patient")
    bed.free("running")
    first = bed.drain()[:6]
    assert sum(name.startswith("patient") for name in first) == 3


def test_the_estimate_counts_the_shares_of_other_tenants() -> None:
    bed = Bed()
    bed.admit("running")
    for number in range(10):
        bed.admit(f"other-{number}", tenant="other")
    queue, query = bed.router.queue, Query("m", 2000, tenant="mine")
    assert queue.tokens_ahead(query, bed.now, 0) == 0, "its tenant has the least tokens"
    bed.admit("mine-0", tenant="mine")
    assert queue.tokens_ahead(query, bed.now, 0) == 4000, "one of each tenant"
    bed.admit("urgent", tenant="other", strict_priority=3)
    assert queue.tokens_ahead(query, bed.now, 0) == 6000


def test_a_queued_request_is_refused_once_its_deadline_is_out_of_reach() -> None:
    bed = Bed()
    bed.admit("running", tokens=3000)
    assert isinstance(bed.admit("queued", 6000), QueuedRequest)
    bed.now += 5.0
    left = bed.serve()
    assert isinstance(left["queued"], Overloaded)
    assert left["queued"].reason == TARGET_UNMET
    assert len(bed.router.queue) == 0


def reported(bed: Bed, steps: Mapping[int, tuple[int, float]]) -> None:
    """Sends two reports of each worker. steps: engine steps and seconds between them, by worker."""
    for worker_id, (count, seconds) in steps.items():
        for step, at in ((100, bed.now), (100 + count, bed.now + seconds)):
            load = Load(engine_step=step, running=1, kv_total_blocks=1000)
            bed.router.load_tracker.report(worker_id, 0, load, at)


def test_workers_slower_than_the_target_for_further_tokens_are_left_out() -> None:
    bed = Bed(workers=2)
    reported(bed, {1: (10, 1.0), 2: (50, 1.0)})
    bed.now += 1.0
    assert bed.router.load_tracker.ranks.itl_s(Placement(1, 0), bed.now) == pytest.approx(0.1)
    record = bed.admit("quick", itl_target_ms=50.0, tokens=10)
    assert isinstance(record, DecisionRecord)
    assert record.decision.worker.worker_id == 2
    error = refusal_of(bed.admit, "none", itl_target_ms=10.0, tokens=10)
    assert error.message.startswith("a further token is expected after 20 ms")


def test_an_idle_worker_meets_any_target_for_further_tokens() -> None:
    bed = Bed()
    reported(bed, {1: (1, 1.0)})
    idle = Load(engine_step=200, kv_total_blocks=1000)
    bed.router.load_tracker.report(1, 0, idle, bed.now + 1.0)
    bed.now += 1.0
    assert isinstance(bed.admit("quick", itl_target_ms=1.0, tokens=10), DecisionRecord)


@pytest.mark.parametrize("name", ["ttft_target_ms", "itl_target_ms"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_an_invalid_target_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_query(Query("m", 1, **{name: value}))  # type: ignore[arg-type]
    assert caught.value.field == f"query.{name}"
