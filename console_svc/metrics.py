"""Metrics of a console."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry

from common.service.metrics_server import add_instance_info, add_process_metrics
from common.service.state_metrics import Reading, StateCollector, counter, gauge
from console_svc.access.login import Logins
from console_svc.collect.collector import Collector
from console_svc.traces.receiver import Receiver
from console_svc.traces.store import TraceStore

PREFIX = "kvmesh_console"


def build_metrics(
    collector: Collector,
    traces: TraceStore,
    receiver: Receiver,
    logins: Logins,
    viewers: Callable[[], int],
    instance_id: int,
    stable_name: str,
) -> CollectorRegistry:
    """Returns the metrics. viewers: returns the open pages."""

    def read() -> Iterator[Reading]:
        yield gauge("members", "Members that the console shows", len(collector.roster.members))
        yield gauge("viewers", "Open pages", viewers())
        yield gauge("sessions", "Sessions of operators", logins.open_sessions)
        text = "Logins by result"
        counts = {"succeeded": logins.succeeded, "failed": logins.failed}
        yield counter("logins", text, counts, label="result")
        yield counter("member_queries", "Queries of members", collector.queries)
        yield gauge("cycle_seconds", "Duration of the last measurement", collector.cycle_s)
        yield gauge("traces", "Traces that are kept", len(traces))
        yield gauge("trace_bytes", "Memory of the spans, estimated", traces.size_bytes)
        spans = {"kept": traces.received - traces.dropped, "dropped": traces.dropped}
        yield counter("spans", "Spans received", spans, label="result")
        yield counter("otlp_refused", "Calls of exporters without the key", receiver.refused)

    metrics = CollectorRegistry()
    metrics.register(StateCollector(PREFIX, read))
    add_process_metrics(metrics)
    add_instance_info(metrics, "console", instance_id, stable_name)
    return metrics
