"""What a dashboard consists of, apart from Grafana."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["timeseries", "heatmap"]


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression of a panel."""

    expr: str

    legend: str = ""
    """Name of a series; `{{label}}` is replaced by the value of a label."""

    exemplars: bool = False
    """Whether the panel shows the traces of single requests beside it."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture."""

    title: str

    unit: str
    """Grafana's name of the unit."""

    queries: tuple[Query, ...]

    description: str
    """What it shows, and what to look for."""

    kind: Kind = "timeseries"

    empty: str = ""
    """Why a healthy mesh under load may have no series of it; "": it has some."""


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    name: str
    """Of its file, and of its URL after `kvmesh-`."""

    title: str
    description: str

    rows: Mapping[str, tuple[Panel, ...]]
    """Panels by the title of their row."""

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows.values() for panel in row)
