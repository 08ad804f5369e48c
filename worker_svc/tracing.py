"""The `engine.generate` span of a leg, measured outside the engine.

An unsampled caller gets no span. The frontend assigns the id of prefill's span at routing, so
decode's span can begin with a link to it although both run at once.
"""

from __future__ import annotations

import time

from opentelemetry import trace

from common.errors import MeshError
from common.request.preprocessed import FinishReason
from common.request.token_stream import LegRequest
from common.runtime import telemetry
from worker_svc.engines.contract import LLMEngineOutput

SPAN_NAME = "engine.generate"
_OPERATIONS = {"embedding": "embeddings", "score": "score"}


class GenerateSpans:
    def __init__(self, model: str, role: str) -> None:
        self._model = model
        self._role = role
        self._tracer = trace.get_tracer("kvmesh.worker")

    def start(self, leg_request: LegRequest) -> GenerateSpan | None:
        """Returns the span of a leg; None if its caller is not sampled."""
        parent = telemetry.context_from_traceparent(leg_request.traceparent)
        if parent is None or not telemetry.is_sampled(parent):
            return None
        request = leg_request.request
        attributes: dict[str, str | int | tuple[str, ...]] = {
            "model": self._model,
            "disagg_role": leg_request.phase or self._role,
            "request_id": leg_request.request_id,
            "attempt": leg_request.attempt,
            "gen_ai.operation.name": _OPERATIONS.get(leg_request.phase, "text_completion"),
            "gen_ai.provider.name": "kvmesh",
            "gen_ai.request.model": self._model,
        }
        if request is not None:
            attributes["input_tokens"] = len(request.token_ids)
            attributes["gen_ai.usage.input_tokens"] = len(request.token_ids)
            if request.annotations:
                attributes["annotations"] = request.annotations
        links = []
        source = request.migration_link if request is not None else None
        if source is not None and (link := telemetry.link(source.trace_id, source.span_id)):
            links.append(link)
            attributes["migration_trace_id"] = source.trace_id
            attributes["migration_span_id"] = source.span_id
        with telemetry.assign_next_span_id(leg_request.span_id or telemetry.new_span_id()):
            span = self._tracer.start_span(
                SPAN_NAME, parent, trace.SpanKind.SERVER, attributes, links
            )
        return GenerateSpan(span)


class GenerateSpan:
    """One open span; it ends exactly once."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._started_s = time.monotonic()
        self._last_output_s: float | None = None
        self._tokens = 0
        self._gaps_ms: list[float] = []

    def output(self, output: LLMEngineOutput) -> None:
        count = len(output.token_ids)
        if not count:
            return
        now = time.monotonic()
        if self._last_output_s is None:
            self._span.set_attribute("ttft_ms", round((now - self._started_s) * 1000, 3))
        else:
            self._gaps_ms += [(now - self._last_output_s) * 1000 / count] * count
        self._last_output_s = now
        self._tokens += count

    def end(self, terminal: LLMEngineOutput) -> None:
        self.output(terminal)  # It may have the last tokens.
        is_cancelled = terminal.finish_reason is FinishReason.CANCELLED
        reason = terminal.finish_reason.value if terminal.finish_reason is not None else ""
        usage = terminal.completion_usage
        details = usage.prompt_tokens_details if usage is not None else None
        if details is not None and details.cached_tokens is not None:
            cached = details.cached_tokens
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", cached)
        self._close(reason, is_cancelled)

    def fail(self, error: MeshError) -> None:
        self._span.set_attribute("error_kind", error.kind)
        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(trace.StatusCode.ERROR, error.message)
        self._close("error", False)

    def drop(self) -> None:
        """Ends the span of a stream that the caller closed."""
        self._span.set_status(trace.StatusCode.ERROR, "dropped")
        self._close("dropped", True)

    def _close(self, finish_reason: str, is_cancelled: bool) -> None:
        gaps = sorted(self._gaps_ms)
        self._span.set_attribute("output_tokens", self._tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", self._tokens)
        self._span.set_attribute("finish_reason", finish_reason)
        self._span.set_attribute("gen_ai.response.finish_reasons", [finish_reason])
        self._span.set_attribute("cancelled", is_cancelled)
        if gaps:
            self._span.set_attribute("avg_itl_ms", round(sum(gaps) / len(gaps), 3))
            self._span.set_attribute("itl_p50_ms", round(_nearest_rank(gaps, 0.50), 3))
            self._span.set_attribute("itl_p99_ms", round(_nearest_rank(gaps, 0.99), 3))
            self._span.set_attribute("itl_max_ms", round(gaps[-1], 3))
        self._span.end()


def _nearest_rank(ascending: list[float], quantile: float) -> float:
    """Returns the smallest value that at least `quantile` of all values do not exceed."""
    rank = -int(-quantile * len(ascending) // 1)
    return ascending[max(0, rank - 1)]
