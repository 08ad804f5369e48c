"""A pytest plugin that ends the run once a test of each row in `--end-after-rows` has failed."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--end-after-rows", default="", help="rows, joined by commas")


def pytest_configure(config: pytest.Config) -> None:
    rows = {row for row in str(config.getoption("--end-after-rows")).split(",") if row}
    if rows:
        config.pluginmanager.register(_EarlyEnd(rows), "early end")


class _EarlyEnd:
    def __init__(self, rows: set[str]) -> None:
        self._rows_left = rows
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        self._rows_left -= {str(row) for name, row in report.user_properties if name == "row"}
        if not self._rows_left and self._session is not None:
            self._session.shouldfail = "the tests of each row have found the defect"
