"""Slots that tenants share."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from common.runtime.fair_slots import FairSlots


class Bed:
    """Tasks that hold a slot until they are ended."""

    def __init__(self, slots: int) -> None:
        self.slots = FairSlots(slots)
        self.held: list[str] = []
        self._tasks: list[tuple[str, asyncio.Task[None], asyncio.Event]] = []

    async def want(self, tenant: str, count: int = 1) -> None:
        """Starts tasks, which hold a slot as soon as they get one."""
        for _ in range(count):
            end = asyncio.Event()
            task = asyncio.create_task(self._hold(tenant, end))
            self._tasks.append((tenant, task, end))
        await settle()

    async def end(self, tenant: str, count: int = 1) -> None:
        """Ends the oldest tasks of a tenant."""
        for name, task, end in [entry for entry in self._tasks if entry[0] == tenant][:count]:
            self._tasks.remove((name, task, end))
            end.set()
            await task
        await settle()

    async def cancel_newest(self, tenant: str) -> None:
        name, task, end = [entry for entry in self._tasks if entry[0] == tenant][-1]
        self._tasks.remove((name, task, end))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()

    async def _hold(self, tenant: str, end: asyncio.Event) -> None:
        async with self.slots.slot(tenant):
            self.held.append(tenant)
            try:
                await end.wait()
            finally:
                self.held.remove(tenant)


async def settle() -> None:
    """Lets all tasks run."""
    for _ in range(4):
        await asyncio.sleep(0)


async def test_each_further_tenant_gets_half_of_what_is_free() -> None:
    bed = Bed(16)
    for tenant, share in (("a", 8), ("b", 4), ("c", 2), ("d", 1), ("e", 1), ("f", 0)):
        await bed.want(tenant, 20)
        assert bed.held.count(tenant) == share
    await bed.end("a")
    assert (bed.held.count("a"), bed.held.count("f")) == (7, 1)


async def test_waiting_tenants_get_free_slots_by_turns() -> None:
    bed = Bed(2)
    await bed.want("a")
    await bed.want("b", 3)
    await bed.want("c", 3)
    assert bed.held == ["a", "b"]
    order = []
    for _ in range(4):
        holder = bed.held[-1]
        await bed.end(holder)
        order.append(bed.held[-1])
    assert order == ["b", "c", "b", "c"]


async def test_a_cancelled_wait_frees_its_place() -> None:
    bed = Bed(2)
    await bed.want("a", 3)
    await bed.cancel_newest("a")
    await bed.end("a")
    assert bed.held == ["a"]
    await bed.end("a")
    await bed.want("a")
    assert bed.held == ["a"]


async def test_a_wait_that_is_cancelled_as_it_is_granted_gives_its_slot_back() -> None:
    slots = FairSlots(2)
    first = slots.slot("a")
    await first.__aenter__()
    waiting = asyncio.create_task(slots.slot("a").__aenter__())
    await settle()
    await first.__aexit__(None, None, None)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for _ in range(2):
        async with asyncio.timeout(1), slots.slot("a"):
            pass


async def test_all_slots_are_free_after_random_use() -> None:
    rng, slots = Random(7), FairSlots(6)
    held = 0

    async def use(tenant: str) -> None:
        nonlocal held
        async with slots.slot(tenant):
            held += 1
            assert held <= 6
            try:
                for _ in range(rng.randrange(5)):
                    await asyncio.sleep(0)
            finally:
                held -= 1

    tasks = [asyncio.create_task(use(rng.choice("abcd"))) for _ in range(300)]
    for task in tasks:
        if rng.random() < 0.3:
            task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert held == 0
    bed = Bed(6)
    bed.slots = slots
    await bed.want("a", 6)
    assert len(bed.held) == 3
