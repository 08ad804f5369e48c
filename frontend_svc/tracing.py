"""The span of an HTTP request: the root of a trace, or a child of the client's span."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from opentelemetry import trace

from common.errors import MeshError
from common.runtime import telemetry
from frontend_svc.core.request.types import RequestOutcome

SPAN_NAME = "http-request"


class RequestSpan:
    """The span of one request. It costs almost nothing if it is not sampled.

    traceparent: sent to the other services; "" without a trace. trace_id: 32 hex digits; "" if not
    sampled.
    """

    __slots__ = ("_span", "trace_id", "traceparent")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = ""
        if context.is_valid:
            flags = int(context.trace_flags)
            self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"
        sampled = context.is_valid and context.trace_flags.sampled
        self.trace_id = f"{context.trace_id:032x}" if sampled else ""

    def set_attributes(self, attributes: Mapping[str, str | int | bool]) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def record_first_token(self, ttft_s: float) -> None:
        """Records the time to the first token."""
        if self._span.is_recording():
            self._span.set_attribute("ttft_ms", round(ttft_s * 1000, 3))
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", round(ttft_s, 6))

    def record_outcome(self, outcome: RequestOutcome) -> None:
        """Records what the request came to."""
        if not self._span.is_recording():
            return
        self._span.set_attribute("attempts", outcome.attempts)
        self._span.set_attribute("gen_ai.usage.input_tokens", outcome.usage.prompt_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", outcome.usage.completion_tokens)
        self._span.set_attribute("worker_ids", list(map(str, outcome.worker_ids)))
        if outcome.placed is not None:
            self._span.set_attribute("routing.reasons", list(outcome.placed.reasons))
            self._span.set_attribute("routing.overlap_blocks", outcome.placed.overlap_blocks)

    def end(self, status: int, error: MeshError | None) -> None:
        """Ends the span. status: HTTP status. error: None if the request succeeded."""
        if self._span.is_recording():
            self._span.set_attribute("http.response.status_code", status)
            if error is not None:
                self._span.set_attribute("error.type", type(error).__name__)
                self._span.set_status(trace.StatusCode.ERROR, error.message)
        self._span.end()


def request_span_factory(tracer: trace.Tracer | None = None) -> Callable[[str, str], RequestSpan]:
    """Returns a function (path, client's traceparent or "") → RequestSpan."""
    span_tracer = trace.get_tracer("kvmesh.frontend") if tracer is None else tracer

    def start(path: str, traceparent: str) -> RequestSpan:
        parent = telemetry.context_from_traceparent(traceparent)
        attributes = {"http.request.method": "POST", "url.path": path}
        return RequestSpan(
            span_tracer.start_span(SPAN_NAME, parent, trace.SpanKind.SERVER, attributes)
        )

    return start
