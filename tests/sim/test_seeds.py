"""300 seeds of a mesh of aggregated workers. More of them: `make sim SEEDS=n`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.sim.coverage import Coverage, chunks, name_of
from tests.sim.draws import is_vertical
from tests.sim.faults import ALL_FAULTS, FaultKind
from tests.sim.scenario import REST_S
from tests.sim.world import run_seed

SEEDS = [seed for seed in range(500) if not is_vertical(seed)]
# Of each fault, and of what else must have happened, in all seeds together.
LEAST = {
    **dict.fromkeys(map(str, ALL_FAULTS), 15),
    "answers migrated": 200,
    "requests tried again": 800,
    "requests failed": 800,
    "clients left": 400,
    "clients said stop": 300,
    "clients read slowly": 800,
    "deadlines passed": 250,
    "router failovers": 150,
    "unrouted": 80,
    "peers asked again": 5,
    "old lists shown": 25,
    "rejected": 100,
    "cached_tokens": 100_000,
    # Features; see `features.py`.
    str(FaultKind.WORKERS_GONE): 10,
    "clients cut": 100,
    "session kept": 800,
    "session moved": 50,
    "levels passed": 300,
    "queue timeouts": 30,
    "parked at a death": 25,
    "refused: ALL_WORKERS_BUSY": 70,
    "adapters asked for": 800,
    "blocks believed: approx": 800,
    "models missed": 100,
    "models forgotten": 2,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def coverage() -> Coverage:
    return Coverage()


@pytest.mark.parametrize("seeds", chunks(SEEDS), ids=name_of)
def test_seeded_runs_break_no_rule(seeds: Sequence[int], coverage: Coverage) -> None:
    broken = coverage.run(seeds)
    assert not broken, "\n".join(broken)


@pytest.mark.timeout(600)  # for when it runs alone
def test_the_seeds_have_every_fault_and_all_that_is_to_follow(coverage: Coverage) -> None:
    """Otherwise the rules about it would hold for want of a case."""
    coverage.run(SEEDS)
    assert not coverage.lacks(LEAST)
    assert 2.0 < coverage.slowest_s < REST_S


@pytest.mark.parametrize("seed", [4, 20])
def test_a_seed_gives_the_same_run_event_for_event(seed: int) -> None:
    keep = [object() for _ in range(999)]  # so that addresses differ
    first = run_seed(seed)
    del keep
    again = run_seed(seed)
    assert first.trace == again.trace
    assert first.digest == again.digest
