"""The `kv_router.*` spans of a decision, created afterwards from a stopwatch.

A decision takes some 100 µs and a recorded span 55 µs, so that a request that is not sampled
creates none. There is no `kv_router.compute_seq_hashes`: a prefix hash covers the whole prefix.
"""

from __future__ import annotations

import time

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

from common.errors import MeshError
from common.request.placement import Query
from common.runtime import telemetry
from router_svc.core.booking import BookingKey
from router_svc.core.decision import DecisionRecord

# In order of execution.
SPANS = ("kv_router.compute_block_hashes", "kv_router.find_matches", "kv_router.schedule")
# Attributes of the last span: their durations in microseconds; total_us is the sum.
DURATION_ATTRIBUTES = ("hash_us", "find_matches_us", "schedule_us")


class Stopwatch:
    """The laps of one decision, one for each completed or failed stage of SPANS."""

    __slots__ = ("_ends", "began_ns", "started")

    def __init__(self) -> None:
        self.began_ns = time.time_ns()
        self.started = time.perf_counter()
        self._ends: list[float] = []

    def lap(self) -> None:
        """Ends a stage and begins the next."""
        self._ends.append(time.perf_counter())

    def laps_s(self) -> list[float]:
        """Returns the seconds of each ended stage."""
        starts = [self.started, *self._ends]
        return [end - start for start, end in zip(starts, self._ends, strict=False)]

    def total_s(self) -> float:
        """Returns the seconds up to the end of the last stage; if none has ended, up to now."""
        return (self._ends[-1] if self._ends else time.perf_counter()) - self.started


class DecisionSpans:
    """Creates the spans of one router."""

    def __init__(self, tracer: trace.Tracer | None = None) -> None:
        self._tracer = trace.get_tracer("kvmesh.router") if tracer is None else tracer

    def placed(
        self,
        traceparent: str,
        stopwatch: Stopwatch,
        query: Query,
        key: BookingKey | None,
        record: DecisionRecord,
    ) -> None:
        """Creates the spans of a decision, as children of the caller's span."""
        if (parent := _sampled_context(traceparent)) is None:
            return
        decision = record.decision
        attributes: dict[str, AttributeValue] = {
            "model": query.model,
            "request_id": "" if key is None else key.request_id,
            "worker_id": str(decision.worker.worker_id),
            "dp_rank": decision.worker.dp_rank,
            "overlap_blocks": decision.overlap_blocks,
            "predicted_cached_tokens": decision.predicted_cached_tokens,
            "isl_tokens": query.total_tokens,
            "selector": record.selector,
            "reasons": decision.reasons,
            "total_us": stopwatch.total_s() * 1e6,
        }
        for name, lap_s in zip(DURATION_ATTRIBUTES, stopwatch.laps_s(), strict=False):
            attributes[name] = lap_s * 1e6
        if decision.prefill is not None:
            attributes["prefill_worker_id"] = str(decision.prefill.worker_id)
            attributes["prefill_dp_rank"] = decision.prefill.dp_rank
        for row in record.considered:
            if row.placement == decision.worker and row.cost is not None:
                attributes["cost"] = row.cost
        self._write(parent, stopwatch, attributes, None)

    def failed(self, traceparent: str, stopwatch: Stopwatch, error: MeshError) -> None:
        """Creates the spans of the stages up to the failed one, which carries the error."""
        if (parent := _sampled_context(traceparent)) is not None:
            stopwatch.lap()
            self._write(parent, stopwatch, {"error.type": type(error).__name__}, error)

    def _write(
        self,
        parent: Context,
        stopwatch: Stopwatch,
        attributes: dict[str, AttributeValue],
        error: MeshError | None,
    ) -> None:
        laps = stopwatch.laps_s()
        began_ns = stopwatch.began_ns
        for number, (name, lap_s) in enumerate(zip(SPANS, laps, strict=False), 1):
            is_last = number == len(laps)
            span = self._tracer.start_span(
                name, parent, attributes=attributes if is_last else None, start_time=began_ns
            )
            if is_last and error is not None:
                span.set_status(trace.StatusCode.ERROR, error.message)
            began_ns += round(lap_s * 1e9)
            span.end(began_ns)


def _sampled_context(traceparent: str) -> Context | None:
    parent = telemetry.context_from_traceparent(traceparent) if traceparent else None
    return parent if parent is not None and telemetry.is_sampled(parent) else None
