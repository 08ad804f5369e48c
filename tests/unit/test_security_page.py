"""Each test that docs/security.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text()


def rows(section: str) -> list[list[str]]:
    """The rows of four cells of a section."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return [
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if line.startswith("| ") and line.count(" | ") == 3
    ][1:]


def named_tests(cell: str) -> list[tuple[str, list[str]]]:
    """The files of a cell, each with the beginnings of tests in it."""
    found: list[tuple[str, list[str]]] = []
    for name in re.findall(r"`([^`]+)`", cell):
        if name.endswith(".py"):
            found.append((name, []))
        elif found:
            found[-1][1].append(name.rstrip("…"))
    return found


def require_tests(files: list[tuple[str, list[str]]]) -> None:
    for file, names in files:
        (path,) = (ROOT / "tests").rglob(file)
        for name in names:
            assert f"def test_{name}" in path.read_text(), f"{path}: {name}"


@pytest.mark.parametrize("row", rows("Threats"), ids=lambda row: f"{row[0]}: {row[1]}"[:80])
def test_each_threat_names_tests_that_exist(row: list[str]) -> None:
    files = named_tests(row[3])
    assert files, "a threat without a test"
    require_tests(files)


@pytest.mark.parametrize(
    "row", rows("A compromised member"), ids=lambda row: f"{row[0]}: {row[1]}"[:80]
)
def test_each_limit_of_a_compromised_member_has_a_test_or_a_reason(row: list[str]) -> None:
    assert row[3], "neither a test nor a reason"
    require_tests(named_tests(row[3]))
