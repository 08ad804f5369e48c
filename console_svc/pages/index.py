"""What the indexers hold of each worker, exact or not, by tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nicegui import ui

from console_svc.charts.bars import height_px
from console_svc.charts.index import (
    BARS_MAX,
    CELL_PX,
    COLUMNS,
    fill,
    heat,
    heat_height_px,
    source_name,
    tiers,
)
from console_svc.charts.style import HEAT
from console_svc.charts.units import NONE, age, count, number, percent, plural, size
from console_svc.pages.figure import Figure
from console_svc.pages.frame import frame, refresh
from console_svc.pages.members_table import member_href
from console_svc.pages.paging import Column, matches
from console_svc.pages.parts import (
    Empty,
    Notice,
    box,
    choice,
    section,
    set_choices,
    text,
    text_input,
)
from console_svc.pages.table import Table
from console_svc.state.console_state import ConsoleState
from console_svc.state.members import IndexSource, IndexView

_EMPTY = (
    "No indexer is registered",
    "Without one, routers assume what a worker holds from their own decisions. Start one with "
    "`python -m indexer_svc`.",
)
_NO_SOURCES = ("No worker publishes KV events", "Workers with `kv_index: events` appear here.")
_ALL, _INEXACT = "all", "not exact"


def _tone(source: IndexSource) -> str:
    if source.is_exact:
        return "ok"
    return "bad" if source.state in ("none", "gapped") else "warn"


def _state(source: IndexSource) -> str:
    mark = "●" if source.is_exact else "▲"
    return f"{mark} {source.state}" + (f": {source.reason}" if source.reason else "")


def _tier(source: IndexSource, tier: str) -> int | None:
    return source.tiers.get(tier) if source.tiers else None


def _tier_column(tier: str) -> Column[IndexSource]:
    return Column(
        tier,
        tier.capitalize(),
        lambda s: count(_tier(s, tier)),
        lambda s: _tier(s, tier),
        is_number=True,
    )


SOURCE_COLUMNS: Sequence[Column[IndexSource]] = (
    Column(
        "worker",
        "Worker",
        source_name,
        lambda s: (s.worker, s.dp_rank),
        href=lambda s: member_href(s.worker or s.worker_id),
    ),
    Column("state", "State", _state, lambda s: (s.is_exact, s.state), tone=_tone),
    Column("blocks", "Blocks", lambda s: count(s.blocks), lambda s: s.blocks, is_number=True),
    *(_tier_column(tier) for tier in ("device", "host", "disk")),
    Column("fill", "Of the device", lambda s: percent(fill(s)), fill, is_number=True),
    Column("age", "Last message", lambda s: f"{age(s.age_s)} ago", lambda s: s.age_s),
    Column("sequence", "Batch", lambda s: number(s.sequence), lambda s: s.sequence, is_number=True),
    Column("indexer", "Indexer", lambda s: s.indexer, lambda s: s.indexer),
    Column("model", "Model", lambda s: s.model or NONE, lambda s: s.model or None),
)


def source_table(caption: str) -> Table[IndexSource]:
    return Table(
        caption,
        SOURCE_COLUMNS,
        lambda s: f"{s.indexer}/{s.worker_id}/{s.dp_rank}",
        _NO_SOURCES,
    )


_VIEW_COLUMNS: Sequence[Column[IndexView]] = (
    Column(
        "name",
        "Indexer",
        lambda v: v.indexer,
        lambda v: v.indexer,
        href=lambda v: member_href(v.indexer),
    ),
    Column("blocks", "Blocks", lambda v: count(v.blocks), lambda v: v.blocks, is_number=True),
    Column("sources", "Sources", lambda v: number(len(v.sources)), is_number=True),
    Column("inexact", "Not exact", lambda v: number(_inexact(v.sources)), is_number=True),
    Column(
        "batches",
        "Batches applied",
        lambda v: count(v.batches_applied),
        lambda v: v.batches_applied,
        is_number=True,
    ),
    Column("memory", "Memory", lambda v: _memory(v), lambda v: v.used_bytes, is_number=True),
    Column(
        "problem",
        "Problem",
        lambda v: v.problem or "none",
        tone=lambda v: "bad" if v.problem else "",
    ),
)


def define(state: ConsoleState) -> None:
    @ui.page("/index", title="KV index · KVMesh")
    def page() -> None:
        lead = "Which KV blocks the indexers hold of each worker, and whether they are exact."
        with frame(state, "/index", "KV index", lead):
            _IndexPage(state)


class _IndexPage:
    def __init__(self, state: ConsoleState) -> None:
        self._state = state
        self._empty = Empty(*_EMPTY)
        self._inexact = Notice("warn")
        with section("Indexers") as self._indexers:
            self._views = Table("Indexers", _VIEW_COLUMNS, lambda v: v.indexer, _EMPTY)
        with section("Blocks by worker") as self._picture:
            self._which_indexer = choice(
                "Indexer", "index-which", [], "", self._render_picture, "min-width: 200px"
            )
            with box("kv-panel kv-stack"):
                self._bars = Figure(height=200)
                self._heat = Figure(height=120, width=COLUMNS * CELL_PX)
                self._scale = _scale()
        with section("Sources") as self._sources:
            with box("kv-row-end"):
                self._words = text_input(
                    "Filter",
                    "index-filter",
                    placeholder="worker, state, reason",
                    style="width: 260px",
                )
                self._words.on_value_change(self._filtered)
                self._which = choice("Show", "index-show", [_ALL, _INEXACT], _ALL, self._filtered)
            self._table = source_table("Sources")
        refresh(state, self._render)

    def _render(self) -> None:
        views = self._state.index
        self._empty.show(not views)
        for part in (self._indexers, self._picture, self._sources):
            part.set_visibility(bool(views))
        self._views.show(views)
        names = [view.indexer for view in views]
        set_choices(self._which_indexer, names)
        inexact = Counter(s.state for v in views for s in v.sources if not s.is_exact)
        listed = ", ".join(f"{n} {state}" for state, n in inexact.most_common())
        self._inexact.show(
            listed and f"Not exact: {listed}. Routers predict fewer cache hits on these workers."
        )
        self._render_picture()
        self._show_sources()

    def _render_picture(self) -> None:
        view = next((v for v in self._state.index if v.indexer == self._which_indexer.value), None)
        sources = () if view is None else view.sources
        is_heat = len(sources) > BARS_MAX
        self._bars.set_visibility(bool(sources) and not is_heat)
        self._heat.set_visibility(is_heat)
        self._scale.set_visibility(is_heat)
        if is_heat:
            caption = (
                f"{plural(len(sources), 'source')}, in the order of their names; ! is not exact."
            )
            self._heat.show(heat(sources), height=heat_height_px(len(sources)), caption=caption)
        elif sources:
            self._bars.show(
                tiers(sources), height=height_px(len(sources)), caption="▲ is not exact."
            )

    def _filtered(self) -> None:
        self._table.first_page()
        self._show_sources()

    def _show_sources(self) -> None:
        words, which = str(self._words.value or ""), self._which.value
        self._table.show(
            [
                s
                for view in self._state.index
                for s in view.sources
                if (which == _ALL or not s.is_exact)
                and matches(words, s.worker, s.state, s.reason, s.indexer, s.model)
            ]
        )


def _scale() -> ui.element:
    """Adds the meaning of the colours of the heat map."""
    with box("kv-scale") as scale:
        text("span", "share of the device: 0 %")
        with box("kv-steps"):
            for color in HEAT:
                ui.element("i").style(f"background: {color}")
        text("span", "100 %")
    return scale


def _inexact(sources: Sequence[IndexSource]) -> int:
    return sum(not source.is_exact for source in sources)


def _memory(view: IndexView) -> str:
    budget = f" of {size(view.budget_bytes)}" if view.budget_bytes else ""
    return f"{size(view.used_bytes)}{budget}"
