"""Tenants: limits, what they used, and whether their shares are fair."""

from __future__ import annotations

from collections.abc import Sequence

from nicegui import ui

from console_svc.charts.bars import height_px
from console_svc.charts.tenants import ROWS_MAX, jain_index, shares, sharing
from console_svc.charts.units import NONE, count, number, percent
from console_svc.pages.figure import Figure
from console_svc.pages.frame import frame, refresh
from console_svc.pages.paging import Column
from console_svc.pages.parts import Empty, Notice, box, section, text
from console_svc.pages.table import Table
from console_svc.state.console_state import ConsoleState
from console_svc.state.tenants import TenantView

_NO_KEYS = (
    "The mesh has no API keys",
    "All clients are one tenant without limits. Create keys with `meshctl keys --api-keys FILE "
    "create TENANT`, and give FILE to the frontends and to this console (--api-keys).",
)


def _limit(value: float | None) -> str:
    return "none" if value is None else f"{value:,g}"


COLUMNS: Sequence[Column[TenantView]] = (
    Column("name", "Tenant", lambda t: t.name, lambda t: t.name),
    Column("keys", "Keys", lambda t: number(len(t.keys)), lambda t: len(t.keys), is_number=True),
    Column(
        "rps",
        "Requests/s, limit",
        lambda t: _limit(t.requests_per_s),
        lambda t: t.requests_per_s,
        is_number=True,
    ),
    Column(
        "tpm",
        "Tokens/min, limit",
        lambda t: _limit(t.tokens_per_min),
        lambda t: t.tokens_per_min,
        is_number=True,
    ),
    Column(
        "concurrency",
        "Concurrent, limit",
        lambda t: _limit(t.concurrency),
        lambda t: t.concurrency,
        is_number=True,
    ),
    Column("weight", "Weight", lambda t: f"{t.weight:g}", lambda t: t.weight, is_number=True),
    Column(
        "requests",
        "Requests",
        lambda t: count(t.usage.requests) if t.usage else NONE,
        lambda t: t.usage.requests if t.usage else None,
        is_number=True,
    ),
    Column(
        "failed",
        "Failed",
        lambda t: count(t.usage.failed_requests) if t.usage else NONE,
        lambda t: t.usage.failed_requests if t.usage else None,
        tone=lambda t: "warn" if t.usage and t.usage.failed_requests else "",
        is_number=True,
    ),
    Column(
        "tokens",
        "Tokens",
        lambda t: count(t.usage.prompt_tokens + t.usage.output_tokens) if t.usage else NONE,
        lambda t: t.usage.prompt_tokens + t.usage.output_tokens if t.usage else None,
        is_number=True,
    ),
    Column(
        "share",
        "Share, last min",
        lambda t: percent(t.recent_share),
        lambda t: t.recent_share,
        is_number=True,
    ),
    Column(
        "fair",
        "Fair share",
        lambda t: percent(t.fair_share),
        lambda t: t.fair_share,
        is_number=True,
    ),
)


def define(state: ConsoleState) -> None:
    @ui.page("/tenants", title="Tenants · KVMesh")
    def page() -> None:
        lead = "Limits hold for all frontends together; shares follow weights while requests queue."
        with frame(state, "/tenants", "Tenants", lead):
            _TenantsPage(state)


class _TenantsPage:
    def __init__(self, state: ConsoleState) -> None:
        self._state = state
        self._problem = Notice("warn")
        self._no_keys = Empty(*_NO_KEYS)
        with section("Shares of the last minute") as self._part:
            self._fairness = text("p")
            with box("kv-panel"):
                caption = "Bar: share of the tokens. Line: fair share by weight."
                self._shares = Figure(caption, height=200)
        with section("All tenants") as self._all:
            empty = ("No tenant", "`meshctl keys create` adds one.")
            self._table = Table("Tenants", COLUMNS, lambda t: t.name, empty)
        refresh(state, self._render)

    def _render(self) -> None:
        found = self._state.tenants
        self._problem.show(found.problem and f"Tenants may be missing or old: {found.problem}")
        self._no_keys.show(not found.has_keys and not found.tenants)
        self._all.set_visibility(bool(found.tenants))
        drawn = sharing(found.tenants)
        self._part.set_visibility(bool(drawn))
        if drawn:
            self._shares.show(shares(found.tenants), height=height_px(min(ROWS_MAX, len(drawn))))
            self._fairness.set_text(_fairness(found.tenants))
        self._table.show(found.tenants)


def _fairness(tenants: Sequence[TenantView]) -> str:
    index = jain_index(tenants)
    if index is None:
        return "One tenant used tokens, so there is nothing to share."
    advice = "" if index > 0.8 else " Without a queue at the router, shares follow the demand."
    return f"Fairness (Jain's index of share against fair share): {index:.2f} of 1.{advice}"
