"""Order, pages and filters of long tables."""

from __future__ import annotations

from console_svc.pages.paging import Column, View, matches, page_of

_COLUMNS: tuple[Column[tuple[str, int | None]], ...] = (
    Column("name", "Name", lambda r: r[0], lambda r: r[0]),
    Column("load", "Load", lambda r: str(r[1]), lambda r: r[1]),
    Column("note", "Note", lambda r: r[0]),
)
_ROWS = [("b", 2), ("a", None), ("c", 10)]


def _names(view: View, rows: int = 50) -> list[str]:
    return [row[0] for row in page_of(_ROWS, _COLUMNS, view, rows).rows]


def test_unknown_values_are_last_in_both_directions() -> None:
    assert _names(View("load")) == ["b", "c", "a"]
    assert _names(View("load", is_descending=True)) == ["c", "b", "a"]


def test_a_third_click_returns_to_the_order_of_the_rows() -> None:
    view = View().ordered_by("name").ordered_by("name")
    assert view.is_descending
    assert _names(view.ordered_by("name")) == ["b", "a", "c"]


def test_a_column_without_an_order_changes_nothing() -> None:
    assert _names(View("note")) == ["b", "a", "c"]


def test_a_page_beyond_the_end_is_the_last_one() -> None:
    page = page_of(_ROWS, _COLUMNS, View(page=9), 2)
    assert (page.first, page.page, page.pages) == (2, 1, 2)
    assert page.describe() == "3 to 3 of 3"
    assert page_of([], _COLUMNS, View(), 2).describe() == "no rows"


def test_a_filter_needs_each_word_in_some_field() -> None:
    assert matches("Decode rack-a", "decode-0", "RACK-A")
    assert not matches("decode rack-b", "decode-0", "rack-a")
    assert matches("", "anything")
