"""300 seeds of a mesh of aggregated workers. More of them: `make sim SEEDS=n`."""

from __future__ import annotations

import pytest

from tests.sim.draws import is_disaggregated
from tests.sim.faults import ALL_FAULTS, FaultKind
from tests.sim.seed_frame import SeedSuite

SEEDS = [seed for seed in range(500) if not is_disaggregated(seed)]
MINIMUM_COUNTS = {
    **dict.fromkeys(map(str, ALL_FAULTS), 15),
    "responses migrated": 200,
    "requests retried": 800,
    "requests failed": 800,
    "clients left": 400,
    "clients stopped": 300,
    "clients read slowly": 800,
    "deadlines passed": 250,
    "router failovers": 150,
    "unrouted": 80,
    "peers requested a resend": 5,
    "stale lists shown": 25,
    "rejected": 100,
    "cached_tokens": 100_000,
    # Features; see `features.py`.
    str(FaultKind.WORKERS_GONE): 10,
    str(FaultKind.WORKER_FAIL): 15,
    "clients cut": 100,
    "session kept": 800,
    "session moved": 50,
    "levels passed": 300,
    "queue timeouts": 30,
    "queued at a router death": 25,
    "refused: ALL_WORKERS_BUSY": 70,
    "adapters requested": 800,
    "blocks assumed: approx": 800,
    "models missed": 100,
    "models forgotten": 2,
}

pytestmark = pytest.mark.slow


class TestMeshesOfAggregatedWorkers(SeedSuite):
    seeds = SEEDS
    minimum_counts = MINIMUM_COUNTS
    repeated_seeds = (4, 20)
