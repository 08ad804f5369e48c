"""Parts that several pages are made of: texts, facts, tiles, notices, fields, buttons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

# Any: handlers of NiceGUI.
from typing import Any

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from common.errors import MeshError


def text(tag: str, content: str = "", classes: str = "") -> TextElement:
    """Adds an element with a text."""
    return TextElement(tag=tag, text=content).classes(classes)


@contextmanager
def box(classes: str, tag: str = "div") -> Iterator[ui.element]:
    """Adds a container, and enters it."""
    with ui.element(tag).classes(classes) as element:
        yield element


def link(content: str, href: str, classes: str = "") -> TextElement:
    element = text("a", content, classes)
    element.props["href"] = href
    return element


def prose(tag: str, content: str, classes: str = "") -> ui.element:
    """Adds a text, in which backticks enclose code."""
    with ui.element(tag).classes(classes) as element:
        for at, part in enumerate(content.split("`")):
            if part:
                text("code" if at % 2 else "span", part)
    return element


@contextmanager
def section(title: str, note: str = "") -> Iterator[ui.element]:
    """Adds a part of a page under a heading."""
    with box("kv-section", "section") as element:
        with box("kv-spread"):
            text("h2", title)
            if note:
                text("span", note, "kv-muted kv-small")
        element.props["aria-label"] = title
        yield element


class Facts:
    """Names with values, which change in place. Values with a link are updated, too."""

    def __init__(self, classes: str = "kv-facts") -> None:
        self._list = ui.element("dl").classes(classes)
        self._shown: Mapping[str, str | tuple[str, str]] = {}

    def show(self, facts: Mapping[str, str | tuple[str, str]]) -> None:
        """facts: text by name, or text and address of a link."""
        if facts == self._shown:
            return
        self._shown = dict(facts)
        self._list.clear()
        with self._list:
            for name, value in facts.items():
                with ui.element("div"):
                    text("dt", name)
                    with ui.element("dd"):
                        if isinstance(value, tuple):
                            link(*value)
                        else:
                            text("span", value)


class Tiles:
    """Large figures in a row. A tile keeps its element, so that only new texts are sent."""

    def __init__(self) -> None:
        self._list = ui.element("dl").classes("kv-tiles")
        self._texts: dict[str, tuple[TextElement, TextElement]] = {}

    def show(self, tiles: Mapping[str, tuple[str, str]]) -> None:
        """tiles: figure and note by name; always the same names."""
        for name, (figure, note) in tiles.items():
            if name not in self._texts:
                with self._list, ui.element("div").classes("kv-tile"):
                    text("dt", name)
                    self._texts[name] = (text("dd"), text("dd", classes="kv-note"))
            for element, content in zip(self._texts[name], (figure, note), strict=True):
                element.set_text(content)


class Notice:
    """A message that stands out, or nothing. A screen reader reads it when it changes."""

    def __init__(self, tone: str = "warn") -> None:
        self._element = ui.element("div").classes(f"kv-notice kv-is-{tone}")
        self._element.props["role"] = "alert" if tone == "bad" else "status"
        self._element.set_visibility(False)
        self._shown: tuple[str, tuple[str, ...]] = ("", ())

    def show(self, title: str, lines: Iterable[str] = ()) -> None:
        """title: "": nothing is shown."""
        content = (title, tuple(lines))
        if content == self._shown:
            return
        self._shown = content
        self._element.clear()
        self._element.set_visibility(bool(title))
        with self._element:
            text("strong", title)
            if content[1]:
                with ui.element("ul"):
                    for line in content[1]:
                        text("li", line)

    def show_error(self, error: MeshError) -> None:
        self.show(f"{type(error).__name__}: {error.message}")


class Empty:
    """What a place without data shows: that there is none, and what to do."""

    def __init__(self, title: str, advice: str) -> None:
        self._element = ui.element("div").classes("kv-empty")
        with self._element:
            text("strong", title)
            prose("div", advice)

    def show(self, is_empty: bool) -> None:
        """Shows or hides it."""
        self._element.set_visibility(is_empty)


class Disclosure:
    """A part that the reader opens; `show` of its content is worth a call while it is open."""

    def __init__(self, summary: str, on_open: Callable[[], None]) -> None:
        self.is_open = False
        self._on_open = on_open
        self.element = ui.element("details")
        self.element.on("toggle", self._toggled, js_handler="(e) => emit(e.target.open)")
        with self.element:
            text("summary", summary, "kv-small")

    def _toggled(self, event: Any) -> None:
        self.is_open = bool(event.args)
        if self.is_open:
            self._on_open()


@contextmanager
def field(label: str, id_: str, style: str = "") -> Iterator[ui.element]:
    """Adds a label above an input, whose property `for` is `id_`."""
    with box("kv-field") as element:
        element.style(style)
        text("label", label).props["for"] = id_
        yield element


def text_input(
    label: str,
    id_: str,
    *,
    value: str = "",
    placeholder: str = "",
    style: str = "",
    props: str = "",
) -> ui.input:
    with field(label, id_, style):
        return (
            ui.input(value=value, placeholder=placeholder)
            .props(f'outlined dense for="{id_}" {props}')
            .classes("w-full")
        )


def choice(
    label: str,
    id_: str,
    options: list[str] | dict[str, str],
    value: str,
    on_change: Callable[..., Any] | None = None,
    style: str = "min-width: 150px",
) -> ui.select:
    with field(label, id_, style):
        # A select refuses a value that is no option.
        chosen = value if value in options else None
        return ui.select(options, value=chosen, on_change=on_change).props(
            f'outlined dense options-dense for="{id_}"'
        )


def set_choices(select: ui.select, options: list[str]) -> None:
    """Sets other options; the value stays if it is one of them, else it is the first one."""
    if select.options != options:
        value = select.value if select.value in options else next(iter(options), None)
        select.set_options(options, value=value)


def button(label: str, on_click: Callable[..., Any], classes: str = "kv-button") -> ui.button:
    return ui.button(label, on_click=on_click, color=None).props("flat no-caps").classes(classes)


class Toggle:
    """A button that is pressed or not."""

    def __init__(self, label: str, on_change: Callable[[], None]) -> None:
        self.is_pressed = False
        self._on_change = on_change
        self._button = button(label, self._click)
        self._button.props["aria-pressed"] = "false"

    def _click(self) -> None:
        self.is_pressed = not self.is_pressed
        self._button.props["aria-pressed"] = "true" if self.is_pressed else "false"
        self._button.update()
        self._on_change()
