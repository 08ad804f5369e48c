"""`GET /v1/internal/usage`: the records of use of this frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Final, Literal

from pydantic import Field

from common.usage import DAY_S, HOUR_S, Dimension, UsageQuery
from frontend_svc.endpoints.plain import PlainRequest, PlainResponse
from frontend_svc.endpoints.query import parse_query
from frontend_svc.openai.body.fields import StrictModel
from frontend_svc.usage.store import UsageStore

# Of OpenAI's parameters: the width of buckets in seconds, the default and the greatest `limit`.
_WIDTHS: Final = {"1h": (HOUR_S, 24, 168), "1d": (DAY_S, 7, 31)}

Time = Annotated[int, Field(ge=0, le=253_402_300_799, strict=False)]


class UsageParameters(StrictModel):
    """The query of `GET /v1/internal/usage`, as in OpenAI's usage API. Times are Unix seconds.
    end_time: exclusive; by default now. limit: buckets of a page, at most 168 hours or 31 days.
    page: `next_page` of the page before."""

    start_time: Time
    end_time: Time | None = None
    bucket_width: Literal["1h", "1d"] = "1d"
    group_by: list[Dimension] | None = None
    limit: Annotated[int, Field(ge=1, le=168, strict=False)] | None = None
    page: Time | None = None


class UsageHandlers:
    """The handler of the route. now_s: returns Unix seconds."""

    def __init__(self, store: UsageStore, now_s: Callable[[], float]) -> None:
        self._store = store
        self._now_s = now_s

    async def list(self, request: PlainRequest) -> PlainResponse:
        query = usage_query(parse_query(UsageParameters, request.query), self._now_s())
        page = await asyncio.to_thread(self._store.read, query)
        return PlainResponse(await asyncio.to_thread(page.to_json, query.by))


def usage_query(parameters: UsageParameters, now_s: float) -> UsageQuery:
    """Returns the query with all defaults."""
    width_s, limit, limit_max = _WIDTHS[parameters.bucket_width]
    end_s = int(now_s) + 1 if parameters.end_time is None else parameters.end_time
    return UsageQuery(
        parameters.start_time if parameters.page is None else parameters.page,
        end_s,
        width_s,
        tuple(dict.fromkeys(parameters.group_by or ())),
        min(parameters.limit or limit, limit_max),
    )
