"""One answer between the loop's callbacks and the task that writes it to its client.

Tokens wait here as ids: what a slow client has not taken costs four bytes a token and no work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.errors import Overloaded
from common.preprocessed import TokenLogprob
from frontend_svc.core.request import Outcome
from frontend_svc.gateway import UNREAD_TOKENS_MAX, Ticket
from frontend_svc.metrics import RequestMeter


class Answer:
    """The Listener of one request, read by one task. clock: the meter's, monotonic seconds."""

    __slots__ = ("_clock", "_loop", "_meter", "_unread", "_waiter", "first_at", "outcome", "ticket")

    def __init__(self, meter: RequestMeter, clock: Callable[[], float]) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._meter = meter
        self._unread: list[int] = []
        self._waiter: asyncio.Future[None] | None = None
        self.first_at: float | None = None
        self.outcome: Outcome | None = None
        self.ticket: Ticket | None = None

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """See Listener."""
        now = self._clock()
        if self.first_at is None:
            self.first_at = now
        self._meter.tokens(len(token_ids), now)
        self._unread += token_ids
        self._notify()
        if len(self._unread) > UNREAD_TOKENS_MAX and self.ticket is not None:
            error = Overloaded(None, "the client reads too slowly", reason="SLOW_READER")
            self.ticket.fail(error, "slow_reader")

    def finished(self, outcome: Outcome) -> None:
        """See Listener."""
        self.outcome = outcome
        self._notify()

    def _notify(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def next(self) -> list[int]:
        """The tokens that arrived since the last call, at least one unless `outcome` is set."""
        while not self._unread and self.outcome is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        taken, self._unread = self._unread, []
        return taken

    async def rest(self) -> list[int]:
        """All tokens to the end."""
        while self.outcome is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._unread
