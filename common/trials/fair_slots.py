"""Slots that senders share by turns."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.errors import Overloaded


class FairSlots:
    """A bounded number of slots.

    A free slot goes to the waiting senders by turns, so a sender with many inputs delays another
    one by at most the input in each slot. A sender never has all slots, if there are several.

    count: slots.
    waiting_max: inputs of one sender that may wait.
    """

    def __init__(self, count: int, *, waiting_max: int) -> None:
        self._free = count
        self._sender_max = max(1, count - 1)
        self._waiting_max = waiting_max
        self._used: Counter[str] = Counter()
        # By sender, in the order of their turns.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def slot(self, sender: str, deadline_s: float) -> AsyncIterator[None]:
        """Holds a slot. deadline_s: of the wait for it, on the loop's clock. Raises Overloaded if
        none is free until then, or too many inputs of the sender wait."""
        await self._acquire(sender, deadline_s)
        try:
            yield
        finally:
            self._release(sender)

    async def _acquire(self, sender: str, deadline_s: float) -> None:
        waiting = self._waiting.setdefault(sender, deque())
        if len(waiting) >= self._waiting_max:
            text = f"{len(waiting)}/{self._waiting_max} inputs of this client wait to be compiled"
            raise Overloaded(1.0, text)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        self._grant()
        try:
            async with asyncio.timeout_at(deadline_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._release(sender)
            else:
                self._forget(sender, turn)
            if isinstance(error, TimeoutError):
                raise Overloaded(1.0, "other inputs took too long to compile") from None
            raise

    def _release(self, sender: str) -> None:
        self._free += 1
        self._used[sender] -= 1
        if not self._used[sender]:
            del self._used[sender]
        self._grant()

    def _grant(self) -> None:
        """Gives the free slots to the next senders that may have one."""
        for sender in list(self._waiting):
            if not self._free:
                return
            if self._used[sender] >= self._sender_max:
                continue
            waiting = self._waiting.pop(sender)
            while waiting:
                turn = waiting.popleft()
                if not turn.done():  # or its input was cancelled
                    turn.set_result(None)
                    self._free -= 1
                    self._used[sender] += 1
                    break
            if waiting:
                self._waiting[sender] = waiting  # its next turn is after the others

    def _forget(self, sender: str, turn: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(sender)
        if waiting is not None and turn in waiting:
            waiting.remove(turn)
            if not waiting:
                del self._waiting[sender]
