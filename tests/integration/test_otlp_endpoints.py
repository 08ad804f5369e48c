"""Spans reach OTLP receivers over TLS and with headers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from common.runtime import telemetry
from common.runtime.config import ServiceConfig, read_config
from common.runtime.span_export import ClientFiles, open_queue, shut_down
from tests.kit.certificates import Authority

pytestmark = pytest.mark.slow


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the headers of each export."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str | bytes]] = []

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.headers.append(dict(context.invocation_metadata()))
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def receiving(credentials: grpc.ServerCredentials | None) -> Iterator[tuple[Receiver, int]]:
    server, receiver = grpc.server(ThreadPoolExecutor(1)), Receiver()
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # It has no types.
    add(receiver, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield receiver, port
    finally:
        server.stop(None)


def test_each_endpoint_receives_the_spans_with_its_own_headers_and_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The SDK reads it too.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20two")
    authority = Authority(tmp_path)
    cert, key = authority.issue("collector")
    pair = [(key.read_bytes(), cert.read_bytes())]
    # It requires a certificate of the client.
    mutual = grpc.ssl_server_credentials(pair, authority.ca.read_bytes(), True)
    with receiving(mutual) as (closed, tls_port), receiving(None) as (plain, port):
        secure = f"https://127.0.0.1:{tls_port}"
        client_cert, client_key = authority.issue("service")
        argv = [f"--otlp-endpoint={secure},http://127.0.0.1:{port}"]
        argv += [f"--otlp-ca-path={authority.ca}", f"--otlp-cert-path={client_cert}"]
        argv += [f"--otlp-key-path={client_key}"]
        environ = {"KVMESH_OTLP_HEADERS": f"{secure} authorization=Bearer%20one"}
        config, _ = read_config(ServiceConfig, None, environ, argv)
        files = ClientFiles(config.otlp_ca_path, config.otlp_cert_path, config.otlp_key_path)
        queues = [open_queue(endpoint, files) for endpoint in config.otlp_endpoints]
        tracer = telemetry.tracer_provider("test", "1", queues, 1.0).get_tracer("t")
        tracer.start_span("work").end()
        assert not shut_down(queues, 10.0)
        assert [(queue.exported, queue.dropped) for queue in queues] == [(1, 0), (1, 0)]
    assert [headers.get("authorization") for headers in closed.headers] == ["Bearer one"]
    assert [headers.get("authorization") for headers in plain.headers] == [None]
    assert not caplog.records  # an endpoint without headers is no reason for a warning
