"""`python -m frontend_svc`: runs a frontend."""

from __future__ import annotations

from common.service.base import main
from frontend_svc.app import FrontendApp
from frontend_svc.config import FrontendConfig

if __name__ == "__main__":
    main("frontend", FrontendConfig, FrontendApp)
