"""Buffers one response between event-loop callbacks and the task that writes it to the client.

Tokens are buffered as ids, so a slow client costs four bytes per unread token and no work. Chunks
of a response to a pass-through body are buffered unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.errors import MeshError, Overloaded
from common.request.preprocessed import TokenLogprob
from frontend_svc.core.request.types import RequestOutcome
from frontend_svc.metrics.families import RequestMeter

# Unread tokens after which a request of a slow client is ended.
UNREAD_TOKENS_MAX = 65_536
# Weight of a chunk in this limit.
TOKENS_PER_CHUNK = 64


class Reader:
    """The task that reads a response. Its buffers wake it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_s = self._waiting_since = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._has_news = False
        self._open_buffers = 0
        self._on_news: Callable[[], bool] | None = None
        self._is_call_scheduled = False

    def buffer_opened(self) -> None:
        self._open_buffers += 1

    def buffer_finished(self) -> None:
        self._open_buffers -= 1
        if not self._open_buffers and self._idle_timer is not None:
            self._idle_timer.cancel()
        self._has_news = True
        self._wake()

    def notify(self) -> None:
        self._has_news = True
        if self._on_news is None:
            self._wake()
        elif self._waiter is not None and not self._is_call_scheduled:
            # Later: the same frame may have more of this response.
            self._is_call_scheduled = True
            self._loop.call_soon(self._call)

    def call_on_news(self, on_news: Callable[[], bool]) -> None:
        """From now on, tokens that arrive during `wait` call `on_news`; `wait` goes on if it
        returns True."""
        self._on_news = on_news

    def _call(self) -> None:
        self._is_call_scheduled = False
        if self._waiter is None or self._on_news is None:
            return
        try:
            if not self._on_news():
                self._wake()
                return
        except BaseException as error:  # a panic of the tokenizer library is no Exception
            self._waiter.set_exception(error)
            self._waiter = None
        self._has_news = False
        self._waiting_since = self._loop.time()

    async def wait(self) -> bool:
        """Waits for news of a buffer since the last call; False: the idle time of `wake_when_idle`
        is over."""
        if not self._has_news:
            self._waiting_since = self._loop.time()
            self._waiter = self._loop.create_future()
            await self._waiter
        has_news, self._has_news = self._has_news, False
        return has_news

    def wake_when_idle(self, after_s: float) -> None:
        """From now on, `wait` returns False after a wait of `after_s`."""
        self._idle_s = after_s
        if self._open_buffers:
            self._idle_timer = self._loop.call_later(after_s, self._on_idle)

    def _on_idle(self) -> None:
        """Wakes the reader, and sets the one timer of the response again: no timer per token."""
        now, due = self._loop.time(), self._waiting_since + self._idle_s
        if self._waiter is not None and now >= due:
            self._wake()
        elif self._waiter is not None:
            self._idle_timer = self._loop.call_at(due, self._on_idle)
            return
        self._idle_timer = self._loop.call_later(self._idle_s, self._on_idle)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class ResponseBuffer:
    """The ResponseSink of one request. clock: of the meter, monotonic seconds. fail: ends the
    request with an error, if more than unread_max tokens are unread. reader: of all buffers of a
    response; None: this is the only one."""

    def __init__(
        self,
        meter: RequestMeter,
        clock: Callable[[], float],
        fail: Callable[[MeshError, str], None],
        *,
        reader: Reader | None = None,
        unread_max: int = UNREAD_TOKENS_MAX,
    ) -> None:
        self._fail = fail
        self._unread_max = unread_max
        self.reader = Reader() if reader is None else reader
        self.reader.buffer_opened()
        self._clock = clock
        self._meter = meter
        self._unread: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._chunks: list[bytes] = []
        self.first_token_at: float | None = None
        self.outcome: RequestOutcome | None = None

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        self._unread += token_ids
        if logprobs:
            self._logprobs += logprobs
        self._received(len(token_ids), len(self._unread))

    def chunk(self, json: bytes) -> None:
        self._chunks.append(json)
        self._received(1, len(self._chunks) * TOKENS_PER_CHUNK)

    def finished(self, outcome: RequestOutcome) -> None:
        self.outcome = outcome
        self.reader.buffer_finished()

    def _received(self, tokens: int, unread: int) -> None:
        now = self._clock()
        if self.first_token_at is None:
            self.first_token_at = now
        self._meter.tokens(tokens, now)
        self.reader.notify()
        if unread > self._unread_max:
            message = f"more than {self._unread_max} tokens unread by the client"
            self._fail(Overloaded(None, message, reason="SLOW_READER"), "slow_reader")

    def take(self) -> tuple[list[int], list[TokenLogprob]]:
        """The tokens since the last call, and their log probabilities, if there are any."""
        unread, self._unread = self._unread, []
        logprobs = self._logprobs
        if logprobs:
            self._logprobs = []
        return unread, logprobs

    async def next(self) -> list[int]:
        """As `take`, at least one token unless `outcome` is set or the reader is idle."""
        await self._wait(self._unread)
        return self.take()[0]

    async def next_chunks(self) -> list[bytes]:
        """As `next`, for chunks."""
        await self._wait(self._chunks)
        unread, self._chunks = self._chunks, []
        return unread

    async def end(self) -> RequestOutcome:
        """Waits for the end; discards tokens."""
        while self.outcome is None:
            await self.next()
        return self.outcome

    async def _wait(self, unread: Sequence[object]) -> None:
        while not unread and self.outcome is None:
            if not await self.reader.wait():
                return
