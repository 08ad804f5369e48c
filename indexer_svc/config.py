"""Configuration of the indexer: flags `--...` and variables `KVMESH_INDEXER_...`."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from common.runtime.config import ServiceConfig


class IndexerConfig(ServiceConfig):
    """The settings of an indexer."""

    budget_mb: NonNegativeInt = 4096
    """Memory for the index in MB. Above it workers must withdraw blocks, deepest first. 0: no
    limit. A block takes about 110 bytes, twice that if hundreds of workers share it. Lower it on
    small hosts."""
    subscriber_mb: PositiveInt = 64
    """MB queued for a slow router, with the encoded messages, before the indexer disconnects it and
    it has to resume. Raise it if remote routers are disconnected during bursts."""
