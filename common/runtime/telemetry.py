"""Traces: the only file that imports the OpenTelemetry SDK; everybody else uses its API.

Promises: without an endpoint there is no SDK provider and every span is a no-op; with one, spans
leave in batches from a thread of their own, and a collector that is missing or silent slows neither
serving nor shutdown. Ids travel as lower-case hex (trace 32 digits, span 16), the parent as a W3C
`traceparent`; `tracestate` is not carried.

The frontend gives prefill's span an id before that span exists, so that decode can link to it at
its own start: `assign_next_span_id` makes the next span of this context take a given id.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

LOG = structlog.get_logger(__name__)

# One export may take this long; the queue behind it is bounded and drops the oldest spans.
EXPORT_TIMEOUT_S = 1.0
QUEUE_SPANS_MAX = 4096
BATCH_SPANS_MAX = 512
BATCH_DELAY_S = 0.5

_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_SPAN_ID = re.compile(r"[0-9a-f]{16}")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

_next_span_id: ContextVar[int | None] = ContextVar("kvmesh_next_span_id", default=None)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What `setup` started; `provider` is None when no endpoint was given."""

    provider: TracerProvider | None

    def shutdown(self, timeout_s: float) -> bool:
        """Sends what is queued and stops; False when `timeout_s` was not enough.

        Runs in a daemon thread because the SDK's own shutdown takes no limit.
        """
        if self.provider is None:
            return True
        thread = threading.Thread(
            target=self.provider.shutdown, name="telemetry-shutdown", daemon=True
        )
        thread.start()
        thread.join(timeout_s)
        return not thread.is_alive()


def setup(
    service_name: str, instance_id: str, otlp_endpoint: str | None, sample_ratio: float
) -> Telemetry:
    """Installs the process-wide tracer provider, once. The endpoint is an http(s) URL."""
    if otlp_endpoint is None:
        return Telemetry(None)
    # Imported here: it loads a second gRPC stack and its protos, which tests and tools never need.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint=otlp_endpoint, timeout=EXPORT_TIMEOUT_S)
    provider = tracer_provider(service_name, instance_id, exporter, sample_ratio)
    trace.set_tracer_provider(provider)
    return Telemetry(provider)


def tracer_provider(
    service_name: str, instance_id: str, exporter: SpanExporter, sample_ratio: float
) -> TracerProvider:
    """A provider that is not installed anywhere; `setup` installs one, tests use their own."""
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        resource=Resource.create(
            {"service.name": service_name, "service.instance.id": instance_id}
        ),
        id_generator=_AssignableIdGenerator(),
        shutdown_on_exit=False,  # The lifecycle does it, with a limit.
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=QUEUE_SPANS_MAX,
            schedule_delay_millis=BATCH_DELAY_S * 1000,
            max_export_batch_size=BATCH_SPANS_MAX,
        )
    )
    return provider


class _AssignableIdGenerator(RandomIdGenerator):
    """Random ids, but the next span takes the one that `assign_next_span_id` left in the
    context."""

    def generate_span_id(self) -> int:
        assigned_id = _next_span_id.get()
        if assigned_id is None:
            return super().generate_span_id()
        _next_span_id.set(None)  # One span only: an id used twice would break the trace.
        return assigned_id


def new_span_id() -> str:
    """A random span id, 16 hex digits, never zero."""
    return f"{random.getrandbits(64) or 1:016x}"


@contextmanager
def assign_next_span_id(span_id: str) -> Iterator[None]:
    """The first span started inside takes this id. A malformed id is ignored with a debug log."""
    if not _is_valid_id(_SPAN_ID, span_id):
        LOG.debug("malformed span id ignored", span_id=span_id)
        yield
        return
    token = _next_span_id.set(int(span_id, 16))
    try:
        yield
    finally:
        _next_span_id.reset(token)


def link(trace_id: str, span_id: str) -> trace.Link | None:
    """A link to a span elsewhere; None, with a debug log, when an id is malformed."""
    if not (_is_valid_id(_TRACE_ID, trace_id) and _is_valid_id(_SPAN_ID, span_id)):
        LOG.debug("malformed trace link ignored", trace_id=trace_id, span_id=span_id)
        return None
    return trace.Link(_remote_span_context(trace_id, span_id, trace.TraceFlags.SAMPLED))


def current_traceparent() -> str | None:
    """The W3C traceparent of the current span, or None outside any trace."""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def context_from_traceparent(traceparent: str | None) -> Context | None:
    """A context to start spans in or attach; None without a parent or (debug log) a usable one."""
    if not traceparent:
        return None
    match = _TRACEPARENT.fullmatch(traceparent)
    if (
        match is None
        or match[1] == "ff"
        or (match[1] == "00" and match[5])
        or not (_is_valid_id(_TRACE_ID, match[2]) and _is_valid_id(_SPAN_ID, match[3]))
    ):
        LOG.debug("malformed traceparent ignored", traceparent=traceparent[:64])
        return None
    span_context = _remote_span_context(
        match[2], match[3], int(match[4], 16) & trace.TraceFlags.SAMPLED
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(span_context))


def is_sampled(context: Context) -> bool:
    """Whether the span that a context carries is recorded somewhere."""
    return trace.get_current_span(context).get_span_context().trace_flags.sampled


def _is_valid_id(pattern: re.Pattern[str], text: str) -> bool:
    # W3C: all zeros is not an id.
    return pattern.fullmatch(text) is not None and text.strip("0") != ""


def _remote_span_context(trace_id: str, span_id: str, flags: int) -> trace.SpanContext:
    return trace.SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(flags)
    )
