"""Writes that arrive together are one commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from batch_svc.store.database import Transaction, lost
from batch_svc.store.group_commit import GROUP_MAX, GroupCommit
from common.errors import Unavailable


class CountingDatabase:
    """Counts its commits. is_lost: it does not respond."""

    def __init__(self) -> None:
        self.commits = 0
        self.is_lost = False
        self.may_begin = asyncio.Event()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        await self.may_begin.wait()
        if self.is_lost:
            raise lost("test", OSError("gone"))
        yield
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
