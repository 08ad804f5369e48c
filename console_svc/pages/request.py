"""One request: its facts, its waterfall, and why its workers were chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nicegui import ui

from common.errors import MeshError, NotFound
from console_svc.charts.bars import height_px as bars_height_px
from console_svc.charts.routing import candidate_name, compared, costs, hits, leg_name, legs
from console_svc.charts.units import NONE, age, duration, moment, number, percent
from console_svc.charts.waterfall import SPANS_MAX, describe_links, waterfall
from console_svc.charts.waterfall import height_px as waterfall_height_px
from console_svc.pages.figure import Figure
from console_svc.pages.frame import frame, refresh
from console_svc.pages.members_table import member_href
from console_svc.pages.paging import Column
from console_svc.pages.parts import (
    Disclosure,
    Empty,
    Facts,
    Notice,
    box,
    button,
    link,
    section,
    text,
)
from console_svc.pages.requests import path_text, short_id
from console_svc.pages.table import Table
from console_svc.state.console_state import ConsoleState
from console_svc.state.requests import Candidate, Explanation, RequestRow, Trace, TraceSpan

_NOT_HERE = (
    "The console has no request with this id",
    "It keeps the last requests of each frontend; a request appears when it ends. `meshctl explain "
    "ID` also searches logs and records.",
)
_SPANS: Sequence[Column[TraceSpan]] = (
    Column("name", "Span", lambda s: f"{'· ' * s.depth}{s.name}"),
    Column("service", "Service", lambda s: s.service),
    Column("member", "Member", lambda s: s.member, href=lambda s: member_href(s.member)),
    Column("start", "Start", lambda s: duration(s.start_ms), lambda s: s.start_ms, is_number=True),
    Column(
        "duration",
        "Duration",
        lambda s: duration(s.duration_ms),
        lambda s: s.duration_ms,
        is_number=True,
    ),
    Column("error", "Error", lambda s: s.error or "none", tone=lambda s: "bad" if s.error else ""),
    Column("events", "Events", lambda s: ", ".join(n for _, n in s.events) or NONE, is_long=True),
    Column(
        "attributes",
        "Attributes",
        lambda s: ", ".join(f"{k}={v}" for k, v in s.attributes.items()) or NONE,
        is_long=True,
    ),
)


def _excluded(candidate: Candidate) -> str:
    if candidate.excluded_reason:
        return f"excluded: {candidate.excluded_reason}"
    return "chosen" if candidate.is_chosen else ""


def _index(candidate: Candidate) -> str:
    reason = f": {candidate.index_reason}" if candidate.index_reason else ""
    return f"{candidate.index_state or NONE}{reason}"


def _age(candidate: Candidate) -> str:
    ms = candidate.report_age_ms
    return NONE if ms is None else f"{duration(ms)} before"


def _terms(candidate: Candidate) -> str:
    neutral = {"taint_factor": 1.0}
    parts = [
        f"{name} {value:.3g}"
        for name, value in sorted(candidate.terms.items(), key=lambda term: -term[1])
        if value != neutral.get(name, 0.0)
    ]
    return ", ".join(parts) or NONE


_CANDIDATES: Sequence[Column[Candidate]] = (
    Column(
        "worker",
        "Worker",
        lambda c: f"{'▶ ' if c.is_chosen else ''}{candidate_name(c)}",
        candidate_name,
        href=lambda c: member_href(c.worker or c.worker_id),
    ),
    Column("cost", "Cost", lambda c: number(c.cost, 3), lambda c: c.cost, is_number=True),
    Column(
        "hit",
        "Cached blocks",
        lambda c: number(c.overlap_blocks),
        lambda c: c.overlap_blocks,
        is_number=True,
    ),
    Column(
        "requests",
        "Requests",
        lambda c: number(c.active_requests),
        lambda c: c.active_requests,
        is_number=True,
    ),
    Column(
        "prefill",
        "Prompt tokens",
        lambda c: number(c.prefill_tokens),
        lambda c: c.prefill_tokens,
        is_number=True,
    ),
    Column(
        "blocks",
        "KV blocks",
        lambda c: number(c.decode_blocks),
        lambda c: c.decode_blocks,
        is_number=True,
    ),
    Column("index", "Index", _index, lambda c: c.index_state),
    Column("report", "Load report", _age, lambda c: c.report_age_ms),
    Column(
        "note",
        "Result",
        _excluded,
        tone=lambda c: "warn" if c.excluded_reason else "ok",
        is_long=True,
    ),
    Column("terms", "Parts of the cost", _terms, is_long=True),
)


def define(state: ConsoleState) -> None:
    @ui.page("/requests/{id_}", title="Request · KVMesh")
    def page(id_: str) -> None:
        with frame(state, "/requests", f"Request {short_id(id_)}"):
            _RequestPage(state, id_)


class _RequestPage:
    def __init__(self, state: ConsoleState, id_: str) -> None:
        self._state, self._id = state, id_
        self._row: RequestRow | None = None
        self._trace: Trace | None = None
        self._empty = Empty(*_NOT_HERE)
        with section("Facts") as self._facts_part:
            self._facts = Facts("kv-facts kv-panel")
        with section("Waterfall") as self._waterfall_part:
            self._note = text("p", classes="kv-muted")
            with box("kv-panel kv-stack"):
                self._waterfall = Figure(height=200)
                self._links = text("p")
            spans = Disclosure("Spans as a table", lambda: None)
            with spans.element:
                empty = ("No spans", "")
                self._spans = Table("Spans", _SPANS, lambda s: s.span_id, empty)
        self._why = _Why(state)
        refresh(state, self._render)

    def _render(self) -> None:
        row, trace = self._state.find_request(self._id), self._state.trace(self._id)
        if row is not None:
            self._row = row
        is_missing = self._row is None and trace is None
        self._empty.show(is_missing)
        self._facts_part.set_visibility(self._row is not None)
        self._waterfall_part.set_visibility(not is_missing)
        if self._row is not None:
            self._facts.show(_facts(self._row))
        if trace is not None and trace != self._trace:
            self._trace = trace
            self._show_trace(trace)
        elif self._trace is None and self._row is not None:
            self._note.set_text("No span and no stage of this request has arrived.")
        if self._row is not None:
            self._why.show(self._row)

    def _show_trace(self, trace: Trace) -> None:
        self._waterfall.show(waterfall(trace), height=waterfall_height_px(trace))
        self._note.set_text(_trace_note(trace))
        self._links.set_text(". ".join(describe_links(trace)))
        self._spans.show(trace.spans)


class _Why:
    """Why this worker. The explanation is fetched once the request is known, and on demand."""

    def __init__(self, state: ConsoleState) -> None:
        self._state = state
        self._row: RequestRow | None = None
        with section("Why this worker") as self._part:
            self._problem = Notice("warn")
            self._content = ui.element("div").classes("kv-stack")
            self._again = button("Ask the router again", self._load)
        self._part.set_visibility(False)
        self._again.set_visibility(False)

    def show(self, row: RequestRow) -> None:
        """Fetches the explanation of the request, the first time."""
        if self._row is None:
            self._row = row
            self._part.set_visibility(True)
            ui.timer(0, self._load, once=True)
        self._row = row

    async def _load(self) -> None:
        assert self._row is not None
        try:
            explanation = await self._state.explain(self._row.request_id)
        except asyncio.CancelledError:
            raise
        except MeshError as error:
            self._again.set_visibility(True)
            self._problem.show(f"No explanation: {error.message}", _advice(error))
            self._content.clear()
            with self._content:
                _show_reasons(self._row.reasons)
            return
        self._problem.show("")
        self._again.set_visibility(False)
        self._content.clear()
        with self._content:
            _show_explanation(explanation, self._row)


def _advice(error: MeshError) -> tuple[str, ...]:
    if isinstance(error, NotFound):
        return ("A router keeps its last 4096 decisions; an older one is gone.",)
    return ("The waterfall above does not need the router.",)


def _show_explanation(explanation: Explanation, row: RequestRow) -> None:
    with box("kv-panel kv-stack"):
        with ui.element("p"):
            text("span", f"{leg_name('decode') if explanation.prefill else 'Served'} on ")
            link(explanation.worker, member_href(explanation.worker))
            if explanation.prefill:
                text("span", ", prefill on ")
                link(explanation.prefill, member_href(explanation.prefill))
            text("span", f", chosen by {explanation.router} ({explanation.selector}) ")
            text("span", f"{age(explanation.age_s)} ago.", "kv-muted")
        _show_reasons(explanation.reasons)
        with box("kv-columns"):
            with box("kv-stack"):
                text("h3", "Predicted against actual cache hit, tokens")
                Figure(height=112).show(hits(explanation, row.prompt_tokens))
            facts = Facts()
            facts.show(_prediction(explanation, row))
    for leg, candidates in legs(explanation).items():
        with box("kv-stack"):
            text("h3", f"{leg_name(leg)}: candidates")
            if compared(candidates):
                with box("kv-panel"):
                    Figure(
                        "Parts of the cost in the unit of the selector; less is better. ▶: chosen.",
                        height=bars_height_px(len(compared(candidates))),
                    ).show(costs(leg, candidates))
            table = Table(
                f"{leg_name(leg)}: candidates",
                _CANDIDATES,
                lambda c: f"{c.worker_id}/{c.dp_rank}",
                ("The router names no candidate", ""),
                is_chosen=lambda c: c.is_chosen,
            )
            table.show(candidates)


def _show_reasons(reasons: Sequence[str]) -> None:
    with ui.element("ul").style("margin: 0; padding-left: 18px"):
        for reason in reasons:
            text("li", reason)


def _prediction(explanation: Explanation, row: RequestRow) -> dict[str, str | tuple[str, str]]:
    actual, predicted = explanation.actual_cached_tokens, explanation.predicted_cached_tokens
    known = NONE if actual is None else f"{number(actual)} tokens"
    drift = NONE if actual is None else f"{actual - predicted:+,} tokens"
    return {
        "Predicted": f"{number(predicted)} tokens, {number(explanation.overlap_blocks)} blocks",
        "Actual": known,
        "Difference": drift,
        "Prompt": f"{number(row.prompt_tokens)} tokens",
        "In the router's queue": duration(explanation.queued_ms),
    }


def _trace_note(trace: Trace) -> str:
    if trace.is_stages:
        return "This request was not sampled: its stages are from the record of its frontend."
    notes = [f"Trace {trace.trace_id}, {len(trace.spans)} spans in {duration(trace.duration_ms)}."]
    if trace.links:
        notes.append("The arrow is the link from prefill to decode.")
    if trace.dropped_spans:
        notes.append(f"{trace.dropped_spans} spans beyond the limit were dropped.")
    if len(trace.spans) > SPANS_MAX:
        notes.append(f"The first {SPANS_MAX} are drawn.")
    return " ".join(notes)


def _facts(row: RequestRow) -> dict[str, str | tuple[str, str]]:
    hit = NONE
    if row.cached_tokens is not None and row.prompt_tokens:
        hit = (
            f"{number(row.cached_tokens)} tokens ({percent(row.cached_tokens / row.prompt_tokens)})"
        )
    return {
        "Request": row.request_id,
        "Id of the client": row.client_id or NONE,
        "Received": moment(row.received_s),
        "Result": _result(row),
        "Model": row.model or NONE,
        "Endpoint": row.endpoint or NONE,
        "Tenant": row.tenant or NONE,
        "Frontend": (row.frontend, member_href(row.frontend)) if row.frontend else NONE,
        "Workers": path_text(row),
        "Prompt": f"{number(row.prompt_tokens)} tokens",
        "Output": f"{number(row.output_tokens)} tokens",
        "Cache hit": hit,
        "In the queue": duration(row.queued_ms),
        "First token": duration(row.ttft_ms),
        "Total": duration(row.total_ms),
        "Attempts, migrations": f"{number(row.attempts)}, {number(row.migrations)}",
    }


def _result(row: RequestRow) -> str:
    status = f" ({row.http_status})" if row.http_status else ""
    error = f": {row.error}" if row.error else ""
    return f"{'■ ' if row.is_error else ''}{row.status or NONE}{status}{error}"
