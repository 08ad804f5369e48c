"""What the indexers hold of each worker: by tier for few workers, as a heat map for many (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from console_svc.charts.bars import Part, stacked_bars
from console_svc.charts.style import (
    HEAT,
    SERIES,
    SURFACE,
    Option,
    hidden_axis,
    picture,
    text_style,
    tone_color,
)
from console_svc.charts.units import count, percent, plural
from console_svc.state.members import IndexSource

BARS_MAX = 24
"""Bars of sources; with more, the heat map."""
CELL_PX = 22
COLUMNS = 48
_TIERS = ("device", "host", "disk")


def source_name(source: IndexSource) -> str:
    rank = f"/{source.dp_rank}" if source.dp_rank else ""
    return f"{source.worker or source.worker_id}{rank}"


def fill(source: IndexSource) -> float | None:
    """Returns the blocks on the device as a share of its capacity, at most 1; None: unknown."""
    if not source.capacity_blocks:
        return None
    return min(1.0, source.tiers.get("device", source.blocks) / source.capacity_blocks)


def tiers(sources: Sequence[IndexSource]) -> Option:
    """Returns a bar for each source, of its tiers."""
    named = [t for t in _TIERS if any(s.tiers.get(t) for s in sources)]
    named += sorted({t for s in sources for t, held in s.tiers.items() if held} - set(_TIERS))
    held = [[s.tiers.get(tier, 0) for s in sources] for tier in named]
    if not named:
        named, held = ["all tiers"], [[s.blocks for s in sources]]
    parts = [
        Part(name, SERIES[at % len(SERIES)], values, [f"{count(v)} blocks" for v in values])
        for at, (name, values) in enumerate(zip(named, held, strict=True))
    ]
    names = [f"{'' if s.is_exact else '▲ '}{source_name(s)}" for s in sources]
    return stacked_bars(f"KV blocks of {plural(len(sources), 'source')} by tier", names, parts)


def heat_height_px(sources: int) -> int:
    return CELL_PX * max(1, -(-sources // COLUMNS)) + 4


def heat(sources: Sequence[IndexSource]) -> Option:
    """Returns a cell for each source, row by row: the darker, the fuller; `!`: not exact; a cell
    without a fill has an unknown capacity."""
    rows = max(1, -(-len(sources) // COLUMNS))
    cells: dict[int, list[Option]] = {}
    marked: list[Option] = []
    for at, source in enumerate(sources):
        share = fill(source)
        level = -1 if share is None else min(len(HEAT) - 1, int(share * len(HEAT)))
        cell = {"value": [at % COLUMNS, at // COLUMNS, 1], "name": _describe(source, share)}
        cells.setdefault(level, []).append(cell)
        if not source.is_exact:
            marked.append({"value": cell["value"][:2], "name": cell["name"]})
    exact = sum(source.is_exact for source in sources)
    return picture(
        f"Heat map of {plural(len(sources), 'source')}: {exact} exact. The table has each.",
        grid={"left": 0, "right": 0, "top": 0, "bottom": 0},
        xAxis=_cells_axis(COLUMNS),
        yAxis=_cells_axis(rows, inverse=True),
        # A heat map needs a mapping; colours are those of the series.
        visualMap={"show": False, "min": 0, "max": 1, "inRange": {"opacity": [1, 1]}},
        series=[
            *(_level(level, data) for level, data in sorted(cells.items())),
            {
                "type": "scatter",
                "symbol": "rect",
                "symbolSize": 12,
                "itemStyle": {
                    "color": SURFACE,
                    "borderColor": tone_color("warn"),
                    "borderWidth": 1,
                },
                "label": {
                    "show": True,
                    "formatter": "!",
                    **text_style(tone_color("warn"), 11),
                    "fontWeight": "bold",
                },
                "emphasis": {"disabled": True},
                "data": marked,
                "z": 4,
            },
        ],
    )


def _cells_axis(cells: int, *, inverse: bool = False) -> Option:
    axis = hidden_axis(0, 1, inverse=inverse)
    return {
        "type": "category",
        "data": list(range(cells)),
        "show": False,
        "inverse": axis["inverse"],
    }


def _level(level: int, data: Sequence[Option]) -> Option:
    color = "var(--track)" if level < 0 else HEAT[level]
    return {
        "type": "heatmap",
        "itemStyle": {"color": color, "borderColor": SURFACE, "borderWidth": 2},
        "emphasis": {"disabled": True},
        "data": list(data),
    }


def _describe(source: IndexSource, share: float | None) -> str:
    state = source.state if source.is_exact else f"{source.state}: {source.reason}"
    held = f"{count(source.blocks)} blocks, {percent(share)} of the device"
    return f"{source_name(source)}\n{held}\n{state}"
