"""The stall monitor over real gRPC: by replies of its own server, or by the loop alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc_health.v1 import health, health_pb2

from common.rpc import channel as rpc
from frontend_svc.core.peers.stall_clock import TICK_S, StallClock
from frontend_svc.peers.stall_monitor import run_stall_monitor

GIVE_UP_S = 20.0


class SlowHealth(health.aio.HealthServicer):
    """Replies late, like a process with starved gRPC threads.

    The first reply is immediate: until then only the loop is measured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.may_reply = asyncio.Event()
        self.called = asyncio.Event()
        self.has_replied = False

    # Any: the package has no types.
    async def Check(self, request: Any, context: Any) -> Any:
        if self.has_replied:
            self.called.set()
            await self.may_reply.wait()
        self.has_replied = True
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


class Ticks(StallClock):
    """Counts ticks. third: set at the third and at each later tick."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.count = 0
        self.third = asyncio.Event()

    def tick(self, now: float, interval_s: float = TICK_S) -> None:
        super().tick(now, interval_s)
        self.count += 1
        if self.count >= 3:
            self.third.set()


@asynccontextmanager
async def measured(address: str) -> AsyncIterator[Ticks]:
    stall_clock = Ticks(asyncio.get_running_loop().time())
    task = asyncio.create_task(run_stall_monitor(stall_clock, address, rpc.PLAINTEXT))
    try:
        yield stall_clock
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.slow
async def test_time_until_the_own_server_replies_counts_as_stall() -> None:
    loop, servicer, server = asyncio.get_running_loop(), SlowHealth(), rpc.server()
    rpc.add_health(server, servicer)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with asyncio.timeout(GIVE_UP_S), measured(f"127.0.0.1:{port}") as stall_clock:
            await servicer.called.wait()
            called_at, before = loop.time(), stall_clock.count
            while stall_clock.stalled_s(loop.time()) < 0.2:
                assert stall_clock.count == before, "no tick without a reply"
                await asyncio.sleep(0.01)
            assert loop.time() - called_at >= 0.2 - 0.1
            stall_clock.third.clear()
            servicer.may_reply.set()
            await stall_clock.third.wait()
            assert stall_clock.stalled_s(loop.time()) >= 0.2, "the stall stays counted"
    finally:
        await server.stop(None)


@pytest.mark.slow
async def test_without_an_own_server_the_loop_is_measured() -> None:
    async with asyncio.timeout(GIVE_UP_S), measured("127.0.0.1:1") as stall_clock:
        await stall_clock.third.wait()
