"""Queries of stored responses and of their input items (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from common.errors import InvalidRequest
from frontend_svc.openai.body.fields import StrictModel, refuse
from frontend_svc.openai.body.validation_errors import INVALID_VALUE
from frontend_svc.responses.schema import Include

_NO_OBFUSCATION = "events have no obfuscation"


class ResponseQuery(StrictModel):
    """The query of `GET /v1/responses/{id}`. stream: its events instead, also while it runs, if it
    was made with `background` and `stream`. starting_after: number of the last event that the
    client has."""

    include: Include | None = None
    stream: Annotated[bool, Field(strict=False)] = False
    starting_after: Annotated[int, Field(ge=0, lt=1 << 53, strict=False)] | None = None
    include_obfuscation: Annotated[object, refuse(_NO_OBFUSCATION, "false")] = None


class ItemsQuery(StrictModel):
    """The query of `GET /v1/responses/{id}/input_items`. limit: items of a page. after: the id of
    the item before the page. order: newest first by default."""

    include: Include | None = None
    limit: Annotated[int, Field(ge=1, le=100, strict=False)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


def items_page(raw_items: Sequence[bytes], query: ItemsQuery) -> bytes:
    """Returns a page of items as JSON. raw_items: all items, oldest first, each as JSON."""
    # Any: JSON.
    items: list[dict[str, Any]] = [orjson.loads(item) for item in raw_items]
    if query.order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if query.after is not None:
        if query.after not in ids:
            text = f"Invalid 'after': the response has no input item {query.after!r}."
            raise InvalidRequest(text, "after", reason=INVALID_VALUE)
        items = items[ids.index(query.after) + 1 :]
    page = items[: query.limit]
    return orjson.dumps(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
    )
