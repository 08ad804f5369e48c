"""Metrics that are read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest

from common.service.state_metrics import Reading, StateCollector, counter, gauge


def test_each_scrape_reads_the_values_of_that_moment() -> None:
    waiting = [1]

    def read() -> Iterator[Reading]:
        yield gauge("waiting", "Requests that wait.", len(waiting))
        yield counter("ended", "Requests by outcome.", {"ok": 2, "failed": 0}, label="outcome")
        yield gauge("ranks", "Ranks by state.", {}, label="state")

    registry = CollectorRegistry()
    registry.register(StateCollector("kvmesh_x", read))
    expected = """\
# HELP kvmesh_x_waiting Requests that wait.
# TYPE kvmesh_x_waiting gauge
kvmesh_x_waiting {waiting}
# HELP kvmesh_x_ended_total Requests by outcome.
# TYPE kvmesh_x_ended_total counter
kvmesh_x_ended_total{{outcome="ok"}} 2.0
kvmesh_x_ended_total{{outcome="failed"}} 0.0
# HELP kvmesh_x_ranks Ranks by state.
# TYPE kvmesh_x_ranks gauge
"""
    assert generate_latest(registry).decode() == expected.format(waiting="1.0")
    waiting.append(2)
    assert generate_latest(registry).decode() == expected.format(waiting="2.0")
