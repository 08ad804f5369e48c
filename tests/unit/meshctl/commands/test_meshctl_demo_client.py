"""The demo's client: how it selects the router for its queries."""

from __future__ import annotations

import asyncio

import pytest

from common.registry.instances import Instance
from common.registry.registry import MemoryRegistry, MemoryStore
from meshctl.commands.demo_client import wait_for_router

ROUTER = Instance(7, "default", "router", "", "127.0.0.1:1")


async def test_the_demo_waits_for_a_router_to_register() -> None:
    store = MemoryStore()
    registry = MemoryRegistry(store)
    finding = asyncio.create_task(wait_for_router(registry))
    await registry.register(Instance(1, "default", "frontend", "", "127.0.0.1:2"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not finding.done()
    await MemoryRegistry(store).register(ROUTER)
    async with asyncio.timeout(10):
        assert await finding == ROUTER


async def test_the_wait_for_a_router_has_a_limit() -> None:
    with pytest.raises(SystemExit, match="no router"):
        await wait_for_router(MemoryRegistry(MemoryStore()), find_timeout_s=0.01)
