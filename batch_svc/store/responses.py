"""Stored responses of all tenants. A full tenant loses its oldest ones.

A transaction locks the row of `stored_bytes` of a tenant first, then its responses, and its
conversations last; one with several tenants locks them in the order of their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from batch_svc.core.batch import Owner
from batch_svc.core.conversations import ItemRow, items_of_response
from batch_svc.core.limits import WINDOW_S
from batch_svc.core.responses import (
    APPENDING,
    NOT_ENDED,
    NOT_ENDED_SQL,
    OpenResponse,
    ResponseCount,
    ResponseLimits,
    ResponseRow,
    ResponseRun,
    ResponseStatus,
    join_items,
    split_items,
    with_status,
)
from batch_svc.core.streams import Addition, StreamState
from batch_svc.store import streams
from batch_svc.store.conversations import ConversationStore
from batch_svc.store.database import Database, Transaction
from batch_svc.store.group_commit import GroupCommit
from common.conversation_append import NO_CONVERSATION, Append
from common.errors import InvalidRequest, NotFound, Overloaded
from common.response_refusals import (
    RESPONSE_TOO_LARGE,
    not_in_background,
    not_stored,
    not_streamed,
)

TENANT_BACKGROUND: Final = "TENANT_BACKGROUND"
# Rows that one transaction removes at most.
_SWEEP_ROWS: Final = 100


@dataclass(frozen=True, slots=True)
class _Stored:
    """A new row. status: "" of one that has ended."""

    owner: Owner
    row: ResponseRow
    status: str = ""
    object_time: int = 0
    request: bytes | None = None
    append: Append = NO_CONVERSATION

    @property
    def size(self) -> int:
        """Bytes that count for its tenant."""
        return self.row.size + len(self.request or b"")


class StoredResponses:
    """The responses of all tenants."""

    def __init__(
        self, database: Database, limits: ResponseLimits, conversations: ConversationStore
    ) -> None:
        self._database = database
        self._limits = limits
        self._conversations = conversations
        self._writes = GroupCommit(database)

    async def put(
        self,
        owner: Owner,
        row: ResponseRow,
        append: Append = NO_CONVERSATION,
        *,
        only_appends: bool = False,
    ) -> bool:
        """Stores a response that has ended, unless it is stored; returns whether its conversation
        has its items. Raises InvalidRequest above its largest size, and Unavailable.

        - only_appends: the response itself is not stored.
        """
        if not only_appends:
            self._check_size(row.size)
        items = _appended(row, append, row.response)

        async def write(transaction: Transaction) -> bool:
            await _lock(transaction, owner.tenant)
            if not only_appends:
                stored = _Stored(owner, row, append=append)
                if not await self._insert(transaction, stored):
                    return bool(append.conversation_id)  # A repeated call.
            return await self._append(transaction, owner.tenant, append, items)

        return await self._writes.run(write, order=owner.tenant)

    async def start(self, run: ResponseRun) -> None:
        """Stores a response that runs in the background. Raises as `put`, and Overloaded above the
        limit of the tenant."""
        owner, most = run.owner, self._limits.tenant_background
        status = str(ResponseStatus.QUEUED)
        stored = _Stored(owner, run.row, status, run.created_at, run.request, run.append)
        self._check_size(stored.size)
        async with self._database.transaction() as transaction:
            await _lock(transaction, owner.tenant)
            rows = await transaction.fetch(
                f"SELECT COUNT(*) FROM responses WHERE {NOT_ENDED_SQL} AND tenant = $1",
                owner.tenant,
            )
            if rows[0][0] >= most:
                text = f"{rows[0][0]} responses of this tenant run in the background, the limit is"
                raise Overloaded(5.0, f"{text} {most}", reason=TENANT_BACKGROUND)
            await self._insert(transaction, stored)
            if run.output is not None:
                await streams.create(transaction, run.row.id)

    async def _insert(self, transaction: Transaction, stored: _Stored) -> bool:
        """Stores a response; returns whether it was not there."""
        owner, row, now = stored.owner, stored.row, self._database.now
        added = await transaction.execute(
            "INSERT INTO responses (id, tenant, key_id, status, created_at, expires_at, size,"
            " response, items, object_time, request, conversation_id, first_item)"
            f" VALUES ($1, $2, $3, $4, {now}, {now} + $5, $6, $7, $8, $9, $10, $11, $12)"
            " ON CONFLICT (id) DO NOTHING",
            row.id,
            owner.tenant,
            owner.key_id,
            stored.status,
            self._limits.keep_s,
            stored.size,
            row.response,
            join_items(row.input_items),
            stored.object_time,
            stored.request,
            stored.append.conversation_id,
            stored.append.first_item,
        )
        if added:
            await self._count(transaction, owner.tenant, row.id, stored.size)
        return bool(added)

    async def _append(
        self, transaction: Transaction, tenant: str, append: Append, items: Sequence[ItemRow]
    ) -> bool:
        """Appends the items of a response to its conversation; returns whether that was there."""
        if not append.conversation_id:
            return False
        return await self._conversations.append(transaction, tenant, append.conversation_id, items)

    async def get(self, tenant: str, response_id: str) -> ResponseRow:
        """Raises NotFound, and Unavailable."""
        rows = await self._database.fetch(
            "SELECT response, items, status FROM responses WHERE id = $1 AND tenant = $2"
            f" AND expires_at > {self._database.now}",
            response_id,
            tenant,
        )
        if not rows:
            raise _not_stored(response_id)
        response, items, status = rows[0]
        return ResponseRow(
            response_id, _with_status(bytes(response), status), split_items(bytes(items))
        )

    async def cancel(self, tenant: str, response_id: str) -> ResponseRow:
        """Ends a response that runs in the background; returns it as it is then. Raises NotFound,
        InvalidRequest if it did not run in the background, and Unavailable."""
        async with self._database.transaction() as transaction:
            await _lock(transaction, tenant)
            rows = await transaction.fetch(
                "SELECT request IS NULL, response, items FROM responses"
                " WHERE id = $1 AND tenant = $2",
                response_id,
                tenant,
            )
            if not rows:
                raise _not_stored(response_id)
            has_no_request, response, items = rows[0]
            if has_no_request:
                raise not_in_background(response_id)
            row = ResponseRow(response_id, bytes(response), split_items(bytes(items)))
            await self._end(transaction, tenant, row, ResponseStatus.CANCELLED)
        return await self.get(tenant, response_id)

    async def read_stream(self, tenant: str, response_id: str, run: int, first: int) -> StreamState:
        """Returns the output of a response as far as it is stored. Raises NotFound, InvalidRequest
        if it is not stored as it is generated, and Unavailable.

        - run, first: the run of the caller, and its first part to return; of another run, all are.
        """
        rows = await self._database.fetch(
            "SELECT response, status FROM responses WHERE id = $1 AND tenant = $2",
            response_id,
            tenant,
        )
        if not rows:
            raise _not_stored(response_id)
        # After the status: what has ended has all of its output.
        response, status = rows[0]
        output = await streams.read(self._database, response_id, run, first)
        if output is None:
            raise not_streamed(response_id)
        shown = _with_status(bytes(response), status)
        return StreamState(shown, status not in NOT_ENDED, output)

    async def counts(self) -> list[ResponseCount]:
        """Returns how many responses in the background there are. Raises Unavailable."""
        rows = await self._database.fetch(
            "SELECT tenant, status, COUNT(*) FROM responses WHERE status <> ''"
            " GROUP BY tenant, status ORDER BY tenant, status"
        )
        return [ResponseCount(row[0], row[1], int(row[2])) for row in rows]

    # The runner, under its lease.

    async def open_responses(self) -> list[OpenResponse]:
        """Returns the responses in the background that have not ended, oldest first. Raises
        Unavailable."""
        rows = await self._database.fetch(
            f"SELECT id, tenant, CASE WHEN created_at + {WINDOW_S} < {self._database.now} THEN 1"
            f" ELSE 0 END FROM responses WHERE {NOT_ENDED_SQL} ORDER BY created_at, id"
        )
        return [OpenResponse(row[0], row[1], bool(row[2])) for row in rows]

    async def begin(self, transaction: Transaction, response_id: str) -> ResponseRun | None:
        """Puts a response in progress, and returns it; None: it has ended."""
        changed = await transaction.execute(
            f"UPDATE responses SET status = $1 WHERE id = $2 AND {NOT_ENDED_SQL}",
            str(ResponseStatus.IN_PROGRESS),
            response_id,
        )
        if not changed:
            return None
        rows = await transaction.fetch(
            "SELECT tenant, key_id, response, items, request, object_time, conversation_id,"
            " first_item FROM responses WHERE id = $1",
            response_id,
        )
        tenant, key_id, response, items, request, object_time, *append = rows[0]
        row = ResponseRow(response_id, bytes(response), split_items(bytes(items)))
        output = await streams.read(transaction, response_id)
        return ResponseRun(
            Owner(tenant, key_id),
            row,
            bytes(request),
            int(object_time),
            Append(append[0], int(append[1])),
            output=output,
        )

    async def add_output(
        self, transaction: Transaction, response_id: str, addition: Addition
    ) -> None:
        """Stores output of a response as it is generated, unless it has ended."""
        await streams.append(transaction, response_id, addition)

    async def finish(
        self, transaction: Transaction, run: ResponseRun, status: ResponseStatus, response: bytes
    ) -> bool:
        """Ends a response; returns whether it had not ended before."""
        row, tenant = replace(run.row, response=response), run.owner.tenant
        await _lock(transaction, tenant)
        changed = await self._end(transaction, tenant, row, status)
        if changed and status in APPENDING:
            items = _appended(row, run.append, response)
            await self._append(transaction, tenant, run.append, items)
        return changed

    async def _end(
        self, transaction: Transaction, tenant: str, row: ResponseRow, status: ResponseStatus
    ) -> bool:
        """Ends a response in the background, which needs no request any more; returns whether it
        had not ended before."""
        sizes = await transaction.fetch(
            f"SELECT size FROM responses WHERE id = $1 AND {NOT_ENDED_SQL}", row.id
        )
        size = row.size + await streams.size(transaction, row.id)
        changed = await transaction.execute(
            "UPDATE responses SET status = $1, response = $2, request = $3, size = $4"
            f" WHERE id = $5 AND {NOT_ENDED_SQL}",
            str(status),
            row.response,
            b"",
            size,
            row.id,
        )
        if changed:
            await self._count(transaction, tenant, row.id, size - int(sizes[0][0]))
        return bool(changed)

    # Clients and the service.

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises NotFound, and Unavailable."""
        async with self._database.transaction() as transaction:
            await _lock(transaction, tenant)
            if not await _remove(transaction, tenant, response_id):
                raise _not_stored(response_id)

    async def sweep(self) -> int:
        """Removes responses that have expired; returns their number. Raises Unavailable."""
        removed = 0
        # Ends: each round removes rows, the last one less than a page.
        while True:
            rows = await self._database.fetch(
                f"SELECT tenant, id FROM responses WHERE expires_at < {self._database.now}"
                f" LIMIT {_SWEEP_ROWS}"
            )
            for tenant, expired in groupby(sorted(map(tuple, rows)), lambda row: row[0]):
                async with self._database.transaction() as transaction:
                    await _lock(transaction, tenant)
                    for _, response_id in expired:
                        removed += await _remove(transaction, tenant, response_id)
            if len(rows) < _SWEEP_ROWS:
                return removed

    def _check_size(self, size: int) -> None:
        limit = min(self._limits.response_bytes, self._limits.tenant_bytes)
        if size > limit:
            text = f"the response with its conversation has {size} bytes, the limit is"
            raise InvalidRequest(f"{text} {limit >> 20} MB", "input", reason=RESPONSE_TOO_LARGE)

    async def _count(self, transaction: Transaction, tenant: str, new_id: str, size: int) -> None:
        """Counts the bytes of a new response, and removes the oldest ones of a tenant above its
        limit: but not the new one, and none that has not ended."""
        rows = await transaction.fetch(
            "INSERT INTO stored_bytes (tenant, bytes) VALUES ($1, $2)"
            " ON CONFLICT (tenant) DO UPDATE SET bytes = stored_bytes.bytes + excluded.bytes"
            " RETURNING bytes",
            tenant,
            size,
        )
        above = int(rows[0][0]) - self._limits.tenant_bytes
        # Ends: each round removes responses.
        while above > 0:
            oldest = await transaction.fetch(
                "SELECT id, size FROM responses WHERE tenant = $1 AND id <> $2"
                f" AND NOT ({NOT_ENDED_SQL}) ORDER BY created_at, id LIMIT {_SWEEP_ROWS}",
                tenant,
                new_id,
            )
            if not oldest:
                return
            for response_id, size in oldest:
                if above <= 0:
                    break
                await _remove(transaction, tenant, response_id)
                above -= int(size)


def _appended(row: ResponseRow, append: Append, response: bytes) -> Sequence[ItemRow]:
    """Returns what a response appends to its conversation. response: its object at its end."""
    if not append.conversation_id:
        return ()
    return items_of_response(row.input_items[append.first_item :], response)


async def _lock(transaction: Transaction, tenant: str) -> None:
    """Excludes other writes of the responses of a tenant until the end of the transaction."""
    await transaction.execute("UPDATE stored_bytes SET bytes = bytes WHERE tenant = $1", tenant)


async def _remove(transaction: Transaction, tenant: str, response_id: str) -> int:
    """Removes a response of a locked tenant; returns the number of those that were there."""
    rows = await transaction.fetch(
        "SELECT size FROM responses WHERE id = $1 AND tenant = $2", response_id, tenant
    )
    removed = await transaction.execute(
        "DELETE FROM responses WHERE id = $1 AND tenant = $2", response_id, tenant
    )
    if removed:
        await streams.remove(transaction, response_id)
        await transaction.execute(
            "UPDATE stored_bytes SET bytes = bytes - $1 WHERE tenant = $2", int(rows[0][0]), tenant
        )
    return removed


def _with_status(response: bytes, status: str) -> bytes:
    """Returns the object of a response. status: of its row; the object of one that has not ended
    is that of its start, and so is that of one that was cancelled."""
    shown = (*NOT_ENDED, ResponseStatus.CANCELLED)
    return with_status(response, status) if status in shown else response


def _not_stored(response_id: str) -> NotFound:
    return not_stored(response_id, "its tenant stores too many")
