"""`python -m worker_svc`: read the configuration, run."""

from __future__ import annotations

import sys
from random import SystemRandom

from common.registry.instances import new_instance_id
from common.runtime import env
from common.runtime.config import read_config_or_exit
from common.service.lifecycle import run_service
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig


def main() -> None:
    """Runs a worker until it is told to stop."""
    config, warnings = read_config_or_exit(WorkerConfig, "WORKER", env.environ(), sys.argv[1:])
    instance_id = new_instance_id(SystemRandom())
    run_service(
        "worker",
        config,
        lambda: WorkerApp(config, instance_id=instance_id),
        instance_id=str(instance_id),
        warnings=warnings,
    )


if __name__ == "__main__":
    main()
