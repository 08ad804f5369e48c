"""`python -m batch_svc`: runs a batch service."""

from __future__ import annotations

import common.runtime  # noqa: F401  # before structlog
from batch_svc.app import BatchApp
from batch_svc.config import BatchConfig
from common.service.base import main

if __name__ == "__main__":
    main("batch", BatchConfig, BatchApp)
