"""A worker whose engine hangs after SIGUSR1, while its service runs, and steps again after SIGUSR2.

    python -m tests.chaos.frozen_worker FLAGS...

The flags are those of `python -m worker_svc`; the engine is the sim.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from random import SystemRandom

from common.registry.instances import new_instance_id
from common.runtime import env
from common.runtime.config import read_config_or_exit
from common.service.lifecycle import run_service
from worker_svc.app import WorkerApp, build_engine
from worker_svc.config import WorkerConfig
from worker_svc.engines.sim.engine import SimEngine

FREEZE = signal.SIGUSR1
THAW = signal.SIGUSR2


def main() -> None:
    """Runs a worker until a signal stops it."""
    config, warnings = read_config_or_exit(WorkerConfig, "WORKER", env.environ(), sys.argv[1:])
    instance_id = new_instance_id(SystemRandom())

    def build() -> WorkerApp:
        engine = build_engine(config)
        assert isinstance(engine, SimEngine), "only the sim can be frozen"
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(FREEZE, engine.freeze)
        loop.add_signal_handler(THAW, engine.unfreeze)
        return WorkerApp(config, instance_id=instance_id, engine=engine)

    run_service("worker", config, build, instance_id=str(instance_id), warnings=warnings)


if __name__ == "__main__":
    main()
