"""When the pieces of a streamed response arrived (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from console_svc.charts.style import ACCENT, STRONG_LINE, Option, picture, value_axis
from console_svc.charts.units import duration

PIECES_MAX = 400
"""Drawn pieces: the last ones."""


def arrivals(times_ms: Sequence[float]) -> Option:
    """Returns the gap before each piece over its time of arrival. times_ms: since the request was
    sent, in order; the first gap is the time to first token."""
    gaps = [(at, at - before) for before, at in zip((0.0, *times_ms), times_ms, strict=False)]
    drawn = gaps[-PIECES_MAX:]
    return picture(
        f"Gaps between {len(gaps)} pieces of the response",
        grid={"left": 8, "right": 32, "top": 24, "bottom": 4, "containLabel": True},
        xAxis=value_axis(
            "ms",
            min=0,
            splitLine={"show": False},
            axisLine={"show": True, "lineStyle": {"color": STRONG_LINE}},
        ),
        yAxis=value_axis("gap, ms", min=0, splitNumber=3),
        series=[
            {
                "type": "bar",
                "barWidth": 2,
                "itemStyle": {"color": ACCENT},
                "emphasis": {"disabled": True},
                "data": [
                    {
                        "value": [round(at, 2), round(gap, 2)],
                        "name": f"at {duration(at)}\n{duration(gap)} after the one before",
                    }
                    for at, gap in drawn
                ],
            }
        ],
    )
