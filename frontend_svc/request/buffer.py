"""Buffers one response between event-loop callbacks and the task that writes it to the client.

Tokens are buffered as ids and log probabilities, so a slow client costs no work until it reads.
Chunks of a response to a pass-through body are buffered unchanged. Log probabilities of a prompt
are chunks too; they are kept until the response ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.errors import MeshError, Overloaded
from common.request.preprocessed import TokenLogprob
from common.request.prompt_logprobs import load_part
from frontend_svc.metrics.families import RequestMeter
from frontend_svc.request.types import RequestOutcome

# Unread tokens after which a request of a slow client is ended. A log probability, about 110 bytes,
# counts as a token, and so does each alternative.
UNREAD_TOKENS_MAX = 65_536
# Weight of a chunk in this limit.
TOKENS_PER_CHUNK = 64
# Unread tokens above which a client is slow, and the most of all slow clients together: 450 MB of
# log probabilities.
SLOW_TOKENS = 1024
BACKLOG_TOKENS_MAX = 4 << 20


class Backlog:
    """The unread tokens of all slow clients of a process.

    write_lock: a response that is behind has it while it writes a part, so that others are not
    delayed.
    """

    def __init__(self, tokens_max: int = BACKLOG_TOKENS_MAX) -> None:
        self._tokens_max = tokens_max
        self.tokens = self.clients = 0
        self.write_lock = asyncio.Lock()

    def is_too_large_by(self, unread: int) -> bool:
        """Returns whether a client with `unread` tokens has more than its share of a full
        backlog."""
        return self.tokens > self._tokens_max and unread * self.clients > self._tokens_max


class Reader:
    """The task that reads a response. Its buffers wake it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_s = self._waiting_since = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._has_output = False
        self._open_buffers = 0
        self._on_output: Callable[[], bool] | None = None
        self._is_call_scheduled = False

    def buffer_opened(self) -> None:
        self._open_buffers += 1

    def buffer_finished(self) -> None:
        self._open_buffers -= 1
        if not self._open_buffers and self._idle_timer is not None:
            self._idle_timer.cancel()
        self._has_output = True
        self._wake()

    def notify(self) -> None:
        self._has_output = True
        if self._on_output is None:
            self._wake()
        elif self._waiter is not None and not self._is_call_scheduled:
            # Later: the same frame may have more of this response.
            self._is_call_scheduled = True
            self._loop.call_soon(self._call)

    def call_on_output(self, on_output: Callable[[], bool]) -> None:
        """From now on, tokens that arrive during `wait` call `on_output`; `wait` goes on if it
        returns True."""
        self._on_output = on_output

    def close(self) -> None:
        """Drops the callback, which refers to this reader."""
        self._on_output = None

    def _call(self) -> None:
        self._is_call_scheduled = False
        if self._waiter is None or self._on_output is None:
            return
        try:
            if not self._on_output():
                self._wake()
                return
        except BaseException as error:  # a panic of the tokenizer library is no Exception
            self._waiter.set_exception(error)
            self._waiter = None
        self._has_output = False
        self._waiting_since = self._loop.time()

    async def wait(self) -> bool:
        """Waits for output of a buffer since the last call.

        Returns False if the idle time of `wake_when_idle` is over.
        """
        if not self._has_output:
            self._waiting_since = self._loop.time()
            self._waiter = self._loop.create_future()
            await self._waiter
        has_output, self._has_output = self._has_output, False
        return has_output

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
    """The ResponseSink of one request.

    - clock: of the meter, monotonic seconds.
    - fail: ends the request with an error, if more than unread_max tokens are unread, or the
      backlog is too large by them.
    - reader: of all buffers of a response; None: this is the only one.
    - first_token: called once, with the first token or chunk.
    """

    def __init__(
        self,
        meter: RequestMeter,
        clock: Callable[[], float],
        fail: Callable[[MeshError, str], None],
        *,
        reader: Reader | None = None,
        backlog: Backlog | None = None,
        unread_max: int = UNREAD_TOKENS_MAX,
        first_token: Callable[[], None] = lambda: None,
    ) -> None:
        self._fail = fail
        self._unread_max = unread_max
        self._first_token = first_token
        self._backlog = Backlog() if backlog is None else backlog
        # What the backlog contains of this response.
        self._in_backlog = 0
        self.reader = Reader() if reader is None else reader
        self.reader.buffer_opened()
        self._clock = clock
        self._meter = meter
        self._unread: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._chunks: list[bytes] = []
        # Of the prompt's tokens from the second on, if the request has them.
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.first_token_at: float | None = None
        self.outcome: RequestOutcome | None = None

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        self._unread += token_ids
        if logprobs:
            self._logprobs += logprobs
        self._received(len(token_ids), self.unread if self._logprobs else len(self._unread))

    def chunk(self, json: bytes) -> None:
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += load_part(json)
            return
        self._chunks.append(json)
        self._received(1, len(self._chunks) * TOKENS_PER_CHUNK)

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    @property
    def unread(self) -> int:
        """Unread tokens; each log probability counts as one more."""
        return len(self._unread) * self._token_weight

    @property
    def _token_weight(self) -> int:
        return 2 + len(self._logprobs[-1].top) if self._logprobs else 1

    def finished(self, outcome: RequestOutcome) -> None:
        self.outcome = outcome
        self.reader.buffer_finished()

    def _received(self, tokens: int, unread: int) -> None:
        now = self._clock()
        if self.first_token_at is None:
            self.first_token_at = now
            self._first_token()
        self._meter.tokens(tokens, now)
        self.reader.notify()
        if unread > SLOW_TOKENS:
            self._set_backlog(unread)
        if unread > self._unread_max:
            self._fail_slow(f"more than {self._unread_max} tokens unread by the client")
        elif self._in_backlog and self._backlog.is_too_large_by(unread):
            self._fail_slow("too many tokens unread by all clients")

    def _fail_slow(self, message: str) -> None:
        self.discard()
        self._fail(Overloaded(None, message, reason="SLOW_READER"), "slow_reader")

    def _set_backlog(self, unread: int) -> None:
        self._backlog.tokens += unread - self._in_backlog
        self._backlog.clients += bool(unread) - bool(self._in_backlog)
        self._in_backlog = unread

    def take(self) -> tuple[list[int], list[TokenLogprob]]:
        """Returns the unread tokens, and their log probabilities, if there are any."""
        unread, self._unread = self._unread, []
        logprobs = self._logprobs
        if logprobs:
            self._logprobs = []
        if self._in_backlog:
            self._set_backlog(0)
        return unread, logprobs

    def take_part(self, weight: int) -> tuple[list[int], list[TokenLogprob]]:
        """As `take`, but about `weight` tokens, or fewer with log probabilities."""
        most = max(1, weight // self._token_weight)
        unread, logprobs = self.take()
        self._unread, self._logprobs = unread[most:], logprobs[most:]
        if self.unread > SLOW_TOKENS:
            self._set_backlog(self.unread)
        return unread[:most], logprobs[:most]

    def discard(self) -> None:
        """Discards what is unread."""
        self.take()
        self._chunks = []

    async def next(self) -> list[int]:
        """As `take`, at least one token unless `outcome` is set or the reader is idle."""
        await self._wait(self._unread)
        return self.take()[0]

    async def next_chunks(self) -> list[bytes]:
        """As `next`, for chunks."""
        await self._wait(self._chunks)
        unread, self._chunks = self._chunks, []
        if self._in_backlog:
            self._set_backlog(0)
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
