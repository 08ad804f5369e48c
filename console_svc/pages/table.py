"""A table of one page of rows: the browser receives only what is seen, and only if it changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Any: rows of Quasar's table.
from typing import Any, Generic, TypeVar

from nicegui import ui

from console_svc.pages.paging import PAGE_ROWS, Column, Page, View, page_of
from console_svc.pages.parts import Empty, box, button, text

T = TypeVar("T")

# The heading of a column: a button, so that keys can order the rows.
_HEADER = """
<q-th :props="props" scope="col" :aria-sort="props.col.sorted || undefined">
  <button v-if="props.col.ordered" type="button" class="kv-sort"
      :data-sorted="props.col.sorted !== 'none'"
      @click="() => $parent.$emit('order', props.col.name)">
    {{ props.col.label }}<span aria-hidden="true">{{
      {ascending: '▲', descending: '▼'}[props.col.sorted] || '' }}</span>
  </button>
  <template v-else>{{ props.col.label }}</template>
</q-th>
"""
_CELL = """
<q-td :props="props" :class="props.col.long ? 'kv-wrap' : ''">
  <a v-if="props.row.hrefs[props.col.name]" :href="props.row.hrefs[props.col.name]"
      :class="props.col.code ? 'kv-mono' : ''">{{ props.value }}</a>
  <button v-else-if="props.row.actions[props.col.name]" type="button"
      class="q-btn kv-danger" :aria-label="props.row.actions[props.col.name]"
      @click="() => $parent.$emit('act', props.row.key)">{{ props.value }}</button>
  <span v-else :class="{
      ['kv-' + props.row.tones[props.col.name]]: props.row.tones[props.col.name],
      'kv-mono': props.col.code}">{{ props.value }}</span>
</q-td>
"""


class Table(Generic[T]):
    """A table with headings that order it, pages, and a text for the case without rows."""

    def __init__(
        self,
        caption: str,
        columns: Sequence[Column[T]],
        key: Callable[[T], str],
        empty: tuple[str, str],
        *,
        page_rows: int = PAGE_ROWS,
        view: View | None = None,
        on_action: Callable[[str], Any] | None = None,
        is_chosen: Callable[[T], bool] | None = None,
    ) -> None:
        """
        - key: what identifies a row.
        - empty: title and advice of the empty table.
        - on_action: receives the key of the row whose button was pressed.
        - is_chosen: rows that stand out.
        """
        self._columns = columns
        self._key = key
        self._page_rows = page_rows
        self._view = view or View()
        self._is_chosen = is_chosen
        self._rows: Sequence[T] = ()
        self._shown: tuple[View, list[dict[str, Any]], str] | None = None
        with box("kv-stack"):
            self._empty = Empty(*empty)
            self._table = self._build(caption, on_action)
            self._pages = box_of_pages = ui.element("nav").classes("kv-pages")
            box_of_pages.props["aria-label"] = f"Pages of {caption}"
            with box_of_pages:
                self._previous = button("Previous", lambda: self._turn(-1))
                self._next = button("Next", lambda: self._turn(1))
                self._range = text("span")
                self._range.props["aria-live"] = "polite"

    def _build(self, caption: str, on_action: Callable[[str], Any] | None) -> ui.table:
        table = ui.table(columns=self._quasar_columns(), rows=[], row_key="key", pagination=0)
        table.props("flat dense hide-pagination hide-bottom separator=horizontal")
        table.classes("kv-table")
        table.props["role"] = "group"
        table.props["aria-label"] = caption
        table.props["tabindex"] = "-1"
        table.props(":table-row-class-fn=\"(row) => row.chosen ? 'kv-chosen' : ''\"")
        table.add_slot("header-cell", _HEADER)
        table.add_slot("body-cell", _CELL)
        table.on("order", lambda event: self._order(str(event.args)))
        if on_action is not None:
            table.on("act", lambda event: on_action(str(event.args)))
        return table

    @property
    def page(self) -> Page[T]:
        return page_of(self._rows, self._columns, self._view, self._page_rows)

    def show(self, rows: Sequence[T]) -> None:
        """Shows new rows in the order that the reader chose."""
        self._rows = rows
        self._render()

    def first_page(self) -> None:
        """Returns to the first page: the rows are other ones."""
        self._view = self._view.on_page(0)

    def _order(self, name: str) -> None:
        self._view = self._view.ordered_by(name)
        self._render()

    def _turn(self, by: int) -> None:
        self._view = self._view.on_page(self.page.page + by)
        self._render()

    def _render(self) -> None:
        page = self.page
        rows = [self._quasar_row(row) for row in page.rows]
        shown = (self._view, rows, page.describe())
        if shown == self._shown:
            return
        if self._shown is None or self._shown[0] != self._view:
            self._table.columns = self._quasar_columns()
        self._shown = shown
        self._table.rows = rows
        self._table.set_visibility(bool(rows))
        self._empty.show(not rows)
        self._pages.set_visibility(page.pages > 1)
        self._range.set_text(page.describe())
        self._previous.set_enabled(page.page > 0)
        self._next.set_enabled(page.page + 1 < page.pages)

    def _quasar_columns(self) -> list[dict[str, Any]]:
        return [
            {
                "name": column.name,
                "label": column.label,
                "field": column.name,
                "align": "right" if column.is_number else "left",
                "ordered": column.order is not None,
                "sorted": self._sorted(column),
                "code": column.is_code,
                "long": column.is_long,
            }
            for column in self._columns
        ]

    def _sorted(self, column: Column[T]) -> str:
        if column.order is None:
            return ""
        if self._view.order_by != column.name:
            return "none"
        return "descending" if self._view.is_descending else "ascending"

    def _quasar_row(self, row: T) -> dict[str, Any]:
        columns = self._columns
        return {
            "key": self._key(row),
            "chosen": self._is_chosen is not None and self._is_chosen(row),
            "hrefs": {c.name: c.href(row) for c in columns if c.href is not None},
            "tones": {c.name: c.tone(row) for c in columns if c.tone is not None},
            "actions": {c.name: c.action(row) for c in columns if c.action is not None},
            **{column.name: column.text(row) for column in columns},
        }
