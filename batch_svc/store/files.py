"""Files: their content is in rows of at most CHUNK_BYTES, so that every service has all of them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Final

from batch_svc.core.batch import ENDED, StoredFile
from batch_svc.core.limits import OUTPUT_PURPOSE, BatchLimits
from batch_svc.store.database import Database, Row, Transaction
from common.errors import Conflict, InvalidRequest, NotFound, Overloaded

CHUNK_BYTES: Final = 1 << 20
# Uploads that have not ended after this time are removed.
UPLOAD_MAX_S: Final = 3600.0
BODY_TOO_LARGE: Final = "BODY_TOO_LARGE"
TENANT_FILES: Final = "TENANT_FILES"
_COLUMNS: Final = "id, filename, purpose, size, created_at, expires_at"


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


class Upload:
    """A file whose content arrives. Nothing of it is visible before `finish`."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self.file_id = new_file_id()
        self.size = 0
        self._buffer = bytearray()
        self._chunks = 0

    async def add(self, content: bytes) -> None:
        """Raises InvalidRequest above the largest size, and Unavailable."""
        self.size += len(content)
        limit = self._store.limits.file_bytes
        if self.size > limit:
            text = f"'file' is larger than {limit >> 20} MB."
            raise InvalidRequest(text, "file", reason=BODY_TOO_LARGE)
        self._buffer += content
        while len(self._buffer) >= CHUNK_BYTES:
            await self._put(bytes(self._buffer[:CHUNK_BYTES]))
            del self._buffer[:CHUNK_BYTES]

    async def finish(
        self, tenant: str, filename: str, purpose: str, expires_after_s: int
    ) -> StoredFile:
        """Stores the file. Raises Overloaded above the limit of the tenant, InvalidRequest for an
        empty file, and Unavailable."""
        if not self.size:
            raise InvalidRequest("'file' is empty.", "file")
        if self._buffer or not self._chunks:
            await self._put(bytes(self._buffer))
        return await self._store.complete(self, tenant, filename, purpose, expires_after_s)

    async def abandon(self) -> None:
        """Removes what has arrived, unless the file is complete. Raises Unavailable."""
        await self._store.remove_upload(self.file_id)

    async def _put(self, content: bytes) -> None:
        await self._store.put_chunk(self.file_id, self._chunks, content, is_first=not self._chunks)
        self._chunks += 1


class FileStore:
    """The files of all tenants. now_s of methods: Unix seconds."""

    def __init__(self, database: Database, limits: BatchLimits, keep_s: float) -> None:
        """
        - keep_s: after which files without a time of their own are removed.
        """
        self._database = database
        self.limits = limits
        self._keep_s = keep_s

    async def put_chunk(self, file_id: str, number: int, content: bytes, *, is_first: bool) -> None:
        async with self._database.transaction() as transaction:
            if is_first:
                await transaction.execute(
                    f"INSERT INTO files ({_COLUMNS}, tenant, is_complete)"
                    f" VALUES ($1, '', '', 0, {self._database.now}, 0, '', 0)",
                    file_id,
                )
            await _insert_chunk(transaction, file_id, number, content)

    async def remove_upload(self, file_id: str) -> None:
        """Removes a file that is not complete. Raises Unavailable."""
        async with self._database.transaction() as transaction:
            await _remove_where(transaction, file_id, "is_complete = 0")

    async def complete(
        self, upload: Upload, tenant: str, filename: str, purpose: str, expires_after_s: int
    ) -> StoredFile:
        async with self._database.transaction() as transaction:
            rows = await transaction.fetch(
                "SELECT COALESCE(SUM(size), 0) FROM files WHERE tenant = $1 AND is_complete = 1",
                tenant,
            )
            used, most = int(rows[0][0]), self.limits.tenant_bytes
            if (total := used + upload.size) > most:
                text = f"the files of this tenant would have {total >> 20} MB, the limit is"
                text = f"{text} {most >> 20} MB; delete some"
                raise Overloaded(60.0, text, reason=TENANT_FILES)
            await transaction.execute(
                "UPDATE files SET tenant = $1, filename = $2, purpose = $3, size = $4,"
                " expires_at = created_at + $5, is_complete = 1 WHERE id = $6",
                tenant,
                filename,
                purpose,
                upload.size,
                float(expires_after_s or self._keep_s),
                upload.file_id,
            )
            rows = await transaction.fetch(
                f"SELECT {_COLUMNS} FROM files WHERE id = $1", upload.file_id
            )
        return _file(rows[0])

    async def get(self, tenant: str, file_id: str) -> StoredFile:
        """Raises NotFound, and Unavailable."""
        if "\0" in file_id:  # PostgreSQL refuses to compare with it.
            raise _no_file(file_id)
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS} FROM files WHERE id = $1 AND tenant = $2 AND is_complete = 1",
            file_id,
            tenant,
        )
        if not rows:
            raise _no_file(file_id)
        return _file(rows[0])

    async def page(
        self, tenant: str, purpose: str, limit: int, after: str, *, ascending: bool
    ) -> tuple[list[StoredFile], bool]:
        """Returns a page, and whether more follow. Raises NotFound for `after`."""
        order, sign = ("ASC", ">") if ascending else ("DESC", "<")
        values: list[object] = [tenant, limit + 1]
        where = ""
        if purpose:
            values.append(purpose)
            where += f" AND purpose = ${len(values)}"
        if after:
            before = await self.get(tenant, after)
            values += [before.created_at, before.id]
            where += f" AND (created_at, id) {sign} (${len(values) - 1}, ${len(values)})"
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS} FROM files WHERE tenant = $1 AND is_complete = 1{where}"
            f" ORDER BY created_at {order}, id {order} LIMIT $2",
            *values,
        )
        return [_file(row) for row in rows[:limit]], len(rows) > limit

    async def delete(self, tenant: str, file_id: str) -> None:
        """Raises NotFound, Conflict if a batch reads it, and Unavailable."""
        await self.get(tenant, file_id)
        ended = ", ".join(f"'{status}'" for status in ENDED)
        async with self._database.transaction() as transaction:
            rows = await transaction.fetch(
                "SELECT id FROM batches WHERE tenant = $1 AND input_file_id = $2"
                f" AND status NOT IN ({ended}) LIMIT 1",
                tenant,
                file_id,
            )
            if rows:
                text = f"the batch {rows[0][0]} reads the file; cancel it, or wait for its end"
                raise Conflict(text, field="file_id")
            await remove_file(transaction, file_id)

    async def read(self, file_id: str) -> AsyncIterator[bytes]:
        """Yields the content in parts. Raises Unavailable."""
        number = 0
        # Ends: the file has a last chunk.
        while rows := await self._database.fetch(
            "SELECT content FROM chunks WHERE file_id = $1 AND number = $2", file_id, number
        ):
            yield bytes(rows[0][0])
            number += 1

    async def sweep(self) -> int:
        """Removes files that have expired, and uploads that did not end; returns their number.
        Input files of batches that have not ended stay. Raises Unavailable."""
        now = self._database.now
        ended = ", ".join(f"'{status}'" for status in ENDED)
        expired = (
            f"((is_complete = 1 AND expires_at < {now} AND NOT EXISTS"
            " (SELECT 1 FROM batches WHERE batches.input_file_id = files.id"
            f" AND batches.status NOT IN ({ended})))"
            f" OR (is_complete = 0 AND created_at < {now} - {UPLOAD_MAX_S}))"
        )
        removed = 0
        rows = await self._database.fetch(f"SELECT id FROM files WHERE {expired} LIMIT 100")
        for (file_id,) in rows:
            async with self._database.transaction() as transaction:
                # Again: the runner may write the file of a result anew, under the same id.
                removed += await _remove_where(transaction, file_id, expired)
        return removed


async def remove_file(transaction: Transaction, file_id: str) -> None:
    """Removes a file with its content, if it is there."""
    await transaction.execute("DELETE FROM chunks WHERE file_id = $1", file_id)
    await transaction.execute("DELETE FROM files WHERE id = $1", file_id)


async def _remove_where(transaction: Transaction, file_id: str, condition: str) -> int:
    """Removes a file if a condition holds; returns the number of files."""
    removed = await transaction.execute(f"DELETE FROM files WHERE id = $1 AND {condition}", file_id)
    if removed:
        await transaction.execute("DELETE FROM chunks WHERE file_id = $1", file_id)
    return removed


async def insert_output(
    transaction: Transaction, file: StoredFile, tenant: str, chunks: Sequence[bytes], first: int
) -> None:
    """Adds chunks to the file of a result, which is not visible yet. first: their number."""
    if not first:
        await remove_file(transaction, file.id)
        await transaction.execute(
            f"INSERT INTO files ({_COLUMNS}, tenant, is_complete)"
            " VALUES ($1, $2, $3, 0, $4, $5, $6, 0)",
            file.id,
            file.filename,
            OUTPUT_PURPOSE,
            file.created_at,
            file.expires_at,
            tenant,
        )
    for number, content in enumerate(chunks, first):
        await _insert_chunk(transaction, file.id, number, content)


async def complete_output(transaction: Transaction, file_id: str, size: int) -> None:
    """Makes the file of a result visible."""
    await transaction.execute(
        "UPDATE files SET is_complete = 1, size = $1 WHERE id = $2", size, file_id
    )


async def _insert_chunk(
    transaction: Transaction, file_id: str, number: int, content: bytes
) -> None:
    await transaction.execute(
        "INSERT INTO chunks (file_id, number, content) VALUES ($1, $2, $3)",
        file_id,
        number,
        content,
    )


def _file(row: Row) -> StoredFile:
    return StoredFile(row[0], row[1], row[2], int(row[3]), row[4], row[5])


def _no_file(file_id: str) -> NotFound:
    return NotFound(f"there is no file {file_id!r}", field="file_id")
