"""The use that a frontend has recorded, over HTTP."""

from __future__ import annotations

from dataclasses import replace

import httpx

from common.errors import InvalidRequest
from common.inspection.gateway import ERROR_CHARS_MAX, GatewayError
from common.usage import USAGE_PATH, UsagePage, UsageQuery


async def read_usage(http: httpx.AsyncClient, url: str, query: UsageQuery) -> list[UsagePage]:
    """Returns all pages of a frontend. Raises GatewayError, also for a connection that fails.

    - url: of its routes of administrators (`gateway.admin_url`).
    """
    pages: list[UsagePage] = []
    start_s: int | None = query.start_s
    try:
        # Ends: each page starts after the one before.
        while start_s is not None:
            parameters = replace(query, start_s=start_s).parameters
            response = await http.get(f"{url}{USAGE_PATH}", params=parameters)
            if response.status_code != 200:
                text = f"status {response.status_code}: {response.text[:ERROR_CHARS_MAX]}"
                raise GatewayError(text, response.status_code)
            page = UsagePage.from_json(response.content)
            pages.append(page)
            if page.next_start_s is not None and page.next_start_s <= start_s:
                raise GatewayError(f"the page after {start_s} starts at {page.next_start_s}")
            start_s = page.next_start_s
    except (httpx.HTTPError, InvalidRequest) as error:
        raise GatewayError(str(error) or type(error).__name__) from error
    return pages
