"""Writes the results of lines, many in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NoReturn

import structlog

from batch_svc.core.results import Result
from batch_svc.store.batches import BatchStore
from batch_svc.store.lease import RunnerLease
from common.errors import Unavailable

LOG = structlog.get_logger(__name__)

# Between two writes: results that end together are written together.
PAUSE_S: Final = 0.02
RETRY_S: Final = 0.25
_PER_WRITE_MAX: Final = 512


class ResultWriter:
    """Results that are not written yet, oldest first. on_written: called with the batch and the
    number of lines of each write."""

    def __init__(
        self,
        batches: BatchStore,
        lease: RunnerLease,
        on_written: Callable[[str, int], None],
    ) -> None:
        self._batches = batches
        self._lease = lease
        self._on_written = on_written
        self._pending: list[tuple[str, int, Result]] = []
        self._has_pending = asyncio.Event()

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, batch_id: str, number: int, result: Result) -> None:
        self._pending.append((batch_id, number, result))
        self._has_pending.set()

    async def run(self) -> NoReturn:
        """Writes until cancelled. A lost database delays the results. Raises LeaseLost."""
        while True:
            await self._has_pending.wait()
            part = self._pending[:_PER_WRITE_MAX]
            try:
                await self._write(part)
            except Unavailable as error:
                LOG.warning("batch_results_delayed", results=len(self._pending), error=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            del self._pending[: len(part)]
            if not self._pending:
                self._has_pending.clear()
            for batch_id, count in _counts(part).items():
                self._on_written(batch_id, count)
            await asyncio.sleep(PAUSE_S)

    async def _write(self, part: list[tuple[str, int, Result]]) -> None:
        by_batch: dict[str, list[tuple[int, Result]]] = {}
        for batch_id, number, result in part:
            by_batch.setdefault(batch_id, []).append((number, result))
        async with self._lease.transaction() as transaction:
            for batch_id, results in by_batch.items():
                await self._batches.put_results(transaction, batch_id, results)


def _counts(part: list[tuple[str, int, Result]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for batch_id, _, _ in part:
        counts[batch_id] = counts.get(batch_id, 0) + 1
    return counts
