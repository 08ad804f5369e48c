"""Conversations, and what they may have at most (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from batch_svc.core.limits import MB


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
