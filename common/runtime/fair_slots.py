"""Slots that tenants share: connections, threads or other places of which there are few."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """Slots of which a tenant may hold as many as are free.

    So one tenant alone holds half of them, the next one half of the rest, and a tenant without a
    slot finds one unless log2(slots) others hold all that they may. Above its share a tenant waits
    for its own slots; a slot that becomes free goes to the tenants that wait by turns.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._held: Counter[str] = Counter()
        # The tenant whose turn is next first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Holds a slot for the duration of the block; waits until the tenant may have one."""
        await self.take(tenant)
        try:
            yield
        finally:
            self.give_back(tenant)

    async def take(self, tenant: str) -> None:
        """Takes a slot, which the caller gives back; waits until the tenant may have one."""
        if tenant not in self._waiting and self._is_permitted(tenant):
            self._grant(tenant)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._leave_queue(tenant, granted)
            else:
                self.give_back(tenant)
            raise

    def give_back(self, tenant: str) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._grant_to_waiting()

    def waiting(self, tenant: str) -> int:
        """Returns how many slots the tenant waits for."""
        return len(self._waiting.get(tenant, ()))

    def _is_permitted(self, tenant: str) -> bool:
        return self._held[tenant] < self._free

    def _grant(self, tenant: str) -> None:
        self._free -= 1
        self._held[tenant] += 1

    def _grant_to_waiting(self) -> None:
        while (
            tenant := next((name for name in self._waiting if self._is_permitted(name)), None)
        ) is not None:
            granted = self._waiting[tenant][0]
            self._waiting.move_to_end(tenant)
            self._leave_queue(tenant, granted)
            if not granted.cancelled():
                self._grant(tenant)
                granted.set_result(None)

    def _leave_queue(self, tenant: str, granted: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant, deque())
        if granted in queue:
            queue.remove(granted)
            if not queue:
                del self._waiting[tenant]
