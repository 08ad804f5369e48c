"""Metrics of a batch service."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry

from batch_svc.runner.responses import ResponseRunner
from batch_svc.runner.runner import Runner
from common.service.state_metrics import Reading, StateCollector, counter, gauge

PREFIX = "kvmesh_batch"
_OUTCOMES = ("completed", "failed", "retried")
_ENDS = ("completed", "incomplete", "failed", "retried")


def build_metrics(runner: Runner, responses: ResponseRunner) -> CollectorRegistry:
    """Returns the metrics of one process."""
    metrics = CollectorRegistry()
    metrics.register(StateCollector(PREFIX, partial(_read, runner, responses)))
    return metrics


def _read(runner: Runner, responses: ResponseRunner) -> Iterator[Reading]:
    text = "1 if this process runs the lines of the batches."
    yield gauge("has_lease", text, runner.has_lease)
    in_flight = dict(runner.in_flight)
    yield gauge("running", "Batches whose lines are sent.", len(in_flight))
    yield gauge("lines_in_flight", "Lines without a response.", sum(in_flight.values()))
    text = "Most lines in flight, by what the mesh accepted."
    yield gauge("lines_in_flight_limit", text, runner.pace.limit)
    text = "Results that wait for the database."
    yield gauge("results_unwritten", text, runner.unwritten)
    text = "Tries of lines by their outcome."
    outcomes = {name: runner.outcomes[name] for name in _OUTCOMES}
    yield counter("lines", text, outcomes, label="outcome")
    text = "Responses in the background that a frontend runs."
    yield gauge("responses_in_flight", text, responses.in_flight)
    text = "Responses in the background by their end; retried: tries that were not the last."
    ends = {name: responses.outcomes[name] for name in _ENDS}
    yield counter("responses", text, ends, label="outcome")
