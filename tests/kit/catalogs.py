"""Model catalogs that follow snapshots, as those of a running frontend do."""

from __future__ import annotations

from common.registry.instances import Snapshot, diff_snapshots
from frontend_svc.models.catalog import ModelCatalog


async def follow_and_load(models: ModelCatalog, snapshot: Snapshot) -> bool:
    """Returns False if some model needs another attempt."""
    models.on_snapshot(snapshot, diff_snapshots(models._snapshot, snapshot))
    return await models.load()
