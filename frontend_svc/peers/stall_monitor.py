"""Measures how late this process hears of anything, for `core/patience.py`.

Not the loop alone can be late: what comes over gRPC passes through threads of its own, which a
starved machine may leave waiting for seconds while the loop has nothing to do. So the ticker calls
this process's own server, over a socket as peers do, and ticks when the answer is back.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import MeshError
from common.rpc import channel as rpc
from common.runtime.config import ServiceConfig
from common.runtime.tasks import TaskGroup
from frontend_svc.core.peers.stall_clock import TICK_S, StallClock

# Longer than any stall that leaves a process of use.
PROBE_TIMEOUT_S = 10.0

# What peers cannot dial, and what reaches a server bound to it from its own host.
_LOOPBACK_BY_WILDCARD = {"": "127.0.0.1", "*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def own_address(config: ServiceConfig, port: int) -> str:
    """Where this process reaches its own server, `host:port`: where that is bound.

    Not where it is advertised: many hosts do not route to themselves by that address.
    """
    host = config.host.strip("[]")
    host = _LOOPBACK_BY_WILDCARD.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_security_of(config: ServiceConfig, security: rpc.Security) -> rpc.Security:
    """The same, but with the name that this process's certificate carries for its peers."""
    return replace(security, server_name=security.server_name or config.advertise_host)


async def run_stall_monitor(stall_clock: StallClock, address: str, security: rpc.Security) -> None:
    """Ticks for ever. address: where this process itself serves gRPC.

    Its answers are waited for only as long as they come. Until the first one (it has not begun, or
    nothing leads there), and after one that failed, the loop alone is measured: an address that
    never answers says nothing about this process.
    """
    loop = asyncio.get_running_loop()
    channel = rpc.channel(address, security=security)
    stub: Any = health_pb2_grpc.HealthStub(channel)  # the package has no types
    is_reachable = False
    try:
        async with TaskGroup() as tasks:
            while True:
                await asyncio.sleep(TICK_S)
                if is_reachable:
                    is_reachable = await _is_reachable(stub, security)
                    stall_clock.tick(loop.time())
                    continue
                stall_clock.tick(loop.time())
                probe = tasks.create_task(_is_reachable(stub, security))
                while not probe.done():
                    await asyncio.wait([probe], timeout=TICK_S)
                    stall_clock.tick(loop.time())
                is_reachable = probe.result()
    finally:
        await channel.close()


async def _is_reachable(stub: Any, security: rpc.Security) -> bool:
    """Whether a call of the own server succeeds."""
    request = health_pb2.HealthCheckRequest()
    try:
        await rpc.unary(stub.Check, request, timeout_s=PROBE_TIMEOUT_S, security=security)
    except MeshError:
        return False
    return True
