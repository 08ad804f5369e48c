"""Measure structures for the KV index; print one JSON line.

    PYTHONPATH=protos:. python bench/bench_index.py [--blocks 1000000] [--sources 8 64 256]

Candidates, each in its own process:

- `sets`: one set of hashes per source; a query bisects in each set.
- `flat`: one dict from hash to a mask of sources; a query bisects where the mask changes.
- `sharded`: the same in 256 dicts, with logs to list sources: `common/kv/prefix_index.py`.

The data: chains of 512 blocks, each after one of 16 shared prefixes of 32 blocks, held by one
source in full and by another to a random depth. Queries are such chains with the last 64 blocks
unknown: `rotating` uses another chain each time, `hot` the same one, `all` a chain that every
source holds. Query times are medians. Ingest is in CPU seconds, which depend less on other work on
the machine; `worst_pause_ms` is the longest single batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from bench.measure import print_report, rss_mb
from common.kv.events import Hashes, Source
from common.kv.prefix_index import AdvertisedBlocks, PrefixIndex

CHAIN_BLOCKS = 512
SHARED_BLOCKS = 32
UNKNOWN_BLOCKS = 64
BATCH_BLOCKS = 64
QUERIES = 2000
STRUCTURES = ("sets", "flat", "sharded")


class Index(Protocol):
    """A candidate; sources are numbers."""

    def store(self, source: int, hashes: Hashes) -> None: ...

    def remove(self, source: int, hashes: Hashes) -> None: ...

    def match(self, hashes: Hashes) -> Sequence[object]: ...


class Sets:
    """One set per source."""

    def __init__(self, sources: int) -> None:
        self._sets: list[set[int]] = [set() for _ in range(sources)]

    def store(self, source: int, hashes: Hashes) -> None:
        self._sets[source].update(hashes.tolist())

    def remove(self, source: int, hashes: Hashes) -> None:
        self._sets[source].difference_update(hashes.tolist())

    def match(self, hashes: Hashes) -> list[tuple[int, int]]:
        keys = hashes.tolist()
        first, last, count = keys[0], keys[-1], len(keys)
        rows = []
        for source, held in enumerate(self._sets):
            if first not in held:
                continue
            low, high = 1, count
            if last in held:
                low = count
            while low < high:
                middle = (low + high) // 2
                if keys[middle] in held:
                    low = middle + 1
                else:
                    high = middle
            rows.append((source, low))
        return rows


class Flat:
    """One dict from hash to mask."""

    def __init__(self, sources: int) -> None:
        self._masks: dict[int, int] = {}
        self._bits = [1 << number for number in range(sources)]

    def store(self, source: int, hashes: Hashes) -> None:
        bit, masks = self._bits[source], self._masks
        for key in hashes.tolist():
            mask = masks.get(key)
            masks[key] = bit if mask is None else mask | bit

    def remove(self, source: int, hashes: Hashes) -> None:
        bit, masks = self._bits[source], self._masks
        for key in hashes.tolist():
            mask = masks.get(key, 0)
            if mask == bit:
                del masks[key]
            elif mask & bit:
                masks[key] = mask ^ bit

    def match(self, hashes: Hashes) -> list[tuple[int, int]]:
        keys, masks = hashes.data, self._masks
        count, left_index, held = len(keys), 0, masks.get(keys[0], 0)
        rights = [(count, 0), (count - 1, masks.get(keys[count - 1], 0))]
        rows: list[tuple[int, int]] = []
        while held:
            right_index, mask = rights[-1]
            mask &= held
            if mask != held and right_index - left_index > 1:
                middle = (left_index + right_index) // 2
                rights.append((middle, masks.get(keys[middle], 0)))
                continue
            lost = held ^ mask
            while lost:
                bit = lost & -lost
                lost ^= bit
                rows.append((bit.bit_length() - 1, right_index))
            left_index, held = right_index, mask
            rights.pop()
        return rows


class Sharded:
    """The index of the product."""

    def __init__(self, sources: int) -> None:
        self._index = PrefixIndex()
        self._handles: list[AdvertisedBlocks] = [
            self._index.add_source(Source(n)) for n in range(sources)
        ]
        for advertised in self._handles:
            self._index.set_visible(advertised, True)

    def store(self, source: int, hashes: Hashes) -> None:
        self._index.store(self._handles[source], hashes)

    def remove(self, source: int, hashes: Hashes) -> None:
        self._index.remove(self._handles[source], hashes)

    def match(self, hashes: Hashes) -> Sequence[object]:
        return self._index.match(hashes)


FACTORIES: dict[str, Callable[[int], Index]] = {"sets": Sets, "flat": Flat, "sharded": Sharded}


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
    """Run one candidate, or each of them in its own process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--sources", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--only", choices=STRUCTURES)
    settings = parser.parse_args()
    if settings.only:
        result = measure(settings.only, settings.sources[0], settings.blocks)
        sys.stdout.write(json.dumps(result) + "\n")
        return
    load_before = os.getloadavg()[0]
    rows = [
        run_in_subprocess(name, sources, settings.blocks)
        for sources in settings.sources
        for name in STRUCTURES
    ]
    parameters = {"blocks": settings.blocks, "chain": CHAIN_BLOCKS, "batch": BATCH_BLOCKS}
    print_report("index", parameters, {"rows": rows}, load_1m_before=load_before)


def run_in_subprocess(name: str, sources: int, blocks: int) -> dict[str, object]:
    """Return the row of one candidate, from a new process, which isolates its memory."""
    command = [sys.executable, __file__, "--only", name, "--sources", str(sources)]
    done = subprocess.run(
        [*command, "--blocks", str(blocks)], check=True, capture_output=True, text=True
    )
    row: dict[str, object] = json.loads(done.stdout)
    return row


def measure(name: str, sources: int, blocks: int) -> dict[str, object]:
    """Measure one candidate: fill, remove a part, restore it, query."""
    data = Data(sources, blocks)
    gc.collect()
    before_mb = rss_mb(os.getpid())
    index = FACTORIES[name](sources)
    stored, ingest_s, pause_s = fill(index, data)
    used_mb = rss_mb(os.getpid()) - before_mb
    for source in range(sources):
        index.store(source, data.shared_chain)
    queries = list(data.queries)
    matched = [len(index.match(query)) for query in queries]
    removed, remove_s = remove_and_restore(index, data)
    return {
        "structure": name,
        "sources": sources,
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


def fill(index: Index, data: Data) -> tuple[int, float, float]:
    """Store the data; returns blocks, CPU seconds, and CPU seconds of the slowest batch."""
    stored, slowest_s = 0, 0.0
    started_at = time.thread_time()
    for source, chain in data.plan:
        for start in range(0, len(chain), BATCH_BLOCKS):
            part = chain[start : start + BATCH_BLOCKS]
            timer_start = time.thread_time()
            index.store(source, part)
            slowest_s = max(slowest_s, time.thread_time() - timer_start)
            stored += len(part)
    return stored, time.thread_time() - started_at, slowest_s


def remove_and_restore(index: Index, data: Data) -> tuple[int, float]:
    """Remove and restore the tails of 1/8 of the chains; returns blocks and CPU seconds."""
    part = data.plan[: len(data.plan) // 8]
    removed, spent_s = 0, 0.0
    for source, chain in part:
        tail = chain[SHARED_BLOCKS:][::-1].copy()
        timer_start = time.thread_time()
        index.remove(source, tail)
        spent_s += time.thread_time() - timer_start
        removed += len(tail)
        index.store(source, chain)
    return removed, spent_s


def median_query_us(index: Index, queries: Sequence[Hashes]) -> float:
    """Return the median microseconds of one query."""
    times = []
    for query in queries:
        timer_start = time.perf_counter()
        index.match(query)
        times.append(time.perf_counter() - timer_start)
    return round(statistics.median(times) * 1e6, 1)


if __name__ == "__main__":
    main()
