"""The writing end of a stream: one task, which builds each frame when the previous one is written.

So a slow peer receives fewer and larger frames, and a stream has no queue of frames. What a frame
consists of is queued by its user, which calls `wake` after each change.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from common.runtime.tasks import TaskGroup

FrameT = TypeVar("FrameT")

# Event loops round the delays of timers to milliseconds, so that one may fire this much early.
TIMER_RESOLUTION_S = 0.001


class FrameWriter(Generic[FrameT]):
    """Writes the frames of one stream at a time. A closed writer stays closed."""

    error: Exception | None
    """The first error passed to `close`: the reason why the stream ends."""

    def __init__(self, next_frame: Callable[[], FrameT | None]) -> None:
        """next_frame: builds the next frame from what is queued; None if no frame is due."""
        self.error = None
        self._next_frame = next_frame
        self._is_closed = False
        self._timer: asyncio.Handle | None = None
        # Of the timer. It is kept here, since uvloop returns a handle without a time for a delay
        # below a millisecond.
        self._timer_at = math.inf
        self._is_awake = False
        self._waiter: asyncio.Future[None] | None = None
        self._frame_taken: asyncio.Event | None = None

    def wake(self) -> None:
        """Makes `run` request a frame: call it when one may be due."""
        self._is_awake = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def wake_at(self, at: float) -> None:
        """Calls `wake` at a loop time, or at an earlier one set before.

        The next call of `next_frame` cancels it: one that returns None sets it again.
        """
        if at >= self._timer_at:
            return
        self._cancel_timer()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_at(at, self.wake)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self, error: Exception | None = None) -> None:
        """Ends `run` as soon as no frame is due; it then raises the error, if any."""
        self.error = self.error or error
        self._is_closed = True
        self.wake()

    async def frame_taken(self) -> None:
        """Returns after the next frame was built: what it consists of has left the queue."""
        if self._frame_taken is None:
            self._frame_taken = asyncio.Event()
        await self._frame_taken.wait()

    async def run(self, write: Callable[[FrameT], Awaitable[None]]) -> None:
        """Writes frames until `close`. Raises its error, and those of `write`.

        write: returns when the next frame can be written.
        """
        loop = asyncio.get_running_loop()
        try:
            while True:
                # On the path of tokens: no call for a timer or a producer that is not there.
                self._is_awake = False
                if self._timer is not None:
                    self._cancel_timer()
                frame = self._next_frame()
                if frame is not None:
                    if self._frame_taken is not None:
                        self._frame_taken.set()
                        self._frame_taken = None
                    await write(frame)
                elif self._is_closed:
                    break
                elif not self._is_awake:
                    self._waiter = loop.create_future()
                    await self._waiter
        finally:
            self._cancel_timer()
        if self.error is not None:
            raise self.error

    async def serve(
        self, reading: Coroutine[Any, Any, None], write: Callable[[FrameT], Awaitable[None]]
    ) -> None:
        """Runs like `run`, with a coroutine that reads the stream beside it.

        Its end does not end the writer, which may have frames left: `reading` calls `close`.
        """
        async with TaskGroup() as tasks:
            reader = tasks.create_task(reading)
            await self.run(write)
            reader.cancel()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, math.inf
