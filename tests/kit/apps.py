"""Runs a service's app inside a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from common.service.health import HealthReporter
from common.service.lifecycle import App, Lifecycle
from tests.kit.waiting import WAIT_S

A = TypeVar("A", bound=App)


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
