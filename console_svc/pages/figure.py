"""A picture of ECharts with its caption."""

from __future__ import annotations

from collections.abc import Callable

# Any: an event of NiceGUI.
from typing import Any

from nicegui import ui

from console_svc.charts.style import Option
from console_svc.pages.parts import text


class Figure:
    """A picture. The browser receives options only if they changed."""

    def __init__(
        self,
        caption: str = "",
        *,
        height: int = 200,
        width: int | None = None,
        on_click: Callable[[int], None] | None = None,
    ) -> None:
        """
        - height, width: in pixels; None: all there is.
        - on_click: receives the place of the point in its series. What it leads to is a link
          of the table beside the picture, too.
        """
        self.element = ui.element("figure").classes("kv-figure")
        self._option: Option = {}
        self._size = (height, width)
        self._on_click = on_click
        self._chart: ui.echart | None = None
        with self.element:
            self._scroll = ui.element("div").classes("kv-scroll")
            self._caption = text("figcaption", caption)
        self._caption.set_visibility(bool(caption))

    def show(
        self, option: Option, *, height: int | None = None, caption: str | None = None
    ) -> None:
        """Draws the options, and changes the height in pixels and the caption if they are given."""
        if caption is not None:
            self._caption.set_text(caption)
            self._caption.set_visibility(bool(caption))
        if option == self._option:
            return
        self._option = option
        if height is not None and height != self._size[0]:
            self._size = (height, self._size[1])
            if self._chart is not None:
                self._chart.style(f"height: {height}px")
        if self._chart is None:
            self._chart = self._build(option)
            return
        self._chart.options.clear()
        self._chart.options.update(option)
        self._chart.update()

    def set_visibility(self, is_visible: bool) -> None:
        self.element.set_visibility(is_visible)

    def _build(self, option: Option) -> ui.echart:
        height, width = self._size
        with self._scroll:
            chart = ui.echart(dict(option), on_point_click=self._clicked, renderer="svg")
        chart.style(f"height: {height}px")
        if width is not None:
            chart.style(f"width: {width}px")
        return chart

    def _clicked(self, event: Any) -> None:
        if self._on_click is not None and event.data_index is not None:
            self._on_click(int(event.data_index))
