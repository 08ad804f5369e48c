"""Writes of many callers in one transaction: what arrives while one is committed is the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias, TypeVar

from batch_svc.store.database import Database, Transaction

T = TypeVar("T")
# Any: each has a type of its own.
_Work: TypeAlias = Callable[[Transaction], Awaitable[object]]

GROUP_MAX: Final = 256


class GroupCommit:
    """One queue of writes, of which none may raise but for a lost database: that ends its group."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[_Work, asyncio.Future[object]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def run(self, write: Callable[[Transaction], Awaitable[T]]) -> T:
        """Returns the result of a write after its commit. Raises Unavailable."""
        ended: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((write, ended))  # type: ignore[arg-type]
        if self._writer is None:
            # Not the task of one caller, whose end must not be that of others.
            self._writer = asyncio.create_task(self._write_all(), name="group commit")
        return await ended

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                group = self._waiting[:GROUP_MAX]
                del self._waiting[:GROUP_MAX]
                await self._write([one for one in group if not one[1].done()])
        finally:
            self._writer = None

    async def _write(self, group: list[tuple[_Work, asyncio.Future[object]]]) -> None:
        try:
            async with self._database.transaction() as transaction:
                results = [await write(transaction) for write, _ in group]
        except Exception as error:  # Of the group: each caller raises it.
            for _, ended in group:
                if not ended.done():
                    ended.set_exception(error)
            return
        for (_, ended), result in zip(group, results, strict=True):
            if not ended.done():
                ended.set_result(result)
