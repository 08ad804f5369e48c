"""API keys: a list, and a button that revokes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nicegui import ui

from common.errors import MeshError
from console_svc.charts.units import moment, plural
from console_svc.pages.frame import frame, refresh
from console_svc.pages.paging import Column, matches
from console_svc.pages.parts import Empty, Notice, box, button, section, text, text_input
from console_svc.pages.table import Table
from console_svc.state.console_state import ConsoleState
from console_svc.state.tenants import Key, Tenants

_NO_KEYS = (
    "The mesh has no API keys",
    "Create them with `meshctl keys --api-keys FILE create TENANT`, and give FILE to the frontends "
    "and to this console (--api-keys).",
)


@dataclass(frozen=True, slots=True)
class _Row:
    tenant: str
    key: Key
    can_revoke: bool


def _expiry(row: _Row) -> str:
    if row.key.expires_s is None:
        return "never"
    return f"{'■ expired ' if row.key.is_expired else ''}{moment(row.key.expires_s)}"


def _columns() -> Sequence[Column[_Row]]:
    return (
        Column("id", "Key", lambda r: r.key.id, lambda r: r.key.id, is_code=True),
        Column("tenant", "Tenant", lambda r: r.tenant, lambda r: r.tenant),
        Column("scopes", "Scopes", lambda r: ", ".join(r.key.scopes), is_long=True),
        Column("created", "Created", lambda r: moment(r.key.created_s), lambda r: r.key.created_s),
        Column(
            "expires",
            "Expires",
            _expiry,
            lambda r: r.key.expires_s,
            tone=lambda r: "bad" if r.key.is_expired else "",
        ),
        Column(
            "revoke",
            "Action",
            lambda r: "Revoke" if r.can_revoke else "",
            action=lambda r: f"Revoke {r.key.id} of {r.tenant}" if r.can_revoke else "",
        ),
    )


def define(state: ConsoleState) -> None:
    @ui.page("/keys", title="Keys · KVMesh")
    def page() -> None:
        lead = (
            "Each key belongs to a tenant. Frontends refuse a revoked key within 2 s; streams that "
        )
        with frame(state, "/keys", "API keys", f"{lead}run go on."):
            _KeysPage(state)


class _KeysPage:
    def __init__(self, state: ConsoleState) -> None:
        self._state = state
        self._problem = Notice("warn")
        self._result = Notice("warn")
        self._failure = Notice("bad")
        self._no_keys = Empty(*_NO_KEYS)
        with section("Keys") as self._part:
            with box("kv-row-end"):
                self._words = text_input(
                    "Filter", "keys-filter", placeholder="key, tenant, scope", style="width: 260px"
                )
                self._words.on_value_change(self._filtered)
                self._count = text("span", classes="kv-muted kv-small")
            empty = ("No key matches the filter", "Clear the filter to see all keys.")
            self._table = Table(
                "Keys", _columns(), lambda r: r.key.id, empty, on_action=self._confirm
            )
        refresh(state, self._render)

    def _render(self) -> None:
        found = self._state.tenants
        rows = _rows(found)
        self._problem.show(found.problem and f"Keys may be missing or old: {found.problem}")
        self._no_keys.show(not rows)
        self._part.set_visibility(bool(rows))
        note = "" if found.can_revoke else "; revoke with `meshctl keys --api-keys FILE revoke ID`"
        self._count.set_text(plural(len(rows), "key") + note)
        self._show(rows)

    def _filtered(self) -> None:
        self._table.first_page()
        self._show(_rows(self._state.tenants))

    def _show(self, rows: Sequence[_Row]) -> None:
        words = str(self._words.value or "")
        self._table.show([r for r in rows if matches(words, r.key.id, r.tenant, *r.key.scopes)])

    def _confirm(self, key_id: str) -> None:
        """Opens a question; the answer revokes the key or does nothing."""
        row = next((r for r in _rows(self._state.tenants) if r.key.id == key_id), None)
        if row is None:
            return

        async def revoke() -> None:
            dialog.close()
            await self._revoke(row)

        with ui.dialog() as dialog, ui.element("div").classes("kv-dialog kv"):
            dialog.props["aria-label"] = f"Revoke {key_id}"
            text("h2", f"Revoke {key_id}?")
            text(
                "p",
                f"Clients of {row.tenant} that use it are refused within 2 s. It cannot be undone.",
            )
            with box("kv-row"):
                button("Revoke the key", revoke, "kv-danger")
                button("Keep it", dialog.close).props["autofocus"] = True
        dialog.on("hide", dialog.delete)
        dialog.open()

    async def _revoke(self, row: _Row) -> None:
        try:
            await self._state.revoke_key(row.key.id)
        except MeshError as error:
            self._failure.show_error(error)
            return
        self._failure.show("")
        self._result.show(f"{row.key.id} of {row.tenant} is revoked")
        self._render()


def _rows(tenants: Tenants) -> list[_Row]:
    return [
        _Row(tenant.name, key, tenants.can_revoke)
        for tenant in tenants.tenants
        for key in tenant.keys
    ]
