"""What a router observes of its pools, and the counts that it recommends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.kv.load import LOAD_MAX_AGE_S, Load
from common.registry.instances import Instance
from common.request.placement import CANARY_ID_PREFIX, Query
from common.scaling.pool import Advice, Reason, ScalingSettings
from router_svc.core.admission import QueueSettings
from router_svc.core.decision import DecisionRecord
from router_svc.core.demand import Demand
from router_svc.core.policy import Policy
from router_svc.core.pools import PoolKey, PoolObserver
from router_svc.core.replicas import FORGOTTEN_S, Replicas
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from tests.kit.bookings import FRONTEND, key
from tests.kit.instances import snapshot_of, worker

POOL = PoolKey("m", "aggregated")


class Bed:
    """A router with the workers 1 to n, that report idle loads each second."""

    def __init__(
        self, workers: int = 2, config: ScalingSettings | None = None, **policy: Any
    ) -> None:
        self.router = Router(SELECTORS["least_loaded"](), policy=Policy(**policy))
        self.now = 100.0
        self.session = self.router.load_tracker.open_session(FRONTEND)
        self.loads: dict[int, Load] = {}
        self.see(*(worker(n, max_num_seqs=10) for n in range(1, workers + 1)))
        self.replicas = Replicas(self.router, config or ScalingSettings())
        self.observer = PoolObserver(self.router)
        self.requests = 0

    def see(self, *workers: Instance) -> None:
        self.router.update(snapshot_of(*workers), self.now)
        self.loads = {one.id: self.loads.get(one.id, Load()) for one in workers}

    def tick(self, seconds: int, each: Callable[[], None] = lambda: None) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for number, load in self.loads.items():
                self.router.load_tracker.report(number, 0, load, self.now)
            each()
            self.observer.tick(self.now)
            self.replicas.tick(self.now)

    def request(self, tokens: int) -> DecisionRecord:
        self.requests += 1
        placed = self.router.admit(
            Query("m", tokens), key(self.requests), self.now, Random(1), self.session
        )
        assert isinstance(placed, DecisionRecord)
        return placed

    def first_token(self, number: int) -> None:
        self.router.load_tracker.ranks.set_time(self.now)
        self.router.load_tracker.mark_prefill_done(key(number))

    @property
    def advice(self) -> Advice:
        return dict(self.replicas)[POOL].advice


def test_the_share_of_the_prompts_is_the_time_with_prompts_and_the_backlog() -> None:
    bed = Bed(2)
    bed.observer.samples(bed.now, {})
    bed.request(600)
    bed.tick(6)
    bed.first_token(1)
    bed.tick(4)
    sample = bed.observer.samples(bed.now, {})[POOL]
    assert sample.prefill == pytest.approx(6 / 20)
    assert sample.ttft_s == pytest.approx(6.0)
    assert (sample.present, sample.reporting) == (2, 2)
    # 100 tokens a second: a prompt of 1,200 tokens is a backlog of 12 s, and a running one.
    bed.request(1200)
    bed.tick(10)
    sample = bed.observer.samples(bed.now, {})[POOL]
    assert sample.prefill == pytest.approx(10 / 20 + 12 / (2 * 60.0))
    assert sample.ttft_s is None


def test_kv_batches_and_steps_come_from_the_reports() -> None:
    bed = Bed(2)
    bed.observer.samples(bed.now, {})
    bed.loads[1] = Load(running=4, waiting=1, kv_used_blocks=30, kv_total_blocks=100)
    bed.loads[2] = Load(kv_used_blocks=10, kv_total_blocks=100)

    def step() -> None:
        load = bed.loads[1]
        bed.loads[1] = replace(load, engine_step=load.engine_step + 20)

    bed.tick(10, step)
    sample = bed.observer.samples(bed.now, {})[POOL]
    assert sample.kv == pytest.approx(40 / 200)
    assert sample.requests == pytest.approx(5 / 20)
    assert sample.itl_s == pytest.approx(1 / 20)


def test_an_engine_that_restarts_and_one_that_is_idle_do_not_distort_the_steps() -> None:
    bed = Bed(1)
    bed.observer.samples(bed.now, {})
    bed.loads[1] = Load(engine_step=500, running=1)
    bed.tick(2)
    bed.loads[1] = Load(engine_step=0, running=1)
    bed.tick(1)
    bed.loads[1] = Load(engine_step=10, running=1)
    bed.tick(1)
    bed.loads[1] = Load(engine_step=10)
    bed.tick(5)
    assert bed.observer.samples(bed.now, {})[POOL].itl_s == pytest.approx(1 / 10)


def test_a_worker_without_fresh_reports_does_not_report() -> None:
    bed = Bed(2)
    bed.tick(2)
    del bed.loads[2]
    bed.tick(int(LOAD_MAX_AGE_S) + 2)
    sample = bed.observer.samples(bed.now, {})
    bed.tick(1)
    sample = bed.observer.samples(bed.now, {})
    assert (sample[POOL].present, sample[POOL].reporting) == (2, 1)


def test_the_queue_of_the_router_counts_as_backlog_with_its_age() -> None:
    bed = Bed(1, queue=QueueSettings(threshold=0.0))
    bed.observer.samples(bed.now, {})
    bed.request(100)
    bed.tick(1)
    queued = bed.router.admit(Query("m", 300), key("q"), bed.now, Random(1), bed.session)
    assert not isinstance(queued, DecisionRecord)
    bed.tick(4)
    sample = bed.observer.samples(bed.now, {})[POOL]
    assert sample.queue_s == pytest.approx(4.0)
    assert sample.in_flight == 2


def test_pools_are_split_by_role_and_sorted() -> None:
    bed = Bed(0)
    bed.see(worker(1, "prefill"), worker(2, "decode"), worker(3, "decode"))
    bed.tick(12)
    assert [(key.role, pool.sample.present) for key, pool in bed.replicas] == [
        ("decode", 2),
        ("prefill", 1),
    ]


def test_an_overloaded_pool_gets_more_workers_and_an_idle_one_keeps_its_count_at_first() -> None:
    bed = Bed(2)
    bed.tick(120)
    assert bed.advice == Advice(2, Reason.DOWN_WINDOW)
    for number in range(1, 9):
        bed.request(1000)
        bed.tick(5)
        bed.first_token(number)
    for _ in range(20):
        bed.request(1000)
    bed.tick(60)
    assert bed.advice.replicas > 2
    assert bed.advice.reason in (Reason.PREFILL, Reason.PENDING)


def test_a_model_without_workers_sleeps_and_wakes_by_the_demand_of_frontends() -> None:
    bed = Bed(0, ScalingSettings(floor=0))
    bed.replicas.demand.replace(1, {"m": 0})
    bed.tick(12)
    (found,) = bed.replicas
    assert (found[0], found[1].state, found[1].advice.replicas) == (POOL, "asleep", 0)
    bed.replicas.demand.replace(1, {"m": 2})
    bed.tick(6)
    assert bed.advice == Advice(1, Reason.WAKE)
    assert dict(bed.replicas)[POOL].state == "waking"
    bed.see(worker(1))
    bed.replicas.demand.replace(1, {"m": 0})
    bed.tick(6)
    assert dict(bed.replicas)[POOL].state == "awake"


def test_a_pool_of_a_removed_model_is_forgotten_and_that_of_a_configured_one_is_not() -> None:
    bed = Bed(1)
    bed.tick(12)
    bed.see()
    bed.now += FORGOTTEN_S
    bed.tick(6)
    bed.now += FORGOTTEN_S
    bed.tick(6)
    assert not list(bed.replicas)
    bed.replicas.demand.replace(1, {"m": 0})
    bed.tick(6)
    bed.now += 3 * FORGOTTEN_S
    bed.tick(6)
    assert [key for key, _ in bed.replicas] == [POOL]


def test_a_guessed_pool_ends_when_the_workers_of_the_model_have_other_roles() -> None:
    bed = Bed(0)
    bed.replicas.demand.replace(1, {"m": 0})
    bed.tick(12)
    assert bed.advice.replicas == 1
    bed.see(worker(1, role="prefill"), worker(2, role="decode"))
    bed.tick(6)
    assert [key.role for key, _ in bed.replicas] == ["decode", "prefill"]


@pytest.mark.parametrize(("prefix", "count"), [("", 1), (CANARY_ID_PREFIX, 0)])
def test_short_requests_keep_a_pool_awake_and_canaries_do_not(prefix: str, count: int) -> None:
    bed = Bed(1, ScalingSettings(floor=0, sleep_after_s=60))
    tracker = bed.router.load_tracker

    def request() -> None:
        """One that begins and ends between two samples, twice a minute."""
        if bed.now % 30 == 3:
            name = key(int(bed.now))._replace(request_id=f"{prefix}{bed.now}")
            bed.router.admit(Query("m", 100), name, bed.now, Random(1), bed.session)
            tracker.mark_prefill_done(name)
            assert tracker.free(name)

    bed.tick(150, request)
    assert bed.advice.replicas == count


@pytest.mark.parametrize(("prefix", "count"), [("", 1), (CANARY_ID_PREFIX, 0)])
@pytest.mark.parametrize("threshold", [None, 0.0])
def test_a_request_in_flight_keeps_a_pool_awake_and_a_canary_does_not(
    prefix: str, count: int, threshold: float | None
) -> None:
    bed = Bed(
        1, ScalingSettings(floor=0, sleep_after_s=60), queue=QueueSettings(threshold=threshold)
    )
    # With a queue, the second one waits there.
    for number in range(2):
        name = key(number)._replace(request_id=f"{prefix}{number}")
        bed.router.admit(Query("m", 100), name, bed.now, Random(1), bed.session)
        bed.router.load_tracker.mark_prefill_done(name)
    bed.tick(150)
    assert bed.advice.replicas == count


def test_a_guessed_pool_ends_when_no_frontend_names_its_model() -> None:
    bed = Bed(0)
    bed.replicas.demand.replace(1, {"adapter": 0})
    bed.tick(12)
    bed.replicas.demand.replace(1, {"m": 0})
    bed.tick(6)
    assert [key for key, _ in bed.replicas] == [POOL]


def test_all_pools_together_keep_the_budget() -> None:
    bed = Bed(0, ScalingSettings(budget=3))
    bed.see(*(worker(n, model=f"m{n % 2}") for n in range(1, 7)))
    bed.tick(12)
    assert sum(pool.advice.replicas for _, pool in bed.replicas) == 3
    assert {pool.advice.reason for _, pool in bed.replicas} == {Reason.BUDGET}


def test_demand_is_the_sum_of_the_open_sessions_and_bounded() -> None:
    demand = Demand()
    demand.replace(1, {"a": 2, "b": 0})
    demand.replace(2, {"a": 1})
    assert demand.by_model() == {"a": 3, "b": 0}
    demand.end_session(1)
    demand.end_session(9)
    assert demand.by_model() == {"a": 1}
    with pytest.raises(InvalidRequest, match="too many models: 1025/1024"):
        demand.replace(1, {str(n): 0 for n in range(1025)})
