"""200 seeds of prefill, decode and index together. More of them: `make sim SEEDS=n`."""

from __future__ import annotations

import pytest

from tests.sim.draws import is_disaggregated
from tests.sim.faults import FAILOVERS, FLAPS, HANDOFF_FAULTS, INDEX_FAULTS, FaultKind
from tests.sim.seed_frame import SeedSuite

SEEDS = [seed for seed in range(500) if is_disaggregated(seed)]
# `test_seeds.py` has the faults that need neither pairs nor an index.
MINIMUM_COUNTS = {
    **dict.fromkeys(map(str, (*HANDOFF_FAULTS, *INDEX_FAULTS, *FLAPS, *FAILOVERS)), 5),
    "responses migrated": 20,
    "requests retried": 150,
    "pairs failed": 300,
    "rooms_handed_over": 5_000,
    "rooms_aborted": 500,
    "rooms_failed": 200,
    "rooms_timed_out": 1,
    "leases_expired": 30,
    "cached tokens": 500_000,
    "cached tokens predicted": 40_000,
    "batches garbled": 60,
    "batches doubled": 40,
    "gaps": 800,
    "snapshots": 200,
    "router failovers": 40,
    "indexer failovers": 100,
    "stale lists shown": 20,
    "requests queued": 100,
    # Features; see `features.py`.
    str(FaultKind.SUBSCRIBER_SLOW): 30,
    str(FaultKind.WORKERS_GONE): 8,
    str(FaultKind.WORKER_FAIL): 8,
    "subscribers cut": 5,
    "clients cut": 30,
    "session kept": 400,
    "session moved": 20,
    "sessions kept across": 5,
    "levels passed": 40,
    "queue timeouts": 50,
    "queued at a router death": 8,
    "refused: ALL_WORKERS_BUSY": 60,
    "adapters requested": 300,
    "blocks assumed: approx": 200,
    "blocks assumed: events": 40,
    "models missed": 30,
    "models forgotten": 2,
}

pytestmark = pytest.mark.slow


class TestMeshesOfPairs(SeedSuite):
    seeds = SEEDS
    minimum_counts = MINIMUM_COUNTS
    repeated_seeds = (3,)
