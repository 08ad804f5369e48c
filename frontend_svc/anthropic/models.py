"""The models in the form of Anthropic's Models API (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import orjson
from pydantic import Field

from common.errors import InvalidRequest
from frontend_svc.openai.body.fields import StrictModel
from frontend_svc.openai.body.validation_errors import INVALID_VALUE

# Any: an entry of `/v1/models` in OpenAI's form, JSON.
Entry = Mapping[str, Any]


class ModelsQuery(StrictModel):
    """The query of `GET /v1/models`."""

    limit: Annotated[int, Field(ge=1, le=1000, strict=False)] = 20
    """Models of a page."""

    after_id: str | None = None
    """The page begins after this model."""

    before_id: str | None = None
    """The page ends before this model."""


def model_info(entry: Entry) -> dict[str, object]:
    """Returns the description of a model."""
    created_at = datetime.fromtimestamp(entry["created"], UTC)
    return {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        "created_at": created_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": entry.get("max_model_len"),
        "max_tokens": None,
    }


def models_page(entries: Sequence[Entry], query: ModelsQuery) -> bytes:
    """Returns a page of the models. Raises InvalidRequest for a cursor that is no model."""
    ids = [entry["id"] for entry in entries]
    first, end = 0, len(entries)
    if query.after_id is not None:
        first = _position(ids, query.after_id, "after_id") + 1
    if query.before_id is not None:
        end = _position(ids, query.before_id, "before_id")
    has_more = end - first > query.limit
    if query.before_id is not None and query.after_id is None:
        first = max(first, end - query.limit)  # the page right before the cursor
    page = entries[first : min(end, first + query.limit)]
    return orjson.dumps(
        {
            "data": [model_info(entry) for entry in page],
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": has_more,
        }
    )


def _position(ids: Sequence[str], cursor: str, field: str) -> int:
    if cursor not in ids:
        text = f"Invalid '{field}': there is no model {cursor!r}."
        raise InvalidRequest(text, field, reason=INVALID_VALUE)
    return ids.index(cursor)
