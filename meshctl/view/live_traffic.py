"""The lengths of the requests of one model in a period, from the metrics of frontends (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

# Ends the name of the histogram, before which the prefix of all metrics of a frontend stands.
_INPUT = "_input_sequence_tokens"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A histogram of tokens. buckets: requests by upper bound, count of all below. total: tokens of
    all requests."""

    buckets: Mapping[float, float] = field(default_factory=dict)
    total: float = 0.0

    @property
    def count(self) -> float:
        return max(self.buckets.values(), default=0.0)

    def since(self, old: Lengths) -> Lengths:
        """Returns those that came after `old`; all, if the process restarted."""
        if self.count < old.count:
            return self
        buckets = {bound: n - old.buckets.get(bound, 0.0) for bound, n in self.buckets.items()}
        return Lengths(buckets, self.total - old.total)

    def to_json(self) -> dict[str, Any]:
        """Returns `buckets` as (lower bound, upper bound, requests); the last one without a limit
        has twice its lower bound."""
        points = [(0.0, 0.0), *sorted(self.buckets.items())]
        rows = [
            [low, high if high < float("inf") else 2 * low, count - below]
            for (low, below), (high, count) in pairwise(points)
            if count > below
        ]
        return {"buckets": rows, "total": self.total}


@dataclass(frozen=True, slots=True)
class LiveSample:
    """The requests that frontends have served since their start."""

    prompts: Lengths = field(default_factory=Lengths)
    outputs: Lengths = field(default_factory=Lengths)
    cached: Lengths = field(default_factory=Lengths)

    def since(self, old: LiveSample) -> LiveSample:
        return LiveSample(
            self.prompts.since(old.prompts),
            self.outputs.since(old.outputs),
            self.cached.since(old.cached),
        )

    def to_json(self, seconds: float) -> dict[str, Any]:
        """seconds: of the period."""
        return {
            "seconds": seconds,
            "prompts": self.prompts.to_json(),
            "outputs": self.outputs.to_json(),
            "cached_tokens": self.cached.total,
        }


def read_live_sample(text: str, model: str) -> LiveSample:
    """Returns what a Prometheus text has of a model. Raises ValueError for another text."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    prefix = next((n.removesuffix(_INPUT) for n in families if n.endswith(_INPUT)), None)
    if prefix is None:
        return LiveSample()

    def lengths(name: str) -> Lengths:
        found, total = dict[float, float](), 0.0
        family = families.get(f"{prefix}_{name}")
        for sample in () if family is None else family.samples:
            if sample.labels.get("model") != model:
                continue
            if sample.name.endswith("_bucket"):
                found[float(sample.labels["le"])] = sample.value
            elif sample.name.endswith("_sum"):
                total = sample.value
        return Lengths(found, total)

    return LiveSample(
        lengths("input_sequence_tokens"),
        lengths("output_sequence_tokens"),
        lengths("cached_tokens"),
    )


def sum_samples(samples: Sequence[LiveSample]) -> LiveSample:
    """Returns the sum over several frontends."""
    result = LiveSample()
    for one in samples:
        result = replace(
            result,
            prompts=_sum(result.prompts, one.prompts),
            outputs=_sum(result.outputs, one.outputs),
            cached=_sum(result.cached, one.cached),
        )
    return result


def _sum(one: Lengths, other: Lengths) -> Lengths:
    bounds = {*one.buckets, *other.buckets}
    buckets = {b: one.buckets.get(b, 0.0) + other.buckets.get(b, 0.0) for b in bounds}
    return Lengths(buckets, one.total + other.total)
