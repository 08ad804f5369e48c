"""One batch in progress: which of its lines is sent next, and whether all have ended."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from heapq import heappop, heappush
from typing import Final

from batch_svc.core.batch import BatchRow
from batch_svc.store.batches import BatchStore, StoredLine

# Lines that are read from the database at once; the next ones are read when half are left.
PAGE_LINES: Final = 512


class BatchRun:
    """The lines of one batch. Times are seconds of the loop's clock."""

    def __init__(self, batch: BatchRow) -> None:
        self.batch = batch
        # Lines with a result that is not written.
        self.unwritten = 0
        self.is_stopped = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ready: deque[StoredLine] = deque()
        # Lines to send again: at a time, by position.
        self._later: list[tuple[float, int, StoredLine]] = []
        self._failures: dict[int, int] = {}
        self._position = -1
        self._has_all = False

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    @property
    def is_done(self) -> bool:
        """Whether every line has a result in the database."""
        return self._has_all and self.is_idle and not (self._ready or self._later)

    @property
    def is_idle(self) -> bool:
        """Whether no line is in flight or waits to be written."""
        return not (self._tasks or self.unwritten)

    @property
    def needs_lines(self) -> bool:
        """Whether `refill` would read lines."""
        return not self._has_all and len(self._ready) <= PAGE_LINES // 2

    def start(self, line: StoredLine, task: asyncio.Task[None]) -> None:
        """Records that a task sends a line."""
        self._tasks[line.number] = task
        # A task that is cancelled before it begins runs none of its code.
        task.add_done_callback(partial(self._task_done, line))

    def finished(self, line: StoredLine) -> None:
        """Records that the task of a line ends."""
        self._tasks.pop(line.number, None)

    def stop(self) -> None:
        """Ends the lines in flight, which have no result then, and sends no others."""
        self.is_stopped = True
        self._ready.clear()
        self._later.clear()
        for task in self._tasks.values():
            task.cancel()

    def _task_done(self, line: StoredLine, task: asyncio.Task[None]) -> None:
        if self._tasks.get(line.number) is task:
            del self._tasks[line.number]

    def failures(self, line: StoredLine) -> int:
        """Returns the tries of a line that failed by an error of the server."""
        return self._failures.get(line.number, 0)

    def pop(self, now: float) -> StoredLine | None:
        """Returns the next line to send; None if there is none now."""
        if self._later and self._later[0][0] <= now:
            return heappop(self._later)[2]
        return self._ready.popleft() if self._ready else None

    def next_retry_at(self) -> float | None:
        """Returns when a line is sent again; None: none is."""
        return self._later[0][0] if self._later else None

    def retry(self, line: StoredLine, at: float, *, is_failure: bool) -> None:
        """Sends a line again at a time."""
        if is_failure:
            self._failures[line.number] = self.failures(line) + 1
        if not self.is_stopped:
            heappush(self._later, (at, line.position, line))

    def ended(self, line: StoredLine) -> None:
        """Records that a line has a result."""
        self._failures.pop(line.number, None)
        self.unwritten += 1

    async def refill(self, batches: BatchStore) -> None:
        """Reads lines if few are left. Raises Unavailable."""
        if not self.needs_lines or self.is_stopped:
            return
        lines = await batches.next_lines(self.batch.id, self._position, PAGE_LINES)
        self._has_all = len(lines) < PAGE_LINES
        if lines:
            self._position = lines[-1].position
        self._ready.extend(lines)
