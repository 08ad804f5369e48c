"""The records of use: sums by hour in a file of SQLite.

A thread writes what has ended since its last write, in one transaction; a killed process loses only
that. Processes and frontends of one host may share the file.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Generator
from contextlib import closing
from copy import copy
from dataclasses import astuple

import structlog

from common.errors import Unavailable
from common.usage import (
    COUNTS,
    DAY_S,
    DIMENSIONS,
    HOUR_S,
    UsageBucket,
    UsageCounts,
    UsageKey,
    UsagePage,
    UsageQuery,
)

# Path of records that are kept in memory only.
MEMORY = ":memory:"
# Between two writes, and after one that failed.
WRITE_PAUSE_S = 0.1
RETRY_PAUSE_S = 1.0
# Another process may hold the lock of the file for this long.
LOCK_TIMEOUT_S = 5.0
OPEN_RETRY_S = 0.05
# Sums that wait to be written. Above it, records are dropped.
PENDING_MAX = 16_384
# Results of a page, but for those of its last bucket.
RESULTS_MAX = 10_000

_SCHEMA_VERSION = 1
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS source (id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS usage (
  hour INTEGER NOT NULL,
  {", ".join(f"{name} TEXT NOT NULL" for name in DIMENSIONS)},
  {", ".join(f"{name} INTEGER NOT NULL" for name in COUNTS)},
  PRIMARY KEY (hour, {", ".join(DIMENSIONS)})
) WITHOUT ROWID;
PRAGMA user_version = {_SCHEMA_VERSION};
"""
_SUMS = ", ".join(f"{name} = {name} + excluded.{name}" for name in COUNTS)
_ADD = f"""
INSERT INTO usage VALUES ({", ".join("?" * (1 + len(DIMENSIONS) + len(COUNTS)))})
ON CONFLICT (hour, {", ".join(DIMENSIONS)}) DO UPDATE SET {_SUMS}
"""

# Start of an hour, and what used the tokens.
_Entry = tuple[int, UsageKey]

log = structlog.get_logger()


class UsageStore:
    """Keeps the sums of `days` days. Raises OSError and sqlite3.Error if the file cannot be used.

    - path: MEMORY: the records end with the process.
    """

    def __init__(self, path: str, days: int) -> None:
        self._path = path
        self._days = days
        # Held by the thread that uses the file.
        self._database_lock = threading.Lock()
        self._database, self.source = _open(path)
        self._pruned_hour = 0
        # Guards what follows.
        self._lock = threading.Lock()
        self._pending: dict[_Entry, UsageCounts] = {}
        # Requests.
        self.written = self.dropped = 0
        self._has_pending, self._closes = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def put(self, key: UsageKey, counts: UsageCounts, now_s: float) -> None:
        """Adds to the sums of an hour. now_s: Unix seconds."""
        entry = int(now_s) // HOUR_S * HOUR_S, key
        with self._lock:
            sums = self._pending.get(entry)
            if sums is not None:
                sums += counts
                return
            if len(self._pending) >= PENDING_MAX:
                self.dropped += counts.requests
                return
            self._pending[entry] = copy(counts)
        self._has_pending.set()

    def read(self, query: UsageQuery) -> UsagePage:
        """Returns the buckets of a query that fit on a page, with all that this process has
        counted. Blocks. Raises Unavailable if the file cannot be read.

        - query: with a limit.
        """
        assert query.limit is not None, "a page is bounded"
        width_s = query.width_s
        start_s = query.start_s // width_s * width_s
        all_end_s = -(-query.end_s // width_s) * width_s
        end_s = max(start_s, min(all_end_s, start_s + query.limit * width_s))
        found: dict[int, dict[UsageKey, UsageCounts]] = {}
        results = 0
        try:
            with self._database_lock:
                self._write()
                with closing(self._select(start_s, end_s, query)) as rows:
                    for bucket_s, key, counts in rows:
                        if bucket_s not in found and results >= RESULTS_MAX:
                            end_s = bucket_s
                            break
                        results += 1
                        found.setdefault(bucket_s, {})[key] = counts
        except sqlite3.Error as error:
            raise Unavailable(f"the usage records cannot be read: {error}", 1.0) from None
        buckets = tuple(
            UsageBucket(bucket_s, bucket_s + width_s, found.get(bucket_s, {}))
            for bucket_s in range(start_s, end_s, width_s)
        )
        return UsagePage(self.source, buckets, end_s if end_s < all_end_s else None)

    def close(self, timeout_s: float) -> None:
        """Writes what is pending, for at most `timeout_s`. Idempotent."""
        self._closes.set()
        self._has_pending.set()
        self._thread.join(timeout_s)
        with self._lock:
            pending, self._pending = self._pending, {}
            lost = sum(counts.requests for counts in pending.values())
            self.dropped += lost
        if lost:
            log.error("usage_lost", file=self._path, requests=lost)

    def _select(
        self, start_s: int, end_s: int, query: UsageQuery
    ) -> Generator[tuple[int, UsageKey, UsageCounts], None, None]:
        """Yields the sums by bucket and key, in order of time."""
        names = ", ".join(name if name in query.by else f"'' AS {name}" for name in DIMENSIONS)
        groups = ", ".join(("bucket", *query.by))
        rows = self._database.execute(
            f"SELECT hour - hour % ? AS bucket, {names}, "
            f"{', '.join(f'SUM({name})' for name in COUNTS)} "
            f"FROM usage WHERE hour >= ? AND hour < ? GROUP BY {groups} ORDER BY {groups}",
            (query.width_s, start_s, end_s),
        )
        try:
            for bucket_s, *values in rows:
                split = len(DIMENSIONS)
                yield bucket_s, UsageKey(*values[:split]), UsageCounts(*values[split:])
        finally:
            rows.close()

    def _run(self) -> None:
        has_failed = False
        while not self._closes.is_set():
            self._has_pending.wait()
            self._has_pending.clear()
            has_failed = not self._try_to_write(is_repeated=has_failed)
            if has_failed:
                self._has_pending.set()
            self._closes.wait(RETRY_PAUSE_S if has_failed else WRITE_PAUSE_S)
        self._try_to_write(is_repeated=False)
        with self._database_lock:
            self._database.close()

    def _try_to_write(self, *, is_repeated: bool) -> bool:
        try:
            with self._database_lock:
                self._write()
        except sqlite3.Error as error:
            if not is_repeated:
                log.warning("usage_not_written", file=self._path, cause=str(error))
            return False
        return True

    def _write(self) -> None:
        """Writes what is pending, or leaves it so. Raises sqlite3.Error."""
        with self._lock:
            pending, self._pending = self._pending, {}
        if not pending:
            return
        hour = max(start for start, _ in pending)
        try:
            with self._database:
                self._database.executemany(_ADD, map(_row, pending.items()))
                if hour > self._pruned_hour:
                    oldest = hour - self._days * DAY_S
                    self._database.execute("DELETE FROM usage WHERE hour < ?", (oldest,))
        except sqlite3.Error:
            with self._lock:
                for entry, counts in self._pending.items():
                    pending[entry] = pending.get(entry, UsageCounts()) + counts
                self._pending = pending
            self._has_pending.set()
            raise
        self._pruned_hour = hour
        self.written += sum(counts.requests for counts in pending.values())


def _row(item: tuple[_Entry, UsageCounts]) -> tuple[str | int, ...]:
    (hour, key), counts = item
    return (hour, *key, *astuple(counts))


def _open(path: str) -> tuple[sqlite3.Connection, str]:
    """Returns the open file and its id. Other processes may open it at the same time. Raises
    OSError and sqlite3.Error."""
    if path != MEMORY:
        # SQLite gives its other files the mode of this one.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    give_up_at_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        database = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, check_same_thread=False)
        try:
            return database, _set_up(database)
        except sqlite3.Error as error:
            database.close()
            # The change to WAL does not wait for the lock.
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
            is_locked = code & 0xFF == sqlite3.SQLITE_BUSY
            if not is_locked or time.monotonic() > give_up_at_s:
                raise
            time.sleep(OPEN_RETRY_S)


def _set_up(database: sqlite3.Connection) -> str:
    """Creates the tables of a new file; returns its id. Raises sqlite3.Error."""
    database.execute("PRAGMA journal_mode = WAL")
    # A commit is not synced: it survives the process, and the file survives a loss of power.
    database.execute("PRAGMA synchronous = NORMAL")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > _SCHEMA_VERSION:
        text = f"its version is {version}, the newest that this program reads {_SCHEMA_VERSION}"
        raise sqlite3.DatabaseError(text)
    database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
    with database:
        database.execute("BEGIN IMMEDIATE")
        found = database.execute("SELECT id FROM source").fetchone()
        if found is None:
            found = (secrets.token_hex(8),)
            database.execute("INSERT INTO source VALUES (?)", found)
    return str(found[0])
