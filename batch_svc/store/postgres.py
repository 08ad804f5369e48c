"""PostgreSQL, by asyncpg."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import asyncpg

from batch_svc.store.database import Row, lost, rolled_back
from common.errors import InvalidRequest, Unavailable

_CONNECTIONS_MAX: Final = 8
_CONNECT_TIMEOUT_S: Final = 5.0
_STATEMENT_TIMEOUT_S: Final = 60.0
# Errors of a transaction that the server gave up.
_ROLLED_BACK: Final = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)
# Errors of a server that is gone, starts or stops.
_LOST: Final = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.InvalidPasswordError,
    asyncpg.InvalidCatalogNameError,
)


class PostgresDatabase:
    """A database of a server. Connections that broke are replaced."""

    name: Final = "postgresql"
    blob: Final = "BYTEA"
    now: Final = "extract(epoch FROM clock_timestamp())::double precision"

    def __init__(self, url: str) -> None:
        self._url = url
        # Any: asyncpg has no types of its own.
        self._pool: Any = None
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        with _mapped():
            async with self._opening:
                if self._pool is None:
                    self._pool = await asyncpg.create_pool(
                        self._url,
                        min_size=1,
                        max_size=_CONNECTIONS_MAX,
                        timeout=_CONNECT_TIMEOUT_S,
                        command_timeout=_STATEMENT_TIMEOUT_S,
                        server_settings={"application_name": "kvmesh"},
                    )

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.terminate()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[_PostgresTransaction]:
        with _mapped():
            acquired = self._opened.acquire(timeout=_CONNECT_TIMEOUT_S)
            async with acquired as connection, connection.transaction():
                yield _PostgresTransaction(connection)

    async def fetch(self, sql: str, *values: object) -> Sequence[Row]:
        with _mapped():
            rows: Sequence[Row] = await self._opened.fetch(sql, *values)
            return rows

    @property
    def _opened(self) -> Any:
        if self._pool is None:
            raise Unavailable("the batch database is closed", 1.0)
        return self._pool


class _PostgresTransaction:
    # Any: a connection of asyncpg.
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def execute(self, sql: str, *values: object) -> int:
        status: str = await self._connection.execute(sql, *values)
        count = status.rpartition(" ")[2]
        return int(count) if count.isdecimal() else 0

    async def execute_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        await self._connection.executemany(sql, list(rows))

    async def fetch(self, sql: str, *values: object) -> Sequence[Row]:
        rows: Sequence[Row] = await self._connection.fetch(sql, *values)
        return rows


@contextmanager
def _mapped() -> Iterator[None]:
    """Raises Unavailable for the errors of a server that is lost or rolled back, and InvalidRequest
    for a text that it cannot have."""
    try:
        yield
    except _ROLLED_BACK as error:
        raise rolled_back(PostgresDatabase.name, error) from error
    except _LOST as error:
        raise lost(PostgresDatabase.name, error) from error
    except asyncpg.CharacterNotInRepertoireError as error:
        text = "the batch database cannot have a text with the character NUL"
        raise InvalidRequest(text) from error
