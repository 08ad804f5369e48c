"""Rates and latencies from the metrics of frontends."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from common.inspection.traffic import (
    Sample,
    quantile_ms,
    read_sample,
    sum_samples,
    sum_traffic,
    traffic_between,
)
from frontend_svc.metrics.families import FrontendMetrics


def metrics(prefix: str, requests: int, ttft_s: float) -> str:
    """The metrics of a frontend with ended requests of two tokens each."""
    found, registry = FrontendMetrics(prefix), CollectorRegistry()
    for collector in found.collectors:
        registry.register(collector)
    for model in ("a", "b"):
        series = found.model(model)
        for _ in range(requests):
            found.ended(model, "chat", "stream", "success", "").inc()
            series.output_total.inc(2)
            series.ttft.observe(ttft_s)
    found.model("a").inflight.inc(3)
    found.model("a").queued.inc()
    return generate_latest(registry).decode()


@pytest.mark.parametrize("prefix", ["kvmesh_frontend", "mine"])
def test_the_models_of_a_frontend_are_added_under_any_prefix_of_its_metrics(prefix: str) -> None:
    sample = read_sample(metrics(prefix, 5, 0.02), 7.0)
    assert (sample.at_s, sample.requests, sample.tokens) == (7.0, 10, 20)
    assert (sample.inflight, sample.queued) == (3, 1)
    assert max(sample.ttft.values()) == 10


def test_rates_and_latencies_are_those_of_the_period() -> None:
    old = Sample(10.0, 100, 1000, ttft={0.1: 100.0, 1.0: 100.0, math.inf: 100.0})
    new = Sample(12.0, 110, 1200, 4, 1, {0.1: 100.0, 1.0: 110.0, math.inf: 110.0})
    traffic = traffic_between(old, new)
    assert (traffic.requests_per_s, traffic.tokens_per_s) == (5, 100)
    assert traffic.ttft_p50_ms == pytest.approx(550)
    assert (traffic.running, traffic.waiting) == (4, 1)


def test_without_requests_in_the_period_latencies_are_those_since_the_start() -> None:
    sample = Sample(1.0, 4, 4, ttft={0.1: 4.0, math.inf: 4.0})
    assert traffic_between(sample, sample).ttft_p99_ms == pytest.approx(99)
    assert traffic_between(sample, sample).requests_per_s is None


def test_a_restarted_frontend_has_no_rates_until_the_next_sample() -> None:
    traffic = traffic_between(Sample(1.0, 100, 100), Sample(2.0, 1, 1))
    assert traffic.requests_per_s is None


def test_a_quantile_is_linear_in_its_bucket_and_bounded_by_the_last_finite_one() -> None:
    buckets = {0.1: 0.0, 0.2: 10.0, math.inf: 20.0}
    assert quantile_ms(buckets, 0.25) == pytest.approx(150)
    assert quantile_ms(buckets, 0.99) == pytest.approx(200)
    assert quantile_ms({}, 0.5) is None
    assert quantile_ms({math.inf: 0.0}, 0.5) is None


def test_several_frontends_are_added() -> None:
    total = sum_samples([Sample(1.0, 1, 2, 3, 4, {0.1: 5}), Sample(2.0, 1, 2, 3, 4, {0.1: 5})])
    assert total == Sample(2.0, 2, 4, 6, 8, {0.1: 10})


def test_a_frontend_that_joins_does_not_change_the_rates_of_the_others() -> None:
    known = (Sample(0.0, 0, 0), Sample(10.0, 100, 1000))
    joined = Sample(10.0, 5000, 90_000, 2)
    total = sum_traffic([known, (joined, joined)])
    assert (total.requests_per_s, total.tokens_per_s, total.running) == (10, 100, 2)
    total = sum_traffic([(known[0], Sample(12.0, 120, 1200)), (joined, Sample(12.0, 5002, 90_020))])
    assert (total.requests_per_s, total.tokens_per_s) == (11, 110)
