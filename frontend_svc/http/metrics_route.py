"""The scrape route: GET /metrics in Prometheus' text format.

The registry is encoded in a worker thread, so a scrape of many series does not hold up streams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router

METRICS_PATH = "/metrics"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """A route as the service lists it."""

    method: str
    path: str


def metrics_router(
    registry: CollectorRegistry,
    path: str | None = None,
    *,
    encode: Callable[[CollectorRegistry], bytes] = generate_latest,
) -> tuple[list[RouteDoc], Router]:
    """The scrape route of `registry` at `path` (default `/metrics`), and its documentation.

    A registry that cannot be encoded, or not as UTF-8, is answered with 500 and logged.
    """
    route_path = path or METRICS_PATH

    def scrape(_: Request) -> Response:
        try:
            text = encode(registry).decode()
        except Exception:
            # Collectors are anybody's code, so they may raise anything.
            _log.exception("metrics_not_encoded", path=route_path)
            return PlainTextResponse("Failed to encode metrics", status_code=500)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    route = Route(route_path, scrape, methods=["GET"])
    # Starlette adds HEAD by itself.
    route.methods = {"GET"}
    return [RouteDoc("GET", route_path)], Router([route])
