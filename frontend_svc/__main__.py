"""`python -m frontend_svc`: read the configuration, run."""

from __future__ import annotations

import sys
from random import SystemRandom

from common.registry.instances import new_instance_id
from common.runtime import env
from common.runtime.config import read_config_or_exit
from common.service.lifecycle import run_service
from frontend_svc.app import FrontendApp
from frontend_svc.config import FrontendConfig


def main() -> None:
    """Runs a frontend until it is told to stop."""
    config, warnings = read_config_or_exit(FrontendConfig, "FRONTEND", env.environ(), sys.argv[1:])
    instance_id = new_instance_id(SystemRandom())
    run_service(
        "frontend",
        config,
        lambda: FrontendApp(config, instance_id=instance_id),
        instance_id=str(instance_id),
        warnings=warnings,
    )


if __name__ == "__main__":
    main()
