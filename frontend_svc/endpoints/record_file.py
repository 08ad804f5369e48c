"""A file of records, one JSON object a line, that never delays its callers."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue

import orjson
import structlog

# Older files that are kept, as `<name>.1` (the newest) to `<name>.4`.
OLDER_FILES_KEPT = 4
QUEUE_BYTES_MAX = 64 << 20
_BATCH_BYTES = 1 << 20

# Builds a record in the thread of its file.
MakeRecord = Callable[[], Mapping[str, object]]

log = structlog.get_logger()


class RecordFile:
    """Appends records to a file in a thread of its own. Records are dropped and counted while
    `queue_bytes_max` are unwritten, and if the disk refuses them. A file that would exceed
    `file_bytes_max` is renamed, and the oldest one is removed. Raises OSError if the file cannot be
    opened."""

    def __init__(
        self, path: Path, file_bytes_max: int, queue_bytes_max: int = QUEUE_BYTES_MAX
    ) -> None:
        self._path = path
        self._file_bytes_max = file_bytes_max
        self._queue_bytes_max = queue_bytes_max
        self._queue: SimpleQueue[tuple[int, MakeRecord] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        # Each is written by one thread.
        self.written = self._overflowed = self._failed = self._reported = 0
        self._open()
        self._thread = threading.Thread(target=self._run, name=path.name, daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        return self._overflowed + self._failed

    def put(self, size: int, make_record: MakeRecord) -> None:
        """Queues one record. size: bytes that it holds, roughly."""
        with self._lock:
            is_full = self._queued_bytes + size > self._queue_bytes_max
            if not is_full:
                self._queued_bytes += size
        if is_full:
            self._overflowed += 1
        else:
            self._queue.put((size, make_record))

    def close(self, timeout_s: float) -> None:
        """Writes what is queued, for at most `timeout_s`."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _open(self) -> None:
        # Records have the text of requests.
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size

    def _run(self) -> None:
        is_open = True
        while is_open:
            lines, queued_bytes = list[bytes](), 0
            while (
                is_open and queued_bytes < _BATCH_BYTES and (not lines or not self._queue.empty())
            ):
                if (item := self._queue.get()) is None:
                    is_open = False
                    continue
                queued_bytes += item[0]
                try:
                    lines.append(orjson.dumps(item[1](), option=orjson.OPT_APPEND_NEWLINE))
                except (TypeError, ValueError) as error:
                    self._fail(1, error)
            if lines:
                self._write(lines)
            with self._lock:
                self._queued_bytes -= queued_bytes
            if (count := self._overflowed - self._reported) > 0:
                self._reported += count
                log.warning("records_dropped", file=str(self._path), records=count, cause="queue")
        os.close(self._fd)

    def _write(self, lines: list[bytes]) -> None:
        data = memoryview(b"".join(lines))
        try:
            if self._size and self._size + len(data) > self._file_bytes_max:
                self._rotate()
            start = self._size
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, start)  # Half a record would spoil the next one.
                raise
            self._size = os.fstat(self._fd).st_size
            self.written += len(lines)
        except OSError as error:
            self._fail(len(lines), error)

    def _rotate(self) -> None:
        for number in range(OLDER_FILES_KEPT, 0, -1):
            older = f"{self._path}.{number - 1}" if number > 1 else self._path
            with contextlib.suppress(FileNotFoundError):
                os.replace(older, f"{self._path}.{number}")
        full_fd = self._fd
        self._open()
        os.close(full_fd)

    def _fail(self, records: int, error: Exception) -> None:
        self._failed += records
        log.warning("records_dropped", file=str(self._path), records=records, cause=str(error))
