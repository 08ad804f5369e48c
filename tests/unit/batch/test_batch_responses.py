"""Stored responses and conversations in the database, and the choice of what runs next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from batch_svc.core.batch import Owner
from batch_svc.core.conversations import ConversationLimits, ItemRow
from batch_svc.core.responses import (
    OpenResponse,
    ResponseLimits,
    ResponseRow,
    ResponseRun,
    ResponseStatus,
    ended_response,
    next_to_run,
)
from batch_svc.core.results import Reply
from batch_svc.store.conversations import ConversationStore
from batch_svc.store.lease import LeaseLost, RunnerLease
from batch_svc.store.responses import StoredResponses
from batch_svc.store.schema import create_tables
from batch_svc.store.sqlite import SqliteDatabase
from common.conversation_append import NO_CONVERSATION, Append
from common.errors import InvalidRequest, NotFound, Overloaded

OWNER = Owner("acme", "key1")
LIMITS = ResponseLimits(response_bytes=300, tenant_bytes=500, keep_s=60.0, tenant_background=2)
QUEUED = orjson.dumps({"id": "r", "status": "queued", "output": []})


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    opened = SqliteDatabase(tmp_path / "batches.db")
    await opened.open()
    await create_tables(opened)
    yield opened
    await opened.close()


@pytest.fixture
def conversations(database: SqliteDatabase) -> ConversationStore:
    return ConversationStore(database, ConversationLimits(items=4, tenant_conversations=2))


@pytest.fixture
def responses(database: SqliteDatabase, conversations: ConversationStore) -> StoredResponses:
    return StoredResponses(database, LIMITS, conversations)


def lease_of(database: SqliteDatabase, name: str) -> RunnerLease:
    return RunnerLease(database, name, 60.0, asyncio.get_running_loop().time)


def row(response_id: str, size: int = 100) -> ResponseRow:
    return ResponseRow(response_id, b"x" * (size - 1), ())


def run(response_id: str, owner: Owner = OWNER, append: Append = NO_CONVERSATION) -> ResponseRun:
    return ResponseRun(owner, ResponseRow(response_id, QUEUED, (b'{"id":"i"}',)), b"{}", 7, append)


async def test_a_response_is_read_and_deleted_by_its_tenant_only(
    responses: StoredResponses,
) -> None:
    stored = ResponseRow("r", b'{"output":[]}', (b'{"a":1}', b'{"b":"\\n"}'))
    await responses.put(OWNER, stored)
    await responses.put(OWNER, stored)
    assert await responses.get("acme", "r") == stored
    for call in (responses.get, responses.delete):
        with pytest.raises(NotFound):
            await call("bravo", "r")
    await responses.delete("acme", "r")
    with pytest.raises(NotFound, match="deleted"):
        await responses.get("acme", "r")


async def test_the_oldest_responses_of_a_full_tenant_are_removed(
    responses: StoredResponses,
) -> None:
    await responses.put(Owner("bravo"), row("other", 300))
    for number in range(7):
        await responses.put(OWNER, row(f"r{number}"))
    for number in range(7):
        if number < 2:
            with pytest.raises(NotFound, match="too many"):
                await responses.get("acme", f"r{number}")
        else:
            await responses.get("acme", f"r{number}")
    await responses.get("bravo", "other")
    with pytest.raises(InvalidRequest, match="301 bytes"):
        await responses.put(OWNER, row("large", 302))


async def test_expired_responses_are_swept(
    database: SqliteDatabase, responses: StoredResponses
) -> None:
    for number in range(3):
        await responses.put(OWNER, row(f"r{number}"))
    async with database.transaction() as transaction:
        await transaction.execute("UPDATE responses SET expires_at = 0 WHERE id <> 'r2'")
    with pytest.raises(NotFound):
        await responses.get("acme", "r0")
    assert [await responses.sweep(), await responses.sweep()] == [2, 0]
    assert await database.fetch("SELECT bytes FROM stored_bytes") == [(99,)]


async def test_a_response_in_the_background_ends_once(
    database: SqliteDatabase, responses: StoredResponses
) -> None:
    for response_id in ("a", "b"):
        await responses.start(run(response_id))
    with pytest.raises(Overloaded, match="the limit is 2"):
        await responses.start(run("c"))
    await responses.start(run("d", Owner("bravo")))
    assert [one.id for one in await responses.open_responses()] == ["a", "b", "d"]
    lease = lease_of(database, "one")
    assert await lease.acquire()
    async with lease.transaction() as transaction:
        begun = await responses.begin(transaction, "a")
    assert begun == run("a")
    assert orjson.loads((await responses.get("acme", "a")).response)["status"] == "in_progress"
    done = b'{"status":"completed","output":[]}'
    async with lease.transaction() as transaction:
        assert await responses.finish(transaction, begun, ResponseStatus.COMPLETED, done)
        assert not await responses.finish(transaction, begun, ResponseStatus.FAILED, b"{}")
        assert await responses.begin(transaction, "a") is None
    assert (await responses.cancel("acme", "a")).response == done
    cancelled = orjson.loads((await responses.cancel("acme", "b")).response)
    assert (cancelled["id"], cancelled["status"]) == ("r", "cancelled")
    async with lease.transaction() as transaction:
        assert await responses.begin(transaction, "b") is None
    await responses.put(OWNER, row("foreground"))
    with pytest.raises(InvalidRequest, match="background"):
        await responses.cancel("acme", "foreground")
    with pytest.raises(NotFound):
        await responses.cancel("bravo", "a")


async def test_a_request_counts_for_its_tenant_until_its_response_ends(
    database: SqliteDatabase, responses: StoredResponses
) -> None:
    async def counted() -> int:
        (stored,), (rows,) = (
            await database.fetch("SELECT bytes FROM stored_bytes"),
            await database.fetch("SELECT SUM(size) FROM responses"),
        )
        assert stored[0] == rows[0]
        return int(stored[0])

    runs = [replace(run(name), request=b"x" * 200) for name in ("a", "b")]
    for one in runs:
        await responses.start(one)
    before = runs[0].row.size
    assert await counted() == 2 * (before + 200)
    for name in ("foreground", "newer"):
        await responses.put(OWNER, row(name))
    with pytest.raises(NotFound, match="too many"):
        await responses.get("acme", "foreground")
    await responses.delete("acme", "newer")
    await responses.cancel("acme", "a")
    assert await counted() == 2 * before + 200
    lease = lease_of(database, "one")
    assert await lease.acquire()
    async with lease.transaction() as transaction:
        begun = await responses.begin(transaction, "b")
        assert begun == runs[1]
        done = b'{"status":"completed","output":[]}'
        assert await responses.finish(transaction, begun, ResponseStatus.COMPLETED, done)
    ended = replace(runs[1].row, response=done)
    assert await counted() == before + ended.size
    for name in ("a", "b"):
        await responses.cancel("acme", name)
        await responses.delete("acme", name)
    assert await database.fetch("SELECT bytes FROM stored_bytes") == [(0,)]


class RecordingDatabase(SqliteDatabase):
    """Keeps the statements of each transaction."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.transactions: list[list[str]] = []

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with super().transaction() as transaction:
            statements: list[str] = []
            self.transactions.append(statements)
            execute = transaction.execute

            async def recorded(sql: str, *values: object) -> int:
                statements.append(sql)
                return await execute(sql, *values)

            # Any: a method of one transaction.
            cast(Any, transaction).execute = recorded
            yield transaction


async def test_writes_lock_the_bytes_of_a_tenant_first(tmp_path: Path) -> None:
    database = RecordingDatabase(tmp_path / "batches.db")
    await database.open()
    await create_tables(database)
    conversations = ConversationStore(database, ConversationLimits())
    responses = StoredResponses(database, LIMITS, conversations)
    created = await conversations.create("acme", {}, [])
    database.transactions.clear()
    await responses.start(run("a"))
    await responses.cancel("acme", "a")
    await responses.delete("acme", "a")
    done = ResponseRow("b", b'{"output":[]}', ())
    await responses.put(OWNER, done, Append(created.id), only_appends=True)
    for tenant in ("acme", "bravo"):
        await responses.put(Owner(tenant), ResponseRow(f"c{tenant}", b"{}", ()))
    async with database.transaction() as transaction:
        await transaction.execute("UPDATE responses SET expires_at = 0")
    database.transactions.pop()
    assert await responses.sweep() == 2
    assert len(database.transactions) == 8, "a sweep has a transaction for each tenant"
    for statements in database.transactions:
        assert statements[0].startswith("UPDATE stored_bytes")
    await database.close()


async def test_a_former_runner_ends_no_response(
    database: SqliteDatabase, responses: StoredResponses
) -> None:
    await responses.start(run("a"))
    first, second = lease_of(database, "one"), lease_of(database, "two")
    assert await first.acquire()
    async with first.transaction() as transaction:
        begun = await responses.begin(transaction, "a")
    assert begun is not None
    async with database.transaction() as transaction:
        await transaction.execute("UPDATE leases SET expires_at = 0")
    assert await second.acquire()
    with pytest.raises(LeaseLost):
        async with first.transaction() as transaction:
            await responses.finish(transaction, begun, ResponseStatus.COMPLETED, QUEUED)
    assert [one.id for one in await responses.open_responses()] == ["a"]


async def test_a_response_appends_its_items_in_the_same_commit(
    responses: StoredResponses, conversations: ConversationStore, database: SqliteDatabase
) -> None:
    created = await conversations.create("acme", {}, [ItemRow("first", b'{"id":"first"}')])
    output = b'{"status":"completed","output":[{"id":"o"}]}'
    stored = ResponseRow("r", output, (b'{"id":"first"}', b'{"id":"i"}'))
    append = Append(created.id, 1)
    assert await responses.put(OWNER, stored, append)
    assert await responses.put(OWNER, stored, append), "a repeated call appends nothing"
    items = await conversations.read("acme", created.id)
    assert [item.id for item in items] == ["first", "i", "o"]
    lease = lease_of(database, "one")
    assert await lease.acquire()
    await responses.start(run("b", append=Append(created.id, 0)))
    async with lease.transaction() as transaction:
        begun = await responses.begin(transaction, "b")
        assert begun is not None
        await responses.finish(transaction, begun, ResponseStatus.COMPLETED, output)
    page, has_more = await conversations.page("acme", created.id, 3, "", ascending=False)
    assert has_more
    assert [page[0].id[:2], page[1].id[:2], page[2].id] == ["o_", "i_", "o"]
    with pytest.raises(InvalidRequest, match="the limit is 4") as full:
        await conversations.read("acme", created.id)
    assert full.value.field == "conversation"
    await conversations.delete("acme", created.id)
    other = ResponseRow("other", output, ())
    assert not await responses.put(OWNER, other, Append(created.id), only_appends=True)
    with pytest.raises(NotFound):
        await responses.get("acme", "other")


async def test_items_are_removed_and_limits_hold(conversations: ConversationStore) -> None:
    items = [ItemRow(f"i{number}", b"{}") for number in range(4)]
    created = await conversations.create("acme", {"a": "b"}, items)
    with pytest.raises(InvalidRequest, match="5 items"):
        await conversations.add("acme", created.id, [ItemRow("i4", b"{}")])
    assert await conversations.delete_item("acme", created.id, "i1") == created
    await conversations.add("acme", created.id, [ItemRow("i4", b"{}")])
    page, has_more = await conversations.page("acme", created.id, 2, "i0", ascending=True)
    assert ([item.id for item in page], has_more) == (["i2", "i3"], True)
    with pytest.raises(NotFound):
        await conversations.item("acme", created.id, "i1")
    for tenant, conversation_id in (("bravo", created.id), ("acme", "conv_0")):
        with pytest.raises(NotFound):
            await conversations.read(tenant, conversation_id)
    await conversations.create("acme", {}, [])
    with pytest.raises(Overloaded, match="the limit is 2"):
        await conversations.create("acme", {}, [])
    await conversations.create("bravo", {}, [])


async def test_an_item_with_the_id_of_another_one_gets_a_new_one(
    conversations: ConversationStore, database: SqliteDatabase
) -> None:
    items = [ItemRow("msg_1", b'{"id":"msg_1","a":1}'), ItemRow("msg_2", b'{"id":"msg_2"}')]
    created = await conversations.create("acme", {}, items)
    same = [ItemRow("msg_1", b'{"id":"msg_1","a":2}'), ItemRow("b", b'{"id":"b"}')]
    async with database.transaction() as transaction:
        assert await conversations.append(transaction, "acme", created.id, same)
    page, _ = await conversations.page("acme", created.id, 9, "", ascending=True)
    ids = [item.id for item in page]
    assert (ids[:2], ids[2][:4], ids[3]) == (["msg_1", "msg_2"], "msg_", "b")
    assert len(set(ids)) == 4
    assert orjson.loads(page[2].content) == {"id": ids[2], "a": 2}
    assert (await conversations.item("acme", created.id, "msg_1")).content == items[0].content
    size = sum(len(item.content) for item in page)
    assert await database.fetch("SELECT bytes FROM conversations") == [(size,)]
    for item in page:
        await conversations.delete_item("acme", created.id, item.id)
    assert await database.fetch("SELECT items, bytes FROM conversations") == [(0, 0)]


async def test_an_item_that_a_client_adds_has_an_id_of_its_own(
    conversations: ConversationStore,
) -> None:
    items = [ItemRow("msg_1", b'{"id":"msg_1"}'), ItemRow("msg_2", b'{"id":"msg_2"}')]
    created = await conversations.create("acme", {}, items[:1])
    for given, index in ((items[::-1], 1), ([items[1], items[1]], 1), (items, 0)):
        with pytest.raises(InvalidRequest, match="already") as refused:
            await conversations.add("acme", created.id, given)
        assert (refused.value.field, refused.value.reason) == (f"items[{index}].id", "ITEM_EXISTS")
    with pytest.raises(InvalidRequest, match="already"):
        await conversations.create("acme", {}, [items[1], items[1]])
    await conversations.add("acme", created.id, items[1:])
    page, _ = await conversations.page("acme", created.id, 9, "", ascending=True)
    assert [item.id for item in page] == ["msg_1", "msg_2"]


async def test_equal_ids_in_one_call_become_different_ones(
    conversations: ConversationStore, database: SqliteDatabase
) -> None:
    created = await conversations.create("acme", {}, [])
    same = [ItemRow("a", b'{"id":"a"}')] * 2
    async with database.transaction() as transaction:
        assert await conversations.append(transaction, "acme", created.id, same)
    first, second = await conversations.read("acme", created.id)
    assert (first.id, second.id[:2]) == ("a", "a_")


async def test_all_conversations_that_were_not_used_are_swept_at_once(
    database: SqliteDatabase,
) -> None:
    conversations = ConversationStore(database, ConversationLimits(keep_s=60.0))
    for _ in range(130):
        await conversations.create("acme", {}, [])
    async with database.transaction() as transaction:
        await transaction.execute("UPDATE conversations SET used_at = 0")
    await conversations.create("acme", {}, [])
    assert [await conversations.sweep(), await conversations.sweep()] == [130, 0]


def test_the_tenant_with_the_fewest_responses_is_next() -> None:
    waiting = [
        OpenResponse(f"{tenant}{number}", tenant, False)
        for tenant, count in (("a", 4), ("b", 1), ("c", 1))
        for number in range(count)
    ]
    assert [one.id for one in next_to_run(waiting, {"b": 2}, 4)] == ["a0", "c0", "a1", "a2"]
    assert next_to_run(waiting, {}, 0) == []
    assert len(next_to_run(waiting, {}, 99)) == 6


@pytest.mark.parametrize(
    ("status", "body", "expected", "code"),
    [
        (200, b'{"status":"incomplete","output":[]}', ResponseStatus.INCOMPLETE, None),
        (400, b'{"error":{"message":"bad"}}', ResponseStatus.FAILED, "invalid_prompt"),
        (500, b'{"error":{"message":"bad"}}', ResponseStatus.FAILED, "server_error"),
        (502, b"<html>", ResponseStatus.FAILED, "server_error"),
        (200, b"[]", ResponseStatus.FAILED, "server_error"),
    ],
)
def test_the_last_reply_is_the_end_of_a_response(
    status: int, body: bytes, expected: ResponseStatus, code: str | None
) -> None:
    ended, response = ended_response(QUEUED, Reply(status, body, ""))
    value = orjson.loads(response)
    assert (ended, value["status"]) == (expected, str(expected))
    if code is not None:
        assert (value["id"], value["error"]["code"]) == ("r", code)
