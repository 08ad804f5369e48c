"""The tables. A version that cannot read a database refuses it."""

from __future__ import annotations

from typing import Final

from batch_svc.core.batch import TIMES
from batch_svc.store.database import Database
from common.errors import Conflict

VERSION: Final = 1
TIME_COLUMNS: Final = tuple(TIMES.values())


def _statements(blob: str) -> tuple[str, ...]:
    times = ", ".join(f"{name} DOUBLE PRECISION NOT NULL DEFAULT 0" for name in TIME_COLUMNS)
    return (
        "CREATE TABLE IF NOT EXISTS format (version INTEGER NOT NULL)",
        "CREATE TABLE IF NOT EXISTS leases (name TEXT PRIMARY KEY, owner TEXT NOT NULL,"
        " fence BIGINT NOT NULL, expires_at DOUBLE PRECISION NOT NULL)",
        "CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, tenant TEXT NOT NULL,"
        " filename TEXT NOT NULL, purpose TEXT NOT NULL, size BIGINT NOT NULL,"
        " created_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION NOT NULL,"
        " is_complete INTEGER NOT NULL)",
        "CREATE INDEX IF NOT EXISTS files_of_tenant ON files (tenant, created_at, id)",
        "CREATE TABLE IF NOT EXISTS chunks (file_id TEXT NOT NULL, number INTEGER NOT NULL,"
        f" content {blob} NOT NULL, PRIMARY KEY (file_id, number))",
        "CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, tenant TEXT NOT NULL,"
        " key_id TEXT NOT NULL, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL,"
        " completion_window TEXT NOT NULL, status TEXT NOT NULL,"
        " created_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION NOT NULL,"
        f" {times}, output_file_id TEXT NOT NULL DEFAULT '',"
        " error_file_id TEXT NOT NULL DEFAULT '', output_expires_s BIGINT NOT NULL,"
        " ends_as TEXT NOT NULL DEFAULT '', total INTEGER NOT NULL DEFAULT 0,"
        " completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,"
        " metadata TEXT NOT NULL, errors TEXT NOT NULL DEFAULT '[]')",
        "CREATE INDEX IF NOT EXISTS batches_of_tenant ON batches (tenant, created_at, id)",
        "CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status)",
        "CREATE TABLE IF NOT EXISTS lines (batch_id TEXT NOT NULL, number INTEGER NOT NULL,"
        f" position INTEGER NOT NULL, custom_id TEXT NOT NULL, body {blob} NOT NULL,"
        f" result {blob}, is_error INTEGER, PRIMARY KEY (batch_id, number))",
        "CREATE INDEX IF NOT EXISTS lines_in_order ON lines (batch_id, position)"
        " WHERE result IS NULL",
        "CREATE TABLE IF NOT EXISTS responses (id TEXT PRIMARY KEY, tenant TEXT NOT NULL,"
        " key_id TEXT NOT NULL, status TEXT NOT NULL, created_at DOUBLE PRECISION NOT NULL,"
        " expires_at DOUBLE PRECISION NOT NULL, size BIGINT NOT NULL,"
        f" response {blob} NOT NULL, items {blob} NOT NULL,"
        f" object_time BIGINT NOT NULL, request {blob}, conversation_id TEXT NOT NULL,"
        " first_item INTEGER NOT NULL)",
        "CREATE INDEX IF NOT EXISTS responses_not_ended ON responses (created_at, id)"
        " WHERE status IN ('queued', 'in_progress')",
        "CREATE INDEX IF NOT EXISTS responses_of_tenant ON responses (tenant, created_at, id)",
        "CREATE INDEX IF NOT EXISTS responses_by_expiry ON responses (expires_at)",
        "CREATE INDEX IF NOT EXISTS responses_by_status ON responses (tenant, status)"
        " WHERE status <> ''",
        # Of a response whose output is stored as it is generated: parts of its present run.
        "CREATE TABLE IF NOT EXISTS response_streams (response_id TEXT PRIMARY KEY,"
        " run BIGINT NOT NULL, parts BIGINT NOT NULL, bytes BIGINT NOT NULL)",
        "CREATE TABLE IF NOT EXISTS response_parts (response_id TEXT NOT NULL,"
        f" number BIGINT NOT NULL, content {blob} NOT NULL, PRIMARY KEY (response_id, number))",
        "CREATE TABLE IF NOT EXISTS conversations (id TEXT PRIMARY KEY, tenant TEXT NOT NULL,"
        " created_at DOUBLE PRECISION NOT NULL, used_at DOUBLE PRECISION NOT NULL,"
        " metadata TEXT NOT NULL, items BIGINT NOT NULL DEFAULT 0,"
        " bytes BIGINT NOT NULL DEFAULT 0, next_number BIGINT NOT NULL DEFAULT 0)",
        "CREATE INDEX IF NOT EXISTS conversations_of_tenant ON conversations (tenant)",
        "CREATE INDEX IF NOT EXISTS conversations_by_use ON conversations (used_at)",
        "CREATE TABLE IF NOT EXISTS conversation_items (conversation_id TEXT NOT NULL,"
        f" number BIGINT NOT NULL, item_id TEXT NOT NULL, content {blob} NOT NULL,"
        " PRIMARY KEY (conversation_id, number))",
        "CREATE INDEX IF NOT EXISTS conversation_items_by_id"
        " ON conversation_items (conversation_id, item_id)",
        "CREATE TABLE IF NOT EXISTS stored_bytes (tenant TEXT PRIMARY KEY, bytes BIGINT NOT NULL)",
    )


async def create_tables(database: Database) -> None:
    """Creates what is missing. Raises Unavailable, and Conflict for tables of another version."""
    async with database.transaction() as transaction:
        if database.name == "postgresql":
            # Two services that start at once would both create the tables.
            await transaction.execute("SELECT pg_advisory_xact_lock(7301526)")
        for statement in _statements(database.blob):
            await transaction.execute(statement)
        rows = await transaction.fetch("SELECT version FROM format")
        if not rows:
            await transaction.execute("INSERT INTO format (version) VALUES ($1)", VERSION)
        elif rows[0][0] != VERSION:
            text = f"the batch database has version {rows[0][0]}, this service needs {VERSION}"
            raise Conflict(text, reason="BATCH_DATABASE_VERSION")
