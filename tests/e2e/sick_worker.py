"""A worker with defects for doctor to find, beside those that its flags make:

- its clock is CLOCK_AHEAD_S ahead;
- it is of another version;
- it lists a KV block that it has not published.

    python -m tests.e2e.sick_worker FLAGS...
"""

from __future__ import annotations

import time
from importlib import metadata
from typing import Any

from common.service.base import main
from kvmesh.engine.v1 import engine_pb2
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.serving.service import EngineServicer

CLOCK_AHEAD_S = 300.0
VERSION = "0.0.9"


async def list_one_more(self: EngineServicer, request: Any, context: Any) -> None:
    assert self.publisher is not None
    for chunk in self.publisher.sources[request.dp_rank].event_log.snapshot():
        await context.write(
            engine_pb2.ListKvBlocksResponse(
                epoch=chunk.epoch, sequence=chunk.sequence, prefix_hashes=bytes(8), tier="device"
            )
        )
        return


if __name__ == "__main__":
    unix_s = time.time
    time.time = lambda: unix_s() + CLOCK_AHEAD_S
    metadata.version = lambda distribution_name: VERSION
    EngineServicer.ListKvBlocks = list_one_more  # type: ignore[method-assign]
    main("worker", WorkerConfig, WorkerApp)
