"""Predicted and actual cached tokens: when a source is degraded, and for how long."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend_svc.metrics.hit_drift import REQUESTS_MIN, WINDOW_S, DriftStats, HitDriftMonitor

ONE, OTHER = (7, 0), (7, 1)


def watched(
    *pairs: tuple[int, int], ratio_max: float = 0.1
) -> tuple[HitDriftMonitor, list[DriftStats]]:
    """Observes each (predicted, actual, time) REQUESTS_MIN times; returns the reports."""
    drift = HitDriftMonitor(ratio_max)
    reports = []
    for predicted, actual in pairs:
        for _ in range(REQUESTS_MIN):
            report = drift.observe(ONE, predicted, actual, 0.0)
            reports += [report] if report is not None else []
    return drift, reports


def test_correct_predictions_degrade_no_source() -> None:
    drift, reports = watched((160, 160), (0, 0))
    (stats,) = drift.drift_stats(1.0)
    assert (stats.ratio, stats.is_degraded, reports) == (0.0, False, [])
    assert (stats.predicted, stats.actual) == (160 * REQUESTS_MIN, 160 * REQUESTS_MIN)
    assert stats.requests == 2 * REQUESTS_MIN


@pytest.mark.parametrize(
    ("predicted", "actual"), [(160, 0), (0, 160)], ids=["held no more", "not known to be held"]
)
def test_predictions_that_are_always_wrong_have_a_drift_of_one(predicted: int, actual: int) -> None:
    drift, reports = watched((predicted, actual))
    (stats,) = drift.drift_stats(1.0)
    assert stats.ratio == 1.0
    assert stats.is_degraded
    assert [report.source for report in reports] == [ONE]


def test_drift_is_a_fraction_of_tokens_and_not_of_requests() -> None:
    drift, _ = watched((1000, 1000), (100, 50))
    assert drift.drift_stats(0.0)[0].ratio == pytest.approx(50 / 1100)


def test_few_requests_are_no_evidence() -> None:
    drift = HitDriftMonitor(0.1)
    for _ in range(REQUESTS_MIN - 1):
        assert drift.observe(ONE, 100, 0, 0.0) is None
    assert not drift.drift_stats(0.0)[0].is_degraded
    assert drift.observe(ONE, 100, 0, 0.0) is not None


def test_a_degraded_source_is_reported_once_per_window() -> None:
    drift = HitDriftMonitor(0.1)
    reported_at = []
    for tenth in range(3 * 10 * int(WINDOW_S)):
        now = tenth / 10
        if drift.observe(ONE, 100, 0, now) is not None:
            reported_at.append(now)
    assert len(reported_at) == 3
    gaps = [b - a for a, b in itertools.pairwise(reported_at)]
    assert all(gap >= WINDOW_S for gap in gaps)


def test_a_source_recovers_one_window_after_its_last_wrong_prediction() -> None:
    drift, _ = watched((100, 0))
    assert drift.drift_stats(WINDOW_S / 2 - 0.1)[0].is_degraded
    assert drift.drift_stats(WINDOW_S - 0.1)[0].is_degraded, "the last half window still counts"
    stats = drift.drift_stats(WINDOW_S + 0.1)[0]
    assert (stats.is_degraded, stats.ratio) == (False, 0.0)
    assert stats.requests == REQUESTS_MIN, "totals stay"


def test_ranks_are_separate_and_are_removed_with_their_worker() -> None:
    drift, _ = watched((100, 0))
    drift.observe(OTHER, 100, 100, 0.0)
    drift.observe((8, 0), 1, 1, 0.0)
    assert [s.is_degraded for s in drift.drift_stats(0.0)] == [True, False, False]
    drift.retain([8])
    assert [s.source for s in drift.drift_stats(0.0)] == [(8, 0)]


tokens = st.integers(0, 10_000)


@given(st.lists(st.tuples(tokens, tokens, st.floats(0.0, 20.0)), max_size=60))
def test_drift_is_between_zero_and_one_and_totals_are_complete(
    steps: list[tuple[int, int, float]],
) -> None:
    drift, now = HitDriftMonitor(0.1), 0.0
    for predicted, actual, gap_s in steps:
        now += gap_s
        drift.observe(ONE, predicted, actual, now)
        (stats,) = drift.drift_stats(now)
        assert 0.0 <= stats.ratio <= 1.0
    for stats in drift.drift_stats(now):
        assert stats.predicted == sum(p for p, _, _ in steps)
        assert stats.actual == sum(a for _, a, _ in steps)
        assert stats.requests == len(steps)
