"""150 seeds of a mesh of aggregated workers. More of them: `make sim SEEDS=n`."""

from __future__ import annotations

import pytest

from tests.sim.draws import is_disaggregated
from tests.sim.faults import ALL_FAULTS, FaultKind
from tests.sim.seed_frame import SeedSuite

SEEDS = [seed for seed in range(250) if not is_disaggregated(seed)]
MINIMUM_COUNTS = {
    **dict.fromkeys(map(str, ALL_FAULTS), 7),
    "responses migrated": 100,
    "requests retried": 400,
    "requests failed": 400,
    "clients left": 200,
    "clients stopped": 150,
    "clients read slowly": 400,
    "deadlines passed": 120,
    "router failovers": 75,
    "unrouted": 40,
    "peers requested a resend": 2,
    "stale lists shown": 12,
    "rejected": 50,
    "cached_tokens": 50_000,
    # Features; see `features.py`.
    str(FaultKind.WORKERS_GONE): 5,
    str(FaultKind.WORKER_FAIL): 7,
    "clients cut": 50,
    "session kept": 400,
    "session moved": 25,
    "levels passed": 150,
    "queue timeouts": 15,
    "queued at a router death": 12,
    "refused: ALL_WORKERS_BUSY": 35,
    "adapters requested": 400,
    "blocks assumed: approx": 400,
    "models missed": 50,
    "models forgotten": 1,
}

pytestmark = pytest.mark.slow


class TestMeshesOfAggregatedWorkers(SeedSuite):
    seeds = SEEDS
    minimum_counts = MINIMUM_COUNTS
    repeated_seeds = (4, 20)
