"""The database of a batch service: one result a line, one runner at a time, limits of tenants."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from batch_svc.core.batch import BatchRow, Owner, Status
from batch_svc.core.limits import BatchLimits
from batch_svc.core.lines import Line
from batch_svc.core.results import Result
from batch_svc.store.batches import BatchStore
from batch_svc.store.database import Row
from batch_svc.store.files import FileStore, Upload
from batch_svc.store.lease import LeaseLost, RunnerLease
from batch_svc.store.schema import create_tables
from batch_svc.store.sqlite import SqliteDatabase
from common.errors import Conflict, InvalidRequest, NotFound, Overloaded
from tests.kit.waiting import until

OWNER = Owner("acme", "key1")
LIMITS = BatchLimits(file_bytes=3 << 20, tenant_bytes=4 << 20, tenant_batches=2, tenant_lines=5)
DAY_S = 86_400.0


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    opened = SqliteDatabase(tmp_path / "batches.db")
    await opened.open()
    await create_tables(opened)
    yield opened
    await opened.close()


@pytest.fixture
def files(database: SqliteDatabase) -> FileStore:
    return FileStore(database, LIMITS, DAY_S)


@pytest.fixture
def batches(database: SqliteDatabase) -> BatchStore:
    return BatchStore(database, LIMITS)


async def upload(files: FileStore, content: bytes, tenant: str = "acme") -> str:
    upload = Upload(files)
    for start in range(0, len(content), 300_000):
        await upload.add(content[start : start + 300_000])
    return (await upload.finish(tenant, "lines.jsonl", "batch", 0)).id


async def new_batch(batches: BatchStore) -> BatchRow:
    return await batches.create(OWNER, "file-0", "/v1/completions", "24h", {"a": "b"}, 0)


def lease_of(database: SqliteDatabase, name: str, seconds: float = 60.0) -> RunnerLease:
    return RunnerLease(database, name, seconds, asyncio.get_running_loop().time)


async def expire_lease(database: SqliteDatabase) -> None:
    async with database.transaction() as transaction:
        await transaction.execute("UPDATE leases SET expires_at = 0")


async def write(
    database: SqliteDatabase, batches: BatchStore, lease: RunnerLease, batch: BatchRow
) -> None:
    async with database.transaction() as transaction:
        await batches.put_results(transaction, batch.id, [(1, Result(False, b"late\n"))])
        await lease.check(transaction)


async def begin(database: SqliteDatabase, batches: BatchStore, lines: int) -> BatchRow:
    batch = await new_batch(batches)
    numbered = [Line(n, f"c{n}", b"{}", b"") for n in range(1, lines + 1)]
    async with database.transaction() as transaction:
        positions = {n: lines - n for n in range(1, lines + 1)}
        await batches.put_lines(transaction, batch.id, numbered, positions)
        assert not await batches.begin(transaction, batch, lines)
    return await batches.get("acme", batch.id)


async def test_a_file_is_read_back_as_it_was_sent_and_by_its_tenant_only(files: FileStore) -> None:
    content = bytes(range(256)) * 10_000
    file_id = await upload(files, content)
    assert b"".join([part async for part in files.read(file_id)]) == content
    assert (await files.get("acme", file_id)).size == len(content)
    for action in (files.get, files.delete):
        with pytest.raises(NotFound):
            await action("other", file_id)
    await files.delete("acme", file_id)
    assert [part async for part in files.read(file_id)] == []


async def test_a_file_above_the_limits_is_refused(files: FileStore) -> None:
    with pytest.raises(InvalidRequest, match="larger than 3 MB"):
        await upload(files, bytes(3 << 20) + b"x")
    await upload(files, bytes(2 << 20))
    with pytest.raises(Overloaded, match="the limit is 4 MB"):
        await upload(files, bytes(3 << 20))
    await upload(files, bytes(3 << 20), tenant="other")
    with pytest.raises(InvalidRequest, match="empty"):
        await upload(files, b"")


async def test_an_upload_that_fails_leaves_nothing(
    database: SqliteDatabase, files: FileStore
) -> None:
    upload = Upload(files)
    await upload.add(bytes(2 << 20))
    await upload.abandon()
    assert await database.fetch("SELECT file_id FROM chunks") == []
    complete = Upload(files)
    await complete.add(b"x")
    await complete.finish("acme", "lines.jsonl", "batch", 0)
    await complete.abandon()
    assert [part async for part in files.read(complete.file_id)] == [b"x"]


async def test_old_files_are_swept(database: SqliteDatabase, files: FileStore) -> None:
    old, new = await upload(files, b"x"), await upload(files, b"y")
    async with database.transaction() as transaction:
        await transaction.execute("UPDATE files SET expires_at = 1 WHERE id = $1", old)
    assert await files.sweep() == 1
    assert await files.sweep() == 0
    assert [part async for part in files.read(old)] == []
    assert [part async for part in files.read(new)] == [b"y"]


async def test_a_transaction_that_is_cancelled_while_it_begins_is_not_left_open(
    database: SqliteDatabase, tmp_path: Path
) -> None:
    async def write() -> None:
        async with database.transaction() as transaction:
            await transaction.execute("UPDATE leases SET expires_at = 0")

    other = sqlite3.connect(tmp_path / "batches.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    task = asyncio.create_task(write())
    # Sleep: until the thread waits for the lock of the file; it has no other sign.
    await asyncio.sleep(0.1)
    task.cancel()
    other.execute("ROLLBACK")
    with pytest.raises(asyncio.CancelledError):
        await task
    await write()
    other.execute("BEGIN IMMEDIATE")
    other.close()


async def test_files_are_listed_in_pages(files: FileStore) -> None:
    ids = [await upload(files, b"x") for _ in range(3)]
    page, has_more = await files.page("acme", "", 2, "", ascending=False)
    assert ([file.id for file in page], has_more) == ([ids[2], ids[1]], True)
    page, has_more = await files.page("acme", "", 2, ids[1], ascending=False)
    assert ([file.id for file in page], has_more) == ([ids[0]], False)
    assert await files.page("acme", "batch_output", 2, "", ascending=True) == ([], False)


async def test_a_line_has_the_first_of_its_results_and_is_counted_once(
    database: SqliteDatabase, batches: BatchStore
) -> None:
    batch = await begin(database, batches, 3)
    for rows in (
        [(1, Result(False, b"one\n"))],
        [(1, Result(True, b"no\n")), (2, Result(True, b"e\n"))],
    ):
        async with database.transaction() as transaction:
            await batches.put_results(transaction, batch.id, rows)
    found = await batches.get("acme", batch.id)
    assert (found.completed, found.failed, found.total) == (1, 1, 3)
    assert await batches.results(batch.id, 0, 9, is_error=False) == [(1, b"one\n")]
    assert [line.number for line in await batches.next_lines(batch.id, -1, 9)] == [3]


async def test_lines_are_read_in_the_order_of_sending(
    database: SqliteDatabase, batches: BatchStore
) -> None:
    batch = await begin(database, batches, 4)
    first = await batches.next_lines(batch.id, -1, 2)
    rest = await batches.next_lines(batch.id, first[-1].position, 9)
    assert [line.number for line in (*first, *rest)] == [4, 3, 2, 1]


async def test_one_service_has_the_lease_and_another_takes_it_once_it_has_expired(
    database: SqliteDatabase,
) -> None:
    first, second = lease_of(database, "1", 0.05), lease_of(database, "2")
    assert await first.acquire()
    fence = first.fence
    await until(second.acquire, "the lease has expired")
    assert second.fence == fence + 1
    assert not first.is_held
    with pytest.raises(LeaseLost):
        await first.renew()
    assert not await first.acquire()
    assert await second.holder() == ("2", second.fence)


async def test_a_service_without_the_lease_writes_nothing(
    database: SqliteDatabase, batches: BatchStore
) -> None:
    batch = await begin(database, batches, 1)
    first, second = lease_of(database, "1"), lease_of(database, "2")
    assert await first.acquire()
    await expire_lease(database)
    assert await second.acquire()
    with pytest.raises(LeaseLost):
        await write(database, batches, first, batch)
    assert await batches.results(batch.id, 0, 9, is_error=False) == []
    assert (await batches.get("acme", batch.id)).completed == 0


async def test_a_released_lease_is_free_at_once(database: SqliteDatabase) -> None:
    first, second = lease_of(database, "1"), lease_of(database, "2")
    assert await first.acquire()
    assert not await second.acquire()
    await first.release()
    assert await second.acquire()


async def test_a_tenant_has_so_many_batches_and_lines(
    database: SqliteDatabase, batches: BatchStore
) -> None:
    await begin(database, batches, 3)
    batch = await new_batch(batches)
    async with database.transaction() as transaction:
        (error,) = await batches.begin(transaction, batch, 3)
    assert error.code == "token_limit_exceeded"
    with pytest.raises(Overloaded, match="the limit is 2"):
        await new_batch(batches)


async def test_a_batch_is_cancelled_until_it_has_ended(
    database: SqliteDatabase, batches: BatchStore
) -> None:
    batch = await begin(database, batches, 1)
    assert (await batches.cancel("acme", batch.id)).status is Status.CANCELLING
    batch = await batches.get("acme", batch.id)
    async with database.transaction() as transaction:
        assert await batches.finalize(transaction, batch, Status.CANCELLED)
        await batches.end(transaction, batch, Status.CANCELLED, {})
    ended = await batches.get("acme", batch.id)
    assert ended.status is Status.CANCELLED
    assert ended.times["cancelled_at"] >= ended.times["cancelling_at"] > 0
    assert (await batches.cancel("acme", batch.id)).status is Status.CANCELLED
    with pytest.raises(NotFound):
        await batches.cancel("other", batch.id)


async def test_a_batch_that_is_cancelled_while_its_files_are_written_is_cancelled(
    database: SqliteDatabase, batches: BatchStore
) -> None:
    batch = await begin(database, batches, 1)
    async with database.transaction() as transaction:
        assert await batches.finalize(transaction, batch, Status.COMPLETED)
    await batches.cancel("acme", batch.id)
    async with database.transaction() as transaction:
        await batches.end(transaction, batch, Status.COMPLETED, {})
    assert (await batches.get("acme", batch.id)).status is Status.CANCELLED


async def test_the_input_of_a_batch_cannot_be_deleted_before_its_end(
    files: FileStore, batches: BatchStore
) -> None:
    file_id = await upload(files, b"x")
    batch = await batches.create(OWNER, file_id, "/v1/completions", "24h", {}, 0)
    with pytest.raises(Conflict, match=batch.id):
        await files.delete("acme", file_id)


async def test_a_caller_that_is_cancelled_leaves_no_transaction_open(
    database: SqliteDatabase, batches: BatchStore
) -> None:
    for turns in range(6):
        task = asyncio.create_task(new_batch(BatchStore(database, LIMITS)))
        for _ in range(turns):
            # Sleep: one turn of the loop, so that each step of the transaction is cancelled.
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with database.transaction() as transaction:
            await transaction.execute("DELETE FROM batches")
    assert await batches.newest(9) == []


class NulRefusingDatabase(SqliteDatabase):
    """Fails, as PostgreSQL does, for a text with NUL."""

    async def fetch(self, sql: str, *values: object) -> Sequence[Row]:
        assert not any(isinstance(one, str) and "\0" in one for one in values)
        return await super().fetch(sql, *values)


async def test_an_id_with_nul_is_that_of_no_file_and_no_batch(tmp_path: Path) -> None:
    database = NulRefusingDatabase(tmp_path / "batches.db")
    await database.open()
    try:
        await create_tables(database)
        files, batches = FileStore(database, LIMITS, DAY_S), BatchStore(database, LIMITS)
        with pytest.raises(NotFound):
            await files.get("acme", "file-\0")
        with pytest.raises(NotFound):
            await files.page("acme", "", 10, "file-\0", ascending=False)
        with pytest.raises(NotFound):
            await files.delete("acme", "file-\0")
        with pytest.raises(NotFound):
            await batches.get("acme", "batch_\0")
        with pytest.raises(NotFound):
            await batches.cancel("acme", "batch_\0")
    finally:
        await database.close()
