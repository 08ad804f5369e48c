"""Horizontal bars of several parts (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from console_svc.charts.style import (
    MUTED,
    SURFACE,
    TEXT,
    Option,
    category_axis,
    picture,
    text_style,
    value_axis,
)

BAR_PX = 26
_FRAME_PX = 64
LABEL_CHARS = 26


@dataclass(frozen=True, slots=True)
class Part:
    """One part of all bars. values: one a bar; None: the bar lacks it. texts: what the tooltip says
    of each value."""

    name: str
    color: str
    values: Sequence[float | None]
    texts: Sequence[str]


def height_px(bars: int) -> int:
    """Returns the height of a picture with so many bars."""
    return _FRAME_PX + BAR_PX * max(1, bars)


def stacked_bars(
    description: str,
    names: Sequence[str],
    parts: Sequence[Part],
    *,
    unit: str = "",
    high: float | None = None,
) -> Option:
    """Returns one bar a name, of the parts side by side, the first name at the top.

    - high: end of the axis; None: the largest bar.
    """
    return picture(
        description,
        grid={"left": 8, "right": 24, "top": 30, "bottom": 8, "containLabel": True},
        legend={
            "left": 0,
            "top": 0,
            "icon": "rect",
            "itemWidth": 10,
            "itemHeight": 10,
            "selectedMode": False,
            "textStyle": text_style(MUTED, 12),
        },
        xAxis=value_axis(unit, min=0, max=high),
        yAxis=category_axis([_clip(name) for name in names], inverse=True),
        series=[_series(names, part) for part in parts],
    )


def _series(names: Sequence[str], part: Part) -> Option:
    return {
        "type": "bar",
        "name": part.name,
        "stack": "all",
        "barWidth": 12,
        "itemStyle": {"color": part.color, "borderColor": SURFACE, "borderWidth": 1},
        "emphasis": {"disabled": True},
        "data": [
            {"value": value, "name": f"{name}\n{part.name}: {text}"}
            for name, value, text in zip(names, part.values, part.texts, strict=True)
        ],
    }


def _clip(name: str) -> str:
    return name if len(name) <= LABEL_CHARS else f"{name[: LABEL_CHARS - 1]}…"


def labelled_bars(
    description: str,
    names: Sequence[str],
    values: Sequence[float | None],
    texts: Sequence[str],
    color: str,
) -> Option:
    """Returns one bar a name, with its text behind it."""
    part = Part("", color, values, texts)
    series = _series(names, part)
    series["data"] = [
        {
            **point,
            "label": {"show": True, "position": "right", "formatter": text, **text_style(TEXT)},
        }
        for point, text in zip(series["data"], texts, strict=True)
    ]
    return picture(
        description,
        grid={"left": 8, "right": 72, "top": 8, "bottom": 8, "containLabel": True},
        xAxis=value_axis(min=0, show=False),
        yAxis=category_axis([_clip(name) for name in names], inverse=True),
        series=[series],
    )
