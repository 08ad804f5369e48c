"""The validation of a batch: a part of its file at a time, and files that fail."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import orjson
import pytest

from batch_svc.core.batch import BatchRow, Owner, Status
from batch_svc.core.limits import BatchLimits
from batch_svc.core.lines import LineReader
from batch_svc.runner.stages import Stages
from batch_svc.store.batches import BatchStore
from batch_svc.store.files import FileStore, Upload
from batch_svc.store.lease import RunnerLease
from batch_svc.store.schema import create_tables
from batch_svc.store.sqlite import SqliteDatabase

LIMITS = BatchLimits(file_bytes=8 << 20, tenant_bytes=8 << 20, tenant_batches=4, tenant_lines=5000)
ENDPOINT = "/v1/completions"


class Parts(NamedTuple):
    stages: Stages
    files: FileStore
    batches: BatchStore
    database: SqliteDatabase


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    database = SqliteDatabase(tmp_path / "batches.db")
    await database.open()
    await create_tables(database)
    files, batches = FileStore(database, LIMITS, 60.0), BatchStore(database, LIMITS)
    lease = RunnerLease(database, "1", 60.0, asyncio.get_running_loop().time)
    assert await lease.acquire()
    stages = Stages(files, batches, lease, LIMITS, keep_s=60.0, in_prefix_order=True)
    yield Parts(stages, files, batches, database)
    await database.close()


def content(lines: int, **changes: object) -> bytes:
    """The lines of a file; prompts with an odd number begin alike, and the even ones too."""
    body = {"model": "sim", "max_tokens": 1}
    rows: list[dict[str, object]] = [
        {
            "custom_id": f"c{n}",
            "method": "POST",
            "url": ENDPOINT,
            "body": {**body, "prompt": ("odd " if n % 2 else "even ") * 400 + str(n)},
        }
        for n in range(lines)
    ]
    rows[-1] |= changes
    return b"\n".join(orjson.dumps(row) for row in rows)


async def validated(parts: Parts, raw: bytes) -> BatchRow:
    """Returns a batch after its validation."""
    upload = Upload(parts.files)
    await upload.add(raw)
    file = await upload.finish("acme", "lines.jsonl", "batch", 0)
    created = await parts.batches.create(Owner("acme", "k"), file.id, ENDPOINT, "24h", {}, 0)
    await parts.stages.validate(created)
    return await parts.batches.get("acme", created.id)


async def test_a_file_of_several_parts_is_stored_in_the_order_of_its_prompts(parts: Parts) -> None:
    raw = content(1500)
    assert len(raw) > 2 << 20
    batch = await validated(parts, raw)
    assert (batch.status, batch.total) == (Status.IN_PROGRESS, 1500)
    lines = await parts.batches.next_lines(batch.id, -1, 2000)
    assert sorted(line.number for line in lines) == list(range(1, 1501))
    groups = [b"odd" in line.body for line in lines]
    assert sum(a != b for a, b in itertools.pairwise(groups)) == 1


async def test_a_batch_whose_validation_was_interrupted_is_validated_again(parts: Parts) -> None:
    upload = Upload(parts.files)
    await upload.add(content(3))
    file = await upload.finish("acme", "lines.jsonl", "batch", 0)
    batch = await parts.batches.create(Owner("acme", "k"), file.id, ENDPOINT, "24h", {}, 0)
    await parts.stages._store(batch, {1: 7, 2: 8, 3: 9})
    await parts.stages.validate(batch)
    lines = await parts.batches.next_lines(batch.id, -1, 9)
    assert sorted(line.position for line in lines) == [0, 1, 2]


async def test_an_invalid_line_fails_the_batch_and_leaves_no_line(parts: Parts) -> None:
    batch = await validated(parts, content(3, method="GET"))
    assert (batch.status, batch.errors[0]["code"]) == (Status.FAILED, "invalid_method")
    assert not await parts.database.fetch("SELECT number FROM lines")


async def test_a_defect_in_the_validation_fails_that_batch_only(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(reader: LineReader, part: bytes) -> None:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(LineReader, "feed", broken)
        batch = await validated(parts, content(2))
    assert (batch.status, batch.errors[0]["code"]) == (Status.FAILED, "internal_error")
    assert (await validated(parts, content(2))).status is Status.IN_PROGRESS
