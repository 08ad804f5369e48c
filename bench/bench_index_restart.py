"""Kill and restart the indexer: seconds until it is exact, checked block by block.

    PYTHONPATH=protos:. python bench/bench_index_restart.py [--blocks 1000000] [--workers 4]

The last worker stores and evicts all the time, the others are idle. Times are measured from
SIGKILL and from the readiness of the new process; the target applies to the latter, because process
start depends on the load of the machine. Then `Dump` is compared with the published blocks of every
publisher, and these with the blocks of its engine. Prints one JSON line.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

from bench.index_mesh import CHAIN_BLOCKS, IndexerProcess, Workers, dump, running_mesh
from bench.measure import parse_settings, print_report, rss_mb

TARGET_S = 5.0


async def measure_restart(blocks: int, count: int, rounds: int) -> dict[str, object]:
    async with running_mesh(count) as (workers, indexer, _):
        for n in range(blocks // CHAIN_BLOCKS):
            workers.store(n % count)
            await asyncio.sleep(0)
        async with indexer.stub() as stub:
            await workers.wait_until_exact(stub)
        rows = [await _restart_once(workers, indexer, count) for _ in range(rounds)]
    return {
        "rows": rows,
        "is_met": all(
            row["exact_after_ready_s"] <= TARGET_S and not row["differences"] for row in rows
        ),
        "target_s": TARGET_S,
        "snapshots": workers.counters("snapshots"),
    }


async def _restart_once(workers: Workers, indexer: IndexerProcess, count: int) -> dict[str, float]:
    churn = asyncio.create_task(_churn(workers, count - 1))
    try:
        started_at = time.perf_counter()
        await indexer.kill()
        await indexer.start()
        ready_s = time.perf_counter() - started_at
        async with indexer.stub() as stub:
            await workers.wait_until_exact(stub)
            exact_s = time.perf_counter() - started_at
            churn.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await churn
            advertised_blocks = await workers.wait_until_exact(stub)
            differences = 0
            advertised = await dump(stub)
            for number in range(count):
                published_blocks = workers.published_hashes(number)
                differences += len(advertised[number + 1] ^ published_blocks)
                differences += len(published_blocks ^ workers.held_hashes(number))
    finally:
        churn.cancel()
    return {
        "ready_s": round(ready_s, 2),
        "exact_s": round(exact_s, 2),
        "exact_after_ready_s": round(exact_s - ready_s, 2),
        "blocks": advertised_blocks,
        "differences": differences,
        "indexer_rss_mb": round(rss_mb(indexer.pid), 1),
    }


async def _churn(workers: Workers, number: int) -> None:
    # Ends: the benchmark cancels it.
    while True:
        workers.store(number)
        workers.evict(number)
        await asyncio.sleep(0.02)


def main() -> None:
    """Print the result; exit status 1 if the target is missed."""
    settings = parse_settings(__doc__, blocks=1_000_000, workers=4, rounds=2)
    result = asyncio.run(measure_restart(settings.blocks, settings.workers, settings.rounds))
    print_report("index_restart", vars(settings) | {"chain": CHAIN_BLOCKS}, result)
    sys.exit(not result["is_met"])


if __name__ == "__main__":
    main()
