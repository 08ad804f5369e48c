"""Batches and their lines. Each line has at most one result, written under the runner's lease."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from batch_svc.core.batch import ENDED, OPEN, TIMES, BatchRow, Owner, Status
from batch_svc.core.limits import WINDOW_S, BatchLimits
from batch_svc.core.lines import Line, LineError
from batch_svc.core.results import Result
from batch_svc.store.database import Database, Row, Transaction
from batch_svc.store.files import complete_output
from batch_svc.store.schema import TIME_COLUMNS
from common.errors import Conflict, NotFound, Overloaded

TENANT_BATCHES: Final = "TENANT_BATCHES"
_COLUMNS: Final = (
    *("id", "tenant", "key_id", "endpoint", "input_file_id", "completion_window", "status"),
    *("created_at", "expires_at", "output_file_id", "error_file_id", "output_expires_s"),
    *("ends_as", "total", "completed", "failed", "metadata", "errors", *TIME_COLUMNS),
)
_SELECT: Final = f"SELECT {', '.join(_COLUMNS)} FROM batches"
_NOT_ENDED: Final = f"status NOT IN ({', '.join(repr(str(status)) for status in ENDED)})"


@dataclass(frozen=True, slots=True)
class StoredLine:
    """A line without a result."""

    number: int
    position: int
    """In the order in which lines are sent."""

    custom_id: str
    body: bytes


class BatchStore:
    """The batches of all tenants."""

    def __init__(self, database: Database, limits: BatchLimits) -> None:
        self._database = database
        self._limits = limits

    # Clients.

    async def create(
        self,
        owner: Owner,
        input_file_id: str,
        endpoint: str,
        window: str,
        metadata: Mapping[str, str],
        output_expires_s: int,
    ) -> BatchRow:
        """Stores a batch to be validated. Raises Overloaded above the limit of the tenant, and
        Unavailable."""
        batch_id, now = f"batch_{secrets.token_hex(12)}", self._database.now
        async with self._database.transaction() as transaction:
            rows = await transaction.fetch(
                f"SELECT COUNT(*) FROM batches WHERE tenant = $1 AND {_NOT_ENDED}", owner.tenant
            )
            most = self._limits.tenant_batches
            if rows[0][0] >= most:
                text = f"{rows[0][0]} batches of this tenant have not ended, the limit is {most}"
                raise Overloaded(60.0, text, reason=TENANT_BATCHES)
            await transaction.execute(
                "INSERT INTO batches (id, tenant, key_id, endpoint, input_file_id,"
                " completion_window, status, created_at, expires_at, output_expires_s, metadata)"
                f" VALUES ($1, $2, $3, $4, $5, $6, $7, {now}, {now} + $8, $9, $10)",
                batch_id,
                owner.tenant,
                owner.key_id,
                endpoint,
                input_file_id,
                window,
                str(Status.VALIDATING),
                float(WINDOW_S),
                output_expires_s,
                orjson.dumps(dict(metadata)).decode(),
            )
            return await _get(transaction, batch_id)

    async def get(self, tenant: str, batch_id: str) -> BatchRow:
        """Raises NotFound, and Unavailable."""
        rows: Sequence[Row] = ()
        if "\0" not in batch_id:  # PostgreSQL refuses to compare with it.
            rows = await self._database.fetch(
                f"{_SELECT} WHERE id = $1 AND tenant = $2", batch_id, tenant
            )
        if not rows:
            raise NotFound(f"there is no batch {batch_id!r}", field="batch_id")
        return _batch(rows[0])

    async def page(self, tenant: str, limit: int, after: str) -> tuple[list[BatchRow], bool]:
        """Returns a page, newest first, and whether more follow. Raises NotFound for `after`."""
        values: list[object] = [tenant, limit + 1]
        where = ""
        if after:
            before = await self.get(tenant, after)
            values += [before.created_at, before.id]
            where = " AND (created_at, id) < ($3, $4)"
        rows = await self._database.fetch(
            f"{_SELECT} WHERE tenant = $1{where} ORDER BY created_at DESC, id DESC LIMIT $2",
            *values,
        )
        return [_batch(row) for row in rows[:limit]], len(rows) > limit

    async def newest(self, limit: int) -> list[BatchRow]:
        """Returns the newest batches of all tenants."""
        rows = await self._database.fetch(
            f"{_SELECT} ORDER BY created_at DESC, id DESC LIMIT $1", limit
        )
        return [_batch(row) for row in rows]

    async def cancel(self, tenant: str, batch_id: str) -> BatchRow:
        """Requests the end of a batch. Raises NotFound, Conflict if it has ended, Unavailable."""
        batch = await self.get(tenant, batch_id)
        async with self._database.transaction() as transaction:
            states = ", ".join(f"'{status}'" for status in OPEN)
            await transaction.execute(
                f"UPDATE batches SET status = $1, cancelling_at = {self._database.now},"
                f" ends_as = $2 WHERE id = $3 AND status IN ({states})",
                str(Status.CANCELLING),
                str(Status.CANCELLED),
                batch_id,
            )
            batch = await _get(transaction, batch_id)
        if batch.status not in (Status.CANCELLING, Status.CANCELLED):
            raise Conflict(f"the batch {batch_id!r} is {batch.status}", field="batch_id")
        return batch

    # The runner, under its lease.

    async def open_batches(self) -> list[tuple[BatchRow, bool]]:
        """Returns the batches that have not ended, oldest first, with whether they are past their
        window. Raises Unavailable."""
        rows = await self._database.fetch(
            f"SELECT {', '.join(_COLUMNS)}, CASE WHEN expires_at < {self._database.now} THEN 1"
            f" ELSE 0 END FROM batches WHERE {_NOT_ENDED} ORDER BY created_at, id"
        )
        return [(_batch(row), bool(row[len(_COLUMNS)])) for row in rows]

    async def put_lines(
        self,
        transaction: Transaction,
        batch_id: str,
        lines: Iterable[Line],
        positions: Mapping[int, int],
    ) -> None:
        """Stores lines of a batch that has not begun, in place of those of a try before.
        positions: in the order of sending, by number."""
        await transaction.execute_many(
            "INSERT INTO lines (batch_id, number, position, custom_id, body)"
            " VALUES ($1, $2, $3, $4, $5) ON CONFLICT (batch_id, number) DO UPDATE SET"
            " position = excluded.position, custom_id = excluded.custom_id, body = excluded.body",
            (
                (batch_id, line.number, positions[line.number], line.custom_id, line.body)
                for line in lines
            ),
        )

    async def begin(self, transaction: Transaction, batch: BatchRow, total: int) -> list[LineError]:
        """Puts a batch in progress whose lines are stored. Returns the error if its tenant has too
        many lines."""
        rows = await transaction.fetch(
            f"SELECT COALESCE(SUM(total), 0) FROM batches WHERE tenant = $1 AND {_NOT_ENDED}",
            batch.owner.tenant,
        )
        queued, most = int(rows[0][0]), self._limits.tenant_lines
        if queued + total > most:
            text = f"the batches of this tenant would have {queued + total} lines that have"
            return [LineError("token_limit_exceeded", f"{text} not ended, the limit is {most}")]
        changed = await self._set_status(
            transaction, batch.id, Status.IN_PROGRESS, (Status.VALIDATING,)
        )
        if changed:  # Else it was cancelled.
            await transaction.execute(
                "UPDATE batches SET total = $1 WHERE id = $2", total, batch.id
            )
        return []

    async def fail(
        self, transaction: Transaction, batch: BatchRow, errors: Iterable[LineError]
    ) -> None:
        """Ends a batch that is not valid."""
        await transaction.execute("DELETE FROM lines WHERE batch_id = $1", batch.id)
        found = [
            {"code": e.code, "message": e.message, "param": e.param or None, "line": e.line or None}
            for e in errors
        ]
        await transaction.execute(
            "UPDATE batches SET errors = $1 WHERE id = $2", orjson.dumps(found).decode(), batch.id
        )
        await self._set_status(transaction, batch.id, Status.FAILED, (Status.VALIDATING,))

    async def next_lines(self, batch_id: str, after: int, limit: int) -> list[StoredLine]:
        """Returns lines without a result, in the order of sending. after: the position before."""
        rows = await self._database.fetch(
            "SELECT number, position, custom_id, body FROM lines WHERE batch_id = $1"
            " AND result IS NULL AND position > $2 ORDER BY position LIMIT $3",
            batch_id,
            after,
            limit,
        )
        return [StoredLine(int(row[0]), int(row[1]), row[2], bytes(row[3])) for row in rows]

    async def put_results(
        self, transaction: Transaction, batch_id: str, results: Sequence[tuple[int, Result]]
    ) -> None:
        """Writes results of lines that have none, and counts them."""
        counts = [0, 0]
        for number, result in results:
            counts[result.is_error] += await transaction.execute(
                "UPDATE lines SET result = $1, is_error = $2 WHERE batch_id = $3 AND number = $4"
                " AND result IS NULL",
                result.row,
                int(result.is_error),
                batch_id,
                number,
            )
        await transaction.execute(
            "UPDATE batches SET completed = completed + $1, failed = failed + $2 WHERE id = $3",
            *counts,
            batch_id,
        )

    async def finalize(self, transaction: Transaction, batch: BatchRow, ends_as: Status) -> bool:
        """Marks a batch as one whose files are written now; returns whether it is one."""
        if batch.status in (Status.FINALIZING, Status.CANCELLING):
            return True
        changed = await self._set_status(
            transaction, batch.id, Status.FINALIZING, (Status.IN_PROGRESS,)
        )
        if changed:
            await transaction.execute(
                "UPDATE batches SET ends_as = $1 WHERE id = $2", str(ends_as), batch.id
            )
        return bool(changed)

    async def results(
        self, batch_id: str, after: int, limit: int, *, is_error: bool
    ) -> list[tuple[int, bytes]]:
        """Returns numbers and rows of results in the order of the file. after: the number
        before."""
        rows = await self._database.fetch(
            "SELECT number, result FROM lines WHERE batch_id = $1 AND number > $2"
            " AND result IS NOT NULL AND is_error = $3 ORDER BY number LIMIT $4",
            batch_id,
            after,
            int(is_error),
            limit,
        )
        return [(int(row[0]), bytes(row[1])) for row in rows]

    async def end(
        self,
        transaction: Transaction,
        batch: BatchRow,
        status: Status,
        files: Mapping[str, tuple[str, int]],
    ) -> None:
        """Ends a batch: its files appear, and its lines are removed. One that was cancelled
        meanwhile is cancelled, as the response to its client says.

        - files: id and size by column, `output_file_id` or `error_file_id`.
        """
        for column, (file_id, size) in files.items():
            await complete_output(transaction, file_id, size)
            await transaction.execute(
                f"UPDATE batches SET {column} = $1 WHERE id = $2", file_id, batch.id
            )
        before = (Status.VALIDATING, Status.FINALIZING)
        if not await self._set_status(transaction, batch.id, status, before):
            await self._set_status(transaction, batch.id, Status.CANCELLED, (Status.CANCELLING,))
        await transaction.execute("DELETE FROM lines WHERE batch_id = $1", batch.id)

    async def _set_status(
        self, transaction: Transaction, batch_id: str, status: Status, before: Iterable[Status]
    ) -> int:
        """Returns the number of batches that had one of the states before."""
        states = ", ".join(f"'{one}'" for one in before)
        return await transaction.execute(
            f"UPDATE batches SET status = $1, {TIMES[status]} = {self._database.now}"
            f" WHERE id = $2 AND status IN ({states})",
            str(status),
            batch_id,
        )


async def _get(transaction: Transaction, batch_id: str) -> BatchRow:
    rows = await transaction.fetch(f"{_SELECT} WHERE id = $1", batch_id)
    return _batch(rows[0])


def _batch(row: Row) -> BatchRow:
    # Any: the types of columns.
    values: dict[str, Any] = dict(zip(_COLUMNS, row, strict=False))
    return BatchRow(
        id=values["id"],
        owner=Owner(values["tenant"], values["key_id"]),
        endpoint=values["endpoint"],
        input_file_id=values["input_file_id"],
        window=values["completion_window"],
        status=Status(values["status"]),
        created_at=values["created_at"],
        expires_at=values["expires_at"],
        times={name: values[name] for name in TIME_COLUMNS},
        output_file_id=values["output_file_id"],
        error_file_id=values["error_file_id"],
        output_expires_s=int(values["output_expires_s"]),
        ends_as=values["ends_as"],
        total=int(values["total"]),
        completed=int(values["completed"]),
        failed=int(values["failed"]),
        metadata=orjson.loads(values["metadata"]),
        errors=tuple(orjson.loads(values["errors"])),
    )
