"""`python -m epp_svc`: runs an endpoint picker."""

from __future__ import annotations

import common.runtime  # noqa: F401  # before structlog
from common.service.base import main
from epp_svc.app import EppApp
from epp_svc.config import EppConfig

if __name__ == "__main__":
    main("epp", EppConfig, EppApp)
