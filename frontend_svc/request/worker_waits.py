"""Requests that wait for a worker of their model to appear or to recover; one timer for all."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from frontend_svc.request.worker_pool import WorkerPool

TICK_S = 0.1


class Waiter(Protocol):
    """A request that waits."""

    def worker_available(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Wait:
    model: str
    adapter: str
    known: frozenset[int]
    until: float


class WorkerWaits:
    """The waiting requests of a frontend. They hold no permit and no booking."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._waits: dict[Waiter, _Wait] = {}
        self._is_ticking = False

    def counts(self) -> Counter[str]:
        """Returns the number of waiting requests of each model that has any."""
        return Counter(wait.model for wait in list(self._waits.values()))

    def add(self, waiter: Waiter, model: str, adapter: str, until: float) -> None:
        """Calls `waiter.worker_available` once: after a worker has joined or its circuit has
        closed, at the latest at `until` (loop time, seconds)."""
        known = self._pool.available(model, adapter)
        self._waits[waiter] = _Wait(model, adapter, known, until)
        if not self._is_ticking:
            self._is_ticking = True
            self._loop.call_later(TICK_S, self._tick)

    def discard(self, waiter: Waiter) -> None:
        self._waits.pop(waiter, None)

    def _tick(self) -> None:
        now = self._loop.time()
        available: dict[tuple[str, str], frozenset[int]] = {}
        for waiter, wait in list(self._waits.items()):
            key = wait.model, wait.adapter
            if key not in available:
                available[key] = self._pool.available(*key)
            if now >= wait.until or not available[key] <= wait.known:
                del self._waits[waiter]
                self._loop.call_soon(waiter.worker_available)
        self._is_ticking = bool(self._waits)
        if self._is_ticking:
            self._loop.call_later(TICK_S, self._tick)
