"""The handlers of the routes of conversations."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import orjson
from pydantic import ValidationError

from common.errors import InvalidRequest, NotFound
from frontend_svc.batches.conversations import Conversations, StoredItem
from frontend_svc.conversations.schema import (
    ConversationItemQuery,
    ConversationItems,
    ConversationItemsQuery,
    ConversationRequest,
    ConversationUpdate,
)
from frontend_svc.endpoints.plain import PlainRequest, PlainResponse
from frontend_svc.endpoints.plain_body import read_body
from frontend_svc.endpoints.query import parse_query
from frontend_svc.openai.body.fields import StrictModel
from frontend_svc.openai.body.parsing import parse_json_object
from frontend_svc.openai.body.validation_errors import INVALID_VALUE, invalid_value
from frontend_svc.responses.schema import (
    ITEM_ID_PATTERN,
    Item,
    ItemReference,
)
from frontend_svc.responses.translation import check_item_ids, items_as_json
from kvmesh.batch.v1 import conversations_pb2 as pb

_BODY_BYTES_MAX: Final = 16 << 20
_ITEM_ID: Final = re.compile(ITEM_ID_PATTERN)

M = TypeVar("M", bound=StrictModel)


class ConversationHandlers:
    """Translates between HTTP and the batch service."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    async def create(self, request: PlainRequest) -> PlainResponse:
        body = await _parse(ConversationRequest, request, is_optional=True)
        items = _new_items(body.items or ())
        conversation = await self._conversations.create(
            request.caller.tenant, body.metadata or {}, items
        )
        return _conversation(conversation)

    async def get(self, request: PlainRequest) -> PlainResponse:
        tenant, conversation_id = _named(request)
        return _conversation(await self._conversations.get(tenant, conversation_id))

    async def update(self, request: PlainRequest) -> PlainResponse:
        tenant, conversation_id = _named(request)
        body = await _parse(ConversationUpdate, request)
        conversation = await self._conversations.update(
            tenant, conversation_id, body.metadata or {}
        )
        return _conversation(conversation)

    async def delete(self, request: PlainRequest) -> PlainResponse:
        tenant, conversation_id = _named(request)
        await self._conversations.delete(tenant, conversation_id)
        deleted = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
        return PlainResponse(orjson.dumps(deleted))

    async def add_items(self, request: PlainRequest) -> PlainResponse:
        parse_query(ConversationItemQuery, request.query)
        tenant, conversation_id = _named(request)
        items = _new_items((await _parse(ConversationItems, request)).items)
        await self._conversations.add(tenant, conversation_id, items)
        return _page(items, has_more=False)

    async def list_items(self, request: PlainRequest) -> PlainResponse:
        query = parse_query(ConversationItemsQuery, request.query)
        tenant, conversation_id = _named(request)
        items, has_more = await self._conversations.page(
            tenant,
            conversation_id,
            query.limit,
            query.after or "",
            ascending=query.order == "asc",
        )
        return _page(items, has_more=has_more)

    async def get_item(self, request: PlainRequest) -> PlainResponse:
        parse_query(ConversationItemQuery, request.query)
        tenant, conversation_id = _named(request)
        item = await self._conversations.item(tenant, conversation_id, _item_id(request))
        return PlainResponse(item.content)

    async def delete_item(self, request: PlainRequest) -> PlainResponse:
        tenant, conversation_id = _named(request)
        return _conversation(
            await self._conversations.delete_item(tenant, conversation_id, _item_id(request))
        )


def _named(request: PlainRequest) -> tuple[str, str]:
    return request.caller.tenant, request.parameters["id"]


def _item_id(request: PlainRequest) -> str:
    item_id = request.parameters["item_id"]
    if not _ITEM_ID.fullmatch(item_id):
        raise NotFound(f"{item_id[:128]!r} is no id of an item", field="item_id")
    return item_id


def _new_items(items: Sequence[Item | ItemReference]) -> list[StoredItem]:
    """Returns the items of a body, each with an id. Raises InvalidRequest for a reference: the
    conversation would need the item itself."""
    given: list[Item] = []
    for index, item in enumerate(items):
        if isinstance(item, ItemReference):
            text = f"Invalid 'items[{index}]': a conversation takes the item, not a reference."
            raise InvalidRequest(text, f"items[{index}].type", reason=INVALID_VALUE)
        given.append(item)
    check_item_ids(given, "items")
    written = items_as_json(given, lambda prefix, _: f"{prefix}_{secrets.token_hex(24)}")
    return [StoredItem(orjson.loads(item)["id"], item) for item in written]


async def _parse(model: type[M], request: PlainRequest, *, is_optional: bool = False) -> M:
    """Raises InvalidRequest with the path of the first invalid field.

    - is_optional: whether an empty body is one without fields.
    """
    raw = await read_body(request.receive, _BODY_BYTES_MAX)
    try:
        return model.model_validate(parse_json_object(raw) if raw or not is_optional else {})
    except ValidationError as error:
        raise invalid_value(error) from None


def _conversation(conversation: pb.Conversation) -> PlainResponse:
    return PlainResponse(
        orjson.dumps(
            {
                "id": conversation.id,
                "object": "conversation",
                "created_at": conversation.created_at,
                "metadata": dict(conversation.metadata),
            }
        )
    )


def _page(items: Sequence[StoredItem], *, has_more: bool) -> PlainResponse:
    # Any: JSON.
    value: dict[str, Any] = {
        "object": "list",
        "data": [orjson.Fragment(item.content) for item in items],
        "first_id": items[0].id if items else None,
        "last_id": items[-1].id if items else None,
        "has_more": has_more,
    }
    return PlainResponse(orjson.dumps(value))
