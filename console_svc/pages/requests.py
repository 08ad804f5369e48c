"""Recent requests: a list with a filter, and a search by id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from nicegui import ui

from console_svc.charts.units import NONE, clock, count, duration, number, percent
from console_svc.pages.frame import frame, refresh
from console_svc.pages.paging import Column, matches
from console_svc.pages.parts import Notice, Toggle, box, button, choice, section, text_input
from console_svc.pages.table import Table
from console_svc.state.console_state import ConsoleState
from console_svc.state.requests import RequestRow

_EMPTY = (
    "No request yet",
    "Send one from the playground, or with curl to a frontend; it appears here when it ends.",
)
_ID_CHARS: Final = 12
_KINDS: Final = {
    "all": "all",
    "errors": "with an error",
    "split": "prefill and decode apart",
    "moved": "migrated or retried",
    "missed": "hit below half of the prediction",
    "unsampled": "without a trace",
}


def request_href(id_: str) -> str:
    return f"/requests/{quote(id_, safe='')}"


def short_id(id_: str) -> str:
    """Returns enough of an id to tell it from others on a page."""
    return id_ if len(id_) <= _ID_CHARS else f"{id_[:_ID_CHARS]}…"


def hit_text(row: RequestRow) -> str:
    """Returns the actual and the predicted cache hit as shares of the prompt."""
    if not row.prompt_tokens or row.cached_tokens is None:
        return NONE
    actual = percent(row.cached_tokens / row.prompt_tokens)
    if row.predicted_cached_tokens is None:
        return actual
    return f"{actual} ({percent(row.predicted_cached_tokens / row.prompt_tokens)})"


def is_missed(row: RequestRow) -> bool:
    """Returns whether the engine found less than half of the cached tokens that the router
    predicted."""
    predicted = row.predicted_cached_tokens or 0
    return row.cached_tokens is not None and row.cached_tokens * 2 < predicted


def path_text(row: RequestRow) -> str:
    """Returns the workers in the order of the legs."""
    return " → ".join(row.workers) or NONE


def moves(row: RequestRow) -> int:
    """Returns how often the request was placed again: before its first token, and after it."""
    return max(row.attempts - 1, row.migrations, 0)


def is_kind(row: RequestRow, kind: str) -> bool:
    match kind:
        case "errors":
            return row.is_error
        case "split":
            return row.is_split
        case "moved":
            return bool(moves(row))
        case "missed":
            return is_missed(row)
        case "unsampled":
            return not row.has_trace
    return True


COLUMNS: Sequence[Column[RequestRow]] = (
    Column("at", "Received (UTC)", lambda r: clock(r.received_s), lambda r: r.received_s),
    Column(
        "id",
        "Request",
        lambda r: short_id(r.request_id),
        href=lambda r: request_href(r.request_id),
        is_code=True,
    ),
    Column(
        "status",
        "Result",
        lambda r: f"{'■ ' if r.is_error else ''}{r.status or NONE}",
        lambda r: r.status,
        tone=lambda r: "bad" if r.is_error else "",
    ),
    Column("model", "Model", lambda r: r.model or NONE, lambda r: r.model),
    Column("workers", "Workers", path_text, path_text),
    Column(
        "prompt",
        "Prompt",
        lambda r: count(r.prompt_tokens),
        lambda r: r.prompt_tokens,
        is_number=True,
    ),
    Column("hit", "Hit (predicted)", hit_text, lambda r: r.cached_tokens, is_number=True),
    Column(
        "output",
        "Output",
        lambda r: count(r.output_tokens),
        lambda r: r.output_tokens,
        is_number=True,
    ),
    Column(
        "queue", "Queue", lambda r: duration(r.queued_ms), lambda r: r.queued_ms, is_number=True
    ),
    Column(
        "ttft", "First token", lambda r: duration(r.ttft_ms), lambda r: r.ttft_ms, is_number=True
    ),
    Column("total", "Total", lambda r: duration(r.total_ms), lambda r: r.total_ms, is_number=True),
    Column("tenant", "Tenant", lambda r: r.tenant or NONE, lambda r: r.tenant),
    Column(
        "moves",
        "Moves",
        lambda r: number(moves(r)) if moves(r) else NONE,
        moves,
        is_number=True,
    ),
)


def define(state: ConsoleState) -> None:
    @ui.page("/requests", title="Requests · KVMesh")
    def page() -> None:
        lead = (
            "The last requests of all frontends, newest first. Open one for its waterfall and why "
        )
        with frame(state, "/requests", "Requests", f"{lead}its worker was chosen."):
            _RequestsPage(state)


class _RequestsPage:
    def __init__(self, state: ConsoleState) -> None:
        self._state = state
        self._rows = state.requests
        with section("Recent requests"):
            with box("kv-row-end"):
                self._id = text_input(
                    "Find by id",
                    "request-id",
                    placeholder="request, response (chatcmpl-…), trace or client id",
                    style="width: 340px",
                )
                self._id.on("keydown.enter", self._find)
                button("Find", self._find)
                self._words = text_input(
                    "Filter",
                    "request-filter",
                    placeholder="model, worker, tenant, result",
                    style="width: 240px",
                )
                self._words.on_value_change(self._filtered)
                self._kind = choice(
                    "Show", "request-kind", dict(_KINDS), "all", self._filtered, "min-width: 220px"
                )
                self._paused = Toggle("Pause", self._render)
            self._not_found = Notice("warn")
            self._table = Table("Recent requests", COLUMNS, lambda r: r.request_id, _EMPTY)
        refresh(state, self._render)

    def _find(self) -> None:
        id_ = str(self._id.value or "").strip()
        row = self._state.find_request(id_) if id_ else None
        if row is not None:
            ui.navigate.to(request_href(row.request_id))
            return
        kept = len(self._state.requests)
        self._not_found.show(
            id_
            and f"None of the last {kept:,} requests has the id {id_!r}; one appears when it ends"
        )

    def _filtered(self) -> None:
        self._table.first_page()
        self._show()

    def _render(self) -> None:
        if not self._paused.is_pressed:
            self._rows = self._state.requests
            self._show()

    def _show(self) -> None:
        words, kind = str(self._words.value or ""), str(self._kind.value)
        self._table.show(
            [
                r
                for r in self._rows
                if is_kind(r, kind)
                and matches(
                    words,
                    r.request_id,
                    r.model,
                    r.tenant,
                    r.status,
                    r.client_id,
                    r.frontend,
                    *r.workers,
                )
            ]
        )
