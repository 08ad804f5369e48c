"""Routing policies compared on a trace, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nicegui import ui

from common.errors import MeshError
from console_svc.charts.replay import balances, distribution, hit_rates, quantiles
from console_svc.charts.units import NONE, duration, number, percent
from console_svc.pages.figure import Figure
from console_svc.pages.frame import frame, refresh
from console_svc.pages.paging import Column
from console_svc.pages.parts import (
    Empty,
    Notice,
    box,
    button,
    choice,
    section,
    set_choices,
    text,
    text_input,
)
from console_svc.pages.table import Table
from console_svc.state.actions import ReplayReport, ReplayRequest, ReplayRun
from console_svc.state.console_state import ConsoleState

_DEFAULTS = ("kv", "least_loaded", "random")
_WORKERS_MAX, _REQUESTS_MAX = 64, 5000
_EMPTY = (
    "No replay yet",
    "Choose a workload and policies, and run it. Routers, caches and schedulers are those of the "
    "mesh; time is virtual.",
)


def _figure(name: str, label: str, text_of: Callable[[float | None], str]) -> Column[ReplayRun]:
    return Column(
        name,
        label,
        lambda run: text_of(run.figures.get(name)),
        lambda run: run.figures.get(name),
        is_number=True,
    )


def _seconds(value: float | None) -> str:
    return duration(None if value is None else 1000 * value)


COLUMNS: Sequence[Column[ReplayRun]] = (
    Column("policy", "Policy", lambda run: run.policy, lambda run: run.policy),
    _figure("hit_rate", "Hit rate", percent),
    _figure("ttft_mean_s", "First token, mean", _seconds),
    _figure("ttft_p50_s", "p50", _seconds),
    _figure("ttft_p90_s", "p90", _seconds),
    _figure("ttft_p99_s", "p99", _seconds),
    _figure("itl_p99_s", "Token gap, p99", _seconds),
    _figure("load_variation", "Load variation", lambda value: number(value, 2)),
    _figure("duration_s", "Duration", _seconds),
    _figure("unanswered", "Unanswered", number),
    _figure("preemptions", "Preemptions", number),
)


def define(state: ConsoleState) -> None:
    @ui.page("/replay", title="Replay · KVMesh")
    def page() -> None:
        lead = "Compares routing policies on a trace, with the cores of the mesh, in virtual time."
        with frame(state, "/replay", "Replay", lead):
            _ReplayPage(state)


class _ReplayPage:
    def __init__(self, state: ConsoleState) -> None:
        self._state = state
        self._error = Notice("bad")
        with section("Run"), box("kv-panel kv-stack"):
            self._build_form()
        self._empty = Empty(*_EMPTY)
        with box("kv-section") as self._results:
            with section("Results"):
                self._facts = text("p", classes="kv-muted kv-small")
                self._table = Table("Results by policy", COLUMNS, lambda run: run.policy, _EMPTY)
            with box("kv-columns"):
                with section("Time to first token"), box("kv-panel kv-stack"):
                    self._quantiles = Figure(
                        "Quantiles, logarithmic axis; less is better.", height=300
                    )
                    caption = "Distribution, logarithmic axis; further left is better."
                    self._distribution = Figure(caption, height=260)
                with section("Cache and balance"), box("kv-panel kv-stack"):
                    text("h3", "Hit rate; more is better")
                    self._hits = Figure(height=140)
                    text("h3", "Load variation between workers; less is better")
                    self._balances = Figure(height=140)
        self._results.set_visibility(False)
        refresh(state, self._show_choices)

    def _build_form(self) -> None:
        with box("kv-row-end"):
            style = "min-width: 220px"
            self._trace = choice("Workload or trace", "replay-trace", [], "", style=style)
            self._workers = text_input(
                f"Workers, at most {_WORKERS_MAX}",
                "replay-workers",
                value="4",
                props="type=number min=1",
            )
            self._requests = text_input(
                f"Requests, at most {_REQUESTS_MAX:,}",
                "replay-requests",
                value="500",
                props="type=number min=1",
            )
        with ui.element("fieldset").style("border: 0; margin: 0; padding: 0"):
            text("legend", "Policies", "kv-muted kv-small").style("padding: 0")
            with box("kv-row") as self._boxes:
                self._policies: dict[str, ui.checkbox] = {}
        with box("kv-row"):
            self._run_button = button("Run", self._run, "kv-primary")
            self._progress = text("span", classes="kv-muted kv-small")
            self._progress.props["role"] = "status"

    def _show_choices(self) -> None:
        """Shows workloads and policies, which the console reads in the background."""
        state = self._state
        set_choices(self._trace, [*state.replay_workloads, *state.replay_traces])
        if list(self._policies) != list(state.replay_policies):
            self._boxes.clear()
            with self._boxes:
                self._policies = {
                    name: ui.checkbox(name, value=name in _DEFAULTS).props("dense")
                    for name in state.replay_policies
                }

    def _request(self) -> ReplayRequest:
        """Returns the request of the fields. Raises ValueError."""
        policies = tuple(name for name, box_ in self._policies.items() if box_.value)
        if not policies:
            raise ValueError("policies: choose at least one")
        workers = _bounded("workers", self._workers.value, _WORKERS_MAX)
        requests = _bounded("requests", self._requests.value, _REQUESTS_MAX)
        return ReplayRequest(str(self._trace.value or ""), policies, workers, requests)

    async def _run(self) -> None:
        self._error.show("")
        try:
            request = self._request()
        except ValueError as error:
            self._error.show(str(error))
            return
        self._run_button.set_enabled(False)
        self._progress.set_text(
            f"{len(request.policies)} policies on {request.requests:,} requests …"
        )
        try:
            self._show(await self._state.replay(request))
        except MeshError as error:
            self._error.show_error(error)
        finally:
            self._run_button.set_enabled(True)
            self._progress.set_text("")

    def _show(self, report: ReplayReport) -> None:
        runs = report.runs
        self._empty.show(False)
        self._results.set_visibility(True)
        settings = ", ".join(
            f"{name} {_plain(value)}"
            for name, value in report.facts.items()
            if value and name != "trace"
        )
        self._facts.set_text(f"{report.trace}: {settings}")
        self._table.show(runs)
        self._quantiles.show(quantiles(runs))
        has_cdf = any(run.ttft_cdf for run in runs)
        self._distribution.set_visibility(has_cdf)
        if has_cdf:
            self._distribution.show(distribution(runs))
        height = 24 + 26 * len(runs)
        self._hits.show(hit_rates(runs), height=height)
        self._balances.show(balances(runs), height=height)


def _bounded(name: str, value: object, high: int) -> int:
    """Raises ValueError with the name and the limit."""
    try:
        found = int(str(value))
    except ValueError:
        found = 0
    if not 1 <= found <= high:
        raise ValueError(f"{name}: must be 1 to {high:,}, not {value}")
    return found


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value) if value is not None else NONE
