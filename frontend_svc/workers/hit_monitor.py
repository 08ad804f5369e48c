"""Compares predicted with actual cached tokens of requests; see `metrics/hit_drift.py`.

Only requests with a prediction count: placed by a router at the first attempt, on a worker that
publishes KV events, with cached tokens reported by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import structlog

from common.registry.instances import Instance, Snapshot, SnapshotDiff
from frontend_svc.metrics.hit_drift import WINDOW_S, DriftStats, HitDriftMonitor, Source
from frontend_svc.request.types import RequestOutcome

log = structlog.get_logger()


class HitMonitor:
    """Observes the end of each request. clock: monotonic seconds. ratio_max: see
    `HitDriftMonitor`."""

    def __init__(self, clock: Callable[[], float], ratio_max: float) -> None:
        self._snapshot = Snapshot()
        self._clock = clock
        self._drift = HitDriftMonitor(ratio_max)

    def on_request_end(self, outcome: RequestOutcome) -> None:
        comparison = _predicted_and_actual(outcome)
        if comparison is None:
            return
        source, predicted, actual = comparison
        worker = self._snapshot.instances.get(source[0])
        if worker is None or worker.kv_index != "events":
            return
        report = self._drift.observe(source, predicted, actual, self._clock())
        if report is not None:
            log.warning(
                "kv_drift",
                worker=_name(worker),
                worker_id=worker.id,
                dp_rank=source[1],
                model=worker.model,
                drift=round(report.ratio, 4),
                window_s=WINDOW_S,
            )

    def on_snapshot(self, snapshot: Snapshot, _: SnapshotDiff) -> None:
        self._snapshot = snapshot
        self._drift.retain(snapshot.instances)

    def degraded(self) -> list[str]:
        return [
            f"worker {_name(worker)} rank {stats.source[1]}: predicted and actual cached tokens of "
            f"{worker.model} differ by {stats.ratio:.1%} over {WINDOW_S:g} s"
            for worker, stats in self._drift_of_workers()
            if stats.is_degraded
        ]

    def drift_stats(self) -> list[tuple[tuple[str, str, str], DriftStats]]:
        """Returns model, worker and rank of all sources of live workers, and their drift."""
        return [
            ((worker.model, _name(worker), str(stats.source[1])), stats)
            for worker, stats in self._drift_of_workers()
        ]

    def _drift_of_workers(self) -> Iterator[tuple[Instance, DriftStats]]:
        instances = self._snapshot.instances
        for stats in self._drift.drift_stats(self._clock()):
            if (worker := instances.get(stats.source[0])) is not None:
                yield worker, stats


def _predicted_and_actual(outcome: RequestOutcome) -> tuple[Source, int, int] | None:
    """Returns the source and both token counts; None if there is nothing to compare."""
    placed, details = outcome.placed, outcome.usage.prompt_tokens_details
    if placed is None or placed.is_unrouted or outcome.attempts != 1 or outcome.error is not None:
        return None
    if details is None or details.cached_tokens is None:
        return None
    return placed.prefill or placed.worker, placed.predicted_cached_tokens, details.cached_tokens


def _name(worker: Instance) -> str:
    return worker.stable_name or str(worker.id)
