"""Output of responses as it is generated: what a second run adds, and that it is stored once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from batch_svc.core.batch import Owner
from batch_svc.core.conversations import ConversationLimits
from batch_svc.core.responses import ResponseLimits, ResponseRow, ResponseRun, ResponseStatus
from batch_svc.core.streams import Addition, RepeatedOutput, StoredOutput, merged
from batch_svc.runner.streams import OutputSignals, OutputWriter, RunOutput
from batch_svc.store.conversations import ConversationStore
from batch_svc.store.lease import RunnerLease
from batch_svc.store.responses import StoredResponses
from batch_svc.store.schema import create_tables
from batch_svc.store.sqlite import SqliteDatabase
from common.errors import InvalidRequest, NotFound

OWNER = Owner("acme", "key")
CALL = ["call", 0, "f", "call_1"]


# Any: JSON.
def lines(*deltas: list[Any]) -> bytes:
    return b"".join(orjson.dumps(delta) + b"\n" for delta in deltas)


def words(*texts: str) -> bytes:
    return lines(*(["content", text] for text in texts))


def content(addition: Addition | None) -> list[Any]:
    assert addition is not None
    return [orjson.loads(line) for line in addition.deltas.splitlines()]


STORED = StoredOutput(2, [lines(["reasoning", "Hm"]), lines(CALL, ["arguments", 0, "{"])])
SIZE = sum(map(len, STORED.parts))


def test_a_first_run_adds_all_of_its_output() -> None:
    output = RepeatedOutput(StoredOutput())
    assert output.feed(words("a")) == Addition(0, 0, words("a"))
    assert output.feed(words("b")) == Addition(0, len(words("a")), words("b"))
    assert output.end() is None


def test_a_run_that_repeats_the_one_before_adds_what_is_new_whatever_its_pieces() -> None:
    output = RepeatedOutput(STORED)
    assert output.feed(lines(["reasoning", "H"], ["reasoning", ""])) is None
    assert output.feed(lines(["reasoning", "m"], CALL)) is None
    assert output.feed(lines(["arguments", 0, "{}"], ["content", "x"])) == Addition(
        2, SIZE, lines(["arguments", 0, "}"], ["content", "x"])
    )
    added = lines(["arguments", 0, "}"], ["content", "x"])
    assert output.feed(words("y")) == Addition(2, SIZE + len(added), words("y"))


@pytest.mark.parametrize(
    "other",
    [
        ["reasoning", "Ha"],
        ["content", "Hm"],
        ["call", 0, "f", "call_2"],
    ],
)
def test_a_run_that_differs_replaces_the_one_before(other: list[Any]) -> None:
    output = RepeatedOutput(STORED)
    assert output.feed(lines(["reasoning", "H"])) is None
    replaced = output.feed(lines(["reasoning", "m"], other, ["content", "x"]))
    assert replaced is not None
    assert (replaced.run, replaced.offset) == (3, 0)
    expected = [["reasoning", "H"], ["reasoning", "m"], other, ["content", "x"]]
    assert content(replaced) == expected
    assert output.feed(words("y")) == Addition(3, len(replaced.deltas), words("y"))
    assert output.end() is None


def test_a_run_that_ends_earlier_replaces_the_one_before() -> None:
    output = RepeatedOutput(STORED)
    assert output.feed(lines(["reasoning", "Hm"])) is None
    assert content(output.end()) == [["reasoning", "Hm"]]


def test_additions_of_one_run_are_written_together() -> None:
    found = [Addition(0, 0, b"a\n"), Addition(0, 2, b"b\n"), Addition(1, 0, b"c\n")]
    assert merged(found) == [Addition(0, 0, b"a\nb\n"), Addition(1, 0, b"c\n")]


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    database = SqliteDatabase(tmp_path / "batches.db")
    await database.open()
    await create_tables(database)
    yield database
    await database.close()


@pytest.fixture
def responses(database: SqliteDatabase) -> StoredResponses:
    limits = ResponseLimits(response_bytes=10_000)
    return StoredResponses(database, limits, ConversationStore(database, ConversationLimits()))


async def started(responses: StoredResponses, response_id: str = "resp_1") -> ResponseRun:
    row = ResponseRow(response_id, b'{"status":"queued","output":[]}', ())
    run = ResponseRun(OWNER, row, b"{}", 7, output=StoredOutput())
    await responses.start(run)
    return run


async def read(responses: StoredResponses, run: int = 0, first: int = 0) -> StoredOutput:
    return (await responses.read_stream("acme", "resp_1", run, first)).output


async def test_output_whose_write_is_repeated_is_stored_once(
    database: SqliteDatabase, responses: StoredResponses
) -> None:
    await started(responses)
    written = [Addition(0, 0, words("a")), Addition(0, len(words("a")), words("b"))]
    for additions in (written[:1], merged(written), merged(written)):
        async with database.transaction() as transaction:
            for addition in additions:
                await responses.add_output(transaction, "resp_1", addition)
    assert await read(responses) == StoredOutput(0, [words("a"), words("b")])
    assert await read(responses, 0, 1) == StoredOutput(0, [words("b")])
    async with database.transaction() as transaction:
        await responses.add_output(transaction, "resp_1", Addition(1, 0, words("c")))
    assert await read(responses, 0, 2) == StoredOutput(1, [words("c")])


async def test_output_counts_for_the_tenant_and_is_removed_with_its_response(
    database: SqliteDatabase, responses: StoredResponses
) -> None:
    run = await started(responses)
    async with database.transaction() as transaction:
        await responses.add_output(transaction, "resp_1", Addition(0, 0, words("a")))
        await responses.finish(transaction, run, ResponseStatus.COMPLETED, b'{"output":[]}')
        # It has ended.
        late = Addition(0, len(words("a")), words("b"))
        await responses.add_output(transaction, "resp_1", late)
    assert await read(responses) == StoredOutput(0, [words("a")])
    ((size,),) = await database.fetch("SELECT bytes FROM stored_bytes")
    assert size == len(b'{"output":[]}') + len(words("a"))
    await responses.delete("acme", "resp_1")
    with pytest.raises(NotFound):
        await read(responses)
    for table in ("response_streams", "response_parts"):
        assert not await database.fetch(f"SELECT * FROM {table}")


async def test_a_response_without_a_stream_has_none(responses: StoredResponses) -> None:
    await responses.put(OWNER, ResponseRow("resp_1", b"{}", ()))
    with pytest.raises(InvalidRequest, match="'background' and 'stream'"):
        await read(responses)


async def test_a_request_above_the_limit_of_a_response_is_refused(
    responses: StoredResponses,
) -> None:
    row = ResponseRow("resp_1", b"{}", ())
    with pytest.raises(InvalidRequest, match="10003 bytes"):
        await responses.start(ResponseRun(OWNER, row, b"x" * 10_001, 7))


async def test_readers_are_woken_when_output_is_stored(
    database: SqliteDatabase, responses: StoredResponses
) -> None:
    run = await started(responses)
    lease = RunnerLease(database, "one", 10.0, asyncio.get_running_loop().time)
    assert await lease.acquire()
    signals = OutputSignals()
    writer = OutputWriter(responses, lease, signals)
    writing = asyncio.create_task(writer.run())
    assert run.output is not None
    output = RunOutput(writer, "resp_1", run.output)
    with signals.awaited("resp_1") as signal:
        output.feed(words("a"))
        await signal.wait()
    assert await read(responses) == StoredOutput(0, [words("a")])
    output.feed(words("b"))
    writer.drop("resp_1")
    output.feed(words("c"))
    async with writer.lock, lease.transaction() as transaction:
        await writer.write(transaction, "resp_1")
    assert await read(responses) == StoredOutput(0, [words("a")]), "no gap is stored"
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
