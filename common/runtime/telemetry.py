"""Traces. Only this module and `span_export.py` import the OpenTelemetry SDK; the others use its
API.

Without an endpoint there is no SDK provider and every span is a no-op. Each endpoint has a queue
and a thread, which exports spans in batches; a collector that does not answer slows neither
requests nor shutdown nor the exports to another one. The SDK's own variables have precedence over
the flags: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER. A parent arrives as a
W3C `traceparent`; `tracestate` is not sent.

The frontend chooses the id of prefill's span before that span exists, so that decode can link to it
at its own start: `assign_next_span_id` makes the next span of this context take a given id.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.runtime import env
from common.runtime.otlp import OtlpEndpoint
from common.runtime.span_export import ClientFiles, ExportQueue, open_queue, shut_down

LOG = structlog.get_logger(__name__)

# Attribute of the resource of each span.
STABLE_NAME = "kvmesh.stable_name"

_SPAN_ID = re.compile(r"(?!0{16})[0-9a-f]{16}")
_TRACEPARENT = "traceparent"
_propagator = TraceContextTextMapPropagator()
_next_span_id: ContextVar[int | None] = ContextVar("kvmesh_next_span_id", default=None)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The result of `setup`. queues: of the endpoints; none: spans are not recorded."""

    queues: tuple[ExportQueue, ...] = ()

    def shutdown(self, timeout_s: float) -> Sequence[str]:
        """Exports and stops; returns the endpoints that did not take all spans in `timeout_s`."""
        return shut_down(self.queues, timeout_s)


_installed = Telemetry()


def installed() -> Telemetry:
    """Returns what the last `setup` of this process made."""
    return _installed


def setup(
    service_name: str,
    instance_id: str,
    endpoints: Iterable[OtlpEndpoint],
    sample_ratio: float,
    stable_name: str = "",
    files: ClientFiles | None = None,
) -> Telemetry:
    """Installs the tracer provider of the process. Raises InvalidRequest if the files of an https
    endpoint cannot be used.

    - stable_name: of the instance; empty: it has none.
    - files: for https endpoints; None: what the SDK's variables name.
    """
    global _installed
    queues = tuple(open_queue(endpoint, files or ClientFiles()) for endpoint in endpoints)
    _installed = Telemetry(queues)
    if queues:
        provider = tracer_provider(service_name, instance_id, queues, sample_ratio, stable_name)
        trace.set_tracer_provider(provider)
    return _installed


def tracer_provider(
    service_name: str,
    instance_id: str,
    queues: Iterable[ExportQueue],
    sample_ratio: float,
    stable_name: str = "",
) -> TracerProvider:
    """Returns a provider that is not installed."""
    names = {"service.name": service_name, "service.instance.id": instance_id}
    own = Resource(names | ({STABLE_NAME: stable_name} if stable_name else {}))
    has_sampler = "OTEL_TRACES_SAMPLER" in env.environ()
    provider = TracerProvider(
        # None: the SDK builds the sampler of OTEL_TRACES_SAMPLER.
        sampler=None if has_sampler else ParentBased(TraceIdRatioBased(sample_ratio)),
        resource=Resource.create().merge(own).merge(OTELResourceDetector().detect()),
        id_generator=_AssignableIdGenerator(),
        shutdown_on_exit=False,  # The lifecycle calls it, with a time limit.
    )
    for queue in queues:
        provider.add_span_processor(queue)
    return provider


class _AssignableIdGenerator(RandomIdGenerator):
    """Random ids, except for a span with an id set by `assign_next_span_id`."""

    def generate_span_id(self) -> int:
        assigned_id = _next_span_id.get()
        if assigned_id is None:
            return super().generate_span_id()
        _next_span_id.set(None)  # An id used twice would break the trace.
        return assigned_id


def new_span_id() -> str:
    """Returns a random span id, 16 hex digits, not zero."""
    return f"{random.getrandbits(64) or 1:016x}"


@contextmanager
def assign_next_span_id(span_id: str) -> Iterator[None]:
    """The first span started inside takes this id. A malformed id is ignored with a debug log."""
    if not _SPAN_ID.fullmatch(span_id):
        LOG.debug("malformed_span_id", span_id=span_id)
        yield
        return
    token = _next_span_id.set(int(span_id, 16))
    try:
        yield
    finally:
        _next_span_id.reset(token)


def link(trace_id: str, span_id: str) -> trace.Link | None:
    """Returns a link to a span of another process; None, with a debug log, if an id is
    malformed."""
    context = context_from_traceparent(f"00-{trace_id}-{span_id}-01")
    return None if context is None else trace.Link(_span_context(context))


def current_traceparent() -> str | None:
    """Returns the W3C traceparent of the current span; None outside a trace."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get(_TRACEPARENT)


def context_from_traceparent(traceparent: str | None) -> Context | None:
    """Returns a context with a remote parent; None if it is missing or (with a debug log)
    malformed."""
    if not traceparent:
        return None
    context = _propagator.extract({_TRACEPARENT: traceparent}, Context())
    if not _span_context(context).is_valid:
        LOG.debug("malformed_traceparent", traceparent=traceparent[:64])
        return None
    return context


def is_sampled(context: Context) -> bool:
    return _span_context(context).trace_flags.sampled


def _span_context(context: Context) -> trace.SpanContext:
    return trace.get_current_span(context).get_span_context()
