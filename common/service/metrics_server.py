"""Metrics that all services have, and a Prometheus scrape port for services without HTTP."""

from __future__ import annotations

import asyncio
import hmac
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    make_wsgi_app,
)
from prometheus_client.exposition import ThreadingWSGIServer

from common.errors import Conflict
from common.runtime import telemetry
from common.service.state_metrics import Reading, StateCollector, counter

INSTANCE_INFO = "kvmesh_instance_info"
# In which a client must finish the TLS handshake, and send its request.
CLIENT_TIMEOUT_S = 10.0


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Adds memory, CPU time, open files and garbage collections of this process, the tasks of the
    running event loop, and the spans that were exported and dropped."""
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    loop = asyncio.get_running_loop()
    tasks = Gauge("kvmesh_event_loop_tasks", "Tasks of the event loop", registry=registry)
    tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
    registry.register(StateCollector("kvmesh_spans", _read_span_exports))


def _read_span_exports() -> Iterator[Reading]:
    queues = telemetry.installed().queues
    exported = {queue.endpoint: queue.exported for queue in queues}
    yield counter("exported", "Spans that a collector accepted.", exported, label="endpoint")
    dropped = {queue.endpoint: queue.dropped for queue in queues}
    text = "Spans that a collector did not accept, or for which its queue had no space."
    yield counter("dropped", text, dropped, label="endpoint")


def add_instance_info(
    registry: CollectorRegistry,
    service: str,
    instance_id: int,
    stable_name: str,
    *,
    role: str = "",
    model: str = "",
) -> None:
    """Adds the names of the process: a metric with the value 1, whose labels join its id in other
    metrics, logs and spans with its stable name, and its metrics with role and model.

    role: of a worker, the legs that it runs; "": the service.
    model: that a worker serves.
    """
    text = "1 for the process that serves these metrics, with its names, role and model."
    labels = {
        "service": service,
        "role": role or service,
        "model": model,
        "instance_id": str(instance_id),
        "stable_name": stable_name,
    }
    Gauge(INSTANCE_INFO, text, tuple(labels), registry=registry).labels(**labels).set(1)


def bearer_check(key: str | None) -> Callable[[bytes], bool]:
    """Returns whether an Authorization header carries the key; always if it is None."""
    expected = f"Bearer {key}".encode()
    return lambda header: key is None or hmac.compare_digest(header, expected)


def serve_metrics(
    registry: CollectorRegistry,
    host: str,
    port: int,
    *,
    key: str | None = None,
    context: ssl.SSLContext | None = None,
) -> tuple[str, Callable[[], Awaitable[None]]]:
    """Serves in a thread (port 0: any); returns address and close. Raises Conflict if in use.

    key: of the clients, or None. context: for TLS, or None.
    """
    try:
        server = make_server(
            host, port, _with_key(make_wsgi_app(registry), key), _server_class(host), _Handler
        )
    except OSError as error:
        raise Conflict(
            f"cannot serve metrics on {host}:{port} (--metrics-port): {error.strerror}",
            field="metrics_port",
            reason="ADDRESS_IN_USE",
        ) from error
    if context is not None:
        # The thread of a connection does the handshake, not the one that accepts connections.
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(1.0)

    return f"{host}:{server.server_port}", lambda: asyncio.to_thread(close)


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def log_message(self, *_: object) -> None:
        pass


# Any: WSGI leaves its types open.
def _with_key(app: Callable[..., Any], key: str | None) -> Callable[..., Iterable[bytes]]:
    is_permitted = bearer_check(key)

    def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if is_permitted(environ.get("HTTP_AUTHORIZATION", "").encode()):
            parts: Iterable[bytes] = app(environ, start_response)
            return parts
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
        return [b"the metrics key is required: authorization: Bearer ...\n"]

    return serve


def _server_class(host: str) -> type[WSGIServer]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    class Server(ThreadingWSGIServer):
        address_family = family

        def handle_error(self, *_: object) -> None:
            """Ignores clients that disconnect and handshakes that fail: they are no errors of
            ours."""

    return Server
