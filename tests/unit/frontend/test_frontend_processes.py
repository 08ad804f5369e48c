"""Sums of the metrics of several processes, and the settings of one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from common.service.metrics_server import add_instance_info, add_process_metrics
from frontend_svc.config import FrontendConfig
from frontend_svc.metrics.gauges import PROCESS_GAUGES, Across, GaugeFamily
from frontend_svc.processes.metric_sums import (
    as_registry,
    monotonic,
    read_families,
    sum_families,
)
from frontend_svc.processes.parent import process_config


class Gauges(Collector):
    """Gauges by name: the rule across processes, and the value."""

    def __init__(self, gauges: Mapping[str, tuple[Across, float]]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[GaugeFamily]:
        for name, (across, value) in self._gauges.items():
            yield GaugeFamily(name, "Now", across, value=value)


def process(requests: int, inflight: int, latency_s: float, drift: float) -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("requests_total", "Requests", ("model",), registry=registry).labels("m").inc(requests)
    registry.register(Gauges({"inflight": (Across.SUM, inflight), "share": (Across.MAX, drift)}))
    Histogram("latency", "Time", registry=registry, buckets=(1, 2)).observe(latency_s)
    return registry


def as_one_metric(metric: Metric) -> CollectorRegistry:
    """Returns a registry with this metric."""

    class One(Collector):
        def collect(self) -> Iterator[Metric]:
            yield metric

    registry = CollectorRegistry()
    registry.register(One())
    return registry


def values(text: bytes) -> dict[str, float]:
    lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
    found = dict(line.rsplit(" ", 1) for line in lines if "_created" not in line)
    return {name: float(value) for name, value in found.items()}


def test_amounts_are_added_and_shares_are_not() -> None:
    both = [read_families(process(3, 1, 0.5, 0.25)), read_families(process(4, 2, 1.5, 0.75))]
    assert values(generate_latest(as_registry(sum_families(both)))) == {
        'requests_total{model="m"}': 7,
        "inflight": 3,
        "share": 0.75,
        'latency_bucket{le="1.0"}': 1,
        'latency_bucket{le="2.0"}': 2,
        'latency_bucket{le="+Inf"}': 2,
        "latency_count": 2,
        "latency_sum": 2.0,
    }


def test_a_gauge_without_a_rule_across_processes_is_an_error() -> None:
    registry = CollectorRegistry()
    Gauge("new_gauge", "Now", registry=registry)
    with pytest.raises(TypeError, match="new_gauge does not declare"):
        read_families(registry)


async def test_processes_join_the_values_of_each_process_gauge_by_its_rule() -> None:
    registry = CollectorRegistry()
    add_process_metrics(registry)
    add_instance_info(registry, "frontend", 7, "frontend-0")
    own = read_families(registry)
    gauges = {name for name, kind, *_ in own if kind == "gauge"}
    of_services = {
        *("registry_reachable", "routable_given_up"),
        "certificate_expiry_timestamp_seconds",
    }
    assert gauges | {f"kvmesh_{name}" for name in of_services} == set(PROCESS_GAUGES)
    one, both = (
        {sample: value for *_, samples in found for sample, _, value, _ in samples}
        for found in (own, sum_families([own, own]))
    )
    equal = {name for name in both if both[name] == one[name] and "_created" not in name}
    assert {"python_info", "process_start_time_seconds"} <= equal
    assert both["process_open_fds"] == 2 * one["process_open_fds"]


def test_the_encoding_of_one_process_is_unchanged() -> None:
    registry = process(3, 1, 0.5, 0.25)
    again = as_registry(sum_families([read_families(registry)]))
    assert generate_latest(again) == generate_latest(registry)


def test_the_newest_exemplar_of_a_bucket_is_kept_across_processes() -> None:
    exemplars = [Exemplar({"trace_id": str(at)}, 0.5, at) for at in (2.0, 1.0)]
    families = []
    for exemplar in exemplars:
        metric = HistogramMetricFamily("latency", "Time", [("1.0", 1, exemplar), ("+Inf", 1)], 0.5)
        families.append(read_families(as_one_metric(metric)))
    both = as_registry(json.loads(json.dumps(sum_families(families))))
    text = openmetrics.generate_latest(both).decode()  # type: ignore[no-untyped-call]
    assert 'latency_bucket{le="1.0"} 2.0 # {trace_id="2.0"} 0.5 2.0' in text


def test_counters_and_histograms_outlive_their_process() -> None:
    ended = monotonic(read_families(process(3, 1, 0.5, 0.25)))
    assert {name for name, *_ in ended} == {"requests", "latency"}


def test_names_ports_and_files_differ_between_processes() -> None:
    config = FrontendConfig(stable_name="f", port=7000, audit_log="a/audit.jsonl", health_port=0)
    one = process_config(config, 1)
    found = (one.stable_name, one.port, one.audit_log, one.request_trace, one.health_port)
    assert found == ("f-1", 7001, "a/audit-1.jsonl", "", 0)
