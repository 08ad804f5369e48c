"""Figures of Dynamo's Python binding (ai-dynamo), to compare with those of `bench_index`.

    DYNAMO_PYTHON bench/dynamo_binding.py index

Runs in Dynamo's environment, which has none of this project's packages; prints one JSON object. The
work is that of the figure of the same name: chains of 512 blocks, 64 workers.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

CHAIN_BLOCKS = 512
CHAINS = 512
WORKERS = 64
QUERIES = 1000


def index_figures() -> dict[str, float]:
    from dynamo._core import RadixTree, compute_block_hash_for_seq

    rng = random.Random(1)
    prompts = [[rng.randrange(128_000) for _ in range(8192)] for _ in range(100)]
    tree, chains = RadixTree(), [_hashes(rng) for _ in range(CHAINS)]
    events = [(1 + n % WORKERS, _stored_event(n, chain)) for n, chain in enumerate(chains)]
    started_at = time.perf_counter()
    for worker_id, event in events:
        tree.apply_event(worker_id, event)
    tree.find_matches(chains[-1])  # Events are applied by a thread of the tree, in order.
    ingest_s = time.perf_counter() - started_at
    shared = chains[:32]
    for number, chain in enumerate(shared):
        for worker_id in range(1, WORKERS + 1):
            tree.apply_event(worker_id, _stored_event(number, chain))
    queries = [
        shared[n % len(shared)][: rng.randrange(CHAIN_BLOCKS // 2, CHAIN_BLOCKS)]
        for n in range(QUERIES)
    ]
    queries = [query + _hashes(rng)[len(query) :] for query in queries]
    assert len(tree.find_matches(queries[0]).scores) == WORKERS
    return {
        "dynamo_hash_us_8192_tokens": _median_us(
            lambda ids: compute_block_hash_for_seq(ids, 16), prompts
        ),
        "dynamo_ingest_blocks_per_s": round(CHAINS * CHAIN_BLOCKS / ingest_s),
        "dynamo_match_us_512_blocks_64_workers": _median_us(
            lambda query: tree.find_matches(query).scores, queries
        ),
    }


def _hashes(rng: random.Random) -> list[int]:
    return [rng.getrandbits(63) for _ in range(CHAIN_BLOCKS)]


def _stored_event(number: int, chain: list[int]) -> bytes:
    blocks = [{"block_hash": h, "tokens_hash": h, "mm_extra_info": None} for h in chain]
    data = {"stored": {"parent_hash": None, "blocks": blocks}}
    return json.dumps({"event_id": number, "dp_rank": 0, "data": data}).encode()


# Any: an argument of the call.
def _median_us(call: Callable[[Any], object], arguments: Iterable[Any]) -> float:
    times = []
    for argument in arguments:
        started_at = time.perf_counter()
        call(argument)
        times.append(time.perf_counter() - started_at)
    return round(statistics.median(times) * 1e6, 1)


if __name__ == "__main__":
    json.dump({"index": index_figures}[sys.argv[1]](), sys.stdout)
