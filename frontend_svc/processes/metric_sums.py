"""Metrics of several processes as one (pure, but for the registry that is read)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from frontend_svc.metrics.gauges import Across, across_processes

MONOTONIC = ("counter", "histogram")
_JOIN: Mapping[str, Callable[[tuple[float, float]], float]] = {
    Across.SUM: sum,
    Across.MAX: max,
    Across.MIN: min,
}

# Any: (name, type, help, rule across processes, [[sample name, labels, value, exemplar], ...]), as
# JSON. exemplar: labels, value and Unix time, or None.
Family = tuple[str, str, str, str, list[Any]]
# Name of a sample, and its labels.
_Series = tuple[str, tuple[tuple[str, str], ...]]


def read_families(registry: CollectorRegistry) -> list[Family]:
    """Returns the present values of a registry. Raises TypeError for a gauge without a rule."""
    return [
        (
            metric.name,
            metric.type,
            metric.documentation,
            across_processes(metric),
            [
                [sample.name, sample.labels, sample.value, _exemplar(sample)]
                for sample in metric.samples
            ],
        )
        for metric in registry.collect()
    ]


def monotonic(families: Iterable[Family]) -> list[Family]:
    """Returns the families that outlive their process: all but gauges."""
    return [family for family in families if family[1] in MONOTONIC]


def sum_families(processes: Iterable[Sequence[Family]]) -> list[Family]:
    """Returns the families of one frontend: each sample by the rule of its metric, with the newest
    exemplar."""
    # Any: an exemplar.
    merged: dict[str, tuple[Family, dict[_Series, tuple[float, Any]]]] = {}
    for families in processes:
        for family in families:
            name, _, _, across, samples = family
            values = merged.setdefault(name, (family, {}))[1]
            for sample, labels, value, exemplar in samples:
                key = sample, tuple(labels.items())
                join = min if sample.endswith("_created") else _JOIN[across]
                if key in values:
                    known, known_exemplar = values[key]
                    value = join((known, value))
                    exemplar = _newest(known_exemplar, exemplar)
                values[key] = (value, exemplar)
    return [
        (*family[:4], [[name, dict(labels), *value] for (name, labels), value in values.items()])
        for family, values in merged.values()
    ]


def as_registry(families: Sequence[Family]) -> CollectorRegistry:
    """Returns a registry with these values, for an encoder."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Values(families))
    return registry


class _Values(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for name, kind, text, _, samples in self._families:
            metric = Metric(name, text, kind)
            for sample, labels, value, exemplar in samples:
                known = None if exemplar is None else Exemplar(*exemplar)
                metric.add_sample(sample, labels, value, exemplar=known)
            yield metric


# Any: an exemplar as JSON.
def _exemplar(sample: Sample) -> list[Any] | None:
    found = sample.exemplar
    return None if found is None else [found.labels, found.value, found.timestamp]


# Any: exemplars as JSON.
def _newest(*exemplars: Any) -> Any:
    """Returns the exemplar with the greatest time, or None."""
    return max((one for one in exemplars if one is not None), key=lambda e: e[2], default=None)
