"""The output of responses as it is generated, in parts."""

from __future__ import annotations

from batch_svc.core.responses import NOT_ENDED_SQL
from batch_svc.core.streams import Addition, StoredOutput
from batch_svc.store.database import Database, Transaction


async def create(transaction: Transaction, response_id: str) -> None:
    """Has the output of a new response stored."""
    await transaction.execute(
        "INSERT INTO response_streams (response_id, run, parts, bytes) VALUES ($1, 0, 0, 0)"
        " ON CONFLICT (response_id) DO NOTHING",
        response_id,
    )


async def size(transaction: Transaction, response_id: str) -> int:
    """Returns the bytes of the stored output of a response."""
    rows = await transaction.fetch(
        "SELECT bytes FROM response_streams WHERE response_id = $1", response_id
    )
    return int(rows[0][0]) if rows else 0


async def read(
    source: Database | Transaction, response_id: str, run: int = -1, first: int = 0
) -> StoredOutput | None:
    """Returns the stored output of a response; None: it is not stored as it is generated.

    - run, first: of this run, only the parts from a number on.
    """
    # In one statement: another one could be of another run.
    rows = await source.fetch(
        "SELECT s.run, p.content FROM response_streams s LEFT JOIN response_parts p"
        " ON p.response_id = s.response_id AND p.number >= CASE WHEN s.run = $1 THEN $2 ELSE 0 END"
        " WHERE s.response_id = $3 ORDER BY p.number",
        run,
        first,
        response_id,
    )
    if not rows:
        return None
    return StoredOutput(int(rows[0][0]), [bytes(row[1]) for row in rows if row[1] is not None])


async def append(transaction: Transaction, response_id: str, addition: Addition) -> None:
    """Stores output of a response that has not ended, under the lease: there is no other writer."""
    rows = await transaction.fetch(
        "SELECT run, parts, bytes FROM response_streams WHERE response_id = $1", response_id
    )
    if not rows:
        return
    run, parts, stored = map(int, rows[0])
    if is_new := addition.run > run:
        parts = stored = 0
    if stored < addition.offset:
        return  # What comes before it was dropped, with its run.
    content = addition.deltas[stored - addition.offset :]
    if not content:
        return  # A write whose commit had no response was repeated.
    changed = await transaction.execute(
        "UPDATE response_streams SET run = $1, parts = $2, bytes = $3 WHERE response_id = $4"
        f" AND EXISTS (SELECT 1 FROM responses WHERE id = $4 AND {NOT_ENDED_SQL})",
        addition.run,
        parts + 1,
        stored + len(content),
        response_id,
    )
    if not changed:
        return
    if is_new:
        await transaction.execute("DELETE FROM response_parts WHERE response_id = $1", response_id)
    await transaction.execute(
        "INSERT INTO response_parts (response_id, number, content) VALUES ($1, $2, $3)",
        response_id,
        parts,
        content,
    )


async def remove(transaction: Transaction, response_id: str) -> None:
    """Removes the output of a response that is removed."""
    for table in ("response_streams", "response_parts"):
        await transaction.execute(f"DELETE FROM {table} WHERE response_id = $1", response_id)
