"""Days of virtual time: their requests, the model of a pool, and the rule on three of the ten days
of `make bench-scaling`."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from statistics import fmean

import pytest

from bench.bench_scaling import AZURE, HOURS, SEEDS, Hour, figures, find_failures, requests_of
from common.scaling.pool import PoolSample
from replay.engine import WorkerSettings
from replay.mesh import MeshSettings, ReplayMesh
from replay.policies import POLICIES
from replay.scaling.day import DAY_S, curve, day_of
from replay.scaling.pool import ElasticPool
from replay.scaling.rules import ConstantRule, MeshRule, PlannerRule, Traffic
from replay.scaling.run import DayResult
from replay.trace import TraceRequest
from worker_svc.engines.sim.timing import Timing


def test_a_day_has_nights_and_repeats_exactly() -> None:
    trace = requests_of(AZURE)
    first, again = (list(islice(day_of(trace, 1), 2000)) for _ in range(2))
    assert first == again
    assert first != list(islice(day_of(trace, 2), 2000))
    assert [one.at_s for one in first] == sorted(one.at_s for one in first)
    assert curve(3 * 3600.0) < 0.2 < 0.8 < curve(11 * 3600.0)
    requests = list(day_of(trace, 1))
    night = sum(one.at_s < 6 * 3600 for one in requests) / 6
    noon = sum(10 * 3600 <= one.at_s < 18 * 3600 for one in requests) / 8
    assert noon > 4 * night
    assert requests[-1].at_s < DAY_S


@pytest.mark.parametrize("rate", [2.0, 4.0, 6.0])
def test_the_model_of_a_pool_agrees_with_the_engine(rate: float) -> None:
    """TTFT within a fifth at 20 to 70 % use. ITL within 0.4: the load to come is not known."""
    timing = Timing(speedup=0.25)
    worker = WorkerSettings(timing=timing)
    requests = [replace(one, at_s=one.at_s * 5.5 / rate) for one in requests_of(AZURE)[:1500]]
    mesh = ReplayMesh(MeshSettings(workers=3, worker=worker), POLICIES["kv"])
    engine = mesh.run(requests).outcomes
    pool = ElasticPool(worker, 3, 60.0)
    served = [pool.serve(one) for one in requests]
    engine_ttft = fmean(one.ttft_s for one in engine if one.ttft_s is not None)
    assert fmean(one.ttft_s for one in served) == pytest.approx(engine_ttft, rel=0.2)
    engine_itl = fmean(
        (one.end_s - one.at_s - one.ttft_s) / (one.output_tokens - 1)
        for one in engine
        if one.end_s and one.ttft_s and one.output_tokens > 1
    )
    assert fmean(one.itl_s for one in served) == pytest.approx(engine_itl, rel=0.4)


def test_workers_that_leave_end_their_requests_and_new_ones_need_their_start() -> None:
    pool = ElasticPool(WorkerSettings(), 2, 60.0)
    pool.serve(TraceRequest(0.0, 1000, 2000))
    pool.scale(1, 1.0)
    pool.scale(3, 2.0)
    assert (pool.target, pool.present(3.0), pool.present(70.0)) == (3, 1, 3)
    pool.advance(10.0)
    assert pool.worker_s == 40.0
    pool.advance(20.0)
    assert pool.worker_s == 70.0, "the worker without requests has left"


def test_flaps_are_changes_that_are_undone_within_a_quarter_of_an_hour() -> None:
    def flaps(*changes: tuple[float, int]) -> int:
        return DayResult([], list(changes), 1.0, 1.0).flaps

    assert flaps((0, 2), (100, 1), (200, 2)) == 1
    assert flaps((0, 1), (100, 2), (200, 1), (300, 2)) == 2
    assert flaps((0, 2), (100, 1), (2000, 2)) == 0
    assert flaps((0, 1), (100, 2), (200, 3)) == 0


def test_the_planner_rule_changes_nothing_without_traffic() -> None:
    rule = PlannerRule(Timing(), AZURE.settings.scaling)
    sample = PoolSample(3, 3)
    counts = {rule.choose(sample, Traffic(0, 0, 0, 15.0), 15.0 * n) for n in range(100)}
    assert counts == {3}


@pytest.mark.slow
@pytest.mark.parametrize("hour", HOURS, ids=lambda hour: hour.name)
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_a_day_has_no_flap_keeps_the_target_and_costs_less_than_its_peak(
    hour: Hour, seed: int
) -> None:
    result = hour.run(MeshRule(hour.settings.scaling), seed)
    found = figures([result], hour.target_s)
    assert not find_failures(found), (found, result.changes)


@pytest.mark.slow
@pytest.mark.parametrize("hour", HOURS, ids=lambda hour: hour.name)
def test_a_count_that_never_moves_fails_the_test_of_a_day(hour: Hour) -> None:
    def failures(count: int) -> list[str]:
        result = hour.run(ConstantRule(count), 1, count)
        return find_failures(figures([result], hour.target_s))

    assert failures(2) == ["kept", "share_of_peak"]
    assert failures(hour.constant) == ["share_of_peak"]
