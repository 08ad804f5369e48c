"""The lines of one batch in progress."""

from __future__ import annotations

import asyncio

from batch_svc.core.batch import BatchRow, Owner, Status
from batch_svc.runner.batch_run import BatchRun
from batch_svc.store.batches import StoredLine


async def test_a_batch_is_idle_although_a_task_was_cancelled_before_it_began() -> None:
    batch = BatchRow(
        *("batch_1", Owner(), "/v1/completions", "file-0", "24h", Status.IN_PROGRESS, 0.0, 0.0),
        times={},
    )
    run, line = BatchRun(batch), StoredLine(1, 0, "a", b"{}")

    async def send() -> None:
        run.finished(line)

    task = asyncio.create_task(send())
    run.start(line, task)
    run.stop()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert task.cancelled()
    assert run.is_idle
