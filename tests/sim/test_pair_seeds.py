"""200 seeds of prefill, decode and index together. More of them: `make sim SEEDS=n`."""

from __future__ import annotations

import pytest

from tests.sim.draws import is_disaggregated
from tests.sim.faults import FAILOVERS, FLAPS, HANDOFF_FAULTS, INDEX_FAULTS, FaultKind
from tests.sim.seed_frame import SeedSuite

SEEDS = [seed for seed in range(500) if is_disaggregated(seed)]
# See `test_seeds.py`, which has those faults that need neither pairs nor an index.
MINIMUM_COUNTS = {
    **dict.fromkeys(map(str, (*HANDOFF_FAULTS, *INDEX_FAULTS, *FLAPS, *FAILOVERS)), 5),
    "answers migrated": 20,
    "requests tried again": 150,
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
    "old lists shown": 20,
    "requests parked": 100,
    # Features; see `features.py`.
    str(FaultKind.SUBSCRIBER_SLOW): 30,
    str(FaultKind.WORKERS_GONE): 8,
    "subscribers cut": 5,
    "clients cut": 30,
    "session kept": 400,
    "session moved": 20,
    "sessions kept across": 5,
    "levels passed": 40,
    "queue timeouts": 50,
    "parked at a death": 8,
    "refused: ALL_WORKERS_BUSY": 60,
    "adapters asked for": 300,
    "blocks believed: approx": 200,
    "blocks believed: events": 40,
    "models missed": 30,
    "models forgotten": 2,
}

pytestmark = pytest.mark.slow


class TestMeshesOfPairs(SeedSuite):
    seeds = SEEDS
    minimum_counts = MINIMUM_COUNTS
    repeated_seeds = (3,)
