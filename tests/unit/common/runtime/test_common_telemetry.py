"""Traces honour the standard variables of OpenTelemetry."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased

from common.runtime import telemetry
from common.runtime.span_export import ExportQueue


@pytest.fixture(autouse=True)
def no_otel_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


def provider(sample_ratio: float = 1.0) -> TracerProvider:
    queue = ExportQueue("memory", InMemorySpanExporter())
    return telemetry.tracer_provider("router", "7", [queue], sample_ratio)


def test_the_resource_names_the_service_and_its_instance() -> None:
    attributes = provider().resource.attributes
    assert (attributes["service.name"], attributes["service.instance.id"]) == ("router", "7")
    assert "telemetry.sdk.version" in attributes


def test_otel_variables_override_the_service_name_and_add_attributes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "router-eu")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    attributes = provider().resource.attributes
    assert attributes["service.name"] == "router-eu"
    assert attributes["deployment.environment"] == "test"
    assert attributes["service.instance.id"] == "7"


def test_the_sample_ratio_applies_unless_otel_traces_sampler_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(provider(0.0).sampler, ParentBased)
    assert not provider(0.0).get_tracer("t").start_span("s").is_recording()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    assert provider(0.0).get_tracer("t").start_span("s").is_recording()
