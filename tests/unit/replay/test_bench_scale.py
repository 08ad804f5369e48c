"""A small case of `make bench-scale`: unit costs, and what follows for each member."""

from __future__ import annotations

import io
import os

import pytest

from bench.scale import fleet, registry
from bench.scale.table import FrameCosts, member_row, print_table, report_s


def test_the_costs_of_a_small_fleet_become_a_row_of_the_table() -> None:
    costs = fleet.measure(20, 3, 0.5, 2.0, os.getpid())
    assert costs.requests > 5
    assert min(costs.decide_us, costs.sync_receive_us, costs.sync_bytes, costs.load_us) > 0
    members = registry.measure(20)
    assert 0.02 < members.listing_mb < 0.1
    row = member_row(costs, FrameCosts(100.0, 2.0, 25.0, 18.0), members)
    # 20 workers, ten reports a second each.
    assert row["loads"] == pytest.approx(200 * 25e-6)
    assert row["bend"] == ""
    shown = io.StringIO()
    print_table([row], shown)
    assert "0.5 %" in shown.getvalue()


def test_workers_of_large_fleets_report_less_often() -> None:
    assert [report_s(count) for count in (10, 500, 1000, 10_000)] == [0.1, 0.1, 0.2, 2.0]
