"""Runs a service's app inside a test, with a clock and waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from common.service.health import HealthReporter
from common.service.lifecycle import App, Lifecycle

# Everything here takes less than a second on an idle machine.
WAIT_S = 30.0

A = TypeVar("A", bound=App)


class Clock:
    """A clock in seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def living(
    app: A, lifecycle: Lifecycle | None = None, *, grace_s: float = 0.0, registered: bool = True
) -> AsyncIterator[A]:
    """Runs an app from its start to its end, in the steps of `common.service.lifecycle`.

    lifecycle: None: a new one. grace_s: see `App.drain`. registered: whether the app registers.
    Raises AssertionError if a task does not end.
    """
    lifecycle = lifecycle or Lifecycle(HealthReporter())
    try:
        await app.start(lifecycle)
        await lifecycle.health.set_enabled(True)
        if registered:
            await app.register()
        yield app
    finally:
        await end(app, lifecycle, grace_s)


async def end(app: App, lifecycle: Lifecycle, grace_s: float = 0.0) -> None:
    """Ends an app in order. Idempotent."""
    lifecycle.drain("test over")
    await app.deregister()
    await app.drain(grace_s)
    stuck = await lifecycle.cancel_tasks(WAIT_S)
    await app.close()
    assert stuck == []


async def until(condition: Callable[[], object], what: str, within_s: float = WAIT_S) -> None:
    """Polls `condition` until it is true. Raises AssertionError with `what`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not condition():
        assert loop.time() < deadline, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.002)
