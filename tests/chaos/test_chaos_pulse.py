"""How late a process hears: by its own server's answers, or by its loop alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc_health.v1 import health, health_pb2

from common.rpc import channel as rpc
from frontend_svc.core.peers.stall_clock import StallClock
from frontend_svc.peers.stall_monitor import run_stall_monitor

GIVE_UP_S = 20.0


class SlowHealth(health.aio.HealthServicer):
    """Answers late, as a process does whose gRPC threads are starved.

    The first of all is answered at once: until then only the loop is measured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answer = asyncio.Event()
        self.asked = asyncio.Event()
        self.has_answered = False

    # Any: the package has no types.
    async def Check(self, request: Any, context: Any) -> Any:
        if self.has_answered:
            self.asked.set()
            await self.answer.wait()
        self.has_answered = True
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


class Ticks(StallClock):
    """Counts them. third: set at the third and at each later one."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.count = 0
        self.third = asyncio.Event()

    def tick(self, now: float) -> None:
        super().tick(now)
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
async def test_what_passes_before_its_own_answer_comes_is_lost() -> None:
    loop, servicer, server = asyncio.get_running_loop(), SlowHealth(), rpc.server()
    rpc.add_health(server, servicer)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with asyncio.timeout(GIVE_UP_S), measured(f"127.0.0.1:{port}") as stall_clock:
            await servicer.asked.wait()
            asked_at, before = loop.time(), stall_clock.count
            while stall_clock.stalled_s(loop.time()) < 0.2:
                assert stall_clock.count == before, "no answer, no tick"
                await asyncio.sleep(0.01)
            assert loop.time() - asked_at >= 0.2 - 0.1
            stall_clock.third.clear()
            servicer.answer.set()
            await stall_clock.third.wait()
            assert stall_clock.stalled_s(loop.time()) >= 0.2, "it stays lost"
    finally:
        await server.stop(None)


@pytest.mark.slow
async def test_without_an_own_server_the_loop_is_measured() -> None:
    async with asyncio.timeout(GIVE_UP_S), measured("127.0.0.1:1") as stall_clock:
        await stall_clock.third.wait()
