"""Routing by cache must not concentrate load on the workers that hold the cache."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.events import Source
from common.kv.hashing import PrefixHasher, hashes_from_bytes, hashes_to_bytes
from common.kv.load import Load
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance, Snapshot
from common.request.placement import Placement, Query
from router_svc.core.booking import BookingKey
from router_svc.core.cost import CostSettings
from router_svc.core.overlap import IndexStatus
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from tests.kit.instances import snapshot_of

B = 16
HASHER = PrefixHasher(mesh_key=b"", model="m", block_size=B)


class Caches:
    """Workers that cache every computed prompt, and an index without delay."""

    def __init__(self) -> None:
        self.held: dict[int, set[int]] = {}

    def match(self, query: Query) -> list[SourceMatch]:
        chain = hashes_from_bytes(query.prefix_hashes).tolist()
        rows = []
        for worker_id, held in self.held.items():
            depth = next((n for n, block in enumerate(chain) if block not in held), len(chain))
            if depth:
                rows.append(SourceMatch(Source(worker_id), depth, depth, depth))
        return rows

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("exact")

    def keep(self, worker_id: int, query: Query) -> None:
        held = self.held.setdefault(worker_id, set())
        held.update(hashes_from_bytes(query.prefix_hashes).tolist())


class Fleet:
    """A router over `workers` of these workers; requests run until a test ends them."""

    def __init__(self, workers: int, **cost_settings: Any) -> None:
        self.caches = Caches()
        self.router = Router(
            SELECTORS["kv"](), index=self.caches, cost_settings=CostSettings(**cost_settings)
        )
        members = [
            Instance(
                n, "mesh", "worker", "", "127.0.0.1:1", model="m", block_size=B, kv_index="events"
            )
            for n in range(1, workers + 1)
        ]
        self.router.update(snapshot_of(*members), 0.0)
        self.rng = Random(3)
        self.now = 0.0
        self.count = 0

    def send(self, query: Query, *, computed: bool = True) -> tuple[int, BookingKey]:
        """The worker of a request. computed: its prefill is done and indexed."""
        self.count += 1
        key = BookingKey(7, f"r{self.count}", 0)
        worker = self.router.decide(query, key, self.now, self.rng).decision.worker.worker_id
        if computed:
            self.caches.keep(worker, query)
            self.router.load_tracker.mark_prefill_done(key)
        return worker, key

    def serve(self, query: Query, seconds: float = 1.0) -> int:
        """Run a request to its end: the fleet is idle afterwards."""
        worker, key = self.send(query)
        self.now += seconds
        assert self.router.load_tracker.free(key)
        return worker


def prompt(*parts: tuple[int, int]) -> Query:
    """A prompt of (seed, blocks) pieces: equal prefixes are equal blocks."""
    pieces = [
        np.random.default_rng(seed).integers(0, 1 << 17, blocks * B, dtype=np.uint32)
        for seed, blocks in parts
    ]
    tokens = np.concatenate(pieces)
    return Query("m", len(tokens), hashes_to_bytes(HASHER.prefix_hashes(tokens)), 1, B)


@settings(max_examples=25, deadline=None)
@given(
    workers=st.integers(2, 8),
    per_worker=st.integers(2, 8),
    blocks=st.integers(1, 40),
)
def test_identical_prompts_of_one_moment_spread_evenly(
    workers: int, per_worker: int, blocks: int
) -> None:
    fleet = Fleet(workers)
    query = prompt((1, blocks))
    sent = [fleet.send(query, computed=False)[0] for _ in range(workers * per_worker)]
    shares = Counter(sent)
    assert max(shares.values()) <= per_worker + 2, shares


@pytest.mark.parametrize("blocks", [1, 8, 40])
def test_at_most_a_hundred_more_requests_than_elsewhere_stay_with_a_cached_prompt(
    blocks: int,
) -> None:
    """The default weights: two blocks to compute cost as much as a hundred held ones."""
    fleet = Fleet(4)
    query = prompt((1, blocks))
    shares = Counter(fleet.send(query)[0] for _ in range(400))
    assert max(shares.values()) - min(shares.values()) <= 101, shares


def one_at_a_time(fleet: Fleet, common: int, own: int, sessions: int = 120) -> Counter[int]:
    return Counter(fleet.serve(prompt((0, common), (n, own))) for n in range(1, sessions + 1))


@pytest.mark.parametrize(("common", "own"), [(0, 8), (2, 8), (8, 24), (16, 16)])
def test_sessions_that_arrive_one_at_a_time_spread(common: int, own: int) -> None:
    shares = one_at_a_time(Fleet(4), common, own)
    assert max(shares.values()) <= 120 * 0.4, shares
    assert len(shares) == 4


def test_without_the_recent_miss_term_all_sessions_would_use_one_worker() -> None:
    shares = one_at_a_time(Fleet(4, recent_miss_weight=0.0), 2, 8)
    assert list(shares.values()) == [120]


def test_a_single_session_stays_with_its_cache() -> None:
    fleet = Fleet(4)
    turns: list[tuple[int, int]] = [(0, 8)]
    homes = []
    for turn in range(1, 40):
        turns.append((turn, 2))
        homes.append(fleet.serve(prompt(*turns), seconds=5.0))
    assert len(set(homes)) == 1, homes


def test_a_stuck_worker_does_not_drain_the_caches_of_the_others() -> None:
    fleet = Fleet(4)
    histories = {n: [(n, 24)] for n in range(1, 25)}
    homes = {n: fleet.send(prompt(*turns)) for n, turns in histories.items()}
    for _, key in homes.values():
        fleet.router.load_tracker.free(key)
    assert len({worker for worker, _ in homes.values()}) == 4
    stuck = 1
    fleet.router.load_tracker.report(
        stuck, 0, Load(running=8, waiting=500, waiting_tokens=10**6, kv_used_blocks=10**5), 0.0
    )
    for _ in range(60):
        fleet.send(prompt((999, 8)), computed=False)
    for n, turns in histories.items():
        home = homes[n][0]
        fleet.router.load_tracker.report(
            stuck, 0, Load(waiting=500, waiting_tokens=10**6, kv_used_blocks=10**5), fleet.now
        )
        if home != stuck:
            turns.append((n + 1000, 1))
            worker, key = fleet.send(prompt(*turns))
            assert worker == home
            fleet.router.load_tracker.free(key)


def test_a_new_worker_gets_new_sessions_and_old_ones_stay() -> None:
    fleet = Fleet(2)
    homes = {n: fleet.serve(prompt((n, 24))) for n in range(1, 21)}
    members = dict(fleet.router.fleet._snapshot.instances)
    members[3] = Instance(
        3, "mesh", "worker", "", "127.0.0.1:1", model="m", block_size=B, kv_index="events"
    )
    fleet.router.update(Snapshot(2, members), fleet.now)
    assert {fleet.serve(prompt((n, 24), (n + 500, 2))) for n in (1,)} == {homes[1]}
    fresh = Counter(fleet.serve(prompt((n, 24))) for n in range(100, 110))
    assert fresh[3] >= 5, fresh
