"""Fleets of many workers in virtual time, in one mesh and in cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest

from replay.engine import WorkerSettings
from replay.fleet.cells import choose_cell, weight
from replay.fleet.mesh import FleetMesh, FleetOutcome, FleetSettings
from replay.fleet.traffic import Traffic, TrafficSettings
from replay.fleet.worker import FleetWorker, Prompt
from replay.mesh import MeshSettings, ReplayMesh
from replay.policies import POLICIES
from replay.trace import TraceRequest
from worker_svc.engines.sim.timing import Timing

WORKER = WorkerSettings(total_blocks=600, timing=Timing(speedup=0.2))


def run(requests: Sequence[TraceRequest], workers: int, **settings: Any) -> list[FleetOutcome]:
    return FleetMesh(FleetSettings(workers, worker=WORKER, **settings)).run(requests)


def hit_rate(outcomes: Sequence[FleetOutcome]) -> float:
    return sum(one.cached_tokens for one in outcomes) / sum(one.input_tokens for one in outcomes)


def ttft(outcomes: Sequence[FleetOutcome]) -> float:
    return fmean(one.ttft_s or 0.0 for one in outcomes)


@pytest.fixture(scope="module")
def conversations() -> list[TraceRequest]:
    settings = TrafficSettings(6.0, tenants=20, token_s=0.05)
    return list(Traffic(settings, 1).requests(60.0))


def test_the_cheap_worker_is_as_fast_as_the_engine(conversations: list[TraceRequest]) -> None:
    engine = ReplayMesh(MeshSettings(workers=24, worker=WORKER), POLICIES["kv"])
    real = engine.run(conversations)
    found = run(conversations, 24)
    cached = sum(one.cached_tokens for one in real.outcomes)
    real_hits = cached / sum(one.input_tokens for one in real.outcomes)
    real_ttft = fmean(one.ttft_s or 0.0 for one in real.outcomes)
    assert hit_rate(found) == pytest.approx(real_hits, abs=0.03)
    assert ttft(found) == pytest.approx(real_ttft, rel=0.15)


def test_a_shortlist_is_as_good_as_all_workers(conversations: list[TraceRequest]) -> None:
    """16 of 48 workers are compared."""
    every, some = run(conversations, 48), run(conversations, 48, candidates_max=16)
    assert hit_rate(some) == pytest.approx(hit_rate(every), abs=0.02)
    assert ttft(some) == pytest.approx(ttft(every), rel=0.05)


def test_late_load_reports_cost_little(conversations: list[TraceRequest]) -> None:
    """Reports each second, as of 5,000 workers."""
    often, late = run(conversations, 24), run(conversations, 24, report_s=1.0)
    assert hit_rate(late) == pytest.approx(hit_rate(often), abs=0.02)
    assert ttft(late) == pytest.approx(ttft(often), rel=0.1)


def test_several_routers_place_as_one(conversations: list[TraceRequest]) -> None:
    one, four = run(conversations, 24), run(conversations, 24, routers=4)
    assert hit_rate(four) == pytest.approx(hit_rate(one), abs=0.03)
    assert ttft(four) == pytest.approx(ttft(one), rel=0.15)


def test_cells_by_conversation_lose_less_than_cells_by_system_prompt(
    conversations: list[TraceRequest],
) -> None:
    flat = run(conversations, 24)
    by_conversation = run(conversations, 24, cells=4, bound=2.0)
    by_prompt = run(conversations, 24, cells=4, bound=2.0, key_blocks=1)
    assert {one.cell for one in by_conversation} == {0, 1, 2, 3}
    assert hit_rate(by_conversation) > hit_rate(flat) - 0.1
    assert ttft(flat) < ttft(by_conversation) < ttft(by_prompt)


def test_workers_that_cannot_be_divided_into_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="10 workers cannot be divided into 3 equal cells"):
        FleetMesh(FleetSettings(10, cells=3))


def test_a_run_is_the_same_again(conversations: list[TraceRequest]) -> None:
    few = conversations[:60]
    assert run(few, 8, routers=2, cells=2) == run(few, 8, routers=2, cells=2)


def test_a_key_has_one_cell_until_that_is_over_its_bound() -> None:
    keys, idle = range(2000), [0.0] * 10
    home = {key: choose_cell(key, idle, 1.25) for key in keys}
    counts = Counter(home.values())
    assert min(counts.values()) > 130
    assert max(counts.values()) < 270
    busy = [0.0] * 10
    busy[home[0]] = 100.0
    moved = choose_cell(0, busy, 1.25)
    assert moved != home[0]
    assert moved == max((c for c in range(10) if c != home[0]), key=lambda c: weight(0, c))
    assert choose_cell(0, [50.0] * 10, 1.25) == home[0]


def test_a_cell_that_leaves_moves_only_its_own_keys() -> None:
    ten = {key: choose_cell(key, [0.0] * 10, 1.25) for key in range(500)}
    nine = {key: choose_cell(key, [0.0] * 9, 1.25) for key in range(500)}
    assert all(nine[key] == cell for key, cell in ten.items() if cell < 9)


def test_a_cache_evicts_the_end_of_a_prompt_before_its_beginning() -> None:
    worker = FleetWorker(WorkerSettings(total_blocks=4, timing=Timing()))
    assert worker.fill([1, 2, 3]).stored == [1, 2, 3]
    change = worker.fill([1, 9, 8])
    assert change.stored == [9, 8]
    assert change.evicted == [3]
    worker.submit(Prompt([1, 2], 2 * 512 + 10, 5))
    started = worker.start()
    assert started is not None
    prompt, seconds = started
    assert prompt.cached_blocks == 2
    assert seconds == pytest.approx(Timing().step_s(10, 0, 0))
    assert worker.load().waiting == 0


def test_traffic_has_its_rate_from_the_start_and_repeats_the_turns_before() -> None:
    settings = TrafficSettings(20.0, tenants=5)
    requests = list(Traffic(settings, 3).requests(30.0))
    assert len(requests) / 30 == pytest.approx(20, rel=0.15)
    assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)
    first, last = requests[: len(requests) // 3], requests[-len(requests) // 3 :]
    assert fmean(o.input_tokens for o in first) == pytest.approx(
        fmean(o.input_tokens for o in last), rel=0.2
    )
    assert requests == list(Traffic(settings, 3).requests(30.0))
    assert len({one.hash_ids[0] for one in requests}) <= 5
