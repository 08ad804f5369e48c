"""The OTLP receiver: TraceService over gRPC, on a port of its own.

Services send their spans with the exporter of OpenTelemetry, which proves no mesh token; a key in
the header `authorization` (`OTEL_EXPORTER_OTLP_HEADERS`) protects an open port.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import structlog
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from common.rpc import channel as rpc
from console_svc.traces.spans import ATTRIBUTES_MAX, EVENTS_MAX, LINKS_MAX, Span, cut
from console_svc.traces.store import TraceStore

# Of one call; exporters send at most 512 spans.
MESSAGE_BYTES_MAX = 4 << 20
CALLS_MAX = 32
CONNECTION_CALLS_MAX = 8

_STABLE_NAME = "kvmesh.stable_name"
_ERROR = trace_pb2.Status.STATUS_CODE_ERROR
_TRACE_ID_BYTES = 16

log = structlog.get_logger()


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Puts the spans of exporters into a store."""

    def __init__(self, store: TraceStore, key: str | None) -> None:
        """key: that exporters send as a bearer token; None: they need none."""
        self._store = store
        self._expected = None if key is None else f"Bearer {key}".encode()
        self.refused = 0
        """Calls without the key."""

    # Any: the generated classes are not typed.
    async def Export(self, request: Any, context: Any) -> Any:
        if not self._is_permitted(dict(context.invocation_metadata() or ())):
            self.refused += 1
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the OTLP key is required: authorization: Bearer"
            )
        self._store.add(read_spans(request, self._store))
        return trace_service_pb2.ExportTraceServiceResponse()

    def _is_permitted(self, metadata: dict[str, str | bytes]) -> bool:
        if self._expected is None:
            return True
        sent = metadata.get("authorization", "")
        return hmac.compare_digest(sent.encode() if isinstance(sent, str) else sent, self._expected)


class ReceiverServer:
    """The gRPC server of a receiver."""

    def __init__(self, receiver: Receiver) -> None:
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.max_concurrent_streams", CONNECTION_CALLS_MAX),
                ("grpc.so_reuseport", 0),
                ("grpc.server_handshake_timeout_ms", 10_000),
            ],
            maximum_concurrent_rpcs=CALLS_MAX,
        )
        # Any: the generated functions are not typed.
        add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add(receiver, self._server)

    async def start(self, host: str, port: int) -> int:
        """Serves (port 0: any); returns the port. Raises Conflict."""
        rpc.check_bindable(host, port, "otlp_port")
        bound = self._server.add_insecure_port(rpc.join_address(host, port))
        await self._server.start()
        return bound

    async def stop(self, grace_s: float | None) -> None:
        await self._server.stop(grace_s)


def read_spans(
    request: trace_service_pb2.ExportTraceServiceRequest, store: TraceStore
) -> Iterator[Span]:
    """Yields the spans of a message that the store admits."""
    now = time.monotonic()
    for of_resource in request.resource_spans:
        names = {
            attribute.key: _text(attribute.value)
            for attribute in of_resource.resource.attributes[:ATTRIBUTES_MAX]
        }
        service = names.get("service.name", "")
        member = names.get(_STABLE_NAME) or names.get("service.instance.id", "")
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                trace_id = span.trace_id.hex()
                is_valid = len(span.trace_id) == _TRACE_ID_BYTES and len(span.span_id) == 8
                if is_valid and store.admits(trace_id, now):
                    yield _read_span(span, trace_id, service, member)


def _read_span(span: trace_pb2.Span, trace_id: str, service: str, member: str) -> Span:
    attributes = {
        cut(attribute.key): _text(attribute.value) for attribute in span.attributes[:ATTRIBUTES_MAX]
    }
    is_error = span.status.code == _ERROR
    return Span(
        trace_id=trace_id,
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        service=cut(service),
        member=cut(member),
        name=cut(span.name),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        links=tuple(link.span_id.hex() for link in span.links[:LINKS_MAX]),
        attributes=attributes,
        events=tuple((event.time_unix_nano, cut(event.name)) for event in span.events[:EVENTS_MAX]),
        error=cut(span.status.message or attributes.get("error.type", "error")) if is_error else "",
    )


def _text(value: common_pb2.AnyValue) -> str:
    """Returns a value as text; a list as its items, joined by commas."""
    match value.WhichOneof("value"):
        case "string_value":
            return cut(value.string_value)
        case "array_value":
            return cut(", ".join(map(_text, value.array_value.values[:ATTRIBUTES_MAX])))
        case None:
            return ""
        case kind:
            return cut(str(getattr(value, kind)))
