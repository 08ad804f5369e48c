"""Each test that docs/security.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line.strip("| ").split(" | ")
    for line in (ROOT / "docs/security.md").read_text().partition("## Threats")[2].splitlines()
    if line.startswith("| ") and line.count(" | ") == 3
][1:]


def named_tests(cell: str) -> list[tuple[str, list[str]]]:
    """The files of a cell, each with the beginnings of tests in it."""
    found: list[tuple[str, list[str]]] = []
    for name in re.findall(r"`([^`]+)`", cell):
        if name.endswith(".py"):
            found.append((name, []))
        else:
            found[-1][1].append(name.rstrip("…"))
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}"[:80])
def test_each_threat_names_tests_that_exist(row: list[str]) -> None:
    files = named_tests(row[3])
    assert files, "a threat without a test"
    for file, names in files:
        (path,) = (ROOT / "tests").rglob(file)
        for name in names:
            assert f"def test_{name}" in path.read_text(), f"{path}: {name}"
