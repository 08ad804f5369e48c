"""Metrics that all services have, and a Prometheus scrape port for services without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)

from common.errors import Conflict


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Adds memory, CPU time, open files and garbage collections of this process, and the tasks of
    the running event loop."""
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    loop = asyncio.get_running_loop()
    tasks = Gauge("kvmesh_event_loop_tasks", "Tasks of the event loop", registry=registry)
    tasks.set_function(lambda: len(asyncio.all_tasks(loop)))


def serve_metrics(
    registry: CollectorRegistry, host: str, port: int
) -> tuple[str, Callable[[], Awaitable[None]]]:
    """Serves in a thread (port 0: any); returns address and close. Raises Conflict if in use."""
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
