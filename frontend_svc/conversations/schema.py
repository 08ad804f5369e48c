"""Bodies and queries of conversations (pure)."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from frontend_svc.batches.schema import Metadata
from frontend_svc.openai.body.fields import StrictModel
from frontend_svc.responses.schema import ITEM_ID_PATTERN, Include, InputItem

# Of OpenAI's API.
ITEMS_MAX: Final = 20

Items = Annotated[list[InputItem], Field(max_length=ITEMS_MAX, fail_fast=True)]


class ConversationRequest(StrictModel):
    """The body of `POST /v1/conversations`. items: its first ones."""

    items: Items | None = None
    metadata: Metadata | None = None


class ConversationUpdate(StrictModel):
    """The body of `POST /v1/conversations/{id}`. metadata: in place of all that it has."""

    metadata: Metadata | None


class ConversationItems(StrictModel):
    """The body of `POST /v1/conversations/{id}/items`."""

    items: Annotated[Items, Field(min_length=1)]


class ConversationItemQuery(StrictModel):
    """The query of the routes of one item."""

    include: Include | None = None


class ConversationItemsQuery(StrictModel):
    """The query of `GET /v1/conversations/{id}/items`. limit: items of a page. after: the id of the
    item before the page. order: newest first by default."""

    include: Include | None = None
    limit: Annotated[int, Field(ge=1, le=100, strict=False)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Annotated[str, Field(pattern=ITEM_ID_PATTERN)] | None = None
