"""The virtual loop: time, determinism, and errors of programs that hang."""

from __future__ import annotations

import asyncio

import pytest

from tests.sim.loop import Deadlock, Overrun, run_virtually


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> float:
        await asyncio.sleep(3600.0)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == 3600.0


def test_timers_fire_in_order_and_a_timeout_is_a_timer() -> None:
    async def main() -> list[str]:
        seen: list[str] = []

        async def note(name: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            seen.append(name)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(note("late", 2.0))
            tasks.create_task(note("early", 1.0))
        try:
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append(f"gave up at {asyncio.get_running_loop().time()}")
        return seen

    assert run_virtually(main()) == ["early", "late", "gave up at 7.0"]


def test_executor_work_runs_at_once() -> None:
    async def main() -> int:
        return await asyncio.to_thread(lambda: 5)

    assert run_virtually(main()) == 5


def test_a_program_that_waits_for_nothing_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="all tasks wait"):
        run_virtually(main())


def test_a_program_that_runs_past_its_end_is_stopped() -> None:
    async def main() -> None:
        await asyncio.sleep(11.0)

    with pytest.raises(Overrun, match="10 virtual seconds"):
        run_virtually(main(), until=10.0)


def test_a_failing_callback_fails_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1.0)

    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run_virtually(main())


def test_tasks_left_behind_are_cancelled_and_clean_up() -> None:
    cleaned: list[bool] = []

    async def forgotten() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(forgotten())
        await asyncio.sleep(1.0)
        return task

    assert run_virtually(main()).cancelled()
    assert cleaned == [True]


def test_a_set_of_tasks_has_the_same_order_in_every_run() -> None:
    async def nothing() -> None:
        await asyncio.sleep(1.0)

    async def main() -> list[str]:
        tasks = {asyncio.create_task(nothing(), name=f"t{n}") for n in range(50)}
        await asyncio.wait(tasks)
        return [task.get_name() for task in tasks]

    keep = [object() for _ in range(1000)]  # so that addresses differ
    first = run_virtually(main())
    del keep
    assert run_virtually(main()) == first
