"""`python -m tests.adapters [PYTEST ARGUMENT]...`: the last line is JSON with the counts.

A test that is skipped counts as a failure of the target: something is not installed. So does a cell
of the table in docs/engines.md without a test that has passed, unless arguments choose some tests.

- cells: proved ones by server.
- unproved: those that the table calls tested.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest

from tests.adapters.features import COLUMNS, Cell, proved_cells

COUNTED = ("passed", "failed", "skipped")
TESTS = ("tests/adapters", "tests/integration/test_server_adapter.py")


class Outcomes:
    """Counts outcomes, of set-up too, and collects the cells of tests."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.passed: set[str] = set()
        self.cells: dict[Cell, set[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for mark in item.iter_markers("cell"):
                column, *rows = mark.args
                if column == "*" and hasattr(item, "callspec"):
                    column = item.callspec.params["kind"]
                for row in rows:
                    self.cells.setdefault((column, row), set()).add(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.found[report.outcome] += 1
        if report.when == "call" and report.outcome == "passed":
            self.passed.add(report.nodeid)

    def proved(self) -> frozenset[Cell]:
        """Returns the cells whose tests have all passed."""
        return frozenset(cell for cell, tests in self.cells.items() if tests <= self.passed)


def main() -> int:
    outcomes = Outcomes()
    status = int(pytest.main([*TESTS, *sys.argv[1:]], plugins=[outcomes]))
    expected = proved_cells()
    proved = expected & outcomes.proved()
    unproved = [] if sys.argv[1:] else sorted(": ".join(one) for one in expected - proved)
    result = {
        **{name: outcomes.found[name] for name in COUNTED},
        "cells": {name: sum(column == name for column, _ in proved) for name in COLUMNS},
        "unproved": unproved,
    }
    print(json.dumps(result))
    is_incomplete = outcomes.found["skipped"] or not outcomes.found["passed"] or unproved
    return status or (1 if is_incomplete else 0)


if __name__ == "__main__":
    sys.exit(main())
