"""One member: what it is, its load over time, what the indexers hold of it, its changes."""

from __future__ import annotations

from collections.abc import Sequence

from nicegui import ui

from console_svc.charts.units import NONE, count, moment, number, percent
from console_svc.pages.curves import Curves, Plot
from console_svc.pages.frame import frame, refresh
from console_svc.pages.index import source_table
from console_svc.pages.members_table import event_table, health_text
from console_svc.pages.paging import Column
from console_svc.pages.parts import Empty, Facts, Notice, section
from console_svc.pages.table import Table
from console_svc.state.console_state import ConsoleState
from console_svc.state.members import IndexSource, Member, Rank

_PLOTS = (
    Plot("Requests", ("running", "waiting")),
    Plot("KV in use, %", ("kv_use",), is_share=True),
)
_RANKS: Sequence[Column[Rank]] = (
    Column("rank", "Rank", lambda r: str(r.dp_rank), lambda r: r.dp_rank, is_number=True),
    Column("running", "Running", lambda r: number(r.running), lambda r: r.running, is_number=True),
    Column("waiting", "Waiting", lambda r: number(r.waiting), lambda r: r.waiting, is_number=True),
    Column(
        "tokens",
        "Waiting tokens",
        lambda r: count(r.waiting_tokens),
        lambda r: r.waiting_tokens,
        is_number=True,
    ),
    Column(
        "blocks",
        "KV blocks in use",
        lambda r: f"{number(r.kv_used_blocks)} of {number(r.kv_total_blocks)}",
        lambda r: r.kv_used_blocks,
        is_number=True,
    ),
    Column("rooms", "Handoffs", lambda r: number(r.rooms_open), is_number=True),
)


def define(state: ConsoleState) -> None:
    @ui.page("/members/{name}", title="Member · KVMesh")
    def page(name: str) -> None:
        with frame(state, "/", name):
            _MemberPage(state, name)


class _MemberPage:
    def __init__(self, state: ConsoleState, name: str) -> None:
        self._state, self._name = state, name
        self._last: Member | None = state.member(name)
        self._gone = Empty(
            "No such member is registered",
            "It left before the console started, or never joined. The overview lists the members.",
        )
        self._lost = Notice("bad")
        self._problem = Notice("warn")
        with section("Member"):
            self._facts = Facts("kv-facts kv-panel")
        with section("Load") as self._load:
            self._curves = Curves(_PLOTS)
            self._ranks = Table("Ranks", _RANKS, lambda r: str(r.dp_rank), ("No load reported", ""))
        with section("In the index") as self._index:
            self._sources = source_table("Sources of this worker")
        with section("Changes"):
            self._events = event_table("Changes of this member", 10)
        refresh(state, self._render)

    def _render(self) -> None:
        member = self._state.member(self._name)
        self._gone.show(member is None and self._last is None)
        is_lost = member is None and self._last is not None
        self._lost.show(
            f"{self._name} has left the mesh; its last figures follow" if is_lost else ""
        )
        self._last = member = member or self._last
        if member is None:
            return
        is_worker = member.service == "worker"
        self._facts.show(_facts(member))
        self._problem.show(_problem(member), member.missing)
        self._load.set_visibility(is_worker or member.running is not None)
        self._curves.show(self._state.member_curves(member.id))
        self._ranks.show(member.ranks)
        self._index.set_visibility(is_worker)
        self._sources.show(_sources(self._state, member))
        self._events.show(
            [e for e in self._state.events if e.member_id == member.id or e.name == member.name]
        )


def _sources(state: ConsoleState, member: Member) -> list[IndexSource]:
    return [s for view in state.index for s in view.sources if s.worker_id == member.id]


def _problem(member: Member) -> str:
    if member.failure:
        return f"Its engine fails its probes: {member.failure}"
    if member.missing:
        return "These peers do not send it work yet"
    return "" if member.is_healthy else f"Health: {member.health.replace('_', ' ')}"


def _facts(member: Member) -> dict[str, str | tuple[str, str]]:
    facts: dict[str, str | tuple[str, str]] = {
        "Service": " · ".join(filter(None, (member.service, member.role))),
        "Health": health_text(member),
        "Instance": member.id,
        "Address": member.address,
        "Version": member.version or NONE,
        "Seen since": moment(member.seen_s),
        "Last response": moment(member.asked_s),
    }
    if member.service == "worker":
        facts |= {
            "Model": member.model or NONE,
            "Transfer domain": member.domain or NONE,
            "Transfer group": member.transfer_group or NONE,
            "KV in use": percent(member.kv_use),
            "Ranks": number(member.dp_size),
            "Block size": f"{number(member.block_size)} tokens" if member.block_size else NONE,
            "Context": f"{number(member.context_length)} tokens" if member.context_length else NONE,
            "KV index": member.kv_index,
            "Taints": ", ".join(member.taints) or "none",
            "Adapters": ", ".join(member.adapters) or "none",
        }
    if member.url:
        facts["API"] = member.url
    return facts
