"""Writes that arrive together are one commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from batch_svc.store.database import Transaction, lost, rolled_back
from batch_svc.store.group_commit import GROUP_MAX, GroupCommit
from common.errors import Unavailable


class CountingDatabase:
    """Counts its commits. is_lost: it does not respond. rollbacks: of the next commits."""

    def __init__(self) -> None:
        self.commits = 0
        self.is_lost = False
        self.rollbacks = 0
        self.may_begin = asyncio.Event()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        await self.may_begin.wait()
        if self.is_lost:
            raise lost("test", OSError("gone"))
        yield
        if self.rollbacks:
            self.rollbacks -= 1
            raise rolled_back("test", OSError("deadlock detected"))
        self.commits += 1


def writes_of(database: CountingDatabase) -> GroupCommit:
    # Any: only its transactions are used.
    return GroupCommit(cast(Any, database))


async def test_writes_that_arrive_together_are_one_commit_with_results_of_their_own() -> None:
    database = CountingDatabase()
    writes = writes_of(database)

    async def write(number: int) -> int:
        async def work(_: Transaction) -> int:
            return number

        return await writes.run(work)

    count = GROUP_MAX + 10
    tasks = [asyncio.create_task(write(number)) for number in range(count)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    database.may_begin.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[3], asyncio.CancelledError)
    assert results[:3] + results[4:] == [n for n in range(count) if n != 3]
    assert database.commits == 2
    assert await write(7) == 7
    assert database.commits == 3


async def test_a_lost_database_is_the_error_of_each_write_of_the_group() -> None:
    database = CountingDatabase()
    database.is_lost = True
    database.may_begin.set()
    writes = writes_of(database)

    async def work(_: Transaction) -> None:
        raise AssertionError("it has no transaction")

    results = await asyncio.gather(*(writes.run(work) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(result, Unavailable) for result in results)
    database.is_lost = False
    with pytest.raises(AssertionError):
        await writes.run(work)


async def test_a_group_that_was_rolled_back_runs_once_more() -> None:
    database = CountingDatabase()
    database.may_begin.set()
    writes = writes_of(database)
    ran: list[int] = []

    async def write(number: int) -> int:
        async def work(_: Transaction) -> int:
            ran.append(number)
            return number

        return await writes.run(work)

    database.rollbacks = 1
    assert [*await asyncio.gather(write(1), write(2))] == [1, 2]
    assert (ran, database.commits) == ([1, 2, 1, 2], 1)
    database.rollbacks = 2
    results = await asyncio.gather(write(3), write(4), return_exceptions=True)
    assert all(isinstance(result, Unavailable) for result in results)


async def test_the_writes_of_a_group_run_in_their_order_with_results_of_their_own() -> None:
    database = CountingDatabase()
    database.may_begin.set()
    writes = writes_of(database)
    ran: list[str] = []

    async def write(order: str, number: int) -> int:
        async def work(_: Transaction) -> int:
            ran.append(f"{order}{number}")
            return number

        return await writes.run(work, order)

    results = await asyncio.gather(write("b", 1), write("a", 2), write("b", 3))
    assert [*results] == [1, 2, 3]
    assert ran == ["a2", "b1", "b3"]
