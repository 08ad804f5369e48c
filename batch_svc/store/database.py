"""What the stores need of a database. `sqlite.py` and `postgres.py` implement it.

Both take the same SQL, with parameters `$1`, `$2`, ...: what they differ in is `BLOB` and `NOW`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol, TypeAlias

from common.errors import Unavailable

# Any: the types of columns.
Row: TypeAlias = Sequence[Any]

RETRY_AFTER_S: Final = 1.0
# Reasons of an Unavailable: the database does not respond; it rolled a transaction back for the
# sake of another one, so that the same transaction may succeed.
DATABASE_LOST: Final = "BATCH_DATABASE_LOST"
ROLLED_BACK: Final = "BATCH_TRANSACTION_ROLLED_BACK"


class Transaction(Protocol):
    """The statements of one transaction. Each raises Unavailable if the database is lost."""

    async def execute(self, sql: str, *values: object) -> int:
        """Returns the number of rows that it changed."""

    async def execute_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        """Runs one statement for each row of parameters."""

    async def fetch(self, sql: str, *values: object) -> Sequence[Row]:
        """Returns the rows of a query."""


class Database(Protocol):
    """A database. Its methods raise Unavailable while it is lost, and work again afterwards."""

    @property
    def name(self) -> str:
        """sqlite or postgresql."""

    @property
    def blob(self) -> str:
        """The type of a column of bytes."""

    @property
    def now(self) -> str:
        """An expression for the present time of the database in Unix seconds, with fractions."""

    async def open(self) -> None:
        """Connects. Raises Unavailable."""

    async def close(self) -> None: ...

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Begins a transaction, which is committed at the end of the block, and rolled back if that
        raises. One that writes excludes others that write the same rows."""

    async def fetch(self, sql: str, *values: object) -> Sequence[Row]:
        """Returns the rows of a query."""


def lost(name: str, error: BaseException) -> Unavailable:
    """Returns the error of a database that does not respond."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return Unavailable(
        f"the {name} database of the batch service does not respond: {text}",
        RETRY_AFTER_S,
        reason=DATABASE_LOST,
    )


def rolled_back(name: str, error: BaseException) -> Unavailable:
    """Returns the error of a transaction that the database rolled back for the sake of another."""
    text = f"the {name} database of the batch service rolled a transaction back: {error}"
    return Unavailable(text, RETRY_AFTER_S, reason=ROLLED_BACK)
