"""Changes of the index run whole, and let others run between their steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from common.index_feed import IndexFeed
from indexer_svc.core.budget import Budget
from indexer_svc.ingest import SLICE_S, Ingest


def busy(steps: int, log: list[str], name: str) -> Iterator[None]:
    """Steps of half a slice each."""
    for _ in range(steps):
        until = time.perf_counter() + SLICE_S / 2
        while time.perf_counter() < until:
            pass
        log.append(name)
        yield


async def test_others_get_a_turn_after_each_slice_and_changes_do_not_mix() -> None:
    ingest = Ingest(IndexFeed(), Budget(0), time.monotonic)
    log: list[str] = []

    async def tick() -> None:
        while log.count("b") < 20:
            log.append("tick")
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ingest.run(busy(20, log, "a")))
        tasks.create_task(ingest.run(busy(20, log, "b")))
        tasks.create_task(tick())
    assert log.count("tick") >= 20, "two steps a slice, a slice a turn"
    work = [entry for entry in log if entry != "tick"]
    assert work == ["a"] * 20 + ["b"] * 20


async def test_a_change_that_is_cut_short_gives_the_lock_back() -> None:
    ingest = Ingest(IndexFeed(), Budget(0), time.monotonic)
    log: list[str] = []
    task = asyncio.create_task(ingest.run(busy(1000, log, "a")))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    await ingest.run(busy(1, log, "b"))
    assert log[-1] == "b"
    assert len(log) < 1000
