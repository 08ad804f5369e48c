"""`python -m indexer_svc`: runs a indexer."""

from __future__ import annotations

import common.runtime  # noqa: F401  # before structlog
from common.service.base import main
from indexer_svc.app import IndexerApp
from indexer_svc.config import IndexerConfig

if __name__ == "__main__":
    main("indexer", IndexerConfig, IndexerApp)
