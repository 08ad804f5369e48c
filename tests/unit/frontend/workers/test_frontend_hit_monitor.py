"""Which requests count for the hit-drift monitor, and what it reports."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from common.errors import WorkerLost
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.request.placement import Placement
from common.request.preprocessed import FinishReason, PromptTokensDetails, usage
from frontend_svc.metrics.collectors import HitDriftCollector
from frontend_svc.metrics.hit_drift import REQUESTS_MIN, WINDOW_S
from frontend_svc.request.types import RequestOutcome
from frontend_svc.workers.hit_monitor import HitMonitor
from tests.kit.placements import decided

WORKER, PREFILL = 7, 8


def instance(number: int, name: str = "", **more: object) -> Instance:
    one = Instance(
        id=number,
        namespace="default",
        service="worker",
        stable_name=name,
        address=f"127.0.0.1:{number}",
        model="m",
        kv_index="events",
    )
    return replace(one, **more)  # type: ignore[arg-type]  # fields of Instance


def outcome(predicted: int, actual: int | None, **more: object) -> RequestOutcome:
    details = None if actual is None else PromptTokensDetails(cached_tokens=actual)
    one = RequestOutcome(
        FinishReason.STOP,
        None,
        replace(usage(100, 5), prompt_tokens_details=details),
        1,
        (WORKER,),
        decided(WORKER, predicted_cached_tokens=predicted),
    )
    return replace(one, **more)  # type: ignore[arg-type]  # fields of RequestOutcome


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def monitored(*instances: Instance) -> tuple[HitMonitor, Clock]:
    snapshot, clock = Snapshot(instances={one.id: one for one in instances}), Clock()
    monitor = HitMonitor(clock, 0.1)
    monitor.on_snapshot(snapshot, SnapshotDiff())
    return monitor, clock


def test_wrong_predictions_of_a_worker_are_reported_once_a_window() -> None:
    monitor, clock = monitored(instance(WORKER, "gpu-3"))
    with capture_logs() as logs:
        for _ in range(3 * REQUESTS_MIN):
            monitor.on_request_end(outcome(0, 64))
    (warning,) = logs
    assert (warning["event"], warning["log_level"]) == ("kv_drift", "warning")
    assert (warning["worker"], warning["worker_id"], warning["drift"]) == ("gpu-3", WORKER, 1.0)
    (message,) = monitor.degraded()
    assert "gpu-3" in message
    assert "100.0%" in message
    clock.now = 2 * WINDOW_S
    assert monitor.degraded() == [], "no wrong prediction in the last window"


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (outcome(0, None), "the engine reports no cached tokens"),
        (outcome(0, 64, attempts=2), "the first attempt may have cached the prompt"),
        (outcome(0, 64, error=WorkerLost("gone", retryable=True)), "it failed"),
        (outcome(0, 64, placed=None), "the request was not placed"),
        (
            outcome(0, 64, placed=decided(WORKER, is_unrouted=True)),
            "no router predicted",
        ),
        (outcome(0, 64, placed=decided(99)), "the worker has left"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_without_a_comparison_does_not_count(ended: RequestOutcome, reason: str) -> None:
    monitor, _ = monitored(instance(WORKER))
    monitor.on_request_end(ended)
    assert monitor.drift_stats() == [], reason


def test_a_worker_without_kv_events_does_not_count() -> None:
    monitor, _ = monitored(instance(WORKER, kv_index="none"))
    monitor.on_request_end(outcome(0, 64))
    assert monitor.drift_stats() == []


def test_the_prediction_for_a_pair_counts_for_the_prefill_rank() -> None:
    monitor, _ = monitored(instance(WORKER), instance(PREFILL))
    placed = decided(WORKER, prefill=Placement(PREFILL, 1), predicted_cached_tokens=64)
    monitor.on_request_end(outcome(0, 64, placed=placed))
    ((labels, stats),) = monitor.drift_stats()
    assert stats.source == (PREFILL, 1)
    assert labels[1:] == (str(PREFILL), "1")


def test_drift_metrics_are_by_worker_and_end_with_it() -> None:
    monitor, _ = monitored(instance(WORKER, "gpu-3"))
    registry = CollectorRegistry()
    registry.register(HitDriftCollector(monitor.drift_stats, "kvmesh_frontend"))
    for _ in range(REQUESTS_MIN):
        monitor.on_request_end(outcome(64, 32))
    labels = '{dp_rank="0",model="m",worker="gpu-3"}'
    shown = generate_latest(registry).decode()
    for name, value in (
        ("kv_predicted_cached_tokens_total", 64.0 * REQUESTS_MIN),
        ("kv_actual_cached_tokens_total", 32.0 * REQUESTS_MIN),
        ("kv_predicted_requests_total", float(REQUESTS_MIN)),
        ("kv_drift_ratio", 0.5),
        ("kv_degraded", 1.0),
    ):
        assert f"kvmesh_frontend_{name}{labels} {value}" in shown
    monitor.on_snapshot(Snapshot(), SnapshotDiff())
    assert "gpu-3" not in generate_latest(registry).decode()
