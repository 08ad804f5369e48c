"""One of our apps alive in a test's own process, its clock, and waits for what it does there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from common.service.health import HealthReporter
from common.service.lifecycle import App, Lifecycle

# Nothing here takes seconds; a loaded machine may.
WAIT_S = 30.0

A = TypeVar("A", bound=App)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def living(
    app: A, lifecycle: Lifecycle | None = None, *, grace_s: float = 0.0, registered: bool = True
) -> AsyncIterator[A]:
    """The app from its start to its end, in the steps of `common.service.lifecycle`.

    life: one that the test wants to look into. grace_s: see `App.drain`. registered: whether others
    know it. AssertionError when a task of it does not end.
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
    """Ends an app in order; one that was ended already does not mind."""
    lifecycle.drain("test over")
    await app.deregister()
    await app.drain(grace_s)
    stuck = await lifecycle.cancel_tasks(WAIT_S)
    await app.close()
    assert stuck == []


async def until(condition: Callable[[], object], what: str, within_s: float = WAIT_S) -> None:
    """Waits for a condition. AssertionError saying `what` when it is late."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not condition():
        assert loop.time() < deadline, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.002)
