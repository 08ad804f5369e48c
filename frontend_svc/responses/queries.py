"""Queries of stored responses and of their input items (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import Field, ValidationError

from common.errors import InvalidRequest
from frontend_svc.openai.body.fields import StrictModel, refuse
from frontend_svc.openai.body.validation_errors import INVALID_VALUE, invalid_value
from frontend_svc.responses.schema import Include

_NO_EVENTS = "the events of a response are not stored"
# Parameters that are lists, of all routes.
_LISTS = frozenset({"include", "group_by"})


class ResponseQuery(StrictModel):
    """The query of `GET /v1/responses/{id}`."""

    include: Include | None = None
    stream: Annotated[object, refuse(_NO_EVENTS, "false")] = None
    starting_after: Annotated[object, refuse(_NO_EVENTS)] = None
    include_obfuscation: Annotated[object, refuse(_NO_EVENTS, "false")] = None


class ItemsQuery(StrictModel):
    """The query of `GET /v1/responses/{id}/input_items`. limit: items of a page. after: the id of
    the item before the page. order: newest first by default."""

    include: Include | None = None
    limit: Annotated[int, Field(ge=1, le=100, strict=False)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


Q = TypeVar("Q", bound=StrictModel)


def parse_query(model: type[Q], pairs: Iterable[tuple[str, str]]) -> Q:
    """pairs: names and values; a list has a name of `_LISTS`, also with `[]`. Raises InvalidRequest
    with the name of the first invalid parameter."""
    # Any: texts, and lists of texts.
    values: dict[str, Any] = {}
    for name, value in pairs:
        name = name.removesuffix("[]")
        if name in _LISTS:
            values.setdefault(name, []).append(value)
        else:
            values[name] = value
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise invalid_value(error) from None


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
