"""Which rows of a long table are shown: order and page (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

# Any: what a column is ordered by.
from typing import Any, Generic, TypeVar

T = TypeVar("T")
# A column reads rows, so that of several kinds of rows is one of each.
RowT_contra = TypeVar("RowT_contra", contravariant=True)

PAGE_ROWS = 50


@dataclass(frozen=True, slots=True)
class Column(Generic[RowT_contra]):
    """A column of a table."""

    name: str
    label: str
    text: Callable[[RowT_contra], str]
    order: Callable[[RowT_contra], Any] | None = None
    """What rows are ordered by; None: not by this column. Unknown values are last."""

    href: Callable[[RowT_contra], str] | None = None
    """Where the text leads; "": nowhere."""

    tone: Callable[[RowT_contra], str] | None = None
    """`ok`, `warn`, `bad`, `unknown` or "": the colour of the text."""

    action: Callable[[RowT_contra], str] | None = None
    """What a button in the cell is called for a screen reader; its label is the text. "": none."""

    is_number: bool = False
    is_code: bool = False
    is_long: bool = False
    """The text may have several lines."""


@dataclass(frozen=True, slots=True)
class View:
    """What of a table is shown. order_by: name of a column; "": the order of the rows."""

    order_by: str = ""
    is_descending: bool = False
    page: int = 0

    def ordered_by(self, name: str) -> View:
        """Returns the view after a click on a column: ascending, descending, then unordered."""
        if self.order_by != name:
            return View(name)
        return View() if self.is_descending else View(name, is_descending=True)

    def on_page(self, page: int) -> View:
        return replace(self, page=max(0, page))


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """The rows of one page. first: place of the first one in the table, from 0."""

    rows: Sequence[T]
    first: int
    total: int
    page: int
    pages: int

    def describe(self) -> str:
        if not self.total:
            return "no rows"
        return f"{self.first + 1} to {self.first + len(self.rows)} of {self.total:,}"


def page_of(
    rows: Sequence[T], columns: Sequence[Column[T]], view: View, page_rows: int = PAGE_ROWS
) -> Page[T]:
    """Returns the page of a view; the last one if the view is beyond it."""
    column = next((c for c in columns if c.name == view.order_by and c.order is not None), None)
    if column is not None and column.order is not None:
        rows = _ordered(rows, column.order, is_descending=view.is_descending)
    pages = max(1, -(-len(rows) // page_rows))
    page = min(view.page, pages - 1)
    first = page * page_rows
    return Page(rows[first : first + page_rows], first, len(rows), page, pages)


def _ordered(rows: Sequence[T], order: Callable[[T], Any], *, is_descending: bool) -> list[T]:
    known = [row for row in rows if order(row) is not None]
    unknown = [row for row in rows if order(row) is None]
    return sorted(known, key=order, reverse=is_descending) + unknown


def matches(text: str, *fields: str) -> bool:
    """Returns whether each word of `text` occurs in one of the fields; letters of any case."""
    lowered = [field.lower() for field in fields]
    return all(any(word in field for field in lowered) for word in text.lower().split())
