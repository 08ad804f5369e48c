"""Keeps the models of a catalog loaded while the registry changes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NoReturn

from common.runtime.tasks import TaskGroup
from frontend_svc.models.catalog import ModelCatalog

# Interval of attempts to load a model that failed to load.
MODEL_RETRY_INTERVAL_S = 1.0


async def keep_loaded(
    models: ModelCatalog, snapshot_changed: asyncio.Event, models_loaded: asyncio.Event
) -> NoReturn:
    """Loads the new models of the registry, and retries those that failed to load.

    snapshot_changed: set after each snapshot that the catalog has.
    models_loaded: set when no model is being loaded for the first time.
    """

    async def load_models() -> None:
        await models.load()
        # Another load may still load what this one has skipped.
        if not models.loading:
            models_loaded.set()

    await snapshot_changed.wait()
    # Loads run concurrently, so that a slow card does not delay other models. The catalog loads a
    # model once at a time, which bounds the number of loads by the number of models.
    async with TaskGroup() as loads:
        while True:
            snapshot_changed.clear()
            loads.create_task(load_models())
            while not snapshot_changed.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(MODEL_RETRY_INTERVAL_S):
                        await snapshot_changed.wait()
                if models.not_ready:
                    break
