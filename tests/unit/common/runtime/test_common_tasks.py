"""Task groups raise one error and do not lose cancellations."""
# ruff: noqa: PT012 - a group raises at its end.

from __future__ import annotations

import asyncio

import pytest

from common.errors import Unavailable
from common.runtime.tasks import TaskGroup


async def fail_with(error: Exception) -> None:
    raise error


async def test_the_error_of_a_task_is_raised_without_a_group() -> None:
    error = Unavailable("gone")
    with pytest.raises(Unavailable) as caught:
        async with TaskGroup() as tasks:
            tasks.create_task(fail_with(error))
            await asyncio.Event().wait()
    assert caught.value is error


async def test_the_error_of_the_body_is_raised_without_a_group() -> None:
    error = Unavailable("gone")
    with pytest.raises(Unavailable) as caught:
        async with TaskGroup() as tasks:
            tasks.create_task(asyncio.Event().wait())
            raise error
    assert caught.value is error


async def test_a_bug_has_precedence_over_a_mesh_error() -> None:
    with pytest.raises(ZeroDivisionError):
        async with TaskGroup() as tasks:
            tasks.create_task(fail_with(Unavailable("gone")))
            tasks.create_task(fail_with(ZeroDivisionError()))


async def test_an_error_ends_the_other_tasks_and_the_body() -> None:
    ended: list[str] = []

    async def wait_forever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    with pytest.raises(Unavailable):
        async with TaskGroup() as tasks:
            tasks.create_task(wait_forever("task"))
            await asyncio.sleep(0)
            tasks.create_task(fail_with(Unavailable("gone")))
            await wait_forever("body")
    assert sorted(ended) == ["body", "task"]


async def test_a_cancelled_group_cancels_its_tasks() -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def child() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    async def parent() -> None:
        async with TaskGroup() as tasks:
            tasks.create_task(child())

    task = asyncio.create_task(parent())
    await asyncio.wait_for(has_begun.wait(), 20.0)
    task.cancel()
    await asyncio.wait({task}, timeout=20.0)
    assert task.cancelled()
    assert has_ended.is_set()


async def test_an_error_at_the_end_of_the_body_leaves_no_pending_cancellation() -> None:
    with pytest.raises(Unavailable):
        async with TaskGroup() as tasks:
            tasks.create_task(fail_with(Unavailable("gone")))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_an_error_while_the_body_runs_leaves_no_pending_cancellation() -> None:
    failing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def child() -> None:
        await failing

    with pytest.raises(Unavailable):
        async with TaskGroup() as tasks:
            tasks.create_task(child())
            await asyncio.sleep(0)
            failing.set_exception(Unavailable("gone"))
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_failed_group_accepts_no_task() -> None:
    group = TaskGroup()
    with pytest.raises(Unavailable):
        async with group:
            raise Unavailable("gone")
    with pytest.raises(RuntimeError, match="is ending"):
        group.create_task(asyncio.sleep(0))


async def test_a_cancellation_while_the_group_ends_with_an_error_is_not_lost() -> None:
    is_ending = asyncio.Event()

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            await asyncio.sleep(0)

    async def follow_forever() -> None:
        # Ends: the test cancels it.
        while True:
            try:
                async with TaskGroup() as tasks:
                    tasks.create_task(linger())
                    await asyncio.sleep(0)
                    raise Unavailable("the peer is gone")
            except Unavailable:
                await asyncio.sleep(0)

    task = asyncio.create_task(follow_forever())
    await is_ending.wait()
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=20.0)
    assert done == {task}
    assert task.cancelled()


async def test_a_timeout_around_the_group_raises_timeout_error() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), TaskGroup() as tasks:
            tasks.create_task(asyncio.Event().wait())
