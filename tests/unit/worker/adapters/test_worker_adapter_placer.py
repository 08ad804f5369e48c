"""Workers that place adapters, in one registry and in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from random import Random
from typing import Any

from structlog.testing import capture_logs

from common.errors import InvalidRequest
from common.registry.adapters import ADAPTERS_META_KEY, AdapterState, DesiredAdapter
from common.registry.registry import (
    Lease,
    MemoryRegistry,
    MemoryStore,
    desired_adapters,
    follow,
    remove_adapter,
)
from tests.kit.instances import worker
from tests.sim.loop import run_virtually
from worker_svc.adapters.loaded import LoadedAdapters
from worker_svc.adapters.placer import AdapterPlacer

NAMESPACE = "mesh"
NOTICE_S = 0.5


class FakeEngine:
    """An engine with adapters. broken: those that it cannot load."""

    def __init__(self) -> None:
        self.loras: frozenset[str] = frozenset()
        self.broken: set[str] = set()

    async def load_lora(self, name: str, uri: str) -> frozenset[str]:
        await asyncio.sleep(0.1)
        if name in self.broken:
            raise InvalidRequest(f"the worker has no folder {uri}", "uri")
        self.loras |= {name}
        return self.loras

    async def unload_lora(self, name: str) -> frozenset[str]:
        self.loras -= {name}
        return self.loras


class Member:
    """A worker of the model `m` with an engine of adapters."""

    def __init__(self, store: MemoryStore, worker_id: int) -> None:
        self.store = store
        self.registry = MemoryRegistry(store)
        self.engine = FakeEngine()
        self.requests: Counter[str] = Counter()
        self.loads: list[bool] = []
        meta = {ADAPTERS_META_KEY: AdapterState().to_text()}
        self._instance = worker(worker_id, stable_name=f"worker-{worker_id}", meta=meta)
        self._lease: Lease | None = None
        adapters = LoadedAdapters(
            self.engine,
            self,
            asyncio.Lock(),
            model="m",
            loras=frozenset(),
            notice_s=NOTICE_S,
        )
        self.placer = AdapterPlacer(
            self.registry,
            worker_id,
            adapters,
            self,
            namespace=NAMESPACE,
            model="m",
            role="aggregated",
            open_requests=lambda: self.requests,
            rng=Random(worker_id),
            clock=lambda: asyncio.get_running_loop().time(),
            on_load=self.loads.append,
        )
        self.tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        self._lease = await self.registry.register(self._instance)
        members = follow(self.registry, NAMESPACE, self.placer.on_snapshot)
        self.tasks = [asyncio.create_task(members), asyncio.create_task(self.placer.run())]

    async def kill(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        await self.registry.close()

    async def drain(self) -> float:
        """Leaves in order; returns the seconds for which it stayed."""
        began_at = asyncio.get_running_loop().time()
        await self.placer.leave(2.0)
        assert self._lease is not None
        await self._lease.close()
        return asyncio.get_running_loop().time() - began_at

    async def advertise_loras(self, loras: frozenset[str]) -> None:
        await self._advertise(loras=loras)

    async def advertise_adapter_state(self, state: AdapterState) -> None:
        await self._advertise(meta={ADAPTERS_META_KEY: state.to_text()})

    async def _advertise(self, **values: Any) -> None:
        self._instance = replace(self._instance, **values)
        if self._lease is not None:
            await self._lease.update(self._instance)


Scenario = Callable[[MemoryRegistry, dict[int, Member]], Awaitable[None]]


def run(scenario: Scenario, *adapters: DesiredAdapter, workers: int = 3) -> None:
    """Runs a scenario on workers that have placed the adapters."""

    async def main() -> None:
        store = MemoryStore()
        registry = MemoryRegistry(store)
        for adapter in adapters:
            await registry.put_adapter(NAMESPACE, adapter)
        members = {i: Member(store, i) for i in range(1, workers + 1)}
        async with AsyncExitStack() as stack:
            for member in members.values():
                await member.start()
                stack.push_async_callback(member.kill)
            await asyncio.sleep(5.0)
            await scenario(registry, members)

    run_virtually(main())


async def advertising(registry: MemoryRegistry, name: str) -> set[int]:
    """Returns the workers that advertise an adapter."""
    snapshot = await registry.snapshot(NAMESPACE)
    return {one.id for one in snapshot.of("worker") if name in one.loras}


def test_a_lost_holder_is_replaced_and_no_other_worker_loads_meanwhile() -> None:
    async def scenario(registry: MemoryRegistry, members: dict[int, Member]) -> None:
        before = await advertising(registry, "a")
        assert len(before) == 2
        assert sum(len(one.loads) for one in members.values()) == 2, "each copy is loaded once"
        lost = min(before)
        await members[lost].kill()
        await asyncio.sleep(0.2)
        assert await advertising(registry, "a") == {1, 2, 3} - {lost}

    run(scenario, DesiredAdapter("a", "m", copies=2))


def test_a_worker_that_drains_leaves_after_another_one_has_loaded() -> None:
    async def scenario(registry: MemoryRegistry, members: dict[int, Member]) -> None:
        (holder,) = await advertising(registry, "a")
        assert 0.09 < await members[holder].drain() < 0.5
        assert len(await advertising(registry, "a")) == 1
        await asyncio.sleep(5.0)
        assert len(await advertising(registry, "a")) == 1

    run(scenario, DesiredAdapter("a", "m", copies=1))


def test_the_last_workers_leave_at_once() -> None:
    async def scenario(registry: MemoryRegistry, members: dict[int, Member]) -> None:
        durations = await asyncio.gather(*(one.drain() for one in members.values()))
        assert max(durations) < 0.1

    run(scenario, DesiredAdapter("a", "m"))


def test_a_removed_adapter_is_unloaded_after_the_notice() -> None:
    async def scenario(registry: MemoryRegistry, members: dict[int, Member]) -> None:
        assert await remove_adapter(registry, NAMESPACE, "a")
        assert not await remove_adapter(registry, NAMESPACE, "a")
        await asyncio.sleep(2.0 + NOTICE_S)
        assert await advertising(registry, "a") == set()
        assert not any(one.engine.loras for one in members.values())

    run(scenario, DesiredAdapter("a", "m"))


def test_a_store_that_lost_its_contents_gets_the_desired_adapters_back() -> None:
    async def scenario(registry: MemoryRegistry, members: dict[int, Member]) -> None:
        held = await advertising(registry, "a")
        assert await remove_adapter(registry, NAMESPACE, "b")
        await asyncio.sleep(2.0 + NOTICE_S)
        members[1].store.adapters.clear()
        with capture_logs() as logs:
            await asyncio.sleep(5.0)
        assert await desired_adapters(registry, NAMESPACE) == (DesiredAdapter("a", "m", copies=2),)
        assert await advertising(registry, "a") == held
        assert not [one for one in logs if one["event"] == "adapter_withdrawn"]

    run(scenario, DesiredAdapter("a", "m", copies=2), DesiredAdapter("b", "m"))


def test_another_worker_loads_what_one_cannot_and_hands_it_back_when_it_can() -> None:
    async def scenario(registry: MemoryRegistry, members: dict[int, Member]) -> None:
        (first,) = await advertising(registry, "a")
        broken = members[first]
        broken.engine.broken.add("b")
        await registry.put_adapter(NAMESPACE, DesiredAdapter("b", "m", copies=3))
        await asyncio.sleep(3.0)
        assert await advertising(registry, "b") == {1, 2, 3} - {first}
        snapshot = await registry.snapshot(NAMESPACE)
        state = AdapterState.of(snapshot.instances[first])
        assert state is not None
        assert state.failed == {"b": "the worker has no folder "}
        assert broken.loads.count(False) >= 1
        broken.engine.broken.clear()
        await asyncio.sleep(100.0)
        assert await advertising(registry, "b") == {1, 2, 3}
        state = AdapterState.of((await registry.snapshot(NAMESPACE)).instances[first])
        assert state == AdapterState()

    run(scenario, DesiredAdapter("a", "m", copies=1))


def test_copies_follow_the_use() -> None:
    async def scenario(registry: MemoryRegistry, members: dict[int, Member]) -> None:
        (holder,) = await advertising(registry, "a")
        members[holder].requests["a"] = 20
        await asyncio.sleep(7.0)
        assert len(await advertising(registry, "a")) == 2
        members[holder].requests.clear()
        await asyncio.sleep(70.0)
        assert await advertising(registry, "a") == {holder}

    run(scenario, DesiredAdapter("a", "m", copies=1, copies_max=2))


def test_an_adapter_that_an_operator_loaded_stays() -> None:
    async def scenario(registry: MemoryRegistry, members: dict[int, Member]) -> None:
        await members[1].placer._adapters.load("own", "")
        await asyncio.sleep(10.0)
        assert await advertising(registry, "own") == {1}

    run(scenario)
