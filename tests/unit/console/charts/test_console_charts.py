"""Pictures of the index, of costs, of tenants, of curves and of replays."""

from __future__ import annotations

import json

import pytest

from common.usage import UsageCounts
from console_svc.charts.curves import POINTS_MAX, Line, lines, thinned
from console_svc.charts.index import COLUMNS, fill, heat, heat_height_px, tiers
from console_svc.charts.replay import hit_rates, quantiles
from console_svc.charts.routing import compared, costs, hits, legs
from console_svc.charts.tenants import jain_index, shares, usage
from console_svc.charts.tokens import PIECES_MAX, arrivals
from console_svc.charts.units import number
from console_svc.state.actions import ReplayRun
from tests.kit.console import candidate, curve, explanation, source, tenant


def test_tiers_are_parts_of_one_bar_a_worker() -> None:
    option = tiers([source("w-0"), source("w-1", tiers={"device": 5, "disk": 70})])
    parts = {s["name"]: [p["value"] for p in s["data"]] for s in option["series"]}
    assert parts == {"device": [50, 5], "host": [10, 0], "disk": [0, 70]}


def test_an_index_without_tiers_shows_all_blocks() -> None:
    option = tiers([source("w-0", tiers={})])
    assert [s["name"] for s in option["series"]] == ["all tiers"]
    assert option["series"][0]["data"][0]["value"] == 60


def test_the_heat_map_of_a_thousand_workers_has_a_cell_for_each_and_marks_the_inexact() -> None:
    sources = [source(f"w-{n:04}", tiers={"device": n % 101}) for n in range(1000)]
    sources[17] = source("w-0017", state="degraded", reason="gap repair")
    option = heat(sources)
    *levels, marks = option["series"]
    assert sum(len(level["data"]) for level in levels) == 1000
    assert [mark["value"] for mark in marks["data"]] == [[17, 0]]
    assert "gap repair" in marks["data"][0]["name"]
    assert heat_height_px(1000) == 22 * -(-1000 // COLUMNS) + 4
    assert len(json.dumps(option)) < 120_000


def test_an_unknown_capacity_has_no_share() -> None:
    assert fill(source(capacity_blocks=None)) is None
    assert fill(source(tiers={"device": 300})) == 1.0


def test_costs_are_scaled_by_the_factor_of_taints() -> None:
    rows = [candidate("w-0", terms={"prefill": 0.2, "taint_factor": 3.0}), candidate("w-1")]
    parts = {s["name"]: s["data"][0]["value"] for s in costs("prefill", rows)["series"]}
    assert parts["prompt to compute"] == pytest.approx(0.6)


def test_the_chosen_candidate_is_first_and_excluded_ones_are_last() -> None:
    found = legs(explanation())
    assert [c.worker for c in found["decode"]] == ["decode-rack-a-1", "decode-rack-a-0"]
    assert [c.worker for c in compared(found["decode"])] == ["decode-rack-a-1"]


def test_an_unknown_actual_hit_is_left_out() -> None:
    option = hits(explanation(actual_cached_tokens=None), 640)
    assert option["yAxis"]["data"] == ["predicted", "prompt"]


def test_equal_fulfilment_of_fair_shares_has_the_index_one() -> None:
    weighted = [tenant("a", 0.75, 0.75), tenant("b", 0.25, 0.25)]
    assert jain_index(weighted) == pytest.approx(1.0)
    assert jain_index([tenant("a", 1.0, 0.5), tenant("b", 0.0, 0.5)]) == pytest.approx(0.5)
    assert jain_index([tenant("a", 1.0, 1.0)]) is None


def test_shares_have_a_mark_at_the_fair_share() -> None:
    option = shares([tenant("a", 0.6, 0.5), tenant("idle")])
    bars, marks = option["series"]
    assert [bar["value"] for bar in bars["data"]] == [60]
    assert [mark["value"] for mark in marks["data"]] == [[50, 0]]


def test_usage_separates_cached_from_computed_prompt_tokens() -> None:
    option = usage("tenant", {"acme": UsageCounts(1, 0, 100, 40, 7)})
    values = [s["data"][0]["value"] for s in option["series"]]
    assert values == [60, 40, 7]


def test_a_long_curve_keeps_its_newest_value() -> None:
    long = curve(*range(1000))
    points = thinned(long)
    assert len(points) <= POINTS_MAX
    newest_s, newest = points[-1]
    assert newest_s == long.times_s[-1]
    assert newest == 999
    option = lines("load", [Line("running", long, number)])
    assert option["series"][0]["data"][-1]["value"][1] == 999


def test_gaps_between_pieces_start_with_the_first_token() -> None:
    option = arrivals([90.0, 100.0, 130.0])
    assert [p["value"] for p in option["series"][0]["data"]] == [[90, 90], [100, 10], [130, 30]]
    assert len(arrivals([float(n) for n in range(5000)])["series"][0]["data"]) == PIECES_MAX


def test_a_policy_without_a_figure_has_a_gap() -> None:
    runs = [ReplayRun("kv", {"ttft_p50_s": 0.1, "ttft_p90_s": None, "hit_rate": 0.5})]
    assert [p["value"] for p in quantiles(runs)["series"][0]["data"]] == [0.1, None, None]
    assert hit_rates(runs)["series"][0]["data"][0]["label"]["formatter"] == "50 %"
