"""100 seeds of prefill, decode and index together. More of them: `make sim SEEDS=n`."""

from __future__ import annotations

import pytest

from tests.sim.draws import is_disaggregated
from tests.sim.faults import FAILOVERS, FLAPS, HANDOFF_FAULTS, INDEX_FAULTS, FaultKind
from tests.sim.seed_frame import SeedSuite

SEEDS = [seed for seed in range(250) if is_disaggregated(seed)]
# `test_seeds.py` has the faults that need neither pairs nor an index.
MINIMUM_COUNTS = {
    **dict.fromkeys(map(str, (*HANDOFF_FAULTS, *INDEX_FAULTS, *FLAPS, *FAILOVERS)), 2),
    "responses migrated": 10,
    "requests retried": 75,
    "pairs failed": 150,
    "rooms_handed_over": 2_500,
    "rooms_aborted": 250,
    "rooms_failed": 100,
    "rooms_timed_out": 1,
    "leases_expired": 15,
    "cached tokens": 250_000,
    "cached tokens predicted": 20_000,
    "batches garbled": 30,
    "batches doubled": 20,
    "gaps": 400,
    "snapshots": 100,
    "router failovers": 20,
    "indexer failovers": 50,
    "stale lists shown": 10,
    "requests queued": 50,
    # Features; see `features.py`.
    str(FaultKind.SUBSCRIBER_SLOW): 15,
    str(FaultKind.WORKERS_GONE): 4,
    str(FaultKind.WORKER_FAIL): 4,
    "subscribers cut": 2,
    "clients cut": 15,
    "session kept": 200,
    "session moved": 10,
    "sessions kept across": 2,
    "levels passed": 20,
    "queue timeouts": 25,
    "queued at a router death": 4,
    "refused: ALL_WORKERS_BUSY": 30,
    "adapters requested": 150,
    "blocks assumed: approx": 100,
    "blocks assumed: events": 20,
    "models missed": 15,
    "models forgotten": 1,
}

pytestmark = pytest.mark.slow


class TestMeshesOfPairs(SeedSuite):
    seeds = SEEDS
    minimum_counts = MINIMUM_COUNTS
    repeated_seeds = (3,)
