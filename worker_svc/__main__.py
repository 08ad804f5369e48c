"""`python -m worker_svc`: runs a worker."""

from __future__ import annotations

import common.runtime  # noqa: F401  # before structlog
from common.service.base import main
from worker_svc.config import WorkerConfig
from worker_svc.servers import build_worker

if __name__ == "__main__":
    main("worker", WorkerConfig, build_worker)
