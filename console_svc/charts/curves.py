"""Figures over time as lines (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from console_svc.charts.style import (
    ACCENT,
    MUTED,
    STRONG_LINE,
    Option,
    picture,
    text_style,
    tooltip,
    value_axis,
)
from console_svc.charts.units import clock
from console_svc.state.members import Curve

POINTS_MAX = 90


@dataclass(frozen=True, slots=True)
class Line:
    """One line. text: the text of a value in the tooltip."""

    name: str
    curve: Curve
    text: Callable[[float | None], str]
    color: str = ACCENT
    is_dashed: bool = False
    """A second mark beside the colour."""

    scale: float = 1.0
    """Factor of the drawn values; texts are those of the values themselves."""


def lines(description: str, drawn: Sequence[Line], *, high: float | None = None) -> Option:
    """Returns the lines over one time axis.

    high: end of the axis of values; None: the largest value.
    """
    return picture(
        description,
        grid={"left": 4, "right": 24, "top": 10, "bottom": 4, "containLabel": True},
        xAxis={
            "type": "time",
            "axisLabel": {
                **text_style(MUTED, 11),
                "hideOverlap": True,
                "formatter": "{HH}:{mm}:{ss}",
            },
            "axisLine": {"lineStyle": {"color": STRONG_LINE}},
            "axisTick": {"show": False},
            "splitLine": {"show": False},
            "splitNumber": 3,
        },
        yAxis=value_axis(min=0, max=high, splitNumber=2),
        tooltip={
            **tooltip(),
            "trigger": "axis",
            "formatter": "\n".join(f"{{b{n}}}" for n in range(len(drawn))),
            "axisPointer": {"type": "line", "lineStyle": {"color": STRONG_LINE}},
        },
        series=[_series(line) for line in drawn],
    )


def _series(line: Line) -> Option:
    points = thinned(line.curve)
    return {
        "type": "line",
        "name": line.name,
        "symbol": "circle",
        "symbolSize": 5,
        "showSymbol": False,
        "connectNulls": False,
        "lineStyle": {
            "color": line.color,
            "width": 1.5,
            "type": "dashed" if line.is_dashed else "solid",
        },
        "itemStyle": {"color": line.color},
        "emphasis": {"disabled": True},
        "data": [
            {
                "value": [at * 1000, None if value is None else value * line.scale],
                "name": f"{clock(at)}  {line.name} {line.text(value)}",
            }
            for at, value in points
        ],
    }


def thinned(curve: Curve) -> list[tuple[float, float | None]]:
    """Returns at most `POINTS_MAX` points of the curve, the newest among them."""
    points = list(zip(curve.times_s, curve.values, strict=True))
    step = -(-len(points) // POINTS_MAX) if points else 1
    return points[::-1][::step][::-1]
