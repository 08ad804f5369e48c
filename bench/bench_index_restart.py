"""Kill and restart the indexer: seconds until it is exact, checked block by block.

    PYTHONPATH=protos:. python bench/bench_index_restart.py [--blocks 1000000] [--workers 4]

The last worker stores and evicts all the time, the others are idle. Times are measured from
SIGKILL and from the readiness of the new process; the target applies to the latter, because process
start depends on the load of the machine. Then `Dump` is compared with the published blocks of every
publisher, and these with the blocks of its engine. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

from bench.bench_index import CHAIN_BLOCKS
from bench.index_mesh import IndexerProcess, Workers, dump, silence_logs
from bench.measure import print_report, rss_mb
from common.registry.file import FileRegistry
from common.runtime.tasks import TaskGroup

TARGET_S = 5.0


async def measure_restart(blocks: int, count: int, rounds: int) -> dict[str, object]:
    """Fill, kill, restart, compare; returns the result."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "registry"
        registry, indexer = FileRegistry(path), IndexerProcess(path)
        workers = Workers(count, registry)
        try:
            async with TaskGroup() as tasks:
                await workers.register()
                running = [tasks.create_task(one.run()) for one in workers.publishers]
                try:
                    await indexer.start()
                    await _fill(workers, blocks, count)
                    async with indexer.stub() as stub:
                        await workers.wait_until_exact(stub)
                    rows = [await _restart_once(workers, indexer, count) for _ in range(rounds)]
                finally:
                    for one in running:
                        one.cancel()
        finally:
            await indexer.kill()
            await registry.close()
    return {
        "rows": rows,
        "is_met": all(
            row["exact_after_ready_s"] <= TARGET_S and not row["differences"] for row in rows
        ),
        "target_s": TARGET_S,
        "snapshots": workers.counters("snapshots"),
    }


async def _fill(workers: Workers, blocks: int, count: int) -> None:
    for n in range(blocks // CHAIN_BLOCKS):
        workers.store(n % count)
        await asyncio.sleep(0)


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
    while True:
        workers.store(number)
        workers.evict(number)
        await asyncio.sleep(0.02)


def main() -> None:
    """Print the result; exit status 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    settings = parser.parse_args()
    silence_logs()
    load_before = os.getloadavg()[0]
    result = asyncio.run(measure_restart(settings.blocks, settings.workers, settings.rounds))
    parameters = vars(settings) | {"chain": CHAIN_BLOCKS}
    print_report("index_restart", parameters, result, load_1m_before=load_before)
    sys.exit(not result["is_met"])


if __name__ == "__main__":
    main()
