"""One answer between the loop's callbacks and the task that writes it to its client.

Tokens wait here as ids: what a slow client has not taken costs four bytes a token and no work. Of a
body that was passed through, chunks wait as they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.errors import Overloaded
from common.request.preprocessed import TokenLogprob
from frontend_svc.core.request.machine import Outcome
from frontend_svc.metrics import RequestMeter
from frontend_svc.request.gateway import UNREAD_TOKENS_MAX, Ticket

# A chunk weighs about so much more than a token.
TOKENS_A_CHUNK = 64


class Answer:
    """The Listener of one request, read by one task. clock: the meter's, monotonic seconds.

    unread_max: tokens that its client may leave unread; with more, the request is ended.
    """

    __slots__ = (
        "_chunks",
        "_clock",
        "_loop",
        "_meter",
        "_silence",
        "_silence_s",
        "_unread",
        "_unread_max",
        "_waiter",
        "_waiting_since",
        "first_at",
        "outcome",
        "ticket",
    )

    def __init__(
        self,
        meter: RequestMeter,
        clock: Callable[[], float],
        *,
        unread_max: int = UNREAD_TOKENS_MAX,
    ) -> None:
        self._unread_max = unread_max
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._meter = meter
        self._unread: list[int] = []
        self._chunks: list[bytes] = []
        self._silence: asyncio.TimerHandle | None = None
        self._silence_s = self._waiting_since = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self.first_at: float | None = None
        self.outcome: Outcome | None = None
        self.ticket: Ticket | None = None

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """See Listener."""
        self._count(len(token_ids))
        self._unread += token_ids
        self._notify()
        if len(self._unread) > self._unread_max:
            self._refuse_to_wait()

    def chunk(self, json: bytes) -> None:
        """The next chunk of an answer to a body that was passed through."""
        self._count(1)
        self._chunks.append(json)
        self._notify()
        if len(self._chunks) * TOKENS_A_CHUNK > self._unread_max:
            self._refuse_to_wait()

    def finished(self, outcome: Outcome) -> None:
        """See Listener."""
        self.outcome = outcome
        if self._silence is not None:
            self._silence.cancel()
        self._notify()

    def wake_in_silence(self, after_s: float) -> None:
        """From now on, `next` and `next_chunks` return with nothing after so long a wait."""
        self._silence_s = after_s
        if self.outcome is None:
            self._silence = self._loop.call_later(after_s, self._on_silence)

    def _on_silence(self) -> None:
        """One timer an answer, set anew when it rings: none is made for a token."""
        now, due = self._loop.time(), self._waiting_since + self._silence_s
        if self._waiter is not None and now >= due:
            self._notify()
        elif self._waiter is not None:
            self._silence = self._loop.call_at(due, self._on_silence)
            return
        self._silence = self._loop.call_later(self._silence_s, self._on_silence)

    def _count(self, tokens: int) -> None:
        now = self._clock()
        if self.first_at is None:
            self.first_at = now
        self._meter.tokens(tokens, now)

    def _refuse_to_wait(self) -> None:
        if self.ticket is not None:
            error = Overloaded(None, "the client reads too slowly", reason="SLOW_READER")
            self.ticket.fail(error, "slow_reader")

    def _notify(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def next(self) -> list[int]:
        """The tokens that arrived since the last call.

        At least one, unless `outcome` is set or nothing came for as long as `wake_in_silence` says.
        """
        if not self._unread and self.outcome is None:
            await self._wait()
        taken, self._unread = self._unread, []
        return taken

    async def next_chunks(self) -> list[bytes]:
        """As `next`, of chunks."""
        if not self._chunks and self.outcome is None:
            await self._wait()
        taken, self._chunks = self._chunks, []
        return taken

    async def end(self) -> Outcome:
        """How it ended; tokens that come before are nobody's."""
        while self.outcome is None:
            await self.next()
        return self.outcome

    async def _wait(self) -> None:
        self._waiting_since = self._loop.time()
        self._waiter = self._loop.create_future()
        await self._waiter
