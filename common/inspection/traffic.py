"""Rates and latencies of frontends, from their metrics (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

# Ends the name of the histogram, before which the prefix of all metrics of a frontend stands.
_TTFT = "_time_to_first_token_seconds"


@dataclass(frozen=True, slots=True)
class Sample:
    """The metrics of one frontend, or of several, at one moment."""

    at_s: float
    requests: float = 0.0
    """Ended requests since the start."""
    tokens: float = 0.0
    """Output tokens since the start."""
    inflight: float = 0.0
    queued: float = 0.0
    """Requests without a first token."""
    ttft: Mapping[float, float] = field(default_factory=dict)
    """Requests by the time to their first token: upper bound in seconds -> count of all below."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a frontend has served in a period. None: unknown."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    running: int | None = None
    waiting: int | None = None


def read_sample(text: str, at_s: float) -> Sample:
    """Returns the sums over the models of a Prometheus text. Raises ValueError for another text."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    prefix = next((n.removesuffix(_TTFT) for n in families if n.endswith(_TTFT)), "")

    def total(name: str) -> float:
        family = families.get(f"{prefix}_{name}")
        samples = () if family is None else family.samples
        names = (f"{prefix}_{name}", f"{prefix}_{name}_total")
        return sum(sample.value for sample in samples if sample.name in names)

    ttft: dict[float, float] = {}
    if prefix:
        for sample in families[prefix + _TTFT].samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                ttft[bound] = ttft.get(bound, 0.0) + sample.value
    return Sample(
        at_s,
        total("requests"),
        total("output_tokens"),
        total("inflight_requests"),
        total("queued_requests"),
        ttft,
    )


def sum_samples(samples: Sequence[Sample]) -> Sample:
    """Returns the sum of several frontends at about the same moment."""
    bounds = sorted({bound for sample in samples for bound in sample.ttft})
    return Sample(
        max((sample.at_s for sample in samples), default=0.0),
        sum(sample.requests for sample in samples),
        sum(sample.tokens for sample in samples),
        sum(sample.inflight for sample in samples),
        sum(sample.queued for sample in samples),
        {bound: sum(sample.ttft.get(bound, 0.0) for sample in samples) for bound in bounds},
    )


def sum_traffic(periods: Sequence[tuple[Sample, Sample]]) -> Traffic:
    """Returns the traffic of several frontends. periods: the first and last sample of each, which
    may be of different times."""
    olds, news = [old for old, _ in periods], [new for _, new in periods]
    each = [traffic_between(*period) for period in periods]
    return replace(
        traffic_between(sum_samples(olds), sum_samples(news)),
        requests_per_s=_sum([traffic.requests_per_s for traffic in each]),
        tokens_per_s=_sum([traffic.tokens_per_s for traffic in each]),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def traffic_between(old: Sample, new: Sample) -> Traffic:
    """Returns the traffic of a period. Without a first token in it, the latencies are those since
    the start."""
    seconds = new.at_s - old.at_s
    is_same_process = new.requests >= old.requests and new.tokens >= old.tokens
    ttft = {bound: count - old.ttft.get(bound, 0.0) for bound, count in new.ttft.items()}
    if not is_same_process or not max(ttft.values(), default=0.0):
        ttft = dict(new.ttft)

    def rate(before: float, after: float) -> float | None:
        return (after - before) / seconds if seconds > 0 and is_same_process else None

    return Traffic(
        rate(old.requests, new.requests),
        rate(old.tokens, new.tokens),
        quantile_ms(ttft, 0.5),
        quantile_ms(ttft, 0.99),
        round(new.inflight),
        round(new.queued),
    )


def quantile_ms(buckets: Mapping[float, float], share: float) -> float | None:
    """Returns a quantile of cumulative counts by upper bound in seconds, linear within a bucket;
    None if they are empty."""
    total = max(buckets.values(), default=0.0)
    if not total:
        return None
    rank = share * total
    points = [(0.0, 0.0), *sorted(buckets.items())]
    for (low, below), (high, count) in pairwise(points):
        if count >= rank:
            if math.isinf(high):
                return low * 1000
            return 1000 * (low + (high - low) * (rank - below) / (count - below))
    return None
