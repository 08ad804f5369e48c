"""An asyncio loop in virtual time: no clock, no I/O, no threads, the same run for the same program.

When no callback is ready, time jumps to the next timer. When no timer is set either, the program
waits for an event that cannot happen, and the loop raises `Deadlock`. Timers of the same time fire
in the order in which they were set, or in a random order. Work for an executor runs at once. Tasks
hash by their number, so that sets of them (in `asyncio.TaskGroup`) have one order.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from random import Random
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Deadlock(RuntimeError):
    """All tasks wait, and no timer is set."""


class Overrun(RuntimeError):
    """The program ran past its virtual end."""


class VirtualTask(asyncio.Task[T]):
    """A task with a hash that does not depend on its address."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class _Handle(asyncio.Handle):
    """Without the fields that only a loop's debug mode needs: a run makes tens of thousands."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: Any, context: Any) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    """Also without the fields of debug mode."""

    __slots__ = ()

    def __init__(self, when: float, callback: Any, args: Any, loop: Any, context: Any) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when
        self._scheduled = False


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. until: virtual seconds after which `Overrun` ends the run. shuffle_rng:
    orders timers of the same time; None: in the order in which they were set.

    failures: what callbacks and abandoned tasks raised; a correct run leaves it empty.
    """

    def __init__(self, until: float = float("inf"), *, shuffle_rng: Random | None = None) -> None:
        super().__init__()
        self._now = 0.0
        self._until = until
        self._last_task = 0
        self._last_timer = 0
        self._shuffle_rng = shuffle_rng
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, int, asyncio.TimerHandle]] = []
        self.failures: list[str] = []
        self.set_task_factory(self._new_task)
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        """Virtual seconds since the beginning."""
        return self._now

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Like the loop it replaces."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Like the loop it replaces, without the fields that only its debug mode needs."""
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Like the loop it replaces; see the module for the order."""
        timer = _Timer(when, callback, args, self, context)
        self._last_timer += 1
        place = self._shuffle_rng.getrandbits(16) if self._shuffle_rng is not None else 0
        heappush(self._timers, (when, place, self._last_timer, timer))
        return timer

    def _run_once(self) -> None:
        """One turn of `run_forever`. Raises Deadlock, Overrun."""
        timers, ready = self._timers, self._ready
        while timers and timers[0][3].cancelled():
            heappop(timers)
        if not ready and not self._is_stopping():
            self._advance_time()
        while timers and timers[0][0] <= self._now:
            ready.append(heappop(timers)[3])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _advance_time(self) -> None:
        if not self._timers:
            raise Deadlock(f"at {self._now:.3f} s all tasks wait and no timer is set")
        self._now = max(self._now, self._timers[0][0])
        if self._now > self._until:
            raise Overrun(f"the run went past {self._until:g} virtual seconds")

    def _is_stopping(self) -> bool:
        return bool(self._stopping)  # type: ignore[attr-defined]

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """The timer is dropped when its time comes."""

    def run_in_executor(
        self, executor: object, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Runs at once, in this thread."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """There is one thread."""
        return self.call_soon(callback, *args, context=context)

    def _write_to_self(self) -> None:
        """No-op: no thread waits in a selector."""

    def _new_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any
    ) -> asyncio.Task[Any]:
        self._last_task += 1
        task: VirtualTask[Any] = VirtualTask.__new__(VirtualTask)
        task.number = self._last_task  # before __init__, which puts the task into a set
        VirtualTask.__init__(task, coro, loop=loop, **kwargs)
        return task

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(f"{context.get('message')}: {error!r}")


def run_virtually(
    main: Coroutine[Any, Any, T], *, until: float = float("inf"), shuffle_rng: Random | None = None
) -> T:
    """Runs `main` to its end on a new virtual loop, then cancels the tasks that remain.

    Raises what `main` raises, Deadlock, Overrun, and RuntimeError when a callback or an abandoned
    task failed.
    """
    loop = VirtualLoop(until, shuffle_rng=shuffle_rng)
    try:
        result = loop.run_until_complete(main)
        if loop.failures:
            raise RuntimeError(
                f"{len(loop.failures)} unhandled failures: {'; '.join(loop.failures[:3])}"
            )
        return result
    finally:
        _cancel_rest(loop)
        loop.close()


def _cancel_rest(loop: VirtualLoop) -> None:
    remaining_tasks = sorted(asyncio.all_tasks(loop), key=hash)
    for task in remaining_tasks:
        task.cancel()
    if remaining_tasks:
        loop.run_until_complete(asyncio.wait(remaining_tasks, timeout=60.0))
