"""The gRPC service of conversations, for frontends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import grpc.aio

from batch_svc.core.conversations import ConversationRow, ItemRow
from batch_svc.store.conversations import ConversationStore
from common.errors import InvalidRequest
from kvmesh.batch.v1 import conversations_pb2 as pb
from kvmesh.batch.v1 import conversations_pb2_grpc

SERVICE_NAME: Final = "kvmesh.batch.v1.ConversationService"
ITEMS_PAGE_MAX: Final = 100

Context = grpc.aio.ServicerContext[Any, Any]


class ConversationServicer(conversations_pb2_grpc.ConversationServiceServicer):
    """Translates between messages and the store."""

    def __init__(self, conversations: ConversationStore) -> None:
        self._store = conversations

    async def CreateConversation(
        self, request: pb.CreateConversationRequest, context: Context
    ) -> pb.CreateConversationResponse:
        row = await self._store.create(request.owner.tenant, request.metadata, _rows(request.items))
        return pb.CreateConversationResponse(conversation=_conversation(row))

    async def GetConversation(
        self, request: pb.GetConversationRequest, context: Context
    ) -> pb.GetConversationResponse:
        row = await self._store.get(request.owner.tenant, request.conversation_id)
        return pb.GetConversationResponse(conversation=_conversation(row))

    async def UpdateConversation(
        self, request: pb.UpdateConversationRequest, context: Context
    ) -> pb.UpdateConversationResponse:
        row = await self._store.update(
            request.owner.tenant, request.conversation_id, request.metadata
        )
        return pb.UpdateConversationResponse(conversation=_conversation(row))

    async def DeleteConversation(
        self, request: pb.DeleteConversationRequest, context: Context
    ) -> pb.DeleteConversationResponse:
        await self._store.delete(request.owner.tenant, request.conversation_id)
        return pb.DeleteConversationResponse()

    async def AddItems(self, request: pb.AddItemsRequest, context: Context) -> pb.AddItemsResponse:
        await self._store.add(request.owner.tenant, request.conversation_id, _rows(request.items))
        return pb.AddItemsResponse()

    async def ListItems(
        self, request: pb.ListItemsRequest, context: Context
    ) -> pb.ListItemsResponse:
        if not 1 <= request.limit <= ITEMS_PAGE_MAX:
            text = f"'limit' must be within 1..{ITEMS_PAGE_MAX}, not {request.limit}."
            raise InvalidRequest(text, "limit")
        items, has_more = await self._store.page(
            request.owner.tenant,
            request.conversation_id,
            request.limit,
            request.after,
            ascending=request.ascending,
        )
        return pb.ListItemsResponse(items=map(_item, items), has_more=has_more)

    async def GetItem(self, request: pb.GetItemRequest, context: Context) -> pb.GetItemResponse:
        row = await self._store.item(request.owner.tenant, request.conversation_id, request.item_id)
        return pb.GetItemResponse(item=_item(row))

    async def DeleteItem(
        self, request: pb.DeleteItemRequest, context: Context
    ) -> pb.DeleteItemResponse:
        row = await self._store.delete_item(
            request.owner.tenant, request.conversation_id, request.item_id
        )
        return pb.DeleteItemResponse(conversation=_conversation(row))

    async def ReadConversation(
        self, request: pb.ReadConversationRequest, context: Context
    ) -> pb.ReadConversationResponse:
        rows = await self._store.read(request.owner.tenant, request.conversation_id)
        return pb.ReadConversationResponse(items=map(_item, rows))


def _rows(items: Iterable[pb.ConversationItem]) -> list[ItemRow]:
    return [ItemRow(item.id, item.content) for item in items]


def _item(row: ItemRow) -> pb.ConversationItem:
    return pb.ConversationItem(id=row.id, content=row.content)


def _conversation(row: ConversationRow) -> pb.Conversation:
    return pb.Conversation(id=row.id, created_at=int(row.created_at), metadata=row.metadata)
