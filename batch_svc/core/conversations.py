"""Conversations, and what they may have at most (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from batch_svc.core.limits import MB
from common.errors import InvalidRequest

ITEM_EXISTS: Final = "ITEM_EXISTS"
_PREFIX_CHARS_MAX: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLimits:
    """The limits of one service."""

    items: int = 10_000
    """Of a conversation."""

    conversation_bytes: int = 16 * MB
    """Of the items of a conversation."""

    tenant_conversations: int = 100_000
    """Of a tenant."""

    keep_s: float = 0.0
    """After which a conversation without a new item is removed; 0: never."""


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """A conversation without its items. created_at: Unix seconds."""

    id: str
    created_at: float
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ItemRow:
    """An item. content: its JSON."""

    id: str
    content: bytes


def items_of_response(input_items: Iterable[bytes], response: bytes) -> list[ItemRow]:
    """Returns what a response appends to its conversation.

    - input_items: its own input, each item as JSON.
    - response: its object, as JSON.
    """
    # Any: JSON.
    output: Sequence[Any] = orjson.loads(response)["output"]
    items = [ItemRow(orjson.loads(item)["id"], item) for item in input_items]
    return [*items, *(ItemRow(item["id"], orjson.dumps(item)) for item in output)]


def check_new_ids(items: Iterable[ItemRow], known: Iterable[str]) -> None:
    """Raises InvalidRequest for an item with the id of another one of its conversation.

    - known: the ids in the conversation.
    """
    taken = set(known)
    for index, item in enumerate(items):
        if item.id in taken:
            text = f"the conversation has an item with the id {item.id!r} already"
            raise InvalidRequest(text, f"items[{index}].id", reason=ITEM_EXISTS)
        taken.add(item.id)


def with_own_ids(
    items: Iterable[ItemRow], known: Iterable[str], new_id: Callable[[str], str]
) -> list[ItemRow]:
    """Returns items, each with an id that no other one of its conversation has.

    - known: the ids in the conversation.
    - new_id: returns a new id with a prefix such as `msg`.
    """
    taken = set(known)
    named: list[ItemRow] = []
    for item in items:
        own = item
        if item.id in taken:
            item_id = new_id(item.id.partition("_")[0][:_PREFIX_CHARS_MAX])
            own = ItemRow(item_id, orjson.dumps(orjson.loads(item.content) | {"id": item_id}))
        taken.add(own.id)
        named.append(own)
    return named
