"""Writes of many callers in one transaction: what arrives while one is committed is the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias, TypeVar

from batch_svc.store.database import ROLLED_BACK, Database, Transaction
from common.errors import Unavailable

T = TypeVar("T")
# Any: each has a type of its own.
_Work: TypeAlias = Callable[[Transaction], Awaitable[object]]
_Waiting: TypeAlias = tuple[str, _Work, asyncio.Future[object]]

GROUP_MAX: Final = 256


class GroupCommit:
    """One queue of writes, of which none may raise but for a lost database: that ends its group."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[_Waiting] = []
        self._writer: asyncio.Task[None] | None = None

    async def run(self, write: Callable[[Transaction], Awaitable[T]], order: str = "") -> T:
        """Returns the result of a write after its commit. Raises Unavailable.

        - write: called once more if the database rolls its group back.
        - order: of its locks: writes of a group run in this order.
        """
        ended: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((order, write, ended))  # type: ignore[arg-type]
        if self._writer is None:
            # Not the task of one caller, whose end must not be that of others.
            self._writer = asyncio.create_task(self._write_all(), name="group commit")
        return await ended

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                group = self._waiting[:GROUP_MAX]
                del self._waiting[:GROUP_MAX]
                await self._write([one for one in group if not one[2].done()])
        finally:
            self._writer = None

    async def _write(self, unordered: list[_Waiting]) -> None:
        group = sorted(unordered, key=lambda one: one[0])
        try:
            try:
                results = await self._commit(group)
            except Unavailable as error:
                if error.reason != ROLLED_BACK:
                    raise
                results = await self._commit(group)
        except Exception as error:  # Of the group: each caller raises it.
            for _, _, ended in group:
                if not ended.done():
                    ended.set_exception(error)
            return
        for (_, _, ended), result in zip(group, results, strict=True):
            if not ended.done():
                ended.set_result(result)

    async def _commit(self, group: list[_Waiting]) -> list[object]:
        async with self._database.transaction() as transaction:
            return [await write(transaction) for _, write, _ in group]
