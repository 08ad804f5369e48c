"""Task groups that raise one error and do not lose cancellations."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from common.errors import MeshError

T = TypeVar("T")


class TaskGroup:
    """Like `asyncio.TaskGroup`, with two differences.

    It raises the first error instead of an exception group; an error that is no MeshError, which
    is a bug, has precedence. And a cancellation that arrives while the group ends with an error is
    raised: before Python 3.13 asyncio drops it (cpython#116720), and a loop that handles the error
    and continues would then never end.
    """

    def __init__(self) -> None:
        self._parent: asyncio.Task[Any] | None = None
        self._initial_cancel_count = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._errors: list[BaseException] = []
        self._is_exiting = False
        self._has_cancelled_parent = False

    def create_task(
        self, work: Coroutine[Any, Any, T], *, name: str | None = None
    ) -> asyncio.Task[T]:
        """Runs `work` until its end, which the group awaits, or until the group fails."""
        if self._parent is None or self._errors or (self._is_exiting and not self._tasks):
            work.close()
            raise RuntimeError("the task group is not entered, or is ending")
        task = self._parent.get_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    async def __aenter__(self) -> Self:
        self._parent = asyncio.current_task()
        assert self._parent is not None, "inside a coroutine"
        self._initial_cancel_count = self._parent.cancelling()
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        parent = self._parent
        assert parent is not None, "entered"
        self._is_exiting = True
        if self._has_cancelled_parent:
            parent.uncancel()
            if not isinstance(error, asyncio.CancelledError):
                # The body ended first; its cancellation arrives at the next await.
                await self._await_and_defer_cancellation(asyncio.sleep(0))
        if error is not None:
            self._cancel_all()
            if not isinstance(error, asyncio.CancelledError):
                self._errors.insert(0, error)
        while self._tasks:
            await self._await_and_defer_cancellation(asyncio.wait(self._tasks))
        if parent.cancelling() > self._initial_cancel_count:
            raise asyncio.CancelledError from error
        if self._errors:
            bugs = [collected for collected in self._errors if not isinstance(collected, MeshError)]
            error_to_raise = (bugs or self._errors)[0]
            if error_to_raise is not error:
                raise error_to_raise from None

    async def _await_and_defer_cancellation(self, work: Coroutine[Any, Any, object]) -> None:
        """Awaits `work`. A cancellation cancels the tasks and is raised after they have ended."""
        try:
            await work
        except asyncio.CancelledError:
            self._cancel_all()

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        is_first = not self._errors
        self._errors.append(error)
        if not is_first:
            return
        self._cancel_all()
        if not self._is_exiting:
            assert self._parent is not None, "it has tasks"
            self._has_cancelled_parent = True
            self._parent.cancel()

    def _cancel_all(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
