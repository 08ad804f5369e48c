"""The span of an HTTP request: the root of a trace, or a child of the client's span."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from random import Random

from opentelemetry import trace
from opentelemetry.util.types import AttributeValue

from common.errors import MeshError
from common.runtime import telemetry

SPAN_NAME = "http-request"
# Of a traceparent.
_FLAGS = slice(53, 55)
_rng = Random()


class RequestSpan:
    """The span of one request. It costs almost nothing if it is not sampled. traceparent: sent to
    the other services; "" without a trace. trace_id: 32 hex digits; "" if not sampled."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = ""
        if context.is_valid:
            flags = int(context.trace_flags)
            self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"
        sampled = context.is_valid and context.trace_flags.sampled
        self.trace_id = f"{context.trace_id:032x}" if sampled else ""

    def end(
        self, attributes: Callable[[], Mapping[str, AttributeValue]], error: MeshError | None
    ) -> None:
        """Ends the span. attributes: called only if the span is recorded. error: None: success."""
        if self._span.is_recording():
            self._span.set_attributes(attributes())
            if error is not None:
                self._span.set_attribute("error.type", type(error).__name__)
                self._span.set_status(trace.StatusCode.ERROR, error.message)
        self._span.end()


_NO_SPAN = RequestSpan(trace.INVALID_SPAN)


def start_request_span(path: str, traceparent: str, sample_ratio: float | None) -> RequestSpan:
    """Returns a running span. traceparent: of the client, or "". sample_ratio: share of the
    clients' traces that are sampled; None: the client decides."""
    if traceparent and sample_ratio is not None:
        # Not by the trace id, which the client chooses.
        flags = "01" if _rng.random() < sample_ratio else "00"
        traceparent = traceparent[: _FLAGS.start] + flags + traceparent[_FLAGS.stop :]
    elif not traceparent and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return _NO_SPAN  # no collector is set
    parent = telemetry.context_from_traceparent(traceparent)
    attributes = {"http.request.method": "POST", "url.path": path}
    return RequestSpan(_tracer().start_span(SPAN_NAME, parent, trace.SpanKind.SERVER, attributes))


@cache
def _tracer() -> trace.Tracer:
    return trace.get_tracer("kvmesh.frontend")
