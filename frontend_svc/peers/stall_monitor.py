"""Measures how late this process receives messages, for `core/peers/stall_clock.py`.

Not only the event loop can be late: gRPC messages pass through threads of its own, which a starved
machine may leave waiting for seconds while the loop is idle. So the monitor calls the server of
this process over a socket, as peers do, and ticks the clock when the reply is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import MeshError
from common.rpc import channel as rpc
from common.runtime.config import ServiceConfig
from common.runtime.tasks import TaskGroup
from frontend_svc.core.peers.stall_clock import IDLE_TICK_S, TICK_S, StallClock

# Longer than any stall after which a process is still of use.
PROBE_TIMEOUT_S = 10.0

# Bind addresses that cannot be dialled, and the loopback address that reaches them.
_LOOPBACK_BY_WILDCARD = {"": "127.0.0.1", "*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def own_address(config: ServiceConfig, port: int) -> str:
    """Returns where this process reaches its own server, `host:port`. This is the bound address.
    Many hosts do not route to themselves by the advertised address."""
    host = config.host.strip("[]")
    host = _LOOPBACK_BY_WILDCARD.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_security_of(config: ServiceConfig, security: rpc.Security) -> rpc.Security:
    """Returns `security` with the name that this process's certificate carries for peers."""
    return replace(security, server_name=security.server_name or config.advertise_host)


async def run_stall_monitor(
    stall_clock: StallClock,
    address: str,
    security: rpc.Security,
    is_busy: Callable[[], bool] = lambda: True,
) -> None:
    """Ticks the clock until it is cancelled. address: where this process serves gRPC. Before the
    first reply, and after a failed call, only the loop is measured: an address without replies
    proves nothing about this process. is_busy: whether requests are open; else a tick is due every
    IDLE_TICK_S."""
    loop = asyncio.get_running_loop()
    channel = rpc.channel(address, role="frontend", security=security)
    stub: Any = health_pb2_grpc.HealthStub(channel)  # the package has no types
    is_reachable = False
    try:
        async with TaskGroup() as tasks:
            while True:
                interval_s = IDLE_TICK_S if is_reachable and not is_busy() else TICK_S
                stall_clock.tick(loop.time(), interval_s)
                await asyncio.sleep(interval_s)
                if is_reachable:
                    is_reachable = await _is_reachable(stub)
                    continue
                stall_clock.tick(loop.time())
                probe = tasks.create_task(_is_reachable(stub))
                while not probe.done():
                    await asyncio.wait([probe], timeout=TICK_S)
                    stall_clock.tick(loop.time())
                is_reachable = probe.result()
    finally:
        await channel.close()


async def _is_reachable(stub: Any) -> bool:
    request = health_pb2.HealthCheckRequest()
    try:
        await rpc.unary(stub.Check, request, timeout_s=PROBE_TIMEOUT_S)
    except MeshError:
        return False
    return True
