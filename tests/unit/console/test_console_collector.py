"""The loops of the collector go on whatever members do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.registry.instances import Instance
from common.registry.registry import Lease, MemoryRegistry
from common.rpc import channel as rpc
from console_svc.collect import frontends
from console_svc.collect.collector import Collector, Subscribers
from console_svc.config import ConsoleConfig
from tests.kit.waiting import until


class SlowMember(health_pb2_grpc.HealthServicer):
    """Responds to no health check until it may."""

    def __init__(self) -> None:
        self.was_asked = asyncio.Event()
        self.may_respond = asyncio.Event()

    # Any: the generated classes are not typed.
    async def Check(self, request: Any, context: Any) -> Any:
        self.was_asked.set()
        await self.may_respond.wait()
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture
async def slow_member() -> AsyncIterator[tuple[SlowMember, str]]:
    member = SlowMember()
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(member, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield member, f"127.0.0.1:{port}"
    member.may_respond.set()
    await server.stop(None)


class LosableRegistry(MemoryRegistry):
    """A registry of which reads may fail."""

    is_lost = False

    @property
    def is_reachable(self) -> bool:
        return not self.is_lost


@dataclass
class Running:
    """A collector with its loops."""

    collector: Collector
    subscribers: Subscribers
    registry: LosableRegistry
    loops: Sequence[asyncio.Task[None]]

    async def join(self, address: str) -> Lease:
        """Registers a member."""
        instance = Instance(7, self.collector.overview.namespace, "router", "router-1", address)
        return await self.registry.register(instance)

    async def measured(self) -> None:
        """Returns after two more measurements."""
        version = self.subscribers.version
        await until(lambda: self.subscribers.version > version + 2, "it measures", within_s=5.0)
        assert not any(loop.done() for loop in self.loops)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    config, registry, subscribers = ConsoleConfig(interval_s=0.2), LosableRegistry(), Subscribers()
    collector = Collector(
        config, registry, rpc.PLAINTEXT, None, can_revoke=False, subscribers=subscribers
    )
    loops = [
        asyncio.create_task(loop)
        for loop in (
            *(collector.follow_registry(), collector.publish_changes()),
            *(collector.ask(), collector.measure()),
        )
    ]
    yield Running(collector, subscribers, registry, loops)
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    await collector.close()
    await registry.close()


@pytest.mark.slow
async def test_a_member_that_leaves_while_it_is_asked_does_not_end_the_measurements(
    slow_member: tuple[SlowMember, str], running: Running
) -> None:
    member, address = slow_member
    lease = await running.join(address)
    await member.was_asked.wait()
    await lease.close()
    await until(lambda: not running.collector.roster.members, "it has left")
    await until(lambda: not running.collector.channels.ids, "its channel is not used any more")
    member.may_respond.set()
    await running.measured()


@pytest.mark.slow
async def test_a_member_that_does_not_respond_does_not_delay_the_measurements(
    slow_member: tuple[SlowMember, str], running: Running
) -> None:
    member, address = slow_member
    await running.join(address)
    await member.was_asked.wait()
    await running.measured()
    (shown,) = running.collector.roster.members
    assert not shown.asked_s, "its first query has ended"


@pytest.mark.slow
async def test_a_registry_that_is_lost_is_a_problem(running: Running) -> None:
    def problem() -> str:
        return running.collector.overview.registry_problem

    await until(lambda: not problem(), "the registry is read")
    running.registry.is_lost = True
    await until(lambda: problem() == "its last read failed", "the loss is shown", within_s=5.0)


@pytest.mark.slow
async def test_a_frontend_that_sends_its_metrics_slowly_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frontends, "TIMEOUT_S", 0.2)
    open_connections = set[asyncio.StreamWriter]()

    async def send_slowly(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_connections.add(writer)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            # Ends: the client closes the connection.
            while not writer.is_closing():
                writer.write(b"x")
                await writer.drain()
                # Sleep: each byte arrives in time.
                await asyncio.sleep(0.02)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        open_connections.discard(writer)

    server = await asyncio.start_server(send_slowly, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    frontend = Instance(1, "mesh", "frontend", "f", "x:1", http_address=f"{host}:{port}")
    read = frontends.Frontends(ConsoleConfig(), None)
    async with server, asyncio.timeout(5.0):
        await read.read([frontend])
        await read.close()
        await until(lambda: not open_connections, "the connections are closed")
    assert "no whole response within 0.2 s" in read.problems[0]
