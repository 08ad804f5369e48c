"""A Prometheus scrape port for rooms that have no HTTP of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, start_http_server

from common.errors import Conflict


def serve_metrics(
    registry: CollectorRegistry, host: str, port: int
) -> tuple[str, Callable[[], Awaitable[None]]]:
    """Serves a registry from a thread (port 0: any); `host:port`, and what closes it.

    Raises Conflict when the address cannot be had.
    """
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise Conflict(
            f"cannot serve metrics on {host}:{port} (--host, --metrics-port): {error.strerror}",
            field="metrics_port",
            reason="ADDRESS_IN_USE",
        ) from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(1.0)

    return f"{host}:{server.server_port}", lambda: asyncio.to_thread(close)
