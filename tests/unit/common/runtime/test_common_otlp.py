"""Spans go to several endpoints, of which none delays another one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.errors import InvalidRequest
from common.runtime import telemetry
from common.runtime.config import ConfigError, ServiceConfig, read_config
from common.runtime.otlp import OtlpEndpoint
from common.runtime.span_export import (
    QUEUE_SPANS_MAX,
    ClientFiles,
    ExportQueue,
    open_queue,
    shut_down,
)


class StuckExporter(SpanExporter):
    """An exporter that does not return before it is released, and then fails."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.released.wait(30.0)
        return SpanExportResult.FAILURE


def read(*argv: str, **environ: str) -> ServiceConfig:
    return read_config(ServiceConfig, None, environ, argv)[0]


def problems(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*argv, **environ)
    return "\n".join(caught.value.problems)


def test_a_stuck_endpoint_costs_its_own_spans_only_and_they_are_counted() -> None:
    stuck, memory = StuckExporter(), InMemorySpanExporter()
    dead, live = ExportQueue("dead", stuck), ExportQueue("live", memory)
    tracer = telemetry.tracer_provider("test", "1", [dead, live], 1.0).get_tracer("t")
    for number in range(QUEUE_SPANS_MAX + 100):
        tracer.start_span("work").end()
        if number % 1000 == 0:
            live.force_flush()
    live.force_flush()
    assert (dead.exported, dead.dropped) == (0, 100)
    assert (live.exported, live.dropped) == (QUEUE_SPANS_MAX + 100, 0)
    assert len(memory.get_finished_spans()) == QUEUE_SPANS_MAX + 100
    assert shut_down([dead, live], 0.2) == ["dead"]
    stuck.released.set()


def test_spans_of_a_failed_export_are_dropped() -> None:
    exporter = StuckExporter()
    exporter.released.set()
    queue = ExportQueue("refusing", exporter)
    tracer = telemetry.tracer_provider("test", "1", [queue], 1.0).get_tracer("t")
    tracer.start_span("work").end()
    assert not shut_down([queue], 5.0)
    assert (queue.exported, queue.dropped) == (0, 1)


def test_a_setting_has_one_or_several_endpoints() -> None:
    assert read().otlp_endpoints == ()
    assert read(KVMESH_OTLP_ENDPOINT="").otlp_endpoints == ()
    one = read("--otlp-endpoint=http://127.0.0.1:4317/").otlp_endpoints
    assert one == (OtlpEndpoint("http://127.0.0.1:4317"),)
    text = "http://a:4317, https://traces.example.org"
    several = read(KVMESH_OTLP_ENDPOINT=text).otlp_endpoints
    assert [(e.url, e.is_secure) for e in several] == [
        ("http://a:4317", False),
        ("https://traces.example.org", True),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("localhost:4317", "'localhost:4317' does not begin with http:// or https://"),
        ("grpc://a:4317", "'grpc://a:4317' does not begin with http:// or https://"),
        ("http://a", "'http://a' has no port"),
        ("http://:4317", "'http://:4317' has no host"),
        ("http://a:4318/v1/traces", "'http://a:4318/v1/traces' has a path"),
        ("http://a:99999", "'http://a:99999' is no URL"),
        ("http://u:p@a:4317", "has a user name"),
        ("http://a:1,http://b", "'http://b' has no port"),
        ("http://a:1,http://a:1/", "'http://a:1' is given 2 times"),
        (",".join(f"http://a:{n}" for n in range(1, 10)), "9 endpoints; at most 8"),
    ],
)
def test_an_invalid_endpoint_is_named(text: str, problem: str) -> None:
    found = problems(OTEL_EXPORTER_OTLP_ENDPOINT=text)
    assert found.startswith("OTEL_EXPORTER_OTLP_ENDPOINT: ")
    assert problem in found


def test_headers_go_to_their_endpoint(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("http://a:1 authorization=Bearer%20x\nhttps://b:2/ X-Tenant=t=1\n")
    endpoints = ["--otlp-endpoint=http://a:1,https://b:2", f"--otlp-headers-file={file}"]
    assert read(*endpoints).otlp_endpoints == (
        OtlpEndpoint("http://a:1", (("authorization", "Bearer x"),)),
        OtlpEndpoint("https://b:2", (("x-tenant", "t=1"),)),
    )
    one = read("--otlp-endpoint=http://a:1", OTEL_EXPORTER_OTLP_HEADERS="a=1,b=2")
    assert one.otlp_endpoints[0].headers == (("a", "1"), ("b", "2"))


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ("secret", "header 1 is not NAME=VALUE"),
        ("a=secret,=secret", "header 2 is not NAME=VALUE"),
        ("grpc-x=secret", "'grpc-x' cannot be a header"),
        ("x-bin=secret", "'x-bin' cannot be a header"),
        ("x=secret%0Asecret", "the value of the header 'x' has characters"),
        ("http://c:1 x=secret", "'http://c:1', of the header 'x', is no --otlp-endpoint"),
        ("x=secret", "write ENDPOINT x=VALUE: there are 2 endpoints"),
    ],
)
def test_an_invalid_header_is_named_without_its_value(headers: str, problem: str) -> None:
    found = problems("--otlp-endpoint=http://a:1,http://b:1", KVMESH_OTLP_HEADERS=headers)
    assert found.startswith("KVMESH_OTLP_HEADERS:")
    assert problem in found
    assert "secret" not in found


def test_files_of_https_endpoints_are_checked_at_the_start(tmp_path: Path) -> None:
    assert "set both" in problems("--otlp-cert-path=c.pem")
    endpoint = OtlpEndpoint("https://a:1")
    missing, text = tmp_path / "missing.pem", tmp_path / "text.pem"
    text.write_text("no certificate")
    for path in (missing, text):
        with pytest.raises(InvalidRequest, match=f"--otlp-ca-path: cannot use {path}"):
            open_queue(endpoint, ClientFiles(ca=path))
    with pytest.raises(InvalidRequest, match="--otlp-key-path"):
        open_queue(endpoint, ClientFiles(cert=text, key=text))
    # They do not matter without TLS.
    assert not shut_down([open_queue(OtlpEndpoint("http://a:1"), ClientFiles(ca=missing))], 5.0)
