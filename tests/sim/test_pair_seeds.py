"""Seeded runs of prefill, decode and index together: `python -m tests.sim N --vertical`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.world import run_seed

SEEDS = 45


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_seeded_run_with_pairs_breaks_no_rule(seed: int) -> None:
    report = run_seed(seed, vertical=True)
    assert not report.breaches, str(report)


@pytest.mark.slow
def test_a_seed_with_pairs_gives_the_same_run_event_for_event() -> None:
    keep = [object() for _ in range(999)]  # so that addresses differ
    first = run_seed(4, vertical=True)
    del keep
    assert run_seed(4, vertical=True).trace == first.trace


@pytest.mark.slow
def test_the_seeds_hand_over_break_handoffs_and_garble_events() -> None:
    """Otherwise the rules about them would hold for want of a case."""
    reports = [run_seed(seed, vertical=True) for seed in (0, 4, 5, 6)]
    ends = sum((Counter(report.counters) for report in reports), Counter())
    assert ends["rooms_handed_over"] >= 150
    assert ends["rooms_aborted"] >= 15
    assert ends["rooms_failed"] >= 8
    assert ends["leases_expired"] >= 2
    assert sum(report.pairs_failed for report in reports) >= 10
    assert sum(report.migrated for report in reports) >= 4
    assert sum(report.garbled for report in reports) >= 40
    assert sum(report.cached_tokens for report in reports) >= 15_000
    assert sum(report.predicted for report in reports) >= 1_500
