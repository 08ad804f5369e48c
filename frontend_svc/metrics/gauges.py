"""Gauges of a frontend, each with the rule by which its processes join their values.

The sum of shares, sizes of a model or states would be wrong, so a gauge without a rule is an error.
Counters and histograms are sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

from prometheus_client import Gauge, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class Across(StrEnum):
    """How the values of several processes of one frontend become one."""

    SUM = "sum"
    """Amounts of one process, requests for example."""
    MAX = "max"
    """Shares, states, and values that all processes observe alike."""
    MIN = "min"


# Gauges that are not declared in the frontend: those of `add_process_metrics`,
# `add_instance_info` and `ServiceApp._read_process`.
PROCESS_GAUGES: Mapping[str, Across] = {
    "kvmesh_certificate_expiry_timestamp_seconds": Across.MIN,
    "kvmesh_event_loop_tasks": Across.SUM,
    "kvmesh_instance_info": Across.MAX,
    "kvmesh_registry_reachable": Across.MIN,
    "kvmesh_routable_given_up": Across.MAX,
    "process_max_fds": Across.SUM,
    "process_open_fds": Across.SUM,
    "process_resident_memory_bytes": Across.SUM,
    "process_start_time_seconds": Across.MIN,
    "process_virtual_memory_bytes": Across.SUM,
    "python_info": Across.MAX,
}


class GaugeFamily(GaugeMetricFamily):
    """A gauge that a collector makes at each scrape."""

    def __init__(
        self,
        name: str,
        text: str,
        across: Across,
        *,
        labels: Sequence[str] = (),
        value: float | None = None,
    ) -> None:
        """Creates it with the value of a gauge without labels, or without a value."""
        super().__init__(name, text, value, labels or None)
        self.across = across


class WrittenGauge(Collector):
    """A gauge that requests write."""

    def __init__(self, name: str, text: str, across: Across, labels: Sequence[str] = ()) -> None:
        self._gauge = Gauge(name, text, labels, registry=None)
        self._across = across
        self._label_names = labels
        self.labels = self._gauge.labels
        # Of a gauge without labels.
        self.inc, self.dec = self._gauge.inc, self._gauge.dec

    def describe(self) -> Iterator[GaugeFamily]:
        """Returns the name, by which a registry detects duplicates."""
        return map(self._with_rule, self._gauge.describe())

    def collect(self) -> Iterator[GaugeFamily]:
        return map(self._with_rule, self._gauge.collect())

    def _with_rule(self, metric: Metric) -> GaugeFamily:
        names = self._label_names
        family = GaugeFamily(metric.name, metric.documentation, self._across, labels=names)
        family.samples = metric.samples
        return family


def across_processes(metric: Metric) -> Across:
    """Returns the rule of a metric. Raises TypeError for a gauge that declares none."""
    if isinstance(metric, GaugeFamily):
        return metric.across
    if metric.type != "gauge":
        return Across.SUM
    if metric.name not in PROCESS_GAUGES:
        raise TypeError(f"the gauge {metric.name} does not declare how processes join its values")
    return PROCESS_GAUGES[metric.name]
