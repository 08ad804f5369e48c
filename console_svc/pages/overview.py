"""The mesh as a whole: figures, topology, members and their changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nicegui import ui

from console_svc.charts.style import member_tone
from console_svc.charts.topology import WIDTH as TOPOLOGY_WIDTH
from console_svc.charts.topology import Card, topology
from console_svc.charts.units import count, duration, number, percent, plural, rate
from console_svc.pages.curves import Curves, Plot
from console_svc.pages.figure import Figure
from console_svc.pages.frame import frame, refresh
from console_svc.pages.members_table import event_table, member_href, member_table
from console_svc.pages.paging import matches
from console_svc.pages.parts import Notice, Tiles, box, choice, section, text, text_input
from console_svc.state.console_state import ConsoleState
from console_svc.state.members import Member, Overview

_NO_MEMBERS = (
    "No member is registered",
    "Start a mesh with `make run`, or check that the console reads its registry (--registry).",
)
_NO_MATCH = "No member matches the filter"
_ALL, _PROBLEMS = "all", "with a problem"
_PLOTS = (
    Plot("Requests a second", ("requests_per_s",)),
    Plot("Output tokens a second", ("tokens_per_s",)),
    Plot("Time to first token, ms", ("ttft_p50_ms", "ttft_p99_ms")),
    Plot("Requests", ("running", "waiting")),
    Plot("KV in use, %", ("kv_use",), is_share=True),
)
_LEGEND = (
    "● serving  ▲ failing, or gets no work  ■ does not respond  ○ unknown. The bar is the share of "
    "KV blocks in use."
)


def define(state: ConsoleState) -> None:
    @ui.page("/", title="Overview · KVMesh")
    def page() -> None:
        with frame(state, "/", "Overview"):
            _Overview(state)


class _Overview:
    def __init__(self, state: ConsoleState) -> None:
        self._state = state
        self._problems = Notice("warn")
        self._tiles = Tiles()
        self._cards: tuple[Card, ...] = ()
        with section("Topology", _LEGEND):
            self._topology = Figure(width=TOPOLOGY_WIDTH, height=320, on_click=self._clicked)
        with section("Last minutes"):
            self._curves = Curves(_PLOTS)
        with section("Changes"):
            self._events = event_table("Changes of members", 5)
        with section("Members"):
            with box("kv-row-end"):
                self._words = text_input(
                    "Filter",
                    "members-filter",
                    placeholder="name, model, role, version",
                    style="width: 260px",
                )
                self._words.on_value_change(self._filtered)
                self._which = choice(
                    "Show", "members-which", [_ALL, _PROBLEMS], _ALL, self._filtered
                )
                self._versions = text("span", classes="kv-muted kv-small")
            self._table = member_table("Members", _NO_MEMBERS)
        refresh(state, self._render)

    def _render(self) -> None:
        overview, members = self._state.overview, self._state.members
        self._problems.show(_headline(overview), overview.problems)
        self._tiles.show(_tiles(overview))
        picture = topology(members)
        self._cards = picture.cards
        caption = (
            "Each card stands for a group, because the mesh is large." if picture.is_grouped else ""
        )
        self._topology.show(picture.option, height=picture.height, caption=caption)
        self._topology.set_visibility(bool(members))
        self._curves.show(overview.curves)
        self._versions.set_text(_versions(members))
        self._events.show(self._state.events)
        self._show_members()

    def _filtered(self) -> None:
        self._table.first_page()
        self._show_members()

    def _show_members(self) -> None:
        words, which = str(self._words.value or ""), self._which.value
        self._table.show(
            [
                m
                for m in self._state.members
                if (which == _ALL or member_tone(m) != "ok")
                and matches(words, m.name, m.model, m.role, m.service, m.version, m.domain, m.id)
            ]
        )

    def _clicked(self, at: int) -> None:
        if at < len(self._cards) and self._cards[at].link:
            ui.navigate.to(member_href(self._cards[at].link))


def _headline(overview: Overview) -> str:
    return plural(len(overview.problems), "problem") if overview.problems else ""


def _tiles(overview: Overview) -> dict[str, tuple[str, str]]:
    traffic = overview.traffic
    waiting = f"{number(traffic.waiting)} waiting"
    unhealthy = f"{overview.unhealthy} with a problem" if overview.unhealthy else "all serve"
    return {
        "Requests a second": (rate(traffic.requests_per_s), "ended, last 10 s"),
        "Output tokens a second": (count(traffic.tokens_per_s), "all frontends"),
        "Time to first token": (
            duration(traffic.ttft_p50_ms),
            f"median; p99 {duration(traffic.ttft_p99_ms)}",
        ),
        "Running requests": (number(traffic.running), waiting),
        "KV in use": (percent(overview.kv_use), "by running requests"),
        "Members": (number(overview.members), unhealthy if overview.members else ""),
    }


def _versions(members: Sequence[Member]) -> str:
    versions = Counter(member.version for member in members if member.version)
    if len(versions) < 2:
        return ""
    listed = ", ".join(f"{version} ({number(n)})" for version, n in versions.most_common(4))
    return f"{len(versions)} versions run: {listed}"
