"""What was used since the frontends started: tokens by tenant, model, key and adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nicegui import ui

from common.usage import UsageCounts
from console_svc.charts.bars import height_px
from console_svc.charts.tenants import ROWS_MAX
from console_svc.charts.tenants import usage as usage_chart
from console_svc.charts.units import NONE, count, percent
from console_svc.pages.figure import Figure
from console_svc.pages.frame import frame, refresh
from console_svc.pages.paging import Column
from console_svc.pages.parts import Empty, Notice, Tiles, box, choice, section
from console_svc.pages.table import Table
from console_svc.state.console_state import ConsoleState
from console_svc.state.tenants import Tenants, TenantView

_EMPTY = (
    "No usage yet",
    "Tokens appear here with the first request. `meshctl usage` prints the same figures.",
)
_NONE_HERE = ("Nothing was used by this group", "Choose another group.")


_DIMENSIONS: Mapping[str, str] = {
    "tenant": "Tenant",
    "model": "Model",
    "key": "API key",
    "adapter": "Adapter",
}


@dataclass(frozen=True, slots=True)
class _Row:
    """name: of the model, key or adapter; of the tenant itself: ""."""

    tenant: str
    name: str
    used: UsageCounts


def _number(name: str, label: str, value: Callable[[UsageCounts], float]) -> Column[_Row]:
    return Column(
        name, label, lambda row: count(value(row.used)), lambda row: value(row.used), is_number=True
    )


COLUMNS: Sequence[Column[_Row]] = (
    Column("tenant", "Tenant", lambda row: row.tenant or NONE, lambda row: row.tenant),
    Column("name", "Model, key or adapter", lambda row: row.name or "all", lambda row: row.name),
    _number("requests", "Requests", lambda used: used.requests),
    _number("failed", "Failed", lambda used: used.failed_requests),
    _number("prompt", "Prompt tokens", lambda used: used.prompt_tokens),
    _number("cached", "of them cached", lambda used: used.cached_tokens),
    _number("output", "Output tokens", lambda used: used.output_tokens),
    _number("all", "All tokens", lambda used: used.tokens),
)


def define(state: ConsoleState) -> None:
    @ui.page("/usage", title="Usage · KVMesh")
    def page() -> None:
        lead = "Tokens since the frontends started. `meshctl usage` has them by day."
        with frame(state, "/usage", "Usage", lead):
            _UsagePage(state)


class _UsagePage:
    def __init__(self, state: ConsoleState) -> None:
        self._state = state
        self._problem = Notice("warn")
        self._empty = Empty(*_EMPTY)
        with box("kv-section") as self._content:
            self._content.style("gap: 24px")
            self._tiles = Tiles()
            with section("Tokens"):
                self._by = choice(
                    "Group by", "usage-by", dict(_DIMENSIONS), "tenant", self._regroup
                )
                with box("kv-panel"):
                    self._figure = Figure(height=160)
                self._table = Table("Usage", COLUMNS, lambda r: f"{r.tenant}/{r.name}", _NONE_HERE)
        refresh(state, self._render)

    def _regroup(self) -> None:
        self._table.first_page()
        self._render()

    def _render(self) -> None:
        found = self._state.tenants
        by = str(self._by.value)
        self._problem.show(found.problem and f"Figures may be missing or old: {found.problem}")
        sums = added([tenant.usage for tenant in found.tenants if tenant.usage is not None])
        self._empty.show(sums == UsageCounts())
        self._content.set_visibility(sums != UsageCounts())
        self._tiles.show(_tiles(sums))
        rows = rows_by(found, by)
        used = _grouped(rows, by)
        self._figure.set_visibility(bool(used))
        if used:
            noun = _DIMENSIONS[by].lower()
            height = height_px(min(ROWS_MAX, len(used)))
            self._figure.show(usage_chart(noun, used), height=height)
        self._table.show(rows)


def added(parts: Iterable[UsageCounts]) -> UsageCounts:
    """Returns the sum."""
    return sum(parts, UsageCounts())


def rows_by(tenants: Tenants, by: str) -> list[_Row]:
    """Returns what each tenant used: in all, or by model, key or adapter."""
    rows = [
        _Row(tenant.name, name, used)
        for tenant in tenants.tenants
        for name, used in sorted(_parts(tenant, by).items())
    ]
    return [row for row in rows if row.used != UsageCounts()]


def _parts(tenant: TenantView, by: str) -> Mapping[str, UsageCounts]:
    match by:
        case "model":
            return tenant.by_model
        case "key":
            return tenant.by_key
        case "adapter":
            return tenant.by_adapter
    return {} if tenant.usage is None else {"": tenant.usage}


def _grouped(rows: Sequence[_Row], by: str) -> dict[str, UsageCounts]:
    """Returns the sums of tenants, or of models, keys or adapters of all tenants."""
    groups: dict[str, list[UsageCounts]] = {}
    for row in rows:
        groups.setdefault(row.tenant if by == "tenant" else row.name, []).append(row.used)
    return {name: added(parts) for name, parts in groups.items()}


def _tiles(used: UsageCounts) -> dict[str, tuple[str, str]]:
    hit = used.cached_tokens / used.prompt_tokens if used.prompt_tokens else None
    return {
        "Requests": (count(used.requests), f"{count(used.failed_requests)} failed"),
        "Prompt tokens": (count(used.prompt_tokens), f"{percent(hit)} from the cache"),
        "Output tokens": (count(used.output_tokens), ""),
        "All tokens": (count(used.tokens), ""),
    }
