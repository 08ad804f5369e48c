"""`python -m console_svc`: runs a console."""

from __future__ import annotations

import common.runtime  # noqa: F401  # before structlog
from common.service.base import main
from console_svc.app import ConsoleApp
from console_svc.config import ConsoleConfig

if __name__ == "__main__":
    main("console", ConsoleConfig, ConsoleApp)
