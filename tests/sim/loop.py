"""An asyncio loop in virtual time: no clock, no I/O, no threads, the same run for the same program.

When nothing is ready, time jumps to the next timer. When there is no timer either, the program
waits for something that cannot happen, and `Deadlock` says so. Work for an executor is done at
once. Tasks hash by their number, so that sets of them (in `asyncio.TaskGroup`) have one order.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Deadlock(RuntimeError):
    """Everybody waits, and no timer is set."""


class Overrun(RuntimeError):
    """The program ran past its virtual end."""


class VirtualTask(asyncio.Task[T]):
    """A task whose place in a set does not depend on its address."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class _Selector:
    """Stands where a loop waits for sockets: lets time pass instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[object]:
        self._loop.pass_time(timeout)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. until: virtual seconds after which `Overrun` ends the run.

    failures: what callbacks and forgotten tasks raised; a run without mistakes leaves it empty.
    """

    def __init__(self, until: float = float("inf")) -> None:
        super().__init__()
        self._selector = _Selector(self)
        self._now = 0.0
        self._until = until
        self._last_task = 0
        self.failures: list[str] = []
        self.set_task_factory(self._new_task)
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        """Virtual seconds since the beginning."""
        return self._now

    def pass_time(self, timeout: float | None) -> None:
        """What the selector does. Raises Deadlock, Overrun."""
        if timeout is None:
            raise Deadlock(f"at {self._now:.3f} s everybody waits and no timer is set")
        if timeout <= 0:
            return
        # The timer's own time, since now + (when - now) is not always when.
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        self._now = max(self._now, scheduled[0].when())
        if self._now > self._until:
            raise Overrun(f"the run went past {self._until:g} virtual seconds")

    def run_in_executor(
        self, executor: object, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Done at once, in this thread."""
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

    def _process_events(self, event_list: list[object]) -> None:
        assert not event_list, "there is no I/O"

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""

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


def run_virtually(main: Coroutine[Any, Any, T], *, until: float = float("inf")) -> T:
    """Runs `main` to its end on a new virtual loop, then cancels what it left behind.

    Raises what `main` raises, Deadlock, Overrun, and RuntimeError when a callback or a forgotten
    task failed.
    """
    loop = VirtualLoop(until)
    try:
        result = loop.run_until_complete(main)
        if loop.failures:
            raise RuntimeError(
                f"{len(loop.failures)} failures nobody saw; {'; '.join(loop.failures[:3])}"
            )
        return result
    finally:
        _cancel_rest(loop)
        loop.close()


def _cancel_rest(loop: VirtualLoop) -> None:
    rest = sorted(asyncio.all_tasks(loop), key=hash)
    for task in rest:
        task.cancel()
    if rest:
        loop.run_until_complete(asyncio.wait(rest, timeout=60.0))
