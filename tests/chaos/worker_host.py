"""Several sim workers in one process, so that a small machine can hold a large mesh.

    python -m tests.chaos.worker_host FLAGS...

The flags are those of `python -m worker_svc`. Every worker has its own id, port, engine, publisher
and registration, and serves real gRPC. The workers share the event loop and one registry client,
which polls less often than a separate worker does. kill -9 of the process kills all workers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from random import SystemRandom

from common.registry.file import FileRegistry
from common.registry.instances import new_instance_id
from common.runtime import env, log
from common.runtime.config import read_config_or_exit
from common.runtime.tasks import TaskGroup
from common.service.lifecycle import freeze_startup_objects, run, run_main
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig

WORKERS_PER_HOST = int(os.environ.get("WORKERS_PER_HOST", "10"))
# The workers only look for indexers.
POLL_S = 0.5


class _ReadyCounter:
    """Reports that the host is ready once all of its workers are."""

    def __init__(self, fd: int | None, ids: list[int]) -> None:
        self._fd = fd
        self._ids = ids
        self._left = len(ids)

    def worker_ready(self) -> None:
        self._left -= 1
        if self._left or self._fd is None:
            return
        freeze_startup_objects()
        line = {"instance_id": self._ids[0], "addresses": {}, "workers": self._ids}
        os.write(self._fd, json.dumps(line).encode() + b"\n")
        os.close(self._fd)


def main() -> None:
    """Runs the workers until the process is killed."""
    config, _ = read_config_or_exit(WorkerConfig, "WORKER", env.environ(), sys.argv[1:])
    log.setup(config.log_level, config.log_format, service="workers")
    ids = [new_instance_id(SystemRandom()) for _ in range(WORKERS_PER_HOST)]
    ready = _ReadyCounter(config.ready_fd, ids)
    config = config.model_copy(update={"ready_fd": None})

    async def serve() -> int:
        registry = FileRegistry(config.registry_path, poll_interval_s=POLL_S)
        async with TaskGroup() as tasks:
            for worker_id in ids:
                app = WorkerApp(config, instance_id=worker_id, registry=registry)
                tasks.create_task(
                    run(app, notice_s=0.0, drain_s=0.0, signals=False, on_ready=ready.worker_ready)
                )
            await asyncio.get_running_loop().create_future()
        return 0

    run_main(serve)


if __name__ == "__main__":
    main()
