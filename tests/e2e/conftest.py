"""Lets fixtures know, in time, whether their test has failed."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.e2e.mesh import HAS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Not `session.testsfailed`: that counts once all fixtures have ended, and no first try."""
    report = yield
    before = call.when != "setup" and item.stash.get(HAS_FAILED, False)
    item.stash[HAS_FAILED] = before or report.failed
    return report
