"""Routing policies on one trace: time to first token, cache hits and balance (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from console_svc.charts.bars import labelled_bars
from console_svc.charts.style import (
    MUTED,
    SERIES,
    Option,
    category_axis,
    picture,
    text_style,
    value_axis,
)
from console_svc.charts.units import duration, number, percent
from console_svc.state.actions import ReplayRun

QUANTILES = (("p50", "ttft_p50_s"), ("p90", "ttft_p90_s"), ("p99", "ttft_p99_s"))
_DASHES = ("solid", "dashed", "dotted")
_SYMBOLS = ("circle", "diamond", "rect", "triangle", "roundRect", "pin")


def quantiles(runs: Sequence[ReplayRun]) -> Option:
    """Returns the time to first token of each policy at p50, p90 and p99, on a logarithmic axis."""
    return picture(
        f"Time to first token of {len(runs)} policies at three quantiles",
        grid={"left": 8, "right": 24, "top": 56, "bottom": 8, "containLabel": True},
        legend=_legend(),
        xAxis=category_axis([name for name, _ in QUANTILES], boundaryGap=False),
        yAxis=value_axis("seconds", type="log", nameGap=8),
        series=[_policy(at, run) for at, run in enumerate(runs)],
    )


def distribution(runs: Sequence[ReplayRun]) -> Option:
    """Returns the share of requests that had their first token by a time, a line a policy."""
    return picture(
        f"Distribution of the time to first token of {len(runs)} policies",
        grid={"left": 8, "right": 24, "top": 56, "bottom": 20, "containLabel": True},
        legend=_legend(),
        xAxis=value_axis("s", type="log", nameGap=4),
        yAxis=value_axis("share of requests", min=0, max=1, nameGap=8),
        series=[_cdf(at, run) for at, run in enumerate(runs)],
    )


def _cdf(at: int, run: ReplayRun) -> Option:
    color = SERIES[at % len(SERIES)]
    return {
        "type": "line",
        "name": run.policy,
        "step": "end",
        "symbol": _SYMBOLS[at % len(_SYMBOLS)],
        "symbolSize": 6,
        "lineStyle": {"color": color, "width": 1.5, "type": _DASHES[at % len(_DASHES)]},
        "itemStyle": {"color": color},
        "emphasis": {"disabled": True},
        "data": [
            {
                "value": [seconds, share],
                "name": f"{run.policy}\n{percent(share)} within {_seconds(seconds)}",
                "symbol": "none" if n % 20 else _SYMBOLS[at % len(_SYMBOLS)],
            }
            for n, (seconds, share) in enumerate(run.ttft_cdf)
            if seconds > 0
        ],
    }


def _legend() -> Option:
    return {
        "left": 0,
        "top": 0,
        "selectedMode": False,
        "itemWidth": 18,
        "textStyle": text_style(MUTED, 12),
    }


def _policy(at: int, run: ReplayRun) -> Option:
    color = SERIES[at % len(SERIES)]
    return {
        "type": "line",
        "name": run.policy,
        "symbol": _SYMBOLS[at % len(_SYMBOLS)],
        "symbolSize": 9,
        "lineStyle": {"color": color, "width": 1.5},
        "itemStyle": {"color": color},
        "emphasis": {"disabled": True},
        "data": [
            {"value": value, "name": f"{run.policy}\n{name}: {_seconds(value)}"}
            for name, key in QUANTILES
            for value in (run.figures.get(key) or None,)
        ],
    }


def hit_rates(runs: Sequence[ReplayRun]) -> Option:
    """Returns the share of prompt tokens from the cache, one bar a policy."""
    values = [run.figures.get("hit_rate") for run in runs]
    return labelled_bars(
        "Cache hit rate by policy",
        [r.policy for r in runs],
        values,
        list(map(percent, values)),
        SERIES[0],
    )


def balances(runs: Sequence[ReplayRun]) -> Option:
    """Returns the variation of the load between workers, one bar a policy; less is better."""
    values = [run.figures.get("load_variation") for run in runs]
    texts = [number(value, 2) for value in values]
    return labelled_bars(
        "Load variation by policy", [r.policy for r in runs], values, texts, SERIES[3]
    )


def _seconds(value: float | None) -> str:
    return duration(None if value is None else value * 1000)
