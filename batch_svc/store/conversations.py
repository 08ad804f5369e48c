"""Conversations of all tenants. Items are numbered in the order in which they were appended."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Final

import orjson

from batch_svc.core.conversations import (
    ConversationLimits,
    ConversationRow,
    ItemRow,
    check_new_ids,
    with_own_ids,
)
from batch_svc.store.database import Database, Transaction
from common.errors import InvalidRequest, NotFound, Overloaded

CONVERSATION_FULL: Final = "CONVERSATION_FULL"
TENANT_CONVERSATIONS: Final = "TENANT_CONVERSATIONS"
# Conversations that one transaction removes at most.
_SWEEP_ROWS: Final = 100
# Ids of items in one statement.
_IDS_MAX: Final = 500


class ConversationStore:
    """The conversations of all tenants. Methods of clients raise NotFound for a conversation that
    the tenant does not have, and Unavailable."""

    def __init__(self, database: Database, limits: ConversationLimits) -> None:
        self._database = database
        self._limits = limits

    async def create(
        self, tenant: str, metadata: Mapping[str, str], items: Sequence[ItemRow]
    ) -> ConversationRow:
        """Raises Overloaded above the limit of the tenant, and InvalidRequest above those of a
        conversation and for items with the same id."""
        conversation_id, now = f"conv_{secrets.token_hex(24)}", self._database.now
        most = self._limits.tenant_conversations
        async with self._database.transaction() as transaction:
            rows = await transaction.fetch(
                "SELECT COUNT(*) FROM conversations WHERE tenant = $1", tenant
            )
            if rows[0][0] >= most:
                text = f"this tenant has {rows[0][0]} conversations, the limit is {most}"
                raise Overloaded(60.0, f"{text}; delete some", reason=TENANT_CONVERSATIONS)
            await transaction.execute(
                "INSERT INTO conversations (id, tenant, created_at, used_at, metadata)"
                f" VALUES ($1, $2, {now}, {now}, $3)",
                conversation_id,
                tenant,
                orjson.dumps(dict(metadata)).decode(),
            )
            await self._add(transaction, tenant, conversation_id, items)
            return await self._get(transaction, tenant, conversation_id)

    async def get(self, tenant: str, conversation_id: str) -> ConversationRow:
        async with self._database.transaction() as transaction:
            return await self._get(transaction, tenant, conversation_id)

    async def update(
        self, tenant: str, conversation_id: str, metadata: Mapping[str, str]
    ) -> ConversationRow:
        """Replaces the metadata."""
        async with self._database.transaction() as transaction:
            await transaction.execute(
                "UPDATE conversations SET metadata = $1 WHERE id = $2 AND tenant = $3",
                orjson.dumps(dict(metadata)).decode(),
                conversation_id,
                tenant,
            )
            return await self._get(transaction, tenant, conversation_id)

    async def delete(self, tenant: str, conversation_id: str) -> None:
        async with self._database.transaction() as transaction:
            if not await _remove(transaction, tenant, conversation_id):
                raise _no_conversation(conversation_id)

    async def add(self, tenant: str, conversation_id: str, items: Sequence[ItemRow]) -> None:
        """Appends items. Raises InvalidRequest above a limit of the conversation, and for the id of
        another item."""
        async with self._database.transaction() as transaction:
            await self._add(transaction, tenant, conversation_id, items)

    async def page(
        self, tenant: str, conversation_id: str, limit: int, after: str, *, ascending: bool
    ) -> tuple[list[ItemRow], bool]:
        """Returns a page, and whether more follow. Raises NotFound also for `after`."""
        order, sign = ("ASC", ">") if ascending else ("DESC", "<")
        async with self._database.transaction() as transaction:
            await self._get(transaction, tenant, conversation_id)
            values: list[object] = [conversation_id, limit + 1]
            where = ""
            if after:
                values.append(await _number_of(transaction, conversation_id, after))
                where = f" AND number {sign} $3"
            rows = await transaction.fetch(
                "SELECT item_id, content FROM conversation_items WHERE conversation_id = $1"
                f"{where} ORDER BY number {order} LIMIT $2",
                *values,
            )
        return [ItemRow(row[0], bytes(row[1])) for row in rows[:limit]], len(rows) > limit

    async def item(self, tenant: str, conversation_id: str, item_id: str) -> ItemRow:
        """Raises NotFound also for the item."""
        async with self._database.transaction() as transaction:
            await self._get(transaction, tenant, conversation_id)
            number = await _number_of(transaction, conversation_id, item_id)
            rows = await transaction.fetch(
                "SELECT content FROM conversation_items WHERE conversation_id = $1 AND number = $2",
                conversation_id,
                number,
            )
        return ItemRow(item_id, bytes(rows[0][0]))

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> ConversationRow:
        """Returns the conversation. Raises NotFound also for the item."""
        async with self._database.transaction() as transaction:
            conversation = await self._get(transaction, tenant, conversation_id)
            number = await _number_of(transaction, conversation_id, item_id)
            rows = await transaction.fetch(
                "SELECT content FROM conversation_items WHERE conversation_id = $1 AND number = $2",
                conversation_id,
                number,
            )
            await transaction.execute(
                "DELETE FROM conversation_items WHERE conversation_id = $1 AND number = $2",
                conversation_id,
                number,
            )
            await transaction.execute(
                "UPDATE conversations SET items = items - 1, bytes = bytes - $1 WHERE id = $2",
                len(bytes(rows[0][0])),
                conversation_id,
            )
        return conversation

    async def read(self, tenant: str, conversation_id: str) -> list[ItemRow]:
        """Returns all items, oldest first. Raises InvalidRequest if the conversation is full."""
        async with self._database.transaction() as transaction:
            await self._get(transaction, tenant, conversation_id)
            await self._check_limits(transaction, conversation_id, room=1)
            rows = await transaction.fetch(
                "SELECT item_id, content FROM conversation_items WHERE conversation_id = $1"
                " ORDER BY number",
                conversation_id,
            )
        return [ItemRow(row[0], bytes(row[1])) for row in rows]

    async def append(
        self,
        transaction: Transaction,
        tenant: str,
        conversation_id: str,
        items: Sequence[ItemRow],
        *,
        renames: bool = True,
    ) -> bool:
        """Appends the items of a response, also above the limits: they were checked before it ran.
        Returns whether the conversation was there.

        - renames: an item with the id of another one gets a new id; else it raises InvalidRequest.
        """
        # First, so that the row is locked until the end of the transaction.
        changed = await transaction.execute(
            f"UPDATE conversations SET items = items + $1, bytes = bytes + $2,"
            f" next_number = next_number + $1, used_at = {self._database.now}"
            " WHERE id = $3 AND tenant = $4",
            len(items),
            sum(map(_size, items)),
            conversation_id,
            tenant,
        )
        if not changed:
            return False
        rows = await transaction.fetch(
            "SELECT next_number FROM conversations WHERE id = $1", conversation_id
        )
        first = int(rows[0][0]) - len(items)
        if renames:
            named = await self._rename(transaction, conversation_id, items)
        else:
            check_new_ids(items, await _known_ids(transaction, conversation_id, items))
            named = items
        await transaction.execute_many(
            "INSERT INTO conversation_items (conversation_id, number, item_id, content)"
            " VALUES ($1, $2, $3, $4)",
            (
                (conversation_id, number, item.id, item.content)
                for number, item in enumerate(named, first)
            ),
        )
        return True

    async def _rename(
        self, transaction: Transaction, conversation_id: str, items: Sequence[ItemRow]
    ) -> Sequence[ItemRow]:
        """Returns items with ids of their own, and counts the bytes of longer ids."""
        known = await _known_ids(transaction, conversation_id, items)
        named = with_own_ids(items, known, lambda prefix: f"{prefix}_{secrets.token_hex(24)}")
        if growth := sum(map(_size, named)) - sum(map(_size, items)):
            await transaction.execute(
                "UPDATE conversations SET bytes = bytes + $1 WHERE id = $2", growth, conversation_id
            )
        return named

    async def sweep(self) -> int:
        """Removes conversations that were not used for too long; returns their number. Raises
        Unavailable."""
        if not self._limits.keep_s:
            return 0
        removed = 0
        # Ends: each round removes conversations, the last one less than a page.
        while True:
            rows = await self._database.fetch(
                f"SELECT tenant, id FROM conversations WHERE used_at < {self._database.now} - $1"
                f" LIMIT {_SWEEP_ROWS}",
                self._limits.keep_s,
            )
            async with self._database.transaction() as transaction:
                for tenant, conversation_id in rows:
                    removed += await _remove(transaction, tenant, conversation_id)
            if len(rows) < _SWEEP_ROWS:
                return removed

    async def _get(
        self, transaction: Transaction, tenant: str, conversation_id: str
    ) -> ConversationRow:
        rows = await transaction.fetch(
            "SELECT created_at, metadata FROM conversations WHERE id = $1 AND tenant = $2",
            conversation_id,
            tenant,
        )
        if not rows:
            raise _no_conversation(conversation_id)
        return ConversationRow(conversation_id, rows[0][0], orjson.loads(rows[0][1]))

    async def _add(
        self,
        transaction: Transaction,
        tenant: str,
        conversation_id: str,
        items: Sequence[ItemRow],
    ) -> None:
        # The client is sent the ids of its own items.
        if not await self.append(transaction, tenant, conversation_id, items, renames=False):
            raise _no_conversation(conversation_id)
        await self._check_limits(transaction, conversation_id)

    async def _check_limits(
        self, transaction: Transaction, conversation_id: str, room: int = 0
    ) -> None:
        """Raises InvalidRequest unless a conversation has room for so many items more."""
        rows = await transaction.fetch(
            "SELECT items, bytes FROM conversations WHERE id = $1", conversation_id
        )
        items, size = map(int, rows[0])
        if items + room > (most := self._limits.items):
            text = f"the conversation would have {items + room} items, the limit is {most}"
            raise InvalidRequest(text, "conversation", reason=CONVERSATION_FULL)
        if size + room > (most := self._limits.conversation_bytes):
            text = f"the items of the conversation have {size} bytes, the limit is {most >> 20} MB"
            raise InvalidRequest(text, "conversation", reason=CONVERSATION_FULL)


def _size(item: ItemRow) -> int:
    """Returns the bytes of an item that count for its conversation."""
    return len(item.content)


async def _known_ids(
    transaction: Transaction, conversation_id: str, items: Sequence[ItemRow]
) -> set[str]:
    """Returns the ids of items that are in a conversation already."""
    known: set[str] = set()
    for start in range(0, len(items), _IDS_MAX):
        ids = [item.id for item in items[start : start + _IDS_MAX]]
        names = ", ".join(f"${number}" for number in range(2, len(ids) + 2))
        rows = await transaction.fetch(
            "SELECT item_id FROM conversation_items WHERE conversation_id = $1"
            f" AND item_id IN ({names})",
            conversation_id,
            *ids,
        )
        known |= {row[0] for row in rows}
    return known


async def _number_of(transaction: Transaction, conversation_id: str, item_id: str) -> int:
    """Returns the number of the newest item with an id. Raises NotFound."""
    rows = await transaction.fetch(
        "SELECT number FROM conversation_items WHERE conversation_id = $1 AND item_id = $2"
        " ORDER BY number DESC LIMIT 1",
        conversation_id,
        item_id,
    )
    if not rows:
        raise NotFound(f"the conversation has no item {item_id!r}", field="item_id")
    return int(rows[0][0])


async def _remove(transaction: Transaction, tenant: str, conversation_id: str) -> int:
    """Removes a conversation; returns the number of those that were there."""
    removed = await transaction.execute(
        "DELETE FROM conversations WHERE id = $1 AND tenant = $2", conversation_id, tenant
    )
    if removed:
        await transaction.execute(
            "DELETE FROM conversation_items WHERE conversation_id = $1", conversation_id
        )
    return removed


def _no_conversation(conversation_id: str) -> NotFound:
    return NotFound(f"there is no conversation {conversation_id!r}", field="conversation_id")
