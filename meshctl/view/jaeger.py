"""Reads traces from the query API of Jaeger."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus

# Any: JSON.
from typing import Any

import httpx

from common.errors import Unavailable
from meshctl.view.spans import Span

TIMEOUT_S = 10.0
# How far back a request is searched by its id.
LOOKBACK_S = 7 * 86_400
# The service of the root span of a request, and the attributes with its ids.
_ROOT_SERVICE = "frontend"
_ID_ATTRIBUTES = ("request_id", "x_request_id")


def find_trace(url: str, request_ids: frozenset[str], trace_id: str) -> list[Span]:
    """Returns the spans of a request; none if Jaeger does not have them. Raises Unavailable.

    - url: of the query service, such as http://127.0.0.1:16686.
    - request_ids: any of them may be an attribute of the root span.
    - trace_id: empty: unknown.
    """
    with httpx.Client(base_url=url.rstrip("/"), trust_env=False, timeout=TIMEOUT_S) as http:
        try:
            if trace_id and (spans := _get(http, f"/api/traces/{trace_id}", {})):
                return spans
            for name in _ID_ATTRIBUTES:
                for request_id in sorted(request_ids):
                    now_us = round(time.time() * 1e6)
                    query = {
                        "service": _ROOT_SERVICE,
                        "tags": json.dumps({name: request_id}),
                        "start": str(now_us - LOOKBACK_S * 1_000_000),
                        "end": str(now_us),
                        "limit": "1",
                    }
                    if spans := _get(http, "/api/traces", query):
                        return spans
        except httpx.HTTPError as error:
            message = f"cannot read traces from {url}: {error or type(error).__name__}"
            raise Unavailable(message) from error
        except (ValueError, LookupError, TypeError) as error:
            raise Unavailable(f"{url} is not the query API of Jaeger") from error
    return []


def _get(http: httpx.Client, path: str, query: Mapping[str, str]) -> list[Span]:
    response = http.get(path, params=dict(query))
    if response.status_code == HTTPStatus.NOT_FOUND:
        return []
    traces = response.raise_for_status().json()["data"] or []
    return list(_spans(traces[0])) if traces else []


def _spans(trace: Mapping[str, Any]) -> Iterator[Span]:
    """Yields the spans of a trace; times of Jaeger are microseconds."""
    processes = trace["processes"]
    for span in trace["spans"]:
        process = processes[span["processID"]]
        tags = [*process.get("tags", ()), *span.get("tags", ())]
        parents: list[str] = []
        links: list[str] = []
        for reference in span.get("references") or ():
            is_parent = reference["refType"] == "CHILD_OF" and not parents
            (parents if is_parent else links).append(reference["spanID"])
        yield Span(
            span_id=span["spanID"],
            service=process["serviceName"],
            name=span["operationName"],
            start_ms=span["startTime"] / 1000,
            ms=span["duration"] / 1000,
            parent_id="".join(parents),
            links=tuple(links),
            attributes={tag["key"]: str(tag["value"]) for tag in tags},
        )
