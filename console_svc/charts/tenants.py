"""Tenants: their shares of the tokens, and what they used (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.usage import UsageCounts
from console_svc.charts.bars import Part, stacked_bars
from console_svc.charts.style import (
    ACCENT,
    MUTED,
    SERIES,
    TEXT,
    Option,
    category_axis,
    picture,
    text_style,
    value_axis,
)
from console_svc.charts.units import count, percent, plural
from console_svc.state.tenants import TenantView

ROWS_MAX = 20
"""Bars; the table has all tenants."""


def sharing(tenants: Sequence[TenantView]) -> list[TenantView]:
    """Returns the tenants that used tokens in the last minute, the largest first."""
    found = [tenant for tenant in tenants if tenant.recent_share]
    return sorted(found, key=lambda tenant: -(tenant.recent_share or 0.0))


def jain_index(tenants: Sequence[TenantView]) -> float | None:
    """Returns (Σx)² / (n·Σx²) of x = share / fair share.

    1: each tenant has its fair share; 1/n: one has all. None: fewer than two tenants used tokens.
    """
    ratios = [
        (tenant.recent_share or 0.0) / tenant.fair_share for tenant in tenants if tenant.fair_share
    ]
    squares = sum(ratio * ratio for ratio in ratios)
    if len(ratios) < 2 or not squares:
        return None
    return sum(ratios) ** 2 / (len(ratios) * squares)


def shares(tenants: Sequence[TenantView]) -> Option:
    """Returns a bar for the share of each tenant, with a line at its fair share."""
    drawn = sharing(tenants)[:ROWS_MAX]
    names = [tenant.name for tenant in drawn]
    return picture(
        f"Share of the tokens of the last minute of {plural(len(drawn), 'tenant')}",
        grid={"left": 8, "right": 24, "top": 8, "bottom": 8, "containLabel": True},
        xAxis=value_axis(
            min=0,
            max=100,
            interval=25,
            axisLabel={**text_style(MUTED, 11), "formatter": "{value} %"},
        ),
        yAxis=category_axis(names, inverse=True),
        series=[
            {
                "type": "bar",
                "name": "share",
                "barWidth": 12,
                "itemStyle": {"color": ACCENT},
                "emphasis": {"disabled": True},
                "data": [
                    {"value": 100 * (t.recent_share or 0.0), "name": _describe(t)} for t in drawn
                ],
            },
            {
                "type": "scatter",
                "name": "fair share",
                "symbol": "rect",
                "symbolSize": [3, 20],
                "itemStyle": {"color": TEXT},
                "emphasis": {"disabled": True},
                "data": [
                    {"value": [100 * t.fair_share, at], "name": _describe(t)}
                    for at, t in enumerate(drawn)
                    if t.fair_share is not None
                ],
            },
        ],
    )


def usage(noun: str, used: Mapping[str, UsageCounts]) -> Option:
    """Returns a bar for each name: prompt tokens computed, prompt tokens from the cache, output."""
    largest = sorted(used.items(), key=lambda item: -item[1].tokens)[:ROWS_MAX]
    computed = [max(0, u.prompt_tokens - u.cached_tokens) for _, u in largest]
    cached = [u.cached_tokens for _, u in largest]
    output = [u.output_tokens for _, u in largest]
    parts = [
        Part(name, SERIES[at], values, [f"{count(v)} tokens" for v in values])
        for at, (name, values) in enumerate(
            (("prompt, computed", computed), ("prompt, cached", cached), ("output", output))
        )
    ]
    return stacked_bars(f"Tokens by {noun}", [name or "(none)" for name, _ in largest], parts)


def _describe(tenant: TenantView) -> str:
    return (
        f"{tenant.name}\nshare {percent(tenant.recent_share)}, fair {percent(tenant.fair_share)}"
        f"\nweight {tenant.weight:g}"
    )
