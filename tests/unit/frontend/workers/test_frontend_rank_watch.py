"""Progress of an engine, from the heartbeats of its ranks."""

from __future__ import annotations

import pytest

from common.kv.load import Load
from frontend_svc.workers.rank_watch import DEFAULT_STEP_LIMIT_S, EngineProgress, EngineWatch


def load(step: int, *, running: int = 0, waiting: int = 0, dp_rank: int = 0) -> Load:
    return Load(dp_rank=dp_rank, engine_step=step, running=running, waiting=waiting)


@pytest.mark.parametrize(
    ("running", "waiting", "expected"),
    [
        (1, 0, EngineProgress.HUNG),
        (1, 1, EngineProgress.HUNG),
        (0, 1, EngineProgress.STALLED),
        (0, 0, EngineProgress.UNKNOWN),
    ],
)
def test_an_engine_without_steps_hangs_if_requests_run_and_stalls_if_all_wait(
    running: int, waiting: int, expected: EngineProgress
) -> None:
    watch, loads = EngineWatch(), [load(5, running=running, waiting=waiting)]
    assert watch.received(loads, 0.0) is EngineProgress.UNKNOWN
    assert watch.received(loads, DEFAULT_STEP_LIMIT_S) is expected


def test_an_engine_that_steps_has_progressed() -> None:
    watch = EngineWatch()
    watch.received([load(5, running=1)], 0.0)
    assert watch.received([load(6, running=1)], DEFAULT_STEP_LIMIT_S) is EngineProgress.STEPPED


def test_one_hung_rank_is_a_hung_engine() -> None:
    watch = EngineWatch()
    watch.received([load(5, running=1), load(5, running=1, dp_rank=1)], 0.0)
    loads = [load(5, running=1), load(6, running=1, dp_rank=1)]
    assert watch.received(loads, DEFAULT_STEP_LIMIT_S) is EngineProgress.HUNG


def test_an_idle_engine_has_the_full_time_for_its_next_request() -> None:
    watch = EngineWatch()
    watch.received([load(5)], 0.0)
    assert watch.received([load(5, running=1)], 10.0) is EngineProgress.UNKNOWN
    assert watch.received([load(5, running=1)], 11.0) is EngineProgress.UNKNOWN


@pytest.mark.parametrize(
    ("running", "expected"), [(1, EngineProgress.HUNG), (0, EngineProgress.STALLED)]
)
def test_an_engine_hangs_or_stalls_only_after_the_step_limit_of_its_worker(
    running: int, expected: EngineProgress
) -> None:
    watch = EngineWatch()
    loads = [Load(engine_step=5, running=running, waiting=1, step_limit_ms=12_000)]
    for now in range(12):
        assert watch.received(loads, float(now)) is EngineProgress.UNKNOWN
    assert watch.received(loads, 12.0) is expected
