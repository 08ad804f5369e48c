"""Measures how late this process hears of anything, for `core/patience.py`.

Not the loop alone can be late: what comes over gRPC passes through threads of its own, which a
starved machine may leave waiting for seconds while the loop has nothing to do. So the ticker calls
this process's own server, over a socket as peers do, and ticks when the answer is back.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import rpc
from common.errors import MeshError
from frontend_svc.core.patience import TICK_S, Patience

# Longer than any stall that leaves a process of use.
ANSWER_S = 10.0


async def measure(patience: Patience, address: str, security: rpc.Security) -> None:
    """Ticks for ever. address: where this process itself serves gRPC.

    While that refuses (before it has begun, at the end of a drain, or because its certificate names
    another host) the loop alone is measured.
    """
    loop = asyncio.get_running_loop()
    channel = rpc.channel(address, security=security)
    stub: Any = health_pb2_grpc.HealthStub(channel)  # the package has no types
    try:
        while True:
            await asyncio.sleep(TICK_S)
            with contextlib.suppress(MeshError):
                await rpc.unary(
                    stub.Check,
                    health_pb2.HealthCheckRequest(),
                    timeout_s=ANSWER_S,
                    security=security,
                )
            patience.tick(loop.time())
    finally:
        await channel.close()
