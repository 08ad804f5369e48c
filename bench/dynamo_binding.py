"""Figures of Dynamo's Python binding (ai-dynamo), beside those of `bench_index`, `bench_router`.

    DYNAMO_PYTHON bench/dynamo_binding.py index|router

Runs in Dynamo's environment, which has none of this project's packages; prints one JSON object.
index: the work of the figure of the same name, chains of 512 blocks, 64 workers. router:
`SelectionService.select_and_reserve`, which hashes the prompt too; its workers hold no blocks.
"""

from __future__ import annotations

import asyncio
import json
import os
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


def router_figures() -> dict[str, float]:
    os.environ["DYN_LOG"] = "error"
    return {
        "dynamo_select_us_64x8": asyncio.run(_select_us(64, 8)),
        "dynamo_select_us_512x64": asyncio.run(_select_us(512, 64)),
    }


async def _select_us(blocks: int, workers: int) -> float:
    from dynamo._core import SelectionService

    service, rng = SelectionService(indexer_threads=2), random.Random(1)
    for worker_id in range(1, workers + 1):
        worker = {"worker_id": worker_id, "model_name": "m", "block_size": 16}
        # Nothing listens there: the workers are schedulable and send no events.
        worker |= {"endpoint": "http://127.0.0.1:9", "kv_events_endpoint": "tcp://127.0.0.1:9"}
        await service.upsert_worker(worker)
    times = []
    for number in range(QUERIES):
        prompt = [rng.randrange(128_000) for _ in range(16 * blocks + 1)]
        query = {"model_name": "m", "token_ids": prompt, "selection_id": str(number)}
        started_at = time.perf_counter()
        await service.select_and_reserve(query)
        times.append(time.perf_counter() - started_at)
        if number >= 4 * workers:
            await service.prefill_complete(str(number - 4 * workers))
            await service.free_reservation(str(number - 4 * workers))
    service.shutdown()
    return round(statistics.median(times) * 1e6, 1)


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
    figures = {"index": index_figures, "router": router_figures}[sys.argv[1]]()
    sys.stdout.write("\n" + json.dumps(figures) + "\n")
