"""An OTLP gRPC receiver that shows the spans of a trace over HTTP; in place of the collector.

    python3 otlp_receiver.py GRPC_PORT HTTP_PORT

`GET /TRACE_ID` returns a JSON list of its spans. It runs in an image of KVMesh, for its packages.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

SPANS_MAX = 100_000
RECEIVED: deque[dict[str, Any]] = deque(maxlen=SPANS_MAX)


def span_as_json(service: str, span: trace_pb2.Span) -> dict[str, Any]:
    """Returns what tests read of a span."""
    return {
        "service": service,
        "name": span.name,
        "trace_id": span.trace_id.hex(),
        "span_id": span.span_id.hex(),
        "attributes": {a.key: a.value.string_value for a in span.attributes},
        "links": [link.span_id.hex() for link in span.links],
    }


class SpanReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Stores the last SPANS_MAX spans."""

    # Any: grpc's context is generic in the stubs only.
    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                service = names.get("service.name", "")
                RECEIVED.extend(span_as_json(service, span) for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


class TraceHandler(BaseHTTPRequestHandler):
    """Serves the spans."""

    def do_GET(self) -> None:
        trace_id = self.path.strip("/")
        body = json.dumps([s for s in tuple(RECEIVED) if s["trace_id"] == trace_id]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    grpc_port, http_port = map(int, sys.argv[1:])
    server = grpc.server(ThreadPoolExecutor(4))
    add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(SpanReceiver(), server)  # type: ignore[no-untyped-call]  # generated without types
    server.add_insecure_port(f"0.0.0.0:{grpc_port}")
    server.start()
    ThreadingHTTPServer(("0.0.0.0", http_port), TraceHandler).serve_forever()


if __name__ == "__main__":
    main()
