"""Metrics of several processes as one (pure, but for the registry that is read)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

# Ends of the names of gauges that are no amounts of one process: the greatest value counts.
MAXIMA = (
    *("_info", "_kv_drift_ratio", "_kv_degraded", "_excluded_workers"),
    *("_model_workers", "_model_total_kv_blocks", "_model_max_num_seqs"),
    *("_model_max_num_batched_tokens", "_model_context_length", "_model_block_size"),
)
MINIMA = ("_created", "process_start_time_seconds")
MONOTONIC = ("counter", "histogram")

# Any: (name, type, help, [[sample name, labels, value], ...]), as JSON has it.
Family = tuple[str, str, str, list[Any]]


def read_families(registry: CollectorRegistry) -> list[Family]:
    """The present values of a registry."""
    return [
        (
            metric.name,
            metric.type,
            metric.documentation,
            [[sample.name, sample.labels, sample.value] for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def monotonic(families: Iterable[Family]) -> list[Family]:
    """The families that outlive their process: all but gauges."""
    return [family for family in families if family[1] in MONOTONIC]


def sum_families(processes: Iterable[Sequence[Family]]) -> list[Family]:
    """The families of one frontend: sums, except of MAXIMA and MINIMA."""
    merged: dict[str, tuple[str, str, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}
    for families in processes:
        for name, kind, text, samples in families:
            values = merged.setdefault(name, (kind, text, {}))[2]
            for sample, labels, value in samples:
                key = sample, tuple(labels.items())
                values[key] = _join(sample, values[key], value) if key in values else value
    return [
        (name, kind, text, [[key[0], dict(key[1]), value] for key, value in values.items()])
        for name, (kind, text, values) in merged.items()
    ]


def as_registry(families: Sequence[Family]) -> CollectorRegistry:
    """A registry with these values, for an encoder."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Values(families))
    return registry


def _join(sample: str, one: float, other: float) -> float:
    if sample.endswith(MINIMA):
        return min(one, other)
    return max(one, other) if sample.endswith(MAXIMA) else one + other


class _Values(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for name, kind, text, samples in self._families:
            metric = Metric(name, text, kind)
            for sample in samples:
                metric.add_sample(*sample)
            yield metric
