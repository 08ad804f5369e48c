"""The table "what works with which server" of docs/engines.md.

A cell with **T** is proved by the tests that name it: `@pytest.mark.cell(COLUMN, ROW, ...)`. vLLM's
column is that of `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
PROVED = "**T**"
# Column of the marks -> beginning of the column's head in the table.
COLUMNS = {"sglang": "SGLang", "llama": "llama-server", "openai": "other OpenAI APIs"}

Cell = tuple[str, str]


def read_cells(page: str, columns: Mapping[str, str] = COLUMNS) -> Mapping[Cell, str]:
    """Returns the text of each cell by column and row. Raises ValueError without the table.

    columns: as COLUMNS.
    """
    lines = [line for line in page.splitlines() if line.startswith("|")]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    starts = columns.values()
    heads = [all(any(one.startswith(it) for one in row) for it in starts) for row in rows]
    if True not in heads:
        raise ValueError("docs/engines.md has no table of servers")
    at = heads.index(True)
    head = rows[at]
    found = {}
    for row in rows[at + 2 :]:
        if len(row) != len(head):
            break
        for name, start in columns.items():
            (index,) = [n for n, one in enumerate(head) if one.startswith(start)]
            found[name, row[0]] = row[index]
    return found


def proved_cells(columns: Mapping[str, str] = COLUMNS) -> frozenset[Cell]:
    """Returns the cells with **T**."""
    cells = read_cells(PAGE.read_text(), columns)
    return frozenset(one for one, text in cells.items() if PROVED in text)
