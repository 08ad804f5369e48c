"""Small curves side by side, with a table of the same figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nicegui.elements.mixins.text_element import TextElement

from console_svc.charts.curves import Line, lines
from console_svc.charts.style import ACCENT
from console_svc.charts.units import clock, duration, number, percent, rate
from console_svc.pages.figure import Figure
from console_svc.pages.paging import Column
from console_svc.pages.parts import Disclosure, box, text
from console_svc.pages.table import Table
from console_svc.state.members import Curve

_Text = Callable[[float | None], str]
_TEXTS: Mapping[str, _Text] = {
    "requests_per_s": rate,
    "tokens_per_s": rate,
    "ttft_p50_ms": duration,
    "ttft_p99_ms": duration,
    "running": number,
    "waiting": number,
    "kv_use": percent,
}
_NAMES = {
    "requests_per_s": "requests/s",
    "tokens_per_s": "tokens/s",
    "ttft_p50_ms": "p50",
    "ttft_p99_ms": "p99",
    "running": "running",
    "waiting": "waiting",
    "kv_use": "KV in use",
}
_SECOND_COLOR = "var(--s-2)"
_ROWS = 20


@dataclass(frozen=True, slots=True)
class Plot:
    """A small picture of one or two curves. names: of the curves; the second one is dashed."""

    title: str
    names: tuple[str, ...]
    is_share: bool = False
    """Shares are drawn as percent."""


class Curves:
    """The plots of a page, and one table of their figures, which the reader opens."""

    def __init__(self, plots: Sequence[Plot]) -> None:
        self._plots = plots
        self._curves: Mapping[str, Curve] = {}
        self._names = [name for plot in plots for name in plot.names]
        with box("kv-sparks"):
            self._notes: list[TextElement] = []
            self._figures = [self._figure(plot) for plot in plots]
        self._twin = Disclosure("Figures as a table", self._show_table)
        with self._twin.element:
            self._table = Table("Figures over time", self._columns(), clock, ("No figures yet", ""))

    def _figure(self, plot: Plot) -> Figure:
        with box("kv-panel kv-stack") as panel:
            panel.style("gap: 2px")
            text("h3", plot.title)
            self._notes.append(text("span", classes="kv-muted kv-small"))
            return Figure(height=104)

    def _columns(self) -> list[Column[float]]:
        def value(name: str, at_s: float) -> str:
            curve = self._curves[name]
            return _TEXTS[name](dict(zip(curve.times_s, curve.values, strict=True)).get(at_s))

        def column(name: str) -> Column[float]:
            return Column(name, _NAMES[name], lambda at_s: value(name, at_s), is_number=True)

        time = Column("at", "Time (UTC)", clock)
        return [time, *(column(name) for name in self._names)]

    def show(self, curves: Mapping[str, Curve]) -> None:
        self._curves = {name: curves.get(name, Curve()) for name in self._names}
        for plot, figure, note in zip(self._plots, self._figures, self._notes, strict=True):
            newest = _newest(plot, self._curves)
            note.set_text(newest)
            high = 100.0 if plot.is_share else None
            figure.show(lines(f"{plot.title}: {newest}", self._lines(plot), high=high))
        if self._twin.is_open:
            self._show_table()

    def _lines(self, plot: Plot) -> list[Line]:
        scale = 100.0 if plot.is_share else 1.0
        return [
            Line(
                _NAMES[name],
                self._curves[name],
                _TEXTS[name],
                color=_SECOND_COLOR if at else ACCENT,
                is_dashed=at > 0,
                scale=scale,
            )
            for at, name in enumerate(plot.names)
        ]

    def _show_table(self) -> None:
        times = sorted({at for curve in self._curves.values() for at in curve.times_s})
        self._table.show(times[: -_ROWS - 1 : -1])


def _newest(plot: Plot, curves: Mapping[str, Curve]) -> str:
    """Returns the last figures, with the look of their lines if there are several."""
    newest = [
        (_NAMES[name], _TEXTS[name](curves[name].values[-1]))
        for name in plot.names
        if curves[name].values
    ]
    if len(plot.names) == 1:
        return newest[0][1] if newest else "no figures yet"
    (name, value), *others = newest or [("", "no figures yet")]
    dashed = "".join(f" · {other} {text_} dashed" for other, text_ in others)
    return f"{name} {value}{dashed}".strip()
