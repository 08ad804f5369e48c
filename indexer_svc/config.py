"""The indexer's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.runtime.config import ServiceConfig, at_least, between, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig(ServiceConfig):
    """Flags and `KVMESH_INDEXER_*` variables of `python -m indexer_svc`."""

    budget_mb: int = field(
        default=4096,
        metadata=setting(
            "Memory for the index; above it workers are asked to withdraw blocks, deepest first."
            " 0: no bound. About 110 bytes a block, twice that where hundreds of workers share it;"
            " lower it on small hosts.",
            check=at_least(0),
        ),
    )
    subscriber_mb: int = field(
        default=64,
        metadata=setting(
            "What may wait for a slow router before it is cut and has to resume; raise it when"
            " routers far away are cut at bursts.",
            check=at_least(1),
        ),
    )
    metrics_port: int | None = field(
        default=None,
        metadata=setting(
            "Serve Prometheus metrics over HTTP on this port (0: any); set it to be scraped.",
            check=between(0, 65535),
        ),
    )
