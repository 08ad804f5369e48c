"""Slots of trials, which senders share by turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.errors import Overloaded
from common.runtime.fair_slots import FairSlots


class TrialSlots:
    """`FairSlots` with bounded waits.

    Of two slots a sender has one at most. So a sender with many inputs delays another one by at
    most the input in each slot.

    count: slots.
    waiting_max: inputs of one sender that may wait.
    """

    def __init__(self, count: int, *, waiting_max: int) -> None:
        self._slots = FairSlots(count)
        self._waiting_max = waiting_max

    @asynccontextmanager
    async def slot(self, sender: str, deadline_s: float) -> AsyncIterator[None]:
        """Holds a slot. deadline_s: of the wait for it, on the loop's clock. Raises Overloaded if
        none is free until then, or too many inputs of the sender wait."""
        waiting = self._slots.waiting(sender)
        if waiting >= self._waiting_max:
            text = f"{waiting}/{self._waiting_max} inputs of this client wait to be compiled"
            raise Overloaded(1.0, text)
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._slots.take(sender)
        except TimeoutError:
            raise Overloaded(1.0, "other inputs took too long to compile") from None
        try:
            yield
        finally:
            self._slots.give_back(sender)
