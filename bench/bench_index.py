"""Measure the KV index (`common/kv/prefix_index.py`); print one JSON line.

    PYTHONPATH=protos:. python bench/bench_index.py [--blocks 1000000] [--sources 64]

The data: chains of 512 blocks, each after one of 16 shared prefixes of 32 blocks, held by one
source in full and by another to a random depth. Queries are such chains with the last 64 blocks
unknown: `rotating` uses another chain each time, `hot` the same one, `all` a chain that every
source holds. Query times are medians. Ingest is in CPU seconds, which depend less on other work on
the machine; `worst_pause_ms` is the longest single batch.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Sequence

import numpy as np

from bench.measure import parse_settings, print_report, rss_mb
from common.kv.events import Hashes, Source
from common.kv.prefix_index import AdvertisedBlocks, PrefixIndex

CHAIN_BLOCKS = 512
SHARED_BLOCKS = 32
UNKNOWN_BLOCKS = 64
BATCH_BLOCKS = 64
QUERIES = 2000


class Data:
    """Chains to store, `blocks` entries in total, and queries."""

    def __init__(self, sources: int, blocks: int) -> None:
        rng = np.random.default_rng(7)
        shared = rng.integers(1, 2**64, (16, SHARED_BLOCKS), dtype=np.uint64)
        count = blocks * 2 // (3 * CHAIN_BLOCKS)
        self.chains = rng.integers(1, 2**64, (count, CHAIN_BLOCKS), dtype=np.uint64)
        self.chains[:, :SHARED_BLOCKS] = shared[rng.integers(0, 16, count)]
        self.shared_chain = rng.integers(1, 2**64, CHAIN_BLOCKS, dtype=np.uint64)
        self.plan: list[tuple[int, Hashes]] = []
        for chain in self.chains:
            whole, part = rng.choice(sources, 2, replace=False).tolist()
            self.plan.append((whole, chain))
            self.plan.append((part, chain[: int(rng.integers(SHARED_BLOCKS, CHAIN_BLOCKS))]))
        self.queries = self.chains[rng.permutation(count)[:QUERIES]].copy()
        self.queries[:, -UNKNOWN_BLOCKS:] = rng.integers(1, 2**64, UNKNOWN_BLOCKS, dtype=np.uint64)


def main() -> None:
    settings = parse_settings(__doc__, blocks=1_000_000, sources=64)
    parameters = vars(settings) | {"chain": CHAIN_BLOCKS, "batch": BATCH_BLOCKS}
    print_report("index", parameters, measure(settings.sources, settings.blocks))


def measure(sources: int, blocks: int) -> dict[str, object]:
    data = Data(sources, blocks)
    gc.collect()
    before_mb = rss_mb(os.getpid())
    index = PrefixIndex()
    held = [index.add_source(Source(number)) for number in range(sources)]
    for advertised in held:
        index.set_visible(advertised, True)
    stored, ingest_s, pause_s = fill(index, held, data)
    used_mb = rss_mb(os.getpid()) - before_mb
    for advertised in held:
        index.store(advertised, data.shared_chain)
    queries = list(data.queries)
    matched = [len(index.match(query)) for query in queries]
    removed, remove_s = remove_and_restore(index, held, data)
    return {
        "entries": stored,
        "rows_per_query": round(statistics.mean(matched), 1),
        "rotating_us": median_query_us(index, queries),
        "hot_us": median_query_us(index, queries[:1] * len(queries)),
        "all_us": median_query_us(index, [data.shared_chain] * len(queries)),
        "miss_us": median_query_us(index, [query[-UNKNOWN_BLOCKS:] for query in queries]),
        "store_mblocks_s": round(stored / ingest_s / 1e6, 2),
        "remove_mblocks_s": round(removed / remove_s / 1e6, 2),
        "bytes_per_entry": round(used_mb * 1e6 / stored),
        "worst_pause_ms": round(pause_s * 1e3, 2),
    }


def fill(
    index: PrefixIndex, held: Sequence[AdvertisedBlocks], data: Data
) -> tuple[int, float, float]:
    """Store the data; returns blocks, CPU seconds, and CPU seconds of the slowest batch."""
    stored, slowest_s = 0, 0.0
    started_at = time.thread_time()
    for source, chain in data.plan:
        for start in range(0, len(chain), BATCH_BLOCKS):
            part = chain[start : start + BATCH_BLOCKS]
            timer_start = time.thread_time()
            index.store(held[source], part)
            slowest_s = max(slowest_s, time.thread_time() - timer_start)
            stored += len(part)
    return stored, time.thread_time() - started_at, slowest_s


def remove_and_restore(
    index: PrefixIndex, held: Sequence[AdvertisedBlocks], data: Data
) -> tuple[int, float]:
    """Remove and restore the tails of 1/8 of the chains; returns blocks and CPU seconds."""
    part = data.plan[: len(data.plan) // 8]
    removed, spent_s = 0, 0.0
    for source, chain in part:
        tail = chain[SHARED_BLOCKS:][::-1].copy()
        timer_start = time.thread_time()
        index.remove(held[source], tail)
        spent_s += time.thread_time() - timer_start
        removed += len(tail)
        index.store(held[source], chain)
    return removed, spent_s


def median_query_us(index: PrefixIndex, queries: Sequence[Hashes]) -> float:
    times = []
    for query in queries:
        timer_start = time.perf_counter()
        index.match(query)
        times.append(time.perf_counter() - timer_start)
    return round(statistics.median(times) * 1e6, 1)


if __name__ == "__main__":
    main()
