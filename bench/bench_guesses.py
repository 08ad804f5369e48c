"""Hit rates of approximate and event indexes on one workload, without processes.

    PYTHONPATH=protos:. python -m bench.bench_guesses

Eight workers with LRU caches of a given size serve 4,000 prompts of 300 sessions that grow turn by
turn over 30 common prefixes, 24 at a time. The router uses KV events, approximate entries from its
decisions, or no index. One line of JSON: hit rate (blocks found of blocks sent) by cache size in
blocks and by configuration.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np

from bench.measure import print_report
from common.kv.events import Source
from common.kv.hashing import PrefixHasher, hashes_from_bytes, hashes_to_bytes
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance, Snapshot
from common.request.placement import Placement, Query
from router_svc.config import RouterConfig
from router_svc.core.booking import BookingKey
from router_svc.core.overlap import IndexStatus
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS

BLOCK_SIZE = 16
HASHER = PrefixHasher(mesh_key=b"", model="m", block_size=BLOCK_SIZE)
WORKERS, SESSIONS, SHARED_PREFIXES, REQUESTS, CONCURRENCY = 8, 300, 30, 4000, 24
TURNS_MAX = 12
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "events": {},
    "events and predictions": {"router_predicted_ttl_secs": 5.0},
    "guesses, 120 s": {"kv_events": False},
    "guesses, 20 s": {"kv_events": False, "router_ttl_secs": 20.0},
    "load alone": {"overlap_score_credit": 0.0},
    "round robin": {"selector": "round_robin"},
}


class Caches:
    """The blocks that each worker holds; also an index that is updated at once."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._held: dict[int, OrderedDict[int, None]] = {
            worker_id: OrderedDict() for worker_id in range(1, WORKERS + 1)
        }

    def depth(self, worker_id: int, chain: list[int]) -> int:
        held = self._held[worker_id]
        return next((n for n, block in enumerate(chain) if block not in held), len(chain))

    def match(self, query: Query) -> list[SourceMatch]:
        chain = block_chain(query)
        depths = {worker_id: self.depth(worker_id, chain) for worker_id in self._held}
        return [SourceMatch(Source(w), depth, depth, depth) for w, depth in depths.items() if depth]

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("exact")

    def store(self, worker_id: int, chain: list[int]) -> None:
        held = self._held[worker_id]
        for block in reversed(chain):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._blocks:
            held.popitem(last=False)


def block_chain(query: Query) -> list[int]:
    chain: list[int] = hashes_from_bytes(query.prefix_hashes).tolist()
    return chain


def draw_queries(rng: Random) -> list[Query]:
    """The workload, the same for every configuration."""
    sessions = [(rng.randrange(SHARED_PREFIXES), n, 0) for n in range(SESSIONS)]
    queries = []
    for number in range(REQUESTS):
        at = rng.randrange(SESSIONS)
        prefix, suffix, turns = sessions[at]
        if turns == TURNS_MAX:
            prefix, suffix, turns = rng.randrange(SHARED_PREFIXES), SESSIONS + number, 0
        sessions[at] = (prefix, suffix, turns + 1)
        parts = ((prefix, 20), (SHARED_PREFIXES + suffix, 6 * (turns + 1)))
        tokens = np.concatenate(
            [
                np.random.default_rng(seed).integers(
                    0, 1 << 17, blocks * BLOCK_SIZE, dtype=np.uint32
                )
                for seed, blocks in parts
            ]
        )
        hashes = hashes_to_bytes(HASHER.prefix_hashes(tokens))
        queries.append(Query("m", len(tokens), hashes, 1, BLOCK_SIZE))
    return queries


def measure_hit_rate(queries: list[Query], blocks: int, cost_settings: Mapping[str, Any]) -> float:
    config, caches = RouterConfig(**cost_settings), Caches(blocks)
    router = Router(
        SELECTORS[config.selector](),
        index=caches,
        index_settings=config.index_settings,
        cost_settings=config.cost_settings,
    )
    workers = [
        Instance(
            n, "m", "worker", "", "127.0.0.1:1", model="m", block_size=BLOCK_SIZE, kv_index="events"
        )
        for n in range(1, WORKERS + 1)
    ]
    router.update(Snapshot(1, {worker.id: worker for worker in workers}), 0.0)
    rng = Random(5)
    in_flight: deque[tuple[BookingKey, int, list[int]]] = deque()
    hits = sent = 0
    for number, query in enumerate(queries):
        key, chain = BookingKey(1, str(number), 0), block_chain(query)
        worker_id = router.decide(query, key, number * 0.05, rng).decision.worker.worker_id
        hits += caches.depth(worker_id, chain)
        sent += len(chain)
        in_flight.append((key, worker_id, chain))
        if len(in_flight) > CONCURRENCY:
            ended, at, computed = in_flight.popleft()
            caches.store(at, computed)
            router.load_tracker.free(ended)
    return round(hits / sent, 3)


def main() -> None:
    queries = draw_queries(Random(4))
    rates = {
        str(blocks): {
            variant: measure_hit_rate(queries, blocks, cost_settings)
            for variant, cost_settings in CONFIGURATIONS.items()
        }
        for blocks in (600, 2_500, 20_000)
    }
    print_report("guesses", {"workers": WORKERS, "requests": REQUESTS}, {"hit_rate": rates})


if __name__ == "__main__":
    main()
