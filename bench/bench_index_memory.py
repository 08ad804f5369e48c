"""Push ten times the index's budget of distinct blocks through it: memory and correctness.

    PYTHONPATH=protos:. python bench/bench_index_memory.py [--budget-mb 16] [--times 10]

The engines hold four times the budget and evict their oldest chains, so the index is always over
its budget and publishers withdraw blocks. The resident memory of the indexer is read every 50 ms.
Ten times, `Dump` is compared with the blocks of every engine: an advertised block that its engine
does not hold is a false entry. Prints one JSON line.
"""

from __future__ import annotations

import asyncio
import sys
import time

from bench.index_mesh import (
    CHAIN_BLOCKS,
    IndexerProcess,
    LoopLagMonitor,
    Workers,
    dump,
    running_mesh,
)
from bench.measure import parse_settings, print_report, rss_mb
from kvmesh.indexer.v1 import indexer_pb2

# Bytes per block in the indexer's estimate.
BLOCK_BYTES = 92
HELD_PER_BUDGET = 4
CHECKS = 10
# Limit of the growth: twice the budget, plus streams and a dump.
GROWTH_BUDGETS_MAX = 2
FIXED_OVERHEAD_MB = 16


class MemoryWatch:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.before_mb = self.peak_mb = rss_mb(pid)
        self.used_mb = 0.0

    async def run(self) -> None:
        # Ends: the benchmark cancels it.
        while True:
            self.peak_mb = max(self.peak_mb, rss_mb(self.pid))
            await asyncio.sleep(0.05)


async def push_blocks(budget_mb: int, times: int, count: int) -> dict[str, object]:
    budget_blocks = budget_mb * 1_000_000 // BLOCK_BYTES
    chains = times * budget_blocks // CHAIN_BLOCKS
    capacity = HELD_PER_BUDGET * budget_blocks // CHAIN_BLOCKS // count
    checks: list[dict[str, int]] = []
    async with running_mesh(count, "--budget-mb", str(budget_mb)) as (workers, indexer, spawn):
        watch, pause = MemoryWatch(indexer.pid), LoopLagMonitor()
        spawn(watch.run())
        spawn(pause.watch())
        started_at = time.perf_counter()
        for n in range(1, chains + 1):
            workers.store(n % count)
            if len(workers.cached[n % count]) > capacity:
                workers.evict(n % count)
            await asyncio.sleep(0)
            if n % (chains // CHECKS) == 0:
                checks.append(await _compare_dump(workers, indexer, watch, count))
        seconds = time.perf_counter() - started_at
        end_mb = rss_mb(indexer.pid)
    growth_mb = watch.peak_mb - watch.before_mb
    false_entries = sum(check["false"] for check in checks)
    return {
        "budget_blocks": budget_blocks,
        "pushed_blocks": chains * CHAIN_BLOCKS,
        "held_blocks": capacity * count * CHAIN_BLOCKS,
        "seconds": round(seconds, 1),
        "rss_before_mb": round(watch.before_mb, 1),
        "rss_peak_mb": round(watch.peak_mb, 1),
        "rss_end_mb": round(end_mb, 1),
        "used_peak_mb": round(watch.used_mb, 1),
        "checks": checks,
        "false_entries": false_entries,
        "shrunk_blocks": workers.counters("shrunk_blocks"),
        "longest_pause_of_publishers_ms": round(pause.longest_s * 1e3, 1),
        "is_met": not false_entries
        and growth_mb <= GROWTH_BUDGETS_MAX * budget_mb + FIXED_OVERHEAD_MB,
    }


async def _compare_dump(
    workers: Workers, indexer: IndexerProcess, watch: MemoryWatch, count: int
) -> dict[str, int]:
    async with indexer.stub() as stub:
        stats = await stub.Stats(indexer_pb2.StatsRequest(), timeout=10.0)
        watch.used_mb = max(watch.used_mb, stats.used_bytes / 1e6)
        await workers.wait_until_exact(stub)
        advertised = await dump(stub)
        # Publishers may have withdrawn blocks meanwhile; the engines have not changed.
        held_by_worker = [workers.held_hashes(number) for number in range(count)]
    advertised_blocks = [advertised.get(number + 1, set()) for number in range(count)]
    return {
        "advertised": sum(map(len, advertised_blocks)),
        "held": sum(map(len, held_by_worker)),
        "false": sum(
            len(blocks - held_hashes)
            for blocks, held_hashes in zip(advertised_blocks, held_by_worker, strict=True)
        ),
    }


def main() -> None:
    """Print the result; exit status 1 if memory exceeds its limit or an entry is false."""
    settings = parse_settings(__doc__, budget_mb=16, times=10, workers=4)
    result = asyncio.run(push_blocks(settings.budget_mb, settings.times, settings.workers))
    print_report("index_memory", vars(settings) | {"chain": CHAIN_BLOCKS}, result)
    sys.exit(not result["is_met"])


if __name__ == "__main__":
    main()
