"""The loops of the collector go on whatever members do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.registry.instances import Instance
from common.registry.registry import MemoryRegistry
from common.rpc import channel as rpc
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


async def test_a_member_that_leaves_while_it_is_asked_does_not_end_the_measurements(
    slow_member: tuple[SlowMember, str],
) -> None:
    member, address = slow_member
    config = ConsoleConfig(interval_s=0.2)
    registry = MemoryRegistry()
    subscribers = Subscribers()
    collector = Collector(
        config, registry, rpc.PLAINTEXT, None, can_revoke=False, subscribers=subscribers
    )
    loops = [
        asyncio.create_task(loop)
        for loop in (
            collector.follow_registry(),
            collector.publish_changes(),
            collector.measure(),
        )
    ]
    try:
        router = Instance(7, config.namespace, "router", "router-1", address)
        lease = await registry.register(router)
        await member.was_asked.wait()
        await lease.close()
        await until(lambda: not collector.roster.members, "it has left")
        await until(lambda: not collector.channels.ids, "its channel is not used any more")
        member.may_respond.set()
        version = subscribers.version
        await until(lambda: subscribers.version > version + 2, "it is measured again", within_s=5.0)
        assert not any(loop.done() for loop in loops)
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await collector.close()
        await registry.close()
