"""Histograms for one writing thread, and their buckets."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

# Bound, observations at or below it, exemplar.
Bucket: TypeAlias = tuple[str, float] | tuple[str, float, Exemplar]


def log_buckets(low: float, high: float, count: int) -> tuple[float, ...]:
    """Returns 0, then `count` bounds from low to high, evenly spaced in the logarithm. bound(i) =
    low · (high / low)^(i / (count - 1)), rounded to 2 digits. Equal bounds are merged."""
    assert 0 < low < high, "bounds must be positive and ascending"
    assert count > 1, "two ends need at least two bounds"
    ratio = high / low
    bounds = [low * ratio ** (step / (count - 1)) for step in range(count)]
    return (0.0, *sorted({round(bound, 1 - math.floor(math.log10(bound))) for bound in bounds}))


class SingleThreadHistogramChild:
    """The counts of one value of the label. `observe` costs a bisection and two additions."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        # By bucket, the newest observation of a sampled trace.
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, count: int = 1) -> None:
        """Adds `value` `count` times. A value equal to a bound counts below it."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.total += value * count

    def observe_traced(self, value: float, trace_id: str) -> None:
        """Adds `value`, as the exemplar of its bucket if it has a trace id."""
        self.observe(value)
        if trace_id:
            bucket = bisect_left(self._bounds, value)
            self._exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def buckets(self) -> list[Bucket]:
        """Returns (bound, observations at or below it), with the exemplar if there is one; the last
        bound is +Inf."""
        total = 0
        buckets: list[Bucket] = []
        # A copy, so that a scrape in another thread reads consistent counts.
        counts = zip((*self._bounds, math.inf), list(self.counts), strict=True)
        for index, (bound, count) in enumerate(counts):
            total += count
            name = "+Inf" if bound == math.inf else repr(float(bound))
            exemplar = self._exemplars.get(index)
            known = (name, float(total))
            buckets.append(known if exemplar is None else (*known, exemplar))
        return buckets


class SingleThreadHistogram(Collector):
    """A histogram that one thread writes without locks, once a token. prometheus_client's takes 5
    locks and a linear search an observation, and cannot add several equal values at once. label:
    its name; None: it has no label, and one child, ""."""

    def __init__(
        self,
        name: str,
        documentation: str,
        bounds: Sequence[float],
        label: str | None = "model",
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(float(bound) for bound in bounds)
        self._labels = () if label is None else (label,)
        self._children: dict[str, SingleThreadHistogramChild] = {}

    def labels(self, value: str) -> SingleThreadHistogramChild:
        child = self._children.get(value)
        if child is None:
            child = self._children[value] = SingleThreadHistogramChild(self._bounds)
        return child

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Returns the name, by which a registry detects duplicates."""
        return (self._family(),)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = self._family()
        for value, child in list(self._children.items()):
            values = (value,) if self._labels else ()
            family.add_metric(values, child.buckets(), child.total)
        yield family

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
