"""The embedded database: one file, with a write-ahead log."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

from batch_svc.store.database import Row, lost
from common.errors import Unavailable

# Another process may hold the lock of the file for this long.
_LOCK_TIMEOUT_S: Final = 10.0

T = TypeVar("T")


class SqliteDatabase:
    """A file. Statements run in a thread of its own, one transaction after the other."""

    name: Final = "sqlite"
    blob: Final = "BLOB"
    # Days since noon in Greenwich on November 24, 4714 B.C.; 2440587.5 are those until 1970.
    now: Final = "((julianday('now') - 2440587.5) * 86400.0)"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "sqlite")
        self._connection: sqlite3.Connection | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        def connect() -> sqlite3.Connection:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(
                self._path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._path.chmod(0o600)
            connection.execute("PRAGMA journal_mode = WAL")
            # A commit survives the end of the process; FULL: also that of the host.
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            return connection

        self._connection = await self._run(connect)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await self._run(connection.close)
        self._thread.shutdown(wait=False)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[_SqliteTransaction]:
        async with self._lock:
            transaction = _SqliteTransaction(self)
            try:
                await transaction.execute("BEGIN IMMEDIATE")
                yield transaction
                await transaction.execute("COMMIT")
            except BaseException:
                # Shielded: a cancelled caller must not leave a transaction open, also if it is
                # cancelled while the thread begins it.
                await asyncio.shield(self._roll_back())
                raise

    async def fetch(self, sql: str, *values: object) -> Sequence[Row]:
        async with self._lock:
            return await self.query(sql, values)

    async def query(self, sql: str, values: Sequence[object]) -> Sequence[Row]:
        """Returns the rows of a query, inside or outside of a transaction."""
        return await self._run(lambda: self._opened.execute(sql, _named(values)).fetchall())

    async def change(self, sql: str, values: Sequence[object]) -> int:
        """Returns the number of rows that a statement changed."""
        return await self._run(lambda: self._opened.execute(sql, _named(values)).rowcount)

    async def change_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        named = [_named(row) for row in rows]
        await self._run(lambda: self._opened.executemany(sql, named))

    @property
    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            raise Unavailable("the batch database is closed", 1.0)
        return self._connection

    async def _roll_back(self) -> None:
        def roll_back() -> None:
            if self._connection is not None and self._connection.in_transaction:
                self._connection.rollback()

        await self._run(roll_back)

    async def _run(self, work: Callable[[], T]) -> T:
        """Runs work in the thread, to its end also if the caller is cancelled."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await future
        except (sqlite3.Error, OSError) as error:
            raise lost(self.name, error) from error


class _SqliteTransaction:
    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    async def execute(self, sql: str, *values: object) -> int:
        return await self._database.change(sql, values)

    async def execute_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        await self._database.change_many(sql, rows)

    async def fetch(self, sql: str, *values: object) -> Sequence[Row]:
        return await self._database.query(sql, values)


def _named(values: Sequence[object]) -> dict[str, object]:
    """Returns the parameters of `$1`, `$2`, ... by name."""
    return {str(number): value for number, value in enumerate(values, 1)}
