"""Small cases of `make bench-scale` and `make bench-cells`: unit costs, what follows for each
member, and fleets in cells."""

from __future__ import annotations

import io
import os

import pytest

from bench.scale import fleet, registry
from bench.scale.cells import PARTS, Layout, computed_shares, run_layout, simulated_shares
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


def test_the_arithmetic_of_a_router_has_the_parts_that_are_simulated() -> None:
    """Four times the requests of the run of the unit costs, at fewer routers."""
    costs = fleet.measure(20, 3, 0.25, 2.0, os.getpid())
    computed = computed_shares(costs, 2, registry.measure(20))
    simulated = simulated_shares(20, 2, 2.0)
    assert computed.keys() == simulated.keys() == set(PARTS)
    assert min(*computed.values(), *simulated.values()) > 0
    assert computed["decisions"] == pytest.approx(10 * costs.decide_us / 1e6, abs=1e-4)


def test_a_fleet_in_cells_has_all_requests_and_its_busiest_cell() -> None:
    whole, cells = (run_layout(Layout(40, count, 6.0, tenants=8), 1) for count in (1, 4))
    assert whole.requests == cells.requests > 10
    assert (whole.busiest, whole.choose_us) == (1.0, 0.0)
    assert 1.0 <= cells.busiest <= 4.0
    assert cells.choose_us > 0
    assert 0 < cells.hit_rate < 1
    assert Layout(40, 4, 6.0, key_blocks=1).name == "40 workers, 4 cells by system prompt"
