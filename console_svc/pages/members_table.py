"""The columns of tables of members and of their events."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from console_svc.charts.style import MARKS, member_tone
from console_svc.charts.topology import state_of
from console_svc.charts.units import NONE, clock, number, percent
from console_svc.pages.paging import Column, View
from console_svc.pages.table import Table
from console_svc.state.members import Event, Member

_MEMBER_ROWS = 25
_SERVICES = ("frontend", "router", "indexer", "batch", "worker")


def member_href(name: str) -> str:
    return f"/members/{quote(name, safe='')}"


def health_text(member: Member) -> str:
    return f"{MARKS[member_tone(member)]} {state_of(member)}"


def _routable(member: Member) -> str:
    match member.is_routable:
        case True:
            return "yes"
        case False:
            return f"no, waits for {len(member.missing)}" if member.missing else "no"
    return NONE


def _health_order(member: Member) -> str:
    return ("0", "1", "2", "3")[("bad", "warn", "unknown", "ok").index(member_tone(member))]


MEMBER_COLUMNS: Sequence[Column[Member]] = (
    Column("name", "Name", lambda m: m.name, lambda m: m.name, href=lambda m: member_href(m.name)),
    Column(
        "service", "Service", lambda m: m.service, lambda m: (_SERVICES.index(m.service), m.name)
    ),
    Column("role", "Role", lambda m: m.role or NONE, lambda m: m.role or None),
    Column("health", "Health", health_text, _health_order, tone=member_tone),
    Column("routable", "Routable", _routable, lambda m: m.is_routable),
    Column("running", "Running", lambda m: number(m.running), lambda m: m.running, is_number=True),
    Column("waiting", "Waiting", lambda m: number(m.waiting), lambda m: m.waiting, is_number=True),
    Column("kv", "KV in use", lambda m: percent(m.kv_use), lambda m: m.kv_use, is_number=True),
    Column("model", "Model", lambda m: m.model or NONE, lambda m: m.model or None),
    Column("domain", "Domain", lambda m: m.domain or NONE, lambda m: m.domain or None),
    Column("version", "Version", lambda m: m.version or NONE, lambda m: m.version or None),
    Column("address", "Address", lambda m: m.address, is_code=True),
)

EVENT_COLUMNS: Sequence[Column[Event]] = (
    Column("at", "Time (UTC)", lambda e: clock(e.at_s), lambda e: e.at_s),
    Column(
        "name", "Member", lambda e: e.name, lambda e: e.name, href=lambda e: member_href(e.name)
    ),
    Column("service", "Service", lambda e: e.service, lambda e: e.service),
    Column("what", "What happened", lambda e: e.text, is_long=True),
)


def member_table(caption: str, empty: tuple[str, str]) -> Table[Member]:
    return Table(caption, MEMBER_COLUMNS, lambda m: m.id, empty, page_rows=_MEMBER_ROWS)


def event_table(caption: str, page_rows: int) -> Table[Event]:
    empty = ("Nothing changed yet", "Members that join, leave or change their health appear here.")
    return Table(
        caption,
        EVENT_COLUMNS,
        lambda e: f"{e.at_s}/{e.member_id}/{e.kind}",
        empty,
        page_rows=page_rows,
        view=View(),
    )
