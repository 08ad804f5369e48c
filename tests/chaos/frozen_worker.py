"""A worker with an engine that hangs after SIGUSR1, while its service runs, and steps after
SIGUSR2.

    python -m tests.chaos.frozen_worker FLAGS...

The flags are those of `python -m worker_svc`; the engine is the sim.
"""

from __future__ import annotations

import asyncio
import signal

from common.runtime.member_key import MemberKey
from common.service.base import main
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.engine_factory import build_engine
from worker_svc.engines.sim.engine import SimEngine

FREEZE = signal.SIGUSR1
THAW = signal.SIGUSR2


def build(config: WorkerConfig, *, instance_id: int, member_key: MemberKey | None) -> WorkerApp:
    """A worker with an engine that the signals stop and resume."""
    engine = build_engine(config)
    assert isinstance(engine, SimEngine), "only the sim can be frozen"
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(FREEZE, engine.freeze)
    loop.add_signal_handler(THAW, engine.unfreeze)
    return WorkerApp(config, instance_id=instance_id, member_key=member_key, engine=engine)


if __name__ == "__main__":
    main("worker", WorkerConfig, build)
