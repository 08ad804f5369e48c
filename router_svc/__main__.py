"""`python -m router_svc`: runs a router."""

from __future__ import annotations

import common.runtime  # noqa: F401  # before structlog
from common.service.base import main
from router_svc.app import RouterApp
from router_svc.config import RouterConfig

if __name__ == "__main__":
    main("router", RouterConfig, RouterApp)
