"""Slots that senders share: turns, limits of a sender, cancellations."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import Overloaded
from common.trials.trial_slots import TrialSlots
from tests.kit.waiting import until


class Inputs:
    """Inputs that hold a slot until they are ended, in the order in which they got one."""

    def __init__(self, slots: TrialSlots) -> None:
        self.slots = slots
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.ends: dict[str, asyncio.Event] = {}

    def add(self, sender: str, name: str, wait_s: float = 30.0) -> asyncio.Task[None]:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._hold(sender, name, wait_s))
        return self.tasks[name]

    async def _hold(self, sender: str, name: str, wait_s: float) -> None:
        deadline_s = asyncio.get_running_loop().time() + wait_s
        async with self.slots.slot(sender, deadline_s):
            self.order.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_a_sender_has_all_slots_but_one() -> None:
    inputs = Inputs(TrialSlots(2, waiting_max=10))
    for number in range(3):
        inputs.add("a", f"a{number}")
    inputs.add("b", "b0")
    await until(lambda: len(inputs.order) == 2, "both slots are used")
    assert inputs.order == ["a0", "b0"]
    for name in ("a0", "a1", "a2", "b0"):
        await inputs.end(name)


async def test_senders_take_turns() -> None:
    inputs = Inputs(TrialSlots(1, waiting_max=10))
    for name in ("a0", "a1", "a2", "b0", "c0", "b1"):
        inputs.add(name[0], name)
    for number in range(6):
        count = number + 1
        await until(lambda: len(inputs.order) == count, "the next one begins")  # noqa: B023
        await inputs.end(inputs.order[-1])
    assert inputs.order == ["a0", "a1", "b0", "c0", "a2", "b1"]


async def test_too_many_inputs_of_a_sender_are_refused_at_once() -> None:
    inputs = Inputs(TrialSlots(1, waiting_max=2))
    for number in range(3):
        inputs.add("a", f"a{number}")
    await until(lambda: inputs.order == ["a0"], "the first one has a slot")
    with pytest.raises(Overloaded, match="2/2"):
        await inputs.add("a", "a3")
    inputs.add("b", "b0")
    for name in ("a0", "a1", "b0", "a2"):
        await inputs.end(name)


async def test_an_input_waits_until_its_deadline() -> None:
    inputs = Inputs(TrialSlots(1, waiting_max=10))
    inputs.add("a", "a0")
    with pytest.raises(Overloaded, match="took too long"):
        await inputs.add("b", "b0", wait_s=0.02)
    inputs.add("b", "b1")
    await inputs.end("a0")
    await until(lambda: inputs.order == ["a0", "b1"], "the slot is free again")
    await inputs.end("b1")


async def test_a_cancelled_input_keeps_no_slot() -> None:
    inputs = Inputs(TrialSlots(1, waiting_max=10))
    inputs.add("a", "a0")
    waiting = inputs.add("b", "b0")
    await until(lambda: inputs.order == ["a0"], "the first one has a slot")
    # While it waits, at the moment in which it gets a slot, and while it has one.
    waiting.cancel()
    granted = inputs.add("b", "b1")
    await asyncio.sleep(0)
    inputs.ends["a0"].set()
    await asyncio.sleep(0)
    granted.cancel()
    held = inputs.add("c", "c0")
    await until(lambda: "c0" in inputs.order, "the next one has a slot")
    held.cancel()
    inputs.add("d", "d0")
    await until(lambda: "d0" in inputs.order, "all slots are free")
    await inputs.end("d0")
