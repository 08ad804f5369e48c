"""Metrics of the state of the service, which is read at each scrape.

A service declares them in one function that yields a reading for each metric:

    def read_state(queue: Queue) -> Iterator[Reading]:
        yield gauge("queue_requests", "Requests in the queue.", len(queue))
        yield counter("requests", "Requests by outcome.", queue.ended, label="outcome")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

# A value, or values by that of the label.
Values: TypeAlias = float | Mapping[str, float]
_Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily


@dataclass(frozen=True, slots=True)
class Reading:
    """One metric and its present values."""

    kind: type[_Family]
    name: str
    """Without the prefix of the service."""
    text: str
    """Help."""
    values: Values
    label: str | None
    """Name of the label; None: the metric has one value."""


def gauge(name: str, text: str, values: Values, *, label: str | None = None) -> Reading:
    """Returns the reading of a value that rises and falls."""
    return Reading(GaugeMetricFamily, name, text, values, label)


def counter(name: str, text: str, values: Values, *, label: str | None = None) -> Reading:
    """Returns the reading of a count since the start."""
    return Reading(CounterMetricFamily, name, text, values, label)


class StateCollector(Collector):
    """Reads the metrics of a service at each scrape."""

    def __init__(self, prefix: str, read: Callable[[], Iterable[Reading]]) -> None:
        """Creates it without a reading.

        prefix: of the names of the metrics.
        read: called in the thread of the scrape.
        """
        self._prefix = prefix
        self._read = read

    def collect(self) -> Iterator[_Family]:
        for reading in self._read():
            labels = () if reading.label is None else (reading.label,)
            family = reading.kind(f"{self._prefix}_{reading.name}", reading.text, labels=labels)
            if isinstance(reading.values, Mapping):
                for label_value, value in reading.values.items():
                    family.add_metric((label_value,), value)
            else:
                family.add_metric((), reading.values)
            yield family
