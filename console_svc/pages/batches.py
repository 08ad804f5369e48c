"""Batches and their progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nicegui import ui

from console_svc.charts.units import NONE, count, percent
from console_svc.pages.frame import frame, refresh
from console_svc.pages.paging import Column
from console_svc.pages.parts import Empty, Notice, Tiles, box
from console_svc.pages.table import Table
from console_svc.state.batches import Batches, BatchView, ResponseCountView
from console_svc.state.console_state import ConsoleState

_NO_SERVICE = (
    "The mesh has no batch service",
    "Start one with `meshctl up --batches 1`. Clients then use `/v1/files` and `/v1/batches`.",
)
_NO_BATCHES = (
    "No batch yet",
    "Clients begin one with `client.batches.create`. `meshctl batches` prints the same figures.",
)
_TONES = {"completed": "ok", "failed": "bad", "expired": "bad", "cancelled": "warn"}
_RUNNING = ("validating", "in_progress", "finalizing", "cancelling")


class _Row(Protocol):
    """What a row of each table has."""

    @property
    def tenant(self) -> str: ...

    @property
    def status(self) -> str: ...


_OWNER: Sequence[Column[_Row]] = (
    Column("tenant", "Tenant", lambda row: row.tenant or NONE, lambda row: row.tenant),
    Column(
        "status",
        "Status",
        lambda row: row.status,
        lambda row: row.status,
        tone=lambda row: _TONES.get(row.status, ""),
    ),
)
COLUMNS: Sequence[Column[BatchView]] = (
    Column("id", "Batch", lambda row: row.id, lambda row: row.created_s, is_code=True),
    *_OWNER,
    Column("endpoint", "Endpoint", lambda row: row.endpoint, lambda row: row.endpoint),
    Column("total", "Lines", lambda row: count(row.total), lambda row: row.total, is_number=True),
    Column("done", "Done", lambda row: percent(row.done), lambda row: row.done, is_number=True),
    Column(
        "failed", "Failed", lambda row: count(row.failed), lambda row: row.failed, is_number=True
    ),
    Column(
        "in_flight",
        "In flight",
        lambda row: count(row.in_flight),
        lambda row: row.in_flight,
        is_number=True,
    ),
    Column("problem", "Problem", lambda row: row.problem or NONE, is_long=True),
)

_NO_RESPONSES = (
    "No response in the background yet",
    "Clients begin one with `client.responses.create(background=True)`.",
)
RESPONSE_COLUMNS: Sequence[Column[ResponseCountView]] = (
    *_OWNER,
    Column(
        "count", "Responses", lambda row: count(row.count), lambda row: row.count, is_number=True
    ),
)


def define(state: ConsoleState) -> None:
    @ui.page("/batches", title="Batches · KVMesh")
    def page() -> None:
        lead = "Files of requests that run on idle capacity, newest first."
        with frame(state, "/batches", "Batches", lead):
            _BatchesPage(state)


class _BatchesPage:
    def __init__(self, state: ConsoleState) -> None:
        self._state = state
        self._problem = Notice("warn")
        self._empty = Empty(*_NO_SERVICE)
        with box("kv-section") as self._content:
            self._content.style("gap: 24px")
            self._tiles = Tiles()
            self._table = Table("Batches", COLUMNS, lambda row: row.id, _NO_BATCHES)
            self._responses = Table(
                "Responses in the background",
                RESPONSE_COLUMNS,
                lambda row: f"{row.status} {row.tenant}",
                _NO_RESPONSES,
            )
        refresh(state, self._render)

    def _render(self) -> None:
        found = self._state.batches
        self._problem.show(found.problem and f"Figures may be old: {found.problem}")
        self._empty.show(not found.has_service)
        self._content.set_visibility(found.has_service)
        self._tiles.show(tiles(found))
        self._table.show(found.batches)
        self._responses.show(found.responses)


def tiles(found: Batches) -> dict[str, tuple[str, str]]:
    """Returns the sums of the batches that have not ended."""
    running = [batch for batch in found.batches if batch.status in _RUNNING]
    lines = sum(batch.total for batch in running)
    done = sum(batch.completed + batch.failed for batch in running)
    return {
        "Batches that run": (count(len(running)), f"by {found.runner or 'no service'}"),
        "Lines left": (count(lines - done), f"of {count(lines)}"),
        "Lines in flight": (count(sum(batch.in_flight for batch in running)), ""),
    }
