"""The stages of a batch before and after its lines run: validation, and its files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Final

import structlog

from batch_svc.core.batch import BatchRow, Status, StoredFile
from batch_svc.core.limits import OUTPUT_PURPOSE, BatchLimits
from batch_svc.core.lines import Line, LineError, LineReader
from batch_svc.core.results import Result, error_row
from batch_svc.store.batches import BatchStore
from batch_svc.store.files import CHUNK_BYTES, FileStore, insert_output
from batch_svc.store.lease import RunnerLease
from common.errors import MeshError

LOG = structlog.get_logger(__name__)

_PAGE_ROWS: Final = 500
_EXPIRED: Final = "batch_expired"
_EXPIRED_TEXT: Final = "the line was not run before the completion window ended"


class Stages:
    """Changes the state of batches under the lease. Methods raise LeaseLost and Unavailable; then
    the next runner repeats the stage."""

    def __init__(
        self,
        files: FileStore,
        batches: BatchStore,
        lease: RunnerLease,
        limits: BatchLimits,
        *,
        keep_s: float,
        in_prefix_order: bool,
    ) -> None:
        """
        - keep_s: after which files of results are removed, unless the batch has a time of its own.
        """
        self._files = files
        self._batches = batches
        self._lease = lease
        self._limits = limits
        self._keep_s = keep_s
        self._in_prefix_order = in_prefix_order

    async def validate(self, batch: BatchRow) -> None:
        """Reads the input file: the batch is in progress or failed then.

        The file is read twice, first to check it and to sort its lines, then to store them: a part
        of it is in memory at a time, and a transaction is as long as one part.
        """
        try:
            positions, errors = await self._check(batch)
            if not errors:
                await self._store(batch, positions)
        except MeshError:
            raise
        except Exception:
            LOG.exception("batch_not_validated", batch=batch.id)
            positions, errors = {}, [LineError("internal_error", "the file could not be read")]
        async with self._lease.transaction() as transaction:
            errors = errors or await self._batches.begin(transaction, batch, len(positions))
            if errors:
                await self._batches.fail(transaction, batch, errors)
        LOG.info("batch_validated", batch=batch.id, lines=len(positions), errors=len(errors))

    async def _check(self, batch: BatchRow) -> tuple[dict[int, int], list[LineError]]:
        """Returns the positions of the lines by number, in the order of sending, and errors."""
        reader = LineReader(batch.endpoint, self._limits.lines)
        order: list[tuple[bytes, int]] = []
        async for lines in self._read(batch, reader):
            order += [(line.prefix, line.number) for line in lines]
        if self._in_prefix_order:
            order.sort()
        return {number: i for i, (_, number) in enumerate(order)}, reader.errors

    async def _store(self, batch: BatchRow, positions: Mapping[int, int]) -> None:
        async for lines in self._read(batch, LineReader(batch.endpoint, self._limits.lines)):
            async with self._lease.transaction() as transaction:
                await self._batches.put_lines(transaction, batch.id, lines, positions)

    async def _read(self, batch: BatchRow, reader: LineReader) -> AsyncIterator[list[Line]]:
        """Yields the lines of the input file by parts."""
        is_there = False
        async for part in self._files.read(batch.input_file_id):
            is_there = True
            yield await asyncio.to_thread(reader.feed, part)
            if reader.is_done:
                return
        if is_there:
            yield await asyncio.to_thread(reader.end)
        else:
            reader.errors.append(LineError("file_not_found", "the input file was removed"))

    async def finish(self, batch: BatchRow, ends_as: Status) -> None:
        """Writes the files of a batch whose lines do not run any more, and ends it."""
        async with self._lease.transaction() as transaction:
            if not await self._batches.finalize(transaction, batch, ends_as):
                return
        if ends_as is Status.EXPIRED:
            await self._expire_lines(batch)
        files = {}
        for column, is_error in (("output_file_id", False), ("error_file_id", True)):
            if (written := await self._write_file(batch, is_error=is_error)) is not None:
                files[column] = written
        async with self._lease.transaction() as transaction:
            await self._batches.end(transaction, batch, ends_as, files)
        LOG.info("batch_ended", batch=batch.id, status=str(ends_as))

    async def _expire_lines(self, batch: BatchRow) -> None:
        """Gives each line without a result the error of the window."""
        # Ends: each round removes lines from those without a result.
        while lines := await self._batches.next_lines(batch.id, -1, _PAGE_ROWS):
            results = []
            for line in lines:
                row = error_row(
                    line_id(batch.id, line.number), line.custom_id, _EXPIRED, _EXPIRED_TEXT
                )
                results.append((line.number, Result(True, row)))
            async with self._lease.transaction() as transaction:
                await self._batches.put_results(transaction, batch.id, results)

    async def _write_file(self, batch: BatchRow, *, is_error: bool) -> tuple[str, int] | None:
        """Writes the rows of one kind, in the order of the input file, to a file that `end` makes
        visible; returns its id and size. None: there are none."""
        kind, now_s = "error" if is_error else "output", time.time()
        file = StoredFile(
            # The same at each try, which replaces what a try before has written.
            f"file-{batch.id.removeprefix('batch_')}{kind[0]}",
            f"{batch.id}_{kind}.jsonl",
            OUTPUT_PURPOSE,
            0,
            now_s,
            now_s + (batch.output_expires_s or self._keep_s),
        )
        chunks = size = 0
        buffer = bytearray()
        async for row in self._rows(batch.id, is_error=is_error):
            buffer += row
            size += len(row)
            if len(buffer) >= CHUNK_BYTES:
                await self._put(file, batch.owner.tenant, bytes(buffer), chunks)
                chunks += 1
                buffer.clear()
        if buffer:
            await self._put(file, batch.owner.tenant, bytes(buffer), chunks)
        return (file.id, size) if size else None

    async def _rows(self, batch_id: str, *, is_error: bool) -> AsyncIterator[bytes]:
        number = 0
        # Ends: pages advance through the lines of the batch.
        while page := await self._batches.results(batch_id, number, _PAGE_ROWS, is_error=is_error):
            for _, row in page:
                yield row
            number = page[-1][0]

    async def _put(self, file: StoredFile, tenant: str, content: bytes, number: int) -> None:
        async with self._lease.transaction() as transaction:
            await insert_output(transaction, file, tenant, [content], number)


def line_id(batch_id: str, number: int) -> str:
    """Returns the id of a line in its row and in the x-request-id of its request."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
