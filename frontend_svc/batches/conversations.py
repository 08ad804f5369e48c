"""Conversations in the batch service."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from common.errors import NotFound
from frontend_svc.batches.client import BatchClient
from kvmesh.batch.v1 import batch_pb2
from kvmesh.batch.v1 import conversations_pb2 as pb

_CONVERSATION_ID: Final = re.compile(r"conv_[0-9a-f]{48}")


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item. content: its JSON."""

    id: str
    content: bytes


class Conversations:
    """The conversations of all tenants. Methods raise NotFound for one that the tenant does not
    have, and Unavailable."""

    def __init__(self, client: BatchClient) -> None:
        self._client = client

    @property
    def is_available(self) -> bool:
        """Whether discovery shows a batch service."""
        return self._client.is_there

    async def create(
        self, tenant: str, metadata: Mapping[str, str], items: Sequence[StoredItem]
    ) -> pb.Conversation:
        """Raises Overloaded and InvalidRequest above a limit."""
        message = pb.CreateConversationRequest(
            owner=batch_pb2.Owner(tenant=tenant), metadata=metadata, items=map(_message, items)
        )
        response: pb.CreateConversationResponse = await self._client.call(
            "CreateConversation", message
        )
        return response.conversation

    async def get(self, tenant: str, conversation_id: str) -> pb.Conversation:
        message = pb.GetConversationRequest(
            owner=batch_pb2.Owner(tenant=tenant), conversation_id=_checked(conversation_id)
        )
        response: pb.GetConversationResponse = await self._client.call("GetConversation", message)
        return response.conversation

    async def update(
        self, tenant: str, conversation_id: str, metadata: Mapping[str, str]
    ) -> pb.Conversation:
        message = pb.UpdateConversationRequest(
            owner=batch_pb2.Owner(tenant=tenant),
            conversation_id=_checked(conversation_id),
            metadata=metadata,
        )
        response: pb.UpdateConversationResponse = await self._client.call(
            "UpdateConversation", message
        )
        return response.conversation

    async def delete(self, tenant: str, conversation_id: str) -> None:
        message = pb.DeleteConversationRequest(
            owner=batch_pb2.Owner(tenant=tenant), conversation_id=_checked(conversation_id)
        )
        await self._client.call("DeleteConversation", message)

    async def add(self, tenant: str, conversation_id: str, items: Sequence[StoredItem]) -> None:
        """Appends items. Raises InvalidRequest above a limit."""
        message = pb.AddItemsRequest(
            owner=batch_pb2.Owner(tenant=tenant),
            conversation_id=_checked(conversation_id),
            items=map(_message, items),
        )
        await self._client.call("AddItems", message)

    async def page(
        self, tenant: str, conversation_id: str, limit: int, after: str, *, ascending: bool
    ) -> tuple[list[StoredItem], bool]:
        """Returns a page of items, and whether more follow. Raises NotFound also for `after`."""
        message = pb.ListItemsRequest(
            owner=batch_pb2.Owner(tenant=tenant),
            conversation_id=_checked(conversation_id),
            limit=limit,
            after=after,
            ascending=ascending,
        )
        response: pb.ListItemsResponse = await self._client.call("ListItems", message)
        return [StoredItem(item.id, item.content) for item in response.items], response.has_more

    async def item(self, tenant: str, conversation_id: str, item_id: str) -> StoredItem:
        """Raises NotFound also for the item."""
        message = pb.GetItemRequest(
            owner=batch_pb2.Owner(tenant=tenant),
            conversation_id=_checked(conversation_id),
            item_id=item_id,
        )
        response: pb.GetItemResponse = await self._client.call("GetItem", message)
        return StoredItem(response.item.id, response.item.content)

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> pb.Conversation:
        """Returns the conversation. Raises NotFound also for the item."""
        message = pb.DeleteItemRequest(
            owner=batch_pb2.Owner(tenant=tenant),
            conversation_id=_checked(conversation_id),
            item_id=item_id,
        )
        response: pb.DeleteItemResponse = await self._client.call("DeleteItem", message)
        return response.conversation

    async def read(self, tenant: str, conversation_id: str) -> tuple[bytes, ...]:
        """Returns all items, oldest first, each as JSON. Raises InvalidRequest if the conversation
        is full."""
        message = pb.ReadConversationRequest(
            owner=batch_pb2.Owner(tenant=tenant), conversation_id=_checked(conversation_id)
        )
        response: pb.ReadConversationResponse = await self._client.call("ReadConversation", message)
        return tuple(item.content for item in response.items)


def _checked(conversation_id: str) -> str:
    if not _CONVERSATION_ID.fullmatch(conversation_id):
        text = f"{conversation_id[:128]!r} is no id of a conversation"
        raise NotFound(text, field="conversation_id")
    return conversation_id


def _message(item: StoredItem) -> pb.ConversationItem:
    return pb.ConversationItem(id=item.id, content=item.content)
