"""The frame of all pages: skip link, navigation, heading, theme, and when a page is drawn again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from nicegui import ui

from console_svc.charts.units import clock
from console_svc.pages.parts import Notice, box, link, prose, text
from console_svc.state.console_state import ConsoleState

PAGES: Final = (
    ("/", "Overview"),
    ("/requests", "Requests"),
    ("/index", "KV index"),
    ("/tenants", "Tenants"),
    ("/usage", "Usage"),
    ("/batches", "Batches"),
    ("/models", "Models"),
    ("/keys", "Keys"),
    ("/playground", "Playground"),
    ("/replay", "Replay"),
)
THEME_COOKIE: Final = "kvmesh_theme"
_THEMES: Final[dict[str, bool | None]] = {"auto": None, "light": False, "dark": True}
# A page of a mesh of so many members is drawn again each second.
_MEMBERS_A_SECOND = 200


@contextmanager
def frame(state: ConsoleState, here: str, title: str, lead: str = "") -> Iterator[None]:
    """Adds what all pages share, and enters the main part.

    - here: path of the entry of the navigation that the page belongs to.
    - lead: one sentence on the page, below the heading.
    """
    theme = ui.context.client.request.cookies.get(THEME_COOKIE, "auto")
    dark = ui.dark_mode(_THEMES.get(theme))
    _drop_outer_landmark()
    with box("kv"):
        link("Skip to the content", "#main", "kv-skip")
        with box("kv-shell"):
            _side(state, here, dark)
            with box("kv-main", "main") as main:
                main.props["id"] = "main"
                main.props["tabindex"] = "-1"
                with ui.element("header").classes("kv-stack").style("gap: 2px"):
                    with box("kv-head"):
                        text("h1", title)
                        fresh = text("span", classes="kv-fresh kv-muted kv-small")
                    if lead:
                        prose("p", lead, "kv-muted")
                registry = Notice("bad")
                yield

    def show_state() -> None:
        overview = state.overview
        fresh.set_text(f"updated {clock(_newest(state))} UTC")
        problem = overview.registry_problem
        registry.show(problem and f"The registry does not respond, members may be old: {problem}")

    refresh(state, show_state)


def _drop_outer_landmark() -> None:
    """Quasar's page is a `main`, too, around the navigation."""
    slot = ui.context.client.content.parent_slot
    assert slot is not None, "the content is in a page"
    slot.parent.tag = "div"


def refresh(state: ConsoleState, render: Callable[[], None]) -> None:
    """Calls `render` now, and again after each change of the state while a client is connected.

    In a large mesh it is called less often.
    """
    seen = state.version
    render()

    def tick() -> None:
        nonlocal seen
        if state.version != seen:
            seen = state.version
            render()

    ui.timer(max(state.interval_s, len(state.members) / _MEMBERS_A_SECOND), tick)


def _newest(state: ConsoleState) -> float:
    return max((member.asked_s for member in state.members), default=0.0)


def _side(state: ConsoleState, here: str, dark: ui.dark_mode) -> None:
    with box("kv-side", "aside"):
        with box("kv-brand"):
            text("strong", "KVMesh")
            text("div", state.overview.namespace or "console", "kv-muted kv-small")
        with ui.element("nav") as nav, ui.element("ul"):
            nav.props["aria-label"] = "Pages"
            for path, name in PAGES:
                with ui.element("li"):
                    entry = link(name, path)
                    if path == here:
                        entry.props["aria-current"] = "page"
        with box("kv-side-end"):
            _theme_button(dark)
            with ui.element("form") as form:
                form.props["method"] = "post"
                form.props["action"] = "/logout"
                text("button", "Sign out", "kv-quiet").props["type"] = "submit"


def _theme_button(dark: ui.dark_mode) -> None:
    """Adds a button that changes between the themes; a cookie keeps the choice."""
    names = list(_THEMES)

    def label() -> str:
        return f"Theme: {next(name for name in names if _THEMES[name] is dark.value)}"

    def change() -> None:
        name = names[(list(_THEMES.values()).index(dark.value) + 1) % len(names)]
        dark.set_value(_THEMES[name])
        toggle.set_text(label())
        cookie = f"{THEME_COOKIE}={name}; path=/; max-age=31536000; samesite=strict"
        ui.run_javascript(f"document.cookie = '{cookie}'")

    toggle = text("button", label(), "kv-quiet")
    toggle.props["type"] = "button"
    toggle.on("click", change)
