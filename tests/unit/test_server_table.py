"""The table of servers in docs/engines.md and the tests of `make test-adapters` agree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.adapters.features import COLUMNS, PAGE, PROVED, Cell, proved_cells, read_cells
from worker_svc.conformance.checks import all_checks

ADAPTERS = Path(__file__).parents[1] / "adapters"
# Columns of a mark that names each kind of its test.
_TEXT_COLUMNS = ("llama", "openai")


def marked_cells() -> Iterator[Cell]:
    """Yields the cells that tests name."""
    for path in ADAPTERS.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.cell":
                column, *rows = (ast.literal_eval(one) for one in node.args)
                for one in _TEXT_COLUMNS if column == "*" else (column,):
                    yield from ((one, row) for row in rows)


def test_each_cell_that_is_called_tested_has_a_test_and_each_named_cell_is_one() -> None:
    assert set(marked_cells()) == proved_cells()


def test_the_page_has_the_number_of_checks_of_the_contract_kit() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    counts = set(re.findall(r"\d+ of (\d+)", "\n".join(rows)))
    assert counts == {str(len(all_checks()))}


def test_each_other_cell_states_what_it_is() -> None:
    """Tested, with a stand-in only (*s*), recorded, or not with this server."""
    states = (PROVED, "*s*", "*recorded*", "\u2013")
    cells = read_cells(PAGE.read_text())
    assert {column for column, _ in cells} == set(COLUMNS)
    assert [cell for cell, text in cells.items() if not any(one in text for one in states)] == []
